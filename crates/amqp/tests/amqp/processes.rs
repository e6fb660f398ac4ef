//! Processes that consume, and die. What took effect is counted in a table without any key.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use oncegate_postgres::{PostgresOptions, schema};
use oncegate_servers::{PostgresOptions as ServerOptions, PostgresServer, RabbitServer, freeze, thaw};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};

use crate::setting::{Kind, Queue, until};

/// The path of the example, next to this test.
fn example() -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let program = here.parent().unwrap().parent().unwrap().join("examples/amqp");
    assert!(program.exists(), "cargo build -p oncegate-amqp --example amqp");
    program
}

/// `examples/amqp.rs`, as its own process. It is killed when it is dropped.
struct Consumer(Child);

impl Consumer {
    fn start(world: &World, die: &str) -> Self {
        let mut command = Command::new(example());
        command.env("AMQP_URL", world.rabbit.url()).env("QUEUE", &world.queue.name);
        command.env("DATABASE_URL", world.database.url()).env("DIE", die);
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

    fn kill(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        self.0.wait().unwrap();
    }

    async fn until_dead(&mut self) {
        let dead = std::sync::Mutex::new(&mut self.0);
        until("the process ends", async || dead.lock().unwrap().try_wait().unwrap().is_some()).await;
    }

    /// Stops it in order, when it is at work.
    async fn stop(mut self) {
        let pid = self.0.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        self.until_dead().await;
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.kill();
    }
}

struct World {
    rabbit: RabbitServer,
    database: PostgresServer,
    queue: Queue,
}

impl World {
    async fn start(kind: Kind) -> Self {
        let servers = || {
            let mut options = ServerOptions::default();
            options.trust = true;
            (RabbitServer::start().unwrap(), PostgresServer::start_with(options).unwrap())
        };
        let (rabbit, database) = spawn_blocking(servers).await.unwrap();
        schema::apply(&PostgresOptions::new(&database.url()).unwrap()).await.unwrap();
        database.sql("CREATE TABLE invoices (number text NOT NULL)").unwrap();
        let queue = Queue::new(&rabbit.url(), "orders", kind).await;
        Self { rabbit, database, queue }
    }

    fn invoices(&self) -> u64 {
        self.database.sql("SELECT count(*) FROM invoices").unwrap().parse().unwrap()
    }

    /// All messages that the queue holds, delivered or not.
    async fn until_empty(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        loop {
            let left = self.rabbit.messages(&self.queue.name).unwrap();
            if left == 0 {
                return;
            }
            assert!(Instant::now() < deadline, "{left} are left");
            sleep(Duration::from_millis(100)).await;
        }
    }

    /// That there is one invoice for each of so many orders, and no other.
    fn assert_once(&self, orders: usize) {
        let counted = self.database.sql(&format!(
            "SELECT (SELECT count(*) FROM invoices), (SELECT count(DISTINCT number) FROM invoices), \
             (SELECT count(*) FROM generate_series(0, {orders} - 1) n \
              WHERE NOT EXISTS (SELECT FROM invoices WHERE number = 'order-' || n))"
        ));
        assert_eq!(
            counted.unwrap(),
            format!("{orders}|{orders}|0"),
            "invoices, different ones, missing ones"
        );
        assert_eq!(self.database.sql("SELECT count(*) FROM oncegate.dead_letters").unwrap(), "0");
    }
}

fn orders(count: usize) -> impl Iterator<Item = String> {
    (0..count).map(|number| format!("order-{number}"))
}

const TIMEOUT: Duration = Duration::from_secs(120);

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_dies_before_the_commit_has_done_nothing() {
    let world = World::start(Kind::Quorum).await;
    world.queue.send(orders(50)).await;
    for _ in 0..2 {
        let mut dying = Consumer::start(&world, "before-commit");
        dying.until_dead().await;
        assert_eq!(world.invoices(), 0);
        assert_eq!(world.rabbit.messages("orders").unwrap(), 50);
    }
    let consumer = Consumer::start(&world, "");
    world.until_empty(TIMEOUT).await;
    consumer.stop().await;
    world.assert_once(50);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_dies_after_the_commit_has_done_it_once() {
    let world = World::start(Kind::Classic).await;
    world.queue.send(orders(50)).await;
    let mut dying = Consumer::start(&world, "after-commit");
    dying.until_dead().await;
    let done = world.invoices();
    assert!(done > 0);
    assert_eq!(world.rabbit.messages("orders").unwrap(), 50, "nothing was acknowledged");
    let consumer = Consumer::start(&world, "");
    world.until_empty(TIMEOUT).await;
    consumer.stop().await;
    world.assert_once(50);
}

/// It stands still for longer than the broker waits for its heartbeats, and goes on with what it has.
#[tokio::test(flavor = "multi_thread")]
async fn a_resumed_process_repeats_nothing() {
    let world = World::start(Kind::Quorum).await;
    let mut standing = Consumer::start(&world, "");
    world.queue.send(orders(10)).await;
    until("it consumes", async || world.invoices() == 10).await;
    freeze(standing.0.id()).unwrap();
    world.queue.send(orders(300)).await;
    // Some of these are in its hands, and the broker does not take them back while its connection is there.
    let other = Consumer::start(&world, "");
    let held = async || {
        let left = world.rabbit.messages("orders").unwrap();
        left > 0 && left as usize + world.invoices() as usize >= 300 && world.invoices() > 10
    };
    until("the other one has done what it got", held).await;
    thaw(standing.0.id()).unwrap();
    world.until_empty(TIMEOUT).await;
    other.stop().await;
    standing.kill();
    world.assert_once(300);
}

/// 100 000 messages, of which 30 000 are there twice, and two processes that are killed again and again.
#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_thousand_messages_and_random_kills() {
    const ORDERS: usize = 70_000;
    const TWICE: usize = 30_000;
    let world = World::start(Kind::Quorum).await;
    let began = Instant::now();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut messages: Vec<String> = orders(ORDERS).collect();
    let mut twice = BTreeSet::new();
    while twice.len() < TWICE {
        twice.insert(random.below(ORDERS));
    }
    messages.extend(twice.into_iter().map(|number| format!("order-{number}")));
    // Some duplicates are close to their message, and some are far from it.
    for place in 0..messages.len() {
        let other = random.below(messages.len());
        messages.swap(place, other);
    }
    world.queue.send(&messages).await;
    println!("{} messages sent after {:?}", messages.len(), began.elapsed());
    let mut consumers = [Consumer::start(&world, ""), Consumer::start(&world, "")];
    let mut kills = 0;
    let deadline = Instant::now() + Duration::from_secs(600);
    while world.rabbit.messages("orders").unwrap() > 0 {
        assert!(Instant::now() < deadline, "{} are left", world.rabbit.messages("orders").unwrap());
        sleep(Duration::from_millis(300 + random.below(1200) as u64)).await;
        let one = random.below(2);
        consumers[one].kill();
        consumers[one] = Consumer::start(&world, "");
        kills += 1;
    }
    println!("{kills} kills; all are acknowledged after {:?}", began.elapsed());
    drop(consumers);
    assert!(kills >= 5, "{kills} kills");
    world.assert_once(ORDERS);
}

/// The same numbers each time.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}
