//! A service that completed its record without a response is asked for that response if no process lived to add it.

use crate::relay::Gate;
use crate::support::{Message, Service, Sidecar, Wire, ask, request};
use crate::world::{Database, Kind, Operation, World, run};
use crate::{SHORT, counted, metrics};

const PATH: &str = "/oncegate/outcome";
const ASKING: [&str; 2] = [SHORT[0], "--reconcile-path=/oncegate/outcome"];

/// The numbers of questions, by result.
async fn questions(sidecar: &Sidecar) -> [u64; 4] {
    let text = metrics(sidecar).await;
    ["happened", "unreplayable", "did-not-happen", "cannot-tell"].map(|result| {
        let series = format!("oncegate_reconciled_total{{result=\"{result}\"}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&series));
        line.unwrap_or_else(|| panic!("no {series}")).parse().unwrap()
    })
}

/// Asserts that one payment was made, that a retry gets its response from the service, and every later one from the record.
async fn answers_retries(world: &mut World, key: &str, effects: i64) {
    let before = questions(&world.sidecar).await;
    let response = world.retry(Operation::Pay, key).await;
    assert!(response.has_status(201).is_replay(), "{:?}", response.head);
    let charge = response.json();
    assert_eq!((&charge["order_id"], &charge["amount_cents"]), (&1.into(), &900.into()));
    let newest = world.database.number("SELECT max(id)::bigint FROM charges").await;
    assert_eq!((charge["id"].as_i64(), world.effects(Operation::Pay).await), (Some(newest), effects));
    assert_eq!(response.get("oncegate-outcome"), None);
    let after = questions(&world.sidecar).await;
    assert_eq!(after, [before[0] + 1, before[1], before[2], before[3]]);

    world.service.kill().await;
    let again = world.ask(Operation::Pay, key).await;
    assert!(again.has_status(201).is_replay(), "{:?}", again.head);
    assert_eq!((&again.body, again.get("content-type")), (&response.body, response.get("content-type")));
    assert_eq!(questions(&world.sidecar).await, after);
    world.restart_service().await;
}

pub(crate) async fn both_are_killed_after_the_commit_and_the_response_is_asked_for(kind: Kind) {
    let mut world = World::start(kind, &ASKING).await;
    // The form of an ordinary response.
    let plain = world.ask(Operation::Pay, "plain").await;
    let effects = world.effects(Operation::Pay).await;
    world.relay.set(Gate::AfterCommit);
    let _client = world.send(Operation::Pay, "committed").await;
    world.relay.holds(1).await;
    world.has_committed(effects + 1).await;
    world.sidecar.process.kill().await;
    world.service.kill().await;
    world.relay.cut().await;
    world.restart_service().await;
    world.restart_sidecar(&ASKING).await;
    answers_retries(&mut world, "committed", effects + 1).await;
    let again = world.ask(Operation::Pay, "committed").await;
    for name in ["content-type", "location"] {
        assert_eq!(again.get(name), plain.has_status(201).get(name), "{name}");
    }
    let members = |response: &Message| -> Vec<String> {
        response.json().as_object().unwrap().keys().cloned().collect()
    };
    assert_eq!(members(&again), members(&plain));
    // Only the sidecar gets the details.
    let from_outside = request("GET", PATH, &["Oncegate-Record: 00", "Oncegate-Token: 1"], "");
    world.sidecar.ask(&from_outside).await.has_status(400);
}

pub(crate) async fn a_sidecar_killed_before_it_adds_the_response_asks_for_it(kind: Kind) {
    let mut world = World::start_with(kind, &ASKING, "executed").await;
    let _client = world.send(Operation::Pay, "executed").await;
    world.sidecar.process.logs("failpoint executed").await;
    world.sidecar.process.kill().await;
    world.restart_sidecar(&ASKING).await;
    answers_retries(&mut world, "executed", 1).await;
}

/// The first client is told to retry, and so are all others until the service is back.
pub(crate) async fn a_service_killed_after_its_commit_is_asked_when_it_is_back(kind: Kind) {
    let flags = [SHORT[0], ASKING[1], "--reconcile-timeout=500ms"];
    let mut world = World::start(kind, &flags).await;
    world.relay.set(Gate::AfterCommit);
    let mut client = world.send(Operation::Pay, "committed").await;
    world.relay.holds(1).await;
    world.has_committed(1).await;
    world.service.kill().await;
    is_told_to_retry_later(&client.message().await, 502);
    world.relay.cut().await;
    is_told_to_retry_later(&world.retry(Operation::Pay, "committed").await, 503);
    assert_eq!(questions(&world.sidecar).await, [0, 0, 0, 1]);
    world.restart_service().await;
    // Another sidecar, which gives the service more time.
    world.sidecar.process.kill().await;
    world.restart_sidecar(&ASKING).await;
    answers_retries(&mut world, "committed", 1).await;
}

fn is_told_to_retry_later(response: &Message, status: u16) {
    response.is_problem(status, "response-awaited");
    assert_eq!((&response.json()["retry"], response.get("retry-after")), (&"same-key".into(), Some("1")));
}

const KEY: &str = "Idempotency-Key: order-1";

/// A request whose service, played by the test, has committed without a response.
struct Committed {
    database: Database,
    service: Service,
    sidecar: Sidecar,
    client: Wire,
    /// The connection of the request, which is not answered yet.
    wire: Wire,
    record: String,
    token: String,
}

impl Committed {
    async fn start(asks_for: &str) -> Self {
        let (database, service) = (Database::new().await, Service::new().await);
        let sidecar = sidecar(&database, &service, asks_for).await;
        let mut client = sidecar.connect().await;
        client.send(order()).await;
        let mut wire = service.accept().await;
        let asked = wire.message().await;
        let field = |name| asked.get(name).unwrap().to_owned();
        let (record, token) = (field("oncegate-record"), field("oncegate-token"));
        let complete = format!("SELECT oncegate.complete(decode('{record}', 'hex'), {token})");
        run(&mut database.connect().await, &complete).await;
        Self { database, service, sidecar, client, wire, record, token }
    }

    /// The service commits, and is gone before it responds.
    async fn lost() -> Self {
        Self::lost_asking_for(LONG).await
    }

    async fn lost_asking_for(asks_for: &str) -> Self {
        let mut committed = Self::start(asks_for).await;
        drop(std::mem::replace(&mut committed.wire, Wire::new(tokio::io::empty())));
        is_told_to_retry_later(&committed.client.message().await, 502);
        committed
    }

    async fn retry(&self) -> Wire {
        let mut client = self.sidecar.connect().await;
        client.send(order()).await;
        client
    }

    /// The question, which asks about the committed attempt.
    async fn question(&self) -> Wire {
        let mut wire = self.service.accept().await;
        let question = wire.message().await;
        assert_eq!(question.head.line, format!("GET {PATH} HTTP/1.1"));
        for (name, value) in [
            ("oncegate-record", &*self.record),
            ("oncegate-token", &self.token),
            ("oncegate-attempt", "1"),
            ("oncegate-method", "POST"),
            ("oncegate-target", "/orders"),
            ("idempotency-key", "order-1"),
        ] {
            assert_eq!(question.get(name), Some(value), "{name}");
        }
        wire
    }

    fn reports(&self, status: &str, outcome: &str, fields: &str, body: &str) -> String {
        format!(
            "HTTP/1.1 {status}\r\nOncegate-Outcome: {outcome}\r\nOncegate-Record: {}\r\nOncegate-Token: {}\r\n{fields}\
             Content-Length: {}\r\n\r\n{body}",
            self.record,
            self.token,
            body.len()
        )
    }

    /// The response to a retry if the service sends this reply.
    async fn response_to_retry(&self, response: &str) -> Message {
        let mut client = self.retry().await;
        self.question().await.send(response).await;
        client.message().await
    }
}

/// Longer than each of these tests takes.
const LONG: &str = "--reconcile-timeout=60s";

async fn sidecar(database: &Database, service: &Service, asks_for: &str) -> Sidecar {
    database.sidecar(service.address, &[ASKING[1], asks_for], "").await
}

fn order() -> String {
    request("POST", "/orders", &[KEY], "{}")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_committed_request_is_never_executed_again_whatever_the_service_reports() {
    let mut committed = Committed::lost().await;
    let no = committed.reports("404 Not Found", "did-not-happen", "", "");
    committed.response_to_retry(&no).await.is_problem(422, "replay-unavailable");
    committed.sidecar.process.logs("nothing is executed").await;
    committed.service.is_not_called().await;
    assert_eq!(questions(&committed.sidecar).await, [0, 0, 1, 0]);
    // The service may have looked in the wrong place.
    let yes = committed.reports("201 Created", "happened", "Content-Type: text/x\r\n", "paid");
    let response = committed.response_to_retry(&yes).await;
    assert_eq!((response.has_status(201).text(), response.is_replay()), ("paid", true));
    assert_eq!(questions(&committed.sidecar).await, [1, 0, 1, 0]);
    assert_eq!(counted(&committed.sidecar, &["executing", "response-added"]).await, [1, 1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_that_the_service_has_not_kept_is_not_asked_for_again() {
    let committed = Committed::lost().await;
    let gone = committed.reports("200 OK", "happened", "Idempotency-Store: tombstone\r\n", "");
    committed.response_to_retry(&gone).await.is_problem(422, "replay-unavailable");
    committed.sidecar.ask(&order()).await.is_problem(422, "replay-unavailable");
    committed.service.is_not_called().await;
    assert_eq!(questions(&committed.sidecar).await, [0, 1, 0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_cannot_tell_is_asked_until_the_time_out_and_again_by_the_next_retry() {
    let committed = Committed::lost_asking_for("--reconcile-timeout=4s").await;
    let unknown = committed.reports("404 Not Found", "unknown", "", "");
    let mut client = committed.retry().await;
    committed.question().await.send(&unknown).await;
    // The service is asked again, and this question gets no reply.
    let _hangs = committed.question().await;
    committed.sidecar.ask(&order()).await.is_problem(409, "request-in-progress");
    is_told_to_retry_later(&client.message().await, 503);
    assert_eq!(questions(&committed.sidecar).await, [0, 0, 0, 1]);
    let response =
        committed.response_to_retry(&committed.reports("201 Created", "happened", "", "paid")).await;
    assert_eq!((response.has_status(201).text(), response.is_replay()), ("paid", true));
}

/// The executing sidecar is alive but slow, while another one asks for the response.
#[tokio::test(flavor = "multi_thread")]
async fn two_sidecars_agree_on_the_first_response() {
    for asker_is_first in [false, true] {
        let mut committed = Committed::start(LONG).await;
        let other = sidecar(&committed.database, &committed.service, LONG).await;
        let mut duplicate = other.connect().await;
        duplicate.send(order()).await;
        let mut question = committed.question().await;
        let found = committed.reports("201 Created", "happened", "", "found");
        let said = "HTTP/1.1 201 Created\r\nContent-Length: 4\r\n\r\nsaid";
        let (first, second, wins) = if asker_is_first {
            question.send(&found).await;
            let second = duplicate.message().await;
            committed.wire.send(said).await;
            (committed.client.message().await, second, "found")
        } else {
            committed.wire.send(said).await;
            let first = committed.client.message().await;
            question.send(&found).await;
            (first, duplicate.message().await, "said")
        };
        assert_eq!((first.has_status(201).text(), first.is_replay()), (wins, false));
        assert_eq!((second.has_status(201).text(), second.is_replay()), (wins, true));
        for sidecar in [&committed.sidecar, &other] {
            let again = sidecar.ask(&order()).await;
            assert_eq!((again.has_status(201).text(), again.is_replay()), (wins, true));
        }
        committed.service.is_not_called().await;
        let differs = if asker_is_first { &committed.sidecar } else { &other };
        assert_eq!(counted(differs, &["response-differs"]).await, [1]);
    }
}

/// Two sidecars may ask at the same time, and both get the response.
#[tokio::test(flavor = "multi_thread")]
async fn two_sidecars_may_ask_at_the_same_time() {
    let committed = Committed::lost().await;
    let other = sidecar(&committed.database, &committed.service, LONG).await;
    let mut one = committed.retry().await;
    let mut first = committed.question().await;
    let mut two = other.connect().await;
    two.send(order()).await;
    let mut second = committed.question().await;
    let found = committed.reports("201 Created", "happened", "", "found");
    for wire in [&mut first, &mut second] {
        wire.send(&found).await;
    }
    for client in [&mut one, &mut two] {
        let response = client.message().await;
        assert_eq!((response.has_status(201).text(), response.is_replay()), ("found", true));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_response_is_stored_although_the_client_hangs_up() {
    let committed = Committed::lost().await;
    let client = committed.retry().await;
    let mut question = committed.question().await;
    drop(client);
    question.send(committed.reports("201 Created", "happened", "", "found")).await;
    oncegate_testkit::until("the response is stored", async || {
        counted(&committed.sidecar, &["response-added"]).await == [1]
    })
    .await;
    let response = committed.sidecar.ask(&order()).await;
    assert_eq!((response.has_status(201).text(), response.is_replay()), ("found", true));
    committed.service.is_not_called().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_without_a_path_for_questions_is_not_asked() {
    let (database, service) = (Database::new().await, Service::new().await);
    let sidecar = database.sidecar(service.address, &[], "").await;
    let mut client = sidecar.connect().await;
    client.send(order()).await;
    let mut wire = service.accept().await;
    let asked = wire.message().await;
    let complete = format!(
        "SELECT oncegate.complete(decode('{}', 'hex'), {})",
        asked.get("oncegate-record").unwrap(),
        asked.get("oncegate-token").unwrap()
    );
    run(&mut database.connect().await, &complete).await;
    drop(wire);
    client.message().await.is_problem(422, "replay-unavailable");
    ask(sidecar.address, &order()).await.is_problem(422, "replay-unavailable");
    service.is_not_called().await;
}
