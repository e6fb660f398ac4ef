//! A deployment of Oncegate, its store, and the service behind it.

use std::net::SocketAddr;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use oncegate_cache::{Cache, CacheOptions, CachedStore};
use oncegate_core::{
    Command, ListQuery, MemoryStore, Outcome, Record, RecordId, Resolution, Resolve, Store, StoredResponse,
    SystemClock,
};
use oncegate_embedded::{EmbeddedOptions, EmbeddedStore};
use oncegate_engine::Engine;
use oncegate_postgres::{PostgresOptions, PostgresStore};
use oncegate_redis::{RedisOptions, RedisStore};
use oncegate_testkit::{Faults, FaultyStore, until};
use serde_json::{Value, json};
use tempfile::TempDir;
use tower_layer::Layer;

use crate::backend::{Backend, HttpServer, PROBE};
use crate::client::{Connection, Request, Response, ResponseError};
use crate::databases::{CACHE_TIMEOUT, TestDatabase};
use crate::faulty_wire::FaultyWire;
use crate::framework::{CaseServer, Framework};
use crate::library::{Library, LibraryService};
use crate::plan::Plan;
use crate::sidecar::Sidecar;

/// A way to deploy Oncegate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Deployment {
    /// The Tower layer around a service in this process.
    Layer,
    /// `oncegate proxy`, in its own process.
    Sidecar,
    /// Two sidecars on one store; requests go to them in turn.
    TwoSidecars,
    /// A sidecar of a service on this framework.
    SidecarOf(Framework),
    /// A service with this library, in its own process.
    Library(Library),
}

impl Deployment {
    /// Every deployment.
    pub const ALL: [Self; 8] = [
        Self::Layer,
        Self::Sidecar,
        Self::TwoSidecars,
        Self::SidecarOf(Framework::FastApi),
        Self::SidecarOf(Framework::Express),
        Self::Library(Library::Node),
        Self::Library(Library::Python),
        Self::Library(Library::Go),
    ];

    /// The name in the names of tests.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Layer => "layer",
            Self::Sidecar => "sidecar",
            Self::TwoSidecars => "two-sidecars",
            Self::SidecarOf(framework) => framework.name(),
            Self::Library(library) => library.name(),
        }
    }
}

/// A kind of store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoreKind {
    /// In memory.
    Memory,
    /// In a directory.
    Embedded,
    /// On one Redis server.
    Redis,
    /// On a Redis Cluster.
    RedisCluster,
    /// In PostgreSQL.
    Postgres,
    /// In PostgreSQL, with Redis as a cache of responses.
    Cached,
}

impl StoreKind {
    /// Every kind.
    pub const ALL: [Self; 6] =
        [Self::Memory, Self::Embedded, Self::Redis, Self::RedisCluster, Self::Postgres, Self::Cached];

    /// The kinds that only one process can open.
    pub const OF_ONE_PROCESS: [Self; 2] = [Self::Memory, Self::Embedded];

    /// `true` if several processes can open the store.
    #[must_use]
    pub fn is_shared(self) -> bool {
        !Self::OF_ONE_PROCESS.contains(&self)
    }

    /// The name in the names of tests.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Embedded => "embedded",
            Self::Redis => "redis",
            Self::RedisCluster => "redis-cluster",
            Self::Postgres => "postgres",
            Self::Cached => "cached",
        }
    }
}

/// The decision of an operator about an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperatorDecision {
    /// It happened, and its response is [`RESOLVED`] with status 202.
    Happened,
    /// It happened, and its response is unknown.
    HappenedWithoutResponse,
    /// It did not happen.
    DidNotHappen,
    /// The key is released, although the owner may be alive.
    ForceRelease,
    /// The outcome is unknown again.
    Park,
    /// It happened; this amends an earlier decision.
    AmendedToHappened,
    /// It did not happen; this amends an earlier decision.
    AmendedToDidNotHappen,
}

/// The response that an operator gives.
pub const RESOLVED: &str = "what the ledger says";

