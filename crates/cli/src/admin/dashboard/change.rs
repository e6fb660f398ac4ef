//! Changes of a record by an operator: a form, a preview of what clients get then, and the change.
//!
//! The preview changes nothing. The confirmation carries the version of the record that the operator saw, and is refused if the
//! record has changed since.

use askama::Template;
use axum::extract::{Extension, Path, State};
use axum::response::Response;
use bytes::Bytes;
use http::StatusCode;
use oncegate_core::{Record, RecordId, Resolution, StateName};
use oncegate_http::Condition;

use super::access::{Access, FormFields};
use super::record::{refusal, replay_status};
use super::{Frame, PageResult, Section, page_with, redirect};
use crate::admin::keys::{Verdict, is_shadow, read_existing, settings_of, settle, stored_response, why_not};
use crate::admin::problem::Problem;
use crate::admin::view::{BodyView, Detail, RecordView, ResponseView};
use crate::admin::{AdminState, listing};

/// A change that an operator can make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// It took effect, and retries get a response that the operator gives.
    Respond,
    /// It took effect, and its response is lost.
    Done,
    /// It did not take effect, and the key is free.
    Free,
    /// The outcome is unknown, and nothing executes.
    Park,
}

impl Action {
    const ALL: [Self; 4] = [Self::Respond, Self::Done, Self::Free, Self::Park];

    pub(super) const fn slug(self) -> &'static str {
        match self {
            Self::Respond => "respond",
            Self::Done => "done",
            Self::Free => "free",
            Self::Park => "park",
        }
    }

    pub(super) fn named(slug: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.slug() == slug)
    }

    /// The changes that the state of the record allows.
    pub(super) fn allowed(view: &RecordView) -> Vec<Self> {
        match (view.state, view.by_operator) {
            _ if is_shadow(&view.operation) => Vec::new(),
            ("unknown" | "abandoned", _) => vec![Self::Respond, Self::Done, Self::Free],
            ("completed" | "tombstone", true) => Self::ALL.to_vec(),
            ("released", true) => vec![Self::Respond, Self::Done, Self::Park],
            ("released", false) => vec![Self::Park],
            ("in-progress", _) => vec![Self::Free],
            _ => Vec::new(),
        }
    }

    pub(super) fn label(self, view: &RecordView) -> &'static str {
        match self {
            Self::Free if view.state == "in-progress" => "Free the key by force",
            Self::Respond => "It happened: give a response",
            Self::Done => "It happened: the response is lost",
            Self::Free => "It did not happen: free the key",
            Self::Park => "Block the key",
        }
    }

    pub(super) fn note(self, view: &RecordView) -> &'static str {
        match self {
            Self::Free if view.state == "in-progress" => "Only if its owner is gone for certain.",
            Self::Respond => "Retries get the response that you enter.",
            Self::Done => "Retries are told that it is done. Nothing executes.",
            Self::Free => "The next request with the key executes.",
            Self::Park => "Nothing executes until an operator resolves it.",
        }
    }

    pub(super) fn is_danger(self, view: &RecordView) -> bool {
        self == Self::Free && (view.state == "in-progress" || view.state != "released" && view.by_operator)
    }

    /// The words on the page of the record after the change.
    pub(super) const fn notice(self) -> &'static str {
        match self {
            Self::Respond => "Done: retries with this key get the response that you gave.",
            Self::Done => "Done: retries with this key are told that it took effect.",
            Self::Free => "Done: the next request with this key executes.",
            Self::Park => "Done: nothing executes under this key until it is resolved.",
        }
    }
}

/// The stages of a change.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Form,
    Preview,
}

#[derive(Template)]
#[template(path = "change.html")]
struct ChangePage {
    frame: Frame,
    stage: Stage,
    record: String,
    operation: String,
    from: &'static str,
    to: &'static str,
    action: Action,
    label: &'static str,
    note: &'static str,
    is_danger: bool,
    warning: &'static str,
    /// The version of the record that the operator sees.
    seen: String,
    entered: Entered,
    preview: Preview,
    error: String,
}

/// The values of the form.
#[derive(Default)]
struct Entered {
    actor: String,
    reason: String,
    status: String,
    headers: String,
    body: String,
}

