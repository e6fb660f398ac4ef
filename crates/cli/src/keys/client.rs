//! The client of the admin API.

use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::uri::{Authority, Scheme};
use http::{Method, Request, StatusCode, Uri, request, response};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper_rustls::HttpsConnectorBuilder;
use hyper_util::client::legacy;
use hyper_util::rt::TokioExecutor;
use oncegate_core::ErrorChain;
use serde_json::Value;
use tokio::sync::OnceCell;

use super::Failure;
use crate::admin::ADMIN_FIELD;
use crate::config::shown_url;
use crate::proxy::interim::{self, BoundedConnector};
use crate::proxy::trusting_system;

/// Limits the time of one response of the sidecar.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

/// The largest response: a record has at most 64 MiB, and base64 turns three bytes into four.
const MAX_RESPONSE: usize = 100 * 1024 * 1024;

/// The largest refusal of a response that would go on.
const MAX_PROBLEM: usize = 1024 * 1024;

pub(crate) struct Client {
    scheme: Scheme,
    authority: Authority,
    token: Option<HeaderValue>,
    /// Set once the admin API of a sidecar has answered.
    is_admin: OnceCell<()>,
}

/// A response, read to its end.
struct Response {
    status: StatusCode,
    /// True if the response comes from an admin API.
    is_admin: bool,
    body: Bytes,
}

/// A response whose body is read as it arrives.
pub(super) struct Download {
    pub(super) head: response::Parts,
    pub(super) body: Incoming,
}

