//! Messages through transactions: the new ones of a batch in one transaction, or each message in its own.
//!
//! ```text
//!  messages ──▶ plan ──▶ record the starts ──▶ one transaction for all that are runnable together
//!                                                │
//!        ┌──────────────┬────────────────────────┼──────────────────────┬─────────────────┐
//!        ▼              ▼                        ▼                      ▼                 ▼
//!    Committed        NotRun                   Failed            HandlerCommitted    Unavailable
//!    all have an    some are known now,      all rolled back        dead letters      the rest is
//!    outcome        try the others again        │                        │             NotBegun
//!        │              │  (fewer each time)    ▼                        ▼
//!        └──────────────┴───────────▶ each message without an outcome: a transaction of its own
//! ```
//!
//! - [`plan`] has the messages of a batch, and decides which of them may share a transaction.
//! - [`transaction`] runs transactions until their result is known, also after a lost COMMIT.
//! - [`outcome`] turns results and receipts into outcomes, counts failures, and writes dead letters.

mod outcome;
mod plan;
mod transaction;

use std::collections::HashSet;
use std::sync::Arc;

use oncegate_core::StoreError;
use oncegate_inbox::{DeadLetter, DeadReason, Message, MessageId, ProcessOutcome};
use oncegate_postgres::transaction::StatementError;

use self::outcome::{known_outcome, known_outcome_at_start};
use self::plan::{OrderKey, Plan, Slot, Start};
use self::transaction::{BatchResult, Transactions};
use crate::inbox::Inner;
use crate::receipts::{Receipt, ReceiptState, ReceiptStatus, has_code};
use crate::work::Work;

pub(crate) use self::plan::digest;

/// SQLSTATE of a full lock table. A message alone takes only one place in it.
const LOCK_TABLE_FULL: &str = "53200";

impl Inner {
    /// Processes messages in batches, and returns the outcome of each, in their order.
    pub(crate) async fn process_all<W: Work>(
        &self,
        messages: &[Arc<Message>],
        work: &W,
    ) -> Vec<ProcessOutcome> {
        let messages: Vec<&Message> = messages.iter().map(|message| &**message).collect();
        self.process(&messages, work).await
    }

    /// Processes messages in batches, and returns the outcome of each, in their order.
    pub(crate) async fn process<W: Work>(&self, messages: &[&Message], work: &W) -> Vec<ProcessOutcome> {
        let mut outcomes = Vec::with_capacity(messages.len());
        let mut blocked_keys = HashSet::new();
        for messages in messages.chunks(self.max_batch) {
            let plan = Plan::new(self, messages);
            let mut batch = Batch { inbox: self, plan, transactions: Transactions::new(self, work) };
            batch.run(&blocked_keys).await;
            batch.withdraw_starts().await;
            for slot in batch.plan.slots {
                if !slot.is_done()
                    && let Some(key) = slot.key()
                {
                    blocked_keys.insert(key);
                }
                outcomes.push(slot.outcome.unwrap_or(ProcessOutcome::NotBegun));
            }
        }
        self.receipts.purge_if_due();
        outcomes
    }
}

/// The messages of one batch, on their way through transactions.
struct Batch<'a, 'm, W> {
    inbox: &'a Inner,
    plan: Plan<'m>,
    transactions: Transactions<'a, W>,
}

impl<W: Work> Batch<'_, '_, W> {
    /// Gives every message an outcome, but for those that are not to begin. `blocked_keys` are those of earlier batches.
    async fn run(&mut self, blocked_keys: &HashSet<OrderKey<'_>>) {
        let ran = match self.record_starts().await {
            Ok(()) => self.run_together(blocked_keys).await,
            Err(error) => Err(error),
        };
        match ran {
            Ok(()) => self.run_separately(blocked_keys).await,
            Err(error) => self.plan.set_unavailable(error),
        }
    }

    /// Records the start of messages that may have been delivered before, and notes what is known of them.
    async fn record_starts(&mut self) -> Result<(), StoreError> {
        let (slots, ids) = self.plan.possibly_redelivered();
        if ids.is_empty() {
            return Ok(());
        }
        match self.inbox.receipts.begin(ids).await {
            Err(StatementError::Refused(error)) if slots.len() > 1 && has_code(&error, LOCK_TABLE_FULL) => {
                self.plan.start_separately(&slots);
            }
            states => {
                let compares_payloads = self.inbox.compares_payloads;
                self.plan
                    .note_starts(&slots, states?, |state| known_outcome_at_start(state, compares_payloads));
            }
        }
        Ok(())
    }

