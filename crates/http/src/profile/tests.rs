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
    let text = RefusalText {
        condition,
        status,
        detail: condition.detail(),
        record: None,
        retry_after: None,
        message_id: None,
    };
    serde_json::from_str(&profile.refusal_body(&text).0).unwrap()
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
    let text = RefusalText {
        condition,
        status: condition.status(),
        detail: "why",
        record: Some(record),
        retry_after: None,
        message_id: None,
    };
    let problem: Value = serde_json::from_str(&profile.refusal_body(&text).0).unwrap();
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
    for (condition, expected) in
        [(Condition::RequestInProgress, "true"), (Condition::OutcomeUnknown, "false")]
    {
        let mut headers = HeaderMap::new();
        stripe.mark_refusal(&mut headers, condition);
        assert_eq!(headers["stripe-should-retry"], expected);
    }
    let mut headers = HeaderMap::new();
    shipped("oasis").mark_replay(&mut headers);
    assert_eq!(headers["repeatability-result"], "accepted");
}

#[test]
fn only_a_refusal_of_the_request_itself_says_that_nothing_was_executed() {
    let oasis = shipped("oasis");
    for condition in Condition::ALL {
        let mut headers = HeaderMap::new();
        oasis.mark_refusal(&mut headers, condition);
        // An earlier request may have been executed, or may be running.
        let is_silent = condition.retry() == RetryAdvice::SameKey
            || (condition.retry() == RetryAdvice::Stop && condition != Condition::KeyExpired);
        let result = headers.get("repeatability-result").map(HeaderValue::as_bytes);
        assert!(!is_silent || result.is_none(), "{condition}");
        let expected =
            [Condition::KeyInvalid, Condition::KeyReused, Condition::KeyUnsupported, Condition::KeyExpired];
        assert!(!expected.contains(&condition) || result == Some(b"rejected"), "{condition}");
    }
    let mut headers = HeaderMap::new();
    // A retry whose token has expired: the first request may have been executed.
    oasis.mark_refusal(&mut headers, Condition::ScopeUnavailable);
    assert!(headers.is_empty());
}

#[test]
fn a_rate_limit_is_no_fault_of_the_request_in_any_dialect() {
    for name in Profile::names() {
        let (limited, invalid) = [Condition::RateLimited, Condition::RequestTooLarge]
            .map(|own| refused(&shipped(name), own))
            .into();
        assert_ne!(limited, invalid, "{name}");
    }
    for (name, pointer, expected) in [
        ("aws", "/__type", "ThrottlingException"),
        ("square", "/errors/0/category", "RATE_LIMIT_ERROR"),
        ("paypal", "/name", "RATE_LIMIT_REACHED"),
        ("stripe", "/error/code", "rate_limit"),
        ("stripe-v2", "/error/code", "rate_limit"),
    ] {
        assert_eq!(refused(&shipped(name), Condition::RateLimited).pointer(pointer).unwrap(), expected);
    }
}

