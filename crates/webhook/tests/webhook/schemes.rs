//! Signature schemes: the published examples of the senders, and requests with small errors.

use std::collections::HashMap;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use hmac::{Hmac, KeyInit as _, Mac as _};
use http::HeaderMap;
use oncegate_core::{JsonPointer, Timestamp};
use oncegate_inbox::Message;
use oncegate_webhook::{GenericHmac, SignatureEncoding, WebhookRefusal, WebhookScheme};
use proptest::prelude::*;
use sha2::Sha256;

/// A request, to be changed in one place.
#[derive(Clone, Debug)]
struct Sent {
    headers: Vec<(&'static str, String)>,
    payload: Vec<u8>,
    /// In seconds.
    at: u64,
}

impl Sent {
    fn with(&self, name: &'static str, value: impl Into<String>) -> Self {
        let mut sent = self.without(name);
        sent.headers.push((name, value.into()));
        sent
    }

    fn without(&self, name: &str) -> Self {
        let headers = self.headers.iter().filter(|(n, _)| *n != name).cloned().collect();
        Self { headers, ..self.clone() }
    }

    fn saying(&self, payload: &str) -> Self {
        Self { payload: payload.into(), ..self.clone() }
    }

    fn at(&self, at: u64) -> Self {
        Self { at, ..self.clone() }
    }

    fn value(&self, name: &str) -> &str {
        &self.headers.iter().find(|(n, _)| *n == name).expect("the header is there").1
    }

    fn verify(&self, scheme: &WebhookScheme) -> Result<Message, WebhookRefusal> {
        let mut headers = HeaderMap::new();
        for (name, value) in &self.headers {
            headers.append(*name, value.parse().expect("a value"));
        }
        let payload = Bytes::copy_from_slice(&self.payload);
        scheme.verify("sender", &headers, payload, Timestamp::from_millis(self.at * 1000))
    }
}

fn mac(secret: &[u8], signed: &str) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("a key");
    mac.update(signed.as_bytes());
    mac.finalize().into_bytes().to_vec()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

const STANDARD_SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// The test data of the libraries of Standard Webhooks.
fn standard() -> (WebhookScheme, Sent) {
    let sent = Sent {
        headers: vec![
            ("webhook-id", "msg_p5jXN8AQM9LWM0D4loKWxJek".to_owned()),
            ("webhook-timestamp", "1614265330".to_owned()),
            ("webhook-signature", "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=".to_owned()),
            ("content-type", "application/json".to_owned()),
        ],
        payload: br#"{"test": 2432232314}"#.to_vec(),
        at: 1_614_265_330,
    };
    (WebhookScheme::standard(STANDARD_SECRET).expect("a secret"), sent)
}

/// The test data of the libraries of Stripe.
fn stripe() -> (WebhookScheme, Sent) {
    let signature = "t=1533204620,v1=f0bdba6d4eacbd8ad8a3bbadd7248e633ec1477f7899c124c51b39405fa36613,\
                     v0=63f3a72374a733066c4be69ed7f8e5ac85c22c9f0a6a612ab9a025a9e4ee7eef";
    let payload = r#"{
  "id": "evt_123",
  "object": "event",
  "account": "acct_123",
  "api_version": "2017-05-25",
  "created": 1533204620,
  "data": {
    "object": {
      "id": "ii_123",
      "object": "invoiceitem",
      "amount": 1000,
      "currency": "usd",
      "customer": "cus_123",
      "date": 1533204620,
      "description": "Test Invoice Item",
      "discountable": false,
      "invoice": "in_123",
      "livemode": false,
      "metadata": {},
      "period": {
        "start": 1533204620,
        "end": 1533204620
      },
      "plan": null,
      "proration": false,
      "quantity": null,
      "subscription": null
    }
  },
  "livemode": false,
  "pending_webhooks": 1,
  "request": {
    "id": "req_123",
    "idempotency_key": "idempotency-key-123"
  },
  "type": "invoiceitem.created"
}
"#;
    let headers = vec![("stripe-signature", signature.to_owned())];
    let sent = Sent { headers, payload: payload.into(), at: 1_533_204_620 };
    (WebhookScheme::stripe("webhook_secret").expect("a secret"), sent)
}

