//! One path in several spellings: it has the settings of its route, and a retry in another spelling is a retry.

use super::{PAYMENT, pay_as};
use crate::backend::Script;
use crate::client::Request;
use crate::framework::Framework;
use crate::plan::{Plan, Route};
use crate::table::{Case, Step, assert_replay, executes, passes, refused, rejected, replays};
use crate::world::World;
use oncegate_http::KeyScope;

/// Spellings of `/orders` that are always one path.
const SPELLINGS: [&str; 7] =
    ["/orders", "//orders", "/%6Frders", "/%6frders", "/x/../orders", "/./orders", "/x/%2E%2e/orders"];

/// Spellings that are one path unless a slash at the end or case counts.
const LOOSE: [&str; 4] = ["/orders/", "/Orders", "/ORDERS//", "/orders/."];

fn order(target: &str) -> Request {
    Request::post(target).json(PAYMENT)
}

fn on(path: &'static str, plan: Plan) -> Plan {
    Plan { routes: vec![Route { methods: vec![], path, plan }], ..Plan::default() }
}

pub(super) fn cases() -> Vec<Case> {
    let required = Plan { require_key: true, ..Plan::default() };
    let exact = Plan { exact_paths: true, ..required.clone() };
    cases! {
        "path-spelling-does-not-avoid-a-route":
            "every spelling of a path has the settings of its route, and other paths have not"
            .given(on("/orders", required.clone()))
            => steps {
                let spelled = SPELLINGS.into_iter().chain(LOOSE);
                let refused = spelled.map(|target| refused("key-missing", order(target)));
                refused
                    .chain(["/order", "/orders%2F", "/orders/7"].map(|target| passes(order(target))))
                    .collect()
            };
        "path-spelling-that-counts": "if a slash at the end and case count, other spellings are other paths"
            .given(on("/orders", exact))
            => steps {
                let same = SPELLINGS.map(|target| refused("key-missing", order(target)));
                same.into_iter().chain(LOOSE.map(|target| passes(order(target)))).collect()
            };
        "path-spelling-of-a-retry": "a retry in another spelling gets the response of the first one"
            .given(on("/orders", Plan::default()))
            => steps {
                let mut steps = vec![executes(order("/orders").key("a"))];
                let others = SPELLINGS.into_iter().skip(1).chain(LOOSE);
                steps.extend(others.map(|target| replays(0, order(target).key("a"))));
                steps
            };
        "path-spelling-without-a-route": "if no route matches, case counts, because no part is known to be an identifier"
            => steps [
                executes(order("/orders/Ab").key("a")),
                replays(0, order("//orders/./Ab/").key("a")),
                executes(order("/orders/ab").key("a")),
            ];
        "path-parameters-keep-their-case": "the value of a path parameter is data"
            .given(on("/items/{id}", Plan::default()))
            => steps [
                executes(order("/items/AbC").key("a")),
                replays(0, order("/Items/AbC/").key("a")),
                executes(order("/items/abc").key("a")),
                replays(2, order("/ITEMS/abc").key("a")),
            ];
        "path-spelling-is-not-a-mismatch": "if keys belong to the caller, another spelling is the same request"
            .given(Plan {
                key_scope: Some(KeyScope::Caller),
                ..on("/orders", Plan { key_scope: Some(KeyScope::Caller), ..Plan::default() })
            })
            => steps {
                let mut steps = vec![executes(order("/orders").key("a"))];
                steps.extend(LOOSE.map(|target| replays(0, order(target).key("a"))));
                steps.push(refused("key-reused", order("/other").key("a")));
                steps
            };
        "path-redirect-to-another-spelling":
            "a redirect that sends the same request to another spelling of its path frees the key"
            => steps (redirects);
        "target-without-a-path":
            "a target that is no path chooses no route, so it is refused and does not come around the route of /"
            .given(on("/", required.clone()))
            .without_frameworks(&[Framework::FastApi], "it finds no route for `*`")
            => steps {
                let to = |target: &str| order(target).host("a.test");
                vec![
                    rejected(to("a.test")),
                    rejected(to("a.test:443")),
                    rejected(to("*")),
                    rejected(to("a.test").key("a")),
                    rejected(to("*").key("a")),
                    rejected(Request::new("DELETE", "a.test").host("a.test")),
                    refused("key-missing", to("/")),
                    refused("key-missing", to("http://a.test")),
                    refused("key-missing", to("http://a.test?x=1")),
                    executes(to("http://a.test").key("a")),
                    replays(9, to("/").key("a")),
                    passes(Request::new("OPTIONS", "*").host("a.test")),
                ]
            };
        "service-gets-the-path-as-sent": "the service gets the path as the client sent it"
            => run (as_it_was_sent);
    }
}

fn redirects() -> Vec<Step> {
    let to = |status, location: &str| Script::status(status).field("location", location);
    let mut steps = Vec::new();
    for (key, status, location) in [
        ("a", 307, "/orders/"),
        ("b", 308, "/orders/"),
        ("c", 307, "http://cases.test/orders/"),
        ("g", 301, "/orders/"),
        ("h", 301, "http://cases.test/orders/"),
    ] {
        let first = steps.len();
        steps.push(executes(order("/orders").key(key).script(to(status, location))).status(status));
        steps.push(executes(order("/orders/").key(key)));
        steps.push(replays(first + 1, order("/orders").key(key)));
    }
    // A redirection to another path, or to the response, is the outcome of the operation.
    for (key, status, location) in [
        ("d", 307, "/confirm"),
        ("e", 303, "/orders/"),
        ("f", 302, "/orders/"),
        ("i", 301, "/confirm"),
        ("j", 301, "/orders"),
    ] {
        let first = steps.len();
        steps.push(executes(order("/orders").key(key).script(to(status, location))).status(status));
        steps.push(replays(first, order("/orders").key(key)));
    }
    steps
}

async fn as_it_was_sent(world: World) {
    let first = world.send(Request::post("//orders/%61?x=%61").key("a").json(PAYMENT)).await;
    assert_eq!(world.backend.seen()[0].target, "//orders/%61?x=%61");
    let again = Request::post("/orders/a/?x=%61").key("a").json(PAYMENT);
    assert_replay(&world.plan, &again, &first, &world.send(again.clone()).await);
    assert_eq!(world.send(pay_as("a")).await.status(), 201);
}
