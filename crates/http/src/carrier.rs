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
    let parameter = key_in_parameters(profile, &[], parts.uri.query().unwrap_or_default());
    match (field, parameter) {
        // A service may read either of them.
        (Some(Ok(field)), Some(Ok(key))) if field.key != key => Some(Err(KeyHeaderError::Differing)),
        (Some(_), Some(Err(error))) => Some(Err(error)),
        (None, parameter) => parameter.map(|key| key.map(|key| CarriedKey { key, echo: None })),
        (field, _) => field,
    }
}

/// The key in the parameters of a query or of a form. Names are compared without regard to case, because many services read
/// them so.
///
/// # Errors
/// If the key is invalid, if a parameter is there twice, and if some service may read a parameter as one that carries the key, or
/// as one of the `unread` names.
fn key_in_parameters(
    profile: &Profile,
    unread: &[&str],
    text: &str,
) -> Option<Result<IdempotencyKey, KeyHeaderError>> {
    let names = &profile.key_query;
    if names.is_empty() && unread.is_empty() {
        return None;
    }
    let is_near = |name: &str| {
        let near = near_name(name);
        names.iter().map(String::as_str).chain(unread.iter().copied()).any(|own| near_name(own) == near)
    };
    let mut values: Vec<Option<Cow<'_, str>>> = vec![None; names.len()];
    for pair in text.split('&') {
        // Some services separate parameters by semicolons, too.
        let mut pieces = pair.split(';').map(|piece| decoded(piece.split('=').next().unwrap_or_default()));
        let name = pieces.next().unwrap_or_default();
        let has_more = pair.contains(';');
        match names.iter().position(|own| own.eq_ignore_ascii_case(&name)) {
            Some(at) if !has_more => {
                let (_, value) = pair.split_once('=').unwrap_or((pair, ""));
                if values.get_mut(at)?.replace(decoded(value)).is_some() {
                    return Some(Err(KeyHeaderError::SeveralFields));
                }
            }
            Some(_) => return Some(Err(KeyHeaderError::Misplaced)),
            None if is_near(&name) || pieces.any(|name| is_near(&name)) => {
                return Some(Err(KeyHeaderError::Misplaced));
            }
            None => {}
        }
    }
    only(values.into_iter().flatten().map(|value| profile.grammar.key_of(value)))
}

/// The name of a parameter, without the differences that some frameworks ignore: case, spaces around it, dots and spaces instead
/// of `_`, and the index of a list.
fn near_name(name: &str) -> String {
    let name = name.split(['[', '\0']).next().unwrap_or_default().trim();
    name.replace([' ', '.'], "_").to_ascii_lowercase()
}

/// The only key of these places. Keys of several places must be equal: a service may read any of them.
pub(crate) fn only(
    keys: impl IntoIterator<Item = Result<IdempotencyKey, KeyHeaderError>>,
) -> Option<Result<IdempotencyKey, KeyHeaderError>> {
    keys.into_iter().reduce(|first, next| match (first, next) {
        (Ok(first), Ok(next)) if first != next => Err(KeyHeaderError::Differing),
        (Ok(_), Err(error)) => Err(error),
        (first, _) => first,
    })
}

