//! Rules that no compiler checks.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::run::{Result, cargo, output, root};

/// The allowed dependencies between the crates of the workspace, as ARCHITECTURE.md draws them. Dependencies of tests may
/// point to any crate but the binary.
const ARROWS: &[(&str, &[&str])] = &[
    ("oncegate-core", &[]),
    ("oncegate-client", &["oncegate-core", "oncegate-seal"]),
    ("oncegate-testkit", &["oncegate-core"]),
    ("oncegate-engine", &["oncegate-core"]),
    ("oncegate-embedded", &["oncegate-core"]),
    ("oncegate-postgres", &["oncegate-core", "oncegate-seal"]),
    ("oncegate-redis", &["oncegate-core"]),
    ("oncegate-cache", &["oncegate-core"]),
    ("oncegate-seal", &["oncegate-core"]),
    ("oncegate-http", &["oncegate-core", "oncegate-engine"]),
    ("oncegate-inbox", &["oncegate-core", "oncegate-engine"]),
    (
        "oncegate-inbox-postgres",
        &["oncegate-core", "oncegate-engine", "oncegate-inbox", "oncegate-postgres", "oncegate-seal"],
    ),
    ("oncegate-amqp", &["oncegate-core", "oncegate-engine", "oncegate-inbox"]),
    ("oncegate-kafka", &["oncegate-core", "oncegate-engine", "oncegate-inbox"]),
    ("oncegate-nats", &["oncegate-engine", "oncegate-inbox"]),
    ("oncegate-sqs", &["oncegate-core", "oncegate-engine", "oncegate-inbox"]),
    ("oncegate-webhook", &["oncegate-core", "oncegate-engine", "oncegate-inbox"]),
    ("oncegate-macros", &["oncegate-core"]),
    (
        "oncegate",
        &[
            "oncegate-amqp",
            "oncegate-client",
            "oncegate-core",
            "oncegate-engine",
            "oncegate-embedded",
            "oncegate-http",
            "oncegate-inbox",
            "oncegate-inbox-postgres",
            "oncegate-kafka",
            "oncegate-macros",
            "oncegate-nats",
            "oncegate-postgres",
            "oncegate-redis",
            "oncegate-sqs",
            "oncegate-cache",
            "oncegate-seal",
            "oncegate-webhook",
        ],
    ),
    ("oncegate-demo", &["oncegate-core"]),
    ("oncegate-probe", &["oncegate-core"]),
    (
        "oncegate-cli",
        &[
            "oncegate-client", "oncegate-core", "oncegate-demo", "oncegate-engine", "oncegate-embedded",
            "oncegate-http", "oncegate-postgres", "oncegate-probe", "oncegate-redis", "oncegate-cache",
            "oncegate-seal",
        ],
    ),
    // Nothing may depend on these.
    (
        "oncegate-cases",
        &[
            "oncegate-core", "oncegate-engine", "oncegate-embedded", "oncegate-http", "oncegate-postgres",
            "oncegate-redis", "oncegate-seal", "oncegate-servers", "oncegate-testkit", "oncegate-cache",
        ],
    ),
    ("oncegate-servers", &[]),
    (
        "oncegate-broker-tests",
        &[
            "oncegate-core",
            "oncegate-engine",
            "oncegate-inbox",
            "oncegate-inbox-postgres",
            "oncegate-postgres",
            "oncegate-servers",
            "oncegate-testkit",
        ],
    ),
    (
        "oncegate-benches",
        &[
            "oncegate-client",
            "oncegate-core",
            "oncegate-engine",
            "oncegate-embedded",
            "oncegate-http",
            "oncegate-inbox",
            "oncegate-inbox-postgres",
            "oncegate-postgres",
            "oncegate-redis",
            "oncegate-servers",
        ],
    ),
    ("axum-payments", &["oncegate"]),
    ("order-pipeline", &["oncegate"]),
    ("order-saga", &["oncegate"]),
    ("start", &["oncegate"]),
    ("xtask", &[]),
];

