//! Settings as flags.

use clap::builder::ValueHint;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, ArgMatches, Command};

use super::Entry;
use super::problem::{Source, nearest};
use super::settings::{Fallback, Raw, SETTINGS, SettableIn, Setting, Shape};

/// The sidecar's settings on the command line.
#[derive(Clone, Debug, Default)]
pub(crate) struct ProxyArgs {
    entries: Vec<(&'static str, Raw)>,
}

impl ProxyArgs {
    /// The settings that are given, as entries of the table.
    pub(super) fn entries(&self) -> impl Iterator<Item = Entry> {
        self.entries.iter().filter_map(|(name, raw)| {
            let setting = Setting::named(name)?;
            let source = Source::Flag(format!("--{}", setting.flag()?));
            Some(Entry { setting, raw: raw.clone(), source })
        })
    }
}

impl clap::Args for ProxyArgs {
    fn augment_args(command: Command) -> Command {
        command.args(SETTINGS.iter().filter_map(flag))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for ProxyArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut args = Self::default();
        args.update_from_arg_matches(matches)?;
        Ok(args)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for setting in SETTINGS.iter().filter(|setting| setting.flag().is_some()) {
            let Some(texts) = matches.get_many::<String>(setting.name) else { continue };
            let raw = match setting.shape {
                Shape::Many => Raw::List(
                    texts.flat_map(|text| text.split(',')).map(|text| text.trim().to_owned()).collect(),
                ),
                Shape::One | Shape::Switch => Raw::Text(texts.cloned().collect()),
            };
            self.entries.push((setting.name, raw));
        }
        Ok(())
    }
}

fn flag(setting: &'static Setting) -> Option<Arg> {
    let long = setting.flag()?;
    let arg = Arg::new(setting.name)
        .value_name(setting.value)
        .help(help(setting))
        .help_heading(setting.heading)
        .value_hint(if setting.value == "FILE" { ValueHint::FilePath } else { ValueHint::Other })
        .action(if setting.shape == Shape::Many { ArgAction::Append } else { ArgAction::Set });
    let arg = if long == setting.name { arg } else { arg.alias(setting.name.replace('.', "-")) };
    let arg = match setting.shape {
        // There are no positional arguments, so `--require-key true` is not ambiguous.
        Shape::Switch => arg.num_args(0..=1).default_missing_value("true"),
        Shape::One | Shape::Many => arg.num_args(1),
    };
    Some(arg.long(long))
}

fn help(setting: &Setting) -> String {
    let text = setting.help.split_whitespace().collect::<Vec<_>>().join(" ");
    let default = match setting.default {
        Fallback::Value(text) => format!(" [default: {text}]"),
        Fallback::Profile(text) => format!(" [default: by profile, {text} in ietf]"),
        Fallback::Nothing("") => String::new(),
        Fallback::Nothing(words) => format!(" [default: {words}]"),
    };
    format!("{text}{default} [env: {}]", setting.variable())
}

/// Removes the suggestion for an unknown flag if it is another word, as for settings in the file.
pub(crate) fn drop_far_suggestion(error: &mut clap::Error) {
    let name = |kind| match error.get(kind) {
        Some(ContextValue::String(name)) => Some(name.trim_start_matches('-').to_owned()),
        _ => None,
    };
    if let (Some(written), Some(near)) = (name(ContextKind::InvalidArg), name(ContextKind::SuggestedArg))
        && nearest(&written, [near.as_str()]).is_none()
    {
        error.remove(ContextKind::SuggestedArg);
    }
}

/// Adds a tip to the error about an argument that a newcomer may well write: a secret as a flag, the address of the service
/// without its flag, or a request without quotes.
pub(crate) fn add_tip(error: &mut clap::Error) {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.clone(),
        Some(ContextValue::StyledStr(text)) => text.to_string(),
        _ => String::new(),
    };
    if error.kind() != ErrorKind::UnknownArgument {
        return;
    }
    let (written, usage) = (text(ContextKind::InvalidArg), text(ContextKind::Usage));
    let secret = Setting::named(written.trim_start_matches('-'))
        .filter(|setting| setting.settable_in == SettableIn::Secret && written.starts_with("--"));
    let is_of = |command: &str| usage.contains(&format!("oncegate {command} "));
    let tip = if let Some(secret) = secret {
        format!("other users can see flags, so this secret is not one: put it into {}", secret.variable())
    } else if written.starts_with('/') && is_of("explain") {
        "the request is one argument: write method and path in quotes, such as 'POST /v1/orders'".to_owned()
    } else if (written.starts_with("http://") || written.starts_with("https://"))
        && ["proxy", "check", "explain", "rules", "openapi"].into_iter().any(is_of)
        // It may contain a password.
        && !written.contains('@')
    {
        format!("give the address of the service with its flag: --to {written}")
    } else {
        return;
    };
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
}

#[cfg(test)]
pub(crate) fn parse(flags: &[&str]) -> Result<ProxyArgs, clap::Error> {
    use clap::{Args as _, FromArgMatches as _};
    let command = ProxyArgs::augment_args(Command::new("proxy").no_binary_name(true));
    ProxyArgs::from_arg_matches(&command.try_get_matches_from(flags)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Args as _;

    #[test]
    fn the_command_is_sound_and_every_flag_has_a_help() {
        let mut command = ProxyArgs::augment_args(Command::new("proxy"));
        command.clone().debug_assert();
        let help = command.render_long_help().to_string();
        for setting in SETTINGS {
            match setting.flag() {
                Some(flag) => assert!(
                    help.contains(&format!("--{flag} ")) || help.contains(&format!("--{flag}[")),
                    "{flag}"
                ),
                None => assert!(!help.contains(&format!("--{} ", setting.name)), "{}", setting.name),
            }
        }
        assert!(help.contains("From 100ms to 1h. [default: 30s] [env: ONCEGATE_LEASE]"), "{help}");
    }

    #[test]
    fn an_unknown_flag_is_an_error_with_a_suggestion() {
        let error = parse(&["--leese", "5s"]).unwrap_err().to_string();
        assert!(error.contains("unexpected argument '--leese'") && error.contains("'--lease'"), "{error}");
        let shown = |flag| {
            let mut error = parse(&[flag, "x"]).unwrap_err();
            drop_far_suggestion(&mut error);
            error.to_string()
        };
        assert!(shown("--admin-token").contains("--admin-token-file"));
        let far = shown("--store-patience");
        assert!(far.contains("'--store-patience'") && !far.contains("'--store'"), "{far}");
    }

    #[test]
    fn lists_are_repeated_or_have_commas_and_switches_may_stand_alone() {
        let args = parse(&[
            "--methods",
            "POST, PUT",
            "--methods=PATCH",
            "--require-key",
            "--store-must-exist=false",
        ]);
        let entries: Vec<_> = args.unwrap().entries().map(|e| (e.setting.name, e.raw)).collect();
        assert_eq!(
            entries,
            [
                ("store-must-exist", Raw::Text("false".to_owned())),
                ("require-key", Raw::Text("true".to_owned())),
                ("methods", Raw::List(["POST", "PUT", "PATCH"].map(str::to_owned).to_vec())),
            ]
        );
        let args = parse(&["--require-key", "false", "--store-must-exist", "--lease=5s"]).unwrap();
        let entries: Vec<_> = args.entries().map(|e| (e.setting.name, e.raw)).collect();
        let text = |text: &str| Raw::Text(text.to_owned());
        assert_eq!(
            entries,
            [("store-must-exist", text("true")), ("require-key", text("false")), ("lease", text("5s"))]
        );
    }
}
