//! The libraries in other languages as deployments: a service with the library, in its own process.
//!
//! A process of `sdk/*/cases` opens a listener for each case, with the settings and the store of the case. For each
//! execution the service asks the case (its [`Backend`](crate::backend::Backend)) for the response, part by part.

use std::collections::HashMap;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, ChildStdout, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use oncegate_core::OnAbandoned;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::databases::Server;
use crate::plan::{Callers, Plan};
use crate::sidecar::{Output, signal_child};
use crate::world::StoreKind;

/// A library in another language, with the framework of its service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Library {
    /// The library for Node, on Express.
    Node,
    /// The library for Python, on FastAPI.
    Python,
    /// The library for Go, on net/http.
    Go,
}

/// A setting or a feature that no library has, with its instance in a plan.
struct Missing {
    /// The reason, as the READMEs of the libraries say it.
    why: &'static str,
    is_in: fn(&Plan) -> bool,
    /// A plan with it, which each library must refuse; `None` if the difference is not one of settings.
    example: Option<fn() -> Plan>,
}

/// The list "Not there yet" in the README of each library.
const MISSING: &[Missing] = &[
    Missing {
        why: "no library has routes: each mounts its middleware",
        is_in: |plan| !plan.routes.is_empty(),
        example: None,
    },
    Missing { why: "only the sidecar has failpoints", is_in: |plan| plan.failpoint.is_some(), example: None },
    Missing {
        why: "no library has the profile",
        is_in: |plan| !["ietf", "stripe", "classic"].contains(&plan.profile),
        example: Some(|| Plan { profile: "paypal", ..Plan::default() }),
    },
    Missing {
        why: "no library has the setting path-case",
        is_in: |plan| plan.exact_paths,
        example: Some(|| Plan { exact_paths: true, ..Plan::default() }),
    },
    Missing {
        why: "no library has scopes by token",
        is_in: |plan| matches!(plan.scope, Callers::Parts(parts) if parts.iter().any(|part| part.starts_with("jwt:"))),
        example: Some(|| Plan { scope: Callers::Parts(&["jwt:sub"]), ..Plan::default() }),
    },
    Missing {
        why: "no library asks for the outcome of an attempt",
        is_in: |plan| plan.on_abandoned == Some(OnAbandoned::Reconcile),
        example: Some(|| Plan { on_abandoned: Some(OnAbandoned::Reconcile), ..Plan::default() }),
    },
    Missing {
        why: "no library asks the service before a replay",
        is_in: |plan| plan.authorize,
        example: Some(|| Plan { authorize: true, ..Plan::default() }),
    },
    Missing {
        why: "no library has rate limits",
        is_in: |plan| plan.new_keys_per_hour.is_some() || plan.attempts_per_hour.is_some(),
        example: Some(|| Plan { new_keys_per_hour: Some(1), ..Plan::default() }),
    },
    Missing {
        why: "no library has the setting upstream-timeout: it has no service behind it",
        is_in: |plan| plan.upstream_timeout.is_some(),
        example: Some(|| Plan {
            upstream_timeout: Some(std::time::Duration::from_secs(1)),
            ..Plan::default()
        }),
    },
];

impl Library {
    /// Every library.
    pub const ALL: [Self; 3] = [Self::Node, Self::Python, Self::Go];

    /// The stores that each library has.
    pub const STORES: [StoreKind; 3] = [StoreKind::Memory, StoreKind::Redis, StoreKind::Postgres];

    /// The name in the names of tests.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Node => "node-library",
            Self::Python => "python-library",
            Self::Go => "go-library",
        }
    }

    /// The reason why no library can have these settings, if there is one.
    #[must_use]
    pub fn reason_against(plan: &Plan) -> Option<&'static str> {
        MISSING.iter().find(|missing| (missing.is_in)(plan)).map(|missing| missing.why)
    }

    /// `true` if the library accepts these settings. It blocks, so it must not be called within a runtime.
    #[must_use]
    pub fn accepts(self, plan: &Plan) -> bool {
        // Nothing is ever sent to this backend.
        let backend = (([127, 0, 0, 1], 9).into(), 0);
        self.shared_process(StoreKind::Memory).open(plan, "memory:", backend).is_ok()
    }

    /// The settings that the library accepts although its README says that it does not have them.
    #[must_use]
    pub fn unexpected_settings(self) -> Vec<&'static str> {
        let accepts = |missing: &&Missing| missing.example.is_some_and(|plan| self.accepts(&plan()));
        MISSING.iter().filter(accepts).map(|missing| missing.why).collect()
    }

    /// Opens a service with these settings on the store, for a case that has its listener at `backend`.
    ///
    /// A service that is killed or suspended needs a process of its own: others share one.
    pub(crate) async fn open(
        self,
        plan: &Plan,
        (store, url): (StoreKind, Option<String>),
        backend: (SocketAddr, u64),
        has_own_process: bool,
    ) -> LibraryService {
        let plan = plan.clone();
        let opening = tokio::task::spawn_blocking(move || {
            let process = if has_own_process {
                Arc::new(LibraryProcess::start(self).unwrap_or_else(|error| panic!("no {self:?}: {error}")))
            } else {
                self.shared_process(store)
            };
            let opened = process.open(&plan, &store_of(url), backend);
            let address = opened.unwrap_or_else(|reply| {
                panic!("the {} opens no service: {reply}; it printed {}", self.name(), process.output.text())
            });
            LibraryService { address, process }
        });
        opening.await.expect("a service that is opened")
    }

    /// The process of all cases on this store, which the first one starts.
    fn shared_process(self, store: StoreKind) -> Arc<LibraryProcess> {
        let server = lock(&PROCESSES).get_or_insert_default().entry((self, store)).or_default().clone();
        server
            .get(|| LibraryProcess::start(self))
            .unwrap_or_else(|error| panic!("no {}: {error}", self.name()))
    }

    /// The command that runs the service, without its store and settings.
    fn command(self) -> io::Result<std::process::Command> {
        match self {
            Self::Node => oncegate_servers::node_library(),
            Self::Python => oncegate_servers::python_library(),
            Self::Go => oncegate_servers::go_library(),
        }
    }
}

