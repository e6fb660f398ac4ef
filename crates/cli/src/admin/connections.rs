//! The connections of the admin address: limits under which health checks are answered, whatever other clients do.
//!
//! A listener knows only the address of a client before it has read the head of a request. So no connection is refused because
//! others exist: a new one is accepted, and if there are too many, one that waits for its client is closed. What a connection
//! waits for decides how long it may last, and when it gives its place to another one:
//!
//! | the connection | is closed after | gives its place to another one |
//! |---|---|---|
//! | sends health checks without a pause | | at once, before all others |
//! | waits for the head of a request, also between two requests | [`HEAD_TIMEOUT`] | at once |
//! | waits for more of the body of a request | [`BODY_TIMEOUT`] | after [`STALL`] |
//! | waits until its client takes more of a response | [`WRITE_TIMEOUT`], [`STREAM_TIMEOUT`] | after [`STALL`] |
//! | answers `/livez`, `/readyz` or `/metrics` | | at once, after all others |
//! | executes another request | | never |
//!
//! The client with the most connections loses one first, and of its connections the one that waits for the longest time. A
//! request that executes is never ended, so their number has a limit of its own ([`Pool`]), lower than that of connections.
//!
//! Health checks need no token, and all connections share one thread. So after each of them other connections have their turn,
//! and a client that sends more health checks on one connection than [`HEALTH_BURST`] waits [`HEALTH_INTERVAL`] for each.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use oncegate_engine::LogThrottle;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::time::Instant;

/// The most connections. Each is an open file, for which the limits of the proxy leave enough.
pub(crate) const MAX_CONNECTIONS: usize = 128;

/// The most connections of one client. All programs on this machine are one, and half of the connections is left to others.
const MAX_CONNECTIONS_PER_CLIENT: usize = MAX_CONNECTIONS / 2;

/// Limits the time for the head of a request, and the time between two requests.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Limits the time for a whole request with its body. Longer than the limits of the dashboard, whose pages explain theirs.
const BODY_TIMEOUT: Duration = Duration::from_secs(90);

/// Limits the time in which a client takes no byte of a response.
const WRITE_TIMEOUT: Duration = Duration::from_secs(20);

/// The same for the live feed and for backups: their readers write to pagers and to disks, which may hang for a while.
const STREAM_TIMEOUT: Duration = Duration::from_secs(60);

/// The time after which a connection that waits for its client may be closed for another one. Clients that read and send need
/// less, also over long distances.
const STALL: Duration = Duration::from_secs(1);

/// The health checks that a connection may send without a pause, and the interval between further ones. Orchestrators and
/// Prometheus ask once in a second at most.
const HEALTH_BURST: u32 = 32;
const HEALTH_INTERVAL: Duration = Duration::from_millis(20);

/// The interval in which a connection checks its time limits.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The interval of the warnings about limits that are reached.
const FULL_WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// The kind of a request, as far as limits need it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Orchestrators and Prometheus ask. The response does not depend on anything that can take long.
    Health,
    /// Anyone may send a login, also without a token.
    Login,
    /// The live feed, or a backup.
    Stream,
    Other,
}

/// Requests that share a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pool {
    /// Apart from all others, because no token is needed to take a place.
    Logins,
    Requests,
}

impl Kind {
    fn of(path: &str) -> Self {
        match path {
            "/livez" | "/readyz" | "/metrics" => Self::Health,
            "/login" => Self::Login,
            "/v1/activity" | "/v1/backup" => Self::Stream,
            _ => Self::Other,
        }
    }

    const fn pool(self) -> Option<Pool> {
        match self {
            Self::Health => None,
            Self::Login => Some(Pool::Logins),
            Self::Stream | Self::Other => Some(Pool::Requests),
        }
    }

    const fn write_timeout(self) -> Duration {
        match self {
            Self::Stream => STREAM_TIMEOUT,
            _ => WRITE_TIMEOUT,
        }
    }
}

