//! Identities: the rule by which two deliveries are recognized as one message.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytes::Bytes;
use oncegate_core::{Fingerprint, IdempotencyKey, JsonPointer, NaturalKey, RecordId, Scope, limits};
use oncegate_engine::ConfigError;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::message::Message;
use crate::source::SourceInfo;

/// The rule that identifies a message: the same result at each of its deliveries, another one for every other message.
///
/// An identifier that the producer sets is valid everywhere, for example also after a retry queue. An identity from the
/// content is valid within its topic only, because a paid order may have the number of the placed order.
/// [`within_topic`](Self::within_topic) overrides this.
#[derive(Clone, Debug)]
pub struct Identity {
    kind: Kind,
    within_topic: bool,
}

/// A function of the application.
type Own = Arc<dyn Fn(&Message) -> Option<String> + Send + Sync>;

#[derive(Clone)]
enum Kind {
    Broker,
    Header(String),
    CloudEvents,
    StandardWebhooks,
    Json(JsonPointer),
    Natural(NaturalKey),
    Payload,
    With(Own),
}

impl Identity {
    /// The broker's own identifier.
    ///
    /// If the producer sends a message again, the broker gives it another identifier, so the copy is not recognized as
    /// a duplicate. Prefer an identifier of the producer if there is one.
    #[must_use]
    pub const fn broker() -> Self {
        Self { kind: Kind::Broker, within_topic: true }
    }

    /// The value of a header that the producer sets. Its name is compared without case.
    #[must_use]
    pub fn header(name: impl Into<String>) -> Self {
        Self { kind: Kind::Header(name.into()), within_topic: false }
    }

    /// The header [`MESSAGE_ID`](crate::MESSAGE_ID), which every [`Publisher`](crate::Publisher) and the outbox relay
    /// set.
    #[must_use]
    pub fn message_id() -> Self {
        Self::header(crate::MESSAGE_ID)
    }

    /// The `source` and `id` of a CloudEvent (CloudEvents 1.0).
    ///
    /// They are read from headers with the prefix `ce-`, `ce_`, `cloudEvents:` or `cloudEvents_`. Without such headers
    /// they are read from an event in JSON.
    #[must_use]
    pub const fn cloud_events() -> Self {
        Self { kind: Kind::CloudEvents, within_topic: false }
    }

    /// The header `webhook-id` of Standard Webhooks, or its older name `svix-id`.
    #[must_use]
    pub const fn standard_webhooks() -> Self {
        Self { kind: Kind::StandardWebhooks, within_topic: false }
    }

    /// One member of a JSON payload: a string that is not empty, or an integer.
    #[must_use]
    pub const fn json(pointer: JsonPointer) -> Self {
        Self { kind: Kind::Json(pointer), within_topic: true }
    }

    /// Several members of a JSON payload together.
    #[must_use]
    pub const fn natural(key: NaturalKey) -> Self {
        Self { kind: Kind::Natural(key), within_topic: true }
    }

    /// The whole payload: the last resort, because two equal orders are then one message.
    #[must_use]
    pub const fn payload() -> Self {
        Self { kind: Kind::Payload, within_topic: true }
    }

    /// The result of a function. `None`, or a panic, means that the message has no identity.
    #[must_use]
    pub fn with(id: impl Fn(&Message) -> Option<String> + Send + Sync + 'static) -> Self {
        Self { kind: Kind::With(Arc::new(id)), within_topic: false }
    }

    /// Limits the identity to its topic: equal identifiers in two topics are then two messages.
    #[must_use]
    pub fn within_topic(self, within_topic: bool) -> Self {
        Self { within_topic, ..self }
    }

    /// Checks that messages of a source can have this identity. If they cannot, every message would become a dead
    /// letter.
    ///
    /// # Errors
    /// The property that the source lacks, and the identity to use instead.
    pub fn check(&self, source: &SourceInfo) -> Result<(), ConfigError> {
        match &self.kind {
            Kind::Broker if !source.has_broker_ids() => Err(ConfigError::new(
                "Identity::broker: the messages of this source have no identifier of the broker; use one of the producer, \
                 such as Identity::header or Identity::message_id",
            )),
            Kind::Header(name) if !source.is_header_name(name) => Err(ConfigError::new(format!(
                "Identity::header: no message of this source can have a header named {name:?}"
            ))),
            _ => Ok(()),
        }
    }

    /// Returns the identifier of a message.
    ///
    /// # Errors
    /// [`IdentityError`] with the missing part.
    pub fn of(&self, message: &Message) -> Result<MessageId, IdentityError> {
        let (kind, id) = self.kind.of(message)?;
        if id.is_empty() {
            return Err(IdentityError(format!("{} is empty", self.kind)));
        }
        let topic = if self.within_topic { message.topic.as_str() } else { "" };
        Ok(MessageId::new(kind, topic, &id))
    }
}

