//! The run of one call.

use std::future::Future;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::{Completion, OnAbandoned, RecordId, StoredResponse};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::task::JoinHandle;

use super::errors::{ErrorEnd, ErrorFate, ErrorPolicy, FunctionError};
use super::value::{self, JsonError, guarded};
use super::{Call, Function};
use crate::attempt::{Attempt, Permit, SettleOutcome};
use crate::engine::{ClaimOutcome, ClaimRequest};
use crate::lease::LeaseError;
use crate::panic::catch_panic;

/// The status of stored values. A replay accepts any status from 200 to 299, because an operator may have chosen another one.
pub(super) const VALUE: u16 = 200;

/// The status under which an error is stored.
const ERROR: u16 = 500;

/// The value of a call, and its origin.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FunctionOutput<T> {
    /// The value.
    pub value: T,
    /// The number of the attempt that gave the value, from 1, if this call ran the function; `None` if the value was replayed.
    pub attempt: Option<u32>,
    /// The storage of the value.
    pub stored: StorageStatus,
}

impl<T> FunctionOutput<T> {
    /// Returns true if an earlier call ran the function, and this value comes from the record.
    #[must_use]
    pub const fn is_replayed(&self) -> bool {
        self.attempt.is_none()
    }
}

/// The storage of a value, which decides what later calls get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StorageStatus {
    /// The value is stored: later calls get it.
    Stored,
    /// The value cannot be stored, for this reason: later calls get [`FunctionError::Unreplayable`].
    NotStored(JsonError),
    /// The store failed. The engine tries again in the background. If that never succeeds, the abandon policy decides.
    Deferred,
    /// The value is not stored: the lease had ended, and another attempt took over. Both may have had an effect.
    Fenced,
}

impl<P> Call<P> {
    /// Runs `run` in a task of its own, unless this key was used before: see [`Function::run`].
    ///
    /// # Errors
    /// [`FunctionError`].
    pub async fn run<F, Fut, T, E>(self, run: F) -> Result<T, FunctionError<E>>
    where
        F: FnOnce(Attempt) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Send + 'static,
        P: ErrorPolicy<E> + Send + Sync + 'static,
    {
        self.run_detailed(run).await.map(|output| output.value)
    }

    /// As [`run`](Self::run), and returns the origin of the value.
    ///
    /// # Errors
    /// [`FunctionError`].
    pub async fn run_detailed<F, Fut, T, E>(self, run: F) -> Result<FunctionOutput<T>, FunctionError<E>>
    where
        F: FnOnce(Attempt) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Send + 'static,
        P: ErrorPolicy<E> + Send + Sync + 'static,
    {
        match self.claim().await? {
            CallClaim::Execute(permit) => {
                let engine = self.function.settings.engine.clone();
                // No await between the claim and this: otherwise the caller could be dropped in between.
                let task = engine.spawn(async move { self.function.execute(permit, run).await });
                joined(task).await
            }
            CallClaim::Replay(response) => self.function.replay(&response),
        }
    }

    /// Runs `run` in this future, unless this key was used before: see [`Function::run_in_place`].
    ///
    /// # Errors
    /// [`FunctionError`].
    pub async fn run_in_place<F, Fut, T, E>(self, run: F) -> Result<T, FunctionError<E>>
    where
        F: FnOnce(Attempt) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        T: Serialize + DeserializeOwned,
        P: ErrorPolicy<E>,
    {
        match self.claim().await? {
            CallClaim::Execute(permit) => self.function.execute(permit, run).await,
            CallClaim::Replay(response) => self.function.replay(&response),
        }
        .map(|output| output.value)
    }

    pub(super) async fn claim<E>(&self) -> Result<CallClaim, FunctionError<E>> {
        let (id, key, fingerprint) = self.request?;
        let settings = &self.function.settings;
        let label = settings.label.clone().with_key(key);
        let request = ClaimRequest { id, fingerprint, label, policy: settings.policy };
        match settings.engine.claim(request).await {
            Ok(ClaimOutcome::Execute(permit)) => Ok(CallClaim::Execute(permit)),
            Ok(ClaimOutcome::Replay(response)) => Ok(CallClaim::Replay(response)),
            Ok(ClaimOutcome::InProgress { lease_left, .. }) => Err(FunctionError::InProgress { lease_left }),
            Ok(ClaimOutcome::Mismatch) => Err(FunctionError::KeyReused),
            Ok(ClaimOutcome::Unknown) => Err(FunctionError::Unknown),
            Ok(ClaimOutcome::Unreplayable | ClaimOutcome::AddResponse(_) | ClaimOutcome::ResponseAwaited) => {
                Err(FunctionError::Unreplayable)
            }
            Err(error) => Err(FunctionError::Store(error)),
        }
    }
}

