//! The common parts of the tests: a broker, queues, and waiting.

use std::future::Future;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use lapin::options::{
    BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions, QueueDeleteOptions, QueuePurgeOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use oncegate_amqp::{AmqpBroker, AmqpDelivery, AmqpPublisher, AmqpSource, lapin};
use oncegate_inbox::{Delivery as _, Source as _};
use oncegate_servers::RabbitServer;
use tokio::time::{Instant, sleep, timeout};

/// Test machines are busy.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(300);

/// One broker for all tests that run at the same time and do it no harm.
pub(crate) fn shared() -> Arc<RabbitServer> {
    static SHARED: Mutex<Weak<RabbitServer>> = Mutex::new(Weak::new());
    let mut shared = SHARED.lock().unwrap();
    shared.upgrade().unwrap_or_else(|| {
        let server = Arc::new(RabbitServer::start().unwrap());
        *shared = Arc::downgrade(&server);
        server
    })
}

pub(crate) fn broker(url: &str) -> AmqpBroker {
    AmqpBroker::new(url).unwrap()
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Quorum,
    Classic,
}

/// A durable queue, and what an operator sees of it.
pub(crate) struct Queue {
    pub(crate) name: String,
    pub(crate) url: String,
    _connection: Connection,
    pub(crate) channel: Channel,
}

impl Queue {
    pub(crate) async fn new(url: &str, name: &str, kind: Kind) -> Self {
        let kind = if kind == Kind::Quorum { "quorum" } else { "classic" };
        Self::with(url, name, &[("x-queue-type", AMQPValue::LongString(kind.into()))]).await
    }

    pub(crate) async fn with(url: &str, name: &str, arguments: &[(&str, AMQPValue)]) -> Self {
        let connection = Connection::connect(url, ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
        let mut table = FieldTable::default();
        for (name, value) in arguments {
            table.insert((*name).into(), value.clone());
        }
        let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        channel.queue_declare(name.into(), options, table).await.unwrap();
        Self { name: name.to_owned(), url: url.to_owned(), _connection: connection, channel }
    }

    pub(crate) fn source(&self) -> AmqpSource {
        AmqpSource::new(broker(&self.url), &*self.name).unwrap()
    }

    pub(crate) fn publisher(&self) -> AmqpPublisher {
        AmqpPublisher::new(broker(&self.url))
    }

    /// Publishes messages with these payloads, which are also their `message-id`, and waits until all are confirmed.
    pub(crate) async fn send<T: AsRef<str>>(&self, texts: impl IntoIterator<Item = T>) {
        let mut confirms = Vec::new();
        for text in texts {
            let properties =
                BasicProperties::default().with_delivery_mode(2).with_message_id(text.as_ref().into());
            confirms.push(self.send_as(text.as_ref(), properties).await);
            if confirms.len() == 500 {
                for confirm in std::mem::take(&mut confirms) {
                    assert!(confirm.await.unwrap().is_ack());
                }
            }
        }
        for confirm in confirms {
            assert!(confirm.await.unwrap().is_ack());
        }
    }

    pub(crate) async fn send_as(&self, text: &str, properties: BasicProperties) -> lapin::PublisherConfirm {
        let options = BasicPublishOptions::default();
        let sent = self.channel.basic_publish(
            "".into(),
            self.name.as_str().into(),
            options,
            text.as_bytes(),
            properties,
        );
        sent.await.unwrap()
    }

    /// Returns the number of messages that are ready for delivery, without those that are delivered and not
    /// acknowledged.
    pub(crate) async fn ready(&self) -> u32 {
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let queue =
            self.channel.queue_declare(self.name.as_str().into(), options, FieldTable::default()).await;
        queue.unwrap().message_count()
    }

    pub(crate) async fn until_ready(&self, count: u32) {
        let is_so = async || self.ready().await == count;
        until(&format!("{count} messages are ready in {}", self.name), is_so).await;
    }

    pub(crate) async fn delete(&self) {
        let options = QueueDeleteOptions::default();
        self.channel.queue_delete(self.name.as_str().into(), options).await.unwrap();
    }

    pub(crate) async fn purge(&self) {
        let options = QueuePurgeOptions::default();
        self.channel.queue_purge(self.name.as_str().into(), options).await.unwrap();
    }
}

/// Returns the next delivery, after any errors.
pub(crate) async fn next(source: &mut AmqpSource) -> AmqpDelivery {
    let waiting = async {
        loop {
            match source.next().await {
                Ok(delivery) => return delivery,
                Err(error) => {
                    assert!(!error.is_fatal(), "{error}");
                    sleep(Duration::from_millis(50)).await;
                }
            }
        }
    };
    timeout(TIMEOUT, waiting).await.expect("a delivery")
}

pub(crate) async fn take(source: &mut AmqpSource, count: usize) -> Vec<AmqpDelivery> {
    let mut taken = Vec::new();
    while taken.len() < count {
        taken.push(next(source).await);
    }
    taken
}

/// Returns `true` if no delivery comes for a while.
pub(crate) async fn is_silent(source: &mut AmqpSource) -> bool {
    timeout(Duration::from_millis(300), source.next()).await.is_err()
}

pub(crate) fn text(delivery: &AmqpDelivery) -> String {
    String::from_utf8(delivery.message().payload.to_vec()).unwrap()
}

pub(crate) async fn until<F: Future<Output = bool>>(what: &str, is_so: impl Fn() -> F) {
    let deadline = Instant::now() + TIMEOUT;
    while !is_so().await {
        assert!(Instant::now() < deadline, "not in time: {what}");
        sleep(Duration::from_millis(20)).await;
    }
}
