//! Sends traces and metrics to a collector over OTLP (HTTP with Protocol Buffers).
//!
//! A thread of its own sends, so that neither a request nor the renewal of leases ever waits for the collector. Requests put
//! their spans into a queue of a fixed length; what finds it full is dropped and counted.
//!
//! The few messages are written here, by [`wire`]: see `docs/decisions/0078-otlp-messages-are-written-here.md`.

mod metrics;
mod options;
mod send;
mod spans;
mod wire;

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::time::{Duration, SystemTime};

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior};

pub(crate) use self::options::{
    OtlpEndpoint, OtlpHeaders, OtlpOptions, Signal, attribute, endpoint, headers,
};

use self::send::{Collector, Sent};
use self::wire::MessageWriter;
use crate::admin::{AdminState, SpanFate};
use crate::trace::{RequestSpans, Tracer};

/// The most requests whose spans wait to be sent: a few megabytes.
const QUEUE: usize = 4096;

/// The most requests in one message to the collector.
const BATCH: usize = 256;

/// The longest time that spans wait for others to be sent with.
const BATCH_INTERVAL: Duration = Duration::from_secs(1);

/// Limits the time that the end of the process waits for the collector.
const CLOSING_TIMEOUT: Duration = Duration::from_secs(3);

/// The program that spans and metrics are from.
#[derive(Clone, Debug)]
struct Resource {
    attributes: Vec<(String, String)>,
}

