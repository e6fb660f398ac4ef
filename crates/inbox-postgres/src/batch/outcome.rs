//! From receipts and results to outcomes: known messages, failures, dead letters.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{ErrorChain, StoreError, StoreErrorKind};
use oncegate_inbox::{DeadLetter, DeadReason, HandlerError, Message, ProcessOutcome};
use oncegate_postgres::transaction::Backoff;
use tokio::time::Instant;

use super::plan::{Plan, is_possibly_redelivered};
use crate::inbox::Inner;
use crate::receipts::{ClaimTransaction, Receipt, ReceiptState, ReceiptStatus};
use crate::streams::StreamBusy;

/// The pause before a message is tried again that another transaction holds.
pub(super) const RETRY_AFTER: Duration = Duration::from_millis(250);

/// The pauses between calls that wait for another transaction.
pub(super) fn backoff() -> Backoff {
    Backoff::new(Duration::from_millis(5), Duration::from_millis(250))
}

pub(super) fn is_ahead(until: Option<Instant>) -> bool {
    until.is_some_and(|until| Instant::now() < until)
}

/// The outcome that follows from a receipt alone, without running the handler.
pub(super) fn known_outcome(state: &ReceiptState) -> Option<ProcessOutcome> {
    match state.status {
        ReceiptStatus::Processed => Some(ProcessOutcome::Duplicate),
        ReceiptStatus::Dead(reason) => Some(ProcessOutcome::Dead { reason, is_known: true }),
        ReceiptStatus::InFlight => Some(ProcessOutcome::InFlight { retry_after: RETRY_AFTER }),
        ReceiptStatus::New
        | ReceiptStatus::BeginSeparately
        | ReceiptStatus::IdentityReused
        | ReceiptStatus::AttemptFailed
        | ReceiptStatus::DeadLetterWritten
        | ReceiptStatus::NotCommitted => None,
    }
}

/// The outcome that follows from the reply to a recorded start.
pub(super) fn known_outcome_at_start(
    state: &ReceiptState,
    compares_payloads: bool,
) -> Option<ProcessOutcome> {
    match state.status {
        // The payloads are not compared yet, so it may be another message.
        ReceiptStatus::Processed | ReceiptStatus::Dead(_) if compares_payloads => None,
        _ => known_outcome(state),
    }
}

/// The outcome of a message whose dead letter was to be written.
fn dead_letter_outcome(state: Result<ReceiptState, StoreError>, dead_letter: &DeadLetter) -> ProcessOutcome {
    match state {
        Ok(ReceiptState { status: ReceiptStatus::DeadLetterWritten, .. }) => {
            ProcessOutcome::Dead { reason: dead_letter.reason, is_known: false }
        }
        Ok(state) => known_outcome(&state).unwrap_or(ProcessOutcome::InFlight { retry_after: RETRY_AFTER }),
        // A refused dead letter is a problem of this message only.
        Err(error) if error.kind() == StoreErrorKind::Invalid => {
            let failure =
                HandlerError::retry(format!("the database refuses its dead letter: {}", ErrorChain(&error)));
            ProcessOutcome::Failed { attempts: dead_letter.attempts.max(1), failure }
        }
        Err(error) => ProcessOutcome::Unavailable(error),
    }
}

impl Inner {
    /// Counts the failed attempt of a message whose transaction was rolled back, and gives the message up if it was the last.
    pub(super) async fn failed(
        &self,
        receipt: &Receipt,
        message: &Message,
        failure: HandlerError,
        cut_off_until: Option<Instant>,
    ) -> ProcessOutcome {
        if failure.error().is::<StreamBusy>() {
            // The broker may give the message to another process next. It must not count this start as a crash.
            if is_possibly_redelivered(message) {
                self.receipts.not_begun(&[receipt.id]).await;
            }
            return ProcessOutcome::InFlight { retry_after: RETRY_AFTER };
        }
        let mut backoff = backoff();
        let counted = loop {
            match self.receipts.failed(receipt.id).await {
                Ok(ReceiptState { status: ReceiptStatus::InFlight, .. }) if is_ahead(cut_off_until) => {
                    backoff.sleep(cut_off_until).await;
                }
                Ok(counted) => break counted,
                Err(error) => return ProcessOutcome::Unavailable(error),
            }
        };
        let attempts = counted.attempts;
        let reason = match failure {
            _ if counted.status != ReceiptStatus::AttemptFailed => {
                let in_flight = ProcessOutcome::InFlight { retry_after: RETRY_AFTER };
                return known_outcome(&counted).unwrap_or(in_flight);
            }
            HandlerError::Reject(_) => DeadReason::Rejected,
            _ if attempts >= self.max_attempts => DeadReason::AttemptsExhausted,
            failure => return ProcessOutcome::Failed { attempts, failure },
        };
        self.dead_letter(receipt, message, reason, attempts, failure.to_error_text()).await
    }

