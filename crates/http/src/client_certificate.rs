//! Callers that the verified certificate of a TLS connection names.

use std::sync::Arc;

/// The names in the certificate of a client. The listener, or a layer outside of this one, puts it into the extensions of each
/// request of a connection, after TLS has verified the certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCertificate {
    subject: Arc<[u8]>,
    alternative_names: Arc<[u8]>,
}

/// A name in a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CertificateName {
    /// The distinguished name of the subject.
    Subject,
    /// All alternative names of the subject together: DNS names, URIs, addresses and others.
    AlternativeNames,
}

impl CertificateName {
    /// The name in settings.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Subject => "subject",
            Self::AlternativeNames => "san",
        }
    }
}

impl ClientCertificate {
    /// The names of a verified certificate, in an encoding in which equal names are equal. Empty: the certificate has none.
    #[must_use]
    pub fn new(subject: &[u8], alternative_names: &[u8]) -> Self {
        Self { subject: subject.into(), alternative_names: alternative_names.into() }
    }

    /// The encoded name; empty if the certificate has none.
    #[must_use]
    pub fn name(&self, name: CertificateName) -> &[u8] {
        match name {
            CertificateName::Subject => &self.subject,
            CertificateName::AlternativeNames => &self.alternative_names,
        }
    }
}
