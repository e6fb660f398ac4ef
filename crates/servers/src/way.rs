//! A TCP proxy in front of a PostgreSQL server, which breaks at a chosen message, or all at once.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// What happens to the one message that the way waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Break {
    /// The server never gets it; both connections end.
    Before,
    /// The server carries it out; the client's connection ends before the answer.
    After,
    /// The server gets it, and what belongs to it; the client's connection ends at once, whether the server has answered or not.
    /// The server's connection ends when it is told to.
    Sent,
    /// The server carries it out; the answer is never passed on, and the client's connection stays.
    Silent,
    /// The client's connection ends; the server gets the message when it is told to.
    Late,
    /// The client's connection ends; the server's ends when it is told to, without the message.
    LateEnd,
    /// Both connections stay; the server gets the message when it is told to.
    Slow,
    /// Both connections stay until the client ends its own; the server never gets the message.
    Hold,
}

/// A TCP proxy between clients and a PostgreSQL server, without TLS, on the runtime that it was made on.
#[derive(Debug)]
pub struct Way {
    port: u16,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    server: u16,
    /// What the message holds, and what happens to it; the first one only.
    armed: Mutex<Option<(&'static [u8], Break)>>,
    broken: Notify,
    go_on: Notify,
    /// How many connections there were; and before which of them nothing passes any more.
    connections: AtomicU64,
    swallowed: AtomicU64,
    cut: Notify,
}

impl Way {
    /// A way to the server on this port of the loopback.
    ///
    /// # Errors
    /// Where there is no free port.
    pub async fn to(server: u16) -> io::Result<Self> {
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
                // A connection that ends is no news here.
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

    /// Breaks at the next message that holds these octets.
    pub fn arm(&self, octets: &'static [u8], how: Break) {
        *self.shared.armed.lock().unwrap_or_else(PoisonError::into_inner) = Some((octets, how));
    }

    /// Waits until the message came by.
    pub async fn broken(&self) {
        self.shared.broken.notified().await;
    }

    /// Lets what is late happen.
    pub fn go_on(&self) {
        self.shared.go_on.notify_one();
    }

    /// Ends every connection that there is, on both sides.
    pub fn cut(&self) {
        self.shared.cut.notify_waiters();
    }

    /// Swallows everything on the connections that there are, in both directions, and ends none of them: as a firewall does
    /// that forgot them. New connections pass.
    pub fn swallow(&self) {
        self.shared.swallowed.store(self.shared.connections.load(Ordering::SeqCst), Ordering::SeqCst);
    }
}

impl Shared {
    fn breaks_at(&self, message: &[u8]) -> Option<Break> {
        let mut armed = self.armed.lock().unwrap_or_else(PoisonError::into_inner);
        let (octets, how) = (*armed)?;
        message.windows(octets.len()).any(|part| part == octets).then(|| {
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

/// Passes answers on. Ends with the connection that it belongs to.
struct Answers {
    task: JoinHandle<io::Result<(OwnedReadHalf, OwnedWriteHalf)>>,
    stop: Arc<Notify>,
}

impl Answers {
    fn pass(from: OwnedReadHalf, to: OwnedWriteHalf, shared: Arc<Shared>, number: u64) -> Self {
        let stop = Arc::new(Notify::new());
        Self { task: tokio::spawn(copy(from, to, stop.clone(), shared, number)), stop }
    }

    /// From here on no answer gets to the client.
    async fn stop(mut self) -> io::Result<(OwnedReadHalf, OwnedWriteHalf)> {
        self.stop.notify_one();
        (&mut self.task).await.map_err(io::Error::other)?
    }
}

impl Drop for Answers {
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
    let answers = Answers::pass(from_server, to_client, shared.clone(), number);
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
            Break::Slow => {
                shared.broken.notify_one();
                shared.go_on.notified().await;
                to_server.write_all(&message).await?;
            }
            Break::Hold => {
                shared.broken.notify_one();
                return until_the_end(&mut from_client).await;
            }
            Break::Sent => {
                send_whole(message, &mut from_client, &mut to_server).await?;
                let _from_server = answers.stop().await.map(|(from_server, to_client)| {
                    drop((from_client, to_client));
                    from_server
                })?;
                shared.broken.notify_one();
                shared.go_on.notified().await;
                return Ok(());
            }
            how => {
                let server = (answers.stop().await?, to_server);
                return break_at(&message, how, from_client, server, shared).await;
            }
        }
    }
}

/// A message, and those after it up to the one by which the client asks for an answer.
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
    how: Break,
    mut from_client: OwnedReadHalf,
    ((mut from_server, to_client), mut to_server): ((OwnedReadHalf, OwnedWriteHalf), OwnedWriteHalf),
    shared: &Shared,
) -> io::Result<()> {
    let mut answer = [0; 1024];
    if matches!(how, Break::After | Break::Silent) {
        to_server.write_all(message).await?;
        // Its answer says that the server has carried it out.
        let _length = from_server.read(&mut answer).await?;
    }
    if how == Break::Silent {
        shared.broken.notify_one();
        return until_the_end(&mut from_client).await;
    }
    drop((from_client, to_client));
    shared.broken.notify_one();
    if matches!(how, Break::Late | Break::LateEnd) {
        shared.go_on.notified().await;
    }
    if how == Break::Late {
        to_server.write_all(message).await?;
        let _length = from_server.read(&mut answer).await?;
    }
    Ok(())
}

/// Passes answers on until it is told to stop.
async fn copy(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    stop: Arc<Notify>,
    shared: Arc<Shared>,
    number: u64,
) -> io::Result<(OwnedReadHalf, OwnedWriteHalf)> {
    let mut octets = vec![0; 16 * 1024];
    loop {
        tokio::select! {
            () = stop.notified() => return Ok((from, to)),
            read = from.read(&mut octets) => match read? {
                0 => return Ok((from, to)),
                _ if shared.is_swallowed(number) => {}
                length => to.write_all(octets.get(..length).unwrap_or_default()).await?,
            },
        }
    }
}
