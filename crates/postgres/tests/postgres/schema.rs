//! How the contract gets into a database, and who refuses to work on another one.

use std::time::{Duration, Instant};

use oncegate_core::{
    Command, Complete, Completion, FencingToken, ListQuery, Outcome, RecordId, RecordStep, Resolution,
    Resolve, StateName, Step, Store as _,
};
use oncegate_postgres::sqlx::{self, Row as _};
use oncegate_postgres::{OpenError, PostgresOptions, PostgresStore, schema};

use sqlx::postgres::PgConnection;

use crate::support::{Database, claims, completes, id, renews, response, run, sqlstate, token, try_run};

/// What the first version made.
const VERSION_1: &str = concat!("BEGIN;", include_str!("version_1.sql"), "COMMIT;");

fn claim_in_version_1(n: u32) -> String {
    format!(
        "SELECT token::text FROM oncegate.claim(decode(repeat('{n:08x}', 8), 'hex'), decode(repeat('{n:08x}', 4), 'hex'), \
         '\\x01'::bytea || decode(repeat('aa', 32), 'hex'), 60000, 60000)"
    )
}

/// Roles are the server's and not the database's: each gets a name of its own.
struct Roles<const N: usize> {
    names: [&'static str; N],
    suffix: String,
}

impl<const N: usize> Roles<N> {
    fn new(database: &Database, names: [&'static str; N]) -> Self {
        Self { names, suffix: format!("_{}", database.name) }
    }

    /// The SQL with the real names.
    fn named(&self, sql: &str) -> String {
        self.names.iter().fold(sql.to_owned(), |sql, name| {
            let words = sql.split_inclusive(|c: char| !c.is_alphanumeric() && c != '_' && c != '.');
            let real = |word: &str| match word.strip_prefix(name) {
                Some(rest) if rest.chars().all(|c| !c.is_alphanumeric() && c != '_' && c != '.') => {
                    format!("{name}{}{rest}", self.suffix)
                }
                _ => word.to_owned(),
            };
            words.map(real).collect()
        })
    }

    /// Which role may call which of these functions.
    async fn may(&self, connection: &mut PgConnection, functions: &[&str]) -> String {
        let list = |names: &[&str], suffix: &str| {
            names.iter().map(|name| format!("'{name}{suffix}'")).collect::<Vec<_>>().join(", ")
        };
        let sql = format!(
            "SELECT string_agg(replace(r, '{}', '') || ' ' || f, ', ' ORDER BY r, f) FROM unnest(ARRAY[{}]) AS r, \
             unnest(ARRAY[{}]) AS f, pg_proc AS p WHERE p.pronamespace = 'oncegate'::regnamespace AND p.proname = f \
             AND has_function_privilege(r, p.oid, 'EXECUTE')",
            self.suffix,
            list(&self.names, &self.suffix),
            list(functions, ""),
        );
        try_run(connection, &sql).await.unwrap()[0].get(0)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_applied_once_whoever_tries() {
    let database = Database::empty().await;
    assert_eq!(schema::status(&database.options()).await.unwrap().found, None);
    let error = PostgresStore::open(database.options()).await.unwrap_err();
    assert!(matches!(error, OpenError::NoContract { found: None, .. }), "{error}");
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
async fn what_is_printed_can_be_run_by_hand_and_again() {
    let database = Database::empty().await;
    let mut owner = database.connect().await;
    run(&mut owner, &schema::print()).await;
    let store = PostgresStore::open(database.options()).await.unwrap();
    store.apply(id(1), claims(1)).await.unwrap();
    run(&mut owner, &schema::print()).await;
    let outcome = store.apply(id(1), claims(2)).await.unwrap();
    assert!(matches!(outcome, Outcome::InProgress { .. }), "{outcome:?}");
    // Without a transaction, the search path would hold for one statement.
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
    run(&mut owner, "DELETE FROM oncegate.contract WHERE version > 1").await;
    let error = PostgresStore::open(database.options()).await.unwrap_err();
    assert!(matches!(error, OpenError::NoContract { found: Some(1), .. }), "{error}");
    assert!(error.to_string().contains("oncegate schema apply postgres"), "{error}");
    run(&mut owner, &format!("INSERT INTO oncegate.contract (version) VALUES ({})", schema::VERSION + 1))
        .await;
    let error = PostgresStore::open(database.options()).await.unwrap_err();
    let OpenError::NewerContract { found, known, .. } = &error else { panic!("{error}") };
    assert_eq!((*found, *known), (schema::VERSION + 1, schema::VERSION));
    assert!(error.to_string().contains("upgrade"), "{error}");
    assert!(matches!(schema::apply(&database.options()).await, Err(OpenError::NewerContract { .. })));
}

/// A database as the first version left it, with records, and with roles that may do what theirs may.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_of_the_first_version_goes_forward_with_its_records_and_its_rights() {
    let database = Database::empty().await;
    let mut owner = database.connect().await;
    run(&mut owner, VERSION_1).await;
    let roles = Roles::new(&database, ["worker", "reader", "payer", "transactor", "nobody"]);
    let grants = roles.named(
        "CREATE ROLE worker; CREATE ROLE reader; CREATE ROLE payer; CREATE ROLE transactor; CREATE ROLE nobody; \
         GRANT EXECUTE ON FUNCTION oncegate.complete, oncegate.response, oncegate.lookup TO payer; \
         GRANT EXECUTE ON FUNCTION oncegate.claim, oncegate.complete TO transactor; \
         GRANT EXECUTE ON FUNCTION oncegate.complete_if_owner TO worker; GRANT EXECUTE ON FUNCTION oncegate.lookup TO reader",
    );
    run(&mut owner, &grants).await;
    let rows = try_run(&mut owner, &claim_in_version_1(0x0101_0101)).await.unwrap();
    let token = FencingToken::new(rows[0].get::<String, _>(0).parse().unwrap());
    assert_eq!(schema::apply(&database.options()).await.unwrap().found, Some(1));
    assert_eq!(schema::apply(&database.options()).await.unwrap().found, Some(schema::VERSION));

    let store = PostgresStore::open(database.options()).await.unwrap();
    let id = RecordId::from_bytes([1; 32]);
    let step = Step::new("charge", "paid".into()).unwrap();
    let command = Command::Step(RecordStep { token, number: 0, step: step.clone() });
    assert_eq!(store.apply(id, command).await.unwrap(), Outcome::StepRecorded, "of an attempt from before");
    assert_eq!(store.lookup(id).await.unwrap().unwrap().steps.as_slice(), [step]);
    assert_eq!(
        roles.may(&mut owner, &["step", "steps", "reserve", "complete_reserved", "reserve_or_claim"]).await,
        "payer steps, reader steps, transactor complete_reserved, transactor reserve, transactor reserve_or_claim, worker step",
        "nobody can do what it could not do before"
    );
}

/// Earlier upgrades from the first version let each service behind a sidecar insert completed records.
#[tokio::test(flavor = "multi_thread")]
async fn what_an_earlier_upgrade_granted_too_much_is_taken_back_once() {
    let database = Database::fresh().await;
    let mut owner = database.connect().await;
    let roles = Roles::new(&database, ["shop", "payments", "sidecar"]);
    let grants = roles.named(
        "CREATE ROLE shop; CREATE ROLE payments; CREATE ROLE sidecar; \
         GRANT EXECUTE ON FUNCTION oncegate.complete, oncegate.reserve, oncegate.complete_reserved TO shop; \
         GRANT EXECUTE ON FUNCTION oncegate.reserve_or_claim, oncegate.complete_reserved TO payments; \
         GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate TO sidecar",
    );
    run(&mut owner, &grants).await;
    run(&mut owner, "DELETE FROM oncegate.contract WHERE version > 4").await;
    schema::apply(&database.options()).await.unwrap();
    let names = ["complete", "reserve", "complete_reserved"];
    let kept = "sidecar complete, sidecar complete_reserved, sidecar reserve";
    assert_eq!(
        roles.may(&mut owner, &names).await,
        format!("payments complete_reserved, shop complete, {kept}")
    );
    // What an owner grants from then on stays.
    run(&mut owner, &roles.named("GRANT EXECUTE ON FUNCTION oncegate.reserve TO shop")).await;
    schema::apply(&database.options()).await.unwrap();
    let all = format!("payments complete_reserved, shop complete, shop reserve, {kept}");
    assert_eq!(roles.may(&mut owner, &names).await, all);
}

/// Databases from before the marks of records, with their records and whatever roles could read them.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_without_marks_gets_them_and_the_right_to_read_them() {
    let database = Database::fresh().await;
    let mut owner = database.connect().await;
    let store = database.store().await;
    let id = id(7);
    let token = token(&store.apply(id, claims(1)).await.unwrap());
    drop(store);
    let roles = Roles::new(&database, ["sidecar", "reader", "lister"]);
    let grants = roles.named(
        "DROP FUNCTION oncegate.lookup_record, oncegate.list_records; \
         ALTER TABLE oncegate.records DROP COLUMN key_tag, DROP COLUMN by_operator; \
         DELETE FROM oncegate.contract WHERE version > 4; \
         CREATE ROLE sidecar; CREATE ROLE reader; CREATE ROLE lister; \
         GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate TO sidecar; \
         GRANT EXECUTE ON FUNCTION oncegate.lookup TO reader; GRANT EXECUTE ON FUNCTION oncegate.list TO lister",
    );
    run(&mut owner, &grants).await;
    schema::apply(&database.options()).await.unwrap();
    let names = ["lookup_record", "list_records"];
    let expected = "sidecar list_records, sidecar lookup_record";
    assert_eq!(roles.may(&mut owner, &names).await, expected, "nobody can do what it could not do before");
    schema::apply(&database.options()).await.unwrap();
    assert_eq!(roles.may(&mut owner, &names).await, expected);

    let store = database.store().await;
    let before = store.lookup(id).await.unwrap().unwrap();
    assert_eq!((before.token, before.by_operator, before.label.key()), (token, false, None));
    let retention = Duration::from_secs(60);
    let completion = Completion::Tombstone;
    let complete = Command::Complete(Complete { token, completion, retention });
    assert_eq!(store.apply(id, complete).await.unwrap(), Outcome::Completed);
    let (actor, reason) = ("ann".to_owned(), "r".to_owned());
    let park = Resolve { resolution: Resolution::Park, retention, force: true, amend: false, actor, reason };
    let refused = Outcome::NotResolvable { state: Some(StateName::Tombstone) };
    assert_eq!(store.apply(id, Command::Resolve(park)).await.unwrap(), refused);
}

/// What version 5 had: functions that read a string by the settings of the session that calls them.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_of_version_5_is_refused_and_gets_functions_that_settings_do_not_change() {
    let database = Database::fresh().await;
    let mut owner = database.connect().await;
    let clean = bindings(&database).await;
    run(
        &mut owner,
        r"CREATE OR REPLACE FUNCTION oncegate.may_be_response(response bytea) RETURNS boolean
            LANGUAGE sql IMMUTABLE PARALLEL SAFE
            RETURN CASE WHEN octet_length(response) BETWEEN 7 AND 67108864 THEN get_byte(response, 0) = 1 ELSE false END;
        CREATE OR REPLACE FUNCTION oncegate.message_record(consumer text, message text, kind text[] DEFAULT ARRAY['own'],
            topic text DEFAULT '') RETURNS bytea
            LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
            AS $$ DECLARE said bytea := '\x'; BEGIN RETURN said; END $$;
        DROP FUNCTION oncegate.is_field;
        DELETE FROM oncegate.contract WHERE version > 5",
    )
    .await;
    let error = PostgresStore::open(database.options()).await.unwrap_err();
    assert!(matches!(error, OpenError::NoContract { found: Some(5), .. }), "{error}");
    assert_eq!(schema::apply(&database.options()).await.unwrap().found, Some(5));
    PostgresStore::open(database.options()).await.unwrap();
    assert_eq!(bindings(&database).await, clean);
}

/// Everything in the schema, what it depends on, and how the server wrote it down.
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
    // They are found where the search path leads there.
    run(&mut attacker, "SET search_path = public, pg_catalog").await;
    for called in ["SELECT octet_length('a'::text)", "SELECT 1.5 * 2", "SELECT 1 + 1"] {
        assert_eq!(sqlstate(&try_run(&mut attacker, called).await.unwrap_err()), "OG666", "{called}");
    }
}

/// A role that may create objects in `public` must not get at the rights of the owner, of the role that applies the contract, or
/// of a store: neither while the SQL runs, nor by what its functions are bound to afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_bound_to_what_others_have_put_into_the_search_path() {
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

