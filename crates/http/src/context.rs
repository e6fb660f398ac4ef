//! What a handler may know of the key it runs under.

use std::fmt;

use http::Extensions;
use oncegate_core::IdempotencyKey;
use oncegate_engine::Attempt;

use crate::refusal::Condition;

/// What a handler may know of the key it runs under: in the extensions of every request that is executed under a key.
///
/// With the feature `axum` it is an extractor: `IdempotencyContext` refuses a request that has no key,
/// `Option<IdempotencyContext>` takes both.
#[derive(Clone)]
pub struct IdempotencyContext {
    key: IdempotencyKey,
    attempt: Attempt,
}

impl IdempotencyContext {
    pub(crate) const fn new(key: IdempotencyKey, attempt: Attempt) -> Self {
        Self { key, attempt }
    }

    /// The context of this request, if it is executed under a key.
    #[must_use]
    pub fn from_extensions(extensions: &Extensions) -> Option<&Self> {
        extensions.get()
    }

    /// The caller's key. To call somebody else's API use [`Attempt::downstream_key`] and not this one: another API has
    /// other callers.
    #[must_use]
    pub const fn key(&self) -> &IdempotencyKey {
        &self.key
    }

    /// The attempt: its token, its number, whether it still owns the record, and keys for calls to other APIs.
    #[must_use]
    pub const fn attempt(&self) -> &Attempt {
        &self.attempt
    }
}

impl fmt::Debug for IdempotencyContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("IdempotencyContext").field(&self.attempt).finish()
    }
}

/// What a handler decides about its answer, over the policy of the route: put it into the extensions of the response, or
/// name it in the header field `Idempotency-Store`, which is taken off before the client sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreDirective {
    /// `replay`: keep the answer and replay it.
    Replay,
    /// `release`: nothing was decided; the key is free again.
    Release,
    /// `tombstone`: done, but the answer must not be kept.
    Tombstone,
    /// `unknown`: it is not known whether the operation took place. The policy for server errors decides.
    Unknown,
}

impl StoreDirective {
    /// The directive of this name.
    #[must_use]
    pub fn from_name(name: &[u8]) -> Option<Self> {
        match name {
            b"replay" => Some(Self::Replay),
            b"release" => Some(Self::Release),
            b"tombstone" => Some(Self::Tombstone),
            b"unknown" => Some(Self::Unknown),
            _ => None,
        }
    }
}

/// Put into the extensions of a response by a service that has no answer, though the operation may have taken place: a
/// proxy whose upstream did not answer. The layer words the answer itself, with this status, and the outcome is unknown, or
/// the key is free again where server errors release it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unanswered(pub http::StatusCode);

/// Put into the extensions of a response by a service that did not begin, because the lease of its attempt was over and could
/// not be [confirmed](Attempt::confirm_lease): a proxy that sent nothing. The layer words the answer itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotBegun;

/// Put into the extensions of a response by a proxy that did not send the request to its upstream: the response is the proxy's
/// own refusal, for this reason. The request counts as refused and not as executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotForwarded(pub Condition);

/// Put into the extensions of a response by a proxy: its body ends where its connection does, so that half of it looks like the
/// whole. It reaches the client and is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unframed;

/// Put into the extensions of a response by a proxy: the answer is somebody else's, so that one that breaks off is a 502
/// and not a 500.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relayed;

#[cfg(feature = "axum")]
mod axum_extractor {
    use std::convert::Infallible;

    use axum_core::extract::{FromRequestParts, OptionalFromRequestParts};
    use http::StatusCode;
    use http::request::Parts;

    use super::IdempotencyContext;

    impl<S: Sync> FromRequestParts<S> for IdempotencyContext {
        type Rejection = (StatusCode, &'static str);

        async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
            let context = Self::from_extensions(&parts.extensions).cloned();
            context.ok_or((StatusCode::BAD_REQUEST, "this operation requires an Idempotency-Key\n"))
        }
    }

    impl<S: Sync> OptionalFromRequestParts<S> for IdempotencyContext {
        type Rejection = Infallible;

        async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
            Ok(Self::from_extensions(&parts.extensions).cloned())
        }
    }
}
