//! Where the demonstration is watched: a terminal with a line that is alive, or plain lines.

use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The style of a text, on a terminal that has colours.
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
    /// The line that is alive, as it stands there now.
    status: String,
}

const CLEAR_LINE: &str = "\r\x1b[2K";
/// So that a line that is too long for the terminal is cut and can be written over.
const WRAP_OFF: &str = "\x1b[?7l";
const WRAP_ON: &str = "\x1b[?7h";

impl Screen {
    /// On the standard output, or on the standard error where the output is for a program.
    pub(crate) fn new(on_stderr: bool) -> Self {
        let terminal = if on_stderr { io::stderr().is_terminal() } else { io::stdout().is_terminal() };
        let live = terminal && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        // https://no-color.org: set to anything but nothing.
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

    /// Writes lines that stay.
    pub(crate) fn line(&self, text: &str) {
        let mut out = self.lock();
        let status = out.status.clone();
        out.write(&if status.is_empty() {
            format!("{text}\n")
        } else {
            format!("{CLEAR_LINE}{text}\n{WRAP_OFF}{status}{WRAP_ON}")
        });
    }

    /// Writes the line that is alive, over what it was. Nothing without a terminal.
    pub(crate) fn status(&self, text: &str) {
        let mut out = self.lock();
        if self.live && out.status != text {
            out.status = text.to_owned();
            out.write(&format!("{CLEAR_LINE}{WRAP_OFF}{text}{WRAP_ON}"));
        }
    }

    /// Takes the line that is alive away.
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
    /// A reader that went away misses the rest; the run goes on to its exit code, and cleans up.
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
        fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(octets)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn written(live: bool, colours: bool, act: impl FnOnce(&Screen)) -> String {
        let paper = Paper::default();
        let out = Mutex::new(Out { to: Box::new(paper.clone()), status: String::new() });
        act(&Screen { live, colours, out });
        let octets = paper.0.lock().unwrap().clone();
        String::from_utf8(octets).unwrap()
    }

    #[test]
    fn without_a_terminal_there_are_plain_lines_and_nothing_else() {
        let text = written(false, false, |screen| {
            screen.status("1 of 2");
            screen.line(&screen.paint(Style::Bad, "lost"));
            screen.end_status();
        });
        assert_eq!(text, "lost\n");
    }

    #[test]
    fn a_line_that_stays_goes_above_the_one_that_is_alive() {
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