pub(super) enum CallClaim {
    Execute(Permit),
    Replay(StoredResponse),
}

/// The response in which a record keeps a result.
pub(super) fn response(status: u16, json: Vec<u8>) -> Result<StoredResponse, JsonError> {
    let fields = [("content-type", &b"application/json"[..])];
    StoredResponse::new(status, &fields, &[Bytes::from(json)], &[]).map_err(|_| JsonError::TooLarge)
}

/// The result of a task that runs a function.
pub(super) async fn joined<T, E>(
    task: JoinHandle<Result<FunctionOutput<T>, FunctionError<E>>>,
) -> Result<FunctionOutput<T>, FunctionError<E>> {
    match task.await {
        Ok(result) => result,
        Err(error) if error.is_panic() => Err(FunctionError::Panicked),
        // The runtime ended, and the function with it.
        Err(_) => Err(FunctionError::Unknown),
    }
}

impl<P> Function<P> {
    /// Runs the function and stores its result. If this future is dropped, the key stays taken.
    pub(super) async fn execute<F, Fut, T, E>(
        &self,
        permit: Permit,
        run: F,
    ) -> Result<FunctionOutput<T>, FunctionError<E>>
    where
        F: FnOnce(Attempt) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        T: Serialize + DeserializeOwned,
        P: ErrorPolicy<E>,
    {
        let attempt = permit.attempt();
        let (id, number) = (attempt.record_id(), attempt.number());
        // The process may have been stopped since the claim for longer than the lease.
        if let Err(error) = attempt.confirm_lease().await {
            drop(self.settle(permit.release()).await);
            return Err(match error {
                LeaseError::Fenced => FunctionError::InProgress { lease_left: Duration::ZERO },
                LeaseError::Store(error) => FunctionError::Store(error),
            });
        }
        // Inside the async block, so that a panic of `run` before it returns its future is caught, too.
        let handle = attempt.clone();
        let Ok(result) = catch_panic(async move { run(handle).await }).await else {
            self.end_unknown(permit).await;
            return Err(FunctionError::Panicked);
        };
        let max = self.settings.max_result_bytes;
        match result {
            // An earlier attempt ended with an error, and has begun to take its steps back.
            Ok(_) if attempt.ends_with_error() => {
                drop(self.settle(permit.complete(Completion::Unknown)).await);
                Err(FunctionError::Unknown)
            }
            Ok(value) => {
                let stored = self.store(permit, id, VALUE, value::encode(&value, max)).await;
                Ok(FunctionOutput { value, attempt: Some(number), stored })
            }
            Err(error) => {
                // After a panic of the policy, the outcome is unknown.
                let end = guarded(|| self.errors.end(&error, max)).unwrap_or(ErrorEnd::Unknown);
                let (error, end) = match end {
                    end @ ErrorEnd::Keep(_) => self.compensate_steps(&attempt, error, end).await,
                    end if attempt.ends_with_error() => self.compensate_steps(&attempt, error, end).await,
                    end => (FunctionError::Failed { error, replayed: false }, end),
                };
                match end {
                    ErrorEnd::Keep(json) => drop(self.store(permit, id, ERROR, json).await),
                    ErrorEnd::Release => drop(self.settle(permit.release()).await),
                    ErrorEnd::Unknown => self.end_unknown(permit).await,
                    ErrorEnd::Park => drop(self.settle(permit.complete(Completion::Unknown)).await),
                }
                Err(error)
            }
        }
    }

