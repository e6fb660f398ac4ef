//! Keys that change while records exist and commands are sent again.

use std::sync::Arc;

use oncegate_core::{Command, MemoryStore, Outcome, Release, Store};
use oncegate_seal::{SealInfo, SealedStore};
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
