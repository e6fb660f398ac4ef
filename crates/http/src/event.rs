//! What became of each request, for metrics.

use http::StatusCode;

use crate::refusal::Condition;

/// What became of a request. Every request that enters the layer has exactly one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Disposition {
    /// Its method is not covered: passed through.
    NotCovered,
    /// It had no key and needed none: passed through unprotected.
    Unprotected,
    /// It was executed under its key.
    Executed,
    /// It got the stored answer.
    Replayed,
    /// The layer refused it.
    Refused(Condition),
    /// The store was out of reach, and it was executed without protection because the route says so.
    FailedOpen,
}

impl Disposition {
    /// The name in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NotCovered => "not-covered",
            Self::Unprotected => "unprotected",
            Self::Executed => "executed",
            Self::Replayed => "replayed",
            Self::Refused(condition) => condition.slug(),
            Self::FailedOpen => "failed-open",
        }
    }
}

/// Hears what became of each request. Called on the request's path: it must be quick and must not block.
pub trait RequestObserver: Send + Sync + 'static {
    /// Takes note. `status` is known where the layer answered or the handler did; it is not known for a request that only
    /// passes through, because that one has not been answered yet.
    fn observe(&self, disposition: Disposition, status: Option<StatusCode>);
}

/// Hears nothing.
impl RequestObserver for () {
    fn observe(&self, _: Disposition, _: Option<StatusCode>) {}
}
