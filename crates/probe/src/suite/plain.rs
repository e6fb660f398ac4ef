//! The rows about plain requests: fresh keys, replays, duplicates at once.

use std::collections::{BTreeMap, BTreeSet};

use http::header::SET_COOKIE;

use super::{Finding, ONCE, Tested, effects, rise};
use crate::error::{ProbeError, Untested};
use crate::expectations::{Expectations, any_of};
use crate::operation::Count;
use crate::session::{Execution, Session};
use crate::wire::Reply;

/// The number of times that duplicates are sent at once.
const ROUNDS: u32 = 3;

/// Fields that belong to the result of an operation, so a replay must have them.
const KEPT: [&str; 8] = [
    "content-type", "content-language", "content-disposition", "content-location", "location", "etag",
    "last-modified", "link",
];

/// Two plain requests with fresh keys, and for a counter in the response one with the values of the first. Decides if the
/// counter can be used.
///
/// # Errors
/// The API does not execute a plain request.
pub(super) async fn fresh_keys(session: &Session) -> Result<(Tested, Reply), ProbeError> {
    let unusable = |Untested(reason)| ProbeError::Unusable(format!("the API cannot be probed: {reason}"));
    let mut replies = Vec::new();
    let mut counted = Vec::new();
    let first_intent = session.intent().map_err(unusable)?;
    for number in 0..2 {
        let intent = match number {
            0 => first_intent.clone(),
            _ => session.intent().map_err(unusable)?,
        };
        let before = session.count(&intent.values).await.map_err(unusable)?;
        let reply = session.send(&intent).await.map_err(unusable)?;
        if !reply.is_success() {
            return Err(ProbeError::Unusable(format!(
                "a plain request with a fresh key got {}; check the method, path, headers and body of the operation",
                reply.status
            )));
        }
        let after = session.settled_count(&intent.values).await.map_err(unusable)?;
        counted.push(rise(before, after).map_err(unusable)?);
        replies.push(reply);
    }
    let [first, second] = <[Reply; 2]>::try_from(replies)
        .map_err(|_| ProbeError::Unusable("two requests gave another number of responses".to_owned()))?;
    session.set_latency(first.elapsed.max(second.elapsed));
    let seen = format!("{} and {}", first.status, second.status);
    let same_values = match &session.operation.count {
        Count::Member(_) => Some(session.again(&first_intent).await.map_err(unusable)?),
        _ => None,
    };
    let tested = match &session.operation.count {
        Count::None => Err(Untested(format!("no counter ({seen})"))),
        Count::Member(pointer) => match (session.member(&first), session.member(&second)) {
            (Some(a), Some(b)) if a != b => match same_values.as_ref().and_then(|reply| session.member(reply)) {
                Some(third) if third != a => {
                    Ok(Finding::expected(format!("{seen}, with different members {pointer}")))
                }
                // The API may repeat a value of the request there: it tells nothing about effects.
                Some(_) => Err(format!(
                    "no counter: the member {pointer} was equal in two responses to equal requests under fresh keys"
                )),
                None => Err(format!(
                    "no counter: an equal request under another key got {}, so it is not known what the member {pointer} counts",
                    same_values.map_or(0, |reply| reply.status)
                )),
            },
            (Some(_), Some(_)) => {
                Err(format!("no counter: the member {pointer} was equal in two responses under fresh keys"))
            }
            _ => Err(format!("no counter: a response has no member {pointer}")),
        }
        .map_err(|reason| disable(session, reason)),
        Count::Url { .. } => match counted.as_slice() {
            [Some(1), Some(1)] => Ok(Finding::expected(format!("{seen}, with one effect each"))),
            [Some(a), Some(b)] => {
                let reason = format!(
                    "no counter: the counting URL saw {} and {} for one request each",
                    effects(*a),
                    effects(*b)
                );
                Err(disable(session, reason))
            }
            _ => Err(disable(session, "no counter".to_owned())),
        },
    };
    // Kept for the fields that are equal in all responses.
    let mut fields = first;
    if fields.headers.get(SET_COOKIE) != second.headers.get(SET_COOKIE) {
        fields.headers.remove(SET_COOKIE);
    }
    Ok((tested, fields))
}