    /// Takes back the finished steps of the attempt before an error becomes the function's result. Returns the error for the
    /// caller, and the effect on the record.
    async fn compensate_steps<E>(
        &self,
        attempt: &Attempt,
        error: E,
        end: ErrorEnd,
    ) -> (FunctionError<E>, ErrorEnd)
    where
        P: ErrorPolicy<E>,
    {
        let json = match &end {
            ErrorEnd::Keep(Ok(json)) => Some(Bytes::copy_from_slice(json)),
            _ => None,
        };
        let failed = |error| FunctionError::Failed { error, replayed: false };
        match attempt.compensate_before(json).await {
            Ok(None) => (failed(error), end),
            // The error that was recorded before the first compensation counts, even if this attempt ended in another way.
            Ok(Some(recorded)) => match guarded(|| self.errors.read(&recorded)) {
                Some(Ok(first)) => (failed(first), ErrorEnd::Keep(Ok(recorded.to_vec()))),
                _ => {
                    let end = if matches!(end, ErrorEnd::Keep(_)) { end } else { ErrorEnd::Park };
                    (failed(error), end)
                }
            },
            Err(why) => {
                let function = &*self.settings.name;
                tracing::warn!(function, record = ?attempt.record_id(), %why, "the steps of a failed call are not taken back yet");
                let end = match why.fate() {
                    ErrorFate::Release | ErrorFate::Keep => ErrorEnd::Release,
                    ErrorFate::Unknown => ErrorEnd::Unknown,
                    ErrorFate::Park => ErrorEnd::Park,
                };
                (FunctionError::NotCompensated { error, reason: why.to_string() }, end)
            }
        }
    }

    /// Completes with this JSON, or without a response if there is none.
    async fn store(
        &self,
        permit: Permit,
        id: RecordId,
        status: u16,
        json: Result<Vec<u8>, JsonError>,
    ) -> StorageStatus {
        let response = json.and_then(|json| response(status, json));
        let (completion, stored) = match response {
            Ok(response) => (Completion::Replayable(response), StorageStatus::Stored),
            Err(why) => {
                let function = &*self.settings.name;
                tracing::warn!(function, record = %id, %why, "a result was not stored and cannot be replayed");
                (Completion::Tombstone, StorageStatus::NotStored(why))
            }
        };
        match self.settle(permit.complete(completion)).await {
            Some(SettleOutcome::Done) => stored,
            Some(SettleOutcome::Fenced) => StorageStatus::Fenced,
            Some(SettleOutcome::Deferred(_) | SettleOutcome::LeftToLease) | None => StorageStatus::Deferred,
        }
    }

    /// Ends an attempt whose outcome is unknown. Under `park`, the record is parked now. Otherwise it is left to its lease, as
    /// after a crash.
    async fn end_unknown(&self, permit: Permit) {
        if self.settings.policy.on_abandoned() == OnAbandoned::Park {
            drop(self.settle(permit.complete(Completion::Unknown)).await);
        }
    }

    /// Waits for the end of an attempt. The end continues if the caller goes away. `None` if the runtime ended first.
    async fn settle(
        &self,
        end: impl Future<Output = SettleOutcome> + Send + 'static,
    ) -> Option<SettleOutcome> {
        let mut end: Pin<Box<dyn Future<Output = SettleOutcome> + Send>> = Box::pin(end);
        // Most stores in this process answer at once, and need no task.
        if let Poll::Ready(settled) = std::future::poll_fn(|cx| Poll::Ready(end.as_mut().poll(cx))).await {
            return Some(settled);
        }
        self.settings.engine.spawn(end).await.ok()
    }

    pub(super) fn replay<T, E>(
        &self,
        response: &StoredResponse,
    ) -> Result<FunctionOutput<T>, FunctionError<E>>
    where
        T: DeserializeOwned,
        P: ErrorPolicy<E>,
    {
        let undecodable =
            |reason| FunctionError::Undecodable { function: self.settings.name.clone(), reason };
        let body = response.as_body();
        if matches!(response.status(), 200..300) {
            let value = value::decode(body).map_err(undecodable)?;
            return Ok(FunctionOutput { value, attempt: None, stored: StorageStatus::Stored });
        }
        let error = guarded(|| self.errors.read(body))
            .unwrap_or_else(|| Err("reading the error panicked".to_owned()))
            .map_err(undecodable)?;
        Err(FunctionError::Failed { error, replayed: true })
    }
}
