//! A receiver of webhooks on axum: it verifies the signature and the time, and then processes the message once.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod generic;
mod receiver;
mod scheme;

pub use generic::{GenericHmac, SignatureEncoding};
pub use receiver::{DEFAULT_WINDOW, MIN_WINDOW, WebhookOptions, WebhookReceiver};
pub use scheme::{WebhookRefusal, WebhookScheme};
