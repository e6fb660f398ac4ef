//! Cases and the code that runs them.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use crate::backend::{Backend, MARK};
use crate::client::{Request, Response};
use crate::databases;
use crate::framework::Framework;
use crate::library::Library;
use crate::plan::Plan;
use crate::world::{Deployment, StoreKind, World};

pub use crate::cases::cases;

/// One case: settings, and actions with their expected results.
pub struct Case {
    /// The name of the behaviour, in the names of tests.
    pub name: &'static str,
    /// The expected behaviour, in one line.
    pub title: &'static str,
    /// The settings.
    pub given: Plan,
    /// The requests, or the function that runs.
    pub action: Action,
    /// Runs the function with services on frameworks, too. Lists of requests always run with them.
    pub every_framework: bool,
    /// Lets the stores of libraries have faults.
    pub library_faults: bool,
    /// The targets on which the case is not run, each with the reason.
    pub excluded: Vec<(Target, &'static str)>,
}

/// A deployment, a store, or a combination of both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The deployment, on every store.
    Deployment(Deployment),
    /// The store, with every deployment.
    Store(StoreKind),
    /// The deployment on the store.
    Both(Deployment, StoreKind),
    /// Every library, on every store.
    Libraries,
    /// Every library on the store.
    LibrariesOn(StoreKind),
}

impl Target {
    fn includes(self, deployment: Deployment, store: StoreKind) -> bool {
        let is_library = matches!(deployment, Deployment::Library(_));
        let has_sidecar = deployment != Deployment::Layer && !is_library;
        let is_deployment = |named| named == deployment || named == Deployment::Sidecar && has_sidecar;
        match self {
            Self::Deployment(named) => is_deployment(named),
            Self::Store(named) => named == store,
            Self::Both(named, kind) => is_deployment(named) && kind == store,
            Self::Libraries => is_library,
            Self::LibrariesOn(kind) => is_library && kind == store,
        }
    }
}

/// The actions of a case.
pub enum Action {
    /// Requests, one after the other, each with its expected result.
    Steps(fn() -> Vec<Step>),
    /// A function that runs while the deployment runs.
    Run(fn(World) -> Running),
    /// A function that starts the deployment itself.
    Start(fn(World) -> Running),
}

/// A case that runs.
pub type Running = Pin<Box<dyn Future<Output = ()>>>;

/// The stores of cases at two sidecars: one of each kind that several processes share. More would only take longer.
const STORES_OF_TWO_SIDECARS: [StoreKind; 2] = [StoreKind::Redis, StoreKind::Postgres];

/// The store of cases with services on frameworks: no service depends on the store.
const STORE_OF_FRAMEWORKS: StoreKind = StoreKind::Embedded;

impl Case {
    /// A case that runs these actions, with default settings, on every target.
    #[must_use]
    pub fn new(name: &'static str, title: &'static str, action: Action) -> Self {
        Self {
            name,
            title,
            given: Plan::default(),
            action,
            every_framework: false,
            library_faults: false,
            excluded: Vec::new(),
        }
    }

    /// Sets the settings.
    #[must_use]
    pub fn given(mut self, given: Plan) -> Self {
        self.given = given;
        self
    }

    /// Excludes the sidecar and the libraries.
    #[must_use]
    pub fn only_layer(self, why: &'static str) -> Self {
        self.not(Target::Deployment(Deployment::Sidecar), why).without_libraries(why)
    }

    /// Excludes the layer and the libraries.
    #[must_use]
    pub fn only_sidecar(self, why: &'static str) -> Self {
        self.not(Target::Deployment(Deployment::Layer), why).without_libraries(why)
    }

    /// Includes the libraries, which [`Self::only_layer`] and [`Self::only_sidecar`] exclude.
    #[must_use]
    pub fn and_libraries(mut self) -> Self {
        self.excluded.retain(|(target, _)| *target != Target::Libraries);
        self
    }

    /// Includes the libraries, on the stores that can have faults.
    #[must_use]
    pub fn and_libraries_with_faults(mut self) -> Self {
        self.library_faults = true;
        self.and_libraries().not(
            Target::LibrariesOn(StoreKind::Memory),
            "a store in the memory of another process has no faults",
        )
    }

    /// Excludes every library.
    #[must_use]
    pub fn without_libraries(self, why: &'static str) -> Self {
        self.not(Target::Libraries, why)
    }

