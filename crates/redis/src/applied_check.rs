//! A check that a record shows a command as applied.
//!
//! Replicas and disks are waited for on another connection than that of the command. The record itself shows if this
//! connection leads to a server that has applied the command, and not to one that took its place without it.

use oncegate_core::{Command, Completion, Outcome, Resolution};
use redis::Value;

/// The fields of the record that [`AppliedCheck::is_met_by`] reads, in this order.
pub(crate) const FIELDS: [&str; 8] =
    ["state", "token", "attempt", "lease_until", "resolved_to", "resolved_by", "resolved_reason", "steps"];

/// The state of the record that proves that the command was applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AppliedCheck {
    Granted { attempt: String, token: u64, lease_until: u64 },
    Unknown,
    Stepped { token: u64, number: u64 },
    Completed { token: u64, state: &'static str },
    Released { token: u64 },
    Resolved { to: &'static str, actor: String, reason: String },
}

impl AppliedCheck {
    /// Creates the check for a command and its outcome, if that outcome has to be waited for.
    ///
    /// A returned response is valid on any server. An owner whose renewal is lost may be too late, and gets
    /// `Fenced`.
    pub(crate) fn of(command: &Command, outcome: &Outcome) -> Option<Self> {
        Some(match (command, outcome) {
            (Command::Claim(claim), Outcome::Execute(grant)) => Self::Granted {
                attempt: format!("{:032x}", claim.attempt.get()),
                token: grant.token.get(),
                lease_until: grant.lease_until.as_millis(),
            },
            (Command::Step(step), Outcome::StepRecorded) => {
                Self::Stepped { token: step.token.get(), number: u64::try_from(step.number).ok()? }
            }
            (_, Outcome::Unknown) => Self::Unknown,
            (Command::Complete(complete), Outcome::Completed) => Self::Completed {
                token: complete.token.get(),
                state: match &complete.completion {
                    Completion::Awaited => "awaited",
                    Completion::Tombstone => "tombstone",
                    Completion::Unknown => "unknown",
                    _ => "completed",
                },
            },
            (Command::Release(release), Outcome::Released) => Self::Released { token: release.token.get() },
            (Command::Resolve(resolve), Outcome::Resolved { .. }) => Self::Resolved {
                to: match &resolve.resolution {
                    Resolution::Complete(Some(_)) => "completed",
                    Resolution::Complete(None) => "tombstone",
                    Resolution::Park => "unknown",
                    _ => "released",
                },
                actor: resolve.actor.clone(),
                reason: resolve.reason.clone(),
            },
            _ => return None,
        })
    }

    /// Tells if the record shows the command as applied. If another command has changed the record since, the result is
    /// unknown, and the caller may send its command again.
    pub(crate) fn is_met_by(&self, fields: &Value) -> bool {
        let Value::Array(fields) = fields else { return false };
        let texts: Vec<_> = fields.iter().map(text).collect();
        let [state, token, attempt, lease_until, to, by, reason, steps] = texts.as_slice() else {
            return false;
        };
        let Some(state) = *state else { return false };
        let number = |digits: &Option<&str>| digits.and_then(|digits| digits.parse::<u64>().ok());
        match self {
            Self::Granted { attempt: ours, token: granted, lease_until: until } => {
                state == "in-progress"
                    && *attempt == Some(ours.as_str())
                    && number(token) == Some(*granted)
                    && number(lease_until) >= Some(*until)
            }
            Self::Stepped { token: ours, number: ours_is } => {
                state == "in-progress" && number(token) == Some(*ours) && number(steps) > Some(*ours_is)
            }
            Self::Unknown => state == "unknown",
            // The response may have been added since.
            Self::Completed { token: ours, state: expected } => {
                number(token) == Some(*ours) && (state == *expected || state == "completed")
            }
            // A waiting caller may have claimed the record since.
            Self::Released { token: ours } => {
                state == "released" && number(token) == Some(*ours) || number(token) > Some(*ours)
            }
            Self::Resolved { to: expected, actor, reason: why } => {
                *to == Some(*expected)
                    && *by == Some(actor.as_str())
                    && *reason == Some(why.as_str())
                    && (state == *expected || (*expected == "released" && state != "unknown"))
            }
        }
    }
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        _ => None,
    }
}
