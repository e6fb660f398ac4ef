//! Processes and connections for the tests of whole programs. Requests are sent byte by byte, and responses are read
//! strictly.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{
    AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader,
};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::watch;

/// The longest wait for anything. It is far longer than everything takes, so a test that fails has a reason.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

/// The longest time that a program may take to start. Many Python and Node programs that start at once read and compile a lot.
const START_TIMEOUT: Duration = Duration::from_secs(180);

/// The longest time for all checks of a program: a browser on a machine with little to spare visits a hundred pages.
const CHECKS_TIMEOUT: Duration = Duration::from_secs(900);

/// The output of the future, which must arrive in time.
pub(crate) fn within<T>(what: impl fmt::Display, future: impl Future<Output = T>) -> impl Future<Output = T> {
    within_time(TIMEOUT, what, future)
}

async fn within_time<T>(time: Duration, what: impl fmt::Display, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(time, future).await {
        Ok(output) => output,
        Err(_) => panic!("timed out waiting for {what}"),
    }
}

/// A running program. It is killed when this is dropped.
pub(crate) struct Process {
    child: Child,
    stdout: watch::Receiver<Vec<String>>,
    stderr: watch::Receiver<Vec<String>>,
}

impl Process {
    pub(crate) fn start(command: &mut Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let stdout = lines(child.stdout.take().unwrap());
        let stderr = lines(child.stderr.take().unwrap());
        Self { child, stdout, stderr }
    }

    /// Waits for the first line on the standard output.
    pub(crate) async fn first_line(&mut self) -> String {
        let line = self.stdout.wait_for(|lines| !lines.is_empty());
        let arrived = within_time(START_TIMEOUT, "a line of a program that starts", line);
        let line = arrived.await.ok().map(|lines| lines[0].clone());
        match line {
            Some(line) => line,
            None => panic!("the program ended without any output: {}", self.errors().await),
        }
    }

    /// Everything on the standard output, after the program has closed it.
    pub(crate) async fn output(&mut self) -> Vec<String> {
        within("the end of the output", closed(&mut self.stdout)).await
    }

    /// Everything on the standard error, after the program has closed it.
    pub(crate) async fn errors(&mut self) -> String {
        within("the end of the errors", closed(&mut self.stderr)).await.join("\n")
    }

    /// Waits for a line on the standard error with this text.
    pub(crate) async fn logs(&mut self, text: &str) {
        let has_line = |lines: &Vec<String>| lines.iter().any(|line| line.contains(text));
        let logged = within(format!("the line {text:?}"), self.stderr.wait_for(has_line)).await.is_ok();
        assert!(logged, "the program ended without the line {text:?}");
    }

    /// The lines on the standard error with this text so far.
    pub(crate) fn error_lines(&self, text: &str) -> Vec<String> {
        self.stderr.borrow().iter().filter(|line| line.contains(text)).cloned().collect()
    }

    /// The lines on the standard output so far.
    pub(crate) fn output_lines(&self) -> Vec<String> {
        self.stdout.borrow().clone()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id().expect("the process runs")
    }

    /// Suspends the process.
    pub(crate) fn freeze(&self) {
        oncegate_servers::freeze(self.pid()).expect("a process of this test");
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw).expect("a process");
        kill_process(pid, signal).expect("a process of this test");
    }

    /// Kills the process, as a power cut would end it.
    pub(crate) async fn kill(&mut self) {
        self.child.kill().await.expect("a child of this test");
    }

    pub(crate) async fn ended(&mut self) -> ExitStatus {
        within("the end of a program", self.child.wait()).await.expect("a child of this test")
    }
}

/// A test that fails shows what its programs logged last.
impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let lines = self.stderr.borrow();
            let last = lines.len().saturating_sub(80);
            let pid = self.child.id().map_or_else(|| "ended".to_owned(), |pid| pid.to_string());
            eprintln!("--- logged by the program ({pid}):\n{}\n---", lines[last..].join("\n"));
        }
    }
}

/// A program that plays a service and checks its sidecars. It prints the port of the service first, reads one line with the
/// addresses of the sidecars, and then prints its checks.
pub(crate) struct CheckingProgram {
    child: Child,
    output: BufReader<ChildStdout>,
    pub(crate) service: SocketAddr,
}

