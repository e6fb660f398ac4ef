//! Upgrades, tried with a second version of the contract that only these tests have: a new column, a new function, and a
//! right to call it for the roles that may read records.

use std::time::{Duration, Instant};

use oncegate_servers::PostgresDatabase;
use sqlx::AssertSqlSafe;
use sqlx::postgres::PgRow;

use super::*;
use crate::PostgresStore;

const NEW_COLUMN: &str = "DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = 'oncegate.records'::regclass AND a.attname = 'note') THEN
        ALTER TABLE oncegate.records ADD COLUMN note text NOT NULL DEFAULT 'none';
    END IF;
END $$;";

const NEW_FUNCTION: &str = "CREATE OR REPLACE FUNCTION oncegate.note(id bytea) RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ SELECT t.note FROM oncegate.records AS t WHERE t.id = note.id $$;";

const NEW_RIGHT: &str = "DO $$ DECLARE
    grantee text;
BEGIN
    IF (SELECT max(c.version) FROM oncegate.contract AS c) = 1 THEN
        FOR grantee IN SELECT a.grantee::regrole::text FROM pg_proc AS p, aclexplode(p.proacl) AS a
            WHERE p.pronamespace = 'oncegate'::regnamespace AND p.proname = 'lookup' AND a.grantee NOT IN (0::oid, p.proowner)
        LOOP
            EXECUTE format('GRANT EXECUTE ON FUNCTION oncegate.note TO %s', grantee);
        END LOOP;
    END IF;
END $$;";

fn second_version() -> Contract {
    let [tables, functions @ .., rights] = SQL;
    let tables = tables.replacen("SET LOCAL oncegate.version = 1;", "SET LOCAL oncegate.version = 2;", 1);
    assert_ne!(tables, SQL[0], "the text names the version that it creates");
    let mut sql = vec![&*tables.leak(), NEW_COLUMN];
    sql.extend(functions);
    sql.extend([NEW_FUNCTION, NEW_RIGHT, rights]);
    Contract { version: 2, sql: Cow::Owned(sql) }
}

struct Database(PostgresDatabase);

impl Database {
    /// A database with the first version.
    async fn first_version() -> Self {
        let database = Self(tokio::task::spawn_blocking(PostgresDatabase::fresh).await.unwrap().unwrap());
        apply(&database.options()).await.unwrap();
        database
    }

    fn options(&self) -> PostgresOptions {
        let long = Duration::from_secs(20);
        let options = PostgresOptions::from_url(&self.0.url()).unwrap();
        options.with_connect_timeout(long).unwrap().with_statement_timeout(long).unwrap()
    }

    async fn connect(&self) -> PgConnection {
        let mut connection = PgConnection::connect(&self.0.url()).await.unwrap();
        sql(&mut connection, "SET statement_timeout = '20s'").await;
        connection
    }
}

async fn try_sql(connection: &mut PgConnection, sql: &str) -> Result<Vec<PgRow>, Error> {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).fetch_all(connection).await
}

async fn sql(connection: &mut PgConnection, sql: &str) -> Vec<PgRow> {
    try_sql(connection, sql).await.unwrap()
}

