//! Header fields in which a request names another method or path than its request line.

use http::HeaderMap;

use crate::credential::hyphenated;

/// The fields that frameworks and servers obey. Method: Rails, Laravel, Symfony, Spring and Express with their middleware.
/// Path: IIS, Zend and old versions of Symfony, and the proxies in front of them.
const OVERRIDES: [&str; 7] = [
    "x-http-method-override", "x-http-method", "x-method-override", "x-original-method", "x-original-url",
    "x-original-uri", "x-rewrite-url",
];

/// Returns true if a field of this name, in lower case, names another method or path. `_` counts as `-`, because many
/// services treat them alike.
pub(crate) fn is_override(name: &str) -> bool {
    // Fast path: most names are shorter than all of these.
    name.len() >= "x-http-method".len() && name.starts_with('x') && OVERRIDES.contains(&&*hyphenated(name))
}

/// The override fields of a request, with their values.
pub(crate) fn overrides(headers: &HeaderMap) -> impl Iterator<Item = (&str, &[u8])> {
    let fields = headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes()));
    fields.filter(|(name, _)| is_override(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overrides_are_known_in_either_spelling() {
        for name in OVERRIDES {
            assert!(is_override(name) && is_override(&name.replace('-', "_")), "{name}");
        }
        for name in ["x-http-methods", "http-method", "x-forwarded-method", "x-original-forwarded-for", "x"] {
            assert!(!is_override(name), "{name}");
        }
    }
}
