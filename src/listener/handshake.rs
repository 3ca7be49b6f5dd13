//! The start of a connection: log messages for failed TLS handshakes, detection of the HTTP version by ALPN or the
//! HTTP/2 preface, and the PROXY header.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use ppp::{v1, v2};
use rustls::server::Acceptor;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;
use tokio_rustls::{LazyConfigAcceptor, TlsAcceptor};
use tracing::{info, warn};

use crate::clock;
use crate::clock::LogThrottle;
use crate::http::{headers, problem};
use crate::listener::metrics::HandshakeFailure;
use crate::listener::stream::{PARSER_PROXY_STATUS, ReclaimableStream};
use crate::tls::{ALPN_ACME_TLS, ClientVerifier, DownstreamTls, Handshake};
use crate::upstream::connector::ProxiedConnection;

/// Minimum interval between log messages of one kind. Without this interval, clients could fill the log.
pub(super) const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Maximum number of bytes of the ClientHello that are read for the log. The SNI extension can be anywhere in the
/// ClientHello. With post-quantum key shares, the ClientHello does not fit into one packet.
const MAX_CLIENT_HELLO: usize = 4 << 10;

/// One log throttle for each [`HandshakeFailure`].
static LOG_THROTTLES: [LogThrottle; HandshakeFailure::ALL.len()] =
    [const { LogThrottle::new() }; HandshakeFailure::ALL.len()];

/// Return the first bytes of a connection without consuming them. The result is empty if the client has closed the
/// connection.
pub(super) async fn peek_client_hello(stream: &TcpStream) -> io::Result<Vec<u8>> {
    // Wait until the client sends data before allocating the buffer.
    stream.readable().await?;
    let mut bytes = vec![0; MAX_CLIENT_HELLO];
    let count = stream.peek(&mut bytes).await?;
    bytes.truncate(count);
    Ok(bytes)
}

/// Return whether the first bytes of a connection are an HTTP request without TLS. A TLS record starts with its type,
/// which is not a letter (RFC 8446 §5.1).
pub(super) fn is_plain_http(first_bytes: &[u8]) -> bool {
    let method = first_bytes.split(|byte| *byte == b' ').next().unwrap_or_default();
    !method.is_empty() && method.iter().all(u8::is_ascii_uppercase)
}

/// Detail of the response to an HTTP request without TLS on a listener with TLS.
pub(super) const PLAIN_HTTP: &str =
    "the request was sent without TLS to a port that serves HTTPS: use https:// in the URL";

/// Detail of the response to a TLS handshake on a listener without TLS. As with nginx and Go, the response is not
/// encrypted. A client that expects TLS then reports that the server does not use TLS.
pub(super) const UNEXPECTED_TLS: &str =
    "the request was sent with TLS to a port that serves HTTP without TLS: use http:// in the URL";

/// Return a 400 response for a connection on which no request can be parsed, because only one side uses TLS.
pub(super) fn tls_mismatch_response(detail: &str, proxy_status: bool) -> Vec<u8> {
    let mut headers =
        headers::format_date(clock::unix_us()).map_or_else(String::new, |date| format!("date: {date}\r\n"));
    if proxy_status {
        headers += PARSER_PROXY_STATUS;
    }
    problem::raw_response(StatusCode::BAD_REQUEST, detail, &headers)
}

/// Log a client that starts a TLS handshake on a listener without TLS, at most once per `LOG_INTERVAL`. `network` is
/// the client network.
pub(super) fn log_unexpected_tls(listener: Option<SocketAddr>, network: &str) {
    let failure = HandshakeFailure::UnexpectedTls;
    if LOG_THROTTLES[failure as usize].should_log(LOG_INTERVAL) {
        info!(
            listener = listener.map(tracing::field::display),
            network,
            reason = failure.label(),
            "a client started a TLS handshake on a listener without TLS; further handshakes are not logged for a minute"
        );
    }
}

/// A TLS connection after its handshake.
pub(super) struct Accepted<S> {
    /// The decrypted stream.
    pub(super) stream: TlsStream<S>,
    /// The verifier of client certificates for the server name. `None` if no client certificate was requested.
    pub(super) client_verifier: Option<Arc<ClientVerifier>>,
}

