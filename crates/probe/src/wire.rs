//! HTTP/1.1 byte by byte: a probe sends what clients refuse to send, and stops in the middle.

use std::time::Duration;

use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::Instant;

use crate::target::Stream;

/// The largest head of a response, in bytes.
const MAX_HEAD: usize = 64 * 1024;
/// The largest body of a response, in bytes.
const MAX_BODY: usize = 4 * 1024 * 1024;
/// The most header fields of a response.
const MAX_FIELDS: usize = 256;

/// A request as bytes.
pub(crate) struct WireRequest {
    bytes: Vec<u8>,
    head: usize,
}

impl WireRequest {
    /// Writes a request. Field values may be any bytes, also invalid ones.
    pub(crate) fn new(
        method: &str,
        target: &str,
        authority: &str,
        fields: &[(&str, &[u8])],
        body: Option<&str>,
    ) -> Self {
        let mut bytes = format!("{method} {target} HTTP/1.1\r\nHost: {authority}\r\n").into_bytes();
        bytes.extend_from_slice(b"Connection: close\r\n");
        let mut has = |name: &str, line: &str| {
            if !fields.iter().any(|(field, _)| field.eq_ignore_ascii_case(name)) {
                bytes.extend_from_slice(line.as_bytes());
            }
        };
        has("user-agent", concat!("User-Agent: oncegate-probe/", env!("CARGO_PKG_VERSION"), "\r\n"));
        has("accept", "Accept: */*\r\n");
        if let Some(body) = body {
            has("content-type", "Content-Type: application/json\r\n");
            has("content-length", &format!("Content-Length: {}\r\n", body.len()));
        } else if method != "GET" {
            has("content-length", "Content-Length: 0\r\n");
        }
        for (name, value) in fields {
            bytes.extend_from_slice(name.as_bytes());
            bytes.extend_from_slice(b": ");
            bytes.extend_from_slice(value);
            bytes.extend_from_slice(b"\r\n");
        }
        bytes.extend_from_slice(b"\r\n");
        let head = bytes.len();
        bytes.extend_from_slice(body.unwrap_or_default().as_bytes());
        Self { bytes, head }
    }

    /// The whole request.
    pub(crate) fn whole(&self) -> &[u8] {
        &self.bytes
    }

    /// The head and half of the body; without a body, half of the head.
    pub(crate) fn half(&self) -> &[u8] {
        let body = self.bytes.len() - self.head;
        let end = if body < 2 { self.head / 2 } else { self.head + body / 2 };
        self.bytes.get(..end).unwrap_or_default()
    }
}

/// A response.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
    /// The time from the first byte of the request to the last byte of the response.
    pub(crate) elapsed: Duration,
}

impl Reply {
    /// Returns `true` for the statuses 200 to 299.
    pub(crate) fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// The only or first value of a field, as text.
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The body as JSON.
    pub(crate) fn json(&self) -> Option<serde_json::Value> {
        serde_json::from_slice(&self.body).ok()
    }
}

/// Sends the bytes of a request, and reads the response.
pub(crate) async fn exchange(stream: &mut dyn Stream, bytes: &[u8]) -> Result<Reply, String> {
    let began = Instant::now();
    // A server may respond before it has read everything, and close: its response counts, not the error.
    let sent = async {
        stream.write_all(bytes).await?;
        stream.flush().await
    };
    let sent = sent.await;
    let mut reply = match read(stream).await {
        Ok(reply) => reply,
        Err(error) => {
            return Err(sent.err().map_or(error, |error| format!("the request could not be sent: {error}")));
        }
    };
    reply.elapsed = began.elapsed();
    Ok(reply)
}

/// Reads one response; interim responses are skipped.
async fn read(stream: &mut dyn Stream) -> Result<Reply, String> {
    let mut input = Input { stream, buffer: Vec::new() };
    loop {
        let (length, status, headers) = loop {
            if let Some(head) = parse_head(&input.buffer)? {
                break head;
            }
            if input.buffer.len() > MAX_HEAD {
                return Err(format!("the head of the response is larger than {MAX_HEAD} bytes"));
            }
            if !input.more().await? {
                return Err("the connection was closed without a response".to_owned());
            }
        };
        input.buffer.drain(..length);
        match status {
            101 => return Err("the API switched to another protocol".to_owned()),
            100..200 => continue,
            _ => {}
        }
        let body = body(&mut input, status, &headers).await?;
        return Ok(Reply { status, headers, body, elapsed: Duration::ZERO });
    }
}

type Head = (usize, u16, HeaderMap);

fn parse_head(bytes: &[u8]) -> Result<Option<Head>, String> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut response = httparse::Response::new(&mut fields);
    let parsed = response.parse(bytes).map_err(|error| format!("the response is not HTTP/1.1: {error}"))?;
    let httparse::Status::Complete(length) = parsed else { return Ok(None) };
    let mut headers = HeaderMap::new();
    for field in response.headers.iter() {
        let name = HeaderName::from_bytes(field.name.as_bytes());
        if let (Ok(name), Ok(value)) = (name, HeaderValue::from_bytes(field.value)) {
            headers.append(name, value);
        }
    }
    Ok(Some((length, response.code.unwrap_or_default(), headers)))
}

