//! A scheme for senders that sign with HMAC-SHA256 in a format of their own.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderMap, HeaderName};
use oncegate_core::JsonPointer;
use oncegate_engine::ConfigError;
use serde_json::Value;

use crate::scheme::{WebhookRefusal, WebhookScheme, hex, one};

/// A signature format that has no constructor of its own in [`WebhookScheme`].
///
/// It describes the header with the signature, the signed text, and the identifier. The signature is HMAC-SHA256. For
/// example, Slack signs a version, the time and the payload:
///
/// ```
/// use oncegate_webhook::{GenericHmac, SignatureEncoding};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let slack = GenericHmac::new("x-slack-signature", SignatureEncoding::Hex)?
///     .with_signature_prefix("v0=")
///     .with_signed_text("v0:{x-slack-request-timestamp}:{payload}")?
///     .with_timestamp_header("x-slack-request-timestamp")?
///     .with_json_id(oncegate_core::JsonPointer::parse("/event_id")?)
///     .build("8f742231b10e8888abcd99yyyzzz85a5")?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GenericHmac {
    signature: HeaderName,
    encoding: SignatureEncoding,
    prefix: String,
    signed_text: Vec<Part>,
    timestamp: Option<HeaderName>,
    id: Option<IdSource>,
}

/// The encoding of a signature in its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SignatureEncoding {
    /// Hexadecimal digits, in upper or lower case.
    Hex,
    /// Base64 with padding.
    Base64,
}

/// A part of the signed text.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Literal(String),
    Header(HeaderName),
    Payload,
}

/// The place of the identifier.
#[derive(Clone, Debug, PartialEq, Eq)]
enum IdSource {
    Header(HeaderName),
    Json(JsonPointer),
}

impl GenericHmac {
    /// Starts a format: the header with the signature, and its encoding. The signed text is the payload until set.
    ///
    /// # Errors
    /// An invalid header name.
    pub fn new(signature_header: &str, encoding: SignatureEncoding) -> Result<Self, ConfigError> {
        Ok(Self {
            signature: header_name(signature_header)?,
            encoding,
            prefix: String::new(),
            signed_text: vec![Part::Payload],
            timestamp: None,
            id: None,
        })
    }

    /// Sets the text before the signature in its header, for example `sha256=`.
    #[must_use]
    pub fn with_signature_prefix(self, prefix: impl Into<String>) -> Self {
        Self { prefix: prefix.into(), ..self }
    }

    /// Sets the signed text: literal text with `{payload}` and header names in braces.
    ///
    /// An example is `{x-request-time}.{payload}`. Between two braces there must be literal text. A request is refused if
    /// the value of a header contains the literal text next to it, or forms it together with that text (`a-` next to `--`),
    /// because then two requests could have the same signed text.
    ///
    /// # Errors
    /// A template without `{payload}` or with several, without text between two braces, or with an invalid header name.
    pub fn with_signed_text(self, template: &str) -> Result<Self, ConfigError> {
        Ok(Self { signed_text: parse(template)?, ..self })
    }

    /// Sets the header with the time of the signature, in seconds since the Unix epoch. It must be in the signed text.
    ///
    /// # Errors
    /// An invalid header name.
    pub fn with_timestamp_header(self, name: &str) -> Result<Self, ConfigError> {
        Ok(Self { timestamp: Some(header_name(name)?), ..self })
    }

    /// Takes the identifier from a header.
    ///
    /// If the header is not in the signed text, an attacker who has seen a request can send it again under another
    /// identifier. The header with the signature is refused by [`build`](Self::build): the same signature can be written in
    /// several ways.
    ///
    /// # Errors
    /// An invalid header name.
    pub fn with_id_header(self, name: &str) -> Result<Self, ConfigError> {
        Ok(Self { id: Some(IdSource::Header(header_name(name)?)), ..self })
    }

    /// Takes the identifier from a member of a JSON payload: a string that is not empty, or an integer. The string `"1"` and
    /// the number `1` are two identifiers: the string keeps its quotes.
    #[must_use]
    pub fn with_json_id(self, pointer: JsonPointer) -> Self {
        Self { id: Some(IdSource::Json(pointer)), ..self }
    }

    /// Builds the scheme with a secret, which is used as it is written.
    ///
    /// # Errors
    /// A format without an identifier, or with the signature as identifier; a timestamp header that is not in the signed text;
    /// a secret that is empty, longer than 1024 bytes, or has white space around it.
    pub fn build(self, secret: &str) -> Result<WebhookScheme, ConfigError> {
        if self.id.is_none() {
            return Err(ConfigError::new(
                "GenericHmac has no identifier, so duplicates would not be found: call with_id_header or with_json_id",
            ));
        }
        if let Some(name) = &self.timestamp
            && !self.signed_text.contains(&Part::Header(name.clone()))
        {
            return Err(ConfigError::new(format!(
                "GenericHmac: the timestamp header {name} is not in the signed text, so it proves nothing: \
                 add {{{name}}} to with_signed_text, or leave the timestamp out"
            )));
        }
        if self.id == Some(IdSource::Header(self.signature.clone())) {
            return Err(ConfigError::new(format!(
                "GenericHmac: {} has the signature, which can be written in several ways, so it identifies nothing: \
                 take the identifier from another header, or from the payload",
                self.signature
            )));
        }
        WebhookScheme::generic(self, secret)
    }

