//! The Redis or Valkey program that tests start.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::path::PathBuf;
use std::process::Command;

use crate::example::target;

/// The directory into which `cargo xtask test` puts a Valkey, in the target directory, when the system's Redis is too old.
const FETCHED: &str = "valkey/usr/bin/valkey-server";

/// Redis 7.2, and every Valkey.
const RECENT: (u32, u32) = (7, 2);

/// The system's Redis, or what `ONCEGATE_TEST_REDIS_SERVER` names, to run all tests on another one.
pub(crate) fn usual() -> PathBuf {
    env::var_os("ONCEGATE_TEST_REDIS_SERVER").map_or_else(|| "redis-server".into(), PathBuf::from)
}

/// One that knows what came with Redis 7.2.
pub(crate) fn recent() -> io::Result<PathBuf> {
    let programs = [usual(), target().join(FETCHED), "valkey-server".into()];
    let is_recent = |program: &PathBuf| version(program.as_os_str()).is_some_and(|version| version >= RECENT);
    programs.into_iter().find(is_recent).ok_or_else(|| {
        io::Error::other(
            "this test needs Valkey, or Redis from 7.2 on; `cargo xtask test` gets one where the system is Debian, and \
             elsewhere one has to be installed",
        )
    })
}

/// The version line of the program: `Redis server v=7.0.15 …`, `Valkey server v=8.0.1 …`.
fn version(program: &OsStr) -> Option<(u32, u32)> {
    let output = Command::new(program).arg("--version").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let mut numbers = text.split_once(" v=")?.1.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}
