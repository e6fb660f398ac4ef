//! A journal in a directory: one file for each intent that has no definite response.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use http::header::{HeaderMap, HeaderName};
use http::{Method, Uri};
use oncegate_core::{IdempotencyKey, Timestamp};

use super::entry::{
    self, Entry, EntryError, MAX_ENTRY_BYTES, MAYBE_SENT, NEVER_SENT, STATE_AT, decode, encode, file_name,
};
use super::files::Files;
use super::finished::{DIRECTORY as FINISHED, FinishedFile, FinishedIntent, FinishedIntents};
use super::resume::ResumeError;
use super::sealing::EntrySeal;
use super::{Journal, JournalEntry, JournalFuture, JournalOpenError, JournaledIntent};
use crate::client::Transport;
use crate::failure::BoxError;
use crate::intent::Intent;
use crate::key::{now, random_bits};
use crate::report::DefiniteResponse;
use crate::send::is_safe;
use crate::verdict::Verdict;

/// The prefix of temporary names. A file with such a name is never an intent.
const NEW: &str = ".new-";

/// The time after which a locked entry counts as being sent. A listing holds the lock for less.
const LOCK_TIMEOUT: Duration = Duration::from_millis(500);

/// The number of tries to lock an entry that other processes replace meanwhile.
const MAX_LOCK_ROUNDS: usize = 32;

/// The default of [`JournalDir::with_max_intents`].
const MAX_INTENTS: usize = 10_000;

/// The default of [`JournalDir::with_finished_retention`].
const FINISHED_RETENTION: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// The default of [`JournalDir::with_max_finished_per_day`].
const MAX_FINISHED_PER_DAY: usize = 10_000;

/// The age up to which an intent that was never sent keeps its file. An older one is written again, with a new time.
const FRESH: Duration = Duration::from_secs(60);

/// A [`Journal`] in a directory of a local file system: one file for each intent that has no definite response.
///
/// - **Before the first sending** the file is written under a temporary name and synced. Then it gets its name, and the
///   directory is synced. After a crash before that, only the temporary file is left: nothing was sent for it, and
///   [`JournalDir::pending`] removes it. If a step fails, as on a full disk, nothing is sent.
/// - **The name** is derived from the key, so a key has one intent. The same request, sent again at any later time,
///   continues the stored intent. Another request under the key is refused ([`JournalOpenError::Conflict`], or
///   [`JournalOpenError::UnsentConflict`] if no attempt of the stored one was processed). If keys of two services may be equal,
///   give each service its own directory.
/// - **While it is sent** the file is locked. The system frees the lock when the process ends, however it ends. Any number of
///   processes and tasks may use one directory; none sends an intent that another one is sending.
/// - **With a definite response** the file is removed. A power cut may bring it back; then the intent is sent again, under its
///   key. The directory `finished` remembers for 30 days ([`with_finished_retention`](Self::with_finished_retention)) that the
///   intent was done: the same intent is sent again only while the service knows its key
///   ([`SendErrorKind::DoneBefore`](crate::SendErrorKind::DoneBefore)), and another request under its key is refused.
/// - **If the service turns it away** ([`Verdict::TurnedAway`](crate::Verdict::TurnedAway)) it stays, as an intent that was
///   never sent.
/// - **A file that cannot be read** is not sent, not removed and not overwritten. [`JournalDir::pending`] reports it.
/// - **Secrets.** `Authorization`, `Cookie`, `X-Api-Key` and other usual headers for credentials are left out, and so are
///   headers whose value is marked as sensitive. Key, address, other headers and body are stored in plain text, unless there are
///   keys (`with_seal_keys`, with the feature `seal`). Only the owner of the directory can read them.
///
/// Cheap to clone.
///
/// ```
/// use std::sync::Arc;
/// use oncegate_client::{Client, IdempotencyKey, Intent, JournalDir};
/// # use bytes::Bytes;
/// # use http_body_util::Full;
/// # use oncegate_client::{AttemptFailure, AttemptFailureKind, RetryPolicy};
/// # #[derive(Clone)]
/// # struct Bank(bool);
/// # impl oncegate_client::Transport for Bank {
/// #     type Body = Full<Bytes>;
/// #     async fn send(&self, _: http::Request<Bytes>) -> Result<http::Response<Full<Bytes>>, AttemptFailure> {
/// #         if self.0 { Ok(http::Response::new(Full::default())) }
/// #         else { Err(AttemptFailure::new(AttemptFailureKind::Doubtful, "no response")) }
/// #     }
/// # }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (temporary, transport) = (tempfile::tempdir()?, Bank(false));
/// # let directory = temporary.path().join("intents");
/// let journal = JournalDir::open(&directory)?;
/// # let policy = RetryPolicy::default().with_max_attempts(1)?;
/// let client = Client::new(transport).with_journal(Arc::new(journal.clone()));
/// # let client = client.with_policy(policy);
/// let payout = Intent::post("https://bank.example/payouts")?.with_key(IdempotencyKey::derived("payout", ["7"]))?;
/// let end = client.send(&payout).await; // no response, or the process dies here
/// # assert!(end.is_err());
///
/// // The next process, before anything new.
/// # let client = Client::new(Bank(true)).with_journal(Arc::new(journal.clone()));
/// let mut resume = journal.resume_pending(&client).await?;
/// while let Some(end) = resume.next().await {
///     match end {
///         Ok(resumed) => println!("{:?}: {:?}", resumed.pending.path, resumed.end),
///         Err(damaged) => eprintln!("{damaged}"),
///     }
/// }
/// assert!(journal.pending().await?.is_empty());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct JournalDir(Arc<Inner>);

