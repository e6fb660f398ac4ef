//! The page "How to retry", for the customers of an API.

use std::fmt::Write as _;

use oncegate_core::OnAbandoned;
use oncegate_http::{Condition, RetryAdvice};

use super::descriptor::{Carrier, Operation, Rules};
use crate::config::duration_text;

/// A part of the page.
pub(super) enum Part {
    Heading(u8, String),
    Paragraph(String),
    Table(Vec<&'static str>, Vec<Vec<String>>),
    Code(&'static str, String),
}

/// The page about these rules.
pub(super) fn page(rules: &Rules, api: &str) -> Vec<Part> {
    let mut page = vec![
        Part::Heading(1, format!("How to retry requests to {api}")),
        Part::Paragraph(
            "Networks lose responses, so a request may take effect although you see an error. Send a key of your own with each \
             request that changes something, and send the same key with every retry. However often the request arrives, it is \
             executed once, unless this page says that its key is free again, and each retry gets the first response."
                .to_owned(),
        ),
        Part::Paragraph(
            "Make one key for each intent (this payment, this order), such as a UUID, and store it before you send the request. Never take a \
             new key for a retry."
                .to_owned(),
        ),
    ];
    for operation in &rules.operations {
        page.extend(of_operation(operation));
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
        Part::Paragraph(advice(condition.retry()).to_owned()),
    ]
}

fn of_operation(operation: &Operation) -> Vec<Part> {
    let methods = operation.methods.join(", ");
    let title = match &operation.path {
        Some(path) => format!("{methods} {path}"),
        None => format!("{methods} to all other paths"),
    };
    let kept =
        if operation.keeps_server_errors { "kept, as all others" } else { "not kept: the key is free again" };
    let mut rows = vec![
        [
            "Key".to_owned(),
            format!(
                "{}{}",
                places(operation),
                if operation.is_required { ", required" } else { ", optional" }
            ),
        ],
        ["Format".to_owned(), format!("{}, at most 255 bytes", operation.format)],
        [
            "Unique for".to_owned(),
            if operation.is_per_endpoint { "each caller, method and path" } else { "each caller" }.to_owned(),
        ],
        ["Kept for".to_owned(), format!("{} from the response on", duration_text(operation.retention))],
        ["Replays".to_owned(), format!("have the field {}", operation.replay_marker)],
        ["Server errors".to_owned(), kept.to_owned()],
        ["After a crash".to_owned(), after_crash(operation.on_abandoned).to_owned()],
        ["Never kept".to_owned(), format!("responses with {}", operation.released.join(", "))],
    ];
    if let Some(url) = &operation.documentation {
        rows.push(["More".to_owned(), url.clone()]);
    }
    let mut parts = vec![
        Part::Heading(2, title),
        Part::Table(vec!["", ""], rows.into_iter().map(Vec::from).collect()),
        Part::Paragraph("If you get one of these responses:".to_owned()),
        Part::Table(vec!["status", "meaning", "what to do"], operation.refusals.iter().map(|refusal| {
            let code = refusal.code.as_ref().map_or_else(String::new, |code| format!(" ({code})"));
            let condition = refusal.condition;
            vec![refusal.status.to_string(), format!("{}{code}", condition.title()), advice(condition.retry()).to_owned()]
        }).collect()),
        Part::Paragraph(
            "If you get no response at all, or a status of 500 and more without one of these meanings, send the same request with the same \
             key again. Wait longer each time, and as long as Retry-After says."
                .to_owned(),
        ),
    ];
    if let Some(Carrier::Header(name)) = operation.carriers.first() {
        let method = operation.methods.first().map_or("POST", String::as_str);
        let path = operation.path.as_deref().unwrap_or("/orders").split('{').next().unwrap_or("/");
        parts.extend(snippets(name, method, path));
    }
    parts
}

fn places(operation: &Operation) -> String {
    let place = |carrier: &Carrier| match carrier {
        Carrier::Header(name) => format!("the header field {name}"),
        Carrier::Query(name) => format!("the query parameter {name}"),
        Carrier::Member(pointer) => format!("the member {pointer} of the JSON body"),
        Carrier::Built(members) => format!("built from the members {} of the JSON body", members.join(", ")),
    };
    operation.carriers.iter().map(place).collect::<Vec<_>>().join(" or ")
}

const fn after_crash(policy: OnAbandoned) -> &'static str {
    match policy {
        OnAbandoned::Reexecute => "the request is executed again, so it may take effect twice",
        OnAbandoned::Reconcile => "the service finds out if the request took effect",
        _ => "the outcome is unknown until an operator has resolved it",
    }
}

const fn advice(advice: RetryAdvice) -> &'static str {
    match advice {
        RetryAdvice::SameKey => "Send the same request with the same key again, later.",
        RetryAdvice::NewKey => "This is another request: take a new key.",
        RetryAdvice::FixRequest => "Correct the request.",
        RetryAdvice::Stop => "Do not send it again. Find out what happened first.",
        _ => "Find out what happened before you send it again.",
    }
}

