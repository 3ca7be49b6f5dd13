//! Certificate authorities and certificates that a test creates, and TLS clients that trust them.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, PKCS_RSA_SHA256, RsaKeySize, SanType, date_time_ymd,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, SupportedProtocolVersion};

use super::MAX_WAIT;
use super::client::{Client, Reply};

/// A certificate authority.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate with its key.
pub struct Pair {
    pub cert: String,
    pub key: String,
    pub der: CertificateDer<'static>,
    pub secret: PrivateKeyDer<'static>,
}

/// The first and the last year of a certificate's validity. The certificates are valid from the start of the first year
/// to the start of the second.
pub const NOW: [i32; 2] = [2000, 4000];
pub const PAST: [i32; 2] = [2000, 2001];
pub const FUTURE: [i32; 2] = [3999, 4000];

/// A client over TLS.
pub type TlsClient = Client<StreamOwned<ClientConnection, TcpStream>>;

impl Authority {
    pub fn new(name: &str) -> Authority {
        let mut params = parameters(&[(DnType::CommonName, name)], NOW);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// Return the CA certificate itself.
    pub fn certificate(&self) -> Pair {
        Pair::new(self.0.as_ref(), self.0.key())
    }

    /// Issue a client certificate with a new key.
    pub fn client(&self, subject: &[(DnType, &str)], years: [i32; 2]) -> Pair {
        self.sign(subject, years, ExtendedKeyUsagePurpose::ClientAuth)
    }

    /// Issue a server certificate for DNS names and IP addresses, with a new key.
    pub fn server(&self, names: &[&str], years: [i32; 2]) -> Pair {
        self.sign_for(&[], names, years, ExtendedKeyUsagePurpose::ServerAuth)
    }

    /// Issue a client certificate that expires at this Unix time in seconds.
    pub fn client_until(&self, subject: &[(DnType, &str)], unix_s: u64) -> Pair {
        let mut params = parameters(subject, NOW);
        params.not_after = date_time_ymd(1970, 1, 1) + Duration::from_secs(unix_s);
        self.finish(params, ExtendedKeyUsagePurpose::ClientAuth)
    }

    pub fn sign(&self, subject: &[(DnType, &str)], years: [i32; 2], usage: ExtendedKeyUsagePurpose) -> Pair {
        self.sign_for(subject, &[], years, usage)
    }

    pub fn sign_for(
        &self,
        subject: &[(DnType, &str)],
        names: &[&str],
        years: [i32; 2],
        usage: ExtendedKeyUsagePurpose,
    ) -> Pair {
        let mut params = parameters(subject, years);
        params.subject_alt_names = names.iter().map(|name| alternative(name)).collect();
        self.finish(params, usage)
    }

    fn finish(&self, mut params: CertificateParams, usage: ExtendedKeyUsagePurpose) -> Pair {
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Pair::new(&certificate, &key)
    }
}

fn alternative(name: &str) -> SanType {
    match name.parse() {
        Ok(address) => SanType::IpAddress(address),
        Err(_) => SanType::DnsName(name.try_into().unwrap()),
    }
}

fn parameters(subject: &[(DnType, &str)], years: [i32; 2]) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    for (kind, value) in subject {
        params.distinguished_name.push(kind.clone(), *value);
    }
    [params.not_before, params.not_after] = years.map(|year| date_time_ymd(year, 1, 1));
    params
}

impl Pair {
    fn new(certificate: &rcgen::Certificate, key: &KeyPair) -> Pair {
        let secret = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        Pair { cert: certificate.pem(), key: key.serialize_pem(), der: certificate.der().clone(), secret }
    }

    /// Issue a self-signed server certificate.
    pub fn server(name: &str, years: [i32; 2]) -> Pair {
        Pair::self_signed(name, years, &KeyPair::generate().unwrap())
    }

    /// Issue a self-signed server certificate with an RSA key.
    pub fn rsa_server(name: &str, years: [i32; 2]) -> Pair {
        Pair::self_signed(name, years, &KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048).unwrap())
    }

    fn self_signed(name: &str, years: [i32; 2], key: &KeyPair) -> Pair {
        let mut params = parameters(&[(DnType::CommonName, name)], years);
        params.subject_alt_names = vec![alternative(name)];
        Pair::new(&params.self_signed(key).unwrap(), key)
    }
}

/// Return the configuration of a TLS client. It trusts these server certificates, sends its own certificate if given,
/// and resumes sessions.
pub fn tls(
    believes: &[&CertificateDer<'static>],
    shows: Option<&Pair>,
    versions: &[&'static SupportedProtocolVersion],
) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    believes.iter().for_each(|certificate| roots.add((*certificate).clone()).unwrap());
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(versions).unwrap();
    let builder = builder.with_root_certificates(roots);
    Arc::new(match shows {
        Some(pair) => builder.with_client_auth_cert(vec![pair.der.clone()], pair.secret.clone_key()).unwrap(),
        None => builder.with_no_client_auth(),
    })
}

/// Return the configuration of a TLS client that sends the certificates in `chain`. The first certificate in `chain` is
/// the client certificate, and `own` contains its private key.
pub fn tls_with_chain(
    believes: &[&CertificateDer<'static>],
    own: &Pair,
    chain: &[&CertificateDer<'static>],
) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    believes.iter().for_each(|certificate| roots.add((*certificate).clone()).unwrap());
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let chain = chain.iter().map(|certificate| (*certificate).clone()).collect();
    let builder = builder.with_root_certificates(roots);
    Arc::new(builder.with_client_auth_cert(chain, own.secret.clone_key()).unwrap())
}

impl TlsClient {
    /// Connect and complete the TLS handshake.
    pub fn handshake(config: &Arc<ClientConfig>, address: SocketAddr, name: &str) -> io::Result<TlsClient> {
        TlsClient::handshake_over(TcpStream::connect(address)?, config, name)
    }

    /// Complete the TLS handshake on an open connection.
    pub fn handshake_over(stream: TcpStream, config: &Arc<ClientConfig>, name: &str) -> io::Result<TlsClient> {
        stream.set_read_timeout(Some(MAX_WAIT))?;
        stream.set_nodelay(true)?;
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let mut tls = StreamOwned::new(ClientConnection::new(config.clone(), name).unwrap(), stream);
        while tls.conn.is_handshaking() {
            tls.conn.complete_io(&mut tls.sock)?;
        }
        Ok(Client { stream: io::BufReader::new(tls) })
    }

    /// Return the certificate of the server.
    pub fn peer_certificate(&self) -> &CertificateDer<'static> {
        &self.stream.get_ref().conn.peer_certificates().unwrap()[0]
    }
}

/// Send one GET request. Return `None` if the server rejects the connection. With TLS 1.3, the client notices the
/// rejection only when it reads.
pub fn ask(config: &Arc<ClientConfig>, address: SocketAddr, name: &str, path: &str) -> Option<Reply> {
    let mut client = TlsClient::handshake(config, address, name).ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {name}\r\n\r\n");
    io::Write::write_all(client.stream.get_mut(), request.as_bytes()).ok()?;
    client.reply()
}
