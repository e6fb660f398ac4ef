//! The files in `deploy` against the program: configurations that it accepts, and numbers that fit each other.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Checks a configuration with a store that needs no server.
fn check(config: &str) -> Output {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("oncegate.toml");
    std::fs::write(&file, config).unwrap();
    let store = format!("--store={}", directory.path().join("records").display());
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command
        .arg("check")
        .arg("--config")
        .arg(&file)
        .arg(store)
        .env("ONCEGATE_ADMIN_TOKEN", "0123456789abcdef");
    command.output().unwrap()
}

#[track_caller]
fn is_accepted(name: &str, config: &str) {
    let output = check(config);
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stdout));
}

/// The documents of a manifest, as text.
fn documents(path: &str) -> Vec<String> {
    read(path).split("\n---\n").map(str::to_owned).collect()
}

/// The value of the only line with this key, in seconds.
fn seconds(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.trim().strip_prefix(key))?;
    let digits: String =
        line.chars().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

#[test]
fn the_configurations_are_valid() {
    is_accepted("deploy/oncegate.toml", &read("deploy/oncegate.toml"));
    // A mistake in it is found.
    assert!(!check(&read("deploy/oncegate.toml").replace("store =", "stroe =")).status.success());
    for manifest in ["sidecar", "gateway"] {
        let documents = documents(&format!("deploy/kubernetes/{manifest}.yaml"));
        let config = documents.iter().find(|text| text.contains("kind: ConfigMap")).unwrap();
        let (_, config) = config.split_once("oncegate.toml: |\n").unwrap();
        let config: String = config.lines().map(|line| format!("{}\n", line.trim_start())).collect();
        // In capitals is what users replace.
        let config = config.replace("PAYMENTS.example.svc", "127.0.0.1");
        // With what its comments propose, too.
        for config in [config.replace("#trusted-proxies", "trusted-proxies"), config] {
            is_accepted(manifest, &config);
            let said = String::from_utf8(check(&config).stdout).unwrap();
            assert!(!said.contains("a stop waits only for"), "{manifest}: {said}");
        }
    }
}

/// A number of pods in the manifest would undo that of the autoscaler with each `kubectl apply`.
#[test]
fn what_an_autoscaler_scales_names_no_number_of_pods() {
    for manifest in ["sidecar", "gateway"] {
        let documents = documents(&format!("deploy/kubernetes/{manifest}.yaml"));
        let is_scaled = documents.iter().any(|text| text.contains("kind: HorizontalPodAutoscaler"));
        let deployment = documents.iter().find(|text| text.contains("kind: Deployment")).unwrap();
        let has_number = deployment.lines().any(|line| line.trim_start().starts_with("replicas:"));
        assert_ne!(is_scaled, has_number, "{manifest}");
    }
}

/// A start that is refused takes milliseconds, and systemd gives up after five of them by default.
#[test]
fn systemd_never_gives_up_on_the_unit() {
    let unit = read("deploy/systemd/oncegate.service");
    let (of_unit, of_service) = unit.split_once("[Service]").unwrap();
    assert!(of_unit.lines().any(|line| line == "StartLimitIntervalSec=0"), "{unit}");
    assert!(of_service.lines().any(|line| line == "Restart=always"), "{unit}");
}

/// `OncegateDown` notices a sidecar that was never scraped only by such a job.
#[test]
fn each_monitor_names_its_job() {
    let documents = documents("deploy/kubernetes/servicemonitor.yaml");
    assert_eq!(documents.len(), 2, "a ServiceMonitor and a PodMonitor");
    for document in documents {
        let lines: Vec<_> = document.lines().map(|line| line.trim().trim_start_matches("- ")).collect();
        let at = lines.iter().position(|line| *line == "targetLabel: job").expect("no job");
        assert!(lines[at + 1].starts_with("replacement: oncegate-"), "{document}");
    }
}

#[test]
fn the_placeholder_of_the_manifests_is_no_token() {
    for manifest in ["sidecar", "gateway"] {
        let text = read(&format!("deploy/kubernetes/{manifest}.yaml"));
        let token = text.lines().find_map(|line| line.trim().strip_prefix("ONCEGATE_ADMIN_TOKEN: ")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command.args(["check", "--to=http://127.0.0.1:3000", "--store=memory:"]);
        let output = command.env("ONCEGATE_ADMIN_TOKEN", token.trim_matches('"')).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!output.status.success() && said.contains("a placeholder that was not replaced"), "{said}");
        assert!(!said.contains("A-RANDOM-TOKEN"), "{said}");
    }
}

