//! HTTP/1.1 and HTTP/2, in clear text and over TLS, on both sides.

use oncegate_testkit::until;
use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::process::Command;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, Version};
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::BoxBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http2::SendRequest;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::support::{Process, Service, Sidecar, Stream, Wire, request, sidecar, within};
use crate::{KEY, OK};

type Body = BoxBody<Bytes, Infallible>;

fn text(text: &'static str) -> Body {
    Full::from(text).boxed()
}

fn with_trailers(text: &'static str, name: &'static str, value: &'static str) -> Body {
    let mut trailers = HeaderMap::new();
    trailers.insert(name, HeaderValue::from_static(value));
    let frames = [Ok(Frame::data(Bytes::from(text))), Ok(Frame::trailers(trailers))];
    StreamBody::new(futures_util::stream::iter(frames)).boxed()
}

/// A client of HTTP/2 on this connection.
async fn http2(stream: impl Stream + 'static) -> SendRequest<Body> {
    let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (client, connection) = within("an HTTP/2 connection", handshake).await.unwrap();
    tokio::spawn(connection);
    client
}

async fn send(
    client: &mut SendRequest<Body>,
    request: Request<Body>,
) -> (http::response::Parts, Bytes, HeaderMap) {
    let response = within("a response", client.send_request(request)).await.unwrap();
    let (parts, body) = response.into_parts();
    let body = within("a body", body.collect()).await.unwrap();
    let trailers = body.trailers().cloned().unwrap_or_default();
    (parts, body.to_bytes(), trailers)
}

/// A service that speaks HTTP/2 only. Its response shows what it received.
async fn serve_http2(stream: impl Stream + 'static) {
    let service = service_fn(|request: Request<Incoming>| async move {
        let (parts, body) = request.into_parts();
        let body = body.collect().await.unwrap();
        let mut response = Response::new(with_trailers("from the service", "grpc-status", "0"));
        let headers = response.headers_mut();
        let mut say = |name, value: &str| headers.append(name, HeaderValue::from_str(value).unwrap());
        say("x-version", &format!("{:?}", parts.version));
        say("x-method", parts.method.as_str());
        say("x-target", &parts.uri.to_string());
        for host in parts.headers.get_all("host") {
            say("x-host", host.to_str().unwrap());
        }
        for te in parts.headers.get_all("te") {
            say("x-te", te.to_str().unwrap());
        }
        for name in parts.headers.keys().filter(|name| name.as_str().starts_with("oncegate-")) {
            say("x-attempt", name.as_str());
        }
        if let Some(trailers) = body.trailers() {
            say("x-trailers", &format!("{trailers:?}"));
        }
        say("x-length", &body.to_bytes().len().to_string());
        Ok::<_, Infallible>(response)
    });
    let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    // The sidecar may end the connection at any time.
    let _ended = server.serve_connection(TokioIo::new(stream), service).await;
}

/// A certificate authority, and its certificate for `localhost`.
pub(crate) struct Authority {
    directory: tempfile::TempDir,
}

impl Authority {
    pub(crate) fn new() -> Self {
        Self::of(|_| ())
    }

    /// An authority whose certificate is valid between these times, in seconds since 1970.
    pub(crate) fn valid(from: u64, to: u64) -> Self {
        let at = |seconds| rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds);
        Self::of(|certificate| (certificate.not_before, certificate.not_after) = (at(from), at(to)))
    }

    fn of(change: impl FnOnce(&mut CertificateParams)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut authority = CertificateParams::new([]).unwrap();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Each authority has a name of its own.
        let name = directory.path().display().to_string();
        authority.distinguished_name.push(rcgen::DnType::CommonName, name);
        let issuer = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
        let mut certificate = CertificateParams::new(names).unwrap();
        change(&mut certificate);
        let certificate = certificate.signed_by(&key, &issuer).unwrap();
        let write = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
        write("ca.pem", &issuer.pem());
        write("cert.pem", &certificate.pem());
        write("key.pem", &key.serialize_pem());
        Self { directory }
    }

    pub(crate) fn file(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }

    pub(crate) fn client(&self, protocols: &[&[u8]]) -> TlsConnector {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.file("ca.pem")).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config =
            ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let mut config = config.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        TlsConnector::from(Arc::new(config))
    }

    pub(crate) fn server(&self, protocols: &[&[u8]]) -> TlsAcceptor {
        let chain = vec![CertificateDer::from_pem_file(self.file("cert.pem")).unwrap()];
        let key = PrivateKeyDer::from_pem_file(self.file("key.pem")).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config =
            ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let mut config = config.with_no_client_auth().with_single_cert(chain, key).unwrap();
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        TlsAcceptor::from(Arc::new(config))
    }
}

