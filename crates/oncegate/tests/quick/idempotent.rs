//! `#[idempotent]` and wrapped functions in a program: on functions of every kind, and in a process that is killed in the middle.

use std::fmt::{self, Display};
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::http::{Request, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Router, body::Body};
use oncegate::core::{KeyError, OnAbandoned, State};
use oncegate::engine::{ErrorFate, ReleaseIf};
use oncegate::{
    Attempt, EmbeddedOptions, EmbeddedStore, Engine, FunctionError, IdempotencyKey, MemoryStore, Policy,
    SystemClock, idempotent,
};
use serde::{Deserialize, Serialize};
use tower::ServiceExt as _;

#[derive(Clone, Serialize)]
struct Order {
    id: String,
    version: u32,
    cents: u64,
    /// Different in each attempt.
    sent_at: u64,
}

impl Order {
    fn new(id: &str) -> Self {
        Self { id: id.to_owned(), version: 1, cents: 500, sent_at: 0 }
    }

    fn reference(&self) -> String {
        format!("{}/{}", self.id, self.version)
    }
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Receipt {
    run: usize,
    cents: u64,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum PayError {
    Declined,
    NotSent,
}

/// Counts runs. It serializes to nothing, so that it can be an argument like any other.
#[derive(Clone, Default, Serialize)]
struct Bank {
    #[serde(skip)]
    runs: Arc<AtomicUsize>,
}

impl Bank {
    fn charge(&self, cents: u64) -> Receipt {
        Receipt { run: self.runs.fetch_add(1, Ordering::SeqCst) + 1, cents }
    }

    fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }
}

fn engine() -> Engine {
    Engine::new(MemoryStore::new(SystemClock::new()))
}

#[idempotent(key = "order-{order.id}-{order.version}", scope = "charge", errors = "unknown", skip(bank))]
async fn charge(engine: &Engine, bank: &Bank, order: Order) -> Result<Receipt, FunctionError<PayError>> {
    if order.cents == 0 {
        return Err(PayError::Declined);
    }
    let cents = checked(order.cents)?;
    Ok(bank.charge(cents))
}

fn checked(cents: u64) -> Result<u64, PayError> {
    if cents == 13 { Err(PayError::NotSent) } else { Ok(cents) }
}

#[tokio::test]
async fn a_function_takes_effect_once_for_each_key() {
    let (engine, bank) = (engine(), Bank::default());
    for _ in 0..3 {
        let receipt = charge(&engine, &bank, Order::new("a")).await.unwrap();
        assert_eq!(receipt, Receipt { run: 1, cents: 500 });
    }
    let other = Order { cents: 900, ..Order::new("a") };
    assert!(matches!(charge(&engine, &bank, other.clone()).await, Err(FunctionError::KeyReused)));
    assert_eq!(charge(&engine, &bank, Order { version: 2, ..other }).await.unwrap().run, 2);
    assert_eq!(charge(&engine, &bank, Order::new("b")).await.unwrap().run, 3);

    // The values are kept apart, and none is empty.
    let key = |id: &str, version| Order { id: id.to_owned(), version, ..Order::new("") };
    assert_eq!(charge(&engine, &bank, key("c-1", 1)).await.unwrap().run, 4);
    assert_eq!(charge(&engine, &bank, key("c", 1)).await.unwrap().run, 5);
    let result = charge(&engine, &bank, key("", 1)).await;
    assert!(matches!(result, Err(FunctionError::Key(KeyError::EmptyValue))), "{result:?}");

    // `return` and `?` end the body, and not the generated code around it. After an error the outcome is unknown.
    for (id, cents, error) in [("d", 0, PayError::Declined), ("e", 13, PayError::NotSent)] {
        let order = Order { cents, ..Order::new(id) };
        let result = charge(&engine, &bank, order.clone()).await;
        assert!(matches!(result, Err(FunctionError::Failed { error: e, replayed: false }) if e == error));
        assert!(matches!(charge(&engine, &bank, order).await, Err(FunctionError::Unknown)));
    }
    assert_eq!(bank.runs(), 5);
    let id = engine.function("charge").record_id(&IdempotencyKey::try_from("order-a-1").unwrap());
    let record = engine.store().lookup(id).await.unwrap().unwrap();
    assert_eq!(record.label.operation(), "charge");
}

/// An application's error, which the function's error converts into.
#[derive(Debug)]
enum ShopError {
    SoldOut,
    Idempotency(String),
}

impl From<FunctionError<Self>> for ShopError {
    fn from(error: FunctionError<Self>) -> Self {
        match error {
            FunctionError::Failed { error, .. } => error,
            other => Self::Idempotency(format!("{other:?}")),
        }
    }
}

struct Shop<T> {
    engine: Engine,
    bank: Bank,
    tenant: String,
    /// A field of a type parameter, so that methods of generic types are covered.
    stock: T,
}

impl<T: AsMut<[u32]> + Send> Shop<T> {
    #[idempotent(
        key = "{self.bank.runs()}{order.reference()}",
        scope = "reserve",
        engine = self.engine,
        caller = &self.tenant,
        fingerprint(order.id, order.version, count),
        errors = ReleaseIf(|error: &ShopError| matches!(error, ShopError::SoldOut)),
        attempt = attempt,
        lease = "1m",
        retain = "7d",
        wait = "10s"
    )]
    async fn reserve<'a>(&mut self, order: &'a Order, mut count: u32) -> Result<(u32, u32), ShopError>
    where
        T: 'a,
    {
        for left in self.stock.as_mut() {
            let taken = count.min(*left);
            *left -= taken;
            count -= taken;
        }
        tokio::task::yield_now().await;
        if count > 0 { Err(ShopError::SoldOut) } else { Ok((attempt.number(), order.version)) }
    }
}

