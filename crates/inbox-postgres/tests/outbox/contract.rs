//! The functions that relays call, one by one: what relays of any language may rely on.

use oncegate_inbox_postgres::Outbox;
use oncegate_postgres::sqlx::postgres::{PgConnection, PgRow};
use oncegate_postgres::sqlx::{AssertSqlSafe, Connection as _, Row as _, query_scalar};
use oncegate_testkit::until;

use crate::database::{Database, message, run, try_run};

/// A row of a run, or the last row with the position of the next call.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    token: Option<i64>,
    line: i64,
    seq: Option<i64>,
    id: Option<String>,
}

async fn take(connection: &mut PgConnection, arguments: &str) -> Vec<Row> {
    let rows =
        run(connection, &format!("SELECT token, line, seq, id FROM oncegate.outbox_take({arguments})")).await;
    let row = |row: &PgRow| Row { token: row.get(0), line: row.get(1), seq: row.get(2), id: row.get(3) };
    rows.iter().map(row).collect()
}

fn ids(rows: &[Row]) -> Vec<&str> {
    rows.iter().filter_map(|row| row.id.as_deref()).collect()
}

/// Settles a run of these rows with one outcome. Returns `true` if the run held them.
async fn settle(connection: &mut PgConnection, rows: &[Row], outcome: &str) -> bool {
    let Row { token: Some(token), line, seq: Some(first), .. } = rows[0] else { panic!("no run") };
    let seqs: Vec<String> = rows.iter().map(|row| row.seq.unwrap().to_string()).collect();
    let (seqs, many) = (seqs.join(","), rows.len());
    let call = format!(
        "SELECT * FROM oncegate.outbox_settle(ARRAY[{token}], ARRAY[{line}], ARRAY[{first}], \
         array_fill({line}::bigint, ARRAY[{many}]), ARRAY[{seqs}], array_fill('{outcome}'::text, ARRAY[{many}]), \
         array_fill(0::bigint, ARRAY[{many}]), array_fill('why'::text, ARRAY[{many}]))"
    );
    !run(connection, &call).await.is_empty()
}

async fn renew(connection: &mut PgConnection, row: &Row, lease_ms: u32) -> bool {
    let (token, line, first) = (row.token.unwrap(), row.line, row.seq.unwrap());
    let call =
        format!("SELECT oncegate.outbox_renew(ARRAY[{token}], ARRAY[{line}], ARRAY[{first}], {lease_ms})");
    !run(connection, &call).await.is_empty()
}

/// All that is in the table, so that it is seen that nothing was changed.
async fn table(connection: &mut PgConnection) -> String {
    let all = "SELECT coalesce(string_agg(o::text, '; ' ORDER BY o.seq), '') FROM oncegate.outbox AS o";
    query_scalar(AssertSqlSafe(all.to_owned())).fetch_one(connection).await.unwrap()
}

