//! `oncegate probe`: the arguments, the files and the exit code. [`oncegate_probe`] does the rest.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use clap::Args;
use http::{StatusCode, Uri};
use oncegate_core::Timestamp;
use oncegate_http::{Condition, Profile, Protocol};
use oncegate_probe::{Expectations, Operation, Probe, ProbeError, ProbeOptions, Report, Restart, Verdict};
use tokio::sync::oneshot;

use crate::admin::time;
use crate::call::trusting_file;
use crate::config::{ProfileChoice, duration, read_profile};
use crate::files;
use crate::proxy::tls;
use crate::signals::Signals;
use crate::style::{Tone, paint};

/// The arguments of `oncegate probe`.
#[derive(Args)]
pub(crate) struct ProbeArgs {
    /// The address of the API, with http:// or https://; the path of the operation is appended to it
    #[arg(value_parser = url)]
    url: Uri,
    /// The operation: a TOML file with the request, and the place where its effects can be counted
    #[arg(short = 'o', long, value_name = "FILE")]
    operation: PathBuf,
    /// The profile that the API is compared with: the name of a shipped one, or a file that ends with .toml
    #[arg(long, value_name = "NAME|FILE", default_value = "ietf", value_parser = read_profile)]
    profile: ProfileChoice,
    /// Sends requests to an address that is not on this machine. The requests are real and take effect there
    #[arg(long)]
    yes: bool,

    /// The number of duplicates that are sent at once
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(2..=i64::from(oncegate_probe::MAX_CONCURRENCY)), help_heading = "Limits")]
    concurrency: u32,
    /// The most requests in one second
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=i64::from(oncegate_probe::MAX_RATE)), help_heading = "Limits")]
    rate: u32,
    /// The most requests, those to the counting URL included
    #[arg(long, value_name = "N", default_value_t = 400, value_parser = clap::value_parser!(u32).range(1..=i64::from(oncegate_probe::MAX_REQUESTS)), help_heading = "Limits")]
    max_requests: u32,
    /// The longest time for one request, and for a retry to get a definite response
    #[arg(short = 'm', long, value_name = "DURATION", default_value = "30s", value_parser = duration, help_heading = "Limits")]
    max_time: Duration,

    /// Repeats a request after this time, to see if the API still remembers its key. Ctrl-C prints the rows so far
    #[arg(long = "patience", value_name = "DURATION", value_parser = duration, help_heading = "More rows")]
    retention_wait: Option<Duration>,
    /// A command that restarts the API, for the row about a restart. The shell runs it
    #[arg(long, value_name = "COMMAND", help_heading = "More rows")]
    restart: Option<String>,
    /// Trusts the certificates in this file, in PEM, and no others
    #[arg(long, value_name = "FILE", help_heading = "Connection")]
    cacert: Option<PathBuf>,

    /// Prints the report as JSON instead of a table
    #[arg(long, help_heading = "Output")]
    json: bool,
    /// Writes a JUnit document to this file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    junit: Option<PathBuf>,
    /// Writes one HTML page to this file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    html: Option<PathBuf>,
}

/// The end of a probe.
#[derive(Clone, Copy)]
enum End {
    AsExpected,
    Dangerous,
    Usage,
    Differs,
    Unusable,
    Interrupted,
}

/// Every exit code and its meaning. A test compares them with the page docs/reference/probe.md.
const EXIT_CODES: [(End, u8, &str); 6] = [
    (End::AsExpected, 0, "every row that was tested is as expected"),
    (End::Dangerous, 1, "a row is dangerous, also if the probe was interrupted after it"),
    (End::Usage, 2, "wrong usage: nothing was sent"),
    (End::Differs, 3, "a row differs from the profile, and none is dangerous"),
    (
        End::Unusable,
        4,
        "the API could not be probed, no row could be tested, or the report could not be written",
    ),
    (
        End::Interrupted,
        5,
        "the probe was interrupted: the report has the rows before that, and none is dangerous",
    ),
];

/// The exit codes, for `--help`.
pub(crate) fn exit_codes() -> String {
    let lines = EXIT_CODES.map(|(_, code, meaning)| format!("  {code}  {meaning}"));
    format!("Exit codes:\n{}", lines.join("\n"))
}

