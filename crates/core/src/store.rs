//! The interface of a store.

use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Timestamp;
use crate::decide::{Command, Outcome};
use crate::id::{CallerTag, KeyTag, RecordId};
use crate::limits;
use crate::record::{Record, StateName, StateSet};

/// The future of a store method. Boxed, so that a store can be chosen when the program starts.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// A store of records.
///
/// A store applies [`decide`](crate::decide()) to one record at a time, atomically, by its own clock, and answers only
/// after what it wrote is as durable as [`Capabilities::durability`] says. Everything else that keeps the promises
/// follows from the function; a store adds none of its own rules. A store must answer within a bounded time: a caller
/// that waits for it holds a request.
pub trait Store: Send + Sync + 'static {
    /// Applies one command to the record with this identifier.
    ///
    /// # Errors
    /// [`StoreErrorKind::Unavailable`] where it is not known whether the command was applied; it may be sent again.
    /// [`StoreErrorKind::Locked`] where somebody's open transaction holds the record; nothing was changed, and it may be
    /// sent again. [`StoreErrorKind::Corrupt`] where the record cannot be read; nothing was changed.
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome>;

    /// Reads a record; absent where its retention is over.
    ///
    /// # Errors
    /// As for [`Store::apply`].
    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>>;

    /// Lists records in the order of their identifiers, or, where the store cannot walk through them so, in an order of its
    /// own; while records come and go, one may then be listed twice. Reads at most a bounded number of records per call, so
    /// a page may be short or empty and have a cursor all the same.
    ///
    /// # Errors
    /// As for [`Store::apply`]; a record that cannot be read is listed as such and is no error.
    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage>;

    /// Removes at most `limit` records whose retention is over, without reading the others, and says how many. The answer
    /// is smaller than `limit` when there are no more for now, and zero where the store removes them by itself.
    ///
    /// # Errors
    /// As for [`Store::apply`].
    fn purge(&self, limit: usize) -> StoreFuture<'_, usize>;

    /// The audit trail, newest first, from before the entry number `before` where one is given, `limit` entries at most.
    /// Every [`Outcome::Resolved`] has exactly one entry, written in the same transaction; a store that is spread over
    /// machines may write it after that, and answers only when it is written.
    ///
    /// # Errors
    /// As for [`Store::apply`].
    fn audit(&self, before: Option<u64>, limit: usize) -> StoreFuture<'_, Vec<AuditEntry>>;

    /// Whether the store can be reached and would take a write now, as far as that can be told at a small cost. A store
    /// that can, writes something; one that cannot may say yes while its disk is full, and only a write then finds out.
    ///
    /// # Errors
    /// Why not.
    fn check(&self) -> StoreFuture<'_, ()>;

    /// Waits until the store is told that an attempt at this record has ended, by whatever process. A hint that it is worth
    /// asking again, and no answer: it may come for nothing, late, or never, and by default it never comes. Whoever waits
    /// asks again after a while in any case. Dropped, it leaves nothing behind.
    fn changed(&self, id: RecordId) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        let _nobody_tells = id;
        Box::pin(std::future::pending())
    }

    /// The store's clock, which leases and retentions are measured by.
    fn now(&self) -> Timestamp;

    /// What an operator should know of although the store serves: a clock that was set, a configuration that can lose
    /// records. It is asked for each time that somebody looks, and must cost nothing.
    fn advisories(&self) -> Vec<Advisory> {
        Vec::new()
    }

    /// Goes on from the time of day, which was set ahead by more than the store follows by itself, because an operator says
    /// that it is right; and returns by how much that is. `None` if there was nothing to accept.
    ///
    /// # Errors
    /// As for [`Store::apply`]; [`StoreErrorKind::Invalid`] from a store whose clock is that of its server.
    fn accept_clock(&self) -> StoreFuture<'_, Option<Duration>> {
        let error = "the clock of this store is that of its server: set that one right";
        Box::pin(std::future::ready(Err(StoreError::invalid(error))))
    }

    /// The promises of the store.
    fn capabilities(&self) -> Capabilities;
}

