//! Header fields: those of one connection, those that a proxy adds, and those that a client must not forge.

use crate::support::{Head, Message, Service, Sidecar, Wire, request};
use crate::{KEY, OK};

/// Sends a request through a new sidecar, and returns what the service and the client received.
async fn pass(sent: &str, response: &str) -> (Message, Message) {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[]).await;
    let mut client = sidecar.connect().await;
    client.send(sent).await;
    let mut wire = service.accept().await;
    let seen = wire.message().await;
    wire.send(response).await;
    drop(wire);
    (seen, client.message().await)
}

fn absent(head: &Head, names: &[&str]) {
    for name in names {
        assert_eq!(head.all(name), [""; 0], "{name}");
    }
}

#[tokio::test]
async fn hop_by_hop_fields_are_removed_in_both_directions() {
    let sent = request(
        "GET",
        "/a?b=%20c",
        &[
            "Connection: close, X-Mine",
            "Connection: X-Mine-Too, Authorization",
            "X-Mine: 1",
            "x-mine-too: 1",
            "X-Kept: 1",
            "x-kept: 2",
            "Authorization: Bearer t",
            "Keep-Alive: timeout=5",
            "Proxy-Connection: keep-alive",
            "Proxy-Authorization: Basic eDp5",
            "TE: gzip;q=0.5",
        ],
        "",
    );
    let response = "HTTP/1.1 200 OK\r\nConnection: keep-alive, X-Theirs\r\nX-Theirs: 1\r\nX-Kept: 1\r\nX-Kept: 2\r\n\
                  Keep-Alive: timeout=5\r\nProxy-Connection: keep-alive\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n\
                  Content-Length: 2\r\n\r\nok";
    let (seen, got) = pass(&sent, response).await;
    assert_eq!(seen.head.line, "GET /a?b=%20c HTTP/1.1");
    let of_one_connection =
        ["keep-alive", "proxy-connection", "proxy-authorization", "te", "transfer-encoding"];
    absent(&seen.head, &of_one_connection);
    absent(&seen.head, &["x-mine", "x-mine-too", "connection", "upgrade"]);
    assert_eq!(seen.head.all("x-kept"), ["1", "2"]);
    // A client may not remove the fields that identify its request.
    assert_eq!(seen.get("authorization"), Some("Bearer t"));
    absent(&got.head, &["keep-alive", "proxy-connection", "x-theirs"]);
    assert_eq!(got.head.all("x-kept"), ["1", "2"]);
    assert_eq!(got.head.all("set-cookie"), ["a=1", "b=2"]);
    assert_eq!(got.has_status(200).text(), "ok");
}

