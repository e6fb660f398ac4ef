//! `oncegate clock`: shows and confirms the clock of a machine after it was set.

use std::io::Write;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::{Access, AuditArgs, Confirm, Failure};
use crate::config::rounded_duration_text;

/// Shows and confirms the clock of a sidecar's machine after it was set.
#[derive(Args, Debug)]
pub(crate) struct ClockArgs {
    #[command(flatten)]
    access: Access,
    #[command(subcommand)]
    command: ClockCommand,
}

#[derive(Subcommand, Debug)]
enum ClockCommand {
    /// Shows if the clock agrees with the time of the store, and how many records end if it is accepted
    Show,
    /// Accepts the clock, for ever: records from before the clock was set become older by the difference, later ones do not.
    /// Those whose retention ends by that are gone, and their keys execute again
    Accept(AuditArgs),
}

pub(super) async fn execute(
    args: &ClockArgs,
    env: impl Fn(&str) -> Option<String>,
    confirm: Option<Confirm<'_>>,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let client = args.access.client(&env)?;
    let as_json = args.access.json;
    let seen = client.get("/v1/clock").await?;
    let ClockCommand::Accept(why) = &args.command else {
        if as_json {
            writeln!(out, "{seen}")?;
        } else {
            writeln!(out, "{}", text(&seen))?;
        }
        return Ok(());
    };
    let ahead = seen["seconds"].as_u64().filter(|_| seen["direction"] == "ahead");
    if ahead.is_some()
        && let Some(confirm) = confirm.filter(|_| !why.yes)
        && !confirm(&format!("{}\naccept this clock? This cannot be taken back. [y/N] ", text(&seen)))?
    {
        return Err(Failure::Refused("not confirmed; nothing was changed".to_owned()));
    }
    let mut request = why.json(&env);
    request.insert("ahead_seconds".to_owned(), json!(ahead));
    let response = client.post("/v1/clock/accept", &request.into()).await?;
    if as_json {
        writeln!(out, "{response}")?;
    } else if let Some(seconds) = response["ahead_seconds"].as_u64() {
        writeln!(out, "accepted: the time of the store is {seconds} s later than before")?;
    } else {
        writeln!(out, "nothing to accept: {}", text(&seen))?;
    }
    Ok(())
}

/// The state of the two clocks, in words.
fn text(seen: &Value) -> String {
    let seconds = seen["seconds"].as_u64().unwrap_or_default();
    let by = rounded_duration_text(Duration::from_secs(seconds));
    let (machine, store) = (&seen["machine_time"], &seen["store_time"]);
    let times = format!(
        "the machine has {}, the store {}",
        machine.as_str().unwrap_or("?"),
        store.as_str().unwrap_or("?")
    );
    match seen["direction"].as_str() {
        Some("ahead") => {
            let at_least = if seen["complete"] == true { "" } else { "at least " };
            format!(
                "the clock of the machine is {seconds} s ({by}) ahead of the time of the store ({times}).\n\
                 If it is accepted, the retention of {at_least}{} of {} records ends at once, and their keys execute again; \
                 {} of them wait for an operator",
                seen["records_ending"], seen["records"], seen["unsettled_ending"]
            )
        }
        Some("behind") => format!(
            "the clock of the machine is {seconds} s ({by}) behind the time of the store ({times}).\n\
             If the clock is right now, do nothing: leases, tokens and retentions follow the time of the store, and last as \
             long as they should. If it is wrong, correct it. The difference stays while the sidecar runs"
        ),
        _ => "the clock of the machine and the time of the store agree".to_owned(),
    }
}
