//! A database for each test, on one server for all tests of a program.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::postgres::{PostgresOptions, PostgresServer};

static SERVER: Mutex<Weak<PostgresServer>> = Mutex::new(Weak::new());
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A database of its own, with nothing in it, on a server that all of a program share for as long as one of them holds it. The
/// server checks no passwords.
#[derive(Debug)]
pub struct PostgresDatabase {
    /// The server.
    pub server: Arc<PostgresServer>,
    /// The name of the database.
    pub name: String,
}

impl PostgresDatabase {
    /// Starts the server, where it does not run, and makes a database. Blocks for as long as that takes.
    ///
    /// # Errors
    /// As for [`PostgresServer::start`].
    pub fn fresh() -> io::Result<Self> {
        let server = shared()?;
        let name = format!("test_{}", NUMBER.fetch_add(1, Ordering::SeqCst));
        server.session()?.run(&format!("CREATE DATABASE {name};"))?;
        Ok(Self { server, name })
    }

    /// The URL of the database.
    #[must_use]
    pub fn url(&self) -> String {
        self.server.url_of(&self.name)
    }
}

fn shared() -> io::Result<Arc<PostgresServer>> {
    let mut shared = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(server) = shared.upgrade() {
        return Ok(server);
    }
    // Its clients are built without optimization, and open thousands of connections.
    let options = PostgresOptions { trust: true, ..PostgresOptions::default() };
    let server = Arc::new(PostgresServer::start_with(options)?);
    *shared = Arc::downgrade(&server);
    Ok(server)
}
