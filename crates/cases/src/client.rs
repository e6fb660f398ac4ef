//! A client that writes exactly the bytes of a case, and reads responses strictly.
//!
//! A library would refuse to send many of these requests, and would hide the framing of a response.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::backend::Script;

/// The bound on every wait. It is far longer than anything takes, so that only a real failure reaches it.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// A request, not yet sent.
#[derive(Clone)]
pub struct Request {
    /// The method.
    pub method: String,
    /// Path and query.
    pub target: String,
    /// The header lines after `Host`, in their order.
    pub fields: Vec<(Vec<u8>, Vec<u8>)>,
    payload: Payload,
    host: &'static str,
    /// The script for the backend.
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

    /// Sets the header `Host`.
    #[must_use]
    pub fn host(self, host: &'static str) -> Self {
        Self { host, ..self }
    }

    /// Adds the header `Idempotency-Key` with exactly this value.
    #[must_use]
    pub fn key(self, value: impl AsRef<[u8]>) -> Self {
        self.field("Idempotency-Key", value)
    }

    /// Adds a header line.
    #[must_use]
    pub fn field(mut self, name: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Self {
        self.fields.push((name.as_ref().to_vec(), value.as_ref().to_vec()));
        self
    }

    /// Sets a JSON body.
    #[must_use]
    pub fn json(self, text: impl Into<String>) -> Self {
        self.body("application/json", text.into())
    }

    /// Sets the body, with `Content-Length`.
    #[must_use]
    pub fn body(mut self, content_type: &str, body: impl Into<Bytes>) -> Self {
        self.payload = Payload::Whole(body.into());
        self.retyped(content_type)
    }

    /// Sets the body, without `Content-Type`.
    #[must_use]
    pub fn untyped(mut self, body: impl Into<Bytes>) -> Self {
        self.payload = Payload::Whole(body.into());
        self
    }

    /// Sets the body, sent in these chunks.
    #[must_use]
    pub fn chunked(mut self, content_type: &str, chunks: Vec<Bytes>) -> Self {
        self.payload = Payload::Chunked(chunks);
        self.retyped(content_type)
    }

    fn retyped(self, content_type: &str) -> Self {
        self.drop_field("Content-Type").field("Content-Type", content_type)
    }

    /// Removes the header lines of this name.
    #[must_use]
    pub fn drop_field(mut self, name: &str) -> Self {
        self.fields.retain(|(n, _)| !n.eq_ignore_ascii_case(name.as_bytes()));
        self
    }

    /// Removes the body; its `Content-Type` stays.
    #[must_use]
    pub fn drop_body(mut self) -> Self {
        self.payload = Payload::None;
        self
    }

    /// Sets the script for the backend. It does not change the identity of the request.
    #[must_use]
    pub fn script(mut self, script: Script) -> Self {
        self.script = Some(script);
        self
    }

    /// The value of the first header line of this name.
    #[must_use]
    pub fn sent(&self, name: &str) -> Option<&[u8]> {
        let line = self.fields.iter().find(|(n, _)| n.eq_ignore_ascii_case(name.as_bytes()))?;
        Some(&line.1)
    }

    /// The head, with the empty line at its end.
    #[must_use]
    pub fn head(&self) -> Vec<u8> {
        let mut bytes =
            format!("{} {} HTTP/1.1\r\nHost: {}\r\n", self.method, self.target, self.host).into_bytes();
        for (name, value) in &self.fields {
            bytes.extend_from_slice(name);
            bytes.extend_from_slice(b": ");
            bytes.extend_from_slice(value);
            bytes.extend_from_slice(b"\r\n");
        }
        match &self.payload {
            Payload::None => {}
            Payload::Whole(body) => {
                bytes.extend_from_slice(format!("Content-Length: {}\r\n", body.len()).as_bytes());
            }
            Payload::Chunked(_) => bytes.extend_from_slice(b"Transfer-Encoding: chunked\r\n"),
        }
        bytes.extend_from_slice(b"\r\n");
        bytes
    }

    /// The body with its framing.
    #[must_use]
    pub fn framed_body(&self) -> Vec<u8> {
        match &self.payload {
            Payload::None => Vec::new(),
            Payload::Whole(body) => body.to_vec(),
            Payload::Chunked(chunks) => {
                let mut bytes = Vec::new();
                for chunk in chunks.iter().filter(|chunk| !chunk.is_empty()) {
                    bytes.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
                    bytes.extend_from_slice(chunk);
                    bytes.extend_from_slice(b"\r\n");
                }
                bytes.extend_from_slice(b"0\r\n\r\n");
                bytes
            }
        }
    }

    /// Head and body.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.head();
        bytes.extend(self.framed_body());
        bytes
    }
}

