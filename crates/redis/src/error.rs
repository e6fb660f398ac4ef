//! Errors, in texts without keys, responses and passwords.

use std::fmt;

use oncegate_core::{Extent, StoreError};
use redis::{ErrorKind, RedisError};

/// A URL that names no store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RedisUrlError(pub(crate) String);

/// An error of opening a store. Its `Display` is a sentence for operators.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
#[non_exhaustive]
pub enum RedisOpenError {
    /// The server cannot be reached or is not ready. Trying again may help.
    Unreachable(String),
    /// The configuration of the server or of this program is wrong. Trying again does not help.
    Unfit(String),
}

/// A command without a reply. The server's text after its error code is never shown, because it may repeat the arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// There was no connection to send the command on. It was not applied.
    NotSent(String),
    /// It is not known if the command was applied.
    Lost(&'static str),
    /// The server refused it, with this code.
    Refused(String),
    /// The server's ACL does not allow it: this command, if the server names it.
    Forbidden(Option<String>),
    /// A script found a record that cannot be read, for this reason.
    Corrupt(String),
    /// The server's reply is not one of the contract.
    UnexpectedReply,
    /// The server cannot be used for its purpose.
    Unfit(&'static str),
}

/// Error codes of the server, with their meaning for operators.
const CODES: [(&str, &str); 14] = [
    ("ASK", "the server is part of a Cluster; name it redis-cluster://"),
    ("BUSY", "the server is busy with a script"),
    ("CLUSTERDOWN", "a part of the Cluster is down"),
    ("CROSSSLOT", "the Cluster has the keys of the command in different slots"),
    ("LOADING", "the server is still loading its data"),
    ("MASTERDOWN", "the server is a replica that lost its primary"),
    ("MISCONF", "the server cannot write to its disk and refuses writes"),
    ("MOVED", "the server is part of a Cluster; name it redis-cluster://"),
    ("NOAUTH", "the server requires a user or a password"),
    ("NOREPLICAS", "too few replicas are connected to the server, which refuses writes"),
    ("OOM", "the server's memory is used up, and it refuses writes"),
    ("READONLY", "the server is a replica"),
    ("TRYAGAIN", "the Cluster is moving the record"),
    ("WRONGPASS", "the server does not accept the user and the password"),
];

impl Failure {
    pub(crate) fn of(error: &RedisError) -> Self {
        match error.kind() {
            ErrorKind::Server(_) | ErrorKind::Extension => {
                let (code, words) = (error.code().unwrap_or_default(), error.detail().unwrap_or_default());
                match code {
                    "NOPERM" => Self::Forbidden(command_of(words)),
                    // The refusal of a command in a script has no code of its own.
                    "ERR" if is_about_rights(words) => Self::Forbidden(command_of(words)),
                    "CORRUPT" => Self::Corrupt(damage_of(words)),
                    _ => Self::Refused(code_of(code)),
                }
            }
            ErrorKind::AuthenticationFailed => Self::Refused("WRONGPASS".to_owned()),
            ErrorKind::Parse | ErrorKind::UnexpectedReturnType => Self::UnexpectedReply,
            ErrorKind::ClusterConnectionNotFound => {
                // The client may have sent it before, on a connection that it then lost.
                Self::Lost("there is no connection to the part of the Cluster that has the record")
            }
            _ => Self::Lost("the connection to the server was lost before it answered"),
        }
    }

    /// Tells if the store needs another connection: this one is gone, or leads to a server that takes no writes.
    pub(crate) fn spoils_connection(&self) -> bool {
        match self {
            Self::Lost(_) | Self::UnexpectedReply => true,
            Self::Refused(code) => {
                matches!(code.as_str(), "READONLY" | "MASTERDOWN" | "LOADING" | "NOAUTH" | "WRONGPASS")
            }
            Self::NotSent(_) | Self::Unfit(_) | Self::Forbidden(_) | Self::Corrupt(_) => false,
        }
    }

    pub(crate) fn is(&self, code: &str) -> bool {
        match self {
            Self::Refused(found) => found == code,
            Self::Forbidden(_) => code == "NOPERM",
            _ => false,
        }
    }
}

/// Redis 7.0 uses the first text, later versions and Valkey the second.
fn is_about_rights(words: &str) -> bool {
    words.contains("The user executing the script can't ") || words.contains("ACL failure in script")
}

/// The command in the server's words about its ACL, such as `no permissions to run the 'hset' command`.
fn command_of(words: &str) -> Option<String> {
    let (name, _) = words.split_once("run the '")?.1.split_once("' command")?;
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '|';
    (name.len() <= 32 && name.chars().all(is_name)).then(|| name.to_uppercase())
}

/// The reason that a script of the contract gives for an unreadable record. It contains nothing of the record, but another
/// server may send any text.
fn damage_of(words: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || " ,-".contains(c);
    let words = words.trim();
    if !words.is_empty() && words.len() <= 100 && words.chars().all(is_plain) {
        words.to_owned()
    } else {
        "the server gives no reason".to_owned()
    }
}

/// The code, if it looks like one: a server may send any text.
fn code_of(code: &str) -> String {
    let is_code = |c: char| c.is_ascii_uppercase() || c == '-' || c == '_';
    if !code.is_empty() && code.len() <= 32 && code.chars().all(is_code) {
        code.to_owned()
    } else {
        "ERR".to_owned()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotSent(why) => f.write_str(why),
            Self::Lost(why) | Self::Unfit(why) => f.write_str(why),
            Self::Refused(code) => match CODES.iter().find(|(known, _)| known == code) {
                Some((_, words)) => write!(f, "{words} ({code})"),
                None => write!(f, "the server refused the command ({code})"),
            },
            Self::Forbidden(Some(command)) => {
                write!(
                    f,
                    "the server's ACL does not allow the command {command}; grant it to the user (NOPERM)"
                )
            }
            Self::Forbidden(None) => {
                f.write_str("the server's ACL does not allow the command, the key or the channel (NOPERM)")
            }
            Self::Corrupt(why) => write!(f, "the record in Redis cannot be read: {why}"),
            Self::UnexpectedReply => f.write_str("the server's reply is not one of the contract"),
        }
    }
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        match &failure {
            Failure::Corrupt(_) => Self::corrupt(format!("{failure}; nothing was changed")),
            Failure::Refused(code) if code == "WRONGTYPE" => Self::corrupt(
                "the record in Redis cannot be read: its key holds another type; nothing was changed",
            ),
            Failure::Refused(code) if code == "INVALID" => {
                Self::invalid("an argument is out of the range of the Redis contract")
            }
            Failure::NotSent(_) => Self::unavailable(format!("Redis: {failure}")).with_nothing_sent(),
            // These refuse a script that may write before it begins.
            Failure::Refused(code) if matches!(code.as_str(), "OOM" | "MISCONF" | "NOREPLICAS") => {
                Self::unavailable(format!("Redis: {failure}")).with_extent(Extent::Writes)
            }
            _ => Self::unavailable(format!("Redis: {failure}")),
        }
    }
}

