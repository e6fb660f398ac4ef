//! The HTTP client of `oncegate call`: HTTP/1.1 or HTTP/2 by hyper, TLS by rustls.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::{self, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use oncegate_client::tower::TowerTransport;
use oncegate_client::{AttemptFailureKind, was_refused_by_http2};
use oncegate_core::ErrorChain;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};

use crate::proxy::interim::{BoundedClient, BoundedConnector};
use crate::proxy::{MAX_LIBRARY_HEAD, MAX_LINES, tls};

type Connector = BoundedConnector<HttpsConnector<HttpConnector>>;

pub(super) type Wire = TowerTransport<BoundedClient<Connector, Full<Bytes>>, Full<Bytes>>;

/// A client that trusts the certificates in this file, or those of the system, which are read only if `is_https`.
pub(super) fn wire(cacert: Option<&Path>, is_https: bool, connect_timeout: Duration) -> Result<Wire, String> {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_connect_timeout(Some(connect_timeout));
    let config = match cacert {
        Some(file) => trusting_file(file)?,
        None => tls::trusting_system(is_https).map_err(|error| format!("{error}; give --cacert"))?,
    };
    let builder = HttpsConnectorBuilder::new().with_tls_config(config);
    let connector = builder.https_or_http().enable_all_versions().wrap_connector(http);
    let client = legacy::Client::builder(TokioExecutor::new())
        // The policy decides about retries.
        .retry_canceled_requests(false)
        .http1_max_headers(MAX_LINES)
        .http2_max_header_list_size(MAX_LIBRARY_HEAD)
        .build(BoundedConnector(connector));
    Ok(TowerTransport::new(BoundedClient(client)).with_error_classifier(classify))
}

/// A client that trusts the certificates in this file, and no others.
pub(crate) fn trusting_file(file: &Path) -> Result<ClientConfig, String> {
    let at = |why: &str| format!("--cacert {}: {why}", file.display());
    let say = |error: &dyn Error| at(&ErrorChain(error).to_string());
    let mut roots = RootCertStore::empty();
    let text = tls::pem(file).map_err(|error| say(&error))?;
    for certificate in CertificateDer::pem_slice_iter(&text) {
        roots.add(certificate.map_err(|error| say(&error))?).map_err(|error| say(&error))?;
    }
    if roots.is_empty() {
        return Err(at("there is no certificate in it"));
    }
    tls::trusting(roots)
}

fn classify(error: &(dyn Error + 'static)) -> AttemptFailureKind {
    if error.downcast_ref::<legacy::Error>().is_some_and(legacy::Error::is_connect) {
        AttemptFailureKind::NotSent
    } else if was_refused_by_http2(error) {
        AttemptFailureKind::NotProcessed
    } else {
        AttemptFailureKind::Doubtful
    }
}
