//! The files that these commands write and describe are those that the sidecar reads.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use serde_json::Value;

use super::{dump, init, schema, toml_value};
use crate::config::{
    Accepted, Draft, Raw, SETTINGS, SettableIn, Setting, SettingValues, Shape, Source, errors_in_values,
    parse_flags,
};

/// The schema, which takes time to make.
static SCHEMA: LazyLock<Value> = LazyLock::new(schema::schema);

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
                // A bound applies to numbers only.
                let (number, limit) = (value.as_f64(), rule.as_f64().unwrap());
                let fits = |number: f64| if keyword == "minimum" { number >= limit } else { number <= limit };
                number
                    .filter(|number| !fits(*number))
                    .map(|number| format!("{place}: {number} is beyond {limit}"))
            }
            "pattern" => {
                let pattern = regex_lite::Regex::new(rule.as_str().unwrap()).unwrap();
                value
                    .as_str()
                    .filter(|text| !pattern.is_match(text))
                    .map(|text| format!("{place}: {text:?} does not match {pattern}"))
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

/// Texts and TOML values that are in the wrong form for some setting, or beyond its bounds, or right.
const VALUES: [&str; 64] = [
    "0", "1", "5", "422", "600", "65536", "65537", "1000001", "-1", "1.5", "0.25", "true", "[]", "[1]", "{}",
    "\"\"", "\"0\"", "\"1\"", "\"30\"", "\"65537\"", "\"0s\"", "\"0B\"", "\"1ms\"", "\"99ms\"", "\"100ms\"",
    "\"30s\"", "\"90m\"", "\"24h\"", "\"25h\"", "\"400d\"", "\"401d\"", "\"5 s\"", "\"5S\"", "\"1B\"",
    "\"64kib\"", "\"2MiB\"", "\"65MiB\"", "\"1GiB\"", "\"1025MiB\"", "\"1024GiB\"", "\"1025GiB\"", "\"64K\"",
    "\"none\"", "\"auto\"", "\"any\"", "\"uuid4\"", "\"pattern:x\"", "\"ietf\"", "\"ietff\"",
    "\"./missing\"", "\"park\"", "\"parc\"", "\"true\"", "\"POST\"", "\"post\"", "\"X Y\"", "\"/a\"",
    "\"10/s\"", "\"10/w\"", "\"399\"", "\"4xx\"", "\"2.5e-1\"", "\"+5\"", "\"007\"",
];

/// Forms that only the reader judges: the schema accepts more.
fn is_judged_by_the_reader(setting: &Setting) -> bool {
    matches!((setting.accepted)(), Accepted::Text)
}

#[test]
fn the_schema_and_the_reader_agree_about_values() {
    let (mut refused, mut accepted) = (0, 0);
    for setting in SETTINGS.iter().filter(|setting| {
        !matches!(setting.settable_in, SettableIn::Start | SettableIn::Secret)
            && !is_judged_by_the_reader(setting)
    }) {
        for value in VALUES {
            let line = format!("{} = {value}\n", setting.name);
            let errors = errors_in_values(&line);
            let fault = fault(&toml::from_str(&line).unwrap(), &SCHEMA, "");
            // Of the texts that match a pattern, the reader refuses some, such as a method that cannot be covered. The schema
            // never refuses what the reader accepts, except for a number that stands for a text outside of a list.
            let is_exact = !matches!((setting.accepted)(), Accepted::Words(_, Some(_)));
            let is_lone_number = setting.shape == Shape::One && !value.contains('"');
            let is_as_expected = match is_exact {
                true => fault.is_some() != errors.is_empty(),
                false => fault.is_none() || !errors.is_empty() || is_lone_number,
            };
            assert!(is_as_expected, "{line}: {fault:?}, {errors:?}");
            *(if fault.is_some() { &mut refused } else { &mut accepted }) += 1;
        }
    }
    assert!(refused > 2000 && accepted > 400, "{refused} {accepted}");
}

#[test]
fn the_words_and_bounds_of_a_setting_are_in_its_help() {
    for setting in SETTINGS {
        match (setting.accepted)() {
            Accepted::Words(words, None) if setting.shape != Shape::Switch => {
                let in_help = words.iter().all(|word| setting.help.contains(word));
                let in_placeholder = setting.value.split('|').eq(words.iter().copied());
                assert!(in_placeholder || in_help, "{}: {words:?}", setting.name);
            }
            Accepted::Words(words, Some(_)) => {
                for word in words {
                    let is_there = setting.help.contains(&format!("`{word}`"))
                        || setting.help.contains("Written and counted as rate-limit.caller.");
                    assert!(is_there, "{}: {word}", setting.name);
                }
            }
            Accepted::Number(_, Some(max), _) if max != 599 => {
                assert!(setting.help.contains(&format!("t most {max}.")), "{}: {max}", setting.name);
            }
            Accepted::Quantity(quantity) => {
                let (min, max) = quantity.bounds();
                let both = format!("rom {} to {}", min.unwrap_or("0s"), max.unwrap_or_default());
                let is_there = |words: String| setting.help.contains(&both) || setting.help.contains(&words);
                assert!(
                    min.is_none_or(|min| is_there(format!("t least {min}"))),
                    "{}: {min:?}",
                    setting.name
                );
                assert!(max.is_none_or(|max| is_there(format!("t most {max}"))), "{}: {max:?}", setting.name);
            }
            _ => {}
        }
    }
}

#[test]
fn comments_of_a_new_file_show_values_as_the_file_needs_them() {
    for setting in SETTINGS.iter().filter(|setting| setting.settable_in != SettableIn::Secret) {
        let description = init::description(setting);
        assert!(!description.contains(" --") && !description.contains("with commas"), "{description}");
        if setting.shape != Shape::Many {
            continue;
        }
        for part in description.split('`').skip(1).step_by(2).filter(|part| part.contains(',')) {
            let errors = errors_in_values(&format!("{} = {part}\n", setting.name));
            assert_eq!(errors, [""; 0], "{description}");
        }
    }
    let description = |name| init::description(Setting::named(name).unwrap());
    assert!(description("methods").contains("by profile, [\"POST\", \"PATCH\"] in ietf"));
    assert!(description("jwt-algorithms").contains("Default: [\"RS256\", \"ES256\", \"EdDSA\"]."));
    assert!(description("scope").contains("`[\"required-header:x-tenant\", \"cookie:sid\"]`"));
    assert!(description("trusted-proxies").contains("Write several as a list."));
}

fn fault_of_file(text: &str) -> Option<String> {
    let value: Value = match toml::from_str(text) {
        Ok(value) => value,
        Err(error) => return Some(error.to_string()),
    };
    fault(&value, &SCHEMA, "")
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
        assert_eq!(fault(&value, &SCHEMA, ""), None, "{line}");
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
        ("profile = \"stripee\"", "is none of"),
        ("lease = \"99ms\"", "does not match"),
        ("lease = \"61m\"", "does not match"),
        ("wait = 5", "5 is beyond 0"),
        ("retention = \"401d\"", "does not match"),
        ("max-request-body = 65536", "65536 is beyond 0"),
        ("max-request-body = \"65536\"", "does not match"),
        ("max-response-body = \"65MiB\"", "does not match"),
        ("store-memory = \"1023KiB\"", "does not match"),
        ("max-in-flight = 65537", "65537 is beyond 65536"),
        ("max-in-flight = 0", "0 is beyond 1"),
        ("max-in-flight = \"0\"", "does not match"),
        ("release-statuses = [422, 600]", "600 is beyond 599"),
        ("jwt-algorithms = [\"RS256\", \"none\"]", "is none of"),
        ("trusted-proxies = \"localhost\"", "is none of"),
        ("key-header = [\"X Y\"]", "does not match"),
        ("key-format = \"uuid4\"", "is none of"),
        ("rate-limit = { caller = \"10/w\" }", "is none of"),
        ("methods = [\"post\"]", "does not match"),
        ("[[route]]\npath = \"/x\"\nlease = \"2h\"", "does not match"),
    ] {
        let fault = fault_of_file(text).unwrap_or_else(|| panic!("{text}"));
        assert!(fault.contains(expected), "{text}: {fault}");
        assert!(!errors_of_file(text).is_empty(), "{text}");
    }
}

