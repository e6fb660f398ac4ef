//! Running other programs.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The text of an error.
pub(crate) type Result<T> = std::result::Result<T, String>;

/// The root of the workspace.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// The target directory.
pub(crate) fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// Cargo, the one that runs this.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// Runs a command to its end; an exit code other than zero is an error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let name = words(command);
    eprintln!("+ {name}");
    let status = command.status().map_err(|error| format!("{name}: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{name}: {status}")) }
}

/// Runs a command to its end and gives what it printed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let name = words(command);
    let output = command.stderr(Stdio::inherit()).output().map_err(|error| format!("{name}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{name}: {}", output.status));
    }
    String::from_utf8(output.stdout).map_err(|_| format!("{name}: printed something that is no text"))
}

/// `true` if a program runs with these arguments.
pub(crate) fn has(program: &str, version: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(version).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Installs Debian packages, where there is a right to.
pub(crate) fn install(packages: &[&str]) -> Result<()> {
    let wanted = packages.join(" ");
    if !has("apt-get", &["--version"]) {
        return Err(format!(
            "this needs the Debian packages {wanted}, or what they hold; install them and try again"
        ));
    }
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        command.args(["-qq", "-y"]).args(arguments).env("DEBIAN_FRONTEND", "noninteractive");
        run(&mut command)
    };
    apt(&["update"])
        .and_then(|()| apt(&[&["install", "--no-install-recommends"], packages].concat()))
        .map_err(|error| format!("cannot install {wanted} (root is needed): {error}"))
}

fn words(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
