//! Keys that seal.

use std::fmt;

use aes_gcm::aead::{AeadInOut, KeyInit};
use aes_gcm::{Aes256Gcm, Nonce, Tag};
use hkdf::Hkdf;
use hmac::{Hmac, Mac};
use sha2::Sha256;
use subtle::ConstantTimeEq;
use zeroize::{Zeroize, Zeroizing};

/// The length of a key in bytes.
const KEY_BYTES: usize = 32;

/// The beginning of a key as text. Scanners that look for secrets in files and repositories can search for it.
const PREFIX: &str = "ogseal1_";

pub(crate) const SALT_BYTES: usize = 32;
pub(crate) const TAG_BYTES: usize = 16;

/// The public name of a key: derived from it, and of no use for opening anything.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SealKeyId(pub(crate) [u8; 8]);

impl SealKeyId {
    /// The id with these bytes, which a sealed form has. It is not authentic.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 8]) -> Self {
        Self(bytes)
    }

    /// The bytes, as in sealed forms.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 8] {
        &self.0
    }
}

impl fmt::Display for SealKeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for SealKeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The reason why a text is not a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SealKeyError {
    /// It does not have the form of a key.
    #[error("a key has the form {PREFIX}, the 16 hexadecimal digits of its id, _ and 64 hexadecimal digits")]
    Form,
    /// Its digits do not belong to its id.
    #[error("the digits of the key do not fit its id: it was cut, changed or put together of two keys")]
    Mismatch,
    /// The operating system gave no random numbers.
    #[error("the operating system gave no random numbers")]
    NoRandom,
}

/// A key that seals and opens. Its memory is overwritten when it is dropped, and `Debug` shows only its id.
pub struct SealKey {
    id: SealKeyId,
    key: Zeroizing<[u8; KEY_BYTES]>,
    /// The function that derives salts, with its key.
    salt: Hmac<Sha256>,
}

impl SealKey {
    /// A key of these bytes, which must be random.
    #[must_use]
    pub fn from_bytes(bytes: [u8; KEY_BYTES]) -> Self {
        let key = Zeroizing::new(bytes);
        let mut id = [0; 8];
        derive(&key, &[b"oncegate-seal-1 id"], &mut id);
        // A key of HMAC is padded with zeros to the length of a block.
        let mut salt_key = Zeroizing::new([0; 64]);
        if let Some(start) = salt_key.first_chunk_mut::<KEY_BYTES>() {
            derive(&key, &[b"oncegate-seal-1 salt"], start);
        }
        let salt = <Hmac<Sha256> as KeyInit>::new((&*salt_key).into());
        Self { id: SealKeyId(id), key, salt }
    }

    /// A new random key.
    ///
    /// # Errors
    /// [`SealKeyError::NoRandom`]
    pub fn generate() -> Result<Self, SealKeyError> {
        let mut bytes = Zeroizing::new([0; KEY_BYTES]);
        getrandom::fill(&mut *bytes).map_err(|_| SealKeyError::NoRandom)?;
        Ok(Self::from_bytes(*bytes))
    }

    /// Reads a key from its text: `ogseal1_`, its id, `_` and its digits. The id guards against slips: a key with one wrong
    /// digit would seal records that no other process can open.
    ///
    /// # Errors
    /// [`SealKeyError`] if it is none. The error does not contain the text.
    pub fn parse(text: &str) -> Result<Self, SealKeyError> {
        let (id, digits) =
            text.strip_prefix(PREFIX).and_then(|rest| rest.split_once('_')).ok_or(SealKeyError::Form)?;
        let mut bytes = Zeroizing::new([0; KEY_BYTES]);
        read_hex(digits, &mut *bytes).ok_or(SealKeyError::Form)?;
        let mut named = [0; 8];
        read_hex(id, &mut named).ok_or(SealKeyError::Form)?;
        let key = Self::from_bytes(*bytes);
        if bool::from(key.id.0.ct_eq(&named)) { Ok(key) } else { Err(SealKeyError::Mismatch) }
    }

    /// The text of the key, which is secret.
    #[must_use]
    pub fn to_secret_text(&self) -> Zeroizing<String> {
        use fmt::Write as _;
        let mut text = Zeroizing::new(String::with_capacity(PREFIX.len() + 16 + 1 + 2 * KEY_BYTES));
        // Writing to a string cannot fail.
        let _ = write!(text, "{PREFIX}{}_", self.id);
        for byte in *self.key {
            let _ = write!(text, "{byte:02x}");
        }
        text
    }

