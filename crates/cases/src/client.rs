//! A client that writes what it is told, octet by octet, and reads answers strictly.
//!
//! A library would refuse to send half of what these cases have to send, and would hide how an answer was framed.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::backend::Script;

/// How long anything is waited for. Far longer than everything takes, so that a case that fails has a reason.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A request, not yet sent.
#[derive(Clone)]
pub struct Request {
    /// The method.
    pub method: String,
    /// Path and query.
    pub target: String,
    /// The field lines after `Host`, in their order.
    pub fields: Vec<(Vec<u8>, Vec<u8>)>,
    payload: Payload,
    host: &'static str,
    /// What the backend does about it.
    pub script: Option<Script>,
}

#[derive(Clone)]
enum Payload {
    None,
    Whole(Bytes),
    Chunked(Vec<Bytes>),
}

impl Request {
    /// A request without a body.
    #[must_use]
    pub fn new(method: &str, target: &str) -> Self {
        Self {
            method: method.to_owned(),
            target: target.to_owned(),
            fields: Vec::new(),
            payload: Payload::None,
            host: "cases.test",
            script: None,
        }
    }

    /// A POST without a body.
    #[must_use]
    pub fn post(target: &str) -> Self {
        Self::new("POST", target)
    }

    /// With this field line `Host`.
    #[must_use]
    pub fn host(self, host: &'static str) -> Self {
        Self { host, ..self }
    }

    /// With this field line `Idempotency-Key`, as it is.
    #[must_use]
    pub fn key(self, value: impl AsRef<[u8]>) -> Self {
        self.field("Idempotency-Key", value)
    }

    /// With one more field line.
    #[must_use]
    pub fn field(mut self, name: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Self {
        self.fields.push((name.as_ref().to_vec(), value.as_ref().to_vec()));
        self
    }

    /// With this JSON text as its body.
    #[must_use]
    pub fn json(self, text: impl Into<String>) -> Self {
        self.body("application/json", text.into())
    }

    /// With this body, and `Content-Length`.
    #[must_use]
    pub fn body(mut self, content_type: &str, body: impl Into<Bytes>) -> Self {
        self.payload = Payload::Whole(body.into());
        self.retyped(content_type)
    }

    /// With this body and no `Content-Type`.
    #[must_use]
    pub fn untyped(mut self, body: impl Into<Bytes>) -> Self {
        self.payload = Payload::Whole(body.into());
        self
    }

    /// With this body, sent in these chunks.
    #[must_use]
    pub fn chunked(mut self, content_type: &str, chunks: Vec<Bytes>) -> Self {
        self.payload = Payload::Chunked(chunks);
        self.retyped(content_type)
    }

    fn retyped(self, content_type: &str) -> Self {
        self.drop_field("Content-Type").field("Content-Type", content_type)
    }

    /// Without the field lines of this name.
    #[must_use]
    pub fn drop_field(mut self, name: &str) -> Self {
        self.fields.retain(|(n, _)| !n.eq_ignore_ascii_case(name.as_bytes()));
        self
    }

    /// Without a body; what was said of its type stays.
    #[must_use]
    pub fn drop_body(mut self) -> Self {
        self.payload = Payload::None;
        self
    }

    /// With these orders for the backend. They travel beside the request and are no part of what it is.
    #[must_use]
    pub fn script(mut self, script: Script) -> Self {
        self.script = Some(script);
        self
    }

    /// The value of the first field line `Idempotency-Key` or of the given carrier.
    #[must_use]
    pub fn sent(&self, name: &str) -> Option<&[u8]> {
        let line = self.fields.iter().find(|(n, _)| n.eq_ignore_ascii_case(name.as_bytes()))?;
        Some(&line.1)
    }

    /// The head, up to and with the empty line.
    #[must_use]
    pub fn head(&self) -> Vec<u8> {
        let mut octets =
            format!("{} {} HTTP/1.1\r\nHost: {}\r\n", self.method, self.target, self.host).into_bytes();
        for (name, value) in &self.fields {
            octets.extend_from_slice(name);
            octets.extend_from_slice(b": ");
            octets.extend_from_slice(value);
            octets.extend_from_slice(b"\r\n");
        }
        match &self.payload {
            Payload::None => {}
            Payload::Whole(body) => {
                octets.extend_from_slice(format!("Content-Length: {}\r\n", body.len()).as_bytes());
            }
            Payload::Chunked(_) => octets.extend_from_slice(b"Transfer-Encoding: chunked\r\n"),
        }
        octets.extend_from_slice(b"\r\n");
        octets
    }

    /// The body as it is framed.
    #[must_use]
    pub fn framed_body(&self) -> Vec<u8> {
        match &self.payload {
            Payload::None => Vec::new(),
            Payload::Whole(body) => body.to_vec(),
            Payload::Chunked(chunks) => {
                let mut octets = Vec::new();
                for chunk in chunks.iter().filter(|chunk| !chunk.is_empty()) {
                    octets.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
                    octets.extend_from_slice(chunk);
                    octets.extend_from_slice(b"\r\n");
                }
                octets.extend_from_slice(b"0\r\n\r\n");
                octets
            }
        }
    }

    /// Head and body.
    #[must_use]
    pub fn octets(&self) -> Vec<u8> {
        let mut octets = self.head();
        octets.extend(self.framed_body());
        octets
    }
}

/// Why there is no whole answer.
#[derive(Debug)]
pub enum Broken {
    /// The connection ended or was reset, after so many octets of the body where a head was read.
    Cut {
        /// The head, where one was read.
        head: Option<Head>,
        /// What of the body was read.
        body: Bytes,
    },
    /// Nothing came in time.
    Late,
    /// What came is no HTTP.
    Garbage(String),
}

/// The head of an answer.
#[derive(Clone, Debug)]
pub struct Head {
    /// The status.
    pub status: u16,
    /// The field lines, in their order, names as they came.
    pub fields: Vec<(String, Vec<u8>)>,
    /// The statuses of the interim answers before it.
    pub interim: Vec<u16>,
}

/// A whole answer.
#[derive(Clone)]
pub struct Answer {
    /// Its head.
    pub head: Head,
    /// Its body, without the framing.
    pub body: Bytes,
    /// Its trailer fields.
    pub trailers: Vec<(String, Vec<u8>)>,
}

impl Head {
    /// The values of the field lines of this name.
    #[must_use]
    pub fn all(&self, name: &str) -> Vec<&[u8]> {
        let lines = self.fields.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name));
        lines.map(|(_, value)| value.as_slice()).collect()
    }

    /// The value of the one field line of this name, if there is one.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        let values = self.all(name);
        assert!(values.len() <= 1, "{} field lines {name} in {self:?}", values.len());
        values.first().map(|value| std::str::from_utf8(value).expect("a field value in ASCII"))
    }
}

