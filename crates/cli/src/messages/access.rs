//! The way to the messages: a database, or a sidecar whose store is in it.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use oncegate_core::ErrorChain;
use oncegate_postgres::PostgresOptions;
use oncegate_postgres::messages::{AuditNote, DeadLetterFilter, MessageOperator, OutboxState, RequeueTerms};
use oncegate_seal::Keyring;
use serde_json::{Map, Value};

use crate::admin::messages::{self as operations, MessageFailure, store_words};
use crate::config::{StoreChoice, duration_text, parse_seal_keys, read_store, seal_keys_in};
use crate::keys::client::Client;
use crate::keys::{self, Failure, escaped};
use crate::seal::DeadLetterKeys;

/// The database, or the sidecar.
#[derive(Args)]
#[command(next_help_heading = "The database or the sidecar")]
pub(super) struct MessageAccess {
    /// The PostgreSQL database of the messages, such as postgres://OPERATOR@HOST/DATABASE; a password is better in the
    /// environment [env: ONCEGATE_STORE, unless --admin is given]
    #[arg(long, value_name = "URL", global = true, conflicts_with = "admin")]
    url: Option<String>,
    /// A file with the seal keys that open sealed dead letters of a database; a sidecar uses its own
    /// [env: ONCEGATE_SEAL_KEYS, which has the keys themselves]
    #[arg(long, value_name = "FILE", global = true, conflicts_with = "admin")]
    seal_keys_file: Option<PathBuf>,
    #[command(flatten)]
    sidecar: keys::Access,
}

/// Without the URL, which may contain a password.
impl std::fmt::Debug for MessageAccess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MessageAccess").field("sidecar", &self.sidecar).finish_non_exhaustive()
    }
}

/// Asks for messages and changes them. Both give the same JSON.
pub(super) enum Backend {
    Database(Box<MessageOperator>),
    Sidecar(Box<Client>),
}

impl MessageAccess {
    pub(super) const fn as_json(&self) -> bool {
        self.sidecar.json
    }

    /// The flags that were given, for another command. A URL with a password is not repeated.
    pub(super) fn flags(&self) -> String {
        match &self.url {
            Some(_) => " --url …".to_owned(),
            None => self.sidecar.flags(),
        }
    }

    /// The database of --url; else the sidecar of --admin; else a PostgreSQL database in ONCEGATE_STORE; else the sidecar on this
    /// machine.
    pub(super) fn backend(&self, env: impl Fn(&str) -> Option<String>) -> Result<Backend, Failure> {
        if let Some(url) = &self.url {
            return database("--url", url, self.seal_keys(env)?);
        }
        let from_env = env("ONCEGATE_STORE").filter(|_| self.sidecar.admin.is_none());
        match from_env {
            Some(url) if is_postgres(&url) => database("ONCEGATE_STORE", &url, self.seal_keys(env)?),
            _ => self.sidecar.client(env).map(|client| Backend::Sidecar(Box::new(client))),
        }
    }
}

impl MessageAccess {
    /// The keys that open sealed dead letters; none if none are given.
    fn seal_keys(&self, env: impl Fn(&str) -> Option<String>) -> Result<Keyring, Failure> {
        if let Some(file) = &self.seal_keys_file {
            return seal_keys_in(file)
                .map_err(|why| Failure::Usage(format!("--seal-keys-file {}: {why}", file.display())));
        }
        let Some(text) = env("ONCEGATE_SEAL_KEYS").filter(|text| !text.is_empty()) else {
            return Ok(Keyring::default());
        };
        parse_seal_keys(&text.replace(',', "\n"))
            .map_err(|why| Failure::Usage(format!("ONCEGATE_SEAL_KEYS: {why}")))
    }
}

/// Returns true for a PostgreSQL database, also behind a cache, and for a text that was meant as one.
fn is_postgres(text: &str) -> bool {
    let is_one = |choice: StoreChoice| matches!(choice.store(), StoreChoice::Postgres(_));
    text.starts_with("postgres") || read_store(text).is_ok_and(is_one)
}

/// The database of a URL, also of one behind a cache.
fn database(source: &str, text: &str, keys: Keyring) -> Result<Backend, Failure> {
    let choice = read_store(text).map_err(|error| Failure::Usage(format!("{source}: {error}")))?;
    match choice.store() {
        StoreChoice::Postgres(url) => {
            let options = PostgresOptions::from_url(url.reveal())
                .map_err(|error| Failure::Usage(format!("{source}: {}", ErrorChain(&error))))?;
            let operator = MessageOperator::new(options).with_opener(DeadLetterKeys(keys.into()));
            Ok(Backend::Database(Box::new(operator)))
        }
        _ => Err(Failure::Usage(format!(
            "{source}: dead letters and the outbox are in PostgreSQL; write postgres://USER@HOST/DATABASE"
        ))),
    }
}

impl From<MessageFailure> for Failure {
    fn from(failure: MessageFailure) -> Self {
        let error = |error: &oncegate_core::StoreError, result: &str| {
            let words = store_words(error);
            if error.kind().may_pass() {
                Self::Unreachable(format!("{words}{result}"))
            } else {
                Self::Refused(format!("{words}{result}"))
            }
        };
        match failure {
            MessageFailure::Missing(words) | MessageFailure::Locked(words) => Self::Refused(words),
            MessageFailure::Refused(words) => Self::Refused(keys::client::in_flags(&words)),
            MessageFailure::Read(cause) => error(&cause, ""),
            MessageFailure::Change(cause) => {
                error(&cause, "; it is not known whether this was done: check before you retry")
            }
        }
    }
}