#[tokio::test]
async fn the_service_learns_the_client_address_and_scheme() {
    let (seen, _) = pass(&request("GET", "/", &[], ""), OK).await;
    assert_eq!(seen.get("host"), Some("orders.test"));
    assert_eq!(seen.get("forwarded"), Some(r#"for=127.0.0.1;proto=http;host="orders.test""#));
    assert_eq!(seen.get("x-forwarded-for"), Some("127.0.0.1"));
    assert_eq!(seen.get("x-forwarded-proto"), Some("http"));
    assert_eq!(seen.get("x-forwarded-host"), Some("orders.test"));
    assert_eq!(seen.get("via"), Some("1.1 oncegate"));
    absent(&seen.head, &["oncegate-record", "oncegate-token", "oncegate-attempt"]);
}

#[tokio::test]
async fn forwarding_fields_of_earlier_proxies_are_kept() {
    let before = [
        "Forwarded: for=198.51.100.1;proto=https",
        "X-Forwarded-For: 198.51.100.1",
        "X-Forwarded-For: 203.0.113.2",
        "X-Forwarded-Proto: https",
        "X-Forwarded-Host: shop.test",
        "Via: 2 edge",
    ];
    let (seen, _) = pass(&request("GET", "/", &before, ""), OK).await;
    assert_eq!(
        seen.get("forwarded"),
        Some(r#"for=198.51.100.1;proto=https, for=127.0.0.1;proto=http;host="orders.test""#)
    );
    assert_eq!(seen.get("x-forwarded-for"), Some("198.51.100.1, 203.0.113.2, 127.0.0.1"));
    assert_eq!(seen.get("x-forwarded-proto"), Some("https"));
    assert_eq!(seen.get("x-forwarded-host"), Some("shop.test"));
    assert_eq!(seen.head.all("via").join(", "), "2 edge, 1.1 oncegate");
}

#[tokio::test]
async fn via_names_the_http_version_of_the_client() {
    let (seen, _) = pass("GET / HTTP/1.0\r\nHost: orders.test\r\n\r\n", OK).await;
    assert_eq!(seen.get("via"), Some("1.0 oncegate"));
    assert!(seen.head.line.ends_with("HTTP/1.1"));
}

#[tokio::test]
async fn only_the_sidecar_can_set_the_attempt_fields() {
    let forged = [
        "Oncegate-Record: x", "oncegate-token: 99", "ONCEGATE-ATTEMPT: 7", "Oncegate-Later: 1",
        "Oncegate_Token: 9",
    ];
    let (seen, _) = pass(&request("GET", "/", &forged, ""), OK).await;
    let ours = |head: &Head| head.fields.iter().filter(|(name, _)| name.starts_with("oncegate")).count();
    assert_eq!(ours(&seen.head), 0, "{:?}", seen.head);

    let (seen, got) = pass(&request("POST", "/", &[&forged[..], &[KEY]].concat(), "{}"), OK).await;
    assert_eq!(ours(&seen.head), 3, "{:?}", seen.head);
    let record = seen.get("oncegate-record").unwrap();
    assert!(record.len() == 64 && record.bytes().all(|b| b.is_ascii_hexdigit()), "{record}");
    assert_ne!(seen.get("oncegate-token"), Some("99"));
    assert_eq!(seen.get("oncegate-attempt"), Some("1"));
    assert_eq!(seen.get("idempotency-key"), Some("intent-1"));
    assert_eq!(ours(&got.head), 0, "{:?}", got.head);
}

#[tokio::test]
async fn every_attempt_has_a_greater_token() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[]).await;
    let mut client = sidecar.connect().await;
    let mut wire: Option<Wire> = None;
    let mut said = Vec::new();
    for response in ["HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n", OK] {
        client.send(request("POST", "/", &[KEY], "{}")).await;
        let last = match wire.take() {
            Some(wire) => wire,
            None => service.accept().await,
        };
        let (mut this, seen) = service.next(last).await;
        said.push(
            ["record", "token", "attempt"]
                .map(|name| seen.get(&format!("oncegate-{name}")).unwrap().to_owned()),
        );
        this.send(response).await;
        client.message().await;
        wire = Some(this);
    }
    let number = |at: usize, what: usize| said[at][what].parse::<u64>().unwrap();
    assert_eq!(said[0][0], said[1][0]);
    assert!(number(0, 1) < number(1, 1), "{said:?}");
    assert!(number(0, 2) < number(1, 2), "{said:?}");
}

#[tokio::test]
async fn the_store_directive_of_the_service_is_removed_from_the_response() {
    let response = "HTTP/1.1 200 OK\r\nIdempotency-Store: tombstone\r\nContent-Length: 2\r\n\r\nok";
    for fields in [&[][..], &[KEY]] {
        let (_, got) = pass(&request("POST", "/", fields, "{}"), response).await;
        absent(&got.has_status(200).to_owned().head, &["idempotency-store"]);
    }
}

#[tokio::test]
async fn a_target_in_absolute_form_names_the_same_resource() {
    // RFC 9112, 3.2.2: the authority in the target counts, whatever `Host` contains.
    let absolute = request("POST", "http://shop.test:81/orders?a=1", &[KEY], "{}");
    let (seen, _) = pass(&absolute, OK).await;
    assert_eq!(seen.head.line, "POST /orders?a=1 HTTP/1.1");
    assert_eq!(seen.get("host"), Some("shop.test:81"));

    let service = Service::new().await.answers(OK);
    let mut sidecar = Sidecar::start(service.address, &[]).await;
    assert!(!sidecar.ask(&absolute).await.has_status(200).is_replay());
    let relative = request("POST", "/orders?a=1", &[KEY], "{}");
    let same = relative.replace("Host: orders.test", "Host: Shop.Test:81");
    assert!(sidecar.ask(&same).await.has_status(200).is_replay());
    for _ in 0..2 {
        sidecar.ask(&relative).await.is_problem(422, "host-differs");
    }
    // Once a minute, with the setting that helps.
    sidecar.process.logs("set `authority` (Settings::with_authority) to ignore").await;
    assert_eq!(sidecar.process.error_lines("requests that came first to another host").len(), 1);
    assert_eq!(service.requests(), 1);
}

#[tokio::test]
async fn a_request_without_exactly_one_host_is_refused() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[]).await;
    for head in [
        "GET / HTTP/1.1\r\n",
        "GET / HTTP/1.1\r\nHost: a.test\r\nHost: b.test\r\n",
        "GET / HTTP/1.1\r\nHost: a.test\r\nHost: a.test\r\n",
        "GET / HTTP/1.1\r\nHost: a.test, b.test\r\n",
        "GET / HTTP/1.1\r\nHost: a.test/b\r\n",
        "GET / HTTP/1.1\r\nHost: me@a.test\r\n",
    ] {
        sidecar.ask(&format!("{head}\r\n")).await.has_status(400);
    }
    service.is_not_called().await;
}

