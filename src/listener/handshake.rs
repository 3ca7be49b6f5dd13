//! Detection of the HTTP version by ALPN or the HTTP/2 preface, and log messages for failed TLS handshakes.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use rustls::server::Acceptor;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;
use tokio_rustls::{LazyConfigAcceptor, TlsAcceptor};
use tracing::{info, warn};

use crate::http::problem;
use crate::limiter::clock::LogThrottle;
use crate::listener::metrics::HandshakeFailure;
use crate::listener::stream::ReclaimableStream;
use crate::tls::managed::{ALPN_ACME_TLS, ManagedCertificates};

/// Minimum interval between log messages of one kind, because clients could fill the log.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Number of bytes of the ClientHello that are read for the log. With post-quantum key shares the ClientHello does not
/// fit into one packet, and the SNI extension can be anywhere in the ClientHello.
const MAX_CLIENT_HELLO: usize = 4 << 10;

/// The log throttles, one for each [`HandshakeFailure`].
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

/// Return the response to an HTTP request without TLS.
pub(super) fn plain_http_response() -> Vec<u8> {
    let detail = "the request was sent without TLS to a port that serves HTTPS: use https:// in the URL";
    problem::raw_response(StatusCode::BAD_REQUEST, detail, "")
}

/// Accept the handshake of a client. For a CA that validates a name by TLS-ALPN-01 (RFC 8737), complete the validation
/// and return `None`.
///
/// # Errors An error if the handshake fails, or if there is no challenge for the name.
pub(super) async fn accept_or_validate<S: AsyncRead + AsyncWrite + Unpin>(
    acceptor: &TlsAcceptor,
    challenges: &ManagedCertificates,
    stream: S,
) -> io::Result<Option<TlsStream<S>>> {
    let start = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
    let hello = start.client_hello();
    let is_validation = hello.alpn().is_some_and(|mut protocols| protocols.any(|protocol| protocol == ALPN_ACME_TLS));
    if !is_validation {
        return start.into_stream(acceptor.config().clone()).await.map(Some);
    }
    let config = hello.server_name().and_then(|name| challenges.tls_challenge(name));
    let config = config.ok_or(io::Error::other("there is no ACME challenge for the server name"))?;
    let mut stream = start.into_stream(config).await?;
    stream.shutdown().await?;
    Ok(None)
}

/// Log a failed handshake, at most once per interval for each kind of failure. `network` is the client network, and
/// `error` the error of rustls or of the socket.
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
    let error = error.map(tracing::field::display);
    info!(
        network,
        reason, error, "a TLS handshake failed; further failures with this reason are not logged for a minute"
    );
}

/// Return the server name of a ClientHello (RFC 8446 §4.1.2, RFC 6066 §3) if the first record contains it.
fn server_name(record: &[u8]) -> Option<&[u8]> {
    // Skip record type, version and length, then handshake type and length, then version and random.
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

/// Take a vector with a length prefix of `length_bytes` bytes.
fn take_vector<'a>(bytes: &mut &'a [u8], length_bytes: usize) -> Option<&'a [u8]> {
    let (length, rest) = bytes.split_at_checked(length_bytes)?;
    let length = length.iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
    let (vector, rest) = rest.split_at_checked(length)?;
    *bytes = rest;
    Some(vector)
}

// The HTTP version of a connection: found by ALPN on a TLS connection, otherwise by the first bytes.

/// Connection preface of HTTP/2 (RFC 9113 §3.4).
pub(super) const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

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
    /// Return the version negotiated by ALPN. Without ALPN it is HTTP/1.1 (RFC 9113 §3.2).
    pub(super) fn from_alpn(alpn: Option<&[u8]>) -> Self {
        if alpn == Some(ALPN_H2) { Protocol::Http2 } else { Protocol::Http1 }
    }

    /// Detect the version by the first bytes, and put these bytes back into the stream.
    pub(super) async fn from_preface(stream: &mut ReclaimableStream) -> io::Result<Self> {
        let mut first = [0; PREFACE.len()];
        let mut count = 0;
        while count < PREFACE.len() && PREFACE.starts_with(&first[..count]) {
            match stream.read(&mut first[count..]).await? {
                0 => break,
                read => count += read,
            }
        }
        stream.rewind(Bytes::copy_from_slice(&first[..count]));
        Ok(if first == *PREFACE { Protocol::Http2 } else { Protocol::Http1 })
    }
}
