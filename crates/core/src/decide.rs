//! The whole protocol as one pure function.
//!
//! [`decide`] takes a record as a store holds it, a [`Command`] and the store's time, and returns what to write and what to
//! answer. It does no I/O, reads no clock and draws no random numbers. The memory store and the embedded store call it inside
//! their transactions. Stores with their own language (SQL, Lua) translate it. One conformance suite compares all stores
//! with it.
//!
//! ```text
//!            claim                complete                   retention ends
//!  absent ──────────▶ in progress ─────────▶ completed ─────────────────────▶ absent
//!                      │  ▲   │  ▲                ▲
//!              release │  │   │  │ claim          │ complete (same token), resolve
//!                      ▼  │   │  │ (reexecute,    │
//!               released ─┘   │  │  reconcile)    │
//!                ▲     claim  │  │                │
//!                │            ▼  │  claim (park)  │
//!                │        past its lease ─────▶ unknown ◀── complete (unknown)
//!                │                                │
//!                └────────────────────────────────┘ release (same token), resolve
//! ```
//!
//! An operator may take back the resolution of an operator, and nothing else: `resolve` with `amend` replaces it (completed →
//! completed | released, released → completed), and `park` makes the record unknown again. `park` also holds a key that its
//! owner released, so that nothing executes while an operator investigates.
//!
//! Two commands of maintenance concern the content of a record only, that is its response and the results of its steps. `rewrite`
//! replaces it by another form of it, for example by the same response under another key of encryption. `forget` removes it, if
//! the record is completed. Neither changes who may execute.
//!
//! An attempt does not end with its lease: until another attempt takes over, its owner may renew, complete and release. The
//! owner may also complete or release a record that was parked, because nothing was executed in between, but not renew it.
//!
//! The rules that all code below keeps:
//! 1. `renew`, `step`, `complete` and `release` compare the token. A stale owner gets [`Outcome::Fenced`] and changes nothing.
//! 2. A fingerprint that differs gives [`Outcome::Mismatch`] in every state, and changes nothing. One exception: a released
//!    key is free for any request, unless its attempts recorded steps. Those belong to their request.
//! 3. A completed record never changes before it expires, with three exceptions: the response that its own owner may add once
//!    ([`RecordedResponse::Awaited`]); the resolution of an operator, which an operator may replace or park; and its content
//!    (rules 8 and 9).
//! 4. A command that is sent again because its reply was lost gets the same reply.
//! 5. A record past its retention is absent, even if it was not purged yet.
//! 6. Only the owner adds steps, one after the other, and no step ever changes (but see rule 8). They outlive their attempt and
//!    end with the owner's completion. An operator's completion keeps them: if it is taken back, the next attempt continues after
//!    them.
//! 7. A park gives the record a new token that no attempt owns. So an owner that a resolution has fenced stays fenced.
//! 8. A `rewrite` compares the token and every byte of the content that its sender read, and then replaces the bytes. A
//!    record that changed meanwhile is left alone. Nothing else of the record changes: not its state, its steps' names and
//!    number, or its times.
//! 9. A `forget` turns a completed record into a tombstone and removes its steps. Its key stays as protected as before, until the
//!    same time, and its owner cannot add a response any more. An operator's completion with steps is final from then on: if
//!    it were taken back, the next attempt would repeat the steps. Records that are not completed are left alone: they need
//!    their steps.

use std::time::Duration;

use bytes::Bytes;

use crate::clock::Timestamp;
use crate::fingerprint::Fingerprint;
use crate::id::{AttemptId, FencingToken};
use crate::limits;
use crate::record::{Label, Record, RecordedResponse, State, StateName};
use crate::response::StoredResponse;
use crate::step::{Step, Steps};

/// A command to a store about one record.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Command {
    /// Asks to execute. Outcomes: `Execute`, `Replay`, `InProgress`, `Mismatch`, `Unknown`, `Unreplayable`.
    Claim(Claim),
    /// Renews the lease. Outcomes: `Renewed`, `Fenced`.
    Renew(Renew),
    /// Records a finished step of the attempt. Outcomes: `StepRecorded`, `StepDiffers`, `StepsFull`, `Fenced`.
    Step(RecordStep),
    /// Ends the attempt with a result. Outcomes: `Completed`, `Fenced`.
    Complete(Complete),
    /// Ends the attempt and frees the key, because nothing was decided. Outcomes: `Released`, `Fenced`.
    Release(Release),
    /// Records an operator's decision, or takes one back. Outcomes: `Resolved`, `NotResolvable`.
    Resolve(Resolve),
    /// Replaces the content of a record by another form of it. Outcomes: `Rewritten`, `NotRewritten`.
    Rewrite(Rewrite),
    /// Removes the content of a completed record, and keeps its protection. Outcomes: `Forgotten`, `NotForgotten`.
    Forget(Forget),
}