/// Under systemd the store is in the environment file. A check without it would check another store, and find it fine.
#[test]
fn a_check_reads_the_environment_file_of_the_unit() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("oncegate.toml");
    let store = directory.path().join("of the config");
    std::fs::write(&config, format!("to = \"http://127.0.0.1:3000\"\nstore = {:?}\n", store)).unwrap();
    let file = directory.path().join("oncegate.env");
    let check = |content: &str| {
        std::fs::write(&file, content).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command.arg("check").arg("--config").arg(&config).arg("--env-file").arg(&file);
        // The file counts, as in the unit.
        let output = command.env("ONCEGATE_STORE", "memory:").output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    };
    let elsewhere = "/nonexistent/store-of-the-unit";
    let (is_fine, said) =
        check(&format!("# secrets\nONCEGATE_STORE=\"{elsewhere}\"\nONCEGATE_STORE_MUST_EXIST=true\n"));
    assert!(!is_fine && said.contains(elsewhere), "{said}");
    let (is_fine, said) = check("export ONCEGATE_STORE=secret\n");
    assert!(!is_fine && said.contains("line 1 is not NAME=VALUE") && !said.contains("secret"), "{said}");
    std::fs::remove_file(&file).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    let output =
        command.arg("check").arg("--config").arg(&config).arg("--env-file").arg(&file).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(!output.status.success() && said.contains("oncegate.env"), "{said}");
}

#[test]
fn a_stop_has_the_time_that_it_needs() {
    for manifest in ["sidecar", "gateway"] {
        let text = read(&format!("deploy/kubernetes/{manifest}.yaml"));
        let grace = seconds(&text, "terminationGracePeriodSeconds:").unwrap();
        let waits = seconds(&text, "shutdown-delay =").or(seconds(&text, "sleep: { seconds:")).unwrap();
        let drain = seconds(&text, "drain-timeout =").unwrap();
        assert!(waits >= 10 && grace > waits + drain, "{manifest}: {grace} s for {waits} s and {drain} s");
    }
    let unit = read("deploy/systemd/oncegate.service");
    // The default of drain-timeout, and the value of shutdown-delay that the configuration proposes.
    assert!(seconds(&unit, "TimeoutStopSec=").unwrap() > 30 + 10);
}

#[test]
fn what_the_image_copies_exists_and_the_image_calls_the_program_rightly() {
    let file = read("deploy/docker/Dockerfile");
    for path in ["deploy/docker/rootfs.sh", "Cargo.lock", "crates/cli/Cargo.toml"] {
        assert!(root().join(path).exists(), "{path}");
    }
    assert!(file.contains("deploy/docker/rootfs.sh") && file.contains("USER 65532:65532"));
    let toolchain = read("Cargo.toml");
    let version = toolchain.lines().find_map(|line| line.strip_prefix("rust-version = \"")).unwrap();
    let version = version.trim_end_matches('"');
    assert!(
        file.contains(&format!("FROM rust:{version}-")),
        "the image is built with another Rust than {version}"
    );
    // The command of the health check exists.
    let help = Command::new(env!("CARGO_BIN_EXE_oncegate")).args(["health", "--help"]).output().unwrap();
    assert!(help.status.success() && file.contains("\"/usr/bin/oncegate\", \"health\""));
    let compose = read("deploy/compose/compose.yaml");
    for name in ["payments.py", "client.py"] {
        assert!(compose.contains(name) && root().join("deploy/compose").join(name).exists(), "{name}");
    }
    // Each variable for the sidecar is one that it knows.
    let variables = compose.lines().chain(file.lines()).filter_map(|line| {
        let at = line.find("ONCEGATE_")?;
        let rest = &line[at..];
        let end = rest.find([':', '='])?;
        Some(rest[..end].to_owned())
    });
    let help = Command::new(env!("CARGO_BIN_EXE_oncegate")).args(["proxy", "--help"]).output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    for variable in variables {
        assert!(help.contains(&variable), "{variable}");
    }
}

#[test]
fn the_demo_of_compose_pays_once_with_the_sidecar_and_twice_without() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let start = |command: &mut Command| {
        let log = fs::OpenOptions::new().append(true).open(log.path()).unwrap();
        command.stdout(std::process::Stdio::null()).stderr(log).spawn().unwrap()
    };
    let free = || std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap();
    let [service, listen, admin] = [free(), free(), free()];
    let demo = root().join("deploy/compose");
    let mut payments = Command::new("python3");
    payments.arg(demo.join("payments.py")).env("PORT", service.port().to_string()).env("HOST", "127.0.0.1");
    let mut oncegate = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    oncegate.args(["proxy", "--store=memory:", "--scope=single-tenant", "--authority=ignore"]);
    oncegate.arg(format!("--to=http://{service}"));
    oncegate.arg(format!("--listen={listen}")).arg(format!("--admin={admin}"));
    let mut children = [start(&mut payments), start(&mut oncegate)];
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    for address in [service, listen] {
        while std::net::TcpStream::connect(address).is_err() {
            assert!(std::time::Instant::now() < deadline, "{address} does not listen");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
    let client = |target: std::net::SocketAddr| {
        let mut command = Command::new("python3");
        command.arg(demo.join("client.py")).env("TARGET", format!("http://{target}"));
        let output = command.env("LEDGER", format!("http://{service}")).env("ORDERS", "40").output().unwrap();
        (output.status.success(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    let (with, without) = (client(listen), client(service));
    for child in &mut children {
        let _ended = child.kill();
        let _status = child.wait();
    }
    assert!(with.0 && with.1.contains(": 0 charged more than once, 0 not at all"), "{}", with.1);
    assert!(!without.0 && !without.1.contains(": 0 charged more than once"), "{}", without.1);
    // A client that is gone is the point of the demo, and no error of the service.
    let log = fs::read_to_string(log.path()).unwrap();
    assert!(!log.contains("Traceback"), "{log}");
}
