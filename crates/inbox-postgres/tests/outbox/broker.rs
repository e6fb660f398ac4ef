//! A broker that records messages, and fails on command. Relays of this process call it, and others use TCP.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write as _;
use std::future::pending;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_inbox::{Outgoing, PublishError, PublishFuture, Publisher};
use oncegate_testkit::{Latch, until};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

/// The treatment of a message.
#[derive(Clone)]
pub(crate) enum Fault {
    None,
    /// It is taken, and confirmed after a while.
    Late(Duration),
    /// It is taken, and confirmed when the latch is open.
    Held(Latch),
    /// It is taken, and the confirmation is lost.
    Unconfirmed,
    /// It is not taken.
    Lost,
    /// It is not taken now, but a while after the relay got the error.
    Afterwards(Duration),
    /// The broker takes the message and never answers.
    Hang,
    Refused,
    Panic,
}

/// A message that was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) id: String,
    pub(crate) topic: String,
    pub(crate) key: Option<String>,
    pub(crate) payload: String,
}

type Fails = dyn Fn(&Taken, usize) -> Fault + Send + Sync;

#[derive(Clone)]
pub(crate) struct Broker(Arc<Inner>);

struct Inner {
    /// The received messages. The log itself also has copies.
    log: Mutex<Vec<Taken>>,
    tried: Mutex<HashMap<String, usize>>,
    /// The fault for a message, from its content and the number of earlier tries.
    fault: Box<Fails>,
}

impl Broker {
    pub(crate) fn new(fault: impl Fn(&Taken, usize) -> Fault + Send + Sync + 'static) -> Self {
        Self(Arc::new(Inner { log: Mutex::default(), tried: Mutex::default(), fault: Box::new(fault) }))
    }

    pub(crate) fn good() -> Self {
        Self::new(|_, _| Fault::None)
    }

    pub(crate) fn log(&self) -> Vec<Taken> {
        self.0.log.lock().unwrap().clone()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.log.lock().unwrap().len()
    }

    /// Returns the number of different messages.
    pub(crate) fn distinct(&self) -> usize {
        self.0.log.lock().unwrap().iter().map(|taken| &taken.id).collect::<HashSet<_>>().len()
    }

    /// Returns how often a message was tried, with any result.
    pub(crate) fn tried(&self, id: &str) -> usize {
        self.0.tried.lock().unwrap().get(id).copied().unwrap_or_default()
    }

    /// Returns the payloads of each key, at their first occurrence.
    pub(crate) fn firsts(&self) -> BTreeMap<Option<String>, Vec<String>> {
        let mut seen = HashSet::new();
        let mut firsts: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for taken in self.log() {
            if seen.insert(taken.id) {
                firsts.entry(taken.key).or_default().push(taken.payload);
            }
        }
        firsts
    }

    pub(crate) async fn holds(&self, messages: usize) {
        until(&format!("{messages} messages are at the broker"), async || self.distinct() >= messages).await;
    }

    async fn take(&self, taken: Taken) -> Result<(), &'static str> {
        let times = {
            let mut tried = self.0.tried.lock().unwrap();
            let times = tried.entry(taken.id.clone()).or_default();
            *times += 1;
            *times - 1
        };
        let fault = (self.0.fault)(&taken, times);
        let keep = |taken| self.0.log.lock().unwrap().push(taken);
        match fault {
            Fault::None => keep(taken),
            Fault::Late(late) => {
                keep(taken);
                sleep(late).await;
            }
            Fault::Held(latch) => {
                keep(taken);
                latch.opened().await;
            }
            Fault::Unconfirmed => {
                keep(taken);
                return Err("unconfirmed");
            }
            Fault::Lost => return Err("unconfirmed"),
            Fault::Afterwards(late) => {
                let broker = self.clone();
                tokio::spawn(async move {
                    sleep(late).await;
                    broker.0.log.lock().unwrap().push(taken);
                });
                return Err("unconfirmed");
            }
            Fault::Hang => {
                keep(taken);
                return pending().await;
            }
            Fault::Refused => return Err("refused"),
            Fault::Panic => panic!("the publisher of a test panics"),
        }
        Ok(())
    }

    /// Starts a listener for other processes, and returns its address.
    pub(crate) async fn listen(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let broker = self.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(broker.clone().serve(stream));
            }
        });
        address
    }

    async fn serve(self, stream: TcpStream) {
        stream.set_nodelay(true).unwrap();
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        while stream.read_line(&mut line).await.is_ok_and(|read| read > 0 && line.ends_with('\n')) {
            let fields: Vec<_> = line.trim_end().split('\t').map(str::to_owned).collect();
            let [id, topic, key, payload] = <[String; 4]>::try_from(fields).unwrap();
            let key = Some(key).filter(|key| key != "-");
            let said = self.take(Taken { id, topic, key, payload }).await.err().unwrap_or("confirmed");
            if stream.write_all(format!("{said}\n").as_bytes()).await.is_err() {
                return;
            }
            line.clear();
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn taken(message: &Outgoing) -> Taken {
    Taken {
        id: message.id.clone(),
        topic: message.topic.clone(),
        key: message.order_key.as_deref().map(text),
        payload: text(&message.payload),
    }
}

impl Publisher for Broker {
    fn publish<'a>(&'a self, message: &'a Outgoing) -> PublishFuture<'a> {
        Box::pin(async { published(self.take(taken(message)).await.err().unwrap_or("confirmed")) })
    }
}

fn published(said: &str) -> Result<(), PublishError> {
    match said {
        "confirmed" => Ok(()),
        "refused" => Err(PublishError::refused("it does not take this")),
        other => Err(PublishError::unconfirmed(other.to_owned())),
    }
}

/// Reaches a broker in another process.
pub(crate) struct Remote {
    address: SocketAddr,
    idle: Mutex<Vec<BufReader<TcpStream>>>,
}

impl Remote {
    pub(crate) fn new(address: SocketAddr) -> Self {
        Self { address, idle: Mutex::default() }
    }

    async fn send(&self, message: &Outgoing) -> std::io::Result<String> {
        let idle = self.idle.lock().unwrap().pop();
        let mut stream = match idle {
            Some(stream) => stream,
            None => BufReader::new(TcpStream::connect(self.address).await?),
        };
        stream.get_mut().set_nodelay(true)?;
        let Taken { id, topic, key, payload } = taken(message);
        let mut line = String::new();
        writeln!(line, "{id}\t{topic}\t{}\t{payload}", key.as_deref().unwrap_or("-")).unwrap();
        stream.write_all(line.as_bytes()).await?;
        line.clear();
        stream.read_line(&mut line).await?;
        self.idle.lock().unwrap().push(stream);
        Ok(line.trim_end().to_owned())
    }
}

impl Publisher for Remote {
    fn publish<'a>(&'a self, message: &'a Outgoing) -> PublishFuture<'a> {
        Box::pin(async { published(&self.send(message).await.map_err(PublishError::unconfirmed)?) })
    }
}
