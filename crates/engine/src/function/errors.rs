//! What is not a value: errors of the function, and why it did not run.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{KeyError, StoreError};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::value::{self, NotJson};
use crate::step::StepError;

/// Why a function's caller has no value.
///
/// | variant | the function | what to do |
/// |---|---|---|
/// | `Failed` | ran and returned this error, now or (`replayed`) before | as the error says |
/// | `InProgress` | runs for somebody else | the same key, later |
/// | `KeyReused` | was called with this key and another input | fix the caller |
/// | `Unknown` | ran, and nobody knows whether it took effect | stop; somebody has to find out |
/// | `NotReplayable` | took effect; its result was not stored | look up the result elsewhere |
/// | `Undecodable` | took effect; its stored result does not fit the type | read the record; a new key would do it twice |
/// | `NotTakenBack` | returned this error, and a step is not taken back yet | the same key, later, or as the reason says |
/// | `Panicked` | panicked in the middle | as for `Unknown` |
/// | `Store` | was not run: the store did not answer | the same key, later |
/// | `Key`, `Input` | was not run: the call is no call | fix the caller |
#[derive(Debug)]
#[non_exhaustive]
pub enum FunctionError<E> {
    /// The function returned an error.
    Failed {
        /// The error.
        error: E,
        /// Whether an earlier call got it, and this one from the record.
        replayed: bool,
    },
    /// Somebody else is at it.
    InProgress {
        /// What is left of the owner's lease, which it renews as long as it lives.
        lease_left: Duration,
    },
    /// The key was used with another input.
    KeyReused,
    /// It is not known whether the function took effect.
    Unknown,
    /// The function ran to its end, and its result was not stored.
    NotReplayable,
    /// The function ran to its end, and its stored result cannot be read as the type that is asked for: the type has changed, or
    /// somebody stored something else. It is never run again for that.
    Undecodable {
        /// The function's name.
        function: Arc<str>,
        /// What does not fit. Shows nothing of the value.
        reason: String,
    },
    /// The function returned an error to be stored, after [steps](crate::step), and one of these is not taken back yet, or did
    /// not come to its end. The error is not the function's result yet: the next call with the key goes on.
    NotTakenBack {
        /// The error.
        error: E,
        /// Why not.
        reason: String,
    },
    /// The function panicked in this call; what became of its effect is not known.
    Panicked,
    /// The store did not answer, or cannot read the record. This call executed nothing.
    Store(StoreError),
    /// The key is no key.
    Key(KeyError),
    /// The input has no JSON to compare it by.
    Input(NotJson),
}

impl<E> FunctionError<E> {
    /// The same, with another error of the function.
    pub fn map<U>(self, with: impl FnOnce(E) -> U) -> FunctionError<U> {
        match self {
            Self::Failed { error, replayed } => FunctionError::Failed { error: with(error), replayed },
            Self::InProgress { lease_left } => FunctionError::InProgress { lease_left },
            Self::KeyReused => FunctionError::KeyReused,
            Self::Unknown => FunctionError::Unknown,
            Self::NotReplayable => FunctionError::NotReplayable,
            Self::Undecodable { function, reason } => FunctionError::Undecodable { function, reason },
            Self::NotTakenBack { error, reason } => {
                FunctionError::NotTakenBack { error: with(error), reason }
            }
            Self::Panicked => FunctionError::Panicked,
            Self::Store(error) => FunctionError::Store(error),
            Self::Key(error) => FunctionError::Key(error),
            Self::Input(error) => FunctionError::Input(error),
        }
    }
}

impl<E: fmt::Display> fmt::Display for FunctionError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed { error, .. } => error.fmt(f),
            Self::InProgress { .. } => f.write_str("a call with this key is in progress"),
            Self::KeyReused => f.write_str("the key was used with another input"),
            Self::Unknown => f.write_str("it is not known whether an earlier call with this key took effect"),
            Self::NotReplayable => {
                f.write_str("an earlier call with this key took effect, and its result was not stored")
            }
            Self::Undecodable { function, reason } => {
                write!(f, "the stored result of {function} cannot be read: {reason}")
            }
            Self::NotTakenBack { error, reason } => {
                write!(f, "{error} (not at its end, call it again under its key: {reason})")
            }
            Self::Panicked => {
                f.write_str("the function panicked; it is not known whether it took effect before that")
            }
            Self::Store(_) => f.write_str(
                "nothing was executed, because the store did not answer or cannot read the record",
            ),
            Self::Key(_) => f.write_str("nothing was executed, because the key is not valid"),
            Self::Input(_) => f.write_str("nothing was executed, because the input cannot be compared"),
        }
    }
}

/// An error whatever `E` is, so that `?` accepts it if `E` is not an error itself (`String`, `anyhow::Error`). Therefore
/// [`Failed`](Self::Failed) has no source: the source of `E` is in its field.
impl<E: fmt::Debug + fmt::Display> std::error::Error for FunctionError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Store(error) => Some(error),
            Self::Key(error) => Some(error),
            Self::Input(error) => Some(error),
            _ => None,
        }
    }
}

/// What becomes of the record where the function returned an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorFate {
    /// The error is the result: every later call gets the same one, and nothing runs again.
    Store,
    /// The key is free, and the next call runs the function. **Only where it is certain that nothing took effect.**
    Release,
    /// It is not known what took effect. Under [`park`](oncegate_core::OnAbandoned::Park) every later call hears
    /// [`FunctionError::Unknown`] until an operator says; otherwise the function runs again after the lease, as after a
    /// crash, and sees [`Attempt::is_after_abandoned`](crate::Attempt::is_after_abandoned).
    Unknown,
    /// Nothing may run again before an operator has looked, whatever the policy says of the abandoned: every later call hears
    /// [`FunctionError::Unknown`].
    Park,
}

