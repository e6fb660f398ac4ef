//! Profiles as TOML files.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::time::Duration;

use http::header::{HeaderName, HeaderValue};
use http::{Method, StatusCode};
use oncegate_core::fingerprint::FingerprintRules;
use oncegate_core::{JsonPointer, RecordId, limits};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::template::Template;
use super::{
    BodyComparison, BodyPart, ExtraHeaders, HeaderPart, KeyScope, Profile, RefusalText, RefusalWords,
    ServerErrors, UncoveredMethods,
};
use crate::carrier::KeyMember;
use crate::headers::is_reserved;
use crate::key::{KeyFormat, KeySyntax, has_other_purpose};
use crate::mcp::Protocol;
use crate::method;
use crate::refusal::{Condition, shown};
use crate::settings::repeated;

/// The mistakes in a profile's file, from top to bottom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProfileErrors(pub Vec<ProfileError>);

/// A mistake in a profile's file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProfileError {
    /// The line, from 1.
    pub line: usize,
    /// The column in characters, from 1.
    pub column: usize,
    /// The key, if the mistake is in its value.
    pub key: Option<String>,
    /// The mistake, and what to write instead.
    pub message: String,
}

impl fmt::Display for ProfileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: ", self.line, self.column)?;
        if let Some(key) = &self.key {
            write!(f, "{key}: ")?;
        }
        f.write_str(&self.message)
    }
}

impl fmt::Display for ProfileErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, error) in self.0.iter().enumerate() {
            f.write_str(if at == 0 { "" } else { "\n" })?;
            error.fmt(f)?;
        }
        Ok(())
    }
}

impl std::error::Error for ProfileErrors {}

type Value<'i> = Spanned<DeValue<'i>>;
type Table<'i> = DeTable<'i>;

/// A record, for the bodies that are checked.
const RECORD: RecordId = RecordId::from_bytes([0; 32]);

/// The largest file, in bytes.
const MAX_FILE_BYTES: usize = 64 * 1024;

/// One key of a profile's file: its name, and the function that reads its value.
type Key = (&'static str, fn(&mut Profile, &Value<'_>) -> Result<(), Vec<Mistake>>);

/// A mistake at a place in the text.
struct Mistake {
    span: Range<usize>,
    message: String,
}

/// The keys of the top level.
const KEYS: &[Key] = &[
    ("title", |profile, value| set(&mut profile.title, text(value).map(str::to_owned))),
    ("sources", |profile, value| set(&mut profile.sources, list(value, |text| Ok(text.to_owned())))),
    ("deviations", |profile, value| set(&mut profile.deviations, list(value, |text| Ok(text.to_owned())))),
    ("key-header", |profile, value| set(&mut profile.key_headers, list(value, key_header))),
    ("key-query", |profile, value| set(&mut profile.key_query, list(value, parameter))),
    ("key-member", |profile, value| set(&mut profile.key_members, list(value, key_member))),
    ("first-sent-header", |profile, value| {
        set(&mut profile.first_sent_header, one(value, |text| key_header(text).map(Some)))
    }),
    ("protocol", |profile, value| set(&mut profile.protocol, choice(value, &PROTOCOLS))),
    ("run-member", |profile, value| set(&mut profile.run_members, list(value, key_member))),
    ("key-syntax", |profile, value| set(&mut profile.grammar.syntax, choice(value, &KEY_SYNTAXES))),
    ("key-format", |profile, value| set(&mut profile.grammar.format, one(value, key_format))),
    ("key-scope", |profile, value| set(&mut profile.key_scope, choice(value, &KEY_SCOPES))),
    ("key-scope-header", |profile, value| set(&mut profile.key_scope_headers, list(value, header_name))),
    ("require-key", |profile, value| set(&mut profile.require_key, boolean(value))),
    ("methods", |profile, value| set(&mut profile.methods, list(value, covered_method))),
    ("uncovered-methods", |profile, value| set(&mut profile.uncovered_methods, choice(value, &UNCOVERED))),
    ("retention", |profile, value| set(&mut profile.retention, one(value, retention))),
    ("server-errors", |profile, value| set(&mut profile.server_errors, choice(value, &SERVER_ERRORS))),
    ("release-statuses", |profile, value| {
        set(&mut profile.release_statuses, list(value, statuses).map(|lists| lists.concat()))
    }),
    ("replay-statuses", |profile, value| replay_statuses(&mut profile.replay_statuses, value)),
    ("replay-marker", |profile, value| set(&mut profile.replay_marker, one(value, marker))),
    ("echo-key", |profile, value| set(&mut profile.echo_key, boolean(value))),
];

