//! `oncegate tap`: the requests of a running sidecar as they happen, one line each.

use std::io::{self, StdoutLock, Write};
use std::process::ExitCode;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use oncegate_http::ShadowVerdict;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;

use crate::activity::{OUTCOME_GROUPS, OutcomeGroup};
use crate::config::did_you_mean;
use crate::keys::client::Client;
use crate::keys::print::text;
use crate::keys::{Access, Failure, ask, env};
use crate::style::{Tone, cut, paint, terminal_width};

/// The pause before the next attempt to connect, at first and at most.
const PAUSES: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(5)];

/// The longest silence of a feed. It has a line every 15 seconds.
const SILENCE: Duration = Duration::from_secs(40);

/// The interval at which the reader of the output is checked.
const CHECK: Duration = Duration::from_millis(500);

/// The longest line of the feed. A longer one is not from a sidecar.
const MAX_LINE: usize = 1024 * 1024;

/// Shows requests as they happen.
#[derive(Args, Debug)]
pub(crate) struct TapArgs {
    #[command(flatten)]
    access: Access,
    #[command(flatten)]
    filter: Filter,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Filters")]
struct Filter {
    /// Only requests with these outcomes: executed, replayed, refused (of whatever kind), unknown, mismatch, in-progress,
    /// failed-open, shadow, or the name of a problem such as key-reused. Give several with commas
    #[arg(long, value_name = "OUTCOME", value_delimiter = ',', value_parser = outcome)]
    outcome: Vec<String>,
    /// Only requests that were observed (shadow) and would have had these outcomes; also not-observed. Give several with commas
    #[arg(long, value_name = "OUTCOME", value_delimiter = ',', value_parser = verdict)]
    would: Vec<String>,
    /// Only requests whose operation begins with this text, such as "POST /payments"
    #[arg(long, value_name = "TEXT")]
    operation: Option<String>,
    /// Only requests of this caller, by its tag
    #[arg(long, value_name = "TAG")]
    caller: Option<String>,
}

/// Checks the name of an outcome or of a group of outcomes.
fn outcome(text: &str) -> Result<String, String> {
    if matches!(text, "unprotected" | "not-covered") {
        return Err(
            "these requests have no key, and only those with one are shown; `oncegate top` counts them, and failed-open \
             shows those with a key that passed while the store was away"
                .to_owned(),
        );
    }
    let groups = OUTCOME_GROUPS.iter().map(|group| group.as_str());
    if OutcomeGroup::of_outcome(text).is_some() || groups.clone().any(|group| group == text) {
        return Ok(text.to_owned());
    }
    let names = groups.filter(|name| *name != "unprotected");
    // As in the help: an outcome that is no group of its own, and no problem.
    let names: Vec<_> = names.chain(["failed-open"]).collect();
    let hint = did_you_mean(text, names.iter().copied());
    Err(format!("it is neither one of {} nor the name of a problem{hint}", names.join(", ")))
}

/// The verdict on a request whose outcome would not have been known.
const NOT_OBSERVED: &str = ShadowVerdict::NotObserved.as_str();

/// Checks the name of a verdict on a request that was only observed.
fn verdict(text: &str) -> Result<String, String> {
    if text == NOT_OBSERVED { Ok(text.to_owned()) } else { outcome(text) }
}

impl Filter {
    fn matches(&self, line: &Value) -> bool {
        let text = |name: &str| line[name].as_str().unwrap_or_default();
        let outcome = text("outcome");
        (self.outcome.is_empty() || self.outcome.iter().any(|wanted| is_outcome(wanted, outcome)))
            && (self.would.is_empty() || self.would.iter().any(|wanted| is_verdict(wanted, text("would"))))
            && self.operation.as_ref().is_none_or(|start| text("operation").starts_with(start.as_str()))
            && self.caller.as_ref().is_none_or(|caller| text("caller") == caller)
    }
}

/// A request that was not observed has an empty verdict.
fn is_verdict(wanted: &str, verdict: &str) -> bool {
    match verdict {
        "" => false,
        NOT_OBSERVED => wanted == verdict,
        _ => is_outcome(wanted, verdict),
    }
}

fn is_outcome(wanted: &str, outcome: &str) -> bool {
    let group = OutcomeGroup::of_outcome(outcome);
    let is_passed = matches!(
        group,
        Some(
            OutcomeGroup::Executed
                | OutcomeGroup::Replayed
                | OutcomeGroup::Unprotected
                | OutcomeGroup::Shadow
        )
    );
    // `fenced` was executed.
    let is_refused = !is_passed && !matches!(outcome, "fenced" | "client-left");
    wanted == outcome
        || group.is_some_and(|group| group.as_str() == wanted)
        || wanted == "refused" && is_refused
}

/// Runs the command until it is interrupted, or until the reader of its output is gone.
pub(crate) fn run(args: &TapArgs) -> ExitCode {
    ask(async |out: &mut StdoutLock<'_>| follow(args, env, out).await)
}

async fn follow(
    args: &TapArgs,
    env: impl Fn(&str) -> Option<String>,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let client = args.access.client(env)?;
    let [first, longest] = PAUSES;
    let mut pause = first;
    // At the start, an address at which no sidecar is is most likely a mistake.
    let mut feed = Some(client.stream("/v1/activity").await?);
    loop {
        if let Some(body) = feed.take() {
            let mut tap = Tap { args, buffer: Vec::new(), out };
            match tap.copy(body, &client).await? {
                Ended::Reader => return Ok(()),
                Ended::Feed(why) => complain!("{}: {why}; connecting again", client.url()),
            }
        }
        tokio::time::sleep(pause).await;
        if is_reader_gone() {
            return Ok(());
        }
        match client.stream("/v1/activity").await {
            Ok(body) => {
                complain!("{}: connected again; requests in between are not shown", client.url());
                pause = first;
                feed = Some(body);
            }
            // A changed token needs a person. Everything else may pass.
            Err(Failure::Refused(words)) if words.contains("token") => return Err(Failure::Refused(words)),
            Err(Failure::Usage(words)) => return Err(Failure::Usage(words)),
            Err(_) => pause = (pause * 2).min(longest),
        }
    }
}

/// The end of a feed.
enum Ended {
    /// The reader of the output is gone.
    Reader,
    /// The sidecar ended the feed, or the connection is lost.
    Feed(String),
}

struct Tap<'a, W> {
    args: &'a TapArgs,
    /// The beginning of a line whose end has not come yet.
    buffer: Vec<u8>,
    out: &'a mut W,
}

impl<W: Write> Tap<'_, W> {
    async fn copy(&mut self, mut body: Incoming, client: &Client) -> Result<Ended, Failure> {
        let mut heard = tokio::time::Instant::now();
        let mut check = tokio::time::interval(CHECK);
        loop {
            let frame = tokio::select! {
                frame = body.frame() => frame,
                _ = check.tick() => {
                    if is_reader_gone() {
                        return Ok(Ended::Reader);
                    }
                    if heard.elapsed() > SILENCE {
                        return Ok(Ended::Feed(format!("silent for {} seconds", SILENCE.as_secs())));
                    }
                    continue;
                }
            };
            heard = tokio::time::Instant::now();
            match frame {
                None => return Ok(Ended::Feed("the sidecar ended the feed".to_owned())),
                Some(Err(_)) => return Ok(Ended::Feed("the connection broke off".to_owned())),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.read(&data, client)?;
                    }
                }
            }
        }
    }

    fn read(&mut self, data: &Bytes, client: &Client) -> Result<(), Failure> {
        self.buffer.extend_from_slice(data);
        while let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.buffer.drain(..=end).collect();
            let line: Value = serde_json::from_slice(&line).map_err(|_| strange(client))?;
            self.line(&line)?;
        }
        if self.buffer.len() > MAX_LINE { Err(strange(client)) } else { Ok(()) }
    }

    fn line(&mut self, line: &Value) -> Result<(), Failure> {
        if let Some(lost) = line["lost"].as_u64() {
            if lost > 0 {
                if self.args.access.json {
                    writeln!(self.out, "{line}")?;
                } else {
                    complain!("{lost} requests are missing here: they were read too slowly");
                }
            }
            return Ok(());
        }
        if !self.args.filter.matches(line) {
            return Ok(());
        }
        if self.args.access.json {
            return Ok(writeln!(self.out, "{line}")?);
        }
        Ok(writeln!(self.out, "{}", row(line, terminal_width()))?)
    }
}