impl CheckingProgram {
    pub(crate) async fn start(command: &mut Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut port = String::new();
        within("the port of the service", output.read_line(&mut port)).await.unwrap();
        if port.is_empty() {
            let mut errors = String::new();
            child.stderr.take().unwrap().read_to_string(&mut errors).await.unwrap();
            panic!("the program ended: {errors}");
        }
        let service = format!("127.0.0.1:{}", port.trim()).parse().unwrap();
        Self { child, output, service }
    }

    /// Sends the addresses, and asserts that this many checks hold.
    pub(crate) async fn check(mut self, addresses: &serde_json::Value, checks: usize) {
        self.child.stdin.take().unwrap().write_all(format!("{addresses}\n").as_bytes()).await.unwrap();
        let (mut checked, mut errors) = (String::new(), String::new());
        within_time(CHECKS_TIMEOUT, "the end of the checks", self.output.read_to_string(&mut checked))
            .await
            .unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut errors).await.unwrap();
        let status = within("the end of the program", self.child.wait()).await.unwrap();
        assert!(status.success(), "{checked}\n{errors}");
        assert_eq!(checked.lines().count(), checks, "{checked}");
    }
}

fn lines(pipe: impl AsyncRead + Send + Unpin + 'static) -> watch::Receiver<Vec<String>> {
    let (send, receive) = watch::channel(Vec::new());
    tokio::spawn(async move {
        let mut lines = BufReader::new(pipe).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            send.send_modify(|all| all.push(line));
        }
    });
    receive
}

async fn closed(lines: &mut watch::Receiver<Vec<String>>) -> Vec<String> {
    while lines.changed().await.is_ok() {}
    lines.borrow().clone()
}

/// The library that `faketime` preloads into programs.
pub(crate) fn faketime() -> PathBuf {
    let dirs = std::fs::read_dir("/usr/lib").unwrap().flatten();
    let found = dirs.map(|dir| dir.path().join("faketime/libfaketimeMT.so.1")).find(|path| path.exists());
    found.expect("libfaketime is not installed (Debian package: faketime)")
}

/// A program of the example on Express.
pub(crate) fn express_orders(program: &str) -> Command {
    let mut command = oncegate_servers::express_orders().unwrap_or_else(|error| panic!("{error}"));
    command.arg(program);
    command.into()
}

/// A program of the example on FastAPI.
pub(crate) fn fastapi_orders(program: &str) -> Command {
    let mut command = oncegate_servers::fastapi_orders().unwrap_or_else(|error| panic!("{error}"));
    command.arg(program);
    command.into()
}

/// The command line of a sidecar, on free ports.
pub(crate) fn sidecar(to: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(["proxy", "--listen=127.0.0.1:0", "--admin=127.0.0.1:0", "--to", to]);
    // Most tests look at the responses while the first request runs. A later flag overrides each of these.
    command.env("ONCEGATE_WAIT", "0s").env("ONCEGATE_SERVICE", "tests");
    command
}

/// A sidecar that listens.
pub(crate) struct Sidecar {
    pub(crate) process: Process,
    pub(crate) address: SocketAddr,
    pub(crate) admin: SocketAddr,
}

impl Sidecar {
    /// Starts a sidecar in front of this service, with these additional flags.
    pub(crate) async fn start(to: SocketAddr, flags: &[&str]) -> Self {
        let memory =
            if flags.iter().any(|flag| flag.starts_with("--store")) { "" } else { "--store=memory:" };
        Self::run(sidecar(&format!("http://{to}")).args(flags).args(Some(memory).filter(|f| !f.is_empty())))
            .await
    }

    pub(crate) async fn run(command: &mut Command) -> Self {
        let mut process = Process::start(command);
        let line = process.first_line().await;
        let address = |before: &str| {
            let rest = line.split_once(before).unwrap_or_else(|| panic!("no {before:?} in {line:?}")).1;
            rest.split(',').next().unwrap().parse().unwrap()
        };
        let scheme = if line.contains("listening on https") { "https" } else { "http" };
        let listening = address(&format!("listening on {scheme}://"));
        Self { address: listening, admin: address("admin http://"), process }
    }

    pub(crate) async fn connect(&self) -> Wire {
        Wire::connect(self.address).await
    }

    /// Sends one request on a connection of its own, and returns its response.
    pub(crate) async fn ask(&self, request: &str) -> Message {
        ask(self.address, request).await
    }

