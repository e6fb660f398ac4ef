//! The golden vectors of the fingerprint, which other implementations use too: `vectors/fingerprints.json`.

use std::collections::HashMap;

use oncegate_core::{Fingerprint, FingerprintInput, FingerprintRules, JsonPointer};
use serde_json::Value;

fn vectors() -> Value {
    serde_json::from_str(include_str!("../../vectors/fingerprints.json")).unwrap()
}

fn text<'v>(case: &'v Value, member: &str) -> &'v str {
    case[member].as_str().unwrap_or_else(|| panic!("{member} in {case}"))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

fn body(case: &Value) -> Vec<u8> {
    match case["body_base64"].as_str() {
        Some(base64) => decode(base64),
        None => text(case, "body").into(),
    }
}

fn decode(base64: &str) -> Vec<u8> {
    const ALPHABET: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut out, mut bits, mut held) = (Vec::new(), 0u32, 0);
    for digit in base64.trim_end_matches('=').chars() {
        bits = bits << 6 | ALPHABET.find(digit).unwrap() as u32;
        held += 6;
        if held >= 8 {
            held -= 8;
            out.push((bits >> held) as u8);
        }
    }
    out
}

fn rules(case: &Value) -> FingerprintRules {
    let pointers = |kind: &str| list(&case[kind]).iter().map(|text| text.as_str().unwrap().parse().unwrap());
    let mut rules = FingerprintRules::new();
    if case["raw_bodies"].as_bool().unwrap() {
        rules = rules.with_raw_bodies();
    }
    rules = pointers("include").fold(rules, |rules, pointer: JsonPointer| rules.include(pointer));
    pointers("exclude").fold(rules, |rules, pointer: JsonPointer| rules.exclude(pointer))
}

fn fingerprint(case: &Value) -> Fingerprint {
    let header =
        |field: &'_ Value| (field[0].as_str().unwrap().to_owned(), field[1].as_str().unwrap().to_owned());
    let headers: Vec<_> = list(&case["headers"]).iter().map(header).collect();
    let headers: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
    rules(&case["rules"]).fingerprint(&FingerprintInput {
        method: text(case, "method"),
        authority: case["authority"].as_str().unwrap_or_default(),
        target: text(case, "target"),
        content_type: text(case, "content_type").as_bytes(),
        content_coding: text(case, "content_coding"),
        headers: &headers,
        body: &body(case),
    })
}

#[test]
fn requests_have_the_published_fingerprints() {
    let vectors = vectors();
    assert_eq!(vectors["version"], Fingerprint::VERSION);
    let requests = list(&vectors["requests"]);
    assert!(requests.len() >= 40);
    for case in requests {
        assert_eq!(fingerprint(case).to_string(), format!("1:{}", text(case, "digest")), "{}", case["name"]);
    }
}

#[test]
fn a_request_is_raw_exactly_where_the_vectors_say_so() {
    for case in list(&vectors()["requests"]) {
        let mut as_bytes = case.clone();
        as_bytes["rules"]["raw_bodies"] = true.into();
        let raw = fingerprint(case) == fingerprint(&as_bytes);
        assert_eq!(raw, text(case, "tag") == "raw", "{}", case["name"]);
    }
}

#[test]
fn requests_are_equal_exactly_where_the_vectors_say_so() {
    let vectors = vectors();
    let mut first = HashMap::new();
    for case in list(&vectors["requests"]) {
        let name = text(case, "name");
        let expected = case["equals"].as_str().unwrap_or(name);
        assert_eq!(*first.entry(fingerprint(case)).or_insert(name), expected, "{name}");
    }
}

#[test]
fn lists_of_parts_have_the_published_fingerprints() {
    for case in list(&vectors()["parts"]) {
        let parts: Vec<_> =
            list(&case["parts"]).iter().map(|part| part.as_str().unwrap().as_bytes()).collect();
        let fingerprint = Fingerprint::of_parts(text(case, "domain"), &parts);
        assert_eq!(fingerprint.to_string(), format!("1:{}", text(case, "digest")), "{}", case["name"]);
    }
}
