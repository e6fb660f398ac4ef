//! A job: charges once for each order, however often it is started.

use oncegate::{EmbeddedStore, Engine, FunctionError, idempotent};

#[idempotent(key = "{order}", scope = "charge", errors = "unknown")]
async fn charge(engine: &Engine, order: String, cents: u64) -> Result<String, FunctionError<String>> {
    println!("charging {cents} cents for {order}");
    Ok(format!("receipt for {order}"))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let store = EmbeddedStore::open("charges")?;
    let engine = Engine::new(store);
    println!("{}", charge(&engine, "order-123".to_owned(), 500).await?);
    Ok(())
}
