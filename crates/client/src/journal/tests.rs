//! Journals whose steps fail, or whose process is killed, at each step.

use std::fs;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;

use super::directory::JournalDir;
use super::entry::{self, Entry, EntryError, file_name};
use super::files::{Files, Hook, Step};
use super::sealing::EntrySeal;
use super::*;
use crate::client::{Client, Transport};
use crate::failure::{AttemptFailure, AttemptFailureKind};
use crate::policy::RetryPolicy;
use oncegate_core::IdempotencyKey;

/// A service that writes a line to a file for each request. It can be out of reach for the first requests.
#[derive(Clone)]
struct Ledger {
    file: PathBuf,
    away: Arc<AtomicUsize>,
}

impl Ledger {
    fn new(dir: &Path, away: usize) -> Self {
        Self { file: dir.join("ledger"), away: Arc::new(AtomicUsize::new(away)) }
    }

    fn lines(&self) -> Vec<String> {
        fs::read_to_string(&self.file).unwrap_or_default().lines().map(str::to_owned).collect()
    }
}

impl Transport for Ledger {
    type Body = Full<Bytes>;

    async fn send(&self, request: Request<Bytes>) -> Result<Response<Full<Bytes>>, AttemptFailure> {
        let less = |times: usize| times.checked_sub(1);
        if self.away.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok() {
            return Err(AttemptFailure::new(AttemptFailureKind::NotSent, "out of reach"));
        }
        let key = request.headers()["idempotency-key"].to_str().unwrap();
        let line = format!("{key} {}\n", String::from_utf8(request.body().to_vec()).unwrap());
        let mut file = fs::OpenOptions::new().append(true).create(true).open(&self.file).unwrap();
        file.write_all(line.as_bytes()).unwrap();
        Ok(Response::new(Full::default()))
    }
}