/// A configuration with routes that have much of their own.
const RICH: &str = r#"
    to = "http://127.0.0.1:3000"
    store = "./records"
    scope = ["required-header:x-tenant", "cookie:sid"]
    methods = ["POST", "PUT"]
    trusted-proxies = ["loopback", "10.0.0.0/8"]
    max-request-body = "100B"
    max-in-flight = 100
    trace-sample-ratio = 0.25
    otlp-endpoint = "http://127.0.0.1:4318"
    stored-headers = []
    rate-limit = { caller = "10/s burst 50" }
    [[route]]
    path = "/payments/{id}"
    method = "POST"
    key-format = "pattern:[a-z]{1,9}\\d"
    release-statuses = [400, "422"]
    fingerprint = { exclude = ["/meta"], headers = ["x-version"] }
    upstream-timeout = "none"
    [[route]]
    path = "/orders"
    replay-marker = "X-Again"
    natural-key = "/customer"
    cors = { allowed-origins = ["https://shop.example"], max-age = 0 }
"#;

/// The lines of a dump, each without its mark of a comment and its source.
fn values_of(dump: &str) -> Vec<String> {
    let lines = dump.lines().filter(|line| !line.starts_with("# ") && line.contains(" = "));
    let values = lines.map(|line| line.rsplit_once("  # ").map_or(line, |(value, _)| value));
    values.map(|value| value.trim_start_matches('#').trim_end().to_owned()).collect()
}

