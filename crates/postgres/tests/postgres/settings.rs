//! Settings of a role or a database must not change the behaviour of the contract, or its installation.

use std::time::{Duration, Instant};

use oncegate_postgres::schema;
use oncegate_postgres::sqlx::postgres::PgConnection;
use oncegate_postgres::sqlx::{Connection as _, Row as _};

use crate::schema::bindings;
use crate::support::{Database, run, sqlstate, try_run};

/// Session settings that change the parsing of SQL, the format of values, or the permitted statements, each with a value that is
/// not the default.
const SETTINGS: [(&str, &str); 35] = [
    ("standard_conforming_strings", "off"),
    ("escape_string_warning", "off"),
    ("backslash_quote", "on"),
    ("bytea_output", "escape"),
    ("array_nulls", "off"),
    ("transform_null_equals", "on"),
    ("xmloption", "document"),
    ("xmlbinary", "hex"),
    ("DateStyle", "'SQL, DMY'"),
    ("IntervalStyle", "iso_8601"),
    ("TimeZone", "'Asia/Kolkata'"),
    ("extra_float_digits", "-15"),
    ("lc_messages", "'C.UTF-8'"),
    ("lc_monetary", "'C.UTF-8'"),
    ("lc_numeric", "'C.UTF-8'"),
    ("lc_time", "'C.UTF-8'"),
    ("client_min_messages", "error"),
    ("quote_all_identifiers", "on"),
    ("check_function_bodies", "off"),
    ("row_security", "off"),
    ("default_transaction_isolation", "serializable"),
    ("default_transaction_read_only", "on"),
    ("default_transaction_deferrable", "on"),
    ("synchronous_commit", "off"),
    ("search_path", "public"),
    ("plpgsql.variable_conflict", "use_variable"),
    ("plpgsql.extra_errors", "'all'"),
    ("plpgsql.extra_warnings", "'all'"),
    ("plpgsql.print_strict_params", "on"),
    ("plan_cache_mode", "force_generic_plan"),
    ("force_parallel_mode", "on"),
    ("enable_indexscan", "off"),
    ("from_collapse_limit", "1"),
    ("join_collapse_limit", "1"),
    ("oncegate.adds_marks", "on"),
];

/// Applies the settings to every role in this database.
pub(crate) async fn set_all(database: &Database) {
    let mut owner = database.connect().await;
    for (name, value) in SETTINGS {
        run(&mut owner, &format!("ALTER DATABASE {} SET {name} = {value}", database.name)).await;
    }
}

/// One call of each kind of function, with its reply and its effects except times. No call contains a backslash.
const CALLS: [&str; 16] = [
    "SELECT encode(oncegate.message_record('billing', 'evt_1'), 'hex')",
    "SELECT encode(oncegate.message_record('billing', repeat('ü', 200), ARRAY['own', 'x'], 'İstanbul'), 'hex')",
    "SELECT encode(oncegate.response(201, '{}', '{}', null), 'hex')",
    "SELECT encode(oncegate.response(201, ARRAY['Content-ID', 'INFO'], ARRAY['a', 'ß'], 'x'), 'hex')",
    "SELECT oncegate.is_response(oncegate.response(201, ARRAY['X-I'], ARRAY['a'], null))::text",
    "SELECT outcome FROM oncegate.claim(decode(repeat('01', 32), 'hex'), decode(repeat('01', 16), 'hex'), \
     decode(repeat('01', 33), 'hex'), 60000, 60000)",
    "SELECT outcome FROM oncegate.claim(decode(repeat('77', 32), 'hex'), decode(repeat('02', 16), 'hex'), \
     decode(repeat('01', 33), 'hex'), 60000, 60000, operation => 'POST /pay')",
    "SELECT outcome FROM oncegate.claim_many(ARRAY[decode(repeat('80', 32), 'hex')], ARRAY[decode(repeat('03', 16), 'hex')], \
     ARRAY[decode(repeat('01', 33), 'hex')], ARRAY[60000], ARRAY[60000], ARRAY['park'], ARRAY[decode(repeat('01', 8), 'hex')], \
     ARRAY['POST /pay'], ARRAY[decode(repeat('01', 8), 'hex')])",
    "SELECT outcome FROM oncegate.complete_if_owner(decode(repeat('01', 32), 'hex'), (SELECT token FROM \
     oncegate.lookup(decode(repeat('01', 32), 'hex'))), 'completed', oncegate.response(200, '{}', '{}', null), 60000)",
    "SELECT string_agg(encode(id, 'hex') || state || encode(caller, 'hex') || operation || coalesce(encode(response, 'hex'), '-'), \
     ' ' ORDER BY id) FROM oncegate.list(null, null, null, null, null, null, null)",
    "SELECT string_agg(outcome || attempts, ' ') FROM oncegate.receive_many(ARRAY[oncegate.message_record('c', '1'), \
     oncegate.message_record('c', '1')], 60000)",
    "SELECT outcome FROM oncegate.write_dead_letter(oncegate.message_record('c', '2'), 'c', 'r', 1, 'e', 't', null, null, '{}', '{}', \
     decode('5c78', 'hex'), 60000)",
    "SELECT encode(payload, 'hex') FROM oncegate.list_dead_letters(null, null, null)",
    "SELECT outcome || is_more FROM oncegate.stream_event('c', 's', 2, 1, decode('5c', 'hex'))",
    "SELECT oncegate.send_text('t', 'payload', 'key', jsonb_build_object('h', 'v', 'NULL', 'NULL'), 'id-1')",
    "SELECT string_agg(topic || encode(payload, 'hex') || encode(order_key, 'hex') || array_to_string(header_names, ',') || \
     encode(header_values[2], 'hex'), ' ') FROM oncegate.outbox_take(null, 10, 1000, 10, 1000)",
];

