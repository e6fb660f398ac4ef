//! The client libraries of APIs, unchanged, against sidecars with the profiles of these APIs.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::Command;

use crate::support::{Sidecar, within};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_libraries_of_stripe_square_and_adyen_understand_the_sidecar() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vendors");
    assert!(script.join("node_modules").exists(), "the libraries are missing; run `cargo xtask test`");
    let directory = tempfile::tempdir().unwrap();
    let (cert, key) = (directory.path().join("cert"), directory.path().join("key"));
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    fs::write(&cert, made.cert.pem()).unwrap();
    fs::write(&key, made.signing_key.serialize_pem()).unwrap();

    let mut node = Command::new("node")
        .arg("vendors.mjs")
        .current_dir(script)
        .env("NODE_EXTRA_CA_CERTS", &cert)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut output = BufReader::new(node.stdout.take().unwrap());
    let mut port = String::new();
    within("the port of the service", output.read_line(&mut port)).await.unwrap();
    let service = format!("127.0.0.1:{}", port.trim()).parse().unwrap();
    let tls = [format!("--tls-cert={}", cert.display()), format!("--tls-key={}", key.display())];
    let mut sidecars = Vec::new();
    for profile in ["stripe", "square", "adyen"] {
        let profile_flag = format!("--profile={profile}");
        let mut flags = vec![profile_flag.as_str(), "--scope=single-tenant"];
        if profile == "adyen" {
            // The library speaks TLS only.
            flags.extend(tls.iter().map(String::as_str));
        }
        sidecars.push(Sidecar::start(service, &flags).await);
    }
    let [stripe, square, adyen] = [0, 1, 2].map(|at| sidecars[at].address.to_string());
    let addresses = json!({"stripe": stripe, "square": square, "adyen": adyen});
    node.stdin.take().unwrap().write_all(format!("{addresses}\n").as_bytes()).await.unwrap();
    let (mut checks, mut errors) = (String::new(), String::new());
    within("the end of the checks", output.read_to_string(&mut checks)).await.unwrap();
    node.stderr.take().unwrap().read_to_string(&mut errors).await.unwrap();
    let status = within("the end of the program", node.wait()).await.unwrap();
    assert!(status.success(), "{checks}\n{errors}");
    assert_eq!(checks.lines().count(), 13, "{checks}");
}
