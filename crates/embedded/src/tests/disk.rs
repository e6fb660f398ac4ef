//! A disk that knows what is on it and what is only shown.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use redb::StorageBackend;

use super::Random;
use crate::database::{self, Backend, Medium};

/// A disk that every handle and every clone shares.
#[derive(Clone, Debug, Default)]
pub(super) struct Disk {
    state: Arc<Mutex<DiskState>>,
    changed: Arc<Condvar>,
}

#[derive(Debug, Default)]
pub(super) struct DiskState {
    /// What is shown to whoever reads: everything that was written.
    pub(super) live: Vec<u8>,
    /// What is on the disk for certain: everything up to the last flush.
    durable: Vec<u8>,
    /// What was written since then.
    pending: Vec<Change>,
    /// How many flushes there were.
    pub(super) syncs: u64,
    /// The power goes at this flush.
    crash: Option<Crash>,
    /// What was left on the disk then.
    crashed: Option<Vec<u8>>,
    fault: Option<Fault>,
    /// Flushes wait.
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

/// Operations that fail.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fault {
    pub(super) on: Operation,
    /// So many of them still work.
    pub(super) after: u64,
    /// So many fail then.
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

    /// A copy of what is on the disk for certain: what a crash leaves if nothing more gets there.
    pub(super) fn after_power_loss(&self) -> Self {
        Self::of(self.lock().durable.clone())
    }

    /// A copy of what is shown: what the end of a process leaves, without a crash of the machine.
    pub(super) fn after_kill(&self) -> Self {
        Self::of(self.lock().live.clone())
    }

    pub(super) fn crash_at(&self, crash: Crash) {
        self.lock().crash = Some(crash);
    }

    /// The disk after the crash, if it came to it.
    pub(super) fn after_crash(&self) -> Option<Self> {
        self.lock().crashed.clone().map(Self::of)
    }

    pub(super) fn fail(&self, fault: Fault) {
        self.lock().fault = Some(fault);
    }

    /// Ends the fault, and says whether it came to it.
    pub(super) fn heal(&self) -> bool {
        self.lock().fault.take().is_some_and(|fault| fault.after == 0 && fault.times < u64::MAX)
    }

    /// Lets the next flush wait, and what comes after it, until the answer is dropped.
    pub(super) fn hold(&self) -> DiskHold {
        self.lock().held = true;
        DiskHold(self.clone())
    }

    /// Lets the one that waits go on; the next one waits again.
    pub(super) fn release_one(&self) {
        self.lock().passes += 1;
        self.changed.notify_all();
    }

    /// Until a flush waits, or an attempt to open the disk again.
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

/// A disk that is held still.
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
                fault.times -= 1;
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
            // A flush that failed is not made up for: what was to be written is shown, and is on no disk.
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
            // Beyond the end there is nothing to write to: the new length did not get to the disk.
            let end = (offset + data.len()).min(to.len());
            if let Some(len) = end.checked_sub(*offset) {
                to[*offset..end].copy_from_slice(&data[..len]);
            }
        }
    }
}

/// What a crash leaves: what was flushed, and of what was not any part, in any order, by sectors.
fn image_after_crash(durable: &[u8], pending: &[Change], seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let mut image = durable.to_vec();
    // All, nothing, or parts of it.
    let (keep_all, keep_none) = match random.below(8) {
        0 => (true, false),
        1 => (false, true),
        _ => (false, false),
    };
    let sector = if random.one_in(2) { 512 } else { 4096 };
    let mut order: Vec<&Change> = pending.iter().collect();
    if random.one_in(2) {
        // Lengths stay first: a write beyond the end waits for them.
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
        // One that lasts; a fault that is counted is for the file.
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
