//! Traces and metrics that are sent to a collector, which the test plays. It reads the messages with the types that
//! OpenTelemetry generates from its own definitions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use oncegate_testkit::until;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::{Metric, metric, number_data_point};
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use prost::Message as _;
use rustix::process::Signal;
use socket2::SockRef;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::operations::{admin, series};
use crate::support::{Message, Process, Service, Sidecar, Wire, request, sidecar};
use crate::{KEY, OK};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// The response of the collector that takes everything.
const TAKEN: &str = "HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n";

/// A collector.
struct Collector {
    address: std::net::SocketAddr,
    messages: watch::Receiver<Vec<Message>>,
}

impl Collector {
    /// A collector that takes everything.
    async fn new() -> Self {
        Self::answering(|_| Some(TAKEN)).await
    }

    /// A collector that answers its messages so; `None` never answers.
    async fn answering(answer: impl Fn(u64) -> Option<&'static str> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (send, messages) = watch::channel(Vec::new());
        let (send, answer, count) = (Arc::new(send), Arc::new(answer), Arc::new(AtomicU64::new(0)));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (send, answer, count) = (send.clone(), answer.clone(), count.clone());
                tokio::spawn(async move {
                    let mut wire = Wire::new(stream);
                    while let Some(head) = wire.try_head().await {
                        let message = wire.body(head).await;
                        let answer = answer(count.fetch_add(1, Ordering::Relaxed));
                        send.send_modify(|all| all.push(message));
                        let Some(answer) = answer else { return std::future::pending().await };
                        if wire.try_send(answer).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        Self { address, messages }
    }

    fn flag(&self) -> String {
        format!("--otlp-endpoint=http://{}", self.address)
    }

    fn received(&self, path: &str) -> Vec<Message> {
        let line = format!("POST {path} HTTP/1.1");
        self.messages.borrow().iter().filter(|message| message.head.line == line).cloned().collect()
    }

    /// All spans so far.
    fn spans(&self) -> Vec<Span> {
        let messages = self.received("/v1/traces");
        let requests =
            messages.iter().map(|message| ExportTraceServiceRequest::decode(&*message.body).unwrap());
        let resources = requests.flat_map(|request| request.resource_spans);
        resources.flat_map(|resource| resource.scope_spans).flat_map(|scope| scope.spans).collect()
    }

    /// Waits for this number of spans, and returns them.
    async fn spans_are(&self, count: usize) -> Vec<Span> {
        until(format!("{count} spans have arrived"), async || self.spans().len() >= count).await;
        let spans = self.spans();
        assert_eq!(spans.len(), count, "{spans:#?}");
        spans
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The attributes as text.
fn attributes(pairs: &[KeyValue]) -> BTreeMap<&str, String> {
    let text = |value: &Option<AnyValue>| match value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::BoolValue(flag)) => flag.to_string(),
        other => panic!("{other:?}"),
    };
    pairs.iter().map(|pair| (pair.key.as_str(), text(&pair.value))).collect()
}

fn named<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("no span {name}: {spans:#?}"))
}

const SECRETS: [&str; 4] = ["whisper-key", "whisper-token", "whisper-body", "whisper-query"];

#[tokio::test]
async fn a_request_is_one_trace_from_its_client_to_the_service() {
    let service = Service::new().await;
    let collector = Collector::new().await;
    let config = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(config.path(), "[[route]]\npath = \"/orders/{id}\"\nmethods = [\"POST\"]\n").unwrap();
    let config = format!("--config={}", config.path().display());
    let mut command = sidecar(&format!("http://{}", service.address));
    command.args([&*config, &collector.flag(), "--store=memory:", "--access-log=json"]);
    command
        .env("ONCEGATE_OTLP_HEADERS", "x-tenant=shop%20one")
        .env("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=a");
    let mut sidecar = Sidecar::run(&mut command).await;
    let fields = [
        "Idempotency-Key: whisper-key",
        "Authorization: Bearer whisper-token",
        &*format!("Traceparent: {PARENT}"),
        "Tracestate: a=1",
        "Tracestate: b=2",
    ];
    let asked = request("POST", "/orders/7?q=whisper-query", &fields, "{\"x\":\"whisper-body\"}");
    let mut client = sidecar.connect().await;
    client.send(&asked).await;
    let mut upstream = service.accept().await;
    let seen = upstream.message().await;
    upstream.send("HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok").await;
    client.message().await.has_status(201);
    let passed = seen.get("traceparent").expect("a parent").to_owned();
    assert_eq!(seen.get("tracestate"), Some("a=1,b=2"));

    let spans = collector.spans_are(4).await;
    let (server, claim) = (named(&spans, "POST /orders/{id}"), named(&spans, "claim"));
    let (call, settle) = (named(&spans, "POST"), named(&spans, "settle"));
    for span in &spans {
        assert_eq!(hex(&span.trace_id), TRACE);
        assert_eq!(span.trace_state, "a=1,b=2");
        assert!(server.start_time_unix_nano <= span.start_time_unix_nano, "{spans:#?}");
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano, "{spans:#?}");
        assert!(span.end_time_unix_nano <= server.end_time_unix_nano, "{spans:#?}");
    }
    assert_eq!(hex(&server.parent_span_id), "00f067aa0ba902b7");
    for part in [claim, call, settle] {
        assert_eq!(part.parent_span_id, server.span_id);
    }
    assert_eq!(passed, format!("00-{TRACE}-{}-01", hex(&call.span_id)));
    let kinds = [server, call, claim, settle].map(|span| span.kind());
    assert_eq!(kinds, [SpanKind::Server, SpanKind::Client, SpanKind::Internal, SpanKind::Internal]);
    let facts = attributes(&server.attributes);
    let record = &facts["oncegate.record"];
    for (name, value) in [
        ("http.request.method", "POST"),
        ("http.route", "/orders/{id}"),
        ("url.path", "/orders/7"),
        ("url.scheme", "http"),
        ("network.protocol.version", "1.1"),
        ("http.response.status_code", "201"),
        ("oncegate.outcome", "executed"),
        ("oncegate.attempt", "1"),
    ] {
        assert_eq!(facts.get(name).map(String::as_str), Some(value), "{name}: {facts:?}");
    }
    assert!(record.len() == 64 && facts.contains_key("oncegate.caller"), "{facts:?}");
    let facts = attributes(&call.attributes);
    assert_eq!(facts["server.address"], "127.0.0.1");
    assert_eq!(facts["server.port"], service.address.port().to_string());
    assert_eq!((&facts["oncegate.record"], &*facts["http.response.status_code"]), (record, "201"));