impl Pool {
    /// The most requests at a time. Both together are fewer than the connections, and so are those of one client.
    const fn max(self) -> usize {
        match self {
            Self::Logins => 16,
            Self::Requests => 64,
        }
    }

    const fn max_per_client(self) -> usize {
        self.max() / 2
    }
}

/// The place of a request that may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Begun {
    pub(super) place: Place,
    /// The pause before it begins, while other connections have their turn. `None` if it begins at once: the connection of an
    /// orchestrator may be closed for another one until its response is written.
    pub(super) pause: Option<Duration>,
}

/// The reason why a request does not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoPlace {
    /// All places are taken by requests that execute.
    Busy,
    /// The connection has lost its place to another one, and ends now.
    Closed,
}

/// The thread that executes a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// That of the connections.
    Here,
    /// The one for requests that may need a lot of computing time.
    Worker,
}

/// The connections that are open. All clones share them.
#[derive(Clone, Debug)]
pub(super) struct AdminConnections(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    table: Mutex<Table>,
    warnings: LogThrottle,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    entries: HashMap<u64, Entry>,
}

#[derive(Debug)]
struct Entry {
    client: IpAddr,
    phase: Phase,
    /// The time since which the client takes nothing of a response.
    unread_since: Option<Instant>,
    /// The time since which the client sends nothing of a body that is wanted.
    unsent_since: Option<Instant>,
    /// The time at which the health checks so far have used up their intervals.
    health_due: Instant,
    /// Notified when this is removed for another connection.
    closed: Arc<Notify>,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// Waits for the head of a request since then.
    Head(Instant),
    /// A request is executed, or its response is sent.
    Request {
        kind: Kind,
        since: Instant,
        /// True if the response has ended, except for bytes that the socket has not taken.
        is_answered: bool,
    },
}

impl Entry {
    fn pool(&self) -> Option<Pool> {
        match self.phase {
            Phase::Head(_) => None,
            Phase::Request { kind, .. } => kind.pool(),
        }
    }

    /// The time since which the connection waits for its client, if it may be closed for another one: the lower the number, the
    /// sooner.
    fn expendable(&self, now: Instant) -> Option<(u8, Instant)> {
        let stalled = [self.unread_since, self.unsent_since].into_iter().flatten().min();
        let stalled = stalled.filter(|since| now.duration_since(*since) >= STALL);
        // Its health checks wait for each other, so it would hold its place, while that of an orchestrator has no request yet.
        let is_paced = self.health_due.saturating_duration_since(now) >= HEALTH_INTERVAL * HEALTH_BURST;
        match (self.phase, stalled) {
            (Phase::Head(since) | Phase::Request { kind: Kind::Health, since, .. }, _) if is_paced => {
                Some((0, since))
            }
            (Phase::Head(since), _) => Some((1, since)),
            (_, Some(since)) => Some((2, since)),
            (Phase::Request { kind: Kind::Health, since, .. }, None) => Some((3, since)),
            (Phase::Request { .. }, None) => None,
        }
    }

    /// The pause before a health check; `None` for the first one in a while.
    fn pause(&mut self, now: Instant) -> Option<Duration> {
        let due = self.health_due.max(now);
        self.health_due = due + HEALTH_INTERVAL;
        let ahead = due.duration_since(now);
        (!ahead.is_zero()).then(|| ahead.saturating_sub(HEALTH_INTERVAL * HEALTH_BURST))
    }

    /// The reason why the time of the connection is over.
    fn overdue(&self, now: Instant) -> Option<&'static str> {
        let is_over = |since: Instant, limit| now.duration_since(since) >= limit;
        match self.phase {
            Phase::Head(since) => is_over(since, HEAD_TIMEOUT).then_some("no request came in time"),
            Phase::Request { kind, since, .. } => {
                if self.unread_since.is_some_and(|since| is_over(since, kind.write_timeout())) {
                    return Some("the client took nothing of a response for too long");
                }
                let is_late = self.unsent_since.is_some() && is_over(since, BODY_TIMEOUT);
                is_late.then_some("the body of a request did not come in time")
            }
        }
    }
}

