//! The report as text for a terminal.

use std::fmt::Write as _;

use super::{Report, Verdict};

pub(super) fn render(report: &Report) -> String {
    let mut text = format!("Probe of {} with the profile {}\n\n", report.url, report.profile);
    let width = report.rows.iter().map(|row| row.title.chars().count()).max().unwrap_or(0);
    for row in &report.rows {
        let _infallible =
            writeln!(text, "{:<11}  {:<width$}  {}", row.verdict.words(), row.title, row.observation);
        if row.verdict > Verdict::AsExpected {
            let _infallible = writeln!(text, "{:13}expected: {}", "", row.expectation);
            let _infallible = writeln!(text, "{:13}advice: {}", "", row.advice);
        }
    }
    let _infallible = writeln!(text, "\n{} ({} requests)", report.summary(), report.requests);
    // Nothing that an API sends may control the terminal.
    text.chars().map(|c| if c.is_control() && c != '\n' { '\u{fffd}' } else { c }).collect()
}
