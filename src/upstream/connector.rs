//! Connections to upstream endpoints: TCP, TLS, the PROXY header, and diagnosis of TLS errors.

use std::io;
use std::io::IoSlice;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use arc_swap::ArcSwap;
use aws_lc_rs::digest::{SHA256, digest};
use ppp::v2::PROTOCOL_PREFIX;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::sign::SingleCertAndKey;
use rustls::{AlertDescription, CertificateError, ClientConfig, DigitallySignedStruct, Error, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tracing::warn;
use x509_parser::time::ASN1Time;

use crate::tls::{Certificate, TlsError, TrustRoots};
use crate::upstream::metrics::OpenConnection;

/// Stream to an endpoint, which carries HTTP. It counts as an open connection until it is dropped.
#[derive(Debug)]
pub(super) struct UpstreamStream {
    pub(super) stream: MaybeTlsStream,
    pub(super) _open: Option<OpenConnection>,
}

impl UpstreamStream {
    pub(super) fn is_tls(&self) -> bool {
        matches!(self.stream, MaybeTlsStream::Tls(_))
    }
}

impl AsyncRead for UpstreamStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for UpstreamStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

/// A TCP stream to an endpoint, possibly with TLS.
#[derive(Debug)]
pub(super) enum MaybeTlsStream {
    Tcp(TcpStream),
    /// TLS, with the server name for log messages.
    Tls(Box<(TlsStream<TcpStream>, ServerName<'static>)>),
}

impl MaybeTlsStream {
    /// Set up a connected TCP stream. Perform the TLS handshake if `tls` is set.
    ///
    /// # Errors
    /// The handshake fails.
    pub(super) async fn handshake(stream: TcpStream, tls: Option<&EndpointTls>) -> io::Result<MaybeTlsStream> {
        // Set TCP_NODELAY, because Nagle's algorithm would only delay requests, which are written in one piece.
        stream.set_nodelay(true)?;
        match tls {
            None => Ok(MaybeTlsStream::Tcp(stream)),
            // Box the future, because otherwise each request would reserve space for a handshake.
            Some(tls) => {
                Ok(MaybeTlsStream::Tls(Box::new((Box::pin(tls.connect(stream)).await?, tls.server_name.clone()))))
            }
        }
    }
}

impl AsyncRead for MaybeTlsStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            MaybeTlsStream::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            MaybeTlsStream::Tls(tls) => {
                let (stream, name) = &mut **tls;
                Pin::new(stream).poll_read(cx, buf).map_err(|error| TlsDiagnosis::from_read_error(error, name))
            }
        }
    }
}

impl AsyncWrite for MaybeTlsStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            MaybeTlsStream::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            MaybeTlsStream::Tls(tls) => Pin::new(&mut tls.0).poll_write(cx, buf).map_err(TlsDiagnosis::from_io_error),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            MaybeTlsStream::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            MaybeTlsStream::Tls(tls) => {
                Pin::new(&mut tls.0).poll_write_vectored(cx, bufs).map_err(TlsDiagnosis::from_io_error)
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            MaybeTlsStream::Tcp(stream) => stream.is_write_vectored(),
            MaybeTlsStream::Tls(tls) => tls.0.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            MaybeTlsStream::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            MaybeTlsStream::Tls(tls) => Pin::new(&mut tls.0).poll_flush(cx).map_err(TlsDiagnosis::from_io_error),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            MaybeTlsStream::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            MaybeTlsStream::Tls(tls) => Pin::new(&mut tls.0).poll_shutdown(cx),
        }
    }
}

/// Protocol that the gateway uses for an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1: one request at a time per connection.
    Http1,
    /// HTTP/2: with prior knowledge over plaintext, or negotiated by ALPN over TLS. The requests that a worker sends to
    /// an endpoint share a few connections.
    Http2,
}

// TLS settings for connections to upstreams. The trust roots and the client certificate can be replaced while
// connections are open.

/// TLS client configuration of one upstream.
#[derive(Debug)]
pub struct UpstreamTlsConfig {
    // The `ClientConfig` contains the TLS session cache. Replacing it removes the sessions, so that every server
    // certificate is verified again.
    config: ArcSwap<ClientConfig>,
    protocol: Protocol,
}

