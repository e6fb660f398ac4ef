//! Tests that the rules, the dashboard and the pages name metrics, alerts and commands that exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser as _;
use serde_json::Value;

use http::Request;
use http::header;

use super::Sidecar;

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn read(path: &str) -> String {
    fs::read_to_string(root(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

const RULES: &str = "deploy/prometheus/oncegate.rules.yml";
const ALERTS: &str = "docs/operations/alerts.md";

/// The texts that name metrics.
const TEXTS: [&str; 8] = [
    RULES,
    "deploy/prometheus/oncegate.test.yml",
    "deploy/grafana/oncegate.json",
    ALERTS,
    "docs/reference/observability.md",
    "docs/reference/admin.md",
    "docs/reference/configuration.md",
    "docs/reference/http.md",
];

/// The names in a text that begin as those of metrics do.
fn named(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
    let is_metric = |word: &&str| word.starts_with("oncegate_") || word.starts_with("process_");
    words.filter(is_metric).filter(|word| !word.contains(':')).collect()
}

/// The metrics that need a certificate, a key set, seal keys, a cache, messages, a limit or an event, with the words under which
/// they are registered.
const OPTIONAL: [(&str, &str); 17] = [
    ("oncegate_cache_claims_total", "\"cache_claims\""),
    ("oncegate_cache_fills_total", "\"cache_fills\""),
    ("oncegate_cache_out", "\"cache_out\""),
    ("oncegate_cache_pending", "\"cache_pending\""),
    ("oncegate_dead_letters", "\"dead_letters\", help, None"),
    ("oncegate_outbox_failing", "\"outbox_failing\", help, None"),
    ("oncegate_outbox_oldest_seconds", "\"outbox_oldest\", help, Some(Unit::Seconds)"),
    ("oncegate_outbox_refused", "\"outbox_refused\", help, None"),
    ("oncegate_outbox_waiting", "\"outbox_waiting\", help, None"),
    ("oncegate_key_set_age_seconds", "\"key_set_age\", age, Some(Unit::Seconds)"),
    ("oncegate_key_set_usable", "\"key_set_usable\""),
    ("oncegate_records", "\"records\", help, Family::default()"),
    ("oncegate_seal_key", "\"seal_key\", help, Family::default()"),
    ("oncegate_store_advisory", "\"store_advisory\""),
    ("oncegate_store_limit_bytes", "\"store_limit\", help, Some(Unit::Bytes)"),
    (
        "oncegate_tls_certificate_not_after_seconds",
        "\"tls_certificate_not_after\", help, Some(Unit::Seconds)",
    ),
    (
        "oncegate_tls_client_crl_next_update_seconds",
        "\"tls_client_crl_next_update\", help, Some(Unit::Seconds)",
    ),
];

/// The metrics page of a sidecar that has answered a request.
async fn page() -> String {
    let sidecar = Sidecar::start().await;
    sidecar.call("/a", &[("idempotency-key", "k")], b"{}").await;
    sidecar.get("/metrics").await.text()
}

/// The names of all families and samples.
async fn exported() -> BTreeSet<String> {
    let page = page().await;
    let mut names = BTreeSet::new();
    for line in page.lines() {
        let line = line.strip_prefix("# TYPE ").unwrap_or(line);
        names.extend(line.split(['{', ' ']).next().map(str::to_owned));
    }
    let source = read("crates/cli/src/admin/metrics.rs") + &read("crates/cli/src/admin/cache.rs");
    for (name, registered) in OPTIONAL {
        assert!(source.contains(registered), "{name} is registered in another way");
        names.insert(name.to_owned());
    }
    names
}

#[tokio::test]
async fn every_metric_that_a_page_or_a_rule_names_exists() {
    let exported = exported().await;
    let mut unknown = Vec::new();
    for text in TEXTS {
        let content = read(text);
        for name in named(&content) {
            // A page may name a family without the parts of its samples.
            let is_known = exported.contains(name) || exported.contains(&format!("{name}_bucket"));
            if !is_known && !OTHERS.contains(&name) {
                unknown.push(format!("{text}: {name}"));
            }
        }
    }
    assert_eq!(unknown, [""; 0]);
    assert!(named(&read(RULES)).len() > 20);
}

/// Words that begin like a metric and are none: parts of the program, schemas, files.
const OTHERS: [&str; 3] = ["oncegate_engine", "oncegate_http", "oncegate_store"];

/// Each metric is documented, so that a reader finds what it means.
#[tokio::test]
async fn every_metric_is_on_the_page() {
    let documented = read("docs/reference/observability.md");
    let text = self::page().await;
    let families = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let missing: Vec<_> = families.filter(|name| !documented.contains(&format!("`{name}"))).collect();
    assert_eq!(missing, [""; 0]);
}

#[derive(serde::Deserialize)]
struct RuleFile {
    groups: Vec<RuleGroup>,
}

#[derive(serde::Deserialize)]
struct RuleGroup {
    rules: Vec<Rule>,
}

#[derive(serde::Deserialize)]
struct Rule {
    alert: Option<String>,
    record: Option<String>,
    expr: String,
    #[serde(default)]
    labels: std::collections::BTreeMap<String, String>,
    #[serde(default)]
    annotations: std::collections::BTreeMap<String, String>,
}

#[test]
fn every_alert_has_a_section_that_says_what_to_do() {
    let rules: RuleFile = serde_saphyr::from_str(&read(RULES)).unwrap();
    let rules: Vec<_> = rules.groups.into_iter().flat_map(|group| group.rules).collect();
    let recorded: BTreeSet<_> = rules.iter().filter_map(|rule| rule.record.clone()).collect();
    for rule in &rules {
        let words = rule.expr.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
        for word in words.filter(|word| word.starts_with("oncegate:")) {
            assert!(recorded.contains(word), "{word} is not recorded");
        }
    }
    let page = read(ALERTS);
    let mut sections = BTreeSet::new();
    for section in page.split("\n### ").skip(1) {
        let (name, text) = section.split_once('\n').unwrap();
        for part in ["**Means:**", "**Urgent:**", "**Look here"] {
            assert!(text.contains(part), "{name} has no {part}");
        }
        assert!(text.contains("**Do this:**") || text.contains("do this:**"), "{name} says nothing to do");
        sections.insert(name.to_owned());
    }
    let alerts: BTreeSet<_> = rules.iter().filter_map(|rule| rule.alert.clone()).collect();
    assert_eq!(sections, alerts);
    for rule in rules.iter().filter(|rule| rule.alert.is_some()) {
        let name = rule.alert.clone().unwrap();
        let severity = rule.labels.get("severity").map(String::as_str);
        assert!(matches!(severity, Some("critical" | "warning")), "{name}: {severity:?}");
        let section = page.split("\n### ").find(|section| section.starts_with(&format!("{name}\n"))).unwrap();
        let urgency = format!("**Urgent:** {}", severity.unwrap());
        assert!(section.contains(&urgency), "{name}: the page does not say {urgency}");
        assert_eq!(rule.annotations["runbook"], format!("{ALERTS}#{}", name.to_lowercase()));
        assert!(!rule.annotations["summary"].is_empty());
    }
}

/// The lines of the shell in a page, without comments.
fn commands(page: &str) -> Vec<String> {
    let blocks = page.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next());
    let lines = blocks.flat_map(str::lines).map(|line| line.split(" #").next().unwrap_or_default().trim());
    lines.filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect()
}

/// Splits a line as a shell does, as far as these pages need it.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut quote, mut word) = (Vec::new(), None, None::<String>);
    for c in line.chars() {
        match (c, quote) {
            (c, Some(open)) if c == open => quote = None,
            ('"' | '\'', None) => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (' ', None) => words.extend(word.take()),
            (c, _) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

#[tokio::test]
async fn every_command_of_the_pages_is_accepted() {
    let record = "0123456789abcdef".repeat(4);
    let sidecar = Sidecar::start().await;
    let mut count = 0;
    for page in [ALERTS, "docs/reference/observability.md"] {
        for line in commands(&read(page)) {
            let mut words = words(&line.replace("RECORD", &record));
            // As root, because only root can read the file of secrets.
            if words[0] == "sudo" {
                words.remove(0);
            }
            match words[0].as_str() {
                "oncegate" => {
                    let parsed = crate::Oncegate::try_parse_from(&words);
                    assert!(parsed.is_ok(), "{page}: {line}: {}", parsed.err().unwrap());
                    count += 1;
                }
                "curl" => {
                    let url =
                        words.iter().find_map(|word| word.strip_prefix("http://127.0.0.1:9090")).unwrap();
                    let method =
                        words.iter().position(|word| word == "-X").map_or("GET", |at| &words[at + 1]);
                    let body = words.iter().position(|word| word == "-d").map(|at| words[at + 1].clone());
                    let request = Request::builder().method(method).uri(sidecar.url(url));
                    let request = request.header(header::CONTENT_TYPE, "application/json");
                    let request = request.body(body.unwrap_or_default().into()).unwrap();
                    let response = sidecar.send(request).await;
                    let (status, text) = (response.status, response.text());
                    // There is no log in a test.
                    let is_known = status < 400 || url == "/v1/log-level" && text.contains("has no log");
                    assert!(is_known, "{page}: {line}: {status} {text}");
                    count += 1;
                }
                // It makes links of the paths in the installed rules.
                "sed" => {
                    let [from, to] = words[1].split('|').collect::<Vec<_>>()[1..3] else { panic!("{line}") };
                    let rules = read(RULES);
                    assert!(
                        rules.contains(from) && !rules.replace(from, to).contains("runbook: docs/"),
                        "{line}"
                    );
                }
                "df" | "date" | "redis-cli" => {}
                other => panic!("{page}: {other} is not checked"),
            }
        }
    }
    assert!(count > 30, "{count}");
}

/// The dashboard asks its data source by a variable, and each panel has a description.
#[test]
fn the_dashboard_is_complete() {
    let dashboard: Value = serde_json::from_str(&read("deploy/grafana/oncegate.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let mut ids = BTreeSet::new();
    let rows: Vec<_> = panels.iter().filter(|panel| panel["type"] == "row").collect();
    assert!(rows.len() >= 7, "{}", rows.len());
    for panel in panels {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{panel}");
        if panel["type"] == "row" {
            continue;
        }
        assert!(!panel["description"].as_str().unwrap().is_empty(), "{}", panel["title"]);
        for target in panel["targets"].as_array().unwrap() {
            assert_eq!(target["datasource"]["uid"], "${datasource}");
            let expression = target["expr"].as_str().unwrap();
            // Recorded series exist only with the rules.
            assert!(expression.contains("$job") && !expression.contains("oncegate:"), "{expression}");
        }
    }
    let names: Vec<_> = dashboard["templating"]["list"]
        .as_array()
        .unwrap()
        .iter()
        .map(|variable| &variable["name"])
        .collect();
    assert_eq!(names, ["datasource", "job", "instance"]);
}
