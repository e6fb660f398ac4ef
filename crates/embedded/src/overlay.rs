//! An in-memory layer of changes over a file, for reading a store whose disk is full.
//!
//! ```text
//!              redb
//!   write, set_len │ │ read
//!                  ▼ ▼
//!   changed blocks of 4 KiB, and the length     (memory, at most 64 MiB)
//!                      │ read: everything else
//!                      ▼
//!                    ▼
//!                     file                      (disk, never written)
//! ```

use std::collections::BTreeMap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use redb::StorageBackend;

/// The size of a block of changes, in bytes: the size of a page of the database.
const BLOCK_BYTES: u64 = 4096;

/// The most blocks in memory. To open and read a file, the database writes only its header and its list of free pages.
const MAX_BLOCKS: usize = 16 * 1024;

/// A file whose changes stay in memory and are lost when it is dropped.
///
/// redb opens a file only if it can write to it, and repairs the file while it opens it. When the disk is full, that
/// fails, although the file has everything that is needed to answer recorded keys. Through this layer, redb opens the file
/// as of its last commit.
#[derive(Debug)]
pub(crate) struct Overlay {
    file: Box<dyn StorageBackend>,
    changes: Mutex<Changes>,
}

#[derive(Debug)]
struct Changes {
    len: u64,
    /// The length of the visible part of the file. `set_len` can only shrink it.
    file_len: u64,
    blocks: BTreeMap<u64, Box<[u8]>>,
}

impl Overlay {
    pub(crate) fn new(file: Box<dyn StorageBackend>) -> io::Result<Self> {
        let len = file.len()?;
        let changes = Mutex::new(Changes { len, file_len: len, blocks: BTreeMap::new() });
        Ok(Self { file, changes })
    }

    /// Locks the changes. They are consistent even after a panic, because a block is filled before it is inserted.
    fn changes(&self) -> MutexGuard<'_, Changes> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads from the file at `offset`. Beyond the end of the file it returns zeros.
    fn read_file(&self, file_len: u64, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let there = file_len.saturating_sub(offset).min(out.len() as u64) as usize;
        let (from_file, beyond) = out.split_at_mut(there);
        beyond.fill(0);
        if from_file.is_empty() { Ok(()) } else { self.file.read(offset, from_file) }
    }
}

/// Splits `offset..offset + len` by blocks: the block number, the range in the block, and the range in the whole.
fn parts(
    offset: u64,
    len: usize,
) -> impl Iterator<Item = (u64, std::ops::Range<usize>, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = offset + done as u64;
        let start = (at % BLOCK_BYTES) as usize;
        let count = (len - done).min(BLOCK_BYTES as usize - start);
        let part = (at / BLOCK_BYTES, start..start + count, done..done + count);
        done += count;
        (count > 0).then_some(part)
    })
}

impl StorageBackend for Overlay {
    fn len(&self) -> io::Result<u64> {
        Ok(self.changes().len)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let changes = self.changes();
        if offset.saturating_add(out.len() as u64) > changes.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.read_file(changes.file_len, offset, out)?;
        for (block, inside, whole) in parts(offset, out.len()) {
            let changed = changes.blocks.get(&block).and_then(|block| block.get(inside));
            if let (Some(changed), Some(out)) = (changed, out.get_mut(whole)) {
                out.copy_from_slice(changed);
            }
        }
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut changes = self.changes();
        changes.len = len;
        changes.file_len = changes.file_len.min(len);
        let _cut_off = changes.blocks.split_off(&len.div_ceil(BLOCK_BYTES));
        // If the file grows again, the part of the last block that was cut off must read as zeros.
        let tail = (len % BLOCK_BYTES) as usize..;
        if let Some(tail) = changes.blocks.get_mut(&(len / BLOCK_BYTES)).and_then(|block| block.get_mut(tail))
        {
            tail.fill(0);
        }
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut changes = self.changes();
        for (block, inside, whole) in parts(offset, data.len()) {
            if !changes.blocks.contains_key(&block) {
                if changes.blocks.len() >= MAX_BLOCKS {
                    return Err(io::Error::from(io::ErrorKind::StorageFull));
                }
                let mut bytes = vec![0; BLOCK_BYTES as usize].into_boxed_slice();
                self.read_file(changes.file_len, block * BLOCK_BYTES, &mut bytes)?;
                changes.blocks.insert(block, bytes);
            }
            let to = changes.blocks.get_mut(&block).and_then(|block| block.get_mut(inside));
            if let (Some(to), Some(data)) = (to, data.get(whole)) {
                to.copy_from_slice(data);
            }
        }
        changes.len = changes.len.max(offset + data.len() as u64);
        Ok(())
    }

    fn close(&self) -> io::Result<()> {
        self.file.close()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use redb::backends::InMemoryBackend;

    #[test]
    fn reads_return_written_bytes_and_the_file_stays_unchanged() {
        let file = InMemoryBackend::new();
        file.set_len(10_000).unwrap();
        file.write(0, &[1; 10_000]).unwrap();
        let overlay = Overlay::new(Box::new(file)).unwrap();
        overlay.write(4090, &[2; 10]).unwrap();
        overlay.write(9_998, &[3; 6]).unwrap();
        assert_eq!(overlay.len().unwrap(), 10_004);
        let mut all = vec![0; 10_004];
        overlay.read(0, &mut all).unwrap();
        let expected = [vec![1; 4090], vec![2; 10], vec![1; 5898], vec![3; 6]].concat();
        assert!(all == expected);
        assert!(overlay.read(10_000, &mut [0; 5]).is_err(), "beyond the end");
        let mut untouched = vec![0; 10_000];
        overlay.file.read(0, &mut untouched).unwrap();
        assert!(untouched == vec![1; 10_000]);
    }

    #[test]
    fn bytes_that_were_cut_off_are_zeros_when_the_file_grows_again() {
        let file = InMemoryBackend::new();
        file.set_len(10_000).unwrap();
        file.write(0, &[1; 10_000]).unwrap();
        let overlay = Overlay::new(Box::new(file)).unwrap();
        overlay.write(4096, &[1]).unwrap();
        overlay.set_len(5000).unwrap();
        overlay.set_len(9000).unwrap();
        let mut all = vec![9; 9000];
        overlay.read(0, &mut all).unwrap();
        assert!(all == [vec![1; 5000], vec![0; 4000]].concat());
    }
}
