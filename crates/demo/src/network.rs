//! The hostile network between the clients and their server.
//!
//! It accepts one request per connection and inflicts the fault that the plan has for it. Both runs go through it.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::plan::Fault;
use crate::stage::{Stage, Style};

/// The longest time of a connection, so that one that is never closed does not stay for ever.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// The delay of a late request after the end of its client.
const LATER: Duration = Duration::from_millis(15);

/// More than the longest request or response of the demonstration.
const MAX_MESSAGE: usize = 64 * 1024;

/// The running network. Stops when dropped.
pub(crate) struct Network {
    pub(crate) address: SocketAddr,
    carrying: watch::Receiver<usize>,
    accepting: AbortHandle,
}

struct Wires {
    stage: Arc<Stage>,
    to: Vec<SocketAddr>,
    /// The next sidecar in turn.
    turn: AtomicUsize,
    /// The sidecar that executed the request of each key, if its response was seen.
    executed: Mutex<HashMap<String, usize>>,
    carrying: watch::Sender<usize>,
}

impl Network {
    /// Starts on a free port. Requests that are not lost are sent `to` these addresses, in turn.
    pub(crate) async fn start(stage: Arc<Stage>, to: Vec<SocketAddr>) -> Result<Self, String> {
        let cannot = |error| format!("cannot open a port for the hostile network: {error}");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(cannot)?;
        let address = listener.local_addr().map_err(cannot)?;
        let (sender, carrying) = watch::channel(0);
        let (turn, executed) = (AtomicUsize::new(0), Mutex::default());
        let wires = Arc::new(Wires { stage, to, turn, executed, carrying: sender });
        let accepting = tokio::spawn(accept(listener, wires)).abort_handle();
        Ok(Self { address, carrying, accepting })
    }

    /// Waits until nothing is in transit: late requests arrive after all clients are done.
    pub(crate) async fn settle(&self) {
        let mut carrying = self.carrying.clone();
        // The sender lives as long as the accepting task, which `self` owns.
        let _never_closed = carrying.wait_for(|carrying| *carrying == 0).await;
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, wires: Arc<Wires>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        wires.carrying.send_modify(|carrying| *carrying += 1);
        let wires = wires.clone();
        tokio::spawn(async move {
            // The client sees the broken connection; there is nothing else to report.
            let _broken = timeout(CONNECTION_TIMEOUT, wires.carry(stream)).await;
            wires.carrying.send_modify(|carrying| *carrying -= 1);
        });
    }
}

impl Wires {
    async fn carry(&self, mut client: TcpStream) -> io::Result<()> {
        let _best_effort = client.set_nodelay(true);
        let request = read_request(&mut client).await?;
        let fault = field(&request, "x-request-id").and_then(|id| self.stage.plan.fault(id));
        match fault {
            None => self.deliver(client, &request).await,
            Some(fault) => self.spoil(client, &request, fault).await,
        }
    }

    /// Delivers a request and its response without a fault.
    async fn deliver(&self, mut client: TcpStream, request: &[u8]) -> io::Result<()> {
        let response = {
            let gone = hung_up(&mut client);
            tokio::select! {
                response = self.send(request) => response,
                () = gone => return Ok(()),
            }
        };
        match response {
            Ok(response) => client.write_all(&response).await,
            Err(error) => {
                reset(client)?;
                Err(error)
            }
        }
    }

    async fn spoil(&self, mut client: TcpStream, request: &[u8], fault: Fault) -> io::Result<()> {
        let response = match fault {
            Fault::RequestLost => {
                self.suffered(fault);
                return reset(client);
            }
            Fault::RequestLate => {
                hung_up(&mut client).await;
                tokio::time::sleep(LATER).await;
                self.send(request).await
            }
            Fault::HangUp => {
                let (_, mut upstream) = self.connect().await?;
                upstream.write_all(request).await?;
                hung_up(&mut client).await;
                self.suffered(fault);
                return Ok(());
            }
            Fault::ResponseLost | Fault::ResponseCut | Fault::ResponseLate => self.send(request).await,
        };
        let response = match response {
            Ok(response) => response,
            Err(error) => {
                reset(client)?;
                return Err(error);
            }
        };
        self.suffered(fault);
        match fault {
            Fault::ResponseLate => hung_up(&mut client).await,
            Fault::ResponseCut => client.write_all(first_half(&response)).await?,
            _ => return reset(client),
        }
        Ok(())
    }