/// The test data in GitHub's documentation.
fn github() -> (WebhookScheme, Sent) {
    let signature = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";
    let sent = Sent {
        headers: vec![
            ("x-github-delivery", "72d3162e-cc78-11e3-81ab-4c9367dc0958".to_owned()),
            ("x-github-event", "push".to_owned()),
            ("x-hub-signature-256", signature.to_owned()),
        ],
        payload: b"Hello, World!".to_vec(),
        at: 1_700_000_000,
    };
    (WebhookScheme::github("It's a Secret to Everybody").expect("a secret"), sent)
}

#[test]
fn the_published_examples_are_accepted() {
    let (scheme, sent) = standard();
    let message = sent.verify(&scheme).expect("taken");
    assert_eq!(message.broker_id.as_deref(), Some("msg_p5jXN8AQM9LWM0D4loKWxJek"));
    assert_eq!(message.payload, sent.payload);
    assert_eq!(message.topic, "sender");

    let (scheme, sent) = stripe();
    let message = sent.verify(&scheme).expect("taken");
    assert_eq!(message.broker_id.as_deref(), Some("evt_123"));

    let (scheme, sent) = github();
    let message = sent.verify(&scheme).expect("taken");
    assert_eq!(message.broker_id.as_deref(), Some("72d3162e-cc78-11e3-81ab-4c9367dc0958"));
}

/// Another published one of Standard Webhooks.
#[test]
fn the_second_example_of_standard_webhooks_is_accepted() {
    let scheme = WebhookScheme::standard("whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD").expect("a secret");
    let sent = Sent {
        headers: vec![
            ("webhook-id", "msg_27UH4WbU6Z5A5EzD8u03UvzRbpk".to_owned()),
            ("webhook-timestamp", "1649367553".to_owned()),
            ("webhook-signature", "v1,tZ1I4/hDygAJgO5TYxiSd6Sd0kDW6hPenDe+bTa3Kkw=".to_owned()),
        ],
        payload: br#"{"email":"test@example.com","username":"test_user"}"#.to_vec(),
        at: 1_649_367_553,
    };
    assert!(sent.verify(&scheme).is_ok());
}

#[test]
fn a_handler_gets_no_signature_and_no_credentials() {
    let names = |message: Message| message.headers.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    let (scheme, sent) = standard();
    let sent = sent.with("authorization", "Bearer secret").with("cookie", "a=b");
    let seen = names(sent.verify(&scheme).expect("taken"));
    assert_eq!(seen, ["content-type", "webhook-id", "webhook-timestamp"]);
    let (scheme, sent) = stripe();
    assert!(names(sent.verify(&scheme).expect("taken")).is_empty());
    let (scheme, sent) = github();
    assert_eq!(names(sent.verify(&scheme).expect("taken")), ["x-github-delivery", "x-github-event"]);
}

#[test]
fn the_header_names_of_svix_are_accepted_but_not_mixed() {
    let (scheme, sent) = standard();
    let svix = Sent {
        headers: vec![
            ("svix-id", sent.value("webhook-id").to_owned()),
            ("svix-timestamp", sent.value("webhook-timestamp").to_owned()),
            ("svix-signature", sent.value("webhook-signature").to_owned()),
        ],
        ..sent.clone()
    };
    let message = svix.verify(&scheme).expect("taken");
    assert_eq!(message.broker_id.as_deref(), Some("msg_p5jXN8AQM9LWM0D4loKWxJek"));

    // An attacker who has recorded it adds an identifier of the other family.
    let renamed = svix.with("webhook-id", "msg_other");
    assert_eq!(renamed.verify(&scheme), Err(WebhookRefusal::HeaderMissing));
    let renamed = sent.with("svix-id", "msg_other");
    let message = renamed.verify(&scheme).expect("taken");
    assert_eq!(message.broker_id.as_deref(), Some("msg_p5jXN8AQM9LWM0D4loKWxJek"));
    assert!(message.headers.iter().all(|(name, _)| name != "svix-id"));
}

