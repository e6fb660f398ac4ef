//! The thread that polls the client: it reads ahead, pauses what has no room, commits, and takes part in the group.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use oncegate_engine::ConfigError;
use rdkafka::client::ClientContext;
use rdkafka::config::{ClientConfig, FromClientConfigAndContext as _, RDKafkaLogLevel};
use rdkafka::consumer::{
    BaseConsumer, CommitMode, Consumer as _, ConsumerContext, Rebalance, RebalanceProtocol,
};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Headers as _, Message as _};
use rdkafka::{Offset, TopicPartitionList};
use tokio::sync::oneshot;

use super::partition::Partition;
use super::settings::{KafkaOrder, Start, Truncated};
use super::shared::Shared;
use super::{RECORD_KEY, TOMBSTONE, UNREADABLE};
use crate::message::Message;

/// How many messages are read before the thread looks after anything else.
const AT_ONCE: usize = 256;

/// How long one poll waits for a message. It is also how late a commit, or the end, may be seen.
const POLL: Duration = Duration::from_millis(100);

/// The same where nothing is read, because there is no room.
const POLL_PAUSED: Duration = Duration::from_millis(20);

/// How long the thread waits for room before it pauses its partitions. What the client has read ahead is thrown away by a
/// pause, so it is for those who stopped asking, and not for those who are merely slower than the broker.
const WAIT_FOR_ROOM: Duration = Duration::from_millis(500);

/// How long one question to the broker may take.
const ASK: Duration = Duration::from_secs(5);

/// How long after a question that was not answered it is asked again.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// After so many rounds of commits offsets are committed again that were asked for already. The client does not say what
/// became of a commit that was only sent, and a group that is being rebalanced refuses it.
const REPEAT: u64 = 5;

/// How often the thread looks whether what it waits for on a revocation has ended.
const LOOK: Duration = Duration::from_millis(5);

/// Starts the thread. What it returns is told when it has left the group.
pub(super) fn start(
    config: &ClientConfig,
    topics: &[&str],
    start: Start,
    shared: Arc<Shared>,
) -> Result<oneshot::Receiver<Result<(), String>>, ConfigError> {
    let context = Context {
        shared: Arc::clone(&shared),
        is_unresolved: AtomicBool::new(false),
        is_done: AtomicBool::new(false),
    };
    let refused = |error: KafkaError| ConfigError::new(format!("Kafka: {error}"));
    let consumer = BaseConsumer::from_config_and_context(config, context).map_err(refused)?;
    consumer.subscribe(topics).map_err(refused)?;
    let (tell, left) = oneshot::channel();
    let run = move || {
        let reader = Reader { consumer, start, shared: Arc::clone(&shared) };
        // Whoever waits for a message must not wait for a thread that is gone.
        match catch_unwind(AssertUnwindSafe(|| reader.run())) {
            Ok(result) => drop(tell.send(result)),
            Err(_) => shared.fatal("the thread that reads from Kafka panicked".to_owned()),
        }
    };
    thread::Builder::new()
        .name("oncegate-kafka".to_owned())
        .spawn(run)
        .map_err(|error| ConfigError::new(format!("Kafka: no thread to read with: {error}")))?;
    Ok(left)
}

struct Reader {
    consumer: BaseConsumer<Context>,
    start: Start,
    shared: Arc<Shared>,
}