/// The reason for which an intent is not sent with other credentials.
pub(super) const OTHER_CREDENTIALS: &str = "it may have been sent with other credentials; a service that identifies the caller by \
     the credential would execute it again";

#[derive(Clone)]
struct Inner {
    path: PathBuf,
    files: Files,
    max_intents: usize,
    lock_timeout: Duration,
    other_credentials: bool,
    finished: FinishedIntents,
    seal: EntrySeal,
}

/// An intent without a definite response, as a listing shows it: without headers and body.
///
/// [`PendingIntent::key`] and [`PendingIntent::uri`] may be confidential.
#[non_exhaustive]
pub struct PendingIntent {
    /// The path of its file.
    pub path: PathBuf,
    /// Its key.
    pub key: IdempotencyKey,
    /// The method.
    pub method: Method,
    /// The address.
    pub uri: Uri,
    /// The time of its creation.
    pub created_at: Timestamp,
    /// The length of the body in bytes.
    pub body_bytes: usize,
    /// `true` if it may have been sent. `false` is certain: no attempt of it was processed.
    pub maybe_sent: bool,
    /// `true` if a process is sending it now.
    pub in_flight: bool,
    /// The headers that the journal left out. They are needed to send it.
    pub left_out: Vec<HeaderName>,
}

/// A file that cannot be read, or holds no complete intent. The journal does not change it.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", .path.display())]
#[non_exhaustive]
pub struct DamagedFile {
    /// Its path.
    pub path: PathBuf,
    /// The damage, the error of the file system, or the seal key that is missing.
    pub reason: String,
    /// `true` if the file could not be opened, locked, read or decrypted: its content is unknown. `false` if it was read and is
    /// no complete intent.
    pub is_unreadable: bool,
}

impl fmt::Debug for PendingIntent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingIntent")
            .field("path", &self.path)
            .field("created_at", &self.created_at)
            .field("maybe_sent", &self.maybe_sent)
            .field("in_flight", &self.in_flight)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for JournalDir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("JournalDir").field(&self.0.path).finish()
    }
}

/// An entry and its lock.
struct LockedEntry {
    inner: Arc<Inner>,
    path: PathBuf,
    file: File,
    /// The intent that is sent.
    intent: Intent,
}

/// The lock of an intent that was finished before. Its file is not changed.
struct FinishedLock {
    _file: File,
}

impl JournalDir {
    /// Opens the journal in this directory, and creates a missing directory for its owner alone.
    ///
    /// When this returns, the directory is durable.
    ///
    /// # Errors
    /// If the directory cannot be created or listed, or if others than its owner may write to it: the client sends its content.
    pub fn open(path: impl Into<PathBuf>) -> io::Result<Self> {
        Self::with_files(path.into(), Files::default())
    }

