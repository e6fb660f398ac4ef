//! `oncegate call` as a script uses it: a process, its exit code, and the state after a kill.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{Message, Process, Service, Sidecar, Wire, within};
use oncegate_testkit::until;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

/// The end of a call.
#[derive(Debug)]
struct End {
    code: Option<i32>,
    out: String,
    words: String,
}

fn call(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.arg("call").args(args).env_remove("ONCEGATE_JOURNAL").env_remove("ONCEGATE_CALL_USER");
    command.stdin(Stdio::null()).kill_on_drop(true);
    command
}

async fn end_of(mut command: Command) -> End {
    let output = command.stdout(Stdio::piped()).stderr(Stdio::piped()).output();
    let output = within("the end of a call", output).await.unwrap();
    End {
        code: output.status.code(),
        out: String::from_utf8(output.stdout).unwrap(),
        words: String::from_utf8(output.stderr).unwrap(),
    }
}

async fn ended(args: &[&str]) -> End {
    end_of(call(args)).await
}

/// The requests that a service received. The service answers each with the result of a function; `None` closes the connection.
#[derive(Clone, Default)]
struct Received(Arc<Mutex<Vec<Message>>>);

impl Received {
    fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    fn field(&self, at: usize, name: &str) -> Option<String> {
        self.0.lock().unwrap()[at].head.get(name).map(str::to_owned)
    }

    fn body(&self, at: usize) -> String {
        String::from_utf8(self.0.lock().unwrap()[at].body.clone()).unwrap()
    }
}

async fn service(
    response: impl Fn(usize) -> Option<String> + Send + Sync + 'static,
) -> (SocketAddr, Received) {
    let service = Service::new().await;
    let (address, seen) = (service.address, Received::default());
    let (listener, kept, response) = (service.into_listener(), seen.clone(), Arc::new(response));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (kept, response) = (kept.clone(), Arc::clone(&response));
            tokio::spawn(async move {
                let mut wire = Wire::new(stream);
                while let Some(head) = wire.try_head().await {
                    let message = wire.body(head).await;
                    let number = {
                        let mut all = kept.0.lock().unwrap();
                        all.push(message);
                        all.len() - 1
                    };
                    match response(number) {
                        Some(response) => {
                            if wire.try_send(response).await.is_err() {
                                return;
                            }
                        }
                        None => return,
                    }
                }
            });
        }
    });
    (address, seen)
}

fn response(status: &str, fields: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n{fields}\r\n{body}", body.len())
}

async fn always(status: &'static str, fields: &'static str, body: &'static str) -> (SocketAddr, Received) {
    service(move |_| Some(response(status, fields, body))).await
}

const PROBLEM: &str = "Content-Type: application/problem+json\r\n";

const AWAY: &str = "Idempotency-Status: refused; problem=store-unavailable; retry=same-key\r\n";

