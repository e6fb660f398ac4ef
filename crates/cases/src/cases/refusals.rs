//! The texts of refusals, the replay marker, and responses that are not stored.

use super::{PAYMENT, pay, pay_as};
use crate::backend::Script;
use crate::client::Request;
use crate::plan::Plan;
use crate::table::{Case, assert_refusal, executes, refused, replays};

pub(super) fn cases() -> Vec<Case> {
    cases! {
        "refusal-names-the-field": "a refusal for a key names the field that carries it"
            .given(Plan { require_key: true, key_header: Some("x-request-key"), ..Plan::default() })
            => run {
                |world| {
                    Box::pin(async move {
                        for (slug, request) in
                            [("key-missing", pay()), ("key-invalid", pay().field("X-Request-Key", "\"broken"))]
                        {
                            let response = world.send(request).await;
                            assert_refusal(slug, &response);
                            let detail = response.json()["detail"].as_str().expect("a detail").to_owned();
                            assert!(detail.contains("X-Request-Key"), "{response:?}");
                            assert_eq!(response.get("link"), None, "{response:?}");
                        }
                    })
                }
            };
        "refusal-links-to-documentation":
            "a refusal links to the documentation of keys (draft-07, 2.7), and other responses do not"
            .given(Plan {
                require_key: true,
                documentation: Some("https://developer.example.com/keys"),
                ..Plan::default()
            })
            => run {
                |world| {
                    Box::pin(async move {
                        const LINK: Option<&str> =
                            Some("<https://developer.example.com/keys>; rel=\"describedby\"");
                        let missing = world.send(pay()).await;
                        assert_refusal("key-missing", &missing);
                        assert_eq!(missing.get("link"), LINK, "{missing:?}");
                        assert_eq!(world.send(pay_as("a")).await.get("link"), None);
                        assert_eq!(world.send(pay_as("a")).await.get("link"), None);
                        let reused = world.send(pay_as("a").json("{}")).await;
                        assert_refusal("key-reused", &reused);
                        assert_eq!(reused.get("link"), LINK, "{reused:?}");
                    })
                }
            };
        "refusal-of-key-lengths": "a pattern limits the length of a key"
            .given(Plan { key_format: Some("pattern:.{4,8}"), ..Plan::default() })
            => steps [
                refused("key-invalid", pay_as("abc")),
                executes(pay_as("abcd")),
                executes(pay_as("abcdefgh")),
                refused("key-invalid", pay_as("abcdefghi")),
            ];
        "replay-marker-of-another-name": "a replay is marked by the configured field"
            .given(Plan { replay_marker: Some("x-repeat"), ..Plan::default() })
            => steps [executes(pay_as("a")), replays(0, pay_as("a"))];
        "release-statuses": "a response of a configured status frees the key for the corrected request"
            .given(Plan { release_statuses: Some(&[422, 503]), ..Plan::default() })
            => steps {
                let broken = |status| pay().json("{}").script(Script::status(status));
                vec![
                    executes(broken(422).key("a")).status(422),
                    executes(pay_as("a")),
                    replays(1, pay_as("a")),
                    executes(broken(400).key("b")).status(400),
                    replays(3, broken(400).key("b")),
                    refused("key-reused", pay_as("b")),
                    executes(broken(503).key("c")).status(503),
                    executes(pay_as("c")),
                    // The directive of the service wins.
                    executes(
                        Request::post("/payments")
                            .json(PAYMENT)
                            .key("d")
                            .script(Script::status(422).field("idempotency-store", "replay")),
                    )
                    .status(422),
                    replays(8, pay_as("d")),
                ]
            };
    }
}
