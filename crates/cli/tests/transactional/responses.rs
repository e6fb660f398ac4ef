//! The response of a service and the result of its transaction may differ: the test itself plays the service.

use crate::counted;
use crate::support::{Message, Service, Sidecar, Wire, request};
use crate::world::{Database, run};
use oncegate_testkit::until;

const KEY: &str = "Idempotency-Key: order-1";
const CREATED: &str =
    "HTTP/1.1 201 Created\r\nContent-Type: text/plain\r\nSet-Cookie: a=b\r\nContent-Length: 4\r\n\r\npaid";

/// A request that has reached the service.
struct ReceivedRequest {
    database: Database,
    sidecar: Sidecar,
    client: Wire,
    wire: Wire,
    /// The arguments of `oncegate.complete`.
    attempt: String,
}

async fn receive() -> ReceivedRequest {
    receive_with(&[]).await
}

async fn receive_with(flags: &[&str]) -> ReceivedRequest {
    let (database, service) = (Database::new().await, Service::new().await);
    let sidecar = database.sidecar(service.address, flags, "").await;
    let mut client = sidecar.connect().await;
    client.send(request("POST", "/orders", &[KEY], "{}")).await;
    let mut wire = service.accept().await;
    let asked = wire.message().await;
    let (record, token) = (asked.get("oncegate-record").unwrap(), asked.get("oncegate-token").unwrap());
    assert_eq!(asked.get("oncegate-attempt"), Some("1"));
    let attempt = format!("decode('{record}', 'hex'), {token}");
    ReceivedRequest { database, sidecar, client, wire, attempt }
}

impl ReceivedRequest {
    async fn complete(&self, response: &str) {
        let call = format!("SELECT oncegate.complete({}{response})", self.attempt);
        run(&mut self.database.connect().await, &call).await;
    }

    async fn answer(&mut self, text: &str) -> Message {
        self.wire.send(text).await;
        self.client.message().await
    }

    async fn retry(&self) -> Message {
        self.sidecar.ask(&request("POST", "/orders", &[KEY], "{}")).await
    }
}

const REPORTED: [&str; 4] =
    ["completed-upstream", "response-added", "response-differs", "completion-missing"];

