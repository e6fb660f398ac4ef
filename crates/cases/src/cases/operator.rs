//! Decisions of operators, and metrics.

use std::collections::BTreeMap;

use oncegate_testkit::Latch;

use super::{pay, pay_as};
use crate::backend::Script;
use crate::client::Request;
use crate::table::{Case, Target, assert_fresh, assert_refusal, assert_replay};
use crate::world::{OperatorDecision, RESOLVED, StoreKind, World};

pub(super) fn cases() -> Vec<Case> {
    let mut all = cases! {
        "resolved-as-completed": "an unknown outcome that an operator found is replayed"
            => run (resolved, OperatorDecision::Happened);
        "resolved-without-a-response": "an unknown outcome that an operator resolved without a response cannot be replayed"
            => run (resolved, OperatorDecision::HappenedWithoutResponse);
        "resolved-as-not-happened": "an unknown outcome that an operator resolved as not happened is executed"
            => run (resolved, OperatorDecision::DidNotHappen);
        "operator-parks-and-amends-a-resolution":
            "an operator's response can be parked and amended, and nothing executes meanwhile"
            => run (taken_back);
        "completed-record-cannot-be-resolved":
            "a completed record cannot be resolved, released, amended or parked, not even by force"
            => run (completed);
        "running-record-is-resolved-only-by-force": "a running record is resolved only by force; then its owner is fenced"
            => run (running);
        "metrics-add-up-to-the-requests": "the outcomes in the metrics are those that happened, and add up to the requests"
            .only_sidecar("the layer tells an observer, and has no numbers of its own")
            => run (metrics);
    };
    for case in &mut all {
        case.excluded.push((
            Target::LibrariesOn(StoreKind::Memory),
            "an operator cannot reach the memory of a library",
        ));
    }
    all
}

/// The only record there is.
async fn only_record(world: &World, state: &str) -> String {
    let records = world.records().await;
    let [(id, found)] = &records[..] else { panic!("not one record: {records:?}") };
    assert_eq!(found, state);
    id.clone()
}

async fn resolved(world: World, verdict: OperatorDecision) {
    // The deployments answer this request differently; its outcome is unknown.
    let _ = world.try_send(pay_as("a").script(Script::fails())).await;
    assert_refusal("outcome-unknown", &world.settled(&pay_as("a")).await);
    let record = only_record(&world, "unknown").await;
    assert!(world.resolve(&record, verdict).await, "not taken");
    let again = world.send(pay_as("a")).await;
    let last = world.last_audit().await.expect("an entry");
    match verdict {
        OperatorDecision::Happened => {
            assert_eq!((again.status(), &again.body[..]), (202, RESOLVED.as_bytes()), "{again:?}");
            assert_eq!(again.get("content-type"), Some("text/plain"), "{again:?}");
            assert_replay(&world.plan, &pay_as("a"), &again, &world.send(pay_as("a")).await);
            assert_refusal("key-reused", &world.send(pay_as("a").json("{}")).await);
            assert_eq!(last, ["unknown", "completed", "cases", "in the ledger"]);
            assert_eq!(world.backend.effects(), 1);
            assert!(
                !world.resolve(&record, OperatorDecision::DidNotHappen).await,
                "changed what was completed"
            );
        }
        OperatorDecision::Park
        | OperatorDecision::AmendedToHappened
        | OperatorDecision::AmendedToDidNotHappen => {
            unreachable!("not the first word on a record")
        }
        OperatorDecision::HappenedWithoutResponse => {
            assert_refusal("replay-unavailable", &again);
            assert_eq!(last, ["unknown", "tombstone", "cases", "in the ledger"]);
            assert_eq!(world.backend.effects(), 1);
        }
        OperatorDecision::DidNotHappen | OperatorDecision::ForceRelease => {
            assert_fresh(&world.plan, &pay_as("a"), &again);
            assert_eq!(last, ["unknown", "released", "cases", "in the ledger"]);
            assert_eq!((again.status(), world.backend.effects()), (201, 2), "{again:?}");
            assert_replay(&world.plan, &pay_as("a"), &again, &world.send(pay_as("a")).await);
        }
    }
}

