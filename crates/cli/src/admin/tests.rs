//! The admin API over a socket, with the layer next to it on the same engine.

mod pages;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::AtomicUsize;

use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use oncegate_core::{
    AttemptId, AuditEntry, Claim, Command, FencingToken, Fingerprint, Label, ListPage, ListQuery,
    MemoryStore, OnAbandoned, Outcome, Record, RecordId, RecordStep, ServiceName, Step, Store, StoreError,
    StoreFuture,
};
use oncegate_http::{
    AuthorityRole, CallerScope, KeyScope, KeySyntax, Profile, RequestBody, Settings, StoreDirective,
};
use oncegate_testkit::{ManualClock, until};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tower_layer::Layer as _;
use tower_service::Service as _;

use super::*;
use crate::config::admin_token;

const START: u64 = 1_700_000_000_000;
pub(crate) const TOKEN: &str = "0123456789abcdef";

/// A store in memory that can be made unreachable.
struct TestStore {
    memory: MemoryStore<Arc<ManualClock>>,
    is_away: Arc<AtomicBool>,
    /// The most records in a page, which may be fewer than were asked for.
    page: Arc<AtomicUsize>,
    /// The records that cannot be read.
    unreadable: Arc<std::sync::Mutex<Vec<RecordId>>>,
    /// True while it does not answer a listing.
    is_frozen: Arc<AtomicBool>,
}

impl TestStore {
    fn is_unreadable(&self, id: RecordId) -> bool {
        self.unreadable.lock().unwrap().contains(&id)
    }

    fn or_away<'a, T: Send + 'a>(&self, response: StoreFuture<'a, T>) -> StoreFuture<'a, T> {
        if self.is_away.load(Ordering::SeqCst) {
            return Box::pin(std::future::ready(Err(StoreError::unavailable("the disk is full"))));
        }
        response
    }
}

impl Store for TestStore {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        if self.is_away.load(Ordering::SeqCst) {
            return Box::pin(std::future::ready(Err(StoreError::unavailable("the disk is full"))));
        }
        self.memory.apply(id, command)
    }
    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        if self.is_unreadable(id) {
            return Box::pin(std::future::ready(Err(StoreError::corrupt("on demand"))));
        }
        self.or_away(self.memory.lookup(id))
    }
    fn list(&self, mut query: ListQuery) -> StoreFuture<'_, ListPage> {
        query.limit = query.limit.min(self.page.load(Ordering::SeqCst));
        self.or_away(Box::pin(async move {
            while self.is_frozen.load(Ordering::SeqCst) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let mut page = self.memory.list(query).await?;
            page.unreadable =
                page.records.extract_if(.., |(id, _)| self.is_unreadable(*id)).map(|(id, _)| id).collect();
            Ok(page)
        }))
    }
    fn audit(&self, before: Option<u64>, limit: usize) -> StoreFuture<'_, Vec<AuditEntry>> {
        self.or_away(self.memory.audit(before, limit))
    }
    fn check(&self) -> StoreFuture<'_, ()> {
        self.or_away(self.memory.check())
    }

    oncegate_core::delegate_store!(self, self.memory => purge usage clock_skew now capabilities);
}

/// The admin API on a socket, and the layer next to it.
pub(crate) struct Sidecar {
    pub(crate) address: SocketAddr,
    client: Client<HttpConnector, Full<Bytes>>,
    clock: Arc<ManualClock>,
    engine: Engine,
    layer: IdempotencyLayer,
    metrics: Metrics,
    draining: Draining,
    pub(crate) is_away: Arc<AtomicBool>,
    pub(crate) page: Arc<AtomicUsize>,
    pub(crate) unreadable: Arc<std::sync::Mutex<Vec<RecordId>>>,
    pub(crate) is_frozen: Arc<AtomicBool>,
    pub(crate) surveys: Surveys,
    stop: Option<oneshot::Sender<()>>,
}

pub(crate) struct AdminResponse {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    body: Bytes,
}

impl AdminResponse {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("{}", self.text()))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The detail of a refusal with this status and slug.
    fn refused(&self, status: u16, slug: &str) -> String {
        assert_eq!(self.status, status, "{}", self.text());
        assert_eq!(self.headers["content-type"], "application/problem+json");
        assert_eq!(self.json()["type"], format!("urn:oncegate:problem:{slug}"));
        assert_eq!(self.json()["status"], status);
        self.json()["detail"].as_str().unwrap().to_owned()
    }
}

impl Sidecar {
    pub(crate) async fn start() -> Self {
        Self::with_token(None).await
    }

