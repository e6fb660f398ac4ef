//! The guarantees of a publisher: a published message is in the queue, and a refused one is not.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use oncegate_amqp::{AmqpPublisher, ORDER_KEY};
use oncegate_inbox::{Delivery as _, MESSAGE_ID, Outgoing, PublishError, Publisher as _, Source as _};
use oncegate_servers::RabbitServer;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::line::Line;
use crate::setting::{Kind, Queue, TIMEOUT, broker, next, shared, take, text, until};

fn is_refused(result: &Result<(), PublishError>) -> bool {
    matches!(result, Err(PublishError::Refused(_)))
}

fn is_unconfirmed(result: &Result<(), PublishError>) -> bool {
    matches!(result, Err(PublishError::Unconfirmed(_)))
}

#[tokio::test]
async fn a_message_has_its_identifier_its_key_and_its_headers() {
    let server = shared();
    let queue = Queue::new(&server.url(), "published", Kind::Quorum).await;
    let mut message = Outgoing::new("id-1", "published", "hello");
    message.order_key = Some(Bytes::from_static(b"\xffkey"));
    let header = |name: &str, value: &str| (name.to_owned(), Bytes::copy_from_slice(value.as_bytes()));
    message.headers = vec![
        header("tenant", "acme"),
        header("twice", "1"),
        header("twice", "2"),
        header("amqp-content-type", "application/json"),
        header("amqp-timestamp", "1700000000"),
        // Neither fits its property: they stay headers, and no consumer gets them as a property.
        header("amqp-type", &"t".repeat(300)),
        header("amqp-user-id", "a-user"),
        // Headers from another broker, or from an earlier hop.
        header("amqp-message-id", "earlier"),
        header("Oncegate-Message-Id", "earlier"),
        header("x-death", "often"),
        header("cc", "elsewhere"),
    ];
    queue.publisher().publish(&message).await.unwrap();

    let mut source = queue.source().with_order_by_header(ORDER_KEY);
    let delivery = next(&mut source).await;
    let got = delivery.message();
    let value =
        |name: &str| got.header(name).unwrap().map(|value| String::from_utf8_lossy(value).into_owned());
    let says = |name: &str, expected: Option<&str>| assert_eq!(value(name).as_deref(), expected, "{name}");
    says(MESSAGE_ID, Some("id-1"));
    says("amqp-message-id", Some("id-1"));
    says("tenant", Some("acme"));
    says("twice", Some("[\"1\",\"2\"]"));
    says("amqp-content-type", Some("application/json"));
    says("amqp-timestamp", Some("1700000000"));
    for name in ["amqp-type", "amqp-user-id", "x-death", "cc"] {
        says(name, None);
    }
    assert_eq!((text(&delivery).as_str(), got.order_key.as_deref()), ("hello", Some(&b"\xffkey"[..])));
    delivery.ack().await.unwrap();
    source.close().await.unwrap();
}

/// The broker also confirms a message that it returns. The publisher must not mix them up.
#[tokio::test]
async fn each_message_that_no_queue_takes_is_refused_and_no_other() {
    let server = shared();
    let queue = Queue::new(&server.url(), "routed", Kind::Quorum).await;
    let publisher = queue.publisher();
    let mut publishing = JoinSet::new();
    for number in 0..400 {
        let publisher = publisher.clone();
        publishing.spawn(async move {
            let topic = if number % 3 == 0 { "nowhere" } else { "routed" };
            let message = Outgoing::new(format!("m-{number}"), topic, format!("m-{number}"));
            (number, publisher.publish(&message).await)
        });
    }
    while let Some(published) = publishing.join_next().await {
        let (number, result) = published.unwrap();
        assert_eq!(result.is_ok(), number % 3 != 0, "{number}: {result:?}");
        assert_eq!(is_refused(&result), number % 3 == 0, "{number}: {result:?}");
    }
    queue.until_ready(400 - 134).await;
}

#[tokio::test]
async fn permanently_unacceptable_messages_are_refused() {
    let server = shared();
    let queue = Queue::new(&server.url(), "refusing", Kind::Quorum).await;
    let publisher = queue.publisher().with_max_payload_bytes(1000);
    let message = Outgoing::new("m", "refusing", "m");
    let with = |change: &dyn Fn(&mut Outgoing)| {
        let mut message = message.clone();
        change(&mut message);
        message
    };
    let header = |name: &str, bytes: usize| (name.to_owned(), Bytes::from(vec![b'v'; bytes]));
    let refused = [
        with(&|m| m.id = String::new()),
        with(&|m| m.id = "i".repeat(256)),
        with(&|m| m.id = "\u{e4}".to_owned()),
        with(&|m| m.topic = "t".repeat(256)),
        with(&|m| m.payload = Bytes::from(vec![0; 1001])),
        with(&|m| m.headers = vec![header(&"n".repeat(256), 1)]),
        with(&|m| m.headers = vec![header("large", 200_000)]),
    ];
    for message in &refused {
        let result = publisher.publish(message).await;
        assert!(is_refused(&result), "{message:?}: {result:?}");
    }
    // The largest that fit do no harm.
    let fits =
        [with(&|m| m.headers = vec![header("large", 130_000)]), with(&|m| m.payload = vec![0; 1000].into())];
    for message in &fits {
        publisher.publish(message).await.unwrap();
    }
    let elsewhere = AmqpPublisher::new(broker(&server.url())).with_exchange("no-such-exchange").unwrap();
    let result = elsewhere.publish(&message).await;
    assert!(is_refused(&result), "{result:?}");
    publisher.publish(&message).await.unwrap();
    queue.until_ready(3).await;
}

