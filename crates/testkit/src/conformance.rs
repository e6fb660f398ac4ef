//! The conformance suite of stores.
//!
//! The suite sends random sequences of commands on a few records to a store: first claims and claims that are sent again;
//! renewals, steps, completions and releases with current, stale and invented tokens; an operator's resolutions; replacements and
//! removals of content; purges and listings. The clock moves by a millisecond, to the edge of a lease, or past everything. A
//! durable store is also closed and opened again. After each step the suite checks:
//!
//! 1. The outcome equals that of [`decide`] on a plain map.
//! 2. All records, the listing and the audit trail equal the content of the map.
//! 3. The invariants of GUARANTEES.md hold, checked without [`decide`]: the tokens of a record grow strictly, even over
//!    releases, expiries and purges (I6); states never go backwards, and a completed record never changes (I8), except for its
//!    content by the commands that are for that, which change nothing else; a reply without a change leaves the record
//!    unchanged (I5); a purge removes only expired records (I10), and in the end all of them.
//!
//! Every second command is sent by [`Store::try_apply`] first, as long as the store answers it.
//!
//! The store's time must be that of the clock that it was opened with, or ahead of it by a constant.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::{
    AttemptId, AuditEntry, CallerTag, Claim, Command, Complete, Completion, Durability, ErrorChain,
    FencingToken, Fingerprint, Forget, KeyTag, Label, ListPage, ListQuery, OnAbandoned, Outcome, Record,
    RecordId, RecordStep, RecordedResponse, Release, Renew, Replacement, Resolution, Resolve, Rewrite, State,
    StateName, StateSet, Step, Store, StoreError, StoredResponse, Timestamp, Write, decide, limits,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};

use crate::block_on;
use crate::clock::ManualClock;
pub use crate::clock_set_back::check_clock_set_back;
pub use crate::operators::check_operators;

/// The time by which a purge may be late, counted from the latest expiry that a record ever had.
const PURGE_GRACE: Duration = Duration::from_secs(2);

/// The suite that holds a store to the protocol.
#[derive(Clone, Debug)]
pub struct Suite {
    cases: u32,
    steps: usize,
    own_expiry: bool,
    expiry_at_open: bool,
    any_order: bool,
}

impl Default for Suite {
    fn default() -> Self {
        Self::new()
    }
}

impl Suite {
    /// 256 sequences of up to 60 steps.
    #[must_use]
    pub const fn new() -> Self {
        Self { cases: 256, steps: 60, own_expiry: false, expiry_at_open: false, any_order: false }
    }

    /// Sets the number of sequences.
    #[must_use]
    pub const fn with_cases(mut self, cases: u32) -> Self {
        self.cases = cases;
        self
    }

    /// Sets the largest number of steps in a sequence.
    #[must_use]
    pub const fn with_steps(mut self, steps: usize) -> Self {
        self.steps = steps;
        self
    }

    /// Accepts a store that removes expired records by itself, so that a purge has nothing to do and returns zero.
    #[must_use]
    pub const fn with_own_expiry(mut self) -> Self {
        self.own_expiry = true;
        self
    }

    /// Accepts a store that may remove expired records when it is opened.
    #[must_use]
    pub const fn with_expiry_at_open(mut self) -> Self {
        self.expiry_at_open = true;
        self
    }

    /// Accepts a store that lists records in an order of its own.
    #[must_use]
    pub const fn with_any_order(mut self) -> Self {
        self.any_order = true;
        self
    }

    /// Runs the sequences. `make` is called for each. Its result opens the store. If the store is [`Durability::Synced`], it is
    /// also dropped and opened again, and must then have the same records.
    ///
    /// # Panics
    /// If the store fails, with the shortest failing sequence that was found and the expected result.
    pub fn check<S, M, O>(&self, make: M)
    where
        S: Store,
        M: Fn() -> O,
        O: Fn(Arc<ManualClock>) -> S,
    {
        let config = Config { cases: self.cases, failure_persistence: None, ..Config::default() };
        let steps = vec(step(), 1..=self.steps);
        let result = TestRunner::new(config).run(&steps, |steps| {
            let clock = Arc::new(ManualClock::at_millis(START_MILLIS));
            let mut run = Run::new(make(), clock, self);
            for step in steps {
                run.step(&step).map_err(|what| TestCaseError::fail(format!("at {step:?}: {what}")))?;
            }
            run.finish().map_err(TestCaseError::fail)
        });
        match result {
            Ok(()) => {}
            Err(TestError::Fail(why, steps)) => {
                let steps: Vec<_> = steps.iter().map(|step| format!("  {step:?}\n")).collect();
                panic!("the store does not conform: {why}\nafter the steps\n{}", steps.concat());
            }
            Err(TestError::Abort(why)) => panic!("the suite gave up: {why}"),
        }
    }
}

