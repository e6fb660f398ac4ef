//! `oncegate backup`: a copy of the embedded store of a running sidecar.
//!
//! The copy is written next to its final name, flushed, checked from end to end, and then renamed. So the directory exists only
//! when the copy is complete, however this process ends.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use clap::Args;
use http_body_util::BodyExt as _;
use oncegate_core::ErrorChain;
use oncegate_embedded::{CheckReport, EmbeddedOptions, segment_files};
use serde_json::{Map, json};

use super::client::Download;
use super::{Access, Failure};
use crate::admin::TAKEN_FIELD;
use crate::archive::{self, BLOCK, Entry};

/// Copies the embedded store of a running sidecar.
#[derive(Args, Debug)]
pub(crate) struct BackupArgs {
    /// The directory of the copy, which must not exist or be empty. Its parent must exist
    directory: PathBuf,
    #[command(flatten)]
    access: Access,
}

pub(super) async fn execute(
    args: &BackupArgs,
    env: impl Fn(&str) -> Option<String>,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let client = args.access.client(env)?;
    let target = Target::new(&args.directory)?;
    // The sidecar sends one copy at a time, so from here on no other one is written to the same place.
    let download = client.download("/v1/backup").await?;
    let lock = target.begin()?;
    let taken = download.head.headers.get(TAKEN_FIELD).and_then(|value| value.to_str().ok());
    let taken = taken.unwrap_or("an unknown time").to_owned();
    let (files, bytes) = match target.receive(download).await {
        Ok(received) => received,
        Err(failure) => {
            target.clear();
            return Err(failure);
        }
    };
    // The check takes the same lock.
    drop(lock);
    let report = target.check().and_then(|report| target.finish().map(|()| report));
    let report = report.inspect_err(|_| target.clear())?;
    let records: Map<_, _> =
        report.records.iter().map(|(state, count)| (state.as_str().to_owned(), (*count).into())).collect();
    let total: u64 = report.records.values().sum();
    let shown = args.directory.display();
    if args.access.json {
        let result = json!({
            "directory": args.directory, "taken": taken, "files": files, "bytes": bytes, "records": records,
            "audit_entries": report.audit_entries,
        });
        writeln!(out, "{result}")?;
        return Ok(());
    }
    writeln!(
        out,
        "{shown}: {total} records as of {taken}, in {files} files with {bytes} bytes; every record was checked"
    )?;
    writeln!(
        out,
        "It holds stored responses. A store that is restored from it does not know the keys that are used after {taken}, and executes \
         their retries again: see docs/guides/backups.md before you restore it"
    )?;
    Ok(())
}

/// The directory of the copy, and the one in which it is written.
struct Target {
    directory: PathBuf,
    partial: PathBuf,
}

fn refused(what: impl Into<String>) -> Failure {
    Failure::Refused(what.into())
}

/// Refuses a symbolic link. A copy replaces its directory, and removes what an earlier copy left, which must not happen in
/// another place. Links in the path before it are followed.
fn not_a_link(path: &Path) -> Result<(), Failure> {
    match fs::read_link(path) {
        Ok(to) => Err(refused(format!(
            "{}: is a symbolic link to {}; name a directory that is no link. Its parent may be one",
            path.display(),
            to.display()
        ))),
        Err(_) => Ok(()),
    }
}

impl Target {
    /// Checks that the target is free.
    fn new(directory: &Path) -> Result<Self, Failure> {
        let shown = directory.display();
        let usage = |what: &str| Failure::Usage(format!("{shown}: {what}"));
        let name = directory.file_name().ok_or_else(|| usage("name a directory for the copy"))?;
        // Without a slash at its end, after which the system would follow a link.
        let directory = &directory.with_file_name(name);
        not_a_link(directory)?;
        let is_used = match fs::read_dir(directory) {
            Ok(mut entries) => entries.next().is_some(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) => return Err(refused(format!("{shown}: {error}"))),
        };
        if is_used {
            return Err(refused(format!(
                "{shown}: exists and is not empty; name a new directory for each copy, and remove old copies yourself"
            )));
        }
        let mut partial = name.to_owned();
        partial.push(".partial");
        let partial = directory.with_file_name(partial);
        not_a_link(&partial)?;
        Ok(Self { directory: directory.to_owned(), partial })
    }

