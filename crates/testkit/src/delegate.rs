//! Delegation for stores of tests that change only a few methods.

/// Implements the named methods of `Store` in a test's wrapper: each calls the same method of the wrapped store.
///
/// ```
/// use oncegate_core::{Command, MemoryStore, Outcome, RecordId, Store, StoreError, StoreFuture};
/// use oncegate_testkit::{ManualClock, delegate_store};
///
/// /// A store that cannot be written.
/// struct ReadOnly(MemoryStore<ManualClock>);
///
/// impl Store for ReadOnly {
///     fn apply(&self, _: RecordId, _: Command) -> StoreFuture<'_, Outcome> {
///         Box::pin(async { Err(StoreError::unavailable("read only")) })
///     }
///
///     delegate_store!(self, self.0 => lookup list purge audit check now capabilities);
/// }
///
/// let store = ReadOnly(MemoryStore::new(ManualClock::at_millis(1)));
/// assert_eq!(store.now().as_millis(), 1);
/// ```
#[macro_export]
macro_rules! delegate_store {
    ($self:ident, $inner:expr => $($method:ident)+) => {
        $($crate::delegate_store!(@$method $self, $inner);)+
    };
    (@apply $self:ident, $inner:expr) => {
        fn apply(
            &$self,
            id: ::oncegate_core::RecordId,
            command: ::oncegate_core::Command,
        ) -> ::oncegate_core::StoreFuture<'_, ::oncegate_core::Outcome> {
            $inner.apply(id, command)
        }
    };
    (@lookup $self:ident, $inner:expr) => {
        fn lookup(
            &$self,
            id: ::oncegate_core::RecordId,
        ) -> ::oncegate_core::StoreFuture<'_, Option<::oncegate_core::Record>> {
            $inner.lookup(id)
        }
    };
    (@list $self:ident, $inner:expr) => {
        fn list(
            &$self,
            query: ::oncegate_core::ListQuery,
        ) -> ::oncegate_core::StoreFuture<'_, ::oncegate_core::ListPage> {
            $inner.list(query)
        }
    };
    (@purge $self:ident, $inner:expr) => {
        fn purge(&$self, limit: usize) -> ::oncegate_core::StoreFuture<'_, usize> {
            $inner.purge(limit)
        }
    };
    (@audit $self:ident, $inner:expr) => {
        fn audit(
            &$self,
            before: Option<u64>,
            limit: usize,
        ) -> ::oncegate_core::StoreFuture<'_, Vec<::oncegate_core::AuditEntry>> {
            $inner.audit(before, limit)
        }
    };
    (@check $self:ident, $inner:expr) => {
        fn check(&$self) -> ::oncegate_core::StoreFuture<'_, ()> {
            $inner.check()
        }
    };
    (@now $self:ident, $inner:expr) => {
        fn now(&$self) -> ::oncegate_core::Timestamp {
            $inner.now()
        }
    };
    (@capabilities $self:ident, $inner:expr) => {
        fn capabilities(&$self) -> ::oncegate_core::Capabilities {
            $inner.capabilities()
        }
    };
}
