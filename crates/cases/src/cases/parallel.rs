//! Many requests at the same time.

use std::time::{Duration, Instant};

use oncegate_core::OnAbandoned;
use oncegate_testkit::{Latch, until};

use super::pay_as;
use crate::backend::Script;
use crate::client::{Request, Response};
use crate::plan::Plan;
use crate::table::{Case, assert_fresh, assert_refusal, assert_replay, retry_after};
use crate::world::World;

const IN_PROGRESS: &str = "request-in-progress";

pub(super) fn cases() -> Vec<Case> {
    let patient = Plan { wait: Some(Duration::from_secs(60)), ..Plan::default() };
    cases! {
        "second-request-conflicts":
            "a second request while the first runs is a 409, which is not kept, and the first is not disturbed"
            .with_every_framework()
            => run (conflict);
        "retry-after-grows": "Retry-After is 1 at first, and grows with the time that the first request takes"
            .given(Plan { lease: Some(Duration::from_secs(60)), ..Plan::default() })
            => run (retry_after_of_a_long_lease);
        "double-click-gets-one-response": "by default, a second request while the first runs gets its response"
            .given(Plan { wait: None, ..Plan::default() })
            .with_every_framework()
            => run (wait);
        "retry-after-of-a-short-lease": "Retry-After is 1 if the lease is shorter than that"
            .given(Plan { lease: Some(Duration::from_millis(900)), ..Plan::default() })
            => run (retry_after_of_a_short_lease);
        "second-request-waits-for-the-response": "with a wait, the second request gets the response of the first"
            .given(patient.clone())
            => run (wait);
        "hundred-requests-wait-for-one-response": "a hundred that wait get one response from one execution"
            .given(patient.clone())
            .with_every_framework()
            => run (many_wait);
        "waiters-hang-up": "waiting requests that disconnect do not affect the first one and the others"
            .given(patient.clone())
            => run (waiters_hang_up);
        "mismatch-does-not-wait": "a mismatch is refused at once, and does not wait"
            .given(patient.clone())
            => run (mismatch_does_not_wait);
        "wait-for-a-release": "if the first one frees the key, exactly one waiting request executes"
            .given(patient)
            => run (wait_for_a_release);
        "wait-ends-with-a-conflict": "a request that waited for the maximum time gets a 409"
            .given(Plan { wait: Some(Duration::from_millis(300)), ..Plan::default() })
            => run (wait_in_vain);
        "hundred-equal-requests": "a hundred equal requests at once execute once"
            .with_every_framework()
            => run (hundred);
        "hundred-equal-requests-with-a-quick-handler":
            "a hundred equal requests execute once, also if the handler ends before the last one arrives"
            => run (hundred_quick);
        "many-keys-at-once": "twenty keys, each twenty times at once: twenty executions, each with its own response"
            => run (many_keys);
        "lease-is-renewed": "a handler that takes three leases keeps its key"
            // On a busy machine a renewal may be half a second late.
            .given(Plan { lease: Some(Duration::from_secs(1)), ..Plan::default() })
            => run (renewal);
        "renewed-lease-keeps-out-another-instance": "a renewed lease keeps the key from another instance on the same store"
            .given(Plan {
                // On a busy machine a renewal may be more than a second late before it is too late.
                lease: Some(Duration::from_secs(2)),
                on_abandoned: Some(OnAbandoned::Reexecute),
                ..Plan::default()
            })
            .two_processes()
            => run (renewal_against_another);
        "pipelined-requests-execute-once": "equal requests on one connection, sent before the first response, execute once"
            // A server may begin with a request before it has answered the one before.
            .given(Plan { wait: Some(Duration::from_secs(60)), ..Plan::default() })
            => run (pipelined);
        "two-instances-execute-once": "two instances on one store execute once between them"
            .two_processes()
            => run (two_instances);
        "waiting-for-the-other-instance": "a request that waits for the other instance gets its response"
            .given(Plan { wait: Some(Duration::from_secs(60)), ..Plan::default() })
            .two_processes()
            => run (two_instances_wait);
    }
}

