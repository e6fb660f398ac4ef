//! The time of stores.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::limits;
use crate::map::lock;
use crate::store::Advisory;

/// A point in time by the store's clock: milliseconds since 1970-01-01T00:00:00Z.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The time this many milliseconds after the Unix epoch.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis)
    }

    /// Milliseconds since the Unix epoch.
    #[must_use]
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// The time `duration` later, or the last possible time. Fractions of a millisecond count as a whole one, so that no
    /// lease is shorter than requested.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        let millis = duration.as_nanos().div_ceil(1_000_000);
        Self(self.0.saturating_add(u64::try_from(millis).unwrap_or(u64::MAX)))
    }

    /// The time from `earlier` to this time; zero if `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }

    /// The time in the form of RFC 3339, in UTC with milliseconds: `2026-11-24T01:38:13.004Z`. Programs that exchange times send
    /// [milliseconds](Self::as_millis).
    #[must_use]
    pub fn to_rfc3339(self) -> String {
        let (seconds, millis) = (self.0 / 1000, self.0 % 1000);
        let (days, second) = (seconds / 86_400, seconds % 86_400);
        // Days since 0000-03-01, so that a leap day is the last day of its year; 400 years have 146097 days.
        let days = days + 719_468;
        let (era, day_of_era) = (days / 146_097, days % 146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
        let year = era * 400 + year_of_era + u64::from(month <= 2);
        let (hour, minute, second) = (second / 3600, second % 3600 / 60, second % 60);
        format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
    }
}

/// A source of time. [`decide`](crate::decide()) reads no clock: a store reads it and passes the time on.
pub trait Clock: Send + Sync + 'static {
    /// The time of day, which may be set while the program runs, ahead or back.
    fn now(&self) -> Timestamp;

    /// The time since some fixed moment, by a clock that cannot be set. With it, a store detects that the time of day was
    /// set. The default is the time of day itself: such a clock is always trusted.
    fn elapsed(&self) -> Duration {
        Duration::from_millis(self.now().as_millis())
    }
}

impl<C: Clock + ?Sized> Clock for Arc<C> {
    fn now(&self) -> Timestamp {
        (**self).now()
    }

    fn elapsed(&self) -> Duration {
        (**self).elapsed()
    }
}

/// The clocks of the operating system: the time of day, and the monotonic clock next to it.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    start: Instant,
}

impl SystemClock {
    /// The clocks of this machine.
    #[must_use]
    pub fn new() -> Self {
        Self { start: Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Timestamp(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }

    fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }
}

/// The time of a store that lives in this process: it never runs backwards, and never jumps.
///
/// Retentions and leases are periods, so a store must not mistake a clock that was *set* for time that has *passed*: if a
/// record expires because of a wrong reply of a time server, its operation is executed again. So the store's time advances
/// with the monotonic clock, and follows the time of day only as in this table.
///
/// | the time of day is set | the store's time |
/// |---|---|
/// | ahead by at most [`limits::MAX_CLOCK_STEP`] | follows at once |
/// | ahead by more | keeps its own pace until the clock is set back, or an operator [accepts](Self::accept) the new time |
/// | back | keeps its own pace |
///
/// A store that outlives its process [resumes](Self::resume). The time between two processes is that of the time of day,
/// because no other clock covers it. If the time of day is behind the last write, the store's time continues from that
/// write. A later correction of the time of day is [expected](ClockSkew::is_expected).
pub struct StoreClock<C> {
    clock: C,
    /// The store's time when `elapsed` was zero, in milliseconds. It only grows.
    base: AtomicU64,
    /// True if the time of day, as last seen, is too far ahead to be followed.
    is_ahead: AtomicBool,
    ahead: Mutex<Ahead>,
}

/// The state while the time of day is too far ahead.
#[derive(Debug, Default)]
struct Ahead {
    /// The store's time from which it may lag behind the time of day.
    since: Option<Timestamp>,
    /// True if the time of day was behind the last write when the store was opened: it was wrong, and will be corrected.
    expected: bool,
}

/// The times of the last write of a process before this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastWrite {
    /// By the store's clock.
    pub time: Timestamp,
    /// By the time of day. Later than `time` by more than [`limits::MAX_CLOCK_STEP`] if the store did not follow it.
    pub wall: Timestamp,
    /// The store's time from which it did not follow the time of day.
    pub lagging_since: Option<Timestamp>,
}

/// A disagreement between the time of day and the time that has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockSkew {
    /// The difference.
    pub by: Duration,
    /// True if the time of day is ahead of the store's time; false if it is behind.
    pub is_ahead: bool,
    /// If it is ahead: the store's time from which the two disagree.
    pub since: Timestamp,
    /// True if the time of day was known to be wrong when the store was opened, so that this is its correction. The store
    /// accepts the correction by itself.
    pub is_expected: bool,
}

