//! Requests that HTTP/2 itself does not process, frame by frame.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::quick;
use bytes::Bytes;
use http_body_util::Full;
use hyper_util::client::legacy::Client as HyperClient;
use hyper_util::rt::TokioExecutor;
use oncegate_client::reqwest::ReqwestTransport;
use oncegate_client::tower::TowerTransport;
use oncegate_client::{Api, Client, Intent, SendError, SendErrorKind, Transport, Verdict};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const REFUSED_STREAM: u32 = 7;

/// The reaction to one request.
#[derive(Clone, Copy, Debug)]
enum Act {
    /// A complete 200.
    Answers,
    /// RST_STREAM with this code.
    Resets(u32),
    /// The head of a response, and then RST_STREAM with this code.
    ResetsLate(u32),
    /// GOAWAY with this code. Its last stream is before the request.
    LeavesOut(u32),
    /// GOAWAY with this code, whose last stream is the request, and the end of the connection.
    CountsIn(u32),
}

struct Server {
    address: SocketAddr,
    requests: Arc<AtomicUsize>,
}

impl Server {
    /// Starts a server that reacts to the first request like this, and answers the others.
    async fn new(first: Act) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&requests);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let count = Arc::clone(&count);
                tokio::spawn(async move { serve(stream, first, &count).await });
            }
        });
        Self { address, requests }
    }
}

async fn serve(mut stream: TcpStream, first: Act, count: &AtomicUsize) -> Option<()> {
    let mut preface = [0; 24];
    stream.read_exact(&mut preface).await.ok()?;
    assert_eq!(&preface, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    frame(&mut stream, SETTINGS, 0, 0, &[]).await?;
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.ok()?;
        let [a, b, c, kind, flags, id @ ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        stream.read_exact(&mut payload).await.ok()?;
        if kind == SETTINGS && flags & 1 == 0 {
            frame(&mut stream, SETTINGS, 1, 0, &[]).await?;
        }
        if kind != HEADERS {
            continue;
        }
        let id = u32::from_be_bytes(id);
        let act = if count.fetch_add(1, Ordering::SeqCst) == 0 { first } else { Act::Answers };
        let go_away = |last: u32, code: u32| [last.to_be_bytes(), code.to_be_bytes()].concat();
        // 0x88 is `:status: 200` in the static table.
        match act {
            Act::Answers => frame(&mut stream, HEADERS, 5, id, &[0x88]).await?,
            Act::Resets(code) => frame(&mut stream, RST_STREAM, 0, id, &code.to_be_bytes()).await?,
            Act::ResetsLate(code) => {
                frame(&mut stream, HEADERS, 4, id, &[0x88]).await?;
                frame(&mut stream, RST_STREAM, 0, id, &code.to_be_bytes()).await?;
            }
            Act::LeavesOut(code) => frame(&mut stream, GOAWAY, 0, 0, &go_away(id - 1, code)).await?,
            Act::CountsIn(code) => {
                frame(&mut stream, GOAWAY, 0, 0, &go_away(id, code)).await?;
                stream.shutdown().await.ok()?;
                return None;
            }
        }
    }
}

async fn frame(stream: &mut TcpStream, kind: u8, flags: u8, id: u32, payload: &[u8]) -> Option<()> {
    let mut bytes = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    bytes.extend([kind, flags]);
    bytes.extend(id.to_be_bytes());
    bytes.extend(payload);
    stream.write_all(&bytes).await.ok()
}

fn with_reqwest(api: Api) -> Client<ReqwestTransport> {
    let builder = reqwest::Client::builder().no_proxy().http2_prior_knowledge();
    Client::new(ReqwestTransport::build(builder).unwrap()).with_policy(quick().with_api(api))
}

fn with_hyper(api: Api) -> Client<impl Transport> {
    let client = HyperClient::builder(TokioExecutor::new()).http2_only(true).build_http::<Full<Bytes>>();
    Client::new(TowerTransport::<_, Full<Bytes>>::new(client)).with_policy(quick().with_api(api))
}

/// Sends a request. Returns the number of attempts, which client and server count alike, and the result.
async fn send<T: Transport>(client: Client<T>, first: Act) -> (usize, Result<Verdict, SendError>) {
    let server = Server::new(first).await;
    let intent = Intent::post(format!("http://{}/payments", server.address)).unwrap().with_body("5");
    let sent = client.send(&intent).await;
    let requests = server.requests.load(Ordering::SeqCst);
    let attempts = match &sent {
        Ok(outcome) => outcome.attempts,
        Err(open) => open.attempts(),
    };
    assert_eq!(attempts as usize, requests, "{first:?}");
    (requests, sent.map(|outcome| outcome.verdict))
}

#[tokio::test]
async fn a_request_that_http2_left_out_is_sent_again_also_to_a_plain_api() {
    for act in [Act::Resets(REFUSED_STREAM), Act::LeavesOut(0), Act::LeavesOut(0xb), Act::Answers] {
        for api in [Api::Plain, Api::Idempotent] {
            let expected = if matches!(act, Act::Answers) { 1 } else { 2 };
            for (requests, sent) in [send(with_reqwest(api), act).await, send(with_hyper(api), act).await] {
                assert_eq!((requests, sent.unwrap()), (expected, Verdict::Done), "{act:?} {api:?}");
            }
        }
    }
}

#[tokio::test]
async fn a_request_that_http2_may_have_processed_is_sent_again_under_a_key_only() {
    const INTERNAL_ERROR: u32 = 2;
    const CANCEL: u32 = 8;
    let doubtful = [
        Act::Resets(INTERNAL_ERROR),
        Act::Resets(CANCEL),
        Act::ResetsLate(REFUSED_STREAM),
        Act::CountsIn(0),
        Act::CountsIn(INTERNAL_ERROR),
    ];
    for act in doubtful {
        for (requests, sent) in
            [send(with_reqwest(Api::Plain), act).await, send(with_hyper(Api::Plain), act).await]
        {
            let open = sent.unwrap_err();
            assert_eq!((requests, open.kind()), (1, SendErrorKind::Unknown), "{act:?}");
            assert!(open.may_have_taken_effect(), "{act:?}");
        }
        let keyed = Api::Idempotent;
        for (requests, sent) in [send(with_reqwest(keyed), act).await, send(with_hyper(keyed), act).await] {
            assert_eq!((requests, sent.unwrap()), (2, Verdict::Done), "{act:?}");
        }
    }
}

/// The head of a response over HTTP/2 may be larger than the 16 KiB that reqwest takes by default.
#[tokio::test]
async fn the_head_of_a_response_may_be_large() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let outcome = hyper::service::service_fn(async |_| {
                let large = http::Response::builder().header("x-large", "v".repeat(100 * 1024));
                Ok::<_, std::convert::Infallible>(large.body(Full::<Bytes>::default()).unwrap())
            });
            let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            tokio::spawn(server.serve_connection(hyper_util::rt::TokioIo::new(stream), outcome));
        }
    });
    let builder = reqwest::Client::builder().no_proxy().http2_prior_knowledge();
    let client = Client::new(ReqwestTransport::build(builder).unwrap()).with_policy(quick());
    let intent = Intent::post(format!("http://{address}/")).unwrap();
    let outcome = client.send(&intent).await.unwrap();
    assert_eq!((outcome.attempts, outcome.verdict), (1, Verdict::Done));
    assert_eq!(outcome.response.headers()["x-large"].len(), 100 * 1024);
}