    pub(crate) const fn timestamp(&self) -> Option<&HeaderName> {
        self.timestamp.as_ref()
    }

    /// Returns the signature of a request, or `None` inside if it has another encoding.
    pub(crate) fn signature(&self, headers: &HeaderMap) -> Result<Option<Vec<u8>>, WebhookRefusal> {
        let value = one(headers, self.signature.as_str())?;
        let signature = value.strip_prefix(&self.prefix).ok_or(WebhookRefusal::HeaderMalformed)?;
        Ok(match self.encoding {
            SignatureEncoding::Hex => hex(&signature.to_ascii_lowercase()),
            SignatureEncoding::Base64 => STANDARD.decode(signature).ok(),
        })
    }

    /// Returns the parts of the signed text of a request.
    pub(crate) fn signed_text<'r>(
        &'r self,
        headers: &'r HeaderMap,
        payload: &'r [u8],
    ) -> Result<Vec<&'r [u8]>, WebhookRefusal> {
        let literal = |at: Option<usize>| match at.and_then(|at| self.signed_text.get(at)) {
            Some(Part::Literal(text)) => Some(text.as_str()),
            _ => None,
        };
        let mut parts = Vec::with_capacity(self.signed_text.len());
        for (at, part) in self.signed_text.iter().enumerate() {
            parts.push(match part {
                Part::Literal(text) => text.as_bytes(),
                Part::Payload => payload,
                Part::Header(name) => {
                    let value = one(headers, name.as_str())?;
                    // The value ends at the next literal, and begins after the one before. If the literal is found anywhere
                    // else in the joined text, the same text has another reading, with other values.
                    let before = literal(at.checked_sub(1))
                        .is_some_and(|text| format!("{text}{value}").rfind(text) != Some(0));
                    let after = literal(at.checked_add(1))
                        .is_some_and(|text| format!("{value}{text}").find(text) != Some(value.len()));
                    if before || after {
                        return Err(WebhookRefusal::HeaderMalformed);
                    }
                    value.as_bytes()
                }
            });
        }
        Ok(parts)
    }

    /// Returns the identifier of a verified request.
    pub(crate) fn id(&self, headers: &HeaderMap, payload: &[u8]) -> Result<Option<String>, WebhookRefusal> {
        match &self.id {
            Some(IdSource::Header(name)) => match one(headers, name.as_str())? {
                "" => Err(WebhookRefusal::HeaderMalformed),
                id => Ok(Some(id.to_owned())),
            },
            Some(IdSource::Json(pointer)) => Ok(json_id(payload, pointer)),
            None => Ok(None),
        }
    }

    /// Returns the headers that the handler gets: those of the signed text, and the identifier.
    pub(crate) fn copied_headers(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for part in &self.signed_text {
            if let Part::Header(name) = part {
                names.push(name.as_str());
            }
        }
        if let Some(IdSource::Header(name)) = &self.id {
            names.push(name.as_str());
        }
        names.sort_unstable();
        names.dedup();
        names
    }
}

fn json_id(payload: &[u8], pointer: &JsonPointer) -> Option<String> {
    let payload: Value = serde_json::from_slice(payload).ok()?;
    match payload.pointer(pointer.as_str())? {
        // A number has no quotes, so a string that could be taken for one keeps them, and so does one that begins with a quote.
        Value::String(id)
            if id.starts_with('"') || id.parse::<i64>().is_ok() || id.parse::<u64>().is_ok() =>
        {
            serde_json::to_string(id).ok()
        }
        Value::String(id) if !id.is_empty() => Some(id.clone()),
        Value::Number(id) if id.is_u64() || id.is_i64() => Some(id.to_string()),
        _ => None,
    }
}

fn header_name(name: &str) -> Result<HeaderName, ConfigError> {
    HeaderName::from_bytes(name.as_bytes())
        .map_err(|_| ConfigError::new(format!("GenericHmac: {name:?} is not a valid header name")))
}

fn parse(template: &str) -> Result<Vec<Part>, ConfigError> {
    let mut parts: Vec<Part> = Vec::new();
    let mut rest = template;
    while let Some((literal, after)) = rest.split_once('{') {
        let Some((name, after)) = after.split_once('}') else {
            return Err(ConfigError::new(format!("GenericHmac: a brace is not closed in {template:?}")));
        };
        if !literal.is_empty() {
            parts.push(Part::Literal(literal.to_owned()));
        } else if !parts.is_empty() {
            return Err(ConfigError::new(format!(
                "GenericHmac: there must be text between two braces in {template:?}, so that the signed text is unambiguous"
            )));
        }
        parts.push(if name == "payload" { Part::Payload } else { Part::Header(header_name(name)?) });
        rest = after;
    }
    if !rest.is_empty() {
        parts.push(Part::Literal(rest.to_owned()));
    }
    match parts.iter().filter(|part| **part == Part::Payload).count() {
        1 => Ok(parts),
        count => Err(ConfigError::new(format!(
            "GenericHmac: {template:?} has {{payload}} {count} times; the payload must be signed once"
        ))),
    }
}
