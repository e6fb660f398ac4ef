//! `oncegate check --online`: whether the service answers.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Version, header};
use http_body_util::Empty;
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use oncegate_core::ErrorChain;

use super::Report;
use crate::config::{Config, UpstreamProtocol, duration_text};
use crate::proxy::{HEAD_MAX, LIBRARY_HEAD_MAX, LINES_MAX, connector};

/// Limits the time of one answer of the service.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Advice for a certificate that no authority of the system has signed.
const UNKNOWN_ISSUER: &str = "; if the service has a certificate authority of its own, name it in the environment: \
     SSL_CERT_FILE=ca.pem, for the sidecar, too";

/// Connects as the sidecar does, with TLS if the address has it, and sends one `GET /` without a key.
pub(super) fn service(config: &Config, report: &mut Report) {
    let to = &config.to;
    // On a thread of its own, whatever runs on this one.
    let asked = std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.map_err(|error| error.to_string())?.block_on(ask(config))
        });
        asking.join().unwrap_or_else(|_| Err("asking it failed".to_owned()))
    });
    match asked {
        Ok((status, version)) if status.is_server_error() => {
            report.warn(format!("service {to}: answers GET / with {status} ({version:?})"));
        }
        Ok((status, version)) => {
            report.ok(format!("service {to}: reached; it answers GET / with {status} ({version:?})"));
        }
        Err(why) => {
            let hint = if why.contains("UnknownIssuer") { UNKNOWN_ISSUER } else { "" };
            report.error(format!("service {to}: {why}{hint}"));
        }
    }
}

async fn ask(config: &Config) -> Result<(http::StatusCode, Version), String> {
    let protocol = config.upstream_protocol;
    let connector = connector(&config.to, protocol, config.upstream_connect_timeout)?;
    let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        // The head of an answer may be as large as the sidecar takes it.
        .http1_max_buf_size(HEAD_MAX)
        .http1_max_headers(LINES_MAX)
        .http2_max_header_list_size(LIBRARY_HEAD_MAX)
        .http2_only(protocol == UpstreamProtocol::Http2)
        .build(connector);
    let request = Request::builder()
        .method(Method::GET)
        .uri(format!("{}/", config.to))
        .header(header::USER_AGENT, concat!("oncegate-check/", env!("CARGO_PKG_VERSION")))
        .body(Empty::new())
        .map_err(|error| error.to_string())?;
    match tokio::time::timeout(ANSWER_TIMEOUT, client.request(request)).await {
        Ok(Ok(response)) => Ok((response.status(), response.version())),
        Ok(Err(error)) if error.is_connect() => Err(format!("cannot be reached: {}", ErrorChain(&error))),
        Ok(Err(error)) => Err(format!("was reached and did not answer GET /: {}", ErrorChain(&error))),
        Err(_) => Err(format!("did not answer GET / within {}", duration_text(ANSWER_TIMEOUT))),
    }
}
