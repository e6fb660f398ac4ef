//! Steps: recovery points inside an attempt, and their compensations.
//!
//! An operation that calls several other APIs cannot commit all calls together. If it consists of [steps](Attempt::step), a
//! later execution continues after the last finished step, and each call is always sent under the same key.
//!
//! In detail, `attempt.step("charge", …).compensate(…).await` does this:
//! 1. An attempt that is not the first reads the record once. If the step is recorded, its result is returned and nothing runs.
//!    If another step is recorded in its place, the code has changed: [`StepError::Differs`], and nothing runs.
//! 2. Otherwise the closure runs. Its argument is the key for the call: [`Attempt::downstream_key`] of the step's name.
//! 3. Its value is recorded under the attempt's token before the step ends. An attempt that no longer owns the record gets
//!    [`StepError::Fenced`] and must stop.
//! 4. [`StepFailure::Unsure`], which `?` makes of any error, ends the attempt, but not the operation. The next attempt runs this
//!    step again, under the same key.
//! 5. [`StepFailure::Final`] means that the step did not take place and never will. It is recorded. Then the finished steps are
//!    taken back in the opposite order. Each compensation is a recorded step with its own key, so after a crash the next
//!    attempt continues with the next compensation. The result is [`StepError::Failed`], the same in every later attempt.
//! 6. The operation may also end with an error of its own after finished steps: with [`Attempt::fail`], or with an error that a
//!    function returns and that is stored. The error is recorded first, then the steps are taken back as in 5. Only then is the
//!    error the result of the operation.
//!
//! The effect of a step takes place once if the called API honours the key. Otherwise a crash between the effect and its record
//! repeats the effect.
//!
//! Steps run one after the other, in the order of the code. A record holds at most [`limits::MAX_STEPS`]. They are kept over
//! leases, releases and restarts until the record is completed.

use std::convert::Infallible;
use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;

use bytes::Bytes;
use oncegate_core::{Command, ErrorChain, OnAbandoned, Outcome, RecordStep, Step, StoreError, limits};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::time::{Duration, Instant};

use crate::attempt::{Attempt, again_after};
use crate::function::ErrorFate;
use crate::function::value;

/// The prefix of the engine's own step names.
const OWN: char = '~';

/// The name of the step that keeps the input of a resumable function.
pub(crate) const INPUT: &str = "~input";

/// The largest input, in bytes of its JSON: half of the limit for all steps of a record.
pub(crate) const MAX_INPUT_BYTES: usize = limits::MAX_STEPS_BYTES / 2;

/// The prefix of the name of a compensation.
const UNDO: &str = "~undo ";

/// The most bytes that a compensation records: the reason of its failure, cut to `MAX_REASON_CHARS` characters of at most six
/// bytes in JSON.
const MAX_UNDO_RESULT_BYTES: usize = 1024;
const MAX_REASON_CHARS: usize = 160;

/// The mark of a first step that may have taken place. With it, the released record has a step and is not free for other
/// requests.
const BEGUN: &str = "~begun";

/// The names under which an error of the operation is recorded before the first compensation: an error of [`Attempt::fail`],
/// and an error that a function returned or a response reports.
const FAIL: &str = "~fail";
const ERROR: &str = "~error";

/// The record of such an error that is too large or has no JSON.
const NO_ERROR: &[u8] = b"null";

/// The failure of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepFailure<E> {
    /// The step did not take place and never will: declined, out of stock. The finished steps before it are taken back.
    Final(E),
    /// The step may have taken place, or may succeed later: a time-out, a server error. The attempt ends, and the next one runs
    /// the step again under the same key.
    Unsure(E),
}

/// Makes [`StepFailure::Unsure`]: only explicit code may claim that a step did not take place.
impl<E> From<E> for StepFailure<E> {
    fn from(error: E) -> Self {
        Self::Unsure(error)
    }
}

