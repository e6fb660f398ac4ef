//! `oncegate reseal` and `oncegate forget`: walks through the store of a running sidecar that change the content of records.
//! `reseal` also walks through the directory of an embedded store that no process has open.

use std::fs;
use std::io::{self, IsTerminal as _, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use oncegate_core::{ErrorChain, StoreError};
use oncegate_embedded::{EmbeddedOpenError, EmbeddedOptions, EmbeddedStore, segment_files};
use oncegate_seal::{Keyring, SealedStore};
use rustix::process::geteuid;
use serde_json::{Map, Value, json};

use super::client::Client;
use super::{Access, AuditArgs, Confirm, Failure, escaped, print};
use crate::admin::reseal_opened;
use crate::config::{parse_seal_keys, seal_keys_in};

/// The least pause between two pages, so that a large store has time for its requests.
const MIN_PAUSE: Duration = Duration::from_millis(20);

/// The pause between two questions if a compaction has ended.
const COMPACTION_PAUSE: Duration = Duration::from_millis(100);

/// The interval of lines about the progress, on a terminal.
const PROGRESS: Duration = Duration::from_secs(5);

/// The most records of a page.
const MAX_PAGE: u32 = 100;

/// The fewest and the most records that may be changed in a second.
const RATES: std::ops::RangeInclusive<u32> = 1..=10_000;

/// The pace of a walk, and the place where it begins.
#[derive(Args, Debug)]
#[command(next_help_heading = "The walk")]
struct Walk {
    /// The most records to change in a second, from 1 to 10000
    #[arg(long, value_name = "N", default_value_t = 500)]
    rate: u32,
    /// Begins here instead of at the beginning of the store: the cursor that an interrupted run printed
    #[arg(long, value_name = "CURSOR")]
    cursor: Option<String>,
}

/// Seals the records of a running sidecar's store anew, with the key that seals now, or those of a directory.
#[derive(Args, Debug)]
pub(crate) struct ResealArgs {
    #[command(flatten)]
    access: Access,
    /// Instead of a running sidecar: the directory of an embedded store that no process has open. Run this as the user that the
    /// sidecar runs as
    #[arg(long, value_name = "DIR", conflicts_with = "admin", help_heading = "A directory")]
    store: Option<PathBuf>,
    /// With --store: the seal keys, of which the first one seals [env: ONCEGATE_SEAL_KEYS, which has the keys themselves]
    #[arg(long, value_name = "FILE", requires = "store", help_heading = "A directory")]
    seal_keys_file: Option<PathBuf>,
    #[command(flatten)]
    walk: Walk,
    /// Also seals what is in clear. Programs that read records of the store themselves, such as those that use `transact`, need
    /// the keys before: without them they refuse sealed results
    #[arg(long)]
    seal_clear: bool,
    /// Changes nothing, and prints what would be done
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    log: Log,
}

/// The log of an embedded store.
#[derive(Args, Debug)]
struct Log {
    /// For an embedded store: then also removes the older versions of all records from its log, which has them until their
    /// part of it is compacted otherwise. Takes space on the disk for one copy of the records, for a while
    #[arg(long, conflicts_with = "dry_run")]
    compact: bool,
}

/// The store whose records are sealed anew.
enum ResealStore {
    Sidecar(Client),
    /// A directory that this process has open.
    Directory {
        store: Arc<EmbeddedStore>,
        seal: SealedStore,
    },
}

impl ResealArgs {
    /// Opens the directory, or finds the sidecar.
    fn open(&self, env: impl Fn(&str) -> Option<String>) -> Result<ResealStore, Failure> {
        let Some(dir) = &self.store else { return Ok(ResealStore::Sidecar(self.access.client(env)?)) };
        let keys = self.seal_keys(env)?;
        // Else an empty store would be made there.
        if segment_files(dir).map_or(true, |files| files.is_empty()) {
            return Err(Failure::Refused(format!("{}: there is no store", dir.display())));
        }
        let about =
            fs::metadata(dir).map_err(|error| Failure::Refused(format!("{}: {error}", dir.display())))?;
        let (owner, own) = (about.uid(), geteuid().as_raw());
        if owner != own {
            return Err(Failure::Refused(format!(
                "{}: belongs to the user {owner}, and this process runs as {own}: the sidecar could not read the files that it \
                 writes. Run it as that user, or start the sidecar and leave out --store",
                dir.display()
            )));
        }
        let opened = EmbeddedStore::open(EmbeddedOptions::new(dir));
        let store = Arc::new(opened.map_err(|error| {
            let hint = match error {
                EmbeddedOpenError::InUse { .. } => ". Ask that process: leave out --store",
                _ => "",
            };
            Failure::Refused(format!("{}{hint}", ErrorChain(&error)))
        })?);
        Ok(ResealStore::Directory { seal: SealedStore::new(store.clone(), keys).without_steps(), store })
    }

    fn seal_keys(&self, env: impl Fn(&str) -> Option<String>) -> Result<Keyring, Failure> {
        if let Some(file) = &self.seal_keys_file {
            return seal_keys_in(file)
                .map_err(|why| Failure::Usage(format!("--seal-keys-file {}: {why}", file.display())));
        }
        let Some(text) = env("ONCEGATE_SEAL_KEYS").filter(|text| !text.is_empty()) else {
            return Err(Failure::Usage(
                "--store needs the seal keys: give --seal-keys-file FILE, or ONCEGATE_SEAL_KEYS".to_owned(),
            ));
        };
        parse_seal_keys(&text.replace(',', "\n"))
            .map_err(|why| Failure::Usage(format!("ONCEGATE_SEAL_KEYS: {why}")))
    }
}

impl ResealStore {
    /// Seals the records of one page anew.
    async fn reseal(&self, request: &Value) -> Result<Value, Failure> {
        match self {
            Self::Sidecar(client) => client.post("/v1/seal/reseal", request).await,
            Self::Directory { seal, .. } => {
                reseal_opened(seal, request.clone()).await.map_err(Failure::Refused)
            }
        }
    }

    /// Removes older versions from the log, if that is asked for, and waits until they are gone.
    async fn compact(&self, log: &Log) -> Result<bool, Failure> {
        let store = match self {
            Self::Sidecar(client) => return log.compact(client).await,
            Self::Directory { store, .. } => store,
        };
        if !log.compact {
            return Ok(false);
        }
        let failed = |error: StoreError| Failure::Refused(ErrorChain(&error).to_string());
        let below = store.begin_compaction().await.map_err(failed)?;
        while !store.is_compacted(below).map_err(failed)? {
            tokio::time::sleep(COMPACTION_PAUSE).await;
        }
        Ok(true)
    }

    /// The one that lacks a key.
    const fn holder(&self) -> &'static str {
        match self {
            Self::Sidecar(_) => "the sidecar does not have",
            Self::Directory { .. } => "was not given",
        }
    }

    /// Writes what was changed, and gives the directory back.
    fn close(&self) {
        if let Self::Directory { store, .. } = self {
            store.close();
        }
    }
}

