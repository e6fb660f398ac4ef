//! An HTTP/1.1 service that answers each request by a script, byte by byte.

#![allow(dead_code, reason = "each test file uses its part")]

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_client::RetryPolicy;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// The response to one request.
#[derive(Clone)]
pub(crate) struct WireResponse {
    pub(crate) bytes: Vec<u8>,
    pub(crate) end: End,
}

/// The end of the connection after the bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// It is closed in order.
    Close,
    /// It is reset.
    Reset,
    /// It stays open, and nothing follows.
    Hang,
}

/// A received request.
#[derive(Clone, Debug)]
pub(crate) struct ReceivedRequest {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) key: Option<String>,
    pub(crate) body: Vec<u8>,
}

pub(crate) struct Hostile {
    pub(crate) address: SocketAddr,
    pub(crate) seen: Arc<Mutex<Vec<ReceivedRequest>>>,
    accepts: tokio::task::JoinHandle<()>,
}

impl Drop for Hostile {
    fn drop(&mut self) {
        self.accepts.abort();
    }
}

impl Hostile {
    /// Starts a service. The script gets the number of the request, from zero.
    pub(crate) async fn new(
        script: impl Fn(usize, &ReceivedRequest) -> WireResponse + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let script = Arc::new(script);
        let log = Arc::clone(&seen);
        let accepts = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (script, log) = (Arc::clone(&script), Arc::clone(&log));
                tokio::spawn(async move { serve(stream, &*script, &log).await });
            }
        });
        Self { address, seen, accepts }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn attempts(&self) -> usize {
        self.seen.lock().unwrap().len()
    }

    /// Takes the keys of the requests since the last call.
    pub(crate) fn take(&self) -> Vec<Option<String>> {
        self.seen.lock().unwrap().drain(..).map(|request| request.key).collect()
    }
}

async fn serve(
    mut stream: TcpStream,
    script: &(impl Fn(usize, &ReceivedRequest) -> WireResponse + Send + Sync),
    log: &Mutex<Vec<ReceivedRequest>>,
) {
    let Some(request) = read(&mut stream).await else { return };
    let number = {
        let mut log = log.lock().unwrap();
        log.push(request.clone());
        log.len() - 1
    };
    let response = script(number, &request);
    let _gone = stream.write_all(&response.bytes).await;
    match response.end {
        End::Close => {
            let _gone = stream.shutdown().await;
        }
        End::Reset => stream.set_zero_linger().unwrap(),
        End::Hang => std::future::pending().await,
    }
}

async fn read(stream: &mut TcpStream) -> Option<ReceivedRequest> {
    let mut bytes = Vec::new();
    let head = loop {
        if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break at + 4;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let text = String::from_utf8(bytes[..head].to_vec()).unwrap();
    let field = |name: &str| {
        let value = |line: &str| {
            let (field, value) = line.split_once(':')?;
            field.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
        };
        text.lines().find_map(value)
    };
    let chunked = field("transfer-encoding").is_some();
    let length: usize = field("content-length").map_or(0, |length| length.parse().unwrap());
    while bytes.len() < head + length || chunked && !bytes.ends_with(b"0\r\n\r\n") {
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
    let mut line = text.split_whitespace();
    Some(ReceivedRequest {
        method: line.next().unwrap().to_owned(),
        path: line.next().unwrap().to_owned(),
        key: field("idempotency-key"),
        body: bytes[head..].to_vec(),
    })
}

/// A response that ends its connection.
pub(crate) fn response(status: u16, fields: &str, body: &str) -> WireResponse {
    let length = body.len();
    let no_body = matches!(status, 204 | 304);
    let length = if no_body { String::new() } else { format!("content-length: {length}\r\n") };
    let body = if no_body { "" } else { body };
    let bytes = format!("HTTP/1.1 {status} Status\r\n{fields}{length}connection: close\r\n\r\n{body}");
    WireResponse { bytes: bytes.into_bytes(), end: End::Close }
}

/// A policy for tests in real time: short pauses, and timeouts for a busy machine.
pub(crate) fn quick() -> RetryPolicy {
    RetryPolicy::default()
        .with_backoff(Duration::from_millis(1), Duration::from_millis(5))
        .unwrap()
        .with_attempt_timeout(Duration::from_secs(60))
        .with_deadline(Duration::from_secs(120))
}