#[test]
fn what_is_dumped_is_accepted_again() {
    let mut seen = 0;
    for profile in oncegate_http::Profile::names() {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (dir.path().join("first.toml"), dir.path().join("second.toml"));
        // Natural keys are not for calls of tools.
        let rich = match profile {
            "mcp" => RICH.replace("natural-key", "#natural-key"),
            _ => RICH.to_owned(),
        };
        fs::write(
            &first,
            format!(
                "profile = {profile:?}\n{rich}\n[[route]]\npath = \"/webhooks\"\nprofile = \"webhook\"\n"
            ),
        )
        .unwrap();
        let dumped =
            |file: &Path| dump::text_of(&parse_flags(&["--config", file.to_str().unwrap()]).unwrap());
        let text = dumped(&first);
        // As a whole: the same values have effect again.
        fs::write(&second, &text).unwrap();
        assert_eq!(fault_of_file(&text), None, "{text}");
        let without_path = |text: &str| {
            values_of(text).into_iter().filter(|line| !line.starts_with("config = ")).collect::<Vec<_>>()
        };
        assert_eq!(without_path(&dumped(&second)), without_path(&text), "{text}");
        // Each line also alone: the mark of a comment can be removed to change it.
        for line in without_path(&text).into_iter().filter(|line| !line.starts_with("path = ")) {
            let errors = errors_in_values(&line);
            assert_eq!(errors, [""; 0], "{profile}: {line}");
            assert_eq!(fault_of_file(&line), None, "{profile}: {line}");
            seen += 1;
        }
    }
    assert!(seen > 500, "{seen}");
}

#[test]
fn example_files_have_the_form_of_the_schema() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut seen = 0;
    for name in ["deploy", "examples"] {
        for file in files(&root.join(name), "toml").into_iter().filter(|file| is_of_a_sidecar(file)) {
            let fault = fault_of_file(&fs::read_to_string(&file).unwrap());
            assert_eq!(fault, None, "{}", file.display());
            seen += 1;
        }
    }
    assert!(seen >= 1, "{seen} files");
}

/// Returns true for a file of the sidecar, and false for one of Cargo or a profile.
fn is_of_a_sidecar(file: &Path) -> bool {
    let text = fs::read_to_string(file).unwrap();
    text.lines().any(|line| line.trim_start_matches('#').starts_with("to = "))
}

/// The files below a directory whose names end so.
fn files(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        let is_installed = path.file_name().is_some_and(|name| name == "node_modules" || name == "target");
        if path.is_dir() && !is_installed {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|own| own == extension) {
            found.push(path);
        }
    }
    found
}

#[test]
fn examples_in_the_documentation_have_the_form_of_the_schema() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages = vec![root.join("README.md"), root.join("GUARANTEES.md")];
    pages.extend(["docs", "examples"].into_iter().flat_map(|name| files(&root.join(name), "md")));
    let mut seen = 0;
    let mut faults = Vec::new();
    // The file of the probe describes requests.
    for file in pages.into_iter().filter(|file| !file.ends_with("docs/reference/probe.md")) {
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
    use crate::config::{read_store, shown_value};
    let without_secrets =
        |setting: &Setting, text: &str| match shown_value(setting, &Raw::Text(text.to_owned())) {
            Raw::Text(shown) => shown,
            Raw::List(words) => panic!("{words:?}"),
        };
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
    // Any argument of a command may be a secret.
    let command = Setting::named("seal-keys-command").unwrap();
    for (text, shown) in [
        ("env,VAULT_PW=hunter2,print,hunter2", "env,VAULT_PW=…,…,…"),
        ("sh,-c,curl -H 'X-Vault-Token: hunter2' http://h/v1/x?version=2", "sh,…,…"),
        ("/usr/bin/curl,https://u:hunter2@kms/get?a=b,--pw=hunter2", "/usr/bin/curl,…,…"),
        ("print-keys,aHVudGVyMg==,JBSWY3DP====,HUNTER=", "print-keys,…,…,…"),
        ("curl -s -H X-Vault-Token:hunter2 https://vault/v1/k", "curl …"),
        ("/opt/bin/curl -H hunter2", "curl …"),
        ("VAULT_TOKEN=hunter2 vault", "…"),
        ("https://u:hunter2@kms/keys", "…"),
    ] {
        assert_eq!(without_secrets(command, text), shown);
        assert!(!shown.contains('…') || text != shown);
    }
}

#[test]
fn values_are_written_as_toml() {
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