#[tokio::test]
async fn a_client_may_speak_http_2_without_tls() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--threads=1", "--scope=header:authorization"]).await;
    let mut client = http2(TcpStream::connect(sidecar.address).await.unwrap()).await;
    let asked = Request::post("http://shop.test/orders?a=1")
        .header("idempotency-key", "intent-1")
        .header("cookie", "a=1")
        .header("cookie", "b=2")
        .body(text("{}"));
    let response = tokio::spawn(async move {
        let first = send(&mut client, asked.unwrap()).await;
        let again = Request::post("http://shop.test/orders?a=1").header("idempotency-key", "intent-1");
        (first, send(&mut client, again.body(text("{}")).unwrap()).await)
    });
    let mut wire = service.accept().await;
    let seen = wire.message().await;
    assert_eq!(seen.head.line, "POST /orders?a=1 HTTP/1.1");
    assert_eq!((seen.get("host"), seen.text()), (Some("shop.test"), "{}"));
    assert_eq!(seen.get("via"), Some("2 oncegate"));
    assert_eq!(seen.get("x-forwarded-host"), Some("shop.test"));
    // RFC 9113, 8.2.3: on the way to HTTP/1.1 several cookie fields become one line.
    assert_eq!(seen.get("cookie"), Some("a=1; b=2"));
    wire.send("HTTP/1.1 201 Created\r\nConnection: keep-alive\r\nKeep-Alive: timeout=5\r\nContent-Length: 2\r\n\r\nok").await;
    let ((first, body, _), (second, again, _)) = within("both responses", response).await.unwrap();
    assert_eq!((first.status.as_u16(), first.version, &body[..]), (201, Version::HTTP_2, &b"ok"[..]));
    assert_eq!((second.status.as_u16(), &again[..]), (201, &b"ok"[..]));
    assert_eq!(
        (first.headers.get("idempotent-replayed"), &second.headers["idempotent-replayed"]),
        (None, &"true".parse().unwrap())
    );
}

#[tokio::test]
async fn many_streams_of_one_http_2_connection_run_at_once() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--threads=1"]).await;
    let client = http2(TcpStream::connect(sidecar.address).await.unwrap()).await;
    let asked: Vec<_> = (0..20)
        .map(|n| {
            let mut client = client.clone();
            let asked = Request::post("http://shop.test/").header("idempotency-key", format!("k{n}"));
            tokio::spawn(async move { send(&mut client, asked.body(text("{}")).unwrap()).await.0.status })
        })
        .collect();
    // The service answers no request before it has received all of them.
    let mut wires = Vec::new();
    for _ in 0..20 {
        let mut wire = service.accept().await;
        wire.message().await;
        wires.push(wire);
    }
    for wire in &mut wires {
        wire.send(OK).await;
    }
    for status in asked {
        assert_eq!(within("a response", status).await.unwrap(), 200);
    }
}

#[tokio::test]
async fn a_client_may_speak_tls_with_either_version() {
    let authority = Authority::new();
    let service = Service::new().await;
    let mut command = sidecar(&format!("http://{}", service.address));
    command.args([
        "--store=memory:",
        "--threads=1",
        "--tls-cert",
        &authority.file("cert.pem"),
        "--tls-key",
        &authority.file("key.pem"),
    ]);
    let sidecar = Sidecar::run(&mut command).await;
    let service = service.answers(OK);
    let offers: [(&[&[u8]], _); 4] = [
        (&[b"h2", b"http/1.1"], Some(&b"h2"[..])),
        (&[b"h2"], Some(b"h2")),
        (&[b"http/1.1"], Some(b"http/1.1")),
        (&[], None),
    ];
    for (offered, agreed) in offers {
        let stream = TcpStream::connect(sidecar.address).await.unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        let stream = within("a handshake", authority.client(offered).connect(name, stream)).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), agreed);
        if agreed == Some(b"h2") {
            let asked = Request::get("https://localhost/").body(text("")).unwrap();
            assert_eq!(send(&mut Box::pin(http2(stream)).await, asked).await.0.status, 200);
        } else {
            let mut wire = Wire::new(stream);
            wire.send(request("GET", "/", &[], "")).await;
            wire.message().await.has_status(200);
        }
    }
    assert_eq!((service.requests(), service.connections()), (4, 1));
    // A client that does not speak TLS gets no response, and does not block other clients.
    let mut plain = sidecar.connect().await;
    plain.send(request("GET", "/", &[], "")).await;
    let response = plain.rest().await;
    assert!(!response.starts_with(b"HTTP/"), "{response:?}");
}

