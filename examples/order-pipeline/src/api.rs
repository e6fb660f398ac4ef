//! Accepts orders. The order, its message and the response for its key commit together. So a repeated request makes one
//! order and one message.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use oncegate::core::{ErrorChain, Scope};
use oncegate::inbox::Outgoing;
use oncegate::inbox_postgres::Outbox;
use oncegate::postgres::sqlx;
use oncegate::{KeyHeader, TransactError, TransactRefusal, Transactor};
use serde::{Deserialize, Serialize};

use crate::faults::{Faults, Point};
use crate::order::{OrderPlaced, PLACED};
use crate::{Database, Result, relay, serve};

/// The options of the API.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    database: Database,
    #[command(flatten)]
    faults: Faults,
    /// The port; 0 means a free one.
    #[arg(long, default_value_t = 3000)]
    port: u16,
}

#[derive(Clone)]
struct Api {
    transactor: Transactor,
    faults: Faults,
}

/// The request of a client.
#[derive(Deserialize, Serialize)]
struct Order {
    customer: String,
    cents: i64,
}

impl Order {
    /// The customer's name is an order key, which brokers carry in a header.
    fn is_well_formed(&self) -> bool {
        (1..=100).contains(&self.customer.len()) && !self.customer.chars().any(char::is_control)
    }
}

async fn place(
    State(Api { transactor, faults }): State<Api>,
    KeyHeader(key): KeyHeader,
    Json(order): Json<Order>,
) -> std::result::Result<Response, Response> {
    if !order.is_well_formed() {
        return Err(StatusCode::BAD_REQUEST.into_response());
    }
    let scope = Scope::caller("customer", &order.customer).with_operation("POST /orders");

    let placed = transactor.transact(&scope, key, &order, async |connection| {
        // The customer's row is locked from here to the commit. So sequence numbers have no gaps, and the messages of a
        // customer are published in their order.
        let count = "INSERT INTO customers VALUES ($1, 1)
            ON CONFLICT (customer) DO UPDATE SET orders = customers.orders + 1 RETURNING orders";
        let sequence: i64 =
            sqlx::query_scalar(count).bind(&order.customer).fetch_one(&mut *connection).await?;
        let insert = "INSERT INTO orders (customer, sequence, cents) VALUES ($1, $2, $3) RETURNING id";
        let insert = sqlx::query_scalar(insert).bind(&order.customer).bind(sequence).bind(order.cents);
        let placed = OrderPlaced {
            order: insert.fetch_one(&mut *connection).await?,
            customer: order.customer.clone(),
            sequence: u64::try_from(sequence)?,
            cents: order.cents,
        };
        // An empty identifier means a new one, which stays the same each time the message is published.
        let mut message = Outgoing::new("", PLACED, serde_json::to_vec(&placed)?);
        message.order_key = Some(order.customer.clone().into());
        Outbox::new().send(connection, &message).await?;
        faults.at(Point::BeforeOrderCommit);
        Ok(placed)
    });
    let placed = placed.await.map_err(refuse)?;
    faults.at(Point::AfterOrderCommit);
    let marker = placed.is_replayed().then_some([("idempotent-replayed", "true")]);
    Ok((StatusCode::CREATED, marker, Json(placed.into_inner())).into_response())
}

fn refuse(error: TransactError) -> Response {
    if !matches!(error, TransactError::InProgress { .. } | TransactError::Mismatch) {
        eprintln!("order failed: {}", ErrorChain(&error));
    }
    TransactRefusal(error).into_response()
}

async fn metrics(State(api): State<Api>) -> Response {
    relay::outbox_metrics(api.transactor.pool()).await.into_response()
}

/// Serves `POST /orders` and `GET /metrics`.
pub(crate) async fn run(options: Options) -> Result<()> {
    let api = Api { transactor: Transactor::new(options.database.pool()?), faults: options.faults };
    let router = Router::new().route("/orders", post(place)).route("/metrics", get(metrics)).with_state(api);
    serve(options.port, router).await
}