impl Client {
    pub(crate) fn new(admin: &str, token: Option<&str>) -> Result<Self, Failure> {
        let usage = |what: &str| Failure::Usage(format!("--admin {:?}: {what}", shown_url(admin)));
        let url = if admin.contains("://") { admin.to_owned() } else { format!("http://{admin}") };
        if let port = admin.strip_prefix(':').unwrap_or(admin)
            && port.parse::<u16>().is_ok()
        {
            return Err(usage(&format!("it has no host; write 127.0.0.1:{port} for this machine")));
        }
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
                Failure::Usage("the token has characters that a header field cannot contain".to_owned())
            })?;
            value.set_sensitive(true);
            Ok(value)
        });
        Ok(Self { scheme, authority, token: token.transpose()?, is_admin: OnceCell::new() })
    }

    pub(crate) async fn get(&self, path: &str) -> Result<Value, Failure> {
        self.ask(Method::GET, path, Bytes::new()).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.ask(Method::POST, path, body.to_string().into()).await
    }

    /// Asks for a response of any length, and waits for its head.
    pub(super) async fn download(&self, path: &str) -> Result<Download, Failure> {
        let request = self.authorized(&Method::GET, path).await?;
        let request = request.body(Full::default()).map_err(|error| Failure::Usage(error.to_string()))?;
        let response = self.within(self.send_any(request)).await?;
        let (head, body) = response.into_parts();
        if head.status.is_success() && head.headers.contains_key(ADMIN_FIELD) {
            return Ok(Download { head, body });
        }
        let body = self.within(self.collected(body)).await?;
        match serde_json::from_slice::<Value>(&body) {
            Ok(problem) if head.headers.contains_key(ADMIN_FIELD) => {
                Err(self.refusal(path, head.status, &problem))
            }
            _ => Err(self.not_admin(head.status)),
        }
    }

    /// The response to a question about the health of the sidecar, which needs no token.
    pub(super) async fn health(&self, path: &str) -> Result<(StatusCode, String), Failure> {
        let response = self.exchange(self.request(&Method::GET, path), Bytes::new()).await?;
        match response.is_admin {
            true => Ok((response.status, String::from_utf8_lossy(&response.body).into_owned())),
            false => Err(self.not_admin(response.status)),
        }
    }

    /// A request with the token, after the address was found to be that of an admin API.
    async fn authorized(&self, method: &Method, path: &str) -> Result<request::Builder, Failure> {
        // A wrong port may be that of the service, which must get neither the token nor the command.
        self.is_admin.get_or_try_init(|| self.probe()).await?;
        let request = self.request(method, path);
        Ok(match &self.token {
            Some(token) => request.header(header::AUTHORIZATION, token),
            None => request,
        })
    }

    async fn ask(&self, method: Method, path: &str, body: Bytes) -> Result<Value, Failure> {
        let mut request = self.authorized(&method, path).await?;
        if method == Method::POST {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let response = self.exchange(request, body).await?;
        let Response { status, is_admin: true, body } = response else {
            return Err(self.unreachable(&format!(
                "an admin API answered first, and another server did now ({}); if this command changes a record, check if it did",
                response.status
            )));
        };
        match serde_json::from_slice::<Value>(&body) {
            Ok(body) if !status.is_success() => Err(self.refusal(path, status, &body)),
            Ok(body) if body.get(member_of(path)).is_some() => Ok(body),
            _ => Err(self.unreachable(&format!(
                "this program does not understand its response ({status}); check that the sidecar has the same version"
            ))),
        }
    }

    /// Opens a response that goes on. The caller reads its body, and gives up when no more of it comes.
    pub(crate) async fn stream(&self, path: &str) -> Result<Incoming, Failure> {
        // Each time: since the last one, another program may have taken the port.
        self.probe().await?;
        let mut request = self.request(&Method::GET, path);
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, token);
        }
        let response = self.begin(request, Bytes::new()).await?;
        let status = response.status();
        if !response.headers().contains_key(ADMIN_FIELD) {
            return Err(self.not_admin(status));
        }
        if status.is_success() {
            return Ok(response.into_body());
        }
        let body = Limited::new(response.into_body(), MAX_PROBLEM).collect().await;
        let problem = body.ok().and_then(|body| serde_json::from_slice(&body.to_bytes()).ok());
        Err(self.refusal(path, status, &problem.unwrap_or_default()))
    }

    /// The URL of the sidecar, for notices.
    pub(crate) fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.authority)
    }

    /// Checks that an admin API answers, with a request that carries no token and changes nothing.
    async fn probe(&self) -> Result<(), Failure> {
        let response = self.exchange(self.request(&Method::GET, "/livez"), Bytes::new()).await?;
        if response.is_admin { Ok(()) } else { Err(self.not_admin(response.status)) }
    }

    fn request(&self, method: &Method, path: &str) -> request::Builder {
        Request::builder().method(method).uri(format!("{}://{}{path}", self.scheme, self.authority))
    }

    async fn exchange(&self, request: request::Builder, body: Bytes) -> Result<Response, Failure> {
        let request = request.body(Full::new(body)).map_err(|error| Failure::Usage(error.to_string()))?;
        self.within(async {
            let response = self.send_any(request).await?;
            let status = response.status();
            let is_admin = response.headers().contains_key(ADMIN_FIELD);
            let body = self.collected(response.into_body()).await?;
            Ok(Response { status, is_admin, body })
        })
        .await
    }

    /// Sends a request, and returns the response when its head has come.
    async fn begin(
        &self,
        request: request::Builder,
        body: Bytes,
    ) -> Result<http::Response<Incoming>, Failure> {
        let request = request.body(Full::new(body)).map_err(|error| Failure::Usage(error.to_string()))?;
        self.within(self.send_any(request)).await
    }

    /// The result, which must be there in time.
    async fn within<T>(&self, result: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        let late =
            |_| self.unreachable(&format!("no response within {} seconds", RESPONSE_TIMEOUT.as_secs()));
        tokio::time::timeout(RESPONSE_TIMEOUT, result).await.map_err(late)?
    }

    async fn send_any(&self, request: Request<Full<Bytes>>) -> Result<http::Response<Incoming>, Failure> {
        let is_https = self.scheme == Scheme::HTTPS;
        let tls = trusting_system(is_https).map_err(|error| self.unreachable(&error))?;
        let connector =
            HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().build();
        let client = legacy::Client::builder(TokioExecutor::new()).build(BoundedConnector(connector));
        let sent = interim::send(&client, request).await;
        sent.map_err(|error| self.unreachable(&ErrorChain(&error).to_string()))
    }

    async fn collected(&self, body: Incoming) -> Result<Bytes, Failure> {
        let body = Limited::new(body, MAX_RESPONSE).collect().await;
        let body = body
            .map_err(|error| self.unreachable(&format!("the response broke off: {}", ErrorChain(&*error))))?;
        Ok(body.to_bytes())
    }

    /// Describes a problem in terms of the command line.
    fn refusal(&self, path: &str, status: StatusCode, problem: &Value) -> Failure {
        let text = |name: &str| problem[name].as_str().unwrap_or_default();
        match (status, text("type").rsplit(':').next().unwrap_or_default()) {
            (StatusCode::UNAUTHORIZED, _) => {
                let what = if self.token.is_some() { "is wrong" } else { "is missing" };
                return Failure::Refused(format!(
                    "the admin token {what}; give it with --token-file FILE or in ONCEGATE_ADMIN_TOKEN"
                ));
            }
            (StatusCode::FORBIDDEN, "forbidden") => {
                return Failure::Refused(format!(
                    "--admin {}: without an admin token the sidecar accepts only 127.0.0.1, [::1] and localhost",
                    self.authority
                ));
            }
            _ => {}
        }
        let detail = &in_flags(text("detail"));
        let about = detail.split_once(": ").filter(|(name, _)| *name == text("parameter"));
        if let Some(("caller", what)) = about.filter(|_| path == "/v1/keys/find") {
            return Failure::Usage(caller_in_flags(&problem["caller"], what));
        }
        let flag = |name: &str| FLAGS.iter().find(|(other, _)| *other == name).map(|(_, flag)| *flag);
        if let Some((flag, what)) = about.and_then(|(name, what)| Some((flag(name)?, what))) {
            return Failure::Usage(format!("{flag}: {what}"));
        }
        if status == StatusCode::BAD_REQUEST && !detail.is_empty() {
            return Failure::Usage(detail.clone());
        }
        let title = text("title");
        let repeats_title = detail.get(..title.len()).is_some_and(|start| start.eq_ignore_ascii_case(title));
        let mut words = match (title, detail.as_str()) {
            ("", "") => status.to_string(),
            (_, detail) if repeats_title => detail.to_owned(),
            (title, detail) => format!("{title}: {detail}"),
        };
        if let Some(record) = problem["record"].as_str() {
            words.push_str(&format!(" (record {record})"));
        }
        Failure::Refused(words)
    }

    fn unreachable(&self, why: &str) -> Failure {
        Failure::Unreachable(format!(
            "cannot reach the sidecar at {}://{} (--admin): {why}",
            self.scheme, self.authority
        ))
    }

    /// The error for a response that is not from an admin API. Its sender got neither the token nor the command.
    fn not_admin(&self, status: StatusCode) -> Failure {
        Failure::Unreachable(format!(
            "the server at {}://{} ({}) is not the admin API of a sidecar; nothing was done. Give --admin the address that the \
             sidecar prints as `admin` when it starts, and not the one on which it listens for requests",
            self.scheme, self.authority, status
        ))
    }
}