    pub(super) fn with_files(path: PathBuf, files: Files) -> io::Result<Self> {
        files.create_dir(&path)?;
        let about = fs::metadata(&path)?;
        if !about.is_dir() {
            return Err(io::Error::new(io::ErrorKind::NotADirectory, "it is not a directory"));
        }
        if about.permissions().mode() & 0o022 != 0 {
            let others = "others than its owner may write to the directory: run chmod go-w on it";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, others));
        }
        // In a directory that cannot be listed, pending intents would stay unseen.
        fs::read_dir(&path)?;
        let inner = Inner {
            finished: FinishedIntents::new(&path, FINISHED_RETENTION, MAX_FINISHED_PER_DAY),
            path,
            files,
            max_intents: MAX_INTENTS,
            lock_timeout: LOCK_TIMEOUT,
            other_credentials: false,
            seal: EntrySeal::default(),
        };
        Ok(Self(Arc::new(inner)))
    }

    /// Sets the maximum number of intents in the directory: 10 000 by default. Further ones are not sent.
    ///
    /// Several processes that reach the limit at once may exceed it by one each.
    #[must_use]
    pub fn with_max_intents(self, max_intents: usize) -> Self {
        self.with(|inner| inner.max_intents = max_intents)
    }

    /// Sends intents that may have been sent before with other credentials, too. By default they are refused.
    ///
    /// A service may take each credential for another caller, as Oncegate does by default. It then executes again, for the new
    /// credential, what it executed for the old one. So use this only if the service identifies callers by something else than
    /// the credential, such as if tokens are renewed.
    #[must_use]
    pub fn with_other_credentials(self) -> Self {
        self.with(|inner| inner.other_credentials = true)
    }

    /// Sets how long the journal remembers that an intent was done: 30 days by default; zero turns it off.
    ///
    /// It should be longer than the time within which a caller may make the same intent again, such as one with a [derived
    /// key](IdempotencyKey::derived).
    #[must_use]
    pub fn with_finished_retention(self, retention: Duration) -> Self {
        self.with(|inner| inner.finished.retention = retention)
    }

    /// Sets how many finished intents of one day the journal remembers, in a small file each: 10 000 by default.
    ///
    /// It does not remember further ones, and logs a warning.
    #[must_use]
    pub fn with_max_finished_per_day(self, max_per_day: usize) -> Self {
        self.with(|inner| inner.finished.max_per_day = max_per_day)
    }

    /// Encrypts new entries with the first of these keys, and decrypts stored ones with any of them. Entries in plain text are
    /// read, too.
    ///
    /// An entry whose key is missing stays as it is, and its intent is not sent: [`JournalDir::pending`] reports it as
    /// unreadable ([`DamagedFile::is_unreadable`]), and [`JournalOpenError::Unreadable`] refuses a sending under its key.
    /// What is encrypted: key, address, headers and body. What is not: the state, the time of the file, the length, and the
    /// name of the file, which is a hash of the key. The notes of finished intents contain only hashes.
    #[cfg(feature = "seal")]
    #[must_use]
    pub fn with_seal_keys(self, keys: oncegate_seal::Keyring) -> Self {
        self.with(|inner| inner.seal = EntrySeal::new(keys))
    }

    fn with(mut self, change: impl FnOnce(&mut Inner)) -> Self {
        change(Arc::make_mut(&mut self.0));
        self
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Lists the files that cannot be read, then the intents without a definite response, oldest first.
    ///
    /// It removes the temporary files of processes that ended: nothing was sent for them.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub async fn pending(&self) -> io::Result<Vec<Result<PendingIntent, DamagedFile>>> {
        let inner = Arc::clone(&self.0);
        blocking(move || inner.pending()).await.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Locks the intent of a listing, and adds the headers that the journal left out.
    pub(super) async fn take(
        &self,
        pending: &PendingIntent,
        brought: HeaderMap,
    ) -> Result<(Intent, JournaledIntent), ResumeError> {
        let (inner, path, maybe_sent) = (Arc::clone(&self.0), pending.path.clone(), pending.maybe_sent);
        let taken = blocking(move || inner.take(&path, &brought, maybe_sent)).await;
        taken.unwrap_or_else(|error| {
            Err(ResumeError::Sending(JournalOpenError::Conflict(error).send_error(maybe_sent)))
        })
    }

    /// Sends the intents without a definite response again. Programs call it when they start, before they send anything new.
    ///
    /// Intents are sent one after the other, oldest first, because a later one may need an earlier one. An intent that stays
    /// without a definite response does not block the rest. [`Resume::with_concurrency`](super::Resume::with_concurrency) sends
    /// several at once. Each call of [`Resume::next`](super::Resume::next) returns one result; without it, nothing is sent.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub async fn resume_pending<T>(&self, client: &crate::Client<T>) -> io::Result<super::Resume<T>>
    where
        T: Transport + Clone + 'static,
    {
        Ok(super::Resume::new(self.clone(), client.clone(), self.pending().await?))
    }
}

