//! The client: sends intents until there is a definite response.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::HeaderMap;
use http::{Request, Response};
use http_body::Body;
use oncegate_core::{Clock, ErrorChain};

use crate::backoff::Random;
use crate::budget::RetryBudget;
use crate::failure::{AttemptFailure, BoxError};
use crate::intent::{Intent, IntentError};
use crate::journal::{Journal, JournaledIntent};
use crate::key::Carrier;
use crate::policy::{Api, RetryPolicy};
use crate::report::{DefiniteResponse, SendError, SendErrorKind};
use crate::send::{AttemptSender, RequestInfo, RequestRunner, is_repeatable, is_safe};
use crate::verdict::{Protection, Verdict};

/// Sends one request once. The [`Client`] judges the response and decides about retries.
///
/// A transport must not follow redirects, and must not retry by itself.
pub trait Transport: Send + Sync {
    /// The body of a response.
    type Body: Body<Data = Bytes, Error: Into<BoxError>> + Send;

    /// Sends the request, and returns when the head of the response has arrived.
    ///
    /// # Errors
    /// [`AttemptFailure`], which tells if the request may have been processed.
    fn send(
        &self,
        request: Request<Bytes>,
    ) -> impl Future<Output = Result<Response<Self::Body>, AttemptFailure>> + Send;
}

/// Sends each intent under its own key until there is a definite response or the policy ends it.
///
/// Cheap to clone if the transport is. Clones share the retry budget.
#[derive(Clone)]
pub struct Client<T> {
    transport: T,
    carrier: Carrier,
    runner: RequestRunner,
    journal: Option<Arc<dyn Journal>>,
}

impl<T: Transport> Client<T> {
    /// A client with the default policy, for an API that honours `Idempotency-Key`.
    pub fn new(transport: T) -> Self {
        Self {
            transport,
            carrier: Carrier::default(),
            runner: RequestRunner::new(RetryPolicy::default()),
            journal: None,
        }
    }

    /// Sets the limits of retries.
    #[must_use]
    pub fn with_policy(mut self, policy: RetryPolicy) -> Self {
        self.runner.policy = policy;
        self
    }

    /// Sets the header that carries the key.
    #[must_use]
    pub fn with_carrier(self, carrier: Carrier) -> Self {
        Self { carrier, ..self }
    }

    /// Sets a retry budget that other clients of the same service share.
    #[must_use]
    pub fn with_budget(mut self, budget: Arc<RetryBudget>) -> Self {
        self.runner.budget = budget;
        self
    }

    /// Sets the journal that stores intents before they are sent.
    #[must_use]
    pub fn with_journal(self, journal: Arc<dyn Journal>) -> Self {
        Self { journal: Some(journal), ..self }
    }