/// The error of a step: the reason why it has no value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum StepError<E> {
    /// The step failed for good, and the finished steps before it are taken back.
    #[error("{0}")]
    Failed(E),
    /// The outcome of the step is unknown, or it must be tried again: execute the operation again, under its key.
    #[error("the outcome is unknown; execute the operation again under its key: {0}")]
    Unsure(E),
    /// A compensation must be tried again: execute the operation again, under its key.
    #[error("{step:?} is not taken back yet; execute the operation again under its key: {reason}")]
    NotCompensated {
        /// The step that it takes back.
        step: String,
        /// The error text.
        reason: String,
    },
    /// A compensation failed for good; the others succeeded. An operator has to take the step back and resolve the record.
    #[error("{step:?} cannot be taken back; an operator has to do it: {reason}")]
    Stuck {
        /// The step that it takes back.
        step: String,
        /// The error text.
        reason: String,
    },
    /// Another attempt owns the record. Stop: it continues the operation.
    #[error("another attempt continues the operation")]
    Fenced,
    /// Another step was recorded in this place: the code has changed. Nothing was run. The operation continues with code that
    /// matches the record.
    #[error(
        "step {number} is recorded as {recorded:?}, but the code has another step there: the code has changed"
    )]
    Differs {
        /// The number of the step, from 0.
        number: usize,
        /// The step that is recorded.
        recorded: String,
    },
    /// The recorded result cannot be read as the requested type. Nothing was run.
    #[error("the recorded result of {step:?} cannot be read: {reason}")]
    Undecodable {
        /// The step.
        step: String,
        /// The mismatch, without any part of the value.
        reason: String,
    },
    /// The step took place, but its result could not be recorded.
    #[error("the step took place but could not be recorded: {reason}")]
    NotRecorded {
        /// The error text.
        reason: String,
    },
    /// The step was not run. Its name is out of bounds, starts with `~` or was used before; another step was still running; an
    /// earlier step failed; or the record cannot hold it together with the compensations that may follow.
    #[error("the step was not run: {reason}")]
    Refused {
        /// The error text.
        reason: String,
    },
    /// The store did not answer, before the step or after it.
    #[error("the store did not answer: {reason}")]
    Store {
        /// The error text.
        reason: String,
    },
}

impl<E> StepError<E> {
    /// The effect on the operation's record: the [error policy](crate::ErrorPolicy) for functions that return this error.
    ///
    /// `Failed` is the result of the operation and is stored. `Stuck` and `NotRecorded` need an operator. `Store` is like a
    /// crash: an effect may have happened that is not recorded, so the key is not freed. After all other errors the key is
    /// released, and the next call continues after the last recorded step.
    #[must_use]
    pub const fn fate(&self) -> ErrorFate {
        match self {
            Self::Failed(_) => ErrorFate::Keep,
            Self::Stuck { .. } | Self::NotRecorded { .. } => ErrorFate::Park,
            Self::Store { .. } => ErrorFate::Unknown,
            _ => ErrorFate::Release,
        }
    }
}

type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The compensation of a step. Its argument is its key.
type Undo = Box<dyn FnOnce(String) -> BoxFuture<'static, Result<(), StepFailure<String>>> + Send>;

/// The progress of an attempt through its steps.
#[derive(Default)]
pub(crate) struct Progress {
    is_loaded: bool,
    recorded: Vec<Step>,
    /// The number of recorded steps that the code has passed.
    passed: usize,
    undo: Vec<(String, Undo)>,
    /// True if no further step may run in this attempt.
    is_over: bool,
    /// True if the attempt has ended.
    is_sealed: bool,
    /// True if a step has begun and its end is not recorded.
    is_open: bool,
    /// The effect on the record of the step that stopped the attempt, if there is one.
    stopped: Option<ErrorFate>,
    /// The recorded error of a function ([`ERROR`]), with which the operation ends even if this attempt returns something else.
    ends_with: Option<Bytes>,
    /// True if all finished steps are taken back.
    is_compensated: bool,
}

/// The state of an attempt's steps when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepsState {
    /// True if an effect may have happened that is not recorded: the key must not be freed.
    pub(crate) is_open: bool,
    /// The effect on the record if the operation stopped half-way. A completion would lose the steps to continue after.
    pub(crate) half_way: Option<ErrorFate>,
}

impl Attempt {
    /// A step of the operation: runs the closure and records its result, or returns the result that an earlier attempt
    /// recorded. The [module](crate::step) has the details.
    ///
    /// The name identifies the step. It must differ from those of all other steps of the operation (`format!("ship {item}")` in
    /// a loop), and be the same in every attempt. The closure gets the key for its call. Nothing runs until this is awaited.
    pub fn step<'a, T, E, F, R>(&self, name: impl Into<String>, run: F) -> StepCall<'a, T, E>
    where
        F: FnOnce(String) -> R + Send + 'a,
        R: Future<Output = Result<T, StepFailure<E>>> + Send + 'a,
    {
        let run: Run<'a, T, E> = Box::new(move |key| Box::pin(run(key)));
        StepCall { attempt: self.clone(), name: name.into(), run, undo: None }
    }
}