/// The reason why there is no complete response.
#[derive(Debug)]
pub enum ResponseError {
    /// The connection ended or was reset.
    Cut {
        /// The head, if it was read.
        head: Option<Head>,
        /// The part of the body that was read.
        body: Bytes,
    },
    /// The response did not arrive in time.
    Late,
    /// The response is not valid HTTP.
    Garbage(String),
}

/// The head of a response.
#[derive(Clone, Debug)]
pub struct Head {
    /// The status.
    pub status: u16,
    /// The header lines in their order, with the names as they were sent.
    pub fields: Vec<(String, Vec<u8>)>,
    /// The statuses of the interim responses before this one.
    pub interim: Vec<u16>,
}

/// A complete response.
#[derive(Clone)]
pub struct Response {
    /// The head.
    pub head: Head,
    /// The body, without the framing.
    pub body: Bytes,
    /// The trailer fields.
    pub trailers: Vec<(String, Vec<u8>)>,
}

impl Head {
    /// The values of the header lines of this name.
    #[must_use]
    pub fn all(&self, name: &str) -> Vec<&[u8]> {
        let lines = self.fields.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name));
        lines.map(|(_, value)| value.as_slice()).collect()
    }

    /// The value of the header of this name, if there is one.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        let values = self.all(name);
        assert!(values.len() <= 1, "{} field lines {name} in {self:?}", values.len());
        values.first().map(|value| std::str::from_utf8(value).expect("a field value in ASCII"))
    }
}

impl Response {
    /// The status.
    #[must_use]
    pub const fn status(&self) -> u16 {
        self.head.status
    }

    /// The value of the header of this name, if there is one.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.head.get(name)
    }

    /// The values of the header lines of this name.
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

impl fmt::Debug for Response {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.head.status)?;
        for (name, value) in &self.head.fields {
            write!(f, " | {name}: {}", value.escape_ascii())?;
        }
        let shown = &self.body[..self.body.len().min(300)];
        write!(f, " | {} bytes: {}", self.body.len(), shown.escape_ascii())
    }
}

/// One connection.
pub struct Connection {
    stream: TcpStream,
    buffer: BytesMut,
}

/// The framing of the body of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// There is no body.
    None,
    /// This many bytes are still to come.
    Sized(u64),
    /// Chunks; this many bytes of the current one are still to come.
    Chunked(u64),
    /// The last chunk was read.
    Ended,
    /// The body ends with the connection.
    Close,
}

impl Connection {
    /// Opens a connection.
    pub async fn open(address: SocketAddr) -> Self {
        let stream =
            within(TcpStream::connect(address)).await.expect("a connection in time").expect("a connection");
        stream.set_nodelay(true).expect("a socket option");
        Self { stream, buffer: BytesMut::new() }
    }

    /// Sends these bytes. An error is ignored here, because the response shows it.
    pub async fn write(&mut self, bytes: &[u8]) {
        let _ = within(self.stream.write_all(bytes)).await;
    }

    /// Closes the sending side of the connection.
    pub async fn half_close(&mut self) {
        let _ = self.stream.shutdown().await;
    }

    /// Resets the connection, so that the other side notices at once.
    pub fn reset(self) {
        let _ = self.stream.set_zero_linger();
        drop(self.stream);
    }

    /// Sends a request and reads its response.
    pub async fn exchange(&mut self, request: &Request) -> Result<Response, ResponseError> {
        self.write(&request.bytes()).await;
        self.response(&request.method).await
    }

    /// Reads the response to a request with this method.
    pub async fn response(&mut self, method: &str) -> Result<Response, ResponseError> {
        let head = self.head().await?;
        let mut framing = framing(method, &head)?;
        let mut body = BytesMut::new();
        loop {
            match self.data(&mut framing).await {
                Ok(Some(data)) => body.extend_from_slice(&data),
                Ok(None) => break,
                Err(ResponseError::Cut { .. }) => {
                    return Err(ResponseError::Cut { head: Some(head), body: body.freeze() });
                }
                Err(other) => return Err(other),
            }
        }
        let trailers = if framing == Framing::Ended { self.trailers().await? } else { Vec::new() };
        Ok(Response { head, body: body.freeze(), trailers })
    }

