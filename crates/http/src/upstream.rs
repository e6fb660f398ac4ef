//! The end of an operation that completes its record itself, in the transaction that holds its effect
//! ([`Settings::with_upstream_completion`](crate::Settings::with_upstream_completion)).
//!
//! The record shows what was committed. If it has an answer, the client gets that answer instead of the handler's.

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, TRAILER};
use http::response::Parts;
use http::{Response, StatusCode};
use http_body::Body;
use oncegate_core::{Completion, ErrorChain, StoredResponse};
use oncegate_engine::{OperationReport, PanicError, ReportOutcome, catch_panic};

use crate::body::{BoxError, Read, ResponseBody, join, read_up_to};
use crate::budget::BudgetReservation;
use crate::context::{LeaseExpired, NoUpstreamResponse, UpstreamResponse};
use crate::execute::{
    Execution, ExecutionEnd, FENCED, NOT_STORED, ResponseTreatment, cannot_be_stored, charging, marked,
    stream, take_directive,
};
use crate::headers::{kept_trailers, restore};
use crate::missing_response::awaited;
use crate::refusal::{Condition, Refusal};
use crate::service::{Executed, take_status};
use crate::settings::Settings;

impl Execution {
    /// Ends an execution whose handler answered.
    pub(crate) async fn finish_upstream<RB, E>(self, mut response: Response<RB>) -> ExecutionEnd<RB, E>
    where
        RB: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
    {
        if let Some(NoUpstreamResponse(status)) = response.extensions_mut().remove() {
            return ExecutionEnd::with(self.fail_upstream(Some(status)).await);
        }
        if response.extensions_mut().remove::<LeaseExpired>().is_some() {
            return ExecutionEnd::with(self.not_begun().await);
        }
        let directive = take_directive(&mut response);
        take_status(&mut response);
        let fate = self.fate(&response, directive);
        let (parts, body) = response.into_parts();
        let settings = self.settings.clone();
        let mut held = BudgetReservation::nothing(self.response_budget.clone());
        let answer =
            |completion| OperationReport::Response { completion, success: parts.status.is_success() };
        if fate != ResponseTreatment::Replay || cannot_be_stored(&parts) {
            let nothing = matches!(fate, ResponseTreatment::Release | ResponseTreatment::Unknown);
            let said = if nothing { OperationReport::NoResponse } else { answer(Completion::Tombstone) };
            let outcome = self.permit.report(said).await;
            let status = status_of(&outcome).filter(|status| !nothing || *status == FENCED);
            return match outcome {
                ReportOutcome::Recorded(own) => ExecutionEnd::with(instead(&settings, parts, &own, held)),
                // Without a body, as the handler sent it: a gRPC client reads the status of its call in the head then.
                _ if body.is_end_stream() => {
                    let body = ResponseBody::own(Bytes::new());
                    ExecutionEnd::with(Executed::Response(marked(parts, body, status)))
                }
                _ => stream(&settings, parts, (Vec::new(), held), Box::pin(body), status),
            };
        }
        match catch_panic(read_up_to(body, settings.max_response_body, charging(&mut held))).await {
            Ok(Read::Whole { chunks, trailers }) => {
                let stored = StoredResponse::new(
                    parts.status.as_u16(),
                    &settings.kept.of(&parts.headers),
                    &chunks,
                    &kept_trailers(trailers.as_ref()),
                );
                let said = answer(stored.map_or(Completion::Tombstone, Completion::Replayable));
                let outcome = self.permit.report(said).await;
                let status = status_of(&outcome);
                ExecutionEnd::with(match outcome {
                    ReportOutcome::Recorded(own) => instead(&settings, parts, &own, held),
                    _ => {
                        let body = ResponseBody::whole(join(chunks), trailers, held);
                        Executed::Response(marked(parts, body, status))
                    }
                })
            }
            Ok(Read::More { chunks, rest }) => {
                let outcome = self.permit.report(answer(Completion::Tombstone)).await;
                let status = status_of(&outcome);
                match outcome {
                    ReportOutcome::Recorded(own) => ExecutionEnd::with(instead(&settings, parts, &own, held)),
                    _ => stream(&settings, parts, (chunks, held), rest, status),
                }
            }
            Ok(Read::Broken(error)) => {
                let record = self.permit.attempt().record_id();
                tracing::warn!(%record, error = %ErrorChain(&*error), "response body broke off");
                let status = parts.extensions.get::<UpstreamResponse>().map(|_| StatusCode::BAD_GATEWAY);
                ExecutionEnd::with(self.fail_upstream(status).await)
            }
            Err(PanicError) => ExecutionEnd::with(self.fail_upstream(None).await),
        }
    }

    /// Ends an execution whose handler ended without an answer. The record shows whether its transaction has committed, so
    /// the outcome is never left unknown.
    pub(crate) async fn fail_upstream<RB>(self, status: Option<StatusCode>) -> Executed<RB> {
        let refusal = match self.permit.report(OperationReport::NoResponse).await {
            ReportOutcome::Recorded(own) => return Executed::Recorded(own, None),
            ReportOutcome::Stored | ReportOutcome::Unreplayable => Refusal::new(Condition::ReplayUnavailable),
            // A retry asks the service for the answer.
            ReportOutcome::Awaited => awaited().with_status(status),
            ReportOutcome::Released => Refusal::new(Condition::HandlerFailed).with_status(status),
            // Its transaction is still open, or another attempt executes: a retry gets the outcome.
            _ => Refusal::new(Condition::RequestInProgress).with_status(status).with_retry_after(1),
        };
        Executed::Refused(refusal)
    }
}

/// The response of the record, instead of the handler's. Fields that a record never keeps (cookies, request ids) stay.
fn instead<RB>(
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

/// The `Idempotency-Status` of a response that the record does not have.
const fn status_of(outcome: &ReportOutcome) -> Option<&'static str> {
    match outcome {
        ReportOutcome::Fenced => Some(FENCED),
        ReportOutcome::Deferred(_) => Some(NOT_STORED),
        _ => None,
    }
}
