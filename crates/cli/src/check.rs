//! `oncegate check`: reports errors of a configuration and its store before they do harm.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::future::Future;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use oncegate_core::{
    Clock as _, ErrorChain, ID_SECRET_RECORD, IdScheme, ListQuery, Record, RecordId, State, StateName, Store,
    StoreError, SystemClock, Timestamp,
};
use oncegate_embedded::{CheckReport, EmbeddedOpenError, EmbeddedOptions, segment_files};
use oncegate_http::{Profile, SHADOW_OPERATION};
use oncegate_postgres::{PostgresOptions, PostgresStore};
use oncegate_redis::{Finding, RedisOptions, RedisStore, Severity};
use oncegate_seal::Keyring;
use serde_json::{Value, json};

use crate::config::{
    CacheChoice, CachedChoice, Config, Draft, ProxyArgs, SealSettings, StoreChoice, StoreUrl, TlsFiles,
    duration_text, size_text,
};
use crate::proxy::{DEFAULT_SCOPE, HOSTS_COMPARED, certificate, check_certificate_file, server_config};

mod env_file;
mod online;
mod sealing;

use self::sealing::{SealCount, SealRules};

/// Checks a configuration and its store.
#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    settings: ProxyArgs,
    /// Also fetches the key set of jwt-keys, and connects to the service, with TLS if its address has it, and sends it one GET /
    /// without a key
    #[arg(long, help_heading = "Checking")]
    online: bool,
    /// Reads this file as the unit of systemd does (EnvironmentFile), so that the store of the sidecar is checked and not the one
    /// of this shell
    #[arg(long, value_name = "FILE", help_heading = "Checking")]
    env_file: Option<PathBuf>,
    /// Prints one JSON object: the worst verdict, and the verdict and the text of each line
    #[arg(long, help_heading = "Checking")]
    json: bool,
    /// Then copies what can be read of a damaged embedded store to this new directory, and reports what is lost
    #[arg(long, value_name = "DIR", help_heading = "Checking")]
    salvage: Option<PathBuf>,
}

/// Runs the checks and prints a line for each result. The exit code is 1 if there was an error.
///
/// It is 0 if the store is in use and so was not checked: usually, that is a check of the configuration before a reload.
pub(crate) fn run(args: &CheckArgs) -> ExitCode {
    let mut report = Report::new(args.json);
    let variables = match &args.env_file {
        Some(file) => env_file::over(file, std::env::vars_os()).map(|unit| {
            unit.mistakes.into_iter().for_each(|mistake| report.error(mistake));
            unit.doubts.into_iter().for_each(|doubt| report.warn(doubt));
            unit.variables
        }),
        None => Ok(std::env::vars_os().collect()),
    };
    match variables {
        Ok(variables) => {
            let draft = Draft::read(&args.settings, variables);
            check(&draft, args.online, &mut report);
            if let Some(to) = &args.salvage {
                salvage(&draft, to, &mut report);
            }
        }
        Err(error) => report.error(error),
    }
    let mut out = io::stdout().lock();
    if args.json {
        let _gone = writeln!(out, "{}", report.json());
        return report.exit_code();
    }
    for line in &report.lines {
        if writeln!(out, "{line}").is_err() {
            break; // the reader is gone; the exit code still reports the result
        }
    }
    report.exit_code()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Ok,
    Warn,
    Error,
}

impl Verdict {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Error => "error",
        }
    }
}

/// One line.
#[derive(Debug)]
struct Line(Verdict, String);

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", crate::style::paint_word(&format!("{:<6}", self.0.as_str())), self.1)
    }
}

#[derive(Debug)]
struct Report {
    lines: Vec<Line>,
    /// The most records and lost parts of a store that are named one by one.
    max_named: usize,
}

impl Report {
    /// A program can read a long list.
    fn new(is_json: bool) -> Self {
        Self { lines: Vec::new(), max_named: if is_json { usize::MAX } else { MAX_NAMED } }
    }

    fn ok(&mut self, what: impl Into<String>) {
        self.lines.push(Line(Verdict::Ok, what.into()));
    }

    fn warn(&mut self, what: impl Into<String>) {
        self.lines.push(Line(Verdict::Warn, what.into()));
    }

    fn error(&mut self, what: impl Into<String>) {
        self.lines.push(Line(Verdict::Error, what.into()));
    }

    fn worst(&self) -> Verdict {
        self.lines.iter().map(|line| line.0).max().unwrap_or(Verdict::Ok)
    }

