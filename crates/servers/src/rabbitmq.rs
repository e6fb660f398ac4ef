//! A RabbitMQ server of one's own.

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::port::free_port;
use crate::postgres::WAIT_TIMEOUT;
use crate::process;

/// The options of a broker.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct RabbitOptions {
    /// Further settings, such as `consumer_timeout, 2000`, in the words of its advanced configuration.
    pub settings: Vec<String>,
}

/// A broker with a node of its own, on loopback ports, without plugins. Its user is `guest`. Stopped and removed when dropped.
///
/// Erlang's nodes find each other through a daemon; each broker here has one of its own, so that nothing is left behind.
#[derive(Debug)]
pub struct RabbitServer {
    home: PathBuf,
    dir: TempDir,
    ports: Ports,
    options: RabbitOptions,
    daemon: Option<Child>,
    child: Option<Child>,
    /// The process that counts messages.
    counter: Mutex<Option<Counter>>,
}

/// A node of Erlang that asks the broker what clients of AMQP cannot: `rabbitmqctl` takes a second to start each time.
#[derive(Debug)]
struct Counter {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

/// The program of the counter: for each line with the name of a queue it prints the number of its messages, delivered or not.
const COUNT: &str = r#"
    Ask = fun(M, F, A) -> rpc:call(Node, M, F, A) end,
    Count = fun(Name) ->
        {ok, Q} = Ask(rabbit_amqqueue, lookup, [{resource, <<"/">>, queue, Name}]),
        case Ask(amqqueue, get_type, [Q]) of
            rabbit_quorum_queue ->
                All = fun rabbit_fifo:query_messages_total/1,
                {ok, {_, N}, _} = Ask(ra, leader_query, [Ask(amqqueue, get_pid, [Q]), All]),
                N;
            rabbit_classic_queue ->
                [{messages, N}] = Ask(rabbit_amqqueue, info, [Q, [messages]]),
                N
        end
    end,
    Loop = fun Loop() ->
        case io:get_line("") of
            Line when is_list(Line) ->
                Name = list_to_binary(string:trim(Line)),
                io:format("~w~n", [try Count(Name) catch _:_ -> unknown end]),
                Loop();
            _ -> halt()
        end
    end,
    Loop().
"#;

#[derive(Clone, Copy, Debug, Default)]
struct Ports {
    amqp: u16,
    nodes: u16,
    daemon: u16,
}

impl RabbitServer {
    /// A broker as it comes.
    ///
    /// # Errors
    /// Where RabbitMQ is not installed or does not start; with the end of what it said.
    pub fn start() -> io::Result<Self> {
        Self::start_with(RabbitOptions::default())
    }

    /// A broker with these options.
    ///
    /// # Errors
    /// As for [`RabbitServer::start`].
    pub fn start_with(options: RabbitOptions) -> io::Result<Self> {
        let dir = tempfile::Builder::new().prefix("oncegate-rabbitmq-").tempdir()?;
        let ports = Ports::default();
        let mut server =
            Self { home: home()?, dir, ports, options, daemon: None, child: None, counter: Mutex::new(None) };
        // Another process may take the port between the search for a free one and the start of the server.
        for attempt in 0.. {
            server.ports = Ports { amqp: free_port()?, nodes: free_port()?, daemon: free_port()? };
            match server.start_again() {
                Err(error) if attempt >= 3 => return Err(error),
                Err(_) => server.end(),
                Ok(()) => break,
            }
        }
        Ok(server)
    }

    /// The URL of its virtual host `/`.
    #[must_use]
    pub fn url(&self) -> String {
        self.url_at(self.ports.amqp)
    }

    /// The same by another port, on which something stands in the way.
    #[must_use]
    pub fn url_at(&self, port: u16) -> String {
        format!("amqp://guest:guest@127.0.0.1:{port}/%2f")
    }

    /// The port on 127.0.0.1.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.ports.amqp
    }

    /// Its process, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Stops it where it stands, or lets it go on: it takes connections and answers nothing.
    ///
    /// # Errors
    /// Where it does not run.
    pub fn freeze(&self, freeze: bool) -> io::Result<()> {
        let pid = self.pid().ok_or_else(|| io::Error::other("RabbitMQ does not run"))?;
        if freeze { process::freeze(pid) } else { process::thaw(pid) }
    }

