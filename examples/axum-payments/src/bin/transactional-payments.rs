//! The payments service with its payments in PostgreSQL: the payment, the claim of its key and the response commit together,
//! so that a payment is made exactly once, whatever dies when.
//!
//! Configuration by environment: `DATABASE_URL`, `PORT` (0 takes a free one).

use std::error::Error;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use oncegate::core::Scope;
use oncegate::postgres::{schema, sqlx};
use oncegate::{KeyHeader, PostgresOptions, TransactRefusal, Transactor};
use serde::{Deserialize, Serialize};

#[derive(Deserialize, Serialize)]
struct Payment {
    customer: String,
    cents: i64,
}

#[derive(Deserialize, Serialize)]
struct Charge {
    id: i64,
    customer: String,
    cents: i64,
}

async fn pay(
    State(transactor): State<Transactor>,
    KeyHeader(key): KeyHeader,
    Json(payment): Json<Payment>,
) -> Result<Response, TransactRefusal> {
    let scope = Scope::caller("customer", &payment.customer).with_operation("POST /payments");

    let paid = transactor.transact(&scope, key, &payment, async |connection| {
        let insert = "INSERT INTO payments (customer, cents) VALUES ($1, $2) RETURNING id";
        let insert = sqlx::query_scalar(insert).bind(&payment.customer).bind(payment.cents);
        let id = insert.fetch_one(connection).await?;
        Ok(Charge { id, customer: payment.customer.clone(), cents: payment.cents })
    });
    let paid = paid.await?;
    let marker = paid.is_replayed().then_some([("idempotent-replayed", "true")]);
    Ok((StatusCode::CREATED, marker, Json(paid.into_inner())).into_response())
}

async fn charges(State(transactor): State<Transactor>) -> Result<Json<serde_json::Value>, StatusCode> {
    let charges = sqlx::query_scalar("SELECT count(*) FROM payments").fetch_one(transactor.pool()).await;
    let charges: i64 = charges.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok(Json(serde_json::json!({ "charges": charges })))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::var("DATABASE_URL")?;
    let port: u16 = std::env::var("PORT").unwrap_or_else(|_| "3000".into()).parse()?;

    // A service that may not do that leaves it to `oncegate schema apply postgres`.
    schema::apply(&PostgresOptions::from_url(&url)?).await?;
    let pool = sqlx::PgPool::connect(&url).await?;
    let table = "CREATE TABLE IF NOT EXISTS payments (id bigserial PRIMARY KEY, customer text NOT NULL, cents bigint NOT NULL)";
    sqlx::raw_sql(table).execute(&pool).await?;

    let service = Router::new()
        .route("/payments", post(pay))
        .route("/charges", get(charges))
        .with_state(Transactor::new(pool));
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, service)
        .with_graceful_shutdown(async { drop(tokio::signal::ctrl_c().await) })
        .await?;
    Ok(())
}