/// A claim. If it is sent again with the same `attempt`, it is the same claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The random identifier of the attempt. A claim that is sent again keeps it; each other claim needs a new one.
    pub attempt: AttemptId,
    /// The fingerprint of the request: equal fingerprints mean the same request.
    pub fingerprint: Fingerprint,
    /// The length of the lease: the ownership ends after it unless it is renewed.
    pub lease: Duration,
    /// The time that a record is kept after its lease, or after it turned unknown.
    pub retention: Duration,
    /// The action if an earlier owner's lease ran out.
    pub on_abandoned: OnAbandoned,
    /// The part of the record that an operator sees.
    pub label: Label,
}

/// The action of a claim on a record whose lease ended without a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum OnAbandoned {
    /// The outcome is unknown until an operator resolves it: at most one execution.
    #[default]
    Park,
    /// Executes again under a new token: at least one execution.
    Reexecute,
    /// Gives ownership under a new token. The new owner must ask the service about the earlier attempt before it executes, and
    /// park the record if the service cannot tell. Only the HTTP layer and the sidecar can ask.
    Reconcile,
}

/// A renewal of a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Renew {
    /// The owner's token.
    pub token: FencingToken,
    /// The length of the lease from now.
    pub lease: Duration,
    /// The time that the record is kept after the lease.
    pub retention: Duration,
}

/// A recovery point of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordStep {
    /// The owner's token.
    pub token: FencingToken,
    /// The number of the step, counted from 0: the number of steps before it.
    pub number: usize,
    /// The finished step.
    pub step: Step,
}

/// The end of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Complete {
    /// The owner's token.
    pub token: FencingToken,
    /// The result of the attempt.
    pub completion: Completion,
    /// The time that the record is kept from now.
    pub retention: Duration,
}

/// The result of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Completion {
    /// The operation took place, and this is its response.
    Replayable(StoredResponse),
    /// The operation took place; its owner may add the response.
    Awaited,
    /// The operation took place, and its response can never be replayed.
    Tombstone,
    /// The owner does not know whether the operation took place (a timeout after sending, a panic).
    Unknown,
}

/// The end of an attempt that decided nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Release {
    /// The owner's token.
    pub token: FencingToken,
    /// The time that the released record is kept for its token. A record with steps keeps its earlier expiry if that is
    /// later.
    pub retention: Duration,
}

/// An operator's resolution of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolve {
    /// The outcome of the operation.
    pub resolution: Resolution,
    /// The time that the record is kept from now.
    pub retention: Duration,
    /// Also releases a record whose owner may be alive. The owner is fenced, but its effect may have happened.
    pub force: bool,
    /// Replaces an operator's earlier resolution, and nothing else. Clients may have got the earlier response. Without it, a
    /// resolution is refused if another operator resolved the record first. [`Resolution::Park`] does not need it.
    pub amend: bool,
    /// The operator's name.
    pub actor: String,
    /// The operator's reason, for the audit trail.
    pub reason: String,
}

/// A replacement of the content of a record. It is of no use to an owner: it changes nothing that a claim decides by.
///
/// The sender gives the whole content as it has read it, and not a digest of it: not every store can compute one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rewrite {
    /// The token of the record, as it was read with the content.
    pub token: FencingToken,
    /// The response; `None` for a record without one.
    pub response: Option<Replacement<StoredResponse>>,
    /// The results of all steps, in their order. The steps keep their names.
    pub step_results: Vec<Replacement<Bytes>>,
}

impl Rewrite {
    /// A rewrite of this record that changes nothing yet.
    #[must_use]
    pub fn of(record: &Record) -> Self {
        Self {
            token: record.token,
            response: record.response().cloned().map(Replacement::none),
            step_results: record
                .steps
                .as_slice()
                .iter()
                .map(|step| Replacement::none(step.result().clone()))
                .collect(),
        }
    }

    /// Returns true if every part is replaced by itself.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.response.as_ref().is_none_or(Replacement::is_none)
            && self.step_results.iter().all(Replacement::is_none)
    }
}