impl Table {
    /// Removes the connection that costs the least, of those that `may` be removed. Returns false if there is none.
    fn evict(&mut self, now: Instant, may: impl Fn(&u64, &Entry) -> bool) -> bool {
        let mut by_client: HashMap<IpAddr, usize> = HashMap::new();
        for entry in self.entries.values() {
            *by_client.entry(entry.client).or_default() += 1;
        }
        let candidates = self.entries.iter().filter(|(id, entry)| may(id, entry));
        let candidates = candidates.filter_map(|(id, entry)| {
            let (class, since) = entry.expendable(now)?;
            let count = by_client.get(&entry.client).copied().unwrap_or_default();
            Some((std::cmp::Reverse(count), class, since, *id))
        });
        let Some((.., id)) = candidates.min() else { return false };
        if let Some(entry) = self.entries.remove(&id) {
            entry.closed.notify_one();
        }
        true
    }

    /// The numbers of all entries, and of those of this client.
    fn count(&self, client: IpAddr, counts: impl Fn(&u64, &Entry) -> bool) -> (usize, usize) {
        let counted = self.entries.iter().filter(|(id, entry)| counts(id, entry));
        counted.fold((0, 0), |(all, own), (_, entry)| (all + 1, own + usize::from(entry.client == client)))
    }
}

impl Default for AdminConnections {
    fn default() -> Self {
        let warnings = LogThrottle::new(FULL_WARNING_INTERVAL);
        Self(Arc::new(Inner { table: Mutex::default(), warnings }))
    }
}

impl AdminConnections {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for a connection of this client, if need be that of another one. `None` if no other one may be closed, which
    /// the limits of requests exclude.
    pub(super) fn admit(&self, client: IpAddr) -> Option<Connection> {
        let (client, now) = (network_of(client), Instant::now());
        let mut table = self.lock();
        let (all, own) = table.count(client, |_, _| true);
        if own >= MAX_CONNECTIONS_PER_CLIENT || all >= MAX_CONNECTIONS {
            if let Some(suppressed) = self.0.warnings.pass() {
                tracing::warn!(
                    suppressed, %client, connections = all, of_this_client = own,
                    "the admin address has as many connections as it may have; those that wait for their clients are closed for new ones"
                );
            }
            let is_of_client = own >= MAX_CONNECTIONS_PER_CLIENT;
            if !table.evict(now, |_, entry| !is_of_client || entry.client == client) {
                return None;
            }
        }
        let id = table.next;
        table.next += 1;
        let closed = Arc::new(Notify::new());
        let entry = Entry {
            client,
            phase: Phase::Head(now),
            unread_since: None,
            unsent_since: None,
            health_due: now,
            closed: closed.clone(),
        };
        table.entries.insert(id, entry);
        Some(Connection { all: self.clone(), id, closed })
    }
}

/// The network that one client usually controls: an IPv4 address, or 64 bits of an IPv6 address.
pub(super) fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
    }
}

/// A connection that was admitted. Its place is free when the [`AdminStream`] is dropped.
#[derive(Clone, Debug)]
pub(super) struct Connection {
    all: AdminConnections,
    id: u64,
    closed: Arc<Notify>,
}

impl Connection {
    fn change(&self, change: impl FnOnce(&mut Entry)) {
        // Without an entry, the connection is about to be closed.
        if let Some(entry) = self.all.lock().entries.get_mut(&self.id) {
            change(entry);
        }
    }

