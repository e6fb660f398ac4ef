//! `oncegate config`: prints the effective configuration, writes a new configuration file, and prints the schema of such files.

mod dump;
mod init;
mod schema;
#[cfg(test)]
mod tests;

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::Value;

use crate::config::{Accepted, ProxyArgs, Raw, Setting, Shape};

/// Prints, writes and describes configurations.
#[derive(Args, Debug)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Subcommand, Debug)]
enum ConfigCommand {
    /// Prints the effective configuration, each value with its source. Secrets, also those inside of URLs, are left out
    ///
    /// Takes the same flags, variables and file as `oncegate proxy`. What it prints is a configuration file, except for values
    /// that are left out. Exit codes: 0 printed, 1 the configuration has errors, 2 wrong usage.
    Dump(Box<DumpArgs>),
    /// Prints a JSON Schema (draft-07) of the configuration file, with which editors complete and check it
    Schema,
}

#[derive(Args, Debug)]
struct DumpArgs {
    #[command(flatten)]
    settings: ProxyArgs,
    /// Prints one JSON object: name, value and source of each setting, and of those that differ on each route
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// Writes a new configuration file.
#[derive(Args, Debug)]
pub(crate) struct InitArgs {
    /// The file, which must not exist; - is the standard output
    #[arg(default_value = "oncegate.toml")]
    file: PathBuf,
}

/// Runs `oncegate config`.
pub(crate) fn run(args: &ConfigArgs) -> ExitCode {
    match &args.command {
        ConfigCommand::Dump(args) => dump::run(args),
        ConfigCommand::Schema => {
            let text = serde_json::to_string_pretty(&schema::schema()).unwrap_or_default();
            print(&format!("{text}\n"))
        }
    }
}

/// Runs `oncegate init`.
pub(crate) fn run_init(args: &InitArgs) -> ExitCode {
    if args.file.as_os_str() == "-" {
        return print(&init::text());
    }
    let shown = args.file.display();
    let created = std::fs::OpenOptions::new().write(true).create_new(true).open(&args.file);
    let written = created.and_then(|mut file| file.write_all(init::text().as_bytes()));
    match written {
        Ok(()) => print(&format!(
            "{shown} was written. Set `to` in it, then: oncegate check --config {shown} && oncegate proxy --config {shown}\n"
        )),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            complain!(
                "error: {shown} exists already, and is not changed: give another name, or - to print to the standard output"
            );
            ExitCode::FAILURE
        }
        Err(error) => {
            complain!("error: {shown}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn print(text: &str) -> ExitCode {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            complain!("error: cannot print: {error}");
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}

/// The value of a setting as JSON, in the type that it has in the file.
fn json_value(setting: &Setting, raw: &Raw) -> Value {
    let accepted = (setting.accepted)();
    let is_ratio = matches!(accepted, Accepted::Ratio);
    let is_number = matches!(accepted, Accepted::Number(..));
    let one = |text: &str| match text.parse::<i64>() {
        Ok(number) if is_number || is_ratio => number.into(),
        _ if is_ratio => text.parse::<f64>().map_or_else(|_| Value::from(text), Value::from),
        _ => Value::from(text),
    };
    match (setting.shape, raw) {
        (Shape::Switch, Raw::Text(text)) => text.parse::<bool>().map_or_else(|_| one(text), Value::from),
        (Shape::Many, Raw::Text(text)) => text.split(',').map(|part| one(part.trim())).collect(),
        (_, Raw::List(texts)) => texts.iter().map(|text| one(text)).collect(),
        (Shape::One, Raw::Text(text)) => one(text),
    }
}

/// The value of a setting as it is written in the file.
fn toml_value(setting: &Setting, raw: &Raw) -> String {
    toml_of(&json_value(setting, raw))
}

fn toml_of(value: &Value) -> String {
    match value {
        Value::Array(items) => {
            format!("[{}]", items.iter().map(toml_of).collect::<Vec<_>>().join(", "))
        }
        Value::String(text) => toml_text(text),
        other => other.to_string(),
    }
}

/// A basic string of TOML.
fn toml_text(text: &str) -> String {
    let mut quoted = String::from("\"");
    for char in text.chars() {
        match char {
            '"' | '\\' => quoted.extend(['\\', char]),
            char if char.is_control() => quoted.push_str(&format!("\\u{:04X}", u32::from(char))),
            char => quoted.push(char),
        }
    }
    quoted.push('"');
    quoted
}
