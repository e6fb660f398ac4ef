//! A TCP proxy in front of a PostgreSQL server that injects a fault at a chosen message, or on all connections at once.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// The fault at the one message that the proxy waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The server never receives the message; both connections end.
    Before,
    /// The server executes the message; the client's connection ends before the reply.
    After,
    /// The server receives the message and the rest of its group; the client's connection ends at once, answered or not.
    /// The server's connection ends at [`FaultProxy::go_on`].
    Sent,
    /// The server executes the message; the reply is never passed on, and the client's connection stays open.
    Silent,
    /// The client's connection ends; the server receives the message at [`FaultProxy::go_on`].
    Late,
    /// The client's connection ends; the server's ends at [`FaultProxy::go_on`], without the message.
    LateEnd,
    /// Both connections stay open; the server receives the message at [`FaultProxy::go_on`].
    Slow,
    /// Both connections stay open until the client closes its own; the server never receives the message.
    Hold,
}

/// A TCP proxy between clients and a PostgreSQL server, without TLS, on the runtime that it was made on.
#[derive(Debug)]
pub struct FaultProxy {
    port: u16,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    server: u16,
    /// The bytes that the message contains, and the fault. Only the first such message is hit.
    armed: Mutex<Option<(&'static [u8], Fault)>>,
    broken: Notify,
    go_on: Notify,
    /// The number of connections so far.
    connections: AtomicU64,
    /// Connections up to this number pass nothing any more.
    swallowed: AtomicU64,
    cut: Notify,
}

impl FaultProxy {
    /// Starts a proxy to the server on this loopback port.
    ///
    /// # Errors
    /// If there is no free port.
    pub async fn start(server: u16) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let port = listener.local_addr()?.port();
        let shared = Arc::new(Shared {
            server,
            armed: Mutex::new(None),
            broken: Notify::new(),
            go_on: Notify::new(),
            connections: AtomicU64::new(0),
            swallowed: AtomicU64::new(0),
            cut: Notify::new(),
        });
        let all = shared.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let shared = all.clone();
                tokio::spawn(async move {
                    tokio::select! {
                        () = shared.cut.notified() => {}
                        ended = pass(client, &shared) => drop(ended),
                    }
                });
            }
        });
        Ok(Self { port, shared })
    }

    /// The port on 127.0.0.1 that clients connect to.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Injects the fault at the next message that contains these bytes.
    pub fn arm(&self, bytes: &'static [u8], fault: Fault) {
        *self.shared.armed.lock().unwrap_or_else(PoisonError::into_inner) = Some((bytes, fault));
    }

    /// Waits until the fault was injected.
    pub async fn broken(&self) {
        self.shared.broken.notified().await;
    }

    /// Continues a fault that waits for it.
    pub fn go_on(&self) {
        self.shared.go_on.notify_one();
    }

    /// Closes every open connection, on both sides.
    pub fn cut(&self) {
        self.shared.cut.notify_waiters();
    }

    /// Drops everything on the open connections, in both directions, and closes none of them, as a firewall does that lost
    /// its state. New connections pass.
    pub fn swallow(&self) {
        self.shared.swallowed.store(self.shared.connections.load(Ordering::SeqCst), Ordering::SeqCst);
    }
}

impl Shared {
    fn breaks_at(&self, message: &[u8]) -> Option<Fault> {
        let mut armed = self.armed.lock().unwrap_or_else(PoisonError::into_inner);
        let (bytes, how) = (*armed)?;
        message.windows(bytes.len()).any(|part| part == bytes).then(|| {
            *armed = None;
            how
        })
    }

    fn is_swallowed(&self, number: u64) -> bool {
        number <= self.swallowed.load(Ordering::SeqCst)
    }
}

/// One message, whose length stands after its letter.
async fn message(from: &mut OwnedReadHalf, letter: usize) -> io::Result<Vec<u8>> {
    let mut message = vec![0; letter + 4];
    from.read_exact(&mut message).await?;
    let length = message.last_chunk().map_or(0, |length| u32::from_be_bytes(*length));
    let rest = from.take(u64::from(length.saturating_sub(4))).read_to_end(&mut message).await?;
    // Cut off in the middle.
    if rest + 4 < length as usize { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(message) }
}

/// Until the client gives up, whatever it says before.
async fn until_the_end(from: &mut OwnedReadHalf) -> io::Result<()> {
    tokio::io::copy(from, &mut tokio::io::sink()).await.map(drop)
}

