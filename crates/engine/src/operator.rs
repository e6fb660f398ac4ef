//! The actions of an operator on the records of a store, inside the program that has it open.

use std::time::Duration;

use oncegate_core::{
    AuditEntry, Command, ListPage, ListQuery, Outcome, Record, RecordId, Resolution, Resolve, StateName,
    StateSet, StoreError, StoredResponse, limits,
};

use crate::engine::Engine;
use crate::policy::Policy;
use oncegate_core::ConfigError;

/// Lists and resolves the records of an engine's store, for programs whose store only they can open, such as an embedded one.
/// [`Engine::operator`] makes it.
///
/// Put it behind the tools of your operators: a route of your admin server, or a command of your program. It checks no
/// permissions itself.
///
/// ```
/// # use oncegate_core::MemoryStore;
/// # use oncegate_engine::{Engine, FunctionError};
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// # let engine = Engine::new(MemoryStore::default());
/// let charge = engine.function("charge");
/// let pay = || charge.run("order-7", &500, async |_| Err::<String, _>("timed out".to_owned()));
/// assert!(pay().await.is_err());
/// assert!(matches!(pay().await, Err(FunctionError::Unknown)));
///
/// // The bank's list says that the charge was made.
/// let operator = engine.operator("ada")?;
/// let unsettled = operator.unsettled("charge").await?;
/// let (record, _) = unsettled.first().expect("there is one");
/// operator.complete(*record, Some(charge.response(&"paid 500")?), "found in the bank's list").await?;
/// assert_eq!(pay().await.unwrap(), "paid 500");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Operator {
    engine: Engine,
    actor: String,
    retention: Duration,
}

/// The error of a resolution.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResolveError {
    /// There is no record, or its retention is over.
    #[error("there is no such record, or its retention is over")]
    NoRecord,
    /// The record is in this state and cannot be resolved now. A record that its owner completed never changes, and a record in
    /// progress belongs to its owner.
    #[error("the record is {0} and cannot be resolved now")]
    NotResolvable(StateName),
    /// An operator resolved the record before, and it is in this state now. [`Operator::amend`] replaces the resolution.
    #[error("an operator resolved the record before, and it is {0}: amend that, or park the record")]
    NeedsAmendment(StateName),
    /// The reason cannot be written to the audit trail.
    #[error("the reason cannot be written to the audit trail")]
    Reason(#[source] AuditTextError),
    /// The store failed. It may have applied the resolution.
    #[error("the store failed; it may have applied the resolution")]
    Store(#[source] StoreError),
}

/// The reason why a text cannot be written to the audit trail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AuditTextError {
    /// It is empty.
    #[error("it is empty; the audit trail needs a text")]
    Empty,
    /// It has more than [`limits::MAX_AUDIT_TEXT_BYTES`] bytes.
    #[error("it has {bytes} bytes; at most {} are allowed", limits::MAX_AUDIT_TEXT_BYTES)]
    TooLong {
        /// The length of the text.
        bytes: usize,
    },
    /// It has control characters, which could control a terminal.
    #[error("it has control characters; write one line of text")]
    Control,
    /// It has characters that change the direction of text, so that it could show something else than it says.
    #[error("it has characters that change the direction of text; leave them out")]
    Direction,
    /// It has characters that cannot be seen, so that it could look like the text of another operator.
    #[error("it has characters that cannot be seen; leave them out")]
    Invisible,
}

/// Returns true if a text has a character that is not seen: those that Unicode lets programs ignore, line and paragraph
/// separators, and letters that look like a blank. A joiner or a selector of a variant is seen by its effect on a character
/// before it that is not ASCII: languages and emoji need them.
fn has_invisible(text: &str) -> bool {
    let mut before = None;
    text.chars().any(|char| {
        let previous = before.replace(char);
        match char {
            '\u{200c}' | '\u{200d}' | '\u{fe00}'..='\u{fe0f}' => {
                previous.is_none_or(|previous| previous.is_ascii() || is_ignorable(previous))
            }
            char => is_ignorable(char),
        }
    })
}

