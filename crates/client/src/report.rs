//! How it ended.

use std::error::Error;
use std::fmt;
use std::time::SystemTime;

use bytes::Bytes;
use http::Response;

use crate::failure::BoxError;
use crate::verdict::Verdict;

/// What is known of a definite answer, beside the answer. The middleware and the layer put it into the extensions of the
/// response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// What the answer says.
    pub verdict: Verdict,
    /// How often the request was sent, by this call.
    pub attempts: u32,
    /// Whether the service marked the answer as one that it had given before.
    pub replayed: bool,
}

/// A definite answer: whatever the verdict, sending the same request under the same key again would bring nothing else.
///
/// `Debug` shows neither fields nor body of the response.
#[non_exhaustive]
pub struct Answer {
    /// The service's answer, as it came.
    pub response: Response<Bytes>,
    /// What it says.
    pub verdict: Verdict,
    /// How often the request was sent, by this call.
    pub attempts: u32,
    /// Whether the service marked the answer as one that it had given before.
    pub replayed: bool,
}

/// There is no definite answer. [`SendError::may_have_taken_effect`] is the first thing to look at.
///
/// Neither `Display` nor `Debug` hold the key, the address, or more of the answer than its status.
pub struct SendError(Box<Inner>);

struct Inner {
    kind: SendErrorKind,
    attempts: u32,
    may_have_taken_effect: bool,
    come_back_at: Option<SystemTime>,
    response: Option<Response<Bytes>>,
    source: Option<BoxError>,
}

/// Why there is no definite answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SendErrorKind {
    /// It may have taken effect, and sending it again brings no certainty: the service says so (`outcome-unknown`), or
    /// nothing protects the request from taking effect twice. Somebody has to find out.
    Unknown,
    /// The last attempt was refused, or turned away before the operation, without a mark that this is the answer to the key;
    /// and an earlier attempt may have taken effect, or may be under way. A refusal then says nothing of that one: many
    /// services refuse a duplicate of a request that still runs with a 4xx of their own. The same intent can be sent again,
    /// later or when what turned it away is mended.
    TurnedAway,
    /// It was sent as often as it may be.
    Attempts,
    /// The time is up, or would be before the next attempt.
    Deadline,
    /// Too many retries fail: [`RetryBudget`](crate::RetryBudget).
    Budget,
    /// The service wants to be left alone for longer than is waited for: see [`SendError::come_back_at`].
    ComeBackLater,
    /// The body was a stream, which cannot be sent again.
    Body,
    /// The key is older than the service promises to know it, and the request may have been sent.
    KeyLifetime,
    /// The answer is larger than the policy allows. The head of the response is there.
    AnswerTooLarge,
    /// The request cannot be sent at all: a malformed address, a scheme that the transport does not speak.
    Unsendable,
    /// The journal could not take the intent down, so nothing was sent.
    Journal,
    /// Another process, or another task of this one, is sending the intent just now. Nothing was sent by this call.
    InFlight,
    /// What the journal has under this key is another request or is damaged, or the intent that this one replaces has
    /// no definite answer. Nothing was sent by this call, and somebody has to look.
    JournalConflict,
    /// The journal may have the intent, and its file could not be opened, locked or read. Nothing was sent by this call. The
    /// same intent can be sent when that is mended.
    JournalUnreadable,
    /// The intent may have been sent before, with other credentials than these; a service that takes the credential for the
    /// caller would execute it again. Nothing was sent by this call. It can be sent with the credentials that it had, or with
    /// [`JournalDir::with_other_credentials`](crate::JournalDir::with_other_credentials).
    OtherCredentials,
    /// The journal has the intent as done, and its key is older than the service promises to know it: sent again, it could
    /// take effect once more. Nothing was sent by this call. The answer of that time is not in the journal.
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

    /// Why it ended.
    #[must_use]
    pub fn kind(&self) -> SendErrorKind {
        self.0.kind
    }

    /// Whether the request may have taken effect. `false` is certain: no attempt was processed, and no earlier one is known
    /// of.
    #[must_use]
    pub fn may_have_taken_effect(&self) -> bool {
        self.0.may_have_taken_effect
    }

    /// Whether sending the same intent again, later, can bring a definite answer. Where it cannot, somebody has to find out
    /// what happened; a service may answer under the same key when that is done.
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
            SendErrorKind::OtherCredentials => true,  // with those that it had
            SendErrorKind::TurnedAway => true,        // with other credentials, or another way there
            SendErrorKind::AnswerTooLarge => true,    // with a higher limit
            SendErrorKind::Body => true,              // with the body from its beginning
            SendErrorKind::Unknown
            | SendErrorKind::KeyLifetime
            | SendErrorKind::Unsendable
            | SendErrorKind::JournalConflict
            | SendErrorKind::DoneBefore => false,
        }
    }

    /// How often the request was sent, by this call.
    #[must_use]
    pub fn attempts(&self) -> u32 {
        self.0.attempts
    }

    /// When the service wants to be asked again, where it said so with its last answer.
    #[must_use]
    pub fn come_back_at(&self) -> Option<SystemTime> {
        self.0.come_back_at
    }

    /// The last answer, where the last attempt had one. It is not definite.
    #[must_use]
    pub fn response(&self) -> Option<&Response<Bytes>> {
        self.0.response.as_ref()
    }

    /// Takes the last answer out.
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
                "it is not known whether the request took effect, and sending it again does not tell"
            }
            SendErrorKind::TurnedAway => "refused, while an earlier attempt has no definite answer",
            SendErrorKind::Attempts => "no definite answer after as many attempts as are allowed",
            SendErrorKind::Deadline => "no definite answer within the deadline",
            SendErrorKind::Budget => "no definite answer, and too many retries fail to go on",
            SendErrorKind::ComeBackLater => "the service wants to be asked again later than is waited for",
            SendErrorKind::Body => "no definite answer, and the body cannot be sent again",
            SendErrorKind::KeyLifetime => "no definite answer, and the service may have forgotten the key",
            SendErrorKind::AnswerTooLarge => "the answer is larger than is allowed",
            SendErrorKind::Unsendable => "the request cannot be sent",
            SendErrorKind::Journal => "the journal did not take the intent down, so it was not sent",
            SendErrorKind::InFlight => "somebody else is sending it just now",
            SendErrorKind::JournalConflict => {
                "the journal has something else under this key, so it was not sent"
            }
            SendErrorKind::JournalUnreadable => {
                "what the journal has under this key cannot be read, so it was not sent"
            }
            SendErrorKind::OtherCredentials => {
                "not sent, because its credentials are not those that it had before"
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

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer")
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
