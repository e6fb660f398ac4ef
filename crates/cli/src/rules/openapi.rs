//! `oncegate openapi`: the rules for keys as an OpenAPI document, or merged into the one of the API.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use http::Method;
use serde_json::{Map, Value, json};

use super::descriptor::{Carrier, Operation, Rules};
use crate::config::{Config, Draft, ProxyArgs};

/// The largest document that is merged.
const MAX_DOCUMENT: u64 = 16 * 1024 * 1024;

/// The methods of a path item (OpenAPI 3.1, 4.8.9).
const METHODS: [&str; 8] = ["get", "put", "post", "delete", "options", "head", "patch", "trace"];

/// Prints an OpenAPI document.
#[derive(Args, Debug)]
pub(crate) struct OpenapiArgs {
    #[command(flatten)]
    settings: ProxyArgs,
    /// Adds the rules to this OpenAPI 3 document, in YAML or JSON, and prints the result
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    merge: Option<PathBuf>,
    /// The name of the API, for the title of a document that is not merged
    #[arg(long, value_name = "NAME", default_value = "API", help_heading = "Output")]
    api: String,
}

/// Prints the document as JSON. The exit code is 1 if the configuration or the document has errors.
pub(crate) fn run(args: &OpenapiArgs) -> ExitCode {
    let Draft { config, problems, .. } = Draft::read(&args.settings, std::env::vars_os());
    let Some(config) = config else {
        super::complain_of(&problems);
        return ExitCode::FAILURE;
    };
    let document = match &args.merge {
        None => Ok(generated(&Rules::of(&config), &args.api)),
        Some(path) => merged(&config, path).map_err(|error| format!("{}: {error}", path.display())),
    };
    match document {
        Ok(document) => {
            super::print(&format!("{document:#}\n"));
            ExitCode::SUCCESS
        }
        Err(error) => {
            complain!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A document with the routes of the configuration.
fn generated(rules: &Rules, api: &str) -> Value {
    let mut paths = Map::new();
    for operation in &rules.operations {
        let Some(pattern) = &operation.path else { continue };
        let path = pattern.replace("{*", "{");
        let item = paths.entry(path.clone()).or_insert_with(|| json!({"parameters": path_parameters(&path)}));
        for method in &operation.methods {
            let mut value =
                json!({"responses": {"default": {"description": "The response of the service."}}});
            add(&mut value, operation);
            if let Some(item) = item.as_object_mut() {
                // The first route that matches counts.
                item.entry(method.to_ascii_lowercase()).or_insert(value);
            }
        }
    }
    json!({
        "openapi": "3.1.0",
        "info": {"title": api, "version": "1", "description": "The rules for retries."},
        "paths": paths,
        "components": {"schemas": {SCHEMA: problem_schema()}},
    })
}

/// The parameters in the braces of a path.
fn path_parameters(path: &str) -> Value {
    let names = path.split('{').skip(1).filter_map(|rest| rest.split_once('}')).map(|(name, _)| name);
    names
        .map(|name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}))
        .collect()
}

/// The document in this file, with the rules of the route that each of its operations matches.
fn merged(config: &Config, path: &Path) -> Result<Value, String> {
    let size = fs::metadata(path).map_err(|error| error.to_string())?.len();
    if size > MAX_DOCUMENT {
        return Err(format!("the document has {size} bytes; at most {MAX_DOCUMENT} are merged"));
    }
    let text = fs::read_to_string(path).map_err(|error| error.to_string())?;
    let mut document: Value =
        serde_saphyr::from_str(&text).map_err(|error| format!("neither YAML nor JSON: {error}"))?;
    let version = document.get("openapi").and_then(Value::as_str).unwrap_or_default();
    if !version.starts_with("3.") {
        return Err("not an OpenAPI 3 document; it needs a member `openapi` such as \"3.1.0\"".to_owned());
    }
    let paths = document.get_mut("paths").and_then(Value::as_object_mut).ok_or("there are no `paths`")?;
    let mut count = 0;
    for (path, item) in paths {
        let Some(item) = item.as_object_mut() else { continue };
        for method in METHODS {
            let Some(value) = item.get_mut(method) else { continue };
            let Ok(method) = Method::from_bytes(method.to_ascii_uppercase().as_bytes()) else { continue };
            if let Some(operation) = Operation::of_request(config, &method, &example(path)) {
                add(value, &operation);
                count += 1;
            }
        }
    }
    if count == 0 {
        return Err("no operation in it has a method that a key protects".to_owned());
    }
    let components = member(&mut document, "components");
    member(components, "schemas")[SCHEMA] = problem_schema();
    Ok(document)
}

/// A path for this template: each name in braces stands for a part of a segment.
fn example(template: &str) -> String {
    let mut path = String::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once('{') {
        path.push_str(before);
        path.push('x');
        rest = after.split_once('}').map_or("", |(_, rest)| rest);
    }
    path + rest
}

/// The member of this name, as an object.
fn member<'v>(value: &'v mut Value, name: &str) -> &'v mut Value {
    if !value.get(name).is_some_and(Value::is_object) {
        value[name] = json!({});
    }
    &mut value[name]
}