/// The same retry in the tools that customers use.
fn snippets(header: &str, method: &str, path: &str) -> Vec<Part> {
    let url = format!("https://api.example.com{path}");
    // `--retry-all-errors` is safe here because the key goes along.
    let curl = format!(
        "curl --request {method} --header \"{header}: $(uuidgen)\" --json @order.json \\\n  --retry 5 --retry-all-errors --retry-connrefused {url}"
    );
    let fetch = format!(
        "const key = crypto.randomUUID(); // one for each intent\nfor (let attempt = 0; ; attempt++) {{\n  try {{\n    const response = await fetch(\"{url}\", {{\n      method: \"{method}\",\n      headers: {{ \"{header}\": key, \"Content-Type\": \"application/json\" }},\n      body: JSON.stringify(order),\n    }});\n    if (response.status < 500 && response.status !== 409 && response.status !== 429) break;\n  }} catch (error) {{\n    if (attempt === 5) throw error;\n  }}\n  if (attempt === 5) break;\n  await new Promise((later) => setTimeout(later, 1000 * 2 ** attempt));\n}}"
    );
    let python = format!(
        "import time, uuid, requests\n\nkey = str(uuid.uuid4())  # one for each intent\nfor attempt in range(6):\n    try:\n        response = requests.request(\"{method}\", \"{url}\", json=order, headers={{\"{header}\": key}}, timeout=30)\n        if response.status_code < 500 and response.status_code not in (409, 429):\n            break\n    except requests.RequestException:\n        pass\n    time.sleep(2**attempt)"
    );
    let go = format!(
        "key := uuid.NewString() // one for each intent\nfor attempt := 0; attempt < 6; attempt++ {{\n\trequest, _ := http.NewRequest(\"{method}\", \"{url}\", bytes.NewReader(order))\n\trequest.Header.Set(\"{header}\", key)\n\trequest.Header.Set(\"Content-Type\", \"application/json\")\n\tresponse, err := http.DefaultClient.Do(request)\n\tif err == nil {{\n\t\tresponse.Body.Close()\n\t\tif response.StatusCode < 500 && response.StatusCode != 409 && response.StatusCode != 429 {{\n\t\t\tbreak\n\t\t}}\n\t}}\n\ttime.Sleep(time.Second << attempt)\n}}"
    );
    vec![
        Part::Heading(3, "With curl".to_owned()),
        Part::Code("sh", curl),
        Part::Heading(3, "With fetch".to_owned()),
        Part::Code("js", fetch),
        Part::Heading(3, "In Python".to_owned()),
        Part::Code("python", python),
        Part::Heading(3, "In Go".to_owned()),
        Part::Code("go", go),
    ]
}

pub(super) fn markdown(page: &[Part]) -> String {
    let mut text = String::new();
    for part in page {
        let _infallible = match part {
            Part::Heading(level, title) => writeln!(text, "{} {title}\n", "#".repeat(usize::from(*level))),
            Part::Paragraph(words) => writeln!(text, "{words}\n"),
            Part::Code(language, code) => writeln!(text, "```{language}\n{code}\n```\n"),
            Part::Table(head, rows) => {
                let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
                text += &line(head.iter().map(|cell| (*cell).to_owned()).collect());
                text += &line(head.iter().map(|_| "---".to_owned()).collect());
                for row in rows {
                    text += &line(row.iter().map(|cell| cell.replace('|', "\\|")).collect());
                }
                writeln!(text)
            }
        };
    }
    text
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
     table{border-collapse:collapse}td,th{border:1px solid #8888;padding:.3rem .6rem;text-align:left;vertical-align:top}\
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
