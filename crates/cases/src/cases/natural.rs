//! Keys that are built of members of the body.

use super::pay;
use crate::client::Request;
use crate::plan::{Callers, Plan};
use crate::table::{Case, assert_refusal, executes, passes, refused, replays};
use crate::world::World;

pub(super) fn cases() -> Vec<Case> {
    let optional = Plan { key_json: Some("/customer,/cart"), ..Plan::default() };
    let required = Plan { require_key: true, ..optional.clone() };
    vec![
        Case::steps(
            "N-one-operation",
            "two requests with the same values are one operation, whatever keys they send, or none",
            || {
                vec![
                    executes(checkout(r#"{"customer":"ada","cart":7,"amount":5}"#)),
                    replays(0, checkout(r#"{"customer":"ada","cart":7,"amount":5}"#)),
                    replays(0, checkout(r#"{"amount": 5.0, "cart": 7e0, "customer": "\u0061da"}"#)),
                    replays(0, checkout(r#"{"customer":"ada","cart":7,"amount":5}"#).key("a")),
                    replays(0, checkout(r#"{"customer":"ada","cart":7,"amount":5}"#).key("b")),
                    // The field is not looked at, so it cannot be malformed.
                    replays(
                        0,
                        checkout(r#"{"customer":"ada","cart":7,"amount":5}"#).key("\"broken").key("c"),
                    ),
                    executes(checkout(r#"{"customer":"ada","cart":8,"amount":5}"#).key("a")),
                    executes(checkout(r#"{"customer":"eve","cart":7,"amount":5}"#)),
                ]
            },
        )
        .given(required.clone()),
        Case::steps("N-another-body", "the same values in another request are a mismatch", || {
            vec![
                executes(checkout(r#"{"customer":"ada","cart":7,"amount":5}"#)),
                refused("key-reused", checkout(r#"{"customer":"ada","cart":7,"amount":6}"#)),
                refused("key-reused", checkout(r#"{"customer":"ada","cart":7}"#).key("a")),
                replays(0, checkout(r#"{"customer":"ada","cart":7,"amount":5}"#)),
            ]
        })
        .given(required.clone()),
        Case::closed(
            "N-another-body-in-words",
            "the refusal does not advise to send another key, which no client can",
            |world| Box::pin(in_words(world)),
        )
        .given(required.clone()),
        Case::steps("N-volatile-members", "what is left out of the comparison may differ", || {
            vec![
                executes(checkout(r#"{"customer":"ada","cart":7,"sent":"09:00"}"#)),
                replays(0, checkout(r#"{"customer":"ada","cart":7,"sent":"09:01"}"#)),
            ]
        })
        .given(Plan { fingerprint_exclude: Some("/sent"), by_file: true, ..required.clone() }),
        Case::steps("N-kinds-of-values", "a number, a text, null and other values are told apart", || {
            let values = ["1", r#""1""#, "null", r#""null""#, "true", "[]", "[1]", "{}", r#""""#];
            let body = |value| format!(r#"{{"customer":"ada","cart":{value}}}"#);
            values.into_iter().map(|value| executes(checkout(body(value)))).collect()
        })
        .given(required.clone()),
        Case::steps("N-no-separator", "values cannot be shifted from one member to the next", || {
            vec![
                executes(checkout(r#"{"customer":"ab","cart":"c"}"#)),
                executes(checkout(r#"{"customer":"a","cart":"bc"}"#)),
                executes(checkout(r#"{"customer":"a\",\"/cart","cart":"bc"}"#)),
                executes(checkout(r#"{"customer":"c","cart":"ab"}"#)),
            ]
        })
        .given(required.clone()),
        Case::steps("N-required", "a body without a member, or that is no JSON, has no key", || {
            vec![
                refused("key-missing", checkout(r#"{"customer":"ada"}"#)),
                refused("key-missing", checkout(r#"{"customer":"ada"}"#).key("a")),
                refused("key-missing", checkout("{")),
                refused("key-missing", checkout(r#"{"customer":"ada","cart":7,"cart":8}"#)),
                refused("key-missing", Request::post("/checkouts").body("text/plain", &b"ada 7"[..])),
                refused("key-missing", Request::post("/checkouts")),
                passes(Request::new("DELETE", "/checkouts/1")),
            ]
        })
        .given(required.clone()),
        Case::steps("N-optional", "where no key is required, what has none passes unprotected", || {
            vec![
                passes(checkout(r#"{"customer":"ada"}"#)),
                passes(checkout(r#"{"customer":"ada"}"#)),
                passes(pay()),
                passes(Request::post("/checkouts").body("text/plain", &b"ada 7"[..])),
                executes(checkout(r#"{"customer":"ada","cart":7}"#)),
                replays(4, checkout(r#"{"customer":"ada","cart":7}"#)),
            ]
        })
        .given(optional.clone()),
        Case::steps("N-callers-are-apart", "a caller's values never meet another's", || {
            let of = |tenant: &str| checkout(r#"{"customer":"ada","cart":7}"#).field("x-tenant", tenant);
            vec![executes(of("a")), executes(of("b")), replays(0, of("a")), replays(1, of("b"))]
        })
        .given(Plan { scope: Callers::RequiredHeader("x-tenant"), ..optional }),
    ]
}

async fn in_words(mut world: World) {
    world.start().await;
    let first = world.send(checkout(r#"{"customer":"ada","cart":7,"amount":5}"#)).await;
    assert_eq!(first.status(), 201, "{first:?}");
    let refusal = world.send(checkout(r#"{"customer":"ada","cart":7,"amount":6}"#)).await;
    assert_refusal("key-reused", &refusal);
    let problem = refusal.json();
    let detail = problem["detail"].as_str().unwrap_or_default();
    assert!(detail.contains("built of members") && !detail.contains("new key"), "{detail}");
}

fn checkout(body: impl Into<String>) -> Request {
    Request::post("/checkouts").json(body)
}
