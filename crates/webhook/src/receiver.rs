//! The receiver: from a request to a response.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use axum::routing::{MethodRouter, post};
use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::{HeaderName, StatusCode};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use oncegate_core::{Clock, ErrorChain, SystemClock};
use oncegate_engine::{ConfigError, PanicError, catch_panic};
use oncegate_inbox::{
    InboxEvent, InboxEventKind, InboxObserver, Message, ProcessOutcome, Processor, SourceInfo,
};
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;
use tracing::{debug, error, warn};

use crate::scheme::{WebhookRefusal, WebhookScheme, copied};

/// The minimum time for which webhooks must be remembered.
///
/// It is the length of the example schedule of retries in Standard Webhooks: 75 hours and 35 minutes.
pub const MIN_WINDOW: Duration = Duration::from_secs((75 * 60 + 35) * 60);

/// The default time for which webhooks must be remembered: seven days.
pub const DEFAULT_WINDOW: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// The default limit of a payload: 1 MiB. Senders stay far below it, except GitHub, whose payloads have up to 25 MB.
const MAX_BODY_BYTES: usize = 1024 * 1024;

/// The maximum of the limit. A payload is verified and processed in memory.
const MAX_MAX_BODY_BYTES: usize = 64 * 1024 * 1024;

/// The default time for a payload to arrive. Senders wait 10 to 30 seconds for the whole response.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// The maximum of that time.
const MAX_BODY_TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// The default number of webhooks that are processed at a time.
const MAX_RUNNING: usize = 256;

/// The `Retry-After` of a response if nothing better is known.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// The options of a [`WebhookReceiver`].
pub struct WebhookOptions {
    scheme: WebhookScheme,
    window: Duration,
    max_body_bytes: usize,
    body_timeout: Duration,
    max_running: usize,
    headers: Vec<String>,
    clock: Arc<dyn Clock>,
    observer: Arc<dyn InboxObserver>,
}

impl WebhookOptions {
    /// Creates options for a signature scheme.
    ///
    /// Defaults: webhooks are remembered for seven days, a payload has at most 1 MiB and arrives within 30 seconds, and
    /// 256 webhooks are processed at a time.
    #[must_use]
    pub fn new(scheme: WebhookScheme) -> Self {
        Self {
            scheme,
            window: DEFAULT_WINDOW,
            max_body_bytes: MAX_BODY_BYTES,
            body_timeout: BODY_TIMEOUT,
            max_running: MAX_RUNNING,
            headers: Vec::new(),
            clock: Arc::new(SystemClock::new()),
            observer: Arc::new(()),
        }
    }

    /// Sets how long a webhook must be remembered: as long as its sender may send it again, automatically or by hand.
    ///
    /// # Errors
    /// [`ConfigError`] if it is less than [`MIN_WINDOW`].
    pub fn with_window(self, window: Duration) -> Result<Self, ConfigError> {
        if window < MIN_WINDOW {
            let what = format!(
                "the window is {window:?}; it must be at least {MIN_WINDOW:?}, because senders send again for that long"
            );
            return Err(ConfigError::new(what));
        }
        Ok(Self { window, ..self })
    }

    /// Sets the maximum size of a payload. A longer one is refused before it is read completely.
    ///
    /// # Errors
    /// [`ConfigError`] outside 1 to 64 MiB (67108864).
    pub fn with_max_body_bytes(self, bytes: usize) -> Result<Self, ConfigError> {
        if (1..=MAX_MAX_BODY_BYTES).contains(&bytes) {
            Ok(Self { max_body_bytes: bytes, ..self })
        } else {
            let what =
                format!("the maximum payload is {bytes} bytes; it must be from 1 to {MAX_MAX_BODY_BYTES}");
            Err(ConfigError::new(what))
        }
    }

