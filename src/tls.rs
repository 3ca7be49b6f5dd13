//! TLS towards clients: certificates chosen by the name that the client asks for (SNI, RFC 6066 §3), clients known by
//! theirs; both can be replaced while connections go on.

pub mod authorities;
pub mod certificate;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;
use rustls::crypto::aws_lc_rs::{Ticketer, default_provider};
use rustls::pki_types::ServerName;
use rustls::pki_types::pem;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{
    ClientHello, NoClientAuth, ResolvesServerCert, ServerConfig, VerifierBuilderError, WebPkiClientVerifier,
};
use rustls::sign::CertifiedKey;
use tokio_rustls::TlsAcceptor;
use x509_parser::time::ASN1Time;

use authorities::Authorities;
use certificate::Certificate;

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum TlsError {
    #[error("the certificate cannot be read: {0}")]
    Certificate(#[source] pem::Error),
    #[error("there is no certificate")]
    Empty,
    #[error("the certificate is malformed")]
    Malformed,
    #[error("the key cannot be read: {0}")]
    Key(#[source] pem::Error),
    #[error("certificate and key do not fit: {0}")]
    Mismatch(#[source] rustls::Error),
    #[error("the certificate has expired on {0}")]
    Expired(ASN1Time),
    #[error("the certificate is not valid before {0}")]
    Early(ASN1Time),
    #[error("the certificate is none of an authority: {0}")]
    NoAuthority(#[source] rustls::Error),
    #[error("this system has no certificates of authorities")]
    NoSystem,
    #[error("the authorities cannot be used: {0}")]
    Authorities(#[from] VerifierBuilderError),
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
pub struct Clients(Arc<dyn ClientCertVerifier>);

/// One listener's side of TLS.
#[derive(Debug)]
pub struct Tls {
    certificates: Arc<BySni>,
    config: ArcSwap<ServerConfig>,
    /// Whether it believes others than at first.
    believes_others: AtomicBool,
}

/// Chooses the first certificate that is for the name; the very first if none is, or no name was sent.
#[derive(Debug)]
struct BySni(Vec<ArcSwap<Certificate>>);

impl ResolvesServerCert for BySni {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let name = hello.server_name().and_then(|name| ServerName::try_from(name).ok());
        let mut certificates = self.0.iter().map(ArcSwap::load);
        let fitting = name.and_then(|name| certificates.find(|certificate| certificate.is_for(&name)));
        fitting.or_else(|| self.0.first().map(ArcSwap::load)).map(|certificate| certificate.chain.clone())
    }
}

impl Clients {
    /// Believes certificates that these authorities (PEM) have signed.
    ///
    /// # Errors
    /// No authority can be read.
    pub fn parse(authorities: &[u8], auth: ClientAuth) -> Result<Self, TlsError> {
        let Authorities(roots) = Authorities::parse(authorities)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::new(default_provider()));
        let verifier = match auth {
            ClientAuth::Optional => verifier.allow_unauthenticated(),
            ClientAuth::Required => verifier,
        };
        Ok(Clients(verifier.build()?))
    }
}

impl Tls {
    /// TLS 1.2 and 1.3 with HTTP/2 and HTTP/1.1 by ALPN.
    ///
    /// # Errors
    /// The library refuses the setup.
    pub fn new(certificates: Vec<Certificate>, clients: Option<Clients>) -> Result<Self, TlsError> {
        let certificates = Arc::new(BySni(certificates.into_iter().map(ArcSwap::from_pointee).collect()));
        let clients = clients.unwrap_or_else(|| Clients(Arc::new(NoClientAuth)));
        let config = ArcSwap::from_pointee(config(certificates.clone(), clients)?);
        Ok(Tls { certificates, config, believes_others: AtomicBool::new(false) })
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
    pub fn replace(&self, place: usize, certificate: Certificate) {
        self.certificates.0[place].store(Arc::new(certificate));
    }

    /// Believes other clients from now on. Sessions of before are not resumed: that would skip the check.
    ///
    /// # Errors
    /// The library refuses the setup.
    pub fn believe(&self, clients: Clients) -> Result<(), TlsError> {
        self.config.store(Arc::new(config(self.certificates.clone(), clients)?));
        self.believes_others.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Whether it believes others than at first.
    pub fn believes_others(&self) -> bool {
        self.believes_others.load(Ordering::Relaxed)
    }

    /// Resumes the sessions of another one, which believes the same clients.
    pub fn resume(&self, other: &Tls) {
        let mut config = (*self.config.load_full()).clone();
        config.ticketer = other.config.load().ticketer.clone();
        self.config.store(Arc::new(config));
    }
}

fn config(certificates: Arc<BySni>, clients: Clients) -> Result<ServerConfig, TlsError> {
    let builder = ServerConfig::builder_with_provider(Arc::new(default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(TlsError::Setup)?;
    let mut config = builder.with_client_cert_verifier(clients.0).with_cert_resolver(certificates);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    // Sessions live in tickets (RFC 5077, RFC 8446 §4.6.1), not in our memory. The keys of tickets belong to this one
    // configuration: a session that began where nobody asks for certificates is worth nothing where somebody does.
    config.ticketer = Ticketer::new().map_err(TlsError::Setup)?;
    Ok(config)
}
