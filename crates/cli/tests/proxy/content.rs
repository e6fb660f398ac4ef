//! The commands that change the content of records, and the responses that clients get from then on.

use std::process::{Output, Stdio};

use oncegate_core::Scope;
use oncegate_servers::PostgresServer;
use oncegate_testkit::until;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::process::Command;

use crate::operations::admin;
use crate::sealing::{CARD, Keys, id, keys, oncegate, post_as, postgres, shows, start, stop};
use crate::support::{Message, Service, Sidecar, ask, request, sidecar, within};

/// A request with a key of its own.
fn numbered(n: usize) -> String {
    request("POST", "/pay", &[&format!("Idempotency-Key: intent-{n:04}")], "{}")
}

async fn command(sidecar: &Sidecar, args: &[&str]) -> Output {
    let admin = format!("--admin={}", sidecar.admin);
    oncegate(&[args, &[&admin]].concat()).await
}

fn said(output: &Output) -> String {
    String::from_utf8([&output.stdout[..], &output.stderr].concat()).unwrap()
}

pub(crate) async fn in_json(sidecar: &Sidecar, args: &[&str]) -> Value {
    let output = command(sidecar, &[args, &["--json"]].concat()).await;
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{args:?}: {}", said(&output)))
}

/// Makes a sidecar read its keys again.
pub(crate) async fn reload(sidecar: &Sidecar, seals: u8) {
    sidecar.process.signal(Signal::HUP);
    let key = id(seals);
    until("the new key seals", async || {
        let about = admin(sidecar, "/v1/seal").await.json();
        about["keys"][0]["id"] == key && about["seals"] == true
    })
    .await;
}

async fn post_admin(sidecar: &Sidecar, path: &str, fields: &[&str], body: &Value) -> Message {
    let fields = [&["Content-Type: application/json", "Connection: close"], fields].concat();
    let asked =
        request("POST", path, &fields, &body.to_string()).replacen("Host: orders.test", "Host: localhost", 1);
    ask(sidecar.admin, &asked).await
}

#[tokio::test]
async fn after_a_reseal_the_old_key_is_not_needed_any_more() {
    let (service, ring) = (Service::new().await.answers(CARD), Keys::new(&[1]));
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data").display().to_string();
    let old = start(&service, &store, &[&ring.flag()]).await;
    let first = old.ask(&numbered(0)).await;
    for n in 1..12 {
        old.ask(&numbered(n)).await.has_status(201);
    }
    // Nothing to do yet.
    let done = in_json(&old, &["reseal"]).await;
    assert_eq!(
        (&done["resealed"], &done["up_to_date"], &done["seals_with"]),
        (&0.into(), &12.into(), &id(1).into())
    );
    ring.set(&[2, 1]);
    reload(&old, 2).await;
    old.ask(&numbered(12)).await.has_status(201);
    let would = keys(&old, &["reseal", "--dry-run"]).await;
    assert!(
        would.contains("        12  would be sealed anew")
            && would.contains("         1  sealed with it already"),
        "{would}"
    );
    let usage = keys(&old, &["seal-key", "usage"]).await;
    assert!(
        usage.contains(&format!("{}  12 records; it opens", id(1))),
        "a dry run changes nothing: {usage}"
    );
    let done = keys(&old, &["reseal"]).await;
    assert!(
        done.contains("        12  sealed anew") && done.contains("The old forms are still where"),
        "{done}"
    );
    let again = in_json(&old, &["reseal"]).await;
    assert_eq!((&again["resealed"], &again["up_to_date"]), (&0.into(), &13.into()));
    let usage = keys(&old, &["seal-key", "usage"]).await;
    assert!(usage.contains(&format!("{}  no records; it may be removed", id(1))), "{usage}");
    assert_eq!(admin(&old, "/v1/audit").await.json()["entries"], json!([]));
    stop(old).await;
    ring.set(&[2]);
    let new = start(&service, &store, &[&ring.flag(), "--seal-required"]).await;
    for n in 0..13 {
        let replayed = new.ask(&numbered(n)).await;
        assert!(replayed.has_status(201).is_replay() && replayed.body == first.body, "{n}");
    }
    assert_eq!(service.requests(), 13);
    stop(new).await;
    assert!(!shows(directory.path()));
}

