//! The mark: a batch that was on the disk, kept outside of the segments.
//!
//! A log ends where zeros follow. So a log whose end is missing looks like one that was never longer: for example if the disk
//! returns zeros, or if segments of an older backup were put back. The file `mark` knows the number of a batch that was on the
//! disk, and the checksum of its header. A log that ends before this batch, or has another batch of this number, is not opened.
//!
//! The file has two slots of [`BLOCK`] bytes, which are written in turn. A torn write damages one, and the other is still valid.
//!
//! ```text
//! slot    0 magic "OGM1" │ 4 u32 segment │ 8 store id, 16 bytes │ 24 u64 sequence │ 32 u64 wall
//!        40 u32 checksum of the batch's header │ 44 u32 checksum of bytes 0 to 43 │ zeros
//! ```
//!
//! The mark is written when the store is opened and closed, when a segment is sealed, and each [`INTERVAL`] while batches are
//! written. No request waits for it. The loss of what was written after the last mark before a crash is not noticed.
//!
//! # Why no sound log is refused
//!
//! 1. A batch is in the mark only after its flush has succeeded. From then on its number is never given to another batch.
//! 2. The first segment has its name durably before the mark is created. So a mark without segments is a loss.
//! 3. A slot that is not valid says nothing. A mark that is older than the log is not compared: its segment was deleted.

use std::io;
use std::time::{Duration, Instant};

use oncegate_core::{ErrorChain, Timestamp};
use tracing::{info, warn};

use crate::disk::Disk;
use crate::error::EmbeddedOpenError;
use crate::format::{BLOCK, Header, NoHeader, Reader, StoreId};
use crate::recover::FORMAT;

/// The interval at which the mark is written while batches are.
pub(crate) const INTERVAL: Duration = Duration::from_secs(10);

/// The time after which operators learn that the mark cannot be written.
const FAILURE_TIMEOUT: Duration = Duration::from_secs(60);

const MAGIC: [u8; 4] = *b"OGM1";
/// The bytes of a slot that are not zeros.
const LEN: usize = 48;
const SLOTS: usize = 2;

/// A batch that was on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) store: StoreId,
    pub(crate) segment: u32,
    pub(crate) sequence: u64,
    /// The time of day when the batch was written.
    pub(crate) wall: Timestamp,
    /// The checksum of its header.
    pub(crate) chain: u32,
}

impl Mark {
    pub(crate) fn of(header: &Header, chain: u32) -> Self {
        Self {
            store: header.store,
            segment: header.segment,
            sequence: header.sequence,
            wall: header.written.wall,
            chain,
        }
    }

    /// The bytes of a new file with this mark.
    pub(crate) fn new_file(mark: Self) -> Vec<u8> {
        let mut bytes = mark.encode();
        bytes.resize(SLOTS * BLOCK as usize, 0);
        bytes
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(BLOCK as usize);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&self.segment.to_be_bytes());
        bytes.extend_from_slice(&self.store);
        bytes.extend_from_slice(&self.sequence.to_be_bytes());
        bytes.extend_from_slice(&self.wall.as_millis().to_be_bytes());
        bytes.extend_from_slice(&self.chain.to_be_bytes());
        let sum = crc32c::crc32c(&bytes);
        bytes.extend_from_slice(&sum.to_be_bytes());
        bytes.resize(BLOCK as usize, 0);
        bytes
    }

    fn decode(bytes: &[u8; LEN]) -> Result<Self, NoHeader> {
        let (content, sum) = bytes.split_last_chunk::<4>().ok_or(NoHeader::Invalid)?;
        if bytes.iter().all(|byte| *byte == 0) {
            return Err(NoHeader::Empty);
        }
        if crc32c::crc32c(content) != u32::from_be_bytes(*sum) {
            return Err(NoHeader::Invalid);
        }
        let mut from = Reader(content);
        match from.array() {
            Some(MAGIC) => Self::fields(&mut from).ok_or(NoHeader::Invalid),
            Some([b'O', b'G', b'M', _]) => Err(NoHeader::Newer),
            _ => Err(NoHeader::Invalid),
        }
    }

    fn fields(from: &mut Reader<'_>) -> Option<Self> {
        Some(Self {
            segment: from.u32()?,
            store: from.array()?,
            sequence: from.u64()?,
            wall: from.time()?,
            chain: from.u32()?,
        })
    }
}