    pub(crate) async fn with_token(token: Option<&str>) -> Self {
        let clock = Arc::new(ManualClock::at_millis(START));
        let is_away = Arc::new(AtomicBool::new(false));
        let page = Arc::new(AtomicUsize::new(usize::MAX));
        let memory = MemoryStore::new(clock.clone());
        let (unreadable, is_frozen) = (Arc::default(), Arc::<AtomicBool>::default());
        let store = TestStore {
            memory,
            is_away: is_away.clone(),
            page: page.clone(),
            unreadable: Arc::clone(&unreadable),
            is_frozen: Arc::clone(&is_frozen),
        };
        let store = Arc::new(store);
        let promises = store.clone();
        let metrics = Metrics::new(move || promises.capabilities(), None);
        let store = metrics.measured(store);
        let breaker = Breaker::new(store);
        let engine = Engine::builder(breaker.clone()).with_observer(metrics.clone());
        let engine = engine.with_service(ServiceName::new("orders").unwrap()).build();
        let strict = Settings::new(Profile::named("stripe").unwrap()).with_key_syntax(KeySyntax::Strict);
        let tenant = Settings::default().with_caller(CallerScope::single_tenant());
        let by_user = CallerScope::required_header("x-user".parse().unwrap());
        let user = Settings::default().with_caller(by_user).with_key_scope(KeyScope::Caller);
        let session = Settings::default().with_caller(CallerScope::cookie("sid").unwrap());
        let tenants =
            CallerScope::header("x-tenant".parse().unwrap()).and(CallerScope::cookie("sid").unwrap());
        let hosts = Settings::default().with_caller(tenants).with_authority(AuthorityRole::Scope);
        let long = Settings::default();
        let long =
            long.clone().with_policy(long.policy().with_retention(Duration::from_secs(72 * 3600)).unwrap());
        let layer = IdempotencyLayer::new(engine.clone())
            .with_route(None, "/stripe/{*rest}", strict)
            .and_then(|layer| {
                layer.with_route(None, "/raw", Settings::new(Profile::named("stripe").unwrap()))
            })
            .and_then(|layer| layer.with_route(None, "/tenant", tenant))
            .and_then(|layer| layer.with_route(None, "/user", user))
            .and_then(|layer| layer.with_route(None, "/session", session))
            .and_then(|layer| layer.with_route(None, "/hosts", hosts))
            .and_then(|layer| layer.with_route(None, "/long", long))
            .unwrap()
            .with_observer(metrics.clone());
        let draining = Draining::default();
        let args = crate::config::parse_flags(&["--to", "http://127.0.0.1:1", "--store", "memory:"]).unwrap();
        let live = AdminLive {
            config: Arc::new(crate::config::Draft::read(&args, []).config.unwrap()),
            layer: layer.clone(),
            token: token.map(|token| admin_token(token).unwrap()),
            metrics_token: None,
            jwt: None,
            refused_reloads: RefusedReloads::default(),
        };
        let (rows, surveys) = (Rows::new(&breaker, None), Surveys::default());
        let state = AdminState {
            messages: None,
            activity: Activity::default(),
            engine: engine.clone(),
            breaker,
            metrics: metrics.clone(),
            draining: draining.clone(),
            connections: ConnectionLimit::new(100),
            without_key: RequestLimit::new(100),
            dashboard: Dashboard::new("127.0.0.1:1".parse().unwrap()),
            left: AbandonedRecords::default(),
            live: watch::channel(live).1,
            backup: BackupStore::default(),
            seal: None,
            seal_refusals: oncegate_seal::SealRefusals::default(),
            ready_checks: ReadyChecks::default(),
            rows,
            surveys: surveys.clone(),
            expositions: Expositions::default(),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        tokio::spawn(async move {
            serve(listener, state, Handle::current(), async {
                let _ = stopped.await;
            })
            .await;
        });
        let client = Client::builder(TokioExecutor::new()).build_http();
        Self {
            address,
            client,
            clock,
            engine,
            layer,
            metrics,
            draining,
            is_away,
            page,
            unreadable,
            is_frozen,
            surveys,
            stop: Some(stop),
        }
    }

    pub(crate) async fn send(&self, request: Request<Full<Bytes>>) -> AdminResponse {
        let response = self.client.request(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        AdminResponse { status: parts.status.as_u16(), headers: parts.headers, body }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    async fn get(&self, path: &str) -> AdminResponse {
        self.send(Request::get(self.url(path)).body(Full::default()).unwrap()).await
    }

    async fn post(&self, path: &str, body: Value) -> AdminResponse {
        self.post_text(path, body.to_string()).await
    }

    async fn post_text(&self, path: &str, body: String) -> AdminResponse {
        let request = Request::post(self.url(path)).header("content-type", "application/json");
        self.send(request.body(body.into()).unwrap()).await
    }

    /// A request through the layer to a service that echoes the body with 201 and passes on its `Idempotency-Store`.
    pub(crate) async fn call(
        &self,
        target: &str,
        headers: &[(&'static str, &str)],
        body: &[u8],
    ) -> AdminResponse {
        let service = tower_service_fn(async |request: Request<RequestBody<Full<Bytes>>>| {
            let word = request.headers().get("idempotency-store").map(|word| word.as_bytes().to_vec());
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let mut response = http::Response::new(Full::new(body));
            *response.status_mut() = StatusCode::CREATED;
            response.headers_mut().insert("content-type", HeaderValue::from_static("text/plain"));
            if let Some(word) = word.and_then(|word| StoreDirective::from_name(&word)) {
                response.extensions_mut().insert(word);
            }
            response
        });
        let mut request = Request::post(target);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(Bytes::copy_from_slice(body))).unwrap();
        let response = self.layer.layer(service).call(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        AdminResponse { status: parts.status.as_u16(), headers: parts.headers, body }
    }

    /// A record that is in progress, with a lease of 30 seconds.
    pub(crate) async fn in_progress(&self, number: u8, operation: &str) -> (RecordId, FencingToken) {
        let id = RecordId::from_bytes([number; 32]);
        let Ok(Outcome::Execute(grant)) = self.engine.store().apply(id, claim(number, operation)).await
        else {
            panic!("the claim is granted")
        };
        (id, grant.token)
    }

    /// Records a step of the record's attempt.
    pub(crate) async fn step(
        &self,
        (id, token): (RecordId, FencingToken),
        number: usize,
        name: &str,
        result: &'static [u8],
    ) {
        let step = Step::new(name, Bytes::from_static(result)).unwrap();
        let command = Command::Step(RecordStep { token, number, step });
        assert_eq!(self.engine.store().apply(id, command).await.unwrap(), Outcome::StepRecorded);
    }

    /// A record whose owner is gone, after a retry.
    pub(crate) async fn unknown(&self, number: u8, operation: &str) -> RecordId {
        let (id, _) = self.in_progress(number, operation).await;
        self.clock.advance(Duration::from_secs(31));
        let outcome = self.engine.store().apply(id, claim(number.wrapping_add(100), operation)).await;
        assert_eq!(outcome.unwrap(), Outcome::Unknown);
        id
    }
}

impl Drop for Sidecar {
    fn drop(&mut self) {
        drop(self.stop.take());
    }
}

fn claim(number: u8, operation: &str) -> Command {
    Command::Claim(Claim {
        attempt: AttemptId::new(number.into()),
        fingerprint: Fingerprint::of_parts("test", &[]),
        lease: Duration::from_secs(30),
        retention: Duration::from_secs(3600),
        on_abandoned: OnAbandoned::Park,
        label: Label::new(Default::default(), operation),
    })
}

#[derive(Clone)]
struct ServiceFn<F>(F);

fn tower_service_fn<F>(call: F) -> ServiceFn<F> {
    ServiceFn(call)
}

impl<F, Fut> tower_service::Service<Request<RequestBody<Full<Bytes>>>> for ServiceFn<F>
where
    F: FnMut(Request<RequestBody<Full<Bytes>>>) -> Fut,
    Fut: Future<Output = http::Response<Full<Bytes>>> + Send + 'static,
{
    type Response = http::Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Infallible>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody<Full<Bytes>>>) -> Self::Future {
        let response = (self.0)(request);
        Box::pin(async { Ok(response.await) })
    }
}

#[tokio::test]
async fn find_uses_the_record_of_the_layer() {
    let sidecar = Sidecar::start().await;
    let bearer = json!({"value": "Bearer a"});
    type Case<'a> = (&'a str, &'a [(&'static str, &'a str)], Value);
    let cases: &[Case<'_>] = &[
        (
            "/pay?x=1",
            &[("idempotency-key", "k-1"), ("authorization", "Bearer a")],
            json!({"key": "k-1", "path": "/pay", "caller": bearer}),
        ),
        (
            "/pay",
            &[("idempotency-key", "\"k 2\";p=1")],
            json!({"key": "k 2", "path": "/pay?y=2", "caller": "anonymous"}),
        ),
        (
            "/pay",
            &[("idempotency-key", "\"k\\\"3\"")],
            json!({"key": "k\"3", "path": "/pay", "caller": "anonymous"}),
        ),
        (
            "/pay",
            &[("idempotency-key", "k-4")],
            json!({"key": "\"k-4\"", "path": "/pay", "caller": "anonymous"}),
        ),
        (
            "/stripe/a",
            &[("idempotency-key", "\"k-5\""), ("authorization", "Bearer a")],
            json!({"key": "k-5", "path": "/stripe/b", "caller": bearer}),
        ),
        (
            "/raw",
            &[("idempotency-key", "k-12"), ("authorization", "Bearer a")],
            json!({"key": "k-12", "path": "/raw", "caller": bearer}),
        ),
        (
            "/raw",
            &[("idempotency-key", "\"k, 13\""), ("authorization", "Bearer a")],
            json!({"key": "\"k, 13\"", "path": "/raw", "caller": bearer}),
        ),
        (
            "/tenant",
            &[("idempotency-key", "k-6"), ("authorization", "Bearer a")],
            json!({"key": "k-6", "path": "/tenant", "caller": "single-tenant"}),
        ),
        ("/tenant", &[("idempotency-key", "k-7")], json!({"key": "k-7", "path": "/tenant"})),
        (
            "/user",
            &[("idempotency-key", "k-8"), ("x-user", "u")],
            json!({"key": "k-8", "path": "/user", "caller": {"value": "u"}}),
        ),
        (
            "/session",
            &[("idempotency-key", "k-9"), ("cookie", "theme=dark; sid=s")],
            json!({"key": "k-9", "path": "/session", "caller": {"value": "s"}}),
        ),
        (
            "/hosts",
            &[("idempotency-key", "k-10"), ("host", "Shop.test:443"), ("x-tenant", "t"), ("cookie", "sid=s")],
            json!({
                "key": "k-10", "path": "/hosts", "host": "shop.test",
                "caller": {"fields": {"X-Tenant": "t", "Cookie": "sid=s"}},
            }),
        ),
        (
            "/hosts",
            &[("idempotency-key", "k-11"), ("host", "shop.test")],
            json!({"key": "k-11", "path": "/hosts", "host": "shop.test", "caller": "anonymous"}),
        ),
    ];
    for (target, headers, find) in cases {
        assert_eq!(sidecar.call(target, headers, b"hello").await.status, 201);
        let mut find = find.clone();
        find["method"] = "POST".into();
        let found = sidecar.post("/v1/keys/find", find.clone()).await;
        assert_eq!(found.status, 200, "{find} {}", found.text());
        assert_eq!(found.json()["state"], "completed");
        assert_eq!(found.json()["operation"], format!("POST {}", target.split('?').next().unwrap()));
        assert_eq!(found.json()["response"]["body_bytes"], 5);
        assert!(found.json()["response"].get("body").is_none());
        // The same record by its identifier, with its body on demand.
        let id = found.json()["record"].as_str().unwrap().to_owned();
        assert_eq!(sidecar.get(&format!("/v1/keys/{id}")).await.json(), found.json());
        assert_eq!(
            sidecar.get(&format!("/v1/keys/{id}?body=true")).await.json()["response"]["body"],
            "hello"
        );
        find["body"] = true.into();
        assert_eq!(sidecar.post("/v1/keys/find", find.clone()).await.json()["response"]["body"], "hello");
        // Another key, or another caller, is another record.
        find["key"] = "other".into();
        let missing = sidecar.post("/v1/keys/find", find).await;
        missing.refused(404, "no-record");
        assert_ne!(missing.json()["record"], id);
    }
    let other = json!({"key": "k-1", "method": "POST", "path": "/pay", "caller": {"value": "Bearer b"}});
    sidecar.post("/v1/keys/find", other).await.refused(404, "no-record");
}

#[tokio::test]
async fn find_names_the_missing_member() {
    let sidecar = Sidecar::start().await;
    let whole = json!({"key": "k", "method": "POST", "path": "/pay", "caller": "anonymous"});
    for (member, value, expected) in [
        ("key", json!(""), "key: the key is empty"),
        ("key", json!("k".repeat(256)), "key: the key has 256 characters; at most 255 are allowed."),
        ("method", json!("GET"), "method: GET /pay is not covered, so its keys are ignored."),
        ("method", json!("P T"), "method: \"P T\" is not a method."),
        ("path", json!("pay"), "path: \"pay\" does not start with a slash."),
        ("path", json!("/a b"), "path: \"/a b\" is not a path."),
        (
            "caller",
            json!(null),
            "caller: on this route it must be \"anonymous\", or {\"value\": …} with the value of the field authorization as it was sent.",
        ),
        ("caller", json!("single-tenant"), "caller: on this route it must be \"anonymous\""),
        (
            "caller",
            json!({"value": "a\nb"}),
            "caller: the value has characters that a header field cannot contain.",
        ),
        (
            "caller",
            json!("other"),
            "The body: unknown variant `other`, expected one of `anonymous`, `single-tenant`, `value`, `fields`",
        ),
        (
            "keey",
            json!("k"),
            "The body: unknown field `keey`, expected one of `key`, `method`, `path`, `host`, `caller`, `body`",
        ),
        ("host", json!("a\nb"), "host: \"a\\nb\" is not a valid host."),
        ("caller", json!({"fields": {"a b": "c"}}), "caller: \"a b\" is not the name of a header field."),
    ] {
        let mut find = whole.clone();
        find[member] = value;
        let detail = sidecar.post("/v1/keys/find", find).await.refused(400, "bad-request");
        assert!(detail.starts_with(expected), "{detail}");
    }
    let tenant = json!({"key": "k", "method": "POST", "path": "/tenant", "caller": "anonymous"});
    let detail = sidecar.post("/v1/keys/find", tenant).await.refused(400, "bad-request");
    assert_eq!(detail, "caller: on this route it must be \"single-tenant\".");
    let mut hosts = json!({"key": "k", "method": "POST", "path": "/hosts", "caller": {"value": "t"}});
    let detail = sidecar.post("/v1/keys/find", hosts.clone()).await.refused(400, "bad-request");
    let expected = "caller: on this route it must be \"anonymous\", or {\"fields\": {…}} with the header fields that have the cookie \
                    sid and the field x-tenant, as they were sent.";
    assert_eq!(detail, expected);
    hosts["caller"] = "anonymous".into();
    let detail = sidecar.post("/v1/keys/find", hosts).await.refused(400, "bad-request");
    assert!(detail.starts_with("host: each host has keys of its own on this route"), "{detail}");
    let user = json!({"key": "k", "method": "POST", "path": "/user", "caller": "anonymous"});
    let detail = sidecar.post("/v1/keys/find", user).await.refused(404, "no-record");
    let expected =
        "Requests on this route that do not identify their caller (by the field x-user) are refused";
    assert!(detail.starts_with(expected), "{detail}");

    // A value with the name of its field is another value.
    for (value, hint) in [
        ("Authorization: Bearer x", " begins with \"authorization:\": give only what follows it. "),
        ("Bearer x", "or its retention is over. The key alone"),
    ] {
        let find = json!({"key": "k", "method": "POST", "path": "/pay", "caller": {"value": value}});
        let detail = sidecar.post("/v1/keys/find", find).await.refused(404, "no-record");
        assert!(detail.contains(hint) && !detail.contains("Bearer"), "{detail}");
    }
}

#[tokio::test]
async fn a_listing_is_filtered_and_has_pages() {
    let sidecar = Sidecar::start().await;
    let unknown = sidecar.unknown(1, "POST /pay").await;
    sidecar.in_progress(2, "POST /pay").await;
    sidecar.in_progress(3, "POST /refund").await;
    sidecar.call("/pay", &[("idempotency-key", "k"), ("authorization", "a")], b"x").await;
    sidecar.clock.advance(Duration::from_secs(10));

    let count = async |query: &str| {
        let response = sidecar.get(&format!("/v1/keys{query}")).await;
        assert_eq!(response.status, 200, "{}", response.text());
        response.json()["records"].as_array().unwrap().len()
    };
    assert_eq!(count("").await, 4);
    assert_eq!(count("?state=").await, 4);
    assert_eq!(count("?state=in-progress").await, 2);
    assert_eq!(count("?state=completed").await, 1);
    assert_eq!(count("?operation=POST%20/pay").await, 3);
    assert_eq!(count("?operation=POST+/refund&state=in-progress").await, 1);
    assert_eq!(count("?caller=0000000000000000").await, 3);
    assert_eq!(count("?min_age=11s").await, 0);
    assert_eq!(count("?min_age=10s").await, 4);
    // All came into their state ten seconds ago, at 22:13:51.
    for order in ["record", "newest"] {
        for (period, expected) in [
            ("since=10s", 4),
            ("since=9s", 0),
            ("until=10s", 0),
            ("until=9s", 4),
            ("since=2023-11-14&until=2023-11-15", 4),
            ("since=2023-11-14T22:13:51Z", 4),
            ("since=2023-11-14T22:13:51.001Z", 0),
            ("until=2023-11-14T23:13:51%2B01:00", 0),
            ("since=2023-11-14T22:13&until=2023-11-14T22:14&state=completed", 1),
        ] {
            assert_eq!(count(&format!("?order={order}&{period}")).await, expected, "{order} {period}");
        }
    }
    let listed = sidecar.get("/v1/keys?state=unknown").await.json();
    let record = &listed["records"][0];
    assert_eq!(record["record"], unknown.to_string());
    assert_eq!((&record["attempts"], &record["age_seconds"]), (&json!(1), &json!(10)));
    assert_eq!(record["created_at"], "2023-11-14T22:13:20.000Z");
    assert_eq!(listed["now"], "2023-11-14T22:14:01.000Z");

    let mut seen = Vec::new();
    let mut cursor = String::new();
    loop {
        let page = sidecar.get(&format!("/v1/keys?limit=1&cursor={cursor}")).await.json();
        let records = page["records"].as_array().unwrap();
        assert!(records.len() <= 1);
        seen.extend(records.iter().map(|record| record["record"].as_str().unwrap().to_owned()));
        match page["next"].as_str() {
            Some(next) => cursor = next.to_owned(),
            None => break,
        }
    }
    assert!(seen.len() == 4 && seen.is_sorted(), "{seen:?}");

    for (query, expected) in [
        ("?stat=unknown", "there is no parameter \"stat\"; did you mean `state`?"),
        (
            "?state=unknwon",
            "state: \"unknwon\" is not one of in-progress, abandoned, unknown, completed, tombstone, released, unsettled; did you mean `unknown`?",
        ),
        ("?limit=0", "limit: \"0\" is not a number from 1 to 1000."),
        ("?limit=1001", "limit: \"1001\" is not a number from 1 to 1000."),
        ("?min_age=10", "min_age: \"10\" has no unit; write a number and a unit"),
        ("?caller=Bearer", "caller: \"Bearer\" is not a caller's tag"),
        ("?cursor=ab", "cursor: \"ab\" is not a cursor; it has 64 hexadecimal digits"),
        ("?order=new", "order: \"new\" is neither newest nor record."),
        ("?since=noon", "since: \"noon\" is not a time; write one in UTC, such as 2026-02-28T12:34"),
        ("?limit=1&limit=2", "limit: it was given twice."),
    ] {
        let detail = sidecar.get(&format!("/v1/keys{query}")).await.refused(400, "bad-request");
        assert!(detail.starts_with(expected), "{detail}");
    }
}

#[tokio::test]
async fn bodies_that_are_no_text_are_shown_in_base64() {
    let sidecar = Sidecar::start().await;
    sidecar.call("/pay", &[("idempotency-key", "k")], b"\xff\x00").await;
    let find = json!({"key": "k", "method": "POST", "path": "/pay", "caller": "anonymous", "body": true});
    let response = sidecar.post("/v1/keys/find", find).await.json()["response"].clone();
    assert_eq!(
        response,
        json!({
            "status": 201, "body_bytes": 2, "body_base64": "/wA=", "headers": [["content-type", "text/plain"]],
        })
    );
}

#[tokio::test]
async fn steps_are_named_and_their_results_are_shown_on_demand() {
    let sidecar = Sidecar::start().await;
    let (id, token) = sidecar.in_progress(1, "function:order").await;
    let path = format!("/v1/keys/{id}");
    assert!(sidecar.get(&path).await.json()["steps"].is_null());
    sidecar.step((id, token), 0, "charge", br#"{"Ok":4111}"#).await;
    sidecar.step((id, token), 1, "ship", b"\xff\x00").await;
    assert_eq!(
        sidecar.get(&path).await.json()["steps"],
        json!([{ "name": "charge", "result_bytes": 11 }, { "name": "ship", "result_bytes": 2 }])
    );
    assert_eq!(
        sidecar.get(&format!("{path}?body=true")).await.json()["steps"],
        json!([
            { "name": "charge", "result_bytes": 11, "result": r#"{"Ok":4111}"# },
            { "name": "ship", "result_bytes": 2, "result_base64": "/wA=" },
        ])
    );
    assert!(sidecar.get("/v1/keys").await.json()["records"][0]["steps"].is_null());
}

/// A request whose handler reports an unknown outcome, and its record.
async fn parked(sidecar: &Sidecar, path: &str) -> String {
    let headers: [(&str, &str); 2] = [("idempotency-key", "k"), ("idempotency-store", "unknown")];
    let headers = headers.map(|(name, value)| (name, value));
    sidecar.call(path, &headers, b"x").await;
    let find = json!({"key": "k", "method": "POST", "path": path, "caller": "anonymous"});
    let found = sidecar.post("/v1/keys/find", find).await.json();
    found["record"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn retries_get_the_response_of_an_operator() {
    let sidecar = Sidecar::start().await;
    let id = sidecar.unknown(1, "POST /long").await;
    let resolve = format!("/v1/keys/{id}/resolve");
    let response = json!({
        "outcome": "completed", "status": 201, "reason": "found in the ledger", "actor": "ada",
        "headers": {"Content-Type": "application/json", "Location": "/payments/7"}, "body": "{\"id\":7}",
    });
    let resolved = sidecar.post(&resolve, response.clone()).await;
    assert_eq!(resolved.status, 200, "{}", resolved.text());
    assert_eq!(
        (&resolved.json()["from"], &resolved.json()["state"]),
        (&json!("unknown"), &json!("completed"))
    );
    // The retention is that of the record's route.
    assert_eq!(resolved.json()["changed_at"], "2023-11-14T22:13:51.000Z");
    assert_eq!(resolved.json()["expires_at"], "2023-11-17T22:13:51.000Z");
    let replayed = sidecar.engine.store().apply(id, claim(9, "POST /long")).await.unwrap();
    let Outcome::Replay(stored) = replayed else { panic!("{replayed:?}") };
    assert_eq!((stored.status(), stored.body()), (201, "{\"id\":7}".into()));
    let headers: Vec<_> = stored.headers().collect();
    assert_eq!(headers, [("content-type", &b"application/json"[..]), ("location", b"/payments/7")]);

    // A definite response never changes.
    let again = sidecar.post(&resolve, response).await.refused(409, "not-resolvable");
    assert!(again.starts_with("An operator resolved it already: it is completed"), "{again}");
    let free = sidecar.post(&format!("/v1/keys/{id}/release"), json!({"reason": "r", "force": true})).await;
    free.refused(409, "not-resolvable");

    let tombstone = sidecar.unknown(2, "POST /pay").await;
    let request = json!({"outcome": "completed", "tombstone": true, "reason": "done, response lost"});
    let response = sidecar.post(&format!("/v1/keys/{tombstone}/resolve"), request).await;
    assert_eq!((response.status, &response.json()["state"]), (200, &json!("tombstone")));

    let released = sidecar.unknown(3, "POST /pay").await;
    let path = format!("/v1/keys/{released}/resolve");
    let request = Request::post(sidecar.url(&path))
        .header("content-type", "application/json; charset=utf-8")
        .header("oncegate-actor", "grace")
        .body(json!({"outcome": "released", "reason": "never reached the bank"}).to_string().into());
    let response = sidecar.send(request.unwrap()).await;
    assert_eq!((response.status, &response.json()["state"]), (200, &json!("released")));
    let again = sidecar.engine.store().apply(released, claim(9, "POST /pay")).await.unwrap();
    assert!(matches!(again, Outcome::Execute(grant) if grant.attempts == 2));

    // The audit trail has only changes that were made, newest first.
    let audit = sidecar.get("/v1/audit").await.json();
    let entries = audit["entries"].as_array().unwrap();
    let texts = |member: &str| entries.iter().map(|e| e[member].as_str().unwrap()).collect::<Vec<_>>();
    assert_eq!(texts("actor"), ["grace", "admin", "ada"]);
    assert_eq!(texts("reason"), ["never reached the bank", "done, response lost", "found in the ledger"]);
    assert_eq!(texts("from"), ["unknown"; 3]);
    assert_eq!(texts("to"), ["released", "tombstone", "completed"]);
    assert_eq!(texts("record")[2], id.to_string());
    assert_eq!(audit["next"], json!(null));
    assert_eq!(sidecar.get("/v1/audit?limit=3").await.json()["next"], json!(null));
    let page = sidecar.get("/v1/audit?limit=2").await.json();
    assert_eq!(page["next"], page["entries"][1]["number"]);
    let rest = sidecar.get(&format!("/v1/audit?limit=2&before={}", page["next"])).await.json();
    assert_eq!((rest["entries"].as_array().unwrap().len(), &rest["next"]), (1, &json!(null)));
}

#[tokio::test]
async fn records_of_a_key_are_found_by_it_alone() {
    let sidecar = Sidecar::start().await;
    for (path, caller) in [("/pay", "Bearer a"), ("/pay", "Bearer b"), ("/long", "Bearer a")] {
        sidecar.call(path, &[("idempotency-key", "k-1"), ("authorization", caller)], b"x").await;
    }
    sidecar.call("/pay", &[("idempotency-key", "k-2"), ("authorization", "Bearer a")], b"x").await;
    let found = sidecar.post("/v1/keys/find", json!({"key": "K-1"})).await.json();
    assert_eq!((&found["total"], &found["complete"]), (&json!(3), &json!(true)), "{found}");
    let tag = found["records"][0]["key_tag"].as_str().unwrap().to_owned();
    assert_eq!(tag, oncegate_core::KeyTag::of(&"k-1".try_into().unwrap()).to_string());
    let page = sidecar.get(&format!("/v1/keys?key_tag={tag}")).await.json();
    assert_eq!(page["records"].as_array().unwrap().len(), 3);
    let page = sidecar.get("/v1/keys?key_tag=0000000000000000").await.json();
    assert_eq!(page["records"], json!([]));
    for (asked, expected) in [
        (json!({"key": "k-1", "method": "POST"}), "path: add it"),
        (json!({"key": "k-1", "caller": "anonymous"}), "path: add it"),
        (json!({"key": "k-1", "path": "/pay"}), "method: it is missing"),
        (json!({"key": ""}), "key: the key is empty"),
    ] {
        let detail = sidecar.post("/v1/keys/find", asked.clone()).await.refused(400, "bad-request");
        assert!(detail.starts_with(expected), "{asked}: {detail}");
    }
    let detail = sidecar.get("/v1/keys?key_tag=k-1").await.refused(400, "bad-request");
    assert!(detail.contains("is not the tag of a key"), "{detail}");
}

#[tokio::test]
async fn a_client_of_the_layer_gets_the_operators_response() {
    let sidecar = Sidecar::start().await;
    let id = parked(&sidecar, "/pay").await;
    let key: &[_] = &[("idempotency-key", "k")];
    let before = sidecar.call("/pay", key, b"x").await;
    assert_eq!((before.status, &before.json()["retry"]), (500, &json!("stop")));
    let request = json!({"outcome": "completed", "status": 200, "body_base64": "/wA=", "reason": "r"});
    assert_eq!(sidecar.post(&format!("/v1/keys/{id}/resolve"), request).await.status, 200);
    let after = sidecar.call("/pay", key, b"x").await;
    assert_eq!((after.status, &after.body[..]), (200, &b"\xff\x00"[..]));
    assert_eq!(after.headers["idempotent-replayed"], "true");
}

#[tokio::test]
async fn a_living_owner_is_fenced_only_by_force() {
    let sidecar = Sidecar::start().await;
    let (id, token) = sidecar.in_progress(1, "POST /pay").await;
    let release = format!("/v1/keys/{id}/release");
    let detail = sidecar.post(&release, json!({"reason": "r"})).await.refused(409, "not-resolvable");
    assert!(detail.contains("release it with `force`"), "{detail}");
    let resolve = json!({"outcome": "released", "reason": "r"});
    sidecar.post(&format!("/v1/keys/{id}/resolve"), resolve).await.refused(409, "not-resolvable");
    let forced = sidecar.post(&release, json!({"reason": "host is gone", "force": true})).await;
    assert_eq!((forced.status, &forced.json()["from"]), (200, &json!("in-progress")));
    let renew =
        oncegate_core::Renew { token, lease: Duration::from_secs(1), retention: Duration::from_secs(1) };
    assert_eq!(sidecar.engine.store().apply(id, Command::Renew(renew)).await.unwrap(), Outcome::Fenced);
    let again = sidecar.post(&release, json!({"reason": "r"})).await.refused(409, "not-resolvable");
    assert!(again.starts_with("The key is released already"), "{again}");
    let nothing = RecordId::from_bytes([7; 32]);
    let response = sidecar.post(&format!("/v1/keys/{nothing}/release"), json!({"reason": "r"})).await;
    response.refused(404, "no-record");
    assert_eq!(response.json()["record"], nothing.to_string());
}

#[tokio::test]
async fn an_invalid_resolution_changes_nothing() {
    let sidecar = Sidecar::start().await;
    let id = sidecar.unknown(1, "POST /pay").await;
    let path = format!("/v1/keys/{id}/resolve");
    for (changes, expected) in [
        (json!({"status": 201, "reason": null}), "The body: missing field `reason`"),
        (json!({"status": 201, "reason": " "}), "reason: it is empty; the audit trail needs a text."),
        (json!({"status": 201, "reason": "a\nb"}), "reason: it has control characters"),
        (
            json!({"status": 201, "reason": "r".repeat(1001)}),
            "reason: it has 1001 bytes; at most 1000 are allowed.",
        ),
        (json!({"status": 201, "actor": "\u{1b}[31m"}), "actor: it has control characters"),
        (
            json!({"status": 201, "actor": "ada\u{202e}"}),
            "actor: it has characters that change the direction of text",
        ),
        (json!({}), "status: give the response that retries get"),
        (json!({"body": "x"}), "status: give the response that retries get"),
        (json!({"status": 100}), "status: it must be from 200 to 599."),
        (json!({"status": 600}), "status: it must be from 200 to 599."),
        (json!({"status": 204, "body": "x"}), "body: a response with the status 204 No Content has no body."),
        (json!({"status": 200, "body": "x", "body_base64": "eA=="}), "body: there is body_base64, too"),
        (json!({"status": 200, "body_base64": "?"}), "body_base64: "),
        (json!({"status": 200, "tombstone": true}), "tombstone: a tombstone has no response"),
        (json!({"outcome": "released", "status": 200}), "outcome: a released key has no response"),
        (json!({"outcome": "done"}), "The body: unknown variant `done`, expected `completed` or `released`"),
        (json!({"outcome": "released", "force": true}), "The body: unknown field `force`"),
        (
            json!({"status": 200, "headers": {"Set-Cookie": "x"}}),
            "headers: the header field set-cookie must not be stored and replayed.",
        ),
        (json!({"status": 200, "headers": [["x y", "x"]]}), "headers: \"x y\" is not the name of a field."),
        (
            json!({"status": 200, "headers": [["etag", "x\r\nset-cookie: y"]]}),
            "headers: the value of etag has characters that a field cannot contain.",
        ),
        (
            json!({"status": 200, "headers": ["etag"]}),
            "The body: headers: an object of texts, or a list of [name, value]",
        ),
    ] {
        let mut request = json!({"outcome": "completed", "reason": "r"});
        let members = request.as_object_mut().unwrap();
        members.extend(changes.as_object().unwrap().clone());
        members.retain(|_, value| !value.is_null());
        let detail = sidecar.post(&path, request.clone()).await.refused(400, "bad-request");
        assert!(detail.starts_with(expected), "{request}: {detail}");
    }
    let detail = sidecar.post_text(&path, "{".to_owned()).await.refused(400, "bad-request");
    assert!(detail.starts_with("The body: EOF"), "{detail}");
    assert_eq!(sidecar.get(&format!("/v1/keys/{id}")).await.json()["state"], "unknown");
    assert_eq!(sidecar.get("/v1/audit").await.json()["entries"], json!([]));
    // At the limit and one beyond it.
    let reason = |n: usize| json!({"outcome": "completed", "tombstone": true, "reason": "r".repeat(n)});
    assert_eq!(sidecar.post(&path, reason(1000)).await.status, 200);
}

#[tokio::test]
async fn too_large_requests_are_refused() {
    let sidecar = Sidecar::start().await;
    let id = sidecar.unknown(1, "POST /pay").await;
    let path = format!("/v1/keys/{id}/resolve");
    let request = |body: String| {
        json!({"outcome": "completed", "status": 200, "reason": "r", "body": body}).to_string()
    };
    let around = request(String::new()).len();
    sidecar.post_text(&path, request("x".repeat(MAX_REQUEST - around + 1))).await.refused(413, "too-large");
    let fits = sidecar.post_text(&path, request("x".repeat(MAX_REQUEST - around))).await;
    assert_eq!((fits.status, &fits.json()["response"]["body_bytes"]), (200, &json!(MAX_REQUEST - around)));
    // What needs no large body takes none.
    for path in ["/v1/keys/find", "/v1/keys/tag", "/v1/keys/forget", &format!("/v1/keys/{id}/release")] {
        let large = json!({"key": "k".repeat(MAX_SMALL_REQUEST)}).to_string();
        sidecar.post_text(path, large).await.refused(413, "too-large");
    }
}

/// All bodies together are bounded.
#[tokio::test]
async fn only_few_requests_with_large_bodies_run_at_a_time() {
    use tokio::io::AsyncWriteExt as _;
    let sidecar = Sidecar::start().await;
    let id = sidecar.unknown(1, "POST /pay").await;
    let path = format!("/v1/keys/{id}/resolve");
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n{{",
        sidecar.address
    );
    let mut open = Vec::new();
    for _ in 0..MAX_LARGE_REQUESTS {
        let mut stream = tokio::net::TcpStream::connect(sidecar.address).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        open.push(stream);
    }
    let large =
        json!({"outcome": "completed", "status": 200, "reason": "r", "body": "x".repeat(MAX_SMALL_REQUEST)})
            .to_string();
    oncegate_testkit::until("all places are taken", async || {
        sidecar.post_text(&path, large.clone() + "?").await.status == 503
    })
    .await;
    sidecar.post_text(&path, large.clone()).await.refused(503, "busy");
    // A small one needs no place.
    let small = sidecar.post_text(&path, "{}".to_owned()).await;
    assert_eq!(small.status, 400, "{}", small.text());
    drop(open);
    oncegate_testkit::until("a place is free", async || {
        sidecar.post_text(&path, large.clone()).await.status == 200
    })
    .await;
}

#[tokio::test]
async fn unknown_paths_and_methods_are_named() {
    let sidecar = Sidecar::start().await;
    assert_eq!(sidecar.get("/v1/kyes").await.refused(404, "no-such-path"), "There is no /v1/kyes.");
    let detail = sidecar.get("/v1/keys/find").await.refused(405, "no-such-method");
    assert_eq!(detail, "/v1/keys/find does not accept GET.");
    let detail = sidecar.get("/v1/keys/abc").await.refused(400, "bad-request");
    assert_eq!(
        detail,
        "\"abc\" is not a record; it has 64 hexadecimal digits, as a listing shows them, or the first 6 or more of them."
    );
}

#[tokio::test]
async fn pages_of_other_sites_are_refused() {
    let sidecar = Sidecar::start().await;
    let send = async |request: http::request::Builder| sidecar.send(request.body("{}".into()).unwrap()).await;
    // A host name of the page's own that points here.
    for host in
        ["evil.example", "evil.example:9090", "localhost.evil.example", "10.0.0.1", "[2001:db8::1]:80", "@"]
    {
        for path in ["/v1/keys", "/metrics", "/livez"] {
            let response = send(Request::get(sidecar.url(path)).header("host", host)).await;
            response.refused(403, "forbidden");
        }
    }
    for host in ["localhost", "LOCALHOST:1", "127.0.0.1", "127.9.9.9:80", "[::1]:9090", "[::ffff:127.0.0.1]"]
    {
        let response = send(Request::get(sidecar.url("/v1/keys")).header("host", host)).await;
        assert_eq!(response.status, 200, "{host}");
    }
    // A page of another site cannot read the response, but it must not take the places of others either.
    for (site, path, status) in [
        ("cross-site", "/v1/keys", 403),
        ("same-site", "/v1/activity", 403),
        ("cross-site", "/v1/backup", 403),
        ("same-origin", "/v1/keys", 200),
        ("none", "/v1/keys", 200),
        ("cross-site", "/livez", 200),
    ] {
        let response = send(Request::get(sidecar.url(path)).header("sec-fetch-site", site)).await;
        assert_eq!(response.status, status, "{site} {path}");
    }
    // Requests that a form or a fetch can send without a preflight request.
    let post = || Request::post(sidecar.url("/v1/keys/find"));
    send(post()).await.refused(415, "media-type");
    for media_type in ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""] {
        send(post().header("content-type", media_type)).await.refused(415, "media-type");
    }
    let post = || post().header("content-type", "application/json");
    for origin in ["http://evil.example", "null", "https://127.0.0.1:1", "http://localhost"] {
        send(post().header("origin", origin)).await.refused(403, "forbidden");
    }
    send(post().header("sec-fetch-site", "cross-site")).await.refused(403, "forbidden");
    send(post().header("sec-fetch-site", "same-site")).await.refused(403, "forbidden");
    // A page of the admin address itself would be allowed.
    let own = format!("http://{}", sidecar.address);
    send(post().header("origin", own).header("sec-fetch-site", "same-origin"))
        .await
        .refused(400, "bad-request");
}

/// The record of a request that was only observed protects nothing.
#[tokio::test]
async fn shadow_records_wait_for_no_operator_and_are_refused_to_them() {
    let sidecar = Sidecar::start().await;
    let (shadow, _) = sidecar.in_progress(1, "(shadow) POST /a").await;
    let (own, _) = sidecar.in_progress(2, "POST /a").await;
    sidecar.clock.advance(Duration::from_secs(31));
    for query in ["?state=unsettled", "?state=unsettled&order=newest"] {
        let listed = sidecar.get(&format!("/v1/keys{query}")).await.json();
        let records = listed["records"].as_array().unwrap();
        assert_eq!(records.len(), 1, "{query}: {listed}");
        assert_eq!(records[0]["record"], own.to_string());
    }
    let all = sidecar.get("/v1/keys").await.json();
    assert_eq!(all["records"].as_array().unwrap().len(), 2, "all records show it");
    for (action, request) in [
        ("resolve", json!({"outcome": "released", "reason": "r"})),
        ("release", json!({"force": true, "reason": "r"})),
        ("park", json!({"reason": "r"})),
    ] {
        let path = format!("/v1/keys/{shadow}/{action}");
        let detail = sidecar.post(&path, request).await.refused(409, "not-resolvable");
        assert!(detail.contains("only observes"), "{action}: {detail}");
    }
}

#[tokio::test]
async fn with_a_token_only_the_token_opens() {
    let sidecar = Sidecar::with_token(Some(TOKEN)).await;
    let get = async |path: &str, shown: &str| {
        let request = Request::get(sidecar.url(path)).header("authorization", shown);
        sidecar.send(request.body(Full::default()).unwrap()).await
    };
    for path in ["/v1/keys", "/metrics", "/v1/audit"] {
        let response = sidecar.get(path).await;
        response.refused(401, "unauthorized");
        assert_eq!(response.headers["www-authenticate"], "Bearer");
        for shown in [
            "Bearer",
            "Bearer ",
            "Bearer 0123456789abcdeF",
            "Bearer 0123456789abcde",
            "Basic 0123456789abcdef",
            TOKEN,
        ] {
            get(path, shown).await.refused(401, "unauthorized");
        }
        assert_eq!(get(path, &format!("Bearer {TOKEN}")).await.status, 200);
        assert_eq!(get(path, &format!("bearer  {TOKEN}")).await.status, 200);
    }
    // Probes need no token; with a token, the host is not checked.
    assert_eq!(sidecar.get("/livez").await.status, 200);
    assert_eq!(sidecar.get("/readyz").await.status, 200);
    let request = Request::get(sidecar.url("/v1/keys"))
        .header("host", "oncegate.internal")
        .header("authorization", format!("Bearer {TOKEN}"));
    assert_eq!(sidecar.send(request.body(Full::default()).unwrap()).await.status, 200);
}

#[tokio::test]
async fn readiness_follows_the_store_and_the_drain() {
    let sidecar = Sidecar::start().await;
    let ready = async || {
        let response = sidecar.get("/readyz").await;
        (response.status, response.text())
    };
    assert_eq!(ready().await, (200, "ready\n".to_owned()));
    sidecar.is_away.store(true, Ordering::SeqCst);
    let detail = sidecar.get("/v1/keys").await.refused(503, "store-unavailable");
    assert!(detail.starts_with("the disk is full."), "{detail}");
    // The first command that fails opens the breaker.
    until("it is known", async || {
        let (status, text) = ready().await;
        status == 503
            && text.starts_with("the store is out of reach: the disk is full")
            && text.lines().count() == 1
    })
    .await;
    assert_eq!(sidecar.get("/livez").await.status, 200);
    let detail = sidecar.get("/v1/keys").await.refused(503, "store-unavailable");
    assert!(detail.starts_with("the store is unreachable"), "{detail}");
    let text = sidecar.get("/metrics").await.text();
    let breaker = |text: &str, state: &str| series(text, &format!("oncegate_breaker{{state=\"{state}\"}}"));
    assert_eq!(series(&text, "oncegate_degraded"), 1.0);
    assert_eq!(series(&text, "oncegate_breaker_openings_total"), 1.0);
    assert_eq!((breaker(&text, "closed"), breaker(&text, "open")), (0.0, 1.0));
    sidecar.is_away.store(false, Ordering::SeqCst);
    until("it is ready", async || ready().await.0 == 200).await;
    // One command that succeeds closes it.
    assert_eq!(sidecar.get("/v1/keys").await.status, 200);
    let text = sidecar.get("/metrics").await.text();
    assert_eq!((breaker(&text, "closed"), breaker(&text, "open")), (1.0, 0.0));
    assert_eq!(series(&text, "oncegate_degraded"), 0.0);
    sidecar.draining.begin();
    assert_eq!(ready().await, (503, "stopping\n".to_owned()));
    assert_eq!(sidecar.get("/livez").await.status, 200);
}

/// The value of a series, by its name and labels as they are written.
fn series(text: &str, name: &str) -> f64 {
    let line = text.lines().find(|line| line.split(' ').next() == Some(name));
    let line = line.unwrap_or_else(|| panic!("no {name} in\n{text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[tokio::test]
async fn every_outcome_is_counted_and_no_label_names_a_caller() {
    let sidecar = Sidecar::start().await;
    let metrics = async || sidecar.get("/metrics").await.text();
    let requests = |text: &str, outcome: &str, status: &str| {
        series(text, &format!("oncegate_requests_total{{outcome=\"{outcome}\",status=\"{status}\"}}"))
    };
    let events =
        |text: &str, event: &str| series(text, &format!("oncegate_events_total{{event=\"{event}\"}}"));

    // Every series exists from the start, as zero.
    let text = metrics().await;
    for condition in oncegate_http::Condition::ALL {
        // With a key these requests have another outcome, and without a key they count as passed on.
        if ["upstream-unanswered", "upstream-head-too-large", "upstream-unsupported"]
            .contains(&condition.slug())
        {
            assert!(!text.contains(condition.slug()), "{text}");
            continue;
        }
        let class = format!("{}xx", condition.status().as_u16() / 100);
        assert_eq!(requests(&text, condition.slug(), &class), 0.0);
    }
    for event in ["executing", "replayed", "fenced", "settlement-lost", "claim-cancelled", "other"] {
        assert_eq!(events(&text, event), 0.0);
    }

    let secret: &[_] = &[("idempotency-key", "SECRET-KEY"), ("authorization", "SECRET-CREDENTIAL")];
    sidecar.call("/SECRET-PATH", secret, b"x").await;
    sidecar.call("/SECRET-PATH", secret, b"x").await;
    sidecar.call("/SECRET-PATH", secret, b"SECRET-BODY").await;
    sidecar.call("/pay", &[], b"x").await;
    sidecar.call("/pay", &[("idempotency-key", "a,b")], b"x").await;
    sidecar.is_away.store(true, Ordering::SeqCst);
    sidecar.call("/pay", secret, b"x").await;
    until("it is degraded", async || series(&metrics().await, "oncegate_degraded") == 1.0).await;
    let text = metrics().await;
    assert_eq!(requests(&text, "executed", "2xx"), 1.0);
    assert_eq!(requests(&text, "replayed", "2xx"), 1.0);
    assert_eq!(requests(&text, "key-reused", "4xx"), 1.0);
    assert_eq!(requests(&text, "unprotected", "none"), 1.0);
    assert_eq!(requests(&text, "key-invalid", "4xx"), 1.0);
    assert_eq!(requests(&text, "store-unavailable", "5xx"), 1.0);
    let total: f64 = text
        .lines()
        .filter(|line| line.starts_with("oncegate_requests_total{"))
        .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
        .sum();
    assert_eq!(total, 6.0);
    for event in ["executing", "executed", "completed", "replayed", "mismatch", "claim-failed"] {
        assert_eq!(events(&text, event), 1.0, "{event}");
    }
    assert_eq!(series(&text, "oncegate_store_errors_total{during=\"claim\",kind=\"unavailable\"}"), 1.0);
    assert!(series(&text, "oncegate_store_duration_seconds_count{command=\"claim\"}") >= 4.0);
    assert_eq!(series(&text, "oncegate_store_duration_seconds_count{command=\"complete\"}"), 1.0);
    let purges = series(&text, "oncegate_store_duration_seconds_count{command=\"purge\"}");
    assert_eq!(series(&text, "oncegate_attempt_duration_seconds_count"), 1.0);
    assert_eq!(series(&text, "oncegate_executing"), 0.0);
    assert_eq!(series(&text, "oncegate_records_in_flight"), 0.0);
    assert!(
        text.contains(
            "oncegate_store_info{store=\"memory\",place=\"process\",durability=\"volatile\",fencing=\"monotonic\"} 1"
        )
    );
    assert!(text.contains(&format!("oncegate_build_info{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION"))));
    assert!(!text.contains("SECRET") && !text.contains("/pay"), "{text}");

    sidecar.is_away.store(false, Ordering::SeqCst);
    let responses = async || sidecar.call("/pay", secret, b"x").await.status == 201;
    until("the store is used again", responses).await;
    sidecar.engine.store().purge(1).await.unwrap();
    let more = series(&metrics().await, "oncegate_store_duration_seconds_count{command=\"purge\"}");
    assert!(more > purges);
    sidecar.metrics.observe_upstream(UpstreamResult::TimedOut, Duration::from_secs(2), None);
    sidecar.draining.begin();
    let text = metrics().await;
    assert_eq!(series(&text, "oncegate_degraded"), 0.0);
    assert_eq!(series(&text, "oncegate_draining"), 1.0);
    assert_eq!(series(&text, "oncegate_upstream_duration_seconds_sum{result=\"timed-out\"}"), 2.0);
}

#[tokio::test]
async fn the_gauge_of_executing_attempts_counts_dropped_ones_down() {
    let sidecar = Sidecar::start().await;
    let gauge = async |name: &str| series(&sidecar.get("/metrics").await.text(), name);
    let request = |number: u8| oncegate_engine::ClaimRequest {
        id: RecordId::from_bytes([number; 32]),
        fingerprint: Fingerprint::of_parts("test", &[]),
        label: Label::default(),
        policy: oncegate_engine::Policy::default(),
    };
    let mut permits = Vec::new();
    for number in 1..=3 {
        match sidecar.engine.claim(request(number)).await.unwrap() {
            oncegate_engine::ClaimOutcome::Execute(permit) => permits.push(permit),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(gauge("oncegate_executing").await, 3.0);
    assert_eq!(gauge("oncegate_records_in_flight").await, 3.0);
    permits.pop().unwrap().release().await;
    drop(permits.pop());
    assert_eq!(gauge("oncegate_executing").await, 1.0);
    sidecar.clock.advance(Duration::from_secs(60));
    // The policy allows to take over an abandoned attempt.
    let policy = oncegate_engine::Policy::default().with_on_abandoned(OnAbandoned::Reexecute);
    let taken = sidecar.engine.claim(oncegate_engine::ClaimRequest { policy, ..request(2) }).await.unwrap();
    assert!(matches!(taken, oncegate_engine::ClaimOutcome::Execute(_)));
    assert_eq!(gauge("oncegate_takeovers_total").await, 1.0);
    assert_eq!(gauge("oncegate_executing").await, 2.0);
    // A dropped permit does not count as an execution.
    assert_eq!(gauge("oncegate_attempt_duration_seconds_count").await, 1.0);
}

#[tokio::test]
async fn the_admin_api_ends_when_it_is_stopped() {
    let mut sidecar = Sidecar::start().await;
    assert_eq!(sidecar.get("/livez").await.status, 200);
    drop(sidecar.stop.take());
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    while tokio::net::TcpStream::connect(sidecar.address).await.is_ok() {
        assert!(tokio::time::Instant::now() < deadline, "still listens");
        tokio::task::yield_now().await;
    }
}

/// Anyone may ask for the metrics, and health checks must not wait for their texts.
#[test]
fn questions_for_metrics_that_wait_share_one_text() {
    let expositions = Expositions::default();
    let mut renders = 0;
    let mut ask = |asked_at| {
        expositions.get(Exposition::Prometheus, asked_at, || {
            renders += 1;
            Some(renders.to_string())
        })
    };
    let before = tokio::time::Instant::now();
    for _ in 0..100 {
        assert_eq!(ask(before).as_deref(), Some(&b"1"[..]));
    }
    let (written, mut later) = (tokio::time::Instant::now(), before);
    while later <= written {
        later = tokio::time::Instant::now();
    }
    assert_eq!(ask(later).as_deref(), Some(&b"2"[..]));
}

#[tokio::test]
async fn a_few_large_responses_are_sent_at_a_time() {
    let places = Arc::new(Semaphore::new(MAX_LARGE_RESPONSES));
    let large = || Response::new(Body::from(vec![b'x'; 2 * 1024 * 1024]));
    let mut held = Vec::new();
    for _ in 0..MAX_LARGE_RESPONSES {
        let (response, place) = with_place(large(), &places).await;
        assert_eq!(response.status(), 200);
        held.push(place.unwrap());
    }
    let (refused, place) = with_place(large(), &places).await;
    assert_eq!((refused.status().as_u16(), place.is_none()), (503, true));
    assert!(refused.headers().contains_key(ADMIN_FIELD));
    let (small, place) = with_place(Response::new(Body::from("small")), &places).await;
    assert!(small.status() == 200 && place.is_none());
    held.pop();
    assert!(with_place(large(), &places).await.1.is_some());
}
