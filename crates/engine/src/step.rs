//! Steps: recovery points inside an attempt, and what takes them back.
//!
//! An operation that calls several APIs of others cannot commit all of them together. Cut in [steps](Attempt::step), it goes
//! on after the last finished one when it is executed again, and each call goes out under a key that is the same each time.
//!
//! What exactly happens at `attempt.step("charge", …).compensate(…).await`:
//! 1. The record is looked at once per attempt, where there was an earlier one. If the step is recorded, its result is given
//!    back and nothing runs. If another step is recorded in its place, the code has changed since:
//!    [`StepError::Differs`], and nothing runs.
//! 2. Otherwise the closure runs, with the key to send along: [`Attempt::downstream_key`] of the step's name.
//! 3. Its value is recorded under the attempt's token before the step ends. An attempt that is no longer the owner hears
//!    [`StepError::Fenced`] and must stop.
//! 4. [`StepFailure::Unsure`], which `?` makes of any error, ends the attempt and not the operation: whoever executes it again
//!    runs this step again, under the same key.
//! 5. [`StepFailure::Final`] says that the step did not take place and never will. That is recorded, and then what was finished
//!    before is taken back in the opposite order, each compensation a recorded step with a key of its own. A crash among them
//!    goes on with the next one. In the end there is [`StepError::Failed`], the same in every later attempt.
//!
//! 6. An error of the operation's own, after steps that were finished, is an end as well: [`Attempt::fail`], or simply the error
//!    that a function returns and that is stored. That it ends so is recorded first, then what was finished is taken back as in
//!    5., and only then is the error the operation's answer.
//!
//! A step's effect takes place once where the other side honours the key. Where it does not, a crash between the effect and
//! its record repeats it: nobody can know better.
//!
//! Steps run one after the other; their order is that of the code. They last as long as the record is not completed, over
//! lease, release and restart, at most [`limits::MAX_STEPS`] of them.

use std::convert::Infallible;
use std::error::Error as StdError;
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

/// How large it may be, in bytes of its JSON: half of what a record has room for.
pub(crate) const MAX_INPUT_BYTES: usize = limits::MAX_STEPS_BYTES / 2;

/// The prefix of the name of a compensation.
const UNDO: &str = "~undo ";

/// How much may be recorded of a compensation, in bytes: why it failed, in so many characters, none of which takes more than
/// six bytes in JSON.
const MAX_UNDO_RESULT_BYTES: usize = 1024;
const MAX_REASON_CHARS: usize = 160;

/// What is recorded where a first step may have taken place, and nothing else is: a record that is released with steps is not
/// free for another request.
const BEGUN: &str = "~begun";

/// What is recorded before the first compensation if the operation ends with an error of its own: that of
/// [`Attempt::fail`], and one that a function returned or that a response reports.
const FAIL: &str = "~fail";
const ERROR: &str = "~error";

/// What is recorded of such an error that finds no room, or that nobody could read.
const NO_ERROR: &[u8] = b"null";

/// The failure of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepFailure<E> {
    /// It did not take place and never will: declined, out of stock. What was finished before is taken back.
    Final(E),
    /// It may have taken place, or may if it is tried again: a time-out, a server error. The attempt ends, and the next one
    /// runs the step again under the same key.
    Unsure(E),
}

/// [`StepFailure::Unsure`]: that something never took place has to be said.
impl<E> From<E> for StepFailure<E> {
    fn from(error: E) -> Self {
        Self::Unsure(error)
    }
}

