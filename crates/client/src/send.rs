//! Attempts, and the pauses between them.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::{Method, Response};
use http_body::Body;
use oncegate_core::{Clock, SystemClock, Timestamp};
use tokio::time::{Instant, sleep, timeout};

use crate::backoff::{Backoff, Random, SystemRandom};
use crate::budget::{Pressure, RetryBudget};
use crate::failure::{AttemptFailure, AttemptFailureKind, BoxError};
use crate::hint;
use crate::policy::RetryPolicy;
use crate::received::ReceivedBody;
use crate::report::{Report, SendError, SendErrorKind};
use crate::retry_after::retry_after;
use crate::verdict::{AttemptContext, Doubt, Meaning, Protection, Verdict, judge};

/// Sends the attempts of one request.
pub(crate) trait AttemptSender: Send {
    /// The body of a response.
    type Body: Body<Data = Bytes, Error: Into<BoxError>> + Send;

    /// Sends one attempt.
    fn send(&mut self) -> impl Future<Output = Result<Response<Self::Body>, AttemptFailure>> + Send;

    /// `true` if the request can be sent once more.
    fn can_send_again(&self) -> bool;
}

/// Marks a response from another address than that of the request: the transport followed a redirect.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Redirected;

/// The properties of a request that decide about retries.
#[derive(Clone, Debug)]
pub(crate) struct RequestInfo {
    pub(crate) method: Method,
    pub(crate) protection: Protection,
    pub(crate) sent_before: bool,
    pub(crate) created_at: Option<Timestamp>,
    /// The lifetime of the key, if it is shorter than that of the policy.
    pub(crate) key_lifetime: Option<Duration>,
    /// The journal has the intent as done.
    pub(crate) done_before: bool,
}

/// The largest accepted difference between the clocks of two processes. Beyond it the age of a key is unknown.
const MAX_CLOCK_DIFFERENCE: Duration = Duration::from_secs(60);

/// The retry loop, and the state that all requests of a client share.
#[derive(Clone)]
pub(crate) struct RequestRunner {
    pub(crate) policy: RetryPolicy,
    pub(crate) budget: Arc<RetryBudget>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) random: Arc<dyn Random>,
}

/// Safe and idempotent methods, by RFC 9110, 9.2.2.
pub(crate) fn is_repeatable(method: &Method) -> bool {
    is_safe(method) || matches!(*method, Method::PUT | Method::DELETE)
}

/// Methods that ask for no effect, by RFC 9110, 9.2.1.
pub(crate) fn is_safe(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE)
}

/// An attempt without a definite response.
struct IndefiniteAttempt {
    meaning: Meaning,
    pressure: Pressure,
    retry_after: Option<Duration>,
    response: Option<Response<Bytes>>,
    source: Option<BoxError>,
    unsendable: bool,
}

enum AttemptOutcome<B> {
    Definite(Response<ReceivedBody<B>>, Report),
    Open(IndefiniteAttempt),
}

impl RequestRunner {
    pub(crate) fn new(policy: RetryPolicy) -> Self {
        Self {
            policy,
            budget: Arc::default(),
            clock: Arc::new(SystemClock::new()),
            random: Arc::new(SystemRandom),
        }
    }

