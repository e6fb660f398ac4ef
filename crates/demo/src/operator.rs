//! The operator: looks up the payments whose outcome is unknown in the ledger, and reports them to the sidecar.
//!
//! A record is resolved only by the ledger. If there is a charge, its receipt is the response. If there is no charge at two
//! checks with some time between them, the key is free again.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::exchange::ask_admin;
use crate::service::{Charge, Finding, Ledger};
use crate::stage::{Stage, Style};

/// The time without a charge in the ledger after which the operator concludes that there will be none.
const SECOND_CHECK: Duration = Duration::from_millis(500);

/// The longest time for which the operator asks again while the sidecar says that its store is out of reach.
const OUTAGE: Duration = Duration::from_secs(60);

pub(crate) struct Operator {
    pub(crate) admin: SocketAddr,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) stage: Arc<Stage>,
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

    /// All records of this run whose outcome is unknown, from all pages. A shared store may have other records, too.
    async fn unknown(&self) -> Result<Vec<String>, String> {
        let (mut records, mut cursor) = (Vec::new(), String::new());
        let query = format!("state=unknown&operation=POST%20{}", self.stage.path);
        loop {
            let page = self.ask(Method::GET, &format!("/v1/keys?{query}{cursor}"), None).await?;
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
        self.stage.figures().resolved_completed += 1;
        let Charge { intent, charge, .. } = charge;
        let text = format!("the operator finds {intent} in the ledger ({charge}) → that is the response");
        self.stage.say("resolved", Style::Good, &text);
        Ok(())
    }

    async fn release(&self, record: &str) -> Result<(), String> {
        let resolution = json!({ "outcome": "released", "reason": "the ledger has no charge" });
        self.resolve(record, resolution).await?;
        self.stage.figures().resolved_released += 1;
        let short = record.get(..8).unwrap_or(record);
        let text = format!("the operator finds no charge for record {short} → its key is free again");
        self.stage.say("released", Style::Good, &text);
        Ok(())
    }

    async fn resolve(&self, record: &str, resolution: Value) -> Result<(), String> {
        self.ask(Method::POST, &format!("/v1/keys/{record}/resolve"), Some(resolution)).await?;
        self.settled.send_modify(|settled| *settled += 1);
        Ok(())
    }

    async fn ask(&self, method: Method, path: &str, body: Option<Value>) -> Result<Value, String> {
        let request = format!("{method} {path}");
        let body = body.map_or_else(String::new, |body| body.to_string());
        let began = Instant::now();
        let response = loop {
            let response = ask_admin(self.admin, method.clone(), path, body.clone())
                .await
                .map_err(|error| format!("the sidecar's admin address did not answer {request}: {error}"))?;
            // On a busy machine the store may not answer in time. A refusal has changed nothing.
            if response.status() != StatusCode::SERVICE_UNAVAILABLE || began.elapsed() > OUTAGE {
                break response;
            }
            tokio::time::sleep(SECOND_CHECK).await;
        };
        let (status, body) = (response.status(), response.body());
        if !status.is_success() {
            let body = String::from_utf8_lossy(body);
            return Err(format!("the sidecar answered {request} with {status}: {body}"));
        }
        serde_json::from_slice(body)
            .map_err(|error| format!("the sidecar answered {request} without JSON: {error}"))
    }
}
