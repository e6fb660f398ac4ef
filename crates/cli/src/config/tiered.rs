//! Reads the name of a tiered store.
//!
//! ```text
//! tiered(front=STORE,back=STORE[,keep=DURATION][,patience=DURATION])
//! ```
//!
//! A comma begins a new part only where one of these four names and `=` follow, and the last parenthesis is the last
//! character; every other comma and parenthesis belongs to the store that it stands in. So a URL is written here as it is
//! written alone. Where one has such a comma in it, that comma is percent-encoded: `%2C`.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use oncegate_core::limits;
use oncegate_redis::RedisOptions;

use super::units::{self, StoreChoice, duration_text, size_text};

/// A front before a back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TieredChoice {
    pub(crate) front: FrontChoice,
    pub(crate) back: StoreChoice,
    /// How long an answer stays in the front at the longest.
    pub(crate) keep: Duration,
    /// How long a request waits for the front.
    pub(crate) patience: Duration,
}

/// Where answers are kept in front.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FrontChoice {
    /// In memory, of so many octets.
    Memory(usize),
    /// In this directory.
    Directory(PathBuf),
    /// On Redis or Valkey.
    Redis(Box<RedisOptions>),
}

const OPEN: &str = "tiered(";
const NAMES: [&str; 4] = ["front", "back", "keep", "patience"];
const ALLOWED: &str = "write tiered(front=STORE,back=STORE), such as \"tiered(front=memory:,back=postgres://USER@HOST/DATABASE)\"";

const FRONT_MEMORY: usize = 64 << 20;
const FRONT_MEMORY_MIN: usize = 1 << 20;
const FRONT_MEMORY_MAX: usize = 1 << 40;
const KEEP: Duration = Duration::from_secs(60 * 60);
const PATIENCE: Duration = Duration::from_millis(25);

/// Whether it is meant to be the name of a tiered store.
pub(super) fn is_one(text: &str) -> bool {
    text.starts_with(OPEN)
}

/// The name as it may be shown: without passwords.
pub(super) fn shown(text: &str) -> String {
    let Ok(parts) = parts(text) else { return format!("{OPEN}…)") };
    let show =
        |(name, value): &(&str, &str)| format!("{name}={}", units::without_login(&units::safe_url(value)));
    format!("{OPEN}{})", parts.iter().map(show).collect::<Vec<_>>().join(","))
}

pub(super) fn read(text: &str) -> Result<TieredChoice, String> {
    let parts = parts(text)?;
    if let Some((name, _)) = parts.iter().find(|(_, value)| is_one(value)) {
        return Err(format!("{name}: a tiered store has no other one in it; {ALLOWED}"));
    }
    if let Some((name, _)) = NAMES
        .map(|name| (name, parts.iter().filter(|(given, _)| *given == name).count()))
        .into_iter()
        .find(|(_, count)| *count > 1)
    {
        return Err(format!("{name} is there twice; {ALLOWED}"));
    }
    let value = |name: &str| parts.iter().find(|(given, _)| *given == name).map(|(_, value)| *value);
    let needed = |name: &str| value(name).ok_or_else(|| format!("{name} is missing; {ALLOWED}"));
    let front = read_front(needed("front")?).map_err(|error| format!("front: {error}"))?;
    let back = read_back(needed("back")?).map_err(|error| format!("back: {error}"))?;
    let time = |name: &str, default, min, max| match value(name) {
        Some(text) => units::bounded(text, min, max).map_err(|error| format!("{name}: {error}")),
        None => Ok(default),
    };
    let keep = time("keep", KEEP, limits::MIN_RETENTION, limits::MAX_RETENTION)?;
    let patience = time("patience", PATIENCE, Duration::from_millis(1), Duration::from_secs(1))?;
    match (&front, &back) {
        (FrontChoice::Redis(_), StoreChoice::Directory(_)) => {
            Err("front: a server is no front of a directory, which answers sooner; write \"memory:\""
                .to_owned())
        }
        (FrontChoice::Directory(front), StoreChoice::Directory(back)) if front == back => {
            Err("front and back are the same directory".to_owned())
        }
        (FrontChoice::Redis(front), StoreChoice::Redis(back)) if front.shown() == back.shown() => {
            Err(format!("front and back are the same store, {}", front.shown()))
        }
        _ => Ok(TieredChoice { front, back, keep, patience }),
    }
}

