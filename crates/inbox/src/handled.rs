//! What a handler says, and what becomes of a delivery.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use oncegate_core::{ErrorChain, StoreError};

use crate::dead::ERROR_MAX;

type Boxed = Box<dyn Error + Send + Sync>;

/// Why a message was not processed, as its handler says it.
///
/// Any error becomes one by `?`: [`Failure::Unsure`].
#[derive(Debug)]
pub enum Failure {
    /// Nothing took effect, or to do it again does no harm: it is tried again, up to the limit.
    Retry(Boxed),
    /// It will never succeed: the message is a dead letter now.
    Reject(Boxed),
    /// An error of which nothing is known. Where the effect is in the transaction of the receipt, or is known under a
    /// downstream key, that is the same as [`Retry`](Self::Retry); otherwise the outcome is unknown, and the message is a
    /// dead letter that says so.
    Unsure(Boxed),
}

impl Failure {
    /// Nothing took effect, or to do it again does no harm.
    pub fn retry(error: impl Into<Boxed>) -> Self {
        Self::Retry(error.into())
    }

    /// It will never succeed.
    pub fn reject(error: impl Into<Boxed>) -> Self {
        Self::Reject(error.into())
    }

    /// It may have taken effect.
    pub fn unsure(error: impl Into<Boxed>) -> Self {
        Self::Unsure(error.into())
    }

    /// The error itself.
    #[must_use]
    pub fn error(&self) -> &(dyn Error + Send + Sync + 'static) {
        match self {
            Self::Retry(error) | Self::Reject(error) | Self::Unsure(error) => &**error,
        }
    }

    /// The error and its causes, as a dead letter keeps them: at most [`ERROR_MAX`] bytes.
    #[must_use]
    pub fn to_error_text(&self) -> String {
        let mut text = ErrorChain(self.error()).to_string();
        text.truncate(text.floor_char_boundary(ERROR_MAX));
        text
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.error(), f)
    }
}

impl<E: Error + Send + Sync + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Unsure(Box::new(error))
    }
}

/// What became of one delivery of a message.
#[derive(Debug)]
#[non_exhaustive]
pub enum Handled {
    /// It was processed now: its effect and its receipt are durable.
    Processed {
        /// How many attempts it took, as far as that was counted.
        attempts: u32,
    },
    /// It was processed before.
    Duplicate,
    /// Somebody else is processing it.
    InFlight {
        /// When to ask again.
        retry_after: Duration,
    },
    /// It failed, and will be tried again.
    Failed {
        /// How many attempts there were.
        attempts: u32,
        /// Why.
        failure: Failure,
    },
    /// It is given up, and its dead letter is where it belongs.
    Dead {
        /// Why.
        reason: DeadReason,
        /// Whether that was found out before.
        is_known: bool,
    },
    /// The store, the database or the destination of dead letters is out of reach. Nothing is known of the message.
    Unavailable(StoreError),
    /// An earlier message with the same order key was not processed, so this one was not begun.
    NotBegun,
}

/// What is to be done with a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settlement {
    /// The broker may forget it.
    Acknowledge,
    /// It has to come again, not before that time.
    Later(Duration),
}

impl Handled {
    /// What the broker is to be told: acknowledge what is durable, and nothing else. `backoff` is how long to wait after a
    /// failure.
    #[must_use]
    pub fn settlement(&self, backoff: Duration) -> Settlement {
        match self {
            Self::Processed { .. } | Self::Duplicate | Self::Dead { .. } => Settlement::Acknowledge,
            Self::InFlight { retry_after } => Settlement::Later(*retry_after),
            Self::Failed { .. } | Self::Unavailable(_) => Settlement::Later(backoff),
            Self::NotBegun => Settlement::Later(Duration::ZERO),
        }
    }
}

/// Why a message is a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeadReason {
    /// Its handler said that it will never succeed.
    Rejected,
    /// It failed as often as is allowed.
    AttemptsExhausted,
    /// It does not say what it is to be told by.
    NoIdentity,
    /// Another message has the same identity.
    IdentityReused,
    /// Nobody knows whether it took effect, and it may not be tried again.
    OutcomeUnknown,
}

impl DeadReason {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Rejected,
        Self::AttemptsExhausted,
        Self::NoIdentity,
        Self::IdentityReused,
        Self::OutcomeUnknown,
    ];

    /// The word that dead letters and metrics have for it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Rejected => "rejected",
            Self::AttemptsExhausted => "attempts-exhausted",
            Self::NoIdentity => "no-identity",
            Self::IdentityReused => "identity-reused",
            Self::OutcomeUnknown => "outcome-unknown",
        }
    }

    /// The reason with this word.
    #[must_use]
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.as_str() == word)
    }
}

impl fmt::Display for DeadReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
