//! Errors of a function, and the reasons why it did not run.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{KeyError, StoreError};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::value::{self, JsonError};

/// The error of a function call: the reason why there is no value.
///
/// | variant | the function | what to do |
/// |---|---|---|
/// | `Failed` | ran and returned this error, now or (`replayed`) before | as the error says |
/// | `InProgress` | runs for another call | the same key, later |
/// | `KeyReused` | was called with this key and another input | fix the caller |
/// | `Unknown` | ran; it is unknown if it took effect | stop; an operator has to find out |
/// | `Unreplayable` | took effect; its result was not stored | look up the result elsewhere |
/// | `Undecodable` | took effect; its stored result does not match the type | read the record; a new key would do it twice |
/// | `NotCompensated` | returned this error, and a step is not taken back yet | the same key, later, or as the reason says |
/// | `Panicked` | panicked | as for `Unknown` |
/// | `Store` | was not run: the store failed | the same key, later |
/// | `Key`, `Input` | was not run: the call is invalid | fix the caller |
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FunctionError<E> {
    /// The function returned an error.
    #[error("{error}")]
    Failed {
        /// The error. It is not the [source](std::error::Error::source), because `E` need not be an error itself (`String`,
        /// `anyhow::Error`).
        error: E,
        /// True if an earlier call got the error, and this one gets it from the record.
        replayed: bool,
    },
    /// Another call with this key is in progress.
    #[error("a call with this key is in progress")]
    InProgress {
        /// The rest of the owner's lease, which the owner renews while it lives.
        lease_left: Duration,
    },
    /// The key was used with another input.
    #[error("the key was used with another input")]
    KeyReused,
    /// It is unknown whether the function took effect.
    #[error("it is unknown whether an earlier call with this key took effect")]
    Unknown,
    /// The function ran to its end, but its result was not stored.
    #[error("an earlier call with this key took effect, but its result was not stored")]
    Unreplayable,
    /// The function ran to its end, but its stored result cannot be read as the requested type: the type has changed, or an
    /// operator stored another value. The function never runs again because of that.
    #[error("the stored result of {function} cannot be read: {reason}")]
    Undecodable {
        /// The function's name.
        function: Arc<str>,
        /// The mismatch, without any part of the value.
        reason: String,
    },
    /// The function returned an error to be stored after [steps](crate::step), but a step is not taken back yet or did not end.
    /// The error is not the function's result yet: the next call with the key continues.
    #[error("{error} (the operation has not ended; call it again with the same key: {reason})")]
    NotCompensated {
        /// The error.
        error: E,
        /// The reason why the step is not taken back.
        reason: String,
    },
    /// The function panicked in this call. It is unknown whether it took effect.
    #[error("the function panicked; it is unknown whether it took effect")]
    Panicked,
    /// The store failed, or cannot read the record. This call executed nothing.
    #[error("nothing was executed, because the store failed or cannot read the record")]
    Store(#[source] StoreError),
    /// The key is invalid.
    #[error("nothing was executed, because the key is not valid")]
    Key(#[source] KeyError),
    /// The input has no JSON, so it cannot be compared.
    #[error("nothing was executed, because the input cannot be compared")]
    Input(#[source] JsonError),
}

impl<E> FunctionError<E> {
    /// Converts the error of the function.
    pub fn map<U>(self, with: impl FnOnce(E) -> U) -> FunctionError<U> {
        match self {
            Self::Failed { error, replayed } => FunctionError::Failed { error: with(error), replayed },
            Self::InProgress { lease_left } => FunctionError::InProgress { lease_left },
            Self::KeyReused => FunctionError::KeyReused,
            Self::Unknown => FunctionError::Unknown,
            Self::Unreplayable => FunctionError::Unreplayable,
            Self::Undecodable { function, reason } => FunctionError::Undecodable { function, reason },
            Self::NotCompensated { error, reason } => {
                FunctionError::NotCompensated { error: with(error), reason }
            }
            Self::Panicked => FunctionError::Panicked,
            Self::Store(error) => FunctionError::Store(error),
            Self::Key(error) => FunctionError::Key(error),
            Self::Input(error) => FunctionError::Input(error),
        }
    }
}

/// The effect of a function's error on its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorFate {
    /// Stores the error as the result: every later call gets the same error, and nothing runs again.
    Keep,
    /// Frees the key: the next call runs the function. **Only if it is certain that nothing took effect.**
    Release,
    /// Leaves the outcome unknown. Under [`park`](oncegate_core::OnAbandoned::Park), every later call gets
    /// [`FunctionError::Unknown`] until an operator resolves the record. Otherwise the function runs again after the lease, as
    /// after a crash, and sees [`Attempt::is_after_abandoned`](crate::Attempt::is_after_abandoned).
    Unknown,
    /// Keeps the key until an operator resolves the record, whatever the policy says about abandoned attempts: every later
    /// call gets [`FunctionError::Unknown`].
    Park,
}

/// The fate of one error, with its JSON if it is to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ErrorEnd {
    /// [`ErrorFate::Keep`], with the bytes to store.
    Keep(Result<Vec<u8>, JsonError>),
    /// [`ErrorFate::Release`].
    Release,
    /// [`ErrorFate::Unknown`].
    Unknown,
    /// [`ErrorFate::Park`].
    Park,
}

/// The effect of a function's errors of type `E` on its record. See [`Function::with_errors`](super::Function::with_errors).
///
/// Implemented by
///
/// - every closure or function `Fn(&E) -> ErrorFate`, if `E` can be stored as JSON, such as
///   [`StepError::fate`](crate::StepError::fate) for functions in [steps](crate::step);
/// - [`ReleaseIf`], for any error;
/// - [`UnknownErrors`], the default.
///
/// ```
/// # use oncegate_core::MemoryStore;
/// use oncegate_engine::{Attempt, Engine, ErrorFate, StepError};
///
/// #[derive(serde::Serialize, serde::Deserialize)]
/// enum PayError { CardDeclined, NotSent, TimedOut }
///
/// let engine = Engine::new(MemoryStore::default());
/// let pay = engine.function("pay").with_errors(|error: &PayError| match error {
///     PayError::CardDeclined => ErrorFate::Keep,
///     PayError::NotSent => ErrorFate::Release,
///     PayError::TimedOut => ErrorFate::Unknown,
/// });
///
/// async fn order(attempt: Attempt) -> Result<u64, StepError<String>> { Ok(1) }
/// let orders = engine.function("order").with_errors(StepError::fate);
/// # drop((orders.run("k", &(), order), pay.run("k", &(), async |_| Err::<(), _>(PayError::TimedOut))));
/// ```
pub trait ErrorPolicy<E> {
    /// Decides the fate of an error. Its JSON, if it is stored, has at most `max` bytes.
    #[doc(hidden)]
    fn end(&self, error: &E, max: usize) -> ErrorEnd;

    /// Reads a stored error.
    ///
    /// # Errors
    /// The reason why it cannot be read, without any part of its value.
    #[doc(hidden)]
    fn read(&self, stored: &[u8]) -> Result<E, String>;
}

impl<E: Serialize + DeserializeOwned, F: Fn(&E) -> ErrorFate> ErrorPolicy<E> for F {
    fn end(&self, error: &E, max: usize) -> ErrorEnd {
        match self(error) {
            ErrorFate::Keep => ErrorEnd::Keep(value::encode(error, max)),
            ErrorFate::Release => ErrorEnd::Release,
            ErrorFate::Unknown => ErrorEnd::Unknown,
            ErrorFate::Park => ErrorEnd::Park,
        }
    }

    fn read(&self, stored: &[u8]) -> Result<E, String> {
        value::decode(stored)
    }
}

const NOT_STORED: &str = "it is an error, and errors of this function are not stored";

/// The default policy: after every error the outcome is unknown ([`ErrorFate::Unknown`]).
///
/// An error says that the function failed, not that nothing happened: a payment that timed out may have been made.
#[derive(Clone, Copy, Debug, Default)]
pub struct UnknownErrors;

impl<E> ErrorPolicy<E> for UnknownErrors {
    fn end(&self, _: &E, _: usize) -> ErrorEnd {
        ErrorEnd::Unknown
    }

    fn read(&self, _: &[u8]) -> Result<E, String> {
        Err(NOT_STORED.to_owned())
    }
}

/// A policy for errors that serde does not know: the closure returns whether it is certain that nothing took effect.
///
/// If it returns true, the key is free ([`ErrorFate::Release`]). Otherwise the outcome is unknown ([`ErrorFate::Unknown`]).
///
/// ```
/// use oncegate_engine::ReleaseIf;
///
/// enum Declined { BeforeTheCall, TimedOut }
/// let policy = ReleaseIf(|error: &Declined| matches!(error, Declined::BeforeTheCall));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ReleaseIf<F>(pub F);

impl<E, F: Fn(&E) -> bool> ErrorPolicy<E> for ReleaseIf<F> {
    fn end(&self, error: &E, _: usize) -> ErrorEnd {
        if (self.0)(error) { ErrorEnd::Release } else { ErrorEnd::Unknown }
    }

    fn read(&self, _: &[u8]) -> Result<E, String> {
        Err(NOT_STORED.to_owned())
    }
}
