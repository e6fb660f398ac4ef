//! Thousands of orders while everything dies.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::part::Part;
use crate::world::{Order, World};

const CLIENTS: usize = 6;
const ORDERS: usize = 3000;
const CUSTOMERS: usize = 50;

/// Random numbers, the same ones in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// The orders of one client. The amounts of all differ.
fn orders(client: usize) -> Vec<Order> {
    (client..ORDERS)
        .step_by(CLIENTS)
        .map(|number| Order {
            key: format!("order-{number}"),
            customer: format!("customer {}", number % CUSTOMERS),
            cents: number as i64 + 1,
        })
        .collect()
}

#[test]
fn every_order_counts_once_under_random_kills() {
    let mut world = World::start();
    let roles = ["api", "relay", "relay", "projector", "projector"];
    let parts = roles.map(|role| Part::start(world.part(role)));
    let api = world.api.clone();
    let placed = AtomicUsize::new(0);

    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let (api, placed) = (&api, &placed);
                scope.spawn(move || {
                    let mut random = Random(client as u64 + 41);
                    for order in orders(client) {
                        let response = order.place(api);
                        if random.below(10) < 3 {
                            let again = order.place(api);
                            assert!(
                                again.is_replayed && again.body == response.body,
                                "{again:?}, {response:?}"
                            );
                        }
                        placed.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();

        let mut random = Random(7);
        let (mut kills, mut added) = (0, 0);
        let (mut is_nats_restarted, mut is_postgres_restarted) = (false, false);
        while !clients.iter().all(|client| client.is_finished()) {
            std::thread::sleep(Duration::from_millis(50 + random.below(300)));
            let part = random.below(parts.len() as u64) as usize;
            // A message whose projector is killed in each of ten attempts is a dead letter, and rightly. So a slow machine has
            // time for some messages between two kills of projectors.
            let is_projector = roles[part] == "projector";
            let now = world.number("SELECT coalesce(sum(orders), 0) FROM totals");
            if !is_projector || now >= added + 20 {
                parts[part].kill();
                kills += 1;
                added = if is_projector { now } else { added };
            }
            let placed = placed.load(Ordering::Relaxed);
            if placed > ORDERS / 4 && !is_nats_restarted {
                is_nats_restarted = true;
                world.nats.kill();
                world.nats.restart().unwrap();
            }
            if placed > ORDERS / 2 && !is_postgres_restarted {
                is_postgres_restarted = true;
                world.postgres.stop_immediately().unwrap();
                world.postgres.start_again().unwrap();
            }
        }
        assert!(is_nats_restarted && is_postgres_restarted && kills >= 10, "{kills} kills");
        clients.into_iter().for_each(|client| client.join().unwrap());
    });
    world.come_to_rest();
    world.holds((0..CLIENTS).flat_map(orders).collect::<Vec<_>>().iter());
    // Relays that were killed have published again what they had published: there were duplicates.
    let published = world.stream().0;
    assert!(published > ORDERS as u64, "{published} messages");
    parts.into_iter().for_each(Part::stop);
}
