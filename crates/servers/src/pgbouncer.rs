//! A PgBouncer of one's own, in front of a PostgreSQL server.

use std::fs::{self, File};
use std::io;
use std::net::TcpStream;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::geteuid;
use tempfile::TempDir;

use crate::port::free_port;
use crate::postgres::{Owner, PostgresServer, WAIT_TIMEOUT};

/// Gives each transaction another session of the server, on a loopback port. Stopped and removed when dropped.
#[derive(Debug)]
pub struct PgBouncer {
    dir: TempDir,
    port: u16,
    user: String,
    child: Child,
}

impl PgBouncer {
    /// In front of all databases of this server, with so many sessions for each of them.
    ///
    /// # Errors
    /// Where PgBouncer is not installed or does not start; with the end of its log.
    pub fn start(server: &PostgresServer, sessions: u16) -> io::Result<Self> {
        let owner = if geteuid().is_root() { Some(Owner::find()?) } else { None };
        let program = program()?;
        // Another process may take the port between the search for a free one and the start of the server.
        for _ in 0..3 {
            if let Ok(bouncer) = Self::try_start(&program, server, sessions, owner) {
                return Ok(bouncer);
            }
        }
        Self::try_start(&program, server, sessions, owner)
    }

    fn try_start(
        program: &Path,
        server: &PostgresServer,
        sessions: u16,
        owner: Option<Owner>,
    ) -> io::Result<Self> {
        let dir = tempfile::Builder::new().prefix("oncegate-pgbouncer-").tempdir()?;
        let port = free_port()?;
        let settings = dir.path().join("pgbouncer.ini");
        // Every client on the loopback may connect, and is the same user to the server.
        let text = format!(
            "[databases]\n* = host=127.0.0.1 port={} user={} password={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = transaction\n\
             default_pool_size = {sessions}\nmax_client_conn = 500\n",
            server.port(),
            server.user(),
            server.password()
        );
        fs::write(&settings, text)?;
        let mut command = Command::new(program);
        command.arg(&settings).current_dir(dir.path()).stdin(Stdio::null());
        if let Some(Owner { uid, gid }) = owner {
            for path in [dir.path(), &settings] {
                chown(path, Some(uid), Some(gid))?;
            }
            command.uid(uid).gid(gid);
        }
        let log = dir.path().join("log");
        let output = File::create(&log)?;
        let child = command.stdout(output.try_clone()?).stderr(output).spawn()?;
        let mut bouncer = Self { dir, port, user: server.user().to_owned(), child };
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            if bouncer.child.try_wait()?.is_some() || Instant::now() > deadline {
                let said = fs::read_to_string(bouncer.dir.path().join("log")).unwrap_or_default();
                return Err(io::Error::other(format!("PgBouncer did not start: {said}")));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(bouncer)
    }

    /// The URL of this database through the pool.
    #[must_use]
    pub fn url_of(&self, database: &str) -> String {
        format!("postgres://{}@127.0.0.1:{}/{database}?sslmode=disable", self.user, self.port)
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        // A destructor cannot report an error.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn program() -> io::Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places: Vec<_> = std::env::split_paths(&path).collect();
    places.push("/usr/sbin".into());
    places.into_iter().map(|dir| dir.join("pgbouncer")).find(|program| program.exists()).ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, "PgBouncer is not installed (Debian package: pgbouncer)")
    })
}
