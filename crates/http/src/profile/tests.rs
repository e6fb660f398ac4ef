use std::collections::HashSet;

use http::header::HeaderMap;
use oncegate_core::RecordId;
use serde_json::{Value, json};

use super::*;

fn shipped(name: &str) -> Profile {
    Profile::named(name).unwrap()
}

fn refused(profile: &Profile, condition: Condition) -> Value {
    let status = profile.refusal_status(condition);
    serde_json::from_str(&profile.refusal_body(condition, status, condition.detail(), None)).unwrap()
}

#[test]
fn every_shipped_profile_can_be_read_and_says_what_it_follows() {
    for (name, text) in SHIPPED {
        let profile = Profile::parse(name, text).unwrap_or_else(|errors| panic!("{name}: {errors}"));
        assert_eq!(profile.name(), name);
        assert!(!profile.title().is_empty() && !profile.sources().is_empty(), "{name}");
    }
}

#[test]
fn the_default_is_the_profile_ietf() {
    let file = shipped("ietf");
    let default = Profile {
        title: file.title.clone(),
        sources: file.sources.clone(),
        deviations: file.deviations.clone(),
        ..Profile::default()
    };
    assert_eq!(format!("{default:#?}"), format!("{file:#?}"));
}

#[test]
fn refusals_of_ietf_are_problem_details_with_the_titles_of_the_draft() {
    let profile = Profile::default();
    let problem = refused(&profile, Condition::KeyMissing);
    assert_eq!(problem["title"], "Idempotency-Key is missing");
    assert_eq!(problem["status"], 400);
    assert_eq!(problem["type"], "urn:oncegate:problem:key-missing");
    assert_eq!(problem["retry"], "fix-request");
    assert!(problem["instance"].is_null());
    let (condition, record) = (Condition::OutcomeUnknown, RecordId::from_bytes([0xab; 32]));
    let text = profile.refusal_body(condition, condition.status(), "why", Some(record));
    let problem: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(problem["instance"], format!("urn:oncegate:record:{}", "ab".repeat(32)));
    assert_eq!(refused(&profile, Condition::KeyReused)["title"], "Idempotency-Key is already used");
    assert_eq!(
        refused(&profile, Condition::RequestInProgress)["title"],
        "A request is outstanding for this Idempotency-Key"
    );
}

#[test]
fn every_profile_refuses_for_every_condition_in_complete_json() {
    for name in Profile::names() {
        let profile = shipped(name);
        for condition in Condition::ALL {
            let text = refused(&profile, condition).to_string();
            assert!(!text.contains("{}"), "{name} {condition}: {text}");
            let has_detail = text.contains(&Value::from(condition.detail()).to_string()[1..20]);
            assert!(has_detail || !text.contains("detail"), "{name} {condition}: {text}");
            let status = profile.refusal_status(condition);
            assert!(status.is_client_error() || status.is_server_error(), "{name} {condition}");
        }
        // Clients retry a 409 by themselves, so nothing else may have it.
        for condition in Condition::ALL.into_iter().filter(|own| *own != Condition::RequestInProgress) {
            assert_ne!(profile.refusal_status(condition), 409, "{name} {condition}");
        }
    }
}

#[test]
fn refusals_have_the_shapes_of_their_apis() {
    let stripe = refused(&shipped("stripe"), Condition::KeyReused);
    assert_eq!(stripe["error"]["type"], "idempotency_error");
    assert_eq!(shipped("stripe").refusal_status(Condition::KeyReused), 400);
    assert_eq!(
        refused(&shipped("stripe-v2"), Condition::RequestInProgress)["error"]["code"],
        "idempotency_key_in_use"
    );
    let expected = json!({
        "error": "Conflict",
        "message": Condition::RequestInProgress.detail(),
        "type": "urn:oncegate:problem:request-in-progress",
        "retry": "same-key",
    });
    assert_eq!(refused(&shipped("classic"), Condition::RequestInProgress), expected);
    let acp = refused(&shipped("acp"), Condition::KeyReused);
    assert_eq!(
        (acp["type"].as_str(), acp["code"].as_str()),
        (Some("invalid_request"), Some("idempotency_conflict"))
    );
    let square = refused(&shipped("square"), Condition::KeyReused);
    assert_eq!(square["errors"][0]["code"], "IDEMPOTENCY_KEY_REUSED");
}

