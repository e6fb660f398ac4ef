//! Functions whose calls a completer finishes after their owner is gone.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::{
    ConfigError, ErrorChain, IdempotencyKey, KeyError, ListQuery, OnAbandoned, Record, RecordId, State,
    StateName, StoreError, Timestamp, limits,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{JoinHandle, JoinSet};

use super::errors::{ErrorPolicy, FunctionError};
use super::run::{CallClaim, FunctionOutput, joined};
use super::value;
use super::{Function, InvalidCall};
use crate::attempt::{Attempt, Permit};
use crate::engine::{ClaimOutcome, ClaimRequest};
use crate::step::{self, StepError};

/// A function with its code, so that a completer can finish calls whose owner is gone, without a retry of the caller.
///
/// [`Function::resumable`] makes it. Cheap to clone. The input is recorded with the [steps](Attempt::step) before the function
/// begins, and every attempt gets the input of the first one. [`complete`](Self::complete) finds calls that were abandoned, or
/// released with finished steps, and executes them again.
pub struct Resumable<I, T, E, P> {
    function: Function<P>,
    run: Run<I, T, E>,
}

type Run<I, T, E> =
    Arc<dyn Fn(Attempt, I) -> Pin<Box<dyn Future<Output = Result<T, E>> + Send>> + Send + Sync>;

/// The limit on calls that a completer executes at a time, not counting slow ones.
const MAX_PLACES: usize = 16;

/// The time after which a call counts as slow and gives up its place, so that calls that hang do not block others.
const PLACE_TIMEOUT: Duration = Duration::from_secs(60);

/// The limit on all calls that a completer executes at a time.
const MAX_RUNNING_CALLS: usize = 1024;

/// The calls that a completer executes.
struct RunningCalls {
    calls: JoinSet<()>,
    places: Arc<Semaphore>,
}

impl RunningCalls {
    fn new() -> Self {
        Self { calls: JoinSet::new(), places: Arc::new(Semaphore::new(MAX_PLACES)) }
    }

    /// Waits for a place, and until there are fewer than [`MAX_RUNNING_CALLS`].
    async fn place(&mut self) -> Option<OwnedSemaphorePermit> {
        while self.calls.try_join_next().is_some() {}
        while self.calls.len() >= MAX_RUNNING_CALLS {
            self.calls.join_next().await;
        }
        self.places.clone().acquire_owned().await.ok() // it is never closed
    }

    fn add<R: Send + 'static>(&mut self, call: JoinHandle<R>, place: Option<OwnedSemaphorePermit>) {
        self.calls.spawn(async move {
            let mut call = call;
            if tokio::time::timeout(PLACE_TIMEOUT, &mut call).await.is_err() {
                drop(place);
                drop(call.await);
            }
        });
    }
}

/// The settings of a [completer](Resumable::complete).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompleterOptions {
    every: Duration,
    after: Duration,
    max_pause: Duration,
    max_age: Duration,
}

impl Default for CompleterOptions {
    /// A round every ten seconds, a first pause of a minute, a longest pause of 15 minutes, and a largest age of 23 hours.
    fn default() -> Self {
        Self {
            every: Duration::from_secs(10),
            after: Duration::from_secs(60),
            max_pause: Duration::from_secs(15 * 60),
            max_age: Duration::from_secs(23 * 60 * 60),
        }
    }
}

impl CompleterOptions {
    /// Sets the pause between two rounds: 10 s by default, from 1 ms to a day. Each round reads every record of the store once,
    /// a page at a time.
    ///
    /// # Errors
    /// If the interval is out of these bounds.
    pub fn with_interval(self, interval: Duration) -> Result<Self, ConfigError> {
        let bounds = Duration::from_millis(1)..=Duration::from_secs(24 * 60 * 60);
        let every = ConfigError::check("the interval of a completer", interval, bounds)?;
        Ok(Self { every, ..self })
    }

    /// Sets the time for which a call that was released half-way is left to the retries of its caller: a minute by default. It is
    /// also the pause before the next attempt at the same call, and doubles with each attempt.
    #[must_use]
    pub const fn with_first_pause(self, after: Duration) -> Self {
        Self { after, ..self }
    }

    /// Sets the longest pause between two attempts at a call: 15 minutes by default. After an outage of an API that the steps
    /// call, a call is finished at most this much later.
    #[must_use]
    pub const fn with_max_pause(self, max_pause: Duration) -> Self {
        Self { max_pause, ..self }
    }

    /// Sets the age, counted from its first attempt, at which the completer gives a record up and leaves it to an operator: 23
    /// hours by default. Steps are sent under the same keys again, and most APIs remember keys for a day. After that, a step that
    /// took effect and was not recorded would take effect twice.
    #[must_use]
    pub const fn with_max_age(self, max_age: Duration) -> Self {
        Self { max_age, ..self }
    }

