//! The report as text for a terminal.

use std::fmt::Write as _;

use super::{Report, Verdict};

pub(super) fn render(report: &Report, paint: &dyn Fn(Verdict, &str) -> String) -> String {
    let mut text = format!("Probe of {} with the profile {}\n\n", plain(&report.url), plain(&report.profile));
    let width = report.rows.iter().map(|row| row.title.chars().count()).max().unwrap_or(0);
    for row in &report.rows {
        let (title, observation) = (plain(&row.title), plain(&row.observation));
        let verdict = paint(row.verdict, &format!("{:<11}", row.verdict.words()));
        let _infallible = writeln!(text, "{verdict}  {title:<width$}  {observation}");
        if row.verdict > Verdict::AsExpected {
            let _infallible = writeln!(text, "{:13}expected: {}", "", plain(&row.expectation));
            let _infallible = writeln!(text, "{:13}advice: {}", "", plain(&row.advice));
        }
    }
    let _infallible =
        writeln!(text, "\n{} ({} requests)", paint(report.verdict, &report.summary()), report.requests);
    text
}

/// The text in one line: nothing that an API sends may control the terminal, or look like another row.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
