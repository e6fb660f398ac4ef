//! What `transact`, and others who keep a transaction for somebody, run.

use std::future::Future;

use super::error::RunError;

/// A trait that every async closure with these arguments has, and that says of its future that it can be sent.
macro_rules! run {
    ($(#[$about:meta])* $name:ident($($arg:ident),+) -> $error:ty $(, for any $any:ident)?) => {
        $(#[$about])*
        pub trait $name<$($arg,)+ T $(, $any)?>:
            AsyncFnOnce($($arg),+) -> Result<T, $error>
            + FnOnce($($arg),+) -> <Self as $name<$($arg,)+ T $(, $any)?>>::Fut
        {
            /// What it returns.
            type Fut: Future<Output = Result<T, $error>>;
        }

        impl<F, Fut, $($arg,)+ T $(, $any)?> $name<$($arg,)+ T $(, $any)?> for F
        where
            F: AsyncFnOnce($($arg),+) -> Result<T, $error> + FnOnce($($arg),+) -> Fut,
            Fut: Future<Output = Result<T, $error>>,
        {
            type Fut = Fut;
        }
    };
}

run! {
    /// A run: `async |connection| { …; Ok(value) }`, where every error becomes a [`RunError`] by `?`.
    ///
    /// Every async closure of this shape is one; it is for nobody to implement. It stands here because the language
    /// cannot yet say
    /// of an `AsyncFnMut` that its futures can be sent between threads, as every service needs it.
    TransactFn(C) -> RunError
}

run! {
    /// A run with something to run on: `async |connection, message| { …; Ok(value) }`, with an error of the caller's own.
    ///
    /// Every async closure of this shape is one, as with [`TransactFn`].
    TransactFnWith(C, M) -> E, for any E
}
