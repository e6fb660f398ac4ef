//! Checks of the resolutions of operators, on a store with a clock of its own.

use std::time::Duration;

use oncegate_core::{
    AttemptId, AuditEntry, Claim, Command, Complete, Completion, FencingToken, Fingerprint, Forget, KeyTag,
    Label, ListQuery, OnAbandoned, Outcome, Record, RecordId, RecordStep, RecordedResponse, Release, Renew,
    Replacement, Resolution, Resolve, Rewrite, State, StateName, Step, Store, StoredResponse, limits,
};

use crate::block_on;

const MINUTE: Duration = Duration::from_secs(60);

/// Checks that an operator's resolution can be replaced and parked without losing steps, that a record that its owner completed
/// cannot, that a fenced owner stays fenced after a park, and that records are found by the tag of their key. Also that the
/// content of a record can be replaced and removed, and what its owner and its next claim get then.
///
/// The store must be empty.
///
/// # Panics
/// If the store fails the check.
pub fn check_operators<S: Store>(store: &S) {
    let mut desk = Desk { store, attempts: 0 };
    desk.takes_back_a_response();
    desk.holds_a_released_key();
    desk.keeps_what_an_owner_said();
    desk.amends();
    desk.keeps_steps();
    desk.finds_by_key();
    desk.rewrites();
    desk.forgets();
    desk.forgets_steps_for_good();
}

struct Desk<'a, S> {
    store: &'a S,
    attempts: u128,
}

