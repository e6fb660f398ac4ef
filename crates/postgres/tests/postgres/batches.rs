//! Batches: commands that are ready together are sent together.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::{
    Command, Completion, Outcome, RecordId, Store as _, StoreErrorKind, StoredResponse, limits,
};
use oncegate_postgres::PostgresStore;
use sqlx::Row as _;

use crate::support::{Database, claim, claims, completes, id, renews, response, run, sql_id, token, try_run};

/// A store that sends one batch at a time, so that further commands gather.
async fn one_sender(database: &Database) -> Arc<PostgresStore> {
    Arc::new(PostgresStore::open(database.options().with_pool_size(3).unwrap()).await.unwrap())
}

async fn all(
    store: &Arc<PostgresStore>,
    commands: impl IntoIterator<Item = (RecordId, Command)>,
) -> Vec<Result<Outcome, oncegate_core::StoreError>> {
    // Sends every command before it awaits the first reply.
    let sent: Vec<_> = commands
        .into_iter()
        .map(|(id, command)| {
            let store = store.clone();
            tokio::spawn(async move { store.apply(id, command).await })
        })
        .collect();
    let mut replies = Vec::new();
    for reply in sent {
        replies.push(reply.await.unwrap());
    }
    replies
}

#[tokio::test]
async fn many_commands_share_few_transactions_and_get_their_own_replies() {
    let database = Database::fresh().await;
    let store = one_sender(&database).await;
    let granted = all(&store, (0..200).map(|n| (id(n), claims(n.into())))).await;
    let tokens: Vec<_> = granted.iter().map(|outcome| token(outcome.as_ref().unwrap())).collect();
    let mut admin = database.connect().await;
    let transactions = "SELECT count(DISTINCT xmin::text) FROM oncegate.records";
    let count: i64 = try_run(&mut admin, transactions).await.unwrap()[0].get(0);
    assert!(count <= 100, "{count} transactions for 200 claims");
    let end = |n: u8| match n % 4 {
        0 => Completion::Tombstone,
        1 => Completion::Unknown,
        2 => Completion::Awaited,
        _ => Completion::Replayable(response(b"paid")),
    };
    // Every tenth has a token that is not its own.
    let shown =
        |n: u8| if n % 10 == 9 { tokens[usize::from(n)].get() + 1 } else { tokens[usize::from(n)].get() };
    let completed =
        all(&store, (0..200).map(|n| (id(n), completes(oncegate_core::FencingToken::new(shown(n)), end(n)))))
            .await;
    let count: i64 = try_run(&mut admin, transactions).await.unwrap()[0].get(0);
    assert!(count <= 100, "{count} transactions for 200 completions");
    let again = all(&store, (0..200).map(|n| (id(n), claims(1000 + u128::from(n))))).await;
    for n in 0..200_u8 {
        let (end, asked) =
            (completed[usize::from(n)].as_ref().unwrap(), again[usize::from(n)].as_ref().unwrap());
        if n % 10 == 9 {
            assert_eq!(*end, Outcome::Fenced, "{n}");
            assert!(matches!(asked, Outcome::InProgress { .. }), "{n}: {asked:?}");
            continue;
        }
        assert_eq!(*end, Outcome::Completed, "{n}");
        let expected = match n % 4 {
            1 => Outcome::Unknown,
            3 => Outcome::Replay(response(b"paid")),
            _ => Outcome::Unreplayable,
        };
        assert_eq!(*asked, expected, "{n}");
    }
}

