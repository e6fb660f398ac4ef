//! Idle connections of clients: how long they are kept, and requests that arrive at the moment of their end.

use std::time::{Duration, Instant};

use tokio::net::TcpStream;

use crate::OK;
use crate::support::{Service, Sidecar, Wire, request};

fn post(key: &str) -> String {
    request("POST", "/orders", &[&format!("Idempotency-Key: {key}")], "{}")
}

#[tokio::test]
async fn an_idle_connection_is_kept_for_the_configured_time() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &["--client-idle-timeout=1s"]).await;
    let mut used = sidecar.connect().await;
    used.send(post("1")).await;
    used.message().await.has_status(200);
    let mut unused = sidecar.connect().await;
    let since = Instant::now();
    used.ends().await;
    let took = since.elapsed();
    assert!(took >= Duration::from_millis(900) && took < Duration::from_secs(20), "{took:?}");
    unused.ends().await;
    // A head that begins and does not end counts as idle, too.
    let mut slow = sidecar.connect().await;
    slow.send("POST /orders HTTP/1.1\r\nHost: a").await;
    slow.rest().await;
}

#[tokio::test]
async fn with_the_default_a_connection_outlives_the_60_seconds_of_load_balancers() {
    // Of the settings, not of the clock: a test of a minute would be too slow.
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
    let output = command.args(["explain", "POST /orders", "--to=http://127.0.0.1:9"]).output().await.unwrap();
    assert!(output.status.success());
    let mut help = tokio::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
    let help = help.args(["proxy", "--help"]).output().await.unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let at = help.find("--client-idle-timeout").unwrap();
    assert!(help[at..].contains("[default: 75s]"), "{}", &help[at..at + 900]);
}

/// A request that is sent while the sidecar closes its connection is answered, or it was not executed: its sender may send it
/// again.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_at_the_end_of_an_idle_connection_is_answered_or_not_executed() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &["--client-idle-timeout=1s", "--store=memory:"]).await;
    let mut tasks = Vec::new();
    for number in 0..200_u64 {
        let address = sidecar.address;
        tasks.push(tokio::spawn(async move {
            let mut wire = Wire::new(TcpStream::connect(address).await.unwrap());
            wire.send(post(&format!("first-{number}"))).await;
            wire.message().await.has_status(200);
            // Around the end of its time, which is looked at four times a second.
            tokio::time::sleep(Duration::from_millis(950 + number * 2)).await;
            let sent = wire.try_send(post(&format!("second-{number}"))).await;
            match (sent, wire.try_head().await) {
                (Ok(()), Some(head)) => {
                    wire.body(head).await.has_status(200);
                    true
                }
                _ => false,
            }
        }));
    }
    let mut answered = 0;
    for task in tasks {
        answered += usize::from(task.await.unwrap());
    }
    assert_eq!(service.requests(), 200 + answered, "a request without a response was executed");
    assert!((1..200).contains(&answered), "no request met the end of its connection: {answered}");
}
