//! The pages over a socket, as browsers and attackers ask for them.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use http::Request;
use http::header;
use oncegate_core::RecordId;

use super::CONTENT_POLICY;
use crate::admin::tests::{AdminResponse, Sidecar, TOKEN};

/// Texts that a client or an operator chooses. None of them may become markup.
const HOSTILE: &str =
    "</code></pre></textarea><script>alert(1)</script><img src=x onerror='alert(1)'>\"{{7*7}}";

const PAGES: [&str; 11] = [
    "/", "/keys", "/stuck", "/dead-letters", "/outbox", "/misuse", "/routes", "/routes/default", "/audit",
    "/playground", "/?live=off",
];

/// A browser that keeps at most one cookie.
struct Browser<'a> {
    sidecar: &'a Sidecar,
    cookie: Option<String>,
    host: String,
    scheme: &'static str,
}

impl<'a> Browser<'a> {
    fn new(sidecar: &'a Sidecar) -> Self {
        Self { sidecar, cookie: None, host: sidecar.address.to_string(), scheme: "http" }
    }

    fn builder(&self, method: &str, path: &str) -> http::request::Builder {
        let request = Request::builder()
            .method(method)
            .uri(self.sidecar.url(path))
            .header(header::HOST, &self.host)
            .header(header::ACCEPT, "text/html,application/xhtml+xml,*/*;q=0.8");
        match &self.cookie {
            Some(cookie) => request.header(header::COOKIE, format!("other=1; {cookie}")),
            None => request,
        }
    }

    /// A page with its records: on a busy machine it may have to be loaded again.
    async fn get(&self, path: &str) -> AdminResponse {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut path = path.to_owned();
        loop {
            let page = self.sidecar.send(self.builder("GET", &path).body(Default::default()).unwrap()).await;
            let text = page.text();
            let Some((_, rest)) = text.split_once("aria-busy=\"true\" hx-get=\"") else { return page };
            assert!(Instant::now() < deadline, "{text}");
            path = rest.split_once('"').unwrap().0.replace("&#38;", "&");
        }
    }

    /// Sends a form as it is.
    async fn send_form(&self, path: &str, fields: &[(&str, &str)], origin: Option<&str>) -> AdminResponse {
        let body: Vec<_> = fields
            .iter()
            .map(|(name, value)| format!("{name}={}", super::format::query_text(value)))
            .collect();
        let mut request =
            self.builder("POST", path).header(header::CONTENT_TYPE, "application/x-www-form-urlencoded");
        if let Some(origin) = origin {
            request = request.header(header::ORIGIN, origin);
        }
        self.sidecar.send(request.body(body.join("&").into()).unwrap()).await
    }

    /// Sends a form of the page at `page`, with its token.
    async fn submit(&self, page: &str, path: &str, fields: &[(&str, &str)]) -> AdminResponse {
        let text = self.get(page).await.text();
        let hidden = |name| value_of(&text, name).unwrap_or_default();
        let (token, seen) = (hidden("form_token"), hidden("seen"));
        let fields = [&[("form_token", token.as_str()), ("seen", seen.as_str())], fields].concat();
        let response = self.send_form(path, &fields, Some(&self.origin())).await;
        match response.headers.get(header::LOCATION).and_then(|to| to.to_str().ok()) {
            // A search on a busy machine.
            Some(to) if to.starts_with("/keys/found") => self.get(to).await,
            _ => response,
        }
    }

    fn origin(&self) -> String {
        format!("{}://{}", self.scheme, self.host)
    }

    async fn log_in(&mut self, token: &str) -> AdminResponse {
        let fields = [("token", token), ("actor", "anna"), ("next", "/keys")];
        let response = self.send_form("/login", &fields, Some(&self.origin())).await;
        if let Some(cookie) = response.headers.get(header::SET_COOKIE) {
            self.cookie = cookie.to_str().unwrap().split(';').next().map(str::to_owned);
        }
        response
    }
}

/// The value of a hidden field.
fn value_of(html: &str, name: &str) -> Option<String> {
    let (_, rest) = html.split_once(&format!("name=\"{name}\" value=\""))?;
    rest.split_once('"').map(|(value, _)| value.to_owned())
}

fn location(response: &AdminResponse) -> &str {
    assert_eq!(response.status, 303, "{}", response.text());
    response.headers[header::LOCATION].to_str().unwrap()
}

