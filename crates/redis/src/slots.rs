//! The slots of a Cluster and their primaries, as the Cluster reports them.

use redis::Value;

const SLOTS: u16 = 16_384;

/// The number of tags to try. The numbers below it have every slot among them.
const MAX_TAGS: u32 = 200_000;

/// A node's address, as clients reach it.
pub(crate) type Node = (String, u16);

/// The parts of the key space, with their primaries at the time of the report.
#[derive(Debug)]
pub(crate) struct Slots(Vec<(u16, u16, Node)>);

impl Slots {
    /// Reads the reply to `CLUSTER SLOTS`. A node that does not know its own host is reached at `host`.
    pub(crate) fn read(reply: Value, host: &str) -> Option<Self> {
        let Value::Array(parts) = reply else { return None };
        parts.into_iter().map(|part| read_part(part, host)).collect::<Option<_>>().map(Self)
    }

    /// The primary of a slot, if there is one.
    pub(crate) fn primary(&self, slot: u16) -> Option<&Node> {
        self.0.iter().find(|(first, last, _)| (*first..=*last).contains(&slot)).map(|(_, _, node)| node)
    }

    /// Every primary that has slots.
    pub(crate) fn primaries(&self) -> impl Iterator<Item = &Node> {
        let firsts = self
            .0
            .iter()
            .enumerate()
            .filter(|(at, (_, _, node))| !self.0.iter().take(*at).any(|(_, _, earlier)| earlier == node));
        firsts.map(|(_, (_, _, node))| node)
    }

    /// A short hash tag whose slot a primary has.
    pub(crate) fn tag_of(&self, node: &Node) -> Option<String> {
        (0..MAX_TAGS).map(|n| n.to_string()).find(|tag| self.primary(slot_of(tag)) == Some(node))
    }
}

/// A part: first slot, last slot, the primary, its replicas. A node: host, port, and unused fields.
fn read_part(part: Value, host: &str) -> Option<(u16, u16, Node)> {
    let Value::Array(part) = part else { return None };
    let [first, last, Value::Array(primary), ..] = part.as_slice() else { return None };
    let number = |value: &Value| match value {
        Value::Int(number) => u16::try_from(*number).ok(),
        _ => None,
    };
    let [name, port, ..] = primary.as_slice() else { return None };
    let name = match name {
        Value::Nil => host,
        Value::BulkString(bytes) => match std::str::from_utf8(bytes).ok()? {
            "" => host,
            // The node does not know its own address.
            "?" => return None,
            name => name,
        },
        _ => return None,
    };
    Some((number(first)?, number(last)?, (name.to_owned(), number(port)?)))
}

/// The slot of a key with this hash tag; that of a record's key are its digits.
pub(crate) fn slot_of(tag: &str) -> u16 {
    crc16(tag.as_bytes()) % SLOTS
}

/// CRC-16/XMODEM, as the specification of Redis Cluster has it.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |sum, byte| {
        (0..8).fold(sum ^ u16::from(*byte) << 8, |sum, _| sum << 1 ^ if sum >> 15 == 1 { 0x1021 } else { 0 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::record_key;
    use oncegate_core::RecordId;
    use redis::cluster_routing::Slot;

    #[test]
    fn slots_are_computed_as_the_cluster_does() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        for n in 0..=255 {
            let id = RecordId::from_bytes([n; 32]);
            assert_eq!(Slot::new(slot_of(&id.to_string())), Some(Slot::for_key(record_key(&id))));
        }
    }

    #[test]
    fn malformed_replies_are_refused() {
        let node = |host: Value, port| {
            Value::Array(vec![host, Value::Int(port), Value::BulkString(b"name".to_vec())])
        };
        let named = |host: &str| Value::BulkString(host.as_bytes().to_vec());
        let part = |first, last, nodes: &[Value]| {
            Value::Array([&[Value::Int(first), Value::Int(last)], nodes].concat())
        };
        let told = Value::Array(vec![
            part(0, 99, &[node(named("a"), 1), node(named("b"), 2)]),
            part(100, 199, &[node(Value::Nil, 3)]),
            part(300, 16_383, &[node(named(""), 4)]),
        ]);
        let slots = Slots::read(told, "here").unwrap();
        let primary = |slot| slots.primary(slot).map(|(host, port)| (host.as_str(), *port));
        assert_eq!([primary(0), primary(99)], [Some(("a", 1)); 2]);
        assert_eq!(
            [primary(100), primary(200), primary(16_383)],
            [Some(("here", 3)), None, Some(("here", 4))]
        );
        let primaries: Vec<_> = slots.primaries().cloned().collect();
        assert_eq!(primaries, [("a".to_owned(), 1), ("here".to_owned(), 3), ("here".to_owned(), 4)]);
        for node in &primaries {
            assert_eq!(slots.primary(slot_of(&slots.tag_of(node).unwrap())), Some(node));
        }
        assert_eq!(slots.tag_of(&("b".to_owned(), 2)), None);
        let mut seen = vec![false; usize::from(SLOTS)];
        (0..MAX_TAGS).for_each(|n| seen[usize::from(slot_of(&n.to_string()))] = true);
        assert!(seen.iter().all(|seen| *seen), "a primary with one slot has a tag, too");
        for unexpected_reply in [
            Value::Nil,
            Value::Array(vec![Value::Nil]),
            Value::Array(vec![part(0, 99, &[])]),
            Value::Array(vec![part(0, 70_000, &[node(named("a"), 1)])]),
            Value::Array(vec![part(0, 99, &[node(named("?"), 1)])]),
            Value::Array(vec![part(0, 99, &[node(named("a"), -1)])]),
        ] {
            assert!(Slots::read(unexpected_reply.clone(), "here").is_none(), "{unexpected_reply:?}");
        }
    }
}
