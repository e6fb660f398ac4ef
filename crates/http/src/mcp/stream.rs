//! The stream of events that answers a call of a tool.
//!
//! Its events reach the client as they arrive. Only the response waits until it is stored, so that no client knows a result that
//! a retry would not get.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue};
use http::response::Parts;
use http::{Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use oncegate_core::{Completion, ErrorChain};
use oncegate_engine::{PanicError, catch_panic};
use tokio::sync::mpsc;

use super::call::{CallOutcome, ToolCall};
use super::events::{Event, EventBuffer, event_of};
use crate::body::{BoxError, ResponseBody, StreamedBody, next_frame};
use crate::budget::{Budget, BudgetReservation, TIED_RESPONSE, tie};
use crate::context::StoreDirective;
use crate::execute::{Execution, ExecutionEnd, ResponseTreatment, conclude, fate_of_call, marked, pump};
use crate::service::Executed;
use crate::settings::Settings;

/// The number of events by which a client may lag behind the service.
const EVENTS: usize = 4;

type Events = mpsc::Sender<Result<Frame<Bytes>, BoxError>>;

impl Execution {
    /// Passes on the events of the service until they have the response to this call. Then settles the record, and passes on the
    /// response and the rest. A client that leaves does not stop it.
    pub(crate) fn stream_call<RB, E>(
        self,
        (call, directive): (ToolCall, Option<StoreDirective>),
        mut parts: Parts,
        body: RB,
    ) -> ExecutionEnd<RB, E>
    where
        RB: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
    {
        let (sender, frames) = mpsc::channel(EVENTS);
        let is_cut = Arc::new(AtomicBool::new(false));
        let pumped = StreamedBody { frames, size: SizeHint::default(), is_cut: is_cut.clone(), ahead: None };
        parts.headers.remove(CONTENT_LENGTH);
        let (status, headers) = (parts.status, parts.headers.clone());
        let timeout = self.settings.stream_timeout;
        let budget = self.response_budget.clone();
        let client = Client { events: Some(sender), timeout, is_cut };
        let stream = CallStream { execution: self, call, directive, head: (status, headers), client, budget };
        let response = marked(parts, ResponseBody::pumped(pumped), None);
        ExecutionEnd {
            result: Ok(Executed::Response(response)),
            rest: Some(Box::pin(stream.run(Box::pin(body)))),
        }
    }
}

/// The client of a stream.
struct Client {
    /// `None` if it has left, or has taken nothing for too long.
    events: Option<Events>,
    timeout: Duration,
    is_cut: Arc<AtomicBool>,
}

impl Client {
    async fn send(&mut self, data: Bytes) {
        let Some(events) = self.events.as_ref().filter(|_| !data.is_empty()) else { return };
        match tokio::time::timeout(self.timeout, events.send(Ok(Frame::data(data)))).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => self.events = None,
            Err(_) => {
                self.is_cut.store(true, Ordering::Release);
                self.events = None;
            }
        }
    }
}

/// A stream of events whose response has not arrived.
struct CallStream {
    execution: Execution,
    call: ToolCall,
    /// The decision of the service about its response, whatever that is: to keep it, or to free the key after it.
    directive: Option<StoreDirective>,
    head: (StatusCode, HeaderMap),
    client: Client,
    budget: Arc<Budget>,
}

impl CallStream {
    async fn run<RB>(mut self, mut body: Pin<Box<RB>>)
    where
        RB: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
    {
        let mut buffer = EventBuffer::default();
        let limit = self.execution.settings.max_response_body;
        let mut can_resume = false;
        let why = loop {
            while let Some(event) = buffer.next() {
                let Event { data, has_id } = Event::read(&event);
                can_resume |= has_id;
                let response = data.and_then(|data| self.call.find_response(&data, self.head.0));
                if response.is_some() {
                    return self.settle(response, event, buffer.take_rest(), body).await;
                }
                // Events that wait for a slow client count as well, if they are large.
                let mut waiting = BudgetReservation::nothing(self.budget.clone());
                waiting.add_always(event.len());
                self.client.send(tie(event, waiting, TIED_RESPONSE).0).await;
            }
            // An event this long cannot be stored if it is the response, and it may be.
            if buffer.len() > limit {
                return self.settle(None, Bytes::new(), buffer.take_rest(), body).await;
            }
            let mut held = BudgetReservation::nothing(self.budget.clone());
            held.add_always(buffer.len());
            match catch_panic(next_frame(&mut body)).await {
                Ok(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data() {
                        held.add_always(data.len());
                        buffer.push(&data);
                    }
                }
                Ok(Some(Err(error))) => {
                    let record = self.execution.permit.attempt().record_id();
                    tracing::warn!(%record, error = %ErrorChain(&*error), "stream of events broke off");
                    break "the stream of events broke off before the response to the call";
                }
                Ok(None) => break "the stream of events ended before the response to the call",
                Err(PanicError) => break "the handler panicked",
            }
        };
        self.fail::<RB>(why, can_resume).await;
    }

    /// Settles the record with the response in this event, or without one if it is too large. Then passes on the event, what came
    /// after it, and the rest of the body.
    async fn settle<RB>(
        self,
        response: Option<(CallOutcome, String)>,
        event: Bytes,
        after: Bytes,
        body: Pin<Box<RB>>,
    ) where
        RB: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
    {
        let Self { execution, call, directive, head: (status, headers), mut client, .. } = self;
        let settings = execution.settings;
        let (fate, completion, is_success) = match response {
            None => (ResponseTreatment::Tombstone, Completion::Tombstone, status.is_success()),
            Some((outcome, message)) => {
                let stored = stored_message(&settings, status, headers, message)
                    .await
                    .map_or(Completion::Tombstone, Completion::Replayable);
                let fate = match directive {
                    Some(StoreDirective::Release) => ResponseTreatment::Release,
                    Some(_) => ResponseTreatment::Replay,
                    None => fate_of_call(&settings, outcome),
                };
                (fate, stored, outcome == CallOutcome::Complete)
            }
        };
        let settled = conclude(&settings, execution.permit, fate, completion, is_success).await;
        drop(execution.running);
        // The response that the operation stored itself counts instead of the service's.
        let own = settled.own.and_then(|own| call.replayed(own.as_body()));
        client.send(own.map_or(event, |own| event_of(&own))).await;
        client.send(after).await;
        pump(body, client.events, client.is_cut, settings.stream_timeout).await;
    }

    /// Ends a call whose response did not arrive. The client gets the refusal as its response, unless it can resume the stream.
    async fn fail<RB>(self, why: &'static str, can_resume: bool) {
        let Self { execution, call, mut client, .. } = self;
        let settings = execution.settings.clone();
        let message = match execution.fail::<RB>(None, why).await {
            Executed::Refused(refusal) => {
                refusal.with_message_id(call.id.clone()).into_response(&settings, None).into_body()
            }
            Executed::Recorded(stored, _) => match call.replayed(stored.as_body()) {
                Some(message) => message.into(),
                None => return,
            },
            Executed::Response(_) => return,
        };
        if !can_resume {
            client.send(event_of(&message)).await;
        }
    }
}

/// A response in a stream, as a record keeps it: as the only message of a response without a stream.
async fn stored_message(
    settings: &Settings,
    status: StatusCode,
    headers: HeaderMap,
    message: String,
) -> Option<oncegate_core::StoredResponse> {
    let mut head = Response::new(());
    *head.status_mut() = status;
    *head.headers_mut() = headers;
    head.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    settings.stored_response_off_thread(&head.into_parts().0, &[message.into()], None).await
}
