//! `oncegate schema`: prepares a database, so that a sidecar can keep records in it.

use std::io::{ErrorKind, Write as _};
use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use oncegate_core::{Durability, ErrorChain, Store as _};
use oncegate_postgres::{PostgresOpenError, PostgresOptions, PostgresStore, schema};
use oncegate_redis::contract::Scripts;
use serde_json::{Value, json};

use crate::config::{StoreChoice, store};

/// Prepares a database for its store.
#[derive(Args, Debug)]
pub(crate) struct SchemaArgs {
    #[command(subcommand)]
    command: SchemaCommand,
}

#[derive(Subcommand, Debug)]
enum SchemaCommand {
    /// Prints the contract: the SQL that `apply` runs, or the Lua scripts
    Print {
        /// The kind of store
        contract: Contract,
        /// Prints only this script (redis), such as `claim`
        script: Option<String>,
    },
    /// Brings the database to the version that this program needs and replaces its functions; run it as the schema's owner
    Apply(Database),
    /// Prints the version of the database, and fails if the contract is bound to an object of another owner
    Status(Database),
}

#[derive(Args)]
struct Database {
    /// The kind of database
    kind: DatabaseKind,
    /// The database, such as postgres://OWNER@HOST/DATABASE; a password is better in the environment
    #[arg(long, env = "ONCEGATE_STORE", hide_env_values = true)]
    url: String,
    /// Prints one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// Without the URL, which may contain a password.
impl std::fmt::Debug for Database {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Database").field("kind", &self.kind).finish_non_exhaustive()
    }
}

/// A contract that programs in other languages can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Contract {
    Postgres,
    Redis,
}

/// A database with a schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DatabaseKind {
    Postgres,
}

/// The exit code if the database cannot be reached, as that of `oncegate dead-letters`.
const UNREACHABLE: u8 = 3;

/// The reason why the command failed.
struct Failure {
    text: String,
    is_unreachable: bool,
}

impl From<String> for Failure {
    fn from(text: String) -> Self {
        Self { text, is_unreachable: false }
    }
}

impl From<PostgresOpenError> for Failure {
    fn from(error: PostgresOpenError) -> Self {
        let is_unreachable = matches!(error, PostgresOpenError::Unreachable { .. });
        Self { text: ErrorChain(&error).to_string(), is_unreachable }
    }
}

/// Runs the command.
pub(crate) fn run(args: &SchemaArgs) -> ExitCode {
    let Err(failure) = run_command(&args.command) else { return ExitCode::SUCCESS };
    for line in failure.text.lines() {
        complain!("error: {line}");
    }
    if failure.is_unreachable { ExitCode::from(UNREACHABLE) } else { ExitCode::FAILURE }
}

fn run_command(command: &SchemaCommand) -> Result<(), Failure> {
    match command {
        SchemaCommand::Print { contract, script } => Ok(print(*contract, script.as_deref())?),
        SchemaCommand::Apply(database @ Database { kind: DatabaseKind::Postgres, .. }) => {
            let options = options(&database.url)?;
            let before = crate::block_on(schema::apply(&options))?.map_err(still_bound)?;
            let (name, version) = (options.database(), schema::VERSION);
            if database.json {
                let bindings = &before.foreign_bindings;
                return Ok(say_json(&json!({
                    "database": name, "found": before.found, "needed": version, "version": version, "repaired": bindings
                }))?);
            }
            let mut text = match before.found {
                Some(found) if found == version => {
                    format!("{name} has version {version} already; its functions were replaced\n")
                }
                Some(found) => format!("{name} was upgraded from version {found} to {version}\n"),
                None => format!("{name} now has version {version}\n"),
            };
            for binding in &before.foreign_bindings {
                text +=
                    &format!("repaired: {binding}, an object of another owner; find out who created it\n");
            }
            Ok(say(&text)?)
        }
        SchemaCommand::Status(database @ Database { kind: DatabaseKind::Postgres, .. }) => {
            let options = options(&database.url)?;
            let status = block_on(schema::status(&options))?;
            let (name, needed) = (options.database(), status.needed);
            if database.json {
                // The exit code is the same as without.
                let bindings = &status.foreign_bindings;
                say_json(&json!({
                    "database": name, "found": status.found, "needed": needed, "foreign_bindings": bindings
                }))?;
            }
            if !status.foreign_bindings.is_empty() {
                let bindings = status.foreign_bindings;
                return Err(PostgresOpenError::ForeignBindings { database: name, bindings }.into());
            }
            match status.found {
                Some(found) if found == needed && database.json => Ok(()),
                Some(found) if found == needed => {
                    Ok(say(&format!("{name} has version {found}, as this program needs\n"))?)
                }
                Some(found) if found > needed => {
                    Err(PostgresOpenError::NewerContract { database: name, found, known: needed }.into())
                }
                found => Err(PostgresOpenError::NoContract { database: name, found, needed }.into()),
            }
        }
    }
}