/// A store, or an [`Arc`] of one: the argument of everything that is built on a store.
pub trait IntoStore {
    /// The store as a shared trait object.
    fn into_store(self) -> Arc<dyn Store>;
}

impl<S: Store> IntoStore for S {
    fn into_store(self) -> Arc<dyn Store> {
        Arc::new(self)
    }
}

impl<S: Store> IntoStore for Arc<S> {
    fn into_store(self) -> Arc<dyn Store> {
        self
    }
}

impl IntoStore for Arc<dyn Store> {
    fn into_store(self) -> Arc<dyn Store> {
        self
    }
}

/// Something that an operator should know of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advisory {
    /// A short name that does not change, for metrics and alerts.
    pub name: &'static str,
    /// The problem, and what to do about it.
    pub text: String,
}

impl Advisory {
    /// An advisory.
    pub fn new(name: &'static str, text: impl Into<String>) -> Self {
        Self { name, text: text.into() }
    }
}

/// The promises of a store, as in the table of GUARANTEES.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The store's name in messages and metrics.
    pub name: &'static str,
    /// The durability of acknowledged writes.
    pub durability: Durability,
    /// The guarantee of fencing tokens.
    pub fencing: Fencing,
    /// True if a completion can commit together with the effect.
    pub atomic_with_effect: bool,
    /// True if a listing is in the order of the identifiers.
    pub lists_in_order: bool,
}

impl Capabilities {
    /// The promises of a store with this name.
    #[must_use]
    pub const fn new(name: &'static str, durability: Durability, fencing: Fencing) -> Self {
        Self { name, durability, fencing, atomic_with_effect: false, lists_in_order: true }
    }
}

/// The durability of an acknowledged write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Durability {
    /// Nothing survives the process.
    Volatile,
    /// An acknowledged write may be lost in a crash or a failover.
    Buffered,
    /// On disk before it is acknowledged.
    Synced,
}

/// The guarantee of fencing tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fencing {
    /// Equal only if it is the same attempt.
    Equality,
    /// Each is greater than all before it.
    Monotonic,
}

/// A query for a listing of records.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListQuery {
    /// Only records in one of these states; all of them by default.
    pub states: StateSet,
    /// Only records of this caller.
    pub caller: Option<CallerTag>,
    /// Only records whose key has this tag.
    pub key: Option<KeyTag>,
    /// Only records whose operation starts like this.
    pub operation: Option<String>,
    /// Only records that have been in their state for at least so long.
    pub min_age: Duration,
    /// Only records after this one: the cursor of the page before. Where the store's order is its own, it is no record.
    pub after: Option<RecordId>,
    /// The number of records, [`limits::MAX_PAGE_RECORDS`] at most.
    pub limit: usize,
}

impl Default for ListQuery {
    fn default() -> Self {
        Self {
            states: StateSet::ALL,
            caller: None,
            key: None,
            operation: None,
            min_age: Duration::ZERO,
            after: None,
            limit: 100,
        }
    }
}

impl ListQuery {
    /// Returns true if the record matches the query.
    #[must_use]
    pub fn matches(&self, record: &Record, now: Timestamp) -> bool {
        !record.is_expired(now)
            && self.states.contains(record.state_name(now))
            && self.caller.is_none_or(|caller| caller == record.label.caller())
            && self.key.is_none_or(|key| record.label.key() == Some(key))
            && self.operation.as_deref().is_none_or(|prefix| record.label.operation().starts_with(prefix))
            && now.since(record.changed_at) >= self.min_age
    }

    /// The limit within its bounds.
    #[must_use]
    pub fn bounded_limit(&self) -> usize {
        self.limit.clamp(1, limits::MAX_PAGE_RECORDS)
    }
}

/// A page of a listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListPage {
    /// The records, in the order of the listing.
    pub records: Vec<(RecordId, Record)>,
    /// Records that cannot be read.
    pub unreadable: Vec<RecordId>,
    /// The cursor of the next page; `None` after the last one.
    pub next: Option<RecordId>,
}

