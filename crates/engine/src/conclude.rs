//! The end of an attempt whose operation completes its record itself, inside the transaction that holds its effect.
//!
//! The record counts more here than the response of the operation, because the transaction has committed the effect and the
//! record, or neither. So the record is read first. Then there is nothing to do, or the response is added, or, if nothing was
//! committed, the key is freed. This never waits for an open transaction, and never undoes one that commits in the meantime:
//! the store compares the token and the state with each write.

use std::fmt;
use std::sync::Arc;

use oncegate_core::{
    Command, Complete, Completion, ErrorChain, Outcome, Record, RecordedResponse, Release, State, StoreError,
    StoredResponse,
};
use tokio::time::{Duration, Instant};

use crate::attempt::{HeldPermit, Permit, again_after};
use crate::event::EventKind;
use crate::single_flight::SharedOutcome;

/// The result that an operation reports if it completes its record itself.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum OperationReport {
    /// A response that decides: it will be replayed, or it cannot be ([`Completion::Tombstone`]).
    Response {
        /// The completion for the record, unless the operation's own transaction has already stored a response.
        completion: Completion,
        /// True if the response reports a success. Then the operation's own transaction should have completed the record.
        success: bool,
        /// The form of the completion. A response that the operation's own transaction has stored is compared in this form.
        form: StoredForm,
    },
    /// No response, or one that decides nothing (a server error). Only the record shows if the effect took place.
    NoResponse,
}

impl OperationReport {
    /// The report of a response that decides.
    #[must_use]
    pub const fn response(completion: Completion, success: bool) -> Self {
        Self::Response { completion, success, form: StoredForm::UNCHANGED }
    }
}

/// The form in which records keep the responses of an operation, such as one without members that must not be stored.
///
/// An operation that stores its response itself may store another form. Both are compared in this one.
#[derive(Clone, Default)]
pub struct StoredForm(Option<Arc<FormOf>>);

type FormOf = dyn Fn(&StoredResponse) -> Option<StoredResponse> + Send + Sync;

impl StoredForm {
    /// Responses are kept as they are.
    pub const UNCHANGED: Self = Self(None);

    /// The form that this function makes; `None` for a response that no record would keep.
    pub fn new(form: impl Fn(&StoredResponse) -> Option<StoredResponse> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(form)))
    }

    /// Returns true if a response that has this form is the same as one that the operation stored.
    pub(crate) fn is_same(&self, response: &StoredResponse, own: &StoredResponse) -> bool {
        match &self.0 {
            None => is_same(response, own),
            Some(form) => form(own).is_some_and(|own| is_same(response, &own)),
        }
    }
}

impl fmt::Debug for StoredForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredForm").field("is_unchanged", &self.0.is_none()).finish_non_exhaustive()
    }
}

/// The outcome of [`Permit::report`].
#[derive(Debug)]
#[non_exhaustive]
pub enum ReportOutcome {
    /// The record has the response.
    Stored,
    /// The operation's own transaction stored this response in the record. All callers get it.
    Recorded(StoredResponse),
    /// The operation took place, and the record has no response to replay.
    Unreplayable,
    /// The operation took place, and the record has no response yet. The next claim may find it out, because the policy
    /// [recovers responses](crate::Policy::with_response_recovery).
    Awaited,
    /// The operation did not take place, and no longer can. The key is free.
    Released,
    /// Another attempt owns the record. A transaction of this attempt that has not committed can no longer commit.
    Fenced,
    /// The result is not known yet: an open transaction holds the record, or the store is unreachable. The engine tries again
    /// until the lease ends. After that, the next claim decides.
    Deferred(StoreError),
}

/// The outcome of one try, and an additional event.
type Conclusion = (ReportOutcome, Option<EventKind>);

impl Permit {
    /// Ends the attempt of an operation that completes its record itself. Returns when the store has made all writes durable,
    /// or has failed.
    pub async fn report(mut self, report: OperationReport) -> ReportOutcome {
        match self.0.take() {
            Some(held) => held.conclude(report).await,
            None => ReportOutcome::Fenced,
        }
    }
}

/// The interval of log lines about services that did not complete their record.
pub(crate) const COMPLETION_MISSING_INTERVAL: Duration = Duration::from_secs(10);

