//! Headers and properties: from a message to AMQP, and back.

use std::collections::BTreeMap;

use bytes::Bytes;
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldArray, FieldTable, ShortString};
use oncegate_inbox::{MESSAGE_ID, Outgoing};
use serde_json::Value;

use super::ORDER_KEY;

/// The maximum depth of nested tables.
const MAX_DEPTH: u32 = 16;

/// The delivery mode of a persistent message.
const PERSISTENT: u8 = 2;

/// The header names for fields that are not headers in AMQP.
///
/// A header of the message with such a name is dropped, so that a producer cannot fake another message's identity.
const FIELD_HEADERS: [&str; 15] = [
    "amqp-app-id", "amqp-content-encoding", "amqp-content-type", "amqp-correlation-id", "amqp-exchange",
    "amqp-expiration", "amqp-message-id", "amqp-priority", "amqp-reply-to", "amqp-routing-key",
    "amqp-timestamp", "amqp-type", "amqp-user-id", "amqp-delivery-mode", "amqp-cluster-id",
];

/// Headers that the broker itself writes and reads. A published message must not set them.
const BROKER_HEADERS: [&str; 5] = ["CC", "BCC", "x-death", "x-delivery-count", "x-acquired-count"];

/// The header in which a quorum queue counts earlier deliveries.
const DELIVERY_COUNT: &str = "x-delivery-count";

/// Returns the headers of a delivery: its own, and the other fields of AMQP.
pub(crate) fn headers(
    properties: &BasicProperties,
    exchange: &str,
    routing_key: &str,
) -> Vec<(String, Bytes)> {
    let mut headers = Vec::new();
    for (name, value) in properties.headers().iter().flat_map(FieldTable::inner) {
        if !is_one_of(&FIELD_HEADERS, name.as_str()) {
            headers.push((name.to_string(), bytes(value)));
        }
    }
    let mut show = |name: &str, value: Option<Bytes>| {
        if let Some(value) = value {
            headers.push((name.to_owned(), value));
        }
    };
    let text = |value: &Option<ShortString>| value.as_ref().map(|value| value.to_string().into());
    show("amqp-message-id", text(properties.message_id()));
    show("amqp-correlation-id", text(properties.correlation_id()));
    show("amqp-content-type", text(properties.content_type()));
    show("amqp-content-encoding", text(properties.content_encoding()));
    show("amqp-type", text(properties.kind()));
    show("amqp-app-id", text(properties.app_id()));
    show("amqp-user-id", text(properties.user_id()));
    show("amqp-reply-to", text(properties.reply_to()));
    show("amqp-expiration", text(properties.expiration()));
    show("amqp-timestamp", properties.timestamp().map(|at| at.to_string().into()));
    show("amqp-priority", properties.priority().map(|priority| priority.to_string().into()));
    show("amqp-exchange", Some(exchange.to_owned().into()));
    show("amqp-routing-key", Some(routing_key.to_owned().into()));
    headers
}

/// Returns the number of deliveries, this one included, if the broker counts them.
pub(crate) fn deliveries(properties: &BasicProperties, is_redelivered: bool) -> Option<u32> {
    let counted = properties.headers().as_ref().and_then(|headers| headers.inner().get(DELIVERY_COUNT));
    let before = match counted {
        Some(AMQPValue::LongLongInt(count)) => u32::try_from(*count).ok(),
        Some(AMQPValue::LongInt(count)) => u32::try_from(*count).ok(),
        Some(AMQPValue::LongUInt(count)) => Some(*count),
        Some(AMQPValue::ShortInt(count)) => u32::try_from(*count).ok(),
        Some(AMQPValue::ShortShortInt(count)) => u32::try_from(*count).ok(),
        _ => (!is_redelivered).then_some(0),
    };
    // From 4.0 on, returns are not counted.
    before.filter(|before| *before > 0 || !is_redelivered).map(|before| before.saturating_add(1))
}

/// Converts a value to bytes: text and bytes as they are, numbers in decimal digits, arrays and tables as JSON.
fn bytes(value: &AMQPValue) -> Bytes {
    match value {
        AMQPValue::LongString(text) => Bytes::copy_from_slice(text.as_bytes()),
        AMQPValue::ShortString(text) => text.to_string().into(),
        AMQPValue::ByteArray(bytes) => Bytes::copy_from_slice(bytes.as_slice()),
        AMQPValue::Void => Bytes::new(),
        AMQPValue::DecimalValue(decimal) => {
            let digits = format!("{:0>1$}", decimal.value, usize::from(decimal.scale) + 1);
            let (whole, part) = digits.split_at(digits.len() - usize::from(decimal.scale));
            let point = if part.is_empty() { "" } else { "." };
            format!("{whole}{point}{part}").into()
        }
        _ => match json(value, 0) {
            Value::String(text) => text.into(),
            value => value.to_string().into(),
        },
    }
}

