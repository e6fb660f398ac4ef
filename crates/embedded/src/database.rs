//! How the file is made and opened.

use std::cell::Cell;
use std::fmt;
use std::io::{self, BufReader, Read as _};
use std::ops::Bound;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

use oncegate_core::{LastWrite, Timestamp};
use redb::backends::FileBackend;
use redb::{
    BackendError, Builder, Database, DatabaseError, Durability, ReadableDatabase as _, ReadableTable as _,
    RepairSession, StorageBackend, WriteTransaction,
};
use tracing::{info, warn};

use crate::directory::Directory;
use crate::error::OpenError;
use crate::overlay::Overlay;
use crate::schema::{
    AUDIT, CLOCK_STEP, EXPIRY, FORMAT, META, META_BYTES, META_CLOCK, META_FORMAT, META_LAGGING, META_OPENED,
    META_WALL, OPENED_SHIFT, RECORDS,
};

/// Where the octets of the file are.
pub(crate) trait Medium: Send + Sync + 'static {
    /// A new handle on them. The one before is closed.
    fn open(&self) -> io::Result<Backend>;

    /// A cheap proof that they may be written again, before the whole file is verified for it.
    fn probe(&self) -> io::Result<()>;

    /// The file and its directory, for messages.
    fn path(&self) -> PathBuf;

    /// Has everything read once, in order, before it is verified page by page, which from a disk takes several times as
    /// long.
    fn read_ahead(&self) -> Box<dyn Fn()> {
        Box::new(|| ())
    }

    /// Whether the disk is about to be full, where that can be told.
    fn is_disk_low(&self) -> bool {
        false
    }

    /// Checks that the path still leads to the file that was opened. What is written to a file without a name, or with
    /// another one, is not there at the next start, and another process may make a new store under the path.
    ///
    /// # Errors
    /// The path leads nowhere, or to another file.
    fn check_in_place(&self) -> io::Result<()> {
        Ok(())
    }

    /// The format version, where it can be read without changing anything.
    fn peek_format(&self) -> Option<u64> {
        None
    }
}

/// Octets for redb, wherever they are.
#[derive(Debug)]
pub(crate) struct Backend {
    storage: Box<dyn StorageBackend>,
    /// Whether a flush failed: what is shown then need not be on the disk.
    flush_failed: Arc<AtomicBool>,
}

impl Backend {
    pub(crate) fn new(storage: Box<dyn StorageBackend>) -> Self {
        Self { storage, flush_failed: Arc::default() }
    }
}

/// The same file, opened without writing to it.
pub(crate) struct ReadOnlyMedium(pub(crate) Arc<dyn Medium>);

impl Medium for ReadOnlyMedium {
    fn open(&self) -> io::Result<Backend> {
        Ok(Backend::new(Box::new(Overlay::new(self.0.open()?.storage)?)))
    }

    fn probe(&self) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn path(&self) -> PathBuf {
        self.0.path()
    }

    fn read_ahead(&self) -> Box<dyn Fn()> {
        self.0.read_ahead()
    }
}

/// What is opened how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenSettings {
    pub(crate) cache_bytes: usize,
    pub(crate) verify_bytes: u64,
}

/// An opened file.
pub(crate) struct OpenFile {
    pub(crate) database: Database,
    /// When it was last written; every write so far was made before this time by the store's clock. `None` where nothing
    /// was written yet.
    pub(crate) last_write: Option<LastWrite>,
    /// The number for the next entry of the expiry index.
    pub(crate) next_number: u64,
    /// How many bytes all records have.
    pub(crate) record_bytes: u64,
    /// Whether a flush of this file has failed since it was opened.
    pub(crate) flush_failed: Arc<AtomicBool>,
}

/// While the disk has less room than this, or than an eighth of it, nothing is claimed: what is left is for completing what
/// runs.
const DISK_RESERVE: u64 = 16 * 1024 * 1024;

/// Beyond this, it is likely that what was read ahead would be gone again when it is verified.
const READ_AHEAD_BYTES: u64 = 4 << 30;

/// A file in a directory that this process owns.
pub(crate) struct FileMedium {
    directory: Directory,
    /// The file, whatever its name is by now.
    identity: Option<FileIdentity>,
}

/// What tells a file from all others of this machine, whatever their names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileIdentity {
    device: u64,
    inode: u64,
}

impl FileIdentity {
    /// That of the file under this path; `None` on systems that do not tell.
    fn of(path: &Path) -> io::Result<Option<Self>> {
        let metadata = std::fs::metadata(path)?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt as _;
            Ok(Some(Self { device: metadata.dev(), inode: metadata.ino() }))
        }
        #[cfg(not(unix))]
        {
            drop(metadata);
            Ok(None)
        }
    }
}

