//! A receiver of webhooks whose effects are rows in PostgreSQL, in the transaction of their receipts: many senders that send
//! again, hang up and come back, while the database cuts connections.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use oncegate_inbox::{Identity, InboxCounts, InboxEventKind};
use oncegate_inbox_postgres::TransactionalInbox;
use oncegate_postgres::sqlx::postgres::PgPoolOptions;
use oncegate_postgres::sqlx::{self, Connection as _, PgConnection};
use oncegate_postgres::{PostgresOptions, schema};
use oncegate_servers::PostgresServer;
use oncegate_webhook::{WebhookOptions, WebhookReceiver, WebhookScheme};
use tokio::net::TcpListener;

use crate::sender::{SECRET, Sending, TIMEOUT, now};

const EVENTS: usize = 1_000;

const SENDERS: usize = 16;

const PATH: &str = "/webhooks/standard";

/// Sends an event as real senders do, until it is done. Some hang up before the response, and send again.
async fn send_until_done(number: usize, to: SocketAddr, hangs_up: bool) {
    let (id, payload) = (format!("msg_{number}"), number.to_string());
    if hangs_up {
        drop(Sending::standard(&id, now(), payload.clone()).begin(to, PATH).await);
    }
    let deadline = Instant::now() + 2 * TIMEOUT;
    loop {
        let response =
            Sending::standard(&id, now(), payload.clone()).send(to, PATH).await.expect("a response");
        match response.status {
            200 => return,
            500 | 503 => assert!(Instant::now() < deadline, "not done in time: {response:?}"),
            _ => panic!("{response:?}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn each_webhook_is_one_row_whatever_its_senders_and_the_database_do() {
    let server = tokio::task::spawn_blocking(PostgresServer::start).await.unwrap().unwrap();
    let url = server.url();
    schema::apply(&PostgresOptions::from_url(&url).unwrap().with_connect_timeout(TIMEOUT).unwrap())
        .await
        .unwrap();
    let mut operator = PgConnection::connect(&url).await.unwrap();
    // The ledger: no key makes it unique.
    sqlx::query("CREATE TABLE ledger (event integer NOT NULL)").execute(&mut operator).await.unwrap();
    let pool = PgPoolOptions::new().max_connections(8).acquire_timeout(TIMEOUT).connect(&url).await.unwrap();

    let inbox = TransactionalInbox::new(pool, "payments", Identity::broker()).unwrap();
    let inbox = inbox.with_max_attempts(1_000).unwrap();
    let processor = inbox.processor(async |connection, message| {
        let event: i32 = std::str::from_utf8(&message.payload)?.parse()?;
        sqlx::query("INSERT INTO ledger VALUES ($1)").bind(event).execute(connection).await?;
        Ok(())
    });
    let counts = InboxCounts::default();
    let options = WebhookOptions::new(WebhookScheme::standard(SECRET).unwrap()).with_observer(counts.clone());
    let receiver = WebhookReceiver::new("standard", options, processor).unwrap();
    let router = Router::new().route(PATH, receiver.route());
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });

    let next = Arc::new(AtomicUsize::new(0));
    let mut senders = tokio::task::JoinSet::new();
    for _ in 0..SENDERS {
        let next = next.clone();
        senders.spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::SeqCst);
                if number >= EVENTS {
                    return;
                }
                // Three in ten are sent twice, at the same time; one in ten is hung up on.
                let first = send_until_done(number, address, number % 10 == 9);
                if number % 10 < 3 {
                    tokio::join!(first, send_until_done(number, address, false));
                } else {
                    first.await;
                }
            }
        });
    }
    // Meanwhile the database cuts every connection of the receiver, again and again.
    let mut cuts: i64 = 0;
    while !senders.is_empty() {
        let cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                   WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'";
        cuts += sqlx::query_scalar::<_, i64>(cut).fetch_one(&mut operator).await.unwrap();
        let pause = tokio::time::sleep(Duration::from_millis(500));
        tokio::pin!(pause);
        loop {
            tokio::select! {
                () = &mut pause => break,
                Some(ended) = senders.join_next() => ended.unwrap(),
                else => break,
            }
        }
    }
    assert!(receiver.drain(TIMEOUT).await);

    let ledger = "SELECT count(*), count(DISTINCT event), coalesce(max(event), 0) FROM ledger";
    let ledger: (i64, i64, i32) = sqlx::query_as(ledger).fetch_one(&mut operator).await.unwrap();
    assert_eq!(ledger, (EVENTS as i64, EVENTS as i64, EVENTS as i32 - 1));
    let duplicates = counts.get(InboxEventKind::Duplicate) + counts.get(InboxEventKind::InFlight);
    assert!(duplicates >= 300, "{duplicates} duplicates");
    assert!(cuts > 0, "no connection was cut");
}
