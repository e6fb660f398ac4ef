//! The loop and the inbox, on a broker in memory that redelivers unacknowledged messages. The time is that of tokio,
//! and stands still unless all tasks wait for it.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::{
    Command, Complete, Completion, ErrorChain, IdempotencyKey, KeyTag, ListQuery, MemoryStore, OnAbandoned,
    Outcome, Store, StoredResponse,
};
use oncegate_engine::{Attempt, Engine};
use oncegate_inbox::{
    Consumer, ConsumerError, ConsumerName, DeadLetter, DeadLetterSink, DeadLetterTopic, DeadReason, Delivery,
    HandlerError, Identity, Inbox, InboxCounts, InboxEventKind, Message, Order, Outgoing, ProcessOutcome,
    PublishError, PublishFuture, Publisher, PutFuture, Source, SourceError, SourceInfo,
};
use oncegate_testkit::{FaultyStore, TokioClock};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

const VISIBLE_AFTER: Duration = Duration::from_secs(30);

/// Nothing here takes longer, by the time of the tests.
const TIMEOUT: Duration = Duration::from_secs(3600);

// ---- a broker in memory

#[derive(Clone, Default)]
struct Broker(Arc<Shared>);

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Notify,
    is_gone: AtomicBool,
}

#[derive(Default)]
struct Queue {
    /// Number, message, when it can be delivered, how often it was.
    messages: BTreeMap<u64, (Message, Instant, u32)>,
    next: u64,
    acknowledged: Vec<String>,
    extended: usize,
    /// The next calls of `next` fail like this.
    errors: VecDeque<SourceError>,
    is_closed: bool,
}

impl Broker {
    fn with<T>(&self, act: impl FnOnce(&mut Queue) -> T) -> T {
        let result = act(&mut self.0.queue.lock().unwrap());
        self.0.changed.notify_waiters();
        result
    }

    fn publish(&self, message: Message) {
        self.with(|queue| {
            queue.messages.insert(queue.next, (message, Instant::now(), 0));
            queue.next += 1;
        });
    }

    fn send(&self, id: &str) {
        self.publish(message(id));
    }

    async fn until(&self, what: &str, is_so: impl Fn(&Queue) -> bool) {
        let waiting = async {
            loop {
                let changed = self.0.changed.notified();
                if is_so(&self.0.queue.lock().unwrap()) {
                    return;
                }
                tokio::select! { () = changed => {}, () = sleep(Duration::from_millis(500)) => {} }
            }
        };
        assert!(timeout(TIMEOUT, waiting).await.is_ok(), "not in time: {what}");
    }

    async fn is_empty(&self) {
        self.until("everything is acknowledged", |queue| queue.messages.is_empty()).await;
    }

    fn acknowledged(&self) -> usize {
        self.with(|queue| queue.acknowledged.len())
    }

    fn deliveries(&self) -> Vec<u32> {
        self.with(|queue| queue.messages.values().map(|(_, _, times)| *times).collect())
    }
}

fn message(id: &str) -> Message {
    Message::new("orders", format!("{{\"id\":\"{id}\"}}")).with_header("id", id.to_owned())
}

/// A queue whose messages are invisible to others for a time after their delivery.
struct Subscription {
    broker: Broker,
    redelivery: Option<Duration>,
    has_broker_ids: bool,
}

struct Delivered<const GIVES_BACK: bool> {
    broker: Broker,
    number: u64,
    message: Arc<Message>,
}

impl Subscription {
    fn of(broker: &Broker) -> Self {
        Self { broker: broker.clone(), redelivery: Some(VISIBLE_AFTER), has_broker_ids: true }
    }

    async fn next<const GIVES_BACK: bool>(&self) -> Result<Delivered<GIVES_BACK>, SourceError> {
        loop {
            let changed = self.broker.0.changed.notified();
            let soonest = {
                let mut queue = self.broker.0.queue.lock().unwrap();
                if let Some(error) = queue.errors.pop_front() {
                    return Err(error);
                }
                let now = Instant::now();
                let due = queue.messages.iter_mut().find(|(_, (_, at, _))| *at <= now);
                if let Some((number, (message, at, times))) = due {
                    *at = now + VISIBLE_AFTER;
                    *times += 1;
                    let message = message.clone().with_deliveries(Some(*times), *times > 1);
                    let (broker, number) = (self.broker.clone(), *number);
                    return Ok(Delivered { broker, number, message: Arc::new(message) });
                }
                queue.messages.values().map(|(_, at, _)| *at).min()
            };
            let soonest = soonest.unwrap_or_else(|| Instant::now() + TIMEOUT);
            tokio::select! { () = changed => {}, () = tokio::time::sleep_until(soonest) => {} }
        }
    }
}

impl Source for Subscription {
    type Delivery = Delivered<true>;

    fn info(&self) -> SourceInfo {
        let info = SourceInfo::new(self.redelivery).with_header_names(|name| !name.contains(' '));
        if self.has_broker_ids { info } else { info.without_broker_ids() }
    }

    async fn next(&mut self) -> Result<Self::Delivery, SourceError> {
        Subscription::next(self).await
    }

    async fn close(&mut self) -> Result<(), SourceError> {
        self.broker.with(|queue| queue.is_closed = true);
        Ok(())
    }
}

/// The same as a log: what is not acknowledged does not come again.
struct Log(Subscription);

impl Source for Log {
    type Delivery = Delivered<false>;

    fn info(&self) -> SourceInfo {
        SourceInfo::new(None)
    }

    async fn next(&mut self) -> Result<Self::Delivery, SourceError> {
        self.0.next().await
    }

    async fn close(&mut self) -> Result<(), SourceError> {
        Ok(())
    }
}

impl<const GIVES_BACK: bool> Delivery for Delivered<GIVES_BACK> {
    const GIVES_BACK: bool = GIVES_BACK;

    fn message(&self) -> &Arc<Message> {
        &self.message
    }

    fn is_lost(&self) -> bool {
        self.broker.0.is_gone.load(Ordering::SeqCst)
    }

    async fn extend(&self) -> Result<(), SourceError> {
        self.broker.with(|queue| {
            queue.extended += 1;
            if let Some((_, at, _)) = queue.messages.get_mut(&self.number) {
                *at = Instant::now() + VISIBLE_AFTER;
            }
        });
        Ok(())
    }

    async fn ack(&self) -> Result<(), SourceError> {
        self.broker.with(|queue| {
            if let Some((message, _, _)) = queue.messages.remove(&self.number) {
                let id = message.header("id").unwrap().cloned().unwrap_or_default();
                queue.acknowledged.push(String::from_utf8(id.to_vec()).unwrap());
            }
        });
        Ok(())
    }

    async fn give_back(&self, after: Duration) -> Result<(), SourceError> {
        assert!(GIVES_BACK, "a log takes nothing back");
        self.broker.with(|queue| {
            if let Some((_, at, _)) = queue.messages.get_mut(&self.number) {
                *at = Instant::now() + after;
            }
        });
        Ok(())
    }
}

