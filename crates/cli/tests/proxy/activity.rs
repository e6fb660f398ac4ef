//! The live feed of requests, and the summary.

use oncegate_testkit::until;
use serde_json::{Value, json};

use crate::support::{Service, Sidecar, Wire, request};
use crate::{KEY, OK};

/// The next line of a feed.
struct Feed {
    wire: Wire,
    lines: Vec<u8>,
}

impl Feed {
    async fn open(sidecar: &Sidecar) -> Self {
        // A small window, so that little fits between the sidecar and a reader that does not read.
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        let mut wire = Wire::new(socket.connect(sidecar.admin).await.unwrap());
        wire.send("GET /v1/activity HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
        let head = wire.head().await;
        assert_eq!((head.status(), head.get("content-type")), (200, Some("application/x-ndjson")));
        let mut feed = Self { wire, lines: Vec::new() };
        assert_eq!(feed.line().await["lost"], 0);
        feed
    }

    async fn line(&mut self) -> Value {
        loop {
            if let Some(end) = self.lines.iter().position(|byte| *byte == b'\n') {
                let line: Vec<_> = self.lines.drain(..=end).collect();
                return serde_json::from_slice(&line).unwrap();
            }
            self.lines.extend(self.wire.chunk().await.0);
        }
    }

    /// The next line about a request.
    async fn request(&mut self) -> Value {
        loop {
            let line = self.line().await;
            if line.get("outcome").is_some() {
                return line;
            }
        }
    }
}

/// The status of a request for the feed, of which nothing more is read.
async fn asked(sidecar: &Sidecar) -> u16 {
    let mut wire = Wire::connect(sidecar.admin).await;
    wire.send("GET /v1/activity HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    wire.head().await.status()
}

async fn summary(sidecar: &Sidecar) -> Value {
    crate::operations::admin(sidecar, "/v1/summary").await.has_status(200).json()
}

#[tokio::test]
async fn the_feed_shows_each_request_with_a_key_and_the_summary_counts_it() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &[]).await;
    let mut feed = Feed::open(&sidecar).await;
    for body in ["{}", "{}", "{\"other\":1}"] {
        sidecar.ask(&request("POST", "/orders", &[KEY], body)).await;
    }
    sidecar.ask(&request("POST", "/orders", &["Idempotency-Key: \"\""], "{}")).await;
    sidecar.ask(&request("GET", "/orders", &[], "")).await;
    let mut records = Vec::new();
    for (outcome, status) in [("executed", 200), ("replayed", 200), ("key-reused", 422), ("key-invalid", 400)]
    {
        let line = feed.request().await;
        assert_eq!((&line["outcome"], &line["status"]), (&json!(outcome), &json!(status)), "{line}");
        assert_eq!(line["operation"], "POST /orders");
        assert!(line["duration_ms"].is_f64() && line["time"].is_string(), "{line}");
        records.push(line["record"].clone());
    }
    assert_eq!(records[0].as_str().map(str::len), Some(64));
    assert!(records[0] == records[1] && records[1] == records[2] && records[3].is_null(), "{records:?}");

    let summary = summary(&sidecar).await;
    assert_eq!((&summary["ready"], &summary["store"]["degraded"]), (&json!(true), &json!(false)));
    let outcomes = json!({"executed": 1, "key-invalid": 1, "key-reused": 1, "not-covered": 1, "replayed": 1});
    assert_eq!(summary["requests"]["outcomes"], outcomes);
    let minutes = summary["last_hour"].as_array().unwrap();
    assert_eq!(minutes.len(), 60);
    let of =
        |name: &str| minutes.iter().map(|minute| minute["requests"][name].as_u64().unwrap()).sum::<u64>();
    assert_eq!(
        [of("executed"), of("replayed"), of("mismatch"), of("unprotected")],
        [1, 1, 1, 1],
        "{minutes:?}"
    );
}

#[tokio::test]
async fn a_reader_that_reads_nothing_stops_no_request_and_gets_the_number_of_lost_ones() {
    // More than the queue, the buffers of the sidecar and those of the kernel (4 MiB) hold.
    const REQUESTS: u64 = 14_000;
    const BATCH: u64 = 50;
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &[]).await;
    let mut feed = Feed::open(&sidecar).await;
    let one = request("POST", &format!("/{}", "x".repeat(240)), &[KEY], "{}");
    let mut wire = sidecar.connect().await;
    for _ in 0..REQUESTS / BATCH {
        wire.send(one.repeat(BATCH as usize)).await;
        for _ in 0..BATCH {
            wire.message().await.has_status(200);
        }
    }
    let (mut seen, mut lost) = (0, 0);
    while seen + lost < REQUESTS {
        let line = feed.line().await;
        match line["outcome"].as_str() {
            Some(_) => seen += 1,
            None => lost += line["lost"].as_u64().unwrap(),
        }
    }
    assert_eq!(seen + lost, REQUESTS);
    assert!(lost > 0);
}

#[tokio::test]
async fn feeds_are_bounded_and_end_when_the_sidecar_stops() {
    let service = Service::new().await.answers(OK);
    let mut sidecar = Sidecar::start(service.address, &[]).await;
    let mut feeds = Vec::new();
    for _ in 0..16 {
        feeds.push(Feed::open(&sidecar).await);
    }
    assert_eq!(asked(&sidecar).await, 503);
    drop(feeds.pop());
    until("the place of the reader that left is free", async || asked(&sidecar).await == 200).await;
    sidecar.process.signal(rustix::process::Signal::TERM);
    assert!(sidecar.process.ended().await.success());
    for feed in &mut feeds {
        // The last chunk, not a connection that broke.
        assert_eq!(feed.wire.chunk().await.0, b"");
    }
}

#[tokio::test]
async fn a_record_has_its_events_and_misuse_is_counted_by_operation() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &["--require-key=true"]).await;
    let mut feed = Feed::open(&sidecar).await;
    for body in ["{}", "{}", "{\"other\":1}"] {
        sidecar.ask(&request("POST", "/orders", &[KEY], body)).await;
    }
    sidecar.ask(&request("POST", "/other", &[], "{}")).await.is_problem(400, "key-missing");
    let record = feed.request().await["record"].as_str().unwrap().to_owned();
    let path = format!("/v1/keys/{record}/timeline");
    let timeline = crate::operations::admin(&sidecar, &path).await.has_status(200).json();
    let events: Vec<_> =
        timeline["events"].as_array().unwrap().iter().map(|event| event["event"].clone()).collect();
    assert_eq!(events, ["executing", "executed", "completed"], "{timeline}");
    let counts: Vec<_> = timeline["repeats"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["kind"].clone(), one["count"].clone()))
        .collect();
    assert_eq!(counts, [(json!("replayed"), json!(1)), (json!("mismatch"), json!(1))], "{timeline}");

    let misuse = crate::operations::admin(&sidecar, "/v1/misuse").await.has_status(200).json();
    let rows = misuse["misuse"].as_array().unwrap();
    assert_eq!(rows.len(), 2, "{misuse}");
    for (operation, counts) in
        [("POST /orders", json!({"mismatch": 1})), ("POST /other", json!({"key-missing": 1}))]
    {
        let row = rows.iter().find(|row| row["operation"] == operation).unwrap();
        assert_eq!(row["counts"], counts, "{misuse}");
    }
}
