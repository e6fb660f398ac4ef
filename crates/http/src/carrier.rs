//! The places in a request that may carry its key: header fields, a parameter of the query, members of a JSON body.

use std::borrow::Cow;
use std::fmt;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use oncegate_core::{IdempotencyKey, JsonPointer};
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserializer, de};

use crate::credential;
use crate::key::{KeyGrammar, KeyHeaderError};
use crate::profile::Profile;

/// A key, and the field in which the response repeats it.
#[derive(Debug)]
pub(crate) struct CarriedKey {
    pub(crate) key: IdempotencyKey,
    pub(crate) echo: Option<(HeaderName, HeaderValue)>,
}

/// The key in the head of a request: in a header field, or in the query. `None` if neither carries one.
pub(crate) fn key_in_head(profile: &Profile, parts: &Parts) -> Option<Result<CarriedKey, KeyHeaderError>> {
    let grammar = &profile.grammar;
    if has_other_spelling(profile, &parts.headers) {
        return Some(Err(KeyHeaderError::Spelling));
    }
    let field = grammar.read(&parts.headers, &profile.key_headers).map(|read| {
        read.map(|(key, name, value)| CarriedKey { key, echo: Some((name.clone(), value.clone())) })
    });
    let parameter = key_in_parameters(profile, parts.uri.query().unwrap_or_default());
    match (field, parameter) {
        // A service may read either of them.
        (Some(Ok(field)), Some(Ok(key))) if field.key != key => Some(Err(KeyHeaderError::SeveralFields)),
        (Some(_), Some(Err(error))) => Some(Err(error)),
        (None, parameter) => parameter.map(|key| key.map(|key| CarriedKey { key, echo: None })),
        (field, _) => field,
    }
}

/// The key in the parameters of a query or of a form.
pub(crate) fn key_in_parameters(
    profile: &Profile,
    text: &str,
) -> Option<Result<IdempotencyKey, KeyHeaderError>> {
    let name = profile.key_query.as_deref()?;
    let mut values = parameters(text).filter(|(own, _)| own == name).map(|(_, value)| value);
    let value = values.next()?;
    match values.next() {
        Some(_) => Some(Err(KeyHeaderError::SeveralFields)),
        None => Some(profile.grammar.key_of(value)),
    }
}

/// Returns true if a request has a field of the key in another spelling, with `_` instead of `-`: many services read it.
pub(crate) fn has_other_spelling(profile: &Profile, headers: &HeaderMap) -> bool {
    headers
        .keys()
        .map(HeaderName::as_str)
        .filter(|name| name.contains('_'))
        .any(|name| profile.key_headers.iter().any(|own| credential::is_other_spelling(name, own.as_str())))
}

/// The names and values of a query, decoded as HTML forms encode them.
fn parameters(query: &str) -> impl Iterator<Item = (Cow<'_, str>, Cow<'_, str>)> {
    query.split('&').map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decoded(name), decoded(value))
    })
}

fn decoded(text: &str) -> Cow<'_, str> {
    match text.contains('+') {
        true => Cow::Owned(
            percent_encoding::percent_decode_str(&text.replace('+', " ")).decode_utf8_lossy().into_owned(),
        ),
        false => percent_encoding::percent_decode_str(text).decode_utf8_lossy(),
    }
}

/// A member of a JSON body that may carry the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeyMember {
    pub(crate) pointer: JsonPointer,
    /// The names from the outermost object on.
    path: Vec<String>,
}

impl From<JsonPointer> for KeyMember {
    fn from(pointer: JsonPointer) -> Self {
        let path = pointer.as_str().split('/').skip(1);
        let path = path.map(|name| name.replace("~1", "/").replace("~0", "~")).collect();
        Self { pointer, path }
    }
}

