//! Mistakes that newcomers make: each error names the way on.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// Runs the program in this directory, without settings from the environment.
fn oncegate(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("ONCEGATE_")) {
        command.env_remove(name);
    }
    command.args(args).current_dir(dir).env("NO_COLOR", "1").output().unwrap()
}

/// The exit code and everything that was printed.
fn ended(dir: &Path, args: &[&str]) -> (i32, String) {
    let output = oncegate(dir, args);
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
    (output.status.code().unwrap(), text)
}

#[test]
fn each_mistake_on_the_command_line_has_a_hint() {
    let dir = tempfile::tempdir().unwrap();
    let to = "--to=http://127.0.0.1:3000";
    let table: &[(&[&str], i32, &[&str])] = &[
        (&["proxy", "http://127.0.0.1:3000"], 2, &["tip:", "--to http://127.0.0.1:3000"]),
        (&["check", "https://shop.example"], 2, &["--to https://shop.example"]),
        (&["explain", "POST", "/payments"], 2, &["tip:", "in quotes, such as 'POST /v1/orders'"]),
        (&["proxy", "--otlp-headers", "a=b"], 2, &["tip:", "put it into ONCEGATE_OTLP_HEADERS"]),
        (&["proxy", "--seal-keys=00"], 2, &["put it into ONCEGATE_SEAL_KEYS"]),
        (&["check", to, "--otlp-endpoint=http://u:p@c"], 1, &["put credentials into ONCEGATE_OTLP_HEADERS"]),
        (&["keys", "--admin", "7790", "ls"], 2, &["it has no host; write 127.0.0.1:7790"]),
        (&["top", "--once", "--admin", ":7790"], 2, &["write 127.0.0.1:7790"]),
        (&["call", "POST", "127.0.0.1:7780/orders"], 2, &["with http:// or https://"]),
        (&["call", "POST", "localhost:7780/orders"], 2, &["with http:// or https://"]),
        (&["probe", "127.0.0.1:7780/orders"], 2, &["with http:// or https://"]),
        (&["demo", "--store", "memory:"], 2, &["two sidecars cannot share"]),
        (&["schema", "apply", "postgres", "--url", ""], 1, &["--url", "is empty"]),
        (&["tap", "--outcome", "unprotected"], 2, &["have no key"]),
    ];
    for (args, code, hints) in table {
        let (found, text) = ended(dir.path(), args);
        assert_eq!(found, *code, "{args:?}: {text}");
        for hint in *hints {
            assert!(text.contains(hint), "{args:?}: {hint:?}: {text}");
        }
    }
    // An address with a password is not repeated in a tip.
    let (_, text) = ended(dir.path(), &["proxy", "http://u:hush@shop.example"]);
    assert!(!text.contains("--to http://u:hush"), "{text}");
}

#[test]
fn each_mistake_in_the_file_has_a_hint() {
    let dir = tempfile::tempdir().unwrap();
    for (line, hint, wrong) in [
        ("otlp-headers = \"a=b\"", "put it into ONCEGATE_OTLP_HEADERS", "otlp-headers-file"),
        ("admin-token = \"0123456789abcdef\"", "or name a file with `admin-token-file`", "no such"),
        ("seal-keys-command = \"echo hi\"", "a text instead of an array", "sound"),
    ] {
        fs::write(dir.path().join("f.toml"), format!("to = \"http://127.0.0.1:3000\"\n{line}\n")).unwrap();
        let (code, text) = ended(dir.path(), &["check", "--config=f.toml"]);
        assert!(code == 1 && text.contains(hint) && !text.contains(wrong), "{line}: {code} {text}");
    }
}

/// A value at the wrong setting may be a secret.
#[test]
fn no_error_repeats_the_password_of_a_url() {
    let dir = tempfile::tempdir().unwrap();
    for line in [
        "listen = \"postgres://u:hush@h/d\"",
        "methods = [\"postgres://u:hush@h/d\"]",
        "max-in-flight = \"redis://:hush@h\"",
        "drain-timeout = \"https://h/?token=hush\"",
    ] {
        fs::write(dir.path().join("f.toml"), format!("to = \"http://127.0.0.1:3000\"\n{line}\n")).unwrap();
        let (code, text) = ended(dir.path(), &["check", "--config=f.toml"]);
        assert!(code == 1 && !text.contains("hush"), "{line}: {code} {text}");
    }
    let listen = ["check", "--to=http://127.0.0.1:3000", "--listen=postgres://u:hush@h/d"];
    let (code, text) = ended(dir.path(), &listen);
    assert!(code == 1 && text.contains("postgres://…h/d") && !text.contains("hush"), "{code} {text}");
}

#[test]
fn a_command_line_in_one_word_is_not_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let command = "--seal-keys-command=/nowhere/curl -s -H X-Vault-Token:hush https://vault/v1/k";
    for more in [&[][..], &["--online"]] {
        let args = [&["check", "--to=http://127.0.0.1:9", "--store=memory:", command], more].concat();
        let (_, text) = ended(dir.path(), &args);
        assert!(text.contains("curl …") && !text.contains("hush"), "{text}");
    }
    let (code, text) = ended(dir.path(), &["proxy", "--to=http://127.0.0.1:9", "--store=memory:", command]);
    assert!(code == 1 && text.contains("are separated by commas") && !text.contains("hush"), "{text}");
}

#[test]
fn a_file_without_an_end_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let zero = "/dev/zero";
    for args in [
        &["check", "--to=http://127.0.0.1:9", "--env-file", zero][..],
        &["check", "--to=http://127.0.0.1:9", "--store=memory:", "--admin-token-file", zero],
        &["check", "--to=http://127.0.0.1:9", "--store=memory:", "--tls-cert", zero, "--tls-key", zero],
        &["check", "--config", zero],
        &["keys", "ls", "--token-file", zero],
    ] {
        let (code, text) = ended(dir.path(), args);
        assert!(code != 0 && text.contains("it is larger than "), "{args:?}: {code} {text}");
    }
}

#[test]
fn a_file_of_init_that_is_not_read_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let (code, text) = ended(dir.path(), &["init"]);
    assert_eq!(code, 0, "{text}");
    let file = fs::read_to_string(dir.path().join("oncegate.toml")).unwrap();
    let hint = "./oncegate.toml is not read: to use it, give --config oncegate.toml";
    for command in ["proxy", "check"] {
        let (code, text) = ended(dir.path(), &[command]);
        assert!(code == 1 && text.contains(hint) && text.contains("give --to URL"), "{command}: {text}");
    }
    // A sidecar can run without it, so with the address it is a warning.
    let (code, text) = ended(dir.path(), &["check", "--to=http://127.0.0.1:3000", "--store=memory:"]);
    assert!(code == 0 && text.contains(hint), "{code} {text}");
    for args in [
        &["check", "--config=oncegate.toml", "--store=memory:"][..],
        &["config", "dump", "--config=oncegate.toml"],
    ] {
        let (code, text) = ended(dir.path(), args);
        assert!(code == 0 && !text.contains(hint), "{args:?}: {text}");
    }

    // Each heading stands once, and examples are no nonsense.
    let headings: Vec<_> = file.lines().filter(|line| line.starts_with("# ==== ")).collect();
    for heading in &headings {
        assert_eq!(headings.iter().filter(|other| *other == heading).count(), 1, "{heading}");
    }
    for (name, nonsense) in [("jwt-audience", "issuer"), ("max-in-flight-without-key", " 1000")] {
        let line = file.lines().find(|line| line.starts_with(&format!("#{name} = "))).unwrap();
        assert!(!line.contains(nonsense), "{line}");
    }
}