    // The second request gets the stored response, and links to the attempt.
    let again = asked.replace("00f067aa0ba902b7", "00f067aa0ba902b8");
    assert!(sidecar.ask(&again).await.has_status(201).is_replay());
    let spans = collector.spans_are(6).await;
    let replay = spans.iter().find(|span| hex(&span.parent_span_id) == "00f067aa0ba902b8").unwrap();
    assert_eq!(attributes(&replay.attributes)["oncegate.outcome"], "replayed");
    let links: Vec<_> = replay.links.iter().map(|link| (&link.trace_id, &link.span_id)).collect();
    assert_eq!(links, [(&server.trace_id, &server.span_id)]);

    let messages = collector.received("/v1/traces");
    for message in &messages {
        assert_eq!(message.get("content-type"), Some("application/x-protobuf"));
        assert_eq!(message.get("x-tenant"), Some("shop one"));
        let resource =
            ExportTraceServiceRequest::decode(&*message.body).unwrap().resource_spans.remove(0).resource;
        let resource = resource.unwrap();
        let facts = attributes(&resource.attributes);
        assert_eq!((&*facts["service.name"], &*facts["k8s.pod.name"]), ("tests-oncegate", "a"));
    }
    let sent: String =
        messages.iter().map(|message| String::from_utf8_lossy(&message.body).into_owned()).collect();
    sidecar.process.signal(Signal::TERM);
    assert!(sidecar.process.ended().await.success());
    let (lines, log) = (sidecar.process.output().await, sidecar.process.errors().await);
    assert!(lines[1].contains(&format!("\"trace_id\":\"{TRACE}\"")), "{lines:#?}");
    for secret in SECRETS.into_iter().chain(["shop one"]) {
        assert!(
            !sent.contains(secret) && !lines.join("").contains(secret) && !log.contains(secret),
            "{secret}"
        );
    }
}

