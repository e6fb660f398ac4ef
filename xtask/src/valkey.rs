//! A Valkey for the tests that need what came with Redis 7.2, where the system's Redis is older.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run::{Result, has, output, run, target};

/// The packages of the server, and of the program that it links to.
const PACKAGES: [&str; 2] = ["valkey-server", "valkey-tools"];

/// Gets one into the target directory, from the backports of the system's own Debian, and installs nothing: the system's
/// Redis stays as it is. Tests that need it fail in words where it is not there, so elsewhere this does nothing.
pub(crate) fn prepare() -> Result<()> {
    let place = target().join("valkey");
    let fetched = place.join("usr/bin/valkey-server");
    if has(&fetched.to_string_lossy(), &["--version"]) || is_there() {
        return Ok(());
    }
    let Some(source) = backports() else {
        eprintln!("no Debian whose backports could have a Valkey: install Valkey, or Redis from 7.2 on");
        return Ok(());
    };
    let words = |error: std::io::Error| format!("{}: {error}", place.display());
    for directory in ["lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(place.join(directory)).map_err(words)?;
    }
    let sources = place.join("backports.sources");
    fs::write(&sources, source).map_err(words)?;
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        command.arg("-qq").current_dir(&place);
        for (name, value) in [
            ("Dir::Etc::SourceList", sources.as_path()),
            ("Dir::Etc::SourceParts", Path::new("/dev/null")),
            ("Dir::State::Lists", &place.join("lists")),
            ("Dir::Cache", &place.join("cache")),
        ] {
            command.arg("-o").arg(format!("{name}={}", value.display()));
        }
        run(command.args(arguments))
    };
    apt(&["update"])?;
    apt(&[&["download"], &PACKAGES[..]].concat())?;
    for package in files(&place, "deb") {
        run(Command::new("dpkg").arg("-x").arg(package).arg(&place))?;
    }
    if has(&fetched.to_string_lossy(), &["--version"]) {
        Ok(())
    } else {
        Err(format!("{} does not run here: a library that it needs is not there", fetched.display()))
    }
}

/// `true` if the system has one.
fn is_there() -> bool {
    let redis = || output(Command::new("redis-server").arg("--version")).unwrap_or_default();
    has("valkey-server", &["--version"]) || is_recent(&redis())
}

/// Of `Redis server v=7.0.15 …`: whether it is 7.2 or newer.
fn is_recent(text: &str) -> bool {
    let mut numbers = text.split_once(" v=").map_or("", |(_, rest)| rest).split('.').map(str::parse::<u32>);
    matches!((numbers.next(), numbers.next()), (Some(Ok(major)), Some(Ok(minor))) if (major, minor) >= (7, 2))
}

/// The system's own source of packages, with its backports instead of its release: the same host, the same key.
fn backports() -> Option<String> {
    let release = fs::read_to_string("/etc/os-release").ok()?;
    let of = |name: &str| {
        release.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim_matches('"'))
    };
    let codename = of("VERSION_CODENAME=").filter(|_| of("ID=") == Some("debian"))?;
    let texts = files(Path::new("/etc/apt/sources.list.d"), "sources").into_iter();
    texts.filter_map(|file| fs::read_to_string(file).ok()).find_map(|text| with_backports(&text, codename))
}

/// The first part of a file of sources that has this release, with its backports instead.
fn with_backports(text: &str, codename: &str) -> Option<String> {
    let mut parts = text.split("\n\n");
    let has_release = |part: &&str| {
        part.lines()
            .filter_map(|line| line.strip_prefix("Suites:"))
            .any(|suites| suites.split_whitespace().any(|suite| suite == codename))
    };
    let lines = parts.find(has_release)?.lines().map(|line| match line.split_once(':') {
        Some(("Suites", _)) => format!("Suites: {codename}-backports\n"),
        Some(("Components", _)) => "Components: main\n".to_owned(),
        _ => format!("{line}\n"),
    });
    Some(lines.collect())
}

fn files(directory: &Path, ending: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| path.extension().is_some_and(|found| found == ending)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_backports_come_from_where_the_release_does() {
        let text = "Types: deb\n# a word: or two\nURIs: http://host/updates\nSuites: twelve-security\nComponents: main\n\n\
                    Types: deb\nURIs: http://host/debian\nSuites: twelve twelve-updates\nComponents: main contrib\nSigned-By: /key\n";
        let found = "Types: deb\nURIs: http://host/debian\nSuites: twelve-backports\nComponents: main\nSigned-By: /key\n";
        assert_eq!(with_backports(text, "twelve").as_deref(), Some(found));
        assert_eq!(with_backports(text, "thirteen"), None);
    }

    #[test]
    fn knows_a_server_that_is_new_enough() {
        for (text, recent) in [
            ("Redis server v=7.0.15 sha=0", false),
            ("Redis server v=7.2.0 sha=0", true),
            ("Redis server v=8.0.1 sha=0", true),
            ("", false),
        ] {
            assert_eq!(is_recent(text), recent, "{text}");
        }
    }
}