#[tokio::test]
async fn what_is_in_clear_is_sealed_only_if_that_is_asked_for() {
    let (service, ring) = (Service::new().await.answers(CARD), Keys::new(&[1]));
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data").display().to_string();
    let plain = start(&service, &store, &[]).await;
    plain.ask(&numbered(1)).await.has_status(201);
    let refused = command(&plain, &["reseal"]).await;
    assert!(
        refused.status.code() == Some(1) && said(&refused).contains("has no seal keys"),
        "{}",
        said(&refused)
    );
    stop(plain).await;
    let strict = start(&service, &store, &[&ring.flag(), "--seal-required"]).await;
    let done = in_json(&strict, &["reseal"]).await;
    assert_eq!((&done["clear"], &done["clear_sealed"]), (&1.into(), &0.into()));
    let refused = command(&strict, &["reseal", "--seal-clear"]).await;
    assert!(
        said(&refused).contains("--seal-clear: this sidecar refuses what is in clear"),
        "{}",
        said(&refused)
    );
    stop(strict).await;
    let opening = start(&service, &store, &[&ring.flag(), "--seal-opens-only"]).await;
    let refused = command(&opening, &["reseal"]).await;
    assert!(refused.status.code() == Some(1) && said(&refused).contains("only open"), "{}", said(&refused));
    stop(opening).await;
    let sealing = start(&service, &store, &[&ring.flag()]).await;
    let done = keys(&sealing, &["reseal"]).await;
    assert!(done.contains("         1  in clear, left as they are"), "{done}");
    let done = keys(&sealing, &["reseal", "--seal-clear"]).await;
    assert!(done.contains("         1  in clear before, sealed now"), "{done}");
    stop(sealing).await;
    let strict = start(&service, &store, &[&ring.flag(), "--seal-required"]).await;
    assert!(strict.ask(&numbered(1)).await.has_status(201).is_replay());
    stop(strict).await;
    assert_eq!(service.requests(), 1);
}

#[tokio::test]
async fn a_reseal_that_was_killed_half_way_goes_on() {
    const RECORDS: usize = 120;
    let (service, ring) = (Service::new().await.answers(CARD), Keys::new(&[1]));
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data").display().to_string();
    let mut sidecar = start(&service, &store, &[&ring.flag()]).await;
    for n in 0..RECORDS {
        sidecar.ask(&numbered(n)).await.has_status(201);
    }
    ring.set(&[2, 1]);
    reload(&sidecar, 2).await;
    let mut reseal = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    reseal.args(["reseal", "--rate=20", &format!("--admin={}", sidecar.admin)]).env_clear();
    let reseal = reseal.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let count = async |sidecar: &Sidecar, key: u8| {
        let usage = admin(sidecar, "/v1/seal/usage").await.json();
        usage["sealed"][id(key)]["records"].as_u64().unwrap_or_default() as usize
    };
    until("some records are sealed anew", async || count(&sidecar, 2).await >= 20).await;
    sidecar.process.kill().await;
    let ended = within("the end of the command", reseal.wait_with_output()).await.unwrap();
    let words = said(&ended);
    assert!(ended.status.code() == Some(3) && words.contains("go on with --cursor "), "{words}");
    let cursor = words.rsplit("--cursor ").next().unwrap().trim().to_owned();

    let sidecar = start(&service, &store, &[&ring.flag()]).await;
    let done = count(&sidecar, 2).await;
    assert!((20..RECORDS).contains(&done) && count(&sidecar, 1).await == RECORDS - done, "{done}");
    for n in 0..RECORDS {
        assert!(sidecar.ask(&numbered(n)).await.has_status(201).is_replay());
    }
    let rest = in_json(&sidecar, &["reseal", "--cursor", &cursor]).await;
    assert_eq!(rest["resealed"].as_u64(), Some((RECORDS - done) as u64), "{rest}");
    assert_eq!(in_json(&sidecar, &["reseal"]).await["up_to_date"], RECORDS);
    stop(sidecar).await;
    ring.set(&[2]);
    let sidecar = start(&service, &store, &[&ring.flag()]).await;
    for n in 0..RECORDS {
        assert!(sidecar.ask(&numbered(n)).await.has_status(201).is_replay());
    }
    assert_eq!(service.requests(), RECORDS);
    stop(sidecar).await;
}

