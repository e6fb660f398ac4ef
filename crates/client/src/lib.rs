//! The client side of *one key, one effect*: sends a request under one key until there is a definite response.
//!
//! A client that got no response must retry, and a retry of `POST /payments` charges twice unless the service recognizes the
//! same payment. The unit here is therefore not the request but the **[`Intent`]**: an operation that must happen once. It has
//! one [`IdempotencyKey`] over all retries, restarts and processes. A corrected request is another intent.
//!
//! ```
//! use oncegate_client::{Client, IdempotencyKey, Intent, Verdict};
//! use oncegate_core::ErrorChain;
//! # use bytes::Bytes;
//! # use http_body_util::Full;
//! # struct Shop;
//! # impl oncegate_client::Transport for Shop {
//! #     type Body = Full<Bytes>;
//! #     async fn send(
//! #         &self,
//! #         request: http::Request<Bytes>,
//! #     ) -> Result<http::Response<Full<Bytes>>, oncegate_client::AttemptFailure> {
//! #         assert!(request.headers().contains_key("idempotency-key"));
//! #         Ok(http::Response::builder().status(201).body(Full::from(r#"{"paid":5}"#)).unwrap())
//! #     }
//! # }
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let transport = Shop;
//! // With the feature `reqwest`: let transport = ReqwestTransport::new()?;
//! let client = Client::new(transport);
//! let intent = Intent::post("https://shop.example/payments")?
//!     .with_key(IdempotencyKey::derived("payment", ["order-123", "v2"]))?
//!     .with_json(r#"{"order":"order-123","amount":5}"#);
//!
//! match client.send(&intent).await {
//!     // Definite: it would be the same response again. 4xx are among them.
//!     Ok(outcome) if outcome.verdict == Verdict::Done => {
//!         assert_eq!(outcome.text(), r#"{"paid":5}"#);
//!         assert_eq!((outcome.attempts, outcome.replayed), (1, false));
//!     }
//!     Ok(outcome) => println!("refused: {}", outcome.response.status()),
//!     // Not definite. Send the same intent again, or let a person find out what happened.
//!     Err(open) if !open.may_have_taken_effect() => {
//!         println!("nothing happened: {}", ErrorChain(&open));
//!     }
//!     Err(open) => println!("unknown; try the same later: {}: {}", open.is_resumable(), ErrorChain(&open)),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Which key
//! - [`uuid_v7_key`] (the default of [`Intent::new`]) and [`ulid_key`] make a new key with each call. Keep the key with the
//!   intent.
//! - [`IdempotencyKey::derived`] makes the key from the business identity (`"payment"`, order 123, version 2). It is the same
//!   in every process and at any time, so it need not be stored.
//! - [`IdempotencyKey::new`] takes an existing key.
//!
//! The key is sent in `Idempotency-Key`, without quotes. [`Carrier`] sets another header, or quotes.
//!
//! # What a response means
//! In this order; the first row that fits counts. *Again* is the same request under the same key.
//!
//! | response | meaning |
//! |---|---|
//! | none, a time-out, or a body that broke off, with any status | again |
//! | 2xx, 303 | [`Verdict::Done`] |
//! | 301, 302, 304 | unknown; [`Verdict::Done`] for safe methods |
//! | other 3xx | turned away |
//! | marked as a replay (`Idempotent-Replayed: true`) | final: 4xx [`Verdict::Refused`], 5xx [`Verdict::Failed`] |
//! | problem member `retry` = `same-key` | again |
//! | … `new-key`, `fix-request` | [`Verdict::Refused`] with that [`Advice`]; turned away if the status is one of those below |
//! | … `stop`, with `outcome-unknown` | [`SendErrorKind::Unknown`] |
//! | … `stop`, with `replay-unavailable` or `replay-denied` | [`Verdict::Unreplayable`] |
//! | … `stop`, else | 4xx refused, 5xx unknown |
//! | an error that names a request in progress, a key of another request, an unknown outcome | again, refused, unknown |
//! | `Stripe-Should-Retry` | again, or as `stop` |
//! | 408, 425, 429, 502, 503, 504 | again |
//! | 409 and 423 that name no kind of conflict | again: it may be in progress. One that names another kind is refused |
//! | 401, 403, 404, 405, 407, 411, 413, 417, 421, 426, 431, 501, 505, 511 | turned away |
//! | other 4xx | [`Verdict::Refused`] |
//! | other 5xx | by [`ServerErrorPolicy`]; again by default |
//!
//! *Turned away* ([`Verdict::TurnedAway`]) is about the way to the operation and not about the operation: nothing took effect,
//! and the same intent can be sent under the same key when the reason is fixed.
//!
//! **After an attempt that may have taken effect, no refusal is definite** unless it is marked as the response to the key. A 401
//! after a time-out does not prove that the card was not charged. Neither does a 422: services refuse a duplicate of a running
//! request with it. After a refusal by the operation the client sends again under the same key, because a service that marks
//! replays then marks it. If it stays unmarked, or if the request was refused before the operation, the intent ends as
//! [`SendErrorKind::TurnedAway`].
//!
//! # When it sends again, and when it stops
//! [`RetryPolicy`] has the limits; all hold together. Pauses have full jitter. `Retry-After`, in seconds or as a date, is a
//! minimum; one that is longer than is waited for ends the sending with [`SendError::come_back_at`]. A [`RetryBudget`]
//! that all intents of a client share stops retries, and not first attempts, while most of them fail.
//!
//! A `POST` or `PATCH` without a key is never sent again, because nothing protects it. For services that know no keys there is
//! [`Api::Plain`], which repeats only what was certainly not processed.
//!
//! # Where it ends
//! - A key protects as long as the service knows it, and a service that ignores it protects nothing.
//! - A response of HTTP/1 with neither length nor chunks ends where its connection ends. It is unknown if it is whole.
//! - One layer of retries is enough. Turn those of the HTTP client off, as `ReqwestTransport` does.
//! - Intents live in memory, unless there is a [`Journal`]. With the feature `journal`, `JournalDir` stores them, and the next
//!   process after a crash continues them.
//!
//! # Features
//! [`Client`] works over any [`Transport`]. The feature `reqwest` has a transport and middleware. The feature `tower` has a
//! transport over any service, and a layer. With `http2`, REFUSED_STREAM and GOAWAY prove that a request was not processed.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod backoff;
mod budget;
mod client;
mod failure;
mod hint;
mod intent;
mod journal;
mod key;
#[cfg(any(feature = "reqwest", feature = "tower"))]
mod middleware;
mod policy;
mod received;
mod refusal;
mod report;
#[cfg(feature = "reqwest")]
pub mod reqwest;
mod retry_after;
mod send;
mod signals;
#[cfg(feature = "tower")]
pub mod tower;
mod verdict;
#[cfg(test)]
mod verdict_vectors;

pub use backoff::{Jitter, Random};
pub use budget::RetryBudget;
pub use client::{Client, Transport};
#[cfg(feature = "http2")]
pub use failure::was_refused_by_http2;
pub use failure::{AttemptFailure, AttemptFailureKind, BoxError};
pub use intent::{Intent, IntentError};
#[cfg(all(unix, feature = "journal"))]
pub use journal::{DamagedFile, JournalDir, PendingIntent, Resume, ResumeError, ResumedIntent};
pub use journal::{Journal, JournalEntry, JournalFuture, JournalOpenError, JournaledIntent};
pub use key::{Carrier, ulid_key, uuid_v7_key};
pub use oncegate_core::{ConfigError, IdempotencyKey, KeyError};
pub use policy::{Api, RetryPolicy, ServerErrorPolicy};
pub use received::ReceivedBody;
pub use report::{DefiniteResponse, Report, SendError, SendErrorKind};
pub use verdict::{Advice, Verdict};
