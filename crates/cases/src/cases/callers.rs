//! Callers that a verified token names, and replays that the service allows.

use std::time::Duration;

use oncegate_testkit::Latch;
use serde_json::{Value, json};

use super::pay_as;
use crate::backend::{Decision, Script};
use crate::client::Request;
use crate::plan::{Callers, Plan};
use crate::table::{Case, Step, assert_refusal, assert_replay, executes, refused, replays};
use crate::tokens::Token;
use crate::world::World;

const OTHER_BODY: &str = r#"{"amount":5}"#;

pub(super) fn cases() -> Vec<Case> {
    let tokens = Plan { scope: Callers::Parts(&["jwt:sub"]), ..Plan::default() };
    let credentials = Callers::RequiredHeader("authorization");
    let asked = Plan { scope: credentials, authorize: true, ..Plan::default() };
    cases! {
        "token-names-the-caller": "a verified token names the caller, also after it was renewed"
            .given(tokens.clone())
            => steps {
                let ada = || Token::of("ada");
                vec![
                    executes(with(ada())),
                    replays(0, with(ada().ends_in(60))),
                    executes(with(Token::of("eve"))),
                    // The same name by another issuer is another caller, and a number is no text.
                    executes(with(ada().with("iss", json!("partner")))),
                    executes(with(Token::of("7"))),
                    executes(with(ada().with("sub", json!(7)))),
                    replays(2, with(Token::of("eve"))),
                    replays(3, with(ada().with("iss", json!("partner")))),
                    refused("key-reused", with(ada()).json(OTHER_BODY)),
                    replays(0, with(ada())),
                ]
            };
        "token-not-verified-names-no-caller":
            "a request whose token cannot be verified is neither executed nor gets a response of the caller that it names"
            .given(tokens.clone())
            => steps (unverified);
        "token-and-tenant": "a token and a header identify the caller together"
            .given(Plan {
                scope: Callers::Parts(&["jwt:sub", "required-header:x-tenant"]),
                by_file: true,
                ..Plan::default()
            })
            => steps {
                let of = |subject: &str, tenant: &str| with(Token::of(subject)).field("X-Tenant", tenant);
                vec![
                    executes(of("ada", "a")),
                    executes(of("ada", "b")),
                    executes(of("eve", "a")),
                    replays(0, of("ada", "a")),
                    replays(1, of("ada", "b")),
                    refused("scope-unavailable", with(Token::of("ada"))),
                    unverified_step(with(Token::of("ada").forged()).field("X-Tenant", "a")),
                ]
            };
        "replays-are-authorized": "the service decides before each replay, and not before an execution or a refusal"
            .given(asked.clone())
            => steps {
                let ask = |decision: Decision| decision.asked_by(pay_as("a").field("Authorization", "Bearer ada"));
                vec![
                    executes(ask(Decision::Deny)),
                    replays(0, ask(Decision::Allow)),
                    refused("replay-denied", ask(Decision::Deny)),
                    refused("replay-denied", ask(Decision::Hide)).status(404),
                    refused("authorization-unavailable", ask(Decision::Away)),
                    refused("authorization-unavailable", ask(Decision::None)),
                    refused("key-reused", ask(Decision::Away).json(OTHER_BODY)),
                    replays(0, ask(Decision::Allow)),
                ]
            };
        "replays-to-a-token-are-authorized": "the service is asked only about a caller that a token names in this request"
            .given(Plan { scope: Callers::Parts(&["jwt:sub"]), ..asked.clone() })
            => steps {
                let ask = |token: Token, decision: Decision| decision.asked_by(with(token));
                let ada = || Token::of("ada");
                vec![
                    executes(ask(ada(), Decision::Deny)),
                    executes(ask(Token::of("eve"), Decision::Deny)),
                    refused("replay-denied", ask(ada(), Decision::Deny)),
                    unverified_step(ask(ada().ends_in(-3600), Decision::Allow)),
                    unverified_step(ask(ada().forged(), Decision::Allow)),
                    replays(0, ask(ada().ends_in(60), Decision::Allow)),
                    replays(1, ask(Token::of("eve"), Decision::Allow)),
                ]
            };
        "replays-to-duplicates-that-wait-are-authorized":
            "a duplicate that waits for the response gets it only if the service allows it"
            .given(Plan { wait: Some(Duration::from_secs(10)), ..asked })
            .with_every_framework()
            => run (waiting);
    }
}

/// A payment under the key `a`, with this token.
fn with(token: Token) -> Request {
    pay_as("a").field("Authorization", token.bearer())
}

fn unverified_step(request: Request) -> Step {
    refused("scope-unavailable", request).status(401)
}

fn unverified() -> Vec<Step> {
    let ada = || Token::of("ada");
    let tokens = [
        ada().ends_in(-3600),
        ada().forged(),
        ada().of_key("unknown"),
        ada().with("nbf", json!(4_000_000_000_u32)),
        ada().with("aud", json!("another service")),
        ada().with("aud", Value::Null),
        ada().with("exp", Value::Null),
        ada().with("sub", Value::Null),
        ada().with("sub", json!("")),
        ada().with("sub", json!(["ada"])),
        ada().with("iss", json!(["partner"])),
    ];
    let mut steps = vec![executes(with(ada()))];
    steps.extend(tokens.into_iter().map(|token| unverified_step(with(token))));
    let valid = ada().bearer();
    // The claims of a valid token without a signature, and with a part of it.
    let (signed, signature) = valid.rsplit_once('.').expect("a signature");
    let claims = signed.rsplit_once('.').expect("claims").1;
    let texts = [
        format!("Bearer eyJhbGciOiJub25lIn0.{claims}."),
        format!("{signed}."),
        format!("{signed}.{}", &signature[1..]),
        valid.replacen("Bearer", "Basic", 1),
        "Bearer ada".to_owned(),
        "Bearer".to_owned(),
    ];
    let by_text = texts.into_iter().map(|text| unverified_step(pay_as("a").field("Authorization", text)));
    steps.extend(by_text);
    steps.push(unverified_step(pay_as("a")));
    steps.push(unverified_step(with(ada()).field("Authorization", Token::of("eve").bearer())));
    steps.push(replays(0, with(ada())));
    steps
}

async fn waiting(world: World) {
    let ask = |decision: Decision| decision.asked_by(pay_as("a").field("Authorization", "Bearer ada"));
    let done = Latch::new();
    let first = world.start_send(ask(Decision::Deny).script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    let refused = world.start_send(ask(Decision::Deny));
    let allowed = world.start_send(ask(Decision::Allow));
    // A waiting request is not visible from outside. Check that they have no response.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!refused.is_finished() && !allowed.is_finished(), "they did not wait");
    done.open();
    let first = first.await.unwrap().expect("a response");
    assert_eq!(first.status(), 201, "{first:?}");
    assert_refusal("replay-denied", &refused.await.unwrap().expect("a response"));
    let allowed = allowed.await.unwrap().expect("a response");
    assert_replay(&world.plan, &ask(Decision::Allow), &first, &allowed);
    assert_eq!(world.backend.effects(), 1);
}
