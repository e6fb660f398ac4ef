//! The way to a broker.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use lapin::uri::AMQPUri;
use lapin::{Connection, ConnectionProperties};
use oncegate_engine::ConfigError;
use tokio::time::timeout;

/// How long a connection may take, from the name of the host to the consumer.
pub(crate) const CONNECT_PATIENCE: Duration = Duration::from_secs(30);

/// How long the broker may take to say goodbye.
const GOODBYE_PATIENCE: Duration = Duration::from_secs(10);

type Connecting = Pin<Box<dyn Future<Output = lapin::Result<Connection>> + Send>>;

/// A broker, and how to connect to it: once, and again whenever the connection is lost.
#[derive(Clone)]
pub struct AmqpBroker {
    connect: Arc<dyn Fn() -> Connecting + Send + Sync>,
}

impl AmqpBroker {
    /// A broker at a URI, such as `amqp://user:password@host:5672/%2f`. With `?heartbeat=10` a connection that is dead is
    /// given up after about as many seconds; RabbitMQ asks for 60.
    ///
    /// `amqps` needs TLS in the client library: depend on `lapin` with the feature for the TLS that you want, for instance
    /// `rustls`; or use [`with`](Self::with).
    ///
    /// # Errors
    /// Where it is no such URI.
    pub fn new(uri: &str) -> Result<Self, ConfigError> {
        // What is wrong with it may name the password.
        let uri: AMQPUri = uri.parse().map_err(|_| {
            ConfigError::new("the address of the broker is no URI of AMQP (amqp://… or amqps://…)")
        })?;
        Ok(Self::with(move || Connection::connect_uri(uri.clone(), ConnectionProperties::default())))
    }

    /// A broker that is connected to in your own way: with certificates, a name for the connection, credentials that
    /// change. It is called for each connection. It should not turn on the client library's own recovery: deliveries of the
    /// connection that was lost would seem to be deliveries of the new one.
    pub fn with<F>(connect: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = lapin::Result<Connection>> + Send + 'static,
    {
        Self { connect: Arc::new(move || Box::pin(connect())) }
    }

    /// A new connection. It may take for ever.
    pub(crate) async fn connect(&self) -> lapin::Result<Connection> {
        (self.connect)().await
    }
}

impl fmt::Debug for AmqpBroker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AmqpBroker").finish_non_exhaustive()
    }
}

/// Ends a connection. An error of it is no news: it is over in any case.
pub(crate) async fn goodbye(connection: Connection) {
    if connection.status().connected()
        && let Ok(Err(error)) = timeout(GOODBYE_PATIENCE, connection.close(200, "OK".into())).await
    {
        tracing::debug!(%error, "a connection did not end in order");
    }
}
