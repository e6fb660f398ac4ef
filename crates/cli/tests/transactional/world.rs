//! A database, the service on it, and the sidecar in front of the service.

use std::net::SocketAddr;

use oncegate_servers::PostgresDatabase;
use oncegate_testkit::until;
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Connection as _, Row as _};
use tokio::net::TcpSocket;
use tokio::process::Command;

use crate::relay::Relay;
use crate::support::{
    Message, Process, Sidecar, Wire, ask, express_orders, fastapi_orders, request, sidecar,
};

/// A database with Oncegate's schema.
pub(crate) struct Database(PostgresDatabase);

impl Database {
    pub(crate) async fn new() -> Self {
        let database = Self(tokio::task::spawn_blocking(PostgresDatabase::fresh).await.unwrap().unwrap());
        let mut apply = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        apply.args(["schema", "apply", "postgres"]).env("ONCEGATE_STORE", database.url());
        let output = apply.output().await.unwrap();
        assert!(output.status.success(), "{output:?}");
        database
    }

    pub(crate) fn port(&self) -> u16 {
        self.0.server.port()
    }

    pub(crate) fn url(&self) -> String {
        self.0.url()
    }

    /// The same URL by way of this address.
    fn url_by(&self, address: SocketAddr) -> String {
        self.url().replace(&format!(":{}/", self.port()), &format!(":{}/", address.port()))
    }

    pub(crate) async fn connect(&self) -> PgConnection {
        let mut connection = PgConnection::connect(&self.url()).await.unwrap();
        // A lock that is never freed is an error instead of a standstill.
        run(&mut connection, "SET statement_timeout = '60s'").await;
        connection
    }

    /// The first column of the only row.
    pub(crate) async fn number(&self, sql: &str) -> i64 {
        let row = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).fetch_one(&mut self.connect().await).await;
        row.unwrap().get(0)
    }

    /// A sidecar on this database that leaves completion to the service at this address.
    pub(crate) async fn sidecar(&self, to: SocketAddr, flags: &[&str], failpoint: &str) -> Sidecar {
        let mut command = sidecar(&format!("http://{to}"));
        // The store replies late if the machine is busy, and not because it waits for a lock.
        command.env("ONCEGATE_STORE", self.url()).args(["--completion=upstream", "--scope=single-tenant"]);
        Sidecar::run(command.args(flags).env("ONCEGATE_FAILPOINT", failpoint)).await
    }
}

pub(crate) async fn run(connection: &mut PgConnection, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(connection).await.unwrap();
}

/// The example services.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Express,
    Fastapi,
}

/// The operations of the example services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Completes its record with the response.
    Order,
    /// Completes its record without the response.
    Pay,
}

impl Operation {
    pub(crate) const BOTH: [Self; 2] = [Self::Order, Self::Pay];

    pub(crate) fn request(self, key: &str) -> String {
        let key = format!("Idempotency-Key: {key}");
        let fields = [&*key, "Content-Type: application/json"];
        match self {
            Self::Order => request("POST", "/orders", &fields, ORDER),
            Self::Pay => request("POST", "/orders/1/pay", &fields, "{}"),
        }
    }

    const fn table(self) -> &'static str {
        match self {
            Self::Order => "orders",
            Self::Pay => "charges",
        }
    }
}

const ORDER: &str = r#"{"customer":"Ada","items":[{"sku":"tea","quantity":2,"price_cents":450}]}"#;

/// The point at which a service is stopped inside its database.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stop {
    BeforeTheRow = 1,
    AfterTheRow = 2,
    /// COMMIT was sent, and the database executes it.
    WhileItCommits = 3,
}

pub(crate) struct World {
    pub(crate) kind: Kind,
    pub(crate) database: Database,
    pub(crate) relay: Relay,
    /// Keeps the service's port while the service is away.
    _reserved: TcpSocket,
    pub(crate) service: Process,
    pub(crate) at: SocketAddr,
    pub(crate) sidecar: Sidecar,
}

impl World {
    pub(crate) async fn start(kind: Kind, flags: &[&str]) -> Self {
        Self::start_with(kind, flags, "").await
    }

    pub(crate) async fn start_with(kind: Kind, flags: &[&str], failpoint: &str) -> Self {
        let database = Database::new().await;
        let relay = Relay::to(database.port()).await;
        let reserved = TcpSocket::new_v4().unwrap();
        // The services' own sockets set it as well; so both may bind the port, as long as only one listens.
        reserved.set_reuseaddr(true).unwrap();
        reserved.bind(([127, 0, 0, 1], 0).into()).unwrap();
        let port = reserved.local_addr().unwrap().port();
        let (service, at) = serve(kind, &database, &relay, port).await;
        let sidecar = database.sidecar(at, flags, failpoint).await;
        let world = Self { kind, database, relay, _reserved: reserved, service, at, sidecar };
        // The order that the payments pay for.
        ask(at, &request("POST", "/orders", &["Content-Type: application/json"], ORDER))
            .await
            .has_status(201);
        world.make_stops().await;
        world
    }

