//! The memory budgets for the bodies of requests with a key and of their responses, over all connections.

use std::fmt;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytes::Bytes;

/// The bytes that are still free.
///
/// Invariant: the bytes in use, the bytes that each copy of the layer has drawn ahead, and the free bytes add up to
/// the limit.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: usize,
    shared: Arc<Shared>,
    /// The bytes that this copy has drawn ahead, so that its small bodies do not contend with other threads.
    here: AtomicIsize,
}

/// The part of a budget that all copies of the layer share.
#[derive(Debug)]
struct Shared {
    /// The bytes that no copy has drawn. Below zero while more than the limit is in use, after
    /// [`add_always`](BudgetReservation::add_always).
    left: AtomicIsize,
    /// Every copy, to add up the bytes that they have drawn ahead.
    copies: Mutex<Vec<Weak<Budget>>>,
}

impl Shared {
    fn copies(&self) -> MutexGuard<'_, Vec<Weak<Budget>>> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The most bytes that one copy draws ahead.
const MAX_AHEAD: usize = 64 * 1024;

impl Budget {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        let shared = Shared { left: AtomicIsize::new(signed(limit)), copies: Mutex::default() };
        Self::copy(limit, Arc::new(shared))
    }

    /// The same budget, for a copy of the layer that is used on another thread.
    pub(crate) fn apart(&self) -> Arc<Self> {
        Self::copy(self.limit, self.shared.clone())
    }

    fn copy(limit: usize, shared: Arc<Shared>) -> Arc<Self> {
        let copy = Arc::new(Self { limit, shared, here: AtomicIsize::new(0) });
        let mut copies = copy.shared.copies();
        // Each reload of the configuration makes new copies, and the old ones end with their last body.
        copies.retain(|copy| copy.strong_count() > 0);
        copies.push(Arc::downgrade(&copy));
        drop(copies);
        copy
    }

    pub(crate) const fn limit(&self) -> usize {
        self.limit
    }

    /// The bytes in use now, over all copies. They exceed the limit after a reservation that could not be refused.
    /// While other threads reserve and release, the value may be off by the bytes that they draw ahead.
    pub(crate) fn used(&self) -> usize {
        let copies: Vec<_> = self.shared.copies().iter().filter_map(Weak::upgrade).collect();
        let ahead: isize = copies.iter().map(|copy| copy.here.load(Ordering::Relaxed)).sum();
        let free = self.shared.left.load(Ordering::Relaxed).saturating_add(ahead);
        usize::try_from(signed(self.limit).saturating_sub(free)).unwrap_or(0)
    }

    /// Returns true if any byte is free.
    pub(crate) fn has_capacity(&self) -> bool {
        if !self.is_overdrawn() && self.here.load(Ordering::Relaxed) > 0 {
            return true;
        }
        self.return_ahead();
        self.shared.left.load(Ordering::Relaxed) > 0
    }

    /// Returns true if more than the limit is in use, apart from the bytes that copies have drawn ahead. Then no copy
    /// may use its drawn bytes, because they belong to the shortfall.
    fn is_overdrawn(&self) -> bool {
        self.shared.left.load(Ordering::Relaxed) < 0
    }

    /// Returns the bytes that this copy has drawn ahead to the shared part.
    fn return_ahead(&self) {
        let here = self.here.swap(0, Ordering::Relaxed);
        if here != 0 {
            self.shared.left.fetch_add(here, Ordering::Relaxed);
        }
    }

    /// The bytes to draw ahead: only a small part of a small budget, so that other copies can use the rest.
    fn ahead(&self) -> usize {
        (self.limit / 4096).min(MAX_AHEAD)
    }

    /// Reserves these bytes, unless that would exceed the limit.
    fn take(&self, bytes: usize) -> bool {
        if bytes == 0 || (!self.is_overdrawn() && draw(&self.here, bytes)) {
            return true;
        }
        let ahead = self.ahead();
        if draw(&self.shared.left, bytes.saturating_add(ahead)) {
            self.here.fetch_add(signed(ahead), Ordering::Relaxed);
            return true;
        }
        // The budget is nearly used up: add the bytes that were drawn ahead.
        self.return_ahead();
        draw(&self.shared.left, bytes)
    }