impl Kind {
    /// Returns the place where the identity was found, and the identity.
    fn of(&self, message: &Message) -> Result<(Vec<String>, Bytes), IdentityError> {
        let missing = || IdentityError(format!("the message has no {self}"));
        let header = |name: &str| {
            message.header(name).map_err(|_| IdentityError(format!("the message has several headers {name}")))
        };
        let kind = |parts: &[&str]| parts.iter().map(|part| (*part).to_owned()).collect();
        match self {
            Self::Broker => {
                let id = message.broker_id.as_ref().ok_or_else(missing)?;
                Ok((kind(&["broker"]), id.clone().into()))
            }
            Self::Header(name) => {
                let id = header(name)?.ok_or_else(missing)?;
                Ok((kind(&["header", &name.to_ascii_lowercase()]), id.clone()))
            }
            Self::CloudEvents => {
                let (source, id) = cloud_event(message, header)?.ok_or_else(missing)?;
                Ok((kind(&["cloud-events", &source]), id))
            }
            Self::StandardWebhooks => {
                let id = match header("webhook-id")? {
                    Some(id) => id,
                    None => header("svix-id")?.ok_or_else(missing)?,
                };
                Ok((kind(&["webhook-id"]), id.clone()))
            }
            Self::Json(pointer) => {
                let payload: Value = serde_json::from_slice(&message.payload)
                    .map_err(|_| IdentityError("the payload is not JSON".to_owned()))?;
                match payload.pointer(pointer.as_str()).ok_or_else(missing)? {
                    Value::String(id) => Ok((kind(&["json", pointer.as_str()]), id.clone().into())),
                    Value::Number(id) if id.is_u64() || id.is_i64() => {
                        Ok((kind(&["json-number", pointer.as_str()]), id.to_string().into()))
                    }
                    _ => Err(IdentityError(format!("{self} is neither a string nor an integer"))),
                }
            }
            Self::Natural(key) => {
                let key = key.of(b"application/json", &message.payload);
                let key = key.map_err(|missing| IdentityError(missing.to_string()))?;
                Ok((kind(&["natural"]), Bytes::copy_from_slice(key.as_bytes())))
            }
            Self::Payload => {
                let digest: [u8; 32] = Sha256::digest(&message.payload).into();
                Ok((kind(&["payload"]), RecordId::from_bytes(digest).to_string().into()))
            }
            Self::With(id) => {
                // A message on which the function panics must become a dead letter. If the panic escaped, the message
                // would be retried forever.
                let id = catch_unwind(AssertUnwindSafe(|| id(message)));
                let id = id.map_err(|_| IdentityError(format!("the function for its {self} panicked")))?;
                Ok((kind(&["own"]), id.ok_or_else(missing)?.into()))
            }
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Broker => f.write_str("identifier of its broker or sender"),
            Self::Header(name) => write!(f, "header {name}"),
            Self::CloudEvents => f.write_str("source and id of a CloudEvent"),
            Self::StandardWebhooks => f.write_str("header webhook-id"),
            Self::Json(pointer) => write!(f, "member {pointer} in its payload"),
            Self::Natural(_) => f.write_str("members of its natural key"),
            Self::Payload => f.write_str("payload"),
            Self::With(_) => f.write_str("identity from the application's function"),
        }
    }
}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Returns `source` and `id`.
fn cloud_event<'m>(
    message: &'m Message,
    header: impl Fn(&str) -> Result<Option<&'m Bytes>, IdentityError>,
) -> Result<Option<(String, Bytes)>, IdentityError> {
    let text = |bytes: &Bytes| String::from_utf8_lossy(bytes).into_owned();
    for prefix in ["ce-", "ce_", "cloudEvents:", "cloudEvents_"] {
        match (header(&format!("{prefix}source"))?, header(&format!("{prefix}id"))?) {
            (Some(source), Some(id)) => return Ok(Some((text(source), id.clone()))),
            (None, None) => {}
            _ => return Err(IdentityError("the CloudEvent has only one of source and id".to_owned())),
        }
    }
    let Ok(Value::Object(event)) = serde_json::from_slice(&message.payload) else { return Ok(None) };
    let member = |name: &str| event.get(name).and_then(Value::as_str).map(str::to_owned);
    if member("specversion").is_none() {
        return Ok(None);
    }
    match (member("source"), member("id")) {
        (Some(source), Some(id)) if !source.is_empty() => Ok(Some((source, id.into()))),
        _ => Err(IdentityError("the CloudEvent lacks source or id".to_owned())),
    }
}

/// The reason why a message has no identity. Without one, duplicates cannot be recognized.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct IdentityError(String);

