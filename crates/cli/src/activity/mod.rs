//! The recent activity of this sidecar, kept in memory of a fixed size: what happened to each record, which requests look like
//! mistakes of clients, the numbers of the last hour, and a live feed of requests.
//!
//! [`Activity`] is an observer of the engine and of the layer. It is called on the path of each request, so it allocates
//! nothing there, except for the feed while it has subscribers and for the first misuse of a caller. It knows only this
//! process, since its start: the facts of a record are in the store, and the changes by operators in its audit trail.
//!
//! | part | holds | replaced if it is full |
//! |---|---|---|
//! | [`history`] | the last events of records, and counts of repeated requests | the oldest; never rare ones by ordinary ones |
//! | [`misuse`] | counts by caller and operation | the pair that was seen least recently |
//! | [`hour`] | the counters of requests, every ten seconds for an hour | the oldest |
//! | [`feed`] | requests that subscribers have not read yet | the oldest; a slow subscriber gets their number |

mod feed;
mod history;
mod hour;
mod misuse;
mod recent;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use oncegate_core::{RecordId, Sharded, Timestamp};
use oncegate_engine::{Event, Observer};
use oncegate_http::{Condition, Disposition, RequestEvent, RequestObserver, SHADOW_OPERATION, ShadowVerdict};

pub(crate) use self::feed::{FeedItem, Subscription};
pub(crate) use self::history::{Repeat, RepeatKind, TimelineEvent};
pub(crate) use self::hour::{LastHour, Minute, OUTCOME_GROUPS, OutcomeCounts, OutcomeGroup};
pub(crate) use self::misuse::{MisuseKind, MisuseRow};

use self::feed::Feed;
use self::history::History;
use self::misuse::Misuses;

/// The recent activity. All clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Activity(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    started_at: Timestamp,
    started: Instant,
    histories: Sharded<History>,
    misuses: Misuses,
    hour: LastHour,
    feed: Feed,
}

impl Default for Activity {
    fn default() -> Self {
        Self(Arc::new(Inner {
            started_at: wall_clock(),
            started: Instant::now(),
            histories: Sharded::default(),
            misuses: Misuses::default(),
            hour: LastHour::default(),
            feed: Feed::default(),
        }))
    }
}

/// Everything that this process knows about the past of a record.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timeline {
    /// The events, oldest first.
    pub(crate) events: Vec<TimelineEvent>,
    /// Requests and renewals that are counted and not kept one by one.
    pub(crate) repeats: Vec<Repeat>,
}

impl Activity {
    /// The start of this process, by the clock of the machine.
    pub(crate) fn started_at(&self) -> Timestamp {
        self.0.started_at
    }

    /// The time since the start.
    pub(crate) fn uptime(&self) -> std::time::Duration {
        self.0.started.elapsed()
    }

    /// The known past of a record.
    pub(crate) fn timeline(&self, id: &RecordId) -> Timeline {
        self.0.histories.of(id).timeline(id)
    }

    /// The pairs of caller and operation whose requests look like mistakes of a client, the most recent first.
    pub(crate) fn misuses(&self) -> Vec<MisuseRow> {
        self.0.misuses.rows()
    }

    /// The numbers of the last hour.
    pub(crate) fn hour(&self) -> &LastHour {
        &self.0.hour
    }

    /// Subscribes to the requests with a key from now on; `None` if there are too many subscribers.
    pub(crate) fn subscribe(&self) -> Option<Subscription> {
        self.0.feed.subscribe()
    }

    /// Ends the feeds of all subscribers, because the sidecar stops.
    pub(crate) fn close(&self) {
        self.0.feed.close();
    }
}

impl Observer for Activity {
    fn observe(&self, event: &Event) {
        let entry = TimelineEvent { at: wall_clock(), token: event.token, kind: event.kind };
        self.0.histories.of(&event.id).add(event.id, entry);
    }
}

impl RequestObserver for Activity {
    fn observe(&self, event: &RequestEvent<'_>) {
        let Some(keyed) = &event.keyed else { return };
        let mut is_loop = false;
        if let (Some(id), Some(kind)) = (keyed.record, RepeatKind::of(event.disposition)) {
            is_loop = self.0.histories.of(&id).repeat(id, kind, wall_clock(), keyed.attempt.is_some());
        }
        let (refused, is_observed) = match event.disposition {
            Disposition::Refused(condition) => (Some(condition), false),
            Disposition::Shadow(ShadowVerdict::Refused(condition)) => (Some(condition), true),
            Disposition::Shadow(_) => (None, true),
            _ => (None, false),
        };
        let kinds = [refused.and_then(MisuseKind::of), is_loop.then_some(MisuseKind::TightLoop)];
        for kind in kinds.into_iter().flatten() {
            // Under the name that its record has, so that a reader sees that nothing was refused.
            let operation = match is_observed {
                true => Cow::Owned(format!("{SHADOW_OPERATION}{}", keyed.operation)),
                false => Cow::Borrowed(keyed.operation),
            };
            self.0.misuses.add(keyed.caller, &operation, kind, wall_clock());
        }
        self.0.feed.send(event, keyed, wall_clock);
    }
}

/// The time of the machine's clock. The store has a clock of its own, which costs a shared database a question.
pub(crate) fn wall_clock() -> Timestamp {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_millis(u64::try_from(now.as_millis()).unwrap_or(u64::MAX))
}

/// True for a refusal that says that the outcome of a request is not known, or that its response is lost.
const fn is_unknown(condition: Condition) -> bool {
    matches!(condition, Condition::OutcomeUnknown | Condition::ReplayUnavailable | Condition::RecordCorrupt)
}

#[cfg(test)]
mod tests;
