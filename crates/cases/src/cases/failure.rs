//! Failures, and the outcomes that follow.

use std::time::{Duration, Instant};

use bytes::Bytes;
use oncegate_core::OnAbandoned;
use oncegate_http::ServerErrors;
use oncegate_servers::unused_port;
use oncegate_testkit::{Fault, Latch, Operation, until};
use tokio::net::TcpListener;

use super::{PAYMENT, pay, pay_as};
use crate::backend::{BodyPart, Script};
use crate::client::{Request, Response, ResponseError};
use crate::library::Library;
use crate::plan::{FOUND, Plan, ReconcileReport};
use crate::table::{
    Case, assert_echo, assert_fresh, assert_problem, assert_refusal, assert_replay, executes, refused,
    replays, retry_after,
};
use crate::world::{Deployment, World};

const UNKNOWN: &str = "outcome-unknown";
const PANIC: &str = "a handler that panics is in the layer's process";
const NO_FRAMEWORK: &str = "no framework answers for a handler that fails";
const ANSWERS: &str =
    "the framework answers for a handler that fails; `failed-handler-has-answered` shows it";
const STORE: &str = "the sidecar's store cannot be told to fail";
const PROCESS: &str = "the service behind the layer is in its process";

const SHORT: Duration = Duration::from_millis(400);

