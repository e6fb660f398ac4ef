//! A TCP proxy between a library and its store, with the faults of a case: it knows the operations in the messages.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use oncegate_testkit::{Fault, Faults, Latch, Operation, until};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::sleep;

use crate::world::StoreKind;

/// The contract that every library has.
const CONTRACT: &str = include_str!("../../../sdk/go/contract.json");

/// The operations whose faults a library can have, with their names in the contracts.
const OPERATIONS: [(&str, Operation); 5] = [
    ("claim", Operation::Claim),
    ("renew", Operation::Renew),
    ("complete", Operation::Complete),
    ("release", Operation::Release),
    ("lookup", Operation::Lookup),
];

/// The codes of a first message that asks for encryption, by TLS and by GSSAPI.
const ENCRYPTION: [u32; 2] = [80_877_103, 80_877_104];

/// A proxy. It ends when it is dropped.
pub(crate) struct FaultyWire {
    /// The URL of the store behind it.
    pub(crate) url: String,
    address: SocketAddr,
    accepting: tokio::task::JoinHandle<()>,
}

impl FaultyWire {
    /// Starts a proxy to the store at this URL.
    pub(crate) async fn start(kind: StoreKind, url: &str, faults: Faults) -> Self {
        let socket = bound(([127, 0, 0, 1], 0).into()).expect("a free port");
        let address = socket.local_addr().expect("an address");
        let listener = socket.listen(1024).expect("a listener");
        let authority = url.split("://").nth(1).and_then(|rest| rest.split('/').next()).expect("a host");
        let host = authority.rsplit('@').next().expect("a host");
        let server: SocketAddr = host.parse().expect("a loopback address");
        let url = url.replacen(host, &address.to_string(), 1);
        let accepting = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            let mut listener = listener;
            while let Ok((client, _)) = listener.accept().await {
                if faults.strike(Operation::Check).is_some() {
                    // The store is away: this connection is cut, and no other one can be made. The address stays bound, so that
                    // no other program gets it meanwhile.
                    let socket = bound(address).expect("the same address");
                    drop((client, listener));
                    while faults.strike(Operation::Check).is_some() {
                        sleep(Duration::from_millis(5)).await;
                    }
                    listener = socket.listen(1024).expect("a listener");
                    continue;
                }
                let faults = faults.clone();
                connections.spawn(async move {
                    let _ = pass(kind, client, server, faults).await;
                });
            }
        });
        Self { url, address, accepting }
    }

    /// Waits until no connection can be made, in an outage. A connection that is made and cut is no sign of one.
    pub(crate) async fn until_refused(&self) {
        until("the store refuses connections", async || TcpStream::connect(self.address).await.is_err())
            .await;
    }
}

impl Drop for FaultyWire {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// A socket that is bound to an address, also while another one of this function listens there. Until it listens, it refuses
/// connections.
fn bound(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.set_reuseport(true)?;
    socket.bind(address)?;
    Ok(socket)
}

/// The fate of a reply.
enum Fate {
    Lost,
    Stalled(Latch),
}

/// The fates of replies by their numbers.
type Fates = Arc<Mutex<HashMap<u64, Fate>>>;

async fn pass(kind: StoreKind, client: TcpStream, server: SocketAddr, faults: Faults) -> io::Result<()> {
    let server = TcpStream::connect(server).await?;
    for stream in [&client, &server] {
        stream.set_nodelay(true)?;
    }
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let fates = Fates::default();
    let wire = Wire { faults, fates: fates.clone(), replies: 0 };
    // The connection ends with either direction.
    let (from_client, from_server) = (BufReader::new(from_client), BufReader::new(from_server));
    if kind == StoreKind::Redis {
        tokio::select! {
            ended = wire.redis(from_client, to_server) => ended,
            ended = redis_replies(from_server, to_client, fates) => ended,
        }
    } else {
        let to_client = Arc::new(tokio::sync::Mutex::new(to_client));
        tokio::select! {
            ended = wire.postgres(from_client, to_client.clone(), to_server) => ended,
            ended = postgres_replies(from_server, to_client, fates) => ended,
        }
    }
}

struct Wire {
    faults: Faults,
    fates: Fates,
    /// The number of replies that the client will get to what it has sent so far.
    replies: u64,
}

impl Wire {
    /// Lets an operation happen, or returns an error that ends the connection.
    async fn strike(&self, operation: Operation) -> io::Result<()> {
        let fate = match self.faults.strike(operation) {
            None => return Ok(()),
            Some(Fault::StallBefore(latch)) => {
                latch.opened().await;
                return Ok(());
            }
            Some(Fault::StallAfter(latch)) => Fate::Stalled(latch),
            Some(Fault::LoseReply) => Fate::Lost,
            Some(_) => return Err(io::ErrorKind::ConnectionAborted.into()),
        };
        lock(&self.fates).insert(self.replies, fate);
        Ok(())
    }

    async fn redis(mut self, mut from: BufReader<OwnedReadHalf>, mut to: OwnedWriteHalf) -> io::Result<()> {
        let contract: Value = serde_json::from_str(CONTRACT)?;
        let script = |(name, operation): (&str, Operation)| {
            let texts = contract["redis"][name].as_object().into_iter().flat_map(|script| script.values());
            let texts = texts.filter_map(Value::as_str).map(|text| (text.to_owned(), operation));
            texts.collect::<Vec<_>>()
        };
        let scripts: HashMap<String, Operation> = OPERATIONS.into_iter().flat_map(script).collect();
        loop {
            let mut words = Vec::new();
            let command = resp(&mut from, &mut words).await?;
            // EVALSHA or EVAL, then the script.
            let name =
                words.get(1).map(|word| String::from_utf8_lossy(word).into_owned()).unwrap_or_default();
            if let Some(operation) = scripts.get(&name) {
                self.strike(*operation).await?;
            }
            to.write_all(&command).await?;
            self.replies += 1;
        }
    }

