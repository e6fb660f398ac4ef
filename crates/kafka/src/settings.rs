//! What a source may be told, and what is asked of the client's own settings.

use std::time::Duration;

use oncegate_engine::ConfigError;
use rdkafka::ClientConfig;
use rdkafka::error::KafkaError;

/// What must stay in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KafkaOrder {
    /// Messages with the same key. Those without a key have no order.
    #[default]
    Key,
    /// All messages of one partition. The record's key is a header then, [`RECORD_KEY`](crate::RECORD_KEY).
    Partition,
    /// Nothing. The record's key is a header then.
    None,
}

/// What is done where a partition's log no longer has the message that comes next: it was deleted before it was read, or the
/// log lost its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnTruncation {
    /// The source stops with an error that says what is missing. Messages were lost, and a person has to know.
    #[default]
    Stop,
    /// It says what is missing as an error that passes, and goes on with the oldest message that there is.
    Continue,
}

/// How a [`KafkaSource`](crate::KafkaSource) reads.
#[derive(Clone, Debug)]
pub struct KafkaOptions {
    pub(super) order: KafkaOrder,
    pub(super) truncated: OnTruncation,
    pub(super) buffer_messages: usize,
    pub(super) buffer_octets: usize,
    pub(super) window: usize,
    pub(super) commit_interval: Duration,
    pub(super) revoke_patience: Duration,
    pub(super) close_patience: Duration,
}

impl Default for KafkaOptions {
    /// Order by key; a stop at a truncated log; 1000 messages or 16 MiB read ahead; 10 000 messages of a partition beyond the
    /// lowest one that is not settled; a commit every second; 5 s for what runs when its partition is revoked, 30 s to close.
    fn default() -> Self {
        Self {
            order: KafkaOrder::default(),
            truncated: OnTruncation::default(),
            buffer_messages: 1000,
            buffer_octets: 16 * 1024 * 1024,
            window: 10_000,
            commit_interval: Duration::from_secs(1),
            revoke_patience: Duration::from_secs(5),
            close_patience: Duration::from_secs(30),
        }
    }
}

impl KafkaOptions {
    /// What must stay in order.
    #[must_use]
    pub const fn with_order(mut self, order: KafkaOrder) -> Self {
        self.order = order;
        self
    }

    /// What is done where the log no longer has the message that comes next.
    #[must_use]
    pub const fn with_on_truncation(mut self, truncated: OnTruncation) -> Self {
        self.truncated = truncated;
        self
    }

    /// How many messages, of how many octets of payload, key and headers together, are read ahead of
    /// [`next`](oncegate_inbox::Source::next). One more message may be there. The client has buffers of its own before this one:
    /// `queued.max.messages.kbytes`.
    ///
    /// # Errors
    /// Outside 1 to 100 000 messages, or 1 KiB to 1 GiB.
    pub fn with_max_buffered(self, messages: usize, octets: usize) -> Result<Self, ConfigError> {
        bounded("buffer, messages", messages, 1, 100_000)?;
        bounded("buffer, octets", octets, 1024, 1024 * 1024 * 1024)?;
        Ok(Self { buffer_messages: messages, buffer_octets: octets, ..self })
    }

    /// How many messages of one partition are read from the lowest one on that is not settled. It bounds what is processed
    /// again after a crash, and what is remembered. A message that is tried again for long holds its partition up after so
    /// many.
    ///
    /// # Errors
    /// Outside 1 to 1 000 000.
    pub fn with_max_uncommitted(self, messages: usize) -> Result<Self, ConfigError> {
        bounded("window", messages, 1, 1_000_000)?;
        Ok(Self { window: messages, ..self })
    }

    /// How often offsets are committed while a partition is assigned.
    ///
    /// # Errors
    /// Outside 10 ms to 60 s.
    pub fn with_commit_interval(self, interval: Duration) -> Result<Self, ConfigError> {
        bounded("commit interval", interval, Duration::from_millis(10), Duration::from_secs(60))?;
        Ok(Self { commit_interval: interval, ..self })
    }

