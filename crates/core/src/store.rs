//! The interface of a store.

use std::error::Error as StdError;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::{ClockSkew, Timestamp};
use crate::decide::{Command, Outcome};
use crate::id::{CallerTag, KeyTag, RecordId};
use crate::limits;
use crate::record::{Record, StateName, StateSet};

/// The future of a store method. Boxed, so that a program can choose its store when it starts.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// A store of records.
///
/// A store applies [`decide`](crate::decide()) to one record at a time, atomically, by its own clock. It answers only when
/// the write is as durable as [`Capabilities::durability`] promises. All other guarantees follow from `decide`; a store adds
/// no rules of its own. A store must answer within a bounded time, because a request waits for it.
pub trait Store: Send + Sync + 'static {
    /// Applies one command to the record with this identifier.
    ///
    /// # Errors
    /// - [`StoreErrorKind::Unavailable`] if it is unknown whether the command was applied. It may be sent again.
    /// - [`StoreErrorKind::Locked`] if an open transaction holds the record. Nothing was changed, and the command may be sent
    ///   again.
    /// - [`StoreErrorKind::Corrupt`] if the record cannot be read. Nothing was changed.
    /// - [`StoreErrorKind::Sealed`] if the response is sealed, and its key is missing. Nothing was changed.
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome>;

    /// Applies one command now, if the store can answer without waiting for I/O or another task: the same effect, reply and
    /// errors as [`Store::apply`], without a future. `None` if it cannot; then nothing was done, and the caller uses
    /// [`Store::apply`].
    ///
    /// A caller may hold a lock meanwhile, so the store must not wait, except for a lock that is held briefly, and must not call
    /// back. By default it never answers. A wrapper that changes [`Store::apply`] leaves this default or changes both.
    fn try_apply(&self, _id: RecordId, _command: &Command) -> Option<Result<Outcome, StoreError>> {
        None
    }

    /// Reads a record; `None` if its retention is over.
    ///
    /// # Errors
    /// As for [`Store::apply`].
    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>>;

    /// Lists records in the order of their identifiers. A store that has no such order uses its own
    /// ([`Capabilities::lists_in_order`]), and may list a record twice while records are added and removed. Each call reads a
    /// bounded number of records, so a page that is short or empty may still have a cursor.
    ///
    /// # Errors
    /// As for [`Store::apply`]. A record that cannot be read is not an error: the page lists it as unreadable.
    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage>;

    /// Counts the records in a range of identifiers, and finds the first ones in the order of time: far faster than
    /// [`Store::list`], because the store reads no content and returns no record. By default `None`: the store cannot, and the
    /// caller lists the records. The time for the call grows with the records in the range, so the caller bounds the range. A
    /// store without an order of identifiers bounds the time itself, and returns where the next call goes on ([`Survey::next`]).
    ///
    /// # Errors
    /// As for [`Store::apply`]. A record that cannot be read is not an error: it counts as what its state says, or is listed as
    /// unreadable.
    fn survey(&self, _query: SurveyQuery) -> StoreFuture<'_, Option<Survey>> {
        Box::pin(std::future::ready(Ok(None)))
    }

    /// Removes at most `limit` records whose retention is over, without reading the others, and returns how many. A
    /// number below `limit` means that no more are due now. A store that removes such records by itself returns zero.
    ///
    /// # Errors
    /// As for [`Store::apply`].
    fn purge(&self, limit: usize) -> StoreFuture<'_, usize>;

    /// The audit trail, newest first: at most `limit` entries, all older than the entry number `before` if that is given.
    /// Every [`Outcome::Resolved`] and [`Outcome::Forgotten`] has exactly one entry, written in the same transaction. A store
    /// that is spread over machines may write the entry after the record, but answers only when both are written.
    ///
    /// # Errors
    /// As for [`Store::apply`].
    fn audit(&self, before: Option<u64>, limit: usize) -> StoreFuture<'_, Vec<AuditEntry>>;

    /// Checks at a small cost that the store is reachable and accepts writes. Stores that can test a write do so. The others
    /// may report success while their disk is full.
    ///
    /// # Errors
    /// The reason why the store is unavailable.
    fn check(&self) -> StoreFuture<'_, ()>;

    /// Waits for a hint that an attempt at this record has ended, in this or another process. The hint may be wrong, late, or
    /// never come; by default it never comes. So a caller that waits also asks the store again after a while. Dropping the
    /// future ends the wait.
    fn changed(&self, _id: RecordId) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(std::future::pending())
    }

    /// The transactions that are open now and may still write a record that a listing does not show, by names that no later
    /// transaction has while this process runs. Empty, as by default, for a store that applications do not write themselves.
    ///
    /// # Errors
    /// As for [`Store::apply`].
    fn open_transactions(&self) -> StoreFuture<'_, Vec<String>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    /// The store's clock, which measures leases and retentions.
    fn now(&self) -> Timestamp;

    /// Problems that an operator should know of although the store serves: a clock that was set, a configuration that can lose
    /// records. It is called for each report of the store's state, so it must be cheap.
    fn advisories(&self) -> Vec<Advisory> {
        Vec::new()
    }

    /// The use of the store's own limits. `None` for a store whose server limits it. Cheap, as [`advisories`](Self::advisories).
    fn usage(&self) -> Option<StoreUsage> {
        None
    }

    /// The disagreement between the time of day and the store's time, while it is more than the store follows by itself. `None`
    /// for a store that uses the clock of its server.
    fn clock_skew(&self) -> Option<ClockSkew> {
        None
    }

    /// Accepts the time of day, after it was set ahead by more than the store follows by itself: an operator confirms that it
    /// is right. Returns the difference; `None` if there was nothing to accept.
    ///
    /// # Errors
    /// As for [`Store::apply`]; [`StoreErrorKind::Invalid`] from a store that uses the clock of its server.
    fn accept_clock(&self) -> StoreFuture<'_, Option<Duration>> {
        let error = "this store uses the clock of its server: correct the clock there";
        Box::pin(std::future::ready(Err(StoreError::invalid(error))))
    }

    /// The promises of the store.
    fn capabilities(&self) -> Capabilities;
}

