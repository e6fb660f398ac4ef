//! The options of a source, and the checks of the client's settings.

use std::time::Duration;

use oncegate_engine::ConfigError;
use rdkafka::ClientConfig;
use rdkafka::error::KafkaError;

/// The messages that stay in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KafkaOrder {
    /// Messages with the same key. Messages without a key have no order.
    #[default]
    Key,
    /// All messages of one partition. The record's key is the header [`RECORD_KEY`](crate::RECORD_KEY).
    Partition,
    /// No order. The record's key is a header.
    None,
}

/// The reaction to a log that no longer has the next message, because it was deleted unread or the log lost its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnTruncation {
    /// The source stops with an error that names the missing messages. Messages were lost, so an operator has to
    /// decide.
    #[default]
    Stop,
    /// The source reports the missing messages as a transient error, and goes on with the oldest message.
    Continue,
}

/// The options of a [`KafkaSource`](crate::KafkaSource).
#[derive(Clone, Debug)]
pub struct KafkaOptions {
    pub(super) order: KafkaOrder,
    pub(super) truncated: OnTruncation,
    pub(super) buffer_messages: usize,
    pub(super) buffer_bytes: usize,
    pub(super) window: usize,
    pub(super) commit_interval: Duration,
    pub(super) revoke_timeout: Duration,
    pub(super) close_timeout: Duration,
}

impl Default for KafkaOptions {
    /// The default options.
    ///
    /// Order by key; stop at a truncated log; 1000 messages or 16 MiB read ahead; 10 000 messages of a partition beyond
    /// the lowest unsettled one; a commit every second; 5 s for running messages when their partition is revoked; 30 s
    /// to close.
    fn default() -> Self {
        Self {
            order: KafkaOrder::default(),
            truncated: OnTruncation::default(),
            buffer_messages: 1000,
            buffer_bytes: 16 * 1024 * 1024,
            window: 10_000,
            commit_interval: Duration::from_secs(1),
            revoke_timeout: Duration::from_secs(5),
            close_timeout: Duration::from_secs(30),
        }
    }
}

impl KafkaOptions {
    /// Sets the messages that stay in order.
    #[must_use]
    pub const fn with_order(mut self, order: KafkaOrder) -> Self {
        self.order = order;
        self
    }

    /// Sets the reaction to a log that no longer has the next message.
    #[must_use]
    pub const fn with_on_truncation(mut self, truncated: OnTruncation) -> Self {
        self.truncated = truncated;
        self
    }

    /// Sets how many messages and bytes are read ahead of [`next`](oncegate_inbox::Source::next).
    ///
    /// The bytes count payloads, keys and headers. One more message may be held. The client has a buffer of its own
    /// before this one: `queued.max.messages.kbytes`.
    ///
    /// # Errors
    /// [`ConfigError`] outside 1 to 100 000 messages, or 1 KiB to 1 GiB.
    pub fn with_max_buffered(self, messages: usize, bytes: usize) -> Result<Self, ConfigError> {
        bounded("buffer, messages", messages, 1, 100_000)?;
        bounded("buffer, bytes", bytes, 1024, 1024 * 1024 * 1024)?;
        Ok(Self { buffer_messages: messages, buffer_bytes: bytes, ..self })
    }

    /// Sets how many messages of one partition are read from the lowest unsettled one on.
    ///
    /// It bounds what is delivered again after a crash, and the memory for offsets. A message that is retried for long
    /// blocks its partition after this number.
    ///
    /// # Errors
    /// [`ConfigError`] outside 1 to 1 000 000.
    pub fn with_max_uncommitted(self, messages: usize) -> Result<Self, ConfigError> {
        bounded("window", messages, 1, 1_000_000)?;
        Ok(Self { window: messages, ..self })
    }

    /// Sets the interval of commits while a partition is assigned.
    ///
    /// # Errors
    /// [`ConfigError`] outside 10 ms to 60 s.
    pub fn with_commit_interval(self, interval: Duration) -> Result<Self, ConfigError> {
        bounded("commit interval", interval, Duration::from_millis(10), Duration::from_secs(60))?;
        Ok(Self { commit_interval: interval, ..self })
    }

    /// Sets how long running messages may take when their partition is revoked, so that they are committed before the
    /// next owner reads.
    ///
    /// The whole group waits meanwhile.
    ///
    /// # Errors
    /// [`ConfigError`] if it is more than 60 s.
    pub fn with_revoke_timeout(self, timeout: Duration) -> Result<Self, ConfigError> {
        bounded("revoke timeout", timeout, Duration::ZERO, Duration::from_secs(60))?;
        Ok(Self { revoke_timeout: timeout, ..self })
    }

