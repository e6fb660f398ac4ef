//! Keys that are built from members of the body.

use super::pay;
use crate::client::Request;
use crate::plan::{Callers, Plan};
use crate::table::{Case, assert_refusal, executes, passes, refused, replays};
use crate::world::World;

pub(super) fn cases() -> Vec<Case> {
    let optional = Plan { key_json: Some("/customer,/cart"), ..Plan::default() };
    let required = Plan { require_key: true, ..optional.clone() };
    cases! {
        "natural-key-one-operation": "two requests with the same values are one operation, even if they send other keys or none"
            .given(required.clone())
            => steps [
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
            ];
        "natural-key-mismatch": "the same values in another request are a mismatch"
            .given(required.clone())
            => steps [
                executes(checkout(r#"{"customer":"ada","cart":7,"amount":5}"#)),
                refused("key-reused", checkout(r#"{"customer":"ada","cart":7,"amount":6}"#)),
                refused("key-reused", checkout(r#"{"customer":"ada","cart":7}"#).key("a")),
                replays(0, checkout(r#"{"customer":"ada","cart":7,"amount":5}"#)),
            ];
        "natural-key-mismatch-advises-no-new-key": "the refusal does not advise another key, because no client can send one"
            .given(required.clone())
            => start (in_words);
        "natural-key-excluded-members-may-differ": "excluded members may differ"
            .given(Plan { fingerprint_exclude: Some("/sent"), by_file: true, ..required.clone() })
            => steps [
                executes(checkout(r#"{"customer":"ada","cart":7,"sent":"09:00"}"#)),
                replays(0, checkout(r#"{"customer":"ada","cart":7,"sent":"09:01"}"#)),
            ];
        "natural-key-kinds-of-values": "a number, a text, null and other values are different"
            .given(required.clone())
            => steps {
                let values = ["1", r#""1""#, "null", r#""null""#, "true", "[]", "[1]", "{}", r#""""#];
                let body = |value| format!(r#"{{"customer":"ada","cart":{value}}}"#);
                values.into_iter().map(|value| executes(checkout(body(value)))).collect()
            };
        "natural-key-values-do-not-shift-between-members": "values cannot be shifted from one member to the next"
            .given(required.clone())
            => steps [
                executes(checkout(r#"{"customer":"ab","cart":"c"}"#)),
                executes(checkout(r#"{"customer":"a","cart":"bc"}"#)),
                executes(checkout(r#"{"customer":"a\",\"/cart","cart":"bc"}"#)),
                executes(checkout(r#"{"customer":"c","cart":"ab"}"#)),
            ];
        "natural-key-required": "a body without the member, or without JSON, has no key"
            .given(required.clone())
            => steps [
                refused("key-missing", checkout(r#"{"customer":"ada"}"#)),
                refused("key-missing", checkout(r#"{"customer":"ada"}"#).key("a")),
                refused("key-missing", Request::post("/checkouts").body("text/plain", &b"ada 7"[..])),
                refused("key-missing", Request::post("/checkouts")),
                passes(Request::new("DELETE", "/checkouts/1")),
            ];
        "natural-key-optional": "if no key is required, a request without one passes unprotected"
            .given(optional.clone())
            => steps [
                passes(checkout(r#"{"customer":"ada"}"#)),
                passes(checkout(r#"{"customer":"ada"}"#)),
                passes(pay()),
                passes(Request::post("/checkouts").body("text/plain", &b"ada 7"[..])),
                executes(checkout(r#"{"customer":"ada","cart":7}"#)),
                replays(4, checkout(r#"{"customer":"ada","cart":7}"#)),
            ];
        "natural-key-unreadable": "a body that may be JSON and that not every program reads alike is refused, even if no key is required"
            .given(optional.clone())
            => steps {
                let bodies = [
                    "{", "ada 7", r#"{"customer":"ada","cart":NaN}"#, r#"{"customer":"ada","cart":7,"cart":8}"#,
                    r#"{"customer":"ada","cart":9007199254740993}"#, "\u{feff}{\"customer\":\"ada\",\"cart\":7}",
                ];
                let invalid = |body: &str| refused("key-invalid", checkout(body));
                let mut steps: Vec<_> = bodies.into_iter().map(invalid).collect();
                let body = r#"{"customer":"ada","cart":7}"#;
                let as_text = |body: &str| Request::post("/checkouts").body("text/plain", body.to_owned());
                steps.push(refused("key-invalid", checkout(body).field("content-encoding", "br")));
                steps.push(refused("key-invalid", as_text("{\"customer\"")));
                steps.push(executes(as_text(body)));
                steps.push(refused("key-reused", checkout(body)));
                steps.push(passes(Request::post("/checkouts").body("application/x-www-form-urlencoded", "cart=7")));
                steps
            };
        "natural-key-callers-are-separate": "the values of two callers never meet"
            .given(Plan { scope: Callers::RequiredHeader("x-tenant"), ..optional })
            => steps {
                let of = |tenant: &str| checkout(r#"{"customer":"ada","cart":7}"#).field("x-tenant", tenant);
                vec![executes(of("a")), executes(of("b")), replays(0, of("a")), replays(1, of("b"))]
            };
    }
}

async fn in_words(mut world: World) {
    world.start().await;
    let first = world.send(checkout(r#"{"customer":"ada","cart":7,"amount":5}"#)).await;
    assert_eq!(first.status(), 201, "{first:?}");
    let refusal = world.send(checkout(r#"{"customer":"ada","cart":7,"amount":6}"#)).await;
    assert_refusal("key-reused", &refusal);
    let problem = refusal.json();
    let detail = problem["detail"].as_str().unwrap_or_default();
    assert!(detail.contains("built from members") && !detail.contains("new key"), "{detail}");
}

fn checkout(body: impl Into<String>) -> Request {
    Request::post("/checkouts").json(body)
}
