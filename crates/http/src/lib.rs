//! Makes retries of HTTP requests safe: a Tower layer for axum, hyper and tonic services.
//!
//! Implements draft-ietf-httpapi-idempotency-key-header-07. The first request with a key executes. Every other request with
//! that key gets the first one's response. If it is unknown whether the first one took effect, the layer reports that instead
//! of guessing.
//!
//! # What happens to a request, exactly
//! 1. A request whose method is not covered (by default all but POST and PATCH), or that has no key and needs none, passes
//!    through untouched; its body streams.
//! 2. The caller's scope is derived ([`CallerScope`]); then the key is read. A key that is present but malformed is
//!    a 400, always.
//! 3. The body is read up to [`Settings::with_max_request_body`] and fingerprinted.
//! 4. The record is claimed. Completed: the stored response, with `Idempotent-Replayed: true`. Another request under the same
//!    key: 422. In progress: 409 with `Retry-After`, or the response after waiting for it. Outcome unknown: 500.
//! 5. If the claim is granted, the handler runs under a lease that is renewed. It is a part of the response's future. If that is
//!    dropped, because the client hung up or a time-out passed, the handler goes on in a task of its own. Its key and attempt are
//!    in the request's extensions ([`IdempotencyContext`]).
//! 6. Its response is classified by status, policy and [`StoreDirective`], stored durably, and then sent.
//!
//! Refusals are responses and never errors. Their bodies are problem details (RFC 9457) with a member `retry`: `same-key`,
//! `new-key`, `fix-request` or `stop`. They reveal nothing of the stored request or response. A gRPC call is refused with a
//! gRPC status and without a body: [`Condition::grpc_code`].
//!
//! # Caveats
//! - A page of another origin can read a replay or a refusal only if a CORS layer outside of this one allows it, such as
//!   `tower_http::cors::CorsLayer`. Expose `Idempotency-Key`, `Idempotent-Replayed`, `Idempotency-Status`,
//!   `Retry-After`, `RateLimit`, `RateLimit-Policy` and [`Settings::profile_headers`].
//! - Put the layer inside authentication (a replay must not bypass it), inside compression (a stored response must not be
//!   compressed for one client), and outside of everything that changes the request's path, such as axum's `nest`.
//! - A response that has no end (server-sent events, gRPC, upgrades) or is larger than [`Settings::with_max_response_body`]
//!   streams to the first client and leaves a tombstone: a retry is refused, because the request was processed and its
//!   response was not kept. Nothing runs twice.
//! - The body of a request with a key is held in memory until the handler takes it. [`IdempotencyLayer::with_request_budget`]
//!   limits all of them together.
//!
//! # Example
//! ```
//! use std::{convert::Infallible, sync::Arc};
//! use bytes::Bytes;
//! use http::{Request, Response, StatusCode};
//! use http_body_util::{BodyExt, Full};
//! use oncegate_core::MemoryStore;
//! use oncegate_engine::Engine;
//! use oncegate_http::{IdempotencyLayer, RequestBody};
//! use tower_layer::Layer;
//! use tower_service::Service;
//!
//! #[derive(Clone)]
//! struct Payments;
//!
//! impl Service<Request<RequestBody<Full<Bytes>>>> for Payments {
//!     type Response = Response<Full<Bytes>>;
//!     type Error = Infallible;
//!     type Future = std::future::Ready<Result<Self::Response, Infallible>>;
//! #   fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Infallible>> {
//! #       std::task::Poll::Ready(Ok(()))
//! #   }
//!     fn call(&mut self, _: Request<RequestBody<Full<Bytes>>>) -> Self::Future {
//!         std::future::ready(Ok(Response::new(Full::from("paid"))))
//!     }
//! }
//!
//! # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
//! let engine = Engine::new(MemoryStore::default());
//! let mut payments = IdempotencyLayer::new(engine).layer(Payments);
//! let pay = |body: &'static str| {
//!     Request::post("/payments").header("Idempotency-Key", "order-123").body(Full::from(body)).unwrap()
//! };
//!
//! let first = payments.call(pay("5 EUR")).await.unwrap();
//! assert_eq!(first.headers().get("Idempotent-Replayed"), None);
//! let again = payments.call(pay("5 EUR")).await.unwrap();
//! assert_eq!(again.headers()["Idempotent-Replayed"], "true");
//! assert_eq!(again.into_body().collect().await.unwrap().to_bytes(), "paid");
//!
//! // Another request under the same key is refused.
//! let other = payments.call(pay("9 EUR")).await.unwrap();
//! assert_eq!(other.status(), StatusCode::UNPROCESSABLE_ENTITY);
//! # });
//! ```

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod authorize;
mod body;
mod budget;
mod canonical;
mod carrier;
mod client_certificate;
mod context;
mod credential;
mod event;
mod execute;
mod first_sent;
mod grpc;
mod headers;
mod identity;
mod in_flight;
#[cfg(feature = "jwt")]
mod jwt;
mod key;
mod layer;
mod mcp;
mod method;
mod missing_response;
mod overrides;
mod path;
mod possible_refusals;
mod profile;
mod rate_limit;
mod reconcile;
mod redaction;
mod refusal;
mod scope;
mod service;
mod settings;
mod shadow;
mod tap;
mod upstream;

pub use authorize::{Authorization, Authorize};
pub use body::{BoxError, RequestBody, ResponseBody};
pub use client_certificate::{CertificateName, ClientCertificate};
#[cfg(feature = "axum")]
pub use context::axum_extractor::KeyHeader;
pub use context::{
    CloseDelimited, IdempotencyContext, LeaseExpired, NoUpstreamResponse, ProxyRefusal, StoreDirective,
    UpstreamResponse,
};
pub use event::{
    Disposition, KeyedEvent, RequestEvent, RequestObserver, RequestPhase, RequestWatch, ShadowVerdict,
    TraceRef, WatchedRequest,
};
pub use grpc::{GrpcCode, GrpcForm};
#[cfg(feature = "jwt")]
pub use jwt::{JwksFetch, JwksSource, JwtAlgorithm, JwtVerifier};
pub use key::{KeyFormat, KeyGrammar, KeyHeaderError, KeySyntax};
pub use layer::{IdempotencyLayer, LimitUsage};
pub use mcp::{Protocol, ToolPolicies, ToolPolicy};
pub use path::{PathCase, PathPattern, TrailingSlash};
pub use profile::{
    BodyComparison, KeyScope, Profile, ProfileError, ProfileErrors, RefusalRow, ServerErrors,
    UncoveredMethods, nearest,
};
pub use rate_limit::{RateLimitKind, RateLimits, RateQuota};
pub use reconcile::{Reconcile, Reconciled};
pub use redaction::{RedactionCounts, RedactionOutcome};
pub use refusal::{Condition, Refusal, RetryAdvice};
pub use scope::{CallerPart, CallerScope};
pub use service::{Idempotency, ResponseFuture};
pub use settings::{AuthorityRole, CompletedBy, Settings};
pub use shadow::SHADOW_OPERATION;
