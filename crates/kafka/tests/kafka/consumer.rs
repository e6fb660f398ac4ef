//! The tests of every broker, on Kafka.

use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use oncegate_inbox::{InboxEventKind, Order, Outgoing, Publisher};
use oncegate_kafka::rdkafka::consumer::{BaseConsumer, Consumer as _};
use oncegate_kafka::rdkafka::{Offset, TopicPartitionList};
use oncegate_kafka::{KafkaOptions, KafkaPublisher, KafkaSource};
use tokio::sync::Semaphore;
use tokio::time::sleep;

use crate::cluster::{Cluster, config, member};
use oncegate_broker_tests::suite::{self, Broker, until};

pub(crate) const TOPIC: &str = "orders";
const PARTITIONS: i32 = 3;

/// A group on a cluster. The test owns the cluster, because it cannot be shared.
pub(crate) struct Group {
    pub(crate) bootstrap: String,
    publisher: Arc<KafkaPublisher>,
    asks: Mutex<BaseConsumer>,
}

impl Group {
    pub(crate) fn on(cluster: &Cluster) -> Self {
        let bootstrap = cluster.mock.bootstrap_servers();
        let mut asks = config(&bootstrap);
        asks.set("group.id", "g");
        Self {
            publisher: Arc::new(KafkaPublisher::new(&config(&bootstrap)).unwrap()),
            asks: Mutex::new(asks.create().unwrap()),
            bootstrap,
        }
    }

    fn left_now(&self) -> Option<u64> {
        let asks = self.asks.lock().unwrap();
        let (mut list, mut left) = (TopicPartitionList::new(), 0);
        list.add_partition_range(TOPIC, 0, PARTITIONS - 1);
        let committed = asks.committed_offsets(list, Duration::from_secs(5)).ok()?;
        for element in committed.elements() {
            let end = asks.fetch_watermarks(TOPIC, element.partition(), Duration::from_secs(5)).ok()?.1;
            let done = if let Offset::Offset(done) = element.offset() { done } else { 0 };
            left += (end - done) as u64;
        }
        Some(left)
    }
}

impl Broker for Group {
    type Source = KafkaSource;

    async fn source(&self) -> KafkaSource {
        let options = KafkaOptions::default().with_commit_interval(Duration::from_millis(100)).unwrap();
        let options = options.with_revoke_timeout(Duration::from_secs(1)).unwrap();
        KafkaSource::new(&member(&self.bootstrap, "g"), &[TOPIC], options).unwrap()
    }

    fn publisher(&self) -> Arc<dyn Publisher> {
        self.publisher.clone()
    }

    fn outgoing(&self, id: &str, key: &str) -> Outgoing {
        let mut message = Outgoing::new(id, TOPIC, id.to_owned());
        message.order_key = Some(key.to_owned().into());
        message
    }

    async fn left(&self) -> u64 {
        loop {
            match tokio::task::block_in_place(|| self.left_now()) {
                Some(left) => return left,
                None => sleep(Duration::from_millis(100)).await,
            }
        }
    }
}

pub(crate) fn cluster() -> Cluster {
    Cluster::start(TOPIC, PARTITIONS)
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_comes_again() {
    let cluster = cluster();
    suite::everything_comes_again(Group::on(&cluster)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn order_holds() {
    let cluster = cluster();
    suite::order_holds(Group::on(&cluster)).await;
}

async fn poison(order: Order) {
    let cluster = cluster();
    let group = Group::on(&cluster);
    let without = async { cluster.produce_without_id(TOPIC) };
    suite::poison(group, order, without).await;
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
async fn a_slow_handler_behind_a_full_buffer_loses_nothing() {
    let cluster = cluster();
    suite::a_full_buffer(Group::on(&cluster)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_two_dies() {
    let cluster = cluster();
    suite::one_of_two_dies(Group::on(&cluster)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_database_is_restarted() {
    let cluster = cluster();
    suite::the_database_is_restarted(Group::on(&cluster)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn brokers_are_down_for_a_while() {
    let cluster = cluster();
    let group = Group::on(&cluster);
    let breaks = async || {
        for broker in 1..=3 {
            cluster.mock.broker_down(broker).unwrap();
        }
        sleep(Duration::from_secs(2)).await;
        for broker in 1..=3 {
            cluster.mock.broker_up(broker).unwrap();
        }
    };
    let (effects, ids) = suite::something_breaks(&group, &suite::store(), breaks).await;
    effects.assert_once(&ids);
}

/// Commits go up to the lowest unsettled message, and no further.
#[tokio::test(flavor = "multi_thread")]
async fn stopping_loses_nothing() {
    let cluster = cluster();
    let group = Group::on(&cluster);
    let (store, effects, ids) = (suite::store(), suite::Effects::default(), suite::ids(120));
    group.publish(&ids, 30).await;
    let (noted, gate) = (effects.clone(), Arc::new(Semaphore::new(40)));
    let permits = gate.clone();
    let running = suite::run(
        group.source().await,
        suite::inbox(&store, suite::Letters::default()),
        |consumer| consumer.with_concurrency(4).unwrap().with_max_held(50).unwrap(),
        move |_, message| {
            let (effects, gate) = (noted.clone(), permits.clone());
            async move {
                gate.acquire().await.map_err(|_| oncegate_inbox::HandlerError::retry("closed"))?.forget();
                effects.note(&message);
                Ok(())
            }
        },
    );
    until("40 took effect", || async { effects.count() == 40 }).await;
    let stopped = tokio::spawn(running.stop());
    sleep(Duration::from_millis(100)).await;
    gate.add_permits(4);
    let counts = stopped.await.unwrap();
    let done = effects.count() as u64;
    assert!((40..=44).contains(&done), "{done}");
    assert_eq!(counts.get(InboxEventKind::Acknowledged), done);
    let left = group.left().await;
    assert!((ids.len() as u64 - done..ids.len() as u64).contains(&left), "{left} are left of {done} done");
    let running = suite::noting(&group, &store, &effects).await;
    until("everything is acknowledged", || async { group.left().await == 0 }).await;
    let counts = running.stop().await;
    effects.assert_once(&ids);
    assert_eq!(counts.get(InboxEventKind::Duplicate), left - (ids.len() as u64 - done));
}
