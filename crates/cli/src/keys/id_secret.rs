//! `oncegate id-secret restore`: puts back the mark of a store that has lost it.

use std::io::Write;

use clap::Args;
use serde_json::Value;

use super::{Access, AuditArgs, Confirm, Failure};

/// Puts the mark back on the store of a running sidecar that refuses requests, because the store has records and has lost its
/// mark.
#[derive(Args, Debug)]
pub(crate) struct RestoreArgs {
    #[command(flatten)]
    access: Access,
    /// A key that a client used, whose retention is not over. If the id secret of the sidecar finds a record of it, the records
    /// of the store are of this secret, and otherwise nothing is changed
    #[arg(long, value_name = "KEY", required_unless_present = "force", allow_hyphen_values = true)]
    key: Option<String>,
    /// Without such a key. If the records are of another secret, or of none, each retry of their keys executes again
    #[arg(long, conflicts_with = "key")]
    force: bool,
    /// Changes nothing, and prints what would be done
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    why: AuditArgs,
}

pub(super) async fn restore(
    args: &RestoreArgs,
    env: impl Fn(&str) -> Option<String>,
    confirm: Option<Confirm<'_>>,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let client = args.access.client(&env)?;
    let path = "/v1/id-secret/restore";
    let mut request = Value::Object(args.why.json(&env));
    request["key"] = args.key.clone().into();
    request["force"] = args.force.into();
    request["dry_run"] = true.into();
    let seen = client.post(path, &request).await?;
    let is_missing = seen["mark"] == "missing";
    if !args.dry_run && is_missing {
        if let Some(confirm) = confirm.filter(|_| !args.why.yes)
            && !confirm(&format!("{}\nput the mark back? [y/N] ", text(&seen)))?
        {
            return Err(Failure::Refused("not confirmed; nothing was changed".to_owned()));
        }
        request["dry_run"] = false.into();
        // The sidecar may have another secret by now.
        request["secret"] = seen["secret"].clone();
        let done = client.post(path, &request).await?;
        return print(
            args,
            &done,
            "the mark is back: this sidecar serves, and so do all programs with its id secret",
            out,
        );
    }
    print(args, &seen, &text(&seen), out)
}

fn print(args: &RestoreArgs, response: &Value, text: &str, out: &mut impl Write) -> Result<(), Failure> {
    match args.access.json {
        true => writeln!(out, "{response}")?,
        false => writeln!(out, "{text}")?,
    }
    Ok(())
}

/// The state of the mark, and what follows if it is put back.
fn text(seen: &Value) -> String {
    let secret = seen["secret"].as_str().unwrap_or("?");
    if seen["mark"] != "missing" {
        return format!(
            "nothing to do: the store has the mark of the id secret {secret}, which is that of the sidecar"
        );
    }
    let proof = match seen["records_of_key"].as_u64() {
        Some(1) => "The secret finds 1 record of the key, so the records are of this secret".to_owned(),
        Some(count) => format!("The secret finds {count} records of the key, so the records are of this secret"),
        None => "NOTHING shows that the records are of this secret. If they are not, each of their keys is new, and its retry executes again"
            .to_owned(),
    };
    format!(
        "the store has records and no mark, and the sidecar has the id secret {secret}.\n{proof}.\n\
         If the mark is put back, sidecars and programs with this secret execute, and all others refuse every request with a key"
    )
}
