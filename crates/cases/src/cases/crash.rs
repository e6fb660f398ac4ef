//! Processes that are killed, suspended and restarted.

use std::time::{Duration, Instant};

use bytes::Bytes;
use oncegate_core::OnAbandoned;
use oncegate_testkit::{Latch, until};

use super::{PAYMENT, pay_as};
use crate::backend::{Backend, Script, attempt, token};
use crate::client::{Connection, Request, Response, TIMEOUT};
use crate::plan::{FOUND, Plan, ReconcileReport};
use crate::process::{Process, ask, ask_until_settled, start_ask};
use crate::remote::StoreServer;
use crate::table::{Case, Target, assert_echo, assert_fresh, assert_refusal, assert_replay};
use crate::world::{Deployment, StoreKind, World};

const UNKNOWN: &str = "outcome-unknown";
const MEMORY: &str = "nothing in memory survives";
const IN_PROCESS: &str = "the layer cannot be killed without its client";

/// Long enough that a restart fits into it, short enough to wait for.
const LEASE: Duration = Duration::from_millis(1500);

/// The largest difference between two clocks of one machine.
const TICK: Duration = Duration::from_millis(100);

pub(super) fn cases() -> Vec<Case> {
    let park = Plan { lease: Some(LEASE), ..Plan::default() };
    let reexecute = Plan { on_abandoned: Some(OnAbandoned::Reexecute), ..park.clone() };
    let asking =
        |word| Plan { on_abandoned: Some(OnAbandoned::Reconcile), reconcile: Some(word), ..park.clone() };
    let at = |plan: &Plan, failpoint| Plan { failpoint: Some(failpoint), ..plan.clone() };
    let mut all = cases! {
        "killed-before-the-call": "park: killed between claim and call, the outcome is unknown, and nothing is called"
            .given(at(&park, "executing"))
            => start (killed_at, 0);
        "killed-after-the-call":
            "park: killed between response and completion, the outcome is unknown, and nothing is called again"
            .given(at(&park, "executed"))
            => start (killed_at, 1);
        "killed-before-the-call-reexecute": "reexecute: killed between claim and call, it is called once, as the second attempt"
            .given(at(&reexecute, "executing"))
            => start (killed_at, 0);
        "killed-after-the-call-reexecute":
            "reexecute: killed between response and completion, it is called again under a higher token"
            .given(at(&reexecute, "executed"))
            => start (killed_at, 1);
        "killed-after-the-completion": "killed between completion and response, the retry gets the response"
            .given(at(&park, "completed"))
            => start (killed_after_the_completion);
        "killed-after-the-completion-reexecute":
            "killed between completion and response, the retry gets the response, also under reexecute"
            .given(at(&reexecute, "completed"))
            => start (killed_after_the_completion);
        "killed-during-the-call": "park: killed while the service works, the outcome is unknown"
            .given(park.clone())
            => start (killed_during_the_call);
        "killed-during-the-call-reexecute": "reexecute: killed while the service works, it is called again"
            .given(reexecute.clone())
            => start (killed_during_the_call);
        "killed-during-the-call-reconcile-found":
            "reconcile: killed while the service works, the response of the service about it is replayed"
            .given(asking(ReconcileReport::Found))
            => start (killed_during_the_call);
        "killed-during-the-call-reconcile-not-found":
            "reconcile: killed while the service works, an attempt that did not happen is called again"
            .given(asking(ReconcileReport::NotFound))
            => start (killed_during_the_call);
        "killed-during-the-call-reconcile-unclear": "reconcile: killed while the service works, an unclear outcome is unknown"
            .given(asking(ReconcileReport::Unclear))
            => start (killed_during_the_call);
        "killed-twice": "reexecute: the attempt after one that died has a higher token"
            .given(Plan { lease: Some(Duration::from_millis(300)), ..reexecute.clone() })
            => start (killed_twice);
        "killed-under-load": "killed under load: every response is replayed unchanged, and nothing ran twice"
            // Longer than a claim takes under this load, because no request begins under a lease that is over.
            .given(Plan { lease: Some(Duration::from_secs(4)), ..Plan::default() })
            => start (killed_under_load);
        "tokens-grow-over-restarts": "tokens grow over releases, restarts and attempts"
            .given(park.clone())
            => start (tokens_over_restarts);
        "lease-lasts-over-a-restart": "a lease keeps its end over a restart"
            .given(Plan { lease: Some(Duration::from_secs(3)), ..park.clone() })
            => start (lease_over_restarts, 1);
        "lease-lasts-over-three-restarts": "a lease keeps its end over three restarts"
            .given(Plan { lease: Some(Duration::from_secs(4)), ..reexecute.clone() })
            => start (lease_over_restarts, 3);
        "retention-lasts-over-restarts": "a retention keeps its end over restarts"
            .given(Plan { retention: Some(Duration::from_secs(4)), ..park.clone() })
            => start (retention_over_restarts);
        "terminated-under-load-loses-nothing": "on SIGTERM it completes the requests that it has begun, and all records are found again"
            .given(park.clone())
            => start (terminated);
    };
    for case in &mut all {
        case.excluded.push((Target::Deployment(Deployment::Layer), IN_PROCESS));
        case.excluded.push((Target::Both(Deployment::Sidecar, StoreKind::Memory), MEMORY));
        case.excluded.push((Target::LibrariesOn(StoreKind::Memory), MEMORY));
    }
    all.extend(cases! {
        "stopped-beyond-the-lease-and-not-replaced":
            "stopped beyond its lease and resumed, an owner that was not replaced completes"
            .given(Plan { lease: Some(Duration::from_millis(300)), ..Plan::default() })
            .only_sidecar(IN_PROCESS)
            .and_libraries()
            => start (stopped_beyond_the_lease);
        "stopped-and-replaced-owner-is-fenced": "an owner that is suspended beyond its lease, and replaced by another process, is fenced"
            // Long enough that the first one, on a busy machine, does not lose its key before it is stopped.
            .given(Plan { lease: Some(Duration::from_secs(2)), ..reexecute.clone() })
            .two_processes()
            => start (stopped_and_replaced);
        "stopped-owner-is-parked-until-it-completes":
            "stopped beyond its lease, an owner leaves the outcome unknown until it completes"
            .given(Plan { lease: Some(Duration::from_millis(500)), ..park.clone() })
            .two_processes()
            => start (stopped_and_parked);
        "killed-owner-is-replaced-after-its-lease":
            "killed, an owner is replaced by another process once its lease is over, and not before"
            .given(reexecute.clone())
            .two_processes()
            => start (killed_and_replaced);
        "stopped-before-the-call-and-replaced":
            "stopped between claim and call and replaced by another process, an owner does not call"
            .given(Plan { lease: Some(Duration::from_secs(2)), ..reexecute.clone() })
            .only_sidecar(IN_PROCESS)
            .two_processes()
            => start (stopped_before_the_call_and_replaced);
        "stopped-before-the-call-and-not-replaced":
            "stopped between claim and call beyond its lease, an owner that was not replaced calls"
            .given(at(&Plan { lease: Some(Duration::from_millis(300)), ..reexecute.clone() }, "stop:executing"))
            .only_sidecar(IN_PROCESS)
            => start (stopped_before_the_call);
        "hundred-equal-requests-on-two-processes": "a hundred equal requests on two processes execute once"
            .two_processes()
            => start (hundred_on_two);
        "hundred-requests-wait-on-two-processes": "a hundred equal requests that wait on two processes get one response"
            .given(Plan { wait: Some(Duration::from_secs(60)), ..Plan::default() })
            .two_processes()
            => start (hundred_on_two);
    });
    all
}

