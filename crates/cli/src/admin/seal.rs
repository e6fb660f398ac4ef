//! Records whose responses are encrypted: how operators see them, the keys in use, and the records that need each key.

use std::collections::BTreeMap;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::Response;
use oncegate_core::{
    ErrorChain, ListQuery, Record, RecordId, RecordedResponse, Store, StoreError, Timestamp, limits,
};
use oncegate_postgres::messages::MessageSealCount;
use oncegate_seal::{Keyring, SealInfo, SealKeyId, SealedStore};
use serde_json::{Value, json};

use super::problem::Problem;
use super::view::{self, Detail, RecordView};
use super::{AdminState, keys};

/// A record as far as it can be opened.
pub(super) struct ReadRecord {
    pub(super) record: Record,
    /// The key that sealed it.
    key: Option<SealKeyId>,
    /// The reason why a part of it cannot be opened.
    refused: Option<String>,
}

impl ReadRecord {
    /// The form in which operators see it.
    pub(super) fn view(&self, id: RecordId, now: Timestamp, detail: Detail) -> RecordView {
        RecordView {
            sealed_with: self.key.map(|key| key.to_string()),
            seal_refused: self.refused.clone(),
            ..RecordView::new(id, &self.record, now, detail)
        }
    }
}

/// Reads a record as far as it can be opened.
pub(super) async fn read(state: &AdminState, id: RecordId) -> Result<Option<ReadRecord>, StoreError> {
    read_from(&**state.engine.store(), state.seal.as_deref(), id).await
}

/// Reads a record of this store, which is opened by `seal`, if there are keys.
pub(super) async fn read_from(
    store: &dyn Store,
    seal: Option<&SealedStore>,
    id: RecordId,
) -> Result<Option<ReadRecord>, StoreError> {
    let Some(seal) = seal else {
        let found = store.lookup(id).await?;
        return Ok(found.map(|record| {
            let key = SealInfo::of_record(&record).next().map(|seal| seal.key);
            let refused = key.map(|_| "this sidecar has no seal keys".to_owned());
            ReadRecord { record, key, refused }
        }));
    };
    Ok(seal.lookup_as_stored(id).await?.map(|found| ReadRecord {
        record: found.record,
        key: found.seal.map(|seal| seal.key),
        refused: found.refused.map(|why| why.to_string()),
    }))
}

/// `GET /v1/seal`: the keys in use, and what could not be opened since the start.
pub(super) async fn show(State(state): State<AdminState>) -> Response {
    let keys = state.seal.as_ref().map_or_else(Keyring::default, |seal| seal.keys().get());
    let refusals = &state.seal_refusals;
    let ids = keys
        .ids()
        .enumerate()
        .map(|(number, id)| json!({ "id": id.to_string(), "seals": number == 0 && !keys.opens_only() }));
    let missing = refusals.missing_keys().into_iter().map(|key| {
        json!({
            "id": key.id.to_string(),
            "refused": key.count,
            "last_refused_at": view::time(key.last),
            "added_since": keys.has(key.id),
        })
    });
    view::json(&json!({
        "keys": ids.collect::<Vec<_>>(),
        "seals": state.seal.is_some() && !keys.opens_only(),
        "required": keys.is_required(),
        "refused": {
            "key_missing": refusals.key_missing(),
            "not_sealed": refusals.not_sealed(),
            "broken": refusals.broken(),
        },
        "missing_keys": missing.collect::<Vec<_>>(),
    }))
}

/// The records of one key.
#[derive(Default)]
struct Usage {
    records: u64,
    /// The end of the last retention.
    last_end: Timestamp,
}

impl Usage {
    fn add(&mut self, record: &Record) {
        self.records += 1;
        self.last_end = self.last_end.max(record.expires_at);
    }

    fn json(&self, now: Timestamp) -> Value {
        json!({
            "records": self.records,
            "last_expires_at": view::time(self.last_end),
            "last_expires_in_seconds": self.last_end.since(now).as_secs(),
        })
    }
}

/// `GET /v1/seal/usage`: a page of the store, counted by key. One page at a time bounds the load, and lets a walk go on after a
/// break.
pub(super) async fn usage(
    State(state): State<AdminState>,
    query: Result<Query<Vec<(String, String)>>, QueryRejection>,
) -> Result<Response, Problem> {
    let mut page = ListQuery::default();
    page.limit = limits::MAX_PAGE_RECORDS;
    for (name, text) in keys::pairs(query, &["cursor"])? {
        let what = format!("{name}: {text:?} is not a cursor; it has 64 hexadecimal digits.");
        page.after = Some(RecordId::from_hex(&text).ok_or_else(|| Problem::bad_request(what))?);
    }
    // The sealed forms, so that nothing is decrypted for a count.
    let store = state.seal.as_ref().map_or_else(|| state.engine.store(), |seal| seal.wrapped());
    let page = store.list(page).await.map_err(|error| Problem::store_read(&error))?;
    let now = store.now();
    let mut sealed: BTreeMap<SealKeyId, Usage> = BTreeMap::new();
    let mut clear = Usage::default();
    for (_, record) in page.records.iter().filter(|(_, record)| record.expires_at > now) {
        let mut of_record: Vec<_> = SealInfo::of_record(record).map(|seal| seal.key).collect();
        of_record.sort_unstable();
        of_record.dedup();
        for key in &of_record {
            sealed.entry(*key).or_default().add(record);
        }
        if of_record.is_empty() && has_content(record) {
            clear.add(record);
        }
    }
    let by_key = sealed.iter().map(|(key, usage)| (key.to_string(), usage.json(now)));
    Ok(view::json(&json!({
        "sealed": Value::Object(by_key.collect()),
        "clear": clear.json(now),
        "unreadable": page.unreadable.len(),
        "next": page.next.map(|next| next.to_string()),
    })))
}

/// `GET /v1/seal/messages`: the dead letters of the store's database, and the events that streams buffer in it, counted by key.
/// If they are not counted, `not_counted` is the reason; it is null for a store without messages.
pub(super) async fn messages(State(state): State<AdminState>) -> Response {
    let (mut counts, mut why) = (None, None);
    if let Some(operator) = &state.messages {
        match operator.seal_counts().await {
            Ok(counted) => counts = Some(counted),
            Err(error) => why = Some(ErrorChain(&error).to_string()),
        }
    }
    let of_kind = |is_buffered_event: bool| {
        let counts = counts.as_ref()?.iter().filter(|count| count.is_buffered_event == is_buffered_event);
        let one =
            |count: &MessageSealCount| json!({"count": count.count, "oldest_at": view::time(count.oldest)});
        let sealed = counts.clone().filter_map(|count| {
            let key = SealKeyId::from_bytes(count.key?);
            Some((key.to_string(), one(count)))
        });
        let clear = counts.clone().filter(|count| count.key.is_none()).map(|count| count.count).sum::<u64>();
        Some(json!({"sealed": Value::Object(sealed.collect()), "clear": clear}))
    };
    view::json(&json!({
        "dead_letters": of_kind(false),
        "buffered_events": of_kind(true),
        "not_counted": why,
    }))
}

/// Returns true if the record has a part that could be sealed.
fn has_content(record: &Record) -> bool {
    let has_response =
        matches!(record.state, oncegate_core::State::Completed(RecordedResponse::Replayable(_)));
    has_response || !record.steps.is_empty()
}