    /// Reads one interim response and returns its status.
    pub async fn interim(&mut self) -> Result<u16, ResponseError> {
        let line = self.line().await?;
        let status = std::str::from_utf8(&line).ok().and_then(|line| line.split(' ').nth(1)?.parse().ok());
        self.trailers().await?;
        match status {
            Some(status @ 100..200) => Ok(status),
            _ => Err(ResponseError::Garbage(line.escape_ascii().to_string())),
        }
    }

    /// Reads the head of a response, and the interim ones before it.
    pub async fn head(&mut self) -> Result<Head, ResponseError> {
        let mut interim = Vec::new();
        loop {
            let line = self.line().await?;
            let mut words = line.splitn(3, |&b| b == b' ');
            let (version, status) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
            let status = std::str::from_utf8(status).ok().and_then(|s| s.parse::<u16>().ok());
            let (true, Some(status)) = (version.starts_with(b"HTTP/1."), status) else {
                return Err(ResponseError::Garbage(line.escape_ascii().to_string()));
            };
            let fields = self.trailers().await?;
            if (100..200).contains(&status) && status != 101 {
                interim.push(status);
                continue;
            }
            return Ok(Head { status, fields, interim });
        }
    }

    /// Reads a part of a body; `None` at its end.
    pub async fn data(&mut self, framing: &mut Framing) -> Result<Option<Bytes>, ResponseError> {
        let left = match *framing {
            Framing::None | Framing::Ended | Framing::Sized(0) => return Ok(None),
            Framing::Sized(left) => left,
            Framing::Close => {
                return match self.fill().await {
                    Ok(()) => Ok(Some(self.buffer.split().freeze())),
                    Err(ResponseError::Cut { .. }) => Ok(None),
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
                    Err(_) => return Err(ResponseError::Garbage(format!("chunk size {text:?}"))),
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
                    return Err(ResponseError::Garbage("a chunk that does not end where it says".to_owned()));
                }
            }
            _ => {}
        }
        Ok(Some(data))
    }

    /// Reads these bytes of a body, in any pieces.
    ///
    /// # Panics
    /// If other bytes come, or none.
    pub async fn expect_data(&mut self, framing: &mut Framing, expected: &[u8]) {
        let mut read = Vec::new();
        while read.len() < expected.len() {
            let data = self.data(framing).await.expect("bytes").expect("more bytes");
            read.extend_from_slice(&data);
        }
        assert_eq!(read.escape_ascii().to_string(), expected.escape_ascii().to_string());
    }

    /// Reads header lines up to the empty line.
    async fn trailers(&mut self) -> Result<Vec<(String, Vec<u8>)>, ResponseError> {
        let mut fields = Vec::new();
        loop {
            let line = self.line().await?;
            if line.is_empty() {
                return Ok(fields);
            }
            let Some(colon) = line.iter().position(|&b| b == b':') else {
                return Err(ResponseError::Garbage(line.escape_ascii().to_string()));
            };
            let name = String::from_utf8_lossy(&line[..colon]).into_owned();
            fields.push((name, line[colon + 1..].trim_ascii().to_vec()));
        }
    }

    async fn line(&mut self) -> Result<Bytes, ResponseError> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|two| two == b"\r\n") {
                let line = self.buffer.split_to(end).freeze();
                self.buffer.advance(2);
                return Ok(line);
            }
            self.fill().await?;
        }
    }

    async fn fill(&mut self) -> Result<(), ResponseError> {
        match within(self.stream.read_buf(&mut self.buffer)).await {
            None => Err(ResponseError::Late),
            Some(Ok(0) | Err(_)) => Err(ResponseError::Cut { head: None, body: Bytes::new() }),
            Some(Ok(_)) => Ok(()),
        }
    }
}

/// The framing of the body after this head (RFC 9112, 6.3).
pub fn framing(method: &str, head: &Head) -> Result<Framing, ResponseError> {
    let lengths = head.all("content-length");
    let codings = head.all("transfer-encoding");
    if lengths.len() > 1 || codings.len() > 1 || (!lengths.is_empty() && !codings.is_empty()) {
        return Err(ResponseError::Garbage(format!("framed twice: {head:?}")));
    }
    if head.status == 204 && !(lengths.is_empty() && codings.is_empty()) {
        return Err(ResponseError::Garbage(format!("a 204 with a framed body: {head:?}")));
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
            .ok_or_else(|| ResponseError::Garbage(format!("Content-Length {}", text.escape_ascii()))),
    }
}

/// The output of a future; `None` if it is not ready in time.
pub async fn within<F: Future>(future: F) -> Option<F::Output> {
    tokio::time::timeout(TIMEOUT, future).await.ok()
}
