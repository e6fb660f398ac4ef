//! A database, a broker, and what is in them.

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use oncegate::nats::async_nats::{self, jetstream};
use oncegate_servers::{
    NatsServer, PostgresOptions, PostgresServer, ServiceResponse, free_port, send, until,
};
use serde_json::{Value, json};

use crate::part::Part;

/// The lease of a relay, and the redelivery time of a projector. Short, so that their work is soon taken over after a
/// crash.
const LEASE_MS: &str = "1000";
const ACK_WAIT_MS: &str = "1500";

/// The broker forgets soon what it has: what is published again is in the stream twice.
const DUPLICATE_WINDOW_MS: &str = "100";

/// Returns the metrics of a part.
fn metrics(part: &Part) -> String {
    until("metrics", || {
        send(&part.address(), "GET /metrics", "", "").filter(|response| response.status == 200)
    })
    .body
}

/// Returns one counter of a part.
pub(crate) fn counted(part: &Part, name: &str) -> u64 {
    let metrics = metrics(part);
    let number = metrics.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    number.unwrap_or_else(|| panic!("no {name} in {metrics}"))
}

/// An order of a client, to be placed once.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) key: String,
    pub(crate) customer: String,
    pub(crate) cents: i64,
}

impl Order {
    /// Sends the order until there is a final response, like a client that must not give up.
    pub(crate) fn place(&self, address: &str) -> ServiceResponse {
        let body = json!({ "customer": self.customer, "cents": self.cents }).to_string();
        let key = format!("idempotency-key: {}\r\n", self.key);
        let response = until("an order is answered", || {
            let response = send(address, "POST /orders", &key, &body);
            response.filter(|response| !matches!(response.status, 409 | 503))
        });
        assert_eq!(response.status, 201, "{self:?}: {response:?}");
        let placed: Value = serde_json::from_str(&response.body).unwrap();
        assert_eq!((&placed["customer"], &placed["cents"]), (&json!(self.customer), &json!(self.cents)));
        response
    }
}

/// A database and a broker that are set up, and a directory for the rest.
pub(crate) struct World {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) postgres: PostgresServer,
    pub(crate) nats: NatsServer,
    /// The address of the API, while it runs.
    pub(crate) api: String,
}

impl World {
    pub(crate) fn start() -> Self {
        let mut options = PostgresOptions::default();
        options.settings.push("max_connections=150".to_owned());
        options.trust = true;
        let world = Self {
            dir: tempfile::tempdir().unwrap(),
            postgres: PostgresServer::start_with(options).unwrap(),
            nats: NatsServer::start().unwrap(),
            api: format!("127.0.0.1:{}", free_port().unwrap()),
        };
        let mut setup = world.program("setup");
        setup.args(["--ack-wait-ms", ACK_WAIT_MS, "--duplicate-window-ms", DUPLICATE_WINDOW_MS]);
        setup.arg("--nats").arg(world.nats.url());
        let is_set_up = setup.status().unwrap().success();
        assert!(is_set_up, "{}", world.log());
        world
    }

    /// The program, with the database, writing to a log.
    pub(crate) fn program(&self, role: &str) -> Command {
        let log = OpenOptions::new().create(true).append(true).open(self.dir.path().join("log")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_order-pipeline"));
        command.args([role, "--database", &self.postgres.url()]).stderr(log).env_remove("KILL_AT");
        command
    }

    /// The command of a part that goes on.
    pub(crate) fn part(&self, role: &str) -> Command {
        let mut command = self.program(role);
        match role {
            "api" => command.args(["--port", self.api.rsplit(':').next().unwrap()]),
            "relay" => command.args(["--lease-ms", LEASE_MS, "--nats", &self.nats.url()]),
            _ => command.args(["--nats", &self.nats.url()]),
        };
        command
    }

    /// Returns the log so far.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    pub(crate) fn memory(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the number of messages in the stream, and the number of those that are not acknowledged.
    pub(crate) fn stream(&self) -> (u64, u64) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let ask = async {
            let context = jetstream::new(async_nats::connect(self.nats.url()).await.ok()?);
            let stream = context.get_stream("ORDERS").await.ok()?;
            let consumer = stream.get_consumer::<jetstream::consumer::pull::Config>("totals").await.ok()?;
            let info = consumer.cached_info();
            let left = info.num_pending + info.num_ack_pending as u64;
            Some((stream.cached_info().state.messages, left))
        };
        runtime
            .block_on(async { tokio::time::timeout(Duration::from_secs(10), ask).await.ok().flatten() })
            .expect("NATS answers")
    }

    pub(crate) fn number(&self, query: &str) -> i64 {
        self.postgres.ask(query).unwrap().parse().unwrap()
    }

    /// Waits until every order has its final state.
    pub(crate) fn come_to_rest(&self) {
        until("the outbox is empty", || {
            (self.number("SELECT waiting + refused FROM oncegate.outbox_status()") == 0).then_some(())
        });
        until("everything is acknowledged", || (self.stream().1 == 0).then_some(()));
    }

    /// Asserts that each order exists once, in the projection, too.
    pub(crate) fn holds<'a>(&self, orders: impl IntoIterator<Item = &'a Order>) {
        let mut wanted: Vec<_> =
            orders.into_iter().map(|order| format!("{}|{}", order.customer, order.cents)).collect();
        wanted.sort();
        let ordered = self.postgres.sql("SELECT customer, cents FROM orders").unwrap();
        let mut ordered: Vec<_> = ordered.lines().map(str::to_owned).collect();
        ordered.sort();
        assert!(wanted == ordered, "wanted {}, ordered {}", wanted.len(), ordered.len());
        // Independent of the sequence numbers, the sums equal those of the orders.
        let differs = "SELECT coalesce(o.customer, t.customer), o.*, t.* FROM
            (SELECT customer, count(*) AS orders, sum(cents) AS cents, max(sequence) AS last, min(sequence) AS first
                FROM orders GROUP BY customer) AS o
            FULL JOIN totals AS t ON t.customer = o.customer
            WHERE (o.orders, o.cents, o.last) IS DISTINCT FROM (t.orders, t.cents::numeric, t.last_sequence)
                OR o.orders <> o.last OR o.first <> 1";
        assert_eq!(self.postgres.sql(differs).unwrap(), "", "{}", self.log());
        for table in ["oncegate.outbox", "oncegate.dead_letters", "oncegate.buffered_events"] {
            assert_eq!(self.number(&format!("SELECT count(*) FROM {table}")), 0, "{table}: {}", self.log());
        }
    }
}