/// Checks that of many threads that claim one record at once, one executes and the others get `InProgress`, and that all get
/// its response after its completion.
///
/// # Panics
/// If the store fails the check.
pub fn check_concurrent_claims<S: Store>(store: &S, rounds: u8, threads: u8) {
    for round in 0..rounds {
        let id = RecordId::from_bytes([round; 32]);
        let claim_all = || -> Vec<Outcome> {
            std::thread::scope(|scope| {
                let claimants: Vec<_> = (0..threads)
                    .map(|n| {
                        let claim = Command::Claim(Claim {
                            attempt: AttemptId::new(u128::from(n)),
                            fingerprint: Fingerprint::of_parts("conformance", &[b"same"]),
                            lease: Duration::from_secs(60),
                            retention: Duration::from_secs(60),
                            on_abandoned: OnAbandoned::Park,
                            label: Label::default(),
                        });
                        let at_once = n % 2 == 1;
                        scope.spawn(move || apply(store, at_once, id, claim).expect("the store answers"))
                    })
                    .collect();
                claimants.into_iter().map(|c| c.join().expect("no panic")).collect()
            })
        };
        let first = claim_all();
        let grants: Vec<_> = first.iter().filter_map(granted).collect();
        assert_eq!(grants.len(), 1, "exactly one claimant executes: {first:?}");
        let others = first.iter().filter(|outcome| matches!(outcome, Outcome::InProgress { .. })).count();
        assert_eq!(others, usize::from(threads) - 1, "the others wait: {first:?}");
        let complete = Command::Complete(Complete {
            token: grants[0],
            completion: Completion::Replayable(response(round)),
            retention: Duration::from_secs(60),
        });
        assert_eq!(block_on(store.apply(id, complete)).expect("the store answers"), Outcome::Completed);
        for outcome in claim_all() {
            assert_eq!(outcome, Outcome::Replay(response(round)));
        }
    }
}

/// Checks the limits on the steps of a record: their number and their bytes, also when they are rewritten. A record at a
/// limit must remain usable. A record that was released with steps must not be free for another request, and an operator must
/// be able to complete it.
///
/// # Panics
/// If the store fails the check.
pub fn check_steps<S: Store>(store: &S) {
    let minute = Duration::from_secs(60);
    let apply = |id, command| block_on(store.apply(id, command)).expect("the store answers");
    let owned = |n: u8| {
        let id = RecordId::from_bytes([n; 32]);
        let claim = Claim {
            attempt: AttemptId::new(u128::from(n)),
            fingerprint: Fingerprint::of_parts("conformance", &[b"same"]),
            lease: minute,
            retention: minute,
            on_abandoned: OnAbandoned::Park,
            label: Label::default(),
        };
        (id, granted(&apply(id, Command::Claim(claim))).expect("the record is free"))
    };
    let step = |bytes: usize| Step::new("s", Bytes::from(vec![7; bytes])).expect("it is within the limits");
    let record = |(id, token), number, step| apply(id, Command::Step(RecordStep { token, number, step }));
    let many = owned(0xe0);
    for number in 0..limits::MAX_STEPS {
        assert_eq!(record(many, number, step(1)), Outcome::StepRecorded, "step {number}");
    }
    assert_eq!(record(many, limits::MAX_STEPS, step(0)), Outcome::StepsFull);
    assert_eq!(record(many, limits::MAX_STEPS - 1, step(1)), Outcome::StepRecorded, "sent again");
    let large = owned(0xe1);
    let half = limits::MAX_STEPS_BYTES / 2;
    assert_eq!(record(large, 0, step(half)), Outcome::StepRecorded);
    assert_eq!(record(large, 1, step(half - 1)), Outcome::StepsFull, "with the bytes of both names");
    assert_eq!(record(large, 1, step(half - 2)), Outcome::StepRecorded);
    assert_eq!(record(large, 2, step(0)), Outcome::StepsFull);
    // A rewrite may fill the record, and not more.
    let rewritten = |step_results| {
        apply(large.0, Command::Rewrite(Rewrite { token: large.1, response: None, step_results }))
    };
    let results = |from: [usize; 2], to: [usize; 2]| {
        let part = |(from, to)| Replacement {
            from: vec![7; from].into(),
            to: vec![if from == to { 7 } else { 8 }; to].into(),
        };
        from.into_iter().zip(to).map(part).collect::<Vec<Replacement<Bytes>>>()
    };
    let state = Some(StateName::InProgress);
    let now = [half, half - 2];
    assert_eq!(rewritten(results(now, [half + 1, half - 2])), Outcome::NotRewritten { state });
    assert_eq!(rewritten(results(now, [half - 1, half - 2])), Outcome::Rewritten);
    assert_eq!(record(large, 2, step(0)), Outcome::StepRecorded, "there is space for a name");
    // Released half-way: it is not free for another request, and an operator may resolve it.
    let left = owned(0xe2);
    assert_eq!(record(left, 0, step(1)), Outcome::StepRecorded);
    let expires_at =
        |id| block_on(store.lookup(id)).expect("the store answers").map(|record| record.expires_at);
    let before = expires_at(left.0);
    let release = Release { token: left.1, retention: Duration::from_secs(1) };
    assert_eq!(apply(left.0, Command::Release(release)), Outcome::Released);
    assert!(expires_at(left.0) >= before, "its steps are kept for as long as before");
    let other = Claim {
        attempt: AttemptId::new(1),
        fingerprint: Fingerprint::of_parts("conformance", &[b"other"]),
        lease: minute,
        retention: minute,
        on_abandoned: OnAbandoned::Park,
        label: Label::default(),
    };
    assert_eq!(apply(left.0, Command::Claim(other)), Outcome::Mismatch);
    let resolve = |resolution| {
        let (actor, reason) = ("ann".to_owned(), "seen to by hand".to_owned());
        let (force, amend) = (false, false);
        Command::Resolve(Resolve { resolution, retention: minute, force, amend, actor, reason })
    };
    let state = Some(StateName::Released);
    assert_eq!(apply(left.0, resolve(Resolution::Release)), Outcome::NotResolvable { state });
    let resolved = Outcome::Resolved { from: StateName::Released };
    assert_eq!(apply(left.0, resolve(Resolution::Complete(None))), resolved);
    for ((id, token), steps) in [(many, limits::MAX_STEPS), (large, 3)] {
        let found = block_on(store.lookup(id)).expect("the store answers").expect("it is there");
        assert_eq!(found.steps.len(), steps);
        let complete = Complete { token, completion: Completion::Tombstone, retention: minute };
        assert_eq!(apply(id, Command::Complete(complete)), Outcome::Completed);
        let found = block_on(store.lookup(id)).expect("the store answers").expect("it is there");
        assert!(found.steps.is_empty(), "steps end with the completion");
    }
}

