//! A simulated disk that separates flushed bytes from written ones, and can crash, fail and be held.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use redb::StorageBackend;

use super::Random;
use crate::database::{self, Backend, Medium};

/// A simulated disk. All its handles and clones share one state.
#[derive(Clone, Debug, Default)]
pub(super) struct Disk {
    state: Arc<Mutex<DiskState>>,
    changed: Arc<Condvar>,
}

#[derive(Debug, Default)]
pub(super) struct DiskState {
    /// The bytes that a reader sees: everything that was written.
    pub(super) live: Vec<u8>,
    /// The bytes that are on the disk for certain: everything up to the last flush.
    durable: Vec<u8>,
    /// The changes since the last flush.
    pending: Vec<Change>,
    /// The number of flushes so far.
    pub(super) syncs: u64,
    /// The flush at which power fails.
    crash: Option<Crash>,
    /// The bytes that the power failure left on the disk.
    crashed: Option<Vec<u8>>,
    fault: Option<Fault>,
    /// Flushes wait until this is `false`.
    held: bool,
    passes: usize,
    waiting: usize,
}

#[derive(Clone, Debug)]
enum Change {
    Write { offset: usize, data: Vec<u8> },
    Len(usize),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Crash {
    pub(super) at_sync: u64,
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
    SetLen,
}

impl Disk {
    /// A disk with a new and empty store on it.
    pub(super) fn with_new_store() -> Self {
        let disk = Self::default();
        database::create(Path::new("disk"), disk.backend()).unwrap();
        disk
    }

    pub(super) fn of(bytes: Vec<u8>) -> Self {
        let disk = Self::default();
        disk.lock().durable = bytes.clone();
        disk.lock().live = bytes;
        disk
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, DiskState> {
        self.state.lock().unwrap()
    }

    pub(super) fn backend(&self) -> Backend {
        Backend::new(Box::new(self.clone()))
    }

    /// Copies the flushed bytes: the disk after a power failure that loses all other writes.
    pub(super) fn after_power_loss(&self) -> Self {
        Self::of(self.lock().durable.clone())
    }

    /// Copies all written bytes: the disk after the process is killed, while the machine keeps running.
    pub(super) fn after_kill(&self) -> Self {
        Self::of(self.lock().live.clone())
    }

    pub(super) fn crash_at(&self, crash: Crash) {
        self.lock().crash = Some(crash);
    }

    /// Returns the disk after the crash, if the run reached it.
    pub(super) fn after_crash(&self) -> Option<Self> {
        self.lock().crashed.clone().map(Self::of)
    }

    pub(super) fn fail(&self, fault: Fault) {
        self.lock().fault = Some(fault);
    }

    /// Ends the fault. Returns `true` if the run reached a counted fault.
    pub(super) fn heal(&self) -> bool {
        self.lock().fault.take().is_some_and(|fault| fault.after == 0 && fault.times < u64::MAX)
    }

    /// Makes all flushes from the next one on wait until the returned value is dropped.
    pub(super) fn hold(&self) -> DiskHold {
        self.lock().held = true;
        DiskHold(self.clone())
    }

    /// Lets the waiting flush continue. The next one waits again.
    pub(super) fn release_one(&self) {
        self.lock().passes += 1;
        self.changed.notify_all();
    }

    /// Waits until a flush, or an attempt to open the file again, is held.
    pub(super) fn wait_until_held(&self) {
        let (_state, timeout) = self
            .changed
            .wait_timeout_while(self.lock(), Duration::from_secs(20), |state| state.waiting == 0)
            .unwrap();
        assert!(!timeout.timed_out(), "nothing waits for the disk");
    }

    fn wait_while_held(&self) -> MutexGuard<'_, DiskState> {
        let mut state = self.lock();
        state.waiting += 1;
        self.changed.notify_all();
        let mut state = self.changed.wait_while(state, |state| state.held && state.passes == 0).unwrap();
        state.passes = state.passes.saturating_sub(1);
        state.waiting -= 1;
        state
    }
}

/// Holds the disk until it is dropped.
#[must_use]
pub(super) struct DiskHold(Disk);

impl Drop for DiskHold {
    fn drop(&mut self) {
        self.0.lock().held = false;
        self.0.changed.notify_all();
    }
}

impl DiskState {
    fn check(&mut self, operation: Operation) -> io::Result<()> {
        if self.crashed.is_some() {
            return Err(io::Error::other("the machine is off"));
        }
        match &mut self.fault {
            Some(fault) if fault.on == operation && fault.after > 0 => fault.after -= 1,
            Some(fault) if fault.on == operation && fault.times > 0 => {
                // A permanent fault stays one, so that the probe finds it, too.
                fault.times -= u64::from(fault.times < u64::MAX);
                return Err(io::Error::from_raw_os_error(fault.errno));
            }
            _ => {}
        }
        Ok(())
    }

