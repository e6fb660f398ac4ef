//! The source by itself: what it delivers, and what it commits.

use std::time::Duration;

use oncegate_inbox::{
    Delivery as _, MESSAGE_ID, Outgoing, PublishError, Publisher as _, Source as _, SourceError,
};
use oncegate_kafka::rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use oncegate_kafka::{
    KafkaDelivery, KafkaOptions, KafkaOrder, KafkaPublisher, KafkaSource, OnTruncation, RECORD_KEY, TOMBSTONE,
};

use crate::cluster::Cluster;
use oncegate_broker_tests::{until, within};

pub(crate) const TOPIC: &str = "orders";

pub(crate) fn options() -> KafkaOptions {
    KafkaOptions::default()
        .with_commit_interval(Duration::from_millis(50))
        .unwrap()
        .with_revoke_timeout(Duration::from_secs(1))
        .unwrap()
}

fn source(cluster: &Cluster, group: &str) -> KafkaSource {
    KafkaSource::new(&cluster.member(group), &[TOPIC], options()).unwrap()
}

/// The next delivery. Errors that pass are left out.
pub(crate) async fn next(source: &mut KafkaSource) -> KafkaDelivery {
    within("a delivery", async {
        loop {
            match source.next().await {
                Ok(delivery) => return delivery,
                Err(error) => assert!(!error.is_fatal(), "{error}"),
            }
        }
    })
    .await
}

pub(crate) async fn take(source: &mut KafkaSource, count: usize) -> Vec<KafkaDelivery> {
    let mut taken = Vec::new();
    while taken.len() < count {
        taken.push(next(source).await);
    }
    taken
}

/// The next error.
pub(crate) async fn error(source: &mut KafkaSource) -> SourceError {
    within("an error", async {
        loop {
            if let Err(error) = source.next().await {
                return error;
            }
        }
    })
    .await
}

fn payload(delivery: &KafkaDelivery) -> String {
    String::from_utf8(delivery.message().payload.to_vec()).unwrap()
}

