//! Changes by operators, and the stored responses that they looked at.

use askama::Template;
use axum::extract::{Extension, State};

use super::access::Access;
use super::format::second;
use super::{Frame, PageResult, Section, page};
use crate::admin::keys::{Pairs, audit_page};
use crate::admin::{AdminState, view};

#[derive(Template)]
#[template(path = "audit.html")]
struct AuditTrailPage {
    frame: Frame,
    entries: Vec<AuditLine>,
    next_page: Option<String>,
    reveals: Vec<RevealLine>,
    since: String,
}

struct AuditLine {
    at: String,
    record: String,
    from: &'static str,
    to: &'static str,
    actor: String,
    reason: String,
}

struct RevealLine {
    at: String,
    record: String,
    actor: String,
    reason: String,
}

pub(super) async fn show(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    query: Pairs,
) -> PageResult {
    let audit = audit_page(&state, query).await?;
    let entries = audit.entries.into_iter().map(|entry| AuditLine {
        at: second(&view::time(entry.at)),
        record: entry.id.to_string(),
        from: entry.from.as_str(),
        to: entry.to.as_str(),
        actor: entry.actor,
        reason: entry.reason,
    });
    let reveals = state.dashboard.reveals().into_iter().map(|reveal| RevealLine {
        at: second(&view::time(reveal.at)),
        record: reveal.record.to_string(),
        actor: reveal.actor,
        reason: reveal.reason,
    });
    Ok(page(&AuditTrailPage {
        frame: Frame::new(&state, &access, Section::Audit, "Audit"),
        entries: entries.collect(),
        next_page: audit.next.map(|next| format!("/audit?before={next}")),
        reveals: reveals.collect(),
        since: second(&view::time(state.activity.started_at())),
    }))
}
