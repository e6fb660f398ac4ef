//! The commands against an admin API on a socket.

use std::fs;

use clap::Parser;

use super::*;
use crate::admin::tests::{Sidecar, TOKEN};

#[derive(Parser, Debug)]
#[command(no_binary_name = true)]
struct Line {
    #[command(flatten)]
    keys: KeysArgs,
}

/// Runs a command line; returns its output or its failure.
async fn keys(sidecar: &Sidecar, line: &[&str]) -> Result<String, Failure> {
    let admin = sidecar.address.to_string();
    let env = |name: &str| match name {
        "ONCEGATE_ADMIN" => Some(admin.clone()),
        "USER" => Some("ada".to_owned()),
        _ => None,
    };
    run_with(line, env).await
}

/// The output of a command that fails.
async fn printed_before_failing(sidecar: &Sidecar, line: &[&str]) -> String {
    let admin = sidecar.address.to_string();
    let line = Line::try_parse_from(line).unwrap();
    let mut out = Vec::new();
    let env = |name: &str| (name == "ONCEGATE_ADMIN").then(|| admin.clone());
    execute(&line.keys, env, None, &mut out).await.unwrap_err();
    String::from_utf8(out).unwrap()
}

async fn run_with(line: &[&str], env: impl Fn(&str) -> Option<String>) -> Result<String, Failure> {
    let line = Line::try_parse_from(line).map_err(|error| Failure::Usage(error.to_string()))?;
    let mut out = Vec::new();
    execute(&line.keys, env, None, &mut out).await?;
    Ok(String::from_utf8(out).unwrap())
}

fn refused(result: Result<String, Failure>) -> String {
    match result {
        Err(Failure::Refused(words)) => words,
        other => panic!("{other:?}"),
    }
}