    /// Sets how long a payload may take to arrive.
    ///
    /// # Errors
    /// [`ConfigError`] outside 1 second to 10 minutes.
    pub fn with_body_timeout(self, timeout: Duration) -> Result<Self, ConfigError> {
        if (Duration::from_secs(1)..=MAX_BODY_TIMEOUT).contains(&timeout) {
            Ok(Self { body_timeout: timeout, ..self })
        } else {
            let what = format!("the body timeout is {timeout:?}; it must be from 1s to {MAX_BODY_TIMEOUT:?}");
            Err(ConfigError::new(what))
        }
    }

    /// Sets how many webhooks are processed at a time, including those whose sender has hung up. Further ones get a
    /// 503.
    ///
    /// # Errors
    /// [`ConfigError`] outside 1 to a million.
    pub fn with_max_running(self, running: usize) -> Result<Self, ConfigError> {
        if (1..=1_000_000).contains(&running) {
            Ok(Self { max_running: running, ..self })
        } else {
            let what =
                format!("the maximum number of running webhooks is {running}; it must be from 1 to 1000000");
            Err(ConfigError::new(what))
        }
    }

    /// Passes another header to the handler.
    ///
    /// By default the handler gets `content-type`, `content-encoding` and the headers of the scheme except signatures.
    /// Other headers are not signed. Dead letters keep what the handler gets.
    ///
    /// # Errors
    /// [`ConfigError`] if the name is invalid.
    pub fn with_header(mut self, name: &str) -> Result<Self, ConfigError> {
        let name = HeaderName::from_bytes(name.as_bytes())
            .map_err(|_| ConfigError::new(format!("{name:?} is not a valid header name")))?;
        self.headers.push(name.as_str().to_owned());
        Ok(self)
    }

    /// Sets the clock. It should be correct to a minute.
    #[must_use]
    pub fn with_clock(self, clock: impl Clock) -> Self {
        Self { clock: Arc::new(clock), ..self }
    }

    /// Sets the observer of all requests: [`Refused`](InboxEventKind::Refused), [`Overloaded`](InboxEventKind::Overloaded), or
    /// the outcome.
    #[must_use]
    pub fn with_observer(self, observer: impl InboxObserver) -> Self {
        Self { observer: Arc::new(observer), ..self }
    }
}

impl fmt::Debug for WebhookOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebhookOptions")
            .field("scheme", &self.scheme)
            .field("window", &self.window)
            .field("max_body_bytes", &self.max_body_bytes)
            .field("body_timeout", &self.body_timeout)
            .field("max_running", &self.max_running)
            .field("headers", &self.headers)
            .finish_non_exhaustive()
    }
}

/// The outcome of a request.
enum Outcome {
    /// The request is not a valid webhook; nothing was recorded.
    Refused(WebhookRefusal),
    /// The payload is too long; nothing was recorded.
    TooLarge,
    /// The payload did not arrive completely; nothing was recorded.
    Incomplete,
    /// The maximum number of webhooks is being processed; nothing was recorded.
    Overloaded,
    /// The processor panicked.
    Panicked,
    /// The request is a valid webhook, and this is its outcome.
    Verified(ProcessOutcome),
}

impl Outcome {
    const fn event(&self) -> InboxEventKind {
        match self {
            Self::Refused(_) | Self::TooLarge | Self::Incomplete => InboxEventKind::Refused,
            Self::Overloaded => InboxEventKind::Overloaded,
            Self::Panicked => InboxEventKind::Panicked,
            Self::Verified(handled) => InboxEventKind::of(handled),
        }
    }

