//! The place where the segments are: a directory, or a simulated disk in tests. All input and output of the log goes through
//! here.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::directory::{Directory, identity};
use crate::error::EmbeddedOpenError;

/// The files of a store.
pub(crate) trait Disk: Send + Sync + 'static {
    /// The numbers of all segments, in ascending order.
    fn segments(&self) -> io::Result<Vec<u32>>;

    /// Opens a segment.
    fn open(&self, number: u32) -> io::Result<Arc<dyn SegmentFile>>;

    /// Creates an empty file that becomes a segment when it is [published](Disk::publish). Replaces one that was not.
    fn create(&self, number: u32) -> io::Result<Arc<dyn SegmentFile>>;

    /// Gives a created file its final name, durably. Its contents must be on the disk.
    fn publish(&self, number: u32) -> io::Result<()>;

    /// Opens the file of the [mark](crate::mark); `None` if there is none.
    fn open_mark(&self) -> io::Result<Option<Arc<dyn SegmentFile>>>;

    /// Creates the file of the mark with these bytes, durably. Replaces the one that is there only when that is done.
    fn replace_mark(&self, bytes: &[u8]) -> io::Result<()>;

    /// Makes the names of all files durable.
    fn sync_names(&self) -> io::Result<()>;

    /// Removes a segment, or a file that was not published. The removal need not be durable when this returns.
    fn remove(&self, number: u32) -> io::Result<()>;

    /// True if the disk is known to be nearly full.
    fn is_low(&self) -> bool;

    /// The free bytes of the disk, if they are known.
    fn free(&self) -> Option<u64>;

    /// Frees the directory for another owner. Nothing is read or written after that.
    fn release(&self);

    /// Checks that the name of a segment still leads to its file. If the file was removed or renamed, the next start would not
    /// find what is written to it, and another process might create a new store in the directory.
    fn check_in_place(&self, number: u32, file: &dyn SegmentFile) -> io::Result<()>;

    /// The path of a segment, for messages.
    fn path(&self, number: u32) -> PathBuf;

    /// The path of the mark, for messages.
    fn mark_path(&self) -> PathBuf;

    /// The path of the directory, for messages.
    fn directory(&self) -> PathBuf;
}

/// The file of a segment.
pub(crate) trait SegmentFile: Send + Sync {
    /// The length in bytes.
    fn len(&self) -> io::Result<u64>;