pub(super) const PROTOCOLS: [(&str, Protocol); 2] = [("http", Protocol::Http), ("mcp", Protocol::Mcp)];
pub(super) const KEY_SYNTAXES: [(&str, KeySyntax); 3] =
    [("lenient", KeySyntax::Lenient), ("strict", KeySyntax::Strict), ("raw", KeySyntax::Raw)];
pub(super) const KEY_SCOPES: [(&str, KeyScope); 2] =
    [("endpoint", KeyScope::Endpoint), ("caller", KeyScope::Caller)];
pub(super) const UNCOVERED: [(&str, UncoveredMethods); 2] =
    [("pass", UncoveredMethods::Pass), ("refuse", UncoveredMethods::Refuse)];
pub(super) const COMPARISONS: [(&str, BodyComparison); 3] = [
    ("canonical", BodyComparison::Canonical),
    ("raw", BodyComparison::Raw),
    ("nothing", BodyComparison::Nothing),
];
pub(super) const SERVER_ERRORS: [(&str, ServerErrors); 2] =
    [("replay", ServerErrors::Replay), ("release", ServerErrors::Release)];

/// Reads a profile. Values that the text does not give are those of the profile that it extends.
pub(super) fn read(name: &str, text: &str) -> Result<Profile, ProfileErrors> {
    if text.len() > MAX_FILE_BYTES {
        let message = format!("the file has {} bytes; a profile has at most {MAX_FILE_BYTES}", text.len());
        return Err(ProfileErrors(vec![ProfileError { line: 1, column: 1, key: None, message }]));
    }
    let (table, errors) = DeTable::parse_recoverable(text);
    let mut reader = Reader { text, errors: Vec::new() };
    for error in errors {
        reader.error(
            &error.span().unwrap_or(0..0),
            None,
            format!("not TOML: {}", error.message().trim_end()),
        );
    }
    if !reader.errors.is_empty() {
        return Err(ProfileErrors(reader.errors));
    }
    let table = table.get_ref();
    let mut profile = reader.base(table);
    name.clone_into(&mut profile.name);
    for (key, value) in table {
        let (span, key) = (key.span(), key.get_ref().as_ref());
        match key {
            "extends" => {}
            "fingerprint" => reader.fingerprint(&mut profile, value),
            "headers" => reader.headers(&mut profile, value),
            "refusal" => reader.refusal(&mut profile, value),
            _ => match KEYS.iter().find(|(own, _)| *own == key) {
                Some((_, read)) => reader.note(key, read(&mut profile, value)),
                None => reader.unknown(&span, key, all_keys()),
            },
        }
    }
    reader.check(&profile, table);
    reader.errors.sort_by_key(|error| (error.line, error.column));
    if reader.errors.is_empty() { Ok(profile) } else { Err(ProfileErrors(reader.errors)) }
}

fn all_keys() -> impl Iterator<Item = &'static str> {
    KEYS.iter().map(|(name, _)| *name).chain(["extends", "fingerprint", "headers", "refusal"])
}

struct Reader<'a> {
    text: &'a str,
    errors: Vec<ProfileError>,
}