/// The status, header fields and body of the response; the flags; the exit code and the output.
type Row = (&'static str, &'static str, &'static str, &'static [&'static str], i32, &'static str);

/// Covers every exit code.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exit_codes_separate_definite_ends_from_the_others() {
    let unknown = r#"{"type":"urn:oncegate:problem:outcome-unknown","retry":"stop"}"#;
    let gone = r#"{"type":"urn:oncegate:problem:replay-unavailable","retry":"stop"}"#;
    let table: &[Row] = &[
        ("201 Created", "", "paid", &[], 0, "paid"),
        ("303 See Other", "Location: /x\r\n", "", &[], 0, ""),
        ("301 Moved Permanently", "Location: https://x.example/\r\n", "moved", &[], 5, "moved"),
        ("402 Payment Required", "", "no", &[], 1, "no"),
        ("401 Unauthorized", "", "who", &[], 7, "who"),
        ("403 Forbidden", "", "no", &[], 7, "no"),
        ("404 Not Found", "", "where", &[], 7, "where"),
        ("405 Method Not Allowed", "", "how", &[], 7, "how"),
        ("413 Content Too Large", "", "much", &[], 7, "much"),
        ("426 Upgrade Required", "", "old", &[], 7, "old"),
        ("501 Not Implemented", "", "what", &[], 7, "what"),
        ("505 HTTP Version Not Supported", "", "old", &[], 7, "old"),
        ("511 Network Authentication Required", "", "who", &[], 7, "who"),
        ("308 Permanent Redirect", "Location: https://x.example/\r\n", "", &[], 7, ""),
        ("423 Locked", "", "locked", &[], 4, "locked"),
        ("422 Unprocessable", "transient-error: true\r\n", "later", &[], 4, "later"),
        ("422 Unprocessable", PROBLEM, r#"{"type":"x:key-reused"}"#, &[], 1, r#"{"type":"x:key-reused"}"#),
        ("429 Too Many", "", "later", &[], 3, "later"),
        ("503 Unavailable", "", "down", &[], 4, "down"),
        ("503 Unavailable", "Retry-After: 86400\r\n", "down", &["--attempts=9"], 4, "down"),
        ("500 Broken", "", "?", &[], 4, "?"),
        ("500 Broken", "Idempotent-Replayed: true\r\n", "?", &[], 5, "?"),
        ("409 Conflict", PROBLEM, unknown, &[], 5, unknown),
        ("409 Conflict", PROBLEM, gone, &[], 5, gone),
        ("503 Unavailable", "", "down", &["--plain"], 5, "down"),
        ("429 Too Many", "", "later", &["--plain"], 3, "later"),
        ("503 Unavailable", AWAY, "down", &["--plain"], 3, "down"),
        // Passed on by a service from an API that it called.
        ("500 Broken", AWAY, "?", &["--plain"], 5, "?"),
        ("201 Created", AWAY, "paid", &["--plain"], 0, "paid"),
        ("201 Created", AWAY, "paid", &[], 0, "paid"),
    ];
    for (status, fields, body, flags, code, out) in table {
        let (address, seen) = always(status, fields, body).await;
        let url = format!("http://{address}/payments");
        let mut args = vec!["POST", &url, "--json={}", "--retry=0"];
        if flags.contains(&"--attempts=9") {
            args.pop();
        }
        if !flags.contains(&"--plain") {
            args.push("--intent=order-123");
        }
        args.extend_from_slice(flags);
        let end = ended(&args).await;
        assert_eq!((end.code, end.out.as_str()), (Some(*code), *out), "{status} {flags:?}: {end:?}");
        assert_eq!(seen.count(), 1, "{status}");
        assert_eq!(end.words.is_empty(), *code == 0, "{end:?}");
    }

    // The connection ends without a response, or there is no service at all.
    let (address, seen) = service(|_| None).await;
    let url = format!("http://{address}/payments");
    let end = ended(&["POST", &url, "--intent=a", "--attempts=3", "--json={}"]).await;
    assert_eq!((end.code, seen.count()), (Some(4), 3), "{end:?}");
    assert_eq!(seen.field(0, "idempotency-key"), seen.field(2, "idempotency-key"));
    let unused = Service::new().await.address; // dropped, so nothing listens there
    let url = format!("http://{unused}/payments");
    let end = ended(&["POST", &url, "--intent=a", "--attempts=2", "--json={}"]).await;
    assert_eq!(end.code, Some(3), "{end:?}");
    assert!(end.words.contains("nothing happened"), "{end:?}");
}

/// The response to the first request is lost while the service works. The service's own refusal of a duplicate proves nothing
/// about the first request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_after_a_lost_response_is_not_definite_and_the_journal_keeps_the_intent() {
    const JSON: &str = "Content-Type: application/json\r\n";
    const ADYEN: &str = "Content-Type: application/json\r\ntransient-error: true\r\n";
    let duplicates = [
        ("422 Unprocessable", ADYEN, r#"{"status":422,"errorCode":"704","errorType":"validation"}"#),
        ("423 Locked", "", ""),
        ("422 Unprocessable", JSON, r#"{"name":"DUPLICATE_REQUEST_ID"}"#),
        ("400 Bad Request", JSON, r#"{"errors":[{"code":"IDEMPOTENCY_KEY_REUSED"}]}"#),
        ("422 Unprocessable", JSON, r#"{"code":"OURS_ALONE"}"#),
        ("400 Bad Request", "", ""),
        ("402 Payment Required", "", ""),
        ("401 Unauthorized", "", ""),
    ];
    for (status, fields, body) in duplicates {
        let runs = Arc::new(std::sync::atomic::AtomicBool::new(true));
        let still = Arc::clone(&runs);
        let (address, seen) = service(move |number| match number {
            0 => None,
            _ if still.load(std::sync::atomic::Ordering::SeqCst) => Some(response(status, fields, body)),
            _ => Some(response("201 Created", "", "paid")),
        })
        .await;
        let url = format!("http://{address}/payouts");
        let dir = tempfile::tempdir().unwrap();
        let journal = format!("--journal={}", dir.path().join("journal").display());
        let send = ["POST", &url, &journal, "--intent=payout-7", "--json={}", "--attempts=3"];
        let end = ended(&send).await;
        assert_eq!(end.code, Some(4), "{status} {body}: {end:?}");
        assert!(end.words.contains("may have happened"), "{end:?}");
        let list = ended(&["--list", &journal]).await;
        assert!(list.out.contains("may have happened"), "{status} {body}: {list:?}");
        // The operation was done, and the same call fetches its response.
        runs.store(false, std::sync::atomic::Ordering::SeqCst);
        let end = ended(&send).await;
        assert_eq!((end.code, end.out.as_str()), (Some(0), "paid"), "{status}: {end:?}");
        let all = seen.0.lock().unwrap();
        let key = all[0].head.get("idempotency-key").map(str::to_owned);
        assert!(all.iter().all(|one| one.head.get("idempotency-key").map(str::to_owned) == key));
    }
}

/// An expired token is no definite refusal: with a new token the same call is sent under the same key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rejected_call_stays_in_the_journal_until_its_credentials_are_fixed() {
    let (address, seen) = service(|number| match number {
        0 | 1 => Some(response("401 Unauthorized", "", "")),
        _ => Some(response("201 Created", "", "paid")),
    })
    .await;
    let url = format!("http://{address}/payouts");
    let dir = tempfile::tempdir().unwrap();
    let journal = format!("--journal={}", dir.path().join("journal").display());
    let send = |token: &'static str| {
        let mut args: Vec<String> =
            ["POST", &url, &journal, "--intent=payout-7", "--json={}"].map(String::from).into();
        args.extend(["-H".to_owned(), format!("X-Api-Key: {token}")]);
        async move { ended(&args.iter().map(String::as_str).collect::<Vec<_>>()).await }
    };
    let end = send("hush-expired").await;
    assert!(
        end.code == Some(7) && end.words.contains("fix the reason") && end.words.contains("credentials"),
        "{end:?}"
    );
    let file = fs::read_dir(dir.path().join("journal")).unwrap().next().unwrap().unwrap().path();
    assert!(!fs::read_to_string(&file).unwrap().contains("hush"));
    let list = ended(&["--list", &journal]).await;
    assert!(list.out.contains("nothing happened"), "{list:?}");
    let resumed = ended(&["--resume", &journal, "-H", "X-Api-Key: hush-expired"]).await;
    assert_eq!(resumed.code, Some(7), "{resumed:?}");
    let end = send("hush-new").await;
    assert_eq!((end.code, end.out.as_str(), seen.count()), (Some(0), "paid", 3), "{end:?}");
    assert_eq!(seen.field(2, "x-api-key").as_deref(), Some("hush-new"));
    assert_eq!(seen.field(2, "idempotency-key"), seen.field(0, "idempotency-key"));
    assert!(!file.exists());
}

/// Another method or body under the key of an intent of which nothing happened is no doubt: the message says what to do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_call_whose_first_form_did_not_happen_is_wrong_usage() {
    let (turned_away, seen) = always("404 Not Found", "", "").await;
    // A port on which no process listens.
    let refused = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for (address, code) in [(turned_away, 7), (refused, 3)] {
        let url = format!("http://{address}/orders");
        let dir = tempfile::tempdir().unwrap();
        let journal = format!("--journal={}", dir.path().join("journal").display());
        let send = |method, body| {
            ["call", method, &url, &journal, "--intent=k2", body, "--attempts=1"].map(str::to_owned)
        };
        let ended =
            async |args: [String; 7]| ended(&args[1..].iter().map(String::as_str).collect::<Vec<_>>()).await;
        let first = ended(send("PUT", "--json={}")).await;
        assert_eq!(first.code, Some(code), "{first:?}");
        let file = fs::read_dir(dir.path().join("journal")).unwrap().next().unwrap().unwrap().path();
        for changed in [send("POST", "--json={}"), send("PUT", "--json=[]")] {
            let end = ended(changed).await;
            assert_eq!(end.code, Some(2), "{end:?}");
            for words in
                ["nothing was sent", "nothing happened", "another --intent", &file.display().to_string()]
            {
                assert!(end.words.contains(words), "{words}: {end:?}");
            }
            assert!(!end.words.contains("may have"), "{end:?}");
        }
        // The remedies of the message.
        let other =
            ended(send("POST", "--json={}").map(|arg| arg.replace("--intent=k2", "--intent=k3"))).await;
        assert_eq!(other.code, Some(code), "{other:?}");
        fs::remove_file(&file).unwrap();
        assert_eq!(ended(send("POST", "--json={}")).await.code, Some(code));
    }
    assert_eq!(seen.count(), 3);
}

/// The operation stays done, even after the service has forgotten the key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_done_intent_is_not_sent_again_from_the_same_journal() {
    for lifetime in ["--key-lifetime=1ms", "--plain"] {
        let (address, seen) = always("201 Created", "", "paid").await;
        let url = format!("http://{address}/payouts");
        let dir = tempfile::tempdir().unwrap();
        let journal = format!("--journal={}", dir.path().join("journal").display());
        let send = ["POST", &url, &journal, "--intent=payout-7", "--json={}", lifetime];
        assert_eq!(ended(&send).await.code, Some(0));
        let again = ended(&send).await;
        assert!(again.code == Some(6) && again.words.contains("done before"), "{again:?}");
        let mut other = send;
        other[4] = "--json={\"cents\":5}";
        let end = ended(&other).await;
        assert!(end.code == Some(5) && end.words.contains("another request"), "{end:?}");
        assert_eq!(seen.count(), 1, "{lifetime}");
        // It does not block other intents.
        assert_eq!(ended(&["--list", &journal]).await.out, "");
        assert_eq!(ended(&["--resume", &journal]).await.code, Some(0));
        // Only a journal that forgets lets the intent run again.
        let dir = tempfile::tempdir().unwrap();
        let journal = format!("--journal={}", dir.path().join("journal").display());
        let send = ["POST", &url, &journal, "--intent=payout-7", "--json={}", lifetime, "--keep-finished=0s"];
        for _ in 0..2 {
            assert_eq!(ended(&send).await.code, Some(0));
        }
        assert_eq!(seen.count(), 3);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_usage_sends_nothing() {
    let (address, seen) = always("201 Created", "", "").await;
    let url = format!("http://{address}/payments");
    let with_login = format!("http://u:p@{address}/");
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing/response");
    let output = format!("--output={}", missing.display());
    let journal = dir.path().join("journal");
    let fresh = format!("--journal={}", journal.display());
    let table: &[&[&str]] = &[
        &[],
        &["POST"],
        &[&url],
        &["post", &url],
        &["POST", "/payments"],
        &["POST", "ftp://host/"],
        &["POST", &with_login],
        &["POST", &url, "--key="],
        &["POST", &url, "--key=a", "--intent=b"],
        &["POST", &url, "--intent="],
        &["POST", &url, "--key=with space"],
        &["POST", &url, "-H", "Idempotency-Key: a"],
        &["POST", &url, "-H", "Content-Length: 3"],
        &["POST", &url, "-H", "no colon"],
        &["POST", &url, "-H", "@/nowhere/at/all"],
        &["POST", &url, "--json=@/nowhere/at/all"],
        &["POST", &url, "--json={}", "-d", "a=b"],
        &["POST", &url, "-u", "nobody"],
        &["POST", &url, "--attempts=0"],
        &["POST", &url, "--max-time=0"],
        &["POST", &url, "--max-time=1.5.2"],
        &["-X", "POST", &url],
        &["POST", &url, "--plain", "--intent=payout-7"],
        &["POST", &url, "--concurrency=2"],
        &["POST", &url, &fresh, "--json=@/nowhere/at/all"],
        &["POST", &url, &fresh, "--cacert=/nowhere/at/all"],
        &["POST", &url, &fresh, &output],
        &["POST", &url, "--cacert=/nowhere/at/all"],
        &["POST", &url, &output],
        &["--resume"],
        &["--list"],
        &["--list", "--journal=/nowhere/at/all"],
        &["--resume", "--journal=/nowhere/at/all"],
        &["--resume", "--journal=/proc/none", "POST", &url],
        &["POST", &url, "--journal=/proc/none"],
    ];
    for args in table {
        let end = ended(args).await;
        assert_eq!(end.code, Some(2), "{args:?}: {end:?}");
        assert!(!end.words.is_empty() && end.out.is_empty(), "{args:?}: {end:?}");
    }
    assert_eq!(seen.count(), 0);
    assert!(!journal.exists(), "wrong flags create no directory");
    let end = ended(&["-X", "POST", &url]).await;
    assert!(end.words.contains("the method comes first"), "{end:?}");
    assert_eq!(ended(&["POST", &url, "-m", "1.5"]).await.code, Some(0));
}

/// The help and the documentation page agree on every exit code.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_help_lists_the_exit_codes_of_the_documentation() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guides/calling.md");
    let page = fs::read_to_string(page).unwrap();
    let one_line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let help = one_line(&ended(&["--help"]).await.out);
    let section = page.split("\n## ").find(|section| section.starts_with("Exit codes")).unwrap();
    let rows: Vec<Vec<&str>> = section
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| code "))
        .map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect())
        .collect();
    assert_eq!(rows.iter().map(|row| row[0]).collect::<Vec<_>>(), ["0", "1", "2", "3", "4", "5", "6", "7"]);
    for row in rows {
        let expected = format!("{} {} -> {}", row[0], row[1], row[2]);
        assert!(help.contains(&expected), "{expected}: {help}");
    }
    let section = one_line(section);
    let order = section.split("in the order ").nth(1).unwrap().split('.').next().unwrap();
    assert!(
        help.contains(&format!("the worst of several ends counts, in the order {order}.")),
        "{order}: {help}"
    );
}

