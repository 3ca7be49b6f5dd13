//! The authorities whose word counts about certificates.

use std::sync::Arc;

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use super::TlsError;

/// Certificates that they have signed are believed.
#[derive(Debug, Clone)]
pub struct TrustRoots(pub Arc<RootCertStore>);

impl TrustRoots {
    /// Reads them from PEM.
    ///
    /// # Errors
    /// There is none, or one of them cannot be read.
    pub fn from_pem(pem: &[u8]) -> Result<Self, TlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(pem) {
            roots.add(certificate.map_err(TlsError::UnreadableCertificate)?).map_err(TlsError::NotCaCertificate)?;
        }
        if roots.is_empty() {
            return Err(TlsError::NoCertificate);
        }
        Ok(TrustRoots(Arc::new(roots)))
    }

    /// Those of the system. One among many that cannot be read is passed over, as everybody does.
    ///
    /// # Errors
    /// There is none.
    pub fn from_system() -> Result<Self, TlsError> {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            return Err(TlsError::NoSystemRoots);
        }
        Ok(TrustRoots(Arc::new(roots)))
    }
}
