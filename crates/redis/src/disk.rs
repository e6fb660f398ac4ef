//! Whether a server says the truth about its disk.
//!
//! `WAITAOF` is to answer when what was written is flushed. Under `appendfsync everysec` many servers answer at once, and
//! flush up to a second later: Redis before redis/redis#13793 (8.0), and Valkey, which does not have it. What they say is
//! worth nothing there. Under `always` it is true, because they flush before they answer anything.

use std::collections::HashMap;
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

/// How long it may take to answer that something is on its disk, in milliseconds: longer than a server takes that does not
/// look, and so short that several of them are over before the next flush.
const GLANCE_MILLIS: u64 = 150;

/// So many answers at once are no flushes, of which there is one in a second.
const GLANCES: u32 = 3;

/// So long at most, for all of them together.
const GLANCES_MAX: Duration = Duration::from_millis(900);

/// How often that is tried on a machine that is busy.
const TRIES: u32 = 5;

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
    for _ in 0..TRIES {
        let since = Instant::now();
        for _ in 0..GLANCES {
            let mut set = cmd("SET");
            set.arg(key).arg("").arg("PX").arg(1000);
            ask_one(wire, &set, limit).await?;
            let mut waits = cmd("WAITAOF");
            waits.arg(1).arg(0).arg(GLANCE_MILLIS);
            let counts = ask_one(wire, &waits, limit + Duration::from_millis(GLANCE_MILLIS)).await?;
            let (local, _): (i64, i64) = redis::from_redis_value(counts).map_err(|_| Failure::Senseless)?;
            if local == 0 {
                return Ok(Proof::Seen);
            }
        }
        if since.elapsed() < GLANCES_MAX {
            return Err(Failure::Unfit(if fsync.is_some() { LIES } else { SAYS_NOTHING }));
        }
    }
    Err(Failure::Lost("the server is too slow to show whether it says the truth about its disk"))
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
