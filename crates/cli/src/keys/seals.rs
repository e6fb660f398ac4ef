//! `oncegate seal-key usage`: the records, dead letters and buffered events of a store, counted by the key that sealed them.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::print::printable;
use super::{Access, Failure, escaped};
use crate::config::rounded_duration_text;

/// The pause between two pages, so that a large store has time for its requests.
const PAUSE: Duration = Duration::from_millis(20);

/// Counts the records of a store by the key that sealed them, and the dead letters and buffered events of its database.
#[derive(Args, Debug)]
pub(crate) struct SealUsageArgs {
    #[command(flatten)]
    access: Access,
}

/// The records and messages of one key.
#[derive(Clone, Debug, Default)]
struct Usage {
    dead_letters: u64,
    buffered_events: u64,
    records: u64,
    /// Empty without records.
    last_expires_at: String,
    last_expires_in_seconds: u64,
}

impl Usage {
    fn add(&mut self, page: &Value) {
        self.records += page["records"].as_u64().unwrap_or_default();
        let at = page["last_expires_at"].as_str().unwrap_or_default();
        // Both have the form of RFC 3339 in UTC, so that the later one is the greater text.
        if page["records"] != 0 && at > self.last_expires_at.as_str() {
            at.clone_into(&mut self.last_expires_at);
            self.last_expires_in_seconds = page["last_expires_in_seconds"].as_u64().unwrap_or_default();
        }
    }

    fn json(&self) -> Value {
        let end = Some(&self.last_expires_at).filter(|end| !end.is_empty());
        json!({
            "records": self.records, "last_expires_at": end, "dead_letters": self.dead_letters,
            "buffered_events": self.buffered_events,
        })
    }

    /// The messages in words; `None` if there are none.
    fn messages(&self) -> Option<String> {
        let some =
            [counted(self.dead_letters, "dead letter"), counted(self.buffered_events, "buffered event")];
        let some: Vec<_> = some.into_iter().flatten().collect();
        if some.is_empty() { None } else { Some(some.join(" and ")) }
    }

    fn end(&self) -> String {
        let time = rounded_duration_text(Duration::from_secs(self.last_expires_in_seconds));
        format!("{}, in {time}", self.last_expires_at)
    }
}

fn counted(count: u64, what: &str) -> Option<String> {
    match count {
        0 => None,
        1 => Some(format!("1 {what}")),
        count => Some(format!("{count} {what}s")),
    }
}

pub(super) async fn execute(
    args: &SealUsageArgs,
    env: impl Fn(&str) -> Option<String>,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let client = args.access.client(env)?;
    let known = client.get("/v1/seal").await?;
    let mut by_key: BTreeMap<String, Usage> = BTreeMap::new();
    let mut clear = Usage::default();
    let mut unreadable = 0;
    let mut cursor: Option<String> = None;
    loop {
        let query = cursor.as_deref().map_or_else(String::new, |at| format!("?cursor={}", escaped(at)));
        let page = client.get(&format!("/v1/seal/usage{query}")).await?;
        for (key, usage) in page["sealed"].as_object().into_iter().flatten() {
            by_key.entry(key.clone()).or_default().add(usage);
        }
        clear.add(&page["clear"]);
        unreadable += page["unreadable"].as_u64().unwrap_or_default();
        cursor = page["next"].as_str().map(str::to_owned);
        if cursor.is_none() {
            break;
        }
        tokio::time::sleep(PAUSE).await;
    }
    let not_counted = match client.get("/v1/seal/messages").await {
        Ok(messages) => {
            for (key, count) in messages["dead_letters"]["sealed"].as_object().into_iter().flatten() {
                by_key.entry(key.clone()).or_default().dead_letters =
                    count["count"].as_u64().unwrap_or_default();
            }
            for (key, count) in messages["buffered_events"]["sealed"].as_object().into_iter().flatten() {
                by_key.entry(key.clone()).or_default().buffered_events =
                    count["count"].as_u64().unwrap_or_default();
            }
            clear.dead_letters = messages["dead_letters"]["clear"].as_u64().unwrap_or_default();
            clear.buffered_events = messages["buffered_events"]["clear"].as_u64().unwrap_or_default();
            messages["not_counted"].as_str().map(str::to_owned)
        }
        // A sidecar of an earlier version.
        Err(Failure::Refused(why)) => Some(why),
        Err(failure) => return Err(failure),
    };
    let keys: Vec<(String, bool)> = known["keys"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|key| (key["id"].as_str().unwrap_or_default().to_owned(), key["seals"] == true))
        .collect();
    for (id, _) in &keys {
        by_key.entry(id.clone()).or_default();
    }
    if args.access.json {
        let sealed: serde_json::Map<_, _> =
            by_key.iter().map(|(key, usage)| (key.clone(), usage.json())).collect();
        let report = json!({ "keys": known["keys"], "sealed": sealed, "clear": clear.json(), "unreadable": unreadable, "messages_not_counted": not_counted });
        writeln!(out, "{report}")?;
        return Ok(());
    }
    print(&keys, &by_key, &clear, unreadable, out)?;
    if let Some(why) = not_counted {
        writeln!(
            out,
            "dead letters and buffered events were NOT counted, so no key may be removed yet: {}",
            printable(&why, false)
        )?;
    }
    Ok(())
}

fn print(
    keys: &[(String, bool)],
    by_key: &BTreeMap<String, Usage>,
    clear: &Usage,
    unreadable: u64,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let records = |count: u64| if count == 1 { "1 record".to_owned() } else { format!("{count} records") };
    for (key, usage) in by_key {
        let mut count = records(usage.records);
        let messages = usage.messages();
        if let Some(messages) = &messages {
            count = format!("{count}, {messages}");
        }
        let line = match (keys.iter().find(|(id, _)| id == key), usage.records) {
            (None, 0) => format!(
                "{count}; this sidecar does NOT have the key, so they cannot be opened until it is added"
            ),
            (None, _) => format!(
                "{count}; this sidecar does NOT have the key: their retries are refused until it is added, or until {}",
                usage.end()
            ),
            (Some((_, true)), _) => format!("{count}; it seals new records"),
            (Some(_), _) if messages.is_some() => format!(
                "{count}; it opens. It must stay until they are gone: no reseal reaches dead letters and buffered events"
            ),
            (Some(_), 0) => {
                "no records; it may be removed if no sidecar on this store seals with it any more".to_owned()
            }
            (Some(_), _) => format!(
                "{count}; it opens. It may be removed after {}, if no sidecar seals with it any more",
                usage.end()
            ),
        };
        writeln!(out, "{key}  {line}")?;
    }
    if clear.records > 0 {
        writeln!(
            out,
            "in clear          {}; the last retention ends at {}",
            records(clear.records),
            clear.end()
        )?;
    }
    if let Some(messages) = clear.messages() {
        writeln!(out, "in clear          {messages}")?;
    }
    if by_key.is_empty() && clear.records == 0 && clear.messages().is_none() {
        writeln!(out, "no seal keys, and no stored responses")?;
    }
    if unreadable > 0 {
        writeln!(out, "{} cannot be read and were not counted", records(unreadable))?;
    }
    Ok(())
}
