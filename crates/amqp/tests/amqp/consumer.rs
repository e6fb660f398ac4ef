//! The inbox and its consumer on RabbitMQ, with faults of the broker, connections and consumers.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use lapin::BasicProperties;
use oncegate_amqp::{AmqpSource, ORDER_KEY, lapin};
use oncegate_inbox::{DeadLetterTopic, DeadReason, Delivery as _, MESSAGE_ID, Order, Outgoing, Publisher};
use oncegate_inbox::{InboxEventKind, Source as _};

use oncegate_servers::RabbitServer;
use tokio::time::sleep;

use crate::line::Line;
use crate::setting::{Kind, Queue, broker, next, shared, until};
use oncegate_broker_tests::broker_tests;
use oncegate_broker_tests::suite::{self, Broker};

/// A broker.
#[derive(Clone)]
enum Server {
    /// That of all tests that do it no harm.
    Shared(Arc<RabbitServer>),
    /// One that may be killed.
    Own(Arc<Mutex<RabbitServer>>),
}

/// A queue of a broker.
pub(crate) struct Rabbit {
    server: Server,
    pub(crate) name: String,
    pub(crate) kind: Kind,
    /// The address for consumers.
    pub(crate) url: String,
    url_of_publisher: String,
    has_order: bool,
}

impl Rabbit {
    /// A broker of its own.
    pub(crate) async fn start(kind: Kind) -> Self {
        let server = tokio::task::spawn_blocking(RabbitServer::start).await.unwrap().unwrap();
        let url = server.url();
        Self::on(Server::Own(Arc::new(Mutex::new(server))), url, "orders", kind).await
    }

    /// A queue on the broker of all tests that do it no harm.
    pub(crate) async fn queue(name: &str, kind: Kind) -> Self {
        let server = tokio::task::spawn_blocking(shared).await.unwrap();
        let url = server.url();
        Self::on(Server::Shared(server), url, &format!("{name}-{kind:?}"), kind).await
    }

    async fn on(server: Server, url: String, name: &str, kind: Kind) -> Self {
        Queue::new(&url, name, kind).await;
        Self { server, name: name.to_owned(), kind, url: url.clone(), url_of_publisher: url, has_order: true }
    }

    /// Does something to the broker of this test, which takes its time.
    async fn with<T: Send + 'static>(&self, act: impl FnOnce(&mut RabbitServer) -> T + Send + 'static) -> T {
        let Server::Own(server) = self.server.clone() else { panic!("other tests use the broker, too") };
        tokio::task::spawn_blocking(move || act(&mut server.lock().unwrap())).await.unwrap()
    }

    fn source(&self) -> AmqpSource {
        // Another consumer finds something, too.
        let source = AmqpSource::new(broker(&self.url), &*self.name).unwrap().with_prefetch(120).unwrap();
        if self.has_order { source.with_order_by_header(ORDER_KEY) } else { source }
    }

    /// Publishes a message without an identity.
    fn unidentified(&self) -> impl Future<Output = ()> + use<> {
        let (url, name) = (self.url.clone(), self.name.clone());
        async move {
            let queue = Queue::new(&url, &name, Kind::Quorum).await;
            let properties = BasicProperties::default().with_delivery_mode(2);
            assert!(queue.send_as("nothing", properties).await.await.unwrap().is_ack());
        }
    }
}

impl Broker for Rabbit {
    type Source = AmqpSource;

    async fn source(&self) -> AmqpSource {
        Self::source(self)
    }

    fn publisher(&self) -> Arc<dyn Publisher> {
        Arc::new(oncegate_amqp::AmqpPublisher::new(broker(&self.url_of_publisher)))
    }

    fn outgoing(&self, id: &str, key: &str) -> Outgoing {
        let mut message = Outgoing::new(id, &*self.name, format!("{{\"order\": \"{id}\"}}"));
        message.order_key = Some(key.to_owned().into());
        message
    }

    async fn publish(&self, ids: &[String], keys: usize) {
        let publisher = self.publisher();
        for (number, id) in ids.iter().enumerate() {
            let message = self.outgoing(id, &format!("k{}", number % keys));
            // The broker may just have been started again.
            until("it is published", async || publisher.publish(&message).await.is_ok()).await;
        }
    }

