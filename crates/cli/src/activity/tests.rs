//! The bounds of the history: what is replaced by what.

use oncegate_core::FencingToken;
use oncegate_engine::EventKind;

use super::history::History;
use super::hour::MINUTES;
use super::misuse::Misuses;
use super::*;

const BEGUN: EventKind = EventKind::Executing { attempts: 1, after_abandoned: false };

fn at(millis: u64) -> Timestamp {
    Timestamp::from_millis(millis)
}

/// Records of the same shard and of the same set.
fn id(number: u32) -> RecordId {
    let mut bytes = [7; 32];
    bytes[28..].copy_from_slice(&number.to_be_bytes());
    RecordId::from_bytes(bytes)
}

fn add(history: &mut History, id: RecordId, millis: u64, token: u64, kind: EventKind) {
    history.add(id, TimelineEvent { at: at(millis), token: Some(FencingToken::new(token)), kind });
}

fn kinds(history: &History, id: RecordId) -> Vec<EventKind> {
    history.timeline(&id).events.iter().map(|event| event.kind).collect()
}

#[test]
fn ordinary_requests_and_replays_never_replace_a_failed_attempt() {
    let mut history = History::default();
    add(&mut history, id(0), 1, 1, BEGUN);
    add(&mut history, id(0), 2, 1, EventKind::Abandoned);
    for number in 1..10_000 {
        let millis = u64::from(number) + 10;
        add(&mut history, id(number), millis, 1, BEGUN);
        add(&mut history, id(number), millis, 1, EventKind::Completed);
        history.repeat(id(number), RepeatKind::Replayed, at(millis), false);
    }
    assert_eq!(kinds(&history, id(0)), [BEGUN, EventKind::Abandoned]);
    // The newest are there, those before them are not.
    assert_eq!(kinds(&history, id(9_999)), [BEGUN, EventKind::Completed]);
    assert_eq!(kinds(&history, id(1)), []);
}

#[test]
fn events_are_in_order_and_repetitions_are_counted() {
    let mut history = History::default();
    // Two attempts, the second of which takes the record over.
    add(&mut history, id(0), 5, 1, BEGUN);
    add(&mut history, id(0), 6, 1, EventKind::LeaseLost);
    let second = EventKind::Executing { attempts: 2, after_abandoned: true };
    add(&mut history, id(0), 6, 2, second);
    add(&mut history, id(0), 9, 2, EventKind::Executed);
    add(&mut history, id(0), 9, 2, EventKind::Completed);
    add(&mut history, id(0), 10, 2, EventKind::Replayed { waited: false });
    for millis in 20..23 {
        assert!(!history.repeat(id(0), RepeatKind::Replayed, at(millis), false));
    }
    let order = [BEGUN, second, EventKind::LeaseLost, EventKind::Executed, EventKind::Completed];
    assert_eq!(kinds(&history, id(0)), order);
    let repeats = history.timeline(&id(0)).repeats;
    assert_eq!(repeats, [Repeat { kind: RepeatKind::Replayed, count: 3, last: at(22) }]);
}

#[test]
fn a_tight_loop_is_reported_once_in_a_window() {
    let mut history = History::default();
    let mut loops = |from: u64, count: u64, pause: u64| -> usize {
        let times = (0..count).map(|number| from + number * pause);
        times.filter(|millis| history.repeat(id(1), RepeatKind::InProgress, at(*millis), false)).count()
    };
    assert_eq!(loops(100_000, 29, 10), 0);
    assert_eq!(loops(200_000, 1000, 10), 1);
    // A client that retries every second is slow.
    assert_eq!(loops(300_000, 300, 1_000), 0);
    assert_eq!(loops(700_000, 2_000, 10), 2);
}

#[test]
fn requests_that_executed_are_a_loop_and_no_repetition() {
    let mut history = History::default();
    let loops = (0..40).filter(|_| history.repeat(id(1), RepeatKind::Unknown, at(5), true)).count();
    assert_eq!((loops, history.timeline(&id(1)).repeats), (1, Vec::new()));
    history.repeat(id(1), RepeatKind::Unknown, at(6), false);
    assert_eq!(
        history.timeline(&id(1)).repeats,
        [Repeat { kind: RepeatKind::Unknown, count: 1, last: at(6) }]
    );
}

#[test]
fn renewals_are_no_loop() {
    let mut history = History::default();
    assert!((0..100).all(|_| !history.repeat(id(1), RepeatKind::Renewed, at(5), false)));
    assert_eq!(history.timeline(&id(1)).repeats.first().map(|repeat| repeat.count), Some(100));
}

#[test]
fn misuse_is_counted_by_caller_and_operation_in_a_bounded_table() {
    let misuses = Misuses::default();
    for number in 0..5_000_u64 {
        misuses.add(None, &format!("POST /orders/{number}"), MisuseKind::KeyInvalid, at(number));
    }
    let rows = misuses.rows();
    assert!((256..=512).contains(&rows.len()), "{}", rows.len());
    assert_eq!(&*rows.first().unwrap().operation, "POST /orders/4999");
    for _ in 0..3 {
        misuses.add(None, "POST /pay", MisuseKind::Mismatch, at(6_000));
    }
    let rows = misuses.rows();
    assert_eq!(rows.first().unwrap().counts, [3, 0, 0, 0, 0]);
}

#[test]
fn the_last_hour_has_sixty_minutes_and_no_requests_before_the_start() {
    let hour = LastHour::default();
    let start = 1_700_000_040_000_u64; // a full minute
    let total = |count: u64| [count, 0, 0, 0, 0, 0, 0, 0];
    // One request a second for two hours, sampled every ten seconds.
    for sample in 0..=720 {
        hour.add(at(start + sample * 10_000), total(sample * 10));
    }
    let now = start + 7_200_000 + 5_000;
    let minutes = hour.minutes_at(at(now), total(7_205));
    assert_eq!(minutes.len(), MINUTES);
    assert_eq!(minutes.last().unwrap().at, at(start + 7_200_000));
    let inner: Vec<_> = minutes.iter().skip(1).take(58).map(|minute| minute.counts[0]).collect();
    assert_eq!(inner, [60; 58]);
    assert_eq!(minutes.last().unwrap().counts[0], 5);

    let young = LastHour::default();
    young.add(at(start), total(0));
    let minutes = young.minutes_at(at(start + 3_000), total(4));
    assert_eq!(minutes.iter().map(|minute| minute.counts[0]).sum::<u64>(), 4);
    // The clock was set back by an hour.
    young.add(at(start - 3_600_000), total(4));
    let minutes = young.minutes_at(at(start - 3_600_000 + 1_000), total(9));
    assert_eq!(minutes.iter().map(|minute| minute.counts[0]).sum::<u64>(), 5);
}
