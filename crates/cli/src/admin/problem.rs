//! The refusals of the admin API.

use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header::{self, HeaderValue};
use oncegate_core::{ErrorChain, IdProblem, RecordId, StoreError, StoreErrorKind};
use serde_json::{Value, json};

/// A refusal, as problem details (RFC 9457).
#[derive(Clone, Debug)]
pub(super) struct Problem {
    status: StatusCode,
    slug: &'static str,
    title: &'static str,
    detail: String,
    record: Option<RecordId>,
    /// For a caller in another form than the route needs.
    caller: Option<Box<CallerForm>>,
}

/// The form of the caller that a route needs, and the parts that identify it. Boxed: this problem is rare, and all others stay
/// small.
#[derive(Clone, Debug)]
struct CallerForm {
    form: &'static str,
    parts: String,
}

impl Problem {
    fn new(status: StatusCode, slug: &'static str, title: &'static str, detail: impl Into<String>) -> Self {
        Self { status, slug, title, detail: detail.into(), record: None, caller: None }
    }

    /// Something in the request is wrong.
    pub(super) fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad-request", "The request is invalid", detail)
    }

    /// The caller is given in another form than the route needs: `value`, `fields`, `single-tenant`, `nothing` or `key-alone`.
    pub(super) fn caller_form(form: &'static str, parts: String, detail: &str) -> Self {
        Self {
            caller: Some(Box::new(CallerForm { form, parts })),
            ..Self::bad_request(format!("caller: {detail}"))
        }
    }

    pub(super) fn too_large(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too-large", "The request is too large", detail)
    }

    pub(super) fn media_type() -> Self {
        let detail = "Send the body as JSON, with Content-Type: application/json.";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "media-type", "The body is not JSON", detail)
    }

    pub(super) fn unauthorized(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", "The admin token is missing or wrong", detail)
    }

    pub(super) fn forbidden(detail: impl Into<String>) -> Self {
        Self::new(
            StatusCode::FORBIDDEN,
            "forbidden",
            "The request may come from a page of another site",
            detail,
        )
    }

    pub(super) fn no_such_path(path: &str) -> Self {
        let detail = format!("There is no {path}.");
        Self::new(StatusCode::NOT_FOUND, "no-such-path", "There is no such path", detail)
    }

    pub(super) fn no_such_method(method: &http::Method, path: &str) -> Self {
        let detail = format!("{path} does not accept {method}.");
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "no-such-method",
            "The path does not accept this method",
            detail,
        )
    }

    /// The store is not a directory of this sidecar.
    pub(super) fn no_backup() -> Self {
        let detail = "Only the embedded store is copied by its sidecar. Use the tools of the server on which the records are \
                      (docs/guides/backups.md). A store in memory has no copy.";
        Self::new(StatusCode::NOT_IMPLEMENTED, "no-backup", "The store is not copied by its sidecar", detail)
    }

    /// The store has no log of this sidecar.
    pub(super) fn no_log() -> Self {
        let detail = "Only the log of an embedded store is compacted by its sidecar. On PostgreSQL use VACUUM, on Redis BGREWRITEAOF. A \
                      store in memory keeps no older versions.";
        Self::new(StatusCode::NOT_IMPLEMENTED, "no-log", "The store is not compacted by its sidecar", detail)
    }

    /// There is no record with this identifier.
    pub(super) fn no_record(id: RecordId) -> Self {
        let detail = "There was no request with this key, or its retention is over.";
        let problem = Self::new(StatusCode::NOT_FOUND, "no-record", "There is no such record", detail);
        Self { record: Some(id), ..problem }
    }

    /// Requests like this are refused before they get a record.
    pub(super) fn no_record_of_such(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "no-record", "There is no such record", detail)
    }

    /// No record begins like this.
    pub(super) fn no_record_like(text: &str) -> Self {
        let detail = format!("No record begins with {text}, or its retention is over.");
        Self::new(StatusCode::NOT_FOUND, "no-record", "There is no such record", detail)
    }

    /// Several records begin with this text.
    pub(super) fn ambiguous(text: &str, candidates: &[RecordId]) -> Self {
        let names: Vec<_> = candidates.iter().map(RecordId::to_string).collect();
        let detail = format!("Several records begin with {text}: {}. Give more digits.", names.join(", "));
        Self::new(StatusCode::CONFLICT, "ambiguous-record", "The record is ambiguous", detail)
    }

    /// The record exists, but its state does not allow this.
    pub(super) fn not_resolvable(id: RecordId, detail: impl Into<String>) -> Self {
        let problem = Self::new(
            StatusCode::CONFLICT,
            "not-resolvable",
            "The state of the record does not allow this",
            detail,
        );
        Self { record: Some(id), ..problem }
    }

    /// The mark of the store's id secret does not allow this.
    pub(super) fn mark_not_restored(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, "mark-not-restored", "The mark was not put back", detail)
    }

    /// The store failed to execute a command.
    pub(super) fn store(error: &StoreError) -> Self {
        let words = ErrorChain(error).to_string();
        match error.kind() {
            StoreErrorKind::Corrupt => Self::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "record-corrupt",
                "The record cannot be read",
                format!(
                    "{words}. While the record exists, requests with its key are refused and never executed. See \
                     docs/reference/admin.md, \"A record that cannot be read\", for how to examine it and free the key."
                ),
            ),
            StoreErrorKind::Unavailable => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "store-unavailable",
                "The store is out of reach",
                format!(
                    "{words}. If this request was meant to change a record, it is not known whether it did: check before you retry."
                ),
            ),
            StoreErrorKind::Locked => Self::new(
                StatusCode::CONFLICT,
                "record-locked",
                "A transaction holds the record",
                format!("{words}. Nothing was changed: try again when the transaction has ended."),
            ),
            StoreErrorKind::Sealed => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "record-sealed",
                "The record cannot be opened",
                format!(
                    "{words}. Nothing was changed. Requests with its key are refused and never executed."
                ),
            ),
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, "store-invalid", "The store refused", words),
        }
    }

    /// The store failed to answer a query, which changes nothing.
    pub(super) fn store_read(error: &StoreError) -> Self {
        let problem = Self::store(error);
        match error.kind() {
            StoreErrorKind::Unavailable => {
                Self { detail: format!("{}. Nothing was changed.", ErrorChain(error)), ..problem }
            }
            _ => problem,
        }
    }

    /// The sidecar computes other ids and tags than those in the store.
    pub(super) fn id_secret(problem: &IdProblem) -> Self {
        let detail = format!(
            "{problem}. This sidecar computes other ids and tags than those in the store, so it cannot tell if a key was used. Ask a \
             sidecar with the id secret of the store."
        );
        Self::new(StatusCode::CONFLICT, "id-secret", "The store belongs to another id secret", detail)
    }

    /// The store of the sidecar is not on PostgreSQL.
    pub(super) fn no_messages() -> Self {
        let detail = "Dead letters and the outbox are in PostgreSQL, and the store of this sidecar is not. Use `oncegate dead-letters \
                      --url URL` or `oncegate outbox --url URL` with the database of the messages.";
        Self::new(StatusCode::NOT_FOUND, "no-messages", "The store of this sidecar has no messages", detail)
    }

    /// There is no such dead letter, or no such message in the outbox.
    pub(super) fn no_message(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "no-message", "There is no such message", detail)
    }

    /// The message exists, but its state does not allow this.
    pub(super) fn message_refused(detail: impl Into<String>) -> Self {
        Self::new(
            StatusCode::CONFLICT,
            "message-refused",
            "The state of the message does not allow this",
            detail,
        )
    }

    pub(super) fn message_locked(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, "message-locked", "A transaction holds the message", detail)
    }

    /// The database of messages failed. `result` says what became of the request.
    pub(super) fn message_store(error: &StoreError, result: &str) -> Self {
        let words = ErrorChain(error).to_string();
        match error.kind() {
            StoreErrorKind::Unavailable => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "store-unavailable",
                "The store is out of reach",
                format!("{words}. {result}"),
            ),
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, "store-invalid", "The store refused", words),
        }
    }

    /// A limit of the admin API is reached at the moment.
    pub(super) fn busy(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "busy", "The admin API is at its limit", detail)
    }

    /// The configuration does not allow this.
    pub(super) fn switched_off(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "switched-off", "The configuration does not allow this", detail)
    }

    pub(super) fn internal(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "The admin API failed", detail)
    }
}

