//! The dashboard of a running sidecar: sessions over a reload, settings with their places, the playground, the log.

use std::fs;
use std::time::{Duration, Instant};

use oncegate_seal::SealKey;
use oncegate_testkit::until;
use rustix::process::Signal;

use crate::postgres::next_load;
use crate::support::{Message, Service, Sidecar, ask, request, sidecar};
use crate::{KEY, OK};

const FIRST: &str = "the-first-token-0";
const SECOND: &str = "the-second-token-";
const RELOADED: &str = "the configuration was reloaded";

/// Asks for a page as a browser does, until it has its records.
async fn page(sidecar: &Sidecar, path: &str, fields: &[&str]) -> Message {
    let fields = [&["Accept: text/html", "Connection: close"], fields].concat();
    let deadline = Instant::now() + Duration::from_secs(180);
    let mut path = path.to_owned();
    loop {
        let text = request("GET", &path, &fields, "").replace("orders.test", &sidecar.admin.to_string());
        let page = ask(sidecar.admin, &text).await;
        let Some(next) = next_load(page.text()) else { return page };
        assert!(Instant::now() < deadline, "{}", page.text());
        path = next;
    }
}

async fn text_of(sidecar: &Sidecar, path: &str) -> String {
    page(sidecar, path, &[]).await.text().to_owned()
}

/// Sends a form as a browser does.
async fn form(sidecar: &Sidecar, path: &str, fields: &[&str], body: &str) -> Message {
    let origin = format!("Origin: http://{}", sidecar.admin);
    let own = [
        "Accept: text/html",
        "Content-Type: application/x-www-form-urlencoded",
        &origin,
        "Connection: close",
    ];
    let text = request("POST", path, &[&own, fields].concat(), body);
    ask(sidecar.admin, &text.replace("orders.test", &sidecar.admin.to_string())).await
}

fn form_token(page: &Message) -> String {
    let (_, rest) = page.text().split_once("name=\"form_token\" value=\"").expect("a form");
    rest[..64].to_owned()
}

#[tokio::test]
async fn a_session_ends_with_the_token_of_its_login() {
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    fs::write(&file, FIRST).unwrap();
    let flag = format!("--admin-token-file={}", file.display());
    let mut sidecar = Sidecar::start(service.address, &[&flag]).await;
    let login = form(&sidecar, "/login", &[], &format!("token={FIRST}&actor=anna&next=/")).await;
    login.has_status(303);
    let cookie = login.get("set-cookie").unwrap().split(';').next().unwrap().to_owned();
    let cookie = format!("Cookie: {cookie}");
    page(&sidecar, "/keys", &[&cookie]).await.has_status(200);
    // A reload with the same token ends no session.
    sidecar.process.signal(Signal::HUP);
    sidecar.process.logs(RELOADED).await;
    page(&sidecar, "/keys", &[&cookie]).await.has_status(200);

    fs::write(&file, SECOND).unwrap();
    sidecar.process.signal(Signal::HUP);
    until("the second token counts", async || {
        page(&sidecar, "/keys", &[&format!("Authorization: Bearer {SECOND}")]).await.status() == 200
    })
    .await;
    page(&sidecar, "/keys", &[&cookie]).await.has_status(303);
    form(&sidecar, "/login", &[], &format!("token={FIRST}")).await.has_status(401);
    fs::write(&file, FIRST).unwrap();
    sidecar.process.signal(Signal::HUP);
    until("the first token counts again", async || {
        page(&sidecar, "/keys", &[&format!("Authorization: Bearer {FIRST}")]).await.status() == 200
    })
    .await;
    page(&sidecar, "/keys", &[&cookie]).await.has_status(303);
    for secret in [FIRST, SECOND, &cookie["Cookie: oncegate-session=".len()..]] {
        assert_eq!(sidecar.process.error_lines(secret), [""; 0]);
    }
    sidecar.process.logs("an operator logged in to the dashboard").await;
    sidecar.process.logs("a wrong token was sent to the login").await;
}

