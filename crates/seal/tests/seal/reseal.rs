//! Records that are sealed anew.

use std::sync::{Arc, Mutex};

use oncegate_core::{
    Command, Forget, MemoryStore, Outcome, Record, RecordId, Replacement, Resolution, Rewrite, State, Store,
    StoreError, StoreErrorKind, StoreFuture, StoredResponse, delegate_store,
};
use oncegate_seal::{ResealOptions, ResealOutcome, SealError, SealInfo, SealedStore};
use oncegate_testkit::block_on;

use crate::{World, complete, key, record_step, resolve, response, ring};

const RESEALED: ResealOutcome = ResealOutcome::Resealed { was_clear: false, has_clear: false };
const UP_TO_DATE: ResealOutcome = ResealOutcome::UpToDate { has_clear: false };

impl World {
    /// The record as the wrapped store has it.
    fn raw(&self, id: RecordId) -> Record {
        block_on(self.plain.lookup(id)).unwrap().unwrap()
    }

    fn reseal(&self, id: RecordId, record: &Record) -> ResealOutcome {
        block_on(self.sealed.reseal(id, record, ResealOptions::default())).unwrap()
    }

    fn keys_of(&self, id: RecordId) -> Vec<String> {
        SealInfo::of_record(&self.raw(id)).map(|seal| seal.key.to_string()).collect()
    }
}

#[test]
fn a_record_is_sealed_anew_and_replays_without_the_old_key() {
    let world = World::with(ring(&[1]));
    let (id, token) = world.completed(1);
    let before = world.raw(id);
    assert_eq!(world.reseal(id, &before), UP_TO_DATE);
    world.keys.replace(ring(&[2, 1]));
    let options = ResealOptions { is_dry_run: true, ..ResealOptions::default() };
    assert_eq!(block_on(world.sealed.reseal(id, &before, options)).unwrap(), RESEALED);
    assert_eq!(world.raw(id), before, "a dry run changes nothing");
    assert_eq!(world.reseal(id, &before), RESEALED);
    assert_eq!(world.reseal(id, &before), RESEALED, "its reply was lost, and it is sent again");
    assert_eq!(world.reseal(id, &world.raw(id)), UP_TO_DATE);
    // An owner whose reply was lost sends its completion again.
    assert_eq!(world.apply(id, complete(token)).unwrap(), Outcome::Completed);
    world.keys.replace(ring(&[2]).with_required(true));
    assert_eq!(world.claim_again(id).unwrap(), Outcome::Replay(response()));
    let record = block_on(world.sealed.lookup(id)).unwrap().unwrap();
    assert_eq!((record.token, record.expires_at), (before.token, before.expires_at));
    assert_eq!(block_on(world.sealed.audit(None, 10)).unwrap(), []);
}

/// The owner of a running attempt goes on, and a step that it sends again because its reply was lost is recognised.
#[test]
fn steps_of_a_running_attempt_are_sealed_anew() {
    let world = World::with(ring(&[1]));
    let (id, token) = world.owned(1);
    world.apply(id, record_step(token, 0, "charge", b"1")).unwrap();
    world.keys.replace(ring(&[2, 1]));
    world.apply(id, record_step(token, 1, "ship", b"2")).unwrap();
    assert_eq!(world.keys_of(id), [key(1).id().to_string(), key(2).id().to_string()]);
    assert_eq!(world.reseal(id, &world.raw(id)), RESEALED);
    assert_eq!(world.keys_of(id), vec![key(2).id().to_string(); 2]);
    for (number, name, result) in [(0, "charge", b"1"), (1, "ship", b"2"), (2, "mail", b"3")] {
        let again = world.apply(id, record_step(token, number, name, result)).unwrap();
        assert_eq!(again, Outcome::StepRecorded, "{name}");
    }
    let other = world.apply(id, record_step(token, 0, "charge", b"9")).unwrap();
    assert_eq!(other, Outcome::StepDiffers);
    world.keys.replace(ring(&[2]).with_required(true));
    let record = block_on(world.sealed.lookup(id)).unwrap().unwrap();
    let steps: Vec<_> = record.steps.as_slice().iter().map(|step| &step.result()[..]).collect();
    assert_eq!(steps, [b"1", b"2", b"3"]);
    assert_eq!(world.apply(id, complete(token)).unwrap(), Outcome::Completed);
}

/// A step keeps the token of the attempt that recorded it, and a response of an operator stays one of an operator.
#[test]
fn each_part_is_sealed_for_its_own_place() {
    let world = World::with(ring(&[1]));
    let (id, first) = world.owned(1);
    world.apply(id, record_step(first, 0, "charge", b"1")).unwrap();
    let release = oncegate_core::Release { token: first, retention: crate::MINUTE };
    world.apply(id, Command::Release(release)).unwrap();
    let (_, second) = world.owned(1);
    let unknown = oncegate_core::Complete {
        token: second,
        completion: oncegate_core::Completion::Unknown,
        retention: crate::MINUTE,
    };
    world.apply(id, Command::Complete(unknown)).unwrap();
    world.apply(id, resolve(Resolution::Complete(Some(response())))).unwrap();
    world.keys.replace(ring(&[2, 1]));
    assert_eq!(world.reseal(id, &world.raw(id)), RESEALED);
    let tokens: Vec<_> = SealInfo::of_record(&world.raw(id)).map(|seal| seal.token.get()).collect();
    assert_eq!(tokens, [0, first.get()]);
    world.keys.replace(ring(&[2]).with_required(true));
    let record = block_on(world.sealed.lookup(id)).unwrap().unwrap();
    assert_eq!((record.response(), record.steps.len()), (Some(&response()), 1));
}

