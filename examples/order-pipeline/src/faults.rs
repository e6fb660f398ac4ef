//! The points at which a part kills itself, to show that it may crash there. Real services have nothing of this.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use oncegate::engine::ConfigError;
use oncegate::inbox::{
    ConsumerName, Delivery, Message, Outgoing, ProcessOutcome, Processor, PublishFuture, Publisher, Source,
    SourceError, SourceInfo,
};

/// A point on the way of an order.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Point {
    BeforeOrderCommit,
    AfterOrderCommit,
    BeforePublish,
    AfterPublish,
    BeforeProjectionCommit,
    AfterProjectionCommit,
    BeforeAck,
    AfterAck,
}

/// The configured self-destruction of this process.
#[derive(Clone, clap::Args)]
pub(crate) struct Faults {
    /// The point at which the process kills itself, as `kill -9` would.
    #[arg(long, env)]
    kill_at: Option<Point>,
    /// The number of kills, over all processes.
    #[arg(long, env, default_value_t = 1)]
    kill_times: u64,
    /// The file that counts the kills: one byte for each.
    #[arg(long, env, default_value = "kills")]
    kill_memory: PathBuf,
}

impl Faults {
    /// Kills the process if this is the configured point.
    pub(crate) fn at(&self, point: Point) {
        if self.kill_at != Some(point) {
            return;
        }
        let times = fs::metadata(&self.kill_memory).map_or(0, |memory| memory.len());
        if times >= self.kill_times {
            return;
        }
        let memory = OpenOptions::new().create(true).append(true).open(&self.kill_memory);
        // Without the count it would crash forever.
        if memory.and_then(|mut memory| memory.write_all(b"x")).is_ok() {
            std::process::abort();
        }
    }
}

/// A wrapper that may crash before or after the wrapped call.
pub(crate) struct Mortal<T> {
    inner: T,
    faults: Faults,
}

impl<T> Mortal<T> {
    pub(crate) const fn new(inner: T, faults: Faults) -> Self {
        Self { inner, faults }
    }
}

impl<P: Publisher> Publisher for Mortal<P> {
    fn publish<'a>(&'a self, message: &'a Outgoing) -> PublishFuture<'a> {
        Box::pin(async move {
            self.faults.at(Point::BeforePublish);
            self.inner.publish(message).await?;
            self.faults.at(Point::AfterPublish);
            Ok(())
        })
    }
}

impl<P: Processor> Processor for Mortal<P> {
    fn consumer(&self) -> &ConsumerName {
        self.inner.consumer()
    }

    fn max_batch(&self) -> usize {
        self.inner.max_batch()
    }

    fn retention(&self) -> Duration {
        self.inner.retention()
    }

    fn check(&self, source: &SourceInfo) -> Result<(), ConfigError> {
        self.inner.check(source)
    }

    async fn process(&self, messages: &[Arc<Message>]) -> Vec<ProcessOutcome> {
        let handled = self.inner.process(messages).await;
        if handled.iter().any(|one| matches!(one, ProcessOutcome::Processed { .. })) {
            self.faults.at(Point::AfterProjectionCommit);
        }
        handled
    }
}

impl<S: Source> Source for Mortal<S> {
    type Delivery = Mortal<S::Delivery>;

    fn info(&self) -> SourceInfo {
        self.inner.info()
    }

    async fn next(&mut self) -> Result<Self::Delivery, SourceError> {
        Ok(Mortal::new(self.inner.next().await?, self.faults.clone()))
    }

    async fn close(&mut self) -> Result<(), SourceError> {
        self.inner.close().await
    }
}

impl<D: Delivery> Delivery for Mortal<D> {
    const GIVES_BACK: bool = D::GIVES_BACK;

    fn message(&self) -> &Arc<Message> {
        self.inner.message()
    }

    fn is_lost(&self) -> bool {
        self.inner.is_lost()
    }

    async fn extend(&self) -> Result<(), SourceError> {
        self.inner.extend().await
    }

    async fn ack(&self) -> Result<(), SourceError> {
        self.faults.at(Point::BeforeAck);
        self.inner.ack().await?;
        self.faults.at(Point::AfterAck);
        Ok(())
    }

    async fn give_back(&self, after: Duration) -> Result<(), SourceError> {
        self.inner.give_back(after).await
    }
}
