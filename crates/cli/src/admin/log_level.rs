//! `/v1/log-level`: the level of the log, which an operator may change for a time.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::response::{IntoResponse, Response};
use oncegate_core::Timestamp;
use serde::Deserialize;
use serde_json::json;
use tokio::task::AbortHandle;

use super::problem::Problem;
use super::view::time;
use crate::config::{duration, duration_text};
use crate::log::{self, CurrentLevel, OPERATOR};

/// The time for which a level holds if the request names none.
const DEFAULT: Duration = Duration::from_secs(600);

/// The longest time: a forgotten level must not fill a disk for ever.
const MAX: Duration = Duration::from_secs(24 * 3600);

/// The longest level, in bytes: a level for each of a hundred targets. The log has it in a line.
const MAX_LEVEL: usize = 4096;

/// The shortest time.
const MIN: Duration = Duration::from_secs(1);

/// The timer of the level that an operator set: one for the process, as its log has one level.
static TIMER: SharedTimer = SharedTimer(Mutex::new(Timer(None)));

struct SharedTimer(Mutex<Timer>);

/// A task that waits for the end of a change.
struct Timer(Option<AbortHandle>);

impl SharedTimer {
    fn lock(&self) -> MutexGuard<'_, Timer> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Timer {
    /// Calls `ended` after this time, instead of what the timer would have called.
    fn replace(&mut self, time: Duration, ended: impl FnOnce() + Send + 'static) {
        self.end();
        let task = tokio::spawn(async move {
            tokio::time::sleep(time).await;
            ended();
        });
        self.0 = Some(task.abort_handle());
    }

    fn end(&mut self) {
        if let Some(task) = self.0.take() {
            task.abort();
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Change {
    level: String,
    #[serde(rename = "for")]
    duration: Option<String>,
}

pub(super) async fn show() -> Result<Response, Problem> {
    log::level().map(|level| shown(&level)).ok_or_else(no_log)
}

/// Sets the level, and falls back after the time.
pub(super) async fn set(change: Result<Json<Change>, JsonRejection>) -> Result<Response, Problem> {
    let Json(change) = change.map_err(|error| Problem::bad_request(error.body_text()))?;
    let lasts = match &change.duration {
        None => DEFAULT,
        Some(text) => duration(text).map_err(|error| Problem::bad_request(format!("for: {error}")))?,
    };
    if !(MIN..=MAX).contains(&lasts) {
        let (min, max) = (duration_text(MIN), duration_text(MAX));
        let given = duration_text(lasts);
        return Err(Problem::bad_request(format!("for: {given} is not from {min} to {max}")));
    }
    if change.level.len() > MAX_LEVEL {
        return Err(Problem::bad_request(format!("level: it is longer than {MAX_LEVEL} bytes")));
    }
    log::check_level(&change.level).map_err(|error| Problem::bad_request(format!("level: {error}")))?;
    let until = SystemTime::now() + lasts;
    // Before the change, after which this line may be filtered out.
    tracing::warn!(
        target: OPERATOR,
        filter = change.level,
        lasts = duration_text(lasts),
        "an operator changes the level of the log"
    );
    // Under its lock, so that the timer is that of the last change.
    let mut timer = TIMER.lock();
    let level = log::set_level(Some((&change.level, until)));
    let level = level.map_err(|error| Problem::bad_request(format!("level: {error}")))?.ok_or_else(no_log)?;
    let number = level.change;
    timer.replace(lasts, move || log::end_level(number));
    Ok(shown(&level))
}

/// Falls back at once.
pub(super) async fn reset() -> Result<Response, Problem> {
    let mut timer = TIMER.lock();
    let level = log::set_level(None).map_err(Problem::internal)?.ok_or_else(no_log)?;
    timer.end();
    drop(timer);
    tracing::warn!(target: OPERATOR, filter = &*level.level, "an operator ended the change of the level of the log");
    Ok(shown(&level))
}

fn shown(level: &CurrentLevel) -> Response {
    let until = level.until.map(|until| {
        let since = until.duration_since(UNIX_EPOCH).unwrap_or_default();
        time(Timestamp::from_millis(u64::try_from(since.as_millis()).unwrap_or(u64::MAX)))
    });
    Json(json!({ "level": level.level, "configured": level.configured, "until": until })).into_response()
}

fn no_log() -> Problem {
    Problem::internal("This program has no log.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn many_changes_have_one_timer() {
        let mut timer = Timer(None);
        let (calls, mut called) = tokio::sync::mpsc::unbounded_channel();
        for number in 0..1000 {
            let calls = calls.clone();
            timer.replace(MAX, move || assert!(calls.send(number).is_ok()));
        }
        let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
        while tasks() > 1 {
            tokio::task::yield_now().await;
        }
        assert_eq!(called.recv().await, Some(999));
        assert!(called.try_recv().is_err());
        timer.replace(MAX, move || assert!(calls.send(1000).is_ok()));
        timer.end();
        assert_eq!(called.recv().await, None);
    }
}
