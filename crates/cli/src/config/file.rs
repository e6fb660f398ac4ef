//! Settings from the TOML file.

use std::ops::Range;
use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::Entry;
use super::problem::{FilePlace, Problem, Source, did_you_mean};
use super::settings::{Raw, SETTINGS, SettableIn, Setting, Shape};

/// The content of the configuration file.
#[derive(Default)]
pub(super) struct FileContent {
    pub(super) entries: Vec<Entry>,
    pub(super) routes: Vec<RouteTable>,
}

/// One `[[route]]` table.
pub(super) struct RouteTable {
    pub(super) source: Source,
    /// Its path pattern, if it has one.
    pub(super) path: Option<(String, Source)>,
    pub(super) entries: Vec<Entry>,
}

/// Reads the file; `None` if it is not TOML.
pub(super) fn read(name: &str, text: &str, problems: &mut Vec<Problem>) -> Option<FileContent> {
    let mut reader = TomlReader { name: name.into(), text, problems };
    let (table, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        for error in errors {
            let source = reader.source(&error.span().unwrap_or(0..0), None);
            reader.problems.push(Problem::error(source, format!("not TOML: {}", error.message().trim_end())));
        }
        return None;
    }
    let mut content = FileContent::default();
    for (key, value) in in_order(table.get_ref()) {
        match (key.get_ref().as_ref(), value.get_ref()) {
            ("route", DeValue::Array(tables)) => {
                content.routes.extend(tables.iter().filter_map(|table| reader.route(table)));
            }
            ("route", _) => reader.error(
                &value.span(),
                Some("route"),
                "write [[route]], with two brackets, because there can be several routes",
            ),
            _ => reader.entry("", key, value, false, &mut content.entries),
        }
    }
    Some(content)
}

struct TomlReader<'a> {
    name: Arc<str>,
    text: &'a str,
    problems: &'a mut Vec<Problem>,
}

type Key<'i> = Spanned<std::borrow::Cow<'i, str>>;
type Value<'i> = Spanned<DeValue<'i>>;

