//! Where the records of a case are: nobody else's, for as long as the case runs.
//!
//! The databases that processes share are served by servers of this program's own, one of each kind. Each is started when
//! the first case needs it, and all are stopped by [`stop_servers`]. A case has a database in them for itself; it is
//! emptied before the next case gets it.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use oncegate_postgres::{PostgresOptions as StoreOptions, schema};
use oncegate_servers::{PostgresOptions, PostgresServer, RedisCluster, RedisOptions, RedisServer};
use sqlx::{Connection as _, PgConnection};

use crate::world::Kind;

/// More databases than cases run at a time. So many are for records, and as many for the fronts of tiered stores.
const REDIS_DATABASES: usize = 128;

/// A Cluster has one database, so that each case has a Cluster. There are so many; whoever comes later waits.
const CLUSTERS: usize = 4;

/// Sidecars hold eight connections each, and a case may have three of them.
const POSTGRES_CONNECTIONS: usize = 400;

/// How patient stores are with these servers, which share their machine with everything else that is tested.
const PATIENCE: &str = "timeout=15s&connect-timeout=15s";

/// As long as a front may be waited for, in seconds: it is to be asked on this machine, too, and not to be skipped.
pub(crate) const CACHE_TIMEOUT: u64 = 1;

/// What a case has its records in. Others get it when this is dropped.
#[derive(Debug)]
pub struct Place {
    kind: Kind,
    room: Option<Room>,
}

/// A database, or a whole Cluster.
#[derive(Debug)]
enum Room {
    Redis(Arc<RedisServer>, usize),
    Cluster(Arc<RedisCluster>),
    Postgres(Arc<PostgresServer>, String),
    /// A front and a back.
    Cached(Box<Room>, Box<Room>),
}

impl Place {
    /// An empty one. Not within a runtime: it waits.
    ///
    /// # Panics
    /// Where there is no server to be had.
    #[must_use]
    pub fn take(kind: Kind) -> Self {
        let room = kind.is_shared().then(|| {
            let room = Rooms::get().take(kind);
            room.unwrap_or_else(|error| panic!("no {} for this case: {error}", kind.name()))
        });
        let place = Self { kind, room };
        place.clear();
        place
    }

    /// What kind of store is there.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// Where it is, for everybody on this machine; nothing where only one process can have it.
    #[must_use]
    pub fn url(&self) -> Option<String> {
        self.room.as_ref().map(Room::url)
    }

    /// Forgets all records. Not within a runtime: it waits.
    ///
    /// # Panics
    /// Where that cannot be done.
    pub fn clear(&self) {
        if let Some(room) = &self.room {
            room.clear().unwrap_or_else(|error| panic!("cannot empty {}: {error}", self.kind.name()));
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(room) = self.room.take() {
            Rooms::get().give_back(self.kind, room);
        }
    }
}

impl Room {
    fn url(&self) -> String {
        match self {
            Self::Redis(server, database) => {
                format!("redis://127.0.0.1:{}/{database}?{PATIENCE}", server.port())
            }
            Self::Cluster(cluster) => format!("{}?{PATIENCE}", cluster.url()),
            Self::Postgres(server, database) => server.url_of(database),
            Self::Cached(front, back) => {
                format!("cached(cache={},store={},timeout={CACHE_TIMEOUT}s)", front.url(), back.url())
            }
        }
    }

