//! The shared budget for the retries of all intents of a client.

use std::sync::{Mutex, PoisonError};

/// A bucket of tokens that all intents of a client share. It keeps retries from making an outage worse: when most requests
/// fail, retries stop and first attempts go on.
///
/// The bucket starts full. A retry takes tokens, twice as many after a time-out. An intent that ends with a response from the
/// service returns the tokens of its last retry, or one token if it needed no retry. Waiting for a request in progress costs
/// nothing. These are the rules of the AWS SDKs.
#[derive(Debug)]
pub struct RetryBudget {
    capacity: u32,
    cost: u32,
    tokens: Mutex<u32>,
}

impl Default for RetryBudget {
    /// 500 tokens, 5 for a retry: a hundred retries in a row, then one for five successes.
    fn default() -> Self {
        Self::new(500, 5)
    }
}

impl RetryBudget {
    /// A full bucket of `capacity` tokens, of which a retry takes `cost`.
    #[must_use]
    pub const fn new(capacity: u32, cost: u32) -> Self {
        Self { capacity, cost, tokens: Mutex::new(capacity) }
    }

    /// The number of tokens in the bucket.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        *self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the cost of a retry; `None` if there are not enough tokens.
    pub(crate) fn take(&self, pressure: Pressure) -> Option<u32> {
        let cost = match pressure {
            Pressure::None => 0,
            Pressure::Failure => self.cost,
            Pressure::Timeout => self.cost.saturating_mul(2),
        };
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        *tokens = tokens.checked_sub(cost)?;
        Some(cost)
    }

    /// Returns the cost of the last retry of an intent that has its response, or one token if there was no retry.
    pub(crate) fn give(&self, last: Option<u32>) {
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        *tokens = tokens.saturating_add(last.unwrap_or(1)).min(self.capacity);
    }
}

/// The sign of overload in a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pressure {
    /// The service works, on this very request.
    None,
    /// The service failed, or refuses more requests.
    Failure,
    /// The service did not answer in time.
    Timeout,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_runs_dry_and_fills_up_to_its_capacity() {
        let budget = RetryBudget::new(12, 5);
        assert_eq!(budget.take(Pressure::None), Some(0));
        assert_eq!(budget.take(Pressure::Timeout), Some(10));
        assert_eq!(budget.take(Pressure::Failure), None);
        assert_eq!(budget.tokens(), 2);
        budget.give(None);
        assert_eq!(budget.tokens(), 3);
        budget.give(Some(10));
        assert_eq!(budget.tokens(), 12);
    }
}
