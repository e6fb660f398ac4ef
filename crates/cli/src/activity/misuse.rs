//! Requests that look like mistakes of a client, counted by caller and operation.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Mutex, PoisonError};

use oncegate_core::{CallerTag, Timestamp};
use oncegate_http::Condition;

use super::recent::{RecentEntry, RecentTable};

/// Eight pairs each: 512 pairs of a caller and an operation of at most 256 bytes.
const SETS: usize = 64;

/// The kind of misuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MisuseKind {
    /// A key was used for another request, or for the same one to another host.
    Mismatch,
    /// A key is malformed, or twice in the request.
    KeyInvalid,
    /// The request must have a key and has none.
    KeyMissing,
    /// The same key was sent very often in a short time.
    TightLoop,
    /// A rate limit was exceeded.
    RateLimited,
}

impl MisuseKind {
    pub(crate) const ALL: [Self; 5] =
        [Self::Mismatch, Self::KeyInvalid, Self::KeyMissing, Self::TightLoop, Self::RateLimited];

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Mismatch => "mismatch",
            Self::KeyInvalid => "key-invalid",
            Self::KeyMissing => "key-missing",
            Self::TightLoop => "tight-loop",
            Self::RateLimited => "rate-limited",
        }
    }

    pub(super) const fn of(condition: Condition) -> Option<Self> {
        Some(match condition {
            Condition::KeyReused | Condition::HostDiffers => Self::Mismatch,
            Condition::KeyInvalid => Self::KeyInvalid,
            Condition::KeyMissing => Self::KeyMissing,
            Condition::RateLimited => Self::RateLimited,
            _ => return None,
        })
    }
}

/// The counts of one caller and one operation.
#[derive(Clone, Debug)]
pub(crate) struct MisuseRow {
    /// The tag of the caller, if the requests identified one.
    pub(crate) caller: Option<CallerTag>,
    pub(crate) operation: Box<str>,
    /// In the order of [`MisuseKind::ALL`].
    pub(crate) counts: [u64; MisuseKind::ALL.len()],
    pub(crate) first: Timestamp,
    pub(crate) last: Timestamp,
}

impl RecentEntry for MisuseRow {
    fn last(&self) -> u64 {
        self.last.as_millis()
    }
}

#[derive(Debug, Default)]
pub(super) struct Misuses {
    rows: Mutex<RecentTable<MisuseRow, SETS>>,
    /// Secret, so that a client cannot choose paths that replace the row of another one.
    hasher: RandomState,
}

impl Misuses {
    pub(super) fn add(&self, caller: Option<CallerTag>, operation: &str, kind: MisuseKind, at: Timestamp) {
        let hash = self.hasher.hash_one((caller, operation)) as usize;
        let is_it = |row: &MisuseRow| row.caller == caller && *row.operation == *operation;
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let row = rows.entry(hash, is_it, || MisuseRow {
            caller,
            operation: operation.into(),
            counts: [0; MisuseKind::ALL.len()],
            first: at,
            last: at,
        });
        if let Some(row) = row {
            row.last = at;
            if let Some(count) = row.counts.get_mut(kind as usize) {
                *count += 1;
            }
        }
    }

    pub(super) fn rows(&self) -> Vec<MisuseRow> {
        let rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rows: Vec<_> = rows.iter().cloned().collect();
        rows.sort_by_key(|row| std::cmp::Reverse(row.last));
        rows
    }
}
