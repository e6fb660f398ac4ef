//! Covered requests, requests that need a key, and the order of checks.

use std::time::Duration;

use bytes::Bytes;
use http::Method;
use oncegate_testkit::until;

use super::{PAYMENT, pay, pay_as};
use crate::backend::Script;
use crate::client::{Connection, Request};
use crate::framework::Framework;
use crate::library::Library;
use crate::plan::{Callers, Plan, Route};
use crate::table::{Case, assert_echo, assert_refusal, assert_replay, executes, passes, refused, replays};
use crate::world::World;

/// Other frameworks turn such methods into upper case.
const LOWER_CASE: &str = "the framework refuses a method in lower case";

pub(super) fn cases() -> Vec<Case> {
    let required = Plan { require_key: true, ..Plan::default() };
    let small = Plan { max_request_body: Some(64), ..Plan::default() };
    cases! {
        "required-key-missing": "a required key that is missing is a 400 with the draft's title"
            .given(required.clone())
            => steps [
                refused("key-missing", pay()),
                refused("key-missing", Request::new("PATCH", "/payments/1").json("{}")),
                executes(pay_as("abc")),
            ];
        "required-key-empty": "an empty key is malformed, not missing"
            .given(required.clone())
            => steps [refused("key-invalid", pay_as("")), refused("key-invalid", pay_as("\"\""))];
        "key-required-only-for-covered-methods": "methods that are not covered need no key"
            .given(required.clone())
            => steps [passes(Request::new("GET", "/payments/1")), passes(Request::new("DELETE", "/payments/1"))];
        "optional-key-missing": "without a key everything executes, and nothing is marked"
            => steps [passes(pay()), passes(pay()), passes(pay())];
        "safe-methods-pass": "GET, HEAD and OPTIONS pass through and their key is ignored"
            => steps {
                let get = |key| Request::new("GET", "/payments/1").key(key);
                vec![
                    passes(get("abc")),
                    passes(get("abc")),
                    passes(get("\"broken")),
                    passes(get("a").key("b")),
                    passes(Request::new("HEAD", "/payments/1").key("abc")),
                    passes(Request::new("HEAD", "/payments/1").key("abc")),
                    passes(Request::new("OPTIONS", "/payments/1").key("abc")),
                ]
            };
        "patch-is-covered": "PATCH is covered"
            => steps {
                let patch = || Request::new("PATCH", "/payments/1").key("abc").json(PAYMENT);
                vec![executes(patch()), replays(0, patch())]
            };
        "method-in-another-case":
            "a method in another case is the same method: frameworks turn it into upper case and execute it"
            .given(required.clone())
            .without_frameworks(&[Framework::FastApi, Framework::Express], LOWER_CASE)
            .without_library(Library::Node, "Node refuses a method in lower case")
            .without_library(Library::Python, "FastAPI finds no route for a method in lower case")
            => steps {
                let patch = |method: &str| Request::new(method, "/payments/1").key("abc").json(PAYMENT);
                vec![
                    executes(patch("patch")),
                    replays(0, patch("PATCH")),
                    replays(0, patch("Patch")),
                    refused("key-reused", patch("patch").json("{}")),
                    executes(Request::new("POST", "/payments").key("abc").json(PAYMENT)),
                    replays(4, Request::new("post", "/payments").key("abc").json(PAYMENT)),
                    refused("key-missing", Request::new("pOst", "/payments").json(PAYMENT)),
                    // That of a method that is not covered is ignored, as it is in upper case.
                    passes(Request::new("delete", "/payments/1").key("abc")),
                    passes(Request::new("get", "/payments/1").key("abc")),
                ]
            };
        "put-and-delete-pass": "by default, PUT and DELETE are not covered"
            => steps {
                ["PUT", "PUT", "DELETE", "DELETE"]
                    .map(|method| passes(Request::new(method, "/payments/1").key("abc")))
                    .into()
            };
        "delete-opted-in": "a covered DELETE that is repeated gets its 204 again, and not a 404"
            .given(Plan { methods: Some(vec![Method::PUT, Method::DELETE]), ..Plan::default() })
            => steps {
                let delete =
                    |status| Request::new("DELETE", "/payments/1").key("abc").script(Script::empty(status));
                let put = || Request::new("PUT", "/payments/1").key("abc").json(PAYMENT);
                vec![
                    executes(delete(204)).status(204),
                    replays(0, delete(404)),
                    executes(put()),
                    replays(2, put()),
                    passes(pay_as("abc")),
                    passes(pay_as("abc")),
                ]
            };
        "method-of-a-route-in-another-case": "a route is chosen by its method in any case"
            .given(Plan {
                routes: vec![Route {
                    methods: vec![Method::DELETE],
                    path: "/items/{id}",
                    plan: required.clone(),
                }],
                ..Plan::default()
            })
            .without_frameworks(&[Framework::FastApi, Framework::Express], LOWER_CASE)
            => steps {
                let delete = |method: &str| Request::new(method, "/items/1");
                vec![
                    refused("key-missing", delete("delete")),
                    executes(delete("delete").key("abc")),
                    replays(1, delete("DELETE").key("abc")),
                    passes(delete("put").key("abc")),
                ]
            };
        "request-body-at-the-limit": "a body as large as the limit is taken; one byte more is a 413 and claims nothing"
            .given(small.clone())
            => steps {
                let sized = |key: &str, bytes| {
                    Request::post("/notes").key(key).body("text/plain", vec![b'x'; bytes])
                };
                let chunked = |key: &str, bytes: usize| {
                    let chunks = vec![Bytes::from(vec![b'x'; 40]), Bytes::from(vec![b'x'; bytes - 40])];
                    Request::post("/notes").key(key).chunked("text/plain", chunks)
                };
                vec![
                    executes(sized("a", 64)),
                    replays(0, sized("a", 64)),
                    refused("request-too-large", sized("b", 65)),
                    refused("request-too-large", sized("b", 100_000)),
                    executes(sized("b", 64)),
                    executes(chunked("c", 64)),
                    replays(5, chunked("c", 64)),
                    replays(5, sized("c", 64)),
                    refused("request-too-large", chunked("d", 65)),
                    executes(chunked("d", 64)),
                    // The limit is that of what has to be compared: there is nothing to compare without a key.
                    passes(Request::post("/notes").body("text/plain", vec![b'x'; 100_000])),
                ]
            };
        "body-limit-applies-before-the-record": "a body beyond the limit is a 413, even if the record has a response"
            .given(small.clone())
            => steps {
                let sized = |bytes| Request::post("/notes").key("a").body("text/plain", vec![b'x'; bytes]);
                vec![executes(sized(10)), refused("request-too-large", sized(65)), replays(0, sized(10))]
            };
        "key-is-checked-before-the-body": "a malformed or missing key is refused before the size of the body"
            .given(Plan { require_key: true, ..small })
            => steps {
                let large = || Request::post("/notes").body("text/plain", vec![b'x'; 65]);
                vec![
                    refused("key-invalid", large().key("\"broken")),
                    refused("key-missing", large()),
                    refused("request-too-large", large().key("abc")),
                ]
            };
        "scope-is-checked-before-the-key": "without a scope nothing else is checked"
            .given(Plan { scope: Callers::RequiredHeader("x-tenant"), ..Plan::default() })
            => steps [
                refused("scope-unavailable", pay_as("abc")),
                refused("scope-unavailable", pay_as("\"broken")),
                executes(pay_as("abc").field("X-Tenant", "a")),
                replays(2, pay_as("abc").field("X-Tenant", "a")),
            ];
        "request-without-a-key-needs-no-scope": "a request that no key protects needs no scope"
            .given(Plan { scope: Callers::RequiredHeader("x-tenant"), ..Plan::default() })
            => steps [passes(pay()), passes(Request::new("GET", "/payments/1").key("abc"))];
        "request-bodies-exceed-the-budget": "bodies beyond the request budget are a 503, and claim nothing"
            .given(Plan { max_request_body: Some(1000), request_budget: Some(1000), ..Plan::default() })
            => run (bodies_together);
        "problem-has-its-status": "a problem is JSON with its own status"
            .given(required)
            => run {
                |world| {
                    Box::pin(async move {
                        let response = world.send(pay()).await;
                        let problem = response.json();
                        let members: Vec<_> = problem.as_object().expect("an object").keys().cloned().collect();
                        for needed in ["type", "title", "status", "detail", "retry"] {
                            assert!(members.iter().any(|member| member == needed), "{needed} is missing: {response:?}");
                        }
                        assert_eq!(problem["status"], 400);
                        assert_eq!(response.get("content-length"), Some(response.body.len().to_string().as_str()));
                    })
                }
            };
    }
}

