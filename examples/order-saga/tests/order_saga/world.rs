//! Four processes, and what they wrote down.

use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

use oncegate_servers::{ServiceResponse, send, until};
use serde_json::Value;

/// A process that listens.
pub(crate) struct Process {
    child: Child,
    pub(crate) address: String,
}

impl Process {
    fn start(command: &mut Command) -> Option<Self> {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let Some(address) = line.trim().strip_prefix("listening on http://") else {
            child.wait().unwrap();
            return None;
        };
        Some(Self { address: address.to_owned(), child })
    }

    /// As `kill -9` does it.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn wait(&mut self) {
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn program(role: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_order-saga"));
    command.arg(role);
    command
}

/// One of those that the shop calls.
pub(crate) struct Other {
    role: &'static str,
    ledger: PathBuf,
    process: Process,
}

impl Other {
    fn start(role: &'static str, dir: &Path) -> Self {
        let ledger = dir.join(format!("{role}.jsonl"));
        let process = Process::start(program(role).arg("--ledger").arg(&ledger)).unwrap();
        Self { role, ledger, process }
    }

    /// Starts it again where it was.
    pub(crate) fn restart(&mut self) {
        let port = self.process.address.rsplit(':').next().unwrap().to_owned();
        // An outgoing connection of another process may have the port for a moment.
        self.process = until("the port is free", || {
            Process::start(program(self.role).args(["--port", &port, "--ledger"]).arg(&self.ledger))
        });
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill();
    }

    /// Waits until it has died.
    pub(crate) fn wait(&mut self) {
        self.process.wait();
    }

    /// The next call of this action comes to this.
    pub(crate) fn arm(&self, action: &str, fault: &str) {
        let line = format!("PUT /faults/{action}");
        let response = send(&self.process.address, &line, "", &format!("{fault:?}")).unwrap();
        assert_eq!(response.status, 200, "{response:?}");
    }

    /// The number of faults so far.
    pub(crate) fn caught_so_far(&self) -> usize {
        self.state()["caught"].as_array().unwrap().len()
    }

    /// The number of calls of this action since the service started, with or without an effect.
    pub(crate) fn calls(&self, action: &str) -> u64 {
        self.state()["calls"][action].as_u64().unwrap_or_default()
    }

    fn state(&self) -> Value {
        let response = send(&self.process.address, "GET /faults", "", "").unwrap();
        serde_json::from_str(&response.body).unwrap()
    }

    /// Waits until the first fault happened: the shop is at that point.
    pub(crate) fn caught(&self, action: &str) {
        until(&format!("{action} is called"), || (self.caught_so_far() > 0).then_some(()));
    }

    /// The effects in order, from its file.
    pub(crate) fn effects(&self) -> Vec<String> {
        self.lines().iter().map(|line| line["action"].as_str().unwrap().to_owned()).collect()
    }

    /// The number of effects for this item.
    pub(crate) fn count(&self, item: &str) -> usize {
        self.lines().iter().filter(|line| line["about"]["item"] == item).count()
    }

    fn lines(&self) -> Vec<Value> {
        let text = fs::read_to_string(&self.ledger).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// The options of a shop.
#[derive(Clone, Copy)]
pub(crate) struct Shop {
    pub(crate) lease_ms: u64,
    pub(crate) response_timeout_ms: u64,
    /// 0 for never.
    pub(crate) complete_every_ms: u64,
}

impl Default for Shop {
    /// One that lives, and keeps its orders however slow the machine is.
    fn default() -> Self {
        Self { lease_ms: 60_000, response_timeout_ms: 60_000, complete_every_ms: 0 }
    }
}

impl Shop {
    /// One that is killed, and leaves its orders to others soon.
    pub(crate) fn doomed() -> Self {
        Self { lease_ms: 1500, ..Self::default() }
    }

    /// One that goes on with what others left.
    pub(crate) fn completing() -> Self {
        Self { complete_every_ms: 50, ..Self::default() }
    }
}

/// The three that are called, and a directory for everything.
pub(crate) struct World {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) stock: Other,
    pub(crate) bank: Other,
    pub(crate) carrier: Other,
}

impl World {
    pub(crate) fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let [stock, bank, carrier] = ["stock", "bank", "carrier"].map(|role| Other::start(role, dir.path()));
        Self { dir, stock, bank, carrier }
    }