impl Log {
    /// Checks that the sidecar has a log, before anything is changed.
    async fn check(&self, client: &Client) -> Result<(), Failure> {
        match self.compact {
            true => client.post("/v1/compact", &json!({ "below": 0 })).await.map(drop),
            false => Ok(()),
        }
    }

    /// Removes older versions, if that is asked for, and waits until they are gone.
    async fn compact(&self, client: &Client) -> Result<bool, Failure> {
        if !self.compact {
            return Ok(false);
        }
        loop {
            let begun = client.post("/v1/compact", &json!({})).await?;
            let mut state = begun.clone();
            while state["compacted"] != true {
                tokio::time::sleep(COMPACTION_PAUSE).await;
                state = client.post("/v1/compact", &json!({ "below": begun["below"] })).await?;
            }
            // One that ran already may have passed the versions that are older since now.
            if begun["begun"] != false {
                return Ok(true);
            }
        }
    }
}

/// Removes the stored responses and steps of a caller, and keeps their keys protected.
#[derive(Args, Debug)]
#[command(group = clap::ArgGroup::new("whose").required(true).args(["caller", "caller_fields", "record"]))]
pub(crate) struct ForgetArgs {
    #[command(flatten)]
    access: Access,
    #[command(flatten)]
    walk: Walk,
    /// The caller, by the tag in the column CALLER of a listing (`oncegate keys ls`)
    #[arg(long, value_name = "TAG")]
    caller: Option<String>,
    /// The caller, by the header fields that tell callers apart, such as "Authorization: Bearer …": reads them from this
    /// file, one per line; - is the standard input. Each cookie is a line of its own, such as "Cookie: sid=…". The sidecar makes
    /// the tag of them
    #[arg(long, value_name = "FILE")]
    caller_fields: Option<PathBuf>,
    /// One record only, as a listing or the log shows it, or a unique beginning of it
    #[arg(long, value_name = "RECORD")]
    record: Option<String>,
    /// Changes nothing, and prints what would be done
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    log: Log,
    #[command(flatten)]
    why: AuditArgs,
}

