//! What goes wrong with TLS, in a sentence that says what to do. It goes to the log; clients hear nothing of it.

use std::io;

use rustls::pki_types::ServerName;
use rustls::{AlertDescription, CertificateError, Error};
use tracing::warn;
use x509_parser::time::ASN1Time;

/// Why TLS with a server fails.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct TlsDiagnosis(String);

impl TlsDiagnosis {
    /// For an error of the handshake.
    pub(super) fn from_handshake_error(error: io::Error) -> io::Error {
        match error.kind() {
            // Whoever takes the first message for nonsense hangs up.
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                TlsDiagnosis::with_message("the server hangs up in the TLS handshake; is it http://?")
            }
            _ => TlsDiagnosis::from_io_error(error),
        }
    }

    /// For what is read on a connection to a server of this name. It is told here: with TLS 1.3 a server looks at our
    /// certificate when the handshake is over for us, and whoever waits for an answer may learn no more than that
    /// there is none.
    pub(super) fn from_read_error(error: io::Error, name: &ServerName<'_>) -> io::Error {
        let error = TlsDiagnosis::from_io_error(error);
        if error.get_ref().is_some_and(|inner| inner.is::<TlsDiagnosis>()) {
            warn!("TLS with `{}` broke off: {error}", name.to_str());
        }
        error
    }

    /// For an error of a stream.
    pub(super) fn from_io_error(error: io::Error) -> io::Error {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
            Some(source) => io::Error::new(error.kind(), TlsDiagnosis(describe_error(source))),
            None => error,
        }
    }

    pub(super) fn http2_not_negotiated() -> io::Error {
        TlsDiagnosis::with_message(
            "the server does not choose HTTP/2 by ALPN (`h2`); protocol = \"http1\" is for those without it",
        )
    }

    fn with_message(advice: &str) -> io::Error {
        io::Error::other(TlsDiagnosis(advice.to_owned()))
    }
}

fn describe_error(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(certificate_error) => describe_certificate_error(certificate_error),
        Error::AlertReceived(alert) => describe_alert(*alert),
        Error::InvalidMessage(_) => "the server speaks no TLS; is it http://?".to_owned(),
        Error::PeerIncompatible(_) => format!("the server's TLS is not ours, which is 1.2 and 1.3: {error}"),
        _ => format!("TLS fails: {error}"),
    }
}

/// What is wrong with the server's certificate.
fn describe_certificate_error(error: &CertificateError) -> String {
    // Times that no calendar has are left out.
    let date = |s: u64| ASN1Time::from_timestamp(s as i64).map_or(String::new(), |time| time.to_string());
    match error {
        CertificateError::NotValidForNameContext { expected, presented } => {
            // They come as `DnsName("a.test")` and `IpAddress(192.0.2.1)`.
            let bare = |name: &String| name.split(['(', ')', '"']).rfind(|part| !part.is_empty()).map(str::to_owned);
            let presented = presented.iter().filter_map(bare).collect::<Vec<_>>().join(", ");
            let presented = if presented.is_empty() { "no name at all (a common name is none)" } else { &presented };
            format!(
                "the server's certificate is not for `{}`, but for {presented}; tls.server_name says which name is meant",
                expected.to_str()
            )
        }
        CertificateError::UnknownIssuer => {
            "the server's certificate is signed by none of the authorities that are believed; tls.ca names the file \
             of the one that did, without it those of the system count"
                .to_owned()
        }
        CertificateError::ExpiredContext { not_after, .. } => {
            format!("the server's certificate has expired on {}; it needs a new one", date(not_after.as_secs()))
        }
        CertificateError::NotValidYetContext { not_before, .. } => {
            let date = date(not_before.as_secs());
            format!("the server's certificate is not valid before {date}; is a clock wrong?")
        }
        CertificateError::InvalidPurposeContext { .. } => {
            "the server's certificate is not meant for servers (extended key usage); it needs another one".to_owned()
        }
        // A name of the library below, which says no more.
        CertificateError::Other(why) if why.to_string().contains("CaUsedAsEndEntity") => {
            "the server shows the certificate of an authority (CA:TRUE, as `openssl req -x509` makes them); it needs one \
             of its own, signed by that authority"
                .to_owned()
        }
        _ => format!("the server's certificate is refused: {error}"),
    }
}

/// What the server does not like.
fn describe_alert(alert: AlertDescription) -> String {
    match alert {
        AlertDescription::CertificateRequired => {
            "the server wants a certificate of ours: tls.cert and tls.key".to_owned()
        }
        // Before TLS 1.3 a certificate that is missing is one of the things that this says.
        AlertDescription::HandshakeFailure => {
            "the server refuses the handshake (HandshakeFailure); it may want a certificate of ours, tls.cert and \
             tls.key, or other ciphers than ours"
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
            format!("the server refuses our certificate ({alert:?}); tls.cert must be one that it believes")
        }
        AlertDescription::UnrecognisedName => {
            "the server does not know the name that it is asked for; tls.server_name says which name is meant"
                .to_owned()
        }
        AlertDescription::NoApplicationProtocol => {
            "the server does not speak the `protocol` of this upstream (ALPN)".to_owned()
        }
        AlertDescription::ProtocolVersion => "the server speaks neither TLS 1.2 nor TLS 1.3".to_owned(),
        _ => format!("the server ends TLS: {alert:?}"),
    }
}
