//! The report as one HTML page, which can be shared.

use std::fmt::Write as _;

use super::{Report, Verdict, escaped};

const STYLE: &str = "
:root { color-scheme: light dark; --line: #8884; --good: #1a7f37; --other: #9a6700; --bad: #cf222e; --none: #6e7781; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } code { font-size: .95em; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .5rem; border-top: 1px solid var(--line); }
.as-expected { color: var(--good); } .differs { color: var(--other); } .dangerous { color: var(--bad); font-weight: bold; }
.not-tested { color: var(--none); }
.advice { margin-top: .25rem; padding-left: .75rem; border-left: 3px solid var(--line); }
";

pub(super) fn render(report: &Report) -> String {
    let (url, profile) = (escaped(&report.url), escaped(&report.profile));
    let mut text = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Probe of {url}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n\
         <h1>Repeated requests to <code>{url}</code></h1>\n\
         <p>Profile <code>{profile}</code>, {}, {} requests, by oncegate {}.</p>\n\
         <p><strong>{}</strong></p>\n\
         <table>\n<thead><tr><th>Row</th><th>Verdict</th><th>Seen</th><th>Expected</th></tr></thead>\n<tbody>\n",
        escaped(&report.date),
        report.requests,
        escaped(report.version),
        escaped(&report.summary()),
    );
    for row in &report.rows {
        let class = match row.verdict {
            Verdict::AsExpected => "as-expected",
            Verdict::Differs => "differs",
            Verdict::Dangerous => "dangerous",
            Verdict::NotTested => "not-tested",
        };
        let advice = if row.advice.is_empty() {
            String::new()
        } else {
            format!("<div class=\"advice\">{}</div>", escaped(&row.advice))
        };
        let _infallible = writeln!(
            text,
            "<tr id=\"{}\"><td>{}</td><td class=\"{class}\">{}</td><td>{}{advice}</td><td>{}</td></tr>",
            escaped(&row.id),
            escaped(&row.title),
            row.verdict.words(),
            escaped(&row.observation),
            escaped(&row.expectation),
        );
    }
    text.push_str(
        "</tbody>\n</table>\n<p>A row claims only what was seen. A row that is not tested says nothing about the API.</p>\n</body>\n</html>\n",
    );
    text
}
