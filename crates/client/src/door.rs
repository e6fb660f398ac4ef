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
    pub(crate) retries_keyless: bool,
}

/// What is done with one of them.
pub(crate) enum Way {
    /// It has no key: it goes by once, and what comes back is neither read nor judged.
    Past,
    /// It is sent until there is a definite answer.
    Until(Ask),
}

impl Door {
    pub(crate) fn new() -> Self {
        Self {
            shared: Shared::new(RetryPolicy::default()),
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
                match has_one_value(headers, &self.carrier) && !is_safe(method) {
                    true => Standing::Keyed,
                    false => keyless(method),
                }
            }
            Api::Plain => keyless(method),
        };
        match standing {
            Standing::Keyed => {}
            // A request that asks for a stream of events looks like any other `GET`. To read its answer would hold it back
            // until its end, and to send it again would begin it once more.
            _ if !self.retries_keyless => return Ok(Way::Past),
            Standing::Once if self.shared.policy.api == Api::Idempotent => return Ok(Way::Past),
            Standing::Safe | Standing::Repeatable | Standing::Once => {}
        }
        Ok(Way::Until(Ask {
            method: method.clone(),
            standing,
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
fn keyless(method: &Method) -> Standing {
    if is_safe(method) {
        Standing::Safe
    } else if is_repeatable(method) {
        Standing::Repeatable
    } else {
        Standing::Once
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

        /// Sends requests without a key again, too, where their method allows it: `GET`, `HEAD`, `OPTIONS`, `TRACE`, `PUT` and
        /// `DELETE`; for [`Api::Plain`](crate::Api::Plain) every request that was certainly not processed. Their answers are
        /// then read whole before they are handed on, so leave this off for a client that reads streams of events.
        #[must_use]
        pub fn with_keyless_retries(mut self) -> Self {
            self.door.retries_keyless = true;
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
