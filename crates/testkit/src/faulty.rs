//! A store with faults on demand.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use oncegate_core::{
    AuditEntry, Command, Extent, IntoStore, ListPage, ListQuery, Outcome, Record, RecordId, Store,
    StoreError, StoreFuture, delegate_store,
};

/// A store with faults on demand. Without a fault it behaves like the wrapped store.
///
/// ```
/// use oncegate_core::{MemoryStore, Store};
/// use oncegate_testkit::{Fault, FaultyStore, Operation};
///
/// let (store, faults) = FaultyStore::new(MemoryStore::default());
/// faults.always(Operation::Check, Fault::Refuse);
/// # let mut context = std::task::Context::from_waker(std::task::Waker::noop());
/// assert!(matches!(store.check().as_mut().poll(&mut context), std::task::Poll::Ready(Err(_))));
/// faults.heal();
/// assert!(matches!(store.check().as_mut().poll(&mut context), std::task::Poll::Ready(Ok(()))));
/// ```
pub struct FaultyStore {
    inner: Arc<dyn Store>,
    faults: Faults,
}

/// An operation of a store: the commands one by one, then the other methods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// [`Command::Claim`].
    Claim,
    /// [`Command::Renew`].
    Renew,
    /// [`Command::Complete`].
    Complete,
    /// [`Command::Release`].
    Release,
    /// Any other command.
    OtherCommand,
    /// [`Store::lookup`].
    Lookup,
    /// [`Store::list`].
    List,
    /// [`Store::purge`].
    Purge,
    /// [`Store::audit`].
    Audit,
    /// [`Store::check`].
    Check,
}

impl Operation {
    /// Every operation.
    pub const ALL: [Self; 10] = [
        Self::Claim,
        Self::Renew,
        Self::Complete,
        Self::Release,
        Self::OtherCommand,
        Self::Lookup,
        Self::List,
        Self::Purge,
        Self::Audit,
        Self::Check,
    ];

    const fn of(command: &Command) -> Self {
        match command {
            Command::Claim(_) => Self::Claim,
            Command::Renew(_) => Self::Renew,
            Command::Complete(_) => Self::Complete,
            Command::Release(_) => Self::Release,
            _ => Self::OtherCommand,
        }
    }
}

/// A fault of one operation.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Fault {
    /// It is refused as unavailable, and nothing is done.
    Refuse,
    /// It is refused because the store is full ([`Extent::Writes`]), and nothing is done.
    Full,
    /// It is refused because a transaction holds the record ([`Extent::Record`]), and nothing is done.
    Busy,
    /// It is done, and its reply is lost: unavailable.
    LoseReply,
    /// It is refused because the record cannot be read.
    Corrupt,
    /// It is not begun before the latch opens.
    StallBefore(Latch),
    /// It is done, and not answered before the latch opens.
    StallAfter(Latch),
    /// It is refused as unavailable, but the command is still on its way: [`Faults::arrive`] applies it.
    Delay,
}

/// The faults of a [`FaultyStore`]. All clones share them.
#[derive(Clone, Default)]
pub struct Faults {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    rules: Vec<Rule>,
    calls: HashMap<Operation, usize>,
    delayed: Vec<(Arc<dyn Store>, RecordId, Command)>,
}

struct Rule {
    operation: Operation,
    fault: Fault,
    /// The number of times that the fault will still happen; `None` means until it is healed.
    left: Option<usize>,
}

impl Faults {
    /// Makes the operation fail in this way until it is healed.
    pub fn always(&self, operation: Operation, fault: Fault) {
        self.lock().rules.push(Rule { operation, fault, left: None });
    }

    /// Makes the operation fail in this way the next `times` times. Several faults happen in the order of these calls.
    pub fn next(&self, times: usize, operation: Operation, fault: Fault) {
        self.lock().rules.push(Rule { operation, fault, left: Some(times) });
    }

    /// Refuses every operation until it is healed.
    pub fn outage(&self) {
        for operation in Operation::ALL {
            self.always(operation, Fault::Refuse);
        }
    }

    /// Ends all faults. Stalled operations wait until their latch opens.
    pub fn heal(&self) {
        self.lock().rules.clear();
    }

    /// Applies the delayed commands in the order in which they were sent, and returns their results.
    pub async fn arrive(&self) -> Vec<Result<Outcome, StoreError>> {
        let delayed = std::mem::take(&mut self.lock().delayed);
        let mut outcomes = Vec::new();
        for (store, id, command) in delayed {
            outcomes.push(store.apply(id, command).await);
        }
        outcomes
    }

