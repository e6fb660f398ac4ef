//! Reads the name of a cached store.
//!
//! ```text
//! cached(cache=STORE,store=STORE[,keep=DURATION][,timeout=DURATION])
//! ```
//!
//! A comma begins a new part only if one of these four names and `=` follow, and the last parenthesis is the last character.
//! All other commas and parentheses belong to a store. So a URL is written here in the same way as alone. If it contains a
//! comma before one of these names and `=`, that comma is percent-encoded: `%2C`.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use oncegate_core::limits;
use oncegate_redis::RedisOptions;

use super::units::{self, StoreChoice, duration_text, size_text};

/// A cache before a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CachedChoice {
    pub(crate) cache: CacheChoice,
    pub(crate) store: StoreChoice,
    /// The longest time that a response stays in the cache.
    pub(crate) keep: Duration,
    /// The longest time that a request waits for the cache.
    pub(crate) timeout: Duration,
}

/// The kinds of caches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CacheChoice {
    /// In memory, with this many bytes.
    Memory(usize),
    /// In this directory.
    Directory(PathBuf),
    /// On Redis or Valkey.
    Redis(Box<RedisOptions>),
}

const OPEN: &str = "cached(";
const NAMES: [&str; 4] = ["cache", "store", "keep", "timeout"];
const ALLOWED: &str = "write cached(cache=STORE,store=STORE), such as \"cached(cache=memory:,store=postgres://USER@HOST/DATABASE)\"";

const DEFAULT_MEMORY: usize = 64 << 20;
const MIN_MEMORY: usize = 1 << 20;
const MAX_MEMORY: usize = 1 << 40;
const DEFAULT_KEEP: Duration = Duration::from_secs(60 * 60);
const DEFAULT_TIMEOUT: Duration = Duration::from_millis(25);

/// Returns true if the text is meant to be a cached store.
pub(super) fn is_one(text: &str) -> bool {
    text.starts_with(OPEN)
}

/// The name without passwords.
pub(super) fn shown(text: &str) -> String {
    let Ok(parts) = parts(text) else { return format!("{OPEN}…)") };
    let show =
        |(name, value): &(&str, &str)| format!("{name}={}", units::without_login(&units::safe_url(value)));
    format!("{OPEN}{})", parts.iter().map(show).collect::<Vec<_>>().join(","))
}

pub(super) fn read(text: &str) -> Result<CachedChoice, String> {
    let parts = parts(text)?;
    if let Some((name, _)) = parts.iter().find(|(_, value)| is_one(value)) {
        return Err(format!("{name}: a cached store cannot contain another one; {ALLOWED}"));
    }
    if let Some((name, _)) = NAMES
        .map(|name| (name, parts.iter().filter(|(given, _)| *given == name).count()))
        .into_iter()
        .find(|(_, count)| *count > 1)
    {
        return Err(format!("{name} was given twice; {ALLOWED}"));
    }
    let value = |name: &str| parts.iter().find(|(given, _)| *given == name).map(|(_, value)| *value);
    let needed = |name: &str| value(name).ok_or_else(|| format!("{name} is missing; {ALLOWED}"));
    let cache = read_cache(needed("cache")?).map_err(|error| format!("cache: {error}"))?;
    let store = read_back(needed("store")?).map_err(|error| format!("store: {error}"))?;
    let time = |name: &str, default, min, max| match value(name) {
        Some(text) => number_with_unit(text)
            .and_then(|text| units::bounded(text, min, max))
            .map_err(|error| format!("{name}: {error}")),
        None => Ok(default),
    };
    let keep = time("keep", DEFAULT_KEEP, limits::MIN_RETENTION, limits::MAX_RETENTION)?;
    let timeout = time("timeout", DEFAULT_TIMEOUT, Duration::from_millis(1), Duration::from_secs(1))?;
    match (&cache, &store) {
        (CacheChoice::Redis(_), StoreChoice::Directory(_)) => {
            Err("cache: a server cannot be the cache of a directory, which answers faster; write \"memory:\""
                .to_owned())
        }
        (CacheChoice::Directory(cache), StoreChoice::Directory(store)) if cache == store => {
            Err("cache and store are the same directory".to_owned())
        }
        (CacheChoice::Redis(cache), StoreChoice::Redis(store)) if cache.shown() == store.shown() => {
            Err(format!("cache and store are the same store, {}", cache.shown()))
        }
        _ => Ok(CachedChoice { cache, store, keep, timeout }),
    }
}

