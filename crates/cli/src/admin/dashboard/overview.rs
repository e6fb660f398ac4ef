//! The overview: the last hour, what is in flight, the store, warnings.

use askama::Template;
use axum::extract::{Extension, Query, State};
use axum::response::Response;

use super::access::Access;
use super::format::{duration, number, second};
use super::{Frame, Section, page};
use crate::activity::{Minute, OUTCOME_GROUPS, OutcomeGroup};
use crate::admin::keys::Pairs;
use crate::admin::summary::Summary;
use crate::admin::{AdminState, view};

#[derive(Template)]
#[template(path = "overview.html")]
struct OverviewPage {
    frame: Frame,
    is_live: bool,
    now: String,
    health: Health,
    tiles: Vec<Tile>,
    chart: Chart,
    store: &'static str,
    promises: Vec<Promise>,
    advisories: Vec<(&'static str, String)>,
    warnings: Vec<String>,
    started: String,
    uptime: String,
    outcomes: Vec<(&'static str, String)>,
}

/// The state of the sidecar in one sentence.
struct Health {
    /// `good`, `warn` or `bad`.
    tone: &'static str,
    word: &'static str,
    text: String,
}

struct Tile {
    label: &'static str,
    value: String,
    note: String,
    tone: &'static str,
    href: &'static str,
}

/// A guarantee of the store, and its meaning.
struct Promise {
    name: &'static str,
    value: String,
    meaning: &'static str,
}

pub(super) async fn show(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    query: Pairs,
) -> Response {
    let is_live =
        !query.is_ok_and(|Query(pairs)| pairs.iter().any(|pair| pair.0 == "live" && pair.1 == "off"));
    let summary = Summary::of(&state).await;
    let warnings = {
        let live = state.live.borrow();
        let warnings = live.config.warnings.iter().map(ToString::to_string);
        live.refused_reloads.notes().cloned().chain(warnings).collect()
    };
    let outcomes = summary.outcomes.iter().map(|(name, count)| (*name, number(*count))).collect();
    page(&OverviewPage {
        frame: Frame::new(&state, &access, Section::Overview, "Overview"),
        is_live,
        now: second(&view::time(state.engine.store().now())),
        health: health(&summary, state.engine.id_guard().problem().is_some()),
        tiles: tiles(&summary),
        chart: Chart::of(&summary.minutes),
        store: summary.store,
        promises: promises(&summary),
        advisories: summary
            .advisories
            .iter()
            .map(|advisory| (advisory.name, advisory.text.clone()))
            .collect(),
        warnings,
        started: second(&summary.started_at),
        uptime: duration(summary.uptime_seconds),
        outcomes,
    })
}

fn health(summary: &Summary, has_id_problem: bool) -> Health {
    let (tone, word, text) = match &summary.not_ready {
        Some(_) if summary.is_draining => {
            ("warn", "Stopping", "The sidecar finishes running requests, and takes no new ones.".to_owned())
        }
        Some(why) if has_id_problem => {
            ("bad", "Not ready", format!("{why}. Requests with a key are refused meanwhile, whatever store-outage says."))
        }
        Some(why) => ("bad", "Not ready", format!("{why}. Requests with a key are refused meanwhile, unless store-outage says otherwise.")),
        None if summary.is_degraded => (
            "warn",
            "Degraded",
            "Requests are served, but the store was out of reach, and some may have passed without protection.".to_owned(),
        ),
        None if !summary.advisories.is_empty() => {
            ("warn", "Ready, with notes", "Requests are served. There are notes for an operator below.".to_owned())
        }
        None => ("good", "Ready", "Requests are served, and the store takes claims.".to_owned()),
    };
    Health { tone, word, text }
}

fn tiles(summary: &Summary) -> Vec<Tile> {
    let records = summary.records;
    let stuck = records.map(|counts| counts.abandoned + counts.unknown);
    let of = |used: usize, max: usize| (number(used as u64), format!("of {}", number(max as u64)));
    let tone = |used: usize, max: usize| if used * 5 > max * 4 { "warn" } else { "" };
    let (in_flight, in_flight_max) = of(summary.requests_in_flight, summary.max_in_flight);
    let (connections, connections_max) = of(summary.connections, summary.max_connections);
    vec![
        Tile {
            label: "Stuck",
            value: stuck.map_or_else(|| "–".to_owned(), number),
            note: match (stuck, summary.oldest_unsettled_seconds) {
                (None, _) => "the store is being counted".to_owned(),
                (Some(1..), Some(age)) => format!("the oldest for {}", duration(age)),
                _ => "no outcome is unknown".to_owned(),
            },
            tone: if stuck.is_some_and(|count| count > 0) { "bad" } else { "" },
            href: "/stuck",
        },
        Tile {
            label: "Executing",
            value: number(summary.executing as u64),
            note: records.map_or_else(String::new, |counts| {
                format!("keys in progress: {}", number(counts.in_progress))
            }),
            tone: "",
            href: "/keys?state=in-progress",
        },
        Tile {
            label: "Requests with a key",
            value: in_flight,
            note: in_flight_max,
            tone: tone(summary.requests_in_flight, summary.max_in_flight),
            href: "",
        },
        Tile {
            label: "Connections",
            value: connections,
            note: connections_max,
            tone: tone(summary.connections, summary.max_connections),
            href: "",
        },
    ]
}

fn promises(summary: &Summary) -> Vec<Promise> {
    let durability = match summary.durability.as_str() {
        "volatile" => "Records end with the process: a retry after a restart executes again.",
        "unlogged" => {
            "Each stop of the store's server loses what came after its last snapshot, or everything: their retries execute again."
        }
        "buffered" => "A crash or a failover can lose the last records: their retries execute again.",
        "synced" => "A record is on disk before its response is sent.",
        _ => "See GUARANTEES.md.",
    };
    let fencing = match summary.fencing.as_str() {
        "monotonic" => "Tokens grow, so a service can refuse the requests of a stale owner.",
        "equality" => "Tokens tell attempts apart, and do not show which one is newer.",
        _ => "See GUARANTEES.md.",
    };
    let breaker = match summary.breaker {
        "closed" => "The store answers.",
        "open" => "The store is out of reach. Claims fail at once, without a time-out.",
        _ => "The store is being checked.",
    };
    vec![
        Promise { name: "Durability", value: summary.durability.clone(), meaning: durability },
        Promise { name: "Fencing", value: summary.fencing.clone(), meaning: fencing },
        Promise { name: "Circuit breaker", value: summary.breaker.to_owned(), meaning: breaker },
    ]
}

/// The requests of the last hour as stacked bars, one for each minute.
struct Chart {
    bars: Vec<Bar>,
    lines: Vec<GridLine>,
    hours: Vec<TimeMark>,
    groups: Vec<Group>,
    total: String,
    is_empty: bool,
    rows: Vec<MinuteRow>,
}

struct Bar {
    x: usize,
    title: String,
    parts: Vec<Part>,
}

struct Part {
    class: &'static str,
    y: String,
    height: String,
}

struct GridLine {
    y: String,
    label: String,
}

struct TimeMark {
    x: usize,
    label: String,
}

struct Group {
    name: &'static str,
    meaning: &'static str,
    count: String,
    is_empty: bool,
}

struct MinuteRow {
    at: String,
    counts: Vec<String>,
}

/// The size of the chart. A bar takes 12 of the width.
const HEIGHT: f64 = 150.0;
const STEP: usize = 12;

impl Chart {
    fn of(minutes: &[Minute]) -> Self {
        let sum = |minute: &Minute| minute.counts.iter().sum::<u64>();
        let most = minutes.iter().map(sum).max().unwrap_or(0);
        let top = rounded_up(most);
        let scale = |count: u64| count as f64 / top as f64 * HEIGHT;
        let clock = |minute: &Minute| view::time(minute.at).get(11..16).unwrap_or_default().to_owned();
        let bars = minutes.iter().enumerate().filter(|(_, minute)| sum(minute) > 0).map(|(place, minute)| {
            let mut y = HEIGHT;
            let parts = OUTCOME_GROUPS.iter().zip(minute.counts).filter(|(_, count)| *count > 0);
            let parts = parts.map(|(group, count)| {
                // A single failure among thousands of requests must be visible.
                let height = scale(count).max(1.5);
                y -= height;
                Part {
                    class: group.as_str(),
                    y: format!("{:.1}", y.max(0.0)),
                    height: format!("{height:.1}"),
                }
            });
            let words = OUTCOME_GROUPS.iter().zip(minute.counts).filter(|(_, count)| *count > 0);
            let words: Vec<_> =
                words.map(|(group, count)| format!("{} {}", number(count), group.as_str())).collect();
            Bar {
                x: place * STEP,
                parts: parts.collect(),
                title: format!("{} UTC: {}", clock(minute), words.join(", ")),
            }
        });
        let marks = minutes
            .iter()
            .enumerate()
            .filter(|(_, minute)| (minute.at.as_millis() / 60_000).is_multiple_of(15));
        let groups = OUTCOME_GROUPS.iter().enumerate().map(|(place, group)| {
            let count = minutes.iter().filter_map(|minute| minute.counts.get(place)).sum();
            Group {
                name: group.as_str(),
                meaning: meaning(*group),
                count: number(count),
                is_empty: count == 0,
            }
        });
        let rows = minutes.iter().rev().filter(|minute| sum(minute) > 0).map(|minute| MinuteRow {
            at: clock(minute),
            counts: minute.counts.iter().map(|count| number(*count)).collect(),
        });
        Self {
            bars: bars.collect(),
            lines: [top, top / 2]
                .into_iter()
                .filter(|count| *count > 0)
                .map(|count| GridLine { y: format!("{:.1}", HEIGHT - scale(count)), label: number(count) })
                .collect(),
            hours: marks
                .map(|(place, minute)| TimeMark { x: place * STEP + STEP / 2, label: clock(minute) })
                .collect(),
            groups: groups.collect(),
            total: number(minutes.iter().map(sum).sum()),
            is_empty: most == 0,
            rows: rows.collect(),
        }
    }

    /// The chart in words.
    fn text(&self) -> String {
        let parts: Vec<_> = self
            .groups
            .iter()
            .filter(|group| !group.is_empty)
            .map(|group| format!("{} {}", group.count, group.name))
            .collect();
        if parts.is_empty() {
            return "No requests in the last 60 minutes.".to_owned();
        }
        format!("{} requests in the last 60 minutes: {}.", self.total, parts.join(", "))
    }
}

/// The next even number of one digit, or ten, times a power of ten, so that the scale has round labels; at least 2.
fn rounded_up(count: u64) -> u64 {
    let mut power: u64 = 1;
    loop {
        for factor in [2, 4, 6, 8, 10] {
            let top = power.saturating_mul(factor);
            if top >= count {
                return top;
            }
        }
        power = power.saturating_mul(10);
    }
}

const fn meaning(group: OutcomeGroup) -> &'static str {
    match group {
        OutcomeGroup::Executed => "sent to the service under a key",
        OutcomeGroup::Replayed => "got the stored response",
        OutcomeGroup::InProgress => "found the first request still running",
        OutcomeGroup::Mismatch => "used a key again for another request",
        OutcomeGroup::Unknown => "no known outcome, or a lost response",
        OutcomeGroup::Refused => "refused for another reason",
        OutcomeGroup::Unprotected => "passed on without protection",
        OutcomeGroup::Shadow => "only observed, and passed on",
    }
}

#[cfg(test)]
mod tests {
    use oncegate_core::Timestamp;