    fn exit_code(&self) -> ExitCode {
        if self.worst() == Verdict::Error { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    }

    fn json(&self) -> Value {
        let line = |Line(verdict, text): &Line| json!({"verdict": verdict.as_str(), "text": text});
        json!({"verdict": self.worst().as_str(), "lines": self.lines.iter().map(line).collect::<Vec<_>>()})
    }
}

fn check(draft: &Draft, is_online: bool, report: &mut Report) {
    for problem in &draft.problems {
        if problem.is_error() {
            report.error(problem.to_string());
        } else {
            report.warn(problem.to_string());
        }
    }
    if let Some(config) = &draft.config {
        configuration(config, is_online, report);
    }
    if let Some(files) = &draft.tls {
        tls(files, report);
    }
    match &draft.store {
        Some(StoreChoice::Cached(cached)) => {
            cache(cached, report);
            records(&cached.store, draft, report);
        }
        Some(choice) => records(choice, draft, report),
        None => {
            report.warn("store: not checked, because the errors above leave it unclear which store is meant")
        }
    }
}

/// Checks the store that holds the records.
fn records(choice: &StoreChoice, draft: &Draft, report: &mut Report) {
    let settings = draft.config.as_ref().map(|config| config.seal.as_ref());
    let none = Keyring::default();
    let rules = SealRules {
        // Without settings there are no keys; those that a program prints are not known.
        keys: settings.and_then(|settings| settings.map_or(Some(&none), SealSettings::read_keys)),
        seals: settings.flatten().is_some(),
        is_required: settings.flatten().is_some_and(|settings| settings.is_required),
    };
    match choice {
        StoreChoice::Memory => report.ok("store memory:"),
        StoreChoice::Directory(dir) => {
            if draft.store_must_exist
                && let Err(why) = existing(dir)
            {
                return report.error(why);
            }
            let mut options = EmbeddedOptions::new(dir);
            if let Some(config) = &draft.config {
                options = options
                    .with_memory_bytes(config.store_memory)
                    .with_max_records(config.max_records.unwrap_or(u64::MAX))
                    .with_max_record_bytes(config.max_store_bytes.unwrap_or(u64::MAX));
            }
            store(dir, &options, Some(rules), ids(draft).as_ref(), report);
        }
        StoreChoice::Postgres(url) => {
            postgres(url, ids(draft), report);
            if rules.is_required {
                let shown = url.to_string();
                let options = PostgresOptions::from_url(url.reveal()).map_err(|error| error.to_string());
                let opened = async { PostgresStore::open(options?).await.map_err(|error| error.to_string()) };
                shared_seals(&shown, opened, rules, report);
            }
        }
        StoreChoice::Redis(options) => {
            redis(options, ids(draft), report);
            if rules.is_required {
                let opened = async {
                    let opened = RedisStore::open((**options).clone()).await;
                    opened.map_err(|error| ErrorChain(&error).to_string())
                };
                shared_seals(&options.shown().to_string(), opened, rules, report);
            }
        }
        StoreChoice::Cached(_) => report.error("store: a cached store cannot contain another one"),
    }
}

/// The identities of records in this configuration; `None` if it has errors.
fn ids(draft: &Draft) -> Option<IdScheme> {
    draft.config.as_ref().map(|config| config.id_secret.clone().into())
}

/// Checks the cache before the store. Nothing is lost without the cache, so its faults are warnings.
fn cache(cached: &CachedChoice, report: &mut Report) {
    let keep = duration_text(cached.keep);
    match &cached.cache {
        cache @ CacheChoice::Memory(_) => {
            report.ok(format!("cache {cache}: responses are kept for {keep} at most"));
        }
        CacheChoice::Directory(dir) => store(dir, &EmbeddedOptions::new(dir), None, None, report),
        cache @ CacheChoice::Redis(options) => {
            let options = (**options).clone().with_danger_allow_eviction(true);
            match redis_findings(&options, None) {
                Ok(_) => {
                    report.ok(format!("cache {cache}: can be used; responses are kept for {keep} at most"))
                }
                Err(error) => {
                    report.warn(format!(
                        "cache {cache}: {error}; the sidecar starts without it, and tries again"
                    ));
                }
            }
        }
    }
}

fn configuration(config: &Config, is_online: bool, report: &mut Report) {
    let summary = match config.safe_summary() {
        "" => "all defaults",
        summary => summary,
    };
    report.ok(format!("configuration: {summary}"));
    let token = match (&config.admin_token, &config.metrics_token) {
        (Some(_), Some(_)) => "with a token, and another one for /metrics alone",
        (Some(_), None) => "with a token",
        (None, _) => "for this machine only",
    };
    report.ok(format!("addresses: requests on {}, admin on {}, {token}", config.listen, config.admin));
    if is_online {
        online::service(config, report);
    } else {
        report.ok(format!("service {}: not contacted", config.to));
        if config.to.scheme == http::uri::Scheme::HTTPS
            && let Err(why) = check_certificate_file()
        {
            report.error(why);
        }
    }
    if let Some(name) = &config.service {
        report.ok(format!("service name {name}: sidecars with this name on the same store share keys"));
    }
    profiles(config, report);
    if config.has_default_scope() {
        report.ok(format!("callers: {DEFAULT_SCOPE}"));
    }
    if config.compares_hosts_across_sidecars() {
        report.ok(format!("hosts: {HOSTS_COMPARED}"));
    }
    if let Some(settings) = &config.seal {
        sealing::keys(settings, is_online, report);
    }
    if let Some(secret) = &config.id_secret {
        report.ok(format!(
            "ids: keyed with the id secret {}; keep a copy of it, because a store whose secret is lost is of no use",
            secret.name()
        ));
    }
    if let Some(place) = config.jwt_keys() {
        match (&config.jwt, is_online) {
            (Some(verifier), true) => online::key_set(verifier, place, report),
            _ => report.ok(format!("tokens: verified with the keys in {place}; a URL is not contacted")),
        }
    }
    for path in config.authorizes_at() {
        report.ok(format!("replays: the service is asked before each at {}{path}, not contacted", config.to));
    }
    for path in config.asks_at() {
        report.ok(format!(
            "requests with an unknown outcome: the service is asked at {}{path}, not contacted",
            config.to
        ));
    }
}

/// Shows each profile but `ietf`: the values and statuses that differ from it.
fn profiles(config: &Config, report: &mut Report) {
    let ietf = Profile::default();
    let (rows, refusals) = (ietf.rows(), ietf.refusals());
    let mut shown: Vec<&str> = Vec::new();
    let routes = config.routes.iter().map(|route| &route.config);
    for profile in std::iter::once(&config.default).chain(routes).map(|route| route.settings.profile()) {
        if profile.name() == ietf.name() || shown.contains(&profile.name()) {
            continue;
        }
        shown.push(profile.name());
        let values = profile.rows().into_iter().filter(|row| !rows.contains(row));
        let statuses = profile.refusals().into_iter().zip(&refusals).filter(|(own, ietf)| own != *ietf);
        let lines: Vec<_> = values
            .map(|(key, value)| format!("{key} = {value}"))
            .chain(statuses.map(|(own, _)| {
                let words = [("code", &own.code), ("kind", &own.kind)].into_iter();
                let words = words
                    .filter_map(|(key, word)| Some(format!(", {key} {}", word.as_ref()?.escape_debug())));
                let (condition, status) = (own.condition, own.status.as_u16());
                format!("refusal.{condition} = {status}{}", words.collect::<String>())
            }))
            .collect();
        report.ok(format!(
            "profile {} ({}), where it differs from ietf:\n        {}",
            profile.name(),
            profile.title(),
            lines.join("\n        ")
        ));
    }
}

fn tls(files: &TlsFiles, report: &mut Report) {
    match server_config(files) {
        Ok(tls) => {
            let (cert, key) = (files.cert.display(), files.key.display());
            match tls.validity.and_then(|validity| validity.warning(certificate::now())) {
                Some(what) => report.warn(format!("TLS: {cert} and {key} match, but the certificate {what}")),
                None => report.ok(format!("TLS: {cert} and {key} match")),
            }
        }
        Err(error) => report.error(format!("TLS: {error}")),
    }
}

/// A warning, if every user of this machine can read the file.
pub(crate) fn readable_by_all_users(what: &str, file: &Path) -> Option<String> {
    let is_readable = fs::metadata(file).is_ok_and(|about| about.permissions().mode() & 0o004 != 0);
    let file = file.display();
    is_readable
        .then(|| format!("{what} in {file} can be read by every user of this machine; run: chmod o= {file}"))
}

/// Checks the schema and the settings of the database. Nothing is written.
fn postgres(url: &StoreUrl, ids: Option<IdScheme>, report: &mut Report) {
    let problem = ids.and_then(|ids| crate::schema::verify_ids(url.reveal(), ids).err());
    if let Some(why) = &problem {
        report.error(format!("store {url}: {why}"));
    }
    // A store of another id secret is refused, whatever its server does.
    let (can_be_used, but) =
        if problem.is_some() { ("", "") } else { ("can be used; ", "can be used, but ") };
    match crate::schema::usable(url.reveal()) {
        Ok(true) => report.ok(format!("store {url}: {can_be_used}its commits are flushed to disk")),
        Ok(false) => report.warn(format!(
            "store {url}: {but}its commits are NOT flushed to disk (fsync or synchronous_commit is off): a crash of \
             the server may lose records, and their operations execute again"
        )),
        Err(error) => report.error(format!("store {error}")),
    }
}

/// Counts the seals of the records in a database, if it can be opened. If not, that was reported before.
fn shared_seals<S: Store>(
    shown: &str,
    opened: impl Future<Output = Result<S, String>>,
    rules: SealRules<'_>,
    report: &mut Report,
) {
    let counted = crate::block_on(async {
        if let Ok(store) = opened.await
            && let Err(error) = sealing::shared(&store, shown, rules, report).await
        {
            sealing::not_counted(shown, &error, report);
        }
    });
    if let Err(why) = counted {
        report.error(why);
    }
}

fn store(
    dir: &Path,
    options: &EmbeddedOptions,
    rules: Option<SealRules<'_>>,
    ids: Option<&IdScheme>,
    report: &mut Report,
) {
    let shown = dir.display();
    match fs::metadata(dir) {
        Ok(metadata) if !metadata.is_dir() => report.error(format!("store {shown}: is not a directory")),
        Ok(_) => existing_store(dir, options, rules, ids, report),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // The sidecar will create it inside of the nearest directory that exists.
            let is_there = |dir: &&Path| dir.as_os_str().is_empty() || dir.exists();
            let parent = dir.ancestors().skip(1).find(is_there);
            let parent = parent.filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
            if writable(parent, &format!("store {shown}: does not exist and cannot be created"), report) {
                report.ok(format!("store {shown}: does not exist yet; the first start creates it"));
            }
        }
        Err(error) => report.error(format!("store {shown}: {error}")),
    }
}

