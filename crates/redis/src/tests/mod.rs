//! Tests on real servers that need what is not public: a clock to move by hand, or another interval.

mod conformance;

use std::time::{Duration, Instant};

use oncegate_core::{Durability, Store as _};
use oncegate_servers::{RedisOptions as ServerOptions, RedisServer};

use crate::{RedisOptions, RedisStore};

/// A configuration that is changed while the server runs is noticed without a reconnect, and without anybody asking.
#[tokio::test(flavor = "multi_thread")]
async fn the_configuration_is_read_again_and_again() {
    let options = ServerOptions::new().with_appendfsync("always");
    let server = tokio::task::spawn_blocking(|| RedisServer::start(options).unwrap()).await.unwrap();
    let store = RedisStore::open(RedisOptions::from_url(&server.url()).unwrap()).await.unwrap();
    store.shared.link.inspect_every(Duration::from_millis(50));
    assert_eq!(store.capabilities().durability, Durability::Synced);
    for (policy, durability) in [("allkeys-lru", Durability::Buffered), ("noeviction", Durability::Synced)] {
        server.command(&["CONFIG", "SET", "maxmemory-policy", policy]).unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        while store.capabilities().durability != durability {
            assert!(Instant::now() < deadline, "{policy}: {:?}", store.findings());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(
            store.findings().iter().any(|finding| finding.text.contains(policy)),
            "{:?}",
            store.findings()
        );
        assert_eq!(store.shared.link.unfit().is_some(), policy != "noeviction");
    }
}
