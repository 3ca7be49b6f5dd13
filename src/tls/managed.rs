//! Managed certificates, which are obtained and renewed while the gateway runs (ACME, RFC 8555), and the pending
//! challenges of their orders.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use aws_lc_rs::digest::{SHA256, digest};
use rcgen::{CertificateParams, CustomExtension, DistinguishedName, DnType, KeyPair};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::PrivateKeyDer;
use rustls::server::ServerConfig;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio::sync::Notify;

use crate::tls::{Certificate, TlsError};

/// ALPN protocol ID of TLS-ALPN-01 (RFC 8737 §6.2).
pub const ALPN_ACME_TLS: &[u8] = b"acme-tls/1";

/// Common name of the certificate that is served until the CA has issued the first certificate.
const SELF_SIGNED_NAME: &str = "sluicegate: no certificate yet";

/// The certificates of all names, and the pending challenges. The certificates are kept when the configuration is
/// reloaded.
#[derive(Debug)]
pub struct ManagedCertificates {
    /// The state of each name. The keys are server names in lower case.
    entries: ArcSwap<BTreeMap<Box<str>, ManagedCertificate>>,
    challenges: ArcSwap<Vec<Challenge>>,
    /// The certificate that is served while there is no other certificate.
    self_signed: Arc<CertifiedKey>,
    /// Names whose renewal an administrator has requested.
    renewal_requests: Mutex<BTreeSet<Box<str>>>,
    /// Notified when an administrator requests a renewal.
    wake: Notify,
    /// Number of certificates obtained, and number of attempts that failed.
    results: [AtomicU64; 2],
}

/// The certificate of one name, and the state of its renewal.
#[derive(Debug, Clone, Default)]
pub struct ManagedCertificate {
    /// The certificate that is served. `None` until the first certificate is obtained.
    pub certificate: Option<Arc<Certificate>>,
    /// Time of the next planned order, in seconds since the Unix epoch. `None` until the first order is planned.
    pub next_order_s: Option<u64>,
    /// Number of failed attempts since the last success.
    pub failures: u32,
    /// The reason why the last attempt failed. `None` after a success.
    pub last_error: Option<Box<str>>,
}

/// Kinds of challenges that the gateway answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChallengeKind {
    /// HTTP-01 (RFC 8555 §8.3): a response on port 80.
    Http01,
    /// TLS-ALPN-01 (RFC 8737): a certificate on port 443.
    TlsAlpn01,
}

/// A challenge of the CA that the gateway must answer.
#[derive(Debug, Clone)]
pub struct Challenge {
    /// The name to validate, in lower case.
    pub name: Box<str>,
    /// The token of the CA.
    pub token: Box<str>,
    /// The token and the thumbprint of the account key (RFC 8555 §8.1).
    pub key_authorization: Box<str>,
    /// TLS configuration that answers a TLS-ALPN-01 challenge. `None` if the challenge is HTTP-01.
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
    /// # Errors An error if the name is not a DNS name, or if rustls rejects the TLS configuration.
    pub fn new(kind: ChallengeKind, name: &str, token: &str, key_authorization: &str) -> Result<Self, TlsError> {
        let tls = match kind {
            ChallengeKind::Http01 => None,
            ChallengeKind::TlsAlpn01 => Some(Arc::new(challenge_config(name, key_authorization)?)),
        };
        Ok(Challenge { name: name.into(), token: token.into(), key_authorization: key_authorization.into(), tls })
    }
}

/// Return the TLS configuration for the validation of `name` by the CA. This TLS configuration requests no client
/// certificate and resumes no session.
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
    // Do not use `from_der`, which would reject the critical extension of a TLS-ALPN-01 certificate.
    Ok(Arc::new(CertifiedKey::new(vec![certificate.der().clone()], key)))
}

impl ManagedCertificates {
    /// Create the state without certificates. A self-signed certificate is served until the first certificate is
    /// obtained.
    ///
    /// # Errors An error if the self-signed certificate cannot be generated.
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
    /// this certificate. Otherwise return the certificate of the first of `names` that has one, or else the self-signed
    /// certificate.
    pub(super) fn resolve(&self, server_name: Option<&str>, names: &[Box<str>]) -> Arc<CertifiedKey> {
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

    /// Change the certificate of a name or the state of its renewal.
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

    /// Return the key authorization that belongs to the token of a pending HTTP-01 challenge.
    pub fn http_response(&self, token: &str) -> Option<Box<str>> {
        let challenges = self.challenges.load();
        let found = challenges.iter().find(|challenge| challenge.tls.is_none() && *challenge.token == *token);
        found.map(|challenge| challenge.key_authorization.clone())
    }

    /// Return whether a TLS-ALPN-01 challenge is pending.
    pub fn has_tls_challenge(&self) -> bool {
        self.challenges.load().iter().any(|challenge| challenge.tls.is_some())
    }

    /// Return the TLS configuration for the validation of a name by TLS-ALPN-01.
    pub fn tls_challenge(&self, server_name: &str) -> Option<Arc<ServerConfig>> {
        let challenges = self.challenges.load();
        challenges.iter().find(|challenge| challenge.name.eq_ignore_ascii_case(server_name))?.tls.clone()
    }

    /// Request the renewal of a name.
    pub fn request_renewal(&self, name: &str) {
        self.renewal_requests.lock().unwrap_or_else(PoisonError::into_inner).insert(name.into());
        self.wake.notify_one();
    }

    /// Take all requests for renewals.
    pub fn take_renewal_requests(&self) -> BTreeSet<Box<str>> {
        std::mem::take(&mut *self.renewal_requests.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Wait for a request for a renewal.
    pub async fn renewal_requested(&self) {
        self.wake.notified().await;
    }

    /// Count an attempt to obtain a certificate.
    pub fn count_result(&self, succeeded: bool) {
        self.results[usize::from(!succeeded)].fetch_add(1, Ordering::Relaxed);
    }

    /// Return the number of certificates obtained and the number of attempts that failed.
    pub fn results(&self) -> [u64; 2] {
        [&self.results[0], &self.results[1]].map(|count| count.load(Ordering::Relaxed))
    }
}
