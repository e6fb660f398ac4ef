//! A client for services under test, in the simplest HTTP there is.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// The bound on every wait, on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Asks every 10 milliseconds until there is a result. Panics after ten minutes, which is far
/// longer than anything takes.
pub fn until<T>(what: &str, mut find: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = find() {
            return found;
        }
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The response of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceResponse {
    /// The status.
    pub status: u16,
    /// True if it is a replay.
    pub is_replayed: bool,
    /// The body.
    pub body: String,
}

/// Sends a request with a JSON body. `fields` are whole lines. `None` if there is no complete response.
pub fn send(address: &str, line: &str, fields: &str, body: &str) -> Option<ServiceResponse> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(TIMEOUT)).ok()?;
    let length = body.len();
    let head = format!("{line} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}");
    write!(stream, "{head}\r\ncontent-type: application/json\r\n{fields}\r\n{body}").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    Some(ServiceResponse {
        status: head.split(' ').nth(1)?.parse().ok()?,
        is_replayed: head.contains("idempotent-replayed: true"),
        body: body.to_owned(),
    })
}
