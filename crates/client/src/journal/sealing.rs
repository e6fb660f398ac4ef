//! The encryption of entries, with the feature `seal`. Without it, an entry that is sealed cannot be read.

use super::entry::EntryError;

/// Encrypts new entries and decrypts stored ones. Without keys, new entries are stored in plain text.
#[derive(Clone, Debug, Default)]
pub(super) struct EntrySeal {
    #[cfg(feature = "seal")]
    keys: oncegate_seal::Keyring,
}

#[cfg(feature = "seal")]
impl EntrySeal {
    pub(super) const fn new(keys: oncegate_seal::Keyring) -> Self {
        Self { keys }
    }

    /// The sealed form of an entry for the file with this name; `None` if there is no key.
    pub(super) fn seal(&self, file: &str, content: &[u8]) -> Result<Option<Vec<u8>>, EntryError> {
        oncegate_seal::seal_intent(file, content, &self.keys)
            .map_err(|error| EntryError::Damaged(error.to_string()))
    }

    /// The entry that was sealed for the file with this name.
    pub(super) fn open(&self, file: &str, sealed: &[u8]) -> Result<Vec<u8>, EntryError> {
        use oncegate_seal::SealError;
        match oncegate_seal::open_intent(file, sealed, &self.keys) {
            Ok(content) => Ok(content.into()),
            Err(SealError::KeyMissing(id)) => Err(EntryError::Sealed(format!(
                "it is sealed with the key {id}, which this process does not have: give it the key, and the intent can be sent"
            ))),
            Err(SealError::UnknownVersion(_)) => {
                Err(EntryError::Damaged("this program does not know the version of its seal".to_owned()))
            }
            Err(_) => Err(EntryError::Damaged(
                "its seal is broken: it was changed, or it belongs to another file".to_owned(),
            )),
        }
    }
}

#[cfg(not(feature = "seal"))]
impl EntrySeal {
    pub(super) fn seal(&self, _: &str, _: &[u8]) -> Result<Option<Vec<u8>>, EntryError> {
        Ok(None)
    }

    pub(super) fn open(&self, _: &str, _: &[u8]) -> Result<Vec<u8>, EntryError> {
        Err(EntryError::Sealed(
            "it is sealed, and this program was built without the feature `seal`".to_owned(),
        ))
    }
}
