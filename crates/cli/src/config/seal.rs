//! The keys that encrypt stored responses: their sources, and the settings about them.

use std::path::Path;

use oncegate_core::ErrorChain;
use oncegate_http::CompletedBy;
use oncegate_seal::Keyring;

use super::RouteConfig;
use super::assemble::given;
use super::problem::Problem;
use super::settings::{Sourced, Values};
use super::units::LEFT_OUT;
use crate::files;

/// The largest file of keys, and the most that a program may print. 32 keys have three kilobytes.
pub(crate) const MAX_KEY_TEXT: usize = 64 * 1024;

/// The settings of a sidecar that encrypts stored responses.
#[derive(Clone, Debug)]
pub(crate) struct SealSettings {
    pub(crate) source: SealKeySource,
    /// True if unsealed responses are refused.
    pub(crate) is_required: bool,
    /// True if nothing is sealed.
    pub(crate) opens_only: bool,
}

/// The source of the keys.
#[derive(Clone, Debug)]
pub(crate) enum SealKeySource {
    /// Keys that were read with the configuration, from a file or the environment.
    Read(Keyring),
    /// A program and its arguments.
    Command(Vec<String>),
}

/// Reads the keys in a variable: with commas or line ends between them.
pub(super) fn keys(text: &str) -> Result<Keyring, String> {
    parse(&text.replace(',', "\n"))
}

/// Reads one word of a command.
pub(super) fn word(text: &str) -> Result<String, String> {
    match text {
        "" => Err("a word of the command is empty".to_owned()),
        // What is left out may be a secret, so the value is not repeated.
        _ if text.ends_with(LEFT_OUT) => Err(format!(
            "a word of the command ends with {LEFT_OUT}, which stands for an argument that is not shown; write the argument"
        )),
        _ => Ok(text.to_owned()),
    }
}

/// Reads keys, one in each line. The error contains nothing of the text.
pub(crate) fn parse(text: &str) -> Result<Keyring, String> {
    Keyring::parse(text)
        .map_err(|error| format!("{}; `oncegate seal-key new` makes a key", ErrorChain(&error)))
}

/// Reads the keys in a file, which may be a pipe.
pub(crate) fn seal_keys_in(file: &Path) -> Result<Keyring, String> {
    let text = files::read(file, files::MAX_TEXT).map_err(|error| error.to_string())?;
    if text.len() > MAX_KEY_TEXT {
        return Err("is too large for a file of keys".to_owned());
    }
    parse(&String::from_utf8(text).map_err(|_| "is not a UTF-8 text".to_owned())?)
}

/// The settings, if there are keys.
pub(super) fn settings(values: &Values, problems: &mut Vec<Problem>) -> Option<SealSettings> {
    let (is_required, opens_only) = (given(&values.seal_required), given(&values.seal_opens_only));
    let names = ["seal-keys-file", "seal-keys", "seal-keys-command"];
    let sources: Vec<_> = names.into_iter().filter_map(|name| values.source(name)).collect();
    if let [first, second, ..] = sources[..] {
        let what = format!("{first} is set, too; the seal keys must come from one source, so leave one out");
        problems.push(Problem::error(second.clone(), what));
        return None;
    }
    let switches = [("seal-required", is_required), ("seal-opens-only", opens_only)];
    if let Some((name, _)) = switches.iter().find(|(_, is_on)| *is_on && sources.is_empty()) {
        let is_doubtful = problems.iter().any(|problem| {
            let is_about =
                |name| super::settings::Setting::named(name).is_some_and(|of| problem.is_about(of));
            problem.is_error() && names.into_iter().any(is_about)
        });
        if !is_doubtful {
            let what = "there are no keys; set seal-keys-file, seal-keys-command or ONCEGATE_SEAL_KEYS, too";
            problems.push(Problem::error(values.source(name).cloned(), what));
        }
        return None;
    }
    if is_required && opens_only {
        let what = "nothing is sealed (seal-opens-only), and unsealed responses are refused (seal-required), so no response could be \
                    replayed; leave one out";
        problems.push(Problem::error(values.source("seal-opens-only").cloned(), what));
        return None;
    }
    let source = if let Some(Sourced { value, source }) = &values.seal_keys_file {
        match seal_keys_in(value) {
            Ok(keys) => SealKeySource::Read(keys),
            Err(what) => {
                problems.push(Problem::error(source.clone(), format!("{}: {what}", value.display())));
                return None;
            }
        }
    } else if let Some(keys) = &values.seal_keys {
        SealKeySource::Read(keys.value.clone())
    } else {
        let command = values.seal_keys_command.as_ref()?;
        if command.value.is_empty() {
            problems.push(Problem::error(command.source.clone(), "the command is empty; name a program"));
            return None;
        }
        SealKeySource::Command(command.value.clone())
    };
    Some(SealSettings { source, is_required, opens_only })
}

/// A warning if responses that the service stores itself would be refused.
pub(super) fn advice<'a>(
    values: &Values,
    mut routes: impl Iterator<Item = &'a RouteConfig>,
) -> Option<Problem> {
    let is_upstream = routes.any(|route| route.settings.completed_by() == CompletedBy::Upstream);
    (given(&values.seal_required) && is_upstream).then(|| {
        let what = "a route has completion = \"upstream\": a response that the service itself stores, with oncegate.complete(record, token, \
                    response), is not sealed, and retries of it are refused. Let the sidecar add the response: call \
                    oncegate.complete(record, token)";
        Problem::warning(values.source("seal-required").cloned(), what)
    })
}

impl SealSettings {
    /// The keys, if no program has to be run for them.
    pub(crate) fn read_keys(&self) -> Option<&Keyring> {
        match &self.source {
            SealKeySource::Read(keys) => Some(keys),
            SealKeySource::Command(_) => None,
        }
    }

    /// The same keys, with the policies of these settings.
    pub(crate) fn with_policies(&self, keys: Keyring) -> Keyring {
        keys.with_required(self.is_required).with_opens_only(self.opens_only)
    }
}
