//! `oncegate top`: a summary of a running sidecar that is refreshed in place.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{IsTerminal as _, StdoutLock, Write};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};

use crate::activity::{OUTCOME_GROUPS, OutcomeGroup};
use crate::config::{duration, rounded_duration_text};
use crate::keys::client::Client;
use crate::keys::print::{json as print_json, text};
use crate::keys::{Access, Failure, ask, env};
use crate::style::{Tone, cut, paint, terminal_size, terminal_width};
use crate::tap::{group_tone, is_reader_gone};

/// The bounds of the interval.
const MIN_INTERVAL: Duration = Duration::from_millis(500);
const MAX_INTERVAL: Duration = Duration::from_secs(3600);

/// The operations that are counted at most. Others are counted together.
const MAX_OPERATIONS: usize = 1000;

/// The rows of operations and of misuse that are shown.
const SHOWN: usize = 8;

/// Shows a summary of a running sidecar.
#[derive(Args, Debug)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    access: Access,
    /// Prints the summary once. Rates are then those of the last whole minute, and operations are not counted
    #[arg(long)]
    once: bool,
    /// The time between two summaries, from 500ms to 1h
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = interval)]
    interval: Duration,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = duration(text)?;
    if (MIN_INTERVAL..=MAX_INTERVAL).contains(&interval) {
        Ok(interval)
    } else {
        Err("from 500ms to 1h is allowed".to_owned())
    }
}

