//! The service that is put behind everything that is measured. `benches/peers` has the same one in other languages, and
//! one more crate that takes this file.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderName, StatusCode};
use axum::response::IntoResponse;
use axum::routing::{get, post};

/// `/pay` is for the load; what the others are for is told at `behaviour` in `xtask/src/bench`.
pub(crate) fn service() -> Router {
    let executions = Arc::new(AtomicU64::new(0));
    let failed = Arc::new(Mutex::new(HashSet::new()));
    let (working, failing, told) = (executions.clone(), executions.clone(), executions);
    let count = |executions: &AtomicU64| executions.fetch_add(1, Ordering::SeqCst) + 1;
    let work = move || async move {
        let execution = count(&working);
        tokio::time::sleep(Duration::from_millis(100)).await;
        (StatusCode::CREATED, json(format!(r#"{{"execution":{execution}}}"#)))
    };
    let fail = move |header: HeaderMap| async move {
        let execution = count(&failing);
        let key = header.get("idempotency-key").cloned();
        if failed.lock().is_ok_and(|mut failed| failed.insert(key)) {
            return (StatusCode::INTERNAL_SERVER_ERROR, json(r#"{"error":"failed"}"#.to_owned()));
        }
        (StatusCode::CREATED, json(format!(r#"{{"execution":{execution}}}"#)))
    };
    Router::new()
        .route("/pay", post(pay))
        .route("/pay/{number}", post(pay))
        .route("/work", post(work))
        // What a collector of traces and metrics answers.
        .route("/v1/traces", post(async || ()))
        .route("/v1/metrics", post(async || ()))
        .route("/fail", post(fail))
        .route("/executions", get(move || async move { json(told.load(Ordering::SeqCst).to_string()) }))
}

/// Answers with what it got, so that the response is as large as the request.
async fn pay(body: Bytes) -> ([(HeaderName, &'static str); 1], Bytes) {
    ([(CONTENT_TYPE, "application/json")], body)
}

fn json(text: String) -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/json")], text)
}