#[tokio::test]
async fn a_method_with_generics_and_lifetimes_changes_what_it_borrows_once() {
    let mut shop =
        Shop { engine: engine(), bank: Bank::default(), tenant: "ada".to_owned(), stock: vec![2, 3] };
    let order = Order::new("a");
    assert_eq!(shop.reserve(&order, 4).await.unwrap(), (1, 1));
    assert_eq!(shop.stock, [0, 1]);
    // The time of sending is not compared.
    assert_eq!(shop.reserve(&Order { sent_at: 9, ..order.clone() }, 4).await.unwrap(), (1, 1));
    assert_eq!(shop.stock, [0, 1]);
    let reused = shop.reserve(&order, 5).await;
    assert!(matches!(&reused, Err(ShopError::Idempotency(result)) if result == "KeyReused"), "{reused:?}");
    // Another caller has keys of its own.
    "bob".clone_into(&mut shop.tenant);
    assert!(matches!(shop.reserve(&order, 4).await, Err(ShopError::SoldOut)));
    shop.stock = vec![9];
    assert_eq!(shop.reserve(&order, 4).await.unwrap(), (2, 1), "an error freed the key");
}

fn fate(error: &PayError) -> ErrorFate {
    match error {
        PayError::Declined => ErrorFate::Keep,
        PayError::NotSent => ErrorFate::Release,
    }
}

#[idempotent(key = id.clone(), scope = "by fate", engine = engine, errors = fate, skip(bank, error))]
async fn by_fate<I: TryInto<IdempotencyKey, Error = KeyError> + Serialize + Clone>(
    engine: Engine,
    bank: &Bank,
    id: I,
    error: PayError,
) -> Result<(), FunctionError<PayError>> {
    bank.charge(1);
    Err(error)
}

#[idempotent(key = "{id}", scope = "stored", errors = "keep", skip(bank))]
async fn stored(engine: Arc<Engine>, bank: &Bank, id: u32) -> Result<(), FunctionError<String>> {
    Err(format!("run {} of {id}", bank.charge(1).run))
}

#[idempotent(key = "{id}", scope = "boxed", errors = "release", skip(bank))]
async fn boxed(
    engine: &Engine,
    bank: &Bank,
    id: u32,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    Err(format!("run {} of {id}", bank.charge(1).run))?;
    Ok(())
}

#[tokio::test]
async fn errors_are_stored_or_free_the_key_as_the_attribute_says() {
    let (engine, bank) = (engine(), Bank::default());
    let failed = |result, replayed| match result {
        Err(FunctionError::Failed { replayed: was, .. }) => was == replayed,
        _ => false,
    };
    assert!(failed(by_fate(engine.clone(), &bank, "a", PayError::Declined).await, false));
    assert!(failed(by_fate(engine.clone(), &bank, "a", PayError::NotSent).await, true));
    assert!(failed(by_fate(engine.clone(), &bank, "b", PayError::NotSent).await, false));
    assert!(failed(by_fate(engine.clone(), &bank, "b", PayError::NotSent).await, false));
    assert_eq!(bank.runs(), 3);
    for _ in 0..2 {
        let error = stored(Arc::new(engine.clone()), &bank, 1).await.unwrap_err();
        assert_eq!(error.to_string(), "run 4 of 1");
    }
    for run in 5..7 {
        assert_eq!(boxed(&engine, &bank, 1).await.unwrap_err().to_string(), format!("run {run} of 1"));
    }
}