#[test]
fn missing_and_repeated_headers_are_refused() {
    type Case = fn() -> (WebhookScheme, Sent);
    let cases: [(Case, &[&'static str]); 3] = [
        (standard, &["webhook-id", "webhook-timestamp", "webhook-signature"]),
        (stripe, &["stripe-signature"]),
        (github, &["x-github-delivery", "x-hub-signature-256"]),
    ];
    for (case, names) in cases {
        let (scheme, sent) = case();
        for name in names {
            assert_eq!(sent.without(name).verify(&scheme), Err(WebhookRefusal::HeaderMissing), "{name}");
            let mut twice = sent.clone();
            twice.headers.push((name, sent.value(name).to_owned()));
            assert_eq!(twice.verify(&scheme), Err(WebhookRefusal::HeaderMalformed), "{name} twice");
            let empty = sent.with(name, "");
            assert_eq!(empty.verify(&scheme), Err(WebhookRefusal::HeaderMalformed), "{name} empty");
        }
    }
}

#[test]
fn malformed_headers_are_refused() {
    use WebhookRefusal::{HeaderMalformed, SignatureWrong};
    let (scheme, sent) = standard();
    let good = sent.value("webhook-signature").to_owned();
    let bare = good.trim_start_matches("v1,").to_owned();
    for (name, value, refusal) in [
        ("webhook-timestamp", "+1614265330".to_owned(), HeaderMalformed),
        ("webhook-timestamp", "1614265330.0".to_owned(), HeaderMalformed),
        ("webhook-timestamp", "-1".to_owned(), HeaderMalformed),
        ("webhook-timestamp", "1".repeat(40), HeaderMalformed),
        // The same second, and not what was signed.
        ("webhook-timestamp", "01614265330".to_owned(), SignatureWrong),
        ("webhook-id", "msg_p5jXN8AQM9LWM0D4loKWxJek.1614265330".to_owned(), HeaderMalformed),
        ("webhook-signature", bare.clone(), HeaderMalformed),
        ("webhook-signature", format!("v2,{bare}"), HeaderMalformed),
        ("webhook-signature", format!("v1a,{bare}"), HeaderMalformed),
        ("webhook-signature", "v1,".to_owned(), SignatureWrong),
        ("webhook-signature", good.trim_end_matches('=').to_owned(), SignatureWrong),
        ("webhook-signature", good.replace("OE=", "OF="), SignatureWrong),
        ("webhook-signature", format!("{good}A"), SignatureWrong),
        // A part of the right one is not enough.
        ("webhook-signature", "v1,g0hM9SsE".to_owned(), SignatureWrong),
        ("webhook-signature", format!("{}{good}", "v1,AAAA ".repeat(16)), HeaderMalformed),
    ] {
        assert_eq!(sent.with(name, value.clone()).verify(&scheme), Err(refusal), "{name}: {value}");
    }

    let (scheme, sent) = stripe();
    let v1 = "v1=f0bdba6d4eacbd8ad8a3bbadd7248e633ec1477f7899c124c51b39405fa36613";
    for (value, refusal) in [
        (v1.to_owned(), HeaderMalformed),
        ("t=1533204620".to_owned(), HeaderMalformed),
        (format!("t=1533204620,t=1533204620,{v1}"), HeaderMalformed),
        (format!("t=1533204620,{}", v1.replace("v1", "v0")), HeaderMalformed),
        (format!("t=1533204620,{}", v1.to_uppercase().replace("V1", "v1")), SignatureWrong),
        (format!("t=1533204620,{}", v1.trim_end_matches('3')), SignatureWrong),
        (format!("t=1533204621,{v1}"), SignatureWrong),
    ] {
        assert_eq!(sent.with("stripe-signature", value.clone()).verify(&scheme), Err(refusal), "{value}");
    }

    let (scheme, sent) = github();
    let good = sent.value("x-hub-signature-256").to_owned();
    for (value, refusal) in [
        (good.replace("sha256", "sha1"), HeaderMalformed),
        (good.trim_start_matches("sha256=").to_owned(), HeaderMalformed),
        (good.replace("757107ea", "757107EA"), SignatureWrong),
        (format!("{good}00"), SignatureWrong),
        ("sha256=".to_owned(), SignatureWrong),
    ] {
        assert_eq!(sent.with("x-hub-signature-256", value.clone()).verify(&scheme), Err(refusal), "{value}");
    }
}

#[test]
fn another_payload_is_refused() {
    for case in [standard, stripe, github] {
        let (scheme, sent) = case();
        assert_eq!(sent.saying("").verify(&scheme), Err(WebhookRefusal::SignatureWrong));
        assert_eq!(sent.saying(r#"{"id":"evt_1"}"#).verify(&scheme), Err(WebhookRefusal::SignatureWrong));
    }
}

/// Five minutes to either side, and not a second more.
#[test]
fn old_and_new_times_are_refused() {
    for case in [standard, stripe] {
        let (scheme, sent) = case();
        let outside = Err(WebhookRefusal::TimestampOutOfTolerance);
        assert!(sent.at(sent.at + 300).verify(&scheme).is_ok());
        assert!(sent.at(sent.at - 300).verify(&scheme).is_ok());
        assert_eq!(sent.at(sent.at + 301).verify(&scheme), outside);
        assert_eq!(sent.at(sent.at - 301).verify(&scheme), outside);
        // A wrong signature is reported first.
        assert_eq!(sent.at(0).saying("{}").verify(&scheme), Err(WebhookRefusal::SignatureWrong));
        let scheme = scheme.with_tolerance(Duration::from_secs(10)).expect("a tolerance");
        assert!(sent.at(sent.at + 10).verify(&scheme).is_ok());
        assert_eq!(sent.at(sent.at + 11).verify(&scheme), outside);
        assert!(scheme.clone().with_tolerance(Duration::ZERO).is_err());
        assert!(scheme.with_tolerance(Duration::from_secs(3601)).is_err());
    }
    // GitHub signs none.
    let (scheme, sent) = github();
    assert!(sent.at(0).verify(&scheme).is_ok());
    assert!(scheme.with_tolerance(Duration::from_secs(10)).is_err());
}

/// While a secret is changed, senders sign with both, or with the one that the receiver has or has not yet.
#[test]
fn a_secret_can_be_rotated_without_downtime() {
    let (old, sent) = standard();
    let secret = [7; 32];
    let new_text = format!("whsec_{}", STANDARD.encode(secret));
    let signed = "msg_p5jXN8AQM9LWM0D4loKWxJek.1614265330.{\"test\": 2432232314}";
    let new_signature = format!("v1,{}", STANDARD.encode(mac(&secret, signed)));
    let both = format!("{} {new_signature}", sent.value("webhook-signature"));
    let new = WebhookScheme::standard(&new_text).expect("a secret");
    let either = old.clone().with_secret(&new_text).expect("a secret");

    let by_old = sent.clone();
    let by_new = sent.with("webhook-signature", new_signature);
    let by_both = sent.with("webhook-signature", both);
    for (scheme, takes_old, takes_new) in [(&old, true, false), (&new, false, true), (&either, true, true)] {
        assert_eq!(by_old.verify(scheme).is_ok(), takes_old);
        assert_eq!(by_new.verify(scheme).is_ok(), takes_new);
        assert!(by_both.verify(scheme).is_ok());
    }

    let (scheme, sent) = stripe();
    let (time, rest) = sent.value("stripe-signature").split_once(',').expect("two");
    let by_both = sent.with("stripe-signature", format!("{time},v1={},{rest}", hex(&[1; 32])));
    assert!(by_both.verify(&scheme).is_ok());

    // Other signatures next to a valid one, such as `v1a`, do no harm.
    let (scheme, sent) = standard();
    let value = format!("v1a,hnO3f9T8 {} v9,x", sent.value("webhook-signature"));
    assert!(sent.with("webhook-signature", value).verify(&scheme).is_ok());
}

#[test]
fn invalid_secrets_are_refused_and_no_secret_is_shown() {
    for text in ["", "whsec_", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n", "whsec_!", "whsec_c2hvcnQ="] {
        assert!(WebhookScheme::standard(text).is_err(), "{text:?}");
    }
    let long = "x".repeat(1025);
    for text in ["", " x", "x\n", &long] {
        assert!(WebhookScheme::stripe(text).is_err(), "{text:?}");
        assert!(WebhookScheme::github(text).is_err(), "{text:?}");
        let said = WebhookScheme::github("good").expect("a secret").with_secret(text);
        assert!(said.is_err(), "{text:?}");
    }
    let mut scheme = WebhookScheme::github("swordfish").expect("a secret");
    for _ in 0..7 {
        scheme = scheme.with_secret("another").expect("a secret");
    }
    let shown = format!("{scheme:?}");
    assert!(!shown.contains("swordfish") && !shown.contains("another"), "{shown}");
    assert!(scheme.with_secret("a ninth").is_err());
    // Without its prefix, as some show it, it is the same.
    let (_, sent) = standard();
    let bare = WebhookScheme::standard("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").expect("a secret");
    assert!(sent.verify(&bare).is_ok());
    // Stripe's is used as it is written, prefix and all.
    let signature = format!("t=5,v1={}", hex(&mac(STANDARD_SECRET.as_bytes(), "5.{}")));
    let sent = Sent { headers: vec![("stripe-signature", signature)], payload: b"{}".to_vec(), at: 5 };
    let message = sent.verify(&WebhookScheme::stripe(STANDARD_SECRET).expect("a secret")).expect("taken");
    assert_eq!(message.broker_id, None, "an event without an identifier has none");
}

/// The signed text joins the identifier, the time and the payload: their borders must be unambiguous.
#[test]
fn the_borders_of_the_signed_parts_cannot_be_moved() {
    let secret = [9; 24];
    let scheme = WebhookScheme::standard(&STANDARD.encode(secret)).expect("a secret");
    let signature = format!("v1,{}", STANDARD.encode(mac(&secret, "msg.100.100.1")));
    let sent = |id: &str, time: &str, payload: &str| Sent {
        headers: vec![
            ("webhook-id", id.to_owned()),
            ("webhook-timestamp", time.to_owned()),
            ("webhook-signature", signature.clone()),
        ],
        payload: payload.into(),
        at: 100,
    };
    assert!(sent("msg", "100", "100.1").verify(&scheme).is_ok());
    assert_eq!(sent("msg.100", "100", "1").verify(&scheme), Err(WebhookRefusal::HeaderMalformed));
    assert_eq!(sent("msg", "100.100", "1").verify(&scheme), Err(WebhookRefusal::HeaderMalformed));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any single changed byte of the signed text or of the signature leads to a refusal.
    #[test]
    fn a_changed_byte_is_refused(which in 0_usize..3, at in any::<prop::sample::Index>(), flip in 1_u8..=255) {
        let (scheme, mut sent) = [standard, stripe, github][which]();
        let signed: &[&'static str] = match which {
            0 => &["webhook-id", "webhook-timestamp", "webhook-signature"],
            1 => {
                // Without what it ignores.
                let (value, _) = sent.value("stripe-signature").split_once(",v0").expect("there");
                sent = sent.with("stripe-signature", value);
                &["stripe-signature"]
            }
            // GitHub signs no identifier.
            _ => &["x-hub-signature-256"],
        };
        prop_assert!(sent.verify(&scheme).is_ok());
        let in_headers: usize = signed.iter().map(|name| sent.value(name).len()).sum();
        let mut at = at.index(sent.payload.len() + in_headers);
        let mut changed = sent.clone();
        if let Some(byte) = changed.payload.get_mut(at) {
            *byte ^= flip;
        } else {
            at -= sent.payload.len();
            for name in signed {
                let mut value = sent.value(name).as_bytes().to_vec();
                if let Some(byte) = value.get_mut(at) {
                    *byte ^= flip;
                    let value = String::from_utf8(value).ok();
                    let value = value.filter(|value| http::HeaderValue::from_str(value).is_ok());
                    prop_assume!(value.is_some());
                    changed = sent.with(name, value.expect("there"));
                    break;
                }
                at -= value.len();
            }
        }
        prop_assert!(changed.verify(&scheme).is_err(), "{changed:?}");
    }

    /// Any value of the signature header is refused without a panic.
    #[test]
    fn arbitrary_signatures_never_panic(which in 0_usize..3, value in "[ -~]{0,120}") {
        let (scheme, sent) = [standard, stripe, github][which]();
        let name = ["webhook-signature", "stripe-signature", "x-hub-signature-256"][which];
        prop_assert!(sent.with(name, value).verify(&scheme).is_err());
    }
}

// ---- senders that sign in a format of their own

/// The example of Slack's documentation. Slack has no identifier there, so the test adds a header.
fn slack() -> (GenericHmac, Sent) {
    let format = GenericHmac::new("X-Slack-Signature", SignatureEncoding::Hex)
        .and_then(|format| {
            format.with_signature_prefix("v0=").with_signed_text("v0:{X-Slack-Request-Timestamp}:{payload}")
        })
        .and_then(|format| format.with_timestamp_header("x-slack-request-timestamp"))
        .and_then(|format| format.with_id_header("x-id"));
    let signature = "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503";
    let payload = "token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V\
        &channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text=\
        &response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN\
        &trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c";
    let headers = vec![
        ("x-slack-signature", signature.to_owned()),
        ("x-slack-request-timestamp", "1531420618".to_owned()),
        ("x-id", "1".to_owned()),
    ];
    (format.expect("a format"), Sent { headers, payload: payload.into(), at: 1_531_420_618 })
}

const SLACK_SECRET: &str = "8f742231b10e8888abcd99yyyzzz85a5";

#[test]
fn a_generic_scheme_verifies_the_example_of_slack() {
    let (format, sent) = slack();
    let scheme = format.build(SLACK_SECRET).expect("a scheme");
    let message = sent.verify(&scheme).expect("it is signed");
    assert_eq!(message.broker_id.as_deref(), Some("1"));
    let names: Vec<&str> = message.headers.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["x-id", "x-slack-request-timestamp"], "no signature");

    let upper = sent.value("x-slack-signature").to_ascii_uppercase().replace("V0=", "v0=");
    assert!(sent.with("x-slack-signature", upper).verify(&scheme).is_ok());
    let at = "x-slack-request-timestamp";
    let cases = [
        (sent.saying("token=other"), WebhookRefusal::SignatureWrong),
        (sent.with(at, "1531420619"), WebhookRefusal::SignatureWrong),
        (sent.with(at, "now"), WebhookRefusal::HeaderMalformed),
        (sent.without(at), WebhookRefusal::HeaderMissing),
        (sent.without("x-slack-signature"), WebhookRefusal::HeaderMissing),
        (sent.with("x-slack-signature", "v1=00"), WebhookRefusal::HeaderMalformed),
        (sent.with("x-slack-signature", "v0=00"), WebhookRefusal::SignatureWrong),
        (sent.with("x-id", ""), WebhookRefusal::HeaderMalformed),
        (sent.without("x-id"), WebhookRefusal::HeaderMissing),
        (sent.at(sent.at + 301), WebhookRefusal::TimestampOutOfTolerance),
    ];
    for (changed, refusal) in cases {
        assert_eq!(changed.verify(&scheme).err(), Some(refusal), "{:?}", changed.headers);
    }
}

#[test]
fn a_generic_scheme_takes_base64_and_an_identifier_from_the_payload() {
    let pointer = JsonPointer::parse("/order/id").expect("a pointer");
    let format = GenericHmac::new("x-hmac", SignatureEncoding::Base64).expect("a format");
    let scheme = format.with_json_id(pointer).build("secret").expect("a scheme");
    let sign = |payload: &str| Sent {
        headers: vec![("x-hmac", STANDARD.encode(mac(b"secret", payload)))],
        payload: payload.into(),
        at: 0,
    };
    for (payload, id) in [
        (r#"{"order":{"id":41}}"#, Some("41")),
        (r#"{"order":{"id":"41"}}"#, Some("\"41\"")),
        (r#"{"order":{"id":"\"41\""}}"#, Some(r#""\"41\"""#)),
        (r#"{"order":{"id":-1}}"#, Some("-1")),
        (r#"{"order":{"id":"-1"}}"#, Some("\"-1\"")),
        (r#"{"order":{"id":"a"}}"#, Some("a")),
        (r#"{"order":{"id":""}}"#, None),
        ("no JSON", None),
    ] {
        let message = sign(payload).verify(&scheme).expect("it is signed");
        assert_eq!(message.broker_id.as_deref(), id, "{payload}");
    }
    assert!(scheme.clone().with_tolerance(Duration::from_secs(1)).is_err(), "it signs no time");
    let rotated = scheme.with_secret("next").expect("a second secret");
    assert!(sign("1").verify(&rotated).is_ok());
}

#[test]
fn a_header_value_cannot_move_the_border_of_the_payload() {
    let format = GenericHmac::new("x-hmac", SignatureEncoding::Hex)
        .and_then(|format| format.with_signed_text("{x-id}.{payload}"))
        .and_then(|format| format.with_id_header("x-id"));
    let scheme = format.and_then(|format| format.build("secret")).expect("a scheme");
    let signature = hex(&mac(b"secret", "a.b.c"));
    let sent = |id: &str, payload: &str| Sent {
        headers: vec![("x-hmac", signature.clone()), ("x-id", id.to_owned())],
        payload: payload.into(),
        at: 0,
    };
    assert!(sent("a", "b.c").verify(&scheme).is_ok());
    assert_eq!(sent("a.b", "c").verify(&scheme).err(), Some(WebhookRefusal::HeaderMalformed));
}

/// All texts of at most three of the characters.
fn short_texts(characters: &str) -> Vec<String> {
    let mut texts = vec![String::new()];
    for _ in 0..3 {
        let longer = |text: &String| characters.chars().map(|c| format!("{text}{c}")).collect::<Vec<_>>();
        let more: Vec<_> = texts.iter().flat_map(longer).collect();
        texts.extend(more);
    }
    texts.sort();
    texts.dedup();
    texts
}

#[test]
fn a_signature_is_valid_for_one_reading_of_the_signed_text() {
    for template in ["{x-a}--{x-id}--{payload}", "{x-a}--{payload}--{x-id}", "{payload}--{x-a}-a-{x-id}"] {
        let format = GenericHmac::new("x-hmac", SignatureEncoding::Hex)
            .and_then(|format| format.with_signed_text(template))
            .and_then(|format| format.with_id_header("x-id"));
        let scheme = format.and_then(|format| format.build("secret")).expect("a scheme");
        let mut readings: HashMap<String, [String; 3]> = HashMap::new();
        let texts = short_texts("a-");
        let count = texts.len();
        for number in 0..count.pow(3) {
            let [a, id, payload] =
                [number % count, number / count % count, number / count.pow(2)].map(|at| &texts[at]);
            let text = template.replace("{x-a}", a).replace("{x-id}", id).replace("{payload}", payload);
            let headers =
                vec![("x-hmac", hex(&mac(b"secret", &text))), ("x-a", a.to_owned()), ("x-id", id.to_owned())];
            let sent = Sent { headers, payload: payload.clone().into(), at: 0 };
            if sent.verify(&scheme).is_ok() {
                let reading = [a.clone(), id.clone(), payload.clone()];
                let other = readings.insert(text.clone(), reading.clone());
                assert_eq!(other, None, "{template}: {text:?} is {reading:?}, too");
            }
        }
        assert!(readings.len() > 100, "{template}: {} are accepted", readings.len());
    }
}

#[test]
fn a_generic_scheme_that_proves_too_little_is_refused() {
    let format = || GenericHmac::new("x-hmac", SignatureEncoding::Hex).expect("a format");
    assert!(GenericHmac::new("x hmac", SignatureEncoding::Hex).is_err());
    for text in ["", "{x-id}", "{payload}.{payload}", "{x-time}{payload}", "{payload", "{a b}.{payload}"] {
        assert!(format().with_signed_text(text).is_err(), "{text}");
    }
    assert!(format().build("secret").is_err(), "no identifier");
    let named = || format().with_id_header("x-id").expect("a header");
    assert!(named().build("").is_err(), "no secret");
    let same = format().with_id_header("X-HMAC").expect("a header").build("secret");
    assert!(same.is_err(), "the signature identifies nothing");
    assert!(
        named().with_timestamp_header("x-time").expect("a header").build("secret").is_err(),
        "not signed"
    );
    assert!(named().build("secret").is_ok());
}
