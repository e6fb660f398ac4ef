//! A receiver of webhooks on axum: signature and time are verified first, then the message is processed once.

mod receiver;
mod scheme;

pub use receiver::{WINDOW_DEFAULT, WINDOW_MIN, WebhookOptions, WebhookReceiver};
pub use scheme::{WebhookRefusal, WebhookScheme};
