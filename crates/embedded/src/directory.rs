//! The directory of a store: who owns it, and how its file comes to be.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use crate::database::is_full;
use crate::error::OpenError;

const LOCK: &str = "lock";
const RECORDS: &str = "records.redb";
/// The file while it is made. A crash then leaves this name, and nothing was recorded under it.
const RECORDS_NEW: &str = "records.redb.new";
/// What is written to see whether the disk takes a write again.
const PROBE: &str = "probe";
const PROBE_BYTES: usize = 1024 * 1024;

/// A directory that this process owns for as long as it has this value.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    /// Locked. The lock goes with the process, however that ends.
    lock: File,
}

impl Drop for Directory {
    /// To close the file would not do: a process that another thread is just starting has a copy of it, and with it the
    /// lock, until it runs its own program.
    fn drop(&mut self) {
        let _closed_all_the_same = self.lock.unlock();
    }
}

impl Directory {
    /// Takes the directory, creating it if it is missing, for its owner's eyes only.
    pub(crate) fn acquire(path: &Path) -> Result<Self, OpenError> {
        create_dir(path).map_err(OpenError::io(format!("create the directory {}", path.display())))?;
        let lock_path = path.join(LOCK);
        let io = |source| OpenError::Io { what: format!("lock {}", lock_path.display()), source };
        let mut lock = open_lock(path, &lock_path).map_err(io)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(OpenError::InUse { dir: path.to_owned(), pid: read_pid(&mut lock) });
            }
            Err(TryLockError::Error(source)) => return Err(io(source)),
        }
        // Not synced: it matters only while this process lives. On a full disk the next one cannot be told who has it.
        match lock.set_len(0).and_then(|()| write!(lock, "{}", std::process::id())) {
            Err(error) if !is_full(&error) => return Err(io(error)),
            _ => {}
        }
        Ok(Self { path: path.to_owned(), lock })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn records(&self) -> PathBuf {
        self.path.join(RECORDS)
    }

    /// Makes the file where there is none. `make` writes it under another name, and it gets its own when it is whole
    /// and on disk: a file under that name that is not whole was damaged, and is never taken for a new one.
    pub(crate) fn create_records(
        &self,
        make: impl FnOnce(&Path) -> Result<(), OpenError>,
    ) -> Result<bool, OpenError> {
        let records = self.records();
        if records.try_exists().map_err(OpenError::io(format!("look for {}", records.display())))? {
            return Ok(false);
        }
        let new = self.path.join(RECORDS_NEW);
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(OpenError::Io { what: format!("remove {}", new.display()), source: error });
            }
            _ => {}
        }
        private()
            .create_new(true)
            .open(&new)
            .map_err(OpenError::io(format!("create {}", new.display())))
            .map(drop)?;
        make(&new)?;
        File::open(&new)
            .and_then(|file| file.sync_all())
            .and_then(|()| fs::rename(&new, &records))
            .and_then(|()| sync_dir(&self.path))
            .map_err(OpenError::io(format!("create {}", records.display())))?;
        Ok(true)
    }

    /// Whether the disk takes a write of some size now.
    pub(crate) fn probe(&self) -> io::Result<()> {
        let path = self.path.join(PROBE);
        let written =
            private().create(true).truncate(true).open(&path).and_then(|mut file| {
                file.write_all(&vec![0x55; PROBE_BYTES]).and_then(|()| file.sync_data())
            });
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => written.and(Err(error)),
            _ => written,
        }
    }
}

fn create_dir(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)?;
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).map_or(Ok(()), sync_dir)
}

/// Makes the names in a directory durable. On systems where a directory cannot be opened they are so by themselves.
fn sync_dir(path: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) }
}

/// Opens the lock, which is made if it is missing: in a backup that was restored, say. If root makes it, it is for the owner of
/// the records: a check by root must not keep their process from the store.
fn open_lock(dir: &Path, path: &Path) -> io::Result<File> {
    match private().read(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        opened => return opened,
    }
    // A new one and no other: what a link leads to must not be given away.
    match private().read(true).create_new(true).open(path) {
        Ok(lock) => {
            #[cfg(unix)]
            give_to_owner(dir, &lock);
            Ok(lock)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            private().create(true).truncate(false).read(true).open(path)
        }
        Err(error) => Err(error),
    }
}

#[cfg(unix)]
fn give_to_owner(dir: &Path, file: &File) {
    use std::os::unix::fs::{MetadataExt as _, fchown};
    let owner = fs::metadata(dir.join(RECORDS)).or_else(|_| fs::metadata(dir));
    if let (Ok(owner), Ok(own)) = (owner, file.metadata())
        && (owner.uid(), owner.gid()) != (own.uid(), own.gid())
    {
        // Only root may, and only there is it needed.
        let _refused = fchown(file, Some(owner.uid()), Some(owner.gid()));
    }
}

fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

fn read_pid(lock: &mut File) -> Option<u32> {
    let mut text = String::new();
    lock.seek(SeekFrom::Start(0)).ok()?;
    lock.take(20).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_free_when_its_owner_lets_go_though_a_starting_process_has_a_copy_of_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let owned = Directory::acquire(dir.path()).unwrap();
        let copy = owned.lock.try_clone().unwrap();
        assert!(matches!(Directory::acquire(dir.path()), Err(OpenError::InUse { .. })));
        drop(owned);
        drop(Directory::acquire(dir.path()).unwrap());
        drop(copy);
    }
}
