//! Shops that share their records on Redis: what one leaves, another one finishes.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use oncegate_servers::{RedisOptions, RedisServer, until};

use crate::world::{Order, Process, Shop, World};

/// A way to a server that ends at one message of the client: before the server has it, or before the client hears of it.
struct Gate {
    port: u16,
    state: Arc<State>,
}

struct State {
    /// The number of messages since it was armed.
    seen: AtomicUsize,
    /// At which one it ends.
    at: AtomicUsize,
    is_before: AtomicBool,
    is_shut: AtomicBool,
}

impl Gate {
    fn to(server: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(State {
            seen: AtomicUsize::new(0),
            at: AtomicUsize::new(usize::MAX),
            is_before: AtomicBool::new(false),
            is_shut: AtomicBool::new(false),
        });
        let shared = state.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(("127.0.0.1", server))) else {
                    continue;
                };
                for stream in [&client, &server] {
                    stream.set_nodelay(true).unwrap();
                }
                let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let state = shared.clone();
                std::thread::spawn(move || pass(from, to, || state.asks()));
                let state = shared.clone();
                std::thread::spawn(move || pass(server, client, || !state.is_shut.load(Ordering::SeqCst)));
            }
        });
        Self { port, state }
    }

    fn arm(&self, at: usize, is_before: bool) {
        self.state.seen.store(0, Ordering::SeqCst);
        self.state.is_before.store(is_before, Ordering::SeqCst);
        self.state.at.store(at, Ordering::SeqCst);
    }

    fn is_shut(&self) -> bool {
        self.state.is_shut.load(Ordering::SeqCst)
    }
}

impl State {
    /// Returns `true` if the client's message is passed on.
    fn asks(&self) -> bool {
        if self.is_shut.load(Ordering::SeqCst) {
            return false;
        }
        if self.seen.fetch_add(1, Ordering::SeqCst) + 1 != self.at.load(Ordering::SeqCst) {
            return true;
        }
        // First, so that no response gets through.
        self.is_shut.store(true, Ordering::SeqCst);
        !self.is_before.load(Ordering::SeqCst)
    }
}

/// Passes on what goes on, and swallows the rest, until one of the two ends.
fn pass(mut from: TcpStream, mut to: TcpStream, goes_on: impl Fn() -> bool) {
    let mut bytes = [0; 64 * 1024];
    while let Ok(length @ 1..) = from.read(&mut bytes) {
        if goes_on() && to.write_all(&bytes[..length]).is_err() {
            break;
        }
    }
}

fn redis() -> (RedisServer, u16) {
    let server = RedisServer::start(RedisOptions::new()).unwrap();
    let port = server.port();
    (server, port)
}

fn order(prefix: &str, n: usize) -> Order {
    let item = format!("{prefix}-{n}");
    Order { key: item.clone(), item, ..Order::good() }
}

fn url(port: u16) -> String {
    format!("redis://127.0.0.1:{port}")
}

#[test]
fn whatever_a_shop_was_telling_the_store_when_it_died_another_one_finishes_its_order() {
    let world = World::start();
    let (_server, port) = redis();
    let how = Shop { lease_ms: 2000, ..Shop::default() };
    let gated = || {
        let gate = Gate::to(port);
        let shop = world.shop_on(how, &url(gate.port));
        (gate, shop)
    };
    // How much a whole order has to tell.
    let (gate, shop) = gated();
    gate.arm(usize::MAX, true);
    let whole = order("whole", 0);
    assert_eq!(whole.send(&shop.address).unwrap().status, 201);
    let messages = gate.state.seen.load(Ordering::SeqCst);
    // A claim, the input, three steps, the response.
    assert!((6..30).contains(&messages), "{messages}");

    let mut dead = Vec::new();
    for at in 1..=messages {
        for is_before in [true, false] {
            let order = order(if is_before { "before" } else { "after" }, at);
            let (gate, mut shop) = gated();
            gate.arm(at, is_before);
            let client = order.spawn(&shop);
            until("the message comes by, or there is a response", || {
                (gate.is_shut() || client.is_finished()).then_some(())
            });
            shop.kill();
            drop(client.join().unwrap());
            dead.push(order);
        }
    }
    // It continues all orders that were begun. Only the client knows an order that was never begun.
    let shop = world.shop_on(Shop::completing(), &url(port));
    let responses: Vec<_> = dead.iter().map(|order| order.settle(&shop)).collect();
    let mut replayed = 0;
    for (order, response) in dead.iter().zip(&responses) {
        assert_eq!(response.status, 201, "{order:?}: {response:?}");
        let again = order.settle(&shop);
        assert!(again.is_replayed, "{order:?}: {again:?}");
        assert_eq!(again.body, response.body, "{order:?}");
        replayed += usize::from(response.is_replayed);
        assert_eq!((world.stock.count(&order.item), world.carrier.count(&order.item)), (1, 1), "{order:?}");
    }
    let charged = world.bank.effects().len();
    assert_eq!(charged, dead.len() + 1, "each order was charged once");
    assert!(replayed > 0, "an order was continued before the clients asked again");
}

/// Kills the first shop at this point, with this order, and lets the second one finish it.
fn second_finishes(
    world: &mut World,
    second: &Process,
    store: &str,
    order: &Order,
    action: &str,
    fault: &str,
) {
    let mut first = world.shop_on(Shop { lease_ms: 1200, ..Shop::doomed() }, store);
    let seen = world.other(action).caught_so_far();
    world.other(action).arm(action, fault);
    let client = order.spawn(&first);
    until("it gets there", || (world.other(action).caught_so_far() > seen).then_some(()));
    first.kill();
    assert_eq!(client.join().unwrap(), None);
    // The client goes to the other one, which may be at it already.
    let response = order.settle(second);
    assert_eq!(response.status, if order.address == "Atlantis" { 422 } else { 201 }, "{response:?}");
    let again = order.settle(second);
    assert_eq!((again.is_replayed, again.body), (true, response.body));
}

#[test]
fn a_second_shop_finishes_and_takes_back_what_the_first_one_left() {
    let mut world = World::start();
    let (_server, port) = redis();
    let store = url(port);
    let second = world.shop_on(Shop::completing(), &store);
    let (mut shipped, mut refused) = (0, 0);
    for fault in ["hang", "lost"] {
        for action in ["reserve", "charge", "ship", "refund", "free"] {
            let is_shipped = !matches!(action, "refund" | "free");
            let address = if is_shipped { "London" } else { "Atlantis" };
            let order = Order { address, ..order(&format!("{fault}-{action}"), 0) };
            second_finishes(&mut world, &second, &store, &order, action, fault);
            shipped += usize::from(is_shipped);
            refused += usize::from(!is_shipped);
        }
    }
    let count = |effects: &[String], action: &str| effects.iter().filter(|effect| *effect == action).count();
    let [stock, bank, carrier] = world.effects();
    assert_eq!((count(&stock, "reserve"), count(&stock, "free")), (shipped + refused, refused));
    assert_eq!((count(&bank, "charge"), count(&bank, "refund")), (shipped + refused, refused));
    assert_eq!(carrier.len(), shipped);
}
