//! Keys: one per intent, made once.

use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use http::header::{HeaderName, HeaderValue};
use oncegate_core::{IdempotencyKey, KeyError as CoreKeyError, limits};
use sha2::{Digest, Sha256};

/// The key of one intent: 1 to 255 visible ASCII characters without quote and comma, which every carrier can spell.
///
/// `Debug` does not show it, because people put customer data in keys; there is no `Display`. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Key(Arc<str>);

/// Why there is no [`Key`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyError {
    /// There was no character.
    Empty,
    /// There were more than [`limits::MAX_KEY_BYTES`] characters.
    TooLong {
        /// How many octets there were.
        bytes: usize,
    },
    /// A character that is not visible ASCII, or a quote or a comma.
    Character,
    /// The system has no random bits. A key without them could be somebody else's.
    NoRandomness,
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("the key is empty; take 1 to 255 characters"),
            Self::TooLong { bytes } => {
                write!(f, "the key has {bytes} octets; at most {} are allowed", limits::MAX_KEY_BYTES)
            }
            Self::Character => {
                f.write_str("the key has a character that is not visible ASCII, or a quote or a comma")
            }
            Self::NoRandomness => f.write_str("the system has no random bits to make a key of"),
        }
    }
}

impl std::error::Error for KeyError {}

impl Key {
    /// A key that was made elsewhere, such as one that a browser or a row of a database brought along.
    ///
    /// # Errors
    /// [`KeyError`] where it is empty, too long, or has a character that no bare key has.
    pub fn new(text: &str) -> Result<Self, KeyError> {
        match IdempotencyKey::new(text.as_bytes()) {
            Ok(_) => {}
            Err(CoreKeyError::TooLong { bytes }) => return Err(KeyError::TooLong { bytes }),
            Err(_) => return Err(KeyError::Empty),
        }
        if !text.bytes().all(|octet| matches!(octet, b'!' | b'#'..=b'+' | b'-'..=b'~')) {
            return Err(KeyError::Character);
        }
        Ok(Self(text.into()))
    }

    /// A new key: a UUID of version 7 (RFC 9562), the time in milliseconds and 74 random bits.
    ///
    /// It is another one with each call. Where an intent has to keep its key over a restart, keep the intent, or derive
    /// the key from what the intent is about.
    ///
    /// # Errors
    /// [`KeyError::NoRandomness`].
    pub fn uuid_v7() -> Result<Self, KeyError> {
        Ok(Self::uuid_v7_of(millis_now(), random_bits()?))
    }

    /// A new key: a ULID, the time in milliseconds and 80 random bits in 26 characters.
    ///
    /// # Errors
    /// [`KeyError::NoRandomness`].
    pub fn ulid() -> Result<Self, KeyError> {
        Ok(Self::ulid_of(millis_now(), random_bits()?))
    }

    /// The key that belongs to a business identity: the same name and parts give the same key, in every process, on every
    /// machine and in every release. `Key::derived("order", ["order-123", "v2"])` is the key of the second version of
    /// order 123, whoever asks for it and whenever.
    ///
    /// A corrected request is another intent and has to differ in a part: under the same key it would be refused.
    ///
    /// The parts are never joined into a string, so `["a-b"]` and `["a", "b"]` differ. The key is a UUID of version 8,
    /// which every known API takes: the first 16 octets of
    /// `SHA-256( lp("oncegate-intent-1") lp(name) u64(number of parts) lp(part)* )` with the version and variant bits
    /// set, and `lp(x) = u64 big-endian length, then x`. `vectors/intent_keys.json` has examples.
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
        Self(uuid(u128::from_be_bytes(*digest.first_chunk().unwrap_or(&[0; 16])), 8))
    }

    /// The key as it goes into a field, without quotes.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn uuid_v7_of(millis: u64, random: u128) -> Self {
        let bits = u128::from(millis & 0xffff_ffff_ffff) << 80 | random & ((1 << 80) - 1);
        Self(uuid(bits, 7))
    }

    fn ulid_of(millis: u64, random: u128) -> Self {
        const DIGITS: [char; 32] = [
            '0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'A', 'B', 'C', 'D', 'E', 'F', 'G', 'H', 'J',
            'K', 'M', 'N', 'P', 'Q', 'R', 'S', 'T', 'V', 'W', 'X', 'Y', 'Z',
        ];
        let bits = u128::from(millis & 0xffff_ffff_ffff) << 80 | random & ((1 << 80) - 1);
        let digits = (0..26).rev().map(|at| (bits >> (5 * at)) as usize & 31);
        let text: String = digits.filter_map(|digit| DIGITS.get(digit)).collect();
        Self(text.into())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({} octets)", self.0.len())
    }
}

/// The field that carries the key, and how it is spelled there.
///
/// The default is `Idempotency-Key`, bare: Stripe, Adyen and nearly every other API take the key as it is, some of them
/// with the quotes as part of it; Oncegate takes both for one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carrier {
    name: HeaderName,
    quoted: bool,
}

impl Default for Carrier {
    fn default() -> Self {
        Self::named(HeaderName::from_static("idempotency-key"))
    }
}

impl Carrier {
    /// A field of another name, such as `PayPal-Request-Id`, bare.
    #[must_use]
    pub const fn named(name: HeaderName) -> Self {
        Self { name, quoted: false }
    }