#[tokio::test]
async fn the_service_learns_that_the_client_used_tls() {
    let authority = Authority::new();
    let service = Service::new().await;
    let mut command = sidecar(&format!("http://{}", service.address));
    command.args([
        "--store=memory:",
        "--tls-cert",
        &authority.file("cert.pem"),
        "--tls-key",
        &authority.file("key.pem"),
    ]);
    let sidecar = Sidecar::run(&mut command).await;
    let stream = TcpStream::connect(sidecar.address).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let mut client = Wire::new(authority.client(&[]).connect(name, stream).await.unwrap());
    client.send(request("GET", "/", &[], "")).await;
    let seen = service.accept().await.message().await;
    assert_eq!(seen.get("x-forwarded-proto"), Some("https"));
    assert_eq!(seen.get("forwarded"), Some(r#"for=127.0.0.1;proto=https;host="orders.test""#));
}

fn said(parts: &http::response::Parts, name: &str) -> String {
    parts.headers.get_all(name).iter().map(|value| value.to_str().unwrap()).collect::<Vec<_>>().join(", ")
}

/// Over HTTP/2 each host has a connection of its own, and clients can invent any number of hosts.
#[tokio::test]
async fn invented_hosts_do_not_use_up_all_connections() {
    let service = Service::new().await;
    let mut command = tokio::process::Command::new("sh");
    command.args(["-c", "ulimit -n 160; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_oncegate"), "proxy"]);
    command.args(["--listen=127.0.0.1:0", "--admin=127.0.0.1:0", "--store=memory:"]);
    command.args(["--threads=1", "--upstream-protocol=http2", &format!("--to=http://{}", service.address)]);
    // Longer than a hundred requests take on a busy machine: a connection that ends makes place for another one.
    command.arg("--upstream-idle-timeout=10s");
    let sidecar = Sidecar::run(&mut command).await;
    let listener = service.into_listener();
    let connections = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counter = connections.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            tokio::spawn(serve_http2(stream));
        }
    });
    let mut client = sidecar.connect().await;
    let mut get = async |host: &str| {
        client.send(format!("GET /large HTTP/1.1\r\nHost: {host}\r\n\r\n")).await;
        client.message().await
    };
    let mut refused = 0;
    for number in 0..100 {
        let response = get(&format!("host-{number}.test")).await;
        if response.status() != 200 {
            response.is_problem(503, "overloaded");
            refused += 1;
        }
    }
    // An eighth of the open files.
    assert!(connections.load(std::sync::atomic::Ordering::Relaxed) <= 20, "{refused} refused");
    assert!(refused >= 80);
    // A host with a connection is still served, and new hosts are served after a while.
    get("host-0.test").await.has_status(200);
    let mut other = sidecar.connect().await;
    until("a further host is served", async || {
        other.send("GET / HTTP/1.1\r\nHost: late.test\r\n\r\n").await;
        other.message().await.status() == 200
    })
    .await;
}

#[tokio::test]
async fn a_service_may_speak_http_2_without_tls() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--threads=1", "--upstream-protocol=http2"]).await;
    let listener = service.into_listener();
    let connections = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counter = connections.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            tokio::spawn(serve_http2(stream));
        }
    });
    // From HTTP/1.1 to HTTP/2.
    let mut client = sidecar.connect().await;
    client
        .send(request(
            "POST",
            "/orders?a=1",
            &[KEY, "Connection: keep-alive", "Keep-Alive: timeout=5"],
            "abc",
        ))
        .await;
    let got = client.message().await;
    assert_eq!(got.has_status(200).text(), "from the service");
    assert_eq!(got.get("x-version"), Some("HTTP/2.0"));
    assert_eq!((got.get("x-method"), got.get("x-length")), (Some("POST"), Some("3")));
    // RFC 9113, 8.3.1: the authority names the host that the client asked for, and no `Host` contradicts it.
    assert_eq!(got.get("x-target"), Some("http://orders.test/orders?a=1"));
    assert!(matches!(got.get("x-host"), None | Some("orders.test")), "{:?}", got.head);
    assert_eq!(got.head.all("x-attempt").len(), 3);

    // From HTTP/2 to HTTP/2, as gRPC uses it.
    let mut client = http2(TcpStream::connect(sidecar.address).await.unwrap()).await;
    let asked = Request::post("http://orders.test/grpc.Orders/Make").header("te", "trailers");
    let asked = asked.body(with_trailers("abc", "x-sum", "1")).unwrap();
    let (parts, body, trailers) = send(&mut client, asked).await;
    assert_eq!((parts.status.as_u16(), &body[..]), (200, &b"from the service"[..]));
    assert_eq!(trailers["grpc-status"], "0");
    assert_eq!(said(&parts, "x-te"), "trailers");
    assert_eq!(said(&parts, "x-trailers"), r#"{"x-sum": "1"}"#);
    assert_eq!(said(&parts, "x-target"), "http://orders.test/grpc.Orders/Make");
    assert_eq!(connections.load(std::sync::atomic::Ordering::Relaxed), 1);
}

