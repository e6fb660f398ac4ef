//! The transaction of messages: run, and run again, until its result is known.
//!
//! ```text
//!            ┌───────────────── Conflict, or the session was lost in the handler (a single message only) ──┐
//!            ▼                                                                                             │
//!   claim the messages ──▶ run the handler ──▶ is it still the same transaction? ──▶ COMMIT ──▶ Committed  │
//!       │        │              │                        │ no                         │ │                 │
//!       │        │              └──▶ Failed              └──▶ Failed, or              │ └──▶ Conflict ─────┘
//!       │        └──▶ NotRun                                  HandlerCommitted        ▼
//!       └──▶ Unavailable                                      (a batch only)     CommitUnknown ──▶ claim again: the
//!                                                                                messages are Processed if it committed,
//!                                                                                New if it did not, InFlight until then
//! ```

use std::collections::HashSet;
use std::time::Duration;

use oncegate_core::StoreError;
use oncegate_engine::{PanicError, catch_panic};
use oncegate_inbox::{HandlerError, Message};
use oncegate_postgres::sqlx::postgres::{PgDatabaseError, PgSeverity};
use oncegate_postgres::sqlx::{self, Connection as _};
use oncegate_postgres::transaction::{
    OpenTransaction, StatementError, TransactionConnection, begin, is_conflict, is_conflict_in, is_lost_in,
    is_rolled_back, store_error,
};
use tokio::time::Instant;

use super::LOCK_TABLE_FULL;
use super::outcome::{backoff, is_ahead};
use super::plan::Slot;
use crate::inbox::Inner;
use crate::receipts::{ClaimTransaction, Receipt, ReceiptState, ReceiptStatus, has_code};
use crate::work::Work;

/// The time for which the session of a broken connection may keep its locks.
const SESSION_END_TIMEOUT: Duration = Duration::from_secs(3);

/// The result of one run of a transaction.
enum RunResult {
    /// COMMIT succeeded.
    Committed(Vec<ReceiptState>),
    /// The handler did not run: no message is new, or the new ones may not share a transaction.
    NotRun(Vec<ReceiptState>),
    /// The handler or COMMIT failed, and everything was rolled back.
    Failed(HandlerError),
    /// The handler failed, but it may have committed the receipts of the whole batch by itself.
    HandlerCommitted(Vec<ReceiptState>, ClaimTransaction),
    /// Rolled back by a conflict, so another run may succeed.
    Conflict(StoreError),
    /// COMMIT was sent, and its reply was lost.
    CommitUnknown(Vec<ReceiptState>),
    /// The database is out of reach.
    Unavailable(StoreError),
}

/// The final result of a transaction.
pub(super) enum BatchResult {
    /// The messages with the status `New` were processed.
    Committed(Vec<ReceiptState>),
    /// The handler did not run.
    NotRun(Vec<ReceiptState>),
    /// Everything was rolled back.
    Failed(HandlerError),
    /// The handler may have committed the receipts of the whole batch by itself.
    HandlerCommitted(Vec<ReceiptState>, ClaimTransaction),
    /// The database is out of reach.
    Unavailable(StoreError),
}

/// The end of a transaction before COMMIT.
struct EarlyEnd {
    result: RunResult,
    /// The claim, if the handler ran after it: it may have committed it.
    claimed: Option<(Vec<ReceiptState>, ClaimTransaction)>,
}

impl From<RunResult> for EarlyEnd {
    fn from(result: RunResult) -> Self {
        Self { result, claimed: None }
    }
}

/// A COMMIT whose reply was lost.
struct LostCommit {
    states: Vec<ReceiptState>,
    /// The end of the search for its result.
    until: Instant,
}

/// Runs transactions of one batch.
pub(super) struct Transactions<'a, W> {
    pub(super) inbox: &'a Inner,
    work: &'a W,
    cut_off_until: Option<Instant>,
}

impl<'a, W: Work> Transactions<'a, W> {
    pub(super) const fn new(inbox: &'a Inner, work: &'a W) -> Self {
        Self { inbox, work, cut_off_until: None }
    }

    /// The time until which a transaction that lost its connection may still hold its messages.
    pub(super) const fn cut_off_until(&self) -> Option<Instant> {
        self.cut_off_until
    }