impl Journal for JournalDir {
    fn open<'a>(
        &'a self,
        intent: &'a Intent,
    ) -> JournalFuture<'a, Result<JournaledIntent, JournalOpenError>> {
        let inner = Arc::clone(&self.0);
        let intent = intent.clone();
        Box::pin(async move {
            blocking(move || inner.open(&intent))
                .await
                .unwrap_or_else(|error| Err(JournalOpenError::Conflict(error)))
        })
    }
}

impl JournalEntry for LockedEntry {
    fn close<'a>(self: Box<Self>, outcome: &'a DefiniteResponse) -> JournalFuture<'a, Result<(), BoxError>> {
        let verdict = outcome.verdict;
        Box::pin(async move { Ok(blocking(move || self.finish(verdict)).await??) })
    }

    fn never_sent<'a>(self: Box<Self>) -> JournalFuture<'a, Result<(), BoxError>> {
        // Not synced: if the write is lost, the intent counts as sent, which is safe.
        Box::pin(async {
            Ok(blocking(move || self.inner.files.write(&self.file, STATE_AT, NEVER_SENT)).await??)
        })
    }
}

impl JournalEntry for FinishedLock {
    fn close<'a>(self: Box<Self>, _: &'a DefiniteResponse) -> JournalFuture<'a, Result<(), BoxError>> {
        Box::pin(async { Ok(()) })
    }
}

impl LockedEntry {
    /// Removes the intent. If it may have taken effect, the journal first remembers that it was finished.
    ///
    /// After a crash in between, both files exist, and the intent is sent again and replayed.
    fn finish(self, verdict: Verdict) -> io::Result<()> {
        let Self { inner, path, file, intent } = self;
        let is_remembered =
            !is_safe(intent.method()) && !matches!(verdict, Verdict::Refused(_) | Verdict::TurnedAway);
        let remember = || {
            let finished = FinishedIntent::of(&intent, verdict == Verdict::Done);
            inner.finished.add(&inner.files, intent.key(), &finished, |bytes| inner.create_new(bytes))
        };
        let remembered = if is_remembered { remember() } else { Ok(()) };
        let is_full = |error: &io::Error| {
            matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        };
        match remembered {
            Ok(()) => inner.remove(&path, &file),
            // The intent has a response, and removing it frees space.
            Err(error) if is_full(&error) => {
                inner.remove(&path, &file)?;
                drop(file);
                remember()
            }
            Err(error) => Err(error),
        }
    }
}

impl Inner {
    fn remove(&self, path: &Path, file: &File) -> io::Result<()> {
        // An operator may have moved the file and put another one in its place.
        if self.files.is_named(file, path)? {
            self.files.remove(path)?;
        }
        Ok(())
    }

    /// Returns `true` if the headers belong to another caller and the intent may have been sent.
    fn is_another_caller(&self, entry: &Entry, headers: &HeaderMap) -> bool {
        entry.maybe_sent && !self.other_credentials && !entry.is_of(headers)
    }

