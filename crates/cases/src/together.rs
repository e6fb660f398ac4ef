//! The sidecar, the layer and the libraries together on one store: one key has one effect among all of them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use oncegate_core::OnAbandoned;
use oncegate_testkit::Latch;

use crate::backend::{Script, attempt, token};
use crate::client::{Request, Response};
use crate::databases::TestDatabase;
use crate::library::Library;
use crate::plan::Plan;
use crate::process::{Process, ask, ask_until_settled, start_ask};
use crate::table::{Running, assert_fresh, assert_refusal, assert_replay};
use crate::world::{Deployment, StoreKind, World};

/// The deployments that share a store.
pub const OWNERS: [Deployment; 5] = [
    Deployment::Sidecar,
    Deployment::Layer,
    Deployment::Library(Library::Node),
    Deployment::Library(Library::Python),
    Deployment::Library(Library::Go),
];

/// The stores that they share.
pub const STORES: [StoreKind; 2] = [StoreKind::Postgres, StoreKind::Redis];

/// Long enough that an owner on a busy machine renews it in time.
const LEASE: Duration = Duration::from_secs(2);

/// Callers of one key at a time.
const CALLERS: usize = 40;

/// A scenario with all deployments.
pub struct Scenario {
    /// The name of the behaviour, in the name of the test.
    pub name: String,
    run: Box<dyn Fn(World) -> Running + Send + Sync>,
}

/// All scenarios.
#[must_use]
pub fn scenarios() -> Vec<Scenario> {
    let mut all = vec![
        scenario("one-key-has-one-effect".to_owned(), |world| Box::pin(one_effect(world))),
        scenario("each-replays-what-the-others-stored".to_owned(), |world| Box::pin(replays(world, false))),
        scenario("each-opens-what-the-others-sealed".to_owned(), |world| Box::pin(replays(world, true))),
    ];
    for (number, owner) in OWNERS.into_iter().enumerate() {
        for policy in [OnAbandoned::Park, OnAbandoned::Reexecute] {
            let name = format!("killed-{}-{}", owner.name(), format!("{policy:?}").to_lowercase());
            all.push(scenario(name, move |world| Box::pin(killed(world, owner, policy))));
        }
        // Each takes over from one of the others.
        let successor = OWNERS[(number + 1) % OWNERS.len()];
        let name = format!("stopped-{}-is-fenced-by-{}", owner.name(), successor.name());
        all.push(scenario(name, move |world| Box::pin(stopped(world, owner, successor))));
    }
    all
}

fn scenario(name: String, run: impl Fn(World) -> Running + Send + Sync + 'static) -> Scenario {
    Scenario { name, run: Box::new(run) }
}

impl Scenario {
    /// Runs the scenario on a store.
    ///
    /// # Panics
    /// If a result differs from the expected one.
    pub fn run(&self, store: StoreKind) {
        // It outlives the runtime, as that of a case.
        let database = Arc::new(TestDatabase::take(store));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.expect("a runtime").block_on((self.run)(World::new(
            Deployment::Sidecar,
            database,
            Plan::default(),
        )));
    }
}

/// The backend of all deployments.
struct Together {
    world: World,
    /// The address of the backend for deployments that forward HTTP.
    upstream: SocketAddr,
}

impl Together {
    async fn new(mut world: World) -> Self {
        let upstream = world.serve_backend().await;
        world.serve_case().await;
        Self { world, upstream }
    }

    /// Starts a process of a deployment, which can be killed.
    async fn start(&self, deployment: Deployment, plan: &Plan) -> Process {
        let store = self.world.store_url().expect("a store of several processes");
        Process::start(&self.world, deployment, plan, &store, self.upstream).await
    }

    /// Starts every deployment. The libraries share processes with other cases.
    async fn start_all(&self, plan: &Plan) -> Vec<Process> {
        let mut all = Vec::new();
        for deployment in OWNERS {
            all.push(match deployment {
                Deployment::Library(library) => {
                    Process::Library(self.world.open_library(library, plan, false).await)
                }
                other => self.start(other, plan).await,
            });
        }
        all
    }
}

/// The header lines that are the same in every replay, in their order within each name. How a body is delimited is up to the
/// server: net/http sends large ones in chunks.
fn replayed_fields(response: &Response) -> Vec<(String, Vec<u8>)> {
    let of_connection = ["connection", "keep-alive", "date", "content-length", "transfer-encoding"];
    let lines = response.head.fields.iter().map(|(name, value)| (name.to_lowercase(), value.clone()));
    let mut lines: Vec<_> = lines.filter(|(name, _)| !of_connection.contains(&name.as_str())).collect();
    lines.sort_by(|(one, _), (other, _)| one.cmp(other));
    lines
}

