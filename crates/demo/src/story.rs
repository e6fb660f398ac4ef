//! Describes the events of a run: each kind once, when it first happens.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use crate::plan::Fault;
use crate::screen::{Screen, Style};

/// An event of a run.
#[derive(Clone, Debug)]
pub(crate) enum Tale<'a> {
    Fault(Fault),
    DoubleClick { intent: &'a str },
    ChargedAgain { intent: &'a str, charge: &'a str },
    Replayed { intent: &'a str, charge: &'a str },
    ReplayedByTheOther,
    InProgress { intent: &'a str },
    OutcomeUnknown { intent: &'a str },
}

/// Prints the events of one run.
pub(crate) struct Story {
    screen: Arc<Screen>,
    told: Mutex<HashSet<&'static str>>,
}

impl Story {
    pub(crate) fn new(screen: Arc<Screen>) -> Self {
        Self { screen, told: Mutex::default() }
    }

    /// Prints an event if it is the first of its kind.
    pub(crate) fn tell(&self, tale: Tale<'_>) {
        let title = tale.title();
        if self.told.lock().unwrap_or_else(PoisonError::into_inner).insert(title) {
            self.say(title, tale.style(), &tale.text());
        }
    }

    /// Prints an event.
    pub(crate) fn say(&self, title: &str, style: Style, text: &str) {
        let title = self.screen.paint(style, &format!("{title:<15}"));
        self.screen.line(&format!("  {title} {text}"));
    }
}

impl Tale<'_> {
    const fn title(&self) -> &'static str {
        match self {
            Self::Fault(Fault::RequestLost) => "request lost",
            Self::Fault(Fault::RequestLate) => "request late",
            Self::Fault(Fault::ReplyLost) => "reply lost",
            Self::Fault(Fault::ReplyCut) => "reply cut",
            Self::Fault(Fault::ReplyLate) => "timeout",
            Self::Fault(Fault::HangUp) => "hang-up",
            Self::DoubleClick { .. } => "double click",
            Self::ChargedAgain { .. } => "charged again",
            Self::Replayed { .. } => "replayed",
            Self::ReplayedByTheOther => "the other one",
            Self::InProgress { .. } => "in progress",
            Self::OutcomeUnknown { .. } => "unknown",
        }
    }

    const fn style(&self) -> Style {
        match self {
            Self::Fault(_) | Self::DoubleClick { .. } => Style::Bold,
            Self::ChargedAgain { .. } => Style::Bad,
            Self::Replayed { .. } | Self::ReplayedByTheOther => Style::Good,
            Self::InProgress { .. } | Self::OutcomeUnknown { .. } => Style::Notice,
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Fault(Fault::RequestLost) => {
                "it never arrives → the client retries with the same key".to_owned()
            }
            Self::Fault(Fault::RequestLate) => {
                "the client gives up and retries; then the first request arrives after all".to_owned()
            }
            Self::Fault(Fault::ReplyLost) => {
                "served, but the reply gets lost → the client retries with the same key".to_owned()
            }
            Self::Fault(Fault::ReplyCut) => {
                "it breaks off in the middle → the client retries with the same key".to_owned()
            }
            Self::Fault(Fault::ReplyLate) => {
                "the reply takes too long → the client retries with the same key".to_owned()
            }
            Self::Fault(Fault::HangUp) => {
                "the customer leaves before the reply, comes back and tries again".to_owned()
            }
            Self::DoubleClick { intent } => format!("{intent}: two requests at once, with the same key"),
            Self::ChargedAgain { intent, charge } => {
                format!("{intent}, now as {charge}: to the service a retry is a new payment")
            }
            Self::Replayed { intent, charge } => {
                format!("{intent} gets its first answer again ({charge}); nothing is charged")
            }
            Self::ReplayedByTheOther => {
                "a retry of a request through one sidecar reaches the other, which replays the answer"
                    .to_owned()
            }
            Self::InProgress { intent } => {
                format!("409: {intent} is being charged → the client waits, then asks again")
            }
            Self::OutcomeUnknown { intent } => {
                format!("was {intent} charged before the crash? No guess: the client stops")
            }
        }
    }
}