    /// The status of the response, and the last part of the problem type.
    ///
    /// Senders treat 2xx as done. Some of them treat every 4xx as final, so a webhook that must be sent again gets a
    /// 5xx. All refusals get the same response, so that an attacker learns nothing.
    const fn status(&self) -> (StatusCode, Option<&'static str>) {
        match self {
            Self::Refused(_) => (StatusCode::BAD_REQUEST, Some("webhook-refused")),
            Self::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, Some("request-too-large")),
            Self::Incomplete => (StatusCode::BAD_REQUEST, Some("request-incomplete")),
            Self::Overloaded => (StatusCode::SERVICE_UNAVAILABLE, Some("overloaded")),
            // The dead letter is durable, so sending the webhook again would change nothing.
            Self::Verified(
                ProcessOutcome::Processed { .. } | ProcessOutcome::Duplicate | ProcessOutcome::Dead { .. },
            ) => (StatusCode::OK, None),
            Self::Verified(ProcessOutcome::InFlight { .. }) => {
                (StatusCode::SERVICE_UNAVAILABLE, Some("request-in-progress"))
            }
            Self::Verified(ProcessOutcome::Unavailable(_)) => {
                (StatusCode::SERVICE_UNAVAILABLE, Some("store-unavailable"))
            }
            // The attempt failed, or the message was not started. The sender has to send it again.
            Self::Verified(_) | Self::Panicked => (StatusCode::INTERNAL_SERVER_ERROR, Some("handler-failed")),
        }
    }

    fn to_response(&self) -> Response {
        let (status, problem) = self.status();
        let body = problem.map_or_else(Body::empty, |problem| {
            Body::from(format!(r#"{{"type":"urn:oncegate:problem:{problem}","status":{}}}"#, status.as_u16()))
        });
        let mut response = Response::new(body);
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if problem.is_some() {
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        }
        if status == StatusCode::SERVICE_UNAVAILABLE {
            let after = match self {
                Self::Verified(ProcessOutcome::InFlight { retry_after }) => *retry_after,
                _ => RETRY_AFTER,
            };
            let seconds = after.as_millis().div_ceil(1000).max(1);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds as u64));
        }
        response
    }
}

/// Receives the webhooks of one sender. Clones are cheap.
///
/// Nothing is recorded or processed before the signature and the time of a request are verified. Processing runs in a
/// task of its own, which goes on if the sender hangs up. Call [`drain`](Self::drain) to wait for these tasks before a
/// process ends.
pub struct WebhookReceiver<P>(Arc<Inner<P>>);

struct Inner<P> {
    topic: String,
    options: WebhookOptions,
    processor: P,
    running: Arc<Semaphore>,
    tasks: TaskTracker,
}

impl<P> Clone for WebhookReceiver<P> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<P> fmt::Debug for WebhookReceiver<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebhookReceiver")
            .field("topic", &self.0.topic)
            .field("options", &self.0.options)
            .finish_non_exhaustive()
    }
}

impl<P: Processor> WebhookReceiver<P> {
    /// Creates a receiver.
    ///
    /// `topic` is the name of the sender. It is part of the identity of its messages, so it must not change. It is not
    /// the path.
    ///
    /// # Errors
    /// [`ConfigError`] if the processor forgets messages sooner than [`WebhookOptions::with_window`] requires, or does
    /// not fit.
    pub fn new(topic: impl Into<String>, options: WebhookOptions, processor: P) -> Result<Self, ConfigError> {
        // A webhook source has no redelivery time: if a sender hangs up, the task goes on.
        let names = |name: &str| HeaderName::from_bytes(name.as_bytes()).is_ok();
        processor.check(&SourceInfo::new(None).with_header_names(names))?;
        let retention = processor.retention();
        if retention < options.window {
            return Err(ConfigError::new(format!(
                "processed webhooks are remembered for {retention:?}, and senders may send again for {:?}: lengthen the \
                 retention, or set a shorter window for this sender (with_window)",
                options.window
            )));
        }
        let running = Arc::new(Semaphore::new(options.max_running));
        let tasks = TaskTracker::new();
        tasks.close();
        Ok(Self(Arc::new(Inner { topic: topic.into(), options, processor, running, tasks })))
    }

    /// Returns the route for the sender's path.
    ///
    /// It answers `POST`, and refuses other methods with a 405. The payload must reach it as it was sent: no layer may
    /// decode it before.
    pub fn route<S>(&self) -> MethodRouter<S>
    where
        S: Clone + Send + Sync + 'static,
    {
        let receiver = self.clone();
        post(move |request: Request| {
            let receiver = receiver.clone();
            async move { receiver.receive(request).await }
        })
    }

