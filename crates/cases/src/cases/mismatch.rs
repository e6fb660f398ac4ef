//! Requests that are equal, and requests that are not.

use std::io::Write;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::Method;
use oncegate_http::KeyScope;
use oncegate_testkit::Latch;

use super::{PAYMENT, pay, pay_as};
use crate::backend::{MARK, Script};
use crate::client::Request;
use crate::plan::Plan;
use crate::table::{
    Case, Step, assert_fresh, assert_refusal, assert_replay, executes, passes, refused, replays,
};
use crate::world::World;

const REUSED: &str = "key-reused";

pub(super) fn cases() -> Vec<Case> {
    let caller = Plan { key_scope: Some(KeyScope::Caller), ..Plan::default() };
    cases! {
        "mismatch-tells-nothing-of-the-first": "another request under the key is a 422 without information about the first"
            => run (tells_nothing);
        "mismatch-changes-nothing": "after a mismatch the first request is still replayed"
            => steps {
                let other = || Request::post("/payments").key("a").json(r#"{"amount":1}"#);
                vec![
                    executes(pay_as("a")),
                    refused(REUSED, other()),
                    refused(REUSED, other()),
                    replays(0, pay_as("a")),
                    refused(REUSED, other()),
                ]
            };
        "key-belongs-to-method-and-path": "by default a key belongs to method and path"
            => steps [
                executes(pay_as("a")),
                executes(Request::post("/refunds").key("a").json(PAYMENT)),
                executes(Request::new("PATCH", "/payments").key("a").json(PAYMENT)),
                executes(Request::post("/payments/1").key("a").json(PAYMENT)),
                executes(Request::post("/Payments").key("a").json(PAYMENT)),
                replays(0, pay_as("a")),
                replays(1, Request::post("/refunds").key("a").json(PAYMENT)),
            ];
        "query-counts": "the query is a part of the request"
            => steps {
                let to = |target: &str| Request::post(target).key("a").json(PAYMENT);
                vec![
                    executes(to("/payments?currency=usd")),
                    replays(0, to("/payments?currency=usd")),
                    refused(REUSED, to("/payments?currency=eur")),
                    refused(REUSED, to("/payments")),
                    replays(0, to("/payments?currency=usd")),
                ]
            };
        "mismatch-elsewhere-with-keys-of-the-caller": "keys of the caller: reuse on another path is a mismatch"
            .given(caller.clone())
            => steps [
                executes(pay_as("a")),
                refused(REUSED, Request::post("/refunds").key("a").json(PAYMENT)),
                refused(REUSED, Request::new("PATCH", "/payments").key("a").json(PAYMENT)),
                refused(REUSED, Request::post("/payments?x=1").key("a").json(PAYMENT)),
                replays(0, pay_as("a")),
            ];
        "mismatch-by-method-with-keys-of-the-caller": "keys of the caller: reuse with another covered method is a mismatch"
            .given(Plan { methods: Some(vec![Method::PUT, Method::DELETE]), ..caller })
            => steps [
                executes(Request::new("PUT", "/payments/1").key("a").json(PAYMENT)),
                refused(REUSED, Request::new("DELETE", "/payments/1").key("a").json(PAYMENT)),
                passes(pay_as("a")),
            ];
        "json-order-and-space": "JSON is compared by its meaning: order of members and white space do not count"
            => steps {
                json(
                    r#"{"amount":1000,"currency":"usd","meta":{"a":1,"b":[1,2]}}"#,
                    &[
                        r#"{"currency":"usd","meta":{"b":[1,2],"a":1},"amount":1000}"#,
                        "{\n\t\"amount\" : 1000 ,\r\n \"currency\":\"usd\", \"meta\": { \"a\": 1, \"b\": [ 1, 2 ] } }\n",
                        r#"{"amount":1000,"currency":"\u0075sd","meta":{"a":1,"b":[1,2]}}"#,
                    ],
                    &[
                        r#"{"amount":1001,"currency":"usd","meta":{"a":1,"b":[1,2]}}"#,
                        r#"{"amount":1000,"currency":"USD","meta":{"a":1,"b":[1,2]}}"#,
                        r#"{"amount":1000,"currency":"usd","meta":{"a":1,"b":[2,1]}}"#,
                        r#"{"amount":1000,"currency":"usd","meta":{"a":1,"b":[1,2],"c":null}}"#,
                        r#"{"amount":"1000","currency":"usd","meta":{"a":1,"b":[1,2]}}"#,
                        r#"{"amount":1000,"currency":"usd"}"#,
                        "",
                    ],
                )
            };
        "included-member-that-matches-nothing": "a chosen member that no body has does not make all bodies equal"
            .given(Plan { fingerprint_include: Some("/Amount"), ..Plan::default() })
            => steps {
                let pay = |body: &str| Request::post("/payments").key("a").json(body);
                vec![
                    executes(pay(r#"{"amount":500,"currency":"gbp"}"#)),
                    refused(REUSED, pay(r#"{"amount":999999,"currency":"usd"}"#)),
                    replays(0, pay(r#"{"currency":"gbp","amount":500.0}"#)),
                ]
            };
        "exclusion-of-every-member": "the exclusion of every member does not make all bodies equal"
            .given(Plan { fingerprint_exclude: Some("/amount"), ..Plan::default() })
            => steps {
                let pay = |body: &str| Request::post("/payments").key("a").json(body);
                vec![
                    executes(pay(r#"{"amount":500}"#)),
                    refused(REUSED, pay(r#"{"amount":999999}"#)),
                    replays(0, pay(r#"{ "amount": 500 }"#)),
                ]
            };
        "json-names-that-fold": "members whose names differ only in case keep their order, because some frameworks treat them as one"
            => steps {
                let pay = |body: &str| Request::post("/payments").key("a").json(body);
                vec![
                    executes(pay(r#"{"amount":1,"Amount":2,"to":"a"}"#)),
                    refused(REUSED, pay(r#"{"Amount":2,"amount":1,"to":"a"}"#)),
                    replays(0, pay(r#"{"amount":1,"Amount":2,"to":"a"}"#)),
                ]
            };
        "fields-that-rewrite-the-request":
            "a field that names another method or path makes another request, because many services go by it"
            => steps {
                let with = |name: &str, value: &str| pay_as("a").field(name, value);
                vec![
                    executes(pay_as("a")),
                    refused(REUSED, with("X-HTTP-Method-Override", "DELETE")),
                    refused(REUSED, with("X_HTTP_Method_Override", "DELETE")),
                    refused(REUSED, with("X-HTTP-Method", "PUT")),
                    refused(REUSED, with("X-Method-Override", "PUT")),
                    refused(REUSED, with("X-Original-URL", "/admin")),
                    refused(REUSED, with("X-Rewrite-URL", "/admin")),
                    executes(pay_as("b").field("X-HTTP-Method-Override", "DELETE")),
                    replays(7, pay_as("b").field("X-HTTP-Method-Override", "DELETE")),
                    refused(REUSED, pay_as("b").field("X-HTTP-Method-Override", "PUT")),
                    refused(REUSED, pay_as("b")),
                ]
            };
        "form-names-that-fold": "form pairs whose names a framework treats as one keep their order"
            => steps {
                let form = |body: &'static str| {
                    Request::post("/payments").key("a").body("application/x-www-form-urlencoded", body)
                };
                vec![
                    executes(form("a.b=1&a_b=2&c=3")),
                    refused(REUSED, form("a_b=2&a.b=1&c=3")),
                    replays(0, form("c=3&a.b=1&a_b=2")),
                ]
            };
        "two-content-types": "both lines of a doubled Content-Type count"
            => steps {
                let pay = || pay_as("a");
                vec![
                    executes(pay()),
                    refused(REUSED, pay().field("Content-Type", "text/plain")),
                    refused(REUSED, pay().field("Content-Encoding", "identity").field("Content-Encoding", "br")),
                    replays(0, pay()),
                ]
            };
        "equal-json-numbers": "1.0, 1 and 1e0 are one number"
            => steps {
                json(
                    r#"{"n":1}"#,
                    &[r#"{"n":1.0}"#, r#"{"n":1e0}"#, r#"{"n":10e-1}"#],
                    &[r#"{"n":1.1}"#, r#"{"n":-1}"#, r#"{"n":true}"#, r#"{"n":"1"}"#],
                )
            };
        "json-null-is-not-absent": "null is not absent"
            => steps {
                json(r#"{"a":1}"#, &[r#"{ "a":1}"#], &[r#"{"a":1,"note":null}"#, r#"{"a":1,"note":""}"#])
            };
        "json-arrays-are-ordered": "arrays are ordered"
            => steps {
                json("[1,2,3]", &["[ 1, 2.0, 3 ]"], &["[3,2,1]", "[1,2]", "[1,2,3,3]"])
            };
        "json-large-integers": "integers that are equal only as floating-point numbers differ"
            => steps {
                json(
                    r#"{"id":9007199254740993}"#,
                    &[r#"{"id":9007199254740993}"#],
                    &[r#"{"id":9007199254740992}"#, r#"{"id":9007199254740994}"#, r#"{"id":9007199254740993.0}"#],
                )
            };
        "json-duplicate-members": "a body with a member twice is compared byte by byte"
            => steps {
                json(
                    r#"{"a":1,"a":2}"#,
                    &[r#"{"a":1,"a":2}"#],
                    &[r#"{"a":2}"#, r#"{"a":1}"#, r#"{"a":2,"a":1}"#, r#"{"a":1, "a":2}"#],
                )
            };
        "body-that-only-claims-to-be-json": "a body that only claims to be JSON is compared byte by byte, and is not refused"
            => steps {
                let mut steps = Vec::new();
                for body in [
                    "NaN",
                    "{\"a\":NaN}",
                    "{",
                    "{\"a\":1",
                    "",
                    "\u{feff}{}",
                    "{'a':1}",
                    "{\"a\":\"\\ud800\"}",
                    "[1,]",
                ] {
                    let key = format!("k{}", steps.len());
                    let request =
                        |more: &str| Request::post("/payments").key(&key).json(format!("{body}{more}"));
                    steps.push(executes(request("")));
                    steps.push(replays(steps.len() - 1, request("")));
                    steps.push(refused(REUSED, request(" ")));
                }
                steps
            };
        "deeply-nested-json": "a body of ten thousand brackets is compared without harm"
            => steps {
                let deep =
                    || Request::post("/payments").key("a").json("[".repeat(10_000) + &"]".repeat(10_000));
                vec![executes(deep()), replays(0, deep()), executes(pay_as("b"))]
            };
        "binary-body-sent-as-json": "bytes that are not text, sent as JSON, are compared byte by byte"
            => steps {
                let send =
                    |body: &'static [u8]| Request::post("/payments").key("a").body("application/json", body);
                vec![
                    executes(send(b"{\"a\":\"\xff\"}")),
                    replays(0, send(b"{\"a\":\"\xff\"}")),
                    refused(REUSED, send(b"{\"a\":\"\xfe\"}")),
                    refused(REUSED, send("{\"a\":\"\u{fffd}\"}".as_bytes())),
                ]
            };
        "json-suffix-of-a-media-type": "application/anything+json is JSON too"
            => steps {
                let send = |body: &'static str| {
                    Request::post("/payments").key("a").body("application/vnd.api+json", body)
                };
                vec![
                    executes(send(r#"{"a":1,"b":2}"#)),
                    replays(0, send(r#"{"b":2,"a":1}"#)),
                    refused(REUSED, send(r#"{"a":1,"b":3}"#)),
                ]
            };
        "media-type-counts": "the same bytes under another media type are another request"
            => steps {
                let send = |media: &'static str| Request::post("/payments").key("a").body(media, PAYMENT);
                vec![
                    executes(send("application/json")),
                    refused(REUSED, send("text/plain")),
                    refused(REUSED, send("application/x-www-form-urlencoded")),
                    refused(REUSED, Request::post("/payments").key("a").untyped(PAYMENT)),
                    replays(0, send("application/json")),
                ]
            };
        "form-pairs-in-any-order": "the order of the pairs of a form does not count"
            => steps {
                let send = |body: &'static str| {
                    Request::post("/payments").key("a").body("application/x-www-form-urlencoded", body)
                };
                vec![
                    executes(send("amount=1000&currency=usd&note=a+b")),
                    replays(0, send("currency=usd&note=a+b&amount=1000")),
                    replays(0, send("currency=usd&note=a%20b&amount=1000")),
                    refused(REUSED, send("currency=usd&note=a+b&amount=1001")),
                    refused(REUSED, send("currency=usd&note=a+b&amount=1000&amount=1000")),
                    refused(REUSED, send("currency=usd&note=a%2Bb&amount=1000")),
                    refused(REUSED, send("currency=usd&amount=1000")),
                ]
            };
        "multipart-boundary-does-not-count": "another multipart boundary is the same request"
            => steps [
                executes(multipart("----first", "1000", "file.bin")),
                replays(0, multipart("----first", "1000", "file.bin")),
                replays(0, multipart("another-boundary-0123456789", "1000", "file.bin")),
                refused(REUSED, multipart("----first", "1001", "file.bin")),
                refused(REUSED, multipart("another", "1000", "other.bin")),
            ];
        "broken-multipart": "an invalid multipart body is compared byte by byte"
            => steps {
                let send = |body: &'static str| {
                    Request::post("/payments").key("a").body("multipart/form-data; boundary=abc", body)
                };
                vec![
                    executes(send("--abc\r\nno end")),
                    replays(0, send("--abc\r\nno end")),
                    refused(REUSED, send("--abc\r\nno end ")),
                    executes(send("--abc--").drop_field("Idempotency-Key").key("b")),
                ]
            };
        "gzip-and-plain-are-one-request": "a compressed body is the same request as the plain one"
            => steps {
                let coded = |body: &str| {
                    let body = Bytes::from(gzip(body.as_bytes()));
                    Request::post("/payments")
                        .key("a")
                        .body("application/json", body)
                        .field("Content-Encoding", "gzip")
                };
                vec![
                    executes(pay_as("a")),
                    replays(0, coded(PAYMENT)),
                    replays(0, coded(r#"{"currency":"usd","amount":1000}"#)),
                    refused(REUSED, coded(r#"{"currency":"usd","amount":1001}"#)),
                ]
            };
        "plain-after-gzip-is-one-request": "a plain body is the same request as a compressed one before it"
            => steps {
                let body = gzip(PAYMENT.as_bytes());
                let coded = || {
                    Request::post("/payments")
                        .key("a")
                        .body("application/json", body.clone())
                        .field("Content-Encoding", "gzip")
                };
                vec![executes(coded()), replays(0, coded()), replays(0, pay_as("a"))]
            };
        "body-with-broken-coding": "a body whose Content-Encoding is wrong is compared byte by byte"
            => steps {
                let send = |body: &'static str| pay_as("a").json(body).field("Content-Encoding", "gzip");
                vec![executes(send("no gzip")), replays(0, send("no gzip")), refused(REUSED, send("no gzip "))]
            };
        "decompression-bomb": "a small body that decompresses beyond the limit is answered, and never runs twice"
            => run (bomb);
        "other-headers-do-not-count": "other header fields do not count"
            => steps [
                executes(pay_as("a").field("User-Agent", "one/1.0").field("Accept", "*/*")),
                replays(0, pay_as("a").field("User-Agent", "two/2.0").field("Accept", "application/json")),
                replays(
                    0,
                    pay_as("a")
                        .field("X-Request-Id", "2")
                        .field("Accept-Encoding", "gzip")
                        .field("Cookie", "a=b"),
                ),
                replays(
                    0,
                    pay_as("a")
                        .field("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
                ),
            ];
        "chosen-header-counts": "a chosen header field counts"
            .given(Plan { fingerprint_header: Some("x-version"), ..Plan::default() })
            => steps [
                executes(pay_as("a").field("X-Version", "1")),
                replays(0, pay_as("a").field("X-Version", "1")),
                refused(REUSED, pay_as("a").field("X-Version", "2")),
                refused(REUSED, pay_as("a")),
            ];
        "excluded-json-member": "an excluded member does not count, and one of the same name elsewhere does"
            .given(Plan { fingerprint_exclude: Some("/meta/at"), ..Plan::default() })
            => steps {
                json(
                    r#"{"amount":1,"meta":{"at":"10:00","by":"a"}}"#,
                    &[r#"{"amount":1,"meta":{"at":"10:01","by":"a"}}"#, r#"{"meta":{"by":"a"},"amount":1}"#],
                    &[
                        r#"{"amount":1,"meta":{"at":"10:00","by":"b"}}"#,
                        r#"{"amount":2,"meta":{"at":"10:00","by":"a"}}"#,
                        r#"{"amount":1,"at":"10:00","meta":{"at":"10:00","by":"a"}}"#,
                    ],
                )
            };
        "included-json-member": "if one member is chosen, the others do not count"
            .given(Plan { fingerprint_include: Some("/amount"), ..Plan::default() })
            => steps {
                json(
                    r#"{"amount":1,"note":"a"}"#,
                    &[r#"{"amount":1,"note":"b"}"#, r#"{"amount":1.0}"#],
                    &[r#"{"amount":2,"note":"a"}"#, r#"{"note":"a"}"#],
                )
            };
        "raw-bodies-compare-byte-by-byte": "if bodies are compared byte by byte, order and white space count"
            .given(Plan { fingerprint_raw: true, ..Plan::default() })
            => steps {
                json(r#"{"a":1,"b":2}"#, &[r#"{"a":1,"b":2}"#], &[r#"{"b":2,"a":1}"#, r#"{"a":1, "b":2}"#])
            };
        "empty-body-equals-absent-body": "an empty body equals an absent one in every framing"
            => steps [
                executes(Request::post("/payments/1/capture").key("a")),
                replays(0, Request::post("/payments/1/capture").key("a").untyped("")),
                replays(
                    0,
                    Request::post("/payments/1/capture")
                        .key("a")
                        .chunked("text/plain", Vec::new())
                        .drop_field("Content-Type"),
                ),
                refused(REUSED, Request::post("/payments/1/capture").key("a").untyped("x")),
            ];
        "chunk-boundaries-do-not-count": "the chunks of a body do not count"
            => steps {
                let chunked = |size: usize| {
                    let chunks = PAYMENT.as_bytes().chunks(size).map(Bytes::copy_from_slice).collect();
                    Request::post("/payments").key("a").chunked("application/json", chunks)
                };
                vec![
                    executes(chunked(1)),
                    replays(0, chunked(7)),
                    replays(0, chunked(1000)),
                    replays(0, pay_as("a")),
                ]
            };
        "mismatch-while-in-flight": "while the first request runs, another one is a mismatch, not a conflict"
            => run (in_flight);
        "mismatch-of-a-tombstone": "another request is a mismatch even if the response was not kept"
            .given(Plan { max_response_body: Some(99), ..Plan::default() })
            => steps {
                let large = Script::whole(201, "text/plain", vec![b'x'; 100]);
                vec![
                    executes(pay_as("a").script(large)),
                    refused("replay-unavailable", pay_as("a")),
                    refused(REUSED, Request::post("/payments").key("a").json("{}")),
                ]
            };
        "other-media-types-compare-byte-by-byte": "other media types are compared byte by byte"
            => steps {
                let send = |body: &'static str| pay_as("a").body("text/xml", body);
                vec![
                    executes(send("<a b='1' c='2'/>")),
                    replays(0, send("<a b='1' c='2'/>")),
                    refused(REUSED, send("<a c='2' b='1'/>")),
                ]
            };
        "body-and-no-body-differ": "a request with a body and one without are two"
            => steps [executes(pay_as("a")), refused(REUSED, pay().drop_body().key("a")), replays(0, pay_as("a"))];
    }
}

/// The first body executes under a key, the equal ones are replays of it, the others are mismatches.
fn json(first: &str, equal: &[&str], other: &[&str]) -> Vec<Step> {
    let send = |body: &str| Request::post("/payments").key("a").json(body);
    let mut steps = vec![executes(send(first)), replays(0, send(first))];
    steps.extend(equal.iter().map(|body| replays(0, send(body))));
    steps.extend(other.iter().map(|body| refused(REUSED, send(body))));
    steps.push(replays(0, send(first)));
    steps
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn multipart(boundary: &str, amount: &str, file: &str) -> Request {
    let body = format!(
        "--{boundary}\r\nContent-Disposition: form-data; name=\"amount\"\r\n\r\n{amount}\r\n\
         --{boundary}\r\nContent-Disposition: form-data; name=\"scan\"; filename=\"{file}\"\r\n\
         Content-Type: application/octet-stream\r\n\r\n\0\u{1}\r\n--not-it\r\n\r\n--{boundary}--\r\n"
    );
    Request::post("/payments").key("a").body(&format!("multipart/form-data; boundary={boundary}"), body)
}

async fn tells_nothing(world: World) {
    let request = pay_as("a").script(Script::status(201).field("location", "/payments/the-first-one"));
    let first = world.send(request.clone()).await;
    assert_fresh(&world.plan, &request, &first);
    let other = Request::post("/payments").key("a").json(r#"{"amount":1}"#);
    let response = world.send(other.clone()).await;
    assert_refusal(REUSED, &response);
    let text = format!("{response:?}");
    for secret in [MARK, "the-first-one", "1000", "usd", "201", "effect"] {
        assert!(!text.contains(secret), "tells {secret}: {text}");
    }
    crate::table::assert_echo(&world.plan, &other, &response);
    assert_eq!(world.backend.effects(), 1);
}

async fn in_flight(world: World) {
    let done = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    let other = || Request::post("/payments").key("a").json(r#"{"amount":1}"#);
    assert_refusal(REUSED, &world.send(other()).await);
    assert_refusal("request-in-progress", &world.send(pay_as("a")).await);
    assert_refusal(REUSED, &world.send(other()).await);
    done.open();
    let first = first.await.unwrap().expect("a response");
    assert_fresh(&world.plan, &pay_as("a"), &first);
    assert_refusal(REUSED, &world.send(other()).await);
    assert_replay(&world.plan, &pay_as("a"), &first, &world.send(pay_as("a")).await);
    assert_eq!(world.backend.effects(), 1);
}

async fn bomb(world: World) {
    let body = gzip(&vec![b' '; 16 * 1024 * 1024]);
    assert!(body.len() < 100_000);
    let send = || {
        Request::post("/payments")
            .key("a")
            .body("application/json", body.clone())
            .field("Content-Encoding", "gzip")
    };
    let first = world.send(send()).await;
    assert!([201, 413].contains(&first.status()), "{first:?}");
    let again = world.send(send()).await;
    assert_eq!(again.status(), first.status());
    assert_eq!(world.backend.effects(), usize::from(first.status() == 201));
    world.send(pay_as("b")).await;
}
