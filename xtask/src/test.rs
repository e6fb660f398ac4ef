//! Every test.

use std::process::{Command, Stdio};
use std::time::Instant;

use crate::run::{Result, cargo, has, install, root, target};
use crate::suites::Selection;

/// The directories in `sdk` with the libraries in other languages.
const LIBRARIES: [&str; 4] = ["python", "node", "go", "browser"];

/// Those that services use.
const LIBRARIES_OF_SERVICES: [&str; 3] = ["node", "python", "go"];

/// Installs the programs that tests need, then builds and runs the tests that the arguments choose.
///
/// Without an argument these are all tests of the workspace, the examples of its documentation, and the second
/// implementation of the vectors. `--quick` installs nothing and runs the tests that need no server. Other arguments are
/// those of `cargo test`.
pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    if arguments == ["--quick"] {
        return crate::suites::run(Selection::Quick, || Ok(()));
    }
    prepare_compiler()?;
    prepare_node("examples/express-orders")?;
    prepare_node("crates/postgres/tests/node")?;
    prepare_node("crates/redis/tests/node")?;
    prepare_node("crates/servers/sqs")?;
    prepare_node("crates/cli/tests/dashboard")?;
    prepare_node("crates/cli/tests/vendors")?;
    prepare_fastapi()?;
    prepare_postgres()?;
    prepare_psycopg()?;
    prepare_python("vendors", "crates/cli/tests/vendors/requirements.txt")?;
    prepare_redis()?;
    crate::valkey::prepare()?;
    prepare_faketime()?;
    prepare_nats()?;
    prepare_rabbitmq()?;
    prepare_chromium()?;
    prepare_prometheus()?;
    prepare_libraries()?;
    if !arguments.is_empty() {
        // Other packages' tests start the sidecar, and stop it at named points. With all tests it is built anyway.
        cmd(cargo().args(["build", "--package", "oncegate-cli", "--features", "failpoints"]))?;
        return cmd(cargo()
            .args(["test", "--workspace", "--all-features", "--no-fail-fast"])
            .args(arguments));
    }
    let programs = crate::suites::run(Selection::All, libraries);
    let examples = cmd(cargo().args(["test", "--workspace", "--all-features", "--doc"]));
    programs.and(examples).and(others())
}

/// The implementations of the vectors in other languages.
fn others() -> Result<()> {
    for script in
        ["check_fingerprints.py", "check_record_ids.py", "check_keyed_ids.py", "check_intent_keys.py"]
    {
        cmd(Command::new("python3").arg(root().join("crates/core/vectors").join(script)))?;
    }
    cmd(Command::new("node").arg(root().join("crates/seal/vectors/check_sealed.mjs")))
}

/// The tests of the libraries in other languages, one after the other, and of the shop that uses two of them. Each has a script
/// that installs what it needs. Most of what they do is wait for servers and leases, so test programs run at the same time.
fn libraries() -> Result<()> {
    let results: Vec<_> = LIBRARIES.into_iter().map(test_library).collect();
    // The shop has the libraries for Node and for browsers, and the sidecar that the tests of the workspace have built.
    let shop = root().join("examples/checkout/run-tests.sh");
    let shop = run_apart(
        "examples/checkout",
        Command::new("sh").arg(shop).env("ONCEGATE", target().join("debug/oncegate")),
    );
    results.into_iter().collect::<Result<()>>().and(shop)
}

/// Runs the tests of a library.
fn test_library(library: &str) -> Result<()> {
    run_apart(&format!("sdk/{library}"), &mut script_of(library, "run-tests.sh"))
}

/// Runs tests, and prints their output at the end.
fn run_apart(name: &str, command: &mut Command) -> Result<()> {
    let began = Instant::now();
    let ended = command.output().map_err(|error| format!("the tests of {name}: {error}"))?;
    // In one call, so that the output of another program does not come in between.
    print!(
        "\n== {name} ({} s)\n{}{}",
        began.elapsed().as_secs(),
        String::from_utf8_lossy(&ended.stdout),
        String::from_utf8_lossy(&ended.stderr)
    );
    if ended.status.success() { Ok(()) } else { Err(format!("the tests of {name}: {}", ended.status)) }
}

/// Installs what the libraries in other languages need, and builds them and their services, which the cases start.
pub(crate) fn prepare_libraries() -> Result<()> {
    if !has("node", &["--version"]) || !has("npm", &["--version"]) {
        install(&["nodejs", "npm"])?;
    }
    if !has("python3", &["-m", "venv", "--help"]) || !has("python3", &["-m", "ensurepip", "--version"]) {
        install(&["python3", "python3-venv"])?;
    }
    // It makes the certificates that clients are not to trust.
    if !has("openssl", &["version"]) {
        install(&["openssl"])?;
    }
    LIBRARIES_OF_SERVICES.iter().try_for_each(|library| cmd(&mut script_of(library, "prepare.sh")))
}