const START_MILLIS: u64 = 1_700_000_000_000;
const RECORDS: u8 = 4;

#[derive(Clone, Debug)]
enum Act {
    Claim {
        on: u8,
        again: bool,
        input: u8,
        lease: Duration,
        retention: Duration,
        abandoned: OnAbandoned,
    },
    Renew {
        on: u8,
        token: Token,
        lease: Duration,
        retention: Duration,
    },
    Complete {
        on: u8,
        token: Token,
        completion: u8,
        retention: Duration,
    },
    Step {
        on: u8,
        token: Token,
        /// The offset from the number of the next step.
        number: i8,
        result: u8,
    },
    Release {
        on: u8,
        token: Token,
        retention: Duration,
    },
    Resolve {
        on: u8,
        resolution: u8,
        force: bool,
        amend: bool,
        retention: Duration,
    },
    Rewrite {
        on: u8,
        token: Token,
        expects: Expects,
        /// The new content.
        content: u8,
    },
    Forget {
        on: u8,
    },
    Purge {
        limit: usize,
    },
    List {
        states: StateSet,
        caller: Option<u8>,
        key: Option<u8>,
        operation: Option<u8>,
        min_age: Duration,
        limit: usize,
    },
    Advance {
        by: Duration,
    },
    ToLeaseEnd {
        on: u8,
        plus: u64,
    },
    Reopen,
}

/// The owner of the token that a command shows.
#[derive(Clone, Copy, Debug)]
enum Token {
    Current,
    /// A token that was current before.
    Stale,
    /// A token that was never given out.
    Invented,
}

/// The content that a rewrite expects.
#[derive(Clone, Copy, Debug)]
enum Expects {
    /// That of the record.
    Same,
    /// Another response, or another result of the last step.
    Other,
    /// One step more than the record has, or none.
    OtherSteps,
    /// A response if the record has none.
    OtherForm,
}

