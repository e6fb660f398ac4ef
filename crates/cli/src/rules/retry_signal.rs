//! The marks by which a client tells refusals that a retry can overcome from those that are final.
//!
//! All of them are in the head of the response. The body may be one of another API, which the service passes on, and whatever
//! that API advises is about a request of the service.

use oncegate_http::RetryAdvice;

use super::descriptor::Operation;

/// The field of a refusal, the beginning of its value, and the part of its value that advises the same request again.
pub(super) const REFUSAL_FIELD: &str = "Idempotency-Status";
pub(super) const REFUSED: &str = "refused";
pub(super) const RETRY_SAME_KEY: &str = "retry=same-key";

/// Statuses after which a retry is right: nothing was decided about the operation.
const UNDECIDED: [u16; 3] = [408, 425, 429];

/// The marks that count if a response has no [`REFUSAL_FIELD`]: the service sent it, or a gateway in front removed the field.
///
/// They only ever add retries. A retry under the same key is safe, and gets the marked first response if that is final. A
/// client that stops at a refusal of a request in progress would send the operation with a new key.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RetrySignal {
    /// The header field of the API whose value is `true` if a retry is right.
    pub(super) header: Option<String>,
    /// The statuses below 500 after which a retry is right. It is after each from 500.
    pub(super) statuses: Vec<u16>,
}

impl RetrySignal {
    pub(super) fn of(operation: &Operation) -> Self {
        let is_only_again = |status: u16| {
            let mut same = operation.refusals.iter().filter(|refusal| refusal.status == status).peekable();
            same.peek().is_some() && same.all(|refusal| refusal.condition.retry() == RetryAdvice::SameKey)
        };
        let statuses = (400..500).filter(|status| UNDECIDED.contains(status) || is_only_again(*status));
        Self { header: operation.retryable_header.clone(), statuses: statuses.collect() }
    }
}
