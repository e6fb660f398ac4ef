//! The dialects of the shipped profiles: what a client sees of one key from its first request to its reuse.

use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

use oncegate_testkit::Latch;

use crate::backend::Script;
use crate::client::{Request, Response};
use crate::plan::{Callers, Plan};
use crate::table::Case;
use crate::world::World;

/// The expected differences between two profiles.
struct Dialect {
    /// A request with this key, if any, and this amount.
    request: fn(Option<&str>, u32) -> Request,
    /// The header field of the key in responses.
    echo: Option<&'static str>,
    /// The status of the replay of a 201.
    replay: u16,
    /// The refusal of a duplicate while the first request runs.
    in_progress: Refusal,
    /// The refusal of another body; `None` if it is a replay.
    reused: Option<Refusal>,
    /// The refusal of a request without a key; `None` if it passes.
    missing: Option<Refusal>,
    /// The statuses after which the same key executes again.
    released: &'static [u16],
    /// The statuses that are kept.
    kept: &'static [u16],
}

const UUID: &str = "8e03978e-40d5-43e8-bc93-6894a57f9324";

/// The time at which the tests began.
static STARTED: LazyLock<String> = LazyLock::new(|| httpdate::fmt_http_date(SystemTime::now()));

/// The status of a refusal, and a value in its body.
struct Refusal(u16, &'static str, &'static str);

const ACP: Dialect = Dialect {
    request: |key, amount| in_field("Idempotency-Key", key, amount),
    echo: Some("idempotency-key"),
    replay: 201,
    in_progress: Refusal(409, "/code", "idempotency_in_flight"),
    reused: Some(Refusal(422, "/code", "idempotency_conflict")),
    missing: Some(Refusal(400, "/code", "idempotency_key_required")),
    released: &[500, 503, 429],
    kept: &[201, 400, 404],
};

const ADYEN: Dialect = Dialect {
    request: |key, amount| in_field("Idempotency-Key", key, amount),
    echo: Some("idempotency-key"),
    replay: 201,
    in_progress: Refusal(422, "/errorCode", "704"),
    reused: Some(Refusal(422, "/errorCode", "702")),
    missing: None,
    released: &[429],
    kept: &[201, 400, 422, 500],
};

const AWS: Dialect = Dialect {
    request: |key, amount| {
        in_body("clientToken", key, amount)
            .drop_field("Content-Type")
            .field("Content-Type", "application/x-amz-json-1.1")
    },
    echo: None,
    replay: 201,
    in_progress: Refusal(409, "/__type", "TransactionInProgressException"),
    reused: Some(Refusal(400, "/__type", "IdempotentParameterMismatchException")),
    missing: None,
    released: &[429],
    kept: &[201, 400, 500],
};

const OASIS: Dialect = Dialect {
    request: |key, amount| {
        let request = in_field("Repeatability-Request-ID", key.map(|_| UUID), amount);
        match key {
            Some(_) => request.field("Repeatability-First-Sent", &*STARTED),
            None => request,
        }
    },
    echo: Some("repeatability-request-id"),
    replay: 201,
    in_progress: Refusal(409, "/retry", "same-key"),
    reused: Some(Refusal(400, "/retry", "new-key")),
    missing: None,
    released: &[],
    kept: &[],
};

const PAYPAL: Dialect = Dialect {
    request: |key, amount| in_field("PayPal-Request-Id", key, amount),
    echo: Some("paypal-request-id"),
    replay: 200,
    in_progress: Refusal(409, "/details/0/issue", "PREVIOUS_REQUEST_IN_PROGRESS"),
    reused: Some(Refusal(422, "/details/0/issue", "PAYPAL_REQUEST_ID_PREVIOUSLY_USED")),
    missing: None,
    released: &[400, 404, 422, 429],
    kept: &[202, 500],
};

const SQUARE: Dialect = Dialect {
    request: |key, amount| in_body("idempotency_key", key, amount),
    echo: None,
    replay: 201,
    in_progress: Refusal(409, "/errors/0/code", "CONFLICT"),
    reused: Some(Refusal(400, "/errors/0/code", "IDEMPOTENCY_KEY_REUSED")),
    missing: Some(Refusal(400, "/errors/0/code", "MISSING_REQUIRED_PARAMETER")),
    released: &[429],
    kept: &[201, 400, 500],
};

