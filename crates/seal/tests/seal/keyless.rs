//! A process without keys, and the records that a sample of the store shows.

use oncegate_core::{Command, Outcome, Store as _, StoreErrorKind};
use oncegate_seal::{KeylessStore, Keyring, SealSample};
use oncegate_testkit::block_on;

use crate::{World, claim, complete, key, record_step, response, ring};

/// A claim of another attempt.
fn again() -> Command {
    Command::Claim(claim(1 << 70))
}

#[test]
fn a_store_without_keys_refuses_and_counts_sealed_responses_only() {
    let sealing = World::with(ring(&[1]));
    let (sealed, token) = sealing.owned(1);
    sealing.apply(sealed, complete(token)).unwrap();
    let keyless = KeylessStore::new(sealing.plain.clone());
    assert_eq!(keyless.advisories().len(), sealing.plain.advisories().len());
    let (clear, token) = sealing.owned(2);
    assert_eq!(block_on(keyless.apply(clear, complete(token))).unwrap(), Outcome::Completed);
    for _ in 0..2 {
        let replay = block_on(keyless.apply(clear, again())).unwrap();
        assert_eq!(replay, Outcome::Replay(response()));
        let refused = block_on(keyless.apply(sealed, again())).unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::Sealed);
        assert!(refused.to_string().contains(&key(1).id().to_string()), "{refused}");
    }
    if let Some(at_once) = keyless.try_apply(sealed, &again()) {
        assert_eq!(at_once.unwrap_err().kind(), StoreErrorKind::Sealed);
    }
    let refusals = keyless.refusals();
    assert!(
        refusals.key_missing() >= 2 && refusals.broken() == 0 && refusals.not_sealed() == 0,
        "{refusals:?}"
    );
    assert_eq!(refusals.missing_keys()[0].id, key(1).id());
    let advisory = keyless.advisories().pop().unwrap();
    assert_eq!(advisory.name, "seal-key-missing");
    assert!(advisory.text.contains("stores new responses in clear"), "{}", advisory.text);
    // Records are read in their sealed form: what may be done to them does not depend on it.
    assert!(block_on(keyless.lookup(sealed)).unwrap().is_some());
}

#[test]
fn a_sample_names_the_keys_that_are_missing() {
    let world = World::with(ring(&[1]));
    let (done, token) = world.owned(1);
    world.apply(done, complete(token)).unwrap();
    let (half_way, token) = world.owned(2);
    world.apply(half_way, record_step(token, 0, "charge", b"{}")).unwrap();
    world.owned(3);
    let mut sample = SealSample::default();
    for id in [done, half_way, world.owned(4).0] {
        sample.add(&block_on(world.plain.lookup(id)).unwrap().unwrap());
    }
    let missing = |keys: &Keyring| sample.missing(keys).collect::<Vec<_>>();
    assert_eq!((sample.records(), missing(&Keyring::default())), (3, vec![(key(1).id(), 2)]));
    assert_eq!(missing(&ring(&[2, 1])), []);
    // The advisory follows the keys and the newest sample.
    let refusals = world.sealed.refusals();
    refusals.set_sample(sample.clone());
    assert!(world.sealed.advisories().is_empty());
    world.sealed.keys().replace(ring(&[2]));
    let advisory = world.sealed.advisories().pop().unwrap();
    assert!(advisory.text.contains("2 of 3 records that were looked at are sealed"), "{}", advisory.text);
    assert!(advisory.text.ends_with("; add these keys"), "{}", advisory.text);
    refusals.set_sample(SealSample::default());
    assert!(world.sealed.advisories().is_empty());
}