    /// The number of calls of the operation, whatever their result.
    #[must_use]
    pub fn calls(&self, operation: Operation) -> usize {
        self.lock().calls.get(&operation).copied().unwrap_or(0)
    }

    /// Counts a call of the operation, and returns the fault that it has: for a store of another process, whose calls pass here.
    #[must_use]
    pub fn strike(&self, operation: Operation) -> Option<Fault> {
        let mut state = self.lock();
        *state.calls.entry(operation).or_insert(0) += 1;
        let rule = state.rules.iter_mut().find(|rule| rule.operation == operation && rule.left != Some(0))?;
        if let Some(left) = &mut rule.left {
            *left -= 1;
        }
        Some(rule.fault.clone())
    }

    /// The fault that the operation's next call has.
    fn next_of(&self, operation: Operation) -> Option<Fault> {
        let state = self.lock();
        let mut rules = state.rules.iter();
        let rule = rules.find(|rule| rule.operation == operation && rule.left != Some(0));
        rule.map(|rule| rule.fault.clone())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn refused(operation: Operation) -> StoreError {
    StoreError::unavailable(format!("{operation:?} refused on demand"))
}

fn lost(operation: Operation) -> StoreError {
    StoreError::unavailable(format!("reply to {operation:?} lost on demand"))
}

fn damaged() -> StoreError {
    StoreError::corrupt("record damaged on demand")
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults").field("rules", &self.lock().rules.len()).finish_non_exhaustive()
    }
}

impl FaultyStore {
    /// Wraps a store, and returns it with the handle on its faults.
    #[must_use]
    pub fn new(store: impl IntoStore) -> (Self, Faults) {
        let inner = store.into_store();
        let faults = Faults::default();
        (Self { inner, faults: faults.clone() }, faults)
    }

    fn run<'a, T: Send + 'a>(
        &'a self,
        operation: Operation,
        act: impl FnOnce(&'a dyn Store) -> StoreFuture<'a, T> + Send + 'a,
    ) -> StoreFuture<'a, T> {
        self.run_with(self.faults.strike(operation), operation, act)
    }

    fn run_with<'a, T: Send + 'a>(
        &'a self,
        fault: Option<Fault>,
        operation: Operation,
        act: impl FnOnce(&'a dyn Store) -> StoreFuture<'a, T> + Send + 'a,
    ) -> StoreFuture<'a, T> {
        let refused = move || refused(operation);
        match fault {
            None => act(&*self.inner),
            Some(Fault::Refuse | Fault::Delay) => Box::pin(async move { Err(refused()) }),
            Some(Fault::Full) => Box::pin(async move { Err(refused().with_extent(Extent::Writes)) }),
            Some(Fault::Busy) => Box::pin(async move { Err(refused().with_extent(Extent::Record)) }),
            Some(Fault::Corrupt) => Box::pin(async move { Err(damaged()) }),
            Some(Fault::LoseReply) => Box::pin(async move {
                act(&*self.inner).await?;
                Err(lost(operation))
            }),
            Some(Fault::StallBefore(latch)) => Box::pin(async move {
                latch.opened().await;
                act(&*self.inner).await
            }),
            Some(Fault::StallAfter(latch)) => Box::pin(async move {
                let reply = act(&*self.inner).await;
                latch.opened().await;
                reply
            }),
        }
    }
}

impl Store for FaultyStore {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        let operation = Operation::of(&command);
        let fault = self.faults.strike(operation);
        if matches!(fault, Some(Fault::Delay)) {
            self.faults.lock().delayed.push((self.inner.clone(), id, command.clone()));
        }
        self.run_with(fault, operation, move |store| store.apply(id, command))
    }

