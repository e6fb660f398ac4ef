//! Changes of records and of messages by operators, and the stored responses and messages that they looked at.

use askama::Template;
use axum::extract::{Extension, Query, State};

use super::access::Access;
use super::format::second;
use super::{Frame, PageResult, RevealedPart, Section, page};
use crate::admin::keys::{Pairs, audit_page};
use crate::admin::messages::{MessageAudit, MessageKind, number};
use crate::admin::problem::Problem;
use crate::admin::{AdminState, view};
use crate::keys::print::printable;

/// The changes of messages on a page.
const MESSAGES: usize = 50;

/// The parameter with the place of the last change of a message on the page before.
const MESSAGES_BEFORE: &str = "messages_before";

#[derive(Template)]
#[template(path = "audit.html")]
struct AuditTrailPage {
    frame: Frame,
    entries: Vec<AuditLine>,
    next_page: Option<String>,
    /// The changes of messages; `None` if the store is not on PostgreSQL.
    messages: Option<MessageTrail>,
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

struct MessageTrail {
    entries: Vec<MessageLine>,
    next_page: Option<String>,
    /// The reason why the trail cannot be read.
    error: String,
}

struct MessageLine {
    at: String,
    subject: String,
    action: String,
    topic: String,
    actor: String,
    reason: String,
}

struct RevealLine {
    at: String,
    href: String,
    subject: String,
    is_record: bool,
    actor: String,
    reason: String,
}

/// Takes a parameter out of a query.
fn take(query: Pairs, name: &str) -> (Pairs, Option<String>) {
    let Ok(Query(mut pairs)) = query else { return (query, None) };
    let place = pairs.iter().position(|(own, _)| own == name);
    let taken = place.map(|place| pairs.remove(place).1);
    (Ok(Query(pairs)), taken)
}

/// The changes of messages. A database without the rights for them does not keep the rest of the page away.
async fn message_trail(state: &AdminState, before: Option<u64>) -> Option<MessageTrail> {
    let operator = state.messages.as_ref()?;
    let audit = match MessageAudit::read(operator, before, MESSAGES).await {
        Ok(audit) => audit,
        Err(failure) => {
            let error = Problem::from(failure).detail().to_owned();
            return Some(MessageTrail { entries: Vec::new(), next_page: None, error });
        }
    };
    let entries = audit.entries.iter().map(|entry| {
        let consumer =
            entry.consumer.as_deref().map(|consumer| format!(" of {}", printable(consumer, false)));
        let (kind, number) = (entry.kind.as_str(), entry.message);
        MessageLine {
            at: second(&view::time(entry.at)),
            subject: match kind {
                "outbox" => format!("message {number} of the outbox"),
                _ => format!("dead letter {number}{}", consumer.unwrap_or_default()),
            },
            action: printable(&entry.action, false),
            topic: printable(&entry.topic, false),
            actor: printable(&entry.actor, false),
            reason: printable(&entry.reason, false),
        }
    });
    Some(MessageTrail {
        entries: entries.collect(),
        next_page: audit.next.map(|next| format!("/audit?{MESSAGES_BEFORE}={next}#messages")),
        error: String::new(),
    })
}

pub(super) async fn show(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    query: Pairs,
) -> PageResult {
    let (query, before) = take(query, MESSAGES_BEFORE);
    let before = before.map(|text| number(MESSAGES_BEFORE, &text)).transpose()?;
    let audit = audit_page(&state, query).await?;
    let entries = audit.entries.into_iter().map(|entry| AuditLine {
        at: second(&view::time(entry.at)),
        record: entry.id.to_string(),
        from: entry.from.as_str(),
        to: entry.to.as_str(),
        actor: entry.actor,
        reason: entry.reason,
    });
    let reveals = state.dashboard.reveals().into_iter().map(|reveal| {
        let (href, subject, is_record) = match reveal.part {
            RevealedPart::Record(id) => (format!("/keys/{id}"), id.to_string(), true),
            RevealedPart::Message(kind, number) => {
                let subject = match kind {
                    MessageKind::DeadLetter => format!("dead letter {number}"),
                    MessageKind::Outbox => format!("message {number} of the outbox"),
                };
                (format!("/{}/{number}", kind.path()), subject, false)
            }
        };
        let at = second(&view::time(reveal.at));
        RevealLine { at, href, subject, is_record, actor: reveal.actor, reason: reveal.reason }
    });
    Ok(page(&AuditTrailPage {
        frame: Frame::new(&state, &access, Section::Audit, "Audit"),
        entries: entries.collect(),
        next_page: audit.next.map(|next| format!("/audit?before={next}")),
        messages: message_trail(&state, before).await,
        reveals: reveals.collect(),
        since: second(&view::time(state.activity.started_at())),
    }))
}