#[tokio::test]
async fn a_trace_is_begun_if_the_sample_ratio_says_so_and_an_invalid_parent_is_removed() {
    const LAST: &str = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok";
    let collector = Collector::new().await;
    let mut number = 0;
    for (ratio, is_begun) in [("1", true), ("0", false)] {
        let service = Service::new().await;
        let flags = [&*collector.flag(), &*format!("--trace-sample-ratio={ratio}")];
        let sidecar = Sidecar::start(service.address, &flags).await;
        for parents in [
            &[][..],
            &["Traceparent: 00-0-0-01"],
            &["Traceparent: nonsense", "Tracestate: a=1"],
            &[&*format!("Traceparent: {PARENT}"), &*format!("Traceparent: {PARENT}")],
        ] {
            for key in [&[KEY][..], &[]] {
                let mut client = sidecar.connect().await;
                let fields = [parents, key].concat();
                number += 1;
                client.send(request("POST", &format!("/{number}"), &fields, "{}")).await;
                let mut upstream = service.accept().await;
                let seen = upstream.message().await;
                upstream.send(LAST).await;
                client.message().await.has_status(200);
                assert_eq!(seen.get("traceparent").is_some(), is_begun, "{seen:?}");
                assert_eq!(seen.get("tracestate"), None);
                assert!(!seen.get("traceparent").is_some_and(|parent| parent.contains(TRACE)));
            }
        }
    }
}

#[tokio::test]
async fn the_parent_of_a_client_that_is_not_trusted_does_not_decide_what_is_recorded() {
    let collector = Collector::new().await;
    for (trust, sampled, is_recorded) in
        [("loopback", "01", true), ("loopback", "00", false), ("none", "01", false), ("none", "00", false)]
    {
        let service = Service::new().await;
        let flags = [&*collector.flag(), "--trace-sample-ratio=0", &*format!("--trusted-proxies={trust}")];
        let sidecar = Sidecar::start(service.address, &flags).await;
        let mut client = sidecar.connect().await;
        let parent = format!("Traceparent: {}{sampled}", &PARENT[..53]);
        client.send(request("POST", "/", &[KEY, &parent], "{}")).await;
        let mut upstream = service.accept().await;
        let seen = upstream.message().await;
        upstream.send(OK).await;
        client.message().await.has_status(200);
        // The trace goes on in any case, and the service learns if it is recorded.
        let passed = seen.get("traceparent").unwrap();
        assert!(
            passed.starts_with(&format!("00-{TRACE}-")) && !passed.contains("00f067aa0ba902b7"),
            "{passed}"
        );
        assert_eq!(passed.ends_with("-01"), is_recorded, "{trust} {sampled} {passed}");
    }
}

