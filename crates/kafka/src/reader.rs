//! The thread that polls the client: it reads ahead, pauses partitions, commits, and takes part in the group.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use oncegate_core::ErrorChain;
use oncegate_engine::ConfigError;
use oncegate_inbox::Message;
use rdkafka::client::ClientContext;
use rdkafka::config::{ClientConfig, FromClientConfigAndContext as _, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _, ConsumerContext, RebalanceProtocol};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Headers as _, Message as _};
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{Offset, TopicPartitionList};
use tokio::sync::oneshot;

use super::partition::Partition;
use super::settings::{self, KafkaOrder, OnTruncation, Start};
use super::shared::SourceState;
use super::{RECORD_KEY, TOMBSTONE, UNREADABLE};

/// The number of messages that are read before the thread does anything else.
const MAX_AT_ONCE: usize = 256;

/// The longest wait of a poll. It is also the delay of a commit or of the end.
const POLL: Duration = Duration::from_millis(100);

/// The longest wait of a poll while everything is paused.
const POLL_PAUSED: Duration = Duration::from_millis(20);

/// The time that the thread waits for space before it pauses its partitions.
///
/// A pause discards what the client has read ahead. So it is meant for consumers that stopped, not for those that are
/// slower than the broker.
const WAIT_FOR_SPACE: Duration = Duration::from_millis(500);

/// The timeout of a request to the broker.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);

/// The shortest interval between two joins of the group, if partitions have no valid offset.
const JOIN_AGAIN: Duration = Duration::from_secs(5);

/// The number of commit rounds after which offsets are committed again that were requested already.
///
/// The client does not report the result of an asynchronous commit, and a group refuses commits during a rebalance.
const REPEAT: u64 = 5;

/// The interval at which the thread checks during a revocation if running messages have ended.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// Starts the thread. Its result is sent when it has left the group.
pub(super) fn start(
    config: &ClientConfig,
    topics: &[&str],
    start: Start,
    shared: Arc<SourceState>,
) -> Result<oneshot::Receiver<Result<(), String>>, ConfigError> {
    let context = Context {
        shared: Arc::clone(&shared),
        start,
        is_unresolved: AtomicBool::new(false),
        is_done: AtomicBool::new(false),
    };
    let consumer = BaseConsumer::from_config_and_context(config, context).map_err(settings::refused)?;
    consumer.subscribe(topics).map_err(settings::refused)?;
    let topics = topics.iter().map(|topic| (*topic).to_owned()).collect();
    let (tell, left) = oneshot::channel();
    let run = move || {
        let reader = Reader { consumer, topics, shared: Arc::clone(&shared) };
        // A consumer must not wait for a thread that has ended.
        match catch_unwind(AssertUnwindSafe(|| reader.run())) {
            Ok(result) => drop(tell.send(result)),
            Err(_) => shared.fatal("the thread that reads from Kafka panicked".to_owned()),
        }
    };
    thread::Builder::new().name("oncegate-kafka".to_owned()).spawn(run).map_err(|error| {
        ConfigError::new(format!("Kafka: the reading thread could not be started: {error}"))
    })?;
    Ok(left)
}

struct Reader {
    consumer: BaseConsumer<Context>,
    topics: Vec<String>,
    shared: Arc<SourceState>,
}

impl Reader {
    /// Runs until the source is closed. The error is that of the last commit.
    fn run(self) -> Result<(), String> {
        let mut commit_at = Instant::now() + self.shared.options.commit_interval;
        let (mut must_join, mut join_at) = (false, Instant::now());
        let mut full_since = None;
        let mut rounds = 0_u64;
        while !self.shared.is_closing() && !self.shared.is_fatal() {
            let now = Instant::now();
            if now >= commit_at {
                commit_at = now + self.shared.options.commit_interval;
                let assigned = self.shared.assigned();
                rounds += 1;
                if rounds.is_multiple_of(REPEAT) {
                    assigned.iter().for_each(|partition| partition.track().commit_again());
                }
                if let Err(error) = commit(&self.consumer, &assigned, CommitMode::Async) {
                    tracing::warn!(error = %ErrorChain(&error), "offsets were not committed; trying again");
                }
            }
            if must_join && now >= join_at {
                join_at = now + JOIN_AGAIN;
                must_join = false;
                self.join_again();
            }
            if self.shared.is_full() {
                let since: Instant = *full_since.get_or_insert(now);
                if now < since + WAIT_FOR_SPACE {
                    self.shared.wait_for_space(POLL);
                    continue;
                }
            } else {
                full_since = None;
            }
            let is_reading = self.pause_and_resume(full_since.is_some());
            must_join |= self.poll(if is_reading { POLL } else { POLL_PAUSED });
        }
        let committed = commit(&self.consumer, &self.shared.assigned(), CommitMode::Sync);
        self.consumer.context().is_done.store(self.shared.is_closing(), Ordering::Relaxed);
        // Dropping the client revokes its partitions and leaves the group.
        drop(self);
        committed.map_err(|error| error.to_string())
    }

