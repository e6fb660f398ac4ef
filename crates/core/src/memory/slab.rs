//! A list whose items keep their numbers.

/// Items with numbers. The number of a removed item is used again.
#[derive(Debug)]
pub(super) struct Slab<T> {
    items: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { items: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    /// Adds an item and returns its number.
    pub(super) fn insert(&mut self, item: T) -> u32 {
        if let Some(number) = self.free.pop()
            && let Some(place) = self.items.get_mut(number as usize)
        {
            *place = Some(item);
            return number;
        }
        // Memory ends long before the numbers do: the smallest item is a record.
        let number = self.items.len() as u32;
        self.items.push(Some(item));
        number
    }

    pub(super) fn get(&self, number: u32) -> Option<&T> {
        self.items.get(number as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        self.items.get_mut(number as usize)?.as_mut()
    }

    pub(super) fn remove(&mut self, number: u32) -> Option<T> {
        let item = self.items.get_mut(number as usize)?.take()?;
        self.free.push(number);
        Some(item)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.items.iter_mut().flatten()
    }
}
