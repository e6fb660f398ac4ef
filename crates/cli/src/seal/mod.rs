//! The keys that encrypt stored responses, and `oncegate seal-key`.

mod command;
mod messages;
mod tool;
mod watch;

use oncegate_seal::{Keyring, SealKeyId};

pub(crate) use self::messages::DeadLetterKeys;
pub(crate) use self::tool::{SealKeyArgs, run};
pub(crate) use self::watch::watch;
use crate::config::{SealKeySource, SealSettings};

/// The keys of these settings. A program that prints them is run now, and `note` gets each line of its standard error.
///
/// # Errors
/// If the program fails, does not end in time, or prints no keys. The text contains nothing of what it printed.
pub(crate) async fn load(settings: &SealSettings, note: fn(&str)) -> Result<Keyring, String> {
    let keys = match &settings.source {
        SealKeySource::Read(keys) => keys.clone(),
        SealKeySource::Command(words) => {
            command::keys(words, note).await.map_err(|why| format!("seal-keys-command: {why}"))?
        }
    };
    Ok(settings.with_policies(keys))
}

/// One line about the keys, with their ids.
pub(crate) fn describe(keys: &Keyring) -> String {
    let ids: Vec<_> = keys.ids().collect();
    let list = |ids: &[SealKeyId]| ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let mut words = match ids.split_first() {
        _ if keys.opens_only() => {
            format!("seal-opens-only: new responses are stored in clear; the keys {} only open", list(&ids))
        }
        Some((first, [])) => format!("the key {first} seals stored responses and steps"),
        Some((first, [other])) => {
            format!("the key {first} seals stored responses and steps; {other} opens, too")
        }
        Some((first, rest)) => {
            format!("the key {first} seals stored responses and steps; {} open, too", list(rest))
        }
        None => "there are no keys".to_owned(),
    };
    if keys.is_required() {
        words.push_str("; stored responses that are not sealed are refused");
    }
    words
}

/// Warnings about keys that a reload replaced.
pub(crate) fn warnings(before: &Keyring, now: &Keyring) -> Vec<String> {
    let mut warnings = Vec::new();
    let removed: Vec<_> = before.ids().filter(|id| !now.has(*id)).map(|id| id.to_string()).collect();
    if !removed.is_empty() {
        warnings.push(format!(
            "the reload removed the seal keys {}: records that they sealed are refused until the keys are added again. `oncegate \
             seal-key usage` counts these records",
            removed.join(", ")
        ));
    }
    if let Some(first) = now.ids().next()
        && !now.opens_only()
        && !before.has(first)
    {
        warnings.push(format!(
            "the key {first} is new and seals at once: other sidecars on this store refuse what it seals until they have it, too. Next \
             time add a new key below the old one in every sidecar first"
        ));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use oncegate_seal::SealKey;

    use super::*;

    fn ring(keys: &[u8]) -> Keyring {
        Keyring::new(keys.iter().map(|n| SealKey::from_bytes([*n; 32])))
    }

    #[test]
    fn a_careful_rotation_has_no_warnings_but_the_removal() {
        assert_eq!(warnings(&ring(&[1]), &ring(&[1, 2])), [""; 0]);
        assert_eq!(warnings(&ring(&[1, 2]), &ring(&[2, 1])), [""; 0]);
        let removed = warnings(&ring(&[2, 1]), &ring(&[2]));
        assert!(removed.len() == 1 && removed[0].contains(&SealKey::from_bytes([1; 32]).id().to_string()));
        let hasty = warnings(&ring(&[1]), &ring(&[2, 1]));
        assert!(hasty.len() == 1 && hasty[0].contains("is new and seals at once"), "{hasty:?}");
        assert_eq!(warnings(&ring(&[1]), &ring(&[2, 1]).with_opens_only(true)), [""; 0]);
    }

    #[test]
    fn the_line_about_the_keys_names_their_ids_only() {
        let id = |n| SealKey::from_bytes([n; 32]).id();
        assert_eq!(describe(&ring(&[1])), format!("the key {} seals stored responses and steps", id(1)));
        let both = describe(&ring(&[1, 2]).with_required(true));
        assert!(both.contains(&format!("{} opens, too; stored responses that are not", id(2))), "{both}");
        assert!(!both.contains(&"01".repeat(32)));
        assert!(describe(&ring(&[1]).with_opens_only(true)).starts_with("seal-opens-only: "));
    }
}
