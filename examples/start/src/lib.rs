//! The programs of the pages in `docs/start` are the binaries of this package. `tests/pages.rs` runs the pages.