/// The content of the file.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    is_there: bool,
    slots: [Option<Mark>; SLOTS],
    /// True if a slot has content that is not valid.
    is_damaged: bool,
    /// The error of reading a slot.
    error: Option<io::Error>,
}

impl Marks {
    pub(crate) fn read(disk: &dyn Disk) -> Result<Self, EmbeddedOpenError> {
        let open = EmbeddedOpenError::io(format!("open {}", disk.mark_path().display()));
        let Some(file) = disk.open_mark().map_err(open)? else { return Ok(Self::default()) };
        let mut marks = Self { is_there: true, ..Self::default() };
        for (slot, number) in marks.slots.iter_mut().zip(0..) {
            let mut bytes = [0; LEN];
            // A slot that cannot be read is like one that is not valid: the other one counts.
            match file.read(&mut bytes, number * BLOCK) {
                Ok(count) if count < LEN => marks.is_damaged = true,
                Ok(_) => match Mark::decode(&bytes) {
                    Ok(mark) => *slot = Some(mark),
                    Err(NoHeader::Newer) => {
                        return Err(EmbeddedOpenError::NewerFormat {
                            dir: disk.directory(),
                            found: FORMAT + 1,
                            known: FORMAT,
                        });
                    }
                    Err(NoHeader::Empty) => {}
                    Err(NoHeader::Invalid) => marks.is_damaged = true,
                },
                Err(error) => marks.error = Some(error),
            }
        }
        Ok(marks)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Mark> {
        self.slots.iter().flatten()
    }

    pub(crate) fn newest(&self) -> Option<&Mark> {
        self.iter().max_by_key(|mark| mark.sequence)
    }

    /// The damage, if there is a mark although there is no segment.
    pub(crate) fn check_no_segments(&self) -> Result<(), String> {
        if !self.is_there {
            return Ok(());
        }
        let known = self.newest().map_or_else(String::new, |mark| {
            format!(": batch {} was on the disk at {}", mark.sequence, mark.wall.to_rfc3339())
        });
        Err(format!(
            "all segments are missing{known}. If no client repeats a request of that store, remove the file to start with an empty one"
        ))
    }

    /// The damage, if a mark is of another store than the log.
    pub(crate) fn check_store(&self, store: StoreId) -> Result<(), String> {
        match self.iter().find(|mark| mark.store != store) {
            None => Ok(()),
            Some(mark) => Err(format!(
                "it is of another store than the segments next to it, and the batch {} of that store was on the disk at {}. If its \
                 records count, restore its segments; if those that are here count, remove the file",
                mark.sequence,
                mark.wall.to_rfc3339()
            )),
        }
    }

    /// The damage, if this batch is not the one that a mark knows.
    pub(crate) fn check_batch(&self, header: &Header, chain: u32) -> Result<(), String> {
        match self.iter().find(|mark| mark.sequence == header.sequence && mark.chain != chain) {
            None => Ok(()),
            Some(mark) => Err(other_history(mark)),
        }
    }

    /// The damage, if the log ends before a batch that was on the disk.
    pub(crate) fn check_end(&self, last: &Header) -> Result<(), String> {
        match self.newest().filter(|mark| mark.sequence > last.sequence) {
            None => Ok(()),
            Some(mark) => Err(format!(
                "the log ends with batch {} of {}, and batch {} of {} was on the disk: {} batches are missing",
                last.sequence,
                last.written.wall.to_rfc3339(),
                mark.sequence,
                mark.wall.to_rfc3339(),
                mark.sequence - last.sequence
            )),
        }
    }

    /// The reason why a missing end of the log cannot be noticed, if there is one.
    pub(crate) fn weakness(&self, disk: &dyn Disk, last: &Header) -> Option<String> {
        // The mark is created after the first batch, which is empty.
        if !self.is_there && last.sequence <= 1 {
            return None;
        }
        if let Some(newest) = self.newest() {
            let path = disk.mark_path();
            return (self.is_damaged || self.error.is_some()).then(|| {
                format!(
                    "one of the two slots of {} cannot be read. The other one is of {}: what was written in the {} seconds after it may \
                     be missing unnoticed. It is mended when the store is opened",
                    path.display(),
                    newest.wall.to_rfc3339(),
                    2 * INTERVAL.as_secs()
                )
            });
        }
        let reason = match &self.error {
            _ if !self.is_there => "is missing".to_owned(),
            Some(error) => format!("cannot be read ({})", ErrorChain(error)),
            None => "cannot be read".to_owned(),
        };
        Some(format!(
            "{} {reason}. It knows how far the log was written: without it, a start cannot tell if records are missing after batch {} of {}. \
             A copy of a store needs this file, too",
            disk.mark_path().display(),
            last.sequence,
            last.written.wall.to_rfc3339()
        ))
    }
}

/// The damage if the log has another batch of the mark's number.
pub(crate) fn other_history(mark: &Mark) -> String {
    format!(
        "batch {} is another one than that of {}, which was on the disk: the segments and the mark are of different copies of the store",
        mark.sequence,
        mark.wall.to_rfc3339()
    )
}

/// The reason why the mark cannot be written.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    /// The first failure since the last success.
    since: Instant,
    /// The last error, in words.
    pub(crate) error: String,
}

