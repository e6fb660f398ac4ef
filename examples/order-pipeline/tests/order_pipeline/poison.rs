//! A message that its consumer cannot process.

use crate::part::Part;
use crate::world::{Order, World};

#[test]
fn a_rejected_order_is_one_dead_letter_and_blocks_only_its_customer() {
    let world = World::start();
    let parts = ["api", "relay", "projector"].map(|role| Part::start(world.part(role)));
    let mut orders = Vec::new();
    // The second one of ada is a refund, which this version of the projector does not know.
    for (customer, cents) in [("ada", 500), ("bob", 70), ("ada", -200), ("bob", 8), ("ada", 30), ("ada", 4)] {
        let key = format!("order-{}", orders.len());
        let order = Order { key, customer: customer.to_owned(), cents };
        order.place(&world.api);
        order.place(&world.api);
        orders.push(order);
    }
    world.come_to_rest();
    let letters = "SELECT consumer, reason, attempts, error FROM oncegate.list_dead_letters(NULL, NULL, 10)";
    assert_eq!(world.postgres.sql(letters).unwrap(), "totals|rejected|1|a negative amount");
    let totals = "SELECT customer, orders, cents, last_sequence FROM totals ORDER BY customer";
    assert_eq!(world.postgres.sql(totals).unwrap(), "ada|1|500|1\nbob|2|78|2");
    let gaps =
        "SELECT consumer, stream, expected, first_buffered, buffered FROM oncegate.list_gaps(NULL, 10)";
    assert_eq!(world.postgres.sql(gaps).unwrap(), "totals|ada|2|3|2");

    // Nothing was mended: nothing changes.
    let retry = |arguments: &[&str]| {
        let output = world.program("retry").args(arguments).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(retry(&[]), "dead letter 1: still dead: a negative amount\n");
    assert_eq!(world.postgres.sql(letters).unwrap(), "totals|rejected|1|a negative amount");

    // A newer version supports refunds: it processes the dead letter, and the orders behind it.
    assert_eq!(retry(&["--refunds"]), "dead letter 1: processed\n");
    assert_eq!(retry(&["--refunds"]), "");
    assert_eq!(world.postgres.sql(totals).unwrap(), "ada|4|334|4\nbob|2|78|2");
    world.holds(&orders);
    parts.into_iter().for_each(Part::stop);
}

#[test]
fn an_operator_can_skip_a_rejected_order() {
    let world = World::start();
    let parts = ["api", "relay", "projector"].map(|role| Part::start(world.part(role)));
    let place = |number: usize, cents| {
        Order { key: format!("order-{number}"), customer: "ada".to_owned(), cents }.place(&world.api);
        world.come_to_rest();
    };
    place(0, -200);
    place(1, 30);
    let totals = "SELECT customer, orders, cents, last_sequence FROM totals";
    assert_eq!(world.postgres.sql(totals).unwrap(), "");
    world
        .postgres
        .sql("SELECT oncegate.set_stream('totals', 'ada', 2), oncegate.delete_dead_letter(1)")
        .unwrap();
    place(2, 4);
    assert_eq!(world.postgres.sql(totals).unwrap(), "ada|2|34|3");
    parts.into_iter().for_each(Part::stop);
}
