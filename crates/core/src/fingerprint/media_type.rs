//! The `Content-Type` field, which decides how to read a body.

use std::borrow::Cow;

/// A media type, reduced to what the fingerprint uses.
pub(super) struct MediaType<'a> {
    /// The text that is hashed.
    pub(super) name: Cow<'a, [u8]>,
    pub(super) kind: Kind,
}

/// Frequent values, which need no parsing. Case counts in none of their parts.
const COMMON: [&[u8]; 3] =
    [b"application/json", b"application/json; charset=utf-8", b"application/json;charset=utf-8"];

/// The form in which a body is read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Json,
    Form,
    Multipart { boundary: Vec<u8> },
    Raw,
}

impl<'a> MediaType<'a> {
    /// Reads a field value. A value that does not follow RFC 9110, section 8.3.1, is kept as it is, and its body is raw.
    pub(super) fn read(field: &'a [u8]) -> Self {
        if COMMON.iter().any(|common| field.eq_ignore_ascii_case(common)) {
            return Self { name: Cow::Borrowed(b"application/json"), kind: Kind::Json };
        }
        let field = trim(field);
        Self::parse(field).unwrap_or(Self { name: Cow::Borrowed(field), kind: Kind::Raw })
    }

    fn parse(field: &[u8]) -> Option<Self> {
        let end = field.iter().position(|byte| *byte == b';').unwrap_or(field.len());
        let (name, mut rest) = field.split_at_checked(end)?;
        let mut name = trim(name).to_ascii_lowercase();
        let slash = name.iter().position(|byte| *byte == b'/')?;
        let (kind, subtype) = name.split_at_checked(slash)?;
        let subtype = subtype.strip_prefix(b"/")?;
        if !is_token(kind) || !is_token(subtype) {
            return None;
        }

        let (mut charset, mut boundary) = (None, None);
        while let Some((parameter, after)) = next_parameter(rest)? {
            rest = after;
            let slot = match parameter.name.as_slice() {
                b"charset" => &mut charset,
                b"boundary" => &mut boundary,
                _ => continue,
            };
            if slot.replace(parameter.value).is_some() {
                return None;
            }
        }

        let mut kind = match (kind, subtype) {
            (b"application", b"json") => Kind::Json,
            (b"application", b"x-www-form-urlencoded") => Kind::Form,
            (b"multipart", _) => boundary
                .filter(|boundary| is_boundary(boundary))
                .map_or(Kind::Raw, |boundary| Kind::Multipart { boundary }),
            (_, [_, .., b'+', b'j', b's', b'o', b'n']) => Kind::Json,
            _ => Kind::Raw,
        };
        if let Some(charset) = charset {
            let charset = charset.to_ascii_lowercase();
            if !is_token(&charset) {
                return None;
            }
            if charset != b"utf-8" && charset != b"utf8" {
                // In another charset, the same bytes are another text.
                name.extend_from_slice(b";charset=");
                name.extend_from_slice(&charset);
                kind = Kind::Raw;
            }
        }
        Some(Self { name: Cow::Owned(name), kind })
    }
}

struct Parameter {
    /// In lower case.
    name: Vec<u8>,
    /// Without the quotes and escapes of a quoted string.
    value: Vec<u8>,
}

/// The next parameter of `rest`, and what follows it. The outer `None` is a syntax error, the inner one the
/// end.
fn next_parameter(rest: &[u8]) -> Option<Option<(Parameter, &[u8])>> {
    let mut rest = trim(rest);
    // Parameters may be empty: `text/plain; ;charset=utf-8;`.
    while let Some(after) = rest.strip_prefix(b";") {
        rest = trim(after);
        if rest.is_empty() || rest.starts_with(b";") {
            continue;
        }
        let equals = rest.iter().position(|byte| *byte == b'=')?;
        let (name, value) = rest.split_at_checked(equals)?;
        if !is_token(name) {
            return None;
        }
        let (value, rest) = match value.strip_prefix(b"=")? {
            [b'"', quoted @ ..] => quoted_string(quoted)?,
            bare => {
                let len = bare.iter().take_while(|byte| is_bare(**byte)).count();
                let (value, rest) = bare.split_at_checked(len).filter(|_| len > 0)?;
                (value.to_vec(), rest)
            }
        };
        return Some(Some((Parameter { name: name.to_ascii_lowercase(), value }, rest)));
    }
    rest.is_empty().then_some(None)
}

/// Reads a quoted string whose opening quote was removed.
fn quoted_string(text: &[u8]) -> Option<(Vec<u8>, &[u8])> {
    let mut value = Vec::new();
    let mut bytes = text.iter();
    loop {
        match bytes.next()? {
            b'"' => return Some((value, bytes.as_slice())),
            b'\\' => value.push(*bytes.next()?),
            byte => value.push(*byte),
        }
    }
}

/// Wider than a token, because boundaries with `=`, `/`, `:` or `?` are often sent without the quotes they
/// need.
fn is_bare(byte: u8) -> bool {
    byte.is_ascii_graphic() && !matches!(byte, b'"' | b',' | b';' | b'\\')
}

/// RFC 2046, section 5.1.1, but any printable ASCII.
fn is_boundary(boundary: &[u8]) -> bool {
    (1..=70).contains(&boundary.len())
        && boundary.iter().all(|byte| matches!(byte, b' '..=b'~'))
        && !boundary.ends_with(b" ")
}

/// RFC 9110, section 5.6.2.
pub(super) fn is_token(text: &[u8]) -> bool {
    !text.is_empty()
        && text.iter().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte))
}

/// Without the spaces and tabs around it.
pub(super) fn trim(mut text: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = text {
        text = rest;
    }
    text
}