#[test]
fn fields_are_added_at_their_points() {
    let stripe = shipped("stripe");
    let mut headers = HeaderMap::new();
    stripe.mark_executed(&mut headers);
    assert!(headers.is_empty(), "the field that it repeats is not there");
    headers.insert("request-id", HeaderValue::from_static("req_1"));
    stripe.mark_executed(&mut headers);
    assert_eq!(headers["original-request"], "req_1");
    stripe.mark_kept_server_error(&mut headers);
    assert_eq!(headers["stripe-should-retry"], "false");
    for (advice, expected) in [(RetryAdvice::SameKey, "true"), (RetryAdvice::Stop, "false")] {
        let mut headers = HeaderMap::new();
        stripe.mark_refusal(&mut headers, advice);
        assert_eq!(headers["stripe-should-retry"], expected);
    }
    let mut headers = HeaderMap::new();
    shipped("oasis").mark_replay(&mut headers);
    assert_eq!(headers["repeatability-result"], "accepted");
}

#[test]
fn every_mistake_in_a_file_is_reported_with_its_place() {
    let text = r#"extends = "ietff"
title = 7
key-header = ["Content-Type", "a b"]
key-sintax = "raw"
key-scope = "endpint"
methods = ["POST", "GET"]
retention = "1y"
release-statuses = ["4xx", "200"]
replay-statuses = { 201 = "x" }
replay-marker = "Content-Type: true"

[fingerprint]
body = "hash"
exclude = ["meta"]

[headers.respons]
a = "b"

[headers.response]
"Set-Cookie" = "x"
"X-Old" = "{request:id}"

[refusal]
body = '{"error":"{details}"}'

[refusal.key-reusd]
status = 400

[refusal.key-missing]
status = 200
"#;
    let errors = Profile::parse("ours", text).unwrap_err();
    let shown: Vec<_> = errors.0.iter().map(ToString::to_string).collect();
    let expected = [
        "1:11: extends: there is no profile \"ietff\"; did you mean `ietf`?",
        "2:9: title: an integer instead of a text in quotes",
        "3:15: key-header: the header field Content-Type has another purpose; name a field that carries only keys",
        "3:31: key-header: \"a b\" is not the name of a header field",
        "4:1: no such key `key-sintax`; did you mean `key-syntax`?",
        "5:13: key-scope: \"endpint\" is not one of endpoint, caller; did you mean `endpoint`?",
        "6:20: methods: the method GET cannot be covered: a key protects requests that change something",
        "7:13: retention: \"1y\" is not a duration; write a number and a unit, such as \"24h\" or \"30d\"",
        "8:28: release-statuses: \"200\" is not one of \"400\" to \"599\", \"4xx\", \"5xx\"",
        "9:27: replay-statuses: write two statuses from 200 to 599, such as 201 = 200",
        "10:17: replay-marker: the header field content-type has another purpose; it cannot mark a replay",
        "13:8: fingerprint.body: \"hash\" is not one of canonical, raw, nothing",
        "14:12: fingerprint.exclude: \"meta\" is not a JSON pointer:",
        "16:10: no such key `respons`; did you mean `response`?",
        "20:16: headers.response: the header field set-cookie has another purpose, or must not be stored",
        "21:11: headers.response: no such name {request:id}",
        "24:8: refusal.body: no such name {details}",
        "26:10: no such key `key-reusd`; did you mean `key-reused`?",
        "30:10: refusal.key-missing.status: write a status from 400 to 599, without quotes",
    ];
    for (at, expected) in expected.into_iter().enumerate() {
        assert!(shown.get(at).is_some_and(|shown| shown.starts_with(expected)), "{expected}\n{shown:#?}");
    }
    assert_eq!(shown.len(), expected.len(), "{shown:#?}");
}

