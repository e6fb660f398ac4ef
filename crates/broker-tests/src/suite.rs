//! The tests that every adapter runs in one process.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_core::{MemoryStore, OnAbandoned, Store, SystemClock};
use oncegate_engine::Engine;
use oncegate_inbox::{
    Consumer, DeadLetter, DeadLetterSink, DeadReason, Delivery, HandlerError, Identity, Inbox, InboxCounts,
    InboxEventKind, Message, Order, Outgoing, ProcessOutcome, Publisher, PutFuture, Source,
};
use oncegate_postgres::{PostgresOptions, PostgresStore, schema};
use oncegate_servers::PostgresServer;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

pub use crate::{TIMEOUT, until};

/// A redelivery time that is soon over.
pub const SOON: Duration = Duration::from_secs(3);

/// A redelivery time that does not end during a test.
pub const LATE: Duration = Duration::from_secs(600);

/// A broker to publish to and consume from.
pub trait Broker: Send + Sync + 'static {
    /// The source that consumers take deliveries from.
    type Source: Source;

    /// Creates another source.
    fn source(&self) -> impl Future<Output = Self::Source> + Send;

    /// Returns the publisher.
    fn publisher(&self) -> Arc<dyn Publisher>;

    /// Creates a message that the consumers get.
    fn outgoing(&self, id: &str, key: &str) -> Outgoing;

    /// Returns the number of messages that are not acknowledged.
    fn left(&self) -> impl Future<Output = u64> + Send;

    /// Publishes messages with these identifiers, over `keys` order keys.
    fn publish(&self, ids: &[String], keys: usize) -> impl Future<Output = ()> + Send {
        async move {
            for (number, id) in ids.iter().enumerate() {
                let message = self.outgoing(id, &format!("k{}", number % keys));
                self.publisher().publish(&message).await.unwrap();
            }
        }
    }
}

/// Returns `count` identifiers.
pub fn ids(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("m-{number:05}")).collect()
}

/// The effects in their order: order keys and identifiers.
#[derive(Clone, Default)]
pub struct Effects(Arc<Mutex<Vec<(String, String)>>>);

impl Effects {
    /// Adds the effect of a message.
    pub fn note(&self, message: &Message) {
        let key = message.order_key.as_ref().map(|key| String::from_utf8_lossy(key).into_owned());
        self.0.lock().unwrap().push((key.unwrap_or_default(), id(message)));
    }

    /// The number of effects.
    pub fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// Asserts that each of these took effect once, and nothing else did.
    pub fn assert_once(&self, ids: &[String]) {
        let mut effects: Vec<String> = self.0.lock().unwrap().iter().map(|(_, id)| id.clone()).collect();
        effects.sort();
        let mut ids = ids.to_vec();
        ids.sort();
        assert_eq!(effects, ids);
    }

    /// Asserts that each of these took effect, and nothing else did.
    pub fn assert_all(&self, ids: &[String]) {
        let effects: BTreeSet<String> = self.by_key().into_values().flatten().collect();
        assert_eq!(effects, ids.iter().cloned().collect());
    }

    /// Returns the effects of each key in their order.
    pub fn by_key(&self) -> BTreeMap<String, Vec<String>> {
        let mut keys: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (key, id) in self.0.lock().unwrap().iter() {
            keys.entry(key.clone()).or_default().push(id.clone());
        }
        keys
    }
}

/// Returns the next delivery.
pub async fn next<S: Source>(source: &mut S) -> S::Delivery {
    timeout(TIMEOUT, source.next()).await.expect("a delivery in time").unwrap()
}

/// Returns the fatal error that ends a source without deliveries.
pub async fn fatal_error<S: Source>(source: &mut S) -> String {
    loop {
        match timeout(TIMEOUT, source.next()).await.expect("an error in time") {
            Err(error) if error.is_fatal() => return error.to_string(),
            Err(_) => {}
            Ok(_) => panic!("there is nothing to deliver"),
        }
    }
}

