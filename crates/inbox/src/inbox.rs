//! The inbox on any store: claim, process, settle.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{
    Completion, ErrorChain, FencingToken, Fingerprint, KeyTag, Label, OnAbandoned, RecordId, StoreError,
    StoredResponse,
};
use oncegate_engine::{
    Attempt, ClaimOutcome, ClaimRequest, ConfigError, Engine, LeaseError, PanicError, Permit, Policy,
    SettleOutcome, catch_panic,
};

use crate::dead_letters::{DeadLetter, DeadLetterSink};
use crate::identity::{ConsumerName, Identity, MessageId};
use crate::message::Message;
use crate::outcome::{DeadReason, HandlerError, ProcessOutcome};
use crate::processor::Processor;
use crate::source::{PublishError, SourceInfo};

/// Processes each message once, for effects outside of a shared transaction: calls of services, files, mails.
///
/// Its records are on any store. Clones are cheap. The steps for each message: claim its record; run the handler;
/// record that it is processed; only then report that the broker may forget it. After a crash in the middle:
///
/// - **The consumer crashed while the handler ran**, or lost its store: when its lease ends, another consumer gets the
///   message. Under [`OnAbandoned::Reexecute`] the handler runs again. The effect takes place once if it is made under
///   the [downstream key](Attempt::downstream_key), or in [steps](Attempt::step). Under [`OnAbandoned::Park`] the
///   handler does not run again, and the message becomes a dead letter with an unknown outcome.
/// - **The acknowledgement is lost**: the message is delivered again, and is a duplicate.
///
/// If the effect is rows in a database that also holds the receipts, a transactional inbox is simpler and stronger.
#[derive(Clone)]
pub struct Inbox {
    inner: Arc<Inner>,
}

#[derive(Clone)]
struct Inner {
    engine: Engine,
    consumer: ConsumerName,
    identity: Identity,
    policy: Policy,
    max_attempts: u32,
    compares_payloads: bool,
    label: Label,
    dead: Arc<dyn DeadLetterSink>,
}

/// The default lease: shorter than the redelivery time of brokers.
const LEASE: Duration = Duration::from_secs(10);

/// The default retention of receipts.
const RETENTION: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// The default number of attempts before a message is a dead letter.
///
/// With the default backoff of a [`Consumer`](crate::Consumer) they take about 40 seconds.
pub const DEFAULT_MAX_ATTEMPTS: u32 = 10;

/// The status of a completed record whose message was processed.
const PROCESSED: u16 = 204;

/// The status of a completed record whose message is a dead letter.
const DEAD: u16 = 422;

/// The header of a record with the reason of the dead letter.
const REASON: &str = "oncegate-dead-reason";

/// The header of a record whose dead letter is not written yet: the number of attempts, and the token of the last one.
///
/// The error is the body of the record.
const UNWRITTEN: &str = "oncegate-dead-unwritten";

/// The pause before the next try if another consumer holds a message.
const MIN_RETRY_AFTER: Duration = Duration::from_millis(50);
const MAX_RETRY_AFTER: Duration = Duration::from_secs(5);

