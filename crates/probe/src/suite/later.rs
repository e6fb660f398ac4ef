//! The rows about what comes later: a restart, the retention, and how long clients are told to wait.

use std::time::Duration;

use tokio::time::Instant;

use super::{Aged, Finding, Tested, rise, tested, time_text};
use crate::error::Untested;
use crate::expectations::Expectations;
use crate::report::Verdict;
use crate::session::{Execution, Intent, RetryAfter, Session};
use crate::wire::Reply;

const REMEMBER: &str = "Keep keys and responses in durable storage for the published retention: a client that retries later executes the operation again.";

/// The longest time for an API to accept connections after a restart.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A request, a restart, and the same request.
pub(super) async fn restart(session: &Session) -> Tested {
    let prepared = session.unless_interrupted(async {
        let Some(restart) = &session.options.restart else {
            return Err(Untested::new("no command restarts the API: give --restart"));
        };
        Ok((restart, begin(session).await?))
    });
    let (restart, aged) = prepared.await??;
    // An interruption waits for the command: the API could stay half restarted.
    let restarted = restart().await;
    tested(session, async {
        restarted.map_err(Untested)?;
        let end = Instant::now() + START_TIMEOUT;
        while session.target.connect().await.is_err() {
            if Instant::now() > end {
                let limit = START_TIMEOUT.as_secs();
                return Err(Untested(format!("the API did not come back within {limit} s")));
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        again(session, &aged, "after the restart").await
    })
    .await
}

/// Sends the request that is repeated later.
pub(super) async fn begin(session: &Session) -> Result<Aged, Untested> {
    let intent = session.intent()?;
    let first = session.send(&intent).await?;
    if !first.is_success() {
        return Err(Untested(format!("the first request got {}", first.status)));
    }
    let count = session.settled_count(&intent.values).await?;
    Ok(Aged { intent, first, count, since: Instant::now() })
}

async fn again(session: &Session, aged: &Aged, when: &str) -> Tested {
    let (reply, execution) = repeat(session, &aged.intent, &aged.first, aged.count).await?;
    let seen = format!("{}, then {} {when}", aged.first.status, reply.status);
    match execution {
        Execution::Executed => Ok(Finding::dangerous(
            format!("{seen}: the key was forgotten, and the operation executed again"),
            REMEMBER,
        )),
        // Another status than that of the first response is reported by the row `replay`.
        Execution::Replayed if reply.is_success() => {
            Ok(Finding::expected(format!("{seen}: not executed again")))
        }
        Execution::Replayed => {
            Ok(Finding::differs(format!("{seen}: the retry does not get the first response"), REMEMBER))
        }
        Execution::Unknown => Err(Untested(format!("{}; seen: {seen}", session.unseen().0))),
    }
}

async fn repeat(
    session: &Session,
    intent: &Intent,
    first: &Reply,
    before: Option<u64>,
) -> Result<(Reply, Execution), Untested> {
    let reply = session.come_back(intent).await?.definite()?;
    let effects = rise(before, session.settled_count(&intent.values).await?)?;
    let execution = if reply.is_success() {
        session.execution(first, &reply, effects)
    } else if effects.is_some_and(|effects| effects > 0) {
        Execution::Executed
    } else {
        Execution::Replayed
    };
    Ok((reply, execution))
}

/// The published retention: that of the operation, or of the profile.
fn published(session: &Session) -> Duration {
    session.operation.retention.unwrap_or(session.expectations.retention)
}

pub(super) fn retention_words(session: &Session) -> (String, String) {
    let title = match session.options.retention_wait {
        Some(time) => format!("The same request after {}", time_text(time)),
        None => "The same request much later".to_owned(),
    };
    (title, format!("remembered for {}", time_text(published(session))))
}

/// The first request again, after the time that the operator gave.
pub(super) async fn retention(session: &Session, aged: Option<Result<Aged, Untested>>) -> Tested {
    let (Some(aged), Some(time)) = (aged, session.options.retention_wait) else {
        return Err(Untested::new("no time to wait was given: give --patience"));
    };
    let aged = aged?;
    tokio::time::sleep_until(aged.since + time).await;
    let waited = aged.since.elapsed();
    let when = format!("after {}", time_text(time));
    if waited < published(session) {
        let mut finding = again(session, &aged, &when).await?;
        if finding.verdict == Verdict::AsExpected {
            finding.observation += "; longer was not tested";
        }
        return Ok(finding);
    }
    let (reply, execution) = repeat(session, &aged.intent, &aged.first, aged.count).await?;
    let cause = match execution {
        Execution::Executed => "executed again, after the retention",
        Execution::Replayed if !reply.is_success() => "refused, after the retention",
        Execution::Replayed => "still remembered",
        Execution::Unknown => return Err(session.unseen()),
    };
    Ok(Finding::expected(format!("{}, then {} {when}: {cause}", aged.first.status, reply.status)))
}

pub(super) fn retry_after_expected(expected: &Expectations) -> String {
    if expected.retry_after { "a readable Retry-After" } else { "readable, if there is one" }.to_owned()
}

/// The field `Retry-After` of all responses so far that ask to wait.
pub(super) fn retry_after(session: &Session) -> Tested {
    let waits = session.waits();
    if waits.is_empty() {
        return Err(Untested::new("no response asked to wait (409, 423, 425, 429 or 503)"));
    }
    let count = |state: RetryAfter| waits.iter().filter(|(_, seen)| *seen == state).count();
    let mut statuses: Vec<_> = waits.iter().map(|(status, _)| status.to_string()).collect();
    statuses.sort();
    statuses.dedup();
    let (readable, malformed) = (count(RetryAfter::Readable), count(RetryAfter::Malformed));
    let seen = format!("on {readable} of {} responses ({})", waits.len(), statuses.join(", "));
    if malformed > 0 {
        return Ok(Finding::differs(
            format!("{seen}; {malformed} malformed"),
            "Write Retry-After as whole seconds or as an HTTP date: clients ignore anything else.",
        ));
    }
    if session.expectations.retry_after && readable < waits.len() {
        return Ok(Finding::differs(
            seen,
            "Tell the client how long to wait; otherwise it guesses, and all duplicates come back at once.",
        ));
    }
    Ok(Finding::expected(seen))
}