#[tokio::test(flavor = "multi_thread")]
async fn the_committed_record_decides_the_response() {
    let mut asked = receive().await;
    asked
        .complete(", oncegate.response(202, ARRAY['content-type', 'location'], ARRAY['text/x', '/orders/7'], 'mine')")
        .await;
    let response = asked.answer(CREATED).await;
    assert_eq!((response.has_status(202).text(), response.get("content-type")), ("mine", Some("text/x")));
    assert_eq!((response.get("location"), response.get("set-cookie")), (Some("/orders/7"), Some("a=b")));
    assert!(!response.is_replay());
    let replay = asked.retry().await;
    assert_eq!((replay.has_status(202).text(), replay.get("content-type")), ("mine", Some("text/x")));
    assert_eq!((replay.get("location"), replay.get("set-cookie")), (Some("/orders/7"), None));
    assert_eq!(counted(&asked.sidecar, &REPORTED).await, [0, 0, 1, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_error_after_the_commit_does_not_undo_it() {
    let mut asked = receive().await;
    asked.complete("").await;
    asked.answer("HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops").await.has_status(500);
    asked.retry().await.is_problem(422, "replay-unavailable");
    assert_eq!(counted(&asked.sidecar, &REPORTED).await, [1, 0, 0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_error_without_a_commit_frees_the_key_and_a_late_commit_is_fenced() {
    let mut asked = receive().await;
    asked.answer("HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops").await.has_status(500);
    let late = format!("SELECT oncegate.complete({})", asked.attempt);
    let late = sqlx::raw_sql(sqlx::AssertSqlSafe(late)).execute(&mut asked.database.connect().await).await;
    let code = late.unwrap_err().as_database_error().unwrap().code().unwrap().into_owned();
    assert_eq!(code, "OG001");
    let released = "SELECT count(*) FROM oncegate.records WHERE state = 'released'";
    assert_eq!(asked.database.number(released).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_success_without_a_completion_is_stored_and_logged() {
    let mut asked = receive().await;
    assert_eq!(asked.answer(CREATED).await.has_status(201).text(), "paid");
    assert!(asked.retry().await.has_status(201).is_replay());
    assert_eq!(counted(&asked.sidecar, &REPORTED).await, [0, 0, 0, 1]);
    asked.sidecar.process.logs("its transaction had not completed the record").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_without_a_completion_is_stored() {
    let mut asked = receive().await;
    asked.answer("HTTP/1.1 409 Conflict\r\nContent-Length: 4\r\n\r\nsold").await.has_status(409);
    assert_eq!(asked.retry().await.has_status(409).text(), "sold");
    assert_eq!(counted(&asked.sidecar, &REPORTED).await, [0, 0, 0, 0]);
}

/// A service should not do that; but the sidecar's own completion waits for no transaction, and runs after it.
#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_answers_before_its_commit_is_not_waited_for() {
    let mut asked = receive().await;
    let mut open = asked.database.connect().await;
    run(&mut open, "BEGIN").await;
    run(&mut open, &format!("SELECT oncegate.complete({})", asked.attempt)).await;
    let response = asked.answer(CREATED).await;
    assert_eq!(response.has_status(201).get("idempotency-status"), Some("not-stored"));
    asked.retry().await.is_problem(409, "request-in-progress");
    run(&mut open, "COMMIT").await;
    until("the response is added", async || asked.retry().await.status() == 201).await;
    // If the COMMIT falls between the sidecar's look at the record and its write, the completion looks as if it was missing.
    let counts = counted(&asked.sidecar, &REPORTED).await;
    assert!(counts == [0, 1, 0, 0] || counts == [0, 0, 0, 1], "{REPORTED:?}: {counts:?}");
}

/// The service retries a COMMIT whose reply was lost, or a proxy between them sends the request twice.
#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_that_runs_twice_commits_once() {
    let mut asked = receive().await;
    asked.complete("").await;
    let again = format!("SELECT oncegate.complete({})", asked.attempt);
    let again = sqlx::raw_sql(sqlx::AssertSqlSafe(again)).execute(&mut asked.database.connect().await).await;
    let code = again.unwrap_err().as_database_error().unwrap().code().unwrap().into_owned();
    assert_eq!(code, "OG001");
    assert_eq!(asked.answer(CREATED).await.has_status(201).text(), "paid");
    assert_eq!(asked.retry().await.has_status(201).text(), "paid");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_completed_by_the_service_has_the_retention_of_the_route() {
    let asked = receive_with(&["--retention=3d"]).await;
    asked.complete(", oncegate.response(201, NULL, NULL, 'paid')").await;
    let kept = "SELECT (expires_at - changed_at) / 1000 FROM oncegate.records";
    assert_eq!(asked.database.number(kept).await, 3 * 24 * 60 * 60);
}

/// A service may put anything into its record; fields that belong to a moment or a connection are not replayed anyway.
#[tokio::test(flavor = "multi_thread")]
async fn fields_that_no_record_may_keep_are_not_replayed() {
    let mut asked = receive().await;
    asked
        .complete(
            ", oncegate.response(201, ARRAY['content-type', 'content-length', 'connection', 'set-cookie', \
             'oncegate-token', 'x-own'], ARRAY['text/x', '2', 'close', 'session=1', '7', 'kept'], 'paid')",
        )
        .await;
    let first = asked.answer(CREATED).await;
    for response in [first, asked.retry().await] {
        assert_eq!((response.has_status(201).text(), response.get("content-type")), ("paid", Some("text/x")));
        assert_eq!(response.get("x-own"), Some("kept"), "other fields of the service are kept");
        assert_eq!((response.get("connection"), response.get("oncegate-token")), (None, None));
        assert_ne!(response.get("set-cookie"), Some("session=1"));
    }
}

const CARD: &str = "HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nX-Token: t\r\nContent-Length: 31\r\n\r\n\
    {\"id\":7,\"card\":{\"number\":4111}}";

/// The forms that would be stored are compared: a redacted response does not contradict the whole one that the service stored.
#[tokio::test(flavor = "multi_thread")]
async fn redaction_makes_no_response_differ() {
    let redacting =
        ["--redact-response=/card/number", "--redact-headers=x-token", "--stored-headers=x-token"];
    let of = |body: &str, token: &str| {
        let names = "ARRAY['content-type', 'x-token']";
        format!(", oncegate.response(201, {names}, ARRAY['application/json', '{token}'], '{body}')")
    };
    for (body, token, differs) in [
        (r#"{"id":7,"card":{"number":4111}}"#, "t", 0),
        // The service stores less than it sends, or another token.
        (r#"{"id":7,"card":{"number":null}}"#, "t", 0),
        (r#"{"id":7,"card":{"number":4111}}"#, "u", 0),
        (r#"{"id":8,"card":{"number":4111}}"#, "t", 1),
        (r#"<p>4111</p>"#, "t", 1),
    ] {
        let mut asked = receive_with(&redacting).await;
        asked.complete(&of(body, token)).await;
        let response = asked.answer(CARD).await;
        assert_eq!(response.has_status(201).text(), body, "the record counts");
        assert_eq!(asked.retry().await.has_status(201).text(), body);
        assert_eq!(counted(&asked.sidecar, &REPORTED).await, [1 - differs, 0, differs, 0], "{body}");
    }
}