    /// Once everything that was given back has arrived.
    async fn left(&self) -> u64 {
        let (server, name) = (self.server.clone(), self.name.clone());
        let messages = move || match server {
            Server::Shared(server) => server.messages(&name),
            Server::Own(server) => server.lock().unwrap().messages(&name),
        };
        tokio::task::spawn_blocking(messages).await.unwrap().unwrap_or(u64::MAX)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_comes_again() {
    for kind in [Kind::Quorum, Kind::Classic] {
        let mut rabbit = Rabbit::queue("everything_comes_again", kind).await;
        rabbit.has_order = false;
        suite::everything_comes_again(rabbit).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn order_holds() {
    for kind in [Kind::Quorum, Kind::Classic] {
        suite::order_holds(Rabbit::queue("order_holds", kind).await).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn poison_in_order() {
    let rabbit = Rabbit::queue("poison_in_order", Kind::Quorum).await;
    let unidentified = rabbit.unidentified();
    suite::poison(rabbit, Order::PerKey, unidentified).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn poison_without_order() {
    let rabbit = Rabbit::queue("poison_without_order", Kind::Quorum).await;
    let unidentified = rabbit.unidentified();
    suite::poison(rabbit, Order::None, unidentified).await;
}

broker_tests! {
    stopping_loses_nothing: suite::stopping_loses_nothing, Rabbit::queue("stopping", Kind::Quorum);
    one_of_two_dies: suite::one_of_two_dies, Rabbit::queue("one_of_two", Kind::Quorum);
    the_database_is_restarted: suite::the_database_is_restarted, Rabbit::queue("database", Kind::Quorum);
}

/// Connections are given up after two seconds of silence.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_handler_behind_a_full_buffer_loses_nothing() {
    let mut rabbit = Rabbit::queue("a_full_buffer", Kind::Quorum).await;
    rabbit.url += "?heartbeat=1";
    suite::a_full_buffer(rabbit).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_broker_is_killed() {
    for kind in [Kind::Quorum, Kind::Classic] {
        let rabbit = Rabbit::start(kind).await;
        let restart = async || {
            rabbit
                .with(|server| {
                    server.until_queues_are_written(&["orders"]).unwrap();
                    server.kill();
                    server.start_again().unwrap();
                })
                .await;
        };
        let (effects, ids) = suite::something_breaks(&rabbit, &suite::store(), restart).await;
        effects.assert_once(&ids);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_cut() {
    let mut rabbit = Rabbit::queue("connections_are_cut", Kind::Quorum).await;
    let server = shared();
    let line = Line::to(server.port()).await.unwrap();
    rabbit.url = server.url_at(line.port());
    let cut = async || {
        for times in 1..4 {
            line.cut();
            until("it is connected again", async || line.connections() > times).await;
        }
    };
    let (effects, ids) = suite::something_breaks(&rabbit, &suite::store(), cut).await;
    effects.assert_once(&ids);
}

/// A failed message is given back and comes again; a quorum queue counts it.
#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_messages_of_a_queue() {
    let server = shared();
    let queue = Queue::new(&server.url(), "failing", Kind::Quorum).await;
    let dead = Queue::new(&server.url(), "dead", Kind::Quorum).await;
    let mut message = Outgoing::new("m-1", "failing", "hello");
    message.headers.push(("amqp-content-type".to_owned(), "text/plain".into()));
    queue.publisher().publish(&message).await.unwrap();
    let deliveries = Arc::new(Mutex::new(Vec::new()));
    let seen = deliveries.clone();
    let running = suite::run(
        queue.source(),
        suite::inbox(&suite::store(), DeadLetterTopic::new(dead.publisher(), "dead"))
            .with_max_attempts(3)
            .unwrap(),
        |consumer| consumer.with_order(Order::None),
        move |_, message| {
            seen.lock().unwrap().push((message.is_redelivered, message.deliveries));
            async { Err(oncegate_inbox::HandlerError::retry("not\nthis time")) }
        },
    );
    dead.until_ready(1).await;
    until("it is acknowledged", async || running.counts.get(InboxEventKind::Acknowledged) == 1).await;
    running.stop().await;
    assert_eq!(*deliveries.lock().unwrap(), [(false, Some(1)), (true, Some(2)), (true, Some(3))]);
    assert_eq!(queue.ready().await, 0);

    let mut source = dead.source();
    let letter = next(&mut source).await;
    let header = |name: &str| {
        let value = letter.message().header(name).unwrap();
        value.map(|value| String::from_utf8_lossy(value).into_owned()).unwrap_or_default()
    };
    assert_eq!(header("oncegate-dead-reason"), DeadReason::AttemptsExhausted.as_str());
    assert_eq!(
        (header("oncegate-dead-topic"), header("oncegate-dead-attempts")),
        ("failing".into(), "3".into())
    );
    assert_eq!(
        (header("oncegate-dead-error"), header("amqp-content-type")),
        ("not this time".into(), "text/plain".into())
    );
    // It is a message of its own.
    assert_eq!(header(MESSAGE_ID), header("amqp-message-id"));
    assert_ne!(header(MESSAGE_ID), "m-1");
    letter.ack().await.unwrap();
    source.close().await.unwrap();
}

/// The broker gives the queue to one consumer at a time, and to the next one when that one is gone.
#[tokio::test(flavor = "multi_thread")]
async fn a_single_active_consumer_keeps_the_order_of_two() {
    let server = shared();
    let arguments = [
        ("x-queue-type", lapin::types::AMQPValue::LongString("quorum".into())),
        ("x-single-active-consumer", lapin::types::AMQPValue::Boolean(true)),
    ];
    let queue = Queue::with(&server.url(), "single", &arguments).await;
    let publisher = queue.publisher();
    let ids = suite::ids(100);
    for id in &ids {
        let mut message = Outgoing::new(id, "single", id.clone());
        message.order_key = Some("one".into());
        publisher.publish(&message).await.unwrap();
    }
    let (store, effects) = (suite::store(), suite::Effects::default());
    let consume = || {
        let noted = effects.clone();
        let source = queue.source().with_order_by_header(ORDER_KEY);
        let inbox = suite::inbox(&store, suite::Letters::default());
        suite::run(
            source,
            inbox,
            |consumer| consumer,
            move |_, message| {
                let effects = noted.clone();
                async move {
                    sleep(Duration::from_millis(5)).await;
                    effects.note(&message);
                    Ok(())
                }
            },
        )
    };
    let (first, second) = (consume(), consume());
    until("some took effect", async || effects.count() > 20).await;
    assert!(
        [&first, &second].iter().any(|one| one.counts.get(InboxEventKind::Processed) == 0),
        "one has all"
    );
    let (active, other) =
        if second.counts.get(InboxEventKind::Processed) == 0 { (first, second) } else { (second, first) };
    active.stop().await;
    until("all took effect", async || effects.count() == ids.len()).await;
    until("all is acknowledged", async || server.messages("single").unwrap() == 0).await;
    other.stop().await;
    effects.assert_once(&ids);
    assert!(effects.by_key().values().all(|effects| effects.is_sorted()));
}