impl Reader {
    /// Until nothing more is asked for. The error is that of the last commit.
    fn run(self) -> Result<(), String> {
        let mut commit_at = Instant::now() + self.shared.options.commit_interval;
        let mut ask_at = Instant::now();
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
                    tracing::warn!(%error, "offsets were not committed; they are tried again");
                }
            }
            if now >= ask_at && self.consumer.context().is_unresolved.load(Ordering::Relaxed) {
                ask_at = now + ASK_AGAIN;
                self.resolve();
            }
            if self.shared.is_full() {
                let since: Instant = *full_since.get_or_insert(now);
                if now < since + WAIT_FOR_ROOM {
                    self.shared.wait_for_room(POLL);
                    continue;
                }
            } else {
                full_since = None;
            }
            let is_reading = self.pause_and_resume(full_since.is_some());
            self.poll(if is_reading { POLL } else { POLL_PAUSED });
        }
        let committed = commit(&self.consumer, &self.shared.assigned(), CommitMode::Sync);
        self.consumer.context().is_done.store(self.shared.is_closing(), Ordering::Relaxed);
        // Dropping it revokes what is assigned and leaves the group.
        drop(self);
        committed.map_err(|error| error.to_string())
    }

    /// Reads what is there, or waits for it.
    fn poll(&self, at_most: Duration) {
        let mut at_most = at_most;
        for _ in 0..AT_ONCE {
            let goes_on = match self.consumer.poll(at_most) {
                None => false,
                Some(Ok(record)) => self.put(&record),
                Some(Err(error)) => {
                    self.failed(&error);
                    false
                }
            };
            if !goes_on {
                return;
            }
            at_most = Duration::ZERO;
        }
    }

    /// Whether another message may be read.
    fn put(&self, record: &BorrowedMessage<'_>) -> bool {
        // It may have been on its way when its partition was revoked.
        let Some(partition) = self.shared.partition(record.topic(), record.partition()) else { return true };
        let message = message(record, self.shared.options.order);
        self.shared.put(message, record.offset(), &partition)
    }

    fn failed(&self, error: &KafkaError) {
        if let KafkaError::MessageConsumptionFatal(_) = error {
            self.shared.fatal(format!("the client cannot go on: {error}"));
        } else if let Some(RDKafkaErrorCode::AutoOffsetReset | RDKafkaErrorCode::LogTruncation) =
            error.rdkafka_error_code()
        {
            // A partition has no offset to begin with, or one that its log does not have: somebody has to say which one.
            self.consumer.context().is_unresolved.store(true, Ordering::Relaxed);
        } else {
            self.shared.error(error.to_string());
        }
    }

    /// Lets the client read on only what there is room for. Whether it reads anything.
    fn pause_and_resume(&self, is_full: bool) -> bool {
        let window = self.shared.options.window;
        let (mut to_pause, mut to_resume) = (TopicPartitionList::new(), TopicPartitionList::new());
        let (mut is_reading, mut changed) = (false, Vec::new());
        let half_empty = self.shared.is_half_empty();
        for partition in self.shared.assigned() {
            let open = partition.track().window();
            // In between it stays as it is, so that it does not change with each message.
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
            Err(error) => self.shared.error(format!("partitions are neither paused nor resumed: {error}")),
        }
        is_reading
    }

    /// Finds out where partitions go on for which the client has no offset that their log has, and tells it.
    fn resolve(&self) {
        let assigned = self.shared.assigned();
        match self.positions(&assigned) {
            Ok(positions) => {
                self.consumer.context().is_unresolved.store(false, Ordering::Relaxed);
                if self.shared.is_fatal() {
                    return;
                }
                if let Err(error) = self.read_from(&assigned, &positions) {
                    self.consumer.context().is_unresolved.store(true, Ordering::Relaxed);
                    self.shared.error(format!("where to read on could not be set: {error}"));
                }
            }
            Err(error) => self.shared.error(format!("where to read on could not be found out: {error}")),
        }
    }

    /// Where each partition goes on.
    fn positions(&self, assigned: &[Arc<Partition>]) -> KafkaResult<Vec<i64>> {
        let mut asked = TopicPartitionList::new();
        for partition in assigned {
            asked.add_partition(&partition.topic, partition.number);
        }
        let committed = self.consumer.committed_offsets(asked, ASK)?;
        let mut positions = Vec::with_capacity(assigned.len());
        for partition in assigned {
            let element = committed.find_partition(&partition.topic, partition.number);
            let committed = match &element {
                Some(element) => {
                    element.error()?;
                    element.offset()
                }
                None => Offset::Invalid,
            };
            let next = partition.track().next();
            let next = match (next, committed) {
                (Some(next), _) | (None, Offset::Offset(next)) => Some(next),
                _ => None,
            };
            let (low, high) = self.consumer.fetch_watermarks(&partition.topic, partition.number, ASK)?;
            positions.push(self.position(partition, next, low, high));
        }
        Ok(positions)
    }

    /// Where a partition goes on that is to be read from `next` on, and whose log has `low` to `high`.
    fn position(&self, partition: &Arc<Partition>, next: Option<i64>, low: i64, high: i64) -> i64 {
        let place = format!("partition {} of {}", partition.number, partition.topic);
        match next {
            Some(next) if (low..=high).contains(&next) => next,
            Some(next) => {
                let what = if next < low {
                    format!("{place}: messages {next} to {} were deleted before they were processed", low - 1)
                } else {
                    format!(
                        "{place}: message {next} comes next, and the log ends at {high}: it lost its end, or \
                         the topic was made anew"
                    )
                };
                match self.shared.options.truncated {
                    Truncated::Stop => self.shared.fatal(what),
                    Truncated::Continue => {
                        tracing::error!(from = next, to = low, "{what}");
                        self.shared.error(what);
                        if next > high {
                            // Its offsets begin again, so nothing that is known of them holds.
                            let anew =
                                Partition::new(Arc::clone(&partition.topic), partition.number, Some(low));
                            anew.set_paused(partition.is_paused());
                            self.shared.assign(anew);
                        }
                    }
                }
                low
            }
            None => match self.start {
                Start::Earliest => low,
                Start::Latest => high,
                Start::Refused => {
                    let group = "the group has committed no offset, and auto.offset.reset is error";
                    self.shared.fatal(format!("{place}: {group}"));
                    low
                }
            },
        }
    }

    /// Tells the client where to read on.
    fn read_from(&self, assigned: &[Arc<Partition>], positions: &[i64]) -> KafkaResult<()> {
        let mut list = TopicPartitionList::new();
        for (partition, position) in assigned.iter().zip(positions) {
            list.add_partition_offset(&partition.topic, partition.number, Offset::Offset(*position))?;
            // It is committed with the others, so that what arrives before the first commit counts as not read, and what is
            // deleted before it is read is missed.
            if let Some(partition) = self.shared.partition(&partition.topic, partition.number) {
                partition.track().begin(*position);
            }
        }
        // A seek would not do: the client does not fetch these partitions at the moment.
        if let RebalanceProtocol::Cooperative = self.consumer.rebalance_protocol() {
            self.consumer.incremental_unassign(&list)?;
            self.consumer.incremental_assign(&list)
        } else {
            self.consumer.assign(&list)
        }
    }
}

