//! The published vectors: what a program in another language has to agree with.

use bytes::Bytes;
use oncegate_core::{
    Fingerprint, ID_SECRET_RECORD, IdScheme, IdSecret, IdempotencyKey, KeyTag, RecordId, Scope, ServiceName,
    StoredResponse,
};
use serde_json::Value;

fn vectors(name: &str) -> Value {
    let path = format!("{}/vectors/{name}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap()
}

fn bytes(hex: &Value) -> Vec<u8> {
    let hex = hex.as_str().unwrap();
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn record_ids_and_downstream_keys() {
    let vectors = vectors("record_ids.json");
    let cases = vectors["cases"].as_array().unwrap();
    assert!(cases.len() >= 10);
    for case in cases {
        let caller: Vec<_> = case["caller"].as_array().unwrap().iter().collect();
        let caller: Vec<_> = caller
            .iter()
            .map(|part| (part["kind"].as_str().unwrap(), bytes(&part["identity_hex"])))
            .collect();
        let caller: Vec<_> = caller.iter().map(|(kind, identity)| (*kind, &identity[..])).collect();
        let scope = Scope::caller_of_parts(&caller);
        let scope = match case["service"].as_str() {
            None => scope,
            Some(service) => scope.with_service(&ServiceName::new(service).unwrap()),
        };
        let parts: Vec<_> = case["operation_hex"].as_array().unwrap().iter().map(bytes).collect();
        let parts: Vec<_> = parts.iter().map(|part| &part[..]).collect();
        let scope = scope.with_operation_parts(&parts);
        let key = IdempotencyKey::new(bytes(&case["key_hex"])).unwrap();
        assert_eq!(KeyTag::of(&key).to_string(), case["key_tag"], "{}", case["name"]);
        let id = RecordId::derive(&scope, &key);
        assert_eq!(id.to_string(), case["record_id"], "{}", case["name"]);
        assert_eq!(scope.caller_tag().to_string(), case["caller_tag"], "{}", case["name"]);
        for (step, key) in case["downstream_keys"].as_object().unwrap() {
            assert_eq!(id.downstream_key(step), *key, "{} {step}", case["name"]);
        }
    }
}

#[test]
fn keyed_identities() {
    let plain = vectors("record_ids.json");
    let vectors = vectors("keyed_ids.json");
    let secrets = vectors["secrets"].as_array().unwrap();
    assert!(secrets.len() >= 2);
    for file in secrets {
        let secret = IdSecret::from_bytes(bytes(&file["secret_hex"]).try_into().unwrap());
        assert_eq!(secret.name().to_string(), file["name"]);
        assert_eq!(*secret.to_secret_text(), file["text"]);
        assert_eq!(IdSecret::parse(file["text"].as_str().unwrap()).unwrap().name(), secret.name());
        assert_eq!(ID_SECRET_RECORD.to_string(), file["mark"]["record_id"]);
        let ids = IdScheme::keyed(secret);
        let cases = file["cases"].as_array().unwrap();
        let plain = plain["cases"].as_array().unwrap();
        assert_eq!(cases.len(), plain.len());
        for (case, plain) in cases.iter().zip(plain) {
            assert_eq!(case["name"], plain["name"]);
            let record = RecordId::from_hex(plain["record_id"].as_str().unwrap()).unwrap();
            assert_eq!(ids.record(record).to_string(), case["record_id"], "{}", case["name"]);
            let key = IdempotencyKey::new(bytes(&plain["key_hex"])).unwrap();
            assert_eq!(ids.key_tag(&key).to_string(), case["key_tag"], "{}", case["name"]);
            let caller: Vec<_> = plain["caller"].as_array().unwrap().iter().collect();
            let caller: Vec<_> = caller
                .iter()
                .map(|part| (part["kind"].as_str().unwrap(), bytes(&part["identity_hex"])))
                .collect();
            let caller: Vec<_> = caller.iter().map(|(kind, identity)| (*kind, &identity[..])).collect();
            let scope = Scope::caller_of_parts(&caller);
            assert_eq!(ids.caller_tag(&scope).to_string(), case["caller_tag"], "{}", case["name"]);
            let digest = bytes(&case["fingerprint_digest_hex"]).try_into().unwrap();
            let fingerprint = ids.fingerprint(Fingerprint::from_parts(1, digest).unwrap());
            assert_eq!(fingerprint.to_string(), format!("1:{}", case["fingerprint"].as_str().unwrap()));
        }
    }
}

#[test]
fn stored_responses() {
    for case in vectors("responses.json")["cases"].as_array().unwrap() {
        let fields = |name: &str| -> Vec<(String, Vec<u8>)> {
            let list = case[name].as_array().unwrap();
            list.iter().map(|field| (field[0].as_str().unwrap().to_owned(), bytes(&field[1]))).collect()
        };
        let (headers, trailers) = (fields("headers"), fields("trailers"));
        let borrowed = |fields: &'static [(String, Vec<u8>)]| -> Vec<(&'static str, &'static [u8])> {
            fields.iter().map(|(name, value)| (name.as_str(), value.as_slice())).collect()
        };
        let status = u16::try_from(case["status"].as_u64().unwrap()).unwrap();
        let body = [Bytes::from(bytes(&case["body_hex"]))];
        let headers = borrowed(headers.leak());
        let trailers = borrowed(trailers.leak());
        let response = StoredResponse::new(status, &headers, &body, &trailers).unwrap();
        assert_eq!(response.as_encoded(), &bytes(&case["encoded_hex"]), "{}", case["name"]);
        assert_eq!(StoredResponse::decode(bytes(&case["encoded_hex"]).into()), Some(response));
    }
}