/// Runs the command.
pub(crate) fn run(args: &TopArgs) -> ExitCode {
    ask(async |out: &mut StdoutLock<'_>| show(args, env, out).await)
}

async fn show(
    args: &TopArgs,
    env: impl Fn(&str) -> Option<String>,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let client = Arc::new(args.access.client(env)?);
    let as_json = args.access.json;
    let mut sample = Sample::read(&client, &args.access).await?;
    if args.once {
        return if as_json {
            print_json(&sample.json(None, &[]), out)
        } else {
            sample.print(None, &[], 0, out)
        };
    }
    let operations = Operations::default();
    tokio::spawn(count(client.clone(), operations.clone()));
    let is_terminal = std::io::stdout().is_terminal();
    let mut before: Option<Sample> = None;
    let mut lines = 0;
    loop {
        let busiest = operations.busiest();
        if as_json {
            writeln!(out, "{}", sample.json(before.as_ref(), &busiest))?;
        } else {
            let mut page = Vec::new();
            sample.print(before.as_ref(), &busiest, 0, &mut page)?;
            let page = String::from_utf8_lossy(&page).into_owned();
            if is_terminal {
                // A page that is longer than the screen could not be replaced.
                let rows = terminal_size().map_or(usize::MAX, |(_, rows)| rows.saturating_sub(1).max(1));
                let page: String = page.split_inclusive('\n').take(rows).collect();
                lines = replace(&page, lines, out)?;
            } else {
                writeln!(out, "{page}")?;
            }
        }
        out.flush()?;
        let mut outage = Outage::default();
        let next = loop {
            tokio::time::sleep(args.interval).await;
            if is_reader_gone() {
                return Ok(());
            }
            match Sample::read(&client, &args.access).await {
                Ok(next) => break next,
                Err(Failure::Unreachable(words)) => {
                    if outage.begins() {
                        complain!("{words}; trying again");
                        // The notice stands below the last summary, which stays.
                        lines = 0;
                    }
                }
                Err(other) => return Err(other),
            }
        };
        before = Some(std::mem::replace(&mut sample, next));
    }
}

/// Replaces the lines that were printed before by a page, and returns the number of its lines. The screen scrolls as usual, and
/// what was above stays.
fn replace(page: &str, lines: usize, out: &mut impl Write) -> Result<usize, Failure> {
    // Up to the first line, and clear to the end of the screen.
    let up = if lines > 0 { format!("\u{1b}[{lines}A\r\u{1b}[J") } else { String::new() };
    write!(out, "{up}{page}")?;
    Ok(page.lines().count())
}

#[derive(Default)]
struct Outage(bool);

impl Outage {
    /// Returns true for the first failure.
    fn begins(&mut self) -> bool {
        !std::mem::replace(&mut self.0, true)
    }
}

/// The summary and the misuse of a sidecar at one moment.
struct Sample {
    at: Instant,
    summary: Value,
    misuse: Value,
    /// The command that lists the unsettled records of this sidecar.
    list_unsettled: String,
}

/// Requests for each second, by group.
type Rates = Vec<(OutcomeGroup, f64)>;

impl Sample {
    async fn read(client: &Client, access: &Access) -> Result<Self, Failure> {
        let summary = client.get("/v1/summary").await?;
        let misuse = client.get("/v1/misuse").await?;
        Ok(Self { at: Instant::now(), summary, misuse, list_unsettled: access.list_unsettled() })
    }

    fn total(&self, group: OutcomeGroup) -> u64 {
        self.summary["requests"]["groups"][group.as_str()].as_u64().unwrap_or_default()
    }

    /// The rates since the sample before. Without one, or after a restart of the sidecar, those of the last whole minute.
    fn rates(&self, before: Option<&Self>) -> Rates {
        let is_same = |before: &&Self| before.summary["started_at"] == self.summary["started_at"];
        if let Some(before) = before.filter(is_same) {
            let seconds = self.at.duration_since(before.at).as_secs_f64().max(0.001);
            let rate = |group| self.total(group).saturating_sub(before.total(group)) as f64 / seconds;
            return OUTCOME_GROUPS.into_iter().map(|group| (group, rate(group))).collect();
        }
        let minutes = self.summary["last_hour"].as_array().map_or(&[][..], Vec::as_slice);
        // The last one is not over.
        let minute = minutes.len().checked_sub(2).and_then(|at| minutes.get(at)).unwrap_or(&Value::Null);
        let rate = |group: OutcomeGroup| {
            minute["requests"][group.as_str()].as_u64().unwrap_or_default() as f64 / 60.0
        };
        OUTCOME_GROUPS.into_iter().map(|group| (group, rate(group))).collect()
    }

    /// The misuse, the newest first.
    fn newest_misuse(&self) -> Vec<&Value> {
        let mut rows: Vec<_> = self.misuse["misuse"].as_array().into_iter().flatten().collect();
        rows.sort_by_key(|row| std::cmp::Reverse(row["last"].as_str().unwrap_or_default().to_owned()));
        rows
    }

    fn json(&self, before: Option<&Self>, busiest: &[(String, u64)]) -> Value {
        let rates: serde_json::Map<_, _> = self
            .rates(before)
            .into_iter()
            .map(|(group, rate)| (group.as_str().to_owned(), json!((rate * 1000.0).round() / 1000.0)))
            .collect();
        let busiest: Vec<_> =
            busiest.iter().map(|(name, count)| json!({"operation": name, "requests": count})).collect();
        json!({
            "summary": self.summary,
            "per_second": rates,
            "busiest": busiest,
            "misuse": self.misuse["misuse"],
        })
    }

    /// Prints the page. Each line fits into the terminal; `width` is its width, or 0 to ask the terminal.
    fn print(
        &self,
        before: Option<&Self>,
        busiest: &[(String, u64)],
        width: usize,
        out: &mut impl Write,
    ) -> Result<(), Failure> {
        let width = if width > 0 { width } else { terminal_width().unwrap_or(usize::MAX) };
        let mut page = Page { width, text: String::new() };
        self.state(&mut page);
        page.line(&[]);
        page.line(&[(Tone::Title, format!("{:<14}{:>12}{:>12}", "REQUESTS", "PER SECOND", "TOTAL"))]);
        for (group, rate) in self.rates(before) {
            let total = self.total(group);
            let tone = if total > 0 { group_tone(group) } else { Tone::Quiet };
            page.line(&[
                (tone, format!("{:<14}", group.as_str())),
                (Tone::Plain, format!("{rate:>12.1}{total:>12}")),
            ]);
        }
        if !busiest.is_empty() {
            page.line(&[]);
            page.line(&[(
                Tone::Title,
                format!("{:>8}  {}", "REQUESTS", "BUSIEST OPERATIONS SINCE THIS START"),
            )]);
            for (operation, count) in busiest.iter().take(SHOWN) {
                page.line(&[(Tone::Plain, format!("{count:>8}  {operation}"))]);
            }
        }
        let misuse = self.newest_misuse();
        if !misuse.is_empty() {
            page.line(&[]);
            page.line(&[(Tone::Title, "MISTAKES OF CLIENTS, THE NEWEST FIRST".to_owned())]);
        }
        for row in misuse.iter().take(SHOWN) {
            let counts: Vec<_> = row["counts"]
                .as_object()
                .into_iter()
                .flatten()
                .map(|(kind, count)| format!("{} {count}", text(&Value::from(kind.as_str()))))
                .collect();
            let caller = if row["caller"].is_null() { "unknown".to_owned() } else { text(&row["caller"]) };
            page.line(&[
                (Tone::Open, counts.join(", ")),
                (Tone::Plain, format!("  {}  caller {caller}", text(&row["operation"]))),
            ]);
        }
        Ok(out.write_all(page.text.as_bytes())?)
    }

    /// The lines about the sidecar and its store.
    fn state(&self, page: &mut Page) {
        let summary = &self.summary;
        let seconds = |value: &Value| value.as_u64().map(|s| rounded_duration_text(Duration::from_secs(s)));
        let up = seconds(&summary["uptime_seconds"]).unwrap_or_default();
        let state = match (summary["ready"] == true, summary["draining"] == true) {
            (_, true) => (Tone::Open, "stopping".to_owned()),
            (true, _) => (Tone::Good, "ready".to_owned()),
            (false, _) => (Tone::Alarm, format!("not ready: {}", text(&summary["not_ready"]))),
        };
        page.line(&[
            (Tone::Title, format!("oncegate {}", text(&summary["version"]))),
            (Tone::Plain, format!("  up {up}  ")),
            state,
        ]);
        let store = &summary["store"];
        let breaker = text(&store["breaker"]);
        page.line(&[
            (
                Tone::Plain,
                format!("store {}, {}, breaker ", text(&store["name"]), text(&store["durability"])),
            ),
            (if breaker == "closed" { Tone::Good } else { Tone::Alarm }, breaker),
        ]);
        for advisory in store["advisories"].as_array().into_iter().flatten() {
            page.line(&[(Tone::Open, format!("! {}", text(&advisory["text"])))]);
        }
        let flight = &summary["in_flight"];
        page.line(&[(
            Tone::Plain,
            format!(
                "in flight {} of {}, executing {}, connections {} of {}",
                text(&flight["requests"]),
                text(&flight["max_requests"]),
                text(&flight["executing"]),
                text(&flight["connections"]),
                text(&flight["max_connections"])
            ),
        )]);
        let pending = flight["settlements_pending"].as_u64().unwrap_or_default();
        if pending > 0 {
            page.line(&[(
                Tone::Alarm,
                format!(
                    "! {pending} results are not in the store yet, only in this sidecar: do not restart it"
                ),
            )]);
        }
        let records = &summary["records"];
        if records.is_null() {
            return page.line(&[(Tone::Quiet, "unsettled records: not counted yet".to_owned())]);
        }
        let open = ["abandoned", "unknown"].map(|name| records[name].as_u64().unwrap_or_default());
        let mut words = vec![(
            if open.iter().sum::<u64>() > 0 { Tone::Alarm } else { Tone::Good },
            format!("unsettled {} unknown, {} abandoned", open[1], open[0]),
        )];
        if open.iter().sum::<u64>() > 0 {
            let oldest = seconds(&records["oldest_unsettled_seconds"]).unwrap_or_default();
            let left = seconds(&records["unsettled_retention_left_seconds"]).unwrap_or_default();
            words.push((
                Tone::Plain,
                format!(", the oldest for {oldest}, the first is removed in {left}: {}", self.list_unsettled),
            ));
        }
        page.line(&words);
    }
}

/// Lines of at most a given width.
struct Page {
    width: usize,
    text: String,
}

impl Page {
    fn line(&mut self, words: &[(Tone, String)]) {
        let mut left = self.width;
        for (tone, word) in words {
            let word = cut(word, left);
            left -= word.chars().count();
            self.text.push_str(&paint(*tone, &word));
        }
        let _infallible = writeln!(self.text);
    }
}

/// Counts of requests by operation, since the command began.
#[derive(Clone, Default)]
struct Operations(Arc<Mutex<HashMap<String, u64>>>);

impl Operations {
    fn add(&self, operation: &str) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = counts.len() >= MAX_OPERATIONS && !counts.contains_key(operation);
        let name = if is_full { "all others" } else { operation };
        *counts.entry(name.to_owned()).or_default() += 1;
    }

    /// The operations with the most requests.
    fn busiest(&self) -> Vec<(String, u64)> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut counts: Vec<_> = counts.iter().map(|(name, count)| (name.clone(), *count)).collect();
        counts.sort_by(|(one, more), (other, fewer)| fewer.cmp(more).then_with(|| one.cmp(other)));
        counts.truncate(SHOWN);
        counts
    }
}