fn step() -> impl Strategy<Value = Act> {
    let on = 0..RECORDS;
    let token = prop_oneof![6 => Just(Token::Current), 2 => Just(Token::Stale), 1 => Just(Token::Invented)];
    let seconds = |choices: &'static [u64]| prop::sample::select(choices).prop_map(Duration::from_millis);
    let lease = || seconds(&[100, 1000, 30_000]);
    let retention = || seconds(&[1000, 10_000, 60_000]);
    let abandoned =
        prop::sample::select(&[OnAbandoned::Park, OnAbandoned::Reexecute, OnAbandoned::Reconcile][..]);
    let states = prop::option::of(prop::sample::subsequence(&StateName::ALL[..], 1..=StateName::ALL.len()));
    let states = states.prop_map(|some| some.map_or(StateSet::ALL, |some| some.into_iter().collect()));
    prop_oneof![
        10 => (on.clone(), prop::bool::weighted(0.2), 0..8_u8, lease(), retention(), abandoned).prop_map(
            |(on, again, input, lease, retention, abandoned)| Act::Claim {
                on,
                again,
                input: u8::from(input == 0),
                lease,
                retention,
                abandoned,
            }
        ),
        2 => (on.clone(), token.clone(), lease(), retention())
            .prop_map(|(on, token, lease, retention)| Act::Renew { on, token, lease, retention }),
        6 => (on.clone(), token.clone(), 0..5_u8, retention())
            .prop_map(|(on, token, completion, retention)| Act::Complete { on, token, completion, retention }),
        4 => (on.clone(), token.clone(), prop_oneof![6 => Just(0_i8), 2 => Just(-1), 1 => Just(1)], 0..3_u8)
            .prop_map(|(on, token, number, result)| Act::Step { on, token, number, result }),
        3 => (on.clone(), token, retention())
            .prop_map(|(on, token, retention)| Act::Release { on, token, retention }),
        6 => (on.clone(), 0..6_u8, any::<bool>(), prop::bool::weighted(0.4), retention()).prop_map(
            |(on, resolution, force, amend, retention)| Act::Resolve { on, resolution, force, amend, retention }
        ),
        6 => (
            on.clone(),
            prop_oneof![8 => Just(Token::Current), 1 => Just(Token::Stale), 1 => Just(Token::Invented)],
            prop_oneof![
                8 => Just(Expects::Same),
                1 => Just(Expects::Other),
                1 => Just(Expects::OtherSteps),
                1 => Just(Expects::OtherForm)
            ],
            0..3_u8
        )
            .prop_map(|(on, token, expects, content)| Act::Rewrite { on, token, expects, content }),
        3 => on.clone().prop_map(|on| Act::Forget { on }),
        3 => (0..4_usize).prop_map(|limit| Act::Purge { limit }),
        1 => (
            states,
            prop::option::of(0..2_u8),
            prop::option::of(0..3_u8),
            prop::option::of(0..2_u8),
            seconds(&[0, 0, 1000]),
            1..4_usize,
        )
            .prop_map(|(states, caller, key, operation, min_age, limit)| Act::List {
                states,
                caller,
                key,
                operation,
                min_age,
                limit,
            }),
        5 => seconds(&[1, 99, 100, 101, 999, 1000, 2000, 11_000, 61_000, 100_000])
            .prop_map(|by| Act::Advance { by }),
        3 => (on, 0..3_u64).prop_map(|(on, plus)| Act::ToLeaseEnd { on, plus }),
        1 => Just(Act::Reopen),
    ]
}

/// Applies a command, `at_once` if that is asked for and the store can.
fn apply<S: Store>(store: &S, at_once: bool, id: RecordId, command: Command) -> Result<Outcome, StoreError> {
    let reply = if at_once { store.try_apply(id, &command) } else { None };
    reply.unwrap_or_else(|| block_on(store.apply(id, command)))
}

/// One sequence: the store, and its expected content.
struct Run<S, O> {
    open: O,
    store: Option<S>,
    /// True if the next command is sent by `try_apply` first.
    at_once: bool,
    clock: Arc<ManualClock>,
    suite: Suite,
    records: HashMap<RecordId, Entry>,
    seen: HashMap<RecordId, Seen>,
    audit: Vec<AuditEntry>,
    attempts: u128,
}

/// The expected record.
struct Entry {
    record: Record,
    /// The latest expiry that it ever had.
    latest_expiry: Timestamp,
    /// True if a purge may have removed it: it is expired, and the purge did not remove all expired records.
    maybe_purged: bool,
}

/// The facts about a record that were seen over its whole history.
#[derive(Default)]
struct Seen {
    tokens: Vec<FencingToken>,
    last_claim: Option<Claim>,
}

type Checked = Result<(), String>;

macro_rules! ensure {
    ($condition:expr, $($what:tt)+) => {
        if !$condition {
            return Err(format!($($what)+));
        }
    };
}

impl<S: Store, O: Fn(Arc<ManualClock>) -> S> Run<S, O> {
    fn new(open: O, clock: Arc<ManualClock>, suite: &Suite) -> Self {
        let store = Some(open(clock.clone()));
        Self {
            open,
            store,
            at_once: false,
            clock,
            suite: suite.clone(),
            records: HashMap::new(),
            seen: HashMap::new(),
            audit: Vec::new(),
            attempts: 0,
        }
    }

    fn store(&self) -> &S {
        self.store.as_ref().expect("the store is open between steps")
    }

    fn now(&self) -> Timestamp {
        self.store().now()
    }

