//! Claims, executes under a lease that is renewed, completes: what turns the protocol of [`oncegate_core`] into futures.
//!
//! An [`Engine`] drives one store. A claim that is granted comes with a [`Permit`]; while it lives, its lease is renewed in
//! the background; whoever holds it executes and then completes or releases it, and the store checks the token.
//! Duplicates in the same process ask the store once and are woken when the owner ends. Every end has an [`Event`].
//!
//! What exactly happens:
//! 1. The first claim for a record asks the store; others in this process that come meanwhile wait for that answer.
//! 2. Granted: the caller executes. Others hear `InProgress`, or wait if their policy says so and then get the answer.
//! 3. The lease is renewed at a third of its length. A renewal that fails is tried again; if the store says that somebody
//!    else owns the record, [`Attempt::lost`] fires. A lease that ran out because the store was away is taken up again
//!    when it is back, if nobody claimed the record.
//! 4. `complete` answers when the store has it durably. If the store is out of reach, it is tried again in the background
//!    until the lease ends; after that the record ends as abandoned, and its outcome is unknown: never a second run.
//! 5. A permit that is dropped leaves its record in progress until the lease ends.
//! 6. Behind a [`Breaker`], a store that is out of reach costs microseconds and not its time-outs, and what was put off goes
//!    on a quarter of a second after it is back.
//! 7. Where the operation completes its record itself, in its own transaction, `conclude` reads what it committed and adds
//!    what is left to add: see [`Permit::conclude`]. Where everybody died before that, a claim may come with an
//!    [`AnswerPermit`], for whoever can find out the answer.
//! 8. A [`Function`] does all of this for a function of the program's own: it runs once for each key, and later calls get its
//!    value.
//! 9. An attempt in [steps](step) records what it has finished. The next one goes on after that, whoever makes it.
//!
//! ```
//! use oncegate_core::{
//!     Completion, Fingerprint, IdempotencyKey, Label, MemoryStore, RecordId, Scope, StoredResponse,
//! };
//! use oncegate_engine::{ClaimOutcome, ClaimRequest, Engine, Policy};
//!
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
//! // The retry gets the same answer; another request under the same key is refused.
//! assert!(matches!(engine.claim(pay(b"5")).await, Ok(ClaimOutcome::Replay(answer)) if answer.body() == "paid 5"));
//! assert!(matches!(engine.claim(pay(b"9")).await, Ok(ClaimOutcome::Mismatch)));
//! # });
//! ```

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod answer;
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
mod retract;
mod single_flight;
pub mod step;
mod unknown;

pub use answer::{AddAnswerOutcome, AnswerPermit};
pub use attempt::{Attempt, Permit, SettleOutcome};
pub use breaker::{Breaker, BreakerBuilder, BreakerState};
pub use conclude::{ConcludeOutcome, OperationReport};
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
pub use step::{StepCall, StepError, StepFailure};