    /// Sends until there is a definite response, or a reason to stop.
    pub(crate) async fn run<T: AttemptSender>(
        &self,
        ask: &RequestInfo,
        tries: &mut T,
    ) -> Result<(Response<ReceivedBody<T::Body>>, Report), SendError> {
        let policy = &self.policy;
        let deadline = Instant::now().checked_add(policy.deadline);
        let created_at = ask.created_at.unwrap_or_else(|| self.clock.now());
        let mut backoff = Backoff::new(policy.jitter, policy.base, policy.cap);
        let mut doubt = ask.sent_before;
        let mut attempts = 0;
        let mut paid = None;
        if doubt && self.is_too_old(ask, created_at) {
            let why = if ask.done_before { SendErrorKind::DoneBefore } else { SendErrorKind::KeyLifetime };
            return Err(SendError::new(why, attempts, doubt));
        }
        loop {
            attempts += 1;
            let left = deadline.map_or(Duration::MAX, |deadline| deadline.duration_since(Instant::now()));
            let limit = policy.attempt_timeout.min(left);
            let attempted = timeout(limit, self.attempt(ask, tries, attempts, doubt)).await;
            let step = match attempted {
                Ok(AttemptOutcome::Definite(response, report)) => {
                    if report.verdict != Verdict::Failed {
                        self.budget.give(paid);
                    }
                    tracing::debug!(
                        method = %ask.method, status = response.status().as_u16(), attempts,
                        verdict = %report.verdict, replayed = report.replayed, "definite response"
                    );
                    return Ok((response, report));
                }
                Ok(AttemptOutcome::Open(step)) => step,
                Err(elapsed) => IndefiniteAttempt {
                    pressure: Pressure::Timeout,
                    source: Some(elapsed.into()),
                    ..IndefiniteAttempt::of(Meaning::Again(Doubt::May))
                },
            };
            // A refusal leaves a doubt only if there was one before it.
            doubt |=
                matches!(step.meaning, Meaning::Again(Doubt::May | Doubt::InProgress) | Meaning::Unknown);
            let why = match self.next(ask, tries, &step, attempts, doubt, deadline, &mut backoff) {
                Ok(pause) if !self.expires(ask, created_at, doubt, pause) => {
                    match self.budget.take(step.pressure) {
                        Some(cost) => {
                            tracing::debug!(
                                method = %ask.method, attempts, doubt,
                                status = step.response.as_ref().map(|response| response.status().as_u16()),
                                pause_ms = pause.as_millis() as u64, "no definite response; sending again"
                            );
                            paid = Some(cost);
                            sleep(pause).await;
                            // The pause was longer if the machine was suspended meanwhile, and the service may have forgotten
                            // the key.
                            if !self.expires(ask, created_at, doubt, Duration::ZERO) {
                                continue;
                            }
                            SendErrorKind::KeyLifetime
                        }
                        None => SendErrorKind::Budget,
                    }
                }
                Ok(_) => SendErrorKind::KeyLifetime,
                Err(why) => why,
            };
            tracing::debug!(method = %ask.method, attempts, doubt, ?why, "no definite response");
            let now = self.wall();
            let come_back_at = step.retry_after.and_then(|after| now.checked_add(after));
            return Err(SendError::new(why, attempts, doubt)
                .with_come_back_at(come_back_at)
                .with_response(step.response)
                .with_source(step.source));
        }
    }

    /// The pause before the next attempt, or the reason why there is none.
    #[allow(clippy::too_many_arguments, reason = "the state of the loop")]
    fn next<T: AttemptSender>(
        &self,
        ask: &RequestInfo,
        tries: &T,
        step: &IndefiniteAttempt,
        attempts: u32,
        doubt: bool,
        deadline: Option<Instant>,
        backoff: &mut Backoff,
    ) -> Result<Duration, SendErrorKind> {
        let policy = &self.policy;
        match step.meaning {
            _ if step.unsendable => return Err(SendErrorKind::Unsendable),
            Meaning::Unknown => return Err(SendErrorKind::Unknown),
            Meaning::TurnedAway => return Err(SendErrorKind::TurnedAway),
            // A second effect would be one too many.
            _ if ask.protection == Protection::Once && doubt => return Err(SendErrorKind::Unknown),
            Meaning::Contested if !tries.can_send_again() || attempts >= policy.attempts => {
                return Err(SendErrorKind::TurnedAway);
            }
            _ if !tries.can_send_again() => return Err(SendErrorKind::Body),
            _ if attempts >= policy.attempts => return Err(SendErrorKind::Attempts),
            _ => {}
        }
        let mut pause = backoff.next(&*self.random);
        if let Some(after) = step.retry_after {
            if after > policy.max_retry_after {
                return Err(SendErrorKind::ComeBackLater);
            }
            // In addition to the jitter, so that clients with the same `Retry-After` do not all return at once.
            pause = pause.saturating_add(after);
        }
        match (deadline, Instant::now().checked_add(pause)) {
            (Some(deadline), Some(then)) if then < deadline => Ok(pause),
            (None, Some(_)) => Ok(pause),
            _ if step.retry_after.is_some() => Err(SendErrorKind::ComeBackLater),
            _ => Err(SendErrorKind::Deadline),
        }
    }