/// Returns true if a request has a field of the key in another spelling, with `_` for `-` or the reverse: many services read it.
pub(crate) fn has_other_spelling(profile: &Profile, headers: &HeaderMap) -> bool {
    let own = &profile.key_headers;
    headers.keys().any(|name| {
        own.iter().any(|own| credential::is_other_spelling(name.as_str(), own.as_str()))
            && !own.contains(name)
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

impl KeyMember {
    /// # Errors
    /// If the pointer is the whole body, or goes through a list.
    pub(crate) fn new(pointer: JsonPointer) -> Result<Self, String> {
        if pointer.as_str().is_empty() {
            return Err("the whole body cannot be the key; name a member, such as \"/key\"".to_owned());
        }
        let path = pointer.as_str().split('/').skip(1);
        let path: Vec<_> = path.map(|name| name.replace("~1", "/").replace("~0", "~")).collect();
        let is_index = |name: &&String| *name == "-" || name.bytes().all(|byte| byte.is_ascii_digit());
        match path.iter().find(is_index) {
            Some(index) => Err(format!(
                "{:?} goes through a list ({index:?} is an index or empty); name a member of objects, such as \"/meta/key\"",
                pointer.as_str()
            )),
            None => Ok(Self { pointer, path }),
        }
    }

    /// The name of the member, without the objects around it.
    fn name(&self) -> Option<&str> {
        self.path.last().map(String::as_str)
    }

    /// The name of a member of the outermost object.
    fn single_name(&self) -> Option<&str> {
        self.name().filter(|_| self.path.len() == 1)
    }
}

/// The key in a body: in a form, if its type says that it is one, or in JSON, whatever its type, because many clients send JSON
/// under another type. `None` if there is none.
///
/// # Errors
/// If the key is invalid, and if a service may find a key in the body that is not read here: in JSON that cannot be read to its
/// end, in a list, in a form that is not URL-encoded, or in another format in which the name of a member stands.
pub(crate) fn key_in_body(
    profile: &Profile,
    content_type: &[u8],
    body: &[u8],
) -> Option<Result<IdempotencyKey, KeyHeaderError>> {
    if body.is_empty() {
        return None;
    }
    let has_type = |part: &[u8]| content_type.windows(part.len()).any(|own| own.eq_ignore_ascii_case(part));
    let is_form = has_type(b"x-www-form-urlencoded");
    let members = &profile.key_members;
    let form = is_form.then(|| {
        let unread: Vec<_> = members.iter().filter_map(KeyMember::single_name).collect();
        key_in_parameters(profile, &unread, &String::from_utf8_lossy(body))
    });
    let form = form.flatten();
    let is_json = match key_in_json(members, &profile.grammar, body) {
        // A text of the JSON has a parameter of a URL.
        Ok(None) if form.is_some() => return Some(Err(KeyHeaderError::Misplaced)),
        Ok(member @ Some(_)) => return only(form.into_iter().chain(member)),
        Ok(None) => true,
        Err(NotJson) if !members.is_empty() && may_be_json(content_type, body) => {
            return Some(Err(KeyHeaderError::Unreadable));
        }
        Err(NotJson) if form.is_some() => return form,
        Err(NotJson) => false,
    };
    let is_multipart = has_type(b"multipart/");
    let is_opaque = OPAQUE_TYPES.iter().any(|part| has_type(part));
    if is_json || (is_form || is_opaque) && !is_multipart {
        return None;
    }
    let parameters = profile.key_query.iter().filter(|_| is_multipart).map(String::as_str);
    let mut names = members.iter().filter_map(KeyMember::name).chain(parameters);
    names.any(|name| names_member(body, name)).then_some(Err(KeyHeaderError::Misplaced))
}

/// Media types of bodies in which no service looks for a key.
const OPAQUE_TYPES: [&[u8]; 7] =
    [b"image/", b"audio/", b"video/", b"font/", b"octet-stream", b"application/pdf", b"application/zip"];

/// Returns true if this name stands in a text or in a binary format (CBOR, MessagePack), in any case, and not as a part of
/// another word. Bytes of UTF-16 and UTF-32 are skipped.
fn names_member(body: &[u8], name: &str) -> bool {
    let text: Cow<'_, [u8]> = match body.contains(&0) {
        true => body.iter().copied().filter(|byte| *byte != 0).collect::<Vec<_>>().into(),
        false => body.into(),
    };
    let name = name.as_bytes();
    let is_of_word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    // The byte in front of a short text has its length.
    let is_length = |byte: &u8| usize::from(byte & 0x1f) == name.len() && matches!(byte >> 5, 0b011 | 0b101);
    let is_named = |at: usize| {
        let before = at.checked_sub(1).and_then(|at| text.get(at));
        let after = text.get(at + name.len());
        before.is_some_and(is_length) || !before.is_some_and(is_of_word) && !after.is_some_and(is_of_word)
    };
    text.windows(name.len()).enumerate().any(|(at, own)| own.eq_ignore_ascii_case(name) && is_named(at))
}

/// The key in a message that is known to be JSON. `None` if there are no such members.
pub(crate) fn key_in_message(
    members: &[KeyMember],
    grammar: &KeyGrammar,
    message: &[u8],
) -> Option<Result<IdempotencyKey, KeyHeaderError>> {
    match key_in_json(members, grammar, message) {
        Ok(key) => key,
        Err(NotJson) => (!members.is_empty()).then_some(Err(KeyHeaderError::Unreadable)),
    }
}

/// The error for a body that is not JSON from its first byte to its last.
struct NotJson;

/// The key in a JSON body. Names are compared without regard to case, because many services read them so.
fn key_in_json(
    members: &[KeyMember],
    grammar: &KeyGrammar,
    body: &[u8],
) -> Result<Option<Result<IdempotencyKey, KeyHeaderError>>, NotJson> {
    if members.is_empty() {
        return Err(NotJson);
    }
    let mut search = Search::of(members.len());
    let candidates = members.iter().enumerate().map(|(at, member)| (at, member.path.as_slice())).collect();
    let mut json = serde_json::Deserializer::from_slice(without_mark(body));
    let object = Object { candidates, search: &mut search };
    object.deserialize(&mut json).and_then(|()| json.end()).map_err(|_| NotJson)?;
    Ok(match search {
        Search { is_repeated: true, .. } => Some(Err(KeyHeaderError::SeveralFields)),
        Search { is_in_list: true, .. } => Some(Err(KeyHeaderError::Misplaced)),
        Search { values, .. } => only(values.into_iter().flatten().map(|value| match value {
            Member::Other => Err(KeyHeaderError::NotText),
            Member::Text(text) => grammar.key_of(text.into()),
        })),
    })
}

/// Returns true if a service may read this body as JSON, by its type or by its first character.
pub(crate) fn may_be_json(content_type: &[u8], body: &[u8]) -> bool {
    let has_type = content_type.windows(4).any(|word| word.eq_ignore_ascii_case(b"json"));
    // In UTF-16 and UTF-32, marks and zeros precede it.
    let is_mark = |byte: &&u8| **byte <= b' ' || matches!(byte, 0xfe | 0xff);
    let first = without_mark(body).iter().find(|byte| !is_mark(byte));
    (has_type && !body.is_empty()) || matches!(first, Some(b'{' | b'['))
}

/// Some clients send a byte order mark, and some services skip it.
fn without_mark(body: &[u8]) -> &[u8] {
    body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body)
}

/// The values that were found, in the order of the paths.
struct Search {
    values: Vec<Option<Member>>,
    /// True if an object has two members of one name on one of the paths: programs differ in which of them counts.
    is_repeated: bool,
    /// True if a list has an object with such a member: a request for several operations, each with a key.
    is_in_list: bool,
}

impl Search {
    fn of(members: usize) -> Self {
        Self { values: vec![None; members], is_repeated: false, is_in_list: false }
    }

    fn found_any(&self) -> bool {
        self.is_repeated || self.is_in_list || self.values.iter().any(Option::is_some)
    }
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
        let mut search = Search::of(self.search.values.len());
        loop {
            let object = Object { candidates: self.candidates.clone(), search: &mut search };
            if values.next_element_seed(object)?.is_none() {
                break;
            }
        }
        self.search.is_in_list |= search.found_any();
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

    fn with_members(names: &[&str]) -> Profile {
        let member = |name: &&str| KeyMember::new(JsonPointer::parse(name).unwrap()).unwrap();
        let mut profile = Profile::default();
        profile.key_members = names.iter().map(member).collect();
        profile
    }

    type Read = Option<Result<Vec<u8>, KeyHeaderError>>;

    fn in_body(profile: &Profile, content_type: &str, body: &[u8]) -> Read {
        let read = key_in_body(profile, content_type.as_bytes(), body);
        read.map(|key| key.map(|key| key.as_bytes().to_vec()))
    }

    fn key(text: &str) -> Read {
        Some(Ok(text.as_bytes().to_vec()))
    }

    const MISPLACED: Read = Some(Err(KeyHeaderError::Misplaced));
    const UNREADABLE: Read = Some(Err(KeyHeaderError::Unreadable));

    #[test]
    fn a_member_of_the_body_carries_the_key() {
        for (body, expected) in [
            (r#"{"key":"abc"}"#, key("abc")),
            (r#"{"amount":9007199254740993,"key":"a b"}"#, key("a b")),
            (r#"{"x":{"key":"no"},"y":["key"],"meta":{"key":"inner"}}"#, key("inner")),
            (r#"{"meta":{"key":"inner"},"key":"outer"}"#, Some(Err(KeyHeaderError::Differing))),
            (r#"{"meta":{"key":"same"},"key":"same"}"#, key("same")),
            (r#"{"meta":{"key":"inner"},"key":null}"#, key("inner")),
            (r#"[{"x":1},{"Key":"abc"}]"#, MISPLACED),
            (r#"[[{"key":7}]]"#, MISPLACED),
            (r#"{"meta":[{"key":"abc"}]}"#, MISPLACED),
            (r#"[{"x":{"key":1}},"key",7]"#, None),
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
            let profile = with_members(&["/key", "/meta/key"]);
            assert_eq!(in_body(&profile, "application/json", body.as_bytes()), expected, "{body}");
        }
    }

    #[test]
    fn a_body_that_may_be_json_is_not_taken_for_one_without_a_key() {
        let profile = with_members(&["/key"]);
        let read = |content_type: &str, body: &[u8]| in_body(&profile, content_type, body);
        let utf16: Vec<u8> = "{\"key\":\"a\"}".encode_utf16().flat_map(u16::to_le_bytes).collect();
        let utf32: Vec<u8> =
            "\u{feff} {\"key\":\"a\"}".chars().flat_map(|c| u32::from(c).to_be_bytes()).collect();
        let vertical_tab = b"\x0b{\"key\":\"a\"}";
        for body in [
            &b"{\"k\xff\":1}"[..],
            b"[1,",
            b" {\"key\":\"a\tb\"}",
            &utf16,
            &utf32,
            vertical_tab,
            b"{\"key\":\"a\"}\0",
        ] {
            assert_eq!(read("text/plain", body), UNREADABLE, "{body:?}");
        }
        assert_eq!(read("application/vnd.api+JSON", b"x=1"), UNREADABLE);
        for body in [&b"keyword=a"[..], b"", b"--b\r\n", b"<monkey>a</monkey>", b"7", b"\"key\""] {
            assert_eq!(read("text/plain", body), None, "{body:?}");
        }
    }

    #[test]
    fn a_body_of_another_format_that_names_the_key_is_refused() {
        let profile = with_members(&["/meta/ClientToken"]);
        for (content_type, body, expected) in [
            ("application/xml", &b"<r><ClientToken>t</ClientToken></r>"[..], MISPLACED),
            ("application/yaml", b"a: 1\nclientToken: t\n", MISPLACED),
            ("", b"ClientToken=t", MISPLACED),
            ("application/cbor", b"\xa1\x6bclientToken\x61t", MISPLACED),
            ("application/msgpack", b"\x81\xabclientToken\xa1t", MISPLACED),
            ("multipart/form-data; boundary=b", b"--b\r\nname=\"ClientToken\"\r\n\r\nt\r\n--b--", MISPLACED),
            ("text/plain", b"the ClientTokens and aClientToken", None),
            ("image/png", b"\x89 ClientToken \0", None),
            ("application/x-www-form-urlencoded", b"note=ClientToken", None),
        ] {
            assert_eq!(in_body(&profile, content_type, body), expected, "{content_type}");
        }
        assert_eq!(
            in_body(&with_members(&["/key"]), "application/x-www-form-urlencoded", b"a=1&Key=a"),
            MISPLACED
        );
    }

    #[test]
    fn a_form_carries_the_key_in_its_parameters_and_json_that_is_sent_as_a_form_in_its_members() {
        const FORM: &str = "application/x-www-form-urlencoded";
        let aws = Profile::named("aws").unwrap();
        for (content_type, body, expected) in [
            (FORM, "Action=Run&ClientToken=t", key("t")),
            (FORM, "Action=Run&ClientRequestToken=t%2f1", key("t/1")),
            (FORM, "clienttoken=t", key("t")),
            (FORM, "ClientToken=t&ClientRequestToken=t", key("t")),
            (FORM, "ClientToken=t&ClientRequestToken=u", Some(Err(KeyHeaderError::Differing))),
            (FORM, "ClientToken=t&clientToken=t", Some(Err(KeyHeaderError::SeveralFields))),
            (FORM, "x=1;ClientToken=t", MISPLACED),
            (FORM, "ClientToken=t;x=1", MISPLACED),
            (FORM, "ClientToken[]=t", MISPLACED),
            (FORM, "x=1;y=2&Action=Run", None),
            (FORM, r#"{"ClientToken":"t"}"#, key("t")),
            ("application/x-www-form-urlencoded, application/json", r#"{"ClientToken":"t"}"#, key("t")),
            (FORM, r#"{"ClientToken":"t","x":"&ClientToken=u"}"#, Some(Err(KeyHeaderError::Differing))),
            (FORM, r#"{"callback":"https://x/?a=1&ClientToken=zz","amount":1}"#, MISPLACED),
            (FORM, r#"{"ClientToken":"t"}="#, UNREADABLE),
            (FORM, r#"{"x":"t"}"#, None),
            ("application/json", "ClientToken=t", UNREADABLE),
            ("multipart/form-data; boundary=b", "--b\r\nx: y; name=ClientRequestToken", MISPLACED),
            ("multipart/form-data; boundary=b", "--b\r\nx: y; name=token", None),
        ] {
            assert_eq!(in_body(&aws, content_type, body.as_bytes()), expected, "{content_type} {body}");
        }
    }

    #[test]
    fn a_pointer_through_a_list_carries_no_key() {
        for (pointer, expected) in
            [("/items/0/key", false), ("/-", false), ("/", false), ("/a1/key", true), ("", false)]
        {
            assert_eq!(KeyMember::new(JsonPointer::parse(pointer).unwrap()).is_ok(), expected, "{pointer}");
        }
    }

    #[test]
    fn a_parameter_of_the_query_carries_the_key_unless_a_field_does() {
        let mut profile = Profile::default();
        profile.key_query = vec!["Token".to_owned()];
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
            Some(Err(KeyHeaderError::Differing))
        );
        assert_eq!(
            read(Request::post("/").header("idempotency_key", "h")),
            Some(Err(KeyHeaderError::Spelling))
        );
        assert_eq!(read(Request::post("/?token=q")), key("q", false));
        assert_eq!(read(Request::post("/?tokens=q")), None);
        assert_eq!(read(Request::post("/?a=1;token=q")), Some(Err(KeyHeaderError::Misplaced)));
        assert_eq!(read(Request::post("/?Token=")), Some(Err(KeyHeaderError::Empty)));
        assert_eq!(read(Request::post("/?Token=a&Token=a")), Some(Err(KeyHeaderError::SeveralFields)));
    }

    #[test]
    fn another_spelling_of_a_field_is_found_in_both_directions() {
        let mut profile = Profile::default();
        let sent = |profile: &Profile, name: &'static str| {
            let (parts, ()) = Request::post("/").header(name, "h").body(()).unwrap().into_parts();
            key_in_head(profile, &parts).map(|read| read.map(|_| ()))
        };
        profile.key_headers = vec![HeaderName::from_static("x_key")];
        assert_eq!(sent(&profile, "x-key"), Some(Err(KeyHeaderError::Spelling)));
        assert_eq!(sent(&profile, "x_key"), Some(Ok(())));
        profile.key_headers.push(HeaderName::from_static("x-key"));
        assert_eq!(sent(&profile, "x-key"), Some(Ok(())));
        assert_eq!(sent(&profile, "x_key"), Some(Ok(())));
        assert_eq!(sent(&profile, "x-kee"), None);
    }
}
