//! One store for several processes: it is served on a loopback socket, and each process has a [`Store`] that calls it.
//!
//! It lets two engines in two processes, one of which may be stopped or killed, share a store that only one process can
//! open.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::pin::Pin;
use std::process::{Command as Program, Stdio};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use oncegate_core::{
    AttemptId, AuditEntry, CallerTag, Capabilities, Claim, Clock, Command, Complete, Completion, Durability,
    ErrorChain, Fencing, FencingToken, Fingerprint, Grant, Label, ListPage, ListQuery, OnAbandoned, Outcome,
    Record, RecordId, Release, Renew, ServiceName, Store, StoreError, StoreErrorKind, StoreFuture,
    StoredResponse, SystemClock, Timestamp, codec,
};
use oncegate_engine::Engine;
use oncegate_http::{IdempotencyContext, RequestBody};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower_layer::Layer;
use tower_service::Service;

use crate::backend::HttpServer;
use crate::client::{Connection, Request as Outgoing, within};
use crate::plan::Plan;
use crate::sidecar::signal_child;
use crate::world::open_shared;

/// Set in the environment of this program, it makes it a child that serves: an object with the address or URL of the
/// store, the backend's address, and settings.
pub const CHILD: &str = "ONCEGATE_CASES_CHILD";

/// A store on a loopback socket, for as long as this lives.
pub(crate) struct StoreServer {
    pub(crate) address: SocketAddr,
    accepting: tokio::task::JoinHandle<()>,
}

impl StoreServer {
    pub(crate) async fn start(store: Arc<dyn Store>) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let accepting = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let store = store.clone();
                tokio::spawn(async move {
                    let Some(asked) = receive(&mut stream).await else { return };
                    if asked[1][0] == "lookup" {
                        return send(&mut stream, &look_up(&*store, &asked).await).await;
                    }
                    let Some((id, command)) = read_asked(&asked) else { return };
                    // The caller may have left by now; its command is executed anyway.
                    let reply = store.apply(id, command).await;
                    send(&mut stream, &write_reply(&reply)).await;
                });
            }
        });
        Self { address, accepting }
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// A store in another process.
struct RemoteStore {
    address: SocketAddr,
}

impl RemoteStore {
    async fn ask(&self, asked: Value) -> Result<Value, StoreError> {
        let reply = tokio::time::timeout(Duration::from_secs(5), async {
            let mut stream = TcpStream::connect(self.address).await.ok()?;
            send(&mut stream, &asked).await;
            receive(&mut stream).await
        });
        let away = || StoreError::unavailable("the store's process is away");
        reply.await.ok().flatten().ok_or_else(away)
    }
}

/// The record that is asked for, or null.
async fn look_up(store: &dyn Store, asked: &Value) -> Value {
    let Some(id) = asked[0].as_str().and_then(RecordId::from_hex) else { return json!(["no record"]) };
    match store.lookup(id).await {
        Ok(record) => json!([record.map(|record| hex(&codec::encode(&id, &record)))]),
        Err(_) => json!(["no record"]),
    }
}

impl Store for RemoteStore {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        Box::pin(async move { read_reply(&self.ask(write_asked(&id, &command)).await?) })
    }

    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        Box::pin(async move {
            let reply = self.ask(json!([id.to_string(), ["lookup"]])).await?;
            let broken = || StoreError::unavailable(format!("no record: {reply}"));
            match &reply[0] {
                Value::Null => Ok(None),
                record => {
                    let bytes = record.as_str().and_then(unhex).ok_or_else(broken)?;
                    codec::decode(&id, &bytes).map(Some).map_err(|_| broken())
                }
            }
        })
    }

    fn list(&self, _: ListQuery) -> StoreFuture<'_, ListPage> {
        not_served()
    }

    fn purge(&self, _: usize) -> StoreFuture<'_, usize> {
        Box::pin(async { Ok(0) })
    }

    fn audit(&self, _: Option<u64>, _: usize) -> StoreFuture<'_, Vec<AuditEntry>> {
        not_served()
    }

    fn check(&self) -> StoreFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    fn now(&self) -> Timestamp {
        SystemClock::new().now()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new("remote", Durability::Volatile, Fencing::Monotonic)
    }
}