async fn called(connection: &mut PgConnection) -> Vec<Option<String>> {
    let mut replies = Vec::new();
    for call in CALLS {
        // At READ COMMITTED and with writing allowed, as the contract requires of every caller.
        let mut transaction =
            connection.begin_with("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE").await.unwrap();
        let rows = try_run(&mut transaction, call).await.unwrap_or_else(|error| panic!("{call}: {error}"));
        replies.push(rows.first().and_then(|row| row.get(0)));
        transaction.commit().await.unwrap();
    }
    replies
}

/// The settings of the caller decide how a string with a backslash is read, so the SQL contains none.
#[test]
fn the_sql_has_no_backslash() {
    let text = schema::print();
    let found: Vec<_> = text.lines().filter(|line| line.contains('\\')).collect();
    assert!(found.is_empty(), "{found:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn functions_behave_the_same_under_all_settings() {
    let clean = Database::fresh().await;
    let expected = called(&mut clean.connect().await).await;
    let database = Database::fresh().await;
    set_all(&database).await;
    assert_eq!(called(&mut database.connect().await).await, expected);
    // One setting could hide the effect of another, so the most important one is also tried alone.
    let database = Database::fresh().await;
    let mut connection = database.connect().await;
    run(&mut connection, "SET standard_conforming_strings = off").await;
    assert_eq!(called(&mut connection).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_contract_is_the_same_under_all_settings_at_its_installation() {
    let clean = Database::fresh().await;
    let clean = bindings(&clean).await;
    for by_hand in [false, true] {
        let database = Database::empty().await;
        set_all(&database).await;
        if by_hand {
            run(&mut database.connect().await, &schema::print()).await;
        } else {
            schema::apply(&database.options()).await.unwrap();
        }
        let mut owner = database.connect().await;
        run(&mut owner, "SET default_transaction_read_only = off").await;
        run(&mut owner, &format!("ALTER DATABASE {} RESET ALL", database.name)).await;
        let found = bindings(&database).await;
        let differ: Vec<_> = found.iter().filter(|line| !clean.contains(line)).collect();
        assert!(differ.is_empty() && found.len() == clean.len(), "{differ:#?}");
    }
}

/// A role for sidecars may have a statement timeout that fits requests. It would cancel statements that wait for a lock.
#[tokio::test(flavor = "multi_thread")]
async fn a_statement_timeout_of_the_role_ends_neither_a_check_nor_an_upgrade() {
    let database = Database::fresh().await;
    let mut holder = database.connect().await;
    run(&mut holder, &format!("ALTER DATABASE {} SET statement_timeout = '200ms'", database.name)).await;
    for sql in ["LOCK TABLE oncegate.contract", "SELECT pg_advisory_xact_lock(7956004179840295781)"] {
        run(&mut holder, &format!("BEGIN; {sql}")).await;
        let options = database.options();
        let looking = tokio::spawn(async move {
            match sql.starts_with("LOCK") {
                true => schema::status(&options).await,
                false => schema::apply(&options).await,
            }
        });
        wait_for_lock_waiter(&mut holder).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        run(&mut holder, "COMMIT").await;
        assert_eq!(looking.await.unwrap().unwrap().found, Some(schema::VERSION), "{sql}");
    }
}

async fn wait_for_lock_waiter(connection: &mut PgConnection) {
    let waits = "SELECT FROM pg_locks WHERE NOT granted \
         AND (database IS NULL OR database = (SELECT oid FROM pg_database WHERE datname = current_database()))";
    let deadline = Instant::now() + Duration::from_secs(20);
    while try_run(connection, waits).await.unwrap().is_empty() {
        assert!(Instant::now() < deadline, "no session waits for a lock");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// In Turkish and Azerbaijani, the lower case of `I` has no dot.
#[tokio::test(flavor = "multi_thread")]
async fn names_of_fields_are_folded_as_ascii_in_a_turkish_database() {
    let usual = Database::empty().await;
    let name = format!("{}_tr", usual.name);
    let create = format!(
        "CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8' LOCALE_PROVIDER icu ICU_LOCALE 'tr-TR'"
    );
    run(&mut usual.connect().await, &create).await;
    let mut turkish = PgConnection::connect(&usual.url().replace(&usual.name, &name)).await.unwrap();
    run(&mut turkish, &schema::print()).await;
    let folded = "SELECT lower('I') || (encode(oncegate.response(201, ARRAY['INFO'], ARRAY['a'], null), 'escape') LIKE '%info%')";
    let rows = try_run(&mut turkish, folded).await.unwrap();
    assert_eq!(rows[0].get::<String, _>(0), "ıtrue");
    turkish.close().await.unwrap();
    run(&mut usual.connect().await, &format!("DROP DATABASE {name}")).await;
}

/// Bytes that a sidecar could not read or send are refused by every function, and nothing is changed.
#[tokio::test(flavor = "multi_thread")]
async fn a_response_that_no_sidecar_can_read_is_refused() {
    let database = Database::fresh().await;
    let mut owner = database.connect().await;
    let record = "decode(repeat('01', 32), 'hex')";
    let claim = format!(
        "SELECT token FROM oncegate.claim({record}, decode(repeat('01', 16), 'hex'), decode(repeat('01', 33), 'hex'), 60000, 60000)"
    );
    let token: i64 = try_run(&mut owner, &claim).await.unwrap()[0].get(0);
    let unreadable = [
        "01000000000000",                 // status 0
        "01006300000000",                 // 99
        "01006500000000",                 // 101
        "0103e800000000",                 // 1000
        "01c90000000000",                 // 201 in the wrong order
        "0200c800000000",                 // version 2
        "010000ffff0000",                 // 65 535 fields
        "0100c800010000",                 // one field, and none is there
        "0100c80001000000",               // cut
        "0100c800010000000100000001",     // cut before the name
        "0100c80001000000ffffffffff61",   // a value of 4 GiB
        "0100c80001000000010000000180ff", // a name that is not UTF-8
    ];
    let unsendable = [
        "0100c80001000000000000000161",   // no name
        "0100c80001000000010000000120ff", // a space
        "0100c800010000000100000001410a", // `A`, and a line feed
        "0100c800010000000100000001610d", // a carriage return
        "0100c8000100000001000000016100", // NUL
    ];
    for bytes in unreadable.iter().chain(&unsendable) {
        let response = format!("decode('{bytes}', 'hex')");
        let for_services = [
            format!("SELECT oncegate.complete({record}, {token}, {response})"),
            format!(
                "SELECT oncegate.resolve({record}, 'complete', {response}, 60000, false, false, 'a', 'r')"
            ),
        ];
        let for_stores = [
            format!("SELECT oncegate.complete_if_owner({record}, {token}, 'completed', {response}, 60000)"),
            format!(
                "SELECT * FROM oncegate.complete_many(ARRAY[{record}], ARRAY[{token}], ARRAY['completed'], ARRAY[{response}], ARRAY[60000])"
            ),
            format!(
                "SELECT oncegate.complete_reserved(decode(repeat('02', 32), 'hex'), txid_current(), \
                 decode(repeat('01', 33), 'hex'), {response}, 60000, decode(repeat('01', 8), 'hex'), '')"
            ),
        ];
        let is_unreadable = unreadable.contains(bytes);
        for call in for_services.iter().chain(for_stores.iter().filter(|_| is_unreadable)) {
            let error = try_run(&mut owner, call).await.err().unwrap_or_else(|| panic!("{call} is done"));
            assert_eq!(sqlstate(&error), "22023", "{call}: {error}");
        }
    }
    for (status, name, value) in [
        (103, "a", "b"),
        (199, "a", "b"),
        (1000, "a", "b"),
        (200, "a b", "c"),
        (200, "ü", "c"),
        (200, "a", "b\nc"),
    ] {
        let call = format!("SELECT oncegate.response({status}, ARRAY['{name}'], ARRAY['{value}'], '')");
        assert_eq!(sqlstate(&try_run(&mut owner, &call).await.unwrap_err()), "22023", "{call}");
    }
    let fields = |count: u32| {
        format!(
            "oncegate.response(200, array_fill('a'::text, ARRAY[{count}]), array_fill('b'::text, ARRAY[{count}]), '')"
        )
    };
    assert_eq!(
        sqlstate(&try_run(&mut owner, &format!("SELECT {}", fields(257))).await.unwrap_err()),
        "22023"
    );
    let rows = try_run(&mut owner, &format!("SELECT oncegate.is_response({})", fields(256))).await.unwrap();
    assert!(rows[0].get::<bool, _>(0));
    let rows = try_run(&mut owner, "SELECT string_agg(state, ' ') FROM oncegate.records").await.unwrap();
    assert_eq!(rows[0].get::<String, _>(0), "in-progress");
    let whole = "oncegate.response(999, ARRAY['X-Tab', 'etag'], ARRAY['a	ü', ''], 'body')";
    run(&mut owner, &format!("SELECT oncegate.complete({record}, {token}, {whole})")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_and_arrays_out_of_range_have_one_sqlstate() {
    let database = Database::fresh().await;
    let mut owner = database.connect().await;
    let id = "oncegate.message_record('c', '1')";
    for most in ["9223372036854775807", "(-9223372036854775808)", "null"] {
        for call in [
            format!("oncegate.receive({id}, {most})"),
            format!("oncegate.receive_many(ARRAY[{id}], {most})"),
            format!("oncegate.begin_messages(ARRAY[{id}], 1, {most})"),
            format!("oncegate.fail_message({id}, {most})"),
            format!(
                "oncegate.write_dead_letter({id}, 'c', 'r', 1, 'e', 't', null, null, '{{}}', '{{}}', '', {most})"
            ),
        ] {
            let error = try_run(&mut owner, &format!("SELECT * FROM {call}")).await.unwrap_err();
            assert_eq!(sqlstate(&error), "22023", "{call}: {error}");
        }
    }
    for call in [
        "oncegate.outbox_take(9223372036854775807, 10, 10, 10, 1000)".to_owned(),
        format!("oncegate.receive_many(ARRAY[ARRAY[{id}]], 60000)"),
        format!("oncegate.begin_messages(ARRAY[ARRAY[{id}]], 1, 60000)"),
        format!("oncegate.receive_many(ARRAY[{id}], 60000, ARRAY[ARRAY[{id}]])"),
        "oncegate.message_record('c', '1', ARRAY[ARRAY['own']])".to_owned(),
        "oncegate.response(200, ARRAY[ARRAY['a']], ARRAY[ARRAY['b']], null)".to_owned(),
    ] {
        let error = try_run(&mut owner, &format!("SELECT * FROM {call}")).await.unwrap_err();
        assert_eq!(sqlstate(&error), "22023", "{call}: {error}");
    }
    let rows = try_run(&mut owner, "SELECT FROM oncegate.receipts").await.unwrap();
    assert!(rows.is_empty());
}

/// Every deployment does this: apply the contract, then grant again.
#[tokio::test(flavor = "multi_thread")]
async fn the_contract_can_be_applied_during_grants() {
    let database = Database::fresh().await;
    let role = format!("granted_{}", database.name);
    run(&mut database.connect().await, &format!("CREATE ROLE {role}")).await;
    let applying: Vec<_> = (0..2)
        .map(|_| {
            let options = database.options();
            tokio::spawn(async move {
                for _ in 0..4 {
                    schema::apply(&options).await.unwrap();
                }
            })
        })
        .collect();
    let grant = format!("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate TO {role}");
    let revoke = format!("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate FROM {role}");
    let mut granter = database.connect().await;
    let mut refused = 0;
    while !applying.iter().all(tokio::task::JoinHandle::is_finished) {
        for change in [&grant, &revoke] {
            refused += usize::from(try_run(&mut granter, change).await.is_err());
        }
    }
    for applied in applying {
        applied.await.unwrap();
    }
    println!("{refused} changes of rights were refused");
    run(&mut granter, &format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}
