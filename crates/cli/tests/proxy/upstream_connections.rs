//! The connections to a service that speaks HTTP/1.1 without TLS: which are used again, and which requests are sent again.

use std::time::{Duration, Instant};

use bytes::Bytes;
use oncegate_testkit::until;
use rustix::process::Signal;
use socket2::SockRef;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::process::Command;
use tokio::sync::watch;

use crate::support::{Service, Sidecar, Wire, request, within};
use crate::{KEY, OK};

/// Flags under which a connection ends only for another reason than its age.
const KEPT: [&str; 2] = ["--threads=1", "--upstream-idle-timeout=10m"];

/// The next connection of the sidecar. It is reset when it is dropped.
async fn accept(listener: &TcpListener) -> Wire {
    let (stream, _) = within("a connection to the service", listener.accept()).await.unwrap();
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
    Wire::new(stream)
}

/// A sidecar with one idle connection to its service.
struct World {
    service: Service,
    sidecar: Sidecar,
    client: Wire,
    wire: Wire,
}

impl World {
    async fn start(flags: &[&str]) -> Self {
        let service = Service::new().await;
        let sidecar = Sidecar::start(service.address, &[&KEPT, flags].concat()).await;
        let mut client = sidecar.connect().await;
        client.send(request("GET", "/first", &[], "")).await;
        let mut wire = accept(service.listener()).await;
        wire.message().await;
        wire.send(OK).await;
        client.message().await.has_status(200);
        Self { service, sidecar, client, wire }
    }

    /// Sends a request with a new key, which the service must get on another connection.
    async fn continues_elsewhere(&mut self, case: &str) -> Wire {
        let key = format!("Idempotency-Key: {case}");
        self.client.send(request("POST", "/next", &[&key], "{}")).await;
        let mut wire = accept(self.service.listener()).await;
        assert_eq!(wire.message().await.head.line, "POST /next HTTP/1.1", "{case}");
        wire.send("HTTP/1.1 201 Created\r\nContent-Length: 4\r\n\r\nnext").await;
        assert_eq!(self.client.message().await.has_status(201).text(), "next", "{case}");
        wire
    }
}

