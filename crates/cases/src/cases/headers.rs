//! Headers that are stored, and headers that never are.

use std::time::{Duration, SystemTime};

use super::{pay, pay_as};
use crate::backend::Script;
use crate::client::Response;
use crate::plan::Plan;
use crate::table::{Case, assert_replay};
use crate::world::{Deployment, World};

/// The headers of the protocol's list, each with a possible value.
const KEPT: [(&str, &str); 13] = [
    ("content-type", "application/vnd.test+json; charset=utf-8"),
    ("content-language", "en"),
    ("content-disposition", "attachment; filename=\"a b.json\""),
    ("content-location", "/payments/1"),
    ("location", "/payments/1?x=%20"),
    ("etag", "W/\"v1\""),
    ("last-modified", "Tue, 01 Jul 2025 10:00:00 GMT"),
    ("link", "</payments/1>; rel=\"self\""),
    ("cache-control", "private, max-age=60"),
    ("accept-patch", "application/merge-patch+json"),
    ("preference-applied", "return=representation"),
    ("deprecation", "@1688169599"),
    ("sunset", "Sat, 31 Dec 2033 23:59:59 GMT"),
];

/// Headers that are never stored. `Trailer`, `Upgrade` and the framing have their own cases.
const DROPPED: [(&str, &str); 29] = [
    ("keep-alive", "timeout=77"),
    ("proxy-connection", "keep-alive"),
    ("age", "10"),
    ("set-cookie", "session=secret"),
    ("www-authenticate", "Basic realm=\"a\""),
    ("proxy-authenticate", "Basic realm=\"a\""),
    ("authentication-info", "nextnonce=\"a\""),
    ("proxy-authentication-info", "nextnonce=\"a\""),
    ("access-control-allow-origin", "https://one.test"),
    ("access-control-allow-credentials", "true"),
    ("access-control-expose-headers", "etag"),
    ("access-control-allow-methods", "POST"),
    ("access-control-max-age", "60"),
    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ("tracestate", "a=b"),
    ("x-request-id", "first"),
    ("request-id", "first"),
    ("x-correlation-id", "first"),
    ("x-amzn-trace-id", "first"),
    ("ratelimit", "\"a\";r=1;t=2"),
    ("ratelimit-policy", "\"a\";q=1"),
    ("ratelimit-remaining", "1"),
    ("x-ratelimit-remaining", "1"),
    ("retry-after", "7"),
    ("server-timing", "db;dur=1"),
    ("x-powered-by", "a-framework"),
    ("x-anything", "at all"),
    ("alt-svc", "h3=\":443\""),
    ("strict-transport-security", "max-age=1"),
];

pub(super) fn cases() -> Vec<Case> {
    cases! {
        "stored-headers-are-replayed": "the listed fields are replayed unchanged"
            => run (kept);
        "other-headers-are-not-replayed": "hop-by-hop fields, credentials, cookies, tracing, limits and unlisted fields are not replayed"
            => run (dropped);
        "header-named-by-connection-is-not-replayed": "a field that Connection names is not replayed, listed or not"
            => run (nominated);
        "replay-has-its-own-date": "the date of a replay is that of the replay"
            => run (date);
        "replay-has-no-retry-after": "a replayed 503 has no Retry-After, because its time is over"
            => run (retry_after_is_not_kept);
        "replay-has-no-age": "a replay has no Age, and only the service's own Cache-Control"
            => run (uncached);
        "several-header-lines-are-replayed-in-order": "several lines of one field are replayed in their order"
            => run (several_lines);
        "header-value-that-is-not-ascii": "a value that is not ASCII is replayed unchanged"
            => run (odd_values);
        "configured-header-is-stored": "a configured header is stored in addition to the listed ones"
            .given(Plan { stored_header: Some("x-anything"), ..Plan::default() })
            => run (configured);
        "unsafe-header-cannot-be-configured": "a header that must never be replayed cannot be configured"
            .only_layer("the sidecar reads its settings before it has any store or service")
            .and_libraries()
            => start (never_configured);
        "configured-header-named-by-connection-is-not-stored": "a configured field that Connection names is not stored"
            .given(Plan { stored_header: Some("x-anything"), ..Plan::default() })
            => run (configured_and_nominated);
        "handler-cannot-forge-the-replay-marker": "a handler cannot mark its response as a replay, or as the response to another key"
            => run (no_marker_from_inside);
    }
}

fn with_all(mut script: Script, fields: &[(&str, &str)]) -> Script {
    for (name, value) in fields {
        script = script.field(name, value);
    }
    script
}

async fn twice(world: &World, script: Script) -> (Response, Response) {
    let request = pay_as("abc").script(script);
    let first = world.send(request.clone()).await;
    let again = world.send(request.clone()).await;
    assert_replay(&world.plan, &request, &first, &again);
    assert_eq!(world.backend.effects(), 1);
    (first, again)
}

async fn kept(world: World) {
    let (first, again) = twice(&world, with_all(Script::status(201), &KEPT)).await;
    for (name, value) in KEPT {
        assert_eq!(first.get(name), Some(value), "first: {first:?}");
        assert_eq!(again.get(name), Some(value), "replay: {again:?}");
    }
}

async fn dropped(world: World) {
    let (first, again) = twice(&world, with_all(Script::status(201), &DROPPED)).await;
    for (name, value) in DROPPED {
        // What belongs to one connection may end there.
        if !["keep-alive", "proxy-connection"].contains(&name) {
            assert_eq!(first.get(name), Some(value), "first: {first:?}");
        }
        // A server may have a field of its own about its connection.
        let own = again.get(name).filter(|own| name != "keep-alive" || *own == value);
        assert_eq!(own, None, "replay: {again:?}");
    }
}