    /// Runs the transaction until its result is known.
    ///
    /// A single message runs again after a conflict, and once after its session was lost in the handler. After a COMMIT
    /// without a reply the messages are claimed again. They are in flight as long as the old transaction is open, and
    /// processed or new afterwards.
    pub(super) async fn until_known(&mut self, slots: &[&Slot<'_>]) -> BatchResult {
        let is_single = slots.len() == 1;
        let mut runs_left = self.inbox.max_runs;
        let mut was_cut_off = false;
        let mut lost_commit: Option<LostCommit> = None;
        let mut backoff = backoff();
        loop {
            let result = self.run_once(slots).await;
            let lost = lost_commit.as_ref();
            let is_searching = lost.is_some_and(|lost| Instant::now() < lost.until);
            match result {
                RunResult::Committed(states) => return BatchResult::Committed(own(states, lost)),
                RunResult::NotRun(states) => {
                    let is_open = states.iter().any(|state| state.status == ReceiptStatus::InFlight);
                    if !(is_open && (is_searching || is_ahead(self.cut_off_until))) {
                        // The lost transaction has committed all of it, or another one has.
                        let is_settled = states.iter().all(|state| {
                            matches!(state.status, ReceiptStatus::Processed | ReceiptStatus::Dead(_))
                        });
                        return match lost {
                            Some(_) if is_settled => BatchResult::Committed(own(states, lost)),
                            _ => BatchResult::NotRun(states),
                        };
                    }
                }
                RunResult::Unavailable(_) if is_searching => {}
                RunResult::Unavailable(error) => return BatchResult::Unavailable(error),
                RunResult::HandlerCommitted(states, transaction) => {
                    return BatchResult::HandlerCommitted(states, transaction);
                }
                RunResult::Conflict(error) if !is_single || runs_left <= 1 => {
                    return BatchResult::Failed(HandlerError::retry(error));
                }
                RunResult::Conflict(_) => runs_left -= 1,
                RunResult::Failed(failure) => {
                    let error = failure.error();
                    if is_lost_in(error) {
                        self.cut_off_until = Some(Instant::now() + SESSION_END_TIMEOUT);
                    }
                    let is_conflict = is_single && runs_left > 1 && is_conflict_in(error);
                    let is_cut_off = is_single && !was_cut_off && is_lost_in(error);
                    if !is_conflict && !is_cut_off {
                        return BatchResult::Failed(failure);
                    }
                    was_cut_off |= is_cut_off;
                    runs_left -= u32::from(is_conflict);
                }
                RunResult::CommitUnknown(states) => {
                    tracing::warn!("the reply to COMMIT was lost; finding out whether it succeeded");
                    if runs_left <= 1 {
                        return BatchResult::Unavailable(StoreError::unavailable(
                            "the connection to PostgreSQL ended during COMMIT again and again",
                        ));
                    }
                    runs_left -= 1;
                    let until = Instant::now() + self.inbox.receipts.statement_timeout;
                    lost_commit = Some(LostCommit { states, until });
                    continue;
                }
            }
            backoff.sleep(lost_commit.as_ref().map(|lost| lost.until)).await;
        }
    }

    async fn run_once(&self, slots: &[&Slot<'_>]) -> RunResult {
        let receipts = &self.inbox.receipts;
        let timeout = receipts.statement_timeout;
        let mut connection = match TransactionConnection::acquire(&receipts.pool).await {
            Ok(connection) => connection,
            Err(error) => return RunResult::Unavailable(error.into()),
        };
        let mut open = match connection.begin(begin(self.inbox.isolation), timeout).await {
            Ok(open) => open,
            Err(error) => return RunResult::Unavailable(error.into()),
        };
        let states = match self.run_on(&mut open, slots).await {
            Ok(states) => states,
            Err(EarlyEnd { result, claimed }) => {
                open.rollback(timeout).await;
                // In a batch, a handler that commits endangers the receipts of all messages.
                if let (Some((states, transaction)), true) = (claimed, slots.len() > 1)
                    && receipts.may_be_committed(connection, transaction).await
                {
                    return RunResult::HandlerCommitted(states, transaction);
                }
                return result;
            }
        };
        let result = match open.commit(timeout).await {
            Ok(()) => return RunResult::Committed(states),
            Err(StatementError::Refused(error)) if is_conflict(&error) => {
                RunResult::Conflict(store_error(&error))
            }
            // For example a deferred constraint.
            Err(StatementError::Refused(error)) if is_rolled_back(&error) || is_refusal(&error) => {
                RunResult::Failed(HandlerError::unsure(error))
            }
            Err(_) => return RunResult::CommitUnknown(states),
        };
        // The server reports the error before it releases the locks. The ping returns after they are released.
        let is_over = connection.statement(timeout, async |connection| connection.ping().await).await.is_ok();
        match result {
            RunResult::Failed(failure) if !is_over && !is_rolled_back_in(&failure) => {
                RunResult::CommitUnknown(states)
            }
            result => result,
        }
    }

    /// Claims the messages and runs the handler for the new ones. `Ok` means that the transaction may commit.
    async fn run_on(
        &self,
        open: &mut OpenTransaction<'_>,
        slots: &[&Slot<'_>],
    ) -> Result<Vec<ReceiptState>, EarlyEnd> {
        let receipts: Vec<Receipt> = slots.iter().filter_map(|slot| slot.receipt.clone().ok()).collect();
        let (states, transaction) = match self.inbox.receipts.receive(open, &receipts).await {
            Err(StatementError::Refused(error)) if slots.len() > 1 && has_code(&error, LOCK_TABLE_FULL) => {
                return Err(RunResult::Conflict(store_error(&error)).into());
            }
            claimed => claimed.map_err(before_handler)?,
        };
        let is_new = |state: &ReceiptState| state.status == ReceiptStatus::New;
        if !states.iter().any(is_new) || !self.may_run_together(slots, &states) {
            return Err(RunResult::NotRun(states).into());
        }
        let new: Vec<&Message> = slots
            .iter()
            .zip(&states)
            .filter(|(_, state)| is_new(state))
            .map(|(slot, _)| slot.message)
            .collect();
        match self.run_handler(open, &new, transaction).await {
            Ok(()) => Ok(states),
            Err(result) => {
                Err(EarlyEnd { result, claimed: transaction.map(|transaction| (states, transaction)) })
            }
        }
    }

    async fn run_handler(
        &self,
        open: &mut OpenTransaction<'_>,
        new: &[&Message],
        transaction: Option<ClaimTransaction>,
    ) -> Result<(), RunResult> {
        let failed = |error: &'static str| RunResult::Failed(HandlerError::unsure(error));
        match catch_panic(self.work.run(open.connection(), new)).await {
            Ok(Ok(())) => {}
            Ok(Err(failure)) => return Err(RunResult::Failed(failure)),
            Err(PanicError) => return Err(failed("the handler panicked")),
        }
        // After a failed statement, COMMIT reports success and rolls back. So check that the transaction is intact.
        match self.inbox.receipts.is_still(open, transaction).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(failed("the handler ended the transaction itself")),
            // PostgreSQL refuses statements after one that failed.
            Err(StatementError::Refused(error)) if has_code(&error, "25P02") => {
                Err(failed("a statement of the handler failed, and the handler ignored its error"))
            }
            Err(StatementError::Refused(error)) if is_conflict(&error) => {
                Err(RunResult::Conflict(store_error(&error)))
            }
            // The session ended, or a statement failed whose reply the handler did not read. Both may happen each time.
            Err(StatementError::Refused(error)) => Err(RunResult::Failed(HandlerError::unsure(error))),
            Err(StatementError::TimedOut) => Err(RunResult::Unavailable(StatementError::TimedOut.into())),
        }
    }

    /// Returns `true` if the new messages may run in this transaction.
    ///
    /// They may not if one of them was tried too often, or comes after a message with its order key that another
    /// transaction holds.
    fn may_run_together(&self, slots: &[&Slot<'_>], states: &[ReceiptState]) -> bool {
        let mut waiting = HashSet::new();
        for (slot, state) in slots.iter().zip(states) {
            let key = slot.key();
            match state.status {
                ReceiptStatus::New if state.attempts >= self.inbox.max_attempts => return false,
                ReceiptStatus::New if key.is_some_and(|key| waiting.contains(&key)) => return false,
                ReceiptStatus::IdentityReused => return false,
                ReceiptStatus::InFlight => waiting.extend(key),
                _ => {}
            }
        }
        true
    }
}

/// Restores the status `New` for messages that the lost transaction itself has processed.
fn own(mut states: Vec<ReceiptState>, lost: Option<&LostCommit>) -> Vec<ReceiptState> {
    for (now, then) in states.iter_mut().zip(lost.map_or(&[][..], |lost| &lost.states)) {
        if now.status == ReceiptStatus::Processed && then.status == ReceiptStatus::New {
            *now = then.clone();
        }
    }
    states
}

fn before_handler(error: StatementError) -> RunResult {
    match error {
        StatementError::Refused(error) if is_conflict(&error) => RunResult::Conflict(store_error(&error)),
        error => RunResult::Unavailable(error.into()),
    }
}

/// Returns `true` if the server refused a COMMIT and its session goes on, for example because of a deferred trigger.
///
/// The reply only decides whether this counts as a failure. If the transaction was committed anyway, its receipts show it.
fn is_refusal(error: &sqlx::Error) -> bool {
    let database = error.as_database_error().and_then(|error| error.try_downcast_ref::<PgDatabaseError>());
    // After 40003 and class 08 the result is unknown.
    database.is_some_and(|error| {
        error.severity() == PgSeverity::Error && error.code() != "40003" && !error.code().starts_with("08")
    })
}

fn is_rolled_back_in(failure: &HandlerError) -> bool {
    failure.error().downcast_ref::<sqlx::Error>().is_some_and(is_rolled_back)
}