/// A store, or an [`Arc`] of one, as an argument.
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

/// A problem of a store that an operator should know of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advisory {
    /// A short name that does not change, for metrics and alerts.
    pub name: &'static str,
    /// The problem, and what to do about it.
    pub text: String,
}

impl Advisory {
    /// An advisory with this name and text.
    pub fn new(name: &'static str, text: impl Into<String>) -> Self {
        Self { name, text: text.into() }
    }
}

/// The use of the limits of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreUsage {
    /// The records, those past their retention included until they are purged.
    pub records: u64,
    /// The most records, by the configuration or by the memory for their index; `None` without a limit.
    pub max_records: Option<u64>,
    /// The bytes of all records.
    pub bytes: u64,
    /// The most bytes of all records; `None` without a limit but that of the disk or the memory.
    pub max_bytes: Option<u64>,
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
    /// True if other processes can use the store at the same time.
    pub is_shared: bool,
}

impl Capabilities {
    /// The promises of a store with this name.
    #[must_use]
    pub const fn new(name: &'static str, durability: Durability, fencing: Fencing) -> Self {
        Self { name, durability, fencing, atomic_with_effect: false, lists_in_order: true, is_shared: true }
    }
}

/// The durability of an acknowledged write, from the weakest to the strongest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Durability {
    /// Nothing survives the process.
    Volatile,
    /// The server of the store has no log of its writes, or may not use it: each stop of it loses what came after its last
    /// snapshot, or everything.
    Unlogged,
    /// A crash of the machine or a failover may lose the last acknowledged writes.
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
    /// Only records whose operation starts with this text.
    pub operation: Option<String>,
    /// Only records that have been in their state for at least this time.
    pub min_age: Duration,
    /// Only records after this one: the cursor of the previous page. If the store has an order of its own, the cursor is not
    /// the identifier of a record.
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

/// A query for the numbers of records, and for their places in the order of time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SurveyQuery {
    /// The records that count. `after` is where the range begins, or [`Survey::next`] of the survey before. `limit` does not
    /// matter.
    pub list: ListQuery,
    /// The last identifier of the range; `None` for the end of the store. Only a store that lists in the order of the
    /// identifiers has ranges.
    pub last: Option<RecordId>,
    /// Only records that came into their state at this time or later.
    pub changed_since: Option<Timestamp>,
    /// Only records that came into their state before this time.
    pub changed_before: Option<Timestamp>,
    /// A record that is left out.
    pub except_id: Option<RecordId>,
    /// Records whose operation starts with this text are left out.
    pub except_operation: Option<String>,
    /// True to count the records of each operation separately.
    pub by_operation: bool,
    /// The order of the places: the newest first by default.
    pub is_oldest_first: bool,
    /// Only places beyond this one in the order of time. It does not restrict the numbers.
    pub beyond: Option<TimePlace>,
    /// The most places, [`limits::MAX_PAGE_RECORDS`] and one at most; zero for numbers only.
    pub max_places: usize,
}

/// The place of a record in the order of time: the time at which it came into its state, and its identifier.
pub type TimePlace = (Timestamp, RecordId);

