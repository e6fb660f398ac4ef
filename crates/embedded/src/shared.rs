//! The jobs that callers give to the threads, and the errors of a store that is open.

use oncegate_core::codec;
use oncegate_core::{AuditEntry, Extent, ListPage, ListQuery, RecordId, StoreError};
use tokio::sync::oneshot;

use crate::queue::PushError;

/// The channel to the caller who waits for a reply.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, StoreError>>;

/// A job for the reader.
pub(crate) enum Scan {
    List { query: ListQuery, reply: Reply<ListPage> },
    Audit { before: Option<u64>, limit: usize, reply: Reply<Vec<AuditEntry>> },
}

pub(crate) fn push_error(error: PushError) -> StoreError {
    match error {
        PushError::Full => StoreError::unavailable("the embedded store has too many commands waiting")
            .with_extent(Extent::Record)
            .with_nothing_sent(),
        PushError::Closed => closed_error(),
    }
}

/// The error for a claim that a limit or a full disk refuses. The claim was not applied. Other commands still work.
pub(crate) fn full_error(reason: &str) -> StoreError {
    unwritten_error(&format!("the embedded store takes no new keys: {reason}"))
}

fn unwritten_error(text: &str) -> StoreError {
    StoreError::unavailable(text.to_owned()).with_extent(Extent::Writes).with_nothing_sent()
}

/// The error for a claim on a nearly full disk.
pub(crate) fn disk_low_error() -> StoreError {
    full_error(
        "the disk is nearly full, and the rest is reserved for requests that are running: free space on it",
    )
}

/// The error for a claim while the next segment cannot be prepared.
pub(crate) fn unprepared_error(reason: &str) -> StoreError {
    full_error(&format!(
        "the next segment of the log cannot be prepared, and the rest of the last one is reserved for requests that are running: {reason}"
    ))
}

/// Returns `true` if the record was changed, and `false` if a newer program wrote it.
pub(crate) const fn is_damage(error: &codec::CodecError) -> bool {
    !matches!(error, codec::CodecError::UnknownVersion(_))
}

pub(crate) fn unreadable_error(id: &RecordId, error: codec::CodecError) -> StoreError {
    StoreError::corrupt(format!("record {id:?}… cannot be read")).with_source(error)
}

pub(crate) fn closed_error() -> StoreError {
    StoreError::unavailable("the embedded store is closed")
}
