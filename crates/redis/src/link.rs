//! The connection of a store, and connecting again.

use std::fs;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use oncegate_core::{Durability, ErrorChain, limits};
use redis::aio::MultiplexedConnection;
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{MultipleNodeRoutingInfo, Route, RoutingInfo, SingleNodeRoutingInfo, SlotAddr};
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _, Pipeline,
    ProtocolVersion, RedisConnectionInfo, RedisError, TlsCertificates, Value, cmd,
};
use tokio::runtime::Handle;
use tokio::time::timeout;
use tracing::{debug, info, warn};

use crate::error::{Failure, RedisOpenError};
use crate::options::{RedisOptions, Topology};
use crate::probe::{Server, Severity, check_fit, inspect};
use crate::slots::{Node, Slots};
use crate::watch::Pushes;

/// Pauses between attempts to connect.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_LAST: Duration = Duration::from_secs(2);

/// The interval at which the server's configuration is read again. It can change while the server runs.
pub(crate) const INSPECT_EVERY: Duration = Duration::from_secs(60);

const TOO_LATE: &str = "the server did not answer within the timeout";

/// The connection of a store: opened when it is needed, shared by all commands, and opened again after a loss.
pub(crate) struct Link {
    options: RedisOptions,
    /// The runtime of the connection's driver, for connections of any task.
    runtime: Handle,
    state: Mutex<State>,
    /// Held by the task that connects.
    connecting: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct State {
    connection: Option<Connection>,
    server: Server,
    /// The most durable state of the server since the store was opened.
    best: Option<Durability>,
    /// The reason why no new key may be claimed, if the server's configuration would lose it.
    unfit: Option<String>,
    number: u64,
    failed: Option<FailedConnect>,
}

struct FailedConnect {
    until: Instant,
    pause: Duration,
    why: String,
}

/// A connection with its number, cheap to clone.
#[derive(Clone)]
pub(crate) struct Connection {
    number: u64,
    wire: Wire,
}

#[derive(Clone)]
pub(crate) enum Wire {
    One(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl Link {
    /// Connects for the first time.
    pub(crate) async fn open(options: RedisOptions, runtime: Handle) -> Result<Arc<Self>, RedisOpenError> {
        let found = connect_within(&options).await?;
        found.fit?;
        let connection = Some(Connection { number: 0, wire: found.wire });
        let best = Some(found.server.durability());
        let state = State { connection, server: found.server, best, ..State::default() };
        let link = Arc::new(Self {
            options,
            runtime,
            state: Mutex::new(state),
            connecting: tokio::sync::Mutex::new(()),
        });
        link.inspect_every(INSPECT_EVERY);
        Ok(link)
    }

    /// Reads the server's configuration at an interval, as long as the store exists.
    pub(crate) fn inspect_every(self: &Arc<Self>, every: Duration) {
        let link = Arc::downgrade(self);
        self.runtime.spawn(async move {
            loop {
                tokio::time::sleep(every).await;
                let Some(link) = link.upgrade() else { return };
                let Some(connection) = link.state().connection.clone() else { continue };
                if let Err(error) = link.inspect(&connection).await {
                    debug!(error = %ErrorChain(&error), "the configuration of Redis could not be read, or is not fit");
                }
            }
        });
    }

    /// Reads the server's configuration, and notes it.
    ///
    /// # Errors
    /// [`RedisOpenError::Unfit`] if no new key may be claimed on this server.
    pub(crate) async fn inspect(&self, connection: &Connection) -> Result<(), RedisOpenError> {
        let server = inspect(&connection.wire, &self.options).await?;
        let fit = check_fit(&connection.wire, &self.options, &server).await;
        if let Err(error @ RedisOpenError::Unreachable(_)) = fit {
            return Err(error);
        }
        self.note(server, &fit);
        fit
    }

    /// Notes the inspection of the server, and logs new findings.
    fn note(&self, server: Server, fit: &Result<(), RedisOpenError>) {
        let unfit = fit.as_ref().err().map(ToString::to_string);
        let mut state = self.state();
        state.best = state.best.max(Some(server.durability()));
        let before = std::mem::replace(&mut state.server, server.clone()).findings();
        let was_unfit = std::mem::replace(&mut state.unfit, unfit.clone());
        drop(state);
        let shown = self.options.shown();
        for finding in server.findings().into_iter().filter(|finding| !before.contains(finding)) {
            match finding.severity {
                Severity::Fine => info!("store {shown}: {finding}"),
                Severity::Warning => warn!("store {shown}: {finding}"),
            }
        }
        match (was_unfit, unfit) {
            (None, Some(why)) => {
                warn!(
                    "store {shown}: {why}. Until then no new key is executed; stored responses are replayed"
                )
            }
            (Some(_), None) => info!("store {shown}: new keys are executed again"),
            _ => {}
        }
    }

    /// The reason why no new key may be claimed, if there is one.
    pub(crate) fn unfit(&self) -> Option<String> {
        self.state().unfit.clone()
    }

    pub(crate) const fn runtime(&self) -> &Handle {
        &self.runtime
    }

    pub(crate) const fn options(&self) -> &RedisOptions {
        &self.options
    }

    /// The server as it was last inspected.
    pub(crate) fn server(&self) -> Server {
        self.state().server.clone()
    }

    /// The most durable state since the store was opened and the present one, if that is weaker.
    pub(crate) fn weakened(&self) -> Option<(Durability, Durability)> {
        let state = self.state();
        state.best.map(|best| (best, state.server.durability())).filter(|(best, now)| now < best)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the connection, or the reason why there is none. Waits for at most one attempt to connect.
    pub(crate) async fn connection(self: &Arc<Self>) -> Result<Connection, Failure> {
        if let Some(known) = self.known() {
            return known;
        }
        let _one_at_a_time = timeout(self.options.connect_timeout, self.connecting.lock())
            .await
            .map_err(|_| Failure::NotSent("no connection to the server yet".to_owned()))?;
        if let Some(known) = self.known() {
            return known;
        }
        let link = self.clone();
        // It runs on the store's own runtime, because the connection's driver has to outlive the caller's runtime, and to its
        // end, even if the caller goes away.
        let attempt = self.runtime.spawn(async move {
            let result = connect_within(&link.options).await;
            link.connected(result)
        });
        attempt.await.unwrap_or_else(|_| Err(Failure::NotSent("the store is shutting down".to_owned())))
    }

    fn known(&self) -> Option<Result<Connection, Failure>> {
        let state = self.state();
        if let Some(connection) = &state.connection {
            return Some(Ok(connection.clone()));
        }
        let failed = state.failed.as_ref().filter(|failed| Instant::now() < failed.until)?;
        Some(Err(Failure::NotSent(failed.why.clone())))
    }

    fn connected(&self, result: Result<InspectedConnection, RedisOpenError>) -> Result<Connection, Failure> {
        match result {
            Ok(found) => {
                // This comes first, so that no key is claimed on an unfit server.
                self.note(found.server, &found.fit);
                let mut state = self.state();
                state.number += 1;
                let connection = Connection { number: state.number, wire: found.wire };
                state.connection = Some(connection.clone());
                state.failed = None;
                info!("connected to Redis again");
                Ok(connection)
            }
            Err(error) => {
                let mut state = self.state();
                let pause =
                    state.failed.as_ref().map_or(PAUSE_FIRST, |failed| (failed.pause * 2).min(PAUSE_LAST));
                let why = format!("cannot connect: {error}");
                if state.failed.is_none() {
                    warn!(error = %ErrorChain(&error), "cannot connect to Redis; trying again");
                } else {
                    debug!(error = %ErrorChain(&error), ?pause, "still cannot connect to Redis");
                }
                state.failed = Some(FailedConnect { until: Instant::now() + pause, pause, why: why.clone() });
                Err(Failure::NotSent(why))
            }
        }
    }

    /// Sends a command on the connection, and waits for its reply within the timeout.
    pub(crate) async fn send(self: &Arc<Self>, command: &Cmd) -> Result<Value, Failure> {
        self.send_on(&self.connection().await?, command).await
    }

    pub(crate) async fn send_on(&self, connection: &Connection, command: &Cmd) -> Result<Value, Failure> {
        let result = query(connection.wire.clone(), command, self.options.timeout).await;
        if let Err(failure) = &result {
            self.judge(connection, failure);
        }
        result
    }

    /// Sends a command to one node of a Cluster.
    pub(crate) async fn send_to(
        &self,
        connection: &Connection,
        (host, port): &(String, u16),
        command: Cmd,
    ) -> Result<Value, Failure> {
        let Wire::Cluster(cluster) = &connection.wire else {
            return self.send_on(connection, &command).await;
        };
        let node = SingleNodeRoutingInfo::ByAddress { host: host.clone(), port: *port };
        routed(cluster.clone(), command, RoutingInfo::SingleNode(node), self.options.timeout).await
    }

    /// Opens another connection, on which the server sends notifications.
    pub(crate) async fn listening(&self, pushes: Pushes) -> Result<Wire, Failure> {
        let connecting = timeout(self.options.connect_timeout, wire(&self.options, Some(&pushes)));
        let connected = connecting
            .await
            .map_err(|_| Failure::NotSent("no reply within the connect timeout".to_owned()))?;
        connected.map_err(|error| Failure::NotSent(error.to_string()))
    }

    /// Opens a separate connection: to this node of a Cluster, or to the server of the store.
    pub(crate) async fn separate_connection(&self, node: Option<&Node>) -> Result<Wire, Failure> {
        let options = &self.options;
        let connecting = async {
            match node {
                Some((host, port)) => {
                    install_provider(options);
                    Ok(Wire::One(connect_one(options, host, *port, None).await?))
                }
                None => wire(options, None).await,
            }
        };
        let connected = timeout(options.connect_timeout, connecting).await;
        let connected =
            connected.map_err(|_| Failure::NotSent("no reply within the connect timeout".to_owned()))?;
        connected.map_err(|error| Failure::NotSent(error.to_string()))
    }

    /// Reads the slots of the Cluster from the node that has this key.
    pub(crate) async fn slots(&self, connection: &Connection, key: &str) -> Result<Slots, Failure> {
        let Wire::Cluster(cluster) = &connection.wire else { return Err(Failure::UnexpectedReply) };
        let node = SingleNodeRoutingInfo::SpecificNode(Route::with_key(key, SlotAddr::Master));
        let mut command = cmd("CLUSTER");
        command.arg("SLOTS");
        let reply =
            routed(cluster.clone(), command, RoutingInfo::SingleNode(node), self.options.timeout).await?;
        let (host, _) = self.options.hosts.first().ok_or(Failure::UnexpectedReply)?;
        Slots::read(reply, host).ok_or(Failure::UnexpectedReply)
    }

    /// Gives the connection up if the failure makes it useless and it is still the current one. The client repairs the
    /// connection to a Cluster itself.
    pub(crate) fn judge(&self, connection: &Connection, failure: &Failure) {
        if !failure.spoils_connection() || connection.is_cluster() {
            return;
        }
        let mut state = self.state();
        if state.connection.as_ref().is_some_and(|current| current.number == connection.number) {
            state.connection = None;
            drop(state);
            warn!(%failure, "gave up the connection to Redis");
        }
    }
}

impl Connection {
    pub(crate) const fn is_cluster(&self) -> bool {
        matches!(self.wire, Wire::Cluster(_))
    }

    pub(crate) const fn number(&self) -> u64 {
        self.number
    }

    pub(crate) const fn wire(&self) -> &Wire {
        &self.wire
    }
}

/// Asks the server, or each primary of a Cluster.
pub(crate) async fn ask_all(wire: &Wire, command: &Cmd, limit: Duration) -> Result<Vec<Value>, Failure> {
    match wire {
        Wire::One(_) => Ok(vec![query(wire.clone(), command, limit).await?]),
        Wire::Cluster(cluster) => {
            let all = RoutingInfo::MultiNode((MultipleNodeRoutingInfo::AllMasters, None));
            match routed(cluster.clone(), command.clone(), all, limit).await? {
                Value::Map(pairs) => Ok(pairs.into_iter().map(|(_, value)| value).collect()),
                _ => Err(Failure::UnexpectedReply),
            }
        }
    }
}

/// Asks the server, or the node of a Cluster that has the key.
pub(crate) async fn ask_one(wire: &Wire, command: &Cmd, limit: Duration) -> Result<Value, Failure> {
    query(wire.clone(), command, limit).await
}

async fn query(wire: Wire, command: &Cmd, limit: Duration) -> Result<Value, Failure> {
    let reply = async {
        match wire {
            Wire::One(mut one) => command.query_async::<Value>(&mut one).await,
            Wire::Cluster(mut cluster) => command.query_async::<Value>(&mut cluster).await,
        }
    };
    bounded(reply, limit).await
}

/// Sends several commands at once, and returns the result of each.
pub(crate) async fn pipelined(
    wire: &Wire,
    pipeline: &Pipeline,
    limit: Duration,
) -> Result<Vec<Result<Value, Failure>>, Failure> {
    let Wire::One(one) = wire else { return Err(Failure::UnexpectedReply) };
    let (mut one, mut pipeline) = (one.clone(), pipeline.clone());
    pipeline.ignore_errors();
    let replies = timeout(limit, pipeline.query_async::<Value>(&mut one)).await;
    match replies.map_err(|_| Failure::Lost(TOO_LATE))?.map_err(|error| Failure::of(&error))? {
        Value::Array(replies) => {
            let each = |reply: Value| reply.extract_error().map_err(|error| Failure::of(&error));
            Ok(replies.into_iter().map(each).collect())
        }
        _ => Err(Failure::UnexpectedReply),
    }
}

async fn routed(
    mut cluster: ClusterConnection,
    command: Cmd,
    routing: RoutingInfo,
    limit: Duration,
) -> Result<Value, Failure> {
    bounded(cluster.route_command(command, routing), limit).await
}

async fn bounded(
    reply: impl Future<Output = Result<Value, RedisError>>,
    limit: Duration,
) -> Result<Value, Failure> {
    match timeout(limit, reply).await {
        Ok(Ok(value)) => value.extract_error().map_err(|error| Failure::of(&error)),
        Ok(Err(error)) => Err(Failure::of(&error)),
        Err(_) => Err(Failure::Lost(TOO_LATE)),
    }
}

/// A connection with the inspection of its server.
struct InspectedConnection {
    wire: Wire,
    server: Server,
    fit: Result<(), RedisOpenError>,
}

async fn connect_within(options: &RedisOptions) -> Result<InspectedConnection, RedisOpenError> {
    match timeout(options.connect_timeout, connect(options)).await {
        Ok(result) => result,
        Err(_) => Err(RedisOpenError::Unreachable(format!("{} did not answer in time", options.shown()))),
    }
}

async fn connect(options: &RedisOptions) -> Result<InspectedConnection, RedisOpenError> {
    let wire = wire(options, None).await?;
    let server = inspect(&wire, options).await?;
    match check_fit(&wire, options, &server).await {
        Err(error @ RedisOpenError::Unreachable(_)) => Err(error),
        fit => Ok(InspectedConnection { wire, server, fit }),
    }
}

/// Connects; with `pushes`, for notifications.
async fn wire(options: &RedisOptions, pushes: Option<&Pushes>) -> Result<Wire, RedisOpenError> {
    install_provider(options);
    Ok(match &options.topology {
        Topology::Single => {
            let (host, port) = options.hosts.first().ok_or_else(|| unfit("the URL names no host"))?;
            Wire::One(connect_one(options, host, *port, pushes).await?)
        }
        Topology::Sentinel { service } => Wire::One(connect_primary(options, service, pushes).await?),
        Topology::Cluster => Wire::Cluster(connect_cluster(options, pushes).await?),
    })
}

fn install_provider(options: &RedisOptions) {
    if options.tls && rustls::crypto::CryptoProvider::get_default().is_none() {
        // If another task installs its provider first, that one is as good.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    }
}

async fn connect_one(
    options: &RedisOptions,
    host: &str,
    port: u16,
    pushes: Option<&Pushes>,
) -> Result<MultiplexedConnection, RedisOpenError> {
    let (mut login, mut config) = (login(options, options.database), config(options));
    if let Some(pushes) = pushes {
        login = login.set_protocol(ProtocolVersion::RESP3);
        config = config.set_push_sender(pushes.clone());
    }
    let client = client(options, host, port, login)?;
    let connection = client.get_multiplexed_async_connection_with_config(&config).await;
    connection.map_err(|error| connect_error(host, port, &error))
}

/// Asks one sentinel after the other for the primary. The server itself has to confirm its role.
async fn connect_primary(
    options: &RedisOptions,
    service: &str,
    pushes: Option<&Pushes>,
) -> Result<MultiplexedConnection, RedisOpenError> {
    let mut why = unfit("the URL names no sentinel");
    for (host, port) in &options.hosts {
        match ask_sentinel(options, service, host, *port).await {
            Ok((host, port)) => {
                let connection = connect_one(options, &host, port, pushes).await?;
                let role = query(Wire::One(connection.clone()), &cmd("ROLE"), options.timeout).await?;
                return match role {
                    Value::Array(role) if role.first() == Some(&Value::BulkString(b"master".to_vec())) => {
                        Ok(connection)
                    }
                    _ => Err(RedisOpenError::Unreachable(format!(
                        "{host}:{port}, which a sentinel names as the primary, is not one (yet)"
                    ))),
                };
            }
            Err(error) => why = error,
        }
    }
    Err(why)
}

async fn ask_sentinel(
    options: &RedisOptions,
    service: &str,
    host: &str,
    port: u16,
) -> Result<(String, u16), RedisOpenError> {
    // Sentinels have their own users; the user of the URL is for the server.
    let client = client(options, host, port, RedisConnectionInfo::default())?;
    // Only a part of the time, so that the other sentinels can be asked, too.
    let part = options.connect_timeout / 4;
    let sentinel = timeout(part, client.get_multiplexed_async_connection_with_config(&config(options))).await;
    let sentinel = sentinel
        .map_err(|_| {
            RedisOpenError::Unreachable(format!("the sentinel {host}:{port} did not answer in time"))
        })?
        .map_err(|error| connect_error(host, port, &error))?;
    let mut command = cmd("SENTINEL");
    command.arg("GET-MASTER-ADDR-BY-NAME").arg(service);
    let reply = query(Wire::One(sentinel), &command, part).await.map_err(|failure| match failure {
        failure if failure.is("ERR") => RedisOpenError::Unfit(format!(
            "{host}:{port} is not a sentinel: it does not know the command SENTINEL; name a plain server redis://"
        )),
        failure => failure.into(),
    })?;
    let unknown =
        || RedisOpenError::Unreachable(format!("the sentinel {host}:{port} knows no primary of {service}"));
    redis::from_redis_value::<Option<(String, u16)>>(reply).ok().flatten().ok_or_else(unknown)
}

async fn connect_cluster(
    options: &RedisOptions,
    pushes: Option<&Pushes>,
) -> Result<ClusterConnection, RedisOpenError> {
    let nodes = options.hosts.iter().map(|(host, port)| info(options, host, *port, login(options, 0)));
    let mut builder = ClusterClient::builder(nodes.collect::<Result<Vec<_>, _>>()?)
        .connection_timeout(options.connect_timeout)
        .response_timeout(options.timeout)
        .retries(3);
    if options.tls {
        builder = builder.certs(certificates(options)?);
    }
    if let Some(pushes) = pushes {
        builder = builder.use_protocol(ProtocolVersion::RESP3).push_sender(pushes.clone());
    }
    let cluster = builder.build().map_err(|error| RedisOpenError::from(Failure::of(&error)))?;
    let connection = cluster.get_async_connection().await;
    connection.map_err(|error| match Failure::of(&error) {
        failure if failure.is("ERR") => RedisOpenError::Unfit(format!(
            "{} is no Cluster: its hosts refuse the command CLUSTER; name a single server redis://",
            options.shown()
        )),
        failure => RedisOpenError::Unreachable(format!("{}: {failure}", options.shown())),
    })
}

fn login(options: &RedisOptions, database: u32) -> RedisConnectionInfo {
    let mut login = RedisConnectionInfo::default()
        .set_db(i64::from(database))
        .set_lib_name("oncegate", env!("CARGO_PKG_VERSION"));
    if let Some(user) = &options.user {
        login = login.set_username(user);
    }
    if let Some(password) = &options.password {
        login = login.set_password(password);
    }
    login
}

fn info(
    options: &RedisOptions,
    host: &str,
    port: u16,
    login: RedisConnectionInfo,
) -> Result<ConnectionInfo, RedisOpenError> {
    let address = if options.tls {
        ConnectionAddr::TcpTls { host: host.to_owned(), port, insecure: false, tls_params: None }
    } else {
        ConnectionAddr::Tcp(host.to_owned(), port)
    };
    let info = address.into_connection_info().map_err(|error| RedisOpenError::from(Failure::of(&error)))?;
    Ok(info.set_redis_settings(login))
}

fn client(
    options: &RedisOptions,
    host: &str,
    port: u16,
    login: RedisConnectionInfo,
) -> Result<Client, RedisOpenError> {
    let info = info(options, host, port, login)?;
    let client =
        if options.tls { Client::build_with_tls(info, certificates(options)?) } else { Client::open(info) };
    // The error could repeat the arguments.
    client.map_err(|_| unfit("the TLS certificates or the address cannot be used"))
}

fn certificates(options: &RedisOptions) -> Result<TlsCertificates, RedisOpenError> {
    let read = |path: &std::path::PathBuf| {
        fs::read(path).map_err(|error| RedisOpenError::Unfit(format!("ca: {}: {error}", path.display())))
    };
    Ok(TlsCertificates { client_tls: None, root_cert: options.ca.as_ref().map(read).transpose()? })
}

/// The store has its own timeouts.
fn config(options: &RedisOptions) -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        .set_connection_timeout(Some(options.connect_timeout))
        .set_response_timeout(None)
        .set_pipeline_buffer_size(limits::MAX_WAITERS)
}

fn connect_error(host: &str, port: u16, error: &RedisError) -> RedisOpenError {
    match Failure::of(error) {
        // The client reports this for SELECT. The server's own text is left out.
        Failure::Refused(_) if error.to_string().contains("switch database") => {
            RedisOpenError::Unfit(format!(
                "{host}:{port}: the server refuses the database of the URL: there is no such database, or the user may not use it"
            ))
        }
        // Errors of the operating system and of TLS: refused, unknown host, invalid certificate.
        Failure::Lost(_) => RedisOpenError::Unreachable(format!("{host}:{port}: {}", ErrorChain(error))),
        failure => match RedisOpenError::from(failure) {
            RedisOpenError::Unreachable(what) => {
                RedisOpenError::Unreachable(format!("{host}:{port}: {what}"))
            }
            RedisOpenError::Unfit(what) => RedisOpenError::Unfit(format!("{host}:{port}: {what}")),
        },
    }
}

fn unfit(what: &str) -> RedisOpenError {
    RedisOpenError::Unfit(what.to_owned())
}