/// The state of a record, from the API.
async fn state(sidecar: &Sidecar, id: RecordId) -> String {
    let request = Request::get(sidecar.url(&format!("/v1/keys/{id}"))).body(Default::default()).unwrap();
    let view: serde_json::Value = serde_json::from_str(&sidecar.send(request).await.text()).unwrap();
    view["state"].as_str().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn every_page_is_protected_in_the_browser() {
    let sidecar = Sidecar::start().await;
    let id = sidecar.unknown(1, "POST /orders").await;
    let browser = Browser::new(&sidecar);
    let record = format!("/keys/{id}");
    let change = format!("/keys/{id}/respond");
    let pages = PAGES.into_iter().map(|page| (page, 200));
    let pages =
        pages.chain([(record.as_str(), 200), (&change, 200), ("/keys/ffffffff", 404), ("/nowhere", 404)]);
    for (path, status) in pages {
        let page = browser.get(path).await;
        assert_eq!(page.status, status, "{path}: {}", page.text());
        for (name, value) in [
            ("content-security-policy", CONTENT_POLICY),
            ("content-type", "text/html; charset=utf-8"),
            ("x-frame-options", "DENY"),
            ("x-content-type-options", "nosniff"),
            ("cache-control", "no-store"),
            ("referrer-policy", "same-origin"),
            ("cross-origin-opener-policy", "same-origin"),
            ("oncegate-admin", "1"),
        ] {
            assert_eq!(page.headers[name], value, "{path}");
        }
        let text = page.text();
        for refused in [" style=", "<style", " onclick=", "<script>", "https://", "hx-on", "javascript:"] {
            assert!(!text.contains(refused), "{path} contains {refused}");
        }
        for source in text.split(" src=\"").skip(1).chain(text.split("<link ").skip(1)) {
            assert!(
                source.starts_with("/assets/") || source.contains("href=\"/assets/"),
                "{path}: {source:.60}"
            );
        }
    }
    for word in ["unsafe", "data:", "*"] {
        assert!(!CONTENT_POLICY.contains(word), "{word}");
    }
    for (path, media_type) in [
        (super::assets::stylesheet_path(), "text/css; charset=utf-8"),
        (super::assets::script_path(), "text/javascript; charset=utf-8"),
        ("/assets/icon.svg", "image/svg+xml"),
    ] {
        let asset = browser.get(path).await;
        assert_eq!((asset.status, asset.headers["content-type"].to_str().unwrap()), (200, media_type));
        assert_eq!(asset.headers["x-content-type-options"], "nosniff");
    }
    assert_eq!(browser.get("/assets/..%2fCargo.toml").await.status, 404);
}

#[tokio::test]
async fn hostile_texts_stay_texts() {
    let sidecar = Sidecar::start().await;
    let operation = format!("POST /{HOSTILE}");
    let running = sidecar.in_progress(9, &operation).await;
    sidecar.step(running, 0, "<b>step</b>", b"<script>alert(1)</script>").await;
    let id = sidecar.unknown(1, &operation).await;
    let browser = Browser::new(&sidecar);
    let action = format!("/keys/{id}/respond");
    let fields = [
        ("status", "201"),
        ("headers", "X-Note: <script>alert(1)</script>"),
        ("body", &format!("{HOSTILE}\u{202e}\u{1b}[2J")),
        ("reason", HOSTILE),
        ("actor", "<script>alert(1)</script>"),
    ];
    let preview = browser.submit(&action, &action, &[&fields[..], &[("step", "preview")]].concat()).await;
    assert_eq!(preview.status, 200, "{}", preview.text());
    let refused = browser.submit(&action, &action, &[&fields[1..], &[("status", HOSTILE)]].concat()).await;
    assert_eq!(refused.status, 400);
    let confirmed = browser.submit(&action, &action, &[&fields[..], &[("step", "confirm")]].concat()).await;
    location(&confirmed);
    let record = format!("/keys/{id}");
    let reveal = [("reason", HOSTILE), ("actor", HOSTILE)];
    let revealed = browser.submit(&record, &format!("{record}/response"), &reveal).await;
    assert_eq!(revealed.status, 200, "{}", revealed.text());
    // A mark that turns the text around, and an escape sequence.
    assert!(revealed.text().contains("\\u{202e}\\u{1b}[2J"), "{}", revealed.text());
    assert!(!revealed.text().contains(['\u{202e}', '\u{1b}']));
    let escaped = "&#60;script&#62;alert(1)&#60;/script&#62;";
    assert!(revealed.text().contains(escaped));
    let mut texts = vec![preview.text(), refused.text(), revealed.text()];
    let query = super::format::query_text(HOSTILE);
    for path in [
        "/",
        "/keys",
        "/stuck",
        "/audit",
        "/routes",
        &record,
        &format!("/keys/{}", running.0),
        &format!("/keys?operation={query}&caller={query}"),
        &format!("/keys?state={query}"),
        &format!("/routes?request={query}"),
        &format!("/keys/{query}"),
        &format!("/{query}"),
        &format!("/keys/{id}/{query}"),
        &format!("/keys/{id}?done={query}"),
        &format!("/login?next={query}"),
    ] {
        let page = browser.get(path).await;
        texts.push(page.text());
    }
    for path in ["/playground", "/keys/search"] {
        let fields =
            [("q", HOSTILE), ("path", HOSTILE), ("method", HOSTILE), ("headers", HOSTILE), ("body", HOSTILE)];
        texts.push(browser.submit("/playground", path, &fields).await.text());
    }
    for text in texts {
        for markup in ["<script>", "<img src=x", "<b>step", "</textarea><script", "49"] {
            let is_there = text.contains(markup) && (markup != "49" || text.contains("\"49"));
            assert!(!is_there, "{markup} in {text}");
        }
    }
}

#[tokio::test]
async fn a_get_changes_nothing() {
    let sidecar = Sidecar::start().await;
    let id = sidecar.unknown(1, "POST /orders").await;
    let browser = Browser::new(&sidecar);
    for (path, status) in [
        (format!("/keys/{id}/free?step=confirm&reason=x&actor=x&seen=1"), 200),
        (format!("/keys/{id}/park?step=confirm&reason=x"), 409),
        (format!("/keys/{id}/response?reason=x"), 405),
        ("/keys/search?q=x".to_owned(), 405),
        ("/logout".to_owned(), 405),
    ] {
        let page = browser.get(&path).await;
        assert_eq!(page.status, status, "{path}: {}", page.text());
        assert!(!page.text().contains("Nothing has changed yet"));
    }
    assert_eq!(state(&sidecar, id).await, "unknown");
    assert!(browser.get("/audit").await.text().contains("No operator has changed a record"));
}

#[tokio::test]
async fn pages_of_other_sites_can_neither_change_nor_read() {
    let sidecar = Sidecar::start().await;
    let id = sidecar.unknown(1, "POST /orders").await;
    let mut browser = Browser::new(&sidecar);
    let path = format!("/keys/{id}/free");
    let text = browser.get(&path).await.text();
    let (token, seen) = (value_of(&text, "form_token").unwrap(), value_of(&text, "seen").unwrap());
    assert_eq!(token.len(), 64);
    let form = |token| [("form_token", token), ("seen", seen.as_str()), ("step", "confirm"), ("reason", "x")];
    let (own, half, zeros) = (browser.origin(), &token[..63], "0".repeat(64));
    for (token, origin, status) in [
        (token.as_str(), Some("https://evil.example"), 403),
        (&token, Some("null"), 403),
        (&token, Some("http://127.0.0.1:1"), 403),
        (&token, None, 403),
        ("", Some(own.as_str()), 403),
        (half, Some(&own), 403),
        (&zeros, Some(&own), 403),
    ] {
        let response = browser.send_form(&path, &form(token), origin).await;
        assert_eq!(response.status, status, "{origin:?} {token}: {}", response.text());
        assert_eq!(state(&sidecar, id).await, "unknown");
    }
    // A form without a preflight can have these types, too.
    for media_type in ["text/plain", "multipart/form-data; boundary=x", "application/json"] {
        let request = browser.builder("POST", &path).header(header::ORIGIN, &own);
        let body = format!("form_token={token}&seen={seen}&step=confirm&reason=x");
        let request = request.header(header::CONTENT_TYPE, media_type).body(body.into()).unwrap();
        assert_eq!(sidecar.send(request).await.status, 400, "{media_type}");
    }
    // A fetch shows its origin in another field.
    let request = browser.builder("POST", &path).header("sec-fetch-site", "cross-site");
    let request = request.header(header::CONTENT_TYPE, "application/x-www-form-urlencoded");
    let body = format!("form_token={token}&seen={seen}&step=confirm&reason=x");
    assert_eq!(sidecar.send(request.body(body.into()).unwrap()).await.status, 403);
    assert_eq!(state(&sidecar, id).await, "unknown");

    // A page of another site may link here, but must not make this program read its store for a picture or a frame.
    for (mode, dest, status) in
        [("navigate", "document", 200), ("navigate", "iframe", 403), ("no-cors", "image", 403)]
    {
        let request = browser.builder("GET", "/keys?operation=zz").header("sec-fetch-site", "cross-site");
        let request = request.header("sec-fetch-mode", mode).header("sec-fetch-dest", dest);
        assert_eq!(
            sidecar.send(request.body(String::new().into()).unwrap()).await.status,
            status,
            "{mode} {dest}"
        );
    }
    let request = browser.builder("GET", "/keys").header("sec-fetch-site", "same-site");
    assert_eq!(sidecar.send(request.body(String::new().into()).unwrap()).await.status, 403);

    // A name of another site that resolves to this machine.
    browser.host = "evil.example".to_owned();
    for path in PAGES {
        let page = browser.get(path).await;
        assert_eq!(page.status, 403, "{path}");
        assert!(!page.text().contains("form_token"), "{path}");
    }
    let response = browser.send_form(&path, &form(&token), Some("http://evil.example")).await;
    assert_eq!(response.status, 403);

    browser.host = sidecar.address.to_string();
    let response = browser.send_form(&path, &form(&token), Some(&own)).await;
    assert_eq!(location(&response), format!("/keys/{id}?done=free"));
    assert_eq!(state(&sidecar, id).await, "released");
}

#[tokio::test]
async fn an_operator_sees_what_a_client_will_get_and_confirms_it() {
    let sidecar = Sidecar::start().await;
    let id = sidecar.unknown(1, "POST /orders").await;
    let browser = Browser::new(&sidecar);
    let page = browser.get(&format!("/keys/{id}")).await.text();
    for text in
        ["Find out if it took effect", "500 outcome-unknown", "It happened: give a response", "First claim"]
    {
        assert!(page.contains(text), "{text} in {page}");
    }
    let path = format!("/keys/{id}/respond");
    for (fields, error) in [
        (&[("status", "201")][..], "reason: "),
        (&[("status", "x"), ("reason", "r")], "status: &#34;x&#34; is not a status"),
        (&[("status", "700"), ("reason", "r")], "status: it must be from 200 to 599"),
        (&[("status", "204"), ("reason", "r"), ("body", "x")], "a response with the status 204"),
        (&[("status", "201"), ("reason", "r"), ("headers", "no colon")], "has no colon"),
        (&[("status", "201"), ("reason", "r"), ("headers", "Connection: close")], "headers: "),
    ] {
        let response = browser.submit(&path, &path, &[fields, &[("step", "confirm")]].concat()).await;
        assert_eq!(response.status, 400, "{fields:?}");
        assert!(response.text().contains(error), "{error} in {}", response.text());
    }
    let fields = [
        ("status", "201"),
        ("headers", "Content-Type: application/json"),
        ("body", "{\"a\":1}\r\n"),
        ("reason", "the bank says so"),
        ("actor", "anna"),
    ];
    let preview = browser.submit(&path, &path, &[&fields[..], &[("step", "preview")]].concat()).await.text();
    for text in
        ["Nothing has changed yet", "<b>201</b>", "content-type", "idempotent-replayed", "the bank says so"]
    {
        assert!(preview.to_lowercase().contains(&text.to_lowercase()), "{text} in {preview}");
    }
    assert_eq!(state(&sidecar, id).await, "unknown");
    // The form that was opened before another operator changed the record.
    let stale = value_of(&preview, "seen").unwrap();
    let token = value_of(&preview, "form_token").unwrap();

    let confirmed = browser.submit(&path, &path, &[&fields[..], &[("step", "confirm")]].concat()).await;
    let next = location(&confirmed).to_owned();
    assert_eq!(next, format!("/keys/{id}?done=respond"));
    let page = browser.get(&next).await.text();
    for text in [
        "by an operator",
        "anna changed it from unknown to completed",
        "Reason: the bank says so",
        "Block the key",
    ] {
        assert!(page.contains(text), "{text} in {page}");
    }
    let body = [&fields[..], &[("form_token", &token), ("seen", &stale), ("step", "confirm")]].concat();
    let refused = browser.send_form(&path, &body, Some(&browser.origin())).await;
    assert_eq!(refused.status, 409);
    assert!(refused.text().contains("has changed since you opened the form"), "{}", refused.text());

    // Every further action, from state to state.
    for (action, becomes) in [
        ("park", "unknown"),
        ("free", "released"),
        ("park", "unknown"),
        ("done", "tombstone"),
        ("free", "released"),
    ] {
        let path = format!("/keys/{id}/{action}");
        let response = browser.submit(&path, &path, &[("reason", "r"), ("step", "confirm")]).await;
        location(&response);
        assert_eq!(state(&sidecar, id).await, becomes);
    }
    let (running, _) = sidecar.in_progress(7, "POST /orders").await;
    let path = format!("/keys/{running}/free");
    assert!(browser.get(&path).await.text().contains("may be running"));
    location(&browser.submit(&path, &path, &[("reason", "the host is gone"), ("step", "confirm")]).await);
    assert_eq!(state(&sidecar, running).await, "released");
    assert!(browser.get("/audit").await.text().contains("the host is gone"));
}

#[tokio::test]
async fn a_stored_response_is_shown_for_a_reason_that_is_written_down() {
    let sidecar = Sidecar::start().await;
    sidecar.call("/tenant", &[("idempotency-key", "secret-key")], b"balance: 90817").await;
    let browser = Browser::new(&sidecar);
    let found = browser.submit("/keys", "/keys/search", &[("q", "secret-key")]).await;
    let record = location(&found).to_owned();
    assert!(record.starts_with("/keys/") && !record.contains("secret"), "{record}");
    let page = browser.get(&record).await.text();
    assert!(page.contains("completed") && page.contains("14 bytes"), "{page}");
    assert!(!page.contains("90817") && !page.contains("secret-key"), "{page}");
    let path = format!("{record}/response");
    let refused = browser.submit(&record, &path, &[("reason", " ")]).await;
    assert_eq!(refused.status, 400);
    assert!(!refused.text().contains("90817") && refused.text().contains("reason: "), "{}", refused.text());
    let shown = browser.submit(&record, &path, &[("reason", "ticket 12"), ("actor", "anna")]).await;
    assert!(shown.text().contains("balance: 90817"), "{}", shown.text());
    let audit = browser.get("/audit").await.text();
    assert!(audit.contains("ticket 12") && audit.contains("anna"), "{audit}");
    let none = browser.submit("/keys", "/keys/search", &[("q", "no such key")]).await;
    assert_eq!(none.status, 404);
    assert!(none.text().contains("The whole store was read"), "{}", none.text());
    let id = record.strip_prefix("/keys/").unwrap();
    for text in [id, &id[..8], &format!("urn:oncegate:record:{id}")] {
        assert_eq!(location(&browser.submit("/keys", "/keys/search", &[("q", text)]).await), record);
    }
    // A key may look like a record, and must not come into an address.
    let digest = "72a9".repeat(16);
    let search = [("q", digest.as_str())];
    let none = browser.submit("/keys", "/keys/search", &search).await;
    assert_eq!((none.status, none.headers.contains_key("location")), (404, false), "{}", none.text());
    sidecar.call("/tenant", &[("idempotency-key", digest.as_str())], b"1").await;
    let found = browser.submit("/keys", "/keys/search", &search).await;
    assert!(!location(&found).contains(&digest), "{}", location(&found));
    assert_eq!(browser.get(location(&found)).await.status, 200);
}

/// An open page goes on by itself when the store is back.
#[tokio::test]
async fn a_page_that_could_not_be_read_loads_itself_again() {
    let sidecar = Sidecar::start().await;
    let browser = Browser::new(&sidecar);
    sidecar.is_away.store(true, Ordering::SeqCst);
    for (path, again) in [
        ("/stuck", "/stuck"),
        ("/keys?state=unknown&asked=12", "/keys?state=unknown"),
        ("/keys?asked=12&operation=a%26b", "/keys?operation=a%26b"),
        ("/routes?asked=12", "/routes"),
    ] {
        let page = browser.get(path).await;
        assert_eq!(page.status, 503, "{path}");
        let text = page.text().replace("&#38;", "&");
        for part in [
            format!("hx-get=\"{again}\""),
            format!("content=\"15; url={again}\""),
            "out of reach.</p>".to_owned(),
        ] {
            assert!(text.contains(&part), "{part} in {text}");
        }
    }
    // A search has its ticket in its address, and is a list of the key's records without it.
    let tag = "0123456789abcdef";
    let again = browser.get(&format!("/keys/found?key_tag={tag}")).await;
    assert_eq!(location(&again), format!("/keys?key_tag={tag}"));
    // A form is not sent again.
    let id = "a".repeat(64);
    let text = browser.send_form("/keys/search", &[("q", id.as_str())], Some(&browser.origin())).await.text();
    assert!(!text.contains("hx-get") && !text.contains("http-equiv"), "{text}");
}

/// Each page would have to be read anew.
#[tokio::test]
async fn a_request_that_is_refused_voids_no_survey() {
    let sidecar = Sidecar::with_token(Some(TOKEN)).await;
    let id = sidecar.unknown(1, "POST /orders").await;
    let mut browser = Browser::new(&sidecar);
    let origin = browser.origin();
    let path = format!("/keys/{id}/free");
    for path in ["/x", "/v1/keys/x/park", "/v1/log-level", "/playground", &path] {
        browser.send_form(path, &[], Some(&origin)).await;
        browser.send_form(path, &[], Some("https://evil.example")).await;
    }
    browser.log_in(TOKEN).await;
    browser.send_form("/x", &[], Some(&origin)).await;
    browser.send_form(&path, &[("form_token", "x")], Some(&origin)).await;
    assert_eq!(sidecar.surveys.changed(), None);
    browser.submit(&path, &path, &[("reason", "the host is gone"), ("step", "confirm")]).await;
    assert!(sidecar.surveys.changed().is_some());
}

#[tokio::test]
async fn with_a_token_a_session_opens_the_pages() {
    let sidecar = Sidecar::with_token(Some(TOKEN)).await;
    let mut browser = Browser::new(&sidecar);
    for (path, to) in [("/", "/login?next=/"), ("/keys?state=unknown", "/login?next=/keys%3Fstate%3Dunknown")]
    {
        assert_eq!(location(&browser.get(path).await), to);
    }
    let denied = browser.log_in("0123456789abcdeX").await;
    assert_eq!(denied.status, 401);
    assert!(denied.text().contains("The token is wrong") && !denied.headers.contains_key("set-cookie"));
    // A name that shows as another one.
    let fields = [("token", TOKEN), ("actor", "an\u{202e}na")];
    let turned = browser.send_form("/login", &fields, Some(&browser.origin())).await;
    assert_eq!(turned.status, 400);
    assert!(
        turned.text().contains("change the direction of text") && !turned.headers.contains_key("set-cookie")
    );
    let foreign = browser.send_form("/login", &[("token", TOKEN)], Some("https://evil.example")).await;
    assert_eq!(foreign.status, 403);

    let response = browser.log_in(TOKEN).await;
    assert_eq!(location(&response), "/keys");
    let cookie = response.headers["set-cookie"].to_str().unwrap();
    assert!(cookie.starts_with("oncegate-session=") && !cookie.contains(TOKEN), "{cookie}");
    for part in ["; Path=/", "; HttpOnly", "; SameSite=Strict", "; Max-Age=28800"] {
        assert!(cookie.contains(part), "{part} in {cookie}");
    }
    assert!(!cookie.contains("Domain") && !cookie.contains("Secure"), "{cookie}");
    for path in PAGES {
        let page = browser.get(path).await;
        assert_eq!(page.status, 200, "{path}");
        assert!(page.text().contains("anna") && !page.text().contains(TOKEN), "{path}");
    }
    // The API takes no cookie, so no page of another site can use it.
    let api = browser.builder("GET", "/v1/keys").body(Default::default()).unwrap();
    assert_eq!(sidecar.send(api).await.status, 401);

    // A form with the token of another session.
    let mut other = Browser::new(&sidecar);
    other.log_in(TOKEN).await;
    let text = other.get("/keys").await.text();
    let token = value_of(&text, "form_token").unwrap();
    let refused = browser
        .send_form("/keys/search", &[("q", "x"), ("form_token", &token)], Some(&browser.origin()))
        .await;
    assert_eq!(refused.status, 403);

    // The cookie of this host and port is worth nothing under another one.
    browser.host = "127.0.0.1:1".to_owned();
    assert_eq!(location(&browser.get("/").await), "/login?next=/");
    browser.host = sidecar.address.to_string();
    assert_eq!(browser.get("/").await.status, 200);

    let stolen = browser.cookie.clone();
    let out = browser.submit("/", "/logout", &[]).await;
    assert_eq!(location(&out), "/login");
    browser.cookie = stolen;
    assert_eq!(location(&browser.get("/").await), "/login?next=/");

    // A part of a page that htmx asks for makes the browser load the whole page.
    let part = browser.builder("GET", "/").header("hx-request", "true").body(Default::default()).unwrap();
    let part = sidecar.send(part).await;
    assert_eq!((part.status, part.headers["hx-refresh"].to_str().unwrap()), (401, "true"));
}

#[tokio::test]
async fn over_tls_the_cookie_never_goes_without_it() {
    let sidecar = Sidecar::with_token(Some(TOKEN)).await;
    let mut browser = Browser { scheme: "https", ..Browser::new(&sidecar) };
    browser.host = "admin.example".to_owned();
    let response = browser.log_in(TOKEN).await;
    let cookie = response.headers["set-cookie"].to_str().unwrap().to_owned();
    assert!(cookie.starts_with("__Host-oncegate-session=") && cookie.ends_with("; Secure"), "{cookie}");
    assert_eq!(browser.get("/").await.status, 200);
    browser.cookie = browser.cookie.map(|cookie| cookie.replace("__Host-", ""));
    assert_eq!(browser.get("/").await.status, 303);
}

#[tokio::test]
async fn tries_to_log_in_are_limited() {
    let sidecar = Sidecar::with_token(Some(TOKEN)).await;
    let mut browser = Browser::new(&sidecar);
    for _ in 0..10 {
        assert_eq!(browser.log_in("wrong-wrong-wrong").await.status, 401);
    }
    let refused = browser.log_in("wrong-wrong-wrong").await;
    assert_eq!(refused.status, 429);
    let wait: u64 = refused.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=61).contains(&wait), "{wait}");
    assert!(!refused.headers.contains_key("set-cookie"));
    let right = browser.log_in(TOKEN).await;
    assert_eq!(right.status, 303, "wrong tokens of others do not lock an operator out");
    let large = "x".repeat(20_000);
    assert_eq!(browser.log_in(&large).await.status, 413);
}

