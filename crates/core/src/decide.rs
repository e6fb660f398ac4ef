//! The whole protocol as one pure function.
//!
//! [`decide`] takes a record as a store holds it, a [`Command`] and the store's time, and says what to write and what to
//! answer. It does no I/O, reads no clock and draws no random number. The memory and the embedded store call it inside
//! their own transaction; a store with a language of its own translates it, and one suite holds each of them to it.
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
//! An operator may take back what an operator said, and nothing else: `resolve` with `amend` replaces it (completed →
//! completed | released, released → completed), and `park` makes it unknown again. `park` also takes a key that its owner
//! released, so that nothing executes while a person looks.
//!
//! The end of a lease is no end of an attempt: until another one takes over, its owner may renew, complete and release. It may
//! also complete or release a record that was parked, because nothing was executed in between; it cannot renew one.
//!
//! The rules that every line below keeps:
//! 1. `renew`, `step`, `complete` and `release` compare the token; a stale owner hears [`Outcome::Fenced`] and changes nothing.
//! 2. A fingerprint that differs is [`Outcome::Mismatch`] whatever the state, and changes nothing. A released key has no
//!    fingerprint to differ from: it is free, unless an attempt left finished steps behind, which belong to its request.
//! 3. A completed record never changes before it expires, with two exceptions: one answer that its own owner may add
//!    ([`Answer::Awaited`]), and the answer of an operator, which an operator may replace or park.
//! 4. A command that is sent again because its answer was lost gets the answer that it lost.
//! 5. A record past its retention is absent, whether it was purged yet or not.
//! 6. Steps are added by the owner alone, one after the other, and none is ever changed. They outlive their attempt and end
//!    with the owner's completion. An operator's completion keeps them: if it is taken back, the next attempt goes on after them.
//! 7. A park gives the record a new token that nobody owns. So an owner that an operator's word has fenced stays fenced.

use std::time::Duration;

use crate::clock::Timestamp;
use crate::fingerprint::Fingerprint;
use crate::id::{AttemptId, FencingToken};
use crate::limits;
use crate::record::{Answer, Label, Record, State, StateName};
use crate::response::StoredResponse;
use crate::step::{Step, Steps};

/// A command to a store about one record.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Command {
    /// Ask to execute. Answers: `Execute`, `Replay`, `InProgress`, `Mismatch`, `Unknown`, `Unreplayable`.
    Claim(Claim),
    /// Keep the ownership. Answers: `Renewed`, `Fenced`.
    Renew(Renew),
    /// Note what the attempt has finished on its way. Answers: `StepRecorded`, `StepDiffers`, `StepsFull`, `Fenced`.
    Step(RecordStep),
    /// End the attempt with what came of it. Answers: `Completed`, `Fenced`.
    Complete(Complete),
    /// End the attempt and free the key, because nothing was decided. Answers: `Released`, `Fenced`.
    Release(Release),
    /// An operator's verdict, or a verdict taken back. Answers: `Resolved`, `NotResolvable`.
    Resolve(Resolve),
    /// Remove the record if its retention is over. Answers: `Purged`, `Kept`.
    Purge,
}

/// A claim. Sent again, with the same `attempt`, it is the same claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Random, new for each claim that is not sent again.
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

/// What a claim finds where a lease ran out and no completion came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum OnAbandoned {
    /// The outcome is unknown until an operator says: at most one execution.
    #[default]
    Park,
    /// Executes again under a new token: at least one execution.
    Reexecute,
    /// Gives ownership under a new token to whoever asks the service what became of the earlier attempt.
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
    /// The operation took place, and this is its answer.
    Replayable(StoredResponse),
    /// The operation took place; its owner may add the answer.
    Awaited,
    /// The operation took place, and its answer can never be replayed.
    Tombstone,
    /// The owner itself does not know (a timeout after sending, a panic).
    Unknown,
}

/// The end of an attempt that decided nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Release {
    /// The owner's token.
    pub token: FencingToken,
    /// How long the released record is remembered for its token. One with finished steps is remembered for as long as it was
    /// to be before, if that is longer.
    pub retention: Duration,
}

