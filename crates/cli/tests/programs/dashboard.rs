//! The dashboard in a browser: every page, every action, in light and dark, on a phone, and as an attacker.

use std::path::Path;

use oncegate_servers::PostgresServer;
use serde_json::json;
use tokio::process::Command;

use crate::support::{CheckingProgram, Sidecar, sidecar};

const TOKEN: &str = "a-token-for-operators";

/// The checks that the program of the browser makes.
const CHECKS: usize = 34;

/// Three dead letters of `billing`, an hour old, the first one with hostile texts; 61 of `mail`, one of them three hours old; and
/// messages of the outbox, two of them refused.
const MESSAGES: &str = "
    SELECT oncegate.write_dead_letter(oncegate.message_record('billing', 'evt-1', '{header,event-id}'), 'billing',
        'attempts-exhausted', 10, E'\\u202Egnp.exe <img src=x onerror=window.pwned=1> ' || repeat('long ', 100),
        'orders</code><script>window.pwned=1</script>', 'broker-1', 'key-1', '{event-id,<b>trace</b>}',
        ARRAY['evt-1'::bytea, '<script>window.pwned=1</script>'],
        convert_to('card 4929 </pre><script>window.pwned=1</script>', 'UTF8'), 604800000);
    SELECT oncegate.write_dead_letter(oncegate.message_record('billing', 'evt-2', '{header,event-id}'), 'billing',
        'attempts-exhausted', 10, 'no such address', 'orders', null, null, '{event-id}', ARRAY['evt-2'::bytea], 'p', 604800000);
    SELECT oncegate.write_dead_letter(oncegate.message_record('billing', 'evt-3', '{header,event-id}'), 'billing',
        'outcome-unknown', 1, 'committed by itself', 'orders', null, null, '{event-id}', ARRAY['evt-3'::bytea], '\\xff',
        604800000);
    UPDATE oncegate.dead_letters SET at = at - 3600000;
    SELECT oncegate.write_dead_letter(oncegate.message_record('mail', 'mail-' || n), 'mail', 'rejected', 1, 'e', 'mails', null,
        null, '{}', '{}', 'text', 604800000) FROM generate_series(4, 64) AS n;
    UPDATE oncegate.dead_letters SET at = at - 10800000 WHERE number = 10;
    SELECT oncegate.send('orders<script>window.pwned=1</script>', 'too large', 'key-1', null, null, 'm-1');
    SELECT oncegate.send('orders<script>window.pwned=1</script>', 'behind it', 'key-1', null, null, 'm-2');
    SELECT oncegate.send('orders', 'too large, too', null, null, null, 'm-3');
    UPDATE oncegate.outbox SET refused_at = 1, attempts = 1, error = '<img src=x onerror=window.pwned=1>',
        is_aside = order_key IS NULL WHERE id <> 'm-2'";

/// Makes each survey take longer than a page waits, and fail for records of an operation.
const SLOW: &str = "
    ALTER FUNCTION oncegate.survey RENAME TO fast_survey;
    CREATE FUNCTION oncegate.survey(text[], bytea, bytea, text, bigint, bigint, bigint, bytea, text, bytea, bytea, boolean,
        boolean, bigint, bytea, integer)
    RETURNS TABLE (id bytea, changed_at bigint, state text, operation text, records bigint, clock bigint) LANGUAGE plpgsql AS $$
    BEGIN
        IF $10 IS NULL THEN PERFORM pg_sleep(0.3); END IF;
        IF $4 = 'FAIL' THEN
            RAISE EXCEPTION 'canceling statement due to statement timeout' USING ERRCODE = '57014';
        END IF;
        RETURN QUERY SELECT * FROM oncegate.fast_survey($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16);
    END $$";

/// A database after these statements.
fn database(statements: &str) -> PostgresServer {
    let server = PostgresServer::start().unwrap();
    let mut apply = std::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
    let applied =
        apply.args(["schema", "apply", "postgres"]).env("ONCEGATE_STORE", server.url()).output().unwrap();
    assert!(applied.status.success(), "{applied:?}");
    server.sql(statements).unwrap();
    server
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_uses_the_dashboard_in_a_browser() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/dashboard");
    assert!(
        directory.join("node_modules").exists(),
        "the browser's library is missing; run `cargo xtask test`"
    );
    let home = tempfile::tempdir().unwrap();
    let mut command = Command::new("node");
    command.arg("dashboard.mjs").current_dir(directory).env("HOME", home.path());
    let program = CheckingProgram::start(&mut command).await;
    let to = format!("http://{}", program.service);
    let flags = ["--store=memory:", "--upstream-timeout=1s"];
    let mut command = sidecar(&to);
    let open = Sidecar::run(command.args(flags).env("ONCEGATE_WAIT", "5s")).await;
    let mut command = sidecar(&to);
    let guarded = Sidecar::run(command.args(flags).env("ONCEGATE_ADMIN_TOKEN", TOKEN)).await;
    let databases = || (database(MESSAGES), database(SLOW));
    let (with_messages, slow) = tokio::task::spawn_blocking(databases).await.unwrap();
    let mut command = sidecar(&to);
    let messages = Sidecar::run(command.env("ONCEGATE_STORE", with_messages.url())).await;
    let mut command = sidecar(&to);
    let slow = (Sidecar::run(command.env("ONCEGATE_STORE", slow.url())).await, slow);
    let addresses = |sidecar: &Sidecar| json!({"address": sidecar.address.to_string(), "admin": sidecar.admin.to_string()});
    let given = json!({
        "open": addresses(&open), "guarded": addresses(&guarded), "messages": addresses(&messages),
        "slow": addresses(&slow.0), "token": TOKEN,
    });
    program.check(&given, CHECKS).await;
}
