//! The error of opening a store.

use std::io;
use std::path::PathBuf;

/// The reason why a store does not open. Its `Display` is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmbeddedOpenError {
    /// Another process, or this one, has the directory open. Only one owner at a time is allowed.
    #[error(
        "the store in {} is in use by {}; only one process can own it at a time: stop that process first, or use another directory",
        .dir.display(), owner(*.pid)
    )]
    InUse {
        /// The directory.
        dir: PathBuf,
        /// The process id of the owner, if it could be read.
        pid: Option<u32>,
    },
    /// A newer program wrote the file. Nothing was changed.
    #[error("the store in {} has format version {found}, and this program knows versions up to {known}; no \
         record was changed: start a newer version of the program", .dir.display())]
    NewerFormat {
        /// The directory.
        dir: PathBuf,
        /// The version of the file.
        found: u64,
        /// The newest version that this program knows.
        known: u64,
    },
    /// The file is incomplete or changed. Nothing was written to it, and no missing record leads to an execution.
    #[error("{} is damaged: {damage}; nothing was changed: keep a copy, and restore the directory from a backup, or \
         copy what can be read with `oncegate check --salvage DIR` (a start without the missing records would execute their \
         requests again)", .file.display())]
    Damaged {
        /// The file.
        file: PathBuf,
        /// The damage, in words.
        damage: String,
    },
    /// The store is a copy that [`salvage`](crate::salvage()) made, and its losses were not accepted yet.
    #[error("the store is a copy of a damaged one, and requests whose records are missing in it would execute again: settle the losses \
         that {} lists, and remove this file to accept them", .file.display())]
    Salvaged {
        /// The file that lists the losses.
        file: PathBuf,
    },
    /// The directory or the file cannot be read or written.
    #[error("cannot {operation}{}", remedy(source))]
    Io {
        /// The operation that failed, and the path.
        operation: String,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl EmbeddedOpenError {
    /// Returns `true` if the disk, or the user's quota of it, is full, or the process may not write files of this size.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Io { source, .. } if is_full(source))
    }

    pub(crate) fn io(operation: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let operation = operation.into();
        move |source| Self::Io { operation, source }
    }
}

/// The task of the operator, for the error that is met most often.
fn remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::PermissionDenied => {
            " (run this program as the user that owns the store, or give the directory and its files to this user with chown)"
        }
        _ => "",
    }
}

fn owner(pid: Option<u32>) -> String {
    match pid {
        Some(pid) if pid == std::process::id() => format!("this process (pid {pid})"),
        Some(pid) => format!("the process with pid {pid}"),
        None => "another process".to_owned(),
    }
}

/// Returns `true` if the disk, or the user's quota of it, is full, or the process may not write files of this size (`ulimit -f`).
pub(crate) fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}