/// A directory that no process has open: a sidecar that will not start again, or a copy. The command takes its lock.
#[tokio::test]
async fn a_directory_that_no_process_has_open_is_sealed_anew() {
    let (service, ring) = (Service::new().await.answers(CARD), Keys::new(&[1]));
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data").display().to_string();
    let old = start(&service, &store, &[&ring.flag()]).await;
    for n in 0..3 {
        old.ask(&numbered(n)).await.has_status(201);
    }
    ring.set(&[2, 1]);
    let (at, flag) = (format!("--store={store}"), ring.flag());
    let reseal = async |args: &[&str]| {
        let output = oncegate(&[&["reseal", at.as_str()], args].concat()).await;
        (output.status.code(), said(&output))
    };
    let (code, words) = reseal(&[&flag]).await;
    assert!(code == Some(1) && words.contains("in use by") && words.contains("leave out --store"), "{words}");
    stop(old).await;
    let (code, words) = reseal(&[]).await;
    assert!(code == Some(2) && words.contains("--seal-keys-file"), "{words}");
    let (code, words) = reseal(&[&flag, "--dry-run"]).await;
    assert!(code == Some(0) && words.contains("         3  would be sealed anew"), "{words}");
    let only_new = Keys::new(&[2]);
    let (code, words) = reseal(&[&only_new.flag()]).await;
    assert!(code == Some(1) && words.contains(&format!("the key {}, which was not given", id(1))), "{words}");
    let (code, words) = reseal(&[&flag, "--compact"]).await;
    assert!(code == Some(0) && words.contains("         3  sealed anew"), "{words}");
    let (code, words) = reseal(&[&flag, "--json"]).await;
    assert!(code == Some(0) && words.contains("\"up_to_date\":3"), "{words}");
    // No store is made where there is none, and no other user's files are written.
    let nowhere = directory.path().join("nowhere");
    let output = oncegate(&["reseal", &format!("--store={}", nowhere.display()), &flag]).await;
    assert!(!output.status.success() && !nowhere.exists(), "{}", said(&output));

    let new = start(&service, &store, &[&only_new.flag(), "--seal-required"]).await;
    for n in 0..3 {
        assert!(new.ask(&numbered(n)).await.has_status(201).is_replay());
    }
    assert_eq!(service.requests(), 3);
    stop(new).await;
}

/// Two sidecars serve while a third command walks through their store. The database has what the sidecars have written.
#[tokio::test(flavor = "multi_thread")]
async fn a_reseal_while_two_sidecars_serve_refuses_nothing() {
    let server: PostgresServer = postgres().await;
    let (service, ring) = (Service::new().await.answers(CARD), Keys::new(&[1]));
    let flags = [ring.flag()];
    let flags: Vec<_> = flags.iter().map(String::as_str).collect();
    let sidecars =
        [start(&service, &server.url(), &flags).await, start(&service, &server.url(), &flags).await];
    for n in 0..60 {
        sidecars[n % 2].ask(&numbered(n)).await.has_status(201);
    }
    // The order of docs/reference/sealing.md.
    for keys in [&[1, 2], &[2, 1]] {
        ring.set(keys);
        for sidecar in &sidecars {
            reload(sidecar, keys[0]).await;
        }
    }
    let load = async |sidecar: &Sidecar, from: usize| {
        for n in 0..60 {
            assert!(sidecar.ask(&numbered(n)).await.has_status(201).is_replay(), "{n}");
            sidecar.ask(&numbered(from + n)).await.has_status(201);
        }
    };
    let (done, (), ()) = tokio::join!(
        command(&sidecars[0], &["reseal", "--rate=100"]),
        load(&sidecars[0], 1000),
        load(&sidecars[1], 2000)
    );
    assert!(done.status.success(), "{}", said(&done));
    let usage = keys(&sidecars[1], &["seal-key", "usage"]).await;
    assert!(usage.contains(&format!("{}  no records", id(1))), "{usage}");
    ring.set(&[2]);
    for sidecar in &sidecars {
        reload(sidecar, 2).await;
    }
    for n in (0..60).chain(1000..1060).chain(2000..2060) {
        assert!(sidecars[n % 2].ask(&numbered(n)).await.has_status(201).is_replay(), "{n}");
    }
    assert_eq!(service.requests(), 180);
    for sidecar in sidecars {
        stop(sidecar).await;
    }
}