fn not_served<T: Send + 'static>() -> StoreFuture<'static, T> {
    Box::pin(async { Err(StoreError::invalid("not served to other processes")) })
}

async fn send(stream: &mut TcpStream, message: &Value) {
    let text = message.to_string();
    let length = u32::try_from(text.len()).expect("a message that fits");
    let _ = stream.write_all(&[&length.to_be_bytes(), text.as_bytes()].concat()).await;
}

async fn receive(stream: &mut TcpStream) -> Option<Value> {
    let length = stream.read_u32().await.ok()?;
    let mut text = vec![0; length as usize];
    stream.read_exact(&mut text).await.ok()?;
    serde_json::from_slice(&text).ok()
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn unhex(text: &str) -> Option<Vec<u8>> {
    text.as_bytes().chunks(2).map(|two| u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok()).collect()
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).expect("a duration that fits")
}

fn write_asked(id: &RecordId, command: &Command) -> Value {
    let command = match command {
        Command::Claim(claim) => json!(["claim", {
            "attempt": claim.attempt.get().to_string(),
            "version": claim.fingerprint.version(),
            "digest": hex(claim.fingerprint.digest()),
            "lease": millis(claim.lease),
            "retention": millis(claim.retention),
            "reexecute": claim.on_abandoned == OnAbandoned::Reexecute,
            "caller": hex(claim.label.caller().as_bytes()),
            "operation": claim.label.operation(),
        }]),
        Command::Renew(renew) => json!(["renew", {
            "token": renew.token.get(), "lease": millis(renew.lease), "retention": millis(renew.retention),
        }]),
        Command::Complete(complete) => json!(["complete", {
            "token": complete.token.get(),
            "retention": millis(complete.retention),
            "as": match &complete.completion {
                Completion::Replayable(response) => json!({ "response": hex(response.as_encoded()) }),
                Completion::Tombstone => json!("tombstone"),
                Completion::Unknown => json!("unknown"),
                other => panic!("not sent to other processes: {other:?}"),
            },
        }]),
        Command::Release(release) => {
            json!(["release", { "token": release.token.get(), "retention": millis(release.retention) }])
        }
        other => panic!("not sent to other processes: {other:?}"),
    };
    json!([id.to_string(), command])
}

fn read_asked(asked: &Value) -> Option<(RecordId, Command)> {
    let id = RecordId::from_hex(asked[0].as_str()?)?;
    let (name, fields) = (asked[1][0].as_str()?, &asked[1][1]);
    let time = |name: &str| fields[name].as_u64().map(Duration::from_millis);
    let token = || fields["token"].as_u64().map(FencingToken::new);
    let bytes = |value: &Value| unhex(value.as_str()?);
    let command = match name {
        "claim" => {
            let digest = bytes(&fields["digest"])?.try_into().ok()?;
            let caller = CallerTag::from_bytes(bytes(&fields["caller"])?.try_into().ok()?);
            Command::Claim(Claim {
                attempt: AttemptId::new(fields["attempt"].as_str()?.parse().ok()?),
                fingerprint: Fingerprint::from_parts(
                    u8::try_from(fields["version"].as_u64()?).ok()?,
                    digest,
                )?,
                lease: time("lease")?,
                retention: time("retention")?,
                on_abandoned: if fields["reexecute"] == true {
                    OnAbandoned::Reexecute
                } else {
                    OnAbandoned::Park
                },
                label: Label::new(caller, fields["operation"].as_str()?),
            })
        }
        "renew" => {
            Command::Renew(Renew { token: token()?, lease: time("lease")?, retention: time("retention")? })
        }
        "complete" => {
            let completion = match &fields["as"] {
                Value::String(name) if name == "tombstone" => Completion::Tombstone,
                Value::String(_) => Completion::Unknown,
                other => Completion::Replayable(StoredResponse::decode(bytes(&other["response"])?.into())?),
            };
            Command::Complete(Complete { token: token()?, completion, retention: time("retention")? })
        }
        "release" => Command::Release(Release { token: token()?, retention: time("retention")? }),
        _ => return None,
    };
    Some((id, command))
}

