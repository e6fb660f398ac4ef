//! Several sidecars that keep their records in one PostgreSQL database.

use std::process::{Command, Output};

use oncegate_servers::PostgresServer;
use oncegate_testkit::until;
use rustix::process::Signal;

use crate::support::{Service, Sidecar, request, sidecar};
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
    // The other sidecar probes its store once a second.
    until("the other sidecar has its store again", async || first.ask(&other).await.status() == 200).await;
    assert!(first.ask(&other).await.has_status(200).is_replay());
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