impl Reader<'_> {
    fn error(&mut self, span: &Range<usize>, key: Option<&str>, message: impl Into<String>) {
        let before = self.text.get(..span.start).unwrap_or(self.text);
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        self.errors.push(ProfileError {
            line: before.matches('\n').count() + 1,
            column: before.get(line_start..).map_or(0, |line| line.chars().count()) + 1,
            key: key.map(str::to_owned),
            message: message.into(),
        });
    }

    fn note(&mut self, key: &str, result: Result<(), Vec<Mistake>>) {
        for mistake in result.err().into_iter().flatten() {
            self.error(&mistake.span, Some(key), mistake.message);
        }
    }

    fn unknown<'c>(&mut self, span: &Range<usize>, key: &str, known: impl Iterator<Item = &'c str>) {
        let hint = did_you_mean(key, known);
        self.error(span, None, format!("no such key `{key}`{hint}"));
    }

    /// The profile that this one extends: `ietf` if it names none.
    fn base(&mut self, table: &Table<'_>) -> Profile {
        let Some(value) = table.get("extends") else {
            return Profile::default();
        };
        let found = one(value, |name| {
            let known = || Profile::names().into_iter();
            Profile::named(name)
                .ok_or_else(|| format!("there is no profile {name:?}{}", did_you_mean(name, known())))
        });
        match found {
            // What it says of itself is not true of another profile.
            Ok(base) => Profile { sources: Vec::new(), deviations: Vec::new(), ..base },
            Err(mistakes) => {
                self.note("extends", Err(mistakes));
                Profile::default()
            }
        }
    }

    /// The rules by which requests are compared.
    fn fingerprint(&mut self, profile: &mut Profile, value: &Value<'_>) {
        let Some(table) = self.table("fingerprint", value) else { return };
        let mut included = profile.fingerprint.included().to_vec();
        let mut excluded = profile.fingerprint.excluded().to_vec();
        for (key, value) in table {
            let (span, key) = (key.span(), key.get_ref().as_ref());
            let name = format!("fingerprint.{key}");
            let result = match key {
                "body" => set(&mut profile.body_comparison, choice(value, &COMPARISONS)),
                "include" => set(&mut included, list(value, json_pointer)),
                "exclude" => set(&mut excluded, list(value, json_pointer)),
                "headers" => set(&mut profile.fingerprint_headers, list(value, header_name)),
                _ => {
                    self.unknown(&span, key, ["body", "include", "exclude", "headers"].into_iter());
                    continue;
                }
            };
            self.note(&name, result);
        }
        let rules = included.into_iter().fold(FingerprintRules::new(), FingerprintRules::include);
        profile.fingerprint = excluded.into_iter().fold(rules, FingerprintRules::exclude);
        profile.set_body_comparison(profile.body_comparison);
    }

    /// The tables of header fields that are added to responses.
    fn headers(&mut self, profile: &mut Profile, value: &Value<'_>) {
        let Some(tables) = self.table("headers", value) else { return };
        for (key, value) in tables {
            let (span, key) = (key.span(), key.get_ref().as_ref());
            let fields = match key {
                "response" => &mut profile.response_headers,
                "kept-server-error" => &mut profile.kept_server_error_headers,
                "refusal" => &mut profile.refusal_headers,
                "rejection" => &mut profile.rejection_headers,
                _ => {
                    let known = ["response", "kept-server-error", "refusal", "rejection"];
                    self.unknown(&span, key, known.into_iter());
                    continue;
                }
            };
            let name = format!("headers.{key}");
            let Some(table) = self.table(&name, value) else { continue };
            self.note(&name, add_headers(fields, table));
        }
    }

    /// The shape of refusals.
    fn refusal(&mut self, profile: &mut Profile, value: &Value<'_>) {
        let Some(table) = self.table("refusal", value) else { return };
        let shape = &mut profile.refusal;
        for (key, value) in table {
            let (span, key) = (key.span(), key.get_ref().as_ref());
            let name = format!("refusal.{key}");
            match key {
                "media-type" => {
                    self.note(&name, set(&mut shape.media_type, one(value, media_type)));
                }
                "body" => self.note(&name, set(&mut shape.body, body_template(value))),
                "tool-body" => self.note(&name, set(&mut shape.tool_body, body_template(value).map(Some))),
                "kind" | "code" => self.word(&name, key, value, &mut shape.default),
                "4xx" => self.words(&name, value, &mut shape.client_errors, &["kind", "code"]),
                "5xx" => self.words(&name, value, &mut shape.server_errors, &["kind", "code"]),
                _ => match Condition::ALL.into_iter().find(|condition| condition.slug() == key) {
                    Some(condition) => {
                        let mut words = shape.row(condition).cloned().unwrap_or_default();
                        self.words(&name, value, &mut words, &["status", "kind", "code"]);
                        shape.rows.retain(|(own, _)| *own != condition);
                        shape.rows.push((condition, words));
                    }
                    None => {
                        let known =
                            ["media-type", "body", "tool-body", "kind", "code", "4xx", "5xx"].into_iter();
                        self.unknown(&span, key, known.chain(Condition::ALL.map(Condition::slug)));
                    }
                },
            }
        }
    }

    /// A table of words, of which these may be given.
    fn words(&mut self, name: &str, value: &Value<'_>, words: &mut RefusalWords, known: &[&'static str]) {
        let Some(row) = self.table(name, value) else { return };
        for (key, value) in row {
            let (span, key) = (key.span(), key.get_ref().as_ref());
            match known.contains(&key) {
                true => self.word(&format!("{name}.{key}"), key, value, words),
                false => self.unknown(&span, key, known.iter().copied()),
            }
        }
    }

    fn word(&mut self, name: &str, key: &str, value: &Value<'_>, words: &mut RefusalWords) {
        let result = match key {
            "status" => set(&mut words.status, error_status(value).map(Some)),
            "kind" => set(&mut words.kind, one(value, |text| Ok(Some(text.to_owned())))),
            _ => set(&mut words.code, one(value, |text| Ok(Some(text.to_owned())))),
        };
        self.note(name, result);
    }

    fn table<'v, 'i>(&mut self, key: &str, value: &'v Value<'i>) -> Option<&'v Table<'i>> {
        match value.get_ref() {
            DeValue::Table(table) => Some(table),
            other => {
                self.error(&value.span(), Some(key), format!("{} instead of a table", article(other)));
                None
            }
        }
    }

    /// Checks what no value shows alone.
    fn check(&mut self, profile: &Profile, table: &Table<'_>) {
        let place = |key: &str| table.get(key).map_or(0..0, Spanned::span);
        if !profile.has_carrier() {
            let message = "nothing carries the key; name a header field, a parameter of the query or a member of the body";
            self.error(&place("key-header"), Some("key-header"), message);
        }
        if !table.contains_key("title") {
            self.error(&(0..0), None, "a profile has a title; write one, such as title = \"Our API\"");
        }
        if profile.methods.is_empty() {
            self.error(&place("methods"), Some("methods"), "the list is empty, so no request is protected");
        }
        if let Some(name) = repeated(&profile.key_headers) {
            let message = format!("the header field {} is there twice", shown(name));
            self.error(&place("key-header"), Some("key-header"), message);
        }
        let marker = &profile.replay_marker.0;
        for (key, name) in
            [("first-sent-header", profile.first_sent_header.as_ref()), ("replay-marker", Some(marker))]
        {
            if let Some(name) = name.filter(|name| profile.key_headers.contains(name)) {
                let message = format!("the header field {} carries the key; name another one", shown(name));
                self.error(&place(key), Some(key), message);
            }
        }
        if profile.stored_headers().any(|name| name == marker) {
            let message =
                format!("the header field {} marks replays; no other response may have it", shown(marker));
            self.error(&place("headers"), Some("headers"), message);
        }
        if profile.protocol == Protocol::Mcp {
            if profile.refusal.tool_body.is_none() {
                let message =
                    "no body for the refusals of calls, refusal.tool-body; write one, or extends = \"mcp\"";
                self.error(&place("protocol"), Some("protocol"), message);
            }
            if !method::contains(&profile.methods, &Method::POST) {
                let message = "all calls of tools are POST requests; add \"POST\"";
                self.error(&place("methods"), Some("methods"), message);
            }
        }
        self.check_bodies(profile, table);
    }

    /// Checks that the bodies of all refusals are JSON if their media type says so.
    fn check_bodies(&mut self, profile: &Profile, table: &Table<'_>) {
        let shape = &profile.refusal;
        let forms = [("body", shape.is_json(), None), ("tool-body", shape.tool_body.is_some(), Some("1"))];
        for (key, _, message_id) in forms.into_iter().filter(|(_, is_checked, _)| *is_checked) {
            let cases = Condition::ALL
                .into_iter()
                .flat_map(|condition| [(condition, None), (condition, Some(RECORD))]);
            for (condition, record) in cases {
                let status = profile.refusal_status(condition);
                let text = RefusalText {
                    condition,
                    status,
                    detail: "detail",
                    record,
                    retry_after: None,
                    message_id,
                };
                let (body, _) = profile.refusal_body(&text);
                if let Err(error) = serde_json::from_str::<serde_json::Value>(&body) {
                    let refusal = table.get("refusal");
                    let own = refusal.and_then(|refusal| refusal.get_ref().as_table()?.get(key));
                    let place = own.or(refusal).map_or(0..0, Spanned::span);
                    let message = format!("the body of {condition} is not JSON ({error}): {body}");
                    self.error(&place, Some(&format!("refusal.{key}")), message);
                    break;
                }
            }
        }
    }
}

