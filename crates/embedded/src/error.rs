//! Why a store does not open.

use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::database::is_full;

/// Why a store does not open. Its `Display` is a sentence for whoever runs the program.
#[derive(Debug)]
#[non_exhaustive]
pub enum OpenError {
    /// Another process, or this one, has the directory open. One process owns it at a time.
    InUse {
        /// The directory.
        dir: PathBuf,
        /// The owner, where it could be read.
        pid: Option<u32>,
    },
    /// A newer program wrote the file. Nothing was changed.
    NewerFormat {
        /// The directory.
        dir: PathBuf,
        /// The version of the file.
        found: u64,
        /// The newest version that this program knows.
        known: u64,
    },
    /// The file is not whole. Nothing was changed, and nothing will be executed on the strength of what is missing.
    Damaged {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The directory or the file cannot be read or written.
    Io {
        /// What was tried, and on what.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
}

impl OpenError {
    /// Whether there is no room on the disk.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Io { source, .. } if is_full(source))
    }

    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse { dir, pid } => {
                write!(f, "the store in {} is in use by ", dir.display())?;
                match pid {
                    Some(pid) if *pid == std::process::id() => write!(f, "this process (pid {pid})"),
                    Some(pid) => write!(f, "the process with pid {pid}"),
                    None => f.write_str("another process"),
                }?;
                f.write_str(
                    "; one process owns it at a time, so stop that one first or use another directory",
                )
            }
            Self::NewerFormat { dir, found, known } => write!(
                f,
                "the store in {} has format version {found}, and this program knows versions up to {known}; no \
                 record was changed, so start a newer version of the program",
                dir.display()
            ),
            Self::Damaged { file, what } => write!(
                f,
                "{} is damaged: {what}; nothing was changed, so keep a copy, run `oncegate check` to see what can be \
                 read, and restore the directory from a backup (starting without it would execute again what was \
                 recorded there)",
                file.display()
            ),
            Self::Io { what, .. } => write!(f, "cannot {what}"),
        }
    }
}

impl std::error::Error for OpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}