fn usage(result: Result<String, Failure>) -> String {
    match result {
        Err(Failure::Usage(words)) => words,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_listing_is_a_table() {
    let sidecar = Sidecar::start().await;
    assert_eq!(keys(&sidecar, &["ls"]).await.unwrap(), "no records\n");
    let unknown = sidecar.unknown(1, "POST /pay").await.to_string();
    let (busy, _) = sidecar.in_progress(2, "POST /refunds/\u{1b}[31m").await;
    let listed: Value = serde_json::from_str(&keys(&sidecar, &["ls", "--json"]).await.unwrap()).unwrap();
    let since = |place: usize| listed["records"][place]["changed_at"].as_str().unwrap();
    let (busy_since, unknown_since) = (since(0), since(1));
    assert_eq!(
        keys(&sidecar, &["ls"]).await.unwrap(),
        format!(
            "STATE        AGE  SINCE                     EXPIRES IN  ATTEMPTS  CALLER            OPERATION                 RECORD\n\
             in-progress  0s   {busy_since}  1h          1         0000000000000000  POST /refunds/\\u{{1b}}[31m  {busy}\n\
             unknown      0s   {unknown_since}  1h          1         0000000000000000  POST /pay                 {unknown}\n\
             2 records (1 in-progress, 1 unknown)\n"
        )
    );
    let one =
        keys(&sidecar, &["ls", "--state", "unknown", "--operation", "POST /p", "--min-age", "0s"]).await;
    assert_eq!(one.unwrap().lines().count(), 3);
    let newest = keys(&sidecar, &["ls", "--limit", "1"]).await.unwrap();
    assert!(newest.contains(&busy.to_string()) && !newest.contains(&unknown), "{newest}");
    assert!(newest.ends_with("2 records (1 in-progress, 1 unknown), the newest 1 are shown\n"), "{newest}");
    let page = keys(&sidecar, &["ls", "--order", "record", "--limit", "1"]).await.unwrap();
    let next = page.lines().last().unwrap().strip_prefix("there may be more: --cursor ").unwrap();
    assert_eq!(next, unknown);
    let rest = keys(&sidecar, &["ls", "--cursor", next]).await.unwrap();
    assert!(rest.contains("in-progress") && !rest.contains("unknown") && !rest.contains("more"), "{rest}");
    let json = keys(&sidecar, &["ls", "--json"]).await.unwrap();
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap()["records"].as_array().unwrap().len(), 2);

    // Pages of the store may be shorter than the listing.
    sidecar.page.store(1, std::sync::atomic::Ordering::SeqCst);
    let whole = keys(&sidecar, &["ls"]).await.unwrap();
    assert!(whole.lines().count() == 4 && !whole.contains("more"), "{whole}");
    let whole = keys(&sidecar, &["ls", "--order", "record"]).await.unwrap();
    assert!(whole.lines().count() == 3 && !whole.contains("more"), "{whole}");

    let words = usage(keys(&sidecar, &["ls", "--state", "unknwon"]).await);
    assert!(
        words.starts_with("--state: \"unknwon\" is not one of") && words.contains("did you mean `unknown`?"),
        "{words}"
    );
    assert!(usage(keys(&sidecar, &["ls", "--limit", "1001"]).await).contains("from 1 to 1000"));
}

#[tokio::test]
async fn a_record_is_shown_by_its_request_and_its_body_on_demand() {
    let sidecar = Sidecar::start().await;
    let body = b"line\n\x1b[31mred";
    sidecar.call("/pay", &[("idempotency-key", "k"), ("authorization", "Bearer s")], body).await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("caller");
    fs::write(&file, "Bearer s\n").unwrap();
    let caller = ["--key", "k", "--path", "/pay", "--caller-file", file.to_str().unwrap()];
    let shown = keys(&sidecar, &[&["find"], &caller[..]].concat()).await.unwrap();
    assert!(shown.contains("state           completed\n"), "{shown}");
    assert!(shown.contains("response        201, 13 bytes\n"), "{shown}");
    assert!(shown.contains("header          content-type: text/plain\n"), "{shown}");
    assert!(!shown.contains("red"), "{shown}");
    let with_body = keys(&sidecar, &[&["find", "--body"], &caller[..]].concat()).await.unwrap();
    assert!(with_body.ends_with("\nline\n\\u{1b}[31mred\n"), "{with_body}");

    let record = shown.lines().next().unwrap().strip_prefix("record          ").unwrap();
    assert_eq!(keys(&sidecar, &["show", record]).await.unwrap(), shown);
    assert_eq!(keys(&sidecar, &["show", record, "--body"]).await.unwrap(), with_body);
    let json = keys(&sidecar, &["--json", "show", record, "--body"]).await.unwrap();
    assert_eq!(serde_json::from_str::<Value>(&json).unwrap()["response"]["body"], "line\n\u{1b}[31mred");

    let sent = [("idempotency-key", "k"), ("host", "a.test"), ("x-tenant", "t"), ("cookie", "sid=s")];
    sidecar.call("/hosts", &sent, body).await;
    fs::write(&file, "X-Tenant: t\n\nCookie: sid=s\n").unwrap();
    let file = file.to_str().unwrap();
    let of_host = ["find", "--key", "k", "--path", "/hosts", "--host", "a.test", "--caller-fields", file];
    let found = keys(&sidecar, &of_host).await.unwrap();
    assert!(found.contains("state           completed\n"), "{found}");
    fs::write(file, "secret").unwrap();
    let words = usage(keys(&sidecar, &of_host).await);
    assert_eq!(words, "--caller-fields: a line is not \"Name: value\"");

    let words = refused(keys(&sidecar, &["find", "--key", "k", "--path", "/pay", "--anonymous"]).await);
    assert!(words.starts_with("There is no such record: "), "{words}");
    let words = usage(keys(&sidecar, &["find", "--key", "k", "--path", "/pay"]).await);
    assert!(
        words.starts_with(
            "on this route the field authorization tells callers apart: give --caller-file FILE"
        ) && words.contains("--anonymous")
            && !words.contains('{'),
        "{words}"
    );
    let words = refused(keys(&sidecar, &["find", "--key", "k", "--path", "/tenant"]).await);
    assert!(words.starts_with("There is no such record: "), "{words}");
    let words = usage(keys(&sidecar, &["show", "../audit"]).await);
    assert!(words.contains("\"../audit\" is not a record"), "{words}");
}

#[tokio::test]
async fn steps_have_a_line_each() {
    let sidecar = Sidecar::start().await;
    let owned = sidecar.in_progress(1, "order").await;
    sidecar.step(owned, 0, "charge\u{1b}[31m", br#"{"Ok":4111}"#).await;
    sidecar.step(owned, 1, "ship", b"\xff\x00").await;
    let record = owned.0.to_string();
    let shown = keys(&sidecar, &["show", &record]).await.unwrap();
    let lines = "step            charge\\u{1b}[31m, 11 bytes\nstep            ship, 2 bytes\n";
    assert!(shown.contains(lines) && !shown.contains("4111"), "{shown}");
    let shown = keys(&sidecar, &["show", &record, "--body"]).await.unwrap();
    assert!(shown.contains(r#", 11 bytes: {"Ok":4111}"#), "{shown}");
    assert!(shown.contains("ship, 2 bytes, in base64: /wA=\n"), "{shown}");

    // A released key with steps continues after them.
    let mut out = Vec::new();
    let view = serde_json::json!({ "record": "r", "state": "abandoned", "steps": [{ "name": "ship", "result_bytes": 2 }] });
    print::record(&view, "", false, &mut out).unwrap();
    let shown = String::from_utf8(out).unwrap();
    assert!(shown.contains("may go on after its last step"), "{shown}");
    assert!(!shown.contains("the next request executes"), "{shown}");
}

#[tokio::test]
async fn an_unknown_outcome_is_resolved_and_the_audit_trail_names_the_actor() {
    let sidecar = Sidecar::start().await;
    let [first, second, third] = [
        sidecar.unknown(1, "POST /pay").await.to_string(),
        sidecar.unknown(2, "POST /pay").await.to_string(),
        sidecar.unknown(3, "POST /pay").await.to_string(),
    ];
    let shown = keys(&sidecar, &["show", &first]).await.unwrap();
    let hint = format!(
        "oncegate keys resolve {first} --status 201 --header 'Content-Type: application/json' --body"
    );
    assert!(shown.contains(&hint), "{shown}");
    let admin = sidecar.address.to_string();
    let shown = keys(&sidecar, &["show", &first, "--admin", &admin]).await.unwrap();
    assert!(shown.contains(&format!("oncegate keys resolve --admin {admin} {first} --tombstone")), "{shown}");

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("response");
    fs::write(&file, b"\xff{}").unwrap();
    let body = format!("@{}", file.display());
    let line = [
        &["resolve", &first, "--status", "201", "--header", "Content-Type: application/json"][..],
        &["--header", "Location:/payments/7", "--body", &body, "--reason", "in the ledger"],
    ];
    assert_eq!(keys(&sidecar, &line.concat()).await.unwrap(), format!("{first}: unknown → completed\n"));
    let shown = keys(&sidecar, &["show", &first, "--body"]).await.unwrap();
    assert!(shown.contains("response        201, 3 bytes\n"), "{shown}");
    assert!(shown.contains("header          location: /payments/7\n"), "{shown}");
    assert!(shown.contains("in base64:\n/3t9\n"), "{shown}");

    let line = ["resolve", &second, "--tombstone", "--reason", "done", "--actor", "grace"];
    assert_eq!(keys(&sidecar, &line).await.unwrap(), format!("{second}: unknown → tombstone\n"));
    let line = ["resolve", &third, "--released", "--reason", "never sent"];
    assert_eq!(keys(&sidecar, &line).await.unwrap(), format!("{third}: unknown → released\n"));
    let words = refused(keys(&sidecar, &["resolve", &first, "--released", "--reason", "again"]).await);
    assert!(words.contains("resolve it with --amend") && words.contains(&first), "{words}");
    for (line, expected) in [
        (&["show", "2"][..], "\"2\" is not a record"),
        (&["ls", "--caller", "xyz"], "--caller: \"xyz\" is not a caller's tag"),
    ] {
        let words = usage(keys(&sidecar, line).await);
        assert!(words.starts_with(expected), "{words}");
    }

    let (busy, _) = sidecar.in_progress(4, "POST /pay").await;
    let line = ["release", &busy.to_string(), "--reason", "host burnt down"];
    assert!(refused(keys(&sidecar, &line).await).contains("release it with --force"));
    let forced = keys(&sidecar, &[&line[..], &["--force"]].concat()).await.unwrap();
    assert_eq!(forced, format!("{busy}: in-progress → released\n"));

    let trail = keys(&sidecar, &["audit"]).await.unwrap();
    let lines: Vec<_> = trail.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
    assert_eq!(lines[0], ["NUMBER", "WHEN", "WHO", "FROM", "TO", "RECORD", "WHY"]);
    assert_eq!(
        (lines[1][2], lines[1][4], &lines[1][6..]),
        ("ada", "released", &["host", "burnt", "down"][..])
    );
    assert_eq!(lines[3][2], "grace");
    assert_eq!(lines.len(), 5);
    let first = keys(&sidecar, &["audit", "--limit", "1"]).await.unwrap();
    assert!(first.ends_with("there are more: --before 4\n"), "{first}");
    assert_eq!(keys(&sidecar, &["audit", "--before", "2"]).await.unwrap().lines().count(), 2);
}

#[tokio::test]
async fn invalid_arguments_are_not_sent() {
    let sidecar = Sidecar::start().await;
    let id = sidecar.unknown(1, "POST /pay").await.to_string();
    for (line, expected) in [
        (&["resolve", &id, "--reason", "r"][..], "required"),
        (&["resolve", &id, "--status", "201", "--released", "--reason", "r"], "cannot be used with"),
        (&["resolve", &id, "--released", "--body", "x", "--reason", "r"], "cannot be used with"),
        (&["resolve", &id, "--tombstone", "--header", "a: b", "--reason", "r"], "cannot be used with"),
        (&["resolve", &id, "--released"], "--reason"),
        (
            &["resolve", &id, "--status", "201", "--header", "x", "--reason", "r"],
            "--header \"x\": write \"Name: value\", such as \"Location: /payments/7\"",
        ),
        (
            &["resolve", &id, "--status", "201", "--body", "@/nowhere", "--reason", "r"],
            "--body @/nowhere: No such file",
        ),
        (&["show"], "required"),
        (&["show", &id, "--key", "k"], "unexpected argument"),
        (&["find", "--path", "/pay"], "--key"),
        (&["find", "--key", "k", "--path", "/pay", "--anonymous", "--single-tenant"], "cannot be used with"),
        (&["ls", "--admin", "http://host/path"], "write only scheme, host and port"),
        (&["ls", "--admin", "ftp://host"], "the scheme must be http or https"),
        (&["ls", "--admin", "http://a b"], "write a URL such as"),
        (&["ls", "--token-file", "/nowhere"], "--token-file: /nowhere: No such file"),
    ] {
        let words = usage(keys(&sidecar, line).await);
        assert!(words.contains(expected), "{line:?}: {words}");
    }
    assert!(keys(&sidecar, &["audit"]).await.unwrap().starts_with("no entries"));
}

#[tokio::test]
async fn a_token_comes_from_a_file_or_the_environment() {
    let sidecar = Sidecar::with_token(Some(TOKEN)).await;
    let words = refused(keys(&sidecar, &["ls"]).await);
    assert!(words.starts_with("the admin token is missing; give it with --token-file FILE"), "{words}");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    fs::write(&file, format!("{TOKEN}\n")).unwrap();
    let line = ["ls", "--token-file", file.to_str().unwrap()];
    assert_eq!(keys(&sidecar, &line).await.unwrap(), "no records\n");
    let admin = format!("http://{}/", sidecar.address);
    let env = |name: &str| (name == "ONCEGATE_ADMIN_TOKEN").then(|| TOKEN.to_owned());
    assert_eq!(run_with(&["ls", "--admin", &admin], env).await.unwrap(), "no records\n");
}

#[tokio::test]
async fn an_unreachable_sidecar_differs_from_a_refusal() {
    let unreachable = |result| match result {
        Err(Failure::Unreachable(words)) => words,
        other => panic!("{other:?}"),
    };
    // Bound, so that no other program can use it, and not listening.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let unused = socket.local_addr().unwrap().to_string();
    let words = unreachable(run_with(&["ls", "--admin", &unused], |_| None).await);
    assert!(
        words.starts_with(&format!("cannot reach the sidecar at http://{unused} (--admin): client error (Connect): tcp connect error: Connection refused")),
        "{words}"
    );

    // An admin API of an unknown version.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let other = listener.local_addr().unwrap().to_string();
    let router = axum::Router::new().fallback(async || ([("oncegate-admin", "9")], "{\"n\":1}"));
    let served = tokio::spawn(async move { axum::serve(listener, router).await });
    for line in [&["ls"][..], &["show", "abcdef"], &["release", "abcdef", "--reason", "r"], &["audit"]] {
        let words = unreachable(run_with(&[line, &["--admin", &other]].concat(), |_| None).await);
        assert!(
            words.contains("this program does not understand its response (200 OK)"),
            "{line:?}: {words}"
        );
    }
    served.abort();

    // An address at which another program answers after the probe.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let other = listener.local_addr().unwrap().to_string();
    let livez = axum::routing::get(async || [("oncegate-admin", "1")]);
    let router = axum::Router::new().route("/livez", livez).fallback(async || "{\"records\":[]}");
    let served = tokio::spawn(async move { axum::serve(listener, router).await });
    let words =
        unreachable(run_with(&["release", "abcdef", "--reason", "r", "--admin", &other], |_| None).await);
    assert!(words.contains("another server did now (200 OK); if this command changes a record"), "{words}");
    served.abort();
}

#[tokio::test]
async fn a_record_is_found_by_the_beginning_of_its_identifier() {
    let sidecar = Sidecar::start().await;
    let first = sidecar.unknown(0x11, "POST /pay").await.to_string();
    let second = sidecar.unknown(0x12, "POST /pay").await.to_string();
    for (record, number) in [(&first, 1), (&second, 2)] {
        let shown = keys(&sidecar, &["show", &record[..8].to_ascii_uppercase()]).await.unwrap();
        assert!(shown.contains(record.as_str()), "{number}: {shown}");
    }
    let shown = keys(&sidecar, &["show", &format!("urn:oncegate:record:{first}")]).await.unwrap();
    assert!(shown.contains(first.as_str()) && !shown.contains("after abandoned"), "{shown}");
    let words = usage(keys(&sidecar, &["show", &first[..5]]).await);
    assert!(words.contains("the first 6 or more of them"), "{words}");
    let words = refused(keys(&sidecar, &["show", "abcdef"]).await);
    assert!(words.contains("No record begins with abcdef"), "{words}");
    let line = ["resolve", &first[..12], "--tombstone", "--reason", "done"];
    assert_eq!(keys(&sidecar, &line).await.unwrap(), format!("{first}: unknown → tombstone\n"));
}

#[tokio::test]
async fn on_a_terminal_nothing_is_changed_without_a_confirmation() {
    let sidecar = Sidecar::start().await;
    let record = sidecar.unknown(1, "POST /pay").await.to_string();
    let admin = sidecar.address.to_string();
    let asked = std::cell::RefCell::new(Vec::new());
    let run = async |line: &[&str], says: bool| {
        let line = Line::try_parse_from(line).unwrap();
        let confirm = |question: &str| {
            asked.borrow_mut().push(question.to_owned());
            Ok(says)
        };
        let env = |name: &str| (name == "ONCEGATE_ADMIN").then(|| admin.clone());
        let mut out = Vec::new();
        execute(&line.keys, env, Some(&confirm), &mut out).await.map(|()| String::from_utf8(out).unwrap())
    };
    let line = ["resolve", &record[..8], "--status", "201", "--reason", "in the ledger"];
    assert_eq!(refused(run(&line, false).await), "not confirmed; nothing was changed");
    let question = asked.borrow_mut().remove(0);
    assert!(question.starts_with(&format!("POST /pay: unknown for 0s, record {record}\n")), "{question}");
    assert!(
        question.contains("with the status 201; only an operator can change that later")
            && question.ends_with("? [y/N] "),
        "{question}"
    );
    assert!(keys(&sidecar, &["show", &record]).await.unwrap().contains("unknown"));
    let line = ["release", &record, "--reason", "never sent", "--yes"];
    assert!(run(&line, false).await.unwrap().ends_with("unknown → released\n"));
    assert!(asked.borrow().is_empty());
}

#[test]
fn a_word_for_a_shell_is_one_word() {
    assert_eq!(shell_quoted("http://127.0.0.1:9090"), "http://127.0.0.1:9090");
    assert_eq!(shell_quoted("my token"), "'my token'");
    assert_eq!(shell_quoted("it's"), r"'it'\''s'");
}

#[tokio::test]
async fn a_key_whose_record_cannot_be_read_was_used() {
    let sidecar = Sidecar::start().await;
    let none = refused(keys(&sidecar, &["find", "--key", "k"]).await);
    assert!(none.contains("never used"), "{none}");
    assert_eq!(refused(keys(&sidecar, &["find", "--key", "k", "--json"]).await), none);
    sidecar.call("/pay", &[("idempotency-key", "k"), ("authorization", "Bearer s")], b"x").await;
    let found: Value =
        serde_json::from_str(&keys(&sidecar, &["find", "--key", "k", "--json"]).await.unwrap()).unwrap();
    let id = found["records"][0]["record"].as_str().unwrap().to_owned();
    sidecar.unreadable.lock().unwrap().push(oncegate_core::RecordId::from_hex(&id).unwrap());
    for form in [&["find", "--key", "k"][..], &["find", "--key", "k", "--json"]] {
        let words = refused(keys(&sidecar, form).await);
        assert!(words.contains(&id) && words.contains("may have taken effect"), "{words}");
        assert!(!words.contains("never used"), "{words}");
    }
    let listed = keys(&sidecar, &["ls"]).await.unwrap();
    assert_eq!(listed, format!("no records that can be read\ncannot be read: {id}\n"));
}

#[tokio::test]
async fn records_that_cannot_be_read_are_found_on_later_pages() {
    let sidecar = Sidecar::start().await;
    let mut ids = Vec::new();
    for number in 1..=9 {
        ids.push(sidecar.unknown(number, "POST /pay").await);
    }
    sidecar.unreadable.lock().unwrap().extend([ids[6], ids[8]]);
    sidecar.page.store(2, std::sync::atomic::Ordering::SeqCst);
    let lines = format!("cannot be read: {}\ncannot be read: {}\n", ids[6], ids[8]);
    let named = keys(&sidecar, &["ls", "--unreadable"]).await.unwrap();
    assert_eq!(named, format!("{lines}9 records were read, to the end of the store: 2 cannot be read\n"));
    let json = keys(&sidecar, &["ls", "--unreadable", "--json"]).await.unwrap();
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["unreadable"], json!([ids[6].to_string(), ids[8].to_string()]));
    assert_eq!((&json["complete"], &json["read"]), (&true.into(), &9.into()));
    // Without the survey: the search goes on behind a cursor, and stops after a number of records.
    let cursor = ids[1].to_string();
    let part = ["ls", "--unreadable", "--max-read", "3", "--cursor", &cursor];
    let part = keys(&sidecar, &part).await.unwrap();
    assert_eq!(part, format!("4 records were read; there may be more: --unreadable --cursor {}\n", ids[5]));
    let rest = ["ls", "--unreadable", "--cursor", &ids[5].to_string()];
    let rest = keys(&sidecar, &rest).await.unwrap();
    assert_eq!(rest, format!("{lines}3 records were read, to the end of the store: 2 cannot be read\n"));
    let first = keys(&sidecar, &["ls", "--unreadable", "--limit", "1"]).await.unwrap();
    let more = format!("2 records were read; there may be more: --unreadable --cursor {}", ids[1]);
    assert_eq!(first, format!("{lines}{more}\n"));
    usage(keys(&sidecar, &["ls", "--unreadable", "--state", "unknown"]).await);
    assert_eq!(printed_before_failing(&sidecar, &["ls", "--unreadable", "--cursor", "zzz"]).await, "");
    usage(keys(&sidecar, &["ls", "--max-read", "3"]).await);
}