pub(crate) async fn committed(cluster: &Cluster, group: &str, expected: &[i64]) {
    until(format!("{expected:?} committed"), async || {
        cluster.committed(group, TOPIC, expected.len() as i32) == expected
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_commit_goes_beyond_an_unsettled_message() {
    let cluster = Cluster::start(TOPIC, 1);
    cluster.produce_some(TOPIC, 10);
    let mut source = source(&cluster, "g");
    let taken = take(&mut source, 10).await;
    for (at, delivery) in taken.iter().enumerate() {
        assert_eq!((delivery.offset(), payload(delivery)), (at as i64, format!("m{at}")));
        assert_eq!(delivery.message().broker_id, Some(format!("{TOPIC}/0/{at}")));
        assert!(delivery.message().is_redelivered);
        if at != 3 {
            delivery.ack().await.unwrap();
        }
    }
    committed(&cluster, "g", &[3]).await;
    source.close().await.unwrap();
    assert!(taken[3].is_lost());
    // Too late.
    taken[3].ack().await.unwrap();
    drop(source);
    assert_eq!(cluster.committed("g", TOPIC, 1), [3]);

    let mut source = self::source(&cluster, "g");
    let again = take(&mut source, 7).await;
    assert_eq!(again.iter().map(KafkaDelivery::offset).collect::<Vec<_>>(), (3..10).collect::<Vec<_>>());
    for delivery in again {
        delivery.ack().await.unwrap();
    }
    // Committed when it closes, without waiting for the interval.
    source.close().await.unwrap();
    assert_eq!(cluster.committed("g", TOPIC, 1), [10]);
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_and_returned_messages_come_again() {
    let cluster = Cluster::start(TOPIC, 1);
    cluster.produce_some(TOPIC, 3);
    let mut source = source(&cluster, "g");
    let mut taken = take(&mut source, 3).await;
    taken[1].give_back(Duration::from_millis(300)).await.unwrap();
    taken[2].ack().await.unwrap();
    drop(taken.remove(0));
    let first = next(&mut source).await;
    assert_eq!(first.offset(), 0);
    first.ack().await.unwrap();
    committed(&cluster, "g", &[1]).await;
    let second = next(&mut source).await;
    assert_eq!(second.offset(), 1);
    second.ack().await.unwrap();
    committed(&cluster, "g", &[3]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_member_stays_in_its_group() {
    let cluster = Cluster::start(TOPIC, 1);
    cluster.produce_some(TOPIC, 1000);
    let mut config = cluster.member("g");
    config.set("max.poll.interval.ms", "5000");
    let mut source =
        KafkaSource::new(&config, &[TOPIC], options().with_max_buffered(10, 1024).unwrap()).unwrap();
    let first = next(&mut source).await;
    // Longer than both times after which a member is thrown out.
    tokio::time::sleep(Duration::from_secs(9)).await;
    assert!(!first.is_lost());
    let rest = take(&mut source, 999).await;
    assert_eq!(rest.iter().map(KafkaDelivery::offset).collect::<Vec<_>>(), (1..1000).collect::<Vec<_>>());
    assert!(!first.is_lost());
    for delivery in rest.iter().chain([&first]) {
        delivery.ack().await.unwrap();
    }
    committed(&cluster, "g", &[1000]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_held_for_long_blocks_only_its_partition() {
    let cluster = Cluster::start(TOPIC, 2);
    cluster.produce_some(TOPIC, 400);
    let ends = cluster.ends(TOPIC, 2);
    let options = options().with_max_uncommitted(20).unwrap();
    let mut source = KafkaSource::new(&cluster.member("g"), &[TOPIC], options).unwrap();
    let mut held = None;
    let mut seen = [0, 0];
    while seen[1] < ends[1] || seen[0] < 20 {
        let delivery = next(&mut source).await;
        seen[delivery.partition() as usize] += 1;
        if delivery.partition() == 0 && delivery.offset() == 0 {
            held = Some(delivery);
        } else {
            delivery.ack().await.unwrap();
        }
    }
    assert!(seen[0] < 100, "{seen:?}");
    committed(&cluster, "g", &[0, ends[1]]).await;
    held.unwrap().ack().await.unwrap();
    while seen[0] < ends[0] {
        let delivery = next(&mut source).await;
        seen[delivery.partition() as usize] += 1;
        delivery.ack().await.unwrap();
    }
    committed(&cluster, "g", &ends).await;
}

/// Both protocols of a group. Whether what was acknowledged while a partition was being revoked was committed.
async fn a_partition_that_moves(strategy: &str) -> bool {
    let cluster = Cluster::start(TOPIC, 2);
    cluster.produce_some(TOPIC, 200);
    let ends = cluster.ends(TOPIC, 2);
    let mut config = cluster.member("g");
    config.set("partition.assignment.strategy", strategy);
    let mut first = KafkaSource::new(&config, &[TOPIC], options()).unwrap();
    let taken = take(&mut first, 200).await;
    // The first ten of each are done; one of each is done in the time that a revocation gives, and the others never are.
    let mut slow = Vec::new();
    for delivery in &taken {
        match delivery.offset() {
            0..10 => delivery.ack().await.unwrap(),
            10 => slow.push(delivery),
            _ => {}
        }
    }
    committed(&cluster, "g", &[10, 10]).await;

    let mut second = KafkaSource::new(&config, &[TOPIC], options()).unwrap();
    let (got, ()) = tokio::join!(next(&mut second), async {
        for delivery in slow {
            delivery.ack().await.unwrap();
        }
        until("a partition moves", async || taken.iter().any(KafkaDelivery::is_lost)).await;
    });
    let moved = got.partition();
    // The cluster of the tests refuses commits while it waits for members to join, as real ones do not: then the eleventh
    // comes again.
    assert!(matches!(got.offset(), 10 | 11), "{}", got.offset());
    let was_committed = got.offset() == 11;
    for delivery in &taken {
        if delivery.partition() == moved {
            assert!(delivery.is_lost());
            // The reader is gone.
            delivery.ack().await.unwrap();
        }
    }
    assert_eq!(cluster.committed("g", TOPIC, 2)[moved as usize], got.offset());
    got.ack().await.unwrap();
    let mut seen = 1;
    while seen < ends[moved as usize] - got.offset() {
        let delivery = next(&mut second).await;
        assert_eq!(delivery.partition(), moved);
        delivery.ack().await.unwrap();
        seen += 1;
    }

    // The second one leaves, and everything is the first one's again.
    second.close().await.unwrap();
    drop(taken);
    let stays = 1 - moved;
    until("all is committed", async || {
        while let Ok(Ok(delivery)) = tokio::time::timeout(Duration::from_millis(10), first.next()).await {
            assert!(delivery.is_lost() || delivery.partition() == stays, "{delivery:?}");
            delivery.ack().await.unwrap();
        }
        cluster.committed("g", TOPIC, 2) == ends
    })
    .await;
    cluster.produce_some(TOPIC, 50);
    let ends = cluster.ends(TOPIC, 2);
    until("what comes later is committed", async || {
        while let Ok(Ok(delivery)) = tokio::time::timeout(Duration::from_millis(10), first.next()).await {
            delivery.ack().await.unwrap();
        }
        cluster.committed("g", TOPIC, 2) == ends
    })
    .await;
    first.close().await.unwrap();
    was_committed
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_moves_eagerly() {
    a_partition_that_moves("range").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_moves_cooperatively() {
    // The cluster of the tests sends a member away whose part of a rebalance comes after the leader's. It joins again at once,
    // and commits are refused meanwhile, as in an eager revocation: such a round does not count.
    for _ in 0..5 {
        if a_partition_that_moves("cooperative-sticky").await {
            return;
        }
    }
    panic!("what is acknowledged while a partition is being revoked is not committed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_starts_at_the_configured_position() {
    let cluster = Cluster::start(TOPIC, 1);
    cluster.produce_some(TOPIC, 5);
    let begin = |group: &str, reset: &str| {
        let mut config = cluster.member(group);
        config.set("auto.offset.reset", reset);
        KafkaSource::new(&config, &[TOPIC], options()).unwrap()
    };
    let mut latest = begin("latest", "latest");
    let mut refused = begin("refused", "error");
    let mut earliest = begin("earliest", "earliest");
    assert_eq!(next(&mut earliest).await.offset(), 0);
    let error = error(&mut refused).await;
    assert!(error.is_fatal() && error.to_string().contains("auto.offset.reset"), "{error}");
    // The start is committed, so that messages that come before the next reader are not skipped.
    committed(&cluster, "latest", &[5]).await;
    latest.close().await.unwrap();
    cluster.produce_some(TOPIC, 2);
    let mut latest = begin("latest", "latest");
    assert_eq!(next(&mut latest).await.offset(), 5);
    // The error persists, and the source can still be closed.
    assert!(refused.next().await.unwrap_err().is_fatal());
    refused.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_messages_of_a_log_are_reported() {
    let cluster = Cluster::start(TOPIC, 1);
    cluster.produce_some(TOPIC, 2);
    let mut first = source(&cluster, "g");
    next(&mut first).await.ack().await.unwrap();
    committed(&cluster, "g", &[1]).await;
    first.close().await.unwrap();
    // The cluster keeps 5 MiB of a partition.
    let large = "x".repeat(100_000);
    cluster.produce(TOPIC, (0..80).map(|n| ("k", "large", format!("{n}{large}"))));
    let mut stops = source(&cluster, "g");
    let error = error(&mut stops).await;
    assert!(error.is_fatal(), "{error}");
    assert!(error.to_string().contains("partition 0 of orders: messages 1 to "), "{error}");
    stops.close().await.unwrap();
    assert_eq!(cluster.committed("g", TOPIC, 1), [1]);

    let options = options().with_on_truncation(OnTruncation::Continue);
    let mut goes_on = KafkaSource::new(&cluster.member("g"), &[TOPIC], options).unwrap();
    let error = self::error(&mut goes_on).await;
    assert!(!error.is_fatal() && error.to_string().contains("were deleted"), "{error}");
    let oldest = next(&mut goes_on).await;
    assert!(oldest.offset() > 2, "{}", oldest.offset());
    oldest.ack().await.unwrap();
    committed(&cluster, "g", &[oldest.offset() + 1]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_is_delivered_unchanged() {
    let cluster = Cluster::start(TOPIC, 1);
    let publisher = KafkaPublisher::new(&cluster.config()).unwrap();
    let mut message = Outgoing::new("id-1", TOPIC, "");
    message.order_key = Some("key".into());
    message.headers =
        vec![("a".into(), "1".into()), ("A".into(), "".into()), (MESSAGE_ID.into(), "forged".into())];
    publisher.publish(&message).await.unwrap();
    message.headers = vec![(TOMBSTONE.into(), "1".into()), (RECORD_KEY.into(), "other".into())];
    publisher.publish(&message).await.unwrap();
    message = Outgoing::new("id-3", TOPIC, vec![0, 255]);
    publisher.publish(&message).await.unwrap();

    let mut by_key = source(&cluster, "key");
    let taken = take(&mut by_key, 3).await;
    let messages: Vec<_> = taken.iter().map(|delivery| delivery.message()).collect();
    let id = |at: usize| messages[at].header(MESSAGE_ID).unwrap().unwrap().clone();
    assert_eq!((id(0), id(1), id(2)), ("id-1".into(), "id-1".into(), "id-3".into()));
    assert_eq!(messages[0].headers[1..], [("a".into(), "1".into()), ("A".into(), "".into())]);
    assert_eq!(messages[0].order_key, Some("key".into()));
    // An empty payload is not the same as none.
    assert_eq!(messages[0].header(TOMBSTONE), Ok(None));
    assert_eq!(messages[1].header(TOMBSTONE), Ok(Some(&"1".into())));
    assert_eq!(messages[1].order_key, Some("other".into()));
    assert_eq!((messages[2].order_key.clone(), &messages[2].payload[..]), (None, &[0, 255][..]));

    let options = options().with_order(KafkaOrder::Partition);
    let mut by_partition = KafkaSource::new(&cluster.member("partition"), &[TOPIC], options).unwrap();
    let taken = take(&mut by_partition, 3).await;
    for delivery in &taken {
        assert_eq!(delivery.message().order_key, Some("orders/0".into()));
    }
    assert_eq!(taken[0].message().header(RECORD_KEY), Ok(Some(&"key".into())));
    assert_eq!(taken[2].message().header(RECORD_KEY), Ok(None));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_may_be_compressed_in_any_way() {
    let cluster = Cluster::start(TOPIC, 1);
    let payload = "the same again and again ".repeat(100);
    for codec in ["gzip", "lz4", "snappy", "zstd"] {
        let mut config = cluster.config();
        config.set("compression.codec", codec);
        let publisher = KafkaPublisher::new(&config).unwrap();
        publisher.publish(&Outgoing::new(codec, TOPIC, payload.clone())).await.unwrap();
    }
    for delivery in take(&mut source(&cluster, "g"), 4).await {
        assert_eq!(delivery.message().payload, payload);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_reports_only_known_results() {
    let cluster = Cluster::start(TOPIC, 1);
    let mut config = cluster.config();
    config.set("message.timeout.ms", "1500").set("message.max.bytes", "10000");
    let publisher = KafkaPublisher::new(&config).unwrap();
    let message = Outgoing::new("id", TOPIC, "m");
    publisher.publish(&message).await.unwrap();

    let large = Outgoing::new("id", TOPIC, vec![0; 20_000]);
    let error = publisher.publish(&large).await.unwrap_err();
    assert!(matches!(error, PublishError::Refused(_)), "{error}");

    // A reply that is lost: it is sent again, and is there once.
    let lost = [RDKafkaRespErr::RD_KAFKA_RESP_ERR__TRANSPORT];
    cluster.mock.request_errors(RDKafkaApiKey::Produce, &lost);
    publisher.publish(&message).await.unwrap();
    assert_eq!(cluster.ends(TOPIC, 1), [2]);

    for broker in 1..=3 {
        cluster.mock.broker_down(broker).unwrap();
    }
    let error = publisher.publish(&message).await.unwrap_err();
    assert!(matches!(error, PublishError::Unconfirmed(_)), "{error}");
    for broker in 1..=3 {
        cluster.mock.broker_up(broker).unwrap();
    }
    until("it publishes again", async || publisher.publish(&message).await.is_ok()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_outage_loses_nothing() {
    let cluster = Cluster::start(TOPIC, 3);
    cluster.produce_some(TOPIC, 300);
    let mut source = source(&cluster, "g");
    let mut seen = std::collections::BTreeSet::new();
    for delivery in take(&mut source, 100).await {
        seen.insert(payload(&delivery));
        delivery.ack().await.unwrap();
    }
    for broker in 1..=3 {
        cluster.mock.broker_down(broker).unwrap();
    }
    // What is acknowledged now is committed when they are back.
    for delivery in take(&mut source, 100).await {
        seen.insert(payload(&delivery));
        delivery.ack().await.unwrap();
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    for broker in 1..=3 {
        cluster.mock.broker_up(broker).unwrap();
    }
    cluster.produce(TOPIC, [("k", "late", "late".to_owned())]);
    let ends = cluster.ends(TOPIC, 3);
    until("all is committed", async || {
        while let Ok(Ok(delivery)) = tokio::time::timeout(Duration::from_millis(50), source.next()).await {
            seen.insert(payload(&delivery));
            delivery.ack().await.unwrap();
        }
        cluster.committed("g", TOPIC, 3) == ends
    })
    .await;
    assert_eq!(seen.len(), 301);
}
