//! The files that these commands write and describe are those that the sidecar reads.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{init, schema, toml_value};
use crate::config::{Draft, Raw, SETTINGS, SettableIn, SettingValues, Source, parse_flags};

/// The first reason why a value does not have the form of a schema. Knows the keywords that our schema uses.
fn fault(value: &Value, schema: &Value, place: &str) -> Option<String> {
    let members = schema.as_object().unwrap();
    for (keyword, rule) in members {
        let found = match keyword.as_str() {
            "type" => {
                let types: Vec<_> = match rule {
                    Value::Array(types) => types.iter().map(|name| name.as_str().unwrap()).collect(),
                    name => vec![name.as_str().unwrap()],
                };
                let fits = types.iter().any(|name| match *name {
                    "string" => value.is_string(),
                    "integer" => value.is_i64(),
                    "number" => value.is_number(),
                    "boolean" => value.is_boolean(),
                    "array" => value.is_array(),
                    "object" => value.is_object(),
                    other => panic!("the type {other}"),
                });
                (!fits).then(|| format!("{place}: {value} is none of {types:?}"))
            }
            "enum" => (!rule.as_array().unwrap().contains(value))
                .then(|| format!("{place}: {value} is none of {rule}")),
            "anyOf" => {
                let faults: Vec<_> =
                    rule.as_array().unwrap().iter().map(|one| fault(value, one, place)).collect();
                if faults.iter().any(Option::is_none) { None } else { faults.into_iter().flatten().next() }
            }
            "minimum" | "maximum" => {
                let (number, limit) = (value.as_f64(), rule.as_f64().unwrap());
                let fits = |number: f64| if keyword == "minimum" { number >= limit } else { number <= limit };
                number
                    .filter(|number| !fits(*number))
                    .map(|number| format!("{place}: {number} is beyond {limit}"))
            }
            "pattern" => {
                assert_eq!(rule, "^/");
                value.as_str().filter(|text| !text.starts_with('/')).map(|text| format!("{place}: {text}"))
            }
            "items" => value
                .as_array()
                .into_iter()
                .flatten()
                .find_map(|item| fault(item, rule, &format!("{place}[]"))),
            "properties" => value.as_object().into_iter().flatten().find_map(|(name, value)| {
                rule.get(name).and_then(|rule| fault(value, rule, &format!("{place}.{name}")))
            }),
            "additionalProperties" => {
                assert_eq!(rule, false);
                let known = schema["properties"].as_object().unwrap();
                let unknown =
                    value.as_object().into_iter().flatten().find(|(name, _)| !known.contains_key(*name));
                unknown.map(|(name, _)| format!("{place}: no property {name}"))
            }
            "required" => rule
                .as_array()
                .unwrap()
                .iter()
                .find(|name| value.get(name.as_str().unwrap()).is_none())
                .map(|name| format!("{place}: {name} is missing")),
            "$schema" | "title" | "description" | "default" => None,
            other => panic!("the keyword {other}"),
        };
        if found.is_some() {
            return found;
        }
    }
    None
}

fn fault_of_file(text: &str) -> Option<String> {
    let value: Value = match toml::from_str(text) {
        Ok(value) => value,
        Err(error) => return Some(error.to_string()),
    };
    fault(&value, &schema::schema(), "")
}

/// The errors of a file, as the sidecar reads it.
fn errors_of_file(text: &str) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("oncegate.toml");
    fs::write(&file, text).unwrap();
    let flags = parse_flags(&["--config", file.to_str().unwrap()]).unwrap();
    let problems = Draft::read(&flags, []).problems;
    problems.iter().filter(|problem| problem.is_error()).map(ToString::to_string).collect()
}

#[test]
fn a_new_file_is_accepted_and_so_is_each_of_its_examples() {
    let text = init::text();
    assert_eq!(errors_of_file(&text), [""; 0]);
    assert_eq!(fault_of_file(&text), None);
    assert!(text.lines().all(|line| line.chars().count() <= 160), "{text}");
    let schema = schema::schema();
    for setting in SETTINGS {
        if matches!(setting.settable_in, SettableIn::Start | SettableIn::Secret) {
            assert!(!text.contains(&format!("#{} = ", setting.name)), "{}", setting.name);
            continue;
        }
        let raw = init::example(setting).unwrap_or_else(|| panic!("{} has no example", setting.name));
        let line = format!("{} = {}\n", setting.name, toml_value(setting, &raw));
        assert!(text.contains(&line), "{line}");
        (setting.set)(&mut SettingValues::default(), &raw, &Source::Default)
            .unwrap_or_else(|errors| panic!("{line}: {errors:?}"));
        let value: Value = toml::from_str(&line).unwrap_or_else(|error| panic!("{line}: {error}"));
        assert_eq!(fault(&value, &schema, ""), None, "{line}");
    }
    // The examples of routes, too.
    let routes = text.rsplit_once("# ==== Routes").unwrap().1;
    let routes: String = routes
        .lines()
        .filter_map(|line| line.strip_prefix('#'))
        .filter(|line| !line.starts_with(' '))
        .map(|line| format!("{line}\n"))
        .collect();
    let whole = format!("to = \"http://127.0.0.1:3000\"\n{routes}");
    assert!(routes.starts_with("[[route]]"), "{routes}");
    assert_eq!((errors_of_file(&whole), fault_of_file(&whole)), (Vec::new(), None));
}

