//! The retention of records.

use std::time::{Duration, Instant};

use oncegate_testkit::{Latch, until};

use super::pay_as;
use crate::backend::Script;
use crate::client::TIMEOUT;
use crate::plan::Plan;
use crate::table::{Case, assert_fresh, assert_replay};
use crate::world::World;

const RETENTION: Duration = Duration::from_millis(1200);

/// Stores count in whole ones.
const MILLISECOND: Duration = Duration::from_millis(1);

pub(super) fn cases() -> Vec<Case> {
    let brief = Plan { retention: Some(RETENTION), ..Plan::default() };
    cases! {
        "response-is-kept-for-the-retention": "a response is replayed during the whole retention, and the key is new afterwards"
            .given(brief.clone())
            => run (expiry);
        "replays-do-not-extend-the-retention": "replays, conflicts and mismatches do not extend the retention"
            .given(brief.clone())
            => run (replays_do_not_extend);
        "retention-counts-from-the-completion": "retention counts from the completion, not from the claim"
            .given(Plan { lease: Some(Duration::from_millis(300)), ..brief.clone() })
            => run (from_completion);
        "tombstones-are-kept-as-long": "a record that cannot be replayed is kept as long as one that can"
            .given(Plan { max_response_body: Some(1), ..brief })
            => run (tombstones);
        "crowd-at-expiry-executes-once": "at the end of the retention, many equal requests execute once"
            .given(Plan { retention: Some(Duration::from_secs(1)), ..Plan::default() })
            => run (expiry_races);
        "responses-survive-a-restart": "a response is replayed unchanged after a restart"
            .only_durable("nothing in memory survives")
            => start (restart);
    }
}

async fn expiry(world: World) {
    let asked = Instant::now();
    let first = world.send(pay_as("a")).await;
    // No other request is sent, so a second effect would come from this request.
    until("the key is new", async || {
        let response = world.send(pay_as("a")).await;
        let new = world.backend.effects() == 2;
        if new {
            assert_fresh(&world.plan, &pay_as("a"), &response);
            assert!(asked.elapsed() + MILLISECOND >= RETENTION, "new after {:?}", asked.elapsed());
        } else {
            assert_replay(&world.plan, &pay_as("a"), &first, &response);
        }
        new
    })
    .await;
}

async fn replays_do_not_extend(world: World) {
    world.send(pay_as("a")).await;
    // The retention began before this time, and a request that got a replay was sent before it ended.
    let answered = Instant::now();
    let mut last_kept = answered;
    until("the key is new though it was asked for all the time", async || {
        let sent = Instant::now();
        world.send(pay_as("a").json("{}")).await;
        let new = world.backend.effects() == 2;
        if !new {
            last_kept = sent;
        }
        new
    })
    .await;
    let kept = last_kept - answered;
    assert!(kept < RETENTION + Duration::from_millis(100), "kept for {kept:?}");
}

async fn expiry_races(world: World) {
    let retention = world.plan.retention.expect("a retention");
    let give_up = Instant::now() + TIMEOUT;
    // The earliest and the latest possible time of each execution.
    let mut executions: Vec<(Instant, Instant)> = Vec::new();
    while executions.len() < 4 {
        assert!(Instant::now() < give_up, "{} executions", executions.len());
        let before = world.backend.effects();
        let start = Instant::now();
        let crowd: Vec<_> = (0..20).map(|_| world.start_send(pay_as("a"))).collect();
        for one in crowd {
            let response = one.await.unwrap().expect("a response");
            assert!([201, 409].contains(&response.status()), "{response:?}");
        }
        let end = Instant::now();
        match world.backend.effects() - before {
            0 => {}
            1 => executions.push((start, end)),
            // On a busy machine, the retention of the first one may end before all requests were answered.
            more => assert!(retention * (more as u32 - 1) <= end - start, "{more} executions at once"),
        }
    }
    for pair in executions.windows(2) {
        let at_most = pair[1].1 - pair[0].0;
        assert!(at_most + MILLISECOND >= retention, "again after {at_most:?} at the most");
    }
}

async fn from_completion(world: World) {
    let done = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    tokio::time::sleep(RETENTION).await;
    let not_yet_completed = Instant::now();
    done.open();
    let first = first.await.unwrap().expect("a response");
    loop {
        let again = world.send(pay_as("a")).await;
        let effects = world.backend.effects();
        if not_yet_completed.elapsed() + MILLISECOND >= RETENTION {
            break;
        }
        assert_replay(&world.plan, &pay_as("a"), &first, &again);
        assert_eq!(effects, 1);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn tombstones(world: World) {
    let asked = Instant::now();
    assert_eq!(world.send(pay_as("a")).await.status(), 201);
    until("the key is new", async || {
        let response = world.send(pay_as("a")).await;
        assert!([409, 422, 201].contains(&response.status()), "{response:?}");
        world.backend.effects() == 2
    })
    .await;
    assert!(asked.elapsed() + MILLISECOND >= RETENTION, "new after {:?}", asked.elapsed());
}

async fn restart(mut world: World) {
    world.start().await;
    let mut responses = Vec::new();
    for number in 0..10_u8 {
        let script = Script::whole(200, "application/octet-stream", vec![number; 1000 * usize::from(number)]);
        let script =
            if number == 4 { Script::empty(204) } else { script.field("etag", format!("\"{number}\"")) };
        responses.push(world.send(pay_as(&number.to_string()).script(script)).await);
    }
    for _ in 0..2 {
        world.end().await;
        world.start().await;
        for (number, first) in responses.iter().enumerate() {
            let request = pay_as(&number.to_string());
            let again = world.send(request.clone()).await;
            assert_replay(&world.plan, &request, first, &again);
            assert_eq!(again.get("etag"), first.get("etag"));
        }
        assert_eq!(world.send(pay_as("0").json("{}")).await.status(), 422);
    }
    assert_eq!(world.backend.effects(), 10);
}
