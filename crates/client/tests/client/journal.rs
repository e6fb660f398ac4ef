//! Journals across processes: concurrent users, clocks that jump, full disks, and secrets.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use http::{Request, Response};
use http_body_util::Full;
use oncegate_client::{
    Api, AttemptFailure, AttemptFailureKind, Carrier, Client, IdempotencyKey, Intent, JournalDir,
    ResumeError, RetryPolicy, SendError, SendErrorKind, Transport, Verdict,
};
use oncegate_core::{Clock, Timestamp};
use oncegate_testkit::ManualClock;

/// The behaviour of the service for a request.
#[derive(Clone, Copy)]
enum Act {
    Answers(u16),
    /// It sends the response that it sent before.
    Replays(u16),
    /// It executes the request, and its response is lost.
    Loses,
    /// It is out of reach.
    Away,
}

#[derive(Clone)]
struct Service(Arc<Mutex<Played>>);

struct Played {
    act: Act,
    seen: Vec<Request<Bytes>>,
}

impl Service {
    fn new(act: Act) -> Self {
        Self(Arc::new(Mutex::new(Played { act, seen: Vec::new() })))
    }

    fn now(&self, act: Act) {
        self.0.lock().unwrap().act = act;
    }

    fn seen(&self) -> Vec<Request<Bytes>> {
        self.0.lock().unwrap().seen.clone()
    }

    fn times(&self) -> usize {
        self.0.lock().unwrap().seen.len()
    }
}

impl Transport for Service {
    type Body = Full<Bytes>;

    async fn send(&self, request: Request<Bytes>) -> Result<Response<Full<Bytes>>, AttemptFailure> {
        let mut played = self.0.lock().unwrap();
        let act = played.act;
        if let Act::Away = act {
            return Err(AttemptFailure::new(AttemptFailureKind::NotSent, "away"));
        }
        played.seen.push(request);
        match act {
            Act::Answers(status) => Ok(Response::builder().status(status).body(Full::default()).unwrap()),
            Act::Replays(status) => {
                let response = Response::builder().status(status).header("idempotent-replayed", "true");
                Ok(response.body(Full::default()).unwrap())
            }
            _ => Err(AttemptFailure::new(AttemptFailureKind::Doubtful, "lost")),
        }
    }
}

fn once() -> RetryPolicy {
    RetryPolicy::default().with_max_attempts(1).unwrap()
}

fn client(service: &Service, journal: &JournalDir) -> Client<Service> {
    Client::new(service.clone()).with_policy(once()).with_journal(Arc::new(journal.clone()))
}

