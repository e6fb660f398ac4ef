//! A small service that remembers keys, and the same with one fault planted.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::net::TcpListener;

/// A deviation from the correct service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Fault {
    /// No deviation.
    None,
    /// Keys are ignored.
    NoKeys,
    /// The key is remembered after the operation, and not claimed before it.
    NoLock,
    /// Other requests under the key get the response of the first one.
    NoFingerprint,
    /// Other requests are refused after they were executed.
    ExecutesThenRefuses,
    /// Other requests are refused with 409.
    ConflictForOtherBody,
    /// All callers share their keys.
    CrossCaller,
    /// A key that another caller has used is refused.
    KeyVisibleToOthers,
    /// Server errors free the key.
    Releases5xx,
    /// Server errors free the key although the operation had its effect.
    Releases5xxAfterEffect,
    /// All 4xx responses free the key.
    Releases4xx,
    /// Replays have no `Location`.
    HeadersLost,
    /// Replays are not marked.
    Unmarked,
    /// Each response is marked as a replay.
    MarksEverything,
    /// Replays set the cookie of the first response again.
    CookieReplayed,
    /// Replays are executed, and marked.
    LyingMarker,
    /// A replay has the status 200 instead of 201.
    OtherStatusOnReplay,
    /// Keys are in memory, and lost by a restart.
    LostOnRestart,
    /// Keys are forgotten after a short time.
    Forgets,
    /// The handler ends with the connection, and frees the key.
    ReleasedOnHangUp,
    /// The handler ends with the connection, and the key stays claimed for ever.
    StuckOnHangUp,
    /// An invalid key is ignored.
    IgnoresInvalidKeys,
    /// Of two keys, the first one counts.
    TakesFirstKey,
    /// Quotes are a part of the key.
    QuotesBelongToKey,
    /// A request without a key is executed although keys are required.
    ExecutesWithoutKey,
    /// Duplicates are refused without `Retry-After`.
    NoRetryAfter,
    /// `Retry-After` is a word.
    MalformedRetryAfter,
    /// Duplicates of a running request get a server error.
    ErrorForDuplicates,
}

/// The time that the operation takes.
const WORK: Duration = Duration::from_millis(120);

#[derive(Clone)]
struct Stored {
    status: u16,
    body: Value,
}

#[derive(Clone)]
struct Entry {
    body: Bytes,
    caller: String,
    stored: Option<Stored>,
}

/// The service.
pub(crate) struct Service {
    fault: Fault,
    entries: Mutex<HashMap<String, Entry>>,
    effects: Mutex<HashMap<String, u64>>,
    numbers: AtomicU64,
    pub(crate) requests: AtomicU32,
}

impl Service {
    /// Starts the service on a free port.
    pub(crate) async fn start(fault: Fault) -> (SocketAddr, Arc<Self>) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = Self::new(fault);
        let router = Self::router(Arc::clone(&service));
        tokio::spawn(async move { axum::serve(listener, router).await });
        (address, service)
    }

    pub(crate) fn new(fault: Fault) -> Arc<Self> {
        Arc::new(Self {
            fault,
            entries: Mutex::default(),
            effects: Mutex::default(),
            numbers: AtomicU64::new(1),
            requests: AtomicU32::new(0),
        })
    }

    pub(crate) fn router(service: Arc<Self>) -> Router {
        Router::new().route("/orders", post(order)).route("/count", get(count)).with_state(service)
    }

    /// Does what a restart does to the memory of the service.
    pub(crate) fn restart(&self) {
        if self.fault == Fault::LostOnRestart {
            self.entries.lock().unwrap().clear();
        }
    }

    /// The references with effects, and the most effects that one of them has.
    pub(crate) fn effects(&self) -> (usize, u64) {
        let effects = self.effects.lock().unwrap();
        (effects.len(), effects.values().copied().max().unwrap_or(0))
    }

    fn take_effect(&self, body: &Value) -> u64 {
        let reference = body["reference"].as_str().unwrap_or_default().to_owned();
        *self.effects.lock().unwrap().entry(reference).or_default() += 1;
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// The operation. The effect comes first, so that an interruption cannot prevent it.
    async fn work(&self, headers: &HeaderMap, body: &Bytes) -> Stored {
        let body: Value = serde_json::from_slice(body).unwrap_or_default();
        let fail = headers.get("x-fail").map(|value| value.to_str().unwrap().parse().unwrap());
        let is_effective = fail.is_none() || self.fault == Fault::Releases5xxAfterEffect;
        if body["amount"] == 0 {
            return Stored { status: 400, body: json!({"error": "the amount is 0"}) };
        }
        let number = if is_effective { self.take_effect(&body) } else { 0 };
        tokio::time::sleep(WORK).await;
        match fail {
            Some(status) => Stored { status, body: json!({"error": "failed"}) },
            None => Stored { status: 201, body: json!({"id": number, "amount": body["amount"]}) },
        }
    }

    fn respond(&self, stored: &Stored, is_replay: bool) -> Response {
        let status = if is_replay && self.fault == Fault::OtherStatusOnReplay { 200 } else { stored.status };
        let mut response = (StatusCode::from_u16(status).unwrap(), Json(stored.body.clone())).into_response();
        let headers = response.headers_mut();
        if !(is_replay && self.fault == Fault::HeadersLost) {
            headers.insert("location", format!("/orders/{}", stored.body["id"]).parse().unwrap());
        }
        if is_replay && self.fault != Fault::Unmarked || self.fault == Fault::MarksEverything {
            headers.insert("idempotent-replayed", "true".parse().unwrap());
        }
        if !is_replay || self.fault == Fault::CookieReplayed {
            headers.insert("set-cookie", format!("session={}", stored.body["id"]).parse().unwrap());
        }
        response
    }

    fn frees(&self, status: u16) -> bool {
        match self.fault {
            Fault::Releases5xx | Fault::Releases5xxAfterEffect => status >= 500 || status == 429,
            Fault::Releases4xx => (400..500).contains(&status),
            _ => status == 429,
        }
    }

    fn finish(&self, id: &str, stored: &Stored) {
        let mut entries = self.entries.lock().unwrap();
        if self.frees(stored.status) {
            entries.remove(id);
        } else if let Some(entry) = entries.get_mut(id) {
            entry.stored = Some(stored.clone());
        }
    }
}