    /// Sets how long [`close`](oncegate_inbox::Source::close) waits for the last commit and for leaving the group.
    ///
    /// Without a reply `close` returns an error, and messages whose offsets were not committed are delivered again. A
    /// [`Consumer`](oncegate_inbox::Consumer) waits for at most 10 seconds.
    ///
    /// # Errors
    /// [`ConfigError`] outside 100 ms to 10 minutes.
    pub fn with_close_timeout(self, timeout: Duration) -> Result<Self, ConfigError> {
        bounded("close timeout", timeout, Duration::from_millis(100), Duration::from_secs(600))?;
        Ok(Self { close_timeout: timeout, ..self })
    }
}

fn bounded<T: PartialOrd + Copy + std::fmt::Debug>(
    name: &str,
    value: T,
    min: T,
    max: T,
) -> Result<(), ConfigError> {
    if (min..=max).contains(&value) {
        Ok(())
    } else {
        Err(ConfigError::new(format!("Kafka {name} is {value:?}; it must be from {min:?} to {max:?}")))
    }
}

/// The start of a group in a partition without a committed offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// The oldest message.
    Earliest,
    /// The next message that arrives.
    Latest,
    /// None: an operator has to decide.
    Refused,
}

/// Returns the client's settings with the required ones, and the start of the group.
pub(super) fn consumer(
    config: &ClientConfig,
    options: &KafkaOptions,
) -> Result<(ClientConfig, Start), ConfigError> {
    let mut config = config.clone();
    if config.get("group.id").is_none_or(str::is_empty) {
        return Err(ConfigError::new("Kafka: group.id is missing; a source is a member of a consumer group"));
    }
    // An automatic commit would make the broker forget messages that were not processed.
    require(&mut config, "enable.auto.commit", "false")?;
    require(&mut config, "enable.auto.offset.store", "false")?;
    require(&mut config, "enable.partition.eof", "false")?;
    let start = match config.get("auto.offset.reset") {
        None | Some("earliest" | "smallest" | "beginning") => Start::Earliest,
        Some("latest" | "largest" | "end") => Start::Latest,
        Some("error") => Start::Refused,
        Some(other) => {
            return Err(ConfigError::new(format!(
                "Kafka: auto.offset.reset is {other:?}; it is earliest, latest or error"
            )));
        }
    };
    // As Java's clients do. Without it a damaged record is processed, or skipped silently.
    if config.get("check.crcs").is_none() {
        config.set("check.crcs", "true");
    }
    // The client would also apply it when the log lost messages, and skip them silently. So make it report an error
    // instead.
    config.set("auto.offset.reset", "error");
    let poll = millis(&config, "max.poll.interval.ms", 300_000)?;
    if options.revoke_timeout * 2 > poll {
        return Err(ConfigError::new(format!(
            "Kafka: the revoke timeout of {:?} is more than half of max.poll.interval.ms, {poll:?}",
            options.revoke_timeout
        )));
    }
    Ok((config, start))
}

/// Returns the client's settings with those that a publisher requires.
pub(super) fn producer(config: &ClientConfig) -> Result<ClientConfig, ConfigError> {
    let mut config = config.clone();
    if config.get("transactional.id").is_some() {
        return Err(ConfigError::new("Kafka: transactional.id is not supported by a publisher: remove it"));
    }
    // With retries and several requests in flight, only the idempotent producer keeps the order.
    require(&mut config, "enable.idempotence", "true")?;
    for acks in ["acks", "request.required.acks"] {
        if config.get(acks).is_some_and(|value| value != "all" && value != "-1") {
            return Err(ConfigError::new(format!(
                "Kafka: {acks} must be all; less may lose what was confirmed"
            )));
        }
    }
    config.remove("request.required.acks");
    config.set("acks", "all");
    if config.get("message.timeout.ms").is_none() && config.get("delivery.timeout.ms").is_none() {
        config.set("message.timeout.ms", "30000");
    }
    Ok(config)
}

/// Returns how long the client tries to publish a message.
pub(super) fn producer_timeout(config: &ClientConfig) -> Result<Duration, ConfigError> {
    let name =
        ["delivery.timeout.ms", "message.timeout.ms"].into_iter().find(|name| config.get(name).is_some());
    let timeout = millis(config, name.unwrap_or("message.timeout.ms"), 30_000)?;
    // The client treats 0 as no limit.
    if timeout.is_zero() {
        return Err(ConfigError::new("Kafka: message.timeout.ms is 0, which means no limit; set a limit"));
    }
    Ok(timeout)
}