#[tokio::test]
async fn a_look_at_a_response_is_in_the_log_without_the_response() {
    let service = Service::new().await.answers(OK);
    let mut sidecar = Sidecar::start(service.address, &[]).await;
    sidecar.ask(&request("POST", "/orders", &[KEY], "{}")).await.has_status(200);
    let token = form_token(&page(&sidecar, "/", &[]).await);
    let found = form(&sidecar, "/keys/search", &[], &format!("form_token={token}&q=intent-1")).await;
    let mut path = found.has_status(303).get("location").unwrap().to_owned();
    if path.starts_with("/keys/found") {
        // A busy machine.
        path = page(&sidecar, &path, &[]).await.has_status(303).get("location").unwrap().to_owned();
    }
    let body = format!("form_token={token}&reason=ticket+12&actor=anna");
    let shown = form(&sidecar, &format!("{path}/response"), &[], &body).await;
    assert!(
        shown.has_status(200).text().contains("<pre class=\"body\" tabindex=\"0\">ok</pre>"),
        "{}",
        shown.text()
    );
    let line = "an operator looked at a stored response";
    sidecar.process.logs(line).await;
    let lines = sidecar.process.error_lines(line);
    let record = path.strip_prefix("/keys/").unwrap();
    assert!(
        lines[0].contains(record) && lines[0].contains("anna") && lines[0].contains("ticket 12"),
        "{lines:?}"
    );
    assert_eq!(sidecar.process.error_lines("intent-1"), [""; 0]);
}

#[tokio::test]
async fn routes_show_the_places_of_their_settings_and_the_warnings() {
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("oncegate.toml");
    let settings = format!(
        "to = \"http://{}\"\nstore = \"memory:\"\n[[route]]\npath = \"/orders/{{id}}\"\nmethods = [\"POST\"]\nretention = \"72h\"\n",
        service.address
    );
    fs::write(&file, settings).unwrap();
    let config = format!("--config={}", file.display());
    let mut command = sidecar(&format!("http://{}", service.address));
    let sidecar = Sidecar::run(command.args([config.as_str(), "--playground=off"])).await;
    sidecar.ask(&request("POST", "/orders/7", &[KEY], "{}")).await.has_status(200);
    let routes = page(&sidecar, "/routes", &[]).await;
    for text in
        ["/orders/{id}", "3 d", "All other requests", "<span class=\"state completed\">completed</span> 1"]
    {
        assert!(routes.text().contains(text), "{text} in {}", routes.text());
    }
    let route = page(&sidecar, "/routes/0", &[]).await;
    for text in ["<code>72h</code>", "oncegate.toml:6:13: retention", "profile ietf"] {
        assert!(route.text().contains(text), "{text} in {}", route.text());
    }
    let overview = page(&sidecar, "/", &[]).await;
    assert!(overview.text().contains("records are kept in memory and do not survive a restart"));
    let playground = page(&sidecar, "/playground", &[]).await;
    assert!(playground.text().contains("switched off"), "{}", playground.text());
    let token = form_token(&overview);
    let body = format!("form_token={token}&method=POST&path=/orders");
    form(&sidecar, "/playground", &[], &body).await.has_status(403);
    assert_eq!(service.requests(), 1);
    // The address for requests has no dashboard.
    let mine = sidecar.ask(&request("GET", "/", &["Accept: text/html"], "")).await;
    assert_eq!(mine.has_status(200).text(), "ok");
}