    /// Waits until the files of the broker name these queues, and all quorum queues. It says that there is a new one some seconds
    /// before it has written so (3.10 does): one that was killed in between does not know the queue, or its messages, when it
    /// is started again.
    ///
    /// # Errors
    /// Where that takes too long.
    pub fn until_queues_are_written(&self, queues: &[&str]) -> io::Result<()> {
        let tables = self.path("data").join(self.node());
        let directory = tables.join("quorum").join(self.node());
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let names = fs::read(directory.join("names.dets"))?;
            let mut on_disk = fs::read_dir(&directory)?.flatten().filter(|entry| entry.path().is_dir());
            let is_named = |queue: fs::DirEntry| has(&names, queue.file_name().as_encoded_bytes());
            // What is new is in the log, and later in the table.
            let mut known = fs::read(tables.join("LATEST.LOG")).unwrap_or_default();
            for table in ["rabbit_durable_queue.DCD", "rabbit_durable_queue.DCL"] {
                known.extend(fs::read(tables.join(table)).unwrap_or_default());
            }
            if on_disk.all(is_named) && queues.iter().all(|queue| has(&known, queue.as_bytes())) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(self.failed("does not write the names of its queues"));
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Ends it at once, as `kill -9` does. What it confirmed is there when it is started again, if its queues
    /// [are](Self::until_queues_are_written).
    pub fn kill(&mut self) {
        end(&mut self.child);
    }

    /// Ends it in order, as an operator does.
    ///
    /// # Errors
    /// Where it does not end in time; it is killed then.
    pub fn stop(&mut self) -> io::Result<()> {
        let Some(child) = &mut self.child else { return Ok(()) };
        if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
            kill_process(pid, Signal::TERM)?;
        }
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while child.try_wait()?.is_none() {
            if Instant::now() > deadline {
                self.kill();
                return Err(io::Error::other("RabbitMQ did not stop; it was killed"));
            }
            thread::sleep(Duration::from_millis(20));
        }
        self.child = None;
        Ok(())
    }

    /// Starts it again after [`kill`](Self::kill) or [`stop`](Self::stop), on the same ports and directory, and waits until it
    /// takes connections.
    ///
    /// # Errors
    /// Where it does not start; with the end of what it said.
    pub fn start_again(&mut self) -> io::Result<()> {
        self.start_daemon()?;
        self.configure()?;
        let log = File::options().create(true).append(true).open(self.log())?;
        let mut command = self.command(self.home.join("sbin/rabbitmq-server"));
        let mut child = command.stdout(log.try_clone()?).stderr(log).spawn()?;
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while !self.is_ready() {
            let ended = child.try_wait()?.is_some();
            if ended || Instant::now() > deadline {
                end(&mut Some(child));
                return Err(self.failed(if ended {
                    "ended while it started"
                } else {
                    "did not start in time"
                }));
            }
            thread::sleep(Duration::from_millis(50));
        }
        self.child = Some(child);
        Ok(())
    }

    /// The number of messages in a queue of the virtual host `/`: those that are ready, and those that are delivered and not
    /// acknowledged, of which clients of AMQP are not told.
    ///
    /// # Errors
    /// Where the broker does not run, or has no such queue.
    pub fn messages(&self, queue: &str) -> io::Result<u64> {
        let mut counter = self.counter.lock().unwrap_or_else(PoisonError::into_inner);
        let mut asked = match counter.take() {
            Some(counter) => counter,
            None => self.start_counter()?,
        };
        writeln!(asked.to, "{queue}")?;
        let mut said = String::new();
        asked.from.read_line(&mut said)?;
        *counter = Some(asked);
        let unknown = || io::Error::other(format!("the number of messages in {queue} is unknown"));
        said.trim().parse().map_err(|_| unknown())
    }

