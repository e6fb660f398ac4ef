//! Definite responses, and the error without one.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;
use std::time::SystemTime;

use bytes::Bytes;
use http::Response;

use crate::failure::BoxError;
use crate::verdict::Verdict;

/// The client's report about a definite response. The middleware and the layer put it into the extensions of the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// The meaning of the response.
    pub verdict: Verdict,
    /// The number of attempts of this call.
    pub attempts: u32,
    /// The service marked the response as a replay.
    pub replayed: bool,
}

/// A definite response: the same request under the same key would get no other response, except after
/// [`Verdict::TurnedAway`].
///
/// `Debug` shows neither headers nor body of the response.
#[non_exhaustive]
pub struct DefiniteResponse {
    /// The response of the service.
    pub response: Response<Bytes>,
    /// The meaning of the response.
    pub verdict: Verdict,
    /// The number of attempts of this call.
    pub attempts: u32,
    /// The service marked the response as a replay.
    pub replayed: bool,
}

impl DefiniteResponse {
    /// The body as text. Bytes that are not UTF-8 are replaced.
    #[must_use]
    pub fn text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(self.response.body())
    }
}

/// The intent has no definite response. Check [`SendError::may_have_taken_effect`] first.
///
/// `Display` and `Debug` show neither the key nor the address, and only the status of the response.
pub struct SendError(Box<Inner>);

struct Inner {
    kind: SendErrorKind,
    attempts: u32,
    may_have_taken_effect: bool,
    come_back_at: Option<SystemTime>,
    response: Option<Response<Bytes>>,
    source: Option<BoxError>,
}

/// The reason why there is no definite response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SendErrorKind {
    /// The request may have taken effect, and sending it again gives no certainty: the service reports that
    /// (`outcome-unknown`), or the request has no protection against a second effect. A person must find out.
    Unknown,
    /// The last attempt was refused, or turned away before the operation, while an earlier attempt may have taken effect or may
    /// still run.
    ///
    /// The response was not marked as the response to the key, so it tells nothing about the earlier attempt: many services
    /// refuse a duplicate of a running request with a 4xx of their own. The same intent can be sent again later, or when the
    /// reason is fixed.
    TurnedAway,
    /// The largest number of attempts was reached.
    Attempts,
    /// The deadline has passed, or would pass before the next attempt.
    Deadline,
    /// The [`RetryBudget`](crate::RetryBudget) is empty, because too many retries fail.
    Budget,
    /// The `Retry-After` of the service is longer than the policy allows. See [`SendError::come_back_at`].
    ComeBackLater,
    /// The body is a stream, which cannot be sent again.
    Body,
    /// The key is older than its lifetime, and the request may have been sent.
    KeyLifetime,
    /// The response is larger than the policy allows. [`SendError::response`] has its head.
    ResponseTooLarge,
    /// The request cannot be sent: its address is malformed, or the transport does not support its scheme.
    Unsendable,
    /// The journal could not store the intent, so nothing was sent.
    Journal,
    /// Another process, or another task of this one, is sending the intent now. Nothing was sent by this call.
    InFlight,
    /// The journal has another request or a damaged file under this key, or the intent that this one replaces has no definite
    /// response. Nothing was sent by this call. A person must look at it.
    ///
    /// If no attempt of the other request was processed, [`SendError::may_have_taken_effect`] is `false`: this request needs
    /// another key, or the stored intent must be removed.
    JournalConflict,
    /// The file of the intent in the journal could not be opened, locked or read. Nothing was sent by this call. The same intent
    /// can be sent when that is fixed.
    JournalUnreadable,
    /// The intent may have been sent before with other credentials, and a service that identifies callers by their credential
    /// would execute it again. Nothing was sent by this call.
    ///
    /// It can be sent with its earlier credentials, or with
    /// [`JournalDir::with_other_credentials`](crate::JournalDir::with_other_credentials).
    OtherCredentials,
    /// The intent was done before, and its key is older than its lifetime: sent again, it could take effect once more. Nothing
    /// was sent by this call. The journal does not have the earlier response.
    DoneBefore,
}

impl SendError {
    pub(crate) fn new(kind: SendErrorKind, attempts: u32, may_have_taken_effect: bool) -> Self {
        Self(Box::new(Inner {
            kind,
            attempts,
            may_have_taken_effect,
            come_back_at: None,
            response: None,
            source: None,
        }))
    }

    pub(crate) fn with_response(mut self, response: Option<Response<Bytes>>) -> Self {
        self.0.response = response;
        self
    }

    pub(crate) fn with_source(mut self, source: Option<BoxError>) -> Self {
        self.0.source = source;
        self
    }

    pub(crate) fn with_come_back_at(mut self, at: Option<SystemTime>) -> Self {
        self.0.come_back_at = at;
        self
    }

