//! The output of the demonstration: a terminal with a status line, or plain lines.

use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The style of a text on a terminal with colours.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Style {
    Bold,
    Dim,
    Good,
    Bad,
    Notice,
}

impl Style {
    const fn code(self) -> &'static str {
        match self {
            Self::Bold => "1",
            Self::Dim => "2",
            Self::Good => "1;32",
            Self::Bad => "1;31",
            Self::Notice => "1;33",
        }
    }
}

/// The output for people.
pub(crate) struct Screen {
    /// True if the status line can be overwritten.
    live: bool,
    colours: bool,
    out: Mutex<Out>,
}

struct Out {
    to: Box<dyn Write + Send>,
    /// The current status line.
    status: String,
}

const CLEAR_LINE: &str = "\r\x1b[2K";
/// Without wrapping, a line that is too long for the terminal is cut and can be overwritten.
const WRAP_OFF: &str = "\x1b[?7l";
const WRAP_ON: &str = "\x1b[?7h";

impl Screen {
    /// Writes to the standard output, or to the standard error if a program reads the standard output.
    pub(crate) fn new(on_stderr: bool) -> Self {
        let terminal = if on_stderr { io::stderr().is_terminal() } else { io::stdout().is_terminal() };
        let live = terminal && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        // https://no-color.org: any value that is not empty counts.
        let colours = live && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let to: Box<dyn Write + Send> =
            if on_stderr { Box::new(io::stderr()) } else { Box::new(io::stdout()) };
        Self { live, colours, out: Mutex::new(Out { to, status: String::new() }) }
    }

    pub(crate) const fn is_live(&self) -> bool {
        self.live
    }

    pub(crate) fn paint(&self, style: Style, text: &str) -> String {
        if self.colours { format!("\x1b[{}m{text}\x1b[0m", style.code()) } else { text.to_owned() }
    }

    /// Writes permanent lines.
    pub(crate) fn line(&self, text: &str) {
        let mut out = self.lock();
        let status = out.status.clone();
        out.write(&if status.is_empty() {
            format!("{text}\n")
        } else {
            format!("{CLEAR_LINE}{text}\n{WRAP_OFF}{status}{WRAP_ON}")
        });
    }

    /// Replaces the status line. Does nothing without a terminal.
    pub(crate) fn status(&self, text: &str) {
        let mut out = self.lock();
        if self.live && out.status != text {
            out.status = text.to_owned();
            out.write(&format!("{CLEAR_LINE}{WRAP_OFF}{text}{WRAP_ON}"));
        }
    }

    /// Removes the status line.
    pub(crate) fn end_status(&self) {
        let mut out = self.lock();
        if !out.status.is_empty() {
            out.status.clear();
            out.write(CLEAR_LINE);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Out> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Out {
    /// Writes a text. An error is ignored, so that the run ends with its exit code and cleans up.
    fn write(&mut self, text: &str) {
        let _gone = self.to.write_all(text.as_bytes()).and_then(|()| self.to.flush());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[derive(Clone, Default)]
    struct Paper(Arc<Mutex<Vec<u8>>>);

    impl Write for Paper {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn written(live: bool, colours: bool, act: impl FnOnce(&Screen)) -> String {
        let paper = Paper::default();
        let out = Mutex::new(Out { to: Box::new(paper.clone()), status: String::new() });
        act(&Screen { live, colours, out });
        let bytes = paper.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn without_a_terminal_there_are_only_plain_lines() {
        let text = written(false, false, |screen| {
            screen.status("1 of 2");
            screen.line(&screen.paint(Style::Bad, "lost"));
            screen.end_status();
        });
        assert_eq!(text, "lost\n");
    }

    #[test]
    fn a_permanent_line_is_written_above_the_status_line() {
        let text = written(true, true, |screen| {
            screen.status("1 of 2");
            screen.line(&screen.paint(Style::Good, "found"));
            screen.end_status();
        });
        assert_eq!(
            text,
            "\r\x1b[2K\x1b[?7l1 of 2\x1b[?7h\r\x1b[2K\x1b[1;32mfound\x1b[0m\n\x1b[?7l1 of 2\x1b[?7h\r\x1b[2K"
        );
    }
}
