//! TLS towards clients: certificates chosen by the name that the client asks for (SNI, RFC 6066 §3).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::verify_server_name;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{ClientHello, ParsedCertificate, ResolvesServerCert, ServerConfig};
use rustls::sign::CertifiedKey;

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum TlsError {
    #[error("the certificate in {} cannot be read: {source}", path.display())]
    Certificate { path: PathBuf, source: pem::Error },
    #[error("{} has no certificate", path.display())]
    Empty { path: PathBuf },
    #[error("the key in {} cannot be read: {source}", path.display())]
    Key { path: PathBuf, source: pem::Error },
    #[error("certificate and key do not fit: {0}")]
    Mismatch(#[source] rustls::Error),
    #[error("TLS cannot be set up: {0}")]
    Setup(#[source] rustls::Error),
}

/// A certificate chain with its key.
#[derive(Debug)]
pub struct Certificate(Arc<CertifiedKey>);

impl Certificate {
    /// Reads a chain and a key from PEM files.
    ///
    /// # Errors
    /// A file cannot be read, has nothing fitting in it, or the two do not belong together.
    pub fn read(chain: &Path, key: &Path) -> Result<Self, TlsError> {
        let unreadable = |source| TlsError::Certificate { path: chain.to_owned(), source };
        let certificates = CertificateDer::pem_file_iter(chain).map_err(unreadable)?;
        let certificates = certificates.collect::<Result<Vec<_>, _>>().map_err(unreadable)?;
        if certificates.is_empty() {
            return Err(TlsError::Empty { path: chain.to_owned() });
        }
        let key = PrivateKeyDer::from_pem_file(key).map_err(|source| TlsError::Key { path: key.to_owned(), source })?;
        let certified = CertifiedKey::from_der(certificates, key, &default_provider()).map_err(TlsError::Mismatch)?;
        Ok(Certificate(Arc::new(certified)))
    }

    fn is_for(&self, name: &ServerName<'_>) -> bool {
        let parsed = self.0.cert.first().map(ParsedCertificate::try_from);
        parsed.is_some_and(|parsed| parsed.is_ok_and(|certificate| verify_server_name(&certificate, name).is_ok()))
    }
}

/// Chooses the first certificate that is for the name; the very first if none is, or no name was sent.
#[derive(Debug)]
struct BySni(Vec<Certificate>);

impl ResolvesServerCert for BySni {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let name = hello.server_name().and_then(|name| ServerName::try_from(name).ok());
        let fitting = name.and_then(|name| self.0.iter().find(|certificate| certificate.is_for(&name)));
        fitting.or(self.0.first()).map(|certificate| certificate.0.clone())
    }
}

/// TLS 1.2 and 1.3 with HTTP/2 and HTTP/1.1 by ALPN.
///
/// # Errors
/// The library refuses the setup.
pub fn server_config(certificates: Vec<Certificate>) -> Result<Arc<ServerConfig>, TlsError> {
    let builder = ServerConfig::builder_with_provider(Arc::new(default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(TlsError::Setup)?;
    let mut config = builder.with_no_client_auth().with_cert_resolver(Arc::new(BySni(certificates)));
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
