//! A door, a store behind it and the service in front of which it stands.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use oncegate_cache::{Cache, CacheOptions, CachedStore};
use oncegate_core::{
    Clock, Command, ListQuery, MemoryStore, Outcome, Record, RecordId, Resolution, Resolve, Store,
    StoredResponse, Timestamp,
};
use oncegate_embedded::{EmbeddedOptions, EmbeddedStore};
use oncegate_engine::Engine;
use oncegate_postgres::{PostgresOptions, PostgresStore};
use oncegate_redis::{RedisOptions, RedisStore};
use oncegate_testkit::{Faults, FaultyStore};
use serde_json::{Value, json};
use tempfile::TempDir;
use tower_layer::Layer;

use crate::backend::{Backend, Served};
use crate::client::{Answer, Broken, Connection, Request, until};
use crate::places::{CACHE_TIMEOUT, Place};
use crate::plan::Plan;
use crate::sidecar::Sidecar;

/// Where a request enters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Door {
    /// The Tower layer, in front of a service in this process.
    Layer,
    /// `oncegate proxy`, a process of its own.
    Sidecar,
}

impl Door {
    /// Every door.
    pub const ALL: [Self; 2] = [Self::Layer, Self::Sidecar];

    /// Its name in the names of tests.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Layer => "layer",
            Self::Sidecar => "sidecar",
        }
    }
}

/// Where the records are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
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
    /// In PostgreSQL, with Redis in front of it for answers.
    Cached,
}

impl Kind {
    /// Every store.
    pub const ALL: [Self; 6] =
        [Self::Memory, Self::Embedded, Self::Redis, Self::RedisCluster, Self::Postgres, Self::Cached];

    /// Those that only one process can have open.
    pub const OF_ONE_PROCESS: [Self; 2] = [Self::Memory, Self::Embedded];

    /// Whether several processes can have it open.
    #[must_use]
    pub fn is_shared(self) -> bool {
        !Self::OF_ONE_PROCESS.contains(&self)
    }

    /// Its name in the names of tests.
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

/// What an operator says of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It happened, and [`RESOLVED`] under 202 is its answer.
    Happened,
    /// It happened, and there is no answer to give.
    HappenedSomehow,
    /// It did not happen.
    DidNotHappen,
    /// Its key is to be free, though its owner may be alive.
    ForceRelease,
    /// Nobody knows after all.
    Park,
    /// It happened, in place of what an operator said before.
    HappenedAfterAll,
    /// It did not happen, in place of what an operator said before.
    DidNotHappenAfterAll,
}

/// The answer that an operator gives.
pub const RESOLVED: &str = "what the ledger says";

/// What a case runs in. Everything it started ends with it.
pub struct World {
    /// The door.
    pub door: Door,
    /// What was given.
    pub plan: Plan,
    /// The service behind the door.
    pub backend: Backend,
    /// What goes wrong with the store; only the layer's can be told.
    pub faults: Faults,
    store: Option<Arc<dyn Store>>,
    embedded: Option<Arc<EmbeddedStore>>,
    instance: Option<Instance>,
    upstream: Option<Served>,
    dir: TempDir,
    place: Arc<Place>,
}

enum Instance {
    Layer { served: Served, engine: Engine },
    Sidecar(Box<Sidecar>),
}

/// A second instance. It ends when this is dropped.
pub struct Second {
    /// Where it listens.
    pub address: SocketAddr,
    _running: Running,
}

enum Running {
    Layer(Served),
    Sidecar(Box<Sidecar>),
}

