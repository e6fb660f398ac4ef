//! A caller: asks under one key until the response is definite.

use oncegate::client::{Client, IdempotencyKey, Intent, reqwest::ReqwestTransport};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let service = std::env::args().nth(1).ok_or("give the address of the service")?;
    let client = Client::new(ReqwestTransport::new()?);
    let intent = Intent::post(format!("{service}/payments"))?
        .with_key(IdempotencyKey::derived("payment", ["order-123"]))?
        .with_body("order-123");
    let outcome = client.send(&intent).await?;
    println!("{:?}, replayed: {}: {}", outcome.verdict, outcome.replayed, outcome.text().trim());
    Ok(())
}
