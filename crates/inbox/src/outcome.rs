//! The error of a handler, and the outcome of a delivery.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use oncegate_core::{ErrorChain, StoreError};

use crate::dead_letters::MAX_ERROR_BYTES;

type Boxed = Box<dyn Error + Send + Sync>;

/// The error with which a handler reports that a message was not processed.
///
/// `?` turns any error into [`HandlerError::Unsure`].
#[derive(Debug)]
pub enum HandlerError {
    /// Nothing took effect, or a repetition does no harm. The message is tried again, up to the limit.
    Retry(Boxed),
    /// The message will never succeed. It becomes a dead letter now.
    Reject(Boxed),
    /// An error after which the effect is unknown.
    ///
    /// If the effect is in the transaction of the receipt, or is made under a downstream key, this is the same as
    /// [`Retry`](Self::Retry). Otherwise the message becomes a dead letter with an unknown outcome.
    Unsure(Boxed),
}

impl HandlerError {
    /// Reports that nothing took effect, or that a repetition does no harm.
    pub fn retry(error: impl Into<Boxed>) -> Self {
        Self::Retry(error.into())
    }

    /// Reports that the message will never succeed.
    pub fn reject(error: impl Into<Boxed>) -> Self {
        Self::Reject(error.into())
    }

    /// Reports that the message may have taken effect.
    pub fn unsure(error: impl Into<Boxed>) -> Self {
        Self::Unsure(error.into())
    }

    /// Returns the wrapped error.
    #[must_use]
    pub fn error(&self) -> &(dyn Error + Send + Sync + 'static) {
        match self {
            Self::Retry(error) | Self::Reject(error) | Self::Unsure(error) => &**error,
        }
    }

    /// Returns the error and its causes as a dead letter keeps them: at most [`MAX_ERROR_BYTES`] bytes.
    #[must_use]
    pub fn to_error_text(&self) -> String {
        let mut text = ErrorChain(self.error()).to_string();
        text.truncate(text.floor_char_boundary(MAX_ERROR_BYTES));
        text
    }
}

impl fmt::Display for HandlerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.error(), f)
    }
}

impl<E: Error + Send + Sync + 'static> From<E> for HandlerError {
    fn from(error: E) -> Self {
        Self::Unsure(Box::new(error))
    }
}

/// The outcome of one delivery of a message.
#[derive(Debug)]
#[non_exhaustive]
pub enum ProcessOutcome {
    /// The message was processed now: its effect and its receipt are durable.
    Processed {
        /// The number of attempts, as far as they were counted.
        attempts: u32,
    },
    /// The message was processed before.
    Duplicate,
    /// Another consumer is processing the message.
    InFlight {
        /// The time to wait before the next try.
        retry_after: Duration,
    },
    /// The attempt failed, and the message will be tried again.
    Failed {
        /// The number of attempts so far.
        attempts: u32,
        /// The error of this attempt.
        failure: HandlerError,
    },
    /// The message was given up, and its dead letter is durable.
    Dead {
        /// The reason.
        reason: DeadReason,
        /// `true` if the message was already known to be dead.
        is_known: bool,
    },
    /// The store, the database or the destination of dead letters is out of reach. The state of the message is unknown.
    Unavailable(StoreError),
    /// Not started, because an earlier message with the same order key was not processed.
    NotBegun,
}

/// The reply to the broker for a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settlement {
    /// The broker may forget the message.
    Acknowledge,
    /// The broker has to deliver the message again, not before this time.
    RedeliverAfter(Duration),
}

impl ProcessOutcome {
    /// Returns the reply to the broker: it acknowledges what is durable, and nothing else.
    ///
    /// `backoff` is the pause after a failure.
    #[must_use]
    pub fn settlement(&self, backoff: Duration) -> Settlement {
        match self {
            Self::Processed { .. } | Self::Duplicate | Self::Dead { .. } => Settlement::Acknowledge,
            Self::InFlight { retry_after } => Settlement::RedeliverAfter(*retry_after),
            Self::Failed { .. } | Self::Unavailable(_) => Settlement::RedeliverAfter(backoff),
            Self::NotBegun => Settlement::RedeliverAfter(Duration::ZERO),
        }
    }
}

/// The reason why a message became a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeadReason {
    /// The handler reported that the message will never succeed.
    Rejected,
    /// The message failed as often as allowed.
    AttemptsExhausted,
    /// The message has no identity.
    NoIdentity,
    /// Another message has the same identity.
    IdentityReused,
    /// The message may or may not have taken effect, and must not be tried again.
    OutcomeUnknown,
}

impl DeadReason {
    /// All reasons.
    pub const ALL: [Self; 5] = [
        Self::Rejected,
        Self::AttemptsExhausted,
        Self::NoIdentity,
        Self::IdentityReused,
        Self::OutcomeUnknown,
    ];

    /// The word for this reason in dead letters and metrics.
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

    /// Returns the reason with this word.
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