async fn start_cleanly(world: &mut World) {
    world.end().await;
    world.plan.failpoint = None;
    world.start().await;
}

/// Kills the sidecar at the point of the plan, after this many calls, and retries until there is a response.
async fn killed_at(mut world: World, calls: usize) {
    let point = world.plan.failpoint.expect("a point");
    world.start().await;
    let asked = Instant::now();
    let first = world.start_send(pay_as("a"));
    world.sidecar().at_failpoint(point).await;
    assert_eq!(world.backend.effects(), calls);
    start_cleanly(&mut world).await;
    assert!(first.await.unwrap().is_err(), "a response from a process that was killed");
    after_the_kill(&world, asked, calls).await;
}

async fn killed_during_the_call(mut world: World) {
    world.start().await;
    let asked = Instant::now();
    let never = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::default().held(&never)));
    world.backend.until_effects(1).await;
    start_cleanly(&mut world).await;
    assert!(first.await.unwrap().is_err(), "a response from a process that was killed");
    after_the_kill(&world, asked, 1).await;
    never.open();
}

/// Checks a retry: in progress while the lease lasts, then as the policy demands.
async fn after_the_kill(world: &World, asked: Instant, calls: usize) {
    let mut again = world.send(pay_as("a")).await;
    if asked.elapsed() < LEASE {
        assert_refusal("request-in-progress", &again);
        assert_refusal("key-reused", &world.send(pay_as("a").json("{}")).await);
    }
    // If the restart took longer than the lease, this was the retry that settled it.
    if again.status() == 409 {
        again = world.settled(&pay_as("a")).await;
    }
    if world.plan.reconcile == Some(ReconcileReport::Found) {
        assert_eq!((again.status(), &again.body[..]), (202, FOUND.as_bytes()), "{again:?}");
        assert_eq!(again.get("content-type"), Some("text/plain"), "{again:?}");
        assert_replay(&world.plan, &pay_as("a"), &again, &world.send(pay_as("a")).await);
        assert_refusal("key-reused", &world.send(pay_as("a").json("{}")).await);
        assert_eq!(world.backend.effects(), calls);
    } else if world.plan.on_abandoned == Some(OnAbandoned::Reexecute)
        || world.plan.reconcile == Some(ReconcileReport::NotFound)
    {
        assert_fresh(&world.plan, &pay_as("a"), &again);
        assert_eq!((again.status(), world.backend.effects()), (201, calls + 1), "{again:?}");
        let seen = world.backend.seen();
        let last = seen.last().expect("a call");
        assert_eq!(attempt(last), 2, "{last:?}");
        if let [first, second] = &seen[..] {
            assert_eq!(attempt(first), 1, "{first:?}");
            assert!(token(second) > token(first), "{} then {}", token(first), token(second));
            assert_eq!(second.body, first.body);
            assert_eq!(second.get("oncegate-record"), first.get("oncegate-record"));
        }
        assert_replay(&world.plan, &pay_as("a"), &again, &world.send(pay_as("a")).await);
        assert_eq!(world.backend.effects(), calls + 1);
    } else {
        assert_refusal(UNKNOWN, &again);
        assert_echo(&world.plan, &pay_as("a"), &again);
        assert_refusal(UNKNOWN, &world.send(pay_as("a")).await);
        assert_refusal("key-reused", &world.send(pay_as("a").json("{}")).await);
        assert_eq!(world.backend.effects(), calls);
    }
}