fn intent() -> Intent {
    let intent = Intent::post("http://bank.test/payouts?x=1").unwrap();
    let intent = intent.with_header("x-note", &b"caf\xe9 \xff"[..]).unwrap();
    intent.with_key(IdempotencyKey::derived("payout", ["7"])).unwrap().with_json(r#"{"amount":5}"#)
}

fn encode(intent: &Intent) -> Vec<u8> {
    entry::encode(intent, &EntrySeal::default()).unwrap()
}

fn decode(file: &[u8]) -> Result<Entry, EntryError> {
    entry::decode("any.intent", file, &EntrySeal::default())
}

fn client(ledger: &Ledger, journal: &JournalDir) -> Client<Ledger> {
    let once = RetryPolicy::default().with_max_attempts(1).unwrap();
    Client::new(ledger.clone()).with_policy(once).with_journal(Arc::new(journal.clone()))
}

/// Returns the number of files with an intent.
fn intents(dir: &Path) -> usize {
    let names = fs::read_dir(dir).unwrap().map(|file| file.unwrap().file_name());
    names.filter(|name| name.to_str().unwrap().ends_with(".intent")).count()
}

/// Returns the number of files, without the directory of finished intents.
fn files(dir: &Path) -> usize {
    fs::read_dir(dir).unwrap().filter(|file| file.as_ref().unwrap().file_name() != "finished").count()
}

fn journal(dir: &Path, hook: Hook) -> JournalDir {
    JournalDir::with_files(dir.join("journal"), Files { hook: Some(hook) }).unwrap()
}

/// Sends one intent three times: out of reach, answered, and answered again.
async fn three_sendings(ledger: &Ledger, journal: &JournalDir) {
    for _ in 0..3 {
        let _end = client(ledger, journal).send(&intent()).await;
    }
}

#[tokio::test]
async fn nothing_is_sent_before_the_file_is_durable() {
    #[derive(Default)]
    struct Volatile {
        data: bool,
        names: bool,
        steps: usize,
    }
    let dir = tempfile::tempdir().unwrap();
    let state = Arc::new(Mutex::new(Volatile::default()));
    let seen = Arc::clone(&state);
    let hook: Hook = Arc::new(move |step| {
        let mut state = seen.lock().unwrap();
        state.steps += 1;
        match step {
            Step::Write { .. } => state.data = true,
            Step::Sync => state.data = false,
            Step::Link | Step::Rename => {
                assert!(!state.data, "a name for a file that is not synced");
                state.names = true;
            }
            Step::SyncDir => state.names = false,
            Step::Create | Step::Remove => {}
        }
        Ok(())
    });
    let journal = journal(dir.path(), hook);

    #[derive(Clone)]
    struct Checks(Ledger, Arc<Mutex<Volatile>>);
    impl Transport for Checks {
        type Body = Full<Bytes>;
        async fn send(&self, request: Request<Bytes>) -> Result<Response<Full<Bytes>>, AttemptFailure> {
            {
                let state = self.1.lock().unwrap();
                assert!(!state.data && !state.names, "sent before it was durable");
                assert!(state.steps > 0);
            }
            self.0.send(request).await
        }
    }
    let checks = Checks(Ledger::new(dir.path(), 1), Arc::clone(&state));
    let once = RetryPolicy::default().with_max_attempts(1).unwrap();
    let client = Client::new(checks).with_policy(once).with_journal(Arc::new(journal.clone()));
    client.send(&intent()).await.unwrap_err();
    // Another process wrote it down, and its name may not be durable.
    state.lock().unwrap().names = true;
    client.send(&intent()).await.unwrap();
    client.send(&intent()).await.unwrap();
}

#[tokio::test]
async fn nothing_is_sent_without_a_file_if_any_step_fails() {
    whichever_step_fails(|_| intent()).await;
    // Each request comes from another caller.
    whichever_step_fails(|number| intent().with_header("authorization", format!("Bearer {number}")).unwrap())
        .await;
}

async fn whichever_step_fails(intent: impl Fn(usize) -> Intent) {
    let mut failures = 0;
    for fails in 0.. {
        let dir = tempfile::tempdir().unwrap();
        let count = AtomicUsize::new(0);
        let failed = Arc::new(AtomicUsize::new(0));
        let did = Arc::clone(&failed);
        let hook: Hook = Arc::new(move |step| {
            if count.fetch_add(1, Ordering::SeqCst) != fails {
                return Ok(());
            }
            did.store(1, Ordering::SeqCst);
            if let Step::Write { file, at, bytes } = step {
                file.write_all_at(&bytes[..bytes.len() / 2], at).unwrap(); // the disk became full
            }
            Err(io::Error::from_raw_os_error(28))
        });
        let opened = JournalDir::with_files(dir.path().join("journal"), Files { hook: Some(hook) });
        let Ok(broken) = opened else {
            failures += 1;
            continue;
        };
        let ledger = Ledger::new(dir.path(), 1);
        for number in 0..3 {
            let before = ledger.lines().len();
            let intents = intents(broken.path());
            match client(&ledger, &broken).send(&intent(number)).await {
                Ok(_) => assert_eq!(ledger.lines().len(), before + 1),
                // Another caller sends it, after it was done.
                Err(open) if matches!(open.kind(), SendErrorKind::Attempts | SendErrorKind::DoneBefore) => {
                    assert_eq!(ledger.lines().len(), before);
                }
                Err(open) => {
                    assert!(
                        matches!(
                            open.kind(),
                            SendErrorKind::Journal
                                | SendErrorKind::JournalUnreadable
                                | SendErrorKind::OtherCredentials
                        ),
                        "{open}"
                    );
                    assert_eq!(ledger.lines().len(), before, "sent without a file");
                    if open.kind() == SendErrorKind::Journal {
                        // Its caller takes it for not sent, so no process may send it later.
                        assert_eq!(self::intents(broken.path()), intents, "step {fails}");
                        assert!(!open.may_have_taken_effect(), "{open}");
                    }
                }
            }
        }
        if failed.load(Ordering::SeqCst) == 0 {
            break; // each step has failed once
        }
        failures += 1;
        // When the disk has space again, each file is complete or reported as damaged, and no temporary file is left.
        let journal = JournalDir::open(dir.path().join("journal")).unwrap().with_other_credentials();
        let ledger = Ledger::new(dir.path(), 0);
        let resume = journal.resume_pending(&client(&ledger, &journal)).await.unwrap();
        let credentials = intent(1).headers().clone();
        let mut resume = resume.with_fields(move |_| Ok(credentials.clone()));
        let mut damaged = 0;
        while let Some(end) = resume.next().await {
            match end {
                Ok(resumed) => drop(resumed.end.unwrap()),
                Err(_) => damaged += 1,
            }
        }
        // A process that another test starts now inherits all locks until it executes its program.
        let give_up = Instant::now() + Duration::from_secs(30);
        while files(journal.path()) != damaged {
            assert!(Instant::now() < give_up, "step {fails}: a temporary file is left");
            journal.pending().await.unwrap();
        }
    }
    assert!(failures >= 12, "{failures}");
}

/// The process that the next test starts and kills. It does nothing without that test.
#[tokio::test]
async fn a_process_that_is_killed() {
    let (Ok(dir), Ok(dies)) = (std::env::var("JOURNAL_DIES_IN"), std::env::var("JOURNAL_DIES_AT")) else {
        return;
    };
    let (dir, dies): (PathBuf, usize) = (dir.into(), dies.parse().unwrap());
    let count = AtomicUsize::new(0);
    let hook: Hook = Arc::new(move |step| {
        if count.fetch_add(1, Ordering::SeqCst) == dies {
            if let Step::Write { file, at, bytes } = step {
                file.write_all_at(&bytes[..bytes.len() / 2], at).unwrap();
            }
            println!("\nready to die: {step:?}");
            loop {
                std::thread::park();
            }
        }
        Ok(())
    });
    three_sendings(&Ledger::new(&dir, 1), &journal(&dir, hook)).await;
    println!("\nall done");
}

#[tokio::test]
async fn a_process_that_is_killed_before_any_step_loses_and_invents_no_intent() {
    let mut half_written = 0;
    for dies in 0.. {
        let dir = tempfile::tempdir().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "journal::tests::a_process_that_is_killed", "--nocapture"])
            .env("JOURNAL_DIES_IN", dir.path())
            .env("JOURNAL_DIES_AT", dies.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let last = lines
            .find(|line| line.starts_with("ready to die") || line == "all done")
            .expect("the process ended early");
        child.kill().unwrap();
        child.wait().unwrap();
        if last == "all done" {
            assert!(dies >= 12, "{dies}");
            break;
        }
        let ledger = Ledger::new(dir.path(), 0);
        let sent = ledger.lines().len();
        let journal = JournalDir::open(dir.path().join("journal")).unwrap();
        let found = journal.pending().await.unwrap();
        let leftover = files(journal.path()) - found.len();
        assert_eq!(leftover, 0, "a temporary file is not removed: {last}");
        // The state is written in place: half of it is an invalid state, which is reported.
        let torn = found.iter().filter(|found| found.is_err()).count();
        half_written += torn;
        if torn > 0 {
            assert!(last.contains("at: 18"), "{last}: {found:?}");
            continue;
        }
        assert!(found.len() <= 1, "{last}: {found:?}");
        // A stored intent is sent; without a file it was never sent.
        let mut resume = journal.resume_pending(&client(&ledger, &journal)).await.unwrap();
        while let Some(end) = resume.next().await {
            end.unwrap().end.unwrap();
        }
        assert_eq!(ledger.lines().len(), sent + found.len(), "{last}");
        let lines = ledger.lines();
        assert!(lines.iter().all(|line| *line == lines[0]), "another key or body: {lines:?}");
        assert_eq!(journal.pending().await.unwrap().len(), 0);
    }
    assert!(half_written <= 2, "{half_written}");
}

