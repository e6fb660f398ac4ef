//! Messages whose effect is rows in PostgreSQL: the effect and the receipt commit in one transaction.
//!
//! - [`TransactionalInbox`] processes each message once.
//! - [`Streams`] applies numbered events once and in order.
//! - [`DeadLetterTable`] lists the messages that were given up, and takes them out.
//! - [`Outbox`] writes messages in the business transaction, and [`Relay`] publishes them afterwards.
//!
//! Messages, identities and the consumer's loop are those of [`oncegate_inbox`]. The guides are
//! `docs/reference/messages-postgres.md` and `docs/reference/outbox.md`.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod batch;
mod dead_letters;
mod inbox;
mod outbox;
mod receipts;
mod streams;
mod work;

pub use self::dead_letters::{DeadLetterTable, StoredDeadLetter};
pub use self::inbox::{TransactionalInbox, TransactionalProcessor};
pub use self::outbox::{
    OnRefused, Outbox, OutboxDeadLetters, OutboxStatus, Relay, RelayCounts, RelayEvent, RelayEventKind,
    RelayObserver, RelayWaker,
};
pub use self::streams::{ApplyOutcome, StreamBusy, StreamEvent, StreamGap, Streams};
