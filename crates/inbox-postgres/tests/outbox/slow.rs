//! A proxy to the database on which what waits does not get through in one piece.

use std::net::SocketAddr;
use std::str::FromStr as _;
use std::time::Duration;

use oncegate_postgres::sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgSslMode};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

use crate::broker::Broker;
use crate::database::{Database, Running, message, relay};

/// A proxy to this port that returns a limited number of bytes per second.
async fn slow_proxy(to: u16, bytes: usize) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let far = TcpStream::connect(("127.0.0.1", to)).await.unwrap();
            let ((mut from_near, mut to_near), (mut from_far, mut to_far)) =
                (near.into_split(), far.into_split());
            tokio::spawn(async move { copy(&mut from_near, &mut to_far).await });
            tokio::spawn(async move {
                let mut piece = vec![0; bytes / 50];
                while let Ok(1..) = from_far.read_exact(&mut piece[..1]).await {
                    let more = from_far.read(&mut piece[1..]).await.unwrap_or_default();
                    if to_near.write_all(&piece[..=more]).await.is_err() {
                        return;
                    }
                    sleep(Duration::from_secs(1).mul_f64((more + 1) as f64 / bytes as f64)).await;
                }
            });
        }
    });
    address
}

/// A relay that gets a limited number of bytes per second, and publishes the first message in the end.
async fn publishes(payloads: usize, bytes: usize, lease: Duration) {
    let database = Database::with_schema().await;
    let large = |n| {
        let mut message = message(None, n);
        message.payload = vec![b'x'; bytes].into();
        message
    };
    database.send(&(0..payloads).map(large).collect::<Vec<_>>()).await;
    let proxy = slow_proxy(database.server.port(), 1 << 20).await;
    let options = PgConnectOptions::from_str(&database.url()).unwrap();
    let options = options.port(proxy.port()).ssl_mode(PgSslMode::Disable);
    let pool = PgPoolOptions::new().max_connections(2).connect_lazy_with(options);
    let broker = Broker::good();
    let relay = relay(pool, broker.clone()).with_max_bytes(24 << 20).with_lease(lease).unwrap();
    let relay = Running::start(relay);
    broker.holds(1).await;
    drop(relay);
}

/// The backlog after an outage does not fit into the timeout of one call.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_connection_gets_smaller_takes() {
    publishes(24, 1 << 20, Duration::from_secs(30)).await;
}

/// One message takes longer than a call may, and than the lease is.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_takes_longer_than_its_lease_is_published() {
    publishes(1, 18 << 20, Duration::from_secs(1)).await;
}