/// Packages that the dependencies of a crate must not reach.
const FREE_OF: &[(&str, &[&str])] = &[
    ("oncegate-core", &["tokio", "http", "hyper", "getrandom", "redb", "tracing"]),
    ("oncegate-client", &["redb", "redis", "axum", "sqlx"]),
    ("oncegate-engine", &["http", "hyper", "redb", "axum", "sqlx"]),
    ("oncegate-embedded", &["http", "hyper", "axum"]),
    ("oncegate-postgres", &["http", "hyper", "axum", "redb"]),
    ("oncegate-redis", &["http", "hyper", "axum", "redb", "sqlx"]),
    ("oncegate-cache", &["http", "hyper", "axum", "redb", "redis", "sqlx"]),
    ("oncegate-seal", &["http", "hyper", "axum", "redb", "redis", "sqlx", "tokio"]),
    ("oncegate-http", &["redb", "hyper", "axum", "sqlx"]),
    ("oncegate-demo", &["axum", "clap", "oncegate-engine", "redb", "redis", "rustls", "sqlx"]),
    ("oncegate-probe", &["axum", "clap", "oncegate-engine", "oncegate-http", "redb", "redis", "sqlx"]),
    ("oncegate-macros", &["tokio", "http", "hyper", "redb", "tracing"]),
    (
        "oncegate-inbox",
        &["async-nats", "aws-sdk-sqs", "axum", "http", "hyper", "lapin", "rdkafka", "redb", "redis", "sqlx"],
    ),
    (
        "oncegate-inbox-postgres",
        &["async-nats", "aws-sdk-sqs", "axum", "http", "hyper", "lapin", "rdkafka", "redb", "redis"],
    ),
    ("oncegate-amqp", &["async-nats", "aws-sdk-sqs", "axum", "rdkafka", "redb", "redis", "sqlx"]),
    ("oncegate-kafka", &["async-nats", "aws-sdk-sqs", "axum", "hyper", "lapin", "redb", "redis", "sqlx"]),
    ("oncegate-nats", &["aws-sdk-sqs", "axum", "lapin", "rdkafka", "redb", "redis", "sqlx"]),
    ("oncegate-sqs", &["async-nats", "axum", "lapin", "rdkafka", "redb", "redis", "sqlx"]),
    ("oncegate-webhook", &["async-nats", "aws-sdk-sqs", "lapin", "rdkafka", "redb", "redis", "sqlx"]),
];

/// Libraries that must not panic: each denies the lints of [`rust`].
const LIBRARIES: &[&str] = &[
    "amqp", "client", "core", "embedded", "engine", "http", "inbox", "inbox-postgres", "kafka", "nats",
    "postgres", "probe", "redis", "seal", "servers", "sqs", "cache", "webhook",
];

/// Brokers and stores that the code of a crate must not name, because it works with all of them. Comments may.
const NAMES_NONE_OF: &[(&str, &[&str])] = &[(
    "crates/inbox/src/",
    &["kafka", "rabbitmq", "amqp", "jetstream", "nats", "sqs", "postgres", "redis", "valkey", "redb", "sqlx"],
)];

/// Words that finished work does not have, and why.
const WORDS: &[(&str, &str)] = &[
    ("TODO", "finish it, or write it down in docs/decisions"),
    ("FIXME", "mend it"),
    ("XXX", "say what it is"),
    ("#[ignore", "a test that does not run is none"),
    ("#[allow(dead_code)]", "delete it"),
    ("%error", "an error displays only itself: log its causes, too, with `error = %ErrorChain(&error)`"),
];

/// The file that may have such words: this one.
const MAY: &str = "xtask/src/tidy.rs";

pub(crate) fn run() -> Result<()> {
    let mut faults = Vec::new();
    arrows(&mut faults)?;
    let files = tracked()?;
    for file in &files {
        let Ok(text) = std::fs::read_to_string(root().join(file)) else { continue };
        crate::language::check(file, &text, &mut faults);
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("rs") => rust(file, &text, &mut faults),
            Some("md") => links(file, &text, &mut faults),
            _ => {}
        }
    }
    faults.sort();
    for fault in &faults {
        println!("{fault}");
    }
    if faults.is_empty() {
        println!("tidy: {} files, no fault", files.len());
        Ok(())
    } else {
        Err(format!("{} faults", faults.len()))
    }
}

/// The files of the repository, new ones among them.
pub(crate) fn tracked() -> Result<Vec<PathBuf>> {
    let mut git = std::process::Command::new("git");
    git.current_dir(root()).args(["ls-files", "--cached", "--others", "--exclude-standard"]);
    Ok(output(&mut git)?.lines().map(PathBuf::from).collect())
}

