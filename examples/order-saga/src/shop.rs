//! The shop: `POST /orders` reserves, charges and ships once per key, over crashes and restarts, or takes back what it did.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{Method, Request, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use oncegate::core::{ErrorChain, OnAbandoned};
use oncegate::engine::{
    Attempt, CompleterOptions, ErrorFate, FunctionError, Resumable, StepError, StepFailure,
};
use oncegate::{EmbeddedOptions, EmbeddedStore, Engine, KeyHeader, Policy, RedisOptions, RedisStore, Store};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The address of the shop, the services that it calls, and its time-outs.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// 0 takes a free one.
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// A directory for this shop alone, or a redis:// URL that several share.
    #[arg(long, default_value = "shop-records")]
    store: String,
    /// The URL of the stock, such as http://127.0.0.1:3001.
    #[arg(long)]
    stock: String,
    /// The URL of the bank.
    #[arg(long)]
    bank: String,
    /// The URL of the carrier.
    #[arg(long)]
    carrier: String,
    /// After how many milliseconds without a sign of life an order counts as abandoned.
    #[arg(long, default_value_t = 5000)]
    lease_ms: u64,
    /// The time-out for a response of another service, in milliseconds.
    #[arg(long, default_value_t = 10_000)]
    response_timeout_ms: u64,
    /// Every how many milliseconds it looks for orders to go on with; 0 for never.
    #[arg(long, default_value_t = 1000)]
    complete_every_ms: u64,
}

#[derive(Serialize, Deserialize)]
struct Order {
    customer: String,
    item: String,
    cents: u64,
    address: String,
}

#[derive(Serialize, Deserialize)]
struct Receipt {
    order: String,
    reservation: u64,
    charge: u64,
    shipment: u64,
}

/// The order itself. It may run any number of times for one key; what was finished is not done again.
async fn sell(others: Others, attempt: Attempt, order: Order) -> Result<Receipt, StepError<String>> {
    let Others { stock, bank, carrier } = others;
    let Order { customer, item, cents, address } = order;
    // Whatever is sent along has to be the same in every attempt: so the number is derived, and not drawn.
    let number = attempt.downstream_key("number");
    eprintln!("order {number}: attempt {}", attempt.number());

    let reservation = attempt
        .step("reserve", |key| stock.call("reserve", key, json!({ "order": number, "item": item })))
        .compensate({
            let (stock, number) = (stock.clone(), number.clone());
            async move |key, reservation| {
                let about = json!({ "order": number, "reservation": reservation });
                stock.call("free", key, about).await.map(drop)
            }
        })
        .await?;

    let payment = json!({ "order": number, "customer": customer, "cents": cents });
    let charge = attempt
        .step("charge", |key| bank.call("charge", key, payment))
        .compensate({
            let (bank, number) = (bank.clone(), number.clone());
            async move |key, charge| {
                let about = json!({ "order": number, "customer": customer, "charge": charge });
                bank.call("refund", key, about).await.map(drop)
            }
        })
        .await?;

    let parcel = json!({ "order": number, "item": item, "address": address });
    let shipment = attempt.step("ship", |key| carrier.call("ship", key, parcel)).await?;

    Ok(Receipt { order: number.clone(), reservation, charge, shipment })
}

#[derive(Clone)]
struct Others {
    stock: Other,
    bank: Other,
    carrier: Other,
}

/// One of the three.
#[derive(Clone)]
struct Other {
    client: Client<HttpConnector, Full<Bytes>>,
    url: Arc<str>,
    response_timeout: Duration,
}

impl Other {
    /// Gives the number of the effect.
    async fn call(&self, action: &str, key: String, about: Value) -> Result<u64, StepFailure<String>> {
        let response = tokio::time::timeout(self.response_timeout, self.send(action, key, about));
        let (status, body) = match response.await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return Err(StepFailure::Unsure(format!("{action}: {}", ErrorChain(&*error)))),
            Err(_) => return Err(StepFailure::Unsure(format!("{action}: no response in time"))),
        };
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        match (status, body["id"].as_u64(), body["refused"].as_str()) {
            (StatusCode::CREATED, Some(id), _) => Ok(id),
            // Only a clear no says that nothing took place, and never will. A response about this call, such as 401, 429 or
            // 500, says nothing of an earlier one.
            (StatusCode::UNPROCESSABLE_ENTITY, _, Some(reason)) => {
                Err(StepFailure::Final(format!("{action}: {reason}")))
            }
            _ => Err(StepFailure::Unsure(format!("{action}: status {status}"))),
        }
    }

    async fn send(
        &self,
        action: &str,
        key: String,
        about: Value,
    ) -> Result<(StatusCode, Bytes), Box<dyn Error + Send + Sync>> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("{}/{action}", self.url))
            .header(header::CONTENT_TYPE, "application/json")
            .header("idempotency-key", key)
            .body(about.to_string().into())?;
        let response = self.client.request(request).await?;
        let status = response.status();
        Ok((status, Limited::new(response.into_body(), 64 * 1024).collect().await?.to_bytes()))
    }
}