#[tokio::test]
async fn without_a_collector_the_context_passes_unchanged_and_is_in_the_logs() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--access-log=text"]).await;
    let valid = format!("Traceparent: {PARENT}");
    for parent in [&*valid, "Traceparent: nonsense"] {
        let mut client = sidecar.connect().await;
        client
            .send(request(
                "POST",
                "/",
                &[parent, "Tracestate: x", &format!("Idempotency-Key: {}", parent.len())],
                "{}",
            ))
            .await;
        let mut upstream = service.accept().await;
        let seen = upstream.message().await;
        upstream.send("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok").await;
        client.message().await.has_status(200);
        assert_eq!(Some(&*format!("Traceparent: {}", seen.get("traceparent").unwrap())), Some(parent));
        assert_eq!(seen.get("tracestate"), Some("x"));
    }
    until("the lines are there", async || sidecar.process.output_lines().len() == 3).await;
    let lines = sidecar.process.output_lines();
    assert!(lines[1].ends_with(&format!(" trace_id={TRACE}")), "{lines:#?}");
    assert!(!lines[2].contains("trace_id"), "{lines:#?}");
}

/// The client of a payment hangs up while the service works. Its trace is whole when the work is done.
#[tokio::test]
async fn the_trace_of_a_client_that_left_ends_with_the_work() {
    let service = Service::new().await;
    let collector = Collector::new().await;
    let sidecar = Sidecar::start(service.address, &[&collector.flag()]).await;
    let client = tokio::net::TcpStream::connect(sidecar.address).await.unwrap();
    // A reset: one that only ends its side waits for its response.
    SockRef::from(&client).set_linger(Some(Duration::ZERO)).unwrap();
    let mut client = Wire::new(client);
    client.send(request("POST", "/", &[KEY], "{}")).await;
    let mut upstream = service.accept().await;
    upstream.message().await;
    drop(client);
    until("the sidecar noticed it", async || {
        series(&sidecar, "oncegate_connections_open").await == Some(0.0)
    })
    .await;
    upstream.send(OK).await;
    let spans = collector.spans_are(4).await;
    let call = spans.iter().find(|span| span.kind() == SpanKind::Client).unwrap();
    assert_eq!(attributes(&call.attributes)["http.response.status_code"], "200");
    let server = spans.iter().find(|span| span.kind() == SpanKind::Server).unwrap();
    let facts = attributes(&server.attributes);
    let fact = |name| facts.get(name).map(String::as_str);
    let known = (fact("oncegate.client_left"), fact("oncegate.outcome"));
    assert_eq!(known, (Some("true"), Some("executed")), "{facts:?}");
}

#[tokio::test]
async fn a_failed_call_is_an_error_with_its_kind() {
    let service = Service::new().await;
    let collector = Collector::new().await;
    let sidecar = Sidecar::start(service.address, &[&*collector.flag(), "--upstream-timeout=200ms"]).await;
    sidecar.ask(&request("POST", "/", &[KEY], "{}")).await.is_problem(504, "outcome-unknown");
    let spans = collector.spans_are(4).await;
    let call = spans.iter().find(|span| span.kind() == SpanKind::Client).unwrap();
    let server = spans.iter().find(|span| span.kind() == SpanKind::Server).unwrap();
    for (span, kind) in [(call, "timed-out"), (server, "504")] {
        assert_eq!(attributes(&span.attributes)["error.type"], kind);
        assert_eq!(span.status.as_ref().unwrap().code, 2, "{span:?}");
    }
    assert_eq!(attributes(&server.attributes)["oncegate.outcome"], "outcome-unknown");
}

async fn spans_counted(sidecar: &Sidecar, result: &str) -> f64 {
    series(sidecar, &format!("oncegate_trace_spans_total{{result=\"{result}\"}}")).await.unwrap()
}