/// The environment of one case. Everything that it started ends when it is dropped.
pub struct World {
    /// The deployment.
    pub deployment: Deployment,
    /// The settings of the case.
    pub plan: Plan,
    /// The service behind the deployment.
    pub backend: Backend,
    /// Faults of the store. The layer's store can have them, and that of a library [on demand](Self::with_faults).
    pub faults: Faults,
    store: Option<Arc<dyn Store>>,
    embedded: Option<Arc<EmbeddedStore>>,
    instance: Option<Instance>,
    upstream: Option<HttpServer>,
    case_server: Option<CaseServer>,
    dir: TempDir,
    database: Arc<TestDatabase>,
    /// A service with a library has a process of its own, so that it can be killed.
    has_own_process: bool,
    /// The store of a service with a library can have [faults](Self::faults).
    has_faults: bool,
    wire: Option<FaultyWire>,
    turn: AtomicUsize,
}

enum Instance {
    Layer { server: HttpServer, engine: Engine },
    Sidecar(Box<Sidecar>),
    TwoSidecars(Box<[Sidecar; 2]>),
    Library(LibraryService),
}

/// A second instance. It ends when this is dropped.
pub struct SecondInstance {
    /// The address on which it listens.
    pub address: SocketAddr,
    _running: Running,
}

enum Running {
    Layer(HttpServer),
    Sidecar(Box<Sidecar>),
    Library(LibraryService),
}

/// Opens the store at this URL. Its time-outs are longer than the defaults, for busy machines.
pub(crate) async fn open_shared(url: &str) -> Arc<dyn Store> {
    if let Some(tiers) = url.strip_prefix("cached(cache=") {
        // The format of `TestDatabase::url`.
        let (cache, rest) = tiers.split_once(",store=").expect("a store");
        let (store, _) = rest.split_once(",timeout=").expect("a timeout");
        let (cache, store) = (open_one(cache).await, open_one(store).await);
        let options = CacheOptions::new().with_timeout(Duration::from_secs(CACHE_TIMEOUT)).unwrap();
        return Arc::new(CachedStore::new(Cache::on(cache), store, options));
    }
    open_one(url).await
}

async fn open_one(url: &str) -> Arc<dyn Store> {
    if RedisOptions::is_url(url) {
        let options = RedisOptions::from_url(url).expect("a URL of Redis");
        return Arc::new(RedisStore::open(options).await.expect("a store on Redis"));
    }
    let options = PostgresOptions::from_url(url).expect("a URL of PostgreSQL");
    let long = Duration::from_secs(15);
    let options = options
        .with_pool_size(4)
        .unwrap()
        .with_connect_timeout(long)
        .unwrap()
        .with_command_timeout(long)
        .unwrap();
    Arc::new(PostgresStore::open(options).await.expect("a store in PostgreSQL"))
}

impl World {
    /// Creates the environment. The deployment is not started.
    #[must_use]
    pub fn new(deployment: Deployment, database: Arc<TestDatabase>, plan: Plan) -> Self {
        let backend = Backend::default();
        backend.set_reconcile_reply(plan.reconcile);
        Self {
            deployment,
            plan,
            backend,
            faults: Faults::default(),
            store: None,
            embedded: None,
            instance: None,
            upstream: None,
            case_server: None,
            dir: TempDir::with_prefix("oncegate-cases-").expect("a temporary directory"),
            database,
            has_own_process: false,
            has_faults: false,
            wire: None,
            turn: AtomicUsize::new(0),
        }
    }

    /// Starts the deployment on the present content of the store.
    pub async fn start(&mut self) {
        assert!(self.instance.is_none(), "the deployment runs");
        self.instance = Some(match self.deployment {
            Deployment::Layer => {
                let (store, faults) = FaultyStore::new({
                    let store = self.open_store().await;
                    self.plan.sealed(store)
                });
                let store: Arc<dyn Store> = Arc::new(store);
                self.faults = faults;
                let engine = Engine::new(store);
                Instance::Layer { server: self.serve_layer(&self.plan, &engine).await, engine }
            }
            Deployment::Sidecar | Deployment::SidecarOf(_) => {
                let upstream = self.serve_backend().await;
                Instance::Sidecar(Box::new(self.start_sidecar(&self.plan, upstream).await))
            }
            Deployment::TwoSidecars => {
                let upstream = self.serve_backend().await;
                let first = self.start_sidecar(&self.plan, upstream).await;
                let second = self.start_sidecar(&self.plan, upstream).await;
                Instance::TwoSidecars(Box::new([first, second]))
            }
            Deployment::Library(library) => {
                self.serve_case().await;
                let backend = self.case_backend();
                let (kind, url) = (self.database.kind(), self.database.url());
                if let (true, None, Some(url)) = (self.has_faults, &self.wire, &url) {
                    self.wire = Some(FaultyWire::start(kind, url, self.faults.clone()).await);
                }
                let url = self.wire.as_ref().map(|wire| wire.url.clone()).or(url);
                Instance::Library(library.open(&self.plan, (kind, url), backend, self.has_own_process).await)
            }
        });
    }