    /// Reserves these bytes even beyond the limit. The shortfall counts for all copies.
    fn take_always(&self, bytes: usize) {
        if !self.take(bytes) {
            self.shared.left.fetch_sub(signed(bytes), Ordering::Relaxed);
        }
    }

    fn give(&self, bytes: usize) {
        let here = self.here.fetch_add(signed(bytes), Ordering::Relaxed).saturating_add(signed(bytes));
        if self.is_overdrawn() {
            return self.return_ahead();
        }
        let ahead = signed(self.ahead());
        if here > 2 * ahead {
            let all = self.here.swap(0, Ordering::Relaxed);
            let kept = all.min(ahead);
            self.here.fetch_add(kept, Ordering::Relaxed);
            self.shared.left.fetch_add(all - kept, Ordering::Relaxed);
        }
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        self.shared.left.fetch_add(*self.here.get_mut(), Ordering::Relaxed);
    }
}

/// No body is larger than half of the address space.
fn signed(bytes: usize) -> isize {
    isize::try_from(bytes).unwrap_or(isize::MAX)
}

/// Subtracts these bytes, unless fewer are left. The numbers guard no memory, so relaxed ordering is enough.
fn draw(from: &AtomicIsize, bytes: usize) -> bool {
    let bytes = signed(bytes);
    let drawn = from.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
        (left >= bytes).then(|| left.saturating_sub(bytes))
    });
    drawn.is_ok()
}

/// Reserved bytes. Dropping this releases them.
pub(crate) struct BudgetReservation {
    budget: Arc<Budget>,
    bytes: usize,
}

impl BudgetReservation {
    pub(crate) const fn nothing(budget: Arc<Budget>) -> Self {
        Self { budget, bytes: 0 }
    }

    /// Reserves more bytes. Returns false if the budget is used up.
    pub(crate) fn add(&mut self, bytes: usize) -> bool {
        let taken = self.budget.take(bytes);
        if taken {
            self.bytes += bytes;
        }
        taken
    }

    /// Reserves more bytes even beyond the limit, for the response of an operation that took place.
    pub(crate) fn add_always(&mut self, bytes: usize) {
        self.budget.take_always(bytes);
        self.bytes += bytes;
    }

    /// Releases all but these bytes.
    fn keep(&mut self, bytes: usize) {
        if let Some(surplus) = self.bytes.checked_sub(bytes).filter(|surplus| *surplus > 0) {
            self.bytes = bytes;
            self.budget.give(surplus);
        }
    }
}

impl Drop for BudgetReservation {
    fn drop(&mut self) {
        self.keep(0);
    }
}

impl fmt::Debug for BudgetReservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BudgetReservation").field(&self.bytes).finish()
    }
}

/// From this size on, the reservation of a request lives until the last reference to its bytes is dropped: a slow service may
/// take a large body at once and hold it long. The reservation of a smaller one ends with the body and needs no allocation.
pub(crate) const TIED_REQUEST: usize = 64 * 1024;

/// The same for responses. One HTTP/2 client may have a hundred of them on their way that it does not read.
pub(crate) const TIED_RESPONSE: usize = 4 * 1024;

/// The bytes, and the reservation that has to live as long as the body. From `tied_from` bytes on, the bytes carry it.
pub(crate) fn tie(
    data: Bytes,
    mut held: BudgetReservation,
    tied_from: usize,
) -> (Bytes, Option<BudgetReservation>) {
    held.keep(data.len());
    if data.is_empty() {
        return (data, None);
    }
    if data.len() < tied_from {
        return (data, Some(held));
    }
    (Bytes::from_owner(ReservedBytes { data, _held: held }), None)
}

struct ReservedBytes {
    data: Bytes,
    _held: BudgetReservation,
}

impl AsRef<[u8]> for ReservedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

/// The error of a body that does not fit into the budget.
#[derive(Debug)]
pub(crate) struct BudgetExhausted;

impl fmt::Display for BudgetExhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the memory budget for bodies is used up")
    }
}