fn disable(session: &Session, reason: String) -> Untested {
    session.disable_counter(reason.clone());
    Untested(reason)
}

/// A first response and its repetition.
pub(super) struct Pair {
    first: Reply,
    second: Reply,
    execution: Execution,
}

/// The same request twice, one after the other.
pub(super) async fn replay(session: &Session) -> (Tested, Option<Pair>) {
    let attempts = async {
        let intent = session.intent()?;
        let first = session.send(&intent).await?;
        if !first.is_success() {
            return Err(Untested(format!("the first request got {}", first.status)));
        }
        let before = session.settled_count(&intent.values).await?;
        let second = session.send(&intent).await?;
        let after = session.settled_count(&intent.values).await?;
        let effects = rise(before, after)?;
        Ok((first, second, effects))
    };
    let (first, second, effects) = match attempts.await {
        Ok(attempts) => attempts,
        Err(reason) => return (Err(reason), None),
    };
    let seen = format!("{}, then {}", first.status, second.status);
    let again = effects.is_some_and(|effects| effects > 0);
    if again && !second.is_success() {
        return (Ok(Finding::dangerous(format!("{seen}, but with another effect"), ONCE)), None);
    }
    if !second.is_success() {
        let finding = Finding::differs(
            format!("{seen}: the retry does not get the response"),
            "Keep the response of the first request, and send it again: a client whose response was lost has no other way to get it.",
        );
        return (Ok(finding), None);
    }
    let execution = session.execution(&first, &second, effects);
    let status = session.expectations.replayed(first.status);
    let equal = second.status == status && first.body == second.body;
    let tested = match execution {
        Execution::Executed => {
            Ok(Finding::dangerous(format!("{seen}: the operation was executed again"), ONCE))
        }
        Execution::Replayed if equal => {
            let counted = if session.no_counter().is_none() {
                "executed once"
            } else {
                "marked as a replay; effects were not counted"
            };
            Ok(Finding::expected(format!("{seen}, with equal bodies; {counted}")))
        }
        Execution::Replayed => Ok(Finding::differs(
            format!(
                "{seen}; not executed again, but {} differs",
                if second.status == status { "the body" } else { "the status" }
            ),
            "Send the stored response byte for byte: clients may depend on each part of it.",
        )),
        Execution::Unknown => {
            let equal = if equal { "equal" } else { "different" };
            Err(Untested(format!("{}; seen: {seen}, with {equal} bodies", session.unseen().0)))
        }
    };
    (tested, Some(Pair { first, second, execution }))
}

pub(super) fn headers_expected(expected: &Expectations) -> String {
    match &expected.replay_marker {
        Some((name, value)) => format!("the fields of the result, and {name}: {value}"),
        None => "the fields of the result".to_owned(),
    }
}

/// The fields of the replay, compared with those of the first response.
pub(super) fn headers(session: &Session, pair: Option<&Pair>, constant: &Reply) -> Tested {
    let Some(pair) = pair else { return Err(Untested::new("there was no replay")) };
    if pair.execution == Execution::Executed {
        return Err(Untested::new("there was no replay: the operation was executed again"));
    }
    let values = |reply: &Reply, name: &str| {
        reply.headers.get_all(name).iter().map(|value| value.as_bytes().to_vec()).collect::<Vec<_>>()
    };
    let lost: Vec<_> =
        KEPT.into_iter().filter(|name| values(&pair.first, name) != values(&pair.second, name)).collect();
    if !lost.is_empty() {
        return Ok(Finding::differs(
            format!("missing or changed: {}", lost.join(", ")),
            "Store the header fields of the result with its body: Location, ETag and Content-Type are part of it.",
        ));
    }
    let cookies = values(&pair.second, "set-cookie");
    if !cookies.is_empty()
        && cookies == values(&pair.first, "set-cookie")
        && cookies != values(constant, "set-cookie")
    {
        return Ok(Finding::differs(
            "the replay sets the cookie of the first response again",
            "Never store Set-Cookie: a replay may revive a session that has ended.",
        ));
    }
    if let Some((name, value)) = &session.expectations.replay_marker {
        if pair.first.field(name) == Some(value) {
            return Ok(Finding::differs(
                format!("the first response has {name}: {value}, too"),
                "Mark only replays: clients count them.",
            ));
        }
        if pair.second.field(name) != Some(value) {
            return Ok(Finding::differs(
                format!("the fields of the result are equal; {name}: {value} is missing"),
                "Mark replays with the field of the profile, so that clients and logs tell them from executions.",
            ));
        }
    }
    let kept: Vec<_> = KEPT.into_iter().filter(|name| pair.second.headers.contains_key(*name)).collect();
    Ok(Finding::expected(format!(
        "equal: {}",
        if kept.is_empty() { "no field to compare".to_owned() } else { kept.join(", ") }
    )))
}