    use super::*;

    #[test]
    fn a_chart_shows_every_outcome_and_says_it_in_words() {
        let minute = |at: u64, counts| Minute { at: Timestamp::from_millis(at * 60_000), counts };
        let minutes = [
            minute(15, [900, 10, 0, 0, 1, 0, 0, 0]),
            minute(16, [0; 8]),
            minute(17, [1100, 0, 0, 0, 0, 0, 0, 0]),
        ];
        let chart = Chart::of(&minutes);
        let text =
            "2\u{202f}011 requests in the last 60 minutes: 2\u{202f}000 executed, 10 replayed, 1 unknown.";
        assert_eq!(chart.text(), text);
        assert_eq!((chart.bars.len(), chart.rows.len(), chart.hours.len()), (2, 2, 1));
        assert_eq!(chart.bars[0].title, "00:15 UTC: 900 executed, 10 replayed, 1 unknown");
        assert_eq!(chart.bars[0].parts[2].height, "1.5", "one unknown outcome is visible");
        assert_eq!(chart.bars[0].parts[0].height, "67.5");
        assert_eq!(chart.lines[0].label, "2\u{202f}000");
        assert_eq!(Chart::of(&[]).text(), "No requests in the last 60 minutes.");
    }

    #[test]
    fn the_scale_ends_at_a_round_number() {
        for (count, top) in [
            (0, 2),
            (2, 2),
            (3, 4),
            (5, 6),
            (11, 20),
            (21, 40),
            (441, 600),
            (999, 1000),
            (u64::MAX, u64::MAX),
        ] {
            assert_eq!(rounded_up(count), top, "{count}");
        }
    }
}
