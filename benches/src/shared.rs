//! The stores that machines share, against the bare engines: what Oncegate adds to them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::{FencingToken, Fingerprint, Outcome, RecordId, Scope, Store};
use oncegate_postgres::{PostgresOptions, PostgresStore, TransactOutcome, Transactor, schema};
use oncegate_redis::{RedisOptions, RedisStore};
use oncegate_servers::{PostgresServer, RedisServer};
use redis::aio::MultiplexedConnection;
use sha2::{Digest as _, Sha256};
use sqlx::Row as _;
use sqlx::postgres::{PgPool, PgPoolOptions, PgRow};

use crate::growth::each;
use crate::records::{Result, claim, claim_of, complete, id, replay, scatter};

pub(crate) const ROUNDS: usize = 5;
const DAY: Duration = Duration::from_secs(86_400);
const PAY: &str = "INSERT INTO payments (customer, cents) VALUES ($1, $2) RETURNING id";

/// Numbers of records that were not used yet.
static NEXT: AtomicU64 = AtomicU64::new(0);

pub(crate) fn fresh(count: u64) -> u64 {
    NEXT.fetch_add(count, Ordering::Relaxed)
}

fn body() -> Bytes {
    Bytes::from(vec![b'x'; 1024])
}

/// Seconds of ours and of the reference, for each operation in each round.
#[derive(Default)]
pub(crate) struct Rounds(Vec<(&'static str, Vec<[f64; 2]>)>);

impl Rounds {
    pub(crate) fn note(&mut self, operation: &'static str, seconds: [f64; 2]) {
        match self.0.iter_mut().find(|(name, _)| *name == operation) {
            Some((_, rounds)) => rounds.push(seconds),
            None => self.0.push((operation, vec![seconds])),
        }
    }

    pub(crate) fn print(&self, title: &str, reference: &str, count: u64) {
        println!("| {title} | per s | {reference}, per s | ratio | range |\n|---|---|---|---|---|");
        for (operation, rounds) in &self.0 {
            let sorted = |of: &dyn Fn(&[f64; 2]) -> f64| {
                let mut figures: Vec<f64> = rounds.iter().map(of).collect();
                figures.sort_by(f64::total_cmp);
                figures
            };
            let (at, count) = (rounds.len() / 2, count as f64);
            let ours = sorted(&|[ours, _]| count / ours)[at];
            let theirs = sorted(&|[_, theirs]| count / theirs)[at];
            let ratios = sorted(&|[ours, theirs]| theirs / ours);
            let (ratio, low, high) = (ratios[at], ratios[0], ratios[rounds.len() - 1]);
            println!("| {operation} | {ours:.0} | {theirs:.0} | {ratio:.2} | {low:.2}–{high:.2} |");
        }
        println!();
    }
}

/// Redis, without a file and with one that is flushed for every write: the store against two bare scripts that carry the same
/// bytes over the same client.
pub(crate) async fn on_redis() -> Result<()> {
    let plain = || oncegate_servers::RedisOptions::new();
    for (title, options, in_flight, records) in [
        ("Redis, no file, 64 in flight", plain(), 64, 60_000),
        ("Redis, appendfsync always, 64 in flight", plain().with_appendfsync("always"), 64, 20_000),
        ("Redis, no file, 1 in flight", plain(), 1, 5_000),
    ] {
        let server = RedisServer::start(options)?;
        let store: Arc<dyn Store> = Arc::new(RedisStore::open(RedisOptions::from_url(&server.url())?).await?);
        let bare = Bare::open(&server.url()).await?;
        let mut rounds = Rounds::default();
        for round in 0..=ROUNDS {
            server.command(&["FLUSHALL"])?;
            let (claims, completions, replays) = cycle(&store, in_flight, records).await?;
            let (bare_claims, bare_completions) = bare.cycle(in_flight, records).await?;
            // The first round is for the caches.
            if round > 0 {
                rounds.note("claim and completion", [claims + completions, bare_claims + bare_completions]);
                rounds.note("claim", [claims, bare_claims]);
                rounds.note("completion", [completions, bare_completions]);
                rounds.note("replay, against a bare claim", [replays, bare_claims]);
            }
        }
        rounds.print(title, "bare scripts", records);
    }
    Ok(())
}

/// Seconds for so many claims, completions, and replays.
async fn cycle(store: &Arc<dyn Store>, in_flight: usize, records: u64) -> Result<(f64, f64, f64)> {
    let (from, body) = (fresh(records), body());
    let claims = store.clone();
    let (claimed, tokens) = each(from..from + records, in_flight, move |number| {
        let store = claims.clone();
        async move { Ok((number, claim(&*store, number, DAY).await?)) }
    })
    .await?;
    let tokens: Arc<[(u64, FencingToken)]> = tokens.into();
    let completions = store.clone();
    let (completed, _) = each(0..records, in_flight, move |at| {
        let (store, body, tokens) = (completions.clone(), body.clone(), tokens.clone());
        async move {
            let (number, token) = tokens[at as usize];
            complete(&*store, number, token, &body, DAY).await
        }
    })
    .await?;
    let store = store.clone();
    let (replayed, _) = each(0..records, in_flight, move |number| {
        let store = store.clone();
        async move { replay(&*store, from + scatter(number) % records).await }
    })
    .await?;
    Ok((claimed, completed, replayed))
}

/// Two scripts with the fewest commands that claim a key and complete it: they check no lease and no argument, and
/// publish no notification.
struct Bare {
    connection: MultiplexedConnection,
    claim: String,
    complete: String,
}

const BARE_CLAIM: &str = "if redis.call('EXISTS', KEYS[1]) == 1 then return {'in-progress'} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], 'attempt', ARGV[1], 'version', ARGV[2], 'fingerprint', ARGV[3], 'lease_until', now + ARGV[4],
  'on_abandoned', ARGV[6], 'caller', ARGV[7], 'operation', ARGV[8], 'token', now)
redis.call('PEXPIREAT', KEYS[1], now + ARGV[5])
return {'execute', tostring(now)}";

const BARE_COMPLETE: &str = "if redis.call('HGET', KEYS[1], 'attempt') ~= ARGV[1] then return {'fenced'} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'response', ARGV[4])
redis.call('PEXPIREAT', KEYS[1], now + ARGV[3])
return {'completed', tostring(now)}";

impl Bare {
    async fn open(url: &str) -> Result<Self> {
        let mut connection = redis::Client::open(url)?.get_multiplexed_async_connection().await?;
        let mut load = async |script: &str| -> Result<String> {
            Ok(redis::cmd("SCRIPT").arg("LOAD").arg(script).query_async(&mut connection).await?)
        };
        let (claim, complete) = (load(BARE_CLAIM).await?, load(BARE_COMPLETE).await?);
        Ok(Self { connection, claim, complete })
    }

    async fn cycle(&self, in_flight: usize, records: u64) -> Result<(f64, f64)> {
        let from = fresh(records);
        let (connection, script) = (self.connection.clone(), self.claim.clone());
        let (claimed, _) = each(from..from + records, in_flight, move |number| {
            let (mut connection, script) = (connection.clone(), script.clone());
            async move {
                let mut command = redis::cmd("EVALSHA");
                command.arg(script).arg(1).arg(bare_key(number)).arg(attempt(number)).arg(1);
                command.arg("ab".repeat(32)).arg(30_000).arg(86_400_000).arg("park").arg("0".repeat(16));
                let response: Vec<String> =
                    command.arg("POST /v1/payments").query_async(&mut connection).await?;
                if response[0] == "execute" { Ok(()) } else { Err(format!("{response:?}").into()) }
            }
        })
        .await?;
        let (connection, script, body) = (self.connection.clone(), self.complete.clone(), body());
        let (completed, _) = each(from..from + records, in_flight, move |number| {
            let (mut connection, script, body) = (connection.clone(), script.clone(), body.clone());
            async move {
                let mut command = redis::cmd("EVALSHA");
                command.arg(script).arg(1).arg(bare_key(number)).arg(attempt(number)).arg("completed");
                let response: Vec<String> =
                    command.arg(86_400_000).arg(&body[..]).query_async(&mut connection).await?;
                if response[0] == "completed" { Ok(()) } else { Err(format!("{response:?}").into()) }
            }
        })
        .await?;
        Ok((claimed, completed))
    }
}

fn bare_key(number: u64) -> String {
    format!("bare:{{{:064x}}}", scatter(number))
}

fn attempt(number: u64) -> String {
    format!("{number:032x}")
}

/// PostgreSQL with commits that are flushed: the store, which batches, against one call of a function for each row, on as many
/// connections as are in flight.
pub(crate) async fn on_postgres() -> Result<()> {
    let server = PostgresServer::start_with(durable())?;
    let options = PostgresOptions::from_url(&server.url())?.with_pool_size(16)?;
    schema::apply(&options).await?;
    let store: Arc<dyn Store> = Arc::new(PostgresStore::open(options).await?);
    let pool = PgPoolOptions::new().max_connections(64).connect(&server.url()).await?;
    for (in_flight, records) in [(256, 20_000), (64, 10_000), (1, 1_500)] {
        let mut rounds = Rounds::default();
        for round in 0..=ROUNDS {
            let (claims, completions, replays) = cycle(&store, in_flight, records).await?;
            let (single_claims, single_completions, single_replays) =
                cycle_of_rows(&pool, in_flight, records).await?;
            if round > 0 {
                let both = [claims + completions, single_claims + single_completions];
                rounds.note("claim and completion", both);
                rounds.note("claim", [claims, single_claims]);
                rounds.note("completion", [completions, single_completions]);
                rounds.note("replay", [replays, single_replays]);
            }
        }
        rounds.print(&format!("PostgreSQL, {in_flight} in flight"), "one row a statement", records);
    }
    Ok(())
}

/// Seconds for so many claims, completions, and replays, each a statement of its own.
async fn cycle_of_rows(pool: &PgPool, in_flight: usize, records: u64) -> Result<(f64, f64, f64)> {
    const CLAIM: &str = "SELECT outcome, token, response FROM oncegate.claim($1, $2, $3, 30000, 86400000, 'park', $4, 'POST /v1/payments')";
    const COMPLETE: &str =
        "SELECT outcome FROM oncegate.complete_if_owner($1, $2, 'completed', $3, 86400000)";
    let from = fresh(records);
    let claim = |number: u64| {
        sqlx::query(CLAIM)
            .bind(id(number).as_bytes().to_vec())
            .bind(number.to_be_bytes().repeat(2))
            .bind([&[1_u8][..], &[7; 32]].concat())
            .bind(vec![0_u8; 8])
    };
    let claims = pool.clone();
    let (claimed, tokens) = each(from..from + records, in_flight, move |number| {
        let pool = claims.clone();
        async move {
            let row = claim(number).fetch_one(&pool).await?;
            expect(&row, "execute")?;
            Ok((number, row.try_get::<i64, _>("token")?))
        }
    })
    .await?;
    let (tokens, completions): (Arc<[_]>, _) = (tokens.into(), pool.clone());
    let response =
        oncegate_core::StoredResponse::new(201, &[("content-type", b"application/json")], &[body()], &[])?;
    let response = response.as_encoded().to_vec();
    let (completed, _) = each(0..records, in_flight, move |at| {
        let (pool, tokens, response) = (completions.clone(), tokens.clone(), response.clone());
        async move {
            let (number, token) = tokens[at as usize];
            let query = sqlx::query(COMPLETE).bind(id(number).as_bytes().to_vec()).bind(token).bind(response);
            expect(&query.fetch_one(&pool).await?, "completed")
        }
    })
    .await?;
    let replays = pool.clone();
    let (replayed, _) = each(0..records, in_flight, move |number| {
        let pool = replays.clone();
        async move {
            let number = from + scatter(number) % records;
            expect(&claim(number).fetch_one(&pool).await?, "replay")
        }
    })
    .await?;
    Ok((claimed, completed, replayed))
}

/// A business row in one transaction with its record, against the same transaction with a row under a unique key: a bare one;
/// one that also keeps the input's fingerprint and the response, inserted at the end; and this with an empty statement more,
/// which is as many round trips as ours.
pub(crate) async fn same_transaction() -> Result<()> {
    const RECORDS: u64 = 6_000;
    let server = PostgresServer::start_with(durable())?;
    schema::apply(&PostgresOptions::from_url(&server.url())?).await?;
    let pool = PgPoolOptions::new().max_connections(64).connect(&server.url()).await?;
    for table in [
        "CREATE TABLE payments (id bigserial PRIMARY KEY, customer text NOT NULL, cents bigint NOT NULL)",
        "CREATE TABLE keys (key text PRIMARY KEY, response jsonb NOT NULL, created_at timestamptz NOT NULL DEFAULT now())",
        "CREATE TABLE responses (key text PRIMARY KEY, fingerprint bytea NOT NULL, response bytea NOT NULL, created_at timestamptz NOT NULL DEFAULT now())",
    ] {
        sqlx::query(table).execute(&pool).await?;
    }
    let transactor = Transactor::new(pool.clone());
    for in_flight in [64, 1] {
        let records = if in_flight == 1 { RECORDS / 8 } else { RECORDS };
        let mut rounds = Rounds::default();
        for round in 0..=ROUNDS {
            let (from, ours) = (fresh(records), transactor.clone());
            let (transacted, _) = each(from..from + records, in_flight, move |number| {
                let transactor = ours.clone();
                async move {
                    let scope = Scope::single_tenant();
                    let key = format!("order-{number}");
                    let pay = transactor.transact(&scope, key, &number, async |connection| {
                        let pay = sqlx::query_scalar(PAY).bind("c-1").bind(4999_i64);
                        let id: i64 = pay.fetch_one(&mut *connection).await?;
                        Ok(id)
                    });
                    match pay.await? {
                        TransactOutcome::Executed(_) => Ok(()),
                        TransactOutcome::Replayed(_) => Err("it was there already".into()),
                    }
                }
            })
            .await?;
            let inserted = cycle_by_hand(&pool, in_flight, records, ByHand::Key).await?;
            let kept = cycle_by_hand(&pool, in_flight, records, ByHand::Response).await?;
            let as_many = cycle_by_hand(&pool, in_flight, records, ByHand::ResponseAndRoundTrip).await?;
            if round > 0 {
                rounds.note("against a bare key", [transacted, inserted]);
                rounds.note("against key, fingerprint, response", [transacted, kept]);
                rounds.note("and one empty statement more", [transacted, as_many]);
            }
        }
        rounds.print(&format!("`transact`, {in_flight} in flight"), "a row under a unique key", records);
    }
    Ok(())
}

/// The usual code without a library.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ByHand {
    Key,
    Response,
    ResponseAndRoundTrip,
}