fn payout(number: &str) -> Intent {
    let intent = Intent::post("http://bank.test/payouts").unwrap();
    intent
        .with_key(IdempotencyKey::derived("payout", [number]))
        .unwrap()
        .with_json(format!(r#"{{"payout":"{number}"}}"#))
}

/// Returns the number of files, without the directory of finished intents.
fn files(journal: &JournalDir) -> usize {
    let names = fs::read_dir(journal.path()).unwrap().map(|file| file.unwrap().file_name());
    names.filter(|name| name != "finished").count()
}

fn open_journal(dir: &Path) -> JournalDir {
    JournalDir::open(dir.join("journal")).unwrap()
}

async fn ends(journal: &JournalDir, client: &Client<Service>) -> Vec<Result<Verdict, ResumeError>> {
    let mut resume = journal.resume_pending(client).await.unwrap();
    let mut ends = Vec::new();
    while let Some(end) = resume.next().await {
        ends.push(end.unwrap().end.map(|outcome| outcome.verdict));
    }
    ends
}

fn why(end: &Result<Verdict, ResumeError>) -> SendErrorKind {
    match end {
        Err(ResumeError::Sending(open)) => open.kind(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn intents_without_a_response_are_sent_again_unchanged_oldest_first() {
    let dir = tempfile::tempdir().unwrap();
    let service = Service::new(Act::Loses);
    let journal = open_journal(dir.path());
    let earlier = millis_now() - 1000;
    for (number, at) in [("b", 2), ("a", 1), ("c", 3)] {
        let intent = payout(number).with_created_at(Timestamp::from_millis(earlier + at));
        let open = client(&service, &journal).send(&intent).await.unwrap_err();
        assert!(open.may_have_taken_effect());
    }
    let before = service.seen();
    drop(journal);

    // Another process knows only the directory.
    let journal = open_journal(dir.path());
    let keys: Vec<_> = journal.pending().await.unwrap().into_iter().map(|one| one.unwrap().key).collect();
    assert_eq!(keys, ["a", "b", "c"].map(|number| IdempotencyKey::derived("payout", [number])));
    service.now(Act::Answers(201));
    let ends = ends(&journal, &client(&service, &journal)).await;
    assert!(ends.iter().all(|end| matches!(end, Ok(Verdict::Done))), "{ends:?}");
    let again = &service.seen()[3..];
    for (sent, at) in again.iter().zip([1, 0, 2]) {
        assert_eq!(sent.headers(), before[at].headers());
        assert_eq!((sent.method(), sent.uri()), (before[at].method(), before[at].uri()));
        assert_eq!(sent.body(), before[at].body());
    }
    assert_eq!(files(&journal), 0);
    assert!(ends_are_none(&journal, &service).await);
}

async fn ends_are_none(journal: &JournalDir, service: &Service) -> bool {
    ends(journal, &client(service, journal)).await.is_empty()
}

fn millis_now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    u64::try_from(since.as_millis()).unwrap()
}

#[tokio::test]
async fn the_same_intent_continues_and_another_request_under_its_key_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let service = Service::new(Act::Loses);
    let journal = open_journal(dir.path());
    client(&service, &journal).send(&payout("7")).await.unwrap_err();
    let file = fs::read_dir(journal.path()).unwrap().next().unwrap().unwrap().path();
    let before = fs::read(&file).unwrap();

    let others = [
        payout("7").with_json(r#"{"payout":"70"}"#),
        Intent::new(http::Method::PUT, "http://bank.test/payouts")
            .unwrap()
            .with_key(payout("7").key().clone())
            .unwrap()
            .with_body(payout("7").body().clone()),
        Intent::post("http://bank.test/other")
            .unwrap()
            .with_key(payout("7").key().clone())
            .unwrap()
            .with_body(payout("7").body().clone()),
        payout("7").with_carrier(Carrier::default().quoted()),
    ];
    for other in others {
        let open = client(&service, &journal).send(&other).await.unwrap_err();
        assert_eq!(open.kind(), SendErrorKind::JournalConflict);
        assert!(open.may_have_taken_effect() && !open.is_resumable(), "{open}");
        assert_eq!((service.times(), fs::read(&file).unwrap()), (1, before.clone()));
    }

    // A 401 is no information about the first sending, which only the journal remembers.
    service.now(Act::Answers(401));
    let open = client(&service, &journal).send(&payout("7")).await.unwrap_err();
    assert_eq!((open.kind(), open.may_have_taken_effect()), (SendErrorKind::TurnedAway, true));
    service.now(Act::Answers(201));
    client(&service, &journal).send(&payout("7")).await.unwrap();
    assert_eq!(journal.pending().await.unwrap().len(), 0);
}

#[tokio::test]
async fn an_intent_that_never_arrived_is_remembered_as_never_sent() {
    let dir = tempfile::tempdir().unwrap();
    let service = Service::new(Act::Away);
    let journal = open_journal(dir.path());
    let open = client(&service, &journal).send(&payout("7")).await.unwrap_err();
    assert!(!open.may_have_taken_effect());
    assert!(!journal.pending().await.unwrap()[0].as_ref().unwrap().maybe_sent);

    // It is older than the lifetime of its key, but no service ever received it.
    let much_later = Arc::new(ManualClock::at_millis(millis_now() + 40 * 86_400_000));
    let later = client(&service, &journal).with_clock(Arc::new(much_later));
    service.now(Act::Answers(401));
    let outcome = later.send(&payout("7")).await.unwrap();
    assert_eq!(outcome.verdict, Verdict::TurnedAway, "it is the first sending");
    // With another token it takes effect, under the same key.
    assert!(!journal.pending().await.unwrap()[0].as_ref().unwrap().maybe_sent);
    service.now(Act::Answers(201));
    assert_eq!(later.send(&payout("7")).await.unwrap().verdict, Verdict::Done);
    assert_eq!((service.times(), journal.pending().await.unwrap().len()), (2, 0));
    let seen = service.seen();
    assert_eq!(seen[0].headers()["idempotency-key"], seen[1].headers()["idempotency-key"]);

    // Once it may have arrived, later failures do not change that.
    for act in [Act::Away, Act::Loses, Act::Away] {
        service.now(act);
        client(&service, &journal).send(&payout("8")).await.unwrap_err();
    }
    assert!(journal.pending().await.unwrap()[0].as_ref().unwrap().maybe_sent);
}

#[tokio::test]
async fn nothing_is_sent_again_after_the_lifetime_of_its_key_whatever_the_clock_does() {
    const HOUR: u64 = 3_600_000;
    let dir = tempfile::tempdir().unwrap();
    let service = Service::new(Act::Loses);
    let journal = open_journal(dir.path());
    let now = millis_now();
    let clock = Arc::new(ManualClock::at_millis(now));
    let for_an_hour = once().with_key_lifetime(Duration::from_millis(HOUR));
    let first = client(&service, &journal).with_policy(for_an_hour).with_clock(Arc::new(clock.clone()));
    let intent = payout("7").with_created_at(clock.now());
    first.send(&intent).await.unwrap_err();
    assert_eq!(service.times(), 1);

    service.now(Act::Answers(201));
    // The resuming client assumes 24 hours, but the lifetime of the first sending counts.
    let resuming = client(&service, &journal).with_clock(Arc::new(clock.clone()));
    let refused = [now + HOUR, now + 2 * HOUR, now + 1000 * HOUR, now - 61_000, now - 1000 * HOUR, 0];
    for at in refused {
        clock.set_millis(at);
        let ends = ends(&journal, &resuming).await;
        assert_eq!(why(&ends[0]), SendErrorKind::KeyLifetime, "{at}");
        assert_eq!(service.times(), 1, "{at}");
    }
    for at in [now - 60_000, now + HOUR - 1] {
        clock.set_millis(at);
        service.now(Act::Loses);
        let times = service.times();
        assert!(ends(&journal, &resuming).await[0].is_err());
        assert_eq!(service.times(), times + 1, "{at}");
    }
    assert_eq!(journal.pending().await.unwrap().len(), 1, "a refused intent is not removed");
}

#[tokio::test]
async fn an_intent_that_a_service_without_keys_received_is_never_sent_again() {
    let dir = tempfile::tempdir().unwrap();
    let service = Service::new(Act::Loses);
    let journal = open_journal(dir.path());
    let plain = client(&service, &journal).with_policy(once().with_api(Api::Plain));
    assert_eq!(plain.send(&payout("7")).await.unwrap_err().kind(), SendErrorKind::Unknown);
    assert!(!service.seen()[0].headers().contains_key("idempotency-key"));
    service.now(Act::Answers(201));
    assert_eq!(why(&ends(&journal, &plain).await[0]), SendErrorKind::Unknown);
    // Another client assumes that the service knows keys.
    assert_eq!(why(&ends(&journal, &client(&service, &journal)).await[0]), SendErrorKind::KeyLifetime);
    assert_eq!((service.times(), journal.pending().await.unwrap().len()), (1, 1));
}

#[tokio::test]
async fn the_key_stays_in_the_header_of_the_first_sending() {
    let dir = tempfile::tempdir().unwrap();
    let service = Service::new(Act::Loses);
    let journal = open_journal(dir.path());
    let name = HeaderName::from_static("paypal-request-id");
    let paypal = client(&service, &journal).with_carrier(Carrier::named(name.clone()).quoted());
    paypal.send(&payout("7")).await.unwrap_err();
    service.now(Act::Answers(201));
    ends(&journal, &client(&service, &journal)).await.remove(0).unwrap();
    let seen = service.seen();
    assert!(seen[0].headers()[&name].to_str().unwrap().starts_with('"'));
    assert_eq!(seen[1].headers(), seen[0].headers());
}

#[tokio::test]
async fn secrets_are_not_stored_and_nothing_is_sent_without_them() {
    let dir = tempfile::tempdir().unwrap();
    let service = Service::new(Act::Loses);
    let journal = open_journal(dir.path());
    let mut marked = HeaderValue::from_static("hush-marked");
    marked.set_sensitive(true);
    let intent = payout("7")
        .with_header("authorization", "Bearer hush")
        .unwrap()
        .with_header("cookie", "session=hush")
        .unwrap()
        .with_header("x-mine", marked)
        .unwrap()
        .with_header("x-api-key", "hush-key")
        .unwrap()
        .with_header("x-amz-security-token", "hush-token")
        .unwrap()
        .with_header("private-token", "hush-private")
        .unwrap()
        .with_header("x-note", "kept")
        .unwrap();
    client(&service, &journal).send(&intent).await.unwrap_err();
    let file = fs::read_dir(journal.path()).unwrap().next().unwrap().unwrap();
    let text = String::from_utf8(fs::read(file.path()).unwrap()).unwrap();
    assert!(!text.contains("hush") && text.contains("kept"), "{text}");
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::metadata(journal.path()).unwrap().permissions().mode() & 0o777, 0o700);

    service.now(Act::Answers(201));
    let end = ends(&journal, &client(&service, &journal)).await.remove(0).unwrap_err();
    let ResumeError::MissingFields(names) = &end else { panic!("{end:?}") };
    assert_eq!(
        names.iter().map(HeaderName::as_str).collect::<Vec<_>>(),
        ["authorization", "cookie", "x-mine", "x-api-key", "x-amz-security-token", "private-token"]
    );
    let open = client(&service, &journal).send(&payout("7")).await.unwrap_err();
    assert_eq!((open.kind(), service.times()), (SendErrorKind::OtherCredentials, 1));

    let brought: HeaderMap = [
        (AUTHORIZATION, HeaderValue::from_static("Bearer hush")),
        (HeaderName::from_static("cookie"), HeaderValue::from_static("session=hush")),
        (HeaderName::from_static("x-mine"), HeaderValue::from_static("hush-marked")),
        (HeaderName::from_static("x-api-key"), HeaderValue::from_static("hush-key")),
        (HeaderName::from_static("x-amz-security-token"), HeaderValue::from_static("hush-token")),
        (HeaderName::from_static("private-token"), HeaderValue::from_static("hush-private")),
    ]
    .into_iter()
    .collect();
    let mut other = brought.clone();
    other.insert("private-token", HeaderValue::from_static("hush-another"));
    let resume = journal.resume_pending(&client(&service, &journal)).await.unwrap();
    let end = resume.with_fields(move |_| Ok(other.clone())).next().await.unwrap().unwrap().end;
    assert!(matches!(end, Err(ResumeError::OtherCredentials)), "{end:?}");
    assert_eq!(service.times(), 1);
    let resume = journal.resume_pending(&client(&service, &journal)).await.unwrap();
    let mut resume = resume.with_fields(move |_| Ok(brought.clone()));
    assert_eq!(resume.next().await.unwrap().unwrap().end.unwrap().verdict, Verdict::Done);
    let seen = service.seen();
    assert_eq!(seen[1].headers(), seen[0].headers());
}

/// A service that identifies callers by their credentials would execute it again.
#[tokio::test]
async fn an_intent_that_may_have_been_sent_is_not_sent_with_other_credentials() {
    let dir = tempfile::tempdir().unwrap();
    let service = Service::new(Act::Loses);
    let journal = open_journal(dir.path());
    let with = |token: &str| payout("7").with_header("authorization", token.to_owned()).unwrap();
    client(&service, &journal).send(&with("Bearer old")).await.unwrap_err();
    service.now(Act::Answers(201));

    let open = client(&service, &journal).send(&with("Bearer new")).await.unwrap_err();
    assert_eq!((open.kind(), service.times()), (SendErrorKind::OtherCredentials, 1));
    assert!(open.may_have_taken_effect() && open.is_resumable());
    let resumed = async |journal: &JournalDir, token: &'static str| {
        let resume = journal.resume_pending(&client(&service, journal)).await.unwrap();
        let brought: HeaderMap = [(AUTHORIZATION, HeaderValue::from_static(token))].into_iter().collect();
        resume.with_fields(move |_| Ok(brought.clone())).next().await.unwrap().unwrap().end
    };
    let end = resumed(&journal, "Bearer new").await.unwrap_err();
    assert!(matches!(end, ResumeError::OtherCredentials) && !end.to_string().contains("Bearer"), "{end:?}");
    assert_eq!(service.times(), 1);
    // The service identifies its callers by something else.
    let renewed = journal.with_other_credentials();
    assert_eq!(resumed(&renewed, "Bearer new").await.unwrap().verdict, Verdict::Done);

    // An intent that was never sent may be sent with any credentials.
    let dir = tempfile::tempdir().unwrap();
    let journal = open_journal(dir.path());
    service.now(Act::Away);
    client(&service, &journal).send(&with("Bearer old")).await.unwrap_err();
    service.now(Act::Answers(201));
    assert_eq!(resumed(&journal, "Bearer new").await.unwrap().verdict, Verdict::Done);
}

/// Any caller may send an intent that was never sent. From then on it belongs to that caller.
#[tokio::test]
async fn an_intent_that_another_caller_sent_first_belongs_to_that_caller() {
    for resumes in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let service = Service::new(Act::Away);
        let journal = open_journal(dir.path());
        let with = |token: &str| payout("7").with_header("authorization", token.to_owned()).unwrap();
        client(&service, &journal).send(&with("Bearer old")).await.unwrap_err();
        assert!(!journal.pending().await.unwrap()[0].as_ref().unwrap().maybe_sent);

        service.now(Act::Loses);
        if resumes {
            let resume = journal.resume_pending(&client(&service, &journal)).await.unwrap();
            let brought: HeaderMap =
                [(AUTHORIZATION, HeaderValue::from_static("Bearer new"))].into_iter().collect();
            let end = resume.with_fields(move |_| Ok(brought.clone())).next().await.unwrap().unwrap().end;
            assert_eq!(why(&end.map(|outcome| outcome.verdict)), SendErrorKind::Attempts);
        } else {
            client(&service, &journal).send(&with("Bearer new")).await.unwrap_err();
        }
        assert!(journal.pending().await.unwrap()[0].as_ref().unwrap().maybe_sent);
        service.now(Act::Answers(201));
        // The service would execute it for the old caller, too.
        let times = service.times();
        let open = client(&service, &journal).send(&with("Bearer old")).await.unwrap_err();
        assert_eq!(
            (open.kind(), service.times()),
            (SendErrorKind::OtherCredentials, times),
            "resumes: {resumes}"
        );
        let outcome = client(&service, &journal).send(&with("Bearer new")).await.unwrap();
        assert_eq!(outcome.verdict, Verdict::Done);
        assert!(journal.pending().await.unwrap().is_empty());
        assert_eq!(files(&journal), 0);
    }
}

/// A caller with credentials is another caller than one without.
#[tokio::test]
async fn an_intent_that_may_have_been_sent_without_credentials_is_not_sent_with_some() {
    let dir = tempfile::tempdir().unwrap();
    let service = Service::new(Act::Loses);
    let journal = open_journal(dir.path());
    client(&service, &journal).send(&payout("7")).await.unwrap_err();
    service.now(Act::Answers(201));
    for name in ["authorization", "cookie", "x-api-key", "x-auth-token"] {
        let known = payout("7").with_header(name, "secret").unwrap();
        let open = client(&service, &journal).send(&known).await.unwrap_err();
        assert_eq!((open.kind(), service.times()), (SendErrorKind::OtherCredentials, 1), "{name}");
    }
    assert_eq!(client(&service, &journal).send(&payout("7")).await.unwrap().verdict, Verdict::Done);
}

/// The service forgets a key. A caller that makes the same intent again must not have it executed twice.
#[tokio::test]
async fn a_finished_intent_is_not_executed_again_after_its_key_is_forgotten() {
    const HOUR: u64 = 3_600_000;
    let dir = tempfile::tempdir().unwrap();
    let service = Service::new(Act::Answers(201));
    let journal = open_journal(dir.path());
    let now = millis_now();
    let clock = Arc::new(ManualClock::at_millis(now));
    let client = client(&service, &journal).with_clock(Arc::new(clock.clone()));
    let with = |token: &str| payout("7").with_header("authorization", token.to_owned()).unwrap();
    assert_eq!(client.send(&with("Bearer a")).await.unwrap().verdict, Verdict::Done);
    assert!(journal.pending().await.unwrap().is_empty());

    // As long as the service knows the key, it replays its response.
    for (at, times) in [(now + HOUR, 2), (now + 23 * HOUR, 3)] {
        clock.set_millis(at);
        assert_eq!(client.send(&with("Bearer a")).await.unwrap().verdict, Verdict::Done);
        assert_eq!(service.times(), times);
    }
    // For another caller it may take effect again. Another request under its key is a conflict.
    let open = client.send(&with("Bearer b")).await.unwrap_err();
    assert_eq!((open.kind(), service.times()), (SendErrorKind::DoneBefore, 3));
    let other = with("Bearer a").with_json(r#"{"payout":"70"}"#);
    assert_eq!(
        (client.send(&other).await.unwrap_err().kind(), service.times()),
        (SendErrorKind::JournalConflict, 3)
    );
    // Later no process sends it.
    for at in [now + 25 * HOUR, now + 700 * HOUR] {
        clock.set_millis(at);
        let journal = open_journal(dir.path());
        let client = client.clone().with_journal(Arc::new(journal.clone()));
        let open = client.send(&with("Bearer a")).await.unwrap_err();
        assert_eq!(
            (open.kind(), open.may_have_taken_effect(), open.is_resumable()),
            (SendErrorKind::DoneBefore, true, false)
        );
        assert_eq!((service.times(), journal.pending().await.unwrap().len()), (3, 0));
    }

    // The file contains neither key nor address nor body nor credentials.
    let days: Vec<_> = fs::read_dir(journal.path().join("finished")).unwrap().map(Result::unwrap).collect();
    let files: Vec<_> = fs::read_dir(days[0].path()).unwrap().map(Result::unwrap).collect();
    assert_eq!((days.len(), files.len()), (1, 1));
    let text = fs::read_to_string(files[0].path()).unwrap();
    for hidden in ["bank.test", "payouts", "Bearer", payout("7").key().as_str().unwrap()] {
        assert!(!text.contains(hidden), "{text}");
    }
    // A damaged file stops the intent. It is removed when its day is over.
    for bit in [0, text.len() * 3, text.len() * 8 - 16] {
        let mut damaged = text.clone().into_bytes();
        damaged[bit / 8] ^= 1 << (bit % 8);
        fs::write(files[0].path(), damaged).unwrap();
        assert_eq!(client.send(&with("Bearer a")).await.unwrap_err().kind(), SendErrorKind::JournalConflict);
    }
    assert_eq!(service.times(), 3);
    fs::rename(days[0].path(), journal.path().join("finished/20000")).unwrap();
    journal.pending().await.unwrap();
    assert_eq!(fs::read_dir(journal.path().join("finished")).unwrap().count(), 0);
}

#[tokio::test]
async fn refused_intents_and_safe_methods_are_not_remembered_and_limits_hold() {
    let dir = tempfile::tempdir().unwrap();
    let service = Service::new(Act::Answers(402));
    let journal = open_journal(dir.path());
    client(&service, &journal).send(&payout("7")).await.unwrap();
    service.now(Act::Answers(200));
    let get = Intent::new(http::Method::GET, "http://bank.test/payouts").unwrap();
    client(&service, &journal).send(&get.with_key(payout("8").key().clone()).unwrap()).await.unwrap();
    assert!(!journal.path().join("finished").exists());

    let remembered = || -> usize {
        let days = fs::read_dir(journal.path().join("finished")).unwrap().map(Result::unwrap);
        days.map(|day| fs::read_dir(day.path()).unwrap().count()).sum()
    };
    let two = journal.clone().with_max_finished_per_day(2);
    for number in ["1", "2", "3", "4"] {
        client(&service, &two).send(&payout(number)).await.unwrap();
    }
    assert_eq!((remembered(), files(&journal)), (2, 0));
    let none = journal.clone().with_finished_retention(Duration::ZERO);
    client(&service, &none).send(&payout("5")).await.unwrap();
    assert_eq!((remembered(), files(&journal)), (2, 0));
}

/// The old address turns it away. It is sent to the new one, and the lifetime of its key begins then.
#[tokio::test]
async fn an_intent_that_was_turned_away_may_be_sent_to_another_address_later() {
    const HOUR: u64 = 3_600_000;
    let dir = tempfile::tempdir().unwrap();
    let service = Service::new(Act::Answers(308));
    let journal = open_journal(dir.path());
    let now = millis_now();
    let clock = Arc::new(ManualClock::at_millis(now));
    let client = client(&service, &journal).with_clock(Arc::new(clock.clone()));
    let before = payout("7").with_created_at(clock.now());
    assert_eq!(client.send(&before).await.unwrap().verdict, Verdict::TurnedAway);

    clock.set_millis(now + 30 * HOUR);
    let moved = |at: u64| {
        let moved = Intent::post("https://new.bank.test/payouts")
            .unwrap()
            .with_created_at(Timestamp::from_millis(at));
        moved.with_key(payout("7").key().clone()).unwrap().with_body(payout("7").body().clone())
    };
    service.now(Act::Loses);
    assert_eq!(client.send(&moved(now + 30 * HOUR)).await.unwrap_err().kind(), SendErrorKind::Attempts);
    // From now on the new address counts.
    let old = client.send(&before).await.unwrap_err();
    assert_eq!((old.kind(), service.times()), (SendErrorKind::JournalConflict, 2));
    clock.set_millis(now + 53 * HOUR);
    service.now(Act::Replays(201));
    assert_eq!(client.send(&moved(now + 53 * HOUR)).await.unwrap().verdict, Verdict::Done);
    let seen = service.seen();
    assert_eq!(seen[2].uri(), "https://new.bank.test/payouts");
    assert_eq!(seen[2].headers()["idempotency-key"], seen[0].headers()["idempotency-key"]);
}

#[test]
fn a_directory_that_others_may_write_to_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("open");
    fs::create_dir(&path).unwrap();
    for mode in [0o720, 0o702, 0o777] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        assert!(JournalDir::open(&path).unwrap_err().to_string().contains("others"));
    }
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    JournalDir::open(&path).unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    JournalDir::open(dir.path().join("file")).unwrap_err();
}

