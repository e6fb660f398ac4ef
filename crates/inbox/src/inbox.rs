//! Claim, process, settle, on any store.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{
    Completion, ErrorChain, FencingToken, Fingerprint, KeyTag, Label, OnAbandoned, RecordId, StoreError,
    StoredResponse,
};
use oncegate_engine::{
    Attempt, ClaimOutcome, ClaimRequest, ConfigError, Engine, LeaseError, Panicked, Permit, Policy, Settled,
    catch_panic,
};

use crate::dead_letters::{DeadLetter, DeadLetterSink};
use crate::identity::{ConsumerName, Identity, MessageId};
use crate::message::Message;
use crate::outcome::{DeadReason, HandlerError, ProcessOutcome};
use crate::processor::Processor;
use crate::source::{PublishError, SourceInfo};

/// Processes each message once, for effects that are not in a transaction with the inbox: calls of other services, files,
/// mails. Records are on any store. Cheap to clone.
///
/// For each message: claim its record; run the handler; write down that it is processed; only then say that the broker may
/// forget it. What happens when that is cut in two:
///
/// - **The consumer died in the middle**, or lost its store: when its lease is over the message is somebody else's. Under
///   [`OnAbandoned::Reexecute`] its handler runs again, and its effect takes place once if it is made under the
///   [downstream key](Attempt::downstream_key), or in [steps](Attempt::step). Under [`OnAbandoned::Park`] the handler does not
///   run again, and the message is a dead letter whose outcome is unknown.
/// - **The acknowledgement is lost**: the message comes again, and is a duplicate.
///
/// Nothing of this knows what the effect is; where it is rows in PostgreSQL, a transactional inbox is simpler and stronger.
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

/// How long a claim lasts unless told otherwise: less than brokers wait before they deliver again.
const LEASE: Duration = Duration::from_secs(10);

/// How long is remembered that a message was processed, unless told otherwise.
const RETENTION: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// The default number of attempts before a message is a dead letter.
///
/// With the default backoff of a [`Consumer`](crate::Consumer) they take about 40 seconds.
pub const DEFAULT_MAX_ATTEMPTS: u32 = 10;

/// What a record is completed with whose message was processed.
const PROCESSED: u16 = 204;

/// What a record is completed with whose message is a dead letter.
const DEAD: u16 = 422;

/// Where such a record says why.
const REASON: &str = "oncegate-dead-reason";

/// Where such a record says, for as long as its letter was not written, how many attempts there were, and which one was the
/// last. The error is its body.
const UNWRITTEN: &str = "oncegate-dead-unwritten";

/// When to ask again after a message that somebody else is processing.
const ASK_FIRST: Duration = Duration::from_millis(50);
const ASK_LAST: Duration = Duration::from_secs(5);

impl Inbox {
    /// An inbox of this consumer, whose messages are told apart by `identity`. `on_abandoned` says whether a handler may run
    /// again where nobody knows how far it came; `dead` is where messages go that are given up.
    ///
    /// A claim lasts 10 seconds and is renewed; receipts are kept for 7 days; a message is tried 10 times.
    #[must_use]
    pub fn new(
        engine: Engine,
        consumer: ConsumerName,
        identity: Identity,
        on_abandoned: OnAbandoned,
        dead: impl DeadLetterSink,
    ) -> Self {
        let policy = Policy::default().with_on_abandoned(on_abandoned);
        let policy = policy.with_lease(LEASE).and_then(|policy| policy.with_retention(RETENTION));
        // A message that is in progress elsewhere holds up no lane: the broker delivers it again.
        let policy = policy.and_then(|policy| policy.with_wait(Duration::ZERO));
        let label = Label::new(Default::default(), &format!("message {consumer}"));
        let inner = Inner {
            engine,
            consumer,
            identity,
            // All are within their bounds.
            policy: policy.unwrap_or_default(),
            max_attempts: DEFAULT_MAX_ATTEMPTS,
            compares_payloads: false,
            label,
            dead: Arc::new(dead),
        };
        Self { inner: Arc::new(inner) }
    }

