//! The common core of the reqwest middleware and the Tower layer.

use std::sync::Arc;

use http::Method;
use http::header::{HeaderMap, HeaderValue};
use oncegate_core::{Clock, IdempotencyKey};

use crate::backoff::Random;
use crate::budget::RetryBudget;
use crate::intent::IntentError;
use crate::key::{Carrier, uuid_v7_key};
use crate::policy::{Api, RetryPolicy};
use crate::send::{RequestInfo, RequestRunner, is_repeatable, is_safe};
use crate::verdict::Protection;

/// The settings with which requests are sent.
#[derive(Clone)]
pub(crate) struct MiddlewareCore {
    pub(crate) runner: RequestRunner,
    pub(crate) carrier: Carrier,
    pub(crate) makes_keys: bool,
    pub(crate) retries_keyless: bool,
}

/// The treatment of one request.
pub(crate) enum RequestPlan {
    /// The request has no key: it is sent once, and its response is neither read nor judged.
    PassThrough,
    /// The request is sent until there is a definite response.
    UntilDefinite(RequestInfo),
}

impl MiddlewareCore {
    pub(crate) fn new() -> Self {
        Self {
            runner: RequestRunner::new(RetryPolicy::default()),
            carrier: Carrier::default(),
            makes_keys: false,
            retries_keyless: false,
        }
    }

    /// Sets the key of the request, and determines its protection.
    pub(crate) fn plan(
        &self,
        method: &Method,
        headers: &mut HeaderMap,
        key: Option<&IdempotencyKey>,
    ) -> Result<RequestPlan, IntentError> {
        let protection = match self.runner.policy.api {
            Api::Idempotent => {
                let value = match key {
                    Some(key) => Some(self.carrier.value(key)?),
                    None if self.needs_key(method, headers) => Some(self.carrier.value(&uuid_v7_key()?)?),
                    None => None,
                };
                if let Some(value) = value {
                    headers.insert(self.carrier.name().clone(), value);
                }
                match has_one_value(headers, &self.carrier) && !is_safe(method) {
                    true => Protection::Keyed,
                    false => keyless(method),
                }
            }
            Api::Plain => keyless(method),
        };
        match protection {
            Protection::Keyed => {}
            // A request for a stream of events looks like any other `GET`. Reading its response would withhold the events until
            // the end, and sending it again would begin the stream once more.
            _ if !self.retries_keyless => return Ok(RequestPlan::PassThrough),
            Protection::Once if self.runner.policy.api == Api::Idempotent => {
                return Ok(RequestPlan::PassThrough);
            }
            Protection::Safe | Protection::Repeatable | Protection::Once => {}
        }
        Ok(RequestPlan::UntilDefinite(RequestInfo {
            method: method.clone(),
            protection,
            sent_before: false,
            created_at: None,
            key_lifetime: None,
            done_before: false,
        }))
    }

    fn needs_key(&self, method: &Method, headers: &HeaderMap) -> bool {
        self.makes_keys && !is_repeatable(method) && !headers.contains_key(self.carrier.name())
    }
}

/// The protection of a request without a key, by its method.
fn keyless(method: &Method) -> Protection {
    if is_safe(method) {
        Protection::Safe
    } else if is_repeatable(method) {
        Protection::Repeatable
    } else {
        Protection::Once
    }
}

/// Returns `true` if there is exactly one key. Two headers are two keys, which protect nothing.
fn has_one_value(headers: &HeaderMap, carrier: &Carrier) -> bool {
    let mut values = headers.get_all(carrier.name()).iter();
    let is_key = |value: &HeaderValue| !value.as_bytes().trim_ascii().is_empty();
    values.next().is_some_and(is_key) && values.next().is_none()
}

/// The setters that the middleware and the layer share.
macro_rules! settings {
    () => {
        /// Sets the limits of retries.
        #[must_use]
        pub fn with_policy(mut self, policy: crate::RetryPolicy) -> Self {
            self.core.runner.policy = policy;
            self
        }

        /// Sets the header that carries the key.
        #[must_use]
        pub fn with_carrier(mut self, carrier: crate::Carrier) -> Self {
            self.core.carrier = carrier;
            self
        }

        /// Gives a new key to each request that has none and whose method is not idempotent.
        ///
        /// The key differs for each call. It protects the retries within the call, not a second call by the application.
        #[must_use]
        pub fn with_new_keys(mut self) -> Self {
            self.core.makes_keys = true;
            self
        }

        /// Also retries requests without a key if their method allows it: `GET`, `HEAD`, `OPTIONS`, `TRACE`, `PUT` and `DELETE`.
        /// For [`Api::Plain`](crate::Api::Plain) it retries every request that was certainly not processed.
        ///
        /// The whole response is then read before it is passed on, so leave this off for a client that reads streams of events.
        #[must_use]
        pub fn with_keyless_retries(mut self) -> Self {
            self.core.retries_keyless = true;
            self
        }

        /// Sets a retry budget that other clients of the same service share.
        #[must_use]
        pub fn with_budget(mut self, budget: std::sync::Arc<crate::RetryBudget>) -> Self {
            self.core.set_budget(budget);
            self
        }

        /// Replaces the clock of the system for dates and the age of keys. Pauses and deadlines use the clock of tokio.
        #[must_use]
        pub fn with_clock(mut self, clock: std::sync::Arc<dyn oncegate_core::Clock>) -> Self {
            self.core.set_clock(clock);
            self
        }

        /// Replaces the random bits of the system for the pauses.
        #[must_use]
        pub fn with_random(mut self, random: std::sync::Arc<dyn crate::Random>) -> Self {
            self.core.set_random(random);
            self
        }
    };
}
pub(crate) use settings;

impl MiddlewareCore {
    pub(crate) fn set_budget(&mut self, budget: Arc<RetryBudget>) {
        self.runner.budget = budget;
    }

    pub(crate) fn set_clock(&mut self, clock: Arc<dyn Clock>) {
        self.runner.clock = clock;
    }

    pub(crate) fn set_random(&mut self, random: Arc<dyn Random>) {
        self.runner.random = random;
    }
}
