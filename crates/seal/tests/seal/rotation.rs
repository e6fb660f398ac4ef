//! Keys that change while records exist and commands are sent again.

use std::sync::Arc;

use oncegate_core::{Command, MemoryStore, Outcome, Release, Store};
use oncegate_seal::{SealError, SealInfo, SealedStore};
use oncegate_testkit::block_on;

use crate::{MINUTE, World, complete, key, record_step, response, ring};

/// The order of docs/reference/sealing.md, with two sidecars that are never reloaded at the same moment.
#[test]
fn a_rotation_over_two_processes_refuses_nothing() {
    let plain = Arc::new(MemoryStore::default());
    let processes = [1, 2].map(|_| SealedStore::new(plain.clone(), ring(&[1])));
    let mut records = 0;
    let mut use_both = |newest: Option<u8>| {
        for writer in &processes {
            records += 1;
            let id = oncegate_testkit::record_id(records);
            let claim = |n: u128| Command::Claim(crate::claim(n));
            let Outcome::Execute(grant) = block_on(writer.apply(id, claim(u128::from(records)))).unwrap()
            else {
                panic!("the record is free")
            };
            assert_eq!(block_on(writer.apply(id, complete(grant.token))).unwrap(), Outcome::Completed);
            for reader in &processes {
                for earlier in (1..=records).filter(|_| newest.is_none()) {
                    let id = oncegate_testkit::record_id(earlier);
                    let replayed = block_on(reader.apply(id, claim(1 << 80))).unwrap();
                    assert_eq!(replayed, Outcome::Replay(response()), "record {earlier}");
                }
                assert_eq!(block_on(reader.apply(id, claim(1 << 80))).unwrap(), Outcome::Replay(response()));
            }
        }
    };
    use_both(None);
    for keys in [ring(&[1, 2]), ring(&[2, 1])] {
        for process in &processes {
            process.keys().replace(keys.clone());
            use_both(None);
        }
    }
    // Once no record is sealed with the old key any more, it is removed.
    for process in &processes {
        process.keys().replace(ring(&[2]));
        use_both(Some(2));
    }
}

#[test]
fn a_command_that_is_sent_again_after_a_rotation_gets_the_same_reply() {
    let world = World::with(ring(&[1]));
    let (id, token) = world.owned(1);
    let step = || record_step(token, 0, "charge", b"1");
    let recorded = [world.apply(id, step()), world.apply(id, step())];
    assert!(recorded.iter().all(|outcome| matches!(outcome, Ok(Outcome::StepRecorded))), "{recorded:?}");
    world.keys.replace(ring(&[2, 1]));
    assert_eq!(world.apply(id, step()).unwrap(), Outcome::StepRecorded);
    assert_eq!(world.apply(id, record_step(token, 0, "charge", b"2")).unwrap(), Outcome::StepDiffers);
    assert_eq!(world.apply(id, complete(token)).unwrap(), Outcome::Completed);
    world.keys.replace(ring(&[3, 2, 1]));
    assert_eq!(world.apply(id, complete(token)).unwrap(), Outcome::Completed);
    assert!(world.sealed.try_apply(id, &complete(token)).is_none(), "the other way finds out");
    assert_eq!(world.claim_again(id).unwrap(), Outcome::Replay(response()));
    assert_eq!(SealInfo::of_response(&world.stored(id)).unwrap().key, key(2).id());
    let stale = oncegate_core::FencingToken::new(token.get() - 1);
    assert_eq!(world.apply(id, complete(stale)).unwrap(), Outcome::Fenced);
}

/// A later attempt reads the steps of an earlier one, and records its own under its own token.
#[test]
fn steps_outlive_their_attempt_and_their_key() {
    let world = World::with(ring(&[1]));
    let (id, first) = world.owned(1);
    world.apply(id, record_step(first, 0, "charge", b"1")).unwrap();
    let release = Command::Release(Release { token: first, retention: MINUTE });
    assert_eq!(world.apply(id, release).unwrap(), Outcome::Released);
    world.keys.replace(ring(&[2, 1]));
    let (_, second) = world.owned(1);
    assert!(second > first);
    assert_eq!(world.apply(id, record_step(second, 0, "charge", b"1")).unwrap(), Outcome::StepRecorded);
    assert_eq!(world.apply(id, record_step(second, 1, "ship", b"2")).unwrap(), Outcome::StepRecorded);
    let steps = block_on(world.sealed.lookup(id)).unwrap().unwrap().steps;
    let opened: Vec<_> = steps.as_slice().iter().map(|step| (step.name(), &step.result()[..])).collect();
    assert_eq!(opened, [("charge", &b"1"[..]), ("ship", b"2")]);
}

/// The first step of switching sealing on, and the last of switching it off.
#[test]
fn keys_that_only_open_seal_nothing_and_are_refused_nothing() {
    let world = World::with(ring(&[1]));
    let (sealed, _) = world.completed(1);
    world.keys.replace(ring(&[1]).with_opens_only(true));
    let (clear, _) = world.completed(2);
    assert_eq!(SealInfo::of_response(&world.stored(clear)), None);
    for id in [sealed, clear] {
        assert_eq!(world.claim_again(id).unwrap(), Outcome::Replay(response()));
    }
}

/// An operator is told which key is missing for as long as it is, and not longer.
#[test]
fn refusals_are_counted_by_reason_and_a_missing_key_is_an_advisory() {
    let world = World::with(ring(&[1]));
    let (id, _) = world.completed(1);
    assert_eq!(world.sealed.advisories(), []);
    world.keys.replace(ring(&[2]));
    for _ in 0..3 {
        world.claim_again(id).unwrap_err();
    }
    let refusals = world.sealed.refusals();
    assert_eq!((refusals.key_missing(), refusals.not_sealed(), refusals.broken()), (3, 0, 0));
    let missing = refusals.missing_keys();
    assert_eq!((missing.len(), missing[0].id, missing[0].count), (1, key(1).id(), 3));
    let advisories = world.sealed.advisories();
    assert_eq!(advisories.len(), 1);
    assert_eq!(advisories[0].name, "seal-key-missing");
    assert!(advisories[0].text.contains(&key(1).id().to_string()), "{}", advisories[0].text);
    // Operators who look at the record do not count as refused requests.
    let shown = block_on(world.sealed.lookup_as_stored(id)).unwrap().unwrap();
    assert_eq!(shown.seal.map(|seal| seal.key), Some(key(1).id()));
    assert_eq!(shown.refused, Some(SealError::KeyMissing(key(1).id())));
    assert_eq!(refusals.key_missing(), 3);
    world.keys.replace(ring(&[2, 1]));
    assert_eq!(world.sealed.advisories(), []);
    assert_eq!(block_on(world.sealed.lookup_as_stored(id)).unwrap().unwrap().refused, None);
    world.keys.replace(ring(&[1]).with_required(true));
    let (clear, token) = world.owned(2);
    world.put(clear, token, response());
    world.claim_again(clear).unwrap_err();
    assert_eq!((refusals.not_sealed(), refusals.broken()), (1, 0));
}