/// The sums of the pages of a walk.
#[derive(Default)]
struct Sums(Map<String, Value>);

impl Sums {
    /// Adds a page: numbers and objects of numbers are added, lists are joined, and the last text counts.
    fn add(&mut self, page: &Value) {
        for (name, value) in page.as_object().into_iter().flatten().filter(|(name, _)| *name != "next") {
            let before = self.0.entry(name.clone()).or_insert(Value::Null);
            match (&mut *before, value) {
                (Value::Array(all), Value::Array(more)) => all.extend(more.iter().cloned()),
                (Value::Object(all), Value::Object(more)) => {
                    for (name, count) in more {
                        let sum = all.get(name).and_then(Value::as_u64).unwrap_or_default();
                        all.insert(name.clone(), (sum + count.as_u64().unwrap_or_default()).into());
                    }
                }
                (Value::Number(sum), Value::Number(count)) => {
                    *before = (sum.as_u64().unwrap_or_default() + count.as_u64().unwrap_or_default()).into();
                }
                _ => *before = value.clone(),
            }
        }
    }

    /// The number, or the number of items, of this name.
    fn count(&self, name: &str) -> u64 {
        match self.0.get(name) {
            Some(Value::Array(items)) => items.len() as u64,
            Some(Value::Object(counts)) => counts.values().filter_map(Value::as_u64).sum(),
            Some(value) => value.as_u64().unwrap_or_default(),
            None => 0,
        }
    }
}

impl Walk {
    fn check(&self) -> Result<(), Failure> {
        if RATES.contains(&self.rate) {
            return Ok(());
        }
        let (least, most) = (RATES.start(), RATES.end());
        Err(Failure::Usage(format!("--rate {}: from {least} to {most} is allowed", self.rate)))
    }

    /// Sends a request for each page of the store, and adds up the responses. `changed` names the counts that took a write.
    async fn run(
        &self,
        ask: impl AsyncFn(&Value) -> Result<Value, Failure>,
        request: &Value,
        changed: &[&str],
    ) -> Result<Sums, Failure> {
        let mut sums = Sums::default();
        let mut cursor = self.cursor.clone();
        let mut told = Instant::now();
        loop {
            let begun = Instant::now();
            let mut body = request.clone();
            body["cursor"] = cursor.clone().into();
            body["limit"] = MAX_PAGE.min(self.rate).into();
            let before: u64 = changed.iter().map(|name| sums.count(name)).sum();
            let page = ask(&body).await.map_err(|failure| interrupted(failure, cursor.as_deref()))?;
            sums.add(&page);
            cursor = page["next"].as_str().map(str::to_owned);
            let done: u64 = changed.iter().map(|name| sums.count(name)).sum();
            if cursor.is_none() {
                return Ok(sums);
            }
            if told.elapsed() >= PROGRESS && io::stderr().is_terminal() {
                complain!("{done} records so far");
                told = Instant::now();
            }
            let pace = Duration::from_secs(done - before) / self.rate;
            tokio::time::sleep(pace.max(MIN_PAUSE).saturating_sub(begun.elapsed()).max(MIN_PAUSE)).await;
        }
    }
}

fn records(count: u64) -> String {
    if count == 1 { "1 record".to_owned() } else { format!("{count} records") }
}

/// The failure of a page, with the way to go on.
fn interrupted(failure: Failure, cursor: Option<&str>) -> Failure {
    let words = |words: String| match cursor {
        Some(cursor) => format!(
            "{words}; run the command again, which skips what is done, or go on with --cursor {cursor}"
        ),
        None => words,
    };
    match failure {
        Failure::Refused(text) => Failure::Refused(words(text)),
        Failure::Unreachable(text) => Failure::Unreachable(words(text)),
        failure => failure,
    }
}

