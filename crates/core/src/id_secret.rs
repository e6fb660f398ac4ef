//! The secret that keys the identities of records.

use std::fmt;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac as _};
use sha2::Sha256;
use zeroize::{Zeroize as _, Zeroizing};

use crate::fingerprint::Fingerprint;
use crate::id::{AttemptId, CallerTag, IdempotencyKey, KeyTag, RecordId, Scope, hex_to_array, write_hex};
use crate::record::Label;

/// The length of a secret in bytes.
const SECRET_BYTES: usize = 32;

/// The beginning of a secret as text. Scanners that look for secrets in files and repositories can search for it.
const PREFIX: &str = "ogids1_";

// The beginnings of what is authenticated. What follows has one length for each, so no two inputs are equal.
const NAME: &[u8] = b"oncegate-id-1 name";
const RECORD: &[u8] = b"oncegate-id-1 record";
const CALLER: &[u8] = b"oncegate-id-1 caller";
const KEY: &[u8] = b"oncegate-id-1 key";
const COMPARE: &[u8] = b"oncegate-id-1 compare";
const ATTEMPT: &[u8] = b"oncegate-id-1 attempt";
const CHECK: &[u8] = b"oncegate-id-1 check";

/// The public name of an [`IdSecret`]: derived from it, and of no use for computing an identity.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IdSecretName([u8; 8]);

impl IdSecretName {
    /// Reads the 16 hexadecimal digits that `Display` writes.
    #[must_use]
    pub fn from_hex(text: &str) -> Option<Self> {
        hex_to_array(text).map(Self)
    }
}

impl fmt::Display for IdSecretName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(f, &self.0)
    }
}

impl fmt::Debug for IdSecretName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The reason why a text is not an [`IdSecret`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdSecretError {
    /// It does not have the form of a secret.
    #[error(
        "an id secret has the form {PREFIX}, the 16 hexadecimal digits of its name, _ and 64 hexadecimal digits"
    )]
    Form,
    /// Its digits do not belong to its name.
    #[error(
        "the digits of the id secret do not fit its name: it was cut, changed or put together of two secrets"
    )]
    Mismatch,
}

/// A secret of 32 random bytes that keys the identities of all records of a store, so that a reader of the store who guesses a
/// key, a caller or a request cannot confirm the guess.
///
/// A store belongs to one secret for its whole life ([`IdGuard`](crate::IdGuard)): under another secret every key is new. So a
/// secret cannot be rotated, and a store whose secret is lost is of no use. Keep a copy in a safe place.
///
/// `Debug` shows only the name. Cheap to clone; the memory is overwritten when the last clone is dropped.
#[derive(Clone)]
pub struct IdSecret(Arc<Inner>);

struct Inner {
    name: IdSecretName,
    bytes: Zeroizing<[u8; SECRET_BYTES]>,
    /// HMAC-SHA-256 with the key in it.
    mac: Hmac<Sha256>,
}

impl IdSecret {
    /// A secret of these bytes, which must be random.
    #[must_use]
    pub fn from_bytes(mut bytes: [u8; SECRET_BYTES]) -> Self {
        // A key of HMAC is padded with zeros to the length of a block.
        let mut padded = Zeroizing::new([0; 64]);
        if let Some(start) = padded.first_chunk_mut::<SECRET_BYTES>() {
            *start = bytes;
        }
        let mac = <Hmac<Sha256> as KeyInit>::new((&*padded).into());
        let name = IdSecretName(first(digest(&mac, NAME, &[])));
        let inner = Inner { name, bytes: Zeroizing::new(bytes), mac };
        bytes.zeroize();
        Self(Arc::new(inner))
    }

    /// Reads a secret from its text: `ogids1_`, its name, `_` and its digits. The name guards against slips: with one wrong
    /// digit, every key would be new.
    ///
    /// # Errors
    /// [`IdSecretError`] if it is none. The error does not contain the text.
    pub fn parse(text: &str) -> Result<Self, IdSecretError> {
        let rest = text.strip_prefix(PREFIX).and_then(|rest| rest.split_once('_'));
        let (name, digits) = rest.ok_or(IdSecretError::Form)?;
        let name = IdSecretName::from_hex(name).ok_or(IdSecretError::Form)?;
        let bytes = Zeroizing::new(hex_to_array(digits).ok_or(IdSecretError::Form)?);
        let secret = Self::from_bytes(*bytes);
        if secret.name() == name { Ok(secret) } else { Err(IdSecretError::Mismatch) }
    }