#[tokio::test]
async fn a_failing_command_does_not_fail_the_others_of_its_batch() {
    let database = Database::fresh().await;
    let store = one_sender(&database).await;
    // An unreadable record, a claim that violates the contract, and a record that an open transaction has locked.
    for n in [5, 6] {
        store.apply(id(n), claims(1)).await.unwrap();
    }
    let mut admin = database.connect().await;
    run(&mut admin, &format!("UPDATE oncegate.records SET state = 'paused' WHERE id = {}", sql_id(id(5))))
        .await;
    run(&mut admin, &format!("BEGIN; SELECT FROM oncegate.records WHERE id = {} FOR UPDATE", sql_id(id(6))))
        .await;
    let command = |n: u8| {
        // The fifth is claimed by another attempt, the sixth again by its owner, and the seventh with too long a retention.
        let mut claim = claim(if n == 6 { 1 } else { 2 });
        if n == 7 {
            claim.retention = limits::MAX_RETENTION + Duration::from_secs(1);
        }
        (id(n), Command::Claim(claim))
    };
    let replies = all(&store, (0..40).map(command)).await;
    for (n, reply) in replies.iter().enumerate() {
        match n {
            5 => assert_eq!(reply.as_ref().unwrap_err().kind(), StoreErrorKind::Corrupt),
            6 => assert_eq!(reply.as_ref().unwrap_err().kind(), StoreErrorKind::Locked),
            7 => assert_eq!(reply.as_ref().unwrap_err().kind(), StoreErrorKind::Invalid),
            _ => assert!(matches!(reply, Ok(Outcome::Execute(_))), "{n}: {reply:?}"),
        }
    }
}

/// A response of the given number of MiB, filled with `number`.
fn large(mebibytes: usize, number: u8) -> Completion {
    let body = Bytes::from(vec![number; mebibytes << 20]);
    Completion::Replayable(StoredResponse::new(200, &[], &[body], &[]).unwrap())
}

#[tokio::test]
async fn a_batch_of_replays_is_bounded_by_the_bytes_of_its_responses() {
    let database = Database::fresh().await;
    let store = one_sender(&database).await;
    let sizes = |number: u8| if number == 7 { 20 } else { 3 };
    for number in 0..20 {
        let owner = token(&store.apply(id(number), claims(1)).await.unwrap());
        let end = completes(owner, large(sizes(number), number));
        assert_eq!(store.apply(id(number), end).await.unwrap(), Outcome::Completed);
    }
    // One statement, with the replies of the contract: new claims among replays.
    let mut admin = database.connect().await;
    let ids: Vec<_> = (0..24).map(|number| sql_id(id(number))).collect();
    let fill = |value: &str| vec![value; ids.len()].join(",");
    let fingerprint = format!("decode('01{}', 'hex')", RecordId::from_bytes(*claim(1).fingerprint.digest()));
    let many = format!(
        "SELECT outcome, coalesce(octet_length(response), 0)::bigint AS size FROM oncegate.claim_many(ARRAY[{}], ARRAY[{}], \
         ARRAY[{}], ARRAY[{}]::bigint[], ARRAY[{}]::bigint[], ARRAY[{}], ARRAY[{}], ARRAY[{}])",
        ids.join(","),
        fill("decode(repeat('05', 16), 'hex')"),
        fill(&fingerprint),
        fill("1000"),
        fill("60000"),
        fill("'park'"),
        fill("decode(repeat('07', 8), 'hex')"),
        fill("'x'"),
    );
    let rows = try_run(&mut admin, &many).await.unwrap();
    let outcomes: Vec<String> = rows.iter().map(|row| row.get("outcome")).collect();
    let size: i64 = rows.iter().map(|row| row.get::<i64, _>("size")).sum();
    assert!(size <= 12 << 20, "{size} bytes in one reply");
    assert_eq!(outcomes[..3], ["replay", "replay", "replay"]);
    assert!(outcomes[3..20].iter().all(|outcome| outcome == "later"), "{outcomes:?}");
    assert!(outcomes[20..].iter().all(|outcome| outcome == "execute"), "{outcomes:?}");
    // The store asks again until each claim has its reply, even the one that is larger than the bound of a batch.
    let replies = all(&store, (0..20).map(|number| (id(number), claims(2)))).await;
    for (number, reply) in (0..20).zip(replies) {
        let Outcome::Replay(response) = reply.unwrap() else { panic!("{number}") };
        assert_eq!(response.body().len(), sizes(number) << 20, "{number}");
        assert!(response.body().iter().all(|byte| *byte == number));
    }
}

