//! The first response, and its replays.

use std::io::Write;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;

use super::{PAYMENT, pay, pay_as};
use crate::backend::{BodyPart, Script};
use crate::client::Request;
use crate::library::Library;
use crate::plan::Plan;
use crate::table::{
    Case, Step, assert_fresh, assert_refusal, assert_replay, executes, passes, refused, replays,
};
use crate::world::World;
use oncegate_http::ServerErrors;

/// Statuses that decide nothing about the operation.
const RELEASED: [u16; 7] = [401, 403, 407, 408, 421, 425, 429];

pub(super) fn cases() -> Vec<Case> {
    let mut all = cases! {
        "first-request-gets-the-response": "the first request gets the handler's response unchanged, and its key"
            => run (first);
        "retry-gets-the-same-response": "a retry gets the same status and the same body, and takes no effect"
            => steps [executes(pay_as("abc")), replays(0, pay_as("abc"))];
        "key-is-echoed-as-sent": "every response has the key's field as this request spelled it"
            => steps [
                executes(pay_as("abc")),
                replays(0, pay_as("\"abc\"")),
                replays(0, pay_as("\"abc\";p=1")),
                replays(0, pay_as("abc")),
            ];
        "ten-retries": "ten retries take no effect"
            => steps {
                let again = (0..10).map(|_| replays(0, pay_as("abc")));
                std::iter::once(executes(pay_as("abc"))).chain(again).collect()
            };
        "other-keys-in-between": "other keys in between change nothing"
            => steps [
                executes(pay_as("a")),
                executes(pay_as("b")),
                replays(0, pay_as("a")),
                passes(pay()),
                executes(pay_as("c")),
                replays(1, pay_as("b")),
                replays(4, pay_as("c")),
                replays(0, pay_as("a")),
            ];
        "requests-on-one-connection": "requests on one connection have nothing in common"
            => run (one_connection);
        "replay-of-a-204": "a 204 is replayed as a 204 without a body"
            => steps [executes(pay_as("abc").script(Script::empty(204))).status(204), replays(0, pay_as("abc"))];
        "replay-of-an-empty-body": "an empty body is replayed as an empty body"
            => steps {
                let bytes = |status| Script::empty(status);
                vec![
                    executes(pay_as("a").script(bytes(200))).status(200),
                    replays(0, pay_as("a")),
                    executes(pay_as("b").script(bytes(201))).status(201),
                    replays(2, pay_as("b")),
                    executes(pay_as("c").script(Script::pieces(200, "text/plain", Vec::new()))).status(200),
                    replays(4, pay_as("c")),
                ]
            };
        "replay-of-a-205": "a 205 is replayed"
            => steps [executes(pay_as("abc").script(Script::empty(205))).status(205), replays(0, pay_as("abc"))];
        "replay-of-a-binary-body": "a body of all bytes, NUL and invalid UTF-8 among them, is replayed byte by byte"
            => steps {
                let all: Vec<u8> = (0..=255).cycle().take(3000).collect();
                let script = Script::whole(200, "application/octet-stream", all);
                let not_text = Script::whole(200, "application/json", &b"\xff\xfe\0\xc3\x28\xed\xa0\x80"[..]);
                vec![
                    executes(pay_as("a").script(script)).status(200),
                    replays(0, pay_as("a")),
                    executes(pay_as("b").script(not_text)).status(200),
                    replays(2, pay_as("b")),
                ]
            };
        "binary-request-body": "a request of all bytes arrives as it was sent, and is found again"
            => steps {
                let all: Vec<u8> = (0..=255).cycle().take(3000).collect();
                let send =
                    move || Request::post("/blobs").key("a").body("application/octet-stream", all.clone());
                vec![executes(send()), replays(0, send())]
            };
        "handler-gets-the-request-as-sent": "the handler sees the request as it was sent"
            => run (arrives);
        "replay-of-a-gzip-body": "a compressed body is replayed compressed"
            => run (gzip);
        "replay-of-a-chunked-body": "a body of unknown length is replayed complete, with its length"
            => run (chunked);
        "trailers-reach-the-first-client": "trailer fields reach the first client, and the body is replayed complete"
            .without_library(Library::Node, "it passes no trailers of a response that is stored")
            .without_library(Library::Python, "uvicorn sends no trailers")
            => run (trailers);
        "replay-of-one-mebibyte": "a body of one mebibyte is replayed byte by byte, in one piece or in many"
            .given(Plan { max_response_body: Some(1024 * 1024), ..Plan::default() })
            => steps {
                let large: Vec<u8> =
                    (0..1024 * 1024_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
                let pieces =
                    large.chunks(4093).map(|piece| BodyPart::Data(Bytes::copy_from_slice(piece))).collect();
                let request = |key: &str| pay_as(key).body("application/octet-stream", large.clone());
                vec![
                    executes(request("a").script(Script::whole(200, "image/png", large.clone()))).status(200),
                    replays(0, request("a")),
                    executes(request("b").script(Script::pieces(200, "image/png", pieces))).status(200),
                    replays(2, request("b")),
                ]
            };
        "response-too-large-to-store": "a response beyond the limit reaches the first client complete, and nothing runs twice"
            .given(Plan { max_response_body: Some(1000), ..Plan::default() })
            => run (too_large);
        "event-stream-is-not-run-again": "a stream of events reaches the first client as it comes, and never runs again"
            => run (events);
        "replay-of-redirects": "3xx are responses like others, and are not followed"
            => steps {
                let to = |status| Script::empty(status).field("location", "/elsewhere");
                let mut steps = Vec::new();
                for status in [301, 302, 303, 307, 308] {
                    let key = status.to_string();
                    steps.push(executes(pay_as(&key).script(to(status))).status(status));
                    steps.push(replays(steps.len() - 1, pay_as(&key)));
                }
                steps
            };
        "replay-of-client-errors": "4xx that are decisions are responses like others"
            => steps {
                let mut steps = Vec::new();
                for status in [400, 402, 404, 405, 406, 409, 410, 412, 413, 415, 418, 422, 423, 424, 428, 451] {
                    let key = status.to_string();
                    steps.push(executes(pay_as(&key).script(Script::status(status))).status(status));
                    steps.push(replays(steps.len() - 1, pay_as(&key)));
                }
                steps
            };
        "corrected-body-needs-another-key": "a corrected body is another request and needs another key"
            => steps {
                let refuse = || Script::status(422);
                let fixed = || Request::post("/payments").json(r#"{"amount":1}"#);
                vec![
                    executes(pay_as("a").script(refuse())).status(422),
                    refused("key-reused", fixed().key("a")),
                    replays(0, pay_as("a")),
                    executes(fixed().key("b")),
                ]
            };
        "undecided-statuses-release-the-key": "401, 403, 407, 408, 421, 425 and 429 decide nothing: the key is free again"
            => steps {
                let mut steps = Vec::new();
                for status in RELEASED {
                    let key = status.to_string();
                    steps.push(executes(pay_as(&key).script(Script::status(status))).status(status));
                    steps.push(executes(pay_as(&key).script(Script::status(status))).status(status));
                    steps.push(executes(pay_as(&key)));
                    steps.push(replays(steps.len() - 1, pay_as(&key)));
                }
                steps
            };
        "released-key-takes-another-request": "a key that is free again may carry another request"
            => steps {
                let other = || Request::post("/payments").key("a").json(r#"{"amount":2}"#);
                vec![
                    executes(pay_as("a").script(Script::status(429))).status(429),
                    executes(other()),
                    replays(1, other()),
                    refused("key-reused", pay_as("a")),
                ]
            };
        "server-errors-replayed": "by default a 5xx is kept, because the effect may have happened"
            => steps {
                server_errors(true)
            };
        "server-errors-released": "a 5xx frees the key under server-errors = release"
            .given(Plan { server_errors: Some(ServerErrors::Release), ..Plan::default() })
            => steps {
                server_errors(false)
            };
        "handler-releases-the-key": "the handler can release the key"
            => steps {
                let release = |status| Script::status(status).field("idempotency-store", "release");
                vec![
                    executes(pay_as("a").script(release(200))).status(200),
                    executes(pay_as("a").script(release(500))).status(500),
                    executes(pay_as("a").script(release(404))).status(404),
                    executes(pay_as("a")),
                    replays(3, pay_as("a")),
                ]
            };
        "contradicting-directives-have-no-effect": "two directives of the handler that contradict each other have no effect"
            => steps {
                let says = |words: [&str; 2]| {
                    Script::status(200)
                        .field("idempotency-store", words[0])
                        .field("idempotency-store", words[1])
                };
                vec![
                    executes(pay_as("a").script(says(["release", "replay"]))).status(200),
                    replays(0, pay_as("a")),
                    executes(pay_as("b").script(says(["release", "nonsense"]))).status(200),
                    replays(2, pay_as("b")),
                    executes(pay_as("c").script(says(["release", "Release"]))).status(200),
                    executes(pay_as("c")),
                ]
            };
        "handler-asks-for-replay": "the handler can request that its response is replayed"
            .given(Plan { server_errors: Some(ServerErrors::Release), ..Plan::default() })
            => steps {
                let replay = |status| Script::status(status).field("idempotency-store", "replay");
                let mut steps: Vec<Step> = Vec::new();
                for status in RELEASED.into_iter().chain([500, 503]) {
                    let key = status.to_string();
                    steps.push(executes(pay_as(&key).script(replay(status))).status(status));
                    steps.push(replays(steps.len() - 1, pay_as(&key)));
                }
                steps
            };
        "grpc-response-passes-and-is-not-run-again": "a response of gRPC passes unchanged with its trailers, and never runs again"
            => steps {
                let mut steps = Vec::new();
                for media_type in
                    ["application/grpc", "application/grpc+proto", "application/grpc-web+json; charset=utf-8"]
                {
                    let response = Script::whole(200, media_type, &b"\0\0\0\0\x02hi"[..]);
                    steps.push(
                        executes(pay_as(media_type.split(';').next().unwrap_or_default()).script(response))
                            .status(200),
                    );
                    let again = pay_as(media_type.split(';').next().unwrap_or_default());
                    steps.push(refused("replay-unavailable", again));
                }
                steps
            };
        "handler-asks-for-a-tombstone": "the handler can forbid that its response is stored"
            => steps {
                let secret = || Script::status(201).field("idempotency-store", "tombstone");
                vec![
                    executes(pay_as("a").script(secret())),
                    refused("replay-unavailable", pay_as("a")),
                    refused("replay-unavailable", pay_as("a")),
                    refused("key-reused", Request::post("/payments").key("a").json("{}")),
                ]
            };
        "directive-is-hidden-from-clients": "no client sees the handler's directive to the layer"
            => run (directive_is_taken_off);
        "head-passes": "HEAD is not covered: it reaches the service, even under a key with a response"
            => run (head);
        "expect-continue": "a client that sends Expect gets 100 Continue, and is then treated like others"
            => run (expect_continue);
    };
    all.extend(cases! {
        "other-key-is-another-intent": "the same request under another key is another intent"
            => steps [executes(pay_as("a")), executes(pay_as("b")), replays(0, pay_as("a")), replays(1, pay_as("b"))];
    });
    all
}

fn server_errors(kept: bool) -> Vec<Step> {
    let mut steps = Vec::new();
    for status in [500, 501, 502, 503, 504, 507, 599] {
        let key = status.to_string();
        steps.push(executes(pay_as(&key).script(Script::status(status))).status(status));
        let first = steps.len() - 1;
        if kept {
            steps.push(replays(first, pay_as(&key)));
            steps.push(refused("key-reused", Request::post("/payments").key(&key).json("{}")));
        } else {
            steps.push(executes(pay_as(&key)));
            steps.push(replays(first + 1, pay_as(&key)));
        }
    }
    steps
}

async fn first(world: World) {
    let script =
        Script::status(201).field("X-Anything", "at all").field("Set-Cookie", "a=b").field("ETag", "\"v1\"");
    let request = pay_as("\"abc\"").script(script);
    let response = world.send(request.clone()).await;
    assert_eq!(response.status(), 201);
    assert_fresh(&world.plan, &request, &response);
    assert_eq!(response.get("x-anything"), Some("at all"), "{response:?}");
    assert_eq!(response.get("set-cookie"), Some("a=b"), "{response:?}");
    assert_eq!(response.get("etag"), Some("\"v1\""), "{response:?}");
    assert_eq!(response.get("idempotency-status"), None, "{response:?}");
    assert_eq!(response.json()["effect"], 1);
}

async fn one_connection(world: World) {
    let mut connection = world.connect().await;
    let a = connection.exchange(&pay_as("a")).await.expect("a response");
    let b = connection.exchange(&pay_as("b")).await.expect("a response");
    let again = connection.exchange(&pay_as("a")).await.expect("a response");
    assert_replay(&world.plan, &pay_as("a"), &a, &again);
    let none = connection.exchange(&pay()).await.expect("a response");
    assert_eq!(none.json()["effect"], 3);
    let other = connection.exchange(&pay_as("a").json("{}")).await.expect("a response");
    assert_refusal("key-reused", &other);
    let again = connection.exchange(&pay_as("b")).await.expect("a response");
    assert_replay(&world.plan, &pay_as("b"), &b, &again);
}

async fn arrives(world: World) {
    let chunks = [&b"{\"amount\""[..], b":1000,", b"\"currency\" : \"usd\" }"].map(Bytes::from_static);
    let request = Request::new("PATCH", "/payments/a%2Fb?x=1&y=%20&x=2")
        .key("\"abc\"")
        .field("X-Anything", "at all")
        .chunked("application/json; charset=utf-8", chunks.to_vec());
    assert_eq!(world.send(request).await.status(), 201);
    let seen = &world.backend.seen()[0];
    assert_eq!(seen.method, "PATCH");
    assert_eq!(seen.target, "/payments/a%2Fb?x=1&y=%20&x=2");
    assert_eq!(seen.body, "{\"amount\":1000,\"currency\" : \"usd\" }");
    assert_eq!(seen.get("x-anything"), Some("at all"));
    assert_eq!(seen.get("content-type"), Some("application/json; charset=utf-8"));
    assert_eq!(seen.get("idempotency-key"), Some("\"abc\""));
}

async fn gzip(world: World) {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(PAYMENT.repeat(50).as_bytes()).unwrap();
    let coded = encoder.finish().unwrap();
    let script = Script::whole(200, "application/json", coded.clone())
        .field("content-encoding", "gzip")
        .field("vary", "accept-encoding");
    let request = pay_as("abc").field("Accept-Encoding", "gzip").script(script);
    let first = world.send(request.clone()).await;
    let again = world.send(request.clone()).await;
    assert_eq!(first.body, coded);
    assert_replay(&world.plan, &request, &first, &again);
    assert_eq!(again.get("content-encoding"), Some("gzip"));
    assert_eq!(again.get("vary"), Some("accept-encoding"));
}

async fn chunked(world: World) {
    let pieces =
        ["one ", "two ", "", "three"].map(|text| BodyPart::Data(Bytes::from_static(text.as_bytes())));
    let request = pay_as("abc").script(Script::pieces(200, "text/plain", pieces.to_vec()));
    let first = world.send(request.clone()).await;
    let again = world.send(request.clone()).await;
    assert_eq!(first.body, "one two three");
    assert_replay(&world.plan, &request, &first, &again);
    assert_eq!(again.get("content-length"), Some("13"), "{again:?}");
    assert_eq!(again.get("transfer-encoding"), None, "{again:?}");
    assert_eq!(again.get("trailer"), None, "{again:?}");
}

async fn trailers(world: World) {
    let pieces =
        vec![BodyPart::Data(Bytes::from_static(b"one ")), BodyPart::Data(Bytes::from_static(b"two"))];
    let script =
        Script::pieces(200, "text/plain", pieces).trailer("x-checksum", "abc").field("trailer", "x-checksum");
    let request = pay_as("abc").field("TE", "trailers").script(script);
    let first = world.send(request.clone()).await;
    assert_eq!(first.body, "one two");
    // Go spells names in its own way.
    let trailers = first.trailers.iter().map(|(name, value)| (name.to_ascii_lowercase(), value.clone()));
    assert_eq!(trailers.collect::<Vec<_>>(), [("x-checksum".to_owned(), b"abc".to_vec())], "{first:?}");
    let again = world.send(request.clone()).await;
    assert_replay(&world.plan, &request, &first, &again);
}

async fn too_large(world: World) {
    for (number, script) in [
        Script::whole(201, "text/plain", vec![b'x'; 1001]),
        Script::pieces(
            201,
            "text/plain",
            vec![BodyPart::Data(vec![b'x'; 600].into()), BodyPart::Data(vec![b'x'; 401].into())],
        ),
        Script::whole(201, "text/plain", vec![b'x'; 3_000_000]),
    ]
    .into_iter()
    .enumerate()
    {
        let key = number.to_string();
        let request = pay_as(&key).script(script);
        let first = world.send(request.clone()).await;
        assert_eq!(first.status(), 201, "{first:?}");
        assert_fresh(&world.plan, &request, &first);
        assert_eq!(first.body, vec![b'x'; if number == 2 { 3_000_000 } else { 1001 }]);
        let again = world.settled(&pay_as(&key)).await;
        assert_refusal("replay-unavailable", &again);
        assert_refusal("key-reused", &world.send(pay_as(&key).json("{}")).await);
        assert_eq!(world.backend.effects(), number + 1);
    }
    let exact = pay_as("exact").script(Script::whole(201, "text/plain", vec![b'x'; 1000]));
    let first = world.send(exact.clone()).await;
    assert_replay(&world.plan, &exact, &first, &world.send(exact.clone()).await);
}

async fn events(world: World) {
    let go_on = oncegate_testkit::Latch::new();
    let event = |text: &'static str| BodyPart::Data(Bytes::from_static(text.as_bytes()));
    let pieces = vec![event("data: one\n\n"), BodyPart::Wait(go_on.clone()), event("data: two\n\n")];
    let request = world.ready(pay_as("abc").script(Script::pieces(200, "text/event-stream", pieces)));
    let mut connection = world.connect().await;
    connection.write(&request.bytes()).await;
    let head = connection.head().await.expect("a head");
    assert_eq!(head.status, 200);
    let mut framing = crate::client::framing("POST", &head).expect("a framed body");
    // The first event comes before the second one is there.
    connection.expect_data(&mut framing, b"data: one\n\n").await;
    // Meanwhile it does not execute, with any response.
    let meanwhile = world.send(pay_as("abc")).await;
    assert!([409, 422].contains(&meanwhile.status()), "{meanwhile:?}");
    assert_eq!(world.backend.effects(), 1);
    go_on.open();
    connection.expect_data(&mut framing, b"data: two\n\n").await;
    assert_eq!(connection.data(&mut framing).await.expect("an end"), None);
    assert_refusal("replay-unavailable", &world.settled(&pay_as("abc")).await);
    assert_eq!(world.backend.effects(), 1);
}

async fn directive_is_taken_off(world: World) {
    for (number, (word, request)) in [
        ("replay", pay_as("a")),
        ("release", pay_as("b")),
        ("tombstone", pay_as("c")),
        ("replay", pay()),
        ("release", Request::new("GET", "/payments/1")),
        ("replay", Request::new("DELETE", "/payments/1").key("abc")),
    ]
    .into_iter()
    .enumerate()
    {
        let response =
            world.send(request.clone().script(Script::status(200).field("Idempotency-Store", word))).await;
        assert_eq!(response.get("idempotency-store"), None, "{number}: {response:?}");
        let again = world.send(request.script(Script::status(200))).await;
        assert_eq!(again.get("idempotency-store"), None, "{number}: {again:?}");
    }
}

async fn head(world: World) {
    let first = world.send(pay_as("abc")).await;
    let head =
        Request::new("HEAD", "/payments").key("abc").script(Script::whole(200, "text/plain", "twelve chars"));
    let response = world.send(head).await;
    assert_eq!(response.status(), 200);
    assert_eq!(response.get("idempotent-replayed"), None);
    assert_eq!(response.get("content-length"), Some("12"), "{response:?}");
    assert!(response.body.is_empty());
    assert_eq!(world.backend.effects(), 2);
    assert_replay(&world.plan, &pay_as("abc"), &first, &world.send(pay_as("abc")).await);
}

async fn expect_continue(world: World) {
    let request = world.ready(pay_as("abc").field("Expect", "100-continue"));
    let mut responses = Vec::new();
    for _ in 0..2 {
        let mut connection = world.connect().await;
        connection.write(&request.head()).await;
        assert_eq!(world.backend.effects(), responses.len().min(1));
        // An interim response first; the body only then.
        let interim = connection.interim().await.expect("an interim response");
        assert_eq!(interim, 100);
        connection.write(&request.framed_body()).await;
        responses.push(connection.response("POST").await.expect("a response"));
    }
    assert_replay(&world.plan, &request, &responses[0], &responses[1]);
    assert_eq!(world.backend.effects(), 1);
}
