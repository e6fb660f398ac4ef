//! A check that a record shows a command as applied.
//!
//! Replicas and disks are waited for on another connection than that of the command. The record itself shows if this
//! connection leads to a server that has applied the command, and not to one that took its place without it.

use bytes::Bytes;
use oncegate_core::{Command, Completion, Outcome, Resolution};
use redis::{Pipeline, Value};

use crate::layout::{Head, MAX_HEAD};

/// The state of the record that proves that the command was applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AppliedCheck {
    Granted {
        attempt: u128,
        token: u64,
        lease_until: u64,
    },
    Unknown,
    Stepped {
        token: u64,
        number: u64,
    },
    Completed {
        token: u64,
        state: &'static str,
    },
    Released {
        token: u64,
    },
    Resolved {
        to: &'static str,
        actor: String,
        reason: String,
    },
    /// The results of the steps, and the bytes of the response.
    Rewritten {
        token: u64,
        results: Vec<Bytes>,
        response: Bytes,
    },
}

impl AppliedCheck {
    /// Creates the check for a command and its outcome, if that outcome has to be waited for.
    ///
    /// A returned response is valid on any server. An owner whose renewal is lost may be too late, and gets
    /// `Fenced`.
    pub(crate) fn of(command: &Command, outcome: &Outcome) -> Option<Self> {
        Some(match (command, outcome) {
            (Command::Claim(claim), Outcome::Execute(grant)) => Self::Granted {
                attempt: claim.attempt.get(),
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
            (Command::Forget(forget), Outcome::Forgotten { .. }) => {
                let (actor, reason) = (forget.actor.clone(), forget.reason.clone());
                Self::Resolved { to: "tombstone", actor, reason }
            }
            (Command::Rewrite(rewrite), Outcome::Rewritten) => Self::Rewritten {
                token: rewrite.token.get(),
                results: rewrite.step_results.iter().map(|both| both.to.clone()).collect(),
                response: rewrite
                    .response
                    .as_ref()
                    .map_or_else(Bytes::new, |both| both.to.as_encoded().clone()),
            },
            _ => return None,
        })
    }

    /// Adds the command that reads what [`Self::is_met_by`] needs of the record.
    pub(crate) fn ask(&self, key: &str, pipeline: &mut Pipeline) {
        match self {
            // The steps are at the end of a record in progress.
            Self::Stepped { .. } | Self::Rewritten { .. } => pipeline.cmd("GET").arg(key),
            _ => pipeline.cmd("GETRANGE").arg(key).arg(0).arg(MAX_HEAD - 1),
        };
    }

    /// Tells if the record shows the command as applied. If another command has changed the record since, the result is
    /// unknown, and the caller may send its command again.
    pub(crate) fn is_met_by(&self, record: &Value) -> bool {
        let Value::BulkString(bytes) = record else { return false };
        let Some(head) = Head::read(bytes) else { return false };
        match self {
            Self::Granted { attempt, token, lease_until } => {
                head.state == b"in-progress"
                    && head.attempt == *attempt
                    && head.token == *token
                    && head.lease_until >= *lease_until
            }
            Self::Stepped { token, number } => {
                head.state == b"in-progress" && head.token == *token && head.steps() > Some(*number)
            }
            Self::Unknown => head.state == b"unknown",
            Self::Rewritten { token, results, response } => {
                head.token == *token && head.has_content(results, response)
            }
            // The response may have been added since.
            Self::Completed { token, state } => {
                head.token == *token && (head.state == state.as_bytes() || head.state == b"completed")
            }
            // A waiting caller may have claimed the record since.
            Self::Released { token } => {
                head.state == b"released" && head.token == *token || head.token > *token
            }
            Self::Resolved { to, actor, reason } => {
                head.resolution.is_some_and(|last| {
                    last.to == to.as_bytes()
                        && last.actor == actor.as_bytes()
                        && last.reason == reason.as_bytes()
                }) && (head.state == to.as_bytes() || (*to == "released" && head.state != b"unknown"))
            }
        }
    }
}
