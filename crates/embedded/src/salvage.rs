//! A copy of what can be read of a damaged log.
//!
//! Each segment is read by itself. In a damaged batch the entries are read one by one, because each record has a checksum of its
//! own. What cannot be read is a lost part of the log:
//!
//! - The copy has the newest readable version of each record. If a lost part follows it in the log, a newer version may have been
//!   there. A record that was in progress or released may have been executed since. So it becomes `unknown`, and only an operator
//!   can resolve it, within the longest retention there is.
//! - An entry whose record is known but whose content cannot be read is copied as it is. Its key stays refused.
//! - A key that was used for the first time in a lost part is not known to the copy.
//! - A correction of the clock in a lost part is not known either. Records from before it end earlier by as much.
//!
//! If something is lost, the copy has a file that says what. The store does not open until an operator has removed it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::fs;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use oncegate_core::codec;
use oncegate_core::{
    FencingToken, ID_SECRET_RECORD, LastWrite, Record, RecordId, State, StoreClock, Timestamp, limits,
};

use crate::audit::decode_audit;
use crate::directory::{create_dir, give, sync_dir};
use crate::disk::{DirectoryDisk, Disk, MARK, segment_files};
use crate::error::EmbeddedOpenError;
use crate::format::{
    BLOCK, ENTRY, EntryHead, FLAG_SEAL, HEADER, Header, Kind, StoreId, entries, expiry_seconds,
};
use crate::index::Place;
use crate::inner::{Shift, Sizes};
use crate::mark::{Mark, Marks, other_history};
use crate::options::EmbeddedOptions;
use crate::store::{EmbeddedStore, random_id};
use crate::tail::Tail;

/// The bytes that are copied before they are waited for.
const COPY_BYTES: usize = 1024 * 1024;

/// The result of [`salvage`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SalvageReport {
    /// The number of records in the copy, without the [mark of an id secret](ID_SECRET_RECORD).
    pub records: u64,
    /// The records that are `unknown` in the copy, because a newer version may have been in a lost part.
    pub unknown: Vec<RecordId>,
    /// The records whose content cannot be read. Their keys are refused by the copy, too.
    pub unreadable: Vec<RecordId>,
    /// The number of audit entries in the copy.
    pub audit_entries: u64,
    /// The lost parts of the log, in words, in its order. Keys that were first used there are not in the copy.
    pub lost: Vec<String>,
    /// True if the copy has the [record that marks a store](oncegate_core::ID_SECRET_RECORD) as that of one id secret.
    pub has_mark: bool,
    /// The time in which the lost parts were written, in words. Empty if it is not known, or nothing is lost.
    pub lost_time: String,
}

impl SalvageReport {
    /// Returns `true` if the copy has all that the store had.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.lost.is_empty() && self.unknown.is_empty() && self.unreadable.is_empty()
    }

    /// A note about the mark of the id secret, if it is damaged or may be lost.
    #[must_use]
    pub fn mark_advice(&self) -> Option<&'static str> {
        if self.unreadable.contains(&ID_SECRET_RECORD) {
            Some(
                "The record 3a75297e… that cannot be read is the mark of the id secret. Without it, the copy refuses every new key, \
                 and replays the records that can be read. Restore a backup that was made after the store was marked, or \
                 begin a new store. Start no sidecar without the id secret on this copy.",
            )
        } else if !self.lost.is_empty() && !self.has_mark {
            Some(
                "The copy has no mark of an id secret. If the store belonged to one, its mark was in a lost part: start no sidecar without \
                 the id secret on this copy, because each retry would execute again.",
            )
        } else {
            None
        }
    }

    /// The content of the file that keeps the copy from being opened.
    fn text(&self, from: &Path) -> String {
        let list = |text: &mut String, title: &str, lines: Vec<String>| {
            if !lines.is_empty() {
                text.push_str(&format!("\n{title}\n  {}\n", lines.join("\n  ")));
            }
        };
        let ids = |ids: &[RecordId]| ids.iter().map(RecordId::to_string).collect::<Vec<_>>();
        let mut text = format!(
            "This store is a copy of what could be read of the damaged store in {}.\n\
             It is not opened while this file is here. Settle the losses, then remove this file.\n",
            from.display()
        );
        let time = if self.lost_time.is_empty() { String::new() } else { format!(" ({})", self.lost_time) };
        let title = format!(
            "Lost parts of the log{time}. A key that was first used in them is new to this copy: a retry of it executes again."
        );
        list(&mut text, &title, self.lost.clone());
        let title = "Records that are unknown in this copy, because what followed them is lost:";
        list(&mut text, title, ids(&self.unknown));
        let title = "Records that cannot be read. Requests with their keys are refused:";
        list(&mut text, title, ids(&self.unreadable));
        list(&mut text, "The id secret:", self.mark_advice().into_iter().map(str::to_owned).collect());
        text
    }
}

