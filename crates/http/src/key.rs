//! Reads the caller's key from its header field.

use std::borrow::Cow;
use std::fmt;

use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};
use oncegate_core::{IdempotencyKey, limits};
use oncegate_engine::ConfigError;
use regex_lite::Regex;

use crate::carrier::only;

/// The grammar of keys.
///
/// A field that is present but invalid is always an error, even if the key is optional. RFC 9651 allows to ignore such a
/// field, but then the request would run unprotected without its client's knowledge.
#[derive(Clone, Debug)]
pub struct KeyGrammar {
    pub(crate) syntax: KeySyntax,
    pub(crate) format: KeyFormat,
}

/// The syntax of the key in its header field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeySyntax {
    /// A string of RFC 9651 in quotes, or the bare visible ASCII characters that most clients send, without quote and
    /// comma. `abc`, `"abc"` and `"abc";p=1` are one key.
    Lenient,
    /// A string of RFC 9651 only, as draft-ietf-httpapi-idempotency-key-header-07 demands.
    Strict,
    /// The value of the field as it is: quotes, commas and spaces are part of the key.
    Raw,
}

/// The format of the key itself.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum KeyFormat {
    /// 1 to 255 characters.
    Any,
    /// A UUID (RFC 9562) of any version, in 36 characters; upper and lower case are one key.
    Uuid,
    /// A ULID of 26 characters; upper and lower case are one key.
    Ulid,
    /// A key that the pattern matches from end to end.
    Pattern(Regex),
}

impl KeyFormat {
    /// A format by a regular expression that the whole key must match.
    ///
    /// # Errors
    /// If the expression is not a regular expression.
    pub fn pattern(expression: &str) -> Result<Self, ConfigError> {
        Regex::new(&format!("^(?:{expression})$"))
            .map(Self::Pattern)
            .map_err(|error| ConfigError::new(format!("key format {expression:?}: {error}")))
    }
}

impl Default for KeyGrammar {
    /// Lenient syntax, any format.
    fn default() -> Self {
        Self { syntax: KeySyntax::Lenient, format: KeyFormat::Any }
    }
}

impl KeyGrammar {
    /// The syntax of the key in its header field.
    #[must_use]
    pub fn with_syntax(self, syntax: KeySyntax) -> Self {
        Self { syntax, ..self }
    }

    /// The format of the key itself.
    #[must_use]
    pub fn with_format(self, format: KeyFormat) -> Self {
        Self { format, ..self }
    }

