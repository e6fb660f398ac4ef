//! Requests that look like mistakes of clients.

use askama::Template;
use axum::extract::{Extension, State};
use axum::response::Response;

use super::access::Access;
use super::format::{number, query_text, second};
use super::{Frame, Section, page};
use crate::activity::MisuseKind;
use crate::admin::keys::is_shadow;
use crate::admin::{AdminState, view};

#[derive(Template)]
#[template(path = "misuse.html")]
struct MisusePage {
    frame: Frame,
    since: String,
    kinds: Vec<KindColumn>,
    rows: Vec<MisuseLine>,
    has_shadow: bool,
}

/// A kind of misuse: its name, its meaning, and the advice for the client.
struct KindColumn {
    name: &'static str,
    meaning: &'static str,
}

struct MisuseLine {
    caller: String,
    operation: String,
    counts: Vec<String>,
    last: String,
    /// The records of this caller and operation.
    keys: String,
}

const fn meaning(kind: MisuseKind) -> &'static str {
    match kind {
        MisuseKind::Mismatch => {
            "a key was used for another request: the client makes one key for several intents"
        }
        MisuseKind::KeyInvalid => "the key is malformed, or in the request twice",
        MisuseKind::KeyMissing => "the route requires a key, and there is none",
        MisuseKind::TightLoop => {
            "30 requests with one key in ten seconds: the client retries without a pause"
        }
        MisuseKind::RateLimited => "a rate limit was exceeded",
    }
}

pub(super) async fn show(State(state): State<AdminState>, Extension(access): Extension<Access>) -> Response {
    let rows = state.activity.misuses().into_iter().map(|row| {
        let caller = row.caller.map(|caller| caller.to_string()).unwrap_or_default();
        let mut keys = format!("/keys?operation={}", query_text(&row.operation));
        if !caller.is_empty() {
            keys.push_str("&caller=");
            keys.push_str(&caller);
        }
        MisuseLine {
            caller,
            counts: row
                .counts
                .iter()
                .map(|count| if *count == 0 { String::new() } else { number(*count) })
                .collect(),
            last: second(&view::time(row.last)),
            operation: row.operation.into(),
            keys,
        }
    });
    let rows: Vec<_> = rows.collect();
    let kinds = MisuseKind::ALL.map(|kind| KindColumn { name: kind.as_str(), meaning: meaning(kind) });
    page(&MisusePage {
        since: second(&view::time(state.activity.started_at())),
        has_shadow: rows.iter().any(|row| is_shadow(&row.operation)),
        rows,
        kinds: kinds.into(),
        frame: Frame::new(&state, &access, Section::Misuse, "Misuse"),
    })
}