/// The file in a copy that lists what is lost. While it is there, the copy is not opened.
pub(crate) const SALVAGED: &str = "salvaged";

/// The file with the losses of a copy, if they were not accepted yet.
pub(crate) fn unaccepted(dir: &Path) -> Option<PathBuf> {
    let file = dir.join(SALVAGED);
    fs::symlink_metadata(&file).is_ok().then_some(file)
}

/// Copies what can be read of a damaged store to a new store in `to`, an empty directory or one that is created. Changes nothing
/// in the damaged one.
///
/// **The copy executes again each key that was first used in a [lost part](SalvageReport::lost).** See the report for all others.
/// If anything is lost, [`EmbeddedStore::open`] refuses the copy until the file `salvaged` with the report is removed from it.
///
/// # Errors
/// [`EmbeddedOpenError`] if one of the two is in use, `to` is not empty, nothing can be read, or the disk fails.
pub fn salvage(options: &EmbeddedOptions, to: &Path) -> Result<SalvageReport, EmbeddedOpenError> {
    let failed = |error| EmbeddedOpenError::io(format!("copy the store to {}", to.display()))(error);
    let source = options.dir.canonicalize();
    let source = source.map_err(EmbeddedOpenError::io(format!("read {}", options.dir.display())))?;
    let from = DirectoryDisk::acquire(&source)?;
    let owner = if to.exists() { to.metadata() } else { source.metadata() }.map_err(failed)?;
    let above = std::path::absolute(to).map_err(failed)?;
    let above = above.ancestors().find_map(|above| above.canonicalize().ok());
    if above.is_some_and(|above| above.starts_with(&source)) {
        return Err(failed(Error::new(ErrorKind::InvalidInput, "it is inside of the damaged store")));
    }
    create_dir(to).map_err(failed)?;
    let to = to.canonicalize().map_err(failed)?;
    for entry in fs::read_dir(&to).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if !["lost+found", PART].iter().any(|own| name == *own) {
            return Err(failed(ErrorKind::DirectoryNotEmpty.into()));
        }
    }
    // What is left of an attempt that did not end.
    let part = to.join(PART);
    match fs::remove_dir_all(&part) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let copy = EmbeddedOptions { dir: part.clone(), ..options.clone() };
    let sizes = Sizes::with_memory(copy.memory_bytes);
    let report = salvage_disk(&from, Arc::new(DirectoryDisk::acquire(&part)?), copy, sizes)?;
    let mut files = segment_files(&part).map_err(failed)?;
    files.push(part.join(MARK));
    if !report.is_complete() {
        let file = part.join(SALVAGED);
        fs::write(&file, report.text(&source)).map_err(failed)?;
        fs::File::open(&file).and_then(|file| file.sync_all()).map_err(failed)?;
        files.push(file);
    }
    give(&to, &owner).map_err(failed)?;
    // The oldest segment comes last: without it, the store does not open.
    while let Some(file) = files.pop() {
        give(&file, &owner).map_err(failed)?;
        fs::rename(&file, to.join(file.file_name().unwrap_or_default())).map_err(failed)?;
    }
    fs::remove_dir_all(&part).map_err(failed)?;
    sync_dir(&to).map_err(failed)?;
    Ok(report)
}