    /// Writes dead letters for messages whose receipts a handler committed by itself, perhaps without their effects.
    ///
    /// Afterwards their receipts have the status dead, so that an operator who takes a dead letter out gets its message
    /// processed. A message stays open if the transaction turns out not to have committed it: because it was rolled back, or
    /// because its number belongs to another transaction after a server crash.
    pub(super) async fn handler_committed(
        &self,
        plan: &mut Plan<'_>,
        batch: &[usize],
        states: Vec<ReceiptState>,
        transaction: ClaimTransaction,
    ) -> Result<(), StoreError> {
        // Without dead letters these messages would count as processed when they are delivered again. So keep trying.
        let until = Instant::now() + self.receipts.statement_timeout;
        let (mut written, mut unwritten) = (0, 0);
        let mut out_of_reach = None;
        for (at, state) in batch.iter().zip(states) {
            let Some(slot) = plan.slots.get_mut(*at) else { continue };
            let (Ok(receipt), None) = (&slot.receipt, known_outcome(&state)) else {
                slot.outcome = known_outcome(&state);
                continue;
            };
            // Do not wait for the database once for each of the others.
            if out_of_reach.is_some() {
                unwritten += 1;
                continue;
            }
            let outcome = self
                .dead_letter_if_committed(receipt, slot.message, state.attempts, transaction, until)
                .await;
            match outcome {
                Some(ProcessOutcome::Dead { is_known: false, .. }) => written += 1,
                Some(
                    ProcessOutcome::Unavailable(_)
                    | ProcessOutcome::InFlight { .. }
                    | ProcessOutcome::Failed { .. },
                ) => {
                    unwritten += 1;
                }
                _ => {}
            }
            if let Some(ProcessOutcome::Unavailable(error)) = outcome {
                out_of_reach = Some(error);
            } else {
                slot.outcome = outcome;
            }
        }
        if written + unwritten > 0 {
            tracing::error!(
                written,
                unwritten,
                "a handler may have ended the transaction of its batch by a statement of its own: remove that statement. \
                 Messages whose dead letters could not be written may count as processed"
            );
        }
        out_of_reach.map_or(Ok(()), Err)
    }

    /// Writes the dead letter of one such message. Returns `None` if the transaction did not commit it.
    async fn dead_letter_if_committed(
        &self,
        receipt: &Receipt,
        message: &Message,
        attempts: u32,
        transaction: ClaimTransaction,
        until: Instant,
    ) -> Option<ProcessOutcome> {
        let why = "a handler ended the transaction of the batch by a statement of its own; the receipt is committed, \
             and perhaps the effect is not";
        let dead_letter =
            self.new_dead_letter(receipt, message, DeadReason::OutcomeUnknown, attempts, why.to_owned());
        let mut backoff = backoff();
        loop {
            let outcome = match self.receipts.dead(receipt, &dead_letter, Some(transaction.claimed_at)).await
            {
                Ok(ReceiptState { status: ReceiptStatus::NotCommitted, .. }) => return None,
                state => dead_letter_outcome(state, &dead_letter),
            };
            let may_pass =
                matches!(outcome, ProcessOutcome::InFlight { .. } | ProcessOutcome::Unavailable(_));
            if !may_pass || !is_ahead(Some(until)) {
                return Some(outcome);
            }
            backoff.sleep(Some(until)).await;
        }
    }

    /// Gives a message up: writes its dead letter and a receipt with the status dead.
    pub(super) async fn dead_letter(
        &self,
        receipt: &Receipt,
        message: &Message,
        reason: DeadReason,
        attempts: u32,
        error: String,
    ) -> ProcessOutcome {
        let dead_letter = self.new_dead_letter(receipt, message, reason, attempts, error);
        dead_letter_outcome(self.receipts.dead(receipt, &dead_letter, None).await, &dead_letter)
    }

    fn new_dead_letter(
        &self,
        receipt: &Receipt,
        message: &Message,
        reason: DeadReason,
        attempts: u32,
        error: String,
    ) -> DeadLetter {
        let message = Arc::new(message.clone());
        DeadLetter::new(receipt.id, self.consumer.clone(), message, reason, attempts, error)
    }
}