async fn after_the_lease(connection: &mut PgConnection) {
    let held = "SELECT count(*) FROM oncegate.outbox WHERE free_at > oncegate.now_ms()";
    until("the lease is over", async || {
        query_scalar::<_, i64>(AssertSqlSafe(held.to_owned())).fetch_one(&mut *connection).await.unwrap() == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outcomes_of_a_line_that_another_relay_took_change_nothing() {
    let database = Database::with_schema().await;
    let (mut slow, mut other) = (database.connect().await, database.connect().await);
    database.send(&[1, 2, 3].map(|n| message(Some("k"), n))).await;
    database.send(&[message(None, 1)]).await;
    let first = take(&mut slow, "null, 100, 1000000, 2, 1").await;
    assert_eq!(ids(&first), ["k/1", "k/2", "/1"]);
    after_the_lease(&mut other).await;
    let second = take(&mut other, "null, 100, 1000000, 2, 60000").await;
    assert_eq!(ids(&second), ids(&first));
    assert!(second[0].token > first[0].token);

    let before = table(&mut other).await;
    for outcome in ["confirmed", "retry", "refused", "aside"] {
        for run in [&first[..2], &first[2..]] {
            assert!(!settle(&mut slow, run, outcome).await, "{outcome}");
        }
    }
    for row in [&first[0], &first[2]] {
        assert!(!renew(&mut slow, row, 1).await);
    }
    assert_eq!(table(&mut other).await, before);
    // A held line is not taken by another relay.
    assert_eq!(take(&mut slow, "null, 100, 1000000, 2, 60000").await, []);
    assert!(renew(&mut other, &second[0], 60000).await);
    assert!(settle(&mut other, &second[..2], "confirmed").await);
    assert!(settle(&mut other, &second[2..], "confirmed").await);
    assert_eq!(ids(&take(&mut slow, "null, 100, 1000000, 2, 60000").await), ["k/3"]);
}

/// The token decides, and not the time: what was published while the database was away counts.
#[tokio::test(flavor = "multi_thread")]
async fn an_ended_lease_can_be_renewed_if_no_relay_took_the_line() {
    let database = Database::with_schema().await;
    let mut relay = database.connect().await;
    database.send(&[1, 2, 3].map(|n| message(Some("k"), n))).await;
    let taken = take(&mut relay, "null, 100, 1000000, 100, 1").await;
    after_the_lease(&mut relay).await;
    assert!(renew(&mut relay, &taken[0], 1).await);
    after_the_lease(&mut relay).await;
    assert!(settle(&mut relay, &taken[..2], "confirmed").await);
    assert_eq!(ids(&take(&mut relay, "null, 100, 1000000, 100, 60000").await), ["k/3"]);
}

/// A clock that is set back by a day delays no message by a day.
#[tokio::test(flavor = "multi_thread")]
async fn no_lease_is_longer_than_an_hour() {
    let database = Database::with_schema().await;
    let mut relay = database.connect().await;
    database.send(&[message(Some("k"), 1), message(None, 1)]).await;
    for (held_for, count) in [(3_500_000, 0), (86_400_000, 2)] {
        run(&mut relay, &format!("UPDATE oncegate.outbox SET free_at = oncegate.now_ms() + {held_for}"))
            .await;
        assert_eq!(take(&mut relay, "null, 100, 1000000, 100, 60000").await.len(), count);
    }
}

/// A row that was committed late, before a held run, is a run of its own: its relay does not get rows of the held run.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_ends_where_another_one_begins() {
    let database = Database::with_schema().await;
    let (mut relay, mut late) = (database.connect().await, database.connect().await);
    let mut transaction = late.begin().await.unwrap();
    Outbox::new().send(&mut transaction, &message(Some("k"), "late")).await.unwrap();
    database.send(&[1, 2].map(|n| message(Some("k"), n))).await;
    let held = take(&mut relay, "null, 100, 1000000, 100, 60000").await;
    assert_eq!(ids(&held), ["k/1", "k/2"]);
    transaction.commit().await.unwrap();
    database.send(&[message(Some("k"), 3)]).await;
    let alone = take(&mut relay, "null, 100, 1000000, 100, 60000").await;
    assert_eq!(ids(&alone), ["k/late"]);
    // As long as it is there, nothing behind it is taken, with any outcome of the held run.
    assert!(settle(&mut relay, &held, "confirmed").await);
    assert_eq!(take(&mut relay, "null, 100, 1000000, 100, 60000").await, []);
    assert!(settle(&mut relay, &alone, "retry").await);
    assert_eq!(ids(&take(&mut relay, "null, 100, 1000000, 100, 60000").await), ["k/late", "k/3"]);
}

/// Between the look at a line and its lock a smaller seq is committed, and a message that comes after it: neither may be
/// published as if the smaller one were not there. The moment in between is made long by a lock of the test's.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_commits_during_a_take_is_seen() {
    let database = Database::with_schema().await;
    let (mut gate, mut late, mut relay) =
        (database.connect().await, database.connect().await, database.connect().await);
    let lock = "            SELECT o.seq INTO h.seq FROM oncegate.outbox AS o";
    let source: String = query_scalar(
        "SELECT pg_get_functiondef('oncegate.outbox_take(bigint, integer, bigint, integer, bigint)'::regprocedure)",
    )
    .fetch_one(&mut gate)
    .await
    .unwrap();
    assert_eq!(source.matches(lock).count(), 1);
    let gated = source.replace(lock, &format!("PERFORM pg_advisory_xact_lock_shared(42);\n{lock}"));
    run(&mut gate, &gated).await;
    run(&mut gate, "SELECT pg_advisory_lock(42)").await;

    let mut transaction = late.begin().await.unwrap();
    Outbox::new().send(&mut transaction, &message(Some("k"), 1)).await.unwrap();
    database.send(&[message(Some("k"), "at the same time")]).await;
    let taking = tokio::spawn(async move {
        let taken = take(&mut relay, "null, 100, 1000000, 100, 60000").await;
        (taken, take(&mut relay, "null, 100, 1000000, 100, 60000").await)
    });
    until("a relay is between look and lock", async || {
        let waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted \
                       AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
        query_scalar::<_, i64>(waiting).fetch_one(&mut gate).await.unwrap() == 1
    })
    .await;
    transaction.commit().await.unwrap();
    database.send(&[message(Some("k"), 2)]).await;
    run(&mut gate, "SELECT pg_advisory_unlock(42)").await;
    let (taken, next) = taking.await.unwrap();
    assert_eq!(ids(&taken), [""; 0], "its first row is another one by now");
    assert_eq!(ids(&next), ["k/1", "k/at the same time", "k/2"]);
}

/// A locked row blocks only its own line.
#[tokio::test(flavor = "multi_thread")]
async fn locked_rows_block_the_rows_behind_them() {
    let database = Database::with_schema().await;
    let (mut other, mut relay) = (database.connect().await, database.connect().await);
    database.send(&[message(Some("a"), 1), message(Some("a"), 2), message(Some("b"), 1)]).await;
    database.send(&[message(None, 1), message(None, 2)]).await;
    run(&mut other, "BEGIN; SELECT FROM oncegate.outbox WHERE id IN ('a/1', '/1') FOR UPDATE").await;
    let mut taken = take(&mut relay, "null, 100, 1000000, 100, 1000").await;
    taken.sort_by(|a, b| a.id.cmp(&b.id));
    assert_eq!(ids(&taken), ["/2", "b/1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn takes_are_limited_and_go_round_all_lines() {
    let database = Database::with_schema().await;
    let mut relay = database.connect().await;
    for key in ["a", "b", "c"] {
        database.send(&[1, 2, 3, 4].map(|n| message(Some(key), n))).await;
    }
    let many: Vec<_> = (0..3).map(|n| message(None, n)).collect();
    database.send(&many).await;
    // By rows: three runs of three at the most, in pieces of five.
    let mut all = Vec::new();
    let mut after = "null".to_owned();
    let mut calls = 0;
    loop {
        let taken = take(&mut relay, &format!("{after}, 5, 1000000, 3, 60000")).await;
        calls += 1;
        let (rows, last): (Vec<_>, Vec<_>) = taken.into_iter().partition(|row| row.seq.is_some());
        assert!(rows.len() <= 5);
        all.extend(rows);
        match &last[..] {
            [] => break,
            [last] => after = last.line.to_string(),
            more => panic!("{more:?}"),
        }
    }
    assert!((3..=5).contains(&calls), "{calls}");
    let mut taken: Vec<_> = ids(&all);
    taken.sort_unstable();
    let a_run_each = taken.iter().filter(|id| !id.starts_with('/')).count();
    assert!((7..=9).contains(&a_run_each) && taken.len() == a_run_each + 3, "{taken:?}");
    assert!(["a/1", "b/1", "c/1"].iter().all(|first| taken.contains(first)), "{taken:?}");

    // By bytes: one row of any size, and no second one.
    let mut large = message(Some("large"), 1);
    large.payload = vec![7; 100_000].into();
    database.send(&[large.clone(), large]).await;
    let taken = take(&mut relay, "null, 100, 1, 100, 60000").await;
    assert_eq!((taken.len(), taken[0].id.as_deref(), taken[1].seq), (2, Some("large/1"), None));
    for wrong in [
        "null, 0, 1, 1, 1", "null, 1, 0, 1, 1", "null, 1, 1, 0, 1", "null, 1, 1, 1, 0", "null, null, 1, 1, 1",
    ] {
        assert!(
            try_run(&mut relay, &format!("SELECT oncegate.outbox_take({wrong})")).await.is_err(),
            "{wrong}"
        );
    }

    // A call looks at 1000 lines, and the next one goes on behind them.
    run(&mut relay, "TRUNCATE oncegate.outbox").await;
    let send = "SELECT count(oncegate.send_text('t', 'x', CASE WHEN n % 2 = 0 THEN n::text END, null, n::text)) \
                FROM generate_series(1, 3000) AS n";
    run(&mut relay, send).await;
    run(&mut relay, "UPDATE oncegate.outbox SET free_at = oncegate.now_ms() + 3500000 WHERE id <> '2999'")
        .await;
    let (mut after, mut calls) = ("null".to_owned(), 0);
    let found = loop {
        let taken = take(&mut relay, &format!("{after}, 100, 1000000, 100, 60000")).await;
        calls += 1;
        match &taken[..] {
            [nothing] if nothing.seq.is_none() => after = nothing.line.to_string(),
            found => break found.to_vec(),
        }
    };
    assert_eq!((ids(&found), calls), (vec!["2999"], 3));
}

/// A sender makes neither another sender of the key nor a relay wait; and it waits for neither.
#[tokio::test(flavor = "multi_thread")]
async fn senders_do_not_wait() {
    let database = Database::with_schema().await;
    let (mut one, mut two, mut relay) =
        (database.connect().await, database.connect().await, database.connect().await);
    let mut open = one.begin().await.unwrap();
    Outbox::new().send(&mut open, &message(Some("k"), 1)).await.unwrap();
    for connection in [&mut two, &mut relay] {
        run(connection, "SET lock_timeout = '1ms'").await;
    }
    // The same key, and the same identifier.
    Outbox::new().send(&mut two, &message(Some("k"), 1)).await.unwrap();
    let taken = take(&mut relay, "null, 100, 1000000, 100, 60000").await;
    Outbox::new().send(&mut two, &message(Some("k"), 2)).await.unwrap();
    assert!(settle(&mut relay, &taken, "confirmed").await);
    open.commit().await.unwrap();
    assert_eq!(ids(&take(&mut relay, "null, 100, 1000000, 100, 60000").await), ["k/1", "k/2"]);
}

/// A standby that was behind takes over: rows and numbers of the last moments are gone, and given again to others.
#[tokio::test(flavor = "multi_thread")]
async fn confirmations_before_a_failover_do_not_apply_to_rows_after_it() {
    let database = Database::with_schema().await;
    let (mut before, mut after) = (database.connect().await, database.connect().await);
    run(&mut before, "SELECT nextval('oncegate.outbox_seq'), nextval('oncegate.outbox_token')").await;
    for key in [None, Some("k")] {
        let numbers =
            "SELECT s.last_value, t.last_value FROM oncegate.outbox_seq AS s, oncegate.outbox_token AS t";
        let numbers = run(&mut before, numbers).await;
        let (seq, token): (i64, i64) = (numbers[0].get(0), numbers[0].get(1));
        database.send(&[message(key, "lost")]).await;
        let lost = take(&mut before, "null, 100, 1000000, 100, 60000").await;
        assert_eq!(lost.len(), 1);
        let back =
            format!("SELECT setval('oncegate.outbox_seq', {seq}), setval('oncegate.outbox_token', {token})");
        run(&mut after, &format!("DELETE FROM oncegate.outbox; {back}")).await;
        database.send(&[message(key, "new")]).await;
        let new = take(&mut after, "null, 100, 1000000, 100, 60000").await;
        assert_eq!((new[0].line, new[0].seq), (lost[0].line, lost[0].seq));
        assert!(!renew(&mut before, &lost[0], 1).await);
        assert!(!settle(&mut before, &lost, "confirmed").await);
        assert!(settle(&mut after, &new, "confirmed").await);
    }
}

/// The size of well compressed data counts uncompressed, as a relay gets it.
#[tokio::test(flavor = "multi_thread")]
async fn headers_count_uncompressed() {
    let database = Database::with_schema().await;
    let mut relay = database.connect().await;
    let with_header = |key, n| {
        let mut message = message(key, n);
        message.headers.push(("h".to_owned(), vec![b'x'; 100_000].into()));
        message
    };
    database.send(&(0..10).map(|n| with_header(Some("k"), n)).collect::<Vec<_>>()).await;
    let taken = take(&mut relay, "null, 100, 350000, 100, 60000").await;
    assert_eq!((ids(&taken).len(), taken.last().unwrap().seq), (3, None));
    run(&mut relay, "TRUNCATE oncegate.outbox").await;
    database.send(&(0..10).map(|n| with_header(None, n)).collect::<Vec<_>>()).await;
    let taken = take(&mut relay, "null, 100, 350000, 100, 60000").await;
    assert_eq!((ids(&taken).len(), taken.last().unwrap().seq), (3, None));
    // Not even if they come from a table that stores them compressed.
    let table = "CREATE TABLE kept (h bytea[]); INSERT INTO kept VALUES (ARRAY[convert_to(repeat('x', 2000000), 'UTF8')])";
    run(&mut relay, table).await;
    let send = "SELECT oncegate.send('t', 'x', header_names => ARRAY['h'], header_values => h) FROM kept";
    let code = try_run(&mut relay, send)
        .await
        .err()
        .and_then(|error| error.as_database_error()?.code().map(String::from));
    assert_eq!(code.as_deref(), Some("22023"));
}

/// While an old snapshot is open, messages that were published stay in the table's index. A relay steps over them, but not for
/// each line again.
#[tokio::test(flavor = "multi_thread")]
async fn a_take_under_an_old_snapshot_skips_deleted_rows_once_not_per_line() {
    const DELETED: i64 = 10_000;
    let database = Database::with_schema().await;
    let mut admin = database.connect().await;
    for key in ["int4send(n % 500)", "NULL"] {
        let mut old = database.connect().await;
        run(&mut old, "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1").await;
        let send =
            format!("SELECT oncegate.send('orders', '\\x00', {key}) FROM generate_series(1, {DELETED}) AS n");
        run(&mut admin, &send).await;
        // The statistics know of no row then.
        run(&mut admin, "DELETE FROM oncegate.outbox; ANALYZE oncegate.outbox").await;
        run(&mut admin, &send.replace(&DELETED.to_string(), "500")).await;
        let take = "SELECT * FROM oncegate.outbox_take(NULL, 1000, 67108864, 50, 30000)";
        let plan = run(&mut admin, &format!("EXPLAIN (ANALYZE, BUFFERS) {take}")).await;
        let lines: Vec<String> = plan.iter().map(|row| row.get(0)).collect();
        assert!(lines.iter().any(|line| line.contains("rows=500 ")), "{lines:#?}");
        // How many pages it looked at, in all that it calls.
        let buffers = lines.iter().find(|line| line.contains("Buffers: shared")).unwrap();
        let pages = |name: &str| {
            let words = buffers.split_whitespace().find_map(|word| word.strip_prefix(name));
            words.map_or(0, |digits| digits.parse::<i64>().unwrap())
        };
        let pages = pages("hit=") + pages("read=");
        assert!(pages < 5 * DELETED, "{pages} pages for 500 messages ({key})");
        run(&mut old, "COMMIT").await;
        run(&mut admin, "DELETE FROM oncegate.outbox").await;
    }
}
