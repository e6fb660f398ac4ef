//! The state that all parts of a run share, and the output of the demonstration.

use std::collections::HashSet;
use std::io::{self, Write as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::figures::Figures;
use crate::plan::Plan;

/// The style of a text on a terminal with colours.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Style {
    Bold,
    Dim,
    Good,
    Bad,
    Notice,
}

/// The output for people.
#[derive(Clone, Copy)]
pub(crate) struct Screen {
    on_stderr: bool,
    colours: bool,
}

impl Screen {
    /// Writes to the standard output, or to the standard error if a program reads the standard output.
    pub(crate) const fn new(on_stderr: bool, colours: bool) -> Self {
        Self { on_stderr, colours }
    }

    pub(crate) fn paint(self, style: Style, text: &str) -> String {
        let code = match style {
            Style::Bold => "1",
            Style::Dim => "2",
            Style::Good => "1;32",
            Style::Bad => "1;31",
            Style::Notice => "1;33",
        };
        if self.colours { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// Writes lines. An error is ignored, so that the run ends with its exit code and cleans up.
    pub(crate) fn line(self, text: &str) {
        let _gone =
            if self.on_stderr { writeln!(io::stderr(), "{text}") } else { writeln!(io::stdout(), "{text}") };
    }
}

/// The plan of a run, its output and its counts.
pub(crate) struct Stage {
    pub(crate) plan: Arc<Plan>,
    /// The path of payments.
    pub(crate) path: String,
    pub(crate) screen: Screen,
    figures: Mutex<Figures>,
    /// The kinds of events that were printed.
    told: Mutex<HashSet<&'static str>>,
}

impl Stage {
    pub(crate) fn new(plan: Arc<Plan>, path: String, screen: Screen) -> Arc<Self> {
        Arc::new(Self { plan, path, screen, figures: Mutex::default(), told: Mutex::default() })
    }

    /// The counts so far. Figures of the ledger are counted from the ledger, afterwards.
    pub(crate) fn figures(&self) -> MutexGuard<'_, Figures> {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prints an event.
    pub(crate) fn say(&self, title: &str, style: Style, text: &str) {
        let title = self.screen.paint(style, &format!("{title:<15}"));
        self.screen.line(&format!("  {title} {text}"));
    }

    /// Prints an event if it is the first with this title.
    pub(crate) fn say_once(&self, title: &'static str, style: Style, text: &str) {
        if self.told.lock().unwrap_or_else(PoisonError::into_inner).insert(title) {
            self.say(title, style, text);
        }
    }
}
