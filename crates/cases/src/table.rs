//! What a case is, and how it is run.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use crate::backend::MARK;
use crate::client::{Answer, Request};
use crate::places;
use crate::plan::Plan;
use crate::world::{Door, Kind, World};

pub use crate::cases::cases;

/// One case: what is given, and what then happens.
pub struct Case {
    /// Its identifier. `C..` are those of the published list of black-box cases, `S3-..` the rows of the protocol's table.
    pub id: &'static str,
    /// What it says, in one line.
    pub title: &'static str,
    /// What is given.
    pub given: Plan,
    /// What then happens.
    pub then: Then,
    /// Where it makes no sense, and why.
    pub not_at: Vec<(Place, &'static str)>,
}

/// Where a case may make no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// At a door.
    Door(Door),
    /// On a store.
    Store(Kind),
    /// At a door on a store.
    Both(Door, Kind),
}

/// What happens in a case.
pub enum Then {
    /// Requests, one after the other, each with what it must come to.
    Steps(fn() -> Vec<Step>),
    /// Whatever the function does.
    Code(fn(World) -> Running),
    /// The same, but the function opens the door itself.
    Closed(fn(World) -> Running),
}

/// A case that runs.
pub type Running = Pin<Box<dyn Future<Output = ()>>>;

impl Case {
    /// A case that is a list of requests.
    #[must_use]
    pub fn steps(id: &'static str, title: &'static str, steps: fn() -> Vec<Step>) -> Self {
        Self { id, title, given: Plan::default(), then: Then::Steps(steps), not_at: Vec::new() }
    }

    /// A case that is a function, which finds the door open.
    #[must_use]
    pub fn code(id: &'static str, title: &'static str, run: fn(World) -> Running) -> Self {
        Self { id, title, given: Plan::default(), then: Then::Code(run), not_at: Vec::new() }
    }

    /// A case that is a function, which opens the door itself.
    #[must_use]
    pub fn closed(id: &'static str, title: &'static str, run: fn(World) -> Running) -> Self {
        Self { id, title, given: Plan::default(), then: Then::Closed(run), not_at: Vec::new() }
    }

    /// With these settings.
    #[must_use]
    pub fn given(mut self, given: Plan) -> Self {
        self.given = given;
        self
    }

    /// Not at the sidecar.
    #[must_use]
    pub fn only_layer(mut self, why: &'static str) -> Self {
        self.not_at.push((Place::Door(Door::Sidecar), why));
        self
    }

    /// Not at the layer.
    #[must_use]
    pub fn only_sidecar(mut self, why: &'static str) -> Self {
        self.not_at.push((Place::Door(Door::Layer), why));
        self
    }

    /// Not on the store in memory.
    #[must_use]
    pub fn only_durable(mut self, why: &'static str) -> Self {
        self.not_at.push((Place::Store(Kind::Memory), why));
        self
    }

    /// Not at the sidecar on a store that only one process can have.
    #[must_use]
    pub fn two_processes(mut self) -> Self {
        for kind in Kind::OF_ONE_PROCESS {
            self.not_at.push((Place::Both(Door::Sidecar, kind), "only one process can have this store"));
        }
        self
    }

    /// Not there.
    #[must_use]
    pub fn not(mut self, place: Place, why: &'static str) -> Self {
        self.not_at.push((place, why));
        self
    }

    /// Why it makes no sense there, if it does not.
    #[must_use]
    pub fn reason_against(&self, door: Door, kind: Kind) -> Option<&'static str> {
        let named = self.not_at.iter().find(|(place, _)| match *place {
            Place::Door(d) => d == door,
            Place::Store(k) => k == kind,
            Place::Both(d, k) => d == door && k == kind,
        });
        named.map(|(_, why)| *why)
    }

    /// The name of its test there.
    #[must_use]
    pub fn name(&self, door: Door, kind: Kind) -> String {
        format!("{}/{}/{}", door.name(), kind.name(), self.id)
    }

    /// Runs it there; panics where it comes to something else than it must.
    pub fn run(&self, door: Door, kind: Kind) {
        // It outlives the runtime: nobody else gets it while something of this case may still be running.
        let place = Arc::new(places::Place::take(kind));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let (given, place) = (self.given.clone(), place.clone());
            match self.then {
                Then::Steps(steps) => run_steps(World::open(door, place, given).await, steps()).await,
                Then::Code(run) => run(World::open(door, place, given).await).await,
                Then::Closed(run) => run(World::closed(door, place, given)).await,
            }
        });
    }
}