/// The identifier of one message. `Debug` does not show it, because such identifiers often contain customer data.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct MessageId {
    /// The kind of identity, and the topic or an empty string.
    parts: Vec<String>,
    key: IdempotencyKey,
}

impl MessageId {
    fn new(mut parts: Vec<String>, topic: &str, id: &[u8]) -> Self {
        let key = if id.len() > limits::MAX_KEY_BYTES {
            parts.push("sha256".to_owned());
            let digest: [u8; 32] = Sha256::digest(id).into();
            IdempotencyKey::new(RecordId::from_bytes(digest).to_string().into_bytes())
        } else {
            IdempotencyKey::new(id)
        };
        parts.push(topic.to_owned());
        // The identifier is not empty, and 64 bytes are within the limit.
        let key = key.unwrap_or_else(|_| unreachable!("an identity has between 1 and 255 bytes"));
        Self { parts, key }
    }

    /// The identity under which the dead letter of a message without an identity is recorded.
    ///
    /// It is derived from the topic, the broker's own identifier, the headers and the payload. Two messages with the
    /// same content have two dead letters if the broker's identifiers differ.
    #[must_use]
    pub fn of_content(message: &Message) -> Self {
        let broker_id = message.broker_id.as_deref().unwrap_or_default();
        let mut parts: Vec<&[u8]> = vec![message.topic.as_bytes(), broker_id.as_bytes(), &message.payload];
        for (name, value) in &message.headers {
            parts.extend([name.as_bytes(), value]);
        }
        let digest = Fingerprint::of_parts("oncegate-unidentified-1", &parts);
        let id = RecordId::from_bytes(*digest.digest()).to_string();
        Self::new(vec!["unidentified".to_owned()], &message.topic, id.as_bytes())
    }

    /// The identifier, or its SHA-256 in hexadecimal digits if it is longer than a key may be.
    #[must_use]
    pub const fn key(&self) -> &IdempotencyKey {
        &self.key
    }

    /// Returns the record of this message for a consumer.
    ///
    /// It is [`RecordId::derive`] with the scope of a single tenant, the operation `message`, the consumer's name, the
    /// kind of identity, and the topic if the identity is limited to it.
    #[must_use]
    pub fn record_id(&self, consumer: &ConsumerName) -> RecordId {
        let mut operation: Vec<&[u8]> = vec![b"message", consumer.as_str().as_bytes()];
        operation.extend(self.parts.iter().map(String::as_bytes));
        RecordId::derive(&Scope::single_tenant().with_operation_parts(&operation), &self.key)
    }
}

impl fmt::Debug for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MessageId({} bytes)", self.key.as_bytes().len())
    }
}

/// The name of a consumer.
///
/// Two consumers of one topic each process a message once. All processes of one service share one name, and the name
/// must not change: under a new name all messages are new.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ConsumerName(Arc<str>);

impl ConsumerName {
    /// The maximum length of a name.
    pub const MAX_BYTES: usize = 100;

    /// Creates a name of 1 to 100 bytes of printable ASCII without spaces.
    ///
    /// # Errors
    /// [`ConfigError`] for any other name.
    pub fn new(name: &str) -> Result<Self, ConfigError> {
        let is_good =
            (1..=Self::MAX_BYTES).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic());
        if is_good {
            return Ok(Self(name.into()));
        }
        Err(ConfigError::new(format!(
            "the consumer name is {name:?}; it must be 1 to {} characters of printable ASCII without spaces",
            Self::MAX_BYTES
        )))
    }

    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ConsumerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<&str> for ConsumerName {
    type Error = ConfigError;

    fn try_from(name: &str) -> Result<Self, ConfigError> {
        Self::new(name)
    }
}

