//! The promises of the server about the flush of commits, which can change while it runs.

use std::time::Duration;

use oncegate_core::{Durability, Store as _};
use oncegate_postgres::{PostgresOptions, PostgresStore, schema};
use oncegate_servers::{PostgresOptions as ServerOptions, PostgresServer};
use oncegate_testkit::until;

/// Sets a setting of the server, and has it read its configuration again.
fn set(server: &PostgresServer, setting: &str) {
    server.sql(&format!("ALTER SYSTEM SET {setting}")).unwrap();
    server.sql("SELECT pg_reload_conf()").unwrap();
}

/// A store that reads the settings at this interval.
async fn open(server: &PostgresServer, every: Duration) -> PostgresStore {
    let timeout = Duration::from_secs(20);
    let options = PostgresOptions::from_url(&server.url()).unwrap();
    schema::apply(&options).await.unwrap();
    let options = options.with_connect_timeout(timeout).unwrap().with_command_timeout(timeout).unwrap();
    PostgresStore::open(options.with_inspect_interval(every).unwrap()).await.unwrap()
}

async fn becomes(store: &PostgresStore, durability: Durability, is_weakened: bool) {
    until("the store promises what the server does", async || {
        let names: Vec<_> = store.advisories().iter().map(|advisory| advisory.name).collect();
        store.capabilities().durability == durability && names == ["less-durable"][..usize::from(is_weakened)]
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_the_flush_shows_at_an_interval_and_with_a_check() {
    // Other servers of the tests do not flush.
    let server = tokio::task::spawn_blocking(|| {
        let mut options = ServerOptions::default();
        options.fsync = true;
        PostgresServer::start_with(options).unwrap()
    });
    let server = server.await.unwrap();
    let store = open(&server, Duration::from_millis(50)).await;
    becomes(&store, Durability::Synced, false).await;
    for _ in 0..2 {
        set(&server, "synchronous_commit = off");
        becomes(&store, Durability::Buffered, true).await;
        set(&server, "synchronous_commit = on");
        becomes(&store, Durability::Synced, false).await;
    }
    store.close().await;

    // Without the interval, a check reads them.
    set(&server, "synchronous_commit = off");
    let rarely = open(&server, Duration::from_secs(3600)).await;
    // It was so when the store was opened: it promises no less than it did.
    becomes(&rarely, Durability::Buffered, false).await;
    set(&server, "synchronous_commit = on");
    until("a check reads the settings", async || {
        rarely.check().await.unwrap();
        rarely.capabilities().durability == Durability::Synced
    })
    .await;
    set(&server, "synchronous_commit = off");
    until("a check reads the settings", async || {
        rarely.check().await.unwrap();
        rarely.capabilities().durability == Durability::Buffered
    })
    .await;
    becomes(&rarely, Durability::Buffered, true).await;
    rarely.close().await;
}
