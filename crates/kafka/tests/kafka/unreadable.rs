//! Records that cannot be read: nothing is committed beyond them.

use oncegate_inbox::{Delivery as _, Source as _};
use oncegate_kafka::KafkaSource;

use crate::cluster::Cluster;
use crate::raw::{self, Wrong};
use crate::source::{TOPIC, options, take};
use oncegate_broker_tests::within;

/// Two messages, one that cannot be read, and another one.
fn cluster(wrong: Wrong) -> Cluster {
    let cluster = Cluster::start(TOPIC, 1);
    cluster.mock.partition_leader(TOPIC, 0, Some(1)).unwrap();
    cluster.produce_some(TOPIC, 2);
    let brokers = cluster.mock.bootstrap_servers();
    raw::produce(brokers.split(',').next().unwrap(), TOPIC, wrong);
    cluster.produce_some(TOPIC, 1);
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_whose_checksum_is_wrong_is_neither_delivered_nor_skipped() {
    let cluster = cluster(Wrong::Checksum);
    let mut source = KafkaSource::new(&cluster.member("g"), &[TOPIC], options()).unwrap();
    let mut seen = Vec::new();
    let error = loop {
        match within("an error", source.next()).await {
            Ok(delivery) => {
                seen.push(delivery.offset());
                delivery.ack().await.unwrap();
            }
            Err(error) => break error,
        }
    };
    assert!(error.is_fatal() && error.to_string().contains("checksum"), "{error}");
    assert!([0, 1].starts_with(&seen), "{seen:?}");
    source.close().await.unwrap();
    assert!(cluster.committed("g", TOPIC, 1)[0] <= 2);

    // A member with the check turned off gets the record.
    let mut config = cluster.member("unchecked");
    config.set("check.crcs", "false");
    let mut source = KafkaSource::new(&config, &[TOPIC], options()).unwrap();
    assert_eq!(take(&mut source, 4).await[2].message().payload, "x");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_is_compressed_in_an_unknown_way_is_not_skipped() {
    let cluster = cluster(Wrong::Compression);
    let mut source = KafkaSource::new(&cluster.member("g"), &[TOPIC], options()).unwrap();
    let mut seen = 0;
    let error = loop {
        match within("an error", source.next()).await {
            Ok(delivery) => {
                seen += 1;
                delivery.ack().await.unwrap();
            }
            Err(error) => break error,
        }
    };
    assert!(error.is_fatal() && error.to_string().contains("compression"), "{error}");
    assert!(seen <= 2, "{seen}");
    source.close().await.unwrap();
    assert!(cluster.committed("g", TOPIC, 1)[0] <= 2);
}
