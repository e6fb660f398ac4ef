//! `oncegate openapi`: the rules for keys as an OpenAPI document, or merged into the one of the API.

mod body;
mod read;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use http::Method;
use serde_json::{Value, json};

use super::descriptor::{Carrier, FirstSent, Operation, Rules};
use super::document::Node;
use crate::config::{Config, Draft, ProxyArgs};
use crate::files;

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
            super::print(&format!("{}\n", serde_json::to_string_pretty(&document).unwrap_or_default()));
            ExitCode::SUCCESS
        }
        Err(error) => {
            complain!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A document with the routes of the configuration.
fn generated(rules: &Rules, api: &str) -> Node {
    let mut paths = Node::Object(Vec::new());
    for operation in &rules.operations {
        let Some(pattern) = &operation.path else { continue };
        let path = pattern.replace("{*", "{");
        let item = paths.object(&path);
        if item.get("parameters").is_none() {
            item.set("parameters", path_parameters(&path));
        }
        for method in operation.methods.iter().map(|method| method.to_ascii_lowercase()) {
            // The first route that matches counts. Other methods have no place in a document.
            if item.get(&method).is_some() || !METHODS.contains(&&*method) {
                continue;
            }
            let mut value = Node::from(
                json!({"responses": {"default": {"description": "The response of the service."}}}),
            );
            if operation.carriers.iter().any(|carrier| matches!(carrier, Carrier::Member(_))) {
                value.set(
                    "requestBody",
                    json!({"content": {"application/json": {"schema": {"type": "object"}}}}),
                );
            }
            add(&mut value, operation, &[], &Node::Null);
            item.set(&method, value);
        }
    }
    let mut document = Node::from(json!({"openapi": "3.1.0"}));
    document.set("info", json!({"title": api, "version": "1", "description": "The rules for retries."}));
    document.set("paths", paths);
    document.set("components", json!({"schemas": {SCHEMA: problem_schema()}}));
    document
}

/// The parameters in the braces of a path.
fn path_parameters(path: &str) -> Value {
    let names = path.split('{').skip(1).filter_map(|rest| rest.split_once('}')).map(|(name, _)| name);
    names
        .map(|name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}))
        .collect()
}

/// The document in this file, with the rules of the route that each of its operations matches.
fn merged(config: &Config, path: &Path) -> Result<Node, String> {
    let size = fs::metadata(path).map_err(|error| error.to_string())?.len();
    if size > MAX_DOCUMENT {
        return Err(format!("the document has {size} bytes; at most {MAX_DOCUMENT} are merged"));
    }
    let text = files::read_text(path, MAX_DOCUMENT).map_err(|error| error.to_string())?;
    let mut document = read::document(&text)?;
    if !document.text("openapi").unwrap_or_default().starts_with("3.") {
        return Err("not an OpenAPI 3 document; it needs a member `openapi` such as \"3.1.0\"".to_owned());
    }
    let components = document.get("components").cloned().unwrap_or(Node::Null);
    let own = components.get("schemas").and_then(|schemas| schemas.get(SCHEMA));
    if own.is_some_and(|own| *own != Node::from(problem_schema())) {
        return Err(format!("it has a schema {SCHEMA} of its own; give that another name"));
    }
    let base = read::base_path(&document);
    let paths = document.get_mut("paths").filter(|paths| paths.is_object()).ok_or("there are no `paths`")?;
    let mut count = 0;
    for (path, item) in paths.members_mut() {
        if let Some(why) = read::cannot_be_read(item) {
            complain!("warning: {path}: {why}");
        }
        let item_base = read::base_path(item).or_else(|| base.clone());
        let shared = item.get("parameters").map_or(&[][..], Node::list).to_vec();
        for name in METHODS {
            let Some(value) = item.get_mut(name) else { continue };
            let Ok(method) = Method::from_bytes(name.to_ascii_uppercase().as_bytes()) else { continue };
            let base = read::base_path(value).or_else(|| item_base.clone()).unwrap_or_default();
            if let Some(operation) =
                Operation::of_request(config, &method, &example(&format!("{base}{path}")))
            {
                for member in add(value, &operation, &shared, &components) {
                    complain!(
                        "warning: {name} {path}: the schema of the body forbids the member {member}, which carries the key; add it to the \
                         schema"
                    );
                }
                count += 1;
            }
        }
    }
    if count == 0 {
        return Err("no operation in it has a method that a key protects".to_owned());
    }
    document.object("components").object("schemas").set(SCHEMA, problem_schema());
    Ok(document)
}