/// The limit on reads of the record if it changes between the read and the write. It changes at most twice: it is completed,
/// and another attempt claims it.
const MAX_TURNS: usize = 3;

impl HeldPermit {
    async fn conclude(self, report: OperationReport) -> ReportOutcome {
        self.emit(EventKind::Executed);
        match self.try_conclude(&report).await {
            Ok(tried) => self.concluded(report, tried),
            Err(error) => {
                self.emit(EventKind::SettlementDeferred(error.kind()));
                self.conclude_later(report);
                ReportOutcome::Deferred(error)
            }
        }
    }

    async fn try_conclude(&self, report: &OperationReport) -> Result<Conclusion, StoreError> {
        let (id, token) = (self.attempt.record_id(), self.attempt.token());
        let retention = self.attempt.0.policy.retention;
        for _ in 0..MAX_TURNS {
            let record = self.inner.store.lookup(id).await?;
            let Some(record) = record.filter(|record| record.token == token) else { break };
            let asks = self.attempt.0.policy.recovers_responses;
            let (command, note) = match next(record, report) {
                NextWrite::Nothing((ReportOutcome::Awaited, note)) if !asks => {
                    return Ok((ReportOutcome::Unreplayable, note));
                }
                NextWrite::Nothing(tried) => return Ok(tried),
                NextWrite::Complete(completion, note) => {
                    let completion = completion.clone();
                    (Command::Complete(Complete { token, completion, retention }), note)
                }
                NextWrite::Release => {
                    let retention = self.attempt.0.policy.released_retention();
                    (Command::Release(Release { token, retention }), None)
                }
            };
            match self.inner.store.apply(id, command).await? {
                Outcome::Completed => return Ok((ReportOutcome::Stored, note)),
                Outcome::Released => return Ok((ReportOutcome::Released, None)),
                // The transaction committed in between, or another attempt took over: read again.
                Outcome::Fenced => {}
                other => {
                    let what = format!("the store answered {other:?} to the end of an attempt");
                    return Err(StoreError::invalid(what));
                }
            }
        }
        Ok((ReportOutcome::Fenced, None))
    }

    fn concluded(mut self, report: OperationReport, (concluded, note): Conclusion) -> ReportOutcome {
        let (event, shared) = match (&concluded, report) {
            (ReportOutcome::Fenced | ReportOutcome::Deferred(_), report) => {
                // A service whose transaction could not commit reports no success.
                if matches!(report, OperationReport::Response { success: true, .. }) {
                    self.attempt.log_fenced();
                }
                self.fenced();
                return concluded;
            }
            (ReportOutcome::Recorded(response), _) => {
                (EventKind::Completed, SharedOutcome::Replay(response.clone()))
            }
            (
                ReportOutcome::Stored,
                OperationReport::Response { completion: Completion::Replayable(response), .. },
            ) => (EventKind::Completed, SharedOutcome::Replay(response)),
            (ReportOutcome::Awaited, _) => (EventKind::Tombstoned, SharedOutcome::AskAgain),
            (ReportOutcome::Stored | ReportOutcome::Unreplayable, _) => {
                (EventKind::Tombstoned, SharedOutcome::Unreplayable)
            }
            (ReportOutcome::Released, _) => (EventKind::Released, SharedOutcome::AskAgain),
        };
        self.inner.renewer.stop(&self.attempt);
        if let Some(note) = note {
            self.emit(note);
            if note == EventKind::CompletionMissing
                && let Some(suppressed) = self.inner.completion_missing.pass()
            {
                let record = self.attempt.record_id();
                tracing::warn!(
                    %record,
                    suppressed,
                    "the service reported a success, but its transaction had not completed the record: after a crash in \
                     between, the operation would have run twice"
                );
            }
        }
        self.emit(event);
        if matches!(concluded, ReportOutcome::Released) {
            self.retract_late_claim();
        }
        self.leader.finish(shared);
        concluded
    }

