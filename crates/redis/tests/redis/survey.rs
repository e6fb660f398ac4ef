//! Numbers and places of records, compared with what a listing of all records gives.

use crate::support::*;
use oncegate_core::{
    Command, RecordId, Resolution, Resolve, StateName, Store, StoreError, StoreErrorKind, Survey, SurveyQuery,
};
use oncegate_redis::RedisStore;
use oncegate_redis::contract::record_key;
use oncegate_servers::{RedisCluster, RedisOptions as ServerOptions, RedisServer};
use oncegate_testkit::surveys::{self, Counts, counts_of};

/// Writes the records with the numbers from ARGV[1] to ARGV[2]: of every state, caller and operation, some of them past their
/// lease or their retention, many with the same time. With ARGV[3], all are completed and each has an operation of its own.
const FILL: &str = "#!lua
local time = redis.call('TIME')
local now, names = time[1] * 1000, {'in-progress', 'unknown', 'completed', 'awaited', 'tombstone', 'released'}
local operations = {'POST /payments', 'POST /refunds', '(shadow) POST /payments', '', 'PUT /' .. string.rep('long/', 50)}
for n = tonumber(ARGV[1]), tonumber(ARGV[2]) do
  local state, operation = names[n % 6 + 1], operations[n % 5 + 1]
  if ARGV[3] then
    state, operation = 'completed', 'POST /payments/' .. n
  end
  local response = state == 'completed' and '\\1\\0\\201\\0\\0\\0\\0' .. string.rep('paid', 75) or ''
  local is_running = state == 'in-progress'
  local lease_until = is_running and now + (n % 3 - 1) * 3600000 or 0
  local expires_at = not ARGV[3] and n % 11 == 0 and now - 1 or now + 86400000
  local tag = n % 7 > 0 and struct.pack('>I8', n % 100) or ''
  local resolution = n % 13 == 0 and struct.pack('>I8Bc0Bc0I2c0I2c0', now, 7, 'unknown', #state, state, 2, 'me', 900,
    string.rep('because ', 113)) or ''
  local record = struct.pack('>BI4Bc0BBI8I8I8c16I8I4I8c33c8Bc0I2c0I2c0', 1, #response, #state, state, 0, 0,
    now - math.floor(n / 10) * 100000, expires_at, lease_until, string.rep(is_running and 'a' or '\\0', 16), n + 1, 1,
    now - 100000000, '\\1' .. string.rep('f', 32), struct.pack('>I8', n % 5), #tag, tag, #operation, operation, #resolution,
    resolution) .. response
  local id = redis.sha1hex(n) .. string.sub(redis.sha1hex(-n), 1, 24)
  redis.call('SET', 'oncegate:{' .. id .. '}', record, 'PX', 90000000)
end
return redis.call('DBSIZE')";

fn fill(server: &RedisServer, first: u64, last: u64, is_each_of_its_own: bool) {
    for first in (first..=last).step_by(5000) {
        let (first, last) = (first.to_string(), last.min(first + 4999).to_string());
        let mut command = vec!["EVAL", FILL, "0", &first, &last];
        command.extend(is_each_of_its_own.then_some("1"));
        let size = server.command(&command).unwrap();
        assert!(size.trim().trim_start_matches(':').parse::<u64>().is_ok(), "{size}");
    }
}

fn query_of(set: impl FnOnce(&mut SurveyQuery)) -> SurveyQuery {
    let mut query = SurveyQuery::default();
    set(&mut query);
    query
}

