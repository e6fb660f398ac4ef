//! Sends one message to the collector, again and again while it is away.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderValue};
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use oncegate_core::ErrorChain;
use oncegate_engine::LogThrottle;
use oncegate_http::BoxError;

use super::options::{OtlpEndpoint, OtlpHeaders, OtlpOptions, Signal};
use super::wire::{FieldReader, FieldValue};
use crate::config::UpstreamProtocol;
use crate::proxy::{ToService, connector, interim, rewrite};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Limits the time of one try.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The tries for one message. With the pauses between them, a collector may be away for half a minute before spans are lost;
/// the queue is full earlier if there is much traffic.
const TRIES: u32 = 6;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The largest response that is read. Those of collectors have a few bytes.
const MAX_RESPONSE: usize = 64 * 1024;

/// The most bytes of a message of the collector that the log repeats.
const MAX_MESSAGE: usize = 200;

/// Limits the log lines about a collector that does not take the data.
static AWAY: LazyLock<LogThrottle> = LazyLock::new(|| LogThrottle::new(Duration::from_secs(60)));

/// The fate of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// The collector took it, except this number of spans.
    Accepted { rejected: u64 },
    /// It was given up.
    Failed,
}

/// A collector.
pub(super) struct Collector {
    client: Client<ToService, Full<Bytes>>,
    endpoint: OtlpEndpoint,
    headers: OtlpHeaders,
    /// True at the end of the process: then each message is tried once.
    is_closing: AtomicBool,
}

/// The failure of one try.
struct Failure {
    why: String,
    /// The shortest pause before the next try; `None` if another try would fail, too.
    retry_after: Option<Duration>,
}

impl Collector {
    pub(super) fn new(options: &OtlpOptions) -> Result<Self, String> {
        let connector = connector(&options.endpoint.server, UpstreamProtocol::Http1, CONNECT_TIMEOUT)?;
        let client = Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .pool_max_idle_per_host(1)
            .build(connector);
        Ok(Self {
            client,
            endpoint: options.endpoint.clone(),
            headers: options.headers.clone(),
            is_closing: AtomicBool::new(false),
        })
    }

    /// From now on each message is tried once, because the process ends.
    pub(super) fn close(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
    }

    /// Sends a message until the collector takes it, refuses it for good, or has been away for too long.
    pub(super) async fn send(&self, signal: Signal, body: Vec<u8>) -> Sent {
        let body = Bytes::from(body);
        let mut pause = FIRST_PAUSE;
        for attempt in 1..=TRIES {
            let failure = match self.try_send(signal, body.clone()).await {
                Ok(rejected) => return Sent::Accepted { rejected },
                Err(failure) => failure,
            };
            let is_last =
                self.is_closing.load(Ordering::Relaxed) || attempt == TRIES || failure.retry_after.is_none();
            if let Some(suppressed) = AWAY.pass() {
                let (to, signal, error) = (&self.endpoint, signal.as_str(), &failure.why);
                tracing::warn!(suppressed, %to, signal, error, "the collector did not take traces or metrics; requests are not affected");
            }
            if is_last {
                return Sent::Failed;
            }
            tokio::time::sleep(pause.max(failure.retry_after.unwrap_or_default()).min(LONGEST_PAUSE)).await;
            pause *= 2;
        }
        Sent::Failed
    }