/// A sidecar in front of a service with TLS that trusts this authority, or none.
async fn before_tls(port: u16, trusted: &Path, flags: &[&str]) -> Sidecar {
    Sidecar::run(sidecar_to_tls(port, trusted).args(flags)).await
}

fn sidecar_to_tls(port: u16, trusted: &Path) -> Command {
    let mut command = sidecar(&format!("https://localhost:{port}"));
    command.args(["--store=memory:", "--threads=1"]);
    command.env("SSL_CERT_FILE", trusted).env_remove("SSL_CERT_DIR");
    command
}

#[tokio::test]
async fn system_certificates_are_required_only_for_services_that_need_them() {
    // As in an image that contains nothing but the program.
    let none = Path::new("/there/are/none.pem");
    let service = Service::new().await;
    let mut command = sidecar(&format!("http://{}", service.address));
    command.args(["--store=memory:"]).env("SSL_CERT_FILE", none).env("SSL_CERT_DIR", none);
    let sidecar = Sidecar::run(&mut command).await;
    let service = service.answers(OK);
    sidecar.ask(&request("POST", "/orders", &[KEY], "abc")).await.has_status(200);
    drop(service);

    let mut command = sidecar_to_tls(1, none);
    let mut process = Process::start(command.env("SSL_CERT_DIR", none));
    assert!(!process.ended().await.success());
    let errors = process.errors().await;
    assert!(errors.contains("SSL_CERT_FILE: /there/are/none.pem: cannot read"), "{errors}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(["check", "--store=memory:", "--to=https://localhost:1"]).env("SSL_CERT_FILE", none);
    let checked = command.output().await.unwrap();
    let words = String::from_utf8(checked.stdout).unwrap();
    assert!(
        !checked.status.success() && words.contains("error SSL_CERT_FILE: /there/are/none.pem"),
        "{words}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn check_explains_how_to_trust_the_authority_of_a_service() {
    let (authority, other) = (Authority::new(), Authority::new());
    let service = Service::new().await;
    let to = format!("https://localhost:{}", service.address.port());
    let (listener, acceptor) = (service.into_listener(), authority.server(&[b"http/1.1"]));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            // A client that does not trust the certificate ends the handshake.
            if let Ok(stream) = acceptor.accept(stream).await {
                let mut wire = Wire::new(stream);
                wire.message().await;
                wire.send(OK).await;
            }
        }
    });
    for (trusted, is_known) in [(&other, false), (&authority, true)] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command.args(["check", "--online", "--store=memory:", "--to", &to]).env_clear();
        let checked = command.env("SSL_CERT_FILE", trusted.file("ca.pem")).output().await.unwrap();
        let words = String::from_utf8(checked.stdout).unwrap();
        assert_eq!(checked.status.success(), is_known, "{words}");
        assert_eq!(words.contains("SSL_CERT_FILE=ca.pem"), !is_known, "{words}");
    }
}