/// The numbers of records in a part of a store, and the first places in the order of time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Survey {
    /// The numbers by state and, if the query asked for it, by operation. Each pair occurs once.
    pub counts: Vec<RecordCount>,
    /// The first places, in the order that the query asked for.
    pub places: Vec<TimePlace>,
    /// Records that cannot be read, as far as the survey found out: it need not read a record as a whole.
    pub unreadable: Vec<RecordId>,
    /// The place where the next survey goes on, if this one ended before the range: then its numbers and places are those of a
    /// part. `None` at the end of the range.
    pub next: Option<RecordId>,
}

/// A number of records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordCount {
    /// Their state.
    pub state: StateName,
    /// Their operation, if the query asked for the numbers by operation.
    pub operation: Option<String>,
    /// The number.
    pub records: u64,
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

/// An entry of the audit trail: one change by an operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditEntry {
    /// The number of the entry. It grows by one with each entry.
    pub number: u64,
    /// The time, by the store's clock.
    pub at: Timestamp,
    /// The record that was changed.
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

impl AuditEntry {
    /// The entry about a command that a store has decided, without its number: of each [`Outcome::Resolved`] and
    /// [`Outcome::Forgotten`]. Other outcomes have none. `to` is the state after the command.
    #[must_use]
    pub fn of(
        id: RecordId,
        command: &Command,
        outcome: &Outcome,
        to: StateName,
        at: Timestamp,
    ) -> Option<Self> {
        let (from, actor, reason) = match (command, outcome) {
            (Command::Resolve(by), Outcome::Resolved { from }) => (*from, &by.actor, &by.reason),
            (Command::Forget(by), Outcome::Forgotten { from }) => (*from, &by.actor, &by.reason),
            _ => return None,
        };
        Some(Self { number: 0, at, id, from, to, actor: actor.clone(), reason: reason.clone() })
    }
}

/// The error of a store.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
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
    /// The store is unreachable, full, or failing. It is unknown whether the command was applied. Try again later.
    Unavailable,
    /// An open transaction holds the record, such as that of an application that completes it. Nothing was changed, and the
    /// outcome is not decided yet. Try again later; the store itself works.
    Locked,
    /// The record is damaged or of an unknown version. An operator must examine it; it must never be executed.
    Corrupt,
    /// The response or a step of the record is sealed with a key that this process does not have, or must be sealed and is
    /// not. Nothing was changed. Until the key is there, the record cannot be read; it must never be executed for that.
    Sealed,
    /// The configuration or the format does not fit this program. Fix it; a retry does not help.
    Invalid,
}

impl StoreErrorKind {
    /// Returns true if the same command, sent again later, may get a reply.
    #[must_use]
    pub const fn may_pass(self) -> bool {
        matches!(self, Self::Unavailable | Self::Locked)
    }
}

/// The part of a store that an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Extent {
    /// The whole store: most likely, other commands fail now, too.
    Store,
    /// All writes: the store is reachable but accepts none, for example because it is full. Commands that only read work.
    Writes,
    /// Only this record or this command, for example because a transaction holds the record. The store itself works.
    Record,
}

impl StoreError {
    const fn new(kind: StoreErrorKind, message: String) -> Self {
        Self { kind, extent: Extent::Store, unsent: false, message, source: None }
    }

    /// The error of a store that is unreachable, full, or failing.
    #[must_use]
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StoreErrorKind::Unavailable, message.into())
    }

    /// The error for a record that an open transaction holds.
    #[must_use]
    pub fn locked(message: impl Into<String>) -> Self {
        Self::new(StoreErrorKind::Locked, message.into()).with_extent(Extent::Record)
    }

    /// The error for a record that is damaged or of an unknown version.
    #[must_use]
    pub fn corrupt(message: impl Into<String>) -> Self {
        Self::new(StoreErrorKind::Corrupt, message.into())
    }

    /// The error for a record whose response or steps cannot be opened with the keys of this process.
    #[must_use]
    pub fn sealed(message: impl Into<String>) -> Self {
        Self::new(StoreErrorKind::Sealed, message.into()).with_extent(Extent::Record)
    }

    /// The error for a configuration or format that does not fit this program.
    #[must_use]
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StoreErrorKind::Invalid, message.into())
    }

    /// Sets the cause. It must not hold a key, a body or a password, because logs show it ([`ErrorChain`](crate::ErrorChain)).
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Sets the part of the store that the error is about. The default is [`Extent::Store`].
    #[must_use]
    pub fn with_extent(self, extent: Extent) -> Self {
        Self { extent, ..self }
    }

    /// Marks the command as never sent: it is certain that the store did not and will not apply it.
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

    /// Returns true if it is certain that the command was never sent to the store. Then a retry at once is of no use, and
    /// there is nothing to take back.
    #[must_use]
    pub const fn is_unsent(&self) -> bool {
        self.unsent
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