/// The time within which a request reaches the service, and one that is not held is answered, even on a busy machine.
const UPSTREAM_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) fn cases() -> Vec<Case> {
    let release = Plan { server_errors: Some(ServerErrors::Release), ..Plan::default() };
    let short = Plan { lease: Some(SHORT), ..Plan::default() };
    let reexecute = Plan { on_abandoned: Some(OnAbandoned::Reexecute), ..short.clone() };
    let open = Plan { fail_open: true, ..Plan::default() };
    let impatient = Plan { upstream_timeout: Some(UPSTREAM_TIMEOUT), ..Plan::default() };
    let mut all = cases! {
        // The client.
        "client-hangs-up": "a client that hangs up does not end the handler, and its response is kept"
            .with_every_framework()
            => run (hang_up, true);
        "client-half-closes": "a client that closes its side does not end the handler, and its response is kept"
            => run (hang_up, false);
        "client-hangs-up-while-reading": "a client that disconnects in the middle of its response gets the complete response later"
            => run (hang_up_while_reading);
        "client-of-a-stream-hangs-up": "a stream whose client disconnects leaves a record, and never runs again"
            => run (hang_up_of_a_stream);
        "request-body-cut-short": "a body that is cut short claims nothing"
            => run (cut_short);
        "request-with-broken-chunks": "a body that breaks its own framing claims nothing"
            .without_library(Library::Node, "Node itself answers a request that breaks its framing")
            .without_library(Library::Python, "h11 itself answers a request that breaks its framing")
            => run (broken_chunks);
        // The handler.
        "handler-panics": "a panic leaves the outcome unknown, and nothing runs again"
            .only_layer(PANIC)
            .and_libraries()
            .without_library(Library::Node, ANSWERS)
            .without_library(Library::Python, ANSWERS)
            => run (unknown_ever_after, Script::panics());
        "handler-panics-and-the-key-is-released": "a panic frees the key if server errors do"
            .given(release.clone())
            .only_layer(PANIC)
            .and_libraries()
            .without_library(Library::Node, ANSWERS)
            .without_library(Library::Python, ANSWERS)
            => run (handler_failed, Script::panics());
        "handler-panics-while-others-wait": "waiting requests get an unknown outcome"
            .given(Plan { wait: Some(Duration::from_secs(10)), ..Plan::default() })
            .only_layer(PANIC)
            .and_libraries()
            .without_library(Library::Node, ANSWERS)
            .without_library(Library::Python, ANSWERS)
            => run (panic_while_others_wait);
        "failed-handler-has-answered": "the answer of a framework for a handler that failed is kept as every other"
            .without_deployments(&[Deployment::Layer, Deployment::Sidecar], NO_FRAMEWORK)
            .without_library(Library::Go, NO_FRAMEWORK)
            => steps [
                executes(pay_as("a").script(Script::panics())).status(500),
                replays(0, pay_as("a")),
                refused("key-reused", pay_as("a").json("{}")),
            ];
        "failed-handler-releases-the-key":
            "the 500 of a handler that failed frees the key if server errors do"
            .given(release.clone())
            .without_deployments(&[Deployment::Layer, Deployment::Sidecar], NO_FRAMEWORK)
            => steps [
                executes(pay_as("a").script(Script::panics())).status(500),
                executes(pay_as("a")),
                replays(1, pay_as("a")),
            ];
        "handler-returns-an-error": "a handler that ends with an error is like one that panics"
            .only_layer("the sidecar sees a closed connection, which has a case of its own")
            .and_libraries()
            => run (handler_error);
        "response-body-breaks-off": "a response that breaks off leaves the outcome unknown"
            .only_layer("the sidecar sees a closed connection, which has a case of its own")
            .and_libraries()
            => run (body_breaks_off);
        // The service behind the sidecar.
        "upstream-unreachable": "a service that is out of reach executed nothing: 502, and the key is free"
            .only_sidecar(PROCESS)
            => start (refused_connection);
        "upstream-unreachable-with-release":
            "a service that cannot be reached was not called, also where server errors release the key"
            .given(release.clone())
            .only_sidecar(PROCESS)
            => start (refused_connection);
        "upstream-unreachable-keeps-the-key-executable": "while the service is out of reach, a retry keeps its key executable"
            .only_sidecar(PROCESS)
            => start (refused_ten_times);
        "upstream-times-out": "a service that does not answer in time leaves the outcome unknown: 504, then 500"
            .given(impatient.clone())
            .only_sidecar(PROCESS)
            => run (hangs);
        "upstream-times-out-and-the-key-is-released":
            "a service that does not answer in time releases the key where server errors do"
            .given(Plan { server_errors: Some(ServerErrors::Release), ..impatient.clone() })
            .only_sidecar(PROCESS)
            => run (hangs_released);
        "upstream-answers-too-late": "a response that comes too late changes nothing"
            .given(impatient)
            .only_sidecar(PROCESS)
            => run (answers_late);
        "upstream-closes-without-a-response":
            "a service that closes the connection without a response leaves the outcome unknown: 502, then 500"
            .only_sidecar(PROCESS)
            => run (closes, Script::fails());
        "upstream-closes-a-kept-connection": "a service that closes a kept connection without a response gets no request twice"
            .only_sidecar(PROCESS)
            => run (closes_on_a_kept_connection);
        "upstream-cuts-its-response": "a service that cuts its response leaves the outcome unknown: 502, then 500"
            .only_sidecar(PROCESS)
            => run {
                |world| {
                    let pieces = vec![BodyPart::Data(Bytes::from_static(b"half of ")), BodyPart::Break];
                    Box::pin(closes(world, Script::pieces(200, "text/plain", pieces)))
                }
            };
        "upstream-cuts-its-response-anywhere": "a response that the service cuts at any byte leaves the outcome unknown"
            .only_sidecar(PROCESS)
            => start (cuts_raw);
        "upstream-sends-no-http": "a service that does not speak HTTP leaves the outcome unknown"
            .only_sidecar(PROCESS)
            => start (garbage);
        "upstream-unreachable-without-a-key": "without a key, a service that is out of reach is a 502, too"
            .only_sidecar(PROCESS)
            => start (refused_without_a_key);
    };
    all.extend(cases! {
        // The store.
        "store-down": "without the store nothing executes: 503; when the store is back, it executes once"
            .only_layer(STORE)
            .and_libraries_with_faults()
            => run (store_down);
        "store-down-for-a-replay": "while the store is down, a retry of an answered request is a 503, too"
            .only_layer(STORE)
            .and_libraries_with_faults()
            => run (store_down_replay);
        "store-down-without-a-key": "requests without a key need no store"
            .only_layer(STORE)
            .and_libraries_with_faults()
            => run (store_down_without_a_key);
        "reply-to-the-claim-is-lost": "a claim whose reply is lost never executes twice, and ends in a definite response"
            .given(short.clone())
            .only_layer(STORE)
            .and_libraries_with_faults()
            => run (claim_lost);
        "client-leaves-while-the-claim-stalls": "a client that leaves while the claim stalls leaves the key free"
            .only_layer(STORE)
            .and_libraries_with_faults()
            => run (claim_stalls);
        "store-down-for-a-hundred-requests": "a hundred at once while the store is down: none executes"
            .only_layer(STORE)
            .and_libraries_with_faults()
            => run (hundred_with_store_down);
        "renewals-fail": "a handler whose renewals fail completes if no other owner took the key"
            .given(short.clone())
            .only_layer(STORE)
            .and_libraries_with_faults()
            => run (renewal_fails, false);
        "one-renewal-fails": "a lease survives one failed renewal"
            .given(short.clone())
            .only_layer(STORE)
            .and_libraries_with_faults()
            => run (renewal_fails, true);
        "completion-fails":
            "a completion that fails: the first one has its response, and so have the others once the store takes it"
            .given(short.clone())
            .only_layer(STORE)
            .and_libraries_with_faults()
            => run (completion_fails);
        "completion-fails-reexecute":
            "a completion that fails: under reexecute it is not executed again either, because the process has the response"
            .given(reexecute.clone())
            .only_layer(STORE)
            .and_libraries_with_faults()
            => run (completion_fails_reexecute);
        "completion-fails-once": "a store that is back within the lease gets the completion"
            .given(Plan { lease: Some(Duration::from_secs(10)), ..Plan::default() })
            .only_layer(STORE)
            .and_libraries_with_faults()
            => run (completion_fails_once);
        "reply-to-the-completion-is-lost": "a completion whose reply is lost counts"
            .given(short.clone())
            .only_layer(STORE)
            .and_libraries_with_faults()
            => run (completion_lost);
        "release-fails": "a release that fails never lets two requests execute"
            .given(short.clone())
            .only_layer(STORE)
            .and_libraries_with_faults()
            => run (release_fails);
        "fail-open": "fail-open: an execution without protection is marked"
            .given(open.clone())
            .only_layer(STORE)
            .and_libraries_with_faults()
            => run (fail_open);
        "fail-open-is-not-for-corruption": "fail-open: a damaged record is not executed anyway"
            .given(open.clone())
            .only_layer(STORE)
            => run (corrupt);
        "fail-open-still-refuses": "fail-open: a malformed key is refused anyway"
            .given(open)
            .only_layer(STORE)
            .and_libraries_with_faults()
            => run (fail_open_refuses);
        "corrupt-record": "a damaged record is a 500, and is never executed"
            .only_layer(STORE)
            => run (corrupt);
        "corrupt-record-reexecute": "a damaged record is never executed, also under reexecute"
            .given(reexecute.clone())
            .only_layer(STORE)
            => run (corrupt);
        // The owner.
        "stale-owner-is-fenced": "a stale owner is fenced: its client gets its response with a mark, and the store keeps the other response"
            .given(reexecute)
            .only_layer("two instances on one store are needed")
            .and_libraries_with_faults()
            => run (stale_owner);
        "stale-owner-leaves-its-successor-alone": "a stale owner does not end the attempt of its successor"
            .given(Plan { on_abandoned: Some(OnAbandoned::Reexecute), ..short.clone() })
            .only_layer("two instances on one store are needed")
            .and_libraries_with_faults()
            => run (stale_owner_while_replaced);
        "abandoned-park": "an owner that died leaves the outcome unknown until the retention ends"
            .given(Plan { retention: Some(Duration::from_millis(1500)), ..short.clone() })
            .only_layer("two instances on one store are needed")
            .and_libraries_with_faults()
            => run (abandoned_park);
    });
    for (name, title, report) in [
        (
            "reconcile-found",
            "reconcile: an attempt that happened is stored and replayed",
            ReconcileReport::Found,
        ),
        (
            "reconcile-not-found",
            "reconcile: an attempt that did not happen is executed",
            ReconcileReport::NotFound,
        ),
        (
            "reconcile-unclear",
            "reconcile: an attempt with an unclear outcome is unknown",
            ReconcileReport::Unclear,
        ),
    ] {
        let plan =
            Plan { on_abandoned: Some(OnAbandoned::Reconcile), reconcile: Some(report), ..short.clone() };
        let case =
            Case::new(name, title, crate::table::Action::Run(|world| Box::pin(reconcile(world)))).given(plan);
        all.push(
            case.only_layer("two instances on one store are needed; the sidecar is covered by killed-during-the-call-reconcile"),
        );
    }
    all
}