fn read_front(text: &str) -> Result<FrontChoice, String> {
    if let Some(size) = text.strip_prefix("memory:") {
        let size = if size.is_empty() { FRONT_MEMORY } else { units::size(size)? };
        return if (FRONT_MEMORY_MIN..=FRONT_MEMORY_MAX).contains(&size) {
            Ok(FrontChoice::Memory(size))
        } else {
            Err(format!(
                "{text:?} is out of bounds; from {} to {} is allowed",
                size_text(FRONT_MEMORY_MIN as u64),
                size_text(FRONT_MEMORY_MAX as u64)
            ))
        };
    }
    const FRONTS: &str = "write \"memory:SIZE\", \"redis://…\" or a directory";
    match units::store(text)? {
        StoreChoice::Directory(directory) => Ok(FrontChoice::Directory(directory)),
        StoreChoice::Redis(options) => Ok(FrontChoice::Redis(options)),
        StoreChoice::Postgres(_) => Err(format!("PostgreSQL answers no sooner than a back; {FRONTS}")),
        StoreChoice::Memory | StoreChoice::Tiered(_) => Err(FRONTS.to_owned()),
    }
}

fn read_back(text: &str) -> Result<StoreChoice, String> {
    const BACKS: &str = "write \"postgres://…\", \"redis://…\" or a directory";
    match units::store(text)? {
        StoreChoice::Memory => Err(format!("a store in memory needs nothing before it; {BACKS}")),
        StoreChoice::Tiered(_) => Err(BACKS.to_owned()),
        choice => Ok(choice),
    }
}

/// The parts in their order, or what is wrong, without a word of what may be a password.
fn parts(text: &str) -> Result<Vec<(&str, &str)>, String> {
    let rest = text.strip_prefix(OPEN).and_then(|rest| rest.strip_suffix(')'));
    let rest = rest.ok_or_else(|| format!("there is no \")\" at the end; {ALLOWED}"))?;
    let name_of = |text: &str| {
        NAMES.into_iter().find(|name| text.strip_prefix(name).is_some_and(|rest| rest.starts_with('=')))
    };
    let mut starts: Vec<_> = Vec::new();
    let commas = rest.match_indices(',').map(|(at, _)| at + 1);
    for at in std::iter::once(0).chain(commas) {
        if let Some(name) = rest.get(at..).and_then(name_of) {
            starts.push((at, name));
        }
    }
    if starts.first().is_none_or(|(at, _)| *at != 0) {
        return Err(format!(
            "it begins with none of {}; {ALLOWED}",
            NAMES.map(|name| format!("{name}=")).join(", ")
        ));
    }
    let ends = starts.iter().skip(1).map(|(at, _)| at - 1).chain([rest.len()]);
    let part = |((at, name), end): (&(usize, &'static str), usize)| {
        Some((*name, rest.get(at + name.len() + 1..end)?))
    };
    Ok(starts.iter().zip(ends).filter_map(part).collect())
}

impl fmt::Display for FrontChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(FRONT_MEMORY) => f.write_str("memory:"),
            Self::Memory(size) => write!(f, "memory:{}", size_text(*size as u64).replace(" bytes", "")),
            Self::Directory(directory) => directory.display().fmt(f),
            Self::Redis(options) => f.write_str(&options.shown()),
        }
    }
}

