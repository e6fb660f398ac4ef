//! A live feed of requests with a key. It is lossy: a subscriber that reads slowly loses the oldest, and gets their number.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use oncegate_core::{CallerTag, RecordId, Timestamp};
use oncegate_http::{KeyedEvent, RequestEvent, ShadowVerdict};
use serde::{Serialize, Serializer};
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::{broadcast, watch};

use crate::access_log::millis;

/// The most subscribers. Each costs every request a few hundred nanoseconds.
const MAX_SUBSCRIBERS: usize = 16;

/// The requests that are kept for subscribers that have not read them yet, for all together.
const QUEUE: usize = 1024;

/// A request whose outcome is known.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RequestLine {
    #[serde(serialize_with = "as_text")]
    pub(crate) time: Timestamp,
    /// Method and path.
    pub(crate) operation: Box<str>,
    pub(crate) outcome: &'static str,
    /// The outcome that the request would have had, if its route only observes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) would: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) status: Option<u16>,
    /// From the head of the request to the head of its response.
    pub(crate) duration_ms: f64,
    /// The number of the attempt, if this request executed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) attempt: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "as_digits")]
    pub(crate) caller: Option<CallerTag>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "as_digits")]
    pub(crate) record: Option<RecordId>,
}

fn as_text<S: Serializer>(at: &Timestamp, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&crate::admin::time(*at))
}

fn as_digits<T: std::fmt::Display, S: Serializer>(id: &Option<T>, serializer: S) -> Result<S::Ok, S::Error> {
    match id {
        Some(id) => serializer.collect_str(id),
        None => serializer.serialize_none(),
    }
}

#[derive(Debug)]
pub(super) struct Feed {
    sender: broadcast::Sender<Arc<RequestLine>>,
    /// Counted apart from the channel, which would lock for it.
    subscribers: Arc<AtomicUsize>,
    is_closed: watch::Sender<bool>,
}

impl Default for Feed {
    fn default() -> Self {
        Self {
            sender: broadcast::channel(QUEUE).0,
            subscribers: Arc::default(),
            is_closed: watch::Sender::new(false),
        }
    }
}

impl Feed {
    pub(super) fn send(&self, event: &RequestEvent<'_>, keyed: &KeyedEvent<'_>, now: impl Fn() -> Timestamp) {
        if self.subscribers.load(Ordering::Relaxed) == 0 {
            return;
        }
        let line = RequestLine {
            time: now(),
            operation: keyed.operation.into(),
            outcome: event.disposition.as_str(),
            would: event.disposition.shadow_verdict().map(ShadowVerdict::as_str),
            status: event.status.map(|status| status.as_u16()),
            duration_ms: millis(keyed.duration),
            attempt: keyed.attempt,
            caller: keyed.caller,
            record: keyed.record,
        };
        // An error means that the last subscriber has just left.
        let _gone = self.sender.send(Arc::new(line));
    }

    pub(super) fn subscribe(&self) -> Option<Subscription> {
        let add = |subscribers| (subscribers < MAX_SUBSCRIBERS).then_some(subscribers + 1);
        self.subscribers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        Some(Subscription {
            receiver: self.sender.subscribe(),
            subscribers: self.subscribers.clone(),
            is_closed: self.is_closed.subscribe(),
        })
    }

    pub(super) fn close(&self) {
        self.is_closed.send_replace(true);
    }
}

/// The feed of one subscriber.
#[derive(Debug)]
pub(crate) struct Subscription {
    receiver: broadcast::Receiver<Arc<RequestLine>>,
    subscribers: Arc<AtomicUsize>,
    is_closed: watch::Receiver<bool>,
}

/// An item of a feed.
#[derive(Clone, Debug)]
pub(crate) enum FeedItem {
    Request(Arc<RequestLine>),
    /// This many requests were lost, because they were not read in time.
    Lost(u64),
}

impl Subscription {
    /// The next item; `None` if the sidecar stops. Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> Option<FeedItem> {
        tokio::select! {
            biased;
            _ = self.is_closed.wait_for(|is_closed| *is_closed) => None,
            received = self.receiver.recv() => match received {
                Ok(line) => Some(FeedItem::Request(line)),
                Err(RecvError::Lagged(lost)) => Some(FeedItem::Lost(lost)),
                Err(RecvError::Closed) => None,
            },
        }
    }

    /// The next item, if there is one already.
    pub(crate) fn try_next(&mut self) -> Option<FeedItem> {
        match self.receiver.try_recv() {
            Ok(line) => Some(FeedItem::Request(line)),
            Err(TryRecvError::Lagged(lost)) => Some(FeedItem::Lost(lost)),
            Err(TryRecvError::Empty | TryRecvError::Closed) => None,
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.subscribers.fetch_sub(1, Ordering::Relaxed);
    }
}