async fn hang_up(world: World, rudely: bool) {
    let done = Latch::new();
    let mut connection = world.connect().await;
    connection.write(&world.ready(pay_as("a").script(Script::default().held(&done))).bytes()).await;
    world.backend.until_effects(1).await;
    if rudely {
        connection.reset();
    } else {
        drop(connection);
    }
    // The server has to notice before the handler ends, or the case proves nothing. It answers others meanwhile.
    for _ in 0..10 {
        assert_refusal("request-in-progress", &world.send(pay_as("a")).await);
    }
    done.open();
    world.backend.until_ended(1).await;
    let again = world.settled(&pay_as("a")).await;
    assert_eq!(again.get("idempotent-replayed"), Some("true"), "{again:?}");
    assert_eq!((again.status(), again.json()["effect"].as_u64()), (201, Some(1)), "{again:?}");
    assert_eq!(world.backend.effects(), 1);
}

async fn hang_up_while_reading(world: World) {
    let large: Vec<u8> = (0..=255).cycle().take(900_000).collect();
    let mut connection = world.connect().await;
    let request = world.ready(pay_as("a").script(Script::whole(200, "image/png", large.clone())));
    connection.write(&request.bytes()).await;
    let head = connection.head().await.expect("a head");
    let mut framing = crate::client::framing("POST", &head).expect("a framed body");
    connection.data(&mut framing).await.expect("some bytes");
    connection.reset();
    let again = world.settled(&pay_as("a")).await;
    assert_eq!((again.status(), again.get("idempotent-replayed")), (200, Some("true")), "{again:?}");
    assert_eq!(again.body, large);
    assert_eq!(world.backend.effects(), 1);
}

async fn hang_up_of_a_stream(world: World) {
    let never = Latch::new();
    let pieces = vec![BodyPart::Data(Bytes::from_static(b"data: one\n\n")), BodyPart::Wait(never.clone())];
    let mut connection = world.connect().await;
    let script = Script::pieces(200, "text/event-stream", pieces);
    connection.write(&world.ready(pay_as("a").script(script)).bytes()).await;
    connection.head().await.expect("a head");
    connection.reset();
    let again = world.send(pay_as("a")).await;
    assert!([409, 422].contains(&again.status()), "{again:?}");
    never.open();
    assert_refusal("replay-unavailable", &world.settled(&pay_as("a")).await);
    assert_eq!(world.backend.effects(), 1);
}

