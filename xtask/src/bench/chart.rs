//! The chart of the performance page, from the tables of the report: each row a ratio on a logarithmic axis, with its range.

use std::fmt::Write as _;

use crate::run::Result;

/// Rows with the same reference.
struct Group {
    title: &'static str,
    section: &'static str,
    /// The name of a row in the report, and its name in the chart.
    rows: &'static [(&'static str, &'static str, Owner)],
}

#[derive(Clone, Copy, PartialEq)]
enum Owner {
    Oncegate,
    Other,
}
use Owner::{Oncegate, Other};

const GROUPS: &[Group] = &[
    Group {
        title: "of bare axum",
        section: "layer",
        rows: &[
            ("layer, first request", "Tower layer, memory: first request", Oncegate),
            ("layer, replay", "Tower layer, memory: replay", Oncegate),
        ],
    },
    Group {
        title: "of nginx proxy_pass",
        section: "sidecar",
        rows: &[
            ("sidecar, request without a key", "sidecar: request without a key", Oncegate),
            ("sidecar, memory store, first request", "sidecar, memory: first request", Oncegate),
            ("sidecar, embedded store, first request", "sidecar, disk: first request", Oncegate),
            ("sidecar, memory store, replay", "sidecar, memory: replay", Oncegate),
            ("sidecar, embedded store, replay", "sidecar, disk: replay", Oncegate),
        ],
    },
    Group {
        title: "of bare redb, durable",
        section: "store",
        rows: &[
            ("64 clients", "embedded store, 64 in flight", Oncegate),
            ("256 clients", "embedded store, 256 in flight", Oncegate),
        ],
    },
    Group {
        title: "stores that machines share, 64 in flight",
        section: "shared",
        rows: &[
            ("claim and completion | Redis, no file, 64 in flight", "Redis, of two bare scripts", Oncegate),
            (
                "claim and completion | PostgreSQL, 64 in flight",
                "PostgreSQL, of a statement for each row",
                Oncegate,
            ),
            ("against a bare key | `transact`, 64 in flight", "transact, of a bare unique key", Oncegate),
        ],
    },
    Group {
        title: "first request, of axum alone",
        section: "peers",
        rows: &[
            ("oncegate layer, first request", "Oncegate layer, memory", Oncegate),
            ("axum-idempotent, first request", "axum-idempotent, memory", Other),
        ],
    },
    Group {
        title: "first request, of Express alone",
        section: "peers",
        rows: &[
            (
                "oncegate sidecar on Express, embedded store, first request",
                "Oncegate sidecar, disk",
                Oncegate,
            ),
            (
                "oncegate sidecar on Express, memory store, first request",
                "Oncegate sidecar, memory",
                Oncegate,
            ),
            ("node-idempotency, first request", "node-idempotency, memory", Other),
            ("express-idempotency, first request", "express-idempotency, memory", Other),
        ],
    },
    Group {
        title: "first request, of FastAPI alone",
        section: "peers",
        rows: &[
            (
                "oncegate sidecar on FastAPI, embedded store, first request",
                "Oncegate sidecar, disk",
                Oncegate,
            ),
            (
                "oncegate sidecar on FastAPI, memory store, first request",
                "Oncegate sidecar, memory",
                Oncegate,
            ),
            ("asgi-idempotency-header, first request", "asgi-idempotency-header, memory", Other),
            ("powertools, first request", "powertools, Redis", Other),
        ],
    },
];

/// The benchmarks whose rows are in the chart.
pub(super) fn sections() -> impl Iterator<Item = &'static str> {
    GROUPS.iter().map(|group| group.section)
}

struct Ratio {
    median: f64,
    low: f64,
    high: f64,
}

/// Draws the chart of a report that has all its rows.
///
/// # Errors
/// A row is missing.
pub(super) fn chart(report: &str) -> Result<String> {
    let mut svg = Svg::default();
    for group in GROUPS {
        svg.title(group.title);
        for (name, label, owner) in group.rows {
            let ratio = find(report, group.section, name)
                .ok_or_else(|| format!("the report has no row {name} in {}", group.section))?;
            svg.row(label, &ratio, *owner);
        }
    }
    Ok(svg.finish())
}

/// The ratio in a row of a section. A name with a bar is that of a row and the first cell of its table's head.
fn find(report: &str, section: &str, name: &str) -> Option<Ratio> {
    let (name, title) = name.split_once(" | ").unwrap_or((name, ""));
    let start = format!("## {section}");
    let lines = report.lines().skip_while(|line| *line != start).skip(1);
    let mut head: Vec<&str> = Vec::new();
    let mut previous: Vec<&str> = Vec::new();
    for line in lines.take_while(|line| !line.starts_with("## ")) {
        let cells: Vec<&str> = line.split('|').map(|cell| cell.trim().trim_matches('*')).collect();
        if line.starts_with("|---") {
            head = std::mem::take(&mut previous);
        } else if cells.get(1) == Some(&name)
            && (title.is_empty() || head.get(1).is_some_and(|first| first.starts_with(title)))
        {
            let at = |names: &[&str]| head.iter().position(|cell| names.contains(cell));
            let (low, high) = cells.get(at(&["range"])?)?.split_once('–')?;
            let median = cells.get(at(&["of the reference", "ratio"])?)?;
            return Some(Ratio {
                median: median.parse().ok()?,
                low: low.parse().ok()?,
                high: high.parse().ok()?,
            });
        }
        previous = cells;
    }
    None
}