/// One request and what it must come to.
pub struct Step {
    request: Request,
    expect: Expect,
    status: Option<u16>,
}

/// What a request must come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// It takes effect, and gets the answer of that.
    Executes,
    /// It takes effect as if there were no layer.
    Passes,
    /// It gets the answer of the step with this number, counted from 0.
    Replays(usize),
    /// It is refused under this slug.
    Refused(&'static str),
    /// The server itself refuses it before any layer sees it, or the layer does.
    Rejected,
    /// It is refused or takes effect, but gets nobody's earlier answer.
    NotReplayed,
}

/// It takes effect, and gets the answer of that.
pub fn executes(request: Request) -> Step {
    Step { request, expect: Expect::Executes, status: None }
}

/// It takes effect as if there were no layer.
pub fn passes(request: Request) -> Step {
    Step { request, expect: Expect::Passes, status: None }
}

/// It gets the answer of the step with this number, counted from 0.
pub fn replays(of: usize, request: Request) -> Step {
    Step { request, expect: Expect::Replays(of), status: None }
}

/// It is refused under this slug.
pub fn refused(slug: &'static str, request: Request) -> Step {
    Step { request, expect: Expect::Refused(slug), status: None }
}

/// It is refused by whoever sees it first, and does not take effect.
pub fn rejected(request: Request) -> Step {
    Step { request, expect: Expect::Rejected, status: None }
}

impl Step {
    /// It is refused or takes effect, but gets nobody's earlier answer.
    #[must_use]
    pub fn not_replayed(request: Request) -> Self {
        Self { request, expect: Expect::NotReplayed, status: None }
    }

    /// Under this status, where it is not 201.
    #[must_use]
    pub fn status(mut self, status: u16) -> Self {
        self.status = Some(status);
        self
    }
}

async fn run_steps(world: World, steps: Vec<Step>) {
    let mut answers: Vec<Answer> = Vec::new();
    for (number, step) in steps.into_iter().enumerate() {
        let before = world.backend.effects();
        let answer = world.send(step.request.clone()).await;
        let effects = world.backend.effects() - before;
        let shown = format!(
            "step {number}, {} {} key {:?}: {answer:?}",
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
                assert_eq!(answer.status(), step.status.unwrap_or(201), "{shown}");
                assert_fresh(&world.plan, &step.request, &answer);
            }
            Expect::Passes => {
                assert_eq!(answer.status(), step.status.unwrap_or(201), "{shown}");
                assert_eq!(answer.get(world.plan.marker()), None, "{shown}");
                assert_eq!(answer.get(world.plan.carrier()), None, "{shown}");
            }
            Expect::Replays(of) => assert_replay(&world.plan, &step.request, &answers[of], &answer),
            Expect::Refused(slug) => assert_refusal(slug, &answer),
            Expect::NotReplayed => assert_eq!(answer.get(world.plan.marker()), None, "{shown}"),
            Expect::Rejected => assert!((400..500).contains(&answer.status()), "{shown}"),
        }
        answers.push(answer);
    }
}

/// The answer is the first one under its key: no marker, and the key as it was sent.
pub fn assert_fresh(plan: &Plan, request: &Request, answer: &Answer) {
    assert_eq!(answer.get(plan.marker()), None, "marked as a replay: {answer:?}");
    assert_echo(plan, request, answer);
}