    /// The id of the key.
    #[must_use]
    pub const fn id(&self) -> SealKeyId {
        self.id
    }

    pub(crate) fn salt(&self, context: &[u8], plaintext: &[u8]) -> [u8; SALT_BYTES] {
        let mut mac = self.salt.clone();
        mac.update(&(context.len() as u64).to_be_bytes());
        mac.update(context);
        mac.update(plaintext);
        mac.finalize().into_bytes().into()
    }

    /// Encrypts in place. `None` if the text is too long for the cipher, which no part of a record is.
    pub(crate) fn encrypt(&self, salt: &[u8], context: &[u8], text: &mut [u8]) -> Option<[u8; TAG_BYTES]> {
        let tag = self.cipher(salt).encrypt_inout_detached(&Nonce::default(), context, text.into()).ok()?;
        Some(tag.into())
    }

    /// Decrypts in place. `None` if anything is not as it was sealed.
    pub(crate) fn decrypt(
        &self,
        salt: &[u8],
        context: &[u8],
        text: &mut [u8],
        tag: [u8; TAG_BYTES],
    ) -> Option<()> {
        let tag = Tag::from(tag);
        self.cipher(salt).decrypt_inout_detached(&Nonce::default(), context, text.into(), &tag).ok()
    }

    fn cipher(&self, salt: &[u8]) -> Aes256Gcm {
        let mut data_key = Zeroizing::new([0; KEY_BYTES]);
        derive(&self.key, &[b"oncegate-seal-1 data", salt], &mut *data_key);
        Aes256Gcm::new((&*data_key).into())
    }
}

impl fmt::Debug for SealKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SealKey({})", self.id)
    }
}

/// HKDF-Expand. It fails only for a key shorter than a hash, or for an output longer than 255 hashes. Neither occurs here; if
/// one did, the output would be wiped, so it could not open anything.
fn derive(key: &[u8; KEY_BYTES], info: &[&[u8]], to: &mut [u8]) {
    let derived = Hkdf::<Sha256>::from_prk(key).map(|hkdf| hkdf.expand_multi_info(info, to));
    debug_assert!(matches!(derived, Ok(Ok(()))), "the lengths are constant");
    if !matches!(derived, Ok(Ok(()))) {
        to.zeroize();
    }
}

/// Reads exactly as many hexadecimal digits as fit.
fn read_hex(digits: &str, to: &mut [u8]) -> Option<()> {
    if digits.len() != 2 * to.len() {
        return None;
    }
    for (byte, pair) in to.iter_mut().zip(digits.as_bytes().chunks_exact(2)) {
        let digit = |at: usize| pair.get(at).and_then(|digit| char::from(*digit).to_digit(16));
        *byte = u8::try_from(digit(0)? << 4 | digit(1)?).ok()?;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_reads_back_from_its_text_and_slips_are_refused() {
        let key = SealKey::from_bytes([7; 32]);
        let text = key.to_secret_text();
        assert_eq!(SealKey::parse(&text).unwrap().key, key.key);
        for at in 0..text.len() {
            let mut slip = text.as_bytes().to_vec();
            slip[at] = if slip[at] == b'0' { b'1' } else { b'0' };
            let slip = String::from_utf8(slip).unwrap();
            assert!(SealKey::parse(&slip).is_err(), "a slip at {at}");
            assert!(SealKey::parse(&text[..at]).is_err(), "cut at {at}");
        }
        assert_eq!(SealKey::parse("").unwrap_err(), SealKeyError::Form);
        assert_eq!(SealKey::parse(&format!("{}0", *text)).unwrap_err(), SealKeyError::Form);
    }

    #[test]
    fn debug_output_shows_the_id_only() {
        let key = SealKey::from_bytes([0xab; 32]);
        assert_eq!(format!("{key:?}"), format!("SealKey({})", key.id()));
        assert!(!format!("{key:?}").contains("abab"));
    }

    #[test]
    fn generated_keys_differ() {
        assert_ne!(SealKey::generate().unwrap().id(), SealKey::generate().unwrap().id());
    }
}
