//! The directory and the file: permissions, creation, and the cases in which they are refused.

use std::fs;
use std::path::Path;
use std::time::Duration;

use oncegate_core::{
    Command, Complete, Completion, Outcome, RecordId, Resolution, Resolve, StateName, Store as _,
};
use oncegate_embedded::{CheckReport, EmbeddedOpenError, EmbeddedOptions, EmbeddedStore, check};
use oncegate_testkit::block_on;
use redb::{Database, ReadableDatabase as _, ReadableTableMetadata as _, TableDefinition};

const DAY: Duration = Duration::from_secs(86_400);
const RECORDS: TableDefinition<'_, &[u8; 32], &[u8]> = TableDefinition::new("records");
const AUDIT: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("audit");
const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");

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

fn write(dir: &Path, change: impl FnOnce(&redb::WriteTransaction)) {
    let database = Database::open(dir.join("records.redb")).unwrap();
    let txn = database.begin_write().unwrap();
    change(&txn);
    txn.commit().unwrap();
}

#[test]
fn a_new_directory_is_accessible_only_to_its_owner_and_opens_again() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("a/b");
    let store = open(&dir).unwrap();
    claim_as(&store, 1);
    drop(store);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(fs::metadata(dir.join("records.redb")).unwrap().permissions().mode() & 0o777, 0o600);
    }
    let mut names: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["lock", "records.redb"]);
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
    let (records, lock) = (dir.path().join("records.redb"), dir.path().join("lock"));
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
    fs::write(dir.path().join("records.redb.new"), b"half").unwrap();
    drop(open(dir.path()).unwrap());
    assert!(!dir.path().join("records.redb.new").exists());
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
        let file = dir.path().join("records.redb");
        fs::write(&file, bytes).unwrap();
        let error = open(dir.path()).unwrap_err();
        assert!(matches!(error, EmbeddedOpenError::Damaged { .. }), "{error}");
        for words in ["damaged", "oncegate check", "restore", "records.redb"] {
            assert!(error.to_string().contains(words), "{words}: {error}");
        }
        assert_eq!(fs::read(&file).unwrap(), bytes);
    }
}

#[test]
fn a_database_of_another_program_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    drop(Database::create(dir.path().join("records.redb")).unwrap());
    let error = open(dir.path()).unwrap_err();
    assert!(matches!(error, EmbeddedOpenError::Damaged { .. }), "{error}");
    assert!(error.to_string().contains("not a store of this program"), "{error}");
}

#[test]
fn a_newer_format_is_refused_and_left_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()).unwrap());
    write(dir.path(), |txn| drop(txn.open_table(META).unwrap().insert("format", 3).unwrap()));
    let before = fs::read(dir.path().join("records.redb")).unwrap();
    let error = open(dir.path()).unwrap_err();
    assert!(matches!(error, EmbeddedOpenError::NewerFormat { found: 3, known: 2, .. }), "{error}");
    assert!(error.to_string().contains("newer version of the program"), "{error}");
    let error = check(&EmbeddedOptions::new(dir.path())).unwrap_err();
    assert!(matches!(error, EmbeddedOpenError::NewerFormat { .. }), "{error}");
    assert!(fs::read(dir.path().join("records.redb")).unwrap() == before);
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

    let bytes = fs::metadata(dir.path().join("records.redb")).unwrap().len();
    let sound = check(&EmbeddedOptions::new(dir.path())).unwrap();
    assert!(sound.is_sound());
    let counts = [(StateName::InProgress, 1), (StateName::Unknown, 1), (StateName::Tombstone, 2)];
    assert_eq!(sound.records, counts.into_iter().collect());
    assert_eq!((sound.audit_entries, sound.expired), (1, 0));
    assert_eq!(sound.bytes, bytes);

    write(dir.path(), |txn| {
        txn.open_table(RECORDS).unwrap().insert(&[3; 32], &b"rubbish"[..]).unwrap();
        txn.open_table(AUDIT).unwrap().insert(2, &b"rubbish"[..]).unwrap();
    });
    let report: CheckReport = check(&EmbeddedOptions::new(dir.path())).unwrap();
    assert!(!report.is_sound());
    assert_eq!(report.unreadable, [RecordId::from_bytes([3; 32])]);
    assert_eq!(report.unreadable_audit, [2]);
    assert_eq!(report.damage, None);
    let store = open(dir.path()).unwrap();
    assert!(block_on(store.audit(None, 10)).is_err());
    assert_eq!(block_on(store.audit(Some(2), 10)).unwrap().len(), 1);
}

#[test]
fn a_check_reports_a_damaged_page() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path()).unwrap();
    (0..200).for_each(|n| complete(&store, n, Completion::Tombstone));
    drop(store);
    let file = dir.path().join("records.redb");
    let mut bytes = fs::read(&file).unwrap();
    // Flips a bit in every page, so that some of the pages in use are damaged.
    bytes.iter_mut().skip(4096 + 2000).step_by(4096).for_each(|byte| *byte ^= 1);
    fs::write(&file, bytes).unwrap();
    match check(&EmbeddedOptions::new(dir.path())) {
        Ok(report) => assert!(report.damage.is_some() && !report.is_sound(), "{report:?}"),
        Err(error) => assert!(matches!(error, EmbeddedOpenError::Damaged { .. }), "{error}"),
    }
}

#[test]
fn the_audit_trail_keeps_its_newest_entries() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()).unwrap());
    let most = oncegate_core::limits::MAX_AUDIT_ENTRIES;
    write(dir.path(), |txn| {
        let mut audit = txn.open_table(AUDIT).unwrap();
        (1..=most).for_each(|number| drop(audit.insert(number, &b"older"[..]).unwrap()));
    });
    let store = open(dir.path()).unwrap();
    complete(&store, 4, Completion::Unknown);
    block_on(store.apply(RecordId::from_bytes([4; 32]), resolve())).unwrap();
    assert_eq!(block_on(store.audit(None, 1)).unwrap()[0].number, most + 1);
    drop(store);
    let database = Database::open(dir.path().join("records.redb")).unwrap();
    let audit = database.begin_read().unwrap().open_table(AUDIT).unwrap();
    assert_eq!(audit.len().unwrap(), most);
    assert!(audit.get(1).unwrap().is_none());
}
