//! The page "How to retry", for the customers of an API.

use std::fmt::Write as _;

use oncegate_core::OnAbandoned;
use oncegate_http::{Condition, KeySyntax, RetryAdvice};

use super::descriptor::{CallerKind, CallerRule, Carrier, Operation, Rules};
use super::snippets;
use crate::config::duration_text;

/// A part of the page.
pub(super) enum Part {
    Heading(u8, String),
    Paragraph(String),
    Table(Vec<&'static str>, Vec<Vec<String>>),
    Code(&'static str, String),
}

/// The page about these rules. `server` is the address of the API in its programs.
pub(super) fn page(rules: &Rules, api: &str, server: &str) -> Vec<Part> {
    let mut page = vec![
        Part::Heading(1, format!("How to retry requests to {api}")),
        Part::Paragraph(
            "Networks lose responses, so a request may take effect although you see an error. Send a key of your own with each \
             request that changes something, and send the same key, as the same caller, with every retry. However often the \
             request arrives, it is executed once, unless this page says that its key is free again, and each retry gets the \
             first response."
                .to_owned(),
        ),
        Part::Paragraph(
            "Make one key for each intent (this payment, this order), such as a UUID, and store it before you send the request. Never take a \
             new key for a retry."
                .to_owned(),
        ),
    ];
    for operation in &rules.operations {
        page.extend(of_operation(operation, rules.operations.len() == 1, server));
    }
    page.push(Part::Heading(2, "Problems".to_owned()));
    for condition in Condition::ALL {
        page.extend(of_problem(3, condition));
    }
    page
}

/// The page about one problem, to which its type links.
pub(super) fn of_problem(level: u8, condition: Condition) -> Vec<Part> {
    let detail = condition.detail().replace("{place}", "the place that the operation names");
    vec![
        Part::Heading(level, condition.slug().to_owned()),
        Part::Paragraph(format!("{}. {detail}", condition.title())),
        Part::Paragraph(advice(condition).to_owned()),
    ]
}

fn of_operation(operation: &Operation, is_only: bool, server: &str) -> Vec<Part> {
    let methods = operation.methods.join(", ");
    let title = match &operation.path {
        Some(path) => format!("{methods} {path}"),
        None if is_only => format!("{methods} to all paths"),
        None => format!("{methods} to all other paths"),
    };
    let mut refusals: Vec<_> = operation.refusals.iter().collect();
    refusals.sort_by_key(|refusal| refusal.status);
    if operation.speaks_mcp {
        // The refusal of a call is its result, whatever the status would be.
        let mut seen = Vec::new();
        refusals.retain(|refusal| {
            let is_first = !seen.contains(&refusal.condition);
            seen.push(refusal.condition);
            is_first
        });
    }
    let mut parts = vec![
        Part::Heading(2, title),
        Part::Table(vec!["", ""], rows(operation).into_iter().map(|(name, value)| vec![name.to_owned(), value]).collect()),
        Part::Paragraph("If you get one of these responses:".to_owned()),
        Part::Table(vec!["status", "meaning", "what to do"], refusals.into_iter().map(|refusal| {
            let condition = refusal.condition;
            let code = match operation.speaks_mcp {
                true => format!(" ({condition})"),
                false => refusal.code.as_ref().map_or_else(String::new, |code| format!(" ({code})")),
            };
            let advice = match condition {
                Condition::KeyReused if is_built(operation) => "This is another request: it has to differ in the members of which the key is built.",
                _ => advice(condition),
            };
            let status = match operation.speaks_mcp {
                true => format!("isError, or {}", refusal.status),
                false => refusal.status.to_string(),
            };
            vec![status, format!("{}{code}", condition.title()), advice.to_owned()]
        }).collect()),
        Part::Paragraph(format!(
            "If you get no response at all, or a status of 500 and more without one of these meanings and without the field {}, send the same \
             request with the same key again. Wait longer each time, and as long as Retry-After says.",
            operation.replay_marker.0
        )),
    ];
    if !operation.speaks_mcp {
        parts.push(Part::Paragraph(
            "A response with one of these meanings has the field Idempotency-Status, with refused; problem=NAME; \
             retry=WORD. Without this field, it is the response of the operation, or of another API behind it: a body \
             that looks like one of these refusals is about a request of the service then, and not about yours."
                .to_owned(),
        ));
        parts.extend(snippets::of(operation, server));
    }
    parts
}

fn is_built(operation: &Operation) -> bool {
    operation.carriers.iter().any(|carrier| matches!(carrier, Carrier::Built(_)))
}

/// The rules in words.
fn rows(operation: &Operation) -> Vec<(&'static str, String)> {
    let mut rows = vec![("Key", key(operation))];
    if operation.speaks_mcp {
        let calls = "calls of tools in the Model Context Protocol; other messages pass. A refusal is the result of the call, or an error";
        rows.insert(0, ("Protected", calls.to_owned()));
        if !operation.read_only_tools.is_empty() {
            let tools = format!("{}: they have no effect, and pass", operation.read_only_tools.join(", "));
            rows.push(("Reading tools", tools));
        }
        if !operation.intent_tools.is_empty() {
            let run = operation.run_members.first().map_or("", String::as_str);
            let tools = format!(
                "{}: the key is built from the tool, its arguments and the run of the agent, which the member {run} names. It is the same in \
                 all calls of one run; without it, the session (Mcp-Session-Id) is the run. Two equal calls in one run are one",
                operation.intent_tools.join(", ")
            );
            rows.push(("Tools by intent", tools));
        }
    }
    if !is_built(operation) {
        rows.push(("Format", format(operation)));
    }
    if let Some(first) = &operation.first_sent {
        rows.push((
            "First sent",
            format!(
                "the header field {}, required with a key: the time at which you sent the request first, such as Sun, 06 Nov 1994 08:49:37 GMT. \
                 It is the same in each retry, and less than {} ago",
                first.header,
                duration_text(first.max_age)
            ),
        ));
    }
    let unique = if operation.is_per_endpoint { "each caller, method and path" } else { "each caller" };
    let scope_headers = operation.scope_headers.join(" and ");
    let unique = match operation.scope_headers.as_slice() {
        [] => unique.to_owned(),
        _ => format!(
            "{unique}, and for the values of {scope_headers}. Retry with the same values, and without a field that the \
             first request did not have: otherwise it is another key, and the request is executed again"
        ),
    };
    rows.extend([
        ("Unique for", unique),
        ("Callers", callers(operation)),
        ("Kept for", format!("{} from the response on", duration_text(operation.retention))),
        ("Replays", replays(operation)),
        ("Server errors", server_errors(operation).to_owned()),
        ("After a crash", after_crash(operation).to_owned()),
        ("Never kept", format!("the key is free again after responses with {}: nothing was decided, so send the corrected request with the same key", operation.released.join(", "))),
    ]);
    if operation.is_shadow {
        let observed =
            "not yet: requests are only observed. All of them are executed, and a retry takes effect again";
        rows.push(("In force", observed.to_owned()));
    }
    if operation.fails_open {
        let open = "while the records of keys are out of reach, requests are executed without protection, and a retry may take effect twice. \
                    Their responses have the field Idempotency-Status: failed-open";
        rows.push(("Outages", open.to_owned()));
    }
    let others = if operation.refuses_other_methods {
        "a request that has a key and may change something is refused: 501, The operation does not support an Idempotency-Key"
    } else {
        "are not protected: a key has no effect"
    };
    rows.push(("Other methods", others.to_owned()));
    rows.extend(operation.documentation.iter().map(|url| ("More", url.clone())));
    rows
}

/// The places of the key.
fn key(operation: &Operation) -> String {
    let named = |what: [&str; 2], names: Vec<&str>| match names.as_slice() {
        [] => None,
        [name] => Some(format!("{} {name}", what[0])),
        names => Some(format!("one of {} {}", what[1], names.join(", "))),
    };
    let of_kind =
        |name: fn(&Carrier) -> Option<&str>| operation.carriers.iter().filter_map(name).collect::<Vec<_>>();
    let header = of_kind(|carrier| match carrier {
        Carrier::Header(name) => Some(name),
        _ => None,
    });
    let query = of_kind(|carrier| match carrier {
        Carrier::Query(name) => Some(name),
        _ => None,
    });
    let member = of_kind(|carrier| match carrier {
        Carrier::Member(pointer) => Some(pointer),
        _ => None,
    });
    let mut places: Vec<_> = [
        named(["the header field", "the header fields"], header),
        named(["the parameter of the query, or of a form in the body,", "the parameters"], query),
        named(["the member of the JSON body", "the members of the JSON body"], member),
    ]
    .into_iter()
    .flatten()
    .collect();
    let built = operation.carriers.iter().find_map(|carrier| match carrier {
        Carrier::Built(members) => Some(members.join(", ")),
        _ => None,
    });
    places.extend(
        built.map(|members| {
            format!("built from the members {members} of the JSON body: send none of your own")
        }),
    );
    format!(
        "{}{}",
        places.join(", or "),
        if operation.is_required {
            ", required"
        } else {
            ", optional: without a key the request is not protected"
        }
    )
}

fn format(operation: &Operation) -> String {
    let format = match operation.format.split_once(':') {
        None if operation.format == "uuid" => "a UUID, in 36 characters".to_owned(),
        None if operation.format == "ulid" => "a ULID, in 26 characters".to_owned(),
        Some((_, pattern)) => format!("a text that matches {pattern} from end to end, at most 255 bytes"),
        _ => "1 to 255 visible ASCII characters, such as a UUID".to_owned(),
    };
    let quotes = match operation.syntax {
        KeySyntax::Strict
            if operation.carriers.iter().any(|carrier| matches!(carrier, Carrier::Header(_))) =>
        {
            ", in double quotes in the header field"
        }
        _ => "",
    };
    format + quotes
}

/// The parts of a request that tell callers apart.
fn callers(operation: &Operation) -> String {
    let part = |caller: &CallerRule| {
        let name = &caller.name;
        let part = match caller.kind {
            CallerKind::Header => format!("the header field {name}"),
            CallerKind::Cookie => format!("the cookie {name}"),
            CallerKind::Path => format!("{name} in the path"),
            CallerKind::Host => "the host of the request".to_owned(),
            CallerKind::Certificate => "the name in the client's certificate".to_owned(),
            CallerKind::Token => format!("the claim {name} of the token in Authorization"),
        };
        if caller.is_required { part } else { part + " (optional)" }
    };
    let parts: Vec<_> = operation.callers.iter().map(part).collect();
    if parts.is_empty() {
        return "are not told apart: a key is unique among all callers".to_owned();
    }
    let mut text = format!("are told apart by {}", parts.join(" and "));
    if operation.has_default_callers {
        text += ", and with another credential a request is refused";
    }
    let is_credential = |caller: &CallerRule| matches!(caller.kind, CallerKind::Header | CallerKind::Cookie);
    match operation.callers.iter().any(is_credential) {
        true => {
            text += ". Retry with the same value: with another one, such as a renewed token, you are another caller, and the request is executed again"
        }
        false
            if operation
                .callers
                .iter()
                .any(|caller| matches!(caller.kind, CallerKind::Token | CallerKind::Certificate)) =>
        {
            text += ". It may be renewed between retries";
        }
        false => {}
    }
    text
}

fn replays(operation: &Operation) -> String {
    let (name, value) = &operation.replay_marker;
    let marked = format!("have the field {name}: {value}");
    match operation.redacted.as_slice() {
        [] => marked,
        members => format!(
            "{marked}. The members {} of a response are not kept: a replay has null in their place, and the field Idempotency-Redacted: \
             true. A response that is not JSON is not replayed: it is done, and a retry is refused",
            members.join(", ")
        ),
    }
}

const fn server_errors(operation: &Operation) -> &'static str {
    match (operation.completes_itself, operation.keeps_server_errors) {
        (true, _) => {
            "not kept: a retry gets the response if the request took effect, and is executed again if it did not"
        }
        (false, true) => "kept like all others: a retry gets the same error again",
        (false, false) => "not kept: the key is free again",
    }
}

const fn after_crash(operation: &Operation) -> &'static str {
    match operation.on_abandoned {
        _ if operation.completes_itself => "the request is executed again if it has not taken effect",
        OnAbandoned::Reexecute => "the request is executed again, so it may take effect twice",
        OnAbandoned::Reconcile => "the service finds out if the request took effect",
        _ => "the outcome is unknown until the operator of this API has looked it up",
    }
}