    /// Makes an empty directory next to the target, and locks it.
    fn begin(&self) -> Result<File, Failure> {
        let shown = self.partial.display();
        let lock = |partial: &Path| -> Result<File, Failure> {
            let locked = File::open(partial).map_err(|error| refused(format!("{shown}: {error}")))?;
            match locked.try_lock() {
                Err(TryLockError::WouldBlock) => {
                    Err(refused(format!("{shown}: another copy is being written there; wait for its end")))
                }
                _ => Ok(locked),
            }
        };
        if self.partial.exists() {
            // What a copy left that was killed.
            let _unused = lock(&self.partial)?;
            self.clear();
        }
        let made = DirBuilder::new().mode(0o700).create(&self.partial);
        made.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => {
                refused(format!("{shown}: contains other files than an unfinished copy; move them away"))
            }
            _ => refused(format!("cannot create {shown}: {error}")),
        })?;
        lock(&self.partial)
    }

    /// Removes what was written, if these are files of a store. Another file stays, and with it the directory.
    fn clear(&self) {
        let files = segment_files(&self.partial).unwrap_or_default();
        let others = ["mark", "lock"].map(|name| self.partial.join(name));
        for file in files.iter().chain(&others) {
            let _missing = fs::remove_file(file);
        }
        let _not_empty = fs::remove_dir(&self.partial);
    }

    /// Writes the files of an archive, and returns their number and their bytes.
    async fn receive(&self, mut download: Download) -> Result<(usize, u64), Failure> {
        let mut writer =
            Extractor { target: self, state: State::Header(Vec::new()), files: 0, bytes: 0, has_mark: false };
        while let Some(frame) = download.body.frame().await {
            let frame =
                frame.map_err(|error| refused(format!("the backup broke off: {}", ErrorChain(&error))))?;
            if let Some(data) = frame.data_ref() {
                writer.take(data)?;
            }
        }
        match writer.state {
            // Every store has its mark and at least one segment.
            State::End if !writer.has_mark || writer.files < 2 => {
                Err(refused("the sidecar sent an archive without a store in it; nothing was kept"))
            }
            State::End => Ok((writer.files, writer.bytes)),
            _ => Err(refused(
                "the backup broke off: the sidecar ended it early. Its log says why; nothing was kept",
            )),
        }
    }

    /// Reads the whole copy, and verifies every record.
    fn check(&self) -> Result<CheckReport, Failure> {
        let report = oncegate_embedded::check(&EmbeddedOptions::new(&self.partial))
            .map_err(|error| refused(format!("the copy cannot be checked: {}", ErrorChain(&error))))?;
        let _made_by_the_check = fs::remove_file(self.partial.join("lock"));
        let damage = match (&report.damage, &report.unproved_end) {
            (Some(damage), _) | (None, Some(damage)) => damage.clone(),
            _ if !report.is_sound() => format!(
                "{} records and {} entries of the audit trail cannot be read",
                report.unreadable.len(),
                report.unreadable_audit.len()
            ),
            _ => return Ok(report),
        };
        Err(refused(format!(
            "the copy is damaged: {damage}. The store itself may be damaged, too: see `oncegate check`, and keep older copies"
        )))
    }

    /// Gives the copy its name.
    fn finish(&self) -> Result<(), Failure> {
        let fail = |error: io::Error| match error.kind() {
            io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists => refused(format!(
                "{}: another program has put files there meanwhile",
                self.directory.display()
            )),
            _ => refused(format!("cannot keep the copy: {error}")),
        };
        let sync = |path: &Path| File::open(path).and_then(|directory| directory.sync_all());
        sync(&self.partial).map_err(fail)?;
        fs::rename(&self.partial, &self.directory).map_err(fail)?;
        let parent = self.directory.parent().filter(|parent| !parent.as_os_str().is_empty());
        sync(parent.unwrap_or(Path::new("."))).map_err(fail)
    }
}

/// Writes the files of an archive as its bytes arrive.
struct Extractor<'a> {
    target: &'a Target,
    state: State,
    files: usize,
    bytes: u64,
    has_mark: bool,
}

enum State {
    /// A header, as far as it has arrived.
    Header(Vec<u8>),
    /// The content of a file: the bytes that are missing, and those after it up to the next header.
    Content(File, u64, usize),
    Padding(usize),
    End,
}

impl Extractor<'_> {
    fn take(&mut self, mut data: &[u8]) -> Result<(), Failure> {
        while !data.is_empty() {
            let count = match &mut self.state {
                State::Header(block) => {
                    let count = (BLOCK - block.len()).min(data.len());
                    block.extend_from_slice(data.get(..count).unwrap_or_default());
                    if let Some(block) = block.first_chunk::<BLOCK>().copied() {
                        self.state = self.begin(&block)?;
                    }
                    count
                }
                State::Content(file, left, padding) => {
                    let count = usize::try_from(*left).unwrap_or(usize::MAX).min(data.len());
                    file.write_all(data.get(..count).unwrap_or_default()).map_err(cannot_write)?;
                    *left -= count as u64;
                    self.bytes += count as u64;
                    if *left == 0 {
                        file.sync_all().map_err(cannot_write)?;
                        self.state = match *padding {
                            0 => State::Header(Vec::new()),
                            padding => State::Padding(padding),
                        };
                    }
                    count
                }
                State::Padding(left) => {
                    let count = (*left).min(data.len());
                    *left -= count;
                    if *left == 0 {
                        self.state = State::Header(Vec::new());
                    }
                    count
                }
                // A second block of zeros.
                State::End => return Ok(()),
            };
            data = data.get(count..).unwrap_or_default();
        }
        Ok(())
    }

    fn begin(&mut self, block: &[u8; BLOCK]) -> Result<State, Failure> {
        let not_ours =
            || refused("the sidecar sent something else than a store; it may have another version");
        match archive::read_header(block).ok_or_else(not_ours)? {
            Entry::End => Ok(State::End),
            Entry::File(name, len) => {
                let digits = name.strip_suffix(".log").unwrap_or_default();
                let is_segment = digits.len() >= 8 && digits.bytes().all(|byte| byte.is_ascii_digit());
                if !is_segment && name != "mark" {
                    return Err(not_ours());
                }
                let path = self.target.partial.join(&name);
                let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
                self.files += 1;
                self.has_mark |= name == "mark";
                match len {
                    0 => Ok(State::Header(Vec::new())),
                    _ => Ok(State::Content(file.map_err(cannot_write)?, len, archive::padding(len))),
                }
            }
        }
    }
}

fn cannot_write(error: io::Error) -> Failure {
    refused(format!("the copy cannot be written: {error}; nothing was kept"))
}
