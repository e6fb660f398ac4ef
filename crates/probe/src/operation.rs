//! The description of the operation that is probed: a TOML file.

use std::time::Duration;

use http::Uri;
use http::header::{HeaderName, HeaderValue};
use serde::Deserialize;
use toml::Spanned;

use crate::error::ProbeError;

/// The largest file that is read, in bytes.
const MAX_FILE: usize = 256 * 1024;
/// The most statuses that a file may describe.
const MAX_STATUSES: usize = 16;
/// The longest pause before effects are counted.
const MAX_SETTLE: Duration = Duration::from_secs(30);

/// The operation that is probed: how a request is made, and how its effects are counted.
#[derive(Clone)]
pub struct Operation {
    pub(crate) method: String,
    pub(crate) path: Option<String>,
    pub(crate) key_header: Option<String>,
    pub(crate) is_key_quoted: bool,
    pub(crate) is_key_required: Option<bool>,
    pub(crate) retention: Option<Duration>,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Option<String>,
    pub(crate) other_body: Option<String>,
    pub(crate) other_caller: Vec<(String, String)>,
    pub(crate) count: Count,
    pub(crate) statuses: Vec<StatusTrigger>,
}

/// The way in which the effects of requests are counted.
#[derive(Clone)]
pub(crate) enum Count {
    /// Effects cannot be counted.
    None,
    /// A member of the response differs for each effect: a JSON pointer.
    Member(String),
    /// A document has the number of effects.
    Url {
        url: String,
        /// The place of a number, or of an array that has one element for each effect.
        pointer: String,
        headers: Vec<(String, String)>,
        /// The time after which a finished request is counted.
        settle: Duration,
    },
}

/// A request that makes the API respond with a status.
#[derive(Clone)]
pub(crate) struct StatusTrigger {
    pub(crate) status: u16,
    /// Fields that only the first attempt has.
    pub(crate) headers: Vec<(String, String)>,
    /// The body of both attempts, if it is another than that of the operation.
    pub(crate) body: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    method: Option<Spanned<String>>,
    path: Option<Spanned<String>>,
    key_header: Option<Spanned<String>>,
    #[serde(default)]
    key_quoted: bool,
    key_required: Option<bool>,
    retention: Option<Spanned<String>>,
    #[serde(default)]
    headers: toml::Table,
    body: Option<String>,
    other_body: Option<String>,
    #[serde(default)]
    other_caller: Caller,
    count: Option<Spanned<CountTable>>,
    #[serde(default)]
    status: Vec<Spanned<StatusTable>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Caller {
    #[serde(default)]
    headers: toml::Table,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CountTable {
    member: Option<String>,
    url: Option<String>,
    pointer: Option<String>,
    #[serde(default)]
    headers: toml::Table,
    settle: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StatusTable {
    status: u16,
    #[serde(default)]
    headers: toml::Table,
    body: Option<String>,
}

impl Operation {
    /// Reads an operation. `environment` returns the value of a variable for `{env:NAME}`.
    ///
    /// # Errors
    /// [`ProbeError::Operation`] with every mistake of the file, one per line.
    pub fn parse(text: &str, environment: &dyn Fn(&str) -> Option<String>) -> Result<Self, ProbeError> {
        if text.len() > MAX_FILE {
            return Err(ProbeError::Operation(format!("the file is longer than {MAX_FILE} bytes")));
        }
        let file: File = toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            let line = text.get(..at).map_or(1, |before| before.matches('\n').count() + 1);
            ProbeError::Operation(format!("line {line}: {}", error.message().trim_end().replace('\n', ", ")))
        })?;
        let mut reader = Reader { text, environment, mistakes: Vec::new() };
        let operation = reader.operation(file);
        if reader.mistakes.is_empty() {
            Ok(operation)
        } else {
            Err(ProbeError::Operation(reader.mistakes.join("\n")))
        }
    }
}

struct Reader<'a> {
    text: &'a str,
    environment: &'a dyn Fn(&str) -> Option<String>,
    mistakes: Vec<String>,
}

