//! Messages through transactions: all that are new in one, or each in its own.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::{ErrorChain, Fingerprint, StoreError, StoreErrorKind};
use oncegate_engine::{Panicked, catch_panic};
use oncegate_inbox::{DeadLetter, DeadReason, HandlerError, Message, MessageId, ProcessOutcome, Settlement};
use oncegate_postgres::sqlx::postgres::{PgDatabaseError, PgSeverity};
use oncegate_postgres::sqlx::{self, Connection as _};
use oncegate_postgres::transaction::{
    Backoff, OpenTransaction, StatementError, TransactionConnection, begin, is_conflict, is_conflict_in,
    is_lost_in, is_rolled_back, store_error,
};
use tokio::time::Instant;

use crate::inbox::Inner;
use crate::receipts::{Receipt, Said, Transaction, What, has_code};
use crate::streams::StreamBusy;
use crate::work::Work;

/// When to ask again after a message that another transaction has.
const ASK_AGAIN: Duration = Duration::from_millis(250);

/// How long a session whose connection ended may hold on to what it had: it tells of its end before it lets go.
const LETTING_GO: Duration = Duration::from_secs(3);

/// What the server says where its table of locks is full. A message by itself takes only one place.
const TOO_MANY_LOCKS: &str = "53200";

/// What one message has come to so far.
struct Slot<'m> {
    message: &'m Message,
    /// Where its receipt is, or why it has none.
    receipt: Result<Receipt, String>,
    /// Attempts that failed or died, as far as is known.
    attempts: u32,
    /// It failed before, or cannot be in one transaction with others.
    is_alone: bool,
    /// It is to be noted that it is begun, before it is.
    is_to_begin: bool,
    /// It was noted that it is begun.
    is_begun: bool,
    handled: Option<ProcessOutcome>,
}

/// What must stay in order.
type OrderKey<'m> = (&'m str, &'m Bytes);

impl<'m> Slot<'m> {
    fn key(&self) -> Option<OrderKey<'m>> {
        self.message.order_key.as_ref().map(|key| (self.message.topic.as_str(), key))
    }

    /// Whether it is certain that it need not come again.
    fn is_done(&self) -> bool {
        self.handled
            .as_ref()
            .is_some_and(|handled| handled.settlement(Duration::ZERO) == Settlement::Acknowledge)
    }
}

/// What one transaction came to.
enum Tried {
    Committed(Vec<Said>),
    /// Nothing was run: there is nothing new, or not all of it may be run together.
    NotRun(Vec<Said>),
    /// The handler failed, or COMMIT did. Rolled back.
    Failed(HandlerError),
    /// The handler failed, and the transaction may have been committed all the same, with the receipts of all.
    Torn(Vec<Said>, Transaction),
    /// Rolled back before or after the handler, and worth another run.
    Again(StoreError),
    /// COMMIT was sent, and its answer lost.
    Lost(Vec<Said>),
    Away(StoreError),
}

/// The same, when it is known.
enum Known {
    Committed(Vec<Said>),
    NotRun(Vec<Said>),
    Failed(HandlerError),
    Torn(Vec<Said>, Transaction),
    Away(StoreError),
}

impl Inner {
    /// As many as there are, in batches.
    pub(crate) async fn process_all<W: Work>(
        &self,
        messages: &[Arc<Message>],
        work: &W,
    ) -> Vec<ProcessOutcome> {
        let messages: Vec<&Message> = messages.iter().map(|message| &**message).collect();
        self.process(&messages, work).await
    }

    /// Says for each message what became of it, in their order.
    pub(crate) async fn process<W: Work>(&self, messages: &[&Message], work: &W) -> Vec<ProcessOutcome> {
        let mut handled = Vec::with_capacity(messages.len());
        let mut behind = HashSet::new();
        for messages in messages.chunks(self.max_batch) {
            let mut slots: Vec<Slot<'_>> = messages.iter().map(|message| self.slot(message)).collect();
            self.process_batch(&mut slots, work, &behind).await;
            self.take_back(&slots).await;
            for slot in slots {
                if !slot.is_done()
                    && let Some(key) = slot.key()
                {
                    behind.insert(key);
                }
                handled.push(slot.handled.unwrap_or(ProcessOutcome::NotBegun));
            }
        }
        self.receipts.tidy();
        handled
    }

