//! The calls of a relay to the database.
//!
//! A *line* is the queue of one topic and order key. A message without an order key is a line of its own.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::StoreError;
use oncegate_inbox::Outgoing;
use oncegate_postgres::sqlx::postgres::{PgConnection, PgPool, PgRow};
use oncegate_postgres::sqlx::{self, Error, Row as _};
use tokio::time::Instant;

use crate::receipts::{alone, refused};

/// The timeout of a call. After a timeout it is unknown whether the call was carried out, and it need not be known.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(15);

/// A message of the outbox.
#[derive(Debug)]
pub(crate) struct OutboxRow {
    pub(crate) seq: i64,
    pub(crate) message: Outgoing,
    /// The number of failed attempts.
    pub(crate) attempts: u32,
}

impl OutboxRow {
    /// The approximate size of the message.
    pub(crate) fn bytes(&self) -> usize {
        let headers = self.message.headers.iter().map(|(name, value)| name.len() + value.len());
        self.message.payload.len() + headers.sum::<usize>()
    }
}

/// Consecutive rows of one line under one lease.
pub(crate) struct LineRun {
    pub(crate) token: i64,
    pub(crate) line: i64,
    pub(crate) first: i64,
    pub(crate) rows: Vec<OutboxRow>,
}

/// The end of a lease by this process's clock.
///
/// It is counted from before the call, so it is never later than the end by the database's clock.
pub(crate) struct Lease(Mutex<Instant>);

impl Lease {
    pub(crate) fn new(until: Instant) -> Self {
        Self(Mutex::new(until))
    }

    pub(crate) fn is_over(&self) -> bool {
        Instant::now() >= *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set(&self, until: Instant) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = until;
    }
}

/// The outcome of a row.
pub(crate) enum RowOutcome {
    Confirmed,
    Retry(Duration, String),
    Refused(String),
    /// Refused, and the rows behind it go on.
    SetAside(String),
}

/// A finished run and the outcomes of its rows.
pub(crate) struct FinishedRun {
    pub(crate) token: i64,
    pub(crate) line: i64,
    pub(crate) first: i64,
    pub(crate) outcomes: Vec<(i64, RowOutcome)>,
}

/// The runs that a call returned.
pub(crate) struct TakenRuns {
    pub(crate) runs: Vec<LineRun>,
    /// The position at which the next call goes on; `None` at the end.
    pub(crate) next: Option<i64>,
}

/// The limits of one call.
pub(crate) struct TakeLimits {
    pub(crate) rows: usize,
    pub(crate) bytes: usize,
    pub(crate) run: usize,
}

/// The outbox of a database.
pub(crate) struct OutboxTable {
    pub(crate) pool: PgPool,
    pub(crate) transaction_pooler: bool,
    pub(crate) lease: Duration,
}

impl OutboxTable {
    /// Takes runs of lines that no relay holds.
    pub(crate) async fn take(
        &self,
        after: Option<i64>,
        limits: &TakeLimits,
        call_timeout: Duration,
        lease: Duration,
    ) -> Result<TakenRuns, StoreError> {
        let call = async |connection: &mut PgConnection| {
            sqlx::query("SELECT * FROM oncegate.outbox_take($1, $2, $3, $4, $5)")
                .persistent(!self.transaction_pooler)
                .bind(after)
                .bind(i32::try_from(limits.rows).unwrap_or(i32::MAX))
                .bind(i64::try_from(limits.bytes).unwrap_or(i64::MAX))
                .bind(i32::try_from(limits.run).unwrap_or(i32::MAX))
                .bind(millis(lease))
                .fetch_all(connection)
                .await
        };
        let rows = alone(&self.pool, call_timeout, self.transaction_pooler, call).await?;
        taken(&rows).map_err(refused)
    }