/// A later intent may depend on an earlier one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resume_sends_the_intents_of_a_journal_one_at_a_time_oldest_first() {
    let (address, seen) = service(|number| {
        // The first intents take longest.
        if number >= 8 {
            std::thread::sleep(Duration::from_millis(40_u64.saturating_sub(number as u64)));
        }
        let status = if number < 8 { "503 Unavailable" } else { "201 Created" };
        Some(response(status, "", ""))
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let journal = format!("--journal={}", dir.path().join("journal").display());
    for number in 0..8 {
        let (url, intent) = (format!("http://{address}/{number}"), format!("--intent=order-{number}"));
        let end = ended(&["POST", &url, &intent, &journal, "--attempts=1"]).await;
        assert_eq!(end.code, Some(4), "{end:?}");
    }
    let end = ended(&["--resume", &journal]).await;
    assert_eq!((end.code, seen.count()), (Some(0), 16), "{end:?}");
    let targets: Vec<_> = seen.0.lock().unwrap().iter().map(|message| message.head.line.clone()).collect();
    assert_eq!(targets[8..], targets[..8]);
}

/// The same doubt ends with the same code, from the call and from `--resume`: the old credentials bring certainty.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_outcome_under_other_credentials_can_be_resolved() {
    let (address, seen) = service(|number| (number > 0).then(|| response("201 Created", "", "paid"))).await;
    let url = format!("http://{address}/payouts");
    let dir = tempfile::tempdir().unwrap();
    let journal = format!("--journal={}", dir.path().join("journal").display());
    let send = ["POST", &url, &journal, "--intent=7", "--json={}", "--attempts=1"];
    let with = |token: &'static str| [&send[..], &["-H", token]].concat();
    assert_eq!(ended(&with("X-Api-Key: old")).await.code, Some(4));
    let resume = ["--resume", journal.as_str(), "-H", "X-Api-Key: new"];
    for args in [&with("X-Api-Key: new")[..], &send[..], &resume[..]] {
        let end = ended(args).await;
        assert!(end.code == Some(4) && end.words.contains("credentials"), "{args:?}: {end:?}");
        assert!(args == send || end.words.contains("--other-credentials"), "{args:?}: {end:?}");
    }
    assert_eq!(seen.count(), 1);
    let end = ended(&[&with("X-Api-Key: new")[..], &["--other-credentials"]].concat()).await;
    assert_eq!((end.code, seen.count()), (Some(0), 2), "{end:?}");
}

