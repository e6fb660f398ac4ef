//! The memory of finished intents: one small file each, for some time.
//!
//! The files are in directories that are named by the day, counted from 1970, at whose beginning they are removed:
//! `finished/20793/2c26b46b….done`. They contain neither key nor address nor body.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::header::HeaderMap;
use oncegate_core::{IdempotencyKey, Timestamp};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use super::directory::DamagedFile;
use super::entry::{Caller, file_name, hex};
use super::files::Files;
use crate::intent::Intent;
use crate::key::now;

/// The name of the directory within the journal's directory.
pub(super) const DIRECTORY: &str = "finished";

const MAGIC: &str = "oncegate-finished 1 ";

/// The size of the largest file in bytes: a caller may have many headers with credentials.
const MAX_BYTES: u64 = 64 * 1024;

const DAY: u64 = 24 * 60 * 60 * 1000;

/// An intent that has a definite response.
#[derive(Clone, Debug)]
pub(super) struct FinishedIntent {
    pub(super) created_at: Timestamp,
    pub(super) key_lifetime: Option<Duration>,
    /// `true` if it was done. Otherwise the service reported that it failed, or that it cannot give the response again.
    pub(super) is_done: bool,
    request: String,
    caller: Caller,
}

impl FinishedIntent {
    /// The memory of this intent.
    pub(super) fn of(intent: &Intent, is_done: bool) -> Self {
        Self {
            created_at: intent.created_at(),
            key_lifetime: intent.key_lifetime(),
            is_done,
            request: request(intent),
            caller: Caller::of(intent.headers()),
        }
    }

    /// Returns `true` if this is the same request.
    pub(super) fn is_request(&self, intent: &Intent) -> bool {
        self.request == request(intent)
    }

    /// Returns `true` if the headers are those of the same caller.
    pub(super) fn is_caller(&self, headers: &HeaderMap) -> bool {
        self.caller.has(headers, &HeaderMap::new())
    }

    fn encode(&self) -> Vec<u8> {
        let (left_out, credentials) = self.caller.to_json();
        let about = json!({
            "created_at": self.created_at.as_millis(),
            "key_lifetime": self.key_lifetime.map(|life| u64::try_from(life.as_millis()).unwrap_or(u64::MAX)),
            "done": self.is_done,
            "request": self.request,
            "left_out": left_out,
            "credentials": credentials,
        });
        let about = about.to_string();
        format!("{MAGIC}{}\n{about}\n", hex(&Sha256::digest(&about))).into_bytes()
    }

    fn decode(file: &[u8]) -> Option<Self> {
        let rest = std::str::from_utf8(file).ok()?.strip_prefix(MAGIC)?;
        let (digest, about) = rest.split_once('\n')?;
        let about = about.strip_suffix('\n')?;
        if hex(&Sha256::digest(about)) != digest {
            return None;
        }
        let about: Map<String, Value> = serde_json::from_str(about).ok()?;
        Some(Self {
            created_at: Timestamp::from_millis(about.get("created_at")?.as_u64()?),
            key_lifetime: match about.get("key_lifetime")? {
                Value::Null => None,
                millis => Some(Duration::from_millis(millis.as_u64()?)),
            },
            is_done: about.get("done")?.as_bool()?,
            request: about.get("request")?.as_str()?.to_owned(),
            caller: Caller::from_json(about.get("left_out")?, about.get("credentials")?)?,
        })
    }
}

/// Returns a digest of the request.
fn request(intent: &Intent) -> String {
    let mut hash = Sha256::new();
    hash.update(b"oncegate-intent-request-1\n");
    let (carrier, uri) = (intent.carrier(), intent.uri().to_string());
    let parts: [&[u8]; 6] = [
        intent.key().as_bytes(),
        intent.method().as_str().as_bytes(),
        uri.as_bytes(),
        carrier.map_or("", |carrier| carrier.name().as_str()).as_bytes(),
        if carrier.is_some_and(|carrier| carrier.is_quoted()) { b"quoted" } else { b"" },
        intent.body(),
    ];
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hex(&hash.finalize())
}

/// A finished intent, and its file, which is not locked.
pub(super) struct FinishedFile {
    pub(super) finished: FinishedIntent,
    pub(super) path: PathBuf,
    pub(super) file: File,
}