impl FileMedium {
    /// Takes the directory, and makes the file where there is none.
    pub(crate) fn acquire(dir: &Path) -> Result<Self, OpenError> {
        let directory = Directory::acquire(dir)?;
        let created = directory.create_records(|path| {
            let file = FileBackend::new(open_file(path).map_err(OpenError::io("open the new file"))?);
            let file = file.map_err(|error| open_error(path, error))?;
            create(path, Backend::new(Box::new(file)))
        })?;
        if created {
            info!(dir = %dir.display(), "created a new store");
        }
        let path = directory.records();
        let identity = FileIdentity::of(&path).map_err(OpenError::io("look at the file"))?;
        Ok(Self { directory, identity })
    }
}

impl Medium for FileMedium {
    fn open(&self) -> io::Result<Backend> {
        self.check_in_place()?;
        let file = FileBackend::new(open_file(&self.directory.records())?);
        Ok(Backend::new(Box::new(file.map_err(io::Error::other)?)))
    }

    fn probe(&self) -> io::Result<()> {
        self.directory.probe()
    }

    fn path(&self) -> PathBuf {
        self.directory.records()
    }

    fn read_ahead(&self) -> Box<dyn Fn()> {
        let path = self.directory.records();
        Box::new(move || {
            // What fails here fails again where it matters.
            let read = open_file(&path).and_then(|file| {
                io::copy(&mut BufReader::with_capacity(1 << 20, file.take(READ_AHEAD_BYTES)), &mut io::sink())
            });
            drop(read);
        })
    }

    fn is_disk_low(&self) -> bool {
        let Ok(disk) = rustix::fs::statvfs(self.directory.path()) else { return false };
        let reserve = DISK_RESERVE.min(disk.f_blocks.saturating_mul(disk.f_frsize) / 8);
        disk.f_bavail.saturating_mul(disk.f_frsize) < reserve
    }

    fn check_in_place(&self) -> io::Result<()> {
        let path = self.directory.records();
        let (what, kind) = match FileIdentity::of(&path) {
            Ok(identity) if identity == self.identity => return Ok(()),
            Ok(_) => ("was replaced by another file", io::ErrorKind::Other),
            Err(error) if error.kind() == io::ErrorKind::NotFound => ("was moved or removed", error.kind()),
            Err(error) => return Err(error),
        };
        let why = format!(
            "{} {what} while it was open: put it back, or stop this process before another store is used under this path",
            path.display()
        );
        Err(io::Error::new(kind, why))
    }

    fn peek_format(&self) -> Option<u64> {
        let path = self.directory.records();
        let peek = || {
            let database = Builder::new().set_cache_size(0).open_read_only(&path).ok()?;
            let meta = database.begin_read().ok()?.open_table(META).ok()?;
            meta.get(META_FORMAT).ok()?.map(|version| version.value())
        };
        // Where it cannot be read, it will be told when the file is opened for good.
        catch_panics(&path, || Ok(peek())).ok().flatten()
    }
}

fn open_file(path: &Path) -> io::Result<std::fs::File> {
    std::fs::OpenOptions::new().read(true).write(true).open(path)
}

/// Makes a new file with empty tables.
pub(crate) fn create(path: &Path, backend: Backend) -> Result<(), OpenError> {
    let database = Builder::new().create_with_backend(backend).map_err(|error| open_error(path, error))?;
    let tables = |txn: &WriteTransaction| -> Result<(), redb::Error> {
        txn.open_table(RECORDS)?;
        txn.open_table(EXPIRY)?;
        txn.open_table(AUDIT)?;
        txn.open_table(META)?.insert(META_FORMAT, FORMAT)?;
        Ok(())
    };
    write(&database, tables).map_err(|error| error_of(path, error))
}

/// Opens the file, and proves by a durable commit that it can be written.
///
/// That commit is also what makes it safe to go on after a failed one. When a flush to disk fails, the operating system
/// may drop what it could not write and show it all the same to whoever reads the file; the next flush then succeeds
/// without having written it. With two-phase commits, all that the header names was flushed by an earlier, successful
/// flush, so the header is the only page that can be shown without being on disk, and this commit writes it anew.
pub(crate) fn open(medium: &dyn Medium, settings: OpenSettings) -> Result<OpenFile, OpenError> {
    catch_panics(&medium.path(), || open_and_mark(medium, settings))
}

