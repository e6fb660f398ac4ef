//! The metrics page, checked against its formats and against the rules of `promtool check metrics`.

use std::collections::{BTreeMap, BTreeSet};

use crate::operations::{admin, series};
use crate::support::{Message, Service, Sidecar, request};
use crate::{KEY, OK};
use oncegate_testkit::until;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    /// Version 0.0.4 of the text format of Prometheus.
    Prometheus,
    /// Version 1.0.0 of OpenMetrics.
    OpenMetrics,
}

/// A metric family with its description and its samples: name, labels, value.
#[derive(Debug, Default)]
struct Family {
    name: String,
    kind: String,
    help: String,
    unit: Option<String>,
    samples: Vec<(String, BTreeMap<String, String>, f64)>,
}

/// Reads a page strictly: each family stands once and in one piece, HELP and TYPE come before its samples, and no sample repeats.
fn parse(text: &str, format: Format) -> Result<Vec<Family>, String> {
    let text = match format {
        Format::OpenMetrics => text.strip_suffix("# EOF\n").ok_or("no end")?,
        Format::Prometheus => text,
    };
    let mut families: Vec<Family> = Vec::new();
    let mut seen = BTreeSet::new();
    for line in text.strip_suffix('\n').ok_or("the last line has no end")?.split('\n') {
        let wrong = |why: &str| Err(format!("{why}: {line}"));
        if let Some(comment) = line.strip_prefix("# ") {
            let mut words = comment.splitn(3, ' ');
            let (Some(what), Some(name), Some(rest)) = (words.next(), words.next(), words.next()) else {
                return wrong("a comment");
            };
            if families.last().is_none_or(|family| family.name != name) {
                if families.iter().any(|family| family.name == name) {
                    return wrong("a family in two pieces");
                }
                families.push(Family { name: name.to_owned(), ..Family::default() });
            }
            let family = families.last_mut().ok_or("no family")?;
            if !family.samples.is_empty() {
                return wrong("after its samples");
            }
            match what {
                "HELP" if family.help.is_empty() => rest.clone_into(&mut family.help),
                "TYPE" if family.kind.is_empty() => rest.clone_into(&mut family.kind),
                "UNIT" if family.unit.is_none() && format == Format::OpenMetrics => {
                    family.unit = Some(rest.to_owned());
                }
                _ => return wrong("an unknown or second comment"),
            }
            continue;
        }
        let Some((series, value)) = line.rsplit_once(' ') else { return wrong("no value") };
        let Ok(value) = value.parse::<f64>() else { return wrong("no number") };
        if !seen.insert(series.to_owned()) {
            return wrong("twice");
        }
        let (name, labels) = match series.split_once('{') {
            Some((name, labels)) => (name, labels_of(labels).ok_or_else(|| format!("labels: {line}"))?),
            None => (series, BTreeMap::new()),
        };
        let Some(family) = families.last_mut() else { return wrong("no family") };
        if !suffixes(&family.kind, format).contains(&name.strip_prefix(&*family.name).unwrap_or("none")) {
            return wrong(&format!("not of {} ({})", family.name, family.kind));
        }
        family.samples.push((name.to_owned(), labels, value));
    }
    Ok(families)
}

/// The suffixes that sample names add to the name of their family.
fn suffixes(kind: &str, format: Format) -> &'static [&'static str] {
    match (kind, format) {
        ("counter", Format::OpenMetrics) => &["_total"],
        ("info", Format::OpenMetrics) => &["_info"],
        ("counter" | "gauge", Format::Prometheus) | ("gauge", Format::OpenMetrics) => &[""],
        ("histogram", _) => &["_bucket", "_sum", "_count"],
        _ => &[],
    }
}

/// `name="value",…}`. No value here has a quote or a backslash in it.
fn labels_of(text: &str) -> Option<BTreeMap<String, String>> {
    let mut labels = BTreeMap::new();
    for pair in text.strip_suffix("\"}")?.split("\",") {
        let (name, value) = pair.split_once("=\"")?;
        let is_plain = !value.contains(['"', '\\', '{', '}']) && is_snake_case(name);
        let is_new = labels.insert(name.to_owned(), value.to_owned()).is_none();
        (is_plain && is_new).then_some(())?;
    }
    Some(labels)
}

fn is_snake_case(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
}

/// Words that no name of a metric has: abbreviated units, units that are not base units, and types.
const FORBIDDEN_IN_NAMES: &str = "s ms us ns sec b kb mb gb tb pb m h d milliseconds microseconds nanoseconds minutes hours days \
     weeks kilobytes megabytes gigabytes kibibytes mebibytes gibibytes bits percent counter gauge histogram summary untyped";