async fn body(input: &mut Input<'_>, status: u16, headers: &HeaderMap) -> Result<Vec<u8>, String> {
    if matches!(status, 204 | 304) {
        return Ok(Vec::new());
    }
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    if let Some(coding) = text("transfer-encoding") {
        if !coding.trim().eq_ignore_ascii_case("chunked") {
            return Err("the response has an unknown transfer coding".to_owned());
        }
        return chunks(input).await;
    }
    if let Some(length) = text("content-length") {
        let length =
            length.trim().parse().map_err(|_| "the response has a malformed Content-Length".to_owned())?;
        return input.take(length).await;
    }
    while input.more().await? {
        if input.buffer.len() > MAX_BODY {
            return Err(too_large());
        }
    }
    Ok(std::mem::take(&mut input.buffer))
}

async fn chunks(input: &mut Input<'_>) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    loop {
        let line = input.line().await?;
        let size = line.split(';').next().unwrap_or_default().trim();
        let size =
            usize::from_str_radix(size, 16).map_err(|_| "the response has a malformed chunk".to_owned())?;
        if size == 0 {
            while !input.line().await?.is_empty() {}
            return Ok(body);
        }
        if body.len().saturating_add(size) > MAX_BODY {
            return Err(too_large());
        }
        body.extend(input.take(size).await?);
        if !input.line().await?.is_empty() {
            return Err("the response has a malformed chunk".to_owned());
        }
    }
}

fn too_large() -> String {
    format!("the body of the response is larger than {MAX_BODY} bytes")
}

struct Input<'a> {
    stream: &'a mut dyn Stream,
    buffer: Vec<u8>,
}

impl Input<'_> {
    /// Reads more bytes; false at the end.
    async fn more(&mut self) -> Result<bool, String> {
        let read = self.stream.read_buf(&mut self.buffer).await;
        match read {
            Ok(count) => Ok(count > 0),
            // Many servers end TLS without a notice; the lengths tell if something is missing.
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(format!("the connection broke: {error}")),
        }
    }

    async fn take(&mut self, count: usize) -> Result<Vec<u8>, String> {
        if count > MAX_BODY {
            return Err(too_large());
        }
        while self.buffer.len() < count {
            if !self.more().await? {
                return Err("the connection was closed within the response".to_owned());
            }
        }
        Ok(self.buffer.drain(..count).collect())
    }

    async fn line(&mut self) -> Result<String, String> {
        loop {
            if let Some(at) = self.buffer.windows(2).position(|pair| pair == b"\r\n") {
                let line = self.take(at + 2).await?;
                return Ok(String::from_utf8_lossy(line.get(..at).unwrap_or_default()).into_owned());
            }
            if self.buffer.len() > MAX_HEAD || !self.more().await? {
                return Err("the response has a malformed chunk".to_owned());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn reply(bytes: &'static [u8]) -> Result<Reply, String> {
        let (mut near, mut far) = tokio::io::duplex(1024);
        let peer = tokio::spawn(async move {
            let mut request = [0; 4];
            far.read_exact(&mut request).await.unwrap();
            for part in bytes.chunks(3) {
                far.write_all(part).await.unwrap();
            }
        });
        let reply = exchange(&mut near, b"sent").await;
        peer.await.unwrap();
        reply
    }

    #[tokio::test]
    async fn responses_of_every_framing_are_read() {
        let table: &[(&[u8], u16, &[u8])] = &[
            (b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok", 201, b"ok"),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n1\r\nd\r\n0\r\nX: y\r\n\r\n", 200, b"abcd"),
            (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", 200, b"until the end"),
            (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        ];
        for (bytes, status, body) in table {
            let reply = reply(bytes).await.unwrap_or_else(|error| panic!("{error}"));
            assert_eq!((reply.status, reply.body.as_slice()), (*status, *body));
        }
    }

    #[tokio::test]
    async fn an_incomplete_response_is_an_error() {
        let table: &[&[u8]] = &[
            b"",
            b"HTTP/1.1 200",
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
            b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nab",
            b"SSH-2.0-nothing\r\n\r\n",
        ];
        for bytes in table {
            assert!(reply(bytes).await.is_err(), "{}", String::from_utf8_lossy(bytes));
        }
    }

    #[test]
    fn a_request_is_cut_within_its_body() {
        let request = WireRequest::new("POST", "/a", "h", &[("K", b"\xff")], Some("12345678"));
        assert!(request.whole().ends_with(b"K: \xff\r\n\r\n12345678"));
        assert!(request.half().ends_with(b"\r\n\r\n1234"));
        let request = WireRequest::new("POST", "/a", "h", &[], None);
        assert!(!request.half().ends_with(b"\r\n\r\n") && request.half().starts_with(b"POST /a"));
    }
}