fn open_and_mark(medium: &dyn Medium, settings: OpenSettings) -> Result<OpenFile, OpenError> {
    let path = medium.path();
    check_format(&path, medium.peek_format())?;
    let UnverifiedFile { mut database, bytes, repaired, flush_failed } =
        open_unverified(medium, settings.cache_bytes)?;
    check_format(&path, Some(read_format(&path, &database)?))?;
    if !repaired && bytes <= settings.verify_bytes {
        medium.read_ahead()();
        verify(&path, &mut database)?;
    }
    let marked = write(&database, |txn| {
        let mut meta = txn.open_table(META)?;
        let opened = meta.get(META_OPENED)?.map_or(0, |n| n.value()).saturating_add(1);
        meta.insert(META_OPENED, opened)?;
        let counted = meta.get(META_BYTES)?.map(|bytes| bytes.value()).filter(|_| !repaired);
        let record_bytes = counted.map_or_else(|| count_bytes(txn), Ok)?;
        Ok((opened, last_write(&meta)?, record_bytes))
    });
    let (opened, last_write, record_bytes) = marked.map_err(|error| error_of(&path, error))?;
    Ok(OpenFile { database, last_write, next_number: opened << OPENED_SHIFT, record_bytes, flush_failed })
}

/// When the file was last written.
pub(crate) fn last_write(
    meta: &impl redb::ReadableTable<&'static str, u64>,
) -> Result<Option<LastWrite>, redb::Error> {
    let read = |name| meta.get(name).map(|value| value.map(|value| value.value()));
    let Some(time) = read(META_CLOCK)? else { return Ok(None) };
    let since = read(META_LAGGING)?.filter(|since| *since > 0);
    let later = |millis: u64| Timestamp::from_millis(millis.saturating_add(CLOCK_STEP));
    Ok(Some(LastWrite {
        time: later(time),
        wall: later(read(META_WALL)?.unwrap_or(time)),
        lagging_since: since.map(Timestamp::from_millis),
    }))
}

/// Reads every record, which is done once where they were never counted, and after a stop that was not clean.
fn count_bytes(txn: &WriteTransaction) -> Result<u64, redb::Error> {
    let mut bytes = 0;
    for entry in txn.open_table(RECORDS)?.iter()? {
        bytes += entry?.1.value().len() as u64;
    }
    Ok(bytes)
}

/// A file as redb opens it.
pub(crate) struct UnverifiedFile {
    pub(crate) database: Database,
    pub(crate) bytes: u64,
    /// Whether it was not stopped cleanly. Then every page was verified.
    pub(crate) repaired: bool,
    pub(crate) flush_failed: Arc<AtomicBool>,
}

/// Opens the file as redb does.
pub(crate) fn open_unverified(medium: &dyn Medium, cache_bytes: usize) -> Result<UnverifiedFile, OpenError> {
    let path = medium.path();
    let backend = medium.open().map_err(OpenError::io(format!("open {}", path.display())))?;
    let flush_failed = backend.flush_failed.clone();
    let bytes = backend.storage.len().map_err(OpenError::io(format!("read {}", path.display())))?;
    if bytes == 0 {
        // redb would take it for a new one.
        return Err(OpenError::Damaged { file: path, what: "it is empty".to_owned() });
    }
    let repaired = Rc::new(Cell::new(false));
    let on_repair = {
        let (repaired, path, read_ahead) = (repaired.clone(), path.clone(), medium.read_ahead());
        move |_: &mut RepairSession| {
            if !repaired.replace(true) {
                info!(file = %path.display(), bytes, "not stopped cleanly: verifying the whole file");
                read_ahead();
            }
        }
    };
    let database = Builder::new()
        .set_cache_size(cache_bytes)
        .set_repair_callback(on_repair)
        .create_with_backend(backend)
        .map_err(|error| open_error(&path, error))?;
    Ok(UnverifiedFile { database, bytes, repaired: repaired.get(), flush_failed })
}

/// Verifies every page of the file.
pub(crate) fn verify(path: &Path, database: &mut Database) -> Result<(), OpenError> {
    if !database.check_integrity().map_err(|error| open_error(path, error))? {
        warn!(file = %path.display(), "the list of free pages did not fit the records and was made anew");
    }
    Ok(())
}

/// What redb makes of a page that was damaged is sometimes a panic. Whoever opens a file gets [`OpenError::Damaged`] instead.
pub(crate) fn catch_panics<T>(
    path: &Path,
    run: impl FnOnce() -> Result<T, OpenError>,
) -> Result<T, OpenError> {
    catch_panics_quietly(run).unwrap_or_else(|_| {
        Err(OpenError::Damaged {
            file: path.to_owned(),
            what: "its pages make no sense to the database".to_owned(),
        })
    })
}

