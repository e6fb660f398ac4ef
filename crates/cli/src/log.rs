//! The log: lines on the standard error, as text or as JSON.

mod json;
mod level;

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, OnceLock};

use prometheus_client::metrics::counter::Counter;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::reload;
use tracing_subscriber::util::SubscriberInitExt as _;

use self::json::JsonLines;
use self::level::Levels;
use crate::line_writer::LineWriter;

pub(crate) use self::level::CurrentLevel;

/// The environment variable that sets the level of the log.
pub(crate) const VARIABLE: &str = "ONCEGATE_LOG";

/// Set once, when the command starts.
static LOG: OnceLock<Log> = OnceLock::new();
static DROPPED: LazyLock<Counter> = LazyLock::new(Counter::default);

/// The form of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

/// The log of this process.
#[derive(Debug)]
struct Log {
    lines: LineWriter,
    format: LogFormat,
    levels: Levels,
    /// The number of dropped lines that the log has reported.
    told: AtomicU64,
}

/// The levels of libraries that are not named. Their lines name neither a request nor what to do, and the sidecar reports the
/// same faults itself. Clients can cause warnings of the HTTP and TLS libraries without limit, and heads that these libraries
/// refuse would be in their debug lines, with credentials.
const LIBRARIES: [&str; 4] = ["sqlx=error", "h2=error", "hyper=error", "rustls=error"];

/// The prefix of the parts of this program.
const OWN: &str = "oncegate";

/// The target of the lines about what operators do. They are logged at every level: an operator who changes the level must not
/// act unseen.
pub(crate) const OPERATOR: &str = "oncegate::operator";

/// Starts the log on the standard error, with the levels in `ONCEGATE_LOG`.
///
/// # Errors
/// If `ONCEGATE_LOG` is invalid, or no thread can be started.
pub(crate) fn start(format: LogFormat) -> Result<(), String> {
    let value = std::env::var_os(VARIABLE).unwrap_or_default();
    let value = value.to_string_lossy();
    let filter = filter(&value).map_err(|error| format!("{VARIABLE}: {error}"))?;
    let (filter, handle) = reload::Layer::new(filter);
    let lines = LineWriter::start("log", io::stderr(), dropped())
        .map_err(|error| format!("cannot start the log: {error}"))?;
    let levels = Levels::new(handle, &value);
    let log = LOG.get_or_init(|| Log { lines, format, levels, told: AtomicU64::new(0) });
    let registry = tracing_subscriber::registry().with(filter);
    let _is_set_already = match format {
        LogFormat::Text => {
            let lines =
                tracing_subscriber::fmt::layer().with_writer(log).with_ansi(crate::style::is_error_colored());
            registry.with(lines).try_init()
        }
        LogFormat::Json => registry.with(JsonLines::new(log)).try_init(),
    };
    Ok(())
}

/// Waits, for a bounded time, until all lines are written. Called at the end of the process.
pub(crate) fn flush() {
    if let Some(log) = LOG.get() {
        log.lines.flush();
    }
}

/// Counts the lines that were dropped because the standard error was not read.
pub(crate) fn dropped() -> Counter {
    DROPPED.clone()
}

/// The level in force; `None` if there is no log.
pub(crate) fn level() -> Option<CurrentLevel> {
    LOG.get().map(|log| log.levels.current())
}

/// Checks a level as [`set_level`] takes it.
///
/// # Errors
/// The reason why it is none.
pub(crate) fn check_level(text: &str) -> Result<(), String> {
    filter(text.trim()).map(drop)
}

/// Sets the level until `until`, or falls back to the level of the start without a value.
///
/// # Errors
/// If the level is invalid.
pub(crate) fn set_level(
    change: Option<(&str, std::time::SystemTime)>,
) -> Result<Option<CurrentLevel>, String> {
    LOG.get().map(|log| log.levels.set(change)).transpose()
}

/// Falls back to the level of the start, if the level in force was set by this change.
pub(crate) fn end_level(change: u64) {
    if let Some(log) = LOG.get() {
        log.levels.end(change);
    }
}