/// Frees the key if the handler is dropped.
struct Release<'a>(Option<(&'a Service, &'a str)>);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        if let Some((service, id)) = self.0 {
            service.entries.lock().unwrap().remove(id);
        }
    }
}

fn refuse(status: u16) -> Response {
    (StatusCode::from_u16(status).unwrap(), Json(json!({"error": "refused"}))).into_response()
}

/// The key; `Err` if it is invalid.
fn key(headers: &HeaderMap, fault: Fault) -> Result<Option<String>, ()> {
    let lines: Vec<_> = headers.get_all("idempotency-key").iter().collect();
    let line = match lines.as_slice() {
        [] => return Ok(None),
        [line] => line,
        [line, ..] if fault == Fault::TakesFirstKey => line,
        _ => return Err(()),
    };
    let text = line.to_str().map_err(|_| ())?;
    let inner = match text.strip_prefix('"') {
        Some(rest) => rest.strip_suffix('"').filter(|inner| !inner.contains('"')).ok_or(())?,
        None => text,
    };
    if inner.is_empty() || inner.len() > 255 || inner.contains([',', '"']) {
        return Err(());
    }
    Ok(Some(if fault == Fault::QuotesBelongToKey { text } else { inner }.to_owned()))
}

async fn order(State(service): State<Arc<Service>>, headers: HeaderMap, body: Bytes) -> Response {
    service.requests.fetch_add(1, Ordering::Relaxed);
    let fault = service.fault;
    let caller =
        headers.get("authorization").map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default();
    let key = match key(&headers, fault) {
        Ok(Some(key)) if fault != Fault::NoKeys => key,
        Ok(None) if fault != Fault::ExecutesWithoutKey && fault != Fault::NoKeys => return refuse(400),
        Err(()) if fault != Fault::IgnoresInvalidKeys && fault != Fault::NoKeys => return refuse(400),
        _ => return service.respond(&service.work(&headers, &body).await, false),
    };
    let is_shared = matches!(fault, Fault::CrossCaller | Fault::KeyVisibleToOthers);
    let id = if is_shared { key } else { format!("{caller}\n{key}") };
    let known = {
        let mut entries = service.entries.lock().unwrap();
        let known = entries.get(&id).cloned();
        if known.is_none() && fault != Fault::NoLock {
            entries.insert(id.clone(), Entry { body: body.clone(), caller: caller.clone(), stored: None });
        }
        known
    };
    if let Some(entry) = known {
        return duplicate(&service, &headers, &caller, &body, entry).await;
    }
    if matches!(fault, Fault::ReleasedOnHangUp | Fault::StuckOnHangUp) {
        let mut release = Release((fault == Fault::ReleasedOnHangUp).then_some((&service, &id)));
        let stored = service.work(&headers, &body).await;
        release.0 = None;
        service.finish(&id, &stored);
        return service.respond(&stored, false);
    }
    // A task of its own runs to its end if the client hangs up.
    let task = tokio::spawn(async move {
        let stored = service.work(&headers, &body).await;
        if fault == Fault::NoLock {
            let entry = Entry { body, caller: String::new(), stored: None };
            service.entries.lock().unwrap().insert(id.clone(), entry);
        }
        service.finish(&id, &stored);
        if fault == Fault::Forgets {
            let service = Arc::clone(&service);
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_secs(3)).await;
                service.entries.lock().unwrap().remove(&id);
            });
        }
        service.respond(&stored, false)
    });
    task.await.unwrap()
}

async fn duplicate(
    service: &Service,
    headers: &HeaderMap,
    caller: &str,
    body: &Bytes,
    entry: Entry,
) -> Response {
    let fault = service.fault;
    if fault == Fault::KeyVisibleToOthers && entry.caller != caller {
        return refuse(422);
    }
    if entry.body != body {
        match fault {
            Fault::NoFingerprint => {}
            Fault::ConflictForOtherBody => return refuse(409),
            Fault::ExecutesThenRefuses => {
                service.work(headers, body).await;
                return refuse(422);
            }
            _ => return refuse(422),
        }
    }
    match entry.stored {
        Some(_) if fault == Fault::LyingMarker => service.respond(&service.work(headers, body).await, true),
        Some(stored) => service.respond(&stored, true),
        None if fault == Fault::ErrorForDuplicates => refuse(500),
        None => {
            let mut response = refuse(409);
            match fault {
                Fault::NoRetryAfter => {}
                Fault::MalformedRetryAfter => {
                    drop(response.headers_mut().insert("retry-after", "soon".parse().unwrap()))
                }
                _ => drop(response.headers_mut().insert("retry-after", "1".parse().unwrap())),
            }
            response
        }
    }
}

/// The number of effects of a reference.
async fn count(State(service): State<Arc<Service>>, uri: Uri) -> Json<Value> {
    service.requests.fetch_add(1, Ordering::Relaxed);
    let reference = uri.query().and_then(|query| query.strip_prefix("reference=")).unwrap_or_default();
    let total = service.effects.lock().unwrap().get(reference).copied().unwrap_or(0);
    Json(json!({ "total": total }))
}
