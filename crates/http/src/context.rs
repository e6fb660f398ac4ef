//! Values that a handler, a proxy and the layer exchange in the extensions of requests and responses.

use std::fmt;

use http::Extensions;
use oncegate_core::IdempotencyKey;
use oncegate_engine::Attempt;

use crate::refusal::Condition;

/// The key and the attempt under which a handler runs. It is in the extensions of every request that is executed
/// under a key.
///
/// With the feature `axum` it is an extractor: `IdempotencyContext` refuses a request that is not executed under a
/// key, `Option<IdempotencyContext>` takes both.
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

    /// The caller's key. To call another API, use [`Attempt::downstream_key`] and not this key: another API has
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

/// The handler's decision about its response, which overrides the policy of the route. Put it into the extensions of
/// the response, or name it in the header field `Idempotency-Store`, which the layer removes before the client sees
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreDirective {
    /// `replay`: keep the response and replay it.
    Replay,
    /// `release`: the operation was not decided; the key is free again.
    Release,
    /// `tombstone`: done, but the response must not be kept.
    Tombstone,
    /// `unknown`: it is not known whether the operation took place, so it is not executed again until an operator has decided.
    /// Under [`with_upstream_completion`](crate::Settings::with_upstream_completion) the record shows it.
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

/// No response: the upstream did not respond, though the operation may have taken place. A proxy puts this into the
/// extensions of its response. The layer writes the response itself, with this status. The outcome is unknown, or the
/// key is free again if server errors release it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoUpstreamResponse(pub http::StatusCode);

/// The operation did not start, because the lease of its attempt had run out and could not be
/// [confirmed](Attempt::confirm_lease). A proxy that sent nothing puts this into the extensions of its response. The
/// layer writes the response itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseExpired;

/// The proxy refused the request itself, for this reason, and sent nothing to its upstream. A proxy puts this into
/// the extensions of its response. The request counts as refused and not as executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProxyRefusal(pub Condition);

/// The end of the connection ends the response body, so a truncated body looks complete. A proxy puts this into the
/// extensions of its response. The response reaches the client and is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CloseDelimited;

/// The response comes from the proxy's upstream. If it breaks off, the client gets a 502 and not a 500. A proxy puts
/// this into the extensions of its response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpstreamResponse;

#[cfg(feature = "axum")]
pub(crate) mod axum_extractor {
    use std::convert::Infallible;

    use axum_core::body::Body;
    use axum_core::extract::{FromRequestParts, OptionalFromRequestParts};
    use http::request::Parts;
    use http::{HeaderName, Response};
    use oncegate_core::IdempotencyKey;

    use super::IdempotencyContext;
    use crate::key::KeyGrammar;
    use crate::refusal::{Condition, Refusal};
    use crate::settings::Settings;

    /// An extractor of the key in the header `Idempotency-Key`, for a handler without the layer, for example one that
    /// commits the key together with its rows. It refuses a request without a valid key.
    ///
    /// Behind the layer use [`IdempotencyContext`], which has the attempt, too.
    #[derive(Clone, Debug)]
    pub struct KeyHeader(pub IdempotencyKey);

    impl<S: Sync> FromRequestParts<S> for KeyHeader {
        type Rejection = Response<Body>;

        async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
            let name = HeaderName::from_static("idempotency-key");
            match KeyGrammar::default().read(&parts.headers, &[name]) {
                Some(Ok((key, ..))) => Ok(Self(key)),
                Some(Err(error)) => Err(reject(Refusal::new(Condition::KeyInvalid).with_detail(error))),
                None => Err(reject(Refusal::new(Condition::KeyMissing))),
            }
        }
    }

    impl<S: Sync> FromRequestParts<S> for IdempotencyContext {
        type Rejection = Response<Body>;

        async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
            let context = Self::from_extensions(&parts.extensions).cloned();
            context.ok_or_else(|| reject(Refusal::new(Condition::KeyMissing)))
        }
    }

    impl<S: Sync> OptionalFromRequestParts<S> for IdempotencyContext {
        type Rejection = Infallible;

        async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
            Ok(Self::from_extensions(&parts.extensions).cloned())
        }
    }

    fn reject(refusal: Refusal) -> Response<Body> {
        refusal.into_response(&Settings::default(), None).map(Body::from)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[tokio::test]
        async fn a_key_is_read_from_its_header_and_a_missing_or_invalid_one_is_refused() {
            for (header, expected) in [
                (Some("\"order-123\""), Ok("order-123")),
                (Some("order-123"), Ok("order-123")),
                (Some("\"order"), Err("key-invalid")),
                (None, Err("key-missing")),
            ] {
                let mut request = http::Request::new(());
                if let Some(header) = header {
                    request.headers_mut().insert("idempotency-key", header.parse().unwrap());
                }
                let mut parts = request.into_parts().0;
                match (KeyHeader::from_request_parts(&mut parts, &()).await, expected) {
                    (Ok(KeyHeader(key)), Ok(expected)) => assert_eq!(key.as_str(), Some(expected)),
                    (Err(response), Err(expected)) => {
                        assert_eq!(response.status(), 400);
                        assert_eq!(response.headers()["content-type"], "application/problem+json");
                        let refused =
                            response.extensions().get::<Refusal>().map(|refusal| refusal.condition.slug());
                        assert_eq!(refused, Some(expected));
                    }
                    (found, _) => panic!("{header:?}: {found:?}"),
                }
            }
        }
    }
}