async fn cut_short(world: World) {
    for half_close in [true, false] {
        let mut connection = world.connect().await;
        connection.write(&pay_as("a").head()).await;
        connection.write(&PAYMENT.as_bytes()[..10]).await;
        if half_close {
            connection.half_close().await;
            // A server may answer, or only close the connection.
            match connection.response("POST").await {
                Ok(response) => assert_eq!(response.status(), 400, "{response:?}"),
                Err(ResponseError::Cut { head: None, .. }) => {}
                Err(other) => panic!("{other:?}"),
            }
        } else {
            connection.reset();
        }
    }
    assert_eq!(world.backend.effects(), 0);
    // Nothing was claimed: neither by this request nor by what was sent of it.
    let first = world.send(pay_as("a")).await;
    assert_fresh(&world.plan, &pay_as("a"), &first);
    assert_eq!((first.status(), world.backend.effects()), (201, 1));
}

async fn broken_chunks(world: World) {
    let mut connection = world.connect().await;
    let request = Request::post("/payments").key("a").chunked("application/json", Vec::new());
    connection.write(&request.head()).await;
    connection.write(b"5\r\n{\"a\":\r\nnonsense\r\n").await;
    match connection.response("POST").await {
        Ok(response) => assert_refusal("request-incomplete", &response),
        Err(broken) => panic!("no response: {broken:?}"),
    }
    assert_eq!(world.backend.effects(), 0);
    let first = world.send(pay_as("a")).await;
    assert_eq!((first.status(), world.backend.effects()), (201, 1));
}

async fn unknown_ever_after(world: World, script: Script) {
    let request = pay_as("a").script(script);
    let first = world.send(request.clone()).await;
    assert_refusal(UNKNOWN, &first);
    assert_echo(&world.plan, &request, &first);
    stays_unknown(&world).await;
}

async fn stays_unknown(world: &World) {
    for _ in 0..3 {
        let later = world.send(pay_as("a")).await;
        assert_refusal(UNKNOWN, &later);
        assert_echo(&world.plan, &pay_as("a"), &later);
    }
    assert_refusal("key-reused", &world.send(pay_as("a").json("{}")).await);
    assert_eq!(world.backend.effects(), 1);
}

async fn handler_failed(world: World, script: Script) {
    let first = world.send(pay_as("a").script(script)).await;
    assert_refusal("handler-failed", &first);
    assert_eq!(world.backend.effects(), 1);
    let second = world.send(pay_as("a")).await;
    assert_fresh(&world.plan, &pay_as("a"), &second);
    assert_eq!((second.status(), world.backend.effects()), (201, 2));
    assert_replay(&world.plan, &pay_as("a"), &second, &world.send(pay_as("a")).await);
}

async fn panic_while_others_wait(world: World) {
    let done = Latch::new();
    let first = world.start_send(pay_as("a").script(Script::panics().held(&done)));
    world.backend.until_effects(1).await;
    let others: Vec<_> = (0..5).map(|_| world.start_send(pay_as("a"))).collect();
    tokio::time::sleep(Duration::from_millis(50)).await;
    done.open();
    assert_refusal(UNKNOWN, &first.await.unwrap().expect("a response"));
    for other in others {
        assert_refusal(UNKNOWN, &other.await.unwrap().expect("a response"));
    }
    assert_eq!(world.backend.effects(), 1);
}

/// The server answers an error of the inner service: hyper closes the connection. The case checks the record.
async fn handler_error(world: World) {
    match world.try_send(pay_as("a").script(Script::fails())).await {
        Ok(response) => assert_refusal(UNKNOWN, &response),
        Err(ResponseError::Cut { head: None, .. }) => {
            world.settled(&pay_as("a")).await;
        }
        Err(other) => panic!("{other:?}"),
    }
    stays_unknown(&world).await;
}

async fn body_breaks_off(world: World) {
    let pieces = vec![BodyPart::Data(Bytes::from_static(b"half of ")), BodyPart::Break];
    match world.try_send(pay_as("a").script(Script::pieces(200, "text/plain", pieces))).await {
        Ok(first) => assert_refusal(UNKNOWN, &first),
        // A framework closes the connection in the same way.
        Err(ResponseError::Cut { head: None, .. }) if world.deployment != Deployment::Layer => {
            // The client may learn it before the store does.
            world.settled(&pay_as("a")).await;
        }
        Err(other) => panic!("{other:?}"),
    }
    stays_unknown(&world).await;
}

async fn refused_connection(mut world: World) {
    let (socket, address) = unused_port().expect("a port");
    world.start_in_front_of(address).await;
    for key in ["a", "a", "b"] {
        let response = world.send(pay_as(key)).await;
        assert_refusal("upstream-unreachable", &response);
        assert_echo(&world.plan, &pay_as(key), &response);
    }
    // Another request may use the key: it is free.
    assert_refusal("upstream-unreachable", &world.send(pay_as("a").json("{}")).await);
    let server = world.backend.serve_on(socket.listen(16).expect("a listener"));
    let first = world.send(pay_as("a")).await;
    assert_fresh(&world.plan, &pay_as("a"), &first);
    assert_eq!((first.status(), world.backend.effects()), (201, 1), "{first:?}");
    drop(server);
}