impl<S: Store> Desk<'_, S> {
    fn apply(&self, id: RecordId, command: Command) -> Outcome {
        block_on(self.store.apply(id, command)).expect("the store answers")
    }

    fn claim(&mut self, id: RecordId) -> Outcome {
        self.attempts += 1;
        let claim = Claim {
            attempt: AttemptId::new(self.attempts),
            fingerprint: Fingerprint::of_parts("operators", &[b"same"]),
            lease: MINUTE,
            retention: MINUTE,
            on_abandoned: OnAbandoned::Park,
            label: Label::default().with_key(key_tag(id)),
        };
        self.apply(id, Command::Claim(claim))
    }

    fn owned(&mut self, id: RecordId) -> FencingToken {
        match self.claim(id) {
            Outcome::Execute(grant) => grant.token,
            other => panic!("the record is free, and a claim is answered {other:?}"),
        }
    }

    fn complete(&self, id: RecordId, token: FencingToken, completion: Completion) -> Outcome {
        self.apply(id, Command::Complete(Complete { token, completion, retention: MINUTE }))
    }

    /// A record whose outcome is unknown to its owner, and the owner's token.
    fn unknown(&mut self, n: u8) -> (RecordId, FencingToken) {
        let id = record_id(n);
        let token = self.owned(id);
        assert_eq!(self.complete(id, token, Completion::Unknown), Outcome::Completed);
        (id, token)
    }

    fn say(&self, id: RecordId, resolution: Resolution, amend: bool) -> Outcome {
        let (actor, reason) = ("ann".to_owned(), "seen in the ledger".to_owned());
        let force = true;
        let resolve = Resolve { resolution, retention: MINUTE, force, amend, actor, reason };
        self.apply(id, Command::Resolve(resolve))
    }

    fn resolve(&self, id: RecordId, resolution: Resolution) -> Outcome {
        self.say(id, resolution, false)
    }

    fn amend(&self, id: RecordId, resolution: Resolution) -> Outcome {
        self.say(id, resolution, true)
    }

    fn record(&self, id: RecordId) -> Record {
        block_on(self.store.lookup(id)).expect("the store answers").expect("the record is there")
    }

    /// Checks that the owner of this token can no longer change the record.
    fn is_fenced(&self, id: RecordId, token: FencingToken) {
        let before = self.record(id);
        let (lease, retention) = (MINUTE, MINUTE);
        let responses = [
            self.complete(id, token, Completion::Replayable(response(9))),
            self.complete(id, token, Completion::Unknown),
            self.apply(id, Command::Release(Release { token, retention })),
            self.apply(id, Command::Renew(Renew { token, lease, retention })),
        ];
        assert_eq!(responses, [const { Outcome::Fenced }; 4]);
        assert_eq!(self.record(id), before);
    }

    fn takes_back_a_response(&mut self) {
        for (n, first) in [(1, Some(response(1))), (2, None)] {
            let (id, token) = self.unknown(n);
            let resolved = self.resolve(id, Resolution::Complete(first.clone()));
            assert_eq!(resolved, Outcome::Resolved { from: StateName::Unknown });
            assert!(self.record(id).by_operator);
            let from = if first.is_some() { StateName::Completed } else { StateName::Tombstone };
            assert_eq!(self.resolve(id, Resolution::Park), Outcome::Resolved { from });
            assert_eq!(self.claim(id), Outcome::Unknown);
            let parked = self.record(id);
            assert!(parked.by_operator && parked.token > token, "{parked:?}");
            self.is_fenced(id, token);
            let again = Outcome::NotResolvable { state: Some(StateName::Unknown) };
            assert_eq!(self.resolve(id, Resolution::Park), again);
            assert_eq!(self.amend(id, Resolution::Release), again, "there is nothing to replace");
            let resolved = self.resolve(id, Resolution::Complete(Some(response(2))));
            assert_eq!(resolved, Outcome::Resolved { from: StateName::Unknown });
            assert_eq!(self.claim(id), Outcome::Replay(response(2)));
            self.is_fenced(id, token);
        }
        let trail = block_on(self.store.audit(None, 3)).expect("the store answers");
        let states: Vec<_> = trail.iter().rev().map(|entry| (entry.from, entry.to)).collect();
        assert_eq!(
            states,
            [
                (StateName::Unknown, StateName::Tombstone),
                (StateName::Tombstone, StateName::Unknown),
                (StateName::Unknown, StateName::Completed)
            ]
        );
    }

    fn holds_a_released_key(&mut self) {
        // Completed by an operator.
        let (id, first) = self.unknown(3);
        assert_eq!(self.resolve(id, Resolution::Release), Outcome::Resolved { from: StateName::Unknown });
        // Completed by its owner.
        let other = record_id(4);
        let second = self.owned(other);
        let release = Release { token: second, retention: MINUTE };
        assert_eq!(self.apply(other, Command::Release(release)), Outcome::Released);
        assert!(!self.record(other).by_operator);
        for (id, token) in [(id, first), (other, second)] {
            assert_eq!(self.resolve(id, Resolution::Park), Outcome::Resolved { from: StateName::Released });
            assert_eq!(self.claim(id), Outcome::Unknown);
            self.is_fenced(id, token);
            let parked = self.record(id).token;
            let released = self.resolve(id, Resolution::Release);
            assert_eq!(released, Outcome::Resolved { from: StateName::Unknown });
            let next = self.owned(id);
            assert!(next > parked && parked > token, "{token} {parked} {next}");
            assert!(!self.record(id).by_operator);
            assert_eq!(self.complete(id, token, Completion::Tombstone), Outcome::Fenced);
            // It has an owner again, which may be running.
            let in_progress = Outcome::NotResolvable { state: Some(StateName::InProgress) };
            assert_eq!(self.resolve(id, Resolution::Park), in_progress);
        }
    }

    fn keeps_what_an_owner_said(&mut self) {
        let completions = [Completion::Replayable(response(5)), Completion::Awaited, Completion::Tombstone];
        for (n, completion) in (5..).zip(completions) {
            let id = record_id(n);
            let token = self.owned(id);
            assert_eq!(self.complete(id, token, completion), Outcome::Completed);
            let before = self.record(id);
            assert!(!before.by_operator);
            let resolutions =
                [Resolution::Park, Resolution::Release, Resolution::Complete(Some(response(6)))];
            for (resolution, amend) in resolutions.into_iter().flat_map(|r| [(r.clone(), false), (r, true)]) {
                let result = self.say(id, resolution, amend);
                assert!(matches!(result, Outcome::NotResolvable { state: Some(_) }), "{result:?}");
            }
            assert_eq!(self.record(id), before);
        }
        // A release by its owner cannot be amended either.
        let id = record_id(8);
        let token = self.owned(id);
        assert_eq!(self.apply(id, Command::Release(Release { token, retention: MINUTE })), Outcome::Released);
        let released = Outcome::NotResolvable { state: Some(StateName::Released) };
        assert_eq!(self.amend(id, Resolution::Complete(None)), released);
        assert_eq!(self.resolve(record_id(99), Resolution::Park), Outcome::NotResolvable { state: None });
    }

    fn amends(&mut self) {
        let (id, token) = self.unknown(9);
        let completed = |n| Resolution::Complete(Some(response(n)));
        self.resolve(id, completed(1));
        // Another operator, who does not know of the first one.
        let raced = Outcome::NotResolvable { state: Some(StateName::Completed) };
        assert_eq!(self.resolve(id, completed(2)), raced);
        assert_eq!(self.claim(id), Outcome::Replay(response(1)));
        let from_completed = Outcome::Resolved { from: StateName::Completed };
        assert_eq!(self.amend(id, completed(2)), from_completed);
        assert_eq!(self.claim(id), Outcome::Replay(response(2)));
        assert_eq!(self.amend(id, Resolution::Complete(None)), from_completed);
        assert_eq!(self.claim(id), Outcome::Unreplayable);
        let from_tombstone = Outcome::Resolved { from: StateName::Tombstone };
        assert_eq!(self.amend(id, Resolution::Release), from_tombstone);
        let again = Outcome::NotResolvable { state: Some(StateName::Released) };
        assert_eq!(self.amend(id, Resolution::Release), again);
        assert_eq!(self.complete(id, token, Completion::Replayable(response(9))), Outcome::Fenced);
        assert_eq!(self.amend(id, completed(3)), Outcome::Resolved { from: StateName::Released });
        assert_eq!(self.claim(id), Outcome::Replay(response(3)));
        self.amend(id, Resolution::Release);
        assert!(self.owned(id) > token);
    }

    /// Checks that a resolution that is taken back leaves the steps: the next attempt continues after them.
    fn keeps_steps(&mut self) {
        let id = record_id(10);
        let token = self.owned(id);
        let step = Step::new("charge", vec![7; 3].into()).expect("it is within the limits");
        let record_step = RecordStep { token, number: 0, step: step.clone() };
        assert_eq!(self.apply(id, Command::Step(record_step)), Outcome::StepRecorded);
        assert_eq!(self.complete(id, token, Completion::Unknown), Outcome::Completed);
        self.resolve(id, Resolution::Complete(Some(response(1))));
        let completed = self.record(id);
        assert_eq!(completed.steps.as_slice(), std::slice::from_ref(&step));
        let mut query = ListQuery::default();
        query.key = key_tag(id);
        let page = block_on(self.store.list(query)).expect("the store answers");
        assert_eq!(page.records, [(id, completed)], "a listing has them, too");
        self.resolve(id, Resolution::Park);
        self.resolve(id, Resolution::Complete(None));
        self.amend(id, Resolution::Release);
        let next = self.owned(id);
        assert_eq!(self.record(id).steps.as_slice(), [step]);
        assert_eq!(self.complete(id, next, Completion::Tombstone), Outcome::Completed);
        assert!(self.record(id).steps.is_empty(), "they end with the completion of their owner");
    }

    fn rewrite(&self, id: RecordId, rewrite: &Rewrite) -> Outcome {
        self.apply(id, Command::Rewrite(rewrite.clone()))
    }

    /// Checks that only the content changes, only under the content that was read, and what an owner gets that is still running.
    fn rewrites(&mut self) {
        let (id, step) = (record_id(50), |result: &'static [u8]| {
            Step::new("charge", result.into()).expect("it is within the limits")
        });
        let token = self.owned(id);
        let record_step = Command::Step(RecordStep { token, number: 0, step: step(b"in clear") });
        assert_eq!(self.apply(id, record_step.clone()), Outcome::StepRecorded);
        let before = self.record(id);
        let mut rewrite = Rewrite::of(&before);
        assert!(rewrite.is_empty());
        assert_eq!(self.rewrite(id, &rewrite), Outcome::Rewritten);
        rewrite.step_results[0].to = b"sealed"[..].into();
        let stale = Rewrite { token: FencingToken::new(token.get() - 1), ..rewrite.clone() };
        let not_rewritten = |state| Outcome::NotRewritten { state: Some(state) };
        assert_eq!(self.rewrite(id, &stale), not_rewritten(StateName::InProgress));
        assert_eq!(self.record(id), before);
        assert_eq!(self.rewrite(id, &rewrite), Outcome::Rewritten);
        assert_eq!(self.rewrite(id, &rewrite), Outcome::Rewritten, "sent again");
        let after = self.record(id);
        assert_eq!(after.steps.as_slice(), [step(b"sealed")]);
        assert!(differs_in_content(&before, &after), "{before:?} {after:?}");
        // The owner goes on.
        let next = RecordStep { token, number: 1, step: step(b"next") };
        assert_eq!(self.apply(id, Command::Step(next)), Outcome::StepRecorded);
        assert_eq!(self.rewrite(id, &rewrite), not_rewritten(StateName::InProgress), "there is a step more");
        assert_eq!(self.complete(id, token, Completion::Replayable(response(1))), Outcome::Completed);
        assert_eq!(self.rewrite(id, &rewrite), not_rewritten(StateName::Completed));
        // A replay has the new response.
        let before = self.record(id);
        let mut rewrite = Rewrite::of(&before);
        rewrite.response = Some(Replacement { from: response(1), to: response(2) });
        let other =
            Rewrite { response: Some(Replacement { from: response(3), to: response(4) }), ..rewrite.clone() };
        assert_eq!(self.rewrite(id, &other), not_rewritten(StateName::Completed));
        assert_eq!(self.claim(id), Outcome::Replay(response(1)));
        assert_eq!(self.rewrite(id, &rewrite), Outcome::Rewritten);
        assert_eq!(self.claim(id), Outcome::Replay(response(2)));
        let after = self.record(id);
        assert!(differs_in_content(&before, &after), "{before:?} {after:?}");
        self.is_fenced(id, token);
        // Released with steps, unknown, and a record that is not there.
        let released = record_id(51);
        let token = self.owned(released);
        let record_step = RecordStep { token, number: 0, step: step(b"in clear") };
        assert_eq!(self.apply(released, Command::Step(record_step)), Outcome::StepRecorded);
        assert_eq!(
            self.apply(released, Command::Release(Release { token, retention: MINUTE })),
            Outcome::Released
        );
        let mut rewrite = Rewrite::of(&self.record(released));
        rewrite.step_results[0].to = b"sealed"[..].into();
        assert_eq!(self.rewrite(released, &rewrite), Outcome::Rewritten);
        assert_eq!(self.record(released).steps.as_slice(), [step(b"sealed")]);
        assert_eq!(self.rewrite(record_id(52), &rewrite), Outcome::NotRewritten { state: None });
        assert!(!trail(self.store).iter().any(|entry| [id, released].contains(&entry.id)), "no decision");
    }

    fn forget(&self, id: RecordId) -> Outcome {
        let (actor, reason) = ("bob".to_owned(), "asked for deletion".to_owned());
        self.apply(id, Command::Forget(Forget { actor, reason }))
    }

    /// Checks that a forgotten record keeps its protection, and that only a completed record is forgotten.
    fn forgets(&mut self) {
        let (id, awaited, open) = (record_id(60), record_id(61), record_id(62));
        let token = self.owned(id);
        let in_progress = Outcome::NotForgotten { state: Some(StateName::InProgress) };
        assert_eq!(self.forget(id), in_progress);
        assert_eq!(self.complete(id, token, Completion::Replayable(response(1))), Outcome::Completed);
        let before = self.record(id);
        let entries = trail(self.store).len();
        assert_eq!(self.forget(id), Outcome::Forgotten { from: StateName::Completed });
        let nothing_kept = Outcome::NotForgotten { state: Some(StateName::Tombstone) };
        assert_eq!(self.forget(id), nothing_kept, "sent again");
        assert_eq!(trail(self.store).len(), entries + 1);
        let entry = trail(self.store).remove(0);
        assert_eq!((entry.id, entry.from, entry.to), (id, StateName::Completed, StateName::Tombstone));
        assert_eq!((&*entry.actor, &*entry.reason), ("bob", "asked for deletion"));
        let after = self.record(id);
        assert_eq!(after.state, State::Completed(RecordedResponse::Tombstone));
        assert!(after.changed_at >= before.changed_at);
        assert!(differs_in_content(&before, &after), "its protection ends when it would have ended");
        assert_eq!(self.claim(id), Outcome::Unreplayable);
        self.is_fenced(id, token);
        let completed = Outcome::NotResolvable { state: Some(StateName::Tombstone) };
        for (resolution, amend) in [(Resolution::Park, false), (Resolution::Release, true)] {
            assert_eq!(self.say(id, resolution, amend), completed, "it is the owner's completion");
        }
        let other = Claim {
            attempt: AttemptId::new(u128::MAX),
            fingerprint: Fingerprint::of_parts("operators", &[b"other"]),
            lease: MINUTE,
            retention: MINUTE,
            on_abandoned: OnAbandoned::Reexecute,
            label: Label::default(),
        };
        assert_eq!(self.apply(id, Command::Claim(other)), Outcome::Mismatch);
        // An owner whose transaction has committed cannot add the response any more.
        let token = self.owned(awaited);
        assert_eq!(self.complete(awaited, token, Completion::Awaited), Outcome::Completed);
        assert_eq!(self.forget(awaited), Outcome::Forgotten { from: StateName::Tombstone });
        assert_eq!(self.complete(awaited, token, Completion::Replayable(response(1))), Outcome::Fenced);
        assert_eq!(self.claim(awaited), Outcome::Unreplayable);
        assert_eq!(self.forget(awaited), nothing_kept);
        // Their outcome is open, and the next attempt needs their steps.
        let token = self.owned(open);
        let step = Step::new("charge", vec![7; 3].into()).expect("it is within the limits");
        let record_step = RecordStep { token, number: 0, step };
        assert_eq!(self.apply(open, Command::Step(record_step)), Outcome::StepRecorded);
        assert_eq!(self.complete(open, token, Completion::Unknown), Outcome::Completed);
        assert_eq!(self.forget(open), Outcome::NotForgotten { state: Some(StateName::Unknown) });
        self.resolve(open, Resolution::Release);
        assert_eq!(self.forget(open), Outcome::NotForgotten { state: Some(StateName::Released) });
        assert_eq!(self.record(open).steps.len(), 1);
        assert_eq!(self.forget(record_id(63)), Outcome::NotForgotten { state: None });
    }

    /// Checks that an operator's completion without its steps is final, and one that never had steps is not.
    fn forgets_steps_for_good(&mut self) {
        for (n, has_steps) in [(64, false), (65, true)] {
            let id = record_id(n);
            let token = self.owned(id);
            if has_steps {
                let step = Step::new("charge", vec![7; 3].into()).expect("it is within the limits");
                let record_step = RecordStep { token, number: 0, step };
                assert_eq!(self.apply(id, Command::Step(record_step)), Outcome::StepRecorded);
            }
            assert_eq!(self.complete(id, token, Completion::Unknown), Outcome::Completed);
            self.resolve(id, Resolution::Complete(Some(response(1))));
            assert_eq!(self.forget(id), Outcome::Forgotten { from: StateName::Completed });
            assert!(self.record(id).steps.is_empty());
            let tombstone = StateName::Tombstone;
            let expected = if has_steps {
                Outcome::NotResolvable { state: Some(tombstone) }
            } else {
                Outcome::Resolved { from: tombstone }
            };
            assert_eq!(self.resolve(id, Resolution::Park), expected);
        }
    }

    fn finds_by_key(&mut self) {
        let ids = [record_id(20), record_id(21), record_id(40)];
        let [one, two, other] = ids;
        for id in ids {
            self.owned(id);
        }
        assert!(key_tag(one) == key_tag(two) && key_tag(one) != key_tag(other));
        let found = |key| {
            let mut found = Vec::new();
            let mut query = ListQuery::default();
            query.key = key;
            loop {
                let page = block_on(self.store.list(query.clone())).expect("the store answers");
                found.extend(page.records.iter().map(|(id, _)| *id));
                query.after = page.next;
                if page.next.is_none() {
                    found.sort_unstable();
                    return found;
                }
            }
        };
        assert_eq!(found(key_tag(one)), [one, two]);
        assert_eq!(found(key_tag(other)), [other]);
        assert_eq!(found(Some(KeyTag::from_bytes([0xee; 8]))), []);
    }
}

/// True if nothing differs but the response, the steps and the time of the change.
fn differs_in_content(before: &Record, after: &Record) -> bool {
    let mut same = after.clone();
    same.state = before.state.clone();
    same.steps = before.steps.clone();
    same.changed_at = before.changed_at;
    same == *before
}

/// The newest part of the audit trail.
fn trail<S: Store>(store: &S) -> Vec<AuditEntry> {
    block_on(store.audit(None, limits::MAX_PAGE_RECORDS)).expect("the store answers")
}

fn record_id(n: u8) -> RecordId {
    let mut bytes = [0xd0; 32];
    bytes[0] = n;
    RecordId::from_bytes(bytes)
}

/// The tag of a key that two records have.
fn key_tag(id: RecordId) -> Option<KeyTag> {
    Some(KeyTag::from_bytes([id.as_bytes()[0] / 2; 8]))
}

fn response(n: u8) -> StoredResponse {
    StoredResponse::new(201, &[], &[vec![n; 50].into()], &[]).expect("it is within the limits")
}
