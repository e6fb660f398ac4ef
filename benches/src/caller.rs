//! The overhead of the client for a call that succeeds at once, compared with the bare HTTP client below it, with the same
//! field in the same request, and the response read whole.

use std::time::{Duration, Instant};

use axum::http::{HeaderValue, Request};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::{Client as HyperClient, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use oncegate_client::reqwest::ReqwestTransport;
use oncegate_client::tower::TowerTransport;
use oncegate_client::{Client, Intent, Transport, uuid_v7_key};
use tokio::net::TcpListener;

use crate::records::Result;
use crate::service::service;
use crate::shared::{ROUNDS, Rounds};

const BODY: &str = r#"{"order":"order-123","amount":5}"#;

type Hyper = HyperClient<HttpConnector, Full<Bytes>>;

pub(crate) async fn measure() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/pay", listener.local_addr()?);
    tokio::spawn(async move { axum::serve(listener, service()).await });
    let hyper: Hyper = HyperClient::builder(TokioExecutor::new()).build_http();
    let over_hyper = Client::new(TowerTransport::<_, Full<Bytes>>::new(hyper.clone()));
    let reqwest = reqwest::Client::builder().no_proxy().build()?;
    let over_reqwest = Client::new(ReqwestTransport::build(reqwest::Client::builder().no_proxy())?);
    for (in_flight, calls) in [(1, 10_000), (64, 40_000)] {
        let mut rounds = Rounds::default();
        for round in 0..=ROUNDS {
            // Who goes first changes from round to round.
            let mut figures = [Duration::ZERO; 4];
            for at in 0..4 {
                let at = (at + round) % 4;
                figures[at] = match at {
                    0 => spread(in_flight, calls, || through(over_hyper.clone(), url.clone())).await?,
                    1 => spread(in_flight, calls, || bare_hyper(hyper.clone(), url.clone())).await?,
                    2 => spread(in_flight, calls, || through(over_reqwest.clone(), url.clone())).await?,
                    _ => spread(in_flight, calls, || bare_reqwest(reqwest.clone(), url.clone())).await?,
                };
            }
            if round > 0 {
                let [ours, hyper, ours_too, reqwest] = figures.map(|time| time.as_secs_f64());
                rounds.note("over hyper", [ours, hyper]);
                rounds.note("over reqwest", [ours_too, reqwest]);
            }
        }
        rounds.print(&format!("client, a successful call, {in_flight} in flight"), "bare", calls);
    }
    Ok(())
}

/// The time for a number of calls with a number of calls at once.
async fn spread<F>(in_flight: u64, calls: u64, call: impl Fn() -> F) -> Result<Duration>
where
    F: Future<Output = std::result::Result<(), String>> + Send + 'static,
{
    let start = Instant::now();
    let mut under_way = tokio::task::JoinSet::new();
    for _ in 0..calls {
        if under_way.len() as u64 >= in_flight {
            under_way.join_next().await.ok_or("nothing is under way")???;
        }
        under_way.spawn(call());
    }
    while let Some(ended) = under_way.join_next().await {
        ended??;
    }
    Ok(start.elapsed())
}

async fn through<T: Transport>(client: Client<T>, url: String) -> std::result::Result<(), String> {
    let intent = Intent::post(url).map_err(|error| error.to_string())?.with_json(BODY);
    let outcome = client.send(&intent).await.map_err(|error| error.to_string())?;
    expect(outcome.response.body())
}

async fn bare_hyper(client: Hyper, url: String) -> std::result::Result<(), String> {
    let request = Request::post(url)
        .header("content-type", "application/json")
        .header("idempotency-key", key()?)
        .body(Full::from(BODY))
        .map_err(|error| error.to_string())?;
    let response = client.request(request).await.map_err(|error| error.to_string())?;
    let body = response.into_body().collect().await.map_err(|error| error.to_string())?;
    expect(&body.to_bytes())
}

async fn bare_reqwest(client: reqwest::Client, url: String) -> std::result::Result<(), String> {
    let request =
        client.post(url).header("content-type", "application/json").header("idempotency-key", key()?);
    let response = request.body(BODY).send().await.map_err(|error| error.to_string())?;
    expect(&response.bytes().await.map_err(|error| error.to_string())?)
}

/// A new key costs the same everywhere.
fn key() -> std::result::Result<HeaderValue, String> {
    let key = uuid_v7_key().map_err(|error| error.to_string())?;
    HeaderValue::from_bytes(key.as_bytes()).map_err(|error| error.to_string())
}

fn expect(body: &[u8]) -> std::result::Result<(), String> {
    if body == BODY.as_bytes() { Ok(()) } else { Err("another response".to_owned()) }
}