    /// Gives a service with a library a process of its own, which can be killed and suspended.
    #[must_use]
    pub fn with_own_process(mut self) -> Self {
        self.has_own_process = true;
        self
    }

    /// Lets the store of a service with a library have faults.
    #[must_use]
    pub fn with_faults(mut self) -> Self {
        self.has_faults = true;
        self
    }

    /// Opens a service with a library on the store of this environment, without faults.
    pub(crate) async fn open_library(
        &self,
        library: Library,
        plan: &Plan,
        has_own_process: bool,
    ) -> LibraryService {
        let store = (self.database.kind(), self.database.url());
        library.open(plan, store, self.case_backend(), has_own_process).await
    }

    fn case_backend(&self) -> (SocketAddr, u64) {
        self.case_server.as_ref().expect("a case that is served").backend()
    }

    /// Starts the sidecar in front of another service.
    pub async fn start_in_front_of(&mut self, upstream: SocketAddr) {
        assert_eq!(self.deployment, Deployment::Sidecar);
        self.instance = Some(Instance::Sidecar(Box::new(self.start_sidecar(&self.plan, upstream).await)));
    }

    /// Serves the backend for services in other languages.
    pub(crate) async fn serve_case(&mut self) {
        if self.case_server.is_none() {
            self.case_server = Some(CaseServer::start(self.backend.clone()).await);
        }
    }

    /// Serves the backend on a socket, for other processes, and returns its address.
    pub(crate) async fn serve_backend(&mut self) -> SocketAddr {
        if let Deployment::SidecarOf(framework) = self.deployment {
            self.serve_case().await;
            return framework.address().await;
        }
        if self.upstream.is_none() {
            self.upstream = Some(self.backend.serve().await);
        }
        self.upstream.as_ref().expect("it was set").address
    }

    /// Starts a sidecar on the store of this environment.
    pub(crate) async fn start_sidecar(&self, plan: &Plan, upstream: SocketAddr) -> Sidecar {
        let store = match (self.database.url(), self.database.kind()) {
            (Some(url), _) => url,
            (None, StoreKind::Memory) => "memory:".to_owned(),
            (None, _) => self.dir.path().join("records").display().to_string(),
        };
        Sidecar::start(plan, upstream, &store, self.dir.path()).await
    }

    /// Starts a second instance on the same store.
    ///
    /// For the sidecar it is another process. For the layer it has its own engine, and its own store if two can be open.
    pub async fn second(&self) -> SecondInstance {
        self.second_given(&self.plan).await
    }

    /// Starts a second instance with other settings. See [`Self::second`].
    pub async fn second_given(&self, plan: &Plan) -> SecondInstance {
        let running = match self.deployment {
            Deployment::Layer => {
                let store = match self.database.url() {
                    Some(url) => open_shared(&url).await,
                    None => self.store.clone().expect("an open store"),
                };
                Running::Layer(self.serve_layer(plan, &Engine::new(store)).await)
            }
            Deployment::Sidecar | Deployment::TwoSidecars | Deployment::SidecarOf(_) => {
                let upstream = self.upstream.as_ref().expect("a running deployment").address;
                Running::Sidecar(Box::new(self.start_sidecar(plan, upstream).await))
            }
            Deployment::Library(library) => Running::Library(self.open_library(library, plan, false).await),
        };
        let address = match &running {
            Running::Layer(server) => server.address,
            Running::Sidecar(sidecar) => sidecar.address,
            Running::Library(service) => service.address,
        };
        SecondInstance { address, _running: running }
    }

