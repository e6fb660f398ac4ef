//! The guarantees of a source: nothing is lost, and nothing is acknowledged without a call.

use std::collections::BTreeSet;
use std::time::Duration;

use oncegate_amqp::lapin::types::{AMQPValue, FieldArray, FieldTable};
use oncegate_amqp::lapin::{self, BasicProperties};
use oncegate_amqp::{AmqpDelivery, AmqpSource};
use oncegate_core::ErrorChain;
use oncegate_inbox::{Delivery as _, Source as _};
use oncegate_servers::{RabbitOptions, RabbitServer};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep, timeout};

use crate::line::Line;
use crate::setting::{Kind, Queue, TIMEOUT, broker, is_silent, next, shared, take, text, until};

fn numbers(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("{prefix}-{number}")).collect()
}

#[tokio::test]
async fn properties_and_headers_are_there_under_their_names() {
    let server = shared();
    let queue = Queue::new(&server.url(), "properties", Kind::Quorum).await;
    let mut headers = FieldTable::default();
    headers.insert("tenant".into(), AMQPValue::LongString("acme".into()));
    headers.insert("count".into(), AMQPValue::LongLongInt(-7));
    headers.insert("is-paid".into(), AMQPValue::Boolean(true));
    headers.insert("nothing".into(), AMQPValue::Void);
    headers
        .insert("price".into(), AMQPValue::DecimalValue(lapin::types::DecimalValue { scale: 2, value: 5 }));
    let both = vec![AMQPValue::LongString("a".into()), AMQPValue::LongInt(2)];
    headers.insert("both".into(), AMQPValue::FieldArray(FieldArray::from(both)));
    // A producer cannot imitate another message.
    headers.insert("amqp-message-id".into(), AMQPValue::LongString("forged".into()));
    headers.insert("AMQP-Message-ID".into(), AMQPValue::LongString("forged".into()));
    let properties = BasicProperties::default()
        .with_message_id("m-1".into())
        .with_correlation_id("c-1".into())
        .with_content_type("application/json".into())
        .with_type("order.placed".into())
        .with_app_id("shop".into())
        .with_timestamp(1_700_000_000)
        .with_headers(headers);
    assert!(queue.send_as("{}", properties).await.await.unwrap().is_ack());

    let mut source = queue.source();
    let delivery = next(&mut source).await;
    let message = delivery.message();
    let expected: [(&str, &[u8]); 14] = [
        ("tenant", b"acme"),
        ("count", b"-7"),
        ("is-paid", b"true"),
        ("nothing", b""),
        ("price", b"0.05"),
        ("both", b"[\"a\",2]"),
        ("amqp-message-id", b"m-1"),
        ("amqp-correlation-id", b"c-1"),
        ("amqp-content-type", b"application/json"),
        ("amqp-type", b"order.placed"),
        ("amqp-app-id", b"shop"),
        ("amqp-timestamp", b"1700000000"),
        ("amqp-exchange", b""),
        ("amqp-routing-key", b"properties"),
    ];
    for (name, value) in expected {
        assert_eq!(message.header(name).unwrap().map(|value| &value[..]), Some(value), "{name}");
    }
    assert_eq!(message.topic, "properties");
    assert_eq!((message.broker_id.as_deref(), &message.order_key), (None, &None));
    assert_eq!((message.is_redelivered, message.deliveries), (false, Some(1)));
    delivery.ack().await.unwrap();
    source.close().await.unwrap();
}

#[tokio::test]
async fn a_returned_message_comes_again_as_redelivered() {
    let server = shared();
    for kind in [Kind::Quorum, Kind::Classic] {
        let queue = Queue::new(&server.url(), &format!("back-{kind:?}"), kind).await;
        queue.send(["once"]).await;
        let mut source = queue.source();
        for round in 1..4 {
            let delivery = next(&mut source).await;
            let message = delivery.message();
            assert_eq!(message.is_redelivered, round > 1);
            // A classic queue does not count.
            let counted = (kind == Kind::Quorum || round == 1).then_some(round);
            assert_eq!(message.deliveries, counted, "{kind:?}");
            delivery.give_back(Duration::ZERO).await.unwrap();
        }
        // Dropped without a word it comes, too.
        drop(next(&mut source).await);
        next(&mut source).await.ack().await.unwrap();
        assert!(is_silent(&mut source).await);
        source.close().await.unwrap();
        assert_eq!(queue.ready().await, 0);
    }
}

