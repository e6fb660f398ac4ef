//! The messages of a batch: their state so far, and the choice of those that may share a transaction.

use std::collections::HashSet;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::{Fingerprint, StoreError};
use oncegate_inbox::{Message, ProcessOutcome, Settlement};

use super::outcome::RETRY_AFTER;
use crate::inbox::Inner;
use crate::receipts::{Receipt, ReceiptState, ReceiptStatus};

/// The topic and the order key that messages share if they must stay in order.
pub(super) type OrderKey<'m> = (&'m str, &'m Bytes);

/// The record of a message's start, which counts attempts that end the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// Not recorded. Either this is not needed, or the message need not run.
    None,
    /// Recorded.
    Recorded,
    /// To be recorded before the message runs in a transaction of its own.
    Pending,
}

/// The state of one message in the batch.
pub(super) struct Slot<'m> {
    pub(super) message: &'m Message,
    /// The receipt, or the reason why the message has none.
    pub(super) receipt: Result<Receipt, String>,
    /// The known number of attempts that failed or crashed.
    attempts: u32,
    /// The message failed before, or cannot share a transaction for another reason.
    is_separate: bool,
    pub(super) start: Start,
    pub(super) outcome: Option<ProcessOutcome>,
}

/// The messages of a batch, in their order.
pub(super) struct Plan<'m> {
    pub(super) slots: Vec<Slot<'m>>,
}

impl<'m> Slot<'m> {
    fn new(inbox: &Inner, message: &'m Message) -> Self {
        let digest = inbox.compares_payloads.then(|| digest(message));
        let receipt = match inbox.identity.of(message) {
            Ok(id) => Ok(Receipt { id: id.record_id(&inbox.consumer), digest }),
            Err(why) => Err(why.to_string()),
        };
        let is_separate = receipt.is_err();
        Self { message, receipt, attempts: 0, is_separate, start: Start::None, outcome: None }
    }

    pub(super) fn key(&self) -> Option<OrderKey<'m>> {
        self.message.order_key.as_ref().map(|key| (self.message.topic.as_str(), key))
    }

    /// Returns `true` if the message certainly need not be delivered again.
    pub(super) fn is_done(&self) -> bool {
        self.outcome
            .as_ref()
            .is_some_and(|outcome| outcome.settlement(Duration::ZERO) == Settlement::Acknowledge)
    }

    /// Returns `true` if an earlier message with the same order key is to be delivered again.
    pub(super) fn is_blocked(&self, earlier: &[Self], blocked_keys: &HashSet<OrderKey<'_>>) -> bool {
        self.key().is_some_and(|key| {
            blocked_keys.contains(&key)
                || earlier.iter().any(|slot| slot.key() == Some(key) && !slot.is_done())
        })
    }

    /// The outcome of a message whose duplicate was earlier in the batch.
    pub(super) fn duplicate_in_batch(&self, earlier: &[Self]) -> Option<ProcessOutcome> {
        let receipt = self.receipt.as_ref().ok()?;
        let first = earlier.iter().find(|earlier| {
            earlier.receipt.as_ref().is_ok_and(|r| r.id == receipt.id && r.digest == receipt.digest)
        })?;
        Some(match first.outcome.as_ref()? {
            ProcessOutcome::Processed { .. } | ProcessOutcome::Duplicate => ProcessOutcome::Duplicate,
            ProcessOutcome::Dead { reason, .. } => ProcessOutcome::Dead { reason: *reason, is_known: true },
            _ => ProcessOutcome::InFlight { retry_after: RETRY_AFTER },
        })
    }
}

impl<'m> Plan<'m> {
    pub(super) fn new(inbox: &Inner, messages: &[&'m Message]) -> Self {
        Self { slots: messages.iter().map(|message| Slot::new(inbox, message)).collect() }
    }

    pub(super) fn get(&self, batch: &[usize]) -> Vec<&Slot<'m>> {
        batch.iter().filter_map(|at| self.slots.get(*at)).collect()
    }

    /// Returns the messages that may have been delivered before: their positions and their records.
    pub(super) fn possibly_redelivered(&self) -> (Vec<usize>, Vec<Vec<u8>>) {
        let slots = self.slots.iter().enumerate().filter(|(_, slot)| is_possibly_redelivered(slot.message));
        slots
            .filter_map(|(at, slot)| {
                let receipt = slot.receipt.as_ref().ok()?;
                Some((at, receipt.id.as_bytes().to_vec()))
            })
            .unzip()
    }