/// Accept the handshake of a client. For a CA that validates a name by TLS-ALPN-01 (RFC 8737), complete the validation
/// and return `None`.
///
/// # Errors
/// The handshake fails, or there is no challenge for the name.
pub(super) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
    tls: &DownstreamTls,
    stream: S,
) -> io::Result<Option<Accepted<S>>> {
    let challenges = tls.pending_challenges();
    if challenges.is_none() && !tls.has_host_policies() {
        let Handshake { config, client_verifier } = tls.policy("").handshake();
        let stream = TlsAcceptor::from(config).accept(stream).await?;
        return Ok(Some(Accepted { stream, client_verifier }));
    }
    let start = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
    let hello = start.client_hello();
    let is_validation = |name: &[u8]| name == ALPN_ACME_TLS;
    if let Some(challenges) = challenges.filter(|_| hello.alpn().is_some_and(|mut names| names.any(is_validation))) {
        let config = hello.server_name().and_then(|name| challenges.tls_challenge(name));
        let config = config.ok_or(io::Error::other("there is no ACME challenge for the server name"))?;
        let mut stream = start.into_stream(config).await?;
        stream.shutdown().await?;
        return Ok(None);
    }
    let name = hello.server_name().unwrap_or_default().to_ascii_lowercase();
    let Handshake { config, client_verifier } = tls.policy(&name).handshake();
    let stream = start.into_stream(config).await?;
    Ok(Some(Accepted { stream, client_verifier }))
}

/// Log a failed handshake, at most once per `LOG_INTERVAL` for each kind of failure. `network` is the client network,
/// and `error` is the error of rustls or of the socket.
pub(super) fn log_failure(failure: HandshakeFailure, error: Option<&io::Error>, network: &str, client_hello: &[u8]) {
    if !LOG_THROTTLES[failure as usize].should_log(LOG_INTERVAL) {
        return;
    }
    let reason = failure.label();
    if failure == HandshakeFailure::InvalidServerName {
        let name = server_name(client_hello).map(|name| String::from_utf8_lossy(name).into_owned());
        warn!(
            network,
            reason,
            server_name = name,
            "the client sent an invalid server name (SNI), and the TLS handshake was rejected: a server name is a DNS \
             name without a port (RFC 6066); for hey, add `-host NAME`"
        );
        return;
    }
    if failure == HandshakeFailure::PlainHttp {
        info!(
            network,
            reason,
            "a TLS handshake failed: the client sent HTTP without TLS; further failures with this reason are not \
             logged for a minute"
        );
        return;
    }
    let error = error.map(tracing::field::display);
    info!(
        network,
        reason, error, "a TLS handshake failed; further failures with this reason are not logged for a minute"
    );
}

/// Return the server name of a ClientHello (RFC 8446 §4.1.2, RFC 6066 §3) if the first record contains it.
fn server_name(record: &[u8]) -> Option<&[u8]> {
    // Skip the record header (5 bytes: type, version, length), the handshake header (4 bytes: type, length), the
    // version (2 bytes) and the random (32 bytes).
    let mut rest = record.get(5 + 4 + 2 + 32..)?;
    // Skip the session ID, cipher suites and compression methods.
    for prefix in [1, 2, 1] {
        take_vector(&mut rest, prefix)?;
    }
    // Accept truncated extensions, because the record may not contain the whole ClientHello.
    rest = rest.get(2..)?;
    loop {
        let kind = rest.get(..2)?;
        rest = &rest[2..];
        let mut extension = take_vector(&mut rest, 2)?;
        if kind == [0, 0] {
            let mut names = take_vector(&mut extension, 2)?;
            // Skip the name type, which is `host_name`.
            names = names.strip_prefix(&[0])?;
            return take_vector(&mut names, 2);
        }
    }
}

/// Take a TLS vector from the start of `bytes`. The length prefix of the vector has `length_bytes` bytes (RFC 8446
/// §3.4).
fn take_vector<'a>(bytes: &mut &'a [u8], length_bytes: usize) -> Option<&'a [u8]> {
    let (length, rest) = bytes.split_at_checked(length_bytes)?;
    let length = length.iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
    let (vector, rest) = rest.split_at_checked(length)?;
    *bytes = rest;
    Some(vector)
}