#[tokio::test]
async fn a_delayed_return_blocks_no_other_message() {
    let server = shared();
    let queue = Queue::new(&server.url(), "later", Kind::Quorum).await;
    queue.send(["poison", "other"]).await;
    let mut source = queue.source();
    let poison = next(&mut source).await;
    let began = Instant::now();
    poison.give_back(Duration::from_secs(2)).await.unwrap();
    drop(poison);
    let other = next(&mut source).await;
    assert_eq!(text(&other), "other");
    other.ack().await.unwrap();
    let again = next(&mut source).await;
    assert_eq!(text(&again), "poison");
    assert!(began.elapsed() >= Duration::from_secs(2), "it came after {:?}", began.elapsed());
    // It does not wait after the consumer is gone.
    again.give_back(Duration::from_secs(3600)).await.unwrap();
    source.close().await.unwrap();
    queue.until_ready(1).await;
}

#[tokio::test]
async fn no_more_is_delivered_than_is_asked_for() {
    let server = shared();
    let queue = Queue::new(&server.url(), "prefetch", Kind::Quorum).await;
    queue.send(numbers("m", 20)).await;
    let mut source = queue.source().with_prefetch(5).unwrap();
    let mut held = take(&mut source, 5).await;
    assert!(is_silent(&mut source).await);
    assert_eq!(queue.ready().await, 15);
    // One that waits to be given back is one of the five.
    held.pop().unwrap().give_back(Duration::from_secs(3600)).await.unwrap();
    assert!(is_silent(&mut source).await);
    held.pop().unwrap().ack().await.unwrap();
    next(&mut source).await.ack().await.unwrap();
    source.close().await.unwrap();
}

#[tokio::test]
async fn a_call_that_is_dropped_loses_nothing() {
    let server = shared();
    let queue = Queue::new(&server.url(), "dropped", Kind::Classic).await;
    queue.send(numbers("m", 300)).await;
    let mut source = queue.source().with_prefetch(10).unwrap();
    let mut seen = BTreeSet::new();
    let deadline = Instant::now() + TIMEOUT;
    while seen.len() < 300 {
        assert!(Instant::now() < deadline, "{} of 300", seen.len());
        if let Ok(delivery) = timeout(Duration::from_micros(50), source.next()).await {
            let delivery = delivery.unwrap();
            delivery.ack().await.unwrap();
            assert!(seen.insert(text(&delivery)), "twice");
        }
    }
    source.close().await.unwrap();
    assert_eq!(queue.ready().await, 0);
}

#[tokio::test]
async fn what_was_acknowledged_is_known_to_the_broker_when_the_source_is_closed() {
    let server = shared();
    for kind in [Kind::Quorum, Kind::Classic] {
        let queue = Queue::new(&server.url(), &format!("closed-{kind:?}"), kind).await;
        queue.send(numbers("m", 500)).await;
        let mut source = queue.source().with_prefetch(400).unwrap();
        for delivery in take(&mut source, 300).await {
            delivery.ack().await.unwrap();
        }
        source.close().await.unwrap();
        queue.until_ready(200).await;
        // It delivers nothing any more, and a second close has no effect.
        assert!(is_silent(&mut source).await);
        source.close().await.unwrap();
    }
}