/// An operator's word on a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolve {
    /// The outcome of the operation.
    pub resolution: Resolution,
    /// The time that the record is kept from now.
    pub retention: Duration,
    /// Also release a record whose owner may be alive. The owner is fenced; its effect may have happened all the same.
    pub force: bool,
    /// Replace what an operator said before, and change nothing else. Clients may have got the earlier answer. Without it, a
    /// resolution that another operator's overtook is refused. [`Resolution::Park`] needs no such word.
    pub amend: bool,
    /// The operator's name.
    pub actor: String,
    /// Why. Kept in the audit trail.
    pub reason: String,
}

/// The decision of an operator about a record.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Resolution {
    /// The operation took place; this is the answer to replay, or none can be given.
    Complete(Option<StoredResponse>),
    /// The operation did not take place: the key is free again.
    Release,
    /// Whether the operation took place is not known after all: takes back what an operator said, or holds a key that was
    /// released and not claimed since. Nothing executes until an operator resolves the record again.
    Park,
}

/// The answer of a store to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The claimant owns the record and may execute.
    Execute(Grant),
    /// Completed: this is the answer.
    Replay(StoredResponse),
    /// Somebody else owns the record.
    InProgress {
        /// The rest of the owner's lease.
        lease_left: Duration,
    },
    /// The key was used for another request.
    Mismatch,
    /// It is not known whether the operation took place.
    Unknown,
    /// Completed, but the answer cannot be replayed.
    Unreplayable,
    /// The lease was renewed.
    Renewed {
        /// The new end of the lease.
        lease_until: Timestamp,
    },
    /// The step is noted.
    StepRecorded,
    /// Another step has this number, or an earlier number has none. Nothing was changed.
    StepDiffers,
    /// The record's steps have no room for another one. Nothing was changed.
    StepsFull,
    /// The attempt is completed.
    Completed,
    /// The key is free again.
    Released,
    /// The sender does not own the record (any more). Nothing was changed.
    Fenced,
    /// The operator's word was taken.
    Resolved {
        /// The state before.
        from: StateName,
    },
    /// The operator's word does not fit the record's state. Nothing was changed.
    NotResolvable {
        /// The state; `None` where there is no record.
        state: Option<StateName>,
    },
    /// The record was removed.
    Purged,
    /// There was no record, or its retention is not over.
    Kept,
}

/// Ownership, as a claim gives it.
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
    /// Nothing.
    Keep,
    /// This record, in place of what was there.
    Put(Record),
    /// Nothing is to be there any more.
    Delete,
}

/// The result of [`decide`]: the answer, and the write that must come before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The answer.
    pub outcome: Outcome,
    /// The write that must be durable before the answer is given.
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

/// The whole protocol: what `command` does to `record` at `now`, and what its sender hears.
#[must_use]
pub fn decide(record: Option<&Record>, command: &Command, now: Timestamp) -> Decision {
    // Rule 5: a record past its retention is absent. Only its token is still looked at, so that it goes on growing.
    let last_token = record.map(|r| r.token);
    let live = record.filter(|r| !r.is_expired(now));
    match command {
        Command::Claim(claim) => decide_claim(live, last_token, claim, now),
        Command::Renew(renew) => decide_renew(live, renew, now),
        Command::Step(step) => decide_step(live, step),
        Command::Complete(complete) => decide_complete(live, complete, now),
        Command::Release(release) => decide_release(live, release, now),
        Command::Resolve(resolve) => decide_resolve(live, resolve, now),
        Command::Purge => match (record, live) {
            (Some(_), None) => Decision { outcome: Outcome::Purged, write: Write::Delete },
            _ => Decision::keep(Outcome::Kept),
        },
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
        return Decision::keep(Outcome::Mismatch); // I5: changes no record
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
        State::Completed(Answer::Replayable(response)) => Decision::keep(Outcome::Replay(response.clone())),
        State::Completed(Answer::Awaited | Answer::Tombstone) => Decision::keep(Outcome::Unreplayable),
    }
}