impl Attempt {
    /// Records the input of the operation, or returns the input that the first attempt recorded.
    pub(crate) async fn begin(&self, input: Bytes) -> Result<Bytes, StepError<Infallible>> {
        let Ok(mut progress) = self.0.progress.try_lock() else {
            return Err(refused("the operation has already begun"));
        };
        progress.load(self).await?;
        let input = match progress.next(INPUT)? {
            Some(recorded) => recorded,
            None => {
                progress.record(self, INPUT, input.clone()).await?;
                input
            }
        };
        progress.passed += 1;
        Ok(input)
    }

    /// Returns true if the [steps](Self::step) leave the operation half-way: a step failed, was interrupted, or still runs in a
    /// task of its own, and a step was recorded or may have taken place. False after [`StepError::Failed`], which is an end.
    ///
    /// To complete the record in this state would forget the finished steps. End the attempt with
    /// [`Permit::stop`](crate::Permit::stop) instead.
    #[must_use]
    pub fn is_half_way(&self) -> bool {
        self.steps_state(|progress| progress.steps_state(self)).half_way.is_some()
    }

    /// Ends the operation with this error after finished steps: takes back those that have a
    /// [compensation](StepCall::compensate), the last one first, and returns the error for the caller. No step runs after this.
    ///
    /// ```
    /// # use oncegate_engine::{Attempt, StepFailure, StepError};
    /// # async fn charge(_: String) -> Result<u64, StepFailure<String>> { Ok(1) }
    /// # async fn refund(_: String, _: u64) -> Result<(), StepFailure<String>> { Ok(()) }
    /// # async fn is_in_stock() -> bool { true }
    /// async fn order(attempt: Attempt) -> Result<(), StepError<String>> {
    ///     attempt.step("charge", charge).compensate(refund).await?;
    ///     if !is_in_stock().await {
    ///         return Err(attempt.fail("out of stock".to_owned()).await); // after the refund
    ///     }
    ///     Ok(())
    /// }
    /// ```
    ///
    /// The result is [`StepError::Failed`] with this error, or with the error of an earlier attempt that ended here. If the steps
    /// could not be taken back, it is the reason for that.
    pub async fn fail<E: Serialize + DeserializeOwned>(&self, error: E) -> StepError<E> {
        let Ok(mut progress) = self.0.progress.try_lock() else {
            return refused("another step is still running");
        };
        let json = value::encode(&error, limits::MAX_STEPS_BYTES).map(Bytes::from);
        let recorded = match json {
            Ok(json) => progress.end(self, FAIL, Some(json)).await,
            Err(why) => Err(not_recorded(why)),
        };
        match recorded {
            Ok(Some(recorded)) => {
                value::decode(&recorded).map_or(StepError::Failed(error), StepError::Failed)
            }
            Ok(None) => StepError::Failed(error),
            Err(why) => why,
        }
    }

    /// Takes back the finished steps before the operation ends with an error. Does nothing if there is nothing to take back. No
    /// step runs after this.
    ///
    /// Functions do this by themselves before they store an error, and the layer does it if a response reports an error.
    ///
    /// # Errors
    /// The reason why a step could not be taken back. Then the operation has not ended.
    pub async fn compensate_steps(&self) -> Result<(), StepError<Infallible>> {
        self.compensate_before(None).await.map(drop)
    }

    /// As [`compensate_steps`](Self::compensate_steps), and records this error, so that an attempt after a crash ends with it,
    /// too. Returns the recorded error, which may be that of an earlier attempt; `None` if nothing was recorded.
    pub(crate) async fn compensate_before(
        &self,
        error: Option<Bytes>,
    ) -> Result<Option<Bytes>, StepError<Infallible>> {
        let Ok(mut progress) = self.0.progress.try_lock() else {
            return Err(refused("a step is still running"));
        };
        match progress.stopped {
            // All steps were taken back, or there were none.
            Some(ErrorFate::Keep) => Ok(progress.ends_with.clone()),
            Some(_) => Err(refused("a step did not end")),
            None => progress.end(self, ERROR, error).await,
        }
    }

