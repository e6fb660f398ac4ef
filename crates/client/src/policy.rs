//! The limits of retries.

use std::time::Duration;

use oncegate_core::ConfigError;

use crate::backoff::Jitter;

/// The treatment of keys by the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Api {
    /// The API honours keys: the same request under the same key takes effect once.
    #[default]
    Idempotent,
    /// The API knows no keys, so none is sent. A request whose method is not idempotent is sent again only if it was certainly
    /// not processed: no connection, REFUSED_STREAM or GOAWAY of HTTP/2, 425, 429. Everything else ends as unknown.
    Plain,
}

/// The meaning of a response from 500 to 599 without further signals: not 501 to 505, not 511, no replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ServerErrorPolicy {
    /// Send again under the same key. A service that keeps such responses replays it, and a replay is final. A service that
    /// undid everything executes the request. This is the default for requests that can be repeated.
    Again,
    /// The response is final. For an API that keeps such responses but does not mark replays.
    Final,
    /// The outcome is unknown, and the client stops. Requests that cannot be repeated are always treated so.
    Unknown,
}

/// The limits of retries. All hold together: the first limit that is reached ends the sending.
#[derive(Clone, Debug)]
pub struct RetryPolicy {
    pub(crate) api: Api,
    pub(crate) server_errors: ServerErrorPolicy,
    pub(crate) attempts: u32,
    pub(crate) jitter: Jitter,
    pub(crate) base: Duration,
    pub(crate) cap: Duration,
    pub(crate) attempt_timeout: Duration,
    pub(crate) deadline: Duration,
    pub(crate) max_retry_after: Duration,
    pub(crate) key_lifetime: Duration,
    pub(crate) max_response_bytes: usize,
}

impl Default for RetryPolicy {
    /// Six attempts of at most 30 s within 2 min; pauses with full jitter from 200 ms, doubling up to 20 s; `Retry-After` up
    /// to 1 min; keys valid for 24 h; responses up to 8 MiB.
    fn default() -> Self {
        Self {
            api: Api::Idempotent,
            server_errors: ServerErrorPolicy::Again,
            attempts: 6,
            jitter: Jitter::Full,
            base: Duration::from_millis(200),
            cap: Duration::from_secs(20),
            attempt_timeout: Duration::from_secs(30),
            deadline: Duration::from_secs(120),
            max_retry_after: Duration::from_secs(60),
            key_lifetime: Duration::from_secs(24 * 60 * 60),
            max_response_bytes: 8 * 1024 * 1024,
        }
    }
}

impl RetryPolicy {
    /// Sets the treatment of keys by the API.
    #[must_use]
    pub fn with_api(self, api: Api) -> Self {
        Self { api, ..self }
    }

    /// Sets the meaning of a response from 500 to 599 without further signals.
    #[must_use]
    pub fn with_server_errors(self, server_errors: ServerErrorPolicy) -> Self {
        Self { server_errors, ..self }
    }

    /// Sets the largest number of attempts, including the first one.
    ///
    /// # Errors
    /// If it is zero.
    pub fn with_max_attempts(self, attempts: u32) -> Result<Self, ConfigError> {
        Ok(Self { attempts: ConfigError::check("the number of attempts", attempts, 1..=u32::MAX)?, ..self })
    }

    /// Sets the distribution of pauses.
    #[must_use]
    pub fn with_jitter(self, jitter: Jitter) -> Self {
        Self { jitter, ..self }
    }

    /// Sets the first pause, which doubles, and the longest pause.
    ///
    /// # Errors
    /// If the longest pause is shorter than the first one.
    pub fn with_backoff(self, base: Duration, cap: Duration) -> Result<Self, ConfigError> {
        Ok(Self { base, cap: ConfigError::check("the longest pause", cap, base..=Duration::MAX)?, ..self })
    }

    /// Sets the time-out of one attempt, to the end of its response.
    #[must_use]
    pub fn with_attempt_timeout(self, attempt_timeout: Duration) -> Self {
        Self { attempt_timeout, ..self }
    }

    /// Sets the time-out for all attempts and pauses together. No attempt lasts longer, and no pause starts that would end later.
    #[must_use]
    pub fn with_deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// Sets the longest `Retry-After` for which the client waits. A longer one ends the sending as
    /// [`SendErrorKind::ComeBackLater`](crate::SendErrorKind::ComeBackLater).
    #[must_use]
    pub fn with_max_retry_after(self, max_retry_after: Duration) -> Self {
        Self { max_retry_after, ..self }
    }

    /// Sets the time for which the API keeps a key. A request that may have been sent is not sent again under an older key,
    /// because a service that has forgotten the key would execute it once more.
    #[must_use]
    pub fn with_key_lifetime(self, key_lifetime: Duration) -> Self {
        Self { key_lifetime, ..self }
    }

    /// Sets the largest response that is read. See [`Client::send`](crate::Client::send).
    #[must_use]
    pub fn with_max_response_bytes(self, bytes: usize) -> Self {
        Self { max_response_bytes: bytes, ..self }
    }
}
