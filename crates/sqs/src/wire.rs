//! The format of a message in SQS: a text body, and at most ten attributes.

use std::collections::{BTreeMap, HashMap};

use aws_sdk_sqs::primitives::Blob;
use aws_sdk_sqs::types::MessageAttributeValue;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use oncegate_inbox::{MESSAGE_ID, Outgoing, PublishError};
use serde_json::Value;

/// The attribute with the encoding of the body: `base64` or `empty`.
pub(super) const ENCODING: &str = "oncegate-encoding";

/// The attribute with the headers that are not attributes of their own.
pub(super) const HEADERS: &str = "oncegate-headers";

/// The maximum number of attributes of a message.
const MAX_ATTRIBUTES: usize = 10;

/// The body of an empty message: SQS accepts no empty bodies.
const EMPTY_BODY: &str = "-";

type Attributes = HashMap<String, MessageAttributeValue>;

/// Returns the body, and its encoding.
pub(super) fn body(payload: &[u8]) -> (String, Option<&'static str>) {
    if payload.is_empty() {
        return (EMPTY_BODY.to_owned(), Some("empty"));
    }
    match std::str::from_utf8(payload) {
        Ok(text) if is_text(text) => (text.to_owned(), None),
        _ => (STANDARD.encode(payload), Some("base64")),
    }
}

/// Decodes a body. A body of another producer stays as it is.
pub(super) fn payload(body: String, encoding: Option<&[u8]>) -> Bytes {
    match encoding {
        Some(b"empty") => Bytes::new(),
        Some(b"base64") => STANDARD.decode(&body).map_or_else(|_| body.into(), Bytes::from),
        _ => body.into(),
    }
}

/// Returns `true` if SQS accepts the text: the characters of XML.
fn is_text(text: &str) -> bool {
    text.chars().all(|c| match c {
        '\t' | '\n' | '\r' => true,
        '\u{fffe}' | '\u{ffff}' => false,
        c => c >= ' ',
    })
}

/// Returns `true` if an attribute may have this name.
fn is_name(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    (1..=256).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'))
        && !name.starts_with('.')
        && !name.ends_with('.')
        && !name.contains("..")
        && !lower.starts_with("aws.")
        && !lower.starts_with("amazon.")
}

/// Returns the attributes of a message: its identifier, the encoding of its body, and its headers.
///
/// Headers that are invalid as attributes, or too many, are together in one.
pub(super) fn attributes(
    message: &Outgoing,
    encoding: Option<&'static str>,
) -> Result<Attributes, PublishError> {
    let mut attributes = Attributes::new();
    attributes.insert(MESSAGE_ID.to_owned(), value(message.id.as_bytes())?);
    if let Some(encoding) = encoding {
        attributes.insert(ENCODING.to_owned(), value(encoding.as_bytes())?);
    }
    let is_ours =
        |name: &str| [MESSAGE_ID, ENCODING, HEADERS].iter().any(|ours| name.eq_ignore_ascii_case(ours));
    let headers: Vec<_> = message.headers.iter().filter(|(name, _)| !is_ours(name)).collect();
    let mut times: BTreeMap<&str, usize> = BTreeMap::new();
    for (name, _) in &headers {
        *times.entry(name).or_default() += 1;
    }
    let fits = |(name, value): &&(String, Bytes)| {
        is_name(name) && !value.is_empty() && times.get(name.as_str()) == Some(&1)
    };
    let (mut alone, mut together): (Vec<_>, Vec<_>) = headers.into_iter().partition(fits);
    // The headers of dead letters stay attributes of their own first, because operators look at them.
    alone.sort_by_key(|(name, _)| !name.starts_with("oncegate-"));
    let free = MAX_ATTRIBUTES - attributes.len();
    if !together.is_empty() || alone.len() > free {
        together.extend(alone.split_off((free - 1).min(alone.len())));
        let json = together.into_iter().map(|(name, value)| fold(name, value)).collect();
        attributes.insert(HEADERS.to_owned(), value(Value::Array(json).to_string().as_bytes())?);
    }
    for (name, bytes) in alone {
        attributes.insert(name.clone(), value(bytes)?);
    }
    Ok(attributes)
}

/// Converts a value: text as text, anything else as binary.
fn value(bytes: &[u8]) -> Result<MessageAttributeValue, PublishError> {
    let value = MessageAttributeValue::builder();
    let value = match std::str::from_utf8(bytes) {
        Ok(text) if is_text(text) => value.data_type("String").string_value(text),
        _ => value.data_type("Binary").binary_value(Blob::new(bytes)),
    };
    value.build().map_err(PublishError::refused)
}

/// Returns `[name, value]`, or `[name, value, "base64"]` if the value is not text.
fn fold(name: &str, value: &[u8]) -> Value {
    match std::str::from_utf8(value) {
        Ok(text) => serde_json::json!([name, text]),
        Err(_) => serde_json::json!([name, STANDARD.encode(value), "base64"]),
    }
}

fn unfold(header: &Value) -> Option<(String, Bytes)> {
    let parts = header.as_array()?;
    let name = parts.first()?.as_str()?;
    let value = parts.get(1)?.as_str()?;
    let value = match parts.get(2).and_then(Value::as_str) {
        Some("base64") => Bytes::from(STANDARD.decode(value).ok()?),
        _ => Bytes::from(value.to_owned()),
    };
    Some((name.to_owned(), value))
}