#[idempotent(key = "{id}", scope = "detached", errors = "unknown", skip(bank, begun, go_on), policy = patient())]
async fn detached(
    engine: Engine,
    bank: Bank,
    id: u32,
    begun: Arc<tokio::sync::Notify>,
    go_on: Arc<tokio::sync::Notify>,
) -> Result<Receipt, FunctionError<String>> {
    begun.notify_one();
    go_on.notified().await;
    Ok(bank.charge(id.into()))
}

fn patient() -> Policy {
    Policy::default().with_wait(Duration::from_secs(60)).unwrap()
}

#[tokio::test]
async fn a_detached_function_outlives_its_caller() {
    let (engine, bank) = (engine(), Bank::default());
    let (begun, go_on) = (Arc::default(), Arc::default());
    let call = || detached(engine.clone(), bank.clone(), 7, Arc::clone(&begun), Arc::clone(&go_on));
    let caller = tokio::spawn(call());
    begun.notified().await;
    caller.abort();
    let waiter = tokio::spawn(call());
    go_on.notify_one();
    assert_eq!(waiter.await.unwrap().unwrap(), Receipt { run: 1, cents: 7 });
    assert_eq!(bank.runs(), 1);
}

/// The function borrows its engine and uses it; everything else it owns.
#[idempotent(key = "{id}", scope = "owned", errors = "keep", skip(bank, begun, go_on), wait = "60s")]
async fn owned(
    engine: &Engine,
    bank: Bank,
    id: u32,
    begun: Arc<tokio::sync::Notify>,
    go_on: Arc<tokio::sync::Notify>,
) -> Result<(Receipt, usize), FunctionError<String>> {
    begun.notify_one();
    go_on.notified().await;
    Ok((bank.charge(id.into()), engine.in_flight()))
}

#[tokio::test]
async fn a_function_that_owns_its_arguments_outlives_its_caller_unasked() {
    let (engine, bank) = (engine(), Bank::default());
    let (begun, go_on) = (Arc::default(), Arc::default());
    {
        let call = owned(&engine, bank.clone(), 7, Arc::clone(&begun), Arc::clone(&go_on));
        let mut call = std::pin::pin!(call);
        tokio::select! {
            _ = &mut call => panic!("it ended"),
            () = begun.notified() => {}
        }
    }
    go_on.notify_one();
    let value = owned(&engine, bank.clone(), 7, begun, go_on).await.unwrap();
    assert_eq!(value, (Receipt { run: 1, cents: 7 }, 1));
    assert_eq!(bank.runs(), 1);
}

/// More arguments than a tuple with traits can hold, in patterns of all kinds.
#[idempotent(key = "{a}.{b}", scope = "many", errors = "keep", engine = engine)]
#[expect(clippy::too_many_arguments, reason = "it is about many")]
async fn many(
    (engine, a): (&Engine, &str),
    Pair { b, c }: Pair,
    [d, e, f, g]: [u8; 4],
    h: u8,
    i: u8,
    j: u8,
    k: u8,
    l: u8,
    m: u8,
    n: u8,
    o: u8,
    p: u8,
    q: u8,
    _: u8,
) -> Result<usize, FunctionError<String>> {
    Ok([a, b, c].concat().len()
        + [d, e, f, g, h, i, j, k, l, m, n, o, p, q].map(usize::from).iter().sum::<usize>())
}

struct Pair {
    b: &'static str,
    c: &'static str,
}

#[tokio::test]
async fn every_argument_counts() {
    let engine = engine();
    let pair = || Pair { b: "b", c: "c" };
    let call = |last| many((&engine, "a"), pair(), [1; 4], 1, 1, 1, 1, 1, 1, 1, 1, 1, last, 1);
    assert_eq!(call(1).await.unwrap(), 17);
    assert_eq!(call(1).await.unwrap(), 17);
    assert!(matches!(call(2).await, Err(FunctionError::KeyReused)));
}

