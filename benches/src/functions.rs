//! The overhead of a wrapped function with the memory store, compared with a direct call.

use std::fmt::Display;
use std::future::Future;
use std::hint::black_box;
use std::time::Instant;

use oncegate_engine::{Engine, Function, FunctionError};
use serde::{Deserialize, Serialize};

use crate::memory;
use crate::records::Result;

const ROUNDS: usize = 5;
const CALLS: u64 = 100_000;

/// The input: a dozen values, about 200 bytes of JSON.
#[derive(Clone, Serialize)]
struct Order {
    id: String,
    customer: String,
    cents: u64,
    currency: &'static str,
    lines: Vec<(String, u32)>,
}

/// The result: about 100 bytes of JSON.
#[derive(Serialize, Deserialize)]
struct Receipt {
    id: String,
    cents: u64,
    text: String,
}

impl Order {
    fn new(number: u64) -> Self {
        Self {
            id: format!("order-{number}"),
            customer: "customer 4711".to_owned(),
            cents: 500 + number % 100,
            currency: "EUR",
            lines: (0..4).map(|line| (format!("article number {line}"), line)).collect(),
        }
    }
}

/// The function. It does as little as it can, so that what is measured is what is around it.
async fn charge(order: Order) -> std::result::Result<Receipt, String> {
    Ok(Receipt { text: format!("{} {}", order.cents, order.currency), id: order.id, cents: order.cents })
}

/// One after the other, in one task; a new store for each round. Prints a table.
pub(crate) async fn functions() -> Result<()> {
    const NAMES: [&str; 5] = [
        "bare",
        "first call, in place",
        "first call, in a task of its own",
        "replay, in place",
        "replay, in a task of its own",
    ];
    let mut rounds: [Vec<f64>; NAMES.len()] = Default::default();
    // The first round is for the caches.
    for round in 0..=ROUNDS {
        let in_place = Engine::new(memory()).function("charge");
        let detached = Engine::new(memory()).function("charge");
        let figures = [
            each(charge).await?,
            each(|order| in_place_call(&in_place, order)).await?,
            each(|order| detached_call(&detached, order)).await?,
            each(|order| in_place_call(&in_place, order)).await?,
            each(|order| detached_call(&detached, order)).await?,
        ];
        if round > 0 {
            for (of, figure) in rounds.iter_mut().zip(figures) {
                of.push(figure);
            }
        }
    }
    println!("| wrapped function, memory store | µs per call | range |\n|---|---|---|");
    for (name, mut figures) in NAMES.into_iter().zip(rounds) {
        figures.sort_by(f64::total_cmp);
        let (low, high) = (figures[0], figures[ROUNDS - 1]);
        println!("| {name} | {:.2} | {low:.2}–{high:.2} |", figures[ROUNDS / 2]);
    }
    Ok(())
}

async fn in_place_call(
    function: &Function,
    order: Order,
) -> std::result::Result<Receipt, FunctionError<String>> {
    function.call(&order.id, &order).run_in_place(async |_| charge(order).await).await
}

async fn detached_call(
    function: &Function,
    order: Order,
) -> std::result::Result<Receipt, FunctionError<String>> {
    function.call(&order.id, &order).run(async move |_| charge(order).await).await
}

/// Microseconds for each of many calls. What they are called with is made before.
async fn each<F, Fut, E: Display>(call: F) -> Result<f64>
where
    F: Fn(Order) -> Fut,
    Fut: Future<Output = std::result::Result<Receipt, E>>,
{
    let orders: Vec<_> = (0..CALLS).map(Order::new).collect();
    let begun = Instant::now();
    for order in orders {
        black_box(call(black_box(order)).await.map_err(|error| error.to_string())?);
    }
    Ok(begun.elapsed().as_secs_f64() * 1e6 / CALLS as f64)
}
