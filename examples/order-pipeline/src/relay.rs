//! Publishes orders: each at least once, and those of a customer in their order.

use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use oncegate::inbox_postgres::{Outbox, Relay, RelayCounts};
use oncegate::nats::NatsPublisher;
use oncegate::postgres::sqlx::postgres::PgPool;

use crate::faults::{Faults, Mortal};
use crate::{Broker, Database, Result, serve, stopped};

/// The options of the relay.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    database: Database,
    #[command(flatten)]
    broker: Broker,
    #[command(flatten)]
    faults: Faults,
    /// The port of its metrics; 0 means a free one.
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// The lease in milliseconds: how long messages of a crashed relay wait.
    #[arg(long, default_value_t = 30_000)]
    lease_ms: u64,
}

/// Returns the state of the outbox for Prometheus.
pub(crate) async fn outbox_metrics(pool: &PgPool) -> std::result::Result<String, StatusCode> {
    let away = |_| StatusCode::SERVICE_UNAVAILABLE;
    let mut connection = pool.acquire().await.map_err(away)?;
    let status = Outbox::new().status(&mut connection).await.map_err(away)?;
    Ok(format!(
        "outbox_waiting {}\noutbox_oldest_seconds {}\noutbox_failing {}\noutbox_refused {}\n",
        status.waiting,
        Duration::from_millis(status.oldest_ms.unwrap_or_default()).as_secs_f64(),
        status.failing,
        status.refused
    ))
}

/// Publishes until the process gets a signal.
pub(crate) async fn run(options: Options) -> Result<()> {
    let pool = options.database.pool()?;
    let publisher = NatsPublisher::new(options.broker.jetstream().await?);
    let counts = RelayCounts::default();
    let relay = Relay::new(pool, Mortal::new(publisher, options.faults))
        .with_lease(Duration::from_millis(options.lease_ms))?
        .with_observer(counts.clone());

    let metrics = async move || counts.to_prometheus();
    let router = Router::new().route("/metrics", get(metrics));
    let (served, ()) = tokio::join!(serve(options.port, router), relay.run(stopped()?));
    served
}
