//! Events of the outbox, for metrics and logs.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// An event of a message or of a relay. It does not contain the content of the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RelayEvent<'a> {
    /// The topic of the message; empty for events without a message.
    pub topic: &'a str,
    /// The `seq` of the message, by which operators find it; `None` for events without a message.
    pub seq: Option<i64>,
    /// The kind of the event.
    pub kind: RelayEventKind,
}

/// The kind of a relay event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RelayEventKind {
    /// The broker confirmed a message.
    Confirmed,
    /// The broker did not confirm a message. It will be published again.
    Unconfirmed,
    /// The broker refused a message.
    Refused,
    /// Another relay took over messages that this relay held too long. They may be published twice.
    Lost,
    /// The database was out of reach, or refused a call.
    DatabaseFailed,
}

impl RelayEventKind {
    /// All kinds.
    pub const ALL: [Self; 5] =
        [Self::Confirmed, Self::Unconfirmed, Self::Refused, Self::Lost, Self::DatabaseFailed];

    /// The word for this kind in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Confirmed => "confirmed",
            Self::Unconfirmed => "unconfirmed",
            Self::Refused => "refused",
            Self::Lost => "lost",
            Self::DatabaseFailed => "database-failed",
        }
    }
}

/// Receives every [`RelayEvent`]. It is called on the publishing path, so it must be quick and must not block.
pub trait RelayObserver: Send + Sync + 'static {
    /// Receives one event.
    fn observe(&self, event: &RelayEvent<'_>);
}

/// Ignores all events.
impl RelayObserver for () {
    fn observe(&self, _: &RelayEvent<'_>) {}
}

/// Passes each event to both observers.
impl<A: RelayObserver, B: RelayObserver> RelayObserver for (A, B) {
    fn observe(&self, event: &RelayEvent<'_>) {
        self.0.observe(event);
        self.1.observe(event);
    }
}

/// Calls the closure with each event.
impl<F: Fn(&RelayEvent<'_>) + Send + Sync + 'static> RelayObserver for F {
    fn observe(&self, event: &RelayEvent<'_>) {
        self(event);
    }
}

/// Counts events. Clones are cheap and share the counts.
#[derive(Clone, Debug, Default)]
pub struct RelayCounts(Arc<[AtomicU64; RelayEventKind::ALL.len()]>);

impl RelayCounts {
    /// Returns the number of events of this kind.
    #[must_use]
    pub fn get(&self, kind: RelayEventKind) -> u64 {
        self.cell(kind).map_or(0, |cell| cell.load(Ordering::Relaxed))
    }

    /// Formats the counts for Prometheus: `oncegate_outbox_events_total`, with the label `event`.
    #[must_use]
    pub fn to_prometheus(&self) -> String {
        let mut text = String::from(
            "# HELP oncegate_outbox_events_total What became of messages of the outbox.\n\
             # TYPE oncegate_outbox_events_total counter\n",
        );
        for kind in RelayEventKind::ALL {
            let (event, count) = (kind.as_str(), self.get(kind));
            let _written = writeln!(text, "oncegate_outbox_events_total{{event=\"{event}\"}} {count}");
        }
        text
    }

    fn cell(&self, kind: RelayEventKind) -> Option<&AtomicU64> {
        self.0.get(RelayEventKind::ALL.iter().position(|one| *one == kind)?)
    }
}

impl RelayObserver for RelayCounts {
    fn observe(&self, event: &RelayEvent<'_>) {
        if let Some(cell) = self.cell(event.kind) {
            cell.fetch_add(1, Ordering::Relaxed);
        }
    }
}
