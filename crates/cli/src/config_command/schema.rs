//! The JSON Schema of the configuration file, made from the table of settings.

use serde_json::{Map, Value, json};

use super::{init, json_value};
use crate::config::{Accepted, Fallback, Raw, SETTINGS, SettableIn, Setting, Shape, text_of_number};

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
    let value = value_of(&(setting.accepted)());
    let mut property = match setting.shape {
        Shape::Switch => json!({"type": "boolean"}),
        Shape::Many if setting.is_command() => json!({"type": "array", "items": value}),
        Shape::Many => {
            let value = or_number(value);
            json!({"anyOf": [{"type": "array", "items": value}, value]})
        }
        Shape::One => value,
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

/// The schema of a value in a list, where a number stands for its digits: a text may be of digits only.
fn or_number(mut value: Value) -> Value {
    let is_text = |value: &Value| value["type"] == "string";
    if let Some(Value::Array(forms)) = value.get_mut("anyOf") {
        forms
            .iter_mut()
            .filter(|form| is_text(form))
            .for_each(|form| form["type"] = json!(["string", "integer"]));
    } else if is_text(&value) {
        value["type"] = json!(["string", "integer"]);
    }
    value
}

/// The schema of one value.
fn value_of(accepted: &Accepted) -> Value {
    match accepted {
        Accepted::Text => json!({"type": "string"}),
        Accepted::Words(words, None) => json!({"enum": words}),
        Accepted::Words(words, Some(pattern)) if words.is_empty() => {
            json!({"type": "string", "pattern": pattern})
        }
        Accepted::Words(words, Some(pattern)) => {
            json!({"anyOf": [{"enum": words}, {"type": "string", "pattern": pattern}]})
        }
        Accepted::Ratio => json!({
            "type": ["number", "string"], "minimum": 0, "maximum": 1,
            "pattern": r"^\+?(?:0*1(?:\.0*)?|0+(?:\.[0-9]*)?|0*\.[0-9]+|[0-9.]+[eE][+-]?[0-9]+)$",
        }),
        // A bound applies to numbers only, and a pattern to texts only.
        Accepted::Number(min, max, words) => {
            let mut value = json!({
                "type": ["integer", "string"], "minimum": min, "pattern": text_of_number(*min, *max, words),
            });
            if let (Some(max), Value::Object(members)) = (max, &mut value) {
                members.insert("maximum".to_owned(), (*max).into());
            }
            value
        }
        // Zero needs no unit, and no quotes.
        Accepted::Quantity(quantity) if quantity.has_zero() => {
            json!({"type": ["string", "integer"], "minimum": 0, "maximum": 0, "pattern": quantity.pattern()})
        }
        Accepted::Quantity(quantity) => json!({"type": "string", "pattern": quantity.pattern()}),
    }
}