    /// The key in these headers, with its field as it was received; `None` if there is no field of one of these names.
    ///
    /// # Errors
    /// If a field is not a valid key, if it has two lines, or if two fields have different keys.
    pub fn read<'a>(
        &self,
        headers: &'a HeaderMap,
        names: &'a [HeaderName],
    ) -> Option<Result<(IdempotencyKey, &'a HeaderName, &'a HeaderValue), KeyHeaderError>> {
        let mut fields = names.iter().filter_map(|name| Some((name, headers.get(name)?)));
        let (name, value) = fields.clone().next()?;
        if fields.clone().any(|(name, _)| headers.get_all(name).iter().nth(1).is_some()) {
            return Some(Err(KeyHeaderError::SeveralFields));
        }
        // The usual case is one field.
        let first = fields.next().map(|(_, value)| self.parse(value.as_bytes()));
        let key = only(first.into_iter().chain(fields.map(|(_, value)| self.parse(value.as_bytes()))))?;
        Some(key.map(|key| (key, name, value)))
    }

    /// Reads the value of a field.
    ///
    /// # Errors
    /// If the value is not a valid key.
    pub fn parse(&self, field: &[u8]) -> Result<IdempotencyKey, KeyHeaderError> {
        let field = trim_ows(field);
        self.key_of(match (field.first(), self.syntax) {
            (None, _) => return Err(KeyHeaderError::Empty),
            (Some(_), KeySyntax::Raw) => Cow::Borrowed(raw(field)?),
            (Some(b'"'), _) => Cow::Owned(quoted(field)?),
            (Some(_), KeySyntax::Lenient) => Cow::Borrowed(bare(field)?),
            (Some(_), KeySyntax::Strict) => return Err(KeyHeaderError::NotQuoted),
        })
    }

    /// The value of a header field that carries this key.
    ///
    /// It is a string of RFC 9651 in quotes, or the key itself if the syntax is raw. A key with other characters than ASCII is a
    /// display string of RFC 9651.
    ///
    /// ```
    /// use oncegate_core::IdempotencyKey;
    /// use oncegate_http::KeyGrammar;
    ///
    /// let key = IdempotencyKey::new("order 1")?;
    /// assert_eq!(KeyGrammar::default().field_of(&key).unwrap(), "\"order 1\"");
    /// # Ok::<_, oncegate_core::KeyError>(())
    /// ```
    #[must_use]
    pub fn field_of(&self, key: &IdempotencyKey) -> Option<HeaderValue> {
        let bytes = key.as_bytes();
        if self.syntax == KeySyntax::Raw && raw(bytes).is_ok() && trim_ows(bytes) == bytes {
            return HeaderValue::from_bytes(bytes).ok();
        }
        let mut field = String::with_capacity(bytes.len() + 3);
        if bytes.iter().all(|byte| matches!(byte, b' '..=b'~')) {
            field.push('"');
            for byte in bytes {
                if matches!(byte, b'"' | b'\\') {
                    field.push('\\');
                }
                field.push(char::from(*byte));
            }
        } else {
            field.push_str("%\"");
            for byte in bytes {
                match byte {
                    b' '..=b'~' if !matches!(byte, b'%' | b'"') => field.push(char::from(*byte)),
                    _ => field.push_str(&format!("%{byte:02x}")),
                }
            }
        }
        field.push('"');
        HeaderValue::try_from(field).ok()
    }

    /// The syntax of the key in its header field.
    #[must_use]
    pub const fn syntax(&self) -> KeySyntax {
        self.syntax
    }

    /// The error, and what to send instead.
    pub(crate) fn explain(&self, error: KeyHeaderError) -> String {
        let advice = match (error, &self.format) {
            (KeyHeaderError::BadByte, _) if self.syntax == KeySyntax::Raw => {
                "send text in UTF-8 without control characters".to_owned()
            }
            (KeyHeaderError::BadByte, _) => {
                "send visible ASCII characters without quote and comma, or put the key in quotes".to_owned()
            }
            (KeyHeaderError::Empty | KeyHeaderError::NotText | KeyHeaderError::Format(_), format) => {
                match format {
                    KeyFormat::Any => "send 1 to 255 characters, such as a UUID".to_owned(),
                    KeyFormat::Uuid => "send a UUID of 36 characters".to_owned(),
                    KeyFormat::Ulid => "send a ULID of 26 characters".to_owned(),
                    KeyFormat::Pattern(_) => {
                        let pattern = format.to_string();
                        let pattern = pattern.strip_prefix("pattern:").unwrap_or(&pattern);
                        format!("send one that the regular expression {pattern} matches from end to end")
                    }
                }
            }
            _ => return error.to_string(),
        };
        format!("{error}; {advice}")
    }

    /// The key in a text that needs no syntax: a member of a body, a parameter of the query, or the input of an operator.
    ///
    /// # Errors
    /// If the text is not a key of the format.
    pub fn key_of(&self, key: Cow<'_, str>) -> Result<IdempotencyKey, KeyHeaderError> {
        if key.is_empty() || key.bytes().all(|b| b == b' ') {
            return Err(KeyHeaderError::Empty);
        }
        if key.len() > limits::MAX_KEY_BYTES {
            return Err(KeyHeaderError::TooLong { bytes: key.len() });
        }
        let key = match &self.format {
            KeyFormat::Any => key,
            KeyFormat::Uuid if is_uuid(&key) => key.to_ascii_lowercase().into(),
            KeyFormat::Ulid if is_ulid(&key) => key.to_ascii_uppercase().into(),
            KeyFormat::Pattern(pattern) if pattern.is_match(&key) => key,
            KeyFormat::Uuid => return Err(KeyHeaderError::Format("a UUID")),
            KeyFormat::Ulid => return Err(KeyHeaderError::Format("a ULID")),
            KeyFormat::Pattern(_) => return Err(KeyHeaderError::Format("of the published format")),
        };
        IdempotencyKey::new(key.as_bytes()).map_err(|_| KeyHeaderError::Empty)
    }
}

