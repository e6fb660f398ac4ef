//! TLS handshakes that the sidecar ended. Without a trace of them, clients whose certificates are not accepted look like clients
//! that do not come.

use std::io;
use std::net::SocketAddr;

use oncegate_core::ErrorChain;
use oncegate_engine::LogThrottle;

use super::FULL_WARNING_INTERVAL;
use crate::admin::{Metrics, RefusedHandshake};

/// Counts the handshakes that ended with an error, and reports clients whose certificates are not accepted.
pub(super) struct RefusedHandshakes {
    metrics: Metrics,
    warnings: LogThrottle,
}

impl RefusedHandshakes {
    pub(super) fn new(metrics: Metrics) -> Self {
        Self { metrics, warnings: LogThrottle::new(FULL_WARNING_INTERVAL) }
    }

    pub(super) fn note(&self, client: SocketAddr, error: &io::Error) {
        let reason = reason(error);
        self.metrics.observe_refused_handshake(reason);
        if reason != RefusedHandshake::Other
            && let Some(suppressed) = self.warnings.pass()
        {
            tracing::warn!(
                suppressed, %client, error = %ErrorChain(error),
                "a client was refused because of its certificate (tls-client-ca, tls-client-crl)"
            );
        }
    }
}

fn reason(error: &io::Error) -> RefusedHandshake {
    match error.get_ref().and_then(|error| error.downcast_ref()) {
        Some(rustls::Error::NoCertificatesPresented) => RefusedHandshake::NoCertificate,
        Some(rustls::Error::InvalidCertificate(_) | rustls::Error::InvalidCertRevocationList(_)) => {
            RefusedHandshake::Certificate
        }
        _ => RefusedHandshake::Other,
    }
}