/// A survey to its end.
async fn whole(store: &RedisStore, query: &SurveyQuery) -> Survey {
    surveys::whole_survey(store, query).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_survey_counts_and_orders_what_a_listing_shows() {
    let server = RedisServer::start(ServerOptions::new()).unwrap();
    fill(&server, 1, 3000, false);
    let store = open(&server.url()).await;
    assert_eq!(surveys::compare(&store).await.len(), 3000 - 272);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_survey_of_a_cluster_covers_every_node_and_fails_without_one() {
    let options = ServerOptions::new().with("cluster-replica-no-failover yes");
    let mut cluster = RedisCluster::start_with(&options).unwrap();
    let store = open(&format!("{}?timeout=1s", cluster.url())).await;
    for n in 0..300 {
        let grant = granted(&store, n, n).await;
        if n % 3 > 0 {
            store.apply(id(n), completion(grant.token, n)).await.unwrap();
        }
    }
    assert_eq!(surveys::compare(&store).await.len(), 300);
    // No replica takes over.
    let lost = cluster
        .servers
        .iter()
        .position(|server| server.command(&["ROLE"]).is_ok_and(|role| role.contains("master")))
        .unwrap();
    cluster.servers[lost].kill();
    let error = store.survey(SurveyQuery::default()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    // It comes back, possibly without its records.
    cluster.servers[lost].restart().unwrap();
    until_ok(|| async {
        let counted = store.survey(SurveyQuery::default()).await?.unwrap();
        let listed = surveys::all_records(&store).await?;
        let records: u64 = counted.counts.iter().map(|count| count.records).sum();
        assert_eq!(records, listed.len() as u64);
        Ok::<_, StoreError>(())
    })
    .await;
}

/// The server is asked once for each 250 keys, and never for a response.
#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_thousand_records_are_counted_to_the_end() {
    let server = RedisServer::start(ServerOptions::new()).unwrap();
    fill(&server, 1, 100_000, false);
    let store = open(&server.url()).await;
    let before = calls_of(&server, "evalsha") + calls_of(&server, "eval");
    let mut query = query_of(|query| query.max_places = 51);
    let newest = whole(&store, &query).await;
    let calls = calls_of(&server, "evalsha") + calls_of(&server, "eval") - before;
    assert!((400..2000).contains(&calls), "{calls}");
    assert_eq!(newest.counts.iter().map(|count| count.records).sum::<u64>(), 100_000 - 9090);
    assert!(newest.counts.iter().all(|count| count.records > 4000), "{:?}", newest.counts);
    let id_of = |n: u64| {
        let hex =
            |n: i64| server.command(&["EVAL", "return redis.sha1hex(ARGV[1])", "0", &n.to_string()]).unwrap();
        let (first, second) = (hex(n as i64), hex(-(n as i64)));
        let digits =
            |reply: &str| reply.lines().last().unwrap_or_default().trim().trim_matches('"').to_owned();
        RecordId::from_hex(&format!("{}{}", digits(&first), &digits(&second)[..24])).unwrap()
    };
    let mut first: Vec<_> = (1..=9).map(id_of).collect();
    first.sort_unstable();
    first.reverse();
    assert_eq!(newest.places.iter().take(9).map(|place| place.1).collect::<Vec<_>>(), first);
    query.is_oldest_first = true;
    let oldest = whole(&store, &query).await;
    assert_eq!(oldest.places[0].1, id_of(100_000));
    assert_eq!(counts_of(&oldest), counts_of(&newest));
}

/// A survey that ends with a part goes on where it ended, and records that do not change count once.
#[tokio::test(flavor = "multi_thread")]
async fn a_survey_in_parts_counts_once_what_stays_while_others_change() {
    let server = RedisServer::start(ServerOptions::new()).unwrap();
    fill(&server, 1, 25_000, true);
    let store = open(&server.url()).await;
    let mut query = query_of(|query| {
        query.by_operation = true;
        query.max_places = 10
    });
    let (mut counts, mut number_of_parts) = (Counts::new(), 0);
    loop {
        let part = store.survey(query.clone()).await.unwrap().unwrap();
        for (pair, records) in counts_of(&part) {
            *counts.entry(pair).or_default() += records;
        }
        number_of_parts += 1;
        // New records, so many that the server makes its table larger.
        let from = 100_000 * number_of_parts;
        fill(&server, from, from + 20_000, false);
        query.list.after = part.next;
        if part.next.is_none() {
            break;
        }
    }
    assert!(number_of_parts > 2, "{number_of_parts}");
    for n in 1..=25_000 {
        let pair = (StateName::Completed, Some(format!("POST /payments/{n}")));
        assert_eq!(counts.get(&pair), Some(&1), "{n}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_survey_names_what_cannot_be_read_and_leaves_other_keys_out() {
    let server = RedisServer::start(ServerOptions::new()).unwrap();
    let store = open(&server.url()).await;
    for n in 0..10 {
        granted(&store, n, n).await;
    }
    let (damaged, list) = (record_key(&id(3)), record_key(&id(100)));
    server.command(&["SETRANGE", &damaged, "0", "7"]).unwrap();
    server.command(&["RPUSH", &list, "a"]).unwrap();
    server.command(&["SET", &record_key(&id(101)), &"z".repeat(300)]).unwrap();
    server.command(&["SET", "oncegate:{order-1}", "mine"]).unwrap();
    server.command(&["SET", "orders", "mine"]).unwrap();
    let resolve = Resolve {
        resolution: Resolution::Release,
        retention: MINUTE,
        force: true,
        amend: false,
        actor: "operator".to_owned(),
        reason: "its owner is gone".to_owned(),
    };
    store.apply(id(4), Command::Resolve(resolve)).await.unwrap();
    for by_operation in [false, true] {
        let query = query_of(|query| (query.max_places, query.by_operation) = (100, by_operation));
        let mut found = whole(&store, &query).await;
        found.unreadable.sort_unstable();
        let mut unreadable = vec![id(3), id(100), id(101)];
        unreadable.sort_unstable();
        assert_eq!(found.unreadable, unreadable);
        let numbers: Vec<_> =
            counts_of(&found).into_iter().map(|((state, _), records)| (state, records)).collect();
        assert_eq!(numbers, [(StateName::InProgress, 8), (StateName::Released, 1)]);
        assert_eq!(found.places.len(), 9);
    }
}

/// Records are listed then.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_refuses_the_script_has_no_survey() {
    let rules = "~oncegate:* &oncegate:* -@all +eval +evalsha +time +get +getrange +set +append +spublish +xadd +xrevrange \
        +ping +info +config|get";
    let server = RedisServer::start(ServerOptions::new().with_user("sidecar", "secret", rules)).unwrap();
    let store = open(&server.url()).await;
    granted(&store, 1, 1).await;
    assert_eq!(store.survey(SurveyQuery::default()).await.unwrap(), None);
}
