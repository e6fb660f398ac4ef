//! Opens the cache of a cached store and puts it before the store.

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

/// An opened cache, before it is put before a store.
pub(super) struct PendingCache {
    cache: Cache,
    options: CacheOptions,
    stats: CacheStats,
}

/// The pause between two attempts to open a cache that could not be opened at the start.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// Opens the cache, if one is configured. A cache on a server that cannot be used yet is opened later.
pub(super) async fn open(config: &Config) -> Result<Option<PendingCache>, String> {
    let StoreChoice::Cached(choice) = &config.store else { return Ok(None) };
    let cache = match &choice.cache {
        CacheChoice::Memory(bytes) => Cache::in_memory(*bytes),
        CacheChoice::Directory(directory) => {
            let options = EmbeddedOptions::new(directory).with_memory_bytes(config.store_memory);
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
    // Sidecars that use different names for one database do not find each other's responses, which is slower but never wrong.
    let store = crate::config::without_login(&choice.store.to_string());
    let options = CacheOptions::new().with_keep(choice.keep)?.with_timeout(choice.timeout)?;
    Ok(options.with_namespace(store))
}

async fn open_redis(options: &RedisOptions) -> Cache {
    // A response that was evicted from the cache is read from the store.
    let options = options.clone().with_danger_allow_eviction(true);
    let shown = options.shown();
    match RedisStore::open(options.clone()).await {
        Ok(store) => Cache::on(Arc::new(store)),
        Err(error) => {
            tracing::warn!(
                "cache {shown}: {}; starting without the cache, and trying again in the background",
                ErrorChain(&error)
            );
            Cache::later(async move {
                loop {
                    tokio::time::sleep(RETRY_INTERVAL).await;
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

/// The metrics of the store, and of the cache before it.
pub(super) fn metrics(store: Arc<dyn Store>, cache: Option<&PendingCache>) -> Metrics {
    let collector = cache.map(|cache| CacheCollector(cache.stats.clone()));
    Metrics::new(move || store.capabilities(), collector)
}

/// Puts the cache before the store. Returns the store for the engine, and the cached store if there is a cache. Only the
/// store behind is measured: a reply of the cache does not tell if the store can be reached.
pub(super) fn before(
    store: Arc<dyn Store>,
    cache: Option<PendingCache>,
) -> (Arc<dyn Store>, Option<Arc<CachedStore>>) {
    let Some(PendingCache { cache, options, .. }) = cache else { return (store, None) };
    let cached = Arc::new(CachedStore::new(cache, store, options));
    (cached.clone(), Some(cached))
}