    /// Renews the leases of runs, given as token, line and first row. Returns the lines that are still held.
    pub(crate) async fn renew(&self, runs: &[(i64, i64, i64)]) -> Result<Vec<i64>, StoreError> {
        let (tokens, lines, firsts) = split(runs.iter().copied());
        self.call(async |connection: &mut PgConnection| {
            sqlx::query_scalar("SELECT oncegate.outbox_renew($1, $2, $3, $4)")
                .persistent(!self.transaction_pooler)
                .bind(&tokens)
                .bind(&lines)
                .bind(&firsts)
                .bind(millis(self.lease))
                .fetch_all(connection)
                .await
        })
        .await
    }

    /// Writes the outcomes of runs, and returns the lines that were held. Other lines are not changed.
    pub(crate) async fn settle(&self, ended: &[FinishedRun]) -> Result<Vec<i64>, StoreError> {
        let (tokens, lines, firsts) = split(ended.iter().map(|run| (run.token, run.line, run.first)));
        let (mut row_lines, mut seqs, mut outcomes) = (Vec::new(), Vec::new(), Vec::new());
        let (mut delays, mut errors) = (Vec::new(), Vec::new());
        for run in ended {
            for (seq, outcome) in &run.outcomes {
                let (word, delay, error) = match outcome {
                    RowOutcome::Confirmed => ("confirmed", Duration::ZERO, ""),
                    RowOutcome::Retry(delay, error) => ("retry", *delay, &**error),
                    RowOutcome::Refused(error) => ("refused", Duration::ZERO, &**error),
                    RowOutcome::SetAside(error) => ("aside", Duration::ZERO, &**error),
                };
                row_lines.push(run.line);
                seqs.push(*seq);
                outcomes.push(word);
                delays.push(millis(delay));
                errors.push(error);
            }
        }
        self.call(async |connection: &mut PgConnection| {
            sqlx::query_scalar("SELECT oncegate.outbox_settle($1, $2, $3, $4, $5, $6, $7, $8)")
                .persistent(!self.transaction_pooler)
                .bind(&tokens)
                .bind(&lines)
                .bind(&firsts)
                .bind(&row_lines)
                .bind(&seqs)
                .bind(&outcomes)
                .bind(&delays)
                .bind(&errors)
                .fetch_all(connection)
                .await
        })
        .await
    }

    async fn call<T>(
        &self,
        call: impl AsyncFnOnce(&mut PgConnection) -> Result<T, Error>,
    ) -> Result<T, StoreError> {
        alone(&self.pool, CALL_TIMEOUT, self.transaction_pooler, call).await
    }
}

fn taken(rows: &[PgRow]) -> Result<TakenRuns, Error> {
    let mut taken = TakenRuns { runs: Vec::new(), next: None };
    for row in rows {
        let line = row.try_get("line")?;
        let Some(seq) = row.try_get("seq")? else {
            taken.next = Some(line);
            continue;
        };
        let waiting = waiting(seq, row)?;
        match taken.runs.last_mut().filter(|run| run.line == line) {
            Some(run) => run.rows.push(waiting),
            None => {
                let token = row.try_get("token")?;
                taken.runs.push(LineRun { token, line, first: seq, rows: vec![waiting] });
            }
        }
    }
    Ok(taken)
}

fn waiting(seq: i64, row: &PgRow) -> Result<OutboxRow, Error> {
    let names: Vec<String> = row.try_get("header_names")?;
    let values: Vec<Vec<u8>> = row.try_get("header_values")?;
    let mut message = Outgoing::new(
        row.try_get::<String, _>("id")?,
        row.try_get::<String, _>("topic")?,
        row.try_get::<Vec<u8>, _>("payload")?,
    );
    message.order_key = row.try_get::<Option<Vec<u8>>, _>("order_key")?.map(Bytes::from);
    message.headers = names.into_iter().zip(values.into_iter().map(Bytes::from)).collect();
    Ok(OutboxRow { seq, message, attempts: row.try_get::<i32, _>("attempts")?.unsigned_abs() })
}

fn split(runs: impl Iterator<Item = (i64, i64, i64)>) -> (Vec<i64>, Vec<i64>, Vec<i64>) {
    let mut all = (Vec::new(), Vec::new(), Vec::new());
    for (token, line, first) in runs {
        all.0.push(token);
        all.1.push(line);
        all.2.push(first);
    }
    all
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