fn existing_store(
    dir: &Path,
    options: &EmbeddedOptions,
    rules: Option<SealRules<'_>>,
    ids: Option<&IdScheme>,
    report: &mut Report,
) {
    let shown = dir.display();
    if !writable(dir, &format!("store {shown}: cannot be written to"), report) {
        return;
    }
    let is_empty = fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none());
    if is_empty {
        return report.ok(format!("store {shown}: empty; the first start creates it"));
    }
    if let Some(what) = has_other_files(dir) {
        return report.error(format!("store {shown}: {what}"));
    }
    let files = segment_files(dir).unwrap_or_default();
    // A mark without records is what is left of a store.
    if files.is_empty() && !["mark", "salvaged"].iter().any(|name| dir.join(name).exists()) {
        return report.ok(format!("store {shown}: has no records; the first start creates it"));
    }
    let newest = files.last().and_then(|newest| readable_by_all_users("every stored response", newest));
    if let Some(warning) = newest {
        report.warn(warning);
    }
    // Nothing is known of a cache, whose responses the store has as well.
    let rules = rules.unwrap_or_default();
    let (mut seals, mut mark) = (SealCount::new(rules), None);
    let mut observed = ObservedRecords::default();
    let mut note = |id: RecordId, record: &Record| {
        seals.add(id, record);
        observed.add(id, record);
        if id == ID_SECRET_RECORD {
            mark = Some(record.clone());
        }
    };
    match oncegate_embedded::check_each(options, &mut note) {
        Ok(found) => {
            let now = SystemClock::new().now();
            let mark = mark.filter(|_| found.has_mark);
            content(dir, &found, observed.open(now), report);
            let has_records = found.records.values().any(|count| *count > 0) || !found.unreadable.is_empty();
            if let Some(problem) = ids.and_then(|ids| ids.problem_with(mark.as_ref(), has_records)) {
                report.error(format!("store {shown}: {problem}"));
            }
            seals.report(&shown.to_string(), rules, now, report);
        }
        // A sidecar that runs is not an error.
        Err(error @ EmbeddedOpenError::InUse { .. }) => {
            report.warn(format!(
                "{}. Its content was NOT checked: stop that process, or check a copy",
                ErrorChain(&error)
            ));
        },
        Err(EmbeddedOpenError::Damaged { damage, .. }) => report.error(format!(
            "store {shown}: damaged, and cannot be opened: {damage}. Keep a copy, and restore a backup, or copy what can be read with \
             --salvage: requests whose records are missing would execute again"
        )),
        Err(error) => report.error(format!("store {shown}: {}", ErrorChain(&error))),
    }
}

