//! The dashboard of a running sidecar: sessions over a reload, settings with their places, the playground, the log.

use std::fs;

use rustix::process::Signal;

use crate::support::{Message, Service, Sidecar, ask, request, sidecar};
use crate::{KEY, OK};

const FIRST: &str = "the-first-token-0";
const SECOND: &str = "the-second-token-";
const RELOADED: &str = "the configuration was reloaded";

/// Asks for a page as a browser does.
async fn page(sidecar: &Sidecar, path: &str, fields: &[&str]) -> Message {
    let fields = [&["Accept: text/html", "Connection: close"], fields].concat();
    let text = request("GET", path, &fields, "").replace("orders.test", &sidecar.admin.to_string());
    ask(sidecar.admin, &text).await
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
    oncegate_testkit::until("the second token counts", async || {
        page(&sidecar, "/keys", &[&format!("Authorization: Bearer {SECOND}")]).await.status() == 200
    })
    .await;
    page(&sidecar, "/keys", &[&cookie]).await.has_status(303);
    form(&sidecar, "/login", &[], &format!("token={FIRST}")).await.has_status(401);
    fs::write(&file, FIRST).unwrap();
    sidecar.process.signal(Signal::HUP);
    oncegate_testkit::until("the first token counts again", async || {
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
    let path = found.has_status(303).get("location").unwrap().to_owned();
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