    fn step(&mut self, step: &Act) -> Checked {
        match step {
            Act::List { states, caller, key, operation, min_age, limit } => {
                let mut query = ListQuery::default();
                query.states = *states;
                query.caller = caller.map(caller_tag);
                query.key = key.and_then(key_tag);
                query.operation = operation.map(|n| if n == 0 { "POST".to_owned() } else { operation_of(1) });
                query.min_age = *min_age;
                query.limit = *limit;
                self.check_listing(&query)?;
            }
            Act::Purge { limit } => self.purge(*limit)?,
            Act::Advance { by } => self.clock.advance(*by),
            Act::ToLeaseEnd { on, plus } => {
                let record = self.records.get(&id(*on)).map(|entry| &entry.record.state);
                if let Some(State::InProgress { lease_until, .. }) = record {
                    let left = lease_until.since(self.now());
                    self.clock.advance((left + Duration::from_millis(*plus)).saturating_sub(ONE_MILLI));
                }
            }
            Act::Reopen => self.reopen(),
            command => {
                let (id, command) = self.command(command);
                self.apply(id, &command)?;
            }
        }
        self.check_all()
    }

    fn reopen(&mut self) {
        if self.store().capabilities().durability == Durability::Synced {
            self.store = None;
            self.store = Some((self.open)(self.clock.clone()));
            if self.suite.expiry_at_open {
                let now = self.now();
                for entry in self.records.values_mut() {
                    entry.maybe_purged |= entry.record.is_expired(now);
                }
            }
        }
    }

    /// The command of a step, with the tokens and attempts that are known so far.
    fn command(&mut self, step: &Act) -> (RecordId, Command) {
        let token = |seen: Option<&Seen>, token: &Token| {
            let tokens = seen.map_or(&[][..], |seen| &seen.tokens);
            let invented = FencingToken::new(START_MILLIS * 2);
            match token {
                Token::Current => tokens.last().copied().unwrap_or(invented),
                Token::Stale => tokens.iter().rev().nth(1).copied().unwrap_or(invented),
                Token::Invented => invented,
            }
        };
        match step {
            Act::Claim { on, again, input, lease, retention, abandoned } => {
                self.attempts += 1;
                let mut claim = Claim {
                    attempt: AttemptId::new(self.attempts),
                    fingerprint: Fingerprint::of_parts("conformance", &[&[*input]]),
                    lease: *lease,
                    retention: *retention,
                    on_abandoned: *abandoned,
                    // Some claims have no tag of the key.
                    label: Label::new(caller_tag(*on % 2), &operation_of(*on))
                        .with_key(key_tag((*on + input) % 3)),
                };
                let seen = self.seen.entry(id(*on)).or_default();
                if let Some(last) = seen.last_claim.as_ref().filter(|_| *again) {
                    claim.attempt = last.attempt;
                    claim.fingerprint = last.fingerprint;
                }
                seen.last_claim = Some(claim.clone());
                (id(*on), Command::Claim(claim))
            }
            Act::Renew { on, token: whose, lease, retention } => {
                let token = token(self.seen.get(&id(*on)), whose);
                (id(*on), Command::Renew(Renew { token, lease: *lease, retention: *retention }))
            }
            Act::Complete { on, token: whose, completion, retention } => {
                let token = token(self.seen.get(&id(*on)), whose);
                let completion = match completion {
                    0 => Completion::Awaited,
                    1 => Completion::Tombstone,
                    2 => Completion::Unknown,
                    n => Completion::Replayable(response(*n)),
                };
                (id(*on), Command::Complete(Complete { token, completion, retention: *retention }))
            }
            Act::Step { on, token: whose, number, result } => {
                let token = token(self.seen.get(&id(*on)), whose);
                let known = self.records.get(&id(*on)).map_or(0, |entry| entry.record.steps.len());
                let number = known.saturating_add_signed(isize::from(*number));
                (id(*on), Command::Step(RecordStep { token, number, step: step_of(*result) }))
            }
            Act::Release { on, token: whose, retention } => {
                let token = token(self.seen.get(&id(*on)), whose);
                (id(*on), Command::Release(Release { token, retention: *retention }))
            }
            Act::Resolve { on, resolution, force, amend, retention } => {
                let resolution = match resolution {
                    0 => Resolution::Release,
                    1 => Resolution::Complete(None),
                    2 | 3 => Resolution::Park,
                    n => Resolution::Complete(Some(response(*n))),
                };
                let (actor, reason) = (format!("operator {on}"), "confirmed by the bank".to_owned());
                let resolve = Resolve {
                    resolution,
                    retention: *retention,
                    force: *force,
                    amend: *amend,
                    actor,
                    reason,
                };
                (id(*on), Command::Resolve(resolve))
            }
            Act::Rewrite { on, token: whose, expects, content } => {
                let token = token(self.seen.get(&id(*on)), whose);
                let record = self.records.get(&id(*on)).map(|entry| &entry.record);
                // A parked record has a token of its own, which no claim got.
                let token = record.filter(|_| matches!(whose, Token::Current)).map_or(token, |r| r.token);
                (id(*on), Command::Rewrite(rewrite(record, token, *expects, *content)))
            }
            Act::Forget { on } => {
                let (actor, reason) = (format!("operator {on}"), "asked for by the customer".to_owned());
                (id(*on), Command::Forget(Forget { actor, reason }))
            }
            Act::Purge { .. }
            | Act::List { .. }
            | Act::Advance { .. }
            | Act::ToLeaseEnd { .. }
            | Act::Reopen => unreachable!("not a command"),
        }
    }