/// Passes replies on. Ends with the connection that it belongs to.
struct Replies {
    task: JoinHandle<io::Result<(OwnedReadHalf, OwnedWriteHalf)>>,
    stop: Arc<Notify>,
}

impl Replies {
    fn pass(from: OwnedReadHalf, to: OwnedWriteHalf, shared: Arc<Shared>, number: u64) -> Self {
        let stop = Arc::new(Notify::new());
        Self { task: tokio::spawn(copy(from, to, stop.clone(), shared, number)), stop }
    }

    /// From here on no reply gets to the client.
    async fn stop(mut self) -> io::Result<(OwnedReadHalf, OwnedWriteHalf)> {
        self.stop.notify_one();
        (&mut self.task).await.map_err(io::Error::other)?
    }
}

impl Drop for Replies {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn pass(client: TcpStream, shared: &Arc<Shared>) -> io::Result<()> {
    let number = shared.connections.fetch_add(1, Ordering::SeqCst) + 1;
    let server = TcpStream::connect(("127.0.0.1", shared.server)).await?;
    for stream in [&client, &server] {
        stream.set_nodelay(true)?;
    }
    let (mut from_client, to_client) = client.into_split();
    let (from_server, mut to_server) = server.into_split();
    // The first message has no letter.
    let mut letter = 0;
    let replies = Replies::pass(from_server, to_client, shared.clone(), number);
    loop {
        let message = message(&mut from_client, letter).await?;
        if shared.is_swallowed(number) {
            continue;
        }
        let how = if letter == 0 { None } else { shared.breaks_at(&message) };
        letter = 1;
        let Some(how) = how else {
            to_server.write_all(&message).await?;
            continue;
        };
        match how {
            Fault::Slow => {
                shared.broken.notify_one();
                shared.go_on.notified().await;
                to_server.write_all(&message).await?;
            }
            Fault::Hold => {
                shared.broken.notify_one();
                return until_the_end(&mut from_client).await;
            }
            Fault::Sent => {
                send_whole(message, &mut from_client, &mut to_server).await?;
                let _from_server = replies.stop().await.map(|(from_server, to_client)| {
                    drop((from_client, to_client));
                    from_server
                })?;
                shared.broken.notify_one();
                shared.go_on.notified().await;
                return Ok(());
            }
            how => {
                let server = (replies.stop().await?, to_server);
                return break_at(&message, how, from_client, server, shared).await;
            }
        }
    }
}

/// A message, and those after it up to the one by which the client asks for a reply.
async fn send_whole(
    mut message: Vec<u8>,
    from_client: &mut OwnedReadHalf,
    to_server: &mut OwnedWriteHalf,
) -> io::Result<()> {
    loop {
        to_server.write_all(&message).await?;
        // A simple query, or Sync.
        if matches!(message.first(), Some(b'Q' | b'S')) {
            return Ok(());
        }
        message = self::message(from_client, 1).await?;
    }
}

async fn break_at(
    message: &[u8],
    how: Fault,
    mut from_client: OwnedReadHalf,
    ((mut from_server, to_client), mut to_server): ((OwnedReadHalf, OwnedWriteHalf), OwnedWriteHalf),
    shared: &Shared,
) -> io::Result<()> {
    let mut reply = [0; 1024];
    if matches!(how, Fault::After | Fault::Silent) {
        to_server.write_all(message).await?;
        // Its reply says that the server has carried it out.
        let _length = from_server.read(&mut reply).await?;
    }
    if how == Fault::Silent {
        shared.broken.notify_one();
        return until_the_end(&mut from_client).await;
    }
    drop((from_client, to_client));
    shared.broken.notify_one();
    if matches!(how, Fault::Late | Fault::LateEnd) {
        shared.go_on.notified().await;
    }
    if how == Fault::Late {
        to_server.write_all(message).await?;
        let _length = from_server.read(&mut reply).await?;
    }
    Ok(())
}

/// Passes replies on until it is told to stop.
async fn copy(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    stop: Arc<Notify>,
    shared: Arc<Shared>,
    number: u64,
) -> io::Result<(OwnedReadHalf, OwnedWriteHalf)> {
    let mut bytes = vec![0; 16 * 1024];
    loop {
        tokio::select! {
            () = stop.notified() => return Ok((from, to)),
            read = from.read(&mut bytes) => match read? {
                0 => return Ok((from, to)),
                _ if shared.is_swallowed(number) => {}
                length => to.write_all(bytes.get(..length).unwrap_or_default()).await?,
            },
        }
    }
}
