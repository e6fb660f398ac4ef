//! Colours of the output on a terminal: the same colour for the same state in every command.

use std::io::{self, IsTerminal as _};
use std::sync::OnceLock;

use clap::ValueEnum;

/// The choice of colours, by the flag `--color`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ColorChoice {
    /// Colours if the standard output is a terminal that shows them, and NO_COLOR is not set
    #[default]
    Auto,
    Always,
    Never,
}

/// The choice, and true if the standard output gets colours.
static CHOSEN: OnceLock<(ColorChoice, bool)> = OnceLock::new();

/// Decides for the whole process. Before this there are no colours.
pub(crate) fn start(choice: ColorChoice) {
    let _started_before = CHOSEN.set((choice, is_wanted(choice, io::stdout().is_terminal())));
}

fn is_wanted(choice: ColorChoice, is_terminal: bool) -> bool {
    match choice {
        ColorChoice::Always => true,
        ColorChoice::Never => false,
        ColorChoice::Auto => {
            let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
            let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
            is_terminal && !is_plain && !is_dumb
        }
    }
}

/// Returns true if the standard output gets colours.
pub(crate) fn is_colored() -> bool {
    CHOSEN.get().is_some_and(|(_, is_colored)| *is_colored)
}

/// Returns true if the standard error gets colours.
pub(crate) fn is_error_colored() -> bool {
    CHOSEN.get().is_some_and(|(choice, _)| is_wanted(*choice, io::stderr().is_terminal()))
}

/// The meaning of a word, which has a colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    /// It is done: green.
    Good,
    /// It is done, without an execution now: cyan.
    Calm,
    /// It is not done, and goes on by itself: yellow.
    Open,
    /// A person has to look: bold red.
    Alarm,
    /// Not important: dim.
    Quiet,
    /// A title: bold.
    Title,
    Plain,
}

impl Tone {
    /// The tone of a state of a record or a message, of an outcome, or of a verdict.
    pub(crate) fn of(word: &str) -> Self {
        match word {
            "executed" | "completed" | "ok" | "requeued" | "yes" => Self::Good,
            "replayed" | "tombstone" | "dropped" | "taken" => Self::Calm,
            "in-progress"
            | "request-in-progress"
            | "released"
            | "waiting"
            | "failing"
            | "warn"
            | "rate-limited" => Self::Open,
            "unknown" | "abandoned" | "fenced" | "outcome-unknown" | "refused" | "error" | "no"
            | "mismatch" => Self::Alarm,
            "unprotected" | "not-covered" | "client-left" => Self::Quiet,
            _ => Self::Plain,
        }
    }

    const fn code(self) -> &'static str {
        match self {
            Self::Good => "32",
            Self::Calm => "36",
            Self::Open => "33",
            Self::Alarm => "1;31",
            Self::Quiet => "2",
            Self::Title => "1",
            Self::Plain => "",
        }
    }
}

/// The text in this tone. It must have no control characters, and its width does not change.
pub(crate) fn paint(tone: Tone, text: &str) -> String {
    if is_colored() { painted(tone, text) } else { text.to_owned() }
}

/// A word in its own tone; the text may have spaces around it.
pub(crate) fn paint_word(text: &str) -> String {
    paint(Tone::of(text.trim()), text)
}

fn painted(tone: Tone, text: &str) -> String {
    match tone.code() {
        "" => text.to_owned(),
        code => format!("\u{1b}[{code}m{text}\u{1b}[0m"),
    }
}

/// The number of columns of the terminal on the standard output; `None` if it is none.
pub(crate) fn terminal_width() -> Option<usize> {
    terminal_size().map(|(columns, _)| columns)
}

/// The numbers of columns and rows of the terminal on the standard output; `None` if it is none.
pub(crate) fn terminal_size() -> Option<(usize, usize)> {
    let out = io::stdout();
    if !out.is_terminal() {
        return None;
    }
    // A terminal that does not know its size reports zeros.
    let or_usual = |size: u16, usual| if size == 0 { usual } else { usize::from(size) };
    let size = rustix::termios::tcgetwinsize(&out).ok();
    Some(size.map_or((80, 24), |size| (or_usual(size.ws_col, 80), or_usual(size.ws_row, 24))))
}

/// The text, cut to this number of characters, with `…` at its end if something is missing.
pub(crate) fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(width.saturating_sub(1)).collect();
    if width > 0 {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_has_one_colour_and_other_words_have_none() {
        assert_eq!(painted(Tone::of("unknown"), "unknown"), "\u{1b}[1;31munknown\u{1b}[0m");
        assert_eq!(painted(Tone::of("POST /pay"), "POST /pay"), "POST /pay");
        assert_eq!(Tone::of("replayed"), Tone::of("tombstone"));
    }

    #[test]
    fn a_text_is_cut_at_characters() {
        assert_eq!(cut("größer", 6), "größer");
        assert_eq!(cut("größer", 4), "grö…");
        assert_eq!(cut("größer", 0), "");
    }
}
