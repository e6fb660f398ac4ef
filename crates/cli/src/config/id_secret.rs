//! The secret that keys the identities of records: its sources.

use std::path::Path;

use oncegate_core::{ErrorChain, IdSecret};

use super::problem::Problem;
use super::settings::Values;
use crate::files;

/// The largest file. A secret has 88 bytes; the rest is for comments.
const MAX_FILE: usize = 4096;

/// Reads a secret: one line, next to empty lines and lines that begin with `#`. The error contains nothing of the text.
pub(crate) fn parse(text: &str) -> Result<IdSecret, String> {
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    match (lines.next(), lines.next()) {
        (Some(line), None) => IdSecret::parse(line).map_err(|error| {
            format!("{}; `oncegate id-secret new` makes one for a new store", ErrorChain(&error))
        }),
        (None, _) => {
            Err("there is no id secret in it; `oncegate id-secret new` makes one for a new store".to_owned())
        }
        _ => {
            Err("there is more than one line; a store has one id secret, and it is never replaced".to_owned())
        }
    }
}

/// Reads the secret in a file, which may be a pipe.
pub(crate) fn id_secret_in(file: &Path) -> Result<IdSecret, String> {
    let text = files::read(file, files::MAX_SECRET).map_err(|error| error.to_string())?;
    if text.len() > MAX_FILE {
        return Err("is too large for a file with an id secret".to_owned());
    }
    parse(&String::from_utf8(text).map_err(|_| "is not a UTF-8 text".to_owned())?)
}

/// The secret, if one is configured.
pub(super) fn read(values: &Values, problems: &mut Vec<Problem>) -> Option<IdSecret> {
    match (&values.id_secret, &values.id_secret_file) {
        (Some(_), Some(file)) => {
            let what =
                "ONCEGATE_ID_SECRET is set, too; the id secret must come from one source, so leave one out";
            problems.push(Problem::error(file.source.clone(), what));
            None
        }
        (Some(secret), None) => Some(secret.value.clone()),
        (None, Some(file)) => match id_secret_in(&file.value) {
            Ok(secret) => Some(secret),
            Err(what) => {
                let what = format!("{}: {what}", file.value.display());
                problems.push(Problem::error(file.source.clone(), what));
                None
            }
        },
        (None, None) => None,
    }
}