/// Tries again with a longer lease and another key if the restarts took longer than the lease: that depends on the machine.
async fn lease_over_restarts(mut world: World, restarts: usize) {
    let mut lease = world.plan.lease.expect("a lease");
    while !lease_lasts_over_restarts(&mut world, lease, restarts).await {
        lease *= 2;
        assert!(lease < TIMEOUT, "{restarts} restarts take longer than {:?}", lease / 2);
    }
}

/// Returns `false` if the lease ended before the last restart, so that nothing could be observed.
async fn lease_lasts_over_restarts(world: &mut World, lease: Duration, restarts: usize) -> bool {
    world.end().await;
    world.plan.lease = Some(lease);
    world.start().await;
    let key = format!("a-{}", lease.as_secs());
    let before = world.backend.effects();
    let never = Latch::new();
    let asked = Instant::now();
    let first = world.start_send(pay_as(&key).script(Script::default().held(&never)));
    world.backend.until_effects(before + 1).await;
    let mut killed = None;
    for number in 0..restarts {
        start_cleanly(world).await;
        // The next process may have renewed nothing: the lease is counted from the first kill at the latest.
        killed.get_or_insert_with(Instant::now);
        // Each process writes something, so that the store has its time.
        assert_eq!(world.send(pay_as(&format!("other-{key}-{number}"))).await.status(), 201);
        let again = world.send(pay_as(&key)).await;
        if asked.elapsed() >= lease {
            return false;
        }
        assert_refusal("request-in-progress", &again);
    }
    assert!(first.await.unwrap().is_err(), "a response from a process that was killed");
    let mut last_blocked = asked;
    let mut after = None;
    until("the lease is over", async || {
        let sent = Instant::now();
        let response = world.send(pay_as(&key)).await;
        if response.status() == 409 {
            last_blocked = sent;
        } else {
            after = Some(response);
        }
        after.is_some()
    })
    .await;
    // It may have been renewed before the first kill, so it ends at this time or later.
    assert!(asked.elapsed() >= lease, "over after {:?}, the lease is {lease:?}: {after:?}", asked.elapsed());
    // A request that was blocked was sent before the lease ended.
    let blocked = killed.map_or(Duration::ZERO, |killed| last_blocked.saturating_duration_since(killed));
    assert!(blocked < lease + TICK, "blocked for {blocked:?} after the kill, the lease is {lease:?}");
    never.open();
    true
}

