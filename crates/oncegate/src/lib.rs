//! One key, one effect.
//!
//! Networks lose responses. A client that got no response must retry, and a retry of `POST /payments` charges twice. Oncegate
//! makes a retry safe. The first request with a key executes. Every other request with that key gets the response of the
//! first. If Oncegate does not know whether the first one took effect, it says so instead of guessing.
//!
//! Apart from `TransactRefusal`, this crate has no code of its own. It re-exports:
//! - [`http`]: the Tower layer for axum, hyper and tonic services ([`IdempotencyLayer`]).
//! - [`embedded`]: the durable store that needs no server ([`EmbeddedStore`]).
//! - `postgres` (feature `postgres`): the store for any number of machines, and business transactions that commit together
//!   with their record (`Transactor`).
//! - `redis` (feature `redis`): the store on Redis and Valkey (`RedisStore`).
//! - `cache` (feature `cache`): a fast cache of responses in front of another store (`CachedStore`).
//! - `seal` (feature `seal`): encryption of stored responses and steps, in front of any store (`SealedStore`).
//! - `client` (feature `client`): the client, which keeps one key for each intent over every retry (`Client`).
//! - `inbox` (feature `inbox`): messages of brokers and webhooks, each processed once.
//! - `inbox_postgres` (feature `inbox-postgres`): the effect and the receipt of a message in one transaction, and an outbox.
//! - `amqp`, `nats`, `webhook` (features of these names), `kafka` (feature `experimental-kafka`) and `sqs` (feature
//!   `experimental-sqs`): the sources and publishers of messages.
//! - [`engine`]: functions that take effect once for each key ([`Function`]), claims, leases and waiting for entry points of
//!   your own ([`Engine`]), and a circuit breaker for stores that may be out of reach ([`Breaker`]).
//! - `#[idempotent]` (feature `macros`): a [`Function`], written as an attribute of an async function.
//! - [`core`]: the vocabulary, and the one pure function that decides everything ([`decide`](core::decide())).
//!
//! # An axum service whose payments are made once
//! ```
//! use axum::{Router, body::Body, http::Request, routing::post};
//! use oncegate::{EmbeddedOptions, EmbeddedStore, Engine, IdempotencyLayer};
//! use tower::ServiceExt;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let directory = directory.path().join("records");
//! let store = EmbeddedStore::open(EmbeddedOptions::new(directory))?;
//! let service = Router::new()
//!     .route("/payments", post(|| async { "paid" }))
//!     .layer(IdempotencyLayer::new(Engine::new(store)));
//!
//! let pay = || Request::post("/payments").header("Idempotency-Key", "order-123").body(Body::from("5 EUR"));
//! let first = service.clone().oneshot(pay()?).await?;
//! assert!(!first.headers().contains_key("Idempotent-Replayed"));
//! let again = service.oneshot(pay()?).await?;
//! assert_eq!(again.headers()["Idempotent-Replayed"], "true");
//! # Ok(())
//! # }
//! ```
//!
//! # A function that takes effect once
//! ```
//! use oncegate::{Engine, FunctionError, MemoryStore};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), FunctionError<String>> {
//! let engine = Engine::new(MemoryStore::default());
//! let charge = engine.function("charge");
//! let pay = async |cents: u64| {
//!     charge.run("order-123", &cents, async move |_attempt| Ok::<_, String>(format!("paid {cents}"))).await
//! };
//! assert_eq!(pay(500).await?, "paid 500");
//! assert_eq!(pay(500).await?, "paid 500"); // the value of the first call; nothing was paid
//! assert!(matches!(pay(900).await, Err(FunctionError::KeyReused)));
//! # Ok(())
//! # }
//! ```
//!
//! # What it promises
//! *Effectively once*. Exactly-once effects exist only if the effect commits in one transaction with the record, or if the
//! resource checks the [fencing token](core::FencingToken). Otherwise you choose, for each route, what follows a crash in
//! the middle of an execution: [`OnAbandoned::Park`](core::OnAbandoned::Park), at most once, which is the default, or
//! [`OnAbandoned::Reexecute`](core::OnAbandoned::Reexecute), at least once.

#[cfg(feature = "macros")]
mod macros;
#[cfg(all(feature = "axum", feature = "postgres"))]
mod transact_refusal;

pub use oncegate_core as core;
pub use oncegate_engine as engine;

#[cfg(feature = "amqp")]
pub use oncegate_amqp as amqp;
#[cfg(feature = "cache")]
pub use oncegate_cache as cache;
#[cfg(feature = "client")]
pub use oncegate_client as client;
#[cfg(feature = "embedded")]
pub use oncegate_embedded as embedded;
#[cfg(feature = "http")]
pub use oncegate_http as http;
#[cfg(feature = "inbox")]
pub use oncegate_inbox as inbox;
#[cfg(feature = "inbox-postgres")]
pub use oncegate_inbox_postgres as inbox_postgres;
#[cfg(feature = "experimental-kafka")]
pub use oncegate_kafka as kafka;
#[cfg(feature = "nats")]
pub use oncegate_nats as nats;
#[cfg(feature = "postgres")]
pub use oncegate_postgres as postgres;
#[cfg(feature = "redis")]
pub use oncegate_redis as redis;
#[cfg(feature = "seal")]
pub use oncegate_seal as seal;
#[cfg(feature = "experimental-sqs")]
pub use oncegate_sqs as sqs;
#[cfg(feature = "webhook")]
pub use oncegate_webhook as webhook;

#[cfg(feature = "macros")]
pub use macros::idempotent;
#[cfg(feature = "cache")]
pub use oncegate_cache::{Cache, CacheOptions, CachedStore};
#[cfg(feature = "client")]
pub use oncegate_client::{Client, Intent, RetryPolicy};
pub use oncegate_core::{IdempotencyKey, MemoryStore, Store, SystemClock};
#[cfg(feature = "embedded")]
pub use oncegate_embedded::{EmbeddedOptions, EmbeddedStore};
pub use oncegate_engine::{Attempt, Breaker, Engine, Function, FunctionError, Policy};
#[cfg(feature = "axum")]
pub use oncegate_http::KeyHeader;
#[cfg(feature = "http")]
pub use oncegate_http::{IdempotencyContext, IdempotencyLayer, Profile, Settings};
#[cfg(feature = "postgres")]
pub use oncegate_postgres::{
    Guard, PostgresOptions, PostgresStore, RunError, TransactError, TransactOutcome, Transactor,
};
#[cfg(feature = "redis")]
pub use oncegate_redis::{RedisOptions, RedisStore};
#[cfg(all(feature = "axum", feature = "postgres"))]
pub use transact_refusal::TransactRefusal;