/// The next step of a client.
const fn advice(condition: Condition) -> &'static str {
    match condition {
        Condition::HostDiffers => {
            "Send it to the host that it was sent to first, with the same key. Do not take a new key."
        }
        Condition::ReplayDenied => {
            "Send it with credentials that are valid now and with the same key. Do not take a new key."
        }
        Condition::ReplayUnavailable | Condition::UpstreamHeadTooLarge | Condition::UpstreamUnsupported => {
            "Do not send it again: it was processed. Look at the result in another way."
        }
        Condition::KeyUnsupported => "Send it without a key if it may take effect twice.",
        _ => match condition.retry() {
            RetryAdvice::SameKey => "Send the same request with the same key again, later.",
            RetryAdvice::NewKey => "This is another request: take a new key.",
            RetryAdvice::FixRequest => "Correct the request.",
            RetryAdvice::Stop => "Do not send it again. Find out what happened first.",
            _ => "The request had no key. Find out what happened before you send it again.",
        },
    }
}

pub(super) fn markdown(page: &[Part]) -> String {
    let mut text = String::new();
    for part in page {
        let _infallible = match part {
            Part::Heading(level, title) => {
                writeln!(text, "{} {}\n", "#".repeat(usize::from(*level)), markdown_text(title))
            }
            Part::Paragraph(words) => writeln!(text, "{}\n", markdown_text(words)),
            Part::Code(language, code) => writeln!(text, "```{language}\n{code}\n```\n"),
            Part::Table(head, rows) => {
                let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
                text += &line(head.iter().map(|cell| (*cell).to_owned()).collect());
                text += &line(head.iter().map(|_| "---".to_owned()).collect());
                for row in rows {
                    text += &line(row.iter().map(|cell| markdown_text(cell)).collect());
                }
                writeln!(text)
            }
        };
    }
    text
}