/// A part of a record's content, before and after a [`Rewrite`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replacement<T> {
    /// The part that the record must have.
    pub from: T,
    /// The part that it has afterwards.
    pub to: T,
}

impl<T: Clone + PartialEq> Replacement<T> {
    /// The replacement of a part by itself.
    #[must_use]
    pub fn none(part: T) -> Self {
        Self { from: part.clone(), to: part }
    }

    /// Returns true if the part is replaced by itself.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.from == self.to
    }
}

/// The removal of the content of a completed record, for an operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forget {
    /// The operator's name.
    pub actor: String,
    /// The operator's reason, for the audit trail.
    pub reason: String,
}

/// The decision of an operator about a record.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Resolution {
    /// The operation took place; this is the response to replay, if there is one.
    Complete(Option<StoredResponse>),
    /// The operation did not take place: the key is free again.
    Release,
    /// It is unknown after all if the operation took place. Takes back an operator's resolution, or holds a key that was
    /// released and not claimed since. Nothing executes until an operator resolves the record again.
    Park,
}

/// The reply of a store to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The claimant owns the record and may execute.
    Execute(Grant),
    /// Completed: this is the response.
    Replay(StoredResponse),
    /// Another attempt owns the record.
    InProgress {
        /// The rest of the owner's lease.
        lease_left: Duration,
    },
    /// The key was used for another request.
    Mismatch,
    /// It is unknown whether the operation took place.
    Unknown,
    /// Completed, but the response cannot be replayed.
    Unreplayable,
    /// The lease was renewed.
    Renewed {
        /// The new end of the lease.
        lease_until: Timestamp,
    },
    /// The step is recorded.
    StepRecorded,
    /// Another step has this number, or an earlier number has none. Nothing was changed.
    StepDiffers,
    /// The step does not fit into the limits of a record. Nothing was changed.
    StepsFull,
    /// The attempt is completed.
    Completed,
    /// The key is free again.
    Released,
    /// The sender does not own the record (any more). Nothing was changed.
    Fenced,
    /// The operator's resolution was accepted.
    Resolved {
        /// The state before.
        from: StateName,
    },
    /// The operator's resolution does not fit the record's state. Nothing was changed.
    NotResolvable {
        /// The state; `None` if there is no record.
        state: Option<StateName>,
    },
    /// The record has the new content. If it had it already, nothing was changed.
    Rewritten,
    /// The record has neither the token and the content that the sender read nor the new content, or the new content is too large
    /// ([`limits::MAX_STEPS_BYTES`]). Nothing was changed.
    NotRewritten {
        /// The state; `None` if there is no record.
        state: Option<StateName>,
    },
    /// The content of the record was removed. The record is a tombstone.
    Forgotten {
        /// The state before.
        from: StateName,
    },
    /// The record is not completed, or it keeps no content (any more): a tombstone. Nothing was changed.
    NotForgotten {
        /// The state; `None` if there is no record.
        state: Option<StateName>,
    },
}

/// The ownership of a record, as a claim gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The number to show with every write.
    pub token: FencingToken,
    /// The number of attempts at this record, this one included.
    pub attempts: u32,
    /// The end of the lease by the store's clock.
    pub lease_until: Timestamp,
    /// True if an earlier attempt was abandoned, so that its effect may have happened.
    pub after_abandoned: bool,
}

/// The write that a decision asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// No write.
    Keep,
    /// Writes this record, and replaces an earlier one.
    Put(Record),
}

/// The result of [`decide`]: the reply, and the write that must come before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The reply.
    pub outcome: Outcome,
    /// The write that must be durable before the reply is given.
    pub write: Write,
}

impl Decision {
    const fn keep(outcome: Outcome) -> Self {
        Self { outcome, write: Write::Keep }
    }

    const fn put(outcome: Outcome, record: Record) -> Self {
        Self { outcome, write: Write::Put(record) }
    }
}

/// The whole protocol: the effect of `command` on `record` at `now`, and the reply to its sender.
#[must_use]
pub fn decide(record: Option<&Record>, command: &Command, now: Timestamp) -> Decision {
    // Rule 5: a record past its retention is absent. Only its token still counts, so that tokens keep growing.
    let last_token = record.map(|r| r.token);
    let live = record.filter(|r| !r.is_expired(now));
    match command {
        Command::Claim(claim) => decide_claim(live, last_token, claim, now),
        Command::Renew(renew) => decide_renew(live, renew, now),
        Command::Step(step) => decide_step(live, step),
        Command::Complete(complete) => decide_complete(live, complete, now),
        Command::Release(release) => decide_release(live, release, now),
        Command::Resolve(resolve) => decide_resolve(live, resolve, now),
        Command::Rewrite(rewrite) => decide_rewrite(live, rewrite, now),
        Command::Forget(_) => decide_forget(live, now),
    }
}