/// The answer is the earlier one again, marked, with the key as it was sent this time.
pub fn assert_replay(plan: &Plan, request: &Request, first: &Answer, again: &Answer) {
    assert_eq!(again.status(), first.status(), "{again:?}\nfirst {first:?}");
    assert_eq!(again.body, first.body, "{again:?}\nfirst {first:?}");
    assert_eq!(again.get("content-type"), first.get("content-type"), "{again:?}\nfirst {first:?}");
    assert_eq!(again.get(plan.marker()), Some("true"), "not marked as a replay: {again:?}");
    assert_echo(plan, request, again);
    assert!(plan.key_json.is_none() || again.all(plan.carrier()) == first.all(plan.carrier()), "{again:?}");
}

/// The answer has the key's field as it was sent, once; or the key that was built of the body.
pub fn assert_echo(plan: &Plan, request: &Request, answer: &Answer) {
    if plan.key_json.is_some() {
        let [key] = answer.all(plan.carrier())[..] else { panic!("no key, or several: {answer:?}") };
        assert!(key.starts_with(b"\"json-") && key.ends_with(b"\"") && key.len() == 71, "{answer:?}");
        return;
    }
    let sent = request.sent(plan.carrier()).expect("a key").trim_ascii();
    assert_eq!(answer.all(plan.carrier()), [sent], "the key as it was sent: {answer:?}");
}

/// Status; what the caller should do next and the title where the protocol names them.
const REFUSALS: &[(&str, u16, Option<&str>, Option<&str>)] = &[
    ("key-missing", 400, Some("fix-request"), Some("Idempotency-Key is missing")),
    ("key-invalid", 400, Some("fix-request"), None),
    ("request-too-large", 413, Some("fix-request"), None),
    ("request-incomplete", 400, None, None),
    ("overloaded", 503, Some("same-key"), None),
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

/// The answer is a refusal under this slug, with the status of the protocol's table.
pub fn assert_refusal(slug: &str, answer: &Answer) {
    let row = REFUSALS.iter().find(|row| row.0 == slug).expect("a slug of the protocol");
    assert_problem(slug, row.1, answer);
}

/// The answer is a refusal under this slug and status.
pub fn assert_problem(slug: &str, status: u16, answer: &Answer) {
    let &(_, _, retry, title) = REFUSALS.iter().find(|row| row.0 == slug).expect("a slug of the protocol");
    assert_eq!(answer.status(), status, "{slug}: {answer:?}");
    assert_eq!(answer.get("content-type"), Some("application/problem+json"), "{answer:?}");
    assert_eq!(answer.get("cache-control"), Some("no-store"), "{answer:?}");
    assert_eq!(answer.get("age"), None, "{answer:?}");
    assert_eq!(answer.get("idempotent-replayed"), None, "{answer:?}");
    let problem = answer.json();
    assert_eq!(problem["type"], format!("urn:oncegate:problem:{slug}"), "{answer:?}");
    assert_eq!(problem["status"], status, "{answer:?}");
    match retry {
        Some(retry) => assert_eq!(problem["retry"], retry, "{answer:?}"),
        None => assert!(problem["retry"].is_string(), "{answer:?}"),
    }
    match title {
        Some(title) => assert_eq!(problem["title"], title, "{answer:?}"),
        None => assert!(problem["title"].as_str().is_some_and(|title| !title.is_empty()), "{answer:?}"),
    }
    assert!(
        !String::from_utf8_lossy(&answer.body).contains(MARK),
        "tells what the first one got: {answer:?}"
    );
    if matches!(slug, "request-in-progress" | "store-unavailable" | "overloaded") {
        retry_after(answer);
    }
}

/// The seconds in `Retry-After`, at least 1.
pub fn retry_after(answer: &Answer) -> u64 {
    let seconds = answer.get("retry-after").and_then(|text| text.parse().ok());
    let seconds = seconds.unwrap_or_else(|| panic!("no Retry-After in seconds: {answer:?}"));
    assert!(seconds >= 1, "{answer:?}");
    seconds
}