/// Returns the identifier of a message.
pub fn id(message: &Message) -> String {
    let id = message.header(oncegate_inbox::MESSAGE_ID).unwrap();
    id.map(|id| String::from_utf8_lossy(id).into_owned()).unwrap_or_default()
}

/// Dead letters in memory.
#[derive(Clone, Default)]
pub struct Letters(Arc<Mutex<Vec<DeadLetter>>>);

impl DeadLetterSink for Letters {
    fn put<'a>(&'a self, letter: &'a DeadLetter) -> PutFuture<'a> {
        Box::pin(async move {
            self.0.lock().unwrap().push(letter.clone());
            Ok(())
        })
    }
}

/// Creates a store that all consumers of a test share.
pub fn store() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new(SystemClock::new()))
}

/// Creates an inbox of one process, with a short lease.
pub fn inbox(store: &Arc<dyn Store>, dead: impl DeadLetterSink) -> Inbox {
    let engine = Engine::new(store.clone());
    let inbox = Inbox::new(engine, "billing", Identity::message_id(), OnAbandoned::Reexecute, dead);
    inbox.unwrap().with_lease(SOON / 3).unwrap()
}

/// A running consumer, and a handle to stop it.
pub struct Running {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
    /// The events of the consumer.
    pub counts: InboxCounts,
}

impl Running {
    /// Stops the consumer and waits until it has ended.
    pub async fn stop(self) -> InboxCounts {
        self.stop.send(()).unwrap();
        timeout(TIMEOUT, self.task).await.unwrap().unwrap();
        self.counts
    }

    /// Cancels the consumer, as if its process crashed.
    pub fn die(self) {
        self.task.abort();
    }
}

/// Runs a consumer with this handler.
pub fn run<S, F, Fut>(
    source: S,
    inbox: Inbox,
    change: impl FnOnce(
        Consumer<S, oncegate_inbox::InboxProcessor<F>>,
    ) -> Consumer<S, oncegate_inbox::InboxProcessor<F>>,
    handler: F,
) -> Running
where
    S: Source,
    F: Fn(oncegate_engine::Attempt, Arc<Message>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), HandlerError>> + Send + 'static,
{
    let counts = InboxCounts::default();
    let consumer = Consumer::new(source, inbox.processor(handler)).with_observer(counts.clone());
    let consumer =
        change(consumer.with_backoff(Duration::from_millis(10), Duration::from_millis(100)).unwrap());
    let (stop, stopped) = oneshot::channel();
    let task = tokio::spawn(async move {
        let stopped = async { stopped.await.unwrap_or(()) };
        consumer.run(stopped).await.unwrap();
    });
    Running { stop, task, counts }
}

/// Runs a consumer that records every effect.
pub async fn noting<B: Broker>(broker: &B, store: &Arc<dyn Store>, effects: &Effects) -> Running {
    let effects = effects.clone();
    run(
        broker.source().await,
        inbox(store, Letters::default()),
        |consumer| consumer,
        move |_, message| {
            effects.note(&message);
            async { Ok(()) }
        },
    )
}

async fn all_acknowledged<B: Broker>(broker: &B) {
    until("everything is acknowledged", || async { broker.left().await == 0 }).await;
}

/// Takes deliveries of `count` different messages, and processes each.
async fn take_all<S: Source>(
    source: &mut S,
    inbox: &Inbox,
    effects: &Effects,
    count: usize,
) -> Vec<S::Delivery> {
    let mut seen = BTreeSet::new();
    let mut deliveries = Vec::new();
    while seen.len() < count {
        let delivery = next(source).await;
        let message = delivery.message().clone();
        let noted = effects.clone();
        let handled = inbox.process(&message, |_, message| async move {
            noted.note(&message);
            Ok(())
        });
        let handled = handled.await;
        assert!(
            matches!(handled, ProcessOutcome::Processed { .. } | ProcessOutcome::Duplicate),
            "{handled:?}"
        );
        seen.insert(id(&message));
        deliveries.push(delivery);
    }
    deliveries
}