    /// Excludes one library.
    #[must_use]
    pub fn without_library(self, library: Library, why: &'static str) -> Self {
        self.not(Target::Deployment(Deployment::Library(library)), why)
    }

    /// Excludes the store in memory.
    #[must_use]
    pub fn only_durable(self, why: &'static str) -> Self {
        self.not(Target::Store(StoreKind::Memory), why)
    }

    /// Excludes the sidecar and the libraries on a store that only one process can open.
    #[must_use]
    pub fn two_processes(mut self) -> Self {
        let why = "only one process can open this store";
        for kind in StoreKind::OF_ONE_PROCESS {
            self = self.not(Target::Both(Deployment::Sidecar, kind), why).not(Target::LibrariesOn(kind), why);
        }
        self
    }

    /// Runs the function with services on frameworks, too.
    #[must_use]
    pub fn with_every_framework(self) -> Self {
        Self { every_framework: true, ..self }
    }

    /// Excludes services on these frameworks.
    #[must_use]
    pub fn without_frameworks(mut self, frameworks: &[Framework], why: &'static str) -> Self {
        let excluded = frameworks.iter().map(|one| (Target::Deployment(Deployment::SidecarOf(*one)), why));
        self.excluded.extend(excluded);
        self
    }

    /// Excludes deployments.
    #[must_use]
    pub fn without_deployments(mut self, deployments: &[Deployment], why: &'static str) -> Self {
        self.excluded.extend(deployments.iter().map(|one| (Target::Deployment(*one), why)));
        self
    }

    /// Excludes a target.
    #[must_use]
    pub fn not(mut self, target: Target, why: &'static str) -> Self {
        self.excluded.push((target, why));
        self
    }

    /// The reason why the case is not run on a target; `None` if it is run.
    #[must_use]
    pub fn reason_against(&self, deployment: Deployment, store: StoreKind) -> Option<&'static str> {
        let is_list = matches!(self.action, Action::Steps(_));
        match deployment {
            Deployment::TwoSidecars if !is_list => return Some("a function chooses its instances itself"),
            Deployment::TwoSidecars if !STORES_OF_TWO_SIDECARS.contains(&store) => {
                return Some("two processes cannot share this store, or one of its kind is enough");
            }
            Deployment::Sidecar if is_list && store.is_shared() => {
                return Some("two sidecars send lists of requests to stores that processes share");
            }
            Deployment::SidecarOf(_) if !is_list && !self.every_framework => {
                return Some("the function controls the service of this process");
            }
            Deployment::SidecarOf(_) if store != STORE_OF_FRAMEWORKS => return Some("one store is enough"),
            Deployment::Library(_) if !Library::STORES.contains(&store) => {
                return Some("no library has this store");
            }
            Deployment::Library(_) => {
                if let Some(why) = Library::reason_against(&self.given) {
                    return Some(why);
                }
            }
            _ => {}
        }
        let named = self.excluded.iter().find(|(target, _)| target.includes(deployment, store));
        named.map(|(_, why)| *why)
    }

    /// The name of the test of this case on a target.
    #[must_use]
    pub fn test_name(&self, deployment: Deployment, store: StoreKind) -> String {
        format!("{}/{}/{}", deployment.name(), store.name(), self.name)
    }

    /// Runs the case on a target.
    ///
    /// # Panics
    /// If a result differs from the expected one.
    pub fn run(&self, deployment: Deployment, store: StoreKind) {
        // It outlives the runtime: no other case gets the database while something of this case may still be running.
        let database = Arc::new(databases::TestDatabase::take(store));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let mut world = World::new(deployment, database.clone(), self.given.clone());
            let _shown = ShownOnPanic(world.backend.clone());
            if self.library_faults {
                world = world.with_faults();
            }
            match self.action {
                Action::Steps(steps) => {
                    world.start().await;
                    run_steps(world, steps()).await;
                }
                Action::Run(run) => {
                    world.start().await;
                    run(world).await;
                }
                Action::Start(run) => run(world.with_own_process()).await,
            }
        });
    }
}

/// A case that fails shows what its service received, which may not have come from the case.
struct ShownOnPanic(Backend);

impl Drop for ShownOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let seen = self.0.seen();
            eprintln!("the service received {} requests; the last ones:", seen.len());
            seen.iter().rev().take(10).for_each(|request| eprintln!("{request:?}"));
        }
    }
}

/// One request and its expected result.
pub struct Step {
    request: Request,
    expect: Expect,
    status: Option<u16>,
}

