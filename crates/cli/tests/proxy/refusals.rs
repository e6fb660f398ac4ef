//! The sidecar's own responses, in the format that clients of the route's profile read.

use oncegate_servers::unused_port;

use crate::support::{Message, Service, Sidecar, request};
use crate::{KEY, OK};

const PROFILES: [&str; 2] = ["--profile=stripe", "--profile=classic"];

/// Asserts that this is an error in the format of the profile.
fn is_of_profile(response: &Message, profile: &str, status: u16, should_retry: &str) {
    response.has_status(status);
    assert_eq!(response.get("content-type"), Some("application/json"), "{response:?}");
    assert_eq!(response.get("cache-control"), Some("no-store"), "{response:?}");
    if profile == "--profile=stripe" {
        let error = &response.json()["error"];
        assert!(error["type"].is_string() && error["message"].is_string(), "{response:?}");
        assert_eq!(response.get("stripe-should-retry"), Some(should_retry), "{response:?}");
    } else {
        assert!(
            response.json()["error"].is_string() && response.json()["message"].is_string(),
            "{response:?}"
        );
    }
}

#[tokio::test]
async fn an_unreachable_service_is_reported_in_the_format_of_the_profile() {
    for profile in PROFILES {
        let (_socket, away) = unused_port().unwrap();
        let sidecar = Sidecar::start(away, &[profile]).await;
        for fields in [&[KEY][..], &[]] {
            let response = sidecar.ask(&request("POST", "/orders", fields, "{}")).await;
            is_of_profile(&response, profile, 502, "true");
        }
    }
}

#[tokio::test]
async fn a_service_time_out_is_reported_in_the_format_of_the_profile() {
    for (profile, with_key) in [("--profile=stripe", "false"), ("--profile=classic", "")] {
        let service = Service::new().await;
        let sidecar = Sidecar::start(service.address, &[profile, "--upstream-timeout=50ms"]).await;
        for fields in [&[KEY][..], &[]] {
            let response = sidecar.ask(&request("POST", "/orders", fields, "{}")).await;
            is_of_profile(&response, profile, 504, with_key);
        }
    }
}

#[tokio::test]
async fn a_request_that_cannot_be_forwarded_is_refused_in_the_format_of_its_route() {
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("oncegate.toml");
    std::fs::write(&file, "[[route]]\npath = \"/v1/{*rest}\"\nprofile = \"stripe\"\n").unwrap();
    let config = format!("--config={}", file.display());
    let sidecar = Sidecar::start(service.address, &[&config]).await;
    let twice = |path: &str| request("POST", path, &["Host: other.test", KEY], "{}");
    is_of_profile(&sidecar.ask(&twice("/v1/charges")).await, "--profile=stripe", 400, "false");
    sidecar.ask(&twice("/other")).await.is_problem(400, "request-malformed");
    let coded = request("POST", "/v1/charges", &["Transfer-Encoding: gzip, chunked", KEY], "");
    is_of_profile(&sidecar.ask(&coded).await, "--profile=stripe", 501, "false");
    assert_eq!(service.requests(), 0);
}