async fn taken_back(world: World) {
    let _ = world.try_send(pay_as("a").script(Script::fails())).await;
    let record = only_record(&world, "unknown").await;
    let said = async |verdict| assert!(world.resolve(&record, verdict).await, "{verdict:?} was not taken");
    // A wrong decision, and its correction.
    said(OperatorDecision::HappenedWithoutResponse).await;
    assert_refusal("replay-unavailable", &world.send(pay_as("a")).await);
    said(OperatorDecision::Park).await;
    assert_eq!(world.last_audit().await.expect("an entry")[..2], ["tombstone", "unknown"]);
    assert_refusal("outcome-unknown", &world.send(pay_as("a")).await);
    assert!(
        !world.resolve(&record, OperatorDecision::AmendedToDidNotHappen).await,
        "there is nothing to amend"
    );
    // A key that was released, and held before a retry came.
    said(OperatorDecision::DidNotHappen).await;
    said(OperatorDecision::Park).await;
    assert_refusal("outcome-unknown", &world.send(pay_as("a")).await);
    // Another operator cannot change the decision without an amendment.
    said(OperatorDecision::HappenedWithoutResponse).await;
    assert!(!world.resolve(&record, OperatorDecision::Happened).await, "changed what another operator said");
    assert_refusal("replay-unavailable", &world.send(pay_as("a")).await);
    said(OperatorDecision::AmendedToHappened).await;
    for _ in 0..3 {
        let again = world.send(pay_as("a")).await;
        assert_eq!((again.status(), &again.body[..]), (202, RESOLVED.as_bytes()), "{again:?}");
    }
    assert_eq!(world.backend.effects(), 1);
    said(OperatorDecision::AmendedToDidNotHappen).await;
    assert_eq!(world.last_audit().await.expect("an entry")[..2], ["completed", "released"]);
    let again = world.send(pay_as("a")).await;
    assert_fresh(&world.plan, &pay_as("a"), &again);
    assert_eq!((again.status(), world.backend.effects()), (201, 2), "{again:?}");
    // That is its service's own response.
    for verdict in [OperatorDecision::Park, OperatorDecision::AmendedToDidNotHappen] {
        assert!(!world.resolve(&record, verdict).await, "{verdict:?} was taken");
    }
    assert_replay(&world.plan, &pay_as("a"), &again, &world.send(pay_as("a")).await);
}

const ALL_BUT_FORCE: [OperatorDecision; 6] = [
    OperatorDecision::Happened,
    OperatorDecision::HappenedWithoutResponse,
    OperatorDecision::DidNotHappen,
    OperatorDecision::Park,
    OperatorDecision::AmendedToHappened,
    OperatorDecision::AmendedToDidNotHappen,
];

async fn completed(world: World) {
    let first = world.send(pay_as("a")).await;
    let record = only_record(&world, "completed").await;
    for verdict in ALL_BUT_FORCE.into_iter().chain([OperatorDecision::ForceRelease]) {
        assert!(!world.resolve(&record, verdict).await, "{verdict:?} was taken");
        assert_replay(&world.plan, &pay_as("a"), &first, &world.send(pay_as("a")).await);
    }
    assert_eq!(world.last_audit().await, None);
    assert_eq!(world.backend.effects(), 1);
}

async fn running(world: World) {
    let done = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    let record = only_record(&world, "in-progress").await;
    for verdict in ALL_BUT_FORCE {
        assert!(!world.resolve(&record, verdict).await, "{verdict:?} was taken");
        assert_refusal("request-in-progress", &world.send(pay_as("a")).await);
    }
    assert!(world.resolve(&record, OperatorDecision::ForceRelease).await, "not taken");
    assert_eq!(world.last_audit().await.expect("an entry")[..2], ["in-progress", "released"]);
    done.open();
    let first = first.await.unwrap().expect("a response");
    assert_fresh(&world.plan, &pay_as("a"), &first);
    assert_eq!((first.status(), first.get("idempotency-status")), (201, Some("fenced")), "{first:?}");
    let second = world.settled(&pay_as("a")).await;
    assert_fresh(&world.plan, &pay_as("a"), &second);
    assert_eq!((second.status(), world.backend.effects()), (201, 2), "{second:?}");
    assert_replay(&world.plan, &pay_as("a"), &second, &world.send(pay_as("a")).await);
}

async fn metrics(world: World) {
    let mut sent = BTreeMap::<&str, usize>::new();
    let done = Latch::new();
    let held = world.start_send(pay_as("held").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    let rounds: [(&str, usize, Request); 9] = [
        ("not-covered", 3, Request::new("GET", "/payments").key("a")),
        ("unprotected", 2, pay()),
        ("executed", 1, pay_as("a")),
        ("replayed", 4, pay_as("a")),
        ("key-reused", 2, pay_as("a").json("{}")),
        ("key-invalid", 3, pay_as("a,b")),
        ("request-in-progress", 2, pay_as("held")),
        ("executed", 2, pay_as("free").script(Script::status(429))),
        ("request-too-large", 1, pay_as("large").body("text/plain", vec![b'x'; 3 * 1024 * 1024])),
    ];
    for (outcome, times, request) in rounds {
        *sent.entry(outcome).or_default() += times;
        for _ in 0..times {
            world.send(request.clone()).await;
        }
    }
    done.open();
    held.await.unwrap().expect("a response");
    *sent.entry("executed").or_default() += 1;
    let text = String::from_utf8(world.admin(Request::new("GET", "/metrics")).await.body.to_vec()).unwrap();
    let mut told = BTreeMap::<String, usize>::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("oncegate_requests_total{")) {
        let (labels, number) = line.split_once("} ").expect("labels and a number");
        let outcome = labels.split(',').find_map(|label| label.strip_prefix("outcome=")).expect("an outcome");
        *told.entry(outcome.trim_matches('"').to_owned()).or_default() +=
            number.trim().parse::<usize>().unwrap();
    }
    told.retain(|_, times| *times > 0);
    let sent: BTreeMap<String, usize> =
        sent.into_iter().map(|(outcome, times)| (outcome.to_owned(), times)).collect();
    assert_eq!(told, sent, "{text}");
    for secret in ["held", "free"] {
        assert!(!text.contains(&format!("\"{secret}\"")), "a label holds a key: {text}");
    }
}
