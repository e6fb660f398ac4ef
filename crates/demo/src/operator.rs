//! The operator: looks up the payments whose outcome is unknown in the ledger, and reports them to the sidecar.
//!
//! A record is resolved only by the ledger. If there is a charge, its receipt is the answer. If there is no charge at two
//! checks with some time between them, the key is free again.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Method, Request, Response, header};
use http_body_util::Full;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::exchange::exchange;
use crate::screen::Style;
use crate::service::{Charge, Finding, Ledger};
use crate::story::Story;
use crate::tally::Tally;

/// The time without a charge in the ledger after which the operator concludes that there will be none.
const SECOND_CHECK: Duration = Duration::from_millis(500);

const ADMIN_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) struct Operator {
    pub(crate) admin: SocketAddr,
    /// The operation whose records it checks, encoded for a URL, if the store may have other records, too.
    pub(crate) operation: Option<String>,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) tally: Arc<Tally>,
    pub(crate) story: Arc<Story>,
    /// The number of settled outcomes, which stopped clients watch.
    pub(crate) settled: watch::Sender<u64>,
    /// The times at which records were first found to have no charge.
    pub(crate) nothing_since: HashMap<String, Instant>,
}

impl Operator {
    /// Checks every record whose outcome is unknown, and resolves those that the ledger decides.
    pub(crate) async fn round(&mut self) -> Result<(), String> {
        for record in self.unknown().await? {
            match self.ledger.find(&record) {
                Finding::Charged(charge) => self.complete(&record, &charge).await?,
                Finding::StillRunning => {}
                Finding::Nothing => {
                    let since = *self.nothing_since.entry(record.clone()).or_insert_with(Instant::now);
                    if since.elapsed() >= SECOND_CHECK {
                        self.release(&record).await?;
                    }
                }
            }
        }
        Ok(())
    }

    /// All records whose outcome is unknown, from all pages.
    async fn unknown(&self) -> Result<Vec<String>, String> {
        let mut records = Vec::new();
        let mut cursor = String::new();
        let of =
            self.operation.as_ref().map(|operation| format!("&operation={operation}")).unwrap_or_default();
        loop {
            let page = self.ask(Method::GET, &format!("/v1/keys?state=unknown{of}{cursor}"), None).await?;
            let listed = page.get("records").and_then(Value::as_array);
            let listed = listed.ok_or_else(|| format!("the sidecar did not list records: {page}"))?;
            records.extend(listed.iter().filter_map(|line| line.get("record")?.as_str()).map(str::to_owned));
            match page.get("next").and_then(Value::as_str) {
                Some(next) => cursor = format!("&cursor={next}"),
                None => return Ok(records),
            }
        }
    }

    async fn complete(&self, record: &str, charge: &Charge) -> Result<(), String> {
        let resolution = json!({
            "outcome": "completed",
            "status": 201,
            "headers": { "content-type": "application/json" },
            "body": charge.receipt(),
            "reason": format!("the ledger has {}", charge.charge),
        });
        self.resolve(record, resolution).await?;
        self.tally.resolved_completed.add();
        let text = format!(
            "the operator finds {} in the ledger ({}) → that is the answer",
            charge.intent, charge.charge
        );
        self.story.say("resolved", Style::Good, &text);
        self.settle();
        Ok(())
    }

    async fn release(&self, record: &str) -> Result<(), String> {
        let resolution = json!({ "outcome": "released", "reason": "the ledger has no charge" });
        self.resolve(record, resolution).await?;
        self.tally.resolved_released.add();
        let short = record.get(..8).unwrap_or(record);
        let text = format!("the operator finds no charge for record {short} → its key is free again");
        self.story.say("released", Style::Good, &text);
        self.settle();
        Ok(())
    }

    async fn resolve(&self, record: &str, resolution: Value) -> Result<(), String> {
        self.ask(Method::POST, &format!("/v1/keys/{record}/resolve"), Some(resolution)).await.map(|_| ())
    }

    fn settle(&self) {
        self.settled.send_modify(|settled| *settled += 1);
    }

    async fn ask(&self, method: Method, path: &str, body: Option<Value>) -> Result<Value, String> {
        let what = format!("{method} {path}");
        let body = body.map_or_else(Bytes::new, |body| Bytes::from(body.to_string()));
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, self.admin.to_string())
            .header(header::CONNECTION, "close")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body));
        let request = request.map_err(|error| format!("cannot ask the sidecar {what}: {error}"))?;
        match timeout(ADMIN_TIMEOUT, exchange(self.admin, request)).await {
            Ok(Ok(answer)) => understand(&what, &answer),
            Ok(Err(error)) => Err(format!("the sidecar's admin address did not answer {what}: {error}")),
            Err(_) => Err(format!("the sidecar's admin address did not answer {what} in time")),
        }
    }
}

fn understand(what: &str, answer: &Response<Bytes>) -> Result<Value, String> {
    let (status, body) = (answer.status(), answer.body());
    if !status.is_success() {
        return Err(format!("the sidecar answered {what} with {status}: {}", String::from_utf8_lossy(body)));
    }
    if body.is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_slice(body).map_err(|error| format!("the sidecar answered {what} without JSON: {error}"))
}
