//! The conformance suite of stores, on stores with seals.

use std::sync::Arc;

use oncegate_core::MemoryStore;
use oncegate_embedded::{EmbeddedOptions, EmbeddedStore};
use oncegate_seal::{Keyring, SealedStore};
use oncegate_testkit::ManualClock;
use oncegate_testkit::conformance::{Suite, check_concurrent_claims, check_operators};

use crate::ring;

#[test]
fn a_sealed_memory_store_conforms() {
    Suite::new().with_cases(200).check(|| {
        |clock: Arc<ManualClock>| SealedStore::new(MemoryStore::new(clock), ring(&[1]).with_required(true))
    });
}

#[test]
fn a_store_without_keys_conforms() {
    Suite::new()
        .with_cases(50)
        .check(|| |clock: Arc<ManualClock>| SealedStore::new(MemoryStore::new(clock), Keyring::default()));
}

#[test]
fn a_sealed_embedded_store_conforms_and_reads_its_records_after_a_restart() {
    Suite::new().with_cases(24).with_expiry_at_open().check(|| {
        let dir = tempfile::tempdir().unwrap();
        move |clock: Arc<ManualClock>| {
            let store = EmbeddedStore::open(EmbeddedOptions::new(dir.path()).with_clock(clock)).unwrap();
            SealedStore::new(store, ring(&[1, 2]).with_required(true))
        }
    });
}

#[test]
fn claims_at_once_and_decisions_of_operators_are_those_of_a_plain_store() {
    let store = SealedStore::new(MemoryStore::default(), ring(&[1]));
    check_concurrent_claims(&store, 10, 8);
    check_operators(&store);
}