impl From<Failure> for RedisOpenError {
    fn from(failure: Failure) -> Self {
        let text = failure.to_string();
        match &failure {
            Failure::Refused(code)
                if matches!(code.as_str(), "NOAUTH" | "WRONGPASS" | "MOVED" | "ASK" | "ERR") =>
            {
                Self::Unfit(text)
            }
            Failure::UnexpectedReply | Failure::Unfit(_) | Failure::Forbidden(_) => Self::Unfit(text),
            _ => Self::Unreachable(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_codes_are_shown() {
        assert_eq!(code_of("OOM"), "OOM");
        assert_eq!(code_of("secret"), "ERR");
        assert_eq!(code_of(&"A".repeat(33)), "ERR");
        assert_eq!(code_of(""), "ERR");
        let text = StoreError::from(Failure::Refused("OOM".to_owned())).to_string();
        assert_eq!(text, "Redis: the server's memory is used up, and it refuses writes (OOM)");
    }

    #[test]
    fn an_error_about_rights_names_the_command() {
        for (words, command) in [
            ("ACL failure in script: User app has no permissions to run the 'hset' command", Some("HSET")),
            ("this user has no permissions to run the 'config|get' command", Some("CONFIG|GET")),
            ("No permissions to access a key", None),
            ("run the 'a secret' command", None),
        ] {
            assert_eq!(command_of(words).as_deref(), command, "{words}");
        }
    }

    #[test]
    fn an_error_says_how_much_of_the_store_it_is_about() {
        let told = |failure: Failure| {
            let error = StoreError::from(failure);
            (error.extent(), error.is_unsent())
        };
        let refused = |code: &str| told(Failure::Refused(code.to_owned()));
        for code in ["OOM", "MISCONF", "NOREPLICAS"] {
            assert_eq!(refused(code), (Extent::Writes, false), "{code}");
        }
        assert_eq!(refused("LOADING"), (Extent::Store, false));
        assert_eq!(told(Failure::Lost("gone")), (Extent::Store, false));
        assert_eq!(told(Failure::NotSent("none".to_owned())), (Extent::Store, true));
    }

    #[test]
    fn the_codes_are_in_order() {
        assert!(CODES.is_sorted());
    }
}
