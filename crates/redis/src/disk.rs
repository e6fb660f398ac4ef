//! Whether a server says the truth about its disk.
//!
//! `WAITAOF` is to answer when what was written is flushed. Under `appendfsync everysec` many servers answer at once, and
//! flush up to a second later: Redis before redis/redis#13793 (8.0), and Valkey, which does not have it. What they say is
//! worth nothing there. Under `always` it is true, because they flush before they answer anything.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use redis::cmd;
use tokio::time::Instant;

use crate::error::Failure;
use crate::link::{Wire, ask_one};

/// Why a server is believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proof {
    /// It says that it flushes before it answers. It is asked again each time, because that may be changed.
    Always,
    /// It was seen to wait.
    Seen,
}

/// How long it is asked each time, in milliseconds.
const GLANCE_MILLIS: u64 = 150;

/// So many answers that something is on disk, each to a write after the one before, take two flushes at the least. Within so
/// short a time there are not two of them, because they begin a second apart.
const ANSWERS: usize = 3;
const TOO_SHORT: Duration = Duration::from_millis(900);

/// How long it is looked at. While a server flushes, one that says too early what it did does not answer either.
const LOOK: Duration = Duration::from_millis(1500);

/// How long until one answer is there.
const LOOK_MAX: Duration = Duration::from_secs(6);

const LIES: &str = "the server says that something is on its disk before it is (redis/redis#13793 mended that in Redis 8.0): set \
                    appendfsync always, or take a server that was mended, or leave wait-aof out";

const SAYS_NOTHING: &str = "the server says at once that something is on its disk, which is true where appendfsync is always, \
                            and that could not be read: allow CONFIG GET, or leave wait-aof out";

const NEVER: &str = "the server's appendfsync is no, and it does not know when something is on its disk: set everysec or \
                     always, or leave wait-aof out";

/// Finds out whether `WAITAOF` can be believed here, by writing this key.
pub(crate) async fn prove(wire: &Wire, key: &str, limit: Duration) -> Result<Proof, Failure> {
    let fsync = fsync(wire, limit).await?;
    match fsync.as_deref() {
        Some("always") => return Ok(Proof::Always),
        Some("no") => return Err(Failure::Unfit(NEVER)),
        _ => {}
    }
    let since = Instant::now();
    let mut answers = VecDeque::with_capacity(ANSWERS);
    while since.elapsed() < LOOK || answers.is_empty() {
        if since.elapsed() > LOOK_MAX {
            return Err(Failure::Lost("nothing that the server wrote was on its disk for seconds"));
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
        answers.push_back(Instant::now());
        if answers.len() == ANSWERS
            && answers.pop_front().is_some_and(|first: Instant| first.elapsed() < TOO_SHORT)
        {
            return Err(Failure::Unfit(if fsync.is_some() { LIES } else { SAYS_NOTHING }));
        }
    }
    Ok(Proof::Seen)
}

/// When it flushes, where it says so.
async fn fsync(wire: &Wire, limit: Duration) -> Result<Option<String>, Failure> {
    let mut config = cmd("CONFIG");
    config.arg("GET").arg(FSYNC);
    match ask_one(wire, &config, limit).await {
        Ok(answer) => Ok(fsync_of(answer)),
        Err(Failure::Refused(_)) => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// What `CONFIG GET` is asked for.
pub(crate) const FSYNC: &str = "appendfsync";

/// What `CONFIG GET` says.
pub(crate) fn fsync_of(answer: redis::Value) -> Option<String> {
    redis::from_redis_value::<HashMap<String, String>>(answer).ok()?.remove(FSYNC)
}
