//! Keys that are derived from the business identity of an intent.

use sha2::{Digest, Sha256};

use crate::fingerprint::canonical_json;
use crate::id::{IdempotencyKey, KeyError, part};

impl IdempotencyKey {
    /// Derives the key of a business identity: the same name and parts give the same key in every process, on every machine
    /// and in every release.
    ///
    /// `IdempotencyKey::derived("order", ["order-123", "v2"])` is the key of the second version of order 123. A corrected
    /// request is another intent and must differ in a part. Under the same key it would be refused.
    ///
    /// The parts are never joined into one string, so `["a-b"]` and `["a", "b"]` give different keys. The key is a UUID of
    /// version 8 (36 characters), which every known API accepts: the first 16 bytes of
    /// `SHA-256( lp("oncegate-intent-1") lp(name) u64(number of parts) lp(part)* )` with the version and variant bits
    /// set, where `lp(x)` is the length of `x` as a big-endian u64, then `x`. `vectors/intent_keys.json` has examples.
    #[must_use]
    pub fn derived<P: AsRef<[u8]>>(name: &str, parts: impl IntoIterator<Item = P>) -> Self {
        let parts: Vec<P> = parts.into_iter().collect();
        let mut hash = Sha256::new();
        part(&mut hash, b"oncegate-intent-1");
        part(&mut hash, name.as_bytes());
        hash.update((parts.len() as u64).to_be_bytes());
        parts.iter().for_each(|bytes| part(&mut hash, bytes.as_ref()));
        Self::from_valid(uuid_of_digest(hash).as_bytes())
    }

    /// Derives the key of an agent's call of a tool: the same server, tool, arguments and run give the same key. A model that
    /// makes the same call again, because it did not see the result, has the key of the first call.
    ///
    /// `arguments` are JSON and are compared by value: the order of members, white space and the spelling of numbers do not
    /// count. Empty text and `null` are `{}`. `run` names one run of the agent, such as one task of its user: the same call in
    /// another run is another intent, and two equal calls in one run are one.
    ///
    /// The key is that of [`derived`](Self::derived) with the name `tool-call` and the parts server, tool, canonical form of the
    /// arguments ([RFC 8785](https://www.rfc-editor.org/rfc/rfc8785)), run. A number with more than 15 digits, or beyond the range of
    /// doubles, stays as it is spelt.
    ///
    /// ```
    /// use oncegate_core::IdempotencyKey;
    ///
    /// let call = |arguments: &str| IdempotencyKey::for_tool_call("shop", "place_order", arguments, "run-7");
    /// assert_eq!(call(r#"{"item": "tea", "count": 2.0}"#)?, call(r#"{"count":2,"item":"tea"}"#)?);
    /// assert_ne!(call(r#"{"item": "tea", "count": 2}"#)?, call(r#"{"item": "tea", "count": 3}"#)?);
    /// # Ok::<(), oncegate_core::KeyError>(())
    /// ```
    ///
    /// # Errors
    /// [`KeyError::EmptyValue`] if server, tool or run is empty, and [`KeyError::NotJson`] if the arguments are not JSON that all
    /// programs read alike: they repeat a member, have half of a surrogate pair, or are nested more than 128 deep.
    pub fn for_tool_call(server: &str, tool: &str, arguments: &str, run: &str) -> Result<Self, KeyError> {
        if [server, tool, run].contains(&"") {
            return Err(KeyError::EmptyValue);
        }
        let arguments = match arguments.trim_ascii() {
            "" | "null" => b"{}".to_vec(),
            text => canonical_json(text.as_bytes()).ok_or(KeyError::NotJson)?,
        };
        Ok(Self::derived("tool-call", [server.as_bytes(), tool.as_bytes(), &arguments, run.as_bytes()]))
    }

    /// The key that is a UUID (RFC 9562, 36 characters) of these bits, with the bits of the version and the variant set.
    #[must_use]
    pub fn uuid(bits: u128, version: u8) -> Self {
        Self::from_valid(uuid(bits, version).as_bytes())
    }
}