async fn conflict(world: World) {
    let done = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    for _ in 0..5 {
        let response = world.send(pay_as("\"a\"")).await;
        assert_refusal(IN_PROGRESS, &response);
        crate::table::assert_echo(&world.plan, &pay_as("\"a\""), &response);
    }
    done.open();
    let first = first.await.unwrap().expect("a response");
    assert_fresh(&world.plan, &pay_as("a"), &first);
    assert_replay(&world.plan, &pay_as("a"), &first, &world.send(pay_as("a")).await);
    assert_eq!(world.backend.effects(), 1);
}

async fn retry_after_of_a_long_lease(world: World) {
    let done = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    let sent_at = Instant::now();
    let response = world.send(pay_as("a")).await;
    assert_refusal(IN_PROGRESS, &response);
    // It took effect before the next request, but not long before, unless the machine is very busy.
    if sent_at.elapsed() < Duration::from_millis(500) {
        assert_eq!(retry_after(&response), 1, "{response:?}");
    }
    tokio::time::sleep(Duration::from_millis(3100).saturating_sub(sent_at.elapsed())).await;
    let response = world.send(pay_as("a")).await;
    assert_refusal(IN_PROGRESS, &response);
    let ages = 3..=sent_at.elapsed().as_secs().max(3) + 1;
    assert!(ages.contains(&retry_after(&response)), "{response:?}");
    done.open();
    first.await.unwrap().expect("a response");
}

async fn retry_after_of_a_short_lease(world: World) {
    let done = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    let response = world.send(pay_as("a")).await;
    assert_refusal(IN_PROGRESS, &response);
    assert_eq!(retry_after(&response), 1, "{response:?}");
    done.open();
    first.await.unwrap().expect("a response");
}

async fn wait(world: World) {
    let done = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    let second = world.start_send(pay_as("a"));
    // A waiting request is not visible from outside. Check that it has no response.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!second.is_finished(), "it did not wait");
    done.open();
    let first = first.await.unwrap().expect("a response");
    let second = second.await.unwrap().expect("a response");
    assert_fresh(&world.plan, &pay_as("a"), &first);
    assert_replay(&world.plan, &pay_as("a"), &first, &second);
    assert_eq!(world.backend.effects(), 1);
}

async fn many_wait(world: World) {
    let done = Latch::new();
    let all: Vec<_> =
        (0..100).map(|_| world.start_send(pay_as("a").script(Script::default().held(&done)))).collect();
    world.backend.until_effects(1).await;
    done.open();
    let responses = responses(all).await;
    one_executed_the_rest_replayed(&world, &responses);
}

async fn responses(
    all: Vec<tokio::task::JoinHandle<Result<Response, crate::client::ResponseError>>>,
) -> Vec<Response> {
    let mut responses = Vec::new();
    for one in all {
        responses.push(one.await.unwrap().expect("a response"));
    }
    responses
}

fn one_executed_the_rest_replayed(world: &World, responses: &[Response]) {
    assert_eq!(world.backend.effects(), 1);
    let (fresh, again): (Vec<_>, Vec<_>) =
        responses.iter().partition(|response| response.get("idempotent-replayed").is_none());
    assert_eq!(fresh.len(), 1, "{fresh:?}");
    assert_fresh(&world.plan, &pay_as("a"), fresh[0]);
    for response in again {
        assert_replay(&world.plan, &pay_as("a"), fresh[0], response);
    }
}

async fn waiters_hang_up(world: World) {
    let done = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    let stays = world.start_send(pay_as("a"));
    for _ in 0..10 {
        let mut connection = world.connect().await;
        connection.write(&pay_as("a").bytes()).await;
        connection.reset();
    }
    done.open();
    let first = first.await.unwrap().expect("a response");
    assert_fresh(&world.plan, &pay_as("a"), &first);
    assert_replay(&world.plan, &pay_as("a"), &first, &stays.await.unwrap().expect("a response"));
    assert_replay(&world.plan, &pay_as("a"), &first, &world.send(pay_as("a")).await);
    assert_eq!(world.backend.effects(), 1);
}