fn claim(n: u32) -> String {
    format!(
        "SELECT outcome FROM oncegate.claim(decode(repeat('{n:08x}', 8), 'hex'), decode(repeat('{n:08x}', 4), 'hex'), \
         decode('01' || repeat('aa', 32), 'hex'), 60000, 60000)"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_keeps_records_and_rights_and_repairs_foreign_bindings() {
    let database = Database::first_version().await;
    let mut owner = database.connect().await;
    sql(&mut owner, &claim(7)).await;
    let (reader, worker) = (format!("reader_{}", database.0.name), format!("worker_{}", database.0.name));
    let before = format!(
        "CREATE ROLE {reader}; CREATE ROLE {worker}; GRANT EXECUTE ON FUNCTION oncegate.lookup TO {reader}; \
         GRANT EXECUTE ON FUNCTION oncegate.renew TO {worker}; \
         CREATE FUNCTION public.product(numeric, integer) RETURNS numeric LANGUAGE sql \
            AS 'SELECT $1 OPERATOR(pg_catalog.*) $2::numeric'; \
         CREATE OPERATOR public.* (LEFTARG = numeric, RIGHTARG = integer, FUNCTION = public.product); \
         CREATE OR REPLACE FUNCTION oncegate.now_ms() RETURNS bigint LANGUAGE sql VOLATILE PARALLEL SAFE \
            RETURN floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
    );
    sql(&mut owner, &before).await;

    let found = apply_contract(&database.options(), &second_version()).await.unwrap();
    assert_eq!((found.found, found.foreign_bindings.len()), (Some(1), 1));
    let status = status(&database.options()).await.unwrap();
    assert_eq!((status.found, status.needed, status.foreign_bindings.len()), (Some(2), VERSION, 0));
    let rows = sql(
        &mut owner,
        "SELECT l.state || ' ' || oncegate.note(r.id) FROM oncegate.records AS r, oncegate.lookup(r.id) AS l",
    );
    assert_eq!(rows.await[0].get::<String, _>(0), "in-progress none");
    assert_eq!(sql(&mut owner, &claim(7)).await[0].get::<String, _>(0), "execute", "the same attempt");
    let rights = format!(
        "SELECT string_agg(p.proname, ' ' ORDER BY p.proname) FROM pg_proc AS p WHERE p.pronamespace = 'oncegate'::regnamespace \
         AND has_function_privilege('{reader}', p.oid, 'EXECUTE')"
    );
    assert_eq!(sql(&mut owner, &rights).await[0].get::<String, _>(0), "lookup note");
    let rights_of_worker = rights.replace(&reader, &worker);
    assert_eq!(
        sql(&mut owner, &rights_of_worker).await[0].get::<String, _>(0),
        "renew",
        "no role gains a right"
    );

    // Applied again, it grants nothing again.
    sql(&mut owner, &format!("REVOKE EXECUTE ON FUNCTION oncegate.note FROM {reader}")).await;
    let found = apply_contract(&database.options(), &second_version()).await.unwrap();
    assert_eq!(found.found, Some(2));
    assert_eq!(sql(&mut owner, &rights).await[0].get::<String, _>(0), "lookup");
    sql(&mut owner, &format!("DROP OWNED BY {reader}, {worker}; DROP ROLE {reader}, {worker}")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_of_the_first_version_refuses_a_database_of_the_second() {
    let database = Database::first_version().await;
    apply_contract(&database.options(), &second_version()).await.unwrap();
    let opened = PostgresStore::open(database.options()).await.unwrap_err();
    let applied = apply(&database.options()).await.unwrap_err();
    for error in [opened, applied] {
        assert!(matches!(&error, PostgresOpenError::NewerContract { found: 2, known: 1, .. }), "{error}");
        assert!(error.to_string().contains("upgrade"), "{error}");
    }
    let error = try_sql(&mut database.connect().await, &print()).await.unwrap_err();
    assert_eq!(error.as_database_error().unwrap().code().as_deref(), Some("55000"), "{error}");
}

/// Every claim waits behind a session that waits for the lock of its table.
#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_does_not_make_claims_wait_for_an_open_transaction() {
    let database = Database::first_version().await;
    let mut owner = database.connect().await;
    let mut open = database.connect().await;
    sql(&mut open, "BEGIN; SELECT count(*) FROM oncegate.records").await;
    let options = database.options();
    let applying = tokio::spawn(async move { apply_contract(&options, &second_version()).await });
    let waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'oncegate.records'::regclass";
    let mut seen_waiting = 0;
    let mut claimed = 0;
    let deadline = Instant::now() + Duration::from_secs(60);
    while claimed < 20 || seen_waiting < 2 {
        assert!(Instant::now() < deadline, "{claimed} claims; seen waiting {seen_waiting} times");
        assert!(!applying.is_finished(), "it cannot succeed yet");
        seen_waiting += usize::from(!sql(&mut owner, waits).await.is_empty());
        let started = Instant::now();
        claimed += 1;
        sql(&mut owner, &claim(claimed)).await;
        assert!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
    }
    sql(&mut open, "COMMIT").await;
    applying.await.unwrap().unwrap();
    // An up-to-date database needs no lock on a table.
    sql(&mut open, "BEGIN; LOCK TABLE oncegate.records IN ROW EXCLUSIVE MODE").await;
    let second_version = second_version();
    let options = database.options();
    let again =
        tokio::time::timeout(Duration::from_secs(60), apply_contract(&options, &second_version)).await;
    assert_eq!(again.unwrap().unwrap().found, Some(2));
}
