//! Keys that are made of what an intent is about.

use sha2::{Digest, Sha256};

use crate::id::IdempotencyKey;

impl IdempotencyKey {
    /// Derives the key of a business identity: the same name and parts give the same key in every process, on every machine
    /// and in every release.
    ///
    /// `IdempotencyKey::derived("order", ["order-123", "v2"])` is the key of the second version of order 123. A corrected
    /// request is another intent, and must differ in a part: under the same key it would be refused.
    ///
    /// The parts are never joined into one string, so `["a-b"]` and `["a", "b"]` give different keys. The key is a UUID of
    /// version 8 in its 36 characters, which every known API accepts: the first 16 bytes of
    /// `SHA-256( lp("oncegate-intent-1") lp(name) u64(number of parts) lp(part)* )` with the version and variant bits
    /// set, where `lp(x)` is the length of `x` as a big-endian u64, then `x`. `vectors/intent_keys.json` has examples.
    #[must_use]
    pub fn derived<P: AsRef<[u8]>>(name: &str, parts: impl IntoIterator<Item = P>) -> Self {
        let mut count = 0_u64;
        let mut prefixed = Vec::new();
        for part in parts {
            count += 1;
            length_prefixed(&mut prefixed, part.as_ref());
        }
        let mut input = Vec::with_capacity(prefixed.len() + name.len() + 48);
        length_prefixed(&mut input, b"oncegate-intent-1");
        length_prefixed(&mut input, name.as_bytes());
        input.extend_from_slice(&count.to_be_bytes());
        input.extend_from_slice(&prefixed);
        let digest: [u8; 32] = Sha256::digest(&input).into();
        Self::uuid(u128::from_be_bytes(*digest.first_chunk().unwrap_or(&[0; 16])), 8)
    }

    /// The key that is a UUID (RFC 9562) in its 36 characters: these bits, with the bits of the version and of the variant
    /// set.
    #[must_use]
    pub fn uuid(bits: u128, version: u8) -> Self {
        let bits = bits & !(0xf << 76) | u128::from(version & 0xf) << 76;
        let bits = bits & !(0b11 << 62) | 0b10 << 62;
        let group = |shift: u32, digits: u32| (bits >> shift) & ((1 << (4 * digits)) - 1);
        let text = format!(
            "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
            group(96, 8),
            group(80, 4),
            group(64, 4),
            group(48, 4),
            group(0, 12)
        );
        Self::from_valid(text.as_bytes())
    }
}

fn length_prefixed(to: &mut Vec<u8>, part: &[u8]) {
    to.extend_from_slice(&(part.len() as u64).to_be_bytes());
    to.extend_from_slice(part);
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
