//! `oncegate`: the sidecar and the tools of Oncegate.

/// Prints lines on the standard error, without control characters: the texts of errors quote what servers have sent. An error is
/// ignored, because the exit code reports the result anyway.
macro_rules! complain {
    ($($words:tt)*) => {{
        let words = $crate::printable(&format!("{}\n", format_args!($($words)*)));
        let _unread = ::std::io::Write::write_all(&mut ::std::io::stderr(), words.as_bytes());
    }};
}

/// The text with a replacement character for each control character that is no end of a line and no tab.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && !matches!(c, '\n' | '\t') { '\u{fffd}' } else { c }).collect()
}

mod access_log;
mod activity;
mod admin;
mod archive;
mod call;
mod check;
mod config;
mod config_command;
mod demo;
mod explain;
#[cfg(feature = "failpoints")]
mod failpoint;
mod files;
mod id_secret;
mod keys;
mod line_writer;
mod log;
mod messages;
mod otlp;
mod probe;
mod proxy;
mod rules;
mod schema;
mod seal;
mod shell;
mod signals;
mod style;
mod systemd;
mod tap;
mod top;
mod trace;

use std::future::Future;
use std::process::ExitCode;

use call::CallArgs;
use check::CheckArgs;
use clap::{CommandFactory as _, Parser, Subcommand};
use config::ProxyArgs;
use config_command::{ConfigArgs, InitArgs};
use demo::DemoArgs;
use explain::ExplainArgs;
use id_secret::IdSecretArgs;
use keys::{BackupArgs, ClockArgs, ForgetArgs, HealthArgs, KeysArgs, ResealArgs};
use messages::{DeadLettersArgs, OutboxArgs};
use probe::ProbeArgs;
use rules::{OpenapiArgs, RulesArgs};
use schema::SchemaArgs;
use seal::SealKeyArgs;
use shell::{CompletionsArgs, ManArgs};
use style::ColorChoice;
use tap::TapArgs;
use top::TopArgs;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Makes retries safe: one key, one effect.
#[derive(Parser)]
#[command(name = "oncegate", version, about, long_about = None, propagate_version = true)]
pub(crate) struct Oncegate {
    #[command(subcommand)]
    command: Command,
    /// Colours the output: always, never, or auto (on a terminal, unless NO_COLOR is set)
    #[arg(long, global = true, value_enum, value_name = "WHEN", default_value_t = ColorChoice::Auto, hide_possible_values = true)]
    color: ColorChoice,
}