fn require(config: &mut ClientConfig, name: &str, value: &str) -> Result<(), ConfigError> {
    match config.get(name) {
        Some(other) if other != value => {
            Err(ConfigError::new(format!("Kafka: {name} is {other:?}; it must be {value}: leave it out")))
        }
        _ => {
            config.set(name, value);
            Ok(())
        }
    }
}

/// Returns the client's error without the value, because under a misspelt name the value may be a password.
pub(super) fn refused(error: KafkaError) -> ConfigError {
    ConfigError::new(match error {
        KafkaError::ClientConfig(_, said, _, _) => format!("Kafka: {said}"),
        error => format!("Kafka: {error}"),
    })
}

fn millis(config: &ClientConfig, name: &str, default: u64) -> Result<Duration, ConfigError> {
    let value = match config.get(name) {
        None => default,
        Some(text) => text
            .parse()
            .map_err(|_| ConfigError::new(format!("Kafka: {name} is {text:?}, which is not a number")))?,
    };
    Ok(Duration::from_millis(value))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn config(settings: &[(&str, &str)]) -> ClientConfig {
        let mut config = ClientConfig::new();
        for (name, value) in settings {
            config.set(*name, *value);
        }
        config
    }

    fn refused(settings: &[(&str, &str)]) -> String {
        consumer(&config(settings), &KafkaOptions::default()).unwrap_err().to_string()
    }

    #[test]
    fn what_would_lose_messages_is_refused() {
        assert!(refused(&[]).contains("group.id"));
        for name in ["enable.auto.commit", "enable.auto.offset.store"] {
            assert!(refused(&[("group.id", "g"), (name, "true")]).contains(name));
        }
        assert!(refused(&[("group.id", "g"), ("auto.offset.reset", "now")]).contains("auto.offset.reset"));
        assert!(
            refused(&[("group.id", "g"), ("max.poll.interval.ms", "9000")]).contains("max.poll.interval.ms")
        );
        for (name, value) in [("acks", "1"), ("request.required.acks", "0"), ("enable.idempotence", "false")]
        {
            assert!(producer(&config(&[(name, value)])).unwrap_err().to_string().contains(name));
        }
        assert!(producer(&config(&[("transactional.id", "t")])).is_err());
    }

    #[test]
    fn what_the_client_does_not_know_is_named_and_its_value_is_not() {
        let config = config(&[("group.id", "g"), ("sasl.passwrd", "hunter2")]);
        let options = KafkaOptions::default();
        let source = crate::KafkaSource::new(&config, &["orders"], options).unwrap_err();
        let publisher = crate::KafkaPublisher::new(&config).unwrap_err();
        for error in [source, publisher] {
            let error = format!("{error} {error:?}");
            assert!(error.contains("sasl.passwrd") && !error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn what_is_needed_is_set() {
        let given = config(&[("group.id", "g"), ("isolation.level", "read_uncommitted")]);
        let (set, start) = consumer(&given, &KafkaOptions::default()).unwrap();
        assert_eq!(start, Start::Earliest);
        assert_eq!(set.get("enable.auto.commit"), Some("false"));
        assert_eq!(set.get("check.crcs"), Some("true"));
        assert_eq!(set.get("auto.offset.reset"), Some("error"));
        assert_eq!(set.get("isolation.level"), Some("read_uncommitted"));
        let given = config(&[("group.id", "g"), ("auto.offset.reset", "latest")]);
        assert_eq!(consumer(&given, &KafkaOptions::default()).unwrap().1, Start::Latest);
        let set = producer(&config(&[("request.required.acks", "-1")])).unwrap();
        assert_eq!((set.get("acks"), set.get("request.required.acks")), (Some("all"), None));
        assert_eq!(set.get("enable.idempotence"), Some("true"));
    }

    #[test]
    fn every_option_is_bounded() {
        let options = KafkaOptions::default;
        assert!(
            options().with_max_buffered(0, 1024).is_err() && options().with_max_buffered(1, 1023).is_err()
        );
        assert!(options().with_max_buffered(100_001, 1024).is_err());
        assert!(
            options().with_max_uncommitted(0).is_err() && options().with_max_uncommitted(1_000_001).is_err()
        );
        assert!(options().with_commit_interval(Duration::from_millis(9)).is_err());
        assert!(options().with_revoke_timeout(Duration::from_secs(61)).is_err());
        assert!(options().with_close_timeout(Duration::from_millis(99)).is_err());
    }
}
