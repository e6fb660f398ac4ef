//! The stores by themselves.

use std::process::Command;

use super::servers::{program, scratch};
use crate::run::{Result, output};
use crate::test::{install_postgres, install_redis};

pub(super) fn record_size() -> Result<String> {
    output(Command::new(program("oncegate-benches")).arg("record-size"))
}

pub(super) fn run() -> Result<String> {
    let directory = scratch("store")?;
    output(Command::new(program("examples/measure")).args([directory.as_os_str(), "1".as_ref()]))
}

/// A wrapped function, against calling it bare.
pub(super) fn functions() -> Result<String> {
    output(Command::new(program("oncegate-benches")).arg("functions"))
}

/// The stores that machines share, against the bare engines. They start their own servers.
pub(super) fn shared() -> Result<String> {
    install_redis()?;
    install_postgres()?;
    let bench = |name| output(Command::new(program("oncegate-benches")).arg(name));
    Ok(bench("redis")? + &bench("postgres")? + &bench("transact")? + &bench("inbox")?)
}

/// The client against the bare HTTP clients below it, on a service in the same process, and what its journal costs.
pub(super) fn caller() -> Result<String> {
    let client = output(Command::new(program("oncegate-benches")).arg("client"))?;
    let directory = scratch("journal")?;
    Ok(client + &output(Command::new(program("oncegate-benches")).arg("journal").arg(&*directory))?)
}