/// Counts the requests of the live feed. Without the feed, for example because it has too many readers, operations are not shown.
async fn count(client: Arc<Client>, operations: Operations) {
    loop {
        if let Ok(mut body) = client.stream("/v1/activity").await {
            let mut buffer = Vec::new();
            while let Some(Ok(frame)) = body.frame().await {
                buffer.extend_from_slice(&frame.into_data().unwrap_or_default());
                while let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
                    let line: Vec<u8> = buffer.drain(..=end).collect();
                    let line: Value = serde_json::from_slice(&line).unwrap_or_default();
                    if line["operation"].is_string() {
                        operations.add(&text(&line["operation"]));
                    }
                }
            }
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(executed: u64) -> Sample {
        let summary = json!({
            "version": "0.1.0", "started_at": "t", "uptime_seconds": 65, "ready": true, "draining": false,
            "store": {"name": "memory", "durability": "volatile", "breaker": "closed", "advisories": []},
            "in_flight": {"requests": 1, "max_requests": 2048, "executing": 1, "connections": 3, "max_connections": 10000},
            "records": {"in_progress": 1, "abandoned": 0, "unknown": 2, "oldest_unsettled_seconds": 700,
                "unsettled_retention_left_seconds": 7200},
            "requests": {"groups": {"executed": executed}},
            "last_hour": [{"requests": {"executed": 120}}, {"requests": {"executed": 1}}],
        });
        let misuse = json!({"misuse": [
            {"caller": null, "operation": "POST /old", "counts": {"key-missing": 1}, "last": "2026-01-01"},
            {"caller": "00aa", "operation": "POST /new\u{1b}", "counts": {"mismatch": 3}, "last": "2026-01-02"},
        ]});
        let list_unsettled = "oncegate keys ls --state unsettled".to_owned();
        Sample { at: Instant::now(), summary, misuse, list_unsettled }
    }

    #[test]
    fn rates_are_those_between_two_samples_or_of_the_last_whole_minute() {
        let executed = |rates: Rates| rates[0].1;
        let before = Sample { at: Instant::now() - Duration::from_secs(2), ..sample(10) };
        assert!((executed(sample(30).rates(Some(&before))) - 10.0).abs() < 0.1);
        assert!((executed(sample(30).rates(None)) - 2.0).abs() < 0.001);
        // After a restart the counters begin again.
        let mut restarted = sample(1);
        restarted.summary["started_at"] = "u".into();
        assert!((executed(restarted.rates(Some(&before))) - 2.0).abs() < 0.001);
    }

    #[test]
    fn each_line_fits_into_a_narrow_terminal() {
        let mut page = Vec::new();
        let busiest = [("POST /a/very/long/operation/that/does/not/fit".to_owned(), 7)];
        sample(10).print(None, &busiest, 40, &mut page).unwrap();
        let page = String::from_utf8(page).unwrap();
        assert!(page.lines().all(|line| line.chars().count() <= 40), "{page}");
        assert!(page.contains("unsettled 2 unknown, 0 abandoned"), "{page}");
        let (new, old) = (page.find("mismatch 3").unwrap(), page.find("key-missing 1").unwrap());
        assert!(new < old && page.contains("POST /new\\u{1b}"), "{page}");
    }
}
