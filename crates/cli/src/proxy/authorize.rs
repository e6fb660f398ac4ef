//! Asks the service before a replay if the caller may still get the response.

use std::future::Future;
use std::pin::Pin;
use std::sync::LazyLock;
use std::time::Duration;

use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, Method, StatusCode};
use oncegate_core::ErrorChain;
use oncegate_engine::LogThrottle;
use oncegate_http::{Authorization, Authorize, Settings};

use super::reconcile::{ReconcileClients, only};
use super::{FULL_WARNING_INTERVAL, interim};

/// The header field in which the service decides. A page for all paths that are not known does not have it.
const DECISION: HeaderName = HeaderName::from_static("oncegate-authorize");

static UNANSWERED: LazyLock<LogThrottle> = LazyLock::new(|| LogThrottle::new(FULL_WARNING_INTERVAL));
static UNDECIDED: LazyLock<LogThrottle> = LazyLock::new(|| LogThrottle::new(FULL_WARNING_INTERVAL));

/// Asks the service, on one route.
pub(super) struct AuthorizeClient {
    pub(super) clients: ReconcileClients,
    pub(super) path: PathAndQuery,
    pub(super) timeout: Duration,
    pub(super) settings: Settings,
}

impl Authorize for AuthorizeClient {
    fn authorize<'a>(
        &'a self,
        request: &'a Parts,
    ) -> Pin<Box<dyn Future<Output = Authorization> + Send + 'a>> {
        Box::pin(async move {
            let asked = tokio::time::timeout(self.timeout, self.ask(request)).await;
            let asked =
                asked.unwrap_or_else(|_| Err("it did not answer within authorize-timeout".to_owned()));
            let decision = match asked {
                Ok((status, headers)) => decide(status, &headers).unwrap_or_else(|| {
                    warn_of_no_decision(status);
                    Authorization::CannotTell(status)
                }),
                Err(why) => {
                    if let Some(suppressed) = UNANSWERED.pass() {
                        tracing::warn!(
                            suppressed,
                            why,
                            "the service cannot be asked if a caller may get a replay"
                        );
                    }
                    Authorization::CannotTell(StatusCode::SERVICE_UNAVAILABLE)
                }
            };
            self.clients.metrics().observe_authorization(decision);
            decision
        })
    }
}

impl AuthorizeClient {
    async fn ask(&self, request: &Parts) -> Result<(StatusCode, HeaderMap), String> {
        let clients = &self.clients;
        let question = clients.question(&self.settings, request, Method::HEAD, &self.path);
        let question = question.ok_or("the question cannot be sent")?;
        let response = interim::send(clients.client(), question)
            .await
            .map_err(|error| ErrorChain(&error).to_string())?;
        let (head, _) = response.into_parts();
        Ok((head.status, head.headers))
    }
}

/// The decision in a response; `None` if there is none. A status by itself allows nothing: a page for all unknown paths has 200,
/// and a path that does not exist has 404.
fn decide(status: StatusCode, headers: &HeaderMap) -> Option<Authorization> {
    match (status, only(headers, &DECISION).map(|word| word.as_bytes())) {
        (status, Some(b"allow")) if status.is_success() => Some(Authorization::Allowed),
        (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _) | (StatusCode::NOT_FOUND, Some(b"deny")) => {
            Some(Authorization::Denied(status))
        }
        _ => None,
    }
}

fn warn_of_no_decision(status: StatusCode) {
    let Some(suppressed) = UNDECIDED.pass() else { return };
    let status = status.as_u16();
    tracing::warn!(
        suppressed,
        status,
        "the response of the service at the path of authorize is no decision, so there is no replay; it allows a replay with 2xx \
         and Oncegate-Authorize: allow, and denies it with 401, 403, or 404 and Oncegate-Authorize: deny"
    );
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn only_an_explicit_response_is_a_decision() {
        let (allowed, none) = (Some(Authorization::Allowed), None);
        let denied = |status| Some(Authorization::Denied(StatusCode::from_u16(status).unwrap()));
        for (status, words, expected) in [
            (200, &["allow"][..], allowed),
            (204, &["allow"], allowed),
            (200, &[], none),
            (200, &["deny"], none),
            (200, &["Allow"], none),
            (200, &["allow", "allow"], none),
            (200, &["allow, deny"], none),
            (401, &[], denied(401)),
            (403, &[], denied(403)),
            (403, &["allow"], denied(403)),
            (404, &["deny"], denied(404)),
            (404, &[], none),
            (404, &["allow"], none),
            (405, &["deny"], none),
            (429, &[], none),
            (302, &["allow"], none),
            (304, &["allow"], none),
            (500, &["allow"], none),
        ] {
            let mut headers = HeaderMap::new();
            for word in words {
                headers.append(DECISION, HeaderValue::from_static(word));
            }
            let status = StatusCode::from_u16(status).unwrap();
            assert_eq!(decide(status, &headers), expected, "{status} {words:?}");
        }
    }
}
