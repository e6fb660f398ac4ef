//! A receiver of webhooks over real sockets: what it answers, what it records, and what it does not.

mod postgres;
mod schemes;
mod sender;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use hmac::{Hmac, KeyInit as _, Mac as _};
use oncegate_core::{Clock, MemoryStore, OnAbandoned, SystemClock};
use oncegate_engine::{Attempt, Engine};
use oncegate_inbox::{
    DeadLetter, DeadLetterSink, DeadReason, HandlerError, Identity, Inbox, InboxCounts, InboxEventKind,
    Message, Processor, PutFuture,
};
use oncegate_testkit::{Faults, FaultyStore, ManualClock, until};
use oncegate_webhook::{DEFAULT_WINDOW, MIN_WINDOW, WebhookOptions, WebhookReceiver, WebhookScheme};
use sha2::Sha256;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use self::sender::{Response, SECRET, Sending, TIMEOUT, now};

// ---- a receiver in this process

/// The behaviour of a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Succeed,
    Retry,
    Reject,
    Panic,
}

const NOW: u64 = 1_700_000_000;

const PATH: &str = "/hooks/sender";

/// Everything around a receiver that can be looked at.
#[derive(Clone)]
struct World {
    store: Arc<MemoryStore<SystemClock>>,
    faults: Faults,
    engine: Engine,
    /// The clock that times are compared with.
    clock: Arc<ManualClock>,
    counts: InboxCounts,
    state: Arc<State>,
}

struct State {
    act: Mutex<Act>,
    /// The number of handlers that may go on.
    gate: Semaphore,
    begun: AtomicUsize,
    effects: Mutex<Vec<Arc<Message>>>,
    letters: Mutex<Vec<(String, DeadReason)>>,
}

struct Letters(Arc<State>);

impl DeadLetterSink for Letters {
    fn put<'a>(&'a self, letter: &'a DeadLetter) -> PutFuture<'a> {
        self.0.letters.lock().unwrap().push((letter.id.clone(), letter.reason));
        Box::pin(async { Ok(()) })
    }
}

impl World {
    /// Handlers go on at once.
    fn new() -> Self {
        let world = Self::with_closed_gate();
        world.state.gate.add_permits(1_000_000);
        world
    }

    /// Handlers wait for the gate.
    fn with_closed_gate() -> Self {
        let store = Arc::new(MemoryStore::new(SystemClock::new()));
        let (faulty, faults) = FaultyStore::new(store.clone());
        let state = State {
            act: Mutex::new(Act::Succeed),
            gate: Semaphore::new(0),
            begun: AtomicUsize::new(0),
            effects: Mutex::default(),
            letters: Mutex::default(),
        };
        Self {
            store,
            faults,
            engine: Engine::new(faulty),
            clock: Arc::new(ManualClock::at_millis(NOW * 1000)),
            counts: InboxCounts::default(),
            state: Arc::new(state),
        }
    }

    fn inbox(&self) -> Inbox {
        let letters = Letters(self.state.clone());
        let engine = self.engine.clone();
        Inbox::new(engine, "tests", Identity::broker(), OnAbandoned::Reexecute, letters).unwrap()
    }

    fn processor(&self) -> impl Processor + use<> {
        let state = self.state.clone();
        self.inbox().processor(move |attempt, message| run(state.clone(), attempt, message))
    }

    fn options(&self) -> WebhookOptions {
        self.options_of(WebhookScheme::standard(SECRET).unwrap())
    }

    fn options_of(&self, scheme: WebhookScheme) -> WebhookOptions {
        WebhookOptions::new(scheme).with_clock(self.clock.clone()).with_observer(self.counts.clone())
    }

    async fn serve(&self, options: WebhookOptions) -> (SocketAddr, WebhookReceiver<impl Processor + use<>>) {
        let receiver = WebhookReceiver::new("sender", options, self.processor()).unwrap();
        let router = Router::new().nest("/hooks", Router::new().route("/sender", receiver.route()));
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });
        (address, receiver)
    }

    fn act(&self, act: Act) {
        *self.state.act.lock().unwrap() = act;
    }

    fn effects(&self) -> usize {
        self.state.effects.lock().unwrap().len()
    }

    fn begun(&self) -> usize {
        self.state.begun.load(Ordering::SeqCst)
    }

    fn letters(&self) -> Vec<(String, DeadReason)> {
        self.state.letters.lock().unwrap().clone()
    }
}

