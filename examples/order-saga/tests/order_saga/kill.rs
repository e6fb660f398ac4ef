//! The shop is killed where it can be, and goes on.

use oncegate_servers::{ServiceResponse, until};

use crate::world::{Order, Process, Shop, World, done};

/// Before an effect, which is after the record of the one before it; and between an effect and its record.
const BEFORE_AND_AFTER: [&str; 2] = ["hang", "lost"];

const FORWARD: [&str; 3] = ["reserve", "charge", "ship"];

/// An address that the carrier refuses.
const BACK: [&str; 3] = ["ship", "refund", "free"];

/// Checks that steps finished before the kill were not called again, and that the interrupted step was called twice.
fn was_called(world: &mut World, order: &Order, cut: &str, at: &str) {
    let back: &[&str] = if order.address == "Atlantis" { &BACK } else { &[] };
    for action in FORWARD.iter().chain(back).filter(|action| **action != cut) {
        assert_eq!(world.other(action).calls(action), 1, "{at}: {action}");
    }
    assert_eq!(world.other(cut).calls(cut), 2, "{at}");
}

/// Every retry gets the same, and each effect took place once.
fn holds(world: &World, shop: &Process, order: &Order, first: &ServiceResponse, at: &str) {
    let is_shipped = order.address != "Atlantis";
    assert_eq!(first.status, if is_shipped { 201 } else { 422 }, "{at}: {first:?}");
    for _ in 0..2 {
        let again = order.send(&shop.address).unwrap();
        assert!(again.is_replayed, "{at}: {again:?}");
        assert_eq!((again.status, &again.body), (first.status, &first.body), "{at}");
    }
    assert_eq!(world.effects(), done(is_shipped), "{at}");
}

/// Begins an order, and kills the shop when this action has come to this.
fn kill_at(world: &mut World, shop: &mut Process, order: &Order, action: &str, fault: &str) {
    world.other(action).arm(action, fault);
    let client = order.spawn(shop);
    world.other(action).caught(action);
    shop.kill();
    assert_eq!(client.join().unwrap(), None, "the client got no response");
}

fn goes_on_when_the_client_retries(order: &Order, actions: &[&str]) {
    for action in actions {
        for fault in BEFORE_AND_AFTER {
            let at = format!("{fault} at {action}");
            let mut world = World::start();
            let mut shop = world.shop(Shop::doomed());
            kill_at(&mut world, &mut shop, order, action, fault);
            let shop = world.shop(Shop::default());
            let response = order.settle(&shop);
            assert!(!response.is_replayed, "{at}: {response:?}");
            holds(&world, &shop, order, &response, &at);
            was_called(&mut world, order, action, &at);
        }
    }
}

fn goes_on_without_its_client(order: &Order, actions: &[&str]) {
    for action in actions {
        for fault in BEFORE_AND_AFTER {
            let at = format!("{fault} at {action}");
            let mut world = World::start();
            let mut shop = world.shop(Shop::doomed());
            kill_at(&mut world, &mut shop, order, action, fault);
            let shop = world.shop(Shop::completing());
            world.attempt(2);
            // Only the completer could have begun it.
            let response = order.settle(&shop);
            assert!(response.is_replayed, "{at}: {response:?}");
            holds(&world, &shop, order, &response, &at);
            was_called(&mut world, order, action, &at);
        }
    }
}

#[test]
fn a_killed_shop_goes_on_when_its_client_retries() {
    goes_on_when_the_client_retries(&Order::good(), &FORWARD);
}

#[test]
fn a_killed_shop_goes_on_without_its_client() {
    goes_on_without_its_client(&Order::good(), &FORWARD);
}

#[test]
fn a_shop_that_is_killed_while_it_takes_back_goes_on_when_its_client_retries() {
    goes_on_when_the_client_retries(&Order::refused(), &BACK);
}

#[test]
fn a_shop_that_is_killed_while_it_takes_back_goes_on_without_its_client() {
    goes_on_without_its_client(&Order::refused(), &BACK);
}

#[test]
fn one_order_outlives_a_kill_at_every_point_of_its_way() {
    for (order, actions) in [(Order::good(), &FORWARD[..]), (Order::refused(), &[FORWARD, BACK].concat())] {
        let mut world = World::start();
        let mut shop = world.shop(Shop::doomed());
        let points: Vec<_> =
            actions.iter().flat_map(|action| BEFORE_AND_AFTER.map(|fault| (*action, fault))).collect();
        for (action, fault) in &points {
            world.other(action).arm(action, fault);
            let seen = world.other(action).caught_so_far();
            until("the order gets on", || {
                let client = order.spawn(&shop);
                let is_there = until("it is there, or there is a response", || {
                    let is_there = world.other(action).caught_so_far() > seen;
                    (is_there || client.is_finished()).then_some(is_there)
                });
                is_there.then_some(())
            });
            shop.kill();
            shop = world.shop(Shop::doomed());
        }
        let response = order.settle(&shop);
        holds(&world, &shop, &order, &response, "at the end");
        world.attempt(u32::try_from(points.len()).unwrap() + 1);
    }
}

#[test]
fn what_was_finished_is_taken_back_in_the_opposite_order() {
    let (mut world, order) = (World::start(), Order::refused());
    let mut shop = world.shop(Shop::doomed());
    kill_at(&mut world, &mut shop, &order, "refund", "hang");
    let [stock, bank, _] = world.effects();
    assert_eq!((stock, bank), (vec!["reserve".to_owned()], vec!["charge".to_owned()]));
    let mut shop = world.shop(Shop::doomed());
    world.stock.arm("free", "hang");
    until("it frees", || {
        let client = order.spawn(&shop);
        until("it is there, or there is a response", || {
            let is_there = world.stock.caught_so_far() > 0;
            (is_there || client.is_finished()).then_some(is_there)
        })
        .then_some(())
    });
    let [stock, bank, _] = world.effects();
    assert_eq!((stock, bank), (vec!["reserve".to_owned()], vec!["charge".to_owned(), "refund".to_owned()]));
    shop.kill();
    let shop = world.shop(Shop::default());
    let response = order.settle(&shop);
    holds(&world, &shop, &order, &response, "at the end");
}
