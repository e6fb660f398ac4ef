//! `oncegate explain`, as a person reads it and as a script does.

use std::process::Output;

use serde_json::Value;

const FILE: &str = r#"scope = "required-header:x-tenant"
lease = "20s"

[[route]]
path = "/v1/{*rest}"
profile = "stripe"
retention = "3d"

[[route]]
path = "/items/{id}"
methods = ["PUT"]
lease = "9s"
"#;

fn explain(arguments: &[&str]) -> Output {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("oncegate.toml");
    std::fs::write(&file, FILE).unwrap();
    std::process::Command::new(env!("CARGO_BIN_EXE_oncegate"))
        .arg("explain")
        .args(arguments)
        .args(["--to=http://127.0.0.1:1", "--wait=1s", "--config=oncegate.toml"])
        .env("ONCEGATE_ON_ABANDONED", "reexecute")
        .current_dir(directory.path())
        .output()
        .unwrap()
}

#[test]
fn each_setting_of_a_request_has_its_value_and_its_source() {
    for (request, route, is_covered, expected) in [
        (
            "post /v1/orders?a=1",
            Value::from("/v1/{*rest}"),
            true,
            [
                ("profile", "stripe", "oncegate.toml:6:11: profile"),
                ("retention", "3d", "oncegate.toml:7:13: retention"),
                ("lease", "20s", "oncegate.toml:2:9: lease"),
                ("key-scope", "caller", "profile stripe"),
                ("wait", "1s", "--wait"),
                ("on-abandoned", "reexecute", "ONCEGATE_ON_ABANDONED"),
                ("max-request-body", "2MiB", "default"),
            ],
        ),
        (
            "/orders",
            Value::Null,
            true,
            [
                ("profile", "ietf", "default"),
                ("retention", "24h", "profile ietf"),
                ("lease", "20s", "oncegate.toml:2:9: lease"),
                ("key-scope", "endpoint", "profile ietf"),
                ("methods", "POST, PATCH", "profile ietf"),
                ("scope", "required-header:x-tenant", "oncegate.toml:1:9: scope"),
                ("key-query", "–", "default: by profile: two in aws, none in the others"),
            ],
        ),
        (
            "PUT /items/7",
            Value::from("/items/{id}"),
            true,
            [
                ("lease", "9s", "oncegate.toml:12:9: lease"),
                ("methods", "PUT", "oncegate.toml:11:11: methods"),
                ("key-header", "Idempotency-Key", "profile ietf"),
                ("require-key", "false", "profile ietf"),
                ("server-errors", "replay", "profile ietf"),
                ("fingerprint.body", "canonical", "profile ietf"),
                ("store-outage", "closed", "default"),
            ],
        ),
    ] {
        let output = explain(&[request, "--json"]);
        let explained: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(
            (&explained["route"], &explained["covered"]),
            (&route, &Value::from(is_covered)),
            "{request}"
        );
        for (name, value, source) in expected {
            let settings = explained["settings"].as_array().unwrap();
            let row = settings.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("{name}"));
            assert_eq!(
                (row["value"].as_str(), row["source"].as_str()),
                (Some(value), Some(source)),
                "{request} {name}"
            );
        }
        let text = String::from_utf8(explain(&[request]).stdout).unwrap();
        let (name, value, source) = expected[0];
        let shows = |line: &str| line.starts_with(name) && line.contains(value) && line.ends_with(source);
        assert!(text.contains("Its method is covered.") && text.lines().any(shows), "{text}");
    }
    let deleted = explain(&["DELETE /orders", "--json"]);
    let explained: Value = serde_json::from_slice(&deleted.stdout).unwrap();
    assert_eq!(explained["covered"], false);
}

#[test]
fn what_cannot_be_explained_is_an_error() {
    for (arguments, code, text) in [
        (&["orders"][..], 2, "is not a request; write a method and a path"),
        (&["P(ST /orders"], 2, "is not a request"),
        (&["/orders", "--lease=1x"], 1, "--lease"),
    ] {
        let output = explain(arguments);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(code) && errors.contains(text), "{errors}");
    }
}

#[test]
fn a_method_whose_keys_are_refused_and_the_values_of_its_profile_are_shown() {
    let text = String::from_utf8(explain(&["LINK /orders", "--profile=oasis"]).stdout).unwrap();
    assert!(text.contains("with one it is refused: 501 key-unsupported."), "{text}");
    let shows = |name: &str, value: &str| {
        text.lines().any(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            words.starts_with(&[name, value]) && line.ends_with("profile oasis")
        })
    };
    assert!(
        shows("first-sent-header", "Repeatability-First-Sent") && shows("uncovered-methods", "refuse"),
        "{text}"
    );
    let text = String::from_utf8(explain(&["GET /items/7"]).stdout).unwrap();
    let lines: Vec<_> = text.lines().take(3).collect();
    assert_eq!(
        lines,
        [
            "GET /items/7 matches no route; the values outside of routes apply.",
            "The route /items/{id} is for PUT only.",
            "Its method is not covered: it passes, and a key has no effect."
        ]
    );
}

#[test]
fn a_service_that_completes_records_itself_decides_what_happens_after_a_crash() {
    let flags =
        ["/orders", "--json", "--completion=upstream", "--store=postgres://127.0.0.1:1/d", "--service=shop"];
    let explained: Value = serde_json::from_slice(&explain(&flags).stdout).unwrap();
    for (name, value) in [("on-abandoned", "reexecute"), ("server-errors", "release")] {
        let settings = explained["settings"].as_array().unwrap();
        let row = settings.iter().find(|row| row["name"] == name).unwrap();
        assert_eq!((&row["value"], &row["source"]), (&value.into(), &"completion, --completion".into()));
    }
}
