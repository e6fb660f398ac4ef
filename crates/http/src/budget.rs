//! How much the bodies of requests with a key may hold together, over all connections.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::body::{BoxError, into_bytes};

/// What may still be held.
///
/// What is held, what each copy of the layer has drawn ahead and what is left add up to the limit, always.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: usize,
    /// What nobody has drawn: one number for all copies of the layer.
    left: Arc<AtomicUsize>,
    /// What this copy has drawn ahead, so that its small bodies meet no other thread's.
    here: AtomicUsize,
}

/// Most that one copy draws ahead.
const AHEAD_MAX: usize = 64 * 1024;

impl Budget {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, left: Arc::new(AtomicUsize::new(limit)), here: AtomicUsize::new(0) }
    }

    /// The same budget, for a copy of the layer that is used on another thread.
    pub(crate) fn apart(&self) -> Self {
        Self { limit: self.limit, left: self.left.clone(), here: AtomicUsize::new(0) }
    }

    /// So little of a small budget that what copies drew ahead keeps nobody from the rest.
    fn ahead(&self) -> usize {
        (self.limit / 4096).min(AHEAD_MAX)
    }

    fn take(&self, octets: usize) -> bool {
        if draw(&self.here, octets) {
            return true;
        }
        let ahead = self.ahead();
        if draw(&self.left, octets.saturating_add(ahead)) {
            self.here.fetch_add(ahead, Ordering::Relaxed);
            return true;
        }
        // The last that there is.
        let here = self.here.swap(0, Ordering::Relaxed);
        let missing = octets.saturating_sub(here);
        let taken = draw(&self.left, missing);
        self.here.fetch_add(if taken { here.saturating_sub(octets) } else { here }, Ordering::Relaxed);
        taken
    }

    fn give(&self, octets: usize) {
        let here = self.here.fetch_add(octets, Ordering::Relaxed).saturating_add(octets);
        if here > 2 * self.ahead() {
            let all = self.here.swap(0, Ordering::Relaxed);
            let kept = all.min(self.ahead());
            self.here.fetch_add(kept, Ordering::Relaxed);
            self.left.fetch_add(all - kept, Ordering::Relaxed);
        }
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        self.left.fetch_add(*self.here.get_mut(), Ordering::Relaxed);
    }
}

/// The numbers guard no memory, so their order with other writes does not matter.
fn draw(from: &AtomicUsize, octets: usize) -> bool {
    from.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(octets)).is_ok()
}

/// Octets that are held. Given back when this is dropped, whatever the reason.
pub(crate) struct Held {
    budget: Arc<Budget>,
    octets: usize,
}

impl Held {
    pub(crate) const fn nothing(budget: Arc<Budget>) -> Self {
        Self { budget, octets: 0 }
    }

    /// False where there is no room.
    fn more(&mut self, octets: usize) -> bool {
        let taken = self.budget.take(octets);
        if taken {
            self.octets += octets;
        }
        taken
    }

    /// Gives back all but these.
    fn only(&mut self, octets: usize) {
        if let Some(surplus) = self.octets.checked_sub(octets).filter(|surplus| *surplus > 0) {
            self.octets = octets;
            self.budget.give(surplus);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.only(0);
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Held").field(&self.octets).finish()
    }
}

/// From this size on, what is held is given back when the last reference to the octets goes: a slow service may take a
/// large body at once and hold it long. Smaller ones are given back with the request's body, without an allocation.
const TIED_FROM: usize = 64 * 1024;

/// The octets, and what has to live as long as the body does.
pub(crate) fn tie(data: Bytes, mut held: Held) -> (Bytes, Option<Held>) {
    held.only(data.len());
    if data.is_empty() {
        return (data, None);
    }
    if data.len() < TIED_FROM {
        return (data, Some(held));
    }
    (Bytes::from_owner(Tied { data, _held: held }), None)
}

struct Tied {
    data: Bytes,
    _held: Held,
}

impl AsRef<[u8]> for Tied {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

/// Why a body broke off: there is no room for it.
#[derive(Debug)]
pub(crate) struct NoRoom;

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("too much is being received at the moment")
    }
}

impl std::error::Error for NoRoom {}

