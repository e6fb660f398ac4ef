//! The client libraries of APIs, unchanged, against sidecars with the profiles of these APIs.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tokio::process::Command;

use crate::support::{CheckingProgram, Sidecar};

/// The names in the certificate of a sidecar. The libraries of Adyen and PayPal speak TLS only, and check the name.
const NAMES: [&str; 3] = ["localhost", "checkout-test.adyen.com", "api-m.sandbox.paypal.com"];

/// Variables that lead a library to a proxy, or to other certificates than those of the test.
const FOREIGN: [&str; 9] = [
    "HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "SSL_CERT_DIR",
    "CURL_CA_BUNDLE", "NODE_OPTIONS",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_libraries_for_node_understand_the_sidecar() {
    let directory = directory();
    assert!(directory.join("node_modules").exists(), "the libraries are missing; run `cargo xtask test`");
    let mut node = Command::new("node");
    node.arg("vendors.mjs");
    understand(node, 21, &apis()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_libraries_for_python_understand_the_sidecar() {
    let mut python = Command::from(oncegate_servers::python("vendors").unwrap());
    python.args(["-B", "vendors.py"]);
    understand(python, 20, &apis()).await;
}

/// Client and server are from the same library. It runs by the current revision of the protocol, and by the last one with
/// sessions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_library_of_mcp_understands_the_sidecar() {
    let mut python = Command::from(oncegate_servers::python("vendors").unwrap());
    python.args(["-B", "mcp_client.py"]);
    let flags = ["--profile=mcp", "--intent-tools=order", "--read-only-tools=get_*"].map(str::to_owned);
    understand(python, 22, &[("mcp", flags.into())]).await;
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vendors")
}

/// The profiles of APIs of payments, and the flags of their sidecars.
fn apis() -> Vec<(&'static str, Vec<String>)> {
    ["stripe", "square", "adyen", "paypal"]
        .map(|profile| (profile, vec![format!("--profile={profile}")]))
        .into()
}

/// Runs a program with libraries in front of sidecars, which forward to the service of the program.
async fn understand(mut command: Command, checks: usize, profiles: &[(&str, Vec<String>)]) {
    let directory = tempfile::tempdir().unwrap();
    let (cert, key) = (directory.path().join("cert"), directory.path().join("key"));
    let made = rcgen::generate_simple_self_signed(NAMES.map(str::to_owned)).unwrap();
    fs::write(&cert, made.cert.pem()).unwrap();
    fs::write(&key, made.signing_key.serialize_pem()).unwrap();

    for name in FOREIGN {
        command.env_remove(name);
    }
    for name in ["NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"] {
        command.env(name, &cert);
    }
    let program = CheckingProgram::start(command.current_dir(self::directory())).await;
    let service = program.service;
    let tls = [format!("--tls-cert={}", cert.display()), format!("--tls-key={}", key.display())];
    let (mut sidecars, mut addresses) = (Vec::new(), Map::new());
    for (profile, own) in profiles {
        let mut flags = vec!["--scope=single-tenant"];
        flags.extend(own.iter().map(String::as_str));
        if ["adyen", "paypal"].contains(profile) {
            flags.extend(tls.iter().map(String::as_str));
        }
        let sidecar = Sidecar::start(service, &flags).await;
        addresses.insert((*profile).to_owned(), Value::String(sidecar.address.to_string()));
        sidecars.push(sidecar);
    }
    program.check(&Value::Object(addresses), checks).await;
}