        // What the store sends calls none of them either, with sessions of its own and behind a pooler.
        let pooler = PostgresOptions::new(&format!("{}?pooler=transaction", database.url())).unwrap();
        for (number, options) in [(1, database.options()), (2, pooler)] {
            let is_pooler = number == 2;
            if is_pooler && by_hand {
                continue; // nothing can be sent along with a session there; the path is the role's
            }
            let store = PostgresStore::open(options).await.unwrap();
            store.check().await.unwrap();
            let owner = token(&store.apply(id(number), claims(1)).await.unwrap());
            store.apply(id(number), renews(owner)).await.unwrap();
            let answer = Completion::Replayable(response(b"paid"));
            assert_eq!(store.apply(id(number), completes(owner, answer)).await.unwrap(), Outcome::Completed);
            assert_eq!(store.apply(id(number), claims(2)).await.unwrap(), Outcome::Replay(response(b"paid")));
            store.list(ListQuery::default()).await.unwrap();
            store.purge(10).await.unwrap();
        }
    }
}

/// What runs as somebody else, or is left to the search path of whoever calls it, would be found by a decoy that is called.
#[tokio::test(flavor = "multi_thread")]
async fn every_function_has_a_search_path_of_its_own_or_a_body_that_is_bound() {
    let database = Database::fresh().await;
    let sql = "SELECT string_agg(p.proname, ', ') FROM pg_proc AS p WHERE p.pronamespace = 'oncegate'::regnamespace \
        AND p.prosqlbody IS NULL AND NOT coalesce('search_path=pg_catalog, pg_temp' = ANY (p.proconfig), false)";
    let rows = try_run(&mut database.connect().await, sql).await.unwrap();
    assert_eq!(rows[0].get::<Option<String>, _>(0), None);
}