    fn with(mut self, change: impl FnOnce(&mut Inner)) -> Self {
        change(Arc::make_mut(&mut self.inner));
        self
    }

    /// How long a claim lasts without being renewed: how long a message waits after its consumer died. It must be shorter than
    /// the time after which the broker delivers again.
    ///
    /// # Errors
    /// As [`Policy::with_lease`].
    pub fn with_lease(self, lease: Duration) -> Result<Self, ConfigError> {
        let policy = self.inner.policy.with_lease(lease)?;
        Ok(self.with(|inner| inner.policy = policy))
    }

    /// How long is remembered that a message was processed. It should be longer than the broker keeps messages, and than
    /// producers send them again.
    ///
    /// # Errors
    /// As [`Policy::with_retention`].
    pub fn with_retention(self, retention: Duration) -> Result<Self, ConfigError> {
        let policy = self.inner.policy.with_retention(retention)?;
        Ok(self.with(|inner| inner.policy = policy))
    }

    /// How often a message is tried before it is a dead letter, from 1. Attempts that died count.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_max_attempts(self, attempts: u32) -> Result<Self, ConfigError> {
        let attempts = ConfigError::check("the number of attempts", attempts, 1..=u32::MAX)?;
        Ok(self.with(|inner| inner.max_attempts = attempts))
    }

    /// Whether a message with the identity of another one, and another payload, is a dead letter
    /// ([`DeadReason::IdentityReused`]) instead of a duplicate. Off by default, because some producers write a
    /// message anew when they send it again.
    #[must_use]
    pub fn with_payloads_compared(self, compares_payloads: bool) -> Self {
        self.with(|inner| inner.compares_payloads = compares_payloads)
    }

    /// Processes a message, if nobody has and nobody is at it. The handler's future runs in place: dropping this leaves the
    /// message to the time after the lease, as if the consumer had died.
    pub async fn process<F, Fut>(&self, message: &Arc<Message>, run: F) -> ProcessOutcome
    where
        F: FnOnce(Attempt, Arc<Message>) -> Fut,
        Fut: Future<Output = Result<(), HandlerError>>,
    {
        let inner = &self.inner;
        let id = match inner.identity.of(message) {
            Ok(id) => id,
            Err(why) => {
                let id = MessageId::of_content(message).record_id(&inner.consumer);
                let reason = DeadReason::NoIdentity;
                return inner.bury_beside(id, message, reason, 0, why.to_string(), reason.as_str()).await;
            }
        };
        let (id, key) = (id.record_id(&inner.consumer), KeyTag::of(id.key()));
        match inner.claim(id, key, inner.fingerprint(message)).await {
            Ok(ClaimOutcome::Execute(permit)) => inner.attempt(permit, message, run).await,
            Ok(ClaimOutcome::Replay(response)) => match unwritten_letter(&response) {
                Some((reason, attempts, error, which)) => {
                    inner.bury_beside(id, message, reason, attempts, error, &which).await
                }
                // Written by somebody who knows more than this one.
                None if is_unwritten(&response) => ProcessOutcome::InFlight { retry_after: ASK_LAST },
                None => known(&response),
            },
            Ok(ClaimOutcome::Unreplayable) => ProcessOutcome::Duplicate,
            Ok(ClaimOutcome::InProgress { lease_left, .. }) => {
                ProcessOutcome::InFlight { retry_after: lease_left.clamp(ASK_FIRST, ASK_LAST) }
            }
            Ok(ClaimOutcome::Unknown) => {
                let why = "an earlier attempt did not end, and may have taken effect".to_owned();
                let reason = DeadReason::OutcomeUnknown;
                inner.bury_beside(id, message, reason, 0, why, reason.as_str()).await
            }
            Ok(ClaimOutcome::Mismatch) => {
                let digest = Fingerprint::of_parts("message", &[&message.payload]);
                let id = DeadLetter::separate_id(&inner.consumer, id, digest.digest());
                let why = "another message has the same identity".to_owned();
                let reason = DeadReason::IdentityReused;
                inner.bury_beside(id, message, reason, 0, why, reason.as_str()).await
            }
            // Nobody asks for answers here; what is not known is asked again.
            Ok(_) => ProcessOutcome::InFlight { retry_after: ASK_LAST },
            Err(error) => ProcessOutcome::Unavailable(error),
        }
    }

    /// A processor that handles each message with `run`.
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
        Fingerprint::of_parts("message", parts)
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
            return self.bury(permit, message, DeadReason::AttemptsExhausted, attempts - 1, why).await;
        }
        // Between the claim and this the process may have been stopped for longer than the lease.
        if let Err(error) = attempt.confirm_lease().await {
            drop(permit.release().await);
            return match error {
                LeaseError::Store(error) => ProcessOutcome::Unavailable(error),
                _ => ProcessOutcome::InFlight { retry_after: ASK_FIRST },
            };
        }
        let message_of_run = message.clone();
        let result = catch_panic(async move { run(attempt, message_of_run).await }).await;
        let failure = match result {
            Ok(Ok(())) => {
                return settled(permit.complete(processed()).await, ProcessOutcome::Processed { attempts });
            }
            Ok(Err(failure)) => failure,
            Err(Panicked) => HandlerError::unsure("the handler panicked"),
        };
        // What its steps finished is taken back before the message is given up.
        let failure = match failure {
            HandlerError::Reject(error) => match permit.attempt().take_back().await {
                Ok(()) => HandlerError::Reject(error),
                Err(why) => {
                    HandlerError::unsure(format!("rejected, and a step is not taken back yet: {why}"))
                }
            },
            failure => failure,
        };
        let text = failure.to_error_text();
        match failure {
            HandlerError::Reject(_) => self.bury(permit, message, DeadReason::Rejected, attempts, text).await,
            HandlerError::Unsure(_) if self.policy.on_abandoned() == OnAbandoned::Park => {
                self.park(permit, message, attempts, text).await
            }
            _ if attempts >= self.max_attempts => {
                self.bury(permit, message, DeadReason::AttemptsExhausted, attempts, text).await
            }
            failure => match permit.release().await {
                // An attempt after one that was cut off leaves its record to its lease; it is tried again then.
                Settled::Left => ProcessOutcome::Failed { attempts, failure },
                ended => settled(ended, ProcessOutcome::Failed { attempts, failure }),
            },
        }
    }

    /// Gives a message up. Its own record says so after the letter is written, and only this attempt writes it. Where it
    /// cannot be written the record says what is still to be written, so that nothing runs again, and the reason stays.
    async fn bury(
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
                let ended = match dead_without_letter(reason, attempts, attempt.token(), error) {
                    Some(left) => permit.complete(left).await,
                    None => permit.release().await,
                };
                settled(ended, unwritten(why, attempts))
            }
        }
    }

    /// Gives a message up of which nobody knows whether it took effect. Its record stays unknown, for an operator.
    async fn park(
        &self,
        permit: Permit,
        message: &Arc<Message>,
        attempts: u32,
        error: String,
    ) -> ProcessOutcome {
        let id = permit.attempt().record_id();
        match permit.complete(Completion::Unknown).await {
            Settled::Done => {}
            Settled::Deferred(error) => return ProcessOutcome::Unavailable(error),
            _ => return ProcessOutcome::InFlight { retry_after: ASK_FIRST },
        }
        let reason = DeadReason::OutcomeUnknown;
        self.bury_beside(id, message, reason, attempts, error, reason.as_str()).await
    }

    /// Gives a message up whose own record cannot say so: a record of the letter does. `which` tells letters of one message
    /// apart.
    async fn bury_beside(
        &self,
        id: RecordId,
        message: &Arc<Message>,
        reason: DeadReason,
        attempts: u32,
        error: String,
        which: &str,
    ) -> ProcessOutcome {
        let letter = DeadLetter::separate_id(&self.consumer, id, which.as_bytes());
        let policy = self.policy.with_on_abandoned(OnAbandoned::Reexecute);
        let fingerprint = Fingerprint::of_parts("dead letter", &[]);
        let request = ClaimRequest { id: letter, fingerprint, label: self.label.clone(), policy };
        match self.engine.claim(request).await {
            Ok(ClaimOutcome::Execute(permit)) => match self.write(id, message, reason, attempts, error).await
            {
                Ok(()) => settled(
                    permit.complete(dead(reason)).await,
                    ProcessOutcome::Dead { reason, is_known: false },
                ),
                Err(error) => {
                    // How often that was tried; its own attempts may be none.
                    let tries = permit.attempt().number();
                    drop(permit.release().await);
                    unwritten(error, attempts.max(tries))
                }
            },
            Ok(ClaimOutcome::Replay(_) | ClaimOutcome::Unreplayable) => {
                ProcessOutcome::Dead { reason, is_known: true }
            }
            Ok(ClaimOutcome::InProgress { lease_left, .. }) => {
                ProcessOutcome::InFlight { retry_after: lease_left.clamp(ASK_FIRST, ASK_LAST) }
            }
            // An operator's word on a letter: it is not written again.
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
        let letter = DeadLetter::new(id, self.consumer.clone(), message.clone(), reason, attempts, error);
        // What panics at this letter may take the next one.
        let written = catch_panic(self.dead.put(&letter)).await;
        written.unwrap_or_else(|Panicked| Err(PublishError::refused("what writes it panicked")))
    }
}

