//! The databases of cases. While a case runs, no other case uses its database.
//!
//! This program starts its own database servers, one of each kind, when the first case needs one. [`stop_servers`] stops
//! them all. Each case has its own database on a server, which is emptied before the next case gets it.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use oncegate_postgres::{PostgresOptions as StoreOptions, schema};
use oncegate_servers::{PostgresOptions, PostgresServer, RedisCluster, RedisOptions, RedisServer};
use sqlx::{Connection as _, PgConnection};

use crate::framework::stop_services;
use crate::library::stop_processes;
use crate::world::StoreKind;

/// More databases than cases run at a time. This many hold records, and the same number are caches of cached stores.
const REDIS_DATABASES: usize = 128;

/// A Redis Cluster has only one database, so each case needs its own Cluster. If all are in use, a case waits.
const CLUSTERS: usize = 4;

/// Sidecars hold eight connections each, and a case may have three of them.
const POSTGRES_CONNECTIONS: usize = 400;

/// The time-outs of stores in the URL: the servers share their machine with all other tests.
const TIMEOUT: &str = "timeout=15s&connect-timeout=15s";

/// The time-out of a cache in seconds. It is long enough that a busy machine does not skip the cache.
pub(crate) const CACHE_TIMEOUT: u64 = 1;

/// The database of a case. When it is dropped, another case can get the database.
#[derive(Debug)]
pub struct TestDatabase {
    kind: StoreKind,
    database: Option<Database>,
}

/// A database, or a whole Cluster.
#[derive(Debug)]
enum Database {
    Redis(Arc<RedisServer>, usize),
    Cluster(Arc<RedisCluster>),
    Postgres(Arc<PostgresServer>, String),
    /// A cache, and the store behind it.
    Cached(Box<Database>, Box<Database>),
}

impl TestDatabase {
    /// Takes an empty database. It blocks, so it must not be called within a runtime.
    ///
    /// # Panics
    /// If the server cannot be started.
    #[must_use]
    pub fn take(kind: StoreKind) -> Self {
        let database = kind.is_shared().then(|| {
            let database = DatabasePool::get().take(kind);
            database.unwrap_or_else(|error| panic!("no {} for this case: {error}", kind.name()))
        });
        let place = Self { kind, database };
        place.clear();
        place
    }

    /// The kind of store.
    #[must_use]
    pub const fn kind(&self) -> StoreKind {
        self.kind
    }

    /// The URL of the database; `None` if only one process can open the store.
    #[must_use]
    pub fn url(&self) -> Option<String> {
        self.database.as_ref().map(Database::url)
    }

    /// Removes all records. It blocks, so it must not be called within a runtime.
    ///
    /// # Panics
    /// If the records cannot be removed.
    pub fn clear(&self) {
        if let Some(database) = &self.database {
            database.clear().unwrap_or_else(|error| panic!("cannot empty {}: {error}", self.kind.name()));
        }
    }
}

impl Drop for TestDatabase {
    fn drop(&mut self) {
        if let Some(database) = self.database.take() {
            DatabasePool::get().give_back(self.kind, database);
        }
    }
}

impl Database {
    fn url(&self) -> String {
        match self {
            Self::Redis(server, database) => {
                format!("redis://127.0.0.1:{}/{database}?{TIMEOUT}", server.port())
            }
            Self::Cluster(cluster) => format!("{}?{TIMEOUT}", cluster.url()),
            Self::Postgres(server, database) => server.url_of(database),
            Self::Cached(cache, store) => {
                format!("cached(cache={},store={},timeout={CACHE_TIMEOUT}s)", cache.url(), store.url())
            }
        }
    }

    fn clear(&self) -> io::Result<()> {
        match self {
            Self::Redis(server, database) => {
                end_sessions(server, *database)?;
                let script = format!("redis.call('SELECT', {database}) return redis.call('FLUSHDB')");
                server.command(&["EVAL", &script, "0"]).map(|_| ())
            }
            Self::Cluster(cluster) => {
                cluster.primaries().try_for_each(|server| server.command(&["FLUSHALL"]).map(|_| ()))
            }
            Self::Postgres(server, database) => {
                waited_for(empty_postgres(&server.url_of(database))).map_err(io::Error::other)
            }
            // The store first: a late reader of it must not fill a cache that was emptied before.
            Self::Cached(cache, store) => store.clear().and_then(|()| cache.clear()),
        }
    }
}

/// A command that the server has not read yet must not be carried out on the database of another case.
fn end_sessions(server: &RedisServer, database: usize) -> io::Result<()> {
    let marker = format!("db={database}");
    let sessions = server.command(&["CLIENT", "LIST"])?;
    for session in sessions.lines().filter(|line| line.split(' ').any(|field| field == marker)) {
        if let Some(id) = session.split(' ').find_map(|field| field.strip_prefix("id=")) {
            // It may have ended by itself.
            let _ = server.command(&["CLIENT", "KILL", "ID", id]);
        }
    }
    Ok(())
}