async fn bodies_together(world: World) {
    let sized = |key: &str, bytes| Request::post("/notes").key(key).body("text/plain", vec![b'x'; bytes]);
    assert_eq!(world.send(sized("a", 1000)).await.status(), 201);
    // A client sends 600 bytes of 1000. They are held once a request that does not fit next to them is refused. If that
    // request came first, the client is refused, and sends them again.
    let (mut looks, mut slow) = (0, None);
    until("they are held", async || {
        looks += 1;
        let mut connection = match slow.take() {
            Some(connection) => connection,
            None => {
                let (request, mut connection) =
                    (sized(&format!("slow-{looks}"), 1000), world.connect().await);
                connection.write(&request.bytes()[..request.bytes().len() - 400]).await;
                connection
            }
        };
        let held = world.send(sized(&format!("look-{looks}"), 401)).await.status() == 503;
        let answered = async |connection: &mut Connection| {
            tokio::time::timeout(Duration::from_millis(20), connection.response("POST")).await.is_ok()
        };
        let refused = !held && answered(&mut connection).await;
        slow = (!refused).then_some(connection);
        held
    })
    .await;
    let mut connection = slow.expect("a client");
    let (refused, before) = (sized("c", 401), world.backend.effects());
    let response = world.send(refused.clone()).await;
    assert_refusal("overloaded", &response);
    assert_echo(&world.plan, &refused, &response);
    // A replay needs a part of the budget, too.
    assert_refusal("overloaded", &world.send(sized("a", 1000)).await);
    assert_eq!(world.backend.effects(), before);
    let fits = world.send(sized("d", 400)).await;
    assert_eq!(fits.status(), 201, "{fits:?}");
    connection.write(&[b'x'; 400]).await;
    assert_eq!(connection.response("POST").await.expect("a response").status(), 201);
    // Nothing was claimed: the key is free, for another body too.
    let first = world.send(sized("c", 900)).await;
    assert_eq!(first.status(), 201, "{first:?}");
    assert_replay(&world.plan, &sized("c", 900), &first, &world.send(sized("c", 900)).await);
}