    /// As the wrapped store, unless the next fault of the operation needs time, or keeps the command.
    fn try_apply(&self, id: RecordId, command: &Command) -> Option<Result<Outcome, StoreError>> {
        let operation = Operation::of(command);
        match self.faults.next_of(operation) {
            Some(Fault::Delay | Fault::StallBefore(_) | Fault::StallAfter(_)) => None,
            None | Some(Fault::LoseReply) => {
                let reply = self.inner.try_apply(id, command)?;
                match self.faults.strike(operation) {
                    None => Some(reply),
                    Some(_) => Some(reply.and_then(|_| Err(lost(operation)))),
                }
            }
            Some(_) => match self.faults.strike(operation)? {
                Fault::Full => Some(Err(refused(operation).with_extent(Extent::Writes))),
                Fault::Busy => Some(Err(refused(operation).with_extent(Extent::Record))),
                Fault::Corrupt => Some(Err(damaged())),
                _ => Some(Err(refused(operation))),
            },
        }
    }

    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        self.run(Operation::Lookup, move |store| store.lookup(id))
    }

    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage> {
        self.run(Operation::List, move |store| store.list(query))
    }

    fn purge(&self, limit: usize) -> StoreFuture<'_, usize> {
        self.run(Operation::Purge, move |store| store.purge(limit))
    }

    fn audit(&self, before: Option<u64>, limit: usize) -> StoreFuture<'_, Vec<AuditEntry>> {
        self.run(Operation::Audit, move |store| store.audit(before, limit))
    }

    fn check(&self) -> StoreFuture<'_, ()> {
        self.run(Operation::Check, |store| store.check())
    }

    delegate_store!(self, self.inner => changed open_transactions advisories usage clock_skew accept_clock now capabilities);
}

/// A latch that opens once, for all present and later waiters. Clones share one latch.
#[derive(Clone, Default)]
pub struct Latch {
    state: Arc<Mutex<LatchState>>,
}

#[derive(Default)]
struct LatchState {
    open: bool,
    waiting: Vec<Waker>,
}

impl Latch {
    /// A closed latch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens the latch.
    pub fn open(&self) {
        let waiting = {
            let mut state = self.lock();
            state.open = true;
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Waits until the latch is open.
    pub async fn opened(&self) {
        Opened(self).await;
    }

    fn lock(&self) -> MutexGuard<'_, LatchState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Latch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Latch").field("open", &self.lock().open).finish_non_exhaustive()
    }
}

struct Opened<'a>(&'a Latch);

impl Future for Opened<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.0.lock();
        if state.open {
            return Poll::Ready(());
        }
        if !state.waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
            state.waiting.push(cx.waker().clone());
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ManualClock;
    use oncegate_core::{MemoryStore, StoreErrorKind};

    fn now<T>(mut future: StoreFuture<'_, T>) -> Option<Result<T, StoreErrorKind>> {
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(reply) => Some(reply.map_err(|error| error.kind())),
            Poll::Pending => None,
        }
    }

    #[test]
    fn a_fault_strikes_its_own_operation_as_often_as_asked() {
        let (store, faults) = FaultyStore::new(MemoryStore::new(ManualClock::at_millis(1_000)));
        faults.next(1, Operation::Check, Fault::Refuse);
        faults.next(1, Operation::Check, Fault::Corrupt);
        assert_eq!(now(store.purge(1)), Some(Ok(0)));
        assert_eq!(now(store.check()), Some(Err(StoreErrorKind::Unavailable)));
        assert_eq!(now(store.check()), Some(Err(StoreErrorKind::Corrupt)));
        assert_eq!(now(store.check()), Some(Ok(())));
        assert_eq!(faults.calls(Operation::Check), 3);
    }

    #[test]
    fn a_lost_reply_was_sent_anyway() {
        let (store, faults) = FaultyStore::new(MemoryStore::new(ManualClock::at_millis(1_000)));
        let id = RecordId::from_bytes([1; 32]);
        let claim = Command::Claim(oncegate_core::Claim {
            attempt: oncegate_core::AttemptId::new(1),
            fingerprint: oncegate_core::Fingerprint::of_parts("test", &[]),
            lease: std::time::Duration::from_secs(1),
            retention: std::time::Duration::from_secs(1),
            on_abandoned: oncegate_core::OnAbandoned::Park,
            label: oncegate_core::Label::default(),
        });
        faults.next(1, Operation::Claim, Fault::LoseReply);
        assert_eq!(now(store.apply(id, claim)), Some(Err(StoreErrorKind::Unavailable)));
        assert!(matches!(now(store.lookup(id)), Some(Ok(Some(_)))));
    }

    #[test]
    fn a_stall_lasts_until_the_latch_opens() {
        let (store, faults) = FaultyStore::new(MemoryStore::new(ManualClock::at_millis(1_000)));
        let latch = Latch::new();
        faults.always(Operation::Check, Fault::StallBefore(latch.clone()));
        assert_eq!(now(store.check()), None);
        latch.open();
        assert_eq!(now(store.check()), Some(Ok(())));
    }
}
