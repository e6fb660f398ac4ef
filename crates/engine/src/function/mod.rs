//! Functions whose effect takes place once for each key.

mod errors;
mod key;
mod resumable;
mod run;
pub(crate) mod value;

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use oncegate_core::{
    Fingerprint, FingerprintInput, FingerprintRules, IdempotencyKey, KeyError, KeyTag, Label, OnAbandoned,
    RecordId, Scope, StoredResponse, limits,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

#[doc(hidden)]
pub use self::errors::ErrorEnd;
pub use self::errors::{ErrorFate, ErrorPolicy, FunctionError, ReleaseIf, UnknownErrors};
pub use self::key::KeyText;
pub use self::resumable::{CompleterOptions, CompleterRound, Resumable};
pub use self::run::{FunctionOutput, StorageStatus};
pub use self::value::JsonError;

use crate::attempt::Attempt;
use crate::engine::Engine;
use crate::policy::Policy;
use oncegate_core::ConfigError;

/// The first part of a function's operation. The operation of an HTTP request begins with its method, which has no colon.
const OPERATION: &[u8] = b"function:";

/// The domain that keeps the fingerprint of an input apart from that of every request.
const DOMAIN: &str = "oncegate-function-1";

/// The name of what is run without one.
const UNNAMED: &str = "run";

const DEFAULT_MAX_RESULT_BYTES: usize = 1024 * 1024;

/// A function whose effect takes place once for each key, with its name, its caller and its settings.
///
/// [`Engine::function`] makes it. Cheap to clone; make it once and keep it.
///
/// # Steps of a call
/// 1. The key is unique within the caller and the function's name. The canonical JSON of the input is compared with that of the
///    first call. Another input under the same key gives [`FunctionError::KeyReused`].
/// 2. The first call runs the function. Other calls, in any process, wait as long as the [policy](Self::with_policy) allows, and
///    then get [`FunctionError::InProgress`].
/// 3. The value is stored as JSON before the first caller gets it. Every later call gets it until the retention ends, even
///    `false`, `0`, `""`, `[]`, `None` and `()`.
/// 4. A value that JSON cannot express exactly ([`JsonError`]), or that is too large, is not stored. The first caller gets it;
///    later ones get [`FunctionError::Unreplayable`]. The function does not run again.
/// 5. An error is stored, frees the key, or leaves the outcome unknown: see [`with_errors`](Self::with_errors). After a panic
///    the outcome is always unknown.
/// 6. If the store fails, nothing runs.
///
/// # Cancellation
/// [`run`](Self::run) runs the function in a task of its own. If its future is dropped (a time-out, a client that hung up), the
/// function still runs to its end, and its result is stored. [`run_in_place`](Self::run_in_place) runs the function in the
/// future itself, so it may borrow. If that future is dropped, the function stops, and the record is left to its lease, as
/// after a crash: then the outcome is unknown, or under `reexecute` the function runs again. The key is never freed.
///
/// ```
/// # use oncegate_core::MemoryStore;
/// use oncegate_engine::{Engine, FunctionError};
///
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// let engine = Engine::new(MemoryStore::default());
/// let charge = engine.function("charge");
///
/// let pay = |cents: u64| charge.run("order-123", &cents, async move |attempt| {
///     // … charge the card, with attempt.downstream_key("card") as the key for the bank …
///     Ok::<_, String>(format!("paid {cents}, attempt {}", attempt.number()))
/// });
/// assert_eq!(pay(500).await.unwrap(), "paid 500, attempt 1");
/// assert_eq!(pay(500).await.unwrap(), "paid 500, attempt 1"); // replayed
/// assert!(matches!(pay(900).await, Err(FunctionError::KeyReused)));
/// # });
/// ```
#[derive(Clone)]
pub struct Function<P = UnknownErrors> {
    settings: Arc<Settings>,
    errors: P,
}

/// The settings that all calls of a function share.
#[derive(Clone)]
struct Settings {
    engine: Engine,
    name: Arc<str>,
    scope: Scope<'static>,
    has_caller: bool,
    /// True if the identity of the caller is empty.
    lacks_identity: bool,
    label: Label,
    policy: Policy,
    rules: FingerprintRules,
    max_result_bytes: usize,
}

impl Engine {
    /// A function of this name, whose calls take effect once for each key.
    ///
    /// The name is part of the identifier of its records. So a renamed function has new keys, and functions of the same name
    /// share keys, also in other programs on the same store, unless their engines
    /// [name their services](crate::EngineBuilder::with_service). Operators see the name as the record's operation.
    #[must_use]
    pub fn function(&self, name: &str) -> Function {
        let scope = self.service_scope(Scope::single_tenant());
        Function {
            settings: Arc::new(Settings {
                engine: self.clone(),
                name: name.into(),
                label: Label::new(self.ids().caller_tag(&scope), name),
                scope,
                has_caller: false,
                lacks_identity: false,
                policy: Policy::default(),
                rules: FingerprintRules::new(),
                max_result_bytes: DEFAULT_MAX_RESULT_BYTES,
            }),
            errors: UnknownErrors,
        }
    }

    /// Runs `run` once for this key, with the defaults: [`Function::run`] of a function named `run`. If several functions use the
    /// same keys, give them [names](Self::function).
    ///
    /// # Errors
    /// [`FunctionError`].
    pub fn run<K, I, F, Fut, T, E>(
        &self,
        key: K,
        input: &I,
        run: F,
    ) -> impl Future<Output = Result<T, FunctionError<E>>> + use<K, I, F, Fut, T, E>
    where
        K: TryInto<IdempotencyKey>,
        K::Error: Into<KeyError>,
        I: Serialize + ?Sized,
        F: FnOnce(Attempt) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Send + 'static,
    {
        self.function(UNNAMED).call(key, input).run(run)
    }
}

impl<P> Function<P> {
    /// Sets the lease, the retention and the action if an earlier call was abandoned.
    ///
    /// There is no service that could be asked about an abandoned call, so [`OnAbandoned::Reconcile`] is
    /// [`OnAbandoned::Park`] here: the outcome stays unknown.
    #[must_use]
    pub fn with_policy(self, policy: Policy) -> Self {
        let policy = match policy.on_abandoned() {
            OnAbandoned::Reconcile => policy.with_on_abandoned(OnAbandoned::Park),
            _ => policy,
        };
        self.with(|settings| settings.policy = policy)
    }

    /// Makes keys unique within this caller, identified by `identity`. `kind` keeps equal identities of different kinds apart. By
    /// default there is one caller. See [`Scope::caller`]. With an empty identity every call is refused with
    /// [`KeyError::EmptyValue`], because all callers without one would share their keys.
    #[must_use]
    pub fn with_caller(self, kind: &str, identity: impl AsRef<[u8]>) -> Self {
        self.with(|settings| {
            settings.has_caller = true;
            settings.lacks_identity = identity.as_ref().is_empty();
            settings.scope = settings.engine.service_scope(Scope::caller(kind, identity));
            let caller = settings.engine.ids().caller_tag(&settings.scope);
            settings.label = Label::new(caller, &settings.name);
        })
    }

    /// Sets the parts of the input's JSON that are compared: all of it by default. For example, exclude a time of sending, or
    /// include only the amount.
    #[must_use]
    pub fn with_fingerprint(self, rules: FingerprintRules) -> Self {
        self.with(|settings| settings.rules = rules)
    }

    /// Sets the largest JSON of a result, or of a stored error, in bytes: 1 MiB by default. A larger one is not stored.
    ///
    /// # Errors
    /// More than [`limits::MAX_RESPONSE_BYTES`].
    pub fn with_max_result_bytes(self, bytes: usize) -> Result<Self, ConfigError> {
        let bytes = ConfigError::check("the largest result", bytes, 0..=limits::MAX_RESPONSE_BYTES)?;
        Ok(self.with(|settings| settings.max_result_bytes = bytes))
    }

    /// Sets the effect of the function's errors on its record: a closure from the error to an [`ErrorFate`], or [`ReleaseIf`] for
    /// errors that serde does not know. By default the outcome is unknown after every error. See [`ErrorPolicy`].
    #[must_use]
    pub fn with_errors<Q>(self, errors: Q) -> Function<Q> {
        Function { settings: self.settings, errors }
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.settings.name
    }

    /// The identifier of the record of a key.
    #[must_use]
    pub fn record_id(&self, key: &IdempotencyKey) -> RecordId {
        let operation = [OPERATION, self.settings.name.as_bytes()];
        let scope = self.settings.scope.with_operation_parts(&operation);
        self.settings.engine.ids().record_id(&scope, key)
    }

    /// The response with which an [operator](crate::Operator::complete) completes a record of this function, so that later calls
    /// get this value.
    ///
    /// # Errors
    /// If JSON cannot express the value, or it is too large.
    pub fn response<T: Serialize + ?Sized>(&self, value: &T) -> Result<StoredResponse, JsonError> {
        run::response(run::VALUE, value::encode_input(value)?)
    }

    /// The fingerprint by which two calls are compared.
    fn fingerprint(&self, json: &[u8]) -> Fingerprint {
        let input =
            FingerprintInput { content_type: b"application/json", body: json, ..FingerprintInput::default() };
        let plain = Fingerprint::of_parts(DOMAIN, &[self.settings.rules.fingerprint(&input).digest()]);
        self.settings.engine.ids().fingerprint(plain)
    }

    fn with(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(Arc::make_mut(&mut self.settings));
        self
    }
}

impl<P: Clone> Function<P> {
    /// A call with this key and input. It keeps neither, so the function may take the input and change it.
    pub fn call<K, I>(&self, key: K, input: &I) -> Call<P>
    where
        K: TryInto<IdempotencyKey>,
        K::Error: Into<KeyError>,
        I: Serialize + ?Sized,
    {
        let request = key
            .try_into()
            .map_err(|error| InvalidCall::Key(error.into()))
            .and_then(|key| match self.settings.lacks_identity {
                true => Err(InvalidCall::Key(KeyError::EmptyValue)),
                false => Ok(key),
            })
            .and_then(|key| Ok((key, value::encode_input(input).map_err(InvalidCall::Input)?)))
            .map(|(key, json)| {
                let tag = self.settings.engine.ids().key_tag(&key);
                (self.record_id(&key), tag, self.fingerprint(&json))
            });
        Call { function: self.clone(), request }
    }

    /// Runs `run` in a task of its own, unless this key was used before. Dropping the future does not stop it, and its result is
    /// stored; [`Engine::drain`] waits for it. Must be called inside a tokio runtime.
    ///
    /// If `run` takes ownership of the input, use `function.call(key, &input).run(async move |attempt| …)`.
    ///
    /// # Errors
    /// [`FunctionError`].
    pub fn run<K, I, F, Fut, T, E>(
        &self,
        key: K,
        input: &I,
        run: F,
    ) -> impl Future<Output = Result<T, FunctionError<E>>> + use<P, K, I, F, Fut, T, E>
    where
        K: TryInto<IdempotencyKey>,
        K::Error: Into<KeyError>,
        I: Serialize + ?Sized,
        F: FnOnce(Attempt) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send + 'static,
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Send + 'static,
        P: ErrorPolicy<E> + Send + Sync + 'static,
    {
        self.call(key, input).run(run)
    }

    /// Runs `run` in this future, unless this key was used before. It may borrow. If the future is dropped, `run` stops, and the
    /// record is left to its lease and to its abandon policy.
    ///
    /// # Errors
    /// [`FunctionError`].
    pub fn run_in_place<K, I, F, Fut, T, E>(
        &self,
        key: K,
        input: &I,
        run: F,
    ) -> impl Future<Output = Result<T, FunctionError<E>>> + use<P, K, I, F, Fut, T, E>
    where
        K: TryInto<IdempotencyKey>,
        K::Error: Into<KeyError>,
        I: Serialize + ?Sized,
        F: FnOnce(Attempt) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        T: Serialize + DeserializeOwned,
        P: ErrorPolicy<E>,
    {
        self.call(key, input).run_in_place(run)
    }
}

impl<P> fmt::Debug for Function<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Function").field("name", &self.settings.name).finish_non_exhaustive()
    }
}

/// Returns its argument. `#[idempotent]` writes it around each argument that it compares, so that the compiler points at an
/// argument without `Serialize`.
#[doc(hidden)]
#[must_use]
pub const fn compared<T: Serialize + ?Sized>(argument: &T) -> &T {
    argument
}

/// One call of a [`Function`] that has not started.
#[must_use = "a call does nothing until one of its `run` methods is called"]
pub struct Call<P = UnknownErrors> {
    function: Function<P>,
    request: Result<(RecordId, KeyTag, Fingerprint), InvalidCall>,
}

/// The reason why a call is invalid.
#[derive(Clone, Copy)]
enum InvalidCall {
    Key(KeyError),
    Input(JsonError),
}

impl<E> From<InvalidCall> for FunctionError<E> {
    fn from(why: InvalidCall) -> Self {
        match why {
            InvalidCall::Key(error) => Self::Key(error),
            InvalidCall::Input(error) => Self::Input(error),
        }
    }
}

impl<P> fmt::Debug for Call<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let record = self.request.as_ref().ok().map(|(record, ..)| record);
        f.debug_struct("Call").field("function", &self.function).field("record", &record).finish()
    }
}
