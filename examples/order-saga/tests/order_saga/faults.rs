//! Those that are called fail, and the shop lives.

use crate::world::{Order, Shop, World, done};

/// An order to which nothing but these faults of the others happens.
fn order_with(order: &Order, how: Shop, mut spoil: impl FnMut(&mut World)) {
    let mut world = World::start();
    let shop = world.shop(how);
    spoil(&mut world);
    let response = order.settle(&shop);
    let is_shipped = order.address != "Atlantis";
    assert_eq!(response.status, if is_shipped { 201 } else { 422 }, "{response:?}");
    assert_eq!(order.send(&shop.address).unwrap().body, response.body);
    assert_eq!(world.effects(), done(is_shipped));
}

#[test]
fn an_effect_whose_response_is_an_error_takes_place_once() {
    order_with(&Order::good(), Shop::default(), |world| {
        for action in ["reserve", "charge", "ship"] {
            world.other(action).arm(action, "error");
        }
    });
    order_with(&Order::refused(), Shop::default(), |world| {
        for action in ["reserve", "charge", "ship", "refund", "free"] {
            world.other(action).arm(action, "error");
        }
    });
}

#[test]
fn an_effect_that_comes_late_or_is_never_heard_of_takes_place_once() {
    let short_timeout = Shop { response_timeout_ms: 300, ..Shop::default() };
    for fault in ["slow", "hang", "lost"] {
        order_with(&Order::good(), short_timeout, |world| {
            for action in ["reserve", "charge", "ship"] {
                world.other(action).arm(action, fault);
            }
        });
        order_with(&Order::refused(), short_timeout, |world| {
            for action in ["refund", "free"] {
                world.other(action).arm(action, fault);
            }
        });
    }
}

#[test]
fn one_that_dies_after_its_effect_is_asked_again() {
    for (order, actions) in [
        (Order::good(), &["reserve", "charge", "ship"][..]),
        (Order::refused(), &["reserve", "charge", "refund", "free"]),
    ] {
        let mut world = World::start();
        let shop = world.shop(Shop::default());
        for action in actions {
            world.other(action).arm(action, "die");
            let response = order.send(&shop.address).unwrap();
            assert_eq!(response.status, 503, "{action}: {response:?}");
            world.other(action).wait();
            world.other(action).restart();
        }
        let response = order.settle(&shop);
        assert_eq!(response.status, if order.address == "Atlantis" { 422 } else { 201 }, "{response:?}");
        assert_eq!(world.effects(), done(order.address != "Atlantis"));
    }
}

#[test]
fn one_that_is_killed_in_the_middle_is_asked_again_without_the_client() {
    for (order, action) in [(Order::good(), "charge"), (Order::good(), "ship"), (Order::refused(), "refund")]
    {
        let mut world = World::start();
        let shop = world.shop(Shop::completing());
        world.other(action).arm(action, "lost");
        let client = order.spawn(&shop);
        world.other(action).caught(action);
        world.other(action).kill();
        let response = client.join().unwrap().unwrap();
        assert_eq!(response.status, 503, "{response:?}");
        world.other(action).restart();
        world.attempt(2);
        let response = order.settle(&shop);
        assert_eq!(response.status, if order.address == "Atlantis" { 422 } else { 201 }, "{response:?}");
        assert_eq!(world.effects(), done(order.address != "Atlantis"));
    }
}

#[test]
fn a_refusal_takes_back_what_was_before_it_and_nothing_else() {
    let world = World::start();
    let shop = world.shop(Shop::default());
    let unicorn = Order { key: "unicorn".into(), item: "unicorn".into(), ..Order::good() };
    let response = unicorn.settle(&shop);
    assert_eq!((response.status, response.body.as_str()), (422, r#"{"refused":"reserve: there are none"}"#));
    assert_eq!(world.effects(), [vec![], vec![], Vec::<String>::new()]);
    let declined = Order { key: "declined".into(), customer: "mallory", ..Order::good() };
    let response = declined.settle(&shop);
    assert_eq!(
        (response.status, response.body.as_str()),
        (422, r#"{"refused":"charge: the card was declined"}"#)
    );
    assert_eq!(world.effects(), [vec!["reserve".to_owned(), "free".to_owned()], vec![], vec![]]);
    // The key of an order is for that order.
    let other = Order { item: "pen".into(), ..declined };
    let response = other.settle(&shop);
    assert_eq!((response.status, response.body.contains("another input")), (422, true), "{response:?}");
}

#[test]
fn what_cannot_be_taken_back_is_said_and_not_passed_over() {
    let world = World::start();
    let shop = world.shop(Shop::default());
    let stuck = Order { customer: "closed", ..Order::refused() };
    let response = stuck.settle(&shop);
    assert_eq!(response.status, 500, "{response:?}");
    assert!(
        response.body.contains("cannot be taken back") && response.body.contains("charge"),
        "{response:?}"
    );
    // What stands before it in the order is taken back anyway.
    assert_eq!(
        world.effects(),
        [vec!["reserve".to_owned(), "free".to_owned()], vec!["charge".to_owned()], vec![]]
    );
}