/// The error in a key's header field. Its text is for the caller and repeats nothing of the field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyHeaderError {
    /// Sent twice in one place: two lines of a field, two parameters or two members of one name.
    SeveralFields,
    /// Different in two places.
    Differing,
    /// No byte, or only spaces.
    Empty,
    /// A string that begins with a quote but is not valid by RFC 9651.
    BadString,
    /// A byte that is not allowed in a bare key.
    BadByte,
    /// A comma outside quotes: that is a list.
    Comma,
    /// Not in quotes, although only strings are accepted.
    NotQuoted,
    /// A number or another value that is not a text.
    NotText,
    /// In a body that may be JSON and cannot be read, so that it is not known if it has a key.
    Unreadable,
    /// In a field whose name has `_` for `-`, or the reverse.
    Spelling,
    /// In a place of the query or body where a service may find a key, and where it is not read.
    Misplaced,
    /// Longer than [`limits::MAX_KEY_BYTES`].
    TooLong {
        /// The length, in bytes.
        bytes: usize,
    },
    /// Not of the format that this service accepts.
    Format(&'static str),
}

impl fmt::Display for KeyHeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SeveralFields => f.write_str("the key was sent more than once; send one key"),
            Self::Empty => f.write_str("the key is empty"),
            Self::BadString => f.write_str(
                "the key starts with a quote but is not a string of RFC 9651; send \"key\" or the key without quotes",
            ),
            Self::BadByte => f.write_str(
                "the key has a character that is not allowed",
            ),
            Self::Comma => f.write_str("the key has a comma; send one key, or put it in quotes"),
            Self::NotText => f.write_str("the key is not a text"),
            Self::Unreadable => f.write_str(
                "the body is no JSON that every program reads alike, or its content coding cannot be undone, so a key in it may be \
                 overlooked; send JSON in UTF-8, as it is or in gzip",
            ),
            Self::Differing => f.write_str("two places have different keys; send one key"),
            Self::Spelling => f.write_str(
                "the name of the field was sent with `_` for `-`, or the reverse; send it as it is written here",
            ),
            Self::Misplaced => f.write_str(
                "the name of the key stands in the request where no key is read, such as a list, a multipart form, a format other \
                 than JSON and URL-encoded forms, or a parameter after a semicolon; send it as it is written here",
            ),
            Self::NotQuoted => f.write_str("the key must be in double quotes"),
            Self::TooLong { bytes } => {
                write!(f, "the key has {bytes} characters; at most {} are allowed", limits::MAX_KEY_BYTES)
            }
            Self::Format(format) => write!(f, "the key is not {format}"),
        }
    }
}

impl std::error::Error for KeyHeaderError {}

fn trim_ows(field: &[u8]) -> &[u8] {
    let is_ows = |b: &u8| matches!(b, b' ' | b'\t');
    let start = field.iter().position(|b| !is_ows(b)).unwrap_or(field.len());
    let end = field.iter().rposition(|b| !is_ows(b)).map_or(start, |last| last + 1);
    field.get(start..end).unwrap_or_default()
}

/// A string of RFC 9651 with any parameters, which are ignored.
fn quoted(field: &[u8]) -> Result<String, KeyHeaderError> {
    let item = sfv::Parser::new(field).parse::<sfv::Item>().map_err(|_| KeyHeaderError::BadString)?;
    match item.bare_item {
        sfv::BareItem::String(string) => Ok(String::from(string)),
        _ => Err(KeyHeaderError::BadString),
    }
}

fn bare(field: &[u8]) -> Result<&str, KeyHeaderError> {
    for byte in field {
        match byte {
            b',' => return Err(KeyHeaderError::Comma),
            b'!' | b'#'..=b'~' => {}
            _ => return Err(KeyHeaderError::BadByte),
        }
    }
    std::str::from_utf8(field).map_err(|_| KeyHeaderError::BadByte)
}