    /// True if an attempt has recorded that the operation ends with an error.
    pub(crate) fn ends_with_error(&self) -> bool {
        self.0.progress.try_lock().is_ok_and(|progress| {
            progress.recorded.iter().any(|step| step.name() == FAIL || step.name() == ERROR)
        })
    }

    /// Prevents further steps, and returns the state of the steps.
    pub(crate) fn seal(&self) -> StepsState {
        self.steps_state(|progress| {
            progress.is_sealed = true;
            progress.steps_state(self)
        })
    }

    fn steps_state(&self, read: impl FnOnce(&mut Progress) -> StepsState) -> StepsState {
        match self.0.progress.try_lock() {
            Ok(mut progress) => read(&mut progress),
            // A step still runs in a task of its own.
            Err(_) => StepsState { is_open: true, half_way: Some(ErrorFate::Unknown) },
        }
    }

    /// True if an earlier attempt is known to have recorded the input of the operation.
    pub(crate) async fn was_begun(&self) -> bool {
        let Ok(mut progress) = self.0.progress.try_lock() else { return false };
        progress.load::<Infallible>(self).await.is_ok()
            && progress.recorded.first().is_some_and(|step| step.name() == INPUT)
    }
}

type Run<'a, T, E> = Box<dyn FnOnce(String) -> BoxFuture<'a, Result<T, StepFailure<E>>> + Send + 'a>;

/// A compensation that still lacks the value of its step.
type UndoOf<T> = Box<dyn FnOnce(T) -> Undo + Send>;

/// A step that has not begun: await it.
#[must_use = "a step runs when it is awaited"]
pub struct StepCall<'a, T, E> {
    attempt: Attempt,
    name: String,
    run: Run<'a, T, E>,
    undo: Option<UndoOf<T>>,
}

impl<T, E> fmt::Debug for StepCall<'_, T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepCall").field("name", &self.name).finish_non_exhaustive()
    }
}

impl<'a, T: Send + 'static, E> StepCall<'a, T, E> {
    /// Sets the compensation: it takes this step back if the operation fails later. It gets a key of its own and the step's
    /// value, and is tried again under the same key until it succeeds or fails for good.
    pub fn compensate<E2, F, R>(self, undo: F) -> Self
    where
        E2: fmt::Display,
        F: FnOnce(String, T) -> R + Send + 'static,
        R: Future<Output = Result<(), StepFailure<E2>>> + Send + 'static,
    {
        let undo: UndoOf<T> = Box::new(move |value| {
            Box::new(move |key| {
                Box::pin(async move {
                    undo(key, value).await.map_err(|failure| match failure {
                        StepFailure::Final(error) => StepFailure::Final(error.to_string()),
                        StepFailure::Unsure(error) => StepFailure::Unsure(error.to_string()),
                    })
                })
            })
        });
        Self { undo: Some(undo), ..self }
    }
}

impl<'a, T, E> IntoFuture for StepCall<'a, T, E>
where
    T: Serialize + DeserializeOwned + Send + 'a,
    E: Serialize + DeserializeOwned + Send + 'a,
{
    type Output = Result<T, StepError<E>>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let Self { attempt, name, run, undo } = self;
            let Ok(mut progress) = attempt.0.progress.try_lock() else {
                return Err(refused("another step is still running"));
            };
            progress.begin_step()?;
            let result = progress.step(&attempt, name, run, undo).await;
            progress.end_step(&result);
            result
        })
    }
}

fn refused<E>(reason: impl Into<String>) -> StepError<E> {
    StepError::Refused { reason: reason.into() }
}

impl Progress {
    /// Marks the attempt as stopped while a step runs. This stays if the step's future is dropped in the middle: no later step
    /// may run without it.
    fn begin_step<E>(&mut self) -> Result<(), StepError<E>> {
        if self.is_sealed {
            return Err(refused("its attempt has ended"));
        }
        if self.is_over {
            return Err(refused("an earlier step did not succeed"));
        }
        self.is_over = true;
        self.stopped = Some(ErrorFate::Unknown);
        Ok(())
    }

    fn end_step<T, E>(&mut self, result: &Result<T, StepError<E>>) {
        self.is_over = result.is_err();
        let fate = |error: &StepError<E>| if self.is_compensated { ErrorFate::Keep } else { error.fate() };
        self.stopped = result.as_ref().err().map(fate);
    }

