//! The JSON Schema of the configuration file, made from the table of settings.

use serde_json::{Map, Value, json};

use super::{init, is_number, is_ratio, json_value};
use crate::config::{Fallback, Raw, SETTINGS, SettableIn, Setting, Shape};

/// The schema, in draft-07, which editors of TOML know.
pub(super) fn schema() -> Value {
    let route = {
        let mut properties = properties(|setting| setting.settable_in == SettableIn::Route);
        properties.insert(
            "path".to_owned(),
            json!({"type": "string", "pattern": "^/", "description": "The paths of this route, such as /payments/{id} or /v1/{*rest}."}),
        );
        if let Some(methods) = properties.get("methods").cloned() {
            properties.insert("method".to_owned(), methods);
        }
        json!({"type": "object", "properties": properties, "required": ["path"], "additionalProperties": false})
    };
    let mut properties =
        properties(|setting| !matches!(setting.settable_in, SettableIn::Start | SettableIn::Secret));
    properties.insert(
        "route".to_owned(),
        json!({"type": "array", "items": route, "description": "Settings for some paths. The first route that matches counts."}),
    );
    json!({
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Configuration of the Oncegate sidecar",
        "type": "object",
        "properties": properties,
        "additionalProperties": false,
    })
}

/// The properties of these settings. Those with a dot in their name are in an object of their own.
fn properties(is_wanted: impl Fn(&Setting) -> bool) -> Map<String, Value> {
    let mut properties = Map::new();
    for setting in SETTINGS.iter().filter(|setting| is_wanted(setting)) {
        match setting.name.split_once('.') {
            None => drop(properties.insert(setting.name.to_owned(), property(setting))),
            Some((table, name)) => {
                let table = properties.entry(table).or_insert_with(
                    || json!({"type": "object", "properties": {}, "additionalProperties": false}),
                );
                if let Some(Value::Object(inside)) = table.get_mut("properties") {
                    inside.insert(name.to_owned(), property(setting));
                }
            }
        }
    }
    properties
}

fn property(setting: &Setting) -> Value {
    let mut property = match setting.shape {
        Shape::Switch => json!({"type": "boolean"}),
        Shape::Many => json!({
            "anyOf": [{"type": "array", "items": {"type": ["string", "integer"]}}, {"type": ["string", "integer"]}],
        }),
        Shape::One => match words(setting) {
            Some(words) => json!({"enum": words}),
            None if is_number(setting) || setting.value == "SIZE" => json!({"type": ["integer", "string"]}),
            None if is_ratio(setting) => json!({"type": ["number", "string"], "minimum": 0, "maximum": 1}),
            None => json!({"type": "string"}),
        },
    };
    if let Value::Object(members) = &mut property {
        let variable = setting.variable();
        let description = format!("{} In the environment: {variable}.", init::description(setting));
        members.insert("description".to_owned(), description.into());
        if let Fallback::Value(text) = setting.default {
            members.insert("default".to_owned(), json_value(setting, &Raw::Text(text.to_owned())));
        }
    }
    property
}

/// The words of a setting that accepts no others, as its placeholder names them.
fn words(setting: &Setting) -> Option<Vec<&'static str>> {
    let words: Vec<_> = setting.value.split('|').collect();
    let is_word =
        |word: &&str| word.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    (words.len() > 1 && words.iter().all(|word| !word.is_empty() && is_word(word))).then_some(words)
}