async fn retention_over_restarts(mut world: World) {
    let retention = world.plan.retention.expect("a retention");
    world.start().await;
    let asked = Instant::now();
    let first = world.send(pay_as("a")).await;
    for number in 0..3 {
        start_cleanly(&mut world).await;
        assert_eq!(world.send(pay_as(&format!("other-{number}"))).await.status(), 201);
    }
    loop {
        let again = world.send(pay_as("a")).await;
        // Stores count in whole milliseconds.
        if asked.elapsed() + Duration::from_millis(1) >= retention {
            break;
        }
        assert_eq!(
            again.body,
            first.body,
            "forgotten after {:?}, the retention is {retention:?}",
            asked.elapsed()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    until("the key is new", async || world.send(pay_as("a")).await.body != first.body).await;
}

async fn killed_after_the_completion(mut world: World) {
    world.start().await;
    let body: Vec<u8> = (0..=255).cycle().take(5000).collect();
    let script =
        Script::whole(202, "application/octet-stream", body.clone()).field("location", "/payments/1");
    let first = world.start_send(pay_as("a").script(script));
    world.sidecar().at_failpoint("completed").await;
    start_cleanly(&mut world).await;
    assert!(first.await.unwrap().is_err(), "a response from a process that was killed");
    for _ in 0..2 {
        let again = world.send(pay_as("\"a\"")).await;
        assert_eq!((again.status(), again.get("idempotent-replayed")), (202, Some("true")), "{again:?}");
        assert_eq!(again.body, body);
        assert_eq!(again.get("content-type"), Some("application/octet-stream"), "{again:?}");
        assert_eq!(again.get("location"), Some("/payments/1"), "{again:?}");
        assert_echo(&world.plan, &pay_as("\"a\""), &again);
    }
    assert_refusal("key-reused", &world.send(pay_as("a").json("{}")).await);
    assert_eq!(world.backend.effects(), 1);
}

async fn killed_twice(mut world: World) {
    world.start().await;
    let never = Latch::new();
    for calls in 1..4 {
        let (address, request) =
            (world.address(), world.ready(pay_as("a").script(Script::default().held(&never))));
        let asking = tokio::spawn(async move {
            // Until it is granted, it gets `request-in-progress`. On a busy machine its lease may be over before it begins.
            loop {
                match Connection::open(address).await.exchange(&request).await {
                    Ok(response) if matches!(response.status(), 409 | 503) => {
                        tokio::time::sleep(Duration::from_millis(20)).await
                    }
                    other => return other,
                }
            }
        });
        world.backend.until_effects(calls).await;
        world.end().await;
        assert!(asking.await.unwrap().is_err());
        world.start().await;
    }
    let last = world.settled(&pay_as("a")).await;
    assert_eq!((last.status(), world.backend.effects()), (201, 4), "{last:?}");
    let seen = world.backend.seen();
    for (number, pair) in seen.windows(2).enumerate() {
        assert!(token(&pair[1]) > token(&pair[0]), "tokens {} then {}", token(&pair[0]), token(&pair[1]));
        assert_eq!(attempt(&pair[1]), number as u64 + 2);
    }
    assert_replay(&world.plan, &pay_as("a"), &last, &world.send(pay_as("a")).await);
    never.open();
}

async fn killed_under_load(mut world: World) {
    world.start().await;
    let request =
        |n: usize| Request::post("/payments").key(format!("k{n}")).json(format!("{{\"amount\":{n}}}"));
    let never = Latch::new();
    let mut answered: Vec<Option<Response>> = Vec::new();
    for round in 0..3 {
        let base = answered.len();
        let all: Vec<_> = (base..base + 200)
            .map(|n| {
                let script = if n % 4 == 0 { Script::default().held(&never) } else { Script::default() };
                world.start_send(request(n).script(script))
            })
            .collect();
        // Each time at another moment. Some requests are never answered.
        let enough = 30 + 40 * round;
        until("enough is answered", async || all.iter().filter(|one| one.is_finished()).count() >= enough)
            .await;
        world.end().await;
        for one in all {
            // If the store is too slow for the load, the refusal tells that nothing was executed: no response.
            let response = one.await.unwrap().ok();
            answered.push(response.filter(|response| response.status() != 503));
        }
        world.start().await;
    }
    // A library refuses what its pool cannot carry in time.
    let enough = if matches!(world.deployment, Deployment::Library(_)) { 1 } else { 30 + 70 + 110 };
    assert!(answered.iter().flatten().count() >= enough);
    assert!(answered.iter().filter(|response| response.is_none()).count() >= 150);
    for (n, first) in answered.iter().enumerate() {
        let last = world.settled(&request(n)).await;
        match first {
            Some(first) => assert_replay(&world.plan, &request(n), first, &last),
            // The connection was cut: never claimed, completed without a response to the client, or unknown.
            None if last.status() == 201 => {}
            None => assert_refusal(UNKNOWN, &last),
        }
        let once_more = world.send(request(n)).await;
        assert_eq!((once_more.status(), &once_more.body), (last.status(), &last.body), "{once_more:?}");
    }
    let mut effects = std::collections::HashMap::<String, usize>::new();
    for seen in world.backend.seen() {
        *effects.entry(seen.get("idempotency-key").expect("a key").to_owned()).or_default() += 1;
    }
    let twice: Vec<_> = effects.into_iter().filter(|(_, effects)| *effects > 1).collect();
    assert!(twice.is_empty(), "took effect more than once: {twice:?}");
}

async fn tokens_over_restarts(mut world: World) {
    world.start().await;
    for round in 0..3 {
        for _ in 0..3 {
            let free = pay_as("a").script(Script::status(429));
            assert_eq!(world.send(free).await.status(), 429);
        }
        if round % 2 == 0 {
            world.end().await;
        } else {
            world.terminate_process();
            until("it ends", async || world.process_exited().is_some()).await;
            world.end().await;
        }
        world.start().await;
    }
    let tokens: Vec<_> = world.backend.seen().iter().map(token).collect();
    assert_eq!(tokens.len(), 9);
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

async fn terminated(mut world: World) {
    world.start().await;
    let done = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    world.terminate_process();
    // It accepts no new requests, but completes those that it has begun.
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(world.process_exited().is_none(), "it left a request behind");
    done.open();
    let first = first.await.unwrap().expect("a response");
    assert_eq!((first.status(), first.get("idempotency-status")), (201, None), "{first:?}");
    until("it ends", async || world.process_exited().is_some()).await;
    let ended = world.process_exited().expect("an end");
    assert!(ended.success(), "{ended}: {}", world.process_output());
    world.end().await;
    world.start().await;
    assert_replay(&world.plan, &pay_as("a"), &first, &world.send(pay_as("a")).await);
    assert_eq!(world.backend.effects(), 1);
}

async fn stopped_beyond_the_lease(mut world: World) {
    world.start().await;
    let done = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    world.stop_process();
    tokio::time::sleep(Duration::from_millis(900)).await;
    let second = world.start_send(pay_as("a"));
    world.resume_process();
    assert_refusal("request-in-progress", &second.await.unwrap().expect("a response"));
    done.open();
    let first = first.await.unwrap().expect("a response");
    assert_fresh(&world.plan, &pay_as("a"), &first);
    assert_eq!((first.status(), first.get("idempotency-status")), (201, None), "{first:?}");
    assert_replay(&world.plan, &pay_as("a"), &first, &world.send(pay_as("a")).await);
    assert_eq!(world.backend.effects(), 1);
}

/// Two processes that serve on one store: the world's own, or one in this process, which they ask.
struct Pair {
    first: Process,
    second: Process,
    backend: Backend,
    _store: Option<StoreServer>,
}

async fn pair(world: &mut World) -> Pair {
    let (store, server) = match world.store_url() {
        Some(url) => (url, None),
        None => {
            let server = StoreServer::start(world.open_store().await).await;
            (server.address.to_string(), Some(server))
        }
    };
    let upstream = world.serve_backend().await;
    world.serve_case().await;
    let first = Process::start(world, world.deployment, &world.plan, &store, upstream).await;
    let second = Process::start(world, world.deployment, &world.plan, &store, upstream).await;
    Pair { first, second, backend: world.backend.clone(), _store: server }
}

async fn stopped_and_replaced(mut world: World) {
    let pair = pair(&mut world).await;
    let done = Latch::new();
    let first = start_ask(&pair.first, world.ready(pay_as("a").script(Script::default().held(&done))));
    pair.backend.until_effects(1).await;
    assert_refusal("request-in-progress", &ask(&pair.second, &pay_as("a")).await);
    pair.first.stop();
    let second = ask_until_settled(&pair.second, &pay_as("a")).await;
    assert_fresh(&world.plan, &pay_as("a"), &second);
    assert_eq!((second.status(), pair.backend.effects()), (201, 2), "{second:?}");
    let seen = pair.backend.seen();
    assert!(token(&seen[1]) > token(&seen[0]));
    assert_eq!((attempt(&seen[0]), attempt(&seen[1])), (1, 2));
    done.open();
    pair.first.resume();
    let first = first.await.unwrap().expect("a response");
    assert_fresh(&world.plan, &pay_as("a"), &first);
    assert_eq!((first.status(), first.get("idempotency-status")), (201, Some("fenced")), "{first:?}");
    assert_eq!(first.json()["effect"], 1, "its own client has its own response");
    for child in [&pair.first, &pair.second] {
        let again = ask_until_settled(child, &pay_as("a")).await;
        assert_replay(&world.plan, &pay_as("a"), &second, &again);
    }
    assert_eq!(pair.backend.effects(), 2);
    if let (Process::Sidecar(first), Process::Sidecar(second)) = (&pair.first, &pair.second) {
        assert_eq!(first.metric("oncegate_events_total{event=\"fenced\"}").await, Some(1.0));
        assert_eq!(second.metric("oncegate_takeovers_total").await, Some(1.0));
    }
}

async fn stopped_before_the_call_and_replaced(mut world: World) {
    let upstream = world.serve_backend().await;
    let stopped = Plan { failpoint: Some("stop:executing"), ..world.plan.clone() };
    let first = Process::Sidecar(Box::new(world.start_sidecar(&stopped, upstream).await));
    let second = Process::Sidecar(Box::new(world.start_sidecar(&world.plan, upstream).await));
    let late = start_ask(&first, pay_as("a"));
    if let Process::Sidecar(first) = &first {
        first.at_failpoint("executing").await;
    }
    let executed = ask_until_settled(&second, &pay_as("a")).await;
    assert_fresh(&world.plan, &pay_as("a"), &executed);
    first.resume();
    assert_refusal("request-in-progress", &late.await.unwrap().expect("a response"));
    for child in [&first, &second] {
        assert_replay(&world.plan, &pay_as("a"), &executed, &ask(child, &pay_as("a")).await);
    }
    assert_eq!(world.backend.effects(), 1);
}

async fn stopped_before_the_call(mut world: World) {
    world.start().await;
    let first = world.start_send(pay_as("a"));
    world.sidecar().at_failpoint("executing").await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    world.sidecar().resume();
    let first = first.await.unwrap().expect("a response");
    assert_fresh(&world.plan, &pay_as("a"), &first);
    assert_eq!((first.status(), first.get("idempotency-status")), (201, None), "{first:?}");
    assert_eq!(attempt(&world.backend.seen()[0]), 1);
    assert_replay(&world.plan, &pay_as("a"), &first, &world.send(pay_as("a")).await);
    assert_eq!(world.backend.effects(), 1);
}

async fn stopped_and_parked(mut world: World) {
    let pair = pair(&mut world).await;
    let done = Latch::new();
    let first = start_ask(&pair.first, world.ready(pay_as("a").script(Script::default().held(&done))));
    pair.backend.until_effects(1).await;
    pair.first.stop();
    assert_refusal(UNKNOWN, &ask_until_settled(&pair.second, &pay_as("a")).await);
    assert_refusal("key-reused", &ask(&pair.second, &pay_as("a").json("{}")).await);
    done.open();
    pair.first.resume();
    let first = first.await.unwrap().expect("a response");
    assert_fresh(&world.plan, &pay_as("a"), &first);
    assert_eq!(first.status(), 201, "{first:?}");
    // No other owner executed. Its completion makes the outcome known, or the outcome stays unknown. It never runs again.
    for child in [&pair.first, &pair.second] {
        let again = ask_until_settled(child, &pay_as("a")).await;
        match again.status() {
            201 => {
                assert_replay(&world.plan, &pay_as("a"), &first, &again);
                assert_eq!(first.get("idempotency-status"), None, "{first:?}");
            }
            _ => {
                assert_refusal(UNKNOWN, &again);
                assert!(
                    first.get("idempotency-status").is_some(),
                    "not marked though it is not kept: {first:?}"
                );
            }
        }
    }
    assert_eq!(pair.backend.effects(), 1);
}

async fn killed_and_replaced(mut world: World) {
    let mut pair = pair(&mut world).await;
    let never = Latch::new();
    let asked = Instant::now();
    let first = start_ask(&pair.first, world.ready(pay_as("a").script(Script::default().held(&never))));
    pair.backend.until_effects(1).await;
    pair.first.kill();
    assert!(first.await.unwrap().is_err());
    let second = ask_until_settled(&pair.second, &pay_as("a")).await;
    assert!(asked.elapsed() >= LEASE, "replaced after {:?}", asked.elapsed());
    assert_fresh(&world.plan, &pay_as("a"), &second);
    assert_eq!((second.status(), pair.backend.effects()), (201, 2), "{second:?}");
    assert_replay(&world.plan, &pay_as("a"), &second, &ask(&pair.second, &pay_as("a")).await);
    never.open();
}

async fn hundred_on_two(mut world: World) {
    let pair = pair(&mut world).await;
    let body = Bytes::from_static(PAYMENT.as_bytes());
    let request =
        |key: usize| Request::post("/payments").key(format!("k{key}")).body("application/json", body.clone());
    for key in 0..5 {
        let children = [&pair.first, &pair.second];
        let all: Vec<_> = (0..100).map(|n| start_ask(children[n % 2], request(key))).collect();
        let mut fresh = Vec::new();
        for one in all {
            let response = one.await.unwrap().expect("a response");
            if response.status() == 409 {
                assert_eq!(world.plan.wait, Some(Duration::ZERO), "it did not wait: {response:?}");
                assert_refusal("request-in-progress", &response);
            } else if response.get("idempotent-replayed").is_none() {
                fresh.push(response);
            }
        }
        assert_eq!((fresh.len(), pair.backend.effects()), (1, key + 1), "{fresh:?}");
        for child in children {
            assert_replay(
                &world.plan,
                &request(key),
                &fresh[0],
                &ask_until_settled(child, &request(key)).await,
            );
        }
    }
}