/// The content of a file that cannot be read is unknown.
#[tokio::test]
async fn an_unreadable_file_is_neither_sent_nor_reported_as_a_conflict() {
    let dir = tempfile::tempdir().unwrap();
    let service = Service::new(Act::Loses);
    let journal = open_journal(dir.path());
    client(&service, &journal).send(&payout("7")).await.unwrap_err();
    let file = journal.pending().await.unwrap().remove(0).unwrap().path;
    // A directory cannot be read as a file, not even by root.
    let kept = fs::read(&file).unwrap();
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    let open = client(&service, &journal).send(&payout("7")).await.unwrap_err();
    assert_eq!((open.kind(), service.times()), (SendErrorKind::JournalUnreadable, 1));
    assert!(open.may_have_taken_effect() && open.is_resumable());
    assert!(journal.pending().await.unwrap().remove(0).unwrap_err().is_unreadable);
    fs::remove_dir(&file).unwrap();
    fs::write(&file, kept).unwrap();
    service.now(Act::Answers(201));
    assert_eq!(client(&service, &journal).send(&payout("7")).await.unwrap().verdict, Verdict::Done);
}

#[tokio::test]
async fn a_corrected_request_waits_for_the_outcome_of_the_first_one() {
    let dir = tempfile::tempdir().unwrap();
    let service = Service::new(Act::Loses);
    let journal = open_journal(dir.path());
    let first = payout("7");
    client(&service, &journal).send(&first).await.unwrap_err();
    let corrected = first.corrected().unwrap().with_json(r#"{"payout":"7","iban":"right"}"#);
    assert_ne!(corrected.key(), first.key());
    let same_key = first.corrected().unwrap().with_key(first.key().clone()).unwrap();
    for refused in [&corrected, &same_key] {
        let open = client(&service, &journal).send(refused).await.unwrap_err();
        assert_eq!(open.kind(), SendErrorKind::JournalConflict);
    }
    assert_eq!(service.times(), 1);

    // This may be the refusal of a second request while the first one runs: it is no response to the first one.
    service.now(Act::Answers(400));
    let open = client(&service, &journal).send(&first).await.unwrap_err();
    assert_eq!((open.kind(), open.may_have_taken_effect()), (SendErrorKind::TurnedAway, true));
    let open = client(&service, &journal).send(&corrected).await.unwrap_err();
    assert_eq!(open.kind(), SendErrorKind::JournalConflict);

    service.now(Act::Replays(400));
    assert!(matches!(client(&service, &journal).send(&first).await.unwrap().verdict, Verdict::Refused(_)));
    service.now(Act::Answers(201));
    client(&service, &journal).send(&corrected).await.unwrap();
    let seen = service.seen();
    assert_ne!(seen[3].headers()["idempotency-key"], seen[2].headers()["idempotency-key"]);
    assert_eq!(seen[3].headers()["content-type"], "application/json");
}

#[tokio::test]
async fn a_journal_has_its_limits() {
    let dir = tempfile::tempdir().unwrap();
    let service = Service::new(Act::Loses);
    let journal = open_journal(dir.path()).with_max_intents(2);
    for number in ["1", "2"] {
        client(&service, &journal).send(&payout(number)).await.unwrap_err();
    }
    let open = client(&service, &journal).send(&payout("3")).await.unwrap_err();
    assert_eq!(
        (open.kind(), open.may_have_taken_effect(), service.times()),
        (SendErrorKind::Journal, false, 2)
    );
    // Stored intents continue.
    service.now(Act::Answers(201));
    client(&service, &journal).send(&payout("1")).await.unwrap();
    client(&service, &journal).send(&payout("3")).await.unwrap();

    let large = |bytes: usize| payout("large").with_body(vec![b'x'; bytes]);
    service.now(Act::Loses);
    let times = service.times();
    let open = client(&service, &journal).send(&large(16 * 1024 * 1024)).await.unwrap_err();
    assert_eq!((open.kind(), service.times()), (SendErrorKind::Journal, times));
    let open = client(&service, &journal).send(&large(16 * 1024 * 1024 - 1024)).await.unwrap_err();
    assert_eq!((open.kind(), service.times()), (SendErrorKind::Attempts, times + 1));
    assert_eq!(journal.pending().await.unwrap()[1].as_ref().unwrap().body_bytes, 16 * 1024 * 1024 - 1024);
}

/// Tasks send the same few intents while others list and resume: none is sent twice at the same time, and none is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_intent_that_a_task_is_sending_is_not_sent_by_another() {
    #[derive(Clone, Default)]
    struct Alone(Arc<Mutex<HashMap<String, (usize, usize)>>>);
    impl Transport for Alone {
        type Body = Full<Bytes>;
        async fn send(&self, request: Request<Bytes>) -> Result<Response<Full<Bytes>>, AttemptFailure> {
            let key = request.headers()["idempotency-key"].to_str().unwrap().to_owned();
            let times = {
                let mut all = self.0.lock().unwrap();
                let (inside, times) = all.entry(key.clone()).or_default();
                *inside += 1;
                *times += 1;
                assert_eq!(*inside, 1, "sent twice at the same time");
                *times
            };
            tokio::time::sleep(Duration::from_millis(1)).await;
            self.0.lock().unwrap().get_mut(&key).unwrap().0 -= 1;
            if times % 3 == 0 {
                return Err(AttemptFailure::new(AttemptFailureKind::Doubtful, "lost"));
            }
            Ok(Response::new(Full::default()))
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let service = Alone::default();
    let done = Arc::new(AtomicUsize::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..8_usize {
        let journal = open_journal(dir.path()); // like another process
        let client = Client::new(service.clone()).with_policy(once()).with_journal(Arc::new(journal.clone()));
        let done = Arc::clone(&done);
        tasks.spawn(async move {
            if task < 2 {
                while done.load(Ordering::SeqCst) < 6 {
                    let mut resume = journal.resume_pending(&client).await.unwrap();
                    while let Some(end) = resume.next().await {
                        end.unwrap();
                    }
                }
                return;
            }
            for round in 0..40_usize {
                match client.send(&payout(&(round % 5).to_string())).await {
                    Ok(_) => {}
                    Err(open) => {
                        assert!(
                            matches!(open.kind(), SendErrorKind::Attempts | SendErrorKind::InFlight),
                            "{open:?}"
                        );
                    }
                }
            }
            done.fetch_add(1, Ordering::SeqCst);
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
    let journal = open_journal(dir.path());
    let left = journal.pending().await.unwrap();
    assert_eq!(files(&journal), left.len());
    assert!(left.iter().all(|one| one.as_ref().is_ok_and(|one| !one.in_flight)), "{left:?}");
}

/// The process that the next test starts and kills: it sends and never gets a response. Without that test it does nothing.
#[tokio::test]
async fn a_process_that_is_killed_while_it_sends() {
    let Ok(dir) = std::env::var("JOURNAL_SENDS_FROM") else { return };
    #[derive(Clone)]
    struct Silent;
    impl Transport for Silent {
        type Body = Full<Bytes>;
        async fn send(&self, _: Request<Bytes>) -> Result<Response<Full<Bytes>>, AttemptFailure> {
            println!("\nsent");
            std::future::pending().await
        }
    }
    let journal = open_journal(Path::new(&dir)).with_finished_retention(Duration::ZERO);
    let _never = Client::new(Silent).with_journal(Arc::new(journal)).send(&payout("7")).await;
}

struct OtherProcess(Child);

impl OtherProcess {
    fn that_sends(dir: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "journal::a_process_that_is_killed_while_it_sends", "--nocapture"])
            .env("JOURNAL_SENDS_FROM", dir)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        assert!(lines.any(|line| line == "sent"));
        Self(child)
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for OtherProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

#[tokio::test]
async fn an_intent_of_another_process_is_not_sent_until_that_process_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let service = Service::new(Act::Answers(201));
    let journal = open_journal(dir.path()).with_finished_retention(Duration::ZERO);
    for _ in 0..3 {
        let mut other = OtherProcess::that_sends(dir.path());
        assert!(journal.pending().await.unwrap()[0].as_ref().unwrap().in_flight);
        let open: SendError = client(&service, &journal).send(&payout("7")).await.unwrap_err();
        assert_eq!(
            (open.kind(), open.may_have_taken_effect(), open.is_resumable()),
            (SendErrorKind::InFlight, true, true)
        );
        assert_eq!(why(&ends(&journal, &client(&service, &journal)).await[0]), SendErrorKind::InFlight);
        // Another intent is not affected.
        client(&service, &journal).send(&payout("8")).await.unwrap();
        let times = service.times();

        other.kill();
        assert_eq!(ends(&journal, &client(&service, &journal)).await.remove(0).unwrap(), Verdict::Done);
        assert_eq!(service.times(), times + 1);
        assert_eq!(journal.pending().await.unwrap().len(), 0);
    }
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn on_a_full_disk_nothing_is_sent_until_there_is_space_again() {
    let dir = tempfile::tempdir().unwrap();
    let mount = |args: &[&str]| {
        let status = Command::new("mount").args(args).arg(dir.path()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    if !mount(&["-t", "tmpfs", "-o", "size=256k", "tmpfs"]) {
        // Not through the harness, which hides output: a test that did not run must not look as if it had passed.
        let _ = writeln!(
            std::io::stderr(),
            "\n*** on_a_full_disk_nothing_is_sent_until_there_is_space_again DID NOT RUN: a tmpfs cannot be mounted here (it takes root)"
        );
        return;
    }
    struct Unmount(PathBuf);
    impl Drop for Unmount {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        }
    }
    let _unmount = Unmount(dir.path().to_owned());
    let service = Service::new(Act::Loses);
    let journal = open_journal(dir.path());
    let big = |number: usize| payout(&number.to_string()).with_body(vec![b'x'; 10_000]);
    let mut sent = 0;
    let full = loop {
        let open = client(&service, &journal).send(&big(sent)).await.unwrap_err();
        if open.kind() == SendErrorKind::Journal {
            break open;
        }
        sent += 1;
        assert!(sent < 100, "the disk was never full");
    };
    assert!(sent > 5 && !full.may_have_taken_effect() && full.is_resumable(), "{full}");
    assert_eq!(service.times(), sent, "sent without a file");
    assert_eq!(files(&journal), sent, "an incomplete file is left");

    // Stored intents continue without space, and free some.
    service.now(Act::Answers(201));
    client(&service, &journal).send(&big(0)).await.unwrap();
    client(&service, &journal).send(&big(sent)).await.unwrap();
    let ends = ends(&journal, &client(&service, &journal)).await;
    assert_eq!(ends.len(), sent - 1);
    assert!(ends.iter().all(Result::is_ok), "{ends:?}");
}
