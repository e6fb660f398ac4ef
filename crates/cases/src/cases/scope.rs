//! The caller of a key.

use oncegate_http::{AuthorityRole, KeyScope};
use oncegate_testkit::Latch;

use super::{PAYMENT, pay_as};
use crate::backend::{MARK, Script};
use crate::client::Request;
use crate::plan::{Callers, Plan};
use crate::table::{
    Case, Step, Target, assert_echo, assert_fresh, assert_problem, assert_refusal, assert_replay, executes,
    passes, refused, replays,
};
use crate::world::{Deployment, World};

const TENANT: Callers = Callers::Header("x-tenant");

/// Fields of a name that is in no list.
const LOOK_LIKE_CREDENTIALS: [&str; 23] = [
    "X-Authorization",
    "X-Api-Token",
    "Token",
    "X-Token",
    "X-Auth",
    "X-OAuth-Token",
    "Authentication",
    "X-Vault-Token",
    "X-Gitlab-Token",
    "X-Shopify-Access-Token",
    "X-JWT-Assertion",
    "X-Forwarded-Preferred-Username",
    "X-Forwarded-User",
    "X-User-Id",
    "Signature",
    "Signature-Input",
    "DPoP",
    "X_Api_Key",
    "X_Auth_Token",
    "X-RapidAPI-Key",
    "X-Functions-Key",
    "Mcp-Session-Id",
    "X-Client-Secret",
];

const LOOK_LIKE_NONE: [&str; 16] = [
    "X-CSRF-Token",
    "X-XSRF-TOKEN",
    "RequestVerificationToken",
    "X-Author",
    "X-Authority",
    "X-Forwarded-Host",
    "X-Forwarded-Proto",
    "Traceparent",
    "Sec-WebSocket-Key",
    "Sec-Fetch-User",
    "WWW-Authenticate",
    "X-Idempotency-Token",
    "X-Request-Id",
    "User-Agent",
    "Keyboard",
    "X-Cache-Key",
];