/// The directory in which the copy is made. Parts of a copy look like a store.
const PART: &str = ".salvage";

pub(crate) fn salvage_disk(
    from: &dyn Disk,
    to: Arc<dyn Disk>,
    options: EmbeddedOptions,
    sizes: Sizes,
) -> Result<SalvageReport, EmbeddedOpenError> {
    let list = EmbeddedOpenError::io(format!("list the files in {}", from.directory().display()));
    let numbers = from.segments().map_err(list)?;
    let Some(start) = Start::find(from, &numbers)? else {
        let damage = "no batch in any segment can be read".to_owned();
        let file = from.path(numbers.first().copied().unwrap_or(1));
        return Err(EmbeddedOpenError::Damaged { file, damage });
    };
    let mut found = Found { marks: Marks::read(from)?, ..Found::default() };
    found.read(from, &numbers, &start)?;
    found.compare_marks(from, start.store);
    // The time of the copy continues that of the store.
    let last = found.last.map_or(start.written, |last| last.written);
    crate::recover::open(&*to, last, random_id, sizes)?;
    let now = StoreClock::resume(options.clock.clone(), last);
    let store = EmbeddedStore::open_disk(to, options, sizes)?;
    let report = found.copy(from, store.tail(), oncegate_core::Clock::now(&now));
    store.close();
    report
}

fn read_all(disk: &dyn Disk, number: u32) -> Result<Vec<u8>, EmbeddedOpenError> {
    let io = |operation: &str| EmbeddedOpenError::io(format!("{operation} {}", disk.path(number).display()));
    let file = disk.open(number).map_err(io("open"))?;
    let mut bytes = vec![0; file.len().map_err(io("read the length of"))? as usize];
    let count = file.read(&mut bytes, 0).map_err(io("read"))?;
    bytes.truncate(count);
    Ok(bytes)
}

/// The header of a batch at this offset.
fn header_at(bytes: &[u8], at: usize) -> Option<(Header, u32)> {
    Header::decode(bytes.get(at..at + HEADER)?).ok()
}

/// The parts of the newest readable header that hold for the whole log.
struct Start {
    store: StoreId,
    oldest: u32,
    written: LastWrite,
}

impl Start {
    fn find(disk: &dyn Disk, numbers: &[u32]) -> Result<Option<Self>, EmbeddedOpenError> {
        for number in numbers.iter().rev() {
            let bytes = read_all(disk, *number)?;
            let headers = (0..bytes.len()).step_by(BLOCK as usize).filter_map(|at| header_at(&bytes, at));
            let headers = headers.map(|(header, _)| header).filter(|header| header.segment == *number);
            if let Some(Header { store, oldest, written, .. }) = headers.max_by_key(|header| header.sequence)
            {
                return Ok(Some(Self { store, oldest, written }));
            }
        }
        Ok(None)
    }
}

/// The newest readable version of a record or of an audit entry.
#[derive(Clone, Copy)]
struct Version {
    place: Place,
    len: usize,
    /// The number of lost parts before it.
    lost_before: usize,
    is_readable: bool,
}

#[derive(Default)]
struct Found {
    records: HashMap<RecordId, Version>,
    audits: BTreeMap<u64, Version>,
    shifts: Vec<Shift>,
    lost: Vec<Lost>,
    last: Option<Header>,
    /// The numbers of all batches with the checksums of their headers.
    chains: HashSet<(u64, u32)>,
    marks: Marks,
    /// The batches that have the number of a mark, and are the ones that it knows or not.
    marked: Vec<(Mark, bool)>,
}

/// A lost part of the log.
struct Lost {
    text: String,
    /// The times of day of the batches before it and after it, as far as they are known.
    after: Option<Timestamp>,
    before: Option<Timestamp>,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)?;
        match period(self.after, self.before) {
            time if time.is_empty() => Ok(()),
            time => write!(f, ", {time}"),
        }
    }
}

