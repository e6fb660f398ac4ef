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

/// A command that runs the service with the library for Node.
///
/// # Errors
/// If its packages are not installed, or the library is not built from its sources as they are.
pub fn node_library() -> io::Result<Command> {
    let library = root().join("sdk/node");
    must_be_newer(&library.join("dist/esm/index.js"), &[library.join("src")])?;
    must_exist(&library.join("node_modules"))?;
    let mut command = Command::new("node");
    command.arg(library.join("cases/service.mjs"));
    Ok(command)
}

/// A command that runs the service with the library for Python, in the environment in which the library is installed:
/// `ONCEGATE_PYTHON_ENV`, or `sdk-python` in the directory of build results.
///
/// # Errors
/// If there is no such environment.
pub fn python_library() -> io::Result<Command> {
    let environment =
        env::var_os("ONCEGATE_PYTHON_ENV").map_or_else(|| target().join("sdk-python"), PathBuf::from);
    must_exist(&environment.join("installed"))?;
    let mut command = Command::new(environment.join("bin/python3"));
    command.arg(root().join("sdk/python/cases/service.py"));
    Ok(command)
}

/// A command that runs the service with the library for Go: the program `ONCEGATE_GO_SERVICE`, or `sdk-go/service` in the
/// directory of build results.
///
/// # Errors
/// If it is not built from its sources as they are.
pub fn go_library() -> io::Result<Command> {
    let program =
        env::var_os("ONCEGATE_GO_SERVICE").map_or_else(|| target().join("sdk-go/service"), PathBuf::from);
    let library = root().join("sdk/go");
    must_be_newer(&program, &[library.clone(), library.join("cases"), library.join("cases/resp")])?;
    Ok(Command::new(program))
}

fn must_exist(path: &Path) -> io::Result<()> {
    if path.exists() {
        return Ok(());
    }
    Err(io::Error::other(format!("{} is missing; run `cargo xtask libraries`", path.display())))
}

/// The names of files from which a library is built end with these.
const SOURCES: [&str; 4] = ["go", "json", "mod", "ts"];

/// An error if a program is missing, or is older than a file in one of these directories.
fn must_be_newer(program: &Path, directories: &[PathBuf]) -> io::Result<()> {
    must_exist(program)?;
    let built = program.metadata()?.modified()?;
    for directory in directories {
        for file in std::fs::read_dir(directory)? {
            let file = file?;
            let path = file.path();
            let is_source = path.extension().is_some_and(|name| SOURCES.iter().any(|own| *own == name));
            if is_source && file.metadata()?.modified()? > built {
                let (program, file) = (program.display(), file.path());
                let message =
                    format!("{program} is older than {}; run `cargo xtask libraries`", file.display());
                return Err(io::Error::other(message));
            }
        }
    }
    Ok(())
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The directory of build results, as `cargo xtask test` uses it.
pub(crate) fn target() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |named| root().join(named))
}