    /// Returns the number of spans that the collector rejected.
    async fn try_send(&self, signal: Signal, body: Bytes) -> Result<u64, Failure> {
        let again = |why: String| Failure { why, retry_after: Some(Duration::ZERO) };
        let asked = async {
            let response = interim::send(&self.client, self.request(signal, body)?).await?;
            let (head, body) = response.into_parts();
            let body = Limited::new(body, MAX_RESPONSE).collect().await?.to_bytes();
            Ok::<_, BoxError>((head.status, head.headers, body))
        };
        let (status, headers, body) = match tokio::time::timeout(TIMEOUT, asked).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return Err(again(ErrorChain(&*error).to_string())),
            Err(_) => return Err(again(format!("no response within {} s", TIMEOUT.as_secs()))),
        };
        if status.is_success() {
            let (rejected, message) = partial_success(&body);
            if (rejected > 0 || !message.is_empty())
                && let Some(suppressed) = AWAY.pass()
            {
                tracing::warn!(
                    suppressed,
                    rejected,
                    message,
                    "the collector reports a problem with traces or metrics"
                );
            }
            return Ok(rejected);
        }
        // The specification names these statuses; all others are final.
        let is_temporary = matches!(
            status,
            StatusCode::TOO_MANY_REQUESTS
                | StatusCode::BAD_GATEWAY
                | StatusCode::SERVICE_UNAVAILABLE
                | StatusCode::GATEWAY_TIMEOUT
        );
        let path = self.endpoint.path(signal).map(|path| path.to_string()).unwrap_or_default();
        Err(Failure {
            why: format!("{status} to POST {path}"),
            retry_after: is_temporary.then(|| retry_after(&headers)),
        })
    }

    fn request(&self, signal: Signal, body: Bytes) -> Result<Request<Full<Bytes>>, BoxError> {
        let path = self.endpoint.path(signal).ok_or("the path is not valid")?;
        let uri = rewrite(&self.endpoint.server, &Uri::from(path), None);
        let mut request = Request::post(uri).body(Full::new(body))?;
        let headers = request.headers_mut();
        for (name, value) in &self.headers.0 {
            headers.append(name, value.clone());
        }
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        let agent = concat!("OTel-OTLP-Exporter-oncegate/", env!("CARGO_PKG_VERSION"));
        headers.insert(header::USER_AGENT, HeaderValue::from_static(agent));
        Ok(request)
    }
}

/// The pause that the collector asks for, in seconds.
fn retry_after(headers: &HeaderMap) -> Duration {
    let seconds = headers.get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
    seconds.map_or(Duration::ZERO, Duration::from_secs)
}

/// The number of rejected spans or points, and the message of the collector, in its response
/// (`ExportTraceServiceResponse.partial_success`).
fn partial_success(body: &[u8]) -> (u64, String) {
    let partial = FieldReader(body).find_map(|field| match field {
        (1, FieldValue::Bytes(partial)) => Some(partial),
        _ => None,
    });
    let (mut rejected, mut message) = (0, String::new());
    for field in FieldReader(partial.unwrap_or_default()) {
        match field {
            (1, FieldValue::Number(count)) => rejected = count,
            (2, FieldValue::Bytes(text)) => {
                let text = text.get(..MAX_MESSAGE).unwrap_or(text);
                message = crate::printable(&String::from_utf8_lossy(text));
            }
            _ => {}
        }
    }
    (rejected, message)
}

#[cfg(test)]
mod tests {
    use super::super::wire::MessageWriter;
    use super::*;

    #[test]
    fn a_partial_success_is_read() {
        let mut message = MessageWriter::default();
        message.message(1, |partial| {
            partial.number(1, 3);
            partial.text(2, "too\u{1b} old");
        });
        assert_eq!(partial_success(&message.into_bytes()), (3, "too\u{fffd} old".to_owned()));
        assert_eq!(partial_success(b""), (0, String::new()));
        assert_eq!(partial_success(b"<html>"), (0, String::new()));
    }

    #[test]
    fn a_pause_that_the_collector_asks_for_is_read() {
        let mut headers = HeaderMap::new();
        assert_eq!(retry_after(&headers), Duration::ZERO);
        headers.insert("retry-after", HeaderValue::from_static("7"));
        assert_eq!(retry_after(&headers), Duration::from_secs(7));
        headers.insert("retry-after", HeaderValue::from_static("Wed, 21 Oct 2026 07:28:00 GMT"));
        assert_eq!(retry_after(&headers), Duration::ZERO);
    }
}
