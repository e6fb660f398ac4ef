//! Numbers and places of records, compared with what a listing of all records gives.

use oncegate_core::{ListQuery, Store, SurveyQuery};
use oncegate_postgres::{PostgresOptions, PostgresStore};
use oncegate_testkit::surveys;

use crate::support::{Database, claims, id, run, sql_id};

/// Records of every state, caller and operation, some of them past their lease or their retention, many with the same time.
const FILL: &str = "INSERT INTO oncegate.records (id, state, fingerprint, token, attempts, attempt, lease_until, after_abandoned, \
    caller, key_tag, operation, created_at, changed_at, expires_at, purge_at, response) \
    SELECT sha256(int8send(n)), state, '\\x01'::bytea || sha256(''), 1, 1, \
        CASE WHEN state = 'in-progress' THEN substr(sha256(int8send(n)), 1, 16) END, \
        CASE WHEN state = 'in-progress' THEN c + (n % 3 - 1) * 3600000 END, \
        CASE WHEN state = 'in-progress' THEN false END, \
        int8send(n % 5), CASE WHEN n % 7 > 0 THEN int8send(n % 100) END, \
        (ARRAY['POST /payments', 'POST /refunds', '(shadow) POST /payments'])[n % 3 + 1], \
        c - 100000000, c - n / 10 * 100000, CASE WHEN n % 11 = 0 THEN c - 1 ELSE c + 86400000 END, c + 86400000, \
        CASE WHEN state = 'completed' THEN oncegate.response(200, ARRAY[]::text[], ARRAY[]::text[], 'paid') END \
    FROM (SELECT n, (ARRAY['in-progress', 'unknown', 'completed', 'awaited', 'tombstone', 'released'])[n % 6 + 1] AS state, c \
        FROM generate_series(1, 3000) AS n, (SELECT oncegate.now_ms() AS c) AS k) AS r; ANALYZE oncegate.records";

#[tokio::test(flavor = "multi_thread")]
async fn a_survey_counts_and_orders_what_a_listing_shows() {
    let database = Database::fresh().await;
    run(&mut database.connect().await, FILL).await;
    let pooler = PostgresOptions::from_url(&format!("{}?pooler=transaction", database.url())).unwrap();
    let store = database.store().await;
    for store in [&store, &PostgresStore::open(pooler).await.unwrap()] {
        assert_eq!(surveys::compare(store).await.len(), 3000 - 272);
    }
    // A page, and the place that tells that there are more.
    let mut query = SurveyQuery::default();
    query.max_places = usize::MAX;
    assert_eq!(store.survey(query).await.unwrap().unwrap().places.len(), 1001);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_whose_time_is_damaged_has_a_place() {
    let database = Database::fresh().await;
    let store = database.store().await;
    for n in 1..=2_u8 {
        store.apply(id(n), claims(n.into())).await.unwrap();
    }
    let damage = format!("UPDATE oncegate.records SET changed_at = -1 WHERE id = {}", sql_id(id(1)));
    run(&mut database.connect().await, &damage).await;
    let mut query = SurveyQuery::default();
    query.max_places = 10;
    let survey = store.survey(query).await.unwrap().unwrap();
    assert_eq!(survey.places.iter().map(|(_, id)| *id).collect::<Vec<_>>(), [id(2), id(1)]);
    // The listing names it as one that cannot be read.
    assert_eq!(store.list(ListQuery::default()).await.unwrap().unreadable, [id(1)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_function_or_its_right_there_is_no_survey() {
    let database = Database::fresh().await;
    let mut owner = database.connect().await;
    let role = format!("lister_{}", database.name);
    let grants = format!(
        "CREATE ROLE {role} LOGIN PASSWORD 'pw-lister'; GRANT USAGE ON SCHEMA oncegate TO {role}; \
         GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate TO {role}"
    );
    run(&mut owner, &grants).await;
    let url = format!("postgres://{role}:pw-lister@127.0.0.1:{}/{}", database.server.port(), database.name);
    let store = PostgresStore::open(PostgresOptions::from_url(&url).unwrap()).await.unwrap();
    assert!(store.survey(SurveyQuery::default()).await.unwrap().is_some());
    run(&mut owner, &format!("REVOKE EXECUTE ON FUNCTION oncegate.survey FROM {role}")).await;
    assert_eq!(store.survey(SurveyQuery::default()).await.unwrap(), None);
    // A store opens without it, too: a role that was granted its rights before the function existed goes on.
    let store = PostgresStore::open(PostgresOptions::from_url(&url).unwrap()).await.unwrap();
    store.check().await.unwrap();
    run(&mut owner, "DROP FUNCTION oncegate.survey").await;
    assert_eq!(store.survey(SurveyQuery::default()).await.unwrap(), None);
    store.list(ListQuery::default()).await.unwrap();
    store.close().await;
    run(&mut owner, &format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}