fn decide_claim(
    live: Option<&Record>,
    last_token: Option<FencingToken>,
    claim: &Claim,
    now: Timestamp,
) -> Decision {
    let Some(record) = live else {
        return execute(None, last_token, claim, now, false);
    };
    let is_free = record.state == State::Released && record.steps.is_empty();
    if !is_free && record.fingerprint != claim.fingerprint {
        return Decision::keep(Outcome::Mismatch); // rule 2
    }
    match &record.state {
        State::Released => execute(live, last_token, claim, now, false),
        State::InProgress { attempt, .. } if *attempt == claim.attempt => {
            same_claim_again(record, claim, now)
        }
        State::InProgress { lease_until, .. } if now < *lease_until => {
            in_progress(record, *lease_until, claim, now)
        }
        State::InProgress { .. } => match claim.on_abandoned {
            OnAbandoned::Park => Decision::put(
                Outcome::Unknown,
                Record {
                    state: State::Unknown,
                    changed_at: now,
                    expires_at: now.after(claim.retention),
                    by_operator: false,
                    ..record.clone()
                },
            ),
            OnAbandoned::Reexecute | OnAbandoned::Reconcile => execute(live, last_token, claim, now, true),
        },
        State::Unknown => Decision::keep(Outcome::Unknown),
        State::Completed(RecordedResponse::Replayable(response)) => {
            Decision::keep(Outcome::Replay(response.clone()))
        }
        State::Completed(RecordedResponse::Awaited | RecordedResponse::Tombstone) => {
            Decision::keep(Outcome::Unreplayable)
        }
    }
}

/// Answers a claim while the lease of another attempt lasts.
///
/// If more than the longest lease is left, the store's clock was set back since the lease was given, and the owner may be
/// dead. The lease is then shortened: it ends after the longest time that it can have had, from now on. An owner that is
/// alive renews within that time. A lease is never longer than the time from the claim to its end.
fn in_progress(record: &Record, lease_until: Timestamp, claim: &Claim, now: Timestamp) -> Decision {
    let lease_left = lease_until.since(now);
    let bound = lease_until.since(record.changed_at).max(claim.lease);
    let State::InProgress { attempt, after_abandoned, .. } = record.state else {
        return Decision::keep(Outcome::InProgress { lease_left });
    };
    if lease_left <= limits::MAX_LEASE.max(bound) {
        return Decision::keep(Outcome::InProgress { lease_left });
    }
    let shortened = now.after(bound);
    let record = Record {
        state: State::InProgress { attempt, lease_until: shortened, after_abandoned },
        changed_at: now,
        expires_at: shortened.after(record.expires_at.since(lease_until)),
        ..record.clone()
    };
    Decision::put(Outcome::InProgress { lease_left: bound }, record)
}

/// Gives ownership under a new token.
fn execute(
    live: Option<&Record>,
    last_token: Option<FencingToken>,
    claim: &Claim,
    now: Timestamp,
    after_abandoned: bool,
) -> Decision {
    let token = next_token(last_token, now);
    let lease_until = now.after(claim.lease);
    let attempts = live.map_or(0, |r| r.attempts).saturating_add(1);
    let record = Record {
        fingerprint: claim.fingerprint,
        token,
        attempts,
        state: State::InProgress { attempt: claim.attempt, lease_until, after_abandoned },
        label: claim.label.clone(),
        created_at: live.map_or(now, |r| r.created_at),
        changed_at: now,
        expires_at: lease_until.after(claim.retention),
        steps: live.map_or_else(Steps::default, |r| r.steps.clone()),
        by_operator: false,
    };
    Decision::put(Outcome::Execute(Grant { token, attempts, lease_until, after_abandoned }), record)
}

/// A token that is greater than all earlier tokens of the record.
fn next_token(last: Option<FencingToken>, now: Timestamp) -> FencingToken {
    FencingToken::new(last.map_or(0, |token| token.get().saturating_add(1)).max(now.as_millis()))
}