/// The error of a step: the reason why it has no value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum StepError<E> {
    /// The step failed for good, and what was finished before it is taken back.
    Failed(E),
    /// What became of the step is not known, or it has to be tried again: execute the operation again, under its key.
    Unsure(E),
    /// A compensation has to be tried again: as for `Unsure`.
    NotTakenBack {
        /// The step that it takes back.
        step: String,
        /// The error text.
        reason: String,
    },
    /// A compensation failed for good; the others were done. An operator has to take the step back, and to say what came of
    /// the operation.
    Stuck {
        /// The step that it takes back.
        step: String,
        /// The error text.
        reason: String,
    },
    /// Another attempt owns the record. Stop: it continues the operation.
    Fenced,
    /// Another step was recorded in this place: the code has changed since. Nothing was run. With the code that fits, the
    /// operation goes on.
    Differs {
        /// The number of the step, from 0.
        number: usize,
        /// The step that is recorded.
        recorded: String,
    },
    /// What is recorded cannot be read as the type that is asked for. Nothing was run.
    Undecodable {
        /// The step.
        step: String,
        /// The mismatch, without any part of the value.
        reason: String,
    },
    /// The step took place, and its result could not be recorded.
    NotRecorded {
        /// Why.
        reason: String,
    },
    /// The step was not run, because it is none: its name is out of bounds, starts with `~` or was used before, another step
    /// was still running, or one has failed; or because the record has no room for it and for what may have to be taken back.
    Refused {
        /// Why.
        reason: String,
    },
    /// The store did not answer, before the step or after it.
    Store {
        /// The error text.
        reason: String,
    },
}

impl<E> StepError<E> {
    /// What becomes of the operation's record: the [error policy](crate::ErrorPolicy) for functions that return this error.
    ///
    /// `Failed` is the operation's answer and is stored. After `Stuck` and `NotRecorded` an operator has to look. After `Store`
    /// it is as after a crash: something may have taken place that is not recorded, and the key is not free. Else the key is
    /// released, and the next call goes on after the last recorded step.
    #[must_use]
    pub const fn fate(&self) -> ErrorFate {
        match self {
            Self::Failed(_) => ErrorFate::Store,
            Self::Stuck { .. } | Self::NotRecorded { .. } => ErrorFate::Park,
            Self::Store { .. } => ErrorFate::Unknown,
            _ => ErrorFate::Release,
        }
    }
}

impl<E: fmt::Display> fmt::Display for StepError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(error) => error.fmt(f),
            Self::Unsure(error) => write!(f, "not known, execute it again under its key: {error}"),
            Self::NotTakenBack { step, reason } => {
                write!(f, "{step:?} is not taken back yet, execute it again under its key: {reason}")
            }
            Self::Stuck { step, reason } => {
                write!(f, "{step:?} cannot be taken back; an operator has to do it: {reason}")
            }
            Self::Fenced => f.write_str("somebody else goes on with the operation"),
            Self::Differs { number, recorded } => write!(
                f,
                "step {number} is recorded as {recorded:?}, and the code has another one there: it has changed since"
            ),
            Self::Undecodable { step, reason } => {
                write!(f, "what is recorded of {step:?} cannot be read: {reason}")
            }
            Self::NotRecorded { reason } => {
                write!(f, "the step took place and is not recorded: {reason}")
            }
            Self::Refused { reason } => write!(f, "the step was not run: {reason}"),
            Self::Store { reason } => write!(f, "the store did not answer: {reason}"),
        }
    }
}

impl<E: fmt::Debug + fmt::Display> StdError for StepError<E> {}

type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The compensation of a step. It gets its key.
type Undo = Box<dyn FnOnce(String) -> BoxFuture<'static, Result<(), StepFailure<String>>> + Send>;

/// The progress of an attempt through its steps.
#[derive(Default)]
pub(crate) struct Progress {
    is_loaded: bool,
    recorded: Vec<Step>,
    /// The number of recorded steps that the code has passed.
    passed: usize,
    undo: Vec<(String, Undo)>,
    /// Nothing more runs under this attempt.
    is_over: bool,
    /// The attempt has ended.
    is_sealed: bool,
    /// A step has begun, and nothing is recorded of how it ended.
    is_open: bool,
    /// What becomes of the record by the step that the attempt did not get past, if there is one.
    stopped: Option<ErrorFate>,
    /// The error of a function ([`ERROR`]) that the operation ends with, whatever this attempt returns.
    ends_with: Option<Bytes>,
    /// All that was finished is taken back.
    is_taken_back: bool,
}

/// The state of an attempt's steps when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepsState {
    /// Something may have taken place that no record tells of: the key must not be free.
    pub(crate) is_open: bool,
    /// The operation is not at its end, and what there is to go on from would be lost with a completion: what becomes of the
    /// record then.
    pub(crate) half_way: Option<ErrorFate>,
}

