//! A store of two: a fast *front* that knows answers, before an authoritative *back*.
//!
//! The front answers one question, and may fail to at any time: is this key completed, and with what answer? Every other
//! question, and that one where the front does not know, goes to the back, whose word is the only one that counts. So a
//! front that is lost, empty, slow or full makes requests slower and never wrong; and while the back is out of reach, keys
//! that the front knows are still answered.
//!
//! ```
//! use std::sync::Arc;
//! use oncegate_core::{AttemptId, Claim, Command, Fingerprint, Label, MemoryStore, OnAbandoned, Outcome, RecordId, Store};
//! use oncegate_cache::{Cache, CacheOptions, CachedStore};
//!
//! # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let back = Arc::new(MemoryStore::default()); // a PostgresStore, in real life
//! let store = CachedStore::new(Cache::in_memory(64 << 20), back, CacheOptions::new());
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
//! # How the front is filled
//!
//! After the back acknowledged a completion with an answer, and after a replay that the back had to give, the record is read
//! from the back in the background and its answer put into the front. No request waits for that. Few are under way at a
//! time, a bounded number wait, and what is more is left out and counted.
//!
//! # Why the front is never wrong
//!
//! A record that is completed with an answer changes no more before its retention ends, so an answer in the front needs never
//! be taken back; it only has to be gone when the record is. Therefore every entry has written in it until when it may be
//! given, **by the back's clock**: at least [`MARGIN`] before the record ends, and [`CacheOptions::with_keep`] after it was
//! read at the latest. It is given only while the back's clock, as last seen, is before that time. So it does not matter what the
//! front's own clock says, how late a write arrived there, or that the front was restored from an old backup: an entry from
//! a key's former life is over by itself. An entry also has a checksum, over the key, the request and the answer.
//!
//! What remains, and is bounded by `keep`: where records of the back are lost, deleted by hand, or the back is replaced by
//! an older copy of itself, the front goes on giving the answers that it has. They are answers of executions that took place.
//! And where the back's clock is set ahead, the front learns of it from the next answer of the back.
//!
//! # What fails, and how
//!
//! | what happens | what callers notice |
//! |---|---|
//! | the front fails, or is slower than its [patience](CacheOptions::with_timeout) | it is not asked until it is quick |
//! | the front lost entries, or refuses new ones | replays cost a trip to the back |
//! | an entry of the front cannot be read, or is not one of ours | it counts as missing |
//! | the back is out of reach | keys that the front knows replay; everything else is `Unavailable` |

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod cache;
mod entry;
mod fills;
mod memory;
mod options;
mod stats;
mod store;

pub use cache::Cache;
pub use oncegate_core::ConfigError;
pub use options::{CacheOptions, MARGIN};
pub use stats::{CacheCounts, CacheStats};
pub use store::CachedStore;
