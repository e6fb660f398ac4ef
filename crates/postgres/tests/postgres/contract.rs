//! Correct and wrong use of the store and of the functions.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::{
    CallerTag, Capabilities, Command, Completion, Durability, Fencing, Forget, Label, ListQuery, OnAbandoned,
    Outcome, RecordStep, RecordedResponse, Resolution, Resolve, Rewrite, State, StateName, Step, Store,
    StoreErrorKind, StoredResponse, limits,
};
use oncegate_postgres::PostgresStore;
use sqlx::Row as _;

use crate::support::{
    Database, claim, claims, completes, id, renews, response, run, sql_id, sqlstate, token, try_run,
};

#[tokio::test(flavor = "multi_thread")]
async fn exactly_one_of_a_hundred_claims_through_two_stores_executes() {
    let database = Database::fresh().await;
    let stores = [Arc::new(database.store().await), Arc::new(database.store().await)];
    for round in 0..5 {
        let claimants: Vec<_> = (0..100_usize)
            .map(|n| {
                let store = stores[n % 2].clone();
                tokio::spawn(async move { store.apply(id(round), claims(n as u128)).await.unwrap() })
            })
            .collect();
        let mut executed = 0;
        for claimant in claimants {
            match claimant.await.unwrap() {
                Outcome::Execute(_) => executed += 1,
                Outcome::InProgress { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(executed, 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn exactly_one_of_many_claims_takes_over_an_abandoned_record() {
    let database = Database::fresh().await;
    let store = Arc::new(database.store().await);
    let mut short = claim(1);
    short.lease = Duration::from_millis(1);
    let first = token(&store.apply(id(1), Command::Claim(short)).await.unwrap());
    let claimants: Vec<_> = (2..50_u128)
        .map(|n| {
            let store = store.clone();
            let mut claim = claim(n);
            claim.on_abandoned = OnAbandoned::Reexecute;
            tokio::spawn(async move { store.apply(id(1), Command::Claim(claim)).await.unwrap() })
        })
        .collect();
    let mut tokens = Vec::new();
    for claimant in claimants {
        match claimant.await.unwrap() {
            Outcome::Execute(grant) => tokens.push(grant.token),
            outcome => assert!(matches!(outcome, Outcome::InProgress { .. }), "{outcome:?}"),
        }
    }
    assert!(tokens.len() == 1 && tokens[0] > first, "{tokens:?}");
}

/// A page is bounded by its bytes, and steps count, so records of a MiB each fill it early.
#[tokio::test(flavor = "multi_thread")]
async fn steps_count_in_a_page_of_a_listing() {
    let database = Database::fresh().await;
    let store = database.store().await;
    for number in 0..12 {
        let token = token(&store.apply(id(number), claims(1)).await.unwrap());
        let step = Step::new("charge", Bytes::from(vec![number; 1_000_000])).unwrap();
        let command = Command::Step(RecordStep { token, number: 0, step });
        assert_eq!(store.apply(id(number), command).await.unwrap(), Outcome::StepRecorded);
    }
    let mut query = ListQuery::default();
    let mut seen = 0;
    loop {
        let page = store.list(query.clone()).await.unwrap();
        let bytes: usize = page.records.iter().map(|(_, record)| record.steps.size()).sum();
        assert!(bytes <= 10 << 20, "{bytes} bytes in one page");
        seen += page.records.len();
        query.after = page.next;
        if page.next.is_none() {
            break;
        }
    }
    assert_eq!(seen, 12);
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_bytes_are_data() {
    let database = Database::fresh().await;
    let bytes: Vec<u8> = (0..=255).chain(*b"'); DROP SCHEMA oncegate CASCADE; --\\").collect();
    let value = bytes.clone();
    let response = StoredResponse::new(200, &[("x-raw", &value[..])], &[Bytes::from(bytes)], &[]).unwrap();
    let operation = "POST /'; DROP SCHEMA oncegate CASCADE; -- \" \\ $1 %s \u{202e}é\u{0}";
    for (number, pooler) in [(1, false), (2, true)] {
        let store = PostgresStore::open(database.options().with_transaction_pooler(pooler)).await.unwrap();
        let mut hostile = claim(1);
        hostile.label = Label::new(CallerTag::from_bytes(*b"'\0\\\xff--;$"), operation);
        let owner = token(&store.apply(id(number), Command::Claim(hostile)).await.unwrap());
        let record = store.lookup(id(number)).await.unwrap().unwrap();
        assert_eq!(record.label.operation(), operation.replace('\0', "\u{2400}"));
        assert_eq!(record.label.caller().as_bytes(), b"'\0\\\xff--;$");
        let complete = completes(owner, Completion::Replayable(response.clone()));
        assert_eq!(store.apply(id(number), complete).await.unwrap(), Outcome::Completed);
        assert_eq!(store.apply(id(number), claims(2)).await.unwrap(), Outcome::Replay(response.clone()));
        let query = |operation: &str| {
            let mut query = ListQuery::default();
            query.operation = Some(operation.to_owned());
            query
        };
        assert_eq!(store.list(query("POST /'; DROP\0' OR true")).await.unwrap().records, []);
        assert_eq!(store.list(query("POST /';")).await.unwrap().records.len(), usize::from(number));
        let resolve = Resolve {
            resolution: Resolution::Release,
            retention: Duration::from_secs(60),
            force: true,
            amend: false,
            actor: "o'brien\0".to_owned(),
            reason: "'); --".repeat(400),
        };
        store.apply(id(number + 10), claims(3)).await.unwrap();
        let resolved = store.apply(id(number + 10), Command::Resolve(resolve)).await.unwrap();
        assert_eq!(resolved, Outcome::Resolved { from: StateName::InProgress });
        let entry = store.audit(None, 1).await.unwrap().remove(0);
        assert_eq!(entry.actor, "o'brien\u{2400}");
        assert!(entry.reason.len() <= limits::MAX_AUDIT_TEXT_BYTES && entry.reason.starts_with("'); --"));
    }
}

/// Content is rewritten and forgotten behind a pooler, too, and a row that another transaction holds is left alone at once.
#[tokio::test(flavor = "multi_thread")]
async fn content_is_bytes_and_a_held_row_is_not_waited_for() {
    let database = Database::fresh().await;
    let bytes: Vec<u8> = (0..=255).chain(*b"'); DROP SCHEMA oncegate CASCADE; --\\").collect();
    let body = |n: u8| {
        let body = [Bytes::from([&bytes[..], &[n]].concat())];
        StoredResponse::new(200, &[("x-raw", &b"'"[..])], &body, &[]).unwrap()
    };
    for (number, pooler) in [(1, false), (2, true)] {
        let store = PostgresStore::open(database.options().with_transaction_pooler(pooler)).await.unwrap();
        let owner = token(&store.apply(id(number), claims(1)).await.unwrap());
        let step = Step::new("charge'", Bytes::from(bytes.clone())).unwrap();
        let step = Command::Step(RecordStep { token: owner, number: 0, step });
        assert_eq!(store.apply(id(number), step).await.unwrap(), Outcome::StepRecorded);
        let mut rewrite = Rewrite::of(&store.lookup(id(number)).await.unwrap().unwrap());
        rewrite.step_results[0].to = Bytes::from([&bytes[..], b"2"].concat());
        let rewritten = store.apply(id(number), Command::Rewrite(rewrite.clone())).await.unwrap();
        assert_eq!(rewritten, Outcome::Rewritten);
        let record = store.lookup(id(number)).await.unwrap().unwrap();
        assert_eq!(record.steps.as_slice()[0].result(), &rewrite.step_results[0].to);
        let complete = completes(owner, Completion::Replayable(body(1)));
        assert_eq!(store.apply(id(number), complete).await.unwrap(), Outcome::Completed);
        let mut rewrite = Rewrite::of(&store.lookup(id(number)).await.unwrap().unwrap());
        rewrite.response.as_mut().unwrap().to = body(2);
        let forget = Forget { actor: "o'brien\0".to_owned(), reason: "'); --".repeat(400) };
        let commands = [Command::Rewrite(rewrite), Command::Forget(forget)];
        let mut other = database.connect().await;
        run(&mut other, "BEGIN; SELECT id FROM oncegate.records FOR UPDATE").await;
        for command in commands.clone() {
            let error = store.apply(id(number), command).await.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Locked, "{error}");
        }
        assert_eq!(store.apply(id(number), claims(2)).await.unwrap(), Outcome::Replay(body(1)));
        run(&mut other, "ROLLBACK").await;
        let [rewrite, forget] = commands;
        assert_eq!(store.apply(id(number), rewrite).await.unwrap(), Outcome::Rewritten);
        assert_eq!(store.apply(id(number), claims(2)).await.unwrap(), Outcome::Replay(body(2)));
        let forgotten = Outcome::Forgotten { from: StateName::Completed };
        assert_eq!(store.apply(id(number), forget).await.unwrap(), forgotten);
        let entry = store.audit(None, 1).await.unwrap().remove(0);
        assert_eq!(entry.actor, "o'brien\u{2400}");
        assert!(entry.reason.len() <= limits::MAX_AUDIT_TEXT_BYTES);
        assert_eq!(store.apply(id(number), claims(2)).await.unwrap(), Outcome::Unreplayable);
    }
    let mut app = database.connect().await;
    let record = "decode(repeat('01', 32), 'hex')";
    for call in [
        "rewrite('\\x00', 1, null, null, null, null)".to_owned(),
        format!("rewrite({record}, null, null, null, null, null)"),
        format!("rewrite({record}, 1, null, decode('0100c800000000', 'hex'), null, null)"),
        format!("rewrite({record}, 1, decode('0100c800000000', 'hex'), decode('00', 'hex'), null, null)"),
        format!("rewrite({record}, 1, null, null, null, ARRAY[decode('00', 'hex')])"),
        format!("rewrite({record}, 1, null, null, ARRAY[decode('00', 'hex')], ARRAY[null::bytea])"),
        "forget('\\x00', 'a', 'r')".to_owned(),
        format!("forget({record}, null, 'r')"),
        format!("forget({record}, 'a', null)"),
    ] {
        let error = try_run(&mut app, &format!("SELECT * FROM oncegate.{call}")).await.unwrap_err();
        assert_eq!(sqlstate(&error), "22023", "{call}");
    }
}

/// A sidecar may lack the right to change content. It works, and only these commands are refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_role_without_the_rights_to_change_content_serves_requests() {
    let database = Database::fresh().await;
    let mut owner = database.connect().await;
    run(
        &mut owner,
        "CREATE ROLE no_content LOGIN; GRANT USAGE ON SCHEMA oncegate TO no_content;
         GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate TO no_content;
         REVOKE EXECUTE ON FUNCTION oncegate.rewrite, oncegate.forget FROM no_content",
    )
    .await;
    run(&mut owner, "SET ROLE no_content").await;
    run(&mut owner, "SELECT * FROM oncegate.purge(1)").await;
    for call in [
        "rewrite(decode(repeat('01', 32), 'hex'), 1, null, null, null, null)",
        "forget(decode(repeat('01', 32), 'hex'), 'a', 'r')",
    ] {
        let error = try_run(&mut owner, &format!("SELECT * FROM oncegate.{call}")).await.unwrap_err();
        assert_eq!(sqlstate(&error), "42501", "{call}");
    }
    // A role writes no entry of its own into the audit trail.
    let forged =
        try_run(&mut owner, "SELECT oncegate.add_audit(1, '', 'unknown', 'released', 'ann', 'why')").await;
    assert_eq!(sqlstate(&forged.unwrap_err()), "42501");
    run(&mut owner, "RESET ROLE; DROP OWNED BY no_content; DROP ROLE no_content").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn values_outside_of_the_contract_are_refused() {
    let database = Database::fresh().await;
    let mut app = database.connect().await;
    let good = "decode(repeat('01', 32), 'hex'), decode(repeat('01', 16), 'hex'), decode(repeat('01', 33), 'hex'), 1000, 1000";
    for (from, to) in [
        ("repeat('01', 32)", "repeat('01', 31)"),
        ("repeat('01', 16)", "repeat('01', 17)"),
        ("repeat('01', 33)", "repeat('01', 32)"),
        ("1000, 1000", "0, 1000"),
        ("1000, 1000", "3600001, 1000"),
        ("1000, 1000", "1000, 34560000001"),
        ("1000, 1000", "1000, null"),
        ("1000, 1000", "1000, 1000, 'Park'"),
        ("decode(repeat('01', 32), 'hex')", "null"),
        ("1000, 1000", "1000, 1000, 'park', '\\x00'"),
        ("1000, 1000", "1000, 1000, 'park', null"),
        ("1000, 1000", "1000, 1000, 'park', '\\x0000000000000000', repeat('a', 257)"),
        ("1000, 1000", "1000, 1000, 'park', '\\x0000000000000000', null"),
        ("1000, 1000", "1000, 1000, 'park', '\\x00000000000000000000000000000000', ''"),
        ("1000, 1000", "1000, 1000, 'park', '\\x0000000000000000', '', '\\x00'"),
    ] {
        let sql = format!("SELECT * FROM oncegate.claim({})", good.replace(from, to));
        let error = try_run(&mut app, &sql).await.unwrap_err();
        assert_eq!(sqlstate(&error), "22023", "{sql}");
    }
    run(
        &mut app,
        &format!("SELECT * FROM oncegate.claim({})", good.replace("1000, 1000", "3600000, 34560000000")),
    )
    .await;
    // An identifier of another size is a mistake of the caller, such as hexadecimal digits, and not a stale token.
    for short in ["'\\xab'", "null", "'\\x'", "decode(repeat('01', 33), 'hex')"] {
        for call in [
            "renew({}, 1, 1000, 1000)",
            "step({}, 1, 0, 'a', '')",
            "complete({}, 1)",
            "complete_if_owner({}, 1, 'tombstone', null, 1000)",
            "complete_many(ARRAY[{}::bytea], ARRAY[1], ARRAY['tombstone'], ARRAY[null::bytea], ARRAY[1000])",
            "release({}, 1, 1000)",
            "resolve({}, 'release', null, 1000, false, false, 'ann', 'why')",
            "lookup({})",
            "watch(ARRAY[{}::bytea])",
        ] {
            let sql = format!("SELECT * FROM oncegate.{}", call.replace("{}", short));
            let error = try_run(&mut app, &sql).await.unwrap_err();
            assert_eq!(sqlstate(&error), "22023", "{sql}: {error}");
        }
    }
    let record = "decode(repeat('01', 32), 'hex'), (SELECT token FROM oncegate.records)";
    for end in ["0", "34560000001"] {
        let sql = format!("SELECT oncegate.complete({record}, null, {end})");
        assert_eq!(sqlstate(&try_run(&mut app, &sql).await.unwrap_err()), "22023", "{sql}");
    }
    for end in [
        "'completed', null, 1000",
        "'completed', '', 1000",
        "'completed', '\\x010000000000', 1000",
        "'completed', '\\x02000000000000', 1000",
        "'tombstone', '\\x01', 1000",
        "'done', null, 1000",
        "'unknown', null, 0",
    ] {
        let error = try_run(&mut app, &format!("SELECT oncegate.complete_if_owner({record}, {end})"))
            .await
            .unwrap_err();
        assert_eq!(sqlstate(&error), "22023", "{end}");
    }
    // Bytes that are not a response are never stored.
    for bytes in
        ["", "01", "02000000000000", "0100c900010000", "0100c9000100000001000000ff61", "0100c9ffffffff00"]
    {
        let sql = format!("SELECT oncegate.complete({record}, decode('{bytes}', 'hex'))");
        let error = try_run(&mut app, &sql).await.unwrap_err();
        assert_eq!(sqlstate(&error), "22023", "{bytes}");
    }
    let mut store_response = claim(1);
    store_response.retention = limits::MAX_RETENTION + Duration::from_millis(1);
    let store = database.store().await;
    let error = store.apply(id(9), Command::Claim(store_response)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Invalid);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_has_the_same_limits() {
    let database = Database::fresh().await;
    let mut app = database.connect().await;
    let sql = |id: u32, lease: u64, retention: u64, policy: &str| {
        format!(
            "SELECT outcome FROM oncegate.claim_many(ARRAY[decode(repeat('01', {id}), 'hex')], \
             ARRAY[decode(repeat('01', 16), 'hex')], ARRAY[decode(repeat('01', 33), 'hex')], \
             ARRAY[{lease}], ARRAY[{retention}], ARRAY['{policy}'], ARRAY['\\x0000000000000000'::bytea], ARRAY[''])"
        )
    };
    for (id, lease, retention, policy) in [
        (31, 1000, 1000, "park"),
        (32, 0, 1000, "park"),
        (32, 3_600_001, 1000, "park"),
        (32, 1000, 0, "park"),
        (32, 1000, 34_560_000_001, "park"),
        (32, 1000, 1000, "Park"),
    ] {
        let sql = sql(id, lease, retention, policy);
        let error = try_run(&mut app, &sql).await.unwrap_err();
        assert_eq!(sqlstate(&error), "22023", "{sql}");
    }
    let good = sql(32, 3_600_000, 34_560_000_000, "park");
    for (from, to) in
        [("'\\x0000000000000000'::bytea", "'\\x00'::bytea"), ("ARRAY['']", "ARRAY[repeat('a', 257)]")]
    {
        let sql = good.replace(from, to);
        let error = try_run(&mut app, &sql).await.unwrap_err();
        assert_eq!(sqlstate(&error), "22023", "{sql}");
    }
    let rows = try_run(&mut app, &good).await.unwrap();
    assert_eq!(rows[0].get::<&str, _>(0), "execute");
    for end in ["'completed', ''", "'completed', '\\x010000000000'", "'completed', null", "'done', null"] {
        let (state, response) = end.split_once(", ").unwrap();
        let sql = format!(
            "SELECT outcome FROM oncegate.complete_many(ARRAY[decode(repeat('01', 32), 'hex')], \
             ARRAY(SELECT token FROM oncegate.records), ARRAY[{state}], ARRAY[{response}::bytea], ARRAY[1000])"
        );
        let error = try_run(&mut app, &sql).await.unwrap_err();
        assert_eq!(sqlstate(&error), "22023", "{sql}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_owner_can_complete_an_unknown_record() {
    let database = Database::fresh().await;
    let store = database.store().await;
    let mut short = claim(1);
    short.lease = Duration::from_millis(1);
    let owner = token(&store.apply(id(1), Command::Claim(short)).await.unwrap());
    while store.apply(id(1), claims(2)).await.unwrap() != Outcome::Unknown {}
    assert_eq!(store.apply(id(1), renews(owner)).await.unwrap(), Outcome::Fenced);
    let paid = Completion::Replayable(response(b"paid"));
    assert_eq!(store.apply(id(1), completes(owner, paid)).await.unwrap(), Outcome::Completed);
    assert_eq!(store.apply(id(1), claims(3)).await.unwrap(), Outcome::Replay(response(b"paid")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_is_absent_from_its_expiry_on_and_not_before() {
    let database = Database::fresh().await;
    let store = database.store().await;
    let mut admin = database.connect().await;
    let clock = |millis: u64| {
        format!(
            "CREATE OR REPLACE FUNCTION oncegate.now_ms() RETURNS bigint LANGUAGE sql AS 'SELECT {millis}::bigint'"
        )
    };
    run(&mut admin, &clock(1_000_000)).await;
    let first = token(&store.apply(id(1), claims(1)).await.unwrap());
    store.apply(id(1), completes(first, Completion::Tombstone)).await.unwrap();
    let store = database.store().await; // a new store, because cached plans contain the old clock
    run(&mut admin, &clock(1_000_000 + 3_600_000 - 1)).await;
    assert_eq!(store.apply(id(1), claims(2)).await.unwrap(), Outcome::Unreplayable);
    assert_eq!(store.purge(10).await.unwrap(), 0);
    run(&mut admin, &clock(1_000_000 + 3_600_000)).await;
    assert_eq!(store.lookup(id(1)).await.unwrap(), None);
    let outcome = store.apply(id(1), claims(3)).await.unwrap();
    assert!(
        matches!(&outcome, Outcome::Execute(grant) if grant.attempts == 1 && grant.token > first),
        "{outcome:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_encoded_by_the_contract_is_valid() {
    let database = Database::fresh().await;
    let store = database.store().await;
    let owner = token(&store.apply(id(1), claims(1)).await.unwrap());
    let sql = format!(
        "SELECT oncegate.complete({}, {owner}, oncegate.response(201, ARRAY['Content-Type', 'X-Name'], \
         ARRAY['text/plain', 'ü'], '\\x00ff'))",
        sql_id(id(1))
    );
    run(&mut database.connect().await, &sql).await;
    let fields = [("content-type", &b"text/plain"[..]), ("x-name", "ü".as_bytes())];
    let expected = StoredResponse::new(201, &fields, &[Bytes::from_static(b"\x00\xff")], &[]).unwrap();
    assert_eq!(store.apply(id(1), claims(2)).await.unwrap(), Outcome::Replay(expected));
}

/// The functions accept exactly what a store can read. A response with one field has a check of its own.
#[tokio::test(flavor = "multi_thread")]
async fn a_response_is_accepted_if_and_only_if_a_store_can_read_it() {
    let database = Database::fresh().await;
    let fields: [(&str, &[u8]); 3] = [("content-type", b"text/plain"), ("x-name", b"v"), ("n", b"")];
    let mut tried: Vec<Vec<u8>> = vec![Vec::new(), vec![1]];
    for (headers, trailers) in [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (3, 3)] {
        for body in [&b""[..], b"paid"] {
            let body = [Bytes::from_static(body)];
            let response = StoredResponse::new(201, &fields[..headers], &body, &fields[..trailers]).unwrap();
            let encoded = response.as_encoded();
            tried.extend((0..encoded.len()).map(|size| encoded[..size].to_vec()));
            for at in 0..encoded.len().min(48) {
                for byte in [0, 1, 2, 3, 4, 12, 13, 92, 127, 128, 199, 200, 231, 232, 255] {
                    let mut changed = encoded.to_vec();
                    changed[at] = byte;
                    tried.push(changed);
                }
            }
        }
    }
    // Names and values at the limits of the check for one field: 255 and 256 bytes, 65 535 and 65 536 bytes.
    for (name_size, value_size) in [(255_u16, 3_u32), (256, 3), (3, 65_535), (3, 65_536), (300, 70_000)] {
        let sizes = [&name_size.to_be_bytes()[..], &value_size.to_be_bytes()].concat();
        let name = vec![b'n'; usize::from(name_size)];
        let whole = [&[1, 0, 200, 0, 1, 0, 0][..], &sizes, &name, &vec![b'v'; value_size as usize]].concat();
        tried.push(whole[..whole.len() - 1].to_vec());
        let mut not_ascii = whole.clone();
        not_ascii[13] = 0xe4;
        tried.extend([whole, not_ascii]);
    }
    let may_be = "SELECT oncegate.may_be_response(r) FROM unnest($1) WITH ORDINALITY AS u (r, n) ORDER BY n";
    let accepted: Vec<bool> =
        sqlx::query_scalar(may_be).bind(&tried).fetch_all(&mut database.connect().await).await.unwrap();
    for (bytes, accepted) in tried.iter().zip(&accepted) {
        let read = StoredResponse::decode(Bytes::from(bytes.clone()));
        // No field has such a name. The functions refuse it, although a store could read it.
        let is_odd = |name: &str| name.contains(['\0', '\\']);
        let expected =
            read.is_some_and(|read| !read.headers().chain(read.trailers()).any(|(name, _)| is_odd(name)));
        assert_eq!(*accepted, expected, "{:02x?}", &bytes[..bytes.len().min(80)]);
    }
    let count = accepted.iter().filter(|accepted| **accepted).count();
    assert!(count > 200 && tried.len() - count > 1000, "{count} of {} are accepted", tried.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_cannot_be_read_is_never_executed() {
    let database = Database::fresh().await;
    let store = database.store().await;
    let owner = token(&store.apply(id(1), claims(1)).await.unwrap());
    store.apply(id(1), completes(owner, Completion::Replayable(response(b"paid")))).await.unwrap();
    let mut admin = database.connect().await;
    run(&mut admin, "UPDATE oncegate.records SET response = '\\x0100c9ffffffff00'").await;
    assert_eq!(store.apply(id(1), claims(2)).await.unwrap_err().kind(), StoreErrorKind::Corrupt);
    assert_eq!(store.lookup(id(1)).await.unwrap_err().kind(), StoreErrorKind::Corrupt);
    assert_eq!(store.list(ListQuery::default()).await.unwrap().unreadable, [id(1)]);
    // A fingerprint of another version cannot be compared. Tested alone, and in a batch.
    run(&mut admin, "UPDATE oncegate.records SET fingerprint = set_byte(fingerprint, 0, 2)").await;
    assert_eq!(store.apply(id(1), claims(2)).await.unwrap_err().kind(), StoreErrorKind::Corrupt);
    let batch = format!(
        "SELECT * FROM oncegate.claim_many(ARRAY[{}], ARRAY[decode(repeat('01', 16), 'hex')], \
         ARRAY[decode(repeat('01', 33), 'hex')], ARRAY[1000], ARRAY[1000], ARRAY['park'], \
         ARRAY['\\x0000000000000000'::bytea], ARRAY[''])",
        sql_id(id(1))
    );
    assert_eq!(sqlstate(&try_run(&mut admin, &batch).await.unwrap_err()), "OG003");
    run(&mut admin, "UPDATE oncegate.records SET fingerprint = set_byte(fingerprint, 0, 1)").await;
    // A state of a later contract.
    run(&mut admin, "UPDATE oncegate.records SET state = 'paused'").await;
    assert_eq!(store.apply(id(1), claims(2)).await.unwrap_err().kind(), StoreErrorKind::Corrupt);
}

#[tokio::test(flavor = "multi_thread")]
async fn several_reapers_share_the_work() {
    let database = Database::fresh().await;
    let mut admin = database.connect().await;
    let fill = "INSERT INTO oncegate.records (id, state, fingerprint, token, attempts, caller, operation, created_at, changed_at,
            expires_at, purge_at)
        SELECT sha256(n::text::bytea), 'released', decode(repeat('01', 33), 'hex'), 1, 1, '\\x0000000000000000', '', 1, 1,
            CASE WHEN n % 10 = 0 THEN oncegate.now_ms() + 3600000 ELSE 5 END, 10 FROM generate_series(1, 1000) AS n";
    run(&mut admin, fill).await;
    let reapers: Vec<_> = (0..4)
        .map(|_| {
            let options = database.options();
            tokio::spawn(async move {
                let store = PostgresStore::open(options).await.unwrap();
                let mut purged = 0;
                loop {
                    match store.purge(50).await.unwrap() {
                        0 => return purged,
                        n => purged += n,
                    }
                }
            })
        })
        .collect();
    let mut total = 0;
    for reaper in reapers {
        total += reaper.await.unwrap();
    }
    assert_eq!(total, 900, "each expired record is purged once, and no other");
    // A record that lives longer than planned gets a later entry, which the next purge does not read.
    let due = try_run(&mut admin, "SELECT FROM oncegate.records WHERE purge_at <= oncegate.now_ms()")
        .await
        .unwrap();
    assert_eq!(due.len(), 0);
    // Locked rows are left to the next purge.
    run(&mut admin, "UPDATE oncegate.records SET expires_at = 5, purge_at = 10").await;
    let mut other = database.connect().await;
    run(&mut other, "BEGIN; SELECT FROM oncegate.records ORDER BY id LIMIT 40 FOR UPDATE").await;
    let store = database.store().await;
    assert_eq!(store.purge(1000).await.unwrap(), 60);
    run(&mut other, "ROLLBACK").await;
    assert_eq!(store.purge(1000).await.unwrap(), 40);
}

/// Purged rows stay in the index until an old snapshot ends. A purge must not step over all of them again.
#[tokio::test(flavor = "multi_thread")]
async fn purges_under_an_old_snapshot_do_not_begin_at_the_first_row_each_time() {
    const ROWS: i64 = 20_000;
    let database = Database::fresh().await;
    let mut admin = database.connect().await;
    for (table, purge, fill) in [
        (
            "records",
            "SELECT purged FROM oncegate.purge(500)",
            "(id, state, fingerprint, token, attempts, caller, operation, created_at, changed_at, expires_at, purge_at) \
             SELECT sha256(n::text::bytea), 'released', decode(repeat('01', 33), 'hex'), 1, 1, '\\x0000000000000000', '', 1, 1, n, n",
        ),
        (
            "receipts",
            "SELECT oncegate.purge_receipts(500) AS purged",
            "(id, changed_at, expires_at, purge_at, attempts, state) SELECT sha256(n::text::bytea), 1, n, n, 1, 'p'",
        ),
    ] {
        run(
            &mut admin,
            &format!(
                "INSERT INTO oncegate.{table} {fill} FROM generate_series(1, {ROWS}) AS n \
             ORDER BY md5(n::text)"
            ),
        )
        .await;
        let mut old = database.connect().await;
        run(&mut old, "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1").await;
        let mut purged = 0_i64;
        let mut costs: Vec<i64> = Vec::new();
        while purged < ROWS {
            let before = purged;
            // The number of pages that the session read, in the function and in everything that it calls.
            let plan = try_run(&mut admin, &format!("EXPLAIN (ANALYZE, BUFFERS) {purge}")).await.unwrap();
            let lines: Vec<String> = plan.iter().map(|row| row.get(0)).collect();
            let buffers = lines.iter().find(|line| line.contains("Buffers: shared")).unwrap();
            let pages = |name: &str| {
                let words = buffers.split_whitespace().find_map(|word| word.strip_prefix(name));
                words.map_or(0, |digits| digits.parse::<i64>().unwrap())
            };
            costs.push(pages("hit=") + pages("read="));
            let left = try_run(&mut admin, &format!("SELECT count(*) FROM oncegate.{table}")).await.unwrap();
            purged = ROWS - left[0].get::<i64, _>(0);
            assert_eq!(purged - before, 500, "{table}");
        }
        let (early, late) = (costs[2], costs[costs.len() - 1]);
        assert!(late < early * 2, "{table}: {costs:?} pages for each 500 rows");
        run(&mut old, "COMMIT").await;
        // Rows that were added late are found when a purge begins at the first row again.
        run(&mut admin, &format!("INSERT INTO oncegate.{table} {fill} FROM generate_series(1, 10) AS n"))
            .await;
        assert_eq!(try_run(&mut admin, purge).await.unwrap()[0].get::<i32, _>(0), 0);
        run(&mut admin, "UPDATE oncegate.purge_marks SET begun_at = begun_at - 3600001").await;
        let mut late = 0;
        for _ in 0..1000 {
            late += try_run(&mut admin, purge).await.unwrap()[0].get::<i32, _>(0);
            if late == 10 {
                break;
            }
        }
        assert_eq!(late, 10, "{table}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn renewals_and_completions_update_no_index() {
    let database = Database::fresh().await;
    let store = database.store().await;
    let mut admin = database.connect().await;
    let owner = token(&store.apply(id(1), claims(1)).await.unwrap());
    let version = "SELECT purge_at FROM oncegate.records";
    let before: i64 = try_run(&mut admin, version).await.unwrap()[0].get(0);
    for _ in 0..20 {
        store.apply(id(1), renews(owner)).await.unwrap();
    }
    store.apply(id(1), completes(owner, Completion::Tombstone)).await.unwrap();
    let after: i64 = try_run(&mut admin, version).await.unwrap()[0].get(0);
    assert_eq!(before, after);
    // The server updates its statistics with a delay, when the writing session is idle.
    let stats = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'records'";
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    loop {
        let row = &try_run(&mut admin, stats).await.unwrap()[0];
        let (updates, hot): (i64, i64) = (row.get(0), row.get(1));
        if updates == 21 {
            assert_eq!(hot, 21);
            break;
        }
        assert!(std::time::Instant::now() < deadline, "{updates} updates, {hot} of them heap-only");
        // Each statement makes the sessions of the store report their statistics.
        store.lookup(id(1)).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_with_function_rights_only_can_do_its_work_and_nothing_else() {
    let database = Database::fresh().await;
    let mut admin = database.connect().await;
    let name = format!("app_{}", database.name);
    run(
        &mut admin,
        &format!(
            "CREATE ROLE {name} LOGIN PASSWORD 'app'; GRANT USAGE ON SCHEMA oncegate TO {name};
             GRANT EXECUTE ON FUNCTION oncegate.complete, oncegate.response, oncegate.lookup TO {name}"
        ),
    )
    .await;
    let store = database.store().await;
    let owner = token(&store.apply(id(1), claims(1)).await.unwrap());
    let mut app = database.connect().await;
    run(&mut app, &format!("SET ROLE {name}")).await;
    for forbidden in [
        "SELECT * FROM oncegate.records",
        "UPDATE oncegate.records SET token = 1",
        "SELECT * FROM oncegate.purge(1)",
        "SELECT * FROM oncegate.claim_many(null, null, null, null, null, null, null, null)",
        "CREATE FUNCTION oncegate.evil() RETURNS void LANGUAGE sql AS ''",
    ] {
        let error = try_run(&mut app, forbidden).await.unwrap_err();
        assert_eq!(sqlstate(&error), "42501", "{forbidden}");
    }
    // Objects of the caller do not shadow those of the contract.
    run(
        &mut admin,
        &format!(
            "CREATE SCHEMA evil; GRANT USAGE ON SCHEMA evil TO {name};
             CREATE FUNCTION evil.evil(text, text) RETURNS boolean LANGUAGE plpgsql
                AS $$ BEGIN RAISE EXCEPTION 'evil'; END $$;
             CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.evil)"
        ),
    )
    .await;
    run(&mut app, "SET search_path = evil, pg_catalog").await;
    run(&mut app, &format!("SELECT oncegate.complete({}, {owner})", sql_id(id(1)))).await;
    let record = store.lookup(id(1)).await.unwrap().unwrap();
    assert_eq!(record.state, State::Completed(RecordedResponse::Awaited));
    // A service encodes its response in the same statement.
    let owner = token(&store.apply(id(3), claims(1)).await.unwrap());
    let response = "oncegate.response(201, ARRAY['Content-Type'], ARRAY['text/plain'], 'paid')";
    run(&mut app, &format!("SELECT oncegate.complete({}, {owner}, {response})", sql_id(id(3)))).await;
    let record = store.lookup(id(3)).await.unwrap().unwrap();
    assert!(
        matches!(&record.state, State::Completed(RecordedResponse::Replayable(it)) if it.status() == 201),
        "{record:?}"
    );
    run(&mut admin, &format!("GRANT EXECUTE ON FUNCTION oncegate.is_response TO {name}")).await;
    run(&mut app, &format!("SELECT oncegate.is_response({response})")).await;
    // The store's own role needs only the functions.
    run(&mut admin, &format!("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate TO {name}")).await;
    let url =
        database.url().replace("oncegate:", &format!("{name}:")).replace(database.server.password(), "app");
    let options = oncegate_postgres::PostgresOptions::from_url(&url).unwrap();
    // It needs all of them: a missing right must be found at the start, and not during the first burst.
    run(&mut admin, &format!("REVOKE EXECUTE ON FUNCTION oncegate.complete_many FROM {name}")).await;
    let refused = PostgresStore::open(options.clone()).await.unwrap_err().to_string();
    assert!(refused.contains("the role may not call oncegate.complete_many; "), "{refused}");
    run(&mut admin, &format!("GRANT EXECUTE ON FUNCTION oncegate.complete_many TO {name}")).await;
    let store = PostgresStore::open(options).await.unwrap();
    assert!(matches!(store.apply(id(2), claims(1)).await.unwrap(), Outcome::Execute(_)));
    store.check().await.unwrap();
    drop(store);
    run(&mut admin, &format!("DROP OWNED BY {name}")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_capabilities_are_those_of_the_server() {
    let database = Database::fresh().await;
    let store = database.store().await;
    // The test server does not flush.
    let mut promises = Capabilities::new("postgres", Durability::Buffered, Fencing::Monotonic);
    promises.atomic_with_effect = true;
    assert_eq!(store.capabilities(), promises);
    let rows = try_run(&mut database.connect().await, "SELECT oncegate.now_ms()").await.unwrap();
    let server: i64 = rows[0].get(0);
    let apart = store.now().as_millis().abs_diff(server as u64);
    assert!(apart < 5_000, "{apart} ms");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_continues_after_a_full_page() {
    let database = Database::fresh().await;
    let store = database.store().await;
    // More than fits into a page of 8 MiB.
    let body = vec![7; 5 * 1024 * 1024];
    for number in 1..=4 {
        let owner = token(&store.apply(id(number), claims(1)).await.unwrap());
        let response = StoredResponse::new(200, &[], &[Bytes::from(body.clone())], &[]).unwrap();
        store.apply(id(number), completes(owner, Completion::Replayable(response))).await.unwrap();
    }
    let mut query = ListQuery::default();
    let first = store.list(query.clone()).await.unwrap();
    assert_eq!((first.records.len(), first.next), (2, Some(id(2))));
    query.after = first.next;
    let second = store.list(query).await.unwrap();
    assert_eq!((second.records.len(), second.next), (2, None));
}
