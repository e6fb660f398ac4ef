//! A JSON document whose members stay in their order.
//!
//! The maps of `serde_json` sort their members. Its feature that keeps the order would apply to every crate of the program.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, SerializeMap as _, Serializer};
use serde_json::{Number, Value};

/// A value of a document.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Node {
    Null,
    Bool(bool),
    Number(Number),
    Text(String),
    List(Vec<Node>),
    /// The members in their order.
    Object(Vec<(String, Node)>),
}

impl Node {
    pub(super) fn as_str(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn list(&self) -> &[Self] {
        match self {
            Self::List(values) => values,
            _ => &[],
        }
    }

    pub(super) fn members(&self) -> &[(String, Self)] {
        match self {
            Self::Object(members) => members,
            _ => &[],
        }
    }

    pub(super) fn members_mut(&mut self) -> &mut [(String, Self)] {
        match self {
            Self::Object(members) => members,
            _ => &mut [],
        }
    }

    pub(super) const fn is_object(&self) -> bool {
        matches!(self, Self::Object(_))
    }

    pub(super) fn get(&self, name: &str) -> Option<&Self> {
        self.members().iter().find(|(own, _)| own == name).map(|(_, value)| value)
    }

    pub(super) fn get_mut(&mut self, name: &str) -> Option<&mut Self> {
        self.members_mut().iter_mut().find(|(own, _)| own == name).map(|(_, value)| value)
    }

    /// The text of a member.
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.get(name).and_then(Self::as_str)
    }

    /// Sets a member. A new one is the last one. A value that is no object becomes one.
    pub(super) fn set(&mut self, name: &str, value: impl Into<Self>) {
        let value = value.into();
        match self.get_mut(name) {
            Some(place) => *place = value,
            None => self.own_members().push((name.to_owned(), value)),
        }
    }

    /// The member of this name, as an object.
    pub(super) fn object(&mut self, name: &str) -> &mut Self {
        if !self.get(name).is_some_and(Self::is_object) {
            self.set(name, Self::Object(Vec::new()));
        }
        self.existing(name)
    }

    /// Adds a value to the list of this name.
    pub(super) fn push(&mut self, name: &str, value: impl Into<Self>) {
        if !matches!(self.get(name), Some(Self::List(_))) {
            self.set(name, Self::List(Vec::new()));
        }
        if let Self::List(values) = self.existing(name) {
            values.push(value.into());
        }
    }

    fn existing(&mut self, name: &str) -> &mut Self {
        let members = self.own_members();
        let at = members.iter().position(|(own, _)| own == name).unwrap_or_else(|| {
            members.push((name.to_owned(), Self::Null));
            members.len() - 1
        });
        match members.get_mut(at) {
            Some((_, value)) => value,
            None => unreachable!("the member was found, or has just been added"),
        }
    }

    fn own_members(&mut self) -> &mut Vec<(String, Self)> {
        if !self.is_object() {
            *self = Self::Object(Vec::new());
        }
        match self {
            Self::Object(members) => members,
            _ => unreachable!("it has just become an object"),
        }
    }
}

impl From<Value> for Node {
    fn from(value: Value) -> Self {
        match value {
            Value::Null => Self::Null,
            Value::Bool(value) => Self::Bool(value),
            Value::Number(value) => Self::Number(value),
            Value::String(text) => Self::Text(text),
            Value::Array(values) => Self::List(values.into_iter().map(Self::from).collect()),
            Value::Object(members) => {
                Self::Object(members.into_iter().map(|(name, value)| (name, value.into())).collect())
            }
        }
    }
}

impl Serialize for Node {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => serializer.serialize_unit(),
            Self::Bool(value) => serializer.serialize_bool(*value),
            Self::Number(value) => value.serialize(serializer),
            Self::Text(text) => serializer.serialize_str(text),
            Self::List(values) => serializer.collect_seq(values),
            Self::Object(members) => {
                let mut map = serializer.serialize_map(Some(members.len()))?;
                for (name, value) in members {
                    map.serialize_entry(name, value)?;
                }
                map.end()
            }
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value of a document")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_none<E: de::Error>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Node, D::Error> {
        Node::deserialize(deserializer)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Bool(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Node, E> {
        Ok(Node::Number(value.into()))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Node, E> {
        Ok(Node::Number(value.into()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Node, E> {
        Ok(Number::from_f64(value).map_or(Node::Null, Node::Number))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Node, E> {
        Ok(Node::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Node, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = from.next_element()? {
            values.push(value);
        }
        Ok(Node::List(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Node, A::Error> {
        let mut members: Vec<(String, Node)> = Vec::new();
        while let Some(member) = from.next_entry()? {
            members.push(member);
        }
        Ok(Node::Object(members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_stay_in_their_order() {
        let text = "z: 1\na: [true, null, 1.5, -2, text]\n200: {y: {}, b: []}\n\"1\": {}\n";
        let node: Node = serde_saphyr::from_str(text).unwrap();
        let json = r#"{"z":1,"a":[true,null,1.5,-2,"text"],"200":{"y":{},"b":[]},"1":{}}"#;
        assert_eq!(serde_json::to_string(&node).unwrap(), json);
        assert_eq!(serde_json::from_str::<Node>(json).unwrap(), node);
        assert!(serde_saphyr::from_str::<Node>("a: 1\na: 2\n").is_err());
    }

    #[test]
    fn a_new_member_is_the_last_one_and_an_old_one_keeps_its_place() {
        let mut node: Node = serde_json::from_str(r#"{"z":1,"a":{"b":2},"l":7}"#).unwrap();
        node.set("z", Value::from(3));
        node.object("a").set("a", Value::from(4));
        node.object("new").set("c", Value::Null);
        node.push("l", Value::from(5));
        let expected = r#"{"z":3,"a":{"b":2,"a":4},"l":[5],"new":{"c":null}}"#;
        assert_eq!(serde_json::to_string(&node).unwrap(), expected);
    }
}
