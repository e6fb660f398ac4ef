//! The traffic between client and service, and settings that differ by route.

use bytes::Bytes;
use http::Method;
use oncegate_testkit::Latch;

use super::{PAYMENT, pay, pay_as};
use crate::backend::{BodyPart, Script};
use crate::client::Request;
use crate::plan::{Plan, Route};
use crate::table::{Case, assert_refusal, assert_replay, executes, passes, refused, replays};
use crate::world::World;

const IN_PROCESS: &str = "the layer's handler finds these in the request's extensions";

pub(super) fn cases() -> Vec<Case> {
    let routes = vec![
        Route {
            methods: vec![Method::POST, Method::DELETE],
            path: "/orders/{id}",
            plan: Plan { require_key: true, ..Plan::default() },
        },
        Route {
            methods: Vec::new(),
            path: "/classic/{*rest}",
            plan: Plan { profile: "classic", ..Plan::default() },
        },
    ];
    cases! {
        "service-gets-the-attempt": "the service gets record, token and attempt, and only from the sidecar"
            .only_sidecar(IN_PROCESS)
            => run (attempt_fields);
        "tokens-grow-per-execution": "each execution of a key has a higher token, also after a release"
            .only_sidecar(IN_PROCESS)
            .and_libraries()
            => run (tokens_grow);
        "hop-by-hop-headers-end-at-the-sidecar": "fields of one connection end at the sidecar"
            .only_sidecar("the layer is no hop")
            => run (hop_by_hop);
        "unprotected-bodies-stream": "without a key, bodies stream in both directions without a limit"
            .given(Plan { max_request_body: Some(64), max_response_body: Some(64), ..Plan::default() })
            => run (passing_streams);
        "service-answers-early": "a service may answer before it has read the request"
            => run (early_response);
        "http2": "HTTP/2 behaves like HTTP/1.1, and a key is the same over both"
            .without_libraries("the services with the libraries speak HTTP/1.1")
            => run (http2);
        "routes-have-settings": "routes have their own settings; the first that matches counts"
            .given(Plan { routes: routes.clone(), ..Plan::default() })
            => steps {
                let to = |method: &str, target: &str| Request::new(method, target).json(PAYMENT);
                vec![
                    refused("key-missing", to("POST", "/orders/1")),
                    refused("key-missing", to("DELETE", "/orders/1")),
                    passes(to("PATCH", "/orders/1")),
                    executes(to("DELETE", "/orders/1").key("a")),
                    replays(3, to("DELETE", "/orders/1").key("a")),
                    passes(to("DELETE", "/orders").key("a")),
                    passes(to("POST", "/orders")),
                    executes(to("POST", "/orders").key("a")),
                    executes(to("PATCH", "/orders/1").key("a")),
                    replays(8, to("PATCH", "/orders/1").key("a")),
                ]
            };
        "routes-have-profiles": "a route may have a profile of its own"
            .given(Plan { routes, ..Plan::default() })
            => run (route_profile);
        "settings-in-a-file": "settings in a file equal those by flags"
            .given(Plan {
                by_file: true,
                require_key: true,
                key_format: Some("pattern:k[0-9]+"),
                fingerprint_header: Some("x-version"),
                key_scope: Some(oncegate_http::KeyScope::Caller),
                max_request_body: Some(100),
                methods: Some(vec![Method::POST, Method::PUT]),
                stored_header: Some("x-anything"),
                lease: Some(std::time::Duration::from_secs(20)),
                ..Plan::default()
            })
            .only_sidecar("the layer reads no file")
            .and_libraries()
            => steps {
                let other = || Request::post("/refunds").key("k123").json(PAYMENT);
                vec![
                    refused("key-missing", pay()),
                    refused("key-invalid", pay_as("abc")),
                    executes(pay_as("k123").field("X-Version", "1")),
                    replays(2, pay_as("k123").field("X-Version", "1")),
                    refused("key-reused", pay_as("k123").field("X-Version", "2")),
                    refused("key-reused", other()),
                    refused("request-too-large", pay_as("k456").json("x".repeat(101))),
                ]
            };
    }
}

async fn attempt_fields(world: World) {
    let forged = |request: Request| {
        request
            .field("Oncegate-Record", "forged")
            .field("oncegate-token", "999")
            .field("ONCEGATE-ATTEMPT", "999")
    };
    assert_eq!(world.send(forged(pay_as("a"))).await.status(), 201);
    assert_eq!(world.send(forged(pay())).await.status(), 201);
    assert_eq!(world.send(forged(Request::new("GET", "/payments"))).await.status(), 201);
    assert_eq!(world.send(pay_as("b")).await.status(), 201);
    let seen = world.backend.seen();
    let record = seen[0].get("oncegate-record").expect("a record").to_owned();
    assert!(record.len() == 64 && record.bytes().all(|b| b.is_ascii_hexdigit()), "{record}");
    let token: u64 = seen[0].get("oncegate-token").expect("a token").parse().expect("a number");
    assert_ne!(token, 999);
    assert_eq!(seen[0].get("oncegate-attempt"), Some("1"));
    for passing in &seen[1..3] {
        for name in ["oncegate-record", "oncegate-token", "oncegate-attempt"] {
            assert_eq!(passing.get(name), None, "{passing:?}");
        }
    }
    assert_ne!(seen[3].get("oncegate-record"), Some(record.as_str()));
}