/// The key in a JSON body: the value of the first of these members that the body has. `None` if it has none of them, or is of
/// another kind. Names are compared without regard to case, because many services read them so.
///
/// The text is read whatever its media type, because some APIs send JSON under a type of their own.
///
/// # Errors
/// If the key is invalid, and if the body is JSON by its type or its first character and cannot be read to its end: a service
/// may read it, and find a key in it.
pub(crate) fn key_in_body(
    members: &[KeyMember],
    grammar: &KeyGrammar,
    content_type: &[u8],
    body: &[u8],
) -> Option<Result<IdempotencyKey, KeyHeaderError>> {
    if members.is_empty() || body.is_empty() {
        return None;
    }
    // Some clients send a byte order mark, and some services skip it.
    let text = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
    let mut search = Search { values: vec![None; members.len()], is_repeated: false };
    let candidates = members.iter().enumerate().map(|(at, member)| (at, member.path.as_slice())).collect();
    let mut json = serde_json::Deserializer::from_slice(text);
    let object = Object { candidates, search: &mut search };
    if object.deserialize(&mut json).and_then(|()| json.end()).is_err() {
        let is_json = content_type.windows(4).any(|word| word.eq_ignore_ascii_case(b"json"))
            || matches!(text.trim_ascii_start().first(), Some(b'{' | b'['))
            // The same in UTF-16, with or without a mark.
            || matches!(text, [0xfe, 0xff, ..] | [0xff, 0xfe, ..] | [b'{', 0, ..] | [0, b'{', ..]);
        return is_json.then_some(Err(KeyHeaderError::Unreadable));
    }
    if search.is_repeated {
        return Some(Err(KeyHeaderError::SeveralFields));
    }
    Some(match search.values.into_iter().flatten().next()? {
        Member::Other => Err(KeyHeaderError::NotText),
        Member::Text(text) => grammar.key_of(text.into()),
    })
}

/// The values that were found, in the order of the paths.
struct Search {
    values: Vec<Option<Member>>,
    /// True if an object has two members of one name on one of the paths: programs differ in which of them counts.
    is_repeated: bool,
}

#[derive(Clone, Debug)]
enum Member {
    Text(String),
    Other,
}