#[tokio::test]
async fn a_service_may_speak_tls_with_either_version() {
    let authority = Authority::new();
    let trusted = authority.file("ca.pem");
    type Case = (&'static [&'static [u8]], &'static [&'static str], Option<&'static [u8]>);
    let cases: [Case; 5] = [
        (&[b"h2", b"http/1.1"], &[], Some(b"h2")),
        (&[b"http/1.1"], &[], Some(b"http/1.1")),
        (&[], &[], None),
        (&[b"h2", b"http/1.1"], &["--upstream-protocol=http1"], None),
        (&[b"h2", b"http/1.1"], &["--upstream-protocol=http2"], Some(b"h2")),
    ];
    for (offered, flags, agreed) in cases {
        let service = Service::new().await;
        let sidecar = before_tls(service.address.port(), Path::new(&trusted), flags).await;
        let mut client = sidecar.connect().await;
        client.send(request("POST", "/orders", &[KEY], "abc")).await;
        let (stream, _) = within("a connection", service.into_listener().accept()).await.unwrap();
        let stream = within("a handshake", authority.server(offered).accept(stream)).await.unwrap();
        let session = stream.get_ref().1;
        // The sidecar checks the service's own name, whatever host the client asked for.
        assert_eq!(session.server_name(), Some("localhost"));
        assert_eq!(session.alpn_protocol(), agreed, "{flags:?}");
        if agreed == Some(b"h2") {
            tokio::spawn(serve_http2(stream));
            let got = client.message().await;
            assert_eq!(got.has_status(200).get("x-target"), Some("https://orders.test/orders"));
            assert!(matches!(got.get("x-host"), None | Some("orders.test")), "{:?}", got.head);
        } else {
            let mut wire = Wire::new(stream);
            let seen = wire.message().await;
            assert_eq!(seen.head.line, "POST /orders HTTP/1.1");
            assert_eq!((seen.get("host"), seen.text()), (Some("orders.test"), "abc"));
            wire.send(OK).await;
            client.message().await.has_status(200);
        }
    }
}

/// An overloaded load balancer, or a wrong port: no request is sent, so the key stays free.
#[tokio::test]
async fn a_service_that_does_not_speak_tls_counts_as_unreached() {
    let authority = Authority::new();
    let trusted = authority.file("ca.pem");
    for flags in [
        ["--upstream-connect-timeout=300ms", "--upstream-timeout=1h"],
        ["--upstream-connect-timeout=1m", "--upstream-timeout=300ms"],
    ] {
        let service = Service::new().await;
        let sidecar = before_tls(service.address.port(), Path::new(&trusted), &flags).await;
        for _ in 0..2 {
            let mut client = sidecar.connect().await;
            client.send(request("POST", "/orders", &[KEY], "abc")).await;
            // The service accepts the connection and sends nothing.
            let _silent = service.accept().await;
            client.message().await.is_problem(502, "upstream-unreachable");
        }
        let acceptor = authority.server(&[b"http/1.1"]);
        let answering = tokio::spawn(async move {
            let (stream, _) = service.into_listener().accept().await.unwrap();
            let mut wire = Wire::new(acceptor.accept(stream).await.unwrap());
            wire.message().await;
            wire.send(OK).await;
            wire
        });
        sidecar.ask(&request("POST", "/orders", &[KEY], "abc")).await.has_status(200);
        within("the service", answering).await.unwrap();
    }
}

#[tokio::test]
async fn an_upgrade_uses_http_1_although_tls_would_negotiate_http_2() {
    let authority = Authority::new();
    let service = Service::new().await;
    let sidecar = before_tls(service.address.port(), Path::new(&authority.file("ca.pem")), &[]).await;
    let mut client = sidecar.connect().await;
    client.send(request("GET", "/chat", &["Connection: upgrade", "Upgrade: websocket"], "")).await;
    let (stream, _) = within("a connection", service.into_listener().accept()).await.unwrap();
    let stream = within("a handshake", authority.server(&[b"h2", b"http/1.1"]).accept(stream)).await.unwrap();
    assert_ne!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let mut wire = Wire::new(stream);
    let seen = wire.message().await;
    assert_eq!((seen.get("host"), seen.get("upgrade")), (Some("orders.test"), Some("websocket")));
    wire.send("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n").await;
    assert_eq!(client.head().await.status(), 101);
    client.send("ping").await;
    assert_eq!(wire.take(4).await, b"ping");
}

#[tokio::test]
async fn a_lost_connection_in_http_2_is_noticed() {
    let service = Service::new().await;
    let flags = ["--threads=1", "--upstream-protocol=http2", "--upstream-timeout=1h"];
    let sidecar = Sidecar::start(service.address, &flags).await;
    let mut client = sidecar.connect().await;
    client.send(request("POST", "/", &[KEY], "abc")).await;
    let mut lost = service.accept().await;
    // An empty SETTINGS frame, an acknowledgement of the sidecar's, and then nothing.
    lost.send([0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 4, 1, 0, 0, 0, 0]).await;
    client.message().await.is_problem(502, "outcome-unknown");
    client.send(request("GET", "/", &[], "")).await;
    let (stream, _) = within("another connection", service.into_listener().accept()).await.unwrap();
    tokio::spawn(serve_http2(stream));
    client.message().await.has_status(200);
    drop(lost);
}

