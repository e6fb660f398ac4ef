//! The rows about requests and responses that break off.

use std::time::Duration;

use tokio::io::AsyncWriteExt as _;

use super::{Finding, KEEP_RUNNING, Tested, effects, rise};
use crate::cut_proxy::CutProxy;
use crate::error::Untested;
use crate::session::{Change, Intent, Return, Session};
use crate::target::Stream;

/// The moments at which the client hangs up, in percent of the time that a plain request takes.
const MOMENTS: [u32; 3] = [0, 40, 80];
/// The advice if the client never gets a definite response.
const STUCK: &str = "Free the key, or give the retry the response, at the latest when a lease ends. Until then, the client cannot go on.";

/// Half of a request, and then the whole under the same key.
pub(super) async fn half_request(session: &Session) -> Tested {
    let intent = session.intent()?;
    let before = session.count(&intent.values).await?;
    let mut stream = session.open(None).await?;
    let request = session.request(&intent.values, &[session.written(&intent.key)], &Change::default());
    send(session, &mut *stream, request.half()).await?;
    drop(stream);
    let reply = session.come_back(&intent).await?;
    let total = rise(before, later_count(session, &intent).await?)?;
    judge(session, &[(reply, total)], "after half of a request")
}

/// A client that hangs up at several moments while its request runs.
pub(super) async fn hang_up(session: &Session) -> Tested {
    let mut attempts = Vec::new();
    for moment in MOMENTS {
        let intent = session.intent()?;
        let before = session.count(&intent.values).await?;
        let mut stream = session.open(None).await?;
        let request = session.request(&intent.values, &[session.written(&intent.key)], &Change::default());
        send(session, &mut *stream, request.whole()).await?;
        tokio::time::sleep(session.latency() * moment / 100).await;
        drop(stream);
        let reply = session.come_back(&intent).await?;
        attempts.push((reply, rise(before, later_count(session, &intent).await?)?));
    }
    judge(session, &attempts, "after a hang-up")
}

/// A proxy cuts the connection when the response arrives.
pub(super) async fn lost_response(session: &Session) -> Tested {
    let intent = session.intent()?;
    let before = session.count(&intent.values).await?;
    // TLS sends session tickets before the response, which look like it from outside.
    let quiet = if session.target.is_https() {
        (session.latency() * 3).max(Duration::from_secs(1))
    } else {
        Duration::from_millis(20)
    };
    let proxy = CutProxy::start(&session.target, quiet).await.map_err(Untested)?;
    let mut stream = session.open(Some(proxy.address)).await?;
    proxy.arm();
    let request = session.request(&intent.values, &[session.written(&intent.key)], &Change::default());
    send(session, &mut *stream, request.whole()).await?;
    proxy.cut(session.options.max_time).await.map_err(Untested)?;
    drop(stream);
    let reply = session.come_back(&intent).await?;
    let total = rise(before, later_count(session, &intent).await?)?;
    judge(session, &[(reply, total)], "after a lost response")
}

async fn send(session: &Session, stream: &mut dyn Stream, bytes: &[u8]) -> Result<(), Untested> {
    let sent = async {
        stream.write_all(bytes).await?;
        stream.flush().await
    };
    let sent = tokio::time::timeout(session.options.max_time, sent).await;
    let sent = sent.map_err(|_| Untested::new("the API does not read the request"))?;
    sent.map_err(|error| Untested(format!("the request could not be sent: {error}")))
}

/// The count after an abandoned attempt has had time to end, too.
async fn later_count(session: &Session, intent: &Intent) -> Result<Option<u64>, Untested> {
    if session.has_counting_url() {
        tokio::time::sleep((session.latency() * 2).min(Duration::from_secs(10))).await;
    }
    session.settled_count(&intent.values).await
}

fn judge(session: &Session, attempts: &[(Return, Option<u64>)], when: &str) -> Tested {
    let most = attempts.iter().filter_map(|(_, total)| *total).max();
    let statuses = attempts.iter().map(|(reply, _)| match reply {
        Return::Definite(reply) => reply.status.to_string(),
        Return::Waiting { status, .. } => format!("{status} all the time"),
    });
    let seen = format!("the retry {when} got {}", statuses.collect::<Vec<_>>().join(", "));
    if let Some(most) = most.filter(|most| *most > 1) {
        return Ok(Finding::dangerous(format!("{seen}, with {} for one key", effects(most)), KEEP_RUNNING));
    }
    if let Some(after) = attempts.iter().find_map(|(reply, _)| match reply {
        Return::Waiting { after, .. } => Some(after),
        Return::Definite(_) => None,
    }) {
        return Ok(Finding::differs(format!("{seen}, for {} s", after.as_secs_f32()), STUCK));
    }
    let replies = || {
        attempts.iter().filter_map(|(reply, total)| match reply {
            Return::Definite(reply) => Some((reply, total)),
            Return::Waiting { .. } => None,
        })
    };
    if replies().any(|(reply, _)| !reply.is_success()) {
        return Ok(Finding::differs(
            seen,
            "Give the retry the response of the operation, or execute it if it has not begun.",
        ));
    }
    if replies().any(|(_, total)| *total == Some(0)) {
        return Ok(Finding::dangerous(
            format!("{seen}, but there was no effect"),
            "Never answer with a success for an operation that was not executed.",
        ));
    }
    if most.is_some() {
        return Ok(Finding::expected(format!("{seen}, with one effect")));
    }
    // A marked response is that of the lost attempt, so there was no second execution.
    if replies().all(|(reply, _)| session.is_marked(reply)) {
        return Ok(Finding::expected(format!("{seen}, marked as a replay")));
    }
    let reason = session.no_counter();
    let reason = reason
        .unwrap_or_else(|| "only a counting URL can count an effect whose response was lost".to_owned());
    Err(Untested(format!("{reason}; seen: {seen}")))
}
