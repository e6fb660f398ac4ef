//! `oncegate explain`: the route of a request, and each setting that applies to it with its source.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Args;
use http::Method;
use http::uri::PathAndQuery;
use serde_json::json;

use crate::config::{
    Config, Draft, Entry, Fallback, GivenEntries, ProxyArgs, Raw, SETTINGS, SettableIn, Setting,
};

/// Explains the treatment of a request.
#[derive(Args, Debug)]
pub(crate) struct ExplainArgs {
    /// The request: a method and a path, such as 'POST /v1/orders'. The method is POST if there is only a path
    #[arg(value_name = "REQUEST")]
    request: String,
    #[command(flatten)]
    settings: ProxyArgs,
    /// Prints one JSON object: the route, if the method is covered, and name, value and source of each setting
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// One setting as it applies to the request.
struct Row {
    name: &'static str,
    value: String,
    source: String,
}

/// Prints the explanation. The exit code is 1 if the configuration has errors, and 2 if the request cannot be read.
pub(crate) fn run(args: &ExplainArgs) -> ExitCode {
    let Some((method, path)) = read_request(&args.request) else {
        complain!(
            "error: {:?} is not a request; write a method and a path, such as 'POST /v1/orders'",
            args.request
        );
        return ExitCode::from(2);
    };
    let Draft { config, problems, given, .. } = Draft::read(&args.settings, std::env::vars_os());
    let Some(config) = config else {
        for problem in problems.iter().filter(|problem| problem.is_error()) {
            complain!("error: {problem}");
        }
        return ExitCode::FAILURE;
    };
    let route = config.route_number(&method, path.path());
    let applies = route.map_or(&config.default, |number| &config.routes[number].config);
    let pattern = route.map(|number| config.routes[number].pattern.as_str());
    let is_covered = applies.settings.covers(&method);
    let rows = rows(&config, route, &given);
    let mut out = io::stdout().lock();
    let written = if args.json {
        let settings = rows
            .iter()
            .map(|Row { name, value, source }| json!({"name": name, "value": value, "source": source}));
        let settings: Vec<_> = settings.collect();
        let profile = applies.settings.profile().name();
        writeln!(
            out,
            "{}",
            json!({"route": pattern, "covered": is_covered, "profile": profile, "settings": settings})
        )
    } else {
        print(&mut out, &args.request, pattern, is_covered, &rows)
    };
    let _gone = written; // the reader may have left
    ExitCode::SUCCESS
}

fn print(
    out: &mut impl Write,
    request: &str,
    pattern: Option<&str>,
    is_covered: bool,
    rows: &[Row],
) -> io::Result<()> {
    match pattern {
        Some(pattern) => writeln!(out, "{request} matches the route {pattern}.")?,
        None => writeln!(out, "{request} matches no route; the values outside of routes apply.")?,
    }
    match is_covered {
        true => writeln!(out, "Its method is covered.\n")?,
        false => writeln!(out, "Its method is not covered: it passes, and a key has no effect.\n")?,
    }
    let width =
        |of: fn(&Row) -> &str| rows.iter().map(|row| of(row).chars().count()).max().unwrap_or(0).min(48);
    let (names, values) = (width(|row| row.name), width(|row| &row.value));
    rows.iter()
        .try_for_each(|Row { name, value, source }| writeln!(out, "{name:names$}  {value:values$}  {source}"))
}

/// A method and a path without its query.
fn read_request(text: &str) -> Option<(Method, PathAndQuery)> {
    let (method, path) = text.trim().split_once(char::is_whitespace).unwrap_or(("POST", text.trim()));
    let path: PathAndQuery =
        path.trim().parse().ok().filter(|path: &PathAndQuery| path.path().starts_with('/'))?;
    Some((Method::from_bytes(method.to_ascii_uppercase().as_bytes()).ok()?, path))
}

/// The settings that a route can have, in the order of the reference page.
fn rows(config: &Config, route: Option<usize>, given: &GivenEntries) -> Vec<Row> {
    let applies = route.map_or(&config.default, |number| &config.routes[number].config);
    let profile = applies.settings.profile();
    let by_profile = profile.rows();
    let row = |setting: &Setting| {
        if let Some(entry) = given.of(setting, route) {
            return Row { name: setting.name, value: text(entry), source: entry.source.to_string() };
        }
        let by_profile = by_profile.iter().find(|(name, _)| *name == setting.name);
        let (value, source) = match (by_profile, setting.default) {
            (Some((_, value)), _) => (value.clone(), format!("profile {}", profile.name())),
            (None, Fallback::Value(text) | Fallback::Profile(text)) => {
                (text.to_owned(), "default".to_owned())
            }
            (None, Fallback::Nothing("")) => ("–".to_owned(), "default".to_owned()),
            (None, Fallback::Nothing(words)) => ("–".to_owned(), format!("default: {words}")),
        };
        Row { name: setting.name, value, source }
    };
    SETTINGS.iter().filter(|setting| setting.settable_in == SettableIn::Route).map(row).collect()
}

fn text(entry: &Entry) -> String {
    match &entry.raw {
        Raw::Text(text) => text.clone(),
        Raw::List(texts) => texts.join(", "),
    }
}