/// Returns the headers of a received message, sorted by name, and the encoding of its body.
pub(super) fn headers(attributes: Option<Attributes>) -> (Vec<(String, Bytes)>, Option<Bytes>) {
    let mut headers = Vec::new();
    let mut encoding = None;
    for (name, attribute) in attributes.into_iter().flatten() {
        let bytes = match (attribute.string_value, attribute.binary_value) {
            (Some(text), _) => Bytes::from(text),
            (None, Some(blob)) => Bytes::from(blob.into_inner()),
            (None, None) => Bytes::new(),
        };
        match name.as_str() {
            ENCODING => encoding = Some(bytes),
            HEADERS => match serde_json::from_slice(&bytes) {
                Ok(Value::Array(folded)) => headers.extend(folded.iter().filter_map(unfold)),
                _ => headers.push((name, bytes)),
            },
            _ => headers.push((name, bytes)),
        }
    }
    headers.sort_by(|(one, _), (other, _)| one.cmp(other));
    (headers, encoding)
}

/// Returns a value as a group or deduplication identifier: unchanged if valid, otherwise its digest.
///
/// Valid are at most 128 letters, digits and signs.
pub(super) fn token(bytes: &[u8]) -> String {
    use sha2::{Digest as _, Sha256};
    let is_good = (1..=128).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic);
    match std::str::from_utf8(bytes) {
        Ok(text) if is_good => text.to_owned(),
        _ => {
            let digest: [u8; 32] = Sha256::digest(bytes).into();
            oncegate_core::RecordId::from_bytes(digest).to_string()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn round(headers: &[(&str, &[u8])], payload: &[u8]) -> (Vec<(String, Bytes)>, Bytes, Attributes) {
        let mut message = Outgoing::new("m-1", "orders", payload.to_vec());
        let header = |(name, value): &(&str, &[u8])| ((*name).to_owned(), Bytes::copy_from_slice(value));
        message.headers = headers.iter().map(header).collect();
        let (body, encoding) = body(payload);
        assert!(!body.is_empty() && is_text(&body));
        let attributes = attributes(&message, encoding).unwrap();
        assert!(attributes.len() <= MAX_ATTRIBUTES);
        assert!(attributes.keys().all(|name| is_name(name)));
        let (mut headers, encoding) = super::headers(Some(attributes.clone()));
        headers.retain(|(name, _)| name != MESSAGE_ID);
        (headers, super::payload(body, encoding.as_deref()), attributes)
    }

    #[test]
    fn payloads_come_back_as_they_were() {
        for payload in
            [&b"{\"a\": 1}"[..], b"", b"-", b"\xff\x00", "\u{1}".as_bytes(), "\u{ffff} \u{10ffff}".as_bytes()]
        {
            assert_eq!(round(&[], payload).1, payload);
        }
        assert_eq!(payload("not base64!".to_owned(), Some(b"base64")), "not base64!");
    }

    #[test]
    fn headers_come_back_as_they_were() {
        let few: [(&str, &[u8]); 2] = [("a", b"one"), ("b.c", b"\xff")];
        let (headers, _, attributes) = round(&few, b"x");
        assert_eq!(headers, few.map(|(name, value)| (name.to_owned(), Bytes::copy_from_slice(value))));
        assert!(!attributes.contains_key(HEADERS));

        // Invalid names and values, the same name twice, and too many headers.
        let mut many: Vec<(String, Vec<u8>)> =
            (0..20).map(|n| (format!("h-{n:02}"), vec![b'v'; n + 1])).collect();
        many.extend([
            ("AWS.x".to_owned(), b"reserved".to_vec()),
            ("a b".to_owned(), b"blank".to_vec()),
            ("empty".to_owned(), Vec::new()),
            ("oncegate-dead-reason".to_owned(), b"rejected".to_vec()),
            ("twice".to_owned(), b"\xfe".to_vec()),
            ("twice".to_owned(), b"2".to_vec()),
        ]);
        let borrowed: Vec<(&str, &[u8])> =
            many.iter().map(|(name, value)| (name.as_str(), &**value)).collect();
        let (headers, _, attributes) = round(&borrowed, b"\xff");
        let wanted: BTreeSet<_> =
            many.iter().map(|(name, value)| (name.clone(), Bytes::from(value.clone()))).collect();
        assert_eq!(headers.len(), many.len());
        assert_eq!(headers.into_iter().collect::<BTreeSet<_>>(), wanted);
        assert!(attributes.contains_key("oncegate-dead-reason"), "what matters stays in sight");
        assert_eq!(attributes.len(), MAX_ATTRIBUTES);
    }

    #[test]
    fn tokens_are_the_same_for_the_same() {
        assert_eq!(token(b"customer-7"), "customer-7");
        let long = "x".repeat(129);
        for odd in [&b""[..], b"a b", b"\xff", long.as_bytes()] {
            assert_eq!(token(odd).len(), 64);
            assert_eq!(token(odd), token(odd));
        }
    }
}