/// A journal of another user cannot be read: it cannot be used, and the program reports nothing else about it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_sends_nothing_if_its_journal_belongs_to_another_user() {
    use std::os::unix::fs::PermissionsExt as _;

    let (address, seen) = always("503 Unavailable", "", "").await;
    let url = format!("http://{address}/payouts");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let journal = format!("--journal={}", path.display());
    let send = ["POST", &url, &journal, "--intent=7", "--json={}", "--attempts=1"];
    assert_eq!(ended(&send).await.code, Some(4));
    let file = fs::read_dir(&path).unwrap().next().unwrap().unwrap().path();
    let other = ["POST", &url, &journal, "--intent=8", "--json={}", "--attempts=1"];
    let (list, resume) = (["--list", journal.as_str()], ["--resume", journal.as_str()]);
    // The directory, the file, and the exit codes of the same call, another call, `--list` and `--resume`.
    for (of_directory, of_file, codes) in
        [(0o000, 0o600, [2, 2, 2, 2]), (0o500, 0o600, [4, 2, 0, 4]), (0o700, 0o000, [4, 4, 5, 4])]
    {
        fs::set_permissions(&file, fs::Permissions::from_mode(of_file)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(of_directory)).unwrap();
        for (args, code) in [&send[..], &other, &list, &resume].into_iter().zip(codes) {
            let sent = seen.count();
            let end = end_of(without_override(args)).await;
            assert!(code != 2 || seen.count() == sent, "{args:?}");
            assert_eq!(end.code, Some(code), "{of_directory:o} {of_file:o} {args:?}: {end:?}");
            let is_said = end.words.contains("Permission denied") || end.out.contains("Permission denied");
            assert!(code != 2 || is_said, "{end:?}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    }
}

/// A call that file permissions bind, even if the tests run as root.
fn without_override(args: &[&str]) -> Command {
    if !rustix::process::geteuid().is_root() {
        return call(args);
    }
    let mut command = Command::new("setpriv");
    command.arg("--bounding-set=-dac_override,-dac_read_search").arg(env!("CARGO_BIN_EXE_oncegate"));
    command.arg("call").args(args).env_remove("ONCEGATE_JOURNAL").env_remove("ONCEGATE_CALL_USER");
    command.stdin(Stdio::null()).kill_on_drop(true);
    command
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn common_curl_flags_work() {
    let (address, seen) = always("201 Created", "X-Note: café\r\n", "paid").await;
    let url = format!("http://{address}/payments?x=1");
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    fs::write(path("body"), "{\"a\":\r\n1}\n").unwrap();
    fs::write(path("fields"), "X-One: 1\n\nAuthorization: Bearer hush\n").unwrap();

    let json = format!("--json=@{}", path("body"));
    let fields = format!("@{}", path("fields"));
    let out = path("out");
    fs::write(&out, "something much longer than the response").unwrap();
    let end =
        ended(&["POST", &url, "--intent=7", &json, "-H", &fields, "-H", "X-Two: 2", "-o", &out, "-i"]).await;
    assert_eq!((end.code, end.out.as_str(), end.words.as_str()), (Some(0), "", ""), "{end:?}");
    let written = fs::read_to_string(&out).unwrap();
    assert!(
        written.starts_with("HTTP/1.1 201 Created\r\n") && written.ends_with("\r\n\r\npaid"),
        "{written}"
    );
    assert_eq!(seen.0.lock().unwrap()[0].head.line, "POST /payments?x=1 HTTP/1.1");
    assert_eq!(seen.body(0), "{\"a\":\r\n1}\n");
    for (name, value) in [
        ("content-type", "application/json"),
        ("x-one", "1"),
        ("x-two", "2"),
        ("authorization", "Bearer hush"),
        ("user-agent", concat!("oncegate/", env!("CARGO_PKG_VERSION"))),
    ] {
        assert_eq!(seen.field(0, name).as_deref(), Some(value), "{name}");
    }

    let data = format!("@{}", path("body"));
    ended(&["POST", &url, "--intent=7", "-d", "x=1", "-d", &data]).await;
    assert_eq!(seen.body(1), "x=1&{\"a\":1}");
    assert_eq!(seen.field(1, "content-type").as_deref(), Some("application/x-www-form-urlencoded"));
    assert_eq!(seen.field(0, "idempotency-key"), seen.field(1, "idempotency-key"));

    let mut command = call(&["PUT", &url, "--key=my-key", "--carrier=X-Key", "--quoted", "--data-binary=-"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"raw\n").await.unwrap();
    assert!(within("the end of a call", child.wait()).await.unwrap().success());
    assert_eq!((seen.body(2).as_str(), seen.field(2, "x-key").as_deref()), ("raw\n", Some("\"my-key\"")));

    // Without a key the program makes a new one each time, and prints it.
    let new = ended(&["POST", &url, "-d", "x"]).await;
    let key = seen.field(3, "idempotency-key").unwrap();
    assert!(new.words.contains(&key), "{new:?}");
    ended(&["POST", &url, "-d", "x"]).await;
    assert_ne!(seen.field(4, "idempotency-key").unwrap(), key);
    ended(&["POST", &url, "--intent=8", "-d", "x"]).await;
    assert_ne!(seen.field(5, "idempotency-key"), seen.field(0, "idempotency-key"));
    // Safe methods carry no key, and a service without keys gets none.
    for args in [&["GET", &url][..], &["POST", &url, "--plain", "--json={}"]] {
        let end = ended(args).await;
        assert_eq!((end.code, end.words.as_str()), (Some(0), ""));
    }
    assert_eq!((seen.field(6, "idempotency-key"), seen.field(7, "idempotency-key")), (None, None));

    let verbose = ended(&["POST", &url, "-v", "--intent=7", "-H", &fields, "--json={}"]).await;
    assert!(verbose.words.contains("< HTTP/1.1 201") && !verbose.words.contains("hush"), "{verbose:?}");

    // The operation is done, but its response cannot be printed.
    let mut command = call(&["POST", &url, "--intent=7", "--json={}"]);
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut child = command.stdout(full).stderr(Stdio::null()).spawn().unwrap();
    assert_eq!(within("the end of a call", child.wait()).await.unwrap().code(), Some(6));
}

/// A cron job whose log is on a full disk depends on the exit code.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exit_codes_are_right_even_if_no_output_can_be_written() {
    let full = || fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let code = async |mut command: Command| {
        let mut child = command.stdout(Stdio::null()).stderr(full()).spawn().unwrap();
        within("the end of a command", child.wait()).await.unwrap().code()
    };
    let (address, _) = service(|number| match number {
        0 => Some(response("400 Bad Request", "", "")),
        1 | 2 => None,
        _ => Some(response("201 Created", "", "paid")),
    })
    .await;
    let url = format!("http://{address}/payouts");
    let dir = tempfile::tempdir().unwrap();
    let journal = format!("--journal={}", dir.path().join("journal").display());
    assert_eq!(code(call(&["POST", &url, "--json=1", "--attempts=1"])).await, Some(1));
    let doubt = ["POST", &url, &journal, "--intent=7", "--json=1", "--attempts=1", "-v"];
    assert_eq!(code(call(&doubt)).await, Some(4));
    assert_eq!(code(call(&["--resume", &journal, "--attempts=1"])).await, Some(4));
    assert_eq!(code(call(&["--list", "--journal=/nowhere"])).await, Some(2));
    let mut list = call(&["--list", &journal]);
    let mut child = list.stdout(full()).stderr(full()).spawn().unwrap();
    assert_eq!(within("the end of a list", child.wait()).await.unwrap().code(), Some(6));
    assert_eq!(code(call(&["--resume", &journal])).await, Some(0));
    let mut keys = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    keys.args(["keys", "ls", "--admin=127.0.0.1:1"]);
    assert_eq!(code(keys).await, Some(3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_journal_resumes_unanswered_intents_and_stores_no_credentials() {
    let (address, seen) = service(|number| match number {
        0 | 1 => None,
        2 => Some(response("401 Unauthorized", "", "")),
        _ => Some(response("201 Created", "", "paid")),
    })
    .await;
    let url = format!("http://{address}/payouts");
    let dir = tempfile::tempdir().unwrap();
    let journal = format!("--journal={}", dir.path().join("journal").display());
    let send = ["POST", &url, &journal, "--intent=payout-7", "--json={\"payout\":7}", "--attempts=2"];
    let mut with_user = send.to_vec();
    with_user.extend(["-u", "cron:hush"]);
    assert_eq!(ended(&with_user).await.code, Some(4));
    let list = ended(&["--list", &journal]).await;
    assert!(
        list.code == Some(0) && list.out.contains("may have happened") && list.out.contains("/payouts"),
        "{list:?}"
    );
    let file = fs::read_dir(dir.path().join("journal")).unwrap().next().unwrap().unwrap().path();
    let written = fs::read_to_string(&file).unwrap();
    assert!(!written.contains("hush") && !written.contains("Y3JvbjpodXNo"), "{written}");

    // Another request under the same key; no credentials; a rejected token; and at last success.
    let other = ended(&["POST", &url, &journal, "--intent=payout-7", "--json={\"payout\":70}"]).await;
    assert_eq!(other.code, Some(5), "{other:?}");
    let without = ended(&["--resume", &journal]).await;
    assert!(without.code == Some(4) && without.words.contains("authorization"), "{without:?}");
    let another = ended(&["--resume", &journal, "-u", "cron:other"]).await;
    assert!(another.code == Some(4) && another.words.contains("--other-credentials"), "{another:?}");
    assert_eq!(seen.count(), 2);
    let mut resume = call(&["--resume", &journal]);
    resume.env("ONCEGATE_CALL_USER", "cron:hush");
    assert_eq!(end_of(resume).await.code, Some(4), "a 401 proves nothing about the first request");
    let resumed = ended(&["--resume", &journal, "-u", "cron:hush"]).await;
    assert_eq!(resumed.code, Some(0), "{resumed:?}");
    assert_eq!(seen.count(), 4);
    for name in ["idempotency-key", "authorization", "content-type"] {
        assert_eq!(seen.field(3, name), seen.field(0, name), "{name}");
    }
    assert_eq!(seen.body(3), seen.body(0));
    assert!(!file.exists());
    let nothing = ended(&["--resume", &journal]).await;
    assert_eq!((nothing.code, nothing.out, nothing.words), (Some(0), String::new(), String::new()));

    // An unreadable entry is reported and kept.
    fs::write(&file, &written[..written.len() - 1]).unwrap();
    for args in [["--resume", &journal], ["--list", &journal]] {
        let end = ended(&args).await;
        assert_eq!(end.code, Some(5), "{end:?}");
        assert!(format!("{}{}", end.out, end.words).contains(&file.display().to_string()), "{end:?}");
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), &written[..written.len() - 1]);
    assert_eq!(seen.count(), 4);
}

/// Killed while the service works, and resumed against a sidecar that was killed, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_killed_and_resumed_takes_effect_once() {
    let dir = tempfile::tempdir().unwrap();
    let journal = format!("--journal={}", dir.path().join("journal").display());
    let store = format!("--store={}", dir.path().join("records").display());
    let service = Service::new().await;
    let mut sidecar = Sidecar::start(service.address, &[&store]).await;
    for round in 0..3 {
        let url = format!("http://{}/payouts", sidecar.address);
        let intent = format!("--intent=payout-{round}");
        let mut dies = Process::start(&mut call(&["POST", &url, &journal, &intent, "--json={}"]));
        let mut wire = service.accept().await;
        let head = wire.head().await;
        wire.body(head).await;
        dies.kill().await; // paid, but the response is lost
        wire.send(response("201 Created", "Connection: close\r\n", "paid")).await;

        let listed = ended(&["--list", &journal]).await;
        assert_eq!(listed.out.lines().count(), 1, "{listed:?}");
        // The sidecar has the response when the call is resumed, and not before.
        let ask = format!("http://{}/payouts", sidecar.address);
        until("the response is stored", async || {
            let end = ended(&["POST", &ask, &intent, "--json={}", "--attempts=1"]).await;
            end.code == Some(0)
        })
        .await;
        if round == 2 {
            // The sidecar starts again at the same address, with the same records.
            sidecar.process.kill().await;
            let listen = format!("--listen={}", sidecar.address);
            let refused = ended(&["--resume", &journal, "--attempts=1"]).await;
            assert_eq!(refused.code, Some(4), "{refused:?}");
            let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
            let to = format!("--to=http://{}", service.address);
            command.args(["proxy", "--admin=127.0.0.1:0", "--service=tests", &listen, &to, &store]);
            sidecar = Sidecar::run(&mut command).await;
        }
        let resumed = ended(&["--resume", &journal]).await;
        assert!(resumed.code == Some(0) && resumed.words.contains("replayed"), "{resumed:?}");
        assert_eq!(ended(&["--list", &journal]).await.out, "");
    }
    service.is_not_called().await;
}

/// The example: a cron job that is killed again and again. Its sidecar stands in front of a bank that has no keys.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cron_job_that_is_killed_again_and_again_pays_each_payout_once() {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/cron-payout");
    let dir = tempfile::tempdir().unwrap();
    let (ledger, store) = (dir.path().join("ledger.jsonl"), dir.path().join("records"));
    let mut bank = Command::new("python3");
    let mut bank = Process::start(bank.arg(example.join("bank.py")).arg("0").arg(&ledger).arg("0.1"));
    let line = bank.first_line().await;
    let address: SocketAddr = line.rsplit("http://").next().unwrap().parse().unwrap();
    let sidecar = Sidecar::start(address, &[&format!("--store={}", store.display())]).await;

    let payouts: Vec<String> = (1..=12)
        .map(|number| match number {
            5 => format!("{number},closed,300"),
            _ => format!("{number},DE{number},{}", number * 100),
        })
        .collect();
    fs::write(dir.path().join("due.csv"), payouts.join("\n") + "\n").unwrap();
    let lines = |name: &str| -> Vec<String> {
        let path: PathBuf = dir.path().join(name);
        fs::read_to_string(path).unwrap_or_default().lines().map(str::to_owned).collect()
    };
    let job = || {
        let mut job = Command::new("sh");
        job.arg(example.join("pay.sh")).arg(dir.path()).env("ONCEGATE", env!("CARGO_BIN_EXE_oncegate"));
        job.env("BANK", format!("http://{}", sidecar.address)).stdin(Stdio::null()).kill_on_drop(true);
        job.as_std_mut().process_group(0); // a kill ends the call with the job, as a power cut does
        job
    };
    let mut kills = 0;
    // The job is killed each time the ledger has grown by one: while the bank works, or just after it has answered.
    loop {
        let paid = lines("ledger.jsonl").len();
        let mut run = job().stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let group = rustix::process::Pid::from_raw(run.id().unwrap().try_into().unwrap()).unwrap();
        let mut ended = None;
        until("the job makes progress", async || {
            ended = run.try_wait().unwrap();
            ended.is_some() || lines("ledger.jsonl").len() > paid
        })
        .await;
        if let Some(status) = ended {
            assert!(status.success(), "{status}");
            break;
        }
        tokio::time::sleep(Duration::from_millis(kills * 17 % 130)).await; // at varying moments around the response
        let _it_may_have_ended = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        within("the end of the job", run.wait()).await.unwrap();
        kills += 1;
        assert!(kills < 60, "the job does not end");
    }
    assert!(kills >= 8, "{kills} kills");
    let mut paid = lines("ledger.jsonl");
    paid.sort();
    let before = paid.len();
    paid.dedup();
    assert_eq!((paid.len(), before), (11, 11), "each once: {paid:?}");
    assert_eq!(lines("done.csv").len(), 11);
    assert_eq!(lines("refused.csv"), ["5,closed,300"]);
    assert!(lines("unknown.csv").is_empty());
    let left = fs::read_dir(dir.path().join("journal")).unwrap().map(|file| file.unwrap().file_name());
    assert_eq!(left.filter(|name| name != "finished").count(), 0);
}

/// Runs the example while the service turns every request away, and again after the repair. Returns the numbers of payouts that
/// were paid and refused.
async fn payouts_after_a_repair(status: &'static str, sidecar: Option<&[&str]>) -> (usize, usize) {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/cron-payout");
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("due.csv"), "7,DE02,500\n8,DE44,1250\n9,closed,300\n").unwrap();
    let broken = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let still = Arc::clone(&broken);
    let (mut address, seen) = service(move |number| match number {
        _ if still.load(std::sync::atomic::Ordering::SeqCst) => Some(response(status, "", "")),
        _ if number % 2 == 0 => Some(response("201 Created", "", "paid")),
        _ => Some(response("422 Unprocessable", "", "closed")),
    })
    .await;
    let sidecar = match sidecar {
        Some(flags) => Some(Sidecar::start(address, flags).await),
        None => None,
    };
    if let Some(sidecar) = &sidecar {
        address = sidecar.address;
    }
    let run = async || {
        let mut job = Command::new("sh");
        job.arg(example.join("pay.sh")).arg(dir.path()).env("ONCEGATE", env!("CARGO_BIN_EXE_oncegate"));
        job.env("BANK", format!("http://{address}")).stdin(Stdio::null()).kill_on_drop(true);
        end_of(job).await
    };
    let end = run().await;
    assert_eq!(end.code, Some(1), "{end:?}");
    assert!(end.words.contains("turned away"), "{end:?}");
    for list in ["done.csv", "refused.csv", "unknown.csv"] {
        assert!(!dir.path().join(list).exists(), "{list}");
    }
    assert!(seen.count() >= 3);
    broken.store(false, std::sync::atomic::Ordering::SeqCst);
    let end = run().await;
    assert_eq!(end.code, Some(0), "{end:?}");
    let lines = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap_or_default().lines().count();
    assert_eq!(lines("unknown.csv"), 0);
    (lines("done.csv"), lines("refused.csv"))
}

/// With an expired token every payout is rejected. The payouts stay due, the run reports why, and the next run pays them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cron_job_with_an_expired_token_keeps_its_payouts() {
    let (paid, refused) = payouts_after_a_repair("401 Unauthorized", None).await;
    assert_eq!(paid + refused, 3);
    assert!(paid > 0);
}

/// The sidecar keeps a 404, unless it is among the statuses that free the key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_a_sidecar_a_payout_is_paid_after_a_404_only_if_it_frees_the_key() {
    let free = ["--release-statuses", "404,405,411,413,417,426,431,501,505,511"];
    let (paid, refused) = payouts_after_a_repair("404 Not Found", Some(&free)).await;
    assert_eq!(paid + refused, 3);
    assert!(paid > 0);
    assert_eq!(payouts_after_a_repair("404 Not Found", Some(&[])).await, (0, 3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_tls_a_call_is_sent_only_to_a_trusted_service() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    for name in ["theirs", "other"] {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        fs::write(path(name), made.cert.pem()).unwrap();
        fs::write(path(&format!("{name}.key")), made.signing_key.serialize_pem()).unwrap();
    }
    fs::write(path("empty"), "").unwrap();
    let (address, seen) = always("201 Created", "", "paid").await;
    let sidecar =
        Sidecar::start(address, &["--tls-cert", &path("theirs"), "--tls-key", &path("theirs.key")]).await;
    let url = format!("https://localhost:{}/payments", sidecar.address.port());
    for (cacert, code) in [(None, 3), (Some("other"), 3), (Some("empty"), 2), (Some("theirs"), 0)] {
        assert_eq!(seen.count(), 0);
        let flag = cacert.map(|name| format!("--cacert={}", path(name)));
        let mut args = vec!["POST", &url, "--intent=7", "--json={}", "--attempts=1"];
        args.extend(flag.as_deref());
        let end = ended(&args).await;
        assert_eq!(end.code, Some(code), "{cacert:?}: {end:?}");
    }
    assert_eq!(seen.count(), 1);
}

/// Several calls run at once, as when a job starts before the previous one has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_concurrent_calls_of_one_intent_take_effect_once() {
    let (address, seen) = always("201 Created", "", "paid").await;
    let sidecar = Sidecar::start(address, &[]).await;
    let url = format!("http://{}/payouts", sidecar.address);
    let dir = tempfile::tempdir().unwrap();
    let journal = format!("--journal={}", dir.path().join("journal").display());
    let mut calls = tokio::task::JoinSet::new();
    for number in 0..12 {
        // Half of the calls run without the journal and so without its lock: only the key keeps them apart.
        let mut command = call(&["POST", &url, "--intent=payout-7", "--json={}", "--attempts=20"]);
        if number % 2 == 0 {
            command.arg(&journal);
        }
        calls.spawn(end_of(command));
    }
    while let Some(end) = calls.join_next().await {
        let end = end.unwrap();
        // A call that finds the journal locked for longer than it waits tries again later.
        assert!(end.code == Some(0) && end.out == "paid" || end.code == Some(4), "{end:?}");
    }
    assert_eq!(seen.count(), 1);
    assert_eq!(ended(&["--resume", &journal]).await.code, Some(0));
    assert_eq!(seen.count(), 1);
}

/// The payment was made, and its response was too large to keep. A refusal in the words of an API must not tell the caller that
/// nothing happened, because a corrected request has a new key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_payment_whose_response_was_not_kept_is_never_reported_as_refused() {
    for (profile, links) in ["ietf", "stripe", "acp", "paypal", "adyen", "classic"]
        .into_iter()
        .flat_map(|p| [(p, false), (p, true)])
    {
        let large = || Some(response("201 Created", "", &"x".repeat(4096)));
        let (address, seen) = service(move |_| large()).await;
        let mut flags = vec!["--profile", profile, "--scope", "single-tenant", "--max-response-body", "1KiB"];
        if links {
            flags.extend(["--problem-base-url", "https://developer.example/retry.html#"]);
        }
        let sidecar = Sidecar::start(address, &flags).await;
        let url = format!("http://{}/payments", sidecar.address);
        let field = if profile == "paypal" { "PayPal-Request-Id" } else { "Idempotency-Key" };
        let key = "01890a5d-ac96-774b-bcce-b302099a8057";
        let args = ["POST", &url, "--key", key, "--carrier", field, "--json={}", "--retry=0"];
        assert_eq!(ended(&args).await.code, Some(0), "{profile}");
        let end = ended(&args).await;
        assert_eq!((end.code, seen.count()), (Some(5), 1), "{profile} {links}: {end:?}");

        // The service is away: nothing happened, and that is certain in every shape.
        drop(sidecar);
        let unused = Service::new().await.address;
        let sidecar = Sidecar::start(unused, &flags).await;
        let url = format!("http://{}/payments", sidecar.address);
        let args = ["POST", &url, "--key", key, "--carrier", field, "--json={}", "--retry=0"];
        let end = ended(&args).await;
        assert_eq!(end.code, Some(3), "{profile} {links}: {end:?}");
    }
}

