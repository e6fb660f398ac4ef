//! The attempts of a policy: requests, number and pauses, with a clock that the machine's load does not disturb.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response};
use http_body_util::Full;
use oncegate_client::{
    Advice, Api, AttemptFailure, AttemptFailureKind, BoxError, Client, DefiniteResponse, IdempotencyKey,
    Intent, Jitter, Journal, JournalEntry, JournalFuture, JournalOpenError, JournaledIntent, Random,
    RetryBudget, RetryPolicy, SendError, SendErrorKind, ServerErrorPolicy, Transport, Verdict,
};
use oncegate_core::Timestamp;
use oncegate_testkit::TokioClock;
use tokio::time::Instant;

/// The behaviour of the service for one attempt.
#[derive(Clone)]
enum Act {
    Fails(AttemptFailureKind),
    Hangs,
    Answers(u16, Vec<(&'static str, String)>, &'static str),
}

fn answers(status: u16) -> Act {
    Act::Answers(status, Vec::new(), "")
}

fn with(status: u16, name: &'static str, value: &str) -> Act {
    Act::Answers(status, vec![(name, value.to_owned())], "")
}

/// A service with a script, whose last act is repeated. It records requests and times.
#[derive(Clone)]
struct Service(Arc<Mutex<Scripted>>);

struct Scripted {
    acts: VecDeque<Act>,
    seen: Vec<(Request<Bytes>, Instant)>,
}

impl Service {
    fn new(acts: impl IntoIterator<Item = Act>) -> Self {
        Self(Arc::new(Mutex::new(Scripted { acts: acts.into_iter().collect(), seen: Vec::new() })))
    }

    fn attempts(&self) -> usize {
        self.0.lock().unwrap().seen.len()
    }

    fn keys(&self) -> Vec<Option<String>> {
        let scripted = self.0.lock().unwrap();
        let key = |headers: &HeaderMap| {
            assert!(headers.get_all("idempotency-key").iter().count() <= 1);
            headers.get("idempotency-key").map(|key| key.to_str().unwrap().to_owned())
        };
        scripted.seen.iter().map(|(request, _)| key(request.headers())).collect()
    }

    /// The pauses between attempts.
    fn pauses(&self) -> Vec<u128> {
        let scripted = self.0.lock().unwrap();
        scripted.seen.windows(2).map(|two| (two[1].1 - two[0].1).as_millis()).collect()
    }
}

impl Transport for Service {
    type Body = Full<Bytes>;