/// The finished intents of one journal.
#[derive(Clone, Debug)]
pub(super) struct FinishedIntents {
    directory: PathBuf,
    pub(super) retention: Duration,
    pub(super) max_per_day: usize,
    /// A day, and the number of files in its directory.
    counted: Arc<Mutex<Option<(u64, usize)>>>,
}

impl FinishedIntents {
    pub(super) fn new(journal: &Path, retention: Duration, max_per_day: usize) -> Self {
        Self { directory: journal.join(DIRECTORY), retention, max_per_day, counted: Arc::default() }
    }

    /// Finds the finished intent of this key.
    ///
    /// # Errors
    /// The file that cannot be read, or is damaged.
    pub(super) fn find(
        &self,
        files: &Files,
        key: &IdempotencyKey,
    ) -> Result<Option<FinishedFile>, DamagedFile> {
        let unreadable = |path: &Path, error: io::Error| DamagedFile {
            path: path.to_owned(),
            reason: error.to_string(),
            is_unreadable: true,
        };
        let mut days = self.days().map_err(|error| unreadable(&self.directory, error))?;
        days.sort_unstable_by(|a, b| b.cmp(a));
        for day in days {
            let path = self.directory.join(day.to_string()).join(name(key));
            let file = match files.open(&path) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(unreadable(&path, error)),
            };
            let bytes = files.read(&file, MAX_BYTES).map_err(|error| unreadable(&path, error))?;
            return match FinishedIntent::decode(&bytes) {
                Some(finished) => Ok(Some(FinishedFile { finished, path, file })),
                None => Err(DamagedFile { path, reason: "it is damaged".to_owned(), is_unreadable: false }),
            };
        }
        Ok(None)
    }

    /// Remembers that an intent is finished. The file is durable when this returns.
    ///
    /// `create` creates an empty file for these bytes, under a temporary name.
    pub(super) fn add(
        &self,
        files: &Files,
        key: &IdempotencyKey,
        finished: &FinishedIntent,
        create: impl FnOnce(&[u8]) -> io::Result<(PathBuf, File)>,
    ) -> io::Result<()> {
        if self.retention.is_zero() {
            return Ok(());
        }
        self.sweep();
        let until = now().after(self.retention);
        let day = until.as_millis() / DAY + 1;
        let directory = self.directory.join(day.to_string());
        files.create_dir(&directory)?;
        if self.is_full(day, &directory)? {
            tracing::warn!(
                max_per_day = self.max_per_day,
                "the journal does not remember this finished intent, because its day is full: if the intent is made again \
                 after the service has forgotten its key, it takes effect again"
            );
            return Ok(());
        }
        let bytes = finished.encode();
        let (new, file) = create(&bytes)?;
        let written = || {
            // Without the lock, a listing would remove it as the file of a process that ended.
            if !files.lock(&file)? {
                return Err(io::Error::other("another process has locked the new file"));
            }
            files.write(&file, 0, &bytes)?;
            files.sync(&file)?;
            files.rename(&new, &directory.join(name(key)))?;
            files.sync_dir(&directory)
        };
        if let Err(error) = written() {
            let _left_behind = files.remove(&new);
            return Err(error);
        }
        Ok(())
    }

    /// Counts one more file for this day, and returns `true` if the day is full.
    fn is_full(&self, day: u64, directory: &Path) -> io::Result<bool> {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let count = match *counted {
            Some((of, count)) if of == day => count,
            _ => fs::read_dir(directory)?.count(),
        };
        let is_full = count >= self.max_per_day;
        *counted = Some((day, if is_full { count } else { count + 1 }));
        Ok(is_full)
    }

    /// Removes the directories of past days.
    pub(super) fn sweep(&self) {
        let today = now().as_millis() / DAY;
        for day in self.days().unwrap_or_default() {
            if day <= today {
                let _tried_again_next_time = fs::remove_dir_all(self.directory.join(day.to_string()));
            }
        }
    }

    fn days(&self) -> io::Result<Vec<u64>> {
        let found = match fs::read_dir(&self.directory) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut days = Vec::new();
        for one in found {
            days.extend(one?.file_name().to_str().and_then(|name| name.parse::<u64>().ok()));
        }
        Ok(days)
    }
}

fn name(key: &IdempotencyKey) -> String {
    file_name(key).replace(".intent", ".done")
}
