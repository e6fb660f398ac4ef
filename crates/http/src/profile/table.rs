//! A profile as a table, for people.

use std::fmt;
use std::time::Duration;

use http::{Method, StatusCode};
use oncegate_core::JsonPointer;

use super::read::{COMPARISONS, KEY_SCOPES, KEY_SYNTAXES, PROTOCOLS, SERVER_ERRORS, UNCOVERED};
use super::template::Template;
use super::{BodyComparison, BodyPart, ExtraHeaders, HeaderPart, Profile, ServerErrors};
use crate::key::{KeyFormat, KeySyntax};
use crate::mcp::Protocol;
use crate::refusal::{Condition, shown};

/// The refusal of a profile for one condition.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RefusalRow {
    /// The condition.
    pub condition: Condition,
    /// The status.
    pub status: StatusCode,
    /// The code, if the body of refusals has one.
    pub code: Option<String>,
    /// The kind, if the body of refusals has one.
    pub kind: Option<String>,
}

impl Profile {
    /// The values by the keys of the profile's file, without those that are not set.
    #[must_use]
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let rows = [
            (
                "key-header",
                Some(list(self.key_headers.iter().map(shown)))
                    .filter(|names| !names.is_empty())
                    .unwrap_or("–".to_owned()),
            ),
            ("key-query", list(self.key_query.iter().cloned())),
            ("key-member", list(self.key_members.iter().map(|member| member.pointer.to_string()))),
            ("first-sent-header", self.first_sent_header.as_ref().map(shown).unwrap_or_default()),
            ("protocol", word(&PROTOCOLS, self.protocol)),
            ("run-member", list(self.run_members.iter().map(|member| member.pointer.to_string()))),
            ("key-syntax", word(&KEY_SYNTAXES, self.grammar.syntax)),
            ("key-format", self.grammar.format.to_string()),
            ("key-scope", word(&KEY_SCOPES, self.key_scope)),
            ("key-scope-header", list(self.key_scope_headers.iter().map(shown))),
            ("require-key", self.require_key.to_string()),
            ("methods", list(self.methods.iter().map(ToString::to_string))),
            ("uncovered-methods", word(&UNCOVERED, self.uncovered_methods)),
            ("fingerprint.body", word(&COMPARISONS, self.body_comparison)),
            ("fingerprint.include", list(self.fingerprint.included().iter().map(JsonPointer::to_string))),
            ("fingerprint.exclude", list(self.fingerprint.excluded().iter().map(JsonPointer::to_string))),
            ("fingerprint.headers", list(self.fingerprint_headers.iter().map(shown))),
            ("retention", hours(self.retention.as_secs())),
            ("server-errors", word(&SERVER_ERRORS, self.server_errors)),
            ("release-statuses", self.release_status_texts()),
            (
                "replay-statuses",
                list(
                    self.replay_statuses
                        .iter()
                        .map(|(first, replay)| format!("{} → {}", first.as_u16(), replay.as_u16())),
                ),
            ),
            (
                "replay-marker",
                format!(
                    "{}: {}",
                    shown(&self.replay_marker.0),
                    self.replay_marker.1.to_str().unwrap_or_default()
                ),
            ),
            ("echo-key", self.echo_key.to_string()),
            ("headers.response", fields(&self.response_headers)),
            ("headers.kept-server-error", fields(&self.kept_server_error_headers)),
            ("headers.refusal", fields(&self.refusal_headers)),
            ("headers.rejection", fields(&self.rejection_headers)),
            ("refusal.media-type", self.refusal.media_type.to_str().unwrap_or_default().to_owned()),
            ("refusal.body", self.refusal.body.to_string()),
            (
                "refusal.tool-body",
                self.refusal.tool_body.as_ref().map(ToString::to_string).unwrap_or_default(),
            ),
        ];
        rows.into_iter().filter(|(_, value)| !value.is_empty()).collect()
    }

    /// The header fields that may carry the key, as they are usually written.
    #[must_use]
    pub fn key_headers(&self) -> Vec<String> {
        self.key_headers.iter().map(shown).collect()
    }

    /// The protocol of the messages in bodies.
    #[must_use]
    pub const fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// The parameters of the query that may carry the key.
    #[must_use]
    pub fn key_query(&self) -> &[String] {
        &self.key_query
    }

    /// The members of JSON bodies that may carry the key.
    #[must_use]
    pub fn key_members(&self) -> Vec<&JsonPointer> {
        self.key_members.iter().map(|member| &member.pointer).collect()
    }

    /// The covered methods.
    #[must_use]
    pub fn methods(&self) -> &[Method] {
        &self.methods
    }

    /// Returns true if quotes and commas are parts of a key.
    #[must_use]
    pub fn takes_raw_keys(&self) -> bool {
        self.grammar.syntax == KeySyntax::Raw
    }

    /// Returns true if a covered request must have a key.
    #[must_use]
    pub fn requires_key(&self) -> bool {
        self.require_key
    }

    /// Returns true if another body under a used key is refused.
    #[must_use]
    pub fn compares_bodies(&self) -> bool {
        self.body_comparison != BodyComparison::Nothing
    }

    /// Returns true if a response of the service with this status frees the key.
    #[must_use]
    pub fn frees_key(&self, status: StatusCode) -> bool {
        // By the first ones, nothing was decided about the operation.
        matches!(status.as_u16(), 401 | 403 | 407 | 408 | 421 | 425 | 429)
            || self.release_statuses.contains(&status)
            || status.is_server_error() && self.server_errors == ServerErrors::Release
    }

    /// The status of a replay of a response with this status.
    #[must_use]
    pub fn replay_status(&self, stored: StatusCode) -> StatusCode {
        let other = self.replay_statuses.iter().find(|(first, _)| *first == stored);
        other.map_or(stored, |(_, replay)| *replay)
    }

    /// The header field that marks a replay, as it is usually written, and its value.
    #[must_use]
    pub fn replay_marker(&self) -> (String, String) {
        let (name, value) = &self.replay_marker;
        (shown(name), value.to_str().unwrap_or_default().to_owned())
    }

    /// The time for which completed records are kept.
    #[must_use]
    pub fn retention(&self) -> Duration {
        self.retention
    }

    /// The refusals for all conditions, with their usual statuses.
    #[must_use]
    pub fn refusals(&self) -> Vec<RefusalRow> {
        Condition::ALL
            .into_iter()
            .map(|condition| self.refusal(condition, self.refusal_status(condition)))
            .collect()
    }

    /// The refusal for a condition with this status.
    #[must_use]
    pub fn refusal(&self, condition: Condition, status: StatusCode) -> RefusalRow {
        let has = |part| self.refusal.body.has(&part);
        RefusalRow {
            condition,
            status,
            code: has(BodyPart::Code).then(|| self.refusal_code(condition, status)),
            kind: has(BodyPart::Kind).then(|| self.refusal_kind(condition, status).to_owned()),
        }
    }

    /// The header field of refusals whose value is `true` if the same request with the same key can succeed later, and
    /// otherwise `false`, as it is usually written.
    #[must_use]
    pub fn retryable_header(&self) -> Option<String> {
        let is_bare = |value: &Template<HeaderPart>| value.to_string() == "{retryable}";
        let field = self.refusal_headers.iter().find(|(_, value)| is_bare(value));
        field.map(|(name, _)| shown(name))
    }

    /// The header field with the time at which the client sent the request first, as it is usually written.
    #[must_use]
    pub fn first_sent_header(&self) -> Option<String> {
        self.first_sent_header.as_ref().map(shown)
    }

    /// The statuses that free the key; a whole class by its name.
    fn release_status_texts(&self) -> String {
        let has_all = |class: u16| {
            (class * 100..class * 100 + 100)
                .all(|code| self.release_statuses.iter().any(|status| status.as_u16() == code))
        };
        let classes: Vec<u16> = [4, 5].into_iter().filter(|class| has_all(*class)).collect();
        let single = self.release_statuses.iter().map(StatusCode::as_u16);
        let single = single.filter(|code| !classes.contains(&(code / 100))).map(|code| code.to_string());
        list(classes.iter().map(|class| format!("{class}xx")).chain(single))
    }
}

