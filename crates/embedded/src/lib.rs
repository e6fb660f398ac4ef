//! The durable single-node store of Oncegate: a log of records in a directory, no server.
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
//! 1. A command that changes a record is answered after the change is on disk. A crash of the process or of the machine loses
//!    nothing that was answered (I14). After a crash, a command that was not answered has taken effect completely or not at all.
//! 2. A claim that changes nothing (a replay, a conflict, a mismatch) is answered at once, unless it depends on a change that is
//!    not on disk yet. No reply shows what a crash could take back.
//! 3. All commands that arrive while the disk is busy are written together, in the order of their arrival. Each command sees the
//!    effects of the commands before it. No command is held back until others arrive.
//! 4. The store's time is a [`StoreClock`](oncegate_core::StoreClock). It follows the time that has passed, even if the
//!    machine's clock is set, and it is never earlier than the last write. So fencing tokens grow (I6) and leases end even if the
//!    machine starts with its clock behind.
//!
//! # Failures
//!
//! | event | result for callers | task of the operator |
//! |---|---|---|
//! | the disk is full | recorded keys are answered, running requests end; claims are [`Unavailable`] | free disk space |
//! | the disk is nearly full (below) | claims are [`Unavailable`], running requests are completed | free disk space |
//! | a limit of records or bytes is reached | new keys are [`Unavailable`], others are answered | raise the limit |
//! | a write or a flush fails | none, if another file works; else writes are [`Unavailable`] | check the disk |
//! | a read fails | this command is [`Unavailable`] | check the disk |
//! | a record cannot be read, or is of a newer program | commands for it are [`Corrupt`] | run [`check()`], restore |
//! | more than 16 MiB of commands wait | further commands are [`Unavailable`] | send less, or use a faster disk |
//! | the directory was moved or replaced | nothing is acknowledged until it is back | put it back |
//! | the store was closed | [`Unavailable`] | |
//!
//! The disk is nearly full when less than 16 MiB are free, or less than an eighth of a disk that is smaller than 128 MiB, or when
//! the next segment cannot be prepared.
//!
//! A command that was sent when a write failed may or may not have been applied. A command that is sent again gets the reply that
//! was lost. The writer tries again after pauses that grow from 50 ms to 5 s. No restart is needed.
//!
//! A record that cannot be read is never treated as absent and never purged before its retention ends.
//!
//! The store does not open in these cases:
//! - [Another process has it open](EmbeddedOpenError::InUse). The error names its pid. The lock ends with that process, however
//!   the process ends.
//! - The log [has a newer format](EmbeddedOpenError::NewerFormat).
//! - The log is [damaged](EmbeddedOpenError::Damaged): a segment is missing, a batch that was on the disk cannot be read, or the
//!   log ends before the batch that its mark knows. The store creates a new log only if the directory has none, and no mark.
//! - It is a copy that [`salvage()`] made, and its losses [were not accepted](EmbeddedOpenError::Salvaged).
//! - The operating system [refuses an operation](EmbeddedOpenError::Io), for example on a full disk.
//!
//! # Damage that the store cannot detect
//!
//! Opening reads and verifies each byte of the log. The last batch before a crash is the exception: if it cannot be read and
//! nothing follows it, it was torn by the crash, or it was damaged after it. Within 100 ms after a batch, another one proves it.
//!
//! A log ends where zeros follow. If its end is missing, the file `mark` shows it: it knows a batch that was on the disk. It is
//! written when the store is opened and closed, when a segment is full, and otherwise each ten seconds while batches are written.
//! What was written after it before a crash may be missing undetected. Without the file, a store opens with a warning.
//!
//! The store cannot detect that its whole directory was replaced by an older copy: it then knows only the records of that copy.
//!
//! # Costs
//!
//! - A claim and its completion are two writes of at least 4 KiB with one flush each. Commands that arrive while the disk is busy
//!   share one.
//! - Memory: 24 to 48 bytes for each record, and recent records, together at most
//!   [`with_memory_bytes`](EmbeddedOptions::with_memory_bytes): 512 MiB by default. Opening takes a few more MiB.
//! - Disk: at most twice the bytes of live records, and four segments. Segments have 1 to 64 MiB.
//! - Opening reads the log, about a second for each gigabyte that the operating system has in memory.
//! - Four threads: one writes, one prepares segments, one purges and compacts, one reads listings and the audit trail. A read on
//!   the caller's thread may wait for the disk if the record is not in memory. [`EmbeddedStore::open`] and
//!   [`EmbeddedStore::close`] block.
//!
//! # Structure
//! ```text
//!  callers                            writer                    disk
//!    │ decide under the shard's lock    │                        │
//!    ├──────── append ─────► tail ──────┤ takes the whole batch  │
//!    │                                  ├──── one write ────────►│ segment 7: │batch│batch│batch│ 0 0 0
//!    │                                  │◄─── on the disk ───────┤
//!    │                       index ◄────┤ places of the entries  │
//!    │◄───────── answer ────────────────┤                        │
//! ```
//!
//! - `format`: the bytes of a segment. `disk`: all input and output, so that tests can simulate a disk.
//! - `tail`: the batch that is being filled. `writer`: the thread that writes it. `ticket`: the end of a batch, for those who
//!   wait.
//! - `index`: the places of all records, in memory. `inner`: decisions and reads on it.
//! - `backup`: a copy of a store that is open.
//! - `recover`: opening. `mark`: how far the log was written. `check`, `salvage`: reading a log that is not opened.
//! - `housekeeper`: purges, compaction, the clock. `reader`: listings.
//!
//! # Why nothing acknowledged is lost
//!
//! 1. A caller is answered when the batch of its entry is on the disk. What it was decided on is in the same batch or before it.
//! 2. A batch is written when the one before it is on the disk, and its header has the checksum of the header before. So a
//!    valid batch proves that all before it were there: if one of them cannot be read, it is damage, and the store is not opened.
//! 3. Only the last batch may be torn by a crash. Within 100 ms another one follows, and proves it.
//! 4. The mark knows a batch that was on the disk. A log that does not reach it is not opened.
//! 5. A segment is deleted when no entry in it is the newest of its record, and after a batch on the disk says so.
//!
//! [`Unavailable`]: oncegate_core::StoreErrorKind::Unavailable
//! [`Corrupt`]: oncegate_core::StoreErrorKind::Corrupt

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod audit;
mod backup;
mod check;
mod clock;
mod directory;
mod disk;
mod error;
mod format;
mod housekeeper;
mod index;
mod inner;
mod mark;
mod options;
mod queue;
mod reader;
mod recover;
mod salvage;
mod segments;
mod shared;
mod store;
mod tail;
mod ticket;
mod writer;

#[cfg(test)]
mod tests;

pub use backup::{BackupFile, BackupSnapshot};
pub use check::{CheckReport, check, check_each};
pub use disk::segment_files;
pub use error::EmbeddedOpenError;
pub use options::EmbeddedOptions;
pub use salvage::{SalvageReport, salvage};
pub use store::EmbeddedStore;