    /// The pause before the next attempt at a record in this state. An abandoned record has already waited for its lease to end.
    fn pause(&self, state: StateName, attempts: u32) -> Duration {
        let doubled = match (state, attempts) {
            (StateName::Abandoned, 0 | 1) => return Duration::ZERO,
            (StateName::Abandoned, attempts) => attempts - 2,
            (_, attempts) => attempts.saturating_sub(1),
        };
        // A released record is left to its caller for `after`, even if that is longer than the longest pause.
        let longest = self.max_pause.max(self.after);
        self.after.saturating_mul(2u32.saturating_pow(doubled.min(31))).min(longest)
    }
}

/// The result of a completer's round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompleterRound {
    /// The number of calls that were executed again.
    pub executed: usize,
    /// The number of calls that were left to an operator: too old, or their input cannot be read any more.
    pub left: usize,
}

impl<P> Function<P> {
    /// Binds the code to the function, so that a completer can finish calls whose owner is gone.
    ///
    /// # Errors
    /// If the policy is not `reexecute`: then the program must not execute a call again. If the name has a NUL or more than
    /// [`limits::MAX_OPERATION_BYTES`] bytes: then the completer cannot find the function's records by it.
    pub fn resumable<I, T, E, F, Fut>(self, run: F) -> Result<Resumable<I, T, E, P>, ConfigError>
    where
        F: Fn(Attempt, I) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
    {
        if self.settings.policy.on_abandoned() != OnAbandoned::Reexecute {
            return Err(ConfigError::new(
                "a resumable function is executed again after a crash: its policy must be reexecute",
            ));
        }
        let name = &*self.settings.name;
        if self.settings.label.operation() != name || name.contains('\0') {
            let max = limits::MAX_OPERATION_BYTES;
            return Err(ConfigError::new(format!(
                "the name of a resumable function must have at most {max} bytes and no NUL"
            )));
        }
        let run: Run<I, T, E> = Arc::new(move |attempt, input| Box::pin(run(attempt, input)));
        Ok(Resumable { function: self, run })
    }
}

