//! A store that is out of reach when the sidecar starts.
//!
//! The sidecar starts anyway, so that requests without a key pass: otherwise a restart during an outage would take the service
//! down, too. Errors that a retry cannot fix, such as a wrong password, end the sidecar.

use std::fmt;
use std::future::{Future, pending, ready};
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use oncegate_core::{
    Advisory, AuditEntry, Capabilities, Clock as _, ClockSkew, Command, Durability, ErrorChain, Fencing,
    ListPage, ListQuery, Outcome, Record, RecordId, Store, StoreError, StoreFuture, StoreUsage, Survey,
    SurveyQuery, SystemClock, Timestamp,
};
use tokio::task::JoinHandle;

use super::run;
use crate::admin::BackupStore;
use crate::config::{Config, StoreChoice};

/// The reason why a store was not opened.
#[derive(Debug)]
pub(super) enum StoreOpenError {
    /// It cannot be reached. A retry may help.
    Unreachable(String),
    /// It cannot be used. A retry does not help.
    Unfit(String),
}

impl fmt::Display for StoreOpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable(why) | Self::Unfit(why) => f.write_str(why),
        }
    }
}

/// A store. `is_open` is false if it will be opened later.
pub(super) struct OpenedStore {
    pub(super) store: Arc<dyn Store>,
    pub(super) is_open: bool,
}

/// Opens the store now, or, if it cannot be reached, at the first health check at which it can.
///
/// # Errors
/// If it cannot be used.
pub(super) async fn open(config: &Arc<Config>, backup: &BackupStore) -> Result<OpenedStore, String> {
    match run::open(config, backup).await {
        Ok(store) => Ok(OpenedStore { store, is_open: true }),
        Err(StoreOpenError::Unfit(why)) => Err(why),
        Err(StoreOpenError::Unreachable(why)) => {
            tracing::error!(
                "{why}; starting without it: requests with a key are refused until it can be reached"
            );
            let store = LateStore {
                config: config.clone(),
                backup: backup.clone(),
                opened: OnceLock::new(),
                opening: PendingOpen::default(),
                reason: Mutex::new(why),
                clock: SystemClock::new(),
            };
            Ok(OpenedStore { store: Arc::new(store), is_open: false })
        }
    }
}

/// A store that is opened by [`Store::check`], as soon as it can be.
struct LateStore {
    config: Arc<Config>,
    backup: BackupStore,
    opened: OnceLock<Arc<dyn Store>>,
    opening: PendingOpen,
    /// The reason why the last attempt to open it failed.
    reason: Mutex<String>,
    clock: SystemClock,
}

/// The running attempt to open the store. It continues after its health check gave up, because opening takes longer than a
/// health check may.
#[derive(Default)]
struct PendingOpen(tokio::sync::Mutex<Option<JoinHandle<OpenResult>>>);

type OpenResult = Result<Arc<dyn Store>, StoreOpenError>;

impl Drop for PendingOpen {
    fn drop(&mut self) {
        if let Some(running) = self.0.get_mut() {
            running.abort();
        }
    }
}

impl LateStore {
    fn call<'a, T: Send + 'a>(
        &'a self,
        call: impl FnOnce(&'a dyn Store) -> StoreFuture<'a, T>,
    ) -> StoreFuture<'a, T> {
        match self.opened.get() {
            Some(store) => call(&**store),
            None => {
                let error = StoreError::unavailable("the store was not reached yet").with_nothing_sent();
                Box::pin(ready(Err(error)))
            }
        }
    }

    async fn open(&self) -> Result<(), StoreError> {
        let mut opening = self.opening.0.lock().await;
        if self.opened.get().is_some() {
            return Ok(());
        }
        let running = opening.get_or_insert_with(|| {
            let (config, backup) = (self.config.clone(), self.backup.clone());
            tokio::spawn(async move { run::open(&config, &backup).await })
        });
        let ended = running.await;
        *opening = None;
        match ended.unwrap_or_else(|error| Err(StoreOpenError::Unreachable(ErrorChain(&error).to_string()))) {
            Ok(store) => {
                tracing::info!("the store was opened");
                // Only the owner of the lock sets it.
                let _first = self.opened.set(store);
                Ok(())
            }
            Err(why) => {
                let mut reason = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
                let words = why.to_string();
                if *reason != words {
                    tracing::error!("{words}; trying again");
                    reason.clone_from(&words);
                }
                Err(match why {
                    StoreOpenError::Unreachable(_) => StoreError::unavailable(words).with_nothing_sent(),
                    StoreOpenError::Unfit(_) => StoreError::invalid(words),
                })
            }
        }
    }
}

impl Store for LateStore {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        self.call(|store| store.apply(id, command))
    }

    fn try_apply(&self, id: RecordId, command: &Command) -> Option<Result<Outcome, StoreError>> {
        self.opened.get()?.try_apply(id, command)
    }

    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        self.call(|store| store.lookup(id))
    }

    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage> {
        self.call(|store| store.list(query))
    }

    fn survey(&self, query: SurveyQuery) -> StoreFuture<'_, Option<Survey>> {
        self.call(|store| store.survey(query))
    }

    fn purge(&self, limit: usize) -> StoreFuture<'_, usize> {
        self.call(|store| store.purge(limit))
    }

    fn audit(&self, before: Option<u64>, limit: usize) -> StoreFuture<'_, Vec<AuditEntry>> {
        self.call(|store| store.audit(before, limit))
    }

    fn check(&self) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            if self.opened.get().is_none() {
                self.open().await?;
            }
            self.call(Store::check).await
        })
    }

    fn changed(&self, id: RecordId) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        match self.opened.get() {
            Some(store) => store.changed(id),
            None => Box::pin(pending()),
        }
    }

    fn advisories(&self) -> Vec<Advisory> {
        match self.opened.get() {
            Some(store) => store.advisories(),
            None => {
                let why = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
                vec![Advisory::new("not-opened", format!("the store could not be opened yet: {why}"))]
            }
        }
    }

    fn usage(&self) -> Option<StoreUsage> {
        self.opened.get()?.usage()
    }

    fn clock_skew(&self) -> Option<ClockSkew> {
        self.opened.get()?.clock_skew()
    }

    fn accept_clock(&self) -> StoreFuture<'_, Option<Duration>> {
        self.call(Store::accept_clock)
    }

    fn now(&self) -> Timestamp {
        self.opened.get().map_or_else(|| self.clock.now(), |store| store.now())
    }

    /// The guarantees of the store. Before it is open, the least that stores of its kind promise.
    fn capabilities(&self) -> Capabilities {
        if let Some(store) = self.opened.get() {
            return store.capabilities();
        }
        match self.config.store.store() {
            StoreChoice::Postgres(_) => {
                let mut least = Capabilities::new("postgres", Durability::Buffered, Fencing::Monotonic);
                least.atomic_with_effect = true;
                least
            }
            StoreChoice::Redis(_) => Capabilities::new("redis", Durability::Unlogged, Fencing::Equality),
            StoreChoice::Directory(_) => {
                Capabilities::new("embedded", Durability::Volatile, Fencing::Equality)
            }
            _ => Capabilities::new("store", Durability::Volatile, Fencing::Equality),
        }
    }
}
