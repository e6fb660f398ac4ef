//! The rows of the suite, in the order in which they run.

mod broken;
mod keys;
mod later;
mod plain;
mod requests;

use std::time::Duration;

use tokio::time::Instant;

use crate::error::{ProbeError, Untested};
use crate::report::{Row, Verdict};
use crate::session::{Intent, Session};
use crate::wire::Reply;

/// The result of a row: what was seen, and its verdict.
pub(crate) struct Finding {
    pub(crate) verdict: Verdict,
    pub(crate) observation: String,
    pub(crate) advice: &'static str,
}

impl Finding {
    fn expected(observation: impl Into<String>) -> Self {
        Self { verdict: Verdict::AsExpected, observation: observation.into(), advice: "" }
    }

    fn differs(observation: impl Into<String>, advice: &'static str) -> Self {
        Self { verdict: Verdict::Differs, observation: observation.into(), advice }
    }

    fn dangerous(observation: impl Into<String>, advice: &'static str) -> Self {
        Self { verdict: Verdict::Dangerous, observation: observation.into(), advice }
    }
}

type Tested = Result<Finding, Untested>;

/// The advice if one key has had two effects.
const ONCE: &str = "Claim the key before the operation begins, in one atomic step of a store that all processes share, and never free \
                    it while the effect may have happened.";
/// The advice if the effect of an interrupted attempt is repeated.
const KEEP_RUNNING: &str = "Run the operation to its end when the client disconnects, and keep its response. Never free the key because a \
                            connection ended.";

/// A row that has run: its name, title and expectation.
fn row(
    id: impl Into<String>,
    title: impl Into<String>,
    expectation: impl Into<String>,
    tested: Tested,
) -> Row {
    let (verdict, observation, advice) = match tested {
        Ok(finding) => (finding.verdict, finding.observation, finding.advice),
        Err(Untested(reason)) => (Verdict::NotTested, reason, ""),
    };
    Row {
        id: id.into(),
        title: title.into(),
        expectation: expectation.into(),
        observation,
        verdict,
        advice: advice.to_owned(),
    }
}

/// The result of a row, unless the probe is interrupted before.
async fn tested(session: &Session, row: impl Future<Output = Tested>) -> Tested {
    session.unless_interrupted(row).await?
}

/// The first request that is kept for the retention row.
struct Aged {
    intent: Intent,
    first: Reply,
    count: Option<u64>,
    since: Instant,
}

/// Runs all rows. Those that have not ended when the probe is interrupted are not tested.
///
/// # Errors
/// The API does not execute a plain request.
pub(crate) async fn run(session: &Session) -> Result<Vec<Row>, ProbeError> {
    let (fresh, first) = match session.unless_interrupted(plain::fresh_keys(session)).await {
        Ok(done) => done.map(|(fresh, first)| (fresh, Ok(first)))?,
        Err(interrupted) => (Err(interrupted.clone()), Err(interrupted)),
    };
    let expected = &session.expectations;
    let mut rows = vec![row("fresh-keys", "Two requests under fresh keys", "two effects", fresh)];
    let aged = match session.options.retention_wait {
        Some(_) => Some(session.unless_interrupted(later::begin(session)).await.flatten()),
        None => None,
    };
    let replay = session.unless_interrupted(plain::replay(session)).await;
    let (replay, pair) = replay.unwrap_or_else(|interrupted| (Err(interrupted), None));
    rows.push(row("replay", "The same request again", "the first response again, and one effect", replay));
    rows.push(row(
        "replay-headers",
        "Header fields on the replay",
        plain::headers_expected(expected),
        tested(session, async { plain::headers(session, pair.as_ref(), &first?) }).await,
    ));
    rows.push(row(
        "concurrent",
        format!("{} duplicates at once", session.options.concurrency),
        plain::concurrent_expected(expected),
        tested(session, plain::concurrent(session)).await,
    ));
    rows.push(row(
        "other-body",
        "Another body under a used key",
        requests::other_body_expected(expected),
        tested(session, requests::other_body(session)).await,
    ));
    rows.push(row(
        "other-caller",
        "Another caller with the same key",
        "executed for the other caller",
        tested(session, requests::other_caller(session)).await,
    ));
    rows.push(row(
        "missing-key",
        "No key",
        requests::missing_key_expected(session),
        tested(session, requests::missing_key(session)).await,
    ));
    rows.extend(keys::malformed(session).await);
    rows.push(row(
        "doubled-key",
        "Two keys in two field lines",
        keys::invalid_expected(expected),
        tested(session, keys::doubled(session)).await,
    ));
    rows.push(row(
        "quoted-and-bare",
        "A key in quotes, then without",
        keys::quoted_expected(expected),
        tested(session, keys::quoted_and_bare(session)).await,
    ));
    rows.push(row(
        "half-request",
        "Half of a request, then the whole",
        "one effect, and a definite response",
        tested(session, broken::half_request(session)).await,
    ));
    rows.push(row(
        "hang-up",
        "Hang up, and come back",
        "one effect, and a definite response",
        tested(session, broken::hang_up(session)).await,
    ));
    rows.push(row(
        "lost-response",
        "The response is lost on the way",
        "one effect, and the response on the retry",
        tested(session, broken::lost_response(session)).await,
    ));
    rows.extend(requests::statuses(session).await);
    rows.push(row(
        "restart",
        "A restart of the API",
        "the first response again, and one effect",
        later::restart(session).await,
    ));
    rows.push(row(
        "retry-after",
        "Retry-After on responses that ask to wait",
        later::retry_after_expected(expected),
        tested(session, async { later::retry_after(session) }).await,
    ));
    let (title, expectation) = later::retention_words(session);
    rows.push(row("retention", title, expectation, tested(session, later::retention(session, aged)).await));
    Ok(rows)
}

/// Words for a number of effects.
fn effects(count: u64) -> String {
    match count {
        0 => "no effect".to_owned(),
        1 => "1 effect".to_owned(),
        _ => format!("{count} effects"),
    }
}

/// The rise of the counter; an error if it fell.
fn rise(before: Option<u64>, after: Option<u64>) -> Result<Option<u64>, Untested> {
    match (before, after) {
        (Some(before), Some(after)) => {
            let rise = after.checked_sub(before);
            rise.map(Some).ok_or_else(|| Untested(format!("the counter fell from {before} to {after}")))
        }
        _ => Ok(None),
    }
}

/// A duration for people.
fn time_text(time: Duration) -> String {
    match time.as_secs() {
        0 => format!("{} ms", time.as_millis()),
        seconds if seconds % 86_400 == 0 => format!("{} d", seconds / 86_400),
        seconds if seconds % 3_600 == 0 => format!("{} h", seconds / 3_600),
        seconds if seconds % 60 == 0 => format!("{} min", seconds / 60),
        seconds => format!("{seconds} s"),
    }
}
