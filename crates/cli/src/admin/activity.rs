//! The endpoints for the recent activity of this sidecar: a live feed of requests, the events of a record, and misuse.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::stream;
use http::header::{self, HeaderValue};
use oncegate_core::Timestamp;
use serde_json::{Value, json};

use super::problem::Problem;
use super::{AdminState, listing, metrics, view};
use crate::activity::{FeedItem, MisuseKind, Subscription};

/// A quiet feed has a line at least this often, so that both sides notice a lost connection.
const HEARTBEAT: Duration = Duration::from_secs(15);

/// Lines that are ready at the same time are sent together, up to this size.
const MAX_CHUNK: usize = 32 * 1024;

/// A live feed of requests, one JSON object a line.
pub(super) async fn feed(State(state): State<AdminState>) -> Result<Response, Problem> {
    let subscription = state.activity.subscribe();
    let subscription =
        subscription.ok_or_else(|| Problem::busy("There are too many readers of the feed; close one."))?;
    let lines = stream::unfold(Lines { subscription, is_begun: false }, |mut lines| async move {
        let chunk = lines.next().await?;
        Some((Ok::<_, std::convert::Infallible>(chunk), lines))
    });
    let fields = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    ];
    Ok((fields, Body::from_stream(lines)).into_response())
}

struct Lines {
    subscription: Subscription,
    is_begun: bool,
}

impl Lines {
    /// The lines that are ready, or else the next one; `None` at the end of the feed.
    async fn next(&mut self) -> Option<Bytes> {
        let mut chunk = Vec::new();
        if !self.is_begun {
            self.is_begun = true;
            // At once, so that the reader knows from when on it sees all requests.
            write(&mut chunk, &FeedItem::Lost(0));
            return Some(chunk.into());
        }
        let first = match tokio::time::timeout(HEARTBEAT, self.subscription.next()).await {
            Ok(item) => item?,
            Err(_) => FeedItem::Lost(0),
        };
        write(&mut chunk, &first);
        while chunk.len() < MAX_CHUNK
            && let Some(item) = self.subscription.try_next()
        {
            write(&mut chunk, &item);
        }
        Some(chunk.into())
    }
}

fn write(chunk: &mut Vec<u8>, item: &FeedItem) {
    let text = match item {
        FeedItem::Request(line) => serde_json::to_string(&**line).unwrap_or_default(),
        FeedItem::Lost(lost) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let now = Timestamp::from_millis(u64::try_from(now.as_millis()).unwrap_or(u64::MAX));
            json!({"time": view::time(now), "lost": lost}).to_string()
        }
    };
    chunk.extend_from_slice(text.as_bytes());
    chunk.push(b'\n');
}

/// The events of one record in this sidecar.
pub(super) async fn timeline(
    State(state): State<AdminState>,
    Path(id): Path<String>,
) -> Result<Response, Problem> {
    let id = listing::find(&**state.engine.store(), &id).await?;
    let timeline = state.activity.timeline(&id);
    let events = timeline.events.iter().map(|event| {
        json!({
            "at": view::time(event.at),
            "event": metrics::event_name(event.kind),
            "token": event.token.map(oncegate_core::FencingToken::get),
        })
    });
    let repeats = timeline.repeats.iter().map(|repeat| {
        json!({ "kind": repeat.kind.as_str(), "count": repeat.count, "last": view::time(repeat.last) })
    });
    Ok(view::json(&json!({
        "record": id.to_string(),
        "since": view::time(state.activity.started_at()),
        "events": events.collect::<Vec<_>>(),
        "repeats": repeats.collect::<Vec<_>>(),
    })))
}

/// Requests that look like mistakes of clients.
pub(super) async fn misuse(State(state): State<AdminState>) -> Response {
    let rows = state.activity.misuses().into_iter().map(|row| {
        let counts = MisuseKind::ALL.iter().zip(row.counts);
        let counts = counts.filter(|(_, count)| *count > 0);
        let counts = counts.map(|(kind, count)| (kind.as_str().to_owned(), Value::from(count)));
        json!({
            "caller": row.caller.map(|caller| caller.to_string()),
            "operation": row.operation,
            "counts": Value::Object(counts.collect()),
            "first": view::time(row.first),
            "last": view::time(row.last),
        })
    });
    let since = view::time(state.activity.started_at());
    view::json(&json!({ "since": since, "misuse": rows.collect::<Vec<_>>() }))
}
