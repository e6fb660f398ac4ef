//! Members and header fields of responses that are not stored: the first client gets them, and no replay does.

use std::fs;

use oncegate_testkit::until;
use rustix::process::Signal;

use crate::operations::series;
use crate::support::{Service, Sidecar, request};

const CARD: &str = "HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nX-Token: secret-token\r\nX-Order: 7\r\n\
    Content-Digest: sha-256=:abc=:\r\nContent-Length: 56\r\n\r\n{ \"id\": 1.50, \"card\": {\"number\":\"4111-secret\", \"cvc\":1}}";

const SETTINGS: &str = "stored-headers = [\"x-token\", \"x-order\", \"content-digest\"]\n\
    [[route]]\npath = \"/cards\"\nredact-response = [\"/card/number\", \"/*/cvc\"]\nredact-headers = [\"X-Token\"]\n";

/// A sidecar with these settings on a store in a directory.
struct World {
    directory: tempfile::TempDir,
    sidecar: Sidecar,
}

impl World {
    async fn start(service: std::net::SocketAddr) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("oncegate.toml");
        fs::write(
            &file,
            format!("to = \"http://{service}\"\nstore = \"./data\"\nwait = \"30s\"\n{SETTINGS}"),
        )
        .unwrap();
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command.args(["proxy", "--listen=127.0.0.1:0", "--admin=127.0.0.1:0", "--config"]).arg(&file);
        Self { sidecar: Sidecar::run(&mut command).await, directory }
    }

    /// Stops the sidecar and returns true if its store contains this text.
    async fn store_has(mut self, text: &str) -> bool {
        self.sidecar.process.signal(Signal::TERM);
        assert!(self.sidecar.process.ended().await.success());
        fs::read_dir(self.directory.path().join("data")).unwrap().any(|file| {
            let content = fs::read(file.unwrap().path()).unwrap();
            content.windows(text.len()).any(|part| part == text.as_bytes())
        })
    }
}

fn post(path: &str, key: &str) -> String {
    request("POST", path, &[&format!("Idempotency-Key: {key}")], "{}")
}

#[tokio::test]
async fn the_first_client_gets_the_whole_response_and_a_replay_has_null_for_what_is_not_stored() {
    let service = Service::new().await.answers(CARD);
    let world = World::start(service.address).await;
    let first = world.sidecar.ask(&post("/cards", "one")).await;
    assert_eq!(
        first.has_status(201).text(),
        "{ \"id\": 1.50, \"card\": {\"number\":\"4111-secret\", \"cvc\":1}}"
    );
    assert_eq!((first.get("x-token"), first.get("idempotency-redacted")), (Some("secret-token"), None));
    let replay = world.sidecar.ask(&post("/cards", "one")).await;
    assert!(replay.has_status(201).is_replay());
    assert_eq!(replay.text(), "{ \"id\": 1.50, \"card\": {\"number\":null, \"cvc\":null}}");
    assert_eq!((replay.get("x-token"), replay.get("idempotency-redacted")), (None, Some("true")));
    assert_eq!((replay.get("x-order"), replay.get("content-digest")), (Some("7"), None));
    // The comparison of requests is not affected.
    let other = request("POST", "/cards", &["Idempotency-Key: one"], "{\"other\":1}");
    world.sidecar.ask(&other).await.is_problem(422, "key-reused");
    let counts = |route: &str| {
        ["redacted", "nothing-found", "not-stored"]
            .map(|result| format!("oncegate_redactions_total{{route=\"{route}\",result=\"{result}\"}}"))
    };
    for (name, count) in counts("/cards").iter().zip([1.0, 0.0, 0.0]) {
        assert_eq!(series(&world.sidecar, name).await, Some(count), "{name}");
    }
    assert!(!world.store_has("secret").await);
    assert_eq!(service.requests(), 1);

    // Another route keeps all of it.
    let world = World::start(service.address).await;
    world.sidecar.ask(&post("/other", "one")).await.has_status(201);
    for name in counts("default") {
        assert_eq!(series(&world.sidecar, &name).await, None, "{name}");
    }
    let replay = world.sidecar.ask(&post("/other", "one")).await;
    assert!(replay.is_replay() && replay.text().contains("4111-secret"));
    assert_eq!((replay.get("x-token"), replay.get("idempotency-redacted")), (Some("secret-token"), None));
    assert!(world.store_has("4111-secret").await);
}

/// A duplicate that waits gets the response that is stored, and not that of the first client.
#[tokio::test]
async fn a_duplicate_that_waits_gets_no_redacted_member() {
    let service = Service::new().await;
    let world = World::start(service.address).await;
    let mut first = world.sidecar.connect().await;
    first.send(&post("/cards", "one")).await;
    let mut wire = service.accept().await;
    wire.message().await;
    let mut second = world.sidecar.connect().await;
    second.send(&post("/cards", "one")).await;
    until("the duplicate waits", async || {
        series(&world.sidecar, "oncegate_requests_in_flight").await == Some(2.0)
    })
    .await;
    wire.send(CARD).await;
    assert!(first.message().await.has_status(201).text().contains("4111-secret"));
    let replay = second.message().await;
    assert!(replay.has_status(201).is_replay());
    assert!(!replay.text().contains("4111-secret") && replay.get("x-token").is_none(), "{}", replay.text());
}

/// Members cannot be found in it, so nothing of it is stored. It is done, and does not execute again.
#[tokio::test]
async fn a_response_that_is_not_json_is_not_stored() {
    let html =
        "HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nContent-Length: 17\r\n\r\n<p>4111-secret<p>";
    let service = Service::new().await.answers(html);
    let world = World::start(service.address).await;
    assert!(world.sidecar.ask(&post("/cards", "one")).await.has_status(502).text().contains("4111-secret"));
    for _ in 0..2 {
        let refused = world.sidecar.ask(&post("/cards", "one")).await;
        refused.is_problem(422, "replay-unavailable");
        assert!(!refused.text().contains("4111"), "{}", refused.text());
    }
    let not_stored = "oncegate_redactions_total{route=\"/cards\",result=\"not-stored\"}";
    assert_eq!(series(&world.sidecar, not_stored).await, Some(1.0));
    assert!(!world.store_has("secret").await);
    assert_eq!(service.requests(), 1);

    let empty = "HTTP/1.1 204 No Content\r\n\r\n";
    let service = Service::new().await.answers(empty);
    let world = World::start(service.address).await;
    world.sidecar.ask(&post("/cards", "one")).await.has_status(204);
    let nothing = "oncegate_redactions_total{route=\"/cards\",result=\"nothing-found\"}";
    assert_eq!(series(&world.sidecar, nothing).await, Some(1.0));
    assert!(world.sidecar.ask(&post("/cards", "one")).await.has_status(204).is_replay());
}
