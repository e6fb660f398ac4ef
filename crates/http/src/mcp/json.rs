//! Chosen members of JSON objects, as the text that they have.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer as _, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The chosen members of an object, in the order of their names.
#[derive(Debug)]
pub(super) struct Members<'a, const N: usize> {
    pub(super) values: [Option<&'a RawValue>; N],
    /// True if the object has two members of one chosen name, without regard to case: programs differ in which of them counts.
    pub(super) is_repeated: bool,
}

impl<const N: usize> Default for Members<'_, N> {
    fn default() -> Self {
        Self { values: [None; N], is_repeated: false }
    }
}

/// The text is not an object, or cannot be read to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotObject;

/// The members with these names. Names are compared without regard to case, because some services read them so.
///
/// # Errors
/// If the text is not one JSON object.
pub(super) fn members<'a, const N: usize>(
    text: &'a str,
    names: [&str; N],
) -> Result<Members<'a, N>, NotObject> {
    pick(text, Picker { names, ignores_case: true })
}

/// The members with exactly these names.
///
/// # Errors
/// If the text is not one JSON object.
pub(super) fn exact_members<'a, const N: usize>(
    text: &'a str,
    names: [&str; N],
) -> Result<Members<'a, N>, NotObject> {
    pick(text, Picker { names, ignores_case: false })
}

fn pick<'a, const N: usize>(text: &'a str, picker: Picker<'_, N>) -> Result<Members<'a, N>, NotObject> {
    let mut json = serde_json::Deserializer::from_str(text);
    let picked = json.deserialize_map(picker).map_err(|_| NotObject)?;
    json.end().map_err(|_| NotObject)?;
    Ok(picked)
}

/// The text of a JSON string; `None` if the value is not a string.
pub(super) fn string(value: &RawValue) -> Option<Cow<'_, str>> {
    match serde_json::from_str::<&str>(value.get()) {
        Ok(plain) => Some(Cow::Borrowed(plain)),
        Err(_) => serde_json::from_str(value.get()).ok().map(Cow::Owned),
    }
}

/// The position of a value within the text that it was read from.
pub(super) fn position(text: &str, value: &RawValue) -> Option<usize> {
    let at = (value.get().as_ptr() as usize).checked_sub(text.as_ptr() as usize)?;
    (at <= text.len()).then_some(at)
}

struct Picker<'n, const N: usize> {
    names: [&'n str; N],
    ignores_case: bool,
}

impl<'de, const N: usize> Visitor<'de> for Picker<'_, N> {
    type Value = Members<'de, N>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = Members::default();
        let mut are_seen = [false; N];
        while let Some(name) = map.next_key::<Cow<'_, str>>()? {
            let found = self.names.iter().position(|own| own.eq_ignore_ascii_case(&name));
            if let Some(is_seen) = found.and_then(|at| are_seen.get_mut(at)) {
                members.is_repeated |= std::mem::replace(is_seen, true);
            }
            let counts =
                |at: &usize| self.ignores_case || self.names.get(*at).is_some_and(|own| *own == name);
            match found.filter(counts).and_then(|at| members.values.get_mut(at)) {
                Some(place) => *place = Some(map.next_value()?),
                None => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(members)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chosen_members_are_found() {
        let text = r#" {"x":[1,{"id":2}],"\u0069d":"a\"b","Method": 1.50 } "#;
        let Members { values: [id, method, none], is_repeated } =
            members(text, ["id", "method", "none"]).unwrap();
        assert_eq!(string(id.unwrap()).as_deref(), Some("a\"b"));
        assert_eq!(method.unwrap().get(), "1.50");
        assert_eq!(string(method.unwrap()), None);
        assert!(none.is_none() && !is_repeated);
        let at = position(text, method.unwrap()).unwrap();
        assert!(text[at..].starts_with("1.50"));
        assert!(members(r#"{"a":1,"A":2}"#, ["a"]).unwrap().is_repeated);
        assert!(!members(r#"{"b":1,"b":2}"#, ["a"]).unwrap().is_repeated);
        let exact = |text| {
            let Members { values: [value], is_repeated } = exact_members(text, ["a"]).unwrap();
            (value.map(RawValue::get), is_repeated)
        };
        assert_eq!(exact(r#"{"A":1}"#), (None, false));
        assert_eq!(exact(r#"{"A":1,"a":2,"b":3}"#), (Some("2"), true));
        assert_eq!(exact(r#"{"a":1,"A":2}"#), (Some("1"), true));
        assert_eq!(exact(r#"{"a":1,"a":2}"#), (Some("2"), true));
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["", "[]", "7", "\"a\"", "null", "{", "{}x", "{\"a\":NaN}", "{\"a\":1,}", "\u{feff}{}"] {
            assert_eq!(members(text, ["a"]).err(), Some(NotObject), "{text}");
        }
        // Depth costs no stack.
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(200_000), "]".repeat(200_000));
        assert!(members(&deep, ["b"]).is_ok());
    }
}
