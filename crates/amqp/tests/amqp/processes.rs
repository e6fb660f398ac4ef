//! Consumers that are processes, which are killed, suspended and resumed.

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use oncegate_amqp::lapin;
use oncegate_broker_tests::broker_tests;
use oncegate_broker_tests::processes::{self, Consumed};
use oncegate_inbox::MESSAGE_ID;

use crate::consumer::Rabbit;
use crate::setting::{Kind, Queue, TIMEOUT};

impl Consumed for Rabbit {
    fn example(&self) -> (&'static str, Vec<(&'static str, String)>) {
        // The broker takes messages back from a connection that is silent for two seconds.
        ("amqp", vec![("AMQP_URL", format!("{}?heartbeat=1", self.url)), ("AMQP_QUEUE", self.name.clone())])
    }

    async fn publish_each(&self, ids: Vec<String>) {
        let queue = Queue::new(&self.url, &self.name, self.kind).await;
        for ids in ids.chunks(500) {
            let mut confirms = Vec::new();
            for id in ids {
                let mut headers = FieldTable::default();
                headers.insert(MESSAGE_ID.into(), AMQPValue::LongString(id.as_str().into()));
                let properties = BasicProperties::default().with_delivery_mode(2).with_headers(headers);
                confirms.push(queue.send_as("order", properties).await);
            }
            for confirm in confirms {
                assert!(confirm.await.unwrap().is_ack());
            }
        }
    }
}

broker_tests! {
    a_process_dies_before_it_commits: processes::dies, Rabbit::queue("dies", Kind::Quorum), "before-commit";
    a_process_dies_before_it_acknowledges: processes::dies, Rabbit::queue("dies", Kind::Classic), "before-ack";
    a_process_is_suspended_and_resumed: processes::is_suspended, Rabbit::queue("suspended", Kind::Quorum), 5_000;
    twenty_thousand_messages_among_kills:
        processes::among_kills, Rabbit::start(Kind::Quorum), 20_000, TIMEOUT;
}
