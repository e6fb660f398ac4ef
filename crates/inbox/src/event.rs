//! Events for metrics and logs.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::outcome::{DeadReason, ProcessOutcome};

/// An event of a delivery. It contains neither the message nor its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InboxEvent<'a> {
    /// The consumer of the message.
    pub consumer: &'a str,
    /// The topic of the message.
    pub topic: &'a str,
    /// The kind of the event.
    pub kind: InboxEventKind,
    /// The duration of processing its batch, or of settling it.
    pub took: Duration,
}

impl<'a> InboxEvent<'a> {
    /// Creates an event.
    #[must_use]
    pub const fn new(consumer: &'a str, topic: &'a str, kind: InboxEventKind, took: Duration) -> Self {
        Self { consumer, topic, kind, took }
    }
}

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum InboxEventKind {
    /// A message was processed now.
    Processed,
    /// A message was processed before.
    Duplicate,
    /// Another consumer was processing the message.
    InFlight,
    /// An attempt failed, and the message will be tried again.
    Failed,
    /// A message was given up.
    Dead(DeadReason),
    /// The store, the database or the destination of dead letters was out of reach.
    Unavailable,
    /// A message was not started, because an earlier one with its order key was not processed.
    NotBegun,
    /// A message was acknowledged.
    Acknowledged,
    /// A message was given back to its broker.
    GivenBack,
    /// A message was not started or not settled, because the broker delivers it to another consumer by now.
    Lost,
    /// The broker did not confirm an acknowledgement or a return. The message is delivered again.
    SettlementFailed,
    /// The broker did not give more time for a message. It may be delivered again while it is processed.
    ExtensionFailed,
    /// The broker was out of reach, or reported an error.
    SourceFailed,
    /// The processor panicked.
    Panicked,
    /// A request was refused: it is not a valid webhook of its sender, or it did not arrive completely.
    Refused,
    /// A webhook was refused because the maximum number of webhooks is being processed.
    Overloaded,
}

impl InboxEventKind {
    /// All kinds.
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

    /// Returns the event kind of an outcome.
    #[must_use]
    pub const fn of(handled: &ProcessOutcome) -> Self {
        match handled {
            ProcessOutcome::Processed { .. } => Self::Processed,
            ProcessOutcome::Duplicate => Self::Duplicate,
            ProcessOutcome::InFlight { .. } => Self::InFlight,
            ProcessOutcome::Failed { .. } => Self::Failed,
            ProcessOutcome::Dead { reason, .. } => Self::Dead(*reason),
            ProcessOutcome::Unavailable(_) => Self::Unavailable,
            ProcessOutcome::NotBegun => Self::NotBegun,
        }
    }

    /// The word for this kind in metrics. Dead letters have their reason in a label of its own.
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

/// Receives every [`InboxEvent`]. It is called on the processing path, so it must be quick and must not block.
pub trait InboxObserver: Send + Sync + 'static {
    /// Receives one event.
    fn observe(&self, event: &InboxEvent<'_>);
}

/// Ignores all events.
impl InboxObserver for () {
    fn observe(&self, _: &InboxEvent<'_>) {}
}

/// Passes each event to both observers.
impl<A: InboxObserver, B: InboxObserver> InboxObserver for (A, B) {
    fn observe(&self, event: &InboxEvent<'_>) {
        self.0.observe(event);
        self.1.observe(event);
    }
}

/// Calls the closure with each event.
impl<F: Fn(&InboxEvent<'_>) + Send + Sync + 'static> InboxObserver for F {
    fn observe(&self, event: &InboxEvent<'_>) {
        self(event);
    }
}

/// Counts events. Clones are cheap and share the counts.
#[derive(Clone, Debug, Default)]
pub struct InboxCounts(Arc<Cells>);

#[derive(Debug, Default)]
struct Cells([AtomicU64; InboxEventKind::ALL.len()]);

impl InboxCounts {
    /// Returns the number of events of this kind.
    #[must_use]
    pub fn get(&self, kind: InboxEventKind) -> u64 {
        self.cell(kind).map_or(0, |cell| cell.load(Ordering::Relaxed))
    }

    /// Formats the counts for Prometheus: `oncegate_messages_total`, with the labels `consumer`, `event` and `reason`.
    #[must_use]
    pub fn to_prometheus(&self, consumer: &crate::ConsumerName) -> String {
        let mut text = String::from(
            "# HELP oncegate_messages_total What became of deliveries.\n# TYPE oncegate_messages_total counter\n",
        );
        let consumer = consumer.as_str().replace('\\', "\\\\").replace('"', "\\\"");
        for kind in InboxEventKind::ALL {
            let (event, reason, count) = (kind.as_str(), kind.reason(), self.get(kind));
            let _written = writeln!(
                text,
                "oncegate_messages_total{{consumer=\"{consumer}\",event=\"{event}\",reason=\"{reason}\"}} {count}"
            );
        }
        text
    }

    fn cell(&self, kind: InboxEventKind) -> Option<&AtomicU64> {
        self.0.0.get(InboxEventKind::ALL.iter().position(|one| *one == kind)?)
    }
}

impl InboxObserver for InboxCounts {
    fn observe(&self, event: &InboxEvent<'_>) {
        if let Some(cell) = self.cell(event.kind) {
            cell.fetch_add(1, Ordering::Relaxed);
        }
    }
}
