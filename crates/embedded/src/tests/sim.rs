//! A simulated disk that separates what is durable from what was written, and can crash, fail and be held.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use crate::disk::{Disk, SegmentFile};
use crate::tests::Random;

const SECTOR: usize = 512;

/// The number of the file with the mark, which is no segment.
pub(super) const MARK: u32 = 0;

/// A name in the directory: the number of a segment, or [`MARK`], and true if it is published.
type Name = (u32, bool);

/// A simulated disk. All clones share one state.
#[derive(Clone, Default)]
pub(super) struct SimDisk {
    state: Arc<Mutex<SimState>>,
    changed: Arc<Condvar>,
}

#[derive(Default)]
struct SimState {
    files: Vec<SimFile>,
    names: BTreeMap<Name, usize>,
    durable_names: BTreeMap<Name, usize>,
    /// The operations so far that change something.
    operations: u64,
    crash: Option<Crash>,
    /// Possible contents of the disk after the crash.
    crashed: Option<Vec<Image>>,
    fault: Option<Fault>,
    is_low: bool,
    held: bool,
    waiting: usize,
    moved: bool,
    /// The operation with the mark that fails. Other faults concern segments.
    mark_fault: Option<Operation>,
}

#[derive(Clone, Default)]
struct SimFile {
    live: Vec<u8>,
    durable: Vec<u8>,
    pending: Vec<(usize, Vec<u8>)>,
    /// A flush of this file failed: what is written to it from then on may never reach the disk, although flushes succeed.
    has_failed: bool,
}

/// The operation at which power fails.
#[derive(Clone, Copy, Debug)]
pub(super) struct Crash {
    pub(super) at: u64,
    /// The number of images to make, each with another part of the unfinished writes.
    pub(super) images: u64,
    pub(super) seed: u64,
}

/// A fault: some operations of one kind fail.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fault {
    pub(super) on: Operation,
    /// The number of operations that still work.
    pub(super) after: u64,
    /// The number of operations that fail after that.
    pub(super) times: u64,
    /// The error of the operating system.
    pub(super) errno: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Read,
    Write,
    Sync,
    Create,
}

/// The files of a disk by number.
pub(super) type Image = BTreeMap<u32, Vec<u8>>;

/// The numbers of the segments, oldest first.
pub(super) fn segments(image: &Image) -> Vec<u32> {
    image.keys().copied().filter(|number| *number != MARK).collect()
}

impl SimDisk {
    pub(super) fn of(image: &Image) -> Self {
        let disk = Self::default();
        let mut state = disk.lock();
        for (number, bytes) in image {
            let index = state.files.len();
            state.files.push(SimFile { live: bytes.clone(), durable: bytes.clone(), ..SimFile::default() });
            state.names.insert((*number, true), index);
            state.durable_names.insert((*number, true), index);
        }
        drop(state);
        disk
    }

    fn lock(&self) -> MutexGuard<'_, SimState> {
        self.state.lock().unwrap()
    }

    /// The disk after the process is killed, while the machine keeps running.
    pub(super) fn after_kill(&self) -> Image {
        let state = self.lock();
        let published = state.names.iter().filter(|((_, published), _)| *published);
        published.map(|((number, _), file)| (*number, state.files[*file].live.clone())).collect()
    }

    /// The disk after a power failure that loses everything that is not durable.
    pub(super) fn after_power_loss(&self) -> Image {
        let state = self.lock();
        let published = state.durable_names.iter().filter(|((_, published), _)| *published);
        published.map(|((number, _), file)| (*number, state.files[*file].durable.clone())).collect()
    }

    pub(super) fn crash_at(&self, crash: Crash) {
        self.lock().crash = Some(crash);
    }

    /// Possible contents of the disk after the crash, if the run reached it.
    pub(super) fn after_crash(&self) -> Option<Vec<Image>> {
        self.lock().crashed.clone()
    }

    /// The disk of the same machine for a new process, after the old one was killed at the point of the crash: what was written
    /// is there, but what was not flushed is still lost if power fails.
    pub(super) fn for_next_process(&self) -> Self {
        let state = self.lock();
        let next = SimState {
            files: state.files.clone(),
            names: state.names.clone(),
            durable_names: state.durable_names.clone(),
            ..SimState::default()
        };
        Self { state: Arc::new(Mutex::new(next)), changed: Arc::default() }
    }

    pub(super) fn fail(&self, fault: Fault) {
        self.lock().fault = Some(fault);
    }

    pub(super) fn heal(&self) {
        self.lock().fault = None;
    }

    pub(super) fn set_low(&self, is_low: bool) {
        self.lock().is_low = is_low;
    }

    /// Makes it look as if the files were moved away, or back.
    pub(super) fn set_moved(&self, moved: bool) {
        self.lock().moved = moved;
    }

    pub(super) fn fail_mark(&self, on: Option<Operation>) {
        self.lock().mark_fault = on;
    }

    /// Flips the bits of a byte in all that can be read.
    pub(super) fn flip(&self, number: u32, offset: usize) {
        let mut state = self.lock();
        let file = state.names[&(number, true)];
        state.files[file].live[offset] ^= 0xff;
    }

    /// Makes all durable writes of segments wait until the returned value is dropped.
    pub(super) fn hold(&self) -> Hold {
        self.lock().held = true;
        Hold(self.clone())
    }

    /// Waits until a durable write of a segment is held.
    pub(super) fn wait_until_held(&self) {
        let (_state, timeout) = self
            .changed
            .wait_timeout_while(self.lock(), Duration::from_secs(20), |state| state.waiting == 0)
            .unwrap();
        assert!(!timeout.timed_out(), "nothing waits for the disk");
    }

    pub(super) fn bytes(&self) -> u64 {
        self.after_kill()
            .iter()
            .filter(|(number, _)| **number != MARK)
            .map(|(_, bytes)| bytes.len() as u64)
            .sum()
    }
}

