//! `oncegate keys`: lists, shows and resolves the records of a running sidecar, through its admin API.
//!
//! Exit codes: 0 done, 1 refused or not found, 2 wrong usage, 3 the sidecar cannot be reached.

mod backup;
pub(crate) mod client;
mod clock;
mod content;
mod health;
mod id_secret;
pub(crate) mod print;
mod seals;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt;
use std::io::{self, BufRead as _, IsTerminal as _, Read as _, StdoutLock, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::{Args, Subcommand};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Map, Value, json};

pub(crate) use self::backup::BackupArgs;
use self::client::Client;
pub(crate) use self::clock::ClockArgs;
pub(crate) use self::content::{ForgetArgs, ResealArgs};
pub(crate) use self::health::HealthArgs;
pub(crate) use self::id_secret::RestoreArgs;
pub(crate) use self::seals::SealUsageArgs;
use crate::admin::searched_key;
use crate::files;

/// The admin address of a sidecar that is given none.
const DEFAULT_ADMIN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9090);

/// Lists and shows the records of a running sidecar, and resolves those whose outcome is unknown.
#[derive(Args, Debug)]
pub(crate) struct KeysArgs {
    #[command(flatten)]
    access: Access,
    #[command(subcommand)]
    command: KeysCommand,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "The sidecar")]
pub(crate) struct Access {
    /// The sidecar's admin address, as URL or HOST:PORT [default: http://127.0.0.1:9090] [env: ONCEGATE_ADMIN]
    #[arg(long, value_name = "URL", global = true)]
    pub(crate) admin: Option<String>,
    /// Reads the admin token from this file [default: the token in ONCEGATE_ADMIN_TOKEN] [env: ONCEGATE_ADMIN_TOKEN_FILE]
    #[arg(long, value_name = "FILE", global = true)]
    token_file: Option<PathBuf>,
    /// Prints the responses of the admin API as JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

#[derive(Subcommand, Debug)]
enum KeysCommand {
    /// Lists records
    #[command(visible_alias = "list")]
    Ls(Ls),
    /// Shows one record, by its identifier
    Show(Show),
    /// Finds one record by key, method, path and caller; or all records of a key, by the key alone
    Find(Find),
    /// Sets the outcome of operations whose outcome is unknown; with --amend, replaces the outcome that an operator set
    Resolve(Resolve),
    /// Makes outcomes unknown again: withdraws the outcome that an operator set, or blocks a released key
    Park(Park),
    /// Frees keys: the next request with each executes
    Release(Release),
    /// Lists the changes that operators made, with their reasons, newest first
    Audit(Audit),
}

#[derive(Args, Debug)]
struct Ls {
    /// Only records in this state: in-progress, abandoned, unknown, completed, tombstone, released; several with commas;
    /// or unsettled, which is abandoned and unknown: the records that wait for an operator
    #[arg(long, value_name = "STATE")]
    state: Option<String>,
    /// Only records of this caller, by the tag in the column CALLER of a listing
    #[arg(long, value_name = "TAG")]
    caller: Option<String>,
    /// Only records of this key, of any caller and operation. Only a tag of the key is sent: 8 bytes of a hash
    #[arg(long, value_name = "KEY", allow_hyphen_values = true)]
    key: Option<String>,
    /// Only records whose operation begins with this text, such as "POST /payments"
    #[arg(long, value_name = "TEXT")]
    operation: Option<String>,
    /// Only records that have been in their state for at least this time, such as 30s, 5m, 24h
    #[arg(long, value_name = "DURATION")]
    min_age: Option<String>,
    /// Only records that came into their state at this time or later: a time in UTC, such as 2026-02-28T12:34 or 2026-02-28, or
    /// the time since then, such as 30m
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Only records that came into their state before this time, in the same form
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// The most records to list, from 1 to 1000
    #[arg(long, value_name = "N", default_value_t = 100)]
    limit: u32,
    /// The newest first, with totals; or in the order of the store, page by page
    #[arg(long, value_name = "ORDER", value_enum, default_value_t = ListOrder::Newest)]
    order: ListOrder,
    /// Continues a listing with --order record or --unreadable, from the cursor that it printed
    #[arg(long, value_name = "CURSOR")]
    cursor: Option<String>,
    /// Only the identifiers of records that cannot be read. Reads the whole store with its responses, a page at a time; --limit
    /// is the number of them after which it stops
    #[arg(long, conflicts_with_all = ["state", "caller", "key", "operation", "min_age", "since", "until", "order"])]
    unreadable: bool,
    /// The number of records after which --unreadable stops, and prints a cursor [default: 1000000]
    #[arg(long, value_name = "N", requires = "unreadable")]
    max_read: Option<u64>,
}

/// The records after which a search for those that cannot be read stops.
const MAX_READ: u64 = 1_000_000;

/// The interval of the reports of a search that takes long.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// The order of a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ListOrder {
    Newest,
    Record,
}

