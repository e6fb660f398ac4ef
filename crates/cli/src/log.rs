//! The log: lines on the standard error.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, OnceLock};

use prometheus_client::metrics::counter::Counter;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::line_writer::LineWriter;

/// The environment variable that sets the level of the log.
pub(crate) const VARIABLE: &str = "ONCEGATE_LOG";

/// Set once, when the command starts.
static LOG: OnceLock<Log> = OnceLock::new();
static DROPPED: LazyLock<Counter> = LazyLock::new(Counter::default);

/// The log of this process.
#[derive(Debug)]
struct Log {
    lines: LineWriter,
    /// The number of dropped lines that the log has reported.
    told: AtomicU64,
}

/// The notices and slow statements that this library logs name neither the store nor what to do. The sidecar reports faults of
/// the store itself.
const DATABASE_LIBRARY: &str = "sqlx=error";

/// Starts the log on the standard error, with the levels in `ONCEGATE_LOG`.
///
/// # Errors
/// If `ONCEGATE_LOG` is invalid, or no thread can be started.
pub(crate) fn start() -> Result<(), String> {
    let value = std::env::var_os(VARIABLE).unwrap_or_default();
    let filter = filter(&value.to_string_lossy()).map_err(|error| format!("{VARIABLE}: {error}"))?;
    let lines = LineWriter::start("log", io::stderr(), dropped())
        .map_err(|error| format!("cannot start the log: {error}"))?;
    let log = LOG.get_or_init(|| Log { lines, told: AtomicU64::new(0) });
    let lines = tracing_subscriber::fmt::layer().with_writer(log).with_ansi(crate::style::is_log_colored());
    let _is_set_already = tracing_subscriber::registry().with(lines).with(filter).try_init();
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

/// Parses a value of `ONCEGATE_LOG`: a level, or `PART=LEVEL`, or several of them separated by commas. Parts that are
/// not named have the level `info`, but for [`DATABASE_LIBRARY`].
pub(crate) fn filter(value: &str) -> Result<Targets, String> {
    let mut directives = vec!["info", DATABASE_LIBRARY];
    for directive in value.split(',').map(str::trim).filter(|directive| !directive.is_empty()) {
        // The library would read an unknown level as a part of the program, and switch everything else off.
        let level = directive.rsplit_once('=').map_or(directive, |(_, level)| level);
        let is_level = level.parse::<LevelFilter>().is_ok() && !level.chars().all(|c| c.is_ascii_digit());
        if !is_level {
            return Err(format!(
                "{level:?} is not a level: write error, warn, info, debug, trace or off, or NAME=LEVEL for a part of the program \
                 (oncegate_engine=debug)"
            ));
        }
        directives.push(directive);
    }
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

impl Write for LogLine {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let dropped = self.0.lines.dropped();
        let told = self.0.told.swap(dropped, Ordering::Relaxed);
        if dropped > told {
            let missing = dropped - told;
            self.0.lines.write(
                format!(
                    "{missing} lines of the log were dropped here, because the standard error was not read\n"
                )
                .into(),
            );
        }
        self.0.lines.write(line.to_vec());
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
    fn parts_without_a_level_have_the_level_info() {
        assert_eq!(
            filter("oncegate_engine=debug").unwrap().to_string(),
            "oncegate_engine=debug,sqlx=error,info"
        );
        assert_eq!(filter("warn").unwrap().to_string(), "sqlx=error,warn");
        assert_eq!(filter("sqlx=debug").unwrap().to_string(), "sqlx=debug,info");
    }
}
