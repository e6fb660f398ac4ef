//! `oncegate health`: asks a sidecar if it lives, or if it is ready. For the health checks of container engines.

use std::io::Write;
use std::time::Duration;

use clap::Args;

use super::{Access, Failure};

/// Asks a running sidecar for its health.
#[derive(Args, Debug)]
pub(crate) struct HealthArgs {
    /// Asks if it is ready: it accepts requests and its store would take a claim. Without this, only if it lives: a sidecar
    /// whose store is away should not be restarted
    #[arg(long)]
    ready: bool,
    /// The longest time to wait for the response, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=60))]
    timeout: u64,
    #[command(flatten)]
    access: Access,
}

pub(super) async fn execute(
    args: &HealthArgs,
    env: impl Fn(&str) -> Option<String>,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let client = args.access.client(env)?;
    let path = if args.ready { "/readyz" } else { "/livez" };
    let timeout = Duration::from_secs(args.timeout);
    let answer = tokio::time::timeout(timeout, client.health(path)).await;
    let (status, text) = answer.map_err(|_| {
        Failure::Unreachable(format!("the sidecar does not answer within {} seconds", args.timeout))
    })??;
    let is_healthy = status.is_success();
    if args.access.json {
        let mut lines = text.lines();
        let state = lines.next().unwrap_or_default();
        let notes: Vec<_> = lines.collect();
        writeln!(out, "{}", serde_json::json!({ "healthy": is_healthy, "state": state, "notes": notes }))?;
    } else {
        write!(out, "{text}")?;
    }
    match is_healthy {
        true => Ok(()),
        false => Err(Failure::Refused(format!("the sidecar is not healthy ({})", status.as_u16()))),
    }
}