/// What becomes of a delivery whose dead letter could not be written: it is kept. A letter that is refused holds up its own
/// message alone; where letters cannot be written at all, there is nothing to be gained by going on.
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

/// What becomes of a delivery whose attempt ended so.
fn settled(settled: Settled, handled: ProcessOutcome) -> ProcessOutcome {
    match settled {
        Settled::Done => handled,
        Settled::Deferred(error) => ProcessOutcome::Unavailable(error),
        // Somebody else is at it, because our lease ended.
        _ => ProcessOutcome::InFlight { retry_after: ASK_FIRST },
    }
}

fn processed() -> Completion {
    StoredResponse::new(PROCESSED, &[], &[], &[]).map_or(Completion::Tombstone, Completion::Replayable)
}

fn dead(reason: DeadReason) -> Completion {
    let why = [(REASON, reason.as_str().as_bytes())];
    StoredResponse::new(DEAD, &why, &[], &[]).map_or(Completion::Tombstone, Completion::Replayable)
}

/// What the record of a message is completed with that is given up, and whose letter is still to be written.
fn dead_without_letter(
    reason: DeadReason,
    attempts: u32,
    token: FencingToken,
    error: String,
) -> Option<Completion> {
    let left = format!("{attempts} {token}");
    let why = [(REASON, reason.as_str().as_bytes()), (UNWRITTEN, left.as_bytes())];
    StoredResponse::new(DEAD, &why, &[error.into()], &[]).ok().map(Completion::Replayable)
}

