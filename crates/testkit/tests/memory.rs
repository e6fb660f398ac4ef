//! The memory store, held to the suite that every other store is held to.

use std::time::Duration;

use oncegate_core::{
    AttemptId, Claim, Command, Fingerprint, Label, MemoryStore, OnAbandoned, Outcome, RecordId, Store,
    StoreErrorKind,
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
fn an_operator_takes_back_what_an_operator_said() {
    check_operators(&MemoryStore::new(ManualClock::at_millis(1)));
}

#[test]
fn steps_are_bounded() {
    check_steps(&MemoryStore::new(ManualClock::at_millis(1)));
}

#[test]
fn a_full_store_refuses_new_records_and_pushes_none_out() {
    const RECORDS: u8 = 128;
    let store = MemoryStore::with_capacity(ManualClock::at_millis(1_000), RECORDS.into());
    // Spread over all parts of the store alike.
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
    assert!(matches!(claim(0, 0), Ok(Outcome::Execute(_))), "the same claim again is no new record");
    assert_eq!(store.len(), usize::from(RECORDS));
}
