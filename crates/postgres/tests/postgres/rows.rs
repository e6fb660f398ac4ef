//! Rows that are inserted once, and rows with a version.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use oncegate_postgres::{
    InsertError, InsertOutcome, UpdateOutcome, insert_once, update_latest, update_version,
};
use sqlx::PgPool;
use sqlx::postgres::PgConnection;

use crate::support::{Database, run, try_run};

/// An order: its number, its customer, its cart.
type Order = (i64, String, String);

const INSERT: &str = "INSERT INTO orders (customer, cart) VALUES ($1, $2) ON CONFLICT (customer, cart) DO NOTHING \
                      RETURNING id, customer, cart";
const EXISTING: &str = "SELECT id, customer, cart FROM orders WHERE customer = $1 AND cart = $2";

async fn world(connections: u32) -> (Database, PgPool) {
    let database = Database::empty().await;
    let pool = database.payments(connections).await;
    let tables = "CREATE TABLE orders (id bigserial PRIMARY KEY, customer text, cart text, UNIQUE (customer, cart)); \
                  CREATE TABLE accounts (id bigint PRIMARY KEY, cents bigint, version bigint NOT NULL)";
    run(&mut pool.acquire().await.unwrap(), tables).await;
    (database, pool)
}

async fn order(
    connection: &mut PgConnection,
    customer: &str,
    cart: &str,
) -> Result<InsertOutcome<Order>, InsertError> {
    insert_once(
        connection,
        || sqlx::query_as(INSERT).bind(customer.to_owned()).bind(cart.to_owned()),
        || sqlx::query_as(EXISTING).bind(customer.to_owned()).bind(cart.to_owned()),
    )
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_order_is_created_once_and_later_inserts_return_it() {
    let (_database, pool) = world(10).await;
    let orders: Vec<_> = (0..100)
        .map(|_| {
            let pool = pool.clone();
            tokio::spawn(async move {
                order(&mut pool.acquire().await.unwrap(), "ada'); --", "cart").await.unwrap()
            })
        })
        .collect();
    let mut created = 0;
    let mut rows = Vec::new();
    for order in orders {
        let order = order.await.unwrap();
        created += u32::from(order.is_created());
        rows.push(order.into_inner());
    }
    rows.dedup();
    assert_eq!((created, rows.len()), (1, 1), "{rows:?}");
    assert_eq!(rows[0].1, "ada'); --");
}

/// Waits until a session waits for a lock.
async fn wait_for_lock_waiter(connection: &mut PgConnection) {
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    let waiting =
        "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()";
    while try_run(connection, waiting).await.unwrap().is_empty() {
        assert!(std::time::Instant::now() < deadline, "no session waits for a lock");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_insert_waits_for_an_open_insert_and_then_finds_or_replaces_it() {
    for commits in [true, false] {
        let (database, pool) = world(2).await;
        let mut other = pool.begin().await.unwrap();
        assert!(order(&mut other, "ada", "cart").await.unwrap().is_created());
        let waits = tokio::spawn({
            let pool = pool.clone();
            async move { order(&mut pool.acquire().await.unwrap(), "ada", "cart").await.unwrap() }
        });
        wait_for_lock_waiter(&mut database.connect().await).await;
        if commits {
            other.commit().await.unwrap();
        } else {
            other.rollback().await.unwrap();
        }
        assert_eq!(waits.await.unwrap().is_created(), !commits);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_timeout_bounds_the_wait_of_an_insert() {
    let (_database, pool) = world(2).await;
    let mut other = pool.begin().await.unwrap();
    order(&mut other, "ada", "cart").await.unwrap();
    let mut hurried = pool.begin().await.unwrap();
    run(&mut hurried, "SET LOCAL lock_timeout = '50ms'").await;
    let Err(InsertError::Database(error)) = order(&mut hurried, "ada", "cart").await else {
        panic!("it waits")
    };
    assert_eq!(crate::support::sqlstate(&error), "55P03");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_deleted_in_between_is_inserted_again_a_bounded_number_of_times() {
    let (database, pool) = world(2).await;
    let mut connection = pool.acquire().await.unwrap();
    order(&mut connection, "ada", "cart").await.unwrap();
    // The lookup deletes the row, as another session might just before it.
    let look =
        "WITH gone AS (DELETE FROM orders RETURNING id) SELECT id, customer, cart FROM orders WHERE false";
    let insert = || sqlx::query_as::<_, Order>(INSERT).bind("ada").bind("cart");
    let again = insert_once(&mut connection, insert, || sqlx::query_as(look)).await.unwrap();
    assert_eq!(again, InsertOutcome::Created((3, "ada".to_owned(), "cart".to_owned())));
    // Two statements about different rows.
    let nowhere = || sqlx::query_as("SELECT id, customer, cart FROM orders WHERE false");
    let error = insert_once(&mut connection, insert, nowhere).await.unwrap_err();
    assert!(matches!(error, InsertError::Vanished), "{error:?}");
    drop(database);
}

const UPDATE: &str = "UPDATE accounts SET cents = $2, version = version + 1 WHERE id = $1 AND version = $3 \
                      RETURNING cents, version";
const CURRENT: &str = "SELECT cents, version FROM accounts WHERE id = $1";

#[tokio::test(flavor = "multi_thread")]
async fn a_conflict_is_distinguished_from_a_missing_row() {
    let (_database, pool) = world(1).await;
    let mut connection = pool.acquire().await.unwrap();
    run(&mut connection, "INSERT INTO accounts VALUES (1, 500, 7)").await;
    let mut set = async |id: i64, version: i64| {
        let update = || sqlx::query_as::<_, (i64, i64)>(UPDATE).bind(id).bind(400_i64).bind(version);
        update_version(&mut connection, update, || sqlx::query_as(CURRENT).bind(id)).await.unwrap()
    };
    assert_eq!(set(1, 6).await, UpdateOutcome::Conflict((500, 7)));
    assert_eq!(set(1, 7).await, UpdateOutcome::Updated((400, 8)));
    assert_eq!(set(1, 7).await, UpdateOutcome::Conflict((400, 8)));
    assert_eq!(set(2, 7).await, UpdateOutcome::NotFound);
}

async fn withdraw(connection: &mut PgConnection, attempts: u32, id: i64) -> UpdateOutcome<(i64, i64)> {
    let change = |(cents, version): &(i64, i64)| {
        (*cents > 0).then(|| sqlx::query_as(UPDATE).bind(id).bind(cents - 1).bind(*version))
    };
    let attempts = NonZeroU32::new(attempts).unwrap();
    update_latest(connection, attempts, || sqlx::query_as(CURRENT).bind(id), change).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_concurrent_update_is_lost() {
    let (_database, pool) = world(8).await;
    run(&mut pool.acquire().await.unwrap(), "INSERT INTO accounts VALUES (1, 60, 0)").await;
    let start = Arc::new(tokio::sync::Barrier::new(8));
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let (pool, start) = (pool.clone(), start.clone());
            tokio::spawn(async move {
                let mut connection = pool.acquire().await.unwrap();
                start.wait().await;
                let mut updated = 0;
                for _ in 0..8 {
                    match withdraw(&mut connection, 100, 1).await {
                        UpdateOutcome::Updated(_) => updated += 1,
                        UpdateOutcome::Unchanged((0, 60)) => {}
                        other => panic!("{other:?}"),
                    }
                }
                updated
            })
        })
        .collect();
    let mut updated = 0;
    for task in tasks {
        updated += task.await.unwrap();
    }
    assert_eq!(updated, 60);
    let mut connection = pool.acquire().await.unwrap();
    assert_eq!(withdraw(&mut connection, 1, 1).await, UpdateOutcome::Unchanged((0, 60)));
    assert_eq!(withdraw(&mut connection, 1, 2).await, UpdateOutcome::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn attempts_are_bounded_and_the_last_row_is_returned() {
    let (_database, pool) = world(1).await;
    let mut connection = pool.acquire().await.unwrap();
    run(&mut connection, "INSERT INTO accounts VALUES (1, 500, 0)").await;
    // Each lookup finds another version, as if another session were always faster.
    let read = || sqlx::query_as::<_, (i64, i64)>("SELECT cents, version - 1 FROM accounts");
    let change = |row: &(i64, i64)| Some(sqlx::query_as(UPDATE).bind(1_i64).bind(0_i64).bind(row.1));
    for attempts in [1, 3] {
        let attempts = NonZeroU32::new(attempts).unwrap();
        let update = update_latest(&mut connection, attempts, read, change).await.unwrap();
        assert_eq!(update, UpdateOutcome::Conflict((500, -1)));
    }
}