    fn steps_state(&self, attempt: &Attempt) -> StepsState {
        // If the record was not read, an earlier attempt may have recorded steps.
        let was_begun = match self.is_loaded {
            true => !self.recorded.is_empty(),
            false => attempt.number() > 1,
        };
        // An abandoned attempt may have had an effect that this attempt knows nothing of. A release would forget that: the next
        // attempt would not get `is_after_abandoned`, and another request could claim the key. Under `reconcile`, the service
        // has reported the outcome of the abandoned attempt.
        let follows_abandoned = attempt.is_after_abandoned()
            && attempt.0.policy.on_abandoned == OnAbandoned::Reexecute
            && self.recorded.is_empty();
        let stopped = self.stopped.filter(|fate| *fate != ErrorFate::Keep);
        StepsState {
            is_open: self.is_open || follows_abandoned,
            half_way: stopped.filter(|_| self.is_open || was_begun),
        }
    }

    async fn step<T, E>(
        &mut self,
        attempt: &Attempt,
        name: String,
        run: Run<'_, T, E>,
        undo: Option<UndoOf<T>>,
    ) -> Result<T, StepError<E>>
    where
        T: Serialize + DeserializeOwned,
        E: Serialize + DeserializeOwned,
    {
        if name.starts_with(OWN) {
            return Err(refused(format!("names that start with {OWN} are reserved for the engine")));
        }
        Step::new(&name, Bytes::new()).map_err(|error| refused(error.to_string()))?;
        self.load(attempt).await?;
        if self.recorded.is_empty() && attempt.is_after_abandoned() {
            // The abandoned attempt may have died in its first step. A release of this attempt must not forget that.
            self.record(attempt, BEGUN, Bytes::from_static(b"null")).await?;
            self.passed = 1;
        }
        let passed = self.recorded.get(..self.passed).unwrap_or_default();
        if passed.iter().any(|step| step.name() == name) {
            return Err(refused(format!(
                "{name:?} is the name of an earlier step, which has the same key: give each step another name"
            )));
        }
        if let Some(recorded) = self.recorded_end() {
            // An earlier attempt ended here with an error of the operation.
            self.go_back(attempt, &recorded).await?;
            return Err(match value::decode(&recorded) {
                Ok(error) => StepError::Failed(error),
                Err(_) => refused("an earlier attempt ended with an error, and its steps are taken back"),
            });
        }
        let bytes = match self.next(&name)? {
            Some(bytes) => bytes,
            None => {
                let max_bytes = self.max_result_bytes(&name, undo.is_some()).ok_or_else(|| {
                    refused("the record cannot hold it together with the compensations that may follow")
                })?;
                if !attempt.is_owner() {
                    return Err(StepError::Fenced);
                }
                self.is_open = true;
                let result = match Self::run(attempt, &name, run).await? {
                    Ok(value) => Ok(value),
                    Err(StepFailure::Final(error)) => Err(error),
                    Err(StepFailure::Unsure(error)) => {
                        if self.recorded.is_empty() {
                            self.record(attempt, BEGUN, Bytes::from_static(b"null")).await?;
                        }
                        self.is_open = false;
                        return Err(StepError::Unsure(error));
                    }
                };
                let bytes = value::encode(&result, max_bytes).map(Bytes::from);
                let bytes = bytes.map_err(not_recorded)?;
                self.record(attempt, &name, bytes.clone()).await?;
                self.is_open = false;
                bytes
            }
        };
        self.passed += 1;
        let read = || value::decode::<Result<T, E>>(&bytes);
        let undecodable = |reason| StepError::Undecodable { step: name.clone(), reason };
        match read().map_err(undecodable)? {
            Ok(value) => {
                if let Some(undo) = undo
                    && let Ok(Ok(copy)) = read()
                {
                    self.undo.push((name.clone(), undo(copy)));
                }
                Ok(value)
            }
            Err(error) => {
                self.compensate_steps(attempt).await?;
                Err(StepError::Failed(error))
            }
        }
    }

    /// Loads the steps that earlier attempts recorded, once.
    async fn load<E>(&mut self, attempt: &Attempt) -> Result<(), StepError<E>> {
        if self.is_loaded {
            return Ok(());
        }
        if attempt.number() > 1 {
            let found = attempt.0.store.lookup(attempt.record_id()).await.map_err(unanswered)?;
            let owned = found.filter(|record| record.token == attempt.token());
            let steps = owned.ok_or(StepError::Fenced)?.steps;
            self.recorded = steps.as_slice().to_vec();
            // The mark is not a step of the code.
            self.passed = usize::from(self.recorded.first().is_some_and(|step| step.name() == BEGUN));
        }
        self.is_loaded = true;
        Ok(())
    }

