//! What happened, for metrics and logs.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::handled::{DeadReason, Handled};

/// Something that happened to a delivery. Names neither the message nor what it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Event<'a> {
    /// Whose message it is.
    pub consumer: &'a str,
    /// Where it came from.
    pub topic: &'a str,
    /// What.
    pub kind: EventKind,
    /// How long it took to process the batch that it was in, or to settle it.
    pub took: Duration,
}

impl<'a> Event<'a> {
    /// An event.
    #[must_use]
    pub const fn new(consumer: &'a str, topic: &'a str, kind: EventKind, took: Duration) -> Self {
        Self { consumer, topic, kind, took }
    }
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EventKind {
    /// A message was processed now.
    Processed,
    /// It was processed before.
    Duplicate,
    /// Somebody else was processing it.
    InFlight,
    /// It failed, and will be tried again.
    Failed,
    /// It is given up.
    Dead(DeadReason),
    /// The store, the database or the destination of dead letters was out of reach.
    Unavailable,
    /// It was not begun, because an earlier one of its order key was not processed.
    NotBegun,
    /// It was acknowledged.
    Acknowledged,
    /// It was given back to its broker.
    GivenBack,
    /// It was not begun or not settled, because the broker delivers it to somebody else by now.
    Lost,
    /// The broker could not be told of it. It comes again.
    SettlementFailed,
    /// The broker did not give more time for it. It may come again while it is processed.
    ExtensionFailed,
    /// The broker was out of reach, or said that something is wrong.
    SourceFailed,
    /// What processes messages panicked.
    Panicked,
    /// A request was refused: it is no webhook of its sender's, or it did not arrive whole.
    Refused,
    /// A webhook was sent away, because as many as may are being processed.
    Overloaded,
}

impl EventKind {
    /// All of them.
    pub const ALL: [Self; 20] = [
        Self::Processed,
        Self::Duplicate,
        Self::InFlight,
        Self::Failed,
        Self::Dead(DeadReason::Rejected),
        Self::Dead(DeadReason::AttemptsExhausted),
        Self::Dead(DeadReason::NoIdentity),
        Self::Dead(DeadReason::IdentityReused),
        Self::Dead(DeadReason::OutcomeUnknown),
        Self::Unavailable,
        Self::NotBegun,
        Self::Acknowledged,
        Self::GivenBack,
        Self::Lost,
        Self::SettlementFailed,
        Self::ExtensionFailed,
        Self::SourceFailed,
        Self::Panicked,
        Self::Refused,
        Self::Overloaded,
    ];

    /// What a handled delivery is as an event.
    #[must_use]
    pub const fn of(handled: &Handled) -> Self {
        match handled {
            Handled::Processed { .. } => Self::Processed,
            Handled::Duplicate => Self::Duplicate,
            Handled::InFlight { .. } => Self::InFlight,
            Handled::Failed { .. } => Self::Failed,
            Handled::Dead { reason, .. } => Self::Dead(*reason),
            Handled::Unavailable(_) => Self::Unavailable,
            Handled::NotBegun => Self::NotBegun,
        }
    }

    /// The word that metrics have for it, and for a dead letter its reason.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Processed => "processed",
            Self::Duplicate => "duplicate",
            Self::InFlight => "in-flight",
            Self::Failed => "failed",
            Self::Dead(_) => "dead",
            Self::Unavailable => "unavailable",
            Self::NotBegun => "not-begun",
            Self::Acknowledged => "acknowledged",
            Self::GivenBack => "given-back",
            Self::Lost => "lost",
            Self::SettlementFailed => "settlement-failed",
            Self::ExtensionFailed => "extension-failed",
            Self::SourceFailed => "source-failed",
            Self::Panicked => "panicked",
            Self::Refused => "refused",
            Self::Overloaded => "overloaded",
        }
    }

    const fn reason(self) -> &'static str {
        match self {
            Self::Dead(reason) => reason.as_str(),
            _ => "",
        }
    }
}

/// Hears every [`Event`]. Called where messages are handled: it must be quick and must not block.
pub trait Observer: Send + Sync + 'static {
    /// Takes note.
    fn observe(&self, event: &Event<'_>);
}

/// Hears nothing.
impl Observer for () {
    fn observe(&self, _: &Event<'_>) {}
}

/// Two hear in turn.
impl<A: Observer, B: Observer> Observer for (A, B) {
    fn observe(&self, event: &Event<'_>) {
        self.0.observe(event);
        self.1.observe(event);
    }
}

/// Counts events. Cheap to clone; all clones count the same.
#[derive(Clone, Debug, Default)]
pub struct Counts(Arc<Cells>);

#[derive(Debug, Default)]
struct Cells([AtomicU64; EventKind::ALL.len()]);

impl Counts {
    /// How often this happened.
    #[must_use]
    pub fn get(&self, kind: EventKind) -> u64 {
        self.cell(kind).map_or(0, |cell| cell.load(Ordering::Relaxed))
    }

    /// The numbers in the text format of Prometheus: `oncegate_messages_total`, with the labels `consumer`, `event` and
    /// `reason`.
    #[must_use]
    pub fn to_prometheus(&self, consumer: &crate::ConsumerName) -> String {
        let mut text = String::from(
            "# HELP oncegate_messages_total What became of deliveries.\n# TYPE oncegate_messages_total counter\n",
        );
        let consumer = consumer.as_str().replace('\\', "\\\\").replace('"', "\\\"");
        for kind in EventKind::ALL {
            let (event, reason, count) = (kind.as_str(), kind.reason(), self.get(kind));
            let _written = writeln!(
                text,
                "oncegate_messages_total{{consumer=\"{consumer}\",event=\"{event}\",reason=\"{reason}\"}} {count}"
            );
        }
        text
    }

    fn cell(&self, kind: EventKind) -> Option<&AtomicU64> {
        self.0.0.get(EventKind::ALL.iter().position(|one| *one == kind)?)
    }
}

impl Observer for Counts {
    fn observe(&self, event: &Event<'_>) {
        if let Some(cell) = self.cell(event.kind) {
            cell.fetch_add(1, Ordering::Relaxed);
        }
    }
}
