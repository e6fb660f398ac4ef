//! Prints dead letters and messages of the outbox for people.

use std::io::Write;
use std::time::Duration;

use oncegate_postgres::messages::OutboxState;
use serde_json::Value;

use super::is_missing;
use crate::config::rounded_duration_text;
use crate::keys::print::{Printed, age, json, printable, table, text};
use crate::style::{Tone, cut, paint, paint_word, terminal_width};

/// The columns for an error in a listing, if the output is no terminal.
const ERROR_WIDTH: usize = 80;

/// The fewest columns for an error.
const MIN_ERROR_WIDTH: usize = 16;

pub(super) fn dead_letters(page: &Value, as_json: bool, out: &mut impl Write) -> Printed {
    if as_json {
        return json(page, out);
    }
    let letters = list(page, "dead_letters");
    let mut rows = vec![
        ["NUMBER", "AGE", "CONSUMER", "TOPIC", "REASON", "ATTEMPTS", "BYTES", "ERROR"].map(str::to_owned),
    ];
    rows.extend(letters.iter().map(|letter| {
        [
            text(&letter["number"]),
            age(letter),
            text(&letter["consumer"]),
            text(&letter["topic"]),
            text(&letter["reason"]),
            text(&letter["attempts"]),
            text(&letter["payload_bytes"]),
            text(&letter["error"]),
        ]
    }));
    if letters.is_empty() {
        writeln!(out, "no dead letters")?;
    } else {
        cut_last(&mut rows);
        table(&rows, out)?;
    }
    if !page["next"].is_null() {
        writeln!(out, "there may be more: --before {}", page["next"])?;
    }
    if page["totals"].is_null() {
        writeln!(out, "there are so many dead letters that they could not be counted in time")?;
    }
    let totals = list(page, "totals");
    let sum: u64 = totals.iter().filter_map(|total| total["count"].as_u64()).sum();
    if sum > letters.len() as u64 {
        writeln!(out, "\n{sum} dead letters in all:")?;
        for total in totals {
            writeln!(
                out,
                "{:>7}  {} from {}: {}, {} to {}",
                text(&total["count"]),
                text(&total["consumer"]),
                text(&total["topic"]),
                text(&total["reason"]),
                text(&total["oldest"]),
                text(&total["newest"])
            )?;
        }
    }
    Ok(())
}

pub(super) fn dead_letter(view: &Value, flags: &str, as_json: bool, out: &mut impl Write) -> Printed {
    if as_json {
        return json(view, out);
    }
    let fields = [
        ("dead letter", "number"),
        ("consumer", "consumer"),
        ("topic", "topic"),
        ("reason", "reason"),
        ("attempts", "attempts"),
        ("error", "error"),
        ("since", "at"),
        ("receipt", "record"),
        ("not opened", "seal_refused"),
        ("identity", "identity"),
        ("broker id", "broker_id"),
        ("order key", "order_key"),
        ("order key", "order_key_base64"),
    ];
    print_fields(view, &fields, out)?;
    content(view, out)?;
    let number = text(&view["number"]);
    let obstacles = list(view, "obstacles");
    let mut accept = String::new();
    let mut is_possible = true;
    if !obstacles.is_empty() {
        writeln!(out, "\nAgainst publishing it again:")?;
    }
    for obstacle in obstacles {
        let name = text(&obstacle["name"]);
        writeln!(out, "- {}: {}", paint(Tone::Alarm, &name), text(&obstacle["text"]))?;
        if obstacle["acceptable"] == true {
            accept.push_str(&format!(" --accept {name}"));
        } else {
            is_possible = false;
        }
    }
    if is_possible {
        let comment = if accept.is_empty() {
            "Publish it again, through the outbox; a relay must run"
        } else {
            "If you have checked that, publish it again, through the outbox"
        };
        writeln!(
            out,
            "\n# {comment}:\noncegate dead-letters requeue{flags} {number}{accept} --reason \"…\""
        )?;
    } else {
        writeln!(out)?;
    }
    writeln!(
        out,
        "# Delete it, with its payload:\noncegate dead-letters drop{flags} {number} --reason \"…\""
    )?;
    Ok(())
}

pub(super) fn dead_letter_summary(view: &Value) -> String {
    format!(
        "dead letter {}: {} from {}, {} for {}: {}",
        text(&view["number"]),
        text(&view["consumer"]),
        text(&view["topic"]),
        text(&view["reason"]),
        age(view),
        text(&view["error"])
    )
}

pub(super) fn outbox(
    page: &Value,
    only: Option<OutboxState>,
    as_json: bool,
    out: &mut impl Write,
) -> Printed {
    if as_json {
        return json(page, out);
    }
    let messages = list(page, "messages");
    let mut rows = vec![
        ["NUMBER", "STATE", "AGE", "TOPIC", "ORDER KEY", "ATTEMPTS", "BYTES", "ERROR"].map(str::to_owned),
    ];
    rows.extend(messages.iter().map(|message| {
        let order_key = if is_missing(&message["order_key"]) { "order_key_base64" } else { "order_key" };
        let blocks = if message["blocks_key"] == true { " (blocked)" } else { "" };
        [
            text(&message["seq"]),
            text(&message["state"]),
            age(message),
            text(&message["topic"]),
            format!("{}{blocks}", cut(&text(&message[order_key]), 24)),
            text(&message["attempts"]),
            text(&message["payload_bytes"]),
            text(&message["error"]),
        ]
    }));
    if messages.is_empty() {
        let state = only.map_or_else(String::new, |state| format!("{} ", state.as_str()));
        writeln!(out, "no {state}messages")?;
    } else {
        cut_last(&mut rows);
        table(&rows, out)?;
    }
    if !page["next"].is_null() {
        writeln!(out, "there may be more: --after {}", page["next"])?;
    }
    let status = &page["status"];
    if status.is_null() {
        writeln!(out, "the outbox has so many messages that they could not be counted in time")?;
        return Ok(());
    }
    let oldest = status["oldest_seconds"]
        .as_u64()
        .map(|seconds| format!(", the oldest for {}", rounded_duration_text(Duration::from_secs(seconds))));
    writeln!(
        out,
        "the outbox: {} waiting{}, {} of them failing; {} refused",
        text(&status["waiting"]),
        oldest.unwrap_or_default(),
        text(&status["failing"]),
        text(&status["refused"])
    )?;
    Ok(())
}

