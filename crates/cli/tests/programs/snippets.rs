//! The programs on the page "How to retry", as a customer runs them: unchanged, except for the address.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use oncegate_testkit::until;
use tokio::process::Command;
use tokio::sync::watch;

use crate::support::{Service, Sidecar, Wire, ask, request, within};

/// The languages of the programs: the mark on the page, the file, and the command.
const LANGUAGES: [(&str, &str, &str); 3] =
    [("sh", "retry.sh", "sh"), ("js", "retry.mjs", "node"), ("python", "retry.py", "python3")];

/// Writes the programs for these flags into directories of their own, for a sidecar with this address.
async fn write_programs(directory: &Path, flags: &[&str], address: SocketAddr) {
    let mut rules = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    rules.args(["rules", "--to=http://127.0.0.1:1"]).args(flags);
    let output = within("the page", rules.output()).await.unwrap();
    assert!(output.status.success(), "{output:?}");
    let page = String::from_utf8(output.stdout).unwrap();
    for (mark, file, _) in LANGUAGES {
        let (_, rest) = page.split_once(&format!("```{mark}\n")).unwrap_or_else(|| panic!("{mark}: {page}"));
        let (program, _) = rest.split_once("\n```\n").unwrap();
        assert!(program.contains("https://api.example.com/"), "{program}");
        let program = program.replace("https://api.example.com", &format!("http://{address}"));
        std::fs::create_dir(directory.join(mark)).unwrap();
        std::fs::write(directory.join(mark).join(file), program).unwrap();
    }
}

/// Runs one of the programs in its directory.
async fn run(directory: &Path, (mark, file, command): (&str, &str, &str)) -> Output {
    let mut command = Command::new(command);
    command.arg(file).current_dir(directory.join(mark)).stdin(Stdio::null());
    end(command).await
}

