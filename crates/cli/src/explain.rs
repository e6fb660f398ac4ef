//! `oncegate explain`: the route of a request, and each setting that applies to it with its source.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Args;
use http::Method;
use http::uri::PathAndQuery;
use oncegate_http::{CompletedBy, Condition, Protocol};
use serde_json::json;

use crate::config::{
    Config, Draft, Entry, Fallback, GivenEntries, ProxyArgs, Raw, SETTINGS, SettableIn, Setting,
};
use crate::rules::PublishedRules;
use crate::style::{Tone, paint};

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

/// The origin of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The file, the environment or a flag.
    Given,
    /// The profile, or another setting that implies the value.
    Profile,
    Default,
}

/// One setting as it applies.
pub(crate) struct Row {
    pub(crate) name: &'static str,
    /// `None` if it has no value.
    pub(crate) raw: Option<Raw>,
    pub(crate) value: String,
    pub(crate) source: String,
    pub(crate) origin: Origin,
}

impl Row {
    fn new(name: &'static str, raw: Raw, source: String, origin: Origin) -> Self {
        let value = match &raw {
            Raw::Text(text) => text.clone(),
            Raw::List(texts) => texts.join(", "),
        };
        Self { name, raw: Some(raw), value, source, origin }
    }

    fn unset(name: &'static str, source: String) -> Self {
        Self { name, raw: None, value: NO_VALUE.to_owned(), source, origin: Origin::Default }
    }
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
            .map(|Row { name, value, source, .. }| json!({"name": name, "value": value, "source": source}));
        let settings: Vec<_> = settings.collect();
        let profile = applies.settings.profile().name();
        writeln!(
            out,
            "{}",
            json!({"route": pattern, "covered": is_covered, "profile": profile, "settings": settings})
        )
    } else {
        let request = Request { method: &method, path: path.path() };
        print(&mut out, &request.explained(&config, route), &rows)
    };
    let _gone = written; // the reader may have left
    ExitCode::SUCCESS
}

/// The request that is explained.
pub(crate) struct Request<'a> {
    pub(crate) method: &'a Method,
    pub(crate) path: &'a str,
}

impl Request<'_> {
    /// The sentences about the request as a whole.
    pub(crate) fn explained(&self, config: &Config, route: Option<usize>) -> Vec<String> {
        let Self { method, path } = self;
        let mut lines = vec![match route {
            Some(number) => {
                format!("{method} {path} matches the route {}.", config.routes[number].pattern.as_str())
            }
            None => format!("{method} {path} matches no route; the values outside of routes apply."),
        }];
        let others = config.routes.iter().enumerate().filter(|(number, other)| {
            Some(*number) != route && !other.methods.is_empty() && other.pattern.matches(path)
        });
        for (_, other) in others.filter(|(number, _)| route.is_none_or(|route| *number < route)) {
            let methods: Vec<_> = other.methods.iter().map(Method::as_str).collect();
            lines.push(format!("The route {} is for {} only.", other.pattern.as_str(), methods.join(", ")));
        }
        let settings = &route.map_or(&config.default, |number| &config.routes[number].config).settings;
        let is_reading = [Method::GET, Method::HEAD].contains(method);
        lines.push(match settings.covers(method) {
            _ if is_reading && *path == PublishedRules::PATH && config.published_rules.is_some() => {
                "The sidecar answers it with the rules (published-rules), and the service does not get it.".to_owned()
            }
            true if settings.profile().protocol() == Protocol::Mcp => {
                "Its method is covered. Of its messages, only calls of tools are; all others pass.".to_owned()
            }
            true => "Its method is covered.".to_owned(),
            false if settings.refuses_keys_of(method) => {
                let status = settings.profile().refusal_status(Condition::KeyUnsupported).as_u16();
                format!("Its method is not covered: it passes without a key, and with one it is refused: {status} key-unsupported.")
            }
            false => "Its method is not covered: it passes, and a key has no effect.".to_owned(),
        });
        lines
    }
}

fn print(out: &mut impl Write, about: &[String], rows: &[Row]) -> io::Result<()> {
    about.iter().try_for_each(|line| writeln!(out, "{line}"))?;
    writeln!(out)?;
    let width =
        |of: fn(&Row) -> &str| rows.iter().map(|row| of(row).chars().count()).max().unwrap_or(0).min(48);
    let (names, values) = (width(|row| row.name), width(|row| &row.value));
    rows.iter().try_for_each(|Row { name, value, source, .. }| {
        writeln!(out, "{name:names$}  {value:values$}  {}", paint(Tone::Quiet, source))
    })
}