#[tokio::test]
async fn programs_are_not_disturbed() {
    let sidecar = Sidecar::with_token(Some(TOKEN)).await;
    let ask = |path: &str, accept: &str, bearer: &str| {
        let mut request = Request::get(sidecar.url(path));
        if !accept.is_empty() {
            request = request.header(header::ACCEPT, accept);
        }
        if !bearer.is_empty() {
            request = request.header(header::AUTHORIZATION, format!("Bearer {bearer}"));
        }
        sidecar.send(request.body(Default::default()).unwrap())
    };
    for (path, accept, bearer, status, media_type) in [
        ("/", "", "", 401, "application/problem+json"),
        ("/", "application/json", "", 401, "application/problem+json"),
        ("/keys", "*/*", "0123456789abcdeX", 401, "application/problem+json"),
        ("/", "*/*", TOKEN, 200, "text/html; charset=utf-8"),
        ("/nowhere", "application/json", TOKEN, 404, "application/problem+json"),
        ("/nowhere", "text/html", TOKEN, 404, "text/html; charset=utf-8"),
        ("/v1/keys", "text/html", TOKEN, 200, "application/json"),
        ("/v1/keys", "text/html", "", 401, "application/problem+json"),
        ("/metrics", "text/html", TOKEN, 200, "text/plain; version=0.0.4; charset=utf-8"),
    ] {
        let response = ask(path, accept, bearer).await;
        assert_eq!(response.status, status, "{path} {accept}");
        assert_eq!(response.headers["content-type"], media_type, "{path} {accept}");
    }
}

