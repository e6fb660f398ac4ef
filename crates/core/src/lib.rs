//! The vocabulary and the one pure function of Oncegate: one key, one effect.
//!
//! A caller that got no response must retry, and a retry of `POST /payments` may charge twice. [`decide`] prevents that: from a
//! record, a [`Command`] and a time it computes the write and the reply. Stores call it inside their transactions, the
//! engine drives it with futures, and the entry points (HTTP, functions, messages) turn their requests into commands.
//!
//! This crate does no I/O and draws no random numbers. It depends on no async runtime and no HTTP library. [`decide`] reads
//! no clock: a store passes the time to it.
//!
//! ```
//! use std::time::Duration;
//! use oncegate_core::{
//!     AttemptId, Claim, Command, Fingerprint, Label, OnAbandoned, Outcome, Timestamp, Write, decide,
//! };
//!
//! let claim = |attempt, input: &[u8]| Command::Claim(Claim {
//!     attempt: AttemptId::new(attempt),
//!     fingerprint: Fingerprint::of_parts("example", &[input]),
//!     lease: Duration::from_secs(30),
//!     retention: Duration::from_secs(86_400),
//!     on_abandoned: OnAbandoned::Park,
//!     label: Label::default(),
//! });
//! let now = Timestamp::from_millis(1_000);
//!
//! let first = decide(None, &claim(1, b"pay 5"), now);
//! assert!(matches!(first.outcome, Outcome::Execute(_)));
//! let Write::Put(record) = first.write else { panic!("a claim is written down") };
//!
//! // The same request again, while the first one runs; and another request under the same key.
//! assert!(matches!(decide(Some(&record), &claim(2, b"pay 5"), now).outcome, Outcome::InProgress { .. }));
//! assert_eq!(decide(Some(&record), &claim(3, b"pay 9"), now).outcome, Outcome::Mismatch);
//! // Its owner is gone: it is unknown whether it paid.
//! let later = now.after(Duration::from_secs(31));
//! assert_eq!(decide(Some(&record), &claim(4, b"pay 5"), later).outcome, Outcome::Unknown);
//! ```

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod clock;
pub mod codec;
mod config;
mod decide;
mod delegate;
mod derived_key;
mod error_chain;
pub mod fingerprint;
mod id;
mod id_guard;
mod id_secret;
pub mod limits;
mod listener;
mod map;
mod memory;
mod record;
mod response;
mod server_clock;
mod step;
mod store;
mod survey;
mod watch;

pub use clock::{Clock, ClockSkew, LastWrite, StoreClock, SystemClock, Timestamp};
pub use config::ConfigError;
pub use decide::{
    Claim, Command, Complete, Completion, Decision, Forget, Grant, OnAbandoned, Outcome, RecordStep, Release,
    Renew, Replacement, Resolution, Resolve, Rewrite, Write, decide,
};
pub use error_chain::ErrorChain;
pub use fingerprint::{
    Fingerprint, FingerprintInput, FingerprintRules, JsonPointer, JsonPointerError, NaturalKey,
    NaturalKeyError,
};
pub use id::{
    AttemptId, CallerTag, FencingToken, IdempotencyKey, KeyError, KeyTag, RecordId, Scope, ServiceName,
    ServiceNameError,
};
pub use id_guard::{CheckTime, ID_SECRET_RECORD, IdGuard, IdMark, IdProblem};
pub use id_secret::{IdScheme, IdSecret, IdSecretError, IdSecretName};
pub use listener::{ChangeListener, ChangeSource, SessionEnd, listen};
pub use map::{RecordHashState, RecordHasher, RecordMap, Sharded};
pub use memory::MemoryStore;
pub use record::{Label, Record, RecordedResponse, State, StateName, StateSet};
pub use response::{ResponseError, StoredResponse};
pub use server_clock::ServerClock;
pub use step::{Step, StepLimitError, Steps};
pub use store::{
    Advisory, AuditEntry, Capabilities, Durability, Extent, Fencing, IntoStore, ListPage, ListQuery,
    RecordCount, Store, StoreError, StoreErrorKind, StoreFuture, StoreUsage, Survey, SurveyQuery, TimePlace,
};
pub use survey::SurveyTally;
pub use watch::{Watcher, Watchers};
