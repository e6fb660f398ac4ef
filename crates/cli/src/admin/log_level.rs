//! `/v1/log-level`: the level of the log, which an operator may change for a time.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::response::{IntoResponse, Response};
use oncegate_core::Timestamp;
use serde::Deserialize;
use serde_json::json;

use super::problem::Problem;
use super::view::time;
use crate::config::{duration, duration_text};
use crate::log::{self, CurrentLevel, OPERATOR};

/// The time for which a level holds if the request names none.
const DEFAULT: Duration = Duration::from_secs(600);

/// The longest time: a forgotten level must not fill a disk for ever.
const MAX: Duration = Duration::from_secs(24 * 3600);

/// The shortest time.
const MIN: Duration = Duration::from_secs(1);

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
    let until = SystemTime::now() + lasts;
    tracing::warn!(
        target: OPERATOR,
        filter = change.level,
        lasts = duration_text(lasts),
        "an operator changes the level of the log"
    );
    let level = log::set_level(Some((&change.level, until)));
    let level = level.map_err(|error| Problem::bad_request(format!("level: {error}")))?.ok_or_else(no_log)?;
    let number = level.change;
    tokio::spawn(async move {
        tokio::time::sleep(lasts).await;
        log::end_level(number);
    });
    Ok(shown(&level))
}

/// Falls back at once.
pub(super) async fn reset() -> Result<Response, Problem> {
    let level = log::set_level(None).map_err(Problem::internal)?.ok_or_else(no_log)?;
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
