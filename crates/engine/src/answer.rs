//! The answer that an operation's own transaction left out of its record, found out by somebody else and added.
//!
//! The transaction has committed, so nothing is executed here, and there is no lease: the record is completed. Several may
//! find out the answer at the same time, in other processes too, and so may the attempt that is still at its end. The store
//! takes the first one, under the attempt's own token, and whoever comes later gets that one.

use std::fmt;
use std::sync::Arc;

use oncegate_core::{
    Answer, Command, Complete, Completion, ErrorChain, Fingerprint, Outcome, Record, State, StoreError,
    StoredResponse,
};
use tokio::time::Instant;

use crate::attempt::Attempt;
use crate::conclude::is_same;
use crate::engine::{ClaimOutcome, ClaimRequest, Inner};
use crate::event::{Event, EventKind};
use crate::single_flight::{Leader, Owner, RemoteOwner, SharedOutcome};

/// The right to add the answer of an operation that completed its record without it.
///
/// It comes only from [`Engine::claim`](crate::Engine::claim), under a policy that
/// [asks for answers](crate::Policy::with_answers_asked_for). It gives no right to execute: the operation took place. While
/// it lives, other claims of this process for the record wait or hear that the request is in progress. Dropped, it changes
/// nothing, and the next claim gets another one.
#[must_use = "an answer permit that is dropped leaves the record without its answer"]
pub struct AnswerPermit {
    inner: Arc<Inner>,
    attempt: Attempt,
    leader: Leader,
}

/// The outcome of [`AnswerPermit::add`].
#[derive(Debug)]
#[non_exhaustive]
pub enum AddAnswerOutcome {
    /// The record has the answer.
    Stored,
    /// The record has this one by now, which came first: everybody gets it.
    Recorded(StoredResponse),
    /// The record says by now that there is no answer to replay.
    Unreplayable,
    /// The record is another one by now: its retention was over. Nothing was changed.
    Gone,
    /// The store did not take it. Nobody goes on trying: the next claim finds it out again.
    NotStored(StoreError),
}

/// How often the record is read because the answer was not taken. It was read once before, so once is enough unless it is
/// another record each time.
const TURNS: usize = 2;

impl AnswerPermit {
    /// The attempt that completed the record: its token, its number. It owns nothing any more.
    #[must_use]
    pub fn attempt(&self) -> Attempt {
        self.attempt.clone()
    }

    /// Adds the answer, or says that there is none to replay and will not be ([`Completion::Tombstone`]). Another completion
    /// is taken for the latter.
    ///
    /// Run it where the caller's going away does not cancel it, such as in a task of its own.
    pub async fn add(self, completion: Completion) -> AddAnswerOutcome {
        let completion = match completion {
            Completion::Replayable(response) => Completion::Replayable(response),
            _ => Completion::Tombstone,
        };
        match self.try_add(&completion).await {
            Ok(added) => self.added(completion, added),
            Err(error) => {
                let record = self.attempt.record_id();
                tracing::warn!(%record, error = %ErrorChain(&error), "an answer that was found out is not stored; the next claim finds it out again");
                self.leader.finish(SharedOutcome::AskAgain);
                AddAnswerOutcome::NotStored(error)
            }
        }
    }

    /// The answer could not be found out now. Those who came along hear that it is awaited, and the next claim gets another
    /// permit.
    pub fn leave(self) {
        self.leader.finish(SharedOutcome::AnswerAwaited);
    }

    /// Whoever was asked says something that cannot be. Those who came along hear that there is no answer to replay; the
    /// record stays as it is, and the next claim gets another permit.
    pub fn refuse(self) {
        self.leader.finish(SharedOutcome::Unreplayable);
    }

    async fn try_add(&self, completion: &Completion) -> Result<AddAnswerOutcome, StoreError> {
        let (id, token) = (self.attempt.record_id(), self.attempt.token());
        let retention = self.attempt.0.policy.retention;
        for _ in 0..TURNS {
            let command = Command::Complete(Complete { token, completion: completion.clone(), retention });
            match self.inner.store.apply(id, command).await? {
                Outcome::Completed => return Ok(AddAnswerOutcome::Stored),
                Outcome::Fenced => {}
                other => {
                    return Err(StoreError::invalid(format!("the store answered {other:?} to an answer")));
                }
            }
            // Somebody was first, or the record is another one.
            let record = self.inner.store.lookup(id).await?;
            match record.filter(|record| record.token == token).map(|record| record.state) {
                Some(State::Completed(Answer::Replayable(response))) => {
                    return Ok(AddAnswerOutcome::Recorded(response));
                }
                Some(State::Completed(Answer::Tombstone)) => return Ok(AddAnswerOutcome::Unreplayable),
                Some(State::Completed(Answer::Awaited)) => {}
                _ => return Ok(AddAnswerOutcome::Gone),
            }
        }
        Ok(AddAnswerOutcome::Gone)
    }

