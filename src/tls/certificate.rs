//! A certificate chain with its key, from PEM.

use std::sync::Arc;

use rustls::client::verify_server_name;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::ParsedCertificate;
use rustls::sign::CertifiedKey;
use x509_parser::certificate::Validity;
use x509_parser::parse_x509_certificate;

use super::TlsError;

/// A certificate chain with its key.
#[derive(Debug)]
pub struct Certificate {
    /// The same for the library.
    pub certified_key: Arc<CertifiedKey>,
    validity: Validity,
}

impl Certificate {
    /// Reads a chain and its key.
    ///
    /// # Errors
    /// One of them cannot be read, has nothing fitting in it, or they do not belong together.
    pub fn from_pem(chain: &[u8], key: &[u8]) -> Result<Self, TlsError> {
        let chain = CertificateDer::pem_slice_iter(chain).collect::<Result<Vec<_>, _>>();
        let chain = chain.map_err(TlsError::UnreadableCertificate)?;
        let Some(leaf) = chain.first() else { return Err(TlsError::NoCertificate) };
        let (_, parsed) = parse_x509_certificate(leaf).map_err(|_| TlsError::MalformedCertificate)?;
        let validity = parsed.validity().clone();
        let key = PrivateKeyDer::from_pem_slice(key).map_err(TlsError::UnreadableKey)?;
        let chain = CertifiedKey::from_der(chain, key, &default_provider()).map_err(TlsError::KeyMismatch)?;
        Ok(Certificate { certified_key: Arc::new(chain), validity })
    }

    /// Sees that the time is within its validity. That of the rest of the chain is the client's business: an expired
    /// cross-signature may stand there on purpose.
    ///
    /// # Errors
    /// It is too late or too early, in seconds since the Unix epoch.
    pub fn check_validity(&self, now_s: i64) -> Result<(), TlsError> {
        match &self.validity {
            validity if now_s > validity.not_after.timestamp() => Err(TlsError::Expired(validity.not_after)),
            validity if now_s < validity.not_before.timestamp() => Err(TlsError::NotYetValid(validity.not_before)),
            _ => Ok(()),
        }
    }

    pub(super) fn matches_server_name(&self, name: &ServerName<'_>) -> bool {
        let parsed = self.certified_key.cert.first().map(ParsedCertificate::try_from);
        parsed.is_some_and(|parsed| parsed.is_ok_and(|certificate| verify_server_name(&certificate, name).is_ok()))
    }
}
