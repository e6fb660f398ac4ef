//! Prints the responses of the admin API for people.

use std::io::Write;
use std::time::Duration;

use oncegate_http::SHADOW_OPERATION;
use serde_json::{Value, json};

use super::Failure;
use crate::config::rounded_duration_text;
use crate::style::{Tone, paint, paint_word};

pub(crate) type Printed = Result<(), Failure>;

/// Prints JSON on several lines.
pub(crate) fn json(value: &Value, out: &mut impl Write) -> Printed {
    let text = serde_json::to_string_pretty(value).unwrap_or_else(|_| value.to_string());
    Ok(writeln!(out, "{text}")?)
}

pub(super) fn page(page: &Value, as_json: bool, out: &mut impl Write) -> Printed {
    if as_json {
        return json(page, out);
    }
    rows(page, out)?;
    if let Some(next) = page["next"].as_str() {
        writeln!(out, "there may be more: --cursor {next}")?;
    }
    Ok(())
}

/// The end of a search for records that cannot be read, which were printed as they were found.
pub(super) fn unreadable(page: &Value, as_json: bool, out: &mut impl Write) -> Printed {
    if as_json {
        return json(page, out);
    }
    let named = list(page, "unreadable").len();
    let read = text(&page["read"]);
    if page["complete"] == true {
        writeln!(out, "{read} records were read, to the end of the store: {named} cannot be read")?;
    } else if let Some(next) = page["next"].as_str() {
        writeln!(out, "{read} records were read; there may be more: --unreadable --cursor {next}")?;
    }
    // Without a place to go on from, the first page has failed, and the error says why.
    Ok(())
}

/// The newest records, and the number of all.
pub(super) fn newest(page: &Value, as_json: bool, out: &mut impl Write) -> Printed {
    if as_json {
        return json(page, out);
    }
    rows(page, out)?;
    let unreadable = page["unreadable_total"].as_u64().unwrap_or_default();
    if unreadable > list(page, "unreadable").len() as u64 {
        writeln!(
            out,
            "at least {unreadable} records cannot be read; keys ls --unreadable names more of them"
        )?;
    }
    let total = page["total"].as_u64().unwrap_or_default();
    let is_complete = page["complete"].as_bool().unwrap_or_default();
    if total == 0 && is_complete {
        return Ok(());
    }
    let shown = list(page, "records").len() as u64;
    let states: Vec<_> = page["totals"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(state, count)| format!("{count} {}", paint_word(&printable(state, false))))
        .collect();
    let least = if is_complete { "" } else { "at least " };
    let newest = if shown < total { format!(", the newest {shown} are shown") } else { String::new() };
    let records = if total == 1 { "record" } else { "records" };
    writeln!(out, "{least}{total} {records} ({}){newest}", states.join(", "))?;
    if !is_complete {
        writeln!(
            out,
            "the store has more records than could be read in time; filter them (--state, --operation), or read all of them with \
             --order record"
        )?;
    }
    Ok(())
}

fn rows(page: &Value, out: &mut impl Write) -> Printed {
    let records = list(page, "records");
    let mut rows = vec![
        ["STATE", "AGE", "SINCE", "EXPIRES IN", "ATTEMPTS", "CALLER", "OPERATION", "RECORD"]
            .map(str::to_owned),
    ];
    rows.extend(records.iter().map(|record| {
        [
            text(&record["state"]),
            age(record),
            text(&record["changed_at"]),
            rounded_duration_text(Duration::from_secs(
                record["expires_in_seconds"].as_u64().unwrap_or_default(),
            )),
            text(&record["attempts"]),
            text(&record["caller"]),
            text(&record["operation"]),
            text(&record["record"]),
        ]
    }));
    if records.is_empty() {
        let has_others = !list(page, "unreadable").is_empty();
        writeln!(out, "{}", if has_others { "no records that can be read" } else { "no records" })?;
    } else {
        table(&rows, out)?;
    }
    for record in list(page, "unreadable") {
        writeln!(out, "cannot be read: {}", text(record))?;
    }
    Ok(())
}