impl Reader<'_> {
    fn mistake(&mut self, at: usize, message: &str) {
        let line = self.text.get(..at).map_or(1, |before| before.matches('\n').count() + 1);
        self.mistakes.push(format!("line {line}: {message}"));
    }

    fn operation(&mut self, file: File) -> Operation {
        let method = match file.method {
            None => "POST".to_owned(),
            Some(method) => {
                let is_token = http::Method::from_bytes(method.get_ref().as_bytes()).is_ok();
                let upper = method.get_ref().to_ascii_uppercase();
                if !is_token || ["GET", "HEAD", "OPTIONS", "CONNECT", "TRACE"].contains(&&*upper) {
                    let text = format!(
                        "method = {:?}: write a method with an effect, such as POST",
                        method.get_ref()
                    );
                    self.mistake(method.span().start, &text);
                }
                method.into_inner()
            }
        };
        if let Some(path) = &file.path
            && !(path.get_ref().starts_with('/') && sample(path.get_ref()).parse::<Uri>().is_ok())
        {
            let text = format!("path = {:?}: write a path that begins with /", path.get_ref());
            self.mistake(path.span().start, &text);
        }
        if let Some(name) = &file.key_header {
            if HeaderName::from_bytes(name.get_ref().as_bytes()).is_err() {
                let text = format!("key-header = {:?}: it is not the name of a header field", name.get_ref());
                self.mistake(name.span().start, &text);
            } else if is_managed(name.get_ref()) {
                let text = format!("key-header = {:?}: the probe itself writes this field", name.get_ref());
                self.mistake(name.span().start, &text);
            }
        }
        let retention =
            file.retention.and_then(|text| self.duration("retention", text.get_ref(), text.span().start));
        if file.status.len() > MAX_STATUSES {
            self.mistake(
                0,
                &format!("{} [[status]] tables: at most {MAX_STATUSES} are allowed", file.status.len()),
            );
        }
        let statuses = file.status.into_iter().map(|table| self.status(table)).collect();
        Operation {
            method,
            path: file.path.map(Spanned::into_inner),
            key_header: file.key_header.map(Spanned::into_inner),
            is_key_quoted: file.key_quoted,
            is_key_required: file.key_required,
            retention,
            headers: self.headers("headers", &file.headers),
            body: file.body.map(|body| self.environment(&body)),
            other_body: file.other_body.map(|body| self.environment(&body)),
            other_caller: self.headers("other-caller.headers", &file.other_caller.headers),
            count: file.count.map_or(Count::None, |table| self.count(table)),
            statuses,
        }
    }

    fn status(&mut self, table: Spanned<StatusTable>) -> StatusTrigger {
        let at = table.span().start;
        let table = table.into_inner();
        if !(400..=599).contains(&table.status) {
            self.mistake(at, &format!("status = {}: write a status from 400 to 599", table.status));
        }
        if table.headers.is_empty() && table.body.is_none() {
            self.mistake(at, "[[status]]: give the headers or the body that make the API respond so");
        }
        StatusTrigger {
            status: table.status,
            headers: self.headers("status.headers", &table.headers),
            body: table.body.map(|body| self.environment(&body)),
        }
    }

    fn count(&mut self, table: Spanned<CountTable>) -> Count {
        let at = table.span().start;
        let table = table.into_inner();
        for pointer in [&table.member, &table.pointer].into_iter().flatten() {
            if !pointer.is_empty() && !pointer.starts_with('/') {
                self.mistake(at, &format!("[count]: {pointer:?} is not a JSON pointer: begin it with /"));
            }
        }
        match (table.member, table.url) {
            (Some(member), None)
                if table.pointer.is_none() && table.headers.is_empty() && table.settle.is_none() =>
            {
                Count::Member(member)
            }
            (None, Some(_)) if table.pointer.is_none() => {
                self.mistake(at, "[count]: url needs a pointer to the number of effects in the document, such as \"/total\", or \"\" for all of it");
                Count::None
            }
            (None, Some(url)) => {
                let is_address = ["/", "http://", "https://"].iter().any(|start| url.starts_with(start));
                if !is_address || sample(&url).parse::<Uri>().is_err() {
                    self.mistake(at, &format!("[count] url = {url:?}: write a path or a whole address"));
                }
                let settle = table.settle.and_then(|text| self.duration("settle", &text, at));
                let settle = settle.unwrap_or(Duration::from_millis(200));
                if settle > MAX_SETTLE {
                    self.mistake(
                        at,
                        &format!("[count] settle: at most {} s are allowed", MAX_SETTLE.as_secs()),
                    );
                }
                Count::Url {
                    url,
                    pointer: table.pointer.unwrap_or_default(),
                    headers: self.headers("count.headers", &table.headers),
                    settle,
                }
            }
            _ => {
                self.mistake(at, "[count]: give either member, or url with pointer, headers and settle");
                Count::None
            }
        }
    }

    fn headers(&mut self, name: &str, table: &toml::Table) -> Vec<(String, String)> {
        let mut fields = Vec::new();
        for (field, value) in table {
            let Some(value) = value.as_str().map(|value| self.environment(value)) else {
                self.mistakes.push(format!("[{name}] {field}: write the value as text"));
                continue;
            };
            if is_managed(field) {
                self.mistakes
                    .push(format!("[{name}] {field}: the probe itself writes this field; leave it out"));
            } else if HeaderName::from_bytes(field.as_bytes()).is_err()
                || HeaderValue::from_str(&value).is_err()
            {
                // Without the value, which may be a credential.
                self.mistakes.push(format!("[{name}] {field}: it is not a header field"));
            }
            fields.push((field.clone(), value));
        }
        fields
    }

    /// Replaces `{env:NAME}`.
    fn environment(&mut self, text: &str) -> String {
        let mut replaced = String::with_capacity(text.len());
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("{env:") {
            replaced.push_str(before);
            let Some((name, next)) = after.split_once('}') else {
                replaced.push_str("{env:");
                rest = after;
                continue;
            };
            match (self.environment)(name) {
                Some(value) => replaced.push_str(&value),
                None => self
                    .mistakes
                    .push(format!("{{env:{name}}}: the environment has no variable {name}; set it")),
            }
            rest = next;
        }
        replaced + rest
    }

    fn duration(&mut self, name: &str, text: &str, at: usize) -> Option<Duration> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let millis = match unit {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => 0,
        };
        let duration = number.parse::<u64>().ok().and_then(|number| number.checked_mul(millis));
        if duration.is_none() || millis == 0 {
            self.mistake(
                at,
                &format!("{name} = {text:?}: write a number with ms, s, m, h or d, such as 500ms or 24h"),
            );
            return None;
        }
        duration.map(Duration::from_millis)
    }
}

