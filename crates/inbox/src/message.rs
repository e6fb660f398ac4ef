//! A message as every broker's adapter hands it over.

use std::fmt;

use bytes::Bytes;

/// A message that was delivered, whatever the broker.
///
/// `Debug` shows how large it is and not what it says.
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Message {
    /// Where it came from: a topic, a queue, a stream, the path of a webhook.
    pub topic: String,
    /// Its headers, properties or attributes, in the order in which they came. Names are kept as they are.
    pub headers: Vec<(String, Bytes)>,
    /// What it says.
    pub payload: Bytes,
    /// What the broker itself tells it by, the same at every delivery: `orders/3/1041` for a partition and an offset, a
    /// sequence number of a stream, an identifier that the broker made. `None` where the broker has none.
    pub broker_id: Option<String>,
    /// What must stay in order: messages with the same one are processed one after the other. `None` where there is no order.
    pub order_key: Option<Bytes>,
    /// Whether it may have been delivered before. `false` only where the broker is certain that it was not.
    pub is_redelivered: bool,
    /// How often the broker says that it has delivered it, this time included.
    pub deliveries: Option<u32>,
}

impl Message {
    /// A message with this content, from there; perhaps delivered before.
    #[must_use]
    pub fn new(topic: impl Into<String>, payload: impl Into<Bytes>) -> Self {
        Self { topic: topic.into(), payload: payload.into(), is_redelivered: true, ..Self::default() }
    }

    /// With one more header.
    #[must_use]
    pub fn with_header(mut self, name: impl Into<String>, value: impl Into<Bytes>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// With the broker's own identifier.
    #[must_use]
    pub fn with_broker_id(mut self, id: impl Into<String>) -> Self {
        self.broker_id = Some(id.into());
        self
    }

    /// In order with others that have this key.
    #[must_use]
    pub fn with_order_key(mut self, key: impl Into<Bytes>) -> Self {
        self.order_key = Some(key.into());
        self
    }

    /// How often it was delivered, as far as the broker knows.
    #[must_use]
    pub const fn with_deliveries(mut self, deliveries: Option<u32>, is_redelivered: bool) -> Self {
        self.deliveries = deliveries;
        self.is_redelivered = is_redelivered;
        self
    }

    /// The value of a header, its name compared without case. `None` where there is none.
    ///
    /// # Errors
    /// [`Ambiguous`] where there are several with different values: nobody knows which one counts.
    pub fn header(&self, name: &str) -> Result<Option<&Bytes>, Ambiguous> {
        let mut values =
            self.headers.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value);
        let first = values.next();
        if values.any(|value| Some(value) != first) {
            return Err(Ambiguous);
        }
        Ok(first)
    }
}

/// A header that is there several times, with different values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ambiguous;

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("topic", &self.topic)
            .field("headers", &self.headers.len())
            .field("octets", &self.payload.len())
            .field("is_redelivered", &self.is_redelivered)
            .field("deliveries", &self.deliveries)
            .finish_non_exhaustive()
    }
}
