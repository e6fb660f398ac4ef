//! The place of a key set, and the results of its fetches.

use std::future::Future;
use std::pin::Pin;

use crate::body::BoxError;

/// A place from which a key set (JWKS) is fetched again and again, such as a file or the URL of an issuer.
pub trait JwksSource: Send + Sync + 'static {
    /// Fetches the key set, as JSON. Called on a runtime of tokio. It is dropped after 5 seconds. It should not read more than
    /// 256 KiB: a larger key set is an error.
    fn fetch(&self) -> Pin<Box<dyn Future<Output = Result<Vec<u8>, BoxError>> + Send + '_>>;

    /// Returns true if only the operator can write to this place. A symmetric key counts only there: with one
    /// that an issuer publishes, every client can make tokens.
    fn is_private(&self) -> bool {
        false
    }
}

/// The result of a fetch of a key set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum JwksFetch {
    /// There is a new key set.
    Fetched,
    /// Nothing was fetched in time.
    Failed,
    /// It is no key set, it is too large, or it has no key for the algorithms: then no token is accepted any more.
    Unusable,
}

impl JwksFetch {
    /// Every result.
    pub const ALL: [Self; 3] = [Self::Fetched, Self::Failed, Self::Unusable];

    /// The name in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Fetched => "fetched",
            Self::Failed => "failed",
            Self::Unusable => "unusable",
        }
    }
}

/// Receives the result of each fetch of a key set.
pub(super) type FetchObserver = Box<dyn Fn(JwksFetch) + Send + Sync>;