    fn start_counter(&self) -> io::Result<Counter> {
        let node = self.node();
        let mut command = self.command("erl".into());
        command.args(["-sname", &format!("counter-{node}"), "-hidden", "-noshell"]);
        command.args(["-start_epmd", "false", "-kernel", "inet_dist_use_interface", "{127,0,0,1}"]);
        command.args(["-eval", &format!("Node = '{node}', {COUNT}")]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(to), Some(from)) => Ok(Counter { child, to, from: BufReader::new(from) }),
            _ => Err(io::Error::other("erl has no pipes")),
        }
    }

    /// The daemon through which nodes find each other. It knows nothing that a broker started again would miss.
    fn start_daemon(&mut self) -> io::Result<()> {
        if let Some(daemon) = &mut self.daemon
            && daemon.try_wait()?.is_none()
        {
            return Ok(());
        }
        let mut command = self.command("epmd".into());
        command.args(["-port", &self.ports.daemon.to_string(), "-address", "127.0.0.1"]);
        let daemon = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        self.daemon = Some(daemon.map_err(|error| io::Error::other(format!("epmd: {error}")))?);
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while TcpStream::connect(("127.0.0.1", self.ports.daemon)).is_err() {
            if Instant::now() > deadline {
                return Err(self.failed("has no epmd"));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    fn configure(&self) -> io::Result<()> {
        let mut text = format!("listeners.tcp.default = 127.0.0.1:{}\n", self.ports.amqp);
        text += "log.file = false\nlog.console = true\nlog.console.level = warning\n";
        let settings: Vec<_> = self.options.settings.iter().map(|setting| format!("{{{setting}}}")).collect();
        fs::write(self.path("advanced.config"), format!("[{{rabbit, [{}]}}].\n", settings.join(", ")))?;
        fs::write(self.path("rabbitmq.conf"), text)?;
        fs::write(self.path("enabled_plugins"), "[].\n")?;
        // Instead of the one in /etc.
        fs::write(self.path("env.conf"), "")
    }

    /// A program in the surroundings of this broker, and of no other that is installed here.
    fn command(&self, program: PathBuf) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.dir.path()).stdin(Stdio::null()).env_clear();
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
        // Where the secret is by which nodes know each other.
        command.env("HOME", self.dir.path()).env("LANG", "C.UTF-8");
        command.env("ERL_EPMD_PORT", self.ports.daemon.to_string()).env("ERL_EPMD_ADDRESS", "127.0.0.1");
        command.env("RABBITMQ_NODENAME", self.node());
        command.env("RABBITMQ_DIST_PORT", self.ports.nodes.to_string());
        command.env("RABBITMQ_CONF_ENV_FILE", self.path("env.conf"));
        command.env("RABBITMQ_CONFIG_FILE", self.path("rabbitmq.conf"));
        command.env("RABBITMQ_ADVANCED_CONFIG_FILE", self.path("advanced.config"));
        command.env("RABBITMQ_ENABLED_PLUGINS_FILE", self.path("enabled_plugins"));
        command.env("RABBITMQ_MNESIA_BASE", self.path("data")).env("RABBITMQ_LOG_BASE", self.path("logs"));
        let erlang = "-start_epmd false +S 2:2 -kernel inet_dist_use_interface {127,0,0,1}";
        command.env("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", erlang);
        // The script becomes the broker, so that the child is the broker itself.
        command.env("RUNNING_UNDER_SYSTEMD", "true");
        command
    }

    /// It answers the first bytes of a client when everything else has started.
    fn is_ready(&self) -> bool {
        let ask = || -> io::Result<bool> {
            let mut stream = TcpStream::connect(("127.0.0.1", self.ports.amqp))?;
            stream.set_read_timeout(Some(Duration::from_secs(5)))?;
            stream.write_all(b"AMQP\x00\x00\x09\x01")?;
            let mut kind = [0; 1];
            stream.read_exact(&mut kind)?;
            Ok(kind == [1])
        };
        ask().unwrap_or_default()
    }

    fn node(&self) -> String {
        format!("oncegate{}@localhost", self.ports.amqp)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn log(&self) -> PathBuf {
        self.path("log")
    }

    fn failed(&self, what: &str) -> io::Error {
        let log = fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<_> = log.lines().rev().take(20).collect();
        let said = lines.into_iter().rev().collect::<Vec<_>>().join("; ");
        io::Error::other(format!("RabbitMQ {what}: {said}"))
    }

    fn end(&mut self) {
        let counter = self.counter.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        end(&mut counter.map(|counter| counter.child));
        end(&mut self.child);
        end(&mut self.daemon);
    }
}

impl Drop for RabbitServer {
    fn drop(&mut self) {
        self.end();
    }
}

fn end(child: &mut Option<Child>) {
    if let Some(mut child) = child.take() {
        let _gone_already = child.kill();
        let _status = child.wait();
    }
}

/// The directory of the newest installed version. The scripts on the path insist on the directories of the system's own broker.
fn home() -> io::Result<PathBuf> {
    let versions = fs::read_dir("/usr/lib/rabbitmq/lib").into_iter().flatten().flatten();
    let homes = versions.map(|version| version.path()).filter(|home| is_home(home));
    homes.max().ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, "RabbitMQ is not installed (Debian package: rabbitmq-server)")
    })
}

fn is_home(path: &Path) -> bool {
    path.join("sbin/rabbitmq-server").exists()
}

fn has(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len().max(1)).any(|bytes| bytes == part)
}
