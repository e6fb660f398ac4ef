//! The options of a store.

use std::env;
use std::fmt;
use std::str::FromStr as _;
use std::time::Duration;

use oncegate_core::ConfigError;
use sqlx::ConnectOptions as _;
use sqlx::postgres::PgConnectOptions;
use tokio::runtime::Handle;

use crate::error::PostgresOpenError;

/// The parameters of libpq that are supported.
const PARAMETERS: [&str; 12] = [
    "sslmode", "sslrootcert", "sslcert", "sslkey", "host", "hostaddr", "port", "dbname", "user", "password",
    "application_name", "options",
];

/// The options of a store.
#[derive(Clone)]
#[non_exhaustive]
pub struct PostgresOptions {
    connect: PgConnectOptions,
    pub(crate) pool_size: u32,
    pub(crate) command_timeout: Duration,
    pub(crate) statement_timeout: Duration,
    pub(crate) inspect_interval: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) transaction_pooler: bool,
    pub(crate) max_batch: usize,
    pub(crate) runtime: Option<Handle>,
}

impl PostgresOptions {
    /// Reads `postgres://USER:PASSWORD@HOST:PORT/DATABASE?sslmode=verify-full&sslrootcert=FILE`.
    ///
    /// Missing parts come from the environment variables and the password file of libpq. If they name no user, it is the
    /// operating system's user who runs this program, as with `psql`. In addition to the parameters of libpq there is
    /// `pooler=transaction`, for [`PostgresOptions::with_transaction_pooler`].
    ///
    /// # Errors
    /// [`PostgresOpenError::Url`], which does not repeat the URL: the URL is invalid, or there is no name of a user.
    pub fn from_url(url: &str) -> Result<Self, PostgresOpenError> {
        let wrong = |what: &str| PostgresOpenError::Url(what.to_owned());
        if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
            return Err(wrong("the URL does not start with postgres:// or postgresql://"));
        }
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        let mut transaction_pooler = false;
        let mut parameters = Vec::new();
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let name = parameter.split('=').next().unwrap_or_default();
            if parameter == "pooler=transaction" {
                transaction_pooler = true;
            } else if PARAMETERS.contains(&name) {
                parameters.push(parameter);
            } else {
                return Err(wrong(&unknown_parameter(name)));
            }
        }
        let url =
            if parameters.is_empty() { base.to_owned() } else { format!("{base}?{}", parameters.join("&")) };
        // The parser's own words may repeat a part of the URL.
        let connect = PgConnectOptions::from_str(&url).map_err(|_| {
            let is_wrong =
                |parameter: &&&str| PgConnectOptions::from_str(&format!("postgres://host?{parameter}")).is_err();
            match parameters.iter().find(is_wrong).and_then(|parameter| parameter.split('=').next()) {
                Some("sslmode") => wrong(
                    "sslmode in the URL is none of disable, allow, prefer, require, verify-ca and verify-full",
                ),
                Some(name) => wrong(&format!("the value of {name} in the URL cannot be read")),
                None => wrong("the URL cannot be read; write postgres://USER@HOST:PORT/DATABASE"),
            }
        })?;
        if !names_user(base, &parameters) && env::var("PGUSER").is_err() && whoami::username().is_err() {
            return Err(wrong(
                "the URL names no user, and the operating system has no name for the one who runs this program; write \
                 postgres://USER@HOST:PORT/DATABASE, or set PGUSER",
            ));
        }
        let connect = connect
            .extra_float_digits(None)
            // A statement may hold what a record holds.
            .disable_statement_logging();
        let connect = match connect.get_application_name() {
            Some(_) => connect,
            None => connect.application_name("oncegate"),
        };
        Ok(Self {
            connect,
            pool_size: 8,
            command_timeout: Duration::from_secs(2),
            statement_timeout: Duration::from_secs(5),
            inspect_interval: Duration::from_secs(60),
            connect_timeout: Duration::from_secs(3),
            transaction_pooler,
            max_batch: 128,
            runtime: None,
        })
    }

    /// The most connections, at least 1. Default: 8. A call that finds none free waits for one, for the connect timeout at
    /// the longest.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_pool_size(mut self, connections: u32) -> Result<Self, ConfigError> {
        self.pool_size = ConfigError::check("the number of connections", connections, 1..=u32::MAX)?;
        Ok(self)
    }

    /// Sets the time for a command that a request waits for (a claim, a completion, a renewal, a lookup), at least 1 ms.
    /// Default: 2 s.
    ///
    /// After that time the store gives up the connection, and idle connections with it, because a firewall may have forgotten
    /// them. The command may have been carried out.
    ///
    /// # Errors
    /// If the time is out of bounds.
    pub fn with_command_timeout(mut self, timeout: Duration) -> Result<Self, ConfigError> {
        self.command_timeout =
            ConfigError::check("the command timeout", timeout, Duration::from_millis(1)..=Duration::MAX)?;
        Ok(self)
    }

    /// Sets the interval in which the server's settings about the flush of commits are read again, at least 10 ms. Default: 60 s.
    /// A change is logged, and shows in [`Store::capabilities`](oncegate_core::Store::capabilities) and
    /// [`Store::advisories`](oncegate_core::Store::advisories). [`Store::check`](oncegate_core::Store::check) reads them, too.
    ///
    /// # Errors
    /// If the interval is out of bounds.
    pub fn with_inspect_interval(mut self, interval: Duration) -> Result<Self, ConfigError> {
        self.inspect_interval = ConfigError::check(
            "the interval in which the server's settings are read",
            interval,
            Duration::from_millis(10)..=Duration::MAX,
        )?;
        Ok(self)
    }

    /// Sets the time for a statement, in this program and on the server, at least 1 ms. It bounds listings and purges, and the
    /// work of the server. Default: 5 s. A statement that takes longer may have been carried out.
    ///
    /// # Errors
    /// If the time is out of bounds.
    pub fn with_statement_timeout(mut self, timeout: Duration) -> Result<Self, ConfigError> {
        self.statement_timeout = ConfigError::check(
            "the time for a statement",
            timeout,
            Duration::from_millis(1)..=Duration::MAX,
        )?;
        Ok(self)
    }

    /// Sets the time that a call waits for a free or a new connection, at least 1 ms. Default: 3 s.
    ///
    /// # Errors
    /// If the time is out of bounds.
    pub fn with_connect_timeout(mut self, timeout: Duration) -> Result<Self, ConfigError> {
        self.connect_timeout =
            ConfigError::check("the time to connect", timeout, Duration::from_millis(1)..=Duration::MAX)?;
        Ok(self)
    }

    /// Set it if the connections go through a pooler that gives each transaction another session, such as PgBouncer in
    /// transaction mode.
    ///
    /// No statement is prepared, no setting is sent, and each call is one message. A call takes about 10 % longer, and a
    /// response twice the bytes.
    #[must_use]
    pub const fn with_transaction_pooler(mut self, through_pooler: bool) -> Self {
        self.transaction_pooler = through_pooler;
        self
    }

    /// Sets the most commands in one statement, from 1 to 1024. Default: 128. No command waits for a statement to fill. While
    /// the server is slow, statements are smaller, so that they take no longer than the [command
    /// timeout](Self::with_command_timeout).
    ///
    /// # Errors
    /// If the number is out of bounds.
    pub fn with_max_batch(mut self, commands: usize) -> Result<Self, ConfigError> {
        self.max_batch = ConfigError::check("the number of commands in one statement", commands, 1..=1024)?;
        Ok(self)
    }

    /// Connections live on this runtime, for calls from any runtime. Default: the one that opens the store.
    #[must_use]
    pub fn with_runtime(mut self, runtime: Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// The database, for messages: host, port and name, without the user and the password.
    #[must_use]
    pub fn database(&self) -> String {
        let connect = &self.connect;
        let host = connect
            .get_socket()
            .map_or_else(|| connect.get_host().to_owned(), |path| path.display().to_string());
        let name = connect.get_database().unwrap_or_else(|| connect.get_username());
        format!("postgres://{host}:{}/{name}", connect.get_port())
    }

    /// The options for upgrades, without a statement timeout.
    pub(crate) fn bare_connect_options(&self) -> PgConnectOptions {
        self.connect.clone()
    }

    /// For the session that listens.
    pub(crate) fn listen_options(&self) -> PgConnectOptions {
        let name = self.connect.get_application_name().unwrap_or("oncegate");
        self.connect_options().application_name(&format!("{name} listener"))
    }

    /// With the settings that a session gets when it starts, which a pooler would refuse or lose.
    pub(crate) fn connect_options(&self) -> PgConnectOptions {
        if self.transaction_pooler {
            return self.connect.clone().statement_cache_capacity(0);
        }
        let millis = self.statement_timeout.as_millis().to_string();
        self.connect.clone().options([
            ("statement_timeout", millis.as_str()),
            ("default_transaction_isolation", "read committed"),
            ("default_transaction_read_only", "off"),
            // The statements qualify the contract's functions; everything else in them is the server's own.
            ("search_path", "pg_catalog,pg_temp"),
            // The server checks if the client still exists. That keeps firewalls from forgetting an idle connection, and ends
            // the session of a dead client, with its locks. Ignored on Unix sockets.
            ("tcp_keepalives_idle", "30"),
            ("tcp_keepalives_interval", "10"),
            ("tcp_keepalives_count", "3"),
            ("tcp_user_timeout", "60000"),
        ])
    }
}

