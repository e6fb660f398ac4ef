//! The endpoint for a copy of the embedded store while it works, as a tar archive.

use std::convert::Infallible;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::stream;
use http::header::{self, HeaderName, HeaderValue};
use oncegate_core::ErrorChain;
use oncegate_embedded::{BackupSnapshot, EmbeddedStore};
use tokio::sync::mpsc::{self, Sender};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::AdminState;
use super::problem::Problem;
use super::view::time;
use crate::archive;
use crate::config::duration_text;
use crate::log::OPERATOR;

/// The time of the last batch in the copy.
pub(crate) const TAKEN_FIELD: HeaderName = HeaderName::from_static("oncegate-backup-taken");

/// The bytes that are read from the disk at a time.
const PIECE: usize = 256 * 1024;

/// The pieces that are read ahead of the client.
const AHEAD: usize = 2;

/// The longest time for which a client may take nothing. A snapshot holds the space of segments that the store has removed.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// The embedded store of the sidecar, if it has one, and the limit of copies at a time. All clones share them.
#[derive(Clone, Debug)]
pub(crate) struct BackupStore {
    store: Arc<OnceLock<Weak<EmbeddedStore>>>,
    /// One copy at a time: a copy reads the disk as fast as it can.
    turn: Arc<Semaphore>,
}

impl Default for BackupStore {
    fn default() -> Self {
        Self { store: Arc::default(), turn: Arc::new(Semaphore::new(1)) }
    }
}

impl BackupStore {
    /// Notes the store that was opened. Not a cache: its loss costs nothing.
    pub(crate) fn set(&self, store: &Arc<EmbeddedStore>) {
        let _once = self.store.set(Arc::downgrade(store));
    }

    pub(super) fn get(&self) -> Option<Arc<EmbeddedStore>> {
        self.store.get()?.upgrade()
    }
}

/// Sends all files of the store as they are at this moment.
pub(super) async fn send(State(state): State<AdminState>) -> Result<Response, Problem> {
    let store = state.backup.get().ok_or_else(Problem::no_backup)?;
    let turn = state.backup.turn.clone().try_acquire_owned();
    let turn = turn.map_err(|_| Problem::busy("Another backup is running; wait for its end."))?;
    let snapshot = tokio::task::spawn_blocking(move || store.snapshot()).await;
    let snapshot = snapshot.map_err(|_| Problem::internal("The backup could not be begun."))?;
    let snapshot = Arc::new(snapshot.map_err(|error| Problem::store(&error))?);
    let seconds = snapshot.taken().as_millis() / 1000;
    let headers: Option<Vec<_>> =
        snapshot.files().iter().map(|file| archive::header(file.name(), file.len(), seconds)).collect();
    let headers = headers.ok_or_else(|| Problem::internal("A file of the store is too large."))?;
    let one = |len: u64| archive::BLOCK as u64 + len + archive::padding(len) as u64;
    let len = snapshot.files().iter().map(|file| one(file.len())).sum::<u64>() + archive::END.len() as u64;
    let fields = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/x-tar")),
        (header::CONTENT_LENGTH, len.into()),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (TAKEN_FIELD, HeaderValue::try_from(time(snapshot.taken())).unwrap_or(HeaderValue::from_static(""))),
    ];
    let (sender, receiver) = mpsc::channel(AHEAD);
    tokio::spawn(run(snapshot, headers, sender, (turn, len)));
    let pieces = stream::unfold(receiver, |mut receiver| async move {
        let piece = receiver.recv().await?;
        Some((Ok::<_, Infallible>(piece), receiver))
    });
    Ok((fields, Body::from_stream(pieces)).into_response())
}

/// Sends the archive, and logs how that ended.
async fn run(
    snapshot: Arc<BackupSnapshot>,
    headers: Vec<[u8; archive::BLOCK]>,
    sender: Sender<Bytes>,
    (_turn, bytes): (OwnedSemaphorePermit, u64),
) {
    let begun = Instant::now();
    match send_all(&snapshot, headers, &sender).await {
        Ok(()) => tracing::info!(
            target: OPERATOR,
            bytes,
            files = snapshot.files().len(),
            taken = time(snapshot.taken()),
            duration = duration_text(Duration::from_secs(begun.elapsed().as_secs())),
            "a backup of the store was sent"
        ),
        Err(why) => {
            tracing::warn!(target: OPERATOR, "a backup of the store broke off, and what was received is not a store: {why}")
        }
    }
}

/// # Errors
/// The reason why the archive is not complete.
async fn send_all(
    snapshot: &Arc<BackupSnapshot>,
    headers: Vec<[u8; archive::BLOCK]>,
    sender: &Sender<Bytes>,
) -> Result<(), String> {
    for (number, header) in headers.into_iter().enumerate() {
        give(sender, Bytes::copy_from_slice(&header)).await?;
        let len = snapshot.files().get(number).map_or(0, |file| file.len());
        let mut offset = 0;
        while offset < len {
            let reading = snapshot.clone();
            let read = tokio::task::spawn_blocking(move || {
                let mut piece = vec![0; PIECE];
                let count = match reading.files().get(number) {
                    Some(file) => file.read(&mut piece, offset)?,
                    None => 0,
                };
                piece.truncate(count);
                Ok::<_, std::io::Error>(piece)
            });
            let piece = read.await.map_err(|error| ErrorChain(&error).to_string())?;
            let piece = piece.map_err(|error| format!("the store cannot be read: {}", ErrorChain(&error)))?;
            offset += piece.len() as u64;
            give(sender, piece.into()).await?;
        }
        give(sender, vec![0; archive::padding(len)].into()).await?;
    }
    give(sender, Bytes::from_static(&archive::END)).await
}

async fn give(sender: &Sender<Bytes>, piece: Bytes) -> Result<(), String> {
    if piece.is_empty() {
        return Ok(());
    }
    match tokio::time::timeout(STALL_TIMEOUT, sender.send(piece)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) => Err("its client left".to_owned()),
        Err(_) => Err(format!("its client took nothing for {}", duration_text(STALL_TIMEOUT))),
    }
}
