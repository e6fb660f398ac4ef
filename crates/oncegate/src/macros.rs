//! The attribute `#[idempotent]`.

/// Makes an async function or method take effect once for each key.
///
/// The body becomes a function in the sense of [`Function`](crate::Function), whose page describes the life of a call. The
/// signature stays as it is written.
///
/// ```
/// # use std::sync::Arc;
/// # use oncegate::MemoryStore;
/// use oncegate::{Engine, FunctionError, idempotent};
///
/// #[derive(Clone, serde::Serialize)]
/// struct Order { id: u64, cents: u64 }
///
/// #[idempotent(key = "order-{order.id}", scope = "charge", errors = "keep", attempt = attempt)]
/// async fn charge(engine: &Engine, order: Order) -> Result<String, FunctionError<String>> {
///     if order.cents == 0 {
///         return Err("nothing to pay".to_owned());
///     }
///     // … the bank is called with attempt.downstream_key("bank") …
///     Ok(format!("paid {}", order.cents))
/// }
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let engine = Engine::new(MemoryStore::default());
/// let order = Order { id: 7, cents: 500 };
/// assert_eq!(charge(&engine, order.clone()).await.unwrap(), "paid 500");
/// assert_eq!(charge(&engine, order.clone()).await.unwrap(), "paid 500"); // replayed
/// assert!(matches!(charge(&engine, Order { cents: 900, ..order }).await, Err(FunctionError::KeyReused)));
/// # });
/// ```
///
/// # Options
/// These three are required:
/// - `key = "order-{order.id}-{version}"`: text, with values in braces. A value is an argument, a field of it, or the result of
///   a method without arguments, and is written with `Display`. Different lists of values never make the same key, and an
///   empty value is refused (see `KeyText`). Without quotes, it is an expression for the key.
/// - `scope = "charge"`: the namespace of the keys, and the name of the function in the store. Do not change it when the function
///   moves.
/// - `errors = "keep"`, `"release"` or `"unknown"`: the rule for the key when the body returns an error. `"keep"`: every later
///   call gets the same error. `"release"`: the key becomes free and the next call runs again. **Use it only if an error means
///   that nothing took effect.** `"unknown"`: the body may have taken effect, so later calls are refused until an operator
///   decides. Other values are the path of a `fn(&E) -> ErrorFate`, such as `StepError::fate`, and `ReleaseIf(…)`.
///
/// Engine, caller and comparison:
/// - `engine = self.engine`: an expression for the engine. The default is the argument whose type is `Engine`, `&Engine`,
///   `Arc<Engine>`, `State<Engine>` or similar.
/// - `caller = tenant`: an expression for the bytes that identify the caller. Keys are then unique within each caller.
/// - `fingerprint(order.cents, currency)`: the values that are compared when the key was used before. The default is all
///   arguments except `self` and the engine.
/// - `skip(bank, trace)`: compares all arguments except these.
///
/// Policy:
/// - `retain = "24h"`, `lease = "30s"`, `wait = "5s"`: as in `Policy`, in ms, s, m, h or d.
/// - `on_abandoned = "park"` or `"reexecute"`: the action of a call whose key has an abandoned attempt.
/// - `policy = expression`: the policy that these four options change. The default is `Policy::default()`.
///
/// Execution:
/// - `attempt = attempt`: the name of the `Attempt` in the body.
/// - `detached`: the body runs in a task of its own and continues if the caller goes away. It must own the values that it uses,
///   and be `Send`. This is the default if the types of all arguments own their values. An engine by reference is allowed.
/// - `in_place`: the body runs in the caller's task, so it may borrow. This is the default with `self`, generics, references,
///   lifetimes, `impl` or `dyn` in the arguments. If the future is dropped halfway, because of a time-out or because a client
///   disconnected, the body stops at that point. Its outcome is then unknown, and the key stays claimed.
/// - `crate = path`: the path of the crate `oncegate`.
///
/// `#[async_trait]` rewrites the methods of a trait before `#[idempotent]` sees them. Put the attribute on an `async fn` outside
/// of the trait, and call that function in the method.
///
/// # Return type
/// Some calls cannot get the function's value, so the caller's error type has more cases than the body's.
/// - With `Result<T, FunctionError<E>>`, the body returns a `Result<T, E>`.
/// - With any other `Result<T, E>`, the body returns the same type. `E: From<FunctionError<E>>` makes the error for a caller
///   that gets no value. `Box<dyn Error + Send + Sync>` and `anyhow::Error` work unchanged. So the attribute fits handlers and
///   traits whose signatures are fixed.
///
/// `T` must be `Serialize + DeserializeOwned`, and the compared values must be `Serialize`.
///
/// # Mistakes
/// The compiler reports every mistake that it can detect: an unknown option, a key without a value, an unknown argument, a
/// lease that is too long. All of these are refused:
///
/// ```compile_fail
/// # use oncegate::{Engine, FunctionError, idempotent};
/// #[idempotent(key = "order-{ordr}", scope = "charge", errors = "keep")] // there is no argument `ordr`; did you mean `order`?
/// async fn charge(engine: &Engine, order: u64) -> Result<(), FunctionError<String>> { Ok(()) }
/// ```
/// ```compile_fail
/// # use oncegate::{Engine, FunctionError, idempotent};
/// #[idempotent(key = "order-{order}", scope = "charge", errors = "keep", lease = "2h")] // `lease` is 7200s; it must be from 100ms to 3600s
/// async fn charge(engine: &Engine, order: u64) -> Result<(), FunctionError<String>> { Ok(()) }
/// ```
/// ```compile_fail
/// # use oncegate::{Engine, FunctionError, idempotent};
/// struct Connection; // the trait bound `Connection: Serialize` is not satisfied: skip(connection)
/// #[idempotent(key = "order-{order}", scope = "charge", errors = "keep")]
/// async fn charge(engine: &Engine, connection: Connection, order: u64) -> Result<(), FunctionError<String>> { Ok(()) }
/// ```
/// ```compile_fail
/// # use oncegate::{Engine, FunctionError, idempotent};
/// struct Mine; // the trait bound `Mine: From<FunctionError<Mine>>` is not satisfied
/// #[idempotent(key = "order-{order}", scope = "charge", errors = "unknown")]
/// async fn charge(engine: &Engine, order: u64) -> Result<(), Mine> { Ok(()) }
/// ```
/// ```compile_fail
/// # use oncegate::{Engine, FunctionError, idempotent};
/// #[idempotent(key = "order-{order}", scope = "charge")] // an idempotent function needs `errors = …`
/// async fn charge(engine: &Engine, order: u64) -> Result<(), FunctionError<String>> { Ok(()) }
/// ```
/// This function compiles:
/// ```
/// # use oncegate::{Engine, FunctionError, idempotent};
/// #[idempotent(key = "order-{order}", scope = "charge", errors = "keep", lease = "1h")]
/// async fn charge(engine: &Engine, order: u64) -> Result<(), FunctionError<String>> { Ok(()) }
/// ```
pub use oncegate_macros::idempotent;
