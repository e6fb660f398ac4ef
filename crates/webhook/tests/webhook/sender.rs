//! A sender of webhooks in the format of Standard Webhooks, over sockets of its own.

use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Nothing here takes so long.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// One sending of a webhook.
#[derive(Clone, Debug)]
pub(crate) struct Sending {
    pub(crate) method: &'static str,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) payload: Vec<u8>,
}

impl Sending {
    /// Signed as Standard Webhooks has it, at that second.
    pub(crate) fn standard(id: &str, at: u64, payload: impl Into<Vec<u8>>) -> Self {
        let payload = payload.into();
        let secret = STANDARD.decode(SECRET.trim_start_matches("whsec_")).unwrap();
        let mut mac = Hmac::<Sha256>::new_from_slice(&secret).unwrap();
        mac.update(format!("{id}.{at}.").as_bytes());
        mac.update(&payload);
        let signature = format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()));
        Self::of(
            &[("webhook-id", id), ("webhook-timestamp", &at.to_string()), ("webhook-signature", &signature)],
            payload,
        )
    }

    pub(crate) fn of(headers: &[(&str, &str)], payload: impl Into<Vec<u8>>) -> Self {
        let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Self { method: "POST", headers, payload: payload.into() }
    }

    pub(crate) fn with(mut self, name: &str, value: &str) -> Self {
        self = self.without(name);
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(n, _)| n != name);
        self
    }

    pub(crate) fn head(&self, path: &str, length: usize) -> String {
        let mut head = format!("{} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n", self.method);
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str(&format!("content-length: {length}\r\n\r\n"));
        head
    }

    /// Sends it, and does not wait for a response.
    pub(crate) async fn begin(&self, to: SocketAddr, path: &str) -> TcpStream {
        let mut stream = TcpStream::connect(to).await.unwrap();
        stream.write_all(self.head(path, self.payload.len()).as_bytes()).await.unwrap();
        // The other side may have refused it by now.
        let _sent = stream.write_all(&self.payload).await;
        stream
    }

    /// Sends it and reads the response; `None` if the connection ended without one.
    pub(crate) async fn send(&self, to: SocketAddr, path: &str) -> Option<Response> {
        Response::read(self.begin(to, path).await).await
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Response {
    pub(crate) async fn read(mut stream: TcpStream) -> Option<Self> {
        let mut bytes = Vec::new();
        // A reset behind a whole response does not take it away.
        let end = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut bytes)).await;
        let _end = end.expect("a response in time");
        let text = String::from_utf8(bytes).unwrap();
        let (head, body) = text.split_once("\r\n\r\n")?;
        let mut lines = head.lines();
        let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
        let headers = lines.filter_map(|line| line.split_once(": "));
        let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        Some(Self { status, headers, body: body.to_owned() })
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn problem(&self) -> &str {
        let (_, rest) = self.body.split_once("urn:oncegate:problem:").expect("a problem");
        rest.split('"').next().unwrap()
    }
}

/// The second of the wall clock.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}