fn read_cache(text: &str) -> Result<CacheChoice, String> {
    if let Some(size) = text.strip_prefix("memory:") {
        let size = if size.is_empty() { DEFAULT_MEMORY } else { units::size(number_with_unit(size)?)? };
        return if (MIN_MEMORY..=MAX_MEMORY).contains(&size) {
            Ok(CacheChoice::Memory(size))
        } else {
            Err(format!(
                "{text:?} is out of bounds; from {} to {} is allowed",
                size_text(MIN_MEMORY as u64),
                size_text(MAX_MEMORY as u64)
            ))
        };
    }
    const CACHES: &str = "write \"memory:SIZE\", \"redis://…\" or a directory";
    match units::store(text)? {
        StoreChoice::Directory(directory) => Ok(CacheChoice::Directory(directory)),
        StoreChoice::Redis(options) => Ok(CacheChoice::Redis(options)),
        StoreChoice::Postgres(_) => {
            Err(format!("PostgreSQL cannot be a cache, because it is no faster than a store; {CACHES}"))
        }
        StoreChoice::Memory | StoreChoice::Cached(_) => Err(CACHES.to_owned()),
    }
}

/// Returns the text if it may be a number with a unit.
///
/// Errors quote numbers and units. Any other text may have a URL with a password in it, because the name of the next part was
/// mistyped: then the error must not quote it.
fn number_with_unit(text: &str) -> Result<&str, String> {
    if text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-+ ".contains(&byte)) {
        return Ok(text);
    }
    let names = NAMES.map(|name| format!("{name}=")).join(", ");
    Err(format!(
        "this is not a number with a unit. A comma and one of {names} begin the next part; {ALLOWED}"
    ))
}

fn read_back(text: &str) -> Result<StoreChoice, String> {
    const BACKS: &str = "write \"postgres://…\", \"redis://…\" or a directory";
    match units::store(text)? {
        StoreChoice::Memory => Err(format!("a store in memory needs no cache; {BACKS}")),
        StoreChoice::Cached(_) => Err(BACKS.to_owned()),
        choice => Ok(choice),
    }
}

/// The parts in their order. An error contains no text that may be a password.
fn parts(text: &str) -> Result<Vec<(&str, &str)>, String> {
    let rest = text.strip_prefix(OPEN).and_then(|rest| rest.strip_suffix(')'));
    let rest = rest.ok_or_else(|| format!("the \")\" at the end is missing; {ALLOWED}"))?;
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
            "it must begin with one of {}; {ALLOWED}",
            NAMES.map(|name| format!("{name}=")).join(", ")
        ));
    }
    let ends = starts.iter().skip(1).map(|(at, _)| at - 1).chain([rest.len()]);
    let part = |((at, name), end): (&(usize, &'static str), usize)| {
        Some((*name, rest.get(at + name.len() + 1..end)?))
    };
    Ok(starts.iter().zip(ends).filter_map(part).collect())
}

impl fmt::Display for CacheChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(DEFAULT_MEMORY) => f.write_str("memory:"),
            Self::Memory(size) => write!(f, "memory:{}", size_text(*size as u64).replace(" bytes", "")),
            Self::Directory(directory) => directory.display().fmt(f),
            Self::Redis(options) => f.write_str(&options.shown()),
        }
    }
}

