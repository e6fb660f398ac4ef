//! Adds the response that an operation's own transaction left out of its record, after another claim has found it out.
//!
//! The transaction has committed and the record is completed, so nothing is executed here and there is no lease. Several
//! claims may find out the response at the same time, in several processes, and the attempt itself may still add it. The
//! store accepts the first one, under the attempt's own token. Later ones get that response.

use std::fmt;
use std::sync::Arc;

use oncegate_core::{
    Command, Complete, Completion, ErrorChain, Fingerprint, Outcome, Record, RecordedResponse, State,
    StoreError, StoredResponse,
};
use tokio::time::Instant;

use crate::attempt::Attempt;
use crate::conclude::StoredForm;
use crate::engine::{ClaimOutcome, ClaimRequest, Inner};
use crate::event::{Event, EventKind};
use crate::lead::still_sealed;
use crate::single_flight::{Leader, Owner, RemoteOwner, SharedOutcome};

/// The right to add the response of an operation that completed its record without it.
///
/// It comes only from [`Engine::claim`](crate::Engine::claim), under a policy that
/// [recovers responses](crate::Policy::with_response_recovery). It gives no right to execute: the operation took place. While
/// it lives, other claims of this process for the record wait or get `InProgress`. Dropping it changes nothing, and the next
/// claim gets another one.
#[must_use = "a response permit that is dropped leaves the record without its response"]
pub struct ResponsePermit {
    inner: Arc<Inner>,
    attempt: Attempt,
    leader: Leader,
    form: StoredForm,
}

/// The outcome of [`ResponsePermit::add`].
#[derive(Debug)]
#[non_exhaustive]
pub enum AddResponseOutcome {
    /// The record has the response.
    Stored,
    /// Another response was added first. All callers get that one.
    Recorded(StoredResponse),
    /// The record was completed without a response to replay in the meantime.
    Unreplayable,
    /// The record was replaced in the meantime, because its retention was over. Nothing was changed.
    Gone,
    /// The store did not store it. The engine does not try again: the next claim finds out the response again.
    NotStored(StoreError),
}

/// The limit on reads of the record after the store refused the response. One is enough, unless the record changes each time.
const MAX_TURNS: usize = 2;

impl ResponsePermit {
    /// The attempt that completed the record. It no longer owns the record.
    #[must_use]
    pub fn attempt(&self) -> Attempt {
        self.attempt.clone()
    }

    /// Sets the form of the response. If the operation stored another response first, both are compared in this form.
    pub fn with_stored_form(self, form: StoredForm) -> Self {
        Self { form, ..self }
    }

    /// Adds the response, or records that there is none to replay ([`Completion::Tombstone`]). Other completions count as the
    /// latter.
    ///
    /// Run it in a task of its own, so that a caller that goes away does not cancel it.
    pub async fn add(self, completion: Completion) -> AddResponseOutcome {
        let completion = match completion {
            Completion::Replayable(response) => Completion::Replayable(response),
            _ => Completion::Tombstone,
        };
        match self.try_add(&completion).await {
            Ok(added) => self.added(completion, added),
            Err(error) => {
                let record = self.attempt.record_id();
                tracing::warn!(%record, error = %ErrorChain(&error), "a response could not be added to its record; the next claim asks for it again");
                self.leader.finish(SharedOutcome::AskAgain);
                AddResponseOutcome::NotStored(error)
            }
        }
    }

    /// Gives up, because the response could not be found out now. Waiting claims get `ResponseAwaited`, and the next claim gets
    /// another permit.
    pub fn leave(self) {
        self.leader.finish(SharedOutcome::ResponseAwaited);
    }

    /// Gives up, because the service gave an invalid response. Waiting claims get `Unreplayable`. The record is unchanged, and
    /// the next claim gets another permit.
    pub fn refuse(self) {
        self.leader.finish(SharedOutcome::Unreplayable);
    }

    async fn try_add(&self, completion: &Completion) -> Result<AddResponseOutcome, StoreError> {
        let (id, token) = (self.attempt.record_id(), self.attempt.token());
        let retention = self.attempt.0.policy.retention;
        for _ in 0..MAX_TURNS {
            let command = Command::Complete(Complete { token, completion: completion.clone(), retention });
            match self.inner.store.apply(id, command).await? {
                Outcome::Completed => return Ok(AddResponseOutcome::Stored),
                Outcome::Fenced => {}
                other => {
                    return Err(StoreError::invalid(format!("the store answered {other:?} to a response")));
                }
            }
            // Another response came first, or the record was replaced.
            let record = self.inner.store.lookup(id).await?;
            match record.filter(|record| record.token == token).map(|record| record.state) {
                Some(State::Completed(RecordedResponse::Replayable(response))) if response.is_sealed() => {
                    return Err(still_sealed());
                }
                Some(State::Completed(RecordedResponse::Replayable(response))) => {
                    return Ok(AddResponseOutcome::Recorded(response));
                }
                Some(State::Completed(RecordedResponse::Tombstone)) => {
                    return Ok(AddResponseOutcome::Unreplayable);
                }
                Some(State::Completed(RecordedResponse::Awaited)) => {}
                _ => return Ok(AddResponseOutcome::Gone),
            }
        }
        Ok(AddResponseOutcome::Gone)
    }