    async fn attempt<T: AttemptSender>(
        &self,
        ask: &RequestInfo,
        tries: &mut T,
        attempts: u32,
        doubt: bool,
    ) -> AttemptOutcome<T::Body> {
        let response = match tries.send().await {
            Ok(response) => response,
            Err(failure) => return AttemptOutcome::Open(IndefiniteAttempt::failed(failure)),
        };
        let (head, body) = response.into_parts();
        let after = retry_after(&head.headers, self.wall());
        let body = match ReceivedBody::read(body, self.policy.max_response_bytes).await {
            Ok(body) => body,
            // A status with an incomplete body is not a response. The same key gets it whole.
            Err(error) => {
                return AttemptOutcome::Open(IndefiniteAttempt {
                    retry_after: after,
                    source: Some(error.into()),
                    ..IndefiniteAttempt::of(Meaning::Again(Doubt::May))
                });
            }
        };
        let whole = body.whole().cloned().unwrap_or_default();
        let asked = AttemptContext {
            protection: ask.protection,
            server_errors: self.policy.server_errors,
            in_doubt: doubt,
        };
        let mut meaning = judge(asked, head.status, &head.headers, &whole);
        if head.extensions.get::<Redirected>().is_some() && meaning != Meaning::Definite(Verdict::Done) {
            // It is the response of another address to another request. Only the key can tell the outcome of this one.
            meaning = Meaning::Again(Doubt::May);
        }
        let verdict = match meaning {
            Meaning::Definite(verdict) => verdict,
            _ => {
                let pressure = match meaning {
                    // The service works on this very request.
                    Meaning::Again(Doubt::InProgress) | Meaning::Contested => Pressure::None,
                    _ => Pressure::Failure,
                };
                let response = Some(Response::from_parts(head, whole));
                return AttemptOutcome::Open(IndefiniteAttempt {
                    pressure,
                    retry_after: after,
                    response,
                    ..IndefiniteAttempt::of(meaning)
                });
            }
        };
        let replayed = ask.protection == Protection::Keyed && hint::is_replay(head.status, &head.headers);
        AttemptOutcome::Definite(Response::from_parts(head, body), Report { verdict, attempts, replayed })
    }

    fn is_too_old(&self, ask: &RequestInfo, created_at: Timestamp) -> bool {
        self.expires(ask, created_at, true, Duration::ZERO)
    }

    /// `true` if the key is too old to be sent after this pause.
    fn expires(&self, ask: &RequestInfo, created_at: Timestamp, doubt: bool, pause: Duration) -> bool {
        let now = self.clock.now();
        let lifetime = self.policy.key_lifetime;
        let lifetime = ask.key_lifetime.map_or(lifetime, |shorter| shorter.min(lifetime));
        // The key is from the future: the clock was set back, and the age of the key is unknown.
        let is_of_the_future = created_at.since(now) > MAX_CLOCK_DIFFERENCE;
        let is_too_old = is_of_the_future || now.after(pause).since(created_at) >= lifetime;
        doubt && ask.protection == Protection::Keyed && is_too_old
    }

    fn wall(&self) -> SystemTime {
        let since = Duration::from_millis(self.clock.now().as_millis());
        UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH)
    }
}

impl IndefiniteAttempt {
    fn of(meaning: Meaning) -> Self {
        Self {
            meaning,
            pressure: Pressure::Failure,
            retry_after: None,
            response: None,
            source: None,
            unsendable: false,
        }
    }

    fn failed(failure: AttemptFailure) -> Self {
        let kind = failure.kind();
        let doubt = if kind == AttemptFailureKind::Doubtful { Doubt::May } else { Doubt::None };
        Self {
            source: Some(failure.into_source()),
            unsendable: kind == AttemptFailureKind::Unsendable,
            ..Self::of(Meaning::Again(doubt))
        }
    }
}