/// The time since a record or a message came into its state.
pub(crate) fn age(record: &Value) -> String {
    rounded_duration_text(Duration::from_secs(record["age_seconds"].as_u64().unwrap_or_default()))
}

/// A record in one line.
pub(super) fn summary(view: &Value) -> String {
    let [record, state, operation] = ["record", "state", "operation"].map(|name| text(&view[name]));
    format!("{operation}: {state} for {}, record {record}", age(view))
}

/// Prints a record. `flags` select the sidecar in the proposed commands.
pub(super) fn record(view: &Value, flags: &str, as_json: bool, out: &mut impl Write) -> Printed {
    if as_json {
        return json(view, out);
    }
    let fields = [
        ("record", "record"),
        ("state", "state"),
        ("operation", "operation"),
        ("caller", "caller"),
        ("key tag", "key_tag"),
        ("attempts", "attempts"),
        ("token", "token"),
        ("created", "created_at"),
        ("changed", "changed_at"),
        ("expires", "expires_at"),
        ("lease until", "lease_until"),
        ("after abandoned", "after_abandoned"),
    ];
    for (name, member) in fields {
        // A member that is false is the normal case, and not shown.
        if !view[member].is_null() && view[member] != Value::Bool(false) {
            field(name, member, view, out)?;
        }
        if member == "state" && view["by_operator"] == true {
            let name = if view["state"] == "unknown" { "parked by" } else { "resolved by" };
            writeln!(out, "{name:<16}an operator")?;
        }
    }
    for step in list(view, "steps") {
        write!(out, "{:<16}{}, {} bytes", "step", text(&step["name"]), text(&step["result_bytes"]))?;
        match (&step["result"], &step["result_base64"]) {
            (Value::Null, Value::Null) => writeln!(out)?,
            (Value::Null, coded) => writeln!(out, ", in base64: {}", text(coded))?,
            (result, _) => writeln!(out, ": {}", text(result))?,
        }
    }
    if let Some(key) = view["sealed_with"].as_str() {
        writeln!(out, "{:<16}the key {}", "sealed with", printable(key, false))?;
    }
    if let Some(why) = view["seal_refused"].as_str() {
        writeln!(out, "{:<16}{}", "not opened", printable(why, false))?;
    }
    let response = &view["response"];
    if let Some(bytes) = response["sealed_bytes"].as_u64() {
        writeln!(out, "{:<16}sealed, {bytes} bytes", "response")?;
    } else if !response.is_null() {
        writeln!(
            out,
            "{:<16}{}, {} bytes",
            "response",
            text(&response["status"]),
            text(&response["body_bytes"])
        )?;
        for (name, member) in [("header", "headers"), ("trailer", "trailers")] {
            for field in list(response, member) {
                writeln!(out, "{name:<16}{}: {}", text(&field[0]), text(&field[1]))?;
            }
        }
        if let Some(body) = response["body"].as_str() {
            writeln!(out, "\n{}", printable(body, true))?;
        }
        if let Some(coded) = response["body_base64"].as_str() {
            writeln!(out, "\nThe body is not text; in base64:\n{coded}")?;
        }
    }
    if let Some(advice) = advice(view, flags) {
        writeln!(out, "\n{advice}")?;
    }
    Ok(())
}

/// The advice for the record of a request that was only observed.
const SHADOW_ADVICE: &str = "Its route only observes (shadow): its requests passed to the service, and a retry passes again. This record protects nothing, and \
     needs no operator.";

/// Returns true for the record of a request that was only observed.
fn is_shadow(view: &Value) -> bool {
    view["operation"].as_str().is_some_and(|operation| operation.starts_with(SHADOW_OPERATION))
}

