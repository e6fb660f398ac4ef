//! Connections over pipes in memory, on a clock that stands still while there is something to do.

use std::net::Ipv4Addr;

use axum::Router;
use axum::routing::{get, post};
use futures_util::stream;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use super::*;
use crate::admin::serve_connection;

/// The bytes that fit between the sidecar and a client that does not read.
const PIPE: usize = 1024;

fn router() -> Router {
    let endless = || stream::repeat_with(|| Ok::<_, std::io::Error>(Bytes::from_static(&[b'x'; 512])));
    Router::new()
        .route("/livez", get(async || "ok"))
        .route("/large", get(async || vec![b'x'; 100 * PIPE]))
        .route("/v1/activity", get(async move || Body::from_stream(endless())))
        .route("/slow", get(async || tokio::time::sleep(Duration::from_secs(3600)).await))
        .route("/login", get(async || tokio::time::sleep(Duration::from_secs(3600)).await))
        .route("/read", post(async |body: Bytes| format!("{} bytes", body.len())))
}

/// The sidecar, with the connections that it accepts.
#[derive(Default)]
struct World {
    connections: AdminConnections,
    graceful: GracefulShutdown,
}

impl World {
    /// A connection of the client with this number; `None` if it was not admitted.
    fn connect(&self, client: u32) -> Option<DuplexStream> {
        let address = IpAddr::V4(Ipv4Addr::from_bits(client));
        let connection = self.connections.admit(address)?;
        let (near, far) = tokio::io::duplex(PIPE);
        let watcher = self.graceful.watcher();
        tokio::spawn(serve_connection(
            far,
            address,
            connection,
            (router(), Handle::current(), Arc::new(Semaphore::new(8))),
            watcher,
        ));
        Some(near)
    }

    /// A connection that has sent this text.
    async fn sent(&self, client: u32, text: &str) -> DuplexStream {
        let mut pipe = self.connect(client).expect("a place");
        pipe.write_all(text.as_bytes()).await.unwrap();
        pipe
    }

    fn open(&self) -> usize {
        self.connections.lock().entries.len()
    }

    /// Waits until so many requests are executed or answered.
    async fn has_requests(&self, count: usize) {
        oncegate_testkit::until(format!("there are {count} requests"), async || {
            let table = self.connections.lock();
            table.entries.values().filter(|entry| !matches!(entry.phase, Phase::Head(_))).count() == count
        })
        .await;
    }
}

fn get_of(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")
}

/// The status of the next response on a connection, which is read as a whole; `None` if the connection ends before it.
async fn status(pipe: &mut DuplexStream) -> Option<u16> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(pipe.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).unwrap();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap_or("0");
    pipe.read_exact(&mut vec![0; length.parse().unwrap()]).await.ok()?;
    head.split(' ').nth(1)?.parse().ok()
}

async fn rest(pipe: &mut DuplexStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _reset = pipe.read_to_end(&mut bytes).await;
    bytes
}

/// Asserts that the connection ends this long after `since`.
async fn ends_after(pipe: &mut DuplexStream, since: Instant, limit: Duration) {
    // Its bytes stay in the pipe, so its end shows when a write fails.
    while pipe.write_all(b"").await.is_ok() && pipe.write_all(b" ").await.is_ok() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let took = since.elapsed();
    assert!(took >= limit && took <= limit + CHECK_INTERVAL * 2, "{took:?} instead of {limit:?}");
}