pub(super) fn cases() -> Vec<Case> {
    let tenants = Plan { scope: TENANT, ..Plan::default() };
    let credentials = Plan { scope: Callers::Header("authorization"), ..Plan::default() };
    cases! {
        "scope-two-callers": "two callers with the same key are independent"
            .given(tenants.clone())
            => steps {
                let other = || from("b", "a").json(r#"{"amount":5}"#);
                vec![
                    executes(from("a", "a")),
                    executes(other()),
                    replays(0, from("a", "a")),
                    replays(1, other()),
                    refused("key-reused", from("b", "a")),
                ]
            };
        "scope-whole-credential": "callers are identified by their whole credential"
            .given(credentials.clone())
            => steps {
                let with = |credential: &str| pay_as("a").field("Authorization", credential);
                vec![
                    executes(with("Bearer one")),
                    executes(with("Bearer two")),
                    executes(with("Bearer on")),
                    executes(with("bearer one")),
                    executes(with("Basic b25l")),
                    replays(0, with("Bearer one")),
                    replays(1, with("Bearer two")),
                ]
            };
        "scope-absent-header-is-one-caller": "all callers without the field are one caller, different from the others"
            .given(tenants.clone())
            => steps [
                executes(pay_as("a")),
                replays(0, pay_as("a")),
                executes(from("a", "a")),
                replays(0, from("", "a")),
                replays(0, pay_as("a")),
            ];
        "scope-doubled-header": "a caller that sends the header twice gets no response of a caller that sends it once"
            .given(tenants.clone())
            => steps [
                executes(from("a", "a")),
                executes(from("b", "a")),
                Step::not_replayed(from("a", "a").field("X-Tenant", "b")),
                Step::not_replayed(from("b", "a").field("X-Tenant", "a")),
            ];
        "new-keys-of-a-caller-are-limited": "a caller at its rate limit gets no new key, and still its responses"
            .given(Plan { new_keys_per_hour: Some(2), ..tenants.clone() })
            .not(Target::Deployment(Deployment::TwoSidecars), "each sidecar counts by itself")
            => steps [
                executes(from("a", "1")),
                executes(from("a", "2")),
                refused("rate-limited", from("a", "3")),
                replays(0, from("a", "1")),
                executes(from("b", "3")),
                refused("rate-limited", from("a", "3")),
            ];
        "attempts-under-a-key-are-limited": "a client that repeats a request in a loop is told to wait"
            .given(Plan { attempts_per_hour: Some(2), ..tenants.clone() })
            .not(Target::Deployment(Deployment::TwoSidecars), "each sidecar counts by itself")
            => steps [
                executes(from("a", "1")),
                replays(0, from("a", "1")),
                refused("rate-limited", from("a", "1")),
                executes(from("a", "2")),
                executes(from("b", "1")),
            ];
        "scope-is-no-oracle": "no response to one caller depends on what another one did"
            .given(tenants.clone())
            => run (no_oracle);
        "key-of-the-caller": "a key that belongs to a caller belongs to no other one"
            .given(Plan { key_scope: Some(KeyScope::Caller), ..tenants.clone() })
            => steps {
                let refund =
                    |tenant: &str| Request::post("/refunds").key("a").field("X-Tenant", tenant).json(PAYMENT);
                vec![
                    executes(from("a", "a")),
                    executes(refund("b")),
                    refused("key-reused", refund("a")),
                    refused("key-reused", from("b", "a")),
                    replays(0, from("a", "a")),
                    replays(1, refund("b")),
                ]
            };
        "scope-single-tenant": "single tenant: all requests belong to one caller"
            => steps [
                executes(pay_as("a").field("Authorization", "Bearer one")),
                replays(0, pay_as("a").field("Authorization", "Bearer two")),
                replays(0, pay_as("a")),
            ];
        "scope-separators-do-not-collide": "no separator within caller, path or key makes two records collide"
            .given(tenants)
            => steps {
                let at = |tenant: &str, path: &str, key: &str| {
                    Request::post(path).key(format!("\"{key}\"")).field("X-Tenant", tenant).json(PAYMENT)
                };
                let apart = [
                    ("a", "/p", "b:c"),
                    ("a:b", "/p", "c"),
                    ("a", "/p/b", "c"),
                    ("a", "/p", "/b:c"),
                    ("a:POST", "/p", "c"),
                    ("a|/p", "/p", "c"),
                    ("a", "/p", "c"),
                    ("a", "/p", ":c"),
                    ("a:", "/p", "c"),
                    ("a/p", "/p", "c"),
                    ("", "/p", "a:c"),
                ];
                let first = apart.iter().map(|(tenant, path, key)| executes(at(tenant, path, key)));
                let again = apart
                    .iter()
                    .enumerate()
                    .map(|(n, (tenant, path, key))| replays(n, at(tenant, path, key)));
                first.chain(again).collect()
            };
        "scope-required": "a required caller header: requests without it are refused"
            .given(Plan { scope: Callers::RequiredHeader("x-tenant"), ..Plan::default() })
            => steps [
                refused("scope-unavailable", pay_as("a")),
                executes(from("a", "a")),
                refused("scope-unavailable", pay_as("a")),
                replays(1, from("a", "a")),
            ];
        "scope-not-set-with-a-credential":
            "a field that looks like a credential is one, however its name is spelt; others are none"
            .given(Plan { scope: Callers::NotSet, ..Plan::default() })
            => steps {
                let with = |field: &str| pay_as("a").field(field, "secret");
                let mut steps = vec![executes(pay_as("a"))];
                steps.extend(LOOK_LIKE_CREDENTIALS.map(|field| refused("scope-not-set", with(field))));
                steps.extend(LOOK_LIKE_NONE.map(|field| replays(0, with(field))));
                // One of the two is the caller's, and the other one may be that of a gateway.
                for field in LOOK_LIKE_CREDENTIALS {
                    let both = with(field).field("Authorization", "Bearer gateway");
                    // New with each request, or a session next to the token that names its caller.
                    let is_other =
                        ["Signature", "Signature-Input", "DPoP", "Mcp-Session-Id"].contains(&field);
                    if !is_other {
                        steps.push(refused("scope-not-set", both));
                    }
                }
                let first = steps.len();
                steps.push(executes(pay_as("a").field("Authorization", "Bearer one")));
                for field in ["Signature", "DPoP", "Cookie", "Mcp-Session-Id", "X-CSRF-Token"] {
                    steps.push(replays(first, with(field).field("Authorization", "Bearer one")));
                }
                steps
            };
        "scope-header-with-underscores": "a caller header with `_` instead of `-` is refused, because many services treat both alike"
            .given(Plan { scope: TENANT, ..Plan::default() })
            => steps [
                executes(from("a", "a")),
                refused("scope-unavailable", pay_as("a").field("X_Tenant", "a")),
                refused("scope-unavailable", from("a", "a").field("x_tenant", "b")),
                replays(0, from("a", "a").field("X_Tenant", "")),
            ];
        "scope-refusals-have-the-key": "a client that matches responses by their keys finds those of refused requests, too"
            .given(Plan { scope: Callers::NotSet, ..Plan::default() })
            => run (refusals_have_the_key);
        "scope-not-set":
            "while it is not said how callers are told apart, a request with a credential other than Authorization is refused"
            .given(Plan { scope: Callers::NotSet, ..Plan::default() })
            => steps {
                let session = |sid: &str| pay_as("a").field("Cookie", format!("theme=dark; sid={sid}"));
                vec![
                    executes(pay_as("a")),
                    replays(0, pay_as("a")),
                    refused("scope-not-set", session("ada")),
                    refused("scope-not-set", session("eve")),
                    refused("scope-not-set", session("eve").field("Authorization", "")),
                    refused("scope-not-set", session("eve").field("Authorization", "Bearer")),
                    refused("scope-not-set", pay_as("a").field("X-Api-Key", "secret")),
                    refused("scope-not-set", pay_as("b").field("X-Auth-Token", "secret")),
                    // Nothing else is checked before.
                    refused("scope-not-set", pay_as("\"broken").field("X-Api-Key", "secret")),
                    replays(0, pay_as("a").field("X-Api-Key", "").field("Cookie", " ")),
                    // All users behind a gateway have the same `Basic`.
                    refused("scope-not-set", session("ada").field("Authorization", "Basic Z2F0ZQ==")),
                    refused("scope-not-set", pay_as("a").field("Authorization", "Digest username=\"a\", nc=00000001")),
                    executes(session("ada").field("Authorization", "Bearer ada")),
                    replays(12, session("other").field("Authorization", "Bearer ada")),
                    passes(Request::post("/payments").json(PAYMENT).field("Cookie", "sid=eve")),
                    refused("scope-unavailable", pay_as("a").field("Authorization", "a").field("Authorization", "a")),
                ]
            };
        "scope-set-to-the-default": "with the default scope set, a request needs no more than Authorization"
            .given(credentials.clone())
            => steps {
                let session = |sid: &str| pay_as("a").field("Cookie", format!("sid={sid}"));
                vec![executes(session("ada")), replays(0, session("eve")), replays(0, pay_as("a"))]
            };
        "scope-cookie": "a cookie identifies the caller at any position"
            .given(Plan { scope: Callers::Parts(&["required-cookie:sid"]), ..Plan::default() })
            => steps {
                let with = |cookies: &str| pay_as("a").field("Cookie", cookies);
                vec![
                    executes(with("sid=ada")),
                    executes(with("sid=eve")),
                    replays(0, with("theme=dark; sid=ada; lang=de")),
                    replays(1, with("sid=eve; sid=eve")),
                    refused("scope-unavailable", with("sid=ada; sid=eve")),
                    refused("scope-unavailable", with("sid=")),
                    refused("scope-unavailable", with("SID=ada; xsid=ada")),
                    refused("scope-unavailable", pay_as("a").field("Authorization", "Bearer ada")),
                ]
            };
        "scope-of-parts": "a tenant and a session identify the caller together"
            .given(Plan {
                scope: Callers::Parts(&["cookie:sid", "required-header:x-tenant"]),
                by_file: true,
                ..Plan::default()
            })
            => steps {
                let with = |tenant: &str, sid: &str| from(tenant, "a").field("Cookie", format!("sid={sid}"));
                vec![
                    executes(with("t", "s")),
                    executes(with("t", "r")),
                    executes(with("u", "s")),
                    executes(with("ts", "")),
                    executes(from("t", "a")),
                    replays(0, with("t", "s")),
                    replays(2, with("u", "s")),
                    replays(4, from("t", "a").field("Cookie", "sid=")),
                    refused("scope-unavailable", with("", "s")),
                    refused("scope-unavailable", pay_as("a").field("Cookie", "sid=s")),
                ]
            };
        "scope-empty-is-absent": "an empty header identifies no caller; without Authorization it is a 401 that asks for it"
            .given(Plan { scope: Callers::RequiredHeader("authorization"), ..Plan::default() })
            => run (empty_is_absent);
        "host-is-compared": "the same key with another host is not the same request"
            => steps {
                let to = |host| pay_as("a").host(host);
                vec![
                    executes(to("tenant-a.test")),
                    replays(0, to("Tenant-A.TEST:80")),
                    replays(0, to("tenant-a.test:443")),
                    // It may be the same request, sent to another address of the service: with a new key it would run twice.
                    refused("host-differs", to("tenant-b.test")),
                    refused("host-differs", to("tenant-a.test:8443")),
                    refused("key-reused", to("tenant-b.test").json(r#"{"amount":5}"#)),
                    refused("key-reused", to("tenant-a.test").json(r#"{"amount":5}"#)),
                    replays(0, to("tenant-a.test")),
                ]
            };
        "host-ignored": "a service of several names may ignore the host"
            .given(Plan { authority: Some(AuthorityRole::Ignored), ..Plan::default() })
            => steps [executes(pay_as("a").host("a.test")), replays(0, pay_as("a").host("b.test:8080"))];
        "host-scope": "if hosts are tenants, each has its own keys"
            .given(Plan { authority: Some(AuthorityRole::Scope), scope: TENANT, ..Plan::default() })
            => steps {
                let to = |host| from("t", "a").host(host);
                vec![
                    executes(to("a.test")),
                    executes(to("b.test")),
                    replays(0, to("A.test:443")),
                    replays(1, to("b.test")),
                    refused("key-reused", to("b.test").json(r#"{"amount":5}"#)),
                ]
            };
        "secrets-are-not-shown": "no response and no line of output shows the key, credential or body of another request"
            .given(credentials)
            => run {
                |mut world| Box::pin(async move { secrets(&mut world).await })
            };
    }
}

fn from(tenant: &str, key: &str) -> Request {
    pay_as(key).field("X-Tenant", tenant)
}

async fn empty_is_absent(world: World) {
    for value in [None, Some(""), Some("  "), Some("Bearer"), Some("basic ")] {
        let request = match value {
            Some(value) => pay_as("a").field("Authorization", value),
            None => pay_as("a"),
        };
        let response = world.send(request).await;
        assert_problem("scope-unavailable", 401, &response);
        assert!(response.get("www-authenticate").is_some(), "{response:?}");
    }
    assert_eq!(world.backend.effects(), 0);
    let known = pay_as("a").field("Authorization", "Bearer a");
    assert_fresh(&world.plan, &known, &world.send(known.clone()).await);
}

async fn no_oracle(world: World) {
    let done = Latch::new();
    let held = world.start_send(from("a", "running").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    let finished = world.send(from("a", "finished")).await;
    assert_eq!(finished.status(), 201);
    // For another caller these keys are new, with any request.
    for key in ["running", "finished", "never used"] {
        let key = format!("\"{key}\"");
        for body in [PAYMENT, "{}"] {
            let tenant = format!("b-{}", body.len());
            let request = from(&tenant, &key).json(body);
            let before = world.backend.effects();
            let response = world.send(request.clone()).await;
            assert_fresh(&world.plan, &request, &response);
            assert_eq!((response.status(), world.backend.effects()), (201, before + 1), "{response:?}");
        }
    }
    assert_refusal("request-in-progress", &world.send(from("a", "running")).await);
    done.open();
    held.await.unwrap().expect("a response");
    assert_replay(&world.plan, &from("a", "finished"), &finished, &world.send(from("a", "finished")).await);
}

async fn secrets(world: &mut World) {
    let secrets = ["key-4f8a1c", "Bearer credential-77aa", "body-9d3e", MARK];
    let request = |body: &str| {
        pay_as(secrets[0]).field("Authorization", secrets[1]).json(format!("{{\"a\":\"{body}\"}}"))
    };
    assert_eq!(world.send(request(secrets[2])).await.status(), 201);
    world.send(request(secrets[2])).await;
    let refused = world.send(request("other")).await;
    assert_refusal("key-reused", &refused);
    let shown = String::from_utf8_lossy(&refused.body).into_owned();
    world.send(pay_as("key-4f8a1c,")).await;
    let printed = if world.deployment == crate::world::Deployment::Sidecar {
        world.sidecar().printed()
    } else {
        String::new()
    };
    for secret in secrets {
        assert!(!shown.contains(secret), "told: {secret} in {shown}");
        assert!(!printed.contains(secret), "printed: {secret} in {printed}");
    }
}

async fn refusals_have_the_key(world: World) {
    for (key, has_key) in [("a", true), ("\"a\"", true), ("\"broken", false)] {
        let request = pay_as(key).field("X-Api-Key", "secret");
        let response = world.send(request.clone()).await;
        assert_refusal("scope-not-set", &response);
        match has_key {
            true => assert_echo(&world.plan, &request, &response),
            false => assert_eq!(response.get("idempotency-key"), None, "{response:?}"),
        }
    }
}
