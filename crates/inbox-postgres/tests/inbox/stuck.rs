//! Failures that do not look like those of a handler, and must not be retried forever.

use std::sync::Arc;
use std::time::Duration;

use oncegate_inbox::{HandlerError, Message, ProcessOutcome};
use oncegate_postgres::sqlx::postgres::PgConnection;
use oncegate_postgres::sqlx::{self};
use tokio::time::{Instant, sleep, timeout};

use crate::support::{Database, LONG, again, effect, inbox, new, pool, process_each, run, word, words};

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_outlives_its_session_leads_to_a_dead_letter() {
    let database = Database::fresh().await;
    run(
        &mut database.connect().await,
        &format!("ALTER DATABASE {} SET idle_in_transaction_session_timeout = '100ms'", database.name),
    )
    .await;
    let inbox = inbox(pool(&database.url(), database.server.port(), 2).await).with_max_attempts(2).unwrap();
    let slow = async |connection: &mut PgConnection, message: &Message| {
        effect(connection, message).await?;
        sleep(Duration::from_secs(1)).await;
        Ok(())
    };
    assert_eq!(word(&inbox.process(&again("a"), slow).await), "failed 1");
    assert_eq!(word(&inbox.process(&again("a"), slow).await), "dead attempts-exhausted");
    assert!(database.effects().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unawaited_statement_that_fails_leads_to_a_dead_letter() {
    let database = Database::fresh().await;
    let inbox = database.inbox(2).await.with_max_attempts(2).unwrap();
    let hasty = async |connection: &mut PgConnection, message: &Message| {
        effect(connection, message).await?;
        let late =
            "DO $$ BEGIN PERFORM pg_sleep(0.5); RAISE EXCEPTION 'late' USING ERRCODE = 'AB001'; END $$";
        let _passed_over = timeout(Duration::from_millis(50), sqlx::raw_sql(late).execute(connection)).await;
        Ok(())
    };
    assert_eq!(word(&inbox.process(&again("a"), hasty).await), "failed 1");
    assert_eq!(word(&inbox.process(&again("a"), hasty).await), "dead attempts-exhausted");
    assert!(database.effects().await.is_empty());
}

/// Commits the receipts of its batch with the first message. With the last one, it leaves a running statement behind, whose
/// error allows a retry.
async fn commits_and_leaves(connection: &mut PgConnection, message: &Message) -> Result<(), HandlerError> {
    effect(connection, message).await?;
    if message.payload == "a" {
        sqlx::raw_sql("COMMIT; BEGIN").execute(connection).await?;
    } else if message.payload == "c" {
        let late =
            "DO $$ BEGIN PERFORM pg_sleep(0.5); RAISE EXCEPTION 'late' USING ERRCODE = '40001'; END $$";
        let _passed_over = timeout(Duration::from_millis(50), sqlx::raw_sql(late).execute(connection)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn unwritable_dead_letters_of_a_committing_handler_block_no_other_message() {
    let database = Database::fresh().await;
    let inbox = database.inbox(4).await;
    let mut operator = database.connect().await;
    run(&mut operator, "ALTER TABLE oncegate.dead_letters ADD CHECK (payload <> 'b')").await;
    let began = Instant::now();
    let refused = process_each(&inbox, &["a", "b", "c"].map(new), commits_and_leaves).await;
    assert_eq!(words(&refused), ["dead outcome-unknown", "failed 1", "dead outcome-unknown"]);
    assert!(began.elapsed() < LONG, "the statement timeout went by for a dead letter that is refused");

    let database = Database::fresh().await;
    let statement_timeout = Duration::from_secs(5);
    let inbox = database.inbox(4).await.with_statement_timeout(statement_timeout).unwrap();
    let mut operator = database.connect().await;
    run(&mut operator, "BEGIN; LOCK TABLE oncegate.dead_letters").await;
    let (batch, began) = (["a", "1", "2", "3", "4", "5", "6", "c"].map(new), Instant::now());
    let away = process_each(&inbox, &batch, commits_and_leaves).await;
    assert!(matches!(away[0], ProcessOutcome::Unavailable(_)), "{:?}", words(&away));
    assert_eq!(words(&away[1..]), ["not begun"; 7]);
    assert!(began.elapsed() < statement_timeout * 8, "each has waited for what is out of reach");
    run(&mut operator, "ROLLBACK").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_refused_by_a_trigger_leads_to_a_dead_letter() {
    let database = Database::fresh().await;
    let inbox = database.inbox(2).await.with_max_attempts(2).unwrap();
    run(
        &mut database.connect().await,
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF NEW.message = 'bad' THEN RAISE EXCEPTION 'not so' USING ERRCODE = 'AB001'; END IF;
            RETURN NEW;
         END $$;
         CREATE CONSTRAINT TRIGGER late AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION refuse()",
    )
    .await;
    let batch = ["a", "bad", "c"].map(new);
    let first = process_each(&inbox, &batch, effect).await;
    assert_eq!(words(&first), ["processed 1", "failed 1", "processed 1"]);
    let second = process_each(&inbox, &batch, effect).await;
    assert_eq!(words(&second), ["duplicate", "dead attempts-exhausted", "duplicate"]);
    assert_eq!(database.effects().await, ["a", "c"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_did_not_run_has_no_crash_counted() {
    let database = Database::fresh().await;
    let ordered = |id| Arc::new(Message::clone(&again(id)).with_order_key("k"));
    let batch = ["a", "b", "c"].map(ordered);
    let mut elsewhere = database.connect().await;
    let id = "oncegate.message_record('billing', 'a', ARRAY['header', 'event-id'])";
    run(&mut elsewhere, &format!("BEGIN; SELECT * FROM oncegate.receive({id})")).await;
    for _ in 0..2 {
        let handled =
            process_each(&database.inbox(2).await.with_max_attempts(1).unwrap(), &batch, effect).await;
        assert_eq!(words(&handled), ["in-flight", "not begun", "not begun"]);
    }
    run(&mut elsewhere, "COMMIT").await;
    let handled = process_each(&database.inbox(2).await.with_max_attempts(1).unwrap(), &batch, effect).await;
    assert_eq!(words(&handled), ["duplicate", "processed 1", "processed 1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_refused_by_the_database_blocks_only_its_own_message() {
    let database = Database::fresh().await;
    let inbox = database.inbox(2).await.with_max_attempts(1).unwrap();
    run(&mut database.connect().await, "ALTER TABLE oncegate.dead_letters ADD CHECK (payload <> 'poison')")
        .await;
    let batch = ["a", "poison", "c"].map(new);
    let handled = process_each(&inbox, &batch, effect).await;
    assert_eq!(words(&handled), ["processed 1", "failed 1", "processed 1"]);
    run(
        &mut database.connect().await,
        "ALTER TABLE oncegate.dead_letters DROP CONSTRAINT dead_letters_payload_check",
    )
    .await;
    let handled = process_each(&inbox, &batch, effect).await;
    assert_eq!(words(&handled), ["duplicate", "dead attempts-exhausted", "duplicate"]);
}