fn body_template(value: &Value<'_>) -> Result<Template<BodyPart>, Vec<Mistake>> {
    one(value, |text| {
        Template::parse(text, BodyPart::named).map_err(|unknown| {
            let names = BodyPart::ALL.map(|(name, _)| name);
            format!("{unknown}; the names are {}", names.join(", "))
        })
    })
}

fn set<T>(field: &mut T, read: Result<T, Vec<Mistake>>) -> Result<(), Vec<Mistake>> {
    *field = read?;
    Ok(())
}

fn mistake(value: &Value<'_>, message: impl Into<String>) -> Vec<Mistake> {
    vec![Mistake { span: value.span(), message: message.into() }]
}

fn text<'v>(value: &'v Value<'_>) -> Result<&'v str, Vec<Mistake>> {
    match value.get_ref() {
        DeValue::String(text) => Ok(text),
        other => Err(mistake(value, format!("{} instead of a text in quotes", article(other)))),
    }
}

fn boolean(value: &Value<'_>) -> Result<bool, Vec<Mistake>> {
    match value.get_ref() {
        DeValue::Boolean(is) => Ok(*is),
        other => Err(mistake(value, format!("{} instead of true or false", article(other)))),
    }
}

/// One text, read by `read`.
fn one<T>(value: &Value<'_>, read: impl Fn(&str) -> Result<T, String>) -> Result<T, Vec<Mistake>> {
    read(text(value)?).map_err(|message| mistake(value, message))
}