/// A span of time in words.
fn period(after: Option<Timestamp>, before: Option<Timestamp>) -> String {
    match (after.map(Timestamp::to_rfc3339), before.map(Timestamp::to_rfc3339)) {
        (Some(after), Some(before)) if after == before => format!("written at {after}"),
        (Some(after), Some(before)) => format!("written between {after} and {before}"),
        (Some(after), None) => format!("written after {after}"),
        (None, Some(before)) => format!("written before {before}"),
        (None, None) => String::new(),
    }
}

impl Found {
    fn read(&mut self, disk: &dyn Disk, numbers: &[u32], start: &Start) -> Result<(), EmbeddedOpenError> {
        let mut expected = start.oldest;
        for number in numbers.iter().copied().filter(|number| *number >= start.oldest) {
            if number > expected {
                self.lose(format!("{} is missing", disk.path(expected).display()));
            }
            expected = number + 1;
            self.read_segment(disk, number, start)?;
        }
        if self.last.is_some_and(|last| last.flags & FLAG_SEAL != 0) {
            self.lose(format!("{} is missing, or cannot be read", disk.path(expected).display()));
        }
        Ok(())
    }

    fn lose(&mut self, text: String) {
        let after = self.last.map(|last| last.written.wall);
        self.lost.push(Lost { text, after, before: None });
    }

    /// Takes note of a header that can be read.
    fn found(&mut self, header: Header, chain: u32) {
        for lost in self.lost.iter_mut().rev().take_while(|lost| lost.before.is_none()) {
            lost.before = Some(header.written.wall);
        }
        let marks = self.marks.iter().filter(|mark| mark.sequence == header.sequence);
        self.marked.extend(marks.map(|mark| (*mark, mark.chain == chain)));
        self.chains.insert((header.sequence, chain));
        self.last = Some(header);
    }

    /// True if no batch is missing before this one. The first batch of a segment may repeat a number: see [`crate::recover`].
    fn follows(&self, header: &Header, begin: usize, oldest: u32) -> bool {
        match self.last {
            None => header.segment == oldest && begin == 0,
            Some(last) => {
                self.chains.contains(&(header.sequence.saturating_sub(1), header.previous))
                    && (header.sequence == last.sequence + 1 || begin == 0)
            }
        }
    }

    /// Finds the losses of which only the mark knows.
    fn compare_marks(&mut self, disk: &dyn Disk, store: StoreId) {
        let file = disk.mark_path();
        let file = file.display();
        if let Some(last) = self.last
            && let Some(weakness) = self.marks.weakness(disk, &last)
        {
            let text = format!("perhaps the end of the log: {weakness}");
            self.lost.push(Lost { text, after: Some(last.written.wall), before: None });
        }
        // A batch that was written twice, because its first flush failed, is found twice. One of them is the right one.
        let is_other = |mark: &&Mark| {
            let mut found = self.marked.iter().filter(|(known, _)| known == *mark).peekable();
            found.peek().is_some() && found.all(|(_, is_same)| !is_same)
        };
        let lost = if let Some(mark) = self.marks.iter().find(|mark| mark.store != store) {
            let text = format!("{file} is of another store, whose records are not here");
            Lost { text, after: None, before: Some(mark.wall) }
        } else if let Some(mark) = self.marks.iter().find(is_other) {
            Lost { text: format!("{file}: {}", other_history(mark)), after: None, before: Some(mark.wall) }
        } else if let (Some(mark), Some(last)) = (self.marks.newest(), self.last)
            && mark.sequence > last.sequence
        {
            let text = format!(
                "the end of the log: batches {} to {}, which {file} knows",
                last.sequence + 1,
                mark.sequence
            );
            Lost { text, after: Some(last.written.wall), before: Some(mark.wall) }
        } else {
            return;
        };
        self.lost.push(lost);
    }

