//! Describes a member of a JSON body that carries the key, in the schemas of the request body.

use serde_json::{Value, json};

use super::super::descriptor::Operation;
use super::super::document::Node;
use super::{description, is_required, key_schema, resolved};

/// The most references that lead from one schema to the next.
const MAX_REFERENCES: usize = 16;

/// Adds the member of this pointer to the schema of each JSON body of an operation. A member that a schema has itself stays.
/// Returns false if a schema forbids it.
pub(super) fn describe(value: &mut Node, operation: &Operation, pointer: &str, components: &Node) -> bool {
    let Some(body) = value.get("requestBody") else { return true };
    let mut body = resolved(body, components).clone();
    let path: Vec<_> =
        pointer.split('/').skip(1).map(|name| name.replace("~1", "/").replace("~0", "~")).collect();
    let (mut is_allowed, mut is_changed) = (true, false);
    let content = body.get_mut("content").map_or(&mut [][..], Node::members_mut);
    for (media_type, media) in content {
        let Some(schema) = media.get_mut("schema").filter(|_| is_json(media_type)) else { continue };
        match find(schema, &path, components) {
            Found::Member => continue,
            Found::Forbidden => is_allowed = false,
            Found::Open => {
                insert(schema, operation, &path);
                is_changed = true;
            }
            // An array or a text cannot have it.
            Found::NoObject => {}
        }
    }
    if is_required(operation) && is_changed && body.get("required").is_none() {
        body.set("required", json!(true));
    }
    if is_changed {
        // A body that other operations share by reference becomes this operation's own.
        value.set("requestBody", body);
    }
    is_allowed
}

fn is_json(media_type: &str) -> bool {
    let kind = media_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    kind == "application/json" || kind.ends_with("+json")
}

/// The statement of a schema about a member.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    Member,
    /// No other members are allowed.
    Forbidden,
    /// It may be added.
    Open,
    NoObject,
}

fn find(schema: &Node, path: &[String], components: &Node) -> Found {
    let Some((name, rest)) = path.split_first() else { return Found::Member };
    let mut places = Vec::new();
    gather(schema, components, MAX_REFERENCES, &mut places);
    let mut found = Found::NoObject;
    for schema in places {
        let properties = schema.get("properties").map_or(&[][..], Node::members);
        if let Some((_, inner)) = properties.iter().find(|(own, _)| own.eq_ignore_ascii_case(name)) {
            return find(inner, rest, components);
        }
        if ["additionalProperties", "unevaluatedProperties"]
            .iter()
            .any(|word| schema.get(word) == Some(&Node::Bool(false)))
        {
            found = Found::Forbidden;
        } else if found == Found::NoObject && may_be_object(schema) {
            found = Found::Open;
        }
    }
    found
}

/// A schema with all that it names by reference or combines in `allOf`.
fn gather<'n>(schema: &'n Node, components: &'n Node, left: usize, places: &mut Vec<&'n Node>) {
    let Some(left) = left.checked_sub(1) else { return };
    places.push(schema);
    let target = resolved(schema, components);
    if !std::ptr::eq(target, schema) {
        gather(target, components, left, places);
    }
    for part in schema.get("allOf").map_or(&[][..], Node::list) {
        gather(part, components, left, places);
    }
}

/// Returns true if the schema describes objects, or names a schema that may.
fn may_be_object(schema: &Node) -> bool {
    let is_object = |kind: &Node| kind.as_str() == Some("object");
    match schema.get("type") {
        Some(kind) => is_object(kind) || kind.list().iter().any(is_object),
        None => ["properties", "$ref", "oneOf", "anyOf"].iter().any(|word| schema.get(word).is_some()),
    }
}

/// Adds the member to the properties of the schema, or in an `allOf` if the schema has none of its own.
fn insert(schema: &mut Node, operation: &Operation, path: &[String]) {
    let is_plain = schema.get("$ref").is_none()
        && ["allOf", "oneOf", "anyOf"].iter().all(|word| schema.get(word).is_none());
    if is_plain && let [name] = path {
        schema.object("properties").set(name, member(operation));
        if is_required(operation) {
            schema.push("required", Value::from(name.as_str()));
        }
        return;
    }
    let added = path.iter().rev().fold(member(operation), |inner, name| {
        let mut object = json!({"type": "object", "properties": {name: inner}});
        if is_required(operation) {
            object["required"] = json!([name]);
        }
        object
    });
    let mut whole = Node::Object(Vec::new());
    whole.push("allOf", schema.clone());
    whole.push("allOf", added);
    *schema = whole;
}

fn member(operation: &Operation) -> Value {
    let mut schema = key_schema(operation);
    schema["description"] = json!(description(operation));
    schema
}