    fn clear(&self) -> io::Result<()> {
        match self {
            Self::Redis(server, database) => {
                let script = format!("redis.call('SELECT', {database}) return redis.call('FLUSHDB')");
                server.command(&["EVAL", &script, "0"]).map(|_| ())
            }
            Self::Cluster(cluster) => {
                cluster.primaries().try_for_each(|server| server.command(&["FLUSHALL"]).map(|_| ()))
            }
            Self::Postgres(server, database) => {
                waited_for(empty_postgres(&server.url_of(database))).map_err(io::Error::other)
            }
            // Nobody who is still at the back puts its answers into a front that is empty already.
            Self::Cached(front, back) => back.clear().and_then(|()| front.clear()),
        }
    }
}

/// Whoever was cut off in the middle of a statement is gone before anything is removed.
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

/// Every room of every server.
struct Rooms {
    state: Mutex<State>,
    given_back: Condvar,
    redis: Server<RedisServer>,
    postgres: Server<PostgresServer>,
}

#[derive(Default)]
struct State {
    free: HashMap<Kind, Vec<Room>>,
    /// How many there are, free or not.
    made: HashMap<Kind, usize>,
}

/// A server that is started once, by whoever needs it first; the others wait for it.
struct Server<T>(Mutex<Option<Result<Arc<T>, String>>>);

impl<T> Server<T> {
    fn get(&self, start: impl FnOnce() -> io::Result<T>) -> io::Result<Arc<T>> {
        let mut server = lock(&self.0);
        let started = server.get_or_insert_with(|| start().map(Arc::new).map_err(|error| error.to_string()));
        started.clone().map_err(io::Error::other)
    }
}

impl Rooms {
    fn get() -> &'static Self {
        static ROOMS: OnceLock<Rooms> = OnceLock::new();
        ROOMS.get_or_init(|| Self {
            state: Mutex::default(),
            given_back: Condvar::new(),
            redis: Server(Mutex::new(None)),
            postgres: Server(Mutex::new(None)),
        })
    }

    fn take(&self, kind: Kind) -> io::Result<Room> {
        let most = if kind == Kind::RedisCluster { CLUSTERS } else { REDIS_DATABASES };
        let number = {
            let mut state = lock(&self.state);
            loop {
                if let Some(room) = state.free.entry(kind).or_default().pop() {
                    return Ok(room);
                }
                let made = state.made.entry(kind).or_default();
                if *made < most {
                    *made += 1;
                    break *made;
                }
                state = self.given_back.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        };
        let room = self.make(kind, number);
        if room.is_err() {
            // Somebody else may have more luck, or the same words.
            *lock(&self.state).made.entry(kind).or_default() -= 1;
            self.given_back.notify_all();
        }
        room
    }

    fn make(&self, kind: Kind, number: usize) -> io::Result<Room> {
        match kind {
            Kind::Memory | Kind::Embedded => Err(io::Error::other("it has no server")),
            Kind::Redis => self.make_redis(number),
            Kind::RedisCluster => {
                // Nobody is to be taken for dead because this machine is busy.
                let options = RedisOptions::new().with("cluster-node-timeout 60000");
                RedisCluster::start_with(&options).map(|cluster| Room::Cluster(Arc::new(cluster)))
            }
            Kind::Postgres => self.make_postgres(format!("cases_{number}")),
            Kind::Cached => Ok(Room::Cached(
                Box::new(self.make_redis(REDIS_DATABASES + number)?),
                Box::new(self.make_postgres(format!("tiered_{number}"))?),
            )),
        }
    }

    fn make_redis(&self, database: usize) -> io::Result<Room> {
        let options = RedisOptions::new().with(format!("databases {}", 2 * REDIS_DATABASES + 1));
        Ok(Room::Redis(self.redis.get(|| RedisServer::start(options))?, database))
    }

    fn make_postgres(&self, database: String) -> io::Result<Room> {
        let mut options = PostgresOptions::default();
        options.trust = true;
        options.settings.push(format!("max_connections={POSTGRES_CONNECTIONS}"));
        let server = self.postgres.get(|| PostgresServer::start_with(options))?;
        waited_for(make_postgres(&server, &database))?;
        Ok(Room::Postgres(server, database))
    }

    fn give_back(&self, kind: Kind, room: Room) {
        lock(&self.state).free.entry(kind).or_default().push(room);
        self.given_back.notify_all();
    }
}

async fn make_postgres(server: &PostgresServer, database: &str) -> io::Result<()> {
    let mut connection = PgConnection::connect(&server.url()).await.map_err(io::Error::other)?;
    let create = sqlx::AssertSqlSafe(format!("CREATE DATABASE {database}"));
    sqlx::raw_sql(create).execute(&mut connection).await.map_err(io::Error::other)?;
    let options = StoreOptions::new(&server.url_of(database)).map_err(io::Error::other)?;
    schema::apply(&options).await.map_err(io::Error::other)?;
    Ok(())
}

/// Stops every server that cases have started. No case runs any more.
pub fn stop_servers() {
    let rooms = Rooms::get();
    // With those that are still in a case's hands, if there are any, its server would go on.
    *lock(&rooms.state) = State::default();
    *lock(&rooms.redis.0) = None;
    *lock(&rooms.postgres.0) = None;
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