    /// The reason.
    #[must_use]
    pub fn kind(&self) -> SendErrorKind {
        self.0.kind
    }

    /// `true` if the request may have taken effect. `false` is certain: no attempt was processed, and no earlier attempt is
    /// known.
    #[must_use]
    pub fn may_have_taken_effect(&self) -> bool {
        self.0.may_have_taken_effect
    }

    /// `true` if the same intent, sent again later, can get a definite response. Otherwise a person must find out what happened;
    /// after that the service may have a response under the same key.
    #[must_use]
    pub fn is_resumable(&self) -> bool {
        match self.0.kind {
            SendErrorKind::Attempts
            | SendErrorKind::Deadline
            | SendErrorKind::Budget
            | SendErrorKind::ComeBackLater
            | SendErrorKind::Journal
            | SendErrorKind::InFlight => true,
            SendErrorKind::JournalUnreadable => true, // when its file can be read
            SendErrorKind::OtherCredentials => true,  // with its earlier credentials
            SendErrorKind::TurnedAway => true,        // with other credentials, or another way there
            SendErrorKind::ResponseTooLarge => true,  // with a higher limit
            SendErrorKind::Body => true,              // with the body from its beginning
            SendErrorKind::Unknown
            | SendErrorKind::KeyLifetime
            | SendErrorKind::Unsendable
            | SendErrorKind::JournalConflict
            | SendErrorKind::DoneBefore => false,
        }
    }

    /// The number of attempts of this call.
    #[must_use]
    pub fn attempts(&self) -> u32 {
        self.0.attempts
    }

    /// The earliest time for the next attempt, if the last response had a `Retry-After`.
    #[must_use]
    pub fn come_back_at(&self) -> Option<SystemTime> {
        self.0.come_back_at
    }

    /// The response to the last attempt, if there was one. It is not definite.
    #[must_use]
    pub fn response(&self) -> Option<&Response<Bytes>> {
        self.0.response.as_ref()
    }

    /// Takes the last response out.
    #[must_use]
    pub fn into_response(self) -> Option<Response<Bytes>> {
        self.0.response
    }
}

impl fmt::Display for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &self.0;
        f.write_str(match inner.kind {
            SendErrorKind::Unknown => {
                "it is not known if the request took effect, and sending it again to this address does not tell"
            }
            SendErrorKind::TurnedAway => "refused, while an earlier attempt has no definite response",
            SendErrorKind::Attempts => "no definite response after as many attempts as are allowed",
            SendErrorKind::Deadline => "no definite response within the deadline",
            SendErrorKind::Budget => "no definite response, and too many retries fail to go on",
            SendErrorKind::ComeBackLater => "the Retry-After of the service is longer than the policy allows",
            SendErrorKind::Body => "no definite response, and the body cannot be sent again",
            SendErrorKind::KeyLifetime => "no definite response, and the service may have forgotten the key",
            SendErrorKind::ResponseTooLarge => "the response is larger than the policy allows",
            SendErrorKind::Unsendable => "the request cannot be sent",
            SendErrorKind::Journal => "the journal could not store the intent, so it was not sent",
            SendErrorKind::InFlight => "another process or task is sending it now",
            SendErrorKind::JournalConflict => {
                "the journal has another or a damaged request under this key, so it was not sent"
            }
            SendErrorKind::JournalUnreadable => {
                "the file of this key in the journal cannot be read, so it was not sent"
            }
            SendErrorKind::OtherCredentials => {
                "not sent, because it may have been sent before with other credentials"
            }
            SendErrorKind::DoneBefore => "it was done before, and to send it again could do it once more",
        })?;
        write!(f, " (attempts: {}", inner.attempts)?;
        if let Some(response) = &inner.response {
            write!(f, ", last status: {}", response.status().as_u16())?;
        }
        f.write_str(match inner.kind {
            SendErrorKind::DoneBefore => "; it took effect)",
            _ if inner.may_have_taken_effect => "; it may have taken effect)",
            _ => "; it took no effect)",
        })
    }
}

impl fmt::Debug for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SendError")
            .field("kind", &self.0.kind)
            .field("attempts", &self.0.attempts)
            .field("may_have_taken_effect", &self.0.may_have_taken_effect)
            .field("status", &self.0.response.as_ref().map(Response::status))
            .field("source", &self.0.source)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for DefiniteResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DefiniteResponse")
            .field("status", &self.response.status())
            .field("verdict", &self.verdict)
            .field("attempts", &self.attempts)
            .field("replayed", &self.replayed)
            .finish_non_exhaustive()
    }
}

impl Error for SendError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source.as_deref().map(|error| error as &(dyn Error + 'static))
    }
}
