//! The servers that the benchmarks are run against.
//!
//! ```text
//! oncegate-benches bare PORT              an axum echo with nothing around it
//! oncegate-benches memory PORT            the same, with the layer on the memory store
//! oncegate-benches embedded PORT DIR      the same, with the layer on the durable store
//! oncegate-benches record-size            octets of memory that a record takes beyond its response
//! oncegate-benches touch GIB              writes to so much memory once, and ends
//! ```

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::http::header::CONTENT_TYPE;
use axum::routing::post;
use oncegate_core::{
    AttemptId, CallerTag, Claim, Command, Complete, Completion, Fingerprint, Label, MemoryStore, OnAbandoned,
    Outcome, RecordId, Store, StoredResponse,
};
use oncegate_embedded::{EmbeddedOptions, EmbeddedStore, SystemClock};
use oncegate_engine::Engine;
use oncegate_http::IdempotencyLayer;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let service = Router::new().route("/pay", post(pay));
    match arguments[..] {
        ["bare", port] => serve(service, port).await,
        ["memory", port] => serve(service.layer(layer(memory())), port).await,
        ["embedded", port, directory] => {
            let store = EmbeddedStore::open(EmbeddedOptions::new(directory))?;
            serve(service.layer(layer(Arc::new(store))), port).await
        }
        ["record-size"] => record_size().await,
        ["touch", gibibytes] => {
            std::hint::black_box(vec![1_u8; gibibytes.parse::<usize>()? << 30]);
            Ok(())
        }
        _ => {
            Err("usage: oncegate-benches bare|memory PORT | embedded PORT DIR | record-size | touch GIB"
                .into())
        }
    }
}

/// Answers with what it got, so that the answer is as large as the request.
async fn pay(body: Bytes) -> ([(axum::http::HeaderName, &'static str); 1], Bytes) {
    ([(CONTENT_TYPE, "application/json")], body)
}

fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new(SystemClock::new()))
}

fn layer(store: Arc<dyn Store>) -> IdempotencyLayer {
    IdempotencyLayer::new(Engine::new(store))
}

async fn serve(service: Router, port: &str) -> Result<(), Box<dyn Error>> {
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port.parse()?)).await?;
    println!("listening on {}", listener.local_addr()?);
    Ok(axum::serve(listener, service).await?)
}

/// Fills a memory store with completed records and reads from the system how much memory that took.
async fn record_size() -> Result<(), Box<dyn Error>> {
    const RECORDS: u64 = 500_000;
    let store = memory();
    let response = [Bytes::from(vec![b'x'; 1024])];
    let retention = Duration::from_secs(86_400);
    let before = resident()?;
    for number in 0..RECORDS {
        // As scattered as digests are.
        let mut id = [0; 32];
        for (at, byte) in id.iter_mut().enumerate() {
            *byte = (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (at % 8 * 8)) as u8 ^ at as u8;
        }
        let id = RecordId::from_bytes(id);
        let claim = Claim {
            attempt: AttemptId::new(u128::from(number)),
            fingerprint: Fingerprint::of_parts("size", &[&number.to_be_bytes()]),
            lease: Duration::from_secs(30),
            retention,
            on_abandoned: OnAbandoned::Park,
            label: Label::new(CallerTag::default(), "POST /v1/payments"),
        };
        let Outcome::Execute(grant) = store.apply(id, Command::Claim(claim)).await? else {
            return Err("two records met".into());
        };
        let answer = StoredResponse::new(201, &[("content-type", b"application/json")], &response, &[])?;
        let completion = Completion::Replayable(answer);
        store.apply(id, Command::Complete(Complete { token: grant.token, completion, retention })).await?;
    }
    let per_record = (resident()? - before) / RECORDS;
    println!("{{\"record_octets\":{per_record},\"beyond_response\":{}}}", per_record - 1024);
    Ok(())
}

fn resident() -> Result<u64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).ok_or("no VmRSS")?;
    let kibibytes: u64 = line.split_whitespace().nth(1).ok_or("no figure")?.parse()?;
    Ok(kibibytes * 1024)
}