/// A method and a path without its query.
pub(crate) fn read_request(text: &str) -> Option<(Method, PathAndQuery)> {
    let (method, path) = text.trim().split_once(char::is_whitespace).unwrap_or(("POST", text.trim()));
    let path: PathAndQuery =
        path.trim().parse().ok().filter(|path: &PathAndQuery| path.path().starts_with('/'))?;
    Some((Method::from_bytes(method.to_ascii_uppercase().as_bytes()).ok()?, path))
}

/// The settings that a route can have, in the order of the reference page, and then the values that only a profile has.
pub(crate) fn rows(config: &Config, route: Option<usize>, given: &GivenEntries) -> Vec<Row> {
    let effective = EffectiveSettings::new(config, given, route);
    let settings = SETTINGS.iter().filter(|setting| setting.settable_in == SettableIn::Route);
    let settings = settings.map(|setting| effective.row(setting));
    settings.chain(effective.only_in_profile()).collect()
}

/// The text of a value that a profile does not have.
const NO_VALUE: &str = "–";

/// The settings that apply on a route, or outside of routes.
pub(crate) struct EffectiveSettings<'a> {
    given: &'a GivenEntries,
    route: Option<usize>,
    by_profile: Vec<(&'static str, String)>,
    profile: String,
    /// The entry `completion = "upstream"`, if it applies.
    completion: Option<&'a Entry>,
}

impl<'a> EffectiveSettings<'a> {
    pub(crate) fn new(config: &Config, given: &'a GivenEntries, route: Option<usize>) -> Self {
        let applies = route.map_or(&config.default, |number| &config.routes[number].config);
        let profile = applies.settings.profile();
        let completion = Setting::named("completion")
            .and_then(|setting| given.of(setting, route))
            .filter(|_| applies.settings.completed_by() == CompletedBy::Upstream);
        let mut by_profile = profile.rows();
        // The setting is the name alone; only a profile sets the value of the field.
        if let Some((_, marker)) = by_profile.iter_mut().find(|(name, _)| *name == "replay-marker") {
            *marker = profile.replay_marker().0;
        }
        Self { given, route, by_profile, profile: format!("profile {}", profile.name()), completion }
    }

    /// The value of a setting and its source.
    pub(crate) fn row(&self, setting: &Setting) -> Row {
        let name = setting.name;
        // With this setting, these have one possible value each.
        let implied = [("on-abandoned", "reexecute"), ("server-errors", "release")];
        if let Some(completion) = self.completion
            && let Some((_, value)) = implied.into_iter().find(|(own, _)| *own == name)
        {
            let source = format!("completion, {}", completion.source);
            return Row::new(name, Raw::Text(value.to_owned()), source, Origin::Profile);
        }
        if let Some(entry) = self.given.of(setting, self.route) {
            return Row::new(name, entry.raw.clone(), entry.source.to_string(), Origin::Given);
        }
        let by_profile = self.by_profile.iter().find(|(own, _)| *own == name);
        match (by_profile, setting.default) {
            // No header field carries the key, which a setting cannot say.
            (Some((_, value)), _) if value == NO_VALUE => Row::unset(name, self.profile.clone()),
            (Some((_, value)), _) => {
                Row::new(name, Raw::Text(value.clone()), self.profile.clone(), Origin::Profile)
            }
            (None, Fallback::Value(text) | Fallback::Profile(text)) => {
                Row::new(name, Raw::Text(text.to_owned()), "default".to_owned(), Origin::Default)
            }
            (None, Fallback::Nothing("")) => Row::unset(name, "default".to_owned()),
            (None, Fallback::Nothing(words)) => Row::unset(name, format!("default: {words}")),
        }
    }

    /// The values that only the profile has.
    fn only_in_profile(&self) -> impl Iterator<Item = Row> {
        self.by_profile.iter().filter(|(name, _)| Setting::named(name).is_none()).map(|(name, value)| {
            Row::new(name, Raw::Text(value.clone()), self.profile.clone(), Origin::Profile)
        })
    }
}