/// A script of a library. The tests of the cases find what it makes in the same directories.
fn script_of(library: &str, script: &str) -> Command {
    let mut command = Command::new("sh");
    command
        .arg(root().join("sdk").join(library).join(script))
        .stdin(Stdio::null())
        .env("ONCEGATE_PYTHON_ENV", target().join("sdk-python"))
        .env("ONCEGATE_GO_SERVICE", target().join("sdk-go/service"))
        // The sidecar that the tests of the workspace have built.
        .env("ONCEGATE_BIN", target().join("debug/oncegate"));
    command
}

fn cmd(command: &mut Command) -> Result<()> {
    crate::run::run(command)
}

/// Installs the compiler that builds librdkafka.
fn prepare_compiler() -> Result<()> {
    let is_there = ["cc", "c++", "make"].iter().all(|program| has(program, &["--version"]));
    if is_there { Ok(()) } else { install(&["build-essential"]) }
}

/// A server to start clusters of our own with. The package may start one itself, on its usual port, which nothing here
/// touches.
fn prepare_postgres() -> Result<()> {
    if !has("pgbouncer", &["--version"]) {
        install(&["pgbouncer"])?;
    }
    install_postgres()
}

pub(crate) fn install_postgres() -> Result<()> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let is_there = versions.map(|version| version.path().join("bin/initdb")).any(|initdb| initdb.exists());
    if is_there || has("initdb", &["--version"]) { Ok(()) } else { install(&["postgresql"]) }
}

/// Installs the packages of a Node program, next to it.
fn prepare_node(directory: &str) -> Result<()> {
    if !has("node", &["--version"]) || !has("npm", &["--version"]) {
        install(&["nodejs", "npm"])?;
    }
    let program = root().join(directory);
    let lock = program.join("package-lock.json");
    if is_newer(&program.join("node_modules/.package-lock.json"), &lock) {
        return Ok(());
    }
    cmd(Command::new("npm").args(["ci", "--no-audit", "--no-fund"]).current_dir(program))
}

/// The order service in Python: its packages in an environment of its own.
fn prepare_fastapi() -> Result<()> {
    prepare_python("fastapi-orders", "examples/fastapi-orders/requirements.txt")
}

/// Two ordinary clients of PostgreSQL, which call the contract without anything of ours.
fn prepare_psycopg() -> Result<()> {
    prepare_python("psycopg", "crates/postgres/tests/python/requirements.txt")
}

/// An environment of this name in the target directory.
fn prepare_python(name: &str, requirements: &str) -> Result<()> {
    let environment = target().join(name);
    let requirements = root().join(requirements);
    let done = environment.join("installed");
    if is_newer(&done, &requirements) {
        return Ok(());
    }
    if !has("python3", &["-m", "venv", "--help"]) || !has("python3", &["-m", "ensurepip", "--version"]) {
        install(&["python3", "python3-venv"])?;
    }
    cmd(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
    // Not `bin/pip`: it names the directory in which the environment was created, which is wrong after a copy.
    let python = environment.join("bin/python3");
    cmd(Command::new(python)
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"])
        .arg(requirements))?;
    std::fs::write(&done, "").map_err(|error| format!("{}: {error}", done.display()))
}

/// Redis, and its client for Python. The tests start servers of their own, on free ports; the one that the package starts
/// on its own port is left alone.
fn prepare_redis() -> Result<()> {
    install_redis()?;
    prepare_python("redis-contract", "crates/redis/tests/requirements.txt")
}

pub(crate) fn install_redis() -> Result<()> {
    let is_there = has("redis-server", &["--version"]) && has("redis-cli", &["--version"]);
    if is_there { Ok(()) } else { install(&["redis-server"]) }
}

/// RabbitMQ, of which the tests start brokers of their own, on free ports; the one that the package starts on its own port is
/// left alone.
fn prepare_rabbitmq() -> Result<()> {
    let versions = std::fs::read_dir("/usr/lib/rabbitmq/lib").into_iter().flatten().flatten();
    let is_there =
        versions.map(|version| version.path().join("sbin/rabbitmq-server")).any(|server| server.exists());
    if is_there { Ok(()) } else { install(&["rabbitmq-server"]) }
}

/// Installs libfaketime, for sidecars with different clocks.
fn prepare_faketime() -> Result<()> {
    if has("faketime", &["--version"]) { Ok(()) } else { install(&["faketime"]) }
}

/// A browser, for pages of other origins.
fn prepare_chromium() -> Result<()> {
    if has("chromium", &["--version"]) { Ok(()) } else { install(&["chromium"]) }
}

/// Prometheus, of which the tests start servers of their own, and `promtool`.
fn prepare_prometheus() -> Result<()> {
    let is_there = ["prometheus", "promtool"].iter().all(|program| has(program, &["--version"]));
    if is_there { Ok(()) } else { install(&["prometheus"]) }
}

/// A NATS server with JetStream; the tests start their own. The one that the package may start has its usual port.
fn prepare_nats() -> Result<()> {
    if has("nats-server", &["--version"]) { Ok(()) } else { install(&["nats-server"]) }
}

fn is_newer(made: &std::path::Path, from: &std::path::Path) -> bool {
    let time = |path: &std::path::Path| path.metadata().and_then(|data| data.modified());
    matches!((time(made), time(from)), (Ok(made), Ok(from)) if made >= from)
}
