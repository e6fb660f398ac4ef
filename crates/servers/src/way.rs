//! A way to a PostgreSQL server that breaks at a chosen message.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

/// What happens to the one message that the way waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Break {
    /// The server never gets it; both connections end.
    Before,
    /// The server carries it out; the client's connection ends before the answer.
    After,
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
}

impl Way {
    /// A way to the server on this port of the loopback.
    ///
    /// # Errors
    /// Where there is no free port.
    pub async fn to(server: u16) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let port = listener.local_addr()?.port();
        let shared =
            Arc::new(Shared { server, armed: Mutex::new(None), broken: Notify::new(), go_on: Notify::new() });
        let all = shared.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let shared = all.clone();
                // A connection that ends is no news here.
                tokio::spawn(async move { drop(pass(client, shared).await) });
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

async fn pass(client: TcpStream, shared: Arc<Shared>) -> io::Result<()> {
    let server = TcpStream::connect(("127.0.0.1", shared.server)).await?;
    for stream in [&client, &server] {
        stream.set_nodelay(true)?;
    }
    let (mut from_client, to_client) = client.into_split();
    let (from_server, mut to_server) = server.into_split();
    // The first message has no letter.
    let mut letter = 0;
    let stop = Arc::new(Notify::new());
    let answers = tokio::spawn(copy(from_server, to_client, stop.clone()));
    loop {
        let message = message(&mut from_client, letter).await?;
        let how = if letter == 0 { None } else { shared.breaks_at(&message) };
        letter = 1;
        let Some(how) = how else {
            to_server.write_all(&message).await?;
            continue;
        };
        if how == Break::Slow {
            shared.broken.notify_one();
            shared.go_on.notified().await;
            to_server.write_all(&message).await?;
            continue;
        }
        if how == Break::Hold {
            shared.broken.notify_one();
            return until_the_end(&mut from_client).await;
        }
        // From here on no answer gets to the client.
        stop.notify_one();
        let (mut from_server, to_client) = answers.await.map_err(io::Error::other)??;
        let mut answer = [0; 1024];
        match how {
            Break::After | Break::Silent => {
                to_server.write_all(&message).await?;
                // Its answer says that the server has carried it out.
                let _length = from_server.read(&mut answer).await?;
            }
            _ => {}
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
            to_server.write_all(&message).await?;
            let _length = from_server.read(&mut answer).await?;
        }
        return Ok(());
    }
}

/// Passes answers on until it is told to stop.
async fn copy(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    stop: Arc<Notify>,
) -> io::Result<(OwnedReadHalf, OwnedWriteHalf)> {
    let mut octets = vec![0; 16 * 1024];
    loop {
        tokio::select! {
            () = stop.notified() => return Ok((from, to)),
            read = from.read(&mut octets) => match read? {
                0 => return Ok((from, to)),
                length => to.write_all(octets.get(..length).unwrap_or_default()).await?,
            },
        }
    }
}
