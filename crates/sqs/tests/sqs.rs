//! Amazon SQS: standard and FIFO queues of a server that speaks its protocol.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use oncegate_inbox::{
    DeadLetterTopic, Delivery, MESSAGE_ID, Order, Outgoing, PublishError, Publisher, Source,
};
use oncegate_servers::{SqsServer, freeze, thaw};
use oncegate_sqs::aws_sdk_sqs::Client;
use oncegate_sqs::aws_sdk_sqs::config::timeout::TimeoutConfig;
use oncegate_sqs::aws_sdk_sqs::config::{BehaviorVersion, Config, Credentials, Region};
use oncegate_sqs::aws_sdk_sqs::types::{
    MessageAttributeValue, QueueAttributeName, SendMessageBatchRequestEntry,
};
use oncegate_sqs::{SqsPublisher, SqsSource, SqsSourceOptions};
use tokio::task::JoinSet;
use tokio::time::timeout;

use oncegate_broker_tests::broker_tests;
use oncegate_broker_tests::processes::{self, Consumed};
use oncegate_broker_tests::suite::{self, Broker, LATE, SOON, TIMEOUT, all_ids, fatal_error, next, until};

/// A server with a queue.
struct Sqs {
    server: SqsServer,
    client: Client,
    queue: String,
    options: SqsSourceOptions,
}

fn client(url: &str) -> Client {
    let config = Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .region(Region::new("us-east-1"))
        .credentials_provider(Credentials::new("key", "secret", None, None, "test"))
        .endpoint_url(url)
        .timeout_config(TimeoutConfig::builder().operation_attempt_timeout(Duration::from_secs(20)).build())
        .http_client(aws_smithy_http_client::Builder::new().build_http())
        .build();
    Client::from_conf(config)
}

impl Sqs {
    async fn start(name: &str, visibility: Duration) -> Self {
        let server = tokio::task::spawn_blocking(SqsServer::start).await.unwrap().unwrap();
        let client = client(&server.url());
        let queue = make(&client, name, &[]).await;
        let options = SqsSourceOptions::new().with_wait(Duration::from_secs(1)).unwrap();
        let options = options.with_visibility_timeout(visibility).unwrap();
        Self { server, client, queue, options }
    }

    async fn standard(visibility: Duration) -> Self {
        Self::start("orders", visibility).await
    }

    async fn fifo(visibility: Duration) -> Self {
        Self::start("orders.fifo", visibility).await
    }

    async fn open(&self) -> SqsSource {
        SqsSource::open(self.client.clone(), &self.queue, self.options.clone()).await.unwrap()
    }

    /// A message without an identity.
    fn unidentified(&self) -> impl Future<Output = ()> + use<> {
        let mut send = self.client.send_message().queue_url(&self.queue).message_body("nothing");
        if self.queue.ends_with(".fifo") {
            send = send.message_group_id("none").message_deduplication_id("none");
        }
        async move {
            send.send().await.unwrap();
        }
    }
}

async fn make(client: &Client, name: &str, attributes: &[(QueueAttributeName, &str)]) -> String {
    let mut request = client.create_queue().queue_name(name);
    if name.ends_with(".fifo") {
        request = request.attributes(QueueAttributeName::FifoQueue, "true");
    }
    for (name, value) in attributes {
        request = request.attributes(name.clone(), *value);
    }
    request.send().await.unwrap().queue_url.unwrap()
}

impl Broker for Sqs {
    type Source = SqsSource;

    async fn source(&self) -> SqsSource {
        self.open().await
    }

    fn publisher(&self) -> Arc<dyn Publisher> {
        Arc::new(SqsPublisher::new(self.client.clone()))
    }

    fn outgoing(&self, id: &str, key: &str) -> Outgoing {
        let mut message = Outgoing::new(id, &self.queue, format!("{{\"order\": \"{id}\"}}"));
        message.order_key = Some(Bytes::from(key.to_owned()));
        message
    }