    /// Replaces the clock of the system for dates and the age of keys. Pauses and deadlines use the clock of tokio.
    #[must_use]
    pub fn with_clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.runner.clock = clock;
        self
    }

    /// Replaces the random bits of the system for the pauses.
    #[must_use]
    pub fn with_random(mut self, random: Arc<dyn Random>) -> Self {
        self.runner.random = random;
        self
    }

    /// Sends the intent until there is a definite response or a reason to stop.
    ///
    /// A response counts only when it was read to its end. If it is larger than
    /// [the limit](RetryPolicy::with_max_response_bytes), the intent ends as [`SendErrorKind::ResponseTooLarge`] with the head of
    /// the response. With a higher limit the same intent gets the response again. Trailers are dropped.
    ///
    /// Dropping the future stops the sending. A request that was already sent may still take effect: mark such an intent with
    /// [`Intent::sent_before`] when you send it again.
    ///
    /// Needs a tokio runtime with its timer.
    ///
    /// # Errors
    /// [`SendError`], which tells if the request may have taken effect.
    pub async fn send(&self, intent: &Intent) -> Result<DefiniteResponse, SendError> {
        let Some(journal) = &self.journal else { return self.send_opened(intent, None).await };
        let intent = self.for_journal(intent);
        match journal.open(&intent).await {
            Ok(opened) => self.send_opened(&intent, Some(opened)).await,
            Err(why) => Err(why.send_error(intent.was_sent_before())),
        }
    }

    /// The intent with carrier and key lifetime, so that a later process sends it with the same protection.
    fn for_journal(&self, intent: &Intent) -> Intent {
        let lifetime = match self.runner.policy.api {
            // The API ignores keys, so no key is valid for any time.
            Api::Plain => Duration::ZERO,
            Api::Idempotent => self.runner.policy.key_lifetime,
        };
        let lifetime = intent.key_lifetime().map_or(lifetime, |shorter| shorter.min(lifetime));
        let carrier = intent.carrier().unwrap_or(&self.carrier).clone();
        intent.clone().with_key_lifetime(lifetime).with_carrier(carrier)
    }

    /// Sends an intent that is open in the journal, if there is a journal.
    pub(crate) async fn send_opened(
        &self,
        intent: &Intent,
        opened: Option<JournaledIntent>,
    ) -> Result<DefiniteResponse, SendError> {
        let sent = self.send_until(intent, opened.as_ref()).await;
        let noted = match (&sent, opened) {
            // It can be sent under the same key when the reason is fixed.
            (Ok(outcome), Some(opened))
                if outcome.verdict == Verdict::TurnedAway && !is_safe(intent.method()) =>
            {
                opened.entry.never_sent().await
            }
            (Ok(outcome), Some(opened)) => opened.entry.close(outcome).await,
            (Err(open), Some(opened)) if !open.may_have_taken_effect() => opened.entry.never_sent().await,
            _ => Ok(()),
        };
        if let Err(error) = noted {
            // The result counts anyway. After a restart the intent is sent once more, and replayed.
            tracing::warn!(error = %ErrorChain(&*error), "the journal could not note how the sending of an intent ended");
        }
        sent
    }

    async fn send_until(
        &self,
        intent: &Intent,
        opened: Option<&JournaledIntent>,
    ) -> Result<DefiniteResponse, SendError> {
        let protection = match self.runner.policy.api {
            _ if is_safe(intent.method()) => Protection::Safe,
            Api::Idempotent => Protection::Keyed,
            _ if is_repeatable(intent.method()) => Protection::Repeatable,
            _ => Protection::Once,
        };
        let ask = RequestInfo {
            method: intent.method().clone(),
            protection,
            sent_before: intent.was_sent_before() || opened.is_some_and(|opened| opened.sent_before),
            created_at: opened.and_then(|opened| opened.created_at).or(Some(intent.created_at())),
            key_lifetime: [intent.key_lifetime(), opened.and_then(|opened| opened.key_lifetime)]
                .into_iter()
                .flatten()
                .min(),
            done_before: opened.is_some_and(|opened| opened.done_before),
        };
        if ask.protection == Protection::Once && ask.sent_before {
            let why = if ask.done_before { SendErrorKind::DoneBefore } else { SendErrorKind::Unknown };
            return Err(SendError::new(why, 0, true));
        }
        let headers = self.headers(intent, protection).map_err(|error| {
            SendError::new(SendErrorKind::Unsendable, 0, ask.sent_before).with_source(Some(error.into()))
        })?;
        let mut tries = IntentSender { transport: &self.transport, intent, headers };
        let (response, report) = self.runner.run(&ask, &mut tries).await?;
        let Some(whole) = response.body().whole().cloned() else {
            let head = response.map(|_| Bytes::new());
            return Err(SendError::new(SendErrorKind::ResponseTooLarge, report.attempts, true)
                .with_response(Some(head)));
        };
        Ok(DefiniteResponse {
            response: response.map(|_| whole),
            verdict: report.verdict,
            attempts: report.attempts,
            replayed: report.replayed,
        })
    }

    fn headers(&self, intent: &Intent, protection: Protection) -> Result<HeaderMap, IntentError> {
        let carrier = intent.carrier().unwrap_or(&self.carrier);
        let mut headers = intent.headers().clone();
        headers.remove(carrier.name());
        if protection == Protection::Keyed {
            headers.insert(carrier.name().clone(), carrier.value(intent.key())?);
        }
        Ok(headers)
    }
}

struct IntentSender<'a, T> {
    transport: &'a T,
    intent: &'a Intent,
    headers: HeaderMap,
}

impl<T: Transport> AttemptSender for IntentSender<'_, T> {
    type Body = T::Body;

    async fn send(&mut self) -> Result<Response<T::Body>, AttemptFailure> {
        let mut request = Request::new(self.intent.body().clone());
        *request.method_mut() = self.intent.method().clone();
        *request.uri_mut() = self.intent.uri().clone();
        *request.headers_mut() = self.headers.clone();
        self.transport.send(request).await
    }

    fn can_send_again(&self) -> bool {
        true
    }
}

impl<T> fmt::Debug for Client<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("carrier", &self.carrier)
            .field("policy", &self.runner.policy)
            .finish_non_exhaustive()
    }
}
