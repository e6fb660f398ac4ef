//! Programs that send one request until its outcome is known, in the tools that customers use.
//!
//! Each is complete: it makes its key once and keeps it in a file, sends it with each attempt, waits as long as the response
//! says, repeats only what a retry can overcome, and fails if the operation was refused.

mod fetch;
mod go;
mod python;
mod shell;
mod template;

use oncegate_http::KeySyntax;
use serde_json::{Map, Value, json};

use super::descriptor::{CallerKind, Carrier, Operation};
use super::page::Part;
use super::recipe::KeyRecipe;
use super::retry_signal::RetrySignal;

/// The text in a body that stands for the key.
const KEY: &str = "<key>";

const ABOUT_REFUSAL: &str = "refused in front of the service";

const ABOUT_REPLAY: &str = "the first response, again";

const ABOUT_NAME: &str =
    "One name for each intent: this order, this payment. Its key is made once and kept in a file,";

/// The place of the file, for a program that has a place itself.
const NEXT_TO: &str =
    "NAME.key next to this program, whatever directory it is run from. If you move one, move both.";

/// The programs for the operations of a route.
pub(super) fn of(operation: &Operation, server: &str) -> Vec<Part> {
    let snippet = Snippet::of(operation, server);
    let mut parts = vec![
        Part::Heading(3, "With curl (in a file such as retry.sh)".to_owned()),
        Part::Code("sh", snippet.shell()),
    ];
    if !snippet.shows_certificate {
        parts.push(Part::Heading(3, "With fetch (Node.js 20, in a file .mjs)".to_owned()));
        parts.push(Part::Code("js", snippet.fetch()));
    }
    parts.extend([
        Part::Heading(3, "In Python (in a file .py)".to_owned()),
        Part::Code("python", snippet.python()),
        Part::Heading(3, "In Go".to_owned()),
        Part::Code("go", snippet.go()),
    ]);
    parts
}

/// The content of the programs.
struct Snippet<'o> {
    method: &'o str,
    /// The address, without a parameter for the key.
    url: String,
    recipe: KeyRecipe,
    /// The format of keys, for a recipe that the customer has to write.
    format: &'o str,
    /// The header field of the key; true if the key stands in quotes there.
    header: Option<(&'o str, bool)>,
    /// The parameter of the query that carries the key.
    query: Option<&'o str>,
    /// The JSON body, with [`KEY`] instead of the key.
    body: Option<String>,
    /// The header field with the time of the first attempt.
    first_sent: Option<&'o str>,
    /// The header fields that identify the caller.
    credentials: Vec<(String, String)>,
    /// True if a certificate identifies the caller.
    shows_certificate: bool,
    marker: (&'o str, &'o str),
    signal: RetrySignal,
}

impl<'o> Snippet<'o> {
    fn of(operation: &'o Operation, server: &str) -> Self {
        let has_body = operation.example.method != "DELETE";
        let header = operation.carriers.iter().find_map(|carrier| match carrier {
            Carrier::Header(name) => Some((name.as_str(), operation.syntax == KeySyntax::Strict)),
            _ => None,
        });
        let member = operation.carriers.iter().find_map(|carrier| match carrier {
            Carrier::Member(pointer) if has_body && header.is_none() => Some(pointer.as_str()),
            _ => None,
        });
        let query = operation.carriers.iter().find_map(|carrier| match carrier {
            Carrier::Query(name) if header.is_none() && member.is_none() => Some(name.as_str()),
            _ => None,
        });
        let built = operation.carriers.iter().find_map(|carrier| match carrier {
            Carrier::Built(pointers) => Some(pointers.as_slice()),
            _ => None,
        });
        let mut body = json!({"item": "book", "quantity": 1});
        if let Some(pointer) = member {
            insert(&mut body, pointer, KEY);
        }
        for pointer in built.unwrap_or_default() {
            insert(&mut body, pointer, "VALUE");
        }
        let cookies: Vec<_> =
            operation.callers.iter().filter(|caller| caller.kind == CallerKind::Cookie).collect();
        let mut credentials: Vec<(String, String)> = operation
            .callers
            .iter()
            .filter_map(|caller| match caller.kind {
                CallerKind::Header if caller.name == "Authorization" => {
                    Some((caller.name.clone(), "Bearer YOUR_TOKEN".to_owned()))
                }
                CallerKind::Header => {
                    Some((caller.name.clone(), format!("YOUR_{}", placeholder(&caller.name))))
                }
                CallerKind::Token => Some(("Authorization".to_owned(), "Bearer YOUR_TOKEN".to_owned())),
                _ => None,
            })
            .collect();
        credentials.dedup();
        if !cookies.is_empty() {
            let pairs =
                cookies.iter().map(|cookie| format!("{}=YOUR_{}", cookie.name, placeholder(&cookie.name)));
            credentials.push(("Cookie".to_owned(), pairs.collect::<Vec<_>>().join("; ")));
        }
        Self {
            method: &operation.example.method,
            url: format!("{server}{}", operation.example.path),
            recipe: operation.recipe,
            format: &operation.format,
            header,
            query,
            body: (has_body || built.is_some()).then(|| body.to_string()),
            first_sent: operation.first_sent.as_ref().map(|first| first.header.as_str()),
            credentials,
            shows_certificate: operation.callers.iter().any(|caller| caller.kind == CallerKind::Certificate),
            marker: (&operation.replay_marker.0, &operation.replay_marker.1),
            signal: RetrySignal::of(operation),
        }
    }

    /// Returns true if the client makes the key.
    fn has_key(&self) -> bool {
        self.recipe != KeyRecipe::None
    }

    /// The header fields that are the same in each attempt and for each intent.
    fn fixed_fields(&self) -> Vec<(&str, &str)> {
        let mut fields: Vec<_> =
            self.credentials.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        if self.body.is_some() {
            fields.push(("Content-Type", "application/json"));
        }
        fields
    }

    /// The address as an expression of JavaScript, Python and Go.
    fn url_expression(&self) -> String {
        match self.query {
            Some(name) => format!("{} + key", quoted(&format!("{}?{name}=", self.url))),
            None => quoted(&self.url),
        }
    }

    /// The end of the advice to send the request again.
    fn later(&self) -> &'static str {
        if self.has_key() { " with the same key" } else { " with the same body" }
    }
}

/// The text as a string of JavaScript, Python and Go.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// A name in capitals, for a value that the customer has to fill in.
fn placeholder(name: &str) -> String {
    name.chars()
        .map(|letter| if letter.is_ascii_alphanumeric() { letter.to_ascii_uppercase() } else { '_' })
        .collect()
}

/// Adds a member to a body, with the objects around it.
fn insert(body: &mut Value, pointer: &str, text: &str) {
    let mut at = body;
    for name in pointer.split('/').skip(1) {
        let name = name.replace("~1", "/").replace("~0", "~");
        if !at.is_object() {
            *at = Value::Object(Map::new());
        }
        at = &mut at[name];
    }
    *at = Value::from(text);
}
