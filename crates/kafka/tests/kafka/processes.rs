//! Consumers that are processes, which are killed, suspended and resumed.

use oncegate_broker_tests::TIMEOUT;
use oncegate_broker_tests::processes::{Consumed, among_kills, dies, is_suspended};
use tokio::task::spawn_blocking;

use crate::cluster::produce;
use crate::consumer::{Group, TOPIC, cluster};

impl Consumed for Group {
    fn example(&self) -> (&'static str, Vec<(&'static str, String)>) {
        let settings = "session.timeout.ms=4500,heartbeat.interval.ms=300,fetch.wait.max.ms=50";
        let variables = vec![
            ("KAFKA_BROKERS", self.bootstrap.clone()),
            ("KAFKA_TOPIC", TOPIC.to_owned()),
            ("KAFKA_GROUP", "g".to_owned()),
            ("KAFKA_CONFIG", settings.to_owned()),
        ];
        ("kafka", variables)
    }

    async fn publish_each(&self, ids: Vec<String>) {
        let bootstrap = self.bootstrap.clone();
        let messages = ids.into_iter().map(|id| (id.clone(), id, "order".to_owned()));
        spawn_blocking(move || produce(&bootstrap, TOPIC, messages)).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_dies_before_it_commits() {
    let cluster = cluster();
    dies(Group::on(&cluster), "before-commit").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_dies_before_it_acknowledges() {
    let cluster = cluster();
    dies(Group::on(&cluster), "before-ack").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_is_suspended_beyond_its_session_timeout() {
    let cluster = cluster();
    is_suspended(Group::on(&cluster), 20_000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_thousand_messages_among_kills() {
    let cluster = cluster();
    among_kills(Group::on(&cluster), 100_000, TIMEOUT * 2).await;
}