/// The word that stands for this value in a file.
fn word<T: Copy + PartialEq>(words: &[(&str, T)], value: T) -> String {
    words.iter().find(|(_, own)| *own == value).map_or_else(String::new, |(word, _)| (*word).to_owned())
}

fn list(values: impl Iterator<Item = String>) -> String {
    values.collect::<Vec<_>>().join(", ")
}

fn fields(fields: &ExtraHeaders) -> String {
    list(fields.iter().map(|(name, value)| format!("{}: {value}", shown(name))))
}

fn hours(seconds: u64) -> String {
    match seconds {
        days if days % 86_400 == 0 && days > 86_400 => format!("{}d", days / 86_400),
        hours if hours % 3600 == 0 => format!("{}h", hours / 3600),
        minutes if minutes % 60 == 0 => format!("{}m", minutes / 60),
        _ => format!("{seconds}s"),
    }
}

impl fmt::Display for BodyPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.iter().find(|(_, part)| part == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

impl fmt::Display for HeaderPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Response(name) => write!(f, "response:{name}"),
            Self::Retryable => f.write_str("retryable"),
        }
    }
}

impl fmt::Display for KeyFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("any"),
            Self::Uuid => f.write_str("uuid"),
            Self::Ulid => f.write_str("ulid"),
            // The anchors were added when it was read.
            Self::Pattern(pattern) => {
                let whole = pattern.as_str();
                let inner = whole.strip_prefix("^(?:").and_then(|rest| rest.strip_suffix(")$"));
                write!(f, "pattern:{}", inner.unwrap_or(whole))
            }
        }
    }
}
