//! Asks for the response that a completed record lacks, because every process died before it was added
//! ([`Settings::with_upstream_completion`] with [`Settings::with_reconcile`]).
//!
//! The record shows that the operation took place, so nothing is executed, whatever the service reports.

use std::sync::Arc;

use http::request::Parts;
use oncegate_core::{Completion, IdempotencyKey, StoredResponse};
use oncegate_engine::{AddResponseOutcome, ResponsePermit, catch_panic};

use crate::context::IdempotencyContext;
use crate::execute::NOT_STORED;
use crate::reconcile::Reconciled;
use crate::refusal::{Condition, Refusal};
use crate::settings::Settings;

/// A question for a missing response.
pub(crate) struct Question {
    pub(crate) settings: Arc<Settings>,
    pub(crate) permit: ResponsePermit,
    pub(crate) key: IdempotencyKey,
}

/// The result of the question.
pub(crate) enum QuestionResult {
    /// The response, and its `Idempotency-Status` if the record could not keep it.
    Response(StoredResponse, Option<&'static str>),
    Refused(Refusal),
}

impl Question {
    /// Asks for the response and adds it to the record. Run it in a task of its own, so that a client that hangs up does not
    /// cancel it: the next client gets the response.
    pub(crate) async fn ask(self, parts: Parts) -> QuestionResult {
        let context = IdempotencyContext::new(self.key, self.permit.attempt());
        let asked = match &self.settings.reconcile {
            // A panic reveals nothing about the response.
            Some(reconcile) => catch_panic(reconcile.reconcile(&context, &parts)).await,
            None => Ok(Reconciled::CannotTell),
        };
        let completion = match asked.unwrap_or(Reconciled::CannotTell) {
            Reconciled::Happened(stored) => Completion::Replayable(stored),
            Reconciled::Unreplayable => Completion::Tombstone,
            Reconciled::DidNotHappen => {
                let record = context.attempt().record_id();
                tracing::error!(
                    %record,
                    "the service reports that a request did not happen, but the service's own transaction completed its record; nothing is executed"
                );
                self.permit.refuse();
                return QuestionResult::Refused(Refusal::new(Condition::ReplayUnavailable));
            }
            Reconciled::CannotTell => {
                self.permit.leave();
                return QuestionResult::Refused(awaited());
            }
        };
        let permit = self.permit.with_stored_form(self.settings.stored_form());
        match (permit.add(completion.clone()).await, completion) {
            (AddResponseOutcome::Stored, Completion::Replayable(stored))
            | (AddResponseOutcome::Recorded(stored), _) => QuestionResult::Response(stored, None),
            // The response is right anyway, and the next retry asks again.
            (AddResponseOutcome::NotStored(_), Completion::Replayable(stored)) => {
                QuestionResult::Response(stored, Some(NOT_STORED))
            }
            (
                AddResponseOutcome::Stored
                | AddResponseOutcome::Unreplayable
                | AddResponseOutcome::NotStored(_),
                _,
            ) => QuestionResult::Refused(Refusal::new(Condition::ReplayUnavailable)),
            // Another request has the key by now; the retry is decided anew.
            _ => QuestionResult::Refused(awaited()),
        }
    }
}

/// The refusal of a retry whose request took place, and whose response may be there at the next retry.
pub(crate) fn awaited() -> Refusal {
    Refusal::new(Condition::ResponseAwaited).with_retry_after(1)
}
