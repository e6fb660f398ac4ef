//! What an answer means: one table.

use std::fmt;

use http::{HeaderMap, StatusCode};

use crate::hint::{self, Kind};
use crate::policy::ServerErrors;

/// What a definite answer says. None of these changes when the same request is sent again under the same key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Verdict {
    /// The service did it: 2xx, and the redirection that comes after something was done (303).
    Done,
    /// The service did not do it, and says what the caller may do.
    Refused(Advice),
    /// The service failed, and this is the answer that it keeps. It does not say what took effect before it failed.
    Failed,
    /// It was processed, and the answer of that time cannot be given again: `replay-unavailable`.
    Processed,
}

/// What the caller may do after a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Advice {
    /// Correct the request. That is another intent, with a key of its own.
    FixRequest,
    /// The key belongs to another request. If this is another intent, it takes a new one.
    NewKey,
    /// Not to send it again.
    Stop,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Done => "done",
            Self::Refused(_) => "refused",
            Self::Failed => "failed",
            Self::Processed => "processed",
        })
    }
}

/// What to make of one answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// It is definite.
    Definite(Verdict),
    /// This attempt was turned away before the operation. Definite, unless an earlier attempt may have taken effect: of that
    /// one it says nothing.
    TurnedAway(Advice),
    /// The same request under the same key may bring more.
    Again(Doubt),
    /// Nobody knows, and asking again does not help.
    Unknown,
}

/// Whether an attempt that ended without a definite answer may have taken effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Doubt {
    /// It did not: it was not processed.
    None,
    /// It may have.
    May,
    /// It is being processed.
    InProgress,
}

/// What protects a request that is sent more than once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It carries a key, to an API that honours it.
    Keyed,
    /// Its method asks for no effect (RFC 9110, 9.2.1).
    Safe,
    /// Its method says that twice is as good as once (RFC 9110, 9.2.2).
    Repeatable,
    /// Nothing.
    Once,
}