#[idempotent(key = "{id}", scope = "settings", errors = "keep", lease = "2m", retain = "7d", wait = "0s", fingerprint(), attempt = attempt)]
async fn settings<F: Future<Output = ()>>(
    engine: &Engine,
    id: u32,
    middle: impl FnOnce(Attempt) -> F,
) -> Result<(), FunctionError<String>> {
    middle(attempt).await;
    Ok(())
}

#[idempotent(key = "{id}", scope = "settings", errors = "keep", wait = "60s", fingerprint())]
async fn waits(engine: &Engine, id: u32) -> Result<(), FunctionError<String>> {
    panic!("it ran again: {id}")
}

#[tokio::test]
async fn what_the_attribute_says_of_time_is_what_the_record_has() {
    let engine = engine();
    let id = engine.function("settings").record_id(&IdempotencyKey::try_from("1").unwrap());
    let record = async || engine.store().lookup(id).await.unwrap().unwrap();
    let waiter = settings(&engine, 1, async |attempt| {
        assert_eq!(attempt.record_id(), id);
        let State::InProgress { lease_until, .. } = record().await.state else { panic!("it runs") };
        let left = lease_until.since(engine.store().now());
        assert!(left > Duration::from_secs(60) && left <= Duration::from_secs(120), "{left:?}");
        let result = settings(&engine, 1, async |_| panic!("it runs twice")).await;
        assert!(matches!(result, Err(FunctionError::InProgress { .. })), "{result:?}");
        // The second call arrives in the middle, and waits.
        tokio::task::yield_now().await;
    });
    let (first, second) = tokio::join!(waiter, waits(&engine, 1));
    first.unwrap();
    second.unwrap();
    let record = record().await;
    assert_eq!(record.expires_at.since(record.changed_at), Duration::from_secs(7 * 24 * 60 * 60));
}

#[idempotent(key = "{id}", scope = "again", errors = "unknown", lease = "100ms", on_abandoned = "reexecute", attempt = attempt)]
async fn again(engine: &Engine, id: u32) -> Result<u32, FunctionError<String>> {
    if attempt.is_after_abandoned() { Ok(id + attempt.number()) } else { Err("timed out".to_owned()) }
}

#[tokio::test]
async fn a_function_that_may_run_again_does_after_its_lease() {
    let engine = engine();
    assert!(matches!(again(&engine, 40).await, Err(FunctionError::Failed { .. })));
    let deadline = Instant::now() + Duration::from_secs(60);
    let value = loop {
        match again(&engine, 40).await {
            Err(FunctionError::InProgress { lease_left }) if Instant::now() < deadline => {
                tokio::time::sleep(lease_left.max(Duration::from_millis(1))).await;
            }
            result => break result.unwrap(),
        }
    };
    assert_eq!(value, 42);
}

/// A trait with fixed signatures, as of another crate.
trait Shipping {
    fn ship(&self, id: u32) -> impl Future<Output = Result<String, ShopError>> + Send;
}

impl Shipping for App {
    #[idempotent(key = "{id}", scope = "ship", errors = "unknown", engine = self.engine)]
    async fn ship(&self, id: u32) -> Result<String, ShopError> {
        Ok(format!("parcel {id}, run {}", self.bank.charge(0).run))
    }
}

#[tokio::test]
async fn a_method_of_a_trait_takes_effect_once() {
    async fn twice(shipping: impl Shipping) -> [String; 2] {
        [shipping.ship(7).await.unwrap(), shipping.ship(7).await.unwrap()]
    }
    let app = App { engine: engine(), bank: Bank::default() };
    assert_eq!(twice(app).await, ["parcel 7, run 1", "parcel 7, run 1"]);
}

#[derive(Clone)]
struct App {
    engine: Engine,
    bank: Bank,
}

/// The response to a client.
struct Refusal(StatusCode, String);

impl<E: Display> From<FunctionError<E>> for Refusal {
    fn from(error: FunctionError<E>) -> Self {
        let status = match error {
            FunctionError::KeyReused => StatusCode::UNPROCESSABLE_ENTITY,
            FunctionError::InProgress { .. } => StatusCode::CONFLICT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self(status, error.to_string())
    }
}

impl Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.1)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.0, self.1).into_response()
    }
}

#[idempotent(key = "{order}", scope = "POST /pay", errors = "unknown", engine = app.engine, skip(app))]
async fn pay(
    axum::extract::State(app): axum::extract::State<App>,
    axum::extract::Path(order): axum::extract::Path<String>,
    body: String,
) -> Result<String, Refusal> {
    Ok(format!("{order}: {body}, run {}", app.bank.charge(0).run))
}

