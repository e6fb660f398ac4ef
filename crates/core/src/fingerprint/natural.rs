//! Keys that are built of members of the request body, for callers that send none.

use sha2::{Digest as _, Sha256};

use super::json::{self, Scratch};
use super::media_type::{Kind, MediaType};
use super::pointer::{self, JsonPointer};
use crate::id::IdempotencyKey;
use crate::limits;

/// The first part of what is hashed.
const DOMAIN: &[u8] = b"oncegate-natural-key-1";

/// A key that is built of chosen members of a JSON body, whatever key the client sends.
///
/// With `/customer` and `/cart`, each customer checks out each cart once. The key is `json-` and 64 hexadecimal digits: the
/// SHA-256 of the following items, in the notation of the [fingerprint](super).
/// 1. part: `oncegate-natural-key-1`;
/// 2. count of the pointers, without repetitions; for each of them, sorted as bytes, part: the pointer as configured, part: the
///    canonical JSON of its value.
///
/// So different lists of values have different keys: `1`, `"1"` and `null` are three values, while `1.0` and `1` are one.
/// There is a key only if **all** members are present, in a body of a JSON media type that has a canonical form.
///
/// ```
/// use oncegate_core::{JsonPointer, NaturalKey};
///
/// let key = NaturalKey::new(vec![JsonPointer::parse("/customer")?, JsonPointer::parse("/cart")?]).unwrap();
/// let of = |body: &str| key.of(b"application/json", body.as_bytes());
/// assert_eq!(of(r#"{"customer": "ada", "cart": 7}"#), of(r#"{"cart": 7.0, "customer": "ada", "note": "now"}"#));
/// assert_ne!(of(r#"{"customer": "ada", "cart": 7}"#), of(r#"{"customer": "ada", "cart": "7"}"#));
/// assert!(of(r#"{"customer": "ada"}"#).is_err());
/// # Ok::<(), oncegate_core::JsonPointerError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NaturalKey {
    /// Sorted and without repetitions, because the order of configuration doesn't count.
    members: Vec<JsonPointer>,
}

/// The reason why a request has no natural key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NaturalKeyError {
    /// The body is not of a JSON media type, or has no canonical form: it is not JSON, repeats a member, or has a number that
    /// programs read in different ways.
    #[error("the body is no JSON that every program reads alike")]
    NotJson,
    /// The body has no such member.
    #[error("the body has no member {0}")]
    Missing(JsonPointer),
}

impl NaturalKey {
    /// A key of these members; `None` if there are none, or more than [`limits::MAX_KEY_MEMBERS`].
    #[must_use]
    pub fn new(mut members: Vec<JsonPointer>) -> Option<Self> {
        members.sort_unstable();
        members.dedup();
        (1..=limits::MAX_KEY_MEMBERS).contains(&members.len()).then_some(Self { members })
    }

    /// The members, sorted.
    #[must_use]
    pub fn members(&self) -> &[JsonPointer] {
        &self.members
    }

    /// The key of a body whose content coding is undone.
    ///
    /// # Errors
    /// [`NaturalKeyError`] if the body has none.
    pub fn of(&self, content_type: &[u8], body: &[u8]) -> Result<IdempotencyKey, NaturalKeyError> {
        if MediaType::read(content_type).kind != Kind::Json {
            return Err(NaturalKeyError::NotJson);
        }
        let mut scratch = Scratch::default();
        let document = json::canonicalize(body, &mut scratch).ok_or(NaturalKeyError::NotJson)?;
        let mut hasher = Sha256::new();
        part(&mut hasher, DOMAIN);
        hasher.update((self.members.len() as u64).to_be_bytes());
        let mut value = Vec::new();
        for member in &self.members {
            value.clear();
            pointer::select(document, member, &[], &mut value);
            if value.is_empty() {
                return Err(NaturalKeyError::Missing(member.clone()));
            }
            part(&mut hasher, member.as_str().as_bytes());
            part(&mut hasher, &value);
        }
        let mut key = String::with_capacity(PREFIX.len() + 64);
        key.push_str(PREFIX);
        for byte in hasher.finalize() {
            key.extend([byte >> 4, byte & 15].map(|digit| char::from_digit(digit.into(), 16).unwrap_or('0')));
        }
        // It is neither empty nor longer than a key may be.
        IdempotencyKey::new(key.into_bytes()).map_err(|_| NaturalKeyError::NotJson)
    }
}

const PREFIX: &str = "json-";