#[tokio::test]
async fn an_exchange_routes_by_the_topic() {
    use oncegate_amqp::lapin::options::{ExchangeDeclareOptions, QueueBindOptions};
    use oncegate_amqp::lapin::{ExchangeKind, types::FieldTable};
    let server = shared();
    let queue = Queue::new(&server.url(), "by-topic", Kind::Classic).await;
    let (options, none) = (ExchangeDeclareOptions::default(), FieldTable::default());
    let channel = &queue.channel;
    channel.exchange_declare("events".into(), ExchangeKind::Topic, options, none.clone()).await.unwrap();
    let bind = QueueBindOptions::default();
    channel.queue_bind("by-topic".into(), "events".into(), "order.*".into(), bind, none).await.unwrap();
    let publisher = queue.publisher().with_exchange("events").unwrap();
    publisher.publish(&Outgoing::new("1", "order.placed", "1")).await.unwrap();
    assert!(is_refused(&publisher.publish(&Outgoing::new("2", "invoice.sent", "2")).await));
    let mut source = queue.source().with_topic_from_routing_key();
    let delivery = next(&mut source).await;
    assert_eq!(delivery.message().topic, "order.placed");
    let exchange = delivery.message().header("amqp-exchange").unwrap().cloned();
    assert_eq!(exchange.as_deref(), Some(&b"events"[..]));
    delivery.ack().await.unwrap();
    source.close().await.unwrap();
}

#[tokio::test]
async fn without_a_confirm_a_message_is_not_published() {
    let mut server = RabbitServer::start().unwrap();
    let queue = Queue::new(&server.url(), "silent", Kind::Quorum).await;
    let publisher = queue.publisher().with_confirm_timeout(Duration::from_secs(10)).unwrap();
    let message = |id: &str| Outgoing::new(id, "silent", id.to_owned());
    publisher.publish(&message("1")).await.unwrap();
    server.freeze(true).unwrap();
    assert!(is_unconfirmed(&timeout(TIMEOUT, publisher.publish(&message("2"))).await.unwrap()));
    // It is on its way when the broker goes on, and comes back before the broker's word on the one before is there.
    let third = publisher.clone();
    let third = tokio::spawn(async move { third.publish(&Outgoing::new("3", "nowhere", "3")).await });
    sleep(Duration::from_millis(300)).await;
    server.freeze(false).unwrap();
    assert!(is_refused(&third.await.unwrap()));
    publisher.publish(&message("4")).await.unwrap();
    server.until_queues_are_written(&["silent"]).unwrap();
    server.kill();
    assert!(is_unconfirmed(&timeout(TIMEOUT, publisher.publish(&message("5"))).await.unwrap()));
    server.start_again().unwrap();
    until("it is published", async || publisher.publish(&message("6")).await.is_ok()).await;

    let queue = Queue::new(&server.url(), "silent", Kind::Quorum).await;
    let mut source = queue.source();
    let mut seen = BTreeSet::new();
    // The second one was written before the broker went on.
    while !seen.is_superset(&["1", "4", "6"].map(str::to_owned).into()) {
        let delivery = next(&mut source).await;
        seen.insert(text(&delivery));
        delivery.ack().await.unwrap();
    }
    assert!(!seen.contains("3") && !seen.contains("5"), "{seen:?}");
    source.close().await.unwrap();
}

#[tokio::test]
async fn a_connection_that_is_cut_is_made_again_and_nothing_confirmed_is_lost() {
    let server = shared();
    let line = Line::to(server.port()).await.unwrap();
    let queue = Queue::new(&server.url(), "cut-publisher", Kind::Quorum).await;
    let publisher = AmqpPublisher::new(broker(&server.url_at(line.port())));
    let mut publishing = JoinSet::new();
    for number in 0..300 {
        let publisher = publisher.clone();
        publishing.spawn(async move {
            let id = format!("m-{number}");
            let message = Outgoing::new(id.clone(), "cut-publisher", id.clone());
            let mut attempts = 1;
            let publishing = async {
                while let Err(error) = publisher.publish(&message).await {
                    assert!(matches!(error, PublishError::Unconfirmed(_)), "{error}");
                    attempts += 1;
                    sleep(Duration::from_millis(100)).await;
                }
            };
            timeout(TIMEOUT, publishing).await.expect("it is published");
            attempts
        });
    }
    let mut attempts = 0;
    let mut published = 0;
    while let Some(result) = publishing.join_next().await {
        attempts += result.unwrap();
        published += 1;
        if published == 100 {
            line.cut();
        }
    }
    assert!(attempts > 300 && line.connections() >= 2, "no connection was cut");
    let mut source = queue.source();
    let mut seen = BTreeSet::new();
    while seen.len() < 300 {
        let delivery = next(&mut source).await;
        seen.insert(text(&delivery));
        delivery.ack().await.unwrap();
    }
    source.close().await.unwrap();
}

/// A caller may stop waiting for a message. The next message on its channel is not affected.
#[tokio::test]
async fn a_dropped_publish_does_not_affect_the_next_message() {
    let server = shared();
    let queue = Queue::new(&server.url(), "impatient", Kind::Quorum).await;
    let publisher = queue.publisher().with_max_channels(1).unwrap();
    for number in 0..50 {
        let nowhere = Outgoing::new(format!("n-{number}"), "nowhere", "n");
        drop(timeout(Duration::from_micros(number * 50), publisher.publish(&nowhere)).await);
        publisher.publish(&Outgoing::new(format!("m-{number}"), "impatient", "m")).await.unwrap();
    }
    queue.until_ready(50).await;
    let mut source = queue.source();
    for delivery in take(&mut source, 50).await {
        delivery.ack().await.unwrap();
    }
    source.close().await.unwrap();
}