const SCHEMA: &str = "IdempotencyProblem";

/// A problem by RFC 9457, with the member `retry`.
fn problem_schema() -> Value {
    json!({
        "type": "object",
        "required": ["type", "title", "status", "detail", "retry"],
        "properties": {
            "type": {"type": "string", "format": "uri-reference"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
            "retry": {"type": "string", "enum": ["same-key", "new-key", "fix-request", "stop", "unprotected"]},
            "instance": {"type": "string", "format": "uri-reference"},
        },
    })
}

/// Adds the rules to an operation. What it says itself stays.
fn add(value: &mut Value, operation: &Operation) {
    if !value.is_object() {
        return;
    }
    value["x-idempotency"] = operation.json();
    if !value.get("parameters").is_some_and(Value::is_array) {
        value["parameters"] = json!([]);
    }
    let is_only = operation.carriers.len() == 1;
    for carrier in &operation.carriers {
        let (name, place) = match carrier {
            Carrier::Header(name) => (name, "header"),
            Carrier::Query(name) => (name, "query"),
            // The schema of the body is the API's own; the extension names the members.
            Carrier::Member(_) | Carrier::Built(_) => continue,
        };
        if let Some(parameters) = value["parameters"].as_array_mut()
            && !parameters.iter().any(|own| is_same(own, name, place))
        {
            parameters.push(parameter(operation, name, place, is_only));
        }
    }
    let responses = member(value, "responses");
    for refusal in &operation.refusals {
        let status = refusal.status.to_string();
        if responses.get(&status).is_none() {
            responses[&status] = response(operation, refusal.status);
        }
    }
}

fn is_same(parameter: &Value, name: &str, place: &str) -> bool {
    let text = |member: &str| parameter.get(member).and_then(Value::as_str).unwrap_or_default();
    text("in") == place && text("name").eq_ignore_ascii_case(name)
}

fn parameter(operation: &Operation, name: &str, place: &str, is_only: bool) -> Value {
    let mut schema = json!({"type": "string", "minLength": 1, "maxLength": 255});
    match operation.format.split_once(':') {
        None if operation.format == "uuid" => schema["format"] = json!("uuid"),
        Some(("pattern", pattern)) => schema["pattern"] = json!(format!("^(?:{pattern})$")),
        _ => {}
    }
    json!({
        "name": name,
        "in": place,
        // If there are several places, none of them alone is required.
        "required": operation.is_required && is_only,
        "description": format!(
            "One key for each intent, the same in every retry. The first response is kept for {} seconds.",
            operation.retention.as_secs()
        ),
        "schema": schema,
    })
}

/// The response for all refusals with this status.
fn response(operation: &Operation, status: u16) -> Value {
    let refusals = operation.refusals.iter().filter(|refusal| refusal.status == status);
    let titles: Vec<_> =
        refusals.map(|refusal| format!("{} ({})", refusal.condition.title(), refusal.condition)).collect();
    let schema = match operation.media_type.as_str() {
        "application/problem+json" => json!({"$ref": format!("#/components/schemas/{SCHEMA}")}),
        _ => json!({"type": "object"}),
    };
    let mut response = json!({
        "description": titles.join("; "),
        "content": {&operation.media_type: {"schema": schema}},
    });
    if [409, 429, 503].contains(&status) {
        response["headers"] = json!({"Retry-After": {"schema": {"type": "integer"}}});
    }
    response
}