pub(super) async fn reseal(
    args: &ResealArgs,
    env: impl Fn(&str) -> Option<String>,
    out: &mut impl Write,
) -> Result<(), Failure> {
    args.walk.check()?;
    let store = args.open(env)?;
    if let ResealStore::Sidecar(client) = &store {
        args.log.check(client).await?;
    }
    let request = json!({ "seal_clear": args.seal_clear, "dry_run": args.dry_run });
    let ask = async |body: &Value| store.reseal(body).await;
    let sums = args.walk.run(ask, &request, &["resealed", "clear_sealed"]).await;
    let sums = match sums {
        Ok(mut sums) => store.compact(&args.log).await.map(|is_compacted| {
            sums.0.insert("compacted".to_owned(), is_compacted.into());
            sums
        }),
        failed => failed,
    };
    store.close();
    let (sums, holder) = (sums?, store.holder());
    if args.access.json {
        writeln!(out, "{}", Value::Object(sums.0.clone()))?;
    } else {
        print_reseal(&sums, args.dry_run, holder, out)?;
    }
    let missing = format!("are sealed with keys that {holder}");
    let left: Vec<_> = [
        ("changed", "changed meanwhile"),
        ("locked", "are held by a transaction"),
        ("key_missing", missing.as_str()),
        ("broken", "have a broken seal"),
        ("too_large", "are too large in their new form"),
        ("unreadable", "cannot be read"),
    ]
    .into_iter()
    .filter(|(name, _)| sums.count(name) > 0)
    .map(|(name, what)| format!("{} {what}", records(sums.count(name))))
    .collect();
    if left.is_empty() || args.dry_run {
        return Ok(());
    }
    Err(Failure::Refused(format!(
        "not everything is sealed anew: {}; run the command again later",
        left.join(", ")
    )))
}

fn print_reseal(sums: &Sums, is_dry_run: bool, holder: &str, out: &mut impl Write) -> Result<(), Failure> {
    let key = sums.0.get("seals_with").and_then(Value::as_str).unwrap_or_default();
    let (done, sealed) = match is_dry_run {
        true => ("would be sealed anew", "in clear, would be sealed"),
        false => ("sealed anew", "in clear before, sealed now"),
    };
    writeln!(out, "with the key {key}:")?;
    for (name, what) in [
        ("resealed", done),
        ("up_to_date", "sealed with it already"),
        ("clear_sealed", sealed),
        ("clear", "in clear, left as they are (--seal-clear seals them)"),
        ("nothing_kept", "without a response and without steps"),
        ("expired", "expired meanwhile"),
        ("changed", "changed meanwhile: run this again"),
        ("locked", "held by a transaction: run this again"),
        ("broken", "with a broken seal: see docs/reference/admin.md, \"A record that cannot be read\""),
        ("too_large", "too large in their new form: they stay as they are until they expire"),
        ("unreadable", "cannot be read"),
    ] {
        let count = sums.count(name);
        if count > 0 || matches!(name, "resealed" | "up_to_date") {
            writeln!(out, "{count:>10}  {what}")?;
        }
    }
    for (key, count) in sums.0.get("key_missing").and_then(Value::as_object).into_iter().flatten() {
        writeln!(out, "{count:>10}  sealed with the key {key}, which {holder}: add it, and run this again")?;
    }
    if !is_dry_run {
        let in_store = in_store(sums);
        writeln!(
            out,
            "The old forms are still {in_store}in backups and copies, and for up to an hour in caches. `oncegate seal-key usage` shows \
             if a key is still needed. See docs/reference/sealing.md"
        )?;
    }
    Ok(())
}

/// The places in the store that have older versions.
fn in_store(sums: &Sums) -> &'static str {
    match sums.0.get("compacted").and_then(Value::as_bool) {
        Some(true) => "",
        _ => {
            "where the store keeps what was replaced (the log of a directory, unless --compact is given; dead rows and the write-ahead log \
             of PostgreSQL; the append-only file of Redis), "
        }
    }
}

