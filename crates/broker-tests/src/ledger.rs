//! The effects of consumers, in a table without a unique key, so that no second effect is hidden.

use std::sync::{Mutex, PoisonError};

use oncegate_postgres::{PostgresOptions, schema};
use oncegate_servers::{PostgresOptions as ServerOptions, PostgresServer, PostgresSession};

/// A server with the schema, and a table `ledger (id)` that also records the name of the connection.
pub struct Ledger {
    /// The database server.
    pub server: PostgresServer,
    /// Counts the effects: tests ask many times a second, and a new process for each question takes longer than the answer.
    counter: Mutex<Option<PostgresSession>>,
}

impl Ledger {
    /// Starts a server with the schema and the table.
    pub async fn start() -> Self {
        let start = || {
            let mut options = ServerOptions::default();
            options.trust = true;
            // The server ends the transaction of a suspended process, so that others can have its messages.
            options.settings = vec!["idle_in_transaction_session_timeout=3s".to_owned()];
            PostgresServer::start_with(options).unwrap()
        };
        let server = tokio::task::spawn_blocking(start).await.unwrap();
        schema::apply(&PostgresOptions::from_url(&server.url()).unwrap()).await.unwrap();
        server.sql("CREATE TABLE ledger (id text NOT NULL, who text DEFAULT current_setting('application_name'))").unwrap();
        Self { server, counter: Mutex::new(None) }
    }

    /// Returns the URL for a consumer with this name.
    pub fn url(&self, who: &str) -> String {
        format!("{}?application_name={who}", self.server.url())
    }

    /// Returns the number of effects of one consumer.
    pub fn of(&self, who: &str) -> usize {
        self.server.sql(&format!("SELECT count(*) FROM ledger WHERE who = '{who}'")).unwrap().parse().unwrap()
    }

    /// Returns the number of all effects, or `None` while the server is down.
    pub fn effects(&self) -> Option<usize> {
        let mut counter = self.counter.lock().unwrap_or_else(PoisonError::into_inner);
        let mut session = counter.take().or_else(|| self.server.session().ok())?;
        let count = session.run("SELECT count(*) FROM ledger;").ok()?;
        *counter = Some(session);
        count.trim().parse().ok()
    }

    /// Asserts that each of `prefix0` to `prefix{count - 1}` took effect once, and nothing else did.
    pub fn has_once(&self, prefix: &str, count: usize) {
        let told = self.server.sql(&format!(
            "SELECT (SELECT count(*) FROM ledger), (SELECT count(DISTINCT id) FROM ledger), \
             (SELECT count(*) FROM generate_series(0, {count} - 1) n \
              WHERE NOT EXISTS (SELECT FROM ledger WHERE id = '{prefix}' || n))"
        ));
        assert_eq!(told.unwrap(), format!("{count}|{count}|0"), "effects, different ones, missing ones");
        assert_eq!(self.server.sql("SELECT count(*) FROM oncegate.dead_letters").unwrap(), "0");
    }
}
