//! The golden vectors of the meaning of responses, which clients in other languages use too: `vectors/meanings.json`. With
//! `ONCEGATE_WRITE_VECTORS=1` the test writes the file from the code.

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use oncegate_http::{Condition, Profile, Refusal, Settings};
use serde_json::{Value, json};

use crate::policy::ServerErrorPolicy;
use crate::refusal::problem_statuses;
use crate::signals::{At, SIGNAL_RULES};
use crate::verdict::{Advice, AttemptContext, Doubt, Meaning, Protection, Verdict, judge};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/vectors/meanings.json");

const STATUSES: &[u16] = &[
    200, 201, 204, 300, 301, 302, 303, 304, 307, 308, 400, 401, 402, 403, 404, 405, 408, 409, 410, 412, 413,
    415, 421, 422, 423, 425, 426, 429, 431, 451, 500, 501, 502, 503, 504, 505, 511, 599,
];

const CONTEXTS: &[(&str, Protection, ServerErrorPolicy, bool)] = {
    use Protection::{Keyed, Once, Repeatable, Safe};
    use ServerErrorPolicy::{Again, Final, Unknown};
    &[
        ("keyed", Keyed, Again, false),
        ("keyed, in doubt", Keyed, Again, true),
        ("keyed, server errors final", Keyed, Final, false),
        ("keyed, server errors unknown, in doubt", Keyed, Unknown, true),
        ("safe, in doubt", Safe, Again, true),
        ("repeatable", Repeatable, Again, false),
        ("repeatable, in doubt", Repeatable, Again, true),
        ("once", Once, Again, false),
        ("once, in doubt", Once, Again, true),
    ]
};

struct Case {
    name: String,
    headers: Vec<(String, String)>,
    body: String,
}

fn case(name: impl Into<String>, headers: &[(&str, &str)], body: impl Into<String>) -> Case {
    let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    Case { name: name.into(), headers: headers.iter().map(owned).collect(), body: body.into() }
}

/// The body that has this text at a path such as `details[].issue`.
fn body_with(path: &str, text: &str) -> Value {
    let (first, rest) = path.split_once('.').unwrap_or((path, ""));
    if first.is_empty() {
        return text.parse::<u64>().map_or_else(|_| text.into(), Value::from);
    }
    match first.strip_suffix("[]") {
        Some(name) => json!({name: [{}, body_with(rest, text)]}),
        None => json!({first: body_with(rest, text)}),
    }
}