const STRIPE_V2: Dialect = Dialect {
    request: |key, amount| in_field("Idempotency-Key", key, amount),
    echo: Some("idempotency-key"),
    replay: 201,
    in_progress: Refusal(409, "/error/code", "idempotency_key_in_use"),
    reused: Some(Refusal(400, "/error/type", "idempotency_error")),
    missing: None,
    released: &[400, 429, 500],
    kept: &[201, 402],
};

const WEBHOOK: Dialect = Dialect {
    request: |key, amount| in_field("webhook-id", key, amount),
    echo: Some("webhook-id"),
    replay: 201,
    in_progress: Refusal(409, "/retry", "same-key"),
    reused: None,
    missing: Some(Refusal(400, "/retry", "fix-request")),
    released: &[400, 404, 422, 429, 500],
    kept: &[200, 204],
};

pub(super) fn cases() -> Vec<Case> {
    let of = |profile| Plan { profile, ..Plan::default() };
    cases! {
        "dialect-acp": "acp: keys, replays and refusals are those of the protocol"
            .given(of("acp")) => run (speaks, &ACP);
        "dialect-adyen": "adyen: keys, replays and refusals are those of the API"
            .given(of("adyen")) => run (speaks, &ADYEN);
        "dialect-aws": "aws: a member of the body carries the key, whatever the media type"
            .given(of("aws")) => run (speaks, &AWS);
        "dialect-aws-forms": "aws: a form or a query carries the key, and two places agree"
            .given(of("aws")) => run (aws_forms);
        "dialect-aws-unreadable": "aws: a body that may have a key and cannot be read is refused"
            .given(of("aws")) => run (unreadable_bodies);
        "dialect-aws-callers": "aws: only a request with a key must identify its caller"
            .given(Plan { scope: Callers::NotSet, ..of("aws") }) => run (callers_of_keys);
        "dialect-aws-operations": "aws: each operation has tokens of its own"
            .given(of("aws")) => run (scopes_of_keys);
        "dialect-stripe-accounts": "stripe: each account has keys of its own"
            .given(of("stripe")) => run (scopes_of_keys);
        "dialect-oasis": "oasis: keys, replays and refusals are those of the specification"
            .given(of("oasis")) => run (speaks, &OASIS);
        "dialect-oasis-first-sent": "oasis: the first sending has a date within the retention"
            .given(of("oasis")) => run (first_sent);
        "dialect-paypal": "paypal: a replayed 201 is a 200, and client errors free the key"
            .given(of("paypal")) => run (speaks, &PAYPAL);
        "dialect-square": "square: a member of the body carries the key"
            .given(of("square")) => run (speaks, &SQUARE);
        "dialect-stripe-v2": "stripe-v2: server errors free the key"
            .given(of("stripe-v2")) => run (speaks, &STRIPE_V2);
        "dialect-unknown": "classic: an outcome that the service does not know never frees the key"
            .given(of("classic")) => run (unknown_outcomes);
        "dialect-webhook": "webhook: another body of the same event is a retry"
            .given(of("webhook")) => run (speaks, &WEBHOOK);
        "dialect-webhook-senders": "webhook: each sender has a field of its own for the event"
            .given(of("webhook")) => run (senders);
        "dialect-stripe-keys": "stripe: any text of up to 255 characters is a key"
            .given(of("stripe")) => run (stripe_keys);
        "dialect-stripe-headers": "stripe: a replay names the original request, and a kept 5xx ends the retries"
            .given(of("stripe")) => run (stripe_headers);
    }
}

