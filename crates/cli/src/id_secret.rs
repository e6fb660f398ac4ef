//! `oncegate id-secret`: makes the secret that keys the identities of records, shows the name of one, and puts back the mark of a
//! store that has lost it.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use oncegate_core::IdSecret;

use crate::config::id_secret_in;
use crate::keys::{RestoreArgs, run_restore};

/// Makes the secret that keys the identities of records, shows its name, and puts back the mark of a store that has lost it.
#[derive(Args, Debug)]
pub(crate) struct IdSecretArgs {
    #[command(subcommand)]
    command: IdSecretCommand,
}

#[derive(Subcommand, Debug)]
enum IdSecretCommand {
    /// Makes a new random secret for a new store, and prints it. Keep a copy: it cannot be replaced
    New {
        /// Writes the secret to this new file instead, which its owner alone can read, and prints only its name
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Prints the name of the secret in a file: the store names its secret in this way, too
    Name {
        /// The file
        file: PathBuf,
    },
    /// Puts the mark back on the store of a running sidecar that refuses requests, because the store has records and no mark
    Restore(RestoreArgs),
}

/// Runs the command. The exit code reports how it ended.
pub(crate) fn run(args: &IdSecretArgs) -> ExitCode {
    let result = match &args.command {
        IdSecretCommand::Restore(args) => return run_restore(args),
        IdSecretCommand::New { out: None } => new().and_then(|secret| print(&secret.to_secret_text())),
        IdSecretCommand::New { out: Some(file) } => new()
            .and_then(|secret| write_new(file, &secret).map(|()| secret))
            .and_then(|secret| print(&secret.name().to_string())),
        IdSecretCommand::Name { file } => id_secret_in(file)
            .map_err(|why| format!("{}: {why}", file.display()))
            .and_then(|secret| print(&secret.name().to_string())),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            complain!("error: {why}");
            ExitCode::FAILURE
        }
    }
}

fn new() -> Result<IdSecret, String> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|_| "the operating system gave no random numbers".to_owned())?;
    Ok(IdSecret::from_bytes(bytes))
}

fn print(line: &str) -> Result<(), String> {
    writeln!(io::stdout().lock(), "{line}")
        .map_err(|error| format!("cannot write to the standard output: {error}"))
}

/// An existing file is never replaced: it may be the only copy of the secret of a store.
fn write_new(file: &Path, secret: &IdSecret) -> Result<(), String> {
    let mut to =
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(file).map_err(
            |error| match error.kind() {
                io::ErrorKind::AlreadyExists => {
                    format!(
                        "{}: the file exists, and may be the only copy of a secret; name a new file",
                        file.display()
                    )
                }
                _ => format!("{}: {error}", file.display()),
            },
        )?;
    let line = format!("{}\n", *secret.to_secret_text());
    to.write_all(line.as_bytes())
        .and_then(|()| to.sync_all())
        .map_err(|error| format!("{}: {error}", file.display()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_new_secret_is_in_a_file_of_its_owner_and_an_existing_file_stays() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("secret");
        let secret = new().unwrap();
        write_new(&file, &secret).unwrap();
        assert_eq!(id_secret_in(&file).unwrap().name(), secret.name());
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        let why = write_new(&file, &new().unwrap()).unwrap_err();
        assert!(why.contains("the only copy"), "{why}");
        assert_eq!(id_secret_in(&file).unwrap().name(), secret.name());
    }
}