/// A collector that is away, refuses or hangs delays no request, and costs nothing but its spans.
#[tokio::test]
async fn a_collector_in_trouble_delays_no_request() {
    for trouble in ["away", "refuses", "hangs"] {
        let service = Service::new().await.answers(OK);
        let collector = Collector::answering(move |_| match trouble {
            "refuses" => Some("HTTP/1.1 500 Broken\r\nContent-Length: 0\r\n\r\n"),
            _ => None,
        })
        .await;
        let unused = TcpListener::bind(("127.0.0.1", 0)).await.unwrap().local_addr().unwrap();
        let address = if trouble == "away" { unused } else { collector.address };
        let flag = format!("--otlp-endpoint=http://{address}");
        let mut sidecar = Sidecar::start(service.address, &[&flag]).await;
        let mut client = sidecar.connect().await;
        let begun = Instant::now();
        for n in 0..3000 {
            client.send(request("POST", "/", &[&format!("Idempotency-Key: {n}")], "{}")).await;
            client.message().await.has_status(200);
        }
        // Three thousand requests, each of which would wait for ten seconds otherwise.
        assert!(begun.elapsed() < Duration::from_secs(300), "{trouble}: {:?}", begun.elapsed());
        if trouble == "refuses" {
            until("spans were given up", async || spans_counted(&sidecar, "failed").await > 0.0).await;
            sidecar.process.logs("the collector did not take traces or metrics").await;
        }
        assert_eq!(spans_counted(&sidecar, "exported").await, 0.0);
        let lines = sidecar.process.error_lines("the collector did not take");
        assert!(lines.len() <= 2, "{trouble}: {lines:#?}");
        let begun = Instant::now();
        sidecar.process.signal(Signal::TERM);
        assert!(sidecar.process.ended().await.success());
        assert!(begun.elapsed() < Duration::from_secs(30), "{trouble}: {:?}", begun.elapsed());
    }
}

/// More requests than the queue holds, while the collector hangs: what does not fit is counted, and memory is bounded.
#[tokio::test(flavor = "multi_thread")]
async fn spans_that_find_the_queue_full_are_dropped_and_counted() {
    let service = Service::new().await.answers(OK);
    let collector = Collector::answering(|_| None).await;
    let sidecar = Sidecar::start(service.address, &[&collector.flag()]).await;
    let clients: Vec<_> = (0..4)
        .map(|client| {
            let address = sidecar.address;
            tokio::spawn(async move {
                let mut wire = Wire::connect(address).await;
                for n in 0..1500 {
                    wire.send(request("POST", "/", &[&format!("Idempotency-Key: {client}-{n}")], "{}")).await;
                    wire.message().await.has_status(200);
                }
            })
        })
        .collect();
    for client in clients {
        client.await.unwrap();
    }
    let dropped = spans_counted(&sidecar, "dropped").await;
    // 6000 requests of 4 spans, of which the queue holds 4096 and a batch 256.
    assert!(dropped >= 4.0 * (6000 - 4096 - 2 * 256) as f64, "{dropped}");
}

#[tokio::test]
async fn a_message_that_the_collector_cannot_take_now_is_sent_again() {
    const BUSY: &str = "HTTP/1.1 503 Busy\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n";
    let service = Service::new().await.answers(OK);
    let collector = Collector::answering(|number| Some(if number == 0 { BUSY } else { TAKEN })).await;
    let sidecar = Sidecar::start(service.address, &[&collector.flag()]).await;
    sidecar.ask(&request("POST", "/", &[KEY], "{}")).await.has_status(200);
    until("the spans were taken", async || spans_counted(&sidecar, "exported").await == 4.0).await;
    let messages = collector.received("/v1/traces");
    assert_eq!(messages.len(), 2);
    assert_eq!(messages[0].body, messages[1].body);
    let exports = "oncegate_otlp_exports_total{signal=\"traces\",result=\"accepted\"}";
    assert_eq!(series(&sidecar, exports).await, Some(1.0));
}

#[tokio::test]
async fn the_last_spans_and_metrics_are_sent_before_the_end() {
    let service = Service::new().await.answers(OK);
    let collector = Collector::new().await;
    let mut sidecar =
        Sidecar::start(service.address, &[&*collector.flag(), "--otlp-signals=traces,metrics"]).await;
    sidecar.ask(&request("POST", "/", &[KEY], "{}")).await.has_status(200);
    sidecar.process.signal(Signal::TERM);
    assert!(sidecar.process.ended().await.success());
    assert_eq!(collector.spans().len(), 4);
    assert_eq!(collector.received("/v1/metrics").len(), 1);
}