    /// Like [`Self::start`], with memory pages of the usual size, so that [`Self::resident`] is close to the memory in use.
    ///
    /// The allocator asks for huge pages, which are resident as a whole even if little of them is used: a few scattered
    /// objects would count for tens of megabytes.
    pub(crate) async fn start_in_small_pages(to: SocketAddr, flags: &[&str]) -> Self {
        let mut command = sidecar(&format!("http://{to}"));
        Self::run(command.arg("--store=memory:").args(flags).env("MIMALLOC_ALLOW_THP", "0")).await
    }

    /// The resident memory of the process, in bytes.
    pub(crate) fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    }
}

/// A request with `Host` and, if there is a body, `Content-Length`; `fields` are whole lines.
pub(crate) fn request(method: &str, target: &str, fields: &[&str], body: &str) -> String {
    let mut text = format!("{method} {target} HTTP/1.1\r\nHost: orders.test\r\n");
    for field in fields {
        text.push_str(&format!("{field}\r\n"));
    }
    if !body.is_empty() {
        text.push_str(&format!("Content-Length: {}\r\n", body.len()));
    }
    text + "\r\n" + body
}

/// Sends one request on a connection of its own, and returns its response.
pub(crate) async fn ask(address: SocketAddr, request: &str) -> Message {
    let mut wire = Wire::connect(address).await;
    wire.send(request).await;
    if request.starts_with("HEAD") { Message::of(wire.head().await) } else { wire.message().await }
}

/// A service that the test itself plays.
pub(crate) struct Service {
    listener: TcpListener,
    pub(crate) address: SocketAddr,
}

