//! The client of a TLS connection: whether it has the certificate that its listener demands, the subject of the
//! certificate as an unambiguous string (RFC 4514), and the headers that forward the certificate to upstreams (RFC 9440).

use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderMap, HeaderName, HeaderValue};
use rustls::pki_types::CertificateDer;

use x509_parser::asn1_rs::ToDer;
use x509_parser::parse_x509_certificate;
use x509_parser::x509::{AttributeTypeAndValue, X509Name};

use crate::tls::{ClientPolicy, ClientVerifier};

/// Reason why a verified client certificate is rejected.
#[derive(Debug, thiserror::Error)]
pub enum ClientCertError {
    /// The certificate cannot be parsed.
    #[error("the client's certificate is malformed")]
    Malformed,
    /// The certificate has expired since the full TLS handshake. Session resumption does not check the expiry.
    #[error("the client's certificate has expired since the TLS session began")]
    Expired,
}

const CLIENT_CERT: HeaderName = HeaderName::from_static("client-cert");
const CLIENT_CERT_CHAIN: HeaderName = HeaderName::from_static("client-cert-chain");

/// Maximum length of `Client-Cert-Chain` in bytes. The limit is necessary because the client chooses the certificates
/// after its own, and servers reject large headers.
const MAX_CHAIN_HEADER: usize = 16 << 10;

/// The client of a TLS connection.
#[derive(Debug)]
pub struct TlsClient {
    /// Server name (SNI) in lower case. It is empty if the client sent none.
    pub server_name: Box<str>,
    /// The verified certificate, if there is one.
    pub certificate: Option<Box<ClientCertificate>>,
    /// Whether a request was rejected because the certificate is missing or not trusted any more.
    is_rejected: AtomicBool,
}

/// Why the client of an open connection does not meet the demands of its listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CertificateFault {
    /// A reload has made client certificates mandatory, and the client has none.
    Missing,
    /// The certificate has expired, or a reload has removed its CA.
    Untrusted,
}

/// The verified certificate of a client, followed by the other certificates that the client sent.
#[derive(Debug)]
pub struct ClientCertificate {
    /// Subject of the certificate. `None` if it is empty.
    pub subject: Option<Box<str>>,
    chain: Vec<CertificateDer<'static>>,
    headers: OnceLock<Option<CertificateHeaders>>,
    verification: ArcSwap<Verification>,
}

/// The last successful verification of a certificate chain.
#[derive(Debug)]
struct Verification {
    verifier: Arc<ClientVerifier>,
    /// Time in seconds since the Unix epoch until which no certificate of the chain expires.
    valid_until_s: i64,
}

/// Values of the headers of RFC 9440.
#[derive(Debug)]
pub struct CertificateHeaders {
    /// `Client-Cert`: the certificate (§2.2).
    pub certificate: HeaderValue,
    /// `Client-Cert-Chain`: the other certificates of the chain (§2.3). `None` if there are no other certificates, or
    /// if the header would be longer than 16 KiB.
    pub chain: Option<HeaderValue>,
}

impl TlsClient {
    /// Create the client of a new connection.
    pub fn new(server_name: Box<str>, certificate: Option<ClientCertificate>) -> Self {
        TlsClient { server_name, certificate: certificate.map(Box::new), is_rejected: AtomicBool::new(false) }
    }

    /// Check that the client meets a policy at this time, in seconds since the Unix epoch. TLS verifies the certificate
    /// only in the handshake, and a connection may last longer than the certificate or the policy. After an error, all
    /// further checks fail, and the connection must be closed.
    ///
    /// # Errors
    /// The certificate is missing or not trusted any more.
    pub fn check(&self, policy: Option<&ClientPolicy>, now_s: u64) -> Result<(), CertificateFault> {
        let (fault, is_met) = match &self.certificate {
            None => (CertificateFault::Missing, !policy.is_some_and(ClientPolicy::requires_certificate)),
            Some(certificate) => {
                let verifier = policy.and_then(ClientPolicy::verifier);
                (CertificateFault::Untrusted, certificate.is_trusted(verifier.as_ref(), now_s))
            }
        };
        if is_met && !self.is_rejected() {
            return Ok(());
        }
        self.is_rejected.store(true, Ordering::Relaxed);
        Err(fault)
    }