/// A response with fields that a record keeps, and some that it does not.
fn full(status: u16, media_type: &str, body: impl Into<Bytes>) -> Script {
    Script::whole(status, media_type, body)
        .field("etag", "\"v1\"")
        .field("link", "</b>; rel=\"next\"")
        .field("link", "</a>; rel=\"prev\"")
        .field("location", "/payments/1?x=%20")
        .field("content-disposition", b"attachment; filename=\"\xfc\"")
        .field("x-not-kept", "1")
        .field("set-cookie", "session=secret")
}

async fn one_effect(world: World) {
    let methods = [Method::POST, Method::PATCH, Method::PUT, Method::DELETE];
    let plan =
        Plan { wait: Some(Duration::from_secs(60)), methods: Some(methods.to_vec()), ..world.plan.clone() };
    let together = Together::new(world).await;
    let all = together.start_all(&plan).await;
    let body = Bytes::from_iter((0..=255).cycle().take(5000));
    for (round, method) in methods.iter().chain(&methods).enumerate() {
        let request = Request::new(method.as_str(), &format!("/payments/a%2Fb/{round}?x=1&y=%C3%BC"))
            .key(format!("key-{round}"))
            .json(r#"{"amount":1000,"currency":"usd","lines":[1.0,{"b":null,"a":"\u00fc"}]}"#)
            .script(full(201, "application/octet-stream", body.clone()));
        let request = together.world.ready(request);
        let callers: Vec<_> = (0..CALLERS)
            .map(|caller| start_ask(&all[(caller + round) % all.len()], request.clone()))
            .collect();
        let mut responses = Vec::new();
        for caller in callers {
            responses.push(caller.await.unwrap().expect("a response"));
        }
        let (fresh, again): (Vec<_>, Vec<_>) =
            responses.iter().partition(|response| response.get(plan.marker()).is_none());
        assert_eq!(fresh.len(), 1, "{method}: {fresh:?}");
        assert_eq!(together.world.backend.effects(), round + 1, "{method}");
        assert_fresh(&plan, &request, fresh[0]);
        assert_eq!((fresh[0].status(), &fresh[0].body), (201, &body), "{method}");
        for replay in again {
            assert_replay(&plan, &request, fresh[0], replay);
        }
    }
}

/// Each deployment stores responses, which all others replay, byte by byte and field by field.
async fn replays(world: World, seals: bool) {
    let plan = Plan { seals, ..world.plan.clone() };
    let together = Together::new(world).await;
    let all = together.start_all(&plan).await;
    let large: Vec<u8> = (0..=255).cycle().take(400_000).collect();
    let scripts = [
        Script::default(),
        full(200, "image/png", large),
        full(404, "text/plain; charset=utf-8", "\u{fc} not found"),
        full(503, "application/json", "{}").field("retry-after", "7"),
        Script::empty(204),
    ];
    let store = together.world.open_operators_store().await;
    for (owner, writer) in all.iter().enumerate() {
        for (number, script) in scripts.iter().enumerate() {
            let shown = format!("response {number} of {}", OWNERS[owner].name());
            let before = together.world.backend.effects();
            let request = Request::post("/payments?x=1").key(format!("\"key {owner} {number}\""));
            let request = request.json(r#"{"b": 1.50, "a": "é"}"#);
            let first = ask(writer, &together.world.ready(request.clone().script(script.clone()))).await;
            assert_fresh(&plan, &request, &first);
            let mut fields = None;
            for (other, reader) in all.iter().enumerate() {
                let shown = format!("{shown}, read by {}", OWNERS[other].name());
                // An equal body, written in another way.
                let equal = request.clone().json("{\"a\":\"\\u00e9\",\"b\":1.5}");
                let again = ask(reader, &equal).await;
                assert_replay(&plan, &request, &first, &again);
                let again = replayed_fields(&again);
                assert_eq!(*fields.get_or_insert_with(|| again.clone()), again, "{shown}");
                assert_refusal(
                    "key-reused",
                    &ask(reader, &request.clone().json(r#"{"b":1.51,"a":"é"}"#)).await,
                );
            }
            assert_eq!(together.world.backend.effects(), before + 1, "{shown}");
        }
    }
    // All that the store has is sealed.
    let page = store.list(oncegate_core::ListQuery::default()).await.expect("a list");
    let sealed =
        page.records.iter().filter(|(_, record)| oncegate_seal::SealInfo::of_record(record).next().is_some());
    let expected = if seals { OWNERS.len() * scripts.len() } else { 0 };
    assert_eq!((page.records.len(), sealed.count()), (OWNERS.len() * scripts.len(), expected));
}

async fn killed(world: World, owner: Deployment, policy: OnAbandoned) {
    let plan = Plan { lease: Some(LEASE), on_abandoned: Some(policy), ..world.plan.clone() };
    let together = Together::new(world).await;
    let all = together.start_all(&plan).await;
    let mut victim = together.start(owner, &plan).await;
    let never = Latch::new();
    let request = Request::post("/payments").key("a").json("{}");
    let first = together.world.ready(request.clone().script(Script::default().held(&never)));
    let first = start_ask(&victim, first);
    together.world.backend.until_effects(1).await;
    for other in &all {
        assert_refusal("request-in-progress", &ask(other, &request).await);
    }
    victim.kill();
    assert!(first.await.unwrap().is_err(), "a response from a process that was killed");
    let mut responses = Vec::new();
    // All of them at the same time, when the lease ends.
    let asking: Vec<_> = all.iter().map(|other| ask_until_settled(other, &request)).collect();
    for asked in futures_of(asking).await {
        responses.push(asked);
    }
    let backend = &together.world.backend;
    if policy == OnAbandoned::Park {
        for response in &responses {
            assert_refusal("outcome-unknown", response);
        }
        assert_eq!(backend.effects(), 1);
    } else {
        let fresh: Vec<_> =
            responses.iter().filter(|response| response.get(plan.marker()).is_none()).collect();
        assert_eq!((fresh.len(), backend.effects()), (1, 2), "{responses:?}");
        assert_fresh(&plan, &request, fresh[0]);
        for again in responses.iter().filter(|response| response.get(plan.marker()).is_some()) {
            assert_replay(&plan, &request, fresh[0], again);
        }
        let seen = backend.seen();
        assert!(token(&seen[1]) > token(&seen[0]), "{seen:?}");
        assert_eq!((attempt(&seen[0]), attempt(&seen[1])), (1, 2));
    }
    never.open();
}

async fn stopped(world: World, owner: Deployment, successor: Deployment) {
    let plan = Plan { lease: Some(LEASE), on_abandoned: Some(OnAbandoned::Reexecute), ..world.plan.clone() };
    let together = Together::new(world).await;
    let all = together.start_all(&plan).await;
    let paused = together.start(owner, &plan).await;
    let successor = OWNERS.iter().position(|one| *one == successor).expect("one of them");
    let done = Latch::new();
    let request = Request::post("/payments").key("a").json("{}");
    let first = together.world.ready(request.clone().script(Script::default().held(&done)));
    let first = start_ask(&paused, first);
    let backend = &together.world.backend;
    backend.until_effects(1).await;
    paused.stop();
    let second = ask_until_settled(&all[successor], &request).await;
    assert_fresh(&plan, &request, &second);
    assert_eq!((second.status(), backend.effects()), (201, 2), "{second:?}");
    done.open();
    paused.resume();
    let first = first.await.unwrap().expect("a response");
    assert_fresh(&plan, &request, &first);
    assert_eq!((first.status(), first.get("idempotency-status")), (201, Some("fenced")), "{first:?}");
    assert_eq!(first.json()["effect"], 1, "its own client has its own response");
    for process in all.iter().chain([&paused]) {
        assert_replay(&plan, &request, &second, &ask_until_settled(process, &request).await);
    }
    let seen = backend.seen();
    assert!(token(&seen[1]) > token(&seen[0]), "{seen:?}");
    assert_eq!(backend.effects(), 2);
}

/// The outputs of all of these futures, which run at the same time.
async fn futures_of<T>(futures: Vec<impl Future<Output = T>>) -> Vec<T> {
    let mut futures: Vec<_> = futures.into_iter().map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|context| {
        let mut is_ready = true;
        for (future, output) in &mut futures {
            if output.is_none() {
                match future.as_mut().poll(context) {
                    std::task::Poll::Ready(ready) => *output = Some(ready),
                    std::task::Poll::Pending => is_ready = false,
                }
            }
        }
        if is_ready { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    futures.into_iter().filter_map(|(_, output)| output).collect()
}