/// Returns true for the fields that the probe writes itself.
fn is_managed(field: &str) -> bool {
    ["host", "content-length", "transfer-encoding", "connection", "expect"]
        .iter()
        .any(|own| own.eq_ignore_ascii_case(field))
}

/// The text with a sample for each placeholder, to check its syntax.
fn sample(text: &str) -> String {
    Values { uuid: "0".to_owned(), number: 0, date: "0".to_owned() }.fill(text).replace("{key}", "0")
}

/// The values of the placeholders of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Values {
    pub(crate) uuid: String,
    pub(crate) number: u64,
    /// The time of the first attempt, as header fields write it.
    pub(crate) date: String,
}

impl Values {
    /// Replaces `{uuid}`, `{n}` and `{date}`. Other braces stay, because JSON has them.
    pub(crate) fn fill(&self, text: &str) -> String {
        text.replace("{uuid}", &self.uuid)
            .replace("{n}", &self.number.to_string())
            .replace("{date}", &self.date)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Operation, String> {
        let environment = |name: &str| (name == "TOKEN").then(|| "secret".to_owned());
        Operation::parse(text, &environment).map_err(|error| error.to_string())
    }

    #[test]
    fn an_operation_is_read_with_all_its_parts() {
        let operation = parse(
            r#"
            path = "/orders/{uuid}"
            key-header = "X-Request-Id"
            key-required = true
            retention = "24h"
            body = '{"reference":"{uuid}","n":{n}}'
            [headers]
            Authorization = "Bearer {env:TOKEN}"
            [other-caller.headers]
            Authorization = "Bearer other"
            [count]
            url = "/orders?reference={uuid}"
            pointer = "/total"
            settle = "50ms"
            [[status]]
            status = 500
            headers.X-Fail = "500"
            "#,
        )
        .unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(operation.method, "POST");
        assert_eq!(operation.headers, [("Authorization".to_owned(), "Bearer secret".to_owned())]);
        assert_eq!(operation.retention, Some(Duration::from_secs(86_400)));
        assert!(matches!(&operation.count, Count::Url { pointer, settle, .. }
            if pointer == "/total" && *settle == Duration::from_millis(50)));
        assert_eq!(operation.statuses[0].status, 500);
        let values = Values { uuid: "u".to_owned(), number: 7, date: "d".to_owned() };
        assert_eq!(values.fill(operation.body.as_deref().unwrap()), r#"{"reference":"u","n":7}"#);
    }

    #[test]
    fn every_mistake_is_reported_at_once() {
        let Err(text) = parse(
            "method = \"get\"\npath = \"orders\"\nkey-header = \"a b\"\nretention = \"soon\"\n\
             [headers]\ncontent-length = \"1\"\nHost = \"a\"\nAuthorization = \"{env:NONE}\"\n[count]\nmember = \"id\"\nurl = \"/x\"\n\
             [[status]]\nstatus = 200\n",
        ) else {
            panic!("it was accepted")
        };
        for part in [
            "line 1: method",
            "line 2: path",
            "content-length",
            "line 3: key-header",
            "line 4: retention",
            "Host",
            "NONE",
            "JSON pointer",
            "either member",
            "status = 200",
            "give the headers or the body",
        ] {
            assert!(text.contains(part), "{part} is not in:\n{text}");
        }
    }

    #[test]
    fn an_unknown_setting_is_refused_with_its_place() {
        let Err(text) = parse("pth = \"/orders\"\n") else { panic!("it was accepted") };
        assert!(text.contains("line 1") && text.contains("pth"), "{text}");
    }
}