#[tokio::test]
async fn commands_on_one_record_are_answered_in_order() {
    let database = Database::fresh().await;
    let store = one_sender(&database).await;
    let replies = all(&store, (0..60).map(|n| (id(n % 2), claims(n.into())))).await;
    let executed = replies.iter().filter(|reply| matches!(reply, Ok(Outcome::Execute(_)))).count();
    let waiting = replies.iter().filter(|reply| matches!(reply, Ok(Outcome::InProgress { .. }))).count();
    assert_eq!((executed, waiting), (2, 58));
    let owner = token(replies.iter().flatten().find(|reply| matches!(reply, Outcome::Execute(_))).unwrap());
    assert!(matches!(
        store.apply(id(0), renews(owner)).await.unwrap(),
        Outcome::Renewed { .. } | Outcome::Fenced
    ));
}

#[tokio::test]
async fn a_claim_whose_caller_has_gone_away_is_not_sent() {
    let database = Database::fresh().await;
    let store = one_sender(&database).await;
    let mut admin = database.connect().await;
    // The first claim hangs until the table is unlocked. The others wait behind it, and one caller gives up.
    run(&mut admin, "BEGIN; LOCK TABLE oncegate.records").await;
    let first = tokio::spawn({
        let store = store.clone();
        async move { store.apply(id(1), claims(1)).await }
    });
    let waits = "SELECT FROM pg_locks WHERE NOT granted";
    let mut watcher = database.connect().await;
    while try_run(&mut watcher, waits).await.unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    drop(store.apply(id(2), claims(2)));
    let third = store.apply(id(3), claims(3));
    run(&mut admin, "COMMIT").await;
    assert!(matches!(first.await.unwrap().unwrap(), Outcome::Execute(_)));
    assert!(matches!(third.await.unwrap(), Outcome::Execute(_)));
    assert_eq!(store.lookup(id(2)).await.unwrap(), None);
}

/// The changes that the owner of an ended record may still make, and those that it may not.
#[tokio::test]
async fn a_batch_of_completions_changes_no_record_that_has_ended() {
    let database = Database::fresh().await;
    let store = one_sender(&database).await;
    let granted = all(&store, (0..60).map(|n| (id(n), claims(n.into())))).await;
    let tokens: Vec<_> = granted.iter().map(|outcome| token(outcome.as_ref().unwrap())).collect();
    let end = |body| Completion::Replayable(response(body));
    let first = |n: u8| match n % 4 {
        0 => Completion::Tombstone,
        1 => Completion::Unknown,
        2 => Completion::Awaited,
        _ => end(b"first"),
    };
    let mut ended = Vec::new();
    // The first ends, then other ones, then the same ones again, and then still other ones.
    for round in 0..4 {
        let completion = |n: u8| match round {
            0 => first(n),
            1 | 2 => end(b"second"),
            _ => end(b"third"),
        };
        let commands = (0..60).map(|n| (id(n), completes(tokens[usize::from(n)], completion(n))));
        ended.push(all(&store, commands).await);
    }
    let found = all(&store, (0..60).map(|n| (id(n), claims(1000 + u128::from(n))))).await;
    for n in 0..60_u8 {
        let outcomes = |round: usize| ended[round][usize::from(n)].as_ref().unwrap().clone();
        // An unknown outcome may become known, and a missing response may be added, both only once.
        let (second, is) = match n % 4 {
            0 => (Outcome::Fenced, Outcome::Unreplayable),
            3 => (Outcome::Fenced, Outcome::Replay(response(b"first"))),
            _ => (Outcome::Completed, Outcome::Replay(response(b"second"))),
        };
        assert_eq!(
            [outcomes(0), outcomes(1), outcomes(2), outcomes(3)],
            [Outcome::Completed, second.clone(), second, Outcome::Fenced]
        );
        assert_eq!(*found[usize::from(n)].as_ref().unwrap(), is, "{n}");
    }
}

