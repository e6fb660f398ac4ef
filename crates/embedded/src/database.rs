//! Creation, opening and recovery of the file.
//!
//! Steps of [`open`], each of which may refuse the file:
//!
//! 1. Read the format version without writing, if that is possible. A newer file is left unchanged.
//! 2. Open the file with redb. After an unclean stop, redb verifies every page on the way.
//! 3. Read the format version again, now for certain.
//! 4. After a clean stop, verify every page if the file is small enough.
//! 5. Commit durably: that proves that the file can be written, and writes the header again, which makes the file safe
//!    to use after a failed flush (see [`open`]).

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
use crate::error::EmbeddedOpenError;
use crate::overlay::Overlay;
use crate::schema::{
    AUDIT, CLOCK_STEP, EXPIRY, FORMAT, META, META_BYTES, META_CLOCK, META_FORMAT, META_LAGGING, META_OPENED,
    META_WALL, OPENED_SHIFT, RECORDS,
};

/// The place where the bytes of the file are: a directory, or a simulated disk in tests.
pub(crate) trait Medium: Send + Sync + 'static {
    /// Opens a new handle on the file. The handle before it is closed.
    fn open(&self) -> io::Result<Backend>;

    /// Checks that the disk accepts writes. This is a cheap test before the whole file is verified for reopening.
    fn probe(&self) -> io::Result<()>;

    /// The path of the file, for messages.
    fn path(&self) -> PathBuf;

    /// Returns a function that reads the file once, in order.
    ///
    /// Verification then finds the pages in memory. Reading them from a disk in the order of verification takes several
    /// times as long.
    fn read_ahead(&self) -> Box<dyn Fn()> {
        Box::new(|| ())
    }

    /// Returns `true` if the disk is known to be nearly full.
    fn is_disk_low(&self) -> bool {
        false
    }

    /// Checks that the path still leads to the file that was opened.
    ///
    /// If the file was removed or renamed, the next start would not find what is written to it, and another process might
    /// create a new store under the path.
    ///
    /// # Errors
    /// The path has no file, or another one.
    fn check_in_place(&self) -> io::Result<()> {
        Ok(())
    }

    /// Reads the format version without changing the file, if that is possible.
    fn peek_format(&self) -> Option<u64> {
        None
    }
}

/// The bytes of the file, as redb reads and writes them.
#[derive(Debug)]
pub(crate) struct Backend {
    storage: Box<dyn StorageBackend>,
    /// A flush failed. From then on, bytes that the operating system shows may not be on the disk.
    flush_failed: Arc<AtomicBool>,
}

impl Backend {
    pub(crate) fn new(storage: Box<dyn StorageBackend>) -> Self {
        Self { storage, flush_failed: Arc::default() }
    }
}

/// The same file, opened through an [`Overlay`], so that nothing is written to it.
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

/// The options that apply each time the file is opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenSettings {
    pub(crate) cache_bytes: usize,
    pub(crate) verify_bytes: u64,
}

/// An opened file.
pub(crate) struct OpenFile {
    pub(crate) database: Database,
    /// A time of the store's clock that is later than every write so far. `None` if nothing was written yet.
    pub(crate) last_write: Option<LastWrite>,
    /// The number for the next entry of the expiry index.
    pub(crate) next_number: u64,
    /// The total size of all records.
    pub(crate) record_bytes: u64,
    /// A flush of this file has failed since it was opened.
    pub(crate) flush_failed: Arc<AtomicBool>,
}

/// The free bytes below which claims are refused, or an eighth of the disk if that is less.
///
/// The rest of the disk is reserved for completing the requests that are running.
const DISK_RESERVE: u64 = 16 * 1024 * 1024;

/// The most bytes to read ahead. More would probably be evicted from memory again before they are verified.
const READ_AHEAD_BYTES: u64 = 4 << 30;

/// A file in a directory that this process owns.
pub(crate) struct FileMedium {
    directory: Directory,
    /// The identity of the opened file, which does not change when the file is renamed.
    identity: Option<FileIdentity>,
}

/// The identity of a file on this machine, independent of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileIdentity {
    device: u64,
    inode: u64,
}

