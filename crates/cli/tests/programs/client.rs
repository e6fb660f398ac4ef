//! The client of this project against its sidecar, while every part between them dies.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{Service, Sidecar, Wire, sidecar, within};
use bytes::Bytes;
use http_body_util::Full;
use hyper_util::client::legacy::{Client as HyperClient, Error as HyperError, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use oncegate_client::tower::TowerTransport;
use oncegate_client::{
    Advice, AttemptFailureKind, Client, DefiniteResponse, Intent, RetryPolicy, SendError, SendErrorKind,
    Verdict,
};
use oncegate_testkit::until;
use tokio::net::{TcpListener, TcpSocket};

/// Payments: for each key, how often it was paid.
#[derive(Clone, Default)]
struct Ledger(Arc<Mutex<HashMap<String, usize>>>);

impl Ledger {
    /// Accepts every payment. The first payment of a key whose name begins with `dies` closes its connection afterwards.
    async fn serve(&self, listener: TcpListener) {
        let ledger = self.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let ledger = ledger.clone();
                tokio::spawn(async move {
                    let mut wire = Wire::new(stream);
                    while let Some(head) = wire.try_head().await {
                        let key = head.get("idempotency-key").unwrap().to_owned();
                        wire.body(head).await;
                        *ledger.0.lock().unwrap().entry(key.clone()).or_default() += 1;
                        if key.starts_with("dies") {
                            return;
                        }
                        if key.starts_with("slow") {
                            tokio::time::sleep(Duration::from_millis(1500)).await;
                        }
                        let response = "HTTP/1.1 201 Created\r\nContent-Length: 4\r\n\r\npaid";
                        if wire.try_send(response).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
    }

    fn payments(&self, key: &str) -> usize {
        self.0.lock().unwrap().get(key).copied().unwrap_or_default()
    }
}

async fn ledger() -> (Ledger, SocketAddr) {
    let (ledger, service) = (Ledger::default(), Service::new().await);
    let address = service.address;
    ledger.serve(service.into_listener()).await;
    (ledger, address)
}

type Hyper = TowerTransport<HyperClient<HttpConnector, Full<Bytes>>, Full<Bytes>>;

/// A client that keeps trying for as long as a test may take.
fn client() -> Client<Hyper> {
    let hyper = HyperClient::builder(TokioExecutor::new()).build_http();
    let over =
        TowerTransport::new(hyper).with_error_classifier(|error| match error.downcast_ref::<HyperError>() {
            Some(error) if error.is_connect() => AttemptFailureKind::NotSent,
            _ => AttemptFailureKind::Doubtful,
        });
    let policy = RetryPolicy::default()
        .with_max_attempts(10_000)
        .unwrap()
        .with_backoff(Duration::from_millis(5), Duration::from_millis(100))
        .unwrap()
        .with_deadline(Duration::from_secs(120));
    let budget = Arc::new(oncegate_client::RetryBudget::new(1_000_000, 1));
    Client::new(over).with_policy(policy).with_budget(budget)
}

fn pay(to: SocketAddr, key: &str) -> Intent {
    let intent = Intent::post(format!("http://{to}/payments")).unwrap();
    intent.with_key(key).unwrap().with_json(r#"{"amount":5}"#)
}

async fn send(to: SocketAddr, key: &str) -> Result<DefiniteResponse, SendError> {
    within(format!("an end of {key}"), client().send(&pay(to, key))).await
}

/// A sidecar with its records in this directory, on this port.
async fn start(store: &Path, to: SocketAddr, port: u16, failpoint: Option<&str>, flags: &[&str]) -> Sidecar {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(["proxy", "--admin=127.0.0.1:0", "--lease=2s"]).args(flags);
    command.arg(format!("--listen=127.0.0.1:{port}")).arg(format!("--to=http://{to}"));
    command.arg(format!("--store={}", store.display()));
    Sidecar::run(command.envs(failpoint.map(|point| ("ONCEGATE_FAILPOINT", point)))).await
}

/// Kills the sidecar at this point of a payment and starts it again while the client keeps trying. Returns the client's result
/// and the number of payments.
async fn killed_at(point: &str, flags: &[&str]) -> (Result<DefiniteResponse, SendError>, usize) {
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("store");
    let (ledger, service) = ledger().await;
    let mut first = start(&store, service, 0, Some(point), flags).await;
    let address = first.address;
    let sending = tokio::spawn(async move { send(address, "payment").await });
    first.process.logs(&format!("failpoint {point}")).await;
    first.process.kill().await;
    let _second = start(&store, service, address.port(), None, flags).await;
    let sent = sending.await.unwrap();
    (sent, ledger.payments("payment"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sidecar_that_dies_before_it_forwards_leaves_an_unknown_outcome() {
    let (sent, effects) = killed_at("executing", &[]).await;
    let open = sent.unwrap_err();
    assert_eq!((open.kind(), effects), (SendErrorKind::Unknown, 0), "{open:?}");
    assert!(open.attempts() > 1 && open.may_have_taken_effect());
}

#[tokio::test(flavor = "multi_thread")]
async fn under_reexecute_a_sidecar_that_dies_before_it_forwards_executes_the_retry() {
    let (sent, effects) = killed_at("executing", &["--on-abandoned=reexecute"]).await;
    let outcome = sent.unwrap();
    assert_eq!((outcome.verdict, outcome.replayed, effects), (Verdict::Done, false, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sidecar_that_dies_with_the_response_leaves_an_unknown_outcome() {
    let (sent, effects) = killed_at("executed", &[]).await;
    assert_eq!((sent.unwrap_err().kind(), effects), (SendErrorKind::Unknown, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sidecar_that_dies_after_it_stored_the_response_replays_it_to_the_retry() {
    let (sent, effects) = killed_at("completed", &[]).await;
    let outcome = sent.unwrap();
    assert_eq!((outcome.verdict, outcome.replayed, effects), (Verdict::Done, true, 1));
    assert_eq!(outcome.response.body(), "paid");
    assert!(outcome.attempts > 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_dies_after_its_effect_is_not_called_again() {
    let (ledger, service) = ledger().await;
    let sidecar = Sidecar::start(service, &[]).await;
    let open = send(sidecar.address, "dies-1").await.unwrap_err();
    assert_eq!((open.kind(), open.attempts(), ledger.payments("dies-1")), (SendErrorKind::Unknown, 1, 1));
    // Another call for the same intent pays nothing either.
    let open = send(sidecar.address, "dies-1").await.unwrap_err();
    assert_eq!((open.kind(), ledger.payments("dies-1")), (SendErrorKind::Unknown, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_starts_late_gets_one_payment() {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    let sidecar = Sidecar::run(sidecar(&format!("http://{address}")).arg("--store=memory:")).await;
    let to = sidecar.address;
    let asked = client();
    let sending = {
        let asked = asked.clone();
        tokio::spawn(async move { asked.send(&pay(to, "early")).await })
    };
    // The sidecar has failed to reach the service at least once. The admin API answers only to its own host name.
    let metrics = format!("GET /metrics HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", sidecar.admin);
    let refused = |line: &str| {
        let count = line.starts_with("oncegate_requests_total") && line.contains("status=\"5");
        count && !line.ends_with(" 0")
    };
    until("the sidecar did not reach the service", async || {
        crate::support::ask(sidecar.admin, &metrics).await.has_status(200).text().lines().any(refused)
    })
    .await;
    let ledger = Ledger::default();
    ledger.serve(socket.listen(16).unwrap()).await;
    let outcome = within("a payment", sending).await.unwrap().unwrap();
    assert_eq!((outcome.verdict, outcome.replayed, ledger.payments("early")), (Verdict::Done, false, 1));
    assert!(outcome.attempts > 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_callers_with_one_intent_get_one_response() {
    let (ledger, service) = ledger().await;
    let sidecar = Sidecar::start(service, &[]).await;
    let to = sidecar.address;
    let sending: Vec<_> =
        (0..8).map(|_| tokio::spawn(async move { send(to, "slow-1").await.unwrap() })).collect();
    let mut first = 0;
    for sent in sending {
        let outcome = sent.await.unwrap();
        assert_eq!(outcome.response.body(), "paid");
        first += usize::from(!outcome.replayed);
    }
    assert_eq!((first, ledger.payments("slow-1")), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_corrected_request_is_refused_under_its_old_key_and_succeeds_under_a_new_one() {
    let (ledger, service) = ledger().await;
    let sidecar = Sidecar::start(service, &[]).await;
    let intent = pay(sidecar.address, "p-1");
    client().send(&intent).await.unwrap();
    let corrected = client().send(&intent.with_json(r#"{"amount":6}"#)).await.unwrap();
    assert_eq!((corrected.verdict, ledger.payments("p-1")), (Verdict::Refused(Advice::NewKey), 1));
}
