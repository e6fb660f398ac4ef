//! Refusals of Oncegate, which name their condition in a header, whatever the shape of their body.
//!
//! A service may pass the header on from another API that it called after its own effect. So the header alone is no proof: the
//! rest of the response must have the form that Oncegate gives to a refusal.

use http::header::CONTENT_TYPE;
use http::{HeaderMap, StatusCode};
use serde_json::Value;

use crate::hint::{self, end};
use crate::verdict::Advice;

/// The header in which Oncegate names the condition of a refusal: `refused; problem=NAME; retry=WORD`.
const IDEMPOTENCY_STATUS: &str = "idempotency-status";

/// The condition and the advice of a refusal of Oncegate.
pub(crate) struct OwnRefusal<'a> {
    pub(crate) problem: &'a str,
    pub(crate) retry: Option<Result<(), Advice>>,
}

impl<'a> OwnRefusal<'a> {
    pub(crate) fn read(headers: &'a HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(IDEMPOTENCY_STATUS).iter();
        let (Some(value), None) = (values.next(), values.next()) else { return None };
        // A gateway may have joined two fields.
        let value = value.to_str().ok().filter(|value| !value.contains(','))?;
        let mut parts = value.split(';').map(str::trim);
        if parts.next()? != "refused" {
            return None;
        }
        let value_of = |name: &str| {
            parts.clone().find_map(|part| part.strip_prefix(name)?.strip_prefix('=')).unwrap_or_default()
        };
        let problem = Some(value_of("problem")).filter(|problem| !problem.is_empty())?;
        Some(Self { problem, retry: hint::advice(value_of("retry")) })
    }
}

/// The form of a response, compared with that of the refusal in its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RefusalForm {
    /// The header is missing.
    NoHeader,
    /// Another form: the service may have passed the header on.
    Other,
    /// A failed call of gRPC, or of a tool in MCP, in another form. Its status is that of a success, which says nothing.
    OtherCall,
    /// The form that Oncegate gives to this refusal.
    Own,
}

impl RefusalForm {
    pub(crate) fn read(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Self {
        let Some(OwnRefusal { problem, .. }) = OwnRefusal::read(headers) else { return Self::NoHeader };
        if !status.is_success() {
            return if is_usual_status(problem, status) { Self::Own } else { Self::Other };
        }
        let is_own = if is_grpc(headers) {
            let Some(code) = grpc_code(headers).filter(|code| *code != 0) else { return Self::Other };
            rule_of(problem).is_some_and(|rule| rule.grpc.contains(&code))
        } else {
            let Some(message) = hint::json(headers, body).filter(is_failed_call) else { return Self::Other };
            problem_of_call(&message).is_some_and(|named| end(named) == problem)
        };
        if is_own { Self::Own } else { Self::OtherCall }
    }

    /// Returns `true` for a failed call of gRPC or of a tool, whose status is that of a success.
    pub(crate) fn is_call(self, status: StatusCode) -> bool {
        status.is_success() && matches!(self, Self::OtherCall | Self::Own)
    }
}

/// A problem after which nothing was executed, with the statuses that it has in the shipped profiles.
struct ProblemStatuses {
    problem: &'static str,
    http: &'static [u16],
    grpc: &'static [u16],
}

const fn row(problem: &'static str, http: &'static [u16], grpc: &'static [u16]) -> ProblemStatuses {
    ProblemStatuses { problem, http, grpc }
}

const STATUSES: &[ProblemStatuses] = &[
    row("key-missing", &[400], &[3]),
    row("key-invalid", &[400], &[3]),
    row("key-unsupported", &[501], &[12]),
    row("request-too-large", &[413], &[3]),
    row("request-incomplete", &[400], &[14]),
    row("overloaded", &[503], &[14]),
    row("rate-limited", &[429], &[8]),
    row("scope-unavailable", &[400, 401], &[3, 16]),
    row("scope-not-set", &[400], &[3]),
    row("verification-unavailable", &[503], &[14]),
    row("store-unavailable", &[503], &[14]),
    row("key-reused", &[400, 422], &[9]),
    row("upstream-unreachable", &[502], &[14]),
    row("request-malformed", &[400], &[3]),
    row("request-head-too-large", &[431], &[3]),
    row("request-unsupported", &[405, 501], &[12]),
];

/// The problems after which nothing was executed, with their statuses over HTTP and their codes over gRPC.
#[cfg(test)]
pub(crate) fn problem_statuses() -> impl Iterator<Item = (&'static str, &'static [u16], &'static [u16])> {
    STATUSES.iter().map(|row| (row.problem, row.http, row.grpc))
}

fn rule_of(problem: &str) -> Option<&'static ProblemStatuses> {
    STATUSES.iter().find(|row| row.problem == problem)
}