pub(super) fn outbox_message(view: &Value, flags: &str, as_json: bool, out: &mut impl Write) -> Printed {
    if as_json {
        return json(view, out);
    }
    let fields = [
        ("message", "seq"),
        ("state", "state"),
        ("identifier", "id"),
        ("topic", "topic"),
        ("order key", "order_key"),
        ("order key", "order_key_base64"),
        ("attempts", "attempts"),
        ("error", "error"),
        ("sent", "created_at"),
        ("refused", "refused_at"),
    ];
    print_fields(view, &fields, out)?;
    content(view, out)?;
    let seq = text(&view["seq"]);
    match view["state"].as_str() {
        Some("refused") => {
            if view["blocks_key"] == true {
                writeln!(out, "\nMessages with its topic and order key wait behind it.")?;
            }
            writeln!(
                out,
                "\n# Once the broker would accept it:\noncegate outbox requeue{flags} {seq} --reason \"…\"\n\
                 # Never publish it; those behind it go on:\noncegate outbox drop{flags} {seq} --reason \"…\""
            )?;
        }
        _ if view["held"] == true => writeln!(out, "\nA relay publishes it now.")?,
        Some("failing") => writeln!(out, "\nA relay tries it again by itself.")?,
        _ => writeln!(out, "\nA relay publishes it as soon as it can. If none runs, it waits.")?,
    }
    Ok(())
}

pub(super) fn outbox_summary(view: &Value) -> String {
    format!(
        "message {}: {} to {} for {}: {}",
        text(&view["seq"]),
        text(&view["state"]),
        text(&view["topic"]),
        age(view),
        text(&view["error"])
    )
}

/// Prints a change. With JSON, one line each.
pub(super) fn changed(number: u64, done: &Value, as_json: bool, out: &mut impl Write) -> Printed {
    if as_json {
        return super::wrote(writeln!(out, "{done}"));
    }
    let id =
        done["message_id"].as_str().map(|id| format!(", as message {} of the outbox", printable(id, false)));
    let outcome = paint_word(&text(&done["outcome"]));
    super::wrote(writeln!(out, "{number}: {outcome}{}", id.unwrap_or_default()))
}

pub(super) fn audit(view: &Value, as_json: bool, out: &mut impl Write) -> Printed {
    if as_json {
        return json(view, out);
    }
    let entries = list(view, "entries");
    let mut rows =
        vec![["NUMBER", "WHEN", "WHO", "KIND", "MESSAGE", "WHAT", "TOPIC", "WHY"].map(str::to_owned)];
    rows.extend(entries.iter().map(|entry| {
        ["number", "at", "actor", "kind", "message", "action", "topic", "reason"]
            .map(|name| text(&entry[name]))
    }));
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

fn print_fields(view: &Value, fields: &[(&str, &str)], out: &mut impl Write) -> Printed {
    for (name, member) in fields.iter().filter(|(_, member)| !is_missing(&view[*member])) {
        let text = text(&view[*member]);
        writeln!(out, "{name:<16}{}", if *name == "state" { paint_word(&text) } else { text })?;
    }
    Ok(())
}

/// The headers, and the payload if it was asked for.
fn content(view: &Value, out: &mut impl Write) -> Printed {
    for header in list(view, "headers") {
        let name = text(&header["name"]);
        let value = match (header["value"].as_str(), header["value_base64"].as_str()) {
            (Some(value), _) => format!(": {}", printable(value, false)),
            (None, Some(coded)) => format!(", in base64: {coded}"),
            (None, None) => format!(", {} bytes", text(&header["value_bytes"])),
        };
        writeln!(out, "{:<16}{name}{value}", "header")?;
    }
    writeln!(out, "{:<16}{} bytes", "payload", text(&view["payload_bytes"]))?;
    if let Some(payload) = view["payload"].as_str() {
        writeln!(out, "\n{}", printable(payload, true))?;
    }
    if let Some(coded) = view["payload_base64"].as_str() {
        writeln!(out, "\nThe payload is not text; in base64:\n{coded}")?;
    }
    Ok(())
}

/// Cuts the texts in the last column so that each row fits into one line.
fn cut_last<const N: usize>(rows: &mut [[String; N]]) {
    let before: usize = (0..N.saturating_sub(1))
        .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0) + 2)
        .sum();
    let width =
        terminal_width().map_or(ERROR_WIDTH, |width| width.saturating_sub(before).max(MIN_ERROR_WIDTH));
    for row in rows {
        if let Some(last) = row.last_mut() {
            *last = cut(last, width);
        }
    }
}

fn list<'a>(view: &'a Value, name: &str) -> &'a [Value] {
    view[name].as_array().map_or(&[][..], Vec::as_slice)
}
