//! A payment that commits in one transaction with the record of its key.

use oncegate::core::Scope;
use oncegate::postgres::sqlx::{self, PgPool};
use oncegate::{TransactOutcome, Transactor};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    sqlx::query("CREATE TABLE IF NOT EXISTS payments (id bigserial, cents bigint)").execute(&pool).await?;

    let transactor = Transactor::new(pool);
    let scope = Scope::caller("customer", "42").with_operation("payment");
    let cents: i64 = 500;
    let payment = transactor.transact(&scope, "order-123", &cents, async |connection| {
        let insert = sqlx::query_scalar("INSERT INTO payments (cents) VALUES ($1) RETURNING id");
        let id: i64 = insert.bind(cents).fetch_one(connection).await?;
        Ok(id)
    });
    match payment.await? {
        TransactOutcome::Executed(id) => println!("paid: payment {id}"),
        TransactOutcome::Replayed(id) => println!("paid before: payment {id}"),
    }
    Ok(())
}
