//! The store of Oncegate on Redis and Valkey, version 7 or newer: one server, Sentinel, or Cluster.
//!
//! Records are hashes that every client can read. Each command of the protocol is one Lua script on one key
//! ([`contract`]), a translation of [`decide`](oncegate_core::decide()) by the server's own clock, so that services in any
//! language can call the same scripts without this crate. `docs/reference/store-contract-redis.md` describes them.
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
//! # What it promises, and when
//!
//! What Redis acknowledged survives as far as its configuration goes, and no further. The store reads that configuration
//! each time it connects and once a minute, says in words what it can lose ([`RedisStore::findings`]), and promises accordingly
//! ([`capabilities`](oncegate_core::Store::capabilities)):
//!
//! | server | durability | fencing |
//! |---|---|---|
//! | one, `appendonly yes`, `appendfsync always`, no replica | [`Synced`] | [`Monotonic`] |
//! | any other: less persistence, replicas, Sentinel, Cluster, or not known | [`Buffered`] | [`Equality`] |
//!
//! A record that Redis lost is an absent one: its key executes again. The owner from before is fenced, because tokens take
//! the server's clock and do not start again at one. A server that evicts keys is refused, because an evicted record
//! executes again ([`RedisOptions::with_danger_allow_eviction`]).
//!
//! # What fails, and how
//!
//! | what happens | what callers hear |
//! |---|---|
//! | no connection, no answer in time, an answer lost, a failover, a full memory | [`Unavailable`]: may be sent again |
//! | the key of a record holds something else, fields are missing, an unknown version | on that record: [`Corrupt`] |
//!
//! A lost connection is made again by the next command; while that fails, commands are refused at once and the pauses
//! between attempts grow from 50 ms to 2 s. No request waits longer than the time-outs.
//!
//! # What it costs
//!
//! One round trip for each command. All commands share one connection and are sent together as they come.
//!
//! [`Synced`]: oncegate_core::Durability::Synced
//! [`Buffered`]: oncegate_core::Durability::Buffered
//! [`Monotonic`]: oncegate_core::Fencing::Monotonic
//! [`Equality`]: oncegate_core::Fencing::Equality
//! [`Unavailable`]: oncegate_core::StoreErrorKind::Unavailable
//! [`Corrupt`]: oncegate_core::StoreErrorKind::Corrupt

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod applied_check;
pub mod contract;
mod disk;
mod error;
mod link;
mod list;
mod options;
mod probe;
mod replicas;
mod reply;
mod rights;
mod slots;
mod store;
mod watch;

#[cfg(test)]
mod tests;

pub use error::{RedisOpenError, RedisUrlError};
pub use options::RedisOptions;
pub use probe::{Finding, Severity};
pub use store::RedisStore;