// ---- effects and dead letters

#[derive(Clone, Default)]
struct Ledger(Arc<Mutex<Vec<String>>>);

impl Ledger {
    fn note(&self, what: impl Into<String>) {
        self.0.lock().unwrap().push(what.into());
    }

    fn all(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }

    fn count(&self, what: &str) -> usize {
        self.all().iter().filter(|one| *one == what).count()
    }

    fn sorted(&self) -> Vec<String> {
        let mut all = self.all();
        all.sort();
        all
    }
}

#[derive(Clone, Default)]
struct Letters {
    letters: Arc<Mutex<Vec<DeadLetter>>>,
    /// The next ones are not taken; or taken, and their confirmation lost.
    refuse: Arc<AtomicUsize>,
    lose: Arc<AtomicUsize>,
}

fn count_down(left: &AtomicUsize) -> bool {
    left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

impl DeadLetterSink for Letters {
    fn put<'a>(&'a self, letter: &'a DeadLetter) -> PutFuture<'a> {
        Box::pin(async move {
            if count_down(&self.refuse) {
                return Err(PublishError::unconfirmed("the destination is down"));
            }
            self.letters.lock().unwrap().push(letter.clone());
            if count_down(&self.lose) {
                return Err(PublishError::unconfirmed("the reply is lost"));
            }
            Ok(())
        })
    }
}

impl Letters {
    fn reasons(&self) -> Vec<(String, DeadReason, u32)> {
        let letters = self.letters.lock().unwrap();
        let id = |letter: &DeadLetter| String::from_utf8_lossy(&letter.message.payload).into_owned();
        letters.iter().map(|letter| (id(letter), letter.reason, letter.attempts)).collect()
    }
}

fn store() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new(TokioClock::at_millis(1_000_000)))
}

fn consumer_name(name: &str) -> ConsumerName {
    ConsumerName::new(name).unwrap()
}

/// A broker, a store, and what came of the messages.
struct World {
    broker: Broker,
    store: Arc<dyn Store>,
    ledger: Ledger,
    letters: Letters,
    counts: InboxCounts,
}

impl World {
    fn new() -> Self {
        Self {
            broker: Broker::default(),
            store: store(),
            ledger: Ledger::default(),
            letters: Letters::default(),
            counts: InboxCounts::default(),
        }
    }

    fn inbox(&self, on_abandoned: OnAbandoned) -> Inbox {
        self.inbox_of("billing", on_abandoned)
    }

    fn inbox_of(&self, name: &str, on_abandoned: OnAbandoned) -> Inbox {
        let (engine, letters) = (Engine::new(self.store.clone()), self.letters.clone());
        Inbox::new(engine, name, Identity::header("id"), on_abandoned, letters).unwrap()
    }

    /// A consumer whose handler notes the message and then does `and`.
    fn consumer<F, Fut>(
        &self,
        inbox: Inbox,
        and: F,
    ) -> Consumer<Subscription, impl oncegate_inbox::Processor + use<F, Fut>>
    where
        F: Fn(Attempt, String) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), HandlerError>> + Send + 'static,
    {
        let processor = inbox.processor(noting(&self.ledger, and));
        Consumer::new(Subscription::of(&self.broker), processor).with_observer(self.counts.clone())
    }

    fn seen(&self, kind: InboxEventKind) -> u64 {
        self.counts.get(kind)
    }
}

fn id_of(message: &Message) -> String {
    String::from_utf8(message.header("id").unwrap().cloned().unwrap_or_default().to_vec()).unwrap()
}

/// The result of a handler.
type Said = Pin<Box<dyn Future<Output = Result<(), HandlerError>> + Send>>;

fn noting<F, Fut>(ledger: &Ledger, and: F) -> impl Fn(Attempt, Arc<Message>) -> Said + use<F, Fut>
where
    F: Fn(Attempt, String) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), HandlerError>> + Send + 'static,
{
    let (ledger, and) = (ledger.clone(), Arc::new(and));
    move |attempt, message| {
        let (ledger, and, id) = (ledger.clone(), and.clone(), id_of(&message));
        Box::pin(async move {
            ledger.note(id.clone());
            and(attempt, id).await
        })
    }
}

/// A consumer that runs until it is stopped.
struct Running {
    task: JoinHandle<Result<(), ConsumerError>>,
    stop: oneshot::Sender<()>,
}

fn run<S: Source, P: oncegate_inbox::Processor>(consumer: Consumer<S, P>) -> Running {
    let (stop, stopped) = oneshot::channel();
    let task = tokio::spawn(consumer.run(async { drop(stopped.await) }));
    Running { task, stop }
}

impl Running {
    async fn stop(self) {
        self.stop.send(()).unwrap();
        self.task.await.unwrap().unwrap();
    }

    /// As if the process died.
    async fn kill(self) {
        self.task.abort();
        drop(self.task.await);
    }
}

async fn fine(_: Attempt, _: String) -> Result<(), HandlerError> {
    Ok(())
}

// ---- tests

