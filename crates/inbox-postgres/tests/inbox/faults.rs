//! Connections that break, processes that end, servers that go away.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate_inbox::{HandlerError, Message, ProcessOutcome};
use oncegate_postgres::sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use oncegate_postgres::sqlx::{self, Connection as _, PgConnection};
use oncegate_servers::{Fault, FaultProxy, PgBouncer, PostgresOptions, PostgresServer, freeze, thaw};
use oncegate_testkit::until;

use crate::support::{
    Database, LONG, again, effect, inbox, new, ordered, pool, prepare, process_each, run, word, words,
};

/// Returns the number of handler runs and the outcomes of a batch with this fault at COMMIT. `is_late` releases it
/// later.
async fn broken(how: Fault, is_late: bool, batch: &[Arc<Message>]) -> (Database, u32, Vec<String>) {
    let database = Database::fresh().await;
    let proxy = FaultProxy::start(database.server.port()).await.unwrap();
    let inbox = inbox(pool(&database.url(), proxy.port(), 2).await);
    proxy.arm(b"COMMIT", how);
    let runs = Arc::new(AtomicU32::new(0));
    let counted = {
        let runs = runs.clone();
        async move |connection: &mut PgConnection, message: &Message| {
            runs.fetch_add(1, Ordering::SeqCst);
            effect(connection, message).await
        }
    };
    let release = async {
        if is_late {
            proxy.broken().await;
            // Time to look for it a few times. The transaction is open all the while.
            tokio::time::sleep(Duration::from_millis(300)).await;
            proxy.go_on();
        }
    };
    let (handled, ()) = tokio::join!(process_each(&inbox, batch, counted), release);
    let again = process_each(&inbox, batch, effect).await;
    assert!(
        again.iter().all(|handled| matches!(handled, ProcessOutcome::Duplicate)),
        "{how:?} {:?}, then {:?}",
        words(&handled),
        words(&again)
    );
    (database, runs.load(Ordering::SeqCst), words(&handled))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_result_of_a_commit_without_a_reply_is_found() {
    for batch in [vec![new("a")], vec![again("a")], vec![new("a"), again("b"), new("c"), new("a")]] {
        let different = batch.len().min(3);
        let cases = [
            (Fault::After, false, 1),
            (Fault::Before, false, 2),
            (Fault::Late, true, 1),
            (Fault::LateEnd, true, 2),
        ];
        for (how, is_late, runs) in cases {
            let (database, ran, said) = broken(how, is_late, &batch).await;
            assert!(said[..different].iter().all(|word| word == "processed 1"), "{how:?} {said:?}");
            assert_eq!(ran, runs * u32::try_from(different).unwrap(), "{how:?}");
            assert_eq!(database.effects().await.len(), different, "{how:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_with_an_unknown_result_counts_as_in_flight() {
    let database = Database::fresh().await;
    let proxy = FaultProxy::start(database.server.port()).await.unwrap();
    let inbox = inbox(pool(&database.url(), proxy.port(), 2).await)
        .with_statement_timeout(Duration::from_secs(2))
        .unwrap();
    proxy.arm(b"COMMIT", Fault::Late);
    let message = new("a");
    assert_eq!(word(&inbox.process(&message, effect).await), "in-flight");
    assert!(database.effects().await.is_empty());
    proxy.go_on();
    until("the commit", async || database.effects().await.len() == 1).await;
    assert_eq!(word(&inbox.process(&message, effect).await), "duplicate");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_lost_in_the_handler_is_not_a_failed_attempt() {
    let database = Database::fresh().await;
    let inbox = database.inbox(2).await.with_max_attempts(1).unwrap();
    let runs = Arc::new(AtomicU32::new(0));
    let cut = {
        let runs = runs.clone();
        async move |connection: &mut PgConnection, message: &Message| {
            effect(&mut *connection, message).await?;
            if runs.fetch_add(1, Ordering::SeqCst) == 0 {
                sqlx::query("SELECT pg_terminate_backend(pg_backend_pid())").execute(connection).await?;
            }
            Ok(())
        }
    };
    assert_eq!(word(&inbox.process(&again("a"), cut.clone()).await), "processed 1");
    runs.store(0, Ordering::SeqCst);
    let handled = process_each(&inbox, &[new("b"), new("c")], cut).await;
    assert_eq!(words(&handled), ["processed 1", "processed 1"]);
    // One that does it every time is poison.
    let always = async |connection: &mut PgConnection, _: &Message| {
        sqlx::query("SELECT pg_terminate_backend(pg_backend_pid())").execute(connection).await?;
        Ok(())
    };
    assert_eq!(word(&inbox.process(&new("d"), always).await), "dead attempts-exhausted");
    assert_eq!(database.effects().await, ["a", "b", "c"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_restart_loses_and_repeats_nothing() {
    const MESSAGES: usize = 3000;
    let mut server = tokio::task::spawn_blocking(|| PostgresServer::start().unwrap()).await.unwrap();
    let url = server.url();
    prepare(&url).await;
    let options = url.parse::<PgConnectOptions>().unwrap();
    let short = PgPoolOptions::new().max_connections(8).acquire_timeout(Duration::from_millis(500));
    let pool = short.connect_with(options).await.unwrap();
    let done = Arc::new(AtomicU32::new(0));
    let outages = Arc::new(AtomicU32::new(0));
    let workers: Vec<_> = (0..4)
        .map(|worker| {
            let inbox = inbox(pool.clone())
                .with_max_batch(20)
                .unwrap()
                .with_statement_timeout(Duration::from_secs(5))
                .unwrap();
            let (done, outages) = (done.clone(), outages.clone());
            tokio::spawn(async move {
                // Every message goes to two of them.
                let mut open: Vec<_> = (0..MESSAGES)
                    .filter(|n| n % 4 == worker || (n + 1) % 4 == worker)
                    .map(|n| if n % 2 == 0 { again(&format!("m{n}")) } else { new(&format!("m{n}")) })
                    .collect();
                while !open.is_empty() {
                    let batch: Vec<_> = open.drain(..open.len().min(20)).collect();
                    for (message, handled) in batch.iter().zip(process_each(&inbox, &batch, effect).await) {
                        match handled {
                            ProcessOutcome::Processed { .. } | ProcessOutcome::Duplicate => {
                                done.fetch_add(1, Ordering::SeqCst);
                            }
                            ProcessOutcome::InFlight { .. }
                            | ProcessOutcome::NotBegun
                            | ProcessOutcome::Failed { .. } => {
                                open.push(message.clone());
                            }
                            ProcessOutcome::Unavailable(_) => {
                                outages.fetch_add(1, Ordering::SeqCst);
                                open.push(message.clone());
                                tokio::time::sleep(Duration::from_millis(50)).await;
                            }
                            other => panic!("{other:?}"),
                        }
                    }
                }
            })
        })
        .collect();
    for outage in 1..=2 {
        until("some work", async || done.load(Ordering::SeqCst) >= outage * 500).await;
        server = tokio::task::spawn_blocking(move || {
            server.stop_immediately().unwrap();
            std::thread::sleep(Duration::from_millis(700));
            server.start_again().unwrap();
            server
        })
        .await
        .unwrap();
    }
    for worker in workers {
        worker.await.unwrap();
    }
    assert!(outages.load(Ordering::SeqCst) > 0, "no outage was noticed");
    let counts = sqlx::query_as::<_, (i64, i64)>("SELECT count(*), count(DISTINCT message) FROM effects");
    let counts = counts.fetch_one(&pool).await.unwrap();
    assert_eq!(counts, (MESSAGES as i64, MESSAGES as i64));
}

/// The number of a transaction that was lost with its server is given to another one, which commits: that is no information
/// about the first.
#[tokio::test(flavor = "multi_thread")]
async fn a_reused_transaction_number_leads_to_no_dead_letters() {
    // Nothing is written of a transaction before its COMMIT, so that its number is forgotten with it.
    let settings = vec!["wal_writer_delay=10s".to_owned(), "autovacuum=off".to_owned()];
    let mut options = PostgresOptions::default();
    options.settings = settings;
    let start = move || PostgresServer::start_with(options).unwrap();
    let server = tokio::task::spawn_blocking(start).await.unwrap();
    let url = server.url();
    prepare(&url).await;
    let inbox = inbox(pool(&url, url.parse::<PgConnectOptions>().unwrap().get_port(), 2).await);
    let server = Arc::new(Mutex::new(server));
    for (whose, expected) in [("none", "processed 1"), ("another", "processed 1"), ("copies", "duplicate")] {
        // A background process of the server may write in between, so not every turn reaches the tested case.
        let mut turns = 0..20;
        loop {
            let turn = turns.next().expect("the number was never forgotten");
            let ids: Vec<_> = ["a", "b", "c"].map(|id| format!("{id} {turn} {whose}")).into();
            let batch: Vec<_> = ids.iter().map(|id| new(id)).collect();
            // The outcome of the first run: the number that was lost, and the one that was taken after the crash.
            let numbers = Arc::new(Mutex::new(None));
            let (its, there, copies, noted) = (server.clone(), url.clone(), batch.clone(), numbers.clone());
            let (other, begun) = (inbox.clone(), Instant::now());
            let handled = process_each(&inbox, &batch, async move |connection, message| {
                effect(connection, message).await?;
                if noted.lock().unwrap().is_some() {
                    return Ok(());
                }
                let number = "SELECT txid_current()";
                let lost: i64 = sqlx::query_scalar(number).fetch_one(&mut *connection).await?;
                *noted.lock().unwrap() = Some((lost, 0));
                let its = its.clone();
                let crash = move || {
                    let mut server = its.lock().unwrap();
                    server.stop_immediately().unwrap();
                    server.start_again().unwrap();
                };
                tokio::task::spawn_blocking(crash).await?;
                let mut connection = PgConnection::connect(&there).await?;
                let next = "SELECT txid_snapshot_xmax(txid_current_snapshot())";
                while sqlx::query_scalar::<_, i64>(next).fetch_one(&mut connection).await? < lost
                    && whose != "none"
                {
                    sqlx::query(number).execute(&mut connection).await?;
                }
                let taken = match whose {
                    // What is given next.
                    "none" => next,
                    "another" => number,
                    _ => {
                        let copies = words(&process_each(&other, &copies, effect).await);
                        assert_eq!(copies, ["processed 1"; 3]);
                        "SELECT max(transaction) FROM effects"
                    }
                };
                let taken: i64 = sqlx::query_scalar(taken).fetch_one(&mut connection).await?;
                *noted.lock().unwrap() = Some((lost, taken));
                Err(HandlerError::retry("the server was away"))
            });
            let handled = words(&handled.await);
            let mut connection = PgConnection::connect(&url).await.unwrap();
            let effects = "SELECT count(*) FROM effects WHERE message = ANY ($1)";
            let effects: i64 =
                sqlx::query_scalar(effects).bind(ids).fetch_one(&mut connection).await.unwrap();
            assert_eq!((handled, effects), (vec![expected.to_owned(); 3], 3));
            assert!(
                begun.elapsed() < LONG,
                "{whose}: the statement timeout went by for a number that is not there"
            );
            let letters = "SELECT count(*) FROM oncegate.dead_letters";
            let letters: i64 = sqlx::query_scalar(letters).fetch_one(&mut connection).await.unwrap();
            assert_eq!(letters, 0);
            let (lost, taken) = numbers.lock().unwrap().unwrap();
            if taken == lost {
                break;
            }
        }
    }
}

/// The handler's own COMMIT is running while its connection ends: the server reports the transaction as in progress.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_commit_of_a_handler_is_waited_for() {
    for (how, expected) in [(Fault::Late, "dead outcome-unknown"), (Fault::LateEnd, "processed 1")] {
        let database = Database::fresh().await;
        let proxy = FaultProxy::start(database.server.port()).await.unwrap();
        let inbox = inbox(pool(&database.url(), proxy.port(), 2).await);
        proxy.arm(b"COMMIT", how);
        let is_first = Arc::new(AtomicBool::new(true));
        let batch: Vec<_> = ["a", "b", "c"].map(new).into();
        let handled = process_each(&inbox, &batch, async move |connection, message| {
            effect(connection, message).await?;
            if is_first.swap(false, Ordering::SeqCst) {
                sqlx::raw_sql("COMMIT").execute(&mut *connection).await?;
            }
            Ok(())
        });
        let release = async {
            proxy.broken().await;
            // Time to ask for it a few times. The transaction is open all the while.
            tokio::time::sleep(Duration::from_millis(300)).await;
            proxy.go_on();
        };
        let (handled, ()) = tokio::join!(handled, release);
        assert_eq!(words(&handled), [expected; 3], "{how:?}");
        let letters = if how == Fault::Late { 3 } else { 0 };
        assert_eq!(database.number("SELECT count(*) FROM oncegate.dead_letters").await, letters, "{how:?}");
    }
}

/// Not a test by itself: a consumer in a process of its own. Reads messages, one batch for each line, and writes what became of
/// them. `abort…` ends the process in the handler, `wait…` says so and waits for another line before it goes on.
#[tokio::test]
async fn child() {
    let Ok(url) = std::env::var(CHILD) else { return };
    // Past the harness, which captures what is printed.
    let say = |line: String| std::io::stdout().lock().write_all(line.as_bytes()).unwrap();
    let options = url.parse::<PgConnectOptions>().unwrap();
    let inbox = inbox(pool(&url, options.get_port(), 2).await).with_max_attempts(3).unwrap();
    let handler = async move |connection: &mut PgConnection, message: &Message| {
        effect(connection, message).await?;
        if message.payload.starts_with(b"abort") {
            std::process::abort();
        }
        if message.payload.starts_with(b"wait") {
            say("waits\n".to_owned());
            std::io::stdin().read_line(&mut String::new()).unwrap();
        }
        Ok(())
    };
    say("\nopen\n".to_owned());
    let mut line = String::new();
    while std::io::stdin().read_line(&mut line).unwrap() > 0 {
        let batch: Vec<_> = line.split_whitespace().map(again).collect();
        line.clear();
        let handled = process_each(&inbox, &batch, handler).await;
        say(format!("{}\n", words(&handled).join(", ")));
    }
}

const CHILD: &str = "ONCEGATE_TEST_CHILD";

struct Running {
    child: Child,
    to: ChildStdin,
    lines: BufReader<ChildStdout>,
}

impl Running {
    fn start(url: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "faults::child", "--nocapture", "--test-threads", "1"])
            .env(CHILD, url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut running = Self { child, to, lines: BufReader::new(from) };
        while running.line().expect("the child ended before it was open") != "open" {}
        running
    }

    fn send(&mut self, line: &str) {
        writeln!(self.to, "{line}").unwrap();
    }

    /// Returns the next line of output; `None` after its end.
    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        (self.lines.read_line(&mut line).unwrap() > 0).then(|| line.trim_end().to_owned())
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_is_killed_before_or_after_its_commit_loses_and_repeats_nothing() {
    let database = Database::fresh().await;
    let url = database.url();
    tokio::task::spawn_blocking(move || {
        let mut first = Running::start(&url);
        first.send("a b wait");
        assert_eq!(first.line().unwrap(), "waits");
        let mut second = Running::start(&url);
        second.send("a b wait c");
        // All of it is in the open transaction of the other one.
        assert_eq!(second.line().unwrap(), "in-flight, in-flight, in-flight, processed 1");
        first.kill();
        // The server notices it after a while. The started message counts as crashed, once.
        let said = loop {
            second.send("a b");
            let said = second.line().unwrap();
            if !said.contains("in-flight") {
                break said;
            }
        };
        assert_eq!(said, "processed 2, processed 2");
        // After the commit, before any acknowledgement.
        second.kill();
        let mut third = Running::start(&url);
        third.send("a b c");
        assert_eq!(third.line().unwrap(), "duplicate, duplicate, duplicate");
    })
    .await
    .unwrap();
    assert_eq!(database.effects().await, ["c", "a", "b"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_crashes_its_process_becomes_the_only_dead_letter() {
    let database = Database::fresh().await;
    let url = database.url();
    let (deaths, said) = tokio::task::spawn_blocking(move || {
        let others: Vec<_> = (0..20).map(|n| format!("m{n}")).collect();
        let batch = format!("{} abort {}", others[..10].join(" "), others[10..].join(" "));
        for deaths in 0..100 {
            let mut process = Running::start(&url);
            process.send(&batch);
            let mut said = process.line();
            // Its transaction may be open for a moment yet.
            while said.as_ref().is_some_and(|said| said.contains("in-flight")) {
                process.send(&batch);
                said = process.line();
            }
            if let Some(said) = said {
                return (deaths, said);
            }
        }
        panic!("it never ends");
    })
    .await
    .unwrap();
    assert_eq!(deaths, 3, "as often as attempts are allowed");
    assert!(said.contains("dead attempts-exhausted"), "{said}");
    let mut effects = database.effects().await;
    effects.sort_by_key(|effect| effect[1..].parse::<u32>().unwrap());
    assert_eq!(effects, (0..20).map(|n| format!("m{n}")).collect::<Vec<_>>());
    assert_eq!(database.number("SELECT count(*) FROM oncegate.dead_letters").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspended_process_holds_its_messages_until_its_session_ends() {
    let database = Database::fresh().await;
    let url = database.url();
    let name = database.name.clone();
    let sql = format!("ALTER DATABASE {name} SET idle_in_transaction_session_timeout = '3s'");
    run(&mut database.connect().await, &sql).await;
    tokio::task::spawn_blocking(move || {
        let mut first = Running::start(&url);
        first.send("wait b");
        assert_eq!(first.line().unwrap(), "waits");
        freeze(first.child.id()).unwrap();
        let mut second = Running::start(&url);
        second.send("b");
        let mut said = second.line().unwrap();
        assert_eq!(said, "in-flight");
        while said == "in-flight" {
            second.send("b");
            said = second.line().unwrap();
        }
        assert_eq!(said, "processed 2");
        // It goes on, and finds that its transaction does not exist any more.
        first.send("");
        thaw(first.child.id()).unwrap();
        assert_eq!(first.line().unwrap(), "waits", "it is run again");
        first.send("");
        assert_eq!(first.line().unwrap(), "processed 1, duplicate");
    })
    .await
    .unwrap();
    assert_eq!(database.effects().await, ["b", "wait"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn it_works_behind_a_transaction_pooler() {
    let database = Database::fresh().await;
    let server = database.server.clone();
    let bouncer = tokio::task::spawn_blocking(move || PgBouncer::start(&server, 3)).await.unwrap().unwrap();
    let options: PgConnectOptions = bouncer.url_of(&database.name).parse().unwrap();
    let pool = PgPoolOptions::new().max_connections(12).acquire_timeout(LONG);
    let pool = pool.connect_with(options.extra_float_digits(None)).await.unwrap();
    let inbox = inbox(pool).with_transaction_pooler(true).with_max_attempts(2).unwrap();
    let tasks: Vec<_> = (0..12)
        .map(|_| {
            let inbox = inbox.clone();
            tokio::spawn(async move {
                let run = async |connection: &mut PgConnection, message: &Message| {
                    let text = String::from_utf8_lossy(&message.payload).into_owned();
                    let insert = sqlx::query("INSERT INTO effects (message) VALUES ($1)").persistent(false);
                    insert.bind(&text).execute(connection).await?;
                    match text.starts_with("poison") {
                        true => Err(oncegate_inbox::HandlerError::retry("poison")),
                        false => Ok(()),
                    }
                };
                let mut open: Vec<_> = (0..50)
                    .map(|n| if n % 2 == 0 { again(&format!("m{n}")) } else { new(&format!("m{n}")) })
                    .collect();
                open.insert(20, ordered("poison", "k"));
                open.insert(30, ordered("behind", "k"));
                while !open.is_empty() {
                    let handled = process_each(&inbox, &open, run).await;
                    let pairs = open.into_iter().zip(handled);
                    open = pairs
                        .filter_map(|(message, handled)| match handled {
                            ProcessOutcome::Processed { .. }
                            | ProcessOutcome::Duplicate
                            | ProcessOutcome::Dead { .. } => None,
                            ProcessOutcome::InFlight { .. }
                            | ProcessOutcome::Failed { .. }
                            | ProcessOutcome::NotBegun => Some(message),
                            other => panic!("{other:?}"),
                        })
                        .collect();
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let effects = database.effects().await;
    let different: std::collections::BTreeSet<_> = effects.iter().collect();
    assert_eq!((effects.len(), different.len()), (51, 51), "{effects:?}");
    assert_eq!(database.number("SELECT count(*) FROM oncegate.dead_letters").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_receipts_are_removed_in_the_background() {
    let database = Database::fresh().await;
    let inbox = database.inbox(8).await.with_purge(false);
    let batch = |from: usize, to: usize| {
        let message =
            |n: usize| if n.is_multiple_of(2) { again(&format!("m{n}")) } else { new(&format!("m{n}")) };
        (from..to).map(message).collect::<Vec<_>>()
    };
    assert!(
        process_each(&inbox, &batch(0, 3000), effect)
            .await
            .iter()
            .all(|h| matches!(h, ProcessOutcome::Processed { .. }))
    );
    assert_eq!(database.receipts().await, 3000, "one for each");
    assert_eq!(inbox.purge().await.unwrap(), 0);
    run(
        &mut database.connect().await,
        "UPDATE oncegate.receipts SET expires_at = 1, purge_at = 1 WHERE ctid IN (SELECT ctid FROM oncegate.receipts LIMIT 2500); UPDATE oncegate.purge_marks SET place = 0",
    )
    .await;
    // Another transaction holds some of them, and no call waits.
    let mut elsewhere = database.connect().await;
    run(&mut elsewhere, "BEGIN; SELECT FROM oncegate.receipts WHERE expires_at = 1 LIMIT 10 FOR UPDATE")
        .await;
    let work = {
        let inbox = inbox.clone();
        let batch = batch(3000, 5000);
        tokio::spawn(async move { process_each(&inbox, &batch, effect).await })
    };
    let purges: Vec<_> = (0..3)
        .map(|_| {
            let inbox = inbox.clone();
            tokio::spawn(async move { inbox.purge().await.unwrap() })
        })
        .collect();
    let mut purged = 0;
    for purge in purges {
        purged += purge.await.unwrap();
    }
    assert!(work.await.unwrap().iter().all(|handled| matches!(handled, ProcessOutcome::Processed { .. })));
    assert_eq!((purged, database.receipts().await), (2490, 2510));
    run(&mut elsewhere, "COMMIT").await;
    // What is forgotten is new, also while its row is still there.
    let gone = "SELECT count(*) FROM oncegate.receipts WHERE expires_at = 1";
    assert_eq!(database.number(gone).await, 10);
    let handled = process_each(&inbox, &batch(0, 3000), effect).await;
    assert_eq!(
        handled.iter().filter(|handled| matches!(handled, ProcessOutcome::Processed { attempts: 1 })).count(),
        2500
    );
    assert_eq!(database.number(gone).await, 0);

    // By itself, too.
    run(&mut elsewhere, "UPDATE oncegate.receipts SET expires_at = 1, purge_at = 1").await;
    assert_eq!(word(&database.inbox(2).await.process(&new("last"), effect).await), "processed 1");
    until("the purge", async || database.receipts().await == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_processed_one_by_one_if_the_lock_table_is_full() {
    let mut options = oncegate_servers::PostgresOptions::default();
    options.settings.push("max_locks_per_transaction=10".to_owned());
    let server = tokio::task::spawn_blocking(|| PostgresServer::start_with(options).unwrap()).await.unwrap();
    prepare(&server.url()).await;
    let inbox = inbox(pool(&server.url(), server.port(), 2).await);
    assert_eq!(word(&inbox.process(&again("first"), effect).await), "processed 1");
    let mut hoarder = PgConnection::connect(&server.url()).await.unwrap();
    let hoard = "DO $$ BEGIN FOR n IN 0..100000 LOOP BEGIN PERFORM pg_advisory_lock(n); EXCEPTION WHEN out_of_memory THEN \
                 EXIT; END; END LOOP; FOR n IN 0..59 LOOP PERFORM pg_advisory_unlock(n); END LOOP; END $$";
    run(&mut hoarder, hoard).await;
    let batch: Vec<_> = (0..150).map(|n| new(&format!("n{n}"))).collect();
    let handled = process_each(&inbox, &batch, effect).await;
    assert!(
        handled.iter().all(|handled| matches!(handled, ProcessOutcome::Processed { attempts: 1 })),
        "{:?}",
        words(&handled)
    );
    let batch: Vec<_> = (0..150).map(|n| again(&format!("a{n}"))).collect();
    let handled = process_each(&inbox, &batch, effect).await;
    assert!(
        handled.iter().all(|handled| matches!(handled, ProcessOutcome::Processed { attempts: 1 })),
        "{:?}",
        words(&handled)
    );
    let count =
        sqlx::query_scalar::<_, i64>("SELECT count(*) FROM effects").fetch_one(&mut hoarder).await.unwrap();
    assert_eq!(count, 301);
}
