//! `oncegate backup`: a copy of the store of a sidecar under load, and its restore.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use oncegate_testkit::until;
use rustix::process::Signal;
use tokio::process::Command;

use crate::OK;
use crate::operations::admin;
use crate::store::Disk;
use crate::support::{Process, Service, Sidecar, Wire, request};

fn post(key: usize) -> String {
    request("POST", "/orders", &[&format!("Idempotency-Key: {key}")], "{}")
}

fn command(admin: &str, to: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.arg("backup").arg(to).args(["--admin", admin]).env_remove("ONCEGATE_ADMIN_TOKEN");
    command
}

async fn backup(sidecar: &Sidecar, to: &Path) -> Output {
    command(&sidecar.admin.to_string(), to).output().await.unwrap()
}

fn words(output: &Output) -> String {
    String::from_utf8([&output.stdout[..], &output.stderr].concat()).unwrap()
}

/// Sends requests with one key after the other until it is dropped.
struct Load {
    answered: Arc<AtomicUsize>,
    is_over: Arc<AtomicBool>,
    task: Option<tokio::task::JoinHandle<()>>,
}

impl Load {
    fn start(sidecar: &Sidecar) -> Self {
        let (answered, is_over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, stop, address) = (answered.clone(), is_over.clone(), sidecar.address);
        let task = tokio::spawn(async move {
            let mut wire = Wire::connect(address).await;
            while !stop.load(Ordering::SeqCst) {
                let key = count.load(Ordering::SeqCst) + 1;
                wire.send(post(key)).await;
                wire.message().await.has_status(200);
                count.store(key, Ordering::SeqCst);
            }
        });
        Self { answered, is_over, task: Some(task) }
    }

    fn answered(&self) -> usize {
        self.answered.load(Ordering::SeqCst)
    }