// The HTTP version of a connection. On a TLS connection, ALPN determines the version, otherwise the first bytes do.

/// Connection preface of HTTP/2 (RFC 9113 §3.4).
pub(super) const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// First byte of a TLS handshake: the type of the record (RFC 8446 §5.1). No HTTP method starts with this byte.
const TLS_HANDSHAKE: u8 = 22;

/// ALPN protocol ID of HTTP/2 (RFC 9113 §3.1).
const ALPN_H2: &[u8] = b"h2";

/// HTTP version of a downstream connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    /// The client uses HTTP/1.0 or HTTP/1.1.
    Http1,
    /// The client uses HTTP/2.
    Http2,
}

impl Protocol {
    /// Return the HTTP version that ALPN has negotiated. Without ALPN, the version is HTTP/1.1 (RFC 9113 §3.2).
    pub(super) fn from_alpn(alpn: Option<&[u8]>) -> Self {
        if alpn == Some(ALPN_H2) { Protocol::Http2 } else { Protocol::Http1 }
    }

    /// Detect the version by the first bytes, and put these bytes back into the stream. Return `None` if the bytes are
    /// the start of a TLS handshake.
    pub(super) async fn from_preface(stream: &mut ReclaimableStream) -> io::Result<Option<Self>> {
        let mut first = [0; PREFACE.len()];
        let mut count = 0;
        while count < PREFACE.len() && PREFACE.starts_with(&first[..count]) {
            match stream.read(&mut first[count..]).await? {
                0 => break,
                read => count += read,
            }
        }
        stream.rewind(first, count as u8);
        Ok(match first {
            [TLS_HANDSHAKE, ..] => None,
            _ if first == *PREFACE => Some(Protocol::Http2),
            _ => Some(Protocol::Http1),
        })
    }
}

// === PROXY protocol, versions 1 and 2 (<https://www.haproxy.org/download/3.2/doc/proxy-protocol.txt>) ===

/// Length of the fixed part of a version 2 header in bytes (§2.2).
const V2_FIXED_LENGTH: usize = 16;

/// Maximum length of a version 1 header in bytes (§2.1).
const MAX_V1_LENGTH: usize = 107;

/// Maximum length of a version 2 header in bytes. Addresses take up to 216 bytes. Extensions (TLVs, such as server
/// names and TLS details) take a few hundred bytes more.
const MAX_V2_LENGTH: usize = 4096;

/// Source of a proxied connection.
#[derive(Debug, PartialEq, Eq)]
pub enum ProxySource {
    /// A client. The variant contains the addresses of the client's connection to the proxy.
    Proxied(ProxiedConnection),
    /// The proxy itself, for example with a health check (`LOCAL`).
    Local,
    /// A client whose address is not given (`UNKNOWN`) or is not an IP address.
    Unknown,
}