    fn added(self, completion: Completion, added: AddResponseOutcome) -> AddResponseOutcome {
        let (event, shared) = match (&added, completion) {
            (AddResponseOutcome::Stored, Completion::Replayable(response)) => {
                (Some(EventKind::ResponseAdded), SharedOutcome::Replay(response))
            }
            (AddResponseOutcome::Stored | AddResponseOutcome::Unreplayable, _) => {
                (None, SharedOutcome::Unreplayable)
            }
            (AddResponseOutcome::Recorded(own), completion) => {
                let form = &self.form;
                let differs =
                    matches!(completion, Completion::Replayable(found) if !form.is_same(&found, own));
                (differs.then_some(EventKind::ResponseDiffers), SharedOutcome::Replay(own.clone()))
            }
            (AddResponseOutcome::Gone | AddResponseOutcome::NotStored(_), _) => {
                (None, SharedOutcome::AskAgain)
            }
        };
        if let Some(event) = event {
            self.emit(event);
        }
        self.leader.finish(shared);
        added
    }

    fn emit(&self, kind: EventKind) {
        self.inner.emit(Event::new(self.attempt.record_id(), Some(self.attempt.token()), kind));
    }
}

impl fmt::Debug for ResponsePermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ResponsePermit").field(&self.attempt).finish()
    }
}

impl Inner {
    /// Reads a record that a claim found completed without a response, and decides if the claim may add it.
    pub(crate) async fn find_response(
        self: Arc<Self>,
        leader: Leader,
        request: &ClaimRequest,
        number: u64,
    ) -> Result<ClaimOutcome, StoreError> {
        let record = match self.store.lookup(request.id).await {
            Ok(record) => record,
            // The operation took place, even if the store fails now. The error of an outage must not be returned: under
            // `store-outage = "open"` it would let the operation run again.
            Err(error) if error.kind().may_pass() => {
                tracing::warn!(record = %request.id, error = %ErrorChain(&error), "a completed record could not be read to see if its response is missing");
                leader.finish(SharedOutcome::ResponseAwaited);
                return Ok(ClaimOutcome::ResponseAwaited);
            }
            Err(error) => {
                leader.finish(SharedOutcome::Failed((&error).into()));
                return Err(error);
            }
        };
        let (shared, outcome) = match record.map(|record| FoundRecord::of(record, request.fingerprint)) {
            Some(FoundRecord::Awaited(record)) => {
                let attempt = Attempt::completed(&self, request.id, &record, request.policy, number);
                let now = Instant::now();
                leader.set_executing(Owner::Remote(RemoteOwner { lease_until: now, since: now }));
                let form = StoredForm::UNCHANGED;
                return Ok(ClaimOutcome::AddResponse(ResponsePermit { inner: self, attempt, leader, form }));
            }
            Some(FoundRecord::Replayable(response)) if response.is_sealed() => {
                let error = still_sealed();
                leader.finish(SharedOutcome::Failed((&error).into()));
                return Err(error);
            }
            Some(FoundRecord::Replayable(response)) => {
                (SharedOutcome::Replay(response.clone()), ClaimOutcome::Replay(response))
            }
            Some(FoundRecord::Unreplayable) => (SharedOutcome::Unreplayable, ClaimOutcome::Unreplayable),
            // Its retention ended between the claim and the read. The next claim is decided anew.
            Some(FoundRecord::Another) | None => (SharedOutcome::AskAgain, ClaimOutcome::ResponseAwaited),
        };
        leader.finish(shared);
        Ok(outcome)
    }
}

/// The state of a completed record on a second read.
enum FoundRecord {
    Awaited(Record),
    Replayable(StoredResponse),
    Unreplayable,
    Another,
}

impl FoundRecord {
    fn of(record: Record, fingerprint: Fingerprint) -> Self {
        if record.fingerprint != fingerprint {
            return Self::Another;
        }
        match record.state {
            State::Completed(RecordedResponse::Awaited) => Self::Awaited(record),
            State::Completed(RecordedResponse::Replayable(response)) => Self::Replayable(response),
            State::Completed(RecordedResponse::Tombstone) => Self::Unreplayable,
            _ => Self::Another,
        }
    }
}
