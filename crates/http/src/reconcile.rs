//! Asking what became of an abandoned attempt.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use http::request::Parts;
use oncegate_core::StoredResponse;

use crate::context::IdempotencyContext;

/// Somebody who can be asked what became of an attempt whose owner is gone.
pub trait Reconcile: Send + Sync + 'static {
    /// Finds out. The question is asked under a lease, so nobody else asks or executes at the same time. How long it may
    /// take is for the implementation to bound.
    fn reconcile<'a>(
        &'a self,
        context: &'a IdempotencyContext,
        request: &'a Parts,
    ) -> Pin<Box<dyn Future<Output = Reconciled> + Send + 'a>>;
}

/// What was found out.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Reconciled {
    /// The operation took place; this is its answer. [`Settings::stored`](crate::Settings::stored) makes it of a response.
    Happened(StoredResponse),
    /// The operation took place, and its answer cannot be given again.
    Unreplayable,
    /// The operation did not take place, no earlier attempt can take effect any more, and it may be executed.
    DidNotHappen,
    /// It cannot be told: the outcome stays unknown.
    CannotTell,
}

impl fmt::Debug for dyn Reconcile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reconcile")
    }
}
