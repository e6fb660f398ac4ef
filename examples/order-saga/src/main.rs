//! An order is three calls to three services of others: the stock reserves, the bank charges, the carrier ships. No transaction
//! holds them together; steps do.
//!
//! One program, four processes: `order-saga stock`, `bank`, `carrier`, and the `shop` that calls them.

mod others;
mod shop;

use std::error::Error;

use axum::Router;
use clap::Parser;

/// The role of this process.
#[derive(Parser)]
#[command(name = "order-saga")]
enum Role {
    /// Reserves items, and frees them.
    Stock(others::Options),
    /// Charges customers, and refunds them.
    Bank(others::Options),
    /// Ships items.
    Carrier(others::Options),
    /// Sells: reserve, charge, ship.
    Shop(shop::Options),
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    match Role::parse() {
        Role::Stock(options) => others::serve(options, "stock", &["reserve", "free"]).await,
        Role::Bank(options) => others::serve(options, "bank", &["charge", "refund"]).await,
        Role::Carrier(options) => others::serve(options, "carrier", &["ship"]).await,
        Role::Shop(options) => shop::serve(options).await,
    }
}

/// Serves on this port of the loopback, 0 for a free one, until it is interrupted.
async fn listen(port: u16, service: Router) -> Result<(), Box<dyn Error>> {
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, service)
        .with_graceful_shutdown(async { drop(tokio::signal::ctrl_c().await) })
        .await?;
    Ok(())
}