impl From<End> for ExitCode {
    fn from(end: End) -> Self {
        let mut codes = EXIT_CODES.iter().filter(|(other, ..)| *other as u8 == end as u8);
        codes.next().map_or(Self::FAILURE, |(_, code, _)| Self::from(*code))
    }
}

/// Runs the probe. The exit code reports the worst row.
pub(crate) fn run(args: &ProbeArgs) -> ExitCode {
    match probe(args) {
        Ok(report) => finish(args, &report).into(),
        Err(error) => {
            for line in error.to_string().lines() {
                complain!("error: {line}");
            }
            match error {
                ProbeError::Unusable(_) => End::Unusable.into(),
                _ => End::Usage.into(),
            }
        }
    }
}

fn probe(args: &ProbeArgs) -> Result<Report, ProbeError> {
    // Before requests take effect whose report would be lost.
    for (path, flag) in [(&args.junit, "--junit"), (&args.html, "--html")] {
        if let Some(path) = path {
            let opened = std::fs::OpenOptions::new().append(true).create(true).open(path);
            opened.map_err(|error| ProbeError::Usage(format!("{flag} {}: {error}", path.display())))?;
        }
    }
    let file = &args.operation;
    let at =
        |error: &dyn std::fmt::Display| ProbeError::Usage(format!("--operation {}: {error}", file.display()));
    let text = files::read_text(file, files::MAX_TEXT).map_err(|error| at(&error))?;
    let operation = Operation::parse(&text, &|name| std::env::var(name).ok()).map_err(|error| at(&error))?;
    let profile = profile(&args.profile)?;
    if profile.protocol() == Protocol::Mcp {
        let text = "it is for calls of tools, whose refusals have the status 200; the probe reads the statuses of an HTTP API";
        return Err(ProbeError::Usage(format!("--profile {}: {text}", profile.name())));
    }
    let mut options = ProbeOptions::new(expectations(&profile));
    options.may_leave = args.yes;
    options.max_requests = args.max_requests;
    options.rate = args.rate;
    options.concurrency = args.concurrency;
    options.max_time = args.max_time;
    options.retention_wait = args.retention_wait;
    options.restart = args.restart.clone().map(restart);
    let now = UNIX_EPOCH.elapsed().unwrap_or_default();
    options.date = time(Timestamp::from_millis(now.as_millis() as u64));
    let config = match &args.cacert {
        Some(file) => trusting_file(file),
        None => tls::trusting_system(args.url.scheme_str() == Some("https"))
            .map_err(|error| format!("{error}; give --cacert")),
    };
    options.tls = Some(Arc::new(config.map_err(ProbeError::Usage)?));
    crate::block_on(until_stopped(args, operation, options)).map_err(ProbeError::Unusable)?
}

/// Runs the probe. After a first signal it reports what it has seen; a second one ends it without a report.
async fn until_stopped(
    args: &ProbeArgs,
    operation: Operation,
    options: ProbeOptions,
) -> Result<Report, ProbeError> {
    let probe = Probe::new(&args.url, operation, options).await?;
    // Before this, each of these signals ends the process, which has sent nothing.
    let signals = Signals::new();
    let mut signals =
        signals.map_err(|error| ProbeError::Unusable(format!("cannot listen for signals: {error}")))?;
    let (interrupt, interrupted) = oneshot::channel();
    let stopped = async {
        signals.first().await;
        complain!("interrupted: rows that have not ended are not tested");
        let _ = interrupt.send(());
        signals.second().await;
    };
    let probing = async {
        let most = args.max_requests;
        complain!(
            "sending real requests to {}: at most {most}, {} in a second",
            authority(&args.url),
            args.rate
        );
        if let Some(wait) = args.retention_wait {
            let wait = crate::config::duration_text(wait);
            complain!(
                "the last row waits until {wait} after the start; Ctrl-C ends it, and prints the other rows"
            );
        }
        let interruption = async {
            let _ = interrupted.await;
        };
        probe.run_until(interruption).await
    };
    tokio::select! {
        report = probing => report,
        () = stopped => Err(ProbeError::Unusable("stopped at once, by a second signal: there is no report".to_owned())),
    }
}

fn authority(url: &Uri) -> &str {
    url.authority().map_or("", |authority| authority.as_str())
}