fn metrics(message: &Message) -> Vec<Metric> {
    let sent = ExportMetricsServiceRequest::decode(&*message.body).unwrap();
    let resources = sent.resource_metrics.into_iter().flat_map(|resource| resource.scope_metrics);
    resources.flat_map(|scope| scope.metrics).collect()
}

#[tokio::test]
async fn metrics_that_are_sent_are_those_of_the_page() {
    let service = Service::new().await.answers(OK);
    let collector = Collector::new().await;
    let flags = [&*collector.flag(), "--otlp-signals=metrics", "--otlp-metrics-interval=1s"];
    let sidecar = Sidecar::start(service.address, &flags).await;
    let executed = |message: &Message| {
        let all = metrics(message);
        let requests = all.iter().find(|metric| metric.name == "oncegate_requests")?;
        let Some(metric::Data::Sum(sum)) = &requests.data else { panic!("{requests:?}") };
        assert!(sum.is_monotonic && sum.aggregation_temporality == 2);
        let point =
            sum.data_points.iter().find(|point| attributes(&point.attributes)["outcome"] == "executed")?;
        assert!(0 < point.start_time_unix_nano && point.start_time_unix_nano <= point.time_unix_nano);
        match point.value? {
            number_data_point::Value::AsDouble(value) => Some(value),
            number_data_point::Value::AsInt(value) => Some(value as f64),
        }
    };
    sidecar.ask(&request("POST", "/", &[KEY], "{}")).await.has_status(200);
    until("the request was sent as a metric", async || {
        collector.received("/v1/metrics").iter().any(|message| executed(message) == Some(1.0))
    })
    .await;
    let sent = metrics(collector.received("/v1/metrics").last().unwrap());
    let page = admin(&sidecar, "/metrics").await;
    for metric in &sent {
        let name = metric.name.as_str();
        let on_page = [name.to_owned(), format!("{name}_total")]
            .iter()
            .any(|name| page.text().contains(&format!("# TYPE {name} ")));
        assert!(on_page, "{name} is not on the page");
        let unit = if name.ends_with("_seconds") {
            "s"
        } else if name.ends_with("_bytes") {
            "By"
        } else {
            ""
        };
        assert_eq!(metric.unit, unit, "{name}");
        if let Some(metric::Data::Histogram(histogram)) = &metric.data {
            for point in &histogram.data_points {
                assert_eq!(point.bucket_counts.len(), point.explicit_bounds.len() + 1, "{name}");
                assert_eq!(point.bucket_counts.iter().sum::<u64>(), point.count, "{name}");
            }
        }
    }
    assert!(sent.len() > 40, "{}", sent.len());
    // Nothing but metrics was asked for.
    assert!(collector.received("/v1/traces").is_empty());
}

#[tokio::test]
async fn the_variables_of_opentelemetry_count_if_nothing_else_is_said() {
    let service = Service::new().await.answers(OK);
    let collector = Collector::new().await;
    let endpoint = format!("http://{}", collector.address);
    let mut command = sidecar(&format!("http://{}", service.address));
    command
        .arg("--store=memory:")
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint)
        .env("OTEL_SERVICE_NAME", "shop");
    command.env("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc").env("OTEL_EXPORTER_OTLP_HEADERS", "x-token=whisper");
    let mut sidecar = Sidecar::run(&mut command).await;
    sidecar.process.logs("OTEL_EXPORTER_OTLP_PROTOCOL: \"grpc\" is ignored").await;
    sidecar.ask(&request("POST", "/", &[KEY], "{}")).await.has_status(200);
    collector.spans_are(4).await;
    assert_eq!(collector.received("/v1/traces")[0].get("x-token"), Some("whisper"));
    sidecar.process.signal(Signal::TERM);
    assert!(sidecar.process.ended().await.success());
    assert!(!sidecar.process.errors().await.contains("whisper"));
}

