//! Servers that send interim responses (1xx) without end instead of a response, to everything that sends requests.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use oncegate_testkit::until;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::process::Command;

use crate::protocols::Authority;
use crate::support::{Process, Service, Sidecar, Stream, Wire, request, sidecar, within};
use crate::{KEY, OK};

const INTERIM: &str = "HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n";

/// The most bytes that may leave the server for one request: the limit of interim responses, where one of these counts several
/// times its size, and what sockets hold. Without a limit, it is this much in a part of a second.
const MOST: u64 = 24 * 1024 * 1024;

/// The bytes that a server has sent, and its connections that have ended.
#[derive(Clone, Default)]
struct Sent(Arc<[AtomicU64; 3]>);

impl Sent {
    fn bytes(&self) -> u64 {
        self.0[0].load(Ordering::SeqCst)
    }

    fn begun(&self) -> u64 {
        self.0[1].load(Ordering::SeqCst)
    }

    fn ended(&self) -> u64 {
        self.0[2].load(Ordering::SeqCst)
    }

    /// Asserts that the server was asked, and that each request has cost a bounded number of bytes.
    async fn is_bounded(&self, what: &str) {
        until(format!("the floods end: {what}"), async || self.begun() > 0 && self.ended() == self.begun())
            .await;
        let (bytes, requests) = (self.bytes(), self.begun());
        assert!(bytes <= requests * MOST, "{what}: {bytes} bytes for {requests} requests");
    }

    async fn flood(&self, mut stream: impl Stream, chunk: &[u8]) {
        self.0[1].fetch_add(1, Ordering::SeqCst);
        while stream.write_all(chunk).await.is_ok() {
            self.0[0].fetch_add(chunk.len() as u64, Ordering::SeqCst);
        }
        self.0[2].fetch_add(1, Ordering::SeqCst);
    }

    /// Reads a request, and never ends its interim responses.
    async fn http1(&self, mut stream: impl Stream) {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => head.push(byte),
                Err(_) => return,
            }
        }
        self.flood(stream, INTERIM.repeat(1000).as_bytes()).await;
    }

    /// The same with HTTP/2.
    async fn http2(&self, mut stream: impl Stream) {
        let settings = [[0, 0, 0, 4, 0, 0, 0, 0, 0], [0, 0, 0, 4, 1, 0, 0, 0, 0]].concat();
        stream.write_all(&settings).await.unwrap();
        let mut preface = [0; 24];
        stream.read_exact(&mut preface).await.unwrap();
        let id = loop {
            let mut head = [0; 9];
            stream.read_exact(&mut head).await.unwrap();
            let len = usize::from(head[1]) << 8 | usize::from(head[2]);
            stream.read_exact(&mut vec![0; len]).await.unwrap();
            if head[3] == 1 {
                break head[8];
            }
        };
        // HEADERS with END_HEADERS: `:status` (8 in the static table) is 103.
        let head = [0, 0, 5, 1, 4, 0, 0, 0, id, 8, 3, b'1', b'0', b'3'];
        self.flood(stream, &head.repeat(1000)).await;
    }
}

/// A server in the clear, for HTTP/1.1.
async fn server() -> (SocketAddr, Sent) {
    let (listener, sent) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), Sent::default());
    let (address, counting) = (listener.local_addr().unwrap(), sent.clone());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let sent = counting.clone();
            tokio::spawn(async move { sent.http1(stream).await });
        }
    });
    (address, sent)
}