    /// Postpones the record of a start until the message runs separately.
    pub(super) fn start_separately(&mut self, batch: &[usize]) {
        for at in batch {
            if let Some(slot) = self.slots.get_mut(*at) {
                slot.is_separate = true;
                slot.start = Start::Pending;
            }
        }
    }

    /// Notes the replies to recorded starts. Messages with failed attempts run separately.
    pub(super) fn note_starts(
        &mut self,
        batch: &[usize],
        states: Vec<ReceiptState>,
        outcome: impl Fn(&ReceiptState) -> Option<ProcessOutcome>,
    ) {
        for (at, state) in batch.iter().zip(&states) {
            if let Some(slot) = self.slots.get_mut(*at) {
                slot.start = match state.status {
                    ReceiptStatus::New => Start::Recorded,
                    ReceiptStatus::BeginSeparately => Start::Pending,
                    _ => Start::None,
                };
            }
        }
        self.note(batch, states, outcome);
        for slot in &mut self.slots {
            slot.is_separate |= slot.attempts > 0;
        }
    }

    /// Notes the receipts of messages, and the outcomes that follow from them.
    pub(super) fn note(
        &mut self,
        batch: &[usize],
        states: Vec<ReceiptState>,
        outcome: impl Fn(&ReceiptState) -> Option<ProcessOutcome>,
    ) {
        for (at, state) in batch.iter().zip(states) {
            if let Some(slot) = self.slots.get_mut(*at) {
                if matches!(state.status, ReceiptStatus::New | ReceiptStatus::BeginSeparately) {
                    slot.attempts = state.attempts;
                }
                slot.is_separate |=
                    matches!(state.status, ReceiptStatus::IdentityReused | ReceiptStatus::BeginSeparately);
                slot.outcome = outcome(&state);
            }
        }
    }

    /// Separates messages whose attempts are exhausted: each becomes a dead letter, and the others go on.
    pub(super) fn separate_exhausted(&mut self, batch: &[usize], max_attempts: u32) {
        for at in batch {
            if let Some(slot) = self.slots.get_mut(*at).filter(|slot| slot.outcome.is_none()) {
                slot.is_separate |= slot.attempts >= max_attempts;
            }
        }
    }

    /// Chooses the messages that may share a transaction.
    ///
    /// A message is left out if it must run separately, if an earlier message with its order key does not run with it, or
    /// if its identity is already in the batch.
    pub(super) fn runnable_together(&self, blocked_keys: &HashSet<OrderKey<'_>>) -> Vec<usize> {
        let mut waiting: HashSet<OrderKey<'_>> = HashSet::new();
        let mut ids = HashSet::new();
        let mut batch = Vec::new();
        for (at, slot) in self.slots.iter().enumerate() {
            let key = slot.key();
            let is_blocked = key.is_some_and(|key| waiting.contains(&key) || blocked_keys.contains(&key));
            match &slot.receipt {
                Ok(receipt) if slot.outcome.is_none() && !slot.is_separate && !is_blocked => {
                    if ids.insert(receipt.id) {
                        batch.push(at);
                    }
                }
                _ if slot.is_done() => {}
                _ => waiting.extend(key),
            }
        }
        batch
    }

    /// Reports the error for the first message without an outcome. The state of the others is unknown, and they do not run.
    pub(super) fn set_unavailable(&mut self, error: StoreError) {
        let mut error = Some(error);
        for slot in self.slots.iter_mut().filter(|slot| slot.outcome.is_none()) {
            slot.outcome = Some(error.take().map_or(ProcessOutcome::NotBegun, ProcessOutcome::Unavailable));
        }
    }
}

/// Returns `true` if the message may have been delivered before, so that it may have a receipt.
pub(super) fn is_possibly_redelivered(message: &Message) -> bool {
    message.is_redelivered && message.deliveries != Some(1)
}

/// The digest by which payloads are compared.
pub(crate) fn digest(message: &Message) -> [u8; 32] {
    *Fingerprint::of_parts("message", &[&message.payload]).digest()
}
