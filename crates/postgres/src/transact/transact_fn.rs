//! The shape of the closures that a transaction runs.

use std::future::Future;

use super::error::RunError;

/// Declares a trait for every async closure with these arguments, whose future can be required to be `Send`.
macro_rules! run {
    ($(#[$about:meta])* $name:ident($($arg:ident),+) -> $error:ty $(, for any $any:ident)?) => {
        $(#[$about])*
        pub trait $name<$($arg,)+ T $(, $any)?>:
            AsyncFnOnce($($arg),+) -> Result<T, $error>
            + FnOnce($($arg),+) -> <Self as $name<$($arg,)+ T $(, $any)?>>::Fut
        {
            /// The future of the closure.
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
    /// A run: `async |connection| { …; Ok(value) }`, in which `?` converts every error into a [`RunError`].
    ///
    /// Every async closure of this shape implements it; do not implement it yourself. It exists because the language cannot
    /// yet require that the futures of an `AsyncFnMut` are `Send`, as every service needs it.
    TransactFn(C) -> RunError
}

run! {
    /// A run with an input: `async |connection, message| { …; Ok(value) }`, with an error type of the caller.
    ///
    /// Every async closure of this shape implements it, as with [`TransactFn`].
    TransactFnWith(C, M) -> E, for any E
}
