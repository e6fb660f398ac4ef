//! The profiles for other families of APIs.

use http::Method;
use oncegate_testkit::Latch;

use super::{PAYMENT, pay, pay_as};
use crate::backend::Script;
use crate::client::{Request, Response};
use crate::plan::Plan;
use crate::table::{Case, assert_echo, assert_fresh, assert_replay, executes, passes, replays, retry_after};
use crate::world::World;

pub(super) fn cases() -> Vec<Case> {
    let classic = Plan { profile: "classic", ..Plan::default() };
    let stripe = Plan { profile: "stripe", ..Plan::default() };
    cases! {
        "profile-classic-replay": "classic: the marker is X-Idempotent-Replayed, and PUT is covered"
            .given(classic.clone())
            => steps {
                let put = || Request::new("PUT", "/payments/1").key("a").json(PAYMENT);
                let patch = || Request::new("PATCH", "/payments/1").key("a").json(PAYMENT);
                vec![
                    executes(pay_as("a")),
                    replays(0, pay_as("a")),
                    executes(put()),
                    replays(2, put()),
                    executes(patch()),
                    replays(4, patch()),
                    passes(Request::new("DELETE", "/payments/1").key("a")),
                    passes(pay()),
                ]
            };
        "profile-classic-server-errors": "classic: a 5xx frees the key"
            .given(classic.clone())
            => steps [
                executes(pay_as("a").script(Script::status(500))).status(500),
                executes(pay_as("a").script(Script::status(503))).status(503),
                executes(pay_as("a")),
                replays(2, pay_as("a")),
            ];
        "profile-classic-errors": "classic: errors have its shape"
            .given(classic)
            => run (classic_errors);
        "profile-stripe-replay": "stripe: POST only, 5xx and 4xx but 400 are replayed"
            .given(stripe.clone())
            => steps [
                executes(pay_as("a")),
                replays(0, pay_as("a")),
                executes(pay_as("b").script(Script::status(500))).status(500),
                replays(2, pay_as("b")),
                executes(pay_as("c").script(Script::status(402))).status(402),
                replays(4, pay_as("c")),
                passes(Request::new("PATCH", "/payments/1").key("a").json(PAYMENT)),
                passes(pay()),
                executes(pay_as("d").json("{}").script(Script::status(400))).status(400),
                executes(pay_as("d")),
                replays(9, pay_as("d")),
            ];
        "profile-stripe-errors": "stripe: errors have its shape and tell if a retry helps"
            .given(stripe.clone())
            => run (stripe_errors);
        "profile-stripe-delete": "stripe: DELETE can be covered too"
            .given(Plan { methods: Some(vec![Method::POST, Method::DELETE]), ..stripe })
            => steps {
                let delete =
                    |status| Request::new("DELETE", "/payments/1").key("a").script(Script::empty(status));
                vec![executes(delete(204)).status(204), replays(0, delete(404))]
            };
    }
}

async fn classic_errors(world: World) {
    let done = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    let conflict = world.send(pay_as("a")).await;
    classic_error(&conflict, 409, "Conflict");
    assert!((1..=5).contains(&retry_after(&conflict)));
    // Nothing internal in a 409.
    assert_eq!(conflict.json().as_object().unwrap().len(), 4, "{conflict:?}");
    assert_eq!(conflict.json()["type"], "urn:oncegate:problem:request-in-progress", "{conflict:?}");
    let other = pay_as("a").json("{}");
    let mismatch = world.send(other.clone()).await;
    classic_error(&mismatch, 422, "Unprocessable Entity");
    assert_echo(&world.plan, &other, &mismatch);
    classic_error(&world.send(pay_as("a,b")).await, 400, "Bad Request");
    done.open();
    let first = first.await.unwrap().expect("a response");
    assert_fresh(&world.plan, &pay_as("a"), &first);
    assert_replay(&world.plan, &pay_as("a"), &first, &world.send(pay_as("a")).await);
}

fn classic_error(response: &Response, status: u16, error: &str) {
    assert_eq!(
        (response.status(), response.get("content-type")),
        (status, Some("application/json")),
        "{response:?}"
    );
    assert_eq!(response.get("cache-control"), Some("no-store"), "{response:?}");
    let body = response.json();
    assert_eq!(body["error"], error, "{response:?}");
    assert!(body["message"].as_str().is_some_and(|message| !message.is_empty()), "{response:?}");
}

async fn stripe_errors(world: World) {
    let done = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    let conflict = world.send(pay_as("a")).await;
    stripe_error(&conflict, 409, "true");
    assert_eq!(conflict.json()["error"]["code"], "idempotency_key_in_use", "{conflict:?}");
    for other in [
        pay_as("a").json("{}"),
        Request::post("/refunds").key("a").json(PAYMENT),
        Request::post("/payments?expand=1").key("a").json(PAYMENT),
    ] {
        let mismatch = world.send(other.clone()).await;
        stripe_error(&mismatch, 400, "false");
        assert_eq!(mismatch.json()["error"]["type"], "idempotency_error", "{mismatch:?}");
        assert_echo(&world.plan, &other, &mismatch);
    }
    stripe_error(&world.send(pay_as(&"k".repeat(256))).await, 400, "false");
    done.open();
    let first = first.await.unwrap().expect("a response");
    assert_fresh(&world.plan, &pay_as("a"), &first);
    assert_replay(&world.plan, &pay_as("a"), &first, &world.send(pay_as("a")).await);
    assert_eq!(world.backend.effects(), 1);
}

fn stripe_error(response: &Response, status: u16, should_retry: &str) {
    assert_eq!(
        (response.status(), response.get("content-type")),
        (status, Some("application/json")),
        "{response:?}"
    );
    assert_eq!(response.get("cache-control"), Some("no-store"), "{response:?}");
    assert_eq!(response.get("stripe-should-retry"), Some(should_retry), "{response:?}");
    let error = &response.json()["error"];
    assert!(error["type"].is_string() && error["message"].is_string(), "{response:?}");
}