/// A path for this template: each name in braces stands for a part of a segment.
pub(crate) fn example(template: &str) -> String {
    let mut path = String::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once('{') {
        path.push_str(before);
        path.push('x');
        rest = after.split_once('}').map_or("", |(_, rest)| rest);
    }
    path + rest
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

/// Adds the rules to an operation. What it says itself stays, and so do the parameters that it shares with others of its path.
///
/// Returns the members for the key that the schema of the body forbids.
fn add<'o>(value: &mut Node, operation: &'o Operation, shared: &[Node], components: &Node) -> Vec<&'o str> {
    if !value.is_object() {
        return Vec::new();
    }
    value.set("x-idempotency", operation.json());
    let mut forbidden = Vec::new();
    for carrier in &operation.carriers {
        let (name, place) = match carrier {
            Carrier::Header(name) => (name, "header"),
            Carrier::Query(name) => (name, "query"),
            Carrier::Member(pointer) => {
                if !body::describe(value, operation, pointer, components) {
                    forbidden.push(pointer.as_str());
                }
                continue;
            }
            // The members are the API's own; the extension names them.
            Carrier::Built(_) => continue,
        };
        let own = value.get("parameters").map_or(&[][..], Node::list);
        if !own.iter().chain(shared).any(|own| is_same(resolved(own, components), name, place)) {
            value.push("parameters", parameter(operation, name, place));
        }
    }
    if let Some(first) = &operation.first_sent {
        let own = value.get("parameters").map_or(&[][..], Node::list);
        if !own.iter().any(|own| is_same(resolved(own, components), &first.header, "header")) {
            value.push("parameters", first_sent(operation, first));
        }
    }
    let responses = value.object("responses");
    for refusal in &operation.refusals {
        let status = refusal.status.to_string();
        if responses.get(&status).is_none() {
            responses.set(&status, response(operation, refusal.status));
        }
    }
    forbidden
}

/// The value that a reference into the components of the document names, or the value itself.
fn resolved<'n>(value: &'n Node, components: &'n Node) -> &'n Node {
    let path = value.text("$ref").and_then(|reference| reference.strip_prefix("#/components/"));
    let target = path.and_then(|path| {
        path.split('/').try_fold(components, |at, name| at.get(&name.replace("~1", "/").replace("~0", "~")))
    });
    target.unwrap_or(value)
}

fn is_same(parameter: &Node, name: &str, place: &str) -> bool {
    let text = |member: &str| parameter.text(member).unwrap_or_default();
    text("in") == place && text("name").eq_ignore_ascii_case(name)
}

fn parameter(operation: &Operation, name: &str, place: &str) -> Value {
    json!({
        "name": name,
        "in": place,
        "required": is_required(operation),
        "description": description(operation),
        "schema": key_schema(operation),
    })
}

fn first_sent(operation: &Operation, first: &FirstSent) -> Value {
    json!({
        "name": first.header,
        "in": "header",
        "required": operation.is_required,
        "description": format!(
            "Required with a key: the time at which the request was sent first, the same in every retry, less than {} seconds ago.",
            first.max_age.as_secs()
        ),
        "schema": {"type": "string", "examples": ["Sun, 06 Nov 1994 08:49:37 GMT"]},
    })
}

/// Returns true if the key is required and has one place only: if there are several, none of them alone is required.
fn is_required(operation: &Operation) -> bool {
    operation.is_required && operation.carriers.len() == 1
}

fn description(operation: &Operation) -> String {
    format!(
        "One key for each intent, the same in every retry. The first response is kept for {} seconds.",
        operation.retention.as_secs()
    )
}

/// The schema of a key.
fn key_schema(operation: &Operation) -> Value {
    let mut schema = json!({"type": "string", "minLength": 1, "maxLength": 255});
    match operation.format.split_once(':') {
        None if operation.format == "uuid" => schema["format"] = json!("uuid"),
        Some(("pattern", pattern)) => schema["pattern"] = json!(format!("^(?:{pattern})$")),
        _ => {}
    }
    schema
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