fn json(value: &AMQPValue, depth: u32) -> Value {
    if depth > MAX_DEPTH {
        return Value::Null;
    }
    match value {
        AMQPValue::Boolean(value) => (*value).into(),
        AMQPValue::ShortShortInt(value) => (*value).into(),
        AMQPValue::ShortShortUInt(value) => (*value).into(),
        AMQPValue::ShortInt(value) => (*value).into(),
        AMQPValue::ShortUInt(value) => (*value).into(),
        AMQPValue::LongInt(value) => (*value).into(),
        AMQPValue::LongUInt(value) => (*value).into(),
        AMQPValue::LongLongInt(value) => (*value).into(),
        AMQPValue::Float(value) => (*value).into(),
        AMQPValue::Double(value) => (*value).into(),
        AMQPValue::Timestamp(value) => (*value).into(),
        AMQPValue::FieldArray(values) => {
            values.as_slice().iter().map(|value| json(value, depth + 1)).collect()
        }
        AMQPValue::FieldTable(table) => {
            table.inner().iter().map(|(name, value)| (name.to_string(), json(value, depth + 1))).collect()
        }
        AMQPValue::Void => Value::Null,
        AMQPValue::LongString(_)
        | AMQPValue::ShortString(_)
        | AMQPValue::ByteArray(_)
        | AMQPValue::DecimalValue(_) => String::from_utf8_lossy(&bytes(value)).into(),
    }
}

/// Returns the properties of a published message and their maximum size, or an error.
pub(crate) fn properties(message: &Outgoing) -> Result<(BasicProperties, usize), String> {
    if message.id.is_empty() || !message.id.bytes().all(|b| (b' '..=b'~').contains(&b)) {
        return Err("the identifier of the message is empty or not printable ASCII".to_owned());
    }
    let id = ShortString::try_new(&*message.id)
        .map_err(|_| "the identifier of the message has more than 255 bytes".to_owned())?;
    // The frame header, the flags, and two numbers.
    let mut bytes = 64 + message.id.len();
    let mut properties = BasicProperties::default().with_message_id(id).with_delivery_mode(PERSISTENT);
    let mut headers: BTreeMap<&str, Vec<&[u8]>> = BTreeMap::new();
    for (name, value) in &message.headers {
        if is_one_of(&BROKER_HEADERS, name) || is_one_of(&[MESSAGE_ID, ORDER_KEY], name) {
            continue;
        }
        if is_property(&mut properties, name, value) {
            bytes += 1 + value.len();
        } else {
            headers.entry(name).or_default().push(value);
        }
    }
    headers.insert(MESSAGE_ID, vec![message.id.as_bytes()]);
    if let Some(key) = &message.order_key {
        headers.insert(ORDER_KEY, vec![key]);
    }
    let mut table = FieldTable::default();
    for (name, values) in headers {
        let key =
            ShortString::try_new(name).map_err(|_| "a header's name has more than 255 bytes".to_owned())?;
        bytes += 10 + name.len() + values.iter().map(|value| 5 + value.len()).sum::<usize>();
        let mut values: Vec<_> =
            values.into_iter().map(|value| AMQPValue::LongString(value.into())).collect();
        let value = match values.pop() {
            Some(only) if values.is_empty() => only,
            // In AMQP each name occurs once.
            last => {
                AMQPValue::FieldArray(FieldArray::from(values.into_iter().chain(last).collect::<Vec<_>>()))
            }
        };
        table.insert(key, value);
    }
    Ok((properties.with_headers(table), bytes))
}

/// Sets the property that a header stands for, and returns `false` if there is none or the value does not fit.
fn is_property(properties: &mut BasicProperties, name: &str, value: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(value) else { return false };
    let before = std::mem::take(properties);
    let (with, is_one) = if name.eq_ignore_ascii_case("amqp-timestamp") {
        match text.parse() {
            Ok(at) => (before.with_timestamp(at), true),
            Err(_) => (before, false),
        }
    } else {
        match (name.to_ascii_lowercase().as_str(), ShortString::try_new(text)) {
            ("amqp-correlation-id", Ok(text)) => (before.with_correlation_id(text), true),
            ("amqp-content-type", Ok(text)) => (before.with_content_type(text), true),
            ("amqp-content-encoding", Ok(text)) => (before.with_content_encoding(text), true),
            ("amqp-type", Ok(text)) => (before.with_type(text), true),
            ("amqp-app-id", Ok(text)) => (before.with_app_id(text), true),
            ("amqp-reply-to", Ok(text)) => (before.with_reply_to(text), true),
            _ => (before, false),
        }
    };
    *properties = with;
    is_one
}

fn is_one_of(names: &[&str], name: &str) -> bool {
    names.iter().any(|one| one.eq_ignore_ascii_case(name))
}