thread_local! {
    /// Whether a panic of this thread is caught and reported in words.
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Runs it and catches its panic, of which nothing is printed: whoever calls this reports what it means.
pub(crate) fn catch_panics_quietly<T>(run: impl FnOnce() -> T) -> std::thread::Result<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !IS_CAUGHT.get() {
                others(panic);
            }
        }));
    });
    let before = IS_CAUGHT.replace(true);
    let result = catch_unwind(AssertUnwindSafe(run));
    IS_CAUGHT.set(before);
    result
}

/// Runs `change` in a transaction and commits it durably.
pub(crate) fn write<T>(
    database: &Database,
    change: impl FnOnce(&WriteTransaction) -> Result<T, redb::Error>,
) -> Result<T, redb::Error> {
    let txn = begin_write(database)?;
    let changed = change(&txn)?;
    txn.commit()?;
    Ok(changed)
}

/// A transaction whose commit is on disk when it returns.
///
/// Without redb's quick repair, which writes the list of free pages with every commit: it would make each commit of a
/// single command nearly twice as expensive, and open a file after a crash without having looked at it.
pub(crate) fn begin_write(database: &Database) -> Result<WriteTransaction, redb::Error> {
    let mut txn = database.begin_write()?;
    txn.set_durability(Durability::Immediate)?;
    txn.set_two_phase_commit(true);
    Ok(txn)
}

pub(crate) fn read_format(path: &Path, database: &Database) -> Result<u64, OpenError> {
    let read = || -> Result<Option<u64>, redb::Error> {
        let txn = database.begin_read()?;
        txn.open_table(RECORDS)?;
        txn.open_table(EXPIRY)?;
        txn.open_table(AUDIT)?;
        Ok(txn.open_table(META)?.get(META_FORMAT)?.map(|version| version.value()))
    };
    match read() {
        Ok(Some(version)) => Ok(version),
        Ok(None) | Err(redb::Error::TableDoesNotExist(_)) => Err(OpenError::Damaged {
            file: path.to_owned(),
            what: "it is a database, but not one of this program's stores".to_owned(),
        }),
        Err(error) => Err(error_of(path, error)),
    }
}

pub(crate) fn check_format(path: &Path, found: Option<u64>) -> Result<(), OpenError> {
    match found {
        Some(found) if found > FORMAT => Err(OpenError::NewerFormat {
            dir: path.parent().unwrap_or(path).to_owned(),
            found,
            known: FORMAT,
        }),
        // No release wrote one.
        Some(found) if found < FORMAT => Err(OpenError::Damaged {
            file: path.to_owned(),
            what: format!(
                "it is of format {found}, which only programs before the first release wrote; make a new store"
            ),
        }),
        _ => Ok(()),
    }
}

/// What an error of redb means for whoever opens the file.
pub(crate) fn open_error(path: &Path, error: DatabaseError) -> OpenError {
    error_of(path, error.into())
}

pub(crate) fn error_of(path: &Path, error: redb::Error) -> OpenError {
    let file = path.to_owned();
    match error {
        redb::Error::DatabaseAlreadyOpen => {
            OpenError::InUse { dir: path.parent().unwrap_or(path).to_owned(), pid: None }
        }
        redb::Error::Io(source) if !is_damage(&source) => {
            OpenError::Io { what: format!("read or write {}", file.display()), source }
        }
        redb::Error::PreviousIo => OpenError::Io {
            what: format!("read or write {}", file.display()),
            source: io::Error::other("an earlier read or write failed"),
        },
        other => OpenError::Damaged { file, what: other.to_string() },
    }
}

/// A file that ends before the page that is named in it.
fn is_damage(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData)
}

/// Whether the disk, or what this user may take of it, is full.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

impl fmt::Debug for FileMedium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileMedium({})", self.directory.path().display())
    }
}

/// Hands everything on, and remembers that a flush failed.
impl StorageBackend for Backend {
    fn len(&self) -> io::Result<u64> {
        self.storage.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.storage.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.storage.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.storage.sync_data().inspect_err(|_| self.flush_failed.store(true, Ordering::SeqCst))
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.storage.write(offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.storage.close()
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.storage.try_lock_range(start, end)
    }

    fn try_lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.storage.try_lock_shared_range(start, end)
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.storage.lock_range(start, end)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.storage.lock_shared_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.storage.unlock_range(start, end)
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.storage.query_lock_range(start, end)
    }
}