#[tokio::test(start_paused = true)]
async fn each_message_takes_effect_once_and_every_delivery_is_acknowledged() {
    let world = World::new();
    for n in 0..200 {
        world.broker.send(&format!("m{n:03}"));
        world.broker.send(&format!("m{n:03}"));
    }
    let consumers: Vec<_> =
        (0..2).map(|_| run(world.consumer(world.inbox(OnAbandoned::Park), fine))).collect();
    world.broker.is_empty().await;
    for consumer in consumers {
        consumer.stop().await;
    }
    let expected: Vec<_> = (0..200).map(|n| format!("m{n:03}")).collect();
    assert_eq!(world.ledger.sorted(), expected);
    assert_eq!(world.broker.acknowledged(), 400);
    assert_eq!(world.seen(InboxEventKind::Processed), 200);
    assert_eq!(world.seen(InboxEventKind::Acknowledged), 400);
    assert_eq!(world.letters.reasons(), []);
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_of_a_message_in_flight_is_not_acknowledged() {
    let world = World::new();
    world.broker.send("a");
    world.broker.send("a");
    let gate = Arc::new(Notify::new());
    let held = gate.clone();
    let consumer = run(world.consumer(world.inbox(OnAbandoned::Park), move |_, _| {
        let held = held.clone();
        async move {
            held.notified().await;
            Ok(())
        }
    }));
    world
        .broker
        .until("the duplicate was turned away", |queue| {
            queue.messages.values().any(|(_, _, times)| *times >= 3)
        })
        .await;
    assert_eq!(world.broker.acknowledged(), 0);
    assert!(world.seen(InboxEventKind::InFlight) >= 2);
    gate.notify_one();
    world.broker.is_empty().await;
    consumer.stop().await;
    assert_eq!(world.ledger.all(), ["a"]);
    assert_eq!(world.seen(InboxEventKind::Duplicate), 1);
}

#[tokio::test(start_paused = true)]
async fn two_consumers_each_process_every_message() {
    let world = World::new();
    let other = Broker::default();
    for n in 0..20 {
        world.broker.send(&format!("m{n}"));
        other.send(&format!("m{n}"));
    }
    let billing = run(world.consumer(world.inbox(OnAbandoned::Park), fine));
    let stock = world.inbox_of("stock", OnAbandoned::Park).processor(noting(&world.ledger, fine));
    let stock = run(Consumer::new(Subscription::of(&other), stock));
    world.broker.is_empty().await;
    other.is_empty().await;
    billing.stop().await;
    stock.stop().await;
    assert_eq!(world.ledger.all().len(), 40);
}

#[tokio::test(start_paused = true)]
async fn messages_of_one_key_stay_in_order_while_one_of_them_fails_and_others_go_on() {
    let world = World::new();
    for n in 0..10 {
        for key in ["a", "b", "c"] {
            world.broker.publish(message(&format!("{key}{n}")).with_order_key(key));
        }
    }
    let failed = Arc::new(AtomicUsize::new(0));
    let times = failed.clone();
    let others_were_done = Arc::new(AtomicBool::new(false));
    let (ledger, seen) = (world.ledger.clone(), others_were_done.clone());
    let consumer = run(world.consumer(world.inbox(OnAbandoned::Park), move |_, id| {
        let (times, ledger, seen) = (times.clone(), ledger.clone(), seen.clone());
        async move {
            sleep(Duration::from_millis(10)).await;
            if id == "b4" && times.fetch_add(1, Ordering::SeqCst) < 3 {
                return Err(HandlerError::retry("not yet"));
            }
            if id == "b4" {
                seen.store(ledger.count("a9") == 1 && ledger.count("c9") == 1, Ordering::SeqCst);
            }
            Ok(())
        }
    }));
    world.broker.is_empty().await;
    consumer.stop().await;
    let mut all = world.ledger.all();
    assert!(others_were_done.load(Ordering::SeqCst), "other keys waited for this one: {all:?}");
    assert_eq!(all.iter().filter(|id| *id == "b4").count(), 4);
    all.dedup();
    for key in ["a", "b", "c"] {
        let mut of_key: Vec<_> = all.iter().filter(|id| id.starts_with(key)).cloned().collect();
        of_key.dedup();
        assert_eq!(of_key, (0..10).map(|n| format!("{key}{n}")).collect::<Vec<_>>());
    }
    assert_eq!(world.broker.acknowledged(), 30);
}

#[tokio::test(start_paused = true)]
async fn a_failing_message_is_retried_later_and_becomes_one_dead_letter() {
    for (in_order, on_abandoned) in
        [(true, OnAbandoned::Park), (false, OnAbandoned::Park), (false, OnAbandoned::Reexecute)]
    {
        let world = World::new();
        let poison = message("poison");
        world.broker.publish(if in_order { poison.with_order_key("k") } else { poison });
        // Sent twice by its producer.
        world.broker.send("poison");
        world.broker.send("good");
        let began = Instant::now();
        let inbox = world.inbox(on_abandoned).with_max_attempts(3).unwrap();
        let consumer = run(world.consumer(inbox, |_, id| async move {
            if id == "poison" { Err(HandlerError::retry("no such customer")) } else { Ok(()) }
        }));
        world.broker.is_empty().await;
        consumer.stop().await;
        assert!(began.elapsed() >= Duration::from_millis(50), "there was a pause");
        assert_eq!(world.ledger.count("poison"), 3);
        assert_eq!(world.ledger.count("good"), 1);
        let letter = ("{\"id\":\"poison\"}".to_owned(), DeadReason::AttemptsExhausted, 3);
        assert_eq!(world.letters.reasons(), [letter]);
        assert_eq!(world.letters.letters.lock().unwrap()[0].error, "no such customer");
        assert_eq!(world.seen(InboxEventKind::Failed), 2);
        assert!(world.seen(InboxEventKind::Dead(DeadReason::AttemptsExhausted)) >= 1);
    }
}

#[tokio::test(start_paused = true)]
async fn pauses_also_grow_for_messages_that_are_given_back() {
    for in_order in [true, false] {
        let world = World::new();
        let poison = message("poison");
        world.broker.publish(if in_order { poison.with_order_key("k") } else { poison });
        let began = Instant::now();
        let consumer = run(world.consumer(world.inbox(OnAbandoned::Park), |_, _| async {
            Err(HandlerError::retry("no such customer"))
        }));
        world.broker.is_empty().await;
        consumer.stop().await;
        assert_eq!(world.ledger.count("poison"), 10);
        // 100, 200, 400 ms … 25.6 s, and half of that at the least.
        assert!(began.elapsed() >= Duration::from_millis(25_500), "{in_order}: {:?}", began.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn attempts_are_counted_over_redeliveries_processes_and_crashes() {
    let world = World::new();
    world.broker.send("kills");
    for attempt in 1..=3 {
        let inbox = world.inbox(OnAbandoned::Reexecute).with_max_attempts(3).unwrap();
        let tell = Arc::new(Notify::new());
        let telling = tell.clone();
        let consumer = run(world.consumer(inbox, move |seen, _| {
            let telling = telling.clone();
            async move {
                assert_eq!(seen.number(), attempt);
                telling.notify_one();
                std::future::pending().await
            }
        }));
        tell.notified().await;
        consumer.kill().await;
    }
    let inbox = world.inbox(OnAbandoned::Reexecute).with_max_attempts(3).unwrap();
    let consumer = run(world.consumer(inbox, fine));
    world.broker.is_empty().await;
    consumer.stop().await;
    assert_eq!(world.ledger.count("kills"), 3, "it is not run a fourth time");
    assert_eq!(world.letters.reasons()[0].1, DeadReason::AttemptsExhausted);
    assert_eq!(world.letters.reasons().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_abandoned_attempt_is_reexecuted_or_becomes_a_dead_letter_with_unknown_outcome() {
    for on_abandoned in [OnAbandoned::Reexecute, OnAbandoned::Park] {
        let world = World::new();
        world.broker.send("a");
        let keys = Ledger::default();
        let began = Arc::new(Notify::new());
        let (noted, telling) = (keys.clone(), began.clone());
        let first = run(world.consumer(world.inbox(on_abandoned), move |attempt, _| {
            noted.note(attempt.downstream_key("charge"));
            let telling = telling.clone();
            async move {
                telling.notify_one();
                std::future::pending().await
            }
        }));
        began.notified().await;
        first.kill().await;
        assert_eq!(world.broker.acknowledged(), 0);

        let noted = keys.clone();
        let second = run(world.consumer(world.inbox(on_abandoned), move |attempt, _| {
            noted.note(attempt.downstream_key("charge"));
            assert!(attempt.is_after_abandoned());
            async { Ok(()) }
        }));
        world.broker.is_empty().await;
        world.broker.send("a");
        world.broker.is_empty().await;
        second.stop().await;
        if on_abandoned == OnAbandoned::Reexecute {
            assert_eq!(keys.all().len(), 2);
            assert_eq!(keys.all()[0], keys.all()[1]);
            assert_eq!(world.letters.reasons(), []);
        } else {
            assert_eq!(keys.all().len(), 1, "it may have charged, so it must not run again");
            let reasons = world.letters.reasons();
            assert_eq!(reasons.len(), 1, "more than one dead letter: {reasons:?}");
            assert_eq!(reasons[0].1, DeadReason::OutcomeUnknown);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_error_of_a_handler_decides_the_outcome() {
    type Say = fn() -> Result<(), HandlerError>;
    let question_mark: Say = || {
        "x".parse::<i32>()?;
        Ok(())
    };
    let panics: Say = || panic!("in the handler");
    // The policy, the error, the number of runs, the dead letter.
    let cases: [(OnAbandoned, Say, usize, Option<DeadReason>); 9] = [
        (OnAbandoned::Park, || Ok(()), 1, None),
        (OnAbandoned::Park, || Err(HandlerError::retry("again")), 2, Some(DeadReason::AttemptsExhausted)),
        (OnAbandoned::Park, || Err(HandlerError::reject("never")), 1, Some(DeadReason::Rejected)),
        (OnAbandoned::Park, question_mark, 1, Some(DeadReason::OutcomeUnknown)),
        (OnAbandoned::Park, panics, 1, Some(DeadReason::OutcomeUnknown)),
        (OnAbandoned::Reexecute, || Err(HandlerError::reject("never")), 1, Some(DeadReason::Rejected)),
        (OnAbandoned::Reexecute, question_mark, 2, Some(DeadReason::AttemptsExhausted)),
        (OnAbandoned::Reexecute, panics, 2, Some(DeadReason::AttemptsExhausted)),
        (
            OnAbandoned::Reexecute,
            || Err(HandlerError::unsure("maybe")),
            2,
            Some(DeadReason::AttemptsExhausted),
        ),
    ];
    for (number, (on_abandoned, say, runs, letter)) in cases.into_iter().enumerate() {
        let world = World::new();
        world.broker.send("a");
        world.broker.send("a");
        let inbox = world.inbox(on_abandoned).with_max_attempts(2).unwrap();
        let consumer = run(world.consumer(inbox, move |_, _| async move { say() }));
        world.broker.is_empty().await;
        world.broker.send("a");
        world.broker.is_empty().await;
        consumer.stop().await;
        assert_eq!(world.ledger.count("a"), runs, "case {number}");
        let reasons: Vec<_> = world.letters.reasons().into_iter().map(|(_, reason, _)| reason).collect();
        assert_eq!(reasons, letter.into_iter().collect::<Vec<_>>(), "case {number}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_missing_or_reused_identity_leads_to_a_dead_letter() {
    let world = World::new();
    let anonymous = || Message::new("orders", "who am I");
    world.broker.publish(anonymous());
    world.broker.publish(anonymous());
    world.broker.send("a");
    world.broker.is_empty_after(|| world.inbox(OnAbandoned::Park).with_payloads_compared(true), &world).await;
    let other = Message::new("orders", "another").with_header("id", "a");
    world.broker.publish(other.clone());
    world.broker.publish(other);
    world.broker.publish(Message::new("orders", "a third").with_header("id", "a"));
    world.broker.send("a");
    world.broker.is_empty_after(|| world.inbox(OnAbandoned::Park).with_payloads_compared(true), &world).await;
    assert_eq!(world.ledger.all(), ["a"]);
    let reasons = world.letters.reasons();
    let expected = [
        ("who am I".to_owned(), DeadReason::NoIdentity, 0),
        ("another".to_owned(), DeadReason::IdentityReused, 0),
        ("a third".to_owned(), DeadReason::IdentityReused, 0),
    ];
    assert_eq!(reasons, expected);
    let letters = world.letters.letters.lock().unwrap();
    assert_ne!(letters[0].id, letters[1].id);
    assert_eq!(letters[0].error, "the message has no header id");
}

#[tokio::test(start_paused = true)]
async fn messages_without_identity_get_a_dead_letter_per_broker_id() {
    let world = World::new();
    for id in ["orders/0/1", "orders/0/2", "orders/0/1"] {
        world.broker.publish(Message::new("orders", "who am I").with_broker_id(id));
    }
    world.broker.is_empty_after(|| world.inbox(OnAbandoned::Park), &world).await;
    let expected = ("who am I".to_owned(), DeadReason::NoIdentity, 0);
    assert_eq!(world.letters.reasons(), [expected.clone(), expected]);
}

impl Broker {
    /// Consumes with such an inbox until nothing is left.
    async fn is_empty_after(&self, inbox: impl Fn() -> Inbox, world: &World) {
        let consumer = run(world.consumer(inbox(), fine));
        self.is_empty().await;
        consumer.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_message_is_kept_until_its_dead_letter_is_written_under_one_identifier() {
    for (refused, lost) in [(4, 0), (0, 2)] {
        let world = World::new();
        world.letters.refuse.store(refused, Ordering::SeqCst);
        world.letters.lose.store(lost, Ordering::SeqCst);
        world.broker.send("a");
        let inbox = world.inbox(OnAbandoned::Park).with_max_attempts(1).unwrap();
        let consumer = run(world.consumer(inbox, |_, _| async { Err(HandlerError::retry("no")) }));
        world.broker.is_empty().await;
        consumer.stop().await;
        assert_eq!(world.seen(InboxEventKind::Unavailable), (refused + lost) as u64);
        assert_eq!(world.ledger.count("a"), 1, "attempts are over");
        let letters = world.letters.letters.lock().unwrap();
        assert_eq!(letters.len(), 1 + lost);
        assert!(letters.iter().all(|letter| letter.id == letters[0].id));
    }
}

#[tokio::test(start_paused = true)]
async fn a_delayed_dead_letter_keeps_its_reason_and_the_handler_does_not_run_again() {
    let world = World::new();
    let inbox = || world.inbox(OnAbandoned::Reexecute).with_max_attempts(3).unwrap();
    for (id, after, attempts) in [("a", 0, 1), ("b", 1, 2)] {
        world.letters.refuse.store(7, Ordering::SeqCst);
        world.broker.send(id);
        let failed = AtomicUsize::new(after);
        let consumer = run(world.consumer(inbox(), move |_, _| {
            let failure = if count_down(&failed) {
                HandlerError::retry("not yet")
            } else {
                HandlerError::reject("never")
            };
            async { Err(failure) }
        }));
        world.broker.is_empty().await;
        consumer.stop().await;
        let payload = format!("{{\"id\":\"{id}\"}}");
        assert_eq!(world.letters.reasons(), [(payload, DeadReason::Rejected, attempts)]);
        assert_eq!(world.letters.letters.lock().unwrap()[0].error, "never");
        assert_eq!(world.ledger.count(id), attempts as usize, "where letters go costs no attempt");
        // The outcome is known, and the dead letter is not written again.
        let again = inbox().process(&Arc::new(message(id)), async |_, _| panic!("it is over")).await;
        assert!(
            matches!(again, ProcessOutcome::Dead { reason: DeadReason::Rejected, is_known: true }),
            "{again:?}"
        );
        assert_eq!(world.letters.letters.lock().unwrap().drain(..).count(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_refused_dead_letter_blocks_only_its_own_message() {
    struct Refuses(Arc<AtomicUsize>);
    impl DeadLetterSink for Refuses {
        fn put<'a>(&'a self, _: &'a DeadLetter) -> PutFuture<'a> {
            self.0.fetch_add(1, Ordering::SeqCst);
            Box::pin(async { Err(PublishError::refused("too large")) })
        }
    }
    let world = World::new();
    let asked = Arc::new(AtomicUsize::new(0));
    let engine = Engine::new(world.store.clone());
    let (identity, refuses) = (Identity::header("id"), Refuses(asked.clone()));
    let inbox = Inbox::new(engine, "billing", identity, OnAbandoned::Park, refuses).unwrap();
    let inbox = inbox.with_max_attempts(2).unwrap();
    let consumer = run(world.consumer(inbox, |_, id| async move {
        if id == "poison" { Err(HandlerError::retry("no")) } else { Ok(()) }
    }));
    world.broker.send("poison");
    for number in 1..=10 {
        sleep(Duration::from_secs(60)).await;
        let began = Instant::now();
        world.broker.send(&format!("m{number}"));
        world.broker.until("it is acknowledged", |queue| queue.acknowledged.len() == number).await;
        // By the time of the test, which nothing else moves on. The broker is looked at twice a second.
        assert!(began.elapsed() <= Duration::from_secs(1), "the {number}th waited {:?}", began.elapsed());
    }
    consumer.stop().await;
    assert!((2..100).contains(&asked.load(Ordering::SeqCst)), "it is tried again, and not all the time");
    assert_eq!(world.ledger.count("poison"), 2, "attempts are over");
    assert_eq!(world.broker.deliveries().len(), 1, "and it is not lost");
}

#[tokio::test(start_paused = true)]
async fn a_dead_letter_of_a_newer_version_is_left_to_it() {
    let world = World::new();
    let inbox = world.inbox(OnAbandoned::Park);
    let message = Arc::new(message("a"));
    let handled = inbox.process(&message, |attempt, _| {
        let store = world.store.clone();
        async move {
            let headers: [(&str, &[u8]); 2] =
                [("oncegate-dead-reason", b"a-reason-to-come"), ("oncegate-dead-unwritten", b"3 7")];
            let response = StoredResponse::new(422, &headers, &[], &[]).unwrap();
            let (token, retention) = (attempt.token(), Duration::from_secs(60));
            let completion = Completion::Replayable(response);
            let complete = Command::Complete(Complete { token, completion, retention });
            assert_eq!(store.apply(attempt.record_id(), complete).await.unwrap(), Outcome::Completed);
            Ok(())
        }
    });
    drop(handled.await);
    let again = inbox.process(&message, |_, _| async { panic!("it must not run") }).await;
    assert!(matches!(again, ProcessOutcome::InFlight { .. }), "{again:?}");
}

#[tokio::test(start_paused = true)]
async fn dead_letter_headers_describe_the_failure() {
    #[derive(Clone, Default)]
    struct Topic(Arc<Mutex<Vec<Outgoing>>>);
    impl Publisher for Topic {
        fn publish<'a>(&'a self, message: &'a Outgoing) -> PublishFuture<'a> {
            self.0.lock().unwrap().push(message.clone());
            Box::pin(async { Ok(()) })
        }
    }
    let (world, topic) = (World::new(), Topic::default());
    world
        .broker
        .publish(message("a").with_header("trace", "t1").with_header("Oncegate-Dead-Reason", "before"));
    let inbox = Inbox::new(
        Engine::new(world.store.clone()),
        "billing",
        Identity::header("id"),
        OnAbandoned::Park,
        DeadLetterTopic::new(topic.clone(), "orders.dead"),
    )
    .unwrap();
    let consumer = run(world.consumer(inbox, |_, _| async { Err(HandlerError::reject("two\nlines")) }));
    world.broker.is_empty().await;
    consumer.stop().await;
    let letters = topic.0.lock().unwrap();
    let letter = &letters[0];
    assert_eq!((letter.topic.as_str(), &letter.payload[..]), ("orders.dead", &b"{\"id\":\"a\"}"[..]));
    let header = |name: &str| {
        let values: Vec<_> = letter.headers.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name)).collect();
        assert_eq!(values.len(), 1, "{name}");
        String::from_utf8(values[0].1.to_vec()).unwrap()
    };
    assert_eq!(header("oncegate-dead-reason"), "rejected");
    assert_eq!(header("oncegate-dead-consumer"), "billing");
    assert_eq!(header("oncegate-dead-topic"), "orders");
    assert_eq!(header("oncegate-dead-attempts"), "1");
    assert_eq!(header("oncegate-dead-error"), "two lines");
    assert_eq!(header("trace"), "t1");
}

#[tokio::test(start_paused = true)]
async fn slow_messages_are_extended_and_not_delivered_again() {
    let world = World::new();
    world.broker.send("slow");
    world.broker.publish(message("behind").with_order_key("k"));
    world.broker.publish(message("last").with_order_key("k"));
    let consumer = run(world.consumer(world.inbox(OnAbandoned::Park), |_, id| async move {
        if id != "last" {
            sleep(VISIBLE_AFTER * 5).await;
        }
        Ok(())
    }));
    world.broker.until("all were delivered", |queue| queue.messages.values().all(|(_, _, n)| *n > 0)).await;
    sleep(VISIBLE_AFTER * 4).await;
    assert_eq!(world.broker.deliveries(), [1, 1, 1]);
    world.broker.is_empty().await;
    consumer.stop().await;
    assert!(world.broker.with(|queue| queue.extended) >= 30, "each of three, every ten seconds");
    assert_eq!(world.seen(InboxEventKind::Processed), 3);
    assert_eq!(world.seen(InboxEventKind::Duplicate), 0);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_finishes_running_messages_and_gives_back_the_rest() {
    let world = World::new();
    for n in 0..20 {
        world.broker.send(&format!("m{n}"));
    }
    let consumer = world.consumer(world.inbox(OnAbandoned::Park), |_, _| async {
        sleep(Duration::from_secs(5)).await;
        Ok(())
    });
    let consumer = run(consumer.with_concurrency(4).unwrap().with_max_held(10).unwrap());
    world
        .broker
        .until("ten are held", |queue| {
            queue.messages.values().filter(|(_, _, times)| *times > 0).count() == 10
        })
        .await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(world.broker.deliveries().iter().sum::<u32>(), 10, "no more than may be held");
    let began = Instant::now();
    consumer.stop().await;
    assert!(began.elapsed() < Duration::from_secs(5));
    assert!(world.broker.with(|queue| queue.is_closed));
    assert_eq!(world.broker.acknowledged(), 4);
    assert_eq!(world.ledger.all().len(), 4);
    let now = Instant::now();
    let left = world.broker.with(|queue| queue.messages.values().filter(|(_, at, _)| *at <= now).count());
    assert_eq!(left, 16, "they are available to others at once");
    let next = run(world.consumer(world.inbox(OnAbandoned::Park), fine));
    world.broker.is_empty().await;
    next.stop().await;
    assert_eq!(world.ledger.all().len(), 20);
}

#[tokio::test(start_paused = true)]
async fn messages_that_exceed_the_shutdown_timeout_are_cancelled_and_come_again() {
    let world = World::new();
    world.broker.send("hangs");
    let consumer = world.consumer(world.inbox(OnAbandoned::Reexecute), |_, _| std::future::pending());
    let consumer = run(consumer.with_shutdown_timeout(Duration::from_secs(7)));
    world.broker.until("it was delivered", |queue| queue.messages.values().any(|(_, _, n)| *n > 0)).await;
    let began = Instant::now();
    consumer.stop().await;
    assert!(began.elapsed() >= Duration::from_secs(7) && began.elapsed() < Duration::from_secs(8));
    assert_eq!(world.broker.acknowledged(), 0);
    let next = run(world.consumer(world.inbox(OnAbandoned::Reexecute), fine));
    world.broker.is_empty().await;
    next.stop().await;
    assert_eq!(world.ledger.count("hangs"), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_blocks_its_thread_does_not_delay_the_shutdown() {
    let world = World::new();
    world.broker.send("blocks");
    let (go_on, blocked) = std::sync::mpsc::channel::<()>();
    let blocked = Arc::new(std::sync::Mutex::new(blocked));
    let consumer = world.consumer(world.inbox(OnAbandoned::Reexecute), move |_, _| {
        let blocked = blocked.clone();
        async move {
            let _ended = blocked.lock().unwrap().recv();
            Ok(())
        }
    });
    let consumer = run(consumer.with_shutdown_timeout(Duration::from_millis(100)));
    world.broker.until("it was delivered", |queue| queue.messages.values().any(|(_, _, n)| *n > 0)).await;
    timeout(Duration::from_secs(60), consumer.stop()).await.unwrap();
    assert_eq!(world.broker.acknowledged(), 0);
    drop(go_on);
}

#[tokio::test(start_paused = true)]
async fn while_the_store_is_down_messages_are_held_without_counting_attempts() {
    let mut world = World::new();
    let (faulty, faults) = FaultyStore::new(world.store.clone());
    world.store = Arc::new(faulty);
    faults.outage();
    for n in 0..10 {
        world.broker.send(&format!("m{n}"));
    }
    let consumer = run(world.consumer(world.inbox(OnAbandoned::Park).with_max_attempts(1).unwrap(), fine));
    sleep(Duration::from_secs(300)).await;
    assert_eq!(world.broker.acknowledged(), 0);
    assert_eq!(world.broker.deliveries(), [1; 10]);
    assert!(world.seen(InboxEventKind::Unavailable) < 2_000, "it is not asked all the time");
    faults.heal();
    world.broker.is_empty().await;
    consumer.stop().await;
    assert_eq!(world.ledger.all().len(), 10);
    assert_eq!(world.letters.reasons(), []);
}

#[tokio::test(start_paused = true)]
async fn a_lost_delivery_is_not_started() {
    let world = World::new();
    for n in 0..5 {
        world.broker.publish(message(&format!("m{n}")).with_order_key("k"));
    }
    let gone = world.broker.clone();
    let consumer = run(world.consumer(world.inbox(OnAbandoned::Park), move |_, _| {
        let gone = gone.clone();
        async move {
            gone.0.is_gone.store(true, Ordering::SeqCst);
            Ok(())
        }
    }));
    while world.seen(InboxEventKind::Lost) < 5 {
        sleep(Duration::from_millis(10)).await;
    }
    consumer.stop().await;
    assert_eq!(world.ledger.all(), ["m0"]);
    assert_eq!(world.broker.acknowledged(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_log_without_returns_has_its_messages_retried_in_place() {
    for order in [Order::PerKey, Order::None] {
        let world = World::new();
        for n in 0..5 {
            world.broker.send(&format!("m{n}"));
        }
        let times = Arc::new(AtomicUsize::new(0));
        let processor = world.inbox(OnAbandoned::Park).processor(noting(&world.ledger, move |_, id| {
            let times = times.clone();
            async move {
                if id == "m2" && times.fetch_add(1, Ordering::SeqCst) < 2 {
                    return Err(HandlerError::retry("not yet"));
                }
                Ok(())
            }
        }));
        let log = Log(Subscription::of(&world.broker));
        let consumer =
            run(Consumer::new(log, processor).with_order(order).with_observer(world.counts.clone()));
        world.broker.is_empty().await;
        consumer.stop().await;
        assert_eq!((world.ledger.all().len(), world.ledger.count("m2")), (7, 3));
        assert_eq!(world.seen(InboxEventKind::GivenBack), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn settings_that_do_not_fit_are_refused_before_anything_is_consumed() {
    let world = World::new();
    world.broker.send("a");
    for lease in [VISIBLE_AFTER, VISIBLE_AFTER * 2] {
        let inbox = world.inbox(OnAbandoned::Park).with_lease(lease).unwrap();
        let refused = world.consumer(inbox, fine).run(std::future::pending::<()>()).await.unwrap_err();
        assert!(matches!(refused, ConsumerError::Config(_)));
        let why = ErrorChain(&refused).to_string();
        assert!(why.contains("make the lease shorter"), "{why}");
    }
    assert_eq!(world.broker.deliveries(), [0]);
    assert!(world.inbox(OnAbandoned::Park).with_lease(Duration::ZERO).is_err());
    assert!(world.inbox(OnAbandoned::Park).with_retention(Duration::ZERO).is_err());
    for name in ["", "two words", "zwölf", &"x".repeat(101)] {
        assert!(ConsumerName::new(name).is_err(), "{name}");
    }
}

/// An identity that no message of the source can have makes a dead letter of each.
#[tokio::test(start_paused = true)]
async fn an_identity_that_the_source_cannot_have_is_refused_before_anything_is_consumed() {
    let world = World::new();
    world.broker.publish(message("a").with_broker_id("orders/0/1"));
    let consumer = |identity: Identity, has_broker_ids: bool| {
        let engine = Engine::new(world.store.clone());
        let inbox =
            Inbox::new(engine, "billing", identity, OnAbandoned::Park, world.letters.clone()).unwrap();
        let source = Subscription { has_broker_ids, ..Subscription::of(&world.broker) };
        Consumer::new(source, inbox.processor(noting(&world.ledger, fine)))
    };
    for (identity, has_broker_ids, said) in [
        (Identity::broker(), false, "no identifier of the broker"),
        (Identity::header(""), true, "can have a header named \"\""),
        (Identity::header("event id"), true, "can have a header named \"event id\""),
    ] {
        let refused = consumer(identity, has_broker_ids).run(std::future::pending::<()>()).await.unwrap_err();
        let why = ErrorChain(&refused).to_string();
        assert!(matches!(refused, ConsumerError::Config(_)) && why.contains(said), "{why}");
    }
    assert_eq!(world.broker.deliveries(), [0]);
    for identity in
        [Identity::broker(), Identity::header("id"), Identity::payload(), Identity::cloud_events()]
    {
        let stopped = consumer(identity.clone(), true).run(std::future::ready(())).await;
        assert!(stopped.is_ok(), "{identity:?}");
    }
}

/// A name with a mistake, a table that is missing: nothing is processed, and not all of it becomes dead letters.
#[tokio::test(start_paused = true)]
async fn a_consumer_that_produces_only_dead_letters_stops_with_the_reason() {
    let cases: [(&str, &str, DeadReason); 3] = [
        ("no-such-header", "no-identity", DeadReason::NoIdentity),
        ("id", "rejected", DeadReason::Rejected),
        ("id", "relation \"invoices\" does not exist", DeadReason::AttemptsExhausted),
    ];
    for (header, said, expected) in cases {
        let world = World::new();
        for number in 0..500 {
            world.broker.send(&format!("m{number}"));
        }
        let engine = Engine::new(world.store.clone());
        let (identity, letters) = (Identity::header(header), world.letters.clone());
        let inbox = Inbox::new(engine, "billing", identity, OnAbandoned::Reexecute, letters).unwrap();
        let inbox = inbox.with_max_attempts(2).unwrap();
        let consumer = world.consumer(inbox, move |_, _| async move {
            Err(match expected {
                DeadReason::Rejected => HandlerError::reject("it is none of ours"),
                _ => HandlerError::retry("relation \"invoices\" does not exist"),
            })
        });
        let ended = timeout(TIMEOUT, consumer.run(std::future::pending::<()>())).await.unwrap().unwrap_err();
        let ConsumerError::OnlyDeadLetters { in_a_row, reason, .. } = &ended else { panic!("{ended}") };
        assert_eq!((*reason, *in_a_row >= 100), (expected, true));
        assert!(ended.to_string().contains(said), "{ended}");
        // Concurrent messages were finished; the rest stays with the broker for an operator.
        let letters = world.letters.reasons().len();
        assert!((100..=110).contains(&letters), "{letters}");
        assert_eq!(world.broker.deliveries().len(), 500 - letters, "{expected}");
        assert!(world.broker.with(|queue| queue.is_closed));
        world.broker.is_empty_after(|| world.inbox(OnAbandoned::Park), &world).await;
        assert_eq!(world.letters.reasons().len(), letters, "nothing else is a dead letter");
    }
}

#[tokio::test(start_paused = true)]
async fn single_or_known_dead_letters_do_not_stop_a_consumer() {
    let world = World::new();
    let send = |numbers: std::ops::Range<usize>| {
        for number in numbers {
            world.broker.send(&format!("m{number}"));
        }
    };
    // Every third one is processed.
    let mostly_broken = |_: Attempt, id: String| async move {
        match id[1..].parse::<usize>().unwrap() % 3 {
            0 => Ok(()),
            _ => Err(HandlerError::reject("broken")),
        }
    };
    send(0..300);
    let in_turn = |limit| {
        let consumer = world.consumer(world.inbox(OnAbandoned::Park), mostly_broken);
        let consumer = consumer.with_concurrency(1).unwrap();
        consumer.with_max_dead_in_a_row(limit).unwrap()
    };
    let consumer = run(in_turn(Some(3)));
    world.broker.is_empty().await;
    consumer.stop().await;
    assert_eq!(world.letters.reasons().len(), 200);
    // Copies of dead letters, and duplicates, are no information about the present.
    send(0..300);
    let consumer = run(in_turn(Some(1)));
    world.broker.is_empty().await;
    consumer.stop().await;
    assert_eq!((world.letters.reasons().len(), world.seen(InboxEventKind::Duplicate)), (200, 100));
    // Without a limit, nothing ends the consumer.
    for number in 0..150 {
        world.broker.send(&format!("m{}", number * 3 + 1000));
    }
    let consumer = run(in_turn(None));
    world.broker.is_empty().await;
    consumer.stop().await;
    assert_eq!(world.letters.reasons().len(), 350);
    let consumer = world.consumer(world.inbox(OnAbandoned::Park), fine);
    assert!(consumer.with_max_dead_in_a_row(Some(0)).unwrap_err().to_string().contains("at least 1"));
}

#[tokio::test(start_paused = true)]
async fn a_transient_source_error_is_retried_and_a_fatal_one_ends_the_consumer() {
    let world = World::new();
    world.broker.with(|queue| {
        queue.errors.extend((0..5).map(|_| SourceError::transient("no connection")));
    });
    world.broker.send("a");
    let broker = world.broker.clone();
    let consumer = run(world.consumer(world.inbox(OnAbandoned::Park), move |_, _| {
        broker.with(|queue| queue.errors.push_back(SourceError::fatal("the queue is deleted")));
        async {
            sleep(Duration::from_secs(2)).await;
            Ok(())
        }
    }));
    let ended = timeout(TIMEOUT, consumer.task).await.unwrap().unwrap().unwrap_err();
    assert!(matches!(&ended, ConsumerError::Source(error) if error.is_fatal()), "{ended}");
    assert!(ErrorChain(&ended).to_string().contains("the queue is deleted"));
    assert_eq!(world.seen(InboxEventKind::SourceFailed), 6);
    assert_eq!(world.broker.acknowledged(), 1, "what ran was ended and acknowledged");
}

#[tokio::test(start_paused = true)]
async fn bytes_are_limited_but_one_message_is_always_taken() {
    let world = World::new();
    for n in 0..6 {
        let large = Message::new("orders", Bytes::from(vec![b'x'; 1000])).with_header("id", format!("m{n}"));
        world.broker.publish(large);
    }
    let consumer = world.consumer(world.inbox(OnAbandoned::Park), |_, _| async {
        sleep(Duration::from_secs(3)).await;
        Ok(())
    });
    let consumer = run(consumer.with_max_bytes(3000));
    sleep(Duration::from_secs(1)).await;
    assert_eq!(world.broker.deliveries().iter().sum::<u32>(), 3);
    world.broker.is_empty().await;
    consumer.stop().await;
    let tiny = World::new();
    tiny.broker.send("a");
    tiny.broker.send("b");
    let consumer = run(tiny.consumer(tiny.inbox(OnAbandoned::Park), fine).with_max_bytes(1));
    tiny.broker.is_empty().await;
    consumer.stop().await;
}

#[tokio::test(start_paused = true)]
async fn the_inbox_works_without_the_loop() {
    let world = World::new();
    let inbox = world.inbox(OnAbandoned::Park);
    let message = Arc::new(message("a"));
    let first = inbox.process(&message, async |_, _| Ok(())).await;
    assert!(matches!(first, ProcessOutcome::Processed { attempts: 1 }), "{first:?}");
    let again = inbox.process(&message, async |_, _| panic!("it runs once")).await;
    assert!(matches!(again, ProcessOutcome::Duplicate), "{again:?}");
}

#[tokio::test(start_paused = true)]
async fn an_operator_finds_the_record_of_a_message_by_its_identifier() {
    let world = World::new();
    let inbox = world.inbox(OnAbandoned::Park);
    for id in ["event-1", "event-2"] {
        let handled = inbox.process(&Arc::new(message(id)), async |_, _| Ok(())).await;
        assert!(matches!(handled, ProcessOutcome::Processed { .. }), "{handled:?}");
    }
    let mut query = ListQuery::default();
    query.key = Some(KeyTag::of(&IdempotencyKey::try_from("event-2").unwrap()));
    let page = world.store.list(query).await.unwrap();
    let [(id, record)] = page.records.as_slice() else { panic!("{page:?}") };
    let expected = Identity::header("id").of(&message("event-2")).unwrap();
    assert_eq!(*id, expected.record_id(&consumer_name("billing")));
    assert!(record.label.operation().starts_with("message "), "{record:?}");
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_of_a_dead_message_is_reported_as_known() {
    let world = World::new();
    let inbox = world.inbox(OnAbandoned::Park);
    let message = Arc::new(message("a"));
    let first = inbox.process(&message, async |_, _| Err(HandlerError::reject("never"))).await;
    assert!(
        matches!(first, ProcessOutcome::Dead { reason: DeadReason::Rejected, is_known: false }),
        "{first:?}"
    );
    let again = inbox.process(&message, async |_, _| panic!("it runs once")).await;
    assert!(
        matches!(again, ProcessOutcome::Dead { reason: DeadReason::Rejected, is_known: true }),
        "{again:?}"
    );
}

/// Processes up to ten together; the first time, the second of them fails.
struct Batches {
    name: ConsumerName,
    ledger: Ledger,
    has_failed: AtomicBool,
}

impl oncegate_inbox::Processor for Batches {
    fn consumer(&self) -> &ConsumerName {
        &self.name
    }

    fn max_batch(&self) -> usize {
        10
    }

    fn retention(&self) -> Duration {
        TIMEOUT
    }

    fn check(&self, _: &SourceInfo) -> Result<(), oncegate_engine::ConfigError> {
        Ok(())
    }

    async fn process(&self, messages: &[Arc<Message>]) -> Vec<ProcessOutcome> {
        let mut handled: Vec<ProcessOutcome> = Vec::new();
        for message in messages {
            handled.push(if handled.iter().any(|what| matches!(what, ProcessOutcome::Failed { .. })) {
                ProcessOutcome::NotBegun
            } else if handled.len() == 1 && !self.has_failed.swap(true, Ordering::SeqCst) {
                ProcessOutcome::Failed { attempts: 1, failure: HandlerError::retry("not yet") }
            } else {
                self.ledger.note(id_of(message));
                ProcessOutcome::Processed { attempts: 1 }
            });
        }
        sleep(Duration::from_millis(1)).await;
        handled
    }
}

#[tokio::test(start_paused = true)]
async fn the_rest_of_a_batch_keeps_its_order() {
    for gives_back in [true, false] {
        let (broker, ledger) = (Broker::default(), Ledger::default());
        for n in 0..20 {
            broker.publish(message(&format!("m{n:02}")).with_order_key("k"));
        }
        let processor =
            Batches { name: consumer_name("b"), ledger: ledger.clone(), has_failed: AtomicBool::new(false) };
        let subscription = Subscription::of(&broker);
        let consumer = if gives_back {
            run(Consumer::new(subscription, processor))
        } else {
            run(Consumer::new(Log(subscription), processor))
        };
        broker.is_empty().await;
        consumer.stop().await;
        assert_eq!(ledger.all(), (0..20).map(|n| format!("m{n:02}")).collect::<Vec<_>>());
    }
}

#[tokio::test(start_paused = true)]
async fn messages_that_fail_during_a_shutdown_are_given_back() {
    let world = World::new();
    world.broker.publish(message("a").with_order_key("k"));
    let consumer = run(world.consumer(world.inbox(OnAbandoned::Park), |_, _| async {
        sleep(Duration::from_secs(3)).await;
        Err(HandlerError::retry("not yet"))
    }));
    world.broker.until("it was delivered", |queue| queue.messages.values().any(|(_, _, n)| *n > 0)).await;
    consumer.stop().await;
    let now = Instant::now();
    assert!(world.broker.with(|queue| queue.messages.values().all(|(_, at, _)| *at <= now)));
    assert_eq!((world.seen(InboxEventKind::Failed), world.seen(InboxEventKind::GivenBack)), (1, 1));
}

#[test]
fn counts_are_written_for_prometheus() {
    let counts = InboxCounts::default();
    let event = |kind| oncegate_inbox::InboxEvent::new("billing", "orders", kind, Duration::ZERO);
    for kind in
        [InboxEventKind::Processed, InboxEventKind::Processed, InboxEventKind::Dead(DeadReason::Rejected)]
    {
        oncegate_inbox::InboxObserver::observe(&counts, &event(kind));
    }
    let text = counts.to_prometheus(&consumer_name("billing"));
    let line = |event: &str, reason: &str, n: u64| {
        format!("oncegate_messages_total{{consumer=\"billing\",event=\"{event}\",reason=\"{reason}\"}} {n}\n")
    };
    assert!(text.contains(&line("processed", "", 2)), "{text}");
    assert!(text.contains(&line("dead", "rejected", 1)), "{text}");
    assert!(text.contains(&line("dead", "no-identity", 0)), "{text}");
    assert_eq!(text.lines().count(), 2 + InboxEventKind::ALL.len());
}

#[test]
fn an_inbox_that_would_have_to_ask_a_service_is_refused() {
    let engine = Engine::new(MemoryStore::default());
    let letters = World::new().letters;
    let inbox = Inbox::new(engine, "billing", Identity::header("id"), OnAbandoned::Reconcile, letters);
    assert!(inbox.is_err_and(|error| error.to_string().contains("choose OnAbandoned::Park")));
}
