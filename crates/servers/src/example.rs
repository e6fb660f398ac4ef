//! Interpreters for programs in other languages, with the packages that `cargo xtask test` installs.

use std::env;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A command that runs Python with the packages of the example on FastAPI, in the directory of the example.
///
/// # Errors
/// If the packages are not installed.
pub fn fastapi_orders() -> io::Result<Command> {
    let directory = root().join("examples/fastapi-orders");
    let mut command = python("fastapi-orders")?;
    // For programs that are in another directory.
    command.env("PYTHONPATH", &directory).current_dir(directory);
    Ok(command)
}

/// A command that runs Python in the environment with this name.
///
/// # Errors
/// If `cargo xtask test` has not made the environment.
pub fn python(environment: &str) -> io::Result<Command> {
    let python = target().join(environment).join("bin/python");
    if !python.exists() {
        return Err(io::Error::other(format!("{} is missing; run `cargo xtask test`", python.display())));
    }
    Ok(Command::new(python))
}

/// A command that runs Node with the packages of the example on Express, in the directory of the example.
///
/// # Errors
/// If the packages are not installed.
pub fn express_orders() -> io::Result<Command> {
    let directory = root().join("examples/express-orders");
    let packages = directory.join("node_modules");
    if !packages.exists() {
        return Err(io::Error::other(format!("{} is missing; run `cargo xtask test`", packages.display())));
    }
    let mut command = Command::new("node");
    command.env("NODE_PATH", packages).current_dir(directory);
    Ok(command)
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The directory of build results, as `cargo xtask test` uses it.
pub(crate) fn target() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |named| root().join(named))
}