/// Seconds for so many payments with a row under a unique key.
async fn cycle_by_hand(pool: &PgPool, in_flight: usize, records: u64, how: ByHand) -> Result<f64> {
    let (from, pool) = (fresh(records), pool.clone());
    let (paid, _) = each(from..from + records, in_flight, move |number| {
        let pool = pool.clone();
        async move {
            let mut transaction = pool.begin().await?;
            let key = format!("order-{number}");
            match how {
                ByHand::Key => {
                    let insert =
                        sqlx::query("INSERT INTO keys (key, response) VALUES ($1, '{\"status\": 201}')");
                    insert.bind(&key).execute(&mut *transaction).await?;
                }
                ByHand::Response => {}
                ByHand::ResponseAndRoundTrip => {
                    sqlx::query("SELECT 1").execute(&mut *transaction).await?;
                }
            }
            let pay = sqlx::query_scalar(PAY).bind("c-1").bind(4999_i64);
            let id: i64 = pay.fetch_one(&mut *transaction).await?;
            if how != ByHand::Key {
                let insert =
                    sqlx::query("INSERT INTO responses (key, fingerprint, response) VALUES ($1, $2, $3)");
                let insert = insert.bind(&key).bind(Sha256::digest(number.to_string()).to_vec());
                insert.bind(id.to_string().into_bytes()).execute(&mut *transaction).await?;
            }
            Ok(transaction.commit().await?)
        }
    })
    .await?;
    Ok(paid)
}