/// The reason why the PROXY header was rejected.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// The connection failed or ended within the header.
    #[error("the PROXY header cannot be read: {0}")]
    Io(#[from] io::Error),
    /// The connection does not start with a PROXY header.
    #[error("the connection does not start with a PROXY header")]
    NoHeader,
    /// The header exceeds the maximum length.
    #[error("the PROXY header is too long")]
    TooLong,
    /// The version 1 header is malformed.
    #[error("the PROXY header is malformed: {0}")]
    Version1(#[from] v1::BinaryParseError),
    /// The version 1 header deviates from the specification, but the library `ppp` accepts it.
    #[error("the PROXY header is malformed")]
    Malformed,
    /// The version 2 header is malformed.
    #[error("the PROXY header is malformed: {0}")]
    Version2(#[from] v2::ParseError),
}

/// Read the PROXY header. Leave all bytes after the header in the socket.
pub(super) async fn read_proxy_header(stream: &mut TcpStream) -> Result<ProxySource, ProxyError> {
    // First read 12 bytes, the length of the version 2 signature. Headers of both versions are longer than 12 bytes.
    let mut header = vec![0; v2::PROTOCOL_PREFIX.len()];
    stream.read_exact(&mut header).await?;
    if header == v2::PROTOCOL_PREFIX {
        read_v2(stream, &mut header).await?;
    } else {
        read_v1(stream, &mut header).await?;
    }
    parse_proxy_header(&header)
}

/// Read the rest of a version 1 header, which ends with a newline.
async fn read_v1(stream: &mut TcpStream, header: &mut Vec<u8>) -> Result<(), ProxyError> {
    if !header.starts_with(b"PROXY ") {
        return Err(ProxyError::NoHeader);
    }
    let mut peeked = [0; MAX_V1_LENGTH];
    while header.last() != Some(&b'\n') {
        let room = MAX_V1_LENGTH - header.len();
        if room == 0 {
            return Err(ProxyError::TooLong);
        }
        // If the peeked bytes contain no newline, all of them belong to the header.
        let peeked_bytes = stream.peek(&mut peeked[..room]).await?;
        if peeked_bytes == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        let end = peeked[..peeked_bytes].iter().position(|byte| *byte == b'\n').map_or(peeked_bytes, |index| index + 1);
        let start = header.len();
        header.resize(start + end, 0);
        stream.read_exact(&mut header[start..]).await?;
    }
    Ok(())
}

/// Read the rest of a version 2 header: the fixed part, and the variable part whose length the fixed part contains.
async fn read_v2(stream: &mut TcpStream, header: &mut Vec<u8>) -> Result<(), ProxyError> {
    let start = header.len();
    header.resize(V2_FIXED_LENGTH, 0);
    stream.read_exact(&mut header[start..]).await?;
    let rest = usize::from(u16::from_be_bytes([header[V2_FIXED_LENGTH - 2], header[V2_FIXED_LENGTH - 1]]));
    if V2_FIXED_LENGTH + rest > MAX_V2_LENGTH {
        return Err(ProxyError::TooLong);
    }
    header.resize(V2_FIXED_LENGTH + rest, 0);
    stream.read_exact(&mut header[V2_FIXED_LENGTH..]).await?;
    Ok(())
}

/// Parse a complete header.
///
/// # Errors
/// The header is malformed.
pub fn parse_proxy_header(header: &[u8]) -> Result<ProxySource, ProxyError> {
    if !header.starts_with(v2::PROTOCOL_PREFIX) {
        let header = v1::Header::try_from(header)?;
        // `ppp` also accepts a lone LF within an `UNKNOWN` header. §2.1 allows line ends only as CRLF and only at the
        // end.
        let line =
            header.header.strip_suffix("\r\n").filter(|line| !line.contains('\n')).ok_or(ProxyError::Malformed)?;
        let client = match header.addresses {
            v1::Addresses::Tcp4(tcp) => {
                proxied(tcp.source_address, tcp.source_port, tcp.destination_address, tcp.destination_port)
            }
            v1::Addresses::Tcp6(tcp) => {
                proxied(tcp.source_address, tcp.source_port, tcp.destination_address, tcp.destination_port)
            }
            v1::Addresses::Unknown => return Ok(ProxySource::Unknown),
        };
        // `ppp` also accepts ports with a `+`. §2.1 permits digits only, and no other part of the line can contain a
        // `+`.
        return if line.contains('+') { Err(ProxyError::Malformed) } else { Ok(ProxySource::Proxied(client)) };
    }
    let header = v2::Header::try_from(header)?;
    Ok(match (header.command, header.protocol, header.addresses) {
        (v2::Command::Local, _, _) => ProxySource::Local,
        (v2::Command::Proxy, v2::Protocol::Stream, v2::Addresses::IPv4(tcp)) => ProxySource::Proxied(proxied(
            tcp.source_address,
            tcp.source_port,
            tcp.destination_address,
            tcp.destination_port,
        )),
        (v2::Command::Proxy, v2::Protocol::Stream, v2::Addresses::IPv6(tcp)) => ProxySource::Proxied(proxied(
            tcp.source_address,
            tcp.source_port,
            tcp.destination_address,
            tcp.destination_port,
        )),
        // Ignore the address if the connection is not TCP over IP (§2.2).
        (v2::Command::Proxy, _, _) => ProxySource::Unknown,
    })
}

fn proxied<A: Into<IpAddr>>(source: A, source_port: u16, destination: A, destination_port: u16) -> ProxiedConnection {
    let source = SocketAddr::new(source.into(), source_port);
    ProxiedConnection::new(source, Some(SocketAddr::new(destination.into(), destination_port)))
}