/// How the gateway verifies the certificates of servers.
#[derive(Debug, Clone)]
pub enum ServerTrust {
    /// A CA must have signed the certificate, and it must be valid for the name of the server.
    Roots(TrustRoots),
    /// The certificate must have one of these SHA-256 hashes. Its CA, names and dates are not verified.
    Fingerprints(Arc<[[u8; 32]]>),
    /// Every certificate is accepted.
    Anything,
}

impl From<TrustRoots> for ServerTrust {
    fn from(roots: TrustRoots) -> Self {
        ServerTrust::Roots(roots)
    }
}

/// Verifies a server certificate by its hash, or not at all.
#[derive(Debug)]
struct PinVerifier {
    /// The permitted hashes. `None` permits every certificate.
    fingerprints: Option<Arc<[[u8; 32]]>>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl PinVerifier {
    /// Verify a signature with `verify`. The signature proves that the server has the key of the certificate, which
    /// matters only if the certificate itself is known.
    fn verify_key(
        &self,
        verify: impl FnOnce(&WebPkiSupportedAlgorithms) -> Result<HandshakeSignatureValid, Error>,
    ) -> Result<HandshakeSignatureValid, Error> {
        match self.fingerprints {
            Some(_) => verify(&self.algorithms),
            None => Ok(HandshakeSignatureValid::assertion()),
        }
    }
}

impl ServerCertVerifier for PinVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let hash = digest(&SHA256, end_entity);
        let is_permitted = |pins: &Arc<[[u8; 32]]>| pins.iter().any(|pin| pin == hash.as_ref());
        match self.fingerprints.as_ref().is_none_or(is_permitted) {
            true => Ok(ServerCertVerified::assertion()),
            false => Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure)),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verify_key(|algorithms| verify_tls12_signature(message, cert, dss, algorithms))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verify_key(|algorithms| verify_tls13_signature(message, cert, dss, algorithms))
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// TLS settings of one server.
#[derive(Debug, Clone)]
pub struct EndpointTls {
    /// TLS configuration of the upstream.
    pub tls: Arc<UpstreamTlsConfig>,
    /// Name or IP address for which the certificate must be valid. A name is sent as SNI (RFC 6066 §3).
    pub server_name: ServerName<'static>,
}

/// Two values are equal if they share one [`UpstreamTlsConfig`], which cannot be compared itself, and have the same
/// server name.
impl PartialEq for EndpointTls {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.tls, &other.tls) && self.server_name == other.server_name
    }
}

impl UpstreamTlsConfig {
    /// Create a configuration for TLS 1.2 and 1.3 that offers one protocol by ALPN. `gateway_certificate` is sent to
    /// servers that request a client certificate.
    ///
    /// # Errors
    /// rustls rejects the configuration.
    pub fn new(
        trust: impl Into<ServerTrust>,
        gateway_certificate: Option<&Certificate>,
        protocol: Protocol,
    ) -> Result<Self, TlsError> {
        Ok(UpstreamTlsConfig {
            config: ArcSwap::from_pointee(client_config(trust.into(), gateway_certificate, protocol)?),
            protocol,
        })
    }

    /// Return the protocol that ALPN offers.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Replace what the gateway trusts, and the client certificate, for new connections.
    ///
    /// # Errors
    /// rustls rejects the configuration.
    pub fn replace(&self, trust: ServerTrust, gateway_certificate: Option<&Certificate>) -> Result<(), TlsError> {
        self.config.store(Arc::new(client_config(trust, gateway_certificate, self.protocol)?));
        Ok(())
    }
}

impl EndpointTls {
    /// Perform the TLS handshake.
    ///
    /// # Errors
    /// The handshake fails. If TLS is the cause, the error is a `TlsDiagnosis`.
    pub async fn connect(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let connector = TlsConnector::from(self.tls.config.load_full());
        let stream =
            connector.connect(self.server_name.clone(), stream).await.map_err(TlsDiagnosis::from_handshake_error)?;
        // Check the selected protocol only for HTTP/2, which requires ALPN (RFC 9113 §3.2). HTTP/1.1 servers need not
        // support ALPN.
        if self.tls.protocol == Protocol::Http2 && stream.get_ref().1.alpn_protocol() != Some(b"h2") {
            return Err(TlsDiagnosis::http2_not_negotiated());
        }
        Ok(stream)
    }
}

