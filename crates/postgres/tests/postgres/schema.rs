//! Installing and repairing the contract, and refusing databases of another version.

use oncegate_core::{Completion, ListQuery, Outcome, Store as _};
use oncegate_postgres::sqlx::Row as _;
use oncegate_postgres::{PostgresOpenError, PostgresOptions, PostgresStore, schema};
use oncegate_servers::PostgresServer;

use crate::support::{Database, claims, completes, id, renews, response, run, sqlstate, token, try_run};

#[tokio::test(flavor = "multi_thread")]
async fn programs_that_apply_the_contract_at_the_same_time_all_succeed() {
    let database = Database::empty().await;
    assert_eq!(schema::status(&database.options()).await.unwrap().found, None);
    let error = PostgresStore::open(database.options()).await.unwrap_err();
    assert!(matches!(error, PostgresOpenError::NoContract { found: None, .. }), "{error}");
    assert!(error.to_string().contains("oncegate schema apply postgres"), "{error}");
    let at_once = (0..4).map(|_| {
        let options = database.options();
        tokio::spawn(async move { schema::apply(&options).await })
    });
    for applied in at_once.collect::<Vec<_>>() {
        applied.await.unwrap().unwrap();
    }
    let status = schema::status(&database.options()).await.unwrap();
    assert_eq!((status.found, status.needed), (Some(schema::VERSION), schema::VERSION));
    PostgresStore::open(database.options()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_printed_sql_can_be_run_by_hand_repeatedly() {
    let database = Database::empty().await;
    let mut owner = database.connect().await;
    run(&mut owner, &schema::print()).await;
    let store = PostgresStore::open(database.options()).await.unwrap();
    store.apply(id(1), claims(1)).await.unwrap();
    run(&mut owner, &schema::print()).await;
    let outcome = store.apply(id(1), claims(2)).await.unwrap();
    assert!(matches!(outcome, Outcome::InProgress { .. }), "{outcome:?}");
    // Without a transaction, the search path would apply to one statement only.
    let body = schema::print()
        .replace("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;", "")
        .replace("\nCOMMIT;", "");
    for statement in [body.split_once("DO $$").unwrap().0, &body[body.find("DO $$").unwrap()..]] {
        if let Err(error) = try_run(&mut owner, statement).await {
            assert_eq!(sqlstate(&error), "25P01", "{error}");
            return;
        }
    }
    panic!("it ran outside of a transaction");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_refuses_an_older_and_a_newer_contract() {
    let database = Database::fresh().await;
    let mut owner = database.connect().await;
    run(&mut owner, "UPDATE oncegate.contract SET version = 0").await;
    let error = PostgresStore::open(database.options()).await.unwrap_err();
    assert!(matches!(error, PostgresOpenError::NoContract { found: Some(0), .. }), "{error}");
    assert!(error.to_string().contains("oncegate schema apply postgres"), "{error}");
    run(&mut owner, &format!("INSERT INTO oncegate.contract (version) VALUES ({})", schema::VERSION + 1))
        .await;
    let error = PostgresStore::open(database.options()).await.unwrap_err();
    let PostgresOpenError::NewerContract { found, known, .. } = &error else { panic!("{error}") };
    assert_eq!((*found, *known), (schema::VERSION + 1, schema::VERSION));
    assert!(error.to_string().contains("upgrade"), "{error}");
    assert!(matches!(schema::apply(&database.options()).await, Err(PostgresOpenError::NewerContract { .. })));
}

/// Every part of the schema, its dependencies, and its definition as the server stores it.
pub(crate) async fn bindings(database: &Database) -> Vec<String> {
    let sql = "SET search_path = pg_catalog; \
        WITH RECURSIVE parts AS ( \
            SELECT d.classid, d.objid FROM pg_depend AS d WHERE d.refclassid = 'pg_namespace'::regclass \
                AND d.refobjid = 'oncegate'::regnamespace \
            UNION SELECT d.classid, d.objid FROM pg_depend AS d JOIN parts AS p \
                ON d.refclassid = p.classid AND d.refobjid = p.objid \
            WHERE d.deptype IN ('a', 'i')) \
        SELECT l FROM ( \
            SELECT pg_describe_object(d.classid, d.objid, d.objsubid) || ' -> ' || \
                pg_describe_object(d.refclassid, d.refobjid, d.refobjsubid) || ' ' || d.deptype::text FROM pg_depend AS d \
                JOIN parts AS p ON p.classid = d.classid AND p.objid = d.objid \
            UNION ALL SELECT pg_get_functiondef(p.oid) FROM pg_proc AS p WHERE p.pronamespace = 'oncegate'::regnamespace \
            UNION ALL SELECT pg_get_expr(a.adbin, a.adrelid) FROM pg_attrdef AS a JOIN pg_class AS c ON c.oid = a.adrelid \
                WHERE c.relnamespace = 'oncegate'::regnamespace \
        ) AS u (l) WHERE l NOT LIKE '%pg_toast%' ORDER BY l COLLATE \"C\"";
    let rows = try_run(&mut database.connect().await, sql).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

async fn plant_decoys(database: &Database) {
    let mut attacker = database.connect().await;
    run(&mut attacker, include_str!("decoys.sql")).await;
    let text = schema::print();
    run(&mut attacker, &format!("INSERT INTO decoys.contract VALUES ($contract${text}$contract$)")).await;
    run(&mut attacker, "SET statement_timeout = '300s'").await;
    let planted = try_run(&mut attacker, "SELECT decoys.plant()").await.unwrap();
    let planted: i32 = planted[0].get(0);
    assert!(planted > 2000, "{planted} decoys");
    // They are found if the search path leads to them.
    run(&mut attacker, "SET search_path = public, pg_catalog").await;
    for called in ["SELECT octet_length('a'::text)", "SELECT 1.5 * 2", "SELECT 1 + 1"] {
        assert_eq!(sqlstate(&try_run(&mut attacker, called).await.unwrap_err()), "OG666", "{called}");
    }
}

/// A role that may create objects in `public` must not obtain the rights of the owner, of the role that applies the contract, or
/// of a store: neither while the SQL runs, nor through the objects that its functions are bound to afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn the_contract_is_bound_to_no_object_of_another_role() {
    let clean = Database::fresh().await;
    let clean = bindings(&clean).await;
    assert!(clean.iter().any(|line| line.starts_with("function oncegate.claim_many")), "{clean:#?}");
    for (path, by_hand) in [("\"$user\", public", false), ("public, pg_catalog", true)] {
        let database = Database::empty().await;
        plant_decoys(&database).await;
        let set = format!("ALTER DATABASE {} SET search_path = {path}", database.name);
        run(&mut database.connect().await, &set).await;
        for _ in ["the first time", "again"] {
            if by_hand {
                run(&mut database.connect().await, &schema::print()).await;
            } else {
                schema::apply(&database.options()).await.unwrap();
            }
        }
        let found = bindings(&database).await;
        let differ: Vec<_> = found.iter().filter(|line| !clean.contains(line)).collect();
        assert!(differ.is_empty() && found.len() == clean.len(), "{differ:#?}");
        assert_eq!(schema::status(&database.options()).await.unwrap().foreign_bindings, [""; 0]);

        // The statements of the store do not call them either, in its own sessions and behind a pooler.
        let pooler = PostgresOptions::from_url(&format!("{}?pooler=transaction", database.url())).unwrap();
        for (number, options) in [(1, database.options()), (2, pooler)] {
            let is_pooler = number == 2;
            if is_pooler && by_hand {
                continue; // nothing can be sent along with a session there; the path is the role's
            }
            let store = PostgresStore::open(options).await.unwrap();
            store.check().await.unwrap();
            let owner = token(&store.apply(id(number), claims(1)).await.unwrap());
            store.apply(id(number), renews(owner)).await.unwrap();
            let paid = Completion::Replayable(response(b"paid"));
            assert_eq!(store.apply(id(number), completes(owner, paid)).await.unwrap(), Outcome::Completed);
            assert_eq!(store.apply(id(number), claims(2)).await.unwrap(), Outcome::Replay(response(b"paid")));
            store.list(ListQuery::default()).await.unwrap();
            store.purge(10).await.unwrap();
        }
    }
}

/// A decoy could be called by a function that runs with other rights, or that uses the search path of its caller.
#[tokio::test(flavor = "multi_thread")]
async fn every_function_has_a_search_path_of_its_own_or_a_body_that_is_bound() {
    let database = Database::fresh().await;
    let sql = "SELECT string_agg(p.proname, ', ') FROM pg_proc AS p WHERE p.pronamespace = 'oncegate'::regnamespace \
        AND p.prosqlbody IS NULL AND NOT coalesce('search_path=pg_catalog, pg_temp' = ANY (p.proconfig), false)";
    let rows = try_run(&mut database.connect().await, sql).await.unwrap();
    assert_eq!(rows[0].get::<Option<String>, _>(0), None);
}

/// The contract, changed so that it leaves the search path to the session.
fn text_without_search_path() -> String {
    let text = schema::print();
    let unsafe_text = text.replacen("SET LOCAL search_path = pg_catalog, pg_temp;", "", 1).replacen(
        "OPERATOR(pg_catalog.<>) 'pg_catalog, pg_temp'",
        "IS NULL",
        1,
    );
    assert!(text.len() > unsafe_text.len() + 60);
    unsafe_text
}

/// Applies the contract so that a function is bound to an operator of another role, and one table is missing.
async fn bound_to_a_decoy(database: &Database) {
    let mut owner = database.connect().await;
    run(
        &mut owner,
        "CREATE FUNCTION public.product(numeric, integer) RETURNS numeric LANGUAGE sql \
            AS 'SELECT $1 OPERATOR(pg_catalog.*) $2::numeric'; \
         CREATE OPERATOR public.* (LEFTARG = numeric, RIGHTARG = integer, FUNCTION = public.product)",
    )
    .await;
    run(&mut owner, &text_without_search_path()).await;
    run(&mut owner, "DROP TABLE oncegate.purge_marks CASCADE").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_whose_functions_are_bound_to_a_decoy_is_repaired() {
    let database = Database::empty().await;
    bound_to_a_decoy(&database).await;
    let status = schema::status(&database.options()).await.unwrap();
    let binding = "function oncegate.now_ms() uses operator public.*(numeric,integer)";
    assert_eq!(
        (status.found, &status.foreign_bindings[..]),
        (Some(schema::VERSION), &[binding.to_owned()][..])
    );
    let before = schema::apply(&database.options()).await.unwrap();
    assert_eq!(before, status);
    let after = schema::status(&database.options()).await.unwrap();
    assert_eq!((after.found, after.foreign_bindings.len()), (Some(schema::VERSION), 0));
    // Nothing depends on the operator any more.
    run(&mut database.connect().await, "DROP OPERATOR public.* (numeric, integer)").await;
    let store = PostgresStore::open(database.options()).await.unwrap();
    assert!(matches!(store.apply(id(1), claims(1)).await.unwrap(), Outcome::Execute(_)));
}

/// The default of a column runs with the rights of the owner when the version is written.
#[tokio::test(flavor = "multi_thread")]
async fn a_default_that_is_bound_to_a_decoy_is_repaired_before_it_is_called() {
    let database = Database::fresh().await;
    let mut owner = database.connect().await;
    let decoy = "CREATE TABLE public.called (by text); \
        CREATE FUNCTION public.mine() RETURNS timestamptz LANGUAGE sql \
            AS 'INSERT INTO public.called VALUES (current_user); SELECT now()'; \
        ALTER TABLE oncegate.contract ALTER COLUMN applied_at SET DEFAULT public.mine(); \
        DELETE FROM oncegate.contract";
    run(&mut owner, decoy).await;
    let before = schema::apply(&database.options()).await.unwrap();
    let binding =
        "default value for column applied_at of table oncegate.contract uses function public.mine()";
    assert_eq!((before.found, &before.foreign_bindings[..]), (Some(0), &[binding.to_owned()][..]));
    let after = schema::status(&database.options()).await.unwrap();
    assert_eq!((after.found, after.foreign_bindings.len()), (Some(schema::VERSION), 0));
    assert!(try_run(&mut owner, "SELECT FROM public.called").await.unwrap().is_empty());
    let defaults = try_run(&mut owner, "SELECT FROM oncegate.contract WHERE applied_at IS NULL").await;
    assert!(defaults.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_that_cannot_be_repaired_is_named() {
    let database = Database::fresh().await;
    let index = "CREATE FUNCTION public.mine(bytea) RETURNS bytea IMMUTABLE LANGUAGE sql AS 'SELECT $1'; \
                 CREATE INDEX by_mine ON oncegate.records (public.mine(id))";
    run(&mut database.connect().await, index).await;
    let error = schema::apply(&database.options()).await.unwrap_err();
    let PostgresOpenError::ForeignBindings { bindings, .. } = &error else { panic!("{error}") };
    let binding = "index oncegate.by_mine uses function public.mine(bytea)";
    assert_eq!(bindings, &[binding.to_owned()]);
    assert!(error.to_string().contains(binding), "{error}");
    run(&mut database.connect().await, "DROP INDEX oncegate.by_mine").await;
    schema::apply(&database.options()).await.unwrap();
}

const PAGE: &str = include_str!("../../../../docs/reference/store-contract-postgres.md");

/// Types are looked up in `pg_catalog` first, unless the search path names it after another schema.
#[tokio::test(flavor = "multi_thread")]
async fn the_documented_sql_repairs_columns_and_functions_of_a_foreign_type() {
    const DECOYS: &str = "CREATE DOMAIN public.text AS pg_catalog.text; \
        CREATE DOMAIN public.timestamptz AS pg_catalog.timestamptz; \
        CREATE FUNCTION public.clock_timestamp() RETURNS pg_catalog.timestamptz LANGUAGE sql \
            AS 'SELECT pg_catalog.clock_timestamp()'";
    let database = Database::empty().await;
    let mut owner = database.connect().await;
    run(&mut owner, &format!("{DECOYS}; SET search_path = public, pg_catalog")).await;
    run(&mut owner, &text_without_search_path()).await;
    let claim = "SELECT token FROM oncegate.claim(decode(repeat('07', 32), 'hex'), decode(repeat('01', 16), 'hex'), \
        decode('01' || repeat('aa', 32), 'hex'), 60000, 60000)";
    try_run(&mut owner, claim).await.unwrap();
    let error = schema::apply(&database.options()).await.unwrap_err().to_string();
    for words in ["nothing was changed", "column operation of table oncegate.records uses type public.text"] {
        assert!(error.contains(words), "{error}");
    }
    let (_, sql) = PAGE.split_once("```sql\n-- Drops the functions").unwrap();
    let (sql, _) = sql.split_once("```").unwrap();
    run(&mut database.connect().await, &format!("--{sql}")).await;
    schema::apply(&database.options()).await.unwrap();
    assert_eq!(schema::status(&database.options()).await.unwrap().foreign_bindings, [""; 0]);
    let store = PostgresStore::open(database.options()).await.unwrap();
    // The earlier claim still exists.
    let listed = store.list(ListQuery::default()).await.unwrap();
    assert_eq!(listed.records.len(), 1);
    assert!(matches!(store.apply(id(1), claims(1)).await.unwrap(), Outcome::Execute(_)));
    run(
        &mut owner,
        "DROP DOMAIN public.text; DROP DOMAIN public.timestamptz; DROP FUNCTION public.clock_timestamp()",
    )
    .await;
}

/// Another role created a schema with the name of Oncegate's, with functions that wait for a powerful role to call them.
#[tokio::test(flavor = "multi_thread")]
async fn a_schema_of_another_owner_is_neither_called_nor_extended() {
    for definer in ["", "SECURITY DEFINER"] {
        let database = Database::empty().await;
        let mut owner = database.connect().await;
        let role = format!("mallory_{}", database.name);
        let trap = "CREATE ROLE mallory; GRANT CREATE ON SCHEMA public TO mallory; CREATE SCHEMA oncegate AUTHORIZATION mallory; \
            SET ROLE mallory; \
            CREATE TABLE public.called_by (name text); GRANT INSERT ON public.called_by TO PUBLIC; \
            CREATE FUNCTION oncegate.contract_version() RETURNS integer LANGUAGE sql SECURITY AS \
                'INSERT INTO public.called_by VALUES (current_user) RETURNING 1'; \
            CREATE TABLE oncegate.contract (version integer PRIMARY KEY); INSERT INTO oncegate.contract VALUES (1); RESET ROLE";
        run(&mut owner, &trap.replace("mallory", &role).replace("SECURITY AS", &format!("{definer} AS")))
            .await;
        let error = schema::apply(&database.options()).await.unwrap_err().to_string();
        let expected = if definer.is_empty() { "was not created by Oncegate" } else { "belongs to" };
        assert!(error.contains(expected), "{error}");
        let error = try_run(&mut database.connect().await, &schema::print()).await.unwrap_err();
        assert_eq!(sqlstate(&error), "42501", "{error}");
        let rows = try_run(&mut owner, "SELECT DISTINCT name FROM public.called_by").await.unwrap();
        let callers: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
        assert!(callers.iter().all(|caller| caller.starts_with("mallory")), "{callers:?}");
        run(&mut owner, &format!("DROP OWNED BY {role} CASCADE")).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_contain_no_password() {
    // One that checks passwords.
    let server = tokio::task::spawn_blocking(|| PostgresServer::start().unwrap()).await.unwrap();
    let wrong = server.url().replace(server.password(), "wr0ng-s3cret");
    for url in [wrong, "postgres://app:wr0ng-s3cret@127.0.0.1:1/shop".to_owned()] {
        let options = PostgresOptions::from_url(&url).unwrap();
        let error = PostgresStore::open(options.clone()).await.unwrap_err();
        let texts = format!("{error} {error:?} {options:?} {:?}", schema::apply(&options).await.unwrap_err());
        assert!(!texts.contains("s3cret") && texts.contains("127.0.0.1"), "{texts}");
    }
}