/// Checks the rules of `promtool check metrics` and the demands of the two formats beyond their syntax.
fn lint(family: &Family, format: Format) -> Result<(), String> {
    let Family { name, kind, help, unit, samples } = family;
    let wrong = |why: &str| Err(format!("{name}: {why}"));
    let is_ours = name.starts_with("oncegate_") || name.starts_with("process_");
    if !is_ours || !is_snake_case(name) || name.contains("__") {
        return wrong("its name");
    }
    if help.trim().is_empty() || help.contains('\\') {
        return wrong("its help");
    }
    if name.split('_').any(|word| FORBIDDEN_IN_NAMES.split_whitespace().any(|bad| bad == word)) {
        return wrong("a word that its name should not have");
    }
    let is_counter = kind == "counter";
    if name.ends_with("_total") != (is_counter && format == Format::Prometheus) {
        return wrong("counters end in _total, and nothing else does");
    }
    if ["_bucket", "_sum", "_count"].iter().any(|end| name.ends_with(end)) {
        return wrong("it ends like a part of a histogram");
    }
    if unit.as_ref().is_some_and(|unit| !name.ends_with(&format!("_{unit}"))) {
        return wrong("its unit is not in its name");
    }
    let has_unit = ["_seconds", "_bytes"].iter().any(|end| name.trim_end_matches("_total").ends_with(end));
    if format == Format::OpenMetrics && has_unit != unit.is_some() {
        return wrong("a unit in its name and no UNIT");
    }
    for (sample, labels, value) in samples {
        let is_bucket = kind == "histogram" && sample.ends_with("_bucket");
        if labels.contains_key("le") != is_bucket || labels.contains_key("quantile") {
            return wrong("a label that is not its own");
        }
        if is_counter && (value.is_nan() || *value < 0.0) {
            return wrong("a counter below zero");
        }
    }
    if kind == "histogram" { check_histogram(name, samples) } else { Ok(()) }
}

/// Asserts for each set of labels that buckets grow up to `+Inf`, which equals the count.
fn check_histogram(name: &str, samples: &[(String, BTreeMap<String, String>, f64)]) -> Result<(), String> {
    type Parts = (Vec<(f64, f64)>, Option<f64>, Option<f64>);
    let mut all: BTreeMap<Vec<(String, String)>, Parts> = BTreeMap::new();
    for (sample, labels, value) in samples {
        let mut labels = labels.clone();
        let le = labels.remove("le").map(|le| le.parse().unwrap_or(f64::NAN));
        let (buckets, sum, count) = all.entry(labels.into_iter().collect()).or_default();
        match (le, sample.ends_with("_sum")) {
            (Some(le), _) => buckets.push((le, *value)),
            (None, true) => *sum = Some(*value),
            (None, false) => *count = Some(*value),
        }
    }
    for (labels, (buckets, sum, count)) in &all {
        let grows = buckets.windows(2).all(|two| two[0].0 < two[1].0 && two[0].1 <= two[1].1);
        let last = buckets.last().filter(|(le, _)| *le == f64::INFINITY).map(|(_, value)| *value);
        if !grows || last.is_none() || last != *count || sum.is_none() {
            return Err(format!("{name}: a histogram that does not add up: {labels:?}"));
        }
    }
    Ok(())
}

fn check(text: &str, format: Format) -> Result<Vec<Family>, String> {
    let families = parse(text, format)?;
    for family in &families {
        lint(family, format)?;
    }
    Ok(families)
}