    /// Takes a place for a request, if need be that of one whose client does not read or send.
    ///
    /// # Errors
    /// [`NoPlace`], with the reason.
    pub(super) fn begin(&self, path: &str) -> Result<Begun, NoPlace> {
        let (kind, now) = (Kind::of(path), Instant::now());
        let mut table = self.all.lock();
        let client = table.entries.get(&self.id).ok_or(NoPlace::Closed)?.client;
        if let Some(pool) = kind.pool() {
            let is_other = |id: &u64, entry: &Entry| *id != self.id && entry.pool() == Some(pool);
            let (all, own) = table.count(client, is_other);
            let is_of_client = own >= pool.max_per_client();
            let is_full = is_of_client || all >= pool.max();
            let may =
                |id: &u64, entry: &Entry| is_other(id, entry) && (!is_of_client || entry.client == client);
            if is_full && !table.evict(now, may) {
                if let Some(entry) = table.entries.get_mut(&self.id) {
                    entry.phase = Phase::Head(now);
                }
                return Err(NoPlace::Busy);
            }
        }
        let mut begun = Begun { place: Place::Worker, pause: None };
        if let Some(entry) = table.entries.get_mut(&self.id) {
            entry.phase = Phase::Request { kind, since: now, is_answered: false };
            entry.unsent_since = None;
            if kind == Kind::Health {
                begun = Begun { place: Place::Here, pause: entry.pause(now) };
            }
        }
        Ok(begun)
    }

    /// Ready when the connection has to be closed, with the reason.
    pub(super) async fn ended(&self) -> &'static str {
        loop {
            if tokio::time::timeout(CHECK_INTERVAL, self.closed.notified()).await.is_ok() {
                return "it was closed for another one";
            }
            let now = Instant::now();
            if let Some(why) = self.all.lock().entries.get(&self.id).and_then(|entry| entry.overdue(now)) {
                return why;
            }
        }
    }
}

/// A socket that notes what its client does not read.
pub(super) struct AdminStream<S> {
    stream: S,
    connection: Connection,
    is_unread: bool,
}

impl<S> AdminStream<S> {
    pub(super) const fn new(stream: S, connection: Connection) -> Self {
        Self { stream, connection, is_unread: false }
    }

    /// Notes if a write waits. Each byte that the client takes begins a new wait.
    fn noted<T>(&mut self, written: Poll<T>) -> Poll<T> {
        match (&written, self.is_unread) {
            (Poll::Pending, false) => {
                self.is_unread = true;
                self.connection.change(|entry| entry.unread_since = Some(Instant::now()));
            }
            (Poll::Ready(_), true) => {
                self.is_unread = false;
                self.connection.change(|entry| entry.unread_since = None);
            }
            _ => {}
        }
        written
    }
}

impl<S> Drop for AdminStream<S> {
    fn drop(&mut self) {
        self.connection.all.lock().entries.remove(&self.connection.id);
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for AdminStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AdminStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.noted(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.noted(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// Called when nothing is left to write: a response that has ended is delivered to the socket.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        if flushed.is_ready() {
            self.connection.change(|entry| {
                if let Phase::Request { is_answered: true, .. } = entry.phase {
                    entry.phase = Phase::Head(Instant::now());
                }
            });
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// The body of a request, which notes that its client does not send it.
pub(super) struct RequestBody<B> {
    body: B,
    connection: Connection,
    is_unsent: bool,
}

impl<B> RequestBody<B> {
    pub(super) const fn new(body: B, connection: Connection) -> Self {
        Self { body, connection, is_unsent: false }
    }

    fn note(&mut self, is_unsent: bool) {
        if self.is_unsent != is_unsent {
            self.is_unsent = is_unsent;
            let since = is_unsent.then(Instant::now);
            self.connection.change(|entry| entry.unsent_since = since);
        }
    }
}

impl<B> Drop for RequestBody<B> {
    fn drop(&mut self) {
        self.note(false);
    }
}

impl<B: HttpBody + Unpin> HttpBody for RequestBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        self.note(frame.is_pending());
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of a response, which notes its end.
pub(super) struct ResponseBody {
    body: Body,
    connection: Connection,
    /// The place of a large response.
    _place: Option<OwnedSemaphorePermit>,
}

impl ResponseBody {
    pub(super) const fn new(body: Body, connection: Connection, place: Option<OwnedSemaphorePermit>) -> Self {
        Self { body, connection, _place: place }
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        self.connection.change(|entry| {
            if let Phase::Request { is_answered, .. } = &mut entry.phase {
                *is_answered = true;
            }
        });
    }
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests;