fn arrows(faults: &mut Vec<String>) -> Result<()> {
    let text = output(cargo().args(["metadata", "--format-version", "1", "--all-features", "--locked"]))?;
    let metadata: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let members: BTreeSet<String> = list(&metadata["workspace_members"]).iter().map(text).collect();
    let mut names = BTreeMap::new();
    for package in list(&metadata["packages"]) {
        names.insert(text(&package["id"]), text(&package["name"]));
    }
    // Package to what it is built from, tests left out.
    let mut built_from: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for node in list(&metadata["resolve"]["nodes"]) {
        let normal = list(&node["deps"])
            .into_iter()
            .filter(|dependency| list(&dependency["dep_kinds"]).iter().any(|kind| kind["kind"] != "dev"));
        let ids = normal.map(|dependency| text(&dependency["pkg"])).collect();
        built_from.insert(text(&node["id"]), ids);
    }
    let name = |id: &String| names.get(id).cloned().unwrap_or_default();
    for member in &members {
        let from = name(member);
        let Some((_, allowed)) = ARROWS.iter().find(|(crate_name, _)| *crate_name == from) else {
            faults.push(format!("{from}: not in the table of arrows (xtask/src/tidy.rs, ARCHITECTURE.md)"));
            continue;
        };
        for to in built_from.get(member).into_iter().flatten().filter(|id| members.contains(*id)).map(name) {
            if !allowed.contains(&to.as_str()) {
                faults.push(format!("{from} depends on {to}: ARCHITECTURE.md does not draw that arrow"));
            }
        }
        let free_of =
            FREE_OF.iter().find(|(crate_name, _)| *crate_name == from).map_or(&[][..], |(_, list)| *list);
        let mut reached = BTreeSet::new();
        let mut todo = vec![member.clone()];
        while let Some(id) = todo.pop() {
            for next in built_from.get(&id).into_iter().flatten() {
                if reached.insert(name(next)) {
                    todo.push(next.clone());
                }
            }
        }
        for never in free_of.iter().filter(|never| reached.contains(**never)) {
            faults.push(format!("{from} must be free of {never}, and reaches it"));
        }
    }
    Ok(())
}

fn rust(file: &Path, text: &str, faults: &mut Vec<String>) {
    let name = file.display().to_string();
    for (number, line) in text.lines().enumerate() {
        for (word, why) in WORDS {
            if line.contains(word) && name != MAY {
                faults.push(format!("{name}:{}: {word}: {why}", number + 1));
            }
        }
        let code = if line.trim_start().starts_with("//") { String::new() } else { line.to_lowercase() };
        for (folder, words) in NAMES_NONE_OF.iter().filter(|(folder, _)| name.starts_with(folder)) {
            for word in words.iter().filter(|word| code.contains(**word)) {
                faults.push(format!("{name}:{}: {folder} must not name {word}", number + 1));
            }
        }
        if line.chars().count() > 130 && !line.contains("http") && !line.contains('"') {
            faults.push(format!("{name}:{}: longer than 130 characters", number + 1));
        }
    }
    if file.ends_with("src/lib.rs") || file.ends_with("src/main.rs") {
        if !text.starts_with("//!") {
            faults.push(format!("{name}: has no page of documentation"));
        }
        let denies =
            ["clippy::unwrap_used", "clippy::expect_used", "clippy::indexing_slicing", "clippy::panic"];
        let library = LIBRARIES.iter().any(|library| name == format!("crates/{library}/src/lib.rs"));
        for lint in denies.iter().filter(|lint| library && !text.contains(**lint)) {
            faults.push(format!("{name}: does not deny {lint}"));
        }
    }
}

/// Links to files of the project, and to headings in their pages, lead somewhere.
fn links(file: &Path, text: &str, faults: &mut Vec<String>) {
    let folder = root().join(file.parent().unwrap_or(Path::new("")));
    for (number, target) in targets(text) {
        let (path, heading) = target.split_once('#').unwrap_or((target, ""));
        if path.contains("://") || path.starts_with("mailto:") {
            continue;
        }
        let linked = if path.is_empty() { root().join(file) } else { folder.join(path) };
        if !linked.exists() {
            faults.push(format!("{}:{number}: the link to {path} leads nowhere", file.display()));
        } else if !heading.is_empty() && linked.extension().is_some_and(|extension| extension == "md") {
            let page = std::fs::read_to_string(&linked).unwrap_or_default();
            if !anchors(&page).iter().any(|anchor| anchor == heading) {
                faults.push(format!("{}:{number}: {target}: there is no such heading", file.display()));
            }
        }
    }
}

/// The targets of the links in a page, with the numbers of their lines. Code has no links.
pub(crate) fn targets(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    text.lines().enumerate().flat_map(move |(number, line)| {
        is_code ^= line.trim_start().starts_with("```");
        let line = if is_code { "" } else { line };
        line.split("](").skip(1).map(move |part| (number + 1, part.split(')').next().unwrap_or_default()))
    })
}

/// The anchors of a page's headings, as the usual renderers make them.
fn anchors(page: &str) -> Vec<String> {
    let headings = page.lines().filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let kept = heading.trim_start_matches('#').trim().chars();
        let kept = kept.filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
    };
    headings.map(anchor).collect()
}