/// One operator's act.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditEntry {
    /// Grows by one with each entry.
    pub number: u64,
    /// The time, by the store's clock.
    pub at: Timestamp,
    /// On which record.
    pub id: RecordId,
    /// The state before.
    pub from: StateName,
    /// The state after.
    pub to: StateName,
    /// The operator.
    pub actor: String,
    /// The operator's reason.
    pub reason: String,
}

/// Why a store did not answer.
#[derive(Debug)]
pub struct StoreError {
    kind: StoreErrorKind,
    extent: Extent,
    unsent: bool,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// The kind of a [`StoreError`]: what a caller can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// Out of reach, full, or failing: it is not known whether the command was applied. Try again later.
    Unavailable,
    /// An open transaction, such as that of an application that completes its record, holds the record. Nothing was
    /// changed, and what becomes of the record is not decided yet. Try again later; the store itself is well.
    Locked,
    /// A record is damaged or of an unknown version. An operator has to look; it must never be executed.
    Corrupt,
    /// The configuration or the format does not fit this program. Fix it; trying again does not help.
    Invalid,
}

impl StoreErrorKind {
    /// Returns true if the same command, sent again later, may get an answer.
    #[must_use]
    pub const fn may_pass(self) -> bool {
        matches!(self, Self::Unavailable | Self::Locked)
    }
}

/// The part of a store that an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Extent {
    /// The whole of it: whatever else it is asked for now will most likely fail, too.
    Store,
    /// It was reached and takes no writes at the moment, as where it is full. What needs none is still answered.
    Writes,
    /// This record or this command alone, as where somebody else's transaction holds the record. It says nothing about
    /// the store.
    Record,
}

impl StoreError {
    const fn new(kind: StoreErrorKind, message: String) -> Self {
        Self { kind, extent: Extent::Store, unsent: false, message, source: None }
    }

    /// Out of reach, full, or failing.
    #[must_use]
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StoreErrorKind::Unavailable, message.into())
    }

    /// An open transaction holds the record.
    #[must_use]
    pub fn locked(message: impl Into<String>) -> Self {
        Self::new(StoreErrorKind::Locked, message.into()).with_extent(Extent::Record)
    }

    /// A damaged record, or one of an unknown version.
    #[must_use]
    pub fn corrupt(message: impl Into<String>) -> Self {
        Self::new(StoreErrorKind::Corrupt, message.into())
    }

    /// A configuration or format that does not fit.
    #[must_use]
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StoreErrorKind::Invalid, message.into())
    }

    /// Adds its cause, which holds no key, no body and no password: logs show it ([`ErrorChain`](crate::ErrorChain)).
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Says how much of the store it is about; [`Extent::Store`] where nothing is said.
    #[must_use]
    pub fn with_extent(self, extent: Extent) -> Self {
        Self { extent, ..self }
    }

    /// Says that the command never left for the store: it is certain that it was not and will not be applied.
    #[must_use]
    pub fn with_nothing_sent(self) -> Self {
        Self { unsent: true, ..self }
    }

    /// The kind of the error: what a caller can do about it.
    #[must_use]
    pub const fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// The part of the store that the error is about.
    #[must_use]
    pub const fn extent(&self) -> Extent {
        self.extent
    }

    /// Whether it is certain that the command never left for the store. To ask again at once is of no use then, and there
    /// is nothing to take back.
    #[must_use]
    pub const fn is_unsent(&self) -> bool {
        self.unsent
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for StoreError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref().map(|s| &**s as &(dyn StdError + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_bounded() {
        let bounded = |limit| ListQuery { limit, ..ListQuery::default() }.bounded_limit();
        assert_eq!(bounded(0), 1);
        assert_eq!(bounded(limits::MAX_PAGE_RECORDS), limits::MAX_PAGE_RECORDS);
        assert_eq!(bounded(limits::MAX_PAGE_RECORDS + 1), limits::MAX_PAGE_RECORDS);
    }
}
