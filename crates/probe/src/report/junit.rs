//! The report as a JUnit document, which test systems read.

use std::fmt::Write as _;

use super::{Report, Verdict, escaped};

pub(super) fn render(report: &Report) -> String {
    let failures = report.count(Verdict::Differs) + report.count(Verdict::Dangerous);
    let counts = format!(
        "tests=\"{}\" failures=\"{failures}\" skipped=\"{}\" errors=\"0\"",
        report.rows.len(),
        report.count(Verdict::NotTested)
    );
    let interrupted = if report.interrupted { ", interrupted" } else { "" };
    let name = escaped(&format!("oncegate probe {} ({}){interrupted}", report.url, report.profile));
    let mut text = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let _infallible = writeln!(text, "<testsuites {counts}>");
    let date = escaped(&report.date);
    let _infallible = writeln!(text, "  <testsuite name=\"{name}\" timestamp=\"{date}\" {counts}>");
    for row in &report.rows {
        let (id, title, seen) = (escaped(&row.id), escaped(&row.title), escaped(&row.observation));
        let _infallible = write!(text, "    <testcase classname=\"oncegate.probe.{id}\" name=\"{title}\">");
        let inner = match row.verdict {
            Verdict::AsExpected => format!("<system-out>{seen}</system-out>"),
            Verdict::NotTested => format!("<skipped message=\"{seen}\"/>"),
            verdict => {
                let kind = if verdict == Verdict::Dangerous { "dangerous" } else { "differs" };
                let (expected, advice) = (escaped(&row.expectation), escaped(&row.advice));
                format!(
                    "<failure type=\"{kind}\" message=\"{seen}\">expected: {expected}\nadvice: {advice}</failure>"
                )
            }
        };
        let _infallible = writeln!(text, "{inner}</testcase>");
    }
    text + "  </testsuite>\n</testsuites>\n"
}