impl Failure {
    /// True if operators should know.
    pub(crate) fn lasts(&self) -> bool {
        self.since.elapsed() >= FAILURE_TIMEOUT
    }
}

/// Writes the mark.
pub(crate) struct Marker {
    written: Option<Mark>,
    /// The slot that is written next.
    next: usize,
    /// A new file replaces the old one, which is missing or has no valid slot.
    is_replaced: bool,
    tried_at: Instant,
    failure: Option<Failure>,
}

impl Marker {
    pub(crate) fn new(marks: &Marks) -> Self {
        let newest = marks.newest().copied();
        Self {
            written: newest,
            next: marks.slots.iter().position(|slot| *slot != newest).unwrap_or(0),
            is_replaced: newest.is_none(),
            tried_at: Instant::now(),
            failure: None,
        }
    }

    /// True if the interval is over, or the log continues in another segment.
    pub(crate) fn is_due(&self, mark: &Mark) -> bool {
        let is_next_segment = self.written.is_none_or(|written| written.segment != mark.segment);
        (self.failure.is_none() && is_next_segment) || self.tried_at.elapsed() >= INTERVAL
    }

    /// Writes the mark unless it is written. A failure is reported, and the store works without the mark.
    pub(crate) fn write(&mut self, disk: &dyn Disk, mark: Mark) -> Option<Failure> {
        self.tried_at = Instant::now();
        if self.written == Some(mark) {
            return self.failure.clone();
        }
        match self.try_write(disk, mark) {
            Ok(()) => {
                self.written = Some(mark);
                self.next = (self.next + 1) % SLOTS;
                self.is_replaced = false;
                if self.failure.take().is_some() {
                    info!("the mark of the embedded store can be written again");
                }
            }
            Err(error) => {
                let since = match &self.failure {
                    Some(failure) => failure.since,
                    None => {
                        warn!(
                            error = %ErrorChain(&error),
                            "the mark of the embedded store cannot be written; until it can, a start cannot notice if the end of the log is missing"
                        );
                        Instant::now()
                    }
                };
                self.failure = Some(Failure { since, error: ErrorChain(&error).to_string() });
            }
        }
        self.failure.clone()
    }

    fn try_write(&self, disk: &dyn Disk, mark: Mark) -> io::Result<()> {
        // As with segments, a file whose flush failed is not used again.
        let file = if self.is_replaced || self.failure.is_some() { None } else { disk.open_mark()? };
        match file {
            Some(file) => file.write_durably(&mark.encode(), self.next as u64 * BLOCK),
            None => {
                let other = self.written.map_or_else(|| vec![0; BLOCK as usize], |old| old.encode());
                let slots = if self.next == 0 { [mark.encode(), other] } else { [other, mark.encode()] };
                disk.replace_mark(&slots.concat())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_reads_back_and_no_flipped_bit_goes_unnoticed() {
        let mark = Mark {
            store: [7; 16],
            segment: 3,
            sequence: u64::MAX - 3,
            wall: Timestamp::from_millis(5),
            chain: 9,
        };
        let bytes: [u8; LEN] = *mark.encode().first_chunk().unwrap();
        assert_eq!(Mark::decode(&bytes), Ok(mark));
        for bit in 0..LEN * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Mark::decode(&damaged), Err(NoHeader::Invalid), "bit {bit}");
        }
        assert_eq!(Mark::decode(&[0; LEN]), Err(NoHeader::Empty));
    }
}