#[tokio::test]
async fn a_forgotten_caller_keeps_its_protection_and_loses_its_responses() {
    let (service, ring) = (Service::new().await.answers(CARD), Keys::new(&[1]));
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data").display().to_string();
    let sidecar = start(&service, &store, &[&ring.flag()]).await;
    for (caller, path) in [("ann", "/a"), ("ann", "/b"), ("ben", "/a")] {
        sidecar.ask(&post_as(caller, path, "{}")).await.has_status(201);
    }
    let tag = Scope::caller("header:authorization", b"Bearer ann").caller_tag().to_string();
    let fields = directory.path().join("fields");
    std::fs::write(&fields, "Authorization: Bearer ann\n").unwrap();
    let fields = fields.display().to_string();
    let by_fields = ["forget", "--caller-fields", &fields, "--reason", "a request for deletion"];
    let would = keys(&sidecar, &[&by_fields[..], &["--dry-run"]].concat()).await;
    assert!(would.contains(&format!("caller {tag}:")), "{would}");
    assert!(would.contains("         2  would lose their response"), "{would}");
    assert!(sidecar.ask(&post_as("ann", "/a", "{}")).await.has_status(201).is_replay());
    let done = keys(&sidecar, &[&by_fields[..], &["--actor", "eve"]].concat()).await;
    assert!(done.contains("         2  forgotten") && done.contains("Not reached: older versions"), "{done}");
    assert!(!done.contains("Bearer"), "{done}");
    for path in ["/a", "/b"] {
        sidecar.ask(&post_as("ann", path, "{}")).await.is_problem(422, "replay-unavailable");
        sidecar.ask(&post_as("ann", path, "{\"other\":1}")).await.is_problem(422, "key-reused");
    }
    assert!(sidecar.ask(&post_as("ben", "/a", "{}")).await.has_status(201).is_replay());
    assert_eq!(service.requests(), 3);
    let entries = admin(&sidecar, "/v1/audit").await.json()["entries"].clone();
    let facts = |entry: &Value| {
        ["from", "to", "actor", "reason"].map(|name| entry[name].as_str().unwrap().to_owned())
    };
    let expected = ["completed", "tombstone", "eve", "a request for deletion"].map(str::to_owned);
    assert_eq!(entries.as_array().unwrap().iter().map(facts).collect::<Vec<_>>(), vec![expected; 2]);
    let again = in_json(&sidecar, &["forget", "--caller", &tag, "--reason", "once more"]).await;
    assert_eq!((&again["forgotten"], &again["nothing_kept"]), (&0.into(), &2.into()));
    assert_eq!(admin(&sidecar, "/v1/audit").await.json()["entries"].as_array().unwrap().len(), 2);
    // By its record.
    let listed = admin(&sidecar, "/v1/keys?state=completed").await.json();
    let record = listed["records"][0]["record"].as_str().unwrap().to_owned();
    let one = keys(&sidecar, &["forget", "--record", &record[..12], "--reason", "the card is in it"]).await;
    assert!(one.contains("completed → tombstone"), "{one}");
    let refused = command(&sidecar, &["forget", "--record", &record, "--reason", "r"]).await;
    assert!(
        refused.status.code() == Some(1) && said(&refused).contains("keeps nothing"),
        "{}",
        said(&refused)
    );
    sidecar.ask(&post_as("ben", "/a", "{}")).await.is_problem(422, "replay-unavailable");
    stop(sidecar).await;
    // After a restart, too.
    let sidecar = start(&service, &store, &[&ring.flag()]).await;
    sidecar.ask(&post_as("ann", "/a", "{}")).await.is_problem(422, "replay-unavailable");
    assert_eq!(service.requests(), 3);
    stop(sidecar).await;
}

