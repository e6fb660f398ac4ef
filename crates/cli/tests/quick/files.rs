//! Commands that print and write files: configuration, schema, completions, manual.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn oncegate(dir: &Path, args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(args).env_clear().envs(variables.iter().copied()).current_dir(dir).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn init_writes_a_file_that_check_accepts_and_never_overwrites_one() {
    let dir = tempfile::tempdir().unwrap();
    let first = oncegate(dir.path(), &["init"], &[]);
    assert_eq!(first.status.code(), Some(0), "{first:?}");
    assert!(text(&first.stdout).contains("oncegate check --config oncegate.toml"), "{first:?}");
    let checked = oncegate(dir.path(), &["check", "--config", "oncegate.toml"], &[]);
    assert_eq!(checked.status.code(), Some(0), "{checked:?}");
    fs::write(dir.path().join("oncegate.toml"), "mine").unwrap();
    let again = oncegate(dir.path(), &["init"], &[]);
    assert_eq!(again.status.code(), Some(1), "{again:?}");
    assert!(text(&again.stderr).contains("oncegate.toml exists already, and is not changed"), "{again:?}");
    assert_eq!(fs::read_to_string(dir.path().join("oncegate.toml")).unwrap(), "mine");
    let nowhere = oncegate(dir.path(), &["init", "no/such/dir.toml"], &[]);
    assert!(text(&nowhere.stderr).starts_with("error: no/such/dir.toml: "), "{nowhere:?}");
    let printed = oncegate(dir.path(), &["init", "-"], &[]);
    assert!(text(&printed.stdout).contains("\n#lease = \"30s\"\n"), "{printed:?}");
}

const FILE: &str = r#"to = "http://127.0.0.1:3000"
methods = ["POST", "PUT"]

[[route]]
path = "/v1/{*rest}"
profile = "stripe"
retention = "3d"
"#;

#[test]
fn a_dump_has_each_value_with_its_source_and_no_secret() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("oncegate.toml"), FILE).unwrap();
    let variables = [
        ("ONCEGATE_STORE", "postgres://app:hunter2@db.example/shop?sslmode=require"),
        ("ONCEGATE_ADMIN_TOKEN", "hunter2-hunter2-hunter2"),
        ("ONCEGATE_METRICS_TOKEN", "hunter2-for-metrics-alone"),
        ("ONCEGATE_SERVICE", "shop"),
    ];
    let args = ["config", "dump", "--config", "oncegate.toml", "--lease", "20s"];
    let dump = oncegate(dir.path(), &args, &variables);
    assert_eq!(dump.status.code(), Some(0), "{dump:?}");
    let (dump, notes) = (text(&dump.stdout), text(&dump.stderr));
    assert!(!format!("{dump}{notes}").contains("hunter2") && !dump.contains("app"), "{dump}");
    let line = |name: &str| {
        let found = dump.lines().find(|line| line.trim_start_matches('#').starts_with(&format!("{name} ")));
        found.unwrap_or_else(|| panic!("{name}: {dump}")).split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(line("lease"), "lease = \"20s\" # --lease");
    assert_eq!(line("methods"), "methods = [\"POST\", \"PUT\"] # oncegate.toml:2:11: methods");
    assert_eq!(line("store"), "store = \"postgres://…@db.example/shop?…\" # ONCEGATE_STORE, not shown whole");
    assert_eq!(line("admin-token"), "#admin-token = \"…\" # ONCEGATE_ADMIN_TOKEN, not shown whole");
    assert_eq!(line("metrics-token"), "#metrics-token = \"…\" # ONCEGATE_METRICS_TOKEN, not shown whole");
    assert_eq!(line("max-in-flight"), "#max-in-flight = 2048 # default");
    assert_eq!(line("require-key"), "#require-key = false # profile ietf");
    assert_eq!(line("tls-cert"), "#tls-cert # default: no TLS");
    let route = dump.split_once("[[route]]\n").unwrap().1;
    assert!(
        route.starts_with("path = \"/v1/{*rest}\"\nprofile = \"stripe\"")
            && route.contains("#key-scope = \"caller\""),
        "{route}"
    );
    assert!(!route.contains("\nlease ") && !route.contains("#lease "), "{route}");

    // What it prints is a configuration with the same values.
    fs::write(dir.path().join("again.toml"), dump.replace("postgres://…@db.example/shop?…", "memory:"))
        .unwrap();
    let again = oncegate(dir.path(), &["config", "dump", "--config", "again.toml"], &[]);
    assert_eq!(again.status.code(), Some(0), "{again:?}");
    let values = |dump: &str| -> Vec<String> {
        let shown = dump.lines().filter(|line| {
            ["store =", "admin-token", "metrics-token", "config"]
                .iter()
                .all(|left_out| !line.contains(left_out))
        });
        shown.map(|line| line.split("  #").next().unwrap().trim_end().to_owned()).collect()
    };
    assert_eq!(values(&text(&again.stdout)), values(&dump));
    // It is not the default store if the URL is used as it was shown.
    let as_shown = oncegate(
        dir.path(),
        &["check", "--to=http://127.0.0.1:1", "--store=postgres://…@db.example/shop?…"],
        &[],
    );
    assert_eq!(as_shown.status.code(), Some(1), "{as_shown:?}");

    let json = oncegate(dir.path(), &[&args[..], &["--json"]].concat(), &variables);
    assert!(!text(&json.stdout).contains("hunter2"));
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    let setting = |name: &str| {
        json["settings"].as_array().unwrap().iter().find(|setting| setting["name"] == name).unwrap().clone()
    };
    assert_eq!(
        setting("lease"),
        serde_json::json!({"name": "lease", "value": "20s", "source": "--lease", "redacted": false})
    );
    assert_eq!(setting("max-in-flight")["value"], 2048);
    assert_eq!(
        (&setting("admin-token")["value"], &setting("admin-token")["redacted"]),
        (&"…".into(), &true.into())
    );
    assert_eq!(json["routes"][0]["path"], "/v1/{*rest}");

    let wrong = oncegate(dir.path(), &["config", "dump", "--lease", "30"], &[]);
    assert_eq!((wrong.status.code(), wrong.stdout.len()), (Some(1), 0), "{wrong:?}");
    assert!(text(&wrong.stderr).contains("error: --lease: "), "{wrong:?}");
}

