//! Looks for records whose key is missing, and reports them in the log.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{ErrorChain, ID_SECRET_RECORD, ListQuery, Store, StoreError};
use oncegate_seal::{SealKeys, SealRefusals, SealSample};
use tokio::time::Instant;

/// The pause between two looks at the counts, and the time after which a store that was away is read.
const TICK: Duration = Duration::from_secs(2);

/// The time after which a store is read again, and after which the log repeats what it said.
const INTERVAL: Duration = Duration::from_secs(3600);

/// The records that are read each time: pages of so many, with a pause after each. If one in a hundred records needs a missing
/// key, a thousand show it but for one time in twenty thousand.
const PAGES: usize = 10;
const PAGE_RECORDS: usize = 100;
const PAUSE: Duration = Duration::from_millis(20);

/// Reads a sample of the store at the start and then every hour, and reports keys that it needs and that are missing, as well as
/// requests that were refused for that. `store` has sealed forms.
pub(crate) async fn watch(store: Arc<dyn Store>, refusals: SealRefusals, keys: SealKeys) {
    let mut sampled: Option<Instant> = None;
    let mut reported: Option<(u64, Instant)> = None;
    loop {
        if sampled.is_none_or(|at| at.elapsed() >= INTERVAL) {
            match sample(&*store).await {
                Ok(sample) => {
                    let missing: Vec<_> =
                        sample.missing(&keys.get()).map(|(key, _)| key.to_string()).collect();
                    if !missing.is_empty() {
                        tracing::warn!(
                            keys = missing.join(", "),
                            "records are sealed with keys that this sidecar does not have: their retries are refused until the keys are \
                             added{}",
                            in_clear(&keys)
                        );
                    }
                    refusals.set_sample(sample);
                    sampled = Some(Instant::now());
                }
                // The next tick tries again. The breaker logs an outage.
                Err(error) => {
                    tracing::debug!(error = %ErrorChain(&error), "the store was not read for seal keys")
                }
            }
        }
        let refused = refusals.key_missing();
        if refused > reported.map_or(0, |(count, _)| count)
            && reported.is_none_or(|(_, at)| at.elapsed() >= INTERVAL)
        {
            let missing: Vec<_> = refusals.missing_keys().iter().map(|key| key.id.to_string()).collect();
            tracing::warn!(
                refused,
                keys = missing.join(", "),
                "requests were refused (response-sealed), because this sidecar does not have the keys that sealed their records{}",
                in_clear(&keys)
            );
            reported = Some((refused, Instant::now()));
        }
        tokio::time::sleep(TICK).await;
    }
}

/// The end of a log line of a sidecar without any keys.
fn in_clear(keys: &SealKeys) -> &'static str {
    match keys.get().ids().next() {
        Some(_) => "",
        None => ". It has no seal keys, and stores new responses in clear: set seal-keys-file",
    }
}

async fn sample(store: &dyn Store) -> Result<SealSample, StoreError> {
    let mut sample = SealSample::default();
    let mut query = ListQuery::default();
    query.limit = PAGE_RECORDS;
    for _ in 0..PAGES {
        let page = store.list(query.clone()).await?;
        // The mark of the id secret is no record of a request.
        let records = page.records.iter().filter(|(id, _)| *id != ID_SECRET_RECORD);
        records.for_each(|(_, record)| sample.add(record));
        if page.next.is_none() {
            break;
        }
        query.after = page.next;
        tokio::time::sleep(PAUSE).await;
    }
    Ok(sample)
}
