//! Content that was changed, moved, replaced, or sealed with another key is refused, and never executed.

use bytes::Bytes;
use oncegate_core::{
    Command, Complete, Completion, ListQuery, MemoryStore, Outcome, RecordStep, RecordedResponse, Release,
    Resolution, State, Step, Store, StoreErrorKind, StoredResponse, limits,
};
use oncegate_seal::{Keyring, Part, SealInfo};
use oncegate_testkit::block_on;
use proptest::prelude::*;

use crate::{MINUTE, SECRET, World, complete, key, record_step, resolve, response, ring};

fn sealed_with(body: Vec<u8>) -> StoredResponse {
    StoredResponse::new(500, &[("oncegate-sealed", b"1")], &[Bytes::from(body)], &[]).unwrap()
}

#[test]
fn the_store_never_sees_the_content() {
    let world = World::with(ring(&[1]));
    let (id, token) = world.owned(1);
    assert_eq!(world.apply(id, record_step(token, 0, "charge", SECRET)).unwrap(), Outcome::StepRecorded);
    let record = block_on(world.plain.lookup(id)).unwrap().unwrap();
    let step = &record.steps.as_slice()[0];
    assert!(!step.result().windows(4).any(|part| SECRET.windows(4).any(|secret| part == secret)));
    assert_eq!(SealInfo::of_step(step).unwrap().key, key(1).id());
    assert_eq!(block_on(world.sealed.lookup(id)).unwrap().unwrap().steps.as_slice()[0].result(), SECRET);

    assert_eq!(world.apply(id, complete(token)).unwrap(), Outcome::Completed);
    let stored = world.stored(id);
    assert!(stored.is_sealed() && stored.status() == 500);
    assert!(!stored.as_encoded().windows(4).any(|part| part == &SECRET[..4] || part == b"text"));
    let info = SealInfo::of_response(&stored).unwrap();
    assert_eq!((info.key, info.part, info.token), (key(1).id(), Part::OwnersResponse, token));
    assert_eq!(world.claim_again(id).unwrap(), Outcome::Replay(response()));
}

#[test]
fn every_flipped_bit_and_every_cut_is_refused() {
    let world = World::with(ring(&[1]));
    let (id, _) = world.completed(1);
    let sealed = world.stored(id).body().to_vec();
    for bit in 0..sealed.len() * 8 {
        let mut changed = sealed.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        refuses(&changed, bit);
    }
    for end in 0..sealed.len() {
        refuses(&sealed[..end], end);
    }
    // Unchanged, they are accepted, so that the refusals above are those of the changes.
    let again = World::with(ring(&[1]));
    let (id, token) = again.owned(1);
    again.put(id, token, sealed_with(sealed));
    assert_eq!(again.claim_again(id).unwrap(), Outcome::Replay(response()));
}

fn refuses(body: &[u8], place: usize) {
    let world = World::with(ring(&[1]));
    let (id, token) = world.owned(1);
    world.put(id, token, sealed_with(body.to_vec()));
    let claimed = world.claim_again(id).unwrap_err().kind();
    let read = block_on(world.sealed.lookup(id)).unwrap_err().kind();
    for kind in [claimed, read] {
        assert!(matches!(kind, StoreErrorKind::Corrupt | StoreErrorKind::Sealed), "at {place}: {kind:?}");
    }
}

#[test]
fn a_response_that_was_moved_to_another_record_is_refused() {
    let world = World::with(ring(&[1]));
    let (first, _) = world.completed(1);
    let (second, token) = world.owned(2);
    world.put(second, token, world.stored(first));
    assert_eq!(world.claim_again(second).unwrap_err().kind(), StoreErrorKind::Corrupt);
    assert_eq!(block_on(world.sealed.lookup(second)).unwrap_err().kind(), StoreErrorKind::Corrupt);
}

/// A claim gets the response without the token of the record. A whole read compares both.
#[test]
fn a_response_of_another_attempt_of_the_record_is_refused_by_a_read() {
    let earlier = World::with(ring(&[1]));
    let (id, old) = earlier.completed(1);
    let world = World::with(ring(&[1]));
    let (_, first) = world.owned(1);
    let release = Command::Release(Release { token: first, retention: MINUTE });
    assert_eq!(world.apply(id, release).unwrap(), Outcome::Released);
    let (_, token) = world.owned(1);
    assert_ne!(old, token);
    world.put(id, token, earlier.stored(id));
    assert_eq!(block_on(world.sealed.lookup(id)).unwrap_err().kind(), StoreErrorKind::Corrupt);
}