    /// The URL of the store, if several processes can open it.
    pub(crate) fn store_url(&self) -> Option<String> {
        self.database.url()
    }

    async fn serve_layer(&self, plan: &Plan, engine: &Engine) -> HttpServer {
        HttpServer::start(plan.layer(engine.clone()).layer(self.backend.clone())).await
    }

    /// Opens the store, for other users than the deployment.
    pub async fn open_store(&mut self) -> Arc<dyn Store> {
        if let Some(store) = &self.store {
            return store.clone();
        }
        let store: Arc<dyn Store> = match (self.database.url(), self.database.kind()) {
            (Some(url), _) => open_shared(&url).await,
            (None, StoreKind::Memory) => Arc::new(MemoryStore::new(SystemClock::new())),
            (None, _) => {
                let options = EmbeddedOptions::new(self.dir.path().join("records"));
                let embedded = Arc::new(EmbeddedStore::open(options).expect("a store that can be opened"));
                self.embedded = Some(embedded.clone());
                embedded
            }
        };
        self.store = Some(store.clone());
        store
    }

    /// Suspends the process of the deployment.
    pub fn stop_process(&mut self) {
        match &self.instance {
            Some(Instance::Library(service)) => service.stop(),
            _ => self.sidecar().stop(),
        }
    }

    /// Resumes the process of the deployment.
    pub fn resume_process(&mut self) {
        match &self.instance {
            Some(Instance::Library(service)) => service.resume(),
            _ => self.sidecar().resume(),
        }
    }

    /// Asks the process of the deployment to end.
    pub fn terminate_process(&mut self) {
        match &self.instance {
            Some(Instance::Library(service)) => service.terminate(),
            _ => self.sidecar().terminate(),
        }
    }

    /// The exit status of the process of the deployment, if it ended.
    pub fn process_exited(&mut self) -> Option<ExitStatus> {
        match &self.instance {
            Some(Instance::Library(service)) => service.exited(),
            _ => self.sidecar().exited(),
        }
    }

    /// The output of the process of the deployment so far.
    #[must_use]
    pub fn process_output(&mut self) -> String {
        match &self.instance {
            Some(Instance::Library(service)) => service.printed(),
            _ => self.sidecar().printed(),
        }
    }

    /// The running sidecar.
    #[must_use]
    pub fn sidecar(&mut self) -> &mut Sidecar {
        match &mut self.instance {
            Some(Instance::Sidecar(sidecar)) => sidecar,
            _ => panic!("there is no sidecar"),
        }
    }

    /// Ends the deployment: kills the sidecar, or drops the layer and its store.
    pub async fn end(&mut self) {
        match self.instance.take() {
            Some(Instance::Sidecar(mut sidecar)) => sidecar.kill(),
            Some(Instance::TwoSidecars(mut both)) => both.iter_mut().for_each(Sidecar::kill),
            Some(Instance::Library(service)) if self.has_own_process => service.kill(),
            Some(Instance::Library(service)) => drop(service),
            Some(Instance::Layer { server, engine }) => {
                drop(server);
                engine.drain(Duration::from_secs(5)).await;
                drop(engine);
                self.store = None;
                if let Some(embedded) = self.embedded.take() {
                    // Closing frees the directory even if a reference to the store is left.
                    tokio::task::spawn_blocking(move || embedded.close()).await.expect("a closed store");
                }
            }
            None => {}
        }
    }

    /// Removes all records. The deployment must not run.
    pub async fn forget(&mut self) {
        assert!(self.instance.is_none(), "the deployment runs");
        self.store = None;
        let _ = std::fs::remove_dir_all(self.dir.path().join("records"));
        let database = self.database.clone();
        tokio::task::spawn_blocking(move || database.clear()).await.expect("an empty database");
    }

