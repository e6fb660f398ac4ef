//! A table of a fixed size that keeps the keys that were used most recently.

/// The entries that one key may be stored in.
const WAYS: usize = 8;

/// A table of `SETS` times eight entries. A key has eight places; if all are taken, it replaces the one that was used least
/// recently. A lookup compares at most eight keys. The memory is allocated with the first entry.
#[derive(Debug)]
pub(super) struct RecentTable<T, const SETS: usize> {
    entries: Vec<Option<T>>,
}

/// An entry of a [`RecentTable`].
pub(super) trait RecentEntry {
    /// The time of the last use.
    fn last(&self) -> u64;
}

impl<T, const SETS: usize> Default for RecentTable<T, SETS> {
    fn default() -> Self {
        Self { entries: Vec::new() }
    }
}

impl<T: RecentEntry, const SETS: usize> RecentTable<T, SETS> {
    /// The entry for which `is_it` is true among those with this hash. If there is none, `make` creates it.
    pub(super) fn entry(
        &mut self,
        hash: usize,
        is_it: impl Fn(&T) -> bool,
        make: impl FnOnce() -> T,
    ) -> Option<&mut T> {
        if self.entries.is_empty() {
            self.entries.resize_with(SETS * WAYS, || None);
        }
        let first = hash % SETS * WAYS;
        let set = self.entries.get_mut(first..first + WAYS)?;
        let found = set.iter().position(|entry| entry.as_ref().is_some_and(&is_it));
        let place = found.or_else(|| {
            let oldest = |(_, entry): &(usize, &Option<T>)| entry.as_ref().map_or(0, RecentEntry::last);
            set.iter().enumerate().min_by_key(oldest).map(|(place, _)| place)
        })?;
        let entry = set.get_mut(place)?;
        if found.is_none() {
            *entry = None;
        }
        Some(entry.get_or_insert_with(make))
    }

    /// The entry for which `is_it` is true among those with this hash.
    pub(super) fn get(&self, hash: usize, is_it: impl Fn(&T) -> bool) -> Option<&T> {
        let first = hash % SETS * WAYS;
        self.entries.get(first..first + WAYS)?.iter().flatten().find(|entry| is_it(entry))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().flatten()
    }
}