/// Commits what is settled of these partitions. Where a commit is only sent, nobody says whether it was done.
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
            // Whether an earlier commit was done is not known yet.
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

/// A record as everybody else knows it.
fn message(record: &BorrowedMessage<'_>, order: KafkaOrder) -> Message {
    let payload = record.payload().map(Bytes::copy_from_slice);
    let is_tombstone = payload.is_none();
    let mut message = Message::new(record.topic(), payload.unwrap_or_default());
    message.broker_id = Some(format!("{}/{}/{}", record.topic(), record.partition(), record.offset()));
    // The client panics at names that are not UTF-8. One record must not end the thread.
    let headers = catch_unwind(AssertUnwindSafe(|| {
        let mut headers = Vec::new();
        for header in record.headers().into_iter().flat_map(|headers| headers.iter()) {
            // These are not for others to say.
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

/// What the client writes goes to the log of everybody.
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

/// What the client calls from within its polls.
struct Context {
    shared: Arc<Shared>,
    /// Whether a partition has no offset to go on with.
    is_unresolved: AtomicBool,
    /// Whether the last commit was made, and there will be nothing to add.
    is_done: AtomicBool,
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::warn!(%error, "{reason}");
    }

    fn stats_raw(&self, _: &[u8]) {}
}

impl ConsumerContext for Context {
    fn pre_rebalance(&self, consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        match rebalance {
            Rebalance::Assign(list) => {
                for element in list.elements() {
                    tracing::debug!(topic = element.topic(), partition = element.partition(), "assigned");
                    self.shared.assign(Partition::new(element.topic().into(), element.partition(), None));
                }
            }
            Rebalance::Revoke(list) => self.revoke(consumer, list),
            Rebalance::Error(error) => tracing::warn!(%error, "the group was not rebalanced"),
        }
    }
}

impl Context {
    /// What was begun gets its time to end, and is committed; then it belongs to others.
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
        // Where the group has given them away already, a commit would be refused, and what runs here runs there, too.
        let is_lost = consumer.assignment_lost();
        let is_done = self.is_done.load(Ordering::Relaxed);
        if !is_lost && !is_done {
            let deadline = Instant::now() + self.shared.options.revoke_patience;
            let is_busy = || revoked.iter().any(|partition| partition.track().in_hand() > 0);
            while is_busy() && !self.shared.is_closing() && Instant::now() < deadline {
                thread::sleep(LOOK);
            }
        }
        revoked.iter().for_each(|partition| partition.lose());
        if !is_lost
            && !is_done
            && let Err(error) = commit(consumer, &revoked, CommitMode::Sync)
        {
            tracing::warn!(%error, "what was processed of partitions that are revoked is not committed");
        }
        // Otherwise they would still be paused when they come back.
        if paused.count() > 0
            && let Err(error) = consumer.resume(&paused)
        {
            tracing::warn!(%error, "partitions that are revoked stay paused");
        }
    }
}
