//! What happened to messages of an outbox, for metrics and logs.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Something that happened to a message, or to a relay. Does not show what the message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RelayEvent<'a> {
    /// Where the message goes; empty for what is of no message.
    pub topic: &'a str,
    /// The message's `seq`, by which operators tell it; `None` for what is of no message.
    pub seq: Option<i64>,
    /// What.
    pub kind: RelayEventKind,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RelayEventKind {
    /// The broker confirmed it.
    Confirmed,
    /// It was not confirmed, and will be published again.
    Unconfirmed,
    /// The broker refuses it.
    Refused,
    /// Another relay took over messages that this one held too long. What this one published may be published again.
    Lost,
    /// The database was out of reach, or refused.
    DatabaseFailed,
}

impl RelayEventKind {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Confirmed, Self::Unconfirmed, Self::Refused, Self::Lost, Self::DatabaseFailed];

    /// The word that metrics have for it.
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

/// Hears every [`RelayEvent`]. Called where messages are published: it must be quick and must not block.
pub trait RelayObserver: Send + Sync + 'static {
    /// Takes note.
    fn observe(&self, event: &RelayEvent<'_>);
}

/// Hears nothing.
impl RelayObserver for () {
    fn observe(&self, _: &RelayEvent<'_>) {}
}

/// Two hear in turn.
impl<A: RelayObserver, B: RelayObserver> RelayObserver for (A, B) {
    fn observe(&self, event: &RelayEvent<'_>) {
        self.0.observe(event);
        self.1.observe(event);
    }
}

/// Counts events. Cheap to clone; all clones count the same.
#[derive(Clone, Debug, Default)]
pub struct RelayCounts(Arc<[AtomicU64; RelayEventKind::ALL.len()]>);

impl RelayCounts {
    /// How often this happened.
    #[must_use]
    pub fn get(&self, kind: RelayEventKind) -> u64 {
        self.cell(kind).map_or(0, |cell| cell.load(Ordering::Relaxed))
    }

    /// The numbers in the text format of Prometheus: `oncegate_outbox_events_total`, with the label `event`.
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