/// Ends the sessions of other processes first: a statement of theirs may still run.
async fn empty_postgres(url: &str) -> Result<(), sqlx::Error> {
    let mut connection = PgConnection::connect(url).await?;
    sqlx::raw_sql(
        "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity \
         WHERE datname = current_database() AND pid <> pg_backend_pid(); \
         TRUNCATE oncegate.records, oncegate.audit RESTART IDENTITY",
    )
    .execute(&mut connection)
    .await?;
    connection.close().await
}

fn waited_for<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(future)
}

/// All databases of all servers.
struct DatabasePool {
    state: Mutex<State>,
    given_back: Condvar,
    redis: Server<RedisServer>,
    postgres: Server<PostgresServer>,
}

#[derive(Default)]
struct State {
    free: HashMap<StoreKind, Vec<Database>>,
    /// The number of databases, free or in use.
    made: HashMap<StoreKind, usize>,
}

/// A server that the first user starts. Other users wait until it is started.
pub(crate) struct Server<T>(Mutex<Option<Result<Arc<T>, String>>>);

impl<T> Default for Server<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Server<T> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    pub(crate) fn get(&self, start: impl FnOnce() -> io::Result<T>) -> io::Result<Arc<T>> {
        let mut server = lock(&self.0);
        let started = server.get_or_insert_with(|| start().map(Arc::new).map_err(|error| error.to_string()));
        started.clone().map_err(io::Error::other)
    }

    /// Stops the server when its last user is gone.
    pub(crate) fn stop(&self) {
        *lock(&self.0) = None;
    }
}

impl DatabasePool {
    fn get() -> &'static Self {
        static POOL: OnceLock<DatabasePool> = OnceLock::new();
        POOL.get_or_init(|| Self {
            state: Mutex::default(),
            given_back: Condvar::new(),
            redis: Server::new(),
            postgres: Server::new(),
        })
    }

    fn take(&self, kind: StoreKind) -> io::Result<Database> {
        let most = if kind == StoreKind::RedisCluster { CLUSTERS } else { REDIS_DATABASES };
        let number = {
            let mut state = lock(&self.state);
            loop {
                if let Some(database) = state.free.entry(kind).or_default().pop() {
                    return Ok(database);
                }
                let made = state.made.entry(kind).or_default();
                if *made < most {
                    *made += 1;
                    break *made;
                }
                state = self.given_back.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        };
        let database = self.make(kind, number);
        if database.is_err() {
            // Another case may try again.
            *lock(&self.state).made.entry(kind).or_default() -= 1;
            self.given_back.notify_all();
        }
        database
    }

    fn make(&self, kind: StoreKind, number: usize) -> io::Result<Database> {
        match kind {
            StoreKind::Memory | StoreKind::Embedded => Err(io::Error::other("it has no server")),
            StoreKind::Redis => self.make_redis(number),
            StoreKind::RedisCluster => {
                // On a busy machine a node must not be taken for dead.
                let options = RedisOptions::new().with("cluster-node-timeout 60000");
                RedisCluster::start_with(&options).map(|cluster| Database::Cluster(Arc::new(cluster)))
            }
            StoreKind::Postgres => self.make_postgres(format!("cases_{number}")),
            StoreKind::Cached => Ok(Database::Cached(
                Box::new(self.make_redis(REDIS_DATABASES + number)?),
                Box::new(self.make_postgres(format!("cached_{number}"))?),
            )),
        }
    }

    fn make_redis(&self, database: usize) -> io::Result<Database> {
        let options = RedisOptions::new().with(format!("databases {}", 2 * REDIS_DATABASES + 1));
        Ok(Database::Redis(self.redis.get(|| RedisServer::start(options))?, database))
    }

    fn make_postgres(&self, database: String) -> io::Result<Database> {
        let mut options = PostgresOptions::default();
        options.trust = true;
        options.settings.push(format!("max_connections={POSTGRES_CONNECTIONS}"));
        let server = self.postgres.get(|| PostgresServer::start_with(options))?;
        waited_for(make_postgres(&server, &database))?;
        Ok(Database::Postgres(server, database))
    }

    fn give_back(&self, kind: StoreKind, database: Database) {
        lock(&self.state).free.entry(kind).or_default().push(database);
        self.given_back.notify_all();
    }
}

async fn make_postgres(server: &PostgresServer, database: &str) -> io::Result<()> {
    let mut connection = PgConnection::connect(&server.url()).await.map_err(io::Error::other)?;
    let create = sqlx::AssertSqlSafe(format!("CREATE DATABASE {database}"));
    sqlx::raw_sql(create).execute(&mut connection).await.map_err(io::Error::other)?;
    let options = StoreOptions::from_url(&server.url_of(database)).map_err(io::Error::other)?;
    schema::apply(&options).await.map_err(io::Error::other)?;
    Ok(())
}

/// Stops all servers. No case may run any more.
pub fn stop_servers() {
    let pool = DatabasePool::get();
    // A database keeps its server running.
    *lock(&pool.state) = State::default();
    pool.redis.stop();
    pool.postgres.stop();
    stop_services();
    stop_processes();
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