#[test]
fn any_damaged_bit_and_any_cut_is_detected() {
    for intent in [intent(), Intent::new(http::Method::PUT, "https://a.test/").unwrap()] {
        let whole = encode(&intent);
        let read = decode(&whole).unwrap();
        assert!(read.maybe_sent);
        assert_eq!(read.intent.key(), intent.key());
        assert_eq!(read.intent.method(), intent.method());
        assert_eq!(read.intent.uri(), intent.uri());
        assert_eq!(read.intent.headers(), intent.headers());
        assert_eq!(read.intent.body(), intent.body());
        assert_eq!(read.intent.created_at(), intent.created_at());
        for length in 0..whole.len() {
            decode(&whole[..length]).unwrap_err();
        }
        let mut more = whole.clone();
        more.push(b' ');
        decode(&more).unwrap_err();
        let mut damaged = whole.clone();
        for bit in 0..whole.len() * 8 {
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&damaged).is_err(), "bit {bit}");
            damaged[bit / 8] ^= 1 << (bit % 8);
        }
    }
    let reason_of = |version: &str| {
        let other = String::from_utf8_lossy(&encode(&intent())).replacen("intent 1 ", version, 1);
        format!("{:?}", decode(other.as_bytes()).unwrap_err())
    };
    assert!(reason_of("intent 3 ").contains("version"));
    // A plain entry that claims to be sealed.
    assert!(reason_of("intent 2 ").contains("checksum"));
}

