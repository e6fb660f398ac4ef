//! The state that the source and its reading thread share: buffered and returned messages, and the assignment.

use oncegate_inbox::{Message, SourceError};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::partition::Partition;
use super::settings::KafkaOptions;

/// The maximum number of errors that wait to be read. Further ones are only in the log.
const MAX_ERRORS: usize = 16;

/// A message that was read and is not settled.
#[derive(Clone, Debug)]
pub(super) struct BufferedMessage {
    pub(super) message: Arc<Message>,
    pub(super) partition: Arc<Partition>,
    pub(super) offset: i64,
}

impl BufferedMessage {
    fn bytes(&self) -> usize {
        let headers: usize = self.message.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        self.message.payload.len() + headers + self.message.order_key.as_ref().map_or(0, bytes::Bytes::len)
    }
}

#[derive(Debug)]
pub(super) struct SourceState {
    pub(super) options: KafkaOptions,
    state: Mutex<State>,
    /// Signals that [`SourceState::take`] may find something.
    arrived: Notify,
    /// Signals that there is space, or that the source was closed.
    space: Condvar,
}

#[derive(Debug, Default)]
struct State {
    ready: VecDeque<BufferedMessage>,
    /// The bytes of the messages in `ready`.
    bytes: usize,
    /// The messages that were given back, and the time from which they may be taken again.
    given_back: Vec<(Instant, BufferedMessage)>,
    errors: VecDeque<SourceError>,
    fatal: Option<String>,
    is_closing: bool,
    /// The assigned partitions by topic and number.
    assigned: BTreeMap<Arc<str>, BTreeMap<i32, Arc<Partition>>>,
}

/// The result of [`SourceState::take`].
pub(super) enum TakeResult {
    Message(BufferedMessage),
    Error(SourceError),
    /// Nothing is ready. A message that was given back is due at this time.
    Until(Instant),
    Nothing,
}

impl SourceState {
    pub(super) fn new(options: KafkaOptions) -> Self {
        Self { options, state: Mutex::default(), arrived: Notify::new(), space: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the next message or error.
    pub(super) fn take(&self) -> TakeResult {
        let mut state = self.state();
        if let Some(what) = &state.fatal {
            return TakeResult::Error(SourceError::fatal(what.clone()));
        }
        if let Some(error) = state.errors.pop_front() {
            return TakeResult::Error(error);
        }
        let now = Instant::now();
        let due = state.given_back.iter().enumerate().min_by_key(|(_, (at, held))| (*at, held.offset));
        let due = due.map(|(index, (at, _))| (index, *at));
        if let Some((index, at)) = due
            && at <= now
        {
            let (_, held) = state.given_back.swap_remove(index);
            held.partition.track().hand_over();
            return TakeResult::Message(held);
        }
        if let Some(held) = state.ready.pop_front() {
            state.bytes = state.bytes.saturating_sub(held.bytes());
            held.partition.track().hand_over();
            if self.has_space(&state) {
                self.space.notify_all();
            }
            return TakeResult::Message(held);
        }
        due.map_or(TakeResult::Nothing, |(_, at)| TakeResult::Until(at))
    }

    /// Waits until [`take`](Self::take) may find something.
    pub(super) fn arrived(&self) -> tokio::sync::futures::Notified<'_> {
        self.arrived.notified()
    }

    /// Stores a message, and returns `true` if another one may be read.
    ///
    /// It is ignored if it was read before, or if its partition is not assigned.
    pub(super) fn put(&self, message: Message, offset: i64, partition: &Arc<Partition>) -> bool {
        let mut state = self.state();
        if partition.is_lost() || !partition.track().read(offset) {
            return self.has_space(&state);
        }
        let held = BufferedMessage { message: Arc::new(message), partition: Arc::clone(partition), offset };
        state.bytes = state.bytes.saturating_add(held.bytes());
        state.ready.push_back(held);
        let has_space = self.has_space(&state);
        drop(state);
        self.arrived.notify_one();
        has_space && partition.track().window() < self.options.window
    }

    /// Gives a message back, to be taken again after a delay.
    pub(super) fn give_back(&self, held: &BufferedMessage, after: Duration) {
        let mut state = self.state();
        held.partition.track().take_back();
        if !held.partition.is_lost() && !state.is_closing {
            let now = Instant::now();
            state.given_back.push((now.checked_add(after).unwrap_or(now), held.clone()));
            drop(state);
            self.arrived.notify_one();
        }
    }

    /// Reports an error that may pass.
    pub(super) fn error(&self, what: String) {
        let mut state = self.state();
        if state.errors.len() < MAX_ERRORS && !state.errors.iter().any(|error| error.to_string() == what) {
            state.errors.push_back(SourceError::transient(what));
            drop(state);
            self.arrived.notify_one();
        }
    }

    /// Reports an error that will not pass. Nothing is read from here on.
    pub(super) fn fatal(&self, what: String) {
        self.state().fatal.get_or_insert(what);
        self.arrived.notify_one();
        self.space.notify_all();
    }

    pub(super) fn is_fatal(&self) -> bool {
        self.state().fatal.is_some()
    }

    /// Closes the source: nothing more is read.
    pub(super) fn close(&self) {
        self.state().is_closing = true;
        self.space.notify_all();
    }

    pub(super) fn is_closing(&self) -> bool {
        self.state().is_closing
    }

    fn has_space(&self, state: &State) -> bool {
        state.ready.len() < self.options.buffer_messages && state.bytes < self.options.buffer_bytes
    }

    /// Returns `true` if no further message may be read.
    pub(super) fn is_full(&self) -> bool {
        !self.has_space(&self.state())
    }

    /// Returns `true` if half of the buffer is free.
    pub(super) fn is_half_empty(&self) -> bool {
        let state = self.state();
        state.ready.len() <= self.options.buffer_messages / 2 && state.bytes <= self.options.buffer_bytes / 2
    }

    /// Waits for space, for the close of the source, or for the timeout.
    pub(super) fn wait_for_space(&self, at_most: Duration) {
        let state = self.state();
        let full = |state: &mut State| !self.has_space(state) && !state.is_closing && state.fatal.is_none();
        drop(self.space.wait_timeout_while(state, at_most, full));
    }

    /// Adds an assigned partition. Its state from an earlier assignment is dropped.
    pub(super) fn assign(&self, partition: Partition) {
        let mut state = self.state();
        let of_topic = state.assigned.entry(Arc::clone(&partition.topic)).or_default();
        if let Some(before) = of_topic.insert(partition.number, Arc::new(partition)) {
            before.lose();
            state.forget(&before);
        }
    }

    pub(super) fn assigned(&self) -> Vec<Arc<Partition>> {
        self.state().assigned.values().flat_map(BTreeMap::values).cloned().collect()
    }

    pub(super) fn partition(&self, topic: &str, number: i32) -> Option<Arc<Partition>> {
        self.state().assigned.get(topic)?.get(&number).cloned()
    }

    /// Prepares the end of an assignment: drops buffered messages. Messages that the consumer has may still be settled.
    pub(super) fn release(&self, partition: &Arc<Partition>) {
        let mut state = self.state();
        if let Some(of_topic) = state.assigned.get_mut(&partition.topic) {
            of_topic.remove(&partition.number);
        }
        state.forget(partition);
    }
}

impl State {
    fn forget(&mut self, partition: &Arc<Partition>) {
        self.ready.retain(|held| !Arc::ptr_eq(&held.partition, partition));
        self.given_back.retain(|(_, held)| !Arc::ptr_eq(&held.partition, partition));
        self.bytes = self.ready.iter().map(BufferedMessage::bytes).sum();
    }
}
