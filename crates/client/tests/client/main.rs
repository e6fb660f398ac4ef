//! The client through its public interface.

#[cfg(all(feature = "reqwest", feature = "tower"))]
mod hostile;
#[cfg(all(feature = "reqwest", feature = "tower", feature = "http2"))]
mod http2;
#[cfg(all(unix, feature = "journal"))]
mod journal;
#[cfg(feature = "tower")]
mod layer;
mod policy;
#[cfg(feature = "tower")]
mod support;