/// The older versions of records are in the log of a directory, until it is compacted. The responses are in clear here.
#[tokio::test]
async fn a_compaction_removes_what_was_forgotten_from_the_disk() {
    let service = Service::new().await.answers(CARD);
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data").display().to_string();
    let sidecar = start(&service, &store, &[]).await;
    sidecar.ask(&post_as("ann", "/a", "{}")).await.has_status(201);
    let tag = Scope::caller("header:authorization", b"Bearer ann").caller_tag().to_string();
    let forget = ["forget", "--caller", &tag, "--reason", "r"];
    let done = keys(&sidecar, &forget).await;
    assert!(done.contains("         1  forgotten") && done.contains("unless --compact is given"), "{done}");
    assert!(shows(directory.path()));
    let done = keys(&sidecar, &[&forget[..], &["--compact"]].concat()).await;
    assert!(done.contains("         1  keep nothing") && !done.contains("--compact"), "{done}");
    assert!(!shows(directory.path()));
    sidecar.ask(&post_as("ann", "/a", "{}")).await.is_problem(422, "replay-unavailable");
    stop(sidecar).await;
    let sidecar = start(&service, &store, &[]).await;
    sidecar.ask(&post_as("ann", "/a", "{}")).await.is_problem(422, "replay-unavailable");
    assert_eq!(admin(&sidecar, "/v1/audit").await.json()["entries"].as_array().unwrap().len(), 1);
    stop(sidecar).await;
    // Nothing is changed if the store has no log.
    let sidecar = start(&service, "memory:", &[]).await;
    sidecar.ask(&post_as("ann", "/b", "{}")).await.has_status(201);
    let refused = command(&sidecar, &[&forget[..], &["--compact"]].concat()).await;
    assert!(
        refused.status.code() == Some(1) && said(&refused).contains("Only the log of an embedded store"),
        "{}",
        said(&refused)
    );
    assert!(sidecar.ask(&post_as("ann", "/b", "{}")).await.has_status(201).is_replay());
    stop(sidecar).await;
}

#[tokio::test]
async fn requests_that_are_not_completed_are_named_and_not_touched() {
    let service = Service::new().await;
    let mut command_line = sidecar(&format!("http://{}", service.address));
    let sidecar = Sidecar::run(command_line.env("ONCEGATE_STORE", "memory:")).await;
    let mut client = sidecar.connect().await;
    client.send(&post_as("ann", "/slow", "{}")).await;
    let mut wire = service.accept().await;
    wire.message().await;
    let tag = Scope::caller("header:authorization", b"Bearer ann").caller_tag().to_string();
    let forget = ["forget", "--caller", &tag, "--reason", "r"];
    let output = command(&sidecar, &forget).await;
    let text = said(&output);
    assert!(output.status.code() == Some(1), "{text}");
    assert!(
        text.contains("in-progress  POST /slow  0 steps") && text.contains("run the command again"),
        "{text}"
    );
    wire.send(CARD).await;
    client.message().await.has_status(201);
    // It was completed after the walk, so it still replays.
    assert!(sidecar.ask(&post_as("ann", "/slow", "{}")).await.has_status(201).is_replay());
    let done = in_json(&sidecar, &forget).await;
    assert_eq!((&done["forgotten"], &done["open"]), (&1.into(), &json!([])));
    sidecar.ask(&post_as("ann", "/slow", "{}")).await.is_problem(422, "replay-unavailable");
}