/// An object on the way to members.
struct Object<'a, 's> {
    /// The paths that lead into this object, without the names of the objects around it.
    candidates: Vec<(usize, &'a [String])>,
    search: &'s mut Search,
}

impl<'de> DeserializeSeed<'de> for Object<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Object<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen: Vec<String> = Vec::new();
        while let Some(name) = map.next_key::<Cow<'_, str>>()? {
            let within: Vec<_> = self
                .candidates
                .iter()
                .filter_map(|(at, path)| Some((*at, path.split_first()?)))
                .filter(|(_, (first, _))| first.eq_ignore_ascii_case(&name))
                .map(|(at, (_, rest))| (at, rest))
                .collect();
            if within.is_empty() {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            if seen.iter().any(|own| own.eq_ignore_ascii_case(&name)) {
                // It is refused; the rest need not be read into memory.
                self.search.is_repeated = true;
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            seen.push(name.into_owned());
            match within.iter().find(|(_, rest)| rest.is_empty()) {
                Some((at, _)) => {
                    let value = map.next_value_seed(Leaf)?;
                    if let Some(place) = self.search.values.get_mut(*at) {
                        *place = value;
                    }
                }
                None => map.next_value_seed(Object { candidates: within, search: &mut *self.search })?,
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<(), A::Error> {
        while values.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E: de::Error>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E: de::Error>(self) -> Result<(), E> {
        Ok(())
    }
}

/// The value of a member that carries the key; `None` for `null`. Other values are not read into memory.
struct Leaf;

impl<'de> DeserializeSeed<'de> for Leaf {
    type Value = Option<Member>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Leaf {
    type Value = Option<Member>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Some(Member::Text(text.to_owned())))
    }

    fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> Result<Self::Value, E> {
        Ok(Some(Member::Other))
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> Result<Self::Value, E> {
        Ok(Some(Member::Other))
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> Result<Self::Value, E> {
        Ok(Some(Member::Other))
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> Result<Self::Value, E> {
        Ok(Some(Member::Other))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Some(Member::Other))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Self::Value, A::Error> {
        while values.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Some(Member::Other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn in_body(names: &[&str], body: &str) -> Option<Result<Vec<u8>, KeyHeaderError>> {
        let members: Vec<_> =
            names.iter().map(|name| KeyMember::from(JsonPointer::parse(name).unwrap())).collect();
        let read = key_in_body(&members, &KeyGrammar::default(), b"application/json", body.as_bytes());
        read.map(|key| key.map(|key| key.as_bytes().to_vec()))
    }

    #[test]
    fn a_member_of_the_body_carries_the_key() {
        let key = |text: &str| Some(Ok(text.as_bytes().to_vec()));
        for (body, expected) in [
            (r#"{"key":"abc"}"#, key("abc")),
            (r#"{"amount":9007199254740993,"key":"a b"}"#, key("a b")),
            (r#"{"x":{"key":"no"},"y":["key"],"meta":{"key":"inner"}}"#, key("inner")),
            (r#"{"meta":{"key":"inner"},"key":"outer"}"#, key("outer")),
            (r#"{"k\u0065y":"escaped"}"#, key("escaped")),
            (r#"{"key":null}"#, None),
            (r#"{"key":"abc""#, Some(Err(KeyHeaderError::Unreadable))),
            (r#"{"key":"abc"} x"#, Some(Err(KeyHeaderError::Unreadable))),
            (r#"{"key":"abc","x":NaN}"#, Some(Err(KeyHeaderError::Unreadable))),
            (r#"{"key":"abc",}"#, Some(Err(KeyHeaderError::Unreadable))),
            ("\u{feff}{\"key\":\"abc\"}", key("abc")),
            (r#"{"Key":"abc"}"#, key("abc")),
            (r#"{"Key":"a","key":"b"}"#, Some(Err(KeyHeaderError::SeveralFields))),
            (r#"{"key":["a",{"b":1}]}"#, Some(Err(KeyHeaderError::NotText))),
            (r#"["key"]"#, None),
            ("7", None),
            ("", None),
            (r#"{"key":7}"#, Some(Err(KeyHeaderError::NotText))),
            (r#"{"key":{"a":1}}"#, Some(Err(KeyHeaderError::NotText))),
            (r#"{"key":""}"#, Some(Err(KeyHeaderError::Empty))),
            (r#"{"key":"a","key":"b"}"#, Some(Err(KeyHeaderError::SeveralFields))),
            (r#"{"meta":{"key":"a"},"meta":{"key":"b"}}"#, Some(Err(KeyHeaderError::SeveralFields))),
        ] {
            assert_eq!(in_body(&["/key", "/meta/key"], body), expected, "{body}");
        }
    }

    #[test]
    fn a_body_that_may_be_json_is_not_taken_for_one_without_a_key() {
        let members = [KeyMember::from(JsonPointer::parse("/key").unwrap())];
        let read = |content_type: &str, body: &[u8]| {
            key_in_body(&members, &KeyGrammar::default(), content_type.as_bytes(), body).map(|key| key.err())
        };
        let utf16: Vec<u8> = "{\"key\":\"a\"}".encode_utf16().flat_map(u16::to_le_bytes).collect();
        for body in [&b"{\"k\xff\":1}"[..], b"[1,", b" {\"key\":\"a\tb\"}", &utf16, b"{\"key\":\"a\"}\0"] {
            assert_eq!(read("text/plain", body), Some(Some(KeyHeaderError::Unreadable)), "{body:?}");
        }
        assert_eq!(read("application/vnd.api+JSON", b"x=1"), Some(Some(KeyHeaderError::Unreadable)));
        for body in [&b"key=a"[..], b"", b"--b\r\n", b"<key>a</key>"] {
            assert_eq!(read("text/plain", body), None, "{body:?}");
        }
    }

    #[test]
    fn a_parameter_of_the_query_carries_the_key_unless_a_field_does() {
        let mut profile = Profile::default();
        profile.key_query = Some("Token".to_owned());
        let read = |request: http::request::Builder| {
            let (parts, ()) = request.body(()).unwrap().into_parts();
            let read = key_in_head(&profile, &parts);
            read.map(|key| key.map(|carried| (carried.key.as_bytes().to_vec(), carried.echo.is_some())))
        };
        let key = |text: &str, echoed| Some(Ok((text.as_bytes().to_vec(), echoed)));
        assert_eq!(read(Request::post("/?a=1&Token=x%20y+z")), key("x y z", false));
        assert_eq!(read(Request::post("/?Token=h").header("idempotency-key", "h")), key("h", true));
        assert_eq!(
            read(Request::post("/?Token=q").header("idempotency-key", "h")),
            Some(Err(KeyHeaderError::SeveralFields))
        );
        assert_eq!(
            read(Request::post("/").header("idempotency_key", "h")),
            Some(Err(KeyHeaderError::Spelling))
        );
        assert_eq!(read(Request::post("/?token=q")), None);
        assert_eq!(read(Request::post("/?Token=")), Some(Err(KeyHeaderError::Empty)));
        assert_eq!(read(Request::post("/?Token=a&Token=a")), Some(Err(KeyHeaderError::SeveralFields)));
    }
}