/// The expected result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// The request takes effect and gets the response of that execution.
    Executes,
    /// The request takes effect as if there were no layer.
    Passes,
    /// The request gets the response of the step with this number, counted from 0.
    Replays(usize),
    /// The request is refused with this slug.
    Refused(&'static str),
    /// The HTTP server or the layer refuses the request.
    Rejected,
    /// The request is refused or takes effect, but gets no earlier response.
    NotReplayed,
}

/// Expects that the request takes effect and gets the response of that execution.
pub fn executes(request: Request) -> Step {
    Step { request, expect: Expect::Executes, status: None }
}

/// Expects that the request takes effect as if there were no layer.
pub fn passes(request: Request) -> Step {
    Step { request, expect: Expect::Passes, status: None }
}

/// Expects the response of the step with this number, counted from 0.
pub fn replays(of: usize, request: Request) -> Step {
    Step { request, expect: Expect::Replays(of), status: None }
}

/// Expects a refusal with this slug.
pub fn refused(slug: &'static str, request: Request) -> Step {
    Step { request, expect: Expect::Refused(slug), status: None }
}

/// Expects that the HTTP server or the layer refuses the request, and that it takes no effect.
pub fn rejected(request: Request) -> Step {
    Step { request, expect: Expect::Rejected, status: None }
}

impl Step {
    /// Expects that the request is refused or takes effect, but gets no earlier response.
    #[must_use]
    pub fn not_replayed(request: Request) -> Self {
        Self { request, expect: Expect::NotReplayed, status: None }
    }

    /// Expects this status instead of 201, or instead of that of the refusal.
    #[must_use]
    pub fn status(mut self, status: u16) -> Self {
        self.status = Some(status);
        self
    }
}

async fn run_steps(world: World, steps: Vec<Step>) {
    let mut responses: Vec<Response> = Vec::new();
    for (number, step) in steps.into_iter().enumerate() {
        let before = world.backend.effects();
        let response = world.send(step.request.clone()).await;
        let effects = world.backend.effects() - before;
        let shown = format!(
            "step {number}, {} {} key {:?}: {response:?}",
            step.request.method,
            step.request.target,
            step.request.sent(world.plan.carrier()).map(|key| key.escape_ascii().to_string()),
        );
        let expected = match step.expect {
            Expect::Executes | Expect::Passes => 1,
            Expect::NotReplayed => effects.min(1),
            Expect::Replays(_) | Expect::Refused(_) | Expect::Rejected => 0,
        };
        assert_eq!(effects, expected, "effects of {shown}");
        match step.expect {
            Expect::Executes => {
                assert_eq!(response.status(), step.status.unwrap_or(201), "{shown}");
                assert_fresh(&world.plan, &step.request, &response);
            }
            Expect::Passes => {
                assert_eq!(response.status(), step.status.unwrap_or(201), "{shown}");
                assert_eq!(response.get(world.plan.marker()), None, "{shown}");
                assert_eq!(response.get(world.plan.carrier()), None, "{shown}");
            }
            Expect::Replays(of) => assert_replay(&world.plan, &step.request, &responses[of], &response),
            Expect::Refused(slug) => match step.status {
                Some(status) => assert_problem(slug, status, &response),
                None => assert_refusal(slug, &response),
            },
            Expect::NotReplayed => assert_eq!(response.get(world.plan.marker()), None, "{shown}"),
            Expect::Rejected => assert!((400..500).contains(&response.status()), "{shown}"),
        }
        responses.push(response);
    }
}

/// Asserts that the response is the first one under its key: no marker, and the key as it was sent.
pub fn assert_fresh(plan: &Plan, request: &Request, response: &Response) {
    assert_eq!(response.get(plan.marker()), None, "marked as a replay: {response:?}");
    assert_echo(plan, request, response);
}

/// Asserts that the response is a marked copy of the earlier one, with the key as it was sent this time.
pub fn assert_replay(plan: &Plan, request: &Request, first: &Response, again: &Response) {
    assert_eq!(again.status(), first.status(), "{again:?}\nfirst {first:?}");
    assert_eq!(again.body, first.body, "{again:?}\nfirst {first:?}");
    assert_eq!(again.get("content-type"), first.get("content-type"), "{again:?}\nfirst {first:?}");
    assert_eq!(again.get(plan.marker()), Some("true"), "not marked as a replay: {again:?}");
    assert_echo(plan, request, again);
    assert!(plan.key_json.is_none() || again.all(plan.carrier()) == first.all(plan.carrier()), "{again:?}");
}

