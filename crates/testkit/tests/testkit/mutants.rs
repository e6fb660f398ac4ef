//! The test of the suite itself: it must find the bug in each of these stores.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_core::{
    AuditEntry, Capabilities, Claim, Clock as _, Command, Complete, Durability, Fencing, ListPage, ListQuery,
    Outcome, Record, RecordId, RecordedResponse, Release, State, StateName, Store, StoreError, StoreFuture,
    Timestamp, Write, decide,
};
use oncegate_testkit::ManualClock;
use oncegate_testkit::conformance::Suite;

/// The bug of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    CompletesWithoutToken,
    ReleasesWithoutToken,
    IgnoresFingerprint,
    TakesEveryClaimForTheOwner,
    ForgetsTokenOnRelease,
    ForgetsWhatAnOperatorDid,
    ParksUnderTheSameToken,
    ForgetsTheTagOfTheKey,
    PurgesWhatIsNotExpired,
    PurgesNothing,
    PurgesOneTooFew,
    ShowsExpired,
    KeepsOldExpiry,
    RewritesWithoutComparison,
    RewritesUnderAnyToken,
    RewritesTheExpiry,
    ForgetsWhatIsNotCompleted,
    ForgetsForLonger,
    ForgetsWithoutAudit,
    LosesAudit,
    DoublesAudit,
    ListsWithoutFilter,
    ListsOneRecordTwice,
    ListEndsEarly,
    ForgetsWhenClosed,
    AnswersBeforeItWrites,
    AnswersAtOnceWithoutWriting,
}

const BUGS: [Bug; 27] = [
    Bug::CompletesWithoutToken,
    Bug::ReleasesWithoutToken,
    Bug::IgnoresFingerprint,
    Bug::TakesEveryClaimForTheOwner,
    Bug::ForgetsTokenOnRelease,
    Bug::ForgetsWhatAnOperatorDid,
    Bug::ParksUnderTheSameToken,
    Bug::ForgetsTheTagOfTheKey,
    Bug::PurgesWhatIsNotExpired,
    Bug::PurgesNothing,
    Bug::PurgesOneTooFew,
    Bug::ShowsExpired,
    Bug::KeepsOldExpiry,
    Bug::RewritesWithoutComparison,
    Bug::RewritesUnderAnyToken,
    Bug::RewritesTheExpiry,
    Bug::ForgetsWhatIsNotCompleted,
    Bug::ForgetsForLonger,
    Bug::ForgetsWithoutAudit,
    Bug::LosesAudit,
    Bug::DoublesAudit,
    Bug::ListsWithoutFilter,
    Bug::ListsOneRecordTwice,
    Bug::ListEndsEarly,
    Bug::ForgetsWhenClosed,
    Bug::AnswersBeforeItWrites,
    Bug::AnswersAtOnceWithoutWriting,
];

#[derive(Default)]
struct Held {
    records: BTreeMap<RecordId, Record>,
    audit: Vec<AuditEntry>,
}

/// The simplest possible store, with one bug.
struct Mutant {
    bug: Bug,
    clock: Arc<ManualClock>,
    held: Arc<Mutex<Held>>,
}

impl Mutant {
    fn apply_now(&self, id: RecordId, mut command: Command) -> Outcome {
        let now = self.now();
        let mut held = self.held.lock().unwrap();
        let record = held.records.get(&id).cloned();
        let live = record.as_ref().filter(|r| !r.is_expired(now));
        self.spoil_command(live, &mut command);
        let mut decision = decide(record.as_ref(), &command, now);
        if let (Bug::ForgetsWhatIsNotCompleted, Command::Forget(_), Some(record)) = (self.bug, &command, live)
            && record.state == State::Unknown
        {
            let mut forgotten = record.clone();
            forgotten.state = State::Completed(RecordedResponse::Tombstone);
            decision.write = Write::Put(forgotten);
        }
        if self.bug == Bug::AnswersBeforeItWrites && matches!(decision.outcome, Outcome::Completed) {
            return decision.outcome;
        }
        match decision.write {
            Write::Keep => {}
            Write::Put(_)
                if self.bug == Bug::ForgetsTokenOnRelease && decision.outcome == Outcome::Released =>
            {
                held.records.remove(&id);
            }
            Write::Put(mut after) => {
                if let (Bug::KeepsOldExpiry, Some(before), Command::Complete(_)) =
                    (self.bug, &record, &command)
                {
                    after.expires_at = before.expires_at;
                }
                match (self.bug, &record, &command) {
                    (Bug::ForgetsWhatAnOperatorDid, ..) => after.by_operator = false,
                    (Bug::ForgetsTheTagOfTheKey, ..) => after.label = after.label.with_key(None),
                    (Bug::ParksUnderTheSameToken, Some(before), Command::Resolve(_)) => {
                        after.token = before.token;
                    }
                    (Bug::RewritesTheExpiry, _, Command::Rewrite(_))
                    | (Bug::ForgetsForLonger, _, Command::Forget(_)) => {
                        after.expires_at = after.expires_at.after(Duration::from_secs(1));
                    }
                    _ => {}
                }
                held.records.insert(id, after);
            }
        }
        let to = held.records.get(&id).map_or(StateName::Released, |record| record.state_name(now));
        if let Some(entry) = AuditEntry::of(id, &command, &decision.outcome, to, now) {
            let times = match self.bug {
                Bug::LosesAudit => 0,
                Bug::ForgetsWithoutAudit if matches!(command, Command::Forget(_)) => 0,
                Bug::DoublesAudit => 2,
                _ => 1,
            };
            for _ in 0..times {
                let number = held.audit.len() as u64 + 1;
                held.audit.push(AuditEntry { number, ..entry.clone() });
            }
        }
        decision.outcome
    }