/// Runs a command to its end.
async fn end(mut command: Command) -> Output {
    for name in ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"] {
        command.env_remove(name);
    }
    within("the end of the program", command.kill_on_drop(true).output()).await.unwrap()
}

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A service that answers each request by its number, from 0; `None` closes the connection. Until `open`, it answers none.
async fn service(
    open: watch::Receiver<bool>,
    response: impl Fn(usize) -> Option<&'static str> + Send + Sync + 'static,
) -> (SocketAddr, Arc<AtomicUsize>) {
    let service = Service::new().await;
    let (address, requests) = (service.address, Arc::new(AtomicUsize::new(0)));
    let (listener, count, response) = (service.into_listener(), requests.clone(), Arc::new(response));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (count, response, mut open) = (count.clone(), response.clone(), open.clone());
            tokio::spawn(async move {
                let mut wire = Wire::new(stream);
                while let Some(head) = wire.try_head().await {
                    wire.body(head).await;
                    let number = count.fetch_add(1, Ordering::SeqCst);
                    if open.wait_for(|open| *open).await.is_err() {
                        return;
                    }
                    let Some(response) = response(number) else { return };
                    if wire.try_send(response).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    (address, requests)
}

const MADE: &str = "HTTP/1.1 201 Created\r\nContent-Length: 4\r\n\r\nmade";
/// A refusal of a sidecar in front of another API, as the service passes it on.
const PASSED_ON: &str = concat!(
    "HTTP/1.1 503 Unavailable\r\nContent-Type: application/problem+json\r\nStripe-Should-Retry: false\r\n",
    "Transient-Error: false\r\nIdempotency-Status: refused; problem=outcome-unknown; retry=stop\r\n",
    "Content-Length: 107\r\n\r\n",
    r#"{"type":"urn:oncegate:problem:outcome-unknown","code":"outcome_unknown","status":500,"retry":"stop","x":""}"#,
);
/// Refusals of a sidecar without their fields.
const IN_PROGRESS: &str = "HTTP/1.1 409 Conflict\r\nContent-Length: 20\r\n\r\n{\"retry\":\"same-key\"}";
const UNKNOWN: &str = "HTTP/1.1 500 Broken\r\nContent-Length: 16\r\n\r\n{\"retry\":\"stop\"}";
const FAILED: &str = "HTTP/1.1 500 Broken\r\nContent-Length: 6\r\n\r\nbroken";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_of_the_page_execute_an_intent_once() {
    let per_language = LANGUAGES.len();
    for (flags, expected) in [
        (&[][..], per_language),
        (&["--key-syntax=strict", "--require-key=true"], per_language),
        (&["--key-format=uuid"], per_language),
        (&["--key-format=ulid"], per_language),
        (&["--key-format=pattern:[0-9a-f]{20}", "--require-key=true"], per_language),
        (&["--scope=required-header:authorization"], per_language),
        (&["--scope=required-header:x-tenant,required-cookie:sid"], per_language),
        (&["--profile=aws", "--methods=DELETE", "--scope=single-tenant", "--require-key=true"], per_language),
        // The bodies are equal, and so are the callers.
        (&["--scope=required-header:x-tenant", "--natural-key=/item,/customer/id", "--require-key=true"], 1),
        (&["--profile=stripe"], per_language),
        (&["--profile=acp"], per_language),
        (&["--profile=paypal", "--require-key=true"], per_language),
        (&["--profile=adyen", "--require-key=true"], per_language),
        (&["--profile=square"], per_language),
        (&["--profile=oasis", "--require-key=true"], per_language),
        (&["--profile=aws", "--scope=single-tenant", "--require-key=true"], per_language),
        (&["--profile=webhook", "--scope=single-tenant"], per_language),
        (&["--profile=classic", "--require-key=true"], per_language),
    ] {
        let service = Service::new().await.answers(MADE);
        let sidecar = Sidecar::start(service.address, flags).await;
        let directory = tempfile::tempdir().unwrap();
        write_programs(directory.path(), flags, sidecar.address).await;
        for language in LANGUAGES {
            for _ in 0..2 {
                let output = run(directory.path(), language).await;
                assert!(output.status.success() && out(&output) == "made", "{flags:?}: {output:?}");
            }
        }
        assert_eq!(service.requests(), expected, "{flags:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_of_the_page_wait_for_a_request_in_progress() {
    for profile in ["ietf", "stripe", "adyen", "square", "paypal"] {
        let flags = [&format!("--profile={profile}"), "--wait=0s"];
        let (open, is_open) = watch::channel(false);
        let (address, requests) = service(is_open, |_| Some(MADE)).await;
        let sidecar = Sidecar::start(address, &flags).await;
        let directory = tempfile::tempdir().unwrap();
        write_programs(directory.path(), &flags[..1], sidecar.address).await;
        let directory = directory.path();
        let first = async {
            let [shell, node, python] = LANGUAGES.map(|language| run(directory, language));
            tokio::join!(shell, node, python)
        };
        let second = async {
            until("each program has sent its request", async || {
                requests.load(Ordering::SeqCst) == LANGUAGES.len()
            })
            .await;
            let [shell, node, python] = LANGUAGES.map(|language| run(directory, language));
            let question = request("GET", "/metrics", &[], "").replace("orders.test", "localhost");
            let released = async {
                until("each program has been refused", async || {
                    let metrics = ask(sidecar.admin, &question).await;
                    let is_refused = |line: &str| {
                        let count = line.rsplit(' ').next().and_then(|count| count.parse::<usize>().ok());
                        line.contains("request-in-progress")
                            && count.is_some_and(|count| count >= LANGUAGES.len())
                    };
                    metrics.text().lines().any(is_refused)
                })
                .await;
                open.send(true).unwrap();
            };
            tokio::join!(shell, node, python, released)
        };
        let ((a, b, c), (d, e, f, ())) = tokio::join!(first, second);
        for output in [a, b, c, d, e, f] {
            assert!(output.status.success() && out(&output) == "made", "{profile}: {output:?}");
        }
        assert_eq!(requests.load(Ordering::SeqCst), LANGUAGES.len(), "{profile}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_of_the_page_repeat_only_what_a_retry_can_overcome() {
    let lost: fn(usize) -> Option<&'static str> = |_| None;
    let lost_once = |number| (number > 0).then_some(MADE);
    let failed = |_| Some(FAILED);
    let failed_once = |number| Some(if number > 0 { MADE } else { FAILED });
    for (profile, response, count, ends) in [
        // The outcome is unknown.
        ("ietf", lost, 1, "stopped with status 502"),
        ("stripe", lost, 1, "stopped with status 502"),
        ("adyen", lost, 1, "stopped with status 502"),
        ("paypal", lost, 1, "stopped with status 502"),
        // The key is free.
        ("oasis", lost_once, 2, "made"),
        ("acp", lost_once, 2, "made"),
        ("oasis", failed_once, 2, "made"),
        // The error is kept.
        ("ietf", failed, 1, "stopped with status 500"),
        ("stripe", failed, 1, "stopped with status 500"),
        ("square", failed, 1, "stopped with status 500"),
    ] {
        let flag = format!("--profile={profile}");
        let flags = [flag.as_str(), "--scope=single-tenant"];
        for language in LANGUAGES {
            let (_open, is_open) = watch::channel(true);
            let (address, requests) = service(is_open, response).await;
            let sidecar = Sidecar::start(address, &flags).await;
            let directory = tempfile::tempdir().unwrap();
            write_programs(directory.path(), &flags, sidecar.address).await;
            let output = run(directory.path(), language).await;
            let said = format!("{}{}", out(&output), errors(&output)).to_lowercase();
            assert_eq!(output.status.success(), ends == "made", "{profile} {language:?}: {output:?}");
            assert!(said.contains(ends), "{profile} {language:?}: {said}");
            assert_eq!(requests.load(Ordering::SeqCst), count, "{profile} {language:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_of_the_page_that_start_at_once_make_one_key() {
    for language in LANGUAGES {
        let service = Service::new().await.answers(MADE);
        let sidecar = Sidecar::start(service.address, &[]).await;
        let directory = tempfile::tempdir().unwrap();
        write_programs(directory.path(), &[], sidecar.address).await;
        let path = directory.path();
        let runs = tokio::join!(run(path, language), run(path, language), run(path, language));
        let runs = [runs.0, runs.1, runs.2];
        assert!(runs.iter().any(|output| out(output) == "made"), "{language:?}: {runs:?}");
        assert_eq!(service.requests(), 1, "{language:?}: {runs:?}");
    }
}

/// Another API behind the service may be behind a sidecar, too, and its refusals are in bodies that the service passes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_of_the_page_do_not_take_the_advice_of_another_api() {
    for flags in [
        &["--profile=oasis"][..],
        &["--server-errors=release"],
        &["--profile=acp"],
        // It is free to use the field of the profile, too.
        &["--profile=stripe", "--server-errors=release"],
        &["--profile=adyen", "--server-errors=release"],
    ] {
        for language in LANGUAGES {
            let (_open, is_open) = watch::channel(true);
            let (address, requests) =
                service(is_open, |number| Some(if number > 0 { MADE } else { PASSED_ON })).await;
            let flags = [flags, &["--scope=single-tenant"]].concat();
            let sidecar = Sidecar::start(address, &flags).await;
            let directory = tempfile::tempdir().unwrap();
            write_programs(directory.path(), &flags, sidecar.address).await;
            let output = run(directory.path(), language).await;
            assert!(output.status.success() && out(&output) == "made", "{flags:?} {language:?}: {output:?}");
            assert_eq!(requests.load(Ordering::SeqCst), 2, "{flags:?} {language:?}");
        }
    }
}

/// Without the field that marks refusals, a program that takes a refusal for the response ends early, and its user makes a
/// new key while the first request runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_of_the_page_keep_on_if_a_gateway_removes_the_fields() {
    let directory = tempfile::tempdir().unwrap();
    let responses = |number| [IN_PROGRESS, UNKNOWN, MADE].get(number).copied();
    for language in LANGUAGES {
        let (_open, is_open) = watch::channel(true);
        // The gateway in front of the sidecar.
        let (address, requests) = service(is_open, responses).await;
        let directory = directory.path().join(language.0);
        std::fs::create_dir(&directory).unwrap();
        write_programs(&directory, &[], address).await;
        let output = run(&directory, language).await;
        assert!(output.status.success() && out(&output) == "made", "{language:?}: {output:?}");
        assert_eq!(requests.load(Ordering::SeqCst), 3, "{language:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_of_the_page_keep_the_key_next_to_them() {
    for language in LANGUAGES {
        let (mark, file, interpreter) = language;
        let service = Service::new().await.answers(MADE);
        let sidecar = Sidecar::start(service.address, &[]).await;
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        write_programs(&root, &[], sidecar.address).await;
        let place = root.join("elsewhere");
        std::fs::create_dir(&place).unwrap();
        let program = root.join(mark).join(file);
        // The extension tells Node.js the kind of a program.
        std::os::unix::fs::symlink(&program, place.join(format!("link-{file}"))).unwrap();
        let key = root.join(mark).join("order-1.key");
        let from_elsewhere = |arguments: &[&str]| {
            let mut command = Command::new(interpreter);
            command.args(arguments).current_dir(&place).stdin(Stdio::null());
            command
        };

        // Without a file there is no place that another run would find.
        let piped = if mark == "js" { &["--input-type=module", "-"][..] } else { &[] };
        let mut piped = from_elsewhere(piped);
        piped.stdin(std::fs::File::open(&program).unwrap());
        let output = end(piped).await;
        assert!(!output.status.success(), "{language:?}: {output:?}");
        assert_eq!(service.requests(), 0, "{language:?}: {output:?}");

        let absolute = program.to_str().unwrap();
        for argument in [absolute, &format!("../{mark}/{file}"), &format!("./link-{file}")] {
            let output = end(from_elsewhere(&[argument])).await;
            assert!(output.status.success() && out(&output) == "made", "{argument}: {output:?}");
            assert!(errors(&output).contains(key.to_str().unwrap()), "{argument}: {output:?}");
        }
        run(&root, language).await;
        assert_eq!(service.requests(), 1, "{language:?}");
        assert!(key.exists(), "{language:?}");
        let left: Vec<_> =
            std::fs::read_dir(&place).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, [format!("link-{file}").as_str()], "{language:?}");
    }
}

/// The pauses of a program are noted instead of made.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_of_the_page_wait_an_hour_at_most() {
    let directory = tempfile::tempdir().unwrap();
    let patch = directory.path();
    let write = |name: &str, text: &str| std::fs::write(patch.join(name), text).unwrap();
    write("sleep", "#!/bin/sh\necho \"pause: $1\" >&2\n");
    std::fs::set_permissions(patch.join("sleep"), std::fs::Permissions::from_mode(0o755)).unwrap();
    write(
        "sitecustomize.py",
        "import sys, time\ntime.sleep = lambda pause: print('pause:', round(pause), file=sys.stderr)\n",
    );
    write(
        "patch.mjs",
        concat!(
            "const real = setTimeout;\n",
            "globalThis.setTimeout = (then, pause, ...rest) => {\n",
            // fetch has timers, too.
            "  if (!new Error().stack.split('\\n')[2].includes('retry.mjs')) return real(then, pause, ...rest);\n",
            "  console.error('pause:', Math.round(pause / 1000));\n",
            "  setImmediate(then);\n",
            "};\n",
        ),
    );
    let searched = format!("{}:{}", patch.display(), std::env::var("PATH").unwrap());
    // The pause after the first response; the shell has no calendar.
    for (number, retry_after, pause, in_shell) in [
        (0, "7", 7, 7),
        (1, "3601", 3600, 3600),
        (2, "99999999999", 3600, 3600),
        (3, "99999999999999999999999999999999", 3600, 3600),
        (4, "Fri, 31 Dec 9999 23:59:59 GMT", 3600, 1),
        (5, "Sun, 06 Nov 1994 08:49:37 GMT", 1, 1),
        (6, "Thu, 32 Dec 99999 25:61:61 GMT", 1, 1),
        (7, "Thu, 31 Dec 99999999999999 23:59:59 GMT", 1, 1),
        (8, "soon", 1, 1),
        (9, "-5", 1, 1),
    ] {
        for language in LANGUAGES {
            let (mark, file, interpreter) = language;
            let busy =
                format!("HTTP/1.1 503 Busy\r\nRetry-After: {retry_after}\r\nContent-Length: 0\r\n\r\n");
            let busy: &'static str = busy.leak();
            let (_open, is_open) = watch::channel(true);
            let (address, requests) =
                service(is_open, move |number| Some(if number > 0 { MADE } else { busy })).await;
            let programs = patch.join(format!("{number}-{mark}"));
            std::fs::create_dir(&programs).unwrap();
            write_programs(&programs, &[], address).await;
            let mut command = Command::new(interpreter);
            command.arg(programs.join(mark).join(file)).current_dir(patch).stdin(Stdio::null());
            command.env("PATH", &searched);
            command.env("PYTHONPATH", patch);
            command.env("NODE_OPTIONS", format!("--import=file://{}", patch.join("patch.mjs").display()));
            let output = end(command).await;
            assert!(output.status.success() && out(&output) == "made", "{retry_after} {mark}: {output:?}");
            assert_eq!(requests.load(Ordering::SeqCst), 2, "{retry_after} {mark}");
            let said = errors(&output);
            let pauses: Vec<_> = said.lines().filter_map(|line| line.strip_prefix("pause: ")).collect();
            let pause = if mark == "sh" { in_shell } else { pause };
            assert_eq!(pauses, ["0", &pause.to_string()], "{retry_after} {mark}");
        }
    }
}