fn write_reply(reply: &Result<Outcome, StoreError>) -> Value {
    match reply {
        Ok(Outcome::Execute(grant)) => json!(["execute", {
            "token": grant.token.get(),
            "attempts": grant.attempts,
            "lease_until": grant.lease_until.as_millis(),
            "after_abandoned": grant.after_abandoned,
        }]),
        Ok(Outcome::Replay(response)) => json!(["replay", hex(response.as_encoded())]),
        Ok(Outcome::InProgress { lease_left }) => json!(["in progress", millis(*lease_left)]),
        Ok(Outcome::Renewed { lease_until }) => json!(["renewed", lease_until.as_millis()]),
        Ok(other) => json!([format!("{other:?}")]),
        Err(error) => {
            json!(["error", error.kind() == StoreErrorKind::Corrupt, ErrorChain(&error).to_string()])
        }
    }
}

fn read_reply(reply: &Value) -> Result<Outcome, StoreError> {
    let broken = || StoreError::unavailable(format!("no reply: {reply}"));
    let number = |value: &Value| value.as_u64().ok_or_else(broken);
    let detail = &reply[1];
    Ok(match reply[0].as_str().ok_or_else(broken)? {
        "execute" => Outcome::Execute(Grant {
            token: FencingToken::new(number(&detail["token"])?),
            attempts: u32::try_from(number(&detail["attempts"])?).map_err(|_| broken())?,
            lease_until: Timestamp::from_millis(number(&detail["lease_until"])?),
            after_abandoned: detail["after_abandoned"] == true,
        }),
        "replay" => {
            let bytes = detail.as_str().and_then(unhex).ok_or_else(broken)?;
            Outcome::Replay(StoredResponse::decode(bytes.into()).ok_or_else(broken)?)
        }
        "in progress" => Outcome::InProgress { lease_left: Duration::from_millis(number(detail)?) },
        "renewed" => Outcome::Renewed { lease_until: Timestamp::from_millis(number(detail)?) },
        "Mismatch" => Outcome::Mismatch,
        "Unknown" => Outcome::Unknown,
        "Unreplayable" => Outcome::Unreplayable,
        "Completed" => Outcome::Completed,
        "Released" => Outcome::Released,
        "Fenced" => Outcome::Fenced,
        "error" if detail == true => return Err(StoreError::corrupt(reply[2].to_string())),
        _ => return Err(broken()),
    })
}

/// A process of this program that serves the layer on a shared store. It is killed when this is dropped.
pub(crate) struct LayerProcess {
    pub(crate) address: SocketAddr,
    child: std::process::Child,
}