impl Attempt {
    /// A part of the operation: runs the closure and records what came of it, or gives back what an earlier attempt
    /// recorded. See the [module](crate::step) for what exactly happens.
    ///
    /// The name is the step's identity: another one for each step of the operation (`format!("ship {item}")` in a loop), and
    /// the same in every attempt. The closure gets the key to send along. Nothing runs before this is awaited.
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
    /// Records what the operation is begun with, or gives back what the first attempt recorded.
    pub(crate) async fn begin(&self, input: Bytes) -> Result<Bytes, StepError<Infallible>> {
        let Ok(mut progress) = self.0.progress.try_lock() else {
            return Err(refused("it was begun before"));
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

    /// Whether its [steps](Self::step) leave the operation half-way: one of them did not come to its end, was cut off, or still
    /// runs in a task of its own, and something was recorded or may have taken place. Not after [`StepError::Failed`],
    /// which is an end.
    ///
    /// To complete the record then would forget what was finished. [`Permit::stop`](crate::Permit::stop) does not.
    #[must_use]
    pub fn is_half_way(&self) -> bool {
        self.standing(|progress| progress.standing(self)).half_way.is_some()
    }

    /// Ends the operation with this error, after steps that were finished: takes back those that have a
    /// [compensation](StepCall::compensate), the last one first, and gives the error to return. No step runs after this.
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
    /// It is [`StepError::Failed`] with this error, or with that of an earlier attempt that ended here; or what kept the steps
    /// from being taken back, as for a step that fails.
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

    /// Takes back what its steps finished, before an error of the operation is its answer. Does nothing if there is nothing to
    /// take back. No step runs after this.
    ///
    /// A function does this by itself where its error is stored, and the layer where a response reports an error.
    ///
    /// # Errors
    /// What kept a step from being taken back: the operation is not at its end.
    pub async fn take_back(&self) -> Result<(), StepError<Infallible>> {
        self.take_back_before(None).await.map(drop)
    }

    /// As [`take_back`](Self::take_back), before this error, which is kept with the record for the attempt that goes on after a
    /// crash. Returns the recorded error, which may be that of an earlier attempt; `None` if nothing was recorded.
    pub(crate) async fn take_back_before(
        &self,
        error: Option<Bytes>,
    ) -> Result<Option<Bytes>, StepError<Infallible>> {
        let Ok(mut progress) = self.0.progress.try_lock() else {
            return Err(refused("a step is still running"));
        };
        match progress.stopped {
            // All of it was taken back, or there was nothing.
            Some(ErrorFate::Store) => Ok(progress.ends_with.clone()),
            Some(_) => Err(refused("a step did not come to its end")),
            None => progress.end(self, ERROR, error).await,
        }
    }

    /// Whether an earlier attempt has recorded that the operation ends with an error, as far as this one has come.
    pub(crate) fn ends_with_error(&self) -> bool {
        self.0.progress.try_lock().is_ok_and(|progress| {
            progress.recorded.iter().any(|step| step.name() == FAIL || step.name() == ERROR)
        })
    }

    /// How its steps stand. No other one begins after this.
    pub(crate) fn seal(&self) -> StepsState {
        self.standing(|progress| {
            progress.is_sealed = true;
            progress.standing(self)
        })
    }

    fn standing(&self, look: impl FnOnce(&mut Progress) -> StepsState) -> StepsState {
        match self.0.progress.try_lock() {
            Ok(mut progress) => look(&mut progress),
            // A step runs, in a task of its own. It is the last one: none begins that is not asked for by then.
            Err(_) => StepsState { is_open: true, half_way: Some(ErrorFate::Unknown) },
        }
    }

    /// Whether an earlier attempt recorded what the operation is begun with, as far as can be told.
    pub(crate) async fn was_begun(&self) -> bool {
        let Ok(mut progress) = self.0.progress.try_lock() else { return false };
        progress.load::<Infallible>(self).await.is_ok()
            && progress.recorded.first().is_some_and(|step| step.name() == INPUT)
    }
}

type Run<'a, T, E> = Box<dyn FnOnce(String) -> BoxFuture<'a, Result<T, StepFailure<E>>> + Send + 'a>;

/// A compensation that still lacks the value of its step.
type UndoOf<T> = Box<dyn FnOnce(T) -> Undo + Send>;

/// A step that was not begun: await it.
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
    /// What takes this step back where a later one fails for good. It gets a key of its own and the step's value, and is
    /// tried again until it succeeds, under the same key.
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
            progress.step(&attempt, name, run, undo).await
        })
    }
}