    fn read_segment(&mut self, disk: &dyn Disk, number: u32, start: &Start) -> Result<(), EmbeddedOpenError> {
        let bytes = read_all(disk, number)?;
        let path = disk.path(number);
        let header = |at: usize| {
            header_at(&bytes, at)
                .filter(|(header, _)| header.store == start.store && header.segment == number)
                .filter(|(header, _)| at + header.batch_len() as usize <= bytes.len())
        };
        let is_empty = |at: usize| bytes.iter().skip(at).take(BLOCK as usize).all(|byte| *byte == 0);
        let mut at = 0;
        // A batch begins here, because another one ends here.
        let mut is_begin = true;
        while at < bytes.len() {
            if is_empty(at) {
                is_begin = false;
                at += BLOCK as usize;
                continue;
            }
            let begin = at;
            let batch = header(begin);
            let mut end = bytes.len();
            if let Some((batch, chain)) = batch {
                if !self.follows(&batch, begin, start.oldest) {
                    let text = "batches before byte";
                    self.lose(format!(
                        "{}: {text} {begin}, or they are of another copy of the store",
                        path.display()
                    ));
                }
                self.found(batch, chain);
                at += batch.batch_len() as usize;
                end = begin + HEADER + batch.payload_len as usize;
            } else {
                at += BLOCK as usize;
                while at < bytes.len() && header(at).is_none() && !is_empty(at) {
                    at += BLOCK as usize;
                }
            }
            let batch = batch.map(|(batch, _)| batch);
            let payload = bytes.get(begin + HEADER..end).unwrap_or_default();
            let place = |offset: u32| Place { segment: number, offset: (begin + HEADER) as u32 + offset };
            let is_whole = batch.is_some_and(|batch| crc32c::crc32c(payload) == batch.payload_sum);
            // The ends of all entries fit together, so what is damaged is inside of them. Otherwise an entry is only believed if
            // all before it in its batch can be read: a body has bytes that a client chose, and they may look like entries.
            let all_fit = batch
                .is_some_and(|batch| entries(payload).flatten().count() as u32 == batch.entries)
                && entries(payload).all(|entry| entry.is_some());
            if batch.is_some() || is_begin {
                for (offset, head, body) in entries(payload).map_while(|entry| entry) {
                    let is_readable = is_readable(&head, body);
                    if is_whole || is_readable || head.kind == Kind::Record {
                        self.take(place(offset), &head, body, is_readable);
                    }
                    if !is_readable && !all_fit {
                        break;
                    }
                }
            }
            if !is_whole {
                self.lose(format!("{}: bytes {begin} to {}", path.display(), at.min(bytes.len())));
                if let (Some(batch), Some(lost)) = (batch, self.lost.last_mut()) {
                    lost.before = Some(batch.written.wall);
                }
            }
            is_begin = true;
        }
        Ok(())
    }

    fn take(&mut self, place: Place, head: &EntryHead, body: &[u8], is_readable: bool) {
        let version = Version { place, len: head.len(), lost_before: self.lost.len(), is_readable };
        match head.kind {
            Kind::Record => drop(self.records.insert(head.id, version)),
            Kind::Audit => {
                let number = body.first_chunk().map_or(0, |number| u64::from_be_bytes(*number));
                if decode_audit(number, body.get(8..).unwrap_or_default()).is_some() {
                    self.audits.insert(number, version);
                }
            }
            Kind::Shift => self.shifts.extend(Shift::decode(place, body)),
        }
    }

