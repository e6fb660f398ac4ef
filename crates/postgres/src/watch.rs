//! The session that listens: those who wait for a record of another process are told by the database.
//!
//! There is one for all who wait, and only while somebody does. Nothing rests on it: where it is lost, those who wait ask
//! the database now and then, as they do in any case.

use std::collections::HashSet;
use std::future::{Future, pending};
use std::io::ErrorKind;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use oncegate_core::{RecordId, Watchers};
use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use sqlx::{Acquire as _, Connection as _, Error};
use tokio::runtime::Handle;
use tokio::time::{self, Instant, interval_at, sleep};

use crate::call::{Arg, Call};
use crate::error::describe;
use crate::options::PostgresOptions;
use crate::record;

const CHANNEL: &str = "oncegate_1";

/// The server has a place for 64 locks for each connection that it allows, all together. Half of what is ours in it.
const WATCHED_PER_CONNECTION: u32 = 32;
const WATCHED_MAX: usize = 1024;

/// The most records in one call.
const CALL_MAX: usize = 256;

/// Pauses between attempts to connect.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_LAST: Duration = Duration::from_secs(5);

/// How often a silent session is looked at: a connection may be gone without a word, and one that nobody needs is closed.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// How long a session that is given up may take to close.
const CLOSING: Duration = Duration::from_secs(1);

/// Listens for a store, from the first one who waits until the store is gone.
pub(crate) struct ChangeListener {
    watchers: Watchers,
    connect: PgConnectOptions,
    timeout: Duration,
    is_started: AtomicBool,
}

impl ChangeListener {
    /// `None` behind a pooler that keeps no session.
    pub(crate) fn new(options: &PostgresOptions) -> Option<Self> {
        if options.transaction_pooler {
            return None;
        }
        let most = (options.pool_size.saturating_add(1)).saturating_mul(WATCHED_PER_CONNECTION);
        Some(Self {
            watchers: Watchers::new(usize::try_from(most).unwrap_or(WATCHED_MAX).min(WATCHED_MAX)),
            connect: options.listen_options(),
            timeout: options.connect_timeout + options.statement_timeout,
            is_started: AtomicBool::new(false),
        })
    }

    /// Waits to be told of this record. Never told where too many wait already.
    pub(crate) fn changed(&self, id: RecordId, runtime: &Handle) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let Some(watcher) = self.watchers.watch(id) else { return Box::pin(pending()) };
        if !self.is_started.swap(true, Ordering::Relaxed) {
            runtime.spawn(listen(self.watchers.clone(), self.connect.clone(), self.timeout));
        }
        Box::pin(watcher)
    }

    pub(crate) fn close(&self) {
        self.watchers.close();
    }
}

impl Drop for ChangeListener {
    fn drop(&mut self) {
        self.close();
    }
}

/// Why a session ended, if it was not lost.
enum SessionEnd {
    /// Nobody waits.
    Idle,
    /// The store is gone.
    Closed,
}

async fn listen(watchers: Watchers, connect: PgConnectOptions, timeout: Duration) {
    let mut pause = PAUSE_FIRST;
    let mut was_lost = false;
    loop {
        while watchers.is_empty() {
            if watchers.changes().await.is_none() {
                return;
            }
        }
        let mut heard = false;
        match session(&watchers, &connect, timeout, was_lost, &mut heard).await {
            Ok(SessionEnd::Closed) => return,
            Ok(SessionEnd::Idle) => was_lost = false,
            Err(error) => {
                if heard || !was_lost {
                    tracing::warn!(
                        error = describe(&error),
                        "PostgreSQL cannot tell what happens in other processes; those who wait ask now and then"
                    );
                    pause = PAUSE_FIRST;
                }
                was_lost = true;
                sleep(pause).await;
                pause = (pause * 2).min(PAUSE_LAST);
            }
        }
    }
}