/// The store at this URL. Busy machines are given more time than the defaults are.
pub(crate) async fn open_shared(url: &str) -> Arc<dyn Store> {
    if let Some(tiers) = url.strip_prefix("cached(cache=") {
        // As places write it.
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
    let options = PostgresOptions::new(url).expect("a URL of PostgreSQL");
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

/// The clock of this machine.
pub(crate) struct Wall;

impl Clock for Wall {
    fn now(&self) -> Timestamp {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock after 1970");
        Timestamp::from_millis(u64::try_from(since.as_millis()).expect("a clock before the end of time"))
    }
}

impl World {
    /// Opens the door.
    pub async fn open(door: Door, place: Arc<Place>, plan: Plan) -> Self {
        let mut world = Self::closed(door, place, plan);
        world.start().await;
        world
    }

    /// A world whose door is not open yet.
    #[must_use]
    pub fn closed(door: Door, place: Arc<Place>, plan: Plan) -> Self {
        let backend = Backend::default();
        backend.will_say(plan.reconcile);
        Self {
            door,
            plan,
            backend,
            faults: Faults::default(),
            store: None,
            embedded: None,
            instance: None,
            upstream: None,
            dir: TempDir::with_prefix("oncegate-cases-").expect("a temporary directory"),
            place,
        }
    }

    /// Opens the door that is closed, on what the store holds.
    pub async fn start(&mut self) {
        assert!(self.instance.is_none(), "the door is open");
        self.instance = Some(match self.door {
            Door::Layer => {
                let (store, faults) = FaultyStore::new(self.open_store().await);
                let store: Arc<dyn Store> = Arc::new(store);
                self.faults = faults;
                let engine = Engine::new(store);
                Instance::Layer { served: self.serve_layer(&self.plan, &engine).await, engine }
            }
            Door::Sidecar => {
                let upstream = self.serve_backend().await;
                Instance::Sidecar(Box::new(self.start_sidecar(&self.plan, upstream).await))
            }
        });
    }

    /// Opens the sidecar in front of somebody else.
    pub async fn start_in_front_of(&mut self, upstream: SocketAddr) {
        assert_eq!(self.door, Door::Sidecar);
        self.instance = Some(Instance::Sidecar(Box::new(self.start_sidecar(&self.plan, upstream).await)));
    }

    /// Where the backend is served for processes.
    pub(crate) async fn serve_backend(&mut self) -> SocketAddr {
        if self.upstream.is_none() {
            self.upstream = Some(self.backend.serve().await);
        }
        self.upstream.as_ref().expect("it was set").address
    }

    /// A sidecar on the store of this world.
    pub(crate) async fn start_sidecar(&self, plan: &Plan, upstream: SocketAddr) -> Sidecar {
        let store = match (self.place.url(), self.place.kind()) {
            (Some(url), _) => url,
            (None, Kind::Memory) => "memory:".to_owned(),
            (None, _) => self.dir.path().join("records").display().to_string(),
        };
        Sidecar::start(plan, upstream, &store, self.dir.path()).await
    }

    /// A second instance on the same store: in another process at the sidecar; at the layer with an engine of its own, and
    /// with a store of its own where there can be two.
    pub async fn second(&self) -> Second {
        self.second_given(&self.plan).await
    }

    /// As [`Self::second`], with settings of its own.
    pub async fn second_given(&self, plan: &Plan) -> Second {
        let running = match self.door {
            Door::Layer => {
                let store = match self.place.url() {
                    Some(url) => open_shared(&url).await,
                    None => self.store.clone().expect("an open store"),
                };
                Running::Layer(self.serve_layer(plan, &Engine::new(store)).await)
            }
            Door::Sidecar => {
                let upstream = self.upstream.as_ref().expect("an open door").address;
                Running::Sidecar(Box::new(self.start_sidecar(plan, upstream).await))
            }
        };
        let address = match &running {
            Running::Layer(served) => served.address,
            Running::Sidecar(sidecar) => sidecar.address,
        };
        Second { address, _running: running }
    }

    /// Where the store is, if several processes can have it open.
    pub(crate) fn store_url(&self) -> Option<String> {
        self.place.url()
    }

    async fn serve_layer(&self, plan: &Plan, engine: &Engine) -> Served {
        Served::start(plan.layer(engine.clone()).layer(self.backend.clone())).await
    }

    /// The store, for others than the door.
    pub async fn open_store(&mut self) -> Arc<dyn Store> {
        if let Some(store) = &self.store {
            return store.clone();
        }
        let store: Arc<dyn Store> = match (self.place.url(), self.place.kind()) {
            (Some(url), _) => open_shared(&url).await,
            (None, Kind::Memory) => Arc::new(MemoryStore::new(Wall)),
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

    /// The sidecar.
    #[must_use]
    pub fn sidecar(&mut self) -> &mut Sidecar {
        match &mut self.instance {
            Some(Instance::Sidecar(sidecar)) => sidecar,
            _ => panic!("there is no sidecar"),
        }
    }

    /// Closes the door: the sidecar is killed, the layer and its store are dropped.
    pub async fn close(&mut self) {
        match self.instance.take() {
            Some(Instance::Sidecar(mut sidecar)) => sidecar.kill(),
            Some(Instance::Layer { served, engine }) => {
                drop(served);
                engine.drain(Duration::from_secs(5)).await;
                drop(engine);
                self.store = None;
                if let Some(embedded) = self.embedded.take() {
                    // The directory is free when this is done, whoever still holds the store.
                    tokio::task::spawn_blocking(move || embedded.close()).await.expect("a closed store");
                }
            }
            None => {}
        }
    }

    /// Forgets all records; the door is closed.
    pub async fn forget(&mut self) {
        assert!(self.instance.is_none(), "the door is open");
        self.store = None;
        let _ = std::fs::remove_dir_all(self.dir.path().join("records"));
        let place = self.place.clone();
        tokio::task::spawn_blocking(move || place.clear()).await.expect("an empty place");
    }

    /// Where the door is.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        match self.instance.as_ref().expect("an open door") {
            Instance::Layer { served, .. } => served.address,
            Instance::Sidecar(sidecar) => sidecar.address,
        }
    }

    /// Every record, with the name of its state, as an operator sees them.
    pub async fn records(&self) -> Vec<(String, String)> {
        if let Some(Instance::Layer { engine, .. }) = &self.instance {
            let page = engine.store().list(ListQuery::default()).await.expect("a list");
            let now = engine.store().now();
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

    /// An operator says what became of an operation. Whether that was taken.
    pub async fn resolve(&self, record: &str, verdict: Verdict) -> bool {
        if let Some(Instance::Layer { engine, .. }) = &self.instance {
            let fields = [("content-type", &b"text/plain"[..])];
            let answer = StoredResponse::new(202, &fields, &[RESOLVED.into()], &[]).expect("a small answer");
            let command = Command::Resolve(Resolve {
                resolution: match verdict {
                    Verdict::Happened | Verdict::HappenedAfterAll => Resolution::Complete(Some(answer)),
                    Verdict::HappenedSomehow => Resolution::Complete(None),
                    Verdict::DidNotHappen | Verdict::ForceRelease | Verdict::DidNotHappenAfterAll => {
                        Resolution::Release
                    }
                    Verdict::Park => Resolution::Park,
                },
                retention: self.plan.settings().policy().retention(),
                force: verdict == Verdict::ForceRelease,
                amend: matches!(verdict, Verdict::HappenedAfterAll | Verdict::DidNotHappenAfterAll),
                actor: "cases".to_owned(),
                reason: "in the ledger".to_owned(),
            });
            let id = RecordId::from_hex(record).expect("an identifier");
            let outcome = engine.store().apply(id, command).await.expect("an outcome");
            return matches!(outcome, Outcome::Resolved { .. });
        }
        let (path, body) = match verdict {
            Verdict::Happened | Verdict::HappenedAfterAll => {
                let fields = json!({ "Content-Type": "text/plain" });
                (
                    "resolve",
                    json!({ "outcome": "completed", "status": 202, "headers": fields, "body": RESOLVED }),
                )
            }
            Verdict::HappenedSomehow => ("resolve", json!({ "outcome": "completed", "tombstone": true })),
            Verdict::DidNotHappen | Verdict::DidNotHappenAfterAll => {
                ("resolve", json!({ "outcome": "released" }))
            }
            Verdict::Park => ("park", json!({})),
            Verdict::ForceRelease => ("release", json!({ "force": true })),
        };
        let mut body = body;
        if matches!(verdict, Verdict::HappenedAfterAll | Verdict::DidNotHappenAfterAll) {
            body["amend"] = true.into();
        }
        body["reason"] = "in the ledger".into();
        body["actor"] = "cases".into();
        let request = Request::post(&format!("/v1/keys/{record}/{path}")).json(body.to_string());
        let answer = self.admin(request).await;
        assert!([200, 204, 404, 409, 422].contains(&answer.status()), "{answer:?}");
        answer.status() < 300
    }

    /// The newest entry of the audit trail: state before, state after, actor, reason.
    pub async fn last_audit(&self) -> Option<[String; 4]> {
        if let Some(Instance::Layer { engine, .. }) = &self.instance {
            let entry = engine.store().audit(None, 1).await.expect("a trail").into_iter().next()?;
            let (from, to) = (entry.from.as_str().to_owned(), entry.to.as_str().to_owned());
            return Some([from, to, entry.actor, entry.reason]);
        }
        let trail = self.admin(Request::new("GET", "/v1/audit?limit=1")).await.json();
        let entry = trail["entries"].get(0)?;
        Some(["from", "to", "actor", "reason"].map(|name| entry[name].as_str().expect("a text").to_owned()))
    }

    /// Asks at the sidecar's admin address.
    pub async fn admin(&self, request: Request) -> Answer {
        let Some(Instance::Sidecar(sidecar)) = &self.instance else { panic!("there is no sidecar") };
        let answer = Connection::open(sidecar.admin).await.exchange(&request.host("127.0.0.1")).await;
        answer.unwrap_or_else(|broken| panic!("no answer: {broken:?}"))
    }

    /// A connection to the door.
    pub async fn connect(&self) -> Connection {
        Connection::open(self.address()).await
    }

    /// The request as it goes out: with the order for the backend.
    #[must_use]
    pub fn ready(&self, mut request: Request) -> Request {
        if let Some(script) = request.script.take() {
            request.fields.push(self.backend.order(script));
        }
        request
    }

    /// Sends a request on a connection of its own, which must be answered.
    pub async fn send(&self, request: Request) -> Answer {
        self.try_send(request).await.unwrap_or_else(|broken| panic!("no answer: {broken:?}"))
    }

    /// Sends a request on a connection of its own.
    pub async fn try_send(&self, request: Request) -> Result<Answer, Broken> {
        self.connect().await.exchange(&self.ready(request)).await
    }

    /// Sends a request in the background.
    #[must_use]
    pub fn start_send(&self, request: Request) -> tokio::task::JoinHandle<Result<Answer, Broken>> {
        let (address, request) = (self.address(), self.ready(request));
        tokio::spawn(async move { Connection::open(address).await.exchange(&request).await })
    }

    /// Sends the request again and again until it is no longer in progress.
    pub async fn settled(&self, request: &Request) -> Answer {
        let mut last = None;
        until("the request is no longer in progress", async || {
            let answer = self.send(request.clone()).await;
            let in_progress = answer.status() == 409;
            last = Some(answer);
            !in_progress
        })
        .await;
        last.expect("an answer")
    }
}
