//! What took effect, written down beside everything that is tested.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// What took effect in this process, in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger(Arc<Mutex<Vec<String>>>);

impl Ledger {
    pub(crate) fn write(&self, entry: impl Into<String>) {
        self.0.lock().unwrap().push(entry.into());
    }

    pub(crate) fn entries(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// How often each entry is there.
    pub(crate) fn counts(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for entry in self.entries() {
            *counts.entry(entry).or_default() += 1;
        }
        counts
    }

    /// That these are there, each once, and nothing else.
    pub(crate) fn has_once(&self, expected: impl IntoIterator<Item = String>) {
        let expected: BTreeMap<String, usize> = expected.into_iter().map(|entry| (entry, 1)).collect();
        let counts = self.counts();
        let wrong: Vec<_> =
            counts.iter().filter(|(entry, count)| expected.get(*entry) != Some(count)).collect();
        let missing: Vec<_> = expected.keys().filter(|entry| !counts.contains_key(*entry)).collect();
        assert!(wrong.is_empty() && missing.is_empty(), "too often: {wrong:?}; missing: {missing:?}");
    }
}