/// What this answer means. The only place where a status is judged.
pub(crate) fn judge(
    standing: Standing,
    server_errors: ServerErrors,
    status: StatusCode,
    headers: &HeaderMap,
    body: &[u8],
) -> Meaning {
    use Meaning::{Again, Definite, TurnedAway};
    use Verdict::{Done, Failed, Refused};
    let code = status.as_u16();
    let keyed = standing == Standing::Keyed;
    match code {
        100..=299 | 303 => return Definite(Done),
        301 | 302 | 304 if standing == Standing::Safe => return Definite(Done),
        // After it was done, as old services say it; or in place of it: another scheme, another host, a page to sign in. A replay
        // says that it was the first answer, and not which of the two it was.
        301 | 302 | 304 => return Meaning::Unknown,
        300 | 305..=399 => return TurnedAway(Advice::FixRequest),
        _ => {}
    }
    if keyed && hint::is_replay(headers) {
        // Whatever it says: every further attempt would get the same.
        return Definite(if code < 500 { Refused(Advice::FixRequest) } else { Failed });
    }
    let problem = hint::problem(headers, body);
    let doubt = match (problem.kind, code) {
        // Also with a 429: this attempt did nothing, and the one that it speaks of may.
        (Kind::InProgress, _) => Doubt::InProgress,
        (Kind::NotExecuted, _) | (_, 425 | 429) => Doubt::None,
        _ => Doubt::May,
    };
    match problem.retry {
        Some(Ok(())) => return Again(doubt),
        Some(Err(Advice::Stop)) => {
            return match problem.kind {
                Kind::ReplayUnavailable => Definite(Verdict::Processed),
                Kind::ScopeUnavailable => TurnedAway(Advice::Stop),
                Kind::OutcomeUnknown => Meaning::Unknown,
                _ if code >= 500 => Meaning::Unknown,
                _ => Definite(Refused(Advice::Stop)),
            };
        }
        Some(Err(advice)) => return TurnedAway(advice),
        None => {}
    }
    match problem.kind {
        Kind::InProgress if keyed => return Again(Doubt::InProgress),
        Kind::ReplayUnavailable if keyed => return Definite(Verdict::Processed),
        Kind::KeyReused if keyed && code < 500 => return TurnedAway(Advice::NewKey),
        Kind::OutcomeUnknown => return Meaning::Unknown,
        _ => {}
    }
    match hint::should_retry(headers) {
        Some(true) => return Again(doubt),
        Some(false) if code < 500 => return Definite(Refused(Advice::Stop)),
        Some(false) if server_errors != ServerErrors::Final => return Meaning::Unknown,
        Some(false) => return Definite(Failed),
        None => {}
    }
    match code {
        408 => Again(Doubt::May),
        // Without a name, a 409 under a key may be a request in progress, and who is told of a refusal takes a new key.
        409 if keyed && problem.kind == Kind::Unnamed => Again(Doubt::InProgress),
        425 | 429 => Again(Doubt::None),
        // About the way to the operation, and not about the operation.
        401 | 403 | 404 | 405 | 407 | 411 | 413 | 414 | 415 | 417 | 421 | 426 | 431 => {
            TurnedAway(Advice::FixRequest)
        }
        400..=499 => Definite(Refused(Advice::FixRequest)),
        501 | 505 | 511 => TurnedAway(Advice::FixRequest),
        502..=504 => Again(doubt),
        _ => match (standing, server_errors) {
            (_, ServerErrors::Final) => Definite(Failed),
            (Standing::Once, _) | (_, ServerErrors::Unknown) => Meaning::Unknown,
            (_, ServerErrors::Again) => Again(doubt),
        },
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;
    use Doubt::InProgress;
    use Meaning::{Again, Definite, TurnedAway, Unknown};
    use Standing::{Keyed, Once, Repeatable, Safe};
    use Verdict::{Done, Failed, Processed, Refused};

    const STANDINGS: [Standing; 4] = [Keyed, Safe, Repeatable, Once];
    const POLICIES: [ServerErrors; 3] = [ServerErrors::Again, ServerErrors::Final, ServerErrors::Unknown];
    const FIX: Advice = Advice::FixRequest;

    fn json(fields: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert("content-type", HeaderValue::from_static("application/problem+json; charset=utf-8"));
        for (name, value) in fields {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        headers
    }

    fn meaning(standing: Standing, status: u16, headers: &HeaderMap, body: &str) -> Meaning {
        let status = StatusCode::from_u16(status).unwrap();
        judge(standing, ServerErrors::Again, status, headers, body.as_bytes())
    }

    /// The statuses of an answer that says nothing else, in words that the code does not share.
    #[test]
    fn the_table_of_bare_statuses() {
        let turned_away = [401, 403, 404, 405, 407, 411, 413, 414, 415, 417, 421, 426, 431, 501, 505, 511];
        for status in 100..=999 {
            for standing in STANDINGS {
                for policy in POLICIES {
                    let expected = match status {
                        100..300 | 303 => Definite(Done),
                        301 | 302 | 304 if standing == Safe => Definite(Done),
                        301 | 302 | 304 => Unknown,
                        300..400 => TurnedAway(FIX),
                        425 | 429 => Again(Doubt::None),
                        408 | 502 | 503 | 504 => Again(Doubt::May),
                        409 if standing == Keyed => Again(InProgress),
                        _ if turned_away.contains(&status) => TurnedAway(FIX),
                        400..500 => Definite(Refused(FIX)),
                        _ if policy == ServerErrors::Final => Definite(Failed),
                        _ if policy == ServerErrors::Unknown || standing == Once => Unknown,
                        _ => Again(Doubt::May),
                    };
                    let code = StatusCode::from_u16(status).unwrap();
                    let judged = judge(standing, policy, code, &HeaderMap::new(), b"");
                    assert_eq!(judged, expected, "{status} {standing:?} {policy:?}");
                }
            }
        }
    }

    #[test]
    fn a_replay_is_final_whatever_its_status_and_only_under_a_key() {
        for marker in ["idempotent-replayed", "x-idempotent-replayed", "idempotency-replayed"] {
            let headers = json(&[(marker, "true")]);
            for status in 100..=599 {
                let judged = meaning(Keyed, status, &headers, r#"{"retry":"same-key"}"#);
                match (status, judged) {
                    (100..300 | 303, Definite(Done)) | (301 | 302 | 304, Unknown) => {}
                    (300..400, TurnedAway(_))
                    | (400..500, Definite(Refused(_)))
                    | (500.., Definite(Failed)) => {}
                    (status, judged) => panic!("{status}: {judged:?}"),
                }
            }
            assert_eq!(meaning(Repeatable, 503, &headers, ""), Again(Doubt::May));
        }
        assert_eq!(meaning(Keyed, 503, &json(&[("idempotent-replayed", "false")]), ""), Again(Doubt::May));
    }

    #[test]
    fn the_member_retry_is_obeyed_over_the_status_of_every_error() {
        let plain = json(&[]);
        let should = json(&[("stripe-should-retry", "true")]);
        for status in 400..=599 {
            for headers in [&plain, &should] {
                let told = |word: &str| meaning(Keyed, status, headers, &format!(r#"{{"retry":"{word}"}}"#));
                assert!(matches!(told("same-key"), Again(_)), "{status}");
                assert_eq!(told("new-key"), TurnedAway(Advice::NewKey), "{status}");
                assert_eq!(told("fix-request"), TurnedAway(FIX), "{status}");
                let stop = if status < 500 { Definite(Refused(Advice::Stop)) } else { Unknown };
                assert_eq!(told("stop"), stop, "{status}");
            }
        }
        for status in [200, 201, 303] {
            assert_eq!(meaning(Keyed, status, &plain, r#"{"retry":"same-key"}"#), Definite(Done));
        }
        // A word that nobody knows, another type of value, another media type, no object.
        assert_eq!(meaning(Keyed, 503, &plain, r#"{"retry":"unprotected"}"#), Again(Doubt::May));
        assert_eq!(meaning(Keyed, 400, &plain, r#"{"retry":true}"#), Definite(Refused(FIX)));
        assert_eq!(meaning(Keyed, 400, &HeaderMap::new(), r#"{"retry":"same-key"}"#), Definite(Refused(FIX)));
        assert_eq!(meaning(Keyed, 400, &plain, r#"["retry","same-key"]"#), Definite(Refused(FIX)));
        assert_eq!(meaning(Keyed, 400, &plain, r#"{"retry":"same-key""#), Definite(Refused(FIX)));
        let padded = format!(r#"{{"retry":"same-key","pad":"{}"}}"#, "x".repeat(64 * 1024));
        assert_eq!(meaning(Keyed, 400, &plain, &padded), Definite(Refused(FIX)));
    }

    /// The problems of docs/reference/problems.md, as the sidecar sends them.
    #[test]
    fn the_problems_of_oncegate() {
        let table = [
            ("key-missing", 400, "fix-request", TurnedAway(FIX)),
            ("key-invalid", 400, "fix-request", TurnedAway(FIX)),
            ("request-too-large", 413, "fix-request", TurnedAway(FIX)),
            ("request-incomplete", 400, "same-key", Again(Doubt::None)),
            ("overloaded", 503, "same-key", Again(Doubt::None)),
            ("scope-unavailable", 500, "stop", TurnedAway(Advice::Stop)),
            ("store-unavailable", 503, "same-key", Again(Doubt::None)),
            ("key-reused", 422, "new-key", TurnedAway(Advice::NewKey)),
            ("request-in-progress", 409, "same-key", Again(InProgress)),
            ("request-in-progress", 504, "same-key", Again(InProgress)),
            ("request-in-progress", 429, "same-key", Again(InProgress)),
            ("replay-unavailable", 422, "stop", Definite(Processed)),
            ("outcome-unknown", 500, "stop", Unknown),
            ("outcome-unknown", 504, "stop", Unknown),
            ("record-corrupt", 500, "stop", Unknown),
            ("handler-failed", 500, "same-key", Again(Doubt::May)),
            ("upstream-unreachable", 502, "same-key", Again(Doubt::None)),
            ("upstream-unanswered", 502, "unprotected", Again(Doubt::May)),
            ("request-malformed", 400, "fix-request", TurnedAway(FIX)),
            ("request-unsupported", 501, "fix-request", TurnedAway(FIX)),
        ];
        for (name, status, retry, expected) in table {
            let body =
                format!(r#"{{"type":"urn:oncegate:problem:{name}","status":{status},"retry":"{retry}"}}"#);
            assert_eq!(meaning(Keyed, status, &json(&[]), &body), expected, "{name} {status}");
        }
    }

    #[test]
    fn other_services_spell_the_same_conditions() {
        let plain = json(&[]);
        let table = [
            (
                409,
                r#"{"error":{"type":"invalid_request_error","code":"idempotency_key_in_use"}}"#,
                Again(InProgress),
            ),
            (409, r#"{"type":"invalid_request","code":"idempotency_in_flight"}"#, Again(InProgress)),
            (409, r#"{"name":"PREVIOUS_REQUEST_IN_PROGRESS"}"#, Again(InProgress)),
            (409, r#"{"title":"A request is outstanding for this Idempotency-Key"}"#, Again(InProgress)),
            (409, r#"{"type":"https://shop.example/problems#request-in-progress"}"#, Again(InProgress)),
            // Nothing names its kind: it may be in progress.
            (409, r#"{"error":"Conflict","message":"Request is being processed"}"#, Again(InProgress)),
            (409, r#"{"type":"about:blank","title":"Conflict"}"#, Again(InProgress)),
            (429, r#"{"code":"idempotency_key_in_use"}"#, Again(InProgress)),
            (429, r#"{"code":"rate_limit"}"#, Again(Doubt::None)),
            // Another kind of conflict is a refusal.
            (409, r#"{"type":"https://shop.example/problems/name-taken"}"#, Definite(Refused(FIX))),
            (409, r#"{"error":{"code":"version_conflict"}}"#, Definite(Refused(FIX))),
            // What ours says of the execution, others may say of anything.
            (503, r#"{"code":"overloaded"}"#, Again(Doubt::May)),
            (503, r#"{"type":"https://shop.example/problems/overloaded"}"#, Again(Doubt::May)),
            (503, r#"{"type":"urn:oncegate:problem:overloaded"}"#, Again(Doubt::None)),
            (400, r#"{"error":{"type":"idempotency_error"}}"#, TurnedAway(Advice::NewKey)),
            (422, r#"{"code":"idempotency_conflict"}"#, TurnedAway(Advice::NewKey)),
            (409, r#"{"type":"idempotency_key_already_used_error"}"#, TurnedAway(Advice::NewKey)),
            (500, r#"{"type":"outcome-unknown"}"#, Unknown),
        ];
        for (status, body, expected) in table {
            assert_eq!(meaning(Keyed, status, &plain, body), expected, "{body}");
        }
        assert_eq!(meaning(Repeatable, 409, &plain, ""), Definite(Refused(FIX)));
    }

    #[test]
    fn stripes_field_is_obeyed_where_no_member_says_more() {
        for status in 400..=599 {
            let told = |value: &str| meaning(Keyed, status, &json(&[("stripe-should-retry", value)]), "");
            assert!(matches!(told("true"), Again(_)), "{status}");
            let stop = if status < 500 { Definite(Refused(Advice::Stop)) } else { Unknown };
            assert_eq!(told("false"), stop, "{status}");
            assert_eq!(told("maybe"), meaning(Keyed, status, &HeaderMap::new(), ""), "{status}");
        }
        let no = json(&[("stripe-should-retry", "false")]);
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        assert_eq!(judge(Keyed, ServerErrors::Final, status, &no, b""), Definite(Failed));
    }
}
