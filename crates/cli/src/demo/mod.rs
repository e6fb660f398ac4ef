//! `oncegate demo`: the same traffic without Oncegate and with it, and what the ledger says afterwards.
//!
//! A small payments service charges whenever it is told to, and shows every charge in a ledger. Customers pay over a
//! network that loses requests and replies, cuts them, and lets them wait; they click twice, hang up and come back, and
//! their client retries as an ordinary careful client does. In the first run the clients reach the service directly. In
//! the second, the sidecar stands between, with its store on disk, and is killed with `kill -9` in the middle.
//!
//! The plan of all this is drawn from a seed before it starts and is the same in both runs and each time; when exactly
//! things happen is up to the machine. Nothing in the result is taken from the plan but what was meant to be paid.
//!
//! Everything listens on the loopback address; the store and the sidecar's log are in a temporary directory.
//!
//! With `--store`, two sidecars share a database instead. The network gives requests to both in turn, one of them is
//! killed and stays away, and the other goes on with what both have written.

mod client;
mod exchange;
mod figures;
mod network;
mod operator;
mod plan;
mod report;
mod run;
mod screen;
mod service;
mod shared;
mod sidecar;
mod story;
mod tally;

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use plan::Plan;
use report::Report;
use screen::{Screen, Style};
use service::Charge;
use shared::Shared;

/// What `oncegate demo` is told.
#[derive(Clone, clap::Args)]
pub(crate) struct DemoArgs {
    /// Repeats the plan of an earlier demonstration: payments, double clicks, faults. Timing is never the same twice.
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
    /// How many payments the customers mean to make.
    #[arg(long, value_name = "NUMBER", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    intents: u64,
    /// Prints the result as JSON on the standard output, and the progress on the standard error.
    #[arg(long)]
    json: bool,
    /// Shows two sidecars that share this database, such as redis://HOST, postgres://USER@HOST/DATABASE (after `oncegate
    /// schema apply`) or cached(cache=STORE,store=STORE): one is killed and stays away. Without it, one sidecar with a store of
    /// its own is killed and restarted. The records that it leaves in the database have a retention of an hour
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// Keeps the temporary directory: the store, the sidecar's log, both ledgers.
    #[arg(long)]
    keep: bool,
}

/// Shows it. The exit code is 0 if with Oncegate each payment was charged once and its customer told so, 1 if not or if
/// the demonstration could not be held, 130 if it was interrupted.
pub(crate) fn run(args: &DemoArgs) -> ExitCode {
    match prepare_and_run(args) {
        Ok(Some(true)) => ExitCode::SUCCESS,
        Ok(Some(false)) => ExitCode::FAILURE,
        Ok(None) => ExitCode::from(130),
        Err(error) => {
            complain!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether the result is clean; `None` where somebody interrupted it.
fn prepare_and_run(args: &DemoArgs) -> Result<Option<bool>, String> {
    let shared = args.store.as_deref().map(Shared::read).transpose()?;
    let directory = tempfile::Builder::new().prefix("oncegate-demo-").tempdir();
    let mut directory = directory.map_err(|error| format!("cannot make a temporary directory: {error}"))?;
    directory.disable_cleanup(args.keep);
    let screen = Arc::new(Screen::new(args.json));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(|error| format!("cannot start: {error}"))?;
    let result = runtime.block_on(async {
        tokio::select! {
            report = demonstrate(args, shared.as_ref(), directory.path(), &screen) => report.map(Some),
            signal = interrupted() => signal.map(|()| None),
        }
    });
    runtime.shutdown_timeout(Duration::from_millis(200));
    screen.end_status();
    if args.keep {
        screen.line(&format!("Kept: {}", directory.path().display()));
    }
    let Some(report) = result? else {
        screen.line(match shared {
            None => "Interrupted. The sidecar is stopped.",
            Some(_) => "Interrupted. The sidecars are stopped.",
        });
        return Ok(None);
    };
    if args.json {
        let written = writeln!(std::io::stdout(), "{}", report.json()?);
        written.map_err(|error| format!("cannot write the result: {error}"))?;
    }
    Ok(Some(report.is_clean()))
}

async fn demonstrate(
    args: &DemoArgs,
    shared: Option<&Shared>,
    directory: &Path,
    screen: &Arc<Screen>,
) -> Result<Report, String> {
    if let Some(shared) = shared {
        sidecar::try_store(directory, shared).await?;
    }
    let plan = Arc::new(Plan::draw(args.seed.unwrap_or_else(any_seed), args.intents as usize));
    introduce(&plan, screen);
    let bold = |text: &str| screen.line(&format!("\n{}", screen.paint(Style::Bold, text)));
    bold("1 of 2  Without Oncegate: customers → hostile network → payments service");
    let without = run::without_oncegate(plan.clone(), screen.clone()).await?;
    match shared {
        None => {
            bold("2 of 2  With Oncegate: customers → hostile network → oncegate proxy → payments service")
        }
        Some(Shared { shown, path, .. }) => {
            bold(
                "2 of 2  With Oncegate: customers → hostile network → 2 × oncegate proxy → payments service",
            );
            screen.line(&format!(
                "Both sidecars keep their records in {shown},\nas those of POST {path}, for an hour."
            ));
        }
    }
    let with = run::with_oncegate(plan.clone(), screen.clone(), directory, shared).await?;
    if args.keep {
        keep_ledger(directory, "ledger-without.jsonl", &without.ledger)?;
        keep_ledger(directory, "ledger-with.jsonl", &with.ledger)?;
    }
    let report = Report::new(&plan, without.figures, with.figures);
    report.show(screen);
    Ok(report)
}

fn introduce(plan: &Plan, screen: &Screen) {
    let (seed, intents) = (plan.seed, plan.intents.len());
    let (double_clicks, faults) = (plan.double_clicks(), plan.faults().total());
    screen.line(&screen.paint(
        Style::Bold,
        &format!("{intents} payments, {double_clicks} of them double-clicked, {faults} faults on their way. Seed {seed}."),
    ));
    screen.line(&format!(
        "Payments, clicks and faults come from the seed and are the same in both runs; `--seed {seed}`\n\
         repeats them. Timing is this machine's, so the number of refusals differs from run to run."
    ));
}

/// Small enough to be typed.
fn any_seed() -> u64 {
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    since.as_nanos() as u64 / 1_000 % 1_000_000
}

fn keep_ledger(directory: &Path, name: &str, ledger: &[Charge]) -> Result<(), String> {
    let lines = ledger.iter().map(|charge| serde_json::to_string(charge).map(|line| line + "\n"));
    let text: Result<String, _> = lines.collect();
    let text = text.map_err(|error| format!("cannot write {name}: {error}"))?;
    std::fs::write(directory.join(name), text).map_err(|error| format!("cannot write {name}: {error}"))
}

/// Waits for Ctrl-C, or for whatever else asks a program to end.
async fn interrupted() -> Result<(), String> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let listen = |kind| signal(kind).map_err(|error| format!("cannot listen for signals: {error}"));
        let (mut interrupt, mut terminate, mut hang_up) = (
            listen(SignalKind::interrupt())?,
            listen(SignalKind::terminate())?,
            listen(SignalKind::hangup())?,
        );
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hang_up.recv() => {}
        }
        Ok(())
    }
    #[cfg(not(unix))]
    tokio::signal::ctrl_c().await.map_err(|error| format!("cannot listen for signals: {error}"))
}