impl TomlReader<'_> {
    fn route(&mut self, value: &Value<'_>) -> Option<RouteTable> {
        let DeValue::Table(table) = value.get_ref() else {
            self.error(&value.span(), Some("route"), "write [[route]] tables");
            return None;
        };
        let source = self.source(&value.span(), Some("route"));
        let mut route = RouteTable { source: source.clone(), path: None, entries: Vec::new() };
        for (key, value) in in_order(table) {
            match (key.get_ref().as_ref(), value.get_ref()) {
                ("path", DeValue::String(path)) => {
                    route.path = Some((path.to_string(), self.source(&value.span(), Some("path"))));
                }
                ("path", other) => {
                    let what = format!("{} instead of a text such as \"/payments/{{id}}\"", article(other));
                    self.error(&value.span(), Some("path"), what);
                }
                ("method", _) => match Setting::named("methods") {
                    Some(methods) if !table.contains_key("methods") => {
                        self.value(methods, "method", value, &mut route.entries);
                    }
                    _ => self.error(
                        &key.span(),
                        None,
                        "`method` and `methods` in one route; write one of them",
                    ),
                },
                _ => self.entry("", key, value, true, &mut route.entries),
            }
        }
        if route.path.is_none() && !table.contains_key("path") {
            let what =
                "a route has a path; write one, such as path = \"/payments/{id}\" or path = \"/v1/{*rest}\"";
            self.problems.push(Problem::error(source, what));
        }
        Some(route)
    }

    fn entry(
        &mut self,
        prefix: &str,
        key: &Key<'_>,
        value: &Value<'_>,
        in_route: bool,
        entries: &mut Vec<Entry>,
    ) {
        let name = format!("{prefix}{}", key.get_ref());
        let inside = format!("{name}.");
        if SETTINGS.iter().any(|setting| setting.name.starts_with(&inside)) {
            match value.get_ref() {
                DeValue::Table(table) => {
                    for (key, value) in in_order(table) {
                        self.entry(&inside, key, value, in_route, entries);
                    }
                }
                other => {
                    let example = match &*name {
                        "rate-limit" => "{ caller = \"10/s\" }",
                        "cors" => "{ allowed-origins = [\"https://shop.example\"] }",
                        _ => "{ exclude = [\"/meta/timestamp\"] }",
                    };
                    let what = format!("{} instead of a table, such as {name} = {example}", article(other));
                    self.error(&value.span(), Some(&name), what);
                }
            }
            return;
        }
        match Setting::named(&name) {
            Some(setting) if setting.settable_in == SettableIn::Start => {
                self.error(&key.span(), None, format!("`{name}` names this file, so it cannot be in it"));
            }
            Some(setting) if setting.settable_in == SettableIn::Secret => {
                let what = format!(
                    "a secret does not belong here; put it into {} or name a file with `{name}-file`",
                    setting.variable()
                );
                self.error(&key.span(), Some(&name), what);
            }
            Some(setting) if in_route && setting.settable_in != SettableIn::Route => {
                self.error(
                    &key.span(),
                    None,
                    format!("`{name}` is for the whole sidecar; write it above the first [[route]]"),
                );
            }
            Some(setting) => self.value(setting, &name, value, entries),
            None => self.unknown(&name, key, in_route),
        }
    }

    fn unknown(&mut self, name: &str, key: &Key<'_>, in_route: bool) {
        if !in_route && matches!(name, "path" | "method") {
            return self.error(&key.span(), None, format!("`{name}` belongs in a [[route]] table"));
        }
        let settings = SETTINGS.iter().filter(|setting| match setting.settable_in {
            SettableIn::Route => true,
            SettableIn::Service | SettableIn::Live => !in_route,
            SettableIn::Start | SettableIn::Secret => false,
        });
        // Inside of a table, only the part after its name is compared, because the name makes all keys similar.
        let (table, word) = name.rsplit_once('.').map_or(("", name), |(table, word)| (table, word));
        let in_table = |setting: &'static Setting| match table {
            "" => Some(setting.name),
            table => setting.name.strip_prefix(table)?.strip_prefix('.'),
        };
        let others: &[&str] = match (table, in_route) {
            ("", true) => &["path", "method"],
            ("", false) => &["route"],
            _ => &[],
        };
        let hint = did_you_mean(word, settings.filter_map(in_table).chain(others.iter().copied()));
        self.error(&key.span(), None, format!("no such setting `{name}`{hint}"));
    }

    fn value(&mut self, setting: &'static Setting, name: &str, value: &Value<'_>, entries: &mut Vec<Entry>) {
        let source = self.source(&value.span(), Some(name));
        match raw(setting, value.get_ref()) {
            Ok(raw) => entries.push(Entry { setting, raw, source }),
            Err(what) => self.problems.push(Problem::error(source, what)),
        }
    }

    fn error(&mut self, span: &Range<usize>, key: Option<&str>, message: impl Into<String>) {
        let source = self.source(span, key);
        self.problems.push(Problem::error(source, message));
    }

    /// The source of a value: line and column, both from 1, columns in characters.
    fn source(&self, span: &Range<usize>, key: Option<&str>) -> Source {
        let before = self.text.get(..span.start).unwrap_or(self.text);
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        Source::File(FilePlace {
            file: self.name.clone(),
            line: before.matches('\n').count() + 1,
            column: before.get(line_start..).map_or(0, |line| line.chars().count()) + 1,
            key: key.map(str::to_owned),
        })
    }
}

/// The value as text, for the reader of the setting.
fn raw(setting: &Setting, value: &DeValue<'_>) -> Result<Raw, String> {
    match (value, setting.shape) {
        (DeValue::Array(items), Shape::Many) => {
            let texts = items.iter().map(|item| match item.get_ref() {
                DeValue::String(text) => Ok(text.to_string()),
                DeValue::Integer(number) => Ok(number.to_string()),
                other => Err(format!("{} in a list of texts or numbers", article(other))),
            });
            texts.collect::<Result<_, _>>().map(Raw::List)
        }
        (DeValue::String(text), Shape::Many) => Ok(Raw::List(vec![text.to_string()])),
        (DeValue::Integer(number), Shape::Many) => Ok(Raw::List(vec![number.to_string()])),
        (DeValue::Boolean(yes), Shape::Switch) => Ok(Raw::Text(yes.to_string())),
        (_, Shape::Switch) => Err(format!("{} instead of true or false without quotes", article(value))),
        (_, Shape::Many) => Err(format!("{} instead of a list, such as [\"…\", \"…\"]", article(value))),
        (DeValue::String(text), Shape::One) => Ok(Raw::Text(text.to_string())),
        (DeValue::Integer(number), Shape::One) => Ok(Raw::Text(number.to_string())),
        // As it is written, so that no rounding shows.
        (DeValue::Float(number), Shape::One) if setting.value == "RATIO" => {
            Ok(Raw::Text(number.as_str().to_owned()))
        }
        (_, Shape::One) => Err(format!("{} instead of a text, such as \"…\"", article(value))),
    }
}

fn article(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a text",
        DeValue::Integer(_) => "a number",
        DeValue::Float(_) => "a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

/// The entries in the order in which they are written.
fn in_order<'a, 'i>(table: &'a DeTable<'i>) -> Vec<(&'a Key<'i>, &'a Value<'i>)> {
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    entries
}