type Orders = Resumable<Order, Receipt, StepError<String>, fn(&StepError<String>) -> ErrorFate>;

async fn order(
    State(orders): State<Orders>,
    KeyHeader(key): KeyHeader,
    Json(order): Json<Order>,
) -> Response {
    match orders.run_detailed(key, &order).await {
        Ok(result) => {
            let marker = result.is_replayed().then_some([("idempotent-replayed", "true")]);
            (StatusCode::CREATED, marker, Json(result.value)).into_response()
        }
        Err(error) => refuse(&error),
    }
}

fn refuse(error: &FunctionError<StepError<String>>) -> Response {
    let again_after_a_second = [("retry-after", "1")];
    let text = error.to_string();
    match error {
        FunctionError::Failed { error: StepError::Failed(reason), replayed } => {
            let marker = replayed.then_some([("idempotent-replayed", "true")]);
            (marker, status_and_text(StatusCode::UNPROCESSABLE_ENTITY, "refused", reason)).into_response()
        }
        FunctionError::InProgress { .. } => {
            (again_after_a_second, status_and_text(StatusCode::CONFLICT, "error", &text)).into_response()
        }
        FunctionError::Store(_) => {
            (again_after_a_second, status_and_text(StatusCode::SERVICE_UNAVAILABLE, "error", &text))
                .into_response()
        }
        // It goes on after its last finished step: by the client's retry, or without it.
        FunctionError::Failed { error, .. } if error.fate() == ErrorFate::Release => {
            (again_after_a_second, status_and_text(StatusCode::SERVICE_UNAVAILABLE, "error", &text))
                .into_response()
        }
        FunctionError::KeyReused => status_and_text(StatusCode::UNPROCESSABLE_ENTITY, "error", &text),
        _ => status_and_text(StatusCode::INTERNAL_SERVER_ERROR, "error", &text),
    }
}

fn status_and_text(status: StatusCode, member: &str, text: &str) -> Response {
    (status, Json(json!({ member: text }))).into_response()
}

async fn open(store: &str) -> Result<Arc<dyn Store>, Box<dyn Error>> {
    Ok(if RedisOptions::is_url(store) {
        Arc::new(RedisStore::open(RedisOptions::from_url(store)?).await?)
    } else {
        Arc::new(EmbeddedStore::open(EmbeddedOptions::new(store))?)
    })
}

/// Serves `POST /orders`, and goes on with what was left half-way.
pub(crate) async fn serve(options: Options) -> Result<(), Box<dyn Error>> {
    let client = Client::builder(TokioExecutor::new()).build_http();
    let response_timeout = Duration::from_millis(options.response_timeout_ms);
    let other =
        |url: &str| Other { client: client.clone(), url: url.trim_end_matches('/').into(), response_timeout };
    let others =
        Others { stock: other(&options.stock), bank: other(&options.bank), carrier: other(&options.carrier) };

    let engine = Engine::new(open(&options.store).await?);
    let policy = Policy::default()
        .with_lease(Duration::from_millis(options.lease_ms))?
        .with_on_abandoned(OnAbandoned::Reexecute);
    let orders: Orders = engine
        .function("order")
        .with_policy(policy)
        .with_errors(StepError::fate as fn(&_) -> _)
        .resumable(move |attempt, order| sell(others.clone(), attempt, order))?;
    if options.complete_every_ms > 0 {
        let every = Duration::from_millis(options.complete_every_ms);
        // What was released half-way is left to its client for as long.
        orders.spawn_completer(CompleterOptions::default().with_interval(every)?.with_first_pause(every));
    }

    let service = Router::new().route("/orders", post(order)).with_state(orders);
    crate::listen(options.port, service).await?;
    // Orders whose clients have hung up are still running.
    engine.drain(Duration::from_secs(10)).await;
    Ok(())
}