#[tokio::test]
async fn a_client_of_http_1_0_needs_no_host_and_gets_no_chunks() {
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n";
    let (seen, got) = pass("GET / HTTP/1.0\r\n\r\n", chunked).await;
    assert!(seen.get("host").is_some_and(|host| host.starts_with("127.0.0.1:")));
    assert_eq!((got.get("transfer-encoding"), got.text()), (None, "ok"));
}

#[tokio::test]
async fn connect_requests_are_refused() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[]).await;
    for target in ["db.test:5432", "/"] {
        let mut client = sidecar.connect().await;
        client.send(format!("CONNECT {target} HTTP/1.1\r\nHost: db.test:5432\r\n\r\n")).await;
        let status = client.message().await.status();
        assert!(matches!(status, 400 | 405 | 501), "{status}");
    }
    service.is_not_called().await;
}

#[tokio::test]
async fn unusual_methods_and_targets_pass() {
    for (method, target) in
        [("OPTIONS", "*"), ("PURGE", "/a"), ("REPORT", "/a//b/../c?x=y&&z#"), ("DELETE", "/%00%ff")]
    {
        let (seen, got) = pass(&request(method, target, &[KEY], ""), OK).await;
        let target = target.trim_end_matches('#');
        assert_eq!(seen.head.line, format!("{method} {target} HTTP/1.1"));
        got.has_status(200);
    }
}

#[tokio::test]
async fn fields_that_only_the_sidecar_sets_do_not_come_from_the_service() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[]).await;
    let ours = [
        "idempotency-status", "idempotency-redacted", "oncegate-record", "oncegate-outcome",
        "oncegate-authorize",
    ];
    let fields: String = ours.iter().map(|name| format!("{name}: allow\r\n")).collect();
    let mut client = sidecar.connect().await;
    client.send(request("POST", "/pay", &[KEY], "{}")).await;
    let mut wire = service.accept().await;
    wire.message().await;
    wire.send(format!("HTTP/1.1 201 Created\r\n{fields}X-Own: 1\r\nContent-Length: 2\r\n\r\nok")).await;
    let first = client.message().await;
    assert_eq!(first.has_status(201).get("x-own"), Some("1"));
    absent(&first.head, &ours);
    client.send(request("POST", "/pay", &[KEY], "{}")).await;
    let replay = client.message().await;
    assert!(replay.is_replay());
    absent(&replay.head, &ours);
}