    /// Takes an intent of a listing. `maybe_sent` is what the listing says.
    fn take(
        self: &Arc<Self>,
        path: &Path,
        brought: &HeaderMap,
        maybe_sent: bool,
    ) -> Result<(Intent, JournaledIntent), ResumeError> {
        let failed = |error: JournalOpenError| ResumeError::Sending(error.send_error(maybe_sent));
        let (entry, file) = self.take_up(path).map_err(failed)?.ok_or(ResumeError::Gone)?;
        let missing: Vec<HeaderName> = entry.caller.missing_in(brought).cloned().collect();
        if !missing.is_empty() {
            return Err(ResumeError::MissingFields(missing));
        }
        let mut headers = entry.intent.headers().clone();
        // Add only the missing headers: they may be credentials, and other intents of the directory may go to other services.
        for name in &entry.caller.left_out {
            headers.remove(name);
            for value in brought.get_all(name) {
                let mut value = value.clone();
                value.set_sensitive(true);
                headers.append(name.clone(), value);
            }
        }
        if self.is_another_caller(&entry, &headers) {
            return Err(ResumeError::OtherCredentials);
        }
        let intent = entry.intent.clone().with_headers(headers);
        let opened = self.to_be_sent(path, file, &entry, &intent.clone().with_created_at(now()));
        Ok((intent, opened.map_err(failed)?))
    }

    fn open(self: &Arc<Self>, intent: &Intent) -> Result<JournaledIntent, JournalOpenError> {
        if let Some(replaced) = intent.replaces() {
            let path = self.path.join(file_name(replaced));
            if replaced == intent.key() {
                return Err(conflict("a corrected request needs a new key"));
            }
            match fs::symlink_metadata(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(at(&path, &error)),
                Ok(_) => {
                    return Err(conflict(format!(
                        "{}: the intent that this one replaces has no definite response yet",
                        path.display()
                    )));
                }
            }
        }
        let path = self.path.join(file_name(intent.key()));
        for _ in 0..MAX_LOCK_ROUNDS {
            if let Some((entry, file)) = self.take_up(&path)? {
                if let Some(part) = difference(&entry, intent) {
                    return Err(another_request(&path, part, entry.maybe_sent));
                }
                if entry.maybe_sent
                    && let Some(name) = entry.caller.missing_in(intent.headers()).next()
                {
                    // Without the header, the caller may be another one, and the request may take effect again.
                    let path = path.display();
                    let missing = format!("{path}: it was sent with the header {name}, which is missing now");
                    return Err(JournalOpenError::OtherCredentials(missing.into()));
                }
                if self.is_another_caller(&entry, intent.headers()) {
                    return Err(other_credentials(&path));
                }
                return self.to_be_sent(&path, file, &entry, intent);
            }
            if let Some(opened) = self.finished_before(intent)? {
                return Ok(opened);
            }
            if let Some(locked) = self.write_down(intent, &path).map_err(not_written)? {
                // Another process may have finished the intent between the check above and the creation of the file.
                match self.finished.find(&self.files, intent.key()) {
                    Ok(None) => return Ok(JournaledIntent::new(Box::new(locked))),
                    _ => self.remove(&path, &locked.file).map_err(|error| at(&path, &error))?,
                }
            }
        }
        Err(JournalOpenError::InFlight)
    }

    /// Finds an intent that was finished before.
    fn finished_before(&self, intent: &Intent) -> Result<Option<JournaledIntent>, JournalOpenError> {
        let found = self.finished.find(&self.files, intent.key());
        let found = found.map_err(|damaged| match damaged.is_unreadable {
            true => JournalOpenError::Unreadable(damaged.into()),
            false => conflict(damaged),
        })?;
        let Some(FinishedFile { finished, path, file }) = found else { return Ok(None) };
        if !finished.is_request(intent) {
            return Err(conflict(format!(
                "{}: another request under the same key has its response already",
                path.display()
            )));
        }
        if !self.lock(&file).map_err(|error| at(&path, &error))? {
            return Err(JournalOpenError::InFlight);
        }
        let entry = Box::new(FinishedLock { _file: file });
        let is_same_caller = self.other_credentials || finished.is_caller(intent.headers());
        let FinishedIntent { created_at, key_lifetime, is_done, .. } = finished;
        Ok(Some(match (is_done, is_same_caller) {
            (true, true) => JournaledIntent::done_before(entry, created_at, key_lifetime),
            // For another caller the service may execute it again.
            (true, false) => JournaledIntent::done_before(entry, created_at, Some(Duration::ZERO)),
            (false, true) => JournaledIntent::again(entry, true, created_at, key_lifetime),
            (false, false) => return Err(other_credentials(&path)),
        }))
    }