#[derive(Subcommand)]
enum Command {
    /// Runs the sidecar: a reverse proxy that makes retries of requests with an Idempotency-Key safe.
    ///
    /// Every setting can be given as a flag, as an environment variable (ONCEGATE_LISTEN for --listen), or in a TOML file
    /// (--config). Flags win over the environment, the environment over the file.
    Proxy(ProxyArgs),
    /// Checks a configuration and its store, and prints a line for each result; the exit code is 1 if there is an error.
    ///
    /// Accepts the flags of the sidecar. It starts nothing, listens on no address and, without --online, sends nothing to the
    /// service. A store that no process has open is read from end to end, and is not changed.
    Check(CheckArgs),
    /// Prints the route that a request matches, and each setting that applies to it with its source.
    ///
    /// Takes the same flags, variables and file as `oncegate proxy`. Exit codes: 0 explained, 1 the configuration has errors,
    /// 2 wrong usage.
    Explain(Box<ExplainArgs>),
    /// Prints the rules for keys, made from the configuration: the page "How to retry" for the customers of your API.
    ///
    /// Takes the same flags, variables and file as `oncegate proxy`. Exit codes: 0 printed, 1 the configuration has errors,
    /// 2 wrong usage.
    Rules(Box<RulesArgs>),
    /// Prints the rules for keys as an OpenAPI document, or adds them to the one of your API.
    ///
    /// Takes the same flags, variables and file as `oncegate proxy`. Exit codes: 0 printed, 1 the configuration or the document
    /// has errors, 2 wrong usage.
    Openapi(Box<OpenapiArgs>),
    /// Demonstrates Oncegate: the same payments over a hostile network, without Oncegate and with it.
    ///
    /// Starts a payments service with a ledger, customers whose requests and responses get lost, and the sidecar, which is
    /// killed with kill -9 in the middle. Ends with a table of the charges in the ledger, and with the exit code 1 if with
    /// Oncegate any payment was charged twice or not at all. Takes about ten seconds, and needs only this program.
    Demo(DemoArgs),
    /// Lists, shows and resolves records of a running sidecar.
    ///
    /// Exit codes: 0 done, 1 refused or not found, 2 wrong usage, 3 the sidecar cannot be reached.
    Keys(KeysArgs),
    /// Confirms to a running sidecar that the clock of its machine is right, after it was set ahead by more than five minutes.
    ///
    /// Exit codes as for `oncegate keys`.
    Clock(ClockArgs),
    /// Lists, shows, requeues and drops dead letters: messages that a consumer gave up, in PostgreSQL.
    ///
    /// Exit codes: 0 done, 1 refused or not found, 2 wrong usage, 3 the database or the sidecar cannot be reached.
    #[command(name = "dead-letters")]
    DeadLetters(DeadLettersArgs),
    /// Lists, shows, requeues and drops messages of the outbox, in PostgreSQL.
    ///
    /// Exit codes as for `oncegate dead-letters`.
    Outbox(OutboxArgs),
    /// Shows the requests of a running sidecar as they happen, one line each.
    ///
    /// If the sidecar goes away, it says so and connects again. Exit codes as for `oncegate keys`.
    Tap(TapArgs),
    /// Shows a summary of a running sidecar, and refreshes it: requests and rates, what is in flight, unsettled records, mistakes
    /// of clients.
    ///
    /// Exit codes as for `oncegate keys`.
    Top(TopArgs),
    /// Asks a running sidecar if it lives, or, with --ready, if it is ready. For the health checks of containers.
    ///
    /// Exit codes: 0 healthy, 1 not healthy or not reached, 2 wrong usage.
    Health(HealthArgs),
    /// Copies the embedded store of a running sidecar into a new directory, and checks the copy.
    ///
    /// The copy is the store as it was at one moment. Retries of keys that are used later execute again if it is restored:
    /// read docs/guides/backups.md before that. Exit codes as for `oncegate keys`.
    Backup(BackupArgs),
    /// Makes keys that encrypt stored responses, and shows which records still need which key.
    ///
    /// Exit codes: 0 done, 1 failed or refused, 2 wrong usage, 3 the sidecar cannot be reached.
    SealKey(SealKeyArgs),
    /// Seals the records of a running sidecar's store anew, with the key that seals now, so that older keys are no longer needed.
    ///
    /// Works page by page while sidecars serve, and may be stopped and run again at any time. With --store, the same for a
    /// directory that no process has open. Exit codes: 0 everything is sealed with that key, 1 refused, or records are left
    /// (their number is printed), 2 wrong usage, 3 the sidecar cannot be reached.
    Reseal(ResealArgs),
    /// Removes the stored responses and steps of a caller, for a request for deletion. Their keys stay protected: retries are
    /// refused and never executed.
    ///
    /// Only completed records are changed. The others are named, and make the exit code 1: run it again until there are none.
    /// It cannot be undone. A caller of whom the store has no record is exit code 1, too, so that a slip in the caller is no
    /// success. Other exit codes as for `oncegate keys`.
    Forget(ForgetArgs),
    /// Makes the secret that keys the identities of records, for a new store, and puts back the mark of a store that has lost it.
    ///
    /// A store keeps its secret for its whole life: all sidecars on it need it, and it cannot be replaced. Exit codes: 0 done,
    /// 1 failed or refused, 2 wrong usage, 3 the sidecar cannot be reached.
    IdSecret(IdSecretArgs),
    /// Sends one request until there is a definite response: for scripts and cron jobs, where curl --retry would pay twice.
    ///
    /// Every attempt carries the same Idempotency-Key. With --journal the intent is on disk before it is sent, and survives
    /// this process: `oncegate call --resume --journal DIR` continues it. The body of the response is written to the standard
    /// output, all messages to the standard error.
    #[command(after_long_help = call::exit_codes())]
    Call(Box<CallArgs>),
    /// Tests from outside what an API does with repeated requests: any API, not only one behind Oncegate.
    ///
    /// Sends real requests: duplicates one after the other and at once, other bodies and callers, malformed keys, broken
    /// connections. Reports for each row what was seen, what the profile promises, and advice. The effects of the requests
    /// stay, so use an API for tests. Addresses that are not on this machine need --yes.
    #[command(after_long_help = probe::exit_codes())]
    Probe(Box<ProbeArgs>),
    /// Prepares a database for its store: prints the SQL, applies it, or shows the version of the database.
    ///
    /// Exit codes: 0 done, 1 failed, or not the version that this program needs, 2 wrong usage, 3 the database cannot be reached.
    Schema(SchemaArgs),
    /// Writes a new configuration file, in which every setting is explained.
    ///
    /// Exit codes: 0 written, 1 the file exists or cannot be written, 2 wrong usage.
    Init(InitArgs),
    /// Prints the effective configuration, or the JSON Schema of configuration files.
    Config(ConfigArgs),
    /// Prints the completions of commands and flags for a shell.
    Completions(CompletionsArgs),
    /// Writes the pages of the manual.
    Man(ManArgs),
}