fn part(hasher: &mut Sha256, bytes: &[u8]) {
    hasher.update((bytes.len() as u64).to_be_bytes());
    hasher.update(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    const JSON: &[u8] = b"application/json";

    fn key(members: &[&str]) -> NaturalKey {
        NaturalKey::new(members.iter().map(|member| JsonPointer::parse(member).unwrap()).collect()).unwrap()
    }

    fn of(members: &[&str], body: &str) -> String {
        let key = key(members).of(JSON, body.as_bytes());
        String::from_utf8(key.unwrap_or_else(|why| panic!("{body}: {why}")).as_bytes().to_vec()).unwrap()
    }

    #[test]
    fn a_key_is_what_the_page_says() {
        // Made by another program, of the parts as the page lists them.
        let expected = "json-91636101d618a12d7fdcc20edd65ddebe849e4b2475da130d2f3ff9d6f386d08";
        assert_eq!(of(&["/customer", "/cart"], r#"{"customer":"ada","cart":7}"#), expected);
    }

    #[test]
    fn one_key_for_one_meaning() {
        let members = ["/customer", "/cart"];
        let one = of(&members, r#"{"customer":"ada","cart":7}"#);
        for same in [
            r#"{"cart":7,"customer":"ada"}"#,
            r#" { "cart" : 7.0e0, "customer" : "\u0061da", "sent": "09:01" } "#,
        ] {
            assert_eq!(of(&members, same), one, "{same}");
        }
        assert_eq!(of(&["/cart", "/customer", "/cart"], r#"{"customer":"ada","cart":7}"#), one);
    }

    #[test]
    fn other_values_have_other_keys() {
        let members = ["/a", "/b"];
        let bodies = [
            r#"{"a":1,"b":2}"#, r#"{"a":2,"b":1}"#, r#"{"a":"1","b":2}"#, r#"{"a":1,"b":"2"}"#,
            r#"{"a":12,"b":""}"#, r#"{"a":"","b":12}"#, r#"{"a":"1,2","b":""}"#, r#"{"a":"1","b":",2"}"#,
            r#"{"a":null,"b":2}"#, r#"{"a":"null","b":2}"#, r#"{"a":false,"b":2}"#, r#"{"a":[],"b":2}"#,
            r#"{"a":[1],"b":2}"#, r#"{"a":{},"b":2}"#, r#"{"a":{"b":1},"b":2}"#, r#"{"a":"A","b":2}"#,
            r#"{"a":"a","b":2}"#,
        ];
        let keys: std::collections::HashSet<_> = bodies.iter().map(|body| of(&members, body)).collect();
        assert_eq!(keys.len(), bodies.len());
        // The same values in other places are another key.
        assert_ne!(of(&["/a"], r#"{"a":1}"#), of(&["/b"], r#"{"b":1}"#));
        assert_ne!(of(&["/a/0"], r#"{"a":[1]}"#), of(&["/a"], r#"{"a":[1]}"#));
    }

    #[test]
    fn what_has_no_key_says_why() {
        let members = key(&["/customer", "/cart/id"]);
        let missing = |member: &str| NaturalKeyError::Missing(JsonPointer::parse(member).unwrap());
        for (content_type, body, why) in [
            (JSON, r#"{"customer":"ada"}"#, missing("/cart/id")),
            (JSON, r#"{"cart":{"id":1}}"#, missing("/customer")),
            (JSON, r#"{"customer":"ada","cart":7}"#, missing("/cart/id")),
            (JSON, r#"[1]"#, missing("/cart/id")),
            (JSON, "", NaturalKeyError::NotJson),
            (JSON, "{", NaturalKeyError::NotJson),
            (JSON, r#"{"customer":"ada","customer":"eve","cart":{"id":1}}"#, NaturalKeyError::NotJson),
            (JSON, r#"{"customer":"ada","cart":{"id":9007199254740993}}"#, NaturalKeyError::NotJson),
            (b"text/plain", r#"{"customer":"ada","cart":{"id":1}}"#, NaturalKeyError::NotJson),
            (b"", r#"{"customer":"ada","cart":{"id":1}}"#, NaturalKeyError::NotJson),
            (
                b"application/json; charset=latin1",
                r#"{"customer":"ada","cart":{"id":1}}"#,
                NaturalKeyError::NotJson,
            ),
        ] {
            assert_eq!(members.of(content_type, body.as_bytes()), Err(why), "{body}");
        }
        assert!(members.of(b"application/vnd.shop+json", br#"{"customer":"ada","cart":{"id":1}}"#).is_ok());
    }

    #[test]
    fn a_key_has_from_one_member_to_the_limit() {
        let members =
            |count: usize| (0..count).map(|n| JsonPointer::parse(&format!("/{n}")).unwrap()).collect();
        assert!(NaturalKey::new(members(0)).is_none());
        assert!(NaturalKey::new(members(limits::MAX_KEY_MEMBERS)).is_some());
        assert!(NaturalKey::new(members(limits::MAX_KEY_MEMBERS + 1)).is_none());
    }

    #[test]
    fn a_key_is_short_whatever_its_members_are() {
        let body = format!(r#"{{"a":"{}"}}"#, "x".repeat(100_000));
        assert_eq!(of(&["/a"], &body).len(), 69);
    }
}
