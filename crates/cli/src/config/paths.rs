//! Makes relative paths absolute, so that a configuration means the same files from every working directory.
//!
//! A path in the configuration file, also inside the URL of a store, is relative to the directory of that file. So is the
//! default of `store`, if there is a file. A path in a flag or in the environment is relative to the working directory, as in
//! every program.

use std::io;
use std::path::{Path, PathBuf};

use oncegate_redis::RedisOptions;

use super::cached::CacheChoice;
use super::problem::{Problem, Source};
use super::scope::KeySetPlace;
use super::settings::{Sourced, Values};
use super::units::StoreChoice;

/// Makes every path of `values` absolute. `file` is the configuration file, if there is one.
pub(super) fn make_absolute(values: &mut Values, file: Option<&Path>, problems: &mut Vec<Problem>) {
    let base = PathBase { directory: file.and_then(Path::parent) };
    let mut note = |source: &Source, result: io::Result<()>| {
        if let Err(error) = result {
            let what = format!("its relative path cannot be made absolute: {error}; write an absolute path");
            problems.push(Problem::error(source.clone(), what));
        }
    };
    let files = [
        &mut values.tls_cert,
        &mut values.tls_key,
        &mut values.tls_client_ca,
        &mut values.tls_client_crl,
        &mut values.admin_token_file,
        &mut values.metrics_token_file,
        &mut values.seal_keys_file,
        &mut values.id_secret_file,
    ];
    for given in files.into_iter().flatten() {
        note(&given.source, base.apply(&mut given.value, &given.source));
    }
    if let Some(Sourced { value: KeySetPlace::File(path), source }) = &mut values.jwt_keys {
        note(source, base.apply(path, source));
    }
    if let Some(Sourced { value: words, source }) = &mut values.seal_keys_command
        && let Some(program) = words.first_mut()
        && program.contains('/')
    {
        let mut path = PathBuf::from(&*program);
        note(source, base.apply(&mut path, source));
        *program = path.to_string_lossy().into_owned();
    }
    if let Some(Sourced { value, source }) = &mut values.store {
        note(source, base.apply_to_store(value, source));
        if let StoreChoice::Cached(choice) = value
            && let (CacheChoice::Directory(cache), StoreChoice::Directory(store)) =
                (&choice.cache, &choice.store)
            && cache == store
        {
            problems.push(Problem::error(source.clone(), "cache and store are the same directory"));
        }
    }
}

struct PathBase<'a> {
    /// The directory of the configuration file; empty for a file in the working directory.
    directory: Option<&'a Path>,
}

impl PathBase<'_> {
    fn apply(&self, path: &mut PathBuf, source: &Source) -> io::Result<()> {
        let directory = match source {
            Source::File(_) | Source::Default => self.directory.unwrap_or(Path::new("")),
            Source::Flag(_) | Source::Env(_) => Path::new(""),
        };
        *path = std::path::absolute(directory.join(&*path))?;
        Ok(())
    }

    fn apply_to_store(&self, store: &mut StoreChoice, source: &Source) -> io::Result<()> {
        match store {
            StoreChoice::Directory(path) => self.apply(path, source),
            StoreChoice::Cached(choice) => {
                match &mut choice.cache {
                    CacheChoice::Directory(path) => self.apply(path, source)?,
                    CacheChoice::Redis(options) => self.apply_to_ca(options, source)?,
                    CacheChoice::Memory(_) => {}
                }
                self.apply_to_store(&mut choice.store, source)
            }
            StoreChoice::Postgres(url) => url.change_paths(|path| self.apply(path, source)),
            StoreChoice::Redis(options) => self.apply_to_ca(options, source),
            StoreChoice::Memory => Ok(()),
        }
    }

    fn apply_to_ca(&self, options: &mut RedisOptions, source: &Source) -> io::Result<()> {
        if let Some(mut path) = options.ca().map(Path::to_owned) {
            self.apply(&mut path, source)?;
            *options = options.clone().with_ca(path);
        }
        Ok(())
    }
}
