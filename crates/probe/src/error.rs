//! The errors of a probe that cannot run.

/// The reason why an API could not be probed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// The description of the operation has mistakes: one per line.
    #[error("{0}")]
    Operation(String),
    /// The address or an option is wrong, and nothing was sent.
    #[error("{0}")]
    Usage(String),
    /// An address is not on this machine, and the operator has not confirmed it.
    #[error(
        "{0} is not an address of this machine; a probe sends real requests that take effect there. \
         If you may do that, repeat the command with --yes"
    )]
    NotLoopback(String),
    /// The API did not execute a plain request, so nothing could be tested.
    #[error("{0}")]
    Unusable(String),
}

/// The reason why one row was not tested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Untested(pub(crate) String);

impl Untested {
    pub(crate) fn new(reason: impl Into<String>) -> Self {
        Self(reason.into())
    }
}