    /// Locks the file. Returns `false` if another process or task holds it for longer than a listing does.
    fn lock(&self, file: &File) -> io::Result<bool> {
        let give_up = Instant::now() + self.lock_timeout;
        while !self.files.lock(file)? {
            if Instant::now() >= give_up {
                return Ok(false);
            }
            sleep(Duration::from_millis(5));
        }
        Ok(true)
    }

    /// Locks and reads the entry of this name, if it exists.
    fn take_up(&self, path: &Path) -> Result<Option<(Entry, File)>, JournalOpenError> {
        for _ in 0..MAX_LOCK_ROUNDS {
            let file = match self.files.open(path) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(at(path, &error)),
            };
            if !self.lock(&file).map_err(|error| at(path, &error))? {
                return Err(JournalOpenError::InFlight);
            }
            // Its owner may have removed it while this call waited for the lock.
            if !self.files.is_named(&file, path).map_err(|error| at(path, &error))? {
                continue;
            }
            let bytes = self.files.read(&file, MAX_ENTRY_BYTES).map_err(|error| at(path, &error))?;
            let entry = self.decode(path, &bytes).map_err(|damaged| match damaged.is_unreadable {
                true => JournalOpenError::Unreadable(damaged.into()),
                false => conflict(damaged),
            })?;
            return Ok(Some((entry, file)));
        }
        Err(JournalOpenError::InFlight)
    }

    /// Encodes the file of an intent.
    fn encode(&self, intent: &Intent) -> io::Result<Vec<u8>> {
        encode(intent, &self.seal).map_err(|error| match error {
            EntryError::Damaged(reason) | EntryError::Sealed(reason) => io::Error::other(reason),
        })
    }

    /// Decodes the content of the file with this path.
    fn decode(&self, path: &Path, bytes: &[u8]) -> Result<Entry, DamagedFile> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let entry = decode(name, bytes, &self.seal).and_then(|entry| named(path, entry));
        entry.map_err(|error| {
            let (reason, is_unreadable) = match error {
                EntryError::Damaged(reason) => (reason, false),
                EntryError::Sealed(reason) => (reason, true),
            };
            DamagedFile { path: path.to_owned(), reason, is_unreadable }
        })
    }

    /// Prepares an entry to be sent: notes it as sent, and writes it again if it was never sent and has changed.
    fn to_be_sent(
        self: &Arc<Self>,
        path: &Path,
        file: File,
        entry: &Entry,
        intent: &Intent,
    ) -> Result<JournaledIntent, JournalOpenError> {
        let written = &entry.intent;
        let is_as_written = entry.is_of(intent.headers())
            && written.uri() == intent.uri()
            && intent.created_at().since(written.created_at()) < FRESH;
        // An intent that no service received may be sent for another caller, to another address, and with a new time. The
        // file must say so before, because a later process continues from it.
        let (file, created_at) = if entry.maybe_sent || is_as_written {
            (file, written.created_at())
        } else {
            (self.write_anew(path, intent).map_err(not_written)?, intent.created_at())
        };
        self.note_sending(path, &file, entry)?;
        let lifetime = written.key_lifetime().into_iter().chain(intent.key_lifetime()).min();
        let intent = Intent::clone(intent).with_created_at(created_at);
        let locked = LockedEntry { inner: Arc::clone(self), path: path.to_owned(), file, intent };
        Ok(JournaledIntent::again(Box::new(locked), entry.maybe_sent, created_at, lifetime))
    }

    /// Replaces the file of an intent that was never sent.
    fn write_anew(&self, path: &Path, intent: &Intent) -> io::Result<File> {
        let bytes = self.encode(intent)?;
        let (new, file) = self.create_new(&bytes)?;
        let written = || {
            if !self.files.lock(&file)? {
                return Err(io::Error::other("another process has locked the new file"));
            }
            self.files.write(&file, 0, &bytes)?;
            self.files.write(&file, STATE_AT, NEVER_SENT)?;
            self.files.sync(&file)?;
            self.files.rename(&new, path)
        };
        if let Err(error) = written() {
            let _left_behind = self.files.remove(&new);
            return Err(error);
        }
        Ok(file)
    }

    /// Creates an empty file for these bytes, under a temporary name.
    fn create_new(&self, bytes: &[u8]) -> io::Result<(PathBuf, File)> {
        if bytes.len() as u64 > MAX_ENTRY_BYTES {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "the intent is too large for a journal"));
        }
        let random = random_bits().map_err(io::Error::other)?;
        let new = self.path.join(format!("{NEW}{random:032x}"));
        let in_directory =
            |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", self.path.display()));
        let file = self.files.create(&new).map_err(in_directory)?;
        Ok((new, file))
    }

    /// Notes that the intent may have been sent, and makes its name durable: the process that wrote it may have ended before.
    fn note_sending(&self, path: &Path, file: &File, entry: &Entry) -> Result<(), JournalOpenError> {
        let noted = || {
            if !entry.maybe_sent {
                self.files.write(file, STATE_AT, MAYBE_SENT)?;
                self.files.sync(file)?;
            }
            self.files.sync_dir(&self.path)
        };
        noted().map_err(|error| if entry.maybe_sent { at(path, &error) } else { not_written(error) })
    }

    /// Writes a new intent. Returns `None` if another process was faster.
    fn write_down(self: &Arc<Self>, intent: &Intent, path: &Path) -> io::Result<Option<LockedEntry>> {
        let bytes = self.encode(intent)?;
        let is_intent = |file: &io::Result<fs::DirEntry>| {
            file.as_ref().map_or(true, |file| file.file_name().to_str() != Some(FINISHED))
        };
        if fs::read_dir(&self.path)?.filter(is_intent).count() >= self.max_intents {
            let many = format!(
                "the journal is full: it has {} intents without a definite response",
                self.max_intents
            );
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, many));
        }
        let (new, file) = self.create_new(&bytes)?;
        let written = self.link_up(&file, &new, path, &bytes);
        if !matches!(written, Ok(true)) {
            let _left_behind = self.files.remove(&new);
        }
        let intent = intent.clone();
        Ok(written?.then(|| LockedEntry { inner: Arc::clone(self), path: path.to_owned(), file, intent }))
    }

    /// Writes a new file and gives it the name of the intent.
    ///
    /// Returns `false` if the name is taken, or if a listing removed the file before it was locked.
    fn link_up(&self, file: &File, new: &Path, path: &Path, bytes: &[u8]) -> io::Result<bool> {
        if !self.files.lock(file)? {
            return Ok(false);
        }
        self.files.write(file, 0, bytes)?;
        self.files.sync(file)?;
        match self.files.link(new, path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.path.exists() => return Ok(false),
            Err(error) => return Err(error),
        }
        let _second_name = self.files.remove(new); // the next listing removes it
        if let Err(error) = self.files.sync_dir(&self.path) {
            // The caller gets the error and takes the intent for not sent. So no later process may find and send it.
            let _still_there = self.files.remove(path);
            return Err(error);
        }
        Ok(true)
    }

    fn pending(&self) -> io::Result<Vec<Result<PendingIntent, DamagedFile>>> {
        let mut damaged = Vec::new();
        let mut pending = Vec::new();
        for file in fs::read_dir(&self.path)? {
            let file = file?;
            let name = file.file_name();
            let Some(name) = name.to_str() else { continue };
            if name.starts_with(NEW) {
                self.sweep(&file.path());
            } else if name.ends_with(".intent") {
                match self.look(&file.path()) {
                    Ok(Some(found)) => pending.push(found),
                    Ok(None) => {}
                    Err(why) => damaged.push(Err(why)),
                }
            }
        }
        self.finished.sweep();
        pending.sort_by(|a, b| (a.created_at, &a.path).cmp(&(b.created_at, &b.path)));
        damaged.extend(pending.into_iter().map(Ok));
        Ok(damaged)
    }

    /// Reads the intent of a file. Returns `None` if it was closed meanwhile.
    fn look(&self, path: &Path) -> Result<Option<PendingIntent>, DamagedFile> {
        let damaged = |reason, is_unreadable| DamagedFile { path: path.to_owned(), reason, is_unreadable };
        let unreadable = |error: io::Error| damaged(error.to_string(), true);
        for _ in 0..MAX_LOCK_ROUNDS {
            let file = match self.files.open(path) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(unreadable(error)),
            };
            let in_flight = !self.files.lock(&file).map_err(unreadable)?;
            let bytes = self.files.read(&file, MAX_ENTRY_BYTES).map_err(unreadable)?;
            if !self.files.is_named(&file, path).map_err(unreadable)? {
                continue;
            }
            drop(file);
            let Entry { intent, maybe_sent, caller } = self.decode(path, &bytes)?;
            return Ok(Some(PendingIntent {
                path: path.to_owned(),
                key: intent.key().clone(),
                method: intent.method().clone(),
                uri: intent.uri().clone(),
                created_at: intent.created_at(),
                body_bytes: intent.body().len(),
                maybe_sent,
                in_flight,
                left_out: caller.left_out,
            }));
        }
        Err(damaged("it is replaced all the time".to_owned(), true))
    }

    /// Removes the temporary file of a process that ended. A living owner holds its lock, or uses another file.
    fn sweep(&self, path: &Path) {
        let dead = |file: &File| {
            // With two names it is an intent, and only this name is superfluous. Do not touch its lock.
            Ok::<_, io::Error>(self.files.names(file)? > 1 || self.files.lock(file)?)
        };
        if let Ok(file) = self.files.open(path)
            && dead(&file).unwrap_or(false)
        {
            let _tried_again_next_time = self.files.remove(path);
        }
    }
}