impl Problem {
    pub(super) const fn status(&self) -> StatusCode {
        self.status
    }

    pub(super) const fn slug(&self) -> &'static str {
        self.slug
    }

    pub(super) const fn title(&self) -> &'static str {
        self.title
    }

    pub(super) fn detail(&self) -> &str {
        &self.detail
    }

    /// The invalid member or parameter of the request, with which the detail begins. Programs replace it by their own name.
    fn parameter(&self) -> Option<&str> {
        let (name, _) = self.detail.split_once(": ")?;
        let is_name = !name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
        (is_name && self.status == StatusCode::BAD_REQUEST).then_some(name)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut body = json!({
            "type": format!("urn:oncegate:problem:{}", self.slug),
            "title": self.title,
            "status": self.status.as_u16(),
            "detail": self.detail,
        });
        if let Value::Object(members) = &mut body {
            if let Some(id) = self.record {
                members.insert("record".to_owned(), id.to_string().into());
            }
            if let Some(CallerForm { form, parts }) = self.caller.as_deref() {
                members.insert("caller".to_owned(), json!({"form": form, "parts": parts}));
            }
            if let Some(parameter) = self.parameter() {
                members.insert("parameter".to_owned(), parameter.into());
            }
        }
        let mut response = (self.status, body.to_string()).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_detail_of_a_store_error_has_its_causes() {
        let error = StoreError::corrupt("the record cannot be read").with_source("its checksum is wrong");
        let problem = Problem::store(&error);
        let start = "the record cannot be read: its checksum is wrong. While the record exists, requests with its key are refused";
        assert!(problem.detail.starts_with(start), "{}", problem.detail);
    }

    #[test]
    fn a_failed_query_changes_nothing() {
        let away = StoreError::unavailable("it is away");
        assert_eq!(Problem::store_read(&away).detail, "it is away. Nothing was changed.");
        assert!(Problem::store(&away).detail.contains("it is not known whether it did"));
        let corrupt = StoreError::corrupt("it is torn");
        assert_eq!(Problem::store_read(&corrupt).detail, Problem::store(&corrupt).detail);
    }
}
