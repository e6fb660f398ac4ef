//! A payments service with the layer inside: `POST /payments` charges once per key, over crashes and restarts.
//!
//! Configuration by environment: `PORT` (0 takes a free one), `DATA` (a directory, default `./payments-data`).

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use oncegate::{EmbeddedOptions, EmbeddedStore, Engine, IdempotencyContext, IdempotencyLayer, Settings};
use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
struct Payment {
    customer: String,
    cents: u64,
}

#[derive(Serialize)]
struct Charge {
    id: u64,
    customer: String,
    cents: u64,
    /// The key that the card network was called with: the same for every attempt at this payment.
    network_key: String,
    /// The attempt that charged.
    attempt: u32,
}

/// The charges, one line of JSON each, on disk before the response.
struct Ledger {
    path: PathBuf,
    file: Mutex<File>,
}

impl Ledger {
    fn open(path: PathBuf) -> std::io::Result<Self> {
        let file = Mutex::new(OpenOptions::new().create(true).append(true).open(&path)?);
        Ok(Self { path, file })
    }

    fn add(&self, charge: impl FnOnce(u64) -> Charge) -> std::io::Result<Charge> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let charge = charge(count(&self.path)? + 1);
        let mut line = serde_json::to_vec(&charge)?;
        line.push(b'\n');
        file.write_all(&line)?;
        file.sync_data()?;
        Ok(charge)
    }
}

fn count(path: &Path) -> std::io::Result<u64> {
    Ok(std::fs::read(path)?.iter().filter(|byte| **byte == b'\n').count() as u64)
}

async fn pay(
    State(ledger): State<Arc<Ledger>>,
    context: IdempotencyContext,
    Json(payment): Json<Payment>,
) -> Result<(StatusCode, Json<Charge>), StatusCode> {
    if payment.cents == 0 {
        return Err(StatusCode::UNPROCESSABLE_ENTITY);
    }
    let attempt = context.attempt();
    let charge = ledger.add(|id| Charge {
        id,
        customer: payment.customer,
        cents: payment.cents,
        network_key: attempt.downstream_key("card-network"),
        attempt: attempt.number(),
    });
    charge.map(|charge| (StatusCode::CREATED, Json(charge))).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
}

async fn charges(State(ledger): State<Arc<Ledger>>) -> Result<Json<serde_json::Value>, StatusCode> {
    let charges = count(&ledger.path).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok(Json(serde_json::json!({ "charges": charges })))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let data = PathBuf::from(std::env::var_os("DATA").unwrap_or_else(|| "payments-data".into()));
    let port: u16 = std::env::var("PORT").unwrap_or_else(|_| "3000".into()).parse()?;

    let engine = Engine::new(EmbeddedStore::open(EmbeddedOptions::new(data.join("records")))?);
    let layer =
        IdempotencyLayer::new(engine.clone()).with_settings(Settings::default().with_required_key(true))?;
    let ledger = Arc::new(Ledger::open(data.join("ledger.jsonl"))?);
    let service = Router::new()
        .route("/payments", post(pay))
        .layer(layer)
        .route("/charges", get(charges))
        .with_state(ledger);

    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, service)
        .with_graceful_shutdown(async { drop(tokio::signal::ctrl_c().await) })
        .await?;
    // Handlers whose clients have hung up are still running.
    engine.drain(std::time::Duration::from_secs(10)).await;
    Ok(())
}
