//! From a request to an answer.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use axum::routing::{MethodRouter, post};
use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::{HeaderName, StatusCode};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use oncegate_core::{Clock, ErrorChain, Timestamp};
use oncegate_engine::{ConfigError, Panicked, catch_panic};
use oncegate_inbox::{Event, EventKind, Message, Observer, ProcessOutcome, Processor, SourceInfo};
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;
use tracing::{debug, error, warn};

use crate::scheme::{WebhookRefusal, WebhookScheme, copied};

/// The shortest time for which webhooks must be known as processed: how long the schedule of retries goes on that Standard
/// Webhooks gives as its example, 75 hours and 35 minutes.
pub const MIN_WINDOW: Duration = Duration::from_secs((75 * 60 + 35) * 60);

/// How long a receiver expects webhooks to be known as processed: seven days.
pub const DEFAULT_WINDOW: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Most octets of a payload by default: 1 MiB. Senders keep far below it, but for GitHub, whose payloads may have 25 MB.
const BODY_MAX: usize = 1024 * 1024;

/// Largest limit for payloads. A payload is verified and processed whole.
const BODY_MAX_MAX: usize = 64 * 1024 * 1024;

/// How long a payload may take to arrive. Senders wait for the whole answer for 10 to 30 seconds.
const BODY_PATIENCE: Duration = Duration::from_secs(30);

/// Longest patience with a payload.
const BODY_PATIENCE_MAX: Duration = Duration::from_secs(10 * 60);

/// How many webhooks are processed at a time by default.
const RUNNING_MAX: usize = 256;

/// When a sender is to come again where nothing better is known.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// What a [`WebhookReceiver`] goes by.
pub struct WebhookOptions {
    scheme: WebhookScheme,
    window: Duration,
    max_body_bytes: usize,
    body_timeout: Duration,
    max_running: usize,
    headers: Vec<String>,
    clock: Arc<dyn Clock>,
    observer: Arc<dyn Observer>,
}

impl WebhookOptions {
    /// Webhooks that are signed so: known as processed for seven days, of 1 MiB at most which arrives within 30 seconds, and
    /// 256 at a time.
    #[must_use]
    pub fn new(scheme: WebhookScheme) -> Self {
        Self {
            scheme,
            window: DEFAULT_WINDOW,
            max_body_bytes: BODY_MAX,
            body_timeout: BODY_PATIENCE,
            max_running: RUNNING_MAX,
            headers: Vec::new(),
            clock: Arc::new(WallClock),
            observer: Arc::new(()),
        }
    }

    /// For how long a webhook must be known as processed: as long as its sender may send it again, by itself or by hand.
    ///
    /// # Errors
    /// Less than [`MIN_WINDOW`].
    pub fn with_window(self, window: Duration) -> Result<Self, ConfigError> {
        if window < MIN_WINDOW {
            let what = format!("the window is {window:?}; senders come again for {MIN_WINDOW:?} and longer");
            return Err(ConfigError::new(what));
        }
        Ok(Self { window, ..self })
    }

    /// Most octets of a payload. A longer one is refused before it is read whole.
    ///
    /// # Errors
    /// Outside 1 to 64 MiB (67108864).
    pub fn with_max_body_bytes(self, octets: usize) -> Result<Self, ConfigError> {
        if (1..=BODY_MAX_MAX).contains(&octets) {
            Ok(Self { max_body_bytes: octets, ..self })
        } else {
            let what = format!("payloads may have {octets} octets; it must be from 1 to {BODY_MAX_MAX}");
            Err(ConfigError::new(what))
        }
    }

    /// How long a payload may take to arrive.
    ///
    /// # Errors
    /// Outside 1 second to 10 minutes.
    pub fn with_body_timeout(self, patience: Duration) -> Result<Self, ConfigError> {
        if (Duration::from_secs(1)..=BODY_PATIENCE_MAX).contains(&patience) {
            Ok(Self { body_timeout: patience, ..self })
        } else {
            let what = format!("payloads may take {patience:?}; it must be from 1s to {BODY_PATIENCE_MAX:?}");
            Err(ConfigError::new(what))
        }
    }

