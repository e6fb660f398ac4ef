//! A receiver of webhooks on axum: signature and time are verified first, then the message is processed once.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod receiver;
mod scheme;

pub use receiver::{DEFAULT_WINDOW, MIN_WINDOW, WebhookOptions, WebhookReceiver};
pub use scheme::{WebhookRefusal, WebhookScheme};
