//! Leases that were given while the store's clock was ahead. `oncegate_testkit::conformance::check_clock_set_back` checks the

//! stores of servers. Stores in this process have a clock that is never set.

use std::time::Duration;

use oncegate_core::{
    AttemptId, Claim, Command, Decision, Fingerprint, Label, OnAbandoned, Outcome, Record, Renew, State,
    Timestamp, Write, decide, limits,
};

const LEASE: Duration = Duration::from_secs(30);
const RETENTION: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(86_400);
const RIGHT: Timestamp = Timestamp::from_millis(1_700_000_000_000);

fn claim(attempt: u128, lease: Duration) -> Command {
    Command::Claim(Claim {
        attempt: AttemptId::new(attempt),
        fingerprint: Fingerprint::of_parts("clock", &[b"same"]),
        lease,
        retention: RETENTION,
        on_abandoned: OnAbandoned::Park,
        label: Label::default(),
    })
}

fn put(decision: Decision) -> Record {
    match decision.write {
        Write::Put(record) => record,
        other => panic!("{other:?} for {:?}", decision.outcome),
    }
}

fn granted(lease: Duration, ahead: Duration) -> Record {
    put(decide(None, &claim(1, lease), RIGHT.after(ahead)))
}

#[test]
fn a_lease_from_a_clock_that_was_ahead_is_shortened_to_its_length() {
    let before = granted(LEASE, DAY);
    let decision = decide(Some(&before), &claim(2, LEASE), RIGHT);
    assert_eq!(decision.outcome, Outcome::InProgress { lease_left: LEASE });
    let after = put(decision);
    let until = RIGHT.after(LEASE);
    let attempt = AttemptId::new(1);
    assert_eq!(after.state, State::InProgress { attempt, lease_until: until, after_abandoned: false });
    assert_eq!((after.changed_at, after.expires_at), (RIGHT, until.after(RETENTION)));
    assert_eq!((after.token, after.attempts, after.created_at), (before.token, 1, before.created_at));
    // From then on it is an ordinary lease: its owner can renew it, and it ends.
    let again = decide(Some(&after), &claim(3, LEASE), RIGHT.after(LEASE / 2));
    assert_eq!(
        again,
        Decision { outcome: Outcome::InProgress { lease_left: LEASE / 2 }, write: Write::Keep }
    );
    let renew = Renew { token: before.token, lease: LEASE, retention: RETENTION };
    let renewed = decide(Some(&after), &Command::Renew(renew), RIGHT.after(LEASE / 2));
    assert_eq!(renewed.outcome, Outcome::Renewed { lease_until: RIGHT.after(LEASE * 3 / 2) });
    assert_eq!(decide(Some(&after), &claim(4, LEASE), until).outcome, Outcome::Unknown);
}

/// The sender of the claim may have other settings than the owner, so a possible lease counts as a lease.
#[test]
fn a_possible_lease_is_not_shortened() {
    let hour = limits::MAX_LEASE;
    for (lease, ahead, other) in [
        (LEASE, Duration::ZERO, LEASE),
        (LEASE, hour - LEASE, LEASE),
        (hour, Duration::ZERO, LEASE),
        // Beyond what the engine gives out, but a store takes it.
        (hour * 5, Duration::ZERO, LEASE),
        (LEASE, hour * 2, hour * 3),
    ] {
        let record = granted(lease, ahead);
        let decision = decide(Some(&record), &claim(2, other), RIGHT);
        let outcome = Outcome::InProgress { lease_left: ahead + lease };
        assert_eq!(decision, Decision { outcome, write: Write::Keep }, "{lease:?} {ahead:?} {other:?}");
    }
    let record = granted(LEASE, hour * 2);
    let mismatch = Command::Claim(Claim {
        attempt: AttemptId::new(2),
        fingerprint: Fingerprint::of_parts("clock", &[b"other"]),
        lease: LEASE,
        retention: RETENTION,
        on_abandoned: OnAbandoned::Park,
        label: Label::default(),
    });
    let refused = Decision { outcome: Outcome::Mismatch, write: Write::Keep };
    assert_eq!(decide(Some(&record), &mismatch, RIGHT), refused);
}
