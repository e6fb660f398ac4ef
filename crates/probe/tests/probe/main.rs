//! The suite against small services, each with one planted fault.

mod server;
mod tls;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::Uri;
use oncegate_probe::{Expectations, Operation, Probe, ProbeError, ProbeOptions, Report, Verdict};
use server::{Fault, Service};

const COUNTED: &str = r#"
path = "/orders"
key-required = true
body = '{"reference":"{uuid}","amount":{n}}'
[headers]
Authorization = "Bearer one"
[other-caller.headers]
Authorization = "Bearer two"
[[status]]
status = 500
headers.X-Fail = "500"
[[status]]
status = 429
headers.X-Fail = "429"
[[status]]
status = 404
headers.X-Fail = "404"
"#;
const BY_URL: &str = "[count]\nurl = \"/count?reference={uuid}\"\npointer = \"/total\"\nsettle = \"40ms\"\n";
const BY_MEMBER: &str = "[count]\nmember = \"/id\"\n";

fn operation(text: &str) -> Operation {
    Operation::parse(text, &|_| None).unwrap_or_else(|error| panic!("{error}"))
}

async fn run(uri: &Uri, operation: Operation, options: ProbeOptions) -> Result<Report, ProbeError> {
    Probe::new(uri, operation, options).await?.run().await
}

fn options(expectations: Expectations) -> ProbeOptions {
    let mut options = ProbeOptions::new(expectations);
    options.rate = 200;
    options.max_time = Duration::from_secs(5);
    options
}

async fn probe(fault: Fault, text: &str, change: impl FnOnce(&mut ProbeOptions, Arc<Service>)) -> Report {
    let (address, service) = Service::start(fault).await;
    let mut options = options(Expectations::ietf());
    change(&mut options, service);
    let uri: Uri = format!("http://{address}").parse().unwrap();
    let report = run(&uri, operation(text), options).await;
    report.unwrap_or_else(|error| panic!("{fault:?}: {error}"))
}

/// A probe of a service with all rows tested.
async fn whole(fault: Fault) -> Report {
    let text = format!("{COUNTED}{BY_URL}");
    probe(fault, &text, |options, service| {
        options.retention_wait = Some(Duration::from_secs(4));
        options.restart = Some(Arc::new(move || {
            service.restart();
            Box::pin(async { Ok(()) })
        }));
    })
    .await
}

/// The rows that are not as expected.
fn findings(report: &Report) -> Vec<(String, Verdict)> {
    let rows = report.rows.iter().filter(|row| row.verdict != Verdict::AsExpected);
    rows.map(|row| (row.id.clone(), row.verdict)).collect()
}

use Verdict::{Dangerous, Differs, NotTested};

/// Each fault, and all findings that it must cause.
const FAULTS: &[(Fault, &[(&str, Verdict)])] = &[
    (Fault::None, &[]),
    (Fault::NoLock, &[("concurrent", Dangerous), ("hang-up", Dangerous), ("retry-after", NotTested)]),
    (Fault::NoFingerprint, &[("other-body", Dangerous)]),
    (Fault::ExecutesThenRefuses, &[("other-body", Dangerous)]),
    (Fault::ConflictForOtherBody, &[("other-body", Differs)]),
    (Fault::CrossCaller, &[("other-caller", Dangerous)]),
    (Fault::KeyVisibleToOthers, &[("other-caller", Differs)]),
    (Fault::Releases5xx, &[("status-500", Differs)]),
    (Fault::Releases4xx, &[("status-404", Differs)]),
    (Fault::HeadersLost, &[("replay-headers", Differs)]),
    (Fault::Unmarked, &[("replay-headers", Differs)]),
    (Fault::CookieReplayed, &[("replay-headers", Differs)]),
    (Fault::OtherStatusOnReplay, &[("replay", Differs)]),
    // The restart is within the time that the last row waits.
    (Fault::LostOnRestart, &[("restart", Dangerous), ("retention", Dangerous)]),
    (Fault::Forgets, &[("retention", Dangerous)]),
    (Fault::ReleasedOnHangUp, &[("hang-up", Dangerous)]),
    (Fault::StuckOnHangUp, &[("hang-up", Differs)]),
    (Fault::TakesFirstKey, &[("doubled-key", Differs)]),
    (Fault::QuotesBelongToKey, &[("quoted-and-bare", Differs)]),
    (Fault::ExecutesWithoutKey, &[("missing-key", Dangerous)]),
    (Fault::NoRetryAfter, &[("retry-after", Differs)]),
    (Fault::MalformedRetryAfter, &[("retry-after", Differs)]),
    (Fault::ErrorForDuplicates, &[("concurrent", Differs), ("hang-up", Differs), ("retry-after", NotTested)]),
    (
        Fault::IgnoresInvalidKeys,
        &[
            ("empty-key", Dangerous),
            ("unclosed-quote", Dangerous),
            ("key-list", Dangerous),
            ("non-ascii-key", Dangerous),
            ("long-key", Dangerous),
            ("doubled-key", Dangerous),
        ],
    ),
];