impl Answer {
    /// The status.
    #[must_use]
    pub const fn status(&self) -> u16 {
        self.head.status
    }

    /// The value of the one field line of this name, if there is one.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.head.get(name)
    }

    /// The values of the field lines of this name.
    #[must_use]
    pub fn all(&self, name: &str) -> Vec<&[u8]> {
        self.head.all(name)
    }

    /// The body as JSON.
    #[must_use]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("no JSON ({error}) in {self:?}"))
    }
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.head.status)?;
        for (name, value) in &self.head.fields {
            write!(f, " | {name}: {}", value.escape_ascii())?;
        }
        let shown = &self.body[..self.body.len().min(300)];
        write!(f, " | {} octets: {}", self.body.len(), shown.escape_ascii())
    }
}

/// One connection.
pub struct Connection {
    stream: TcpStream,
    buffer: BytesMut,
}

/// How the body of an answer is framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// There is none.
    None,
    /// So many octets are still to come.
    Sized(u64),
    /// Chunks; so many octets of the present one are still to come.
    Chunked(u64),
    /// The last chunk was read.
    Ended,
    /// Up to the end of the connection.
    Close,
}

impl Connection {
    /// Opens one.
    pub async fn open(address: SocketAddr) -> Self {
        let stream =
            within(TcpStream::connect(address)).await.expect("a connection in time").expect("a connection");
        stream.set_nodelay(true).expect("a socket option");
        Self { stream, buffer: BytesMut::new() }
    }

    /// Sends these octets. An error is none here: the answer tells what became of them.
    pub async fn write(&mut self, octets: &[u8]) {
        let _ = within(self.stream.write_all(octets)).await;
    }

    /// Says that nothing more will be sent, and goes on listening.
    pub async fn half_close(&mut self) {
        let _ = self.stream.shutdown().await;
    }

    /// Goes away so that the other side notices at once, whatever is under way.
    pub fn reset(self) {
        let _ = self.stream.set_zero_linger();
        drop(self.stream);
    }

    /// Sends a request and reads its answer.
    pub async fn exchange(&mut self, request: &Request) -> Result<Answer, Broken> {
        self.write(&request.octets()).await;
        self.answer(&request.method).await
    }

    /// Reads the answer to a request with this method.
    pub async fn answer(&mut self, method: &str) -> Result<Answer, Broken> {
        let head = self.head().await?;
        let mut framing = framing(method, &head)?;
        let mut body = BytesMut::new();
        loop {
            match self.data(&mut framing).await {
                Ok(Some(data)) => body.extend_from_slice(&data),
                Ok(None) => break,
                Err(Broken::Cut { .. }) => {
                    return Err(Broken::Cut { head: Some(head), body: body.freeze() });
                }
                Err(other) => return Err(other),
            }
        }
        let trailers = if framing == Framing::Ended { self.trailers().await? } else { Vec::new() };
        Ok(Answer { head, body: body.freeze(), trailers })
    }

    /// Reads one interim answer, and says its status.
    pub async fn interim(&mut self) -> Result<u16, Broken> {
        let line = self.line().await?;
        let status = std::str::from_utf8(&line).ok().and_then(|line| line.split(' ').nth(1)?.parse().ok());
        self.trailers().await?;
        match status {
            Some(status @ 100..200) => Ok(status),
            _ => Err(Broken::Garbage(line.escape_ascii().to_string())),
        }
    }