#[derive(Args, Debug)]
struct Show {
    /// The record, as a listing or the log shows it, or a unique beginning of it
    record: String,
    /// Shows the stored body too, and the result of each step
    #[arg(long)]
    body: bool,
}

#[derive(Args, Debug)]
struct Find {
    #[command(flatten)]
    request: Request,
    /// Shows the stored body too, and the result of each step
    #[arg(long, requires = "path")]
    body: bool,
}

/// The request whose record is sought.
#[derive(Args, Debug)]
struct Request {
    /// The key that the client sent
    #[arg(long, value_name = "KEY")]
    key: String,
    /// The method of the request [default: POST]
    #[arg(long, value_name = "METHOD", requires = "path")]
    method: Option<String>,
    /// The path of the request
    #[arg(long, value_name = "PATH")]
    path: Option<String>,
    /// Reads the value of the header field that tells callers apart (such as "Bearer …") from this file; - is the
    /// standard input. The value is not a flag, because other users can see command lines
    #[arg(long, value_name = "FILE", group = "whose", requires = "path")]
    caller_file: Option<PathBuf>,
    /// Reads the header fields that tell callers apart, such as "X-Tenant: acme", from this file, one per line: for a route
    /// that uses several; - is the standard input
    #[arg(long, value_name = "FILE", group = "whose", requires = "path")]
    caller_fields: Option<PathBuf>,
    /// The client sent no field that tells callers apart
    #[arg(long, group = "whose", requires = "path")]
    anonymous: bool,
    /// The route does not tell callers apart
    #[arg(long, group = "whose", requires = "path")]
    single_tenant: bool,
    /// The host that the request was for, if hosts have keys of their own (authority = "scope", or a scope with `host`)
    #[arg(long, value_name = "HOST", requires = "path")]
    host: Option<String>,
}

#[derive(Args, Debug)]
#[command(group = clap::ArgGroup::new("outcome").required(true).args(["status", "released", "tombstone"]))]
struct Resolve {
    /// The records, as a listing or the log shows them, or a unique beginning of each. All get the same outcome
    #[arg(required = true, value_name = "RECORD")]
    records: Vec<String>,
    /// It took place: retries get a response with this status
    #[arg(long, value_name = "STATUS")]
    status: Option<u16>,
    /// A header field of that response, such as "Content-Type: application/json"; give it several times
    #[arg(long, value_name = "NAME: VALUE", conflicts_with_all = ["released", "tombstone"])]
    header: Vec<String>,
    /// The body of that response: the text itself, @FILE, or - for the standard input
    #[arg(long, value_name = "TEXT|@FILE|-", allow_hyphen_values = true, conflicts_with_all = ["released", "tombstone"])]
    body: Option<String>,
    /// It took place, and its response is lost: retries are refused, because it is done
    #[arg(long)]
    tombstone: bool,
    /// It did not take place: the key is free again
    #[arg(long)]
    released: bool,
    /// Replaces the outcome that an operator set before. Clients may have got the earlier response. A response of the service
    /// itself is never changed
    #[arg(long)]
    amend: bool,
    #[command(flatten)]
    why: AuditArgs,
}

#[derive(Args, Debug)]
struct Park {
    /// The records, as a listing or the log shows them, or a unique beginning of each. An operator resolved or released each, or
    /// its service released it, and no request with the key has come since
    #[arg(required = true, value_name = "RECORD")]
    records: Vec<String>,
    #[command(flatten)]
    why: AuditArgs,
}