impl From<&Self> for ConsumerName {
    fn from(name: &Self) -> Self {
        name.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pointer(text: &str) -> JsonPointer {
        JsonPointer::parse(text).unwrap()
    }

    fn record(identity: &Identity, message: &Message) -> Option<RecordId> {
        Some(identity.of(message).ok()?.record_id(&ConsumerName::new("billing").unwrap()))
    }

    fn json(payload: &str) -> Message {
        Message::new("orders", payload.to_owned())
    }

    #[test]
    fn what_a_message_is_told_by() {
        let empty = || Message::new("orders", "");
        let natural = NaturalKey::new(vec![pointer("/a"), pointer("/b")]).unwrap();
        let cases = [
            ("broker", Identity::broker(), empty().with_broker_id("orders/0/17"), Some("orders/0/17")),
            ("no broker's", Identity::broker(), empty(), None),
            ("header", Identity::header("X-Id"), empty().with_header("x-id", "7"), Some("7")),
            ("empty", Identity::header("X-Id"), empty().with_header("x-id", ""), None),
            (
                "twice the same",
                Identity::header("i"),
                empty().with_header("i", "7").with_header("I", "7"),
                Some("7"),
            ),
            ("twice", Identity::header("i"), empty().with_header("i", "7").with_header("i", "8"), None),
            ("ours", Identity::message_id(), empty().with_header("Oncegate-Message-Id", "7"), Some("7")),
            (
                "webhook",
                Identity::standard_webhooks(),
                empty().with_header("webhook-id", "msg_1"),
                Some("msg_1"),
            ),
            ("svix", Identity::standard_webhooks(), empty().with_header("svix-id", "msg_1"), Some("msg_1")),
            ("string", Identity::json(pointer("/e/id")), json(r#"{"e":{"id":"x1"}}"#), Some("x1")),
            ("number", Identity::json(pointer("/id")), json(r#"{"id":41}"#), Some("41")),
            ("fraction", Identity::json(pointer("/id")), json(r#"{"id":4.5}"#), None),
            ("object", Identity::json(pointer("/id")), json(r#"{"id":{}}"#), None),
            ("null", Identity::json(pointer("/id")), json(r#"{"id":null}"#), None),
            ("missing", Identity::json(pointer("/id")), json("{}"), None),
            ("no JSON", Identity::json(pointer("/id")), json("id"), None),
            ("half a natural key", Identity::natural(natural), json(r#"{"a":1}"#), None),
            ("own", Identity::with(|m| Some(m.topic.clone())), empty(), Some("orders")),
            ("none of its own", Identity::with(|_| None), empty(), None),
            ("own that panics", Identity::with(|_| panic!("no")), empty(), None),
        ];
        for (what, identity, message, expected) in cases {
            let id = identity.of(&message).map(|id| id.key().as_bytes().to_vec());
            assert_eq!(id.ok(), expected.map(|text| text.as_bytes().to_vec()), "{what}");
        }
    }

    #[test]
    fn a_cloud_event_is_told_by_its_source_and_its_id_wherever_they_stand() {
        let of = |message: Message| record(&Identity::cloud_events(), &message);
        let event = |source: &str, id: &str| {
            of(json(&format!(r#"{{"specversion":"1.0","source":"{source}","id":"{id}","type":"t"}}"#)))
        };
        let one = event("/shop", "1");
        assert!(one.is_some());
        for prefix in ["ce-", "ce_", "Ce-", "cloudEvents:", "cloudEvents_"] {
            let message = json("x").with_header(format!("{prefix}id"), "1");
            assert_eq!(of(message.clone()), None, "half of {prefix}");
            assert_eq!(of(message.with_header(format!("{prefix}source"), "/shop")), one, "{prefix}");
        }
        assert_ne!(event("/shop", "2"), one);
        assert_ne!(event("/other", "1"), one);
        assert_ne!(event("/sho", "p1"), one);
        for none in [r#"{"source":"/shop","id":"1"}"#, r#"{"specversion":"1.0","id":"1"}"#, "[]", "x"] {
            assert_eq!(of(json(none)), None, "{none}");
        }
    }

    #[test]
    fn no_two_identities_consumers_or_topics_meet() {
        let message = |topic: &str| {
            Message::new(topic, r#"{"id":"1","n":1}"#)
                .with_header("id", "1")
                .with_broker_id("1")
                .with_header("webhook-id", "1")
        };
        let identities = [
            Identity::broker(),
            Identity::header("id"),
            Identity::standard_webhooks(),
            Identity::json(pointer("/id")),
            Identity::json(pointer("/n")),
            Identity::natural(NaturalKey::new(vec![pointer("/id")]).unwrap()),
            Identity::payload(),
            Identity::with(|_| Some("1".to_owned())),
            Identity::header("id").within_topic(true),
        ];
        let mut seen = std::collections::HashSet::new();
        for identity in &identities {
            let id = identity.of(&message("orders")).unwrap();
            for consumer in ["billing", "stock"] {
                assert!(seen.insert(id.record_id(&ConsumerName::new(consumer).unwrap())), "{identity:?}");
            }
        }
        // Identities from the content differ by topic, identities of the producer do not.
        let differs = identities.map(|i| record(&i, &message("orders")) != record(&i, &message("paid")));
        assert_eq!(differs, [true, false, false, true, true, true, true, false, true]);
    }

    #[test]
    fn an_identity_may_have_any_length() {
        let of =
            |text: String| record(&Identity::header("id"), &Message::new("t", "").with_header("id", text));
        let long = "x".repeat(300);
        assert!(of(long.clone()).is_some());
        assert_ne!(of(long.clone()), of(format!("{long}y")));
        let digest = Identity::header("id").of(&Message::new("t", "").with_header("id", long)).unwrap();
        let digest = String::from_utf8(digest.key().as_bytes().to_vec()).unwrap();
        assert_eq!(digest.len(), 64);
        assert_ne!(of(digest), of("x".repeat(300)), "an identifier cannot imitate a digest");
    }
}