/// A list of texts, each read by `read`, with the mistakes of all of them.
fn list<T>(value: &Value<'_>, read: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, Vec<Mistake>> {
    let DeValue::Array(values) = value.get_ref() else {
        let found = article(value.get_ref());
        return Err(mistake(value, format!("{found} instead of a list, such as [\"a\", \"b\"]")));
    };
    if values.len() > limits::MAX_KEY_MEMBERS.max(64) {
        return Err(mistake(value, format!("{} values are too many", values.len())));
    }
    let (mut good, mut bad) = (Vec::new(), Vec::new());
    for value in values.iter() {
        match one(value, &read) {
            Ok(value) => good.push(value),
            Err(mistakes) => bad.extend(mistakes),
        }
    }
    if bad.is_empty() { Ok(good) } else { Err(bad) }
}

/// One of these words.
fn choice<T: Copy>(value: &Value<'_>, choices: &[(&str, T)]) -> Result<T, Vec<Mistake>> {
    one(value, |text| {
        let names = || choices.iter().map(|(name, _)| *name);
        choices.iter().find(|(name, _)| *name == text).map(|(_, value)| *value).ok_or_else(|| {
            let all: Vec<_> = names().collect();
            format!("{text:?} is not one of {}{}", all.join(", "), did_you_mean(text, names()))
        })
    })
}

fn header_name(text: &str) -> Result<HeaderName, String> {
    text.parse().map_err(|_| format!("{text:?} is not the name of a header field"))
}

fn key_header(text: &str) -> Result<HeaderName, String> {
    let name = header_name(text)?;
    if has_other_purpose(&name) {
        return Err(format!(
            "the header field {text} has another purpose; name a field that carries only keys"
        ));
    }
    Ok(name)
}

fn json_pointer(text: &str) -> Result<JsonPointer, String> {
    JsonPointer::parse(text).map_err(|error| format!("{text:?} is not a JSON pointer: {error}"))
}

fn key_member(text: &str) -> Result<KeyMember, String> {
    KeyMember::new(json_pointer(text)?)
}

fn parameter(text: &str) -> Result<String, String> {
    match text {
        "" => Err("\"\" is not the name of a parameter".to_owned()),
        _ => Ok(text.to_owned()),
    }
}