/// Parses a value of `ONCEGATE_LOG`: a level, or `PART=LEVEL`, or several of them separated by commas. Parts that are not
/// named have the level `info`, but for [`LIBRARIES`]. A level without a part is that of this program; libraries get more
/// than `info` only by their name. [`OPERATOR`] has `info` always.
pub(crate) fn filter(value: &str) -> Result<Targets, String> {
    let mut named = Vec::new();
    let mut level_of_all = LevelFilter::INFO;
    for directive in value.split(',').map(str::trim).filter(|directive| !directive.is_empty()) {
        // The library would read an unknown level as a part of the program, and switch everything else off.
        let level = directive.rsplit_once('=').map_or(directive, |(_, level)| level);
        let parsed = level.parse::<LevelFilter>().ok();
        let Some(parsed) = parsed.filter(|_| !level.chars().all(|c| c.is_ascii_digit())) else {
            return Err(format!(
                "{level:?} is not a level: write error, warn, info, debug, trace or off, or NAME=LEVEL for a part of the program \
                 (oncegate_engine=debug)"
            ));
        };
        if directive.contains('=') {
            named.push(directive);
        } else {
            level_of_all = parsed;
        }
    }
    let mut directives = vec![level_of_all.min(LevelFilter::INFO).to_string()];
    directives.extend(LIBRARIES.map(str::to_owned));
    if level_of_all > LevelFilter::INFO {
        directives.push(format!("{OWN}={level_of_all}"));
    }
    directives.extend(named.into_iter().map(str::to_owned));
    // The last one for a target counts.
    directives.push(format!("{OPERATOR}=info"));
    directives.join(",").parse().map_err(|error: tracing_subscriber::filter::ParseError| error.to_string())
}

/// The writer of one event, which is one or more whole lines.
#[derive(Debug)]
pub(crate) struct LogLine(&'static Log);

impl<'a> MakeWriter<'a> for &'static Log {
    type Writer = LogLine;

    fn make_writer(&'a self) -> LogLine {
        LogLine(self)
    }
}

impl Log {
    /// Writes a line, after the number of those that were dropped before it.
    fn write(&self, line: Vec<u8>) {
        let dropped = self.lines.dropped();
        let told = self.told.swap(dropped, Ordering::Relaxed);
        if dropped > told {
            let missing = dropped - told;
            self.lines.write(
                match self.format {
                    LogFormat::Text => format!("{missing} {DROPPED_HERE}\n"),
                    LogFormat::Json => json::dropped_line(missing, DROPPED_HERE),
                }
                .into(),
            );
        }
        self.lines.write(line);
    }
}

const DROPPED_HERE: &str = "lines of the log were dropped here, because the standard error was not read";

impl Write for LogLine {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.write(line.to_vec());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_level_is_refused() {
        for value in [
            "info",
            "debug",
            "WARN",
            "off",
            "oncegate_engine=debug",
            "oncegate_engine=debug,warn",
            " info , h2=off ",
        ] {
            assert!(filter(value).is_ok(), "{value}");
        }
        for value in
            ["debgu", "verbose", "7", "oncegate_engine", "oncegate_engine=debgu", "oncegate=", "info,x y"]
        {
            assert!(filter(value).is_err(), "{value}");
        }
        assert!(filter("debgu").unwrap_err().contains("\"debgu\" is not a level"));
    }

    #[test]
    fn a_level_is_that_of_the_program_and_libraries_have_their_own() {
        use tracing::Level;
        // The target, the level without a name of it, and true if that is written.
        for (value, target, level, is_written) in [
            ("", "oncegate::proxy", Level::INFO, true),
            ("", "oncegate::proxy", Level::DEBUG, false),
            ("warn", "oncegate_engine", Level::INFO, false),
            ("debug,warn", "oncegate_engine", Level::INFO, false),
            ("debug", "oncegate::proxy", Level::DEBUG, true),
            ("trace", "oncegate_http", Level::TRACE, true),
            ("oncegate_engine=debug", "oncegate_engine", Level::DEBUG, true),
            ("oncegate_engine=debug", "oncegate_http", Level::DEBUG, false),
            ("oncegate=warn,debug", "oncegate", Level::INFO, false),
            ("trace", "h2::server", Level::WARN, false),
            ("trace", "hyper_util::client", Level::WARN, false),
            ("trace", "rustls::conn", Level::WARN, false),
            ("trace", "sqlx::query", Level::WARN, false),
            ("trace", "another_library", Level::DEBUG, false),
            ("trace", "another_library", Level::INFO, true),
            ("h2=debug", "h2::server", Level::DEBUG, true),
            ("sqlx=debug", "sqlx::query", Level::DEBUG, true),
        ] {
            let filter = filter(value).unwrap();
            assert_eq!(filter.would_enable(target, &level), is_written, "{value:?}: {level} of {target}");
        }
    }

    #[test]
    fn no_filter_hides_what_operators_do() {
        for value in ["off", "oncegate=off", "oncegate::operator=off", "off,oncegate::operator=error"] {
            let filter = filter(value).unwrap();
            assert!(filter.would_enable(OPERATOR, &tracing::Level::INFO), "{value}: {filter}");
        }
        assert!(!filter("off").unwrap().would_enable("oncegate::proxy", &tracing::Level::ERROR));
    }
}
