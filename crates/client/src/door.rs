//! What the middleware and the layer have in common: other people's requests.

use std::sync::Arc;

use http::Method;
use http::header::{HeaderMap, HeaderValue};
use oncegate_core::Clock;

use crate::backoff::Random;
use crate::budget::RetryBudget;
use crate::key::{Carrier, Key, KeyError};
use crate::policy::{Api, RetryPolicy};
use crate::send::{Ask, Shared, is_repeatable, is_safe};
use crate::verdict::Standing;

/// How requests that come by are sent.
#[derive(Clone)]
pub(crate) struct Door {
    pub(crate) shared: Shared,
    pub(crate) carrier: Carrier,
    pub(crate) makes_keys: bool,
}

/// What is done with one of them.
pub(crate) enum Way {
    /// Nothing protects it: it goes by once, and what comes back is not judged.
    Past,
    /// It is sent until there is a definite answer.
    Until(Ask),
}

impl Door {
    pub(crate) fn new() -> Self {
        Self { shared: Shared::new(RetryPolicy::default()), carrier: Carrier::default(), makes_keys: false }
    }

    /// Gives the request the key that it is to have, and says what protects it.
    pub(crate) fn plan(
        &self,
        method: &Method,
        headers: &mut HeaderMap,
        key: Option<&Key>,
    ) -> Result<Way, KeyError> {
        let standing = match self.shared.policy.api {
            Api::Idempotent => {
                let value = match key {
                    Some(key) => self.carrier.value(key),
                    None if self.needs_key(method, headers) => self.carrier.value(&Key::uuid_v7()?),
                    None => None,
                };
                if let Some(value) = value {
                    headers.insert(self.carrier.name().clone(), value);
                }
                if is_safe(method) {
                    Standing::Safe
                } else if has_one_value(headers, &self.carrier) {
                    Standing::Keyed
                } else if is_repeatable(method) {
                    Standing::Repeatable
                } else {
                    return Ok(Way::Past);
                }
            }
            Api::Plain if is_safe(method) => Standing::Safe,
            Api::Plain if is_repeatable(method) => Standing::Repeatable,
            Api::Plain => Standing::Once,
        };
        Ok(Way::Until(Ask {
            method: method.clone(),
            standing,
            sent_before: false,
            created_at: None,
            key_lifetime: None,
        }))
    }

    fn needs_key(&self, method: &Method, headers: &HeaderMap) -> bool {
        self.makes_keys && !is_repeatable(method) && !headers.contains_key(self.carrier.name())
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
            self.door.shared.policy = policy;
            self
        }

        /// The field that carries the key.
        #[must_use]
        pub fn with_carrier(mut self, carrier: crate::Carrier) -> Self {
            self.door.carrier = carrier;
            self
        }

        /// Gives each request that has no key, and whose method does not repeat by itself, a new one. It is another one
        /// with each call, so it protects the retries within, and not those of whoever calls again.
        #[must_use]
        pub fn with_new_keys(mut self) -> Self {
            self.door.makes_keys = true;
            self
        }

        /// A retry budget that is shared with other clients of the same service.
        #[must_use]
        pub fn with_budget(mut self, budget: std::sync::Arc<crate::RetryBudget>) -> Self {
            self.door.set_budget(budget);
            self
        }

        /// Another clock than the system's, for dates and the age of keys. Pauses and deadlines are tokio's.
        #[must_use]
        pub fn with_clock(mut self, clock: std::sync::Arc<dyn oncegate_core::Clock>) -> Self {
            self.door.set_clock(clock);
            self
        }

        /// Other chances than the system's, for the pauses.
        #[must_use]
        pub fn with_random(mut self, random: std::sync::Arc<dyn crate::Random>) -> Self {
            self.door.set_random(random);
            self
        }
    };
}
pub(crate) use settings;

impl Door {
    pub(crate) fn set_budget(&mut self, budget: Arc<RetryBudget>) {
        self.shared.budget = budget;
    }

    pub(crate) fn set_clock(&mut self, clock: Arc<dyn Clock>) {
        self.shared.clock = clock;
    }

    pub(crate) fn set_random(&mut self, random: Arc<dyn Random>) {
        self.shared.random = random;
    }
}