/// The consequences of a change for a client.
#[derive(Default)]
struct Preview {
    sentence: String,
    status: u16,
    fields: Vec<(String, String)>,
    body: String,
}

impl Entered {
    fn read(fields: &FormFields) -> Self {
        let text = |name| fields.get(name).to_owned();
        Self {
            actor: text("actor"),
            reason: text("reason"),
            status: text("status"),
            headers: text("headers"),
            // Browsers send the ends of lines as CRLF, also if the text had none.
            body: fields.get("body").replace("\r\n", "\n"),
        }
    }

    fn resolution(&self, action: Action) -> Result<Resolution, Problem> {
        Ok(match action {
            Action::Done => Resolution::Complete(None),
            Action::Free => Resolution::Release,
            Action::Park => Resolution::Park,
            Action::Respond => {
                let status = self.status.trim();
                let status = status.parse().map_err(|_| {
                    Problem::bad_request(format!("status: {status:?} is not a status such as 201."))
                })?;
                let headers = header_lines(&self.headers)?;
                let body = Bytes::from(self.body.clone());
                Resolution::Complete(Some(stored_response(status, &headers, body)?))
            }
        })
    }
}

/// Reads header fields, one in a line.
pub(super) fn header_lines(text: &str) -> Result<Vec<(String, String)>, Problem> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let fields = lines.map(|line| match line.split_once(':') {
        Some((name, value)) => Ok((name.trim().to_owned(), value.trim().to_owned())),
        None => Err(Problem::bad_request(format!(
            "headers: {line:?} has no colon; write one field in a line, such as Content-Type: application/json."
        ))),
    });
    fields.collect()
}

/// A record and the action that the address names.
struct Subject {
    id: RecordId,
    record: Record,
    view: RecordView,
    action: Action,
}

impl Subject {
    async fn find(state: &AdminState, id: &str, action: &str) -> Result<Self, Problem> {
        let action =
            Action::named(action).ok_or_else(|| Problem::no_such_path(&format!("/keys/{id}/{action}")))?;
        let id = listing::find(&**state.engine.store(), id).await?;
        let found = read_existing(state, id).await?;
        let view = found.view(id, state.engine.store().now(), Detail::Whole);
        Ok(Self { id, record: found.record, view, action })
    }

    /// The version of the record.
    fn version(&self) -> String {
        format!("{}-{}-{}", self.view.token, self.view.state, self.record.changed_at.as_millis())
    }

    fn verdict(&self, resolution: Resolution) -> Verdict {
        let is_settled = ["completed", "tombstone", "released"].contains(&self.view.state);
        Verdict {
            resolution,
            force: self.view.state == "in-progress",
            amend: is_settled && self.action != Action::Park,
        }
    }

    /// Refuses an action that the state of the record does not allow.
    fn check(&self) -> Result<(), Problem> {
        if Action::allowed(&self.view).contains(&self.action) {
            return Ok(());
        }
        let state = StateName::from_name(self.view.state).unwrap_or(StateName::Unknown);
        let resolution = match self.action {
            Action::Park => Resolution::Park,
            Action::Free => Resolution::Release,
            Action::Respond | Action::Done => Resolution::Complete(None),
        };
        let verdict = Verdict { force: false, amend: false, resolution };
        Err(Problem::not_resolvable(self.id, why_not(state, self.view.by_operator, &verdict)))
    }

    fn preview(&self, state: &AdminState, resolution: &Resolution) -> Preview {
        let settings = settings_of(state, &self.record);
        let profile = settings.profile();
        match (self.action, resolution) {
            (Action::Respond, Resolution::Complete(Some(stored))) => {
                let view = ResponseView::new(stored, Detail::Body);
                let mut fields = view.headers.unwrap_or_default();
                fields.push(profile.replay_marker());
                Preview {
                    sentence: "A client that sends the request again with this key gets this response. Nothing executes.".to_owned(),
                    status: replay_status(profile, view.status),
                    fields,
                    body: match view.body {
                        Some(BodyView::Text(text) | BodyView::Base64(text)) => text,
                        None => String::new(),
                    },
                }
            }
            (Action::Park, _) => Preview {
                sentence: format!(
                    "A client that sends the request again with this key gets {}. Nothing executes until an operator resolves it.",
                    refusal(profile, Condition::OutcomeUnknown)
                ),
                ..Preview::default()
            },
            (Action::Free, _) => Preview {
                sentence: if self.view.steps.is_empty() {
                    "The next request with this key is sent to the service and executes. If no client retries, nothing happens.".to_owned()
                } else {
                    "The next request with this key executes, and continues after the recorded steps. If no client retries, nothing happens."
                        .to_owned()
                },
                ..Preview::default()
            },
            _ => Preview {
                sentence: format!(
                    "A client that sends the request again with this key gets {}. Nothing executes.",
                    refusal(profile, Condition::ReplayUnavailable)
                ),
                ..Preview::default()
            },
        }
    }

