//! An order's whole way: from a request that may be repeated, over a broker that delivers at least once, into a projection that
//! counts it once. Each part is a process of its own, of which any number may run, and any may die at any moment.
//!
//! One program: `order-pipeline setup` once, then `api`, `relay` and `projector`; `retry` is for an operator.

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

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Which part this process is.
#[derive(Parser)]
#[command(name = "order-pipeline")]
enum Role {
    /// Makes tables, the stream and its consumer. Once, before the others.
    Setup(setup::Options),
    /// Takes orders: `POST /orders`.
    Api(api::Options),
    /// Publishes what was ordered.
    Relay(relay::Options),
    /// Adds up what was published, for each customer.
    Projector(projector::Options),
    /// Processes dead letters again: for an operator, when the projector was mended.
    Retry(projector::RetryOptions),
}

/// Where the database is.
#[derive(clap::Args)]
struct Database {
    #[arg(long, env = "DATABASE_URL", hide_env_values = true)]
    database: String,
}

impl Database {
    /// A pool that does not ask for the database before it is needed: what is started while that is away waits for it.
    fn pool(&self) -> Result<PgPool> {
        let pool = PgPoolOptions::new().acquire_timeout(Duration::from_secs(5)).connect_lazy(&self.database);
        Ok(pool.map_err(|error| format!("DATABASE_URL is not one of PostgreSQL: {error}"))?)
    }
}

/// Where the broker is.
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
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    tracing_subscriber::fmt()
        .with_env_filter(filter.unwrap_or_else(|_| "warn".into()))
        .with_writer(std::io::stderr)
        .init();
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

/// Ready when this process is told to end, by SIGTERM or SIGINT. It hears of it from now on.
fn stopped() -> Result<impl Future<Output = ()>> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

/// Serves on this port of the loopback, 0 for a free one, until the process is told to end.
async fn serve(port: u16, router: Router) -> Result<()> {
    let stop = stopped()?;
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await;
    let listener = listener.map_err(|error| format!("port {port}: {error}"))?;
    println!("listening on http://{}", listener.local_addr()?);
    Ok(axum::serve(listener, router).with_graceful_shutdown(stop).await?)
}