    /// Waits until no webhook is being processed, and returns `false` at the timeout.
    ///
    /// New webhooks are still accepted meanwhile, so stop the server first.
    pub async fn drain(&self, timeout: Duration) -> bool {
        tokio::time::timeout(timeout, self.0.tasks.wait()).await.is_ok()
    }

    /// Answers one request.
    pub async fn receive(&self, request: Request) -> Response {
        let inner = &self.0;
        let started = Instant::now();
        let message = match inner.verified(request).await {
            Ok(message) => Arc::new(message),
            Err(outcome) => {
                inner.note(&outcome, started);
                return outcome.to_response();
            }
        };
        let Ok(permit) = Arc::clone(&inner.running).try_acquire_owned() else {
            inner.note(&Outcome::Overloaded, started);
            return Outcome::Overloaded.to_response();
        };
        let task = {
            let inner = Arc::clone(inner);
            async move {
                let _permit = permit;
                let outcome = match catch_panic(inner.processor.process(&[message])).await {
                    Ok(handled) => {
                        // A processor returns an outcome for every message.
                        Outcome::Verified(handled.into_iter().next().unwrap_or(ProcessOutcome::NotBegun))
                    }
                    Err(PanicError) => Outcome::Panicked,
                };
                inner.note(&outcome, started);
                outcome
            }
        };
        // Processing runs in a task of its own, so that it is not cancelled when the sender hangs up.
        inner.tasks.spawn(task).await.unwrap_or(Outcome::Panicked).to_response()
    }
}

impl<P: Processor> Inner<P> {
    /// Verifies a request and returns its message.
    async fn verified(&self, request: Request) -> Result<Message, Outcome> {
        let options = &self.options;
        let (head, body) = request.into_parts();
        let payload = tokio::time::timeout(options.body_timeout, payload(body, options.max_body_bytes))
            .await
            .map_err(|_| Outcome::Incomplete)??;
        let message = options
            .scheme
            .verify(&self.topic, &head.headers, payload, options.clock.now())
            .map_err(Outcome::Refused)?;
        Ok(options.headers.iter().fold(message, |message, name| copied(message, &head.headers, name)))
    }

    fn note(&self, outcome: &Outcome, started: Instant) {
        let (consumer, topic) = (self.processor.consumer().as_str(), self.topic.as_str());
        let kind = outcome.event();
        match outcome {
            Outcome::Refused(refusal) => {
                warn!(
                    consumer,
                    topic,
                    reason = refusal.as_str(),
                    "a request was refused: it is not a valid webhook of this sender"
                );
            }
            Outcome::TooLarge => warn!(consumer, topic, "a request was refused: its payload is too long"),
            Outcome::Overloaded => {
                warn!(consumer, topic, "too many webhooks are being processed; one is sent away")
            }
            Outcome::Panicked => error!(consumer, topic, "what processes webhooks panicked"),
            Outcome::Verified(ProcessOutcome::Failed { attempts, .. }) => {
                warn!(consumer, topic, attempts, "a webhook was not processed, and has to come again");
            }
            Outcome::Verified(ProcessOutcome::Dead { reason, is_known: false }) => {
                warn!(consumer, topic, reason = reason.as_str(), "a webhook is a dead letter now");
            }
            Outcome::Verified(ProcessOutcome::Unavailable(error)) => {
                warn!(consumer, topic, error = %ErrorChain(&error), "a webhook could not be processed, and has to come again");
            }
            Outcome::Incomplete | Outcome::Verified(_) => {
                debug!(consumer, topic, outcome = kind.as_str(), "a request was answered");
            }
        }
        self.options.observer.observe(&InboxEvent::new(consumer, topic, kind, started.elapsed()));
    }
}

/// Reads a payload of at most `max` bytes.
async fn payload(body: Body, max: usize) -> Result<Bytes, Outcome> {
    match Limited::new(body, max).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(Outcome::TooLarge),
        Err(_) => Err(Outcome::Incomplete),
    }
}
