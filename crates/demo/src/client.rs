//! The customers' client: an ordinary, careful one.
//!
//! It makes one key per intent and sends it with every request, until there is a definite response. It retries failed requests
//! and those with the advice to retry, with backoff and jitter and no sooner than `Retry-After`. It stops if the advice is to
//! stop. It does the same in both runs: a service without keys ignores them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, header};
use http_body_util::Full;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::exchange::exchange;
use crate::plan::{Click, Fault, Intent, SplitMix64};
use crate::service::PaymentRequest;
use crate::stage::{Stage, Style};

/// The time that a client waits for a response.
pub(crate) const TIMEOUT: Duration = Duration::from_millis(400);

/// The most requests that a client sends for one click.
const MAX_ATTEMPTS: usize = 60;

const FIRST_BACKOFF: Duration = Duration::from_millis(40);
const MAX_BACKOFF: Duration = Duration::from_millis(600);

/// The divisor of `Retry-After`, so that the audience does not wait for whole seconds.
const HASTE: u32 = 4;

/// The longest time that a stopped client waits for the operator.
const OPERATOR_TIMEOUT: Duration = Duration::from_secs(20);

/// The state that all clients share.
pub(crate) struct Clients {
    pub(crate) stage: Arc<Stage>,
    /// The network's address: the only one that clients know.
    pub(crate) network: SocketAddr,
    /// The number of outcomes that the operator has settled so far.
    pub(crate) settled: watch::Receiver<u64>,
}

/// The end of one click: the charge on the customer's receipt; `None` after a refusal, or without any response.
pub(crate) type Ending = Option<String>;

/// The client's reaction to a response.
#[derive(Debug, PartialEq, Eq)]
enum Advice {
    Believe(Ending),
    Retry { after: Duration },
    Stop,
}

impl Clients {
    /// Pursues an intent until each of its clicks has ended.
    pub(crate) async fn pursue(&self, intent: &Intent) -> Vec<Ending> {
        self.stage.figures().begun += 1;
        let endings = match intent.clicks.as_slice() {
            [first, second] => {
                let text = format!("{}: two requests at once, with the same key", intent.name());
                self.stage.say_once("double click", Style::Bold, &text);
                let (first, second) =
                    tokio::join!(self.pursue_click(intent, 0, first), self.pursue_click(intent, 1, second));
                vec![first, second]
            }
            clicks => {
                let mut endings = Vec::new();
                for (number, click) in clicks.iter().enumerate() {
                    endings.push(self.pursue_click(intent, number, click).await);
                }
                endings
            }
        };
        self.stage.figures().ended += 1;
        endings
    }

    async fn pursue_click(&self, intent: &Intent, number: usize, click: &Click) -> Ending {
        sleep(click.after).await;
        let mut jitter = self.stage.plan.jitter(intent.number, number);
        let mut settled = self.settled.clone();
        for attempt in 0..MAX_ATTEMPTS {
            self.stage.figures().attempts += 1;
            settled.mark_unchanged();
            let request = request(&self.stage.path, intent, number, attempt);
            let response = self.send(request, click, attempt).await;
            let wait = match response.map(|response| self.judge(intent, &response)) {
                Some(Advice::Believe(ending)) => return ending,
                Some(Advice::Stop) => {
                    // Retry only after the operator has resolved the outcome.
                    let _in_vain = timeout(OPERATOR_TIMEOUT, settled.changed()).await;
                    Duration::ZERO
                }
                Some(Advice::Retry { after }) => after,
                None => Duration::ZERO,
            };
            sleep(wait.max(backoff(attempt, &mut jitter))).await;
        }
        None
    }

    /// Sends one request; `None` if no response came.
    async fn send(
        &self,
        request: Option<Request<Full<Bytes>>>,
        click: &Click,
        attempt: usize,
    ) -> Option<Response<Bytes>> {
        let exchange = exchange(self.network, request?);
        if click.faults.get(attempt) == Some(&Fault::HangUp) {
            let _unseen = timeout(click.hang_up_after, exchange).await;
            return None;
        }
        timeout(TIMEOUT, exchange).await.ok()?.ok()
    }

