//! A PostgreSQL server of one's own.

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, geteuid, kill_process};
use tempfile::TempDir;

use crate::example::target;
use crate::port::free_port;
use crate::process;

/// The bound on the start or the stop of a server. Test machines are busy.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(300);

/// The one user.
const USER: &str = "oncegate";

/// The password of the one user, so that tests see where one gets to.
const PASSWORD: &str = "pw-4f1c";

/// The options of a server.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct PostgresOptions {
    /// Flushes commits to the disk. Without it, a crash of the machine loses them; a crash of the server does not.
    pub fsync: bool,
    /// Further settings, such as `max_connections=10`.
    pub settings: Vec<String>,
    /// Accepts every user of this machine without a password. A client that is built without optimization needs a tenth of
    /// a second to check a password.
    pub trust: bool,
}

/// A server with a cluster of its own, on a loopback port. Its superuser is `oncegate`. Stopped and removed when dropped.
#[derive(Debug)]
pub struct PostgresServer {
    bin: PathBuf,
    dir: TempDir,
    owner: Option<Owner>,
    port: u16,
    options: PostgresOptions,
    child: Option<Child>,
    /// The session of [`PostgresServer::ask`].
    asking: Mutex<Option<PostgresSession>>,
}

/// The user as which the server runs if this process is root: the server refuses to run as root.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl PostgresServer {
    /// A server that flushes nothing.
    ///
    /// # Errors
    /// Where PostgreSQL is not installed or does not start; with the end of its log.
    pub fn start() -> io::Result<Self> {
        Self::start_with(PostgresOptions::default())
    }

    /// A server with these options.
    ///
    /// # Errors
    /// As for [`PostgresServer::start`].
    pub fn start_with(options: PostgresOptions) -> io::Result<Self> {
        let owner = if geteuid().is_root() { Some(Owner::find()?) } else { None };
        let dir = tempfile::Builder::new().prefix("oncegate-postgres-").tempdir()?;
        if let Some(Owner { uid, gid }) = owner {
            chown(dir.path(), Some(uid), Some(gid))?;
        }
        let mut server =
            Self { bin: binaries()?, dir, owner, port: 0, options, child: None, asking: Mutex::default() };
        server.init()?;
        // Another process may take the port between the search for a free one and the start of the server.
        for attempt in 0.. {
            server.port = free_port()?;
            match server.start_again() {
                Err(error) if attempt >= 3 => return Err(error),
                Err(_) => {}
                Ok(()) => break,
            }
        }
        Ok(server)
    }

    /// The URL of the database that every cluster has.
    #[must_use]
    pub fn url(&self) -> String {
        self.url_of("postgres")
    }

    /// The URL of this database.
    #[must_use]
    pub fn url_of(&self, database: &str) -> String {
        format!("postgres://{USER}:{PASSWORD}@127.0.0.1:{}/{database}", self.port)
    }

    /// The port on 127.0.0.1.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// The name of the superuser.
    #[must_use]
    pub const fn user(&self) -> &'static str {
        USER
    }

    /// The password of the superuser.
    #[must_use]
    pub const fn password(&self) -> &'static str {
        PASSWORD
    }

    /// Runs statements as the superuser, and gives what they answer: a line for each row, with `|` between the columns.
    ///
    /// # Errors
    /// Where it cannot be reached, or refuses one of them.
    pub fn sql(&self, statements: &str) -> io::Result<String> {
        let mut command = self.command("psql");
        command.args(["-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", "-d", &self.url(), "-c", statements]);
        let output = command.output()?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned());
        }
        Err(io::Error::other(format!("psql: {}", String::from_utf8_lossy(&output.stderr))))
    }

    /// Returns the reply to a query, which changes nothing. All queries share a session: a test that asks again and again spends
    /// more time on a process for each question than on the replies.
    ///
    /// # Errors
    /// If the server cannot be reached, or refuses the query.
    pub fn ask(&self, query: &str) -> io::Result<String> {
        let mut asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        let query = format!("{query};");
        // The server may have been started again since the last question.
        let known = asking.take().and_then(|mut session| Some((session.run(&query).ok()?, session)));
        let (reply, session) = match known {
            Some(known) => known,
            None => {
                let mut session = self.session()?;
                (session.run(&query)?, session)
            }
        };
        *asking = Some(session);
        Ok(reply.trim_end().to_owned())
    }

    /// Its process, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Stops it and all of its processes, or lets them go on: it takes connections and answers nothing.
    ///
    /// # Errors
    /// Where it does not run.
    pub fn freeze(&self, freeze: bool) -> io::Result<()> {
        let pid = self.pid().ok_or_else(|| io::Error::other("PostgreSQL does not run"))?;
        let send = if freeze { process::freeze } else { process::thaw };
        // First the one that would make others.
        send(pid)?;
        for child in fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?.split_whitespace() {
            if let Ok(child) = child.parse() {
                // It may have ended.
                let _ = send(child);
            }
        }
        Ok(())
    }

    /// A session such as an operator has, with `psql`. It ends when it is dropped.
    ///
    /// # Errors
    /// Where there is no `psql`, or the server takes no connection.
    pub fn session(&self) -> io::Result<PostgresSession> {
        let mut command = self.command("psql");
        command.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", &self.url()]);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("psql has no pipes"));
        };
        let mut session = PostgresSession { child, to: Some(to), from: BufReader::new(from) };
        session.run("SELECT 1;")?;
        Ok(session)
    }

    /// Ends it without any order, as a crash would. What was committed is there when it is started again.
    ///
    /// # Errors
    /// Where it does not end.
    pub fn stop_immediately(&mut self) -> io::Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
            kill_process(pid, Signal::QUIT)?;
        }
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while child.try_wait()?.is_none() {
            if Instant::now() > deadline {
                child.kill()?;
                child.wait()?;
                return Err(io::Error::other("PostgreSQL did not stop; it was killed"));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Starts it again after [`PostgresServer::stop_immediately`], on the same port and directory, and waits until it takes
    /// connections.
    ///
    /// # Errors
    /// Where it does not start; with the end of its log.
    pub fn start_again(&mut self) -> io::Result<()> {
        let log = File::options().create(true).append(true).open(self.log())?;
        let fsync = if self.options.fsync { "fsync=on" } else { "fsync=off" };
        let mut command = self.command("postgres");
        command.arg("-D").arg(self.data()).args(["-p", &self.port.to_string()]);
        command.args(["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]);
        command.args(["-c", fsync, "-c", "shared_buffers=32MB", "-c", "max_connections=60"]);
        for setting in &self.options.settings {
            command.args(["-c", setting]);
        }
        let mut child = command.stdout(log.try_clone()?).stderr(log).spawn()?;
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            if child.try_wait()?.is_some() {
                return Err(self.failed("ended while it started"));
            }
            if self.is_ready(child.id()) {
                break;
            }
            if Instant::now() > deadline {
                child.kill()?;
                child.wait()?;
                return Err(self.failed("did not start in time"));
            }
            thread::sleep(Duration::from_millis(10));
        }
        self.child = Some(child);
        Ok(())
    }

    /// The file in which a server says who it is; its eighth line is how far it got.
    fn is_ready(&self, pid: u32) -> bool {
        let text = fs::read_to_string(self.data().join("postmaster.pid")).unwrap_or_default();
        let lines: Vec<_> = text.lines().map(str::trim).collect();
        lines.first() == Some(&pid.to_string().as_str()) && lines.get(7) == Some(&"ready")
    }

    /// Makes the directory of the cluster: a copy of the first one that had the same settings, since a copy takes a quarter of
    /// the time of `initdb`.
    fn init(&self) -> io::Result<()> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let method = if self.options.trust { "trust" } else { "scram-sha-256" };
        let settings = ["-U", USER, "-A", method, "-E", "UTF8", "--locale=C", "--no-sync"];
        let version = self.command("initdb").arg("--version").output()?.stdout;
        let name = format!("{} {} {PASSWORD}", String::from_utf8_lossy(&version).trim(), settings.join(" "));
        let template = target().join(name.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.', "_"));
        if template.exists() {
            return copy(&template, &self.data());
        }
        let password = self.dir.path().join("password");
        fs::write(&password, PASSWORD)?;
        if let Some(Owner { uid, gid }) = self.owner {
            chown(&password, Some(uid), Some(gid))?;
        }
        let mut command = self.command("initdb");
        command.arg("-D").arg(self.data()).arg("--pwfile").arg(&password).args(settings);
        let output = command.output()?;
        if !output.status.success() {
            return Err(io::Error::other(format!("initdb: {}", String::from_utf8_lossy(&output.stderr))));
        }
        // Under another name first, because a template is complete when it is there.
        let number = NUMBER.fetch_add(1, Ordering::SeqCst);
        fs::create_dir_all(target())?;
        let part = template.with_extension(format!("{}-{number}", std::process::id()));
        copy(&self.data(), &part)?;
        if fs::rename(&part, &template).is_err() {
            // Another process was first.
            fs::remove_dir_all(&part)?;
        }
        Ok(())
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.bin.join(program));
        command.current_dir(self.dir.path()).stdin(Stdio::null()).env("LC_ALL", "C");
        if let Some(Owner { uid, gid }) = self.owner {
            command.uid(uid).gid(gid);
        }
        command
    }

    fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    fn failed(&self, what: &str) -> io::Error {
        let log = fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<_> = log.lines().rev().take(5).collect();
        io::Error::other(format!(
            "PostgreSQL {what}: {}",
            lines.into_iter().rev().collect::<Vec<_>>().join("; ")
        ))
    }
}

/// A session of [`PostgresServer::session`].
#[derive(Debug)]
pub struct PostgresSession {
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
}

impl PostgresSession {
    /// Runs statements, each with its semicolon, and gives what they say.
    ///
    /// # Errors
    /// Where one fails, with what the server says; the session is over then.
    pub fn run(&mut self, sql: &str) -> io::Result<String> {
        const END: &str = "-- that was all";
        let sent = match &mut self.to {
            Some(to) => writeln!(to, "{sql}\n\\echo '{END}'").and_then(|()| to.flush()),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        };
        let mut said = String::new();
        loop {
            let mut line = String::new();
            if sent.is_err() || self.from.read_line(&mut line)? == 0 {
                let mut why = String::new();
                if let Some(mut errors) = self.child.stderr.take() {
                    errors.read_to_string(&mut why)?;
                }
                return Err(io::Error::other(why));
            }
            if line.trim_end() == END {
                return Ok(said);
            }
            said += &line;
        }
    }
}

impl Drop for PostgresSession {
    fn drop(&mut self) {
        // It ends when its input ends. A destructor cannot report an error.
        drop(self.to.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        // A destructor cannot report an error.
        let _ = self.stop_immediately();
    }
}

impl Owner {
    pub(crate) fn find() -> io::Result<Self> {
        let passwd = fs::read_to_string("/etc/passwd")?;
        let named = |name: &str| {
            passwd.lines().find_map(|line| {
                let fields: Vec<_> = line.split(':').collect();
                match fields.as_slice() {
                    [found, _, uid, gid, ..] if *found == name => {
                        Some(Self { uid: uid.parse().ok()?, gid: gid.parse().ok()? })
                    }
                    _ => None,
                }
            })
        };
        named("postgres").or_else(|| named("nobody")).ok_or_else(|| {
            io::Error::other("PostgreSQL does not run as root, and there is no user for it, such as postgres")
        })
    }
}

/// Copies a directory with the owners of its files.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let output = Command::new("cp").arg("-a").arg(from).arg(to).output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(format!("cp: {}", String::from_utf8_lossy(&output.stderr))))
}

/// The directory of the programs of the newest installed version.
fn binaries() -> io::Result<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten() {
        let bin = entry.path().join("bin");
        let version: Option<u32> = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some(version) = version
            && is_there(&bin)
        {
            found.push((version, bin));
        }
    }
    let on_path = || {
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path).find(|dir| is_there(dir))
    };
    found.into_iter().max().map(|(_, bin)| bin).or_else(on_path).ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, "PostgreSQL is not installed (Debian package: postgresql)")
    })
}

fn is_there(bin: &Path) -> bool {
    bin.join("initdb").exists() && bin.join("postgres").exists()
}