/// A batch finds out which of its records were inserted by another transaction while it waited for that transaction. A row
/// that is inserted by hand takes no lock that a claim would see.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_claims_leaves_out_records_that_appear_meanwhile() {
    let database = Database::fresh().await;
    let store = database.store().await;
    store.apply(id(9), claims(1)).await.unwrap();
    let (mut other, mut admin, mut mine) =
        (database.connect().await, database.connect().await, database.connect().await);
    let copy = format!(
        "BEGIN; INSERT INTO oncegate.records (id, state, fingerprint, token, attempts, caller, operation, created_at, \
         changed_at, expires_at, purge_at) SELECT {}, 'tombstone', fingerprint, 5, 1, caller, operation, created_at, changed_at, \
         expires_at, purge_at FROM oncegate.records",
        sql_id(id(2))
    );
    run(&mut other, &copy).await;
    let many = format!(
        "SELECT n, outcome, token FROM oncegate.claim_many(ARRAY[{}, {}, {}], array_fill(decode(repeat('02', 16), 'hex'), ARRAY[3]), \
         array_fill((SELECT fingerprint FROM oncegate.records), ARRAY[3]), ARRAY[9000, 9000, 9000], ARRAY[9000, 9000, 9000], \
         ARRAY['park', 'park', 'park'], array_fill('\\x0000000000000000'::bytea, ARRAY[3]), ARRAY['', '', '']) \
         WITH ORDINALITY AS c (outcome, token, attempts, lease_until, after_abandoned, lease_left_ms, response, clock, n) ORDER BY n",
        sql_id(id(1)),
        sql_id(id(2)),
        sql_id(id(3))
    );
    let pid: i32 = try_run(&mut mine, "SELECT pg_backend_pid()").await.unwrap()[0].get(0);
    let batch = tokio::spawn(async move { try_run(&mut mine, &many).await });
    let waits = format!("SELECT count(*) FROM pg_locks WHERE pid = {pid} AND NOT granted");
    let until = tokio::time::Instant::now() + Duration::from_secs(60);
    while try_run(&mut admin, &waits).await.unwrap()[0].get::<i64, _>(0) == 0 {
        assert!(tokio::time::Instant::now() < until && !batch.is_finished(), "the batch does not wait");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    run(&mut other, "COMMIT").await;
    let rows = batch.await.unwrap().unwrap();
    let outcomes: Vec<&str> = rows.iter().map(|row| row.get("outcome")).collect();
    assert_eq!(outcomes, ["execute", "unreplayable", "execute"]);
    let states = "SELECT string_agg(state, ' ' ORDER BY id) FROM oncegate.records";
    let states: String = try_run(&mut admin, states).await.unwrap()[0].get(0);
    assert_eq!(states, "in-progress tombstone in-progress in-progress");
}

/// A slow server answers all commands of a burst, in batches that it can process in time.
#[tokio::test]
async fn a_slow_server_gets_smaller_batches_instead_of_losing_large_ones() {
    const PER_ROW: &str = "CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS \
        $$BEGIN PERFORM pg_sleep(0.01); RETURN new; END$$; \
        CREATE TRIGGER slow BEFORE INSERT OR UPDATE ON oncegate.records FOR EACH ROW EXECUTE FUNCTION public.slow()";
    let database = Database::fresh().await;
    let mut admin = database.connect().await;
    let options = database.options().with_pool_size(3).unwrap();
    // 128 rows take three times the command timeout.
    let options = options.with_command_timeout(Duration::from_millis(400)).unwrap();
    let store = Arc::new(PostgresStore::open(options).await.unwrap());
    // Batches are large when the server becomes slow.
    for round in 0..4 {
        let claims = (0..250).map(|n| (id(n), claims(u128::from(n) + 1000 * round)));
        assert!(all(&store, claims).await.iter().all(Result::is_ok));
    }
    run(&mut admin, "TRUNCATE oncegate.records").await;
    run(&mut admin, PER_ROW).await;
    // The first large batches fail. After a few rounds (more on a busy machine) none fails.
    let mut round = 0;
    loop {
        round += 1;
        run(&mut admin, "DELETE FROM oncegate.records").await;
        let claims = (0..200).map(|n| (id(n), claims(u128::from(n) + 10_000 * round)));
        let lost: Vec<_> = all(&store, claims).await.into_iter().filter_map(Result::err).collect();
        assert!(lost.iter().all(|error| error.kind() == StoreErrorKind::Unavailable), "{lost:?}");
        if lost.is_empty() {
            break;
        }
        assert!(round < 8, "{} lost in round {round}", lost.len());
    }
    assert!(round > 1, "no large batch was lost, so that nothing had to adapt");
}
