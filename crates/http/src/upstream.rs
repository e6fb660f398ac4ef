//! The end of an operation that completes its record itself, in the transaction that holds its effect
//! ([`Settings::with_upstream_completion`](crate::Settings::with_upstream_completion)).
//!
//! The record shows what was committed. If it has a response, the client gets that response instead of the handler's.

use http::StatusCode;
use http::header::{CONTENT_LENGTH, TRAILER};
use http::response::Parts;
use oncegate_core::{Completion, StoredResponse};
use oncegate_engine::{OperationReport, Permit, ReportOutcome};

use crate::body::ResponseBody;
use crate::budget::BudgetReservation;
use crate::execute::{Execution, FENCED, NOT_STORED, ResponseTreatment, Settled, marked};
use crate::headers::restore;
use crate::missing_response::awaited;
use crate::refusal::{Condition, Refusal};
use crate::service::Executed;
use crate::settings::Settings;

/// Reports the treatment of a response. The record shows what the operation's transaction has committed.
pub(crate) async fn report(
    settings: &Settings,
    permit: Permit,
    fate: ResponseTreatment,
    completion: Completion,
    success: bool,
) -> Settled {
    let decides = !matches!(fate, ResponseTreatment::Release | ResponseTreatment::Unknown);
    let report = match decides {
        true => OperationReport::Response { completion, success, form: settings.stored_form() },
        false => OperationReport::NoResponse,
    };
    match permit.report(report).await {
        ReportOutcome::Recorded(own) => Settled { own: Some(own), status: None },
        ReportOutcome::Fenced => Settled { own: None, status: Some(FENCED) },
        ReportOutcome::Deferred(_) if decides => Settled { own: None, status: Some(NOT_STORED) },
        _ => Settled { own: None, status: None },
    }
}

impl Execution {
    /// Ends an execution whose handler ended without a response. The record shows whether its transaction has committed, so
    /// the outcome is never left unknown.
    pub(crate) async fn fail_upstream<RB>(self, status: Option<StatusCode>) -> Executed<RB> {
        let refusal = match self.permit.report(OperationReport::NoResponse).await {
            ReportOutcome::Recorded(own) => return Executed::Recorded(own, None),
            ReportOutcome::Stored | ReportOutcome::Unreplayable => Refusal::new(Condition::ReplayUnavailable),
            // A retry asks the service for the response.
            ReportOutcome::Awaited => awaited().with_status(status),
            ReportOutcome::Released => Refusal::new(Condition::HandlerFailed).with_status(status),
            // Its transaction is still open, or another attempt executes: a retry gets the outcome.
            _ => Refusal::new(Condition::RequestInProgress).with_status(status).with_retry_after(1),
        };
        Executed::Refused(refusal)
    }
}

/// The response of the record, instead of the handler's. Fields that a record never keeps (cookies, request ids) stay.
pub(crate) fn instead<RB>(
    settings: &Settings,
    mut parts: Parts,
    own: &StoredResponse,
    mut held: BudgetReservation,
) -> Executed<RB> {
    let Ok(status) = StatusCode::from_u16(own.status()) else {
        return Executed::Refused(Refusal::new(Condition::RecordCorrupt));
    };
    parts.status = status;
    let names: Vec<_> = parts.headers.keys().filter(|name| settings.kept.keeps(name)).cloned().collect();
    for name in names.into_iter().chain([CONTENT_LENGTH, TRAILER]) {
        parts.headers.remove(name);
    }
    let fields = restore(own.headers());
    for name in fields.keys() {
        parts.headers.remove(name);
    }
    parts.headers.extend(fields);
    let trailers = Some(restore(own.trailers())).filter(|trailers| !trailers.is_empty());
    for name in trailers.iter().flat_map(|trailers| trailers.keys()) {
        parts.headers.append(TRAILER, name.clone().into());
    }
    let body = own.body();
    held.add_always(body.len());
    Executed::Response(marked(parts, ResponseBody::whole(body, trailers, held), None))
}
