//! The level of the log while the program runs. An operator may change it for a time, after which it falls back.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tracing_subscriber::filter::Targets;
use tracing_subscriber::{Registry, reload};

use super::{OPERATOR, filter};

/// The levels of this process.
pub(super) struct Levels {
    handle: reload::Handle<Targets, Registry>,
    /// The level of the start, as `ONCEGATE_LOG` has it.
    configured: Box<str>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The number of changes so far.
    changes: u64,
    /// The level that an operator set, and its end.
    set: Option<(Box<str>, SystemTime)>,
}

/// The level in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CurrentLevel {
    pub(crate) level: Box<str>,
    /// The level of the start.
    pub(crate) configured: Box<str>,
    /// The end of a level that an operator set.
    pub(crate) until: Option<SystemTime>,
    /// The number of the change that set it.
    pub(crate) change: u64,
}

impl Levels {
    pub(super) fn new(handle: reload::Handle<Targets, Registry>, configured: &str) -> Self {
        let configured = if configured.trim().is_empty() { "info" } else { configured.trim() };
        Self { handle, configured: configured.into(), state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shown(&self, state: &State) -> CurrentLevel {
        let (level, until) = match &state.set {
            Some((level, until)) => (level, Some(*until)),
            None => (&self.configured, None),
        };
        CurrentLevel {
            level: level.clone(),
            configured: self.configured.clone(),
            until,
            change: state.changes,
        }
    }

    pub(super) fn current(&self) -> CurrentLevel {
        self.shown(&self.lock())
    }

    /// Sets a level until a time, or the one of the start.
    pub(super) fn set(&self, change: Option<(&str, SystemTime)>) -> Result<CurrentLevel, String> {
        let mut state = self.lock();
        self.apply(&mut state, change)?;
        Ok(self.shown(&state))
    }

    /// Falls back, if the level in force was set by this change.
    pub(super) fn end(&self, change: u64) {
        let mut state = self.lock();
        if state.changes == change && state.set.is_some() {
            let fallback = self.apply(&mut state, None);
            drop(state);
            match fallback {
                Ok(()) => {
                    tracing::info!(target: OPERATOR, filter = &*self.configured, "the log falls back to its level of the start")
                }
                Err(error) => tracing::error!(error, "the log keeps its level"),
            }
        }
    }

    fn apply(&self, state: &mut State, change: Option<(&str, SystemTime)>) -> Result<(), String> {
        let text = change.map_or(&*self.configured, |(text, _)| text.trim());
        let new = filter(text)?;
        self.handle.reload(new).map_err(|error| error.to_string())?;
        state.changes += 1;
        state.set = change.map(|(_, until)| (text.into(), until));
        Ok(())
    }
}

impl fmt::Debug for Levels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Levels").field("state", &self.state).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_the_last_change_ends_the_level_that_it_set() {
        let (layer, handle) = reload::Layer::<_, Registry>::new(filter("warn").unwrap());
        let levels = Levels::new(handle, "warn");
        let until = SystemTime::now() + Duration::from_secs(60);
        let first = levels.set(Some(("debug", until))).unwrap();
        assert_eq!((&*first.level, &*first.configured, first.until), ("debug", "warn", Some(until)));
        let second = levels.set(Some(("trace", until))).unwrap();
        levels.end(first.change);
        assert_eq!(levels.current(), second);
        assert!(levels.set(Some(("debgu", until))).unwrap_err().contains("debgu"));
        assert_eq!(levels.current(), second);
        levels.end(second.change);
        assert_eq!((&*levels.current().level, levels.current().until), ("warn", None));
        drop(layer);
    }
}
