//! The meaning of a response, in one table.

use std::fmt;

use http::{HeaderMap, StatusCode};

use crate::hint;
use crate::policy::ServerErrorPolicy;
use crate::refusal::RefusalForm;
use crate::signals::Signal;

/// The meaning of a definite response. Only [`TurnedAway`](Self::TurnedAway) can change when the same request is sent again
/// under the same key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Verdict {
    /// The service did the operation: 2xx, and the redirect after it (303).
    Done,
    /// The service did not do the operation, and advises the caller.
    Refused(Advice),
    /// The request was turned away before the operation, and nothing took effect.
    ///
    /// Reasons are credentials (401, 403, 407), a missing address or method (404, 405, 421), a limit (411, 413, 417, 431), a
    /// version (426, 505), a gateway (501, 511), another address (300, 305 to 308). When the reason is fixed, the same intent
    /// can be sent under the same key.
    TurnedAway,
    /// The service failed, and keeps this response. It does not tell what took effect before the failure.
    Failed,
    /// The request was processed, and its response cannot be replayed, or not to this caller: `replay-unavailable`,
    /// `replay-denied`.
    Unreplayable,
}

/// Advice to the caller after a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Advice {
    /// Correct the request. The corrected request is another intent with its own key.
    FixRequest,
    /// The key belongs to another request. If this is another intent, it needs a new key.
    NewKey,
    /// Do not send the request again.
    Stop,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Done => "done",
            Self::Refused(_) => "refused",
            Self::TurnedAway => "turned away",
            Self::Failed => "failed",
            Self::Unreplayable => "unreplayable",
        })
    }
}

/// The meaning of one response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// The response is definite.
    Definite(Verdict),
    /// This attempt was turned away or refused. An earlier attempt may have taken effect, and this response tells nothing about
    /// it. Sending again gets the same response.
    TurnedAway,
    /// This attempt was refused by the operation. An earlier attempt may have taken effect or may still run, and may be the
    /// reason of the refusal. Sending again under the same key may get its response.
    Contested,
    /// The same request under the same key may get another response.
    Again(Doubt),
    /// The outcome is unknown, and sending again does not help.
    Unknown,
}

/// The possible effect of an attempt without a definite response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Doubt {
    /// None: it was not processed.
    None,
    /// It may have taken effect.
    May,
    /// It is being processed.
    InProgress,
}

/// The protection of a request that is sent more than once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protection {
    /// It carries a key, and the API honours keys.
    Keyed,
    /// Its method is safe: it asks for no effect (RFC 9110, 9.2.1).
    Safe,
    /// Its method is idempotent (RFC 9110, 9.2.2).
    Repeatable,
    /// It has no protection.
    Once,
}

/// The knowledge about a request when its response arrives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttemptContext {
    pub(crate) protection: Protection,
    pub(crate) server_errors: ServerErrorPolicy,
    /// An earlier attempt may have taken effect.
    pub(crate) in_doubt: bool,
}

/// The meaning of a response without its context, as if it were the first one.
enum Reading {
    /// The meaning does not depend on earlier attempts.
    Plain(Meaning),
    /// The operation refused the request, and the response is not marked as final.
    Refused(Advice),
    /// The request was turned away or refused before the operation.
    Before(Verdict),
}