/// PostgreSQL with so many records against the same with few: two databases of one server, by turns.
pub(crate) async fn growth_on_postgres(few: u64, many: u64) -> Result<()> {
    const IN_FLIGHT: usize = 64;
    const ADDED: u64 = 4_000;
    let server = PostgresServer::start_with(durable())?;
    let admin = PgPoolOptions::new().max_connections(1).connect(&server.url()).await?;
    let mut stores: Vec<(Arc<dyn Store>, PgPool, u64)> = Vec::new();
    for (name, records) in [("few", few), ("many", many)] {
        sqlx::query(sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&admin).await?;
        let options = PostgresOptions::from_url(&server.url_of(name))?.with_pool_size(16)?;
        schema::apply(&options).await?;
        let pool = PgPoolOptions::new().max_connections(1).connect(&server.url_of(name)).await?;
        let begun = std::time::Instant::now();
        fill(&pool, records).await?;
        let bytes: i64 =
            sqlx::query_scalar("SELECT pg_total_relation_size('oncegate.records')").fetch_one(&pool).await?;
        println!("{records} records: {bytes} bytes, {:.0} s to fill", begun.elapsed().as_secs_f64());
        stores.push((Arc::new(PostgresStore::open(options).await?), pool, records));
    }
    println!();
    let mut rounds = Rounds::default();
    for round in 0..=ROUNDS {
        let mut costs = Vec::new();
        for (store, pool, records) in &stores {
            let (claims, completions, near) = cycle(store, IN_FLIGHT, ADDED).await?;
            let (old, records) = (store.clone(), *records);
            let (any, _) = each(0..ADDED, IN_FLIGHT, move |number| {
                let store = old.clone();
                async move {
                    let number = scatter(number ^ round as u64) % records;
                    let fingerprint =
                        Fingerprint::from_parts(1, Sha256::digest("f").into()).ok_or("no fingerprint")?;
                    match store.apply(filled(number), claim_of(number, fingerprint, DAY)).await? {
                        Outcome::Replay(_) => Ok(()),
                        other => Err(format!("record {number} is not replayed: {other:?}").into()),
                    }
                }
            })
            .await?;
            costs.push([claims, completions, near, any, purged(store, pool, ADDED).await?]);
        }
        if round > 0 {
            let operations =
                ["claim", "completion", "replay of a new record", "replay of any record", "purge"];
            for (at, operation) in operations.into_iter().enumerate() {
                rounds.note(operation, [costs[1][at], costs[0][at]]);
            }
        }
    }
    rounds.print(&format!("PostgreSQL, {many} records"), &format!("{few} records"), ADDED);
    Ok(())
}

