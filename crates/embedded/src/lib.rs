//! The durable single-node store of Oncegate: one file, no server.
//!
//! ```
//! # use std::time::Duration;
//! use oncegate_core::{AttemptId, Claim, Command, Fingerprint, Label, OnAbandoned, Outcome, RecordId, Store};
//! use oncegate_embedded::{EmbeddedOptions, EmbeddedStore, OpenError};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let parent = tempfile::tempdir()?;
//! # let dir = parent.path().join("oncegate-data");
//! let store = EmbeddedStore::open(EmbeddedOptions::new(&dir))?;
//!
//! // One process owns the directory at a time.
//! let error = EmbeddedStore::open(EmbeddedOptions::new(&dir)).unwrap_err();
//! assert!(matches!(error, OpenError::InUse { .. }));
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
//! // What was answered is on disk.
//! drop(store);
//! let store = EmbeddedStore::open(EmbeddedOptions::new(&dir))?;
//! assert!(matches!(store.apply(id, claim(3)).await?, Outcome::InProgress { .. }));
//! # Ok(()) }
//! ```
//!
//! # What it promises, and when
//!
//! 1. A command that changes something is answered after the change is on disk: committed in two phases, each followed
//!    by a flush. A crash of the process or of the machine loses nothing that was answered (I14, M17). What was not
//!    answered is there whole or not at all.
//! 2. A claim that changes nothing (a replay, a conflict, a mismatch) is answered by reading, on the caller's thread,
//!    without waiting for the commands that write. Only what is on disk is ever shown.
//! 3. All commands that are waiting when the disk is free are committed together, in the order of their arrival; each
//!    sees the ones before it. None is held back to wait for others.
//! 4. A command whose future is dropped before its turn is not carried out.
//! 5. The time is a [`StoreClock`](oncegate_core::StoreClock): that which has passed, also where the machine's clock is set, and
//!    never less than that of the last write to the file, so that tokens grow (I6) and leases end even if the machine
//!    starts with its clock behind.
//!
//! # What fails, and how
//!
//! | what happens | what callers hear | what an operator does |
//! |---|---|---|
//! | the disk is full | what is recorded is answered, also after a restart; the rest is [`Unavailable`] at once | makes room |
//! | less than 16 MiB, or an eighth, of the disk is left | claims are [`Unavailable`], what runs is completed | makes room |
//! | there are as many records, or bytes, as allowed | new keys are [`Unavailable`], others answered | raises the limit |
//! | a read, a write or a flush fails | on everything: [`Unavailable`], at once | looks at the disk |
//! | a record cannot be read, or a newer program wrote it | on that record: [`Corrupt`] | runs [`check`], restores |
//! | a page of the file's structure is damaged | [`Corrupt`], from then on also for new keys | runs [`check`], restores |
//! | more than sixteen full batches of commands wait | [`Unavailable`] | sends less, or gets a faster disk |
//! | the store was closed | [`Unavailable`] | |
//!
//! After a failure of the disk, the commands of the failed commit may or may not have been carried out; sent again, they
//! get the answer that they lost. The store closes its file, tries to open it again, at once and then after pauses that
//! grow from 50 ms to 5 s, proves by a durable commit that it can be written, and goes on: no restart is needed.
//!
//! A record that cannot be read is never taken for absent and never purged; the other records go on.
//!
//! The store cannot be opened where [another process has it](OpenError::InUse) (whose pid is named; the lock goes with
//! that process, however it ends), where its file is [of a newer format](OpenError::NewerFormat), or is
//! [damaged](OpenError::Damaged): in part, empty, or something else altogether. A new file is only made where there is
//! none, under another name until it is whole.
//!
//! Why a failed flush is survived without trusting what the operating system shows afterwards is told where it is done,
//! in `database.rs`.
//!
//! # What cannot be noticed
//!
//! Every record carries a checksum of its own, so a changed record is never replayed. The pages above the records are
//! verified as a whole when the file is opened after a stop that was not clean, and after every other one as long as the
//! file is not larger than [`with_verify_bytes`](EmbeddedOptions::with_verify_bytes) (256 MiB by default). They are *not*
//! verified again while the store is open. So a disk that changes such a page by itself, in a running store or in a
//! large file that was stopped cleanly, may hide records, and a hidden record is executed again. Where that is to be
//! feared, verify larger files too, run [`check`] now and then, or keep the file on a file system with checksums. A file
//! that is replaced by an older copy of itself is as good as the copy.
//!
//! # What it costs
//!
//! - A claim and its completion are two commits of two flushes each. Commands that arrive while the disk is busy share
//!   them: with 64 of them in flight, there are three to four durable writes for each flush that the disk can do.
//! - Memory: [`with_cache_bytes`](EmbeddedOptions::with_cache_bytes), 64 MiB by default, and the responses that are on
//!   their way, whatever the number of records. The directory takes two to three times the size of the records.
//! - Opening takes milliseconds, and verifying the file, where it is, two seconds for each gigabyte that the operating
//!   system has in memory, and up to double that from a fast disk.
//! - The file grows as needed and shrinks when much of it is free; expired records free their space when they are
//!   [purged](oncegate_core::Store::purge), and only what is due is read for that.
//! - Two threads: one writes, one reads listings and the audit trail. A read on the caller's thread may wait for the
//!   disk where the page is not in memory. [`EmbeddedStore::open`] and [`EmbeddedStore::close`] block.
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
pub use error::OpenError;
pub use options::EmbeddedOptions;
pub use store::EmbeddedStore;
