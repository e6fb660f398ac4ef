//! The published examples, for implementations in other languages.

use std::fmt::Write as _;

use bytes::Bytes;
use oncegate_core::{Outcome, RecordId, StoredResponse};
use oncegate_seal::{
    DeadLetterPlace, Keyring, SealError, SealInfo, StreamEventPlace, open_claimed_response, open_dead_letter,
    open_dead_letter_error, open_intent, open_stream_event, seal_dead_letter, seal_dead_letter_error,
    seal_intent, seal_owners_response, seal_stream_event,
};
use oncegate_testkit::block_on;
use serde_json::{Value, json};

use crate::{World, complete, key, record_step, response, ring};
use oncegate_core::Store as _;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/vectors/sealed.json");

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn bytes(value: &Value) -> Vec<u8> {
    let text = value.as_str().unwrap();
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// Writes the file anew, with the tokens of this moment, if it is asked to: `ONCEGATE_WRITE_VECTORS=1`.
fn write_anew() {
    let world = World::with(ring(&[1]));
    let (id, token) = world.owned(1);
    let steps = [("charge", &b"{\"id\":7}"[..]), ("~input", b"")];
    for (number, (name, result)) in steps.into_iter().enumerate() {
        world.apply(id, record_step(token, number, name, result)).unwrap();
    }
    let stored = block_on(world.plain.lookup(id)).unwrap().unwrap().steps;
    let mut parts: Vec<_> = (0..)
        .zip(steps.into_iter().zip(stored.as_slice()))
        .map(|(number, ((name, result), sealed))| {
            json!({
                "part": 3, "token": token.get().to_string(), "number": number, "name": name,
                "plaintext": hex(result), "sealed": hex(sealed.result()),
            })
        })
        .collect();
    world.apply(id, complete(token)).unwrap();
    let sealed = world.stored(id);
    parts.push(json!({
        "part": 1, "token": token.get().to_string(), "plaintext": hex(response().as_encoded()),
        "sealed": hex(sealed.as_body()), "response": hex(sealed.as_encoded()),
    }));
    let file = json!({
        "about": "Sealed forms, version 1. All bytes are hexadecimal. Tokens are decimal texts, because they may exceed 2^53.",
        "key": hex(&[1; 32]),
        "key_text": *key(1).to_secret_text(),
        "key_id": key(1).id().to_string(),
        "record": id.to_string(),
        "parts": parts,
        "intents": [intent_example()],
        "dead_letters": [dead_letter_example()],
        "stream_events": [stream_event_example()],
    });
    std::fs::write(FILE, serde_json::to_string_pretty(&file).unwrap() + "\n").unwrap();
}

/// An entry of a journal, which has no token, so that its sealed form is always the same.
fn intent_example() -> Value {
    let (file, plaintext) =
        ("2c26b46b68ffc68ff99b453c1d304134.intent", b"{\"method\":\"POST\"}\n{\"amount\":5}");
    let sealed = seal_intent(file, plaintext, &ring(&[1])).unwrap().unwrap();
    json!({ "file": file, "plaintext": hex(plaintext), "sealed": hex(&sealed) })
}

const LETTER: DeadLetterPlace<'static> =
    DeadLetterPlace { id: RecordId::from_bytes([7; 32]), consumer: "billing", topic: "orders" };
const NAMES: [&str; 2] = ["event-id", "x-empty"];

/// A dead letter, which has no token, so that its sealed form is always the same.
fn dead_letter_example() -> Value {
    let (values, payload, error) = ([&b"evt-1"[..], b""], b"{\"order\":17}", "no such address");
    let headers = [(NAMES[0], values[0]), (NAMES[1], values[1])];
    let sealed = seal_dead_letter(&LETTER, &headers, payload, &ring(&[1])).unwrap().unwrap();
    let sealed_error = seal_dead_letter_error(&LETTER, error, &ring(&[1])).unwrap().unwrap();
    json!({
        "id": LETTER.id.to_string(), "consumer": LETTER.consumer, "topic": LETTER.topic, "header_names": NAMES,
        "header_values": values.map(hex), "payload": hex(payload), "error": error, "sealed": hex(&sealed),
        "sealed_error": sealed_error,
    })
}

const EVENT: StreamEventPlace<'static> =
    StreamEventPlace { consumer: "history", stream: "order-17", sequence: 3 };

/// A buffered event, which has no token, so that its sealed form is always the same.
fn stream_event_example() -> Value {
    let event = b"{\"paid\":500}";
    let sealed = seal_stream_event(&EVENT, event, &ring(&[1])).unwrap().unwrap();
    json!({
        "consumer": EVENT.consumer, "stream": EVENT.stream, "sequence": EVENT.sequence.to_string(), "event": hex(event),
        "sealed": hex(&sealed),
    })
}

#[test]
fn the_published_event_is_written_and_opened() {
    let file: Value = serde_json::from_str(&std::fs::read_to_string(FILE).unwrap()).unwrap();
    assert_eq!(file["stream_events"], json!([stream_event_example()]));
    let example = &file["stream_events"][0];
    let sealed = bytes(&example["sealed"]);
    let opened = open_stream_event(&EVENT, &sealed, &ring(&[2, 1])).unwrap().unwrap();
    assert_eq!(opened, bytes(&example["event"]));
    assert_eq!(open_stream_event(&EVENT, &sealed, &ring(&[2])), Err(SealError::KeyMissing(key(1).id())));
    for place in [
        StreamEventPlace { consumer: "history2", ..EVENT },
        StreamEventPlace { stream: "order-18", ..EVENT },
        StreamEventPlace { sequence: 4, ..EVENT },
        // The lengths tell where one text ends and the next begins.
        StreamEventPlace { consumer: "historyo", stream: "rder-17", ..EVENT },
    ] {
        assert_eq!(open_stream_event(&place, &sealed, &ring(&[1])), Err(SealError::Broken), "{place:?}");
    }
    for at in 7..sealed.len() {
        let mut changed = sealed.clone();
        changed[at] ^= 1;
        assert!(open_stream_event(&EVENT, &changed, &ring(&[1])).is_err(), "byte {at}");
        assert!(open_stream_event(&EVENT, &sealed[..at], &ring(&[1])).is_err(), "cut at {at}");
    }
    // A part of another kind is no event, and what is in clear is returned, unless it must be sealed.
    let step = bytes(&file["parts"][0]["sealed"]);
    assert_eq!(open_stream_event(&EVENT, &step, &ring(&[1])), Err(SealError::Broken));
    assert_eq!(open_stream_event(&EVENT, b"clear", &ring(&[1])), Ok(None));
    let strict = ring(&[1]).with_required(true);
    assert_eq!(open_stream_event(&EVENT, b"clear", &strict), Err(SealError::NotSealed));
    assert_eq!(seal_stream_event(&EVENT, b"", &ring(&[1]).with_opens_only(true)).unwrap(), None);
}

/// A program that completes records itself writes what a sealed store opens, and opens what a sealed store wrote.
#[test]
fn programs_and_sealed_stores_write_the_same_responses() {
    let world = World::with(ring(&[1]));
    let (id, token) = world.owned(1);
    world.apply(id, complete(token)).unwrap();
    let by_store = world.stored(id);
    let by_program = seal_owners_response(id, token, &response(), &ring(&[1])).unwrap();
    assert_eq!(by_program, by_store);
    let opened = open_claimed_response(id, by_store.clone(), &ring(&[2, 1])).unwrap();
    assert_eq!(opened, response());
    let other = RecordId::from_bytes([9; 32]);
    assert_eq!(open_claimed_response(other, by_store.clone(), &ring(&[1])), Err(SealError::Broken));
    assert_eq!(
        open_claimed_response(id, by_store, &Keyring::default()),
        Err(SealError::KeyMissing(key(1).id()))
    );
    assert_eq!(open_claimed_response(id, response(), &ring(&[1])), Ok(response()));
    let strict = ring(&[1]).with_required(true);
    assert_eq!(open_claimed_response(id, response(), &strict), Err(SealError::NotSealed));
    let opens = ring(&[1]).with_opens_only(true);
    assert_eq!(seal_owners_response(id, token, &response(), &opens), Ok(response()));
}

#[test]
fn the_published_dead_letter_is_written_and_opened() {
    let file: Value = serde_json::from_str(&std::fs::read_to_string(FILE).unwrap()).unwrap();
    assert_eq!(file["dead_letters"], json!([dead_letter_example()]));
    let example = &file["dead_letters"][0];
    let (sealed, error) = (bytes(&example["sealed"]), example["sealed_error"].as_str().unwrap());
    let open = |place: &DeadLetterPlace<'_>, names: &[&str], keys: &Keyring| {
        open_dead_letter(place, names, &sealed, keys)
    };
    let content = open(&LETTER, &NAMES, &ring(&[2, 1])).unwrap().unwrap();
    assert_eq!(
        (content.payload.to_vec(), hex(&content.header_values[0])),
        (bytes(&example["payload"]), hex(b"evt-1"))
    );
    let opened = open_dead_letter_error(&LETTER, error, &ring(&[1])).unwrap().unwrap();
    assert_eq!(opened, example["error"]);
    assert_eq!(open(&LETTER, &NAMES, &ring(&[2])), Err(SealError::KeyMissing(key(1).id())));
    // Each part in clear is bound.
    for place in [
        DeadLetterPlace { id: RecordId::from_bytes([8; 32]), ..LETTER },
        DeadLetterPlace { consumer: "mail", ..LETTER },
        DeadLetterPlace { topic: "order", ..LETTER },
        // The lengths tell where one text ends and the next begins.
        DeadLetterPlace { consumer: "billingo", topic: "rders", ..LETTER },
    ] {
        assert_eq!(open(&place, &NAMES, &ring(&[1])), Err(SealError::Broken), "{place:?}");
        assert_eq!(open_dead_letter_error(&place, error, &ring(&[1])), Err(SealError::Broken), "{place:?}");
    }
    for names in
        [&["event-id"][..], &["x-empty", "event-id"], &["event-id", "x-empty", "x"], &["event-i", "dx-empty"]]
    {
        assert_eq!(open(&LETTER, names, &ring(&[1])), Err(SealError::Broken), "{names:?}");
    }
    // Every byte counts, and every end.
    for at in 0..sealed.len() {
        let mut changed = sealed.clone();
        changed[at] ^= 1;
        let opened = open_dead_letter(&LETTER, &NAMES, &changed, &ring(&[1]));
        // Without its beginning it is not sealed, and with another key id it has another key.
        let is_refused = opened.is_err() || at < 7 && opened == Ok(None);
        assert!(is_refused, "byte {at}: {opened:?}");
        let cut = open_dead_letter(&LETTER, &NAMES, &sealed[..at], &ring(&[1]));
        assert!(cut.is_err() || at < 7 && cut == Ok(None), "cut at {at}: {cut:?}");
    }
    for wrong in ["ogseal:", "ogseal:0", "ogseal:zz", &error[..error.len() - 1], &format!("{error}00")] {
        assert_eq!(open_dead_letter_error(&LETTER, wrong, &ring(&[1])), Err(SealError::Broken), "{wrong}");
    }
    // The form of an error is no content, and the other way round. What is in clear is returned, unless it must be sealed.
    let form = bytes(&json!(error.strip_prefix("ogseal:").unwrap()));
    assert_eq!(open_dead_letter(&LETTER, &NAMES, &form, &ring(&[1])), Err(SealError::Broken));
    assert_eq!(open_dead_letter(&LETTER, &NAMES, b"clear", &ring(&[1])), Ok(None));
    assert_eq!(open_dead_letter_error(&LETTER, "clear", &ring(&[1])), Ok(None));
    let strict = ring(&[1]).with_required(true);
    assert_eq!(open_dead_letter(&LETTER, &NAMES, b"clear", &strict), Err(SealError::NotSealed));
    let opens = ring(&[1]).with_opens_only(true);
    assert_eq!(seal_dead_letter(&LETTER, &[], b"", &opens).unwrap(), None);
}

