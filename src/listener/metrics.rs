//! Listener metrics of a worker: TLS handshakes, and the bytes of client connections.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use rustls::{Error, PeerMisbehaved, ProtocolVersion};

use crate::limiter::metrics::Counter;

/// The reason why a TLS handshake failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandshakeFailure {
    /// The client sent HTTP without TLS.
    PlainHttp,
    /// The client started a TLS handshake on a listener without TLS.
    UnexpectedTls,
    /// The client sent neither TLS nor HTTP, or a malformed TLS message.
    NotTls,
    /// The server name (SNI) is not a DNS name, for example because it has a port (RFC 6066 §3).
    InvalidServerName,
    /// Client and gateway have no common TLS version, cipher suite, key exchange group or application protocol.
    NothingInCommon,
    /// The client sent no certificate, and the listener requires one.
    ClientCertificateMissing,
    /// The client certificate is invalid.
    ClientCertificateInvalid,
    /// The client sent an alert, usually because it does not trust the certificate of the gateway.
    ClientAlert,
    /// The handshake took longer than `server.header_timeout`.
    Timeout,
    /// The client closed the connection.
    Closed,
    /// The handshake failed with any other error.
    Other,
}

impl HandshakeFailure {
    /// All values of this enum. The counters are stored in the order of this list.
    pub const ALL: [HandshakeFailure; 11] = [
        HandshakeFailure::PlainHttp,
        HandshakeFailure::UnexpectedTls,
        HandshakeFailure::NotTls,
        HandshakeFailure::InvalidServerName,
        HandshakeFailure::NothingInCommon,
        HandshakeFailure::ClientCertificateMissing,
        HandshakeFailure::ClientCertificateInvalid,
        HandshakeFailure::ClientAlert,
        HandshakeFailure::Timeout,
        HandshakeFailure::Closed,
        HandshakeFailure::Other,
    ];

    /// Return the value of the metric label.
    pub fn label(self) -> &'static str {
        match self {
            HandshakeFailure::PlainHttp => "plain_http",
            HandshakeFailure::UnexpectedTls => "unexpected_tls",
            HandshakeFailure::NotTls => "not_tls",
            HandshakeFailure::InvalidServerName => "invalid_server_name",
            HandshakeFailure::NothingInCommon => "nothing_in_common",
            HandshakeFailure::ClientCertificateMissing => "client_certificate_missing",
            HandshakeFailure::ClientCertificateInvalid => "client_certificate_invalid",
            HandshakeFailure::ClientAlert => "client_alert",
            HandshakeFailure::Timeout => "timeout",
            HandshakeFailure::Closed => "closed",
            HandshakeFailure::Other => "other",
        }
    }

    /// Return the reason why a handshake failed with this error of tokio-rustls.
    pub(super) fn from_error(error: &io::Error) -> Self {
        let Some(reason) = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) else {
            return HandshakeFailure::Closed;
        };
        match reason {
            Error::PeerMisbehaved(PeerMisbehaved::ServerNameMustContainOneHostName) => {
                HandshakeFailure::InvalidServerName
            }
            Error::PeerIncompatible(_) | Error::NoApplicationProtocol => HandshakeFailure::NothingInCommon,
            Error::InvalidMessage(_) | Error::InappropriateMessage { .. } => HandshakeFailure::NotTls,
            Error::NoCertificatesPresented => HandshakeFailure::ClientCertificateMissing,
            Error::InvalidCertificate(_) => HandshakeFailure::ClientCertificateInvalid,
            Error::AlertReceived(_) => HandshakeFailure::ClientAlert,
            _ => HandshakeFailure::Other,
        }
    }
}

/// The TLS versions as values of the metric label.
pub const TLS_VERSIONS: [&str; 2] = ["1.2", "1.3"];

/// The application protocols (ALPN) as values of the metric label. `none` means that no protocol was negotiated.
pub const APPLICATION_PROTOCOLS: [&str; 3] = ["h2", "http/1.1", "none"];

/// Listener metrics of a worker.
#[derive(Debug, Default)]
pub struct ListenerMetrics {
    /// Completed handshakes, indexed by the position in [`TLS_VERSIONS`] and in [`APPLICATION_PROTOCOLS`].
    pub handshakes: [Counter<{ APPLICATION_PROTOCOLS.len() }>; TLS_VERSIONS.len()],
    /// Failed handshakes, counted for each [`HandshakeFailure`].
    pub handshake_failures: Counter<{ HandshakeFailure::ALL.len() }>,
    /// HTTP/2 connections that were closed because the client reset too many requests.
    pub too_many_resets: Counter<1>,
    received_bytes: AtomicU64,
    sent_bytes: AtomicU64,
}

impl ListenerMetrics {
    /// Record a completed handshake.
    pub(super) fn record_handshake(&self, version: Option<ProtocolVersion>, alpn: Option<&[u8]>) {
        let version = usize::from(version == Some(ProtocolVersion::TLSv1_3));
        let is_named = |name: &&str| alpn == Some(name.as_bytes());
        let protocol = APPLICATION_PROTOCOLS.iter().position(is_named).unwrap_or(APPLICATION_PROTOCOLS.len() - 1);
        self.handshakes[version].increment(protocol);
    }

    /// Record a failed handshake.
    pub(super) fn record_failure(&self, failure: HandshakeFailure) {
        self.handshake_failures.increment(failure as usize);
    }

    /// Record the number of bytes that were received from a client.
    pub(super) fn record_received(&self, bytes: usize) {
        self.received_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Record the number of bytes that were sent to a client.
    pub(super) fn record_sent(&self, bytes: usize) {
        self.sent_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Return the number of bytes received from clients and the number of bytes sent to clients.
    pub fn bytes(&self) -> [u64; 2] {
        [&self.received_bytes, &self.sent_bytes].map(|bytes| bytes.load(Ordering::Relaxed))
    }
}
