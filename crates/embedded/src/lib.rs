//! The durable single-node store of Oncegate: one file, no server.
//!
//! ```
//! # use std::time::Duration;
//! use oncegate_core::{AttemptId, Claim, Command, Fingerprint, Label, OnAbandoned, Outcome, RecordId, Store};
//! use oncegate_embedded::{EmbeddedOptions, EmbeddedStore, EmbeddedOpenError};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let parent = tempfile::tempdir()?;
//! # let dir = parent.path().join("oncegate-data");
//! let store = EmbeddedStore::open(EmbeddedOptions::new(&dir))?;
//!
//! // One process owns the directory at a time.
//! let error = EmbeddedStore::open(EmbeddedOptions::new(&dir)).unwrap_err();
//! assert!(matches!(error, EmbeddedOpenError::InUse { .. }));
//!
//! let claim = |attempt| Command::Claim(Claim {
//!     attempt: AttemptId::new(attempt),
//!     fingerprint: Fingerprint::of_parts("example", &[b"pay 5"]),
//!     lease: Duration::from_secs(30),
//!     retention: Duration::from_secs(86_400),
//!     on_abandoned: OnAbandoned::Park,
//!     label: Label::default(),
//! });
//! let id = RecordId::from_bytes([7; 32]);
//! assert!(matches!(store.apply(id, claim(1)).await?, Outcome::Execute(_)));
//! assert!(matches!(store.apply(id, claim(2)).await?, Outcome::InProgress { .. }));
//!
//! // The claim that was answered is on disk.
//! drop(store);
//! let store = EmbeddedStore::open(EmbeddedOptions::new(&dir))?;
//! assert!(matches!(store.apply(id, claim(3)).await?, Outcome::InProgress { .. }));
//! # Ok(()) }
//! ```
//!
//! # Guarantees
//!
//! 1. A command that changes a record is answered after the change is on disk. The commit has two phases, and each phase
//!    ends with a flush. A crash of the process or of the machine loses nothing that was answered (I14). After a crash, a
//!    command that was not answered has taken effect completely or not at all.
//! 2. A claim that changes nothing (a replay, a conflict, a mismatch) is answered by reading, on the caller's thread,
//!    without waiting for the commands that write. Reads only ever return data that is on disk.
//! 3. All commands that are waiting when the disk becomes free are committed together, in the order of their arrival.
//!    Each command sees the effects of the commands before it. No command is held back until others arrive.
//! 4. A command whose future is dropped before its turn is not applied.
//! 5. The store's time is a [`StoreClock`](oncegate_core::StoreClock). It follows the time that has passed, even if the
//!    machine's clock is set, and it is never earlier than the last write to the file. So fencing tokens grow (I6) and
//!    leases end even if the machine starts with its clock behind.
//!
//! # Failures
//!
//! | event | result for callers | task of the operator |
//! |---|---|---|
//! | the disk is full | recorded keys are answered, also after a restart; the rest is [`Unavailable`] at once | free disk space |
//! | the disk is nearly full (below) | claims are [`Unavailable`], running requests are completed | free disk space |
//! | a limit of records or bytes is reached | new keys are [`Unavailable`], others are answered | raise the limit |
//! | a read, a write or a flush fails | every command is [`Unavailable`] at once | check the disk |
//! | a record cannot be read, or a newer program wrote it | commands for that record are [`Corrupt`] | run [`check`], restore |
//! | a page of the file's structure is damaged | [`Corrupt`], from then on also for new keys | run [`check`], restore |
//! | more than sixteen full batches of commands wait | further commands are [`Unavailable`] | send less, or use a faster disk |
//! | the store was closed | [`Unavailable`] | |
//!
//! The disk is nearly full when less than 16 MiB are free, or less than an eighth of a disk that is smaller than 128 MiB.
//!
//! If a commit fails, its commands may or may not have been applied. A command that is sent again gets the reply that
//! was lost. The store closes its file and tries to open it again: at once, and then after pauses that grow from 50 ms to
//! 5 s. It continues as soon as a durable commit proves that the file can be written. No restart is needed.
//!
//! A record that cannot be read is never treated as absent and never purged. The other records stay available.
//!
//! The store does not open in these cases:
//! - [Another process has it open](EmbeddedOpenError::InUse). The error names its pid. The lock ends with that process, however
//!   the process ends.
//! - The file [has a newer format](EmbeddedOpenError::NewerFormat).
//! - The file is [damaged](EmbeddedOpenError::Damaged): incomplete, empty, or not a store at all. The store creates a new file
//!   only if there is none, and gives it its name only when it is complete.
//! - The operating system [refuses an operation](EmbeddedOpenError::Io), for example on a full disk.
//!
//! The comments in `database.rs` explain why the store survives a failed flush without trusting the data that the
//! operating system shows afterwards.
//!
//! # Damage that the store cannot detect
//!
//! Every record has a checksum of its own, so a changed record is never replayed. The pages above the records are
//! verified as a whole when the file is opened: after an unclean stop always, and after a clean stop if the file is not
//! larger than [`with_verify_bytes`](EmbeddedOptions::with_verify_bytes) (256 MiB by default). They are *not* verified
//! again while the store is open. So if a disk changes such a page on its own, in a running store or in a large file that
//! was stopped cleanly, records may be hidden, and a hidden record is executed again. If you have to expect that, verify
//! larger files too, run [`check`] from time to time, or keep the file on a file system with checksums. The store also
//! cannot detect that its file was replaced by an older copy: it then knows only the records of that copy.
//!
//! # Costs
//!
//! - A claim and its completion are two commits of two flushes each. Commands that arrive while the disk is busy share a
//!   commit: with 64 commands in flight, there are three to four durable writes for each flush that the disk can do.
//! - Memory: [`with_cache_bytes`](EmbeddedOptions::with_cache_bytes), 64 MiB by default, plus the responses in flight,
//!   independent of the number of records. The directory takes two to three times the size of the records.
//! - Opening takes milliseconds. Verification, if it is needed, takes two seconds for each gigabyte that the operating
//!   system has in memory, and up to twice that from a fast disk.
//! - The file grows as needed and shrinks when much of it is free. Expired records free their space when they are
//!   [purged](oncegate_core::Store::purge). A purge reads only the records that are due.
//! - Two threads: one writes, one reads listings and the audit trail. A read on the caller's thread may wait for the
//!   disk if the page is not in memory. [`EmbeddedStore::open`] and [`EmbeddedStore::close`] block.
//!
//! [`Unavailable`]: oncegate_core::StoreErrorKind::Unavailable
//! [`Corrupt`]: oncegate_core::StoreErrorKind::Corrupt

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod batch;
mod check;
mod clock;
mod database;
mod directory;
mod error;
mod log;
mod options;
mod overlay;
mod queue;
mod reader;
mod schema;
mod shared;
mod store;
mod writer;

#[cfg(test)]
mod tests;

pub use check::{CheckReport, check};
pub use error::EmbeddedOpenError;
pub use log::LogStore;
pub use options::EmbeddedOptions;
pub use store::EmbeddedStore;