    /// Connects to the server whose turn it is, or to the next one if it accepts no connection, as load balancers do.
    async fn connect(&self) -> io::Result<(usize, TcpStream)> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let mut refused = io::ErrorKind::NotConnected.into();
        for (at, to) in
            self.to.iter().enumerate().cycle().skip(turn % self.to.len().max(1)).take(self.to.len())
        {
            match TcpStream::connect(to).await {
                Ok(stream) => {
                    if let Some(two) = &mut self.stage.figures().two_sidecars {
                        let requests = if at == 0 {
                            &mut two.requests_to_the_killed
                        } else {
                            &mut two.requests_to_the_other
                        };
                        *requests += 1;
                    }
                    return Ok((at, stream));
                }
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }

    /// Records which sidecar executed a request, and counts replays by the other one.
    fn inspect(&self, at: usize, request: &[u8], response: &[u8]) {
        let mut figures = self.stage.figures();
        let Some((two, key)) = figures.two_sidecars.as_mut().zip(field(request, "idempotency-key")) else {
            return;
        };
        let mut executed = self.executed.lock().unwrap_or_else(PoisonError::into_inner);
        if field(response, "idempotent-replayed").is_some() {
            if executed.get(key).is_some_and(|by| *by != at) {
                two.replayed_by_the_other += 1;
                let text =
                    "a retry of a request through one sidecar reaches the other, which replays the response";
                self.stage.say_once("the other one", Style::Good, text);
            }
        } else if response.starts_with(b"HTTP/1.1 201 ") {
            executed.insert(key.to_owned(), at);
        }
    }

    /// Sends the request over a connection of its own and reads the whole response, after which the connection closes.
    async fn send(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        let (at, mut upstream) = self.connect().await?;
        let _best_effort = upstream.set_nodelay(true);
        upstream.write_all(request).await?;
        let mut response = Vec::new();
        upstream.take(MAX_MESSAGE as u64).read_to_end(&mut response).await?;
        if head_length(&response).is_none() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.inspect(at, request, &response);
        Ok(response)
    }

    fn suffered(&self, fault: Fault) {
        self.stage.figures().faults.add(fault);
        let (title, text) = fault.describe();
        self.stage.say_once(title, Style::Bold, text);
    }
}

/// Closes with a reset instead of an orderly end.
fn reset(stream: TcpStream) -> io::Result<()> {
    SockRef::from(&stream).set_linger(Some(Duration::ZERO))
}

/// Waits until the client has closed its connection.
async fn hung_up(client: &mut TcpStream) {
    let mut rest = [0; 512];
    while !matches!(client.read(&mut rest).await, Ok(0) | Err(_)) {}
}

async fn read_request(client: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut request = Vec::with_capacity(1024);
    loop {
        if client.read_buf(&mut request).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if let Some(length) = message_length(&request)
            && request.len() >= length
        {
            return Ok(request);
        }
        if request.len() > MAX_MESSAGE {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
}

/// The length of the head, once it is complete.
fn head_length(message: &[u8]) -> Option<usize> {
    message.windows(4).position(|bytes| bytes == b"\r\n\r\n").map(|at| at + 4)
}

fn message_length(message: &[u8]) -> Option<usize> {
    let head = head_length(message)?;
    let body = field(message, "content-length").and_then(|length| length.parse::<usize>().ok());
    Some(head + body.unwrap_or(0))
}

fn field<'a>(message: &'a [u8], name: &str) -> Option<&'a str> {
    let head = std::str::from_utf8(message.get(..head_length(message)?)?).ok()?;
    let fields = head.lines().filter_map(|line| line.split_once(':'));
    fields.into_iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
}

/// The head and half of the body.
fn first_half(response: &[u8]) -> &[u8] {
    let head = head_length(response).unwrap_or(0);
    response.get(..head + (response.len() - head) / 2).unwrap_or(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: &[u8] = b"POST /payments HTTP/1.1\r\nX-Request-Id: 7/0/1\r\ncontent-length: 4\r\n\r\nabcd";

    #[test]
    fn a_request_is_complete_with_its_body() {
        assert_eq!(message_length(REQUEST), Some(REQUEST.len()));
        assert_eq!(message_length(&REQUEST[..40]), None);
        assert_eq!(field(REQUEST, "x-request-id"), Some("7/0/1"));
    }

    #[test]
    fn a_cut_reply_ends_in_the_middle_of_its_body() {
        assert_eq!(first_half(REQUEST), &REQUEST[..REQUEST.len() - 2]);
    }
}
