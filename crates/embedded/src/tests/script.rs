//! A run of commands for the crash and fault tests, and the records that are expected after each step.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{
    Clock as _, Command, Complete, Completion, FencingToken, Forget, Outcome, Record, RecordId, Release,
    Renew, Resolution, Resolve, Rewrite, Store, StoreError, StoreErrorKind, Write, decide,
};
use oncegate_testkit::{ManualClock, block_on};

use oncegate_testkit::record_id as id;

use super::{DAY, Random, claim, complete, response};

/// Random commands on a few records, and the records that are expected after the acknowledged ones.
pub(crate) struct Script {
    random: Random,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) expected: BTreeMap<RecordId, Record>,
    /// The records as the commands without an acknowledgement would have left them.
    pub(crate) in_doubt: BTreeMap<RecordId, Option<Record>>,
    pub(crate) greatest_token: BTreeMap<RecordId, FencingToken>,
    pub(crate) acknowledged: usize,
    attempts: u128,
    /// The duration by which the store's clock is ahead of `clock`.
    pub(crate) ahead: Duration,
}

const RECORDS: usize = 12;

impl Script {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            random: Random(seed),
            clock: Arc::new(ManualClock::at_millis(1_700_000_000_000)),
            expected: BTreeMap::new(),
            in_doubt: BTreeMap::new(),
            greatest_token: BTreeMap::new(),
            acknowledged: 0,
            attempts: 0,
            ahead: Duration::ZERO,
        }
    }

    /// A copy with a clock of its own, to check a copy of the disk.
    pub(crate) fn copy(&self) -> Self {
        let copy = Self::new(self.random.0);
        copy.clock.advance(self.clock.now().since(copy.clock.now()));
        Self {
            expected: self.expected.clone(),
            in_doubt: self.in_doubt.clone(),
            greatest_token: self.greatest_token.clone(),
            acknowledged: self.acknowledged,
            attempts: self.attempts,
            ahead: self.ahead,
            ..copy
        }
    }

    /// Sends a few commands at once, each for a different record. Fails if one of them is not acknowledged.
    pub(crate) fn step(&mut self, store: &dyn Store) -> Result<(), StoreError> {
        self.clock.advance(Duration::from_millis(7));
        if self.random.one_in(10) {
            self.clock.advance(Duration::from_secs(31));
        }
        if self.random.one_in(12) {
            self.clock.advance(2 * DAY);
            return self.purge(store);
        }
        let mut commands: BTreeMap<RecordId, Command> = BTreeMap::new();
        for _ in 0..=self.random.below(4) {
            let (id, command) = self.command();
            commands.insert(id, command);
        }
        self.apply_all(store, commands)
    }

    fn apply_all(
        &mut self,
        store: &dyn Store,
        commands: BTreeMap<RecordId, Command>,
    ) -> Result<(), StoreError> {
        let now = self.clock.now().after(self.ahead);
        let decisions: Vec<_> =
            commands.iter().map(|(id, command)| (*id, decide(self.expected.get(id), command, now))).collect();
        // Sent at the same time, so that they may share a transaction.
        let replies: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = commands
                .into_iter()
                .map(|(id, command)| scope.spawn(move || block_on(store.apply(id, command))))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let mut failed = Ok(());
        for ((id, decision), reply) in decisions.into_iter().zip(replies) {
            let after = match decision.write {
                Write::Keep => self.expected.get(&id).cloned(),
                Write::Put(record) => Some(record),
            };
            match reply {
                Ok(outcome) => {
                    assert_eq!(outcome, decision.outcome);
                    self.acknowledged += 1;
                    if let Outcome::Execute(grant) = outcome {
                        self.greatest_token.insert(id, grant.token);
                    }
                    match after {
                        Some(record) => drop(self.expected.insert(id, record)),
                        None => drop(self.expected.remove(&id)),
                    }
                }
                Err(error) => {
                    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
                    self.in_doubt.insert(id, after);
                    failed = Err(error);
                }
            }
        }
        failed
    }

    fn purge(&mut self, store: &dyn Store) -> Result<(), StoreError> {
        let expired: Vec<_> = {
            let now = self.clock.now().after(self.ahead);
            self.expected.iter().filter(|(_, record)| record.is_expired(now)).map(|(id, _)| *id).collect()
        };
        let purged = block_on(store.purge(1000));
        // The records count as absent from here on, even if the purge failed: only a purge could see the difference.
        expired.iter().for_each(|id| drop(self.expected.remove(id)));
        purged.map(|_| ())
    }

    fn command(&mut self) -> (RecordId, Command) {
        let id = id(self.random.below(RECORDS) as u64);
        let token = self.greatest_token.get(&id).copied().unwrap_or(FencingToken::new(1));
        self.attempts += 1;
        let len = [20, 300, 3000, 20_000][self.random.below(4)];
        let command = match self.random.below(12) {
            0..=3 => claim(self.attempts),
            4 | 5 => complete(token, response(self.attempts as u64, len)),
            6 => Command::Complete(Complete { token, completion: Completion::Unknown, retention: DAY }),
            7 => Command::Release(Release { token, retention: DAY }),
            8 => Command::Renew(Renew { token, lease: Duration::from_secs(30), retention: DAY }),
            9 => self.rewrite(id, len),
            10 => {
                Command::Forget(Forget { actor: "an operator".to_owned(), reason: "r".repeat(len.min(400)) })
            }
            _ => Command::Resolve(Resolve {
                resolution: Resolution::Complete(Some(response(self.attempts as u64, len))),
                retention: DAY,
                force: true,
                amend: false,
                actor: "an operator".to_owned(),
                reason: "r".repeat(len.min(400)),
            }),
        };
        (id, command)
    }

    /// Replaces the response of a record, if it is expected to have one.
    fn rewrite(&self, id: RecordId, len: usize) -> Command {
        let record = self.expected.get(&id);
        let mut rewrite = record.map_or_else(
            || Rewrite { token: FencingToken::new(1), response: None, step_results: Vec::new() },
            Rewrite::of,
        );
        if let Some(part) = &mut rewrite.response {
            part.to = response(self.attempts as u64, len);
        }
        Command::Rewrite(rewrite)
    }

    /// Checks that every acknowledged command is there completely, and every other one completely or not at all.
    ///
    /// Afterwards the records in doubt have the state that was found.
    pub(crate) fn check(&mut self, store: &dyn Store) {
        let now = self.clock.now().after(self.ahead);
        for n in 0..RECORDS as u64 {
            let id = id(n);
            let live = |record: Option<&Record>| record.filter(|r| !r.is_expired(now)).cloned();
            let found = block_on(store.lookup(id)).unwrap();
            let acknowledged = live(self.expected.get(&id));
            match self.in_doubt.remove(&id) {
                Some(after) if found == live(after.as_ref()) => match after {
                    Some(record) => drop(self.expected.insert(id, record)),
                    None => drop(self.expected.remove(&id)),
                },
                _ => assert_eq!(found, acknowledged, "record {n}"),
            }
        }
    }

    /// Claims every record again, and checks that each token is greater than all earlier ones.
    pub(crate) fn claim_all_again(&mut self, store: &dyn Store) {
        self.clock.advance(3 * DAY);
        for n in 0..RECORDS as u64 {
            self.attempts += 1;
            let outcome = block_on(store.apply(id(n), claim(self.attempts))).unwrap();
            let token = super::token(&outcome);
            assert!(self.greatest_token.get(&id(n)).is_none_or(|before| *before < token), "I6: record {n}");
        }
    }
}
