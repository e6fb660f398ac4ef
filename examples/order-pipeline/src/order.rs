//! The message about an order.

use serde::{Deserialize, Serialize};

/// The subject of the messages.
pub(crate) const PLACED: &str = "orders.placed";

/// An order was placed: the response of the API, and the message.
#[derive(Serialize, Deserialize)]
pub(crate) struct OrderPlaced {
    pub(crate) order: i64,
    pub(crate) customer: String,
    /// The number of the order among those of its customer, from 1.
    pub(crate) sequence: u64,
    pub(crate) cents: i64,
}