    const fn target(&self) -> &'static str {
        match self.action {
            Action::Respond => "completed",
            Action::Done => "tombstone",
            Action::Free => "released",
            Action::Park => "unknown",
        }
    }

    fn warning(&self) -> &'static str {
        match (self.action, self.view.state) {
            (Action::Free, "in-progress") => {
                "Its owner has a lease and may be running. If it is, its effect may happen in addition to that of the next request."
            }
            (Action::Free, "completed" | "tombstone") => {
                "Clients may have been told already that it happened. The next retry executes it."
            }
            (Action::Free, _) => "If it did take effect after all, the next retry makes it happen twice.",
            (Action::Respond | Action::Done, "completed" | "tombstone") => {
                "Clients that got the earlier response do not ask again."
            }
            (Action::Respond | Action::Done, _) => "If it did not take effect, it never will under this key.",
            (Action::Park, _) => "",
        }
    }

    fn page(
        &self,
        state: &AdminState,
        access: &Access,
        entered: Entered,
        result: Result<Preview, Problem>,
    ) -> Response {
        let (stage, preview, status, error) = match result {
            Ok(preview) if preview.sentence.is_empty() => {
                (Stage::Form, preview, StatusCode::OK, String::new())
            }
            Ok(preview) => (Stage::Preview, preview, StatusCode::OK, String::new()),
            Err(problem) => (Stage::Form, Preview::default(), problem.status(), problem.detail().to_owned()),
        };
        let label = self.action.label(&self.view);
        let page = ChangePage {
            frame: Frame::new(state, access, Section::Keys, label),
            stage,
            record: self.view.record.clone(),
            operation: self.view.operation.clone(),
            from: self.view.state,
            to: self.target(),
            action: self.action,
            label,
            note: self.action.note(&self.view),
            is_danger: self.action.is_danger(&self.view),
            warning: self.warning(),
            seen: self.version(),
            entered,
            preview,
            error,
        };
        page_with(status, &page)
    }
}

/// Shows the form of an action.
pub(super) async fn form(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    Path((id, action)): Path<(String, String)>,
) -> PageResult {
    let subject = Subject::find(&state, &id, &action).await?;
    subject.check()?;
    let entered = Entered { actor: access.actor.clone().unwrap_or_default(), ..Entered::default() };
    Ok(subject.page(&state, &access, entered, Ok(Preview::default())))
}

/// Shows the preview of an action, or carries it out after the confirmation.
pub(super) async fn decide(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    Path((id, action)): Path<(String, String)>,
    Extension(fields): Extension<FormFields>,
) -> PageResult {
    let subject = Subject::find(&state, &id, &action).await?;
    let entered = Entered::read(&fields);
    if fields.get("seen") != subject.version() {
        let detail = format!(
            "The record has changed since you opened the form: it is {} now. Nothing was changed by you.",
            subject.view.state
        );
        return Err(Problem::not_resolvable(subject.id, detail).into());
    }
    subject.check()?;
    let read = entered.resolution(subject.action).and_then(|resolution| Ok((resolution, fields.audit()?)));
    let (resolution, audit) = match read {
        Ok(read) => read,
        Err(problem) => return Ok(subject.page(&state, &access, entered, Err(problem))),
    };
    match fields.get("step") {
        "confirm" => {
            settle(&state, subject.id, subject.verdict(resolution), audit).await?;
            Ok(redirect(&format!("/keys/{}?done={}", subject.id, subject.action.slug())))
        }
        "edit" => Ok(subject.page(&state, &access, entered, Ok(Preview::default()))),
        _ => {
            let preview = subject.preview(&state, &resolution);
            Ok(subject.page(&state, &access, entered, Ok(preview)))
        }
    }
}