pub(super) async fn forget(
    args: &ForgetArgs,
    env: impl Fn(&str) -> Option<String>,
    confirm: Option<Confirm<'_>>,
    out: &mut impl Write,
) -> Result<(), Failure> {
    args.walk.check()?;
    let client = args.access.client(&env)?;
    args.log.check(&client).await?;
    if let Some(record) = &args.record {
        return forget_one(args, record, &client, env, confirm, out).await;
    }
    let caller = args.tag(&client).await?;
    let mut request = Value::Object(args.why.json(&env));
    request["caller"] = caller.clone().into();
    request["dry_run"] = true.into();
    let ask = async |body: &Value| client.post("/v1/keys/forget", body).await;
    let asks = confirm.filter(|_| !args.why.yes);
    if args.dry_run || asks.is_some() {
        let sums = args.walk.run(&ask, &request, &[]).await?;
        let Some(confirm) = asks.filter(|_| !args.dry_run) else {
            return args.report(&caller, &sums, true, out);
        };
        let question = format!(
            "remove the responses and steps of {} of the caller {caller}? It cannot be undone; their keys stay protected [y/N] ",
            records(sums.count("forgotten"))
        );
        if !confirm(&question)? {
            return Err(Failure::Refused("not confirmed; nothing was changed".to_owned()));
        }
    }
    request["dry_run"] = false.into();
    let mut sums = args.walk.run(&ask, &request, &["forgotten"]).await?;
    let is_compacted = args.log.compact(&client).await?;
    sums.0.insert("compacted".to_owned(), is_compacted.into());
    args.report(&caller, &sums, false, out)
}

async fn forget_one(
    args: &ForgetArgs,
    record: &str,
    client: &Client,
    env: impl Fn(&str) -> Option<String>,
    confirm: Option<Confirm<'_>>,
    out: &mut impl Write,
) -> Result<(), Failure> {
    if args.dry_run {
        return Err(Failure::Usage(
            "--dry-run: `oncegate keys show RECORD` shows what one record keeps".to_owned(),
        ));
    }
    let question = "remove its response and its steps, which cannot be undone; its key stays protected";
    let given = [record.to_owned()];
    let records = super::confirmed(client, &given, confirm, args.why.yes, question).await?;
    let record = records.first().map_or(record, String::as_str);
    let path = format!("/v1/keys/{}/forget", escaped(record));
    let mut view = client.post(&path, &args.why.json(&env).into()).await?;
    let is_compacted = args.log.compact(client).await?;
    view["compacted"] = is_compacted.into();
    print::resolved(&view, args.access.json, out)?;
    if !args.access.json {
        let mut sums = Sums::default();
        sums.0.insert("compacted".to_owned(), is_compacted.into());
        writeln!(out, "{}", remains(&sums))?;
    }
    Ok(())
}

/// The places that a removal does not reach.
fn remains(sums: &Sums) -> String {
    format!(
        "Not reached: older versions {}in backups and copies, and in caches in the memory of other sidecars (an hour at most by default), and \
         what is no record: dead letters, the outbox, receipts. The audit trail keeps the identifiers of the records and your \
         reason. See docs/reference/admin.md",
        in_store(sums)
    )
}

impl ForgetArgs {
    /// The tag of the caller. The sidecar computes it, because it may have an id secret: a tag that is computed without the
    /// secret would match no record, and the caller would seem to be forgotten.
    async fn tag(&self, client: &Client) -> Result<String, Failure> {
        let Some(file) = &self.caller_fields else { return Ok(self.caller.clone().unwrap_or_default()) };
        let text = super::read_text("--caller-fields", file)?;
        let parts =
            parts_of_fields(&text).map_err(|what| Failure::Usage(format!("--caller-fields: {what}")))?;
        let answer = client.post("/v1/keys/tag", &json!({"caller": parts})).await?;
        let tag = answer["caller_tag"].as_str().map(str::to_owned);
        tag.ok_or_else(|| {
            Failure::Refused("the sidecar did not answer with the tag of the caller".to_owned())
        })
    }

    fn report(
        &self,
        caller: &str,
        sums: &Sums,
        is_dry_run: bool,
        out: &mut impl Write,
    ) -> Result<(), Failure> {
        if self.access.json {
            writeln!(out, "{}", Value::Object(sums.0.clone()))?;
        } else {
            print_forget(caller, sums, is_dry_run, out)?;
        }
        let left = sums.count("open") + sums.count("locked") + sums.count("unreadable");
        let of_caller =
            ["forgotten", "nothing_kept", "expired"].map(|name| sums.count(name)).iter().sum::<u64>();
        if left + of_caller == 0 {
            // A slip in the caller must not look like a deletion that was carried out.
            return Err(Failure::Refused(format!(
                "the store has no record of the caller {caller}. Are these the fields that tell callers apart (`scope`), all of them, \
                 and their whole values? `oncegate keys ls` shows the tags of callers"
            )));
        }
        if left == 0 || is_dry_run {
            return Ok(());
        }
        Err(Failure::Refused(format!(
            "{} of the caller may keep content, or get some; run the command again until there is none",
            records(left)
        )))
    }
}