pub(crate) async fn open_metrics(sidecar: &Sidecar) -> Message {
    let fields = ["Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "Connection: close"];
    let text = request("GET", "/metrics", &fields, "").replace("orders.test", "localhost");
    crate::support::ask(sidecar.admin, &text).await
}

#[tokio::test]
async fn metrics_are_valid_in_both_formats() {
    let service = Service::new().await.answers(OK);
    let store = tempfile::tempdir().unwrap();
    let tiered =
        format!("--store=cached(cache=memory:1MiB,store={})", store.path().join("records").display());
    for flags in [["--store=memory:"], [&*tiered]] {
        let sidecar = Sidecar::start(service.address, &flags).await;
        for key in [KEY, KEY, "Idempotency-Key: two"] {
            sidecar.ask(&request("POST", "/orders", &[key], "{}")).await.has_status(200);
        }
        sidecar.ask(&request("POST", "/orders", &[KEY], "[]")).await.has_status(422);
        until("records are counted", async || {
            series(&sidecar, "oncegate_records{state=\"unknown\"}").await.is_some()
        })
        .await;
        let plain = admin(&sidecar, "/metrics").await;
        assert_eq!(plain.get("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
        let open = open_metrics(&sidecar).await;
        let open_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        assert_eq!(open.get("content-type"), Some(open_type));
        let plain = check(plain.text(), Format::Prometheus).unwrap();
        let open = check(open.text(), Format::OpenMetrics).unwrap();
        // Both formats have the same families under their own names. A family that counted nothing yet has no samples.
        let names = |families: &[Family]| {
            let end = |name: &str| name.trim_end_matches("_total").trim_end_matches("_info").to_owned();
            families.iter().map(|family| end(&family.name)).collect::<BTreeSet<_>>()
        };
        assert_eq!(names(&plain), names(&open));
        assert!(plain.len() > 25, "{}", plain.len());
        let value = |name: &str| {
            let family =
                plain.iter().find(|family| family.name == name).unwrap_or_else(|| panic!("no {name}"));
            family.samples[0].2
        };
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
        let age = now - value("process_start_time_seconds");
        assert!((-5.0..600.0).contains(&age), "{age}");
        let resident = value("process_resident_memory_bytes");
        assert!(
            (1e6..1e9).contains(&resident) && value("process_virtual_memory_bytes") >= resident,
            "{resident}"
        );
        assert!(value("process_open_fds") > 5.0 && value("process_max_fds") > value("process_open_fds"));
        assert!(value("process_cpu_seconds_total") < 60.0 && value("process_threads") >= 3.0);
    }
}

#[test]
fn the_check_finds_the_faults_that_promtool_finds() {
    let good = "# HELP oncegate_x_total X\n# TYPE oncegate_x_total counter\noncegate_x_total{a=\"b\"} 1\n\
                # HELP oncegate_y_seconds Y\n# TYPE oncegate_y_seconds histogram\noncegate_y_seconds_sum 1\n\
                oncegate_y_seconds_count 1\noncegate_y_seconds_bucket{le=\"1\"} 0\noncegate_y_seconds_bucket{le=\"+Inf\"} 1\n";
    check(good, Format::Prometheus).unwrap();
    for (from, to) in [
        ("x_total", "x"),
        ("x_total", "xTotal"),
        ("y_seconds", "y_ms"),
        ("y_seconds", "y_count"),
        ("y_seconds", "y_gauge_seconds"),
        ("# HELP oncegate_x_total X\n", ""),
        ("# TYPE oncegate_x_total counter\n", ""),
        (" counter", " gauge"),
        ("{a=\"b\"} 1\n", "{a=\"b\"} 1\noncegate_x_total{a=\"b\"} 2\n"),
        ("{a=\"b\"} 1\n", "{a=\"b\"} one\n"),
        ("{a=\"b\"} 1\n", "{a=\"b\"} 1\noncegate_z 1\n"),
        ("a=\"b\"", "aB=\"b\""),
        ("a=\"b\"", "le=\"b\""),
        ("\"1\"} 0", "\"1\"} 2"),
        ("le=\"+Inf\"", "le=\"2\""),
        ("_count 1", "_count 2"),
        ("oncegate_y_seconds_sum 1\n", ""),
    ] {
        let bad = good.replace(from, to);
        assert!(bad != good && check(&bad, Format::Prometheus).is_err(), "{bad}");
    }
    let good = "# HELP oncegate_x_bytes X\n# TYPE oncegate_x_bytes gauge\n# UNIT oncegate_x_bytes bytes\noncegate_x_bytes 1\n\
                # HELP oncegate_y Y\n# TYPE oncegate_y counter\noncegate_y_total 1\n# EOF\n";
    check(good, Format::OpenMetrics).unwrap();
    for (from, to) in [
        ("# EOF\n", ""),
        ("oncegate_y_total", "oncegate_y"),
        ("oncegate_y", "oncegate_y_total"),
        ("# UNIT oncegate_x_bytes bytes\n", ""),
        ("_bytes bytes", "_bytes seconds"),
        ("# HELP oncegate_y Y\n", "# HELP oncegate_y Y\n# HELP oncegate_x_bytes X\n"),
    ] {
        let bad = good.replace(from, to);
        assert!(bad != good && check(&bad, Format::OpenMetrics).is_err(), "{bad}");
    }
}