/// Answers a claim while the lease of another attempt lasts.
///
/// If more than the longest lease is left, the lease was given before the store's clock was set back, and its owner may be dead.
/// The attempt then keeps the record for as long as its lease can have been, from now on: its owner may also be alive, and
/// renews within that time. A lease is no longer than the time from the claim to its end.
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

/// Gives ownership under a token greater than every one before (I6).
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

/// A token greater than every one before (I6).
fn next_token(last: Option<FencingToken>, now: Timestamp) -> FencingToken {
    FencingToken::new(last.map_or(0, |token| token.get().saturating_add(1)).max(now.as_millis()))
}

/// The same claim, sent again because its answer was lost: the same token, and the lease counts from now (rule 4).
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

/// A lease that ran out but was taken by nobody is renewed: its owner is alive, and to treat it as dead would only make
/// an unknown outcome of one that will be known.
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
        None if !record.steps.has_room_for(step) => Decision::keep(Outcome::StepsFull),
        None => {
            let record = Record { steps: record.steps.with(step.clone()), ..record.clone() };
            Decision::put(Outcome::StepRecorded, record)
        }
    }
}

fn decide_complete(live: Option<&Record>, complete: &Complete, now: Timestamp) -> Decision {
    let Some(record) = live.filter(|r| r.token == complete.token) else {
        return Decision::keep(Outcome::Fenced); // I6: a stale owner never overwrites
    };
    let state = match &complete.completion {
        Completion::Replayable(response) => State::Completed(Answer::Replayable(response.clone())),
        Completion::Awaited => State::Completed(Answer::Awaited),
        Completion::Tombstone => State::Completed(Answer::Tombstone),
        Completion::Unknown => State::Unknown,
    };
    match (&record.state, &state) {
        // Unknown became known after all: the owner under the current token says what happened.
        (State::InProgress { .. }, _) | (State::Unknown, State::Completed(_)) => {}
        // The answer that the owner's own transaction left out, added once.
        (State::Completed(Answer::Awaited), State::Completed(Answer::Replayable(_) | Answer::Tombstone)) => {}
        (before, after) if before == after => return Decision::keep(Outcome::Completed), // rule 4
        _ => return Decision::keep(Outcome::Fenced),
    }
    // An outcome that is not known may have to be found out and gone on with.
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
        // The steps stay: this answer may be taken back, and the next attempt must not begin again at the first.
        Resolution::Complete(response) => Record {
            state: State::Completed(response.clone().map_or(Answer::Tombstone, Answer::Replayable)),
            changed_at: now,
            expires_at: now.after(resolve.retention),
            ..record.clone()
        },
        Resolution::Release => released(record, resolve.retention, now),
        // Under a token of its own (rule 7), and never for a shorter time than nothing would have executed otherwise.
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

/// Whether an operator's word fits the record, which is in the state `from`.
fn may_resolve(record: &Record, from: StateName, resolve: &Resolve) -> bool {
    let is_amendment = resolve.amend && record.by_operator;
    match (&resolve.resolution, from) {
        // I8, rule 3: what its owner completed never changes.
        (Resolution::Park, StateName::Completed | StateName::Tombstone) => record.by_operator,
        (Resolution::Park, StateName::Released) => true,
        (Resolution::Park, _) => false,
        (_, StateName::Unknown | StateName::Abandoned) => !resolve.amend,
        (Resolution::Release, StateName::InProgress) => resolve.force && !resolve.amend,
        (_, StateName::Completed | StateName::Tombstone) => is_amendment,
        // Left half-way: what came of it is still to be said.
        (Resolution::Complete(_), StateName::Released) => {
            is_amendment || !resolve.amend && !record.steps.is_empty()
        }
        _ => false,
    }
}

/// A key that is free is remembered for its token only, and need not be for long. Finished steps are remembered for as long
/// as they were to be: whoever releases them need not know of them.
fn released(record: &Record, retention: Duration, now: Timestamp) -> Record {
    let mut expires_at = now.after(retention);
    if !record.steps.is_empty() {
        expires_at = expires_at.max(record.expires_at);
    }
    Record { state: State::Released, changed_at: now, expires_at, by_operator: false, ..record.clone() }
}
