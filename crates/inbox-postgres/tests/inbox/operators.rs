//! Dead letters in the hands of operators: published again, each takes effect once, and every change is in the audit trail.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{StoreErrorKind, Timestamp};
use oncegate_inbox::{HandlerError, Identity, Message};
use oncegate_inbox_postgres::{DeadLetterTable, TransactionalInbox};
use oncegate_postgres::PostgresOptions;
use oncegate_postgres::messages::{
    AuditNote, DeadLetterChange, DeadLetterFilter, DeadLetterLine, MessageOperator, Obstacle, OutboxChange,
    OutboxState, RequeueTerms,
};
use oncegate_postgres::sqlx::postgres::PgConnection;
use oncegate_postgres::sqlx::{self, Connection as _, Row as _};

use crate::support::{Database, LONG, again, effect, inbox, run, word};

const NOTE: AuditNote<'static> = AuditNote { actor: "ada", reason: "the address is known now" };

/// The time for which a broker knows identifiers.
const WINDOW: Duration = Duration::from_secs(300);

fn operator(database: &Database) -> MessageOperator {
    let options = PostgresOptions::from_url(&database.url()).unwrap();
    MessageOperator::new(options.with_connect_timeout(LONG).unwrap().with_statement_timeout(LONG).unwrap())
}

/// For a broker that knows no identifiers.
fn terms(accepted: &[Obstacle]) -> RequeueTerms {
    RequeueTerms { accepted: accepted.to_vec(), broker_window: Duration::ZERO }
}

async fn letters(operator: &MessageOperator) -> Vec<DeadLetterLine> {
    operator.dead_letters(&DeadLetterFilter::default(), 100).await.unwrap()
}

async fn reject(_: &mut PgConnection, _: &Message) -> Result<(), HandlerError> {
    Err(HandlerError::reject("no such address"))
}