#[tokio::test]
async fn a_connection_is_used_again_after_every_complete_response() {
    let mut world = World::start(&[]).await;
    let long = "x".repeat(300_000);
    for (method, response) in [
        ("HEAD", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n".to_owned()),
        ("GET", "HTTP/1.1 204 No Content\r\n\r\n".to_owned()),
        ("GET", "HTTP/1.1 304 Not Modified\r\n\r\n".to_owned()),
        (
            "GET",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 1\r\n\r\n"
                .to_owned(),
        ),
        ("POST", format!("HTTP/1.1 100 Continue\r\n\r\n{OK}")),
        ("GET", format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{long}", long.len())),
        ("GET", "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok".to_owned()),
    ] {
        world.client.send(request(method, "/", &[], "")).await;
        world.wire.message().await;
        // In two pieces, so that the response is not complete at once.
        let (first, second) = response.split_at(response.len() - 1);
        world.wire.send(first).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        world.wire.send(second).await;
        let mut head = world.client.head().await;
        while head.status() < 200 {
            head = world.client.head().await;
        }
        if method != "HEAD" {
            world.client.body(head).await;
        }
    }
    world.service.is_not_called().await;
}

#[tokio::test]
async fn a_connection_is_not_used_again_after_a_response_that_ends_it() {
    for (n, response) in [
        "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        // More than the response: with it, and after it.
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison",
        "HTTP/1.1 204 No Content\r\n\r\npoison",
    ]
    .into_iter()
    .enumerate()
    {
        let mut world = World::start(&[]).await;
        world.client.send(request("GET", "/", &[], "")).await;
        world.wire.message().await;
        world.wire.send(response).await;
        world.client.message().await;
        world.wire.ends().await;
        world.continues_elsewhere(&format!("k{n}")).await;
    }
}

#[tokio::test]
async fn a_response_to_no_request_is_never_the_response_to_the_next_one() {
    let poison = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison";
    let mut world = World::start(&[]).await;
    for n in 0..30 {
        // Nothing waits here: the bytes are in the socket, and the sidecar may not know of them yet.
        world.wire.send(if n % 2 == 0 { poison } else { "HTTP/1.1 500" }).await;
        world.wire = world.continues_elsewhere(&format!("k{n}")).await;
    }
}

#[tokio::test]
async fn a_connection_that_the_service_closed_while_it_was_idle_fails_no_request() {
    for is_reset in [false, true] {
        let mut world = World::start(&[]).await;
        for n in 0..30 {
            if is_reset {
                world.wire = Wire::new(tokio::io::empty());
            } else {
                world.wire.finish().await;
            }
            // Nothing waits here, as in the test before.
            world.wire = world.continues_elsewhere(&format!("{is_reset}-{n}")).await;
        }
    }
}

#[tokio::test]
async fn a_request_that_meets_the_end_of_its_connection_is_sent_on_another_one() {
    for n in 0..10 {
        let mut world = World::start(&[]).await;
        // The sidecar learns of both at once, and of the request first.
        world.sidecar.process.freeze();
        world.client.send(request("POST", "/next", &[&format!("Idempotency-Key: {n}")], "{}")).await;
        world.wire.finish().await;
        world.sidecar.process.signal(Signal::CONT);
        let mut wire = accept(world.service.listener()).await;
        assert_eq!(wire.message().await.head.line, "POST /next HTTP/1.1");
        wire.send(OK).await;
        world.client.message().await.has_status(200);
        world.wire.ends().await;
    }
}

#[tokio::test]
async fn a_connection_that_the_service_closes_while_it_is_idle_is_closed_at_once() {
    let mut world = World::start(&[]).await;
    world.wire.finish().await;
    let finished = Instant::now();
    world.wire.ends().await;
    assert!(finished.elapsed() < Duration::from_secs(60));
}

#[tokio::test]
async fn a_request_that_the_service_may_have_read_is_never_sent_again() {
    for (fields, slug) in [(&[][..], "upstream-unanswered"), (&[KEY], "outcome-unknown")] {
        for is_read in [true, false] {
            let mut world = World::start(&[]).await;
            world.client.send(request("POST", "/pay", fields, "{}")).await;
            if is_read {
                world.wire.message().await;
            } else {
                world.wire.take(1).await;
            }
            world.wire = Wire::new(tokio::io::empty());
            world.client.message().await.is_problem(502, slug);
            world.service.is_not_called().await;
        }
    }
}

#[tokio::test]
async fn a_request_is_not_sent_again_after_a_new_connection_ended() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &KEPT).await;
    for (fields, slug) in [(&[][..], "upstream-unanswered"), (&[KEY], "outcome-unknown")] {
        let mut client = sidecar.connect().await;
        client.send(request("POST", "/pay", fields, "{}")).await;
        let mut wire = service.accept().await;
        wire.finish().await;
        client.message().await.is_problem(502, slug);
        service.is_not_called().await;
    }
}

#[tokio::test]
async fn no_more_idle_connections_are_kept_than_files_allow() {
    // An eighth of the files.
    const FILES: usize = 1024;
    const MAX_IDLE: usize = FILES / 8;
    const ALL: usize = MAX_IDLE + 8;
    let service = Service::new().await;
    let mut command = Command::new("sh");
    let script = format!("ulimit -n {FILES}; exec \"$0\" \"$@\"");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_oncegate"), "proxy"]);
    command.args(["--listen=127.0.0.1:0", "--admin=127.0.0.1:0", "--store=memory:"]).args(KEPT);
    let sidecar = Sidecar::run(command.arg(format!("--to=http://{}", service.address))).await;
    let (mut clients, mut wires) = (Vec::new(), Vec::new());
    for _ in 0..ALL {
        let mut client = sidecar.connect().await;
        client.send(request("GET", "/", &[], "")).await;
        let mut wire = service.accept().await;
        wire.message().await;
        clients.push(client);
        wires.push(wire);
    }
    for (client, wire) in clients.iter_mut().zip(&mut wires) {
        wire.send(OK).await;
        client.message().await.has_status(200);
    }
    let mut open = ALL;
    until("the others are closed", async || {
        open = 0;
        for wire in &mut wires {
            open +=
                usize::from(tokio::time::timeout(Duration::from_millis(1), wire.try_head()).await.is_err());
        }
        open <= MAX_IDLE
    })
    .await;
    assert_eq!(open, MAX_IDLE);
}

