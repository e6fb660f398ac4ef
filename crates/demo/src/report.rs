//! The table at the end, and the conclusion under it. Both are computed from the counts of the runs.

use serde::Serialize;

use crate::figures::Figures;
use crate::plan::{FaultCounts, Plan};
use crate::stage::{Screen, Style};

/// The whole result.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    seed: u64,
    plan: Planned,
    without_oncegate: Figures,
    with_oncegate: Figures,
    conclusion: String,
    /// True if with Oncegate each intent has one charge, and its customer got the receipt.
    clean: bool,
}

/// The part of the report that depends on the seed only.
#[derive(Clone, Copy, Debug, Serialize)]
struct Planned {
    intents: usize,
    double_clicks: usize,
    faults: FaultCounts,
    cents: u64,
}

impl Report {
    pub(crate) fn new(plan: &Plan, without: Figures, with: Figures) -> Self {
        Self {
            seed: plan.seed,
            plan: Planned {
                intents: plan.intents.len(),
                double_clicks: plan.double_clicks(),
                faults: plan.faults(),
                cents: plan.cents(),
            },
            conclusion: conclude(&without, &with),
            clean: with.is_clean(),
            without_oncegate: without,
            with_oncegate: with,
        }
    }

    pub(crate) const fn is_clean(&self) -> bool {
        self.clean
    }

    pub(crate) fn json(&self) -> Result<String, String> {
        serde_json::to_string_pretty(self)
            .map_err(|error| format!("cannot write the report as JSON: {error}"))
    }

    pub(crate) fn show(&self, screen: Screen) {
        screen.line("");
        let head = format!("{:<44}{:>18}{:>18}", "", "without Oncegate", "with Oncegate");
        screen.line(&screen.paint(Style::Bold, head.trim_end()));
        for row in self.rows() {
            let [without, with] = [&row.without, &row.with].map(|cell| {
                let style = if cell == "0" { Style::Good } else { Style::Bad };
                let padded = format!("{cell:>18}");
                if row.should_be_zero { screen.paint(style, &padded) } else { padded }
            });
            screen.line(&format!("{:<44}{without}{with}", row.title));
        }
        screen.line("");
        let style = if self.clean { Style::Good } else { Style::Bad };
        for line in wrapped(&self.conclusion, 80) {
            screen.line(&screen.paint(style, &line));
        }
    }

    fn rows(&self) -> Vec<Row> {
        let both = |title, of: fn(&Figures) -> String| Row {
            title,
            should_be_zero: false,
            without: of(&self.without_oncegate),
            with: of(&self.with_oncegate),
        };
        let wrong = |title, of| Row { should_be_zero: true, ..both(title, of) };
        let sidecar = |title, of| Row { without: "–".to_owned(), ..both(title, of) };
        let two = self.with_oncegate.two_sidecars;
        let killed = match two {
            None => "sidecar killed (kill -9) and restarted",
            Some(_) => "one of two sidecars killed (kill -9)",
        };
        let mut rows = vec![
            both("payments intended", |f| f.intents.to_string()),
            both("requests sent (attempts)", |f| f.attempts.to_string()),
            both("requests lost before delivery", |f| f.faults.request_lost.to_string()),
            both("responses lost", |f| f.responses_lost.to_string()),
            both("charges in the ledger", |f| f.charges.to_string()),
            wrong("  duplicates", |f| f.duplicates.to_string()),
            wrong("  missing", |f| f.missing.to_string()),
            both("money intended", |f| money(f.cents_meant)),
            both("money charged", |f| money(f.cents_charged)),
            wrong("customers with two different receipts", |f| f.contradictions.to_string()),
            wrong("customers without a response", |f| f.unanswered.to_string()),
            sidecar("replays: the first response again", |f| f.replays.to_string()),
            sidecar("refused: 409, in progress", |f| f.refused_in_progress.to_string()),
            sidecar("refused: outcome unknown", |f| f.refused_outcome_unknown.to_string()),
            sidecar(killed, |f| f.sidecar_kills.to_string()),
            sidecar("  outcomes that it could not find out", |f| f.resolved().to_string()),
            sidecar("    resolved by the operator: charged", |f| f.resolved_completed.to_string()),
            sidecar("    resolved by the operator: not charged", |f| f.resolved_released.to_string()),
        ];
        if let Some(two) = two {
            let row =
                |title, number: u64| Row { with: number.to_string(), ..sidecar(title, |_| String::new()) };
            rows.extend([
                row("requests to the sidecar that was killed", two.requests_to_the_killed),
                row("requests to the other one", two.requests_to_the_other),
                row("responses of one replayed by the other", two.replayed_by_the_other),
            ]);
        }
        rows
    }
}