    fn judge(&self, intent: &Intent, response: &Response<Bytes>) -> Advice {
        let name = intent.name();
        let advice = advice(response);
        let is_replay = response.headers().contains_key("idempotent-replayed");
        match (&advice, response.status()) {
            (Advice::Believe(Some(charge)), _) if is_replay => {
                self.stage.figures().replays += 1;
                let text = format!("{name} gets its first response again ({charge}); nothing is charged");
                self.stage.say_once("replayed", Style::Good, &text);
            }
            (Advice::Retry { .. }, StatusCode::CONFLICT) => {
                self.stage.figures().refused_in_progress += 1;
                let text = format!("409: {name} is being charged → the client waits, then asks again");
                self.stage.say_once("in progress", Style::Notice, &text);
            }
            (Advice::Stop, _) => {
                self.stage.figures().refused_outcome_unknown += 1;
                let text = format!("was {name} charged before the crash? No guess: the client stops");
                self.stage.say_once("unknown", Style::Notice, &text);
            }
            _ => {}
        }
        advice
    }
}

/// The request; `None` if it would be invalid, which no plan causes.
fn request(path: &str, intent: &Intent, click: usize, attempt: usize) -> Option<Request<Full<Bytes>>> {
    let Intent { customer, cents, key, .. } = intent;
    let payment = PaymentRequest { intent: intent.name(), customer: customer.clone(), cents: *cents };
    Request::post(path)
        .header(header::HOST, "payments.internal")
        .header(header::CONNECTION, "close")
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::AUTHORIZATION, format!("Bearer {customer}"))
        .header("idempotency-key", key)
        .header("x-request-id", intent.request_id(click, attempt))
        .body(Full::from(serde_json::to_vec(&payment).ok()?))
        .ok()
}

fn advice(response: &Response<Bytes>) -> Advice {
    let body: serde_json::Value = serde_json::from_slice(response.body()).unwrap_or_default();
    let text = |member: &str| body.get(member).and_then(serde_json::Value::as_str);
    let status = response.status();
    if status.is_success() {
        return Advice::Believe(text("charge").map(str::to_owned));
    }
    match text("retry") {
        // A server error leaves the outcome unknown; a client error is final.
        Some("stop") if status.is_server_error() => Advice::Stop,
        Some("same-key") => Advice::Retry { after: retry_after(response.headers()) / HASTE },
        // Without advice in the response. Ordinary clients treat these as temporary.
        None if matches!(status.as_u16(), 408 | 409 | 425 | 429 | 500..) => {
            Advice::Retry { after: retry_after(response.headers()) / HASTE }
        }
        _ => Advice::Believe(None),
    }
}

fn retry_after(headers: &HeaderMap) -> Duration {
    let seconds = headers.get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
    Duration::from_secs(seconds.unwrap_or(0))
}

/// The pause before a retry: it doubles with each attempt, and the jitter takes away at most half of it.
fn backoff(attempt: usize, jitter: &mut SplitMix64) -> Duration {
    let doubled = FIRST_BACKOFF * 2_u32.saturating_pow(attempt.min(16) as u32);
    let half = doubled.min(MAX_BACKOFF) / 2;
    half + Duration::from_micros(jitter.below(half.as_micros() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Plan;

    #[test]
    fn the_client_follows_the_advice_of_responses() {
        let retry = |seconds| Advice::Retry { after: Duration::from_secs(seconds) / HASTE };
        for (status, after, body, expected) in [
            (201, "0", r#"{"charge":"ch-1"}"#, Advice::Believe(Some("ch-1".into()))),
            (200, "0", "no charge", Advice::Believe(None)),
            (409, "2", r#"{"retry":"same-key"}"#, retry(2)),
            (503, "1", r#"{"retry":"same-key"}"#, retry(1)),
            (500, "0", r#"{"retry":"stop"}"#, Advice::Stop),
            (422, "0", r#"{"retry":"stop"}"#, Advice::Believe(None)),
            (422, "0", r#"{"retry":"new-key"}"#, Advice::Believe(None)),
            (400, "0", r#"{"retry":"fix-request"}"#, Advice::Believe(None)),
            (502, "", "", retry(0)),
            (404, "", "", Advice::Believe(None)),
        ] {
            let response = Response::builder().status(status).header("retry-after", after);
            assert_eq!(
                advice(&response.body(Bytes::from_static(body.as_bytes())).unwrap()),
                expected,
                "{status}"
            );
        }
    }

    #[test]
    fn backoff_grows_and_is_bounded() {
        let mut jitter = Plan::draw(1, 1).jitter(1, 0);
        for attempt in 0..MAX_ATTEMPTS {
            let (wait, doubled) = (backoff(attempt, &mut jitter), FIRST_BACKOFF * (1 << attempt.min(10)));
            let whole = doubled.min(MAX_BACKOFF);
            assert!((whole / 2..=whole).contains(&wait), "{attempt}: {wait:?}");
        }
    }
}