impl fmt::Display for CachedChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{OPEN}cache={},store={}", self.cache, self.store)?;
        if self.keep != DEFAULT_KEEP {
            write!(f, ",keep={}", duration_text(self.keep))?;
        }
        if self.timeout != DEFAULT_TIMEOUT {
            write!(f, ",timeout={}", duration_text(self.timeout))?;
        }
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown_of(text: &str) -> String {
        match units::store(text) {
            Ok(StoreChoice::Cached(choice)) => choice.to_string(),
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn the_urls_inside_are_read_as_they_are_written_alone() {
        for (text, shown) in [
            (
                "cached(cache=redis://u:hunter2@h,store=postgres://app:hunter2@db/shop?sslmode=require)",
                "cached(cache=redis://h:6379/0,store=postgres://…@db/shop)",
            ),
            (
                "cached(store=redis-cluster://a,b:7,c,cache=memory:)",
                "cached(cache=memory:,store=redis-cluster://a:6379,b:7,c:6379)",
            ),
            (
                "cached(cache=memory:256MiB,store=./da,ta(1),keep=10m,timeout=50ms)",
                "cached(cache=memory:256MiB,store=./da,ta(1),keep=10m,timeout=50ms)",
            ),
            (
                "cached(cache=redis://u:hunter2)@h,store=postgres://u:hunter2,(@h/d)",
                "cached(cache=redis://h:6379/0,store=postgres://…@h/d)",
            ),
            ("cached(cache=./cache,store=./store)", "cached(cache=./cache,store=./store)"),
            (
                "cached(cache=redis://u:a%2Cback=hunter2@h,store=./cache=)",
                "cache: a server cannot be the cache of a directory, which answers faster; write \"memory:\"",
            ),
        ] {
            let said = units::store(text).map_or_else(|error| error, |_| shown_of(text));
            assert_eq!(said, shown, "{text}");
            assert!(!format!("{:?}", units::store(text)).contains("hunter2"));
            assert!(!super::shown(text).contains("hunter2"), "{}", super::shown(text));
        }
    }

    #[test]
    fn errors_contain_no_password() {
        for (text, why) in [
            ("cached(cache=memory:,store=./b", "the \")\" at the end is missing; write cached("),
            ("cached(cache=memory:,store=./b) ", "a space"),
            (
                "cached(redis://u:hunter2@h,store=./b)",
                "it must begin with one of cache=, store=, keep=, timeout=;",
            ),
            ("cached()", "it must begin with one of"),
            ("cached(cache=memory:)", "store is missing"),
            ("cached(store=postgres://u:hunter2@h/d)", "cache is missing"),
            ("cached(cache=memory:,store=./a,store=./b)", "store was given twice"),
            (
                "cached(cache=memory:9B,store=./b)",
                "cache: \"memory:9B\" is out of bounds; from 1MiB to 1024GiB",
            ),
            ("cached(cache=memory:9,store=./b)", "cache: \"9\" has no unit"),
            ("cached(cache=memory:9x,store=./b)", "cache: \"9x\" has the unknown unit \"x\""),
            ("cached(cache=memory,store=./b)", "cache: \"memory\" could be a directory"),
            ("cached(cache=,store=./b)", "cache: \"\" is not a directory"),
            (
                "cached(cache=memory:1MiB;store=postgres://u:hunter2@h/d)",
                "cache: this is not a number with a unit. A comma and one of cache=, store=, keep=, timeout= begin",
            ),
            (
                "cached(cache=memory:,back=postgres://u:hunter2@h/d)",
                "cache: this is not a number with a unit",
            ),
            ("cached(cache=memory:,store=./b,keep=postgres://u:hunter2@h/d)", "keep: this is not a number"),
            ("cached(cache=memory:,store=./b,timeout=5ms;store=redis://:hunter2@h)", "timeout: this is not"),
            ("cached(cache=postgres://u:hunter2@h/d,store=./b)", "cache: PostgreSQL cannot be a cache"),
            (
                "cached(cache=mysql://u:hunter2@h/d,store=./b)",
                "cache: \"mysql://…@h/d\" is not the URL of a store",
            ),
            ("cached(cache=memory:,store=memory:)", "store: a store in memory needs no cache"),
            ("cached(cache=memory:,store=redis://u:hunter2@h:x)", "store: "),
            (
                "cached(cache=memory:,store=cached(cache=memory:,store=./b))",
                "store: a cached store cannot contain another one",
            ),
            ("cached(cache=memory:,store=./b,keep=1)", "keep: \"1\" has no unit"),
            (
                "cached(cache=memory:,store=./b,timeout=2s)",
                "timeout: \"2s\" is out of bounds; from 1ms to 1s",
            ),
            ("cached(cache=./a,store=./a)", "cache and store are the same directory"),
            ("cached(cache=redis://h,store=redis://u:hunter2@h)", "the same store, redis://h:6379/0"),
        ] {
            let said = units::store(text).unwrap_err();
            assert!(said.contains(why) && !said.contains("hunter2"), "{text}: {said}");
            assert!(!super::shown(text).contains("hunter2"), "{}", super::shown(text));
            assert!(
                !units::safe_url(text).contains("hunter2") && !units::without_login(text).contains("hunter2")
            );
        }
        assert!(units::store("cached").unwrap_err().contains("write \"cached(cache=…,store=…)\""));
    }
}