#[tokio::test]
async fn only_an_operator_of_this_sidecar_may_change_content() {
    let service = Service::new().await.answers(CARD);
    let ring = Keys::new(&[1]);
    let sidecar = start(&service, "memory:", &[&ring.flag()]).await;
    sidecar.ask(&post_as("ann", "/a", "{}")).await.has_status(201);
    let listed = admin(&sidecar, "/v1/keys").await.json();
    let record = listed["records"][0]["record"].as_str().unwrap().to_owned();
    let tag = Scope::caller("header:authorization", b"Bearer ann").caller_tag().to_string();
    let one = format!("/v1/keys/{record}/forget");
    let requests = [
        ("/v1/keys/forget", json!({"caller": tag, "reason": "r"})),
        (&*one, json!({"reason": "r"})),
        ("/v1/seal/reseal", json!({})),
        ("/v1/compact", json!({})),
    ];
    for (path, body) in &requests {
        let from_elsewhere = post_admin(&sidecar, path, &["Origin: https://evil.example"], body).await;
        assert_eq!(from_elsewhere.status(), 403, "{path}");
        let as_form =
            request("POST", path, &["Content-Type: text/plain", "Connection: close"], &body.to_string());
        let as_form = as_form.replacen("Host: orders.test", "Host: localhost", 1);
        assert_eq!(ask(sidecar.admin, &as_form).await.status(), 415, "{path}");
    }
    for (path, body, why) in [
        ("/v1/keys/forget", json!({"caller": "ann", "reason": "r"}), "caller: "),
        ("/v1/keys/forget", json!({"caller": tag}), "reason"),
        ("/v1/keys/forget", json!({"caller": tag, "reason": " "}), "reason: it is empty"),
        ("/v1/keys/forget", json!({"caller": tag, "reason": "r", "all": true}), "unknown field"),
        ("/v1/keys/forget", json!({"caller": tag, "reason": "r", "limit": 101}), "limit: 101"),
        ("/v1/seal/reseal", json!({"limit": 0}), "limit: 0"),
        ("/v1/seal/reseal", json!({"cursor": "x"}), "cursor: "),
        (&one, json!({}), "reason"),
    ] {
        let refused = post_admin(&sidecar, path, &[], &body).await;
        assert!(refused.has_status(400).text().contains(why), "{path} {body}: {}", refused.text());
    }
    assert!(sidecar.ask(&post_as("ann", "/a", "{}")).await.has_status(201).is_replay());
    stop(sidecar).await;
    // With a token, nothing without it.
    let directory = tempfile::tempdir().unwrap();
    let token = directory.path().join("token");
    std::fs::write(&token, "a-token-of-an-admin").unwrap();
    let flag = format!("--admin-token-file={}", token.display());
    let guarded = start(&service, "memory:", &[&ring.flag(), &flag]).await;
    for (path, body) in &requests {
        assert_eq!(post_admin(&guarded, path, &[], body).await.status(), 401, "{path}");
        let wrong = post_admin(&guarded, path, &["Authorization: Bearer wrong"], body).await;
        assert_eq!(wrong.status(), 401, "{path}");
    }
    stop(guarded).await;
    // Wrong usage.
    for (args, why) in [
        (&["forget", "--reason", "r"][..], "--caller <TAG>"),
        (&["forget", "--caller", "00", "--caller-fields", "-", "--reason", "r"], "cannot be used with"),
        (&["forget", "--caller", "0011223344556677"], "--reason"),
        (&["reseal", "--rate", "0"], "--rate 0: from 1 to 10000 is allowed"),
    ] {
        let output = oncegate(args).await;
        assert!(
            output.status.code() == Some(2) && said(&output).contains(why),
            "{args:?}: {}",
            said(&output)
        );
    }
}
