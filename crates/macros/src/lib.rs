//! The attribute `#[idempotent]`, which the crate `oncegate` re-exports with its feature `macros`.
//!
//! This crate parses the attribute, reports mistakes in it, and writes a call of `oncegate::Function`. The behaviour at run
//! time is that of `Function`. The documentation of the attribute, and its examples, are in `oncegate`: they need that crate, and
//! for the tests of a procedural macro it would be compiled a second time.

mod expand;
mod options;
mod template;
#[cfg(test)]
mod tests;

use proc_macro::TokenStream;

/// Makes an async function or method take effect once for each key: see `oncegate::idempotent`.
#[proc_macro_attribute]
pub fn idempotent(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let item = proc_macro2::TokenStream::from(item);
    expand::idempotent(attribute.into(), item).unwrap_or_else(|error| error.into_compile_error()).into()
}
