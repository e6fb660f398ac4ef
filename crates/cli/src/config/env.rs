//! Settings from the environment.

use std::ffi::{OsStr, OsString};
use std::net::IpAddr;

use super::Entry;
use super::problem::{Problem, Source, nearest};
use super::settings::{Raw, SETTINGS};
use super::units::is_admin_elsewhere;

const PREFIX: &str = "ONCEGATE_";

/// Variables of this program that are not settings of the sidecar.
const OTHERS: &[&str] = &[
    "ONCEGATE_CALL_USER",
    "ONCEGATE_JOURNAL",
    "ONCEGATE_JOURNAL_KEY_FILE",
    "ONCEGATE_JOURNAL_KEYS",
    "ONCEGATE_LOG",
    #[cfg(feature = "failpoints")]
    "ONCEGATE_FAILPOINT",
];

/// Reads the settings in the environment.
pub(super) fn read(
    variables: impl IntoIterator<Item = (OsString, OsString)>,
    problems: &mut Vec<Problem>,
    warnings: &mut Vec<Problem>,
) -> Vec<Entry> {
    let mut entries = Vec::new();
    for (name, value) in variables {
        let Some(name) = name.to_str().filter(|name| name.starts_with(PREFIX)) else { continue };
        let source = Source::Env(name.to_owned());
        let Some(setting) = SETTINGS.iter().find(|setting| setting.variable() == name) else {
            if name == crate::log::VARIABLE {
                if let Err(error) = crate::log::filter(&value.to_string_lossy()) {
                    problems.push(Problem::error(source, error));
                }
            } else if !OTHERS.contains(&name) && !is_service_link(name, &value) {
                problems.push(Problem::error(source, format!("no such setting{}", hint(name))));
            }
            continue;
        };
        match value.into_string() {
            Ok(text) if text.is_empty() => {
                problems.push(Problem::error(source, "is set but empty; unset it or give it a value"));
            }
            // One environment serves commands and sidecars. Commands may ask a sidecar elsewhere, or through a proxy with TLS.
            Ok(text) if setting.name == "admin" && is_admin_elsewhere(&text) => {
                let what = "it is the URL that commands use, and no address on which this sidecar can listen, so it is ignored here; set \
                            admin in the file or with --admin";
                warnings.push(Problem::warning(source, what));
            }
            Ok(text) => entries.push(Entry { setting, raw: Raw::Text(text), source }),
            Err(_) => problems.push(Problem::error(source, "is not valid UTF-8")),
        }
    }
    entries
}

/// Suggests a variable with a similar name. Only the part after the prefix is compared, because the prefix makes all
/// names similar.
fn hint(name: &str) -> String {
    let word = |name: &str| name.strip_prefix(PREFIX).unwrap_or(name).to_owned();
    let words: Vec<_> = SETTINGS.iter().map(|setting| word(&setting.variable())).collect();
    let others = OTHERS.iter().map(|name| name.strip_prefix(PREFIX).unwrap_or(name));
    match nearest(&word(name), words.iter().map(String::as_str).chain(others)) {
        Some(nearest) => format!("; did you mean `{PREFIX}{nearest}`?"),
        None => String::new(),
    }
}