    /// How many webhooks are processed at a time, those included whose sender has hung up. One more is told to come again.
    ///
    /// # Errors
    /// None, or more than a million.
    pub fn with_max_running(self, running: usize) -> Result<Self, ConfigError> {
        if (1..=1_000_000).contains(&running) {
            Ok(Self { max_running: running, ..self })
        } else {
            let what = format!("{running} webhooks may run at a time; it must be from 1 to 1000000");
            Err(ConfigError::new(what))
        }
    }

    /// Gives the handler this header, too. By default it sees `content-type`, `content-encoding` and what the scheme has, but for
    /// signatures. Nobody signs other headers, and a dead letter keeps what the handler sees.
    ///
    /// # Errors
    /// Where it is no name of a header.
    pub fn with_header(mut self, name: &str) -> Result<Self, ConfigError> {
        let name = HeaderName::from_bytes(name.as_bytes())
            .map_err(|_| ConfigError::new("that is no name of a header"))?;
        self.headers.push(name.as_str().to_owned());
        Ok(self)
    }

    /// Takes the time from this clock. It should be the world's time, to a minute.
    #[must_use]
    pub fn with_clock(self, clock: impl Clock) -> Self {
        Self { clock: Arc::new(clock), ..self }
    }

    /// Tells it what becomes of each request: [`Refused`](EventKind::Refused), [`Overloaded`](EventKind::Overloaded), or what
    /// became of the message.
    #[must_use]
    pub fn with_observer(self, observer: impl Observer) -> Self {
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

/// What became of a request.
enum Outcome {
    /// It is no webhook; nothing of it was recorded.
    Refused(WebhookRefusal),
    /// Its payload is too long; nothing of it was recorded.
    TooLarge,
    /// Its payload did not arrive whole; nothing of it was recorded.
    Incomplete,
    /// As many as may are being processed; nothing of it was recorded.
    Overloaded,
    /// What processes messages panicked.
    Panicked,
    /// It is one, and this came of it.
    ProcessOutcome(ProcessOutcome),
}

impl Outcome {
    const fn event(&self) -> EventKind {
        match self {
            Self::Refused(_) | Self::TooLarge | Self::Incomplete => EventKind::Refused,
            Self::Overloaded => EventKind::Overloaded,
            Self::Panicked => EventKind::Panicked,
            Self::ProcessOutcome(handled) => EventKind::of(handled),
        }
    }

    /// What the sender hears: a status, and the last part of the problem's type where there is one. Senders take 2xx for done.
    /// Some of them take every 4xx for final, so that what is to come again is a 5xx. Refusals are not told apart.
    const fn said(&self) -> (StatusCode, Option<&'static str>) {
        match self {
            Self::Refused(_) => (StatusCode::BAD_REQUEST, Some("webhook-refused")),
            Self::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, Some("request-too-large")),
            Self::Incomplete => (StatusCode::BAD_REQUEST, Some("request-incomplete")),
            Self::Overloaded => (StatusCode::SERVICE_UNAVAILABLE, Some("overloaded")),
            // A letter is written where it is dead: to send it again would change nothing.
            Self::ProcessOutcome(
                ProcessOutcome::Processed { .. } | ProcessOutcome::Duplicate | ProcessOutcome::Dead { .. },
            ) => (StatusCode::OK, None),
            Self::ProcessOutcome(ProcessOutcome::InFlight { .. }) => {
                (StatusCode::SERVICE_UNAVAILABLE, Some("request-in-progress"))
            }
            Self::ProcessOutcome(ProcessOutcome::Unavailable(_)) => {
                (StatusCode::SERVICE_UNAVAILABLE, Some("store-unavailable"))
            }
            // It failed or was not begun: the sender has to send it again.
            Self::ProcessOutcome(_) | Self::Panicked => {
                (StatusCode::INTERNAL_SERVER_ERROR, Some("handler-failed"))
            }
        }
    }

    fn to_response(&self) -> Response {
        let (status, problem) = self.said();
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
                Self::ProcessOutcome(ProcessOutcome::InFlight { retry_after }) => *retry_after,
                _ => RETRY_AFTER,
            };
            let seconds = after.as_millis().div_ceil(1000).max(1);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds as u64));
        }
        response
    }
}

