//! A check that a server reports the truth about its disk.
//!
//! `WAITAOF` should answer when a write is flushed. Under `appendfsync everysec`, many servers answer at once and flush up to
//! a second later: Redis before redis/redis#13793 (8.0), and Valkey, which lacks that fix. Their replies are worthless. Under
//! `always` the replies are true, because these servers flush before they answer anything.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use redis::cmd;
use tokio::time::Instant;

use crate::error::Failure;
use crate::link::{Wire, ask_one};

/// The reason to trust a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proof {
    /// The server is configured to flush before it answers. The check is repeated each time, because the setting may change.
    Always,
    /// The server was observed to wait.
    Seen,
}

/// The time of each `WAITAOF`, in milliseconds.
const GLANCE_MILLIS: u64 = 150;

/// This many replies, each for a later write, need at least two flushes. Flushes begin a second apart, so a shorter time has
/// no two of them.
const SAMPLES: usize = 3;
const TOO_SHORT: Duration = Duration::from_millis(900);

/// The time of the check. While a server flushes, even one that answers too early does not answer.
const LOOK: Duration = Duration::from_millis(1500);

/// The time until the first reply.
const LOOK_MAX: Duration = Duration::from_secs(6);

const LIES: &str = "the server reports writes as on its disk before they are (fixed by redis/redis#13793 in Redis 8.0): set appendfsync \
                    always, use a fixed server, or leave wait-aof out";

const SAYS_NOTHING: &str = "the server reports writes as on its disk at once, which is true only if appendfsync is always, and that could not \
                            be read: allow CONFIG GET, or leave wait-aof out";

const NEVER: &str = "the server's appendfsync is no, so it does not know when writes are on its disk: set everysec or always, or leave \
                     wait-aof out";

/// Checks that `WAITAOF` can be trusted, by writing this key.
pub(crate) async fn prove(wire: &Wire, key: &str, limit: Duration) -> Result<Proof, Failure> {
    let fsync = fsync(wire, limit).await?;
    match fsync.as_deref() {
        Some("always") => return Ok(Proof::Always),
        Some("no") => return Err(Failure::Unfit(NEVER)),
        _ => {}
    }
    let since = Instant::now();
    let mut replies = VecDeque::with_capacity(SAMPLES);
    while since.elapsed() < LOOK || replies.is_empty() {
        if since.elapsed() > LOOK_MAX {
            return Err(Failure::Lost("no write got to the server's disk for seconds"));
        }
        let mut set = cmd("SET");
        set.arg(key).arg("").arg("PX").arg(1000);
        ask_one(wire, &set, limit).await?;
        let mut waits = cmd("WAITAOF");
        waits.arg(1).arg(0).arg(GLANCE_MILLIS);
        let counts = ask_one(wire, &waits, limit + Duration::from_millis(GLANCE_MILLIS)).await?;
        let (local, _): (i64, i64) = redis::from_redis_value(counts).map_err(|_| Failure::UnexpectedReply)?;
        if local == 0 {
            continue;
        }
        replies.push_back(Instant::now());
        if replies.len() == SAMPLES
            && replies.pop_front().is_some_and(|first: Instant| first.elapsed() < TOO_SHORT)
        {
            return Err(Failure::Unfit(if fsync.is_some() { LIES } else { SAYS_NOTHING }));
        }
    }
    Ok(Proof::Seen)
}

/// Reads `appendfsync`, if the server allows it.
async fn fsync(wire: &Wire, limit: Duration) -> Result<Option<String>, Failure> {
    let mut config = cmd("CONFIG");
    config.arg("GET").arg(FSYNC);
    match ask_one(wire, &config, limit).await {
        Ok(reply) => Ok(fsync_of(reply)),
        Err(Failure::Refused(_) | Failure::Forbidden(_)) => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// The setting that `CONFIG GET` reads.
pub(crate) const FSYNC: &str = "appendfsync";

/// Reads the reply of `CONFIG GET`.
pub(crate) fn fsync_of(reply: redis::Value) -> Option<String> {
    redis::from_redis_value::<HashMap<String, String>>(reply).ok()?.remove(FSYNC)
}