#[tokio::test]
async fn a_response_that_cannot_be_opened_is_shown_as_sealed_and_as_refused() {
    const CARD: &str = "HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n4111-secret";
    let service = Service::new().await.answers(CARD);
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data").display().to_string();
    let keys = [1, 2].map(|byte| SealKey::from_bytes([byte; 32]));
    let run = async |key: &SealKey| {
        let mut command = sidecar(&format!("http://{}", service.address));
        let secret = key.to_secret_text().to_string();
        Sidecar::run(command.env("ONCEGATE_STORE", &store).env("ONCEGATE_SEAL_KEYS", secret)).await
    };
    let search = async |sidecar: &Sidecar| {
        let token = form_token(&page(sidecar, "/", &[]).await);
        let found = form(sidecar, "/keys/search", &[], &format!("form_token={token}&q=intent-1")).await;
        (found.has_status(303).get("location").unwrap().to_owned(), token)
    };
    let mut first = run(&keys[0]).await;
    first.ask(&request("POST", "/orders", &[KEY], "{}")).await.has_status(200);
    let (path, token) = search(&first).await;
    let shown = page(&first, &path, &[]).await;
    for text in ["opened here", "200 with the stored response"] {
        assert!(shown.text().contains(text), "{text} in {}", shown.text());
    }
    let body = format!("form_token={token}&reason=ticket");
    let opened = form(&first, &format!("{path}/response"), &[], &body).await;
    assert!(opened.text().contains("4111-secret"), "{}", opened.text());
    first.process.signal(Signal::TERM);
    first.process.ended().await;

    let second = run(&keys[1]).await;
    let (path, token) = search(&second).await;
    let shown = page(&second, &path, &[]).await;
    let id = keys[0].id().to_string();
    for text in [id.as_str(), "bytes that cannot be opened: ", "503 response-sealed"] {
        assert!(shown.text().contains(text), "{text} in {}", shown.text());
    }
    // Neither the page nor a look at the content shows the sealed bytes as a response.
    let body = format!("form_token={token}&reason=ticket");
    let looked = form(&second, &format!("{path}/response"), &[], &body).await;
    for text in [shown.text(), looked.text()] {
        assert!(!text.contains("4111") && !text.contains("<pre class=\"body\""), "{text}");
    }
    second.ask(&request("POST", "/orders", &[KEY], "{}")).await.is_problem(503, "response-sealed");
    assert_eq!(service.requests(), 1);
}

#[tokio::test]
async fn pages_say_which_routes_only_observe_and_what_would_have_been() {
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("oncegate.toml");
    let settings = format!(
        "to = \"http://{}\"\nstore = \"memory:\"\n[[route]]\npath = \"/orders\"\nrequire-key = true\nshadow = true\n",
        service.address
    );
    fs::write(&file, settings).unwrap();
    let mut command = sidecar(&format!("http://{}", service.address));
    let sidecar = Sidecar::run(command.arg(format!("--config={}", file.display()))).await;
    let post = async |fields: &[&str], body: &str| {
        sidecar.ask(&request("POST", "/orders", fields, body)).await.has_status(200);
    };
    post(&[KEY], "{}").await;
    until("the observation is complete", async || {
        page(&sidecar, "/keys?state=completed", &[]).await.text().contains("(shadow) POST /orders")
    })
    .await;
    post(&[KEY], "{}").await;
    post(&[KEY], "{\"other\":1}").await;
    post(&[], "{}").await;
    until("the mistakes are counted", async || {
        let misuse = text_of(&sidecar, "/misuse").await;
        misuse.contains("(shadow) POST /orders") && misuse.matches("class=\"num\">1</td>").count() == 2
    })
    .await;
    let misuse = text_of(&sidecar, "/misuse").await;
    assert!(misuse.contains("would have been refused"), "{misuse}");
    let overview = text_of(&sidecar, "/").await;
    for text in ["4 requests in the last 60 minutes: 4 shadow.", "only observed, and passed on"] {
        assert!(overview.contains(text), "{text} in {overview}");
    }
    let routes = text_of(&sidecar, "/routes").await;
    assert!(routes.contains("<span class=\"state shadow\">shadow</span>"), "{routes}");
    assert_eq!(routes.matches("state shadow").count(), 1, "only one of the routes");
    let token = form_token(&page(&sidecar, "/", &[]).await);
    let found = form(&sidecar, "/keys/search", &[], &format!("form_token={token}&q=intent-1")).await;
    let record = text_of(&sidecar, found.has_status(303).get("location").unwrap()).await;
    for text in ["Would be replayed", "Would be another request", "only observes"] {
        assert!(record.contains(text), "{text} in {record}");
    }
}

