//! Services that complete their records in their own transactions, behind the real sidecar on a real PostgreSQL server: whatever
//! process is killed at whatever point, an operation takes effect exactly once.

#[path = "../support/mod.rs"]
mod support;

mod lost_responses;
mod relay;
mod responses;
mod world;

use lost_responses::{
    a_service_killed_after_its_commit_is_asked_when_it_is_back,
    a_sidecar_killed_before_it_adds_the_response_asks_for_it,
    both_are_killed_after_the_commit_and_the_response_is_asked_for,
};
use oncegate_testkit::until;
use relay::Gate;
use rustix::process::Signal;
use support::{Message, Sidecar, ask};
use world::{Database, Kind, Operation, Stop, World, serve};

/// Asserts the response to the first client if the service died before its transaction ended.
fn is_told_to_retry(response: &Message, slug: &str) {
    response.is_problem(502, slug);
    assert_eq!(response.json()["retry"], "same-key");
}

async fn a_committed_request_is_answered_from_the_record(kind: Kind) {
    let world = World::start(kind, &[]).await;
    for operation in Operation::BOTH {
        let first = world.ask(operation, "plain").await;
        assert!(!first.has_status(201).is_replay());
        let second = world.ask(operation, "plain").await;
        assert!(second.has_status(201).is_replay());
        assert_eq!(first.body, second.body);
        for name in ["content-type", "location"] {
            assert_eq!(first.get(name), second.get(name), "{name}");
        }
        assert_eq!(first.get("idempotency-status"), None);
        assert_eq!(world.effects(operation).await, 1);
        // Without a key there is no record.
        let bare = operation.request("none").replace("Idempotency-Key: none\r\n", "");
        world.sidecar.ask(&bare).await.has_status(201);
        assert_eq!(world.effects(operation).await, 2);
    }
    let events = ["completed-upstream", "response-added", "response-differs", "completion-missing"];
    assert_eq!(counted(&world.sidecar, &events).await, [1, 1, 0, 0]);
}

async fn metrics(sidecar: &Sidecar) -> String {
    let asked = "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";
    ask(sidecar.admin, asked).await.has_status(200).text().to_owned()
}