/// Answers a claim that was sent again because its reply was lost: the same token, and the lease counts from now (rule 4).
fn same_claim_again(record: &Record, claim: &Claim, now: Timestamp) -> Decision {
    let State::InProgress { attempt, after_abandoned, .. } = record.state else {
        return Decision::keep(Outcome::Fenced);
    };
    let lease_until = now.after(claim.lease);
    let grant = Grant { token: record.token, attempts: record.attempts, lease_until, after_abandoned };
    let record = Record {
        state: State::InProgress { attempt, lease_until, after_abandoned },
        expires_at: lease_until.after(claim.retention),
        ..record.clone()
    };
    Decision::put(Outcome::Execute(grant), record)
}

/// Renews a lease, even if it has ended, as long as no other attempt took over: the owner is alive. To treat it as dead would
/// only turn an outcome that will be known into an unknown one.
fn decide_renew(live: Option<&Record>, renew: &Renew, now: Timestamp) -> Decision {
    match live {
        Some(record) if record.token == renew.token => match record.state {
            State::InProgress { attempt, after_abandoned, .. } => {
                let lease_until = now.after(renew.lease);
                let record = Record {
                    state: State::InProgress { attempt, lease_until, after_abandoned },
                    expires_at: lease_until.after(renew.retention),
                    ..record.clone()
                };
                Decision::put(Outcome::Renewed { lease_until }, record)
            }
            _ => Decision::keep(Outcome::Fenced),
        },
        _ => Decision::keep(Outcome::Fenced),
    }
}

fn decide_step(live: Option<&Record>, command: &RecordStep) -> Decision {
    let RecordStep { token, number, step } = command;
    let Some(record) = live.filter(|r| r.token == *token && matches!(r.state, State::InProgress { .. }))
    else {
        return Decision::keep(Outcome::Fenced);
    };
    match record.steps.as_slice().get(*number) {
        Some(same) if same == step => Decision::keep(Outcome::StepRecorded), // rule 4
        Some(_) => Decision::keep(Outcome::StepDiffers),
        None if *number > record.steps.len() => Decision::keep(Outcome::StepDiffers),
        None if !record.steps.can_hold(step) => Decision::keep(Outcome::StepsFull),
        None => {
            let record = Record { steps: record.steps.with(step.clone()), ..record.clone() };
            Decision::put(Outcome::StepRecorded, record)
        }
    }
}

fn decide_complete(live: Option<&Record>, complete: &Complete, now: Timestamp) -> Decision {
    let Some(record) = live.filter(|r| r.token == complete.token) else {
        return Decision::keep(Outcome::Fenced); // rule 1
    };
    let state = match &complete.completion {
        Completion::Replayable(response) => State::Completed(RecordedResponse::Replayable(response.clone())),
        Completion::Awaited => State::Completed(RecordedResponse::Awaited),
        Completion::Tombstone => State::Completed(RecordedResponse::Tombstone),
        Completion::Unknown => State::Unknown,
    };
    match (&record.state, &state) {
        // An unknown outcome became known after all: the owner of the current token reports it.
        (State::InProgress { .. }, _) | (State::Unknown, State::Completed(_)) => {}
        // The owner adds the response that its own transaction left out (rule 3).
        (
            State::Completed(RecordedResponse::Awaited),
            State::Completed(RecordedResponse::Replayable(_) | RecordedResponse::Tombstone),
        ) => {}
        (before, after) if before == after => return Decision::keep(Outcome::Completed), // rule 4
        _ => return Decision::keep(Outcome::Fenced),
    }
    // After an unknown outcome, a later attempt may have to continue after the steps.
    let steps = if state == State::Unknown { record.steps.clone() } else { Steps::default() };
    let expires_at = now.after(complete.retention);
    let record = Record { state, changed_at: now, expires_at, steps, by_operator: false, ..record.clone() };
    Decision::put(Outcome::Completed, record)
}

fn decide_release(live: Option<&Record>, release: &Release, now: Timestamp) -> Decision {
    match live {
        Some(record) if record.token == release.token => match record.state {
            State::InProgress { .. } | State::Unknown => {
                Decision::put(Outcome::Released, released(record, release.retention, now))
            }
            State::Released => Decision::keep(Outcome::Released), // rule 4
            State::Completed(_) => Decision::keep(Outcome::Fenced),
        },
        _ => Decision::keep(Outcome::Fenced),
    }
}