#[tokio::test(start_paused = true)]
async fn a_head_that_does_not_come_ends_the_connection_also_byte_by_byte_and_after_a_request() {
    let world = World::default();
    for begun in ["", "GET /livez HT"] {
        let since = Instant::now();
        let mut pipe = world.sent(1, begun).await;
        assert_eq!(rest(&mut pipe).await, b"");
        let took = since.elapsed();
        assert!(took >= HEAD_TIMEOUT && took <= HEAD_TIMEOUT + CHECK_INTERVAL, "{begun:?} {took:?}");
    }
    let since = Instant::now();
    let mut slow = world.sent(1, "GET /livez HTTP/1.1\r\nX: ").await;
    ends_after(&mut slow, since, HEAD_TIMEOUT).await;

    let mut used = world.sent(1, &get_of("/livez")).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    used.write_all(get_of("/livez").as_bytes()).await.unwrap();
    let since = Instant::now();
    let text = String::from_utf8(rest(&mut used).await).unwrap();
    assert_eq!(text.matches("HTTP/1.1 200 OK").count(), 2, "{text}");
    assert!(since.elapsed() >= HEAD_TIMEOUT, "{:?}", since.elapsed());
    assert_eq!(world.open(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_response_that_is_not_read_ends_and_one_that_is_read_slowly_does_not() {
    let world = World::default();
    for (path, limit) in [("/large", WRITE_TIMEOUT), ("/v1/activity", STREAM_TIMEOUT)] {
        let since = Instant::now();
        let mut pipe = world.sent(1, &get_of(path)).await;
        ends_after(&mut pipe, since, limit).await;
    }
    // Two hundred reads, one every three seconds.
    let mut slow = world.sent(1, &get_of("/large")).await;
    let mut read = 0;
    let mut part = [0; PIPE / 2];
    while read < 100 * PIPE {
        tokio::time::sleep(Duration::from_secs(3)).await;
        let count = slow.read(&mut part).await.unwrap();
        assert!(count > 0, "it ended after {read} bytes");
        read += count;
    }
    drop(slow);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_come_ends_the_connection_and_an_execution_that_lasts_does_not() {
    let world = World::default();
    let since = Instant::now();
    let text = "POST /read HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n";
    let mut pipe = world.sent(1, text).await;
    // It comes byte by byte.
    ends_after(&mut pipe, since, BODY_TIMEOUT).await;

    let mut slow = world.sent(1, &get_of("/slow")).await;
    assert_eq!(status(&mut slow).await, Some(200));
    assert!(since.elapsed() > Duration::from_secs(3600));
}

#[tokio::test(start_paused = true)]
async fn a_new_connection_takes_the_place_of_the_oldest_one_that_waits_of_the_client_with_the_most() {
    let world = World::default();
    // Another client, which was first.
    let mut other = world.connect(2).unwrap();
    let mut pipes = Vec::new();
    for _ in 0..MAX_CONNECTIONS_PER_CLIENT {
        pipes.push(world.connect(1).unwrap());
        tokio::time::advance(Duration::from_millis(1)).await;
    }
    let mut new = world.sent(1, &get_of("/livez")).await;
    assert_eq!(status(&mut new).await, Some(200));
    assert_eq!(rest(&mut pipes[0]).await, b"");
    assert_eq!(world.open(), 1 + MAX_CONNECTIONS_PER_CLIENT);
    pipes[1].write_all(get_of("/livez").as_bytes()).await.unwrap();
    assert_eq!(status(&mut pipes[1]).await, Some(200));
    other.write_all(get_of("/livez").as_bytes()).await.unwrap();
    assert_eq!(status(&mut other).await, Some(200));

    // All places are taken, by many clients.
    for client in 3.. {
        if world.open() == MAX_CONNECTIONS {
            break;
        }
        pipes.push(world.connect(client).unwrap());
    }
    let mut newest = world.sent(1000, &get_of("/livez")).await;
    assert_eq!(status(&mut newest).await, Some(200));
    assert_eq!(rest(&mut pipes[2]).await, b"", "the oldest one of client 1");
    assert_eq!(world.open(), MAX_CONNECTIONS);
}

#[tokio::test(start_paused = true)]
async fn requests_that_execute_stay_and_those_whose_clients_do_not_read_give_way() {
    let world = World::default();
    let [per_client, all] = [Pool::Requests.max_per_client(), Pool::Requests.max()];
    let mut slow = Vec::new();
    for _ in 0..per_client {
        slow.push(world.sent(1, &get_of("/slow")).await);
    }
    world.has_requests(per_client).await;
    // No more of this client, and still of another one.
    let mut refused = world.sent(1, &get_of("/slow")).await;
    let since = Instant::now();
    assert_eq!(status(&mut refused).await, Some(503));
    while since.elapsed() < HEAD_TIMEOUT * 2 {
        tokio::time::sleep(HEAD_TIMEOUT / 2).await;
        // The rest of the response before it comes first.
        refused.write_all(get_of("/slow").as_bytes()).await.unwrap();
        assert_eq!(status(&mut refused).await, Some(503), "a connection that is used stays");
    }
    drop(refused);
    let mut unread = Vec::new();
    for _ in per_client..all {
        unread.push(world.sent(2, &get_of("/large")).await);
    }
    world.has_requests(all).await;
    let mut third = world.sent(3, &get_of("/read")).await;
    assert_eq!(status(&mut third).await, Some(503));
    // After a second it is certain enough that client 2 does not read.
    tokio::time::sleep(STALL).await;
    let mut third = world.sent(3, "POST /read HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nab").await;
    assert_eq!(status(&mut third).await, Some(200));
    assert_eq!(world.connections.lock().count(network_of([0, 0, 0, 1].into()), |_, _| true).1, per_client);
    // A login has places of its own, and health needs none.
    let mut logins = Vec::new();
    for _ in 0..Pool::Logins.max_per_client() {
        logins.push(world.sent(1, &get_of("/login")).await);
    }
    let mut refused = world.sent(1, &get_of("/login")).await;
    assert_eq!(status(&mut refused).await, Some(503));
    for _ in 0..MAX_CONNECTIONS * 2 {
        let mut health = world.sent(1, &get_of("/livez")).await;
        assert_eq!(status(&mut health).await, Some(200));
        slow.push(health);
    }
}

#[test]
fn the_limits_of_requests_leave_places_for_connections_that_may_be_closed() {
    let pools = [Pool::Logins, Pool::Requests];
    assert!(pools.iter().map(|pool| pool.max()).sum::<usize>() < MAX_CONNECTIONS);
    assert!(pools.iter().map(|pool| pool.max_per_client()).sum::<usize>() < MAX_CONNECTIONS_PER_CLIENT);
}

/// A client needs no token for it, and its requests wait in the socket.
#[tokio::test(start_paused = true)]
async fn health_checks_that_are_sent_in_a_row_wait_and_do_not_delay_those_of_others() {
    let world = World::default();
    let since = Instant::now();
    let (burst, more) = (HEALTH_BURST, 100);
    let mut flood = world.connect(1).unwrap();
    let (mut reads, mut writes) = tokio::io::split(&mut flood);
    let send = async {
        let all = get_of("/livez").repeat((burst + more) as usize);
        writes.write_all(all.as_bytes()).await.unwrap();
    };
    let read = async {
        let mut times = Vec::new();
        for _ in 0..burst + more {
            // Each response ends with the same two bytes, and has no others like them.
            let mut last = [0; 6];
            while !last.ends_with(b"\r\n\r\nok") {
                last.rotate_left(1);
                last[5] = reads.read_u8().await.unwrap();
            }
            times.push(since.elapsed());
        }
        times
    };
    let other = async {
        for second in 1..3 {
            tokio::time::sleep_until(since + Duration::from_secs(second)).await;
            let mut pipe = world.sent(2, &get_of("/livez")).await;
            assert_eq!(status(&mut pipe).await, Some(200));
            assert_eq!(since.elapsed(), Duration::from_secs(second), "it waited");
        }
    };
    let ((), times, ()) = tokio::join!(send, read, other);
    assert_eq!(times[burst as usize - 1], Duration::ZERO, "an orchestrator waits");
    let last = times.last().unwrap();
    let least = HEALTH_INTERVAL * (more - 1);
    assert!(*last >= least && *last < least + Duration::from_secs(1), "{last:?}");
    // After a pause, the next ones are answered at once.
    tokio::time::sleep(Duration::from_secs(9)).await;
    let since = Instant::now();
    for _ in 0..burst {
        flood.write_all(get_of("/livez").as_bytes()).await.unwrap();
        assert_eq!(status(&mut flood).await, Some(200));
    }
    assert_eq!(since.elapsed(), Duration::ZERO);
}

/// Otherwise the connection of an orchestrator, which has no request yet, would be closed for the next one that floods.
#[tokio::test(start_paused = true)]
async fn a_client_that_floods_with_health_checks_loses_its_place_before_one_that_just_connects() {
    let world = World::default();
    let mut floods = Vec::new();
    for _ in 0..MAX_CONNECTIONS_PER_CLIENT - 1 {
        let mut flood = world.connect(1).unwrap();
        for _ in 0..HEALTH_BURST {
            flood.write_all(get_of("/livez").as_bytes()).await.unwrap();
            assert_eq!(status(&mut flood).await, Some(200));
        }
        flood.write_all(get_of("/livez").as_bytes()).await.unwrap();
        floods.push(flood);
    }
    // No time passes.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    let mut orchestrator = world.connect(1).unwrap();
    for _ in 0..5 {
        floods.push(world.connect(1).unwrap());
    }
    orchestrator.write_all(get_of("/livez").as_bytes()).await.unwrap();
    assert_eq!(status(&mut orchestrator).await, Some(200), "it was closed");
}
