//! The message that every broker adapter hands to the inbox.

use std::fmt;

use bytes::Bytes;

/// A delivered message of any broker.
///
/// `Debug` shows its size and not its content.
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Message {
    /// The origin of the message: a topic, a queue, a stream, or the path of a webhook.
    pub topic: String,
    /// Headers, properties or attributes, in the order of delivery. Names keep their spelling.
    pub headers: Vec<(String, Bytes)>,
    /// The content of the message.
    pub payload: Bytes,
    /// The broker's own identifier, the same at every delivery.
    ///
    /// Examples: `orders/3/1041` for a partition and an offset, a sequence number of a stream, an identifier that the
    /// broker made. `None` if the broker has none.
    pub broker_id: Option<String>,
    /// The order key: messages with the same key are processed one after the other. `None` means no order.
    pub order_key: Option<Bytes>,
    /// `true` if the message may have been delivered before, `false` only if the broker is certain that it was not.
    pub is_redelivered: bool,
    /// The number of deliveries that the broker has counted, this one included.
    pub deliveries: Option<u32>,
}

impl Message {
    /// Creates a message from its topic and payload; it counts as possibly delivered before.
    #[must_use]
    pub fn new(topic: impl Into<String>, payload: impl Into<Bytes>) -> Self {
        Self { topic: topic.into(), payload: payload.into(), is_redelivered: true, ..Self::default() }
    }

    /// Adds a header.
    #[must_use]
    pub fn with_header(mut self, name: impl Into<String>, value: impl Into<Bytes>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Sets the broker's own identifier.
    #[must_use]
    pub fn with_broker_id(mut self, id: impl Into<String>) -> Self {
        self.broker_id = Some(id.into());
        self
    }

    /// Sets the order key.
    #[must_use]
    pub fn with_order_key(mut self, key: impl Into<Bytes>) -> Self {
        self.order_key = Some(key.into());
        self
    }

    /// Sets the broker's delivery count, and the flag for a possible redelivery.
    #[must_use]
    pub const fn with_deliveries(mut self, deliveries: Option<u32>, is_redelivered: bool) -> Self {
        self.deliveries = deliveries;
        self.is_redelivered = is_redelivered;
        self
    }

    /// Returns the value of a header, its name compared without case, or `None` if the header is absent.
    ///
    /// # Errors
    /// [`AmbiguousHeader`] if the header occurs several times with different values.
    pub fn header(&self, name: &str) -> Result<Option<&Bytes>, AmbiguousHeader> {
        let mut values =
            self.headers.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value);
        let first = values.next();
        if values.any(|value| Some(value) != first) {
            return Err(AmbiguousHeader);
        }
        Ok(first)
    }
}

/// A header that occurs several times with different values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AmbiguousHeader;

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("topic", &self.topic)
            .field("headers", &self.headers.len())
            .field("bytes", &self.payload.len())
            .field("is_redelivered", &self.is_redelivered)
            .field("deliveries", &self.deliveries)
            .finish_non_exhaustive()
    }
}