async fn tokens_grow(world: World) {
    for status in [429, 503, 401] {
        let free = Script::status(status).field("idempotency-store", "release");
        assert_eq!(world.send(pay_as("a").script(free)).await.status(), status);
    }
    assert_eq!(world.send(pay_as("a")).await.status(), 201);
    let token =
        |seen: &crate::backend::ReceivedRequest| seen.get("oncegate-token").unwrap().parse::<u64>().unwrap();
    let tokens: Vec<_> = world.backend.seen().iter().map(token).collect();
    assert!(tokens.len() == 4 && tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

async fn hop_by_hop(world: World) {
    for request in [pay_as("a"), pay()] {
        let request = request
            .field("Connection", "X-Hop, keep-alive")
            .field("X-Hop", "1")
            .field("Keep-Alive", "timeout=5")
            .field("Proxy-Authorization", "Basic YTpi")
            .field("X-End", "2");
        assert_eq!(world.send(request).await.status(), 201);
    }
    for seen in world.backend.seen() {
        assert_eq!(seen.get("x-hop"), None, "{seen:?}");
        assert_eq!(seen.get("keep-alive"), None, "{seen:?}");
        assert_eq!(seen.get("x-end"), Some("2"), "{seen:?}");
        assert_eq!(seen.get("host"), Some("cases.test"), "{seen:?}");
    }
}

async fn passing_streams(world: World) {
    let go_on = Latch::new();
    let data = |text: &'static str| BodyPart::Data(Bytes::from_static(text.as_bytes()));
    let pieces = vec![data("one"), BodyPart::Wait(go_on.clone()), data("two")];
    let script = Script::pieces(200, "text/plain", pieces);
    let request = world.ready(Request::post("/streams").untyped(vec![b'x'; 1000]).script(script));
    let mut connection = world.connect().await;
    connection.write(&request.bytes()).await;
    let head = connection.head().await.expect("a head");
    let mut framing = crate::client::framing("POST", &head).expect("a framed body");
    connection.expect_data(&mut framing, b"one").await;
    go_on.open();
    connection.expect_data(&mut framing, b"two").await;
    assert_eq!(connection.data(&mut framing).await.expect("an end"), None);
    let large: Vec<u8> = (0..=255).cycle().take(5_000_000).collect();
    let script = Script::whole(200, "application/octet-stream", large.clone());
    let response = world.send(Request::post("/streams").untyped(large.clone()).script(script)).await;
    assert_eq!((response.status(), response.body.len()), (200, large.len()));
    assert!(response.body == large && world.backend.seen()[1].body == large, "bytes were changed");
}

async fn http2(world: World) {
    use http_body_util::{BodyExt, Full};
    use hyper_util::rt::{TokioExecutor, TokioIo};
    let stream = tokio::net::TcpStream::connect(world.address()).await.expect("a connection");
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .expect("HTTP/2");
    tokio::spawn(connection);
    let mut send = async |key: &[&str], body: &'static str| {
        let mut request = http::Request::post("http://cases.test/payments")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from_static(body.as_bytes())))
            .expect("a request");
        for key in key {
            request.headers_mut().append("idempotency-key", key.parse().expect("a field value"));
        }
        let (parts, body) = sender.send_request(request).await.expect("a response").into_parts();
        (parts, body.collect().await.expect("a body").to_bytes())
    };
    let (first, body) = send(&["a"], PAYMENT).await;
    assert_eq!((first.status.as_u16(), first.headers.get("idempotent-replayed")), (201, None));
    let (again, same) = send(&["\"a\""], PAYMENT).await;
    assert_eq!((again.status.as_u16(), &same), (201, &body));
    assert_eq!(again.headers["idempotent-replayed"], "true");
    assert_eq!(again.headers["idempotency-key"], "\"a\"");
    assert_eq!(send(&["a"], "{}").await.0.status, 422);
    assert_eq!(send(&["a", "a"], PAYMENT).await.0.status, 400);
    assert_eq!(send(&[], PAYMENT).await.0.status, 201);
    let over_one = world.send(pay_as("a")).await;
    assert_eq!((over_one.status(), over_one.get("idempotent-replayed")), (201, Some("true")), "{over_one:?}");
    assert_eq!(over_one.body, body);
    assert_eq!(world.backend.effects(), 2);
}

async fn early_response(world: World) {
    let early = || Script::status(413).early();
    let request = pay_as("a").body("text/plain", vec![b'x'; 500_000]).script(early());
    let first = world.send(request.clone()).await;
    assert_eq!(first.status(), 413, "{first:?}");
    assert_replay(&world.plan, &request, &first, &world.send(request.clone()).await);
    assert_eq!(world.backend.effects(), 1);
}

async fn route_profile(world: World) {
    let done = Latch::new();
    let at = |path: &str| Request::post(path).key("a").json(PAYMENT);
    let held = [
        world.start_send(at("/classic/x/y").script(Script::default().held(&done))),
        world.start_send(at("/other").script(Script::default().held(&done))),
    ];
    world.backend.until_effects(2).await;
    let conflict = world.send(at("/classic/x/y")).await;
    assert_eq!(
        (conflict.status(), conflict.get("content-type")),
        (409, Some("application/json")),
        "{conflict:?}"
    );
    assert_refusal("request-in-progress", &world.send(at("/other")).await);
    done.open();
    for one in held {
        assert_eq!(one.await.unwrap().expect("a response").status(), 201);
    }
    assert_eq!(world.send(at("/classic/x/y")).await.get("x-idempotent-replayed"), Some("true"));
    assert_eq!(world.send(at("/other")).await.get("idempotent-replayed"), Some("true"));
    assert_eq!(world.backend.effects(), 2);
}
