//! Consumers that are processes, and are killed, stopped and cut off from their database.

use std::collections::BTreeSet;
use std::time::Duration;

use oncegate_servers::{freeze, thaw};

use crate::cluster::Cluster;
use oncegate_broker_tests::ledger::Ledger;
use oncegate_broker_tests::process::Child;
use oncegate_broker_tests::until;

const TOPIC: &str = "orders";

fn consumer(cluster: &Cluster, ledger: &Ledger, further: &[(&str, String)]) -> Child {
    named("consumer", cluster, ledger, further)
}

fn named(who: &str, cluster: &Cluster, ledger: &Ledger, further: &[(&str, String)]) -> Child {
    let settings = "session.timeout.ms=4500,heartbeat.interval.ms=300,fetch.wait.max.ms=50";
    let mut variables = vec![
        ("KAFKA_BROKERS", cluster.mock.bootstrap_servers()),
        ("KAFKA_TOPIC", TOPIC.to_owned()),
        ("KAFKA_GROUP", "g".to_owned()),
        ("KAFKA_CONFIG", settings.to_owned()),
        ("DATABASE_URL", ledger.url(who)),
    ];
    variables.extend_from_slice(further);
    Child::example("kafka", &variables)
}

async fn all_committed(cluster: &Cluster, partitions: i32) {
    let ends = cluster.ends(TOPIC, partitions);
    until("all is committed", async || cluster.committed("g", TOPIC, partitions) == ends).await;
}

async fn effects(ledger: &Ledger, count: usize) {
    until(format!("{count} effects"), async || ledger.effects().is_some_and(|len| len >= count)).await;
}

/// A process that dies there, and another one after it.
async fn dies(place: &str) {
    let ledger = Ledger::start().await;
    let cluster = Cluster::start(TOPIC, 2);
    cluster.produce_some(TOPIC, 500);
    let switch = [("DIE", place.to_owned()), ("DIE_AT", "120".to_owned())];
    let mut first = consumer(&cluster, &ledger, &switch);
    until("it dies", async || first.ended().is_some()).await;
    let before = ledger.effects().unwrap();
    if place == "before-ack" {
        assert!(before > 0, "{}", first.log());
    } else {
        assert!(before < 500, "{before}");
    }
    let mut second = consumer(&cluster, &ledger, &[]);
    all_committed(&cluster, 2).await;
    ledger.has_once("m", 500);
    second.stop().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_dies_before_it_commits() {
    dies("before-commit").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_dies_before_it_acknowledges() {
    dies("before-ack").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_is_suspended_beyond_its_session_timeout() {
    let ledger = Ledger::start().await;
    let cluster = Cluster::start(TOPIC, 4);
    let mut both = [named("one", &cluster, &ledger, &[]), named("other", &cluster, &ledger, &[])];
    let mut count = 0;
    let mut produce = |some: usize| {
        let ids = (count..count + some).map(|n| (format!("m{n}"), format!("m{n}"), String::new()));
        cluster.produce(TOPIC, ids);
        count += some;
        count
    };
    until("both take part", async || {
        produce(200);
        ledger.of("one") > 0 && ledger.of("other") > 0
    })
    .await;
    produce(5000);
    freeze(both[0].pid()).unwrap();
    produce(1000);
    // The other one gets everything, when the time of the session is over.
    all_committed(&cluster, 4).await;
    thaw(both[0].pid()).unwrap();
    let count = produce(1000);
    all_committed(&cluster, 4).await;
    ledger.has_once("m", count);
    for child in &mut both {
        child.stop().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_database_is_restarted() {
    let mut ledger = Ledger::start().await;
    let cluster = Cluster::start(TOPIC, 4);
    cluster.produce_some(TOPIC, 10_000);
    let mut only = consumer(&cluster, &ledger, &[]);
    effects(&ledger, 100).await;
    ledger.server.stop_immediately().unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    ledger.server.start_again().unwrap();
    all_committed(&cluster, 4).await;
    ledger.has_once("m", 10_000);
    only.stop().unwrap();
}

/// 100 000 messages, three of ten of which come twice; three processes, one of which is killed now and then.
#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_thousand_messages_among_kills() {
    const MESSAGES: usize = 100_000;
    const PARTITIONS: i32 = 8;
    const KILLS: usize = 6;
    let ledger = Ledger::start().await;
    let cluster = Cluster::start(TOPIC, PARTITIONS);
    let mut random = Random(0x5eed);
    let mut order: Vec<usize> = (0..MESSAGES).collect();
    let mut twice = BTreeSet::new();
    while twice.len() < MESSAGES * 3 / 10 {
        twice.insert(random.below(MESSAGES));
    }
    // The second one comes with the next messages, or much later.
    for n in twice {
        let at = if random.below(2) == 0 { n + random.below(100) } else { random.below(order.len()) };
        order.insert(at.min(order.len()), n);
    }
    let published = order.iter().map(|n| (format!("k{}", n % 5000), format!("m{n}"), format!("order {n}")));
    cluster.produce(TOPIC, published);
    assert_eq!(cluster.ends(TOPIC, PARTITIONS).iter().sum::<i64>(), MESSAGES as i64 * 13 / 10);

    let mut children: Vec<Child> = (0..3).map(|_| consumer(&cluster, &ledger, &[])).collect();
    for kill in 0..KILLS {
        effects(&ledger, (kill + 1) * MESSAGES / (KILLS + 2)).await;
        let unlucky = random.below(children.len());
        children[unlucky].kill();
        children[unlucky] = consumer(&cluster, &ledger, &[]);
    }
    effects(&ledger, MESSAGES).await;
    all_committed(&cluster, PARTITIONS).await;
    for child in &mut children {
        child.stop().unwrap();
    }
    ledger.has_once("m", MESSAGES);
}

/// The same numbers every time.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}