#[test]
fn the_schema_refuses_what_the_sidecar_refuses() {
    for (text, expected) in [
        ("leese = \"1s\"", "no property leese"),
        ("on-abandoned = \"parc\"", "is none of"),
        ("require-key = \"yes\"", "is none of"),
        ("trace-sample-ratio = 1.5", "1.5 is beyond 1"),
        ("trace-sample-ratio = -1", "-1 is beyond 0"),
        ("lease = 1.5", "is none of"),
        ("[[route]]\nlease = \"1s\"", "\"path\" is missing"),
        ("[[route]]\npath = \"/x\"\nlisten = \"127.0.0.1:1\"", "no property listen"),
        ("[fingerprint]\nexclud = [\"/a\"]", "no property exclud"),
        ("admin-token = \"0123456789abcdef\"", "no property admin-token"),
    ] {
        let fault = fault_of_file(text).unwrap_or_else(|| panic!("{text}"));
        assert!(fault.contains(expected), "{text}: {fault}");
        assert!(!errors_of_file(text).is_empty(), "{text}");
    }
}

/// Markdown files below a directory.
fn pages(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            pages(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

#[test]
fn examples_in_the_documentation_have_the_form_of_the_schema() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = vec![root.join("README.md"), root.join("GUARANTEES.md")];
    pages(&root.join("docs"), &mut files);
    pages(&root.join("examples"), &mut files);
    let mut seen = 0;
    let mut faults = Vec::new();
    // The file of the probe describes requests.
    for file in files.into_iter().filter(|file| !file.ends_with("docs/reference/probe.md")) {
        let text = fs::read_to_string(&file).unwrap();
        for block in text.split("```toml\n").skip(1) {
            let block = block.split("```").next().unwrap();
            // Files of Cargo and profiles are other files.
            let is_other = [
                "[dependencies]", "[profile.release]", "features = [", "[package]", "[dev-dependencies]",
                "extends =", "[responses", "[refusal", "[settings]",
            ]
            .iter()
            .any(|mark| block.contains(mark));
            if is_other {
                continue;
            }
            seen += 1;
            faults.extend(fault_of_file(block).map(|fault| format!("{}: {fault}\n{block}", file.display())));
        }
    }
    assert!(seen >= 4, "{seen} examples");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn a_ratio_is_a_number_or_a_text() {
    for value in ["1", "0", "1.0", "0.25", "2.5e-1", "\"0.25\""] {
        let text = format!("to = \"http://127.0.0.1:3000\"\ntrace-sample-ratio = {value}\n");
        assert_eq!((errors_of_file(&text), fault_of_file(&text)), (Vec::new(), None), "{value}");
    }
    for value in ["inf", "nan", "true", "[1]"] {
        let text = format!("to = \"http://127.0.0.1:3000\"\ntrace-sample-ratio = {value}\n");
        let errors = errors_of_file(&text);
        assert!(errors.len() == 1 && errors[0].contains("trace-sample-ratio: "), "{value}: {errors:?}");
    }
}

#[test]
fn secrets_are_left_out_and_what_is_shown_cannot_be_used_without_them() {
    use crate::config::{Setting, read_store, without_secrets};
    let store = Setting::named("store").unwrap();
    for (text, shown) in [
        ("postgres://app:hunter2@db/shop?sslmode=require", "postgres://…@db/shop?…"),
        ("postgres://db/shop?sslmode=verify-full", "postgres://db/shop?…"),
        ("postgres://db/shop", "postgres://db/shop"),
        ("redis://:hunter2@cache:6379/0", "redis://…@cache:6379/0"),
        ("./data", "./data"),
    ] {
        assert_eq!(without_secrets(store, text), shown);
    }
    let cached = "cached(cache=redis://:hunter2@h,store=postgres://u:hunter2@db/shop)";
    let shown = without_secrets(store, cached);
    assert!(!shown.contains("hunter2") && !shown.contains("u:") && read_store(&shown).is_err(), "{shown}");
    assert!(read_store("postgres://db/shop?…").is_err());
    let keys = Setting::named("jwt-keys").unwrap();
    assert_eq!(without_secrets(keys, "https://u:p@issuer/keys?token=x"), "https://…@issuer/keys?…");
    assert_eq!(without_secrets(keys, "/etc/keys.json"), "/etc/keys.json");
}

#[test]
fn values_are_written_as_toml() {
    use crate::config::Setting;
    let methods = Setting::named("methods").unwrap();
    assert_eq!(toml_value(methods, &Raw::Text("POST, PUT".to_owned())), "[\"POST\", \"PUT\"]");
    let limit = Setting::named("max-in-flight").unwrap();
    assert_eq!(toml_value(limit, &Raw::Text("2048".to_owned())), "2048");
    let ratio = Setting::named("trace-sample-ratio").unwrap();
    for (text, written) in [("1", "1"), ("0.25", "0.25"), ("1.0", "1.0")] {
        assert_eq!(toml_value(ratio, &Raw::Text(text.to_owned())), written);
    }
    let format = Setting::named("key-format").unwrap();
    assert_eq!(
        toml_value(format, &Raw::Text("pattern:\\d\"\u{7}".to_owned())),
        "\"pattern:\\\\d\\\"\\u0007\""
    );
}
