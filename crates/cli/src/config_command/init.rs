//! A new configuration file, with every setting as a comment.

use crate::config::{Fallback, Raw, SETTINGS, SettableIn, Setting, Shape};

use super::toml_value;

/// The longest line of a comment.
const WIDTH: usize = 100;

/// The sentence about several values in the help of a flag, and in a file.
const SEVERAL: (&str, &str) = ("Give it several times or with commas.", "Write several as a list.");

const INTRODUCTION: &str = "\
# Configuration of the Oncegate sidecar.
#
#   oncegate check --config FILE     checks it
#   oncegate proxy --config FILE     runs the sidecar
#   kill -HUP PID                    has a running sidecar read it again
#
# A line that begins with # and the name of a setting shows its default, or else an example. Remove the # to change it. Flags and
# environment variables (ONCEGATE_LEASE for `lease`) override this file. Secrets do not belong here: put the admin token into
# ONCEGATE_ADMIN_TOKEN or a file, and a store's URL with a password into ONCEGATE_STORE.
";

const ROUTES: &str = "\
# ==== Routes
# Settings that are marked [route] can have another value for some paths. The first route whose path and methods match counts.
#[[route]]
#path = \"/v1/payments/{*rest}\"
#methods = [\"POST\"]
#require-key = true
";

/// The content of the file.
pub(super) fn text() -> String {
    let mut text = INTRODUCTION.to_owned();
    let mut heading = "";
    for setting in SETTINGS {
        if matches!(setting.settable_in, SettableIn::Start | SettableIn::Secret) {
            continue;
        }
        if heading != setting.heading {
            heading = setting.heading;
            text.push_str(&format!("\n# ==== {heading}\n"));
        }
        text.push('\n');
        comment(&description(setting), &mut text);
        let value = example(setting).map_or_else(|| "…".to_owned(), |raw| toml_value(setting, &raw));
        // The only setting that is needed.
        let mark = if setting.name == "to" { "" } else { "#" };
        text.push_str(&format!("{mark}{} = {value}\n", setting.name));
    }
    text.push('\n');
    text.push_str(ROUTES);
    text
}

/// The help of a setting, its default, and the places where it may be given, in the words of a file.
pub(super) fn description(setting: &Setting) -> String {
    let help = in_file(setting, &setting.help.split_whitespace().collect::<Vec<_>>().join(" "));
    let default = match setting.default {
        Fallback::Value(text) => format!(" Default: {}.", value_in_file(setting, text)),
        Fallback::Profile(text) => {
            format!(" Default: by profile, {} in ietf.", value_in_file(setting, text))
        }
        Fallback::Nothing("") => String::new(),
        Fallback::Nothing(words) => format!(" Default: {words}."),
    };
    let place = if setting.settable_in == SettableIn::Route { " [route]" } else { "" };
    format!("{help}{default}{place}")
}

/// A value as it is written in a file: several values are a list there.
fn value_in_file(setting: &Setting, text: &str) -> String {
    match setting.shape {
        Shape::Many if text.contains(',') => toml_value(setting, &Raw::Text(text.to_owned())),
        _ => text.to_owned(),
    }
}

/// The help of a flag without what holds for flags only.
fn in_file(setting: &Setting, help: &str) -> String {
    let help = help.replace(SEVERAL.0, SEVERAL.1);
    // Every second part is between backticks.
    let parts = help.split('`').enumerate().map(|(number, part)| match number % 2 {
        1 => value_in_file(setting, part),
        _ => part.to_owned(),
    });
    parts.collect::<Vec<_>>().join("`")
}

fn comment(words: &str, text: &mut String) {
    let mut line = String::from("#");
    for word in words.split(' ') {
        if line.chars().count() + 1 + word.chars().count() > WIDTH {
            text.push_str(&line);
            text.push('\n');
            line = String::from("#");
        }
        line.push(' ');
        line.push_str(word);
    }
    text.push_str(&line);
    text.push('\n');
}

/// The default of a setting, or else a value that it accepts. `None` for settings that are not in the file.
pub(super) fn example(setting: &Setting) -> Option<Raw> {
    let text = match setting.default {
        Fallback::Value(text) | Fallback::Profile(text) => text.to_owned(),
        Fallback::Nothing(_) => match (setting.name, setting.value) {
            ("to", _) => "http://127.0.0.1:3000".to_owned(),
            ("jwt-audience", _) => "payments".to_owned(),
            // More than the default.
            ("max-in-flight-without-key", _) => "20000".to_owned(),
            ("problem-base-url", _) => "https://developer.example.com/retry.html#".to_owned(),
            ("tls-cert" | "tls-key" | "tls-client-ca" | "tls-client-crl", _) => {
                format!("/etc/oncegate/{}.pem", setting.name)
            }
            ("scope", _) => "required-header:x-tenant".to_owned(),
            ("release-statuses", _) => "422".to_owned(),
            ("threads", _) => "4".to_owned(),
            ("key-query", _) => "idempotency_key".to_owned(),
            ("read-only-tools", _) => "get_*".to_owned(),
            ("intent-tools", _) => "create_payment".to_owned(),
            ("seal-keys-command", _) => "vault,kv,get,-field=keys,secret/oncegate".to_owned(),
            ("otlp-endpoint", _) => "http://127.0.0.1:4318".to_owned(),
            ("otlp-resource-attributes", _) => "deployment.environment.name=production".to_owned(),
            (name, "FILE" | "FILE|URL") => format!("/etc/oncegate/{name}"),
            (name, "URL") => format!("https://developer.example.com/{name}"),
            (_, "PATH") => "/oncegate/outcome".to_owned(),
            (_, "POINTER,…") => "/customer".to_owned(),
            (_, "ORIGIN,…") => "https://shop.example".to_owned(),
            (_, "METHOD,…") => "POST".to_owned(),
            (_, "RATE") => "10/s".to_owned(),
            (_, "SIZE") => "1GiB".to_owned(),
            (_, "DURATION") => "30s".to_owned(),
            (_, "N") => "1000".to_owned(),
            (_, "NAME") => "payments".to_owned(),
            (_, "NAME,…") => "x-version".to_owned(),
            (_, "TEXT" | "TEXT,…") => "https://issuer.example.com".to_owned(),
            _ => return None,
        },
    };
    Some(if setting.shape == Shape::Many {
        Raw::List(text.split(',').map(|part| part.trim().to_owned()).collect())
    } else {
        Raw::Text(text)
    })
}
