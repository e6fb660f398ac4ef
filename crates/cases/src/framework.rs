//! The services of cases in other languages.
//!
//! A service on a framework reads requests and writes responses as the framework does. For each request it asks the case
//! (its [`Backend`]) for the content of the response: in JSON, with bodies in hexadecimal.

use std::io::{self, BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::process::{Child, Stdio};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use serde_json::{Value, json};
use tower_service::Service;

use crate::backend::{Backend, HttpServer};
use crate::databases::Server;
use crate::remote::{hex, unhex};

/// The header with the address of the case, for a service on a framework. No deployment interprets it.
const CASE: &str = "x-case";

/// The framework of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Framework {
    /// FastAPI, in Python.
    FastApi,
    /// Express, in Node.
    Express,
}

static FASTAPI: Server<ServiceProcess> = Server::new();
static EXPRESS: Server<ServiceProcess> = Server::new();

impl Framework {
    /// The name in the names of tests.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::FastApi => "fastapi",
            Self::Express => "express",
        }
    }

    /// The address of the service, which the first case starts for all.
    pub(crate) async fn address(self) -> SocketAddr {
        let start = move || match self {
            Self::FastApi => FASTAPI.get(|| ServiceProcess::start(self)),
            Self::Express => EXPRESS.get(|| ServiceProcess::start(self)),
        };
        let service = tokio::task::spawn_blocking(start).await.expect("a start without a panic");
        service.unwrap_or_else(|error| panic!("no service on {self:?}: {error}")).address
    }
}

/// Stops all services. No case may run any more.
pub(crate) fn stop_services() {
    FASTAPI.stop();
    EXPRESS.stop();
}

/// A service on a framework, in its own process. It is killed when this is dropped.
struct ServiceProcess {
    address: SocketAddr,
    child: Child,
}

impl ServiceProcess {
    fn start(framework: Framework) -> io::Result<Self> {
        let (mut command, program) = match framework {
            Framework::FastApi => (oncegate_servers::fastapi_orders()?, "service.py"),
            Framework::Express => (oncegate_servers::express_orders()?, "service.cjs"),
        };
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("services").join(program);
        command.arg(program).env("PORT", "0").stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let output = child.stdout.take();
        let mut service = Self { address: ([127, 0, 0, 1], 0).into(), child };
        let mut line = String::new();
        BufReader::new(output.ok_or(io::ErrorKind::BrokenPipe)?).read_line(&mut line)?;
        let address = line.trim().strip_prefix("listening on http://").and_then(|text| text.parse().ok());
        service.address = address.ok_or_else(|| io::Error::other(format!("not an address: {line:?}")))?;
        Ok(service)
    }
}

impl Drop for ServiceProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The server of a case that services on frameworks ask.
pub(crate) struct CaseServer(HttpServer);

impl CaseServer {
    pub(crate) async fn start(backend: Backend) -> Self {
        Self(HttpServer::start(Asked(backend)).await)
    }

    /// The header line by which a service finds the case.
    pub(crate) fn field(&self) -> (Vec<u8>, Vec<u8>) {
        (CASE.into(), self.0.address.to_string().into())
    }
}

#[derive(Clone)]
struct Asked(Backend);

impl Service<Request<Incoming>> for Asked {
    type Response = Response<Full<Bytes>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, asked: Request<Incoming>) -> Self::Future {
        let mut backend = self.0.clone();
        Box::pin(async move {
            let asked = asked.into_body().collect().await.map_err(io::Error::other)?.to_bytes();
            let execution =
                read_request(&serde_json::from_slice(&asked)?).ok_or(io::ErrorKind::InvalidData)?;
            let (parts, body) = backend.call(execution).await?.into_parts();
            let body = hex(&body.collect().await?.to_bytes());
            let response = json!({
                "status": parts.status.as_u16(),
                "fields": write_fields(&parts.headers),
                "body": body,
            });
            Ok(Response::new(response.to_string().into()))
        })
    }
}

/// The request that a service received.
fn read_request(asked: &Value) -> Option<Request<Full<Bytes>>> {
    let mut request = Request::builder().method(asked["method"].as_str()?).uri(asked["target"].as_str()?);
    for field in asked["fields"].as_array()? {
        let value: Option<Vec<u8>> = field[1].as_str()?.chars().map(|c| u8::try_from(c).ok()).collect();
        request = request.header(field[0].as_str()?, value?);
    }
    request.body(unhex(asked["body"].as_str()?)?.into()).ok()
}

/// Names and values; each byte of a value is a character.
fn write_fields(fields: &HeaderMap) -> Vec<(&str, String)> {
    let text = |value: &http::HeaderValue| value.as_bytes().iter().copied().map(char::from).collect();
    fields.iter().map(|(name, value)| (name.as_str(), text(value))).collect()
}
