//! Contract version 1: the scripts, octet for octet as other languages load them, and where they work.

use std::fmt;

use oncegate_core::RecordId;

/// The version that a record says.
pub const VERSION: &[u8] = b"1";

/// The version that a record with steps says.
pub const VERSION_WITH_STEPS: &[u8] = b"2";

/// Where the audit trail is: a stream.
pub const AUDIT_KEY: &str = "oncegate:{audit}";

/// What the key of every record starts with.
const PREFIX: &str = "oncegate:{";

/// The key of a record. It is a hash tag as a whole, so that a service can put keys of its own into the same slot.
#[must_use]
pub fn record_key(id: &RecordId) -> String {
    format!("{PREFIX}{id}}}")
}

/// The record that a key is of.
#[must_use]
pub fn record_of(key: &[u8]) -> Option<RecordId> {
    let key = std::str::from_utf8(key).ok()?;
    let digits = key.strip_prefix(PREFIX)?.strip_suffix('}')?;
    // What is spelled otherwise is another key, and no script would find it.
    RecordId::from_hex(digits).filter(|id| id.to_string() == digits)
}

/// One script: a command of the contract.
#[derive(Clone)]
pub struct Script {
    code: String,
    sha1: String,
}

impl Script {
    /// A script and what `EVALSHA` calls it.
    pub(crate) fn new(code: String) -> Self {
        let sha1 = redis::Script::new(&code).get_hash().to_owned();
        Self { code, sha1 }
    }

    /// The Lua code.
    #[must_use]
    pub fn code(&self) -> &str {
        &self.code
    }

    /// What `EVALSHA` calls it.
    #[must_use]
    pub fn sha1(&self) -> &str {
        &self.sha1
    }
}

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Script").field("sha1", &self.sha1).finish_non_exhaustive()
    }
}

macro_rules! scripts {
    ($($(#[doc = $doc:literal])+ $name:ident)+) => {
        /// Every script of the contract.
        #[derive(Clone, Debug)]
        #[non_exhaustive]
        pub struct Scripts {
            $($(#[doc = $doc])+ pub $name: Script,)+
        }

        impl Scripts {
            /// The scripts as they are published, after `edit` went over them.
            pub(crate) fn edited(edit: impl Fn(&'static str, &str) -> String) -> Self {
                Self {
                    $($name: Script::new(edit(
                        stringify!($name),
                        include_str!(concat!("../lua/", stringify!($name), ".lua")),
                    )),)+
                }
            }

            /// Each with its name.
            pub fn each(&self) -> impl Iterator<Item = (&'static str, &Script)> {
                [$((stringify!($name), &self.$name)),+].into_iter()
            }
        }
    };
}

scripts! {
    /// Asks to execute.
    claim
    /// Keeps the ownership.
    renew
    /// Notes what an attempt has finished on its way.
    step
    /// Ends an attempt with what came of it.
    complete
    /// Ends an attempt that decided nothing.
    release
    /// An operator says what came of it.
    resolve
    /// Reads a record.
    lookup
    /// Removes a record whose retention is over.
    purge
    /// Adds an entry to the audit trail, on a Cluster.
    audit
}

impl Scripts {
    /// The scripts as they are published.
    #[must_use]
    pub fn published() -> Self {
        Self::edited(|_, code| code.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What other languages may have written down. A change of a script is a new version of the contract, beside this one.
    const FROZEN: [(&str, &str); 9] = [
        ("claim", "004dfc56de6cfb6a35ccf650ed01f6336c8337ab"),
        ("renew", "25bf618fc7c1fc57a34a8cd2e069464f78c0639e"),
        ("step", "3bb6ab2dbc62af42fb7cf7ddcb4fa3d226191651"),
        ("complete", "a293bb24d6cd958269ca226f62bb0d472cab79ca"),
        ("release", "d58fdec3771b5c5dbff3f669c1b3b25bfe03c757"),
        ("resolve", "35d10d40679dc9b43c528e484511603110f01c26"),
        ("lookup", "7b5cc32a7ff713ffe58bd1b5608f21e6014b3b24"),
        ("purge", "2515016b341bd97992f79ae9c5385baff9b55355"),
        ("audit", "e870e2f15c11bfa8066a11c3b433119c6c17464d"),
    ];

    #[test]
    fn the_scripts_are_those_that_were_published() {
        let scripts = Scripts::published();
        let found: Vec<_> = scripts.each().map(|(name, script)| (name, script.sha1())).collect();
        assert_eq!(found, FROZEN);
    }

    #[test]
    fn what_scripts_have_in_common_is_the_same_in_all() {
        let scripts = Scripts::published();
        for part in ["now", "record", "keep", "ended", "audit", "response"] {
            let (start, end) = (format!("-- [{part}]"), format!("-- [/{part}]"));
            let of = |script: &Script| {
                let (_, rest) = script.code().split_once(&start)?;
                Some(rest.split_once(&end).expect("the part ends").0.to_owned())
            };
            let found: Vec<_> = scripts.each().filter_map(|(_, script)| of(script)).collect();
            assert!(found.len() >= 2, "{part}");
            assert!(found.iter().all(|text| *text == found[0]), "{part}");
        }
    }

    #[test]
    fn a_key_reads_back_and_no_other_key_is_one() {
        let id = RecordId::from_bytes([0xa5; 32]);
        let key = record_key(&id);
        assert_eq!(record_of(key.as_bytes()), Some(id));
        let upper = key.to_ascii_uppercase().replace("ONCEGATE", "oncegate");
        for other in [AUDIT_KEY, "oncegate:{a5}", &key[..key.len() - 1], &format!("{key}x"), &upper] {
            assert_eq!(record_of(other.as_bytes()), None, "{other}");
        }
        assert_eq!(record_of(b"oncegate:{\xff}"), None);
    }
}