impl ClockSkew {
    /// The disagreement as an advisory. A clock that is behind needs no operator, so it has a name of its own, without an alert.
    #[must_use]
    pub fn advisory(&self) -> Advisory {
        Advisory::new(if self.is_ahead { "clock" } else { "clock-behind" }, self.to_string())
    }
}

impl fmt::Display for ClockSkew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.by.as_secs();
        if self.is_ahead {
            write!(
                f,
                "the clock of this machine was set ahead by {seconds} s. The store ignores that, so no record and no lease \
                 expires early. Correct the clock, or, if it is right, see `oncegate clock show`"
            )
        } else {
            write!(
                f,
                "the clock of this machine is {seconds} s behind the time of the store, which keeps its own pace. If the \
                 clock is wrong, correct it. If it was ahead before and is right now, do nothing: leases and retentions last \
                 as long as they should"
            )
        }
    }
}

impl<C: Clock> StoreClock<C> {
    /// The time of a new store.
    pub fn new(clock: C) -> Self {
        let base = millis(clock.now(), clock.elapsed());
        Self { clock, base: base.into(), is_ahead: false.into(), ahead: Mutex::default() }
    }

    /// The time of a store that an earlier process wrote.
    pub fn resume(clock: C, last: LastWrite) -> Self {
        let wall = clock.now();
        let lagged = last.wall.since(last.time) > limits::MAX_CLOCK_STEP;
        let (time, ahead) = if lagged && wall.after(limits::MAX_CLOCK_STEP) >= last.wall {
            // The two still disagree by about as much, so the new time was not accepted in between.
            let since = Some(last.lagging_since.unwrap_or(last.time));
            (last.time.after(wall.since(last.wall)), Ahead { since, expected: false })
        } else if wall >= last.time {
            (wall, Ahead::default())
        } else {
            let expected = last.time.since(wall) > limits::MAX_CLOCK_STEP;
            (last.time, Ahead { since: expected.then_some(last.time), expected })
        };
        let base = millis(time, clock.elapsed());
        let is_ahead = ahead.since.is_some().into();
        Self { clock, base: base.into(), is_ahead, ahead: Mutex::new(ahead) }
    }

    /// The time of day, unchanged.
    pub fn wall(&self) -> Timestamp {
        self.clock.now()
    }

    /// The disagreement between the time of day and the time that has passed, if it is more than
    /// [`limits::MAX_CLOCK_STEP`].
    pub fn skew(&self) -> Option<ClockSkew> {
        let mut ahead = lock(&self.ahead);
        let reading = self.read();
        self.note(&mut ahead, &reading);
        let Reading { time, wall, .. } = reading;
        let is_ahead = wall > time;
        let by = if is_ahead { wall.since(time) } else { time.since(wall) };
        (by > limits::MAX_CLOCK_STEP).then(|| ClockSkew {
            by,
            is_ahead,
            since: ahead.since.unwrap_or(time),
            is_expected: is_ahead && ahead.expected,
        })
    }

    /// True if the time of day was too far ahead to be followed when it was last read. Cheaper than [`skew`](Self::skew).
    pub fn is_ahead(&self) -> bool {
        self.is_ahead.load(Ordering::SeqCst)
    }

    /// The store's time from which it lags, to be kept for the next process.
    pub fn lagging_since(&self) -> Option<Timestamp> {
        let ahead = lock(&self.ahead);
        ahead.since.filter(|_| !ahead.expected)
    }

    /// Moves the store's time ahead by the accepted [difference](ClockSkew::by). The store must first
    /// [shift](crate::Record::shifted) the records that it has written since the two disagree.
    pub fn accept(&self, by: Duration) {
        let mut ahead = lock(&self.ahead);
        self.base.fetch_add(u64::try_from(by.as_millis()).unwrap_or(u64::MAX), Ordering::SeqCst);
        *ahead = Ahead::default();
        self.is_ahead.store(false, Ordering::SeqCst);
    }

    fn read(&self) -> Reading {
        // The time of day is read first, so that a pause in between makes it look older, never newer.
        let wall = self.clock.now();
        let elapsed = u64::try_from(self.clock.elapsed().as_millis()).unwrap_or(u64::MAX);
        let base = self.base.load(Ordering::SeqCst);
        Reading { wall, elapsed, time: Timestamp(base.saturating_add(elapsed)) }
    }