/// The text with characters escaped that mean something in Markdown, so that a word of a profile stays a word.
fn markdown_text(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            // Otherwise it stands for itself.
            '&' if letters.peek().is_some_and(|next| next.is_ascii_alphanumeric() || *next == '#') => {
                safe += "&amp;";
            }
            '<' => safe += "&lt;",
            letter if letter.is_control() => safe.push(' '),
            letter => {
                if matches!(letter, '\\' | '`' | '*' | '[' | '|') {
                    safe.push('\\');
                }
                safe.push(letter);
            }
        }
    }
    safe
}

pub(super) fn html(page: &[Part]) -> String {
    let title = page.iter().find_map(|part| match part {
        Part::Heading(1, title) => Some(escaped(title)),
        _ => None,
    });
    let mut text = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width\">\n<title>{}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n",
        title.unwrap_or_default()
    );
    for part in page {
        let _infallible = match part {
            Part::Heading(level, title) => {
                // The type of a problem links to its name.
                let is_problem = Condition::ALL.iter().any(|condition| condition.slug() == title);
                let id = if is_problem { format!(" id=\"{title}\"") } else { String::new() };
                writeln!(text, "<h{level}{id}>{}</h{level}>", escaped(title))
            }
            Part::Paragraph(words) => writeln!(text, "<p>{}</p>", escaped(words)),
            Part::Code(_, code) => writeln!(text, "<pre><code>{}</code></pre>", escaped(code)),
            Part::Table(head, rows) => {
                let row = |cells: &mut dyn Iterator<Item = &str>, cell: &str| {
                    let cells = cells.map(|text| format!("<{cell}>{}</{cell}>", escaped(text)));
                    format!("<tr>{}</tr>\n", cells.collect::<String>())
                };
                text += "<table>\n";
                if head.iter().any(|cell| !cell.is_empty()) {
                    text += &row(&mut head.iter().copied(), "th");
                }
                for cells in rows {
                    text += &row(&mut cells.iter().map(String::as_str), "td");
                }
                writeln!(text, "</table>")
            }
        };
    }
    text + "</body>\n</html>\n"
}

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}\
     table{border-collapse:collapse}td,th{overflow-wrap:anywhere;border:1px solid #8888;\
     padding:.3rem .6rem;text-align:left;vertical-align:top}\
     pre{background:#8881;padding:.8rem;overflow-x:auto}";

fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => safe += "&amp;",
            '<' => safe += "&lt;",
            '>' => safe += "&gt;",
            '"' => safe += "&quot;",
            letter => safe.push(letter),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_of_a_profile_stays_a_word_in_markdown() {
        for (text, expected) in [
            ("A & B", "A & B"),
            ("a&lt;b", "a&amp;lt;b"),
            ("a|b\n## x <img src=x>", "a\\|b ## x &lt;img src=x>"),
            ("[a](b) *c* `d` \\e", "\\[a](b) \\*c\\* \\`d\\` \\\\e"),
            ("idempotency_key", "idempotency_key"),
        ] {
            assert_eq!(markdown_text(text), expected);
        }
    }
}
