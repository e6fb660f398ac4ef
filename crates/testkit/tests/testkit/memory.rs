//! The conformance suite, run on the memory store.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{
    AttemptId, Claim, Clock as _, Command, Complete, Completion, Fingerprint, Label, MemoryStore,
    OnAbandoned, Outcome, RecordId, Store, StoreErrorKind, StoredResponse,
};
use oncegate_testkit::conformance::{Suite, check_concurrent_claims, check_operators, check_steps};
use oncegate_testkit::{ManualClock, block_on};

#[test]
fn the_memory_store_conforms() {
    Suite::new().with_cases(500).check(|| MemoryStore::new);
}

#[test]
fn one_of_many_claimants_executes() {
    check_concurrent_claims(&MemoryStore::new(ManualClock::at_millis(1)), 20, 8);
}

#[test]
fn an_operator_takes_a_resolution_back() {
    check_operators(&MemoryStore::new(ManualClock::at_millis(1)));
}

#[test]
fn steps_are_bounded() {
    check_steps(&MemoryStore::new(ManualClock::at_millis(1)));
}

#[test]
fn a_full_store_refuses_new_records_and_evicts_none() {
    const RECORDS: u8 = 20;
    let store = MemoryStore::new(ManualClock::at_millis(1_000)).with_max_records(RECORDS.into());
    let claim = |first: u8, last: u8| {
        let mut id = [0; 32];
        (id[0], id[31]) = (first, last);
        let claim = Claim {
            attempt: AttemptId::new(u128::from(first) << 8 | u128::from(last)),
            fingerprint: Fingerprint::of_parts("full", &[]),
            lease: Duration::from_secs(1),
            retention: Duration::from_secs(1),
            on_abandoned: OnAbandoned::Park,
            label: Label::default(),
        };
        block_on(store.apply(RecordId::from_bytes(id), Command::Claim(claim)))
    };
    for number in 0..RECORDS {
        assert!(matches!(claim(number, 0), Ok(Outcome::Execute(_))), "{number}");
    }
    assert_eq!(claim(0, 1).unwrap_err().kind(), StoreErrorKind::Unavailable);
    assert!(matches!(claim(0, 0), Ok(Outcome::Execute(_))), "the same claim again makes no new record");
    assert_eq!(store.len(), usize::from(RECORDS));
}

#[test]
fn a_store_at_its_limit_of_bytes_refuses_new_records_until_some_are_purged() {
    const RESPONSE: usize = 10_000;
    let clock = Arc::new(ManualClock::at_millis(1_000));
    let store = MemoryStore::new(clock.clone()).with_max_record_bytes(35_000);
    let apply = |number: u8, command| block_on(store.apply(RecordId::from_bytes([number; 32]), command));
    let claim = |number: u8| {
        let claim = Claim {
            attempt: AttemptId::new(u128::from(number) << 64 | u128::from(clock.now().as_millis())),
            fingerprint: Fingerprint::of_parts("bytes", &[]),
            lease: Duration::from_secs(1),
            retention: Duration::from_secs(60),
            on_abandoned: OnAbandoned::Park,
            label: Label::default(),
        };
        apply(number, Command::Claim(claim))
    };
    let execute = |number: u8| {
        let Ok(Outcome::Execute(granted)) = claim(number) else { return false };
        let response = StoredResponse::new(200, &[], &[vec![7; RESPONSE].into()], &[]).unwrap();
        let completion = Completion::Replayable(response);
        let complete = Complete { token: granted.token, completion, retention: Duration::from_secs(60) };
        assert_eq!(apply(number, Command::Complete(complete)).unwrap(), Outcome::Completed);
        true
    };
    for round in 0..3 {
        // Three responses are less than the limit, and a fourth is more.
        let taken = (0..10).filter(|number| execute(round * 10 + number)).count();
        assert_eq!((taken, store.len()), (4, 4));
        clock.advance(Duration::from_secs(120));
        assert_eq!((block_on(store.purge(100)).unwrap(), store.len()), (4, 0));
    }
}