/// The parts of a caller's identity, each with its kind, that these header fields are, one in each line.
fn parts_of_fields(text: &str) -> Result<Vec<(String, String)>, String> {
    let mut parts = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let (name, value) =
            line.split_once(':').ok_or("each line is a header field, such as \"X-Tenant: acme\"")?;
        let (name, value) = (name.trim().to_ascii_lowercase(), value.trim());
        if name == "cookie" && value.contains(';') {
            return Err("give each cookie a line of its own: \"Cookie: NAME=VALUE\"".to_owned());
        }
        if name.is_empty() || value.is_empty() {
            return Err("a field has neither an empty name nor an empty value".to_owned());
        }
        if name == "cookie" {
            let (name, value) =
                value.split_once('=').ok_or("a cookie is written as \"Cookie: NAME=VALUE\"")?;
            parts.push((format!("cookie:{name}"), value.to_owned()));
        } else {
            parts.push((format!("header:{name}"), value.to_owned()));
        }
    }
    if parts.is_empty() {
        return Err("there is no header field in it".to_owned());
    }
    Ok(parts)
}

fn print_forget(caller: &str, sums: &Sums, is_dry_run: bool, out: &mut impl Write) -> Result<(), Failure> {
    let done = if is_dry_run { "would lose their response and their steps" } else { "forgotten" };
    writeln!(out, "caller {caller}:")?;
    for (name, what) in [
        ("forgotten", done),
        ("nothing_kept", "keep nothing"),
        ("expired", "expired meanwhile"),
        ("open", "not touched, because their outcome is open:"),
        ("locked", "held by a transaction: run this again:"),
        ("unreadable", "cannot be read; of which caller they are is not known:"),
    ] {
        let count = sums.count(name);
        if count > 0 || name == "forgotten" {
            writeln!(out, "{count:>10}  {what}")?;
        }
        for item in sums.0.get(name).and_then(Value::as_array).into_iter().flatten() {
            match item.as_str() {
                Some(record) => writeln!(out, "            {record}")?,
                None => writeln!(
                    out,
                    "            {}  {}  {}  {} steps",
                    print::text(&item["record"]),
                    print::text(&item["state"]),
                    print::text(&item["operation"]),
                    item["steps"]
                )?,
            }
        }
    }
    if sums.count("open") > 0 {
        writeln!(
            out,
            "Resolve those that are unknown or abandoned (`oncegate keys resolve`), wait for the others, and run this again until \
             none is left"
        )?;
    }
    if !is_dry_run {
        writeln!(out, "{}", remains(sums))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_make_the_parts_of_a_caller() {
        let part = |kind: &str, value: &str| (kind.to_owned(), value.to_owned());
        let one = parts_of_fields("Authorization: Bearer a\n").unwrap();
        assert_eq!(one, [part("header:authorization", "Bearer a")]);
        let two = parts_of_fields("X-Tenant: t\r\nCookie: sid=s\n\n").unwrap();
        assert_eq!(two, [part("header:x-tenant", "t"), part("cookie:sid", "s")]);
        for wrong in ["Cookie: a=1; sid=s", "", "\n", "Bearer a", "X-Tenant:", ": a", "Cookie: sid"] {
            let what = parts_of_fields(wrong).unwrap_err();
            assert!(!what.contains("Bearer"), "{what}");
        }
    }

    #[test]
    fn pages_are_added_up() {
        let mut sums = Sums::default();
        sums.add(&json!({"a": 1, "b": {"k": 1}, "c": ["x"], "d": "first", "next": "n"}));
        sums.add(&json!({"a": 2, "b": {"k": 2, "l": 1}, "c": ["y"], "d": "last", "next": null}));
        assert_eq!(
            Value::Object(sums.0.clone()),
            json!({"a": 3, "b": {"k": 3, "l": 1}, "c": ["x", "y"], "d": "last"})
        );
        assert_eq!(["a", "b", "c", "e"].map(|name| sums.count(name)), [3, 4, 2, 0]);
    }
}
