//! TLS on both sides, by rustls.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use http::uri::Scheme;
use hyper_rustls::{ConfigBuilderExt as _, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use oncegate_core::ErrorChain;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::time::timeout;
use tower_service::Service;

use super::certificate::{self, Validity};
use super::headers::rewrite;
use super::interim::BoundedStream;
use crate::config::{TlsFiles, Upstream, UpstreamProtocol};
use crate::files;

/// The TLS configuration of the listener.
#[derive(Clone)]
pub(crate) struct ListenerTls {
    pub(crate) config: Arc<ServerConfig>,
    /// The dates of the first certificate, which is the listener's own; `None` if they cannot be read.
    pub(crate) validity: Option<Validity>,
    /// The dates of the list of revoked certificates that ends first.
    pub(crate) revocations: Option<Validity>,
}

impl ListenerTls {
    /// Checks that this configuration may replace the one in use.
    ///
    /// # Errors
    /// If clients would refuse its certificate, and accept the one in use. If a list of revoked certificates has expired, so that
    /// clients would be refused, and those in use have not.
    pub(super) fn may_replace(&self, before: Option<&Self>, files: &TlsFiles) -> Result<(), String> {
        let (now, certificate) = (certificate::now(), &files.cert);
        let has_expired = |tls: &Self| tls.revocations.is_some_and(|lists| now >= lists.not_after);
        if let (Some(lists), Some(file)) = (self.revocations, &files.client_crl)
            && has_expired(self)
            && before.is_some_and(|before| !has_expired(before))
        {
            return Err(format!(
                "{}: a list of revoked certificates expired at {}; its authority's clients would be refused",
                file.display(),
                certificate::shown(lists.not_after)
            ));
        }
        let refused = self.validity.filter(|validity| !validity.includes(now));
        match (refused.and_then(|validity| validity.warning(now)), before.and_then(|before| before.validity))
        {
            (Some(what), Some(before)) if before.includes(now) => Err(format!(
                "{}: the certificate {what}; the one in use is valid until {}",
                certificate.display(),
                certificate::shown(before.not_after)
            )),
            _ => Ok(()),
        }
    }
}

/// Reads a certificate chain, its key and the authorities of clients, in PEM, for a listener that offers HTTP/2 and HTTP/1.1.
pub(crate) fn server_config(files: &TlsFiles) -> Result<ListenerTls, String> {
    let (certificate, key) = (&files.cert, &files.key);
    let say = |path: &Path, what: &str, error: &dyn std::error::Error| {
        format!("{}: {what}: {}", path.display(), ErrorChain(error))
    };
    let chain: Vec<_> = pem(certificate)
        .and_then(|text| CertificateDer::pem_slice_iter(&text).collect())
        .map_err(|error| say(certificate, "cannot read certificates", &error))?;
    if chain.is_empty() {
        return Err(format!("{}: there is no certificate in it", certificate.display()));
    }
    let private = pem(key)
        .and_then(|text| PrivateKeyDer::from_pem_slice(&text))
        .map_err(|error| say(key, "cannot read the private key", &error))?;
    let validity = chain.first().and_then(|first| Validity::of(first));
    let config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| ErrorChain(&error).to_string())?;
    let lists = files.client_crl.as_deref().map(revocation_lists).transpose()?.unwrap_or_default();
    let revocations =
        lists.iter().filter_map(|list| Validity::of_list(list)).min_by_key(|list| list.not_after);
    let config = match &files.client_ca {
        None => config.with_no_client_auth(),
        Some(file) => config.with_client_cert_verifier(client_verifier(file, lists)?),
    };
    let mut config = config.with_single_cert(chain, private).map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => format!(
            "{}: the certificate does not belong to the private key in {}",
            certificate.display(),
            key.display()
        ),
        error => say(certificate, "cannot be used", &error),
    })?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    if files.client_ca.is_some() {
        // A resumed session does not verify the certificate again, which may have ended meanwhile.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
    }
    Ok(ListenerTls { config: Arc::new(config), validity, revocations })
}

/// The text of a file in PEM.
pub(crate) fn pem(file: &Path) -> Result<Vec<u8>, pem::Error> {
    files::read(file, files::MAX_PEM).map_err(pem::Error::Io)
}

