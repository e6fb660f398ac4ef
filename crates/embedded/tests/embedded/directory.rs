//! The directory and the file: permissions, creation, and the cases in which they are refused.

use std::fs;
use std::path::Path;
use std::time::Duration;

use oncegate_core::{
    Command, Complete, Completion, Outcome, RecordId, Resolution, Resolve, StateName, Store as _,
};
use oncegate_embedded::{CheckReport, EmbeddedOpenError, EmbeddedOptions, EmbeddedStore, check};
use oncegate_testkit::block_on;

const DAY: Duration = Duration::from_secs(86_400);
const FIRST: &str = "00000001.log";

fn open(dir: &Path) -> Result<EmbeddedStore, EmbeddedOpenError> {
    EmbeddedStore::open(EmbeddedOptions::new(dir))
}

fn claim() -> Command {
    Command::Claim(oncegate_testkit::claim(1_u128, b"input"))
}

fn claim_as(store: &EmbeddedStore, n: u8) -> oncegate_core::FencingToken {
    match block_on(store.apply(RecordId::from_bytes([n; 32]), claim())).unwrap() {
        Outcome::Execute(grant) => grant.token,
        other => panic!("{other:?}"),
    }
}

fn complete(store: &EmbeddedStore, n: u8, completion: Completion) {
    let token = claim_as(store, n);
    let complete = Command::Complete(Complete { token, completion, retention: DAY });
    assert_eq!(block_on(store.apply(RecordId::from_bytes([n; 32]), complete)).unwrap(), Outcome::Completed);
}

fn resolve() -> Command {
    Command::Resolve(Resolve {
        resolution: Resolution::Complete(None),
        retention: DAY,
        force: false,
        amend: false,
        actor: "an operator".to_owned(),
        reason: "the bank says so".to_owned(),
    })
}

#[test]
fn a_new_directory_is_accessible_only_to_its_owner_and_opens_again() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("a/b");
    let store = open(&dir).unwrap();
    claim_as(&store, 1);
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    while !dir.join("00000002.log").exists() {
        assert!(std::time::Instant::now() < deadline, "the next segment is not prepared");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(store);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(fs::metadata(dir.join(FIRST)).unwrap().permissions().mode() & 0o777, 0o600);
    }
    let mut names: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, [FIRST, "00000002.log", "lock", "mark"]);
    let store = open(&dir).unwrap();
    assert!(block_on(store.lookup(RecordId::from_bytes([1; 32]))).unwrap().is_some());
}

/// A restored backup has no lock file. A check by root must not create one that only root can open.
#[cfg(unix)]
#[test]
fn a_recreated_lock_belongs_to_the_owner_of_the_records() {
    use std::os::unix::fs::{MetadataExt as _, chown};
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()).unwrap());
    let (records, lock) = (dir.path().join(FIRST), dir.path().join("lock"));
    let owner = |path: &Path| {
        let metadata = fs::metadata(path).unwrap();
        (metadata.uid(), metadata.gid())
    };
    // Only root can give files away. For any other user, all files have the same owner.
    let is_root = owner(&records).0 == 0;
    if is_root {
        chown(&records, Some(65_534), Some(65_534)).unwrap();
    }
    fs::remove_file(&lock).unwrap();
    check(&EmbeddedOptions::new(dir.path())).unwrap();
    assert_eq!(owner(&lock), owner(&records));

    // An existing file and the target of a link keep their owner.
    let elsewhere = tempfile::tempdir().unwrap();
    let target = elsewhere.path().join("target");
    fs::remove_file(&lock).unwrap();
    std::os::unix::fs::symlink(&target, &lock).unwrap();
    check(&EmbeddedOptions::new(dir.path())).unwrap();
    assert_eq!(owner(&target), owner(elsewhere.path()));
}

#[test]
fn a_directory_is_refused_while_it_is_open_and_free_when_it_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).unwrap();
    let error = open(dir.path()).unwrap_err();
    assert!(
        matches!(error, EmbeddedOpenError::InUse { pid: Some(pid), .. } if pid == std::process::id()),
        "{error}"
    );
    assert!(error.to_string().contains("this process"), "{error}");
    assert!(matches!(check(&EmbeddedOptions::new(dir.path())), Err(EmbeddedOpenError::InUse { .. })));
    store.close();
    // Closing is enough to free the directory, even before the store is dropped.
    drop(open(dir.path()).unwrap());
    drop(store);
}

