//! The address of an API, and connections to it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::Uri;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::error::ProbeError;

/// A connection, with or without TLS.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// An HTTP server: its resolved addresses, and how it is connected to.
#[derive(Clone)]
pub(crate) struct Target {
    /// Host and port for the field `Host`.
    pub(crate) authority: String,
    addresses: Vec<SocketAddr>,
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

impl Target {
    /// Resolves the address once, so that each request goes to what was checked.
    ///
    /// # Errors
    /// The address cannot be used, or is not on this machine and `may_leave` is false.
    pub(crate) async fn resolve(
        uri: &Uri,
        tls: Option<&Arc<ClientConfig>>,
        may_leave: bool,
    ) -> Result<Self, ProbeError> {
        let usage = |text: &str| ProbeError::Usage(format!("{uri}: {text}"));
        let authority =
            uri.authority().ok_or_else(|| usage("write the whole address, such as http://127.0.0.1:8080"))?;
        if authority.as_str().contains('@') {
            return Err(ProbeError::Usage(
                "remove user and password from the address; give them as headers of the operation".to_owned(),
            ));
        }
        let is_https = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(usage("the scheme must be http or https")),
        };
        let has_port = authority.as_str().strip_prefix(authority.host()).is_some_and(|rest| rest.len() > 1);
        if has_port && authority.port_u16().is_none() {
            return Err(usage("the port is not a number from 0 to 65535"));
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = authority.port_u16().unwrap_or(if is_https { 443 } else { 80 });
        let lookup =
            tokio::time::timeout(Duration::from_secs(10), tokio::net::lookup_host((host.as_str(), port)));
        let addresses: Vec<_> = match lookup.await {
            Ok(Ok(addresses)) => addresses.take(8).collect(),
            Ok(Err(error)) => {
                return Err(ProbeError::Unusable(format!("cannot find the address of {host}: {error}")));
            }
            Err(_) => {
                return Err(ProbeError::Unusable(format!("cannot find the address of {host} within 10 s")));
            }
        };
        if addresses.is_empty() {
            return Err(ProbeError::Unusable(format!("{host} has no address")));
        }
        if !may_leave && !addresses.iter().all(|address| address.ip().to_canonical().is_loopback()) {
            return Err(ProbeError::NotLoopback(host));
        }
        let tls = if is_https {
            let config = tls.ok_or_else(|| usage("no certificates are trusted"))?;
            let name = ServerName::try_from(host.clone()).map_err(|_| usage("the host name is not valid"))?;
            Some((TlsConnector::from(Arc::clone(config)), name))
        } else {
            None
        };
        Ok(Self { authority: authority.as_str().to_owned(), addresses, tls })
    }

    /// Returns `true` if connections are encrypted.
    pub(crate) fn is_https(&self) -> bool {
        self.tls.is_some()
    }

    /// Connects to the server itself.
    pub(crate) async fn connect(&self) -> Result<Box<dyn Stream>, String> {
        self.secure(self.tcp().await?).await
    }

    /// Connects without TLS.
    pub(crate) async fn tcp(&self) -> Result<TcpStream, String> {
        let stream = TcpStream::connect(self.addresses.as_slice()).await;
        stream.map_err(|error| format!("cannot connect to {}: {error}", self.authority))
    }

    /// Connects by way of a proxy at this address.
    pub(crate) async fn connect_through(&self, proxy: SocketAddr) -> Result<Box<dyn Stream>, String> {
        let stream = TcpStream::connect(proxy).await.map_err(|error| format!("cannot connect: {error}"))?;
        self.secure(stream).await
    }

    async fn secure(&self, stream: TcpStream) -> Result<Box<dyn Stream>, String> {
        // Without it, the halves of a request could be delayed; that changes no result.
        let _best_effort = stream.set_nodelay(true);
        Ok(match &self.tls {
            None => Box::new(stream),
            Some((connector, name)) => {
                let stream = connector.connect(name.clone(), stream).await;
                Box::new(stream.map_err(|error| plain(&format!("TLS with {}: {error}", self.authority)))?)
            }
        })
    }
}

/// The text without control characters. An error of TLS quotes names that the server has chosen.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