    /// The result that is recorded in the place of the next step, if there is one.
    fn next<E>(&self, name: &str) -> Result<Option<Bytes>, StepError<E>> {
        match self.recorded.get(self.passed) {
            None => Ok(None),
            Some(step) if step.name() == name => Ok(Some(step.result().clone())),
            Some(step) => Err(StepError::Differs { number: self.passed, recorded: step.name().to_owned() }),
        }
    }

    /// The error that an earlier attempt recorded in the place of the next step, if the operation ended there.
    fn recorded_end(&self) -> Option<Bytes> {
        let step = self.recorded.get(self.passed)?;
        (step.name() == FAIL || step.name() == ERROR).then(|| step.result().clone())
    }

    /// Ends the operation with an error of its own: records the error, and takes back the finished steps. Returns the recorded
    /// error, which may be that of an earlier attempt; `None` if nothing was recorded, because there was nothing to take back.
    async fn end<E>(
        &mut self,
        attempt: &Attempt,
        mark: &str,
        error: Option<Bytes>,
    ) -> Result<Option<Bytes>, StepError<E>> {
        if self.is_sealed {
            return Err(refused("its attempt has ended"));
        }
        match self.stopped {
            Some(ErrorFate::Keep) => return Ok(None),
            Some(_) => return Err(refused("an earlier step did not end")),
            None => {}
        }
        self.is_over = true;
        self.stopped = Some(ErrorFate::Unknown);
        let result = self.try_end(attempt, mark, error).await;
        self.stopped = Some(result.as_ref().err().map_or(ErrorFate::Keep, StepError::fate));
        result
    }

    async fn try_end<E>(
        &mut self,
        attempt: &Attempt,
        mark: &str,
        error: Option<Bytes>,
    ) -> Result<Option<Bytes>, StepError<E>> {
        let recorded = match self.recorded_end() {
            Some(recorded) => recorded,
            None if self.undo.is_empty() => return Ok(None),
            None => {
                // An earlier attempt recorded further steps, and this attempt does not have their compensations.
                if let Some(step) = self.recorded.get(self.passed) {
                    let recorded = step.name().to_owned();
                    return Err(StepError::Differs { number: self.passed, recorded });
                }
                if !attempt.is_owner() {
                    return Err(StepError::Fenced);
                }
                let used = self.size_with_undo(None) + mark.len();
                let error = error.filter(|error| error.len() <= limits::MAX_STEPS_BYTES.saturating_sub(used));
                let error = error.unwrap_or(Bytes::from_static(NO_ERROR));
                self.record(attempt, mark, error.clone()).await?;
                error
            }
        };
        self.go_back(attempt, &recorded).await?;
        Ok(Some(recorded))
    }

    /// Takes back the steps that were finished before this recorded error.
    async fn go_back<E>(&mut self, attempt: &Attempt, recorded: &Bytes) -> Result<(), StepError<E>> {
        if self.recorded.get(self.passed).is_some_and(|step| step.name() == ERROR) {
            self.ends_with = Some(recorded.clone());
        }
        self.passed += 1;
        self.compensate_steps(attempt).await?;
        self.is_compensated = true;
        Ok(())
    }

    /// The names of the steps that may have to be taken back, including this one.
    fn undone<'a>(&'a self, own: Option<&'a str>) -> impl Iterator<Item = &'a str> {
        self.undo.iter().map(|(step, _)| step.as_str()).chain(own)
    }

    /// The size of the recorded steps and of all compensations that may follow, in bytes.
    fn size_with_undo(&self, own: Option<&str>) -> usize {
        self.recorded.iter().map(Step::size).sum::<usize>()
            + self.undone(own).map(|step| UNDO.len() + step.len() + MAX_UNDO_RESULT_BYTES).sum::<usize>()
    }

