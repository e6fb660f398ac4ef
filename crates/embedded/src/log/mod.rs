//! The record log: the embedded store at the speed of the disk.
//!
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
//! - `tail`: the batch that is being filled. `writer`: the thread that writes it. `ticket`: the end of a batch, for those who wait.
//! - `index`: the places of all records, in memory. `inner`: decisions and reads on it.
//! - `recover`: opening. `housekeeper`: purges, compaction, the clock. `reader`: listings.
//!
//! # Why nothing acknowledged is lost
//!
//! 1. A caller is answered when the batch of its entry is on the disk. What it was decided on is in the same batch or before it.
//! 2. A batch is written when the one before it is on the disk, and its header has the checksum of the header before. So a
//!    valid batch proves that all before it were there: if one of them cannot be read, it is damage, and the store is not opened.
//! 3. Only the last batch may be torn by a crash. Within 100 ms another one follows, and proves it.
//! 4. A segment is deleted when no entry in it is the newest of its record, and after a batch on the disk says so.

pub(crate) mod disk;
mod format;
mod housekeeper;
mod index;
mod inner;
mod reader;
mod recover;
mod segments;
mod store;
mod tail;
mod ticket;
mod writer;

#[cfg(test)]
mod tests;

pub use store::LogStore;