pin_project! {
    /// A body on its way in: what comes of it is taken from the budget.
    pub(crate) struct Charged<'a, B> {
        #[pin]
        body: B,
        held: &'a mut Held,
        pieces: usize,
    }
}

impl<'a, B> Charged<'a, B> {
    pub(crate) const fn new(body: B, held: &'a mut Held) -> Self {
        Self { body, held, pieces: 0 }
    }
}

/// Beyond so many pieces a piece counts as [`PIECE`] octets at the least: what is kept of each, beside its octets.
const FREE_PIECES: usize = 64;
const PIECE: usize = 64;

impl<B: Body<Error: Into<BoxError>>> Body for Charged<'_, B> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.project();
        let frame = match ready!(this.body.poll_frame(cx)) {
            None => return Poll::Ready(None),
            Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
            Some(Ok(frame)) => into_bytes(frame),
        };
        if let Some(data) = frame.data_ref().filter(|data| !data.is_empty()) {
            *this.pieces += 1;
            let counted = if *this.pieces > FREE_PIECES { data.len().max(PIECE) } else { data.len() };
            if !this.held.more(counted) {
                return Poll::Ready(Some(Err(NoRoom.into())));
            }
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(budget: &Arc<Budget>) -> Held {
        Held::nothing(budget.clone())
    }

    fn left(budget: &Budget) -> usize {
        budget.left.load(Ordering::Relaxed) + budget.here.load(Ordering::Relaxed)
    }

    #[test]
    fn is_taken_to_the_last_octet_and_given_back() {
        for limit in [0, 1, 100, 4096, 1 << 20, 1 << 28] {
            let budget = Arc::new(Budget::new(limit));
            for _ in 0..3 {
                let mut all = held(&budget);
                assert!(!all.more(limit + 1));
                assert!(all.more(limit), "{limit}");
                let mut more = held(&budget);
                assert!(!more.more(1), "{limit}");
                drop(more);
                all.only(limit / 2);
                assert_eq!(left(&budget), limit - limit / 2);
                drop(all);
                assert_eq!(left(&budget), limit);
            }
        }
    }

    #[test]
    fn copies_share_it_and_draw_little_ahead() {
        let limit = 1 << 28;
        let one = Arc::new(Budget::new(limit));
        let other = Arc::new(one.apart());
        let (mut a, mut b) = (held(&one), held(&other));
        assert!(a.more(10) && b.more(10));
        // What the other drew ahead is all that is missing here.
        assert!(!a.more(limit - 20));
        assert!(a.more(limit - 20 - AHEAD_MAX));
        assert!(!b.more(AHEAD_MAX + 1));
        assert!(b.more(AHEAD_MAX));
        drop((a, b));
        assert!(one.here.load(Ordering::Relaxed) <= 2 * AHEAD_MAX);
        drop(other);
        assert_eq!(left(&one), limit);
    }

    #[test]
    fn many_threads_never_hold_more_and_lose_nothing() {
        let limit = 1 << 20;
        let budget = Budget::new(limit);
        let now = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for seed in 0..8_usize {
                let (apart, now) = (Arc::new(budget.apart()), &now);
                scope.spawn(move || {
                    let mut kept = Vec::new();
                    for round in 0..2000_usize {
                        let octets = (seed * 7919 + round * 104_729) % 100_000;
                        let mut one = held(&apart);
                        if one.more(octets) {
                            assert!(now.fetch_add(octets, Ordering::SeqCst) + octets <= limit);
                            kept.push(one);
                        }
                        if kept.len() > 3 || round % 5 == 0 {
                            for one in kept.drain(..) {
                                now.fetch_sub(one.octets, Ordering::SeqCst);
                                drop(one);
                            }
                        }
                    }
                    for one in kept.drain(..) {
                        now.fetch_sub(one.octets, Ordering::SeqCst);
                    }
                });
            }
        });
        assert_eq!(left(&budget), limit);
    }

    #[test]
    fn a_large_body_is_held_as_long_as_its_octets() {
        for (len, tied) in [(TIED_FROM - 1, false), (TIED_FROM, true)] {
            let budget = Arc::new(Budget::new(1 << 20));
            let mut taken = held(&budget);
            assert!(taken.more(len + 100));
            let (data, rest) = tie(Bytes::from(vec![7; len]), taken);
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