async fn refused_ten_times(mut world: World) {
    let (socket, address) = unused_port().expect("a port");
    world.start_in_front_of(address).await;
    for _ in 0..10 {
        assert_refusal("upstream-unreachable", &world.send(pay_as("a")).await);
    }
    let _served = world.backend.serve_on(socket.listen(16).expect("a listener"));
    let first = world.send(pay_as("a")).await;
    assert_eq!(first.status(), 201);
    assert_replay(&world.plan, &pay_as("a"), &first, &world.send(pay_as("a")).await);
    assert_eq!(world.backend.effects(), 1);
}

async fn refused_without_a_key(mut world: World) {
    let (_socket, address) = unused_port().expect("a port");
    world.start_in_front_of(address).await;
    let response = world.send(pay()).await;
    assert_problem("upstream-unreachable", 502, &response);
    assert_eq!(world.send(Request::new("GET", "/")).await.status(), 502);
}

async fn hangs(world: World) {
    let never = Latch::new();
    let request = pay_as("a").script(Script::default().held(&never));
    let asked = Instant::now();
    let first = world.send(request.clone()).await;
    assert_problem(UNKNOWN, 504, &first);
    assert!(asked.elapsed() >= UPSTREAM_TIMEOUT, "too early: {:?}", asked.elapsed());
    assert_echo(&world.plan, &request, &first);
    stays_unknown(&world).await;
}

async fn hangs_released(world: World) {
    let never = Latch::new();
    let first = world.send(pay_as("a").script(Script::default().held(&never))).await;
    assert_problem("handler-failed", 504, &first);
    let second = world.send(pay_as("a")).await;
    assert_fresh(&world.plan, &pay_as("a"), &second);
    assert_eq!((second.status(), world.backend.effects()), (201, 2), "{second:?}");
}

async fn answers_late(world: World) {
    let late = Latch::new();
    assert_problem(UNKNOWN, 504, &world.send(pay_as("a").script(Script::default().held(&late))).await);
    late.open();
    stays_unknown(&world).await;
}

async fn closes(world: World, script: Script) {
    let request = pay_as("a").script(script);
    let first = world.send(request.clone()).await;
    assert_problem(UNKNOWN, 502, &first);
    assert_echo(&world.plan, &request, &first);
    stays_unknown(&world).await;
}

async fn closes_on_a_kept_connection(world: World) {
    for number in 0..3 {
        assert_eq!(world.send(pay_as(&format!("before-{number}"))).await.status(), 201);
    }
    let before = world.backend.effects();
    assert_problem(UNKNOWN, 502, &world.send(pay_as("a").script(Script::fails())).await);
    assert_eq!(world.backend.effects(), before + 1);
    assert_refusal(UNKNOWN, &world.send(pay_as("a")).await);
    assert_eq!(world.backend.effects(), before + 1);
}

/// A service that reads a request, writes these bytes and closes the connection. It counts the requests.
async fn raw_service(
    response: &'static [u8],
) -> (std::net::SocketAddr, std::sync::Arc<std::sync::atomic::AtomicUsize>) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let requests = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counter = requests.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let counter = counter.clone();
            tokio::spawn(async move {
                let mut seen = Vec::new();
                while !seen.ends_with(PAYMENT.as_bytes()) {
                    match stream.read_buf(&mut seen).await {
                        Ok(0) | Err(_) => return,
                        Ok(_) => {}
                    }
                }
                counter.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                let _ = stream.write_all(response).await;
                let _ = stream.shutdown().await;
            });
        }
    });
    (address, requests)
}

async fn cuts_raw(mut world: World) {
    let cuts: [&'static [u8]; 6] = [
        b"",
        b"HTTP/1.1 2",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n123456789",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n",
    ];
    for cut in cuts {
        let (address, requests) = raw_service(cut).await;
        world.end().await;
        world.forget().await;
        world.start_in_front_of(address).await;
        let first = world.send(pay_as("a")).await;
        assert_problem(UNKNOWN, 502, &first);
        assert_refusal(UNKNOWN, &world.send(pay_as("a")).await);
        assert_eq!(requests.load(std::sync::atomic::Ordering::SeqCst), 1, "{}", cut.escape_ascii());
    }
}

async fn garbage(mut world: World) {
    let (address, requests) = raw_service(b"220 mail.test ESMTP\r\n").await;
    world.start_in_front_of(address).await;
    assert_problem(UNKNOWN, 502, &world.send(pay_as("a")).await);
    assert_refusal(UNKNOWN, &world.send(pay_as("a")).await);
    assert_eq!(requests.load(std::sync::atomic::Ordering::SeqCst), 1);
}

async fn store_down(world: World) {
    world.store_goes_away().await;
    for _ in 0..3 {
        let response = world.send(pay_as("a")).await;
        assert_refusal("store-unavailable", &response);
        assert!(retry_after(&response) >= 1);
        assert_echo(&world.plan, &pay_as("a"), &response);
    }
    assert_eq!(world.backend.effects(), 0);
    world.heal().await;
    let first = world.send(pay_as("a")).await;
    assert_fresh(&world.plan, &pay_as("a"), &first);
    assert_replay(&world.plan, &pay_as("a"), &first, &world.send(pay_as("a")).await);
    assert_eq!(world.backend.effects(), 1);
}

