//! The page docs/reference/peers.md: the report of `oncegate probe` about each library.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::process::Command;

use serde_json::Value;

use super::super::servers::{Server, scratch};
use super::{Programs, Redis, sessions};
use crate::run::{Result, cargo, output, root, run as command, target};

const PAGE: &str = "docs/reference/peers.md";

/// The libraries, with their framework and the place of their effects.
const LIBRARIES: [(&str, &str, &str); 6] = [
    ("axum", "oncegate layer", BY_COUNT),
    // It demands a key for the count, too, and would replay it.
    ("axum", "axum-idempotent", BY_MEMBER),
    ("Express", "express-idempotency", BY_COUNT),
    ("Express", "node-idempotency", BY_COUNT),
    ("FastAPI", "asgi-idempotency-header", BY_COUNT),
    ("FastAPI", "powertools", BY_COUNT),
];
const BY_COUNT: &str = "url = \"/executions\"";
const BY_MEMBER: &str = "member = \"/execution\"";

/// Rows that depend on the handler around a library, which is ours, and say nothing about the library.
fn is_ours(library: &str, row: &str) -> bool {
    const RESPONSES: [&str; 2] = ["replay-headers", "retry-after"];
    const KEYS: [&str; 9] = [
        "other-caller", "missing-key", "empty-key", "unclosed-quote", "key-list", "non-ascii-key",
        "long-key", "doubled-key", "quoted-and-bare",
    ];
    match library.split(' ').next() {
        Some("powertools") => RESPONSES.contains(&row) || KEYS.contains(&row),
        Some("node-idempotency") => RESPONSES.contains(&row),
        _ => false,
    }
}

/// The text before the table; the date follows it.
const INTRO: &str = "\
# Other libraries

[`oncegate probe`](probe.md) with the profile `ietf`, against libraries for the same thing, each as its README shows it, with its
records in memory (`powertools`: in Redis).

The table says what was seen on one machine, by clients on the same machine. A library that differs may do what its own
documentation says: many do not know the caller, and leave that to the application. The profile also expects what the draft
leaves open: the marker of replays, `Retry-After`, and one key for both spellings. `powertools` guards functions, and
`node-idempotency` is called by a handler: rows that depend on the handler are left out, because it is ours. A row without a
verdict claims nothing.

`cargo xtask bench probes` made this page on ";

/// Probes each library, and writes the page.
pub(in crate::bench) fn run() -> Result<String> {
    command(cargo().args(["build", "--package", "oncegate-cli", "--package", "oncegate-benches"]))?;
    let programs = Programs::install()?;
    let redis = Redis::start()?;
    let directory = scratch("probes")?;
    let mut reports = Vec::new();
    for (framework, library, count) in LIBRARIES {
        let server = match library {
            "oncegate layer" => {
                Server::spawn(Command::new(target().join("debug/oncegate-benches")).args(["memory", "0"]))?
            }
            _ => programs.start(framework, library, &redis)?,
        };
        let (cookie, other) = (sessions(library, &server, 1)?, sessions(library, &server, 1)?);
        // Without sessions, the callers differ in their credential.
        let field = |session: &str, credential: &str| {
            if session.is_empty() {
                format!("Authorization = \"Bearer {credential}\"\n")
            } else {
                format!("Cookie = {session:?}\n")
            }
        };
        let operation = format!(
            "path = \"/work\"\nbody = '{{\"amount\":{{n}}}}'\n[headers]\n{}[other-caller.headers]\n{}[count]\n{count}\n",
            field(&cookie, "one"),
            field(&other, "two"),
        );
        let file = directory.join("operation.toml");
        fs::write(&file, operation).map_err(|error| format!("{}: {error}", file.display()))?;
        reports.push((format!("{library}{}", programs.version(library)?), probe(&server, &file)?));
    }
    let page = page(&reports)?;
    fs::write(root().join(PAGE), &page).map_err(|error| format!("{PAGE}: {error}"))?;
    Ok(page)
}

fn probe(server: &Server, operation: &std::path::Path) -> Result<Value> {
    let program = target().join("debug/oncegate");
    let mut probe = Command::new(program);
    probe.args(["probe", &format!("http://{}", server.address), "--json", "--rate=100", "--max-time=5s"]);
    let ended = probe.arg("--operation").arg(operation).output().map_err(|error| error.to_string())?;
    serde_json::from_slice(&ended.stdout)
        .map_err(|_| format!("{probe:?}: {}", String::from_utf8_lossy(&ended.stderr)))
}

fn page(reports: &[(String, Value)]) -> Result<String> {
    let today = output(Command::new("date").args(["-u", "+%F"]))?;
    let names: Vec<&str> = reports.iter().map(|(name, _)| name.as_str()).collect();
    let mut page = format!(
        "{INTRO}{}.\n\n\
         | | {} |\n|---|{}\n",
        today.trim(),
        names.join(" | "),
        "---|".repeat(names.len())
    );
    let rows = |report: &Value| report["rows"].as_array().cloned().unwrap_or_default();
    let text = |row: &Value, member: &str| row[member].as_str().unwrap_or_default().to_owned();
    let mut table: BTreeMap<usize, (String, Vec<&str>)> = BTreeMap::new();
    let mut notes = String::new();
    for (name, report) in reports {
        let mut lines = String::new();
        for (at, row) in rows(report).iter().enumerate() {
            let verdict = match text(row, "verdict").as_str() {
                _ if is_ours(name, &text(row, "id")) => "–",
                "as-expected" => "as expected",
                "differs" => "differs",
                "dangerous" => "**dangerous**",
                _ => "–",
            };
            table.entry(at).or_insert_with(|| (text(row, "title"), Vec::new())).1.push(verdict);
            if matches!(verdict, "differs" | "**dangerous**") {
                let _infallible = writeln!(lines, "- {}: {}", text(row, "title"), text(row, "observation"));
            }
        }
        if !lines.is_empty() {
            let _infallible = write!(notes, "\n### {name}\n{lines}");
        }
    }
    for (title, verdicts) in table.into_values().filter(|(_, all)| all.iter().any(|one| *one != "–")) {
        let _infallible = writeln!(page, "| {title} | {} |", verdicts.join(" | "));
    }
    Ok(format!("{page}\n## Observations\n{notes}"))
}

impl Programs {
    /// The version of a library as it is installed, with a space before it.
    fn version(&self, library: &str) -> Result<String> {
        let read = |path: std::path::PathBuf| {
            fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))
        };
        let after = |text: &str, start: &str| {
            let rest = text.split_once(start).map(|(_, rest)| rest.to_owned()).unwrap_or_default();
            let version: String = rest.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
            if version.is_empty() {
                Err(format!("{library}: no version is known"))
            } else {
                Ok(format!(" {version}"))
            }
        };
        match library {
            "oncegate layer" => Ok(String::new()),
            "axum-idempotent" => {
                let lock = read(root().join("benches/peers/axum-idempotent/Cargo.lock"))?;
                after(&lock, "name = \"axum-idempotent\"\nversion = \"")
            }
            "express-idempotency" | "node-idempotency" => {
                let package = if library == "node-idempotency" { "@node-idempotency/core" } else { library };
                let file = self.node.join("node_modules").join(package).join("package.json");
                after(&read(file)?.replace(' ', ""), "\"version\":\"")
            }
            _ => {
                let package =
                    if library == "powertools" { "aws_lambda_powertools" } else { "asgi-idempotency-header" };
                after(&read(self.python.join("requirements.txt"))?, &format!("{package}=="))
            }
        }
    }
}