fn decide_resolve(live: Option<&Record>, resolve: &Resolve, now: Timestamp) -> Decision {
    let Some(record) = live else {
        return Decision::keep(Outcome::NotResolvable { state: None });
    };
    let from = record.state_name(now);
    if !may_resolve(record, from, resolve) {
        return Decision::keep(Outcome::NotResolvable { state: Some(from) });
    }
    let record = match &resolve.resolution {
        // The steps stay: this resolution may be taken back, and then the next attempt must not begin at the first step.
        Resolution::Complete(response) => Record {
            state: State::Completed(
                response.clone().map_or(RecordedResponse::Tombstone, RecordedResponse::Replayable),
            ),
            changed_at: now,
            expires_at: now.after(resolve.retention),
            ..record.clone()
        },
        Resolution::Release => released(record, resolve.retention, now),
        // A new token (rule 7). The record must not expire earlier than before, because then the key would be free.
        Resolution::Park => Record {
            state: State::Unknown,
            token: next_token(Some(record.token), now),
            changed_at: now,
            expires_at: now.after(resolve.retention).max(record.expires_at),
            ..record.clone()
        },
    };
    Decision::put(Outcome::Resolved { from }, Record { by_operator: true, ..record })
}

/// True if an operator's resolution fits the record, which is in the state `from`.
fn may_resolve(record: &Record, from: StateName, resolve: &Resolve) -> bool {
    let is_amendment = resolve.amend && record.by_operator;
    match (&resolve.resolution, from) {
        // Rule 3: a record that its owner completed never changes.
        (Resolution::Park, StateName::Completed | StateName::Tombstone) => record.by_operator,
        (Resolution::Park, StateName::Released) => true,
        (Resolution::Park, _) => false,
        (_, StateName::Unknown | StateName::Abandoned) => !resolve.amend,
        (Resolution::Release, StateName::InProgress) => resolve.force && !resolve.amend,
        (_, StateName::Completed | StateName::Tombstone) => is_amendment,
        // Released with steps: the operation stopped half-way, and an operator may record its result.
        (Resolution::Complete(_), StateName::Released) => {
            is_amendment || !resolve.amend && !record.steps.is_empty()
        }
        _ => false,
    }
}

fn decide_rewrite(live: Option<&Record>, rewrite: &Rewrite, now: Timestamp) -> Decision {
    let keep = || Decision::keep(Outcome::NotRewritten { state: live.map(|record| record.state_name(now)) });
    let Some(record) = live.filter(|record| record.token == rewrite.token) else { return keep() };
    let (response, results) = (rewrite.response.as_ref(), &rewrite.step_results);
    if has_content(record, response.map(|part| &part.to), results.iter().map(|part| &part.to)) {
        return Decision::keep(Outcome::Rewritten); // rule 4
    }
    if !has_content(record, response.map(|part| &part.from), results.iter().map(|part| &part.from)) {
        return keep();
    }
    let Some(steps) = record.steps.with_results(results.iter().map(|part| &part.to)) else { return keep() };
    let state = match response {
        Some(part) => State::Completed(RecordedResponse::Replayable(part.to.clone())),
        None => record.state.clone(),
    };
    Decision::put(Outcome::Rewritten, Record { state, steps, ..record.clone() })
}

fn has_content<'a>(
    record: &Record,
    response: Option<&StoredResponse>,
    results: impl Iterator<Item = &'a Bytes>,
) -> bool {
    record.response() == response && record.steps.as_slice().iter().map(Step::result).eq(results)
}

fn decide_forget(live: Option<&Record>, now: Timestamp) -> Decision {
    let keep = || Decision::keep(Outcome::NotForgotten { state: live.map(|record| record.state_name(now)) });
    let Some(record) = live else { return keep() };
    match &record.state {
        State::Completed(RecordedResponse::Tombstone) if record.steps.is_empty() => keep(),
        State::Completed(_) => {
            let from = record.state_name(now);
            let record = Record {
                state: State::Completed(RecordedResponse::Tombstone),
                changed_at: now,
                steps: Steps::default(),
                // Rule 9: without its steps, it must not become executable again.
                by_operator: record.by_operator && record.steps.is_empty(),
                ..record.clone()
            };
            Decision::put(Outcome::Forgotten { from }, record)
        }
        _ => keep(),
    }
}

/// The record of a released key. It is kept for its token only, so a short time is enough. A record with steps keeps its
/// earlier expiry, because its sender may not know of the steps.
fn released(record: &Record, retention: Duration, now: Timestamp) -> Record {
    let mut expires_at = now.after(retention);
    if !record.steps.is_empty() {
        expires_at = expires_at.max(record.expires_at);
    }
    Record { state: State::Released, changed_at: now, expires_at, by_operator: false, ..record.clone() }
}