/// The messages in the outbox, as a consumer gets them after a relay has published them to a broker.
async fn published(database: &Database, broker_id: &str) -> Vec<Arc<Message>> {
    let rows = run(&mut database.connect().await, "SELECT * FROM oncegate.outbox ORDER BY seq").await;
    let message = |row: &oncegate_postgres::sqlx::postgres::PgRow| {
        let names: Vec<String> = row.get("header_names");
        let values: Vec<Vec<u8>> = row.get("header_values");
        let mut message = Message::new(row.get::<String, _>("topic"), row.get::<Vec<u8>, _>("payload"))
            .with_broker_id(broker_id)
            .with_deliveries(Some(1), false);
        for (name, value) in names.into_iter().zip(values) {
            // A publisher replaces it.
            if name != "oncegate-message-id" {
                message = message.with_header(name, value);
            }
        }
        Arc::new(message.with_header("oncegate-message-id", row.get::<String, _>("id")))
    };
    rows.iter().map(message).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_requeued_message_takes_effect_once_over_all_copies() {
    let database = Database::fresh().await;
    let (operator, inbox) = (operator(&database), database.inbox(2).await);
    assert_eq!(word(&inbox.process(&again("a"), reject).await), "dead rejected");
    let line = letters(&operator).await.remove(0);
    assert_eq!(
        (line.consumer.as_str(), line.topic.as_str(), line.reason.as_str(), line.payload_bytes),
        ("billing", "orders", "rejected", 1)
    );
    assert!(line.error.contains("no such address"), "{}", line.error);

    // A broker with a window for duplicates would drop it now.
    let early = RequeueTerms { accepted: Obstacle::ALL.to_vec(), broker_window: WINDOW };
    let refused = operator.requeue_dead_letter(line.number, &early, NOTE).await.unwrap();
    assert_eq!(refused, DeadLetterChange::Refused(vec![Obstacle::Recent]));
    assert_eq!((letters(&operator).await.len(), published(&database, "1").await.len()), (1, 0));

    let shown = operator.dead_letter(line.number, Duration::ZERO).await.unwrap().unwrap();
    assert_eq!((shown.identity.as_deref(), shown.obstacles.len()), (Some("header event-id"), 0));
    assert_eq!(shown.content.payload, b"a");
    let done = operator.requeue_dead_letter(line.number, &terms(&[]), NOTE).await.unwrap();
    let [copy] = &published(&database, "1").await[..] else { panic!("one message") };
    let DeadLetterChange::Requeued(id) = done else { panic!("{done:?}") };
    assert_eq!(copy.header("oncegate-message-id").unwrap().unwrap(), id.as_bytes());
    assert_eq!(copy.header("event-id").unwrap().unwrap(), &b"a"[..]);
    let missing = operator.requeue_dead_letter(line.number, &terms(&[]), NOTE).await.unwrap();
    assert_eq!(missing, DeadLetterChange::Missing);

    // The relay may publish it twice, and the broker may deliver the first publication once more.
    assert_eq!(word(&inbox.process(copy, effect).await), "processed 1");
    for late in [copy.clone(), again("a"), copy.clone()] {
        assert_eq!(word(&inbox.process(&late, effect).await), "duplicate");
    }
    assert_eq!(database.effects().await, ["a"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_operators_publish_it_once() {
    let database = Database::fresh().await;
    let (operator, inbox) = (operator(&database), database.inbox(2).await);
    inbox.process(&again("a"), reject).await;
    let number = letters(&operator).await[0].number;
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let operator = operator.clone();
            tokio::spawn(
                async move { operator.requeue_dead_letter(number, &terms(&[]), NOTE).await.unwrap() },
            )
        })
        .collect();
    let mut requeued = 0;
    for task in tasks {
        match task.await.unwrap() {
            DeadLetterChange::Requeued(_) => requeued += 1,
            DeadLetterChange::Missing | DeadLetterChange::Locked => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((requeued, published(&database, "1").await.len()), (1, 1));
    assert_eq!(operator.audit(None, 10).await.unwrap().len(), 1);
}

/// Each publication has another identifier of the broker.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_without_an_identity_of_its_own_needs_a_decision_and_late_copies_stay_dead() {
    let database = Database::fresh().await;
    let operator = operator(&database);
    let inbox = TransactionalInbox::new(database.pool(2).await, "billing", Identity::broker()).unwrap();
    let first = Arc::new(Message::new("orders", "a").with_broker_id("stream/1").with_deliveries(None, true));
    assert_eq!(word(&inbox.process(&first, reject).await), "dead rejected");
    let number = letters(&operator).await[0].number;
    let shown = operator.dead_letter(number, Duration::ZERO).await.unwrap().unwrap();
    assert_eq!(
        (shown.identity.as_deref(), &shown.obstacles[..]),
        (Some("broker"), &[Obstacle::NewIdentity][..])
    );
    let refused = operator.requeue_dead_letter(number, &terms(&[Obstacle::Old]), NOTE).await.unwrap();
    assert_eq!(refused, DeadLetterChange::Refused(vec![Obstacle::NewIdentity]));
    let done = operator.requeue_dead_letter(number, &terms(&[Obstacle::NewIdentity]), NOTE).await.unwrap();
    assert!(matches!(done, DeadLetterChange::Requeued(_)), "{done:?}");
    let copy = published(&database, "stream/2").await.remove(0);
    assert_eq!(word(&inbox.process(&copy, effect).await), "processed 1");
    assert_eq!(word(&inbox.process(&first, effect).await), "dead rejected known");
    assert_eq!(database.effects().await, ["a"]);
}

/// The identifier of a message that RabbitMQ delivers is in a property, which a publisher sets from the identifier in the outbox.
#[tokio::test(flavor = "multi_thread")]
async fn an_identifier_in_a_property_of_the_broker_is_kept() {
    let database = Database::fresh().await;
    let operator = operator(&database);
    let identity = Identity::header("amqp-message-id");
    let inbox = TransactionalInbox::new(database.pool(2).await, "billing", identity).unwrap();
    let first =
        Message::new("orders", "a").with_header("amqp-message-id", "evt-1").with_deliveries(None, true);
    inbox.process(&Arc::new(first), reject).await;
    let number = letters(&operator).await[0].number;
    let done = operator.requeue_dead_letter(number, &terms(&[]), NOTE).await.unwrap();
    assert_eq!(done, DeadLetterChange::Requeued("evt-1".to_owned()));

    // Unless the message has another identifier, too: it is the one that is published.
    let other = Message::new("orders", "a")
        .with_header("amqp-message-id", "evt-2")
        .with_header("oncegate-message-id", "other")
        .with_deliveries(None, true);
    inbox.process(&Arc::new(other), reject).await;
    let number = letters(&operator).await[0].number;
    let refused = operator.requeue_dead_letter(number, &terms(&[]), NOTE).await.unwrap();
    assert_eq!(refused, DeadLetterChange::Refused(vec![Obstacle::NewIdentity]));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_would_fail_again_or_may_have_happened_is_refused() {
    let database = Database::fresh().await;
    let (operator, inbox) = (operator(&database), inbox(database.pool(2).await));
    inbox.process(&Arc::new(Message::new("orders", "who?")), effect).await;
    inbox.process(&again("a"), reject).await;
    let sql = "UPDATE oncegate.dead_letters SET reason = 'outcome-unknown', at = at - 8 * 86400000 WHERE reason = 'rejected'";
    run(&mut database.connect().await, sql).await;
    let [doubtful, nameless] = &letters(&operator).await[..] else { panic!("two dead letters") };
    let all = terms(&Obstacle::ALL);
    let refused = operator.requeue_dead_letter(nameless.number, &all, NOTE).await.unwrap();
    assert_eq!(refused, DeadLetterChange::Refused(vec![Obstacle::FailsAgain]));
    let refused = operator.requeue_dead_letter(doubtful.number, &terms(&[]), NOTE).await.unwrap();
    assert_eq!(refused, DeadLetterChange::Refused(vec![Obstacle::OutcomeUnknown, Obstacle::Old]));
    let accepted = terms(&[Obstacle::OutcomeUnknown, Obstacle::Old]);
    let done = operator.requeue_dead_letter(doubtful.number, &accepted, NOTE).await.unwrap();
    assert!(matches!(done, DeadLetterChange::Requeued(_)), "{done:?}");

    let done = operator.drop_dead_letter(nameless.number, NOTE).await.unwrap();
    assert_eq!(done, DeadLetterChange::Dropped);
    assert_eq!(operator.drop_dead_letter(nameless.number, NOTE).await.unwrap(), DeadLetterChange::Missing);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_in_the_hands_of_a_transaction_is_left_alone() {
    let database = Database::fresh().await;
    let (operator, inbox) = (operator(&database), database.inbox(2).await);
    inbox.process(&again("a"), reject).await;
    let number = letters(&operator).await[0].number;
    let mut open = database.connect().await;
    run(&mut open, &format!("BEGIN; SELECT * FROM oncegate.take_dead_letter({number})")).await;
    let change = operator.requeue_dead_letter(number, &terms(&[]), NOTE).await.unwrap();
    assert_eq!(change, DeadLetterChange::Locked);
    assert_eq!(operator.drop_dead_letter(number, NOTE).await.unwrap(), DeadLetterChange::Locked);
    run(&mut open, "ROLLBACK").await;
    assert_eq!(operator.audit(None, 10).await.unwrap().len(), 0, "nothing of it is left");
    assert!(matches!(
        operator.requeue_dead_letter(number, &terms(&[]), NOTE).await.unwrap(),
        DeadLetterChange::Requeued(_)
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn each_change_is_in_the_audit_trail_with_its_actor() {
    let database = Database::fresh().await;
    let (operator, inbox) = (operator(&database), database.inbox(2).await);
    for id in ["a", "b", "c", "d"] {
        inbox.process(&again(id), reject).await;
    }
    let numbers: Vec<_> = letters(&operator).await.iter().map(|line| line.number).collect();
    operator.requeue_dead_letter(numbers[0], &terms(&[]), NOTE).await.unwrap();
    operator.drop_dead_letter(numbers[1], AuditNote { actor: "grace", reason: "test data" }).await.unwrap();
    // By programs, without a name and a reason.
    let table = DeadLetterTable::new(database.pool(1).await);
    assert!(table.delete(numbers[2]).await.unwrap());
    let sent = table.take(numbers[3], async |_: &mut PgConnection, _: Arc<Message>| Ok(())).await.unwrap();
    assert!(sent.is_some());
    let mut owner = database.connect().await;
    let sent = "SELECT oncegate.send('orders', 'x', id => 'm-' || n) FROM generate_series(1, 3) AS g (n); \
                UPDATE oncegate.outbox SET refused_at = 1, error = 'too large', attempts = 1 WHERE id LIKE 'm-%'";
    run(&mut owner, sent).await;
    let refused = operator.outbox(Some(OutboxState::Refused), None, 10).await.unwrap();
    let seqs: Vec<_> = refused.iter().map(|line| line.seq).collect();
    assert_eq!(operator.requeue_outbox_message(seqs[0], NOTE).await.unwrap(), OutboxChange::Requeued);
    assert_eq!(operator.drop_outbox_message(seqs[1], NOTE).await.unwrap(), OutboxChange::Dropped);
    run(&mut owner, &format!("SELECT oncegate.outbox_drop({})", seqs[2])).await;
    assert_eq!(operator.drop_outbox_message(seqs[1], NOTE).await.unwrap(), OutboxChange::Missing);
    let change = operator.drop_outbox_message(seqs[0], NOTE).await.unwrap();
    assert_eq!(change, OutboxChange::NotRefused(OutboxState::Failing));

    let trail = operator.audit(None, 100).await.unwrap();
    let role = trail[0].actor.clone();
    let entries: Vec<_> = trail
        .iter()
        .rev()
        .map(|entry| {
            (entry.kind.as_str(), entry.action.as_str(), entry.actor.as_str(), entry.reason.as_str())
        })
        .collect();
    assert_eq!(
        entries,
        [
            ("dead-letter", "requeued", "ada", NOTE.reason),
            ("dead-letter", "dropped", "grace", "test data"),
            ("dead-letter", "dropped", role.as_str(), ""),
            ("dead-letter", "taken", role.as_str(), ""),
            ("outbox", "requeued", "ada", NOTE.reason),
            ("outbox", "dropped", "ada", NOTE.reason),
            ("outbox", "dropped", role.as_str(), ""),
        ]
    );
    assert!(!role.is_empty() && role != "ada");
    assert_eq!(operator.audit(Some(trail[5].number), 100).await.unwrap().len(), 1);
    let nameless = AuditNote { actor: "", reason: "r" };
    let error = operator.drop_dead_letter(1, nameless).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Invalid, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn listings_have_filters_counts_and_pages() {
    let database = Database::fresh().await;
    let (operator, inbox) = (operator(&database), database.inbox(2).await);
    for id in ["a", "b", "c"] {
        inbox.process(&again(id), reject).await;
    }
    inbox.process(&Arc::new(Message::new("refunds", "who?")), effect).await;
    let all = letters(&operator).await;
    assert!(all.is_sorted_by(|one, other| one.number > other.number) && all.len() == 4);
    let filter = |change: fn(&mut DeadLetterFilter)| {
        let mut filter = DeadLetterFilter::default();
        change(&mut filter);
        filter
    };
    for (filter, count) in [
        (filter(|f| f.topic = Some("refunds".into())), 1),
        (filter(|f| f.reason = Some("rejected".into())), 3),
        (filter(|f| f.consumer = Some("shipping".into())), 0),
        (DeadLetterFilter { before: Some(all[1].number), ..DeadLetterFilter::default() }, 2),
    ] {
        assert_eq!(operator.dead_letters(&filter, 100).await.unwrap().len(), count, "{filter:?}");
    }
    assert_eq!(operator.dead_letters(&DeadLetterFilter::default(), 2).await.unwrap().len(), 2);
    let counts = operator.dead_letter_counts().await.unwrap();
    let counts: Vec<_> = counts.iter().map(|c| (c.topic.as_str(), c.reason.as_str(), c.count)).collect();
    assert_eq!(counts, [("orders", "rejected", 3), ("refunds", "no-identity", 1)]);

    let sent = "SELECT oncegate.send('orders', 'x', CASE n WHEN 3 THEN 'key'::bytea END, ARRAY['h'], ARRAY['v'::bytea], 'm-' || n) \
                FROM generate_series(1, 4) AS g (n); \
                UPDATE oncegate.outbox SET refused_at = 1, attempts = 1 WHERE id = 'm-3'; \
                UPDATE oncegate.outbox SET attempts = 2, error = 'away' WHERE id = 'm-2'; \
                UPDATE oncegate.outbox SET token = 1, free_at = 9000000000000 WHERE id = 'm-4'";
    run(&mut database.connect().await, sent).await;
    let listed = async |state| {
        let lines = operator.outbox(state, None, 100).await.unwrap();
        lines
            .iter()
            .map(|line| (line.id.clone(), line.state, line.is_held, line.blocks_key))
            .collect::<Vec<_>>()
    };
    let line = |id: &str, state, is_held, blocks| (id.to_owned(), state, is_held, blocks);
    assert_eq!(listed(Some(OutboxState::Refused)).await, [line("m-3", OutboxState::Refused, false, true)]);
    assert_eq!(listed(Some(OutboxState::Failing)).await, [line("m-2", OutboxState::Failing, false, false)]);
    assert_eq!(listed(None).await.len(), 4);
    let counts = operator.outbox_counts().await.unwrap();
    assert_eq!((counts.waiting, counts.failing, counts.refused), (3, 1, 1));
    let lines = operator.outbox(None, None, 100).await.unwrap();
    assert_eq!(operator.outbox(None, Some(lines[1].seq), 1).await.unwrap()[0].id, "m-3");
    let shown = operator.outbox_message(lines[3].seq).await.unwrap().unwrap();
    assert!(shown.line.is_held && shown.content.headers == [("h".to_owned(), b"v".to_vec())]);
    assert!(operator.outbox_message(lines[3].seq + 1).await.unwrap().is_none());
}

/// With many dead letters, those of a period are found without a look at the others.
#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_of_a_period_are_found_by_their_time() {
    let database = Database::fresh().await;
    let mut owner = database.connect().await;
    // Their times are nearly in the order of their numbers: every hundredth is ten minutes late.
    let fill = "INSERT INTO oncegate.dead_letters (id, consumer, reason, attempts, error, topic, header_names, header_values, payload, at) \
                SELECT sha256(int8send(n)), CASE n % 3 WHEN 0 THEN 'mail' ELSE 'billing' END, 'rejected', 1, '', 'orders', \
                    '{}', '{}', 'x', \
                    1000000000000 + n * 1000 - CASE n % 100 WHEN 0 THEN 600000 ELSE 0 END \
                FROM generate_series(1, 20000) AS g (n) ORDER BY n; ANALYZE oncegate.dead_letters";
    run(&mut owner, fill).await;
    let operator = operator(&database);
    let all = {
        let (mut all, mut filter) = (Vec::new(), DeadLetterFilter::default());
        loop {
            let page = operator.dead_letters(&filter, 1000).await.unwrap();
            let Some(last) = page.last() else { break all };
            filter.before = Some(last.number);
            all.extend(page);
        }
    };
    assert_eq!(all.len(), 20_000);
    let time = |seconds: u64| Some(Timestamp::from_millis(1_000_000_000_000 + seconds * 1000));
    for times in [
        (None, None),
        (time(19_900), None),
        (time(10_000), time(10_050)),
        (None, time(40)),
        (time(10_000), time(9_000)),
        (time(30_000), None),
    ] {
        for consumer in [None, Some("mail".to_owned())] {
            let is_in = |line: &&DeadLetterLine| {
                times.0.is_none_or(|since| line.at >= since)
                    && times.1.is_none_or(|until| line.at < until)
                    && consumer.as_ref().is_none_or(|consumer| line.consumer == *consumer)
            };
            let expected: Vec<_> = all.iter().filter(is_in).map(|line| line.number).collect();
            let mut filter = DeadLetterFilter { consumer: consumer.clone(), ..DeadLetterFilter::default() };
            let (mut found, mut pages) = (Vec::new(), 0);
            while pages < 5 {
                let page = operator.dead_letters_of_period(&filter, times, 25).await.unwrap().unwrap();
                let Some(last) = page.last() else { break };
                filter.before = Some(last.number);
                found.extend(page.into_iter().map(|line| line.number));
                pages += 1;
            }
            assert_eq!(found, expected[..expected.len().min(125)], "{times:?} {consumer:?}");
        }
    }
    // The server looks at the rows of the period, and at those between its numbers.
    let mut transaction = owner.begin().await.unwrap();
    let call = "SELECT count(*) FROM oncegate.dead_letters_of_period(NULL, NULL, NULL, 1000010000000, 1000010050000, NULL, 1000)";
    let found: i64 = sqlx::query_scalar(call).fetch_one(&mut *transaction).await.unwrap();
    let read = "SELECT seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables WHERE relid = 'oncegate.dead_letters'::regclass";
    let read: i64 = sqlx::query_scalar(read).fetch_one(&mut *transaction).await.unwrap();
    transaction.rollback().await.unwrap();
    assert!(found >= 49 && read < 2000, "{found} found, {read} read");

    // A database from before has no such function.
    run(&mut owner, "DROP FUNCTION oncegate.dead_letters_of_period").await;
    let none = operator.dead_letters_of_period(&DeadLetterFilter::default(), (None, None), 1).await.unwrap();
    assert!(none.is_none());
}

/// Behind a pooler each call is one message, and its reply is text.
#[tokio::test(flavor = "multi_thread")]
async fn calls_without_prepared_statements_read_and_change_the_same() {
    let database = Database::fresh().await;
    let options = PostgresOptions::from_url(&format!("{}?pooler=transaction", database.url())).unwrap();
    let operator = MessageOperator::new(options.with_connect_timeout(LONG).unwrap());
    let inbox = database.inbox(1).await;
    let message =
        Message::new("orders", b"\xff'\\".to_vec()).with_header("event-id", "it's \"a\"").with_order_key("k");
    inbox.process(&Arc::new(message.with_deliveries(None, true)), reject).await;
    let [line] = &letters(&operator).await[..] else { panic!("one dead letter") };
    let shown = operator.dead_letter(line.number, WINDOW).await.unwrap().unwrap();
    assert_eq!(shown.content.payload, b"\xff'\\");
    assert_eq!(shown.content.headers, [("event-id".to_owned(), b"it's \"a\"".to_vec())]);
    assert_eq!(
        (shown.line.order_key.as_deref(), &shown.obstacles[..]),
        (Some(&b"k"[..]), &[Obstacle::Recent][..])
    );
    let note = AuditNote { actor: "o'hara", reason: "a \"reason\" \\ with '" };
    let done = operator.requeue_dead_letter(line.number, &terms(&[]), note).await.unwrap();
    assert!(matches!(done, DeadLetterChange::Requeued(_)), "{done:?}");
    let entry = operator.audit(None, 1).await.unwrap().remove(0);
    assert_eq!((entry.actor.as_str(), entry.reason.as_str()), (note.actor, note.reason));
    let sent = operator.outbox(Some(OutboxState::Waiting), None, 10).await.unwrap().remove(0);
    assert_eq!(operator.outbox_message(sent.seq).await.unwrap().unwrap().content.payload, b"\xff'\\");
    let change = operator.drop_outbox_message(sent.seq, note).await.unwrap();
    assert_eq!(change, OutboxChange::NotRefused(OutboxState::Waiting));
    assert_eq!(operator.outbox_counts().await.unwrap().waiting, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_without_rights_reads_which_it_needs() {
    let database = Database::fresh().await;
    let role = format!("operator_{}", database.name);
    let mut owner = database.connect().await;
    run(&mut owner, &format!("CREATE ROLE {role} LOGIN PASSWORD 'pw'")).await;
    let url = database.url();
    let (_, place) = url.rsplit_once('@').unwrap();
    let options = PostgresOptions::from_url(&format!("postgres://{role}:pw@{place}")).unwrap();
    let weak = MessageOperator::new(options.with_connect_timeout(LONG).unwrap());
    let error = weak.dead_letters(&DeadLetterFilter::default(), 1).await.unwrap_err().to_string();
    let (_, grants) = error.split_once("As the owner of the schema: ").unwrap_or_else(|| panic!("{error}"));
    run(&mut owner, &grants.replace(" TO role", &format!(" TO {role}"))).await;
    assert_eq!(weak.dead_letters(&DeadLetterFilter::default(), 1).await.unwrap().len(), 0);
    assert_eq!(weak.outbox_counts().await.unwrap().waiting, 0);
    let inbox = database.inbox(1).await;
    inbox.process(&again("a"), reject).await;
    let number = letters(&weak).await[0].number;
    let done = weak.requeue_dead_letter(number, &terms(&[]), NOTE).await.unwrap();
    assert!(matches!(done, DeadLetterChange::Requeued(_)), "the right to send is that of the schema's owner");
    assert!(!error.contains("pw@") && !error.contains(&format!("{role}@")), "{error}");
    run(&mut owner, &format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;

    // A database from before these functions.
    run(&mut owner, "DROP FUNCTION oncegate.dead_letter_page").await;
    let error =
        operator(&database).dead_letters(&DeadLetterFilter::default(), 1).await.unwrap_err().to_string();
    assert!(error.contains("oncegate schema apply postgres"), "{error}");
}
