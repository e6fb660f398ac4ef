//! How long, how often and how far a client goes on.

use std::time::Duration;

use oncegate_core::ConfigError;

use crate::backoff::Jitter;

/// What the API at the other end does with keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Api {
    /// It honours the key: the same request under the same key takes effect once.
    #[default]
    Idempotent,
    /// It knows no keys. None is sent, and a request that does not repeat by its method is sent again only where it is
    /// certain that it was not processed: no connection, REFUSED_STREAM or GOAWAY of HTTP/2, 425, 429. Everything else
    /// ends as unknown.
    Plain,
}

/// What an answer from 500 to 599 means that says nothing more: not 501 to 505, 511, and no replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ServerErrors {
    /// Ask again under the same key. A service that keeps such answers replays it, and a replay is final; one that undid
    /// everything executes the request. The default, wherever a request can be repeated.
    Again,
    /// The answer is final, as for an API that documents that it keeps them but does not mark replays.
    Final,
    /// Nobody knows whether it took effect: stop. What a request that cannot be repeated always gets.
    Unknown,
}

/// When to send again, and when to stop. All limits hold together: whichever is reached first ends it.
#[derive(Clone, Debug)]
pub struct RetryPolicy {
    pub(crate) api: Api,
    pub(crate) server_errors: ServerErrors,
    pub(crate) attempts: u32,
    pub(crate) jitter: Jitter,
    pub(crate) base: Duration,
    pub(crate) cap: Duration,
    pub(crate) attempt_timeout: Duration,
    pub(crate) deadline: Duration,
    pub(crate) max_retry_after: Duration,
    pub(crate) key_lifetime: Duration,
    pub(crate) max_answer_bytes: usize,
}

impl Default for RetryPolicy {
    /// Six attempts of at most 30 s within 2 min, pauses with full jitter from 200 ms doubling up to 20 s, `Retry-After` up
    /// to 1 min, keys that are good for 24 h, answers up to 8 MiB.
    fn default() -> Self {
        Self {
            api: Api::Idempotent,
            server_errors: ServerErrors::Again,
            attempts: 6,
            jitter: Jitter::Full,
            base: Duration::from_millis(200),
            cap: Duration::from_secs(20),
            attempt_timeout: Duration::from_secs(30),
            deadline: Duration::from_secs(120),
            max_retry_after: Duration::from_secs(60),
            key_lifetime: Duration::from_secs(24 * 60 * 60),
            max_answer_bytes: 8 * 1024 * 1024,
        }
    }
}

impl RetryPolicy {
    /// What the API does with keys.
    #[must_use]
    pub fn with_api(self, api: Api) -> Self {
        Self { api, ..self }
    }

    /// What an unexplained answer from 500 to 599 means.
    #[must_use]
    pub fn with_server_errors(self, server_errors: ServerErrors) -> Self {
        Self { server_errors, ..self }
    }

    /// Most attempts in all, the first one included. Zero counts as one.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_attempts(self, attempts: u32) -> Result<Self, ConfigError> {
        Ok(Self { attempts: ConfigError::check("the number of attempts", attempts, 1..=u32::MAX)?, ..self })
    }

    /// How pauses are spread.
    #[must_use]
    pub fn with_jitter(self, jitter: Jitter) -> Self {
        Self { jitter, ..self }
    }

    /// The pause that doubling starts from, and the longest one.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_backoff(self, base: Duration, cap: Duration) -> Result<Self, ConfigError> {
        Ok(Self { base, cap: ConfigError::check("the longest pause", cap, base..=Duration::MAX)?, ..self })
    }

    /// How long one attempt may take, until its answer is there whole.
    #[must_use]
    pub fn with_attempt_timeout(self, attempt_timeout: Duration) -> Self {
        Self { attempt_timeout, ..self }
    }

    /// How long all attempts and pauses may take together. No attempt outlasts it, and no pause is begun that would.
    #[must_use]
    pub fn with_deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// The longest `Retry-After` that is waited for. A longer one ends the sending, and says when to come back.
    #[must_use]
    pub fn with_max_retry_after(self, max_retry_after: Duration) -> Self {
        Self { max_retry_after, ..self }
    }

    /// How long the API promises to know a key. A request that may have been sent is not sent again under a key that is
    /// older: the service might have forgotten it, and would execute it once more.
    #[must_use]
    pub fn with_key_lifetime(self, key_lifetime: Duration) -> Self {
        Self { key_lifetime, ..self }
    }

    /// Most octets of an answer that are read before it is judged. See [`Client::send`](crate::Client::send).
    #[must_use]
    pub fn with_max_answer_bytes(self, octets: usize) -> Self {
        Self { max_answer_bytes: octets, ..self }
    }
}