    /// How long what was begun has to end when its partition is revoked, so that it is committed before somebody else reads
    /// it. The whole group waits meanwhile.
    ///
    /// # Errors
    /// More than 60 s.
    pub fn with_revoke_timeout(self, patience: Duration) -> Result<Self, ConfigError> {
        bounded("revoke patience", patience, Duration::ZERO, Duration::from_secs(60))?;
        Ok(Self { revoke_patience: patience, ..self })
    }

    /// Sets how long [`close`](oncegate_inbox::Source::close) waits for the last commit and for leaving the group.
    ///
    /// Without an answer `close` returns an error, and messages whose offsets were not committed are delivered again. A
    /// [`Consumer`](oncegate_inbox::Consumer) waits for at most 10 seconds.
    ///
    /// # Errors
    /// Outside 100 ms to 10 minutes.
    pub fn with_close_timeout(self, patience: Duration) -> Result<Self, ConfigError> {
        bounded("close patience", patience, Duration::from_millis(100), Duration::from_secs(600))?;
        Ok(Self { close_patience: patience, ..self })
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

/// Where a group begins that has committed nothing in a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// With the oldest message.
    Earliest,
    /// With what comes from now on.
    Latest,
    /// Nowhere: somebody has to say.
    Refused,
}

/// The client's settings with what is needed here, and where a group begins.
pub(super) fn consumer(
    config: &ClientConfig,
    options: &KafkaOptions,
) -> Result<(ClientConfig, Start), ConfigError> {
    let mut config = config.clone();
    if config.get("group.id").is_none_or(str::is_empty) {
        return Err(ConfigError::new("Kafka: group.id is missing; a source is a member of a consumer group"));
    }
    // A commit that happens by itself would tell the broker to forget what was not processed.
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
    // As Java's clients do. Without it a damaged record is processed, or ends in silence.
    if config.get("check.crcs").is_none() {
        config.set("check.crcs", "true");
    }
    // The client would go by it as well where the log lost messages, and skip them without a word. So it is told to ask.
    config.set("auto.offset.reset", "error");
    let poll = millis(&config, "max.poll.interval.ms", 300_000)?;
    if options.revoke_patience * 2 > poll {
        return Err(ConfigError::new(format!(
            "Kafka: the revoke patience of {:?} is more than half of max.poll.interval.ms, {poll:?}",
            options.revoke_patience
        )));
    }
    Ok((config, start))
}

/// The client's settings with what a publisher needs.
pub(super) fn producer(config: &ClientConfig) -> Result<ClientConfig, ConfigError> {
    let mut config = config.clone();
    if config.get("transactional.id").is_some() {
        return Err(ConfigError::new(
            "Kafka: a publisher has no transactions, so transactional.id has no place",
        ));
    }
    // With retries and more than one request on the way, only the idempotent producer keeps order.
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

/// How long the client tries to publish a message.
pub(super) fn producer_patience(config: &ClientConfig) -> Result<Duration, ConfigError> {
    let name =
        ["delivery.timeout.ms", "message.timeout.ms"].into_iter().find(|name| config.get(name).is_some());
    let patience = millis(config, name.unwrap_or("message.timeout.ms"), 30_000)?;
    // The client takes it for no end at all.
    if patience.is_zero() {
        return Err(ConfigError::new(
            "Kafka: message.timeout.ms is 0, which means for ever; it must be bounded",
        ));
    }
    Ok(patience)
}

fn require(config: &mut ClientConfig, name: &str, value: &str) -> Result<(), ConfigError> {
    match config.get(name) {
        Some(other) if other != value => Err(ConfigError::new(format!(
            "Kafka: {name} is {other:?}; it must be {value}, and is without being set"
        ))),
        _ => {
            config.set(name, value);
            Ok(())
        }
    }
}

/// What the client says of its settings, without the value: under a name that is misspelt, that may be a password.
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
            .map_err(|_| ConfigError::new(format!("Kafka: {name} is {text:?}, which is no number")))?,
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