/// Advice for a record that waits for an operator.
fn advice(view: &Value, flags: &str) -> Option<String> {
    if is_shadow(view) {
        return Some(SHADOW_ADVICE.to_owned());
    }
    let record = text(&view["record"]);
    let (known, released) = if view["steps"].is_null() {
        ("It is not known whether this took effect.", "It did not take place, and the next request executes")
    } else {
        (
            "Its steps took place; it is not known whether the next one did.",
            "An attempt may go on after its last step",
        )
    };
    let park = format!("oncegate keys park{flags} {record} --reason \"…\"");
    let amend = format!("oncegate keys resolve{flags} {record} --amend");
    let response =
        "--status 201 --header 'Content-Type: application/json' --body @response.json --reason \"…\"";
    match (view["state"].as_str()?, view["by_operator"] == true) {
        ("completed" | "tombstone", true) => Some(format!(
            "An operator resolved it, and clients may have got this response. If it is wrong:\n\n\
             # Retries are refused again until an operator resolves it:\n\
             {park}\n\
             # Retries get another response:\n\
             {amend} {response}\n\
             # {released}:\n\
             {amend} --released --reason \"…\""
        )),
        ("released", true) => Some(format!(
            "An operator released the key: the next request with it executes. If that is wrong:\n\n\
             # Nothing executes until an operator resolves it:\n\
             {park}\n\
             # It took place, and retries get this response:\n\
             {amend} {response}"
        )),
        ("released", false) => Some(format!(
            "The next request with the key executes.\n\n\
             # Nothing executes until an operator resolves it:\n\
             {park}"
        )),
        ("unknown" | "abandoned", _) => Some(format!(
            "{known} Find out, and then resolve it.\n\n\
             # It took place, and retries get this response:\n\
             oncegate keys resolve{flags} {record} {response}\n\
             # It took place, and its response is lost:\n\
             oncegate keys resolve{flags} {record} --tombstone --reason \"…\"\n\
             # {released}:\n\
             oncegate keys resolve{flags} {record} --released --reason \"…\""
        )),
        _ => None,
    }
}

/// Prints the records of a key. `flags` select the sidecar in the proposed command.
pub(super) fn found(page: &Value, flags: &str, as_json: bool, out: &mut impl Write) -> Printed {
    if as_json {
        return json(page, out);
    }
    rows(page, out)?;
    if !page["next"].is_null() {
        writeln!(out, "there are more records than these")?;
    }
    if list(page, "records").iter().any(is_shadow) {
        writeln!(
            out,
            "records of (shadow) operations protect nothing, and need no operator, whatever their state is"
        )?;
    }
    writeln!(
        out,
        "found by a short hash of the key, which another key may share: check a record with `oncegate keys show{flags} RECORD`"
    )?;
    Ok(())
}

pub(super) fn resolved(view: &Value, as_json: bool, out: &mut impl Write) -> Printed {
    if as_json {
        return json(view, out);
    }
    let (record, from, to) = (text(&view["record"]), text(&view["from"]), text(&view["state"]));
    Ok(writeln!(out, "{record}: {} → {}", paint_word(&from), paint_word(&to))?)
}

/// Prints a record that was not changed, for programs. The words of the failure are on the standard error.
pub(super) fn not_changed(record: &str, failure: &Failure, as_json: bool, out: &mut impl Write) -> Printed {
    if as_json { json(&json!({"record": record, "error": failure.to_string()}), out) } else { Ok(()) }
}

pub(super) fn audit(view: &Value, as_json: bool, out: &mut impl Write) -> Printed {
    let columns = [
        ("NUMBER", "number"),
        ("WHEN", "at"),
        ("WHO", "actor"),
        ("FROM", "from"),
        ("TO", "to"),
        ("RECORD", "record"),
        ("WHY", "reason"),
    ];
    trail(view, &columns, as_json, out)
}