#[test]
fn a_response_of_an_operator_is_bound_to_the_operator() {
    let world = World::with(ring(&[1]));
    let (id, token) = world.owned(1);
    let unknown = Complete { token, completion: Completion::Unknown, retention: MINUTE };
    world.apply(id, Command::Complete(unknown)).unwrap();
    let done = resolve(Resolution::Complete(Some(response())));
    assert!(matches!(world.apply(id, done).unwrap(), Outcome::Resolved { .. }));
    assert_eq!(world.claim_again(id).unwrap(), Outcome::Replay(response()));
    let record = block_on(world.sealed.lookup(id)).unwrap().unwrap();
    assert_eq!(record.state, State::Completed(RecordedResponse::Replayable(response())));
    assert_eq!(SealInfo::of_response(&world.stored(id)).unwrap().part, Part::OperatorsResponse);

    // The same sealed form as the response of an owner.
    let other = World::with(ring(&[1]));
    let (id, token) = other.owned(1);
    other.put(id, token, world.stored(id));
    assert_eq!(block_on(other.sealed.lookup(id)).unwrap_err().kind(), StoreErrorKind::Corrupt);
}

#[test]
fn a_response_of_an_owner_does_not_pass_for_that_of_an_operator() {
    let world = World::with(ring(&[1]));
    let (id, token) = world.owned(1);
    let complete = |completion| Command::Complete(Complete { token, completion, retention: MINUTE });
    let earlier = World::with(ring(&[1]));
    let (same, _) = earlier.completed(1);
    assert_eq!(world.apply(id, complete(Completion::Unknown)).unwrap(), Outcome::Completed);
    let moved = resolve(Resolution::Complete(Some(earlier.stored(same))));
    assert!(matches!(block_on(world.plain.apply(id, moved)), Ok(Outcome::Resolved { .. })));
    assert_eq!(block_on(world.sealed.lookup(id)).unwrap_err().kind(), StoreErrorKind::Corrupt);
}

/// The token of a step is at most that of its record, because tokens grow.
#[test]
fn a_step_of_a_later_attempt_is_refused() {
    let world = World::with(ring(&[1]));
    let (id, token) = world.owned(1);
    let later = World::with(ring(&[1]));
    let (_, first) = later.owned(1);
    later.apply(id, Command::Release(Release { token: first, retention: MINUTE })).unwrap();
    let (_, newer) = later.owned(1);
    assert!(newer > token);
    later.apply(id, record_step(newer, 0, "charge", b"1")).unwrap();
    let step = block_on(later.plain.lookup(id)).unwrap().unwrap().steps.as_slice()[0].clone();
    let put = Command::Step(RecordStep { token, number: 0, step });
    assert_eq!(block_on(world.plain.apply(id, put)).unwrap(), Outcome::StepRecorded);
    assert_eq!(block_on(world.sealed.lookup(id)).unwrap_err().kind(), StoreErrorKind::Corrupt);
}

#[test]
fn steps_cannot_be_exchanged_renamed_or_used_as_a_response() {
    let world = World::with(ring(&[1]));
    let (id, token) = world.owned(1);
    world.apply(id, record_step(token, 0, "charge", b"1")).unwrap();
    world.apply(id, record_step(token, 1, "ship", b"2")).unwrap();
    let steps = block_on(world.plain.lookup(id)).unwrap().unwrap().steps;
    let [charge, ship] = steps.as_slice() else { panic!("{steps:?}") };
    let renamed = Step::new("refund", charge.result().clone()).unwrap();
    let exchanged = Step::new("charge", ship.result().clone()).unwrap();
    for step in [renamed, exchanged] {
        let other = World::with(ring(&[1]));
        let (id, token) = other.owned(1);
        let put = Command::Step(RecordStep { token, number: 0, step });
        assert_eq!(block_on(other.plain.apply(id, put)).unwrap(), Outcome::StepRecorded);
        assert_eq!(block_on(other.sealed.lookup(id)).unwrap_err().kind(), StoreErrorKind::Corrupt);
    }
    let other = World::with(ring(&[1]));
    let (id, token) = other.owned(1);
    other.put(id, token, sealed_with(charge.result().to_vec()));
    assert_eq!(other.claim_again(id).unwrap_err().kind(), StoreErrorKind::Corrupt);
}

#[test]
fn a_missing_key_is_named_and_nothing_is_executed() {
    let world = World::with(ring(&[1]));
    let (id, _) = world.completed(1);
    for keys in [ring(&[2]), Keyring::default()] {
        world.keys.replace(keys);
        for _ in 0..3 {
            let error = world.claim_again(id).unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Sealed);
            assert!(error.to_string().contains(&key(1).id().to_string()), "{error}");
            assert!(!error.kind().may_pass(), "no program sends it again by itself");
        }
        assert_eq!(block_on(world.sealed.lookup(id)).unwrap_err().kind(), StoreErrorKind::Sealed);
        let at_once = world.sealed.try_apply(id, &Command::Claim(crate::claim(9)));
        assert!(at_once.is_none(), "a cache may have an older form than the store, so it is asked first");
        // Operators see the record, and which key is missing.
        let page = block_on(world.sealed.list(ListQuery::default())).unwrap();
        let shown = block_on(world.sealed.lookup_as_stored(id)).unwrap().unwrap().record;
        assert_eq!(page.records, [(id, shown.clone())]);
        let State::Completed(RecordedResponse::Replayable(stored)) = shown.state else { panic!("{shown:?}") };
        assert_eq!(SealInfo::of_response(&stored).unwrap().key, key(1).id());
    }
    world.keys.replace(ring(&[2, 1]));
    assert_eq!(world.claim_again(id).unwrap(), Outcome::Replay(response()));
}

