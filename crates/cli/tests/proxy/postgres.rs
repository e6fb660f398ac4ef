//! Several sidecars that keep their records in one PostgreSQL database.

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use oncegate_servers::{PostgresOptions as ServerOptions, PostgresServer};
use oncegate_testkit::until;
use rustix::process::Signal;

use crate::operations::admin;
use crate::support::{Service, Sidecar, ask, request, sidecar};
use crate::{KEY, OK};

fn oncegate(args: &[&str], url: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    let service = ("ONCEGATE_SERVICE", "tests");
    command.args(args).env_clear().envs([("ONCEGATE_STORE", url), service]).output().unwrap()
}

/// The result of a command: true for success, and its output. Asserts that the output never contains the password.
fn said(server: &PostgresServer, output: &Output) -> (bool, String) {
    let text = [&output.stdout[..], &output.stderr].concat();
    let text = String::from_utf8(text).unwrap();
    assert!(!text.contains(server.password()), "{text}");
    (output.status.success(), text)
}

#[tokio::test(flavor = "multi_thread")]
async fn two_sidecars_on_one_database_share_their_keys() {
    let mut server = tokio::task::spawn_blocking(|| PostgresServer::start().unwrap()).await.unwrap();
    let url = server.url();
    let run = |args: &[&str]| said(&server, &oncegate(args, &url));

    // A database without the schema is refused with the command that creates it.
    let check = ["check", "--to=http://127.0.0.1:9"];
    let (ok, text) =
        run(&["proxy", "--to=http://127.0.0.1:9", "--listen=127.0.0.1:0", "--admin=127.0.0.1:0"]);
    assert!(!ok && text.contains("oncegate schema apply postgres"), "{text}");
    let (ok, text) = run(&check);
    assert!(!ok && text.contains("error store postgres://127.0.0.1:"), "{text}");
    assert!(!run(&["schema", "status", "postgres"]).0);
    let (ok, text) = run(&["schema", "apply", "postgres"]);
    assert!(ok && text.contains("now has version 1"), "{text}");
    let (ok, text) = run(&["schema", "apply", "postgres"]);
    assert!(ok && text.contains("has version 1 already"), "{text}");
    assert!(run(&["schema", "status", "postgres"]).0);
    let (ok, text) = run(&check);
    assert!(ok && text.contains("can be used"), "{text}");
    assert!(
        text.contains("ok    service name tests: sidecars with this name on the same store share keys"),
        "{text}"
    );
    let (ok, text) = run(&["schema", "print", "postgres"]);
    assert!(ok && text.contains("CREATE OR REPLACE FUNCTION oncegate.claim("), "{text}");
    let (ok, text) = run(&["schema", "print", "redis", "claim"]);
    assert!(ok && text.starts_with("#!lua\n") && text.contains("claim: requests permission"), "{text}");
    let (ok, text) = run(&["schema", "print", "redis", "clame"]);
    assert!(!ok && text.contains("there is no script \"clame\"; the scripts are claim, "), "{text}");

    let service = Service::new().await.answers(OK);
    let to = format!("http://{}", service.address);
    let start = async || {
        let mut command = sidecar(&to);
        command.env("ONCEGATE_STORE", &url).env("ONCEGATE_LOG", "trace");
        Sidecar::run(&mut command).await
    };
    let (mut first, second) = (start().await, start().await);
    let asked = request("POST", "/orders", &[KEY], "{}");
    let response = first.ask(&asked).await;
    assert_eq!(response.has_status(200).text(), "ok");
    assert!(second.ask(&asked).await.has_status(200).is_replay());
    second.ask(&request("POST", "/orders", &[KEY], "{\"other\":1}")).await.is_problem(422, "key-reused");

    // A sidecar that loses its database refuses requests, and continues when the database is back.
    let other = request("POST", "/orders", &["Idempotency-Key: intent-2"], "{}");
    let mut server = tokio::task::spawn_blocking(move || {
        server.stop_immediately().unwrap();
        server
    })
    .await
    .unwrap();
    second.ask(&other).await.is_problem(503, "store-unavailable");
    assert_eq!(service.requests(), 1);
    let server = tokio::task::spawn_blocking(move || {
        server.start_again().unwrap();
        server
    })
    .await
    .unwrap();
    // The claim of the refused request is taken back first.
    until("the request is executed", async || second.ask(&other).await.status() == 200).await;
    // The other sidecar probes its store once a second, and may refuse a request for as long as a probe is slow.
    until("the other sidecar has its store again, and replays", async || {
        let response = first.ask(&other).await;
        response.status() == 200 && response.is_replay()
    })
    .await;
    assert_eq!(service.requests(), 2);

    first.process.signal(Signal::TERM);
    let line = first.process.output().await.join("\n");
    assert!(line.contains("store postgres://…@127.0.0.1:"), "{line}");
    let logged = first.process.errors().await;
    assert!(logged.contains("postgres://…@") && !logged.contains(server.password()), "{logged}");
}