/// What such a record says: why, after how many attempts, of what error, and which letter it is.
fn unwritten_letter(response: &StoredResponse) -> Option<(DeadReason, u32, String, String)> {
    let header = |wanted: &str| {
        let (_, value) = response.headers().find(|(name, _)| name.eq_ignore_ascii_case(wanted))?;
        std::str::from_utf8(value).ok()
    };
    // A message that comes again under the same identity, when its record was deleted, may have a letter again.
    let (attempts, token) = header(UNWRITTEN)?.split_once(' ')?;
    let reason = DeadReason::from_word(header(REASON)?)?;
    let error = String::from_utf8_lossy(&response.body()).into_owned();
    Some((reason, attempts.parse().ok()?, error, format!("{reason} {token}")))
}

fn is_unwritten(response: &StoredResponse) -> bool {
    response.headers().any(|(name, _)| name.eq_ignore_ascii_case(UNWRITTEN))
}

/// What a completed record says of its message.
fn known(response: &StoredResponse) -> ProcessOutcome {
    if response.status() < 400 {
        return ProcessOutcome::Duplicate;
    }
    let reason = response.headers().find(|(name, _)| name.eq_ignore_ascii_case(REASON));
    let reason = reason.and_then(|(_, value)| DeadReason::from_word(std::str::from_utf8(value).ok()?));
    // An operator may have said that it failed.
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
                "a claim lasts {lease:?}, and the broker delivers again after {redelivery:?}: make the lease shorter, \
                 or that time longer"
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