    /// Updates the state that depends on the time of day being too far ahead.
    fn note(&self, ahead: &mut Ahead, reading: &Reading) {
        if !reading.can_follow() {
            ahead.since.get_or_insert(reading.time);
            self.is_ahead.store(true, Ordering::SeqCst);
        } else if !(ahead.expected && reading.wall < reading.time) {
            *ahead = Ahead::default();
            self.is_ahead.store(false, Ordering::SeqCst);
        }
    }
}

/// Both clocks at one moment.
struct Reading {
    wall: Timestamp,
    elapsed: u64,
    /// The store's time, before it follows the time of day.
    time: Timestamp,
}

impl Reading {
    fn can_follow(&self) -> bool {
        self.wall.since(self.time) <= limits::MAX_CLOCK_STEP
    }
}

impl<C: Clock> Clock for StoreClock<C> {
    fn now(&self) -> Timestamp {
        let mut reading = self.read();
        if !reading.can_follow() || self.is_ahead.load(Ordering::SeqCst) {
            let mut ahead = lock(&self.ahead);
            // Read again under the lock: this thread may have been paused, and must not undo what others have noted since.
            reading = self.read();
            self.note(&mut ahead, &reading);
        }
        if !reading.can_follow() || reading.wall <= reading.time {
            return reading.time;
        }
        let follows = reading.wall.0.saturating_sub(reading.elapsed);
        let base = self.base.fetch_max(follows, Ordering::SeqCst).max(follows);
        Timestamp(base.saturating_add(reading.elapsed))
    }
}

impl<C> fmt::Debug for StoreClock<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreClock").finish_non_exhaustive()
    }
}