    async fn left(&self) -> u64 {
        let asked = self.client.get_queue_attributes().queue_url(&self.queue);
        let reply = asked.attribute_names(QueueAttributeName::All).send().await.unwrap();
        let attributes = reply.attributes.unwrap();
        let names = [
            QueueAttributeName::ApproximateNumberOfMessages,
            QueueAttributeName::ApproximateNumberOfMessagesDelayed,
            QueueAttributeName::ApproximateNumberOfMessagesNotVisible,
        ];
        names.iter().map(|name| attributes[name].parse::<u64>().unwrap()).sum()
    }
}

broker_tests! {
    everything_comes_again: suite::everything_comes_again, Sqs::standard(SOON);
    order_holds_in_a_fifo_queue: suite::order_holds, Sqs::fifo(LATE);
    stopping_loses_nothing: suite::stopping_loses_nothing, Sqs::standard(LATE);
    stopping_loses_nothing_in_a_fifo_queue: suite::stopping_loses_nothing, Sqs::fifo(LATE);
    a_slow_handler_behind_a_full_buffer_loses_nothing: suite::a_full_buffer, Sqs::standard(SOON);
    one_of_two_dies: suite::one_of_two_dies, Sqs::standard(SOON);
    one_of_two_dies_in_a_fifo_queue: suite::one_of_two_dies, Sqs::fifo(SOON);
    the_database_is_restarted: suite::the_database_is_restarted, Sqs::standard(SOON);
    a_process_dies_before_it_commits: processes::dies, Sqs::standard(SOON), "before-commit";
    a_process_dies_before_it_acknowledges: processes::dies, Sqs::standard(SOON), "before-ack";
    a_process_is_suspended_and_resumed: processes::is_suspended, Sqs::standard(SOON), 5_000;
    ten_thousand_messages_among_kills: processes::among_kills, Sqs::standard(SOON), 10_000, TIMEOUT * 2;
}