/// The contract as it would be without the first statement, in a database where somebody has made an operator.
async fn bound_to_a_decoy(database: &Database) {
    let mut owner = database.connect().await;
    run(
        &mut owner,
        "CREATE FUNCTION public.product(numeric, integer) RETURNS numeric LANGUAGE sql \
            AS 'SELECT $1 OPERATOR(pg_catalog.*) $2::numeric'; \
         CREATE OPERATOR public.* (LEFTARG = numeric, RIGHTARG = integer, FUNCTION = public.product)",
    )
    .await;
    let text = schema::print();
    let unsafe_text = text.replacen("SET LOCAL search_path = pg_catalog, pg_temp;", "", 1).replacen(
        "OPERATOR(pg_catalog.<>) 'pg_catalog, pg_temp'",
        "IS NULL",
        1,
    );
    assert!(text.len() > unsafe_text.len() + 60);
    run(&mut owner, &unsafe_text).await;
    // As version 4 was.
    run(
        &mut owner,
        "DROP TABLE oncegate.purge_marks CASCADE; DELETE FROM oncegate.contract WHERE version > 4",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_whose_functions_are_bound_to_a_decoy_is_repaired() {
    let database = Database::empty().await;
    bound_to_a_decoy(&database).await;
    let status = schema::status(&database.options()).await.unwrap();
    let binding = "function oncegate.now_ms() uses operator public.*(numeric,integer)";
    assert_eq!((status.found, &status.foreign_bindings[..]), (Some(4), &[binding.to_owned()][..]));
    let before = schema::apply(&database.options()).await.unwrap();
    assert_eq!(before, status);
    let after = schema::status(&database.options()).await.unwrap();
    assert_eq!((after.found, after.foreign_bindings.len()), (Some(schema::VERSION), 0));
    // Nothing needs it any more.
    run(&mut database.connect().await, "DROP OPERATOR public.* (numeric, integer)").await;
    let store = PostgresStore::open(database.options()).await.unwrap();
    assert!(matches!(store.apply(id(1), claims(1)).await.unwrap(), Outcome::Execute(_)));
}

/// The default of a column is run with the rights of the owner when the version is noted.
#[tokio::test(flavor = "multi_thread")]
async fn a_default_that_is_bound_to_a_decoy_is_repaired_before_it_is_called() {
    let database = Database::fresh().await;
    let mut owner = database.connect().await;
    let decoy = "CREATE TABLE public.called (by text); \
        CREATE FUNCTION public.mine() RETURNS timestamptz LANGUAGE sql \
            AS 'INSERT INTO public.called VALUES (current_user); SELECT now()'; \
        ALTER TABLE oncegate.contract ALTER COLUMN applied_at SET DEFAULT public.mine(); \
        DELETE FROM oncegate.contract WHERE version > 4";
    run(&mut owner, decoy).await;
    let before = schema::apply(&database.options()).await.unwrap();
    let binding =
        "default value for column applied_at of table oncegate.contract uses function public.mine()";
    assert_eq!((before.found, &before.foreign_bindings[..]), (Some(4), &[binding.to_owned()][..]));
    let after = schema::status(&database.options()).await.unwrap();
    assert_eq!((after.found, after.foreign_bindings.len()), (Some(schema::VERSION), 0));
    assert!(try_run(&mut owner, "SELECT FROM public.called").await.unwrap().is_empty());
    let defaults = try_run(&mut owner, "SELECT FROM oncegate.contract WHERE applied_at IS NULL").await;
    assert!(defaults.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_repaired_is_named() {
    let database = Database::fresh().await;
    let index = "CREATE FUNCTION public.mine(bytea) RETURNS bytea IMMUTABLE LANGUAGE sql AS 'SELECT $1'; \
                 CREATE INDEX by_mine ON oncegate.records (public.mine(id))";
    run(&mut database.connect().await, index).await;
    let error = schema::apply(&database.options()).await.unwrap_err();
    let OpenError::ForeignBindings { bindings, .. } = &error else { panic!("{error}") };
    let binding = "index oncegate.by_mine uses function public.mine(bytea)";
    assert_eq!(bindings, &[binding.to_owned()]);
    assert!(error.to_string().contains(binding), "{error}");
    run(&mut database.connect().await, "DROP INDEX oncegate.by_mine").await;
    schema::apply(&database.options()).await.unwrap();
}

const PAGE: &str = include_str!("../../../../docs/reference/store-contract-postgres.md");

/// Types are looked for in `pg_catalog` first, unless it is named behind another schema.
#[tokio::test(flavor = "multi_thread")]
async fn columns_and_functions_of_a_foreign_type_are_mended_by_the_sql_of_the_page() {
    const DECOYS: &str = "CREATE DOMAIN public.text AS pg_catalog.text; \
        CREATE DOMAIN public.timestamptz AS pg_catalog.timestamptz; \
        CREATE FUNCTION public.clock_timestamp() RETURNS pg_catalog.timestamptz LANGUAGE sql \
            AS 'SELECT pg_catalog.clock_timestamp()'";
    let usual = Database::empty().await;
    run(&mut usual.connect().await, &format!("{DECOYS}; {VERSION_1}")).await;
    assert_eq!(schema::status(&usual.options()).await.unwrap().foreign_bindings, [""; 0]);

    let database = Database::empty().await;
    let mut owner = database.connect().await;
    run(&mut owner, &format!("{DECOYS}; SET search_path = public, pg_catalog")).await;
    run(&mut owner, VERSION_1).await;
    try_run(&mut owner, &claim_in_version_1(1)).await.unwrap();
    let error = schema::apply(&database.options()).await.unwrap_err().to_string();
    for words in ["nothing was changed", "column state of table oncegate.records uses type public.text"] {
        assert!(error.contains(words), "{error}");
    }
    let (_, sql) = PAGE.split_once("```sql\n-- Takes the functions out").unwrap();
    let (sql, _) = sql.split_once("```").unwrap();
    run(&mut database.connect().await, &format!("--{sql}")).await;
    schema::apply(&database.options()).await.unwrap();
    assert_eq!(schema::status(&database.options()).await.unwrap().foreign_bindings, [""; 0]);
    let store = PostgresStore::open(database.options()).await.unwrap();
    // What was claimed before is still there.
    let listed = store.list(ListQuery::default()).await.unwrap();
    assert_eq!(listed.records.len(), 1);
    assert!(matches!(store.apply(id(1), claims(1)).await.unwrap(), Outcome::Execute(_)));
    run(
        &mut owner,
        "DROP DOMAIN public.text; DROP DOMAIN public.timestamptz; DROP FUNCTION public.clock_timestamp()",
    )
    .await;
}

/// A schema by the name of Oncegate's that another role has made, with functions that wait for a powerful role to call them.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_another_owner_is_called_or_extended() {
    for definer in ["", "SECURITY DEFINER"] {
        let database = Database::empty().await;
        let mut owner = database.connect().await;
        let roles = Roles::new(&database, ["mallory"]);
        let trap = "CREATE ROLE mallory; GRANT CREATE ON SCHEMA public TO mallory; CREATE SCHEMA oncegate AUTHORIZATION mallory; \
            SET ROLE mallory; \
            CREATE TABLE public.called_by (name text); GRANT INSERT ON public.called_by TO PUBLIC; \
            CREATE FUNCTION oncegate.contract_version() RETURNS integer LANGUAGE sql SECURITY AS \
                'INSERT INTO public.called_by VALUES (current_user) RETURNING 4'; \
            CREATE TABLE oncegate.contract (version integer PRIMARY KEY); INSERT INTO oncegate.contract VALUES (4); RESET ROLE";
        run(&mut owner, &roles.named(trap).replace("SECURITY AS", &format!("{definer} AS"))).await;
        let error = schema::apply(&database.options()).await.unwrap_err().to_string();
        let expected = if definer.is_empty() { "is not Oncegate's" } else { "belongs to" };
        assert!(error.contains(expected), "{error}");
        let error = try_run(&mut database.connect().await, &schema::print()).await.unwrap_err();
        assert_eq!(sqlstate(&error), "42501", "{error}");
        let rows = try_run(&mut owner, "SELECT DISTINCT name FROM public.called_by").await.unwrap();
        let callers: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
        assert!(callers.iter().all(|caller| caller.starts_with("mallory")), "{callers:?}");
        run(&mut owner, &roles.named("DROP OWNED BY mallory CASCADE")).await;
    }
}

/// A claim waits behind whoever waits for its table.
#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_does_not_make_claims_wait_for_an_open_transaction() {
    let database = Database::empty().await;
    let mut owner = database.connect().await;
    run(&mut owner, VERSION_1).await;
    let mut open = database.connect().await;
    run(&mut open, "BEGIN; SELECT count(*) FROM oncegate.records").await;
    let options = database.options();
    let applying = tokio::spawn(async move { schema::apply(&options).await });
    let waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'oncegate.records'::regclass";
    let mut seen_waiting = 0;
    let mut claimed = 0;
    let deadline = Instant::now() + Duration::from_secs(60);
    while claimed < 20 || seen_waiting < 2 {
        assert!(Instant::now() < deadline, "{claimed} claims; seen waiting {seen_waiting} times");
        assert!(!applying.is_finished(), "it cannot be done yet");
        seen_waiting += usize::from(!try_run(&mut owner, waits).await.unwrap().is_empty());
        let started = Instant::now();
        claimed += 1;
        try_run(&mut owner, &claim_in_version_1(claimed)).await.unwrap();
        assert!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
    }
    run(&mut open, "COMMIT").await;
    applying.await.unwrap().unwrap();
    // A database that is up to date needs no table's lock.
    run(&mut open, "BEGIN; LOCK TABLE oncegate.records IN ROW EXCLUSIVE MODE").await;
    let applied = tokio::time::timeout(Duration::from_secs(60), schema::apply(&database.options())).await;
    assert_eq!(applied.unwrap().unwrap().found, Some(schema::VERSION));
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_hold_no_password() {
    let database = Database::empty().await;
    let password = database.server.password();
    let wrong = database.url().replace(password, "wr0ng-s3cret");
    for url in [wrong, "postgres://app:wr0ng-s3cret@127.0.0.1:1/shop".to_owned()] {
        let options = PostgresOptions::new(&url).unwrap();
        let error = PostgresStore::open(options.clone()).await.unwrap_err();
        let said = format!("{error} {error:?} {options:?} {:?}", schema::apply(&options).await.unwrap_err());
        assert!(!said.contains("s3cret") && said.contains("127.0.0.1"), "{said}");
    }
}