/// The URL that a library gets: without the settings of stores in Rust.
fn store_of(url: Option<String>) -> String {
    let url = url.unwrap_or_else(|| "memory:".to_owned());
    url.split('?').next().unwrap_or_default().to_owned()
}

type Processes = HashMap<(Library, StoreKind), Arc<Server<LibraryProcess>>>;

static PROCESSES: Mutex<Option<Processes>> = Mutex::new(None);

/// Stops all shared processes. No case may run any more.
pub(crate) fn stop_processes() {
    *lock(&PROCESSES) = None;
}

/// A process with services, each on its own listener. It is killed when this is dropped.
struct LibraryProcess {
    child: Mutex<Child>,
    /// The process answers the commands one by one.
    channel: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
    output: Output,
}

impl LibraryProcess {
    fn start(library: Library) -> io::Result<Self> {
        let mut command = library.command()?;
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let broken = || io::Error::from(io::ErrorKind::BrokenPipe);
        let output = Output::new();
        output.read(child.stderr.take().ok_or_else(broken)?);
        let stdin = child.stdin.take().ok_or_else(broken)?;
        let stdout = child.stdout.take().ok_or_else(broken)?;
        Ok(Self { child: Mutex::new(child), channel: Mutex::new((stdin, BufReader::new(stdout))), output })
    }

    /// Opens a service, and returns its address; the reply if there is none.
    fn open(
        &self,
        plan: &Plan,
        store: &str,
        (backend, case): (SocketAddr, u64),
    ) -> Result<SocketAddr, String> {
        let mut settings = plan.named_settings();
        settings.insert("service".to_owned(), "cases".into());
        // The servers share this machine with all other tests.
        settings.insert("store-timeout".to_owned(), "15s".into());
        let command = json!({ "settings": settings, "store": store, "backend": backend.to_string(), "case": case, "seal-keys": plan.seal_keys() });
        let reply = self.exchange(&command)?;
        let address = reply["address"].as_str().and_then(|address| address.parse().ok());
        address.ok_or_else(|| reply.to_string())
    }

    /// Closes a service. When this returns, it sends nothing more to its store, so that another case can have the database: a
    /// request of it that still waits for a key could otherwise claim it there.
    fn close(&self, address: SocketAddr) {
        // A process that has ended sends nothing.
        let _ = self.exchange(&json!({ "close": address.to_string() }));
    }

    fn exchange(&self, command: &Value) -> Result<Value, String> {
        let mut channel = lock(&self.channel);
        let mut line = String::new();
        let (stdin, stdout) = &mut *channel;
        let exchanged = writeln!(stdin, "{command}").and_then(|()| stdout.read_line(&mut line));
        exchanged.map_err(|error| error.to_string())?;
        serde_json::from_str(&line).map_err(|error| format!("{error} in {line:?}"))
    }
}

impl Drop for LibraryProcess {
    fn drop(&mut self) {
        let mut child = lock(&self.child);
        let _ = child.kill();
        let _ = child.wait();
        // What it warned of, for someone who looks for a cause.
        if std::env::var_os("ONCEGATE_CASES_SHOW").is_some() {
            eprintln!("{}", self.output.text());
        }
    }
}

/// A service with a library. It is closed when this is dropped.
pub struct LibraryService {
    /// The address on which it listens.
    pub address: SocketAddr,
    process: Arc<LibraryProcess>,
}

impl LibraryService {
    /// Kills its process, as a power cut would.
    pub(crate) fn kill(&self) {
        let mut child = lock(&self.process.child);
        let _ = child.kill();
        let _ = child.wait();
    }

    /// Suspends its process.
    pub(crate) fn stop(&self) {
        oncegate_servers::freeze(lock(&self.process.child).id()).expect("it stands still");
    }

    /// Resumes its process.
    pub(crate) fn resume(&self) {
        signal_child(&lock(&self.process.child), Signal::CONT);
    }

    /// Asks its process to end.
    pub(crate) fn terminate(&self) {
        signal_child(&lock(&self.process.child), Signal::TERM);
    }

    /// The exit status of its process, if that ended.
    pub(crate) fn exited(&self) -> Option<ExitStatus> {
        lock(&self.process.child).try_wait().expect("a child of this process")
    }

    /// The errors that its process printed so far.
    pub(crate) fn printed(&self) -> String {
        self.process.output.text()
    }
}

impl Drop for LibraryService {
    fn drop(&mut self) {
        // A process of this service alone is killed with it.
        if Arc::strong_count(&self.process) > 1 {
            self.process.close(self.address);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
