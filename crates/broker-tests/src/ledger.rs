//! The effects of consumers, in a table without a unique key, so that no second effect is hidden.

use oncegate_postgres::{PostgresOptions, schema};
use oncegate_servers::{PostgresOptions as ServerOptions, PostgresServer};

/// A server with the schema, and a table `ledger (id)` that also records the name of the connection.
pub struct Ledger {
    /// The database server.
    pub server: PostgresServer,
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
        Self { server }
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
        self.server.ask("SELECT count(*) FROM ledger").ok()?.parse().ok()
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