/// A database whose functions were created under a search path that contained an operator of another role.
#[tokio::test(flavor = "multi_thread")]
async fn a_schema_bound_to_objects_of_other_roles_is_reported_and_repaired() {
    let server = tokio::task::spawn_blocking(|| PostgresServer::start().unwrap()).await.unwrap();
    let url = server.url();
    let run = |args: &[&str]| said(&server, &oncegate(args, &url));
    let sql = |sql: &str| server.sql(sql).unwrap();
    assert!(run(&["schema", "apply", "postgres"]).0);
    sql("CREATE FUNCTION public.product(numeric, integer) RETURNS numeric LANGUAGE sql \
            AS 'SELECT $1 OPERATOR(pg_catalog.*) $2::numeric'; \
         CREATE OPERATOR public.* (LEFTARG = numeric, RIGHTARG = integer, FUNCTION = public.product); \
         CREATE OR REPLACE FUNCTION oncegate.now_ms() RETURNS bigint LANGUAGE sql VOLATILE PARALLEL SAFE \
            RETURN floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint");
    let binding = "function oncegate.now_ms() uses operator public.*(numeric,integer)";
    let check = ["check", "--to=http://127.0.0.1:9"];
    for command in [&check[..], &["schema", "status", "postgres"]] {
        let (ok, text) = run(command);
        assert!(!ok && text.contains(binding) && text.contains("oncegate schema apply postgres"), "{text}");
    }
    let (ok, text) = run(&["schema", "apply", "postgres"]);
    assert!(
        ok && text.contains("has version 1 already") && text.contains(&format!("repaired: {binding}")),
        "{text}"
    );
    for command in [&check[..], &["schema", "status", "postgres"]] {
        let (ok, text) = run(command);
        assert!(ok, "{text}");
    }
}