#[derive(Args, Debug)]
struct Release {
    /// The records, as a listing or the log shows them, or a unique beginning of each
    #[arg(required = true, value_name = "RECORD")]
    records: Vec<String>,
    /// Also if its owner may be alive. Its effect may then happen in addition to that of the next request
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    why: AuditArgs,
}

/// The actor and the reason, for the audit trail.
#[derive(Args, Debug)]
pub(crate) struct AuditArgs {
    /// The reason, for the audit trail
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: String,
    /// The actor for the audit trail [default: the user's name, or admin if the environment has none]
    #[arg(long, value_name = "NAME")]
    actor: Option<String>,
    /// Does not ask for confirmation. Without a terminal there is no such question
    #[arg(long, short)]
    pub(crate) yes: bool,
}

/// Asks the person at the terminal for a confirmation.
pub(crate) type Confirm<'a> = &'a dyn Fn(&str) -> io::Result<bool>;

#[derive(Args, Debug)]
struct Audit {
    /// The most records to list, from 1 to 1000
    #[arg(long, value_name = "N", default_value_t = 100)]
    limit: u32,
    /// Continues before the entry with this number
    #[arg(long, value_name = "NUMBER")]
    before: Option<u64>,
}

/// The reason why a command failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The sidecar refused it.
    Refused(String),
    /// The arguments are invalid.
    Usage(String),
    /// The sidecar did not answer.
    Unreachable(String),
    /// The response could not be written out.
    Output(io::Error),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(words) | Self::Usage(words) | Self::Unreachable(words) => f.write_str(words),
            Self::Output(error) => error.fmt(f),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

/// Runs the command. The exit code reports how it ended.
pub(crate) fn run(args: &KeysArgs) -> ExitCode {
    ask(async |out: &mut StdoutLock<'_>| execute(args, env, confirmation(), out).await)
}

/// The question to the person at the terminal; `None` without a terminal.
pub(crate) fn confirmation() -> Option<Confirm<'static>> {
    let is_terminal = io::stdin().is_terminal() && io::stderr().is_terminal();
    if is_terminal { Some(&confirm_on_terminal) } else { None }
}

