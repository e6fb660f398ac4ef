//! The directory of a store: its lock, and the creation of its file.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use crate::database::is_full;
use crate::error::EmbeddedOpenError;

const LOCK: &str = "lock";
const RECORDS: &str = "records.redb";
/// The name of the file until it is complete. If a crash leaves this name behind, nothing was recorded under it.
const RECORDS_NEW: &str = "records.redb.new";
/// A file that is written to find out if the disk accepts writes again.
const PROBE: &str = "probe";
const PROBE_BYTES: usize = 1024 * 1024;

/// A directory that this process owns until it drops this value.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    /// The locked file. The operating system releases the lock with the process, however that ends.
    lock: File,
}

impl Drop for Directory {
    /// Releases the lock explicitly. Closing the file is not enough: a child process that another thread is starting has
    /// a copy of the descriptor, and with it the lock, until it executes its own program.
    fn drop(&mut self) {
        let _closing_releases_it_too = self.lock.unlock();
    }
}

impl Directory {
    /// Locks the directory for this process. Creates it if it is missing, accessible only to its owner.
    pub(crate) fn acquire(path: &Path) -> Result<Self, EmbeddedOpenError> {
        create_dir(path)
            .map_err(EmbeddedOpenError::io(format!("create the directory {}", path.display())))?;
        let lock_path = path.join(LOCK);
        let io =
            |source| EmbeddedOpenError::Io { operation: format!("lock {}", lock_path.display()), source };
        let mut lock = open_lock(path, &lock_path).map_err(io)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(EmbeddedOpenError::InUse { dir: path.to_owned(), pid: read_pid(&mut lock) });
            }
            Err(TryLockError::Error(source)) => return Err(io(source)),
        }
        // Not synced: the pid matters only while this process lives. On a full disk it is not written, and the next process
        // gets `InUse` without a pid.
        match lock.set_len(0).and_then(|()| write!(lock, "{}", std::process::id())) {
            Err(error) if !is_full(&error) => return Err(io(error)),
            _ => {}
        }
        Ok(Self { path: path.to_owned(), lock })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the names of the files durable.
    pub(crate) fn sync(&self) -> io::Result<()> {
        sync_dir(&self.path)
    }

    pub(crate) fn records(&self) -> PathBuf {
        self.path.join(RECORDS)
    }

    /// Creates the file if there is none. Returns `true` if it did.
    ///
    /// `make` writes the file under a temporary name. It is renamed when it is complete and on disk. So an incomplete
    /// file under the final name is always a damaged store, never one in the making.
    pub(crate) fn create_records(
        &self,
        make: impl FnOnce(&Path) -> Result<(), EmbeddedOpenError>,
    ) -> Result<bool, EmbeddedOpenError> {
        let records = self.records();
        if records.try_exists().map_err(EmbeddedOpenError::io(format!("look for {}", records.display())))? {
            return Ok(false);
        }
        let new = self.path.join(RECORDS_NEW);
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(EmbeddedOpenError::Io {
                    operation: format!("remove {}", new.display()),
                    source: error,
                });
            }
            _ => {}
        }
        private()
            .create_new(true)
            .open(&new)
            .map_err(EmbeddedOpenError::io(format!("create {}", new.display())))
            .map(drop)?;
        make(&new)?;
        File::open(&new)
            .and_then(|file| file.sync_all())
            .and_then(|()| fs::rename(&new, &records))
            .and_then(|()| sync_dir(&self.path))
            .map_err(EmbeddedOpenError::io(format!("create {}", records.display())))?;
        Ok(true)
    }

    /// Checks that the disk accepts a write of 1 MiB now.
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

/// Makes the names in a directory durable. Systems other than Unix cannot open a directory for that and do not need it.
fn sync_dir(path: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) }
}

/// Opens the lock file, and creates it if it is missing, for example in a restored backup.
///
/// If root creates it, it is given to the owner of the records. Otherwise a check by root would lock the owner's process
/// out of the store.
fn open_lock(dir: &Path, path: &Path) -> io::Result<File> {
    match private().read(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        opened => return opened,
    }
    // `create_new` does not follow a link, so `give_to_owner` cannot give away the target of one.
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
        // Only root may do this, and only root needs it.
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
    fn dropping_the_owner_releases_the_lock_even_if_a_child_process_has_a_copy() {
        let dir = tempfile::tempdir().unwrap();
        let owned = Directory::acquire(dir.path()).unwrap();
        let copy = owned.lock.try_clone().unwrap();
        assert!(matches!(Directory::acquire(dir.path()), Err(EmbeddedOpenError::InUse { .. })));
        drop(owned);
        drop(Directory::acquire(dir.path()).unwrap());
        drop(copy);
    }
}
