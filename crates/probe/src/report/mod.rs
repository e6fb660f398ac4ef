//! The report: rows, a verdict, and four ways to show it.

mod html;
mod junit;
mod table;

use serde::Serialize;

use crate::session::Session;

/// The verdict of a row, or of the whole report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Nothing is claimed; the observation is the reason.
    NotTested,
    /// The API does what the profile promises.
    AsExpected,
    /// The API does something else that harms no client by itself.
    Differs,
    /// A client can cause a second effect, lose a result, or see the data of another caller.
    Dangerous,
}

impl Verdict {
    /// The verdict in words.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::NotTested => "not tested",
            Self::AsExpected => "as expected",
            Self::Differs => "differs",
            Self::Dangerous => "DANGEROUS",
        }
    }
}

/// A row of the report.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Row {
    /// The name of the row for programs, such as `other-body`.
    pub id: String,
    /// The name for people.
    pub title: String,
    /// The behaviour that the profile promises.
    pub expectation: String,
    /// The behaviour that was seen, or the reason why nothing was tested.
    pub observation: String,
    /// The comparison of both.
    pub verdict: Verdict,
    /// The change to the API that would mend it; empty if there is nothing to mend.
    pub advice: String,
}

/// The result of a probe.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// The address that was probed, without its query.
    pub url: String,
    /// The profile that the verdicts compare with.
    pub profile: String,
    /// The time of the probe.
    pub date: String,
    /// The version of the probe.
    pub version: &'static str,
    /// The number of requests that were sent.
    pub requests: u32,
    /// True if the operator ended the probe before its last row.
    pub interrupted: bool,
    /// The worst verdict of all rows.
    pub verdict: Verdict,
    /// The rows, in the order in which they ran.
    pub rows: Vec<Row>,
}

impl Report {
    pub(crate) fn new(session: &Session, rows: Vec<Row>) -> Self {
        Self {
            url: session.url.clone(),
            profile: session.expectations.name.clone(),
            date: session.options.date.clone(),
            version: env!("CARGO_PKG_VERSION"),
            requests: session.budget.used(),
            interrupted: session.is_interrupted(),
            verdict: rows.iter().map(|row| row.verdict).max().unwrap_or(Verdict::NotTested),
            rows,
        }
    }

    /// The row with this name.
    #[must_use]
    pub fn row(&self, id: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.id == id)
    }

    /// The number of rows with this verdict.
    #[must_use]
    pub fn count(&self, verdict: Verdict) -> usize {
        self.rows.iter().filter(|row| row.verdict == verdict).count()
    }

    /// The numbers of rows by verdict, in words. Says so if the probe was interrupted.
    #[must_use]
    pub fn summary(&self) -> String {
        let all = [Verdict::AsExpected, Verdict::Differs, Verdict::Dangerous, Verdict::NotTested];
        let parts: Vec<_> =
            all.iter().map(|verdict| format!("{} {}", self.count(*verdict), verdict.words())).collect();
        let summary = parts.join(", ");
        if self.interrupted { format!("INTERRUPTED: {summary}") } else { summary }
    }

    /// The report as JSON, in several lines.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// The report as a table for a terminal.
    #[must_use]
    pub fn to_table(&self) -> String {
        self.to_painted_table(&|_, words| words.to_owned())
    }

    /// The same, with the words of each verdict as `paint` returns them. It may add colours, and must not change their width.
    #[must_use]
    pub fn to_painted_table(&self, paint: &dyn Fn(Verdict, &str) -> String) -> String {
        table::render(self, paint)
    }

    /// The report as a JUnit document: a failure for each row that differs or is dangerous.
    #[must_use]
    pub fn to_junit(&self) -> String {
        junit::render(self)
    }

    /// The report as one HTML page without other files.
    #[must_use]
    pub fn to_html(&self) -> String {
        html::render(self)
    }
}

/// Text for XML and HTML, without characters that XML forbids.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            character if character.is_control() || matches!(character, '\u{fffe}' | '\u{ffff}') => {
                escaped.push('\u{fffd}')
            }
            character => escaped.push(character),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let row = |id: &str, verdict: Verdict| Row {
            id: id.to_owned(),
            title: format!("Row <{id}>"),
            expectation: "one effect".to_owned(),
            observation: "2 effects & \u{1b}[31mmore\nas expected  Row".to_owned(),
            verdict,
            advice: if verdict > Verdict::AsExpected { "Mend it.".to_owned() } else { String::new() },
        };
        Report {
            url: "http://127.0.0.1:1/<script>".to_owned(),
            profile: "ietf".to_owned(),
            date: "2026-11-23T12:00:00Z".to_owned(),
            version: "0.1.0",
            requests: 9,
            interrupted: false,
            verdict: Verdict::Dangerous,
            rows: vec![
                row("a", Verdict::AsExpected),
                row("b", Verdict::Differs),
                row("c", Verdict::Dangerous),
                row("d", Verdict::NotTested),
            ],
        }
    }

    #[test]
    fn the_page_is_one_file_and_shows_text_as_text() {
        let page = report().to_html();
        assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"), "{page}");
        for never in ["<script", "src=", "href=", "url(", "@import", "\u{1b}"] {
            assert!(!page.contains(never), "{never} is in the page");
        }
        for part in ["Row &lt;a&gt;", "2 effects &amp;", "Mend it.", "not tested", "DANGEROUS", "9 requests"]
        {
            assert!(page.contains(part), "{part} is not in the page");
        }
    }

    #[test]
    fn the_junit_document_has_a_failure_for_each_finding() {
        let text = report().to_junit();
        assert!(text.contains("tests=\"4\" failures=\"2\" skipped=\"1\" errors=\"0\""), "{text}");
        assert_eq!(text.matches("<failure type=\"dangerous\"").count(), 1);
        assert_eq!(text.matches("<failure type=\"differs\"").count(), 1);
        assert_eq!(text.matches("<skipped").count(), 1);
        assert!(!text.contains('\u{1b}') && text.contains("Row &lt;b&gt;"), "{text}");
    }

    #[test]
    fn the_table_has_advice_and_no_control_characters() {
        let text = report().to_table();
        assert!(text.contains("Mend it.") && !text.contains('\u{1b}'), "{text}");
        assert!(!text.lines().any(|line| line == "as expected  Row"), "{text}");
        assert!(text.contains("1 as expected, 1 differs, 1 DANGEROUS, 1 not tested"), "{text}");
    }

    #[test]
    fn an_interrupted_probe_says_so_in_each_form() {
        let report = Report { interrupted: true, ..report() };
        let summary = "INTERRUPTED: 1 as expected, 1 differs, 1 DANGEROUS, 1 not tested";
        assert!(report.to_table().contains(summary), "{}", report.to_table());
        assert!(report.to_html().contains(summary), "{}", report.to_html());
        assert!(report.to_junit().contains("(ietf), interrupted\""), "{}", report.to_junit());
        assert!(report.to_json().contains("\"interrupted\": true"), "{}", report.to_json());
    }

    #[test]
    fn the_json_has_verdicts_as_words() {
        let json: serde_json::Value = serde_json::from_str(&report().to_json()).unwrap();
        assert_eq!(json["verdict"], "dangerous");
        assert_eq!(json["rows"][3]["verdict"], "not-tested");
    }
}