struct Row {
    title: &'static str,
    without: String,
    with: String,
    should_be_zero: bool,
}

fn conclude(without: &Figures, with: &Figures) -> String {
    let before = match without.duplicates {
        0 => "Without Oncegate no customer was charged twice this time".to_owned(),
        n => format!(
            "Without Oncegate, retries made {} that no customer intended, {} too much",
            counted(n, "charge"),
            money(without.cents_charged.saturating_sub(without.cents_meant))
        ),
    };
    let kill = match with.sidecar_kills {
        0 => String::new(),
        1 if with.two_sidecars.is_some() => {
            ", though one of two sidecars was killed in the middle and stayed away".to_owned()
        }
        1 => ", though it was killed in the middle".to_owned(),
        n => format!(", though it was killed {n} times"),
    };
    let unknown = match with.resolved() {
        0 => String::new(),
        n => {
            format!(" and left {} unknown, which an operator resolved from the ledger", counted(n, "outcome"))
        }
    };
    if with.is_clean() {
        let intents = counted(with.intents, "payment");
        return format!(
            "{before}; with Oncegate, the same traffic made one charge for each of {intents}{kill}{unknown}."
        );
    }
    let wrong = [
        (with.duplicates, "duplicate charge"),
        (with.missing, "missing charge"),
        (with.contradictions, "contradicting response"),
        (with.unanswered, "customer without a response"),
    ];
    let wrong: Vec<_> = wrong.into_iter().filter(|(n, _)| *n > 0).map(|(n, what)| counted(n, what)).collect();
    let wrong = if wrong.is_empty() { "amounts that differ".to_owned() } else { wrong.join(", ") };
    format!("{before}; WITH ONCEGATE SOMETHING WENT WRONG: {wrong}.")
}

fn counted(n: u64, what: &str) -> String {
    match (n, what.split_once(' ')) {
        (1, _) => format!("1 {what}"),
        (_, Some(("customer", rest))) => format!("{n} customers {rest}"),
        _ => format!("{n} {what}s"),
    }
}

/// An amount without a currency, such as `1,234.50`.
fn money(cents: u64) -> String {
    let whole = (cents / 100).to_string();
    let mut grouped = String::new();
    for (at, digit) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    format!("{grouped}.{:02}", cents % 100)
}

fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        if let Some(line) = lines.last_mut() {
            if line.is_empty() {
                line.push_str(word);
            } else if line.chars().count() + 1 + word.chars().count() <= width {
                line.push(' ');
                line.push_str(word);
            } else {
                lines.push(word.to_owned());
            }
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clean() -> Figures {
        Figures { intents: 10, charges: 10, cents_meant: 1_000, cents_charged: 1_000, ..Figures::default() }
    }

    #[test]
    fn the_conclusion_has_the_counts() {
        let without = Figures { charges: 13, duplicates: 3, cents_charged: 1_350, ..clean() };
        let with = Figures { sidecar_kills: 1, resolved_completed: 2, ..clean() };
        assert_eq!(
            conclude(&without, &with),
            "Without Oncegate, retries made 3 charges that no customer intended, 3.50 too much; with Oncegate, the same \
             traffic made one charge for each of 10 payments, though it was killed in the middle and left 2 outcomes \
             unknown, which an operator resolved from the ledger."
        );
        assert!(
            conclude(&clean(), &clean())
                .starts_with("Without Oncegate no customer was charged twice this time;")
        );
    }

    #[test]
    fn a_failure_is_in_the_conclusion() {
        for (with, what) in [
            (Figures { charges: 11, duplicates: 1, ..clean() }, "1 duplicate charge."),
            (Figures { charges: 8, missing: 2, ..clean() }, "2 missing charges."),
            (Figures { unanswered: 2, ..clean() }, "2 customers without a response."),
            (
                Figures { contradictions: 1, missing: 1, ..clean() },
                "1 missing charge, 1 contradicting response.",
            ),
            (Figures { cents_charged: 999, ..clean() }, "amounts that differ."),
        ] {
            let plan = Plan::draw(1, 1);
            let report = Report::new(&plan, clean(), with);
            assert!(!report.is_clean());
            assert!(report.conclusion.ends_with(&format!("WITH ONCEGATE SOMETHING WENT WRONG: {what}")));
        }
    }

    #[test]
    fn money_is_grouped() {
        for (cents, text) in [(0, "0.00"), (7, "0.07"), (99_999, "999.99"), (123_456_789, "1,234,567.89")] {
            assert_eq!(money(cents), text);
        }
    }

    #[test]
    fn lines_are_wrapped_between_words() {
        assert_eq!(wrapped("one two three", 8), ["one two", "three"]);
    }
}