fn client_config(
    trust: ServerTrust,
    gateway_certificate: Option<&Certificate>,
    protocol: Protocol,
) -> Result<ClientConfig, TlsError> {
    let provider = default_provider();
    let algorithms = provider.signature_verification_algorithms;
    let pins = |fingerprints| Arc::new(PinVerifier { fingerprints, algorithms });
    let builder = ClientConfig::builder_with_provider(Arc::new(provider));
    let builder = builder.with_safe_default_protocol_versions().map_err(TlsError::Setup)?;
    let builder = match trust {
        ServerTrust::Roots(roots) => builder.with_root_certificates(roots.0),
        ServerTrust::Fingerprints(all) => builder.dangerous().with_custom_certificate_verifier(pins(Some(all))),
        ServerTrust::Anything => builder.dangerous().with_custom_certificate_verifier(pins(None)),
    };
    let mut config = match gateway_certificate {
        Some(own) => builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(own.certified_key.clone()))),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = match protocol {
        Protocol::Http1 => vec![b"http/1.1".to_vec()],
        Protocol::Http2 => vec![b"h2".to_vec()],
    };
    Ok(config)
}

// Diagnosis of TLS errors for the log, in one sentence: the cause and the remedy. Clients do not see the diagnosis.

/// Cause of a TLS failure.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(super) struct TlsDiagnosis {
    message: String,
    failure: TlsFailure,
}

/// The failure of a TLS handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsFailure {
    /// The gateway rejected the certificate of the server.
    Certificate,
    /// The server sent an alert.
    Alert,
    /// The handshake failed with any other error.
    Protocol,
}

impl TlsFailure {
    /// Return the TLS failure, or `None` if the I/O error has another cause.
    pub fn from_error(error: &io::Error) -> Option<TlsFailure> {
        error.get_ref()?.downcast_ref::<TlsDiagnosis>().map(|diagnosis| diagnosis.failure)
    }
}

impl TlsDiagnosis {
    /// Describe an error of the TLS handshake.
    pub(super) fn from_handshake_error(error: io::Error) -> io::Error {
        match error.kind() {
            // Mention servers without TLS, because a server that cannot parse the ClientHello closes the connection.
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                TlsDiagnosis::with_message(
                    "the server closed the connection in the TLS handshake; if it does not speak TLS, use http://",
                )
            }
            _ => TlsDiagnosis::from_io_error(error),
        }
    }

    /// Describe a read error. If TLS is the cause, log the error. In TLS 1.3, the server verifies the client
    /// certificate after the client has completed the handshake, so an alert about the certificate arrives with the
    /// first read. The error of the request may mention only a closed connection, so the log needs this error.
    pub(super) fn from_read_error(error: io::Error, name: &ServerName<'_>) -> io::Error {
        let error = TlsDiagnosis::from_io_error(error);
        if error.get_ref().is_some_and(|inner| inner.is::<TlsDiagnosis>()) {
            warn!(server_name = %name.to_str(), %error, "TLS connection to upstream failed");
        }
        error
    }

    /// Describe the rustls error in an I/O error. Return other errors unchanged.
    pub(super) fn from_io_error(error: io::Error) -> io::Error {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
            Some(source) => {
                let failure = match source {
                    Error::InvalidCertificate(_) => TlsFailure::Certificate,
                    Error::AlertReceived(_) => TlsFailure::Alert,
                    _ => TlsFailure::Protocol,
                };
                io::Error::new(error.kind(), TlsDiagnosis { message: describe_error(source), failure })
            }
            None => error,
        }
    }

    pub(super) fn http2_not_negotiated() -> io::Error {
        TlsDiagnosis::with_message(
            "the server did not select HTTP/2 by ALPN (`h2`); if it does not support HTTP/2, set protocol = \"http1\"",
        )
    }

    fn with_message(advice: &str) -> io::Error {
        io::Error::other(TlsDiagnosis { message: advice.to_owned(), failure: TlsFailure::Protocol })
    }
}

fn describe_error(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(certificate_error) => describe_certificate_error(certificate_error),
        Error::AlertReceived(alert) => describe_alert(*alert),
        Error::InvalidMessage(_) => "the server does not speak TLS; use http://, or correct the port".to_owned(),
        Error::PeerIncompatible(_) => {
            format!("the TLS of the server is incompatible with the gateway, which supports TLS 1.2 and 1.3: {error}")
        }
        _ => format!("TLS failed: {error}"),
    }
}