fn named(path: &Path, entry: Entry) -> Result<Entry, EntryError> {
    let name = entry::file_name(entry.intent.key());
    if path.file_name().is_some_and(|file| file == name.as_str()) {
        Ok(entry)
    } else {
        Err(EntryError::Damaged(format!("its intent belongs to the file {name}")))
    }
}

/// Returns the part in which two requests differ.
///
/// Headers are not compared: dates and traces change with each call. An intent that was never sent may get another address,
/// because the first service may have turned it away.
fn difference(entry: &Entry, here: &Intent) -> Option<&'static str> {
    let there = &entry.intent;
    if there.method() != here.method() {
        Some("method")
    } else if there.uri() != here.uri() && entry.maybe_sent {
        Some("address")
    } else if there.body() != here.body() {
        Some("body")
    } else if there.carrier() != here.carrier() {
        Some("header for the key")
    } else {
        None
    }
}

fn conflict(error: impl Into<BoxError>) -> JournalOpenError {
    JournalOpenError::Conflict(error.into())
}

/// The error of a key under which the journal has a request that differs in this part.
fn another_request(path: &Path, part: &str, maybe_sent: bool) -> JournalOpenError {
    let path = path.display();
    if maybe_sent {
        return conflict(format!(
            "{path}: another request under the same key has no definite response yet; its {part} differs"
        ));
    }
    let unsent = format!(
        "{path}: another request under the same key, of which nothing happened; its {part} differs. Give this request another \
         key, or remove that file"
    );
    JournalOpenError::UnsentConflict(unsent.into())
}

/// The error of a file that cannot be read: its intent may have been sent.
fn at(path: &Path, error: &io::Error) -> JournalOpenError {
    let source = format!("{}: {error}", path.display()).into();
    match error.kind() {
        io::ErrorKind::FileTooLarge => JournalOpenError::Conflict(source),
        _ => JournalOpenError::Unreadable(source),
    }
}

fn other_credentials(path: &Path) -> JournalOpenError {
    JournalOpenError::OtherCredentials(format!("{}: {OTHER_CREDENTIALS}", path.display()).into())
}

fn not_written(error: io::Error) -> JournalOpenError {
    JournalOpenError::NotWritten(error.into())
}

/// Runs work on a thread that may wait for a disk. It completes even if the caller's future is dropped.
async fn blocking<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> Result<R, BoxError> {
    Ok(tokio::task::spawn_blocking(work).await?)
}