/// Connects, writes a key that expires after a second, and reports how the server's configuration can lose records.
fn redis(options: &RedisOptions, ids: Option<IdScheme>, report: &mut Report) {
    let shown = options.shown();
    match redis_findings(options, ids) {
        Ok(findings) => {
            for finding in findings {
                let line = format!("store {shown}: {finding}");
                match finding.severity {
                    Severity::Fine => report.ok(line),
                    _ => report.warn(line),
                }
            }
        }
        Err(error) => report.error(format!("store {shown}: {error}")),
    }
}

fn redis_findings(options: &RedisOptions, ids: Option<IdScheme>) -> Result<Vec<Finding>, String> {
    crate::block_on(async {
        let store =
            RedisStore::open(options.clone()).await.map_err(|error| ErrorChain(&error).to_string())?;
        store.check().await.map_err(|error| ErrorChain(&error).to_string())?;
        if let Some(ids) = ids {
            id_problem(&store, &ids).await?;
        }
        Ok(store.findings())
    })
    .flatten()
}

/// Checks that the store belongs to the id secret of the configuration, or to none. Nothing is written.
///
/// # Errors
/// The reason why the sidecar would refuse requests.
pub(crate) async fn id_problem(store: &dyn Store, ids: &IdScheme) -> Result<(), String> {
    let failed = |error: StoreError| ErrorChain(&error).to_string();
    let mark = store.lookup(ID_SECRET_RECORD).await.map_err(failed)?;
    let mut query = ListQuery::default();
    query.limit = 2;
    let mut has_records = false;
    // Only a new store has to be empty.
    while mark.is_none() && ids.secret().is_some() && !has_records {
        let page = store.list(query.clone()).await.map_err(failed)?;
        has_records = !page.records.is_empty() || !page.unreadable.is_empty();
        query.after = page.next;
        if query.after.is_none() {
            break;
        }
    }
    ids.problem_with(mark.as_ref(), has_records).map_or(Ok(()), |problem| Err(problem.to_string()))
}