impl LayerProcess {
    pub(crate) async fn start(plan: &Plan, store: &str, backend: SocketAddr) -> Self {
        let orders = json!({
            "store": store,
            "backend": backend.to_string(),
            "lease": plan.lease.map_or(30_000, millis),
            "wait": plan.wait.map_or(0, millis),
            "reexecute": plan.on_abandoned == Some(OnAbandoned::Reexecute),
            "methods": plan.methods.as_ref().map(|all| all.iter().map(Method::as_str).collect::<Vec<_>>()),
            "seals": plan.seals,
        });
        let mut child = Program::new(std::env::current_exe().expect("the path of this program"))
            .env(CHILD, orders.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program can be started");
        let stdout = child.stdout.take().expect("a pipe");
        let reading = tokio::task::spawn_blocking(move || {
            let mut line = String::new();
            BufReader::new(stdout).read_line(&mut line).map(|_| line)
        });
        let line = within(reading).await.expect("a line in time").expect("a thread").expect("a line");
        let address = line.trim().parse().unwrap_or_else(|_| panic!("no address: {line:?}"));
        Self { address, child }
    }

    pub(crate) fn stop(&self) {
        oncegate_servers::freeze(self.child.id()).expect("it stands still");
    }

    pub(crate) fn resume(&self) {
        signal_child(&self.child, Signal::CONT);
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for LayerProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The main function of a child process.
pub fn child_main() {
    let orders: Value = serde_json::from_str(&std::env::var(CHILD).expect("orders")).expect("orders in JSON");
    let text = |name: &str| orders[name].as_str().expect("a text").to_owned();
    let time = |name: &str| Some(Duration::from_millis(orders[name].as_u64().expect("milliseconds")));
    let method = |name: &Value| name.as_str().and_then(|name| name.parse().ok()).expect("a method");
    let (store, backend) = (text("store"), text("backend").parse().expect("an address"));
    let plan = Plan {
        lease: time("lease"),
        wait: time("wait"),
        on_abandoned: Some(if orders["reexecute"] == true {
            OnAbandoned::Reexecute
        } else {
            OnAbandoned::Park
        }),
        methods: orders["methods"].as_array().map(|all| all.iter().map(method).collect()),
        seals: orders["seals"] == true,
        ..Plan::default()
    };
    // The pipe ends with the parent, and so does this process.
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let store: Arc<dyn Store> = match store.parse() {
            Ok(address) => Arc::new(RemoteStore { address }),
            Err(_) => open_shared(&store).await,
        };
        // The service of the other deployments, with which it shares keys.
        let service = ServiceName::new("cases").expect("a name");
        let engine = Engine::builder(plan.sealed(store)).with_service(service).build();
        let server = HttpServer::start(plan.layer(engine).layer(Forward { backend })).await;
        println!("{}", server.address);
        std::future::pending::<()>().await;
    });
}

/// Forwards requests to the backend in the parent, with the attempt from the layer.
#[derive(Clone)]
struct Forward {
    backend: SocketAddr,
}

impl<B> Service<Request<RequestBody<B>>> for Forward
where
    RequestBody<B>: http_body::Body<Data: Send, Error: std::fmt::Debug> + Send + 'static,
{
    type Response = Response<Full<Bytes>>;
    type Error = std::io::Error;
    type Future = Pin<Box<dyn Future<Output = std::io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody<B>>) -> Self::Future {
        let backend = self.backend;
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let body = body.collect().await.map_err(|_| std::io::Error::other("no body"))?.to_bytes();
            let target = parts.uri.path_and_query().map_or("/", |target| target.as_str());
            let mut outgoing = Outgoing::new(parts.method.as_str(), target);
            for (name, value) in &parts.headers {
                if !["host", "content-length", "transfer-encoding", "content-type"].contains(&name.as_str()) {
                    outgoing = outgoing.field(name, value);
                }
            }
            if let Some(context) = IdempotencyContext::from_extensions(&parts.extensions) {
                let attempt = context.attempt();
                outgoing = outgoing
                    .field("oncegate-token", attempt.token().get().to_string())
                    .field("oncegate-attempt", attempt.number().to_string());
            }
            let media =
                parts.headers.get("content-type").and_then(|value| value.to_str().ok()).unwrap_or_default();
            let reply = Connection::open(backend).await.exchange(&outgoing.body(media, body)).await;
            let reply = reply.map_err(|broken| std::io::Error::other(format!("{broken:?}")))?;
            let mut response = Response::new(Full::new(reply.body));
            *response.status_mut() = StatusCode::from_u16(reply.head.status).expect("a status");
            *response.headers_mut() = fields(&reply.head.fields);
            Ok(response)
        })
    }
}

fn fields(lines: &[(String, Vec<u8>)]) -> HeaderMap {
    let line = |(name, value): &(String, Vec<u8>)| {
        Some((HeaderName::from_bytes(name.as_bytes()).ok()?, HeaderValue::from_bytes(value).ok()?))
    };
    lines.iter().filter_map(line).filter(|(name, _)| name != "date" && name != "content-length").collect()
}
