//! What retries may cost all intents of a client together.

use std::sync::{Mutex, PoisonError};

/// A bucket of tokens that all intents of a client draw on, so that an outage is not made worse: when most requests fail,
/// the retries stop, and first attempts go on.
///
/// The bucket is full at first. A retry takes tokens, twice as many after a time-out; an intent that ends with an answer
/// from the service gives back what its last retry took, and one token where it needed no retry. Waiting for a request in
/// progress costs nothing. These are the rules of the AWS SDKs.
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

    /// How many tokens there are.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        *self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what a retry costs; `None` where there is not enough.
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

    /// An intent has its answer: gives back what its last retry took, or one where there was none.
    pub(crate) fn give(&self, last: Option<u32>) {
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        *tokens = tokens.saturating_add(last.unwrap_or(1)).min(self.capacity);
    }
}

/// What a failed attempt says of the state of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pressure {
    /// It works, on this very request.
    None,
    /// It failed, or refuses to take more.
    Failure,
    /// It did not answer in time.
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