impl<I, T, E, P> Resumable<I, T, E, P>
where
    I: Serialize + DeserializeOwned + Send + 'static,
    T: Serialize + DeserializeOwned + Send + 'static,
    E: Send + 'static,
    P: ErrorPolicy<E> + Clone + Send + Sync + 'static,
{
    /// Runs the function in a task of its own, unless this key was used before: see [`Function::run`]. Must be called inside a
    /// tokio runtime.
    ///
    /// # Errors
    /// [`FunctionError`].
    pub async fn run<K>(&self, key: K, input: &I) -> Result<T, FunctionError<E>>
    where
        K: TryInto<IdempotencyKey>,
        K::Error: Into<KeyError>,
    {
        self.run_detailed(key, input).await.map(|output| output.value)
    }

    /// As [`run`](Self::run), and returns the origin of the value.
    ///
    /// # Errors
    /// [`FunctionError`].
    pub async fn run_detailed<K>(&self, key: K, input: &I) -> Result<FunctionOutput<T>, FunctionError<E>>
    where
        K: TryInto<IdempotencyKey>,
        K::Error: Into<KeyError>,
    {
        let json = value::encode(input, step::MAX_INPUT_BYTES).map_err(InvalidCall::Input)?;
        match self.function.call(key, input).claim().await? {
            CallClaim::Execute(permit) => joined(self.spawn(permit, json.into())).await,
            CallClaim::Replay(response) => self.function.replay(&response),
        }
    }

    /// Executes in a task of its own. There must be no await between the claim and this.
    fn spawn(&self, permit: Permit, json: Bytes) -> JoinHandle<Result<FunctionOutput<T>, FunctionError<E>>> {
        let this = self.clone();
        self.function.settings.engine.spawn(async move { this.execute(permit, json).await })
    }

    async fn execute(&self, permit: Permit, json: Bytes) -> Result<FunctionOutput<T>, FunctionError<E>> {
        // Before any effect: a call that no attempt could continue must not begin.
        let input = permit.attempt().begin(json).await.and_then(|json| {
            value::decode(&json)
                .map_err(|reason| StepError::Undecodable { step: "its input".to_owned(), reason })
        });
        match input {
            Ok(input) => self.function.execute(permit, |attempt| (self.run)(attempt, input)).await,
            Err(why) => {
                permit.cancel().await;
                Err(match why {
                    StepError::Fenced => FunctionError::InProgress { lease_left: Duration::ZERO },
                    StepError::Store { reason } => FunctionError::Store(StoreError::unavailable(reason)),
                    why => FunctionError::Undecodable {
                        function: self.function.settings.name.clone(),
                        reason: why.to_string(),
                    },
                })
            }
        }
    }

    /// Reads all records once, and executes the calls of this function again that were abandoned or released half-way. The first
    /// error of the store ends the round.
    ///
    /// Several completers may run at the same time, in one process or in many, because each record is claimed first.
    ///
    /// # Errors
    /// The error of the store.
    pub async fn complete(&self, options: CompleterOptions) -> Result<CompleterRound, StoreError> {
        let mut running = RunningCalls::new();
        let round = self.round(options, &mut running).await?;
        while running.calls.join_next().await.is_some() {}
        Ok(round)
    }

    /// As [`complete`](Self::complete), without waiting for the calls. Dropping `running` stops none of them.
    async fn round(
        &self,
        options: CompleterOptions,
        running: &mut RunningCalls,
    ) -> Result<CompleterRound, StoreError> {
        let mut round = CompleterRound::default();
        for (state, min_age) in [(StateName::Abandoned, Duration::ZERO), (StateName::Released, options.after)]
        {
            let mut query = ListQuery::default();
            query.states = state.into();
            query.caller =
                Some(self.function.settings.label.caller()).filter(|_| self.function.settings.has_caller);
            query.operation = Some(self.function.settings.name.to_string());
            query.min_age = min_age;
            loop {
                let page = self.function.settings.engine.store().list(query.clone()).await?;
                for (id, record) in page.records {
                    let Some(json) = self.input(&record) else { continue };
                    let now = self.function.settings.engine.store().now();
                    let age = now.since(record.created_at);
                    if age >= options.max_age || value::decode::<I>(&json).is_err() {
                        let function = &*self.function.settings.name;
                        let attempts = record.attempts;
                        tracing::debug!(function, record = ?id, attempts, ?age, "the completer leaves a call to an operator");
                        round.left += 1;
                        continue;
                    }
                    if now.since(stopped_at(&record)) < options.pause(state, record.attempts) {
                        continue;
                    }
                    // Before the claim, because a claimed call is executed at once.
                    let place = running.place().await;
                    if let Some(permit) = self.claim(id, &record).await? {
                        // Since it was listed, the record may have been completed and purged. Then this would begin the call
                        // anew.
                        if !permit.attempt().was_begun().await {
                            permit.cancel().await;
                            continue;
                        }
                        round.executed += 1;
                        running.add(self.spawn(permit, json), place);
                    }
                }
                query.after = page.next;
                if page.next.is_none() {
                    break;
                }
            }
        }
        Ok(round)
    }

    /// Spawns a task that completes calls in rounds until the engine is [drained](crate::Engine::drain). An error of the store is
    /// logged and ends only its round.
    pub fn spawn_completer(&self, options: CompleterOptions) -> JoinHandle<()> {
        let this = self.clone();
        let engine = self.function.settings.engine.clone();
        self.function.settings.engine.spawn(async move {
            let function = this.function.settings.name.clone();
            // Shared by all rounds, so that a slow call does not delay later rounds.
            let mut running = RunningCalls::new();
            let mut left = 0;
            loop {
                tokio::select! {
                    biased;
                    () = engine.closing() => return,
                    round = this.round(options, &mut running) => match round {
                        Ok(round) => {
                            if round.executed > 0 {
                                tracing::info!(%function, executed = round.executed, "the completer executes calls again");
                            }
                            // Only if there are more than before, not in every round.
                            if round.left > left {
                                let left = round.left;
                                tracing::warn!(%function, left, "calls are left half-way; an operator has to resolve them");
                            }
                            left = round.left;
                        }
                        Err(error) => tracing::warn!(%function, error = %ErrorChain(&error), "a round of the completer failed and will be repeated"),
                    }
                }
                tokio::select! {
                    biased;
                    () = engine.closing() => return,
                    () = tokio::time::sleep(options.every) => {}
                }
            }
        })
    }

    /// The recorded input, if this record is a call of this function.
    fn input(&self, record: &Record) -> Option<Bytes> {
        let first = record.steps.as_slice().first().filter(|step| step.name() == step::INPUT)?;
        (record.label.operation() == &*self.function.settings.name).then(|| first.result().clone())
    }

    async fn claim(&self, id: RecordId, record: &Record) -> Result<Option<Permit>, StoreError> {
        let policy = self.function.settings.policy.with_wait(Duration::ZERO).unwrap_or_default();
        let (fingerprint, label) = (record.fingerprint, record.label.clone());
        let request = ClaimRequest { id, fingerprint, label, policy };
        match self.function.settings.engine.claim(request).await? {
            ClaimOutcome::Execute(permit) => Ok(Some(permit)),
            // Another process was faster, or the call has ended.
            _ => Ok(None),
        }
    }
}

/// The end of the last attempt at a record: its release, or the end of its lease.
fn stopped_at(record: &Record) -> Timestamp {
    match record.state {
        State::InProgress { lease_until, .. } => lease_until,
        _ => record.changed_at,
    }
}

impl<I, T, E, P: Clone> Clone for Resumable<I, T, E, P> {
    fn clone(&self) -> Self {
        Self { function: self.function.clone(), run: self.run.clone() }
    }
}

impl<I, T, E, P> fmt::Debug for Resumable<I, T, E, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resumable").field("function", &self.function).finish_non_exhaustive()
    }
}