fn cases() -> Vec<Case> {
    const JSON: (&str, &str) = ("content-type", "application/json; charset=utf-8");
    let mut cases = vec![
        case("bare", &[], ""),
        case("a named error", &[JSON], r#"{"code":"insufficient_funds"}"#),
        case("a named error in another type", &[("content-type", "text/html")], r#"{"retry":"same-key"}"#),
        case("no type of a problem", &[JSON], r#"{"type":"about:blank"}"#),
        case("should retry", &[("stripe-should-retry", "true")], ""),
        case("should not retry", &[("stripe-should-retry", "false")], ""),
        case("a key in use by its code in other case", &[JSON], r#"{"errorCode":"REPLAY_UNAVAILABLE"}"#),
        case("broken JSON", &[JSON], r#"{"retry":"same-key""#),
        case("no replay", &[("idempotent-replayed", "false")], ""),
        case(
            "two headers of Oncegate",
            &[
                ("idempotency-status", "refused; problem=overloaded; retry=same-key"),
                ("idempotency-status", "refused; problem=overloaded; retry=same-key"),
            ],
            "",
        ),
        case("not a refusal", &[("idempotency-status", "not-stored")], ""),
    ];
    for word in ["same-key", "new-key", "fix-request", "stop", "unprotected"] {
        cases.push(case(format!("advice {word}"), &[JSON], json!({"retry": word}).to_string()));
        cases.push(case(
            format!("an unknown problem of Oncegate, {word}"),
            &[("idempotency-status", &format!("refused; problem=later-problem; retry={word}"))],
            "",
        ));
    }
    for rule in SIGNAL_RULES {
        let name = format!("{:?} by {:?}", rule.signal, rule.at);
        cases.push(match rule.at {
            At::Field(field, value) => case(name, &[(field, &value.to_uppercase())], ""),
            At::FieldUnless(field, _) => case(name, &[(field, "1763762400000")], ""),
            At::Member(path, text) => case(name, &[JSON], body_with(path, text).to_string()),
            At::Name(text) => case(name, &[JSON], json!({"error": {"code": text}}).to_string()),
            At::Problem(problem) => {
                let body = json!({"type": format!("urn:oncegate:problem:{problem}")}).to_string();
                case(name, &[JSON], body)
            }
        });
    }
    for condition in Condition::ALL {
        for profile in ["ietf", "stripe", "classic"] {
            let settings = Settings::new(Profile::named(profile).unwrap());
            let refusal = Refusal::new(condition).into_response(&settings, None);
            let kept =
                |name: &&HeaderName| *name != http::header::CONTENT_LENGTH && *name != http::header::DATE;
            let headers: Vec<_> = refusal
                .headers()
                .iter()
                .filter(|(name, _)| kept(name))
                .map(|(name, value)| (name.as_str(), value.to_str().unwrap()))
                .collect();
            let name = format!("{} of {profile}, {}", condition.slug(), refusal.status().as_u16());
            cases.push(case(name, &headers, std::str::from_utf8(refusal.body()).unwrap()));
        }
    }
    cases
}

fn word(meaning: Meaning) -> &'static str {
    match meaning {
        Meaning::Definite(Verdict::Done) => "done",
        Meaning::Definite(Verdict::Refused(Advice::FixRequest)) => "refused fix-request",
        Meaning::Definite(Verdict::Refused(Advice::NewKey)) => "refused new-key",
        Meaning::Definite(Verdict::Refused(Advice::Stop)) => "refused stop",
        Meaning::Definite(Verdict::TurnedAway) => "turned-away",
        Meaning::Definite(Verdict::Failed) => "failed",
        Meaning::Definite(Verdict::Unreplayable) => "unreplayable",
        Meaning::TurnedAway => "turned-away in-doubt",
        Meaning::Contested => "contested",
        Meaning::Again(Doubt::None) => "again nothing",
        Meaning::Again(Doubt::May) => "again maybe",
        Meaning::Again(Doubt::InProgress) => "again in-progress",
        Meaning::Unknown => "unknown",
    }
}

fn file() -> String {
    let about = "Golden vectors of the meaning of a response to a client that sends a request again under \
                 one key. `meanings` has for each context the meanings for `statuses`, in their order; a \
                 run of n equal meanings is [n, meaning]. `signals` are the rules by which signals are \
                 found, the first that applies counts; `problem_statuses` are the statuses that a refusal \
                 after which nothing was executed has. The algorithm is `judge` in \
                 crates/client/src/verdict.rs.";
    let signals: Vec<Value> = SIGNAL_RULES
        .iter()
        .map(|rule| {
            let at = match rule.at {
                At::Field(name, value) => json!({"header": name, "value": value}),
                At::FieldUnless(name, status) => json!({"header": name, "unless_status": status}),
                At::Member(path, text) => json!({"member": path, "value": text}),
                At::Name(text) => json!({"name": text}),
                At::Problem(problem) => json!({"problem": problem}),
            };
            json!({"signal": format!("{:?}", rule.signal), "at": at})
        })
        .collect();
    let problem_statuses: Vec<Value> = problem_statuses()
        .map(|(problem, http, grpc)| json!({"problem": problem, "http": http, "grpc": grpc}))
        .collect();
    let contexts: Vec<Value> = CONTEXTS
        .iter()
        .map(|(name, protection, server_errors, in_doubt)| {
            json!({
                "name": name,
                "protection": format!("{protection:?}").to_lowercase(),
                "server_errors": format!("{server_errors:?}").to_lowercase(),
                "in_doubt": in_doubt,
            })
        })
        .collect();
    let responses: Vec<String> = cases()
        .iter()
        .map(|case| {
            let mut headers = HeaderMap::new();
            for (name, value) in &case.headers {
                let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
                headers.append(name, HeaderValue::from_str(value).unwrap());
            }
            let meanings: serde_json::Map<String, Value> = CONTEXTS
                .iter()
                .map(|&(name, protection, server_errors, in_doubt)| {
                    let context = AttemptContext { protection, server_errors, in_doubt };
                    let mut runs: Vec<(usize, &str)> = Vec::new();
                    for status in STATUSES {
                        let status = StatusCode::from_u16(*status).unwrap();
                        let meaning = word(judge(context, status, &headers, case.body.as_bytes()));
                        match runs.last_mut() {
                            Some((count, last)) if *last == meaning => *count += 1,
                            _ => runs.push((1, meaning)),
                        }
                    }
                    (name.to_owned(), json!(runs))
                })
                .collect();
            json!({"name": case.name, "headers": case.headers, "body": case.body, "meanings": meanings})
                .to_string()
        })
        .collect();
    let lines = |values: &[Value]| values.iter().map(Value::to_string).collect::<Vec<_>>().join(",\n  ");
    format!(
        "{{\n \"about\": {},\n \"version\": 1,\n \"signals\": [\n  {}\n ],\n \"problem_statuses\": [\n  {}\n ],\n \
         \"contexts\": [\n  {}\n ],\n \"statuses\": {},\n \"responses\": [\n  {}\n ]\n}}\n",
        Value::from(about),
        lines(&signals),
        lines(&problem_statuses),
        lines(&contexts),
        json!(STATUSES),
        responses.join(",\n  "),
    )
}

#[test]
fn meanings() {
    let computed = file();
    if std::env::var_os("ONCEGATE_WRITE_VECTORS").is_some() {
        std::fs::write(FILE, &computed).unwrap();
    }
    let published = std::fs::read_to_string(FILE).unwrap();
    for (line, (published, computed)) in published.lines().zip(computed.lines()).enumerate() {
        assert_eq!(published, computed, "{FILE}:{}", line + 1);
    }
    assert_eq!(published.len(), computed.len());
}