    async fn end(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        if let Some(task) = self.task.take() {
            task.await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_under_load_is_restored_with_every_response_that_was_sent_before_it() {
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let store = format!("--store={}", directory.path().join("store").display());
    let sidecar = Sidecar::start(service.address, &[&store]).await;
    let mut load = Load::start(&sidecar);
    until("there are records", async || load.answered() > 300).await;
    let copies = ["one", "two", "three"].map(|name| directory.path().join(name));
    let mut known = Vec::new();
    for copy in &copies {
        known.push(load.answered());
        let output = backup(&sidecar, copy).await;
        let text = words(&output);
        assert!(output.status.success() && text.contains("every record was checked"), "{text}");
        assert!(text.contains("executes") || text.contains("execute"), "the limit of a copy is said: {text}");
        assert_eq!(fs::metadata(copy).unwrap().permissions().mode() & 0o777, 0o700);
        let mut names = Vec::new();
        for entry in fs::read_dir(copy).unwrap() {
            let entry = entry.unwrap();
            assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{entry:?}");
            names.push(entry.file_name().into_string().unwrap());
        }
        assert!(names.contains(&"mark".to_owned()) && !names.contains(&"lock".to_owned()), "{names:?}");
        let answered = load.answered();
        until("requests go on meanwhile and after it", async || load.answered() > answered + 20).await;
    }
    load.end().await;
    // A target that exists is never written over.
    let again = backup(&sidecar, &copies[0]).await;
    assert!(
        !again.status.success() && words(&again).contains("exists and is not empty"),
        "{}",
        words(&again)
    );
    drop(sidecar);
    for (copy, known) in copies.iter().zip(known) {
        let store = format!("--store={}", copy.display());
        let restored = Sidecar::start(service.address, &[&store, "--store-must-exist"]).await;
        let before = service.requests();
        let mut wire = restored.connect().await;
        for key in 1..=known {
            wire.send(post(key)).await;
            assert!(wire.message().await.has_status(200).is_replay(), "key {key} of {known} is missing");
        }
        assert_eq!(service.requests(), before, "a request that the copy knows was executed again");
        // The honest limit: what came after the copy executes again.
        wire.send(post(load.answered())).await;
        assert!(!wire.message().await.has_status(200).is_replay());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_is_killed_leaves_no_copy_and_the_next_one_works() {
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let store = format!("--store={}", directory.path().join("store").display());
    let sidecar = Sidecar::start(service.address, &[&store]).await;
    let mut load = Load::start(&sidecar);
    until("there are several segments", async || load.answered() > 1500).await;
    load.end().await;
    let (copy, partial) = (directory.path().join("copy"), directory.path().join("copy.partial"));
    let mut process = Process::start(&mut command(&sidecar.admin.to_string(), &copy));
    until("it writes", async || partial.join("mark").exists() || copy.exists()).await;
    process.signal(Signal::KILL);
    process.ended().await;
    // It may have been faster than the signal.
    if !copy.exists() {
        let mut check = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        let flag = format!("--store={}", partial.display());
        let output = check.args(["check", "--to=http://127.0.0.1:9", &flag]).output().await.unwrap();
        assert!(!output.status.success(), "an incomplete copy passed: {}", words(&output));
        let output = backup(&sidecar, &copy).await;
        assert!(output.status.success(), "{}", words(&output));
    }
    assert!(!partial.exists());
    // A file of someone else is left alone.
    let other = directory.path().join("other.partial");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("notes.txt"), "mine").unwrap();
    let output = backup(&sidecar, &directory.path().join("other")).await;
    assert!(
        !output.status.success() && words(&output).contains("contains other files"),
        "{}",
        words(&output)
    );
    assert_eq!(fs::read_to_string(other.join("notes.txt")).unwrap(), "mine");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_and_a_sidecar_that_dies_leave_nothing_behind() {
    // Responses that are larger than what sockets hold.
    let body = "x".repeat(900_000);
    let large = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let service = Service::new().await.answers(String::leak(large));
    let directory = tempfile::tempdir().unwrap();
    let store = format!("--store={}", directory.path().join("store").display());
    let mut sidecar = Sidecar::start(service.address, &[&store]).await;
    sidecar.ask(&post(1)).await;
    let disk = Disk::new("300k");
    let output = backup(&sidecar, &disk.path().join("copy")).await;
    assert!(!output.status.success() && words(&output).contains("cannot be written"), "{}", words(&output));
    assert_eq!(fs::read_dir(disk.path()).unwrap().count(), 0, "something was left");
    // The sidecar works on.
    assert!(sidecar.ask(&post(1)).await.is_replay());

    // A reader that stops reading, and the sidecar is killed: what was received is not complete.
    for key in 2..26 {
        sidecar.ask(&post(key)).await.has_status(200);
    }
    let mut wire = Wire::connect(sidecar.admin).await;
    wire.send("GET /v1/backup HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    let head = wire.head().await;
    let length: usize = head.get("content-length").unwrap().parse().unwrap();
    assert_eq!(head.get("content-type"), Some("application/x-tar"));
    let busy = admin(&sidecar, "/v1/backup").await;
    assert_eq!(busy.status(), 503);
    busy.is_problem(503, "busy");
    sidecar.process.kill().await;
    assert!(wire.rest().await.len() < length);
}

#[tokio::test]
async fn a_symbolic_link_is_refused_before_anything_is_copied() {
    use std::os::unix::fs::symlink;
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let store = format!("--store={}", directory.path().join("store").display());
    let sidecar = Sidecar::start(service.address, &[&store]).await;
    sidecar.ask(&post(1)).await.has_status(200);
    let [target, link, dangling, copy] =
        ["target", "link", "dangling", "copy"].map(|name| directory.path().join(name));
    fs::create_dir(&target).unwrap();
    symlink(&target, &link).unwrap();
    symlink(directory.path().join("nowhere"), &dangling).unwrap();
    let with_slash = Path::new(&format!("{}/", link.display())).to_owned();
    for to in [&link, &dangling, &with_slash] {
        let output = backup(&sidecar, to).await;
        assert_eq!(output.status.code(), Some(1), "{}", words(&output));
        assert!(words(&output).contains("is a symbolic link to "), "{}", words(&output));
    }
    // What an earlier copy left is removed, and must not be the store itself.
    let partial = directory.path().join("copy.partial");
    symlink(&target, &partial).unwrap();
    fs::write(target.join("00000000.log"), "mine").unwrap();
    let output = backup(&sidecar, &copy).await;
    assert!(
        !output.status.success() && words(&output).contains("is a symbolic link to "),
        "{}",
        words(&output)
    );
    assert_eq!(fs::read_to_string(target.join("00000000.log")).unwrap(), "mine");
    assert!(link.is_symlink() && dangling.is_symlink() && !directory.path().join("link.partial").exists());
    // A link in the path before it is followed.
    fs::remove_file(&partial).unwrap();
    let output = backup(&sidecar, &link.join("copy")).await;
    assert!(output.status.success() && target.join("copy/mark").exists(), "{}", words(&output));
}

#[tokio::test]
async fn other_stores_name_their_own_tools_and_a_wrong_address_is_explained() {
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let sidecar = Sidecar::start(service.address, &[]).await;
    let copy = directory.path().join("copy");
    let output = backup(&sidecar, &copy).await;
    assert_eq!(output.status.code(), Some(1), "{}", words(&output));
    assert!(
        words(&output).contains("Only the embedded store is copied by its sidecar"),
        "{}",
        words(&output)
    );
    assert!(!copy.exists() && !directory.path().join("copy.partial").exists());
    // The address for requests is no admin address: it gets no command.
    let wrong = command(&sidecar.address.to_string(), &copy).output().await.unwrap();
    assert_eq!(wrong.status.code(), Some(3), "{}", words(&wrong));
}

#[tokio::test]
async fn an_archive_without_a_store_is_no_backup() {
    let empty = format!(
        "HTTP/1.1 200 OK\r\nOncegate-Admin: 1\r\nContent-Type: application/x-tar\r\nContent-Length: 1024\r\n\r\n{}",
        "\0".repeat(1024)
    );
    let service = Service::new().await.answers(empty.leak());
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("copy");
    let output = command(&service.address.to_string(), &copy).output().await.unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", words(&output));
    assert!(words(&output).contains("an archive without a store"), "{}", words(&output));
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}
