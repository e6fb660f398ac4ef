//! The cache of a cached store: opened, put before the store, counted.

use std::sync::Arc;
use std::time::Duration;

use oncegate_cache::{Cache, CacheOptions, CacheStats, CachedStore};
use oncegate_core::{ErrorChain, Store};
use oncegate_embedded::EmbeddedOptions;
use oncegate_engine::ConfigError;
use oncegate_redis::{RedisOptions, RedisStore};

use super::run::open_directory;
use crate::admin::{CacheCollector, Metrics};
use crate::config::{CacheChoice, CachedChoice, Config, StoreChoice};

/// A cache that is to be put before a store.
pub(super) struct PendingCache {
    cache: Cache,
    options: CacheOptions,
    stats: CacheStats,
}

/// Between two attempts to open a cache that was not there at the start.
const AGAIN_AFTER: Duration = Duration::from_secs(2);

/// The cache, where one is configured. One on a server that cannot be used yet is opened later.
pub(super) async fn open(config: &Config) -> Result<Option<PendingCache>, String> {
    let StoreChoice::Cached(choice) = &config.store else { return Ok(None) };
    let cache = match &choice.cache {
        CacheChoice::Memory(bytes) => Cache::in_memory(*bytes),
        CacheChoice::Directory(directory) => {
            let options = EmbeddedOptions::new(directory).with_cache_bytes(config.max_page_cache);
            let store = open_directory(directory, options).map_err(|error| error.to_string())?;
            Cache::on(Arc::new(store))
        }
        CacheChoice::Redis(options) => open_redis(options).await,
    };
    let stats = CacheStats::default();
    let options = options(choice).map_err(|error| error.to_string())?.with_stats(stats.clone());
    Ok(Some(PendingCache { cache, options, stats }))
}

fn options(choice: &CachedChoice) -> Result<CacheOptions, ConfigError> {
    // Two sidecars that call one database by two names do not find each other's answers: slower, and never wrong.
    let store = crate::config::without_login(&choice.store.to_string());
    let options = CacheOptions::new().with_keep(choice.keep)?.with_timeout(choice.timeout)?;
    Ok(options.with_namespace(store))
}

async fn open_redis(options: &RedisOptions) -> Cache {
    // What is evicted from a cache is asked of the store.
    let options = options.clone().with_danger_allow_eviction(true);
    let shown = options.shown();
    match RedisStore::open(options.clone()).await {
        Ok(store) => Cache::on(Arc::new(store)),
        Err(error) => {
            tracing::warn!("cache {shown}: {}; it is left out, and tried again", ErrorChain(&error));
            Cache::later(async move {
                loop {
                    tokio::time::sleep(AGAIN_AFTER).await;
                    match RedisStore::open(options.clone()).await {
                        Ok(store) => {
                            tracing::info!("cache {shown}: opened");
                            return Arc::new(store) as Arc<dyn Store>;
                        }
                        Err(error) => tracing::debug!("cache {shown}: {}", ErrorChain(&error)),
                    }
                }
            })
        }
    }
}

/// The metrics of the store, and of what stands before it.
pub(super) fn metrics(store: Arc<dyn Store>, tier: Option<&PendingCache>) -> Metrics {
    let Some(tier) = tier else { return Metrics::new(move || store.capabilities()) };
    let capabilities = move || {
        let mut capabilities = store.capabilities();
        capabilities.name = "cached";
        capabilities
    };
    let collector = CacheCollector(tier.stats.clone());
    Metrics::with(capabilities, |registry| registry.register_collector(Box::new(collector)))
}

/// The store that the engine drives, and the cached one, where it is one. What is measured is the store: a key that the cache
/// answered tells nothing of whether the store can be reached.
pub(super) fn before(
    store: Arc<dyn Store>,
    tier: Option<PendingCache>,
) -> (Arc<dyn Store>, Option<Arc<CachedStore>>) {
    let Some(PendingCache { cache, options, .. }) = tier else { return (store, None) };
    let cached = Arc::new(CachedStore::new(cache, store, options));
    (cached.clone(), Some(cached))
}
