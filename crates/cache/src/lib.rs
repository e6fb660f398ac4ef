//! A fast *cache* of responses in front of an authoritative *store*.
//!
//! The cache answers one question: is this key completed, and with which response? If the cache does not know, the
//! store answers. All other commands go to the store at once, and only the store decides. So a cache that is lost, empty, slow
//! or full makes requests slower, never wrong. While the store is unreachable, keys that the cache knows still replay.
//!
//! ```
//! use oncegate_core::{AttemptId, Claim, Command, Fingerprint, Label, MemoryStore, OnAbandoned, Outcome, RecordId, Store};
//! use oncegate_cache::{Cache, CacheOptions, CachedStore};
//!
//! # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let postgres = MemoryStore::default(); // a PostgresStore, in real life
//! let store = CachedStore::new(Cache::in_memory(64 << 20), postgres, CacheOptions::new());
//!
//! let claim = Command::Claim(Claim {
//!     attempt: AttemptId::new(1),
//!     fingerprint: Fingerprint::of_parts("example", &[b"pay 5"]),
//!     lease: std::time::Duration::from_secs(30),
//!     retention: std::time::Duration::from_secs(86_400),
//!     on_abandoned: OnAbandoned::Park,
//!     label: Label::default(),
//! });
//! let outcome = store.apply(RecordId::from_bytes([7; 32]), claim).await?;
//! assert!(matches!(outcome, Outcome::Execute(_)));
//! # Ok(()) }
//! ```
//!
//! # How the cache is populated
//!
//! After the store acknowledged a completion with a response, and after a replay that only the store could give, a
//! background task reads the record from the store and writes its response to the cache. No request waits for that. Few
//! such writes run at a time, and a bounded number waits; further ones are skipped and counted.
//!
//! # Why the cache is never wrong
//!
//! A record that its owner completed with a response does not change before its retention ends. So an entry of the cache
//! never has to be taken back; it only has to end before the record does. Each entry holds the time until which it may be
//! used, **by the store's clock**: at least [`MARGIN`] before the record ends, and at most [`CacheOptions::with_keep`]
//! after it was read. It is used only while the store's clock, as last seen, is before that time. So three things do not
//! matter: the clock of the cache, a write that arrives there late, and a cache that was restored from an old backup. An
//! entry from an earlier life of a key has ended by then. Each entry also has a checksum over the key, the request and the
//! response.
//!
//! One deviation remains, and `keep` bounds it: if the store loses records, if they are deleted by hand, or if an older
//! copy of the store replaces it, the cache still gives the responses that it has. They are responses of executions that
//! took place. And if the store's clock is set ahead, the cache learns of it from the next reply of the store.
//!
//! # Failures
//!
//! | failure | effect for callers |
//! |---|---|
//! | the cache fails, or exceeds its [timeout](CacheOptions::with_timeout) | claims skip it until it is fast again |
//! | the cache lost entries, or refuses new ones | replays cost a round trip to the store |
//! | an entry cannot be read, or something else has its identifier | it counts as missing |
//! | the store is unreachable | keys that the cache knows replay; everything else is `Unavailable` |

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod cache;
mod entry;
mod memory;
mod options;
mod populate;
mod stats;
mod store;

pub use cache::Cache;
pub use oncegate_core::ConfigError;
pub use options::{CacheOptions, MARGIN};
pub use stats::{CacheCounts, CacheStats};
pub use store::CachedStore;