    /// Tries again in the background until the lease ends, which is no longer renewed. Until then, other claims of this process
    /// get `InProgress`.
    fn conclude_later(self, report: OperationReport) {
        self.inner.renewer.stop(&self.attempt);
        let held = match &report {
            OperationReport::Response { completion: Completion::Replayable(response), .. } => {
                match self.inner.hold_response(response) {
                    Some(held) => Some(held),
                    // The record shows if the operation took place, and the next claim reads it.
                    None => return self.emit(EventKind::SettlementLost),
                }
            }
            _ => None,
        };
        let inner = self.inner.clone();
        inner.tasks.spawn(async move {
            let _held = held;
            let give_up = self.attempt.lease_until();
            let mut pause = Duration::from_millis(50);
            loop {
                let again = (Instant::now() + pause).min(give_up);
                tokio::time::sleep_until(again).await;
                match self.try_conclude(&report).await {
                    Ok(tried) => return drop(self.concluded(report, tried)),
                    Err(error) if !error.kind().may_pass() || again >= give_up => {
                        let record = self.attempt.record_id();
                        tracing::warn!(%record, error = %ErrorChain(&error), "an attempt was not concluded; the next claim decides");
                        return self.emit(EventKind::SettlementLost);
                    }
                    Err(error) => pause = again_after((pause * 2).min(Duration::from_secs(2)), &error),
                }
            }
        });
    }
}

/// The next write to a record that the attempt owns.
enum NextWrite<'a> {
    Nothing(Conclusion),
    Complete(&'a Completion, Option<EventKind>),
    Release,
}

fn next(record: Record, report: &OperationReport) -> NextWrite<'_> {
    let upstream = Some(EventKind::CompletedUpstream);
    match (record.state, report) {
        // Another process sealed it, and this one opens no sealed responses: no client must get its encrypted form.
        (State::Completed(RecordedResponse::Replayable(own)), report) if own.is_sealed() => match report {
            OperationReport::Response { completion: Completion::Replayable(_), .. } => {
                NextWrite::Nothing((ReportOutcome::Stored, upstream))
            }
            _ => NextWrite::Nothing((ReportOutcome::Awaited, upstream)),
        },
        (
            State::Completed(RecordedResponse::Replayable(own)),
            OperationReport::Response { completion, form, .. },
        ) => {
            match completion {
                // Perhaps an earlier try stored it, and its reply was lost.
                Completion::Replayable(response) if *response == own => {
                    NextWrite::Nothing((ReportOutcome::Stored, upstream))
                }
                Completion::Replayable(response) if !form.is_same(response, &own) => {
                    NextWrite::Nothing((ReportOutcome::Recorded(own), Some(EventKind::ResponseDiffers)))
                }
                _ => NextWrite::Nothing((ReportOutcome::Recorded(own), upstream)),
            }
        }
        (State::Completed(RecordedResponse::Replayable(own)), OperationReport::NoResponse) => {
            NextWrite::Nothing((ReportOutcome::Recorded(own), upstream))
        }
        (State::Completed(RecordedResponse::Awaited), OperationReport::Response { completion, .. }) => {
            match completion {
                Completion::Replayable(_) => NextWrite::Complete(completion, Some(EventKind::ResponseAdded)),
                _ => NextWrite::Complete(completion, upstream),
            }
        }
        (State::Completed(RecordedResponse::Awaited), OperationReport::NoResponse) => {
            NextWrite::Nothing((ReportOutcome::Awaited, upstream))
        }
        (State::Completed(_), _) => NextWrite::Nothing((ReportOutcome::Unreplayable, upstream)),
        // An earlier try released it and its reply was lost, or an operator released it and so fenced the attempt.
        (State::Released, OperationReport::NoResponse) => NextWrite::Nothing((ReportOutcome::Released, None)),
        (State::Released, OperationReport::Response { .. }) => {
            NextWrite::Nothing((ReportOutcome::Fenced, None))
        }
        (_, OperationReport::Response { completion, success, .. }) => {
            NextWrite::Complete(completion, success.then_some(EventKind::CompletionMissing))
        }
        (_, OperationReport::NoResponse) => NextWrite::Release,
    }
}

/// True if two responses are equal except for the order of their header fields.
fn is_same(one: &StoredResponse, other: &StoredResponse) -> bool {
    fn fields(response: &StoredResponse) -> Vec<(&str, &[u8])> {
        let mut fields: Vec<_> = response.headers().collect();
        fields.sort_unstable();
        fields
    }
    one.status() == other.status() && one.body() == other.body() && fields(one) == fields(other)
}
