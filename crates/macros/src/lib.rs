//! `#[idempotent]`, which the crate `oncegate` has under its feature `macros`.
//!
//! What stands in the attribute is read here, and what is wrong with it is said here; what it does when it runs is
//! `oncegate::Function`.

mod expand;
mod options;
mod template;
#[cfg(test)]
mod tests;

use proc_macro::TokenStream;

/// Makes an async function or method take effect once for each key.
///
/// Its body becomes a function in the sense of `oncegate::Function`, whose page says what happens to a call. The signature stays
/// as it is written.
///
/// ```
/// # use std::sync::Arc;
/// # use oncegate::{MemoryStore, SystemClock};
/// use oncegate::{Engine, FunctionError, idempotent};
///
/// #[derive(Clone, serde::Serialize)]
/// struct Order { id: u64, cents: u64 }
///
/// #[idempotent(key = "order-{order.id}", scope = "charge", errors = "store", attempt = attempt)]
/// async fn charge(engine: &Engine, order: Order) -> Result<String, FunctionError<String>> {
///     if order.cents == 0 {
///         return Err("nothing to pay".to_owned());
///     }
///     // … the bank is called with attempt.downstream_key("bank") …
///     Ok(format!("paid {}", order.cents))
/// }
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let engine = Engine::new(Arc::new(MemoryStore::new(SystemClock::new())));
/// let order = Order { id: 7, cents: 500 };
/// assert_eq!(charge(&engine, order.clone()).await.unwrap(), "paid 500");
/// assert_eq!(charge(&engine, order.clone()).await.unwrap(), "paid 500"); // replayed
/// assert!(matches!(charge(&engine, Order { cents: 900, ..order }).await, Err(FunctionError::KeyReused)));
/// # });
/// ```
///
/// # Options
/// These three have to be there:
/// - `key = "order-{order.id}-{version}"`: text, and in braces arguments, their fields and what their methods without arguments
///   give, as they are displayed. Two lists of values never make one key, and an empty value makes none (`KeyText` says how).
///   Without quotes it is an expression that gives a key.
/// - `scope = "charge"`: what keys are unique within, the name of the function in the store. It stays when the function moves.
///
/// - `errors = "store"`, `"release"` or `"unknown"`: what becomes of the key when the body returns an error. `"store"`: every later
///   call gets the same error. `"release"`: the key is free and the next call runs again, **only if an error means that nothing
///   took effect**. `"unknown"`: it may have taken effect, so later calls are refused until an operator says. Or the path of a
///   `fn(&E) -> ErrorFate`, or a policy such as `ReleasedIf(…)` or `StepErrors {}`.
///
/// What is looked up and compared:
/// - `engine = self.engine`: an expression that gives the engine. By default it is the argument whose type is `Engine`,
///   `&Engine`, `Arc<Engine>`, `State<Engine>` and the like.
/// - `caller = tenant`: keys are unique within this caller, too: an expression with the octets that identify it.
/// - `fingerprint(order.cents, currency)`: what is compared where the key was used before. By default all arguments are, but
///   `self` and the engine.
/// - `skip(bank, trace)`: all arguments but these are compared.
///
/// What follows:
/// - `retain = "24h"`, `lease = "30s"`, `wait = "5s"`: as in `Policy`, in ms, s, m, h or d.
/// - `on_abandoned = "park"` or `"reexecute"`: what a call does where an earlier one was cut off.
/// - `policy = expression`: what these four are set on; `Policy::default()` by default.
///
/// How it runs:
/// - `attempt = attempt`: what the body calls its `Attempt`.
/// - `detached`: the body runs in a task of its own, and goes on if the caller goes away; it has to own what it uses, and to be
///   `Send`. This is the default if the types of all arguments own what they have, but for an engine by reference.
/// - `in_place`: the body runs where it is called, so that it may borrow. This is the default with `self`, generics, references,
///   lifetimes, `impl` or `dyn` in the arguments. Dropped in the middle, by a time-out or because a client hung up, the body
///   stops there, and the outcome is unknown: the key stays taken.
/// - `crate = path`: where the crate `oncegate` is.
///
/// `#[async_trait]` rewrites the methods of a trait before `#[idempotent]` sees them: put the attribute on an `async fn` outside
/// of the trait, and call that in the method.
///
/// # What the function returns
/// Not every call can have the function's value, so the caller's error is more than the body's.
/// - With `Result<T, FunctionError<E>>` the body returns a `Result<T, E>`.
/// - With any other `Result<T, E>` the body returns the same, and `E: From<FunctionError<E>>` says what its caller hears where
///   there is no value. `Box<dyn Error + Send + Sync>` and `anyhow::Error` do as they are. So it fits handlers and traits
///   whose signatures are given.
///
/// `T: Serialize + DeserializeOwned`, and what is compared is `Serialize`.
///
/// # Mistakes
/// What can be known when it is compiled is said then: an option that is none, a key without a value in it, an argument that
/// is not there, a lease longer than one may be. All of these are refused:
///
/// ```compile_fail
/// # use oncegate::{Engine, FunctionError, idempotent};
/// #[idempotent(key = "order-{ordr}", scope = "charge", errors = "store")] // there is no argument `ordr`; did you mean `order`?
/// async fn charge(engine: &Engine, order: u64) -> Result<(), FunctionError<String>> { Ok(()) }
/// ```
/// ```compile_fail
/// # use oncegate::{Engine, FunctionError, idempotent};
/// #[idempotent(key = "order-{order}", scope = "charge", errors = "store", lease = "2h")] // `lease` is 7200s; it must be from 100ms to 3600s
/// async fn charge(engine: &Engine, order: u64) -> Result<(), FunctionError<String>> { Ok(()) }
/// ```
/// ```compile_fail
/// # use oncegate::{Engine, FunctionError, idempotent};
/// struct Connection; // the trait bound `Connection: Serialize` is not satisfied: skip(connection)
/// #[idempotent(key = "order-{order}", scope = "charge", errors = "store")]
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
/// This one is not:
/// ```
/// # use oncegate::{Engine, FunctionError, idempotent};
/// #[idempotent(key = "order-{order}", scope = "charge", errors = "store", lease = "1h")]
/// async fn charge(engine: &Engine, order: u64) -> Result<(), FunctionError<String>> { Ok(()) }
/// ```
#[proc_macro_attribute]
pub fn idempotent(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let item = proc_macro2::TokenStream::from(item);
    expand::idempotent(attribute.into(), item).unwrap_or_else(|error| error.into_compile_error()).into()
}