#[tokio::test]
async fn lists_have_pages_in_the_order_of_time() {
    let sidecar = Sidecar::start().await;
    for number in 1..=120 {
        sidecar.in_progress(number, "POST /orders").await;
    }
    let browser = Browser::new(&sidecar);
    for (first, older) in [("/keys", ">Older<"), ("/keys?operation=POST%20/orders", ">Older<")] {
        let mut path = first.to_owned();
        let (mut seen, mut sizes) = (std::collections::BTreeSet::new(), Vec::new());
        loop {
            let text = browser.get(&path).await.text();
            let rows: Vec<_> =
                text.split("class=\"id\" href=\"/keys/").skip(1).map(|row| row[..64].to_owned()).collect();
            sizes.push(rows.len());
            seen.extend(rows);
            assert!(text.contains("120 in all"), "{text}");
            let Some((before, _)) = text.split_once(older) else { break };
            let href = before.rsplit_once("href=\"").unwrap().1.split_once('"').unwrap().0;
            path = href.replace("&#38;", "&");
        }
        assert_eq!((sizes, seen.len()), (vec![50, 50, 20], 120));
    }
    let text = browser.get("/keys?state=unknwon&operation=POST").await;
    assert_eq!(text.status, 400);
    let text = text.text();
    assert!(text.contains("did you mean `unknown`?") && text.contains("value=\"POST\""), "{text}");
}