#[tokio::test]
async fn a_request_that_waits_for_its_connection_takes_one_that_becomes_idle() {
    // Two connections wait to be accepted, so that no further one can be made.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let sidecar = Sidecar::start(address, &KEPT).await;
    let mut first = sidecar.connect().await;
    first.send(request("GET", "/first", &[], "")).await;
    let mut wire = Wire::new(within("a connection", listener.accept()).await.unwrap().0);
    wire.message().await;
    let mut waiting = Vec::new();
    while let Ok(Ok(stream)) =
        tokio::time::timeout(Duration::from_millis(300), TcpStream::connect(address)).await
    {
        waiting.push(stream);
    }
    let mut second = sidecar.connect().await;
    second.send(request("POST", "/second", &[KEY], "{}")).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    wire.send(OK).await;
    first.message().await.has_status(200);
    assert_eq!(wire.message().await.head.line, "POST /second HTTP/1.1");
    wire.send(OK).await;
    second.message().await.has_status(200);
}

#[tokio::test]
async fn the_rest_of_a_request_reaches_the_service_after_its_response() {
    const HALF: usize = 4_000_000;
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &KEPT).await;
    // The second response does not fit into the sockets, and its client reads nothing before it has sent everything.
    for length in [2, 16_000_000] {
        let mut client = sidecar.connect().await;
        client.send(format!("PUT /file HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n", 2 * HALF)).await;
        let (stream, _) = within("a connection", service.listener().accept()).await.unwrap();
        let (mut reading, mut writing) = stream.into_split();
        let mut received = Vec::new();
        within("a head", reading.read_buf(&mut received)).await.unwrap();
        let received = tokio::spawn(async move {
            while !received.ends_with(&[b'x'; 64]) || received.len() < 2 * HALF {
                assert!(reading.read_buf(&mut received).await.unwrap() > 0);
            }
            reading
        });
        let response = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{}", "o".repeat(length));
        let (progress, mut written) = watch::channel(0);
        let sent = tokio::spawn(async move {
            for piece in response.as_bytes().chunks(65536) {
                writing.write_all(piece).await.unwrap();
                progress.send_modify(|written| *written += piece.len());
            }
            writing
        });
        // All of it was written, or nothing more fits into the sockets.
        while let Ok(Ok(())) = tokio::time::timeout(Duration::from_millis(500), written.changed()).await {}
        client.send("x".repeat(HALF)).await;
        client.send("x".repeat(HALF)).await;
        let _open = within("the whole request", received).await.unwrap();
        assert_eq!(client.message().await.has_status(200).body.len(), length);
        let _open = sent.await.unwrap();
    }
}

#[tokio::test]
async fn uploads_that_go_on_after_their_response_are_few_and_end() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[KEPT[0], KEPT[1], "--max-in-flight-without-key=4"]).await;
    let stream = TcpStream::connect(sidecar.address).await.unwrap();
    let (mut client, connection) = within("a connection", h2::client::handshake(stream)).await.unwrap();
    tokio::spawn(connection);
    let mut uploads = Vec::new();
    let mut wires = Vec::new();
    for _ in 0..10 {
        let request = http::Request::post("http://a/up").header("content-length", "1000").body(()).unwrap();
        let (response, mut upload) = client.send_request(request, false).unwrap();
        upload.send_data(Bytes::from_static(b"x"), false).unwrap();
        let mut wire = accept(service.listener()).await;
        wire.head().await;
        wire.send("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n").await;
        assert_eq!(within("a response", response).await.unwrap().status(), 404);
        uploads.push(upload);
        wires.push(wire);
    }
    // Half of the limit goes on for a while, although nothing comes.
    let (few, others) = wires.split_at_mut(2);
    for wire in others {
        tokio::select! {
            biased;
            _ = few[0].rest() => panic!("a client that sends everything before it reads gets no time"),
            _ = wire.rest() => {}
        }
    }
    for wire in few {
        wire.rest().await;
    }
    until("the uploads are not counted", async || {
        crate::operations::series(&sidecar, "oncegate_requests_without_key_in_flight").await == Some(0.0)
    })
    .await;
}

#[tokio::test]
async fn a_client_that_leaves_in_the_middle_of_a_response_ends_the_connection_to_the_service() {
    let mut world = World::start(&[]).await;
    world.client.send(request("GET", "/long", &[], "")).await;
    world.wire.message().await;
    world.wire.send("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nbegin").await;
    world.client.head().await;
    drop(std::mem::replace(&mut world.client, world.sidecar.connect().await));
    world.wire.ends().await;
    world.continues_elsewhere("after").await;
}