#[test]
fn a_file_that_is_not_toml_or_says_nothing_is_refused() {
    for (text, expected) in [
        ("title = ", "1:9: not TOML"),
        ("", "1:1: a profile has a title"),
        ("title = \"t\"\nkey-header = []", "2:14: key-header: nothing carries the key"),
        (
            "title = \"t\"\n[refusal]\nbody = '{\"a\":{status}'",
            "2:1: refusal.body: the body of key-missing is not JSON",
        ),
    ] {
        let errors = Profile::parse("ours", text).unwrap_err().to_string();
        assert!(errors.starts_with(expected), "{text}: {errors}");
    }
    assert!(Profile::parse("ours", &format!("#{}", " ".repeat(64 * 1024))).is_err());
}

#[test]
fn a_file_states_differences_from_the_profile_that_it_extends() {
    let ours =
        "title = \"Ours\"\nextends = \"stripe\"\nretention = \"7d\"\n[refusal.key-reused]\nstatus = 422\n";
    let (ours, stripe) = (Profile::parse("ours", ours).unwrap(), shipped("stripe"));
    assert_eq!(ours.retention, 7 * DAY);
    assert_eq!((ours.key_scope, &ours.methods), (stripe.key_scope, &stripe.methods));
    assert_eq!(ours.refusal_status(Condition::KeyReused), 422);
    assert_eq!(refused(&ours, Condition::KeyReused)["error"]["code"], "idempotency_key_reused");
    assert!(ours.sources().is_empty() && ours.deviations().is_empty());
}

#[test]
fn no_problem_type_is_used_twice() {
    let slugs: HashSet<_> = Condition::ALL.map(Condition::slug).into();
    assert_eq!(slugs.len(), Condition::ALL.len());
}

/// The page about the shipped profiles, as their files are.
fn page() -> String {
    let mut page = String::from(
        "# Shipped profiles\n\nThis page is made from the files in `crates/http/profiles/`. [Profiles](profiles.md) says what the keys mean, and \
         how to write a profile of your own.\n",
    );
    let cell = |text: &str| format!("`{}`", text.replace('|', "\\|"));
    let ietf = Profile::default();
    for name in Profile::names() {
        let profile = shipped(name);
        page += &format!("\n## {name}\n{}. Sources: ", profile.title());
        let sources: Vec<_> = profile.sources().iter().map(|source| format!("<{source}>")).collect();
        page += &format!("{}.\n\n", sources.join(", "));
        if !profile.deviations().is_empty() {
            page += "Deviations:\n";
            profile.deviations().iter().for_each(|text| page += &format!("- {text}\n"));
            page.push('\n');
        }
        page += "| key | value |\n|---|---|\n";
        let others = if name == "ietf" { Vec::new() } else { ietf.rows() };
        for row in profile.rows().into_iter().filter(|row| !others.contains(row)) {
            page += &format!("| `{}` | {} |\n", row.0, cell(&row.1));
        }
        page += "\n| condition | status | code | kind |\n|---|---|---|---|\n";
        for row in profile.refusals() {
            let word = |word: &Option<String>| word.as_ref().map_or("–".to_owned(), |word| cell(word));
            let status = row.status.as_u16();
            page +=
                &format!("| `{}` | {status} | {} | {} |\n", row.condition, word(&row.code), word(&row.kind));
        }
    }
    page
}

#[test]
fn the_page_about_the_shipped_profiles_shows_their_files() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/shipped-profiles.md");
    if std::env::var_os("ONCEGATE_WRITE_PAGES").is_some() {
        std::fs::write(path, page()).unwrap();
    }
    let stands = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        stands == page(),
        "write it anew: ONCEGATE_WRITE_PAGES=1 cargo test --package oncegate-http --lib page"
    );
}