#[tokio::test(flavor = "multi_thread")]
async fn every_planted_fault_is_found_and_nothing_else() {
    let mut wrong = Vec::new();
    // A few at a time: the moments of the hang-ups depend on the time that requests take.
    for group in FAULTS.chunks(12) {
        let probes: Vec<_> = group.iter().map(|(fault, _)| (*fault, tokio::spawn(whole(*fault)))).collect();
        for ((fault, probe), (_, expected)) in probes.into_iter().zip(group) {
            let report = probe.await.unwrap();
            let expected: Vec<_> =
                expected.iter().map(|(id, verdict)| ((*id).to_owned(), *verdict)).collect();
            if findings(&report) != expected {
                wrong.push(format!("{fault:?}: expected {expected:?}\n{}", report.to_table()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_of_many_rows_are_found_in_each() {
    let (no_keys, lying, marking, freeing) = tokio::join!(
        whole(Fault::NoKeys),
        whole(Fault::LyingMarker),
        whole(Fault::MarksEverything),
        whole(Fault::Releases5xxAfterEffect),
    );
    let is_dangerous = |report: &Report, ids: &[&str]| {
        for id in ids {
            assert_eq!(report.row(id).unwrap().verdict, Dangerous, "{id}: {}", report.to_table());
        }
    };
    is_dangerous(&no_keys, &["replay", "concurrent", "other-body", "missing-key", "empty-key"]);
    is_dangerous(&no_keys, &["hang-up", "lost-response", "restart", "retention"]);
    is_dangerous(&lying, &["replay", "lost-response", "restart"]);
    is_dangerous(&freeing, &["status-500"]);
    assert_eq!(marking.row("replay-headers").unwrap().verdict, Differs);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kept_server_error_differs_from_a_profile_that_frees_the_key() {
    let text = format!("{COUNTED}{BY_URL}");
    let kept = probe(Fault::None, &text, |options, _| options.expectations.released.extend(500..600)).await;
    let row = kept.row("status-500").unwrap();
    assert!(row.verdict == Differs && row.observation.contains("500, then 500: kept"), "{row:?}");
    let freed =
        probe(Fault::Releases5xx, &text, |options, _| options.expectations.released.extend(500..600)).await;
    let row = freed.row("status-500").unwrap();
    assert!(row.verdict == Verdict::AsExpected && row.observation.contains("500, then 201"), "{row:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_counter_nothing_is_claimed_about_effects() {
    // The fault would be seen by a counter. Without one, the rows say nothing, and nothing wrong.
    let report = probe(Fault::ReleasedOnHangUp, COUNTED, |_, _| {}).await;
    for id in ["fresh-keys", "concurrent", "hang-up"] {
        let row = report.row(id).unwrap();
        assert!(row.verdict == NotTested && row.observation.contains("no counter"), "{row:?}");
    }
    let row = report.row("replay").unwrap();
    assert!(
        row.verdict == Verdict::AsExpected && row.observation.contains("effects were not counted"),
        "{row:?}"
    );
    let report = probe(Fault::Unmarked, COUNTED, |_, _| {}).await;
    for id in ["replay", "other-caller", "quoted-and-bare", "lost-response"] {
        let row = report.row(id).unwrap();
        assert!(row.verdict == NotTested && row.observation.contains("no counter"), "{row:?}");
    }
    for id in ["restart", "retention"] {
        assert!(report.row(id).unwrap().observation.contains("give --"), "{}", report.to_table());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_of_the_response_counts_what_has_a_response() {
    let text = format!("{COUNTED}{BY_MEMBER}");
    let report = probe(Fault::NoLock, &text, |_, _| {}).await;
    assert_eq!(report.row("concurrent").unwrap().verdict, Dangerous, "{}", report.to_table());
    // The response of the hang-up is lost, and with it the member.
    let row = report.row("hang-up").unwrap();
    assert!(row.verdict == NotTested && row.observation.contains("only a counting URL"), "{row:?}");
    let report = probe(Fault::CrossCaller, &text, |_, _| {}).await;
    assert_eq!(report.row("other-caller").unwrap().verdict, Dangerous, "{}", report.to_table());
    let report = probe(Fault::None, &text, |_, _| {}).await;
    assert!(!report.rows.iter().any(|row| row.verdict > Verdict::AsExpected), "{}", report.to_table());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_counter_that_does_not_count_is_not_believed() {
    for (count, reason) in [
        // Without the reference, the service counts nothing.
        ("[count]\nurl = \"/count\"\npointer = \"/total\"\n", "no effect and no effect for one request each"),
        ("[count]\nmember = \"/nothing\"\n", "has no member /nothing"),
    ] {
        let report = probe(Fault::None, &format!("{COUNTED}{count}"), |_, _| {}).await;
        for id in ["fresh-keys", "concurrent"] {
            let row = report.row(id).unwrap();
            assert!(row.verdict == NotTested && row.observation.contains(reason), "{row:?}");
        }
        assert!(!report.rows.iter().any(|row| row.verdict > Verdict::AsExpected), "{}", report.to_table());
    }
    // A value of the request is another one in each request, and counts nothing.
    let text = format!("{COUNTED}[count]\nmember = \"/amount\"\n");
    for fault in [Fault::None, Fault::NoKeys] {
        let report = probe(fault, &text, |_, _| {}).await;
        let row = report.row("fresh-keys").unwrap();
        assert!(row.verdict == NotTested && row.observation.contains("equal requests"), "{row:?}");
        assert_ne!(report.row("concurrent").unwrap().verdict, Verdict::AsExpected, "{}", report.to_table());
    }
    // A constant cannot count.
    let text = COUNTED.replace("{n}", "7") + "[count]\nmember = \"/amount\"\n";
    let report = probe(Fault::None, &text, |_, _| {}).await;
    assert!(report.row("fresh-keys").unwrap().observation.contains("was equal"), "{}", report.to_table());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_probe_sends_no_more_requests_than_allowed() {
    let (address, service) = Service::start(Fault::None).await;
    let mut options = options(Expectations::ietf());
    options.max_requests = 11;
    let uri: Uri = format!("http://{address}").parse().unwrap();
    let report = run(&uri, operation(&format!("{COUNTED}{BY_URL}")), options).await.unwrap();
    assert!(service.requests.load(Ordering::Relaxed) <= 11);
    assert_eq!(report.requests, 11);
    let row = report.row("hang-up").unwrap();
    assert!(row.verdict == NotTested && row.observation.contains("limit of 11 requests"), "{row:?}");
}

#[tokio::test]
async fn an_address_that_is_not_on_this_machine_needs_a_confirmation() {
    // Addresses for documentation. Without a confirmation, nothing is sent to them.
    for address in ["http://192.0.2.1/", "https://[2001:db8::1]/orders", "http://0.0.0.0:1/"] {
        let result =
            run(&address.parse().unwrap(), operation("body = '{uuid}'"), options(Expectations::ietf())).await;
        let Err(error) = result else { panic!("{address} was accepted") };
        let is_right = matches!(error, ProbeError::NotLoopback(_)) || address.starts_with("https");
        assert!(is_right, "{address}: {error}");
    }
    let counted = "body = '{uuid}'\n[count]\nurl = \"http://192.0.2.1/count\"\npointer = \"\"\n";
    let (address, service) = Service::start(Fault::None).await;
    let result = run(
        &format!("http://{address}/orders").parse().unwrap(),
        operation(counted),
        options(Expectations::ietf()),
    )
    .await;
    assert!(matches!(result, Err(ProbeError::NotLoopback(_))));
    assert_eq!(service.requests.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_body_without_the_key_and_an_impossible_port_are_refused_before_anything_is_sent() {
    let (address, service) = Service::start(Fault::None).await;
    let keyed = "path = \"/orders\"\nbody = '{\"reference\":\"{uuid}\",\"key\":\"{key}\"}'\n";
    for (uri, rest, words) in [
        (format!("http://{address}"), "other-body = '{\"reference\":\"{uuid}\"}'\n", "other-body"),
        (format!("http://{address}"), "[[status]]\nstatus = 500\nbody = '{}'\n", "[[status]] body"),
        ("http://127.0.0.1:99999".to_owned(), "", "port"),
    ] {
        let operation = operation(&format!("{keyed}{rest}"));
        let result = run(&uri.parse().unwrap(), operation, options(Expectations::ietf())).await;
        let Err(ProbeError::Usage(text)) = result else { panic!("{rest}{uri} was accepted") };
        assert!(text.contains(words), "{text}");
    }
    assert_eq!(service.requests.load(Ordering::Relaxed), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_that_refuses_the_plain_request_is_not_probed() {
    let (address, service) = Service::start(Fault::None).await;
    let text = "path = \"/orders\"\nbody = '{\"reference\":\"{uuid}\",\"amount\":0}'\n";
    let result =
        run(&format!("http://{address}").parse().unwrap(), operation(text), options(Expectations::ietf()))
            .await;
    let Err(error) = result else { panic!("it was probed") };
    assert!(error.to_string().contains("got 400"), "{error}");
    assert_eq!(service.requests.load(Ordering::Relaxed), 1);
    assert_eq!(service.effects(), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_over_tls_is_probed_with_all_rows() {
    let (address, client) = tls::start(Fault::None).await;
    let mut options = options(Expectations::ietf());
    options.tls = Some(Arc::new(client));
    let uri: Uri = format!("https://localhost:{}", address.port()).parse().unwrap();
    let text = format!("{COUNTED}{BY_URL}");
    let report = run(&uri, operation(&text), options.clone()).await.unwrap();
    let untested = [("restart".to_owned(), NotTested), ("retention".to_owned(), NotTested)];
    assert_eq!(findings(&report), untested, "{}", report.to_table());
    // A certificate that is not trusted ends the probe.
    let (address, _) = tls::start(Fault::None).await;
    let uri: Uri = format!("https://localhost:{}", address.port()).parse().unwrap();
    let Err(error) = run(&uri, operation(&text), options).await else { panic!("it was trusted") };
    assert!(error.to_string().contains("TLS"), "{error}");
}
