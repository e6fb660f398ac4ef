//! The rows about other requests, other callers, and responses with an error status.

use super::{Finding, ONCE, Tested, effects, rise, row, tested};
use crate::error::Untested;
use crate::expectations::{Expectations, any_of};
use crate::operation::StatusTrigger;
use crate::report::Row;
use crate::session::{Change, Execution, Session};

pub(super) fn other_body_expected(expected: &Expectations) -> String {
    if !expected.compares_bodies {
        return "the first response again, and no effect".to_owned();
    }
    format!("refused with {}, and no effect", any_of(&expected.key_reused))
}

/// Another body under a key that is used.
pub(super) async fn other_body(session: &Session) -> Tested {
    let first_intent = session.intent()?;
    let other_intent = session.intent()?;
    let first_body = session.operation.body.as_ref().map(|body| first_intent.values.fill(body));
    // A given body keeps the values of the first request, so that it differs only in what the operator wrote.
    let (values, body) = match &session.operation.other_body {
        Some(body) => (&first_intent.values, Some(first_intent.values.fill(body))),
        None => {
            (&other_intent.values, session.operation.body.as_ref().map(|body| other_intent.values.fill(body)))
        }
    };
    if body == first_body {
        return Err(Untested::new("there is no other body: give other-body, or a placeholder in body"));
    }
    let first = session.send(&first_intent).await?;
    if !first.is_success() {
        return Err(Untested(format!("the first request got {}", first.status)));
    }
    // The path keeps its values: only the body is another one.
    let change = Change { body, headers: &[] };
    let before = (session.settled_count(&first_intent.values).await?, session.count(values).await?);
    let reply =
        session.send_with(&first_intent.values, &[session.written(&first_intent.key)], &change).await?;
    let after = (session.settled_count(&first_intent.values).await?, session.count(values).await?);
    let taken = rise(before.0, after.0)?.max(rise(before.1, after.1)?);
    let seen = format!("{}, then {}", first.status, reply.status);
    let advice = "Store a fingerprint of the request with the key, and refuse another request under it.";
    if taken.is_some_and(|taken| taken > 0) {
        return Ok(Finding::dangerous(
            format!("{seen}: the other request was executed under the used key"),
            advice,
        ));
    }
    if reply.is_success() {
        let execution = session.execution(&first, &reply, taken);
        if !session.expectations.compares_bodies && execution != Execution::Executed {
            return match execution {
                Execution::Replayed => Ok(Finding::expected(format!("{seen}: the first response again"))),
                _ => Err(Untested(format!("{}; seen: {seen}", session.unseen().0))),
            };
        }
        let cause = match execution {
            Execution::Executed => "the other request was executed under the used key",
            Execution::Replayed => "the other request got the response of the first one",
            Execution::Unknown => {
                "the other request got a success, but was executed under a used key or not at all"
            }
        };
        return Ok(Finding::dangerous(format!("{seen}: {cause}"), advice));
    }
    if !session.expectations.compares_bodies {
        let advice = "Answer with the first response: the key alone identifies the request.";
        return Ok(Finding::differs(seen, advice));
    }
    if session.expectations.key_reused.contains(&reply.status) {
        return Ok(Finding::expected(format!("{seen}{}", counted(taken))));
    }
    Ok(Finding::differs(
        format!("{seen}{}", counted(taken)),
        "Refuse with the status of the profile: clients repeat a 409 or a 5xx, and this request can never succeed.",
    ))
}

fn counted(taken: Option<u64>) -> String {
    taken.map_or_else(|| "; effects were not counted".to_owned(), |taken| format!(", {}", effects(taken)))
}

/// The same request under the same key with the credentials of another caller.
pub(super) async fn other_caller(session: &Session) -> Tested {
    let other = &session.operation.other_caller;
    if other.is_empty() {
        return Err(Untested::new("no second caller: give [other-caller.headers]"));
    }
    let change = || Change { body: None, headers: other };
    let own = session.intent()?;
    let before = session.count(&own.values).await?;
    let reply = session.send_with(&own.values, &[session.written(&own.key)], &change()).await?;
    if !reply.is_success() {
        return Err(Untested(format!("the second caller got {} for a request of its own", reply.status)));
    }
    // Many APIs show each caller only effects of its own; then the counter tells nothing about the other caller.
    let sees_others = rise(before, session.settled_count(&own.values).await?)?.is_some_and(|taken| taken > 0);
    let intent = session.intent()?;
    let first = session.send(&intent).await?;
    if !first.is_success() {
        return Err(Untested(format!("the first request got {}", first.status)));
    }
    let before = session.settled_count(&intent.values).await?;
    let reply = session.send_with(&intent.values, &[session.written(&intent.key)], &change()).await?;
    let effects = rise(before, session.settled_count(&intent.values).await?)?.filter(|_| sees_others);
    let seen = format!("{}, then {} for the other caller", first.status, reply.status);
    if !reply.is_success() {
        return Ok(Finding::differs(
            format!("{seen}: one caller sees that the other has used the key"),
            "Make the caller a part of the key, so that callers cannot see or block the keys of each other.",
        ));
    }
    match session.execution(&first, &reply, effects) {
        Execution::Replayed => Ok(Finding::dangerous(
            format!("{seen}: the other caller got the response of the first one"),
            "Make the caller a part of the key. Until then, a caller that guesses a key reads the responses of others.",
        )),
        Execution::Executed => Ok(Finding::expected(format!("{seen}; executed for each"))),
        Execution::Unknown if session.has_counting_url() => {
            Err(Untested(format!("the counting URL does not show effects of the other caller; seen: {seen}")))
        }
        Execution::Unknown => Err(Untested(format!("{}; seen: {seen}", session.unseen().0))),
    }
}