/// Succeeds if there is a store in this directory; otherwise the reason why `store-must-exist` refuses it.
pub(crate) fn existing(dir: &Path) -> Result<(), String> {
    let shown = dir.display();
    let missing = || {
        Err(format!(
            "store {shown}: there is no store, and store-must-exist is set; name the right directory, or start once \
             without store-must-exist to create it"
        ))
    };
    match segment_files(dir) {
        Ok(files) if !files.is_empty() => Ok(()),
        Ok(_) => missing(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => missing(),
        Err(error) => Err(format!("store {shown}: {error}")),
    }
}

/// The reason why no store is created in this directory, if it contains other files and no records. A mistyped name would
/// otherwise be a new, empty store, which executes again every request that the real store has answered.
pub(crate) fn has_other_files(dir: &Path) -> Option<String> {
    if segment_files(dir).is_ok_and(|files| !files.is_empty()) {
        return None;
    }
    // The root of a file system has `lost+found`, and files that begin with a dot are not data. A first start that failed
    // leaves the lock.
    let is_other =
        |name: &str| !name.starts_with('.') && !name.ends_with(".log.new") && !NOT_OTHERS.contains(&name);
    let names = fs::read_dir(dir).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let other = names.filter(|name| is_other(name)).min()?;
    Some(format!(
        "the directory contains other files, such as {other}, and no records; name the directory of the store, an empty directory, \
         or one that does not exist yet"
    ))
}

/// Names that the directory of a store without records may have. With some of them, the store itself refuses to open.
const NOT_OTHERS: [&str; 5] = ["lock", "lost+found", "mark", "mark.new", "salvaged"];

/// The most records that are named one by one in the terminal.
const MAX_NAMED: usize = 20;

/// The records of requests that were only observed and have no outcome. They wait for no operator.
#[derive(Default)]
struct ObservedRecords {
    /// The end of the retention of each, by its newest version.
    ends: HashMap<RecordId, Timestamp>,
}

impl ObservedRecords {
    fn add(&mut self, id: RecordId, record: &Record) {
        if !record.label.operation().starts_with(SHADOW_OPERATION) {
            return;
        }
        match record.state {
            State::InProgress { .. } | State::Unknown => drop(self.ends.insert(id, record.expires_at)),
            _ => drop(self.ends.remove(&id)),
        }
    }

    /// The number of those that are not past their retention.
    fn open(&self, now: Timestamp) -> u64 {
        self.ends.values().filter(|end| **end > now).count() as u64
    }
}

/// `observed` of the records that are not settled are those of requests that were only observed.
fn content(dir: &Path, found: &CheckReport, observed: u64, report: &mut Report) {
    let shown = dir.display();
    if let Some(damage) = &found.damage {
        report.error(format!(
            "store {shown}: damaged: {damage}. Keep a copy, and restore a backup, or copy what can be read with --salvage: requests whose records are missing \
             would execute again"
        ));
    }
    if let Some(file) = &found.salvaged {
        let file = file.display();
        report.error(format!(
            "store {shown}: a copy of a damaged store, which is not opened before its losses are accepted: settle what {file} lists, and \
             remove that file"
        ));
    }
    if let Some(reason) = &found.unproved_end {
        report.warn(format!("store {shown}: {reason}"));
    }
    for id in found.unreadable.iter().take(report.max_named) {
        report.error(format!(
            "store {shown}: the record {id} cannot be read; requests with its key are refused"
        ));
    }
    if found.unreadable.len() > report.max_named {
        let more = found.unreadable.len() - report.max_named;
        report.error(format!("store {shown}: and {more} more; --json names them all"));
    }
    if !found.unreadable_audit.is_empty() {
        let count = found.unreadable_audit.len();
        report.error(format!("store {shown}: {count} entries of the audit trail cannot be read"));
    }
    if found.is_disk_low {
        report.warn(format!(
            "store {shown}: the disk is nearly full: the sidecar refuses requests with a new key until there is space"
        ));
    }
    if let Some(reason) = &found.full {
        report.warn(format!("store {shown}: the sidecar refuses requests with a new key: {reason}"));
    }
    if found.is_torn {
        report.warn(format!(
            "store {shown}: the log ends with a write that is not complete: torn by a crash, it was never acknowledged; if the disk \
             was damaged, acknowledged records may be missing"
        ));
    }
    if let Some(skew) = &found.clock {
        report.warn(format!("store {shown}: {skew}"));
    }
    if found.is_sound() {
        let mut states: Vec<_> =
            found.records.iter().map(|(state, count)| format!("{count} {state}")).collect();
        if found.expired > 0 {
            states.push(format!("{} past their retention", found.expired));
        }
        let records = if states.is_empty() { "no records".to_owned() } else { states.join(", ") };
        let audit = found.audit_entries;
        report
            .ok(format!("store {shown}: sound; {}; {records}; audit trail: {audit}", size_text(found.bytes)));
    }
    // No process has the store open, so no request is executing those that are in progress.
    let waiting = [StateName::Unknown, StateName::Abandoned, StateName::InProgress];
    let waiting: u64 = waiting.iter().filter_map(|state| found.records.get(state)).sum();
    let waiting = waiting.saturating_sub(observed);
    // A damaged store is restored from a backup first.
    if waiting > 0 && found.is_sound() {
        report.warn(format!(
            "store {shown}: requests with an unknown outcome: {waiting}; start the sidecar, and run `oncegate keys ls \
             --state unsettled`"
        ));
    }
}

/// Copies what can be read of an embedded store.
fn salvage(draft: &Draft, to: &Path, report: &mut Report) {
    let choice = match &draft.store {
        Some(StoreChoice::Cached(cached)) => Some(&cached.store),
        choice => choice.as_ref(),
    };
    let Some(StoreChoice::Directory(dir)) = choice else {
        return report.error(
            "salvage: only the embedded store, which is a directory, can be copied: name it with --store DIR",
        );
    };
    let shown = format!("salvage {}", to.display());
    let found = match oncegate_embedded::salvage(&EmbeddedOptions::new(dir), to) {
        Ok(found) => found,
        Err(error) => return report.error(format!("{shown}: {}", ErrorChain(&error))),
    };
    report.ok(format!(
        "{shown}: copied {} records and {} entries of the audit trail from {}",
        found.records,
        found.audit_entries,
        dir.display()
    ));
    let named = |report: &mut Report, ids: &[RecordId], what: &str| {
        for id in ids.iter().take(report.max_named) {
            report.error(format!("{shown}: the record {id} {what}"));
        }
        if ids.len() > report.max_named {
            let more = ids.len() - report.max_named;
            report.error(format!("{shown}: and {more} more, of which the same is true"));
        }
    };
    named(
        report,
        &found.unknown,
        "is unknown in the copy, because what followed it is lost: find out what happened, and resolve it",
    );
    named(report, &found.unreadable, "cannot be read; requests with its key are refused by the copy, too");
    for part in found.lost.iter().take(report.max_named) {
        report.error(format!("{shown}: lost: {part}"));
    }
    if found.lost.len() > report.max_named {
        let more = found.lost.len() - report.max_named;
        report.error(format!("{shown}: and {more} more lost parts"));
    }
    if let Some(advice) = found.mark_advice() {
        report.error(format!("{shown}: {advice}"));
    }
    if !found.is_complete() {
        report.error(format!(
            "{shown}: the copy is not opened before its losses are accepted: settle what {} lists, and remove that file",
            to.join("salvaged").display()
        ));
    }
    if !found.lost.is_empty() {
        let time = match &*found.lost_time {
            "" => String::new(),
            time => format!(" ({time})"),
        };
        report.error(format!(
            "{shown}: a key that was first used in a lost part{time} is new to the copy: a retry of it executes again. Find out from the \
             service's own data what took effect, before you start a sidecar on the copy"
        ));
    }
}

/// With less free space, records may fill the disk before an operator looks again.
const MIN_FREE: u64 = 512 * 1024 * 1024;

/// Checks that a file can be created in the directory, and that there is space left.
fn writable(dir: &Path, what: &str, report: &mut Report) -> bool {
    // The file has no name and is removed with its handle.
    if let Err(error) = tempfile::tempfile_in(dir) {
        let remedy = match error.kind() {
            io::ErrorKind::PermissionDenied => {
                "; run this as the user that the sidecar runs as, or give the directory to that user: chown -R USER DIR"
            }
            _ => "",
        };
        report.error(format!("{what}: {error}{remedy}"));
        return false;
    }
    if let Ok(disk) = rustix::fs::statvfs(dir) {
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if free < MIN_FREE {
            report.warn(format!(
                "the disk of {} has {} left; once it is full, requests with a key are refused",
                dir.display(),
                size_text(free)
            ));
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::os::unix::fs::symlink;
    use std::time::Duration;

    use oncegate_core::{AttemptId, Claim, Command, Fingerprint, Label, OnAbandoned, RecordId, Store as _};
    use oncegate_embedded::EmbeddedStore;

    use super::*;
    use crate::config::parse_flags;

    /// The lines for these flags, with the directory that everything is in taken off.
    fn lines(dir: &Path, flags: &[&str]) -> Vec<String> {
        let args = parse_flags(flags).unwrap();
        let none: [(OsString, OsString); 0] = [];
        let mut report = Report::new(false);
        check(&Draft::read(&args, none), false, &mut report);
        let prefix = format!("{}/", dir.display());
        report.lines.iter().map(|line| line.to_string().replace(&prefix, "")).collect()
    }

    fn private(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    struct World {
        dir: tempfile::TempDir,
        store: PathBuf,
    }

    impl World {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let store = dir.path().join("data");
            Self { dir, store }
        }

        /// The lines of the store, with everything else in order.
        fn store_lines(&self) -> Vec<String> {
            let store = self.store.to_str().unwrap();
            let lines = lines(self.dir.path(), &["--to", "http://127.0.0.1:3000", "--store", store]);
            assert!(
                lines[0].starts_with("ok    configuration: to=http://127.0.0.1:3000 (--to)"),
                "{lines:?}"
            );
            assert_eq!(
                lines[1],
                "ok    addresses: requests on 127.0.0.1:8080, admin on 127.0.0.1:9090, for this machine only"
            );
            assert_eq!(lines[2], "ok    service http://127.0.0.1:3000: not contacted");
            assert!(lines[3].starts_with("ok    callers: `scope` is not set"), "{lines:?}");
            lines[4..].to_vec()
        }

        fn open(&self) -> EmbeddedStore {
            EmbeddedStore::open(EmbeddedOptions::new(&self.store)).unwrap()
        }
    }

    #[test]
    fn every_error_has_a_line_and_the_store_is_checked_anyway() {
        let world = World::new();
        let file = world.dir.path().join("oncegate.toml");
        fs::write(&file, "lease = 30\nretentoin = \"1h\"\nwait = \"1s\"\nupstream-timeout = \"none\"\n")
            .unwrap();
        let flags = ["--config", file.to_str().unwrap(), "--store", world.store.to_str().unwrap()];
        let lines = lines(world.dir.path(), &flags);
        let expected = [
            "error oncegate.toml:1:9: lease: \"30\" has no unit",
            "error oncegate.toml:2:1: no such setting `retentoin`; did you mean `retention`?",
            "warn  oncegate.toml:4:20: upstream-timeout: a service that hangs",
            "error nothing to protect: give --to URL",
            "ok    store data: does not exist yet; the first start creates it",
        ];
        assert_eq!(lines.len(), expected.len(), "{lines:#?}");
        for (line, expected) in lines.iter().zip(expected) {
            assert!(line.starts_with(expected), "{line}\n{expected}");
        }
    }

    #[test]
    fn a_store_with_a_doubtful_name_is_not_checked() {
        let dir = tempfile::tempdir().unwrap();
        let not_checked =
            "warn  store: not checked, because the errors above leave it unclear which store is meant";
        let by_flag = lines(dir.path(), &["--store", "other://x"]);
        assert!(by_flag[0].contains("is not the URL of a store"), "{by_flag:?}");
        assert_eq!(by_flag.last().unwrap(), not_checked);
        let file = dir.path().join("f.toml");
        fs::write(&file, "store = ").unwrap();
        let by_file = lines(dir.path(), &["--config", file.to_str().unwrap()]);
        assert!(by_file[0].starts_with("error f.toml:1:9: not TOML: "), "{by_file:?}");
        assert_eq!(by_file.last().unwrap(), not_checked);
        let memory = lines(dir.path(), &["--store", "memory:", "--to", "http://h"]);
        assert_eq!(memory.last().unwrap(), "ok    store memory:");
        assert!(memory[0].starts_with("warn  --store: records are kept in memory"), "{memory:?}");
    }

    #[test]
    fn a_path_that_cannot_be_a_directory_is_named() {
        let world = World::new();
        assert_eq!(
            World { store: world.store.join("deep/down"), dir: tempfile::tempdir().unwrap() }
                .store_lines()
                .len(),
            1
        );
        assert!(!world.store.exists(), "a check creates nothing");
        fs::write(&world.store, "").unwrap();
        assert_eq!(world.store_lines(), ["error store data: is not a directory"]);
        let below = World { store: world.store.join("below"), dir: world.dir };
        let lines = below.store_lines();
        assert!(lines.len() == 1 && lines[0].starts_with("error store data/below: "), "{lines:?}");
        fs::remove_file(below.dir.path().join("data")).unwrap();

        let world = World { store: below.dir.path().join("data"), dir: below.dir };
        symlink("/proc", &world.store).unwrap();
        let lines = world.store_lines();
        assert!(
            lines.iter().any(|line| line.starts_with("error store data: cannot be written to: ")),
            "{lines:?}"
        );
    }

    #[test]
    fn a_directory_with_other_files_is_an_error() {
        let world = World::new();
        fs::create_dir(&world.store).unwrap();
        assert_eq!(world.store_lines(), ["ok    store data: empty; the first start creates it"]);
        fs::write(world.store.join("other"), "").unwrap();
        assert_eq!(
            world.store_lines(),
            [
                "error store data: the directory contains other files, such as other, and no records; name the directory of the \
                 store, an empty directory, or one that does not exist yet"
            ]
        );
    }

    #[test]
    fn what_is_left_of_a_store_is_no_empty_directory() {
        let world = World::new();
        drop(world.open());
        for file in segment_files(&world.store).unwrap() {
            fs::remove_file(file).unwrap();
        }
        let lines = world.store_lines();
        assert!(
            lines.len() == 1 && lines[0].contains("data/mark: all segments are missing: batch "),
            "{lines:?}"
        );
    }

    #[test]
    fn a_program_gets_all_names_and_the_terminal_twenty() {
        let mut found = CheckReport::default();
        found.unreadable.extend((0..25).map(|n| RecordId::from_bytes([n; 32])));
        for (is_json, named) in [(true, 25), (false, 20)] {
            let mut report = Report::new(is_json);
            content(Path::new("data"), &found, 0, &mut report);
            let texts: Vec<_> = report.lines.iter().map(|line| &*line.1).collect();
            assert_eq!(texts.iter().filter(|text| text.contains("cannot be read")).count(), named);
            assert_eq!(
                texts.contains(&"store data: and 5 more; --json names them all"),
                !is_json,
                "{texts:?}"
            );
        }
    }

    #[tokio::test]
    async fn a_full_store_is_a_warning() {
        let world = World::new();
        let store = world.open();
        for n in 1..=2 {
            let claim = Command::Claim(oncegate_testkit::claim(u128::from(n), b"input"));
            store.apply(RecordId::from_bytes([n; 32]), claim).await.unwrap();
        }
        drop(store);
        let flags = |records: &'static str| {
            ["--to", "http://h", "--max-records", records, "--store", world.store.to_str().unwrap()]
        };
        let full = |records| {
            let lines = lines(world.dir.path(), &flags(records));
            lines.into_iter().find(|line| line.contains("refuses requests with a new key"))
        };
        let expected = "warn  store data: the sidecar refuses requests with a new key: it has reached its limit of 2 records";
        assert!(full("2").is_some_and(|line| line.starts_with(expected)));
        assert_eq!(full("3"), None);
    }

    #[test]
    fn a_missing_mark_is_a_warning() {
        let world = World::new();
        drop(world.open());
        fs::remove_file(world.store.join("mark")).unwrap();
        let lines = world.store_lines();
        assert!(lines.len() == 2, "{lines:?}");
        assert!(lines[0].starts_with("warn  store data: data/mark is missing. "), "{lines:?}");
        assert!(lines[1].starts_with("ok    store data: sound; "), "{lines:?}");
    }

    #[tokio::test]
    async fn a_store_is_read_and_one_in_use_is_left_alone() {
        let world = World::new();
        let store = world.open();
        let claim = Claim {
            attempt: AttemptId::new(1),
            fingerprint: Fingerprint::of_parts("test", &[]),
            lease: Duration::from_secs(30),
            retention: Duration::from_secs(3600),
            on_abandoned: OnAbandoned::Park,
            label: Label::default(),
        };
        store.apply(RecordId::from_bytes([1; 32]), Command::Claim(claim)).await.unwrap();
        let lines = world.store_lines();
        let in_use =
            format!("warn  the store in data is in use by this process (pid {})", std::process::id());
        let in_use = |line: &str| line.replace(world.store.to_str().unwrap(), "data").starts_with(&in_use);
        assert!(lines.len() == 1 && in_use(&lines[0]), "{lines:?}");
        drop(store);
        // Closing takes a moment in another thread.
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        let lines = loop {
            let lines = world.store_lines();
            if !in_use(&lines[0]) {
                break lines;
            }
            assert!(std::time::Instant::now() < deadline, "{lines:?}");
            tokio::task::yield_now().await;
        };
        assert_eq!(lines.len(), 2, "{lines:?}"); // and no warning that other users can read it
        assert!(lines[0].starts_with("ok    store data: sound; "), "{lines:?}");
        assert!(lines[0].ends_with("; 1 in-progress; audit trail: 0"), "{lines:?}");
        assert!(lines[1].starts_with("warn  store data: requests with an unknown outcome: 1"));

        // A request that was only observed waits for no operator, whatever became of it.
        let store = world.open();
        let label = Label::new(Default::default(), "(shadow) POST /a");
        let claim = Claim { label, ..oncegate_testkit::claim(2_u32, b"input") };
        store.apply(RecordId::from_bytes([2; 32]), Command::Claim(claim)).await.unwrap();
        store.close();
        drop(store);
        let lines = world.store_lines();
        assert!(lines[0].contains("; 2 in-progress; "), "{lines:?}");
        assert!(lines[1].starts_with("warn  store data: requests with an unknown outcome: 1"), "{lines:?}");
    }

    #[test]
    fn a_damaged_store_is_an_error() {
        let world = World::new();
        fs::create_dir(&world.store).unwrap();
        fs::write(world.store.join("00000001.log"), vec![7; 8192]).unwrap();
        private(&world.store.join("00000001.log"), 0o600);
        let lines = world.store_lines();
        assert!(lines.len() == 1 && lines[0].starts_with("error store data: "), "{lines:?}");
        assert!(lines[0].contains("damaged") && !lines[0].contains("oncegate check"), "{lines:?}");
    }

    #[test]
    fn secrets_and_certificates_are_checked() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        for (name, content) in [("token", "0123456789abcdef"), ("cert.pem", ""), ("key.pem", "")] {
            fs::write(path(name), content).unwrap();
            private(path(name).as_ref(), 0o604);
        }
        let (token, cert, key) = (path("token"), path("cert.pem"), path("key.pem"));
        let flags = ["--to", "http://h", "--store", "memory:", "--admin-token-file", &token];
        let flags = [&flags[..], &["--tls-cert", &cert, "--tls-key", &key]].concat();
        let lines = lines(dir.path(), &flags);
        let has =
            |start: &str| assert!(lines.iter().any(|line| line.starts_with(start)), "{start}\n{lines:#?}");
        has("warn  the admin token in token can be read by every user of this machine; run: chmod o= token");
        has("error TLS: cert.pem: there is no certificate in it");
        has("warn  the TLS key in key.pem can be read by every user");
        has("ok    addresses: requests on 127.0.0.1:8080, admin on 127.0.0.1:9090, with a token");
    }
}
