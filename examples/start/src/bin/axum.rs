//! An axum service: `POST /payments` charges once for each key.

use axum::{Router, routing::post};
use oncegate::{EmbeddedStore, Engine, IdempotencyContext, IdempotencyLayer};

async fn pay(context: IdempotencyContext, order: String) -> String {
    println!("charging for {order}, attempt {}", context.attempt().number());
    format!("paid for {order}\n")
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1).ok_or("give the address to listen on")?;
    let store = EmbeddedStore::open("records")?;
    let layer = IdempotencyLayer::new(Engine::new(store));
    let service = Router::new().route("/payments", post(pay)).layer(layer);
    axum::serve(tokio::net::TcpListener::bind(address).await?, service).await?;
    Ok(())
}