    async fn postgres(
        mut self,
        mut from: BufReader<OwnedReadHalf>,
        to_client: Arc<tokio::sync::Mutex<OwnedWriteHalf>>,
        mut to: OwnedWriteHalf,
    ) -> io::Result<()> {
        loop {
            let first = message(&mut from, 0).await?;
            let code = first.get(4..8).and_then(|code| Some(u32::from_be_bytes(code.try_into().ok()?)));
            if code.is_some_and(|code| ENCRYPTION.contains(&code)) {
                to_client.lock().await.write_all(b"N").await?;
                continue;
            }
            to.write_all(&first).await?;
            // The server is ready once without a request.
            self.replies += 1;
            break;
        }
        let mut statements = HashMap::new();
        loop {
            let message = message(&mut from, 1).await?;
            let mut texts = message[5..].split(|byte| *byte == 0);
            let (one, two) = (texts.next().unwrap_or_default(), texts.next().unwrap_or_default());
            let operation = match message[0] {
                b'P' => {
                    statements.insert(one.to_vec(), operation_in(two));
                    None
                }
                // The portal, and then the statement.
                b'B' => statements.get(two).copied().flatten(),
                b'Q' => operation_in(one),
                _ => None,
            };
            if let Some(operation) = operation {
                self.strike(operation).await?;
            }
            to.write_all(&message).await?;
            if matches!(message[0], b'S' | b'Q') {
                self.replies += 1;
            }
        }
    }
}

/// The operation that a statement calls.
fn operation_in(statement: &[u8]) -> Option<Operation> {
    let statement = String::from_utf8_lossy(statement);
    let name = statement.split("oncegate.").nth(1)?;
    OPERATIONS.into_iter().find(|(own, _)| name.starts_with(own)).map(|(_, operation)| operation)
}

/// Lets a reply pass, perhaps later. An error if the connection ends instead.
async fn meet(fates: &Fates, number: u64) -> io::Result<()> {
    let fate = lock(fates).remove(&number);
    match fate {
        None => Ok(()),
        Some(Fate::Lost) => Err(io::ErrorKind::ConnectionAborted.into()),
        Some(Fate::Stalled(latch)) => {
            latch.opened().await;
            Ok(())
        }
    }
}

async fn redis_replies(
    mut from: BufReader<OwnedReadHalf>,
    mut to: OwnedWriteHalf,
    fates: Fates,
) -> io::Result<()> {
    for number in 0.. {
        let reply = resp(&mut from, &mut Vec::new()).await?;
        meet(&fates, number).await?;
        to.write_all(&reply).await?;
    }
    Ok(())
}

async fn postgres_replies(
    mut from: BufReader<OwnedReadHalf>,
    to: Arc<tokio::sync::Mutex<OwnedWriteHalf>>,
    fates: Fates,
) -> io::Result<()> {
    for number in 0.. {
        let mut reply = Vec::new();
        loop {
            let message = message(&mut from, 1).await?;
            reply.extend_from_slice(&message);
            // Before it is ready for the first time, the server asks for a password.
            if number == 0 {
                to.lock().await.write_all(&reply).await?;
                reply.clear();
            }
            // Ready for the next statement.
            if message[0] == b'Z' {
                break;
            }
        }
        meet(&fates, number).await?;
        to.lock().await.write_all(&reply).await?;
    }
    Ok(())
}

/// One message of PostgreSQL, whose length stands after its letter.
async fn message(from: &mut BufReader<OwnedReadHalf>, letter: usize) -> io::Result<Vec<u8>> {
    let mut message = vec![0; letter + 4];
    from.read_exact(&mut message).await?;
    let length = u32::from_be_bytes(message[letter..].try_into().expect("four bytes")) as usize;
    message.resize(letter + length, 0);
    from.read_exact(&mut message[letter + 4..]).await?;
    Ok(message)
}

/// One value of Redis, of RESP 2 or 3, with the texts in it.
async fn resp(from: &mut BufReader<OwnedReadHalf>, texts: &mut Vec<Vec<u8>>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut values = 1_usize;
    while values > 0 {
        values -= 1;
        let start = bytes.len();
        if from.read_until(b'\n', &mut bytes).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let line = String::from_utf8_lossy(&bytes[start..]).into_owned();
        let count = || line[1..].trim().parse::<isize>().ok().and_then(|count| usize::try_from(count).ok());
        match line.as_bytes()[0] {
            b'$' | b'=' | b'!' => {
                if let Some(length) = count() {
                    let start = bytes.len();
                    bytes.resize(start + length + 2, 0);
                    from.read_exact(&mut bytes[start..]).await?;
                    texts.push(bytes[start..start + length].to_vec());
                }
            }
            b'*' | b'~' | b'>' => values += count().unwrap_or(0),
            b'%' => values += 2 * count().unwrap_or(0),
            b'|' => values += 2 * count().unwrap_or(0) + 1,
            _ => {}
        }
    }
    Ok(bytes)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