/// What an [`ErrorPolicy`] has to say of an error.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorEnd {
    /// [`ErrorFate::Store`], with the octets to store.
    Store(Result<Vec<u8>, NotJson>),
    /// [`ErrorFate::Release`].
    Release,
    /// [`ErrorFate::Unknown`].
    Unknown,
    /// [`ErrorFate::Park`].
    Park,
}

/// What becomes of the record where a function returns an error of type `E`.
///
/// [`UnknownErrors`] is the default: an error says that the function failed, and not that nothing happened. A payment that
/// ended with a time-out may have been made.
pub trait ErrorPolicy<E> {
    /// What becomes of this error. Its JSON, where it is stored, is `max` octets at the most.
    fn end(&self, error: &E, max: usize) -> ErrorEnd;

    /// Reads an error that was stored.
    ///
    /// # Errors
    /// Why it cannot be read, in words that show nothing of it.
    fn read(&self, stored: &[u8]) -> Result<E, String>;
}

const NOT_STORED: &str = "it holds an error, and errors of this function are not stored";

/// After an error the outcome is unknown: [`ErrorFate::Unknown`].
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

/// An error frees the key: [`ErrorFate::Release`]. Only for functions that return an error where nothing took effect.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReleasedErrors;

impl<E> ErrorPolicy<E> for ReleasedErrors {
    fn end(&self, _: &E, _: usize) -> ErrorEnd {
        ErrorEnd::Release
    }

    fn read(&self, _: &[u8]) -> Result<E, String> {
        Err(NOT_STORED.to_owned())
    }
}

/// An error of which this says that nothing took effect frees the key; after any other one the outcome is unknown. For errors
/// that serde does not know.
///
/// ```
/// use oncegate_engine::ReleasedIf;
///
/// enum Declined { BeforeTheCall, TimedOut }
/// let policy = ReleasedIf(|error: &Declined| matches!(error, Declined::BeforeTheCall));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ReleasedIf<F>(pub F);

impl<E, F: Fn(&E) -> bool> ErrorPolicy<E> for ReleasedIf<F> {
    fn end(&self, error: &E, _: usize) -> ErrorEnd {
        if (self.0)(error) { ErrorEnd::Release } else { ErrorEnd::Unknown }
    }

    fn read(&self, _: &[u8]) -> Result<E, String> {
        Err(NOT_STORED.to_owned())
    }
}

/// An error is stored like a value: [`ErrorFate::Store`].
#[derive(Clone, Copy, Debug, Default)]
pub struct StoredErrors;

impl<E: Serialize + DeserializeOwned> ErrorPolicy<E> for StoredErrors {
    fn end(&self, error: &E, max: usize) -> ErrorEnd {
        ErrorEnd::Store(value::encode(error, max))
    }

    fn read(&self, stored: &[u8]) -> Result<E, String> {
        value::decode(stored)
    }
}

/// This says for each error what becomes of it.
///
/// ```
/// use oncegate_engine::{ErrorFate, FateOf};
///
/// #[derive(serde::Serialize, serde::Deserialize)]
/// enum PayError { CardDeclined, NotSent, TimedOut }
/// let policy = FateOf(|error: &PayError| match error {
///     PayError::CardDeclined => ErrorFate::Store,
///     PayError::NotSent => ErrorFate::Release,
///     PayError::TimedOut => ErrorFate::Unknown,
/// });
/// ```
#[derive(Clone, Copy, Debug)]
pub struct FateOf<F>(pub F);

impl<E: Serialize + DeserializeOwned, F: Fn(&E) -> ErrorFate> ErrorPolicy<E> for FateOf<F> {
    fn end(&self, error: &E, max: usize) -> ErrorEnd {
        match (self.0)(error) {
            ErrorFate::Store => StoredErrors.end(error, max),
            ErrorFate::Release => ErrorEnd::Release,
            ErrorFate::Unknown => ErrorEnd::Unknown,
            ErrorFate::Park => ErrorEnd::Park,
        }
    }

    fn read(&self, stored: &[u8]) -> Result<E, String> {
        value::decode(stored)
    }
}

/// For functions in [steps](crate::step) that return [`StepError`]: the record goes on as [`StepError::fate`] says.
///
/// ```
/// # use std::sync::Arc;
/// # use oncegate_core::{Clock, MemoryStore, Timestamp};
/// # struct Fixed;
/// # impl Clock for Fixed { fn now(&self) -> Timestamp { Timestamp::from_millis(1) } }
/// use oncegate_engine::{Attempt, Engine, StepError, StepErrors};
///
/// # let engine = Engine::new(Arc::new(MemoryStore::new(Fixed)));
/// async fn order(attempt: Attempt) -> Result<u64, StepError<String>> { Ok(1) }
/// let orders = engine.function("order").with_errors(StepErrors);
/// # drop(orders.run("k", &(), order));
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct StepErrors;

impl<E: Serialize + DeserializeOwned> ErrorPolicy<StepError<E>> for StepErrors {
    fn end(&self, error: &StepError<E>, max: usize) -> ErrorEnd {
        FateOf(StepError::fate).end(error, max)
    }

    fn read(&self, stored: &[u8]) -> Result<StepError<E>, String> {
        value::decode(stored)
    }
}