/// An operator who tries "twice" on a route that only observes is told before and after that the service executes twice.
#[tokio::test]
async fn the_playground_says_that_a_shadow_route_executes_each_request() {
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("oncegate.toml");
    let routes = "[[route]]\npath = \"/observed/{id}\"\nshadow = true\n[[route]]\npath = \"/orders\"\n";
    fs::write(&config, routes).unwrap();
    let mut command = sidecar(&format!("http://{}", service.address));
    let sidecar = Sidecar::run(command.arg("--store=memory:").arg("--config").arg(&config)).await;
    let before = page(&sidecar, "/playground", &[]).await;
    assert!(before.text().contains("Each request is executed"), "{}", before.text());
    assert!(before.text().contains("<code>/observed/{id}</code>."), "{}", before.text());
    let token = form_token(&before);
    let play = async |path: &str| {
        let sent = format!("method=POST&path={path}&scenario=twice&headers=Idempotency-Key:+play&body=x");
        let page = form(&sidecar, "/playground", &[], &format!("form_token={token}&{sent}")).await;
        page.has_status(200).text().to_owned()
    };
    let observed = play("/observed/7%3Fa%3D1").await;
    assert!(observed.contains("The route of this request only observes"), "{observed}");
    assert_eq!(service.requests(), 2);
    let protected = play("/orders").await;
    assert!(protected.contains("One request executed"), "{protected}");
    assert_eq!(service.requests(), 3);
}

/// The playground acts for who is logged in, at the own address, and for no one else.
#[tokio::test]
async fn the_playground_sends_for_an_operator_and_only_to_the_sidecar() {
    let (service, other) = (Service::new().await.answers(OK), Service::new().await.answers(OK));
    let mut command = sidecar(&format!("http://{}", service.address));
    let sidecar = Sidecar::run(command.arg("--store=memory:").env("ONCEGATE_ADMIN_TOKEN", FIRST)).await;
    let sent = "method=POST&path=/orders&scenario=twice&headers=Idempotency-Key:+play&body=x";
    let refused = form(&sidecar, "/playground", &[], sent).await;
    assert_eq!(refused.has_status(303).get("location"), Some("/login?next=/"));
    let login = form(&sidecar, "/login", &[], &format!("token={FIRST}&next=/playground")).await;
    let cookie = login.has_status(303).get("set-cookie").unwrap().split(';').next().unwrap().to_owned();
    let cookie = format!("Cookie: {cookie}");
    form(&sidecar, "/playground", &[&cookie], sent).await.has_status(403);
    assert_eq!(service.requests(), 0);
    let token = form_token(&page(&sidecar, "/playground", &[&cookie]).await);
    let done = form(&sidecar, "/playground", &[&cookie], &format!("form_token={token}&{sent}")).await;
    assert!(done.has_status(200).text().contains("One request executed"), "{}", done.text());
    assert_eq!(service.requests(), 1);
    // No field makes it send elsewhere, and none splits the request.
    let elsewhere = other.address;
    for (path, headers) in [
        (format!("//{elsewhere}/"), String::new()),
        (format!("/@{elsewhere}/"), format!("Host: {elsewhere}")),
        ("/orders".to_owned(), format!("Host: {elsewhere}\r\nForwarded: host={elsewhere}")),
        (format!("http://{elsewhere}/"), String::new()),
        ("/orders HTTP/1.1\r\nHost: x\r\n\r\nGET /second".to_owned(), String::new()),
        ("/orders".to_owned(), "Connection: upgrade".to_owned()),
        ("/orders".to_owned(), "Transfer-Encoding: chunked".to_owned()),
        ("/orders".to_owned(), "Content-Length: 0".to_owned()),
    ] {
        let before = service.requests();
        let coded = |text: &str| text.bytes().map(|byte| format!("%{byte:02x}")).collect::<String>();
        let body = format!(
            "form_token={token}&method=POST&scenario=once&path={}&headers={}",
            coded(&path),
            coded(&headers)
        );
        form(&sidecar, "/playground", &[&cookie], &body).await;
        assert!(service.requests() - before <= 1, "{path:?} {headers:?}");
    }
    assert_eq!(other.requests(), 0);
}