/// One session, until it is lost or nobody needs it. `heard` tells that it was there.
async fn session(
    watchers: &Watchers,
    connect: &PgConnectOptions,
    timeout: Duration,
    was_lost: bool,
    heard: &mut bool,
) -> Result<SessionEnd, Error> {
    // Of its own, so that the commands' connections stay what they are for.
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .acquire_timeout(timeout)
        .test_before_acquire(false)
        .idle_timeout(None)
        .max_lifetime(None)
        .connect_lazy_with(connect.clone());
    let result = match PgListener::connect_with(&pool).await {
        Ok(listener) => {
            Session { listener, watchers, timeout, watched: HashSet::new() }.run(was_lost, heard).await
        }
        Err(error) => Err(error),
    };
    // It has nothing to lose, and may not answer.
    let _ = time::timeout(CLOSING, pool.close()).await;
    result
}

struct Session<'a> {
    listener: PgListener,
    watchers: &'a Watchers,
    timeout: Duration,
    /// What the server holds for us.
    watched: HashSet<RecordId>,
}

impl Session<'_> {
    async fn run(mut self, was_lost: bool, heard: &mut bool) -> Result<SessionEnd, Error> {
        self.listener.ignore_pool_close_event(true);
        // What it watched is gone with it.
        self.listener.eager_reconnect(false);
        with_timeout(self.timeout, self.listener.listen(CHANNEL)).await?;
        let wanted = self.watchers.watched();
        self.watch(wanted).await?;
        *heard = true;
        if was_lost {
            tracing::info!("PostgreSQL tells again what happens in other processes");
            self.watchers.tell_all();
        }
        let mut looks = interval_at(Instant::now() + LOOK_EVERY, LOOK_EVERY);
        loop {
            tokio::select! {
                told = self.listener.try_recv() => match told? {
                    Some(told) => {
                        if let Some(id) = RecordId::from_hex(told.payload()) {
                            self.watchers.tell(&id);
                        }
                    }
                    None => return Err(Error::Io(ErrorKind::ConnectionAborted.into())),
                },
                changes = self.watchers.changes() => match changes {
                    Some(changes) => self.follow(changes).await?,
                    None => return Ok(SessionEnd::Closed),
                },
                _ = looks.tick() => {
                    if self.watched.is_empty() && self.watchers.is_empty() {
                        return Ok(SessionEnd::Idle);
                    }
                    with_timeout(self.timeout, async { self.listener.acquire().await?.ping().await }).await?;
                }
            }
        }
    }

    async fn follow(&mut self, changes: Vec<(RecordId, bool)>) -> Result<(), Error> {
        let (wanted, unwanted): (Vec<_>, Vec<_>) = changes.into_iter().partition(|(_, wanted)| *wanted);
        let ids = |list: Vec<(RecordId, bool)>| list.into_iter().map(|(id, _)| id);
        let gone: Vec<_> = ids(unwanted).filter(|id| self.watched.remove(id)).collect();
        for some in gone.chunks(CALL_MAX) {
            let call = Call::new("SELECT oncegate.unwatch($1)", [Arg::ManyOctets(octets(some))]);
            self.call(call).await?;
        }
        let new = ids(wanted).filter(|id| !self.watched.contains(id)).collect();
        self.watch(new).await
    }

    async fn watch(&mut self, ids: Vec<RecordId>) -> Result<(), Error> {
        for some in ids.chunks(CALL_MAX) {
            let call = Call::new("SELECT oncegate.watch($1) AS id", [Arg::ManyOctets(octets(some))]);
            for row in self.call(call).await? {
                self.watched.extend(record::record_id(&row).ok());
            }
            // What could not be watched is changing just now.
            for id in some.iter().filter(|id| !self.watched.contains(*id)) {
                self.watchers.tell(id);
            }
        }
        Ok(())
    }

    async fn call(&mut self, call: Call) -> Result<Vec<sqlx::postgres::PgRow>, Error> {
        with_timeout(self.timeout, async { call.prepared(self.listener.acquire().await?).await }).await
    }
}

fn octets(ids: &[RecordId]) -> Vec<Option<Vec<u8>>> {
    ids.iter().map(|id| Some(id.as_bytes().to_vec())).collect()
}

async fn with_timeout<T>(
    timeout: Duration,
    answer: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    time::timeout(timeout, answer).await.unwrap_or_else(|_| Err(Error::Io(ErrorKind::TimedOut.into())))
}