#[test]
fn a_record_that_changed_meanwhile_is_left_alone() {
    let world = World::with(ring(&[1]));
    let (id, token) = world.owned(1);
    world.apply(id, record_step(token, 0, "charge", b"1")).unwrap();
    world.keys.replace(ring(&[2, 1]));
    let read = world.raw(id);
    world.apply(id, complete(token)).unwrap();
    let after = world.raw(id);
    assert_eq!(world.reseal(id, &read), ResealOutcome::Changed);
    assert_eq!(world.raw(id), after);
    let forget = Forget { actor: "ann".to_owned(), reason: "asked for".to_owned() };
    let read = world.raw(id);
    world.apply(id, Command::Forget(forget)).unwrap();
    world.keys.replace(ring(&[3, 2, 1]));
    assert_eq!(world.reseal(id, &read), ResealOutcome::Changed, "what was forgotten does not come back");
    assert_eq!(world.reseal(id, &world.raw(id)), ResealOutcome::NothingKept);
    assert_eq!(world.claim_again(id).unwrap(), Outcome::Unreplayable);
}

#[test]
fn what_cannot_be_opened_is_refused_and_not_changed() {
    let world = World::with(ring(&[1]));
    let (id, _) = world.completed(1);
    world.keys.replace(ring(&[2]));
    let before = world.raw(id);
    assert_eq!(world.reseal(id, &before), ResealOutcome::Refused(SealError::KeyMissing(key(1).id())));
    // An attacker who can write to the store gets no seal for what they changed or moved.
    world.keys.replace(ring(&[2, 1]));
    let (other, _) = world.completed(2);
    let mut moved = Rewrite::of(&world.raw(other));
    moved.response = Some(Replacement { from: world.stored(other), to: before.response().unwrap().clone() });
    assert_eq!(block_on(world.plain.apply(other, Command::Rewrite(moved))).unwrap(), Outcome::Rewritten);
    assert_eq!(world.reseal(other, &world.raw(other)), ResealOutcome::Refused(SealError::Broken));
    assert_eq!(world.raw(id), before);
    for keys in [ring(&[2, 1]).with_opens_only(true), ring(&[])] {
        world.keys.replace(keys);
        let error = block_on(world.sealed.reseal(id, &before, ResealOptions::default())).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Invalid);
    }
}

#[test]
fn what_is_in_clear_is_sealed_only_if_that_is_asked_for_and_never_if_it_is_refused() {
    let world = World::with(ring(&[]));
    let (id, token) = world.owned(1);
    world.apply(id, record_step(token, 0, "charge", b"1")).unwrap();
    let reseal = |options| block_on(world.sealed.reseal(id, &world.raw(id), options)).unwrap();
    let all = ResealOptions { seals_clear: true, is_dry_run: false };
    world.keys.replace(ring(&[1]).with_required(true));
    assert_eq!(reseal(all), ResealOutcome::UpToDate { has_clear: true });
    world.keys.replace(ring(&[1]));
    assert_eq!(reseal(ResealOptions::default()), ResealOutcome::UpToDate { has_clear: true });
    assert_eq!(reseal(all), ResealOutcome::Resealed { was_clear: true, has_clear: false });
    world.keys.replace(ring(&[1]).with_required(true));
    assert_eq!(block_on(world.sealed.lookup(id)).unwrap().unwrap().steps.len(), 1);
}

/// A store behind a cache that has an old form of one response.
struct Stale {
    store: Arc<MemoryStore>,
    stale: Mutex<Option<StoredResponse>>,
}

impl Store for Stale {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        let stale = self.stale.lock().unwrap().clone().filter(|_| matches!(command, Command::Claim(_)));
        match stale {
            Some(stale) => Box::pin(std::future::ready(Ok(Outcome::Replay(stale)))),
            None => self.store.apply(id, command),
        }
    }

    delegate_store!(self, self.store => lookup list purge audit check changed advisories accept_clock now capabilities);
}

#[test]
fn a_cache_with_an_old_form_refuses_no_replay_of_a_resealed_record() {
    let world = World::with(ring(&[1]));
    let (id, _) = world.completed(1);
    let old = world.stored(id);
    world.keys.replace(ring(&[2, 1]));
    assert_eq!(world.reseal(id, &world.raw(id)), RESEALED);
    let stale = Arc::new(Stale { store: world.plain.clone(), stale: Mutex::new(Some(old)) });
    let reader = SealedStore::new(stale, ring(&[2]));
    let claim_again = |input: &[u8]| -> Result<Outcome, StoreError> {
        block_on(reader.apply(id, Command::Claim(oncegate_testkit::claim(1_u128 << 90, input))))
    };
    assert_eq!(claim_again(b"pay 5").unwrap(), Outcome::Replay(response()));
    assert_eq!(reader.refusals().key_missing(), 0);
    // The response of another request, which a cache would never have: it is not replaced by that of the record.
    assert_eq!(claim_again(b"pay 9").unwrap_err().kind(), StoreErrorKind::Sealed);
    // Forgotten, and still in the cache.
    let forget = Forget { actor: "ann".to_owned(), reason: "asked for".to_owned() };
    world.apply(id, Command::Forget(forget)).unwrap();
    assert_eq!(claim_again(b"pay 5").unwrap(), Outcome::Unreplayable);
    assert!(matches!(world.raw(id).state, State::Completed(_)));
}
