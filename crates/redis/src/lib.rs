//! The store of Oncegate on Redis and Valkey, version 7 or newer: one server, Sentinel, or Cluster.
//!
//! Records are hashes that every client can read. Each command of the protocol is one Lua script on one key ([`contract`]), a
//! translation of [`decide`](oncegate_core::decide()) by the server's own clock. Services in any language can call the same
//! scripts without this crate. `docs/reference/store-contract-redis.md` describes them.
//!
//! ```no_run
//! use oncegate_redis::{RedisOptions, RedisStore};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = RedisStore::open(RedisOptions::from_url("redis://user:password@127.0.0.1:6379/0")?).await?;
//! for finding in store.findings() {
//!     println!("{finding}");
//! }
//! # Ok(()) }
//! ```
//!
//! # Promises
//!
//! An acknowledged write survives as far as the server's configuration allows. The store reads that configuration each time it
//! connects and once a minute, describes what it can lose ([`RedisStore::findings`]), and promises accordingly
//! ([`capabilities`](oncegate_core::Store::capabilities)):
//!
//! | server | durability | fencing |
//! |---|---|---|
//! | one server, `appendonly yes`, `appendfsync always`, no replica | [`Synced`] | [`Monotonic`] |
//! | `appendonly yes`: flushed later, replicas, Sentinel, Cluster, eviction, or unknown | [`Buffered`] | [`Equality`] |
//! | `appendonly no` or unknown, or a default user that may not write | [`Unlogged`] | [`Equality`] |
//!
//! A record that Redis lost is absent: its key executes again. The earlier owner is fenced, because tokens start from the
//! server's clock and not from one. A server that evicts keys is refused, because an evicted record executes again
//! ([`RedisOptions::with_danger_allow_eviction`]).
//!
//! # Failures
//!
//! | failure | result for callers |
//! |---|---|
//! | no connection, no reply in time, a lost reply, a failover, a full memory | [`Unavailable`]: may be sent again |
//! | the key of a record has another type, missing fields, or an unknown version | on that record: [`Corrupt`] |
//!
//! The next command after a lost connection connects again. While that fails, commands are refused at once, and the pauses
//! between attempts grow from 50 ms to 2 s. No request waits longer than the timeouts.
//!
//! # Costs
//!
//! One round trip for each command. All commands share one connection and are sent as they come. A survey reads the beginnings of
//! 250 records with each round trip.
//!
//! [`Synced`]: oncegate_core::Durability::Synced
//! [`Buffered`]: oncegate_core::Durability::Buffered
//! [`Unlogged`]: oncegate_core::Durability::Unlogged
//! [`Monotonic`]: oncegate_core::Fencing::Monotonic
//! [`Equality`]: oncegate_core::Fencing::Equality
//! [`Unavailable`]: oncegate_core::StoreErrorKind::Unavailable
//! [`Corrupt`]: oncegate_core::StoreErrorKind::Corrupt

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod applied_check;
pub mod contract;
mod disk;
mod error;
mod layout;
mod link;
mod list;
mod options;
mod probe;
mod replicas;
mod reply;
mod rights;
mod slots;
mod store;
mod survey;
mod watch;

#[cfg(test)]
mod tests;

pub use error::{RedisOpenError, RedisUrlError};
pub use options::RedisOptions;
pub use probe::{Finding, Severity};
pub use store::RedisStore;