/// A member that every response of the admin API for this path has.
fn member_of(path: &str) -> &'static str {
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    match path {
        "/v1/keys" => "records",
        "/v1/keys/tag" => "key_tag",
        "/v1/audit" | "/v1/audit/messages" => "entries",
        "/v1/clock" => "direction",
        "/v1/clock/accept" => "ahead_seconds",
        "/v1/seal" => "keys",
        "/v1/seal/usage" => "sealed",
        "/v1/seal/messages" => "dead_letters",
        "/v1/seal/reseal" => "resealed",
        "/v1/keys/forget" => "forgotten",
        "/v1/compact" => "compacted",
        "/v1/id-secret" | "/v1/id-secret/restore" => "mark",
        "/v1/dead-letters" => "dead_letters",
        "/v1/outbox" => "messages",
        "/v1/summary" => "version",
        "/v1/misuse" => "misuse",
        path if path.starts_with("/v1/dead-letters/") => "number",
        path if path.starts_with("/v1/outbox/") => "seq",
        _ => "record",
    }
}

/// The flags that name the caller on a route. `caller` is the form that the sidecar needs, and `what` are its words.
fn caller_in_flags(caller: &Value, what: &str) -> String {
    let parts = caller["parts"].as_str().unwrap_or_default();
    match caller["form"].as_str() {
        Some("value") => format!(
            "on this route the {parts} tells callers apart: give --caller-file FILE with its value as it was sent, without its name, or \
             --anonymous if the request had none"
        ),
        Some("fields") => format!(
            "on this route the {parts} tell callers apart: give --caller-fields FILE with the header fields that have them, as they were \
             sent, one \"Name: value\" a line; or --anonymous if the request had none of them"
        ),
        Some("single-tenant") => {
            "this route does not tell callers apart: give --single-tenant, and no other flag about the caller".to_owned()
        }
        Some("nothing") => "on this route the path and the host identify the caller: leave --caller-file, --caller-fields, --anonymous and \
                            --single-tenant out"
            .to_owned(),
        Some("key-alone") => format!(
            "on this route the {parts} tells callers apart, which cannot be given here: leave --path, --method and the flags about the \
             caller out, to list all records of the key"
        ),
        _ => format!("--caller-file or --caller-fields: {what}"),
    }
}

/// The text with flags instead of the members of requests, which the admin API writes between backticks.
pub(crate) fn in_flags(text: &str) -> String {
    FLAGS.iter().fold(text.to_owned(), |text, (member, flag)| text.replace(&format!("`{member}`"), flag))
}

/// The flags that set the members and parameters of requests.
const FLAGS: [(&str, &str); 29] = [
    ("seal_clear", "--seal-clear"),
    ("state", "--state"),
    ("caller", "--caller"),
    ("host", "--host"),
    ("amend", "--amend"),
    ("force", "--force"),
    ("key_tag", "--key"),
    ("operation", "--operation"),
    ("min_age", "--min-age"),
    ("since", "--since"),
    ("until", "--until"),
    ("limit", "--limit"),
    ("order", "--order"),
    ("cursor", "--cursor"),
    ("before", "--before"),
    ("after", "--after"),
    ("accept", "--accept"),
    ("broker_window", "--broker-window"),
    ("consumer", "--consumer"),
    ("topic", "--topic"),
    ("payload", "--payload"),
    ("body", "--body"),
    ("key", "--key"),
    ("method", "--method"),
    ("path", "--path"),
    ("status", "--status"),
    ("headers", "--header"),
    ("reason", "--reason"),
    ("actor", "--actor"),
];
