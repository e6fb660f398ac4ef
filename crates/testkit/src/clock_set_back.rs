//! A store's clock that was ahead and is set right again.

use std::time::Duration;

use oncegate_core::{
    AttemptId, Claim, Clock as _, Command, Complete, Completion, FencingToken, Fingerprint, Label,
    OnAbandoned, Outcome, RecordId, Renew, Store,
};

use crate::{ManualClock, block_on};

const LEASE: Duration = Duration::from_secs(2);
const MINUTE: Duration = Duration::from_secs(60);
const DAY: u64 = 86_400_000;

/// Checks leases that were given while the store's clock was a day ahead: once the clock is right and another claim has come,
/// they end after their own length, not after a day. An owner that is alive keeps its lease by renewing it.
///
/// The store must be empty and use this clock.
///
/// # Panics
/// If the store fails the check.
pub fn check_clock_set_back<S: Store>(store: &S, clock: &ManualClock) {
    let right = clock.now().as_millis();
    clock.set_millis(right + DAY);
    let dead = granted(&claim(store, 1, 1));
    let alive = granted(&claim(store, 2, 2));
    clock.set_millis(right);

    for (record, attempt) in [(1, 3), (2, 4)] {
        assert_eq!(claim(store, record, attempt), Outcome::InProgress { lease_left: LEASE });
    }
    clock.advance(LEASE - Duration::from_millis(500));
    let renew = Renew { token: alive, lease: LEASE, retention: MINUTE };
    let renewed = apply(store, 2, Command::Renew(renew));
    assert_eq!(renewed, Outcome::Renewed { lease_until: clock.now().after(LEASE) });
    clock.advance(Duration::from_secs(1));
    let taken = claim(store, 1, 5);
    let Outcome::Execute(grant) = &taken else {
        panic!("no attempt owns the record, but a claim gets {taken:?}")
    };
    assert!(grant.token > dead && grant.after_abandoned && grant.attempts == 2, "{grant:?}");
    assert_eq!(complete(store, 1, dead), Outcome::Fenced);
    assert_eq!(complete(store, 1, grant.token), Outcome::Completed);
    let other = claim(store, 2, 6);
    assert_eq!(other, Outcome::InProgress { lease_left: LEASE - Duration::from_secs(1) });
    assert_eq!(complete(store, 2, alive), Outcome::Completed);
}

fn apply<S: Store>(store: &S, record: u8, command: Command) -> Outcome {
    block_on(store.apply(RecordId::from_bytes([record; 32]), command)).expect("the store answers")
}

fn claim<S: Store>(store: &S, record: u8, attempt: u128) -> Outcome {
    let claim = Claim {
        attempt: AttemptId::new(attempt),
        fingerprint: Fingerprint::of_parts("clock", &[b"same"]),
        lease: LEASE,
        retention: MINUTE,
        on_abandoned: OnAbandoned::Reexecute,
        label: Label::default(),
    };
    apply(store, record, Command::Claim(claim))
}

fn complete<S: Store>(store: &S, record: u8, token: FencingToken) -> Outcome {
    let complete = Complete { token, completion: Completion::Tombstone, retention: MINUTE };
    apply(store, record, Command::Complete(complete))
}

fn granted(outcome: &Outcome) -> FencingToken {
    match outcome {
        Outcome::Execute(grant) => grant.token,
        other => panic!("the record is free, but a claim gets {other:?}"),
    }
}
