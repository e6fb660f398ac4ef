//! Writes each message of an SQS queue to a table of PostgreSQL once.
//!
//! ```text
//! psql "$DATABASE_URL" -c 'CREATE TABLE ledger (id text NOT NULL)'
//! SQS_URL=http://127.0.0.1:4566 SQS_QUEUE=http://127.0.0.1:4566/000000000000/orders DATABASE_URL=postgres://… \
//!     cargo run -p oncegate-sqs --example sqs
//! ```
//!
//! This connects to a server on this machine, without TLS. For the real service, create the client with `aws-config`;
//! nothing else differs.
//!
//! The identity of a message is the attribute `oncegate-message-id`, as `SqsPublisher` writes it. With
//! `DIE=before-commit` or `DIE=before-ack` the process kills itself at message number `DIE_AT`: start it
//! again, and count the rows.

use std::env;
use std::error::Error;
use std::time::Duration;

use oncegate_broker_tests::consumer;
use oncegate_inbox::Order;
use oncegate_sqs::aws_sdk_sqs::Client;
use oncegate_sqs::aws_sdk_sqs::config::{BehaviorVersion, Config, Credentials, Region};
use oncegate_sqs::{SqsSource, SqsSourceOptions};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let config = Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .region(Region::new("us-east-1"))
        .credentials_provider(Credentials::new("key", "secret", None, None, "example"))
        .endpoint_url(env::var("SQS_URL")?)
        .http_client(aws_smithy_http_client::Builder::new().build_http())
        .build();
    let options = SqsSourceOptions::new()
        .with_visibility_timeout(consumer::seconds("REDELIVERY")?.unwrap_or(Duration::from_secs(60)))?
        .with_wait(Duration::from_secs(1))?
        .with_receivers(8)?;
    let source = SqsSource::open(Client::from_conf(config), env::var("SQS_QUEUE")?, options).await?;
    consumer::run(source, Order::None).await
}
