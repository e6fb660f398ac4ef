//! The marks by which a client tells refusals that a retry can overcome from those that are final.

use oncegate_http::RetryAdvice;
use serde_json::Value;

use super::descriptor::{Operation, RefusalRule};

/// Statuses after which a retry is right, whatever the refusals say: nothing was decided about the operation.
const UNDECIDED: [u16; 3] = [408, 425, 429];

/// The marks, in the order in which a client looks for them. Without any of them the status decides: one of `statuses`, and each
/// from 500, is retried.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RetrySignal {
    /// The header field that is `true` or `false`.
    pub(super) header: Option<String>,
    /// Texts in bodies after which a retry is right.
    pub(super) again: Vec<String>,
    /// Texts in bodies after which it is not.
    pub(super) stop: Vec<String>,
    pub(super) statuses: Vec<u16>,
}

impl RetrySignal {
    pub(super) fn of(operation: &Operation) -> Self {
        let refusals = &operation.refusals;
        let mut signal =
            Self { header: None, again: Vec::new(), stop: Vec::new(), statuses: UNDECIDED.to_vec() };
        if operation.retryable_header.is_some() {
            signal.header.clone_from(&operation.retryable_header);
            return signal;
        }
        if let Some(name) = member(refusals, |refusal| Some(refusal.condition.retry().as_str())) {
            signal.again.push(format!("\"{name}\":\"{}\"", RetryAdvice::SameKey.as_str()));
            signal.stop.push(format!("\"{name}\":\""));
            return signal;
        }
        let is_only_again = |status: u16| {
            let mut same = refusals.iter().filter(|refusal| refusal.status == status).peekable();
            same.peek().is_some() && same.all(is_retried)
        };
        signal
            .statuses
            .extend((400..500).filter(|status| is_only_again(*status) && !UNDECIDED.contains(status)));
        signal.statuses.sort_unstable();
        let Some(name) = member(refusals, |refusal| refusal.code.as_deref()) else { return signal };
        for refusal in refusals {
            let Some(code) = &refusal.code else { continue };
            // A code that stands for several conditions says nothing, and the service may use it, too.
            if refusals
                .iter()
                .any(|other| other.code.as_ref() == Some(code) && other.condition != refusal.condition)
            {
                continue;
            }
            let by_status = refusal.status >= 500 || signal.statuses.contains(&refusal.status);
            let texts = match is_retried(refusal) {
                true if !by_status => &mut signal.again,
                false if by_status => &mut signal.stop,
                _ => continue,
            };
            let text = format!("\"{name}\":\"{code}\"");
            if !texts.contains(&text) {
                texts.push(text);
            }
        }
        signal
    }
}

fn is_retried(refusal: &RefusalRule) -> bool {
    refusal.condition.retry() == RetryAdvice::SameKey
}

/// The name of the member that has this value in the body of each refusal, if all bodies write it as `"NAME":"VALUE"`.
fn member(refusals: &[RefusalRule], value: impl Fn(&RefusalRule) -> Option<&str>) -> Option<String> {
    let mut names: Option<Vec<String>> = None;
    for refusal in refusals {
        let value = value(refusal)?;
        let mut found = Vec::new();
        gather(&serde_json::from_str(&refusal.body).ok()?, value, &mut found);
        found.retain(|name| refusal.body.contains(&format!("\"{name}\":\"{value}\"")));
        names = Some(match names {
            None => found,
            Some(names) => names.into_iter().filter(|name| found.contains(name)).collect(),
        });
    }
    names?.into_iter().next()
}

/// The names of all members with this value.
fn gather(body: &Value, value: &str, names: &mut Vec<String>) {
    match body {
        Value::Object(members) => {
            for (name, inner) in members {
                if inner.as_str() == Some(value) {
                    names.push(name.clone());
                }
                gather(inner, value, names);
            }
        }
        Value::Array(elements) => elements.iter().for_each(|inner| gather(inner, value, names)),
        _ => {}
    }
}