#[tokio::test]
async fn a_silent_service_is_given_up_after_its_time_and_not_before() {
    // With the shorter one, there is no time for a coarse wait.
    for millis in [200, 1500] {
        let timeout = Duration::from_millis(millis);
        let mut world = World::start(&[&format!("--upstream-timeout={millis}ms")]).await;
        for begins in [false, true] {
            let sent = Instant::now();
            world.client.send(request("GET", "/silent", &[], "")).await;
            world.wire.message().await;
            if begins {
                world.wire.send("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nbegin").await;
                world.client.head().await;
                assert_eq!(world.client.rest().await, b"begin");
            } else {
                world.client.message().await.is_problem(504, "upstream-unanswered");
            }
            let after = sent.elapsed();
            assert!(after >= timeout && after < timeout + Duration::from_secs(20), "{millis} {after:?}");
            world.wire.ends().await;
            if !begins {
                world.wire = world.continues_elsewhere("after").await;
            }
        }
    }
}

#[tokio::test]
async fn a_client_that_does_not_finish_its_second_head_is_disconnected() {
    let service = Service::new().await.answers(OK);
    let flags = [&KEPT[..], &["--client-idle-timeout=3s"]].concat();
    let sidecar = Sidecar::start(service.address, &flags).await;
    let mut ends = Vec::new();
    for beginning in ["", "GET / HTTP/1.1\r\nX-A"] {
        let mut client = sidecar.connect().await;
        client.send(request("GET", "/", &[], "")).await;
        client.message().await.has_status(200);
        client.send(beginning).await;
        // Longer than the time that clients get here.
        let end = async move { client.raw_rest().await };
        ends.push(tokio::spawn(tokio::time::timeout(Duration::from_secs(60), end)));
    }
    for end in ends {
        assert!(end.await.unwrap().is_ok());
    }
}

#[tokio::test]
async fn interim_responses_without_end_are_a_broken_service() {
    for interim in ["HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n"] {
        for (fields, slug) in [(&[][..], "upstream-unanswered"), (&[KEY], "outcome-unknown")] {
            let service = Service::new().await;
            // No limit of time ends this request.
            let flags = [&KEPT[..], &["--upstream-timeout=1h"]].concat();
            let sidecar = Sidecar::start(service.address, &flags).await;
            let mut client = sidecar.connect().await;
            client.send(request("POST", "/pay", fields, "{}")).await;
            let mut wire = service.accept().await;
            wire.message().await;
            let flood = interim.repeat(1_000);
            let flooding = tokio::spawn(async move { while wire.try_send(&flood).await.is_ok() {} });
            client.message().await.is_problem(502, slug);
            within("the end of the flood", flooding).await.unwrap();
            service.is_not_called().await;
        }
    }
}

#[tokio::test]
async fn a_response_after_many_interim_responses_is_passed_on() {
    let mut world = World::start(&[]).await;
    world.client.send(request("POST", "/pay", &[KEY], "{}")).await;
    world.wire.message().await;
    // Each arrives on its own, so that the reads are counted exactly at last.
    for _ in 0..100 {
        world.wire.send("HTTP/1.1 102 Processing\r\n\r\n").await;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let fields: String = (0..100).map(|n| format!("X-{n}: {}\r\n", "v".repeat(1_000))).collect();
    let long = "x".repeat(300_000);
    world.wire.send(format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: {}\r\n\r\n{long}", long.len())).await;
    assert_eq!(world.client.message().await.has_status(200).body.len(), long.len());
    world.service.is_not_called().await;
}

/// The bytes of interim responses stay below their limit here, but they never pause: only the limit of time ends the request.
#[tokio::test]
async fn the_limit_of_time_ends_a_request_whose_service_sends_interim_responses() {
    let service = Service::new().await;
    let flags = [&KEPT[..], &["--upstream-timeout=300ms"]].concat();
    let sidecar = Sidecar::start(service.address, &flags).await;
    let mut client = sidecar.connect().await;
    client.send(request("POST", "/pay", &[KEY], "{}")).await;
    let mut wire = service.accept().await;
    wire.message().await;
    let dripping = tokio::spawn(async move {
        while wire.try_send("HTTP/1.1 102 Processing\r\n\r\n").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    client.message().await.is_problem(504, "outcome-unknown");
    within("the end of the connection", dripping).await.unwrap();
}