impl fmt::Display for TieredChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{OPEN}front={},back={}", self.front, self.back)?;
        if self.keep != KEEP {
            write!(f, ",keep={}", duration_text(self.keep))?;
        }
        if self.patience != PATIENCE {
            write!(f, ",patience={}", duration_text(self.patience))?;
        }
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown_of(text: &str) -> String {
        match units::store(text) {
            Ok(StoreChoice::Tiered(choice)) => choice.to_string(),
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn a_store_stands_in_it_as_it_is_written_alone() {
        for (text, shown) in [
            (
                "tiered(front=redis://u:hunter2@h,back=postgres://app:hunter2@db/shop?sslmode=require)",
                "tiered(front=redis://h:6379/0,back=postgres://app@db/shop)",
            ),
            (
                "tiered(back=redis-cluster://a,b:7,c,front=memory:)",
                "tiered(front=memory:,back=redis-cluster://a:6379,b:7,c:6379)",
            ),
            (
                "tiered(front=memory:256MiB,back=./da,ta(1),keep=10m,patience=50ms)",
                "tiered(front=memory:256MiB,back=./da,ta(1),keep=10m,patience=50ms)",
            ),
            (
                "tiered(front=redis://u:hunter2)@h,back=postgres://u:hunter2,(@h/d)",
                "tiered(front=redis://h:6379/0,back=postgres://u@h/d)",
            ),
            ("tiered(front=./front,back=./back)", "tiered(front=./front,back=./back)"),
            (
                "tiered(front=redis://u:a%2Cback=hunter2@h,back=./front=)",
                "front: a server is no front of a directory, which answers sooner; write \"memory:\"",
            ),
        ] {
            let said = units::store(text).map_or_else(|error| error, |_| shown_of(text));
            assert_eq!(said, shown, "{text}");
            assert!(!format!("{:?}", units::store(text)).contains("hunter2"));
            assert!(!super::shown(text).contains("hunter2"), "{}", super::shown(text));
        }
    }

    #[test]
    fn what_is_wrong_is_said_without_a_password() {
        for (text, why) in [
            ("tiered(front=memory:,back=./b", "there is no \")\" at the end; write tiered("),
            ("tiered(front=memory:,back=./b) ", "a blank"),
            (
                "tiered(redis://u:hunter2@h,back=./b)",
                "it begins with none of front=, back=, keep=, patience=;",
            ),
            ("tiered()", "it begins with none of"),
            ("tiered(front=memory:)", "back is missing"),
            ("tiered(back=postgres://u:hunter2@h/d)", "front is missing"),
            ("tiered(front=memory:,back=./a,back=./b)", "back is there twice"),
            ("tiered(front=memory:9,back=./b)", "front: \"memory:9\" is out of bounds; from 1MiB to 1024GiB"),
            ("tiered(front=memory:9x,back=./b)", "front: \"9x\" has the unit \"x\""),
            ("tiered(front=memory,back=./b)", "front: \"memory\" could be a directory"),
            ("tiered(front=,back=./b)", "front: \"\" is no directory"),
            ("tiered(front=postgres://u:hunter2@h/d,back=./b)", "front: PostgreSQL answers no sooner"),
            ("tiered(front=mysql://u:hunter2@h/d,back=./b)", "front: \"mysql://u@h/d\" is a URL of none"),
            ("tiered(front=memory:,back=memory:)", "back: a store in memory needs nothing before it"),
            ("tiered(front=memory:,back=redis://u:hunter2@h:x)", "back: "),
            (
                "tiered(front=memory:,back=tiered(front=memory:,back=./b))",
                "back: a tiered store has no other one in it",
            ),
            ("tiered(front=memory:,back=./b,keep=1)", "keep: \"1\" has no unit"),
            (
                "tiered(front=memory:,back=./b,patience=2s)",
                "patience: \"2s\" is out of bounds; from 1ms to 1s",
            ),
            ("tiered(front=./a,back=./a)", "front and back are the same directory"),
            ("tiered(front=redis://h,back=redis://u:hunter2@h)", "the same store, redis://h:6379/0"),
        ] {
            let said = units::store(text).unwrap_err();
            assert!(said.contains(why) && !said.contains("hunter2"), "{text}: {said}");
            assert!(!super::shown(text).contains("hunter2"), "{}", super::shown(text));
            assert!(
                !units::safe_url(text).contains("hunter2") && !units::without_login(text).contains("hunter2")
            );
        }
        assert!(units::store("tiered").unwrap_err().contains("write \"tiered(front=…,back=…)\""));
    }
}