    /// Reads bytes at an offset. Fewer than asked for mean that the file ends there.
    fn read(&self, out: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Writes bytes that need not be durable when this returns.
    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Writes bytes, and returns when they are on the disk.
    fn write_durably(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Returns when everything that was written is on the disk.
    fn sync(&self) -> io::Result<()>;

    /// The identity of the file, which a change of its name does not change.
    fn identity(&self) -> Option<(u64, u64)>;
}

/// The free bytes below which claims are refused, or an eighth of the disk if that is less. The rest is reserved for completing
/// the requests that are running.
const DISK_RESERVE: u64 = 16 * 1024 * 1024;

const SUFFIX: &str = ".log";
/// The end of a file's name until it is published.
const SUFFIX_NEW: &str = ".log.new";

/// The name of the file with the mark.
pub(crate) const MARK: &str = "mark";
/// The name of a new one until it replaces the old one.
const MARK_NEW: &str = "mark.new";

/// The files in a directory that this process owns.
pub(crate) struct DirectoryDisk {
    directory: Directory,
}

impl DirectoryDisk {
    /// Locks the directory, which is created if it is missing.
    pub(crate) fn acquire(path: &Path) -> Result<Self, EmbeddedOpenError> {
        Ok(Self { directory: Directory::acquire(path)? })
    }

    fn create_at(&self, path: &Path) -> io::Result<Arc<dyn SegmentFile>> {
        self.directory.check_in_place()?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        DiskFile::shared(options.open(path)?)
    }

    fn new_path(&self, number: u32) -> PathBuf {
        self.directory.path().join(format!("{number:08}{SUFFIX_NEW}"))
    }
}

impl Disk for DirectoryDisk {
    fn segments(&self) -> io::Result<Vec<u32>> {
        let mut numbers = Vec::new();
        for entry in std::fs::read_dir(self.directory.path())? {
            numbers.extend(segment_number(&entry?.file_name()));
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    fn open(&self, number: u32) -> io::Result<Arc<dyn SegmentFile>> {
        DiskFile::shared(OpenOptions::new().read(true).write(true).open(self.path(number))?)
    }

    fn create(&self, number: u32) -> io::Result<Arc<dyn SegmentFile>> {
        self.create_at(&self.new_path(number))
    }

    fn publish(&self, number: u32) -> io::Result<()> {
        self.directory.check_in_place()?;
        std::fs::rename(self.new_path(number), self.path(number))?;
        self.directory.sync()
    }

    fn open_mark(&self) -> io::Result<Option<Arc<dyn SegmentFile>>> {
        // Another process may have created a store under this path: its mark is not for this one.
        self.directory.check_in_place()?;
        match OpenOptions::new().read(true).write(true).open(self.mark_path()) {
            Ok(file) => DiskFile::shared(file).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn replace_mark(&self, bytes: &[u8]) -> io::Result<()> {
        let new = self.directory.path().join(MARK_NEW);
        let file = self.create_at(&new)?;
        file.write(bytes, 0)?;
        file.sync()?;
        std::fs::rename(new, self.mark_path())?;
        self.directory.sync()
    }

    fn sync_names(&self) -> io::Result<()> {
        self.directory.sync()
    }

    fn remove(&self, number: u32) -> io::Result<()> {
        self.directory.check_in_place()?;
        for path in [self.new_path(number), self.path(number)] {
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    fn is_low(&self) -> bool {
        let Ok(disk) = rustix::fs::statvfs(self.directory.path()) else { return false };
        let reserve = DISK_RESERVE.min(disk.f_blocks.saturating_mul(disk.f_frsize) / 8);
        disk.f_bavail.saturating_mul(disk.f_frsize) < reserve
    }

    fn free(&self) -> Option<u64> {
        let disk = rustix::fs::statvfs(self.directory.path()).ok()?;
        Some(disk.f_bavail.saturating_mul(disk.f_frsize))
    }

    fn release(&self) {
        self.directory.release();
    }

    fn check_in_place(&self, number: u32, file: &dyn SegmentFile) -> io::Result<()> {
        // The file is in the directory as long as this process owns it, unless the file was removed.
        self.directory.check_in_place()?;
        let path = self.path(number);
        match std::fs::metadata(&path) {
            Ok(found) if identity(&found) == file.identity() => Ok(()),
            Ok(_) => Err(io::Error::other(format!(
                "{} was replaced by another file while it was open",
                path.display()
            ))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let message =
                    format!("{} was moved or removed while it was open: put it back", path.display());
                Err(io::Error::new(error.kind(), message))
            }
            Err(error) => Err(error),
        }
    }

    fn path(&self, number: u32) -> PathBuf {
        self.directory.path().join(segment_name(number))
    }

    fn mark_path(&self) -> PathBuf {
        self.directory.path().join(MARK)
    }

    fn directory(&self) -> PathBuf {
        self.directory.path().to_owned()
    }
}

/// The files with the records of the store in this directory, oldest first; none if there is no store.
///
/// # Errors
/// The directory cannot be read.
pub fn segment_files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        files.extend(segment_number(&entry.file_name()).map(|number| (number, entry.path())));
    }
    files.sort_unstable();
    Ok(files.into_iter().map(|(_, path)| path).collect())
}

/// The file name of a segment.
pub(crate) fn segment_name(number: u32) -> String {
    format!("{number:08}{SUFFIX}")
}

/// The number of the segment with this file name; `None` if it is no segment.
pub(crate) fn segment_number(name: &std::ffi::OsStr) -> Option<u32> {
    let digits = name.to_str()?.strip_suffix(SUFFIX)?;
    let is_number = digits.len() >= 8 && digits.bytes().all(|byte| byte.is_ascii_digit());
    if is_number { digits.parse().ok() } else { None }
}

struct DiskFile {
    file: File,
    identity: Option<(u64, u64)>,
}

impl DiskFile {
    fn shared(file: File) -> io::Result<Arc<dyn SegmentFile>> {
        let identity = identity(&file.metadata()?);
        Ok(Arc::new(Self { file, identity }))
    }
}

#[cfg(unix)]
fn read_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, out, offset)
}

#[cfg(windows)]
fn read_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, out, offset)
}

#[cfg(unix)]
fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::write_at(file, bytes, offset)
}

#[cfg(windows)]
fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_write(file, bytes, offset)
}

impl SegmentFile for DiskFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn read(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut done = 0;
        while let Some(rest) = out.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match read_at(&self.file, rest, offset + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
            match write_at(&self.file, rest, offset + done as u64) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn write_durably(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write(bytes, offset)?;
        self.file.sync_data()
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    fn identity(&self) -> Option<(u64, u64)> {
        self.identity
    }
}