fn strange(client: &Client) -> Failure {
    Failure::Unreachable(format!(
        "{}: this program does not understand the feed; check that the sidecar has the same version",
        client.url()
    ))
}

/// A request in one line: time, outcome, status, duration, operation, attempt, caller and record. What does not fit is cut off.
fn row(line: &Value, width: Option<usize>) -> String {
    let outcome = text(&line["outcome"]);
    let time = text(&line["time"]);
    // The time of day; a feed is about now.
    let time =
        time.split_once('T').map_or(time.as_str(), |(_, clock)| clock).trim_end_matches('Z').to_owned();
    let status = line["status"].as_u64().map_or_else(|| "-".to_owned(), |status| status.to_string());
    let duration = duration(line["duration_ms"].as_f64().unwrap_or_default());
    let head = format!("{time}  {outcome:<18}  {status:>3}  {duration:>8}  ");
    // The verdict is what a reader of an observed route looks for.
    let would = line["would"].as_str().map(|verdict| format!("would {}  ", text(&verdict.into())));
    let mut rest = would.unwrap_or_default() + &text(&line["operation"]);
    if let Some(attempt) = line["attempt"].as_u64().filter(|attempt| *attempt > 1) {
        rest.push_str(&format!("  attempt {attempt}"));
    }
    for name in ["caller", "record"] {
        if !line[name].is_null() {
            rest.push_str(&format!("  {name} {}", text(&line[name])));
        }
    }
    let left = width.map_or(usize::MAX, |width| width.saturating_sub(head.chars().count()));
    let tone = tone(&outcome);
    let head = format!(
        "{}  {}  {}  {duration:>8}  ",
        paint(Tone::Quiet, &time),
        paint(tone, &format!("{outcome:<18}")),
        paint(tone, &format!("{status:>3}"))
    );
    format!("{head}{}", cut(&rest, left))
}