    /// Reads the messages that are there, or waits for one. Returns `true` if a partition has no valid offset.
    fn poll(&self, at_most: Duration) -> bool {
        let mut at_most = at_most;
        for _ in 0..MAX_AT_ONCE {
            match self.consumer.poll(at_most) {
                Some(Ok(record)) if self.put(&record) => at_most = Duration::ZERO,
                Some(Ok(_)) | None => return false,
                Some(Err(error)) => return self.failed(&error),
            }
        }
        false
    }

    /// Stores a message, and returns `true` if another one may be read.
    fn put(&self, record: &BorrowedMessage<'_>) -> bool {
        // It may have been on its way when its partition was revoked.
        let Some(partition) = self.shared.partition(record.topic(), record.partition()) else { return true };
        let message = message(record, self.shared.options.order);
        self.shared.put(message, record.offset(), &partition)
    }

    /// Handles an error of a poll, and returns `true` if a partition has no valid offset.
    fn failed(&self, error: &KafkaError) -> bool {
        if let KafkaError::MessageConsumptionFatal(_) = error {
            self.shared.fatal(format!("the client cannot go on: {error}"));
            return false;
        }
        match error.rdkafka_error_code() {
            // The group has no offset, or an offset that the log does not have.
            Some(RDKafkaErrorCode::AutoOffsetReset) => true,
            Some(RDKafkaErrorCode::LogTruncation) => {
                let what = format!("a log lost its end, and new messages were written: {error}");
                match self.shared.options.truncated {
                    OnTruncation::Stop => self.shared.fatal(what),
                    OnTruncation::Continue => self.shared.error(what),
                }
                true
            }
            // The client skips the record.
            Some(RDKafkaErrorCode::BadMessage) => {
                self.shared.fatal(format!("a record is damaged: its checksum is wrong: {error}"));
                false
            }
            // The client stays in front of an unknown codec, and skips an unknown format.
            Some(RDKafkaErrorCode::NotImplemented) => {
                self.shared.fatal(format!(
                    "a record has an unknown compression or format, or it is damaged: {error}"
                ));
                false
            }
            _ => {
                self.shared.error(error.to_string());
                false
            }
        }
    }

    /// Leaves the group and joins it again, so that every partition is assigned anew from a valid offset.
    ///
    /// An assignment here would look like the reply to a rebalance that the client has begun and not reported yet.
    fn join_again(&self) {
        self.consumer.context().is_unresolved.store(true, Ordering::Relaxed);
        let topics: Vec<&str> = self.topics.iter().map(String::as_str).collect();
        self.consumer.unsubscribe();
        if let Err(error) = self.consumer.subscribe(&topics) {
            self.shared.fatal(format!("the group cannot be joined again: {error}"));
        }
    }

    /// Pauses partitions without space and resumes the others. Returns `true` if any partition is read.
    fn pause_and_resume(&self, is_full: bool) -> bool {
        let window = self.shared.options.window;
        let (mut to_pause, mut to_resume) = (TopicPartitionList::new(), TopicPartitionList::new());
        let (mut is_reading, mut changed) = (false, Vec::new());
        let half_empty = self.shared.is_half_empty();
        for partition in self.shared.assigned() {
            let open = partition.track().window();
            // In between the state stays, so that it does not change with each message.
            let is_paused = if partition.is_paused() {
                !half_empty || open > window / 2
            } else {
                is_full || open >= window
            };
            is_reading |= !is_paused;
            if is_paused != partition.is_paused() {
                let list = if is_paused { &mut to_pause } else { &mut to_resume };
                list.add_partition(&partition.topic, partition.number);
                changed.push((partition, is_paused));
            }
        }
        let mut result = Ok(());
        if to_pause.count() > 0 {
            result = self.consumer.pause(&to_pause);
        }
        if to_resume.count() > 0 {
            result = result.and(self.consumer.resume(&to_resume));
        }
        match result {
            Ok(()) => changed.iter().for_each(|(partition, is_paused)| partition.set_paused(*is_paused)),
            Err(error) => self.shared.error(format!("partitions could not be paused or resumed: {error}")),
        }
        is_reading
    }
}

