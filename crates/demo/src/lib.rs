//! The demonstration behind `oncegate demo`: the same traffic without Oncegate and with it, and the ledger of both runs.
//!
//! A small payments service charges each request that reaches it and lists every charge in a ledger. Customers pay over a
//! network that loses, cuts and delays requests and responses. They double-click, hang up and come back, and their client
//! retries as a careful client does. In the first run the clients reach the service directly. In the second run the
//! sidecar is between them, with its store on disk, and is killed with `kill -9` in the middle.
//!
//! The plan is drawn from a seed before the runs start. It is the same in both runs and for each use of the seed. The
//! timing depends on the machine. The result is counted in the ledger and in the responses that clients got; only the
//! number of intended payments comes from the plan.
//!
//! Everything listens on the loopback address. The store and the sidecar's log are in a temporary directory.
//!
//! With a [`SharedStore`], two sidecars share a database instead. The network sends requests to both in turn. One of them is
//! killed and stays away, and the other continues with the records that both have written.

mod client;
mod exchange;
mod figures;
mod network;
mod operator;
mod plan;
mod report;
mod run;
mod service;
mod sidecar;
mod stage;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use plan::Plan;
use report::Report;
use service::Charge;
pub use sidecar::SharedStore;
use sidecar::SidecarConfig;
use stage::{Screen, Style};

/// The settings of a demonstration.
#[derive(Clone)]
pub struct DemoOptions {
    /// The executable that is started as the sidecar: `oncegate`.
    pub program: PathBuf,
    /// The seed of the plan; `None` picks one.
    pub seed: Option<u64>,
    /// The number of payments that the customers want to make.
    pub intents: usize,
    /// Prints the result as JSON on the standard output, and the progress on the standard error.
    pub json: bool,
    /// Colours the progress, and the result for people.
    pub colours: bool,
    /// Keeps the temporary directory.
    pub keep: bool,
    /// The store of two sidecars; `None` shows one sidecar with a store of its own.
    pub store: Option<SharedStore>,
}

/// The end of a demonstration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DemoOutcome {
    /// With Oncegate, each payment was charged once and its customer got the receipt.
    Clean,
    /// With Oncegate, a payment was charged twice or not at all, or its customer got another response.
    Faulty,
    /// A signal ended the demonstration early.
    Interrupted,
}

/// Runs the demonstration and prints it.
///
/// # Errors
/// A text for people if the demonstration cannot be run: the store cannot be used, or the sidecar does not start.
pub fn run(options: &DemoOptions) -> Result<DemoOutcome, String> {
    let directory = tempfile::Builder::new().prefix("oncegate-demo-").tempdir();
    let mut directory = directory.map_err(|error| format!("cannot create a temporary directory: {error}"))?;
    directory.disable_cleanup(options.keep);
    let screen = Screen::new(options.json, options.colours);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(|error| format!("cannot start a runtime: {error}"))?;
    let result = runtime.block_on(async {
        tokio::select! {
            report = demonstrate(options, directory.path(), screen) => report.map(Some),
            signal = interruption() => signal.map(|()| None),
        }
    });
    runtime.shutdown_timeout(Duration::from_millis(200));
    if options.keep {
        screen.line(&format!("Kept: {}", directory.path().display()));
    }
    let Some(report) = result? else {
        screen.line("Interrupted. The sidecar is stopped.");
        return Ok(DemoOutcome::Interrupted);
    };
    if options.json {
        let written = writeln!(std::io::stdout(), "{}", report.json()?);
        written.map_err(|error| format!("cannot write the result: {error}"))?;
    }
    Ok(if report.is_clean() { DemoOutcome::Clean } else { DemoOutcome::Faulty })
}

async fn demonstrate(options: &DemoOptions, directory: &Path, screen: Screen) -> Result<Report, String> {
    let config = SidecarConfig {
        program: options.program.clone(),
        dir: directory.to_owned(),
        log: "store.log",
        shared: options.store.clone(),
    };
    if let Some(store) = &options.store {
        sidecar::try_store(config.clone(), &store.shown).await?;
    }
    let plan = Arc::new(Plan::draw(options.seed.unwrap_or_else(any_seed), options.intents));
    introduce(&plan, screen);
    let bold = |text: &str| screen.line(&format!("\n{}", screen.paint(Style::Bold, text)));
    bold("1 of 2  Without Oncegate: customers → hostile network → payments service");
    let without = run::without_oncegate(plan.clone(), screen).await?;
    let proxies = if options.store.is_some() { "2 × oncegate proxy" } else { "oncegate proxy" };
    bold(&format!("2 of 2  With Oncegate: customers → hostile network → {proxies} → payments service"));
    if let Some(SharedStore { shown, path, .. }) = &options.store {
        screen.line(&format!(
            "Both sidecars keep their records in {shown},\nas those of POST {path}, for an hour."
        ));
    }
    let with = run::with_oncegate(plan.clone(), screen, &config).await?;
    if options.keep {
        keep_ledger(directory, "ledger-without.jsonl", &without.ledger)?;
        keep_ledger(directory, "ledger-with.jsonl", &with.ledger)?;
    }
    let report = Report::new(&plan, without.figures, with.figures);
    report.show(screen);
    Ok(report)
}

fn introduce(plan: &Plan, screen: Screen) {
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

/// A seed from the clock, short enough to type.
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

/// Waits for Ctrl-C or another signal that asks a program to end.
async fn interruption() -> Result<(), String> {
    use tokio::signal::unix::{SignalKind, signal};
    let listen = |kind| signal(kind).map_err(|error| format!("cannot listen for signals: {error}"));
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut terminate = listen(SignalKind::terminate())?;
    let mut hang_up = listen(SignalKind::hangup())?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        _ = hang_up.recv() => {}
    }
    Ok(())
}