fn raw(field: &[u8]) -> Result<&str, KeyHeaderError> {
    let key = std::str::from_utf8(field).map_err(|_| KeyHeaderError::BadByte)?;
    if key.chars().any(char::is_control) { Err(KeyHeaderError::BadByte) } else { Ok(key) }
}

fn is_uuid(key: &str) -> bool {
    key.len() == 36
        && key.bytes().enumerate().all(|(at, b)| match at {
            8 | 13 | 18 | 23 => b == b'-',
            _ => b.is_ascii_hexdigit(),
        })
}

fn is_ulid(key: &str) -> bool {
    // Crockford's base 32 has no I, L, O and U; 26 of its digits hold 130 bits, so the first is at most 7.
    key.len() == 26
        && key.bytes().next().is_some_and(|first| first <= b'7')
        && key.bytes().all(|b| {
            b.is_ascii_alphanumeric() && !matches!(b.to_ascii_uppercase(), b'I' | b'L' | b'O' | b'U')
        })
}

/// Returns true if requests use this field for another purpose than a key. In the least harmful case, all requests of
/// a caller would have the same key.
pub(crate) fn has_other_purpose(name: &HeaderName) -> bool {
    let name = name.as_str();
    OTHER_FIELDS.contains(&name) || OTHER_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

const OTHER_FIELDS: [&str; 42] = [
    "accept", "authorization", "baggage", "cache-control", "connection", "cookie", "date", "depth",
    "destination", "digest", "dnt", "dpop", "expect", "forwarded", "from", "host", "http2-settings",
    "keep-alive", "link", "location", "max-forwards", "origin", "overwrite", "pragma", "prefer", "priority",
    "range", "referer", "save-data", "set-cookie", "te", "timeout", "traceparent", "tracestate", "trailer",
    "transfer-encoding", "upgrade", "user-agent", "via", "x-http-method-override", "x-real-ip",
    "x-requested-with",
];

const OTHER_PREFIXES: [&str; 9] = [
    "accept-", "access-control-", "content-", "if-", "oncegate-", "proxy-", "sec-", "upgrade-",
    "x-forwarded-",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn lenient(field: &[u8]) -> Result<Vec<u8>, KeyHeaderError> {
        KeyGrammar::default().parse(field).map(|key| key.as_bytes().to_vec())
    }

    fn strict(field: &[u8]) -> Result<Vec<u8>, KeyHeaderError> {
        let grammar = KeyGrammar::default().with_syntax(KeySyntax::Strict);
        grammar.parse(field).map(|key| key.as_bytes().to_vec())
    }

    #[test]
    fn the_table_of_fields() {
        use KeyHeaderError::{BadByte, BadString, Comma, Empty, NotQuoted};
        type Read = Result<&'static [u8], KeyHeaderError>;
        const UUID: &[u8] = b"8e03978e-40d5-43e8-bc93-6894a57f9324";
        let quoted_uuid = [b"\"", UUID, b"\""].concat();
        let table: &[(&[u8], Read, Read)] = &[
            // field as received, lenient, strict
            (&quoted_uuid, Ok(UUID), Ok(UUID)),
            (UUID, Ok(UUID), Err(NotQuoted)),
            (b"clkyoesmbgybucifusbbtdsbohtyuuwz", Ok(b"clkyoesmbgybucifusbbtdsbohtyuuwz"), Err(NotQuoted)),
            (br#""a\"b\\c""#, Ok(br#"a"b\c"#), Ok(br#"a"b\c"#)),
            (br#""abc";v=1"#, Ok(b"abc"), Ok(b"abc")),
            (br#""abc"#, Err(BadString), Err(BadString)),
            (br#"abc""#, Err(BadByte), Err(NotQuoted)),
            (br#""foo \,""#, Err(BadString), Err(BadString)),
            (b"'foo'", Ok(b"'foo'"), Err(NotQuoted)),
            (br#""a", "b""#, Err(BadString), Err(BadString)),
            (br#""a" b"#, Err(BadString), Err(BadString)),
            (b"", Err(Empty), Err(Empty)),
            (b"  \t ", Err(Empty), Err(Empty)),
            (br#""""#, Err(Empty), Err(Empty)),
            (br#""   ""#, Err(Empty), Err(Empty)),
            (b"a, b", Err(Comma), Err(NotQuoted)),
            (b"a b", Err(BadByte), Err(NotQuoted)),
            ("\"fü\"".as_bytes(), Err(BadString), Err(BadString)),
            ("fü".as_bytes(), Err(BadByte), Err(NotQuoted)),
            (b"\xff\xfe", Err(BadByte), Err(NotQuoted)),
            (b"a\tb", Err(BadByte), Err(NotQuoted)),
            (b"\"a\0b\"", Err(BadString), Err(BadString)),
            (b"  \"abc\"  ", Ok(b"abc"), Ok(b"abc")),
            (b"ABC", Ok(b"ABC"), Err(NotQuoted)),
            (b"'; DROP TABLE keys;--", Err(BadByte), Err(NotQuoted)),
            (b"%0d%0aSet-Cookie:x", Ok(b"%0d%0aSet-Cookie:x"), Err(NotQuoted)),
        ];
        for (field, in_lenient, in_strict) in table {
            let name = String::from_utf8_lossy(field);
            assert_eq!(lenient(field), in_lenient.map(<[u8]>::to_vec), "lenient {name:?}");
            assert_eq!(strict(field), in_strict.map(<[u8]>::to_vec), "strict {name:?}");
        }
    }

    #[test]
    fn a_key_of_a_body_has_a_form_for_header_fields() {
        let grammar = |syntax| KeyGrammar::default().with_syntax(syntax);
        for (key, quoted, raw) in [
            ("order-1", "\"order-1\"", "order-1"),
            ("a \"b\" \\", r#""a \"b\" \\""#, "a \"b\" \\"),
            ("fü%\"", "%\"f%c3%bc%25%22\"", "fü%\""),
            ("a\nb", "%\"a%0ab\"", "%\"a%0ab\""),
            (" a", "\" a\"", "\" a\""),
        ] {
            let key = IdempotencyKey::new(key).unwrap();
            for (syntax, expected) in
                [(KeySyntax::Lenient, quoted), (KeySyntax::Strict, quoted), (KeySyntax::Raw, raw)]
            {
                let field = grammar(syntax).field_of(&key).unwrap();
                assert_eq!(field.as_bytes(), expected.as_bytes(), "{syntax:?}");
            }
            if quoted.starts_with('"') {
                assert_eq!(grammar(KeySyntax::Strict).parse(quoted.as_bytes()).unwrap(), key);
            }
        }
    }

    #[test]
    fn a_raw_key_is_the_whole_value_of_its_field() {
        let raw = |field: &str| {
            let grammar = KeyGrammar::default().with_syntax(KeySyntax::Raw);
            grammar.parse(field.as_bytes()).map(|key| String::from_utf8(key.as_bytes().to_vec()).unwrap())
        };
        for key in ["abc", "\"abc\"", "a, b", "a b", "'; DROP", "fü", "a\"b"] {
            assert_eq!(raw(&format!(" {key}\t")), Ok(key.to_owned()));
        }
        assert_eq!(raw("a\tb"), Err(KeyHeaderError::BadByte));
        assert_eq!(raw("  "), Err(KeyHeaderError::Empty));
        assert_eq!(raw(&"k".repeat(256)), Err(KeyHeaderError::TooLong { bytes: 256 }));
    }

    #[test]
    fn advice_for_an_invalid_key_fits_the_grammar() {
        let raw = KeyGrammar::default().with_syntax(KeySyntax::Raw);
        let short = raw.clone().with_format(KeyFormat::pattern(".{1,64}").unwrap());
        let long = short.parse(&[b'k'; 65]).unwrap_err();
        for (grammar, error, expected) in [
            (&KeyGrammar::default(), KeyHeaderError::Empty, "the key is empty; send 1 to 255 characters"),
            (&KeyGrammar::default(), KeyHeaderError::BadByte, "without quote and comma"),
            (&raw, KeyHeaderError::BadByte, "send text in UTF-8 without control characters"),
            (
                &short,
                long,
                "the key is not of the published format; send one that the regular expression .{1,64} matches",
            ),
            (&short, KeyHeaderError::Comma, "put it in quotes"),
        ] {
            let text = grammar.explain(error);
            assert!(text.contains(expected), "{text}");
        }
    }

    #[test]
    fn a_key_has_at_most_255_bytes_after_unescaping() {
        let max = limits::MAX_KEY_BYTES;
        assert!(lenient(&vec![b'k'; max]).is_ok());
        assert_eq!(lenient(&vec![b'k'; max + 1]), Err(KeyHeaderError::TooLong { bytes: 256 }));
        let quoted = |n: usize| format!("\"{}\"", r"\\".repeat(n)).into_bytes();
        assert_eq!(lenient(&quoted(max)).unwrap().len(), max);
        assert_eq!(lenient(&quoted(max + 1)), Err(KeyHeaderError::TooLong { bytes: 256 }));
    }

    #[test]
    fn formats_are_checked_and_ids_lose_their_case() {
        let read = |format, field: &[u8]| KeyGrammar::default().with_format(format).parse(field);
        let uuid = b"8E03978E-40d5-43e8-bc93-6894a57f9324";
        assert_eq!(read(KeyFormat::Uuid, uuid), read(KeyFormat::Uuid, &uuid.to_ascii_lowercase()));
        assert_eq!(
            read(KeyFormat::Uuid, b"8e03978e40d543e8bc936894a57f9324"),
            Err(KeyHeaderError::Format("a UUID"))
        );
        let ulid = b"01ARZ3NDEKTSV4RRFFQ69G5FAV";
        assert_eq!(read(KeyFormat::Ulid, ulid), read(KeyFormat::Ulid, &ulid.to_ascii_lowercase()));
        assert!(read(KeyFormat::Ulid, b"81ARZ3NDEKTSV4RRFFQ69G5FAV").is_err());
        assert!(read(KeyFormat::Ulid, b"01ARZ3NDEKTSV4RRFFQ69G5FAU").is_err());
        let order = KeyFormat::pattern("order-[0-9]+").unwrap();
        assert!(read(order.clone(), b"order-12").is_ok());
        assert!(read(order, b"order-12x").is_err());
        assert!(KeyFormat::pattern("[").is_err());
        let long = KeyFormat::pattern(".{20,64}").unwrap();
        assert!(read(long.clone(), &[b'k'; 20]).is_ok() && read(long, &[b'k'; 19]).is_err());
    }

    #[test]
    fn two_lines_of_a_field_are_an_error_and_two_fields_must_have_equal_keys() {
        let names = ["idempotency-key", "x-idempotency-key"].map(HeaderName::from_static);
        let read = |lines: &[(usize, &'static str)]| {
            let mut headers = HeaderMap::new();
            for (at, value) in lines {
                headers.append(&names[*at], HeaderValue::from_static(value));
            }
            KeyGrammar::default().read(&headers, &names).map(|read| read.map(|(_, name, _)| name.clone()))
        };
        let [first, second] = names.clone();
        let repeated = Some(Err(KeyHeaderError::SeveralFields));
        assert_eq!(read(&[]), None);
        assert_eq!(read(&[(1, "a")]), Some(Ok(second)));
        assert_eq!(read(&[(1, "a"), (0, "\"a\"")]), Some(Ok(first)));
        assert_eq!(read(&[(1, "a"), (0, "b")]), Some(Err(KeyHeaderError::Differing)));
        assert_eq!(read(&[(0, "a"), (1, "\"b")]), Some(Err(KeyHeaderError::BadString)));
        assert_eq!(read(&[(0, "a"), (0, "a")]), repeated);
        assert_eq!(read(&[(0, "a"), (1, "a"), (1, "a")]), repeated);
    }
}