/// Runs the command about the clock. The exit code reports how it ended.
pub(crate) fn run_clock(args: &ClockArgs) -> ExitCode {
    ask(async |out: &mut StdoutLock<'_>| clock::execute(args, env, confirmation(), out).await)
}

/// Runs the command that puts a mark back. The exit code reports how it ended.
pub(crate) fn run_restore(args: &RestoreArgs) -> ExitCode {
    ask(async |out: &mut StdoutLock<'_>| id_secret::restore(args, env, confirmation(), out).await)
}

/// Runs the command about the health of a sidecar. The exit code reports it: 1 also if the sidecar cannot be reached, because
/// container engines give other codes a meaning of their own.
pub(crate) fn run_health(args: &HealthArgs) -> ExitCode {
    ask(async |out: &mut StdoutLock<'_>| {
        health::execute(args, env, out).await.map_err(|failure| match failure {
            Failure::Unreachable(words) => Failure::Refused(words),
            failure => failure,
        })
    })
}

/// Runs the command that copies the store. The exit code reports how it ended.
pub(crate) fn run_backup(args: &BackupArgs) -> ExitCode {
    ask(async |out: &mut StdoutLock<'_>| backup::execute(args, env, out).await)
}

/// Runs the command that seals records anew. The exit code reports how it ended.
pub(crate) fn run_reseal(args: &ResealArgs) -> ExitCode {
    ask(async |out: &mut StdoutLock<'_>| content::reseal(args, env, out).await)
}

/// Runs the command that removes the content of records. The exit code reports how it ended.
pub(crate) fn run_forget(args: &ForgetArgs) -> ExitCode {
    ask(async |out: &mut StdoutLock<'_>| content::forget(args, env, confirmation(), out).await)
}

/// Runs the command that counts records by seal key. The exit code reports how it ended.
pub(crate) fn run_seal_usage(args: &SealUsageArgs) -> ExitCode {
    ask(async |out: &mut StdoutLock<'_>| seals::execute(args, env, out).await)
}

pub(crate) fn env(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Runs a command to its end. The exit code reports how it ended.
pub(crate) fn ask(command: impl AsyncFnOnce(&mut StdoutLock<'_>) -> Result<(), Failure>) -> ExitCode {
    let mut out = io::stdout().lock();
    let (words, code) = match crate::block_on(command(&mut out)) {
        Ok(Ok(())) => return ExitCode::SUCCESS,
        // `oncegate keys ls | head` is not an error.
        Ok(Err(Failure::Output(error))) if error.kind() == io::ErrorKind::BrokenPipe => {
            return ExitCode::SUCCESS;
        }
        Ok(Err(Failure::Output(error))) => (format!("cannot write the response: {error}"), 1),
        Ok(Err(Failure::Refused(words))) | Err(words) => (words, 1),
        Ok(Err(Failure::Usage(words))) => (words, 2),
        Ok(Err(Failure::Unreachable(words))) => (words, 3),
    };
    complain!("error: {words}");
    ExitCode::from(code)
}

async fn execute(
    args: &KeysArgs,
    env: impl Fn(&str) -> Option<String>,
    confirm: Option<Confirm<'_>>,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let client = args.access.client(&env)?;
    let as_json = args.access.json;
    let flags = args.access.flags();
    match &args.command {
        KeysCommand::Ls(ls) => ls.run(&client, as_json, out).await,
        KeysCommand::Show(Show { record, body }) => {
            let query = if *body { "?body=true" } else { "" };
            let view = client.get(&format!("/v1/keys/{}{query}", escaped(record))).await?;
            print::record(&view, &flags, as_json, out)
        }
        KeysCommand::Find(Find { request: Request { key, path: None, .. }, .. }) => {
            find_by_key(&client, key, &flags, as_json, out).await
        }
        KeysCommand::Find(Find { request, body }) => {
            let view = client.post("/v1/keys/find", &request.json(*body)?).await?;
            print::record(&view, &flags, as_json, out)
        }
        KeysCommand::Resolve(resolve) => {
            let request = resolve.json(&env)?;
            let question = resolve.question();
            let records = confirmed(&client, &resolve.records, confirm, resolve.why.yes, &question).await?;
            let change = Change { action: "resolve", request };
            change.run(&client, &records, as_json, out).await
        }
        KeysCommand::Park(park) => {
            let request = park.why.json(&env);
            let question = "make the outcome unknown again, so that retries are refused and nothing executes until it is resolved; \
                            clients may have got its present response";
            let records = confirmed(&client, &park.records, confirm, park.why.yes, question).await?;
            let change = Change { action: "park", request: request.into() };
            change.run(&client, &records, as_json, out).await
        }
        KeysCommand::Release(release) => {
            let mut request = release.why.json(&env);
            request.insert("force".to_owned(), release.force.into());
            let question = "free the key, so that the next request with it executes";
            let records = confirmed(&client, &release.records, confirm, release.why.yes, question).await?;
            let change = Change { action: "release", request: request.into() };
            change.run(&client, &records, as_json, out).await
        }
        KeysCommand::Audit(audit) => {
            let before = audit.before.map_or_else(String::new, |number| format!("&before={number}"));
            let view = client.get(&format!("/v1/audit?limit={}{before}", audit.limit)).await?;
            print::audit(&view, as_json, out)
        }
    }
}

/// A change of records, the same for each.
struct Change {
    /// The last part of the path in the admin API.
    action: &'static str,
    request: Value,
}

impl Change {
    /// Changes one record after the other. One that is refused does not keep the others from their change.
    async fn run(
        &self,
        client: &Client,
        records: &[String],
        as_json: bool,
        out: &mut impl Write,
    ) -> Result<(), Failure> {
        let mut failed = 0;
        for (at, record) in records.iter().enumerate() {
            let path = format!("/v1/keys/{}/{}", escaped(record), self.action);
            let failure = match client.post(&path, &self.request).await {
                Ok(view) => {
                    print::resolved(&view, as_json, out)?;
                    continue;
                }
                Err(failure) => failure,
            };
            print::not_changed(record, &failure, as_json, out)?;
            // The others would fail in the same way.
            let is_last = matches!(failure, Failure::Unreachable(_) | Failure::Output(_));
            if is_last {
                for left in records.iter().skip(at + 1) {
                    let why = Failure::Unreachable("not tried, after an earlier record failed".to_owned());
                    print::not_changed(left, &why, as_json, out)?;
                }
            }
            if records.len() == 1 {
                return Err(failure);
            }
            if is_last {
                complain!("{} of {} records were not changed", failed + records.len() - at, records.len());
                return Err(failure);
            }
            complain!("error: {record}: {failure}");
            failed += 1;
        }
        if records.len() > 1 && !as_json {
            writeln!(out, "{} of {} records were changed", records.len() - failed, records.len())?;
        }
        match failed {
            0 => Ok(()),
            _ => Err(Failure::Refused(format!("{failed} of {} records were not changed", records.len()))),
        }
    }
}

/// The records to change, each once. On a terminal they are shown first, and nothing is changed without a confirmation.
async fn confirmed(
    client: &Client,
    given: &[String],
    confirm: Option<Confirm<'_>>,
    is_sure: bool,
    what: &str,
) -> Result<Vec<String>, Failure> {
    let confirm = confirm.filter(|_| !is_sure);
    let mut records: Vec<String> = Vec::new();
    let mut text = String::new();
    for record in given {
        let mut record = record.clone();
        if confirm.is_some() {
            let view = client.get(&format!("/v1/keys/{}", escaped(&record))).await?;
            text.push_str(&print::summary(&view));
            text.push('\n');
            // By its full identifier: another record may have the same beginning by the time of the change.
            if let Some(id) = view["record"].as_str() {
                record = id.to_owned();
            }
        }
        if !records.contains(&record) {
            records.push(record);
        }
    }
    match confirm {
        Some(confirm) if !confirm(&format!("{text}{what}? [y/N] "))? => {
            Err(Failure::Refused("not confirmed; nothing was changed".to_owned()))
        }
        _ => Ok(records),
    }
}

fn confirm_on_terminal(question: &str) -> io::Result<bool> {
    let mut err = io::stderr().lock();
    write!(err, "{question}")?;
    err.flush()?;
    let mut response = String::new();
    io::stdin().lock().read_line(&mut response)?;
    Ok(matches!(response.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}

/// The command that lists the records of a sidecar that wait for an operator. The flags name the sidecar.
fn list_unsettled(flags: &str) -> String {
    format!("oncegate keys ls{flags} --state unsettled")
}

/// The command that lists the records of the sidecar with this admin address that wait for an operator.
pub(crate) fn list_unsettled_at(admin: SocketAddr) -> String {
    if admin == DEFAULT_ADMIN {
        return list_unsettled("");
    }
    // An address that stands for all of this machine is no address to connect to everywhere.
    let ip = match admin.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    list_unsettled(&format!(" --admin {}", SocketAddr::new(ip, admin.port())))
}

impl Access {
    /// The flags that were given, for another command to the same sidecar.
    pub(crate) fn flags(&self) -> String {
        let mut flags = String::new();
        if let Some(admin) = &self.admin {
            flags.push_str(&format!(" --admin {}", shell_quoted(admin)));
        }
        if let Some(file) = &self.token_file {
            flags.push_str(&format!(" --token-file {}", shell_quoted(&file.to_string_lossy())));
        }
        flags
    }

    /// The command that lists the records of the same sidecar that wait for an operator.
    pub(crate) fn list_unsettled(&self) -> String {
        list_unsettled(&self.flags())
    }

    pub(crate) fn client(&self, env: impl Fn(&str) -> Option<String>) -> Result<Client, Failure> {
        let admin = self.admin.clone().or_else(|| env("ONCEGATE_ADMIN"));
        let admin = admin.unwrap_or_else(|| format!("http://{DEFAULT_ADMIN}"));
        let read = |name: &str, file: &Path| {
            files::read_text(file, files::MAX_SECRET)
                .map_err(|error| Failure::Usage(format!("{name}: {}: {error}", file.display())))
        };
        // The variables of the sidecar, with their meaning there.
        let (token, file) = ("ONCEGATE_ADMIN_TOKEN", "ONCEGATE_ADMIN_TOKEN_FILE");
        let token = match (&self.token_file, env(token), env(file)) {
            (Some(file), ..) => Some(read("--token-file", file)?),
            (None, Some(_), Some(_)) => {
                return Err(Failure::Usage(format!(
                    "{token}: {file} is set, too; the token must come from one source, so leave one out"
                )));
            }
            (None, Some(token), None) => Some(token),
            (None, None, Some(path)) => Some(read(file, Path::new(&path))?),
            (None, None, None) => None,
        };
        Client::new(&admin, token.as_deref().map(str::trim))
    }
}

impl Ls {
    async fn run(&self, client: &Client, as_json: bool, out: &mut impl Write) -> Result<(), Failure> {
        if !(1..=1000).contains(&self.limit) {
            return Err(Failure::Usage(format!("--limit {}: from 1 to 1000 is allowed", self.limit)));
        }
        if self.unreadable {
            return self.name_unreadable(client, as_json, out).await;
        }
        let tag = match &self.key {
            Some(key) => Some(key_tag(client, key).await?),
            None => None,
        };
        let filters = [
            ("state", self.state.as_deref()),
            ("caller", self.caller.as_deref()),
            ("key_tag", tag.as_deref()),
            ("operation", self.operation.as_deref()),
            ("min_age", self.min_age.as_deref()),
            ("since", self.since.as_deref()),
            ("until", self.until.as_deref()),
        ];
        let limit = self.limit as usize;
        if self.order == ListOrder::Newest && self.cursor.is_none() {
            let page = client.get(&format!("{}&order=newest", listing_path(&filters, limit, None))).await?;
            return print::newest(&page, as_json, out);
        }
        let page = walk(client, &filters, limit, self.cursor.clone()).await?;
        print::page(&page, as_json, out)
    }

    /// Names the records that cannot be read as they are found.
    async fn name_unreadable(
        &self,
        client: &Client,
        as_json: bool,
        out: &mut impl Write,
    ) -> Result<(), Failure> {
        let (limit, max_read) = (self.limit as usize, self.max_read.unwrap_or(MAX_READ));
        let mut named = BTreeSet::new();
        let mut name = |page: &Value| {
            for id in print::list(page, "unreadable") {
                let id = print::text(id);
                if named.insert(id.clone()) && !as_json {
                    writeln!(out, "cannot be read: {id}")?;
                }
            }
            out.flush().map(|()| named.len())
        };
        let (mut read, mut cursor, mut is_complete) = (0, self.cursor.clone(), false);
        // On Redis, the survey behind this list names most of them without their responses.
        let mut found =
            if cursor.is_none() { name(&client.get("/v1/keys?limit=1&order=newest").await?)? } else { 0 };
        let mut reported = Instant::now();
        // One page at least, so that there is a cursor to go on from.
        let mut is_first = true;
        while !is_complete && (is_first || found < limit && read < max_read) {
            is_first = false;
            let page = match client.get(&listing_path(&[], MAX_FOUND, cursor.as_deref())).await {
                Ok(page) => page,
                Err(failure) => {
                    let page = json!({"records": [], "unreadable": named, "read": read, "complete": false, "next": cursor});
                    // A cursor that was given is no place at which this search stopped.
                    if read > 0 || as_json {
                        print::unreadable(&page, as_json, out)?;
                    }
                    return Err(failure);
                }
            };
            let of_page = print::list(&page, "records").len() + print::list(&page, "unreadable").len();
            read += of_page as u64;
            found = name(&page)?;
            cursor = page["next"].as_str().map(str::to_owned);
            is_complete = cursor.is_none();
            if reported.elapsed() >= REPORT_INTERVAL {
                reported = Instant::now();
                if let Some(cursor) = &cursor {
                    complain!("{read} records were read; to go on from here: --unreadable --cursor {cursor}");
                }
            }
        }
        let page = json!({"records": [], "unreadable": named, "read": read, "complete": is_complete, "next": cursor});
        print::unreadable(&page, as_json, out)
    }
}

/// Reads pages until there are as many records as were asked for: a page of the store may be short.
async fn walk(
    client: &Client,
    filters: &[(&str, Option<&str>)],
    limit: usize,
    mut cursor: Option<String>,
) -> Result<Value, Failure> {
    let mut records = Vec::new();
    let mut unreadable = Vec::new();
    loop {
        let left = limit - records.len();
        let mut page = client.get(&listing_path(filters, left, cursor.as_deref())).await?;
        let list = |page: &mut Value, name: &str| match page[name].take() {
            Value::Array(items) => items,
            _ => Vec::new(),
        };
        records.extend(list(&mut page, "records"));
        unreadable.extend(list(&mut page, "unreadable"));
        cursor = page["next"].as_str().map(str::to_owned);
        if cursor.is_none() || records.len() >= limit {
            return Ok(json!({"records": records, "unreadable": unreadable, "next": cursor}));
        }
    }
}

fn listing_path(filters: &[(&str, Option<&str>)], limit: usize, cursor: Option<&str>) -> String {
    let mut path = format!("/v1/keys?limit={limit}");
    for (name, value) in filters.iter().chain([&("cursor", cursor)]) {
        if let Some(value) = value {
            path.extend(["&", name, "=", &escaped(value)]);
        }
    }
    path
}

/// The tag of a key, which is sent in addresses instead of the key: they are written to logs. The sidecar computes it, because it
/// may have an id secret.
async fn key_tag(client: &Client, key: &str) -> Result<String, Failure> {
    searched_key(key).map_err(|error| Failure::Usage(format!("--key: {error}")))?;
    let answer = client.post("/v1/keys/tag", &json!({"key": key})).await?;
    Ok(answer["key_tag"].as_str().unwrap_or_default().to_owned())
}

/// The most records of one key that are shown.
const MAX_FOUND: usize = 1000;

/// Walks through the whole store, however large it is, for the records of a key.
async fn find_by_key(
    client: &Client,
    key: &str,
    flags: &str,
    as_json: bool,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let tag = key_tag(client, key).await?;
    let mut page = walk(client, &[("key_tag", Some(&tag))], MAX_FOUND, None).await?;
    let newest_first =
        |record: &Value| std::cmp::Reverse(record["changed_at"].as_str().unwrap_or_default().to_owned());
    if let Value::Array(records) = &mut page["records"] {
        records.sort_by_cached_key(newest_first);
        if records.is_empty() {
            let failure = Failure::Refused(not_found(print::list(&page, "unreadable")));
            if as_json {
                print::found(&page, flags, as_json, out)?;
            }
            return Err(failure);
        }
    }
    print::found(&page, flags, as_json, out)
}

/// The reason why no record of a key was found.
fn not_found(unreadable: &[Value]) -> String {
    /// The most records that are named.
    const MAX_NAMED: usize = 20;
    if unreadable.is_empty() {
        return "no record has this key: it was never used, its retention is over, or the program that claimed it gave no tag of its \
                key. With --path, --method and the caller, such a record is found, too"
            .to_owned();
    }
    let names: Vec<_> = unreadable.iter().take(MAX_NAMED).map(print::text).collect();
    let more = if unreadable.len() > MAX_NAMED { ", …" } else { "" };
    let those = match unreadable.len() {
        1 => "a record cannot be read, and it may be that of this key".to_owned(),
        number => format!("{number} records cannot be read, and one of them may be that of this key"),
    };
    format!(
        "{those}: {}{more}. Such a key is refused, and its operation may have taken effect: see \"A record that cannot be read\" \
         in docs/reference/admin.md. No other record has this key",
        names.join(", ")
    )
}

impl Request {
    fn json(&self, body: bool) -> Result<Value, Failure> {
        let caller = match (&self.caller_file, self.anonymous, self.single_tenant) {
            (Some(file), ..) => {
                json!({"value": read_text("--caller-file", file)?.trim_end_matches(['\r', '\n'])})
            }
            (None, true, _) => "anonymous".into(),
            (None, _, true) => "single-tenant".into(),
            (None, false, false) => match &self.caller_fields {
                Some(file) => json!({"fields": fields(&read_text("--caller-fields", file)?)?}),
                // The sidecar reports what the route needs.
                None => Value::Null,
            },
        };
        let method = self.method.as_deref().unwrap_or("POST");
        let mut request = json!({
            "key": self.key, "method": method, "path": self.path, "caller": caller, "body": body
        });
        if let (Some(host), Value::Object(members)) = (&self.host, &mut request) {
            members.insert("host".to_owned(), host.as_str().into());
        }
        Ok(request)
    }
}

impl Resolve {
    /// The summary of the action, for a question to the operator.
    fn summary(&self) -> String {
        match self.status {
            Some(status) => {
                format!("record that it took place: retries get this response with the status {status}")
            }
            None if self.tombstone => "record that it took place, without a response for retries".to_owned(),
            None => {
                "record that it did not take place, so that the next request with the key executes".to_owned()
            }
        }
    }

    /// The question to the person at the terminal.
    fn question(&self) -> String {
        let summary = self.summary();
        match (self.amend, self.released) {
            (true, _) => {
                format!("replace the outcome that an operator set, which clients may have got: {summary}")
            }
            (false, true) => summary,
            (false, false) => {
                format!(
                    "{summary}; only an operator can change that later, and clients may have got the response by then"
                )
            }
        }
    }

    fn json(&self, env: impl Fn(&str) -> Option<String>) -> Result<Value, Failure> {
        let mut request = self.why.json(env);
        if self.amend {
            request.insert("amend".to_owned(), true.into());
        }
        let outcome = if self.released { "released" } else { "completed" };
        request.insert("outcome".to_owned(), outcome.into());
        if self.tombstone {
            request.insert("tombstone".to_owned(), true.into());
        }
        if let Some(status) = self.status {
            let headers = self.header.iter().map(|header| match header.split_once(':') {
                Some((name, value)) => Ok(json!([name.trim(), value.trim()])),
                None => Err(Failure::Usage(format!(
                    "--header {header:?}: write \"Name: value\", such as \"Location: /payments/7\""
                ))),
            });
            request.insert("status".to_owned(), status.into());
            request.insert("headers".to_owned(), headers.collect::<Result<Value, _>>()?);
            request.insert("body_base64".to_owned(), STANDARD.encode(self.body_bytes()?).into());
        }
        Ok(request.into())
    }

    fn body_bytes(&self) -> Result<Vec<u8>, Failure> {
        match self.body.as_deref() {
            None => Ok(Vec::new()),
            Some("-") => {
                let mut bytes = Vec::new();
                let read = io::stdin().read_to_end(&mut bytes);
                read.map_err(|error| Failure::Usage(format!("--body -: {error}")))?;
                Ok(bytes)
            }
            Some(text) => match text.strip_prefix('@') {
                Some(file) => {
                    let read = files::read(Path::new(file), files::MAX_TEXT);
                    read.map_err(|error| Failure::Usage(format!("--body @{file}: {error}")))
                }
                None => Ok(text.as_bytes().to_vec()),
            },
        }
    }
}

impl AuditArgs {
    pub(crate) fn json(&self, env: impl Fn(&str) -> Option<String>) -> Map<String, Value> {
        let user =
            || ["USER", "LOGNAME", "USERNAME"].into_iter().find_map(&env).filter(|user| !user.is_empty());
        let mut request = Map::new();
        request.insert("reason".to_owned(), self.reason.clone().into());
        if let Some(actor) = self.actor.clone().or_else(user) {
            request.insert("actor".to_owned(), actor.into());
        }
        request
    }
}

/// The text in the file that this flag names.
fn read_text(flag: &str, file: &Path) -> Result<String, Failure> {
    let text = match file.as_os_str() == "-" {
        true => io::read_to_string(io::stdin()),
        false => files::read_text(file, files::MAX_TEXT),
    };
    text.map_err(|error| Failure::Usage(format!("{flag}: {}: {error}", file.display())))
}

/// Reads header fields, one per line.
fn fields(text: &str) -> Result<Map<String, Value>, Failure> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let fields = lines.map(|line| {
        // The line may contain a credential, so the error does not repeat it.
        let (name, value) = line
            .split_once(':')
            .ok_or_else(|| Failure::Usage("--caller-fields: a line is not \"Name: value\"".to_owned()))?;
        Ok((name.trim().to_owned(), value.trim().into()))
    });
    fields.collect()
}

/// The text as one word for a shell.
pub(crate) fn shell_quoted(text: &str) -> String {
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"-._/:=@%+,".contains(&b);
    if !text.is_empty() && text.bytes().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// The text in percent-encoding, for one segment of a path or one value of a query.
pub(crate) fn escaped(text: &str) -> String {
    const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
    utf8_percent_encode(text, ENCODED).to_string()
}
