//! Asks the admin API.

use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::uri::{Authority, Scheme};
use http::{Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::HttpsConnectorBuilder;
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::{Connect, HttpConnector};
use hyper_util::rt::TokioExecutor;
use oncegate_core::ErrorChain;
use serde_json::Value;

use super::Failure;

/// How long the sidecar may take for an answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// The largest answer: a record holds 64 MiB at the most, and base64 makes four octets of three.
const ANSWER_MAX: usize = 100 * 1024 * 1024;

pub(super) struct Client {
    scheme: Scheme,
    authority: Authority,
    token: Option<HeaderValue>,
}

impl Client {
    pub(super) fn new(admin: &str, token: Option<&str>) -> Result<Self, Failure> {
        let usage = |what: &str| Failure::Usage(format!("--admin {admin:?}: {what}"));
        let url = if admin.contains("://") { admin.to_owned() } else { format!("http://{admin}") };
        let none = "write a URL such as http://127.0.0.1:9090, or IP:PORT";
        let parts = url.parse::<Uri>().map_err(|_| usage(none))?.into_parts();
        let (Some(scheme), Some(authority)) = (parts.scheme, parts.authority) else {
            return Err(usage(none));
        };
        let path = parts.path_and_query.map_or_else(String::new, |path| path.to_string());
        if authority.as_str().contains('@') || !["", "/"].contains(&path.as_str()) {
            return Err(usage("write only scheme, host and port"));
        }
        if scheme != Scheme::HTTP && scheme != Scheme::HTTPS {
            return Err(usage("the scheme must be http or https"));
        }
        let token = token.filter(|token| !token.is_empty()).map(|token| -> Result<_, Failure> {
            let mut value = HeaderValue::from_str(&format!("Bearer {token}")).map_err(|_| {
                Failure::Usage("the token has characters that no header field has".to_owned())
            })?;
            value.set_sensitive(true);
            Ok(value)
        });
        Ok(Self { scheme, authority, token: token.transpose()? })
    }

    pub(super) async fn get(&self, path: &str) -> Result<Value, Failure> {
        self.ask(Method::GET, path, Bytes::new()).await
    }

    pub(super) async fn post(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.ask(Method::POST, path, body.to_string().into()).await
    }

    async fn ask(&self, method: Method, path: &str, body: Bytes) -> Result<Value, Failure> {
        let url = format!("{}://{}{path}", self.scheme, self.authority);
        let mut request = Request::builder().method(&method).uri(url);
        if method == Method::POST {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, token);
        }
        let request = request.body(Full::new(body)).map_err(|error| Failure::Usage(error.to_string()))?;
        let answer = async {
            if self.scheme == Scheme::HTTP {
                return self.send(HttpConnector::new(), request).await;
            }
            let connector = HttpsConnectorBuilder::new().with_native_roots();
            let connector = connector.map_err(|error| self.unreachable(&ErrorChain(&error).to_string()))?;
            self.send(connector.https_only().enable_http1().build(), request).await
        };
        let answer = tokio::time::timeout(PATIENCE, answer).await;
        let (status, body) = answer
            .map_err(|_| self.unreachable(&format!("no answer within {} seconds", PATIENCE.as_secs())))??;
        let body: Option<Value> = serde_json::from_slice(&body).ok();
        match body {
            Some(body) if status.is_success() => Ok(body),
            Some(problem) => Err(Failure::Refused(self.refusal(status, &problem))),
            None => Err(self.unreachable(&format!(
                "the answer ({status}) is not that of an admin API; is this the admin address of a sidecar?"
            ))),
        }
    }

    async fn send<C>(
        &self,
        connector: C,
        request: Request<Full<Bytes>>,
    ) -> Result<(StatusCode, Bytes), Failure>
    where
        C: Connect + Clone + Send + Sync + 'static,
    {
        let client = legacy::Client::builder(TokioExecutor::new()).build(connector);
        let response = client
            .request(request)
            .await
            .map_err(|error| self.unreachable(&ErrorChain(&error).to_string()))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_MAX).collect().await;
        let body = body
            .map_err(|error| self.unreachable(&format!("the answer broke off: {}", ErrorChain(&*error))))?;
        Ok((status, body.to_bytes()))
    }

    /// The words of a problem, in terms of the command line.
    fn refusal(&self, status: StatusCode, problem: &Value) -> String {
        let text = |name: &str| problem[name].as_str().unwrap_or_default();
        match (status, text("type").rsplit(':').next().unwrap_or_default()) {
            (StatusCode::UNAUTHORIZED, _) => {
                let what = if self.token.is_some() { "is wrong" } else { "is missing" };
                return format!(
                    "the admin token {what}; give it with --token-file FILE or in ONCEGATE_ADMIN_TOKEN"
                );
            }
            (StatusCode::FORBIDDEN, "forbidden") => {
                return format!(
                    "--admin {}: without an admin token the sidecar answers to 127.0.0.1, [::1] and localhost only",
                    self.authority
                );
            }
            _ => {}
        }
        let detail = text("detail");
        let about = detail.split_once(": ").filter(|(name, _)| *name == text("parameter"));
        if let Some(("caller", _)) = about {
            return "say whose the request was: --caller-file FILE with the value of the header field that tells callers apart, \
                    --anonymous if it did not send that field, or --single-tenant if the route does not tell callers apart"
                .to_owned();
        }
        let flag = |name: &str| FLAGS.iter().find(|(other, _)| *other == name).map(|(_, flag)| *flag);
        if let Some((flag, what)) = about.and_then(|(name, what)| Some((flag(name)?, what))) {
            return format!("{flag}: {what}");
        }
        let mut words = match (text("title"), detail) {
            ("", "") => status.to_string(),
            (title, detail) => format!("{title}: {detail}"),
        };
        if let Some(record) = problem["record"].as_str() {
            words.push_str(&format!(" (record {record})"));
        }
        words
    }

    fn unreachable(&self, why: &str) -> Failure {
        Failure::Unreachable(format!(
            "cannot reach the sidecar at {}://{}: {why}",
            self.scheme, self.authority
        ))
    }
}

/// The flags that set the members and parameters of requests.
const FLAGS: [(&str, &str); 15] = [
    ("state", "--state"),
    ("key_tag", "--key"),
    ("operation", "--operation"),
    ("min_age", "--min-age"),
    ("limit", "--limit"),
    ("order", "--order"),
    ("cursor", "--cursor"),
    ("before", "--before"),
    ("key", "--key"),
    ("method", "--method"),
    ("path", "--path"),
    ("status", "--status"),
    ("headers", "--header"),
    ("reason", "--reason"),
    ("actor", "--actor"),
];
