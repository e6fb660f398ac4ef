//! Asks a service for the outcome of an abandoned attempt, or for the response that a completed record lacks.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use http::request::Parts;
use oncegate_core::StoredResponse;

use crate::context::IdempotencyContext;

/// A service that can be asked for the outcome of an attempt whose owner is gone.
///
/// If the operation completes its record itself
/// ([`Settings::with_upstream_completion`](crate::Settings::with_upstream_completion)), the outcome is known. The question is
/// then for the response that the record lacks, and the attempt is the one that completed the record. Nothing is executed after
/// such a question. It is asked without a lease: another process may ask at the same time, and the store keeps one response.
pub trait Reconcile: Send + Sync + 'static {
    /// Finds out the outcome. For an abandoned attempt this runs under a lease, so no other process asks or executes at the same
    /// time. The implementation must limit its time.
    fn reconcile<'a>(
        &'a self,
        context: &'a IdempotencyContext,
        request: &'a Parts,
    ) -> Pin<Box<dyn Future<Output = Reconciled> + Send + 'a>>;
}

/// The service's report about an attempt.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Reconciled {
    /// The operation took place. This is its response, made by
    /// [`Settings::stored_response`](crate::Settings::stored_response).
    Happened(StoredResponse),
    /// The operation took place, and its response cannot be given again, now or later.
    Unreplayable,
    /// The operation did not take place, no earlier attempt can take effect any more, and it may be executed. If the record is
    /// completed, this report is wrong: nothing is executed, and the retry is refused with `replay-unavailable`.
    DidNotHappen,
    /// The service cannot tell, so the outcome stays unknown. If only the response was asked for, the retry is refused with
    /// `response-awaited`, and the next one asks again.
    CannotTell,
}

impl fmt::Debug for dyn Reconcile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reconcile")
    }
}