/// Returns `true` if refusals for this problem have this status. `false` for problems after which something may have been
/// executed.
pub(crate) fn is_usual_status(problem: &str, status: StatusCode) -> bool {
    rule_of(problem).is_some_and(|row| row.http.contains(&status.as_u16()))
}

fn is_grpc(headers: &HeaderMap) -> bool {
    const GRPC: &[u8] = b"application/grpc";
    let essence = headers.get(CONTENT_TYPE).and_then(|value| value.as_bytes().get(..GRPC.len()));
    essence.is_some_and(|essence| essence.eq_ignore_ascii_case(GRPC))
}

/// The status of a call of gRPC that ended in its head.
fn grpc_code(headers: &HeaderMap) -> Option<u16> {
    headers.get("grpc-status")?.to_str().ok()?.parse().ok()
}

/// Returns `true` for the response to a call of a tool that failed.
fn is_failed_call(message: &Value) -> bool {
    let is_error = message.pointer("/result/isError") == Some(&Value::Bool(true));
    message.get("jsonrpc").is_some() && (is_error || message.get("error").is_some_and(Value::is_object))
}

/// The type of the problem in the response to a call of a tool.
fn problem_of_call(message: &Value) -> Option<&str> {
    let result = message.pointer("/result/_meta/oncegate~1problem/type");
    result.or_else(|| message.pointer("/error/data/type"))?.as_str()
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn form(status: u16, fields: &[(&'static str, &'static str)], body: &str) -> RefusalForm {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, HeaderValue::from_static(value));
        }
        RefusalForm::read(StatusCode::from_u16(status).unwrap(), &headers, body.as_bytes())
    }

    const FIELD: (&str, &str) = ("idempotency-status", "refused; problem=overloaded; retry=same-key");
    const JSON: (&str, &str) = ("content-type", "application/json");
    const GRPC: (&str, &str) = ("content-type", "application/grpc+proto");

    #[test]
    fn the_status_of_a_refusal_is_that_of_its_problem() {
        assert_eq!(form(503, &[], ""), RefusalForm::NoHeader);
        assert_eq!(form(503, &[FIELD], ""), RefusalForm::Own);
        for status in [200, 201, 303, 400, 429, 500, 502] {
            assert_eq!(form(status, &[FIELD], ""), RefusalForm::Other, "{status}");
        }
        let unknown = ("idempotency-status", "refused; problem=new; retry=same-key");
        assert_eq!(form(503, &[unknown], ""), RefusalForm::Other);
    }

    #[test]
    fn a_failed_call_of_grpc_has_its_status_in_the_head() {
        for (status, expected) in [
            ("14", RefusalForm::Own),
            ("2", RefusalForm::OtherCall),
            ("0", RefusalForm::Other),
            ("x", RefusalForm::Other),
        ] {
            assert_eq!(form(200, &[FIELD, GRPC, ("grpc-status", status)], ""), expected, "{status}");
        }
        assert_eq!(form(200, &[FIELD, GRPC], ""), RefusalForm::Other, "the trailer has the status");
        assert_eq!(form(200, &[FIELD, ("grpc-status", "14")], ""), RefusalForm::Other);
    }

    #[test]
    fn a_failed_call_of_a_tool_names_its_problem() {
        let result = |is_error: &str, problem: &str| {
            format!(
                r#"{{"jsonrpc":"2.0","id":1,"result":{{"isError":{is_error},"_meta":{{"oncegate/problem":{{"type":"{problem}"}}}}}}}}"#
            )
        };
        let ours = "urn:oncegate:problem:overloaded";
        let error = format!(r#"{{"jsonrpc":"2.0","id":1,"error":{{"data":{{"type":"{ours}"}}}}}}"#);
        for (body, expected) in [
            (result("true", ours), RefusalForm::Own),
            (result("true", "https://developer.example/how#overloaded"), RefusalForm::Own),
            (error.clone(), RefusalForm::Own),
            (result("true", "urn:oncegate:problem:key-reused"), RefusalForm::OtherCall),
            (r#"{"jsonrpc":"2.0","id":1,"result":{"isError":true}}"#.to_owned(), RefusalForm::OtherCall),
            (r#"{"jsonrpc":"2.0","id":1,"error":{"code":1}}"#.to_owned(), RefusalForm::OtherCall),
            (result("false", ours), RefusalForm::Other),
            (r#"{"jsonrpc":"2.0","id":1,"result":{"content":[]}}"#.to_owned(), RefusalForm::Other),
            (error.replace("jsonrpc", "version"), RefusalForm::Other),
            (format!(r#"{{"type":"{ours}"}}"#), RefusalForm::Other),
        ] {
            assert_eq!(form(200, &[FIELD, JSON], &body), expected, "{body}");
        }
        assert_eq!(form(200, &[FIELD], &result("true", ours)), RefusalForm::Other, "it is not JSON");
    }
}