/// `time` minus `elapsed`, in milliseconds.
fn millis(time: Timestamp, elapsed: Duration) -> u64 {
    time.0.saturating_sub(u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fraction_of_a_millisecond_counts_as_a_whole_one() {
        let start = Timestamp::from_millis(10);
        assert_eq!(start.after(Duration::from_nanos(1)), Timestamp::from_millis(11));
        assert_eq!(start.after(Duration::from_millis(5)), Timestamp::from_millis(15));
        assert_eq!(start.after(Duration::MAX), Timestamp::from_millis(u64::MAX));
        assert_eq!(start.since(Timestamp::from_millis(12)), Duration::ZERO);
    }

    #[test]
    fn times_are_shown_in_utc() {
        let shown = |seconds: u64| Timestamp::from_millis(seconds * 1000 + 999).to_rfc3339();
        assert_eq!(shown(0), "1970-01-01T00:00:00.999Z");
        assert_eq!(shown(951_782_399), "2000-02-28T23:59:59.999Z");
        assert_eq!(shown(951_782_400), "2000-02-29T00:00:00.999Z");
        assert_eq!(shown(1_704_067_199), "2023-12-31T23:59:59.999Z");
        assert_eq!(shown(1_709_251_200), "2024-03-01T00:00:00.999Z");
        assert_eq!(shown(4_107_542_400), "2100-03-01T00:00:00.999Z");
        assert!(Timestamp::from_millis(u64::MAX).to_rfc3339().ends_with('Z'));
    }

    /// Two clocks to set by hand.
    #[derive(Default)]
    struct Hands {
        wall: AtomicU64,
        elapsed: AtomicU64,
    }

    impl Clock for Hands {
        fn now(&self) -> Timestamp {
            Timestamp(self.wall.load(Ordering::SeqCst))
        }

        fn elapsed(&self) -> Duration {
            Duration::from_millis(self.elapsed.load(Ordering::SeqCst))
        }
    }

    impl Hands {
        fn at(wall: u64) -> Arc<Self> {
            Arc::new(Self { wall: wall.into(), elapsed: 7.into() })
        }

        fn pass(&self, millis: u64) {
            self.wall.fetch_add(millis, Ordering::SeqCst);
            self.elapsed.fetch_add(millis, Ordering::SeqCst);
        }

        fn set(&self, wall: u64) {
            self.wall.store(wall, Ordering::SeqCst);
        }
    }

    const HOUR: u64 = 3_600_000;
    const STEP: u64 = limits::MAX_CLOCK_STEP.as_millis() as u64;
    const START: u64 = 500_000 * HOUR;

    fn last(time: u64, wall: u64) -> LastWrite {
        LastWrite { time: Timestamp(time), wall: Timestamp(wall), lagging_since: None }
    }

    #[test]
    fn a_small_step_ahead_is_followed_but_a_step_back_is_not() {
        let hands = Hands::at(START);
        let clock = StoreClock::new(hands.clone());
        hands.set(START + STEP);
        assert_eq!(clock.now().0, START + STEP);
        assert_eq!(clock.skew(), None);
        hands.set(START);
        hands.pass(1000);
        assert_eq!(clock.now().0, START + STEP + 1000);
        assert_eq!(clock.skew(), None);
    }

    #[test]
    fn a_clock_that_jumps_ahead_and_comes_back_moves_nothing() {
        let hands = Hands::at(START);
        let clock = StoreClock::new(hands.clone());
        hands.set(START + STEP + 1);
        assert_eq!(clock.now().0, START);
        assert!(clock.skew().is_some_and(|skew| skew.is_ahead && !skew.is_expected));
        hands.set(START + 48 * HOUR);
        hands.pass(1000);
        assert_eq!(clock.now().0, START + 1000);
        assert_eq!(clock.lagging_since(), Some(Timestamp(START)));
        hands.set(START + 2000);
        hands.pass(1000);
        assert_eq!(clock.now().0, START + 3000);
        assert_eq!((clock.skew(), clock.lagging_since()), (None, None));
    }

    #[test]
    fn the_store_continues_from_an_accepted_time() {
        let hands = Hands::at(START);
        let clock = StoreClock::new(hands.clone());
        hands.set(START + 48 * HOUR);
        hands.pass(1000);
        let skew = clock.skew().unwrap();
        assert_eq!((skew.by, skew.since.0), (Duration::from_millis(48 * HOUR), START + 1000));
        clock.accept(skew.by);
        assert_eq!(clock.now().0, START + 48 * HOUR + 1000);
        assert_eq!(clock.skew(), None);
    }

    #[test]
    fn a_clock_far_behind_is_reported_and_the_time_continues() {
        let hands = Hands::at(START);
        let clock = StoreClock::new(hands.clone());
        hands.set(START - HOUR);
        hands.pass(1000);
        assert_eq!(clock.now().0, START + 1000);
        assert!(clock.skew().is_some_and(|skew| !skew.is_ahead && skew.by == Duration::from_millis(HOUR)));
    }

    #[test]
    fn the_last_write_is_a_lower_bound_but_no_offset() {
        let hands = Hands::at(START - 10 * HOUR);
        let clock = StoreClock::resume(hands.clone(), last(START, START));
        hands.pass(1000);
        assert_eq!(clock.now().0, START + 1000);
        // The time of day was corrected. It is ahead by the time that the machine was off.
        hands.set(START + 2000);
        assert_eq!(clock.now().0, START + 2000);
        assert_eq!(clock.skew(), None);
        hands.pass(1000);
        assert_eq!(clock.now().0, START + 3000);
    }

    #[test]
    fn a_correction_by_more_than_a_step_is_expected() {
        let hands = Hands::at(START - 10 * HOUR);
        let clock = StoreClock::resume(hands.clone(), last(START, START));
        hands.pass(1000);
        assert!(clock.skew().is_some_and(|skew| !skew.is_ahead));
        hands.set(START + 60 * HOUR);
        let skew = clock.skew().unwrap();
        assert!(skew.is_ahead && skew.is_expected, "{skew:?}");
        assert_eq!((skew.since.0, skew.by), (START, Duration::from_millis(60 * HOUR - 1000)));
        clock.accept(skew.by);
        assert_eq!(clock.now().0, START + 60 * HOUR);
    }

    #[test]
    fn the_time_between_two_processes_counts_and_a_lag_is_kept() {
        let resumed = |wall, last| {
            let clock = StoreClock::resume(Hands::at(wall), last);
            (clock.now().0, clock.skew().map(|skew| (skew.since.0, skew.by)), clock.lagging_since())
        };
        assert_eq!(resumed(START + HOUR, last(START, START)), (START + HOUR, None, None));
        let mut lagging = last(START, START + 48 * HOUR);
        lagging.lagging_since = Some(Timestamp(START - 5));
        let by = Duration::from_millis(48 * HOUR);
        let since = Some(Timestamp(START - 5));
        assert_eq!(resumed(START + 49 * HOUR, lagging), (START + HOUR, Some((START - 5, by)), since));
        // The store is opened again at once.
        let at_once = resumed(START + 48 * HOUR - 90, lagging);
        assert_eq!((at_once.0, at_once.2), (START, since));
        // The time of day was wrong, and was corrected in between.
        assert_eq!(resumed(START + HOUR, lagging), (START + HOUR, None, None));
    }

    #[test]
    fn the_systems_clocks_agree() {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let shown = Duration::from_millis(StoreClock::new(SystemClock::new()).now().as_millis());
        assert!(shown + Duration::from_millis(2) >= wall && shown < wall + Duration::from_secs(60));
    }
}