fn main() -> ExitCode {
    // Before the arguments are parsed, which takes milliseconds. If that fails, what the program does next fails with a message.
    let _refused =
        signals::keep_running(std::env::args_os().nth(1).is_some_and(|command| command == "proxy"));
    let parsed = Oncegate::try_parse().unwrap_or_else(|mut error| {
        config::drop_far_suggestion(&mut error);
        config::add_tip(&mut error);
        error.exit()
    });
    style::start(parsed.color);
    let code = run(parsed.command);
    log::flush();
    code
}

fn run(command: Command) -> ExitCode {
    let result = match command {
        Command::Proxy(args) => proxy::run(&args),
        Command::Check(args) => return check::run(&args),
        Command::Explain(args) => return explain::run(&args),
        Command::Rules(args) => return rules::run(&args),
        Command::Openapi(args) => return rules::run_openapi(&args),
        Command::Demo(args) => return demo::run(&args),
        Command::Keys(args) => return keys::run(&args),
        Command::Clock(args) => return keys::run_clock(&args),
        Command::Health(args) => return keys::run_health(&args),
        Command::Backup(args) => return keys::run_backup(&args),
        Command::SealKey(args) => return seal::run(&args),
        Command::Reseal(args) => return keys::run_reseal(&args),
        Command::Forget(args) => return keys::run_forget(&args),
        Command::IdSecret(args) => return id_secret::run(&args),
        Command::Call(args) => return call::run(&args),
        Command::Probe(args) => return probe::run(&args),
        Command::Schema(args) => return schema::run(&args),
        Command::DeadLetters(args) => return messages::run_dead_letters(&args),
        Command::Outbox(args) => return messages::run_outbox(&args),
        Command::Tap(args) => return tap::run(&args),
        Command::Top(args) => return top::run(&args),
        Command::Init(args) => return config_command::run_init(&args),
        Command::Config(args) => return config_command::run(&args),
        Command::Completions(args) => shell::completions(&args, Oncegate::command()),
        Command::Man(args) => shell::man(&args, Oncegate::command()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // So that the error comes after the log lines.
            log::flush();
            for line in error.lines() {
                complain!("error: {line}");
            }
            ExitCode::FAILURE
        }
    }
}

/// Runs a future to its end on a runtime of its own.
fn block_on<T>(run: impl Future<Output = T>) -> Result<T, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    Ok(runtime.map_err(|error| format!("cannot start a runtime: {error}"))?.block_on(run))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_version_names_the_program() {
        let version = Oncegate::command().render_version();
        assert_eq!(version, concat!("oncegate ", env!("CARGO_PKG_VERSION"), "\n"));
    }

    /// The first column of the table has each command, also in one cell with others or with its own subcommands.
    #[test]
    fn the_page_of_commands_has_a_row_for_each() {
        let page = include_str!("../../../docs/reference/commands.md");
        let (_, table) = page.split_once("| command | talks to | |\n").unwrap();
        let rows: Vec<_> = table.lines().skip(1).take_while(|line| line.starts_with("| ")).collect();
        let cells = rows.iter().map(|row| row.split(" | ").next().unwrap_or_default());
        let spans = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
        let named: std::collections::BTreeSet<_> = spans.filter_map(|span| span.split(' ').next()).collect();
        let command = Oncegate::command();
        let known: std::collections::BTreeSet<_> =
            command.get_subcommands().map(|command| command.get_name()).collect();
        assert_eq!(named, known);
    }

    #[test]
    fn the_arguments_are_consistent() {
        Oncegate::command().debug_assert();
    }
}
