//! Asking what became of an abandoned attempt, and for the answer of one that completed its record without it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use http::request::Parts;
use oncegate_core::StoredResponse;

use crate::context::IdempotencyContext;

/// A service that can be asked for the outcome of an attempt whose owner is gone.
///
/// If the operation completes its record itself
/// ([`Settings::with_upstream_completion`](crate::Settings::with_upstream_completion)), it is known what became of it; there,
/// the question is for the answer that the record has not got, and the attempt is the one that completed it. Nothing is
/// executed after such a question, and it is asked under no lease: another process may ask at the same time, which the store
/// settles.
pub trait Reconcile: Send + Sync + 'static {
    /// Finds out. For an abandoned attempt the question is asked under a lease, so no other process asks or executes at the same
    /// time. How long it may take is for the implementation to bound.
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
    /// The operation took place; this is its answer. [`Settings::stored`](crate::Settings::stored) makes it of a response.
    Happened(StoredResponse),
    /// The operation took place, and its answer cannot be given again, now or later.
    Unreplayable,
    /// The operation did not take place, no earlier attempt can take effect any more, and it may be executed. Where the record
    /// says that it did, this is wrong: nothing is executed, and the retry hears that the answer cannot be replayed.
    DidNotHappen,
    /// It cannot be told: the outcome stays unknown. Where only the answer is asked for, the retry hears `answer-awaited`, and
    /// the next one asks again.
    CannotTell,
}

impl fmt::Debug for dyn Reconcile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reconcile")
    }
}