    fn apply(&mut self, id: RecordId, command: &Command) -> Checked {
        let now = self.now();
        let before = self.lookup(id)?;
        self.at_once = !self.at_once;
        let outcome = apply(self.store(), self.at_once, id, command.clone()).map_err(in_words)?;
        let entry = self.records.get(&id);
        let decision = decide(entry.map(|entry| &entry.record), command, now);
        ensure!(outcome == decision.outcome, "answered {outcome:?}, expected {:?}", decision.outcome);
        match decision.write {
            Write::Keep => {}
            Write::Put(record) => {
                let latest =
                    entry.map_or(record.expires_at, |entry| entry.latest_expiry.max(record.expires_at));
                self.records.insert(id, Entry { record, latest_expiry: latest, maybe_purged: false });
            }
        }
        let (from, by) = match (command, &outcome) {
            (Command::Resolve(by), Outcome::Resolved { from }) => (Some(*from), (&by.actor, &by.reason)),
            (Command::Forget(by), Outcome::Forgotten { from }) => (Some(*from), (&by.actor, &by.reason)),
            _ => (None, (&String::new(), &String::new())),
        };
        if let Some(from) = from {
            let to = self.records.get(&id).map(|entry| entry.record.state_name(now));
            self.audit.push(AuditEntry {
                number: self.audit.len() as u64 + 1,
                at: now,
                id,
                from,
                to: to.ok_or("a changed record is there")?,
                actor: by.0.clone(),
                reason: by.1.clone(),
            });
        }
        let after = self.lookup(id)?;
        self.check_invariants(id, command, &outcome, before.as_ref(), after.as_ref())
    }

    /// Checks the invariants that do not depend on `decide`.
    fn check_invariants(
        &mut self,
        id: RecordId,
        command: &Command,
        outcome: &Outcome,
        before: Option<&Record>,
        after: Option<&Record>,
    ) -> Checked {
        if let Some(token) = granted(outcome) {
            let seen = self.seen.entry(id).or_default();
            let same_attempt = before.is_some_and(|before| before.token == token);
            ensure!(
                same_attempt || seen.tokens.iter().all(|earlier| *earlier < token),
                "I6: token {token} does not exceed every earlier one of {:?}",
                seen.tokens
            );
            if !same_attempt {
                seen.tokens.push(token);
            }
            ensure!(after.is_some_and(|after| after.token == token), "I6: the granted token is the record's");
        }
        let is_unchanged = matches!(
            outcome,
            Outcome::Mismatch
                | Outcome::Fenced
                | Outcome::InProgress { .. }
                | Outcome::Replay(_)
                | Outcome::Unreplayable
                | Outcome::NotResolvable { .. }
                | Outcome::StepDiffers
                | Outcome::StepsFull
                | Outcome::NotRewritten { .. }
                | Outcome::NotForgotten { .. }
        );
        ensure!(!is_unchanged || before == after, "I5: {outcome:?} changed {before:?} into {after:?}");
        if let (Some(before), Some(after)) = (before, after) {
            let is_allowed = match command {
                Command::Rewrite(_) => is_rewritten(before, after),
                Command::Forget(_) => before == after || is_forgotten(before, after),
                _ => may_follow(before, after),
            };
            ensure!(is_allowed, "I8: {before:?} became {after:?}");
        }
        Ok(())
    }

    fn purge(&mut self, limit: usize) -> Checked {
        let now = self.now();
        let purged = block_on(self.store().purge(limit)).map_err(in_words)?;
        if self.suite.own_expiry {
            ensure!(purged == 0, "I10: purged {purged} of a store that removes expired records by itself");
            for entry in self.records.values_mut() {
                entry.maybe_purged |= entry.record.is_expired(now);
            }
            return Ok(());
        }
        let overdue = |entry: &Entry| now >= entry.latest_expiry.after(PURGE_GRACE);
        let must = |entry: &&Entry| overdue(entry) && !entry.maybe_purged;
        let least = self.records.values().filter(must).count().min(limit);
        let expired = self.records.values().filter(|entry| entry.record.is_expired(now)).count();
        let most = expired.min(limit);
        ensure!((least..=most).contains(&purged), "I10: purged {purged}, expected {least} to {most}");
        if purged == expired {
            self.records.retain(|_, entry| !entry.record.is_expired(now));
        } else if purged < limit {
            // The purge reported that there are no more.
            self.records.retain(|_, entry| !overdue(entry));
        }
        for entry in self.records.values_mut().filter(|entry| entry.record.is_expired(now)) {
            entry.maybe_purged |= purged > 0;
        }
        Ok(())
    }