async fn store_down_replay(world: World) {
    let first = world.send(pay_as("a")).await;
    world.store_goes_away().await;
    assert_refusal("store-unavailable", &world.send(pay_as("a")).await);
    world.heal().await;
    assert_replay(&world.plan, &pay_as("a"), &first, &world.send(pay_as("a")).await);
    assert_eq!(world.backend.effects(), 1);
}

async fn store_down_without_a_key(world: World) {
    world.store_goes_away().await;
    let response = world.send(pay()).await;
    assert_eq!((response.status(), response.get("idempotency-status")), (201, None), "{response:?}");
    assert_eq!(world.send(Request::new("GET", "/").key("a")).await.status(), 201);
    assert_refusal("key-invalid", &world.send(pay_as("a,b")).await);
}

async fn claim_lost(world: World) {
    for (key, times) in [("a", 1), ("b", 100)] {
        let before = world.backend.effects();
        world.faults.next(times, Operation::Claim, Fault::LoseReply);
        let first = world.send(pay_as(key)).await;
        world.heal().await;
        assert!([201, 503].contains(&first.status()), "{first:?}");
        let last = definite(&world, key).await;
        assert!([201, 500].contains(&last.status()), "{last:?}");
        let effects = world.backend.effects() - before;
        assert!(effects <= 1, "{effects} effects, first {first:?}, last {last:?}");
        if first.status() == 201 {
            assert_replay(&world.plan, &pay_as(key), &first, &last);
        }
    }
}

/// The first response other than `request-in-progress`.
async fn definite(world: &World, key: &str) -> Response {
    let mut last = None;
    until("there is a definite response", async || {
        let response = world.send(pay_as(key)).await;
        let definite = ![409, 503].contains(&response.status());
        last = Some(response);
        definite
    })
    .await;
    last.expect("a response")
}

async fn claim_stalls(world: World) {
    // The reply of the store and the disconnection of the client race, so the race runs often.
    for round in 0..40 {
        let stall = Latch::new();
        let fault = if round % 2 == 0 { Fault::StallBefore } else { Fault::StallAfter };
        let calls = world.faults.calls(Operation::Claim);
        world.faults.next(1, Operation::Claim, fault(stall.clone()));
        let key = format!("k{round}");
        let mut connection = world.connect().await;
        connection.write(&pay_as(&key).bytes()).await;
        until("the claim is under way", async || world.faults.calls(Operation::Claim) > calls).await;
        connection.reset();
        stall.open();
        // The winner decides if it was executed. In the end it was, once.
        let last = definite(&world, &key).await;
        assert_eq!(last.status(), 201, "round {round}: {last:?}");
        assert_eq!(world.backend.effects(), round + 1);
    }
}

async fn hundred_with_store_down(world: World) {
    world.store_goes_away().await;
    let all: Vec<_> = (0..100).map(|_| world.start_send(pay_as("a"))).collect();
    for one in all {
        assert_refusal("store-unavailable", &one.await.unwrap().expect("a response"));
    }
    assert_eq!(world.backend.effects(), 0);
}