fn key_format(text: &str) -> Result<KeyFormat, String> {
    match (text, text.strip_prefix("pattern:")) {
        ("any", _) => Ok(KeyFormat::Any),
        ("uuid", _) => Ok(KeyFormat::Uuid),
        ("ulid", _) => Ok(KeyFormat::Ulid),
        (_, Some(pattern)) => KeyFormat::pattern(pattern).map_err(|error| error.to_string()),
        _ => Err(format!("{text:?} is not one of any, uuid, ulid, pattern:REGEX")),
    }
}

fn covered_method(text: &str) -> Result<Method, String> {
    let upper = text.to_ascii_uppercase();
    match Method::from_bytes(text.as_bytes()) {
        Ok(_) if text != upper => Err(format!("{text:?} is not a method; did you mean `{upper}`?")),
        Ok(method) if method::has_effect(&method) => Ok(method),
        Ok(_) => {
            Err(format!("the method {text} cannot be covered: a key protects requests that change something"))
        }
        Err(_) => Err(format!("{text:?} is not a method")),
    }
}

fn retention(text: &str) -> Result<Duration, String> {
    const UNITS: [(char, u64); 4] = [('s', 1), ('m', 60), ('h', 3600), ('d', 86_400)];
    let number = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit =
        UNITS.into_iter().find(|(unit, _)| text.strip_prefix(number) == Some(unit.to_string().as_str()));
    let seconds = match (number.parse::<u64>(), unit) {
        (Ok(number), Some((_, seconds))) => number.checked_mul(seconds),
        _ => {
            return Err(format!(
                "{text:?} is not a duration; write a number and a unit, such as \"24h\" or \"30d\""
            ));
        }
    };
    let duration = seconds.map(Duration::from_secs).unwrap_or(Duration::MAX);
    if (Duration::from_secs(1)..=limits::MAX_RETENTION).contains(&duration) {
        return Ok(duration);
    }
    Err(format!("{text:?} is out of bounds; from 1s to 400d is allowed"))
}

fn error_status(value: &Value<'_>) -> Result<StatusCode, Vec<Mistake>> {
    match integer(value).and_then(|status| StatusCode::from_u16(status).ok()) {
        Some(status) if status.is_client_error() || status.is_server_error() => Ok(status),
        _ => Err(mistake(value, "write a status from 400 to 599, without quotes")),
    }
}

fn integer(value: &Value<'_>) -> Option<u16> {
    match value.get_ref() {
        DeValue::Integer(number) => u16::from_str_radix(number.as_str(), number.radix()).ok(),
        _ => None,
    }
}

/// A status such as `"422"`, or all statuses of a class, `"4xx"`.
fn statuses(text: &str) -> Result<Vec<StatusCode>, String> {
    let all = match text {
        "4xx" => 400..500,
        "5xx" => 500..600,
        _ => match text.parse::<u16>() {
            Ok(status) if (400..600).contains(&status) => status..status + 1,
            _ => return Err(format!("{text:?} is not one of \"400\" to \"599\", \"4xx\", \"5xx\"")),
        },
    };
    Ok(all.filter_map(|status| StatusCode::from_u16(status).ok()).collect())
}

/// Adds these statuses of replays to those of the profile that is extended.
fn replay_statuses(
    statuses: &mut Vec<(StatusCode, StatusCode)>,
    value: &Value<'_>,
) -> Result<(), Vec<Mistake>> {
    let DeValue::Table(table) = value.get_ref() else {
        return Err(mistake(value, "write a table, such as { 201 = 200 }"));
    };
    let mut bad = Vec::new();
    for (first, replay) in table {
        let is_final = |status: &StatusCode| (200..600).contains(&status.as_u16());
        let from = first.get_ref().parse::<u16>().ok().and_then(|status| StatusCode::from_u16(status).ok());
        let to = integer(replay).and_then(|status| StatusCode::from_u16(status).ok());
        match (from.filter(is_final), to.filter(is_final)) {
            (Some(from), Some(to)) if from.as_u16() / 100 != to.as_u16() / 100 => {
                bad.extend(mistake(
                    replay,
                    format!("a replay of {from} cannot have {to}: that is another kind of result"),
                ));
            }
            (Some(from), Some(to)) if from != to && [204, 205, 304].contains(&to.as_u16()) => {
                bad.extend(mistake(replay, format!("a replay cannot have {to}: its body would be lost")));
            }
            (Some(from), Some(to)) => {
                statuses.retain(|(own, _)| *own != from);
                statuses.push((from, to));
            }
            _ => bad.extend(mistake(replay, "write two statuses from 200 to 599, such as 201 = 200")),
        }
    }
    if bad.is_empty() { Ok(()) } else { Err(bad) }
}