#[tokio::test]
async fn a_service_with_an_untrusted_certificate_gets_no_request() {
    let (authority, other) = (Authority::new(), Authority::new());
    let service = Service::new().await;
    let trusted = other.file("ca.pem");
    let sidecar = before_tls(service.address.port(), Path::new(&trusted), &[]).await;
    let listener = service.into_listener();
    let handshakes = async {
        for _ in 0..2 {
            let (stream, _) = listener.accept().await.unwrap();
            assert!(authority.server(&[]).accept(stream).await.is_err());
        }
    };
    let asked = async {
        for _ in 0..2 {
            // No request was sent, so the key is free again.
            sidecar.ask(&request("POST", "/", &[KEY], "abc")).await.is_problem(502, "upstream-unreachable");
        }
    };
    tokio::join!(handshakes, asked);
}

/// An authority for the certificates of clients, in a file.
pub(crate) struct ClientAuthority {
    pub(crate) issuer: CertifiedIssuer<'static, KeyPair>,
    file: tempfile::NamedTempFile,
}

impl ClientAuthority {
    pub(crate) fn new() -> Self {
        let mut authority = CertificateParams::new([]).unwrap();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let file = tempfile::NamedTempFile::new().unwrap();
        // Each authority has a name of its own, by which its list of revoked certificates is found.
        let name = file.path().display().to_string();
        authority.distinguished_name.push(rcgen::DnType::CommonName, name);
        let issuer = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
        std::fs::write(file.path(), issuer.pem()).unwrap();
        Self { issuer, file }
    }

    /// A client with a new certificate of these names, which trusts this server.
    fn client(&self, server: &Authority, name: &str, dns: &str) -> TlsConnector {
        self.client_with(server, name, dns, None)
    }

    /// The same, with this serial number.
    fn client_with(&self, server: &Authority, name: &str, dns: &str, serial: Option<u64>) -> TlsConnector {
        let key = KeyPair::generate().unwrap();
        let mut certificate = CertificateParams::new([dns.to_owned()]).unwrap();
        certificate.distinguished_name.push(rcgen::DnType::CommonName, name);
        certificate.serial_number = serial.map(Into::into);
        let chain = vec![certificate.signed_by(&key, &self.issuer).unwrap().der().clone()];
        let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes()).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(server.file("ca.pem")).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config =
            ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let config = config.with_root_certificates(roots).with_client_auth_cert(chain, key).unwrap();
        TlsConnector::from(Arc::new(config))
    }
}

#[tokio::test]
async fn the_verified_certificate_of_a_client_names_the_caller() {
    let service = Service::new().await.answers(OK);
    let (server, clients) = (Authority::new(), ClientAuthority::new());
    let (cert, key) = (server.file("cert.pem"), server.file("key.pem"));
    let ca = format!("--tls-client-ca={}", clients.file.path().display());
    for (scope, same, other) in [
        ("--scope=mtls:subject", ("ada", "b.test"), ("eve", "a.test")),
        ("--scope=mtls:san", ("eve", "a.test"), ("ada", "b.test")),
    ] {
        let flags = ["--tls-cert", &cert, "--tls-key", &key, &ca, scope];
        let sidecar = Sidecar::start(service.address, &flags).await;
        let ask = async |connector: &TlsConnector| {
            let stream = TcpStream::connect(sidecar.address).await.unwrap();
            let stream = connector.connect(ServerName::try_from("localhost").unwrap(), stream).await?;
            let mut wire = Wire::new(stream);
            // With TLS 1.3 a client learns only here that its certificate was refused.
            wire.try_send(&request("POST", "/orders", &[KEY], "{}")).await?;
            let head = wire.try_head().await.ok_or(std::io::ErrorKind::ConnectionAborted)?;
            Ok::<_, std::io::Error>(wire.body(head).await)
        };
        let replays = async |names: (&str, &str)| {
            let response = ask(&clients.client(&server, names.0, names.1)).await.unwrap();
            response.has_status(200).is_replay()
        };
        assert!(!replays(("ada", "a.test")).await);
        assert!(replays(("ada", "a.test")).await, "another certificate with the same names");
        let again = clients.client(&server, "ada", "a.test");
        for _ in 0..2 {
            assert!(ask(&again).await.unwrap().has_status(200).is_replay(), "several connections");
        }
        assert!(replays(same).await);
        assert!(!replays(other).await);
        // Without a certificate, and with that of another authority.
        assert!(ask(&server.client(&[])).await.is_err());
        assert!(ask(&ClientAuthority::new().client(&server, "ada", "a.test")).await.is_err());
    }
    assert_eq!(service.requests(), 4);
}