/// Writes the report, and returns its end.
fn finish(args: &ProbeArgs, report: &Report) -> End {
    let mut is_written = true;
    let mut write = |path: Option<&Path>, flag: &str, text: String| {
        let Some(path) = path else { return };
        if let Err(error) = std::fs::write(path, text) {
            complain!("error: {flag} {}: {error}", path.display());
            is_written = false;
        }
    };
    write(args.junit.as_deref(), "--junit", report.to_junit());
    write(args.html.as_deref(), "--html", report.to_html());
    let text = if args.json { report.to_json() } else { report.to_painted_table(&painted) };
    let mut out = std::io::stdout();
    if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        complain!("error: cannot write the report: {error}");
        is_written = false;
    }
    match report.verdict {
        Verdict::Dangerous => End::Dangerous,
        _ if report.interrupted => End::Interrupted,
        Verdict::Differs => End::Differs,
        Verdict::NotTested => End::Unusable,
        _ if !is_written => End::Unusable,
        _ => End::AsExpected,
    }
}

/// The words of a verdict in its colour.
fn painted(verdict: Verdict, words: &str) -> String {
    let tone = match verdict {
        Verdict::AsExpected => Tone::Good,
        Verdict::Differs => Tone::Open,
        Verdict::Dangerous => Tone::Alarm,
        Verdict::NotTested => Tone::Quiet,
    };
    paint(tone, words)
}

/// Runs the command of the operator, and waits for its end.
fn restart(command: String) -> Restart {
    Arc::new(move || {
        let mut shell = tokio::process::Command::new("sh");
        shell.arg("-c").arg(&command).stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
        // Ctrl-C must not end the command halfway, nor an API that it has started.
        shell.process_group(0);
        Box::pin(async move {
            let status =
                shell.status().await.map_err(|error| format!("--restart: cannot start sh: {error}"))?;
            if status.success() { Ok(()) } else { Err(format!("the command of --restart failed: {status}")) }
        })
    })
}

fn url(text: &str) -> Result<Uri, String> {
    let whole =
        || "write the whole address with http:// or https://, such as http://127.0.0.1:8080".to_owned();
    let uri: Uri = text.parse().map_err(|_| whole())?;
    match uri.scheme_str() {
        Some("http" | "https") if uri.host().is_some_and(|host| !host.is_empty()) => Ok(uri),
        _ => Err(whole()),
    }
}

/// The profile itself, read from its file if it is one.
fn profile(choice: &ProfileChoice) -> Result<Profile, ProbeError> {
    let path = match choice {
        ProfileChoice::Shipped(profile) => return Ok((**profile).clone()),
        ProfileChoice::File(path) => path,
    };
    let text = files::read_text(path, files::MAX_TEXT)
        .map_err(|error| ProbeError::Usage(format!("--profile {}: {error}", path.display())))?;
    let name = path.file_stem().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    Profile::parse(&name, &text).map_err(|errors| {
        let lines = errors
            .0
            .iter()
            .map(|error| format!("{}:{}:{}: {}", path.display(), error.line, error.column, error.message));
        ProbeError::Usage(lines.collect::<Vec<_>>().join("\n"))
    })
}

/// The behaviour that the sidecar has with this profile, and that is expected of other APIs.
fn expectations(profile: &Profile) -> Expectations {
    let refusals = profile.refusals();
    let status = |condition: Condition| {
        refusals.iter().filter(|row| row.condition == condition).map(|row| row.status.as_u16()).collect()
    };
    let all = || (100..=599).filter_map(|status| StatusCode::from_u16(status).ok());
    let replays = all().filter_map(|first| {
        let replay = profile.replay_status(first);
        (replay != first).then_some((first.as_u16(), replay.as_u16()))
    });
    Expectations {
        name: profile.name().to_owned(),
        key_header: profile.key_headers().into_iter().next(),
        requires_key: profile.requires_key(),
        compares_bodies: profile.compares_bodies(),
        key_reused: status(Condition::KeyReused),
        in_progress: status(Condition::RequestInProgress),
        key_missing: status(Condition::KeyMissing),
        key_invalid: status(Condition::KeyInvalid),
        raw_keys: profile.takes_raw_keys(),
        released: all().filter(|status| profile.frees_key(*status)).map(|status| status.as_u16()).collect(),
        replay_statuses: replays.collect(),
        replay_marker: Some(profile.replay_marker()),
        retry_after: true,
        retention: profile.retention(),
    }
}
