//! The effective configuration, each value with its source.

use std::fmt::Write as _;
use std::process::ExitCode;

use serde_json::{Value, json};

use super::{DumpArgs, json_value, print, toml_text, toml_value};
use crate::config::{Config, Draft, GivenEntries, Problem, Raw, SETTINGS, SettableIn, Setting, shown_value};
use crate::explain::{EffectiveSettings, Origin, Row};

/// The column of the sources, unless a value is longer.
const SOURCES: usize = 48;

/// Prints it. The exit code is 1 if the configuration has errors.
pub(super) fn run(args: &DumpArgs) -> ExitCode {
    let Draft { config, problems, given, .. } = Draft::read(&args.settings, std::env::vars_os());
    let Some(config) = config else {
        for problem in problems.iter().filter(|problem| problem.is_error()) {
            complain!("error: {problem}");
        }
        return ExitCode::FAILURE;
    };
    for warning in &config.warnings {
        complain!("warning: {warning}");
    }
    let (rows, routes) = effective(&config, &given);
    if args.json {
        let warnings: Vec<_> = config.warnings.iter().map(Problem::to_string).collect();
        let dump = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "settings": rows.iter().map(|(setting, row)| json(setting, row)).collect::<Vec<_>>(),
            "routes": routes.iter().map(RouteRows::json).collect::<Vec<_>>(),
            "warnings": warnings,
        });
        return print(&format!("{dump}\n"));
    }
    print(&text(&rows, &routes))
}

/// The configuration as a file.
fn text(rows: &[(&'static Setting, Row)], routes: &[RouteRows]) -> String {
    let mut text = format!(
        "# The effective configuration of oncegate {}, each value with its source. Relative paths are relative to the directory of \
         that source.\n",
        env!("CARGO_PKG_VERSION")
    );
    let mut heading = "";
    for (setting, row) in rows {
        if heading != setting.heading {
            heading = setting.heading;
            let _infallible = writeln!(text, "\n# ==== {heading}");
        }
        line(setting, row, &mut text);
    }
    for route in routes {
        text.push_str("\n[[route]]\n");
        let _infallible = writeln!(text, "path = {}", toml_text(&route.path));
        route.rows.iter().for_each(|(setting, row)| line(setting, row, &mut text));
    }
    text
}

/// The configuration of these flags as a file.
#[cfg(test)]
pub(super) fn text_of(args: &crate::config::ProxyArgs) -> String {
    let Draft { config, problems, given, .. } = Draft::read(args, []);
    let config = config.unwrap_or_else(|| panic!("{problems:?}"));
    let (rows, routes) = effective(&config, &given);
    text(&rows, &routes)
}

/// The values outside of routes, and those of each route that differ from them.
fn effective(config: &Config, given: &GivenEntries) -> (Vec<(&'static Setting, Row)>, Vec<RouteRows>) {
    let effective = EffectiveSettings::new(config, given, None);
    let rows: Vec<_> = SETTINGS.iter().map(|setting| (setting, effective.row(setting))).collect();
    let routes = (0..config.routes.len()).map(|number| {
        RouteRows::of(config, number, &EffectiveSettings::new(config, given, Some(number)), &rows)
    });
    let routes = routes.collect();
    (rows, routes)
}

/// The settings of a route that differ from those outside of routes.
struct RouteRows {
    path: String,
    rows: Vec<(&'static Setting, Row)>,
}

impl RouteRows {
    fn of(
        config: &Config,
        number: usize,
        effective: &EffectiveSettings<'_>,
        outside: &[(&'static Setting, Row)],
    ) -> Self {
        let settings = outside.iter().filter(|(setting, _)| setting.settable_in == SettableIn::Route);
        let rows = settings.filter_map(|(setting, outside)| {
            let row = effective.row(setting);
            let differs = (&row.raw, &row.source) != (&outside.raw, &outside.source);
            differs.then_some((*setting, row))
        });
        Self { path: config.routes[number].pattern.as_str().to_owned(), rows: rows.collect() }
    }

    fn json(&self) -> Value {
        let settings: Vec<_> = self.rows.iter().map(|(setting, row)| json(setting, row)).collect();
        json!({"path": self.path, "settings": settings})
    }
}

/// The value as it may be shown, and true if something was left out.
fn shown(setting: &Setting, raw: &Raw) -> (Raw, bool) {
    if setting.settable_in == SettableIn::Secret {
        return (Raw::Text("…".to_owned()), true);
    }
    let safe = shown_value(setting, raw);
    let is_redacted = safe != *raw;
    (safe, is_redacted)
}

fn json(setting: &Setting, row: &Row) -> Value {
    let (value, is_redacted) = match &row.raw {
        None => (Value::Null, false),
        Some(raw) => {
            let (safe, is_redacted) = shown(setting, raw);
            (json_value(setting, &safe), is_redacted)
        }
    };
    json!({"name": setting.name, "value": value, "source": row.source, "redacted": is_redacted})
}

/// A line of the file. It is a comment unless the value was given: some settings may not be given with others, even with their
/// defaults.
fn line(setting: &Setting, row: &Row, text: &mut String) {
    let name = setting.name;
    let is_in_file = !matches!(setting.settable_in, SettableIn::Start | SettableIn::Secret);
    let (words, note) = match &row.raw {
        None => (format!("#{name}"), String::new()),
        Some(raw) => {
            let (safe, is_redacted) = shown(setting, raw);
            // A store that is not shown whole stays, with a `…` that is refused: without it, the default store would be used.
            let is_effective = is_in_file && row.origin == Origin::Given;
            let mark = if is_effective { "" } else { "#" };
            let note = if is_redacted { ", not shown whole" } else { "" };
            (format!("{mark}{name} = {}", toml_value(setting, &safe)), note.to_owned())
        }
    };
    let _infallible = writeln!(text, "{words:<SOURCES$}  # {}{note}", row.source);
}