/// Describe why the server certificate was rejected.
fn describe_certificate_error(error: &CertificateError) -> String {
    // Return an empty text for times that the date type cannot represent.
    let date = |s: u64| ASN1Time::from_timestamp(s as i64).map_or(String::new(), |time| time.to_string());
    match error {
        CertificateError::NotValidForNameContext { expected, presented } => {
            // Remove the type names: rustls formats names as `DnsName("a.test")` and `IpAddress(192.0.2.1)`.
            let bare = |name: &String| name.split(['(', ')', '"']).rfind(|part| !part.is_empty()).map(str::to_owned);
            let presented = presented.iter().filter_map(bare).collect::<Vec<_>>().join(", ");
            let presented = if presented.is_empty() { "no name (common names are ignored)" } else { &presented };
            format!(
                "the server's certificate is valid for {presented}, not for `{}`; set tls.server_name to a name of the \
                 certificate",
                expected.to_str()
            )
        }
        CertificateError::UnknownIssuer => {
            "the server's certificate is not signed by a trusted CA; set tls.ca to the certificate of its CA (default: \
             the CA certificates of the system)"
                .to_owned()
        }
        CertificateError::ExpiredContext { not_after, .. } => {
            format!("the server's certificate has expired on {}; renew the certificate", date(not_after.as_secs()))
        }
        CertificateError::NotValidYetContext { not_before, .. } => {
            let date = date(not_before.as_secs());
            format!("the server's certificate is not valid before {date}; check the clocks of both machines")
        }
        CertificateError::InvalidPurposeContext { .. } => {
            "the server's certificate is not valid for servers; issue one with the extended key usage serverAuth"
                .to_owned()
        }
        // Search the text of the error, because rustls has no variant for this error of webpki.
        CertificateError::Other(why) if why.to_string().contains("CaUsedAsEndEntity") => {
            "the server presents a CA certificate (CA:TRUE, the default of `openssl req -x509`); issue a \
             certificate for the server that this CA signs"
                .to_owned()
        }
        CertificateError::Other(why) if why.to_string().contains("UnsupportedCertVersion") => {
            "the server presents a certificate of X.509 version 1 (`openssl x509 -req` without extensions); issue one \
             of version 3 with a subjectAltName: -copy_extensions copy, or -extfile"
                .to_owned()
        }
        CertificateError::ApplicationVerificationFailure => {
            "the certificate of the server has none of the hashes in tls.fingerprint; compare them with openssl \
             s_client -connect HOST:PORT </dev/null | openssl x509 -noout -fingerprint -sha256"
                .to_owned()
        }
        _ => format!("the server's certificate was rejected: {error}"),
    }
}

/// Describe an alert that the server sent.
fn describe_alert(alert: AlertDescription) -> String {
    match alert {
        AlertDescription::CertificateRequired => {
            "the server requires a client certificate; set tls.cert and tls.key".to_owned()
        }
        // Mention a missing client certificate, for which TLS 1.2 servers also send this alert.
        AlertDescription::HandshakeFailure => {
            "the server rejected the handshake (HandshakeFailure); it may require a client certificate (tls.cert and \
             tls.key) or other cipher suites"
                .to_owned()
        }
        AlertDescription::BadCertificate
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateRevoked
        | AlertDescription::CertificateExpired
        | AlertDescription::CertificateUnknown
        | AlertDescription::UnknownCA
        | AlertDescription::AccessDenied
        | AlertDescription::DecryptError => {
            format!(
                "the server rejected the client certificate ({alert:?}); set tls.cert to a certificate that the server trusts"
            )
        }
        AlertDescription::UnrecognisedName => {
            "the server does not know the server name (SNI); set tls.server_name to a name that it serves".to_owned()
        }
        AlertDescription::NoApplicationProtocol => {
            "the server does not support the `protocol` of this upstream (ALPN)".to_owned()
        }
        AlertDescription::ProtocolVersion => "the server speaks neither TLS 1.2 nor TLS 1.3".to_owned(),
        _ => format!("the server closed the TLS connection: {alert:?}"),
    }
}

// === PROXY protocol, version 2: the address of the client at the start of each connection
// (<https://www.haproxy.org/download/3.2/doc/proxy-protocol.txt>) ===