impl Resource {
    fn new(options: &OtlpOptions) -> Self {
        let mut attributes = vec![
            ("service.name".to_owned(), options.service_name.clone()),
            ("service.version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
            ("service.instance.id".to_owned(), instance_id()),
            ("telemetry.sdk.name".to_owned(), "oncegate".to_owned()),
            ("telemetry.sdk.language".to_owned(), "rust".to_owned()),
            ("telemetry.sdk.version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ];
        for (name, value) in &options.resource.0 {
            // The name of the service has a setting of its own, which wins.
            match attributes.iter_mut().find(|(known, _)| known == name) {
                Some(_) if name == "service.name" => {}
                Some((_, known)) => known.clone_from(value),
                None => attributes.push((name.clone(), value.clone())),
            }
        }
        Self { attributes }
    }

    fn write(&self, message: &mut MessageWriter) {
        for (name, value) in &self.attributes {
            message.message(1, |pair| {
                pair.text(1, name);
                pair.message(2, |any| any.text_always(1, value));
            });
        }
    }

    fn write_scope(message: &mut MessageWriter) {
        message.text(1, "oncegate");
        message.text(2, env!("CARGO_PKG_VERSION"));
    }
}

/// Tells this process from others of the same service. Random, in the form of a UUID of version 4.
fn instance_id() -> String {
    let bits = fastrand::u128(..);
    let hex = format!("{:032x}", bits & !(0xf << 76 | 0b11 << 62) | 4 << 76 | 0b10 << 62);
    let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default();
    format!("{}-{}-{}-{}-{}", part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32))
}

/// The thread that sends.
#[derive(Debug)]
pub(crate) struct OtlpExporter {
    stop: oneshot::Sender<()>,
    ended: oneshot::Receiver<()>,
}

impl OtlpExporter {
    /// Starts the thread. Returns the tracer that feeds it.
    ///
    /// # Errors
    /// If the thread cannot be started, or the certificates of the system cannot be read.
    pub(crate) fn start(options: OtlpOptions, state: AdminState) -> io::Result<(Self, Tracer)> {
        let (queue, spans) = mpsc::channel(QUEUE);
        let has_traces = options.signals.contains(&Signal::Traces);
        let tracer =
            if has_traces { Tracer::recording(queue, state.metrics.clone()) } else { Tracer::silent() };
        let collector = Collector::new(&options).map_err(io::Error::other)?;
        let (stop, stopped) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let work = move || {
            let sender = Sender {
                resource: Resource::new(&options),
                store: state.engine.store().capabilities().name,
                started: SystemTime::now(),
                collector,
                options,
                state,
            };
            runtime.block_on(sender.run(spans, stopped));
            let _gone = end.send(());
        };
        std::thread::Builder::new().name("otlp".to_owned()).spawn(work)?;
        Ok((Self { stop, ended }, tracer))
    }

    /// Sends what waits, for a bounded time.
    pub(crate) async fn close(self) {
        let _ended_already = self.stop.send(());
        let _late = tokio::time::timeout(CLOSING_TIMEOUT + Duration::from_secs(1), self.ended).await;
    }
}

struct Sender {
    resource: Resource,
    store: &'static str,
    started: SystemTime,
    collector: Collector,
    options: OtlpOptions,
    state: AdminState,
}

impl Sender {
    async fn run(self, mut spans: mpsc::Receiver<Box<RequestSpans>>, mut stop: oneshot::Receiver<()>) {
        let mut tick = tokio::time::interval(self.options.metrics_interval);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        tick.tick().await;
        let has_metrics = self.options.signals.contains(&Signal::Metrics);
        let mut batch = Vec::new();
        let mut deadline = None;
        while deadline.is_none() {
            let sending: Pin<Box<dyn Future<Output = ()> + '_>> = tokio::select! {
                biased;
                _ = &mut stop => break,
                is_open = fill(&mut batch, &mut spans), if self.has_traces() => {
                    if !is_open {
                        break;
                    }
                    Box::pin(self.send_spans(std::mem::take(&mut batch)))
                }
                _ = tick.tick(), if has_metrics => Box::pin(self.send_metrics()),
            };
            deadline = self.finish(sending, &mut stop).await;
        }
        self.collector.close();
        let deadline = deadline.unwrap_or_else(|| Instant::now() + CLOSING_TIMEOUT);
        loop {
            while batch.len() < BATCH
                && let Ok(next) = spans.try_recv()
            {
                batch.push(*next);
            }
            if batch.is_empty() {
                break;
            }
            let batch = std::mem::take(&mut batch);
            let count = batch.iter().map(RequestSpans::count).sum();
            if tokio::time::timeout_at(deadline, self.send_spans(batch)).await.is_err() {
                self.state.metrics.count_spans(SpanFate::Failed, count);
            }
        }
        if has_metrics {
            let _late = tokio::time::timeout_at(deadline, self.send_metrics()).await;
        }
    }

    /// Waits until a message is sent. If the process ends meanwhile, this waits until the deadline of the end at most, and
    /// returns it. The message is not sent again: the collector may have taken it.
    async fn finish(
        &self,
        mut sending: Pin<Box<dyn Future<Output = ()> + '_>>,
        stop: &mut oneshot::Receiver<()>,
    ) -> Option<Instant> {
        tokio::select! {
            () = &mut sending => return None,
            _ = stop => self.collector.close(),
        }
        let deadline = Instant::now() + CLOSING_TIMEOUT;
        let _late = tokio::time::timeout_at(deadline, sending).await;
        Some(deadline)
    }

    fn has_traces(&self) -> bool {
        self.options.signals.contains(&Signal::Traces)
    }

    async fn send_spans(&self, batch: Vec<RequestSpans>) {
        let body = spans::encode(&self.resource, self.store, &batch);
        let count: u64 = batch.iter().map(RequestSpans::count).sum();
        drop(batch);
        let sent = self.collector.send(Signal::Traces, body).await;
        let metrics = &self.state.metrics;
        metrics.count_export(Signal::Traces, matches!(sent, Sent::Accepted { .. }));
        match sent {
            Sent::Accepted { rejected } => {
                let rejected = rejected.min(count);
                metrics.count_spans(SpanFate::Exported, count - rejected);
                metrics.count_spans(SpanFate::Rejected, rejected);
            }
            Sent::Failed => metrics.count_spans(SpanFate::Failed, count),
        }
    }

    async fn send_metrics(&self) {
        let Ok(text) = self.state.metrics.render(&self.state, false) else { return };
        let body = metrics::encode(&self.resource, &text, (self.started, SystemTime::now()));
        let sent = self.collector.send(Signal::Metrics, body).await;
        self.state.metrics.count_export(Signal::Metrics, matches!(sent, Sent::Accepted { .. }));
    }
}

/// Waits until the batch is full, or until its first request has waited long enough. Returns false if there will be no more.
async fn fill(batch: &mut Vec<RequestSpans>, spans: &mut mpsc::Receiver<Box<RequestSpans>>) -> bool {
    if batch.is_empty() {
        match spans.recv().await {
            Some(first) => batch.push(*first),
            None => return false,
        }
    }
    let until = Instant::now() + BATCH_INTERVAL;
    while batch.len() < BATCH {
        match tokio::time::timeout_at(until, spans.recv()).await {
            Ok(Some(next)) => batch.push(*next),
            Ok(None) => return false,
            Err(_) => break,
        }
    }
    true
}
