//! The front of a tiered store: opened, put before the back, counted.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{ErrorChain, Store};
use oncegate_embedded::EmbeddedOptions;
use oncegate_engine::ConfigError;
use oncegate_redis::{RedisOptions, RedisStore};
use oncegate_tiered::{Front, FrontStats, TieredOptions, TieredStore};

use super::run::open_directory;
use crate::admin::{FrontCollector, Metrics};
use crate::config::{Config, FrontChoice, StoreChoice, TieredChoice};

/// A front that is to be put before a store.
pub(super) struct Tier {
    front: Front,
    options: TieredOptions,
    stats: FrontStats,
}

/// Between two attempts to open a front that was not there at the start.
const AGAIN_AFTER: Duration = Duration::from_secs(2);

/// The front, where one is configured. One on a server that cannot be used yet is opened later.
pub(super) async fn open(config: &Config) -> Result<Option<Tier>, String> {
    let StoreChoice::Tiered(choice) = &config.store else { return Ok(None) };
    let front = match &choice.front {
        FrontChoice::Memory(octets) => Front::in_memory(*octets),
        FrontChoice::Directory(directory) => {
            let options = EmbeddedOptions::new(directory).with_cache_bytes(config.store_cache);
            let store = open_directory(directory, options).map_err(|error| error.to_string())?;
            Front::on(Arc::new(store))
        }
        FrontChoice::Redis(options) => open_redis(options).await,
    };
    let stats = FrontStats::default();
    let options = options(choice).map_err(|error| error.to_string())?.with_stats(stats.clone());
    Ok(Some(Tier { front, options, stats }))
}

fn options(choice: &TieredChoice) -> Result<TieredOptions, ConfigError> {
    // Two sidecars that call one database by two names do not find each other's answers: slower, and never wrong.
    let back = crate::config::without_login(&choice.back.to_string());
    let options = TieredOptions::new().with_keep(choice.keep)?.with_patience(choice.patience)?;
    Ok(options.with_namespace(back))
}

async fn open_redis(options: &RedisOptions) -> Front {
    // What is evicted from a front is asked of the back.
    let options = options.clone().with_danger_allow_eviction(true);
    let shown = options.shown();
    match RedisStore::open(options.clone()).await {
        Ok(store) => Front::on(Arc::new(store)),
        Err(error) => {
            tracing::warn!("front {shown}: {}; it is left out, and tried again", ErrorChain(&error));
            Front::later(async move {
                loop {
                    tokio::time::sleep(AGAIN_AFTER).await;
                    match RedisStore::open(options.clone()).await {
                        Ok(store) => {
                            tracing::info!("front {shown}: opened");
                            return Arc::new(store) as Arc<dyn Store>;
                        }
                        Err(error) => tracing::debug!("front {shown}: {}", ErrorChain(&error)),
                    }
                }
            })
        }
    }
}

/// The metrics of the back, and of what stands before it.
pub(super) fn metrics(back: Arc<dyn Store>, tier: Option<&Tier>) -> Metrics {
    let Some(tier) = tier else { return Metrics::new(move || back.capabilities()) };
    let capabilities = move || {
        let mut capabilities = back.capabilities();
        capabilities.name = "tiered";
        capabilities
    };
    let collector = FrontCollector(tier.stats.clone());
    Metrics::with(capabilities, |registry| registry.register_collector(Box::new(collector)))
}

/// The store that the engine drives, and the tiered one, where it is one. What is measured is the back: a key that the front
/// answered tells nothing of whether the back can be reached.
pub(super) fn before(back: Arc<dyn Store>, tier: Option<Tier>) -> (Arc<dyn Store>, Option<Arc<TieredStore>>) {
    let Some(Tier { front, options, .. }) = tier else { return (back, None) };
    let tiered = Arc::new(TieredStore::new(front, back, options));
    (tiered.clone(), Some(tiered))
}