async fn run(state: Arc<State>, _attempt: Attempt, message: Arc<Message>) -> Result<(), HandlerError> {
    state.begun.fetch_add(1, Ordering::SeqCst);
    state.gate.acquire().await.unwrap().forget();
    let act = *state.act.lock().unwrap();
    match act {
        Act::Succeed => {
            state.effects.lock().unwrap().push(message);
            Ok(())
        }
        Act::Retry => Err(HandlerError::retry("not now")),
        Act::Reject => Err(HandlerError::reject("never")),
        Act::Panic => panic!("a handler panics on purpose"),
    }
}

#[tokio::test]
async fn a_webhook_takes_effect_once_also_when_it_is_sent_again_at_another_time() {
    let world = World::new();
    let (address, _receiver) = world.serve(world.options()).await;
    let response = Sending::standard("msg_1", NOW, "{}").send(address, PATH).await.unwrap();
    assert_eq!((response.status, response.body.as_str()), (200, ""));
    // The same bytes again, and then with the time of another attempt: five seconds later, and days later.
    assert_eq!(Sending::standard("msg_1", NOW, "{}").send(address, PATH).await.unwrap(), response);
    for after in [5, 5 * 60 + 5, 75 * 3600 + 35 * 60] {
        world.clock.advance(Duration::from_secs(after));
        let at = world.clock.now().as_millis() / 1000;
        let response = Sending::standard("msg_1", at, "{}").send(address, PATH).await.unwrap();
        assert_eq!(response.status, 200);
    }
    assert_eq!((world.effects(), world.store.len()), (1, 1));
    assert_eq!(world.counts.get(InboxEventKind::Processed), 1);
    assert_eq!(world.counts.get(InboxEventKind::Duplicate), 4);
    // Another one is another one.
    let at = world.clock.now().as_millis() / 1000;
    assert_eq!(Sending::standard("msg_2", at, "{}").send(address, PATH).await.unwrap().status, 200);
    assert_eq!((world.effects(), world.store.len()), (2, 2));
}

/// The published examples of the other two, as they come over the wire.
#[tokio::test]
async fn webhooks_of_stripe_and_github_take_effect_once() {
    let world = World::new();
    let clock = Arc::new(ManualClock::at_millis(1_533_204_620_000));
    let mut mac = Hmac::<Sha256>::new_from_slice(b"webhook_secret").unwrap();
    let payload = r#"{"id":"evt_1","pending_webhooks":1}"#;
    mac.update(format!("1533204620.{payload}").as_bytes());
    let signature: String = mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let stripe = Sending::of(&[("Stripe-Signature", &format!("t=1533204620,v1={signature},v0=00"))], payload);
    let options = world.options_of(WebhookScheme::stripe("webhook_secret").unwrap()).with_clock(clock);
    let (address, _receiver) = world.serve(options).await;
    for _ in 0..3 {
        assert_eq!(stripe.send(address, PATH).await.unwrap().status, 200);
    }
    assert_eq!(world.effects(), 1);

    let world = World::new();
    let signature = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";
    let github = Sending::of(
        &[
            ("X-GitHub-Delivery", "72d3162e-cc78-11e3-81ab-4c9367dc0958"),
            ("X-GitHub-Event", "push"),
            ("X-Hub-Signature-256", signature),
        ],
        "Hello, World!",
    );
    let scheme = WebhookScheme::github("It's a Secret to Everybody").unwrap();
    let (address, _receiver) = world.serve(world.options_of(scheme)).await;
    for _ in 0..3 {
        assert_eq!(github.send(address, PATH).await.unwrap().status, 200);
    }
    assert_eq!(world.effects(), 1);
    // Delivered by hand, it has the same identifier; another event has another one.
    let other = github.clone().with("X-GitHub-Delivery", "0b2f3a10-cc78-11e3-8a1b-4c9367dc0958");
    assert_eq!(other.send(address, PATH).await.unwrap().status, 200);
    assert_eq!(world.effects(), 2);
}