    /// The text of the secret, which is secret.
    #[must_use]
    pub fn to_secret_text(&self) -> Zeroizing<String> {
        use fmt::Write as _;
        let mut text = Zeroizing::new(String::with_capacity(PREFIX.len() + 16 + 1 + 2 * SECRET_BYTES));
        // Writing to a string cannot fail.
        let _ = write!(text, "{PREFIX}{}_", self.name());
        for byte in *self.0.bytes {
            let _ = write!(text, "{byte:02x}");
        }
        text
    }

    /// The public name of the secret.
    #[must_use]
    pub fn name(&self) -> IdSecretName {
        self.0.name
    }

    fn digest(&self, label: &[u8], input: &[&[u8]]) -> [u8; 32] {
        digest(&self.0.mac, label, input)
    }

    /// The attempt that claims the record that marks a store.
    pub(crate) fn mark_attempt(&self) -> AttemptId {
        AttemptId::new(u128::from_be_bytes(first(self.digest(ATTEMPT, &[]))))
    }

    /// The fingerprint of the record that marks a store.
    pub(crate) fn mark_fingerprint(&self) -> Fingerprint {
        Fingerprint::of_digest(self.digest(CHECK, &[]))
    }
}

impl PartialEq for IdSecret {
    /// Compares the names: two secrets with one name do not occur by chance.
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for IdSecret {}

impl fmt::Debug for IdSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IdSecret({})", self.name())
    }
}

fn digest(mac: &Hmac<Sha256>, label: &[u8], input: &[&[u8]]) -> [u8; 32] {
    let mut mac = mac.clone();
    mac.update(label);
    input.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().into()
}

/// The beginning of a digest.
fn first<const N: usize>(digest: [u8; 32]) -> [u8; N] {
    *digest.first_chunk().unwrap_or(&[0; N])
}

/// The computation of the identities of records: what a store holds instead of keys, callers and requests.
///
/// All entry points compute them here. Without a secret these are plain hashes, as [`RecordId`], [`CallerTag`], [`KeyTag`] and
/// [`Fingerprint`] define them. With a secret, each is `HMAC-SHA-256(secret, label || plain)`. `label` is ASCII without a length:
///
/// | identity | label | plain |
/// |---|---|---|
/// | record | `oncegate-id-1 record` | the 32 bytes of [`RecordId::derive`] |
/// | tag of a caller, the first 8 bytes | `oncegate-id-1 caller` | the caller in [`RecordId`]; zeros for a single tenant |
/// | tag of a key, the first 8 bytes | `oncegate-id-1 key` | the whole SHA-256 of [`KeyTag::of`] |
/// | fingerprint | `oncegate-id-1 compare` | the version, one byte, and the 32 bytes of the digest |
///
/// `vectors/keyed_ids.json` has examples. A secret costs one HMAC for each identity, and no allocation. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IdScheme(Option<IdSecret>);

impl IdScheme {
    /// Plain hashes.
    pub const PLAIN: Self = Self(None);

    /// Identities with this secret.
    #[must_use]
    pub const fn keyed(secret: IdSecret) -> Self {
        Self(Some(secret))
    }

    /// The secret, if there is one.
    #[must_use]
    pub const fn secret(&self) -> Option<&IdSecret> {
        self.0.as_ref()
    }

    /// The record of a key in a scope.
    #[must_use]
    pub fn record_id(&self, scope: &Scope<'_>, key: &IdempotencyKey) -> RecordId {
        self.record(RecordId::derive(scope, key))
    }

    /// The record whose plain identifier is this one.
    #[must_use]
    pub fn record(&self, plain: RecordId) -> RecordId {
        match &self.0 {
            Some(secret) => RecordId::from_bytes(secret.digest(RECORD, &[plain.as_bytes()])),
            None => plain,
        }
    }