/// Lists do not read records one by one: a database whose listing shows nothing has complete lists.
#[tokio::test(flavor = "multi_thread")]
async fn lists_of_many_records_are_complete() {
    const RECORDS: u64 = 20_000;
    let server = tokio::task::spawn_blocking(|| PostgresServer::start().unwrap()).await.unwrap();
    let url = server.url();
    let (ok, text) = said(&server, &oncegate(&["schema", "apply", "postgres"], &url));
    assert!(ok, "{text}");
    // The newest records have the smallest numbers. One in a thousand waits for an operator.
    let fill = format!(
        "INSERT INTO oncegate.records (id, state, fingerprint, token, attempts, caller, operation, created_at, changed_at, \
        expires_at, purge_at, response) \
        SELECT sha256(int8send(n)), CASE WHEN n % 1000 = 0 THEN 'unknown' ELSE 'completed' END, '\\x01'::bytea || sha256(''), 1, \
        1, '\\x0000000000000000', CASE WHEN n % 4 = 0 THEN 'POST /refunds' ELSE 'POST /payments/' || n % 100 END, c - n * 100, \
        c - n * 100, c + 86400000, c + 86400000, CASE WHEN n % 1000 > 0 THEN paid END \
        FROM generate_series(1, {RECORDS}) AS n, (SELECT oncegate.now_ms() AS c) AS k, \
        (SELECT oncegate.response(201, ARRAY['content-type'], ARRAY['text/plain'], convert_to(repeat('paid', 75), 'UTF8')) \
            AS paid) AS p; ANALYZE oncegate.records"
    );
    server.sql(&fill).unwrap();
    // No time bounds this test: what reads the records one by one finds none.
    let arguments = "text, bytea, bytea, text, bigint, bytea, integer";
    server.sql(&format!("ALTER FUNCTION oncegate.list({arguments}) RENAME TO list_of_records")).unwrap();
    let columns = "id bytea, state text, fingerprint bytea, token bigint, attempts bigint, attempt bytea, lease_until bigint, \
        after_abandoned boolean, caller bytea, key_tag bytea, operation text, created_at bigint, changed_at bigint, \
        expires_at bigint, response bytea, step_names text[], step_results bytea[], by_operator boolean, clock bigint";
    let none = format!(
        "CREATE FUNCTION oncegate.list({arguments}) RETURNS TABLE ({columns}) LANGUAGE sql AS \
        $$ SELECT * FROM oncegate.list_of_records($1, $2, $3, $4, $5, $6, $7) WHERE false $$"
    );
    server.sql(&none).unwrap();
    let ids = server
        .sql(&format!(
            "SELECT encode(sha256(int8send(n)), 'hex') FROM unnest(ARRAY[1, 2, 60, {RECORDS}]) AS n"
        ))
        .unwrap();
    let [newest, second, sixtieth, oldest] = ids.lines().collect::<Vec<_>>()[..] else { panic!("{ids}") };
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let sidecar = with_routes(service.address, &url, directory.path()).await;

    let by_record = admin(&sidecar, "/v1/keys?order=record").await.has_status(200).text().to_owned();
    assert!(by_record.contains("\"records\":[]"), "{by_record}");
    let listed = whole(&sidecar, "/v1/keys?order=newest&limit=2").await;
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert_eq!((&listed["complete"], &listed["total"]), (&true.into(), &RECORDS.into()), "{listed}");
    assert_eq!(listed["totals"], serde_json::json!({"completed": RECORDS - 20, "unknown": 20}));
    let records: Vec<_> =
        listed["records"].as_array().unwrap().iter().map(|record| &record["record"]).collect();
    assert_eq!(records, [newest, second]);
    assert_eq!(listed["records"][0]["response"], serde_json::json!({"status": 201, "body_bytes": 300}));

    let keys = whole(&sidecar, "/keys").await;
    assert!(keys.contains(newest) && !keys.contains(sixtieth), "{keys}");
    assert!(keys.contains("20\u{202f}000 in all") && keys.contains("19\u{202f}980"), "{keys}");
    let (_, rest) = keys.split_once("href=\"/keys?after=").unwrap();
    let next = whole(&sidecar, &format!("/keys?after={}", rest.split('"').next().unwrap())).await;
    assert!(next.contains(sixtieth) && !next.contains(newest), "{next}");
    let stuck = whole(&sidecar, "/stuck").await;
    assert!(stuck.contains(oldest) && stuck.contains("20 in all"), "{stuck}");
    let routes = whole(&sidecar, "/routes").await;
    for count in ["15\u{202f}000", "4\u{202f}980", "20"] {
        assert!(routes.contains(&format!("</span> {count}</span>")), "{count} in {routes}");
    }
}

/// A sidecar with two routes.
pub(crate) async fn with_routes(service: SocketAddr, store: &str, directory: &Path) -> Sidecar {
    let file = directory.join("oncegate.toml");
    let routes = "[[route]]\npath = \"/payments/{payment}\"\n[[route]]\npath = \"/refunds\"\n";
    std::fs::write(&file, routes).unwrap();
    let mut command = sidecar(&format!("http://{service}"));
    command.env("ONCEGATE_STORE", store).arg(format!("--config={}", file.display()));
    Sidecar::run(&mut command).await
}