#[test]
fn the_schema_is_json_and_names_every_setting_of_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let schema = oncegate(dir.path(), &["config", "schema"], &[]);
    let schema: Value = serde_json::from_slice(&schema.stdout).unwrap();
    assert_eq!(
        schema["properties"]["on-abandoned"]["enum"],
        serde_json::json!(["park", "reexecute", "reconcile"])
    );
    assert_eq!(schema["properties"]["lease"]["default"], "30s");
    assert!(schema["properties"]["fingerprint"]["properties"]["exclude"].is_object());
    let route = &schema["properties"]["route"]["items"]["properties"];
    assert!(route["lease"].is_object() && route["listen"].is_null(), "{route}");
}

#[test]
fn completions_and_pages_of_the_manual_are_made_for_each_command() {
    let dir = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let script = oncegate(dir.path(), &["completions", shell], &[]);
        assert_eq!(script.status.code(), Some(0), "{script:?}");
        let script = text(&script.stdout);
        assert!(script.contains("dead-letters") && script.contains("upstream-timeout"), "{shell}");
    }
    let unknown = oncegate(dir.path(), &["completions", "tcsh"], &[]);
    assert_eq!(unknown.status.code(), Some(2), "{unknown:?}");

    let written = oncegate(dir.path(), &["man", "pages/man1"], &[]);
    assert_eq!((written.status.code(), written.stdout.len()), (Some(0), 0), "{written:?}");
    let pages: Vec<_> = fs::read_dir(dir.path().join("pages/man1")).unwrap().flatten().collect();
    let page = |name: &str| fs::read_to_string(dir.path().join("pages/man1").join(name)).unwrap();
    assert!(pages.len() > 30, "{}", pages.len());
    assert!(page("oncegate-proxy.1").contains("upstream\\-timeout"));
    assert!(page("oncegate-dead-letters-requeue.1").contains("broker\\-window"));
    let printed = oncegate(dir.path(), &["man"], &[]);
    assert!(text(&printed.stdout).contains(".TH oncegate 1"), "{printed:?}");
    let blocked = oncegate(dir.path(), &["man", "/proc/none"], &[]);
    assert_eq!(blocked.status.code(), Some(1), "{blocked:?}");
    assert!(text(&blocked.stderr).starts_with("error: /proc/none: "), "{blocked:?}");
}

/// A service that answers each request with 200.
fn service() -> std::net::SocketAddr {
    use std::io::{Read as _, Write as _};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { continue };
            std::thread::spawn(move || {
                let mut bytes = [0; 4096];
                // Each request of this test fits into one read.
                while stream.read(&mut bytes).is_ok_and(|count| count > 0) {
                    if stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

#[test]
fn the_report_of_a_probe_has_colours_only_if_they_are_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("operation.toml"), "path = \"/orders\"\nbody = '{\"n\":{n}}'\n").unwrap();
    let url = format!("http://{}", service());
    let report = |args: &[&str], variables: &[(&str, &str)]| {
        let args = [&["probe", &url, "--operation=operation.toml", "--rate=100"], args].concat();
        let report = text(&oncegate(dir.path(), &args, variables).stdout);
        assert!(report.contains("Probe of ") && report.contains("not tested"), "{report}");
        report
    };
    assert!(!report(&[], &[]).contains('\u{1b}'));
    assert!(!report(&["--color=never"], &[]).contains('\u{1b}'));
    let colored = report(&["--color=always"], &[("NO_COLOR", "1")]);
    assert!(colored.contains("\u{1b}[2mnot tested \u{1b}[0m"), "{colored}");
}

/// Colours are for terminals, unless they are asked for.
#[test]
fn a_pipe_gets_no_colours_unless_they_are_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let check = ["check", "--to", "http://127.0.0.1:3000", "--store", "memory:"];
    let colored = |args: &[&str], variables: &[(&str, &str)]| {
        let output = oncegate(dir.path(), args, variables);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        text(&output.stdout).contains('\u{1b}')
    };
    assert!(!colored(&check, &[]));
    assert!(colored(&[&check[..], &["--color", "always"]].concat(), &[("NO_COLOR", "1")]));
    assert!(!colored(&[&["--color=never"], &check[..]].concat(), &[]));
    let short = ["demo", "--intents", "2", "--seed", "1"];
    assert!(!colored(&short, &[]));
    assert!(colored(&[&short[..], &["--color=always"]].concat(), &[("NO_COLOR", "1")]));
    let wrong = oncegate(dir.path(), &["check", "--color", "sometimes"], &[]);
    assert_eq!(wrong.status.code(), Some(2), "{wrong:?}");
}
