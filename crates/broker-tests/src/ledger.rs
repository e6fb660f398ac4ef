//! What took effect, and by whom, in a table without any key: nothing there hides a second effect.

use oncegate_postgres::{PostgresOptions, schema};
use oncegate_servers::{PostgresOptions as ServerOptions, PostgresServer};

/// A server with the contract, and a table `ledger (id)`, which notes the name of the connection by itself.
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
            // A process that stands still in the middle of a transaction holds its messages until then.
            options.settings = vec!["idle_in_transaction_session_timeout=3s".to_owned()];
            PostgresServer::start_with(options).unwrap()
        };
        let server = tokio::task::spawn_blocking(start).await.unwrap();
        schema::apply(&PostgresOptions::new(&server.url()).unwrap()).await.unwrap();
        server.sql("CREATE TABLE ledger (id text NOT NULL, who text DEFAULT current_setting('application_name'))").unwrap();
        Self { server }
    }

    /// How a consumer of this name reaches it.
    pub fn url(&self, who: &str) -> String {
        format!("{}?application_name={who}", self.server.url())
    }

    /// How many effects this one has.
    pub fn of(&self, who: &str) -> usize {
        self.server.sql(&format!("SELECT count(*) FROM ledger WHERE who = '{who}'")).unwrap().parse().unwrap()
    }

    /// How many effects there are. `None` while the server is away.
    pub fn effects(&self) -> Option<usize> {
        self.server.sql("SELECT count(*) FROM ledger").ok()?.parse().ok()
    }

    /// That each of `prefix0` to `prefix{count - 1}` took effect once, and nothing else did.
    pub fn has_once(&self, prefix: &str, count: usize) {
        let told = self.server.sql(&format!(
            "SELECT (SELECT count(*) FROM ledger), (SELECT count(DISTINCT id) FROM ledger), \
             (SELECT count(*) FROM generate_series(0, {count} - 1) n \
              WHERE NOT EXISTS (SELECT FROM ledger WHERE id = '{prefix}' || n))"
        ));
        assert_eq!(told.unwrap(), format!("{count}|{count}|0"), "effects, different ones, missing ones");
    }
}