impl Service {
    pub(crate) async fn new() -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        Self { listener, address }
    }

    pub(crate) async fn accept(&self) -> Wire {
        let (stream, _) = within("a connection to the service", self.listener.accept()).await.unwrap();
        let ending = std::os::fd::AsFd::as_fd(&stream).try_clone_to_owned().unwrap();
        Wire { _ending: Some(Ending(ending.into())), ..Wire::new(stream) }
    }

    /// The next request and its connection: this one or a new one, because the sidecar decides which it uses.
    pub(crate) async fn next(&self, mut wire: Wire) -> (Wire, Message) {
        let head = tokio::select! {
            head = wire.try_head() => head,
            other = self.accept() => {
                wire = other;
                Some(wire.head().await)
            }
        };
        let head = match head {
            Some(head) => head,
            None => {
                wire = self.accept().await;
                wire.head().await
            }
        };
        let message = wire.body(head).await;
        (wire, message)
    }

    pub(crate) fn listener(&self) -> &TcpListener {
        &self.listener
    }

    pub(crate) fn into_listener(self) -> TcpListener {
        self.listener
    }

    /// From now on answers every request with this response.
    pub(crate) fn answers(self, response: &'static str) -> FixedService {
        let answering =
            FixedService { address: self.address, connections: Arc::default(), requests: Arc::default() };
        let (connections, requests) = (answering.connections.clone(), answering.requests.clone());
        tokio::spawn(async move {
            while let Ok((stream, _)) = self.listener.accept().await {
                connections.fetch_add(1, Ordering::Relaxed);
                let requests = requests.clone();
                tokio::spawn(async move {
                    let mut wire = Wire::new(stream);
                    while let Some(head) = wire.try_head().await {
                        wire.body(head).await;
                        requests.fetch_add(1, Ordering::Relaxed);
                        if wire.try_send(response).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        answering
    }

    /// Asserts that the sidecar does not connect within the time that it would need.
    pub(crate) async fn is_not_called(&self) {
        let call = tokio::time::timeout(Duration::from_millis(200), self.listener.accept()).await;
        assert!(call.is_err(), "the sidecar connected to the service");
    }
}

/// A service that always sends the same response.
pub(crate) struct FixedService {
    pub(crate) address: SocketAddr,
    connections: Arc<AtomicUsize>,
    requests: Arc<AtomicUsize>,
}

impl FixedService {
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    pub(crate) fn requests(&self) -> usize {
        self.requests.load(Ordering::Relaxed)
    }
}

pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// One side of an HTTP/1.1 connection.
pub(crate) struct Wire {
    stream: Box<dyn Stream>,
    read: Vec<u8>,
    _ending: Option<Ending>,
}

/// A second handle on a connection of a service. When it is dropped, it waits a moment for the other side to close, too.
///
/// A proxy may send the next request to a connection of which it does not know yet that the service has closed it. Then it
/// cannot tell if the request was executed. Tests that mean something else must not meet that by chance.
struct Ending(std::net::TcpStream);

impl Drop for Ending {
    fn drop(&mut self) {
        let deadline = std::time::Instant::now() + Duration::from_millis(500);
        let _ended = self.0.shutdown(std::net::Shutdown::Write);
        let _ = self.0.set_nonblocking(false);
        let mut rest = [0; 65536];
        loop {
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            let closed = left.is_zero()
                || self.0.set_read_timeout(Some(left)).is_err()
                || !matches!(std::io::Read::read(&mut self.0, &mut rest), Ok(1..));
            if closed {
                return;
            }
        }
    }
}

/// The start line and the field lines of a message.
#[derive(Clone, Debug, Default)]
pub(crate) struct Head {
    pub(crate) line: String,
    pub(crate) fields: Vec<(String, String)>,
}

/// A whole message.
#[derive(Clone, Debug, Default)]
pub(crate) struct Message {
    pub(crate) head: Head,
    pub(crate) body: Vec<u8>,
    pub(crate) trailers: Vec<(String, String)>,
}

impl Wire {
    pub(crate) fn new(stream: impl Stream + 'static) -> Self {
        Self { stream: Box::new(stream), read: Vec::new(), _ending: None }
    }

    pub(crate) async fn connect(address: SocketAddr) -> Self {
        let stream = within("a connection", TcpStream::connect(address)).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self::new(stream)
    }

    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        within("space to send", self.stream.write_all(bytes.as_ref())).await.expect("the other side reads");
        within("space to send", self.stream.flush()).await.expect("the other side reads");
    }

    /// Sends the bytes as far as the other side reads them.
    pub(crate) async fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> std::io::Result<()> {
        self.stream.write_all(bytes.as_ref()).await
    }

    /// Closes the sending direction.
    pub(crate) async fn finish(&mut self) {
        self.stream.shutdown().await.unwrap();
    }

    /// Reads more bytes; returns false at the end.
    async fn more(&mut self) -> bool {
        let got = within("bytes", self.stream.read_buf(&mut self.read)).await;
        // A reset is an end, too.
        !matches!(got, Ok(0) | Err(_))
    }

    /// Reads up to and including this text; `None` if the connection ends before it.
    async fn take_until(&mut self, text: &[u8]) -> Option<Vec<u8>> {
        loop {
            if let Some(at) = self.read.windows(text.len()).position(|window| window == text) {
                return Some(self.read.drain(..at + text.len()).collect());
            }
            if !self.more().await {
                return None;
            }
        }
    }

    /// Reads exactly this number of bytes.
    pub(crate) async fn take(&mut self, count: usize) -> Vec<u8> {
        while self.read.len() < count {
            assert!(self.more().await, "the connection ended: {:?}", String::from_utf8_lossy(&self.read));
        }
        self.read.drain(..count).collect()
    }

    /// The next head; `None` if the connection ends before it.
    pub(crate) async fn try_head(&mut self) -> Option<Head> {
        let bytes = self.take_until(b"\r\n\r\n").await?;
        let text = String::from_utf8(bytes).expect("a head in ASCII");
        let mut lines = text.trim_end_matches("\r\n").split("\r\n");
        let line = lines.next().unwrap().to_owned();
        Some(Head { line, fields: lines.map(field).collect() })
    }

    pub(crate) async fn head(&mut self) -> Head {
        match self.try_head().await {
            Some(head) => head,
            None => panic!("the connection ended: {:?}", String::from_utf8_lossy(&self.read)),
        }
    }

    /// The next chunk, and the trailers if it is the last one.
    pub(crate) async fn chunk(&mut self) -> (Vec<u8>, Vec<(String, String)>) {
        let line = self.take_until(b"\r\n").await.expect("a chunk");
        let size = String::from_utf8(line).unwrap();
        let size =
            usize::from_str_radix(size.trim_end(), 16).unwrap_or_else(|_| panic!("a chunk of {size:?}"));
        let data = self.take(size).await;
        let mut trailers = Vec::new();
        if size > 0 {
            assert_eq!(self.take(2).await, b"\r\n");
            return (data, trailers);
        }
        loop {
            let line =
                String::from_utf8(self.take_until(b"\r\n").await.expect("the end of the chunks")).unwrap();
            if line == "\r\n" {
                return (data, trailers);
            }
            trailers.push(field(line.trim_end_matches("\r\n")));
        }
    }

    /// Reads the body after this head. Not for responses to HEAD.
    pub(crate) async fn body(&mut self, head: Head) -> Message {
        let mut message = Message::of(head);
        let (chunked, length) = (message.get("transfer-encoding"), message.get("content-length"));
        assert!(chunked.is_none() || length.is_none(), "two lengths: {:?}", message.head);
        let is_response = message.head.line.starts_with("HTTP/");
        let length: Option<usize> = length.map(|length| length.parse().unwrap());
        if chunked.is_some() {
            assert_eq!(chunked, Some("chunked"));
            loop {
                let (data, trailers) = self.chunk().await;
                message.body.extend_from_slice(&data);
                if data.is_empty() {
                    message.trailers = trailers;
                    return message;
                }
            }
        } else if let Some(length) = length.filter(|_| !is_response || message.status() != 304) {
            message.body = self.take(length).await;
        } else if is_response && !matches!(message.status(), 100..200 | 204 | 304) {
            while self.more().await {}
            message.body = std::mem::take(&mut self.read);
        }
        message
    }

    /// The next whole message.
    pub(crate) async fn message(&mut self) -> Message {
        let head = self.head().await;
        self.body(head).await
    }

    /// Reads until the connection ends.
    pub(crate) async fn rest(&mut self) -> Vec<u8> {
        while self.more().await {}
        std::mem::take(&mut self.read)
    }

    /// Like [`Self::rest`], without a limit of time.
    pub(crate) async fn raw_rest(&mut self) -> Vec<u8> {
        // A reset is an end, too.
        let _ended = self.stream.read_to_end(&mut self.read).await;
        std::mem::take(&mut self.read)
    }

    /// Waits for the end of the connection, and asserts that nothing arrives before.
    pub(crate) async fn ends(&mut self) {
        while self.more().await {}
        assert!(self.read.is_empty(), "and more: {:?}", String::from_utf8_lossy(&self.read));
    }

    /// Asserts that nothing arrives within the time that a response would need.
    pub(crate) async fn stays_silent(&mut self) {
        let arrived =
            tokio::time::timeout(Duration::from_millis(200), self.stream.read_buf(&mut self.read)).await;
        assert!(arrived.is_err(), "{arrived:?} {:?}", String::from_utf8_lossy(&self.read));
        assert!(self.read.is_empty(), "{:?}", String::from_utf8_lossy(&self.read));
    }
}

fn field(line: &str) -> (String, String) {
    let (name, value) = line.split_once(':').unwrap_or_else(|| panic!("no field line: {line:?}"));
    (name.to_ascii_lowercase(), value.trim().to_owned())
}

impl Head {
    /// The value of the only field line with this name, if there is one.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        let all = self.all(name);
        assert!(all.len() <= 1, "several field lines {name}: {self:?}");
        all.first().copied()
    }

    /// The values of all field lines of this name.
    pub(crate) fn all(&self, name: &str) -> Vec<&str> {
        self.fields.iter().filter(|(n, _)| n == name).map(|(_, value)| value.as_str()).collect()
    }

    pub(crate) fn status(&self) -> u16 {
        let word = self.line.split(' ').nth(1).unwrap_or_else(|| panic!("no response: {:?}", self.line));
        word.parse().unwrap_or_else(|_| panic!("no response: {:?}", self.line))
    }
}

impl Message {
    pub(crate) fn of(head: Head) -> Self {
        Self { head, ..Self::default() }
    }

    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.head.get(name)
    }

    pub(crate) fn status(&self) -> u16 {
        self.head.status()
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("a text")
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {:?}", self.text()))
    }

    /// Asserts the status; a failure shows the whole message.
    #[track_caller]
    pub(crate) fn has_status(&self, status: u16) -> &Self {
        assert_eq!(self.status(), status, "{:?} {:?}", self.head, String::from_utf8_lossy(&self.body));
        self
    }

    /// Asserts that this is a refusal of this type.
    #[track_caller]
    pub(crate) fn is_problem(&self, status: u16, slug: &str) -> &Self {
        self.has_status(status);
        assert_eq!(self.get("content-type"), Some("application/problem+json"));
        let kind = self.json()["type"].as_str().unwrap_or_default().to_owned();
        assert!(kind.ends_with(slug), "{kind} is not {slug}: {}", self.text());
        self
    }

    pub(crate) fn is_replay(&self) -> bool {
        self.get("idempotent-replayed") == Some("true")
    }
}
