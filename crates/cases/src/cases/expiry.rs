//! How long things are kept.

use std::time::{Duration, Instant};

use oncegate_testkit::Latch;

use super::pay_as;
use crate::backend::Script;
use crate::client::until;
use crate::plan::Plan;
use crate::table::{Case, assert_fresh, assert_replay};
use crate::world::World;

const RETENTION: Duration = Duration::from_millis(1200);

pub(super) fn cases() -> Vec<Case> {
    let brief = Plan { retention: Some(RETENTION), ..Plan::default() };
    vec![
        Case::code(
            "C114-expiry",
            "an answer is there for all of the retention, and the key is new after it",
            |world| Box::pin(expiry(world)),
        )
        .given(brief.clone()),
        Case::code(
            "C115-replays-do-not-extend",
            "replays, conflicts and mismatches do not make it last longer",
            |world| Box::pin(replays_do_not_extend(world)),
        )
        .given(brief.clone()),
        Case::code(
            "C114-from-completion",
            "retention counts from the completion, not from the claim",
            |world| Box::pin(from_completion(world)),
        )
        .given(Plan { lease: Some(Duration::from_millis(300)), ..brief.clone() }),
        Case::code(
            "C114-tombstones",
            "a record that cannot be replayed is kept as long as one that can",
            |world| Box::pin(tombstones(world)),
        )
        .given(Plan { max_response_body: Some(1), ..brief }),
        Case::code(
            "C99-expiry-races",
            "at the end of the retention, a crowd executes once and not more",
            |world| Box::pin(expiry_races(world)),
        )
        .given(Plan { retention: Some(Duration::from_secs(1)), ..Plan::default() }),
        Case::closed("S5-restart", "what was answered is answered the same after a restart", |world| {
            Box::pin(restart(world))
        })
        .only_durable("nothing in memory survives"),
    ]
}

async fn expiry(world: World) {
    let asked = Instant::now();
    let first = world.send(pay_as("a")).await;
    while asked.elapsed() + Duration::from_millis(50) < RETENTION {
        let again = world.send(pay_as("a")).await;
        assert_replay(&world.plan, &pay_as("a"), &first, &again);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    until("the key is new", async || {
        let answer = world.send(pay_as("a")).await;
        let new = world.backend.effects() == 2;
        if new {
            assert_fresh(&world.plan, &pay_as("a"), &answer);
            assert!(asked.elapsed() >= RETENTION, "new after {:?}", asked.elapsed());
        } else {
            assert_replay(&world.plan, &pay_as("a"), &first, &answer);
        }
        new
    })
    .await;
}

async fn replays_do_not_extend(world: World) {
    world.send(pay_as("a")).await;
    let answered = Instant::now();
    until("the key is new though it was asked for all the time", async || {
        world.send(pay_as("a").json("{}")).await;
        world.backend.effects() == 2
    })
    .await;
    assert!(answered.elapsed() < RETENTION + Duration::from_secs(2), "it took {:?}", answered.elapsed());
}

async fn expiry_races(world: World) {
    let start = Instant::now();
    let mut executions = Vec::new();
    while start.elapsed() < Duration::from_millis(3500) {
        let before = world.backend.effects();
        let crowd: Vec<_> = (0..20).map(|_| world.start_send(pay_as("a"))).collect();
        for one in crowd {
            let answer = one.await.unwrap().expect("an answer");
            assert!([201, 409].contains(&answer.status()), "{answer:?}");
        }
        match world.backend.effects() - before {
            0 => {}
            1 => executions.push(Instant::now()),
            more => panic!("{more} executions at once"),
        }
    }
    assert!(executions.len() >= 3, "{} executions", executions.len());
    for pair in executions.windows(2) {
        // An execution is noticed when its whole crowd is answered, so this is not exact.
        assert!(pair[1] - pair[0] > Duration::from_millis(700), "again after {:?}", pair[1] - pair[0]);
    }
}

async fn from_completion(world: World) {
    let done = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    tokio::time::sleep(RETENTION).await;
    done.open();
    let first = first.await.unwrap().expect("an answer");
    let answered = Instant::now();
    while answered.elapsed() + Duration::from_millis(200) < RETENTION {
        assert_replay(&world.plan, &pay_as("a"), &first, &world.send(pay_as("a")).await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(world.backend.effects(), 1);
}

async fn tombstones(world: World) {
    let asked = Instant::now();
    assert_eq!(world.send(pay_as("a")).await.status(), 201);
    until("the key is new", async || {
        let answer = world.send(pay_as("a")).await;
        assert!([409, 422, 201].contains(&answer.status()), "{answer:?}");
        world.backend.effects() == 2
    })
    .await;
    assert!(asked.elapsed() >= RETENTION, "new after {:?}", asked.elapsed());
}

async fn restart(mut world: World) {
    world.start().await;
    let mut answers = Vec::new();
    for number in 0..10_u8 {
        let script = Script::whole(200, "application/octet-stream", vec![number; 1000 * usize::from(number)]);
        let script =
            if number == 4 { Script::empty(204) } else { script.field("etag", format!("\"{number}\"")) };
        answers.push(world.send(pay_as(&number.to_string()).script(script)).await);
    }
    for _ in 0..2 {
        world.close().await;
        world.start().await;
        for (number, first) in answers.iter().enumerate() {
            let request = pay_as(&number.to_string());
            let again = world.send(request.clone()).await;
            assert_replay(&world.plan, &request, first, &again);
            assert_eq!(again.get("etag"), first.get("etag"));
        }
        assert_eq!(world.send(pay_as("0").json("{}")).await.status(), 422);
    }
    assert_eq!(world.backend.effects(), 10);
}
