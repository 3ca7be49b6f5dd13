//! TLS towards clients: certificates chosen by the name that the client asks for (SNI, RFC 6066 §3), clients known by
//! theirs; both can be replaced while connections go on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;
use rustls::RootCertStore;
use rustls::client::verify_server_name;
use rustls::crypto::aws_lc_rs::{Ticketer, default_provider};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{
    ClientHello, NoClientAuth, ParsedCertificate, ResolvesServerCert, ServerConfig, VerifierBuilderError,
    WebPkiClientVerifier,
};
use rustls::sign::CertifiedKey;
use tokio_rustls::TlsAcceptor;
use x509_parser::certificate::Validity;
use x509_parser::parse_x509_certificate;
use x509_parser::time::ASN1Time;

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum TlsError {
    #[error("the certificate cannot be read: {0}")]
    UnreadableCertificate(#[source] pem::Error),
    #[error("there is no certificate")]
    NoCertificate,
    #[error("the certificate is malformed")]
    MalformedCertificate,
    #[error("the key cannot be read: {0}")]
    UnreadableKey(#[source] pem::Error),
    #[error("certificate and key do not fit: {0}")]
    KeyMismatch(#[source] rustls::Error),
    #[error("the certificate has expired on {0}")]
    Expired(ASN1Time),
    #[error("the certificate is not valid before {0}")]
    NotYetValid(ASN1Time),
    #[error("the certificate is none of an authority: {0}")]
    NotCaCertificate(#[source] rustls::Error),
    #[error("this system has no certificates of authorities")]
    NoSystemRoots,
    #[error("the authorities cannot be used: {0}")]
    InvalidTrustRoots(#[from] VerifierBuilderError),
    #[error("TLS cannot be set up: {0}")]
    Setup(#[source] rustls::Error),
}

/// Whether a client must have a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientAuth {
    /// It may have none.
    Optional,
    /// Without one there is no connection.
    Required,
}

/// Which clients' certificates are believed.
#[derive(Debug)]
pub struct ClientVerifier(Arc<dyn ClientCertVerifier>);

/// One listener's side of TLS.
#[derive(Debug)]
pub struct DownstreamTls {
    certificates: Arc<SniResolver>,
    config: ArcSwap<ServerConfig>,
    /// Whether it believes others than at first.
    client_trust_changed: AtomicBool,
}

/// Chooses the first certificate that is for the name; the very first if none is, or no name was sent.
#[derive(Debug)]
struct SniResolver(Vec<ArcSwap<Certificate>>);

impl ResolvesServerCert for SniResolver {
    fn resolve(&self, client_hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let name = client_hello.server_name().and_then(|name| ServerName::try_from(name).ok());
        let mut certificates = self.0.iter().map(ArcSwap::load);
        let matching = name.and_then(|name| certificates.find(|certificate| certificate.matches_server_name(&name)));
        matching.or_else(|| self.0.first().map(ArcSwap::load)).map(|certificate| certificate.certified_key.clone())
    }
}

impl ClientVerifier {
    /// Believes certificates that these authorities (PEM) have signed.
    ///
    /// # Errors
    /// No authority can be read.
    pub fn from_pem(ca_pem: &[u8], auth: ClientAuth) -> Result<Self, TlsError> {
        let TrustRoots(roots) = TrustRoots::from_pem(ca_pem)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::new(default_provider()));
        let verifier = match auth {
            ClientAuth::Optional => verifier.allow_unauthenticated(),
            ClientAuth::Required => verifier,
        };
        Ok(ClientVerifier(verifier.build()?))
    }
}

impl DownstreamTls {
    /// TLS 1.2 and 1.3 with HTTP/2 and HTTP/1.1 by ALPN.
    ///
    /// # Errors
    /// The library refuses the setup.
    pub fn new(certificates: Vec<Certificate>, client_verifier: Option<ClientVerifier>) -> Result<Self, TlsError> {
        let certificates = Arc::new(SniResolver(certificates.into_iter().map(ArcSwap::from_pointee).collect()));
        let client_verifier = client_verifier.unwrap_or_else(|| ClientVerifier(Arc::new(NoClientAuth)));
        let config = ArcSwap::from_pointee(server_config(certificates.clone(), client_verifier)?);
        Ok(DownstreamTls { certificates, config, client_trust_changed: AtomicBool::new(false) })
    }

    /// What makes a connection of the next stream.
    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.config.load_full())
    }

    /// The certificates in their order.
    pub fn certificates(&self) -> impl Iterator<Item = Arc<Certificate>> {
        self.certificates.0.iter().map(ArcSwap::load_full)
    }

    /// Shows another certificate in the place of one. Sessions can still be resumed.
    pub fn replace_certificate(&self, index: usize, certificate: Certificate) {
        self.certificates.0[index].store(Arc::new(certificate));
    }

    /// Believes other clients from now on. Sessions of before are not resumed: that would skip the check.
    ///
    /// # Errors
    /// The library refuses the setup.
    pub fn set_client_verifier(&self, client_verifier: ClientVerifier) -> Result<(), TlsError> {
        self.config.store(Arc::new(server_config(self.certificates.clone(), client_verifier)?));
        self.client_trust_changed.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Whether it believes others than at first.
    pub fn has_client_trust_changed(&self) -> bool {
        self.client_trust_changed.load(Ordering::Relaxed)
    }

    /// Resumes the sessions of another one, which believes the same clients.
    pub fn use_ticketer_of(&self, other: &DownstreamTls) {
        let mut config = (*self.config.load_full()).clone();
        config.ticketer = other.config.load().ticketer.clone();
        self.config.store(Arc::new(config));
    }
}

fn server_config(certificates: Arc<SniResolver>, client_verifier: ClientVerifier) -> Result<ServerConfig, TlsError> {
    let builder = ServerConfig::builder_with_provider(Arc::new(default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(TlsError::Setup)?;
    let mut config = builder.with_client_cert_verifier(client_verifier.0).with_cert_resolver(certificates);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    // Sessions live in tickets (RFC 5077, RFC 8446 §4.6.1), not in our memory. The keys of tickets belong to this one
    // configuration: a session that began where nobody asks for certificates is worth nothing where somebody does.
    config.ticketer = Ticketer::new().map_err(TlsError::Setup)?;
    Ok(config)
}

// The authorities whose word counts about certificates.

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

// A certificate chain with its key, from PEM.

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

    pub(crate) fn matches_server_name(&self, name: &ServerName<'_>) -> bool {
        let parsed = self.certified_key.cert.first().map(ParsedCertificate::try_from);
        parsed.is_some_and(|parsed| parsed.is_ok_and(|certificate| verify_server_name(&certificate, name).is_ok()))
    }
}
