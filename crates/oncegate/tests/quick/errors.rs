//! An error displays only itself. Its cause is its source, and the code that reports the error prints the chain.

use std::error::Error;
use std::io;
use std::time::Duration;

use oncegate::client::{
    AttemptFailure, AttemptFailureKind, Client, Intent, IntentError, RetryPolicy, Transport,
};
use oncegate::core::{ConfigError, ErrorChain, IdempotencyKey, ResponseError, StoreError};
use oncegate::embedded::EmbeddedOpenError;
use oncegate::engine::{AuditTextError, FunctionError, JsonError, LeaseError, ResolveError};
use oncegate::inbox::{ConsumerError, PublishError, SourceError};
use oncegate::postgres::{GuardError, InsertError, TransactError, sqlx};

type Boxed = Box<dyn Error>;

const CAUSE: &str = "the cause that was given";

fn cause() -> io::Error {
    io::Error::other(CAUSE)
}

fn store() -> StoreError {
    StoreError::unavailable("the store is away").with_source(cause())
}

fn not_json() -> serde_json::Error {
    let pairs = std::collections::HashMap::from([((1, 2), 3)]);
    serde_json::to_string(&pairs).unwrap_err()
}

fn key() -> oncegate::core::KeyError {
    IdempotencyKey::new(Vec::new()).unwrap_err()
}

/// Every public error that has a source.
fn with_sources() -> Vec<Boxed> {
    vec![
        Box::new(store()),
        Box::new(EmbeddedOpenError::Io { operation: "open the directory".to_owned(), source: cause() }),
        Box::new(ResolveError::Store(store())),
        Box::new(ResolveError::Reason(AuditTextError::Empty)),
        Box::new(LeaseError::Store(store())),
        Box::new(FunctionError::<String>::Store(store())),
        Box::new(FunctionError::<String>::Key(key())),
        Box::new(FunctionError::<String>::Input(JsonError::NotFinite)),
        Box::new(InsertError::Database(sqlx::Error::Io(cause()))),
        Box::new(TransactError::Failed(Box::new(cause()))),
        Box::new(TransactError::Store(store())),
        Box::new(TransactError::TooLarge(ResponseError::TooLarge)),
        Box::new(TransactError::Unserializable(not_json())),
        Box::new(GuardError::Store(store())),
        Box::new(GuardError::Response(store())),
        Box::new(SourceError::transient("the queue gives no messages").with_source(cause())),
        Box::new(PublishError::refused(cause())),
        Box::new(PublishError::unconfirmed(cause())),
        Box::new(ConsumerError::Config(ConfigError::new("no identity"))),
        Box::new(ConsumerError::Source(SourceError::fatal("the queue is gone").with_source(cause()))),
        Box::new(AttemptFailure::new(AttemptFailureKind::NotSent, cause())),
    ]
}

#[track_caller]
fn displays_only_itself(error: &(dyn Error + 'static)) {
    let chain = ErrorChain(error).to_string();
    let mut next = Some(error);
    while let Some(error) = next {
        let text = error.to_string();
        if let Some(source) = error.source() {
            // Libraries repeat their cause in their own text; the chain leaves the repetition out.
            let is_ours = !error.is::<sqlx::Error>();
            let cause = source.to_string();
            assert!(!is_ours || !text.contains(&cause), "{text:?} has its source in it: {cause:?}");
            assert_eq!(chain.matches(&cause).count(), 1, "{chain:?} has {cause:?} not once");
        }
        next = error.source();
    }
}

#[test]
fn no_error_displays_its_source() {
    for error in with_sources() {
        assert!(error.source().is_some(), "{error:?} has no source");
        displays_only_itself(&*error);
    }
}

/// An error that has nothing to add to its cause displays the cause, and does not return it as its source as well.
#[test]
fn a_transparent_error_has_the_source_of_its_cause() {
    let key = IdempotencyKey::new("").unwrap_err();
    let error = IntentError::Key(key);
    assert_eq!(error.to_string(), IdempotencyKey::new("").unwrap_err().to_string());
    assert!(error.source().is_none());
}

struct Refusing;

impl Transport for Refusing {
    type Body = http_body_util::Full<bytes::Bytes>;

    async fn send(
        &self,
        _: http::Request<bytes::Bytes>,
    ) -> Result<http::Response<Self::Body>, AttemptFailure> {
        Err(AttemptFailure::new(AttemptFailureKind::NotSent, store()))
    }
}

#[tokio::test]
async fn an_unfinished_call_has_the_errors_of_its_transport_once() {
    let policy = RetryPolicy::default().with_max_attempts(2).unwrap();
    let policy = policy.with_backoff(Duration::from_millis(1), Duration::from_millis(1)).unwrap();
    let client = Client::new(Refusing).with_policy(policy);
    let open = client.send(&Intent::post("http://localhost/pay").unwrap()).await.unwrap_err();
    displays_only_itself(&open);
    let chain = ErrorChain(&open).to_string();
    assert!(chain.ends_with("it took no effect): the store is away: the cause that was given"), "{chain}");
}