#[test]
fn every_mistake_in_a_file_is_reported_with_its_place() {
    let text = r#"extends = "ietff"
title = 7
key-header = ["Content-Type", "a b"]
key-sintax = "raw"
key-scope = "endpint"
methods = ["POST", "GET", "put"]
retention = "1y"
release-statuses = ["4xx", "200"]
replay-statuses = { 201 = "x", 200 = 999, 202 = 204, 400 = 201 }
replay-marker = "Content-Type: true"

[fingerprint]
body = "hash"
exclude = ["meta"]

[headers.respons]
a = "b"

[headers.response]
"Set-Cookie" = "x"
"X-Old" = "{request:id}"
"X-Line" = "a\nb"
"X-Case" = "{Retryable}"

[refusal]
media-type = "json"
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
        "6:27: methods: \"put\" is not a method; did you mean `PUT`?",
        "7:13: retention: \"1y\" is not a duration; write a number and a unit, such as \"24h\" or \"30d\"",
        "8:28: release-statuses: \"200\" is not one of \"400\" to \"599\", \"4xx\", \"5xx\"",
        "9:27: replay-statuses: write two statuses from 200 to 599, such as 201 = 200",
        "9:38: replay-statuses: write two statuses from 200 to 599, such as 201 = 200",
        "9:49: replay-statuses: a replay cannot have 204",
        "9:60: replay-statuses: a replay of 400",
        "10:17: replay-marker: the header field content-type has another purpose; it cannot mark a replay",
        "13:8: fingerprint.body: \"hash\" is not one of canonical, raw, nothing",
        "14:12: fingerprint.exclude: \"meta\" is not a JSON pointer:",
        "16:10: no such key `respons`; did you mean `response`?",
        "20:16: headers.response: the header field set-cookie has another purpose, or must not be stored",
        "21:11: headers.response: no such name {request:id}",
        "22:12: headers.response: \"a\\nb\" is not the value of a header field",
        "23:12: headers.response: no such name {Retryable}",
        "26:14: refusal.media-type: \"json\" is not a media type; write one such as \"application/json\"",
        "27:8: refusal.body: no such name {details}",
        "29:10: no such key `key-reusd`; did you mean `key-reused`?",
        "33:10: refusal.key-missing.status: write a status from 400 to 599, without quotes",
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
            "3:8: refusal.body: the body of key-missing is not JSON",
        ),
        (
            "title = \"t\"\n[refusal]\nmedia-type = \"application/JSON\"\nbody = '{\"a\":[{instance}]}'",
            "4:8: refusal.body: the body of key-missing is not JSON",
        ),
        ("title = \"t\"\nmethods = []", "2:11: methods: the list is empty"),
        (
            "title = \"t\"\nkey-header = [\"X-A\", \"x-a\"]",
            "2:14: key-header: the header field X-A is there twice",
        ),
        ("title = \"t\"\nkey-query = [\"\"]", "2:14: key-query: \"\" is not the name of a parameter"),
        (
            "title = \"t\"\nkey-member = [\"/items/0/key\"]",
            "2:15: key-member: \"/items/0/key\" goes through a list",
        ),
        (
            "title = \"t\"\nfirst-sent-header = \"Host\"",
            "2:21: first-sent-header: the header field Host has another",
        ),
        (
            "title = \"t\"\nfirst-sent-header = \"Idempotency-Key\"",
            "2:21: first-sent-header: the header field Idempotency-Key carries the key",
        ),
        ("title = \"t\"\nreplay-marker = \"X-A:\"", "2:17: replay-marker: \"X-A:\" has no value"),
        (
            "title = \"t\"\nkey-header = [\"X-A\"]\nreplay-marker = \"X-A: 1\"",
            "3:17: replay-marker: the header field X-A carries the key",
        ),
        (
            "title = \"t\"\n[headers.response]\n\"Idempotent-Replayed\" = \"true\"",
            "2:2: headers: the header field Idempotent-Replayed marks replays",
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
fn rows_of_tables_are_added_to_those_of_the_profile_that_is_extended() {
    let ours = Profile::parse(
        "ours",
        "title = \"Ours\"\nextends = \"stripe\"\nreplay-statuses = { 202 = 200 }\n[headers.refusal]\n\"X-Retryable\" = \"{retryable}\"\n\
         [headers.response]\n\"Original-Request\" = \"\"\n[fingerprint]\nexclude = [\"/at\"]\nheaders = [\"X-Version\"]\n",
    )
    .unwrap();
    let value = |profile: &Profile, key: &str| {
        profile.rows().into_iter().find(|(own, _)| *own == key).map(|(_, value)| value)
    };
    assert_eq!(
        value(&ours, "headers.refusal").unwrap(),
        "Stripe-Should-Retry: {retryable}, X-Retryable: {retryable}"
    );
    assert_eq!(value(&ours, "headers.response"), None);
    assert_eq!(value(&ours, "fingerprint.headers").unwrap(), "X-Version");
    assert_eq!(ours.fingerprint.excluded().len(), 1);
    assert_eq!(value(&shipped("aws"), "key-header").unwrap(), "–");
    let ours = "title = \"Ours\"\nextends = \"paypal\"\nreplay-statuses = { 202 = 200 }\n";
    assert_eq!(Profile::parse("ours", ours).unwrap().replay_statuses.len(), 2);
}

#[test]
fn texts_in_bodies_are_escaped_by_their_media_type() {
    for (media_type, expected) in [
        ("application/json", "<e>a \\\"b\\\" & c</e>"),
        ("application/xml", "<e>a &quot;b&quot; &amp; c</e>"),
        ("text/plain", "<e>a \"b\" & c</e>"),
    ] {
        let mut profile = Profile::default();
        profile.refusal.media_type = media_type.parse().unwrap();
        profile.refusal.body = Template::parse("<e>{detail}</e>", BodyPart::named).unwrap();
        let condition = Condition::KeyInvalid;
        let status = condition.status();
        let detail = "a \"b\" & c";
        let text =
            RefusalText { condition, status, detail, record: None, retry_after: None, message_id: None };
        assert_eq!(profile.refusal_body(&text).0, expected);
    }
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