/// The actor and the reason in a request of the admin API.
fn note(request: &Map<String, Value>) -> AuditNote<'_> {
    let text = |name: &str| request.get(name).and_then(Value::as_str);
    AuditNote { actor: text("actor").unwrap_or("admin"), reason: text("reason").unwrap_or_default() }
}

/// Checks the texts for the audit trail as the admin API does.
fn check_note(request: &Map<String, Value>) -> Result<AuditNote<'_>, Failure> {
    let AuditNote { actor, reason } = note(request);
    let check = |flag: &str, text: &str| {
        oncegate_engine::audit_text(text)
            .map(drop)
            .map_err(|error| Failure::Usage(format!("{flag}: {error}")))
    };
    check("--reason", reason)?;
    check("--actor", actor)?;
    Ok(AuditNote { actor: actor.trim(), reason: reason.trim() })
}

impl Backend {
    pub(super) async fn dead_letters(
        &self,
        filter: &DeadLetterFilter,
        limit: usize,
    ) -> Result<Value, Failure> {
        let client = match self {
            Self::Database(operator) => {
                return Ok(operations::list_dead_letters(operator, filter, limit).await?);
            }
            Self::Sidecar(client) => client,
        };
        let before = filter.before.map(|number| number.to_string());
        let parameters = [
            ("consumer", filter.consumer.as_deref()),
            ("topic", filter.topic.as_deref()),
            ("reason", filter.reason.as_deref()),
            ("before", before.as_deref()),
        ];
        client.get(&path("/v1/dead-letters", limit, &parameters)).await
    }

    pub(super) async fn dead_letter(
        &self,
        number: u64,
        window: Duration,
        payload: bool,
    ) -> Result<Value, Failure> {
        match self {
            Self::Database(operator) => {
                Ok(operations::show_dead_letter(operator, number, window, payload).await?)
            }
            Self::Sidecar(client) => {
                let window = escaped(&duration_text(window));
                client
                    .get(&format!("/v1/dead-letters/{number}?payload={payload}&broker_window={window}"))
                    .await
            }
        }
    }

    pub(super) async fn requeue_dead_letter(
        &self,
        number: u64,
        terms: &RequeueTerms,
        accept: &[String],
        request: &Map<String, Value>,
    ) -> Result<Value, Failure> {
        match self {
            Self::Database(operator) => {
                let note = check_note(request)?;
                Ok(operations::requeue_dead_letter(operator, number, terms, note).await?)
            }
            Self::Sidecar(client) => {
                let mut request = request.clone();
                request.insert("accept".to_owned(), accept.into());
                request.insert("broker_window".to_owned(), duration_text(terms.broker_window).into());
                client.post(&format!("/v1/dead-letters/{number}/requeue"), &request.into()).await
            }
        }
    }

    /// Requeues a message of the outbox, or drops it or a dead letter.
    pub(super) async fn change(
        &self,
        kind: &str,
        number: u64,
        action: &str,
        request: &Map<String, Value>,
    ) -> Result<Value, Failure> {
        match self {
            Self::Database(operator) => {
                let note = check_note(request)?;
                Ok(match (kind, action) {
                    ("dead-letters", _) => operations::drop_dead_letter(operator, number, note).await?,
                    (_, "requeue") => operations::requeue_outbox_message(operator, number, note).await?,
                    _ => operations::drop_outbox_message(operator, number, note).await?,
                })
            }
            Self::Sidecar(client) => {
                client.post(&format!("/v1/{kind}/{number}/{action}"), &request.clone().into()).await
            }
        }
    }

    pub(super) async fn outbox(
        &self,
        state: Option<OutboxState>,
        after: Option<u64>,
        limit: usize,
    ) -> Result<Value, Failure> {
        let client = match self {
            Self::Database(operator) => {
                return Ok(operations::list_outbox(operator, state, after, limit).await?);
            }
            Self::Sidecar(client) => client,
        };
        let after = after.map(|number| number.to_string());
        let state = state.map_or("all", OutboxState::as_str);
        client.get(&path("/v1/outbox", limit, &[("state", Some(state)), ("after", after.as_deref())])).await
    }

    pub(super) async fn outbox_message(&self, seq: u64, payload: bool) -> Result<Value, Failure> {
        match self {
            Self::Database(operator) => Ok(operations::show_outbox_message(operator, seq, payload).await?),
            Self::Sidecar(client) => client.get(&format!("/v1/outbox/{seq}?payload={payload}")).await,
        }
    }

    pub(super) async fn audit(&self, before: Option<u64>, limit: usize) -> Result<Value, Failure> {
        match self {
            Self::Database(operator) => Ok(operations::message_audit(operator, before, limit).await?),
            Self::Sidecar(client) => {
                let before = before.map(|number| number.to_string());
                client.get(&path("/v1/audit/messages", limit, &[("before", before.as_deref())])).await
            }
        }
    }
}

fn path(path: &str, limit: usize, parameters: &[(&str, Option<&str>)]) -> String {
    let mut text = format!("{path}?limit={limit}");
    for (name, value) in parameters {
        if let Some(value) = value {
            text.extend(["&", name, "=", &escaped(value)]);
        }
    }
    text
}
