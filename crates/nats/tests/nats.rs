//! NATS JetStream: a real server, broken in every way that it can be.

use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use oncegate_inbox::{
    DeadLetterTopic, DeadReason, Delivery, MESSAGE_ID, Order, Outgoing, PublishError, Publisher, Source,
};
use oncegate_nats::async_nats::jetstream::consumer::pull::Config as ConsumerConfig;
use oncegate_nats::async_nats::jetstream::consumer::{AckPolicy, PullConsumer};
use oncegate_nats::async_nats::jetstream::stream::Config as StreamConfig;
use oncegate_nats::async_nats::{self, HeaderMap, jetstream};
use oncegate_nats::{NatsPublisher, NatsSource, ORDER_KEY};
use oncegate_servers::NatsServer;
use tokio::time::{Instant, sleep, timeout};

use oncegate_broker_tests::broker_tests;
use oncegate_broker_tests::processes::{self, Consumed};
use oncegate_broker_tests::suite::{self, Broker, LATE, SOON, TIMEOUT, all_ids, fatal_error, next, until};

/// A server with a stream and a durable consumer of it.
struct Nats {
    server: Arc<Mutex<NatsServer>>,
    context: jetstream::Context,
    consumer: PullConsumer,
}

impl Nats {
    async fn start(ack_wait: Duration) -> Self {
        let server = tokio::task::spawn_blocking(NatsServer::start).await.unwrap().unwrap();
        let client = async_nats::connect(server.url()).await.unwrap();
        let context = jetstream::new(client);
        let stream = StreamConfig {
            name: "ORDERS".to_owned(),
            subjects: vec!["orders.>".to_owned()],
            max_message_size: 100_000,
            ..StreamConfig::default()
        };
        let stream = context.create_stream(stream).await.unwrap();
        let consumer = stream.create_consumer(settings(ack_wait)).await.unwrap();
        Self { server: Arc::new(Mutex::new(server)), context, consumer }
    }

    fn default_source(&self) -> NatsSource {
        NatsSource::new(self.context.clone(), self.consumer.clone()).unwrap()
    }

    fn source(&self) -> NatsSource {
        self.default_source().with_order_by_subject()
    }

    async fn restart(&self, meanwhile: impl Future<Output = ()>) {
        let server = self.server.clone();
        tokio::task::spawn_blocking(move || server.lock().unwrap().kill()).await.unwrap();
        meanwhile.await;
        let server = self.server.clone();
        tokio::task::spawn_blocking(move || server.lock().unwrap().restart().unwrap()).await.unwrap();
    }
}

fn settings(ack_wait: Duration) -> ConsumerConfig {
    ConsumerConfig {
        durable_name: Some("billing".to_owned()),
        ack_policy: AckPolicy::Explicit,
        ack_wait,
        ..ConsumerConfig::default()
    }
}

impl Broker for Nats {
    type Source = NatsSource;

    async fn source(&self) -> NatsSource {
        Self::source(self)
    }

    fn publisher(&self) -> Arc<dyn Publisher> {
        Arc::new(NatsPublisher::new(self.context.clone()))
    }

    fn outgoing(&self, id: &str, key: &str) -> Outgoing {
        Outgoing::new(id, format!("orders.{key}"), format!("{{\"order\": \"{id}\"}}"))
    }