#[tokio::test]
async fn what_is_stuck_comes_oldest_first_with_a_count_in_the_navigation() {
    let sidecar = Sidecar::start().await;
    let old = sidecar.unknown(200, "POST /old").await;
    let new = sidecar.unknown(1, "POST /new").await;
    let browser = Browser::new(&sidecar);
    let text = browser.get("/stuck").await.text();
    let place = |id: RecordId| text.find(&format!("href=\"/keys/{id}\"")).unwrap();
    assert!(place(old) < place(new), "{text}");
    assert!(text.contains("<span class=\"count\">2<"), "{text}");
}

#[tokio::test]
async fn routes_show_each_setting_with_its_source() {
    let sidecar = Sidecar::start().await;
    let browser = Browser::new(&sidecar);
    let page = browser.get("/routes?request=POST%20/orders").await.text();
    assert!(page.contains("POST /orders matches no route"), "{page}");
    let page = browser.get("/routes/default").await.text();
    assert!(page.contains("retention") && page.contains("profile ietf"), "{page}");
    for path in ["/routes/0", "/routes/x", "/routes/-1"] {
        assert_eq!(browser.get(path).await.status, 404, "{path}");
    }
    let result =
        browser.submit("/playground", "/playground", &[("method", "POST"), ("path", "/orders")]).await;
    assert!(result.text().contains("cannot connect to 127.0.0.1:1"), "{}", result.text());
    for (path, error) in [("orders", "path: "), ("http://evil.example/", "path: "), ("/a b", "path: ")] {
        let refused =
            browser.submit("/playground", "/playground", &[("method", "POST"), ("path", path)]).await;
        assert_eq!(refused.status, 400, "{path}");
        assert!(refused.text().contains(error));
    }
}