/// Returns true if Kubernetes made this variable. It puts the addresses of a Service called `oncegate` or
/// `oncegate-admin` into the environment of every pod next to it, as `ONCEGATE_ADMIN_SERVICE_HOST`,
/// `ONCEGATE_ADMIN_PORT` and `ONCEGATE_ADMIN_PORT_80_TCP_ADDR`.
fn is_service_link(name: &str, value: &OsStr) -> bool {
    let (Some(rest), Some(value)) = (name.strip_prefix(PREFIX), value.to_str()) else { return false };
    // The part of the name after that of the Service.
    let behind = |word: &str| {
        rest.rsplit_once(word).filter(|(service, _)| service.is_empty() || service.ends_with('_'))
    };
    let is_url = ["tcp://", "udp://", "sctp://"].iter().any(|scheme| value.starts_with(scheme));
    if let Some((_, "")) = behind("SERVICE_HOST")
        && value.parse::<IpAddr>().is_ok()
    {
        return true;
    }
    if let Some((_, port)) = behind("SERVICE_PORT")
        && (port.is_empty() || port.starts_with('_'))
        && value.parse::<u16>().is_ok()
    {
        return true;
    }
    // `PORT`, `PORT_80_TCP`, `PORT_80_TCP_PROTO`, `PORT_80_TCP_PORT`, `PORT_80_TCP_ADDR`
    let words: Vec<&str> = rest.split('_').collect();
    let is_number = |word: &&str| word.parse::<u16>().is_ok();
    let is_protocol = |word: &&str| ["TCP", "UDP", "SCTP"].contains(word);
    match words.as_slice() {
        [.., "PORT"] if is_url => true,
        [.., "PORT", number, protocol] => is_number(number) && is_protocol(protocol) && is_url,
        [.., "PORT", number, protocol, "PROTO" | "PORT" | "ADDR"] => {
            is_number(number) && is_protocol(protocol)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn read_all(variables: &[(&str, &str)]) -> (Vec<(&'static str, Raw)>, Vec<String>) {
        let mut problems = Vec::new();
        let variables = variables.iter().map(|(name, value)| (name.into(), value.into()));
        let entries = read(variables, &mut problems, &mut Vec::new());
        let entries = entries.into_iter().map(|entry| (entry.setting.name, entry.raw)).collect();
        (entries, problems.iter().map(Problem::to_string).collect())
    }

    #[test]
    fn a_variable_is_the_setting_in_capitals() {
        let (entries, problems) = read_all(&[
            ("ONCEGATE_MAX_REQUEST_BODY", "1MiB"),
            ("ONCEGATE_FINGERPRINT_BODY", "raw"),
            ("PATH", "/bin"),
        ]);
        let text = |text: &str| Raw::Text(text.to_owned());
        assert_eq!(entries, [("max-request-body", text("1MiB")), ("fingerprint.body", text("raw"))]);
        assert_eq!(problems, [""; 0]);
    }

    #[test]
    fn an_unknown_or_empty_variable_is_an_error() {
        let (_, problems) =
            read_all(&[("ONCEGATE_LEESE", "1s"), ("ONCEGATE_COLOUR", "red"), ("ONCEGATE_TO", "")]);
        assert_eq!(
            problems,
            [
                "ONCEGATE_LEESE: no such setting; did you mean `ONCEGATE_LEASE`?",
                "ONCEGATE_COLOUR: no such setting",
                "ONCEGATE_TO: is set but empty; unset it or give it a value",
            ]
        );
    }

    #[test]
    fn variables_of_other_commands_are_ignored() {
        let mut names = Vec::new();
        for command in crate::Oncegate::command().get_subcommands() {
            let variables = command.get_arguments().filter_map(|argument| argument.get_env());
            names.extend(variables.map(|name| name.to_str().unwrap().to_owned()));
        }
        assert!(names.iter().any(|name| name == "ONCEGATE_JOURNAL"), "{names:?}");
        for name in names {
            assert_eq!(read_all(&[(&name, "value")]).1, [""; 0]);
        }
    }

    #[test]
    fn variables_of_kubernetes_are_ignored() {
        let links = [
            ("ONCEGATE_PORT", "tcp://10.0.0.1:80"),
            ("ONCEGATE_PORT_80_TCP_ADDR", "10.0.0.1"),
            ("ONCEGATE_SERVICE_HOST", "10.0.0.1"),
            ("ONCEGATE_SERVICE_PORT_HTTP", "80"),
            ("ONCEGATE_SERVICE_PORT", "80"),
            ("ONCEGATE_ADMIN_SERVICE_HOST", "10.0.0.1"),
            ("ONCEGATE_ADMIN_SERVICE_PORT", "9090"),
            ("ONCEGATE_ADMIN_SERVICE_PORT_METRICS_HTTP", "9090"),
            ("ONCEGATE_ADMIN_PORT", "tcp://10.0.0.1:9090"),
            ("ONCEGATE_ADMIN_PORT_9090_TCP", "tcp://10.0.0.1:9090"),
            ("ONCEGATE_ADMIN_PORT_9090_TCP_PROTO", "tcp"),
            ("ONCEGATE_ADMIN_PORT_9090_TCP_PORT", "9090"),
            ("ONCEGATE_ADMIN_PORT_9090_TCP_ADDR", "fd00::1"),
            ("ONCEGATE_SERVICE_SERVICE_HOST", "10.0.0.1"),
            ("ONCEGATE_SERVICE_PORT", "tcp://10.0.0.1:80"),
            ("ONCEGATE_LOG", "debug"),
        ];
        assert_eq!(read_all(&links), (Vec::new(), Vec::new()));
        // Mistakes of people are errors.
        for mistake in [
            ("ONCEGATE_PORT", "8080"),
            ("ONCEGATE_LISTEN_PORT", "8080"),
            ("ONCEGATE_SERVICE_HOST", "shop.example"),
            ("ONCEGATE_SERVICE_PORTS", "80"),
            ("ONCEGATE_MYSERVICE_HOST", "10.0.0.1"),
        ] {
            assert_eq!(read_all(&[mistake]).1.len(), 1, "{mistake:?}");
        }
    }
}
