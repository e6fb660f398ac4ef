//! The keys of one process.

use std::fmt;
use std::sync::Arc;

use crate::key::{SealKey, SealKeyError, SealKeyId};

/// The largest number of keys. A rotation needs two, and each lookup compares the ids in turn.
const MAX_KEYS: usize = 32;

/// The reason why a text is not a list of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyringError {
    /// A line is not a key.
    #[error("line {line} is not a key")]
    Line {
        /// The number of the line, counted from 1.
        line: usize,
        /// The reason.
        source: SealKeyError,
    },
    /// A key is there twice.
    #[error("line {line}: the key {id} is listed twice")]
    Twice {
        /// The number of the line, counted from 1.
        line: usize,
        /// The key.
        id: SealKeyId,
    },
    /// There is no key.
    #[error("there is no key in it")]
    Empty,
    /// There are too many keys.
    #[error("there are more than {MAX_KEYS} keys in it")]
    TooMany,
}

/// Keys, of which the first one seals and all open. Without a key, nothing is sealed, and sealed parts are refused. Cheap to
/// clone.
#[derive(Clone, Default)]
pub struct Keyring {
    keys: Arc<[SealKey]>,
    is_required: bool,
    opens_only: bool,
}

impl Keyring {
    /// These keys. The first one seals.
    pub fn new(keys: impl IntoIterator<Item = SealKey>) -> Self {
        Self { keys: keys.into_iter().collect(), is_required: false, opens_only: false }
    }

    /// Reads keys from a text with one key in each line. Empty lines and lines that begin with `#` are skipped.
    ///
    /// # Errors
    /// [`KeyringError`]. It contains nothing of the text.
    pub fn parse(text: &str) -> Result<Self, KeyringError> {
        let mut keys: Vec<SealKey> = Vec::new();
        for (line, content) in (1..).zip(text.lines()) {
            let content = content.trim();
            if content.is_empty() || content.starts_with('#') {
                continue;
            }
            let key = SealKey::parse(content).map_err(|source| KeyringError::Line { line, source })?;
            if keys.iter().any(|known| known.id() == key.id()) {
                return Err(KeyringError::Twice { line, id: key.id() });
            }
            if keys.len() == MAX_KEYS {
                return Err(KeyringError::TooMany);
            }
            keys.push(key);
        }
        if keys.is_empty() { Err(KeyringError::Empty) } else { Ok(Self::new(keys)) }
    }

    /// Also refuses responses and steps that are not sealed: an attacker who can write to the store cannot replace a sealed
    /// response by one of their own.
    #[must_use]
    pub fn with_required(self, is_required: bool) -> Self {
        Self { is_required, ..self }
    }

    /// Returns true if unsealed responses and steps are refused.
    #[must_use]
    pub const fn is_required(&self) -> bool {
        self.is_required
    }

    /// Seals nothing, and opens with all keys: for the time before every process has the keys, and for the time after sealing was
    /// switched off.
    #[must_use]
    pub fn with_opens_only(self, opens_only: bool) -> Self {
        Self { opens_only, ..self }
    }

    /// Returns true if nothing is sealed.
    #[must_use]
    pub const fn opens_only(&self) -> bool {
        self.opens_only
    }

    /// Returns true if a key seals: there is one, and the keys do not only open.
    #[must_use]
    pub fn seals(&self) -> bool {
        self.sealing().is_some()
    }

    /// The ids of the keys in their order. The first key seals, unless the keys only open.
    pub fn ids(&self) -> impl Iterator<Item = SealKeyId> {
        self.keys.iter().map(SealKey::id)
    }

    pub(crate) fn sealing(&self) -> Option<&SealKey> {
        self.keys.first().filter(|_| !self.opens_only)
    }

    /// Returns true if the key with this id is there.
    #[must_use]
    pub fn has(&self, id: SealKeyId) -> bool {
        self.find(id).is_some()
    }

    pub(crate) fn find(&self, id: SealKeyId) -> Option<&SealKey> {
        self.keys.iter().find(|key| key.id() == id)
    }
}

impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keyring")
            .field("keys", &self.ids().collect::<Vec<_>>())
            .field("is_required", &self.is_required)
            .field("opens_only", &self.opens_only)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_in_their_order_and_mistakes_name_the_line() {
        let text = |n: u8| SealKey::from_bytes([n; 32]).to_secret_text().to_string();
        let ring = Keyring::parse(&format!("# new\n{}\r\n\n  {}\n", text(2), text(1))).unwrap();
        let ids: Vec<_> = [2, 1].map(|n| SealKey::from_bytes([n; 32]).id()).into();
        assert_eq!(ring.ids().collect::<Vec<_>>(), ids);
        assert_eq!(ring.sealing().unwrap().id(), ids[0]);
        let wrong = Keyring::parse(&format!("{}\nsecret", text(1))).unwrap_err();
        assert_eq!(wrong, KeyringError::Line { line: 2, source: SealKeyError::Form });
        assert!(!format!("{wrong} {wrong:?}").contains("secret"));
        let twice = Keyring::parse(&format!("{}\n{}", text(1), text(1))).unwrap_err();
        assert_eq!(twice, KeyringError::Twice { line: 2, id: ids[1] });
        assert_eq!(Keyring::parse("# none\n").unwrap_err(), KeyringError::Empty);
        let many = |n: u8| (0..n).map(|n| text(n) + "\n").collect::<String>();
        assert!(Keyring::parse(&many(32)).is_ok());
        assert_eq!(Keyring::parse(&many(33)).unwrap_err(), KeyringError::TooMany);
    }
}
