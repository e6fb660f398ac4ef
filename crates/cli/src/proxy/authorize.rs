//! Asks the service before a replay if the caller may still get the response.

use std::future::Future;
use std::pin::Pin;
use std::sync::LazyLock;
use std::time::Duration;

use http::request::Parts;
use http::uri::PathAndQuery;
use http::{Method, StatusCode};
use oncegate_core::ErrorChain;
use oncegate_engine::LogThrottle;
use oncegate_http::{Authorization, Authorize, Settings};

use super::FULL_WARNING_INTERVAL;
use super::reconcile::ReconcileClients;

static UNANSWERED: LazyLock<LogThrottle> = LazyLock::new(|| LogThrottle::new(FULL_WARNING_INTERVAL));

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
            let result =
                asked.unwrap_or_else(|_| Err("it did not answer within authorize-timeout".to_owned()));
            let decision = result.unwrap_or_else(|why| {
                if let Some(suppressed) = UNANSWERED.pass() {
                    tracing::warn!(
                        suppressed,
                        why,
                        "the service cannot be asked if a caller may get a replay"
                    );
                }
                Authorization::CannotTell(StatusCode::SERVICE_UNAVAILABLE)
            });
            self.clients.metrics().observe_authorization(decision);
            decision
        })
    }
}

impl AuthorizeClient {
    async fn ask(&self, request: &Parts) -> Result<Authorization, String> {
        let clients = &self.clients;
        let question = clients.question(&self.settings, request, Method::HEAD, &self.path);
        let question = question.ok_or("the question cannot be sent")?;
        let response =
            clients.client().request(question).await.map_err(|error| ErrorChain(&error).to_string())?;
        let status = response.status();
        if status.is_success() {
            Ok(Authorization::Allowed)
        } else if status.is_client_error() {
            Ok(Authorization::Denied(status))
        } else if status.is_server_error() {
            Ok(Authorization::CannotTell(status))
        } else {
            Err(format!("the status {status} is no decision; 2xx, 4xx and 5xx are"))
        }
    }
}
