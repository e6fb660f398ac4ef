//! The cluster that librdkafka has for tests: brokers in this process that speak the protocol on loopback, with groups,
//! offsets and faults.

use std::time::Duration;

use oncegate_inbox::MESSAGE_ID;
use oncegate_kafka::rdkafka::consumer::{BaseConsumer, Consumer as _};
use oncegate_kafka::rdkafka::message::{Header, OwnedHeaders};
use oncegate_kafka::rdkafka::mocking::MockCluster;
use oncegate_kafka::rdkafka::producer::{
    BaseRecord, DefaultProducerContext, Producer as _, ThreadedProducer,
};
use oncegate_kafka::rdkafka::{ClientConfig, Offset, TopicPartitionList};

pub(crate) type Mock = MockCluster<'static, DefaultProducerContext>;

pub(crate) struct Cluster {
    pub(crate) mock: Mock,
}

impl Cluster {
    /// Three brokers, and a topic with so many partitions.
    pub(crate) fn start(topic: &str, partitions: i32) -> Self {
        let mock = MockCluster::new(3).unwrap();
        mock.create_topic(topic, partitions, 3).unwrap();
        Self { mock }
    }

    pub(crate) fn config(&self) -> ClientConfig {
        config(&self.mock.bootstrap_servers())
    }

    /// A member of a group, with a session timeout of 4.5 s. That is little more than the 3 s for which the cluster
    /// waits for further members of a new group. A member whose session ends meanwhile gets no more replies.
    pub(crate) fn member(&self, group: &str) -> ClientConfig {
        member(&self.mock.bootstrap_servers(), group)
    }

    /// Publishes messages: a key, an identifier and a payload each, in this order.
    pub(crate) fn produce<T: AsRef<str>>(
        &self,
        topic: &str,
        messages: impl IntoIterator<Item = (T, T, String)>,
    ) {
        produce(&self.mock.bootstrap_servers(), topic, messages);
    }

    /// Publishes a message without an identifier.
    pub(crate) fn produce_without_id(&self, topic: &str) {
        let producer = producer(&self.mock.bootstrap_servers());
        producer
            .send(BaseRecord::to(topic).key("unknown").payload("nothing"))
            .map_err(|(error, _)| error)
            .unwrap();
        producer.flush(oncegate_broker_tests::TIMEOUT).unwrap();
    }

    /// So many messages with a key each, `m0` and so on.
    pub(crate) fn produce_some(&self, topic: &str, count: usize) {
        self.produce(topic, (0..count).map(|n| (format!("m{n}"), format!("m{n}"), format!("m{n}"))));
    }

    /// The committed offsets of the group in each partition of the topic; -1 if there is none.
    pub(crate) fn committed(&self, group: &str, topic: &str, partitions: i32) -> Vec<i64> {
        let mut config = self.config();
        config.set("group.id", group);
        let consumer: BaseConsumer = config.create().unwrap();
        let mut list = TopicPartitionList::new();
        for partition in 0..partitions {
            list.add_partition(topic, partition);
        }
        let Ok(list) = consumer.committed_offsets(list, Duration::from_secs(10)) else { return Vec::new() };
        let offset = |element: &Offset| if let Offset::Offset(offset) = element { *offset } else { -1 };
        list.elements().iter().map(|element| offset(&element.offset())).collect()
    }

    /// The ends of the topic's logs.
    pub(crate) fn ends(&self, topic: &str, partitions: i32) -> Vec<i64> {
        let consumer: BaseConsumer = self.config().create().unwrap();
        let end = |partition| {
            consumer.fetch_watermarks(topic, partition, oncegate_broker_tests::TIMEOUT).unwrap().1
        };
        (0..partitions).map(end).collect()
    }
}

/// Publishes messages: a key, an identifier and a payload each, in this order.
pub(crate) fn produce<T: AsRef<str>>(
    bootstrap: &str,
    topic: &str,
    messages: impl IntoIterator<Item = (T, T, String)>,
) {
    let producer = producer(bootstrap);
    for (key, id, payload) in messages {
        let headers = OwnedHeaders::new().insert(Header { key: MESSAGE_ID, value: Some(id.as_ref()) });
        let mut record = BaseRecord::to(topic).key(key.as_ref()).payload(&payload).headers(headers);
        while let Err((_, again)) = producer.send(record) {
            record = again;
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    producer.flush(oncegate_broker_tests::TIMEOUT).unwrap();
}

fn producer(bootstrap: &str) -> ThreadedProducer<DefaultProducerContext> {
    let mut config = config(bootstrap);
    config.set("enable.idempotence", "true").set("linger.ms", "5").set("batch.num.messages", "2000");
    config.create().unwrap()
}

pub(crate) fn config(bootstrap: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", bootstrap)
        .set("fetch.wait.max.ms", "50")
        .set("reconnect.backoff.max.ms", "500");
    config
}

pub(crate) fn member(bootstrap: &str, group: &str) -> ClientConfig {
    let mut config = config(bootstrap);
    config.set("group.id", group).set("session.timeout.ms", "4500").set("heartbeat.interval.ms", "300");
    config
}