async fn mismatch_does_not_wait(world: World) {
    let done = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    let asked = Instant::now();
    assert_refusal("key-reused", &world.send(Request::post("/payments").key("a").json("{}")).await);
    assert!(asked.elapsed() < Duration::from_secs(5), "it waited");
    done.open();
    first.await.unwrap().expect("a response");
}

async fn wait_for_a_release(world: World) {
    let undecided = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::status(429).held(&undecided)));
    world.backend.until_effects(1).await;
    let waiting: Vec<_> = (0..5).map(|_| world.start_send(pay_as("a"))).collect();
    tokio::time::sleep(Duration::from_millis(100)).await;
    undecided.open();
    assert_eq!(first.await.unwrap().expect("a response").status(), 429);
    let responses = responses(waiting).await;
    assert_eq!(world.backend.effects(), 2, "{responses:?}");
    let fresh: Vec<_> =
        responses.iter().filter(|response| response.get("idempotent-replayed").is_none()).collect();
    assert_eq!(fresh.len(), 1, "{responses:?}");
    for response in &responses {
        assert_eq!((response.status(), &response.body), (201, &fresh[0].body), "{responses:?}");
    }
}

async fn wait_in_vain(world: World) {
    let done = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    let asked = Instant::now();
    assert_refusal(IN_PROGRESS, &world.send(pay_as("a")).await);
    assert!(asked.elapsed() >= Duration::from_millis(300), "it waited {:?} only", asked.elapsed());
    done.open();
    let first = first.await.unwrap().expect("a response");
    assert_replay(&world.plan, &pay_as("a"), &first, &world.send(pay_as("a")).await);
    assert_eq!(world.backend.effects(), 1);
}

async fn hundred(world: World) {
    let done = Latch::new();
    let mut all: Vec<_> =
        (0..100).map(|_| world.start_send(pay_as("a").script(Script::default().held(&done)))).collect();
    // The first one cannot end; all others have to.
    until("99 of 100 are answered", async || all.iter().filter(|one| one.is_finished()).count() >= 99).await;
    // Behind the sidecar it may still be on its way to the service.
    world.backend.until_effects(1).await;
    assert_eq!(world.backend.effects(), 1);
    let owner = all.iter().position(|one| !one.is_finished()).expect("the first one is still at it");
    let owner = all.swap_remove(owner);
    for response in responses(all).await {
        assert_refusal(IN_PROGRESS, &response);
    }
    done.open();
    let first = owner.await.unwrap().expect("a response");
    assert_fresh(&world.plan, &pay_as("a"), &first);
    assert_replay(&world.plan, &pay_as("a"), &first, &world.send(pay_as("a")).await);
    assert_eq!(world.backend.effects(), 1);
}

async fn hundred_quick(world: World) {
    for round in 0..5 {
        let key = round.to_string();
        let all = (0..100).map(|_| world.start_send(pay_as(&key))).collect();
        let responses = responses(all).await;
        assert_eq!(world.backend.effects(), round + 1);
        let executed =
            |response: &&Response| response.status() == 201 && response.get("idempotent-replayed").is_none();
        let fresh: Vec<_> = responses.iter().filter(executed).collect();
        assert_eq!(fresh.len(), 1, "{fresh:?}");
        for response in responses.iter().filter(|response| response.status() != 409 && !executed(response)) {
            assert_replay(&world.plan, &pay_as(&key), fresh[0], response);
        }
        for response in responses.iter().filter(|response| response.status() == 409) {
            assert_refusal(IN_PROGRESS, response);
        }
        assert_replay(&world.plan, &pay_as(&key), fresh[0], &world.send(pay_as(&key)).await);
    }
}

