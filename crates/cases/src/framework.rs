//! The services of cases in other languages.
//!
//! A service on a framework reads requests and writes responses as the framework does. For each request it asks the case
//! (its [`Backend`]) for the content of the response: in JSON, with bodies in hexadecimal. A service with a library asks at
//! another path, where the response is lines of JSON: the head, each part of the body, the trailers, and the end, or the
//! order to break off; or instead the order to end without a response. If there are no lines, the handler fails.

use std::io::{self, BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body::{Body, Frame};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use serde_json::{Value, json};
use tower_service::Service;

use crate::backend::{Backend, HttpServer, ScriptedBody};
use crate::databases::Server;
use crate::remote::{hex, unhex};

/// The header with the address of the case, for a service on a framework. No deployment interprets it.
const CASE: &str = "x-case";

/// The path at which the response comes part by part.
const IN_PARTS: &str = "/parts";

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
pub(crate) struct CaseServer {
    server: HttpServer,
    number: u64,
}

impl CaseServer {
    pub(crate) async fn start(backend: Backend) -> Self {
        static STARTED: AtomicU64 = AtomicU64::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        Self { server: HttpServer::start(Asked { backend, number }).await, number }
    }

    /// The address of the case, and its number, which a late request of an earlier case on the same port does not have.
    pub(crate) const fn backend(&self) -> (SocketAddr, u64) {
        (self.server.address, self.number)
    }

    /// The header line by which a service finds the case.
    pub(crate) fn field(&self) -> (Vec<u8>, Vec<u8>) {
        (CASE.into(), self.server.address.to_string().into())
    }
}

#[derive(Clone)]
struct Asked {
    backend: Backend,
    number: u64,
}

impl Service<Request<Incoming>> for Asked {
    type Response = Response<Parts>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, asked: Request<Incoming>) -> Self::Future {
        let (mut backend, number) = (self.backend.clone(), self.number);
        Box::pin(async move {
            let is_in_parts = asked.uri().path() == IN_PARTS;
            let asked = asked.into_body().collect().await.map_err(io::Error::other)?.to_bytes();
            let asked = serde_json::from_slice(&asked)?;
            let execution = read_request(&asked).ok_or(io::ErrorKind::InvalidData)?;
            if is_in_parts && asked["case"] != number {
                return Err(io::ErrorKind::NotFound.into());
            }
            let answer = backend.call(execution).await;
            if is_in_parts && answer.is_err() {
                let aborts = line(&json!({ "aborts": true }));
                return Ok(Response::new(Parts { first: Some(aborts), rest: None }));
            }
            let (parts, body) = answer?.into_parts();
            let mut response = json!({
                "status": parts.status.as_u16(),
                "fields": write_fields(&parts.headers),
            });
            let body = if is_in_parts {
                response["length"] = body.size_hint().exact().into();
                Parts { first: Some(line(&response)), rest: Some(body) }
            } else {
                response["body"] = hex(&body.collect().await?.to_bytes()).into();
                Parts { first: Some(response.to_string().into()), rest: None }
            };
            Ok(Response::new(body))
        })
    }
}

/// A response for a service: all of it, or its head and its parts.
struct Parts {
    first: Option<Bytes>,
    rest: Option<ScriptedBody>,
}

impl Body for Parts {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        let Some(rest) = &mut self.rest else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(rest).poll_frame(cx));
        Poll::Ready(Some(match frame {
            Some(Err(_)) => {
                self.rest = None;
                Ok(Frame::data(line(&json!({ "breaks": true }))))
            }
            Some(Ok(frame)) => Ok(Frame::data(match frame.into_data() {
                Ok(data) => line(&json!({ "data": hex(&data) })),
                Err(frame) => {
                    let trailers = frame.into_trailers().unwrap_or_default();
                    line(&json!({ "trailers": write_fields(&trailers) }))
                }
            })),
            None => {
                self.rest = None;
                Ok(Frame::data(line(&json!({ "end": true }))))
            }
        }))
    }
}

fn line(value: &Value) -> Bytes {
    format!("{value}\n").into()
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