async fn counted<const N: usize>(sidecar: &Sidecar, events: &[&str; N]) -> [u64; N] {
    let text = metrics(sidecar).await;
    events.map(|event| {
        let series = format!("oncegate_events_total{{event=\"{event}\"}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&series));
        line.unwrap_or_else(|| panic!("no {series}")).parse().unwrap()
    })
}

async fn a_service_that_is_killed_before_its_commit_has_no_effect(kind: Kind) {
    let mut world = World::start(kind, &[]).await;
    for operation in Operation::BOTH {
        for stop in [Stop::BeforeTheRow, Stop::AfterTheRow] {
            let key = format!("{stop:?}");
            let before = world.effects(operation).await;
            let held = world.hold(stop).await;
            let mut client = world.send(operation, &key).await;
            world.a_service_is_held().await;
            world.service.kill().await;
            is_told_to_retry(&client.message().await, "handler-failed");
            drop(held);
            world.restart_service().await;
            world.is_not_done(operation, &key, before).await;
        }
    }
}

/// The service's open transaction holds the record when the service dies, so its outcome is not yet known.
async fn a_service_that_is_killed_before_it_sends_commit_has_no_effect(kind: Kind) {
    let mut world = World::start(kind, &[]).await;
    for (at, operation) in Operation::BOTH.into_iter().enumerate() {
        world.relay.set(Gate::BeforeCommit);
        let mut client = world.send(operation, "completed").await;
        world.relay.holds(at + 1).await;
        world.service.kill().await;
        is_told_to_retry(&client.message().await, "request-in-progress");
        world.ask(operation, "completed").await.is_problem(409, "request-in-progress");
        world.relay.cut().await;
        world.restart_service().await;
        world.is_not_done(operation, "completed", 0).await;
    }
}

async fn a_service_that_is_killed_during_its_commit_has_taken_effect(kind: Kind) {
    let mut world = World::start(kind, &[]).await;
    for operation in Operation::BOTH {
        let held = world.hold(Stop::WhileItCommits).await;
        let mut client = world.send(operation, "commits").await;
        world.a_service_is_held().await;
        world.service.kill().await;
        is_told_to_retry(&client.message().await, "request-in-progress");
        world.ask(operation, "commits").await.is_problem(409, "request-in-progress");
        drop(held);
        world.restart_service().await;
        world.is_done(operation, "commits", 1).await;
    }
}

async fn a_service_that_is_killed_after_its_commit_has_taken_effect(kind: Kind) {
    let mut world = World::start(kind, &[]).await;
    for (at, operation) in Operation::BOTH.into_iter().enumerate() {
        world.relay.set(Gate::AfterCommit);
        let mut client = world.send(operation, "committed").await;
        world.relay.holds(at + 1).await;
        until("it is committed", async || world.effects(operation).await == 1).await;
        world.service.kill().await;
        // The first client gets the response in the record, too.
        let response = client.message().await;
        match operation {
            Operation::Order => assert!(response.has_status(201).is_replay()),
            Operation::Pay => drop(response.is_problem(422, "replay-unavailable")),
        }
        world.relay.cut().await;
        world.restart_service().await;
        world.is_done(operation, "committed", 1).await;
    }
}

/// As in the pages of the examples: the row and its response are committed, and the service is killed during its delay.
async fn a_service_that_is_killed_before_it_responds_has_stored_its_response(kind: Kind) {
    let mut world = World::start(kind, &[]).await;
    let order = Operation::Order.request("slow").replacen("/orders", "/orders?delay_ms=60000", 1);
    let mut client = world.sidecar.connect().await;
    client.send(order.clone()).await;
    until("it is committed", async || world.effects(Operation::Order).await == 1).await;
    world.service.kill().await;
    let first = client.message().await;
    assert!(first.has_status(201).is_replay());
    let second = world.sidecar.ask(&order).await;
    assert!(second.has_status(201).is_replay());
    assert_eq!(first.body, second.body);
    world.restart_service().await;
    assert_eq!(world.effects(Operation::Order).await, 1);
}

const SHORT: [&str; 1] = ["--lease=1s"];

async fn a_sidecar_that_is_killed_at_any_point_leaves_what_was_committed(kind: Kind) {
    for operation in Operation::BOTH {
        let mut world = World::start_with(kind, &SHORT, "executing").await;
        let _client = world.send(operation, "executing").await;
        world.sidecar.process.logs("failpoint executing").await;
        world.sidecar.process.kill().await;
        world.restart_sidecar(&SHORT).await;
        world.is_not_done(operation, "executing", 0).await;

        for (failpoint, effects) in [("executed", 2), ("completed", 3)] {
            world.sidecar = world.database.sidecar(world.at, &SHORT, failpoint).await;
            let _client = world.send(operation, failpoint).await;
            world.sidecar.process.logs(&format!("failpoint {failpoint}")).await;
            world.sidecar.process.kill().await;
            world.restart_sidecar(&SHORT).await;
            if failpoint == "completed" {
                // The response was added before the sidecar was killed.
                let response = world.retry(operation, failpoint).await;
                assert!(response.has_status(201).is_replay());
                assert_eq!(world.effects(operation).await, effects);
            } else {
                world.is_done(operation, failpoint, effects).await;
            }
        }
    }
}

/// The service continues, but no process waits for its response.
async fn a_sidecar_that_is_killed_while_the_service_works(kind: Kind) {
    let mut world = World::start(kind, &SHORT).await;
    for operation in Operation::BOTH {
        let held = world.hold(Stop::WhileItCommits).await;
        let _client = world.send(operation, "alone").await;
        world.a_service_is_held().await;
        world.sidecar.process.kill().await;
        world.restart_sidecar(&SHORT).await;
        lease_has_run_out(&world.database).await;
        // No other attempt starts before the end of the transaction.
        world.ask(operation, "alone").await.is_problem(409, "request-in-progress");
        drop(held);
        world.is_done(operation, "alone", 1).await;
    }
}

async fn lease_has_run_out(database: &Database) {
    let left = "SELECT count(*) FROM oncegate.records WHERE state = 'in-progress' AND lease_until > oncegate.now_ms()";
    until("the lease has run out", async || database.number(left).await == 0).await;
}

async fn service_and_sidecar_are_killed(kind: Kind) {
    let mut world = World::start(kind, &SHORT).await;
    for operation in Operation::BOTH {
        for (stop, is_done) in
            [(Stop::BeforeTheRow, false), (Stop::AfterTheRow, false), (Stop::WhileItCommits, true)]
        {
            let key = format!("{stop:?}");
            let before = world.effects(operation).await;
            let held = world.hold(stop).await;
            let _client = world.send(operation, &key).await;
            world.a_service_is_held().await;
            world.sidecar.process.kill().await;
            world.service.kill().await;
            drop(held);
            world.restart_service().await;
            world.restart_sidecar(&SHORT).await;
            world.has_ended(is_done, operation, &key, before).await;
        }
    }
}

async fn service_and_sidecar_are_killed_around_the_commit(kind: Kind) {
    let mut world = World::start(kind, &SHORT).await;
    let mut times = 0;
    for operation in Operation::BOTH {
        for (gate, is_done) in [(Gate::BeforeCommit, false), (Gate::AfterCommit, true)] {
            let key = format!("{gate:?}");
            let before = world.effects(operation).await;
            world.relay.set(gate);
            let _client = world.send(operation, &key).await;
            times += 1;
            world.relay.holds(times).await;
            if is_done {
                until("it is committed", async || world.effects(operation).await == before + 1).await;
            }
            world.sidecar.process.kill().await;
            world.service.kill().await;
            world.relay.cut().await;
            world.restart_service().await;
            world.restart_sidecar(&SHORT).await;
            world.has_ended(is_done, operation, &key, before).await;
        }
    }
}

async fn an_owner_that_was_paused_beyond_its_lease_rolls_back(kind: Kind) {
    let operation = Operation::Order;
    let world = World::start(kind, &SHORT).await;
    let held = world.hold(Stop::AfterTheRow).await;
    let mut client = world.send(operation, "paused").await;
    world.a_service_is_held().await;
    world.sidecar.process.freeze();
    world.service.freeze();
    drop(held);
    lease_has_run_out(&world.database).await;

    // Another service and another sidecar on the same database.
    let (_service, at) = serve(kind, &world.database, &world.relay, 0).await;
    let sidecar = world.database.sidecar(at, &SHORT, "").await;
    let response = sidecar.ask(&operation.request("paused")).await;
    assert!(!response.has_status(201).is_replay());

    world.service.signal(Signal::CONT);
    world.sidecar.process.signal(Signal::CONT);
    let stale = client.message().await;
    assert_eq!(stale.has_status(503).get("idempotency-status"), Some("fenced"));
    assert!(stale.text().contains("OG001"), "{}", stale.text());
    assert_eq!(world.effects(operation).await, 1);
    let replay = world.retry(operation, "paused").await;
    assert!(replay.has_status(201).is_replay());
    assert_eq!(replay.body, response.body);
}

/// The service keeps its transaction open, with the completion in it, for longer than a lease.
async fn an_open_transaction_blocks_no_other_request(kind: Kind) {
    let mut world = World::start(kind, &SHORT).await;
    let other = world.database.sidecar(world.at, &SHORT, "").await;
    let operation = Operation::Order;
    world.relay.set(Gate::BeforeCommit);
    let mut client = world.send(operation, "open").await;
    world.relay.holds(1).await;
    // Renewals fail because the record is locked, and continue; duplicates get "in progress".
    until("renewals have been tried", async || counted(&world.sidecar, &["renewal-failed"]).await[0] >= 3)
        .await;
    lease_has_run_out(&world.database).await;
    world.ask(operation, "open").await.is_problem(409, "request-in-progress");
    other.ask(&operation.request("open")).await.is_problem(409, "request-in-progress");
    let metrics = metrics(&world.sidecar).await;
    // The store is healthy: only this record is locked.
    assert!(metrics.contains("oncegate_degraded 0"), "{metrics}");
    assert!(metrics.contains("oncegate_store_errors_total{during=\"renewal\",kind=\"locked\"}"), "{metrics}");
    world.relay.set(Gate::Open);
    let response = client.message().await;
    assert!(!response.has_status(201).is_replay());
    let replay = other.ask(&operation.request("open")).await;
    assert!(replay.has_status(201).is_replay());
    assert_eq!(replay.body, response.body);
    assert_eq!(world.effects(operation).await, 1);
}

macro_rules! checks {
    ($($check:ident)+) => {
        mod express {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $check() {
                super::$check(super::Kind::Express).await;
            })+
        }
        mod fastapi {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $check() {
                super::$check(super::Kind::Fastapi).await;
            })+
        }
    };
}

checks! {
    a_committed_request_is_answered_from_the_record
    a_service_that_is_killed_before_its_commit_has_no_effect
    a_service_that_is_killed_before_it_sends_commit_has_no_effect
    a_service_that_is_killed_during_its_commit_has_taken_effect
    a_service_that_is_killed_after_its_commit_has_taken_effect
    a_service_that_is_killed_before_it_responds_has_stored_its_response
    a_sidecar_that_is_killed_at_any_point_leaves_what_was_committed
    a_sidecar_that_is_killed_while_the_service_works
    service_and_sidecar_are_killed
    service_and_sidecar_are_killed_around_the_commit
    an_owner_that_was_paused_beyond_its_lease_rolls_back
    an_open_transaction_blocks_no_other_request
    both_are_killed_after_the_commit_and_the_response_is_asked_for
    a_sidecar_killed_before_it_adds_the_response_asks_for_it
    a_service_killed_after_its_commit_is_asked_when_it_is_back
}