async fn renewal_fails(world: World, once: bool) {
    let done = Latch::new();
    if once {
        world.faults.next(1, Operation::Renew, Fault::Refuse);
    } else {
        world.faults.always(Operation::Renew, Fault::Refuse);
    }
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    let start = Instant::now();
    while start.elapsed() < SHORT * 3 {
        assert_in_progress(&world, &world.send(pay_as("a")).await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    until("it was renewed twice", async || world.faults.calls(Operation::Renew) >= 2).await;
    if world.leaves_the_store_alone() {
        // A renewal that fails ends the connection, which a library may have for its other commands, too.
        world.heal().await;
    }
    done.open();
    let first = first.await.unwrap().expect("a response");
    assert_fresh(&world.plan, &pay_as("a"), &first);
    assert_eq!((first.status(), first.get("idempotency-status")), (201, None), "{first:?}");
    assert_replay(&world.plan, &pay_as("a"), &first, &world.send(pay_as("a")).await);
    assert_eq!(world.backend.effects(), 1);
}

async fn completion_fails(world: World) {
    world.faults.always(Operation::Complete, Fault::Refuse);
    let first = world.send(pay_as("a")).await;
    not_stored(&world, &first);
    stays_in_progress(&world).await;
    world.heal().await;
    // This process knew the response all the time, and now the store does, too.
    assert_replay(&world.plan, &pay_as("a"), &first, &world.settled(&pay_as("a")).await);
    assert_eq!(world.backend.effects(), 1);
}

/// The process that has the response neither executes again nor reports an unknown outcome, during and after the lease.
async fn stays_in_progress(world: &World) {
    let asked = Instant::now();
    while asked.elapsed() < SHORT * 3 {
        assert_in_progress(world, &world.send(pay_as("a")).await);
    }
}

/// Asserts that the request is refused because the first one is in progress, or because the store has failed lately.
fn assert_in_progress(world: &World, response: &Response) {
    let is_refused_early = world.leaves_the_store_alone() && response.status() == 503;
    assert_refusal(if is_refused_early { "store-unavailable" } else { "request-in-progress" }, response);
}

fn not_stored(world: &World, first: &Response) {
    assert_fresh(&world.plan, &pay_as("a"), first);
    assert_eq!((first.status(), first.get("idempotency-status")), (201, Some("not-stored")), "{first:?}");
}

async fn completion_fails_reexecute(world: World) {
    world.faults.always(Operation::Complete, Fault::Refuse);
    let first = world.send(pay_as("a")).await;
    not_stored(&world, &first);
    stays_in_progress(&world).await;
    world.heal().await;
    assert_replay(&world.plan, &pay_as("a"), &first, &world.settled(&pay_as("a")).await);
    assert_eq!(world.backend.effects(), 1);
}

async fn completion_fails_once(world: World) {
    world.faults.next(3, Operation::Complete, Fault::Refuse);
    let first = world.send(pay_as("a")).await;
    assert_eq!(first.status(), 201, "{first:?}");
    if world.leaves_the_store_alone() {
        world.heal().await;
    }
    let later = world.settled(&pay_as("a")).await;
    assert_replay(&world.plan, &pay_as("a"), &first, &later);
    assert_eq!(world.backend.effects(), 1);
}

async fn completion_lost(world: World) {
    world.faults.always(Operation::Complete, Fault::LoseReply);
    let first = world.send(pay_as("a")).await;
    assert_eq!(first.status(), 201, "{first:?}");
    if world.leaves_the_store_alone() {
        // A library asks until it has a reply, and knows the outcome from then on.
        world.heal().await;
    }
    let later = world.settled(&pay_as("a")).await;
    assert_replay(&world.plan, &pay_as("a"), &first, &later);
    assert_eq!(world.backend.effects(), 1);
}

async fn release_fails(world: World) {
    world.faults.always(Operation::Release, Fault::Refuse);
    let first = world.send(pay_as("a").script(Script::status(429))).await;
    assert_eq!(first.status(), 429, "{first:?}");
    // The handler decided nothing, and that is not written down yet.
    stays_in_progress(&world).await;
    assert_eq!(world.backend.effects(), 1);
    world.heal().await;
    let later = world.settled(&pay_as("a")).await;
    assert_eq!((later.status(), world.backend.effects()), (201, 2), "{later:?}");
}

async fn fail_open(world: World) {
    let protected = world.send(pay_as("a")).await;
    assert_eq!((protected.status(), protected.get("idempotency-status")), (201, None), "{protected:?}");
    world.store_goes_away().await;
    for number in 2..4 {
        let response = world.send(pay_as("b")).await;
        assert_eq!(
            (response.status(), response.get("idempotency-status")),
            (201, Some("failed-open")),
            "{response:?}"
        );
        assert_eq!(response.get("idempotent-replayed"), None, "{response:?}");
        assert_eq!(
            (response.json()["effect"].as_u64(), world.backend.effects()),
            (Some(number as u64), number)
        );
    }
    world.heal().await;
    let after = world.settled(&pay_as("b")).await;
    assert_fresh(&world.plan, &pay_as("b"), &after);
    assert_eq!(after.get("idempotency-status"), None, "{after:?}");
    assert_replay(&world.plan, &pay_as("a"), &protected, &world.send(pay_as("a")).await);
}

async fn fail_open_refuses(world: World) {
    world.store_goes_away().await;
    assert_refusal("key-invalid", &world.send(pay_as("a,b")).await);
    assert_eq!(world.backend.effects(), 0);
}

async fn corrupt(world: World) {
    world.faults.always(Operation::Claim, Fault::Corrupt);
    for _ in 0..3 {
        let response = world.send(pay_as("a")).await;
        assert_refusal("record-corrupt", &response);
        assert_echo(&world.plan, &pay_as("a"), &response);
    }
    assert_eq!(world.backend.effects(), 0);
}

async fn stale_owner(world: World) {
    let done = Latch::new();
    // This instance is cut off from the store before it can renew.
    let cut = |fault: Fault| {
        world.faults.always(Operation::Renew, fault.clone());
        world.faults.always(Operation::Complete, fault);
    };
    let first = world.start_send(pay_as("a").script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    cut(Fault::Refuse);
    let other = world.second().await;
    let there = async || {
        let mut connection = crate::client::Connection::open(other.address).await;
        connection.exchange(&pay_as("a")).await.expect("a response")
    };
    let mut second = None;
    until("the other instance takes over", async || {
        let response = there().await;
        let took = response.status() != 409;
        second = Some(response);
        took
    })
    .await;
    let second = second.expect("a response");
    assert_fresh(&world.plan, &pay_as("a"), &second);
    assert_eq!((second.status(), world.backend.effects()), (201, 2), "{second:?}");
    world.heal().await;
    done.open();
    let first = first.await.unwrap().expect("a response");
    assert_fresh(&world.plan, &pay_as("a"), &first);
    assert_eq!((first.status(), first.get("idempotency-status")), (201, Some("fenced")), "{first:?}");
    assert_eq!(first.json()["effect"], 1);
    // The store has the response of the other owner, for both requests.
    assert_replay(&world.plan, &pay_as("a"), &second, &there().await);
    assert_replay(&world.plan, &pay_as("a"), &second, &world.settled(&pay_as("a")).await);
    assert_eq!(world.backend.effects(), 2);
}

async fn stale_owner_while_replaced(world: World) {
    // The stale owner may end with a response, a release or an unknown outcome.
    for (round, script) in [Script::default(), Script::status(429), Script::panics()].into_iter().enumerate()
    {
        let key = format!("k{round}");
        let before = world.backend.effects();
        let (done_first, done_second) = (Latch::new(), Latch::new());
        let first = world.start_send(pay_as(&key).script(script.held(&done_first)));
        world.backend.until_effects(before + 1).await;
        for operation in [Operation::Renew, Operation::Complete, Operation::Release] {
            world.faults.always(operation, Fault::Refuse);
        }
        // Its successor has a long lease.
        let other = world.second_given(&Plan { lease: None, ..world.plan.clone() }).await;
        let request = world.ready(pay_as(&key).script(Script::status(202).held(&done_second)));
        let address = other.address;
        let second = tokio::spawn(async move {
            loop {
                let response = crate::client::Connection::open(address).await.exchange(&request).await;
                match response {
                    Ok(response) if response.status() == 409 => {
                        tokio::time::sleep(Duration::from_millis(10)).await
                    }
                    other => return other.expect("a response"),
                }
            }
        });
        world.backend.until_effects(before + 2).await;
        world.heal().await;
        done_first.open();
        let first = first.await.unwrap().expect("a response");
        if round < 2 {
            assert_eq!(first.get("idempotency-status"), Some("fenced"), "round {round}: {first:?}");
        }
        // The other owner still works, and the key stays claimed.
        assert_refusal("request-in-progress", &world.send(pay_as(&key)).await);
        done_second.open();
        let second = second.await.unwrap();
        assert_fresh(&world.plan, &pay_as(&key), &second);
        assert_eq!(
            (second.status(), second.get("idempotency-status")),
            (202, None),
            "round {round}: {second:?}"
        );
        assert_replay(&world.plan, &pay_as(&key), &second, &world.settled(&pay_as(&key)).await);
        assert_eq!(world.backend.effects(), before + 2);
    }
}

async fn reconcile(world: World) {
    let never = Latch::new();
    let asked = Instant::now();
    let first = world.start_send(pay_as("a").script(Script::default().held(&never)));
    world.backend.until_effects(1).await;
    for operation in [Operation::Renew, Operation::Complete] {
        world.faults.always(operation, Fault::Refuse);
    }
    let other = world.second().await;
    let there = async || {
        let mut connection = crate::client::Connection::open(other.address).await;
        connection.exchange(&pay_as("a")).await.expect("a response")
    };
    let mut response = there().await;
    if asked.elapsed() < SHORT {
        assert_refusal("request-in-progress", &response);
    }
    until("the lease is over", async || {
        if response.status() == 409 {
            response = there().await;
        }
        response.status() != 409
    })
    .await;
    let again = there().await;
    match world.plan.reconcile.expect("a word") {
        ReconcileReport::Found => {
            assert_eq!((response.status(), &response.body[..]), (202, FOUND.as_bytes()), "{response:?}");
            assert_eq!(response.get("idempotent-replayed"), Some("true"), "{response:?}");
            assert_replay(&world.plan, &pay_as("a"), &response, &again);
            assert_eq!(world.backend.effects(), 1);
        }
        ReconcileReport::NotFound => {
            assert_fresh(&world.plan, &pay_as("a"), &response);
            assert_replay(&world.plan, &pay_as("a"), &response, &again);
            assert_eq!(
                (response.json()["effect"].as_u64(), world.backend.effects()),
                (Some(2), 2),
                "{response:?}"
            );
        }
        ReconcileReport::Unclear => {
            assert_refusal(UNKNOWN, &response);
            assert_refusal(UNKNOWN, &again);
            assert_eq!(world.backend.effects(), 1);
        }
    }
    first.abort();
}

async fn abandoned_park(world: World) {
    let retention = world.plan.retention.expect("a retention");
    let never = Latch::new();
    let asked = Instant::now();
    let first = world.start_send(pay_as("a").script(Script::default().held(&never)));
    world.backend.until_effects(1).await;
    for operation in [Operation::Renew, Operation::Complete] {
        world.faults.always(operation, Fault::Refuse);
    }
    let other = world.second().await;
    let there = async || {
        let mut connection = crate::client::Connection::open(other.address).await;
        connection.exchange(&pay_as("a")).await.expect("a response")
    };
    let mut not_yet_parked = Instant::now();
    let mut response = there().await;
    if asked.elapsed() < SHORT {
        assert_refusal("request-in-progress", &response);
    }
    until("the lease is over", async || {
        if response.status() == 409 {
            not_yet_parked = Instant::now();
            response = there().await;
        }
        response.status() != 409
    })
    .await;
    assert_refusal(UNKNOWN, &response);
    // After the retention the key is new.
    until("retention is over", async || {
        response = there().await;
        let effects = world.backend.effects();
        // Stores count in whole milliseconds.
        if not_yet_parked.elapsed() + Duration::from_millis(1) < retention {
            assert_refusal(UNKNOWN, &response);
            assert_eq!(effects, 1);
        }
        response.status() != 500
    })
    .await;
    assert_eq!((response.status(), world.backend.effects()), (201, 2), "{response:?}");
    first.abort();
}
