//! Tests with consumers that are processes, which are killed, suspended and resumed.

use std::collections::BTreeSet;
use std::time::Duration;

use oncegate_servers::{freeze, thaw};
use tokio::time::{Instant, sleep};

use crate::TIMEOUT;
use crate::ledger::Ledger;
use crate::process::Child;
use crate::suite::Broker;

/// A broker with an example consumer.
pub trait Consumed: Broker {
    /// The name of the example, and its variables besides the database.
    fn example(&self) -> (&'static str, Vec<(&'static str, String)>);

    /// Publishes a message for each identifier, also for repeated ones.
    fn publish_each(&self, ids: Vec<String>) -> impl Future<Output = ()> + Send;
}

fn consumer(broker: &impl Consumed, ledger: &Ledger, further: &[(&str, String)]) -> Child {
    let (name, mut variables) = broker.example();
    variables.push(("DATABASE_URL", ledger.url("consumer")));
    variables.push(("REDELIVERY", crate::suite::SOON.as_secs().to_string()));
    variables.extend_from_slice(further);
    Child::example(name, &variables)
}

/// Waits for a condition whose time depends on the number of messages.
async fn in_the_end(what: &str, timeout: Duration, mut is_so: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + timeout;
    while !is_so().await {
        assert!(Instant::now() < deadline, "not in time: {what}");
        sleep(Duration::from_millis(100)).await;
    }
}

async fn all_acknowledged(broker: &impl Broker) {
    in_the_end("all is acknowledged", TIMEOUT, async || broker.left().await == 0).await;
}

async fn effects(ledger: &Ledger, count: usize, timeout: Duration) {
    let are_there = async || ledger.effects().is_some_and(|len| len >= count);
    in_the_end("enough effects", timeout, are_there).await;
}

fn ids(count: usize) -> Vec<String> {
    (0..count).map(|n| format!("m{n}")).collect()
}

/// A process kills itself at a point, and another one takes over.
pub async fn dies(broker: impl Consumed, place: &str) {
    let ledger = Ledger::start().await;
    broker.publish_each(ids(500)).await;
    let switch = [("DIE", place.to_owned()), ("DIE_AT", "120".to_owned())];
    let mut first = consumer(&broker, &ledger, &switch);
    in_the_end("it dies", TIMEOUT, async || first.ended().is_some()).await;
    let before = ledger.effects().unwrap();
    if place == "before-ack" {
        assert!(before > 0, "{}", first.log());
    } else {
        assert!(before < 500, "{before}");
    }
    assert!(broker.left().await > 500 - 120, "what was not acknowledged is there");
    let mut second = consumer(&broker, &ledger, &[]);
    all_acknowledged(&broker).await;
    ledger.has_once("m", 500);
    second.stop().unwrap();
}

/// A process is suspended until the broker has given its messages to another one, and is then resumed.
pub async fn is_suspended(broker: impl Consumed, count: usize) {
    let ledger = Ledger::start().await;
    let mut both = [consumer(&broker, &ledger, &[]), consumer(&broker, &ledger, &[])];
    broker.publish_each(ids(count)).await;
    effects(&ledger, 100, TIMEOUT).await;
    freeze(both[0].pid()).unwrap();
    all_acknowledged(&broker).await;
    thaw(both[0].pid()).unwrap();
    broker.publish_each((count..count + 1000).map(|n| format!("m{n}")).collect()).await;
    all_acknowledged(&broker).await;
    for child in &mut both {
        child.stop().unwrap();
    }
    ledger.has_once("m", count + 1000);
}

/// Many messages, of which 30 % come twice; three processes, of which one is killed from time to time.
pub async fn among_kills(broker: impl Consumed, messages: usize, timeout: Duration) {
    const KILLS: usize = 6;
    let ledger = Ledger::start().await;
    let mut random = Random(0x5eed);
    let mut order: Vec<usize> = (0..messages).collect();
    let mut twice = BTreeSet::new();
    while twice.len() < messages * 3 / 10 {
        twice.insert(random.below(messages));
    }
    // The copy comes with the next messages, or much later.
    for n in twice {
        let at = if random.below(2) == 0 { n + random.below(100) } else { random.below(order.len()) };
        order.insert(at.min(order.len()), n);
    }
    assert_eq!(order.len(), messages * 13 / 10);
    let published = order.iter().map(|n| format!("m{n}")).collect();

    let mut children: Vec<Child> = (0..3).map(|_| consumer(&broker, &ledger, &[])).collect();
    let among = async {
        for kill in 0..KILLS {
            effects(&ledger, (kill + 1) * messages / (KILLS + 2), timeout).await;
            let unlucky = random.below(children.len());
            children[unlucky].kill();
            children[unlucky] = consumer(&broker, &ledger, &[]);
        }
        effects(&ledger, messages, timeout).await;
    };
    tokio::join!(among, broker.publish_each(published));
    in_the_end("all is acknowledged", timeout, async || broker.left().await == 0).await;
    for child in &mut children {
        child.stop().unwrap();
    }
    ledger.has_once("m", messages);
}

/// A random number generator with a fixed seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}
