//! The rows about the syntax of keys.

use super::{Finding, Tested, rise, row, tested};
use crate::error::Untested;
use crate::expectations::{Expectations, any_of};
use crate::report::Row;
use crate::session::{Change, Execution, Session};

const REFUSE: &str = "Refuse a key that cannot be read with the status of the profile, also if keys are optional: the client believes that it is protected.";

pub(super) fn invalid_expected(expected: &Expectations) -> String {
    let refused = any_of(&expected.key_invalid);
    if expected.raw_keys {
        format!("refused with {refused}, or taken as one key")
    } else {
        format!("refused with {refused}")
    }
}

/// One row for each malformed key.
pub(super) async fn malformed(session: &Session) -> Vec<Row> {
    let expected = &session.expectations;
    let mut rows = Vec::new();
    // The name, the title, and the field value; raw keys may be any text that is neither empty nor too long.
    let long = "{key}".to_owned() + &"x".repeat(300);
    let table = [
        ("empty-key", "An empty key", false, ""),
        ("unclosed-quote", "A key with an opening quote only", true, "\"{key}"),
        ("key-list", "Two keys in one field line", true, "{key}, {key}-b"),
        ("non-ascii-key", "A key with a character that is not ASCII", true, "{key}-ü"),
        ("long-key", "A key of 336 characters", false, long.as_str()),
    ];
    for (id, title, may_be_raw, value) in table {
        let is_raw = expected.raw_keys && may_be_raw;
        let refused = format!("refused with {}", any_of(&expected.key_invalid));
        let expectation = if is_raw { invalid_expected(expected) } else { refused };
        let tested = tested(session, async {
            // In JSON, such a key is a string as any other.
            if may_be_raw && session.has_key_placeholder() {
                return Err(in_template());
            }
            let key = value.replace("{key}", &session.intent()?.key);
            invalid(session, &[key.into_bytes()], is_raw).await
        });
        let tested = tested.await;
        rows.push(row(id, title, expectation, tested));
    }
    rows
}

fn in_template() -> Untested {
    Untested::new("the key is not in a header field")
}

/// Two keys in two field lines.
pub(super) async fn doubled(session: &Session) -> Tested {
    if session.has_key_placeholder() {
        return Err(in_template());
    }
    let (one, two) = (session.intent()?, session.intent()?);
    invalid(session, &[session.written(&one.key), session.written(&two.key)], session.expectations.raw_keys)
        .await
}

/// A request with an invalid key, sent twice: refused, taken as a key, or executed without protection.
async fn invalid(session: &Session, keys: &[Vec<u8>], may_be_taken: bool) -> Tested {
    let intent = session.intent()?;
    let before = session.count(&intent.values).await?;
    let first = session.send_with(&intent.values, keys, &Change::default()).await?;
    let between = session.settled_count(&intent.values).await?;
    if !first.is_success() {
        let seen = format!("refused with {}", first.status);
        if rise(before, between)?.is_some_and(|taken| taken > 0) {
            return Ok(Finding::dangerous(
                format!("{seen}, but with an effect"),
                "Check the key before the operation begins.",
            ));
        }
        return Ok(if session.expectations.key_invalid.contains(&first.status) {
            Finding::expected(seen)
        } else {
            Finding::differs(seen, REFUSE)
        });
    }
    let second = session.send_with(&intent.values, keys, &Change::default()).await?;
    let again = rise(between, session.settled_count(&intent.values).await?)?;
    let seen = format!("{}, then {}", first.status, second.status);
    if again.is_some_and(|again| again > 0)
        || second.is_success() && session.execution(&first, &second, again) == Execution::Executed
    {
        return Ok(Finding::dangerous(format!("{seen}: ignored, and executed twice"), REFUSE));
    }
    if second.is_success() && session.execution(&first, &second, again) == Execution::Unknown {
        let reason = session.unseen().0;
        return if may_be_taken {
            Err(Untested(format!("{reason}; seen: {seen}, so it was not refused")))
        } else {
            Ok(Finding::differs(format!("{seen}: not refused; taken as a key or ignored: {reason}"), REFUSE))
        };
    }
    if !second.is_success() {
        let seen = format!("{seen}: not refused at first, and the retry does not get the response");
        return Ok(Finding::differs(seen, REFUSE));
    }
    let seen = format!("{seen}: taken as a key");
    Ok(if may_be_taken { Finding::expected(seen) } else { Finding::differs(seen, REFUSE) })
}

pub(super) fn quoted_expected(expected: &Expectations) -> String {
    if expected.raw_keys {
        "one key, two, or quotes refused".to_owned()
    } else {
        "one key: the first response again".to_owned()
    }
}

/// The same key in quotes, then bare.
pub(super) async fn quoted_and_bare(session: &Session) -> Tested {
    if session.has_key_placeholder() {
        return Err(in_template());
    }
    let intent = session.intent()?;
    let quoted = [format!("\"{}\"", intent.key).into_bytes()];
    let first = session.send_with(&intent.values, &quoted, &Change::default()).await?;
    let advice = "Take a key in quotes and without for the same key: the draft demands quotes, and most clients send none.";
    if !first.is_success() {
        let seen = format!("a quoted key is refused with {}", first.status);
        let is_right =
            session.expectations.raw_keys && session.expectations.key_invalid.contains(&first.status);
        return Ok(if is_right { Finding::expected(seen) } else { Finding::differs(seen, advice) });
    }
    let before = session.settled_count(&intent.values).await?;
    let second =
        session.send_with(&intent.values, &[intent.key.clone().into_bytes()], &Change::default()).await?;
    let again = rise(before, session.settled_count(&intent.values).await?)?;
    let seen = format!("{}, then {}", first.status, second.status);
    if !second.is_success() {
        return Ok(Finding::differs(format!("{seen}: the bare key is refused"), advice));
    }
    match session.execution(&first, &second, again) {
        Execution::Replayed => Ok(Finding::expected(format!("{seen}: one key"))),
        Execution::Executed if session.expectations.raw_keys => {
            Ok(Finding::expected(format!("{seen}: two keys")))
        }
        // Only a client that changes its spelling between two attempts has a second effect.
        Execution::Executed => {
            Ok(Finding::differs(format!("{seen}: two keys, so the operation was executed twice"), advice))
        }
        Execution::Unknown => Err(Untested(format!("{}; seen: {seen}", session.unseen().0))),
    }
}