    async fn send(&self, request: Request<Bytes>) -> Result<Response<Full<Bytes>>, AttemptFailure> {
        let act = {
            let mut scripted = self.0.lock().unwrap();
            scripted.seen.push((request, Instant::now()));
            let next = scripted.acts.pop_front().expect("an act");
            if scripted.acts.is_empty() {
                scripted.acts.push_back(next.clone());
            }
            next
        };
        match act {
            Act::Fails(kind) => Err(AttemptFailure::new(kind, "scripted")),
            Act::Hangs => std::future::pending().await,
            Act::Answers(status, headers, body) => {
                let mut response = Response::builder().status(status);
                for (name, value) in headers {
                    response = response.header(name, value);
                }
                Ok(response.body(Full::from(body)).unwrap())
            }
        }
    }
}

/// Random numbers that are always the same. With all bits set, each pause is the longest.
struct Always(u64);

impl Random for Always {
    fn bits(&self) -> u64 {
        self.0
    }
}

const START: u64 = 1_700_000_000_000;

fn client(service: &Service, policy: RetryPolicy) -> Client<Service> {
    Client::new(service.clone())
        .with_policy(policy)
        .with_random(Arc::new(Always(u64::MAX)))
        .with_clock(Arc::new(TokioClock::at_millis(START)))
}

fn policy() -> RetryPolicy {
    RetryPolicy::default()
}

fn pay() -> Intent {
    let intent = Intent::post("https://bank.example/payments").unwrap();
    intent.with_json(r#"{"amount":5}"#).with_created_at(Timestamp::from_millis(START))
}

async fn open(service: &Service, policy: RetryPolicy, intent: &Intent) -> SendError {
    client(service, policy).send(intent).await.expect_err("no definite response")
}

async fn response(service: &Service, policy: RetryPolicy, intent: &Intent) -> DefiniteResponse {
    client(service, policy).send(intent).await.expect("a definite response")
}

#[tokio::test(start_paused = true)]
async fn every_attempt_is_the_same_request_under_the_same_key() {
    let service = Service::new([
        Act::Fails(AttemptFailureKind::Doubtful),
        answers(503),
        answers(409),
        answers(500),
        with(201, "idempotent-replayed", "true"),
    ]);
    let intent = pay().with_header("x-shop", "7").unwrap();
    let outcome = response(&service, policy(), &intent).await;
    assert_eq!((outcome.verdict, outcome.attempts, outcome.replayed), (Verdict::Done, 5, true));
    assert_eq!(service.keys(), vec![Some(intent.key().as_str().unwrap().to_owned()); 5]);
    for (request, _) in &service.0.lock().unwrap().seen {
        assert_eq!(request.method(), Method::POST);
        assert_eq!(request.uri(), "https://bank.example/payments");
        assert_eq!(request.body(), r#"{"amount":5}"#);
        assert_eq!(request.headers()["x-shop"], "7");
        assert_eq!(request.headers()["content-type"], "application/json");
    }
}

#[tokio::test(start_paused = true)]
async fn another_intent_has_another_key_and_one_that_is_sent_twice_keeps_its_own() {
    let service = Service::new([answers(201)]);
    let intent = pay();
    for sent in [&intent, &intent, &pay()] {
        response(&service, policy(), sent).await;
    }
    let keys = service.keys();
    assert_eq!(keys[0], keys[1]);
    assert_ne!(keys[0], keys[2]);
    let derived = || pay().with_key(IdempotencyKey::derived("payment", ["7"])).unwrap();
    assert_eq!(derived().key(), derived().key());
}

#[tokio::test(start_paused = true)]
async fn the_key_of_the_intent_replaces_a_key_among_the_callers_headers() {
    let service = Service::new([answers(201)]);
    let intent = pay().with_header("Idempotency-Key", "mine").unwrap().with_key("the-one").unwrap();
    response(&service, policy(), &intent).await;
    assert_eq!(service.keys(), [Some("the-one".to_owned())]);
}

#[tokio::test(start_paused = true)]
async fn pauses_double_up_to_the_cap_and_attempts_end() {
    let service = Service::new([answers(503)]);
    let short = policy().with_backoff(Duration::from_millis(100), Duration::from_millis(500)).unwrap();
    let open = open(&service, short.clone(), &pay()).await;
    assert_eq!(service.pauses(), [100, 200, 400, 500, 500]);
    assert_eq!((open.kind(), open.attempts()), (SendErrorKind::Attempts, 6));
    assert!(open.may_have_taken_effect() && open.is_resumable());
    assert_eq!(open.response().unwrap().status(), 503);

    let service = Service::new([answers(503)]);
    let short = short.with_jitter(Jitter::Decorrelated).with_max_attempts(4).unwrap();
    client(&service, short).send(&pay()).await.unwrap_err();
    assert_eq!(service.pauses(), [300, 500, 500]);

    let service = Service::new([answers(503)]);
    let none = client(&service, policy()).with_random(Arc::new(Always(0)));
    none.send(&pay()).await.unwrap_err();
    assert!(service.pauses().iter().all(|pause| *pause <= 1), "{:?}", service.pauses());
}

#[tokio::test(start_paused = true)]
async fn one_attempt_is_one_attempt() {
    let service = Service::new([answers(503)]);
    assert_eq!(
        open(&service, policy().with_max_attempts(1).unwrap(), &pay()).await.kind(),
        SendErrorKind::Attempts
    );
    assert_eq!(service.attempts(), 1);
}

#[test]
fn an_impossible_policy_is_refused() {
    let error = policy().with_max_attempts(0).unwrap_err().to_string();
    assert_eq!(error, "the number of attempts is 0; it must be from 1 to 4294967295");
    let (short, long) = (Duration::from_millis(1), Duration::from_millis(2));
    assert!(policy().with_backoff(long, short).is_err());
    assert!(policy().with_backoff(long, long).is_ok());
}

#[tokio::test(start_paused = true)]
async fn retry_after_is_the_shortest_pause() {
    let in_20_s =
        httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_millis(START) + Duration::from_secs(20));
    for (value, seconds) in [("7", 7), ("0", 0), (&*in_20_s, 20), ("rubbish", 0), ("-3", 0)] {
        let service = Service::new([with(429, "retry-after", value), answers(201)]);
        let policy = policy().with_backoff(Duration::from_millis(100), Duration::from_millis(500)).unwrap();
        response(&service, policy, &pay()).await;
        assert_eq!(service.pauses(), [seconds * 1000 + 100], "{value}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_retry_after_beyond_the_maximum_ends_with_the_time_to_come_back() {
    for value in ["61", "31536000", "99999999999999999999999"] {
        let service = Service::new([with(503, "retry-after", value), answers(201)]);
        let before = Instant::now();
        let open = open(&service, policy(), &pay()).await;
        assert_eq!((open.kind(), service.attempts()), (SendErrorKind::ComeBackLater, 1), "{value}");
        assert_eq!(before.elapsed(), Duration::ZERO, "there was no pause");
        assert!(open.is_resumable());
        let wait = open.come_back_at().map(|at| at.duration_since(UNIX_EPOCH).unwrap());
        let expected =
            Duration::from_millis(START).checked_add(Duration::from_secs(value.parse().unwrap_or(u64::MAX)));
        assert_eq!(wait, expected, "{value}");
    }
    // Within the maximum, but beyond the deadline.
    let service = Service::new([with(503, "retry-after", "50"), answers(201)]);
    let open = open(&service, policy().with_deadline(Duration::from_secs(40)), &pay()).await;
    assert_eq!((open.kind(), service.attempts()), (SendErrorKind::ComeBackLater, 1));
}

#[tokio::test(start_paused = true)]
async fn nothing_outlasts_the_deadline() {
    let service = Service::new([Act::Hangs]);
    let before = Instant::now();
    let policy = policy().with_deadline(Duration::from_secs(70)).with_max_attempts(100).unwrap();
    let open = open(&service, policy, &pay()).await;
    assert_eq!(open.kind(), SendErrorKind::Deadline);
    assert!(open.may_have_taken_effect());
    assert!(before.elapsed() <= Duration::from_secs(71), "{:?}", before.elapsed());
    assert_eq!(service.attempts(), 3); // 30 s, 30 s, and what was left of 70 s
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_hangs_is_given_up_and_sent_again() {
    let service = Service::new([Act::Hangs, with(201, "idempotent-replayed", "true")]);
    let policy = policy().with_attempt_timeout(Duration::from_secs(3));
    let outcome = response(&service, policy, &pay()).await;
    assert_eq!((outcome.attempts, outcome.replayed), (2, true));
    assert_eq!(service.pauses(), [3200]);
}

#[tokio::test(start_paused = true)]
async fn the_longest_durations_do_not_overflow() {
    let service = Service::new([answers(503), answers(201)]);
    let forever = policy()
        .with_deadline(Duration::MAX)
        .with_attempt_timeout(Duration::MAX)
        .with_key_lifetime(Duration::MAX)
        .with_max_retry_after(Duration::MAX);
    response(&service, forever.clone(), &pay()).await;
    let service = Service::new([with(503, "retry-after", "99999999999999999999999")]);
    assert_eq!(open(&service, forever, &pay()).await.kind(), SendErrorKind::ComeBackLater);
}

#[tokio::test(start_paused = true)]
async fn all_intents_draw_on_one_budget() {
    let service = Service::new([answers(503)]);
    let budget = Arc::new(RetryBudget::new(20, 5));
    let client = client(&service, policy()).with_budget(Arc::clone(&budget));
    assert_eq!(client.send(&pay()).await.unwrap_err().kind(), SendErrorKind::Budget);
    assert_eq!(service.attempts(), 5); // the first one, and four retries for 20 tokens
    for _ in 0..10 {
        assert_eq!(client.clone().send(&pay()).await.unwrap_err().kind(), SendErrorKind::Budget);
    }
    assert_eq!(service.attempts(), 15, "an outage gets first attempts only");

    // Each response adds a token, and a retry that gets a response costs nothing.
    service.0.lock().unwrap().acts = [answers(201)].into();
    for _ in 0..5 {
        client.send(&pay()).await.unwrap();
    }
    assert_eq!(budget.tokens(), 5);
    service.0.lock().unwrap().acts = [answers(503), answers(201)].into();
    client.send(&pay()).await.unwrap();
    assert_eq!(budget.tokens(), 5);
}

#[tokio::test(start_paused = true)]
async fn a_timeout_costs_twice_and_a_request_in_progress_nothing() {
    let budget = Arc::new(RetryBudget::new(100, 5));
    let two = policy().with_max_attempts(2).unwrap();
    let service = Service::new([Act::Hangs]);
    client(&service, two.clone()).with_budget(Arc::clone(&budget)).send(&pay()).await.unwrap_err();
    assert_eq!(budget.tokens(), 90);
    let service = Service::new([answers(409)]);
    client(&service, two).with_budget(Arc::clone(&budget)).send(&pay()).await.unwrap_err();
    assert_eq!(budget.tokens(), 90);
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_was_not_processed_had_no_effect_and_any_other_may_have() {
    let open_by = async |act: Act| open(&Service::new([act]), policy(), &pay()).await;
    for act in [
        Act::Fails(AttemptFailureKind::NotSent),
        Act::Fails(AttemptFailureKind::NotProcessed),
        answers(429),
        answers(425),
    ] {
        assert!(!open_by(act).await.may_have_taken_effect());
    }
    for act in
        [Act::Fails(AttemptFailureKind::Doubtful), Act::Hangs, answers(503), answers(409), answers(500)]
    {
        assert!(open_by(act).await.may_have_taken_effect());
    }
    let service = Service::new([Act::Fails(AttemptFailureKind::Unsendable)]);
    let never = open(&service, policy(), &pay()).await;
    assert_eq!((never.kind(), service.attempts()), (SendErrorKind::Unsendable, 1));
    assert!(!never.may_have_taken_effect() && !never.is_resumable());
    // A doubt does not go away.
    let service =
        Service::new([Act::Fails(AttemptFailureKind::Doubtful), Act::Fails(AttemptFailureKind::NotSent)]);
    assert!(open(&service, policy(), &pay()).await.may_have_taken_effect());
}

#[tokio::test(start_paused = true)]
async fn a_refusal_before_the_operation_says_nothing_of_an_earlier_attempt() {
    for status in [401, 403, 404, 413] {
        let first = response(&Service::new([answers(status)]), policy(), &pay()).await;
        assert_eq!(first.verdict, Verdict::TurnedAway);
        let certain = Service::new([Act::Fails(AttemptFailureKind::NotSent), answers(429), answers(status)]);
        assert_eq!(response(&certain, policy(), &pay()).await.attempts, 3);

        let service = Service::new([Act::Fails(AttemptFailureKind::Doubtful), answers(status)]);
        let doubtful = open(&service, policy(), &pay()).await;
        assert_eq!((doubtful.kind(), doubtful.attempts()), (SendErrorKind::TurnedAway, 2), "{status}");
        assert!(doubtful.may_have_taken_effect() && doubtful.is_resumable());
        assert_eq!(doubtful.response().unwrap().status(), status);
        let resumed = open(&Service::new([answers(status)]), policy(), &pay().sent_before()).await;
        assert_eq!(resumed.kind(), SendErrorKind::TurnedAway);
        // A safe method has no effect that could be in doubt.
        let service = Service::new([Act::Fails(AttemptFailureKind::Doubtful), answers(status)]);
        let get = Intent::new(Method::GET, "https://bank.example/payments/7").unwrap();
        assert_eq!(response(&service, policy(), &get).await.verdict, Verdict::TurnedAway);
    }
}

/// Services refuse a duplicate of a running request with statuses and texts of their own. GoCardless and many others refuse
/// a request that they executed under the same key. Oncegate ignores the key of a PUT or a DELETE by default.
#[tokio::test(start_paused = true)]
async fn in_doubt_a_refusal_is_retried_until_it_is_the_response_to_the_key() {
    let json = || vec![("content-type", "application/json".to_owned())];
    let running = [
        Act::Answers(422, json(), r#"{"status":422,"errorCode":"704","errorType":"validation"}"#),
        with(422, "transient-error", "true"),
        answers(423),
        Act::Answers(409, json(), r#"{"error":{"type":"invalid_state","code":409}}"#),
        Act::Answers(422, json(), r#"{"code":"SOMETHING_OF_OUR_OWN"}"#),
        answers(400),
        answers(402),
        answers(410),
        answers(412),
    ];
    for method in [Method::POST, Method::PUT, Method::DELETE] {
        let intent = || {
            let intent = Intent::new(method.clone(), "https://bank.example/payments/7").unwrap();
            intent.with_created_at(Timestamp::from_millis(START))
        };
        for refusal in &running {
            // The first attempt is still running. Its response comes when it has ended.
            let service = Service::new([
                Act::Hangs,
                refusal.clone(),
                refusal.clone(),
                with(201, "idempotent-replayed", "true"),
            ]);
            let done = response(&service, policy(), &intent()).await;
            assert_eq!((done.verdict, done.attempts), (Verdict::Done, 4), "{method}");
            // The first attempt was refused, and a service that marks replays reports it to the next attempt.
            let replay = with(422, "idempotent-replayed", "true");
            let service = Service::new([Act::Fails(AttemptFailureKind::Doubtful), refusal.clone(), replay]);
            let refused = response(&service, policy(), &intent()).await;
            assert_eq!(
                (refused.verdict, refused.attempts),
                (Verdict::Refused(Advice::FixRequest), 3),
                "{method}"
            );
            // The service never answers otherwise: the outcome stays unknown.
            let service = Service::new([Act::Fails(AttemptFailureKind::Doubtful), refusal.clone()]);
            let open = open(&service, policy(), &intent()).await;
            assert!(
                matches!(open.kind(), SendErrorKind::TurnedAway | SendErrorKind::Attempts),
                "{method} {open}"
            );
            assert_eq!(open.attempts(), 6, "{method} {open}");
            assert!(open.may_have_taken_effect() && open.is_resumable());
            assert!(service.keys().iter().all(|key| *key == service.keys()[0] && key.is_some()));
            let resumed = open_resumed(refusal, &intent()).await;
            assert!(resumed.may_have_taken_effect(), "{method}");
        }
    }
    // As the first response a refusal by the operation counts.
    for refusal in running.into_iter().skip(3) {
        let first = response(&Service::new([refusal]), policy(), &pay()).await;
        assert_eq!(first.verdict, Verdict::Refused(Advice::FixRequest));
    }
    // The service reports that the key was used before: by the attempt without a response.
    let reused = Act::Answers(422, json(), r#"{"name":"DUPLICATE_REQUEST_ID"}"#);
    let service = Service::new([Act::Hangs, reused.clone()]);
    let open = open(&service, policy(), &pay()).await;
    assert_eq!(
        (open.kind(), open.attempts(), open.may_have_taken_effect()),
        (SendErrorKind::TurnedAway, 2, true)
    );
    let first = response(&Service::new([reused]), policy(), &pay()).await;
    assert_eq!(first.verdict, Verdict::Refused(Advice::NewKey));
}

async fn open_resumed(refusal: &Act, intent: &Intent) -> SendError {
    open(
        &Service::new([refusal.clone()]),
        policy().with_max_attempts(1).unwrap(),
        &intent.clone().sent_before(),
    )
    .await
}

#[tokio::test(start_paused = true)]
async fn an_unknown_outcome_is_an_error_of_its_own() {
    let problem = r#"{"type":"urn:oncegate:problem:outcome-unknown","retry":"stop"}"#;
    let json = vec![("content-type", "application/problem+json".to_owned())];
    let service = Service::new([Act::Answers(500, json, problem)]);
    let open = open(&service, policy(), &pay()).await;
    assert_eq!((open.kind(), service.attempts()), (SendErrorKind::Unknown, 1));
    assert!(open.may_have_taken_effect() && !open.is_resumable());
    assert_eq!(open.response().unwrap().body(), problem);
    assert!(open.to_string().contains("not known") && !open.to_string().contains("urn"));
}

#[tokio::test(start_paused = true)]
async fn an_unexplained_server_error_is_retried_until_it_is_a_replay() {
    let replayed = with(500, "idempotent-replayed", "true");
    let service = Service::new([answers(500), replayed.clone()]);
    let kept = response(&service, policy(), &pay()).await;
    assert_eq!((kept.verdict, kept.attempts), (Verdict::Failed, 2));
    let service = Service::new([answers(500)]);
    let last = response(&service, policy().with_server_errors(ServerErrorPolicy::Final), &pay()).await;
    assert_eq!((last.verdict, last.attempts), (Verdict::Failed, 1));
    let unknown = open(&service, policy().with_server_errors(ServerErrorPolicy::Unknown), &pay()).await;
    assert_eq!((unknown.kind(), unknown.attempts()), (SendErrorKind::Unknown, 1));
}

#[tokio::test(start_paused = true)]
async fn a_plain_api_gets_no_key_and_no_request_again_that_it_may_have_processed() {
    let plain = || policy().with_api(Api::Plain);
    let doubtful = [
        Act::Fails(AttemptFailureKind::Doubtful),
        Act::Hangs,
        answers(408),
        answers(500),
        answers(502),
        answers(503),
        with(503, "retry-after", "1"),
        answers(504),
        with(500, "stripe-should-retry", "true"),
        Act::Answers(503, vec![("content-type", "application/json".to_owned())], r#"{"retry":"same-key"}"#),
    ];
    for act in doubtful {
        let service = Service::new([act]);
        let open = open(&service, plain(), &pay()).await;
        assert_eq!((open.kind(), service.attempts()), (SendErrorKind::Unknown, 1));
        assert!(open.may_have_taken_effect());
        assert_eq!(service.keys(), [None]);
    }
    let certain = [
        Act::Fails(AttemptFailureKind::NotSent),
        Act::Fails(AttemptFailureKind::NotProcessed),
        answers(425),
        answers(429),
    ];
    for act in certain {
        let service = Service::new([act, answers(201)]);
        assert_eq!(response(&service, plain(), &pay()).await.attempts, 2);
        assert_eq!(service.keys(), [None, None]);
    }
    for status in [400, 409, 422] {
        let service = Service::new([answers(status)]);
        assert!(matches!(response(&service, plain(), &pay()).await.verdict, Verdict::Refused(_)), "{status}");
    }
    // A request that may have been sent before is not sent at all.
    let service = Service::new([answers(201)]);
    assert_eq!(open(&service, plain(), &pay().sent_before()).await.kind(), SendErrorKind::Unknown);
    assert_eq!(service.attempts(), 0);
    // Idempotent methods are retried, too.
    for method in [Method::GET, Method::PUT, Method::DELETE] {
        let service = Service::new([Act::Fails(AttemptFailureKind::Doubtful), answers(503), answers(200)]);
        let intent = Intent::new(method, "https://bank.example/payments/7").unwrap();
        assert_eq!(response(&service, plain(), &intent).await.attempts, 3);
    }
}

fn refused(status: u16, problem: &str, retry: &str) -> Act {
    with(status, "idempotency-status", &format!("refused; problem={problem}; retry={retry}"))
}

/// A service may pass on the header of a refusal from an API that it called after its own effect.
#[tokio::test(start_paused = true)]
async fn the_header_of_a_refusal_counts_only_in_a_response_of_its_form() {
    let plain = || policy().with_api(Api::Plain);
    for policy in [plain(), policy()] {
        for problem in ["overloaded", "upstream-unreachable", "key-reused", "outcome-unknown"] {
            let service = Service::new([refused(201, problem, "same-key")]);
            let done = response(&service, policy.clone(), &pay()).await;
            assert_eq!((done.verdict, done.attempts), (Verdict::Done, 1), "{problem}");
        }
    }
    for (status, problem) in
        [(500, "store-unavailable"), (500, "overloaded"), (503, "upstream-unreachable"), (400, "overloaded")]
    {
        let service = Service::new([refused(status, problem, "same-key"), answers(201)]);
        let unknown = open(&service, plain(), &pay()).await;
        assert_eq!((unknown.kind(), service.attempts()), (SendErrorKind::Unknown, 1), "{status} {problem}");
        assert!(unknown.may_have_taken_effect(), "{status} {problem}");
    }
    for (problem, retry) in
        [("key-reused", "new-key"), ("key-invalid", "fix-request"), ("scope-unavailable", "fix-request")]
    {
        let service = Service::new([refused(500, problem, retry), answers(201)]);
        assert_eq!(open(&service, plain(), &pay()).await.kind(), SendErrorKind::Unknown, "{problem}");
        let service = Service::new([refused(500, problem, retry), answers(201)]);
        assert_eq!(response(&service, policy(), &pay()).await.attempts, 2, "{problem}");
    }
    // With a key it is sent again, and the doubt stays.
    let service = Service::new([refused(500, "overloaded", "same-key"), answers(401)]);
    assert_eq!(open(&service, policy(), &pay()).await.kind(), SendErrorKind::TurnedAway);

    // The refusals of Oncegate itself.
    const CALL: &str = r#"{"jsonrpc":"2.0","id":1,"result":{"isError":true,"_meta":{"oncegate/problem":{"type":"urn:oncegate:problem:overloaded"}}}}"#;
    let fields = |fields: &[(&'static str, &str)]| {
        let field = ("idempotency-status", "refused; problem=overloaded; retry=same-key");
        fields.iter().chain([&field]).map(|(name, value)| (*name, (*value).to_owned())).collect::<Vec<_>>()
    };
    for act in [
        refused(503, "overloaded", "same-key"),
        refused(502, "upstream-unreachable", "same-key"),
        Act::Answers(200, fields(&[("content-type", "application/json")]), CALL),
        Act::Answers(200, fields(&[("content-type", "application/grpc"), ("grpc-status", "14")]), ""),
    ] {
        for policy in [plain(), policy()] {
            let service = Service::new([act.clone(), answers(201)]);
            assert_eq!(response(&service, policy, &pay()).await.attempts, 2);
        }
    }
    // A failed call whose refusal is that of another API.
    let other = fields(&[("content-type", "application/json")]);
    let failed = Act::Answers(200, other, r#"{"jsonrpc":"2.0","id":1,"result":{"isError":true}}"#);
    let service = Service::new([failed, answers(201)]);
    assert_eq!(open(&service, plain(), &pay()).await.kind(), SendErrorKind::Unknown);
}

#[tokio::test(start_paused = true)]
async fn safe_methods_carry_no_key_and_are_sent_again() {
    for (method, has_key) in
        [(Method::GET, false), (Method::HEAD, false), (Method::PUT, true), (Method::PATCH, true)]
    {
        let service = Service::new([answers(503), answers(200)]);
        let intent = Intent::new(method, "https://bank.example/payments/7").unwrap();
        let intent = intent.with_created_at(Timestamp::from_millis(START));
        assert_eq!(response(&service, policy(), &intent).await.attempts, 2);
        assert!(service.keys().iter().all(|key| key.is_some() == has_key));
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_sent_again_under_a_key_that_may_be_forgotten() {
    let day = Duration::from_secs(24 * 60 * 60);
    let yesterday = Timestamp::from_millis(START - day.as_millis() as u64);
    let service = Service::new([answers(201)]);
    let old = pay().with_created_at(yesterday).sent_before();
    let open_old = open(&service, policy(), &old).await;
    assert_eq!((open_old.kind(), service.attempts()), (SendErrorKind::KeyLifetime, 0));
    assert!(open_old.may_have_taken_effect());
    // An intent that was never sent can be sent, and again only if the first attempt was not processed.
    response(&service, policy(), &pay().with_created_at(yesterday)).await;
    let service = Service::new([Act::Fails(AttemptFailureKind::NotSent), answers(503), answers(201)]);
    let fresh = open(&service, policy(), &pay().with_created_at(yesterday)).await;
    assert_eq!((fresh.kind(), service.attempts()), (SendErrorKind::KeyLifetime, 2));
    // A millisecond younger, it is still sent.
    let service = Service::new([answers(201)]);
    let young = pay().with_created_at(Timestamp::from_millis(yesterday.as_millis() + 1)).sent_before();
    response(&service, policy(), &young).await;
}

#[tokio::test(start_paused = true)]
async fn a_response_beyond_the_limit_is_reported_with_its_head() {
    let service = Service::new([Act::Answers(201, Vec::new(), "0123456789")]);
    assert_eq!(
        response(&service, policy().with_max_response_bytes(10), &pay()).await.response.body(),
        "0123456789"
    );
    let open = open(&service, policy().with_max_response_bytes(9), &pay()).await;
    assert_eq!(open.kind(), SendErrorKind::ResponseTooLarge);
    assert_eq!(open.response().unwrap().status(), 201);
    assert!(open.may_have_taken_effect() && open.is_resumable());
}

/// A journal in memory.
#[derive(Clone, Default)]
struct Pages(Arc<Mutex<Vec<String>>>, bool);

struct Page(Pages, String);

impl Journal for Pages {
    fn open<'a>(
        &'a self,
        intent: &'a Intent,
    ) -> JournalFuture<'a, Result<JournaledIntent, JournalOpenError>> {
        Box::pin(async move {
            let key = intent.key().as_str().unwrap().to_owned();
            self.0.lock().unwrap().push(format!("open {key}"));
            if self.1 {
                return Err(JournalOpenError::NotWritten("the disk is full".into()));
            }
            Ok(JournaledIntent::new(Box::new(Page(self.clone(), key))))
        })
    }
}

impl JournalEntry for Page {
    fn close<'a>(self: Box<Self>, outcome: &'a DefiniteResponse) -> JournalFuture<'a, Result<(), BoxError>> {
        let line = format!("close {} {}", self.1, outcome.verdict);
        self.0.0.lock().unwrap().push(line);
        Box::pin(async { Ok(()) })
    }

    fn never_sent<'a>(self: Box<Self>) -> JournalFuture<'a, Result<(), BoxError>> {
        self.0.0.lock().unwrap().push(format!("never sent {}", self.1));
        Box::pin(async { Ok(()) })
    }
}

#[tokio::test(start_paused = true)]
async fn a_journal_is_called_before_the_first_sending_and_for_definite_responses_only() {
    let pages = Arc::new(Pages::default());
    let service = Service::new([answers(503), with(402, "idempotent-replayed", "true")]);
    let intent = pay().with_key("k").unwrap();
    client(&service, policy()).with_journal(pages.clone()).send(&intent).await.unwrap();
    assert_eq!(*pages.0.lock().unwrap(), ["open k", "close k refused"]);

    // An intent that was turned away is sent again later; one in doubt stays open.
    for (acts, noted) in [
        (vec![answers(401)], &["open k", "never sent k"][..]),
        (vec![answers(503), answers(401)], &["open k"]),
        (vec![answers(503), answers(402)], &["open k"]),
    ] {
        let pages = Arc::new(Pages::default());
        let _end = client(&Service::new(acts), policy()).with_journal(pages.clone()).send(&intent).await;
        assert_eq!(*pages.0.lock().unwrap(), noted);
    }

    let pages = Arc::new(Pages::default());
    let service = Service::new([answers(503)]);
    client(&service, policy()).with_journal(pages.clone()).send(&intent).await.unwrap_err();
    assert_eq!(*pages.0.lock().unwrap(), ["open k"]);

    let pages = Arc::new(Pages::default());
    let service = Service::new([Act::Fails(AttemptFailureKind::NotSent)]);
    client(&service, policy()).with_journal(pages.clone()).send(&intent).await.unwrap_err();
    assert_eq!(*pages.0.lock().unwrap(), ["open k", "never sent k"]);

    let full = Arc::new(Pages(Arc::default(), true));
    let service = Service::new([answers(201)]);
    let open = client(&service, policy()).with_journal(full).send(&intent).await.unwrap_err();
    assert_eq!((open.kind(), service.attempts()), (SendErrorKind::Journal, 0));
    assert!(!open.may_have_taken_effect());
}

#[tokio::test(start_paused = true)]
async fn no_output_shows_keys_bodies_or_addresses() {
    let service = Service::new([with(503, "x-secret", "hush")]);
    let answered = Service::new([Act::Answers(201, vec![("x-secret", "hush".to_owned())], "hush")]);
    let intent = pay().with_key("hush-key").unwrap().with_body("hush").with_header("a", "hush").unwrap();
    let open = open(&service, policy(), &intent).await;
    let client = client(&service, policy());
    let response = response(&answered, policy(), &intent).await;
    let shown = [
        format!("{intent:?}"),
        open.to_string(),
        format!("{open:?}"),
        format!("{client:?}"),
        format!("{response:?}"),
    ];
    for text in shown {
        assert!(!text.contains("hush") && !text.contains("payments"), "{text}");
    }
}

#[test]
fn an_intent_has_an_absolute_address() {
    for bad in ["/payments", "bank.example", "", "https://", "not a uri"] {
        assert!(Intent::post(bad).is_err(), "{bad:?}");
    }
    assert!(pay().with_header("bad name", "x").is_err());
    assert!(pay().with_header("x", "bad\nvalue").is_err());
}

/// A clock that a test sets ahead, as that of a machine which was suspended: tokio's clock stands still then.
#[derive(Debug)]
struct Wall {
    clock: TokioClock,
    ahead: std::sync::atomic::AtomicU64,
}

impl oncegate_core::Clock for Wall {
    fn now(&self) -> Timestamp {
        let ahead = self.ahead.load(std::sync::atomic::Ordering::SeqCst);
        Timestamp::from_millis(self.clock.now().as_millis() + ahead)
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_that_grew_too_old_while_the_machine_was_suspended_is_not_sent_again() {
    const DAY: u64 = 24 * 3_600_000;
    for (suspended, attempts) in [(DAY + 1, 1), (DAY / 2, 2)] {
        let service = Service::new([Act::Fails(AttemptFailureKind::Doubtful), answers(201)]);
        let clock = TokioClock::at_millis(START);
        let wall = Arc::new(Wall { clock, ahead: 0.into() });
        let client = client(&service, policy()).with_clock(wall.clone());
        let suspends = async {
            // In the middle of the first pause.
            while service.keys().is_empty() {
                tokio::task::yield_now().await;
            }
            wall.ahead.store(suspended, std::sync::atomic::Ordering::SeqCst);
        };
        let intent = pay();
        let (sent, ()) = tokio::join!(client.send(&intent), suspends);
        assert_eq!(service.keys().len(), attempts, "the service may have forgotten the key");
        match sent {
            Ok(_) => assert_eq!(attempts, 2),
            Err(error) => assert_eq!((attempts, error.kind()), (1, SendErrorKind::KeyLifetime)),
        }
    }
}
