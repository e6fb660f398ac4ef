//! The connection to a broker.

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

/// The timeout of a connection, from resolving the host name to the consumer.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// The timeout of closing a connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

type Connecting = Pin<Box<dyn Future<Output = lapin::Result<Connection>> + Send>>;

/// A broker, and the way to connect to it, also after a lost connection.
#[derive(Clone)]
pub struct AmqpBroker {
    connect: Arc<dyn Fn() -> Connecting + Send + Sync>,
}

impl AmqpBroker {
    /// Creates a broker from a URI, such as `amqp://user:password@host:5672/%2f`.
    ///
    /// With `?heartbeat=10` a dead connection is closed after about 10 seconds; RabbitMQ asks for 60. `amqps` needs TLS
    /// in the client library: depend on `lapin` with its feature for the TLS library of your choice, for example
    /// `rustls`. Without it nothing is sent, and connecting fails.
    ///
    /// # Errors
    /// [`ConfigError`] if the URI is invalid.
    pub fn new(uri: &str) -> Result<Self, ConfigError> {
        // The parser's error may contain the password.
        let uri: AMQPUri = uri.parse().map_err(|_| {
            ConfigError::new("the broker's address is not an AMQP URI (amqp://… or amqps://…)")
        })?;
        Ok(Self::with(move || encrypted_if_asked(uri.clone())))
    }

    /// Creates a broker with a connect function of your own: for certificates, a connection name, or changing
    /// credentials.
    ///
    /// It is called for each connection. Without a TLS feature the client library treats `amqps` as `amqp`, and sends
    /// the password unencrypted. Do not turn on the client library's own recovery: deliveries of the lost connection
    /// would look like deliveries of the new one.
    pub fn with<F>(connect: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = lapin::Result<Connection>> + Send + 'static,
    {
        Self { connect: Arc::new(move || Box::pin(connect())) }
    }

    /// Opens a connection. It may take forever.
    pub(crate) async fn connect(&self) -> lapin::Result<Connection> {
        (self.connect)().await
    }
}

/// Connects with TLS if the URI requires it, or fails. Without TLS support, the client library would connect unencrypted.
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

/// Closes a connection. Its errors do not matter, because it is over in any case.
pub(crate) async fn goodbye(connection: Connection) {
    if connection.status().connected()
        && let Ok(Err(error)) = timeout(CLOSE_TIMEOUT, connection.close(200, "OK".into())).await
    {
        tracing::debug!(error = %ErrorChain(&error), "a connection was not closed cleanly");
    }
}
