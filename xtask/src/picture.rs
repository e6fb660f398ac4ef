//! The picture in the README: a short form of what `oncegate demo` prints, as an SVG.

use std::fmt::Write as _;

use crate::run::{Result, cargo, output, root};

const PATH: &str = "docs/demo.svg";
const WIDTH: usize = 860;
const LINE_HEIGHT: usize = 19;
const FIRST_LINE: usize = 58;

/// The rows of the table that the picture shows.
const ROWS: [&str; 7] = [
    "payments intended", "charges in the ledger", "  duplicates", "  missing", "money intended",
    "money charged", "customers with two",
];

/// Runs the demo and writes the picture.
pub(crate) fn run() -> Result<()> {
    let printed = output(cargo().args(["run", "--quiet", "--package", "oncegate-cli", "--", "demo"]))?;
    let lines = excerpt(&printed);
    if !ROWS.iter().all(|row| lines.iter().any(|line| line.starts_with(row))) {
        return Err(format!("the demo printed no table:\n{printed}"));
    }
    std::fs::write(root().join(PATH), svg(&lines)).map_err(|error| format!("{PATH}: {error}"))?;
    println!("wrote {PATH}");
    Ok(())
}

/// Each kind of event of the two runs once, the last line of each run, and the most important rows of the table.
fn excerpt(printed: &str) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut seen: Vec<&str> = Vec::new();
    let mut is_run = false;
    for line in printed.lines() {
        if line.starts_with("1 of 2") || line.starts_with("2 of 2") {
            is_run = true;
            seen.clear();
            lines.push(line);
        } else if line.is_empty() {
            if is_run {
                lines.push("");
            }
            is_run = false;
        } else if is_run {
            let kind = line.get(..18).unwrap_or(line);
            let is_progress = line.trim_start().starts_with('…');
            if !is_progress && !seen.contains(&kind) {
                seen.push(kind);
                lines.push(line);
            }
        } else if line.ends_with("with Oncegate") || ROWS.iter().any(|row| line.starts_with(row)) {
            lines.push(line);
        }
    }
    lines
}

fn svg(lines: &[&str]) -> String {
    let height = FIRST_LINE + lines.len() * LINE_HEIGHT + 10;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         role=\"img\" aria-label=\"The output of oncegate demo\">\n\
         <style>text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#c9d1d9;\
         white-space:pre}}.head{{fill:#fff;font-weight:bold}}.bad{{fill:#ff7b72}}.good{{fill:#7ee787}}.dim{{fill:#8b949e}}\
         </style>\n<rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#0d1117\"/>\n\
         <circle cx=\"20\" cy=\"20\" r=\"6\" fill=\"#ff5f56\"/><circle cx=\"40\" cy=\"20\" r=\"6\" fill=\"#ffbd2e\"/>\
         <circle cx=\"60\" cy=\"20\" r=\"6\" fill=\"#27c93f\"/><text x=\"84\" y=\"25\" class=\"dim\">$ oncegate demo</text>\n"
    );
    for (number, line) in lines.iter().enumerate() {
        let y = FIRST_LINE + number * LINE_HEIGHT;
        let text = line.replace('&', "&amp;").replace('<', "&lt;");
        let class = class(line);
        // Writing to a string cannot fail.
        let _ =
            writeln!(svg, "<text x=\"20\" y=\"{y}\" class=\"{class}\" xml:space=\"preserve\">{text}</text>");
    }
    svg.push_str("</svg>\n");
    svg
}

fn class(line: &str) -> &'static str {
    let is_bad = line.starts_with("  charged again")
        || line.contains(" duplicates") && !line.contains(" 0 duplicates");
    if line.contains(" of 2  ") || line.ends_with("with Oncegate") {
        "head"
    } else if line.starts_with("  duplicates")
        || line.starts_with("money charged")
        || line.starts_with("charges in")
    {
        ""
    } else if is_bad {
        "bad"
    } else if line.contains(" 0 duplicates") || line.starts_with("  replayed") {
        "good"
    } else if line.starts_with("  ") && !line.starts_with("  killed") {
        "dim"
    } else {
        ""
    }
}