    /// A shop with records of its own, in this directory of the world.
    pub(crate) fn shop(&self, how: Shop) -> Process {
        self.shop_on(how, self.dir.path().join("records").to_str().unwrap())
    }

    pub(crate) fn shop_on(&self, how: Shop, store: &str) -> Process {
        let log = OpenOptions::new().create(true).append(true).open(self.log()).unwrap();
        let mut command = program("shop");
        command.args(["--store", store]).stderr(log);
        for other in [&self.stock, &self.bank, &self.carrier] {
            command.arg(format!("--{}", other.role)).arg(format!("http://{}", other.process.address));
        }
        let numbers = [
            ("--lease-ms", how.lease_ms),
            ("--response-timeout-ms", how.response_timeout_ms),
            ("--complete-every-ms", how.complete_every_ms),
        ];
        for (flag, number) in numbers {
            command.args([flag, &number.to_string()]);
        }
        Process::start(&mut command).expect("the shop starts")
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("shop.log")
    }

    /// Waits until an attempt of this number has begun at any order.
    pub(crate) fn attempt(&self, number: u32) {
        until(&format!("attempt {number}"), || {
            let log = fs::read_to_string(self.log()).unwrap();
            log.contains(&format!("attempt {number}\n")).then_some(())
        });
    }

    /// The service that has this action.
    pub(crate) fn other(&mut self, action: &str) -> &mut Other {
        match action {
            "reserve" | "free" => &mut self.stock,
            "charge" | "refund" => &mut self.bank,
            _ => &mut self.carrier,
        }
    }

    pub(crate) fn effects(&self) -> [Vec<String>; 3] {
        [&self.stock, &self.bank, &self.carrier].map(Other::effects)
    }
}

/// An order.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) key: String,
    pub(crate) customer: &'static str,
    pub(crate) item: String,
    pub(crate) address: &'static str,
}

impl Order {
    /// One that can be shipped.
    pub(crate) fn good() -> Self {
        Self { key: "order-1".into(), customer: "ada", item: "book".into(), address: "London" }
    }

    /// One that is paid before the carrier refuses it.
    pub(crate) fn refused() -> Self {
        Self { address: "Atlantis", ..Self::good() }
    }

    /// Orders it, once.
    pub(crate) fn send(&self, shop: &str) -> Option<ServiceResponse> {
        let Self { key, customer, item, address } = self;
        let body =
            format!(r#"{{"customer":"{customer}","item":"{item}","cents":500,"address":"{address}"}}"#);
        send(shop, "POST /orders", &format!("idempotency-key: {key}\r\n"), &body)
    }

    /// Orders it in a thread of its own.
    pub(crate) fn spawn(&self, shop: &Process) -> JoinHandle<Option<ServiceResponse>> {
        let (order, shop) = (self.clone(), shop.address.clone());
        std::thread::spawn(move || order.send(&shop))
    }

    /// Orders it until the response is a final one: neither in progress nor to be tried again.
    pub(crate) fn settle(&self, shop: &Process) -> ServiceResponse {
        until("a final response", || {
            self.send(&shop.address).filter(|response| !matches!(response.status, 409 | 503))
        })
    }
}

/// The effects of the other services after an order that was shipped, or taken back.
pub(crate) fn done(is_shipped: bool) -> [Vec<String>; 3] {
    let effects: [&[&str]; 3] = if is_shipped {
        [&["reserve"], &["charge"], &["ship"]]
    } else {
        [&["reserve", "free"], &["charge", "refund"], &[]]
    };
    effects.map(|actions| actions.iter().map(|action| (*action).to_owned()).collect())
}