/// Every message is processed and given back, comes again without an acknowledgement, and comes a third time.
pub async fn everything_comes_again<B: Broker>(broker: B) {
    let (store, effects, ids) = (store(), Effects::default(), ids(100));
    broker.publish(&ids, 7).await;
    let inbox = inbox(&store, Letters::default());
    let mut source = broker.source().await;
    for delivery in take_all(&mut source, &inbox, &effects, ids.len()).await {
        delivery.give_back(Duration::ZERO).await.unwrap();
    }
    let again = take_all(&mut source, &inbox, &effects, ids.len()).await;
    assert!(again.iter().all(|delivery| delivery.message().is_redelivered));
    drop(again);
    assert_eq!(broker.left().await, ids.len() as u64, "nothing was acknowledged");
    // Another consumer gets the third delivery.
    drop(source);
    let running = noting(&broker, &store, &effects).await;
    all_acknowledged(&broker).await;
    let counts = running.stop().await;
    effects.assert_once(&ids);
    assert_eq!(counts.get(InboxEventKind::Processed), 0);
    assert!(counts.get(InboxEventKind::Duplicate) >= ids.len() as u64);
}

/// Every third message fails the first time, at a concurrency of eight.
pub async fn order_holds<B: Broker>(broker: B) {
    const KEYS: usize = 6;
    let (store, effects, ids) = (store(), Effects::default(), ids(240));
    broker.publish(&ids, KEYS).await;
    let failed = Arc::new(Mutex::new(BTreeSet::new()));
    let (noted, failures) = (effects.clone(), failed.clone());
    let running = run(
        broker.source().await,
        inbox(&store, Letters::default()),
        |consumer| consumer.with_concurrency(8).unwrap(),
        move |_, message| {
            let id = id(&message);
            let fails = id.bytes().map(usize::from).sum::<usize>().is_multiple_of(3)
                && failures.lock().unwrap().insert(id);
            let effects = noted.clone();
            async move {
                sleep(Duration::from_millis(1)).await;
                if fails {
                    return Err(HandlerError::retry("not yet"));
                }
                effects.note(&message);
                Ok(())
            }
        },
    );
    all_acknowledged(&broker).await;
    running.stop().await;
    effects.assert_once(&ids);
    assert!(failed.lock().unwrap().len() > ids.len() / 6, "enough of them failed");
    let by_key = effects.by_key();
    assert_eq!(by_key.len(), KEYS);
    for (key, effects) in by_key {
        assert!(effects.is_sorted(), "{key}: {effects:?}");
    }
}

/// Some messages are rejected, some always fail, one has no identity: each becomes one dead letter, and the others go
/// on.
pub async fn poison<B: Broker>(broker: B, order: Order, unidentified: impl Future<Output = ()>) {
    let (store, effects, ids, letters) = (store(), Effects::default(), ids(60), Letters::default());
    unidentified.await;
    broker.publish(&ids, 60).await;
    let noted = effects.clone();
    let running = run(
        broker.source().await,
        inbox(&store, letters.clone()).with_max_attempts(3).unwrap(),
        |consumer| consumer.with_order(order),
        move |_, message| {
            let effects = noted.clone();
            async move {
                match id(&message).as_bytes().last() {
                    Some(b'3') => Err(HandlerError::reject("this will never do")),
                    Some(b'7') => Err(HandlerError::retry("not this time")),
                    _ => {
                        effects.note(&message);
                        Ok(())
                    }
                }
            }
        },
    );
    all_acknowledged(&broker).await;
    running.stop().await;
    let (bad, good): (Vec<_>, Vec<_>) = ids.into_iter().partition(|id| id.ends_with(['3', '7']));
    effects.assert_once(&good);
    let mut found: Vec<_> =
        letters.0.lock().unwrap().iter().map(|l| (id(&l.message), l.reason, l.attempts)).collect();
    found.sort_by(|one, other| one.0.cmp(&other.0));
    let mut wanted = vec![(String::new(), DeadReason::NoIdentity, 0)];
    wanted.extend(bad.into_iter().map(|id| {
        let rejected = id.ends_with('3');
        if rejected { (id, DeadReason::Rejected, 1) } else { (id, DeadReason::AttemptsExhausted, 3) }
    }));
    assert_eq!(found, wanted);
}