#[test]
fn a_half_created_file_is_replaced_after_a_crash() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("00000001.log.new"), b"half").unwrap();
    drop(open(dir.path()).unwrap());
    assert!(!dir.path().join("00000001.log.new").exists());
}

/// For example by a cleaner of temporary files, a wrong mount, or a deployment that moves directories.
#[test]
fn a_store_that_is_moved_away_is_refused_until_it_is_back() {
    let parent = tempfile::tempdir().unwrap();
    let (dir, elsewhere) = (parent.path().join("store"), parent.path().join("elsewhere"));
    let store = open(&dir).unwrap();
    complete(&store, 1, Completion::Tombstone);
    block_on(store.check()).unwrap();
    fs::rename(&dir, &elsewhere).unwrap();
    assert!(block_on(store.apply(RecordId::from_bytes([2; 32]), claim())).is_err());
    let error = block_on(store.check()).unwrap_err();
    assert!(error.to_string().contains("was moved or removed while it was open"), "{error}");
    // A new store under the same path is not confused with the old one.
    let other = open(&dir).unwrap();
    complete(&other, 3, Completion::Tombstone);
    assert!(block_on(store.apply(RecordId::from_bytes([2; 32]), claim())).is_err());
    assert!(block_on(other.apply(RecordId::from_bytes([2; 32]), claim())).is_ok());
    drop(other);
    fs::remove_dir_all(&dir).unwrap();
    fs::rename(&elsewhere, &dir).unwrap();
    let give_up = std::time::Instant::now() + Duration::from_secs(30);
    while block_on(store.check()).is_err() {
        assert!(std::time::Instant::now() < give_up, "the store did not recover");
        std::thread::sleep(Duration::from_millis(20));
    }
    let again = block_on(store.apply(RecordId::from_bytes([1; 32]), claim())).unwrap();
    assert!(matches!(again, Outcome::Unreplayable), "{again:?}");
}

#[test]
fn an_empty_or_foreign_file_is_refused_and_left_unchanged() {
    for bytes in [&b""[..], b"records of something else", &[0; 4096]] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(FIRST);
        fs::write(&file, bytes).unwrap();
        let error = open(dir.path()).unwrap_err();
        assert!(matches!(error, EmbeddedOpenError::Damaged { .. }), "{error}");
        for words in ["damaged", "oncegate check", "restore", FIRST] {
            assert!(error.to_string().contains(words), "{words}: {error}");
        }
        assert_eq!(fs::read(&file).unwrap(), bytes);
    }
}

#[test]
fn a_check_counts_the_records_and_names_the_unreadable_ones() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).unwrap();
    claim_as(&store, 1);
    complete(&store, 2, Completion::Tombstone);
    complete(&store, 3, Completion::Unknown);
    complete(&store, 4, Completion::Unknown);
    let resolved = block_on(store.apply(RecordId::from_bytes([4; 32]), resolve())).unwrap();
    assert!(matches!(resolved, Outcome::Resolved { .. }));
    drop(store);

    let sound = check(&EmbeddedOptions::new(dir.path())).unwrap();
    assert!(sound.is_sound());
    let counts = [(StateName::InProgress, 1), (StateName::Unknown, 1), (StateName::Tombstone, 2)];
    assert_eq!(sound.records, counts.into_iter().collect());
    assert_eq!((sound.audit_entries, sound.expired), (1, 0));
    assert!(sound.bytes > 8 * 4096 && sound.bytes < 20 * 4096, "{}", sound.bytes);
}

#[test]
fn a_check_reports_damage_and_what_can_be_read_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).unwrap();
    (0..200).for_each(|n| complete(&store, n, Completion::Tombstone));
    drop(store);
    let file = dir.path().join(FIRST);
    let mut bytes = fs::read(&file).unwrap();
    bytes[100 * 4096 + 120] ^= 1;
    fs::write(&file, &bytes).unwrap();
    let report: CheckReport = check(&EmbeddedOptions::new(dir.path())).unwrap();
    assert!(report.damage.is_some() && !report.is_sound(), "{report:?}");
    assert!(report.records.values().sum::<u64>() > 30, "{report:?}");
    assert!(matches!(open(dir.path()), Err(EmbeddedOpenError::Damaged { .. })));
    assert!(fs::read(&file).unwrap() == bytes, "a check and a refused start change nothing");
}