#[tokio::test]
async fn a_handler_of_axum_answers_alike() {
    let app = App { engine: engine(), bank: Bank::default() };
    let service = Router::new().route("/pay/{order}", post(pay)).with_state(app.clone());
    let send = async |body: &'static str| {
        let request = Request::post("/pay/a").body(Body::from(body)).unwrap();
        let response = service.clone().oneshot(request).await.unwrap();
        let status = response.status();
        let body = axum::body::to_bytes(response.into_body(), 1000).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    };
    assert_eq!(send("5 EUR").await, (StatusCode::OK, "a: 5 EUR, run 1".to_owned()));
    assert_eq!(send("5 EUR").await, (StatusCode::OK, "a: 5 EUR, run 1".to_owned()));
    assert_eq!(send("9 EUR").await.0, StatusCode::UNPROCESSABLE_ENTITY);
}

/// The function of the process that is killed. It reports that it is in the middle, and stays there.
#[idempotent(
    key = "{order}",
    scope = "payout",
    errors = "unknown",
    policy = Policy::default().with_on_abandoned(on_abandoned),
    lease = "500ms",
    fingerprint(order),
    attempt = attempt
)]
async fn payout(
    engine: &Engine,
    order: &str,
    on_abandoned: OnAbandoned,
    hangs: bool,
) -> Result<(u32, bool), FunctionError<String>> {
    if hangs {
        println!("\nin the middle");
        std::future::pending::<()>().await;
    }
    let _order = order;
    Ok((attempt.number(), attempt.is_after_abandoned()))
}

fn embedded(directory: &Path) -> Engine {
    Engine::new(EmbeddedStore::open(EmbeddedOptions::new(directory)).unwrap())
}

const DIRECTORY: &str = "ONCEGATE_TEST_PAYOUT";
const ORDER: &str = "ONCEGATE_TEST_ORDER";

/// Not a test by itself: it runs in the process that the next test kills.
#[tokio::test]
async fn a_process_in_the_middle() {
    let Some(directory) = std::env::var_os(DIRECTORY) else { return };
    let engine = embedded(Path::new(&directory));
    payout(&engine, "first", OnAbandoned::Park, false).await.unwrap();
    let (order, on_abandoned) = match std::env::var(ORDER).as_deref() {
        Ok("a") => ("a", OnAbandoned::Park),
        _ => ("b", OnAbandoned::Reexecute),
    };
    let _never = payout(&engine, order, on_abandoned, true).await;
    panic!("it is killed before");
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn after_a_kill_in_the_middle_the_outcome_is_unknown_or_the_function_runs_again() {
    for (order, on_abandoned) in [("a", OnAbandoned::Park), ("b", OnAbandoned::Reexecute)] {
        let directory = tempfile::tempdir().unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "idempotent::a_process_in_the_middle", "--nocapture"])
            .env(DIRECTORY, directory.path())
            .env(ORDER, order)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut child = Killed(child);
        let lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line == "in the middle"));
        drop(child); // SIGKILL

        let engine = embedded(directory.path());
        assert_eq!(payout(&engine, "first", OnAbandoned::Park, true).await.unwrap(), (1, false), "replayed");
        let deadline = Instant::now() + Duration::from_secs(60);
        let result = loop {
            match payout(&engine, order, on_abandoned, false).await {
                Err(FunctionError::InProgress { lease_left }) => {
                    assert!(Instant::now() < deadline, "the lease never ends");
                    tokio::time::sleep(lease_left.max(Duration::from_millis(10))).await;
                }
                result => break result,
            }
        };
        match on_abandoned {
            OnAbandoned::Park => assert!(matches!(result, Err(FunctionError::Unknown)), "{result:?}"),
            _ => assert_eq!(result.unwrap(), (2, true)),
        }
    }
}

/// The type of an attempt is re-exported at the top of the crate, for functions that take one.
#[tokio::test]
async fn a_helper_takes_the_attempt() {
    fn bank_key(attempt: &Attempt) -> String {
        attempt.downstream_key("bank")
    }
    let engine = engine();
    let key =
        async || engine.run("k", &(), async |attempt| Ok::<_, String>(bank_key(&attempt))).await.unwrap();
    assert_eq!(key().await, key().await);
}