/// Holds the disk until it is dropped.
#[must_use]
pub(super) struct Hold(SimDisk);

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.lock().held = false;
        self.0.changed.notify_all();
    }
}

impl SimState {
    fn check_of(&mut self, number: u32, operation: Operation) -> io::Result<()> {
        if self.crashed.is_some() {
            return Err(io::Error::other("the machine is off"));
        }
        if number == MARK {
            let fails = self.mark_fault == Some(operation);
            return if fails { Err(io::Error::other("the mark fails")) } else { Ok(()) };
        }
        match &mut self.fault {
            Some(fault) if fault.on == operation && fault.after > 0 => fault.after -= 1,
            Some(fault) if fault.on == operation && fault.times > 0 => {
                fault.times -= u64::from(fault.times < u64::MAX);
                return Err(io::Error::from_raw_os_error(fault.errno));
            }
            _ => {}
        }
        Ok(())
    }

    /// Counts an operation, and takes the image if power fails now.
    fn point(&mut self) {
        self.operations += 1;
        if let Some(crash) = self.crash.filter(|crash| crash.at == self.operations) {
            let images = (0..crash.images).map(|n| self.image(&mut Random(crash.seed + n)));
            self.crashed = Some(images.collect());
        }
    }

    fn image(&self, random: &mut Random) -> Image {
        // A rename or removal that was not synced may have happened or not.
        let names = if random.one_in(2) { &self.names } else { &self.durable_names };
        let published = names.iter().filter(|((_, published), _)| *published);
        published.map(|((number, _), file)| (*number, self.files[*file].after_crash(random))).collect()
    }
}

impl SimFile {
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        put(&mut self.live, offset, bytes);
        self.pending.push((offset, bytes.to_vec()));
    }

    fn sync(&mut self, kept: bool) {
        self.has_failed |= !kept;
        for (offset, bytes) in self.pending.drain(..) {
            if !self.has_failed {
                put(&mut self.durable, offset, &bytes);
            }
        }
    }

    /// The file after a crash: what is durable, and any of the other sectors, in any order.
    fn after_crash(&self, random: &mut Random) -> Vec<u8> {
        let mut image = self.durable.clone();
        let (all, none) = match random.below(6) {
            0 => (true, false),
            1 => (false, true),
            _ => (false, false),
        };
        for (offset, bytes) in &self.pending {
            for (at, sector) in bytes.chunks(SECTOR).enumerate() {
                if all || (!none && random.one_in(2)) {
                    put(&mut image, offset + at * SECTOR, sector);
                }
            }
        }
        image
    }
}

fn put(to: &mut Vec<u8>, offset: usize, bytes: &[u8]) {
    if to.len() < offset + bytes.len() {
        to.resize(offset + bytes.len(), 0);
    }
    to[offset..offset + bytes.len()].copy_from_slice(bytes);
}

impl Disk for SimDisk {
    fn segments(&self) -> io::Result<Vec<u32>> {
        let state = self.lock();
        let names = state.names.keys().filter(|(number, published)| *published && *number != MARK);
        Ok(names.map(|(number, _)| *number).collect())
    }

