//! Delegation for stores that wrap another store.

/// Implements the named methods of [`Store`](crate::Store) in a wrapper: each calls the same method of the wrapped store.
/// Name `try_apply` together with `apply` or not at all: a wrapper with an `apply` of its own would be bypassed.
///
/// ```
/// use oncegate_core::{Command, MemoryStore, Outcome, RecordId, Store, StoreError, StoreFuture, delegate_store};
///
/// /// A store that cannot be written.
/// struct ReadOnly(MemoryStore);
///
/// impl Store for ReadOnly {
///     fn apply(&self, _: RecordId, _: Command) -> StoreFuture<'_, Outcome> {
///         Box::pin(async { Err(StoreError::unavailable("read only")) })
///     }
///
///     delegate_store!(
///         self, self.0 => lookup list survey purge audit check changed open_transactions advisories usage clock_skew
///             accept_clock now capabilities
///     );
/// }
///
/// let store = ReadOnly(MemoryStore::default());
/// assert_eq!(store.capabilities().name, "memory");
/// ```
#[macro_export]
macro_rules! delegate_store {
    ($self:ident, $inner:expr => $($method:ident)+) => {
        $($crate::delegate_store!(@$method $self, $inner);)+
    };
    (@apply $self:ident, $inner:expr) => {
        fn apply(
            &$self,
            id: $crate::RecordId,
            command: $crate::Command,
        ) -> $crate::StoreFuture<'_, $crate::Outcome> {
            $inner.apply(id, command)
        }
    };
    (@try_apply $self:ident, $inner:expr) => {
        fn try_apply(
            &$self,
            id: $crate::RecordId,
            command: &$crate::Command,
        ) -> Option<Result<$crate::Outcome, $crate::StoreError>> {
            $inner.try_apply(id, command)
        }
    };
    (@lookup $self:ident, $inner:expr) => {
        fn lookup(
            &$self,
            id: $crate::RecordId,
        ) -> $crate::StoreFuture<'_, Option<$crate::Record>> {
            $inner.lookup(id)
        }
    };
    (@list $self:ident, $inner:expr) => {
        fn list(
            &$self,
            query: $crate::ListQuery,
        ) -> $crate::StoreFuture<'_, $crate::ListPage> {
            $inner.list(query)
        }
    };
    (@survey $self:ident, $inner:expr) => {
        fn survey(
            &$self,
            query: $crate::SurveyQuery,
        ) -> $crate::StoreFuture<'_, Option<$crate::Survey>> {
            $inner.survey(query)
        }
    };
    (@purge $self:ident, $inner:expr) => {
        fn purge(&$self, limit: usize) -> $crate::StoreFuture<'_, usize> {
            $inner.purge(limit)
        }
    };
    (@audit $self:ident, $inner:expr) => {
        fn audit(
            &$self,
            before: Option<u64>,
            limit: usize,
        ) -> $crate::StoreFuture<'_, Vec<$crate::AuditEntry>> {
            $inner.audit(before, limit)
        }
    };
    (@check $self:ident, $inner:expr) => {
        fn check(&$self) -> $crate::StoreFuture<'_, ()> {
            $inner.check()
        }
    };
    (@changed $self:ident, $inner:expr) => {
        fn changed(
            &$self,
            id: $crate::RecordId,
        ) -> ::std::pin::Pin<Box<dyn ::std::future::Future<Output = ()> + Send + '_>> {
            $inner.changed(id)
        }
    };
    (@open_transactions $self:ident, $inner:expr) => {
        fn open_transactions(&$self) -> $crate::StoreFuture<'_, ::std::vec::Vec<::std::string::String>> {
            $inner.open_transactions()
        }
    };
    (@advisories $self:ident, $inner:expr) => {
        fn advisories(&$self) -> Vec<$crate::Advisory> {
            $inner.advisories()
        }
    };
    (@usage $self:ident, $inner:expr) => {
        fn usage(&$self) -> Option<$crate::StoreUsage> {
            $inner.usage()
        }
    };
    (@clock_skew $self:ident, $inner:expr) => {
        fn clock_skew(&$self) -> Option<$crate::ClockSkew> {
            $inner.clock_skew()
        }
    };
    (@accept_clock $self:ident, $inner:expr) => {
        fn accept_clock(&$self) -> $crate::StoreFuture<'_, Option<::std::time::Duration>> {
            $inner.accept_clock()
        }
    };
    (@now $self:ident, $inner:expr) => {
        fn now(&$self) -> $crate::Timestamp {
            $inner.now()
        }
    };
    (@capabilities $self:ident, $inner:expr) => {
        fn capabilities(&$self) -> $crate::Capabilities {
            $inner.capabilities()
        }
    };
}