pub(super) fn concurrent_expected(expected: &Expectations) -> String {
    format!("one effect; the others wait for the response or get {}", any_of(&expected.in_progress))
}

/// Equal requests at the same time, several times.
pub(super) async fn concurrent(session: &Session) -> Tested {
    let mut statuses: BTreeMap<u16, u32> = BTreeMap::new();
    let (mut others, mut no_response) = (BTreeSet::new(), 0);
    let (mut is_seen, mut is_unequal) = (true, false);
    for _ in 0..ROUNDS {
        let intent = session.intent()?;
        let before = session.count(&intent.values).await?;
        let replies = session.send_at_once(&intent, session.options.concurrency).await?;
        no_response += replies.iter().filter(|reply| reply.is_err()).count();
        let mut replies: Vec<_> = replies.into_iter().flatten().collect();
        for reply in &replies {
            *statuses.entry(reply.status).or_default() += 1;
        }
        if !replies.iter().any(Reply::is_success) {
            replies.push(session.come_back(&intent).await?.definite()?);
        }
        let successes: Vec<_> = replies.iter().filter(|reply| reply.is_success()).collect();
        let total = rise(before, session.settled_count(&intent.values).await?)?;
        let members: BTreeSet<_> =
            successes.iter().filter_map(|reply| session.member(reply)).map(|m| m.to_string()).collect();
        let seen = total.unwrap_or(members.len() as u64);
        if seen > 1 {
            let all = session.options.concurrency;
            return Ok(Finding::dangerous(
                format!("{} for {all} duplicates ({})", effects(seen), tally(&statuses)),
                ONCE,
            ));
        }
        let is_in_progress = |reply: &Reply| session.expectations.in_progress.contains(&reply.status);
        others.extend(
            replies
                .iter()
                .filter(|reply| !reply.is_success() && !is_in_progress(reply))
                .map(|reply| reply.status),
        );
        is_unequal |= successes.windows(2).any(|pair| matches!(pair, [a, b] if a.body != b.body));
        is_seen &= total.is_some() || !members.is_empty();
    }
    let seen = format!("{ROUNDS} times {} at once: {}", session.options.concurrency, tally(&statuses));
    if no_response > 0 {
        return Err(Untested(format!("{no_response} requests got no response; seen: {seen}")));
    }
    if !others.is_empty() {
        return Ok(Finding::differs(
            seen,
            "Answer a duplicate with the status of the profile while the first request runs, or let it wait for the response.",
        ));
    }
    if is_unequal {
        return Ok(Finding::differs(
            seen + ", with different bodies",
            "Answer all duplicates with the response of the one execution.",
        ));
    }
    if !is_seen {
        return Err(Untested(format!("{}; seen: {seen}", session.unseen().0)));
    }
    let counted = if session.has_counting_url() { "one effect each time" } else { "one result each time" };
    Ok(Finding::expected(format!("{seen}; {counted}")))
}

fn tally(statuses: &BTreeMap<u16, u32>) -> String {
    let parts: Vec<_> = statuses.iter().map(|(status, count)| format!("{count} × {status}")).collect();
    parts.join(", ")
}
