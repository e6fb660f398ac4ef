//! Drives the protocol of [`oncegate_core`] with futures: claims a record, renews its lease, and completes it.
//!
//! An [`Engine`] drives one store. A granted claim comes with a [`Permit`]. While the permit lives, the engine renews its lease
//! in the background. Its holder executes the operation and then completes or releases the permit; the store checks the token.
//! Duplicates in the same process ask the store once, and are woken when the owner ends. Every end has an [`Event`].
//!
//! In detail:
//! 1. The first claim for a record asks the store. Claims of the same process that come in the meantime wait for its response.
//! 2. If the claim is granted, the caller executes. Other claims get `InProgress`, or wait for the response if their policy
//!    allows it.
//! 3. The lease is renewed after a third of its length. A renewal that fails is tried again. If another attempt owns the
//!    record, [`Attempt::lost`] fires. If the lease ended because the store was unreachable, it is renewed when the store is
//!    back, unless another attempt claimed the record.
//! 4. `complete` returns when the completion is durable. If the store is unreachable, the completion is tried again in the
//!    background ([`SettleOutcome::Deferred`]). If it never succeeds, the record ends as abandoned, as after a crash.
//! 5. A permit that is dropped leaves its record in progress until the lease ends.
//! 6. With a [`Breaker`], commands to an unreachable store fail in microseconds instead of after a time-out, and deferred work
//!    continues a quarter of a second after the store is back.
//! 7. If the operation completes its record in its own transaction, [`Permit::report`] reads the committed record and adds
//!    the response if it is missing. If all processes died before that, a later claim may get an [`ResponsePermit`] to add it.
//! 8. A [`Function`] does all of this for a function of the program: it runs once for each key, and later calls get its value.
//! 9. An attempt in [steps](step) records each finished step. The next attempt, in any process, continues after them.
//!
//! ```
//! use oncegate_core::{
//!     Completion, Fingerprint, IdempotencyKey, Label, MemoryStore, RecordId, Scope, StoredResponse,
//! };
//! use oncegate_engine::{ClaimOutcome, ClaimRequest, Engine, Policy};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
//! let engine = Engine::new(MemoryStore::default());
//! let key = IdempotencyKey::new(b"order-123").unwrap();
//! let pay = |input: &[u8]| ClaimRequest {
//!     id: RecordId::derive(&Scope::single_tenant(), &key),
//!     fingerprint: Fingerprint::of_parts("pay", &[input]),
//!     label: Label::default(),
//!     policy: Policy::default(),
//! };
//!
//! let Ok(ClaimOutcome::Execute(permit)) = engine.claim(pay(b"5")).await else { panic!("the first one executes") };
//! // … charge the card …
//! let receipt = StoredResponse::new(201, &[], &["paid 5".into()], &[]).unwrap();
//! permit.complete(Completion::Replayable(receipt)).await;
//!
//! // The retry gets the same response; another request under the same key is refused.
//! assert!(matches!(engine.claim(pay(b"5")).await, Ok(ClaimOutcome::Replay(response)) if response.body() == "paid 5"));
//! assert!(matches!(engine.claim(pay(b"9")).await, Ok(ClaimOutcome::Mismatch)));
//! # });
//! ```

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod attempt;
mod breaker;
mod conclude;
mod engine;
mod event;
mod function;
mod lead;
mod lease;
mod log_throttle;
mod operator;
mod panic;
mod pending;
mod policy;
mod renewal;
mod response;
mod retract;
mod shield;
mod single_flight;
pub mod step;
mod unknown;

pub use attempt::{Attempt, Permit, SettleOutcome};
pub use breaker::{Breaker, BreakerBuilder, BreakerState};
pub use conclude::{OperationReport, ReportOutcome, StoredForm};
pub use engine::{ClaimOutcome, ClaimRequest, Engine, EngineBuilder};
pub use event::{Event, EventKind, Observer};
pub use function::{
    Call, CompleterOptions, CompleterRound, ErrorFate, ErrorPolicy, Function, FunctionError, FunctionOutput,
    JsonError, KeyText, ReleaseIf, Resumable, StorageStatus, UnknownErrors,
};
#[doc(hidden)]
pub use function::{ErrorEnd, compared};
pub use lease::LeaseError;
pub use log_throttle::LogThrottle;
pub use oncegate_core::ConfigError;
pub use operator::{AuditTextError, Operator, ResolveError, audit_text};
pub use panic::{PanicError, catch_panic};
pub use policy::Policy;
pub use response::{AddResponseOutcome, ResponsePermit};
pub use shield::ShieldRest;
pub use step::{StepCall, StepError, StepFailure};
