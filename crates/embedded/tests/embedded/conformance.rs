//! The conformance suite of all stores, run on the embedded store with a real file.

use std::sync::Arc;

use oncegate_embedded::{EmbeddedOptions, EmbeddedStore};
use oncegate_testkit::ManualClock;
use oncegate_testkit::conformance::{Suite, check_concurrent_claims, check_operators, check_steps};

#[test]
fn the_embedded_store_conforms() {
    Suite::new().with_cases(48).with_expiry_at_open().check(|| {
        let dir = tempfile::tempdir().unwrap();
        move |clock: Arc<ManualClock>| {
            EmbeddedStore::open(EmbeddedOptions::new(dir.path()).with_clock(clock)).unwrap()
        }
    });
}

#[test]
fn exactly_one_of_many_concurrent_claims_executes() {
    let dir = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(EmbeddedOptions::new(dir.path())).unwrap();
    check_concurrent_claims(&store, 20, 8);
}

#[test]
fn an_operator_can_change_an_earlier_resolution() {
    let dir = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(EmbeddedOptions::new(dir.path())).unwrap();
    check_operators(&store);
}

#[test]
fn steps_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(EmbeddedOptions::new(dir.path())).unwrap();
    check_steps(&store);
}