fn refused<E>(reason: impl Into<String>) -> StepError<E> {
    StepError::Refused { reason: reason.into() }
}

impl Progress {
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
        if self.is_sealed {
            return Err(refused("its attempt has ended"));
        }
        if self.is_over {
            return Err(refused("an earlier one did not succeed"));
        }
        // Also where this future is dropped in the middle: what comes after a step must not run without it.
        self.is_over = true;
        self.stopped = Some(ErrorFate::Unknown);
        let result = self.try_step(attempt, name, run, undo).await;
        self.is_over = result.is_err();
        let fate = |error: &StepError<E>| if self.is_taken_back { ErrorFate::Store } else { error.fate() };
        self.stopped = result.as_ref().err().map(fate);
        result
    }

    fn standing(&self, attempt: &Attempt) -> StepsState {
        // What an earlier attempt began: recorded, or not to be told.
        let was_begun = match self.is_loaded {
            true => !self.recorded.is_empty(),
            false => attempt.number() > 1,
        };
        // One that was abandoned may have taken effect, and what this one says of itself says nothing of it. A released key would
        // forget that: the next attempt would take itself for one that follows nobody, and another request could have the key.
        // Who is asked first (`reconcile`) has said what became of it.
        let follows_somebody = attempt.is_after_abandoned()
            && attempt.0.policy.on_abandoned == OnAbandoned::Reexecute
            && self.recorded.is_empty();
        let stopped = self.stopped.filter(|fate| *fate != ErrorFate::Store);
        StepsState {
            is_open: self.is_open || follows_somebody,
            half_way: stopped.filter(|_| self.is_open || was_begun),
        }
    }

    async fn try_step<T, E>(
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
            return Err(refused(format!("names that start with {OWN} are the engine's own")));
        }
        Step::new(&name, Bytes::new()).map_err(|unfit| refused(unfit.to_string()))?;
        self.load(attempt).await?;
        if self.recorded.is_empty() && attempt.is_after_abandoned() {
            // Whoever was here before may have ended in a first step. What this one releases must not forget that.
            self.record(attempt, BEGUN, Bytes::from_static(b"null")).await?;
            self.passed = 1;
        }
        let passed = self.recorded.get(..self.passed).unwrap_or_default();
        if passed.iter().any(|step| step.name() == name) {
            return Err(refused(format!(
                "{name:?} was there before, and its key with it: name each step differently"
            )));
        }
        if let Some(recorded) = self.recorded_end() {
            // An earlier attempt ended here, with an error of the operation's own.
            self.go_back(attempt, &recorded).await?;
            return Err(match value::decode(&recorded) {
                Ok(error) => StepError::Failed(error),
                Err(_) => {
                    refused("an earlier attempt ended with an error, and what was finished is taken back")
                }
            });
        }
        let bytes = match self.next(&name)? {
            Some(bytes) => bytes,
            None => {
                let room = self.room_for(&name, undo.is_some()).ok_or_else(|| {
                    refused("the record has no room for it and for what may have to be taken back")
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
                let bytes = value::encode(&result, room).map(Bytes::from);
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
                self.take_back(attempt).await?;
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
            // It stands for no step of the code.
            self.passed = usize::from(self.recorded.first().is_some_and(|step| step.name() == BEGUN));
        }
        self.is_loaded = true;
        Ok(())
    }

    /// What is recorded in the place of the next step, if anything is.
    fn next<E>(&self, name: &str) -> Result<Option<Bytes>, StepError<E>> {
        match self.recorded.get(self.passed) {
            None => Ok(None),
            Some(step) if step.name() == name => Ok(Some(step.result().clone())),
            Some(step) => Err(StepError::Differs { number: self.passed, recorded: step.name().to_owned() }),
        }
    }

    /// What an earlier attempt recorded in the place of the next step, if it ended with an error of the operation's own there.
    fn recorded_end(&self) -> Option<Bytes> {
        let step = self.recorded.get(self.passed)?;
        (step.name() == FAIL || step.name() == ERROR).then(|| step.result().clone())
    }

    /// Ends the operation with an error of its own: records that, and takes back what was finished. Returns the recorded error,
    /// which may be that of an earlier attempt; `None` if nothing was recorded, because there was nothing to take back.
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
            Some(ErrorFate::Store) => return Ok(None),
            Some(_) => return Err(refused("an earlier step did not come to its end")),
            None => {}
        }
        self.is_over = true;
        self.stopped = Some(ErrorFate::Unknown);
        let result = self.try_end(attempt, mark, error).await;
        self.stopped = Some(result.as_ref().err().map_or(ErrorFate::Store, StepError::fate));
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
                // An earlier attempt went on here, and this one does not know how to take that back.
                if let Some(step) = self.recorded.get(self.passed) {
                    let recorded = step.name().to_owned();
                    return Err(StepError::Differs { number: self.passed, recorded });
                }
                if !attempt.is_owner() {
                    return Err(StepError::Fenced);
                }
                let room = limits::MAX_STEPS_BYTES.saturating_sub(self.size_with_undo(None) + mark.len());
                let error = error.filter(|error| error.len() <= room);
                let error = error.unwrap_or(Bytes::from_static(NO_ERROR));
                self.record(attempt, mark, error.clone()).await?;
                error
            }
        };
        self.go_back(attempt, &recorded).await?;
        Ok(Some(recorded))
    }

    /// Takes back what was finished before this recorded error.
    async fn go_back<E>(&mut self, attempt: &Attempt, recorded: &Bytes) -> Result<(), StepError<E>> {
        if self.recorded.get(self.passed).is_some_and(|step| step.name() == ERROR) {
            self.ends_with = Some(recorded.clone());
        }
        self.passed += 1;
        self.take_back(attempt).await?;
        self.is_taken_back = true;
        Ok(())
    }

    /// The steps that may have to be taken back, with this one.
    fn undone<'a>(&'a self, own: Option<&'a str>) -> impl Iterator<Item = &'a str> {
        self.undo.iter().map(|(step, _)| step.as_str()).chain(own)
    }

    /// How many bytes are recorded, and may come to it where all of this is taken back.
    fn size_with_undo(&self, own: Option<&str>) -> usize {
        self.recorded.iter().map(Step::size).sum::<usize>()
            + self.undone(own).map(|step| UNDO.len() + step.len() + MAX_UNDO_RESULT_BYTES).sum::<usize>()
    }

    /// How many bytes the result of the next step may have, so that all that was finished by then can still be taken back.
    /// `None` where there is no room for the step at all: it must not be run, because nobody could go on after it.
    fn room_for(&self, name: &str, is_undone: bool) -> Option<usize> {
        let own = is_undone.then_some(name);
        if own.is_some_and(|name| UNDO.len() + name.len() > limits::MAX_STEP_NAME_BYTES) {
            return None;
        }
        let undone = self.undone(own).count();
        // Before anything is taken back it may have to be recorded that the operation failed.
        let (marks, mark) = if undone > 0 { (1, ERROR.len() + NO_ERROR.len()) } else { (0, 0) };
        let bytes = self.size_with_undo(own) + mark + name.len();
        let room = limits::MAX_STEPS_BYTES.checked_sub(bytes).filter(|room| *room > 0);
        room.filter(|_| self.recorded.len() + 1 + undone + marks <= limits::MAX_STEPS)
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

    /// Notes a step that was just finished. Where the store does not answer it is asked again, as long as the attempt owns its
    /// record, and for the length of a lease: the effect took place.
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
                        reason: "the record has no room for it".to_owned(),
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

    /// Takes back what was finished, the last one first.
    async fn take_back<E>(&mut self, attempt: &Attempt) -> Result<(), StepError<E>> {
        let mut stuck = None;
        while let Some((step, undo)) = self.undo.pop() {
            let name = format!("{UNDO}{step}");
            let bytes = match self.next(&name)? {
                Some(bytes) => bytes,
                None => {
                    let failed = match Self::run(attempt, &name, undo).await? {
                        Ok(()) => None,
                        Err(StepFailure::Unsure(reason)) => {
                            return Err(StepError::NotTakenBack { step, reason });
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
            // What cannot be taken back is an operator's; the rest is taken back all the same.
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