async fn nominated(world: World) {
    let script =
        Script::status(201).field("connection", "ETag, x-hop").field("etag", "\"v1\"").field("x-hop", "1");
    let (_, again) = twice(&world, script.field("location", "/payments/1")).await;
    assert_eq!(again.get("etag"), None, "{again:?}");
    assert_eq!(again.get("x-hop"), None, "{again:?}");
    assert_eq!(again.get("location"), Some("/payments/1"), "{again:?}");
}

async fn date(world: World) {
    let old = "Tue, 01 Jul 2025 10:00:00 GMT";
    let before = SystemTime::now() - Duration::from_secs(2);
    let (_, again) = twice(&world, Script::status(201).field("date", old)).await;
    let date = again.get("date").expect("a server has a clock (RFC 9110, 6.6.1)");
    assert_ne!(date, old, "{again:?}");
    let replayed = seconds_of(date);
    let since = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    assert!(replayed >= since(before) && replayed <= since(SystemTime::now()) + 2, "{date}");
}

/// Seconds since 1970 of a date in the form of RFC 9110.
fn seconds_of(date: &str) -> u64 {
    let parts: Vec<_> = date.split([' ', ':']).collect();
    let number = |n: usize| parts[n].parse::<u64>().expect("a number");
    let months = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let month = months.iter().position(|name| *name == parts[2]).expect("a month") as u64 + 1;
    // Days of the civil calendar, counted from a year that starts in March.
    let (year, month) = if month > 2 { (number(3), month - 3) } else { (number(3) - 1, month + 9) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + number(1) - 719_469;
    ((days * 24 + number(4)) * 60 + number(5)) * 60 + number(6)
}

async fn retry_after_is_not_kept(world: World) {
    let (first, again) = twice(&world, Script::status(503).field("retry-after", "120")).await;
    assert_eq!(first.get("retry-after"), Some("120"), "{first:?}");
    assert_eq!(again.get("retry-after"), None, "{again:?}");
}

async fn uncached(world: World) {
    let (_, again) = twice(&world, Script::status(201)).await;
    assert_eq!(again.get("age"), None, "{again:?}");
    assert_eq!(again.get("cache-control"), None, "{again:?}");
}

async fn several_lines(world: World) {
    let links: [&[u8]; 3] = [b"</a>; rel=\"next\"", b"</b>; rel=\"prev\"", b"</c>; rel=\"self\""];
    let script = links.iter().fold(Script::status(201), |script, link| script.field("link", link));
    let (first, again) = twice(&world, script).await;
    assert_eq!(first.all("link"), links);
    assert_eq!(again.all("link"), links);
}

async fn odd_values(world: World) {
    let name = "attachment; filename=\"\u{fc}\"".as_bytes();
    let (first, again) = twice(&world, Script::status(201).field("content-disposition", name)).await;
    assert_eq!(first.all("content-disposition"), [name]);
    assert_eq!(again.all("content-disposition"), [name]);
}

async fn configured(world: World) {
    let script =
        Script::status(201).field("x-anything", "at all").field("x-other", "1").field("etag", "\"v1\"");
    let (_, again) = twice(&world, script).await;
    assert_eq!(again.get("x-anything"), Some("at all"), "{again:?}");
    assert_eq!(again.get("etag"), Some("\"v1\""), "{again:?}");
    assert_eq!(again.get("x-other"), None, "{again:?}");
}

async fn configured_and_nominated(world: World) {
    let script = Script::status(201).field("x-anything", "at all").field("connection", "x-anything");
    let (_, again) = twice(&world, script).await;
    assert_eq!(again.get("x-anything"), None, "{again:?}");
}

async fn never_configured(world: World) {
    let never = [
        "connection",
        "keep-alive",
        "transfer-encoding",
        "te",
        "trailer",
        "upgrade",
        "proxy-connection",
        "content-length",
        "date",
        "age",
        "set-cookie",
        "www-authenticate",
        "proxy-authenticate",
        "authentication-info",
        "access-control-allow-origin",
        "access-control-expose-headers",
        "traceparent",
        "x-request-id",
        "ratelimit",
        "ratelimit-remaining",
        "retry-after",
        "server-timing",
    ];
    for name in never {
        let plan = Plan { stored_header: Some(name), ..Plan::default() };
        let is_accepted = match world.deployment {
            Deployment::Library(library) => {
                let asked = tokio::task::spawn_blocking(move || library.accepts(&plan));
                asked.await.expect("an answer")
            }
            _ => {
                Plan::default().settings().with_stored_headers([http::HeaderName::from_static(name)]).is_ok()
            }
        };
        assert!(!is_accepted, "{name} can be configured");
    }
}

async fn no_marker_from_inside(world: World) {
    let script = || {
        Script::status(201)
            .field("idempotent-replayed", "true")
            .field("idempotency-key", "\"of-another-caller\"")
            .field("idempotency-status", "fenced")
    };
    let request = pay_as("abc").script(script());
    let first = world.send(request.clone()).await;
    assert_eq!(first.get("idempotent-replayed"), None, "{first:?}");
    assert_eq!(first.all("idempotency-key"), [b"abc"], "{first:?}");
    assert_eq!(first.get("idempotency-status"), None, "{first:?}");
    let again = world.send(request.clone()).await;
    assert_replay(&world.plan, &request, &first, &again);
    assert_eq!(again.get("idempotency-status"), None, "{again:?}");
    assert_eq!(world.send(pay().script(script())).await.status(), 201);
}
