//! The way to a broker.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use lapin::runtime::default_runtime;
use lapin::tcp::AMQPUriTcpExt as _;
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{AsyncTcpStream, Connection, ConnectionProperties};
use oncegate_core::ErrorChain;
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
    /// `rustls`. Without, nothing is sent, and connecting fails.
    ///
    /// # Errors
    /// Where it is no such URI.
    pub fn new(uri: &str) -> Result<Self, ConfigError> {
        // What is wrong with it may name the password.
        let uri: AMQPUri = uri.parse().map_err(|_| {
            ConfigError::new("the address of the broker is no URI of AMQP (amqp://… or amqps://…)")
        })?;
        Ok(Self::with(move || encrypted_if_asked(uri.clone())))
    }

    /// A broker that is connected to in your own way: with certificates, a name for the connection, credentials that
    /// change. It is called for each connection. Without a feature for TLS the client library takes `amqps` for `amqp`, and sends
    /// the password in the clear. It should not turn on the client library's own recovery: deliveries of the
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

/// Connects with TLS where the URI says so, or not at all: left alone, the client library speaks in the clear where it was
/// built without TLS.
async fn encrypted_if_asked(uri: AMQPUri) -> lapin::Result<Connection> {
    let properties = ConnectionProperties::default();
    let connecting = Connection::connector(
        uri,
        default_runtime()?,
        async |uri, runtime| {
            let stream = uri.connect_async(&runtime).await?;
            if uri.scheme == AMQPScheme::AMQPS && matches!(stream, AsyncTcpStream::Plain(_)) {
                let why = "the address of the broker is amqps, and lapin was built without TLS";
                return Err(io::Error::other(why).into());
            }
            Ok(stream)
        },
        properties,
    );
    connecting.await
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
        tracing::debug!(error = %ErrorChain(&error), "a connection did not end in order");
    }
}