/// The UUID of version 8 that starts with the first 16 bytes of a hash.
pub(crate) fn uuid_of_digest(hash: Sha256) -> String {
    let digest: [u8; 32] = hash.finalize().into();
    uuid(u128::from_be_bytes(*digest.first_chunk().unwrap_or(&[0; 16])), 8)
}

fn uuid(bits: u128, version: u8) -> String {
    let bits = bits & !(0xf << 76) | u128::from(version & 0xf) << 76;
    let bits = bits & !(0b11 << 62) | 0b10 << 62;
    let mut text = format!("{bits:032x}");
    for at in [20, 16, 12, 8] {
        text.insert(at, '-');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derived_keys_equal_the_published_vectors() {
        let vectors: serde_json::Value =
            serde_json::from_str(include_str!("../vectors/intent_keys.json")).unwrap();
        let mut seen = std::collections::HashSet::new();
        for case in vectors["cases"].as_array().unwrap() {
            let parts = case["parts"].as_array().unwrap().iter().map(|part| part.as_str().unwrap());
            let key = IdempotencyKey::derived(case["name"].as_str().unwrap(), parts);
            assert_eq!(key.as_bytes(), case["key"].as_str().unwrap().as_bytes(), "{case}");
            assert!(seen.insert(key), "{case}");
        }
        assert!(seen.len() >= 8);
    }

    #[test]
    fn a_call_of_a_tool_has_the_key_of_its_intent() {
        let key = |server, tool, arguments, run| IdempotencyKey::for_tool_call(server, tool, arguments, run);
        let first = key("shop", "order", r#"{"a":{"x":1,"y":"é"},"b":[1.50]}"#, "run").unwrap();
        let same = r#" { "b" : [1.5], "a" : { "y" : "\u00e9", "x" : 1e0 } } "#;
        assert_eq!(key("shop", "order", same, "run"), Ok(first.clone()));
        let parts: [&str; 4] = ["shop", "order", r#"{"a":{"x":1,"y":"é"},"b":[1.5]}"#, "run"];
        assert_eq!(first, IdempotencyKey::derived("tool-call", parts));
        for (server, tool, arguments, run) in [
            ("shop2", "order", parts[2], "run"),
            ("shop", "orders", parts[2], "run"),
            ("shop", "order", parts[2], "run2"),
            ("shop", "order", r#"{"a":{"x":1,"y":"é"},"b":[1.5],"c":null}"#, "run"),
            ("shop", "order", "", "run"),
        ] {
            assert_ne!(
                key(server, tool, arguments, run),
                Ok(first.clone()),
                "{server} {tool} {arguments} {run}"
            );
        }
        assert_eq!(key("shop", "order", "", "run"), key("shop", "order", "{}", "run"));
        assert_eq!(key("shop", "order", " null ", "run"), key("shop", "order", "{ }", "run"));
        for (server, tool, run) in [("", "t", "r"), ("s", "", "r"), ("s", "t", "")] {
            assert_eq!(key(server, tool, "{}", run), Err(KeyError::EmptyValue));
        }
        for (one, other) in [
            ("0.30000000000000004", "0.3"),
            ("9007199254740993", "9007199254740992"),
            ("47.224524357611664", "47.22452435761166"),
            ("-1e400", "-1e401"),
        ] {
            let of = |number: &str| {
                let arguments = format!("{{\"a\": {number}, \"b\":[{number}]}}");
                IdempotencyKey::for_tool_call("s", "t", &arguments, "r")
            };
            assert!(of(one).is_ok() && of(one) != of(other), "{one}");
        }
        for arguments in ["{", "{\"a\":1,\"a\":1}", "{\"a\":01}", "{\"a\":1.}", "{\"a\":1e}", "NaN", "{} {}"]
        {
            assert_eq!(key("s", "t", arguments, "r"), Err(KeyError::NotJson), "{arguments}");
        }
    }
}