async fn many_keys(world: World) {
    let request =
        |key: usize| Request::post("/payments").key(format!("k{key}")).json(format!("{{\"amount\":{key}}}"));
    let all: Vec<_> = (0..400).map(|n| (n % 20, world.start_send(request(n % 20)))).collect();
    let mut bodies = vec![Vec::new(); 20];
    for (key, one) in all {
        let response = one.await.unwrap().expect("a response");
        if response.status() == 409 {
            assert_refusal(IN_PROGRESS, &response);
        } else {
            assert_eq!(response.status(), 201, "{response:?}");
            bodies[key].push(response.body);
        }
    }
    assert_eq!(world.backend.effects(), 20);
    let mut receipts = std::collections::HashSet::new();
    for (key, bodies) in bodies.into_iter().enumerate() {
        assert!(bodies.iter().all(|body| body == &bodies[0]), "key {key} got several responses");
        assert!(receipts.insert(bodies[0].clone()), "two keys got one response");
        assert_eq!(world.send(request(key)).await.body, bodies[0]);
    }
    // Each receipt names the effect that its own request had.
    for (number, seen) in world.backend.seen().iter().enumerate() {
        let key = seen.get("idempotency-key").expect("a key").to_owned();
        let body = String::from_utf8_lossy(&seen.body).into_owned();
        let response = world.send(Request::post("/payments").key(&key).json(body)).await;
        assert_eq!(response.json()["effect"], number + 1);
    }
}

async fn renewal(world: World) {
    let done = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(3) {
        assert_refusal(IN_PROGRESS, &world.send(pay_as("a")).await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    done.open();
    let first = first.await.unwrap().expect("a response");
    assert_fresh(&world.plan, &pay_as("a"), &first);
    assert_eq!(first.get("idempotency-status"), None, "{first:?}");
    assert_replay(&world.plan, &pay_as("a"), &first, &world.send(pay_as("a")).await);
    assert_eq!(world.backend.effects(), 1);
}

async fn renewal_against_another(world: World) {
    let other = world.second().await;
    let there = async || {
        let mut connection = crate::client::Connection::open(other.address).await;
        connection.exchange(&pay_as("a")).await.expect("a response")
    };
    let done = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(5) {
        assert_refusal(IN_PROGRESS, &there().await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    done.open();
    let first = first.await.unwrap().expect("a response");
    assert_eq!((first.status(), first.get("idempotency-status")), (201, None), "{first:?}");
    assert_replay(&world.plan, &pay_as("a"), &first, &there().await);
    assert_eq!(world.backend.effects(), 1);
}

async fn pipelined(world: World) {
    let request = pay_as("a");
    let mut connection = world.connect().await;
    connection.write(&request.bytes().repeat(3)).await;
    let mut responses = Vec::new();
    for _ in 0..3 {
        responses.push(connection.response("POST").await.expect("a response"));
    }
    one_executed_the_rest_replayed(&world, &responses);
}

async fn two_instances(world: World) {
    let other = world.second().await;
    let done = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    let there = async |request: &Request| {
        let mut connection = crate::client::Connection::open(other.address).await;
        connection.exchange(request).await.expect("a response")
    };
    assert_refusal(IN_PROGRESS, &there(&pay_as("a")).await);
    assert_refusal("key-reused", &there(&Request::post("/payments").key("a").json("{}")).await);
    done.open();
    let first = first.await.unwrap().expect("a response");
    assert_replay(&world.plan, &pay_as("a"), &first, &there(&pay_as("a")).await);
    assert_eq!(world.backend.effects(), 1);
}

async fn two_instances_wait(world: World) {
    let other = world.second().await;
    let done = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    let address = other.address;
    let second = tokio::spawn(async move {
        crate::client::Connection::open(address).await.exchange(&pay_as("a")).await.expect("a response")
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!second.is_finished(), "it did not wait");
    done.open();
    let first = first.await.unwrap().expect("a response");
    assert_replay(&world.plan, &pay_as("a"), &first, &second.await.unwrap());
    assert_eq!(world.backend.effects(), 1);
}