    async fn left(&self) -> u64 {
        // A server that is being restarted is asked again.
        let deadline = Instant::now() + TIMEOUT;
        loop {
            match self.consumer.get_info().await {
                Ok(info) => return info.num_pending + info.num_ack_pending as u64,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            sleep(Duration::from_millis(50)).await;
        }
    }
}

broker_tests! {
    everything_comes_again: suite::everything_comes_again, Nats::start(SOON);
    order_holds: suite::order_holds, Nats::start(LATE);
    // The server keeps some messages for the closed consumer until their time is over.
    stopping_loses_nothing: suite::stopping_loses_nothing, Nats::start(TIMEOUT / 5);
    a_slow_handler_behind_a_full_buffer_loses_nothing: suite::a_full_buffer, Nats::start(SOON);
    one_of_two_dies: suite::one_of_two_dies, Nats::start(SOON);
    the_database_is_restarted: suite::the_database_is_restarted, Nats::start(SOON);
    a_process_dies_before_it_commits: processes::dies, Nats::start(SOON), "before-commit";
    a_process_dies_before_it_acknowledges: processes::dies, Nats::start(SOON), "before-ack";
    a_process_is_suspended_and_resumed: processes::is_suspended, Nats::start(SOON), 20_000;
    a_hundred_thousand_messages_among_kills: processes::among_kills, Nats::start(SOON), 100_000, TIMEOUT * 2;
}

async fn poison(order: Order) {
    let nats = Nats::start(LATE).await;
    let context = nats.context.clone();
    let unidentified = async move {
        context.publish("orders.none", "nothing".into()).await.unwrap().await.unwrap();
    };
    suite::poison(nats, order, unidentified).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn poison_in_order() {
    poison(Order::PerKey).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn poison_without_order() {
    poison(Order::None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_is_restarted() {
    let nats = Nats::start(SOON).await;
    let restart = || nats.restart(sleep(Duration::from_millis(500)));
    let (effects, ids) = suite::something_breaks(&nats, &suite::store(), restart).await;
    effects.assert_once(&ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_cut() {
    let nats = Nats::start(SOON).await;
    let cut = || async {
        for _ in 0..3 {
            nats.context.client().force_reconnect().await.unwrap();
            sleep(Duration::from_millis(200)).await;
        }
    };
    let (effects, ids) = suite::something_breaks(&nats, &suite::store(), cut).await;
    effects.assert_once(&ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_has_the_documented_fields() {
    let nats = Nats::start(SOON).await;
    let mut message = nats.outgoing("m-1", "k");
    message.order_key = Some(Bytes::from_static(b"customer 7"));
    message.headers = vec![("trace".to_owned(), "one".into()), ("Nats-TTL".to_owned(), "1s".into())];
    nats.publisher().publish(&message).await.unwrap();

    let mut source = nats.default_source().with_order_by_header(ORDER_KEY);
    assert_eq!(source.info().redelivery(), Some(SOON));
    let first = next(&mut source).await;
    let got = first.message();
    assert_eq!(got.topic, "orders.k");
    assert_eq!(got.payload, message.payload);
    assert_eq!(got.broker_id.as_deref(), Some("ORDERS/1"));
    assert_eq!(got.order_key, message.order_key);
    assert_eq!((got.deliveries, got.is_redelivered), (Some(1), true));
    let headers: Vec<_> = got.headers.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(headers, ["Nats-Msg-Id", MESSAGE_ID, ORDER_KEY, "trace"]);
    assert_eq!(got.header(MESSAGE_ID).unwrap().unwrap(), "m-1");

    suite::comes_again_in_time(&nats, &mut source, first, Duration::from_secs(1)).await;
}

/// A subject is a kind of message and not a key: to keep it in order by itself would make one lane of all orders.
#[tokio::test(flavor = "multi_thread")]
async fn by_default_only_messages_with_the_header_have_an_order() {
    let nats = Nats::start(LATE).await;
    let (by_header, by_subject) = (Some("customer 7"), Some("orders.k"));
    let rows = [
        (nats.default_source(), [by_header, None]),
        (nats.default_source().with_order_by_subject(), [by_subject, by_subject]),
        (nats.default_source().without_order(), [None, None]),
    ];
    for (number, (mut source, expected)) in rows.into_iter().enumerate() {
        let mut with_key = nats.outgoing(&format!("with-{number}"), "k");
        with_key.order_key = Some(Bytes::from_static(b"customer 7"));
        let without_key = nats.outgoing(&format!("without-{number}"), "k");
        for (message, expected) in [with_key, without_key].iter().zip(expected) {
            nats.publisher().publish(message).await.unwrap();
            let delivery = next(&mut source).await;
            let order_key = delivery.message().order_key.as_deref();
            assert_eq!(order_key, expected.map(str::as_bytes), "row {number}");
            delivery.ack().await.unwrap();
        }
        source.close().await.unwrap();
    }
}

/// One that fails holds up nothing of its subject.
#[tokio::test(flavor = "multi_thread")]
async fn by_default_one_poison_message_does_not_block_its_subject() {
    let nats = Nats::start(LATE).await;
    nats.publish(&suite::ids(20), 1).await;
    let source = nats.default_source();
    let inbox = suite::inbox(&suite::store(), suite::Letters::default());
    let done = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let (count, (stop, stopped)) = (done.clone(), tokio::sync::oneshot::channel::<()>());
    let handle = move |_, message: Arc<oncegate_inbox::Message>| {
        let count = count.clone();
        async move {
            if message.header(MESSAGE_ID).unwrap().unwrap() == suite::ids(1)[0].as_str() {
                return Err(oncegate_inbox::HandlerError::retry("poison"));
            }
            count.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            Ok(())
        }
    };
    let consumer = oncegate_inbox::Consumer::new(source, inbox.processor(handle));
    let consumer = consumer.with_backoff(LATE, LATE).unwrap(); // it is not tried again while the test runs
    let task = tokio::spawn(consumer.run(async { drop(stopped.await) }));
    until("the others are processed", || async { done.load(std::sync::atomic::Ordering::SeqCst) == 19 })
        .await;
    stop.send(()).unwrap();
    task.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_message_without_order_is_left_to_others() {
    let nats = Nats::start(SOON).await;
    nats.publish(&suite::ids(10), 10).await;
    let mut source = nats.default_source().without_order();
    let first = next(&mut source).await;
    assert!(!first.is_lost());
    // The nine others wait in the source meanwhile.
    let until = Instant::now() + SOON + Duration::from_millis(500);
    while Instant::now() < until {
        first.extend().await.unwrap();
        sleep(SOON / 6).await;
    }
    assert!(!first.is_lost());
    first.ack().await.unwrap();
    for _ in 1..10 {
        let delivery = next(&mut source).await;
        assert!(!delivery.is_lost());
        assert_ne!(delivery.message().deliveries, Some(1), "the first delivery is over");
        delivery.ack().await.unwrap();
    }
    assert_eq!(nats.left().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_ordered_message_is_not_overtaken() {
    let nats = Nats::start(SOON).await;
    let mut source = nats.source();
    let publish = async |id: &str| nats.publisher().publish(&nats.outgoing(id, "k")).await.unwrap();
    publish("first").await;
    next(&mut source).await.ack().await.unwrap();
    publish("second").await;
    // The source holds it, and no consumer has taken it.
    until("it is delivered", || async {
        nats.consumer.get_info().await.unwrap().delivered.stream_sequence == 2
    })
    .await;
    sleep(SOON * 2 / 3).await;
    publish("third").await;
    until("it is delivered", || async {
        nats.consumer.get_info().await.unwrap().delivered.stream_sequence == 3
    })
    .await;
    sleep(SOON * 2 / 3).await;
    // The time of the second one is over, and that of the third one is not.
    let second = next(&mut source).await;
    assert_eq!(second.message().broker_id.as_deref(), Some("ORDERS/2"));
    assert!(!second.is_lost(), "it is begun before what came after it");
    // A late acknowledgement is accepted: the server takes it from the first consumer, too.
    second.ack().await.unwrap();
    let third = next(&mut source).await;
    third.ack().await.unwrap();
    assert_eq!(nats.left().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn unrequested_messages_are_given_back_at_the_close() {
    let nats = Nats::start(LATE).await;
    nats.publish(&suite::ids(50), 10).await;
    let mut source = nats.source();
    let held = next(&mut source).await;
    // Another consumer is already waiting. A server of version 2.9 that finds only the closed one keeps a message until
    // `ack_wait` is over.
    let mut other = nats.source();
    let asking = tokio::spawn(async move {
        for _ in 1..50 {
            next(&mut other).await.ack().await.unwrap();
        }
    });
    until("both ask", || async { nats.consumer.get_info().await.unwrap().num_waiting == 2 }).await;
    source.close().await.unwrap();
    assert!(timeout(TIMEOUT, source.next()).await.unwrap().unwrap_err().is_fatal());
    // One is still held; the others are available to other consumers at once.
    asking.await.unwrap();
    assert_eq!(nats.left().await, 1);
    held.ack().await.unwrap();
    assert_eq!(nats.left().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_could_lose_messages_is_refused() {
    let nats = Nats::start(SOON).await;
    let stream = nats.context.get_stream("ORDERS").await.unwrap();
    let refused = async |config: ConsumerConfig, why: &str| {
        let consumer = stream.create_consumer(config).await.unwrap();
        let error = NatsSource::new(nats.context.clone(), consumer).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    };
    let named = |name: &str| ConsumerConfig { durable_name: Some(name.to_owned()), ..settings(SOON) };
    refused(ConsumerConfig { max_deliver: 5, ..named("limited") }, "max_deliver").await;
    refused(ConsumerConfig { ack_policy: AckPolicy::All, ..named("all") }, "ack_policy").await;
    refused(ConsumerConfig { ack_policy: AckPolicy::None, ..named("none") }, "ack_policy").await;
    refused(ConsumerConfig { durable_name: None, ..settings(SOON) }, "durable").await;
    let inactive = ConsumerConfig { inactive_threshold: Duration::from_secs(60), ..named("inactive") };
    refused(inactive, "inactive_threshold").await;

    assert!(nats.default_source().with_prefetch(0).is_err());
    assert!(nats.default_source().with_prefetch(NatsSource::MAX_PREFETCH + 1).is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_is_deleted_ends_the_source() {
    let nats = Nats::start(SOON).await;
    nats.publish(&suite::ids(1), 1).await;
    let mut source = nats.source();
    next(&mut source).await.ack().await.unwrap();
    let stream = nats.context.get_stream("ORDERS").await.unwrap();
    stream.delete_consumer("billing").await.unwrap();
    assert!(fatal_error(&mut source).await.contains("does not exist any more"));

    // So does one that was changed into one that loses messages.
    stream.create_consumer(settings(SOON)).await.unwrap();
    let mut source = nats.source();
    stream.delete_consumer("billing").await.unwrap();
    stream.create_consumer(ConsumerConfig { max_deliver: 3, ..settings(SOON) }).await.unwrap();
    assert!(fatal_error(&mut source).await.contains("max_deliver"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_published_once() {
    let nats = Nats::start(SOON).await;
    let publisher = nats.publisher();
    let message = nats.outgoing("m-1", "k");
    for _ in 0..3 {
        publisher.publish(&message).await.unwrap();
    }
    publisher.publish(&nats.outgoing("m-2", "k")).await.unwrap();
    let mut stream = nats.context.get_stream("ORDERS").await.unwrap();
    assert_eq!(stream.info().await.unwrap().state.messages, 2);

    // What will never be taken.
    let nowhere = Outgoing::new("m-3", "nowhere.at.all", "");
    let large = Outgoing::new("m-4", "orders.k", vec![b'x'; 200_000]);
    let too_large = Outgoing::new("m-5", "orders.k", vec![b'x'; 2_000_000]);
    let wildcard = Outgoing::new("m-6", "orders.*", "");
    let blank = Outgoing::new("m-7", "orders k", "");
    let mut binary = Outgoing::new("m-8", "orders.k", "");
    binary.headers.push(("binary".to_owned(), Bytes::from_static(b"\xff")));
    for message in [nowhere, large, too_large, wildcard, blank, binary] {
        let error = publisher.publish(&message).await.unwrap_err();
        assert!(matches!(error, PublishError::Refused(_)), "{message:?}: {error}");
    }

    // What may be taken another time.
    let later = nats.outgoing("m-9", "k");
    nats.restart(async {
        let error = publisher.publish(&later).await.unwrap_err();
        assert!(matches!(error, PublishError::Unconfirmed(_)), "{error}");
    })
    .await;
    until("it is published", || async { publisher.publish(&later).await.is_ok() }).await;
    let ids = all_ids(&nats).await;
    assert_eq!(ids, ["m-1", "m-2", "m-9"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_messages() {
    let nats = Nats::start(LATE).await;
    let config = StreamConfig {
        name: "DEAD".to_owned(),
        subjects: vec!["dead".to_owned()],
        ..StreamConfig::default()
    };
    nats.context.create_stream(config).await.unwrap();
    nats.publish(&suite::ids(2), 1).await;
    let letters = DeadLetterTopic::new(NatsPublisher::new(nats.context.clone()), "dead");
    let running = suite::run(
        nats.source(),
        suite::inbox(&suite::store(), letters).with_max_attempts(3).unwrap(),
        |consumer| consumer,
        |_, message| async move {
            assert_ne!(suite::id(&message), "m-00001", "a panic is a failure, too");
            Err(oncegate_inbox::HandlerError::reject("no\nnever"))
        },
    );
    until("both are given up", || async { nats.left().await == 0 }).await;
    running.stop().await;
    let stream = nats.context.get_stream("DEAD").await.unwrap();
    let consumer = stream.create_consumer(settings(LATE)).await.unwrap();
    let mut messages = consumer.fetch().max_messages(10).messages().await.unwrap();
    let mut found = Vec::new();
    while let Some(message) = messages.next().await {
        let message = message.unwrap();
        let header = |name: &str| message.headers.as_ref().unwrap().get(name).unwrap().to_string();
        found.push((
            header("oncegate-dead-reason"),
            header("oncegate-dead-topic"),
            header("oncegate-dead-attempts"),
        ));
        assert_eq!(header(MESSAGE_ID), header("Nats-Msg-Id"));
    }
    found.sort();
    let topic = || "orders.k0".to_owned();
    let exhausted = DeadReason::AttemptsExhausted.as_str().to_owned();
    let rejected = DeadReason::Rejected.as_str().to_owned();
    assert_eq!(found, [(exhausted, topic(), "3".to_owned()), (rejected, topic(), "1".to_owned())]);
}

impl Consumed for Nats {
    fn example(&self) -> (&'static str, Vec<(&'static str, String)>) {
        let url = self.server.lock().unwrap().url();
        ("nats", vec![("NATS_URL", url), ("NATS_STREAM", "ORDERS".to_owned())])
    }

    async fn publish_each(&self, ids: Vec<String>) {
        // Without `Nats-Msg-Id`, by which the stream would find duplicates.
        for ids in ids.chunks(1000) {
            let mut confirmations = Vec::new();
            for id in ids {
                let mut headers = HeaderMap::new();
                headers.insert(MESSAGE_ID, id.as_str());
                let sent = self.context.publish_with_headers("orders.k", headers, "order".into());
                confirmations.push(sent.await.unwrap());
            }
            for confirmation in confirmations {
                confirmation.await.unwrap();
            }
        }
    }
}
