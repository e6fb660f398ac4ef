//! Whose key it is.

use oncegate_http::{AuthorityRole, KeyScope};
use oncegate_testkit::Latch;

use super::{PAYMENT, pay_as};
use crate::backend::{MARK, Script};
use crate::client::Request;
use crate::plan::{Callers, Plan};
use crate::table::{
    Case, Step, assert_echo, assert_fresh, assert_problem, assert_refusal, assert_replay, executes, passes,
    refused, replays,
};
use crate::world::World;

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
    vec![
        Case::steps(
            "C110-two-callers",
            "two callers with one key have nothing to do with each other",
            || {
                let other = || from("b", "a").json(r#"{"amount":5}"#);
                vec![
                    executes(from("a", "a")),
                    executes(other()),
                    replays(0, from("a", "a")),
                    replays(1, other()),
                    refused("key-reused", from("b", "a")),
                ]
            },
        )
        .given(tenants.clone()),
        Case::steps("C110-credentials", "callers are told apart by their whole credential", || {
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
        })
        .given(credentials.clone()),
        Case::steps(
            "C110-nobody",
            "callers without the field are one caller, and not any of the others",
            || {
                vec![
                    executes(pay_as("a")),
                    replays(0, pay_as("a")),
                    executes(from("a", "a")),
                    replays(0, from("", "a")),
                    replays(0, pay_as("a")),
                ]
            },
        )
        .given(tenants.clone()),
        Case::steps(
            "C110-two-lines",
            "a caller who sends the field twice is nobody whom one line names",
            || {
                vec![
                    executes(from("a", "a")),
                    executes(from("b", "a")),
                    Step::not_replayed(from("a", "a").field("X-Tenant", "b")),
                    Step::not_replayed(from("b", "a").field("X-Tenant", "a")),
                ]
            },
        )
        .given(tenants.clone()),
        Case::code("C110-no-oracle", "no answer to one caller depends on what another one did", |world| {
            Box::pin(no_oracle(world))
        })
        .given(tenants.clone()),
        Case::steps("C110-caller-scope", "a key that belongs to the caller belongs to this one only", || {
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
        })
        .given(Plan { key_scope: Some(KeyScope::Caller), ..tenants.clone() }),
        Case::steps("C110-single-tenant", "where there is one caller only, nobody is told apart", || {
            vec![
                executes(pay_as("a").field("Authorization", "Bearer one")),
                replays(0, pay_as("a").field("Authorization", "Bearer two")),
                replays(0, pay_as("a")),
            ]
        }),
        Case::steps(
            "C111-separators",
            "no separator within caller, path or key makes two records meet",
            || {
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
            },
        )
        .given(tenants),
        Case::steps("C110-required", "where callers must say who they are, nobody else gets in", || {
            vec![
                refused("scope-unavailable", pay_as("a")),
                executes(from("a", "a")),
                refused("scope-unavailable", pay_as("a")),
                replays(1, from("a", "a")),
            ]
        })
        .given(Plan { scope: Callers::RequiredHeader("x-tenant"), ..Plan::default() }),
        Case::steps(
            "scope-not-set-by-the-look-of-it",
            "a field that looks like a credential is one, however its name is spelt; others are none",
            || {
                let with = |field: &str| pay_as("a").field(field, "secret");
                let mut steps = vec![executes(pay_as("a"))];
                steps.extend(LOOK_LIKE_CREDENTIALS.map(|field| refused("scope-not-set", with(field))));
                steps.extend(LOOK_LIKE_NONE.map(|field| replays(0, with(field))));
                // One of the two is the caller's, and the other one may be that of a gateway.
                for field in LOOK_LIKE_CREDENTIALS {
                    let both = with(field).field("Authorization", "Bearer gateway");
                    let is_new_each_time = ["Signature", "Signature-Input", "DPoP"].contains(&field);
                    if !is_new_each_time {
                        steps.push(refused("scope-not-set", both));
                    }
                }
                let first = steps.len();
                steps.push(executes(pay_as("a").field("Authorization", "Bearer one")));
                for field in ["Signature", "DPoP", "Cookie", "X-CSRF-Token"] {
                    steps.push(replays(first, with(field).field("Authorization", "Bearer one")));
                }
                steps
            },
        )
        .given(Plan { scope: Callers::NotSet, ..Plan::default() }),
        Case::steps(
            "scope-by-a-field-in-another-spelling",
            "many services take `_` for `-`, so a caller in that spelling is not let through as nobody",
            || {
                vec![
                    executes(from("a", "a")),
                    refused("scope-unavailable", pay_as("a").field("X_Tenant", "a")),
                    refused("scope-unavailable", from("a", "a").field("x_tenant", "b")),
                    replays(0, from("a", "a").field("X_Tenant", "")),
                ]
            },
        )
        .given(Plan { scope: TENANT, ..Plan::default() }),
        Case::code(
            "scope-refusals-have-the-key",
            "a client that matches answers by their keys finds those of refused requests, too",
            |world| Box::pin(refusals_have_the_key(world)),
        )
        .given(Plan { scope: Callers::NotSet, ..Plan::default() }),
        Case::steps(
            "scope-not-set",
            "while it is not said how callers are told apart, a request with a credential other than Authorization is refused",
            || {
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
                    // Nothing else is looked at before.
                    refused("scope-not-set", pay_as("\"broken").field("X-Api-Key", "secret")),
                    replays(0, pay_as("a").field("X-Api-Key", "").field("Cookie", " ")),
                    // All users of a gate have one `Basic`.
                    refused("scope-not-set", session("ada").field("Authorization", "Basic Z2F0ZQ==")),
                    refused("scope-not-set", pay_as("a").field("Authorization", "Digest username=\"a\", nc=00000001")),
                    executes(session("ada").field("Authorization", "Bearer ada")),
                    replays(12, session("other").field("Authorization", "Bearer ada")),
                    passes(Request::post("/payments").json(PAYMENT).field("Cookie", "sid=eve")),
                    refused("scope-unavailable", pay_as("a").field("Authorization", "a").field("Authorization", "a")),
                ]
            },
        )
        .given(Plan { scope: Callers::NotSet, ..Plan::default() }),
        Case::steps(
            "scope-set-to-the-default",
            "where it is said that Authorization tells callers apart, nobody asks for more",
            || {
                let session = |sid: &str| pay_as("a").field("Cookie", format!("sid={sid}"));
                vec![executes(session("ada")), replays(0, session("eve")), replays(0, pay_as("a"))]
            },
        )
        .given(credentials.clone()),
        Case::steps("scope-cookie", "a cookie tells callers apart, wherever it stands", || {
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
        })
        .given(Plan { scope: Callers::Parts(&["required-cookie:sid"]), ..Plan::default() }),
        Case::steps("scope-of-parts", "a tenant and a session tell callers apart together", || {
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
        })
        .given(Plan {
            scope: Callers::Parts(&["cookie:sid", "required-header:x-tenant"]),
            by_file: true,
            ..Plan::default()
        }),
        Case::code(
            "scope-empty-is-absent",
            "an empty field identifies nobody; without Authorization it is a 401 that asks for it",
            |world| Box::pin(empty_is_absent(world)),
        )
        .given(Plan { scope: Callers::RequiredHeader("authorization"), ..Plan::default() }),
        Case::steps("host-is-compared", "the same key with another host is not the same request", || {
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
        }),
        Case::steps("host-ignored", "a service of several names may ignore the host", || {
            vec![executes(pay_as("a").host("a.test")), replays(0, pay_as("a").host("b.test:8080"))]
        })
        .given(Plan { authority: Some(AuthorityRole::Ignored), ..Plan::default() }),
        Case::steps("host-scope", "where hosts are tenants, each has keys of its own", || {
            let to = |host| from("t", "a").host(host);
            vec![
                executes(to("a.test")),
                executes(to("b.test")),
                replays(0, to("A.test:443")),
                replays(1, to("b.test")),
                refused("key-reused", to("b.test").json(r#"{"amount":5}"#)),
            ]
        })
        .given(Plan { authority: Some(AuthorityRole::Scope), scope: TENANT, ..Plan::default() }),
        Case::code(
            "C118-secrets-stay",
            "no answer and no line that is printed shows another's key, credential or body",
            |mut world| Box::pin(async move { secrets(&mut world).await }),
        )
        .given(credentials),
    ]
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
        let answer = world.send(request).await;
        assert_problem("scope-unavailable", 401, &answer);
        assert!(answer.get("www-authenticate").is_some(), "{answer:?}");
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
    // To somebody else these keys are as fresh as any, whatever is sent with them.
    for key in ["running", "finished", "never used"] {
        let key = format!("\"{key}\"");
        for body in [PAYMENT, "{}"] {
            let tenant = format!("b-{}", body.len());
            let request = from(&tenant, &key).json(body);
            let before = world.backend.effects();
            let answer = world.send(request.clone()).await;
            assert_fresh(&world.plan, &request, &answer);
            assert_eq!((answer.status(), world.backend.effects()), (201, before + 1), "{answer:?}");
        }
    }
    assert_refusal("request-in-progress", &world.send(from("a", "running")).await);
    done.open();
    held.await.unwrap().expect("an answer");
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
    let printed =
        if world.door == crate::world::Door::Sidecar { world.sidecar().printed() } else { String::new() };
    for secret in secrets {
        assert!(!shown.contains(secret), "told: {secret} in {shown}");
        assert!(!printed.contains(secret), "printed: {secret} in {printed}");
    }
}

async fn refusals_have_the_key(world: World) {
    for (key, has_key) in [("a", true), ("\"a\"", true), ("\"broken", false)] {
        let request = pay_as(key).field("X-Api-Key", "secret");
        let answer = world.send(request.clone()).await;
        assert_refusal("scope-not-set", &answer);
        match has_key {
            true => assert_echo(&world.plan, &request, &answer),
            false => assert_eq!(answer.get("idempotency-key"), None, "{answer:?}"),
        }
    }
}