fn in_field(name: &str, key: Option<&str>, amount: u32) -> Request {
    let request = Request::post("/payments").json(format!(r#"{{"amount":{amount}}}"#));
    match key {
        Some(key) => request.field(name, key),
        None => request,
    }
}

fn in_body(member: &str, key: Option<&str>, amount: u32) -> Request {
    let key = key.map_or_else(String::new, |key| format!(r#","{member}":"{key}""#));
    Request::post("/payments").json(format!(r#"{{"amount":{amount}{key}}}"#))
}

async fn speaks(world: World, dialect: &'static Dialect) {
    let Dialect { request, .. } = dialect;
    let done = Latch::new();
    let first = world.start_send(request(Some("k-1"), 1).script(Script::default().held(&done)));
    world.backend.until_effects(1).await;
    let duplicate = world.send(request(Some("k-1"), 1)).await;
    is_refused(&duplicate, &dialect.in_progress);
    done.open();
    let first = first.await.unwrap().expect("a response");
    assert_eq!((first.status(), first.get(world.plan.marker())), (201, None), "{first:?}");
    is_replayed(&world, dialect, &first, &world.send(request(Some("k-1"), 1)).await);
    let other = world.send(request(Some("k-1"), 2)).await;
    match &dialect.reused {
        Some(refusal) => is_refused(&other, refusal),
        None => is_replayed(&world, dialect, &first, &other),
    }
    assert_eq!(world.backend.effects(), 1);

    let bare = world.send(request(None, 1)).await;
    match &dialect.missing {
        Some(refusal) => is_refused(&bare, refusal),
        None => assert_eq!(world.backend.effects(), 2, "{bare:?}"),
    }
    for (statuses, is_kept) in [(dialect.kept, true), (dialect.released, false)] {
        for status in statuses {
            let before = world.backend.effects();
            let key = format!("k-{status}-{is_kept}");
            let first = world.send(request(Some(&key), 1).script(Script::status(*status))).await;
            assert_eq!(first.status(), *status, "{first:?}");
            let again = world.send(request(Some(&key), 1)).await;
            let effects = world.backend.effects() - before;
            assert_eq!(effects, if is_kept { 1 } else { 2 }, "{status}: {again:?}");
            assert_eq!(again.get(world.plan.marker()).is_some(), is_kept, "{status}: {again:?}");
        }
    }
}

fn is_replayed(world: &World, dialect: &Dialect, first: &Response, again: &Response) {
    assert_eq!(again.status(), dialect.replay, "{again:?}");
    assert_eq!(again.body, first.body, "{again:?}");
    assert_eq!(again.get(world.plan.marker()), Some("true"), "{again:?}");
    for response in [first, again] {
        match dialect.echo {
            Some(name) => assert!(response.get(name).is_some(), "{response:?}"),
            None => assert!(response.get("idempotency-key").is_none(), "{response:?}"),
        }
    }
}

fn is_refused(response: &Response, Refusal(status, pointer, value): &Refusal) {
    assert_eq!(response.status(), *status, "{response:?}");
    let body = response.json();
    assert_eq!(body.pointer(pointer).and_then(|value| value.as_str()), Some(*value), "{response:?}");
}

async fn first_sent(world: World) {
    let now = SystemTime::now();
    let ago = |seconds| httpdate::fmt_http_date(now - Duration::from_secs(seconds));
    let ahead = httpdate::fmt_http_date(now + Duration::from_secs(3600));
    let request = |first_sent: &[&str]| {
        first_sent.iter().fold(in_field("Repeatability-Request-ID", Some(UUID), 1), |request, value| {
            request.field("Repeatability-First-Sent", value)
        })
    };
    let iso = "2026-11-23T12:00:00Z";
    for (sent, status) in [
        (&[][..], 400),
        (&[iso], 400),
        (&[&ahead], 400),
        (&[&ago(1), &ago(1)], 400),
        (&[&ago(86_401)], 412),
        (&[&ago(86_150)], 412),
    ] {
        let refused = world.send(request(sent)).await;
        assert_eq!(refused.status(), status, "{sent:?}: {refused:?}");
        assert_eq!(refused.get("repeatability-result"), Some("rejected"), "{refused:?}");
    }
    let alone = Request::post("/payments").json("{}").field("Repeatability-First-Sent", ago(1));
    assert_eq!(world.send(alone).await.status(), 400);
    assert_eq!(world.backend.effects(), 0);
    let accepted = world.send(request(&[&ago(60)])).await;
    assert_eq!(
        (accepted.status(), accepted.get("repeatability-result")),
        (201, Some("accepted")),
        "{accepted:?}"
    );
    let again = world.send(request(&[&ago(60)])).await;
    assert_eq!((again.status(), again.get("repeatability-result")), (201, Some("accepted")), "{again:?}");
    // Another time makes another request of it.
    assert_eq!(world.send(request(&[&ago(30)])).await.status(), 400);
    assert_eq!(world.backend.effects(), 1);
}

async fn aws_forms(world: World) {
    let form = |query: &str, body: &str| {
        Request::post(&format!("/{query}"))
            .body("application/x-www-form-urlencoded; charset=utf-8", body.to_owned())
    };
    for (number, (query, body)) in [
        ("", "Action=Run&ClientToken=t-1"),
        ("?ClientToken=t%2D2", "Action=Run"),
        ("?ClientToken=t-3", "ClientToken=t-3"),
        ("", "Action=CreateStack&ClientRequestToken=t-4"),
        ("", "clienttoken=t-5"),
        // JSON, as curl sends it if it is not told the type.
        ("", r#"{"ClientToken":"t-6"}"#),
    ]
    .into_iter()
    .enumerate()
    {
        let first = world.send(form(query, body)).await;
        let again = world.send(form(query, body)).await;
        assert_eq!((first.status(), world.backend.effects()), (201, number + 1), "{first:?}");
        assert_eq!(again.get(world.plan.marker()), Some("true"), "{query} {body}: {again:?}");
    }
    for (query, body) in [
        ("?ClientToken=a", "ClientToken=b"),
        ("", "ClientToken=a&ClientToken=a"),
        ("?ClientToken=a&ClientToken=b", ""),
        ("?ClientToken=a&ClientRequestToken=b", ""),
        ("", "x=1;ClientToken=a"),
        ("", "ClientToken[]=a"),
    ] {
        assert_eq!(world.send(form(query, body)).await.status(), 400, "{query} {body}");
    }
    let part = "--b\r\nContent-Disposition: form-data; name=\"ClientToken\"\r\n\r\na\r\n--b--\r\n";
    for (content_type, body) in [
        ("multipart/form-data; boundary=b", part),
        ("application/xml", "<Run><ClientToken>a</ClientToken></Run>"),
        ("application/json", r#"[{"ClientToken":"a"}]"#),
    ] {
        let response = world.send(Request::post("/").body(content_type, body.to_owned())).await;
        assert_eq!(response.status(), 400, "{content_type}: {response:?}");
    }
    let json = Request::post("/?ClientToken=a").json(r#"{"clientToken":"b"}"#);
    assert_eq!(world.send(json).await.status(), 400);
    assert_eq!(world.backend.effects(), 6);
    // A parameter that is no key is no obstacle.
    assert_eq!(world.send(form("?a=1", "Action=List")).await.status(), 201);
}

async fn unreadable_bodies(world: World) {
    let send = |body: &[u8]| world.send(Request::post("/").body("application/json", body.to_vec()));
    let marked = b"\xef\xbb\xbf{\"ClientToken\":\"t\"}";
    assert_eq!(send(marked).await.status(), 201);
    assert!(send(marked).await.get(world.plan.marker()).is_some());
    for body in [
        &b"{\"ClientToken\":\"t\",\"x\":NaN}"[..],
        b"{\"ClientToken\":\"t\",}",
        b"{\"ClientToken\":\"t\"",
        b"\xff\xfe{\0",
    ] {
        assert_eq!(send(body).await.status(), 400, "{body:?}");
    }
    let coded = Request::post("/").json(r#"{"ClientToken":"u"}"#).field("Content-Encoding", "br");
    assert_eq!(world.send(coded).await.status(), 400);
    assert_eq!(world.backend.effects(), 1);
}

async fn callers_of_keys(world: World) {
    let post = |body: &str| Request::post("/").json(body).field("Cookie", "sid=1");
    assert_eq!(world.send(post("{}")).await.status(), 201);
    let with_key = world.send(post(r#"{"ClientToken":"t"}"#)).await;
    assert_eq!(with_key.status(), 400, "{with_key:?}");
    assert_eq!(world.backend.effects(), 1);
}

async fn senders(world: World) {
    for name in ["webhook-id", "svix-id", "X-GitHub-Delivery", "I-Twilio-Idempotency-Token"] {
        let before = world.backend.effects();
        let key = format!("event of {name}");
        let first = world.send(in_field(name, Some(&key), 1)).await;
        let again = world.send(in_field(name, Some(&key), 1)).await;
        assert_eq!(
            (first.status(), again.status(), world.backend.effects() - before),
            (201, 201, 1),
            "{again:?}"
        );
    }
    // GitLab sends its key in two fields.
    let before = world.backend.effects();
    let both = |other| in_field("webhook-id", Some("a"), 1).field("Idempotency-Key", other);
    for (request, status) in [
        (both("a"), 201),
        (in_field("Idempotency-Key", Some("a"), 1), 201),
        (both("b"), 400),
        (both("a").field("webhook-id", "a"), 400),
        (in_field("webhook_id", Some("a"), 1), 400),
    ] {
        let response = world.send(request).await;
        assert_eq!(response.status(), status, "{response:?}");
    }
    assert_eq!(world.backend.effects(), before + 1);
}

/// A field of the request tells operations or accounts apart, and each has keys of its own.
async fn scopes_of_keys(world: World) {
    let stripe = || in_field("Idempotency-Key", Some("a"), 1);
    let aws = || in_body("clientToken", Some("a"), 1);
    let (post, field): (fn() -> Request, _) = match world.plan.profile {
        "aws" => (aws, "X-Amz-Target"),
        _ => (stripe, "Stripe-Account"),
    };
    for (number, value) in [Some("one"), Some("two"), None].into_iter().enumerate() {
        let request = || value.map_or_else(post, |value| post().field(field, value));
        let first = world.send(request()).await;
        assert_eq!((first.status(), world.backend.effects()), (201, number + 1), "{value:?}: {first:?}");
        let again = world.send(request()).await;
        assert!(again.get(world.plan.marker()).is_some(), "{value:?}: {again:?}");
        assert_eq!(again.body, first.body);
    }
    assert_eq!(world.backend.effects(), 3);
}

/// The service cannot tell if it did the operation, on routes where its errors free the key.
async fn unknown_outcomes(world: World) {
    for (number, status) in [201, 400, 504].into_iter().enumerate() {
        let request = in_field("Idempotency-Key", Some(&format!("key-{status}")), 1);
        let script = Script::status(status).field("Idempotency-Store", "unknown");
        assert_eq!(world.send(request.clone().script(script)).await.status(), status);
        let again = world.settled(&request).await;
        assert_eq!((again.status(), world.backend.effects()), (500, number + 1), "{again:?}");
    }
}

async fn stripe_keys(world: World) {
    let long = "k".repeat(255);
    for key in ["a,b", "a b", "\"quoted\"", "quoted", "{\"json\":1}", &long] {
        let before = world.backend.effects();
        let first = world.send(in_field("Idempotency-Key", Some(key), 1)).await;
        let again = world.send(in_field("Idempotency-Key", Some(key), 1)).await;
        assert_eq!((first.status(), world.backend.effects() - before), (201, 1), "{key}: {first:?}");
        assert_eq!(again.get(world.plan.marker()), Some("true"), "{key}: {again:?}");
    }
    let too_long = world.send(in_field("Idempotency-Key", Some(&"k".repeat(256)), 1)).await;
    is_refused(&too_long, &Refusal(400, "/error/code", "idempotency_key_invalid"));
}

async fn stripe_headers(world: World) {
    let request = |key| in_field("Idempotency-Key", Some(key), 1);
    let answered = Script::default().field("Request-Id", "req_1");
    let first = world.send(request("a").script(answered)).await;
    let again = world.send(request("a")).await;
    for response in [&first, &again] {
        assert_eq!(response.get("original-request"), Some("req_1"), "{response:?}");
    }
    assert_eq!(again.get("request-id"), None, "{again:?}");
    let failed = Script::status(500);
    for response in [world.send(request("b").script(failed)).await, world.send(request("b")).await] {
        assert_eq!(
            (response.status(), response.get("stripe-should-retry")),
            (500, Some("false")),
            "{response:?}"
        );
    }
    let declined = world.send(request("c").script(Script::status(402))).await;
    assert_eq!(declined.get("stripe-should-retry"), None, "{declined:?}");
}
