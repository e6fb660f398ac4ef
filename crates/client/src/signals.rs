//! The signals of services about a key, as data. The page docs/reference/signals.md has the same rows.

/// The meaning of a signal in a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    /// The response is that of the first request with this key. It is final, also if it is a refusal or a failure.
    Replayed,
    /// The service took the request under this key, and this is its response. A refusal is final.
    Accepted,
    /// A request with this key is being processed. Its effect may follow.
    InProgress,
    /// The same request under the same key may get another response later.
    Again,
    /// The key was used before, for another request or for this one.
    KeyReused,
    /// Nothing was executed, and the same request may be sent again.
    NotExecuted,
    /// It is unknown if the operation took effect.
    OutcomeUnknown,
    /// The operation was processed, and its response cannot be given again.
    ReplayUnavailable,
    /// The service cannot identify the caller. Nothing was executed.
    ScopeUnavailable,
}

/// The part of a response in which a signal is found.
#[derive(Clone, Copy, Debug)]
pub(crate) enum At {
    /// A header with this value, in any case.
    Field(&'static str, &'static str),
    /// A header with any value, in a response whose status is not this one.
    FieldUnless(&'static str, u16),
    /// A member of a JSON body with this text or number. `[]` after a name means each element of a list.
    Member(&'static str, &'static str),
    /// The name of the error in one of the usual members: `type`, `code`, `name`, `error.code`, `error.type`. If `type` is a
    /// URI, the part after its last `:`, `/` or `#` is enough.
    Name(&'static str),
    /// The condition of a refusal of Oncegate: in the header `Idempotency-Status`, as a name, or for some conditions as the code
    /// in the shape of a shipped profile.
    ///
    /// For [`Signal::NotExecuted`] a name alone is not enough, because other services use such words for failures with an
    /// effect: it must be in the header, in the usual `urn:`, or next to the member `retry` of a problem.
    Problem(&'static str),
}

impl At {
    /// Returns true if this is the problem of Oncegate with this name.
    pub(crate) fn is_problem(self, name: &str) -> bool {
        matches!(self, Self::Problem(own) if own == name)
    }
}

/// A signal, and the part of a response in which it is found.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(test), allow(dead_code, reason = "a test compares the whole row with its page"))]
pub(crate) struct SignalRule {
    pub(crate) signal: Signal,
    pub(crate) at: At,
    /// The API or the specification.
    pub(crate) api: &'static str,
    /// The URL of its documentation.
    pub(crate) source: &'static str,
}

const fn row(signal: Signal, at: At, api: &'static str, source: &'static str) -> SignalRule {
    SignalRule { signal, at, api, source }
}

const ACP: &str = "https://developers.openai.com/commerce/specs/checkout";
const ADYEN: &str = "https://docs.adyen.com/development-resources/api-idempotency";
const AWS: &str = "https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-idempotency.html";
const BLUESNAP: &str = "https://developers.bluesnap.com/v8976-JSON/docs/idempotency-errors";
const DRAFT: &str = "https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-idempotency-key-header-07";
const ECHO: &str = "https://echo.labstack.com/pro/problems/idempotency-key-reused";
const GOCARDLESS: &str = "https://gocardless.com/blog/idempotency-keys";
const INCREASE: &str = "https://increase.com/documentation/idempotency-keys";
const OASIS: &str =
    "https://docs.oasis-open.org/odata/repeatable-requests/v1.0/repeatable-requests-v1.0.html";
const CRUNCHY: &str = "https://docs.crunchybridge.com/api-concepts/idempotency";
const IDEMKIT: &str = "https://github.com/idemkit/idemkit";
const MIDDLEWARE: &str = "https://github.com/ietf-wg-httpapi/idempotency/issues/46";
const ONCEGATE: &str = "problems.md";
const PAYPAL: &str = "https://developer.paypal.com/api/rest/reference/idempotency/";
const PAYWARE: &str = "https://github.com/payware/mcp-server/releases/tag/v1.5.0";
const PRIMER: &str = "https://github.com/api-evangelist/primer";
const QUIDKEY: &str = "https://docs.quidkey.com/guides/payment-api/concepts/idempotency";
const SINCH: &str = "https://developers.sinch.com/docs/errors/registry/idempotency-conflict";
const SMARTRETRY: &str = "https://www.smartretry.com/docs/api-reference/idempotency";
const SQUARE: &str = "https://developer.squareup.com/docs/working-with-apis/idempotency";
const STRIPE: &str = "https://docs.stripe.com/api/idempotent_requests";
const TRUELAYER: &str = "https://docs.truelayer.com/docs/error-types-for-payments-v3";
const WORLDLINE: &str =
    "https://docs.direct.worldline-solutions.com/en/integration/api-developer-guide/idempotent-requests";

/// All rules. The first rule that applies counts.
pub(crate) const SIGNAL_RULES: &[SignalRule] = {
    use At::{Field, FieldUnless, Member, Name, Problem};
    use Signal::{
        Accepted, Again, InProgress, KeyReused, NotExecuted, OutcomeUnknown, ReplayUnavailable, Replayed,
        ScopeUnavailable,
    };
    &[
        row(Replayed, Field("idempotent-replayed", "true"), "Oncegate, Stripe, ACP, Increase", STRIPE),
        row(Replayed, Field("x-idempotent-replayed", "true"), "common middleware", MIDDLEWARE),
        row(Replayed, Field("idempotency-replayed", "true"), "idemkit, Hono", IDEMKIT),
        row(Replayed, Field("idempotency-replay", "true"), "Crunchy Bridge", CRUNCHY),
        row(Replayed, FieldUnless("x-gcs-idempotence-request-timestamp", 409), "Worldline", WORLDLINE),
        row(Accepted, Field("repeatability-result", "accepted"), "OASIS Repeatable Requests, Azure", OASIS),
        row(InProgress, Problem("request-in-progress"), "Oncegate", ONCEGATE),
        row(
            InProgress,
            Member("title", "A request is outstanding for this Idempotency-Key"),
            "draft-07",
            DRAFT,
        ),
        row(InProgress, Name("idempotency_key_in_use"), "Stripe", STRIPE),
        row(InProgress, Name("idempotency_in_flight"), "ACP", ACP),
        row(InProgress, Name("PREVIOUS_REQUEST_IN_PROGRESS"), "PayPal", PAYPAL),
        row(InProgress, Member("details[].issue", "PREVIOUS_REQUEST_IN_PROGRESS"), "PayPal", PAYPAL),
        row(InProgress, Member("errorCode", "704"), "Adyen", ADYEN),
        row(InProgress, Member("message[].errorName", BLUESNAP_RUNS), "BlueSnap", BLUESNAP),
        row(InProgress, Name("ERR_IDEMPOTENCY_KEY_IN_PROGRESS"), "payware", PAYWARE),
        row(InProgress, Name("IDEMPOTENT_REQUEST_IN_PROGRESS"), "Quidkey", QUIDKEY),
        row(InProgress, Member("title", "Idempotency-Key Concurrency Conflict"), "TrueLayer", TRUELAYER),
        row(InProgress, Name(SINCH), "Sinch", SINCH),
        row(Again, Field("transient-error", "true"), "Adyen", ADYEN),
        row(OutcomeUnknown, Problem("outcome-unknown"), "Oncegate", ONCEGATE),
        // The unreadable record may belong to this request.
        row(OutcomeUnknown, Problem("record-corrupt"), "Oncegate", ONCEGATE),
        // The request may have taken effect under the other host.
        row(OutcomeUnknown, Problem("host-differs"), "Oncegate", ONCEGATE),
        row(OutcomeUnknown, Problem("key-expired"), "Oncegate", ONCEGATE),
        row(OutcomeUnknown, Name("idempotency_host_differs"), "Oncegate, profile `stripe`", ONCEGATE),
        row(ReplayUnavailable, Problem("replay-unavailable"), "Oncegate", ONCEGATE),
        row(ReplayUnavailable, Problem("replay-denied"), "Oncegate", ONCEGATE),
        // The service has responded, and its response cannot be passed on.
        row(ReplayUnavailable, Problem("upstream-head-too-large"), "Oncegate", ONCEGATE),
        row(ReplayUnavailable, Problem("upstream-unsupported"), "Oncegate", ONCEGATE),
        row(
            ReplayUnavailable,
            Name("idempotency_replay_unavailable"),
            "Oncegate, profile `stripe`",
            ONCEGATE,
        ),
        row(KeyReused, Problem("key-reused"), "Oncegate", ONCEGATE),
        row(KeyReused, Member("title", "Idempotency-Key is already used"), "draft-07", DRAFT),
        row(KeyReused, Name("idempotency_error"), "Stripe", STRIPE),
        row(KeyReused, Name("idempotency_key_reused"), "Oncegate, profile `stripe`; Echo", ECHO),
        row(KeyReused, Name("idempotency_conflict"), "ACP", ACP),
        row(KeyReused, Name("IDEMPOTENCY_CONFLICT"), "SmartRetry", SMARTRETRY),
        row(KeyReused, Name("idempotency_key_already_used_error"), "Increase", INCREASE),
        row(KeyReused, Name("DUPLICATE_REQUEST_ID"), "PayPal", PAYPAL),
        row(KeyReused, Member("details[].issue", "DUPLICATE_REQUEST_ID"), "PayPal", PAYPAL),
        row(KeyReused, Name("PAYPAL_REQUEST_ID_PREVIOUSLY_USED"), "PayPal", PAYPAL),
        row(KeyReused, Member("details[].issue", "PAYPAL_REQUEST_ID_PREVIOUSLY_USED"), "PayPal", PAYPAL),
        row(KeyReused, Member("errors[].code", "IDEMPOTENCY_KEY_REUSED"), "Square", SQUARE),
        row(KeyReused, Member("message[].errorName", BLUESNAP_REUSED), "BlueSnap", BLUESNAP),
        row(KeyReused, Name("ERR_IDEMPOTENCY_KEY_REUSED"), "payware", PAYWARE),
        row(
            KeyReused,
            Member("error.errors[].reason", "idempotent_creation_conflict"),
            "GoCardless",
            GOCARDLESS,
        ),
        row(
            KeyReused,
            Member("error.errorId", "TransactionRequestIdempotencyKeyAlreadyExists"),
            "Primer",
            PRIMER,
        ),
        row(KeyReused, Member("__type", "IdempotentParameterMismatchException"), "AWS", AWS),
        row(KeyReused, Member("title", "Idempotency-Key Reuse"), "TrueLayer", TRUELAYER),
        row(NotExecuted, Problem("store-unavailable"), "Oncegate", ONCEGATE),
        row(NotExecuted, Problem("verification-unavailable"), "Oncegate", ONCEGATE),
        row(NotExecuted, Problem("overloaded"), "Oncegate", ONCEGATE),
        row(NotExecuted, Problem("rate-limited"), "Oncegate", ONCEGATE),
        row(NotExecuted, Problem("request-incomplete"), "Oncegate", ONCEGATE),
        row(NotExecuted, Problem("upstream-unreachable"), "Oncegate", ONCEGATE),
        row(ScopeUnavailable, Problem("scope-unavailable"), "Oncegate", ONCEGATE),
        row(ScopeUnavailable, Problem("scope-not-set"), "Oncegate", ONCEGATE),
        row(ScopeUnavailable, Name("idempotency_scope_unavailable"), "Oncegate, profile `stripe`", ONCEGATE),
        row(ScopeUnavailable, Name("idempotency_scope_not_set"), "Oncegate, profile `stripe`", ONCEGATE),
    ]
};

const BLUESNAP_RUNS: &str = "REQUEST_WITH_SAME_IDEMPOTENCY_KEY_ALREADY_IN_PROGRESS";
const BLUESNAP_REUSED: &str = "SAME_IDEMPOTENCY_KEY_WAS_ALREADY_IN_USE_WITH_PREVIOUS_DIFFERENT_REQUEST";

#[cfg(test)]
mod tests {
    use super::*;

    /// The row as a line of the page.
    fn line(row: &SignalRule) -> String {
        let at = match row.at {
            At::Field(name, value) => format!("field `{name}: {value}`"),
            At::FieldUnless(name, status) => format!("field `{name}`, status not {status}"),
            At::Member(path, text) => format!("`{path}` = `{text}`"),
            At::Name(text) => format!("name `{text}`"),
            At::Problem(condition) => format!("problem `{condition}`"),
        };
        format!("| {} | {at} | {:?} | [source]({}) |", row.api, row.signal, row.source)
    }

    #[test]
    fn the_page_has_every_row_and_no_other() {
        let page = include_str!("../../../docs/reference/signals.md");
        let rows: Vec<&str> = page.lines().filter(|line| line.contains("[source](")).collect();
        let expected: Vec<String> = SIGNAL_RULES.iter().map(line).collect();
        assert_eq!(rows, expected, "the page should have:\n{}", expected.join("\n"));
    }

    #[test]
    fn no_row_is_hidden_by_an_earlier_one() {
        let mut seen = std::collections::HashSet::new();
        for row in SIGNAL_RULES {
            assert!(seen.insert(format!("{:?}", row.at)), "{row:?}");
        }
    }
}