/// A consumer that is stopped acknowledges what it did and gives the rest back at once.
pub async fn stopping_loses_nothing<B: Broker>(broker: B) {
    let (store, effects, ids) = (store(), Effects::default(), ids(120));
    broker.publish(&ids, 30).await;
    let (noted, gate) = (effects.clone(), Arc::new(Semaphore::new(40)));
    let running = {
        let gate = gate.clone();
        run(
            broker.source().await,
            inbox(&store, Letters::default()),
            |consumer| consumer.with_concurrency(4).unwrap().with_max_held(50).unwrap(),
            move |_, message| {
                let (effects, gate) = (noted.clone(), gate.clone());
                async move {
                    gate.acquire().await.map_err(|_| HandlerError::retry("closed"))?.forget();
                    effects.note(&message);
                    Ok(())
                }
            },
        )
    };
    until("40 took effect", || async { effects.count() == 40 }).await;
    let stopped = tokio::spawn(running.stop());
    // Running handlers end after the stop.
    sleep(Duration::from_millis(100)).await;
    gate.add_permits(4);
    let counts = stopped.await.unwrap();
    let done = effects.count() as u64;
    assert!((40..=44).contains(&done), "{done}");
    assert_eq!(counts.get(InboxEventKind::Acknowledged), done);
    // NATS counts a message twice that it was about to deliver after the last request, until it delivers it.
    until("all the rest is left", || async { broker.left().await >= ids.len() as u64 - done }).await;
    assert_eq!(counts.get(InboxEventKind::SettlementFailed), 0);
    let running = noting(&broker, &store, &effects).await;
    all_acknowledged(&broker).await;
    running.stop().await;
    effects.assert_once(&ids);
}

/// A handler takes longer than the redelivery time, behind a full buffer.
pub async fn a_full_buffer<B: Broker>(broker: B) {
    let (store, effects, ids) = (store(), Effects::default(), ids(40));
    broker.publish(&ids, 40).await;
    let noted = effects.clone();
    let (slow, began) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicUsize::new(0)));
    let running = {
        let (slow, began) = (slow.clone(), began.clone());
        run(
            broker.source().await,
            inbox(&store, Letters::default()),
            |consumer| consumer.with_concurrency(2).unwrap().with_max_held(4).unwrap(),
            move |_, message| {
                let (effects, slow) = (noted.clone(), slow.clone());
                began.fetch_add(1, SeqCst);
                async move {
                    let began = Instant::now();
                    while slow.load(SeqCst) || began.elapsed() < Duration::from_millis(1) {
                        sleep(Duration::from_millis(10)).await;
                    }
                    effects.note(&message);
                    Ok(())
                }
            },
        )
    };
    until("two are at it", || async { began.load(SeqCst) == 2 }).await;
    sleep(SOON * 3).await;
    assert_eq!(began.load(SeqCst), 2, "no other handler got them");
    slow.store(false, SeqCst);
    all_acknowledged(&broker).await;
    running.stop().await;
    effects.assert_once(&ids);
}

/// One of two consumers crashes while it holds messages.
pub async fn one_of_two_dies<B: Broker>(broker: B) {
    let (store, effects, ids) = (store(), Effects::default(), ids(300));
    broker.publish(&ids, 300).await;
    let noted = effects.clone();
    let dying = run(
        broker.source().await,
        inbox(&store, Letters::default()),
        |consumer| consumer.with_max_held(20).unwrap(),
        move |_, message| {
            let effects = noted.clone();
            async move {
                // It crashes before the others take effect.
                if effects.count() >= 20 {
                    std::future::pending::<()>().await;
                }
                effects.note(&message);
                Ok(())
            }
        },
    );
    until("20 took effect", || async { effects.count() >= 20 }).await;
    let other = noting(&broker, &store, &effects).await;
    until("the other one is at it", || async { other.counts.get(InboxEventKind::Processed) > 20 }).await;
    dying.die();
    all_acknowledged(&broker).await;
    other.stop().await;
    effects.assert_once(&ids);
}

