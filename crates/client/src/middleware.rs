//! What the middleware and the layer have in common: other people's requests.

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

/// How requests that come by are sent.
#[derive(Clone)]
pub(crate) struct MiddlewareCore {
    pub(crate) runner: RequestRunner,
    pub(crate) carrier: Carrier,
    pub(crate) makes_keys: bool,
    pub(crate) retries_keyless: bool,
}

/// What is done with one of them.
pub(crate) enum RequestPlan {
    /// It has no key: it goes by once, and what comes back is neither read nor judged.
    PassThrough,
    /// It is sent until there is a definite answer.
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

    /// Gives the request the key that it is to have, and says what protects it.
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
            // A request that asks for a stream of events looks like any other `GET`. To read its answer would hold it back
            // until its end, and to send it again would begin it once more.
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

/// What protects a request without a key: its method.
fn keyless(method: &Method) -> Protection {
    if is_safe(method) {
        Protection::Safe
    } else if is_repeatable(method) {
        Protection::Repeatable
    } else {
        Protection::Once
    }
}

/// Two fields are two keys, and none has no say: neither protects anything.
fn has_one_value(headers: &HeaderMap, carrier: &Carrier) -> bool {
    let mut values = headers.get_all(carrier.name()).iter();
    let is_key = |value: &HeaderValue| !value.as_bytes().trim_ascii().is_empty();
    values.next().is_some_and(is_key) && values.next().is_none()
}

/// The settings that both doors have, by the same names.
macro_rules! settings {
    () => {
        /// When to send again, and when to stop.
        #[must_use]
        pub fn with_policy(mut self, policy: crate::RetryPolicy) -> Self {
            self.core.runner.policy = policy;
            self
        }

        /// The field that carries the key.
        #[must_use]
        pub fn with_carrier(mut self, carrier: crate::Carrier) -> Self {
            self.core.carrier = carrier;
            self
        }

        /// Gives each request that has no key, and whose method does not repeat by itself, a new one. It is another one
        /// with each call, so it protects the retries within, and not those of whoever calls again.
        #[must_use]
        pub fn with_new_keys(mut self) -> Self {
            self.core.makes_keys = true;
            self
        }

        /// Sends requests without a key again, too, where their method allows it: `GET`, `HEAD`, `OPTIONS`, `TRACE`, `PUT` and
        /// `DELETE`; for [`Api::Plain`](crate::Api::Plain) every request that was certainly not processed. Their answers are
        /// then read whole before they are handed on, so leave this off for a client that reads streams of events.
        #[must_use]
        pub fn with_keyless_retries(mut self) -> Self {
            self.core.retries_keyless = true;
            self
        }

        /// A retry budget that is shared with other clients of the same service.
        #[must_use]
        pub fn with_budget(mut self, budget: std::sync::Arc<crate::RetryBudget>) -> Self {
            self.core.set_budget(budget);
            self
        }

        /// Another clock than the system's, for dates and the age of keys. Pauses and deadlines are tokio's.
        #[must_use]
        pub fn with_clock(mut self, clock: std::sync::Arc<dyn oncegate_core::Clock>) -> Self {
            self.core.set_clock(clock);
            self
        }

        /// Other chances than the system's, for the pauses.
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