impl std::error::Error for BudgetExhausted {}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn held(budget: &Arc<Budget>) -> BudgetReservation {
        BudgetReservation::nothing(budget.clone())
    }

    fn left(budget: &Budget) -> usize {
        let left = budget.shared.left.load(Ordering::Relaxed) + budget.here.load(Ordering::Relaxed);
        usize::try_from(left).unwrap()
    }

    #[test]
    fn a_budget_can_be_reserved_to_the_last_byte_and_released() {
        for limit in [0, 1, 100, 4096, 1 << 20, 1 << 28] {
            let budget = Budget::new(limit);
            for _ in 0..3 {
                let mut all = held(&budget);
                assert!(!all.add(limit + 1));
                assert!(all.add(limit), "{limit}");
                let mut more = held(&budget);
                assert!(!more.add(1), "{limit}");
                drop(more);
                all.keep(limit / 2);
                assert_eq!(left(&budget), limit - limit / 2);
                drop(all);
                assert_eq!(left(&budget), limit);
            }
        }
    }

    #[test]
    fn bytes_beyond_the_limit_are_missing_until_they_are_released() {
        for limit in [0, 100, 1 << 28] {
            let budget = Budget::new(limit);
            let mut all = held(&budget);
            all.add_always(limit + 50);
            assert_eq!((budget.has_capacity(), budget.used()), (false, limit + 50));
            let mut one = held(&budget);
            assert!(!one.add(1), "{limit}");
            all.keep(limit / 2);
            assert_eq!((one.add(limit - limit / 2), left(&budget)), (true, 0), "{limit}");
            drop((all, one));
            assert_eq!((budget.has_capacity(), left(&budget)), (limit > 0, limit));
        }
    }

    #[test]
    fn a_shortfall_counts_for_a_copy_that_has_drawn_ahead() {
        let limit = 1 << 24;
        let one = Budget::new(limit);
        let other = one.apart();
        let (mut small, mut elsewhere) = (held(&one), held(&other));
        assert!(small.add(1) && elsewhere.add(1));
        // Each response is far larger than the bytes that are drawn ahead.
        let mut responses: Vec<_> = (0..40).map(|_| held(&one)).collect();
        for response in &mut responses {
            response.add_always(1 << 20);
        }
        assert_eq!(one.used(), 40 * (1 << 20) + 2);
        for budget in [&one, &other] {
            assert!(!budget.has_capacity());
            assert!(!held(budget).add(1));
            assert!(held(budget).add(0));
        }
        // Released bytes reduce the shortfall first.
        responses.truncate(17);
        drop((small, elsewhere));
        assert!(!one.has_capacity() && !other.has_capacity());
        responses.truncate(15);
        assert!(one.has_capacity() && other.has_capacity());
        drop(responses);
        assert_eq!(one.used(), 0);
        assert!(held(&one).add(limit) || held(&other).add(limit));
    }

    /// For random reservations and releases: only `add_always` exceeds the limit, there is no capacity beyond the limit, and
    /// no byte is lost.
    #[test]
    fn follows_the_sum_of_all_reservations() {
        for (seed, limit) in [(1_u64, 0), (2, 50), (3, 5_000), (4, 100_000), (5, 1 << 24), (6, 1 << 28)] {
            let mut state = seed;
            let mut random = move |below: usize| {
                // SplitMix64.
                state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mut z = state;
                z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                usize::try_from((z ^ (z >> 31)) >> 1).unwrap() % below
            };
            let first = Budget::new(limit);
            let mut copies = [first.clone(), first.apart(), first.apart()];
            let most_ahead = 2 * first.ahead();
            let (mut all, mut sum) = (Vec::new(), 0);
            for _ in 0..20_000 {
                let copy = random(copies.len());
                let bytes = [random(10), random(2_000), random(limit / 2 + 2), limit][random(4)];
                match random(8) {
                    0..=2 => {
                        let mut one = held(&copies[copy]);
                        let ahead_elsewhere = (copies.len() - 1) * most_ahead;
                        let was_added = one.add(bytes);
                        if was_added {
                            assert!(bytes == 0 || sum + bytes <= limit, "{sum} + {bytes} of {limit}");
                            sum += bytes;
                            all.push(one);
                        } else {
                            assert!(sum + bytes + ahead_elsewhere > limit, "{sum} + {bytes} of {limit}");
                        }
                    }
                    3 => {
                        let mut one = held(&copies[copy]);
                        one.add_always(bytes);
                        sum += bytes;
                        all.push(one);
                    }
                    4 if random(50) == 0 => {
                        let apart = copies[copy].apart();
                        copies[random(3)] = apart;
                    }
                    5 => {
                        let has_capacity = copies[copy].has_capacity();
                        assert!(!has_capacity || sum < limit, "{sum} of {limit}");
                        let ahead_elsewhere = (copies.len() - 1) * most_ahead;
                        assert!(has_capacity || sum + ahead_elsewhere >= limit, "{sum} of {limit}");
                    }
                    _ if !all.is_empty() => {
                        let one = all.swap_remove(random(all.len()));
                        sum -= one.bytes;
                    }
                    _ => {}
                }
                assert_eq!(first.used(), sum);
            }
            drop(all);
            assert_eq!(first.used(), 0);
        }
    }

    #[test]
    fn copies_share_it_and_draw_little_ahead() {
        let limit = 1 << 28;
        let one = Budget::new(limit);
        let other = one.apart();
        let (mut a, mut b) = (held(&one), held(&other));
        assert!(a.add(10) && b.add(10));
        assert_eq!((one.used(), other.used()), (20, 20));
        // Only the bytes that the other copy drew ahead are missing here.
        assert!(!a.add(limit - 20));
        assert!(a.add(limit - 20 - MAX_AHEAD));
        assert!(!b.add(MAX_AHEAD + 1));
        assert!(b.add(MAX_AHEAD));
        drop((a, b));
        assert!(one.here.load(Ordering::Relaxed) <= signed(2 * MAX_AHEAD));
        assert_eq!(one.used(), 0);
        drop(other);
        assert_eq!((left(&one), one.used()), (limit, 0));
        // Copies that are gone are not remembered for ever.
        let copies: Vec<_> = (0..10).map(|_| one.apart()).collect();
        drop(copies);
        let _last = one.apart();
        assert_eq!(one.shared.copies().len(), 2);
    }

    #[test]
    fn many_threads_never_exceed_the_limit_and_lose_nothing() {
        let limit = 1 << 20;
        let budget = Budget::new(limit);
        let now = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for seed in 0..8_usize {
                let (apart, now) = (budget.apart(), &now);
                scope.spawn(move || {
                    let mut kept = Vec::new();
                    for round in 0..2000_usize {
                        let bytes = (seed * 7919 + round * 104_729) % 100_000;
                        let mut one = held(&apart);
                        if one.add(bytes) {
                            assert!(now.fetch_add(bytes, Ordering::SeqCst) + bytes <= limit);
                            kept.push(one);
                        }
                        if kept.len() > 3 || round % 5 == 0 {
                            for one in kept.drain(..) {
                                now.fetch_sub(one.bytes, Ordering::SeqCst);
                                drop(one);
                            }
                        }
                    }
                    for one in kept.drain(..) {
                        now.fetch_sub(one.bytes, Ordering::SeqCst);
                    }
                });
            }
        });
        assert_eq!((left(&budget), budget.used()), (limit, 0));
    }

    #[test]
    fn the_reservation_of_a_large_body_lives_as_long_as_its_bytes() {
        for (len, tied) in [(TIED_REQUEST - 1, false), (TIED_REQUEST, true)] {
            let budget = Budget::new(1 << 20);
            let mut taken = held(&budget);
            assert!(taken.add(len + 100));
            let (data, rest) = tie(Bytes::from(vec![7; len]), taken, TIED_REQUEST);
            assert_eq!((data.len(), rest.is_none(), left(&budget)), (len, tied, (1 << 20) - len));
            let part = data.slice(1..2);
            drop((data, rest));
            assert_eq!(left(&budget), (1 << 20) - if tied { len } else { 0 });
            assert_eq!(&part[..], [7]);
            drop(part);
            assert_eq!(left(&budget), 1 << 20);
        }
    }
}