/// Reads lists of revoked certificates, in PEM.
fn revocation_lists(file: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, String> {
    let lists = pem(file)
        .and_then(|text| CertificateRevocationListDer::pem_slice_iter(&text).collect::<Result<Vec<_>, _>>());
    let lists = lists.map_err(|error| {
        format!("{}: cannot read lists of revoked certificates: {}", file.display(), ErrorChain(&error))
    })?;
    if lists.is_empty() {
        return Err(format!("{}: there is no list of revoked certificates in it (X509 CRL)", file.display()));
    }
    Ok(lists)
}

/// Accepts the certificates of clients that these authorities have signed and that no list revokes. With lists, a certificate is
/// refused, too, if an authority has none, or only one that has expired: it may be revoked.
fn client_verifier(
    file: &Path,
    lists: Vec<CertificateRevocationListDer<'static>>,
) -> Result<Arc<dyn ClientCertVerifier>, String> {
    let say = |what: &str, error: &dyn std::error::Error| {
        format!("{}: {what}: {}", file.display(), ErrorChain(error))
    };
    let authorities =
        pem(file).and_then(|text| CertificateDer::pem_slice_iter(&text).collect::<Result<Vec<_>, _>>());
    let authorities = authorities.map_err(|error| say("cannot read certificates", &error))?;
    if authorities.is_empty() {
        return Err(format!("{}: there is no certificate in it", file.display()));
    }
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(authority).map_err(|error| say("cannot be used as an authority", &error))?;
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider());
    let verifier = verifier.with_crls(lists).enforce_revocation_expiration().build();
    verifier.map_err(|error| match error {
        VerifierBuilderError::InvalidCrl(error) => {
            format!("a list of revoked certificates (tls-client-crl) cannot be used: {error:?}")
        }
        error => say("cannot be used as an authority", &error),
    })
}

/// Connects to the service, independent of the host that a request asks for.
#[derive(Clone)]
pub(crate) struct ToService {
    connector: HttpsConnector<HttpConnector>,
    to: Uri,
    connect_timeout: Duration,
}

impl Service<Uri> for ToService {
    type Response = BoundedStream<<HttpsConnector<HttpConnector> as Service<Uri>>::Response>;
    type Error = <HttpsConnector<HttpConnector> as Service<Uri>>::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Service::poll_ready(&mut self.connector, cx)
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let connecting = Service::call(&mut self.connector, self.to.clone());
        let connect_timeout = self.connect_timeout;
        // The timeout of the inner connector does not include the TLS handshake.
        Box::pin(async move {
            let connected = timeout(connect_timeout, connecting).await.unwrap_or_else(|_| {
                let what = "the connection was not made within upstream-connect-timeout";
                Err(io::Error::new(io::ErrorKind::TimedOut, what).into())
            });
            connected.map(BoundedStream::new)
        })
    }
}

/// Connects to the upstream; `https` is verified against the system's certificates.
pub(crate) fn connector(
    to: &Upstream,
    protocol: UpstreamProtocol,
    connect_timeout: Duration,
) -> Result<ToService, String> {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_connect_timeout(Some(connect_timeout));
    let is_https = to.scheme == Scheme::HTTPS;
    let builder = HttpsConnectorBuilder::new().with_tls_config(trusting_system(is_https)?).https_or_http();
    let connector = match protocol {
        UpstreamProtocol::Auto => builder.enable_all_versions().wrap_connector(http),
        UpstreamProtocol::Http1 => builder.enable_http1().wrap_connector(http),
        UpstreamProtocol::Http2 => builder.enable_http2().wrap_connector(http),
    };
    Ok(ToService { connector, to: rewrite(to, &Uri::default(), None), connect_timeout })
}

/// Checks that the file in `SSL_CERT_FILE` can be read. The library would use the certificates of the system instead.
pub(crate) fn check_certificate_file() -> Result<(), String> {
    let Some(file) = std::env::var_os("SSL_CERT_FILE").filter(|file| !file.is_empty()) else { return Ok(()) };
    let read = files::read(Path::new(&file), files::MAX_PEM).map(drop);
    read.map_err(|error| {
        format!(
            "SSL_CERT_FILE: {}: cannot read the certificates to trust: {error}",
            Path::new(&file).display()
        )
    })
}

/// A hint for an error of a TLS handshake, for an operator.
pub(crate) fn handshake_hint(error: &str) -> &'static str {
    if error.contains("UnknownIssuer") {
        "; if the service has a certificate authority of its own, name its certificate in the environment of this command and of \
         the sidecar: SSL_CERT_FILE=ca.pem"
    } else if error.contains("InvalidContentType") {
        "; the service does not speak TLS on this port: write http:// instead of https://"
    } else {
        ""
    }
}

/// A client that trusts the system's certificates. Reading them takes milliseconds and fails if there are none, so without
/// HTTPS it trusts no certificate.
pub(crate) fn trusting_system(is_https: bool) -> Result<ClientConfig, String> {
    if !is_https {
        return trusting(RootCertStore::empty());
    }
    check_certificate_file()?;
    let config = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    let config = config.map_err(|error| ErrorChain(&error).to_string())?.with_native_roots();
    Ok(config
        .map_err(|error| format!("cannot read the system's certificates: {}", ErrorChain(&error)))?
        .with_no_client_auth())
}

/// A client that trusts these certificates.
pub(crate) fn trusting(roots: RootCertStore) -> Result<ClientConfig, String> {
    let config = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    Ok(config
        .map_err(|error| ErrorChain(&error).to_string())?
        .with_root_certificates(roots)
        .with_no_client_auth())
}

pub(crate) fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}
