//! The clock and the observer that several test programs share.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::sync::{Arc, Mutex};

use oncegate_core::{IntoStore, Store};
use oncegate_engine::{Event, EventKind, Observer};
use oncegate_testkit::{NeverAtOnce, TokioClock};

/// A clock for a store.
pub(crate) fn clock() -> TokioClock {
    TokioClock::at_millis(1_000_000)
}

/// The store that a module gives to its engines: this one, or one without `try_apply` if the module's name says so.
pub(crate) fn store_of(module: &str, store: impl IntoStore) -> Arc<dyn Store> {
    match module.ends_with("never_at_once") {
        true => Arc::new(NeverAtOnce::new(store)),
        false => store.into_store(),
    }
}

/// Records the kinds of all events, in their order.
#[derive(Clone, Default)]
pub(crate) struct Events(Arc<Mutex<Vec<EventKind>>>);

impl Observer for Events {
    fn observe(&self, event: &Event) {
        self.0.lock().unwrap().push(event.kind);
    }
}

impl Events {
    pub(crate) fn all(&self) -> Vec<EventKind> {
        self.0.lock().unwrap().clone()
    }

    pub(crate) fn count_if(&self, wanted: impl Fn(&EventKind) -> bool) -> usize {
        self.0.lock().unwrap().iter().filter(|kind| wanted(kind)).count()
    }

    pub(crate) fn count(&self, wanted: EventKind) -> usize {
        self.count_if(|kind| *kind == wanted)
    }

    pub(crate) fn has(&self, wanted: EventKind) -> bool {
        self.count(wanted) > 0
    }
}

/// Lets everything that is ready run, without moving the clock.
pub(crate) async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}
