//! A service of this package as a process.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

pub(crate) struct Service {
    child: Mutex<Child>,
    address: String,
}

impl Service {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.env("PORT", "0").stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on http://").unwrap().to_owned();
        Self { child: Mutex::new(child), address }
    }

    /// Sends a request and gives the response whole, or what there was of it when the service died.
    fn send(&self, head: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let length = body.len();
        let head = format!("{head}\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}");
        write!(stream, "{head}\r\n\r\n{body}").unwrap();
        let mut response = String::new();
        match stream.read_to_string(&mut response) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
        }
        response
    }

    pub(crate) fn pay(&self, key: &str, body: &str) -> String {
        self.send(&format!("POST /payments HTTP/1.1\r\ncontent-type: application/json{key}"), body)
    }

    pub(crate) fn charges(&self) -> String {
        let response = self.send("GET /charges HTTP/1.1", "");
        response.split("\r\n\r\n").nth(1).unwrap().to_owned()
    }
}

impl Service {
    /// As `kill -9` does it.
    pub(crate) fn kill(&self) {
        let mut child = self.child.lock().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.kill();
    }
}