    /// Copies the versions in the order of the log.
    fn copy(self, disk: &dyn Disk, to: &Tail, now: Timestamp) -> Result<SalvageReport, EmbeddedOpenError> {
        let Self { records, audits, shifts, lost, .. } = self;
        let mut report = SalvageReport { audit_entries: audits.len() as u64, ..SalvageReport::default() };
        let mut versions: Vec<Version> = records.into_values().chain(audits.into_values()).collect();
        versions.sort_unstable_by_key(|version| version.place);
        let (mut segment, mut ahead, mut ticket) = (None, 0, None);
        for Version { place, len, lost_before, is_readable } in versions {
            let (_, bytes) = match segment.take().filter(|(number, _)| *number == place.segment) {
                Some(read) => segment.insert(read),
                None => segment.insert((place.segment, read_all(disk, place.segment)?)),
            };
            let entry = bytes.get(place.offset as usize..place.offset as usize + len).unwrap_or_default();
            let changed = || EmbeddedOpenError::Damaged {
                file: disk.path(place.segment),
                damage: format!("the entry at {} changed while it was read", place.offset),
            };
            let mut head = EntryHead::decode(entry).ok_or_else(changed)?;
            let mut body = entry.get(ENTRY..ENTRY + head.body_len as usize).ok_or_else(changed)?.to_vec();
            if head.kind == Kind::Record {
                if let (true, Ok(record)) = (is_readable, codec::decode(&head.id, &body)) {
                    let mut record = shifts.iter().fold(record, |record, shift| shift.apply(record, place));
                    // No request claims the mark of an id secret, so it cannot have taken effect.
                    let is_mark = head.id == ID_SECRET_RECORD;
                    if !is_mark && lost_before < lost.len() && is_uncertain(&record) {
                        report.unknown.push(head.id);
                        record = unknown(record, now);
                    } else if record.is_expired(now) {
                        continue;
                    }
                    report.has_mark |= is_mark;
                    body = codec::encode(&head.id, &record);
                    head = EntryHead {
                        body_len: body.len() as u32,
                        expires: expiry_seconds(record.expires_at),
                        ..head
                    };
                } else {
                    report.unreadable.push(head.id);
                }
                report.records += u64::from(head.id != ID_SECRET_RECORD);
            }
            let write = |reason: &str| {
                EmbeddedOpenError::io("write the copy of the store")(Error::other(reason.to_owned()))
            };
            let end = to
                .append(&head, &body, None)
                .map_err(|error| write(&oncegate_core::ErrorChain(&error).to_string()))?;
            ahead += head.len();
            ticket = Some(end);
            if ahead >= COPY_BYTES
                && let Some(end) = ticket.take()
            {
                end.wait_blocking().map_err(|reason| write(&reason))?;
                ahead = 0;
            }
        }
        if let Some(end) = ticket {
            end.wait_blocking().map_err(|reason| {
                EmbeddedOpenError::io("write the copy of the store")(Error::other(&*reason))
            })?;
        }
        report.unknown.sort_unstable();
        report.unreadable.sort_unstable();
        let time = |of: fn(&Lost) -> Option<Timestamp>| lost.iter().map(of).collect::<Option<Vec<_>>>();
        let after = time(|lost| lost.after).and_then(|times| times.into_iter().min());
        let before = time(|lost| lost.before).and_then(|times| times.into_iter().max());
        report.lost_time = period(after, before);
        report.lost = lost.iter().map(Lost::to_string).collect();
        Ok(report)
    }
}

/// True if the checksum of the entry's content fits, which includes its identifier.
fn is_readable(head: &EntryHead, body: &[u8]) -> bool {
    match head.kind {
        Kind::Record => codec::decode(&head.id, body).is_ok(),
        // They have no checksum of their own.
        Kind::Audit | Kind::Shift => false,
    }
}

/// True if a newer version of the record may say that it took effect.
const fn is_uncertain(record: &Record) -> bool {
    matches!(record.state, State::InProgress { .. } | State::Released)
}

fn unknown(mut record: Record, now: Timestamp) -> Record {
    record.state = State::Unknown;
    // As a new claim would have it: tokens are at least the time at which they were given. So it exceeds those of lost
    // attempts, and a token after the end of this record exceeds it.
    record.token = FencingToken::new(record.token.get().saturating_add(1).max(now.as_millis()));
    record.changed_at = now.max(record.changed_at);
    record.expires_at = now.after(limits::MAX_RETENTION).max(record.expires_at);
    record.by_operator = false;
    record
}