    /// Makes writes to these tables wait for the lock with the stop's number.
    async fn make_stops(&self) {
        let mut connection = self.database.connect().await;
        run(
            &mut connection,
            "CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 PERFORM pg_advisory_xact_lock_shared(TG_ARGV[0]::bigint);
                 RETURN NEW;
             END $$",
        )
        .await;
        for table in Operation::BOTH.map(Operation::table) {
            run(
                &mut connection,
                &format!(
                    "CREATE TRIGGER before_row BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION stop(1);
                     CREATE TRIGGER after_row AFTER INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION stop(2);
                     CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON {table} DEFERRABLE INITIALLY DEFERRED
                         FOR EACH ROW EXECUTE FUNCTION stop(3)"
                ),
            )
            .await;
        }
    }

    /// Services that reach this stop stay there until the connection is dropped or closed.
    pub(crate) async fn hold(&self, stop: Stop) -> PgConnection {
        let mut connection = self.database.connect().await;
        run(&mut connection, &format!("SELECT pg_advisory_lock({})", stop as i32)).await;
        connection
    }

    pub(crate) async fn a_service_is_held(&self) {
        until("a service is at the stop", async || {
            let waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND
                 database = (SELECT oid FROM pg_database WHERE datname = current_database())";
            self.database.number(waiting).await > 0
        })
        .await;
    }

    /// Sends the request, and does not wait for the response.
    pub(crate) async fn send(&self, operation: Operation, key: &str) -> Wire {
        let mut client = self.sidecar.connect().await;
        client.send(operation.request(key)).await;
        client
    }

    pub(crate) async fn ask(&self, operation: Operation, key: &str) -> Message {
        self.sidecar.ask(&operation.request(key)).await
    }

    /// Waits until this many payments are committed.
    pub(crate) async fn has_committed(&self, payments: i64) {
        until("the operation is committed", async || self.effects(Operation::Pay).await == payments).await;
    }

    /// Sends the request again until it is no longer in progress.
    pub(crate) async fn retry(&self, operation: Operation, key: &str) -> Message {
        let mut response = Message::default();
        until("the request is no longer in progress", async || {
            response = self.ask(operation, key).await;
            response.status() != 409
        })
        .await;
        response
    }

    pub(crate) async fn restart_service(&mut self) {
        (self.service, self.at) = serve(self.kind, &self.database, &self.relay, self.at.port()).await;
    }

    pub(crate) async fn restart_sidecar(&mut self, flags: &[&str]) {
        self.sidecar = self.database.sidecar(self.at, flags, "").await;
    }

    /// The number of effects of the operation, without the order that the payments pay for.
    pub(crate) async fn effects(&self, operation: Operation) -> i64 {
        let table = operation.table();
        let count = self.database.number(&format!("SELECT count(*) FROM {table}")).await;
        if operation == Operation::Order { count - 1 } else { count }
    }

    /// Asserts that the operation is done after `before` earlier effects, or not done; see the two methods below.
    pub(crate) async fn has_ended(&self, is_done: bool, operation: Operation, key: &str, before: i64) {
        if is_done {
            self.is_done(operation, key, before + 1).await;
        } else {
            self.is_not_done(operation, key, before).await;
        }
    }

    /// Asserts that the operation took effect this often, and that a retry is answered from the record.
    pub(crate) async fn is_done(&self, operation: Operation, key: &str, effects: i64) {
        let response = self.retry(operation, key).await;
        match operation {
            Operation::Order => {
                assert!(response.has_status(201).is_replay(), "{:?}", response.head);
                let location = format!("/orders/{}", response.json()["id"]);
                assert_eq!(response.get("location"), Some(&*location));
                assert_eq!(response.json()["customer"], "Ada");
            }
            Operation::Pay => {
                response.is_problem(422, "replay-unavailable");
            }
        }
        assert_eq!(self.effects(operation).await, effects);
    }

    /// Asserts that the operation took no effect yet, that a retry executes it, and that the next retry gets the stored response.
    pub(crate) async fn is_not_done(&self, operation: Operation, key: &str, effects: i64) {
        let response = self.retry(operation, key).await;
        assert!(!response.has_status(201).is_replay(), "{:?}", response.head);
        let again = self.ask(operation, key).await;
        assert!(again.has_status(201).is_replay(), "{:?}", again.head);
        assert_eq!(again.body, response.body);
        assert_eq!(self.effects(operation).await, effects + 1);
    }
}

pub(crate) async fn serve(
    kind: Kind,
    database: &Database,
    relay: &Relay,
    port: u16,
) -> (Process, SocketAddr) {
    let mut command = match kind {
        Kind::Express => express_orders("transactional.js"),
        Kind::Fastapi => fastapi_orders("transactional.py"),
    };
    command.env("PORT", port.to_string()).env("DATABASE_URL", database.url_by(relay.address));
    let mut service = Process::start(&mut command);
    let line = service.first_line().await;
    let at = line.strip_prefix("listening on http://").unwrap_or_else(|| panic!("{line}"));
    (service, at.parse().unwrap())
}
