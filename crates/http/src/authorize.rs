//! Asks a service before a replay if the caller may still get the response.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use http::StatusCode;
use http::request::Parts;

use crate::refusal::{Condition, Refusal};

/// A service that decides if a caller may get the response to an earlier request of the same caller again.
pub trait Authorize: Send + Sync + 'static {
    /// Decides for the caller of this request, which is a retry. The implementation must limit its time.
    fn authorize<'a>(
        &'a self,
        request: &'a Parts,
    ) -> Pin<Box<dyn Future<Output = Authorization> + Send + 'a>>;
}

/// The decision of a service about a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Authorization {
    /// The caller gets the response.
    Allowed,
    /// The caller does not get the response. The retry is refused with this status, or with 403 if it is not from 400 to 499.
    Denied(StatusCode),
    /// There is no decision. The retry is refused with this status, or with 503 if it is not from 500 to 599.
    CannotTell(StatusCode),
}

impl Authorization {
    /// The refusal of a retry that gets no replay.
    pub(crate) fn refusal(self) -> Option<Refusal> {
        match self {
            Self::Allowed => None,
            Self::Denied(status) => {
                let refusal = Refusal::new(Condition::ReplayDenied);
                Some(refusal.with_status(Some(status).filter(StatusCode::is_client_error)))
            }
            Self::CannotTell(status) => {
                let refusal = Refusal::new(Condition::AuthorizationUnavailable).with_retry_after(1);
                Some(refusal.with_status(Some(status).filter(StatusCode::is_server_error)))
            }
        }
    }
}

impl fmt::Debug for dyn Authorize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Authorize")
    }
}
