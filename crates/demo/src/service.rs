//! The payments service: an ordinary one, which charges for every request, and a ledger with every charge.
//!
//! It has no keys. A request that arrives twice is charged twice, and the ledger shows both: nothing here removes or hides a
//! duplicate.

use std::collections::{HashMap, HashSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::stage::{Stage, Style};

/// One line of the ledger.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Charge {
    pub(crate) charge: String,
    pub(crate) intent: String,
    pub(crate) customer: String,
    pub(crate) cents: u64,
    /// The sidecar's record of the request, as the sidecar reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) record: Option<String>,
}

impl Charge {
    /// The response of the service, the same at each repetition.
    pub(crate) fn receipt(&self) -> String {
        let Self { charge, intent, cents, .. } = self;
        serde_json::json!({ "charge": charge, "intent": intent, "cents": cents }).to_string()
    }
}

/// The body of a payment request.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct PaymentRequest {
    pub(crate) intent: String,
    pub(crate) customer: String,
    pub(crate) cents: u64,
}

/// Every charge, in the order in which it was made.
#[derive(Default)]
pub(crate) struct Ledger(Mutex<Entries>);

#[derive(Default)]
struct Entries {
    charges: Vec<Charge>,
    /// The number of requests for each intent that have arrived.
    begun: HashMap<String, usize>,
    /// The number of requests under each record that are being executed.
    running: HashMap<String, usize>,
}

/// The ledger's response about a record of the sidecar.
pub(crate) enum Finding {
    /// The customer was charged.
    Charged(Charge),
    /// A request under this record is still being executed.
    StillRunning,
    /// The ledger has nothing about it.
    Nothing,
}

impl Ledger {
    pub(crate) fn charges(&self) -> Vec<Charge> {
        self.lock().charges.clone()
    }

    /// The number of charges, and of duplicates among them.
    pub(crate) fn count(&self) -> (usize, usize) {
        let entries = self.lock();
        let intents: HashSet<_> = entries.charges.iter().map(|c| &c.intent).collect();
        (entries.charges.len(), entries.charges.len() - intents.len())
    }

    pub(crate) fn find(&self, record: &str) -> Finding {
        let entries = self.lock();
        if entries.running.get(record).is_some_and(|running| *running > 0) {
            return Finding::StillRunning;
        }
        let charge = entries.charges.iter().find(|charge| charge.record.as_deref() == Some(record));
        charge.cloned().map_or(Finding::Nothing, Finding::Charged)
    }

    /// Records the arrival of a request. Returns its number among the requests for its intent.
    fn begin(&self, intent: &str, record: Option<&str>) -> usize {
        let mut entries = self.lock();
        if let Some(record) = record {
            *entries.running.entry(record.to_owned()).or_default() += 1;
        }
        let begun = entries.begun.entry(intent.to_owned()).or_default();
        *begun += 1;
        *begun
    }

    /// Charges a payment, even if it was charged before.
    fn insert(&self, payment: PaymentRequest, record: Option<String>) -> Charge {
        let mut entries = self.lock();
        if let Some(running) = record.as_ref().and_then(|record| entries.running.get_mut(record)) {
            *running = running.saturating_sub(1);
        }
        let PaymentRequest { intent, customer, cents } = payment;
        let charge = format!("ch-{:06}", entries.charges.len() + 1);
        let charge = Charge { charge, intent, customer, cents, record };
        entries.charges.push(charge.clone());
        charge
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The running service. Stops when dropped.
pub(crate) struct Service {
    pub(crate) address: SocketAddr,
    pub(crate) ledger: Arc<Ledger>,
    running: watch::Receiver<usize>,
    accepting: AbortHandle,
}

/// The state that all requests share.
struct Desk {
    stage: Arc<Stage>,
    ledger: Arc<Ledger>,
    running: watch::Sender<usize>,
}

impl Service {
    /// Starts on a free port.
    pub(crate) async fn start(stage: Arc<Stage>) -> Result<Self, String> {
        let cannot = |error| format!("cannot open a port for the payments service: {error}");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(cannot)?;
        let address = listener.local_addr().map_err(cannot)?;
        let (sender, running) = watch::channel(0);
        let ledger = Arc::new(Ledger::default());
        let desk = Arc::new(Desk { stage, ledger: ledger.clone(), running: sender });
        let accepting = tokio::spawn(accept(listener, desk)).abort_handle();
        Ok(Self { address, ledger, running, accepting })
    }

    /// The number of requests that are being executed.
    pub(crate) fn running(&self) -> watch::Receiver<usize> {
        self.running.clone()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, desk: Arc<Desk>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // Most likely too many files are open, so others have to close first.
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            continue;
        };
        let desk = desk.clone();
        let service = service_fn(move |request| {
            let desk = desk.clone();
            // A task of its own: as in most services, a caller that hangs up does not stop its request.
            tokio::spawn(async move { desk.charge(request).await })
        });
        let connection = hyper::server::conn::http1::Builder::new();
        tokio::spawn(connection.serve_connection(TokioIo::new(stream), service));
    }
}

impl Desk {
    async fn charge(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        if (request.method(), request.uri().path()) != (&Method::POST, self.stage.path.as_str()) {
            return response(StatusCode::NOT_FOUND, r#"{"error":"not found"}"#.into());
        }
        let record = record_of(request.headers());
        let body = Limited::new(request.into_body(), 16 * 1024).collect().await;
        let payment = body.ok().and_then(|body| serde_json::from_slice(&body.to_bytes()).ok());
        let Some(payment): Option<PaymentRequest> = payment else {
            return response(StatusCode::BAD_REQUEST, r#"{"error":"not a payment"}"#.into());
        };
        self.running.send_modify(|running| *running += 1);
        let nth = self.ledger.begin(&payment.intent, record.as_deref());
        let time = self.stage.plan.service_time(&payment.intent, nth);
        // The charge is made in the middle, so that a caller that leaves may do so before or after it.
        tokio::time::sleep(time / 2).await;
        let charge = self.ledger.insert(payment, record);
        if nth > 1 {
            let Charge { intent, charge, .. } = &charge;
            let text = format!("{intent}, now as {charge}: to the service a retry is a new payment");
            self.stage.say_once("charged again", Style::Bad, &text);
        }
        tokio::time::sleep(time / 2).await;
        self.running.send_modify(|running| *running -= 1);
        response(StatusCode::CREATED, charge.receipt())
    }
}

fn record_of(headers: &HeaderMap) -> Option<String> {
    headers.get("oncegate-record")?.to_str().ok().map(str::to_owned)
}

fn response(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let json = header::HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payment(intent: &str) -> PaymentRequest {
        PaymentRequest { intent: intent.into(), customer: "customer-01".into(), cents: 100 }
    }

    #[test]
    fn the_ledger_never_removes_a_duplicate() {
        let ledger = Ledger::default();
        for intent in ["payment-1", "payment-1", "payment-2", "payment-1"] {
            ledger.insert(payment(intent), None);
        }
        assert_eq!(ledger.count(), (4, 2));
    }

    #[test]
    fn a_record_is_found_once_nothing_runs_under_it() {
        let ledger = Ledger::default();
        assert!(matches!(ledger.find("a5"), Finding::Nothing));
        assert_eq!(ledger.begin("payment-1", Some("a5")), 1);
        assert!(matches!(ledger.find("a5"), Finding::StillRunning));
        ledger.insert(payment("payment-1"), Some("a5".into()));
        assert!(matches!(ledger.find("a5"), Finding::Charged(charge) if charge.charge == "ch-000001"));
        assert_eq!(ledger.begin("payment-1", None), 2);
    }
}
