//! The lists of many records of a sidecar on Redis, and on a Redis Cluster.

use std::time::{Duration, Instant};

use oncegate_servers::{RedisCluster, RedisOptions, RedisServer};

use crate::OK;
use crate::operations::admin;
use crate::postgres::{next_load, whole, with_routes};
use crate::support::{Service, request};

const RECORDS: u64 = 10_000;

/// Writes the records from ARGV[1] to ARGV[2]. The newest have the smallest numbers. One in a thousand waits for an operator.
const FILL: &str = "#!lua
local time = redis.call('TIME')
local now = time[1] * 1000
for n = tonumber(ARGV[1]), tonumber(ARGV[2]) do
  local state, operation = 'completed', n % 4 == 0 and 'POST /refunds' or 'POST /payments/' .. n % 100
  local response = '\\1\\0\\201\\0\\0\\0\\0' .. string.rep('paid', 75)
  if n % 1000 == 0 then
    state, response = 'unknown', ''
  end
  local record = struct.pack('>BI4Bc0BBI8I8I8c16I8I4I8c33c8Bc0I2c0I2', 1, #response, #state, state, 0, 0, now - n * 100,
    now + 86400000, 0, string.rep('\\0', 16), 1, 1, now - n * 100, '\\1' .. string.rep('f', 32), string.rep('c', 8), 0, '',
    #operation, operation, 0) .. response
  redis.call('SET', string.format('oncegate:{%064d}', n), record, 'PX', 90000000)
end
return 0";

#[tokio::test(flavor = "multi_thread")]
async fn lists_of_many_records_on_redis_are_complete() {
    let server =
        tokio::task::spawn_blocking(|| RedisServer::start(RedisOptions::new()).unwrap()).await.unwrap();
    for first in (1..=RECORDS).step_by(5000) {
        server.command(&["EVAL", FILL, "0", &first.to_string(), &(first + 4999).to_string()]).unwrap();
    }
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let sidecar = with_routes(service.address, &server.url(), directory.path()).await;
    let id = |n: u64| format!("{n:064}");

    let listed: serde_json::Value =
        serde_json::from_str(&whole(&sidecar, "/v1/keys?order=newest&limit=2").await).unwrap();
    assert_eq!((&listed["complete"], &listed["total"]), (&true.into(), &RECORDS.into()), "{listed}");
    assert_eq!(listed["totals"], serde_json::json!({"completed": RECORDS - 10, "unknown": 10}));
    let records: Vec<_> = listed["records"]
        .as_array()
        .unwrap()
        .iter()
        .map(|record| record["record"].as_str().unwrap())
        .collect();
    assert_eq!(records, [id(1), id(2)]);
    assert_eq!(listed["records"][0]["response"], serde_json::json!({"status": 201, "body_bytes": 300}));

    let keys = whole(&sidecar, "/keys").await;
    assert!(keys.contains(&id(1)) && keys.contains(&id(50)) && !keys.contains(&id(51)), "{keys}");
    assert!(keys.contains("10\u{202f}000 in all") && keys.contains("9\u{202f}990"), "{keys}");
    let (_, rest) = keys.split_once("href=\"/keys?after=").unwrap();
    let next = whole(&sidecar, &format!("/keys?after={}", rest.split('"').next().unwrap())).await;
    assert!(next.contains(&id(51)) && next.contains(&id(100)) && !next.contains(&id(50)), "{next}");
    let stuck = whole(&sidecar, "/stuck").await;
    assert!(stuck.contains(&id(RECORDS)) && stuck.contains("10 in all"), "{stuck}");
    let routes = whole(&sidecar, "/routes").await;
    for count in ["7\u{202f}500", "2\u{202f}490", "10"] {
        assert!(routes.contains(&format!("</span> {count}</span>")), "{count} in {routes}");
    }
    // What cannot be read is named, and not counted.
    server.command(&["SETRANGE", &format!("oncegate:{{{}}}", id(7)), "0", "9"]).unwrap();
    let listed: serde_json::Value =
        serde_json::from_str(&whole(&sidecar, "/v1/keys?order=newest&limit=2").await).unwrap();
    assert_eq!(
        (&listed["unreadable"], &listed["total"]),
        (&serde_json::json!([id(7)]), &(RECORDS - 1).into())
    );
}

/// Without its records a list would look complete.
#[tokio::test(flavor = "multi_thread")]
async fn lists_of_a_cluster_fail_without_a_node() {
    let start =
        || RedisCluster::start_with(&RedisOptions::new().with("cluster-replica-no-failover yes")).unwrap();
    let mut cluster = tokio::task::spawn_blocking(start).await.unwrap();
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let sidecar = with_routes(service.address, &cluster.url(), directory.path()).await;
    for number in 0..40 {
        let key = format!("Idempotency-Key: \"payment-{number}\"");
        sidecar.ask(&request("POST", "/payments/1", &[&key], "{}")).await.has_status(200);
    }
    assert!(whole(&sidecar, "/keys").await.contains("40 in all"));
    assert!(whole(&sidecar, "/routes").await.contains("completed</span> 40</span>"));
    let primary = |server: &RedisServer| server.command(&["ROLE"]).is_ok_and(|role| role.contains("master"));
    let lost = cluster.servers.iter().position(primary).unwrap();
    cluster.servers[lost].kill();
    for path in ["/v1/keys?order=newest", "/keys", "/stuck", "/routes"] {
        // A page may show the last survey once, with its time.
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut at = path.to_owned();
        loop {
            let answer = admin(&sidecar, &at).await;
            if answer.status() == 503 {
                break;
            }
            let text = answer.text();
            let next = next_load(text);
            assert!(
                (text.contains("are of") || next.is_some()) && Instant::now() < deadline,
                "{path}: {text}"
            );
            at = next.unwrap_or_else(|| path.to_owned());
        }
    }
}