fn is_ignorable(char: char) -> bool {
    matches!(
        char,
        '\u{ad}' | '\u{34f}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{180b}'..='\u{180f}'
            | '\u{200b}'..='\u{200d}' | '\u{2028}' | '\u{2029}' | '\u{2060}'..='\u{206f}' | '\u{2800}' | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}'
            | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}'
    )
}

/// Returns true for the marks, embeddings, overrides and isolates of the Unicode bidirectional algorithm (UAX #9).
fn is_direction_mark(char: char) -> bool {
    matches!(char, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Checks a text for the audit trail, and removes blanks around it.
///
/// # Errors
/// [`AuditTextError`].
pub fn audit_text(text: &str) -> Result<&str, AuditTextError> {
    let text = text.trim();
    match text.len() {
        0 => Err(AuditTextError::Empty),
        bytes if bytes > limits::MAX_AUDIT_TEXT_BYTES => Err(AuditTextError::TooLong { bytes }),
        _ if text.chars().any(char::is_control) => Err(AuditTextError::Control),
        _ if text.chars().any(is_direction_mark) => Err(AuditTextError::Direction),
        _ if has_invisible(text) => Err(AuditTextError::Invisible),
        _ => Ok(text),
    }
}

impl Engine {
    /// The actions of an operator on the records of the store. `actor` is the operator's name, for the audit trail.
    ///
    /// # Errors
    /// If the name cannot be written to the audit trail.
    pub fn operator(&self, actor: &str) -> Result<Operator, ConfigError> {
        let actor = audit_text(actor).map_err(|error| ConfigError::new(format!("the actor: {error}")))?;
        Ok(Operator {
            engine: self.clone(),
            actor: actor.to_owned(),
            retention: Policy::default().retention(),
        })
    }

    /// Applies an operator's resolution to a record. If an attempt of this process runs under it, it is renewed at once, so that
    /// a key that was released by force is free in this process, too.
    ///
    /// # Errors
    /// The error of the store.
    pub async fn resolve(&self, id: RecordId, command: Resolve) -> Result<Outcome, StoreError> {
        let outcome = self.store().apply(id, Command::Resolve(command)).await?;
        if matches!(outcome, Outcome::Resolved { .. })
            && let Some(attempt) = self.running(&id)
        {
            // If this fails, the next renewal finds it out.
            let _asked = attempt.renew().await;
        }
        Ok(outcome)
    }
}

/// The reach of an operator's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Only a record that waits for an operator.
    First,
    /// Also a record whose owner may be alive.
    ByForce,
    /// Only a record that an operator resolved.
    Amend,
}

impl Operator {
    /// Sets the time that a record is kept after it was resolved: 24 hours by default.
    ///
    /// # Errors
    /// As [`Policy::with_retention`].
    pub fn with_retention(self, retention: Duration) -> Result<Self, ConfigError> {
        let retention = Policy::default().with_retention(retention)?.retention();
        Ok(Self { retention, ..self })
    }

    /// A page of records.
    ///
    /// # Errors
    /// The error of the store.
    pub async fn list(&self, query: ListQuery) -> Result<ListPage, StoreError> {
        self.engine.store().list(query).await
    }

    /// The records that wait for an operator, of operations whose names begin with this text: their outcome is unknown, or
    /// their owner is gone and no claim has come since. At most [`limits::MAX_PAGE_RECORDS`].
    ///
    /// # Errors
    /// The error of the store.
    pub async fn unsettled(&self, operation: &str) -> Result<Vec<(RecordId, Record)>, StoreError> {
        let mut found = Vec::new();
        let mut query = ListQuery::default();
        query.states = StateSet::UNSETTLED;
        query.operation = Some(operation.to_owned());
        while found.len() < limits::MAX_PAGE_RECORDS {
            query.limit = limits::MAX_PAGE_RECORDS - found.len();
            let page = self.list(query.clone()).await?;
            found.extend(page.records);
            query.after = page.next;
            if page.next.is_none() {
                break;
            }
        }
        Ok(found)
    }

    /// One record.
    ///
    /// # Errors
    /// The error of the store.
    pub async fn look_up(&self, id: RecordId) -> Result<Option<Record>, StoreError> {
        self.engine.store().lookup(id).await
    }

    /// Records that the operation took place. Every later call gets this response, or, with `None`, `Unreplayable`.
    /// [`Function::response`](crate::Function::response) makes the response of a function. Returns the state before.
    ///
    /// # Errors
    /// [`ResolveError`].
    pub async fn complete(
        &self,
        id: RecordId,
        response: Option<StoredResponse>,
        reason: &str,
    ) -> Result<StateName, ResolveError> {
        self.resolve(id, Resolution::Complete(response), Mode::First, reason).await
    }

    /// Records that the operation did not take place: the key is free again. Returns the state before.
    ///
    /// # Errors
    /// [`ResolveError`].
    pub async fn release(&self, id: RecordId, reason: &str) -> Result<StateName, ResolveError> {
        self.resolve(id, Resolution::Release, Mode::First, reason).await
    }

    /// As [`release`](Self::release), even if the owner may be alive. The owner is fenced, but what it has begun may still take
    /// effect, in addition to the next execution.
    ///
    /// # Errors
    /// [`ResolveError`].
    pub async fn release_by_force(&self, id: RecordId, reason: &str) -> Result<StateName, ResolveError> {
        self.resolve(id, Resolution::Release, Mode::ByForce, reason).await
    }

    /// Replaces an operator's earlier resolution, and nothing else: a record that its owner completed does not change. Callers
    /// may have got the earlier response; a key that is released executes again. Returns the state before.
    ///
    /// # Errors
    /// [`ResolveError`].
    pub async fn amend(
        &self,
        id: RecordId,
        resolution: Resolution,
        reason: &str,
    ) -> Result<StateName, ResolveError> {
        self.resolve(id, resolution, Mode::Amend, reason).await
    }

    /// Takes back an operator's resolution, or holds a key that was released and not claimed since: the outcome is unknown, and
    /// nothing executes until the record is resolved again. Returns the state before.
    ///
    /// # Errors
    /// [`ResolveError`].
    pub async fn park(&self, id: RecordId, reason: &str) -> Result<StateName, ResolveError> {
        self.resolve(id, Resolution::Park, Mode::First, reason).await
    }

    /// The audit trail, newest first: at most `limit` entries from before the entry number `before`.
    ///
    /// # Errors
    /// The error of the store.
    pub async fn audit(&self, before: Option<u64>, limit: usize) -> Result<Vec<AuditEntry>, StoreError> {
        self.engine.store().audit(before, limit).await
    }

    async fn resolve(
        &self,
        id: RecordId,
        resolution: Resolution,
        mode: Mode,
        reason: &str,
    ) -> Result<StateName, ResolveError> {
        let reason = audit_text(reason).map_err(ResolveError::Reason)?.to_owned();
        let (actor, retention) = (self.actor.clone(), self.retention);
        let (force, amend) = (mode == Mode::ByForce, mode == Mode::Amend);
        let command = Resolve { resolution, retention, force, amend, actor, reason };
        match self.engine.resolve(id, command).await.map_err(ResolveError::Store)? {
            Outcome::Resolved { from } => Ok(from),
            Outcome::NotResolvable { state: Some(state) } if mode != Mode::Amend => {
                let record = self.look_up(id).await.map_err(ResolveError::Store)?;
                let is_settled = matches!(state, StateName::Completed | StateName::Tombstone);
                let by_operator = record.is_some_and(|record| record.by_operator);
                Err(if is_settled && by_operator {
                    ResolveError::NeedsAmendment(state)
                } else {
                    ResolveError::NotResolvable(state)
                })
            }
            Outcome::NotResolvable { state: Some(state) } => Err(ResolveError::NotResolvable(state)),
            Outcome::NotResolvable { state: None } => Err(ResolveError::NoRecord),
            other => {
                let what = format!("the store answered {other:?} to a resolution");
                Err(ResolveError::Store(StoreError::invalid(what)))
            }
        }
    }
}