/// A page, or a list of the API, of the whole store. On a busy machine, the time for a page may not be enough for it. While a
/// page waits for its records, it is loaded again as a browser does.
pub(crate) async fn whole(sidecar: &Sidecar, path: &str) -> String {
    let deadline = Instant::now() + Duration::from_secs(180);
    let mut at = path.to_owned();
    loop {
        let text = admin(sidecar, &at).await.has_status(200).text().to_owned();
        if let Some(next) = next_load(&text) {
            at = next;
        } else if text.contains("could not be read to its end") || text.contains("\"complete\":false") {
            at = path.to_owned();
        } else {
            return text;
        }
        assert!(Instant::now() < deadline, "{text}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The address from which a page that waits for its records loads them.
pub(crate) fn next_load(page: &str) -> Option<String> {
    let (_, rest) = page.split_once("aria-busy=\"true\" hx-get=\"")?;
    Some(rest.split_once('"')?.0.replace("&#38;", "&"))
}

/// The words of a page that does not show the present.
const AS_OF: &str = "The numbers and the choice of the records are of";

/// A page of a store that takes its time shows the last survey, and says so. A change by an operator is on the next page.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_a_slow_store_names_its_time_and_shows_changes_by_operators() {
    let server = tokio::task::spawn_blocking(|| PostgresServer::start().unwrap()).await.unwrap();
    let url = server.url();
    let (ok, text) = said(&server, &oncegate(&["schema", "apply", "postgres"], &url));
    assert!(ok, "{text}");
    let arguments = "text[], bytea, bytea, text, bigint, bigint, bigint, bytea, text, bytea, bytea, boolean, boolean, bigint, \
        bytea, integer";
    server.sql(&format!("ALTER FUNCTION oncegate.survey({arguments}) RENAME TO fast_survey")).unwrap();
    let numbers: Vec<_> = (1..=16).map(|number| format!("${number}")).collect();
    let slow = format!(
        "CREATE FUNCTION oncegate.survey({arguments}) RETURNS TABLE (id bytea, changed_at bigint, state text, operation text, \
        records bigint, clock bigint) LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.1); \
        RETURN QUERY SELECT * FROM oncegate.fast_survey({}); END $$",
        numbers.join(", ")
    );
    server.sql(&slow).unwrap();
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let sidecar = with_routes(service.address, &url, directory.path()).await;
    let pay = async |number: u32| {
        let key = format!("Idempotency-Key: \"payment-{number}\"");
        sidecar.ask(&request("POST", "/payments/1", &[&key], "{}")).await.has_status(200);
    };
    let total = |text: &str| {
        let (before, _) = text.split_once(" in all").unwrap();
        before.rsplit([' ', '>']).next().unwrap().to_owned()
    };

    pay(1).await;
    let keys = whole(&sidecar, "/keys").await;
    assert!(total(&keys) == "1", "{keys}");
    pay(2).await;
    let keys = whole(&sidecar, "/keys").await;
    assert!(keys.contains(AS_OF) && total(&keys) == "1", "{keys}");
    // The API, and the records of one key, are those of this moment.
    let listed: serde_json::Value =
        serde_json::from_str(&whole(&sidecar, "/v1/keys?order=newest").await).unwrap();
    assert_eq!(listed["total"], 2);
    let tag = listed["records"][0]["key_tag"].as_str().unwrap();
    let of_key = format!("/keys?key_tag={tag}");
    assert_eq!(total(&whole(&sidecar, &of_key).await), "1");
    assert!(next_load(admin(&sidecar, &of_key).await.text()).is_some(), "an earlier survey does not count");
    // The page is renewed, and only because someone looks.
    let deadline = Instant::now() + Duration::from_secs(180);
    let mut was_renewing = false;
    loop {
        let keys = whole(&sidecar, "/keys").await;
        if total(&keys) == "2" {
            break;
        }
        was_renewing |= keys.contains("hx-get=\"/keys\" hx-trigger=\"load delay:1s\"");
        assert!(keys.contains(AS_OF) && Instant::now() < deadline, "{keys}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(was_renewing);

    // An operator settles a record, and the next pages show it.
    server.sql("UPDATE oncegate.records SET state = 'unknown', response = NULL").unwrap();
    let record = listed["records"][0]["record"].as_str().unwrap();
    whole(&sidecar, "/stuck").await;
    whole(&sidecar, "/routes").await;
    let body = r#"{"reason":"the service has no such payment","actor":"anna"}"#;
    let path = format!("/v1/keys/{record}/release");
    let answer = ask(
        sidecar.admin,
        &request("POST", &path, &["Content-Type: application/json"], body)
            .replace("orders.test", "localhost"),
    )
    .await;
    answer.has_status(200);
    let stuck = whole(&sidecar, "/stuck").await;
    assert!(!stuck.contains(record) && total(&stuck) == "1", "{stuck}");
    let routes = whole(&sidecar, "/routes").await;
    assert!(routes.contains("released</span> 1</span>"), "{routes}");
}

/// No time bounds this test: while the surveys wait for a lock, each page answers.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_answers_before_the_store_is_read_and_fills_itself_in() {
    let server = tokio::task::spawn_blocking(|| PostgresServer::start().unwrap()).await.unwrap();
    let url = server.url();
    let (ok, text) = said(&server, &oncegate(&["schema", "apply", "postgres"], &url));
    assert!(ok, "{text}");
    let arguments = "text[], bytea, bytea, text, bigint, bigint, bigint, bytea, text, bytea, bytea, boolean, boolean, bigint, \
        bytea, integer";
    server.sql(&format!("ALTER FUNCTION oncegate.survey({arguments}) RENAME TO free_survey")).unwrap();
    let numbers: Vec<_> = (1..=16).map(|number| format!("${number}")).collect();
    let locked = format!(
        "CREATE FUNCTION oncegate.survey({arguments}) RETURNS TABLE (id bytea, changed_at bigint, state text, operation text, \
        records bigint, clock bigint) LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock_shared(7); \
        IF $4 = 'FAIL' THEN RAISE EXCEPTION 'canceling statement due to statement timeout' USING ERRCODE = '57014'; END IF; \
        RETURN QUERY SELECT * FROM oncegate.free_survey({}); END $$",
        numbers.join(", ")
    );
    server.sql(&locked).unwrap();
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let sidecar = with_routes(service.address, &url, directory.path()).await;
    for number in 1..=2 {
        let key = format!("Idempotency-Key: \"payment-{number}\"");
        sidecar.ask(&request("POST", "/payments/1", &[&key], "{}")).await.has_status(200);
    }
    server.sql("UPDATE oncegate.records SET state = 'unknown', response = NULL").unwrap();
    let listed: serde_json::Value =
        serde_json::from_str(&whole(&sidecar, "/v1/keys?order=newest").await).unwrap();
    let record = listed["records"][1]["record"].as_str().unwrap();
    assert!(whole(&sidecar, "/stuck").await.contains(record));

    let mut session = server.session().unwrap();
    session.run("SELECT pg_advisory_lock(7);").unwrap();
    // An operator's change: no page shows the record as it was.
    let body = r#"{"reason":"the service has no such payment","actor":"anna"}"#;
    let release =
        request("POST", &format!("/v1/keys/{record}/release"), &["Content-Type: application/json"], body);
    ask(sidecar.admin, &release.replace("orders.test", "localhost")).await.has_status(200);
    let mut waiting = Vec::new();
    for (path, shown) in [
        ("/keys", "Operation begins with"),
        ("/keys?state=unknown&operation=POST", "value=\"POST\""),
        ("/keys?operation=FAIL", "value=\"FAIL\""),
        ("/stuck", "whose outcome is not known"),
        ("/routes?request=POST%20/refunds", "/payments/{payment}"),
    ] {
        let answer = admin(&sidecar, path).await;
        let page = answer.has_status(200).text();
        assert!(page.contains(shown) && page.contains("The records are being counted"), "{path}: {page}");
        for wrong in [" in all", "No key has been used", "Nothing is stuck", record, AS_OF, ">none<"] {
            assert!(!page.contains(wrong), "{path}: {wrong} in {page}");
        }
        let next = next_load(page).unwrap();
        let escaped = next.replace('&', "&#38;");
        let without_script =
            format!("<noscript><meta http-equiv=\"refresh\" content=\"1; url={escaped}\"></noscript>");
        assert!(page.contains(&without_script), "{without_script} in {page}");
        assert!(!page.contains("javascript:"));
        waiting.push(next);
    }
    // The part that loads itself again changes nothing meanwhile.
    for path in &waiting {
        let part = request("GET", path, &["HX-Request: true", "Connection: close"], "");
        ask(sidecar.admin, &part.replace("orders.test", "localhost")).await.has_status(204);
    }
    // A search says that it goes on, and its address has no key.
    let overview = admin(&sidecar, "/").await.has_status(200).text().to_owned();
    let (_, token) = overview.split_once("name=\"form_token\" value=\"").unwrap();
    let token = &token[..64];
    let search = async |text: &str| {
        let fields = ["Content-Type: application/x-www-form-urlencoded", "Sec-Fetch-Site: same-origin"];
        let body = format!("q={text}&form_token={token}");
        let form = request("POST", "/keys/search", &fields, &body).replace("orders.test", "localhost");
        ask(sidecar.admin, &form).await.has_status(303).get("location").unwrap().to_owned()
    };
    let (found, missing) = (search("payment-2").await, search("no-such-key").await);
    for address in [&found, &missing] {
        assert!(address.starts_with("/keys/found?key_tag=") && !address.contains("payment-2"), "{address}");
        let page = admin(&sidecar, address).await.has_status(200).text().to_owned();
        assert!(next_load(&page).is_some() && page.contains("The store is being searched"), "{page}");
    }
    // The API waits for the answer.
    let mut api = Box::pin(admin(&sidecar, "/v1/keys?order=newest"));
    assert!(tokio::time::timeout(Duration::from_millis(300), &mut api).await.is_err());

    session.run("SELECT pg_advisory_unlock(7);").unwrap();
    api.await.has_status(200);
    assert!(whole(&sidecar, &waiting[0]).await.contains("2 in all"));
    let unknown = whole(&sidecar, &waiting[1]).await;
    assert!(unknown.contains("1 in all") && !unknown.contains(record), "{unknown}");
    // The failure is on the page, in the part that is replaced, and stays there.
    let failed = async |path: &str| {
        let answer = admin(&sidecar, path).await;
        let text = answer.text();
        assert!(answer.status() == 503 || next_load(text).is_some(), "{text}");
        answer.status() == 503 && text.contains("statement timeout") && text.contains("id=\"live\"")
    };
    until("the failure is shown", async || failed(&waiting[2]).await).await;
    assert!(failed(&waiting[2]).await);
    assert!(whole(&sidecar, &waiting[3]).await.contains("1 in all"));
    assert!(whole(&sidecar, &waiting[4]).await.contains("released</span> 1</span>"));
    let result = async |address: &str| {
        let deadline = Instant::now() + Duration::from_secs(180);
        loop {
            let answer = admin(&sidecar, address).await;
            if answer.status() != 200 || next_load(answer.text()).is_none() {
                return answer;
            }
            assert!(Instant::now() < deadline, "{}", answer.text());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let answer = result(&found).await;
    let of_key = listed["records"][0]["record"].as_str().unwrap();
    assert_eq!(answer.has_status(303).get("location"), Some(&*format!("/keys/{of_key}")));
    let part = request("GET", &found, &["HX-Request: true", "Connection: close"], "");
    let part = ask(sidecar.admin, &part.replace("orders.test", "localhost")).await;
    assert_eq!(part.has_status(200).get("hx-redirect"), Some(&*format!("/keys/{of_key}")));
    let answer = result(&missing).await;
    assert!(answer.has_status(404).text().contains("The whole store was read"), "{}", answer.text());
}

/// The server ends each list, as it does with one that takes longer than the statement timeout. Requests with a key go on.
#[tokio::test(flavor = "multi_thread")]
async fn lists_that_the_server_does_not_finish_stop_no_request() {
    let server = tokio::task::spawn_blocking(|| PostgresServer::start().unwrap()).await.unwrap();
    let url = server.url();
    let (ok, text) = said(&server, &oncegate(&["schema", "apply", "postgres"], &url));
    assert!(ok, "{text}");
    let cancelled =
        "BEGIN RAISE EXCEPTION 'canceling statement due to statement timeout' USING ERRCODE = '57014'; END";
    for (name, arguments) in [
        (
            "survey",
            "text[], bytea, bytea, text, bigint, bigint, bigint, bytea, text, bytea, bytea, boolean, boolean, bigint, bytea, integer",
        ),
        ("list", "text, bytea, bytea, text, bigint, bytea, integer"),
        ("audit_trail", "bigint, integer"),
    ] {
        let result = server
            .sql(&format!("SELECT pg_get_function_result('oncegate.{name}({arguments})'::regprocedure)"));
        server
            .sql(&format!(
                "ALTER FUNCTION oncegate.{name}({arguments}) RENAME TO own_{name}; \
                CREATE FUNCTION oncegate.{name}({arguments}) RETURNS {} LANGUAGE plpgsql AS $$ {cancelled} $$",
                result.unwrap().trim()
            ))
            .unwrap();
    }
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let sidecar = with_routes(service.address, &url, directory.path()).await;
    for round in 0..10 {
        for path in ["/keys", "/stuck", "/routes", "/audit", "/v1/keys?order=newest", "/v1/keys?order=record"]
        {
            let mut answer = admin(&sidecar, path).await;
            while let Some(next) = next_load(answer.text()) {
                answer = admin(&sidecar, &next).await;
            }
            let text = answer.text();
            assert!(answer.status() == 503 && text.contains("statement timeout"), "{path}: {text}");
        }
        let key = format!("Idempotency-Key: \"payment-{round}\"");
        sidecar.ask(&request("POST", "/payments/1", &[&key], "{}")).await.has_status(200);
        let metrics = admin(&sidecar, "/metrics").await;
        for line in ["oncegate_breaker_openings_total 0\n", "oncegate_degraded 0\n"] {
            assert!(metrics.text().contains(line), "{round}: {}", metrics.text());
        }
    }
}

/// As with `psql`, the default is the user that runs the program.
#[tokio::test(flavor = "multi_thread")]
async fn a_url_without_a_user_means_the_user_that_runs_the_program() {
    let server = tokio::task::spawn_blocking(|| PostgresServer::start().unwrap()).await.unwrap();
    let name = Command::new("id").arg("-un").output().unwrap().stdout;
    let name = String::from_utf8(name).unwrap().trim().to_owned();
    server.sql(&format!("CREATE ROLE \"{name}\" SUPERUSER LOGIN PASSWORD 'os-user'")).unwrap();
    let (_, rest) = server.url().split_once('@').map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap();
    let run = |url: &str, variables: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command.args(["schema", "apply", "postgres"]).env_clear().env("ONCEGATE_STORE", url);
        let output = command.envs(variables.iter().copied()).output().unwrap();
        said(&server, &output)
    };
    let password = ("PGPASSWORD", "os-user");
    let (ok, text) = run(&format!("postgres://{rest}"), &[password]);
    assert!(ok && text.contains("postgres://127.0.0.1:"), "{text}");
    // An explicit user takes precedence.
    for (url, variable) in
        [(format!("postgres://{rest}"), Some("nobody-1")), (format!("postgres://nobody-1@{rest}"), None)]
    {
        let variables: Vec<_> = [password].into_iter().chain(variable.map(|name| ("PGUSER", name))).collect();
        let (ok, text) = run(&url, &variables);
        assert!(!ok && text.contains("\"nobody-1\"") && !text.contains("nobody-1@"), "{text}");
    }
}

/// A change of the server's settings at run time shows in the log once, in the metrics, in the readiness and on the dashboard.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_no_longer_flushes_commits_is_reported() {
    // Other servers of the tests do not flush.
    let server = tokio::task::spawn_blocking(|| {
        let mut options = ServerOptions::default();
        options.fsync = true;
        PostgresServer::start_with(options).unwrap()
    });
    let server = server.await.unwrap();
    let set = |value: &str| {
        server.sql(&format!("ALTER SYSTEM SET synchronous_commit = {value}")).unwrap();
        server.sql("SELECT pg_reload_conf()").unwrap();
    };
    let url = server.url();
    assert!(said(&server, &oncegate(&["schema", "apply", "postgres"], &url)).0);
    let service = Service::new().await.answers(OK);
    let mut command = sidecar(&format!("http://{}", service.address));
    command.env("ONCEGATE_STORE", &url);
    let mut sidecar = Sidecar::run(&mut command).await;
    let ready = async || admin(&sidecar, "/readyz").await.has_status(200).text().to_owned();
    let durability = async || {
        let metrics = admin(&sidecar, "/metrics").await.text().to_owned();
        let line = metrics.lines().find(|line| line.starts_with("oncegate_store_info")).unwrap().to_owned();
        line.split("durability=\"").nth(1).unwrap().split('"').next().unwrap().to_owned()
    };
    assert_eq!((durability().await, ready().await), ("synced".to_owned(), "ready\n".to_owned()));

    set("off");
    until("the readiness says so", async || {
        ready().await.contains("note: the server of the store keeps less")
    })
    .await;
    assert_eq!(durability().await, "buffered");
    let metrics = admin(&sidecar, "/metrics").await;
    assert!(
        metrics.text().contains("oncegate_store_advisory{name=\"less-durable\"} 1"),
        "{}",
        metrics.text()
    );
    let summary = admin(&sidecar, "/v1/summary").await;
    assert!(summary.text().contains("\"durability\":\"buffered\""), "{}", summary.text());
    let fields = ["Accept: text/html", "Connection: close"];
    let overview = request("GET", "/", &fields, "").replace("orders.test", &sidecar.admin.to_string());
    let overview = ask(sidecar.admin, &overview).await;
    assert!(overview.has_status(200).text().contains("buffered"), "{}", overview.text());

    set("on");
    until("it is as before", async || ready().await == "ready\n").await;
    assert_eq!(durability().await, "synced");
    sidecar.process.logs("the server flushes commits again").await;
    let warned = sidecar.process.error_lines("the server does not flush commits");
    assert_eq!(warned.len(), 1, "{warned:?}");
}