    /// Checks that all records, the listing and the audit trail are as expected.
    fn check_all(&self) -> Checked {
        let now = self.now();
        for id in (0..RECORDS).map(id) {
            let expected = self.records.get(&id).map(|entry| &entry.record).filter(|r| !r.is_expired(now));
            let found = self.lookup(id)?;
            ensure!(found.as_ref() == expected, "holds {found:?}, expected {expected:?}");
        }
        let mut query = ListQuery::default();
        query.limit = 3;
        self.check_listing(&query)?;
        self.check_audit()
    }

    fn check_listing(&self, query: &ListQuery) -> Checked {
        let now = self.now();
        let mut expected: Vec<_> = self
            .records
            .iter()
            .filter(|(_, entry)| query.matches(&entry.record, now))
            .map(|(id, entry)| (*id, entry.record.clone()))
            .collect();
        expected.sort_by_key(|(id, _)| *id);
        let mut found = Vec::new();
        let mut query = query.clone();
        // A page may be short or empty, but its cursor must advance.
        for _ in 0..=2 * RECORDS {
            let ListPage { records, unreadable, next } =
                block_on(self.store().list(query.clone())).map_err(in_words)?;
            ensure!(unreadable.is_empty(), "lists unreadable records {unreadable:?}");
            ensure!(records.len() <= query.bounded_limit(), "lists more than {}", query.bounded_limit());
            found.extend(records);
            ensure!(next.is_none() || next > query.after, "the cursor {next:?} does not advance");
            query.after = next;
            if next.is_none() {
                if self.suite.any_order {
                    found.sort_by_key(|(id, _): &(RecordId, Record)| *id);
                }
                ensure!(found == expected, "lists {found:?}, expected {expected:?}");
                return Ok(());
            }
        }
        Err("the listing does not end".to_owned())
    }

    fn check_audit(&self) -> Checked {
        let mut found = Vec::new();
        loop {
            let before = found.last().map(|entry: &AuditEntry| entry.number);
            let page = block_on(self.store().audit(before, 2)).map_err(in_words)?;
            if page.is_empty() {
                break;
            }
            found.extend(page);
        }
        found.reverse();
        ensure!(found == self.audit, "the audit trail is {found:?}, expected {:?}", self.audit);
        Ok(())
    }

    /// Checks that in the end all records expire and are purged.
    fn finish(&mut self) -> Checked {
        self.clock.advance(Duration::from_secs(86_400));
        self.check_all()?;
        self.purge(1000)?;
        self.purge(1000)?;
        if self.suite.own_expiry {
            return self.check_all();
        }
        ensure!(self.records.is_empty(), "I10: {} records were never purged", self.records.len());
        self.check_all()
    }

    fn lookup(&self, id: RecordId) -> Result<Option<Record>, String> {
        block_on(self.store().lookup(id)).map_err(in_words)
    }
}

const ONE_MILLI: Duration = Duration::from_millis(1);

/// True if the protocol allows this change of a record in one step. Written independently of `decide`.
fn may_follow(before: &Record, after: &Record) -> bool {
    if after.token < before.token || (after.token == before.token && after.attempts != before.attempts) {
        return false;
    }
    let same_owner = before.token == after.token;
    // An operator parked it, under a token that no attempt owns.
    let is_parked = after.state == State::Unknown && after.by_operator && !same_owner;
    let (done, done_after) = (before.steps.as_slice(), after.steps.as_slice());
    let keeps_steps = if matches!(after.state, State::Completed(_)) && !after.by_operator {
        done_after.is_empty()
    } else {
        // No step changes or is lost, and only an owner adds steps.
        let may_grow =
            matches!((&before.state, &after.state), (State::InProgress { .. }, State::InProgress { .. }));
        done_after.starts_with(done)
            && done_after.len() - done.len() <= usize::from(may_grow && same_owner)
            && (done.is_empty() || before.fingerprint == after.fingerprint)
    };
    if !keeps_steps {
        return false;
    }
    match (&before.state, &after.state) {
        (State::InProgress { .. }, _) => !is_parked,
        (State::Unknown, State::Unknown | State::Completed(_) | State::Released) => same_owner,
        (State::Unknown, State::InProgress { .. }) => false,
        (State::Completed(RecordedResponse::Awaited), State::Completed(_)) => same_owner,
        // An operator may replace or park the resolution of an operator.
        (State::Completed(_) | State::Released, State::Completed(_)) if before.by_operator => {
            before == after || same_owner && after.by_operator
        }
        (State::Completed(_), State::Released) if before.by_operator => same_owner && after.by_operator,
        (State::Completed(_), State::Unknown) => before.by_operator && is_parked,
        (State::Completed(_), _) => before == after,
        (State::Released, State::Released) => before == after,
        (State::Released, State::Unknown) => is_parked,
        (State::Released, State::InProgress { .. }) => !same_owner,
        (State::Released, State::Completed(_)) => same_owner && !before.steps.is_empty(),
        (State::Released, _) => false,
        _ => false,
    }
}