#[tokio::test]
async fn an_invalid_signature_is_never_recorded() {
    let world = World::new();
    let options = world.options().with_max_body_bytes(100).unwrap();
    let (address, _receiver) = world.serve(options).await;
    let good = Sending::standard("msg_1", NOW, "{}");
    let mut said = Vec::new();
    for refused in [
        good.clone().without("webhook-id"),
        good.clone().without("webhook-timestamp"),
        good.clone().without("webhook-signature"),
        good.clone().with("webhook-id", "msg_2"),
        good.clone().with("webhook-timestamp", &(NOW + 1).to_string()),
        good.clone().with("webhook-signature", "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="),
        Sending { payload: b"{} ".to_vec(), ..good.clone() },
        Sending { payload: Vec::new(), ..good.clone() },
        // Good signatures of another time.
        Sending::standard("msg_1", NOW - 301, "{}"),
        Sending::standard("msg_1", NOW + 301, "{}"),
        Sending::standard("msg_1", 0, "{}"),
    ] {
        let response = refused.send(address, PATH).await.unwrap();
        assert_eq!(response.status, 400, "{refused:?}");
        let headers: Vec<_> = response.headers.into_iter().filter(|(name, _)| name != "date").collect();
        said.push((response.body, headers));
    }
    // The response does not show how far the verification came.
    assert_eq!(said[0].0, r#"{"type":"urn:oncegate:problem:webhook-refused","status":400}"#);
    assert!(said.iter().all(|one| *one == said[0]), "{said:?}");

    // Too long by its Content-Length, and too long without one.
    let long = Sending::standard("msg_1", NOW, vec![b'x'; 101]);
    let response = long.send(address, PATH).await.unwrap();
    assert_eq!((response.status, response.problem()), (413, "request-too-large"));
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = long.head(PATH, 0).replace("content-length: 0", "transfer-encoding: chunked");
    stream.write_all(head.as_bytes()).await.unwrap();
    for _ in 0..2 {
        let _sent = stream.write_all(format!("33\r\n{}\r\n", "x".repeat(0x33)).as_bytes()).await;
    }
    assert_eq!(Response::read(stream).await.unwrap().status, 413);

    for method in ["GET", "PUT", "DELETE", "OPTIONS"] {
        let response = Sending { method, ..good.clone() }.send(address, PATH).await.unwrap();
        assert_eq!((response.status, response.header("allow")), (405, Some("POST")), "{method}");
    }
    assert_eq!((world.begun(), world.store.len(), world.letters().len()), (0, 0, 0));
    assert_eq!(world.counts.get(InboxEventKind::Refused), 13);
    // The valid event is still accepted.
    assert_eq!(good.send(address, PATH).await.unwrap().status, 200);
    assert_eq!((world.effects(), world.store.len()), (1, 1));
}

#[tokio::test]
async fn a_payload_that_does_not_arrive_is_never_recorded() {
    let world = World::new();
    let options = world.options().with_body_timeout(Duration::from_secs(1)).unwrap();
    let (address, _receiver) = world.serve(options).await;
    let good = Sending::standard("msg_1", NOW, "{}");
    // It stays away.
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(good.head(PATH, 2).as_bytes()).await.unwrap();
    stream.write_all(b"{").await.unwrap();
    let response = Response::read(stream).await.unwrap();
    assert_eq!((response.status, response.problem()), (400, "request-incomplete"));
    // The connection breaks, so there is no response.
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(good.head(PATH, 2).as_bytes()).await.unwrap();
    stream.write_all(b"{").await.unwrap();
    drop(stream);
    assert_eq!((world.begun(), world.store.len()), (0, 0));
    assert_eq!(good.send(address, PATH).await.unwrap().status, 200);
    assert_eq!((world.begun(), world.store.len()), (1, 1));
}

/// The payload is verified and passed on unchanged, also if it is not text.
#[tokio::test]
async fn payloads_need_not_be_text() {
    let world = World::new();
    let options = world.options().with_header("X-Trace").unwrap();
    let (address, _receiver) = world.serve(options).await;
    let payload: Vec<u8> = (0..=255).collect();
    let sending = Sending::standard("msg_1", NOW, payload.clone())
        .with("content-type", "application/octet-stream")
        .with("x-trace", "abc")
        .with("cookie", "a=b");
    // In chunks.
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = sending.head(PATH, 0).replace("content-length: 0", "transfer-encoding: chunked");
    stream.write_all(head.as_bytes()).await.unwrap();
    for chunk in payload.chunks(16) {
        stream.write_all(b"10\r\n").await.unwrap();
        stream.write_all(chunk).await.unwrap();
        stream.write_all(b"\r\n").await.unwrap();
    }
    stream.write_all(b"0\r\n\r\n").await.unwrap();
    assert_eq!(Response::read(stream).await.unwrap().status, 200);
    let seen = world.state.effects.lock().unwrap()[0].clone();
    assert_eq!(seen.payload, payload);
    assert_eq!((seen.topic.as_str(), seen.broker_id.as_deref()), ("sender", Some("msg_1")));
    let names: Vec<_> = seen.headers.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["content-type", "webhook-id", "webhook-timestamp", "x-trace"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_hundred_at_once_take_effect_once() {
    let world = World::with_closed_gate();
    let (address, _receiver) = world.serve(world.options()).await;
    let sending = Sending::standard("msg_1", NOW, "{}");
    let tasks: Vec<_> = (0..100)
        .map(|_| {
            let sending = sending.clone();
            tokio::spawn(async move { sending.send(address, PATH).await.unwrap() })
        })
        .collect();
    // 99 of them get a 503 while the first one is being processed.
    until("the others are answered", async || world.counts.get(InboxEventKind::InFlight) == 99).await;
    assert_eq!(world.begun(), 1);
    world.state.gate.add_permits(1_000_000);
    let mut sent_away = 0;
    for task in tasks {
        let response = task.await.unwrap();
        if response.status == 200 {
            continue;
        }
        assert_eq!((response.status, response.problem()), (503, "request-in-progress"));
        let after: u64 = response.header("retry-after").unwrap().parse().unwrap();
        assert!((1..=60).contains(&after), "{after}");
        sent_away += 1;
    }
    // After all are answered, the first one ends, and the others get a 200.
    for _ in 0..sent_away {
        assert_eq!(sending.send(address, PATH).await.unwrap().status, 200);
    }
    assert_eq!((sent_away, world.begun(), world.effects(), world.store.len()), (99, 1, 1, 1));
}

#[tokio::test]
async fn processing_goes_on_when_the_sender_hangs_up() {
    let world = World::with_closed_gate();
    let (address, receiver) = world.serve(world.options()).await;
    let sending = Sending::standard("msg_1", NOW, "{}");
    let stream = sending.begin(address, PATH).await;
    until("it is begun", async || world.begun() == 1).await;
    drop(stream);
    // All senders have hung up, and `drain` still waits for the handlers.
    assert!(!receiver.drain(Duration::from_millis(200)).await);
    assert_eq!(sending.send(address, PATH).await.unwrap().status, 503);
    world.state.gate.add_permits(1);
    assert!(receiver.drain(TIMEOUT).await);
    assert_eq!((world.begun(), world.effects()), (1, 1));
    assert_eq!(world.counts.get(InboxEventKind::Processed), 1);
    assert_eq!(sending.send(address, PATH).await.unwrap().status, 200);
    assert_eq!((world.begun(), world.effects()), (1, 1));
}

#[tokio::test]
async fn failed_webhooks_come_again_and_dead_ones_do_not() {
    let world = World::new();
    let (address, _receiver) = world.serve(world.options()).await;
    let sending = Sending::standard("msg_1", NOW, "{}");
    for act in [Act::Retry, Act::Panic] {
        world.act(act);
        let response = sending.send(address, PATH).await.unwrap();
        assert_eq!((response.status, response.problem()), (500, "handler-failed"));
        assert!(!response.body.contains("not now"));
    }
    world.act(Act::Succeed);
    assert_eq!(sending.send(address, PATH).await.unwrap().status, 200);
    assert_eq!((world.begun(), world.effects()), (3, 1));

    // Rejected, and failed for the fifth time: one dead letter each, and the sender is done.
    for (id, act, attempts) in [("msg_2", Act::Reject, 1), ("msg_3", Act::Retry, 10)] {
        world.act(act);
        let sending = Sending::standard(id, NOW, "{}");
        for _ in 1..attempts {
            assert_eq!(sending.send(address, PATH).await.unwrap().status, 500);
        }
        for _ in 0..3 {
            let response = sending.send(address, PATH).await.unwrap();
            assert_eq!((response.status, response.body.as_str()), (200, ""));
        }
    }
    let letters = world.letters();
    assert_eq!(
        letters.iter().map(|(_, reason)| *reason).collect::<Vec<_>>(),
        [DeadReason::Rejected, DeadReason::AttemptsExhausted]
    );
    assert_eq!((world.begun(), world.effects()), (3 + 1 + 10, 1));
    assert_eq!(world.counts.get(InboxEventKind::Dead(DeadReason::Rejected)), 3);
}

#[tokio::test]
async fn while_the_store_is_down_nothing_is_acknowledged() {
    let world = World::new();
    let (address, _receiver) = world.serve(world.options()).await;
    let sending = Sending::standard("msg_1", NOW, "{}");
    world.faults.outage();
    let response = sending.send(address, PATH).await.unwrap();
    assert_eq!((response.status, response.problem()), (503, "store-unavailable"));
    assert_eq!(response.header("retry-after"), Some("5"));
    assert_eq!(world.begun(), 0);
    world.faults.heal();
    assert_eq!(sending.send(address, PATH).await.unwrap().status, 200);
    assert_eq!(world.effects(), 1);
}

#[tokio::test]
async fn the_number_of_running_webhooks_is_limited() {
    let world = World::with_closed_gate();
    let (address, receiver) = world.serve(world.options().with_max_running(2).unwrap()).await;
    let mut streams = Vec::new();
    for number in 0..2 {
        let sending = Sending::standard(&format!("msg_{number}"), NOW, "{}");
        streams.push(sending.begin(address, PATH).await);
    }
    until("both are begun", async || world.begun() == 2).await;
    let third = Sending::standard("msg_3", NOW, "{}");
    let response = third.send(address, PATH).await.unwrap();
    assert_eq!((response.status, response.problem()), (503, "overloaded"));
    // One whose sender hung up counts as long as it runs.
    streams.pop();
    assert_eq!(third.send(address, PATH).await.unwrap().status, 503);
    assert_eq!((world.counts.get(InboxEventKind::Overloaded), world.begun()), (2, 2));
    // A sender without a valid signature does not learn that the receiver is busy.
    let bad = third.clone().with("webhook-id", "msg_4");
    assert_eq!(bad.send(address, PATH).await.unwrap().status, 400);
    world.state.gate.add_permits(3);
    assert!(receiver.drain(TIMEOUT).await);
    assert_eq!(third.send(address, PATH).await.unwrap().status, 200);
    assert_eq!(world.effects(), 3);
}

#[tokio::test]
async fn a_processor_that_forgets_too_soon_is_refused() {
    let world = World::new();
    let receiver = |retention: Duration, options: WebhookOptions| {
        let state = world.state.clone();
        let inbox = world.inbox().with_retention(retention).unwrap();
        let processor = inbox.processor(move |attempt, message| run(state.clone(), attempt, message));
        WebhookReceiver::new("sender", options, processor).map(drop)
    };
    let second = Duration::from_secs(1);
    assert_eq!(MIN_WINDOW, Duration::from_secs(75 * 3600 + 35 * 60));
    assert!(receiver(DEFAULT_WINDOW, world.options()).is_ok());
    let error = receiver(DEFAULT_WINDOW - second, world.options()).unwrap_err().to_string();
    assert!(error.contains("with_window"), "{error}");
    let shorter = || world.options().with_window(MIN_WINDOW).unwrap();
    assert!(receiver(MIN_WINDOW, shorter()).is_ok());
    assert!(receiver(MIN_WINDOW - second, shorter()).is_err());
    assert!(world.options().with_window(MIN_WINDOW - second).is_err());
    assert!(receiver(DEFAULT_WINDOW, world.options().with_window(DEFAULT_WINDOW + second).unwrap()).is_err());
    // What else is out of its bounds.
    let options = || world.options();
    assert!(
        options().with_max_body_bytes(0).is_err()
            && options().with_max_body_bytes(64 * 1024 * 1024 + 1).is_err()
    );
    assert!(options().with_body_timeout(Duration::ZERO).is_err());
    assert!(options().with_body_timeout(Duration::from_secs(601)).is_err());
    assert!(options().with_max_running(0).is_err() && options().with_max_running(1_000_001).is_err());
    assert!(options().with_header("a b").is_err());
}

/// Every value of every event that is traced on this thread.
#[derive(Clone, Default)]
struct Traces(Arc<Mutex<String>>);

impl tracing::Subscriber for Traces {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, attributes: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        attributes.record(&mut self.clone());
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, values: &tracing::span::Record<'_>) {
        values.record(&mut self.clone());
    }

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut self.clone());
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

impl tracing::field::Visit for Traces {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        self.0.lock().unwrap().push_str(&format!("{field}={value:?}\n"));
    }
}

#[tokio::test]
async fn logs_contain_outcomes_and_no_secrets() {
    let traces = Traces::default();
    let _guard = tracing::subscriber::set_default(traces.clone());
    let world = World::new();
    let (address, _receiver) = world.serve(world.options().with_max_body_bytes(1000).unwrap()).await;
    let of = |id: &str, at| Sending::standard(id, at, r#"{"card":"4242"}"#);
    for (act, status) in [(Act::Retry, 500), (Act::Panic, 500), (Act::Succeed, 200), (Act::Succeed, 200)] {
        world.act(act);
        assert_eq!(of("msg_private", NOW).send(address, PATH).await.unwrap().status, status);
    }
    world.act(Act::Reject);
    assert_eq!(of("msg_private_too", NOW).send(address, PATH).await.unwrap().status, 200);
    assert_eq!(of("msg_private", 0).send(address, PATH).await.unwrap().status, 400);
    let forged = of("msg_private", NOW).with("webhook-id", "msg_private_other");
    assert_eq!(forged.send(address, PATH).await.unwrap().status, 400);
    let long = Sending::standard("msg_private", NOW, "4242".repeat(1000));
    assert_eq!(long.send(address, PATH).await.unwrap().status, 413);
    world.faults.outage();
    assert_eq!(of("msg_private", NOW).send(address, PATH).await.unwrap().status, 503);

    let text = traces.0.lock().unwrap().clone();
    for said in
        ["signature-wrong", "timestamp-out-of-tolerance", "rejected", "too long", "duplicate", "sender"]
    {
        assert!(text.contains(said), "{said} is not in {text}");
    }
    for private in ["msg_private", "4242", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "v1,", "not now", "never"] {
        assert!(!text.contains(private), "{private} is in {text}");
    }
}

// ---- a receiver that is killed

/// `examples/webhook.rs`, as its own process.
struct Service {
    process: Child,
    address: SocketAddr,
}

impl Service {
    fn start(data: &Path, hang: Option<&str>) -> Self {
        let here = std::env::current_exe().unwrap();
        let program: PathBuf = here.parent().unwrap().parent().unwrap().join("examples/webhook");
        assert!(program.exists(), "cargo build -p oncegate-webhook --example webhook");
        let mut command = Command::new(program);
        command.env_clear().env("PORT", "0").env("DATA", data).env("STANDARD_SECRET", SECRET);
        if let Some(hang) = hang {
            command.env("HANG", hang);
        }
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut output = std::io::BufReader::new(process.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut output, &mut line).unwrap();
        let address = line.trim().strip_prefix("listening on http://").expect("an address").parse().unwrap();
        Self { process, address }
    }

    /// As `kill -9` does it.
    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _killed = self.process.kill();
        let _waited = self.process.wait();
    }
}

/// Returns the number of payments in the bank, and the number of attempts.
fn ledger(data: &Path) -> (usize, usize) {
    let effects = std::fs::read_dir(data.join("effects")).unwrap();
    let effects = effects.filter(|entry| entry.as_ref().unwrap().path().extension().is_none()).count();
    let attempts = std::fs::read_to_string(data.join("attempts")).unwrap_or_default();
    (effects, attempts.lines().count())
}

/// Sends as real senders do, until it gets a 200.
async fn send_until_done(id: &str, to: SocketAddr) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let response = Sending::standard(id, now(), "{}").send(to, "/webhooks/standard").await.unwrap();
        match response.status {
            200 => return,
            503 => assert!(Instant::now() < deadline, "not done in time: {response:?}"),
            _ => panic!("{response:?}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn a_receiver_that_is_killed_in_the_middle_pays_once() {
    for hang in ["before-effect", "after-effect"] {
        let directory = tempfile::tempdir().unwrap();
        let data = directory.path();
        let mut service = Service::start(data, Some(hang));
        let paid = usize::from(hang == "after-effect");
        let stream =
            Sending::standard("msg_1", now(), "{}").begin(service.address, "/webhooks/standard").await;
        until("the handler is where it hangs", async || ledger(data) == (paid, 1)).await;
        service.kill();
        assert_eq!(Response::read(stream).await, None);

        // Its sender comes again, to the next process.
        let mut service = Service::start(data, None);
        send_until_done("msg_1", service.address).await;
        assert_eq!(ledger(data), (1, 2), "{hang}");
        // And once more, after the next restart.
        service.kill();
        let service = Service::start(data, None);
        send_until_done("msg_1", service.address).await;
        send_until_done("msg_2", service.address).await;
        assert_eq!(ledger(data), (2, 3), "{hang}");
    }
}