#[tokio::test]
async fn records_that_cannot_be_read_are_no_empty_store() {
    let sidecar = Sidecar::start().await;
    let browser = Browser::new(&sidecar);
    for (path, text) in [("/keys", "No key has been used yet"), ("/stuck", "Nothing is stuck")] {
        let page = browser.get(path).await.text();
        assert!(page.contains(text) && !page.contains("cannot be read"), "{page}");
    }
    for number in 1..=103 {
        let id = sidecar.unknown(number, "POST /pay").await;
        sidecar.unreadable.lock().unwrap().push(id);
    }
    for path in ["/keys", "/stuck"] {
        let page = browser.get(path).await.text();
        assert!(page.contains("At least 103 records cannot be read"), "{page}");
        assert!(page.contains("The first 100 are:") && page.contains("keys ls --unreadable"), "{page}");
        assert!(!page.contains("No key has been used yet") && !page.contains("Nothing is stuck"), "{page}");
    }
    sidecar.call("/tenant", &[("idempotency-key", "a-key")], b"balance: 1").await;
    let found = browser.submit("/keys", "/keys/search", &[("q", "a-key")]).await;
    let record = location(&found).strip_prefix("/keys/").and_then(RecordId::from_hex).unwrap();
    sidecar.unreadable.lock().unwrap().push(record);
    let none = browser.submit("/keys", "/keys/search", &[("q", "a-key")]).await.text();
    assert!(none.contains("A record cannot be read, and it may be that of this key"), "{none}");
    assert!(!none.contains("would execute again"), "{none}");
}

#[tokio::test]
async fn a_search_by_the_first_digits_answers_before_the_store_does() {
    let sidecar = Sidecar::start().await;
    let browser = Browser::new(&sidecar);
    let id = sidecar.unknown(0xab, "POST /pay").await;
    let token = value_of(&browser.get("/misuse").await.text(), "form_token").unwrap();
    let search = async |text: &str| {
        let fields = [("form_token", token.as_str()), ("q", text)];
        browser.send_form("/keys/search", &fields, Some(&browser.origin())).await
    };
    for (text, found) in [("ababab", format!("/keys/{id}")), ("cdcdcd", String::new())] {
        sidecar.is_frozen.store(true, std::sync::atomic::Ordering::SeqCst);
        let answer = search(text).await;
        assert!(location(&answer).starts_with("/keys/found?key_tag="), "{}", answer.text());
        sidecar.is_frozen.store(false, std::sync::atomic::Ordering::SeqCst);
        let page = browser.get(location(&answer)).await;
        if found.is_empty() {
            assert_eq!(page.status, 404, "{}", page.text());
        } else {
            assert_eq!(location(&page), found);
        }
    }
}
