//! Why an attempt has no answer.

use std::error::Error;
use std::fmt;

/// Any error of a transport.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// An attempt that has no answer: what is known about it, and the error of the transport.
#[derive(Debug)]
pub struct AttemptFailure {
    kind: AttemptFailureKind,
    source: BoxError,
}

/// What is known of an attempt that has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AttemptFailureKind {
    /// Not an octet of it reached the service: there was no connection. Trying again may help.
    NotSent,
    /// The service says that it did not process it, as HTTP/2 does with REFUSED_STREAM and GOAWAY.
    NotProcessed,
    /// It cannot be sent at all, now or later. Nothing was sent.
    Unsendable,
    /// It may have been processed. What every error means of which nothing better is known.
    Doubtful,
}

impl AttemptFailure {
    /// An attempt of which this is known.
    pub fn new(kind: AttemptFailureKind, source: impl Into<BoxError>) -> Self {
        Self { kind, source: source.into() }
    }

    /// What is known of it.
    #[must_use]
    pub const fn kind(&self) -> AttemptFailureKind {
        self.kind
    }

    /// The error of the transport.
    #[must_use]
    pub fn into_source(self) -> BoxError {
        self.source
    }
}

impl fmt::Display for AttemptFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            AttemptFailureKind::NotSent => "the request was not sent",
            AttemptFailureKind::NotProcessed => "the service did not process the request",
            AttemptFailureKind::Unsendable => "the request cannot be sent",
            AttemptFailureKind::Doubtful => "the request has no answer",
        })
    }
}

impl Error for AttemptFailure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&*self.source)
    }
}

/// Whether HTTP/2 itself says that the request was not processed: a stream that the peer refused, or one above the last
/// stream of the peer's GOAWAY (RFC 9113, 6.8 and 8.7). It has to be an error of the request, before any answer.
#[cfg(feature = "http2")]
#[must_use]
pub fn was_refused_by_http2(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(error) = error.downcast_ref::<h2::Error>() {
            let refused = error.is_reset() && error.reason() == Some(h2::Reason::REFUSED_STREAM);
            // The library gives this error to none but the streams that GOAWAY leaves out; the others end with the
            // connection, as an error of input and output.
            return error.is_remote() && (refused || error.is_go_away());
        }
        next = error.source();
    }
    false
}