#[derive(Clone, Copy, Debug)]
enum Spoken {
    Http2,
    TlsHttp1,
    TlsHttp2,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_with_tls_or_http_2_cannot_send_interim_responses_without_end() {
    for spoken in [Spoken::TlsHttp1, Spoken::TlsHttp2, Spoken::Http2] {
        let authority = Authority::new();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (sent, protocols) = (
            Sent::default(),
            match spoken {
                Spoken::TlsHttp1 => [b"http/1.1".as_slice()],
                _ => [b"h2".as_slice()],
            },
        );
        let (counting, tls) = (sent.clone(), authority.server(&protocols));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (sent, tls) = (counting.clone(), tls.clone());
                tokio::spawn(async move {
                    match spoken {
                        Spoken::Http2 => sent.http2(stream).await,
                        Spoken::TlsHttp1 => sent.http1(tls.accept(stream).await.unwrap()).await,
                        Spoken::TlsHttp2 => sent.http2(tls.accept(stream).await.unwrap()).await,
                    }
                });
            }
        });
        let (to, flag) = match spoken {
            Spoken::Http2 => (format!("http://127.0.0.1:{port}"), "--upstream-protocol=http2"),
            _ => (format!("https://localhost:{port}"), "--upstream-protocol=auto"),
        };
        let mut command = sidecar(&to);
        // No limit of time ends these requests.
        command.args(["--store=memory:", "--threads=1", "--upstream-timeout=1h", flag]);
        let sidecar = Sidecar::run(command.env("SSL_CERT_FILE", authority.file("ca.pem"))).await;
        for (fields, slug) in [(&[][..], "upstream-unanswered"), (&[KEY], "outcome-unknown")] {
            let mut client = sidecar.connect().await;
            client.send(request("POST", "/pay", fields, "{}")).await;
            client.message().await.is_problem(502, slug);
        }
        sent.is_bounded(&format!("{spoken:?}")).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answer_if_a_caller_may_get_a_replay_is_bounded() {
    let service = Service::new().await;
    let sent = Sent::default();
    let flags = ["--threads=1", "--scope=single-tenant", "--authorize=/may-see", "--authorize-timeout=30s"];
    let mut sidecar = Sidecar::start(service.address, &flags).await;
    let counting = sent.clone();
    let listener = service.into_listener();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut executes = Wire::new(stream);
        executes.message().await;
        executes.send(OK).await;
        let (stream, _) = listener.accept().await.unwrap();
        counting.http1(stream).await;
    });
    sidecar.ask(&request("POST", "/pay", &[KEY], "{}")).await.has_status(200);
    sidecar.ask(&request("POST", "/pay", &[KEY], "{}")).await.is_problem(503, "authorization-unavailable");
    sidecar.process.logs("without end").await;
    sent.is_bounded("authorize").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answer_about_an_abandoned_attempt_is_bounded() {
    let (directory, service) = (tempfile::tempdir().unwrap(), Service::new().await);
    let store = format!("--store={}", directory.path().display());
    let flags = [
        &*store,
        "--on-abandoned=reconcile",
        "--reconcile-path=/outcome",
        "--reconcile-timeout=2s",
        "--lease=1s",
    ];
    let mut first = Sidecar::start(service.address, &flags).await;
    let mut client = first.connect().await;
    client.send(request("POST", "/pay", &[KEY], "{}")).await;
    let mut wire = service.accept().await;
    wire.message().await;
    first.process.kill().await;
    let (flooding, sent) = server().await;
    let mut second = Sidecar::start(flooding, &flags).await;
    until("the lease of the first attempt is over", async || {
        let response = second.ask(&request("POST", "/pay", &[KEY], "{}")).await;
        response.status() != 409 && !response.is_problem(500, "outcome-unknown").is_replay()
    })
    .await;
    second.process.logs("without end").await;
    sent.is_bounded("reconcile").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_of_traces_cannot_send_interim_responses_without_end() {
    let (collector, sent) = server().await;
    let service = Service::new().await.answers(OK);
    let flag = format!("--otlp-endpoint=http://{collector}");
    let mut sidecar = Sidecar::start(service.address, &[&flag]).await;
    sidecar.ask(&request("GET", "/", &[], "")).await.has_status(200);
    sidecar.process.logs("the collector did not take traces or metrics").await;
    sidecar.process.logs("without end").await;
    sidecar.process.kill().await;
    sent.is_bounded("traces").await;
}

/// Commands that send requests, and the text of their failure.
#[tokio::test(flavor = "multi_thread")]
async fn commands_that_ask_such_a_server_end() {
    let store = tempfile::tempdir().unwrap();
    let store = format!("--store={}", store.path().join("store").display());
    for command in ["call", "keys", "health", "top", "check", "key-set"] {
        let (server, sent) = server().await;
        let url = format!("http://{server}");
        let keys = format!("--jwt-keys={url}/keys");
        let admin = ["--admin", &url];
        let args: Vec<&str> = match command {
            "call" => vec!["call", "POST", &url, "--attempts=1", "--max-time=60s", "--data={}"],
            "keys" => [&["keys", "list"][..], &admin].concat(),
            "health" => [&["health"][..], &admin].concat(),
            "top" => [&["top", "--once"][..], &admin].concat(),
            "check" => vec!["check", "--online", "--to", &url, &store],
            _ => vec!["check", "--online", "--to=http://127.0.0.1:1", &store, "--scope=jwt:sub", &keys],
        };
        let mut command_line = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command_line.args(&args).env_remove("ONCEGATE_JOURNAL").env("XDG_STATE_HOME", "/nowhere");
        let mut process = Process::start(&mut command_line);
        let status = process.ended().await;
        assert!(!status.success(), "{command}");
        let text = format!("{} {}", process.errors().await, process.output().await.join("\n"));
        assert!(text.contains("without end"), "{command}: {text}");
        sent.is_bounded(command).await;
    }
}

/// A service that may do this: several interim responses, then the response.
#[tokio::test]
async fn a_response_after_interim_responses_over_tls_is_passed_on() {
    let authority = Authority::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let tls = authority.server(&[b"http/1.1"]);
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut wire = Wire::new(tls.accept(stream).await.unwrap());
        // On one connection, more than the limit of one response.
        for _ in 0..20 {
            wire.message().await;
            wire.send(INTERIM.repeat(1000)).await;
            tokio::time::sleep(Duration::from_millis(1)).await;
            wire.send(OK).await;
        }
    });
    let mut command = sidecar(&format!("https://localhost:{port}"));
    command.args(["--store=memory:", "--threads=1"]).env("SSL_CERT_FILE", authority.file("ca.pem"));
    let sidecar = Sidecar::run(&mut command).await;
    let mut client = sidecar.connect().await;
    for _ in 0..20 {
        client.send(request("POST", "/pay", &[], "{}")).await;
        within("a response", client.message()).await.has_status(200);
    }
}