    fn spoil_command(&self, live: Option<&Record>, command: &mut Command) {
        let Some(record) = live else { return };
        match (self.bug, command) {
            (Bug::CompletesWithoutToken, Command::Complete(Complete { token, .. }))
            | (Bug::ReleasesWithoutToken, Command::Release(Release { token, .. })) => *token = record.token,
            (Bug::RewritesUnderAnyToken, Command::Rewrite(rewrite)) => rewrite.token = record.token,
            (Bug::RewritesWithoutComparison, Command::Rewrite(rewrite)) => {
                if let (Some(part), Some(found)) = (&mut rewrite.response, record.response()) {
                    part.from = found.clone();
                }
                for (part, step) in rewrite.step_results.iter_mut().zip(record.steps.as_slice()) {
                    part.from = step.result().clone();
                }
            }
            (Bug::IgnoresFingerprint, Command::Claim(Claim { fingerprint, .. })) => {
                *fingerprint = record.fingerprint;
            }
            (Bug::TakesEveryClaimForTheOwner, Command::Claim(claim)) => {
                if let State::InProgress { attempt, .. } = record.state {
                    claim.attempt = attempt;
                }
            }
            _ => {}
        }
    }

    fn purge_now(&self, limit: usize) -> usize {
        let now = self.now();
        let early =
            if self.bug == Bug::PurgesWhatIsNotExpired { Duration::from_secs(1) } else { Duration::ZERO };
        let mut held = self.held.lock().unwrap();
        let due =
            held.records.iter().filter(|(_, record)| record.is_expired(now.after(early))).map(|(id, _)| *id);
        let due: Vec<_> = due.take(limit).collect();
        let count = match self.bug {
            Bug::PurgesNothing => 0,
            Bug::PurgesOneTooFew => due.len().saturating_sub(1),
            _ => due.len(),
        };
        for id in due.iter().take(count) {
            held.records.remove(id);
        }
        count
    }

    fn list_now(&self, query: &ListQuery) -> ListPage {
        let now = self.now();
        let held = self.held.lock().unwrap();
        let shown = |id: &RecordId, record: &Record| {
            query.after.is_none_or(|after| {
                if self.bug == Bug::ListsOneRecordTwice { *id >= after } else { *id > after }
            }) && (query.matches(record, now)
                || self.bug == Bug::ListsWithoutFilter && !record.is_expired(now))
        };
        let mut records: Vec<_> = held
            .records
            .iter()
            .filter(|(id, record)| shown(id, record))
            .map(|(id, record)| (*id, record.clone()))
            .collect();
        let more = records.len() > query.bounded_limit() && self.bug != Bug::ListEndsEarly;
        records.truncate(query.bounded_limit());
        let next = records.last().map(|(id, _)| *id).filter(|_| more);
        ListPage { records, unreadable: Vec::new(), next }
    }
}

impl Store for Mutant {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        let outcome = self.apply_now(id, command);
        Box::pin(async move { Ok(outcome) })
    }

    fn try_apply(&self, id: RecordId, command: &Command) -> Option<Result<Outcome, StoreError>> {
        if self.bug == Bug::AnswersAtOnceWithoutWriting {
            let held = self.held.lock().unwrap();
            return Some(Ok(decide(held.records.get(&id), command, self.now()).outcome));
        }
        None
    }

    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        let now = self.now();
        let record = self.held.lock().unwrap().records.get(&id).cloned();
        let shown = record.filter(|record| !record.is_expired(now) || self.bug == Bug::ShowsExpired);
        Box::pin(async move { Ok(shown) })
    }

    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage> {
        let page = self.list_now(&query);
        Box::pin(async move { Ok(page) })
    }

    fn purge(&self, limit: usize) -> StoreFuture<'_, usize> {
        let purged = self.purge_now(limit);
        Box::pin(async move { Ok(purged) })
    }

    fn audit(&self, before: Option<u64>, limit: usize) -> StoreFuture<'_, Vec<AuditEntry>> {
        let held = self.held.lock().unwrap();
        let newest_first = held.audit.iter().rev();
        let entries =
            newest_first.filter(|e| before.is_none_or(|b| e.number < b)).take(limit).cloned().collect();
        Box::pin(async move { Ok(entries) })
    }

    fn check(&self) -> StoreFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    fn now(&self) -> Timestamp {
        self.clock.now()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new("mutant", Durability::Synced, Fencing::Monotonic)
    }
}

fn check(bug: Bug) {
    Suite::new().with_cases(2000).check(|| {
        let held = Arc::new(Mutex::new(Held::default()));
        move |clock: Arc<ManualClock>| {
            if bug == Bug::ForgetsWhenClosed {
                held.lock().unwrap().records.clear();
            }
            Mutant { bug, clock, held: held.clone() }
        }
    });
}

#[test]
fn a_store_without_a_bug_passes() {
    check(Bug::None);
}

#[test]
fn every_bug_is_found() {
    let missed: Vec<_> =
        BUGS.into_iter().filter(|bug| catch_unwind(AssertUnwindSafe(|| check(*bug))).is_ok()).collect();
    assert!(missed.is_empty(), "not found: {missed:?}");
}