    /// As a string of RFC 9651, as draft-ietf-httpapi-idempotency-key-header-07 demands.
    #[must_use]
    pub fn quoted(self) -> Self {
        Self { quoted: true, ..self }
    }

    /// The name of the field.
    #[must_use]
    pub const fn name(&self) -> &HeaderName {
        &self.name
    }

    /// Whether the key stands there in quotes.
    #[must_use]
    pub const fn is_quoted(&self) -> bool {
        self.quoted
    }

    /// The value of the field. It is marked as sensitive, so that no `Debug` output of headers shows it.
    pub(crate) fn value(&self, key: &Key) -> Option<HeaderValue> {
        let quoted;
        let text = if self.quoted {
            quoted = format!("\"{}\"", key.as_str().replace('\\', "\\\\"));
            &quoted
        } else {
            key.as_str()
        };
        let mut value = HeaderValue::from_str(text).ok()?; // no key has an octet that it refuses
        value.set_sensitive(true);
        Some(value)
    }
}

pub(crate) fn millis_now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) fn random_bits() -> Result<u128, KeyError> {
    let mut bits = [0; 16];
    getrandom::fill(&mut bits).map_err(|_| KeyError::NoRandomness)?;
    Ok(u128::from_be_bytes(bits))
}

fn length_prefixed(to: &mut Vec<u8>, part: &[u8]) {
    to.extend_from_slice(&(part.len() as u64).to_be_bytes());
    to.extend_from_slice(part);
}

/// The bits as a UUID of this version, in its 36 characters.
fn uuid(bits: u128, version: u128) -> Arc<str> {
    let bits = bits & !(0xf << 76) | version << 76;
    let bits = bits & !(0b11 << 62) | 0b10 << 62; // the variant of RFC 9562
    let group = |shift: u32, digits: u32| (bits >> shift) & ((1 << (4 * digits)) - 1);
    format!(
        "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        group(96, 8),
        group(80, 4),
        group(64, 4),
        group(48, 4),
        group(0, 12)
    )
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_1_to_255_visible_characters() {
        assert_eq!(Key::new("").unwrap_err(), KeyError::Empty);
        assert!(Key::new(&"k".repeat(limits::MAX_KEY_BYTES)).is_ok());
        assert_eq!(
            Key::new(&"k".repeat(limits::MAX_KEY_BYTES + 1)).unwrap_err(),
            KeyError::TooLong { bytes: 256 }
        );
        for octet in 0..=255_u8 {
            let text = char::from(octet).to_string();
            let bare = (0x21..=0x7e).contains(&octet) && octet != b'"' && octet != b',';
            assert_eq!(Key::new(&text).is_ok(), bare, "{octet:#x}");
        }
    }

    #[test]
    fn no_two_new_keys_are_equal_and_they_say_when_they_were_made() {
        let made: std::collections::HashSet<_> = (0..1000).map(|_| Key::uuid_v7().unwrap()).collect();
        assert_eq!(made.len(), 1000);
        let made: std::collections::HashSet<_> = (0..1000).map(|_| Key::ulid().unwrap()).collect();
        assert_eq!(made.len(), 1000);
        // RFC 9562, A.6: 2022-02-22T19:22:22Z, rand_a 0xcc3, rand_b 0x18c4dc0c0c07398f.
        let random = 0x0cc3 << 64 | 0x18c4_dc0c_0c07_398f;
        assert_eq!(
            Key::uuid_v7_of(0x017f_22e2_79b0, random).as_str(),
            "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"
        );
        // The example of the ULID specification has the time 1469918176385.
        assert!(Key::ulid_of(1_469_918_176_385, 0).as_str().starts_with("01ARYZ6S41"));
        assert_eq!(Key::ulid_of(0xffff_ffff_ffff, u128::MAX).as_str(), "7ZZZZZZZZZZZZZZZZZZZZZZZZZ");
    }

    #[test]
    fn derived_keys_are_those_of_the_published_vectors() {
        let vectors: serde_json::Value =
            serde_json::from_str(include_str!("../vectors/intent_keys.json")).unwrap();
        let mut seen = std::collections::HashSet::new();
        for case in vectors["cases"].as_array().unwrap() {
            let parts = case["parts"].as_array().unwrap().iter().map(|part| part.as_str().unwrap());
            let key = Key::derived(case["name"].as_str().unwrap(), parts);
            assert_eq!(key.as_str(), case["key"].as_str().unwrap(), "{case}");
            assert!(seen.insert(key), "{case}");
        }
        assert!(seen.len() >= 8);
    }

    #[test]
    fn no_debug_output_shows_a_key() {
        let key = Key::new("customer-4711").unwrap();
        let value = Carrier::default().value(&key).unwrap();
        assert!(!format!("{key:?} {value:?}").contains("4711"));
    }

    #[test]
    fn a_carrier_spells_the_key_bare_or_as_a_string() {
        let key = Key::new(r"a\b'c").unwrap();
        assert_eq!(Carrier::default().value(&key).unwrap(), r"a\b'c");
        assert_eq!(Carrier::default().quoted().value(&key).unwrap(), r#""a\\b'c""#);
        let paypal = Carrier::named(HeaderName::from_static("paypal-request-id"));
        assert_eq!(paypal.name(), "paypal-request-id");
    }
}
