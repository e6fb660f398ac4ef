//! The directory of a store, and its lock.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use crate::error::{EmbeddedOpenError, is_full};

const LOCK: &str = "lock";

/// A directory that this process owns until it drops this value.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    /// The locked file. The operating system releases the lock with the process, however that ends.
    lock: File,
    /// The locked directory itself, in case the file is removed. `None` if the system cannot lock it.
    itself: Option<File>,
}

impl Drop for Directory {
    /// Releases the lock explicitly. Closing the file is not enough: a child process that another thread is starting has
    /// a copy of the descriptor, and with it the lock, until it executes its own program.
    fn drop(&mut self) {
        self.release();
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
        // Another process may have removed the file of its owner.
        let itself = if cfg!(unix) { File::open(path).ok() } else { None };
        let itself = match itself.as_ref().map(File::try_lock) {
            Some(Err(TryLockError::WouldBlock)) => {
                return Err(EmbeddedOpenError::InUse { dir: path.to_owned(), pid: None });
            }
            Some(Ok(())) => itself,
            _ => None,
        };
        // Not synced: the pid matters only while this process lives. On a full disk it is not written, and the next process
        // gets `InUse` without a pid.
        match lock.set_len(0).and_then(|()| write!(lock, "{}", std::process::id())) {
            Err(error) if !is_full(&error) => return Err(io(error)),
            _ => {}
        }
        Ok(Self { path: path.to_owned(), lock, itself })
    }

    /// Unlocks the directory.
    pub(crate) fn release(&self) {
        for file in self.itself.iter().chain([&self.lock]) {
            let _closing_releases_it_too = file.unlock();
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the names of the files durable.
    pub(crate) fn sync(&self) -> io::Result<()> {
        sync_dir(&self.path)
    }

    /// Checks that the path still leads to this directory. Another process may have created a store under it meanwhile.
    pub(crate) fn check_in_place(&self) -> io::Result<()> {
        let own = identity(&self.lock.metadata()?);
        match fs::metadata(self.path.join(LOCK)) {
            Ok(found) if identity(&found) == own => Ok(()),
            Ok(_) => Err(io::Error::other(self.moved("was replaced by another one"))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(io::Error::new(error.kind(), self.moved("was moved or removed")))
            }
            Err(error) => Err(error),
        }
    }

    fn moved(&self, change: &str) -> String {
        format!(
            "the store in {} {change} while it was open: put it back, or stop this process before another store is used under \
             this path",
            self.path.display()
        )
    }
}

/// The identity of a file on this machine, independent of its name. `None` on systems that do not report it.
pub(crate) fn identity(metadata: &fs::Metadata) -> Option<(u64, u64)> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt as _;
        Some((metadata.dev(), metadata.ino()))
    }
    #[cfg(not(unix))]
    {
        let _ = metadata;
        None
    }
}

/// Creates a directory that only its owner can read, if it is missing.
pub(crate) fn create_dir(path: &Path) -> io::Result<()> {
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
pub(crate) fn sync_dir(path: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) }
}

/// Opens the lock file, and creates it if it is missing, for example in a restored backup.
///
/// If root creates it, it is given to the owner of the segments. Otherwise a check by root would lock the owner's process
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
    let segment = |entry: io::Result<fs::DirEntry>| {
        let entry = entry.ok()?;
        crate::disk::segment_number(&entry.file_name()).and_then(|_| entry.metadata().ok())
    };
    let segments = fs::read_dir(dir).ok().and_then(|mut entries| entries.find_map(segment));
    let owner = segments.map_or_else(|| fs::metadata(dir), Ok);
    if let (Ok(owner), Ok(own)) = (owner, file.metadata())
        && (owner.uid(), owner.gid()) != (own.uid(), own.gid())
    {
        // Only root may do this, and only root needs it.
        let _refused = fchown(file, Some(owner.uid()), Some(owner.gid()));
    }
}

/// Gives a file to the owner of another one. Only root may do this, and only root needs it: for others, nothing happens.
pub(crate) fn give(path: &Path, owner: &fs::Metadata) -> io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::{MetadataExt as _, lchown};
        let own = fs::symlink_metadata(path)?;
        if (owner.uid(), owner.gid()) != (own.uid(), own.gid()) {
            return match lchown(path, Some(owner.uid()), Some(owner.gid())) {
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
                given => given,
            };
        }
    }
    #[cfg(not(unix))]
    let _ = (path, owner);
    Ok(())
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

    #[cfg(unix)]
    #[test]
    fn a_removed_lock_file_leads_no_second_process_into_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let owned = Directory::acquire(dir.path()).unwrap();
        fs::remove_file(dir.path().join(LOCK)).unwrap();
        assert!(matches!(Directory::acquire(dir.path()), Err(EmbeddedOpenError::InUse { .. })));
        assert!(owned.check_in_place().is_err(), "nothing is written until the directory is as it was");
        drop(owned);
        drop(Directory::acquire(dir.path()).unwrap());
    }
}