/// Prints an audit trail: columns with their members.
pub(crate) fn trail<const N: usize>(
    view: &Value,
    columns: &[(&str, &str); N],
    as_json: bool,
    out: &mut impl Write,
) -> Printed {
    if as_json {
        return json(view, out);
    }
    let entries = list(view, "entries");
    let mut rows = vec![columns.map(|(title, _)| title.to_owned())];
    rows.extend(entries.iter().map(|entry| columns.map(|(_, member)| text(&entry[member]))));
    if entries.is_empty() {
        writeln!(out, "no entries")?;
    } else {
        table(&rows, out)?;
    }
    if !view["next"].is_null() {
        writeln!(out, "there are more: --before {}", view["next"])?;
    }
    Ok(())
}

/// The items of a member that is an array.
pub(crate) fn list<'a>(view: &'a Value, name: &str) -> &'a [Value] {
    view[name].as_array().map_or(&[][..], Vec::as_slice)
}

/// Prints a member with its name. A state has its colour.
pub(crate) fn field(name: &str, member: &str, view: &Value, out: &mut impl Write) -> Printed {
    let text = text(&view[member]);
    Ok(writeln!(out, "{name:<16}{}", if member == "state" { paint_word(&text) } else { text })?)
}

/// Prints columns as wide as their widest text, with two spaces between them. On a terminal, states have their colours, and the
/// first row is the title.
pub(crate) fn table<const N: usize>(rows: &[[String; N]], out: &mut impl Write) -> Printed {
    let mut widths = [0; N];
    for row in rows {
        for (width, text) in widths.iter_mut().zip(row) {
            *width = (*width).max(text.chars().count());
        }
    }
    for (at, row) in rows.iter().enumerate() {
        let mut line = String::new();
        let filled = row.iter().rposition(|text| !text.is_empty()).map_or(0, |last| last + 1);
        for (column, (width, text)) in widths.iter().zip(row).take(filled).enumerate() {
            // Nothing after the last text.
            let width = if column + 1 == filled { 0 } else { *width };
            let padded = format!("{text:<width$}");
            line.push_str(if column == 0 { "" } else { "  " });
            line.push_str(&if at == 0 { paint(Tone::Title, &padded) } else { paint_word(&padded) });
        }
        writeln!(out, "{line}")?;
    }
    Ok(())
}

/// A member as text for a terminal.
pub(crate) fn text(value: &Value) -> String {
    match value {
        Value::String(text) => printable(text, false),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// Escapes control characters, and the marks that change the direction of text, so that text from clients and services cannot
/// control the operator's terminal or show something else than it says.
pub(crate) fn printable(text: &str, with_lines: bool) -> String {
    let mut printable = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '\n' | '\t' if with_lines => printable.push(char),
            char if char.is_control() || is_direction_mark(char) => printable.extend(char.escape_default()),
            char => printable.push(char),
        }
    }
    printable
}

/// Returns true for the marks, embeddings, overrides and isolates of the Unicode bidirectional algorithm.
fn is_direction_mark(char: char) -> bool {
    matches!(char, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{advice, found, printable};

    #[test]
    fn a_record_of_an_observed_request_is_not_one_for_an_operator() {
        let view = json!({"operation": "(shadow) POST /pay", "state": "abandoned", "by_operator": false, "record": "aa"});
        let words = advice(&view, "").unwrap();
        assert!(words.contains("needs no operator") && !words.contains("keys resolve"), "{words}");
        let own =
            json!({"operation": "POST /pay", "state": "abandoned", "by_operator": false, "record": "aa"});
        assert!(advice(&own, "").unwrap().contains("keys resolve"));
        for (view, is_noted) in [(view, true), (own, false)] {
            let mut out = Vec::new();
            found(&json!({"records": [view], "next": null}), "", false, &mut out).unwrap();
            assert_eq!(String::from_utf8(out).unwrap().contains("need no operator"), is_noted);
        }
    }

    #[test]
    fn characters_that_control_a_terminal_are_escaped() {
        assert_eq!(printable("a\u{9b}\u{202e}\u{2066}é\n", false), "a\\u{9b}\\u{202e}\\u{2066}é\\n");
        assert_eq!(printable("a\n\u{200f}", true), "a\n\\u{200f}");
    }
}