    /// The tag of the caller of a scope.
    #[must_use]
    pub fn caller_tag(&self, scope: &Scope<'_>) -> CallerTag {
        match &self.0 {
            Some(secret) if *scope.caller_digest() != [0; 32] => {
                CallerTag::from_bytes(first(secret.digest(CALLER, &[scope.caller_digest()])))
            }
            _ => scope.caller_tag(),
        }
    }

    /// The tag of a key.
    #[must_use]
    pub fn key_tag(&self, key: &IdempotencyKey) -> KeyTag {
        match &self.0 {
            Some(secret) => KeyTag::from_bytes(first(secret.digest(KEY, &[&KeyTag::digest_of(key)]))),
            None => KeyTag::of(key),
        }
    }

    /// The label of a record: the tags, and the name of the operation for operators to read.
    #[must_use]
    pub fn label(&self, scope: &Scope<'_>, key: &IdempotencyKey, operation: &str) -> Label {
        Label::new(self.caller_tag(scope), operation).with_key(self.key_tag(key))
    }

    /// The fingerprint to store for this plain one.
    #[must_use]
    pub fn fingerprint(&self, plain: Fingerprint) -> Fingerprint {
        match &self.0 {
            Some(secret) => {
                Fingerprint::of_digest(secret.digest(COMPARE, &[&[plain.version()], plain.digest()]))
            }
            None => plain,
        }
    }
}

impl From<IdSecret> for IdScheme {
    fn from(secret: IdSecret) -> Self {
        Self::keyed(secret)
    }
}

impl From<Option<IdSecret>> for IdScheme {
    fn from(secret: Option<IdSecret>) -> Self {
        Self(secret)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_reads_back_from_its_text_and_slips_are_refused() {
        let secret = IdSecret::from_bytes([7; 32]);
        let text = secret.to_secret_text();
        assert_eq!(*IdSecret::parse(&text).unwrap().0.bytes, [7; 32]);
        for at in 0..text.len() {
            let mut slip = text.as_bytes().to_vec();
            slip[at] = if slip[at] == b'0' { b'1' } else { b'0' };
            let slip = String::from_utf8(slip).unwrap();
            assert!(IdSecret::parse(&slip).is_err(), "a slip at {at}");
            assert!(IdSecret::parse(&text[..at]).is_err(), "cut at {at}");
        }
        assert_eq!(IdSecret::parse("").unwrap_err(), IdSecretError::Form);
        assert_eq!(IdSecret::parse(&format!("{}0", *text)).unwrap_err(), IdSecretError::Form);
    }

    #[test]
    fn debug_output_shows_the_name_only() {
        let secret = IdSecret::from_bytes([0xab; 32]);
        for shown in [format!("{secret:?}"), format!("{:?}", IdScheme::keyed(secret.clone()))] {
            assert!(shown.contains(&secret.name().to_string()) && !shown.contains("abab"), "{shown}");
        }
    }

    #[test]
    fn every_identity_depends_on_the_secret_and_a_single_tenant_has_no_tag() {
        let key = IdempotencyKey::new("order-123").unwrap();
        let scope = Scope::caller("customer", "42").with_operation("payment");
        let plain = Fingerprint::of_parts("test", &[b"a"]);
        let of = |ids: &IdScheme| {
            (ids.record_id(&scope, &key), ids.caller_tag(&scope), ids.key_tag(&key), ids.fingerprint(plain))
        };
        let schemes =
            [IdScheme::PLAIN, IdSecret::from_bytes([1; 32]).into(), IdSecret::from_bytes([2; 32]).into()];
        let [none, one, two] = schemes.each_ref().map(of);
        for (a, b) in [(none, one), (none, two), (one, two)] {
            assert!(a.0 != b.0 && a.1 != b.1 && a.2 != b.2 && a.3 != b.3);
        }
        assert_eq!(none, (RecordId::derive(&scope, &key), scope.caller_tag(), KeyTag::of(&key), plain));
        assert_eq!(schemes[1].caller_tag(&Scope::single_tenant()), CallerTag::default());
        // The case of letters in a key does not change its tag.
        assert_eq!(one.2, schemes[1].key_tag(&IdempotencyKey::new("ORDER-123").unwrap()));
    }
}
