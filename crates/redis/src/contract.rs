//! Contract version 1: the scripts, byte for byte as other languages load them, and the keys that they work on.

use std::fmt;

use oncegate_core::RecordId;

/// The version in each record: its first byte.
pub const VERSION: u8 = 1;

/// The key of the audit trail, a stream.
pub const AUDIT_KEY: &str = "oncegate:{audit}";

/// The prefix of every record's key.
const PREFIX: &str = "oncegate:{";

/// The key of a record. The whole identifier is a hash tag, so that a service can put its own keys into the same slot.
#[must_use]
pub fn record_key(id: &RecordId) -> String {
    format!("{PREFIX}{id}}}")
}

/// The record that a key belongs to.
#[must_use]
pub fn record_of(key: &[u8]) -> Option<RecordId> {
    let key = std::str::from_utf8(key).ok()?;
    let digits = key.strip_prefix(PREFIX)?.strip_suffix('}')?;
    // Another spelling is another key, and no script would find it.
    RecordId::from_hex(digits).filter(|id| id.to_string() == digits)
}

/// One script: a command of the contract.
#[derive(Clone)]
pub struct Script {
    code: String,
    sha1: String,
}

impl Script {
    /// A script with its SHA-1 digest.
    pub(crate) fn new(code: String) -> Self {
        let sha1 = redis::Script::new(&code).get_hash().to_owned();
        Self { code, sha1 }
    }

    /// The Lua code.
    #[must_use]
    pub fn code(&self) -> &str {
        &self.code
    }

    /// The SHA-1 digest that `EVALSHA` takes, in hexadecimal digits.
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

/// The beginning of a line of a script that includes a part. Several scripts share a part.
const INCLUDE: &str = "--@ ";

/// The text of a shared part.
pub(crate) fn part(name: &str) -> &'static str {
    match name {
        "notice" => include_str!("../lua/parts/notice.lua"),
        "now" => include_str!("../lua/parts/now.lua"),
        "arguments" => include_str!("../lua/parts/arguments.lua"),
        "record" => include_str!("../lua/parts/record.lua"),
        "get" => include_str!("../lua/parts/get.lua"),
        "read" => include_str!("../lua/parts/read.lua"),
        "write" => include_str!("../lua/parts/write.lua"),
        "notify" => include_str!("../lua/parts/notify.lua"),
        "end_attempt" => include_str!("../lua/parts/end_attempt.lua"),
        "audit" => include_str!("../lua/parts/audit.lua"),
        "response" => include_str!("../lua/parts/response.lua"),
        "state_before" => include_str!("../lua/parts/state_before.lua"),
        _ => "error('a part of this script is missing')\n",
    }
}

/// A script with its parts in place.
pub(crate) fn compose(source: &str, part: &impl Fn(&str) -> &'static str) -> Script {
    let lines = source.split_inclusive('\n');
    Script::new(
        lines.map(|line| line.strip_prefix(INCLUDE).map_or(line, |name| part(name.trim_end()))).collect(),
    )
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
            /// The scripts, made of the parts that `part` returns by their names.
            pub(crate) fn composed(part: impl Fn(&str) -> &'static str) -> Self {
                Self { $($name: compose(include_str!(concat!("../lua/", stringify!($name), ".lua")), &part),)+ }
            }

            /// Each script with its name.
            pub fn each(&self) -> impl Iterator<Item = (&'static str, &Script)> {
                [$((stringify!($name), &self.$name)),+].into_iter()
            }
        }
    };
}

scripts! {
    /// Requests permission to execute.
    claim
    /// Extends the lease.
    renew
    /// Records a finished step of an attempt.
    step
    /// Ends an attempt with its outcome.
    complete
    /// Ends an attempt without an outcome and frees the key.
    release
    /// Applies an operator's decision.
    resolve
    /// Replaces the content of a record by another form of it.
    rewrite
    /// Removes the content of a completed record.
    forget
    /// Reads a record.
    lookup
    /// Adds an entry to the audit trail, on a Cluster.
    audit
}

impl Scripts {
    /// The scripts as `oncegate schema print redis` prints them and as other languages load them.
    #[must_use]
    pub fn published() -> Self {
        Self::composed(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The digests that programs in other languages may contain. A change of a script is a new version of the contract, next
    /// to this one.
    const FROZEN: [(&str, &str); 10] = [
        ("claim", "9bd5593690f0bc6512a6a4ee9c830d653c2dff1e"),
        ("renew", "586c4076f7b4cb1398de1b902d02b4cb9cfa4f7f"),
        ("step", "7f689fdf5f441285f252f7e98e37606a0100436a"),
        ("complete", "228f01d893d413e8b7140bef5fe031179e2dfebb"),
        ("release", "13b22efe3a71e8b2130cb7eb981de38b83228f40"),
        ("resolve", "ef775e95570d0a04e6ea3c8774b442459ece2889"),
        ("rewrite", "a7de201380036c8e431e5582281b9f68b9c22d4a"),
        ("forget", "e50a49f056b99c88b2b1dc476cf117787878fa0f"),
        ("lookup", "061de7eb5340213f6ecf8f766f36239646c98ab8"),
        ("audit", "93aa831912cb0a9ab622f159e623508a77e51eac"),
    ];

    #[test]
    fn the_scripts_have_their_published_digests() {
        let scripts = Scripts::published();
        let found: Vec<_> = scripts.each().map(|(name, script)| (name, script.sha1())).collect();
        assert_eq!(found, FROZEN);
    }

    #[test]
    fn every_part_that_a_script_includes_exists() {
        for (name, script) in Scripts::published().each() {
            assert!(script.code().starts_with("#!lua"), "{name}");
            assert!(
                !script.code().contains(INCLUDE) && !script.code().contains("part of this script"),
                "{name}"
            );
        }
    }

    #[test]
    fn a_key_reads_back_and_no_other_key_is_accepted() {
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
