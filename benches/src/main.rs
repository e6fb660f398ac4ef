//! The servers and clients that the benchmarks need, and what they measure inside a process.
//!
//! ```text
//! oncegate-benches bare PORT              an axum echo with nothing around it
//! oncegate-benches busy PORT NANOSECONDS  the same, with so much computing before each response
//! oncegate-benches memory PORT            the same, with the layer on the memory store
//! oncegate-benches embedded PORT DIR      the same, with the layer on the durable store
//! oncegate-benches record-size            bytes of memory that a record takes beyond its response
//! oncegate-benches touch GIB              writes to so much memory once, and ends
//! oncegate-benches fill DIR RECORDS       makes an embedded store with so many records
//! oncegate-benches memory-of DIR RECORDS  what memory a process takes with that store
//! oncegate-benches purge-latency DIR RECORDS          latency of an embedded store while so many records are purged
//! oncegate-benches growth DIR RECORDS DIR RECORDS     cost of a small and a large embedded store
//! oncegate-benches growth-memory RECORDS RECORDS      the same for memory stores
//! oncegate-benches functions              a wrapped function on the memory store, against calling it bare
//! oncegate-benches redis                  the store on Redis against two bare scripts
//! oncegate-benches postgres               the store on PostgreSQL, batched against single rows
//! oncegate-benches client                 a successful call through the client, against the bare HTTP client below it
//! oncegate-benches journal DIR            a successful call with a journal there, against one without
//! oncegate-benches inbox                  messages into PostgreSQL, against the same consumer without an inbox
//! oncegate-benches transact               a business row in one transaction with its record, against a bare unique key
//! oncegate-benches growth-postgres RECORDS RECORDS    cost of a small and a large table
//! oncegate-benches hold ADDRESS COUNT     keeps so many idle connections until its standard input ends
//! ```

mod caller;
mod functions;
mod growth;
mod idle;
mod inbox;
mod journal;
mod records;
mod service;
mod shared;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::Request;
use oncegate_core::{MemoryStore, Store, SystemClock};
use oncegate_embedded::{EmbeddedOptions, EmbeddedStore};
use oncegate_engine::Engine;
use oncegate_http::IdempotencyLayer;

use crate::records::{Result, claim, complete, resident};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let service = service::service();
    match arguments[..] {
        ["bare", port] => serve(service, port).await,
        ["busy", port, nanoseconds] => serve(busy(service, nanoseconds.parse()?), port).await,
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
        ["fill", directory, records] => growth::fill(Path::new(directory), records.parse()?).await,
        ["memory-of", directory, records] => growth::memory_of(Path::new(directory), records.parse()?).await,
        ["purge-latency", directory, records] => {
            growth::purge_latency(Path::new(directory), records.parse()?).await
        }
        ["growth", small, few, large, many] => {
            growth::embedded((Path::new(small), few.parse()?), (Path::new(large), many.parse()?)).await
        }
        ["growth-memory", few, many] => growth::memory(few.parse()?, many.parse()?).await,
        // Where services run, too.
        ["functions"] => tokio::spawn(functions::functions()).await?,
        ["redis"] => shared::on_redis().await,
        ["postgres"] => shared::on_postgres().await,
        ["client"] => caller::measure().await,
        ["journal", directory] => journal::measure(Path::new(directory)).await,
        ["inbox"] => inbox::measure().await,
        ["transact"] => shared::same_transaction().await,
        ["growth-postgres", few, many] => shared::growth_on_postgres(few.parse()?, many.parse()?).await,
        ["hold", server, count] => idle::hold(server.parse()?, count.parse()?).await,
        _ => Err("usage: see the top of benches/src/main.rs".into()),
    }
}

fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new(SystemClock::new()))
}

/// A service that computes for a time before each request: what a layer that does as much would cost, whatever it does.
fn busy(service: Router, nanoseconds: u64) -> Router {
    service.layer(axum::middleware::map_request(move |request: Request| {
        let end = Instant::now() + Duration::from_nanos(nanoseconds);
        while Instant::now() < end {
            std::hint::spin_loop();
        }
        std::future::ready(request)
    }))
}

fn layer(store: Arc<dyn Store>) -> IdempotencyLayer {
    IdempotencyLayer::new(Engine::new(store))
}

async fn serve(service: Router, port: &str) -> Result<()> {
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port.parse()?)).await?;
    println!("listening on {}", listener.local_addr()?);
    Ok(axum::serve(listener, service).await?)
}

/// Fills memory stores with completed records and reads from the system how much memory that took: for one record, and of a
/// store that counts its records' memory until it is full.
async fn record_size() -> Result<()> {
    const RECORDS: u64 = 500_000;
    // All stores are kept, so that none is filled with the memory of another one.
    let mut stores = vec![MemoryStore::new(SystemClock::new())];
    let (records, bytes) = fill_memory(&stores[0], RECORDS, 1024).await?;
    let per_record = bytes / records;
    println!("{{\"record_bytes\":{per_record},\"beyond_response\":{}}}", per_record - 1024);
    const LIMIT: u64 = 256 << 20;
    for body in [60, 1024, 16 * 1024] {
        let store = MemoryStore::new(SystemClock::new()).with_max_record_bytes(LIMIT);
        let (records, bytes) = fill_memory(&store, u64::MAX, body).await?;
        stores.push(store);
        let of_limit = bytes as f64 / LIMIT as f64;
        println!(
            "{{\"body\":{body},\"limit\":{LIMIT},\"records\":{records},\"resident_of_limit\":{of_limit:.2}}}"
        );
    }
    Ok(())
}

/// Adds completed records until the store is full. Returns their number, and the memory that they took.
async fn fill_memory(store: &dyn Store, max_records: u64, body: usize) -> Result<(u64, u64)> {
    let body = vec![b'x'; body];
    let retention = Duration::from_secs(86_400);
    let before = resident("VmRSS")?;
    let mut records = 0;
    while records < max_records
        && let Ok(token) = claim(store, records, retention).await
    {
        complete(store, records, token, &Bytes::from(body.clone()), retention).await?;
        records += 1;
    }
    Ok((records, resident("VmRSS")? - before))
}