#[tokio::test]
async fn a_damaged_entry_is_reported_and_stays_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let journal = JournalDir::open(dir.path().join("journal")).unwrap();
    let ledger = Ledger::new(dir.path(), 0);
    let path = journal.path().join(file_name(intent().key()));
    let whole = encode(&intent());
    for at in (0..whole.len()).step_by(7) {
        let mut damaged = whole.clone();
        damaged[at] ^= 4;
        fs::write(&path, &damaged).unwrap();
        let found = journal.pending().await.unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].as_ref().unwrap_err().path, path);
        let open = client(&ledger, &journal).send(&intent()).await.unwrap_err();
        assert_eq!((open.kind(), open.may_have_taken_effect()), (SendErrorKind::JournalConflict, true));
        let mut resume = journal.resume_pending(&client(&ledger, &journal)).await.unwrap();
        resume.next().await.unwrap().unwrap_err();
        assert!(resume.next().await.is_none());
        assert_eq!(fs::read(&path).unwrap(), damaged);
    }
    // A complete intent under the name of another one.
    fs::rename(&path, journal.path().join("0000.intent")).unwrap();
    fs::write(journal.path().join("0000.intent"), &whole).unwrap();
    assert!(journal.pending().await.unwrap()[0].as_ref().unwrap_err().reason.contains("belongs to the file"));
    // A link to a file outside of the directory.
    fs::remove_file(journal.path().join("0000.intent")).unwrap();
    fs::write(dir.path().join("elsewhere"), &whole).unwrap();
    std::os::unix::fs::symlink(dir.path().join("elsewhere"), &path).unwrap();
    journal.pending().await.unwrap().remove(0).unwrap_err();
    client(&ledger, &journal).send(&intent()).await.unwrap_err();
    assert!(ledger.lines().is_empty());
}

/// Entries that are encrypted.
#[cfg(feature = "seal")]
mod sealed {
    use oncegate_seal::{Keyring, SealKey};
    use sha2::{Digest as _, Sha256};

    use super::*;

    fn ring(keys: &[u8]) -> Keyring {
        Keyring::new(keys.iter().map(|n| SealKey::from_bytes([*n; 32])))
    }

    fn seal(keys: &[u8]) -> EntrySeal {
        EntrySeal::new(ring(keys))
    }

