//! The calls of a journal to the file system, one step at a time.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read as _};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// A step that is about to be taken. Tests observe the steps, and let any of them fail.
#[cfg_attr(not(test), allow(dead_code, reason = "only tests read the fields"))]
#[derive(Clone, Copy, Debug)]
pub(super) enum Step<'a> {
    Create,
    Write { file: &'a File, at: u64, bytes: &'a [u8] },
    Sync,
    Link,
    Rename,
    Remove,
    SyncDir,
}

#[cfg(test)]
pub(super) type Hook = std::sync::Arc<dyn Fn(Step<'_>) -> io::Result<()> + Send + Sync>;

#[derive(Clone, Default)]
pub(super) struct Files {
    #[cfg(test)]
    pub(super) hook: Option<Hook>,
}

impl Files {
    #[cfg_attr(not(test), allow(clippy::unused_self, clippy::unnecessary_wraps, reason = "tests use both"))]
    fn before(&self, step: Step<'_>) -> io::Result<()> {
        #[cfg(test)]
        if let Some(hook) = &self.hook {
            return hook(step);
        }
        let _ = step;
        Ok(())
    }

    /// Creates a directory, for its owner alone, and those above it. They are durable when this returns.
    pub(super) fn create_dir(&self, path: &Path) -> io::Result<()> {
        let missing = path.ancestors().take_while(|above| !above.as_os_str().is_empty() && !above.exists());
        let missing: Vec<PathBuf> = missing.map(Path::to_owned).collect();
        DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        for made in missing {
            let above = made.parent().filter(|above| !above.as_os_str().is_empty());
            self.sync_dir(above.unwrap_or(Path::new(".")))?;
        }
        Ok(())
    }

    /// Creates a file, for its owner alone.
    pub(super) fn create(&self, path: &Path) -> io::Result<File> {
        self.before(Step::Create)?;
        OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
    }

    /// Opens an existing file.
    pub(super) fn open(&self, path: &Path) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).open(path)
    }

    /// Locks the file until it is dropped or the process ends. Returns `false` if another holder has the lock.
    pub(super) fn lock(&self, file: &File) -> io::Result<bool> {
        match file.try_lock() {
            Ok(()) => Ok(true),
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    pub(super) fn write(&self, file: &File, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.before(Step::Write { file, at, bytes })?;
        file.write_all_at(bytes, at)
    }

    /// Reads the whole file, if it is no larger than this.
    pub(super) fn read(&self, file: &File, most: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut from_start = file;
        io::Seek::rewind(&mut from_start)?;
        from_start.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > most {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it is larger than any intent"));
        }
        Ok(bytes)
    }

    /// Makes the content of the file survive a power cut.
    pub(super) fn sync(&self, file: &File) -> io::Result<()> {
        self.before(Step::Sync)?;
        file.sync_all()
    }

    /// Gives the file a second name. Fails if the name is taken.
    pub(super) fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.before(Step::Link)?;
        fs::hard_link(from, to)
    }

    /// Renames the file, and replaces the one that has the new name.
    pub(super) fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.before(Step::Rename)?;
        fs::rename(from, to)
    }

    pub(super) fn remove(&self, path: &Path) -> io::Result<()> {
        self.before(Step::Remove)?;
        fs::remove_file(path)
    }

    /// Makes the names in the directory survive a power cut.
    pub(super) fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.before(Step::SyncDir)?;
        File::open(path)?.sync_all()
    }

    /// Returns `true` if the file still has this name.
    pub(super) fn is_named(&self, file: &File, path: &Path) -> io::Result<bool> {
        let ours = file.metadata()?;
        match fs::symlink_metadata(path) {
            Ok(named) => Ok((named.dev(), named.ino()) == (ours.dev(), ours.ino())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns the number of names of the file.
    pub(super) fn names(&self, file: &File) -> io::Result<u64> {
        Ok(file.metadata()?.nlink())
    }
}