pub(super) fn missing_key_expected(session: &Session) -> String {
    let refused = any_of(&session.expectations.key_missing);
    match is_key_required(session) {
        Some(true) => format!("refused with {refused}"),
        Some(false) => "executed".to_owned(),
        None => format!("executed, or refused with {refused}"),
    }
}

/// True if a request without a key must be refused, false if it must be executed; `None` if both are right.
fn is_key_required(session: &Session) -> Option<bool> {
    session.operation.is_key_required.or(session.expectations.requires_key.then_some(true))
}

/// A request without a key.
pub(super) async fn missing_key(session: &Session) -> Tested {
    if session.has_key_placeholder() {
        return Err(Untested::new("the key is in the template of the operation, which cannot leave it out"));
    }
    let intent = session.intent()?;
    let before = session.count(&intent.values).await?;
    let reply = session.send_with(&intent.values, &[], &Change::default()).await?;
    let taken = rise(before, session.settled_count(&intent.values).await?)?;
    let required = is_key_required(session);
    if reply.is_success() {
        let seen = format!("{}: executed without a key", reply.status);
        return Ok(if required == Some(true) {
            Finding::dangerous(
                seen,
                "Refuse a request without a key: a client that forgot it is not protected, and cannot see it.",
            )
        } else {
            Finding::expected(seen)
        });
    }
    if taken.is_some_and(|taken| taken > 0) {
        return Ok(Finding::dangerous(
            format!("{}, but with an effect", reply.status),
            "Check the key before the operation begins.",
        ));
    }
    let seen = format!("refused with {}", reply.status);
    if session.expectations.key_missing.contains(&reply.status) && required != Some(false) {
        return Ok(Finding::expected(seen));
    }
    Ok(Finding::differs(
        seen,
        "Refuse with the status of the profile, and name the missing header field in the response.",
    ))
}

/// One row for each status that the API can be made to respond with.
pub(super) async fn statuses(session: &Session) -> Vec<Row> {
    let title = |status: u16| format!("A retry after a {status}");
    if session.operation.statuses.is_empty() {
        let none = async { Err(Untested::new("the operation has no [[status]]")) };
        let tested = tested(session, none).await;
        return vec![row("status", "A retry after an error", "by profile", tested)];
    }
    let mut rows = Vec::new();
    for (at, trigger) in session.operation.statuses.iter().enumerate() {
        let earlier =
            session.operation.statuses.iter().take(at).filter(|other| other.status == trigger.status);
        let id = match earlier.count() {
            0 => format!("status-{}", trigger.status),
            earlier => format!("status-{}-{}", trigger.status, earlier + 1),
        };
        let keeps = session.expectations.keeps(trigger.status);
        let expectation = if keeps { "kept: the same response again" } else { "the key is free again" };
        let tested = tested(session, status(session, trigger, keeps)).await;
        rows.push(row(id, title(trigger.status), expectation, tested));
    }
    rows
}

async fn status(session: &Session, trigger: &StatusTrigger, keeps: bool) -> Tested {
    let intent = session.intent()?;
    let keys = [session.written(&intent.key)];
    let body = || trigger.body.as_ref().map(|body| intent.values.fill(body));
    let before = session.count(&intent.values).await?;
    let change = Change { body: body(), headers: &trigger.headers };
    let first = session.send_with(&intent.values, &keys, &change).await?;
    if first.status != trigger.status {
        return Err(Untested(format!("the API responded {} and not {}", first.status, trigger.status)));
    }
    let between = session.settled_count(&intent.values).await?;
    // Without the fields, the API would execute the request: the status of the retry tells if the key was kept.
    let second = session.send_with(&intent.values, &keys, &Change { body: body(), headers: &[] }).await?;
    let after = session.settled_count(&intent.values).await?;
    let (total, again) = (rise(before, after)?, rise(between, after)?);
    let seen = format!("{}, then {}", first.status, second.status);
    if let Some(total) = total.filter(|total| *total > 1) {
        return Ok(Finding::dangerous(format!("{seen}, with {}", effects(total)), ONCE));
    }
    let is_equal = first.body == second.body;
    let was_kept = if session.is_marked(&second) {
        true
    } else if second.is_success() || again.is_some_and(|again| again > 0) {
        false
    } else if first.status != second.status {
        return Ok(Finding::differs(
            format!("{seen}: the retry got neither the response nor an execution"),
            "Answer the retry with the kept response, or free the key. If the API compares the fields that cause the status, cause it by the body.",
        ));
    } else if is_equal != trigger.headers.is_empty() {
        // Without the cause, only a kept response is equal. With the cause, only another execution has another body.
        is_equal
    } else {
        return Err(Untested(format!("nothing tells a replay from another execution; seen: {seen}")));
    };
    Ok(match (was_kept, keeps) {
        (true, true) => Finding::expected(format!("{seen}: kept")),
        (false, false) => Finding::expected(format!("{seen}: the key was free again")),
        (true, false) => Finding::differs(
            format!("{seen}: kept"),
            "The profile frees the key after this status. A client that repeats the request under the key gets the error until the key expires.",
        ),
        (false, true) => Finding::differs(
            format!("{seen}: the key was free again"),
            "The profile keeps this response. Free the key only if the failed attempt certainly had no effect, or has undone it.",
        ),
    })
}