impl FileIdentity {
    /// Returns the identity of the file under this path. `None` on systems that do not report it.
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
    /// Locks the directory, and creates the file if there is none.
    pub(crate) fn acquire(dir: &Path) -> Result<Self, EmbeddedOpenError> {
        let directory = Directory::acquire(dir)?;
        let created = directory.create_records(|path| {
            let file = FileBackend::new(open_file(path).map_err(EmbeddedOpenError::io("open the new file"))?);
            let file = file.map_err(|error| open_error(path, error))?;
            create(path, Backend::new(Box::new(file)))
        })?;
        if created {
            info!(dir = %dir.display(), "created a new store");
        }
        let path = directory.records();
        let identity = FileIdentity::of(&path)
            .map_err(EmbeddedOpenError::io(format!("read the metadata of {}", path.display())))?;
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
            // An error is ignored: verification meets it again and reports it.
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
        let (change, kind) = match FileIdentity::of(&path) {
            Ok(identity) if identity == self.identity => return Ok(()),
            Ok(_) => ("was replaced by another file", io::ErrorKind::Other),
            Err(error) if error.kind() == io::ErrorKind::NotFound => ("was moved or removed", error.kind()),
            Err(error) => return Err(error),
        };
        let message = format!(
            "{} {change} while it was open: put it back, or stop this process before another store is used under this path",
            path.display()
        );
        Err(io::Error::new(kind, message))
    }

    fn peek_format(&self) -> Option<u64> {
        let path = self.directory.records();
        let peek = || {
            let database = Builder::new().set_cache_size(0).open_read_only(&path).ok()?;
            let meta = database.begin_read().ok()?.open_table(META).ok()?;
            meta.get(META_FORMAT).ok()?.map(|version| version.value())
        };
        // An error is ignored: opening the file for writing meets it again and reports it.
        catch_panics(&path, || Ok(peek())).ok().flatten()
    }
}

fn open_file(path: &Path) -> io::Result<std::fs::File> {
    std::fs::OpenOptions::new().read(true).write(true).open(path)
}

