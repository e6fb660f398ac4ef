//! `oncegate completions` and `oncegate man`: files for shells and for the manual, made from the commands and their flags.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;

/// Prints the completions of a shell.
#[derive(Args, Debug)]
pub(crate) struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Writes pages of the manual.
#[derive(Args, Debug)]
pub(crate) struct ManArgs {
    /// Writes a page for each command into this directory, such as /usr/local/share/man/man1 [default: prints the page of
    /// oncegate]
    dir: Option<PathBuf>,
}

pub(crate) fn completions(args: &CompletionsArgs, mut command: Command) -> Result<(), String> {
    // It would panic on an error of a writer.
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut command, "oncegate", &mut text);
    print(&text)
}

pub(crate) fn man(args: &ManArgs, command: Command) -> Result<(), String> {
    let Some(dir) = &args.dir else {
        let mut page = Vec::new();
        let written = Man::new(command.disable_help_subcommand(true)).render(&mut page);
        return written.map_err(|error| error.to_string()).and_then(|()| print(&page));
    };
    let failed = |path: &Path, error: io::Error| format!("{}: {error}", path.display());
    std::fs::create_dir_all(dir).map_err(|error| failed(dir, error))?;
    clap_mangen::generate_to(command, dir).map_err(|error| failed(dir, error))
}

fn print(text: &[u8]) -> Result<(), String> {
    match io::stdout().write_all(text) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(format!("cannot print: {error}")),
        _ => Ok(()),
    }
}