fn media_type(text: &str) -> Result<HeaderValue, String> {
    let is_token = |part: &str| {
        let is_of_token = |byte| u8::is_ascii_alphanumeric(&byte) || b"!#$&-^_.+".contains(&byte);
        !part.is_empty() && part.bytes().all(is_of_token)
    };
    let essence = text.split(';').next().unwrap_or_default().trim_end();
    let is_type = essence.split_once('/').is_some_and(|(kind, name)| is_token(kind) && is_token(name));
    match HeaderValue::from_str(text) {
        Ok(value) if is_type => Ok(value),
        _ => Err(format!("{text:?} is not a media type; write one such as \"application/json\"")),
    }
}

fn marker(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, value) = text.split_once(':').unwrap_or((text, "true"));
    let value = header_value(value.trim())?;
    if value.is_empty() {
        return Err(format!("{text:?} has no value; write one, such as \"X-Replayed: true\""));
    }
    let name = header_name(name.trim())?;
    if is_reserved(&name) {
        return Err(format!("the header field {name} has another purpose; it cannot mark a replay"));
    }
    Ok((name, value))
}

fn extra_header_name(text: &str) -> Result<HeaderName, String> {
    let name = header_name(text)?;
    if is_reserved(&name) {
        return Err(format!("the header field {name} has another purpose, or must not be stored"));
    }
    Ok(name)
}

fn header_value(text: &str) -> Result<HeaderValue, String> {
    HeaderValue::from_str(text).map_err(|_| format!("{text:?} is not the value of a header field"))
}

/// Adds these fields to those of the profile that is extended. An empty text takes one away.
fn add_headers(fields: &mut ExtraHeaders, table: &Table<'_>) -> Result<(), Vec<Mistake>> {
    let mut bad = Vec::new();
    for (name, value) in table {
        let read = extra_header_name(name.get_ref()).map_err(|message| mistake(value, message)).and_then(|name| {
            let template = one(value, |text| {
                let template = Template::parse(text, header_part).map_err(|unknown| {
                    format!("{unknown}; the names are retryable, and response:NAME for a field of the response")
                })?;
                header_value(&template.render(|_, _| {}))?;
                Ok(Some(template).filter(|_| !text.is_empty()))
            })?;
            Ok((name, template))
        });
        match read {
            Ok((name, template)) => {
                fields.retain(|(own, _)| *own != name);
                fields.extend(template.map(|template| (name, template)));
            }
            Err(mistakes) => bad.extend(mistakes),
        }
    }
    if bad.is_empty() { Ok(()) } else { Err(bad) }
}

fn header_part(name: &str) -> Option<HeaderPart> {
    match name.strip_prefix("response:") {
        Some(field) => field.parse().ok().map(HeaderPart::Response),
        None => (name == "retryable").then_some(HeaderPart::Retryable),
    }
}

/// The candidate that is nearest to the written name; `None` if none is near.
#[doc(hidden)]
pub fn nearest<'a>(written: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let fold = |name: &str| name.to_ascii_lowercase().replace('_', "-");
    let written = fold(written);
    candidates
        .into_iter()
        .map(|name| (strsim::damerau_levenshtein(&written, &fold(name)), name))
        // At most one wrong letter in three: otherwise it is another word.
        .filter(|(distance, name)| *distance <= name.len().max(written.len()).div_ceil(3))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

fn did_you_mean<'a>(written: &str, candidates: impl IntoIterator<Item = &'a str>) -> String {
    nearest(written, candidates).map_or_else(String::new, |name| format!("; did you mean `{name}`?"))
}

fn article(value: &DeValue<'_>) -> Cow<'static, str> {
    match value {
        DeValue::Integer(_) => "an integer".into(),
        DeValue::Array(_) => "a list".into(),
        other => format!("a {}", other.type_str()).into(),
    }
}