/// Seconds to purge what the last cycle added, which is made to have expired.
async fn purged(store: &Arc<dyn Store>, pool: &PgPool, added: u64) -> Result<f64> {
    sqlx::query("UPDATE oncegate.records SET expires_at = 1, purge_at = 1 WHERE purge_at < $1")
        .bind(i64::try_from(store.now().after(2 * DAY).as_millis())?)
        .execute(pool)
        .await?;
    let (begun, mut gone) = (std::time::Instant::now(), 0);
    loop {
        match store.purge(500).await? {
            0 => break,
            more => gone += more as u64,
        }
    }
    if gone < added {
        Err(format!("{gone} records were purged").into())
    } else {
        Ok(begun.elapsed().as_secs_f64())
    }
}

/// The identifier of a record that [`fill`] made.
fn filled(number: u64) -> RecordId {
    RecordId::from_bytes(Sha256::digest(number.to_be_bytes()).into())
}
/// Completed records that stay for 300 days, written in one statement and vacuumed.
async fn fill(pool: &PgPool, records: u64) -> Result<()> {
    let insert = "INSERT INTO oncegate.records (id, state, fingerprint, token, attempts, caller, operation, created_at, changed_at,
            expires_at, purge_at, response)
        SELECT sha256(int8send(n)), 'completed', '\\x01'::bytea || sha256('f'), now_ms, 1, '\\x0000000000000000',
            'POST /v1/payments', now_ms, now_ms, now_ms + 25920000000, now_ms + 25920000000,
            oncegate.response(201, ARRAY['content-type'], ARRAY['application/json'],
                convert_to('{\"id\":\"pay_A8Z5MHwQS7jUmZ\",\"amount\":4999,\"status\":\"captured\"}', 'UTF8'))
        FROM generate_series($1, $2) AS n, oncegate.now_ms() AS now_ms";
    // In portions: one statement for all would fill the disk with what it sorts.
    for from in (0..records).step_by(1_000_000) {
        let to = (from + 1_000_000).min(records) - 1;
        let query = sqlx::query(insert).bind(i64::try_from(from)?).bind(i64::try_from(to)?);
        query.execute(pool).await?;
    }
    sqlx::query("VACUUM ANALYZE oncegate.records").execute(pool).await?;
    Ok(())
}

fn expect(row: &PgRow, outcome: &str) -> Result<()> {
    let found: String = row.try_get("outcome")?;
    if found == outcome { Ok(()) } else { Err(format!("{found} and not {outcome}").into()) }
}

pub(crate) fn durable() -> oncegate_servers::PostgresOptions {
    let mut options = oncegate_servers::PostgresOptions::default();
    options.fsync = true;
    options.settings =
        ["shared_buffers=512MB", "max_wal_size=4GB", "max_connections=200"].map(str::to_owned).to_vec();
    options
}
