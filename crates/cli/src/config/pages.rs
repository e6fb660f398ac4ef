//! A test that the documentation uses the real names of settings.

use std::fs;
use std::path::Path;

use super::settings::{SETTINGS, Setting};

/// Pages about the sidecar. Those about Rust name methods and fields.
const PAGES: [&str; 11] = [
    "docs/reference/admin.md",
    "docs/guides/backups.md",
    "docs/guides/choosing.md",
    "docs/reference/configuration.md",
    "docs/reference/http.md",
    "docs/reference/observability.md",
    "docs/operations/alerts.md",
    "docs/reference/problems.md",
    "docs/reference/same-transaction.md",
    "GUARANTEES.md",
    "README.md",
];

/// The error in a name that a page has between backticks, alone or as in `name = value`.
fn fault(span: &str) -> Option<String> {
    let end = span.find(|c: char| !(c.is_ascii_lowercase() || "-_.".contains(c))).unwrap_or(span.len());
    let (name, rest) = span.split_at(end);
    let is_known = |name: &str| {
        // `cors = { … }` and a route's own keys.
        let is_group = SETTINGS.iter().any(|setting| setting.name.starts_with(&format!("{name}.")));
        Setting::named(name).is_some() || is_group || name == "path"
    };
    let dashed = name.replace('_', "-");
    if name.contains('_') && rest.starts_with(" = ") && is_known(&dashed) {
        return Some(format!("`{span}`: the setting is {dashed}"));
    }
    (rest.starts_with(" = ") && !is_known(name)).then(|| format!("`{span}`: there is no setting {name}"))
}

#[test]
fn pages_name_settings_as_they_are() {
    assert_eq!(
        fault("server_errors = replay").unwrap(),
        "`server_errors = replay`: the setting is server-errors"
    );
    assert_eq!(fault("leese = 1s").unwrap(), "`leese = 1s`: there is no setting leese");
    for right in ["lease = \"10s\"", "cors = { max-age = … }", "on_abandoned", "oncegate_records{state}"] {
        assert_eq!(fault(right), None);
    }
    let mut faults = Vec::new();
    let mut settings = 0;
    for page in PAGES {
        let text =
            fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(page)).unwrap();
        // Every second part is a code block.
        for prose in text.split("```").step_by(2) {
            for span in prose.split('`').skip(1).step_by(2) {
                settings += usize::from(span.contains(" = "));
                faults.extend(fault(span).map(|fault| format!("{page}: {fault}")));
            }
        }
    }
    assert!(settings > 20, "{settings}");
    assert_eq!(faults, [""; 0]);
}
