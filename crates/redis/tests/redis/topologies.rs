//! TLS, Sentinel and Cluster, with real servers.

use std::time::{Duration, Instant};

use crate::support::*;
use oncegate_core::{
    Command, Complete, Completion, Durability, Fencing, Forget, ListQuery, OnAbandoned, Outcome, Resolution,
    Resolve, Rewrite, StateName, Store as _,
};
use oncegate_redis::contract::record_key;
use oncegate_redis::{RedisOpenError, RedisStore};
use oncegate_servers::{
    Certificates, RedisCluster, RedisOptions as ServerOptions, RedisSentinel, RedisServer,
};

/// Creates an authority and a certificate for this machine.
fn certificates() -> Certificates {
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca_key = rcgen::KeyPair::generate().unwrap();
    let ca = params.self_signed(&ca_key).unwrap();
    let issuer = rcgen::Issuer::new(params, ca_key);
    let key = rcgen::KeyPair::generate().unwrap();
    let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    let cert = rcgen::CertificateParams::new(names).unwrap().signed_by(&key, &issuer).unwrap();
    Certificates { ca: ca.pem(), cert: cert.pem(), key: key.serialize_pem() }
}

#[tokio::test]
async fn tls_connects_only_to_a_server_with_a_trusted_certificate() {
    let server = RedisServer::start(
        ServerOptions::new().with_tls(certificates()).with_user("app", "secret", "~* &* +@all"),
    )
    .unwrap();
    let store = open(&server.url()).await;
    let grant = granted(&store, 1, 1).await;
    assert_eq!(store.apply(id(1), completion(grant.token, 1)).await.unwrap(), Outcome::Completed);
    assert_eq!(try_claim(&store, 1, 2).await.unwrap(), Outcome::Replay(response(1)));
    // Without the authority, and without TLS.
    let (unknown_ca, _) =
        server.url().split_once("?ca=").map(|(url, ca)| (url.to_owned(), ca.to_owned())).unwrap();
    let in_clear = unknown_ca.replace("rediss://", "redis://");
    for url in [unknown_ca, in_clear] {
        let error = RedisStore::open(options(&format!("{url}?connect-timeout=2s"))).await.unwrap_err();
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_give_the_primary_also_after_a_failover() {
    let mut world = RedisSentinel::start().unwrap();
    let store = open(&format!("{}?timeout=1s", world.url())).await;
    assert_eq!(store.capabilities().fencing, Fencing::Equality);
    assert!(store.findings().iter().any(|f| f.text.starts_with("replicas: ")));
    let grant = granted(&store, 1, 1).await;
    store.apply(id(1), completion(grant.token, 1)).await.unwrap();
    let owned = granted(&store, 2, 2).await;
    world.servers[0].command(&["WAIT", "1", "5000"]).unwrap();
    world.servers[1].wait_for(&["GET", &record_key(&id(2))], "in-progress").unwrap();
    world.servers[0].kill();
    // The replica has the old records, their owners can continue, and new keys execute.
    let replay = until_ok(|| try_claim(&store, 1, 11)).await;
    assert_eq!(replay, Outcome::Replay(response(1)));
    assert_eq!(store.apply(id(2), completion(owned.token, 2)).await.unwrap(), Outcome::Completed);
    granted(&store, 3, 3).await;
    // The old primary comes back and becomes a replica. The store does not use it.
    world.servers[0].restart().unwrap();
    world.servers[0].wait_for(&["INFO", "replication"], "role:slave").unwrap();
    granted(&store, 4, 4).await;
    let unknown = options(&format!("{}?connect-timeout=2s", world.url().replace("/main", "/other")));
    assert!(matches!(RedisStore::open(unknown).await, Err(RedisOpenError::Unreachable(_))));
    let sentinel = options(&format!("redis://127.0.0.1:{}", world.sentinels[0].port()));
    assert!(matches!(RedisStore::open(sentinel).await, Err(RedisOpenError::Unfit(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_distributes_the_records_and_survives_the_loss_of_one_primary() {
    let mut cluster = RedisCluster::start().unwrap();
    let one = options(&format!("redis://127.0.0.1:{}", cluster.servers[0].port()));
    let error = RedisStore::open(one).await.unwrap_err();
    assert!(matches!(&error, RedisOpenError::Unfit(what) if what.contains("redis-cluster://")), "{error}");
    let store = open(&format!("{}?timeout=1s", cluster.url())).await;
    assert_eq!(store.capabilities().durability, Durability::Unlogged);
    store.check().await.unwrap();
    let mut tokens = Vec::new();
    for n in 0..150 {
        let grant = granted(&store, n, n).await;
        if n % 2 == 0 {
            assert_eq!(store.apply(id(n), completion(grant.token, n)).await.unwrap(), Outcome::Completed);
        }
        tokens.push(grant.token);
    }
    for server in cluster.primaries() {
        let size: usize =
            server.command(&["DBSIZE"]).unwrap().trim().trim_start_matches(':').parse().unwrap();
        assert!(size > 20, "each has its part");
    }
    for limit in [7, 1000] {
        let (mut query, mut found) = (ListQuery::default(), std::collections::BTreeSet::new());
        query.limit = limit;
        loop {
            let page = store.list(query.clone()).await.unwrap();
            found.extend(page.records.into_iter().map(|(id, _)| id));
            query.after = page.next;
            if query.after.is_none() {
                break;
            }
        }
        assert_eq!(found, (0..150).map(id).collect());
    }
    // The audit trail is in another slot than most records.
    for n in 200..210 {
        let mut parked = claim(n);
        parked.lease = Duration::from_millis(1);
        store.apply(id(n), Command::Claim(parked.clone())).await.unwrap();
        tokio::time::sleep(Duration::from_millis(5)).await;
        parked.attempt = oncegate_core::AttemptId::new(1 << 60);
        parked.on_abandoned = OnAbandoned::Park;
        assert_eq!(store.apply(id(n), Command::Claim(parked)).await.unwrap(), Outcome::Unknown);
        let resolve = Resolve {
            resolution: Resolution::Complete(Some(response(n))),
            retention: MINUTE,
            force: false,
            amend: false,
            actor: format!("operator {n}"),
            reason: "found".to_owned(),
        };
        let outcome = store.apply(id(n), Command::Resolve(resolve)).await.unwrap();
        assert_eq!(outcome, Outcome::Resolved { from: StateName::Unknown });
    }
    for n in 210..215 {
        let Outcome::Execute(grant) = store.apply(id(n), Command::Claim(claim(n))).await.unwrap() else {
            panic!("record {n} is free")
        };
        let completion = Completion::Replayable(response(n));
        let complete = Complete { token: grant.token, completion, retention: MINUTE };
        assert_eq!(store.apply(id(n), Command::Complete(complete)).await.unwrap(), Outcome::Completed);
        let mut rewrite = Rewrite::of(&store.lookup(id(n)).await.unwrap().unwrap());
        rewrite.response.as_mut().unwrap().to = response(n + 1);
        assert_eq!(store.apply(id(n), Command::Rewrite(rewrite)).await.unwrap(), Outcome::Rewritten);
        let forget = Forget { actor: format!("operator {n}"), reason: "asked for".to_owned() };
        let forgotten = Outcome::Forgotten { from: StateName::Completed };
        assert_eq!(store.apply(id(n), Command::Forget(forget.clone())).await.unwrap(), forgotten);
        let nothing_kept = Outcome::NotForgotten { state: Some(StateName::Tombstone) };
        assert_eq!(store.apply(id(n), Command::Forget(forget)).await.unwrap(), nothing_kept);
    }
    let trail = store.audit(None, 100).await.unwrap();
    let numbers: Vec<_> = trail.iter().map(|entry| (entry.number, entry.id)).collect();
    assert_eq!(numbers, (1..=15).rev().map(|number| (number, id(199 + number))).collect::<Vec<_>>());

    // One primary dies. Its replica has the older records. Claims of its slots are refused until the replica takes over.
    // `WAIT` on a connection of its own would wait for nothing: it counts the writes of its connection.
    let deadline = Instant::now() + Duration::from_secs(60);
    for server in cluster.primaries() {
        while !has_all_at_its_replicas(&server.command(&["INFO", "replication"]).unwrap()) {
            assert!(Instant::now() < deadline, "the replicas are behind");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    let lost = cluster
        .servers
        .iter()
        .position(|s| s.command(&["ROLE"]).is_ok_and(|r| r.contains("master")))
        .unwrap();
    cluster.servers[lost].kill();
    let started = Instant::now();
    for n in 0..150 {
        let outcome = until_ok(|| try_claim(&store, n, n)).await;
        match outcome {
            Outcome::Replay(found) if n % 2 == 0 => assert_eq!(found, response(n)),
            Outcome::Execute(grant) if n % 2 == 1 => assert_eq!(grant.token, tokens[n as usize]),
            other => panic!("{n}: {other:?}"),
        }
    }
    for n in 300..400 {
        until_ok(|| try_claim(&store, n, n)).await;
    }
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
    cluster.servers[lost].restart().unwrap();
    until_ok(|| store.check()).await;
}

/// Returns true if each replica has acknowledged all writes of the primary, by its `INFO replication`.
fn has_all_at_its_replicas(info: &str) -> bool {
    let value = |name: &str| info.lines().find_map(|line| line.trim().strip_prefix(name));
    let Some(written) = value("master_repl_offset:") else { return false };
    let replicas = info.lines().filter(|line| line.starts_with("slave") && line.contains("offset="));
    let offsets: Vec<_> =
        replicas.filter_map(|line| line.split(',').find_map(|part| part.strip_prefix("offset="))).collect();
    !offsets.is_empty() && offsets.iter().all(|offset| *offset == written)
}