/// True if nothing but the bytes of the content differs.
fn is_rewritten(before: &Record, after: &Record) -> bool {
    let names = |record: &Record| -> Vec<_> {
        record.steps.as_slice().iter().map(|step| step.name().to_owned()).collect()
    };
    let mut same = after.clone();
    same.steps = before.steps.clone();
    if before.response().is_some() && after.response().is_some() {
        same.state = before.state.clone();
    }
    same == *before && names(before) == names(after)
}

/// True if nothing but the content of a completed record is gone.
fn is_forgotten(before: &Record, after: &Record) -> bool {
    let mut same = after.clone();
    same.state = before.state.clone();
    same.steps = before.steps.clone();
    same.changed_at = before.changed_at;
    same.by_operator = before.by_operator;
    same == *before
        && matches!(before.state, State::Completed(_))
        && after.state == State::Completed(RecordedResponse::Tombstone)
        && after.steps.is_empty()
        && after.by_operator == (before.by_operator && before.steps.is_empty())
        && after.changed_at >= before.changed_at
}

/// A rewrite of the record that is expected to be there. A content has a size of its own.
fn rewrite(record: Option<&Record>, token: FencingToken, expects: Expects, content: u8) -> Rewrite {
    let new = |n: usize| Bytes::from(vec![content; 100 * n + usize::from(content)]);
    let mut rewrite = match record {
        Some(record) => Rewrite { token, ..Rewrite::of(record) },
        None => Rewrite { token, response: None, step_results: Vec::new() },
    };
    if let Some(part) = &mut rewrite.response {
        part.to = response(content + 10);
    }
    for (n, part) in rewrite.step_results.iter_mut().enumerate() {
        part.to = new(n);
    }
    match (expects, &mut rewrite.response, rewrite.step_results.last_mut()) {
        (Expects::Same, ..) => {}
        (Expects::Other, Some(part), _) => part.from = response(99),
        (Expects::Other, None, Some(part)) => part.from = Bytes::from_static(b"another result"),
        (Expects::Other | Expects::OtherForm, None, _) => {
            rewrite.response = Some(Replacement { from: response(1), to: response(2) });
        }
        (Expects::OtherForm, Some(_), _) => rewrite.response = None,
        (Expects::OtherSteps, _, Some(_)) => drop(rewrite.step_results.pop()),
        (Expects::OtherSteps, _, None) => {
            rewrite.step_results.push(Replacement { from: Bytes::new(), to: new(1) });
        }
    }
    rewrite
}

fn granted(outcome: &Outcome) -> Option<FencingToken> {
    match outcome {
        Outcome::Execute(grant) => Some(grant.token),
        _ => None,
    }
}

/// The identifiers are spread over the whole range, so that a store with several shards uses all of them.
fn id(on: u8) -> RecordId {
    RecordId::from_bytes([on.wrapping_mul(0x3b); 32])
}

fn caller_tag(n: u8) -> CallerTag {
    CallerTag::from_bytes([n; 8])
}

/// The tag of the key of this record; record 2 has none.
fn key_tag(n: u8) -> Option<KeyTag> {
    (n < 2).then(|| KeyTag::from_bytes([0xf0 | n; 8]))
}

fn operation_of(on: u8) -> String {
    format!("POST /payments/{on}")
}

fn step_of(n: u8) -> Step {
    let name = ["charge", "ship; DROP TABLE \"records\" --", "être payé"][usize::from(n % 3)];
    Step::new(name, Bytes::from(vec![n; 300 * usize::from(n)])).expect("it is within the limits")
}

fn response(n: u8) -> StoredResponse {
    let body = [Bytes::from(vec![n; 300])];
    StoredResponse::new(201, &[("content-type", &b"application/json"[..])], &body, &[])
        .expect("it is within the limits")
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn in_words(error: StoreError) -> String {
    format!("the store failed: {}", ErrorChain(&error))
}