#[tokio::test]
async fn clients_that_are_refused_because_of_their_certificates_are_counted_and_reported() {
    let service = Service::new().await.answers(OK);
    let (server, clients) = (Authority::new(), ClientAuthority::new());
    let (cert, key) = (server.file("cert.pem"), server.file("key.pem"));
    let ca = format!("--tls-client-ca={}", clients.file.path().display());
    let flags = ["--tls-cert", &cert, "--tls-key", &key, &ca, "--scope=mtls:subject"];
    let mut sidecar = Sidecar::start(service.address, &flags).await;
    let counted = async |reason: &str| {
        let name = format!("oncegate_tls_handshakes_refused_total{{reason=\"{reason}\"}}");
        crate::operations::series(&sidecar, &name).await
    };
    assert!(is_accepted(&sidecar, &clients.client(&server, "ada", "a.test")).await);
    assert_eq!((counted("certificate").await, counted("no-certificate").await), (Some(0.0), Some(0.0)));
    assert!(!is_accepted(&sidecar, &ClientAuthority::new().client(&server, "ada", "a.test")).await);
    assert!(!is_accepted(&sidecar, &server.client(&[])).await);
    assert_eq!((counted("certificate").await, counted("no-certificate").await), (Some(1.0), Some(1.0)));
    sidecar.process.logs("a client was refused because of its certificate").await;

    // Another authority: the log says what was replaced.
    let others = ClientAuthority::new();
    std::fs::copy(others.file.path(), clients.file.path()).unwrap();
    sidecar.process.logs("the authorities of clients (tls-client-ca) were replaced").await;
    // Each thread of the sidecar follows a moment later.
    let former = clients.client(&server, "ada", "a.test");
    until("the former authority is refused", async || !is_accepted(&sidecar, &former).await).await;
}

/// The library for HTTP/2 sends the body of a response to HEAD if it gets one, which is a protocol error for the client.
#[tokio::test]
async fn a_head_over_http2_gets_no_body_from_the_sidecar_itself() {
    let unused = Service::new().await.address;
    let sidecar = Sidecar::start(unused, &["--published-rules"]).await;
    for (path, status) in [("/.well-known/idempotency", 200), ("/orders", 502)] {
        for method in ["HEAD", "GET"] {
            let stream = TcpStream::connect(sidecar.address).await.unwrap();
            let uri = format!("http://{}{path}", sidecar.address);
            let asked = Request::builder().method(method).uri(uri).body(text("")).unwrap();
            let (head, body, _) = send(&mut Box::pin(http2(stream)).await, asked).await;
            assert_eq!(
                (head.status.as_u16(), body.is_empty()),
                (status, method == "HEAD"),
                "{method} {path}"
            );
            assert_ne!(head.headers["content-length"], "0", "{method} {path}");
        }
        let mut wire = sidecar.connect().await;
        wire.send(request("HEAD", path, &[], "")).await;
        let head = wire.try_head().await.unwrap();
        assert_eq!((head.status(), head.get("content-length") != Some("0")), (status, true), "{path}");
        wire.send(request("HEAD", path, &[], "")).await;
        assert_eq!(wire.try_head().await.unwrap().status(), status, "the connection goes on");
    }
}

impl ClientAuthority {
    /// A list of revoked certificates with these serial numbers, which is valid until this day of this year.
    pub(crate) fn list(&self, revoked: &[u64], until: (i32, u8, u8)) -> String {
        let revoked = revoked.iter().map(|serial| rcgen::RevokedCertParams {
            serial_number: (*serial).into(),
            revocation_time: rcgen::date_time_ymd(2020, 1, 1),
            reason_code: Some(rcgen::RevocationReason::KeyCompromise),
            invalidity_date: None,
        });
        let list = rcgen::CertificateRevocationListParams {
            this_update: rcgen::date_time_ymd(2020, 1, 1),
            next_update: rcgen::date_time_ymd(until.0, until.1, until.2),
            crl_number: 1.into(),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: rcgen::KeyIdMethod::Sha256,
        };
        list.signed_by(&self.issuer).unwrap().pem().unwrap()
    }
}

/// Returns true if the sidecar answers a request over a new connection of this client.
async fn is_accepted(sidecar: &Sidecar, client: &TlsConnector) -> bool {
    let ask = async || {
        let stream = TcpStream::connect(sidecar.address).await?;
        let stream = client.connect(ServerName::try_from("localhost").unwrap(), stream).await?;
        let mut wire = Wire::new(stream);
        wire.try_send(&request("POST", "/orders", &[KEY], "{}")).await?;
        wire.try_head().await.ok_or(std::io::ErrorKind::ConnectionAborted)?;
        Ok::<_, std::io::Error>(())
    };
    ask().await.is_ok()
}