/// Asserts that the response has the key as it was sent, once, or the key that was built from the body.
pub fn assert_echo(plan: &Plan, request: &Request, response: &Response) {
    if plan.key_json.is_some() {
        let [key] = response.all(plan.carrier())[..] else { panic!("no key, or several: {response:?}") };
        assert!(key.starts_with(b"\"json-") && key.ends_with(b"\"") && key.len() == 71, "{response:?}");
        return;
    }
    let sent = request.sent(plan.carrier()).expect("a key").trim_ascii();
    assert_eq!(response.all(plan.carrier()), [sent], "the key as it was sent: {response:?}");
}

/// Slug, status, and the members `retry` and `title` if the protocol defines them.
const REFUSALS: &[(&str, u16, Option<&str>, Option<&str>)] = &[
    ("key-missing", 400, Some("fix-request"), Some("Idempotency-Key is missing")),
    ("key-invalid", 400, Some("fix-request"), None),
    ("request-too-large", 413, Some("fix-request"), None),
    ("request-incomplete", 400, None, None),
    ("overloaded", 503, Some("same-key"), None),
    ("rate-limited", 429, Some("same-key"), None),
    ("replay-denied", 403, Some("stop"), None),
    ("authorization-unavailable", 503, Some("same-key"), None),
    ("response-sealed", 503, Some("same-key"), None),
    ("scope-unavailable", 400, Some("fix-request"), None),
    ("scope-not-set", 400, Some("fix-request"), None),
    ("store-unavailable", 503, Some("same-key"), None),
    ("key-reused", 422, Some("new-key"), Some("Idempotency-Key is already used")),
    ("host-differs", 422, Some("stop"), None),
    ("request-malformed", 400, Some("fix-request"), None),
    ("request-in-progress", 409, Some("same-key"), Some("A request is outstanding for this Idempotency-Key")),
    ("replay-unavailable", 422, Some("stop"), None),
    ("outcome-unknown", 500, Some("stop"), None),
    ("record-corrupt", 500, Some("stop"), None),
    ("handler-failed", 500, None, None),
    ("upstream-unreachable", 502, Some("same-key"), None),
];

/// Asserts that the response is a refusal with this slug and the status of the protocol's table.
pub fn assert_refusal(slug: &str, response: &Response) {
    let row = REFUSALS.iter().find(|row| row.0 == slug).expect("a slug of the protocol");
    assert_problem(slug, row.1, response);
}

/// Asserts that the response is a refusal with this slug and status.
pub fn assert_problem(slug: &str, status: u16, response: &Response) {
    let &(_, _, retry, title) = REFUSALS.iter().find(|row| row.0 == slug).expect("a slug of the protocol");
    assert_eq!(response.status(), status, "{slug}: {response:?}");
    assert_eq!(response.get("content-type"), Some("application/problem+json"), "{response:?}");
    assert_eq!(response.get("cache-control"), Some("no-store"), "{response:?}");
    assert_eq!(response.get("age"), None, "{response:?}");
    assert_eq!(response.get("idempotent-replayed"), None, "{response:?}");
    let problem = response.json();
    assert_eq!(problem["type"], format!("urn:oncegate:problem:{slug}"), "{response:?}");
    assert_eq!(problem["status"], status, "{response:?}");
    match retry {
        Some(retry) => assert_eq!(problem["retry"], retry, "{response:?}"),
        None => assert!(problem["retry"].is_string(), "{response:?}"),
    }
    match title {
        Some(title) => assert_eq!(problem["title"], title, "{response:?}"),
        None => assert!(problem["title"].as_str().is_some_and(|title| !title.is_empty()), "{response:?}"),
    }
    assert!(
        !String::from_utf8_lossy(&response.body).contains(MARK),
        "reveals the first response: {response:?}"
    );
    if matches!(slug, "request-in-progress" | "store-unavailable" | "overloaded" | "rate-limited") {
        retry_after(response);
    }
}

/// The seconds in `Retry-After`, at least 1.
pub fn retry_after(response: &Response) -> u64 {
    let seconds = response.get("retry-after").and_then(|text| text.parse().ok());
    let seconds = seconds.unwrap_or_else(|| panic!("no Retry-After in seconds: {response:?}"));
    assert!(seconds >= 1, "{response:?}");
    seconds
}
