//! `oncegate demo`: the arguments, and the exit code. [`oncegate_demo`] does the rest.

use std::process::ExitCode;

use oncegate_demo::{DemoOptions, DemoOutcome, SharedStore};

use crate::config::{StoreChoice, read_store};
use crate::style;

/// The arguments of `oncegate demo`.
#[derive(Clone, clap::Args)]
pub(crate) struct DemoArgs {
    /// Repeats the plan of an earlier demonstration: payments, double clicks, faults. The timing differs each time.
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
    /// The number of payments that the customers want to make.
    #[arg(long, value_name = "NUMBER", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    intents: u64,
    /// Prints the result as JSON on the standard output, and the progress on the standard error.
    #[arg(long)]
    json: bool,
    /// Shows two sidecars that share this database, such as redis://HOST, postgres://USER@HOST/DATABASE (after `oncegate
    /// schema apply`) or cached(cache=STORE,store=STORE). One of them is killed and stays away. Without this flag, one
    /// sidecar with a store of its own is killed and restarted. The records in the database have a retention of one hour
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// Keeps the temporary directory: the store, the sidecar's log, both ledgers.
    #[arg(long)]
    keep: bool,
}

/// Runs the demonstration. The exit code is 0 if with Oncegate each payment was charged once and its customer got the
/// receipt, 1 if not or if the demonstration could not run, and 130 if it was interrupted.
pub(crate) fn run(args: &DemoArgs) -> ExitCode {
    match options(args).and_then(|options| oncegate_demo::run(&options)) {
        Ok(DemoOutcome::Clean) => ExitCode::SUCCESS,
        Ok(DemoOutcome::Faulty) => ExitCode::FAILURE,
        Ok(DemoOutcome::Interrupted) => ExitCode::from(130),
        Err(error) => {
            complain!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn options(args: &DemoArgs) -> Result<DemoOptions, String> {
    Ok(DemoOptions {
        program: std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?,
        seed: args.seed,
        intents: args.intents as usize,
        json: args.json,
        // The progress is on the standard error if a program reads the standard output.
        colours: if args.json { style::is_error_colored() } else { style::is_colored() },
        keep: args.keep,
        store: args.store.as_deref().map(shared_store).transpose()?,
    })
}

/// Reads `--store`.
fn shared_store(text: &str) -> Result<SharedStore, String> {
    let choice = read_store(text).map_err(|error| format!("--store: {error}"))?;
    if matches!(choice.store(), StoreChoice::Memory | StoreChoice::Directory(_)) {
        return Err("--store: two sidecars cannot share a store in memory or in a directory; name a database \
                    such as redis://HOST or postgres://USER@HOST/DATABASE, or leave it out to see one sidecar \
                    that is killed and started again on its own directory"
            .to_owned());
    }
    Ok(SharedStore::new(text, choice.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_only_one_process_can_use_is_refused() {
        for text in ["memory:", "records", "./records"] {
            let Err(error) = shared_store(text) else { panic!("{text} was accepted") };
            assert!(error.contains("two sidecars cannot share") && error.contains("redis://"), "{error}");
        }
        let Err(error) = shared_store("mysql://root:hunter2@db/shop") else { panic!("it was accepted") };
        assert!(error.starts_with("--store: ") && !error.contains("hunter2"), "{error}");
    }

    #[test]
    fn the_password_of_the_store_is_not_shown() {
        for url in ["redis://app:hunter2@db/1", "postgres://app:hunter2@db/shop"] {
            let shown = read_store(url).unwrap_or_else(|error| panic!("{error:?}")).to_string();
            assert!(shown.contains("db") && !shown.contains("hunter2"), "{shown}");
        }
    }
}