    fn change(&mut self, change: Change) {
        apply(&mut self.live, &change);
        self.pending.push(change);
    }

    fn sync(&mut self) -> io::Result<()> {
        self.syncs += 1;
        if let Some(crash) = self.crash.filter(|crash| crash.at_sync == self.syncs) {
            self.crashed = Some(image_after_crash(&self.durable, &self.pending, crash.seed));
        }
        let checked = self.check(Operation::Sync);
        for change in self.pending.drain(..) {
            // After a failed flush the pending changes are lost: readers see them, but they never reach the disk.
            if checked.is_ok() {
                apply(&mut self.durable, &change);
            }
        }
        checked
    }
}

fn apply(to: &mut Vec<u8>, change: &Change) {
    match change {
        Change::Len(len) => to.resize(*len, 0),
        Change::Write { offset, data } => {
            // A write beyond the end has no effect: the new length did not reach the disk.
            let end = (offset + data.len()).min(to.len());
            if let Some(len) = end.checked_sub(*offset) {
                to[*offset..end].copy_from_slice(&data[..len]);
            }
        }
    }
}

/// The disk after a crash: all flushed bytes, and a random part of the unflushed sectors, in any order.
fn image_after_crash(durable: &[u8], pending: &[Change], seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let mut image = durable.to_vec();
    // Keep all pending changes, none, or a part of them.
    let (keep_all, keep_none) = match random.below(8) {
        0 => (true, false),
        1 => (false, true),
        _ => (false, false),
    };
    let sector = if random.one_in(2) { 512 } else { 4096 };
    let mut order: Vec<&Change> = pending.iter().collect();
    if random.one_in(2) {
        // Changes of the length stay first, because a write beyond the end needs them.
        for i in (1..order.len()).rev() {
            order.swap(i, random.below(i + 1));
        }
        order.sort_by_key(|change| !matches!(change, Change::Len(_)));
    }
    for change in order {
        match change {
            Change::Len(_) if keep_all || (!keep_none && random.one_in(2)) => apply(&mut image, change),
            Change::Len(_) => {}
            Change::Write { offset, data } => {
                for (at, chunk) in data.chunks(sector).enumerate() {
                    if keep_all || (!keep_none && random.one_in(2)) {
                        let part = Change::Write { offset: offset + at * sector, data: chunk.to_vec() };
                        apply(&mut image, &part);
                    }
                }
            }
        }
    }
    image
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.lock().live.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let mut state = self.lock();
        state.check(Operation::Read)?;
        let offset = offset as usize;
        let from = state.live.get(offset..offset + out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(from);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut state = self.lock();
        state.check(Operation::SetLen)?;
        state.change(Change::Len(len as usize));
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.wait_while_held().sync()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.lock();
        state.check(Operation::Write)?;
        let end = offset as usize + data.len();
        if end > state.live.len() {
            state.change(Change::Len(end));
        }
        state.change(Change::Write { offset: offset as usize, data: data.to_vec() });
        Ok(())
    }
}

#[derive(Debug)]
pub(super) struct DiskMedium(pub(super) Disk);

impl Medium for DiskMedium {
    fn open(&self) -> io::Result<Backend> {
        Ok(self.0.backend())
    }

    fn probe(&self) -> io::Result<()> {
        let state = self.0.wait_while_held();
        // Only a permanent fault fails the probe. A counted fault applies to the file.
        match state.fault {
            Some(Fault { on: Operation::Write, after: 0, times: u64::MAX, errno }) => {
                Err(io::Error::from_raw_os_error(errno))
            }
            _ => Ok(()),
        }
    }

    fn path(&self) -> PathBuf {
        "disk".into()
    }
}
