//! A proxy between a service and its database that can stop the service at its commit.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::support::within;

/// The treatment of a `COMMIT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gate {
    /// It passes.
    Open,
    /// It does not reach the database: everything before it has been executed.
    BeforeCommit,
    /// It reaches the database, but its reply does not return.
    AfterCommit,
    /// Held connections are closed.
    Cut,
}

pub(crate) struct Relay {
    pub(crate) address: SocketAddr,
    gate: watch::Sender<Gate>,
    /// The numbers of connections that have reached their `COMMIT`, and of those that are held before it.
    held: watch::Receiver<(usize, usize)>,
}

impl Relay {
    pub(crate) async fn to(port: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (gate, gates) = watch::channel(Gate::Open);
        let (holding, held) = watch::channel((0, 0));
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
                let ((from_client, to_client), (from_server, to_server)) =
                    (client.into_split(), server.into_split());
                // Whether a COMMIT of this connection is on its way.
                let (committing, commits) = watch::channel(false);
                tokio::spawn(ask(from_client, to_server, gates.clone(), holding.clone(), committing));
                tokio::spawn(answer(from_server, to_client, gates.clone(), commits));
            }
        });
        Self { address, gate, held }
    }

    pub(crate) fn set(&self, gate: Gate) {
        self.gate.send_replace(gate);
    }

    /// Closes held connections; for all others the gate is open.
    pub(crate) async fn cut(&mut self) {
        self.set(Gate::Cut);
        within("the end of connections", self.held.wait_for(|(_, now)| *now == 0)).await.unwrap();
        self.set(Gate::Open);
    }

    /// Waits until this many connections have reached their `COMMIT` while the gate was not open.
    pub(crate) async fn holds(&mut self, count: usize) {
        within("a COMMIT", self.held.wait_for(|(all, _)| *all >= count)).await.unwrap();
    }
}

async fn ask(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut gates: watch::Receiver<Gate>,
    holding: watch::Sender<(usize, usize)>,
    committing: watch::Sender<bool>,
) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        let bytes = &buffer[..count];
        let gate = *gates.borrow();
        if gate != Gate::Open && bytes.windows(6).any(|window| window == b"COMMIT") {
            committing.send_replace(true);
            let before = usize::from(gate == Gate::BeforeCommit);
            holding.send_modify(|(all, now)| (*all, *now) = (*all + 1, *now + before));
            if gate == Gate::BeforeCommit {
                let is_cut = is_cut(&mut gates, gate).await;
                holding.send_modify(|(_, now)| *now -= 1);
                if is_cut {
                    return;
                }
            }
        }
        if to.write_all(bytes).await.is_err() {
            return;
        }
    }
}

async fn answer(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut gates: watch::Receiver<Gate>,
    commits: watch::Receiver<bool>,
) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        let is_committing = *commits.borrow();
        if is_committing && is_cut(&mut gates, Gate::AfterCommit).await {
            return;
        }
        if to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}

/// Waits until the gate changes; returns whether that closes the connection. The end of the test closes it, too.
async fn is_cut(gates: &mut watch::Receiver<Gate>, held: Gate) -> bool {
    gates.wait_for(|gate| *gate != held).await.map_or(true, |gate| *gate == Gate::Cut)
}
