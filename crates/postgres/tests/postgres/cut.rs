//! A way to the server that breaks at a chosen message.

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

/// What happens to the one message that the way waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Break {
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
}

/// A TCP proxy between a client and the server.
pub(crate) struct Way {
    pub(crate) port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    server: u16,
    /// What the message starts with, and what happens to it; the first one only.
    armed: Mutex<Option<(&'static [u8], Break)>>,
    broken: Notify,
    go_on: Notify,
}

impl Way {
    pub(crate) async fn to(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
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
        Self { port, shared }
    }

    pub(crate) fn arm(&self, message: &'static [u8], how: Break) {
        *self.shared.armed.lock().unwrap() = Some((message, how));
    }

    /// Waits until the message came by.
    pub(crate) async fn broken(&self) {
        self.shared.broken.notified().await;
    }

    /// Lets what is late happen.
    pub(crate) fn go_on(&self) {
        self.shared.go_on.notify_one();
    }
}

async fn pass(client: TcpStream, shared: Arc<Shared>) -> std::io::Result<()> {
    let server = TcpStream::connect(("127.0.0.1", shared.server)).await?;
    for stream in [&client, &server] {
        stream.set_nodelay(true)?;
    }
    let (mut from_client, to_client) = client.into_split();
    let (from_server, mut to_server) = server.into_split();
    // The first message has no letter.
    let mut letter = false;
    let stop = Arc::new(Notify::new());
    let answers = tokio::spawn(copy(from_server, to_client, stop.clone()));
    loop {
        let mut message = vec![0; usize::from(letter) + 4];
        from_client.read_exact(&mut message).await?;
        let length = u32::from_be_bytes(*message.last_chunk().unwrap()) as usize - 4;
        let start = message.len();
        message.resize(start + length, 0);
        from_client.read_exact(&mut message[start..]).await?;
        let how = {
            let mut armed = shared.armed.lock().unwrap();
            let is_it = letter && armed.is_some_and(|(text, _)| message[start..].starts_with(text));
            if is_it { armed.take().map(|(_, how)| how) } else { None }
        };
        letter = true;
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
        // From here on no answer gets to the client.
        stop.notify_one();
        let (mut from_server, to_client) = answers.await.unwrap()?;
        let mut answer = [0; 1024];
        match how {
            Break::After | Break::Silent => {
                to_server.write_all(&message).await?;
                assert!(from_server.read(&mut answer).await? > 0, "the server carries it out");
            }
            _ => {}
        }
        if how == Break::Silent {
            shared.broken.notify_one();
            // Until the client gives up.
            let _ = from_client.read(&mut answer).await;
            return Ok(());
        }
        drop((from_client, to_client));
        shared.broken.notify_one();
        if matches!(how, Break::Late | Break::LateEnd) {
            shared.go_on.notified().await;
        }
        if how == Break::Late {
            to_server.write_all(&message).await?;
            let _ = from_server.read(&mut answer).await?;
        }
        return Ok(());
    }
}

/// Passes answers on until it is told to stop.
async fn copy(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    stop: Arc<Notify>,
) -> std::io::Result<(OwnedReadHalf, OwnedWriteHalf)> {
    let mut octets = vec![0; 16 * 1024];
    loop {
        tokio::select! {
            () = stop.notified() => return Ok((from, to)),
            read = from.read(&mut octets) => match read? {
                0 => return Ok((from, to)),
                length => to.write_all(&octets[..length]).await?,
            },
        }
    }
}
