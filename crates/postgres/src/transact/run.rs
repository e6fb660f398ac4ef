//! What `transact` runs.

use std::future::Future;

use super::error::RunError;

/// A run: `async |connection| { …; Ok(value) }`, where every error becomes a [`RunError`] by `?`.
///
/// Every async closure of this shape is one; it is for nobody to implement. It stands here because the language cannot yet say
/// of an `AsyncFnMut` that its futures can be sent between threads, as every service needs it.
pub trait RunOn<C, T>:
    AsyncFnOnce(C) -> Result<T, RunError> + FnOnce(C) -> <Self as RunOn<C, T>>::Fut
{
    /// What it returns.
    type Fut: Future<Output = Result<T, RunError>>;
}

impl<F, Fut, C, T> RunOn<C, T> for F
where
    F: AsyncFnOnce(C) -> Result<T, RunError> + FnOnce(C) -> Fut,
    Fut: Future<Output = Result<T, RunError>>,
{
    type Fut = Fut;
}