/// The meaning of a response. No other function judges a status.
pub(crate) fn judge(asked: AttemptContext, status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Meaning {
    // A safe request has no effect, so it is never in doubt.
    let in_doubt = asked.in_doubt && asked.protection != Protection::Safe;
    match read(asked, status, headers, body) {
        Reading::Plain(meaning) => meaning,
        Reading::Refused(advice) if !in_doubt => Meaning::Definite(Verdict::Refused(advice)),
        // A service that marks replays will mark this refusal when the request is sent again, and a service that still works
        // will have its response then. Without a key there is no replay.
        Reading::Refused(_) if asked.protection == Protection::Keyed => Meaning::Contested,
        Reading::Before(verdict) if !in_doubt => Meaning::Definite(verdict),
        Reading::Refused(_) | Reading::Before(_) => Meaning::TurnedAway,
    }
}

fn read(asked: AttemptContext, status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Reading {
    use Meaning::{Again, Definite};
    use Reading::{Before, Plain, Refused};
    use Verdict::{Done, Failed};
    let AttemptContext { protection, server_errors, .. } = asked;
    let form = RefusalForm::read(status, headers, body);
    let is_own = form == RefusalForm::Own;
    let code = if form.is_call(status) { 502 } else { status.as_u16() };
    let keyed = protection == Protection::Keyed;
    match code {
        100..=299 | 303 => return Plain(Definite(Done)),
        301 | 302 | 304 if protection == Protection::Safe => return Plain(Definite(Done)),
        // Old services redirect after the operation. Gateways redirect instead of it: to another scheme, another host, a page
        // to sign in. A replay does not tell which of the two it was.
        301 | 302 | 304 => return Plain(Meaning::Unknown),
        300 | 305..=399 => return Before(Verdict::TurnedAway),
        _ => {}
    }
    let hint = hint::read(status, headers, body);
    match hint.signal {
        // Every further attempt would get the same response.
        Some(Signal::Replayed) if keyed && code >= 500 => return Plain(Definite(Failed)),
        Some(Signal::Replayed) if keyed => return Plain(Definite(Verdict::Refused(Advice::FixRequest))),
        Some(Signal::Accepted) if keyed && code < 500 => {
            return Plain(Definite(Verdict::Refused(Advice::FixRequest)));
        }
        _ => {}
    }
    let doubt = match (hint.signal, code) {
        // Also with a 429: this attempt did nothing, but the attempt in progress may.
        (Some(Signal::InProgress), _) => Doubt::InProgress,
        (Some(Signal::NotExecuted), _) if is_own => Doubt::None,
        // A body may be that of another API, which the service passes on after its effect. With a key, sending again is safe.
        (Some(Signal::NotExecuted), _) if keyed && hint.has_usual_status => Doubt::None,
        (_, 425 | 429) => Doubt::None,
        _ => Doubt::May,
    };
    match hint.retry {
        Some(Ok(())) => return Plain(Again(doubt)),
        // The service cannot identify the caller, so the operation was not called.
        Some(Err(_)) if hint.signal == Some(Signal::ScopeUnavailable) && (code < 500 || is_own) => {
            return Before(Verdict::TurnedAway);
        }
        Some(Err(Advice::Stop)) => {
            return match hint.signal {
                Some(Signal::ReplayUnavailable) => Plain(Definite(Verdict::Unreplayable)),
                Some(Signal::OutcomeUnknown) => Plain(Meaning::Unknown),
                _ if code >= 500 => Plain(Meaning::Unknown),
                // The service asks not to retry.
                _ => Before(Verdict::Refused(Advice::Stop)),
            };
        }
        Some(Err(_)) if is_about_the_way(code) => return Before(Verdict::TurnedAway),
        // A server error may have the header or the body of another API, which the service passes on after its effect.
        Some(Err(advice)) if code < 500 || is_own => return Before(Verdict::Refused(advice)),
        Some(Err(_)) | None => {}
    }
    match hint.signal {
        Some(Signal::InProgress | Signal::Again) if keyed => return Plain(Again(doubt)),
        Some(Signal::ReplayUnavailable) if keyed => return Plain(Definite(Verdict::Unreplayable)),
        Some(Signal::KeyReused) if keyed && code < 500 => return Before(Verdict::Refused(Advice::NewKey)),
        Some(Signal::ScopeUnavailable) if keyed && code < 500 => return Before(Verdict::TurnedAway),
        Some(Signal::OutcomeUnknown) => return Plain(Meaning::Unknown),
        _ => {}
    }
    match hint::should_retry(headers) {
        Some(true) => return Plain(Again(doubt)),
        Some(false) if is_about_the_way(code) => return Before(Verdict::TurnedAway),
        Some(false) if code < 500 => return Refused(Advice::Stop),
        Some(false) if server_errors != ServerErrorPolicy::Final => return Plain(Meaning::Unknown),
        Some(false) => return Plain(Definite(Failed)),
        None => {}
    }
    match code {
        408 => Plain(Again(Doubt::May)),
        // Without a name, a conflict or a lock under a key may mean a request in progress. If the client reported a refusal,
        // the caller would send the request under a new key.
        409 | 423 if keyed && !hint.is_named => Plain(Again(Doubt::InProgress)),
        425 | 429 => Plain(Again(Doubt::None)),
        _ if is_about_the_way(code) => Before(Verdict::TurnedAway),
        // The request itself is malformed: its target, its media type.
        414 | 415 => Before(Verdict::Refused(Advice::FixRequest)),
        400..=499 => Refused(Advice::FixRequest),
        502..=504 => Plain(Again(doubt)),
        _ => Plain(match (protection, server_errors) {
            (_, ServerErrorPolicy::Final) => Definite(Failed),
            (Protection::Once, _) | (_, ServerErrorPolicy::Unknown) => Meaning::Unknown,
            (_, ServerErrorPolicy::Again) => Again(doubt),
        }),
    }
}

/// Statuses about the path to the operation, not about the operation: credentials, routes, gateways, versions, limits.
const fn is_about_the_way(code: u16) -> bool {
    matches!(code, 401 | 403 | 404 | 405 | 407 | 411 | 413 | 417 | 421 | 426 | 431 | 501 | 505 | 511)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use oncegate_http::{Condition, GrpcForm, Profile, Refusal, RetryAdvice, Settings};

    use super::*;
    use Doubt::InProgress;
    use Meaning::{Again, Contested, Definite, Unknown};
    use Protection::{Keyed, Once, Repeatable, Safe};
    use Verdict::{Done, Failed, Refused, TurnedAway, Unreplayable};

    const STANDINGS: [Protection; 4] = [Keyed, Safe, Repeatable, Once];
    const POLICIES: [ServerErrorPolicy; 3] =
        [ServerErrorPolicy::Again, ServerErrorPolicy::Final, ServerErrorPolicy::Unknown];
    const FIX: Advice = Advice::FixRequest;

    fn json(fields: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert("content-type", HeaderValue::from_static("application/problem+json; charset=utf-8"));
        for (name, value) in fields {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        headers
    }

    const FIRST: AttemptContext =
        AttemptContext { protection: Keyed, server_errors: ServerErrorPolicy::Again, in_doubt: false };

    fn meaning(protection: Protection, status: u16, headers: &HeaderMap, body: &str) -> Meaning {
        let status = StatusCode::from_u16(status).unwrap();
        judge(AttemptContext { protection, ..FIRST }, status, headers, body.as_bytes())
    }

    fn meaning_in_doubt(status: u16, headers: &HeaderMap, body: &str) -> Meaning {
        let status = StatusCode::from_u16(status).unwrap();
        judge(AttemptContext { in_doubt: true, ..FIRST }, status, headers, body.as_bytes())
    }

    /// The expected decisions for responses with a status only, written independently of the code.
    #[test]
    fn the_table_of_bare_statuses() {
        let turned_away = [401, 403, 404, 405, 407, 411, 413, 417, 421, 426, 431, 501, 505, 511];
        for status in 100..=999 {
            for protection in STANDINGS {
                for server_errors in POLICIES {
                    let expected = match status {
                        100..300 | 303 => Definite(Done),
                        301 | 302 | 304 if protection == Safe => Definite(Done),
                        301 | 302 | 304 => Unknown,
                        300..400 => Definite(TurnedAway),
                        425 | 429 => Again(Doubt::None),
                        408 | 502 | 503 | 504 => Again(Doubt::May),
                        409 | 423 if protection == Keyed => Again(InProgress),
                        _ if turned_away.contains(&status) => Definite(TurnedAway),
                        400..500 => Definite(Refused(FIX)),
                        _ if server_errors == ServerErrorPolicy::Final => Definite(Failed),
                        _ if server_errors == ServerErrorPolicy::Unknown || protection == Once => Unknown,
                        _ => Again(Doubt::May),
                    };
                    let code = StatusCode::from_u16(status).unwrap();
                    let asked = AttemptContext { protection, server_errors, in_doubt: false };
                    assert_eq!(judge(asked, code, &HeaderMap::new(), b""), expected, "{status} {asked:?}");
                }
            }
        }
    }

    /// After an attempt that may have taken effect, a refusal that is not marked as the response to the key is never definite.
    #[test]
    fn in_doubt_no_unmarked_refusal_is_definite() {
        let bodies = [
            "",
            r#"{"code":"insufficient_funds"}"#,
            r#"{"type":"https://shop.example/problems/name-taken"}"#,
            r#"{"error":{"code":"version_conflict"}}"#,
            r#"{"name":"DUPLICATE_REQUEST_ID"}"#,
            r#"{"retry":"stop"}"#,
            r#"{"retry":"fix-request"}"#,
            r#"{"retry":"new-key"}"#,
        ];
        let fields: [&[(&str, &str)]; 4] = [
            &[],
            &[("stripe-should-retry", "false")],
            &[("transient-error", "false")],
            &[("idempotent-replayed", "false")],
        ];
        for status in (300..=599).filter(|status| ![301, 302, 303, 304].contains(status)) {
            for protection in [Keyed, Repeatable, Once] {
                for (body, fields) in bodies.iter().flat_map(|body| fields.map(|fields| (body, fields))) {
                    let asked = AttemptContext { protection, in_doubt: true, ..FIRST };
                    let code = StatusCode::from_u16(status).unwrap();
                    let judged = judge(asked, code, &json(fields), body.as_bytes());
                    assert!(!matches!(judged, Definite(_)), "{status} {protection:?} {body}: {judged:?}");
                }
            }
            let code = StatusCode::from_u16(status).unwrap();
            let safe = AttemptContext { protection: Safe, in_doubt: true, ..FIRST };
            let first = AttemptContext { protection: Safe, ..FIRST };
            let judged = judge(safe, code, &HeaderMap::new(), b"");
            assert_eq!(judged, judge(first, code, &HeaderMap::new(), b""), "{status}: it has no effect");
        }
        // The operation's own refusal is asked about again; what was turned away before the operation is not.
        for status in [400, 402, 410, 412, 422, 451] {
            assert_eq!(meaning_in_doubt(status, &HeaderMap::new(), ""), Contested, "{status}");
        }
        for status in [401, 403, 404, 413, 414, 415, 501] {
            assert_eq!(meaning_in_doubt(status, &HeaderMap::new(), ""), Meaning::TurnedAway, "{status}");
        }
        let stop = r#"{"retry":"stop"}"#;
        assert_eq!(
            meaning_in_doubt(402, &json(&[]), stop),
            Meaning::TurnedAway,
            "it does not want to be asked"
        );
        // Marked as the response to the key, it is definite.
        for mark in [
            ("idempotent-replayed", "true"),
            ("idempotency-replay", "TRUE"),
            ("repeatability-result", "Accepted"),
        ] {
            assert_eq!(meaning_in_doubt(402, &json(&[mark]), ""), Definite(Refused(FIX)), "{mark:?}");
        }
        let stamp = json(&[("x-gcs-idempotence-request-timestamp", "1763762400000")]);
        assert_eq!(meaning_in_doubt(402, &stamp, ""), Definite(Refused(FIX)));
        assert_eq!(meaning_in_doubt(409, &stamp, ""), Again(InProgress));
    }

    #[test]
    fn a_replay_is_final_whatever_its_status_and_only_under_a_key() {
        for marker in ["idempotent-replayed", "x-idempotent-replayed", "idempotency-replayed"] {
            let headers = json(&[(marker, "true")]);
            for status in 100..=599 {
                let judged = meaning(Keyed, status, &headers, r#"{"retry":"same-key"}"#);
                match (status, judged) {
                    (100..300 | 303, Definite(Done)) | (301 | 302 | 304, Unknown) => {}
                    (300..400, Definite(TurnedAway))
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
                let is_about_the_way =
                    [401, 403, 404, 405, 407, 411, 413, 417, 421, 426, 431, 501, 505, 511].contains(&status);
                let refused = |advice| if is_about_the_way { TurnedAway } else { Refused(advice) };
                if status < 500 || is_about_the_way {
                    assert_eq!(told("new-key"), Definite(refused(Advice::NewKey)), "{status}");
                    assert_eq!(told("fix-request"), Definite(refused(FIX)), "{status}");
                } else {
                    // It may be passed on from another API after an effect: as if the member were missing.
                    for word in ["new-key", "fix-request"] {
                        assert_eq!(told(word), meaning(Keyed, status, headers, "{}"), "{status} {word}");
                    }
                }
                let stop = if status < 500 { Definite(Refused(Advice::Stop)) } else { Unknown };
                assert_eq!(told("stop"), stop, "{status}");
            }
        }
        for status in [200, 201, 303] {
            assert_eq!(meaning(Keyed, status, &plain, r#"{"retry":"same-key"}"#), Definite(Done));
        }
        // An unknown word, another type of value, another media type, no object.
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
            ("key-missing", 400, "fix-request", Definite(Refused(FIX))),
            ("key-invalid", 400, "fix-request", Definite(Refused(FIX))),
            ("key-expired", 412, "stop", Unknown),
            ("key-unsupported", 501, "fix-request", Definite(TurnedAway)),
            ("request-too-large", 413, "fix-request", Definite(TurnedAway)),
            ("request-incomplete", 400, "same-key", Again(Doubt::None)),
            ("overloaded", 503, "same-key", Again(Doubt::None)),
            ("rate-limited", 429, "same-key", Again(Doubt::None)),
            ("replay-denied", 403, "stop", Definite(Unreplayable)),
            ("replay-denied", 401, "stop", Definite(Unreplayable)),
            ("authorization-unavailable", 503, "same-key", Again(Doubt::May)),
            ("response-sealed", 503, "same-key", Again(Doubt::May)),
            ("scope-unavailable", 400, "fix-request", Definite(TurnedAway)),
            ("scope-unavailable", 401, "fix-request", Definite(TurnedAway)),
            ("scope-not-set", 400, "fix-request", Definite(TurnedAway)),
            ("store-unavailable", 503, "same-key", Again(Doubt::None)),
            ("verification-unavailable", 503, "same-key", Again(Doubt::None)),
            ("key-reused", 422, "new-key", Definite(Refused(Advice::NewKey))),
            ("request-in-progress", 409, "same-key", Again(InProgress)),
            ("request-in-progress", 504, "same-key", Again(InProgress)),
            ("request-in-progress", 429, "same-key", Again(InProgress)),
            ("replay-unavailable", 422, "stop", Definite(Unreplayable)),
            ("outcome-unknown", 500, "stop", Unknown),
            ("outcome-unknown", 504, "stop", Unknown),
            ("record-corrupt", 500, "stop", Unknown),
            ("handler-failed", 500, "same-key", Again(Doubt::May)),
            ("upstream-unreachable", 502, "same-key", Again(Doubt::None)),
            ("upstream-unanswered", 502, "unprotected", Again(Doubt::May)),
            ("request-malformed", 400, "fix-request", Definite(Refused(FIX))),
            ("request-unsupported", 501, "fix-request", Definite(TurnedAway)),
        ];
        for (name, status, retry, expected) in table {
            let body =
                format!(r#"{{"type":"urn:oncegate:problem:{name}","status":{status},"retry":"{retry}"}}"#);
            assert_eq!(meaning(Keyed, status, &json(&[]), &body), expected, "{name} {status}");
        }
    }

    /// The reading of each refusal of Oncegate by a client whose earlier attempts are not in doubt.
    fn expected(condition: Condition) -> &'static [Meaning] {
        match condition {
            Condition::RequestIncomplete
            | Condition::Overloaded
            | Condition::RateLimited
            | Condition::StoreUnavailable
            | Condition::VerificationUnavailable
            | Condition::UpstreamUnreachable => &[Again(Doubt::None)],
            Condition::RequestInProgress => &[Again(InProgress)],
            Condition::AuthorizationUnavailable
            | Condition::ResponseAwaited
            | Condition::ResponseSealed
            | Condition::HandlerFailed => &[Again(Doubt::May)],
            // Only requests without a key get it.
            Condition::UpstreamUnanswered => &[Again(Doubt::May), Unknown],
            Condition::KeyExpired
            | Condition::HostDiffers
            | Condition::OutcomeUnknown
            | Condition::RecordCorrupt => &[Unknown],
            Condition::ReplayUnavailable
            | Condition::ReplayDenied
            | Condition::UpstreamHeadTooLarge
            | Condition::UpstreamUnsupported => &[Definite(Unreplayable)],
            Condition::KeyReused => &[Definite(Refused(Advice::NewKey))],
            _ => &[Definite(Refused(FIX)), Definite(TurnedAway)],
        }
    }

    /// The refusals of every shipped profile, with the statuses that they may have: the name of the profile, the condition, and
    /// the response.
    fn refusals_of_all_profiles(grpc: bool) -> Vec<(&'static str, Condition, http::Response<bytes::Bytes>)> {
        let mut call = HeaderMap::new();
        call.insert("content-type", HeaderValue::from_static("application/grpc"));
        let grpc = GrpcForm::of(&call).filter(|_| grpc);
        let mut refusals = Vec::new();
        for name in Profile::names() {
            let settings = Settings::new(Profile::named(name).unwrap());
            let linked = settings.clone().with_problem_base_url("https://developer.example/how#").unwrap();
            for condition in Condition::ALL {
                let own = [None];
                let first = [None, Some(StatusCode::BAD_GATEWAY), Some(StatusCode::GATEWAY_TIMEOUT)];
                let denied = [None, Some(StatusCode::UNAUTHORIZED), Some(StatusCode::NOT_FOUND)];
                let statuses: &[Option<StatusCode>] = match condition {
                    Condition::OutcomeUnknown | Condition::HandlerFailed | Condition::RequestInProgress => {
                        &first
                    }
                    Condition::ReplayDenied | Condition::ScopeUnavailable => &denied,
                    _ => &own,
                };
                for (settings, status) in
                    [&settings, &linked].into_iter().flat_map(|s| statuses.iter().map(move |t| (s, *t)))
                {
                    let refusal = Refusal::new(condition).with_status(status);
                    refusals.push((name, condition, refusal.into_response(settings, grpc)));
                }
            }
        }
        refusals
    }

    #[test]
    fn every_refusal_of_every_profile_is_read_as_its_condition_says() {
        for (profile, condition, response) in [false, true].into_iter().flat_map(refusals_of_all_profiles) {
            let (status, headers, body) = (response.status(), response.headers(), response.body());
            let shown = format!("{profile} {condition} {status}");
            for server_errors in POLICIES {
                let asked = AttemptContext { server_errors, ..FIRST };
                let judged = judge(asked, status, headers, body);
                let is_certain =
                    condition != Condition::UpstreamUnanswered || server_errors == FIRST.server_errors;
                assert!(!is_certain || expected(condition).contains(&judged), "{shown}: {judged:?}");
                // The advice of the condition, seen by itself.
                let agrees = match condition.retry() {
                    RetryAdvice::SameKey => matches!(judged, Again(_)),
                    RetryAdvice::NewKey => judged == Definite(Refused(Advice::NewKey)),
                    RetryAdvice::FixRequest => matches!(judged, Definite(Refused(FIX) | TurnedAway)),
                    RetryAdvice::Stop => matches!(judged, Unknown | Definite(Unreplayable)),
                    _ => !is_certain || !matches!(judged, Definite(_)),
                };
                assert!(agrees, "{shown}: {judged:?}");
            }
            let in_doubt = judge(AttemptContext { in_doubt: true, ..FIRST }, status, headers, body);
            let is_definite = in_doubt == Definite(Unreplayable);
            assert!(is_definite || !matches!(in_doubt, Definite(_)), "{shown}: {in_doubt:?}");
        }
    }

    /// Gateways remove fields, and pages of other origins may not read them all.
    #[test]
    fn without_the_field_no_refusal_after_an_effect_is_taken_for_one_without() {
        for (profile, condition, mut response) in refusals_of_all_profiles(false) {
            response.headers_mut().remove("idempotency-status");
            let judged = meaning(
                Keyed,
                response.status().as_u16(),
                response.headers(),
                std::str::from_utf8(response.body()).unwrap(),
            );
            let took_effect_perhaps =
                !matches!(expected(condition), [Again(Doubt::None)] | [Definite(Refused(_)), ..]);
            // Both keep the key.
            let is_about_credentials = condition == Condition::ReplayDenied && judged == Definite(TurnedAway);
            // Profiles without a first-sent header do not have it.
            if took_effect_perhaps && !is_about_credentials && condition != Condition::KeyExpired {
                assert!(
                    !matches!(judged, Definite(Refused(_) | TurnedAway) | Again(Doubt::None)),
                    "{profile} {condition}: {judged:?}"
                );
            }
        }
    }

    #[test]
    fn without_a_key_a_refusal_of_any_profile_says_as_much_as_with_one() {
        for (profile, condition, response) in [false, true].into_iter().flat_map(refusals_of_all_profiles) {
            let (status, headers, body) = (response.status(), response.headers(), response.body());
            if let expected @ ([Again(Doubt::None)] | [Definite(Refused(_)), ..]) = expected(condition) {
                let once = judge(AttemptContext { protection: Once, ..FIRST }, status, headers, body);
                assert!(expected.contains(&once), "{profile} {condition} {status}: {once:?}");
            }
        }
    }

    fn refused(problem: &str, retry: &str) -> HeaderMap {
        json(&[("idempotency-status", &format!("refused; problem={problem}; retry={retry}"))])
    }

    /// A service may pass the field on from an API that it called after its effect.
    #[test]
    fn a_field_that_does_not_belong_to_the_status_proves_nothing() {
        for condition in Condition::ALL {
            let headers = refused(condition.slug(), condition.retry().as_str());
            for status in (200..600).filter(|status| ![425, 429].contains(status)) {
                let code = StatusCode::from_u16(status).unwrap();
                if crate::refusal::is_usual_status(condition.slug(), code) {
                    continue;
                }
                for protection in STANDINGS {
                    let told = meaning(protection, status, &headers, "{}");
                    let bare = meaning(protection, status, &json(&[]), "{}");
                    assert_ne!(told, Again(Doubt::None), "{condition} {status} {protection:?}");
                    let is_refused = matches!(told, Definite(Refused(_) | TurnedAway));
                    if status < 400 || (status >= 500 && is_refused) {
                        assert_eq!(told, bare, "{condition} {status} {protection:?}");
                    }
                }
            }
        }
        // The doubt stays until a response is marked as the one to the key.
        let body = r#"{"type":"urn:oncegate:problem:overloaded","retry":"same-key"}"#;
        assert_eq!(meaning(Keyed, 500, &json(&[]), body), Again(Doubt::May));
    }

    #[test]
    fn the_field_of_oncegate_counts_only_in_its_own_form() {
        let told = |lines: &[&str]| {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append("idempotency-status", HeaderValue::from_str(line).unwrap());
            }
            meaning(Keyed, 503, &headers, "")
        };
        let overloaded = "refused; problem=overloaded; retry=same-key";
        assert_eq!(told(&[overloaded]), Again(Doubt::None));
        assert_eq!(told(&["refused;problem=replay-unavailable;retry=stop"]), Definite(Unreplayable));
        for other in [
            &["overloaded"][..],
            &["not-stored; problem=overloaded; retry=same-key"],
            &["refused; retry=same-key"],
            &["refused; problem=; retry=same-key"],
            &[overloaded, "refused; problem=outcome-unknown; retry=stop"],
        ] {
            assert_eq!(told(other), Again(Doubt::May), "{other:?}");
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
            (
                400,
                r#"{"error":{"type":"invalid_request_error","code":"idempotency_scope_unavailable"}}"#,
                Definite(TurnedAway),
            ),
            (
                400,
                r#"{"error":{"type":"invalid_request_error","code":"idempotency_scope_not_set"}}"#,
                Definite(TurnedAway),
            ),
            (429, r#"{"code":"rate_limit"}"#, Again(Doubt::None)),
            (423, "", Again(InProgress)),
            (422, r#"{"status":422,"errorCode":"704","errorType":"validation"}"#, Again(InProgress)),
            (422, r#"{"status":422,"errorCode":704}"#, Again(InProgress)),
            (
                422,
                r#"{"name":"UNPROCESSABLE_ENTITY","details":[{"issue":"X"},{"issue":"PREVIOUS_REQUEST_IN_PROGRESS"}]}"#,
                Again(InProgress),
            ),
            (
                400,
                r#"{"message":[{"errorName":"REQUEST_WITH_SAME_IDEMPOTENCY_KEY_ALREADY_IN_PROGRESS","code":"60102"}]}"#,
                Again(InProgress),
            ),
            (
                409,
                r#"{"type":"https://developers.sinch.com/docs/errors/registry/idempotency-conflict"}"#,
                Again(InProgress),
            ),
            // Another kind of conflict is a refusal.
            (423, r#"{"code":"account_locked"}"#, Definite(Refused(FIX))),
            (422, r#"{"errorCode":"905"}"#, Definite(Refused(FIX))),
            (422, r#"{"errorCode":["704"]}"#, Definite(Refused(FIX))),
            (409, r#"{"type":"https://shop.example/problems/name-taken"}"#, Definite(Refused(FIX))),
            (409, r#"{"error":{"code":"version_conflict"}}"#, Definite(Refused(FIX))),
            // Only a member of an Oncegate problem counts: other services may use the same name for anything.
            (503, r#"{"code":"overloaded"}"#, Again(Doubt::May)),
            (503, r#"{"type":"https://shop.example/problems/overloaded"}"#, Again(Doubt::May)),
            (503, r#"{"type":"urn:oncegate:problem:overloaded"}"#, Again(Doubt::None)),
            (
                503,
                r#"{"type":"https://shop.example/problems/overloaded","retry":"same-key"}"#,
                Again(Doubt::None),
            ),
            (422, r#"{"errors":[{"code":"REPLAY_UNAVAILABLE"}]}"#, Definite(Unreplayable)),
            (422, r#"{"__type":"HostDiffers"}"#, Unknown),
            // The name of an error about the key of an API, too.
            (400, r#"{"code":"KEY_EXPIRED"}"#, Definite(Refused(FIX))),
            (400, r#"{"error":{"type":"idempotency_error"}}"#, Definite(Refused(Advice::NewKey))),
            (422, r#"{"code":"idempotency_conflict"}"#, Definite(Refused(Advice::NewKey))),
            (409, r#"{"type":"idempotency_key_already_used_error"}"#, Definite(Refused(Advice::NewKey))),
            (422, r#"{"name":"DUPLICATE_REQUEST_ID"}"#, Definite(Refused(Advice::NewKey))),
            (
                422,
                r#"{"name":"UNPROCESSABLE_ENTITY","details":[{"issue":"DUPLICATE_REQUEST_ID"}]}"#,
                Definite(Refused(Advice::NewKey)),
            ),
            (
                400,
                r#"{"errors":[{"category":"INVALID_REQUEST_ERROR","code":"IDEMPOTENCY_KEY_REUSED"}]}"#,
                Definite(Refused(Advice::NewKey)),
            ),
            (400, r#"{"__type":"IdempotentParameterMismatchException"}"#, Definite(Refused(Advice::NewKey))),
            (
                409,
                r#"{"error":{"type":"invalid_state","errors":[{"reason":"idempotent_creation_conflict"}]}}"#,
                Definite(Refused(Advice::NewKey)),
            ),
            (
                400,
                r#"{"error":{"type":"idempotency_error","code":"idempotency_replay_unavailable"}}"#,
                Definite(Unreplayable),
            ),
            (500, r#"{"type":"outcome-unknown"}"#, Unknown),
        ];
        for (status, body, expected) in table {
            assert_eq!(meaning(Keyed, status, &plain, body), expected, "{body}");
        }
        // Adyen marks by a field that the same request may be sent again later.
        for status in [409, 422, 500] {
            let transient = json(&[("transient-error", "true")]);
            assert_eq!(
                meaning(Keyed, status, &transient, r#"{"errorCode":"901"}"#),
                Again(Doubt::May),
                "{status}"
            );
        }
        assert_eq!(meaning(Keyed, 422, &json(&[("transient-error", "false")]), ""), Definite(Refused(FIX)));
        assert_eq!(meaning(Repeatable, 409, &plain, ""), Definite(Refused(FIX)));
    }

    #[test]
    fn stripes_field_is_obeyed_where_no_member_says_more() {
        for status in 400..=599 {
            let told = |value: &str| meaning(Keyed, status, &json(&[("stripe-should-retry", value)]), "");
            assert!(matches!(told("true"), Again(_)), "{status}");
            let bare = meaning(Keyed, status, &HeaderMap::new(), "");
            let stop = match status {
                _ if bare == Definite(TurnedAway) => bare,
                ..500 => Definite(Refused(Advice::Stop)),
                _ => Unknown,
            };
            assert_eq!(told("false"), stop, "{status}");
            assert_eq!(told("maybe"), meaning(Keyed, status, &HeaderMap::new(), ""), "{status}");
        }
        let no = json(&[("stripe-should-retry", "false")]);
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        let last = AttemptContext { server_errors: ServerErrorPolicy::Final, ..FIRST };
        assert_eq!(judge(last, status, &no, b""), Definite(Failed));
    }
}