/// The entry of an intent is encrypted. Without its key it is neither sent nor lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sealed_journal_reveals_nothing_and_waits_for_its_key() {
    use oncegate_seal::SealKey;

    let dir = tempfile::tempdir().unwrap();
    let key_file = |name: &str, n: u8| {
        let path = dir.path().join(name);
        fs::write(&path, format!("{}\n", *SealKey::from_bytes([n; 32]).to_secret_text())).unwrap();
        format!("--journal-key-file={}", path.display())
    };
    let (right, wrong) = (key_file("right", 1), key_file("wrong", 2));
    let away = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let still = Arc::clone(&away);
    let (address, seen) = service(move |_| {
        let is_away = still.load(std::sync::atomic::Ordering::SeqCst);
        (!is_away).then(|| response("201 Created", "", "paid"))
    })
    .await;
    let path = dir.path().join("journal");
    let journal = format!("--journal={}", path.display());
    let url = format!("http://{address}/payouts");
    let args =
        ["POST", &url, "--intent=payout-7", "--json={\"iban\":\"secret-iban\"}", "--attempts=1", &journal];
    let end = ended(&[&args[..], &[&right]].concat()).await;
    assert_eq!(end.code, Some(4), "{end:?}");
    let entries = || {
        let files = fs::read_dir(&path).unwrap().map(|file| file.unwrap().path());
        files.filter(|file| file.extension().is_some_and(|end| end == "intent")).collect::<Vec<_>>()
    };
    let stored = fs::read(&entries()[0]).unwrap();
    for secret in ["secret-iban", "payouts", "127.0.0.1"] {
        assert!(!stored.windows(secret.len()).any(|part| part == secret.as_bytes()), "{secret}");
    }
    away.store(false, std::sync::atomic::Ordering::SeqCst);
    let id = SealKey::from_bytes([1; 32]).id().to_string();
    for flags in [&[&*wrong][..], &[]] {
        let list = ended(&[&["--list", &journal][..], flags].concat()).await;
        assert!(list.out.contains(&format!("is sealed with the key {id}")), "{list:?}");
        // The same intent, and all intents: the entry stays, and nothing is sent.
        for command in [&args[..], &["--resume", &journal]] {
            let end = ended(&[command, flags].concat()).await;
            assert_eq!(end.code, Some(4), "{end:?}");
            assert!(end.words.contains(&format!("is sealed with the key {id}")), "{end:?}");
        }
        assert_eq!(fs::read(&entries()[0]).unwrap(), stored);
    }
    assert_eq!(seen.count(), 1);
    let both = end_of({
        let mut command = call(&["--list", &journal, &right]);
        command.env("ONCEGATE_JOURNAL_KEYS", &*SealKey::from_bytes([1; 32]).to_secret_text());
        command
    })
    .await;
    assert!(both.code == Some(2) && both.words.contains("are both set"), "{both:?}");
    let bad = end_of({
        let mut command = call(&["--list", &journal]);
        command.env("ONCEGATE_JOURNAL_KEYS", "hunter2");
        command
    })
    .await;
    assert!(bad.code == Some(2) && !bad.words.contains("hunter2"), "{bad:?}");
    assert!(bad.words.contains("ONCEGATE_JOURNAL_KEYS: line 1 is not a key"), "{bad:?}");
    let end = end_of({
        let mut command = call(&["--resume", &journal]);
        command.env("ONCEGATE_JOURNAL_KEYS", &*SealKey::from_bytes([1; 32]).to_secret_text());
        command
    })
    .await;
    assert_eq!((end.code, seen.count(), entries().len()), (Some(0), 2, 0), "{end:?}");
    assert_eq!(seen.field(0, "idempotency-key"), seen.field(1, "idempotency-key"));
}