    fn added(self, completion: Completion, added: AddAnswerOutcome) -> AddAnswerOutcome {
        let (event, landing) = match (&added, completion) {
            (AddAnswerOutcome::Stored, Completion::Replayable(response)) => {
                (Some(EventKind::AnswerAdded), SharedOutcome::Replay(response))
            }
            (AddAnswerOutcome::Stored | AddAnswerOutcome::Unreplayable, _) => {
                (None, SharedOutcome::Unreplayable)
            }
            (AddAnswerOutcome::Recorded(own), completion) => {
                let differs = matches!(completion, Completion::Replayable(found) if !is_same(&found, own));
                (differs.then_some(EventKind::AnswerDiffers), SharedOutcome::Replay(own.clone()))
            }
            (AddAnswerOutcome::Gone | AddAnswerOutcome::NotStored(_), _) => (None, SharedOutcome::AskAgain),
        };
        if let Some(event) = event {
            self.emit(event);
        }
        self.leader.finish(landing);
        added
    }

    fn emit(&self, kind: EventKind) {
        self.inner.emit(Event::new(self.attempt.record_id(), Some(self.attempt.token()), kind));
    }
}

impl fmt::Debug for AnswerPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AnswerPermit").field(&self.attempt).finish()
    }
}

impl Inner {
    /// A claim heard that the record is completed and has no answer: whether one may be added to it.
    pub(crate) async fn look_for_answer(
        self: Arc<Self>,
        leader: Leader,
        request: &ClaimRequest,
        number: u64,
    ) -> Result<ClaimOutcome, StoreError> {
        let record = match self.store.lookup(request.id).await {
            Ok(record) => record,
            // The operation took place: that is certain, whatever the store can say now. An outage would let it be executed
            // where the store's outage is to be open.
            Err(error) if error.kind().may_pass() => {
                tracing::warn!(record = %request.id, error = %ErrorChain(&error), "whether an answer is awaited could not be read");
                leader.finish(SharedOutcome::AnswerAwaited);
                return Ok(ClaimOutcome::AnswerAwaited);
            }
            Err(error) => {
                leader.finish(SharedOutcome::Failed(error.kind()));
                return Err(error);
            }
        };
        let (landing, outcome) = match record.map(|record| FoundAnswer::of(record, request.fingerprint)) {
            Some(FoundAnswer::Awaited(record)) => {
                let attempt = Attempt::completed(&self, request.id, &record, request.policy, number);
                let now = Instant::now();
                leader.set_executing(Owner::Remote(RemoteOwner { lease_until: now, since: now }));
                return Ok(ClaimOutcome::AddAnswer(AnswerPermit { inner: self, attempt, leader }));
            }
            Some(FoundAnswer::Answered(response)) => {
                (SharedOutcome::Replay(response.clone()), ClaimOutcome::Replay(response))
            }
            Some(FoundAnswer::Unreplayable) => (SharedOutcome::Unreplayable, ClaimOutcome::Unreplayable),
            // Its retention ended between the claim and the look. The next claim is decided anew.
            Some(FoundAnswer::Another) | None => (SharedOutcome::AskAgain, ClaimOutcome::AnswerAwaited),
        };
        leader.finish(landing);
        Ok(outcome)
    }
}

/// The answer of a completed record on a second look.
enum FoundAnswer {
    Awaited(Record),
    Answered(StoredResponse),
    Unreplayable,
    Another,
}

impl FoundAnswer {
    fn of(record: Record, fingerprint: Fingerprint) -> Self {
        if record.fingerprint != fingerprint {
            return Self::Another;
        }
        match record.state {
            State::Completed(Answer::Awaited) => Self::Awaited(record),
            State::Completed(Answer::Replayable(response)) => Self::Answered(response),
            State::Completed(Answer::Tombstone) => Self::Unreplayable,
            _ => Self::Another,
        }
    }
}
