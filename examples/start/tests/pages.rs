//! Does what the pages in `docs/start` say: the programs on them are the binaries of this package, the commands run in a shell
//! as they stand, and the lines that they show come out, each as often as it is shown.
//!
//! Five things differ from what a reader does: `cargo run` starts the program that is built already, `cargo install` checks
//! only its path, ports are replaced by free ones, instead of a reader the test waits until a program listens, and an order
//! that is published while the consumer still creates the stream is published again.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use oncegate_servers::{PostgresServer, free_port};

const MAX_LINES: usize = 60;
const TIMEOUT: Duration = Duration::from_secs(120);

/// Stands for cargo: the programs are built.
const CARGO: &str = r#"#!/bin/sh
case "$1 $2" in
"run --bin")
    program=$3; shift 3; [ "${1-}" != -- ] || shift
    [ "$program $#" = "messages 1" ] || exec "$PROGRAMS/$program" "$@"
    for attempt in 1 2 3 4 5 6 7 8 9; do
        "$PROGRAMS/$program" "$@" 2> messages.errors && exit
        grep -q StreamNotFound messages.errors || break
        sleep 0.2
    done
    cat messages.errors >&2; exit 1 ;;
"install --profile") test "$3 $4" = "dist --path" && exec test -f "$5/Cargo.toml" ;;
*) echo "unexpected: cargo $*" >&2; exit 2 ;;
esac
"#;

/// Waits until a program in the background listens on this port.
const LISTENING: &str =
    "for _ in {1..600}; do (: < /dev/tcp/127.0.0.1/PORT) 2> /dev/null && break; sleep 0.1; done\n";

struct Page {
    name: &'static str,
    text: String,
}

impl Page {
    fn read(name: &'static str) -> Self {
        let path = package().join("../../docs/start").join(name).with_extension("md");
        let text = fs::read_to_string(path).unwrap();
        assert!(text.lines().count() <= MAX_LINES, "{name}: more than {MAX_LINES} lines");
        Self { name, text }
    }

    /// The contents of the page's code blocks in this language.
    fn blocks(&self, language: &str) -> Vec<String> {
        let parts = self.text.split("\n```").skip(1).step_by(2);
        let blocks = parts.filter_map(|part| part.strip_prefix(language)?.strip_prefix('\n'));
        blocks.map(|block| format!("{block}\n")).collect()
    }

    /// The program on the page is this one, apart from the line that says what it is.
    fn shows(&self, program: &str) {
        let path = package().join("src/bin").join(program).with_extension("rs");
        let source = fs::read_to_string(path).unwrap();
        let (_, code) = source.split_once("\n\n").unwrap();
        assert_eq!(
            self.blocks("rust"),
            [code],
            "{}: the program differs from src/bin/{program}.rs",
            self.name
        );
    }

    /// Runs the commands in a directory of their own, and checks what they print.
    fn run(&self, ports: &[u16], database: Option<&PostgresServer>) {
        let dir = tempfile::tempdir().unwrap();
        let start = dir.path().join("examples/start");
        let programs = Path::new(env!("CARGO_BIN_EXE_axum")).parent().unwrap();
        fs::create_dir_all(&start).unwrap();
        fs::create_dir(dir.path().join("bin")).unwrap();
        symlink(package().join("../cron-payout"), dir.path().join("examples/cron-payout")).unwrap();
        symlink(package().join("../../crates"), dir.path().join("crates")).unwrap();
        symlink(programs.join("oncegate"), dir.path().join("bin/oncegate")).unwrap();
        let cargo = dir.path().join("bin/cargo");
        fs::write(&cargo, CARGO).unwrap();
        fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).unwrap();

        let log = dir.path().join("log");
        let output = fs::File::create(&log).unwrap();
        let path = format!("{}:{}", dir.path().join("bin").display(), std::env::var("PATH").unwrap());
        let mut command = Command::new("bash");
        command.args(["-euc", &self.script(ports)]).current_dir(&start).stdin(Stdio::piped());
        command.stdout(output.try_clone().unwrap()).stderr(output);
        command
            .env("PATH", path)
            .env("PROGRAMS", programs)
            .process_group(0)
            .env("ONCEGATE_ADMIN", "127.0.0.1:0");
        if let Some(database) = database {
            command.env("DATABASE_URL", database.url());
        }
        let mut shell = command.spawn().unwrap();
        let shown = self.blocks("text").concat();
        let counts = |line: &str, text: &str| text.lines().filter(|other| other.trim_end() == line).count();
        let printed = || fs::read_to_string(&log).unwrap();
        let missing = |printed: &str| {
            let missing = |line: &&str| counts(line, printed) < counts(line, &shown);
            shown.lines().find(missing).map(str::to_owned)
        };
        let deadline = Instant::now() + TIMEOUT;
        while missing(&printed()).is_some()
            && shell.try_wait().unwrap().is_none()
            && Instant::now() < deadline
        {
            thread::sleep(Duration::from_millis(20));
        }
        if Instant::now() >= deadline {
            let group = format!("-{}", shell.id());
            assert!(Command::new("kill").args(["-KILL", "--", &group]).status().unwrap().success());
        }
        // The end of its input ends the script, and what it has started.
        drop(shell.stdin.take());
        let status = shell.wait().unwrap();
        let printed = printed();
        assert!(status.success(), "{}: {status}\n{printed}", self.name);
        for line in shown.lines() {
            assert_eq!(counts(line, &printed), counts(line, &shown), "{}: {line:?} in\n{printed}", self.name);
        }
    }

    /// The commands, with free ports. After those in the background it waits for the ports that they name.
    fn script(&self, ports: &[u16]) -> String {
        let free: Vec<_> =
            ports.iter().map(|port| (port.to_string(), free_port().unwrap().to_string())).collect();
        let mut script = "trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT\n".to_owned();
        for block in self.blocks("sh") {
            for line in block.lines() {
                let is_background = line.split("  #").next().is_some_and(|command| command.ends_with('&'));
                let named: Vec<_> = free.iter().filter(|(port, _)| line.contains(port)).collect();
                let line = named.iter().fold(line.to_owned(), |line, (port, free)| line.replace(port, free));
                script.push_str(&format!("{line}\n"));
                for (_, free) in named.iter().filter(|_| is_background) {
                    script.push_str(&LISTENING.replace("PORT", free));
                }
            }
        }
        script.push_str("read -r _ || true\n");
        script
    }
}

fn package() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn sidecar() {
    Page::read("sidecar").run(&[3000, 8080], None);
}

#[test]
fn axum() {
    let page = Page::read("axum");
    page.shows("axum");
    page.run(&[3000], None);
}

#[test]
fn function() {
    let page = Page::read("function");
    page.shows("function");
    page.run(&[], None);
}

#[test]
fn client() {
    let page = Page::read("client");
    page.shows("client");
    page.run(&[3000], None);
}

#[test]
fn messages() {
    let page = Page::read("messages");
    page.shows("messages");
    page.run(&[4222], Some(&PostgresServer::start().unwrap()));
}

#[test]
fn postgres_transaction() {
    let page = Page::read("postgres-transaction");
    page.shows("postgres_transaction");
    page.run(&[], Some(&PostgresServer::start().unwrap()));
}
