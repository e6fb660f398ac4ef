//! Pages whose records are being counted. They load themselves again until the survey of the store has ended.
//!
//! With JavaScript, htmx asks again and replaces the part `live` of the page. While the survey runs, it gets 204, which changes
//! nothing on the page. Without JavaScript, the browser loads the page again after a second.

use axum::response::{IntoResponse as _, Response};
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{StatusCode, Uri};

use super::redirect;
use crate::admin::surveys::Ticket;

/// The parameter with the ticket of a page that waits.
pub(super) const ASKED: &str = "asked";

/// The note on a page that its records are being counted.
pub(super) struct WaitNote {
    pub(super) title: &'static str,
    /// The address of the page with its ticket.
    pub(super) address: String,
}

impl WaitNote {
    pub(super) fn new(title: &'static str, address: &str, ticket: Ticket) -> Self {
        Self { title, address: with_ticket(address, ticket) }
    }
}

/// The address of a page with its ticket.
pub(super) fn with_ticket(address: &str, ticket: Ticket) -> String {
    let separator = if address.contains('?') { '&' } else { '?' };
    format!("{address}{separator}{ASKED}={ticket}")
}

/// The address of a page without its ticket.
pub(super) fn without_ticket(address: &Uri) -> String {
    let pairs = address.query().unwrap_or_default().split('&');
    let others = pairs.filter(|pair| !pair.is_empty() && pair.split('=').next() != Some(ASKED));
    let query: Vec<_> = others.collect();
    if query.is_empty() {
        address.path().to_owned()
    } else {
        format!("{}?{}", address.path(), query.join("&"))
    }
}

/// True if htmx asks for a part of a page.
fn is_part(headers: &HeaderMap) -> bool {
    headers.contains_key("hx-request")
}

/// The response for a page that waits already, if it only has to go on.
pub(super) fn still_waiting(headers: &HeaderMap, ticket: Option<Ticket>) -> Option<Response> {
    (is_part(headers) && ticket.is_some()).then(|| StatusCode::NO_CONTENT.into_response())
}

/// Sends the browser to another page, also if htmx asked for a part of this one.
pub(super) fn redirect_page(headers: &HeaderMap, to: &str) -> Response {
    match HeaderValue::from_str(to) {
        Ok(to) if is_part(headers) => {
            (StatusCode::OK, [(HeaderName::from_static("hx-redirect"), to)]).into_response()
        }
        _ => redirect(to),
    }
}