    /// Reads the head of an answer, and the interim ones before it.
    pub async fn head(&mut self) -> Result<Head, Broken> {
        let mut interim = Vec::new();
        loop {
            let line = self.line().await?;
            let mut words = line.splitn(3, |&b| b == b' ');
            let (version, status) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
            let status = std::str::from_utf8(status).ok().and_then(|s| s.parse::<u16>().ok());
            let (true, Some(status)) = (version.starts_with(b"HTTP/1."), status) else {
                return Err(Broken::Garbage(line.escape_ascii().to_string()));
            };
            let fields = self.trailers().await?;
            if (100..200).contains(&status) && status != 101 {
                interim.push(status);
                continue;
            }
            return Ok(Head { status, fields, interim });
        }
    }

    /// Reads some of a body; `None` at its end.
    pub async fn data(&mut self, framing: &mut Framing) -> Result<Option<Bytes>, Broken> {
        let left = match *framing {
            Framing::None | Framing::Ended | Framing::Sized(0) => return Ok(None),
            Framing::Sized(left) => left,
            Framing::Close => {
                return match self.fill().await {
                    Ok(()) => Ok(Some(self.buffer.split().freeze())),
                    Err(Broken::Cut { .. }) => Ok(None),
                    Err(other) => Err(other),
                };
            }
            Framing::Chunked(0) => {
                let line = self.line().await?;
                let text = String::from_utf8_lossy(&line);
                let size = u64::from_str_radix(text.split(';').next().unwrap_or_default().trim(), 16);
                match size {
                    Ok(0) => {
                        *framing = Framing::Ended;
                        return Ok(None);
                    }
                    Ok(size) => size,
                    Err(_) => return Err(Broken::Garbage(format!("chunk size {text:?}"))),
                }
            }
            Framing::Chunked(left) => left,
        };
        if self.buffer.is_empty() {
            self.fill().await?;
        }
        let take = usize::try_from(left).unwrap_or(usize::MAX).min(self.buffer.len());
        let data = self.buffer.split_to(take).freeze();
        let left = left - take as u64;
        match framing {
            Framing::Sized(rest) => *rest = left,
            Framing::Chunked(rest) => {
                *rest = left;
                if left == 0 && !self.line().await?.is_empty() {
                    return Err(Broken::Garbage("a chunk that does not end where it says".to_owned()));
                }
            }
            _ => {}
        }
        Ok(Some(data))
    }

    /// Reads field lines up to the empty one.
    async fn trailers(&mut self) -> Result<Vec<(String, Vec<u8>)>, Broken> {
        let mut fields = Vec::new();
        loop {
            let line = self.line().await?;
            if line.is_empty() {
                return Ok(fields);
            }
            let Some(colon) = line.iter().position(|&b| b == b':') else {
                return Err(Broken::Garbage(line.escape_ascii().to_string()));
            };
            let name = String::from_utf8_lossy(&line[..colon]).into_owned();
            fields.push((name, line[colon + 1..].trim_ascii().to_vec()));
        }
    }

    async fn line(&mut self) -> Result<Bytes, Broken> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|two| two == b"\r\n") {
                let line = self.buffer.split_to(end).freeze();
                self.buffer.advance(2);
                return Ok(line);
            }
            self.fill().await?;
        }
    }

    async fn fill(&mut self) -> Result<(), Broken> {
        match within(self.stream.read_buf(&mut self.buffer)).await {
            None => Err(Broken::Late),
            Some(Ok(0) | Err(_)) => Err(Broken::Cut { head: None, body: Bytes::new() }),
            Some(Ok(_)) => Ok(()),
        }
    }
}

/// How the body after this head is framed (RFC 9112, 6.3).
pub fn framing(method: &str, head: &Head) -> Result<Framing, Broken> {
    let lengths = head.all("content-length");
    let codings = head.all("transfer-encoding");
    if lengths.len() > 1 || codings.len() > 1 || (!lengths.is_empty() && !codings.is_empty()) {
        return Err(Broken::Garbage(format!("framed twice: {head:?}")));
    }
    if head.status == 204 && !(lengths.is_empty() && codings.is_empty()) {
        return Err(Broken::Garbage(format!("a 204 with a framed body: {head:?}")));
    }
    if method == "HEAD" || head.status == 204 || head.status == 304 {
        return Ok(Framing::None);
    }
    if !codings.is_empty() {
        return Ok(Framing::Chunked(0));
    }
    match lengths.first() {
        None => Ok(Framing::Close),
        Some(text) => std::str::from_utf8(text)
            .ok()
            .and_then(|text| text.parse().ok())
            .map(Framing::Sized)
            .ok_or_else(|| Broken::Garbage(format!("Content-Length {}", text.escape_ascii()))),
    }
}

/// The output of a future, if it comes in time.
pub async fn within<F: Future>(future: F) -> Option<F::Output> {
    tokio::time::timeout(PATIENCE, future).await.ok()
}

/// Waits for a condition; panics with `what` where it does not come true in time.
pub async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !condition().await {
        assert!(tokio::time::Instant::now() < deadline, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