    /// Runs all messages that may share a transaction, as long as there are two of them.
    async fn run_together(&mut self, blocked_keys: &HashSet<OrderKey<'_>>) -> Result<(), StoreError> {
        // Each turn removes at least one message that cannot run with the others.
        for _ in 0..=self.plan.slots.len() {
            let batch = self.plan.runnable_together(blocked_keys);
            if batch.len() < 2 {
                return Ok(());
            }
            match self.transactions.until_known(&self.plan.get(&batch)).await {
                BatchResult::Committed(states) => {
                    self.plan.note(&batch, states, |state| match state.status {
                        ReceiptStatus::New => {
                            Some(ProcessOutcome::Processed { attempts: state.attempts + 1 })
                        }
                        _ => known_outcome(state),
                    });
                    return Ok(());
                }
                BatchResult::NotRun(states) => {
                    self.plan.note(&batch, states, known_outcome);
                    self.plan.separate_exhausted(&batch, self.inbox.max_attempts);
                }
                // The separate runs will show which message failed.
                BatchResult::Failed(_) => return Ok(()),
                BatchResult::HandlerCommitted(states, transaction) => {
                    return self.inbox.handler_committed(&mut self.plan, &batch, states, transaction).await;
                }
                BatchResult::Unavailable(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Runs each message that has no outcome yet in a transaction of its own, in order.
    async fn run_separately(&mut self, blocked_keys: &HashSet<OrderKey<'_>>) {
        for at in 0..self.plan.slots.len() {
            let (earlier, rest) = self.plan.slots.split_at_mut(at);
            let Some(slot) = rest.first_mut().filter(|slot| slot.outcome.is_none()) else { continue };
            let outcome = if slot.is_blocked(earlier, blocked_keys) {
                ProcessOutcome::NotBegun
            } else if let Some(outcome) = slot.duplicate_in_batch(earlier) {
                outcome
            } else {
                self.transactions.process_separately(slot).await
            };
            let is_unavailable = matches!(outcome, ProcessOutcome::Unavailable(_));
            slot.outcome = Some(outcome);
            if is_unavailable {
                // Do not wait for the database once for each of the others.
                return;
            }
        }
    }

    /// Withdraws the starts of messages that did not run because of a message before them.
    ///
    /// The broker may give them to another process next. That process must not count this start as a crash.
    async fn withdraw_starts(&self) {
        let slots = &self.plan.slots;
        if slots.iter().any(|slot| matches!(slot.outcome, Some(ProcessOutcome::Unavailable(_)))) {
            return;
        }
        let not_run = slots.iter().filter(|slot| {
            slot.start == Start::Recorded && matches!(slot.outcome, None | Some(ProcessOutcome::NotBegun))
        });
        let ids: Vec<_> =
            not_run.filter_map(|slot| slot.receipt.as_ref().ok().map(|receipt| receipt.id)).collect();
        if !ids.is_empty() {
            self.inbox.receipts.not_begun(&ids).await;
        }
    }
}

impl<W: Work> Transactions<'_, W> {
    /// Processes a message in a transaction of its own, with all consequences of a failure.
    async fn process_separately(&mut self, slot: &Slot<'_>) -> ProcessOutcome {
        let inbox = self.inbox;
        let message = slot.message;
        let receipt = match &slot.receipt {
            Ok(receipt) => receipt,
            Err(why) => {
                let id = MessageId::of_content(message).record_id(&inbox.consumer);
                let receipt = Receipt { id, digest: None };
                return inbox.dead_letter(&receipt, message, DeadReason::NoIdentity, 0, why.clone()).await;
            }
        };
        if slot.start == Start::Pending {
            match inbox.receipts.begin(vec![receipt.id.as_bytes().to_vec()]).await {
                Ok(states) => {
                    let known = |state| known_outcome_at_start(state, inbox.compares_payloads);
                    if let Some(outcome) = states.first().and_then(known) {
                        return outcome;
                    }
                }
                Err(error) => return ProcessOutcome::Unavailable(error.into()),
            }
        }
        match self.until_known(&[slot]).await {
            BatchResult::Committed(states) => {
                let attempts = states.first().map_or(0, |state| state.attempts);
                ProcessOutcome::Processed { attempts: attempts.saturating_add(1) }
            }
            BatchResult::NotRun(states) => match states.first() {
                Some(ReceiptState { status: ReceiptStatus::New, attempts }) => {
                    let why =
                        "its last attempt did not end, or its dead letter could not be written".to_owned();
                    inbox.dead_letter(receipt, message, DeadReason::AttemptsExhausted, *attempts, why).await
                }
                Some(ReceiptState { status: ReceiptStatus::IdentityReused, .. }) => {
                    let id = DeadLetter::separate_id(&inbox.consumer, receipt.id, &digest(message));
                    let separate = Receipt { id, digest: None };
                    let why = "another message has the same identity".to_owned();
                    inbox.dead_letter(&separate, message, DeadReason::IdentityReused, 0, why).await
                }
                state => state.and_then(known_outcome).unwrap_or(ProcessOutcome::NotBegun),
            },
            BatchResult::Failed(failure) => {
                inbox.failed(receipt, message, failure, self.cut_off_until()).await
            }
            // With a single message, the handler committed what it wanted to commit.
            BatchResult::HandlerCommitted(..) => ProcessOutcome::Duplicate,
            BatchResult::Unavailable(error) => ProcessOutcome::Unavailable(error),
        }
    }
}
