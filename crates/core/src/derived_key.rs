//! Keys that are derived from the business identity of an intent.

use sha2::{Digest, Sha256};

use crate::id::{IdempotencyKey, part};

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
}