/// Names an unknown parameter, unless it may be a part of a password with `?` or `&` in it.
fn unknown_parameter(name: &str) -> String {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let parameter = if name.len() <= 32 && name.chars().all(is_name) { name } else { "a part of the URL" };
    format!(
        "{parameter} is not one of the parameters of a PostgreSQL URL: {} and pooler=transaction",
        PARAMETERS.join(", ")
    )
}

/// Tells if the URL names a user. Otherwise sqlx takes `PGUSER` or the operating system's user.
fn names_user(base: &str, parameters: &[&str]) -> bool {
    let authority =
        base.split_once("://").map_or(base, |(_, rest)| rest).split('/').next().unwrap_or_default();
    let in_authority =
        authority.rsplit_once('@').is_some_and(|(user, _)| !user.is_empty() && !user.starts_with(':'));
    in_authority || parameters.iter().any(|parameter| parameter.starts_with("user=") && parameter.len() > 5)
}

impl fmt::Debug for PostgresOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresOptions")
            .field("database", &self.database())
            .field("pool_size", &self.pool_size)
            .field("command_timeout", &self.command_timeout)
            .field("statement_timeout", &self.statement_timeout)
            .field("inspect_interval", &self.inspect_interval)
            .field("connect_timeout", &self.connect_timeout)
            .field("transaction_pooler", &self.transaction_pooler)
            .field("max_batch", &self.max_batch)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_in_the_url_is_seen_wherever_it_is() {
        for (base, parameters, named) in [
            ("postgres://app@h/shop", &[][..], true),
            ("postgres://app:secret@h/shop", &[][..], true),
            ("postgres://h/shop", &["sslmode=disable", "user=app"][..], true),
            ("postgres://h/shop", &["user="][..], false),
            ("postgres://h/shop", &[][..], false),
            ("postgres://h/sh@p", &[][..], false),
            ("postgres://:secret@h/shop", &[][..], false),
            ("postgres:///shop", &[][..], false),
        ] {
            assert_eq!(names_user(base, parameters), named, "{base} {parameters:?}");
        }
    }

    #[test]
    fn a_password_is_never_shown() {
        let url = "postgres://app:s3cret@db.example:6432/shop?sslmode=require&pooler=transaction";
        let options = PostgresOptions::from_url(url).unwrap();
        assert!(options.transaction_pooler);
        assert_eq!(options.database(), "postgres://db.example:6432/shop");
        assert!(!format!("{options:?}").contains("s3cret"));
        for url in [
            "postgres://app:s3cret@[::/shop",
            "postgres://app:s3cret@h:99999/shop",
            "postgres://h/shop?pasword=s3cret",
            "postgres://h/shop?sslmode=s3cret",
            "mysql://app:s3cret@h/shop",
        ] {
            let error = PostgresOptions::from_url(url).unwrap_err();
            assert!(
                !error.to_string().contains("s3cret") && !format!("{error:?}").contains("s3cret"),
                "{error:?}"
            );
        }
    }

    #[test]
    fn the_wrong_parameter_is_named() {
        for (url, named) in [
            ("postgres://h/shop?sslmode=disable&connect_timeout=5", "connect_timeout is not one of"),
            ("postgres://app:se?cr@h/shop", "a part of the URL is not one of"),
            ("postgres://h/shop?pooler=session", "pooler is not one of"),
            ("postgres://h/shop?user=a&sslmode=foo", "sslmode in the URL is none of disable, allow"),
            ("postgres://h/shop?sslmode=disable&port=1e3", "the value of port in the URL cannot be read"),
            ("postgres://h:1e3/shop?sslmode=disable", "write postgres://USER@HOST:PORT/DATABASE"),
        ] {
            let error = PostgresOptions::from_url(url).unwrap_err().to_string();
            assert!(error.contains(named), "{url}: {error}");
        }
    }

    #[test]
    fn values_out_of_their_bounds_are_refused() {
        let options = || PostgresOptions::from_url("postgres://app@db/shop").unwrap();
        assert!(options().with_pool_size(0).is_err() && options().with_pool_size(1).is_ok());
        assert!(options().with_max_batch(0).is_err() && options().with_max_batch(1025).is_err());
        assert!(options().with_max_batch(1024).is_ok());
        assert!(options().with_statement_timeout(Duration::ZERO).is_err());
        assert!(options().with_connect_timeout(Duration::ZERO).is_err());
        assert!(options().with_command_timeout(Duration::ZERO).is_err());
    }
}