    /// Return whether a check has failed.
    pub fn is_rejected(&self) -> bool {
        self.is_rejected.load(Ordering::Relaxed)
    }
}

impl ClientCertificate {
    /// Store the certificates of a TLS session, which `verifier` has verified. The first one is the client's own
    /// certificate. `now_s` is the current time in seconds since the Unix epoch.
    ///
    /// # Errors
    /// The certificate has expired or is malformed.
    pub fn new(
        chain: &[CertificateDer<'_>],
        verifier: Arc<ClientVerifier>,
        now_s: i64,
    ) -> Result<Self, ClientCertError> {
        let own = chain.first().ok_or(ClientCertError::Malformed)?;
        let subject = subject(own, now_s)?;
        let chain: Vec<_> = chain.iter().map(|certificate| certificate.clone().into_owned()).collect();
        let valid_until_s = next_expiry_s(&chain, i64::MIN);
        let verification = ArcSwap::from_pointee(Verification { verifier, valid_until_s });
        Ok(ClientCertificate { subject, chain, headers: OnceLock::new(), verification })
    }

    /// Return whether `verifier` trusts the chain at this time, in seconds since the Unix epoch. The signatures of the
    /// chain are verified again only if the verifier was replaced, or if a certificate of the chain has expired.
    fn is_trusted(&self, verifier: Option<&Arc<ClientVerifier>>, now_s: u64) -> bool {
        let last = self.verification.load();
        let is_same = verifier.is_some_and(|verifier| Arc::ptr_eq(verifier, &last.verifier));
        if is_same && now_s as i64 <= last.valid_until_s {
            return true;
        }
        let Some(verifier) = verifier.filter(|verifier| verifier.trusts(&self.chain, now_s)) else { return false };
        let valid_until_s = next_expiry_s(&self.chain, now_s as i64);
        self.verification.store(Arc::new(Verification { verifier: verifier.clone(), valid_until_s }));
        true
    }

    /// Return the header values. They are encoded at the first call.
    fn headers(&self) -> Option<&CertificateHeaders> {
        let encode = || {
            let (first, rest) = self.chain.split_first()?;
            let chain = rest.iter().map(|certificate| byte_sequence(certificate)).collect::<Vec<_>>().join(", ");
            let is_sent = !chain.is_empty() && chain.len() <= MAX_CHAIN_HEADER;
            Some(CertificateHeaders {
                // Base64 and colons form a valid header value, so the conversion cannot fail.
                certificate: HeaderValue::try_from(byte_sequence(first)).ok()?,
                chain: is_sent.then(|| HeaderValue::try_from(chain).ok()).flatten(),
            })
        };
        self.headers.get_or_init(encode).as_ref()
    }

    /// Set `Client-Cert` and `Client-Cert-Chain` to the certificate of a client, or remove them if the client has no
    /// certificate. Received headers with these names are removed, even if a trusted proxy sent them, because the
    /// upstream must receive a single certificate.
    pub fn set_headers(certificate: Option<&Self>, headers: &mut HeaderMap) {
        headers.remove(CLIENT_CERT);
        headers.remove(CLIENT_CERT_CHAIN);
        let Some(values) = certificate.and_then(ClientCertificate::headers) else { return };
        headers.insert(CLIENT_CERT, values.certificate.clone());
        if let Some(chain) = &values.chain {
            headers.insert(CLIENT_CERT_CHAIN, chain.clone());
        }
    }
}

/// Return the time of the first expiry of a certificate at `from_s` or later, in seconds since the Unix epoch.
fn next_expiry_s(chain: &[CertificateDer<'_>], from_s: i64) -> i64 {
    let expiry = |certificate: &CertificateDer<'_>| {
        parse_x509_certificate(certificate).map_or(i64::MIN, |(_, parsed)| parsed.validity().not_after.timestamp())
    };
    chain.iter().map(expiry).filter(|expiry| *expiry >= from_s).min().unwrap_or(i64::MAX)
}

/// Encode bytes as a Byte Sequence of a structured field (RFC 9651 §4.1.8).
fn byte_sequence(bytes: &[u8]) -> String {
    format!(":{}:", STANDARD.encode(bytes))
}

/// Attribute types with a short name: those of RFC 4514 §3, and two more with the names that OpenSSL uses.
const ATTRIBUTE_NAMES: [(&str, &str); 11] = [
    ("2.5.4.3", "CN"),
    ("2.5.4.7", "L"),
    ("2.5.4.8", "ST"),
    ("2.5.4.10", "O"),
    ("2.5.4.11", "OU"),
    ("2.5.4.6", "C"),
    ("2.5.4.9", "street"),
    ("0.9.2342.19200300.100.1.25", "DC"),
    ("0.9.2342.19200300.100.1.1", "UID"),
    ("1.2.840.113549.1.9.1", "emailAddress"),
    ("2.5.4.5", "serialNumber"),
];

/// Return the subject of a verified certificate. `certificate` is the DER encoding of the certificate. Return `None` if
/// the subject is empty, because several clients may have an empty subject. `now_s` is the current time in seconds
/// since the Unix epoch. The expiry is checked again, because the resumption of a TLS session does not check it.
///
/// # Errors
/// The certificate has expired or is malformed.
pub fn subject(certificate: &[u8], now_s: i64) -> Result<Option<Box<str>>, ClientCertError> {
    let (_, certificate) = parse_x509_certificate(certificate).map_err(|_| ClientCertError::Malformed)?;
    if now_s > certificate.validity().not_after.timestamp() {
        return Err(ClientCertError::Expired);
    }
    let text = format_name(certificate.subject())?;
    Ok((!text.is_empty()).then(|| text.into()))
}

/// Format a distinguished name. The last RDN (relative distinguished name) comes first, and RDNs are separated by `,`.
/// Attributes of the same RDN are separated by `+`.
fn format_name(name: &X509Name<'_>) -> Result<String, ClientCertError> {
    let parts: Vec<_> = name.iter_rdn().collect();
    let mut text = String::new();
    for part in parts.into_iter().rev() {
        let mut separator = if text.is_empty() { "" } else { "," };
        for attribute in part.iter() {
            text.push_str(separator);
            write_attribute(&mut text, attribute)?;
            separator = "+";
        }
    }
    Ok(text)
}

fn write_attribute(text: &mut String, attribute: &AttributeTypeAndValue<'_>) -> Result<(), ClientCertError> {
    let oid = attribute.attr_type().to_id_string();
    let name = ATTRIBUTE_NAMES.iter().find(|(known, _)| *known == oid).map(|(_, name)| *name);
    match (name, attribute.as_str()) {
        (Some(name), Ok(value)) => {
            text.push_str(name);
            text.push('=');
            escape(text, value);
        }
        // For all other attribute types, write the OID and the value in DER encoding as hexadecimal (RFC 4514 §2.4).
        (name, _) => {
            text.push_str(name.unwrap_or(&oid));
            text.push_str("=#");
            for byte in attribute.attr_value().to_der_vec().map_err(|_| ClientCertError::Malformed)? {
                // Writing to a string cannot fail.
                let _ = write!(text, "{byte:02X}");
            }
        }
    }
    Ok(())
}

/// Escape characters that have a special meaning (RFC 4514 §2.4).
fn escape(text: &mut String, value: &str) {
    let last = value.chars().count().saturating_sub(1);
    for (index, c) in value.chars().enumerate() {
        let special = matches!(c, '"' | '+' | ',' | ';' | '<' | '>' | '\\');
        if special || (c == ' ' && (index == 0 || index == last)) || (c == '#' && index == 0) {
            text.push('\\');
            text.push(c);
        } else if c.is_ascii_control() {
            let _ = write!(text, "\\{:02X}", c as u8);
        } else {
            text.push(c);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, CustomExtension, DistinguishedName, DnType, DnValue, KeyPair, date_time_ymd};
    use std::collections::HashSet;

    fn subject_of(attributes: &[(DnType, DnValue)]) -> Option<String> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        for (kind, value) in attributes {
            params.distinguished_name.push(kind.clone(), value.clone());
        }
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        subject(certificate.der(), 1_800_000_000).unwrap().map(String::from)
    }

    fn utf8(text: &str) -> DnValue {
        DnValue::Utf8String(text.to_owned())
    }

    #[test]
    fn subjects_are_formatted_as_in_rfc_4514() {
        let custom = || DnType::CustomDnType(vec![1, 3, 6, 1, 4, 1, 99999]);
        for (attributes, expected) in [
            (vec![(DnType::OrganizationName, utf8("Acme")), (DnType::CommonName, utf8("alice"))], "CN=alice,O=Acme"),
            (vec![(DnType::CommonName, utf8("Lučić"))], "CN=Lučić"),
            (vec![(DnType::CommonName, utf8("James \"Jim\" Smith, III"))], "CN=James \\\"Jim\\\" Smith\\, III"),
            (vec![(DnType::CommonName, utf8(" #a# "))], "CN=\\ #a#\\ "),
            (vec![(DnType::CommonName, utf8("#1"))], "CN=\\#1"),
            (vec![(DnType::CommonName, utf8("a\r\nb\0"))], "CN=a\\0D\\0Ab\\00"),
            (vec![(custom(), utf8("x"))], "1.3.6.1.4.1.99999=#0C0178"),
            (vec![(DnType::CommonName, DnValue::PrintableString("alice".try_into().unwrap()))], "CN=alice"),
        ] {
            assert_eq!(subject_of(&attributes).as_deref(), Some(expected));
        }
        assert_eq!(subject_of(&[]), None, "an empty subject is no identity");
    }

    #[test]
    fn different_subjects_have_different_strings() {
        let cn = |text: &str| (DnType::CommonName, utf8(text));
        let o = |text: &str| (DnType::OrganizationName, utf8(text));
        let subjects = [
            vec![cn("a"), o("b")],
            vec![o("b"), cn("a")],
            vec![cn("a,O=b")],
            vec![cn("b,CN=a")],
            vec![cn("a+O=b")],
            vec![cn("a\\,O=b")],
            vec![cn("a")],
            vec![o("a")],
            vec![cn("A")],
            vec![cn("a ")],
            vec![cn("#0C0161")],
            vec![(DnType::CommonName, DnValue::BmpString("a".try_into().unwrap()))],
        ];
        let texts: HashSet<_> = subjects.iter().map(|subject| subject_of(subject).unwrap()).collect();
        assert_eq!(texts.len(), subjects.len(), "{texts:?}");
    }

    #[test]
    fn expired_certificate_is_rejected() {
        let mut params = CertificateParams::default();
        params.not_after = date_time_ymd(2020, 1, 1);
        // The certificate has a custom extension. It must not cause a parsing error.
        params.custom_extensions = vec![CustomExtension::from_oid_content(&[1, 2, 3], vec![5, 0])];
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        assert!(
            subject(certificate.der(), 1_577_836_800).is_ok(),
            "the certificate is valid until the last second of its lifetime"
        );
        assert!(matches!(subject(certificate.der(), 1_577_836_801), Err(ClientCertError::Expired)));
        assert!(matches!(subject(b"garbage", 0), Err(ClientCertError::Malformed)));
    }
}