#[test]
fn unsealed_content_is_read_unless_it_must_be_sealed() {
    let world = World::with(Keyring::default());
    let (id, token) = world.completed(1);
    let (open, other) = world.owned(2);
    world.apply(open, record_step(other, 0, "charge", SECRET)).unwrap();
    assert_eq!(world.stored(id), response());
    world.keys.replace(ring(&[1]));
    assert_eq!(world.claim_again(id).unwrap(), Outcome::Replay(response()));
    assert_eq!(block_on(world.sealed.lookup(open)).unwrap().unwrap().steps.as_slice()[0].result(), SECRET);
    assert_eq!(world.apply(id, complete(token)).unwrap(), Outcome::Completed, "sent again");
    world.keys.replace(ring(&[1]).with_required(true));
    assert_eq!(world.claim_again(id).unwrap_err().kind(), StoreErrorKind::Sealed);
    assert_eq!(block_on(world.sealed.lookup(open)).unwrap_err().kind(), StoreErrorKind::Sealed);
}

#[test]
fn content_that_is_too_large_for_its_seal_is_done_without_it() {
    let world = World::with(ring(&[1]));
    let (id, token) = world.owned(1);
    let body = Bytes::from(vec![7; limits::MAX_RESPONSE_BYTES - 7]);
    let largest = StoredResponse::new(200, &[], &[body], &[]).unwrap();
    let command = Complete { token, completion: Completion::Replayable(largest), retention: MINUTE };
    assert_eq!(world.apply(id, Command::Complete(command)).unwrap(), Outcome::Completed);
    assert_eq!(world.claim_again(id).unwrap(), Outcome::Unreplayable);

    let (id, token) = world.owned(2);
    let step = |bytes: usize| {
        let step = Step::new("s", Bytes::from(vec![7; bytes])).unwrap();
        Command::Step(RecordStep { token, number: 0, step })
    };
    assert_eq!(world.apply(id, step(limits::MAX_STEPS_BYTES - 1 - 72)).unwrap(), Outcome::StepsFull);
    assert_eq!(world.apply(id, step(limits::MAX_STEPS_BYTES - 1 - 73)).unwrap(), Outcome::StepRecorded);
}

/// Large content is not sealed under a lock of the caller.
#[test]
fn only_small_content_is_handled_at_once() {
    let world = World::with(ring(&[1]));
    let large = |token| {
        let response = StoredResponse::new(200, &[], &[Bytes::from(vec![7; 64 * 1024])], &[]).unwrap();
        let completion = Completion::Replayable(response);
        Command::Complete(Complete { token, completion, retention: MINUTE })
    };
    let (id, token) = world.owned(1);
    assert!(world.sealed.try_apply(id, &large(token)).is_none());
    assert_eq!(world.apply(id, large(token)).unwrap(), Outcome::Completed);
    assert!(world.sealed.try_apply(id, &Command::Claim(crate::claim(9))).is_none());
    assert!(matches!(world.claim_again(id), Ok(Outcome::Replay(_))));
    let (id, token) = world.owned(2);
    assert!(matches!(world.sealed.try_apply(id, &complete(token)), Some(Ok(Outcome::Completed))));
    assert!(world.stored(id).is_sealed());
}

proptest! {
    /// No response that a store may hold, sealed-looking or not, makes the store panic or execute.
    #[test]
    fn any_content_is_replayed_or_refused(body in proptest::collection::vec(any::<u8>(), 0..200), is_magic: bool) {
        let body = if is_magic { [b"\0ogseal\x01".to_vec(), body].concat() } else { body };
        let world = World::with(ring(&[1]));
        let (id, token) = world.owned(1);
        world.put(id, token, sealed_with(body.clone()));
        let kind = world.claim_again(id).unwrap_err().kind();
        prop_assert!(matches!(kind, StoreErrorKind::Corrupt | StoreErrorKind::Sealed));
        let plain = StoredResponse::new(200, &[], &[Bytes::from(body)], &[]).unwrap();
        let (id, token) = world.owned(2);
        world.put(id, token, plain.clone());
        prop_assert_eq!(world.claim_again(id).unwrap(), Outcome::Replay(plain));
    }
}

#[test]
fn a_memory_store_without_a_seal_shows_that_the_response_is_sealed() {
    let world = World::with(ring(&[1]));
    let (id, _) = world.completed(1);
    let plain: &MemoryStore = &world.plain;
    let Outcome::Replay(stored) = block_on(plain.apply(id, Command::Claim(crate::claim(5)))).unwrap() else {
        panic!("it is completed")
    };
    assert!(stored.is_sealed());
}