    fn open(&self, number: u32) -> io::Result<Arc<dyn SegmentFile>> {
        let file = self.lock().names.get(&(number, true)).copied();
        let file = file.ok_or(io::ErrorKind::NotFound)?;
        Ok(Arc::new(SimHandle { disk: self.clone(), file, number }))
    }

    fn create(&self, number: u32) -> io::Result<Arc<dyn SegmentFile>> {
        let mut state = self.lock();
        state.check_of(number, Operation::Create)?;
        let file = state.files.len();
        state.files.push(SimFile::default());
        state.names.insert((number, false), file);
        state.point();
        Ok(Arc::new(SimHandle { disk: self.clone(), file, number }))
    }

    fn publish(&self, number: u32) -> io::Result<()> {
        let mut state = self.lock();
        state.check_of(number, Operation::Sync)?;
        let file = state.names.remove(&(number, false)).ok_or(io::ErrorKind::NotFound)?;
        state.names.insert((number, true), file);
        drop(state);
        self.sync_names()
    }

    fn open_mark(&self) -> io::Result<Option<Arc<dyn SegmentFile>>> {
        if !self.lock().names.contains_key(&(MARK, true)) {
            return Ok(None);
        }
        self.lock().check_of(MARK, Operation::Create)?;
        self.open(MARK).map(Some)
    }

    fn replace_mark(&self, bytes: &[u8]) -> io::Result<()> {
        let file = self.create(MARK)?;
        file.write(bytes, 0)?;
        file.sync()?;
        self.publish(MARK)
    }

    fn sync_names(&self) -> io::Result<()> {
        let mut state = self.lock();
        state.point();
        if state.crashed.is_some() {
            return Err(io::Error::other("the machine is off"));
        }
        state.durable_names = state.names.clone();
        Ok(())
    }

    fn remove(&self, number: u32) -> io::Result<()> {
        let mut state = self.lock();
        state.check_of(number, Operation::Create)?;
        state.names.remove(&(number, true));
        state.names.remove(&(number, false));
        state.point();
        Ok(())
    }

    fn is_low(&self) -> bool {
        self.lock().is_low
    }

    fn free(&self) -> Option<u64> {
        None
    }

    fn release(&self) {}

    fn check_in_place(&self, _number: u32, _file: &dyn SegmentFile) -> io::Result<()> {
        if self.lock().moved { Err(io::Error::other("moved away")) } else { Ok(()) }
    }

    fn path(&self, number: u32) -> PathBuf {
        format!("disk/{number}").into()
    }

    fn mark_path(&self) -> PathBuf {
        "disk/mark".into()
    }

    fn directory(&self) -> PathBuf {
        "disk".into()
    }
}

struct SimHandle {
    disk: SimDisk,
    file: usize,
    number: u32,
}

impl SegmentFile for SimHandle {
    fn len(&self) -> io::Result<u64> {
        Ok(self.disk.lock().files[self.file].live.len() as u64)
    }

    fn read(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut state = self.disk.lock();
        state.check_of(self.number, Operation::Read)?;
        let live = &state.files[self.file].live;
        let from = live.get(offset as usize..).unwrap_or_default();
        let count = from.len().min(out.len());
        out[..count].copy_from_slice(&from[..count]);
        Ok(count)
    }

    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut state = self.disk.lock();
        state.check_of(self.number, Operation::Write)?;
        state.files[self.file].write(offset as usize, bytes);
        state.point();
        Ok(())
    }

    fn write_durably(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        // The mark is written at any time, by the thread that also accepts a time.
        if self.number != MARK {
            let mut state = self.disk.lock();
            state.waiting += 1;
            self.disk.changed.notify_all();
            let mut state = self.disk.changed.wait_while(state, |state| state.held).unwrap();
            state.waiting -= 1;
        }
        self.write(bytes, offset)?;
        self.sync()
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.disk.lock();
        // Power may fail before the flush and after it.
        state.point();
        if state.crashed.is_some() {
            return Err(io::Error::other("the machine is off"));
        }
        let checked = state.check_of(self.number, Operation::Sync);
        // After a failed flush the bytes are lost: readers see them, but they never reach the disk.
        let kept = checked.is_ok();
        state.files[self.file].sync(kept);
        state.point();
        checked
    }

    fn identity(&self) -> Option<(u64, u64)> {
        None
    }
}
