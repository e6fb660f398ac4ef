//! One request at a time, in the simplest HTTP there is.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use crate::run::Result;

/// The response of a server.
pub(super) struct Response {
    pub(super) status: u16,
    pub(super) header: String,
    pub(super) body: String,
}

/// Sends a request with a JSON body. `fields` are whole lines.
pub(super) fn request(server: &str, line: &str, fields: &str, body: &str) -> Result<Response> {
    let mut stream = send(server, line, fields, body)?;
    let mut text = Vec::new();
    stream.read_to_end(&mut text).map_err(|error| format!("{server}: {line}: {error}"))?;
    let text = String::from_utf8_lossy(&text);
    let (header, body) = text.split_once("\r\n\r\n").ok_or(format!("{server}: {line}: answered {text:?}"))?;
    let status = header.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| format!("{server}: {line}: answered {header}"))?;
    Ok(Response { status, header: header.to_owned(), body: body.to_owned() })
}

/// Sends a request and reads nothing.
pub(super) fn send(server: &str, line: &str, fields: &str, body: &str) -> Result<TcpStream> {
    let failed = |error| format!("{server}: {line}: {error}");
    let mut stream = TcpStream::connect(server).map_err(failed)?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).map_err(failed)?;
    let length = body.len();
    let text = format!(
        "{line} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n{fields}\r\n{body}"
    );
    stream.write_all(text.as_bytes()).map_err(failed)?;
    Ok(stream)
}
