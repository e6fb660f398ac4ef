//! New keys for intents, and the header that carries a key.

use http::header::{HeaderName, HeaderValue};
use oncegate_core::{Clock as _, IdempotencyKey, SystemClock, Timestamp};

use crate::intent::IntentError;

/// Creates a new key: a UUID of version 7 (RFC 9562), which holds the time in milliseconds and 74 random bits.
///
/// Each call returns another key. To keep the key of an intent over a restart, keep the intent, or use
/// [`IdempotencyKey::derived`].
///
/// # Errors
/// [`IntentError::NoRandomness`].
pub fn uuid_v7_key() -> Result<IdempotencyKey, IntentError> {
    Ok(uuid_v7_of(now().as_millis(), random_bits()?))
}

/// Creates a new key: a ULID, which holds the time in milliseconds and 80 random bits in 26 characters.
///
/// # Errors
/// [`IntentError::NoRandomness`].
pub fn ulid_key() -> Result<IdempotencyKey, IntentError> {
    Ok(IdempotencyKey::new(ulid_of(now().as_millis(), random_bits()?))?)
}

fn uuid_v7_of(millis: u64, random: u128) -> IdempotencyKey {
    IdempotencyKey::uuid(time_and_random(millis, random), 7)
}

fn ulid_of(millis: u64, random: u128) -> String {
    const DIGITS: [char; 32] = [
        '0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'A', 'B', 'C', 'D', 'E', 'F', 'G', 'H', 'J', 'K',
        'M', 'N', 'P', 'Q', 'R', 'S', 'T', 'V', 'W', 'X', 'Y', 'Z',
    ];
    let bits = time_and_random(millis, random);
    let digits = (0..26).rev().map(|at| (bits >> (5 * at)) as usize & 31);
    digits.filter_map(|digit| DIGITS.get(digit)).collect()
}

fn time_and_random(millis: u64, random: u128) -> u128 {
    u128::from(millis & 0xffff_ffff_ffff) << 80 | random & ((1 << 80) - 1)
}

/// The header that carries the key, and how the key is written there.
///
/// The default is `Idempotency-Key` without quotes: Stripe, Adyen and nearly every other API take the value as it is, and
/// some of them take quotes as a part of the key. Oncegate reads both forms as the same key.
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
    /// A header of another name, such as `PayPal-Request-Id`, without quotes.
    #[must_use]
    pub const fn named(name: HeaderName) -> Self {
        Self { name, quoted: false }
    }

    /// Writes the key in quotes: a string of RFC 9651, as draft-ietf-httpapi-idempotency-key-header-07 demands.
    #[must_use]
    pub fn quoted(self) -> Self {
        Self { quoted: true, ..self }
    }

    /// The name of the header.
    #[must_use]
    pub const fn name(&self) -> &HeaderName {
        &self.name
    }

    /// `true` if the key is written in quotes.
    #[must_use]
    pub const fn is_quoted(&self) -> bool {
        self.quoted
    }

    /// The value of the header. It is marked as sensitive, so that no `Debug` output of headers shows it.
    pub(crate) fn value(&self, key: &IdempotencyKey) -> Result<HeaderValue, IntentError> {
        let text = check_key(key)?;
        let quoted;
        let text = if self.quoted {
            quoted = format!("\"{}\"", text.replace('\\', "\\\\"));
            &quoted
        } else {
            text
        };
        let mut value = HeaderValue::from_str(text).map_err(|_| IntentError::KeyCharacter)?;
        value.set_sensitive(true);
        Ok(value)
    }
}

/// Refuses a key that not every header syntax can carry: all characters must be visible ASCII, without quote and comma.
pub(crate) fn check_key(key: &IdempotencyKey) -> Result<&str, IntentError> {
    let is_portable = |byte: &u8| matches!(byte, b'!' | b'#'..=b'+' | b'-'..=b'~');
    let text = key.as_str().filter(|text| text.as_bytes().iter().all(is_portable));
    text.ok_or(IntentError::KeyCharacter)
}

/// The time of day.
pub(crate) fn now() -> Timestamp {
    SystemClock::new().now()
}

pub(crate) fn random_bits() -> Result<u128, IntentError> {
    let mut bits = [0; 16];
    getrandom::fill(&mut bits).map_err(|_| IntentError::NoRandomness)?;
    Ok(u128::from_be_bytes(bits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_intent_takes_only_keys_that_every_header_syntax_can_carry() {
        for byte in 0..=255_u8 {
            let key = IdempotencyKey::new([byte]).unwrap();
            let portable = (0x21..=0x7e).contains(&byte) && byte != b'"' && byte != b',';
            assert_eq!(check_key(&key).is_ok(), portable, "{byte:#x}");
            assert_eq!(Carrier::default().value(&key).is_ok(), portable, "{byte:#x}");
        }
    }

    #[test]
    fn new_keys_are_unique_and_hold_the_time() {
        let made: std::collections::HashSet<_> = (0..1000).map(|_| uuid_v7_key().unwrap()).collect();
        assert_eq!(made.len(), 1000);
        let made: std::collections::HashSet<_> = (0..1000).map(|_| ulid_key().unwrap()).collect();
        assert_eq!(made.len(), 1000);
        // RFC 9562, A.6: 2022-02-22T19:22:22Z, rand_a 0xcc3, rand_b 0x18c4dc0c0c07398f.
        let random = 0x0cc3 << 64 | 0x18c4_dc0c_0c07_398f;
        assert_eq!(
            uuid_v7_of(0x017f_22e2_79b0, random).as_str(),
            Some("017f22e2-79b0-7cc3-98c4-dc0c0c07398f")
        );
        // The example of the ULID specification has the time 1469918176385.
        assert!(ulid_of(1_469_918_176_385, 0).starts_with("01ARYZ6S41"));
        assert_eq!(ulid_of(0xffff_ffff_ffff, u128::MAX), "7ZZZZZZZZZZZZZZZZZZZZZZZZZ");
    }

    #[test]
    fn no_debug_output_shows_a_key() {
        let key = IdempotencyKey::new("customer-4711").unwrap();
        let value = Carrier::default().value(&key).unwrap();
        assert!(!format!("{key:?} {value:?}").contains("4711"));
    }

    #[test]
    fn a_carrier_writes_the_key_bare_or_as_a_string() {
        let key = IdempotencyKey::new(r"a\b'c").unwrap();
        assert_eq!(Carrier::default().value(&key).unwrap(), r"a\b'c");
        assert_eq!(Carrier::default().quoted().value(&key).unwrap(), r#""a\\b'c""#);
        let paypal = Carrier::named(HeaderName::from_static("paypal-request-id"));
        assert_eq!(paypal.name(), "paypal-request-id");
    }
}