/// The error of an upgrade. Its reader has run `apply`, so it must not advise that.
fn still_bound(error: PostgresOpenError) -> Failure {
    match error {
        PostgresOpenError::ForeignBindings { database, bindings } => format!(
            "{database}: the contract was applied, and parts of the schema oncegate are still bound to objects outside of it, \
             whose owners act with the rights of the schema's owner: {}. Find out who created these objects, and repair the \
             bindings by hand, as docs/reference/store-contract-postgres.md says under \"Search path and owner\"",
            bindings.join("; ")
        )
        .into(),
        error => error.into(),
    }
}

fn print(contract: Contract, script: Option<&str>) -> Result<(), String> {
    let scripts = Scripts::published();
    match (contract, script) {
        (Contract::Postgres, None) => say(&schema::print()),
        (Contract::Postgres, Some(_)) => {
            Err("the contract on PostgreSQL is one text: leave the script out".to_owned())
        }
        (Contract::Redis, None) => scripts.each().try_for_each(|(_, script)| say(script.code())),
        (Contract::Redis, Some(name)) => match scripts.each().find(|(known, _)| *known == name) {
            Some((_, script)) => say(script.code()),
            None => {
                let names: Vec<_> = scripts.each().map(|(name, _)| name).collect();
                Err(format!("there is no script {name:?}; the scripts are {}", names.join(", ")))
            }
        },
    }
}

/// Checks if a sidecar can use the PostgreSQL database at this URL. Returns true if its commits are flushed to disk.
pub(crate) fn usable(url: &str) -> Result<bool, String> {
    let options = options(url)?;
    let durability = block_on(async {
        let status = schema::status(&options).await;
        // Objects of other owners are worse than a version that is too old, so they are reported first.
        if let Ok(bindings) = status.as_ref().map(|status| &status.foreign_bindings)
            && !bindings.is_empty()
        {
            let (database, bindings) = (options.database(), bindings.clone());
            return Err(PostgresOpenError::ForeignBindings { database, bindings });
        }
        // The error of a start is the better one if a right is missing, because it names what to grant.
        let store = PostgresStore::open(options).await?;
        let durability = store.capabilities().durability;
        store.close().await;
        status?;
        Ok(durability)
    })
    .map_err(|failure| failure.text)?;
    Ok(durability == Durability::Synced)
}

/// Checks that the database belongs to the id secret of these identities, or to none.
///
/// # Errors
/// The reason why the sidecar would refuse requests. A database that cannot be used is none: [`usable`] reports that.
pub(crate) fn verify_ids(url: &str, ids: oncegate_core::IdScheme) -> Result<(), String> {
    let Ok(options) = options(url) else { return Ok(()) };
    crate::block_on(async {
        let Ok(store) = PostgresStore::open(options).await else { return Ok(()) };
        let verified = crate::check::id_problem(&store, &ids).await;
        store.close().await;
        verified
    })
    .unwrap_or(Ok(()))
}

/// The options for a URL. For a cached store, those of the database behind the cache.
fn options(url: &str) -> Result<PostgresOptions, String> {
    if url.trim().is_empty() {
        return Err("--url (or ONCEGATE_STORE) is empty: is the variable set that it comes from? Write the database, such as \
                    postgres://OWNER@HOST/DATABASE"
            .to_owned());
    }
    let choice = store(url).ok();
    let url = match choice.as_ref().map(StoreChoice::store) {
        Some(StoreChoice::Postgres(url)) => url.reveal(),
        _ => url,
    };
    PostgresOptions::from_url(url).map_err(|error| ErrorChain(&error).to_string())
}

fn block_on<T>(run: impl Future<Output = Result<T, PostgresOpenError>>) -> Result<T, Failure> {
    Ok(crate::block_on(run)??)
}

fn say_json(value: &Value) -> Result<(), String> {
    say(&format!("{value}\n"))
}

fn say(text: &str) -> Result<(), String> {
    match std::io::stdout().write_all(text.as_bytes()) {
        // `oncegate schema print redis | head` is not an error.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(format!("cannot print: {error}")),
        _ => Ok(()),
    }
}