/// Byte for version 2 and the command `LOCAL` (§2.2): a connection that the gateway opens for itself, such as for a
/// health check.
const LOCAL: u8 = 0x20;
/// Byte for version 2 and the command `PROXY` (§2.2): a connection on behalf of a client.
const PROXY: u8 = 0x21;
/// Address family byte of a header without addresses.
const UNSPECIFIED: u8 = 0x00;
/// Address family byte of a header with IPv4 addresses and TCP ports.
const TCP4: u8 = 0x11;
/// Address family byte of a header with IPv6 addresses and TCP ports.
const TCP6: u8 = 0x21;

/// The addresses of a client connection, which PROXY headers to upstreams contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProxiedConnection {
    /// Address and port of the client. The port is 0 if the port is unknown.
    pub source: SocketAddr,
    /// Address and port that the client connected to.
    pub destination: SocketAddr,
}

impl ProxiedConnection {
    /// Create the connection of a client. An unknown destination becomes the unspecified address of the same family,
    /// with port 0.
    pub fn new(source: SocketAddr, destination: Option<SocketAddr>) -> Self {
        let canonical = |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
        let source = canonical(source);
        let unknown = match source {
            SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        let destination = destination.map_or(SocketAddr::new(unknown, 0), canonical);
        ProxiedConnection { source, destination }
    }
}

/// Return the PROXY header of a connection on behalf of `client`, or of a connection of the gateway itself if `client`
/// is `None`.
pub(super) fn proxy_header(client: Option<&ProxiedConnection>) -> Vec<u8> {
    let mut addresses = Vec::new();
    let (command, family) = match client {
        None => (LOCAL, UNSPECIFIED),
        Some(ProxiedConnection { source, destination }) => {
            let family = match (source.ip(), destination.ip()) {
                (IpAddr::V4(source), IpAddr::V4(destination)) => {
                    addresses.extend_from_slice(&source.octets());
                    addresses.extend_from_slice(&destination.octets());
                    TCP4
                }
                // Map an IPv4 address to IPv6 if the other address is IPv6, as HAProxy does, because both addresses
                // must have the same family.
                (source, destination) => {
                    addresses.extend_from_slice(&mapped(source).octets());
                    addresses.extend_from_slice(&mapped(destination).octets());
                    TCP6
                }
            };
            addresses.extend_from_slice(&source.port().to_be_bytes());
            addresses.extend_from_slice(&destination.port().to_be_bytes());
            (PROXY, family)
        }
    };
    let mut header = PROTOCOL_PREFIX.to_vec();
    header.extend_from_slice(&[command, family]);
    // The conversion cannot overflow, because the addresses and ports have at most 36 bytes.
    header.extend_from_slice(&(addresses.len() as u16).to_be_bytes());
    header.extend_from_slice(&addresses);
    header
}

fn mapped(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header_of(source: &str, destination: Option<&str>) -> Vec<u8> {
        let parse = |text: &str| text.parse().unwrap();
        proxy_header(Some(&ProxiedConnection::new(parse(source), destination.map(parse))))
    }

    #[test]
    fn header_has_both_addresses_in_one_family() {
        let prefix = b"\r\n\r\n\0\r\nQUIT\n";
        let v4 = b"\x21\x11\x00\x0c\xc0\x00\x02\x01\x0a\x00\x00\x01\x30\x39\x01\xbb";
        assert_eq!(header_of("192.0.2.1:12345", Some("10.0.0.1:443")), [&prefix[..], v4].concat());
        let mixed = "2001:db8::1";
        let mixed = header_of(&format!("[{mixed}]:1"), Some("10.0.0.1:443"));
        assert_eq!(mixed[12..16], [0x21, 0x21, 0, 36]);
        assert_eq!(mixed[32..48], "::ffff:10.0.0.1".parse::<Ipv6Addr>().unwrap().octets());
        let dual_stack = header_of("[::ffff:192.0.2.1]:12345", Some("[::ffff:10.0.0.1]:443"));
        assert_eq!(dual_stack, [&prefix[..], v4].concat());
        assert_eq!(header_of("192.0.2.1:0", None)[16..], [192, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(proxy_header(None), [&prefix[..], b"\x20\x00\x00\x00"].concat());
    }
}