/// Commits the settled offsets of partitions. An asynchronous commit has no result.
fn commit<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    partitions: &[Arc<Partition>],
    mode: CommitMode,
) -> KafkaResult<()> {
    let mut list = TopicPartitionList::new();
    let mut asked = Vec::new();
    for partition in partitions {
        let position = match mode {
            CommitMode::Async => partition.track().next_commit(),
            // The result of an earlier commit is unknown.
            CommitMode::Sync => partition.track().position(),
        };
        if let Some(position) = position {
            list.add_partition_offset(&partition.topic, partition.number, Offset::Offset(position))?;
            asked.push(partition);
        }
    }
    if asked.is_empty() {
        return Ok(());
    }
    let result = consumer.commit(&list, mode);
    if result.is_err() {
        asked.iter().for_each(|partition| partition.track().commit_again());
    }
    result
}

/// Converts a record to a message.
fn message(record: &BorrowedMessage<'_>, order: KafkaOrder) -> Message {
    let payload = record.payload().map(Bytes::copy_from_slice);
    let is_tombstone = payload.is_none();
    let mut message = Message::new(record.topic(), payload.unwrap_or_default());
    message.broker_id = Some(format!("{}/{}/{}", record.topic(), record.partition(), record.offset()));
    // The client panics at header names that are not UTF-8. One record must not end the thread.
    let headers = catch_unwind(AssertUnwindSafe(|| {
        let mut headers = Vec::new();
        for header in record.headers().into_iter().flat_map(|headers| headers.iter()) {
            // These names are reserved: a producer must not set them.
            if ![TOMBSTONE, RECORD_KEY, UNREADABLE].contains(&header.key) {
                headers
                    .push((header.key.to_owned(), Bytes::copy_from_slice(header.value.unwrap_or_default())));
            }
        }
        headers
    }));
    match headers {
        Ok(headers) => message.headers = headers,
        Err(_) => message = message.with_header(UNREADABLE, Bytes::from_static(b"1")),
    }
    if is_tombstone {
        message = message.with_header(TOMBSTONE, Bytes::from_static(b"1"));
    }
    let key = record.key().map(Bytes::copy_from_slice);
    match (order, key) {
        (KafkaOrder::Key, Some(key)) => message = message.with_order_key(key),
        (KafkaOrder::Partition | KafkaOrder::None, Some(key)) => {
            message = message.with_header(RECORD_KEY, key)
        }
        (_, None) => {}
    }
    if order == KafkaOrder::Partition {
        message = message.with_order_key(format!("{}/{}", record.topic(), record.partition()));
    }
    message
}

/// Passes a message of the client to the log.
pub(super) fn log(level: RDKafkaLogLevel, facility: &str, message: &str) {
    match level {
        RDKafkaLogLevel::Emerg
        | RDKafkaLogLevel::Alert
        | RDKafkaLogLevel::Critical
        | RDKafkaLogLevel::Error => tracing::error!(facility, "{message}"),
        RDKafkaLogLevel::Warning => tracing::warn!(facility, "{message}"),
        RDKafkaLogLevel::Notice | RDKafkaLogLevel::Info => tracing::info!(facility, "{message}"),
        RDKafkaLogLevel::Debug => tracing::debug!(facility, "{message}"),
    }
}

/// The callbacks of the client within its polls.
struct Context {
    shared: Arc<SourceState>,
    start: Start,
    /// `true` if the group may have committed offsets that the log does not have.
    is_unresolved: AtomicBool,
    /// `true` if the last commit was made, and no further one will follow.
    is_done: AtomicBool,
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::warn!(error = %ErrorChain(&error), "{reason}");
    }

    fn stats_raw(&self, _: &[u8]) {}
}

impl ConsumerContext for Context {
    fn rebalance(&self, consumer: &BaseConsumer<Self>, error: RDKafkaRespErr, list: &mut TopicPartitionList) {
        let is_assigned = error == RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS;
        if is_assigned {
            self.assign(consumer, list);
        } else {
            self.revoke(consumer, list);
        }
        let result = match (consumer.rebalance_protocol(), is_assigned) {
            (RebalanceProtocol::Cooperative, true) => consumer.incremental_assign(list),
            (RebalanceProtocol::Cooperative, false) => consumer.incremental_unassign(list),
            (_, true) => consumer.assign(list),
            (_, false) => consumer.unassign(),
        };
        if let Err(error) = result {
            self.shared.fatal(format!("the client refuses the assignment of the group: {error}"));
        }
    }
}