#[test]
fn the_published_entry_of_a_journal_is_written_and_opened() {
    let file: Value = serde_json::from_str(&std::fs::read_to_string(FILE).unwrap()).unwrap();
    assert_eq!(file["intents"], json!([intent_example()]));
    let example = &file["intents"][0];
    let (name, sealed) = (example["file"].as_str().unwrap(), bytes(&example["sealed"]));
    let open = |name: &str, sealed: &[u8], keys: &[u8]| open_intent(name, sealed, &ring(keys));
    assert_eq!(open(name, &sealed, &[2, 1]).unwrap(), bytes(&example["plaintext"]));
    assert_eq!(open(name, &sealed, &[2]), Err(SealError::KeyMissing(key(1).id())));
    assert_eq!(open("other.intent", &sealed, &[1]), Err(SealError::Broken));
    // The sealed form of a record's part is no entry of a journal, and the other way round.
    let step = bytes(&file["parts"][0]["sealed"]);
    assert_eq!(open(name, &step, &[1]), Err(SealError::Broken));
    assert_eq!(seal_intent(name, b"", &ring(&[1]).with_opens_only(true)).unwrap(), None);
}

#[test]
fn the_published_examples_are_opened() {
    if std::env::var_os("ONCEGATE_WRITE_VECTORS").is_some() {
        write_anew();
    }
    let file: Value = serde_json::from_str(&std::fs::read_to_string(FILE).unwrap()).unwrap();
    assert_eq!(file["key_text"], *key(1).to_secret_text());
    assert_eq!(file["key_id"], key(1).id().to_string());
    let parts = file["parts"].as_array().unwrap();
    assert_eq!(parts.len(), 3);
    let sealed = parts.iter().find(|part| part["part"] == 1).unwrap();
    let stored = StoredResponse::decode(Bytes::from(bytes(&sealed["response"]))).unwrap();
    assert_eq!(stored.as_body(), bytes(&sealed["sealed"]));
    assert_eq!(
        SealInfo::of_response(&stored).unwrap().token.get().to_string(),
        sealed["token"].as_str().unwrap()
    );
    // A claim opens it under whatever token it was written.
    let world = World::with(ring(&[1]));
    let (id, token) = world.owned(1);
    assert_eq!(file["record"], id.to_string());
    world.put(id, token, stored);
    let Outcome::Replay(opened) = world.claim_again(id).unwrap() else { panic!("it is completed") };
    assert_eq!(opened.as_encoded()[..], bytes(&sealed["plaintext"]));
}
