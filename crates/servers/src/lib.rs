//! Database servers for tests, from the system's packages: on free ports, in temporary directories, stopped when dropped; and
//! a client for services under test.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod client;
mod database;
mod example;
mod fault_proxy;
mod nats;
mod pgbouncer;
mod port;
mod postgres;
mod process;
mod program;
mod rabbitmq;
mod redis;
mod sqs;

pub use client::{ServiceResponse, send, until};
pub use database::PostgresDatabase;
pub use example::{express_orders, fastapi_orders, go_library, node_library, python, python_library};
pub use fault_proxy::{Fault, FaultProxy};
pub use nats::NatsServer;
pub use pgbouncer::PgBouncer;
pub use port::{free_port, unused_port};
pub use postgres::{PostgresOptions, PostgresServer, PostgresSession};
pub use process::{freeze, thaw};
pub use rabbitmq::{RabbitOptions, RabbitServer};
pub use redis::{Certificates, RedisCluster, RedisOptions, RedisSentinel, RedisServer};
pub use sqs::SqsServer;