#[tokio::test]
async fn after_a_cut_the_deliveries_are_lost_and_come_again() {
    let server = shared();
    let line = Line::to(server.port()).await.unwrap();
    let queue = Queue::new(&server.url(), "cut", Kind::Quorum).await;
    queue.send(numbers("m", 10)).await;
    let mut source = AmqpSource::new(broker(&server.url_at(line.port())), "cut").unwrap();
    let before = take(&mut source, 10).await;
    before[0].ack().await.unwrap();
    // Its acknowledgement has arrived when the broker has answered another question.
    queue.until_ready(0).await;
    line.cut();
    let again = take(&mut source, 9).await;
    assert_eq!(line.connections(), 2);
    for delivery in &before[1..] {
        assert!(delivery.is_lost());
        // On the new channel it would be another message.
        assert!(delivery.ack().await.is_err());
        assert!(delivery.give_back(Duration::ZERO).await.is_err());
        assert!(delivery.give_back(Duration::from_millis(1)).await.is_err());
    }
    for delivery in &again {
        assert!(!delivery.is_lost() && delivery.message().is_redelivered);
        delivery.ack().await.unwrap();
    }
    source.close().await.unwrap();
    assert_eq!(queue.ready().await, 0);
}

#[tokio::test]
async fn the_source_reconnects_after_a_broker_restart() {
    let mut server = RabbitServer::start().unwrap();
    let url = server.url();
    for kind in [Kind::Quorum, Kind::Classic] {
        let name = format!("restarted-{kind:?}");
        let queue = Queue::new(&url, &name, kind).await;
        queue.send(numbers("m", 20)).await;
        let mut source = queue.source();
        let held = take(&mut source, 10).await;
        if kind == Kind::Quorum {
            server.until_queues_are_written(&[&name]).unwrap();
            server.kill();
        } else {
            server.stop().unwrap();
        }
        until("the deliveries are lost", async || held.iter().all(|delivery| delivery.is_lost())).await;
        let refused = timeout(TIMEOUT, source.next()).await.unwrap();
        assert!(refused.is_err_and(|error| !error.is_fatal()));
        server.start_again().unwrap();
        let mut seen = BTreeSet::new();
        for delivery in take(&mut source, 20).await {
            seen.insert(text(&delivery));
            delivery.ack().await.unwrap();
        }
        assert_eq!(seen.len(), 20);
        source.close().await.unwrap();
        assert_eq!(Queue::new(&url, &name, kind).await.ready().await, 0);
    }
}

#[tokio::test]
async fn a_queue_that_is_deleted_and_made_again_is_consumed_again() {
    let server = shared();
    let queue = Queue::new(&server.url(), "deleted", Kind::Quorum).await;
    let mut source = queue.source();
    source.connect().await.unwrap();
    queue.send(["before"]).await;
    let before = next(&mut source).await;
    queue.delete().await;
    let error = timeout(TIMEOUT, source.next()).await.unwrap().unwrap_err();
    assert!(!error.is_fatal() && ErrorChain(&error).to_string().contains("deleted"), "{error}");
    until("the delivery is lost", async || before.is_lost()).await;
    let queue = Queue::new(&server.url(), "deleted", Kind::Quorum).await;
    queue.send(["after"]).await;
    let after = next(&mut source).await;
    assert_eq!(text(&after), "after");
    after.ack().await.unwrap();
    source.close().await.unwrap();
}

#[tokio::test]
async fn an_explicit_connect_returns_the_error() {
    let server = shared();
    let mut source = AmqpSource::new(broker(&server.url()), "no-such-queue").unwrap();
    let error = ErrorChain(&source.connect().await.unwrap_err()).to_string();
    assert!(error.contains("no-such-queue") && error.contains("NOT_FOUND"), "{error}");
    let wrong = server.url().replace("guest:guest", "guest:secret");
    let mut source = AmqpSource::new(broker(&wrong), "q").unwrap();
    let error = ErrorChain(&source.connect().await.unwrap_err()).to_string();
    assert!(error.contains("ACCESS_REFUSED") && !error.contains("secret"), "{error}");
}

/// A client without TLS support sends nothing to a broker that requires TLS, so nothing is sent in plain text.
#[tokio::test]
async fn amqps_never_falls_back_to_plain_text() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let heard = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut bytes = Vec::new();
        // The client may end the connection in any way.
        let _ = stream.read_to_end(&mut bytes).await;
        bytes
    });
    let mut source =
        AmqpSource::new(broker(&format!("amqps://guest:guest@127.0.0.1:{port}/%2f")), "q").unwrap();
    let error = timeout(TIMEOUT, source.connect()).await.unwrap().unwrap_err();
    let error = ErrorChain(&error).to_string();
    assert!(error.contains("TLS"), "{error}");
    assert!(!heard.await.unwrap().starts_with(b"AMQP"));
}