#[tokio::test]
async fn a_value_that_is_wrong_is_named_with_what_to_write() {
    for (flag, why) in [
        ("--otlp-endpoint=http://c:4318/v1/traces", "write \"http://c:4318\""),
        ("--trace-sample-ratio=5%", "not a number from 0 to 1"),
        ("--otlp-signals=logs", "not one of traces, metrics"),
        ("--log-format=xml", "not one of text, json"),
        ("--otlp-metrics-interval=1ms", "1s"),
    ] {
        let mut process = Process::start(sidecar("http://127.0.0.1:1").args([flag, "--store=memory:"]));
        let errors = process.errors().await;
        assert!(!process.ended().await.success() && errors.contains(why), "{flag}: {errors}");
    }
}

/// 10 000 paths, callers, keys and methods: a client cannot make the page longer.
#[tokio::test]
async fn clients_cannot_add_series() {
    let service = Service::new().await.answers(OK);
    let config = tempfile::NamedTempFile::new().unwrap();
    let routes: String = (0..150).map(|n| format!("[[route]]\npath = \"/r{n}/{{id}}\"\n")).collect();
    std::fs::write(config.path(), routes).unwrap();
    let sidecar = Sidecar::start(service.address, &[&format!("--config={}", config.path().display())]).await;
    let mut client = sidecar.connect().await;
    for n in 0..10_000 {
        let method = if n % 10 == 0 { format!("M{n}") } else { "POST".to_owned() };
        let key = format!("Idempotency-Key: {n}");
        let caller = format!("Authorization: Bearer {n}");
        let path = if n % 2 == 0 { format!("/path-{n}?q={n}") } else { format!("/r{}/{n}", n % 150) };
        client.send(request(&method, &path, &[&key, &caller], "{}")).await;
        client.message().await.has_status(200);
    }
    let page = admin(&sidecar, "/metrics").await;
    let lines = page.text().lines().filter(|line| !line.starts_with('#')).count();
    // 75 routes of 150 had requests, in one group of outcomes and with one method or two.
    assert!(lines < 4000, "{lines}");
    for made_up in ["path-", "\"M10", "Bearer", "idempotency"] {
        assert!(!page.text().contains(made_up), "{made_up}");
    }
    let count = |labels: &str| {
        let name = format!("oncegate_route_requests_total{{{labels}}} ");
        let line = page.text().lines().find_map(|line| line.strip_prefix(&name)).map(str::to_owned);
        line.and_then(|value| value.parse::<f64>().ok()).unwrap_or(0.0)
    };
    let default = "route=\"default\",method=";
    assert_eq!(count(&format!("{default}\"_OTHER\",outcome=\"not-covered\"")), 1000.0);
    assert_eq!(count(&format!("{default}\"POST\",outcome=\"executed\"")), 4000.0);
    // The routes from the hundredth on share one name.
    assert!(count("route=\"other\",method=\"POST\",outcome=\"executed\"") > 1000.0);
    assert!(count("route=\"/r1/{id}\",method=\"POST\",outcome=\"executed\"") > 50.0);
}

#[tokio::test]
async fn exemplars_name_the_trace_in_openmetrics_only() {
    let service = Service::new().await.answers(OK);
    let collector = Collector::new().await;
    let sidecar = Sidecar::start(service.address, &[&collector.flag()]).await;
    let parent = format!("Traceparent: {PARENT}");
    sidecar.ask(&request("POST", "/", &[KEY, &parent], "{}")).await.has_status(200);
    let open = crate::exposition::open_metrics(&sidecar).await;
    for name in ["oncegate_request_duration_seconds_bucket", "oncegate_upstream_duration_seconds_bucket"] {
        let has =
            |line: &str| line.starts_with(name) && line.contains(&format!(" # {{trace_id=\"{TRACE}\"}} 0."));
        assert!(open.text().lines().any(has), "{name}: {}", open.text());
    }
    assert!(!admin(&sidecar, "/metrics").await.text().contains("trace_id"));
}
