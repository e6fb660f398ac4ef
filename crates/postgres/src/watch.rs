//! The session for notifications: the database notifies of the end of an attempt in another process.
//!
//! There is one session for all waiting callers, and only while a caller waits.

use std::collections::HashSet;
use std::future::Future;
use std::io::ErrorKind;
use std::time::Duration;

use oncegate_core::{ChangeSource, RecordId, SessionEnd, Watchers};
use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use sqlx::{Acquire as _, Connection as _, Error};
use tokio::time::{self, Instant, interval_at, sleep};

use crate::call::{Arg, Call};
use crate::error::describe;
use crate::options::PostgresOptions;
use crate::record;

const CHANNEL: &str = "oncegate_1";

/// The server's lock table has 64 entries for each connection that it allows. This is half of the share of our connections.
const WATCHED_PER_CONNECTION: u32 = 32;
const MAX_WATCHED: usize = 1024;

/// The most records in one call.
const MAX_IN_CALL: usize = 256;

/// The interval at which a silent session is checked: its connection may be dead without notice, or not needed any more.
const CHECK_EVERY: Duration = Duration::from_secs(30);

/// The time that an abandoned session may take to close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The most callers that may wait for notifications. `None` behind a pooler that keeps no session.
pub(crate) fn max_watchers(options: &PostgresOptions) -> Option<usize> {
    if options.transaction_pooler {
        return None;
    }
    let most = (options.pool_size.saturating_add(1)).saturating_mul(WATCHED_PER_CONNECTION);
    Some(usize::try_from(most).unwrap_or(MAX_WATCHED).min(MAX_WATCHED))
}

/// The sessions of a store that listen for changed records.
#[derive(Clone)]
pub(crate) struct Listener {
    connect: PgConnectOptions,
    timeout: Duration,
}

impl Listener {
    pub(crate) fn new(options: &PostgresOptions) -> Self {
        Self {
            connect: options.listen_options(),
            timeout: options.connect_timeout + options.statement_timeout,
        }
    }
}

impl ChangeSource for Listener {
    type Error = Error;

    async fn session(
        &mut self,
        watchers: &Watchers,
        was_lost: bool,
        is_connected: &mut bool,
    ) -> Result<SessionEnd, Error> {
        // Its own pool, so that it takes no connection from the commands.
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(self.timeout)
            .test_before_acquire(false)
            .idle_timeout(None)
            .max_lifetime(None)
            .connect_lazy_with(self.connect.clone());
        let result = match PgListener::connect_with(&pool).await {
            Ok(listener) => {
                let session = Session { listener, watchers, timeout: self.timeout, watched: HashSet::new() };
                session.run(was_lost, is_connected).await
            }
            Err(error) => Err(error),
        };
        // The session has nothing to lose, and the server may not answer.
        let _ = time::timeout(CLOSE_TIMEOUT, pool.close()).await;
        result
    }

    async fn lost(&mut self, error: Error, is_news: bool, pause: Duration) {
        if is_news {
            tracing::warn!(
                error = describe(&error),
                "PostgreSQL sends no notifications from other processes; waiting requests ask from time to time"
            );
        }
        sleep(pause).await;
    }
}

struct Session<'a> {
    listener: PgListener,
    watchers: &'a Watchers,
    timeout: Duration,
    /// The records that the server watches for this session.
    watched: HashSet<RecordId>,
}

impl Session<'_> {
    async fn run(mut self, was_lost: bool, is_connected: &mut bool) -> Result<SessionEnd, Error> {
        self.listener.ignore_pool_close_event(true);
        // A new connection would have lost its watches.
        self.listener.eager_reconnect(false);
        with_timeout(self.timeout, self.listener.listen(CHANNEL)).await?;
        let wanted = self.watchers.watched();
        self.watch(wanted).await?;
        *is_connected = true;
        if was_lost {
            tracing::info!("PostgreSQL sends notifications from other processes again");
            self.watchers.notify_all();
        }
        let mut checks = interval_at(Instant::now() + CHECK_EVERY, CHECK_EVERY);
        loop {
            tokio::select! {
                notification = self.listener.try_recv() => match notification? {
                    Some(notification) => {
                        if let Some(id) = RecordId::from_hex(notification.payload()) {
                            self.watchers.notify(&id);
                        }
                    }
                    None => return Err(Error::Io(ErrorKind::ConnectionAborted.into())),
                },
                changes = self.watchers.changes() => match changes {
                    Some(changes) => self.follow(changes).await?,
                    None => return Ok(SessionEnd::Closed),
                },
                _ = checks.tick() => {
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
        for some in gone.chunks(MAX_IN_CALL) {
            let call = Call::new("SELECT oncegate.unwatch($1)", [Arg::ManyBytes(bytes(some))]);
            self.call(call).await?;
        }
        let new = ids(wanted).filter(|id| !self.watched.contains(id)).collect();
        self.watch(new).await
    }

    async fn watch(&mut self, ids: Vec<RecordId>) -> Result<(), Error> {
        for some in ids.chunks(MAX_IN_CALL) {
            let call = Call::new("SELECT oncegate.watch($1) AS id", [Arg::ManyBytes(bytes(some))]);
            for row in self.call(call).await? {
                self.watched.extend(record::record_id(&row).ok());
            }
            // A record that cannot be watched is changing now.
            for id in some.iter().filter(|id| !self.watched.contains(*id)) {
                self.watchers.notify(id);
            }
        }
        Ok(())
    }

    async fn call(&mut self, call: Call) -> Result<Vec<sqlx::postgres::PgRow>, Error> {
        with_timeout(self.timeout, async { call.prepared(self.listener.acquire().await?).await }).await
    }
}

fn bytes(ids: &[RecordId]) -> Vec<Option<Vec<u8>>> {
    ids.iter().map(|id| Some(id.as_bytes().to_vec())).collect()
}

async fn with_timeout<T>(
    timeout: Duration,
    reply: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    time::timeout(timeout, reply).await.unwrap_or_else(|_| Err(Error::Io(ErrorKind::TimedOut.into())))
}