    /// The largest result of the next step, in bytes, so that all finished steps can still be taken back. `None` if the record
    /// cannot hold the step at all: then it must not run, because no attempt could continue after it.
    fn max_result_bytes(&self, name: &str, is_undone: bool) -> Option<usize> {
        let own = is_undone.then_some(name);
        if own.is_some_and(|name| UNDO.len() + name.len() > limits::MAX_STEP_NAME_BYTES) {
            return None;
        }
        let undone = self.undone(own).count();
        // An error of the operation may have to be recorded before the first compensation.
        let (marks, mark) = if undone > 0 { (1, ERROR.len() + NO_ERROR.len()) } else { (0, 0) };
        let bytes = self.size_with_undo(own) + mark + name.len();
        let left = limits::MAX_STEPS_BYTES.checked_sub(bytes).filter(|left| *left > 0);
        left.filter(|_| self.recorded.len() + 1 + undone + marks <= limits::MAX_STEPS)
    }

    async fn run<'a, T, F, E>(
        attempt: &Attempt,
        name: &str,
        run: impl FnOnce(String) -> BoxFuture<'a, Result<T, StepFailure<F>>>,
    ) -> Result<Result<T, StepFailure<F>>, StepError<E>> {
        if !attempt.is_owner() {
            return Err(StepError::Fenced);
        }
        Ok(run(attempt.downstream_key(name)).await)
    }

    /// Records a step that was just finished. If the store fails, this tries again for the length of a lease, while the attempt
    /// owns its record: the effect took place.
    async fn record<E>(&mut self, attempt: &Attempt, name: &str, result: Bytes) -> Result<(), StepError<E>> {
        let step = Step::new(name, result).map_err(not_recorded)?;
        let number = self.recorded.len();
        let give_up = Instant::now() + attempt.0.policy.lease;
        let mut pause = Duration::from_millis(50);
        loop {
            let command = Command::Step(RecordStep { token: attempt.token(), number, step: step.clone() });
            match attempt.0.store.apply(attempt.record_id(), command).await {
                Ok(Outcome::StepRecorded) => break,
                Ok(Outcome::Fenced | Outcome::StepDiffers) => {
                    attempt.set_lost();
                    return Err(StepError::Fenced);
                }
                Ok(Outcome::StepsFull) => {
                    return Err(StepError::NotRecorded {
                        reason: "the limits of a record's steps are reached".to_owned(),
                    });
                }
                Ok(other) => {
                    let reason = format!("the store answered {other:?} to a step");
                    return Err(StepError::NotRecorded { reason });
                }
                Err(error) if error.kind().may_pass() && attempt.is_owner() && Instant::now() < give_up => {
                    tokio::time::sleep(again_after(pause, &error)).await;
                    pause = (pause * 2).min(Duration::from_secs(1));
                }
                Err(error) => return Err(unanswered(error)),
            }
        }
        self.recorded.push(step);
        Ok(())
    }

    /// Takes back the finished steps, the last one first.
    async fn compensate_steps<E>(&mut self, attempt: &Attempt) -> Result<(), StepError<E>> {
        let mut stuck = None;
        while let Some((step, undo)) = self.undo.pop() {
            let name = format!("{UNDO}{step}");
            let bytes = match self.next(&name)? {
                Some(bytes) => bytes,
                None => {
                    let failed = match Self::run(attempt, &name, undo).await? {
                        Ok(()) => None,
                        Err(StepFailure::Unsure(reason)) => {
                            return Err(StepError::NotCompensated { step, reason });
                        }
                        Err(StepFailure::Final(reason)) => {
                            Some(reason.chars().take(MAX_REASON_CHARS).collect::<String>())
                        }
                    };
                    let bytes = value::encode(&failed, MAX_UNDO_RESULT_BYTES).map(Bytes::from);
                    let bytes = bytes.map_err(not_recorded)?;
                    self.record(attempt, &name, bytes.clone()).await?;
                    bytes
                }
            };
            self.passed += 1;
            // A compensation that failed for good needs an operator. The others still run.
            let failed = value::decode::<Option<String>>(&bytes);
            if let Some(reason) = failed.map_err(|reason| StepError::Undecodable { step: name, reason })? {
                stuck.get_or_insert(StepError::Stuck { step, reason });
            }
        }
        stuck.map_or(Ok(()), Err)
    }
}

fn unanswered<E>(error: StoreError) -> StepError<E> {
    StepError::Store { reason: ErrorChain(&error).to_string() }
}

fn not_recorded<E>(why: impl fmt::Display) -> StepError<E> {
    StepError::NotRecorded { reason: why.to_string() }
}