impl Inbox {
    /// Creates an inbox for a consumer. `identity` identifies the messages.
    ///
    /// `on_abandoned` decides whether a handler may run again after an attempt with an unknown outcome. `dead` is the
    /// destination of dead letters. A claim lasts 10 seconds and is renewed, receipts are kept for 7 days, and a
    /// message is tried 10 times.
    ///
    /// # Errors
    /// [`ConfigError`] for an invalid [name](ConsumerName::new), and for [`OnAbandoned::Reconcile`], because there is no service
    /// to ask about a message.
    pub fn new(
        engine: Engine,
        consumer: impl TryInto<ConsumerName, Error: Into<ConfigError>>,
        identity: Identity,
        on_abandoned: OnAbandoned,
        dead: impl DeadLetterSink,
    ) -> Result<Self, ConfigError> {
        let consumer = consumer.try_into().map_err(Into::into)?;
        if on_abandoned == OnAbandoned::Reconcile {
            return Err(ConfigError::new(
                "an inbox has no service to ask what happened to a message: choose OnAbandoned::Park or Reexecute",
            ));
        }
        let policy = Policy::default().with_on_abandoned(on_abandoned);
        let policy = policy.with_lease(LEASE).and_then(|policy| policy.with_retention(RETENTION));
        // No waiting: a message in progress elsewhere must not block others. The broker delivers it again.
        let policy = policy.and_then(|policy| policy.with_wait(Duration::ZERO));
        let label = Label::new(Default::default(), &format!("message {consumer}"));
        let inner = Inner {
            engine,
            consumer,
            identity,
            // All values are within their bounds.
            policy: policy.unwrap_or_default(),
            max_attempts: DEFAULT_MAX_ATTEMPTS,
            compares_payloads: false,
            label,
            dead: Arc::new(dead),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    fn with(mut self, change: impl FnOnce(&mut Inner)) -> Self {
        change(Arc::make_mut(&mut self.inner));
        self
    }

    /// Sets the lease of a claim: how long a message waits after its consumer crashed.
    ///
    /// It must be shorter than the redelivery time of the broker.
    ///
    /// # Errors
    /// As [`Policy::with_lease`].
    pub fn with_lease(self, lease: Duration) -> Result<Self, ConfigError> {
        let policy = self.inner.policy.with_lease(lease)?;
        Ok(self.with(|inner| inner.policy = policy))
    }

    /// Sets how long a processed message is remembered.
    ///
    /// It should be longer than the broker keeps messages, and longer than producers send them again.
    ///
    /// # Errors
    /// As [`Policy::with_retention`].
    pub fn with_retention(self, retention: Duration) -> Result<Self, ConfigError> {
        let policy = self.inner.policy.with_retention(retention)?;
        Ok(self.with(|inner| inner.policy = policy))
    }

    /// Sets how many attempts a message gets before it becomes a dead letter; at least 1. Attempts that crashed count.
    ///
    /// # Errors
    /// [`ConfigError`] if it is zero.
    pub fn with_max_attempts(self, attempts: u32) -> Result<Self, ConfigError> {
        let attempts = ConfigError::check("the number of attempts", attempts, 1..=u32::MAX)?;
        Ok(self.with(|inner| inner.max_attempts = attempts))
    }

    /// Compares payloads: a message with a known identity and another payload becomes a dead letter, not a duplicate.
    ///
    /// Its reason is [`DeadReason::IdentityReused`]. Off by default, because some producers serialize a message anew
    /// when they send it again.
    #[must_use]
    pub fn with_payloads_compared(self, compares_payloads: bool) -> Self {
        self.with(|inner| inner.compares_payloads = compares_payloads)
    }

    /// Processes a message, unless it was processed before or another consumer holds it.
    ///
    /// The handler's future runs in place. If this future is dropped, the message can be claimed again when its lease
    /// ends, as after a crash.
    pub async fn process<F, Fut>(&self, message: &Arc<Message>, run: F) -> ProcessOutcome
    where
        F: FnOnce(Attempt, Arc<Message>) -> Fut,
        Fut: Future<Output = Result<(), HandlerError>>,
    {
        let inner = &self.inner;
        let ids = inner.engine.ids();
        let id = match inner.identity.of(message) {
            Ok(id) => id,
            Err(why) => {
                let id = ids.record(MessageId::of_content(message).record_id(&inner.consumer));
                let reason = DeadReason::NoIdentity;
                return inner
                    .dead_letter_separately(id, message, reason, 0, why.to_string(), reason.as_str())
                    .await;
            }
        };
        let (id, key) = (ids.record(id.record_id(&inner.consumer)), ids.key_tag(id.key()));
        match inner.claim(id, key, inner.fingerprint(message)).await {
            Ok(ClaimOutcome::Execute(permit)) => inner.attempt(permit, message, run).await,
            Ok(ClaimOutcome::Replay(response)) => match unwritten_dead_letter(&response) {
                Some((reason, attempts, error, which)) => {
                    inner.dead_letter_separately(id, message, reason, attempts, error, &which).await
                }
                // A newer version of this program wrote this record.
                None if is_unwritten(&response) => ProcessOutcome::InFlight { retry_after: MAX_RETRY_AFTER },
                None => known(&response),
            },
            Ok(ClaimOutcome::Unreplayable) => ProcessOutcome::Duplicate,
            Ok(ClaimOutcome::InProgress { lease_left, .. }) => {
                ProcessOutcome::InFlight { retry_after: lease_left.clamp(MIN_RETRY_AFTER, MAX_RETRY_AFTER) }
            }
            Ok(ClaimOutcome::Unknown) => {
                let why = "an earlier attempt did not end, and may have taken effect".to_owned();
                let reason = DeadReason::OutcomeUnknown;
                inner.dead_letter_separately(id, message, reason, 0, why, reason.as_str()).await
            }
            Ok(ClaimOutcome::Mismatch) => {
                let digest = Fingerprint::of_parts("message", &[&message.payload]);
                let id = ids.record(DeadLetter::separate_id(&inner.consumer, id, digest.digest()));
                let why = "another message has the same identity".to_owned();
                let reason = DeadReason::IdentityReused;
                inner.dead_letter_separately(id, message, reason, 0, why, reason.as_str()).await
            }
            // Other outcomes are for callers who wait for a response. Try again later.
            Ok(_) => ProcessOutcome::InFlight { retry_after: MAX_RETRY_AFTER },
            Err(error) => ProcessOutcome::Unavailable(error),
        }
    }

    /// Creates a processor that handles each message with `run`.
    pub fn processor<F, Fut>(self, run: F) -> InboxProcessor<F>
    where
        F: Fn(Attempt, Arc<Message>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), HandlerError>> + Send,
    {
        InboxProcessor { inbox: self, run }
    }
}

impl Inner {
    fn fingerprint(&self, message: &Message) -> Fingerprint {
        let parts: &[&[u8]] = if self.compares_payloads { &[&message.payload] } else { &[] };
        self.engine.ids().fingerprint(Fingerprint::of_parts("message", parts))
    }

    async fn claim(
        &self,
        id: RecordId,
        key: KeyTag,
        fingerprint: Fingerprint,
    ) -> Result<ClaimOutcome, StoreError> {
        let label = self.label.clone().with_key(key);
        self.engine.claim(ClaimRequest { id, fingerprint, label, policy: self.policy }).await
    }

    async fn attempt<F, Fut>(&self, permit: Permit, message: &Arc<Message>, run: F) -> ProcessOutcome
    where
        F: FnOnce(Attempt, Arc<Message>) -> Fut,
        Fut: Future<Output = Result<(), HandlerError>>,
    {
        let attempt = permit.attempt();
        let attempts = attempt.number();
        if attempts > self.max_attempts {
            let why = "its last attempt did not end".to_owned();
            return self.dead_letter(permit, message, DeadReason::AttemptsExhausted, attempts - 1, why).await;
        }
        // The process may have been suspended for longer than the lease since the claim.
        if let Err(error) = attempt.confirm_lease().await {
            drop(permit.release().await);
            return match error {
                LeaseError::Store(error) => ProcessOutcome::Unavailable(error),
                _ => ProcessOutcome::InFlight { retry_after: MIN_RETRY_AFTER },
            };
        }
        let message_of_run = message.clone();
        let result = catch_panic(async move { run(attempt, message_of_run).await }).await;
        let failure = match result {
            Ok(Ok(())) => {
                return settled(permit.complete(processed()).await, ProcessOutcome::Processed { attempts });
            }
            Ok(Err(failure)) => failure,
            Err(PanicError) => HandlerError::unsure("the handler panicked"),
        };
        // Compensate finished steps before the message is given up.
        let failure = match failure {
            HandlerError::Reject(error) => match permit.attempt().compensate_steps().await {
                Ok(()) => HandlerError::Reject(error),
                Err(why) => {
                    HandlerError::unsure(format!("rejected, but a step is not compensated yet: {why}"))
                }
            },
            failure => failure,
        };
        let text = failure.to_error_text();
        match failure {
            HandlerError::Reject(_) => {
                self.dead_letter(permit, message, DeadReason::Rejected, attempts, text).await
            }
            HandlerError::Unsure(_) if self.policy.on_abandoned() == OnAbandoned::Park => {
                self.park(permit, message, attempts, text).await
            }
            _ if attempts >= self.max_attempts => {
                self.dead_letter(permit, message, DeadReason::AttemptsExhausted, attempts, text).await
            }
            failure => match permit.release().await {
                // After an abandoned attempt the record stays until its lease ends. The message is tried again then.
                SettleOutcome::LeftToLease => ProcessOutcome::Failed { attempts, failure },
                ended => settled(ended, ProcessOutcome::Failed { attempts, failure }),
            },
        }
    }

    /// Gives a message up, and records this after its dead letter is written. Only this attempt writes the dead letter.
    ///
    /// If the dead letter cannot be written, the record notes it. The handler then does not run again, and the reason is
    /// kept.
    async fn dead_letter(
        &self,
        permit: Permit,
        message: &Arc<Message>,
        reason: DeadReason,
        attempts: u32,
        error: String,
    ) -> ProcessOutcome {
        let attempt = permit.attempt();
        match self.write(attempt.record_id(), message, reason, attempts, error.clone()).await {
            Ok(()) => {
                settled(permit.complete(dead(reason)).await, ProcessOutcome::Dead { reason, is_known: false })
            }
            Err(why) => {
                let ended = match unwritten_completion(reason, attempts, attempt.token(), error) {
                    Some(left) => permit.complete(left).await,
                    None => permit.release().await,
                };
                settled(ended, unwritten(why, attempts))
            }
        }
    }

    /// Gives up a message whose effect is unknown. Its record stays unknown, for an operator.
    async fn park(
        &self,
        permit: Permit,
        message: &Arc<Message>,
        attempts: u32,
        error: String,
    ) -> ProcessOutcome {
        let id = permit.attempt().record_id();
        match permit.complete(Completion::Unknown).await {
            SettleOutcome::Done => {}
            SettleOutcome::Deferred(error) => return ProcessOutcome::Unavailable(error),
            _ => return ProcessOutcome::InFlight { retry_after: MIN_RETRY_AFTER },
        }
        let reason = DeadReason::OutcomeUnknown;
        self.dead_letter_separately(id, message, reason, attempts, error, reason.as_str()).await
    }

    /// Gives up a message whose own record cannot be changed: the dead letter gets a separate record.
    ///
    /// `discriminator` separates several dead letters of one message from each other.
    async fn dead_letter_separately(
        &self,
        id: RecordId,
        message: &Arc<Message>,
        reason: DeadReason,
        attempts: u32,
        error: String,
        discriminator: &str,
    ) -> ProcessOutcome {
        let ids = self.engine.ids();
        let dead_letter = ids.record(DeadLetter::separate_id(&self.consumer, id, discriminator.as_bytes()));
        let policy = self.policy.with_on_abandoned(OnAbandoned::Reexecute);
        let fingerprint = ids.fingerprint(Fingerprint::of_parts("dead letter", &[]));
        let request = ClaimRequest { id: dead_letter, fingerprint, label: self.label.clone(), policy };
        match self.engine.claim(request).await {
            Ok(ClaimOutcome::Execute(permit)) => match self.write(id, message, reason, attempts, error).await
            {
                Ok(()) => settled(
                    permit.complete(dead(reason)).await,
                    ProcessOutcome::Dead { reason, is_known: false },
                ),
                Err(error) => {
                    // The number of tries to write the dead letter. The message itself may have no attempt.
                    let tries = permit.attempt().number();
                    drop(permit.release().await);
                    unwritten(error, attempts.max(tries))
                }
            },
            Ok(ClaimOutcome::Replay(_) | ClaimOutcome::Unreplayable) => {
                ProcessOutcome::Dead { reason, is_known: true }
            }
            Ok(ClaimOutcome::InProgress { lease_left, .. }) => {
                ProcessOutcome::InFlight { retry_after: lease_left.clamp(MIN_RETRY_AFTER, MAX_RETRY_AFTER) }
            }
            // An operator has resolved the record of the dead letter. It is not written again.
            Ok(_) => ProcessOutcome::Dead { reason, is_known: true },
            Err(error) => ProcessOutcome::Unavailable(error),
        }
    }

    async fn write(
        &self,
        id: RecordId,
        message: &Arc<Message>,
        reason: DeadReason,
        attempts: u32,
        error: String,
    ) -> Result<(), PublishError> {
        let dead_letter =
            DeadLetter::new(id, self.consumer.clone(), message.clone(), reason, attempts, error);
        // A panic at this dead letter must not stop the consumer: the next one may succeed.
        let written = catch_panic(self.dead.put(&dead_letter)).await;
        written.unwrap_or_else(|PanicError| Err(PublishError::refused("the sink of dead letters panicked")))
    }
}

/// The outcome of a message whose dead letter could not be written: the message is kept.
///
/// A refused dead letter blocks its own message only. If no dead letter can be written at all, the consumer pauses.
fn unwritten(error: PublishError, attempts: u32) -> ProcessOutcome {
    match error {
        PublishError::Refused(error) => {
            let failure = HandlerError::retry(format!("its dead letter is refused: {}", ErrorChain(&*error)));
            ProcessOutcome::Failed { attempts, failure }
        }
        PublishError::Unconfirmed(error) => {
            let error = StoreError::unavailable("a dead letter could not be written").with_source(error);
            ProcessOutcome::Unavailable(error)
        }
    }
}

/// The outcome of a message after its attempt was settled.
fn settled(settled: SettleOutcome, handled: ProcessOutcome) -> ProcessOutcome {
    match settled {
        SettleOutcome::Done => handled,
        SettleOutcome::Deferred(error) => ProcessOutcome::Unavailable(error),
        // Another consumer has the message, because the lease ended.
        _ => ProcessOutcome::InFlight { retry_after: MIN_RETRY_AFTER },
    }
}

fn processed() -> Completion {
    StoredResponse::new(PROCESSED, &[], &[], &[]).map_or(Completion::Tombstone, Completion::Replayable)
}

fn dead(reason: DeadReason) -> Completion {
    let why = [(REASON, reason.as_str().as_bytes())];
    StoredResponse::new(DEAD, &why, &[], &[]).map_or(Completion::Tombstone, Completion::Replayable)
}

/// The completion of a record whose message was given up, and whose dead letter is not written yet.
fn unwritten_completion(
    reason: DeadReason,
    attempts: u32,
    token: FencingToken,
    error: String,
) -> Option<Completion> {
    let left = format!("{attempts} {token}");
    let why = [(REASON, reason.as_str().as_bytes()), (UNWRITTEN, left.as_bytes())];
    StoredResponse::new(DEAD, &why, &[error.into()], &[]).ok().map(Completion::Replayable)
}

/// Reads such a record: the reason, the number of attempts, the error, and the discriminator of the dead letter.
fn unwritten_dead_letter(response: &StoredResponse) -> Option<(DeadReason, u32, String, String)> {
    let header = |wanted: &str| {
        let (_, value) = response.headers().find(|(name, _)| name.eq_ignore_ascii_case(wanted))?;
        std::str::from_utf8(value).ok()
    };
    // The token separates this dead letter from one that is written after the record was deleted and the message came
    // again.
    let (attempts, token) = header(UNWRITTEN)?.split_once(' ')?;
    let reason = DeadReason::from_word(header(REASON)?)?;
    let error = String::from_utf8_lossy(&response.body()).into_owned();
    Some((reason, attempts.parse().ok()?, error, format!("{reason} {token}")))
}

fn is_unwritten(response: &StoredResponse) -> bool {
    response.headers().any(|(name, _)| name.eq_ignore_ascii_case(UNWRITTEN))
}

/// Returns the outcome of a completed record.
fn known(response: &StoredResponse) -> ProcessOutcome {
    if response.status() < 400 {
        return ProcessOutcome::Duplicate;
    }
    let reason = response.headers().find(|(name, _)| name.eq_ignore_ascii_case(REASON));
    let reason = reason.and_then(|(_, value)| DeadReason::from_word(std::str::from_utf8(value).ok()?));
    // An operator may have marked the message as failed.
    ProcessOutcome::Dead { reason: reason.unwrap_or(DeadReason::Rejected), is_known: true }
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox")
            .field("consumer", &self.inner.consumer)
            .field("identity", &self.inner.identity)
            .finish_non_exhaustive()
    }
}

/// An [`Inbox`] with its handler.
pub struct InboxProcessor<F> {
    inbox: Inbox,
    run: F,
}

impl<F, Fut> Processor for InboxProcessor<F>
where
    F: Fn(Attempt, Arc<Message>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), HandlerError>> + Send,
{
    fn consumer(&self) -> &ConsumerName {
        &self.inbox.inner.consumer
    }

    fn retention(&self) -> Duration {
        self.inbox.inner.policy.retention()
    }

    fn check(&self, source: &SourceInfo) -> Result<(), ConfigError> {
        self.inbox.inner.identity.check(source)?;
        let lease = self.inbox.inner.policy.lease();
        match source.redelivery() {
            Some(redelivery) if lease >= redelivery => Err(ConfigError::new(format!(
                "the lease is {lease:?}, and the broker delivers again after {redelivery:?}: make the lease shorter, or \
                 the redelivery time longer"
            ))),
            _ => Ok(()),
        }
    }

    async fn process(&self, messages: &[Arc<Message>]) -> Vec<ProcessOutcome> {
        let mut handled: Vec<ProcessOutcome> = Vec::with_capacity(messages.len());
        for message in messages {
            let is_behind = messages.iter().zip(&handled).any(|(earlier, what)| {
                earlier.order_key.is_some()
                    && (&earlier.topic, &earlier.order_key) == (&message.topic, &message.order_key)
                    && what.settlement(Duration::ZERO) != crate::Settlement::Acknowledge
            });
            handled.push(if is_behind {
                ProcessOutcome::NotBegun
            } else {
                self.inbox.process(message, &self.run).await
            });
        }
        handled
    }
}

impl<F> fmt::Debug for InboxProcessor<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("InboxProcessor").field(&self.inbox).finish()
    }
}