/// The program is busy with what it has, for longer than a connection may be silent.
#[tokio::test]
async fn a_full_buffer_keeps_the_connection_alive() {
    let server = shared();
    let queue = Queue::new(&server.url(), "silent", Kind::Quorum).await;
    queue.send(numbers("m", 8)).await;
    let line = Line::to(server.port()).await.unwrap();
    let url = format!("{}?heartbeat=1", server.url_at(line.port()));
    let mut source = AmqpSource::new(broker(&url), "silent").unwrap().with_prefetch(4).unwrap();
    let held = take(&mut source, 2).await;
    // RabbitMQ ends a connection that was silent for two heartbeats and a bit.
    sleep(Duration::from_secs(6)).await;
    let are_all_right = async |deliveries: Vec<AmqpDelivery>| {
        for delivery in deliveries {
            assert!(!delivery.is_lost() && !delivery.message().is_redelivered);
            delivery.ack().await.unwrap();
        }
    };
    are_all_right(held).await;
    are_all_right(take(&mut source, 4).await).await;
    are_all_right(take(&mut source, 2).await).await;
    source.close().await.unwrap();
    assert_eq!((line.connections(), queue.ready().await), (1, 0));
}

/// The broker waits two seconds, and looks each second.
#[tokio::test]
async fn a_message_held_beyond_the_consumer_timeout_comes_again() {
    let mut options = RabbitOptions::default();
    options.settings = vec!["consumer_timeout, 2000".to_owned(), "channel_tick_interval, 1000".to_owned()];
    let server = RabbitServer::start_with(options).unwrap();
    let queue = Queue::new(&server.url(), "slow", Kind::Quorum).await;
    queue.send(["slow"]).await;
    let time_out = Duration::from_secs(2);
    let mut source = queue.source().with_consumer_timeout(Some(time_out)).unwrap();
    assert_eq!(source.info().redelivery(), Some(time_out));
    let slow = next(&mut source).await;
    until("the delivery is lost", async || slow.is_lost()).await;
    let again = next(&mut source).await;
    assert!(again.message().is_redelivered);
    // A long delay ends before the broker closes the channel.
    again.give_back(Duration::from_secs(3600)).await.unwrap();
    next(&mut source).await.ack().await.unwrap();
    source.close().await.unwrap();
}

#[tokio::test]
async fn the_order_key_follows_the_options() {
    let server = shared();
    let queue = Queue::new(&server.url(), "keys", Kind::Classic).await;
    let mut headers = FieldTable::default();
    headers.insert("Account".into(), AMQPValue::LongString("a-1".into()));
    assert!(
        queue.send_as("1", BasicProperties::default().with_headers(headers)).await.await.unwrap().is_ack()
    );
    let key = async |mut source: AmqpSource| {
        let key = next(&mut source).await.message().order_key.clone();
        source.close().await.unwrap();
        key
    };
    assert_eq!(key(queue.source()).await, None);
    assert_eq!(key(queue.source().with_order_by_header("account")).await.as_deref(), Some(&b"a-1"[..]));
    assert_eq!(key(queue.source().with_order_by_header("other")).await, None);
    assert_eq!(key(queue.source().with_order_by_routing_key()).await.as_deref(), Some(&b"keys"[..]));
    queue.purge().await;
}

#[test]
fn settings_out_of_their_bounds_are_refused() {
    for uri in ["", "http://host", "amqp:", "amqp://user:secret@host:port"] {
        if let Err(error) = oncegate_amqp::AmqpBroker::new(uri) {
            assert!(!error.to_string().contains("secret"));
        } else {
            assert_eq!(uri, "amqp:");
        }
    }
    let source = |name: &str| AmqpSource::new(broker("amqp://host"), name);
    assert!(source("").is_err() && source(&"q".repeat(256)).is_err());
    assert!(source("q").unwrap().with_prefetch(0).is_err());
    assert!(source("q").unwrap().with_consumer_timeout(Some(Duration::from_millis(999))).is_err());
}