    fn slot<'m>(&self, message: &'m Message) -> Slot<'m> {
        let digest = self.compares_payloads.then(|| digest(message));
        let receipt = match self.identity.of(message) {
            Ok(id) => Ok(Receipt { id: id.record_id(&self.consumer), digest }),
            Err(why) => Err(why.to_string()),
        };
        let is_alone = receipt.is_err();
        Slot { message, receipt, attempts: 0, is_alone, is_to_begin: false, is_begun: false, handled: None }
    }

    async fn process_batch<W: Work>(&self, slots: &mut [Slot<'_>], work: &W, behind: &HashSet<OrderKey<'_>>) {
        if let Err(error) = self.begin(slots).await {
            return away(slots, error);
        }
        // Until when a transaction of ours may still be there that was cut off.
        let mut cut: Option<Instant> = None;
        // Each turn takes out at least one of those that cannot be run with the others.
        for _ in 0..=slots.len() {
            let batch = together(slots, behind);
            if batch.len() < 2 {
                break;
            }
            let asked: Vec<&Slot<'_>> = batch.iter().filter_map(|at| slots.get(*at)).collect();
            match self.until_known(&asked, work, &mut cut).await {
                Known::Committed(said) => {
                    set(slots, &batch, said, |said| match said.what {
                        What::Process => Some(ProcessOutcome::Processed { attempts: said.attempts + 1 }),
                        _ => known(&said),
                    });
                    break;
                }
                Known::NotRun(said) => {
                    let max = self.max_attempts;
                    set(slots, &batch, said, |said| known(&said));
                    for at in batch {
                        let slot = slots.get_mut(at).filter(|slot| slot.handled.is_none());
                        if let Some(slot) = slot {
                            slot.is_alone |= slot.attempts >= max;
                        }
                    }
                }
                // Each alone will tell which one it is.
                Known::Failed(_) => break,
                Known::Torn(said, transaction) => {
                    if let Err(error) = self.torn(slots, &batch, said, transaction).await {
                        return away(slots, error);
                    }
                    break;
                }
                Known::Away(error) => return away(slots, error),
            }
        }
        for at in 0..slots.len() {
            let (earlier, rest) = slots.split_at_mut(at);
            let Some(slot) = rest.first_mut().filter(|slot| slot.handled.is_none()) else { continue };
            let key = slot.key();
            let is_behind = key.is_some_and(|key| {
                behind.contains(&key) || earlier.iter().any(|slot| slot.key() == Some(key) && !slot.is_done())
            });
            slot.handled = Some(match twin(earlier, slot) {
                _ if is_behind => ProcessOutcome::NotBegun,
                Some(handled) => handled,
                None => self.process_alone(slot, work, &mut cut).await,
            });
            if matches!(slot.handled, Some(ProcessOutcome::Unavailable(_))) {
                // What is out of reach is not tried for each of the others.
                return;
            }
        }
    }

    /// Notes that those that may have been delivered before are begun, and sets apart what is known of them.
    async fn begin(&self, slots: &mut [Slot<'_>]) -> Result<(), StoreError> {
        let mut begun = Vec::new();
        let mut ids = Vec::new();
        for (at, slot) in slots.iter().enumerate() {
            if let Ok(receipt) = &slot.receipt
                && self.counts_crashes
                && may_be_known(slot.message)
            {
                begun.push(at);
                ids.push(receipt.id.as_bytes().to_vec());
            }
        }
        if ids.is_empty() {
            return Ok(());
        }
        let said = match self.receipts.begin(ids).await {
            Err(StatementError::Refused(error)) if begun.len() > 1 && has_code(&error, TOO_MANY_LOCKS) => {
                for at in begun {
                    if let Some(slot) = slots.get_mut(at) {
                        slot.is_alone = true;
                        slot.is_to_begin = true;
                    }
                }
                return Ok(());
            }
            said => said?,
        };
        for (at, said) in begun.iter().zip(&said) {
            if let Some(slot) = slots.get_mut(*at) {
                slot.is_begun = said.what == What::Process;
            }
        }
        set(slots, &begun, said, |said| self.known_begun(&said));
        for slot in slots {
            slot.is_alone |= slot.attempts > 0;
        }
        Ok(())
    }

    /// Takes back that those are begun which were not, because of one before them: the broker may give them to another process
    /// next, which must not take them for ones that were cut off.
    async fn take_back(&self, slots: &[Slot<'_>]) {
        if slots.iter().any(|slot| matches!(slot.handled, Some(ProcessOutcome::Unavailable(_)))) {
            return;
        }
        let left = slots
            .iter()
            .filter(|slot| slot.is_begun && matches!(slot.handled, None | Some(ProcessOutcome::NotBegun)));
        let ids: Vec<_> =
            left.filter_map(|slot| slot.receipt.as_ref().ok().map(|receipt| receipt.id)).collect();
        if !ids.is_empty() {
            self.receipts.not_begun(&ids).await;
        }
    }

    /// What is known of a message when it is begun.
    fn known_begun(&self, said: &Said) -> Option<ProcessOutcome> {
        match said.what {
            // Whether it is the same message is to be seen yet.
            What::Processed | What::Dead(_) if self.compares_payloads => None,
            _ => known(said),
        }
    }

    /// In a transaction of its own, with everything that follows from a failure.
    async fn process_alone<W: Work>(
        &self,
        slot: &Slot<'_>,
        work: &W,
        cut: &mut Option<Instant>,
    ) -> ProcessOutcome {
        let receipt = match &slot.receipt {
            Ok(receipt) => receipt,
            Err(why) => {
                let id = MessageId::of_content(slot.message).record_id(&self.consumer);
                let receipt = Receipt { id, digest: None };
                return self.bury(&receipt, slot.message, DeadReason::NoIdentity, 0, why.clone()).await;
            }
        };
        if slot.is_to_begin {
            match self.receipts.begin(vec![receipt.id.as_bytes().to_vec()]).await {
                Ok(said) => {
                    if let Some(handled) = said.first().and_then(|said| self.known_begun(said)) {
                        return handled;
                    }
                }
                Err(error) => return ProcessOutcome::Unavailable(error.into()),
            }
        }
        match self.until_known(&[slot], work, cut).await {
            Known::Committed(said) => {
                let attempts = said.first().map_or(0, |said| said.attempts);
                ProcessOutcome::Processed { attempts: attempts.saturating_add(1) }
            }
            Known::NotRun(said) => match said.first() {
                Some(Said { what: What::Process, attempts }) => {
                    let why = "its last attempt did not end, or its letter could not be written".to_owned();
                    self.bury(receipt, slot.message, DeadReason::AttemptsExhausted, *attempts, why).await
                }
                Some(Said { what: What::Reused, .. }) => {
                    let id = DeadLetter::separate_id(&self.consumer, receipt.id, &digest(slot.message));
                    let beside = Receipt { id, digest: None };
                    let why = "another message has the same identity".to_owned();
                    self.bury(&beside, slot.message, DeadReason::IdentityReused, 0, why).await
                }
                said => said.and_then(known).unwrap_or(ProcessOutcome::NotBegun),
            },
            Known::Failed(failure) => self.failed(receipt, slot.message, failure, *cut).await,
            // Of a message by itself what was committed is its effect, as its handler wanted it.
            Known::Torn(..) => ProcessOutcome::Duplicate,
            Known::Away(error) => ProcessOutcome::Unavailable(error),
        }
    }

    /// After the transaction was rolled back.
    async fn failed(
        &self,
        receipt: &Receipt,
        message: &Message,
        failure: HandlerError,
        cut: Option<Instant>,
    ) -> ProcessOutcome {
        if failure.error().is::<StreamBusy>() {
            // The broker may give it to another process next, which must not take it for one that was cut off.
            if self.counts_crashes && may_be_known(message) {
                self.receipts.not_begun(&[receipt.id]).await;
            }
            return ProcessOutcome::InFlight { retry_after: ASK_AGAIN };
        }
        let mut pause = Backoff::new(Duration::from_millis(5), Duration::from_millis(250));
        let counted = loop {
            match self.receipts.failed(receipt.id).await {
                Ok(Said { what: What::InFlight, .. }) if is_ahead(cut) => pause.sleep(cut).await,
                Ok(counted) => break counted,
                Err(error) => return ProcessOutcome::Unavailable(error),
            }
        };
        let attempts = counted.attempts;
        let reason = match failure {
            _ if counted.what != What::Failed => {
                return known(&counted).unwrap_or(ProcessOutcome::InFlight { retry_after: ASK_AGAIN });
            }
            HandlerError::Reject(_) => DeadReason::Rejected,
            _ if attempts >= self.max_attempts => DeadReason::AttemptsExhausted,
            failure => return ProcessOutcome::Failed { attempts, failure },
        };
        self.bury(receipt, message, reason, attempts, failure.to_error_text()).await
    }

    /// Messages whose receipts were committed by a handler, perhaps without their effects. Their receipts say so from here
    /// on, so that whoever takes a letter out has its message processed. Those of which it is not so are left open: the
    /// transaction was not committed in the end, or another one had its number, after a crash of the server.
    async fn torn(
        &self,
        slots: &mut [Slot<'_>],
        batch: &[usize],
        said: Vec<Said>,
        transaction: Transaction,
    ) -> Result<(), StoreError> {
        // Given back they would count as processed, and there would be no letters: so it is tried as long as it may take.
        let until = Instant::now() + self.receipts.patience;
        let (mut written, mut unwritten) = (0, 0);
        let mut out_of_reach = None;
        for (at, said) in batch.iter().zip(said) {
            let Some(slot) = slots.get_mut(*at) else { continue };
            let (Ok(receipt), None) = (&slot.receipt, known(&said)) else {
                slot.handled = known(&said);
                continue;
            };
            // What is out of reach is not tried for each of the others.
            if out_of_reach.is_some() {
                unwritten += 1;
                continue;
            }
            let handled = self.torn_one(receipt, slot.message, said.attempts, transaction, until).await;
            match handled {
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
            if let Some(ProcessOutcome::Unavailable(error)) = handled {
                out_of_reach = Some(error);
            } else {
                slot.handled = handled;
            }
        }
        if written + unwritten > 0 {
            tracing::error!(
                written,
                unwritten,
                "a handler may have ended the transaction of a batch of messages by itself; those whose letters could not be \
                 written may count as processed"
            );
        }
        out_of_reach.map_or(Ok(()), Err)
    }

    async fn torn_one(
        &self,
        receipt: &Receipt,
        message: &Message,
        attempts: u32,
        transaction: Transaction,
        until: Instant,
    ) -> Option<ProcessOutcome> {
        let why = "a handler ended the transaction of the batch by a statement of its own; the receipt is there, and \
             perhaps the effect is not";
        let letter = self.letter(receipt, message, DeadReason::OutcomeUnknown, attempts, why.to_owned());
        let mut pause = Backoff::new(Duration::from_millis(5), Duration::from_millis(250));
        loop {
            let handled = match self.receipts.dead(receipt, &letter, Some(transaction.at)).await {
                Ok(Said { what: What::Open, .. }) => return None,
                said => buried(said, &letter),
            };
            let is_again =
                matches!(handled, ProcessOutcome::InFlight { .. } | ProcessOutcome::Unavailable(_));
            if !is_again || !is_ahead(Some(until)) {
                return Some(handled);
            }
            pause.sleep(Some(until)).await;
        }
    }

    /// Gives a message up.
    async fn bury(
        &self,
        receipt: &Receipt,
        message: &Message,
        reason: DeadReason,
        attempts: u32,
        error: String,
    ) -> ProcessOutcome {
        let letter = self.letter(receipt, message, reason, attempts, error);
        buried(self.receipts.dead(receipt, &letter, None).await, &letter)
    }

    fn letter(
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

    /// Runs the transaction as often as it is worth, and finds out what became of a COMMIT whose answer was lost: the next
    /// try is told so. A message is in flight as long as the old transaction is open, and processed or new after it. The same
    /// where a transaction was cut off in its handler, whose end is waited for.
    async fn until_known<W: Work>(&self, slots: &[&Slot<'_>], work: &W, cut: &mut Option<Instant>) -> Known {
        let is_alone = slots.len() == 1;
        let mut runs_left = self.runs;
        let mut was_cut = false;
        // What may have been committed, and until when that is looked for.
        let mut sent: Option<(Vec<Said>, Instant)> = None;
        let mut pause = Backoff::new(Duration::from_millis(5), Duration::from_millis(250));
        loop {
            let tried = self.try_once(slots, work).await;
            let is_looking = sent.as_ref().is_some_and(|(_, until)| Instant::now() < *until);
            match tried {
                Tried::Committed(said) => return Known::Committed(ours(said, sent.as_ref())),
                Tried::NotRun(said) => {
                    let is_open = said.iter().any(|said| said.what == What::InFlight);
                    if !(is_open && (is_looking || is_ahead(*cut))) {
                        // All of it was committed by the transaction that was lost sight of, or by somebody else.
                        let is_settled =
                            said.iter().all(|said| matches!(said.what, What::Processed | What::Dead(_)));
                        return match &sent {
                            Some(_) if is_settled => Known::Committed(ours(said, sent.as_ref())),
                            _ => Known::NotRun(said),
                        };
                    }
                }
                Tried::Away(_) if is_looking => {}
                Tried::Away(error) => return Known::Away(error),
                Tried::Torn(said, transaction) => return Known::Torn(said, transaction),
                Tried::Again(error) if !is_alone || runs_left <= 1 => {
                    return Known::Failed(HandlerError::retry(error));
                }
                Tried::Again(_) => runs_left -= 1,
                Tried::Failed(failure) => {
                    let error = failure.error();
                    if is_lost_in(error) {
                        *cut = Some(Instant::now() + LETTING_GO);
                    }
                    let is_again = is_alone && runs_left > 1 && is_conflict_in(error);
                    let is_cut = is_alone && !was_cut && is_lost_in(error);
                    if !is_again && !is_cut {
                        return Known::Failed(failure);
                    }
                    was_cut |= is_cut;
                    runs_left -= u32::from(is_again);
                }
                Tried::Lost(said) => {
                    tracing::warn!("the answer to COMMIT was lost; finding out what became of it");
                    if runs_left <= 1 {
                        return Known::Away(StoreError::unavailable(
                            "the connection to PostgreSQL ended during COMMIT, again and again",
                        ));
                    }
                    runs_left -= 1;
                    sent = Some((said, Instant::now() + self.receipts.patience));
                    continue;
                }
            }
            pause.sleep(sent.as_ref().map(|(_, until)| *until)).await;
        }
    }

    async fn try_once<W: Work>(&self, slots: &[&Slot<'_>], work: &W) -> Tried {
        let patience = self.receipts.patience;
        let mut held = match TransactionConnection::acquire(&self.receipts.pool).await {
            Ok(held) => held,
            Err(error) => return Tried::Away(error.into()),
        };
        let mut open = match held.begin(begin(self.isolation), patience).await {
            Ok(open) => open,
            Err(error) => return Tried::Away(error.into()),
        };
        let mut taken = None;
        let tried = self.run_on(&mut open, slots, work, &mut taken).await;
        let said = match tried {
            Ok(said) => said,
            Err(tried) => {
                open.rollback(patience).await;
                // Of a batch the receipts of all are in danger where a handler commits.
                if let (Some((said, transaction)), true) = (taken, slots.len() > 1)
                    && self.receipts.may_be_committed(held, transaction).await
                {
                    return Tried::Torn(said, transaction);
                }
                return tried;
            }
        };
        let tried = match open.commit(patience).await {
            Ok(()) => return Tried::Committed(said),
            Err(StatementError::Refused(error)) if is_conflict(&error) => Tried::Again(store_error(&error)),
            // Such as a constraint that is checked at the end.
            Err(StatementError::Refused(error)) if is_rolled_back(&error) || is_refusal(&error) => {
                Tried::Failed(HandlerError::unsure(error))
            }
            Err(_) => return Tried::Lost(said),
        };
        // The server says so before it lets go of what the transaction had; the next answer comes after that.
        let is_over = held.statement(patience, async |connection| connection.ping().await).await.is_ok();
        match tried {
            Tried::Failed(failure) if !is_over && !is_rolled_back_in(&failure) => Tried::Lost(said),
            tried => tried,
        }
    }

    /// Takes the messages, and runs what is new; it may be committed then.
    async fn run_on<W: Work>(
        &self,
        open: &mut OpenTransaction<'_>,
        slots: &[&Slot<'_>],
        work: &W,
        taken: &mut Option<(Vec<Said>, Transaction)>,
    ) -> Result<Vec<Said>, Tried> {
        let receipts: Vec<Receipt> = slots.iter().filter_map(|slot| slot.receipt.clone().ok()).collect();
        let (said, transaction) = match self.receipts.receive(open, &receipts).await {
            Err(StatementError::Refused(error)) if slots.len() > 1 && has_code(&error, TOO_MANY_LOCKS) => {
                return Err(Tried::Again(store_error(&error)));
            }
            received => received.map_err(without_run)?,
        };
        let is_new = |said: &Said| said.what == What::Process;
        if !said.iter().any(is_new) || !self.may_run(slots, &said) {
            return Err(Tried::NotRun(said));
        }
        *taken = transaction.map(|transaction| (said.clone(), transaction));
        let new: Vec<&Message> =
            slots.iter().zip(&said).filter(|(_, said)| is_new(said)).map(|(slot, _)| slot.message).collect();
        match catch_panic(work.run(open.connection(), &new)).await {
            Ok(Ok(())) => {}
            Ok(Err(failure)) => return Err(Tried::Failed(failure)),
            Err(Panicked) => return Err(Tried::Failed(HandlerError::unsure("the handler panicked"))),
        }
        // A COMMIT of a transaction in which a statement had failed says that all is well, and rolls back.
        match self.receipts.is_still(open, transaction).await {
            Ok(true) => Ok(said),
            Ok(false) => Err(Tried::Failed(HandlerError::unsure("the handler ended the transaction itself"))),
            // A statement was refused because one before it had failed.
            Err(StatementError::Refused(error)) if has_code(&error, "25P02") => {
                Err(Tried::Failed(HandlerError::unsure(
                    "a statement of the handler had failed, and the handler passed over its error",
                )))
            }
            Err(StatementError::Refused(error)) if is_conflict(&error) => {
                Err(Tried::Again(store_error(&error)))
            }
            // What its session ended of, or a statement failed of whose answer nobody waited for. It may do so each time.
            Err(StatementError::Refused(error)) => Err(Tried::Failed(HandlerError::unsure(error))),
            Err(StatementError::TimedOut) => Err(Tried::Away(StatementError::TimedOut.into())),
        }
    }

    /// Whether what is new may be run in one transaction: nothing of it is behind a message that somebody else has, or was
    /// tried too often.
    fn may_run(&self, slots: &[&Slot<'_>], said: &[Said]) -> bool {
        let mut waiting = HashSet::new();
        for (slot, said) in slots.iter().zip(said) {
            let key = slot.key();
            match said.what {
                What::Process if said.attempts >= self.max_attempts => return false,
                What::Process if key.is_some_and(|key| waiting.contains(&key)) => return false,
                What::Reused => return false,
                What::InFlight => waiting.extend(key),
                _ => {}
            }
        }
        true
    }
}

/// Whether it may have been delivered before, so that there may be a receipt.
fn may_be_known(message: &Message) -> bool {
    message.is_redelivered && message.deliveries != Some(1)
}

/// Those that may be run in one transaction: none that is to be alone, none that is behind one of these, none twice.
fn together(slots: &[Slot<'_>], behind: &HashSet<OrderKey<'_>>) -> Vec<usize> {
    let mut waiting: HashSet<OrderKey<'_>> = HashSet::new();
    let mut ids = HashSet::new();
    let mut batch = Vec::new();
    for (at, slot) in slots.iter().enumerate() {
        let key = slot.key();
        let is_behind = key.is_some_and(|key| waiting.contains(&key) || behind.contains(&key));
        match &slot.receipt {
            Ok(receipt) if slot.handled.is_none() && !slot.is_alone && !is_behind => {
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

/// What becomes of a message whose like was in the batch before it.
fn twin(earlier: &[Slot<'_>], slot: &Slot<'_>) -> Option<ProcessOutcome> {
    let receipt = slot.receipt.as_ref().ok()?;
    let twin = earlier.iter().find(|earlier| {
        earlier.receipt.as_ref().is_ok_and(|r| r.id == receipt.id && r.digest == receipt.digest)
    })?;
    Some(match twin.handled.as_ref()? {
        ProcessOutcome::Processed { .. } | ProcessOutcome::Duplicate => ProcessOutcome::Duplicate,
        ProcessOutcome::Dead { reason, .. } => ProcessOutcome::Dead { reason: *reason, is_known: true },
        _ => ProcessOutcome::InFlight { retry_after: ASK_AGAIN },
    })
}

fn is_ahead(until: Option<Instant>) -> bool {
    until.is_some_and(|until| Instant::now() < until)
}

/// What is known of a message without running it.
fn known(said: &Said) -> Option<ProcessOutcome> {
    match said.what {
        What::Processed => Some(ProcessOutcome::Duplicate),
        What::Dead(reason) => Some(ProcessOutcome::Dead { reason, is_known: true }),
        What::InFlight => Some(ProcessOutcome::InFlight { retry_after: ASK_AGAIN }),
        What::Process | What::Alone | What::Reused | What::Failed | What::Written | What::Open => None,
    }
}

/// What becomes of a message whose letter was to be written.
fn buried(said: Result<Said, StoreError>, letter: &DeadLetter) -> ProcessOutcome {
    match said {
        Ok(Said { what: What::Written, .. }) => {
            ProcessOutcome::Dead { reason: letter.reason, is_known: false }
        }
        Ok(said) => known(&said).unwrap_or(ProcessOutcome::InFlight { retry_after: ASK_AGAIN }),
        // It holds up its own message alone.
        Err(error) if error.kind() == StoreErrorKind::Invalid => {
            let failure = HandlerError::retry(format!("its dead letter is refused: {}", ErrorChain(&error)));
            ProcessOutcome::Failed { attempts: letter.attempts.max(1), failure }
        }
        Err(error) => ProcessOutcome::Unavailable(error),
    }
}

fn set(
    slots: &mut [Slot<'_>],
    at: &[usize],
    said: Vec<Said>,
    handled: impl Fn(Said) -> Option<ProcessOutcome>,
) {
    for (at, said) in at.iter().zip(said) {
        if let Some(slot) = slots.get_mut(*at) {
            if matches!(said.what, What::Process | What::Alone) {
                slot.attempts = said.attempts;
            }
            slot.is_alone |= matches!(said.what, What::Reused | What::Alone);
            slot.is_to_begin = said.what == What::Alone;
            slot.handled = handled(said);
        }
    }
}

/// Nothing is known of those that are left.
fn away(slots: &mut [Slot<'_>], error: StoreError) {
    let mut error = Some(error);
    for slot in slots.iter_mut().filter(|slot| slot.handled.is_none()) {
        slot.handled = Some(error.take().map_or(ProcessOutcome::NotBegun, ProcessOutcome::Unavailable));
    }
}

/// What was processed by the transaction whose COMMIT was lost was not processed before it.
fn ours(mut said: Vec<Said>, sent: Option<&(Vec<Said>, Instant)>) -> Vec<Said> {
    for (now, then) in said.iter_mut().zip(sent.map_or(&[][..], |(sent, _)| sent)) {
        if now.what == What::Processed && then.what == What::Process {
            *now = then.clone();
        }
    }
    said
}

fn without_run(error: StatementError) -> Tried {
    match error {
        StatementError::Refused(error) if is_conflict(&error) => Tried::Again(store_error(&error)),
        error => Tried::Away(error.into()),
    }
}

/// Whether the server refused a COMMIT and its session goes on, such as where a trigger that was put off raises an error of its
/// own. Nothing rests on it but that this counts as a failure: what was committed all the same is found out by the receipts.
fn is_refusal(error: &sqlx::Error) -> bool {
    let database = error.as_database_error().and_then(|error| error.try_downcast_ref::<PgDatabaseError>());
    // Of 40003 and the class 08 it is said that nobody knows.
    database.is_some_and(|error| {
        error.severity() == PgSeverity::Error && error.code() != "40003" && !error.code().starts_with("08")
    })
}

fn is_rolled_back_in(failure: &HandlerError) -> bool {
    failure.error().downcast_ref::<sqlx::Error>().is_some_and(is_rolled_back)
}

pub(crate) fn digest(message: &Message) -> [u8; 32] {
    *Fingerprint::of_parts("message", &[&message.payload]).digest()
}