/// Receives the webhooks of one sender. Cheap to clone.
///
/// Nothing is recorded, and nothing processed, before signature and time of a request are verified. Then it is processed in a
/// task of its own, which goes on where the sender hangs up; [`drain`](Self::drain) waits for those before a process ends.
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
    /// A receiver. `topic` is what the sender is called: part of the identity of its messages, so it stays the same; it is not
    /// the path.
    ///
    /// # Errors
    /// Where the processor forgets messages sooner than [`WebhookOptions::with_window`] asks, or does not fit.
    pub fn new(topic: impl Into<String>, options: WebhookOptions, processor: P) -> Result<Self, ConfigError> {
        // Senders do not come again because nothing is heard for a while: they hang up, and the task goes on.
        let names = |name: &str| HeaderName::from_bytes(name.as_bytes()).is_ok();
        processor.check(&SourceInfo::new(None).with_header_names(names))?;
        let retention = processor.retention();
        if retention < options.window {
            return Err(ConfigError::new(format!(
                "what was processed is known for {retention:?}, and senders come again for {:?}: lengthen the retention, or \
                 say that this sender stops sooner (with_window)",
                options.window
            )));
        }
        let running = Arc::new(Semaphore::new(options.max_running));
        let tasks = TaskTracker::new();
        tasks.close();
        Ok(Self(Arc::new(Inner { topic: topic.into(), options, processor, running, tasks })))
    }

    /// What a router routes the sender's path to. It answers `POST`, and refuses every other method with a 405. The payload must
    /// reach it as it was sent: no layer may decode it before.
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

    /// Waits for webhooks that are being processed, their senders gone or not, and says whether there are none left. New ones
    /// are still taken: stop the server first.
    pub async fn drain(&self, patience: Duration) -> bool {
        tokio::time::timeout(patience, self.0.tasks.wait()).await.is_ok()
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
                        // A processor says something of every message.
                        Outcome::ProcessOutcome(
                            handled.into_iter().next().unwrap_or(ProcessOutcome::NotBegun),
                        )
                    }
                    Err(Panicked) => Outcome::Panicked,
                };
                inner.note(&outcome, started);
                outcome
            }
        };
        // A task of its own: what was begun is not cut off where the sender's patience ends.
        inner.tasks.spawn(task).await.unwrap_or(Outcome::Panicked).to_response()
    }
}

impl<P: Processor> Inner<P> {
    /// The message of a request that is signed as it should be.
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
                    "a request was refused: it is no webhook of the sender's"
                );
            }
            Outcome::TooLarge => warn!(consumer, topic, "a request was refused: its payload is too long"),
            Outcome::Overloaded => {
                warn!(consumer, topic, "too many webhooks are being processed; one is sent away")
            }
            Outcome::Panicked => error!(consumer, topic, "what processes webhooks panicked"),
            Outcome::ProcessOutcome(ProcessOutcome::Failed { attempts, .. }) => {
                warn!(consumer, topic, attempts, "a webhook was not processed, and has to come again");
            }
            Outcome::ProcessOutcome(ProcessOutcome::Dead { reason, is_known: false }) => {
                warn!(consumer, topic, reason = reason.as_str(), "a webhook is a dead letter now");
            }
            Outcome::ProcessOutcome(ProcessOutcome::Unavailable(error)) => {
                warn!(consumer, topic, error = %ErrorChain(&error), "a webhook could not be processed, and has to come again");
            }
            Outcome::Incomplete | Outcome::ProcessOutcome(_) => {
                debug!(consumer, topic, outcome = kind.as_str(), "a request was answered");
            }
        }
        self.options.observer.observe(&Event::new(consumer, topic, kind, started.elapsed()));
    }
}

/// The payload as it came, of at most so many octets.
async fn payload(body: Body, max: usize) -> Result<Bytes, Outcome> {
    match Limited::new(body, max).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(Outcome::TooLarge),
        Err(_) => Err(Outcome::Incomplete),
    }
}

/// The wall clock, which is what senders sign.
struct WallClock;

impl Clock for WallClock {
    fn now(&self) -> Timestamp {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Timestamp::from_millis(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }
}
