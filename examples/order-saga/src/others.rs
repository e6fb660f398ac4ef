//! The three that the shop calls. They honour `Idempotency-Key`, as a good API does, and fail when they are told to.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::{Path as UrlPath, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The address and the ledger of the service.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// 0 takes a free one.
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// One line of JSON for each effect.
    #[arg(long)]
    ledger: PathBuf,
}

/// The fate of the next call of an action.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Fault {
    /// Nothing takes effect, and nothing is ever answered.
    Hang,
    /// It takes effect, and nothing is ever answered.
    Lost,
    /// It takes effect, and the response is 500.
    Error,
    /// It takes effect, and the service dies before it answers.
    Die,
    /// It takes effect after two seconds.
    Slow,
}

/// Something that took place.
#[derive(Serialize, Deserialize)]
struct Effect {
    id: u64,
    key: String,
    action: String,
    about: Value,
}

/// The effects, on disk before the response. An effect and its key are one line, so that no crash can separate them.
struct Ledger {
    file: File,
    effects: Vec<Effect>,
}

impl Ledger {
    fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let text = std::fs::read_to_string(path)?;
        let effects = text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
        Ok(Self { file, effects })
    }

    /// The effect's number: of the one that this key had before, or of a new one. `None` where the key was used for something
    /// else.
    fn once(&mut self, key: &str, action: &str, about: Value) -> io::Result<Option<u64>> {
        if let Some(earlier) = self.effects.iter().find(|effect| effect.key == key) {
            let is_same = earlier.action == action && earlier.about == about;
            return Ok(is_same.then_some(earlier.id));
        }
        let id = self.effects.len() as u64 + 1;
        let effect = Effect { id, key: key.to_owned(), action: action.to_owned(), about };
        let mut line = serde_json::to_vec(&effect)?;
        line.push(b'\n');
        self.file.write_all(&line)?;
        self.file.sync_data()?;
        self.effects.push(effect);
        Ok(Some(id))
    }
}

struct Service {
    actions: &'static [&'static str],
    ledger: Mutex<Ledger>,
    faults: Mutex<Faults>,
}

#[derive(Default, Serialize)]
struct Faults {
    /// By action.
    armed: BTreeMap<String, Fault>,
    /// The actions that one happened to.
    caught: Vec<String>,
    /// The number of calls of each action since the service started.
    calls: BTreeMap<String, u64>,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The reason why an action is never done; `None` if it can be done.
fn refusal(action: &str, about: &Value) -> Option<&'static str> {
    let is = |member: &str, value| about[member] == value;
    match action {
        "reserve" if is("item", "unicorn") => Some("there are none"),
        "charge" if is("customer", "mallory") => Some("the card was declined"),
        "refund" if is("customer", "closed") => Some("the account is closed"),
        "ship" if is("address", "Atlantis") => Some("no carrier can go there"),
        _ => None,
    }
}

async fn act(
    State(service): State<Arc<Service>>,
    UrlPath(action): UrlPath<String>,
    headers: HeaderMap,
    Json(about): Json<Value>,
) -> Response {
    let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok());
    let Some(key) = key else {
        return refuse(StatusCode::BAD_REQUEST, "error", "Idempotency-Key is missing");
    };
    if !service.actions.contains(&action.as_str()) {
        return StatusCode::NOT_FOUND.into_response();
    }
    let fault = service.fault(&action);
    match fault {
        Some(Fault::Hang) => std::future::pending().await,
        Some(Fault::Slow) => {
            let key = key.to_owned();
            // It goes on when the caller has given up.
            let late = tokio::spawn(async move {
                tokio::time::sleep(Duration::from_secs(2)).await;
                service.answer(&key, &action, about)
            });
            return late.await.unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response());
        }
        _ => {}
    }
    let response = service.answer(key, &action, about);
    match fault {
        Some(Fault::Lost) => std::future::pending().await,
        Some(Fault::Error) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        Some(Fault::Die) => std::process::exit(1),
        _ => response,
    }
}

impl Service {
    fn answer(&self, key: &str, action: &str, about: Value) -> Response {
        if let Some(reason) = refusal(action, &about) {
            return refuse(StatusCode::UNPROCESSABLE_ENTITY, "refused", reason);
        }
        match lock(&self.ledger).once(key, action, about) {
            Ok(Some(id)) => (StatusCode::CREATED, Json(json!({ "id": id }))).into_response(),
            Ok(None) => refuse(StatusCode::BAD_REQUEST, "error", "the key was used for something else"),
            Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    }

    /// Takes the fault that was armed for this action.
    fn fault(&self, action: &str) -> Option<Fault> {
        let mut faults = lock(&self.faults);
        *faults.calls.entry(action.to_owned()).or_default() += 1;
        let fault = faults.armed.remove(action)?;
        faults.caught.push(action.to_owned());
        Some(fault)
    }
}

fn refuse(status: StatusCode, member: &str, reason: &str) -> Response {
    (status, Json(json!({ member: reason }))).into_response()
}

async fn arm(
    State(service): State<Arc<Service>>,
    UrlPath(action): UrlPath<String>,
    Json(fault): Json<Fault>,
) {
    lock(&service.faults).armed.insert(action, fault);
}

async fn faults(State(service): State<Arc<Service>>) -> Json<Value> {
    Json(json!(&*lock(&service.faults)))
}

async fn ledger(State(service): State<Arc<Service>>) -> Json<Value> {
    Json(json!(&lock(&service.ledger).effects))
}

/// Serves `POST /{action}`, `GET /ledger`, `PUT /faults/{action}` and `GET /faults`.
pub(crate) async fn serve(
    options: Options,
    name: &str,
    actions: &'static [&'static str],
) -> Result<(), Box<dyn Error>> {
    let file = options.ledger.display();
    let opened = Ledger::open(&options.ledger).map_err(|error| format!("{name}: {file}: {error}"))?;
    let service = Service { actions, ledger: Mutex::new(opened), faults: Mutex::default() };
    let router = Router::new()
        .route("/{action}", post(act))
        .route("/ledger", get(ledger))
        .route("/faults", get(faults))
        .route("/faults/{action}", put(arm))
        .with_state(Arc::new(service));
    crate::listen(options.port, router).await
}
