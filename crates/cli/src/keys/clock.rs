//! `oncegate clock`: confirms the clock of a machine after it was set.

use std::io::Write;

use clap::{Args, Subcommand};
use serde_json::json;

use super::{Access, Failure};

/// Confirms that the clock of a sidecar's machine is right after it was set.
#[derive(Args, Debug)]
pub(crate) struct ClockArgs {
    #[command(flatten)]
    access: Access,
    #[command(subcommand)]
    command: ClockCommand,
}

#[derive(Subcommand, Debug)]
enum ClockCommand {
    /// Accepts the clock: records from before the clock was set become older by the difference, later ones do not
    Accept,
}

pub(super) async fn execute(
    args: &ClockArgs,
    env: impl Fn(&str) -> Option<String>,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let client = args.access.client(env)?;
    let ClockCommand::Accept = args.command;
    let response = client.post("/v1/clock/accept", &json!({})).await?;
    if args.access.json {
        writeln!(out, "{response}")?;
    } else if let Some(seconds) = response["ahead_seconds"].as_u64() {
        writeln!(out, "accepted: the time of the store is {seconds} s later than before")?;
    } else {
        writeln!(out, "nothing to accept: the clock of the machine and the time of the store agree")?;
    }
    Ok(())
}
