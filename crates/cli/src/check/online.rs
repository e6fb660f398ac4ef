//! `oncegate check --online`: checks that the service answers, and that the keys of tokens can be fetched.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Version, header};
use http_body_util::Empty;
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use oncegate_core::ErrorChain;
use oncegate_http::JwtVerifier;

use super::Report;
use crate::config::{Config, KeySetPlace, UpstreamProtocol, duration_text};
use crate::proxy::{MAX_HEAD, MAX_LIBRARY_HEAD, MAX_LINES, connector, handshake_hint, interim};

/// Limits the time of one response of the service.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Connects as the sidecar does, with TLS if the address has it, and sends one `GET /` without a key.
pub(super) fn service(config: &Config, report: &mut Report) {
    let to = &config.to;
    match crate::block_on(ask(config)).flatten() {
        Ok((status, version)) if status.is_server_error() => {
            report.warn(format!("service {to}: answers GET / with {status} ({version:?})"));
        }
        Ok((status, version)) => {
            report.ok(format!("service {to}: reached; it answers GET / with {status} ({version:?})"));
        }
        Err(why) => {
            report.error(format!("service {to}: {why}{}", handshake_hint(&why)));
        }
    }
}

/// Fetches the key set that verifies tokens as the sidecar does, and checks it.
pub(super) fn key_set(verifier: &JwtVerifier, place: &KeySetPlace, report: &mut Report) {
    let verifier = verifier.clone();
    let checked =
        crate::block_on(async move { verifier.check_source().await.map_err(|error| error.to_string()) });
    match checked.flatten() {
        Ok(()) => report.ok(format!(
            "tokens: verified with the keys in {place}; they were fetched and fit jwt-algorithms"
        )),
        Err(why) => report.error(format!("tokens: no token can be verified with the keys in {place}: {why}")),
    }
}

async fn ask(config: &Config) -> Result<(http::StatusCode, Version), String> {
    let protocol = config.upstream_protocol;
    let connector = connector(&config.to, protocol, config.upstream_connect_timeout)?;
    let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        // The same limits as in the sidecar.
        .http1_max_buf_size(MAX_HEAD)
        .http1_max_headers(MAX_LINES)
        .http2_max_header_list_size(MAX_LIBRARY_HEAD)
        .http2_only(protocol == UpstreamProtocol::Http2)
        .build(connector);
    let request = Request::builder()
        .method(Method::GET)
        .uri(format!("{}/", config.to))
        .header(header::USER_AGENT, concat!("oncegate-check/", env!("CARGO_PKG_VERSION")))
        .body(Empty::new())
        .map_err(|error| error.to_string())?;
    match tokio::time::timeout(RESPONSE_TIMEOUT, interim::send(&client, request)).await {
        Ok(Ok(response)) => Ok((response.status(), response.version())),
        Ok(Err(error)) if error.is_connect() => Err(format!("cannot be reached: {}", ErrorChain(&error))),
        Ok(Err(error)) => Err(format!("was reached and did not answer GET /: {}", ErrorChain(&error))),
        Err(_) => Err(format!("did not answer GET / within {}", duration_text(RESPONSE_TIMEOUT))),
    }
}