impl Context {
    /// Starts partitions at the committed offset of the group, or at its start if there is none.
    fn assign(&self, consumer: &BaseConsumer<Self>, list: &TopicPartitionList) {
        let mut committed = TopicPartitionList::new();
        for element in list.elements() {
            committed.add_partition(element.topic(), element.partition());
        }
        let checks_all = self.is_unresolved.swap(false, Ordering::Relaxed);
        let committed = match consumer.committed_offsets(committed, ASK_TIMEOUT) {
            Ok(committed) => committed,
            Err(error) => {
                // The client retries by itself, and reports if there is no offset.
                tracing::warn!(error = %ErrorChain(&error), "the committed offsets of the group are unknown");
                TopicPartitionList::new()
            }
        };
        for mut element in list.elements() {
            let (topic, number) = (Arc::<str>::from(element.topic()), element.partition());
            let known = committed.find_partition(&topic, number).filter(|known| known.error().is_ok());
            let next = match known.map(|known| known.offset()) {
                Some(Offset::Offset(next)) if !checks_all => Ok(Some(next)),
                Some(Offset::Offset(next)) => self.position(consumer, &topic, number, Some(next)),
                Some(_) => self.position(consumer, &topic, number, None),
                None => Ok(None),
            };
            let next = next.unwrap_or_else(|error| {
                self.shared
                    .error(format!("the bounds of partition {number} of {topic} are unknown: {error}"));
                None
            });
            tracing::debug!(topic = &*topic, partition = number, from = next, "assigned");
            if let Some(next) = next
                && let Err(error) = element.set_offset(Offset::Offset(next))
            {
                self.shared.fatal(format!("the client refuses an offset: {error}"));
            }
            self.shared.assign(Partition::new(topic, number, next));
        }
    }

    /// Returns the position at which a partition goes on after `next`. `None` means that an operator has to decide.
    fn position(
        &self,
        consumer: &BaseConsumer<Self>,
        topic: &str,
        number: i32,
        next: Option<i64>,
    ) -> KafkaResult<Option<i64>> {
        let (low, high) = consumer.fetch_watermarks(topic, number, ASK_TIMEOUT)?;
        let place = format!("partition {number} of {topic}");
        let Some(next) = next else {
            return Ok(match self.start {
                Start::Earliest => Some(low),
                Start::Latest => Some(high),
                Start::Refused => {
                    let group = "the group has committed no offset, and auto.offset.reset is error";
                    self.shared.fatal(format!("{place}: {group}"));
                    None
                }
            });
        };
        if (low..=high).contains(&next) {
            return Ok(Some(next));
        }
        let what = if next < low {
            format!("{place}: messages {next} to {} were deleted before they were processed", low - 1)
        } else {
            format!(
                "{place}: message {next} comes next, and the log ends at {high}: it lost its end, or the topic \
                 was made anew"
            )
        };
        match self.shared.options.truncated {
            OnTruncation::Stop => {
                self.shared.fatal(what);
                // The committed offset stays, so that the problem is reported again.
                Ok(None)
            }
            OnTruncation::Continue => {
                tracing::error!(from = next, to = low, "{what}");
                self.shared.error(what);
                Ok(Some(low))
            }
        }
    }

    /// Lets running messages end, commits, and then releases the partitions.
    fn revoke(&self, consumer: &BaseConsumer<Self>, list: &TopicPartitionList) {
        let mut revoked = Vec::new();
        let mut paused = TopicPartitionList::new();
        for element in list.elements() {
            tracing::debug!(topic = element.topic(), partition = element.partition(), "revoked");
            let Some(partition) = self.shared.partition(element.topic(), element.partition()) else {
                continue;
            };
            self.shared.release(&partition);
            if partition.is_paused() {
                paused.add_partition(element.topic(), element.partition());
            }
            revoked.push(partition);
        }
        // If the group has already given them away, a commit would be refused, and the messages run on the new owner,
        // too.
        let is_lost = consumer.assignment_lost();
        let is_done = self.is_done.load(Ordering::Relaxed);
        if !is_lost && !is_done {
            let deadline = Instant::now() + self.shared.options.revoke_timeout;
            let is_busy = || revoked.iter().any(|partition| partition.track().in_hand() > 0);
            while is_busy() && !self.shared.is_closing() && Instant::now() < deadline {
                thread::sleep(CHECK_INTERVAL);
            }
        }
        revoked.iter().for_each(|partition| partition.lose());
        if !is_lost
            && !is_done
            && let Err(error) = commit(consumer, &revoked, CommitMode::Sync)
        {
            tracing::warn!(error = %ErrorChain(&error), "offsets of revoked partitions were not committed");
        }
        // Otherwise they would still be paused at their next assignment.
        if paused.count() > 0
            && let Err(error) = consumer.resume(&paused)
        {
            tracing::warn!(error = %ErrorChain(&error), "revoked partitions stay paused");
        }
    }
}