    /// The address of the deployment. Two sidecars are used in turn.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        match self.instance.as_ref().expect("a running deployment") {
            Instance::Layer { server, .. } => server.address,
            Instance::Sidecar(sidecar) => sidecar.address,
            Instance::TwoSidecars(both) => both[self.turn.fetch_add(1, Ordering::Relaxed) % 2].address,
            Instance::Library(service) => service.address,
        }
    }

    /// Opens the store of several processes for an operator.
    pub(crate) async fn open_operators_store(&self) -> Arc<dyn Store> {
        open_shared(&self.database.url().expect("a store of several processes")).await
    }

    /// The store that an operator uses directly, if the deployment has no admin address.
    async fn operators_store(&self) -> Option<Arc<dyn Store>> {
        match &self.instance {
            Some(Instance::Layer { engine, .. }) => Some(engine.store().clone()),
            Some(Instance::Library(_)) => Some(self.open_operators_store().await),
            _ => None,
        }
    }

    /// The identifier and the name of the state of every record, as an operator sees them.
    pub async fn records(&self) -> Vec<(String, String)> {
        if let Some(store) = self.operators_store().await {
            let page = store.list(ListQuery::default()).await.expect("a list");
            let now = store.now();
            let show = |(id, record): (RecordId, Record)| {
                (id.to_string(), record.state_name(now).as_str().to_owned())
            };
            return page.records.into_iter().map(show).collect();
        }
        let page = self.admin(Request::new("GET", "/v1/keys")).await;
        assert_eq!(page.status(), 200, "{page:?}");
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let records = page.json()["records"].as_array().expect("records").clone();
        records.iter().map(|record| (text(&record["record"]), text(&record["state"]))).collect()
    }

    /// Submits the decision of an operator about an operation. Returns `true` if it was accepted.
    pub async fn resolve(&self, record: &str, verdict: OperatorDecision) -> bool {
        if let Some(store) = self.operators_store().await {
            let fields = [("content-type", &b"text/plain"[..])];
            let response =
                StoredResponse::new(202, &fields, &[RESOLVED.into()], &[]).expect("a small response");
            let command = Command::Resolve(Resolve {
                resolution: match verdict {
                    OperatorDecision::Happened | OperatorDecision::AmendedToHappened => {
                        Resolution::Complete(Some(response))
                    }
                    OperatorDecision::HappenedWithoutResponse => Resolution::Complete(None),
                    OperatorDecision::DidNotHappen
                    | OperatorDecision::ForceRelease
                    | OperatorDecision::AmendedToDidNotHappen => Resolution::Release,
                    OperatorDecision::Park => Resolution::Park,
                },
                retention: self.plan.settings().policy().retention(),
                force: verdict == OperatorDecision::ForceRelease,
                amend: matches!(
                    verdict,
                    OperatorDecision::AmendedToHappened | OperatorDecision::AmendedToDidNotHappen
                ),
                actor: "cases".to_owned(),
                reason: "in the ledger".to_owned(),
            });
            let id = RecordId::from_hex(record).expect("an identifier");
            let outcome = store.apply(id, command).await.expect("an outcome");
            return matches!(outcome, Outcome::Resolved { .. });
        }
        let (path, body) = match verdict {
            OperatorDecision::Happened | OperatorDecision::AmendedToHappened => {
                let fields = json!({ "Content-Type": "text/plain" });
                (
                    "resolve",
                    json!({ "outcome": "completed", "status": 202, "headers": fields, "body": RESOLVED }),
                )
            }
            OperatorDecision::HappenedWithoutResponse => {
                ("resolve", json!({ "outcome": "completed", "tombstone": true }))
            }
            OperatorDecision::DidNotHappen | OperatorDecision::AmendedToDidNotHappen => {
                ("resolve", json!({ "outcome": "released" }))
            }
            OperatorDecision::Park => ("park", json!({})),
            OperatorDecision::ForceRelease => ("release", json!({ "force": true })),
        };
        let mut body = body;
        if matches!(verdict, OperatorDecision::AmendedToHappened | OperatorDecision::AmendedToDidNotHappen) {
            body["amend"] = true.into();
        }
        body["reason"] = "in the ledger".into();
        body["actor"] = "cases".into();
        let request = Request::post(&format!("/v1/keys/{record}/{path}")).json(body.to_string());
        let response = self.admin(request).await;
        assert!([200, 204, 404, 409, 422].contains(&response.status()), "{response:?}");
        response.status() < 300
    }

    /// The newest entry of the audit trail: state before, state after, actor, reason.
    pub async fn last_audit(&self) -> Option<[String; 4]> {
        if let Some(store) = self.operators_store().await {
            let entry = store.audit(None, 1).await.expect("a trail").into_iter().next()?;
            let (from, to) = (entry.from.as_str().to_owned(), entry.to.as_str().to_owned());
            return Some([from, to, entry.actor, entry.reason]);
        }
        let trail = self.admin(Request::new("GET", "/v1/audit?limit=1")).await.json();
        let entry = trail["entries"].get(0)?;
        Some(["from", "to", "actor", "reason"].map(|name| entry[name].as_str().expect("a text").to_owned()))
    }

    /// Sends a request to the admin address of the sidecar.
    pub async fn admin(&self, request: Request) -> Response {
        let Some(Instance::Sidecar(sidecar)) = &self.instance else { panic!("there is no sidecar") };
        let response = Connection::open(sidecar.admin).await.exchange(&request.host("127.0.0.1")).await;
        response.unwrap_or_else(|broken| panic!("no response: {broken:?}"))
    }

    /// Opens a connection to the deployment.
    pub async fn connect(&self) -> Connection {
        Connection::open(self.address()).await
    }

    /// Adds the script of a request, as an order for the backend.
    #[must_use]
    pub fn ready(&self, mut request: Request) -> Request {
        if let Some(script) = request.script.take() {
            request.fields.push(self.backend.order(script));
        }
        if let Deployment::SidecarOf(_) = self.deployment {
            request.fields.extend(self.case_server.as_ref().map(CaseServer::field));
        }
        request
    }

    /// Sends a request on a new connection and returns its response.
    ///
    /// # Panics
    /// If there is no response.
    pub async fn send(&self, request: Request) -> Response {
        self.try_send(request).await.unwrap_or_else(|broken| panic!("no response: {broken:?}"))
    }

    /// Sends a request on a new connection.
    pub async fn try_send(&self, request: Request) -> Result<Response, ResponseError> {
        self.connect().await.exchange(&self.ready(request)).await
    }

    /// Takes the store away until [`Self::heal`]: no connection to it can be made.
    pub async fn store_goes_away(&self) {
        self.faults.outage();
        if let Some(wire) = &self.wire {
            wire.until_refused().await;
        }
    }

    /// Ends the faults of the store, and waits until the deployment uses the store again: a library leaves a store that failed
    /// alone for a moment.
    pub async fn heal(&self) {
        self.faults.heal();
        if !self.leaves_the_store_alone() {
            return;
        }
        let mut looks = 0;
        until("the store is used again", async || {
            looks += 1;
            let look = Request::post(PROBE).key(format!("look-{looks}"));
            let response = self.send(look).await;
            response.status() == 200 && response.get("idempotency-status").is_none()
        })
        .await;
    }

    /// `true` if the deployment sends nothing to a store for a moment after several failures, so that requests are refused
    /// with `store-unavailable`.
    #[must_use]
    pub fn leaves_the_store_alone(&self) -> bool {
        matches!(self.deployment, Deployment::Library(_))
    }

    /// Sends a request in the background.
    #[must_use]
    pub fn start_send(&self, request: Request) -> tokio::task::JoinHandle<Result<Response, ResponseError>> {
        let (address, request, backend) = (self.address(), self.ready(request), self.backend.clone());
        tokio::spawn(async move {
            let answer = Connection::open(address).await.exchange(&request).await;
            backend.note_answer(format!("{answer:?}"));
            answer
        })
    }

    /// Sends the request again and again until it is no longer in progress. A library whose store has failed may refuse it
    /// until it knows the outcome.
    pub async fn settled(&self, request: &Request) -> Response {
        let mut last = None;
        until("the request is no longer in progress", async || {
            let response = self.send(request.clone()).await;
            let knows_no_outcome =
                self.has_faults && self.leaves_the_store_alone() && response.status() == 503;
            let in_progress = response.status() == 409 || knows_no_outcome;
            last = Some(response);
            !in_progress
        })
        .await;
        last.expect("a response")
    }
}
