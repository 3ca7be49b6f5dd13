//! TLS between clients and the gateway: selection of certificates by server name (SNI, RFC 6066 §3), verification of
//! client certificates, and trust roots. Certificates and the verifier of client certificates can be replaced while
//! connections are open.

use std::collections::{BTreeMap, HashMap};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use aws_lc_rs::digest::{SHA256, digest};
use rcgen::{CertificateParams, CustomExtension, DistinguishedName, DnType, KeyPair};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::client::verify_server_name;
use rustls::crypto::aws_lc_rs::{Ticketer, default_provider};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{
    ClientHello, NoClientAuth, ParsedCertificate, ResolvesServerCert, ServerConfig, VerifierBuilderError,
    WebPkiClientVerifier,
};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{DigitallySignedStruct, RootCertStore, SignatureAlgorithm, SignatureScheme};
use tokio::sync::Notify;
use x509_parser::certificate::{Validity, X509Certificate};
use x509_parser::extensions::GeneralName;
use x509_parser::parse_x509_certificate;
use x509_parser::time::ASN1Time;
use x509_parser::x509::X509Version;

/// The reason why a certificate, key or trust root cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The PEM of the certificate is malformed.
    #[error("the certificate cannot be read: {0}")]
    UnreadableCertificate(#[source] pem::Error),
    /// The PEM contains no certificate.
    #[error("there is no certificate")]
    NoCertificate,
    /// The certificate is not valid X.509.
    #[error("the certificate is malformed")]
    MalformedCertificate,
    /// The certificate has an X.509 version before 3. Such a certificate has no `subjectAltName`, and clients reject it.
    #[error("the certificate \"{subject}\" has the X.509 version {version}, but TLS requires version 3")]
    OutdatedVersion {
        /// Subject of the certificate.
        subject: String,
        /// Version, counted from 1.
        version: u32,
    },
    /// The PEM of the private key is malformed or contains no key.
    #[error("the key cannot be read: {0}")]
    UnreadableKey(#[source] pem::Error),
    /// The private key has an unsupported algorithm or is malformed.
    #[error("the key cannot be used: {0}")]
    UnusableKey(#[source] rustls::Error),
    /// The private key does not belong to the certificate.
    #[error("certificate and key do not match: {0}")]
    KeyMismatch(#[source] rustls::Error),
    /// The certificate of the private key is not the first of the chain. The field is its position, counted from 1.
    #[error("the certificate of the key is the {} in the file: put it first", ordinal(*.0))]
    WrongOrder(usize),
    /// The certificate has expired. The field is the time of expiry.
    #[error("the certificate has expired on {0}")]
    Expired(ASN1Time),
    /// The certificate is not yet valid. The field is the time from which it is valid.
    #[error("the certificate is not valid before {0}")]
    NotYetValid(ASN1Time),
    /// The certificate cannot be used as a trust root.
    #[error("the certificate is not a usable CA certificate: {0}")]
    NotCaCertificate(#[source] rustls::Error),
    /// The system has no CA certificates.
    #[error("the system has no CA certificates")]
    NoSystemRoots,
    /// rustls rejects the CA certificates for the verification of client certificates.
    #[error("the CA certificates cannot be used: {0}")]
    InvalidTrustRoots(#[from] VerifierBuilderError),
    /// rustls rejects the TLS configuration.
    #[error("TLS cannot be set up: {0}")]
    Setup(#[source] rustls::Error),
    /// A self-signed certificate cannot be generated.
    #[error("a self-signed certificate cannot be generated: {0}")]
    Generate(#[source] rcgen::Error),
}

/// Return an ordinal number as a word.
fn ordinal(number: usize) -> String {
    match number {
        2 => "second".to_owned(),
        3 => "third".to_owned(),
        number => format!("{number}th"),
    }
}

/// Whether clients must present a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientAuth {
    /// Clients may connect without a certificate.
    Optional,
    /// Handshakes without a certificate fail.
    Required,
}

/// The verifier of client certificates.
#[derive(Debug)]
pub struct ClientVerifier(Arc<dyn ClientCertVerifier>);

/// Verifies that the certificate of a client has one of several names.
#[derive(Debug)]
struct NameVerifier {
    /// Verifies the rest of the certificate.
    chain: Arc<dyn ClientCertVerifier>,
    names: Box<[ServerName<'static>]>,
}

impl ClientCertVerifier for NameVerifier {
    fn client_auth_mandatory(&self) -> bool {
        self.chain.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[rustls::DistinguishedName] {
        self.chain.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.chain.verify_client_cert(end_entity, intermediates, now)?;
        let certificate = ParsedCertificate::try_from(end_entity)?;
        let has_name = |name: &ServerName<'_>| verify_server_name(&certificate, name).is_ok();
        match self.names.iter().any(has_name) {
            true => Ok(verified),
            false => Err(rustls::Error::InvalidCertificate(rustls::CertificateError::NotValidForName)),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chain.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chain.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}

/// TLS settings and certificates of one listener.
#[derive(Debug)]
pub struct DownstreamTls {
    certificates: Arc<SniResolver>,
    /// The first policy applies to all hosts that `policy_by_host` does not contain.
    policies: Box<[ClientPolicy]>,
    /// The index in `policies` of each host. The key of a wildcard is the part after `*`, such as `.example.com`.
    policy_by_host: HashMap<Box<str>, usize>,
}

/// Verification of the client certificates of some hosts.
#[derive(Debug)]
pub struct ClientPolicy {
    config: ArcSwap<ServerConfig>,
    /// The verifier in `config`. `None` if the gateway requests no client certificates.
    verifier: ArcSwapOption<ClientVerifier>,
    /// Whether the verifier has been replaced.
    is_replaced: AtomicBool,
}

/// The settings for one handshake.
#[derive(Debug)]
pub struct Handshake {
    /// The configuration of rustls.
    pub config: Arc<ServerConfig>,
    /// The verifier of client certificates. If it is replaced during the handshake, this is the replaced verifier, so
    /// that the first request verifies the certificate again.
    pub client_verifier: Option<Arc<ClientVerifier>>,
}

/// The source of the certificates of a listener.
#[derive(Debug)]
pub enum CertificateSource {
    /// Certificates from files, in the order of the configuration.
    Files(Vec<Certificate>),
    /// Managed certificates, which the gateway obtains by ACME while it runs. There is one certificate for each of
    /// these names.
    Managed(Vec<Box<str>>, Arc<ManagedCertificates>),
}

/// Selects the certificate for a connection by its server name.
#[derive(Debug)]
enum SniResolver {
    /// Select a certificate that is valid for the server name and whose key the client supports; see
    /// [`select_for_client`]. If no certificate matches, or if the client sends no server name, select from all
    /// certificates.
    Files(Vec<ArcSwap<Certificate>>),
    /// Select the managed certificate for the server name; see [`ManagedCertificates::resolve`]. The names are those of
    /// the listener.
    Managed(Vec<Box<str>>, ArcSwap<ManagedCertificates>),
}

impl ResolvesServerCert for SniResolver {
    fn resolve(&self, client_hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let certificates = match self {
            SniResolver::Files(certificates) => certificates,
            SniResolver::Managed(names, managed) => {
                return Some(managed.load().resolve(client_hello.server_name(), names));
            }
        };
        let name = client_hello.server_name().and_then(|name| ServerName::try_from(name).ok());
        let offered = client_hello.signature_schemes();
        let loaded = || certificates.iter().map(ArcSwap::load_full);
        let matching = name.and_then(|name| {
            select_for_client(loaded().filter(|certificate| certificate.matches_server_name(&name)), offered)
        });
        matching.or_else(|| select_for_client(loaded(), offered)).map(|found| found.certified_key.clone())
    }
}

/// Select the first certificate whose key supports one of the signature schemes that the client offers. rustls has
/// already removed the schemes that the cipher suites of a TLS 1.2 client exclude. Prefer other keys to RSA keys, as
/// HAProxy and Envoy do, because their signatures are cheaper. If the client supports no key, select the first
/// certificate: the handshake then fails with the alert that belongs to it.
fn select_for_client(
    certificates: impl Iterator<Item = Arc<Certificate>>,
    offered: &[SignatureScheme],
) -> Option<Arc<Certificate>> {
    let (mut first, mut rsa) = (None, None);
    for certificate in certificates {
        let key = &certificate.certified_key.key;
        if key.choose_scheme(offered).is_some() {
            if key.algorithm() != SignatureAlgorithm::RSA {
                return Some(certificate);
            }
            rsa.get_or_insert_with(|| certificate.clone());
        }
        first.get_or_insert(certificate);
    }
    rsa.or(first)
}

impl ClientVerifier {
    /// Create a verifier that accepts client certificates issued by these CA certificates (PEM), and valid for one of
    /// these names. Without names, the certificates may have any name.
    ///
    /// # Errors
    /// The PEM contains no certificate, or a certificate that cannot be used.
    pub fn from_pem(ca_pem: &[u8], auth: ClientAuth, names: &[ServerName<'static>]) -> Result<Self, TlsError> {
        let TrustRoots(roots) = TrustRoots::from_pem(ca_pem)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::new(default_provider()));
        let verifier = match auth {
            ClientAuth::Optional => verifier.allow_unauthenticated(),
            ClientAuth::Required => verifier,
        };
        let verifier = verifier.build()?;
        Ok(ClientVerifier(match names {
            [] => verifier,
            names => Arc::new(NameVerifier { chain: verifier, names: names.into() }),
        }))
    }

    /// Return whether clients must present a certificate.
    pub fn is_mandatory(&self) -> bool {
        self.0.client_auth_mandatory()
    }

    /// Return whether the certificate chain of a client is trusted and valid at this time (seconds since the Unix
    /// epoch). The first certificate is the client's own certificate.
    pub fn trusts(&self, chain: &[CertificateDer<'_>], now_s: u64) -> bool {
        let now = UnixTime::since_unix_epoch(Duration::from_secs(now_s));
        let verify = |(own, others)| self.0.verify_client_cert(own, others, now);
        chain.split_first().is_some_and(|chain| verify(chain).is_ok())
    }
}

impl DownstreamTls {
    /// Create a TLS configuration for TLS 1.2 and 1.3 that offers HTTP/2 and HTTP/1.1 by ALPN. `client_verifier` applies
    /// to all hosts that `verifiers_by_host` does not contain. A host is a name in canonical form, or `*.` and a name.
    ///
    /// # Errors
    /// Rustls rejects the TLS configuration.
    pub fn new(
        source: CertificateSource,
        client_verifier: Option<ClientVerifier>,
        verifiers_by_host: Vec<(Vec<String>, Option<ClientVerifier>)>,
    ) -> Result<Self, TlsError> {
        let certificates = Arc::new(match source {
            CertificateSource::Files(certificates) => {
                SniResolver::Files(certificates.into_iter().map(ArcSwap::from_pointee).collect())
            }
            CertificateSource::Managed(names, managed) => SniResolver::Managed(names, ArcSwap::new(managed)),
        });
        let mut policies = vec![ClientPolicy::new(&certificates, client_verifier)?];
        let mut policy_by_host = HashMap::new();
        for (hosts, verifier) in verifiers_by_host {
            let key = |host: String| host.strip_prefix('*').unwrap_or(&host).into();
            policy_by_host.extend(hosts.into_iter().map(|host| (key(host), policies.len())));
            policies.push(ClientPolicy::new(&certificates, verifier)?);
        }
        Ok(DownstreamTls { certificates, policies: policies.into(), policy_by_host })
    }

    /// Return whether hosts of this listener differ in the verification of client certificates.
    pub fn has_host_policies(&self) -> bool {
        !self.policy_by_host.is_empty()
    }

    /// Return the index of the policy for a host in canonical form. An exact name takes precedence over wildcards, and a
    /// long wildcard over a short one, as in routes.
    pub fn policy_index(&self, host: &str) -> usize {
        let of_wildcard = || host.match_indices('.').find_map(|(dot, _)| self.policy_by_host.get(&host[dot..]));
        self.policy_by_host.get(host).or_else(of_wildcard).copied().unwrap_or_default()
    }

    /// Return the policy for a host in canonical form. An empty host stands for a client without SNI.
    pub fn policy(&self, host: &str) -> &ClientPolicy {
        if self.policy_by_host.is_empty() { &self.policies[0] } else { &self.policies[self.policy_index(host)] }
    }

    /// Return the certificates from files, in the order of the configuration.
    pub fn certificates(&self) -> impl Iterator<Item = Arc<Certificate>> {
        let files = match &*self.certificates {
            SniResolver::Files(certificates) => certificates.as_slice(),
            SniResolver::Managed(..) => &[],
        };
        files.iter().map(ArcSwap::load_full)
    }

    /// Return the names of managed certificates, and the state of the certificates. Return `None` if this listener has
    /// certificate files.
    pub fn managed(&self) -> Option<(&[Box<str>], Arc<ManagedCertificates>)> {
        match &*self.certificates {
            SniResolver::Files(_) => None,
            SniResolver::Managed(names, managed) => Some((names, managed.load_full())),
        }
    }

    /// Return the managed certificates if a TLS-ALPN-01 challenge (RFC 8737) is pending.
    pub fn pending_challenges(&self) -> Option<Arc<ManagedCertificates>> {
        match &*self.certificates {
            SniResolver::Managed(_, managed) => Some(managed.load_full()).filter(|managed| managed.has_tls_challenge()),
            SniResolver::Files(_) => None,
        }
    }

    /// Use these managed certificates, which come from the previous configuration. If this listener has certificate
    /// files, change nothing.
    pub fn use_managed(&self, certificates: &Arc<ManagedCertificates>) {
        if let SniResolver::Managed(_, managed) = &*self.certificates {
            managed.store(certificates.clone());
        }
    }

    /// Replace the certificate at `index`. Clients can still resume their TLS sessions.
    pub fn replace_certificate(&self, index: usize, certificate: Certificate) {
        if let SniResolver::Files(certificates) = &*self.certificates {
            certificates[index].store(Arc::new(certificate));
        }
    }

    /// Replace the verifier of client certificates of a policy, by its index. Afterwards, clients cannot resume older TLS
    /// sessions, because resumption would skip the verification. The certificates of open connections are verified again.
    ///
    /// # Errors
    /// Rustls rejects the TLS configuration.
    pub fn set_client_verifier(&self, policy: usize, verifier: ClientVerifier) -> Result<(), TlsError> {
        let config = server_config(self.certificates.clone(), Some(&verifier))?;
        let policy = &self.policies[policy];
        policy.config.store(Arc::new(config));
        policy.verifier.store(Some(Arc::new(verifier)));
        policy.is_replaced.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Return whether the verifier of a policy has ever been replaced.
    pub fn has_client_trust_changed(&self, policy: usize) -> bool {
        self.policies[policy].is_replaced.load(Ordering::Relaxed)
    }

    /// Accept the TLS session tickets that a policy of `other` has issued, for the policy with the same index. The caller
    /// must ensure that both policies verify clients in the same way.
    pub fn use_ticketer_of(&self, other: &DownstreamTls, policy: usize) {
        let [own, other] = [self, other].map(|tls| &tls.policies[policy].config);
        let mut config = (*own.load_full()).clone();
        config.ticketer = other.load().ticketer.clone();
        own.store(Arc::new(config));
    }
}

impl ClientPolicy {
    fn new(certificates: &Arc<SniResolver>, verifier: Option<ClientVerifier>) -> Result<Self, TlsError> {
        let config = ArcSwap::from_pointee(server_config(certificates.clone(), verifier.as_ref())?);
        let verifier = ArcSwapOption::new(verifier.map(Arc::new));
        Ok(ClientPolicy { config, verifier, is_replaced: AtomicBool::new(false) })
    }

    /// Return the current verifier of client certificates.
    pub fn verifier(&self) -> Option<Arc<ClientVerifier>> {
        self.verifier.load_full()
    }

    /// Return whether a connection without a client certificate must not serve requests.
    pub fn requires_certificate(&self) -> bool {
        self.verifier.load().as_ref().is_some_and(|verifier| verifier.is_mandatory())
    }

    /// Return the current settings, for the next handshake.
    pub fn handshake(&self) -> Handshake {
        // Load the verifier first, because `set_client_verifier` replaces it last.
        let client_verifier = self.verifier();
        Handshake { config: self.config.load_full(), client_verifier }
    }
}

fn server_config(
    certificates: Arc<SniResolver>,
    client_verifier: Option<&ClientVerifier>,
) -> Result<ServerConfig, TlsError> {
    let verifier: Arc<dyn ClientCertVerifier> = match client_verifier {
        Some(verifier) => verifier.0.clone(),
        None => Arc::new(NoClientAuth),
    };
    let builder = ServerConfig::builder_with_provider(Arc::new(default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(TlsError::Setup)?;
    let mut config = builder.with_client_cert_verifier(verifier).with_cert_resolver(certificates);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    // TLS sessions are stateless tickets (RFC 5077, RFC 8446 §4.6.1). Each configuration has its own ticket keys.
    // Otherwise, a client could resume a session of a listener without client certificates on a listener that requires
    // them.
    config.ticketer = Ticketer::new().map_err(TlsError::Setup)?;
    Ok(config)
}

// Trust roots.

/// CA certificates, with which the certificates of peers are verified.
#[derive(Debug, Clone)]
pub struct TrustRoots(pub Arc<RootCertStore>);

impl TrustRoots {
    /// Read CA certificates from PEM.
    ///
    /// # Errors
    /// The PEM contains no certificate, or a certificate that cannot be used.
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

    /// Return the CA certificates of the system. Certificates that cannot be read are skipped.
    ///
    /// # Errors
    /// The system has no CA certificate.
    pub fn from_system() -> Result<Self, TlsError> {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            return Err(TlsError::NoSystemRoots);
        }
        Ok(TrustRoots(Arc::new(roots)))
    }
}

// Certificate chains with their private keys.

/// A certificate chain with its private key.
#[derive(Debug)]
pub struct Certificate {
    /// Chain and key in the form that rustls uses.
    pub certified_key: Arc<CertifiedKey>,
    validity: Validity,
}

/// Return the position of the certificate that belongs to a key, counted from 1.
fn position_of_key(chain: &[CertificateDer<'static>], key: &PrivateKeyDer<'static>) -> Option<usize> {
    let belongs = |certificate: &CertificateDer<'static>| {
        CertifiedKey::from_der(vec![certificate.clone()], key.clone_key(), &default_provider()).is_ok()
    };
    chain.iter().position(belongs).map(|index| index + 1)
}

impl Certificate {
    /// Read a chain and its private key from PEM.
    ///
    /// # Errors
    /// The chain or the key is missing or cannot be read, or the key does not belong to the certificate.
    pub fn from_pem(chain: &[u8], key: &[u8]) -> Result<Self, TlsError> {
        let chain = CertificateDer::pem_slice_iter(chain).collect::<Result<Vec<_>, _>>();
        let chain = chain.map_err(TlsError::UnreadableCertificate)?;
        let Some(leaf) = chain.first() else { return Err(TlsError::NoCertificate) };
        let (_, parsed) = parse_x509_certificate(leaf).map_err(|_| TlsError::MalformedCertificate)?;
        let validity = parsed.validity().clone();
        if parsed.version() != X509Version::V3 {
            let subject = parsed.subject().to_string();
            let version = parsed.version().0 + 1;
            return Err(TlsError::OutdatedVersion { subject, version });
        }
        let key = PrivateKeyDer::from_pem_slice(key).map_err(TlsError::UnreadableKey)?;
        let chain =
            CertifiedKey::from_der(chain.clone(), key.clone_key(), &default_provider()).map_err(
                |error| match error {
                    rustls::Error::InconsistentKeys(_) => match position_of_key(&chain, &key) {
                        Some(position) => TlsError::WrongOrder(position),
                        None => TlsError::KeyMismatch(error),
                    },
                    error => TlsError::UnusableKey(error),
                },
            )?;
        Ok(Certificate { certified_key: Arc::new(chain), validity })
    }

    /// Return the display name of the certificate for messages: the first of [`names`](Self::names).
    pub fn name(&self) -> String {
        self.names().into_iter().next().unwrap_or_default()
    }

    /// Return the expiry time of the certificate, in seconds since the Unix epoch.
    pub fn not_after_s(&self) -> u64 {
        self.validity.not_after.timestamp().max(0) as u64
    }

    /// Check that `now_s` (seconds since the Unix epoch) is within the validity of the leaf certificate. The other
    /// certificates of the chain are not checked: clients check them, and an expired cross-signed certificate in the
    /// chain may be intentional.
    ///
    /// # Errors
    /// The certificate has expired or is not yet valid.
    pub fn check_validity(&self, now_s: i64) -> Result<(), TlsError> {
        match &self.validity {
            validity if now_s > validity.not_after.timestamp() => Err(TlsError::Expired(validity.not_after)),
            validity if now_s < validity.not_before.timestamp() => Err(TlsError::NotYetValid(validity.not_before)),
            _ => Ok(()),
        }
    }

    /// Return the start and the end of the validity period, in seconds since the Unix epoch.
    pub fn validity_s(&self) -> (i64, i64) {
        (self.validity.not_before.timestamp(), self.validity.not_after.timestamp())
    }

    /// Return the DNS names and IP addresses of the certificate (RFC 5280 §4.2.1.6). If the certificate has neither,
    /// return its subject.
    pub fn names(&self) -> Vec<String> {
        let names = self.parsed(|certificate| {
            let names = certificate.subject_alternative_name().ok().flatten();
            let names = names.iter().flat_map(|names| &names.value.general_names).filter_map(|name| match name {
                GeneralName::DNSName(name) => Some((*name).to_owned()),
                GeneralName::IPAddress(bytes) => match *bytes {
                    [a, b, c, d] => Some(Ipv4Addr::from([*a, *b, *c, *d]).to_string()),
                    bytes => <[u8; 16]>::try_from(bytes).ok().map(|bytes| Ipv6Addr::from(bytes).to_string()),
                },
                _ => None,
            });
            let names: Vec<_> = names.collect();
            if names.is_empty() { vec![certificate.subject().to_string()] } else { names }
        });
        names.unwrap_or_default()
    }

    /// Return whether both keys have the same type, for example RSA or ECDSA with the curve P-256.
    pub(crate) fn has_key_type_of(&self, other: &Certificate) -> bool {
        /// One scheme for each type of key.
        const SCHEMES: [SignatureScheme; 6] = [
            SignatureScheme::RSA_PSS_SHA256,
            SignatureScheme::ECDSA_NISTP256_SHA256,
            SignatureScheme::ECDSA_NISTP384_SHA384,
            SignatureScheme::ECDSA_NISTP521_SHA512,
            SignatureScheme::ED25519,
            SignatureScheme::ED448,
        ];
        let supports =
            |certificate: &Certificate, scheme| certificate.certified_key.key.choose_scheme(&[scheme]).is_some();
        SCHEMES.into_iter().any(|scheme| supports(self, scheme) && supports(other, scheme))
    }

    /// Return whether this certificate is valid for a name of another certificate, which may be a wildcard.
    pub(crate) fn covers(&self, name: &str) -> bool {
        match ServerName::try_from(name) {
            Ok(name) => self.matches_server_name(&name),
            Err(_) => self.names().iter().any(|own| own.eq_ignore_ascii_case(name)),
        }
    }

    /// Return the issuer of the certificate.
    pub fn issuer(&self) -> String {
        self.parsed(|certificate| certificate.issuer().to_string()).unwrap_or_default()
    }

    fn parsed<T>(&self, read: impl FnOnce(&X509Certificate<'_>) -> T) -> Option<T> {
        let leaf = self.certified_key.cert.first()?;
        parse_x509_certificate(leaf).ok().map(|(_, parsed)| read(&parsed))
    }

    pub(crate) fn matches_server_name(&self, name: &ServerName<'_>) -> bool {
        let parsed = self.certified_key.cert.first().map(ParsedCertificate::try_from);
        parsed.is_some_and(|parsed| parsed.is_ok_and(|certificate| verify_server_name(&certificate, name).is_ok()))
    }
}

// === Managed certificates, which are obtained and renewed while the gateway runs (ACME, RFC 8555), and the pending
// challenges of their orders ===

/// ALPN protocol ID of TLS-ALPN-01 (RFC 8737 §6.2).
pub const ALPN_ACME_TLS: &[u8] = b"acme-tls/1";

/// Common name of the self-signed certificate that is served until the CA has issued the first certificate.
const SELF_SIGNED_NAME: &str = "sluicegate: no certificate yet";

/// The managed certificates of all names, and the pending ACME challenges. A configuration reload keeps both.
#[derive(Debug)]
pub struct ManagedCertificates {
    /// The state of each name. The keys are server names in lower case.
    entries: ArcSwap<BTreeMap<Box<str>, ManagedCertificate>>,
    challenges: ArcSwap<Vec<Challenge>>,
    /// The certificate that is served until a certificate is obtained.
    self_signed: Arc<CertifiedKey>,
    /// Names whose renewal an administrator has requested, with the certificate at the time of the request.
    renewal_requests: Mutex<BTreeMap<Box<str>, Option<Arc<Certificate>>>>,
    /// Notified when an administrator requests a renewal.
    wake: Notify,
    /// Number of obtained certificates, and number of failed attempts to obtain a certificate.
    results: [AtomicU64; 2],
}

/// The certificate of one name, and the state of its renewal.
#[derive(Debug, Clone, Default)]
pub struct ManagedCertificate {
    /// The certificate that is served. `None` until the first certificate is obtained.
    pub certificate: Option<Arc<Certificate>>,
    /// Time of the next planned order, in seconds since the Unix epoch. `None` until the first order is planned.
    pub next_order_s: Option<u64>,
    /// Number of failed attempts to obtain the certificate since the last success.
    pub failures: u32,
    /// The reason why the last attempt to obtain the certificate failed. `None` if the last attempt succeeded.
    pub last_error: Option<Box<str>>,
}

/// Kinds of ACME challenges that the gateway supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChallengeKind {
    /// HTTP-01 (RFC 8555 §8.3): the CA sends an HTTP request to port 80.
    Http01,
    /// TLS-ALPN-01 (RFC 8737): the CA opens a TLS connection to port 443 and checks the certificate.
    TlsAlpn01,
}

/// An ACME challenge that the gateway must complete.
#[derive(Debug, Clone)]
pub struct Challenge {
    /// The DNS name that the CA validates, in lower case.
    pub name: Box<str>,
    /// The token of the challenge, which the CA has chosen.
    pub token: Box<str>,
    /// The token and the thumbprint of the account key (RFC 8555 §8.1).
    pub key_authorization: Box<str>,
    /// TLS configuration with the certificate for a TLS-ALPN-01 challenge. `None` if the challenge is HTTP-01.
    tls: Option<Arc<ServerConfig>>,
}

impl ChallengeKind {
    /// Return the name of the challenge in RFC 8555 and RFC 8737.
    pub fn name(self) -> &'static str {
        match self {
            ChallengeKind::Http01 => "http-01",
            ChallengeKind::TlsAlpn01 => "tls-alpn-01",
        }
    }
}

impl Challenge {
    /// Create a challenge. For TLS-ALPN-01, also create its certificate (RFC 8737 §3).
    ///
    /// # Errors
    /// The name is not a DNS name, or rustls rejects the TLS configuration.
    pub fn new(kind: ChallengeKind, name: &str, token: &str, key_authorization: &str) -> Result<Self, TlsError> {
        let tls = match kind {
            ChallengeKind::Http01 => None,
            ChallengeKind::TlsAlpn01 => Some(Arc::new(challenge_config(name, key_authorization)?)),
        };
        Ok(Challenge { name: name.into(), token: token.into(), key_authorization: key_authorization.into(), tls })
    }
}

/// Return the TLS configuration for connections with which the CA validates `name`. This TLS configuration requests no
/// client certificate and resumes no session.
fn challenge_config(name: &str, key_authorization: &str) -> Result<ServerConfig, TlsError> {
    let mut params = CertificateParams::new([name.to_owned()]).map_err(TlsError::Generate)?;
    let authorization = digest(&SHA256, key_authorization.as_bytes());
    params.custom_extensions = vec![CustomExtension::new_acme_identifier(authorization.as_ref())];
    let certificate = self_sign(&params)?;
    let builder = ServerConfig::builder_with_provider(Arc::new(default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(TlsError::Setup)?;
    let resolver = Arc::new(SingleCertAndKey::from(certificate));
    let mut config = builder.with_no_client_auth().with_cert_resolver(resolver);
    config.alpn_protocols = vec![ALPN_ACME_TLS.to_vec()];
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn self_sign(params: &CertificateParams) -> Result<Arc<CertifiedKey>, TlsError> {
    let key = KeyPair::generate().map_err(TlsError::Generate)?;
    let certificate = params.self_signed(&key).map_err(TlsError::Generate)?;
    let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
    let key = default_provider().key_provider.load_private_key(key).map_err(TlsError::UnusableKey)?;
    // Use `new` instead of `from_der`, because `from_der` rejects the critical extension of a TLS-ALPN-01 certificate.
    Ok(Arc::new(CertifiedKey::new(vec![certificate.der().clone()], key)))
}

impl ManagedCertificates {
    /// Create the state without obtained certificates. Until the first certificate is obtained, a self-signed
    /// certificate is served.
    ///
    /// # Errors
    /// The self-signed certificate cannot be generated.
    pub fn new() -> Result<Self, TlsError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, SELF_SIGNED_NAME);
        Ok(ManagedCertificates {
            entries: ArcSwap::default(),
            challenges: ArcSwap::default(),
            self_signed: self_sign(&params)?,
            renewal_requests: Mutex::default(),
            wake: Notify::new(),
            results: Default::default(),
        })
    }

    /// Return the certificate for a server name. If the server name is one of `names` and has a certificate, return
    /// this certificate. Otherwise, return the certificate of the first of `names` that has a certificate. If none of
    /// `names` has a certificate, return the self-signed certificate.
    fn resolve(&self, server_name: Option<&str>, names: &[Box<str>]) -> Arc<CertifiedKey> {
        let entries = self.entries.load();
        let find = |name: &str| entries.get(name)?.certificate.as_ref().map(|found| found.certified_key.clone());
        let lower = server_name.map(str::to_ascii_lowercase).filter(|name| names.iter().any(|known| **known == **name));
        lower
            .and_then(|name| find(&name))
            .or_else(|| names.iter().find_map(|name| find(name)))
            .unwrap_or_else(|| self.self_signed.clone())
    }

    /// Return the certificate of a name and the state of its renewal.
    pub fn get(&self, name: &str) -> ManagedCertificate {
        self.entries.load().get(name).cloned().unwrap_or_default()
    }

    /// Change the certificate of a name or the state of its renewal with `change`.
    pub fn update(&self, name: &str, change: impl Fn(&mut ManagedCertificate)) {
        self.entries.rcu(|entries| {
            let mut entries = BTreeMap::clone(entries);
            change(entries.entry(name.into()).or_default());
            entries
        });
    }

    /// Replace the list of pending challenges.
    pub fn set_challenges(&self, challenges: Vec<Challenge>) {
        self.challenges.store(Arc::new(challenges));
    }

    /// Return the key authorization for the token of a pending HTTP-01 challenge.
    pub fn http_response(&self, token: &str) -> Option<Box<str>> {
        let challenges = self.challenges.load();
        let found = challenges.iter().find(|challenge| challenge.tls.is_none() && *challenge.token == *token);
        found.map(|challenge| challenge.key_authorization.clone())
    }

    /// Return whether a TLS-ALPN-01 challenge is pending.
    pub fn has_tls_challenge(&self) -> bool {
        self.challenges.load().iter().any(|challenge| challenge.tls.is_some())
    }

    /// Return the TLS configuration for the pending TLS-ALPN-01 challenge of a server name.
    pub fn tls_challenge(&self, server_name: &str) -> Option<Arc<ServerConfig>> {
        let challenges = self.challenges.load();
        challenges.iter().find(|challenge| challenge.name.eq_ignore_ascii_case(server_name))?.tls.clone()
    }

    /// Request the renewal of the current certificate of a name.
    pub fn request_renewal(&self, name: &str) {
        let current = self.get(name).certificate;
        self.renewal_requests.lock().unwrap_or_else(PoisonError::into_inner).insert(name.into(), current);
        self.wake.notify_one();
    }

    /// Remove and return the names whose renewal was requested, with the certificate at the time of the request.
    pub fn take_renewal_requests(&self) -> BTreeMap<Box<str>, Option<Arc<Certificate>>> {
        std::mem::take(&mut *self.renewal_requests.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Wait until an administrator requests a renewal.
    pub async fn renewal_requested(&self) {
        self.wake.notified().await;
    }

    /// Count an attempt to obtain a certificate.
    pub fn count_result(&self, succeeded: bool) {
        self.results[usize::from(!succeeded)].fetch_add(1, Ordering::Relaxed);
    }

    /// Return the number of obtained certificates and the number of failed attempts to obtain a certificate.
    pub fn results(&self) -> [u64; 2] {
        [&self.results[0], &self.results[1]].map(|count| count.load(Ordering::Relaxed))
    }
}