fn duration(millis: f64) -> String {
    if millis < 10_000.0 { format!("{millis:.1} ms") } else { format!("{:.1} s", millis / 1000.0) }
}

/// The tone of an outcome: that of its group.
pub(crate) fn tone(outcome: &str) -> Tone {
    match OutcomeGroup::of_outcome(outcome) {
        Some(group) => group_tone(group),
        None => Tone::Open,
    }
}

/// The tone of a group of outcomes.
pub(crate) const fn group_tone(group: OutcomeGroup) -> Tone {
    match group {
        OutcomeGroup::Executed => Tone::Good,
        OutcomeGroup::Replayed => Tone::Calm,
        OutcomeGroup::InProgress | OutcomeGroup::Refused => Tone::Open,
        OutcomeGroup::Mismatch | OutcomeGroup::Unknown => Tone::Alarm,
        OutcomeGroup::Unprotected | OutcomeGroup::Shadow => Tone::Quiet,
    }
}

/// Returns true if the standard output is a pipe or a terminal whose other end is closed. A write would show it, too, but a quiet
/// feed has nothing to write.
pub(crate) fn is_reader_gone() -> bool {
    let out = io::stdout();
    let mut polled = [PollFd::new(&out, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&now)).is_ok()
        && polled.iter().any(|fd| fd.revents().intersects(PollFlags::ERR | PollFlags::HUP))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn refused_is_every_outcome_that_neither_executed_nor_replayed() {
        for (outcome, expected) in [
            ("key-reused", true),
            ("request-in-progress", true),
            ("outcome-unknown", true),
            ("store-unavailable", true),
            ("executed", false),
            ("replayed", false),
            ("fenced", false),
            ("unprotected", false),
            ("shadow", false),
        ] {
            assert_eq!(is_outcome("refused", outcome), expected, "{outcome}");
        }
        assert!(is_outcome("mismatch", "key-reused") && is_outcome("unknown", "fenced"));
        assert!(!is_outcome("mismatch", "executed"));
        assert!(super::outcome("key-reused").is_ok() && super::outcome("mismatch").is_ok());
        assert!(super::outcome("failed-open").is_ok());
        for without_key in ["unprotected", "not-covered"] {
            assert!(super::outcome(without_key).unwrap_err().contains("have no key"));
        }
        assert!(super::outcome("replaid").unwrap_err().contains("did you mean `replayed`?"));
    }

    #[test]
    fn a_line_fits_into_a_narrow_terminal_and_cannot_control_it() {
        let line = json!({
            "time": "2026-02-28T12:34:56.789Z", "operation": "POST /orders/\u{1b}[31m", "outcome": "executed", "status": 201,
            "duration_ms": 1.25, "attempt": 2, "caller": "0011223344556677", "record": "a".repeat(64),
        });
        let whole = row(&line, None);
        let start =
            "12:34:56.789  executed            201    1.2 ms  POST /orders/\\u{1b}[31m  attempt 2  caller 00";
        assert!(whole.starts_with(start), "{whole}");
        assert_eq!(row(&line, Some(60)).chars().count(), 60);
    }

    #[test]
    fn the_verdict_on_an_observed_request_is_shown_and_selected() {
        let line =
            |would: &str| json!({"operation": "POST /a", "outcome": "shadow", "would": would, "status": 200});
        assert!(row(&line("replayed"), None).ends_with("would replayed  POST /a"));
        let matches = |would: &[&str], line: &Value| {
            let would = would.iter().map(|would| super::verdict(would).unwrap()).collect();
            Filter { outcome: Vec::new(), would, operation: None, caller: None }.matches(line)
        };
        for (wanted, would, expected) in [
            (&["replayed"][..], "replayed", true),
            (&["mismatch"], "key-reused", true),
            (&["refused"], "key-missing", true),
            (&["refused"], "executed", false),
            (&["refused", "not-observed"], "not-observed", true),
            (&["refused"], "not-observed", false),
            (&[], "executed", true),
        ] {
            assert_eq!(matches(wanted, &line(would)), expected, "{wanted:?} {would}");
        }
        let protected = json!({"operation": "POST /a", "outcome": "replayed"});
        assert!(!matches(&["replayed"], &protected), "it was not observed");
        assert!(super::verdict("replaid").unwrap_err().contains("did you mean `replayed`?"));
    }
}