/// Creates a new file with empty tables.
pub(crate) fn create(path: &Path, backend: Backend) -> Result<(), EmbeddedOpenError> {
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
/// That commit also makes it safe to continue after a failed flush:
///
/// - When a flush fails, the operating system may drop the pages that it could not write, and still show them to every
///   reader of the file. The next flush then succeeds without having written them.
/// - With two-phase commits, every page that the header refers to was flushed by an earlier, successful flush. So only
///   the header itself can be shown without being on disk.
/// - This commit writes the header again.
pub(crate) fn open(medium: &dyn Medium, settings: OpenSettings) -> Result<OpenFile, EmbeddedOpenError> {
    catch_panics(&medium.path(), || open_and_mark(medium, settings))
}

fn open_and_mark(medium: &dyn Medium, settings: OpenSettings) -> Result<OpenFile, EmbeddedOpenError> {
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

/// Reads the time of the last write, rounded up by [`CLOCK_STEP`], so that no write is later.
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

/// Adds up the sizes of all records. Needed after an unclean stop, and in a file that never stored the sum.
fn count_bytes(txn: &WriteTransaction) -> Result<u64, redb::Error> {
    let mut bytes = 0;
    for entry in txn.open_table(RECORDS)?.iter()? {
        bytes += entry?.1.value().len() as u64;
    }
    Ok(bytes)
}

/// A file that redb has opened, and that is not yet checked further.
pub(crate) struct UnverifiedFile {
    pub(crate) database: Database,
    pub(crate) bytes: u64,
    /// The file was not closed cleanly, so redb verified every page.
    pub(crate) repaired: bool,
    pub(crate) flush_failed: Arc<AtomicBool>,
}

/// Opens the file with redb.
pub(crate) fn open_unverified(
    medium: &dyn Medium,
    cache_bytes: usize,
) -> Result<UnverifiedFile, EmbeddedOpenError> {
    let path = medium.path();
    let backend = medium.open().map_err(EmbeddedOpenError::io(format!("open {}", path.display())))?;
    let flush_failed = backend.flush_failed.clone();
    let bytes = backend.storage.len().map_err(EmbeddedOpenError::io(format!("read {}", path.display())))?;
    if bytes == 0 {
        // redb would initialize it as a new file.
        return Err(EmbeddedOpenError::Damaged { file: path, damage: "it is empty".to_owned() });
    }
    let repaired = Rc::new(Cell::new(false));
    let on_repair = {
        let (repaired, path, read_ahead) = (repaired.clone(), path.clone(), medium.read_ahead());
        move |_: &mut RepairSession| {
            if !repaired.replace(true) {
                info!(file = %path.display(), bytes, "the store was not stopped cleanly: verifying the whole file");
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
pub(crate) fn verify(path: &Path, database: &mut Database) -> Result<(), EmbeddedOpenError> {
    if !database.check_integrity().map_err(|error| open_error(path, error))? {
        warn!(file = %path.display(), "the list of free pages did not match the records and was rebuilt");
    }
    Ok(())
}

/// Turns a panic into [`EmbeddedOpenError::Damaged`]: redb panics on some damaged pages.
pub(crate) fn catch_panics<T>(
    path: &Path,
    run: impl FnOnce() -> Result<T, EmbeddedOpenError>,
) -> Result<T, EmbeddedOpenError> {
    catch_panics_quietly(run).unwrap_or_else(|_| {
        Err(EmbeddedOpenError::Damaged {
            file: path.to_owned(),
            damage: "the database panicked while it read the pages".to_owned(),
        })
    })
}

thread_local! {
    /// `true` while [`catch_panics_quietly`] runs on this thread.
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Runs a closure and catches its panic without printing it. The caller reports what the panic means.
pub(crate) fn catch_panics_quietly<T>(run: impl FnOnce() -> T) -> std::thread::Result<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous_hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !IS_CAUGHT.get() {
                previous_hook(panic);
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

/// Begins a transaction whose commit is on disk when it returns.
///
/// It does not use redb's quick repair, which writes the list of free pages with every commit. Quick repair would make
/// the commit of a single command nearly twice as expensive, and would skip the verification after a crash.
pub(crate) fn begin_write(database: &Database) -> Result<WriteTransaction, redb::Error> {
    let mut txn = database.begin_write()?;
    txn.set_durability(Durability::Immediate)?;
    txn.set_two_phase_commit(true);
    Ok(txn)
}

pub(crate) fn read_format(path: &Path, database: &Database) -> Result<u64, EmbeddedOpenError> {
    let read = || -> Result<Option<u64>, redb::Error> {
        let txn = database.begin_read()?;
        txn.open_table(RECORDS)?;
        txn.open_table(EXPIRY)?;
        txn.open_table(AUDIT)?;
        Ok(txn.open_table(META)?.get(META_FORMAT)?.map(|version| version.value()))
    };
    match read() {
        Ok(Some(version)) => Ok(version),
        Ok(None) | Err(redb::Error::TableDoesNotExist(_)) => Err(EmbeddedOpenError::Damaged {
            file: path.to_owned(),
            damage: "it is a redb database, but not a store of this program".to_owned(),
        }),
        Err(error) => Err(error_of(path, error)),
    }
}

pub(crate) fn check_format(path: &Path, found: Option<u64>) -> Result<(), EmbeddedOpenError> {
    match found {
        Some(found) if found > FORMAT => Err(EmbeddedOpenError::NewerFormat {
            dir: path.parent().unwrap_or(path).to_owned(),
            found,
            known: FORMAT,
        }),
        // No release wrote an older format, so there is no upgrade.
        Some(found) if found < FORMAT => Err(EmbeddedOpenError::Damaged {
            file: path.to_owned(),
            damage: format!(
                "it has format {found}, which only versions before the first release wrote; create a new store"
            ),
        }),
        _ => Ok(()),
    }
}

/// Translates an error of redb's `Database` for the caller who opens the file.
pub(crate) fn open_error(path: &Path, error: DatabaseError) -> EmbeddedOpenError {
    error_of(path, error.into())
}

/// Translates any error of redb for the caller who opens the file.
pub(crate) fn error_of(path: &Path, error: redb::Error) -> EmbeddedOpenError {
    let file = path.to_owned();
    match error {
        redb::Error::DatabaseAlreadyOpen => {
            EmbeddedOpenError::InUse { dir: path.parent().unwrap_or(path).to_owned(), pid: None }
        }
        redb::Error::Io(source) if !is_damage(&source) => {
            EmbeddedOpenError::Io { operation: format!("read or write {}", file.display()), source }
        }
        redb::Error::PreviousIo => EmbeddedOpenError::Io {
            operation: format!("read or write {}", file.display()),
            source: io::Error::other("an earlier read or write failed"),
        },
        other => EmbeddedOpenError::Damaged { file, damage: other.to_string() },
    }
}

/// Returns `true` for errors of a file that ends before a page that it refers to, or has invalid contents.
fn is_damage(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData)
}

/// Returns `true` if the disk, or the user's quota of it, is full.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

impl fmt::Debug for FileMedium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileMedium({})", self.directory.path().display())
    }
}

/// Forwards every call, and remembers a failed flush.
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