/// The left end of the axis, the place of 1, and the right end.
const LEFT: f64 = 300.0;
const RIGHT: f64 = 780.0;
const WIDTH: f64 = 860.0;
const ROW: f64 = 22.0;
const LOWEST: f64 = 0.125;
const HIGHEST: f64 = 16.0;

const TITLE: &str = "Throughput as a ratio to the reference of each group: right of 1 is faster";
const LABEL: &str = "Throughput of Oncegate and of other libraries, as ratios. The same figures are in the tables of this page.";
const NOTE: &str = "Point: median of the rounds; line: their range. Blue: Oncegate; grey: other libraries.";
const STYLE: &str = "text{font:13px system-ui,sans-serif;fill:#24292f}.title{font-weight:600}\
                     .tick,.note{font-size:12px;fill:#57606a}.tick{text-anchor:middle}\
                     .grid{stroke:#d0d7de}.one{stroke:#57606a;stroke-width:1.5}\
                     .own path{stroke:#0969da;stroke-width:2}.own circle{fill:#0969da}\
                     .other path{stroke:#8c959f;stroke-width:2}.other circle{fill:#8c959f}.paper{fill:#fff}\
                     @media(prefers-color-scheme:dark){text{fill:#c9d1d9}.tick,.note{fill:#8b949e}\
                     .grid{stroke:#30363d}.one{stroke:#8b949e}.own path{stroke:#58a6ff}.own circle{fill:#58a6ff}\
                     .paper{fill:#0d1117}}";

fn place(ratio: f64) -> f64 {
    let share = (ratio.clamp(LOWEST, HIGHEST) / LOWEST).ln() / (HIGHEST / LOWEST).ln();
    LEFT + share * (RIGHT - LEFT)
}

#[derive(Default)]
struct Svg {
    text: String,
    y: f64,
}

impl Svg {
    fn title(&mut self, title: &str) {
        self.y += ROW + 8.0;
        let _infallible = writeln!(self.text, r#"<text x="20" y="{}" class="title">{title}</text>"#, self.y);
    }

    fn row(&mut self, label: &str, ratio: &Ratio, owner: Owner) {
        self.y += ROW;
        let class = if owner == Oncegate { "own" } else { "other" };
        let Ratio { median, low, high } = ratio;
        let (y, middle) = (self.y, self.y - 5.0);
        let (from, at, to) = (place(*low), place(*median), place(*high));
        let _infallible = writeln!(
            self.text,
            "<g class=\"{class}\"><text x=\"32\" y=\"{y}\">{label}</text><path d=\"M{from:.1} {middle}H{to:.1}\"/>\
             <circle cx=\"{at:.1}\" cy=\"{middle}\" r=\"5\"/><text x=\"{}\" y=\"{y}\">{median:.2}</text></g>",
            RIGHT + 20.0
        );
    }

    fn finish(self) -> String {
        let (top, height) = (40.0, self.y + 62.0);
        let bottom = self.y + 10.0;
        let mut axis = String::new();
        for (ratio, text) in [
            (0.125, "⅛"),
            (0.25, "¼"),
            (0.5, "½"),
            (1.0, "1"),
            (2.0, "2"),
            (4.0, "4"),
            (8.0, "8"),
            (16.0, "16"),
        ] {
            let (x, class) = (place(ratio), if ratio == 1.0 { "one" } else { "grid" });
            let _infallible = writeln!(
                axis,
                "<path d=\"M{x:.1} 8V{bottom}\" class=\"{class}\"/><text x=\"{x:.1}\" y=\"{}\" class=\"tick\">{text}</text>",
                bottom + 16.0
            );
        }
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 -{top} {WIDTH} {all}\" width=\"{WIDTH}\" height=\"{all}\" \
             role=\"img\" aria-label=\"{LABEL}\">\n<style>{STYLE}</style>\n\
             <rect class=\"paper\" y=\"-{top}\" width=\"100%\" height=\"100%\" rx=\"8\"/>\n\
             <text x=\"20\" y=\"-14\" class=\"title\">{TITLE}</text>\n{axis}{text}\
             <text x=\"20\" y=\"{note}\" class=\"note\">{NOTE}</text>\n</svg>\n",
            all = height + top,
            text = self.text,
            note = self.y + 48.0,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "## layer\n\n| | requests per s | of the reference | range | p99, ms |\n|---|---|---|---|---|\n\
                          | **bare** | 10 | 1.00 | 1.00–1.00 | 1 |\n| layer, replay | 7 | 0.70 | 0.61–0.82 | 2 |\n\n\
                          ## shared\n\n| Redis, 64 in flight | per s | bare, per s | ratio | range |\n|---|---|---|---|---|\n\
                          | claim | 2 | 1 | 2.00 | 1.50–2.50 |\n\n\
                          | Redis, 1 in flight | per s | bare, per s | ratio | range |\n|---|---|---|---|---|\n\
                          | claim | 3 | 1 | 3.00 | 2.90–3.10 |\n";

    fn found(section: &str, name: &str) -> Option<(f64, f64, f64)> {
        find(REPORT, section, name).map(|ratio| (ratio.median, ratio.low, ratio.high))
    }

    #[test]
    fn rows_are_found_by_their_section_name_and_table() {
        assert_eq!(found("layer", "layer, replay"), Some((0.70, 0.61, 0.82)));
        assert_eq!(found("shared", "claim | Redis, 64 in flight"), Some((2.0, 1.5, 2.5)));
        assert_eq!(found("shared", "claim | Redis, 1 in flight"), Some((3.0, 2.9, 3.1)));
        assert_eq!(found("layer", "claim"), None);
        assert_eq!(found("shared", "completion"), None);
        assert!(chart(REPORT).is_err(), "a chart without all of its rows");
    }
}
