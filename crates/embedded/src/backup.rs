//! A copy of a store that is open: all files as they are at one moment, read while the store works on.
//!
//! # Why the copy is a state that the store had
//!
//! 1. The writer changes the end of the log and its mark together ([`StoreInner::set_end`]), after the batch is on the disk. The
//!    snapshot takes the segments, their lengths and the mark under the same lock. So it has every batch up to the mark and
//!    nothing after it.
//! 2. What the log has in front of that end never changes. A segment is only ever appended to, and removed as a whole. The
//!    snapshot holds its file, which stays readable when its name is removed.
//! 3. A segment leaves the list only after a batch on the disk says that it does not count. So the last batch of a snapshot never
//!    names a segment that the snapshot lacks.
//! 4. A log must not end with a seal, because the next segment would seem to be lost. Between a seal and the next segment the
//!    snapshot waits. A next segment without batches is copied, too.
//!
//! The mark comes first. A copy that is cut off anywhere lacks a batch that its mark knows, or a part of a segment, and is
//! refused.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::{StoreError, Timestamp};

use crate::disk::{MARK, segment_name};
use crate::format::BLOCK;
use crate::inner::StoreInner;
use crate::mark::Mark;
use crate::segments::Segment;
use crate::store::EmbeddedStore;

/// The longest wait for the next segment.
const SEAL_TIMEOUT: Duration = Duration::from_secs(5);

/// The pause between two looks at it.
const SEAL_PAUSE: Duration = Duration::from_millis(1);

/// The files of a store as they were at one moment. Holds them open, so that they can be read after the store has removed them:
/// their space is freed when this is dropped.
pub struct BackupSnapshot {
    files: Vec<BackupFile>,
    taken: Timestamp,
}

/// One file of a [`BackupSnapshot`].
pub struct BackupFile {
    name: String,
    len: u64,
    content: Content,
}

enum Content {
    Bytes(Vec<u8>),
    /// A segment, and the length of its batches: zeros follow.
    Segment(Arc<Segment>, u64),
}

impl BackupSnapshot {
    /// The files. The first one makes every incomplete copy invalid.
    #[must_use]
    pub fn files(&self) -> &[BackupFile] {
        &self.files
    }

    /// The time of the last batch in it, by the clock of the machine: keys that were used later are unknown to the copy.
    #[must_use]
    pub const fn taken(&self) -> Timestamp {
        self.taken
    }
}

impl BackupFile {
    /// The name of the file in its directory.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The length in bytes.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if the file has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Reads bytes at an offset, all that are asked for or all up to the end of the file. Blocks while the disk works.
    ///
    /// # Errors
    /// If the disk cannot be read, or has fewer bytes than were written to it.
    pub fn read(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        let len = usize::try_from(self.len.saturating_sub(offset)).unwrap_or(usize::MAX).min(out.len());
        let out = out.get_mut(..len).unwrap_or_default();
        match &self.content {
            Content::Bytes(bytes) => {
                let from = usize::try_from(offset).unwrap_or(usize::MAX);
                let from = bytes.get(from..).and_then(|rest| rest.get(..len)).unwrap_or_default();
                out.copy_from_slice(from);
            }
            Content::Segment(segment, used) => {
                let written = usize::try_from(used.saturating_sub(offset)).unwrap_or(usize::MAX).min(len);
                let (batches, zeros) = out.split_at_mut(written);
                if segment.file.read(batches, offset)? < written {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        format!(
                            "the file of segment {} is shorter than what was written to it",
                            segment.number
                        ),
                    ));
                }
                zeros.fill(0);
            }
        }
        Ok(len)
    }
}

impl EmbeddedStore {
    /// Takes a snapshot for a copy of the store, which works on meanwhile. Everything that was acknowledged before is in it.
    ///
    /// A copy in a directory of its own is a store as it was at this moment. Check it with [`check()`](crate::check()). **A copy
    /// does not know the keys that are used after it:** a store that is opened from it executes their retries again.
    ///
    /// Blocks between the end of a segment and the next one, which is a moment.
    ///
    /// # Errors
    /// If the store is closed, or its disk takes no writes right after a segment was full.
    pub fn snapshot(&self) -> Result<BackupSnapshot, StoreError> {
        let deadline = Instant::now() + SEAL_TIMEOUT;
        loop {
            self.check_open()?;
            if let Some(snapshot) = snapshot(self.inside()) {
                return Ok(snapshot);
            }
            if Instant::now() >= deadline {
                return Err(StoreError::unavailable(
                    "the embedded store has filled a segment and cannot begin the next one, so it has no state to copy",
                ));
            }
            std::thread::sleep(SEAL_PAUSE);
        }
    }
}

fn snapshot(inner: &StoreInner) -> Option<BackupSnapshot> {
    let (mark, segments) = inner.with_end(|end| {
        let segments = inner.segments.all();
        let continues = segments.last().is_some_and(|(last, _)| last.number > end.mark.segment);
        (!end.is_sealed || continues).then_some((end.mark, segments))
    })?;
    let mut files = vec![BackupFile {
        name: MARK.to_owned(),
        len: 2 * BLOCK,
        content: Content::Bytes(Mark::new_file(mark)),
    }];
    files.extend(segments.into_iter().map(|(segment, used)| BackupFile {
        name: segment_name(segment.number),
        len: segment.size,
        content: Content::Segment(segment, used),
    }));
    Some(BackupSnapshot { files, taken: mark.wall })
}
