//! Failures of attempts.

use std::error::Error;

/// Any error of a transport.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// The failure of an attempt: its kind, and the error of the transport.
#[derive(Debug, thiserror::Error)]
#[error("{}", kind.text())]
pub struct AttemptFailure {
    kind: AttemptFailureKind,
    source: BoxError,
}

/// The kind of failure of an attempt without a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AttemptFailureKind {
    /// No byte of the request reached the service: there was no connection. A retry may help.
    NotSent,
    /// The service reported that it did not process the request, as HTTP/2 does with REFUSED_STREAM and GOAWAY.
    NotProcessed,
    /// The request cannot be sent, now or later. Nothing was sent.
    Unsendable,
    /// The request may have been processed. This is the kind of all other errors.
    Doubtful,
}

impl AttemptFailureKind {
    const fn text(self) -> &'static str {
        match self {
            Self::NotSent => "the request was not sent",
            Self::NotProcessed => "the service did not process the request",
            Self::Unsendable => "the request cannot be sent",
            Self::Doubtful => "the request has no response",
        }
    }
}

impl AttemptFailure {
    /// A failure of this kind.
    pub fn new(kind: AttemptFailureKind, source: impl Into<BoxError>) -> Self {
        Self { kind, source: source.into() }
    }

    /// The kind of failure.
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

/// Returns `true` if HTTP/2 guarantees that the request was not processed.
///
/// That is a stream that the peer refused, or a stream above the last one of the peer's GOAWAY (RFC 9113, 6.8 and 8.7). The
/// error must be that of a request without a response.
#[cfg(feature = "http2")]
#[must_use]
pub fn was_refused_by_http2(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(error) = error.downcast_ref::<h2::Error>() {
            let refused = error.is_reset() && error.reason() == Some(h2::Reason::REFUSED_STREAM);
            // The library returns this error only for streams that GOAWAY excludes. Other streams end with the connection,
            // as an I/O error.
            return error.is_remote() && (refused || error.is_go_away());
        }
        next = error.source();
    }
    false
}