#[tokio::test]
async fn a_client_whose_certificate_is_revoked_is_refused() {
    const LATER: (i32, u8, u8) = (4096, 1, 1);
    let service = Service::new().await.answers(OK);
    let (server, clients, others) = (Authority::new(), ClientAuthority::new(), ClientAuthority::new());
    let (cert, key) = (server.file("cert.pem"), server.file("key.pem"));
    std::fs::write(clients.file.path(), clients.issuer.pem() + &others.issuer.pem()).unwrap();
    let lists = tempfile::NamedTempFile::new().unwrap();
    let write = |text: String| std::fs::write(lists.path(), text).unwrap();
    write(clients.list(&[7], LATER));
    let (ca, crl) = (clients.file.path().display().to_string(), lists.path().display().to_string());
    let flags = [
        "--tls-cert", &cert, "--tls-key", &key, "--tls-client-ca", &ca, "--tls-client-crl", &crl,
        "--scope=mtls:san",
    ];
    let mut sidecar = Sidecar::start(service.address, &flags).await;
    let client = |serial| clients.client_with(&server, "ada", "a.test", Some(serial));
    let (seven, eight, other) = (client(7), client(8), others.client(&server, "ada", "a.test"));
    assert!(is_accepted(&sidecar, &eight).await);
    assert!(!is_accepted(&sidecar, &seven).await, "it is revoked");
    assert!(!is_accepted(&sidecar, &other).await, "its authority has no list");
    let end = crate::operations::series(&sidecar, "oncegate_tls_client_crl_next_update_seconds").await;
    assert_eq!(end, Some(67_090_118_400.0));

    // The file is read again without a signal.
    write(clients.list(&[8], LATER) + &others.list(&[], LATER));
    until("the new lists are in use", async || is_accepted(&sidecar, &other).await).await;
    assert!(is_accepted(&sidecar, &seven).await && !is_accepted(&sidecar, &eight).await);

    write(clients.list(&[], (2020, 1, 2)) + &others.list(&[], LATER));
    sidecar.process.logs("a list of revoked certificates expired at 2020-01-02T00:00:00").await;
    assert!(
        is_accepted(&sidecar, &seven).await && !is_accepted(&sidecar, &eight).await,
        "those before are in use"
    );

    let mut late = Sidecar::start(service.address, &flags).await;
    late.process.logs("expired at 2020-01-02T00:00:00").await;
    assert!(!is_accepted(&late, &seven).await, "a list that has expired says nothing");
    assert!(is_accepted(&late, &other).await, "the list of its authority is valid");
}

#[tokio::test]
async fn mistakes_in_the_settings_of_client_certificates_are_reported_at_the_start() {
    let (server, empty) = (Authority::new(), tempfile::NamedTempFile::new().unwrap());
    let (cert, key) = (server.file("cert.pem"), server.file("key.pem"));
    let empty = empty.path().display().to_string();
    for (flags, expected) in [
        (vec!["--scope=mtls:subject"], "set tls-client-ca to the authority"),
        (vec!["--tls-client-ca", &empty], "set tls-cert and tls-key too"),
        (
            vec!["--tls-cert", &cert, "--tls-key", &key, "--tls-client-ca", &empty],
            "there is no certificate in it",
        ),
        (vec!["--tls-client-crl", &empty], "set tls-cert and tls-key too"),
        (vec!["--tls-cert", &cert, "--tls-key", &key, "--tls-client-crl", &empty], "set tls-client-ca too"),
        (
            vec![
                "--tls-cert", &cert, "--tls-key", &key, "--tls-client-ca", &cert, "--tls-client-crl", &empty,
            ],
            "there is no list of revoked certificates in it",
        ),
        (vec!["--scope=mtls:san", "--authorize=/may-see"], "a caller whom only a certificate names"),
        (vec!["--scope=mtls:name"], "is not a scope that tells callers apart"),
    ] {
        let mut command = sidecar("http://127.0.0.1:9");
        command.arg("--store=memory:").args(&flags);
        let mut process = Process::start(&mut command);
        assert_eq!(process.ended().await.code(), Some(1), "{flags:?}");
        let said = process.errors().await;
        assert!(said.contains(expected), "{flags:?}: {said}");
    }
}