#[tokio::test(flavor = "multi_thread")]
async fn poison() {
    let sqs = Sqs::standard(LATE).await;
    let unidentified = sqs.unidentified();
    suite::poison(sqs, Order::PerKey, unidentified).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn poison_in_a_fifo_queue() {
    let sqs = Sqs::fifo(LATE).await;
    let unidentified = sqs.unidentified();
    suite::poison(sqs, Order::PerKey, unidentified).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_is_suspended_for_a_while() {
    let sqs = Sqs::standard(SOON).await;
    let stand_still = || async {
        let pid = sqs.server.pid();
        tokio::task::block_in_place(|| {
            freeze(pid).unwrap();
            std::thread::sleep(SOON * 2);
            thaw(pid).unwrap();
        });
    };
    let (effects, ids) = suite::something_breaks(&sqs, &suite::store(), stand_still).await;
    effects.assert_once(&ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delivery_has_the_documented_fields() {
    let sqs = Sqs::fifo(SOON).await;
    let mut message = sqs.outgoing("m-1", "customer 7");
    message.headers =
        vec![("trace".to_owned(), "one".into()), ("bits".to_owned(), Bytes::from_static(b"\xff"))];
    message.payload = Bytes::from_static(b"\x00\xff");
    sqs.publisher().publish(&message).await.unwrap();

    let mut source = sqs.open().await;
    assert_eq!(source.info().redelivery(), Some(SOON));
    let first = next(&mut source).await;
    let got = first.message();
    assert_eq!(got.topic, "orders.fifo");
    assert_eq!(got.payload, message.payload);
    assert_eq!((got.deliveries, got.is_redelivered), (Some(1), true));
    // A group cannot have spaces, so it is a digest.
    assert_eq!(got.order_key.as_ref().map(Bytes::len), Some(64));
    let headers: Vec<_> = got.headers.iter().map(|(name, value)| (name.as_str(), value.as_ref())).collect();
    assert_eq!(headers, [("bits", &b"\xff"[..]), (MESSAGE_ID, b"m-1"), ("trace", b"one")]);

    // SQS counts the delay in whole seconds.
    let third = suite::comes_again_in_time(&sqs, &mut source, first, Duration::from_millis(500)).await;
    // A message of a group is started in its turn, even if its time is over: later ones may not be lost.
    assert!(third.extend().await.is_err());
    assert!(!third.is_lost());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_message_without_group_is_left_to_others() {
    let sqs = Sqs::standard(SOON).await;
    sqs.publish(&suite::ids(1), 1).await;
    let mut source = sqs.open().await;
    let first = next(&mut source).await;
    assert!(!first.is_lost());
    let second = next(&mut source).await;
    assert_eq!(second.message().broker_id, first.message().broker_id);
    // Our time began a little later than the broker's.
    suite::until("the first one is lost", || async { first.is_lost() }).await;
    assert!(!second.is_lost());
    second.ack().await.unwrap();
    assert_eq!(sqs.left().await, 0);
    // A message that SQS reports as gone is lost before its time.
    assert!(second.extend().await.is_err());
    assert!(second.is_lost());
}

#[tokio::test(flavor = "multi_thread")]
async fn unrequested_messages_are_given_back_at_the_close() {
    let sqs = Sqs::standard(LATE).await;
    sqs.publish(&suite::ids(50), 10).await;
    let mut source = sqs.open().await;
    let held = next(&mut source).await;
    source.close().await.unwrap();
    assert!(timeout(TIMEOUT, source.next()).await.unwrap().unwrap_err().is_fatal());
    // One is still held; the others are available to other consumers at once.
    let mut other = sqs.open().await;
    for _ in 1..50 {
        next(&mut other).await.ack().await.unwrap();
    }
    assert_eq!(sqs.left().await, 1);
    held.ack().await.unwrap();
    assert_eq!(sqs.left().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_with_a_redrive_policy_is_refused() {
    let sqs = Sqs::standard(SOON).await;
    let dead = make(&sqs.client, "dead", &[]).await;
    let asked =
        sqs.client.get_queue_attributes().queue_url(&dead).attribute_names(QueueAttributeName::QueueArn);
    let attributes = asked.send().await.unwrap().attributes.unwrap();
    let arn = &attributes[&QueueAttributeName::QueueArn];
    let policy = format!("{{\"deadLetterTargetArn\":\"{arn}\",\"maxReceiveCount\":5}}");
    let queue = make(&sqs.client, "limited", &[(QueueAttributeName::RedrivePolicy, &policy)]).await;
    let open = async |options| SqsSource::open(sqs.client.clone(), &queue, options).await;
    let error = open(SqsSourceOptions::new()).await.unwrap_err();
    assert!(error.is_fatal() && error.to_string().contains("maxReceiveCount"), "{error}");
    assert!(open(SqsSourceOptions::new().with_redrive_after(6)).await.unwrap_err().is_fatal());
    open(SqsSourceOptions::new().with_redrive_after(5)).await.unwrap();

    // A queue that never existed, and one that was deleted.
    let nowhere = format!("{queue}-not");
    let error = SqsSource::open(sqs.client.clone(), nowhere, SqsSourceOptions::new()).await.unwrap_err();
    assert!(error.is_fatal() && error.to_string().contains("no such"), "{error}");
    let mut source = sqs.open().await;
    assert!(timeout(Duration::from_millis(100), source.next()).await.is_err());
    sqs.client.delete_queue().queue_url(&sqs.queue).send().await.unwrap();
    fatal_error(&mut source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_are_published() {
    let sqs = Sqs::fifo(SOON).await;
    let publisher = sqs.publisher();
    // A FIFO queue takes a message once; by its name or by its URL, and also without an order key.
    let mut message = sqs.outgoing("m-1", "k");
    publisher.publish(&message).await.unwrap();
    message.topic = "orders.fifo".to_owned();
    message.order_key = None;
    publisher.publish(&message).await.unwrap();
    assert_eq!(sqs.left().await, 1);
    // A standard queue takes it as often as it is published.
    let standard = make(&sqs.client, "standard", &[]).await;
    for _ in 0..2 {
        publisher.publish(&Outgoing::new("m-1", "standard", "")).await.unwrap();
    }
    let standard = Sqs { queue: standard, server: sqs.server, client: sqs.client, options: sqs.options };
    assert_eq!(standard.left().await, 2);
    assert_eq!(all_ids(&standard).await, ["m-1"]);

    // What will never be taken.
    let nowhere = Outgoing::new("m-3", "nowhere", "x");
    let no_url = Outgoing::new("m-4", format!("{}-not", standard.queue), "x");
    let large = Outgoing::new("m-5", "standard", vec![b'x'; 2_000_000]);
    for message in [nowhere, no_url, large] {
        let error = publisher.publish(&message).await.unwrap_err();
        assert!(matches!(error, PublishError::Refused(_)), "{message:?}: {error}");
    }
    // What may be taken another time.
    let away = Outgoing::new("m-6", "standard", "x");
    drop(standard);
    let error = publisher.publish(&away).await.unwrap_err();
    assert!(matches!(error, PublishError::Unconfirmed(_)), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_messages() {
    let sqs = Sqs::standard(LATE).await;
    let dead = make(&sqs.client, "dead", &[]).await;
    // As many headers as there may be attributes, before those of a dead letter are added.
    let mut message = sqs.outgoing("m-1", "k");
    message.headers = (0..9).map(|n| (format!("h-{n}"), Bytes::from(vec![b'v'; n + 1]))).collect();
    sqs.publisher().publish(&message).await.unwrap();
    let letters = DeadLetterTopic::new(SqsPublisher::new(sqs.client.clone()), "dead");
    let running = suite::run(
        sqs.open().await,
        suite::inbox(&suite::store(), letters),
        |consumer| consumer,
        |_, _| async { Err(oncegate_inbox::HandlerError::reject("no\nnever")) },
    );
    until("it is given up", || async { sqs.left().await == 0 }).await;
    running.stop().await;
    let dead = Sqs { queue: dead, server: sqs.server, client: sqs.client, options: sqs.options };
    assert_eq!(dead.left().await, 1);
    let letter = next(&mut dead.open().await).await;
    let letter = letter.message();
    let header = |name: &str| letter.header(name).unwrap().unwrap().clone();
    assert_eq!(header("oncegate-dead-reason"), "rejected");
    assert_eq!(header("oncegate-dead-topic"), "orders");
    assert_eq!(header("oncegate-dead-error"), "no never");
    for (name, value) in &message.headers {
        assert_eq!(&header(name), value);
    }
    assert_eq!(letter.payload, message.payload);
}

impl Consumed for Sqs {
    fn example(&self) -> (&'static str, Vec<(&'static str, String)>) {
        ("sqs", vec![("SQS_URL", self.server.url()), ("SQS_QUEUE", self.queue.clone())])
    }

    async fn publish_each(&self, ids: Vec<String>) {
        let mut sending = JoinSet::new();
        for ids in ids.chunks(10) {
            let entry = |(number, id): (usize, &String)| {
                let id = MessageAttributeValue::builder().data_type("String").string_value(id);
                let entry =
                    SendMessageBatchRequestEntry::builder().id(number.to_string()).message_body("order");
                entry.message_attributes(MESSAGE_ID, id.build().unwrap()).build().unwrap()
            };
            let entries = ids.iter().enumerate().map(entry).collect();
            let send = self.client.send_message_batch().queue_url(&self.queue).set_entries(Some(entries));
            if sending.len() >= 8 {
                sending.join_next().await.unwrap().unwrap();
            }
            sending.spawn(async move {
                let reply = send.send().await.unwrap();
                assert!(reply.failed.is_empty(), "{:?}", reply.failed);
            });
        }
        sending.join_all().await;
    }
}
