//! `oncegate seal-key`: makes keys and lists them by their ids.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use oncegate_core::ErrorChain;
use oncegate_seal::SealKey;

use crate::check::readable_by_all_users;
use crate::config::seal_keys_in;
use crate::keys::{SealUsageArgs, run_seal_usage};

/// Makes keys that encrypt stored responses, and shows their use.
#[derive(Args, Debug)]
pub(crate) struct SealKeyArgs {
    #[command(subcommand)]
    command: SealKeyCommand,
}

#[derive(Subcommand, Debug)]
enum SealKeyCommand {
    /// Makes a new random key, and prints it as a line for a file of keys
    New {
        /// Adds the key to the end of this file instead, and prints only its id. A new file can be read by its owner alone.
        /// At the end, a key opens; move it to the top to seal with it
        #[arg(long, value_name = "FILE")]
        append: Option<PathBuf>,
    },
    /// Lists the keys in a file by their ids, in their order
    Ls {
        /// The file
        file: PathBuf,
    },
    /// Counts the records of a running sidecar's store by the key that sealed them, and says when an old key may be removed
    Usage(SealUsageArgs),
}

/// Runs the command. The exit code reports how it ended.
pub(crate) fn run(args: &SealKeyArgs) -> ExitCode {
    let result = match &args.command {
        SealKeyCommand::New { append: None } => new(&mut io::stdout().lock()),
        SealKeyCommand::New { append: Some(file) } => append(file, &mut io::stdout().lock()),
        SealKeyCommand::Ls { file } => list(file, &mut io::stdout().lock()),
        SealKeyCommand::Usage(args) => return run_seal_usage(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            complain!("error: {why}");
            ExitCode::FAILURE
        }
    }
}

fn new(out: &mut impl Write) -> Result<(), String> {
    let key = SealKey::generate().map_err(|error| ErrorChain(&error).to_string())?;
    writeln!(out, "{}", *key.to_secret_text()).map_err(|error| format!("cannot write the key: {error}"))
}

/// Adds a key to a file, in one write, so that a sidecar that reads the file meanwhile gets all of the key or nothing of it.
fn append(file: &Path, out: &mut impl Write) -> Result<(), String> {
    let about = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
    let before = match fs::read(file) {
        Ok(bytes) => Some(bytes),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(about(&error)),
    };
    let is_new = before.is_none();
    let before = before.unwrap_or_default();
    if has_lines(&before) {
        seal_keys_in(file).map_err(|why| about(&why))?;
    }
    let key = SealKey::generate().map_err(|error| ErrorChain(&error).to_string())?;
    let ends_open = !before.is_empty() && !before.ends_with(b"\n");
    let line = format!("{}{}\n", if ends_open { "\n" } else { "" }, *key.to_secret_text());
    let mut options = OpenOptions::new();
    options.append(true).create_new(is_new).mode(0o600);
    let mut to = options.open(file).map_err(|error| about(&error))?;
    to.write_all(line.as_bytes()).and_then(|()| to.sync_all()).map_err(|error| about(&error))?;
    // The file may have as many keys as it can have.
    let keys = seal_keys_in(file).map_err(|why| about(&why))?;
    let seals = keys.ids().next() == Some(key.id());
    if let Some(what) = readable_by_all_users("the seal keys", file) {
        complain!("warning: {what}");
    }
    let role = if seals { "it seals" } else { "it opens; move it to the top once every sidecar has it" };
    writeln!(out, "{}  {role}", key.id()).map_err(|error| format!("cannot write the id: {error}"))
}

/// Returns true if the text has lines other than empty ones and comments, which have to be keys.
fn has_lines(text: &[u8]) -> bool {
    text.split(|byte| *byte == b'\n').any(|line| {
        let line = line.trim_ascii();
        !line.is_empty() && !line.starts_with(b"#")
    })
}

fn list(file: &Path, out: &mut impl Write) -> Result<(), String> {
    let keys = seal_keys_in(file).map_err(|why| format!("{}: {why}", file.display()))?;
    for (number, id) in keys.ids().enumerate() {
        let role = if number == 0 { "seals and opens" } else { "opens" };
        writeln!(out, "{id}  {role}").map_err(|error| format!("cannot write the list: {error}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn text(run: impl FnOnce(&mut Vec<u8>) -> Result<(), String>) -> String {
        let mut out = Vec::new();
        run(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_new_key_can_be_read_and_appended_keys_open() {
        let printed = text(new);
        SealKey::parse(printed.trim_end()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("keys");
        let first = text(|out| append(&file, out));
        assert!(first.ends_with("  it seals\n"), "{first}");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        // A file whose last line has no end.
        let trimmed = fs::read_to_string(&file).unwrap().trim_end().to_owned();
        fs::write(&file, trimmed).unwrap();
        let second = text(|out| append(&file, out));
        assert!(second.contains("it opens; move it to the top"), "{second}");
        let ids = [&first[..16], &second[..16]];
        assert_eq!(text(|out| list(&file, out)), format!("{}  seals and opens\n{}  opens\n", ids[0], ids[1]));
    }

    #[test]
    fn a_file_without_keys_gets_its_first_one() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("keys");
        for before in ["", "\n", "# made by hand", "# made by hand\n\n"] {
            fs::write(&file, before).unwrap();
            let made = text(|out| append(&file, out));
            assert!(made.ends_with("  it seals\n"), "{before:?}: {made}");
            let now = fs::read_to_string(&file).unwrap();
            assert!(now.starts_with(before), "{now}");
            assert_eq!(text(|out| list(&file, out)), format!("{}  seals and opens\n", &made[..16]), "{now}");
        }
    }

    #[test]
    fn a_file_that_is_no_list_of_keys_is_not_changed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("keys");
        fs::write(&file, "hunter2\n").unwrap();
        let why = append(&file, &mut Vec::new()).unwrap_err();
        assert!(why.contains("line 1 is not a key") && !why.contains("hunter2"), "{why}");
        assert_eq!(fs::read_to_string(&file).unwrap(), "hunter2\n");
        let why = list(&dir.path().join("none"), &mut Vec::new()).unwrap_err();
        assert!(why.contains("No such file"), "{why}");
    }
}
