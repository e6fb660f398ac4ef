//! The whole way of an order: from a request that may be repeated, over a broker that delivers at least once, to a
//! projection that counts it once. Each part is a process of its own. Any number of each may run, and any may crash at
//! any moment.
//!
//! It is one program: run `order-pipeline setup` once, then `api`, `relay` and `projector`; `retry` is for an operator.

mod api;
mod faults;
mod order;
mod projector;
mod relay;
mod setup;

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use axum::Router;
use clap::Parser;
use oncegate::core::ErrorChain;
use oncegate::nats::async_nats::{self, jetstream};
use oncegate::postgres::sqlx::postgres::{PgPool, PgPoolOptions};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The part that this process runs.
#[derive(Parser)]
#[command(name = "order-pipeline")]
enum Role {
    /// Creates the tables, the stream and its consumer. Run it once, before the others.
    Setup(setup::Options),
    /// Accepts orders: `POST /orders`.
    Api(api::Options),
    /// Publishes the messages of orders.
    Relay(relay::Options),
    /// Adds up the published orders of each customer.
    Projector(projector::Options),
    /// Processes dead letters again, for an operator after the projector was fixed.
    Retry(projector::RetryOptions),
}

/// The address of the database.
#[derive(clap::Args)]
struct Database {
    #[arg(long, env = "DATABASE_URL", hide_env_values = true)]
    database: String,
}

impl Database {
    /// Creates a pool that connects on demand: a part that starts while the database is down waits for it.
    fn pool(&self) -> Result<PgPool> {
        let pool = PgPoolOptions::new().acquire_timeout(Duration::from_secs(5)).connect_lazy(&self.database);
        Ok(pool.map_err(|error| format!("DATABASE_URL is not one of PostgreSQL: {error}"))?)
    }
}

/// The address of the broker.
#[derive(clap::Args)]
struct Broker {
    #[arg(long, env = "NATS_URL", hide_env_values = true, default_value = "nats://127.0.0.1:4222")]
    nats: String,
}

impl Broker {
    async fn jetstream(&self) -> Result<jetstream::Context> {
        let client = async_nats::connect(&self.nats).await;
        Ok(jetstream::new(client.map_err(|error| {
            format!("no connection to NATS, which NATS_URL names: {}", ErrorChain(&error))
        })?))
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let filter = std::env::var("RUST_LOG").ok().and_then(|text| text.parse().ok());
    let filter = filter.unwrap_or_else(|| Targets::new().with_default(LevelFilter::WARN));
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    tracing_subscriber::registry().with(lines).with(filter).init();
    let done = match Role::parse() {
        Role::Setup(options) => setup::run(options).await,
        Role::Api(options) => api::run(options).await,
        Role::Relay(options) => relay::run(options).await,
        Role::Projector(options) => projector::run(options).await,
        Role::Retry(options) => projector::retry(options).await,
    };
    let Err(error) = done else { return ExitCode::SUCCESS };
    eprintln!("error: {}", ErrorChain(&*error));
    ExitCode::FAILURE
}

/// Returns a future that is ready after SIGTERM or SIGINT. Signals count from this call on.
fn stopped() -> Result<impl Future<Output = ()>> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

/// Serves on a port of the loopback interface (0 for a free one) until the process gets a signal.
async fn serve(port: u16, router: Router) -> Result<()> {
    let stop = stopped()?;
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await;
    let listener = listener.map_err(|error| format!("port {port}: {error}"))?;
    println!("listening on http://{}", listener.local_addr()?);
    Ok(axum::serve(listener, router).with_graceful_shutdown(stop).await?)
}
