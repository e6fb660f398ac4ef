//! A part is killed at each point of the way.

use std::fs;

use crate::part::Part;
use oncegate_servers::until;

use crate::world::{Order, World, counted};

/// The number of crashes of each part at its point.
const TIMES: u64 = 2;

const CONFIRMED: &str = "oncegate_outbox_events_total{event=\"confirmed\"}";
const UNCONFIRMED: &str = "oncegate_outbox_events_total{event=\"unconfirmed\"}";
const PROCESSED: &str = "oncegate_messages_total{consumer=\"totals\",event=\"processed\",reason=\"\"}";

const PARTS: [&str; 3] = ["api", "relay", "projector"];

#[test]
fn an_order_outlives_a_kill_at_every_point_of_its_way() {
    let world = World::start();
    let points = [
        "before-order-commit",
        "after-order-commit",
        "before-publish",
        "after-publish",
        "before-projection-commit",
        "after-projection-commit",
        "before-ack",
        "after-ack",
    ];
    let mut orders = Vec::new();
    for point in points {
        let memory = world.memory(point);
        let parts = PARTS.map(|role| {
            let mut command = world.part(role);
            command.args(["--kill-at", point, "--kill-times", &TIMES.to_string(), "--kill-memory"]);
            command.arg(&memory);
            Part::start(command)
        });
        let published = world.stream().0;
        // What is done already cannot be killed: there are orders until it was killed as often as it is to be.
        let mut placed = 0;
        until(&format!("it was killed {point}"), || {
            let customer = format!("{point} {}", placed % 3);
            let order = Order { key: format!("{point}-{placed}"), customer, cents: orders.len() as i64 + 1 };
            let response = order.place(&world.api);
            let again = order.place(&world.api);
            assert!(again.is_replayed, "{point}: {again:?}");
            assert_eq!(again.body, response.body, "{point}");
            orders.push(order);
            placed += 1;
            let kills = fs::metadata(&memory).map_or(0, |memory| memory.len());
            (placed >= 12 && kills >= TIMES).then_some(())
        });
        world.come_to_rest();
        world.holds(&orders);
        // The broker keeps for each what was published: a relay that died before it knew has published it again.
        let published = world.stream().0 - published;
        let again = if point == "after-publish" { TIMES } else { 0 };
        assert!(published >= placed + again, "{point}: {published} messages for {placed} orders");
        parts.into_iter().for_each(Part::stop);
    }
}

#[test]
fn parts_that_are_stopped_leave_nothing_undone() {
    let world = World::start();
    let mut orders = Vec::new();
    // Without a relay messages wait; without a projector they do, too.
    for (round, roles) in [&PARTS[..1], &PARTS[..2], &PARTS].into_iter().enumerate() {
        let parts: Vec<_> = roles.iter().map(|role| Part::start(world.part(role))).collect();
        for number in 0..40 {
            let customer = format!("customer {}", number % 4);
            let order = Order { key: format!("{round}-{number}"), customer, cents: orders.len() as i64 + 1 };
            order.place(&world.api);
            orders.push(order);
        }
        if round == 2 {
            world.come_to_rest();
            let confirmed = counted(&parts[1], CONFIRMED);
            assert!((40..=120).contains(&confirmed), "{confirmed}");
            assert_eq!(counted(&parts[2], PROCESSED), 120);
            assert_eq!(counted(&parts[0], "outbox_waiting"), 0);
        } else {
            // Without a relay they wait.
            assert!(round == 1 || counted(&parts[0], "outbox_waiting") == 40);
        }
        // In the middle of what they do, the first two times.
        parts.into_iter().for_each(Part::stop);
        assert_eq!(world.number("SELECT count(*) FROM orders"), orders.len() as i64);
    }
    world.holds(&orders);
}

#[test]
fn orders_are_accepted_while_the_broker_is_down() {
    let mut world = World::start();
    let parts = PARTS.map(|role| Part::start(world.part(role)));
    parts.iter().for_each(|part| drop(part.address()));
    world.nats.kill();
    let orders: Vec<_> = (1..=12)
        .map(|number| Order {
            key: format!("order-{number}"),
            customer: format!("customer {}", number % 3),
            cents: number,
        })
        .collect();
    for order in &orders {
        order.place(&world.api);
    }
    until("something was not confirmed", || (counted(&parts[1], UNCONFIRMED) > 0).then_some(()));
    assert_eq!(world.number("SELECT waiting FROM oncegate.outbox_status()"), 12);
    // What it has not sent yet dies with it.
    parts[1].kill();
    world.nats.restart().unwrap();
    world.come_to_rest();
    world.holds(&orders);
    parts.into_iter().for_each(Part::stop);
}