    fn journal_in(dir: &Path, keys: &[u8]) -> JournalDir {
        JournalDir::open(dir.join("journal")).unwrap().with_seal_keys(ring(keys))
    }

    fn stored(journal: &JournalDir) -> Vec<u8> {
        fs::read(journal.path().join(file_name(intent().key()))).unwrap()
    }

    #[test]
    fn any_changed_bit_any_cut_and_any_other_name_is_detected() {
        let whole = entry::encode(&intent(), &seal(&[1])).unwrap();
        let name = file_name(intent().key());
        let read = entry::decode(&name, &whole, &seal(&[2, 1])).unwrap();
        assert_eq!((read.intent.key(), read.intent.body()), (intent().key(), intent().body()));
        assert!(matches!(entry::decode("0000.intent", &whole, &seal(&[1])), Err(EntryError::Damaged(_))));
        assert!(matches!(entry::decode(&name, &whole, &seal(&[2])), Err(EntryError::Sealed(_))));
        assert!(matches!(entry::decode(&name, &whole, &EntrySeal::default()), Err(EntryError::Sealed(_))));
        for length in 0..whole.len() {
            assert!(entry::decode(&name, &whole[..length], &seal(&[1])).is_err(), "cut at {length}");
        }
        // An attacker who changes the content also writes a checksum that fits.
        let head = whole.iter().position(|byte| *byte == b'\n').unwrap() + 1;
        for at in head..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            let digest = Sha256::new().chain_update(b"oncegate-intent 2").chain_update(&changed[head..]);
            let digest = entry::hex(&digest.finalize());
            changed[head - 65..head - 1].copy_from_slice(digest.as_bytes());
            assert!(entry::decode(&name, &changed, &seal(&[1])).is_err(), "changed at {at}");
        }
    }

    #[tokio::test]
    async fn an_entry_reveals_nothing_and_waits_for_its_key() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::new(dir.path(), 1);
        let journal = journal_in(dir.path(), &[1]);
        client(&ledger, &journal).send(&intent()).await.unwrap_err();
        let file = stored(&journal);
        for secret in [&b"amount"[..], b"bank.test", b"payouts", intent().key().as_bytes(), b"x-note"] {
            assert!(!file.windows(secret.len()).any(|part| part == secret), "{secret:?}");
        }
        for wrong in [journal_in(dir.path(), &[2]), JournalDir::open(journal.path()).unwrap()] {
            let found = wrong.pending().await.unwrap();
            let damaged = found[0].as_ref().unwrap_err();
            assert!(damaged.is_unreadable && damaged.reason.contains("is sealed with the key"), "{damaged}");
            let open = client(&ledger, &wrong).send(&intent()).await.unwrap_err();
            assert_eq!(open.kind(), SendErrorKind::JournalUnreadable);
            let mut resume = wrong.resume_pending(&client(&ledger, &wrong)).await.unwrap();
            resume.next().await.unwrap().unwrap_err();
            assert_eq!(stored(&journal), file, "the entry stays");
        }
        assert!(ledger.lines().is_empty());
        // The old key still opens after a rotation.
        let rotated = journal_in(dir.path(), &[2, 1]);
        client(&ledger, &rotated).send(&intent()).await.unwrap();
        assert_eq!(ledger.lines().len(), 1);
        assert_eq!(rotated.pending().await.unwrap().len(), 0);
    }

    #[tokio::test]
    async fn entries_in_plain_text_are_still_read_and_sent() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::new(dir.path(), 1);
        let plain = JournalDir::open(dir.path().join("journal")).unwrap();
        client(&ledger, &plain).send(&intent()).await.unwrap_err();
        assert!(stored(&plain).windows(6).any(|part| part == b"amount"));
        let journal = journal_in(dir.path(), &[1]);
        let mut resume = journal.resume_pending(&client(&ledger, &journal)).await.unwrap();
        resume.next().await.unwrap().unwrap().end.unwrap();
        assert_eq!(ledger.lines().len(), 1);
    }
}