/// Runs a consumer through a fault, and returns the effects.
pub async fn something_breaks<B: Broker, F: Future<Output = ()>>(
    broker: &B,
    store: &Arc<dyn Store>,
    breaks: impl FnOnce() -> F,
) -> (Effects, Vec<String>) {
    let (effects, ids) = (Effects::default(), ids(300));
    let (first, rest) = ids.split_at(200);
    broker.publish(first, 10).await;
    let noted = effects.clone();
    let running = run(
        broker.source().await,
        inbox(store, Letters::default()),
        |consumer| consumer.with_concurrency(4).unwrap(),
        move |_, message| {
            let effects = noted.clone();
            async move {
                sleep(Duration::from_millis(5)).await;
                effects.note(&message);
                Ok(())
            }
        },
    );
    until("some took effect", || async { effects.count() > 30 }).await;
    breaks().await;
    broker.publish(rest, 10).await;
    all_acknowledged(broker).await;
    running.stop().await;
    (effects, ids)
}

/// The store is restarted in the middle.
pub async fn the_database_is_restarted(broker: impl Broker) {
    let server = tokio::task::spawn_blocking(PostgresServer::start).await.unwrap().unwrap();
    let options = PostgresOptions::from_url(&server.url()).unwrap();
    schema::apply(&options).await.unwrap();
    let store: Arc<dyn Store> = Arc::new(PostgresStore::open(options).await.unwrap());
    let server = Mutex::new(server);
    let restart = || async {
        tokio::task::block_in_place(|| {
            let mut server = server.lock().unwrap();
            server.stop_immediately().unwrap();
            std::thread::sleep(Duration::from_secs(2));
            server.start_again().unwrap();
        });
    };
    let (effects, ids) = something_breaks(&broker, &store, restart).await;
    effects.assert_all(&ids);
}

/// The first delivery is extended, then given back with a delay, and then left alone: it comes a second and a third time.
///
/// The redelivery time is [`SOON`]. Returns the third delivery, which is acknowledged.
pub async fn comes_again_in_time<B: Broker>(
    broker: &B,
    source: &mut B::Source,
    first: <B::Source as Source>::Delivery,
    delay: Duration,
) -> <B::Source as Source>::Delivery {
    let until = Instant::now() + SOON * 2;
    while Instant::now() < until {
        first.extend().await.unwrap();
        assert!(!first.is_lost());
        assert!(timeout(SOON / 6, source.next()).await.is_err(), "no other consumer gets it");
    }
    let began = Instant::now();
    first.give_back(delay).await.unwrap();
    let second = next(source).await;
    assert!(began.elapsed() >= Duration::from_millis(900), "{:?}", began.elapsed());
    let third = next(source).await;
    for (delivery, count) in [(&second, 2), (&third, 3)] {
        assert_eq!(delivery.message().deliveries, Some(count));
        assert_eq!(delivery.message().broker_id, first.message().broker_id);
    }
    third.ack().await.unwrap();
    assert_eq!(broker.left().await, 0);
    third
}

/// Acknowledges all remaining messages, and returns their identifiers.
pub async fn all_ids<B: Broker>(broker: &B) -> Vec<String> {
    let mut source = broker.source().await;
    let mut ids = BTreeSet::new();
    while broker.left().await > 0 {
        let delivery = timeout(TIMEOUT, source.next()).await.expect("a delivery");
        // The broker may have been down.
        let Ok(delivery) = delivery else { continue };
        ids.insert(id(delivery.message()));
        delivery.ack().await.unwrap();
    }
    ids.into_iter().collect()
}
