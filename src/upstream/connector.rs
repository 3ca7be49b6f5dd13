//! A connection to a server: TCP, with TLS on it where its URL is `https:`.

use std::io;
use std::io::IoSlice;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use futures_util::stream::{FuturesUnordered, StreamExt};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::ServerName;
use rustls::sign::SingleCertAndKey;
use rustls::{AlertDescription, CertificateError, ClientConfig, Error};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tracing::warn;
use x509_parser::time::ASN1Time;

use crate::limiter::clock::monotonic;
use crate::tls::{Certificate, TlsError, TrustRoots};
use crate::upstream::endpoint::Endpoint;
use crate::upstream::endpoint_pool::{Connection, EndpointPool};
use crate::upstream::pending_queue::RequestPermit;
use crate::upstream::{PickState, Protocol, Upstream, UpstreamError};

/// What HTTP is spoken on.
#[derive(Debug)]
pub(super) enum UpstreamStream {
    Tcp(TcpStream),
    /// With the name that the server goes by.
    Tls(Box<(TlsStream<TcpStream>, ServerName<'static>)>),
}

impl UpstreamStream {
    /// Makes what a server expects of a connection to it.
    ///
    /// # Errors
    /// The handshake fails.
    pub(super) async fn handshake(stream: TcpStream, tls: Option<&EndpointTls>) -> io::Result<UpstreamStream> {
        // Requests are written whole; waiting for more would only delay them.
        stream.set_nodelay(true)?;
        match tls {
            None => Ok(UpstreamStream::Tcp(stream)),
            // On the heap: inside this future it would take room for every request.
            Some(tls) => {
                Ok(UpstreamStream::Tls(Box::new((Box::pin(tls.connect(stream)).await?, tls.server_name.clone()))))
            }
        }
    }

    pub(super) fn is_tls(&self) -> bool {
        matches!(self, UpstreamStream::Tls(_))
    }
}

impl AsyncRead for UpstreamStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            UpstreamStream::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            UpstreamStream::Tls(tls) => {
                let (stream, name) = &mut **tls;
                Pin::new(stream).poll_read(cx, buf).map_err(|error| TlsDiagnosis::from_read_error(error, name))
            }
        }
    }
}

impl AsyncWrite for UpstreamStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            UpstreamStream::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            UpstreamStream::Tls(tls) => Pin::new(&mut tls.0).poll_write(cx, buf).map_err(TlsDiagnosis::from_io_error),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            UpstreamStream::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            UpstreamStream::Tls(tls) => {
                Pin::new(&mut tls.0).poll_write_vectored(cx, bufs).map_err(TlsDiagnosis::from_io_error)
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            UpstreamStream::Tcp(stream) => stream.is_write_vectored(),
            UpstreamStream::Tls(tls) => tls.0.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            UpstreamStream::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            UpstreamStream::Tls(tls) => Pin::new(&mut tls.0).poll_flush(cx).map_err(TlsDiagnosis::from_io_error),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            UpstreamStream::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            UpstreamStream::Tls(tls) => Pin::new(&mut tls.0).poll_shutdown(cx),
        }
    }
}

// Connecting: to the member that was chosen, and to others where it does not take connections or takes long over it.

/// For this long a connect is alone, then another one runs beside it (the Connection Attempt Delay of RFC 8305 §5).
const CONNECTION_ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Members that one request tries at most.
const MAX_CONNECT_ATTEMPTS: usize = 9;

/// A connection, to whichever member it is.
pub(super) struct EndpointConnection {
    pub(super) pool: Arc<EndpointPool>,
    pub(super) permit: RequestPermit,
    pub(super) connection: Connection,
    pub(super) is_reused: bool,
}

impl Upstream {
    /// Connects to a member, or to another one; nothing has been written, so any request may do this. Connections that
    /// are there will do for others if `idle_will_do`.
    ///
    /// # Errors
    /// None could be reached, or not in time.
    pub(super) async fn connect(
        &self,
        first: (Arc<EndpointPool>, RequestPermit),
        pick_state: &mut PickState,
        allow_idle: bool,
    ) -> Result<EndpointConnection, UpstreamError> {
        let mut attempts = Vec::new();
        let racing = self.happy_eyeballs(first, pick_state, allow_idle, &mut attempts);
        match timeout(self.cluster.settings.connect_timeout, racing).await {
            Ok(result) => result,
            Err(_) => {
                let error = UpstreamError::ConnectTimeout { upstream: self.name().into() };
                attempts.iter().for_each(|(endpoint, _)| self.cluster.report_connect_failure(endpoint, &error));
                Err(error)
            }
        }
    }

    async fn happy_eyeballs(
        &self,
        first: (Arc<EndpointPool>, RequestPermit),
        pick_state: &mut PickState,
        allow_idle: bool,
        attempts: &mut Vec<(Arc<Endpoint>, Instant)>,
    ) -> Result<EndpointConnection, UpstreamError> {
        let mut connecting = FuturesUnordered::new();
        let mut next = Some(first);
        loop {
            if let Some((pool, permit)) = next.take() {
                pick_state.tried.push(permit.endpoint().clone());
                attempts.push((permit.endpoint().clone(), monotonic()));
                connecting.push(async move {
                    let result = pool.connect().await;
                    (pool, permit, result)
                });
            }
            tokio::select! {
                biased;
                Some((pool, permit, result)) = connecting.next() => {
                    attempts.retain(|(endpoint, _)| !Arc::ptr_eq(endpoint, permit.endpoint()));
                    let error = match result {
                        Ok((connection, is_reused)) => {
                            self.report_slow_connects(attempts);
                            return Ok(EndpointConnection { pool, permit, connection, is_reused });
                        }
                        Err(error) => error,
                    };
                    self.cluster.report_connect_failure(permit.endpoint(), &error);
                    drop(permit);
                    next = self.pick_other(pick_state);
                    if next.is_none() && connecting.is_empty() {
                        return Err(UpstreamError::Connect { upstream: self.name().into(), source: error });
                    }
                }
                () = sleep(CONNECTION_ATTEMPT_DELAY) => next = self.pick_other(pick_state),
            }
            if let Some((pool, _)) = next.as_ref().filter(|_| allow_idle)
                && let Some(connection) = pool.take_idle()
                && let Some((pool, permit)) = next.take()
            {
                self.report_slow_connects(attempts);
                return Ok(EndpointConnection { pool, permit, connection, is_reused: true });
            }
        }
    }

    /// Another member, of another family of addresses if there is one.
    pub(super) fn pick_other(&self, pick_state: &PickState) -> Option<(Arc<EndpointPool>, RequestPermit)> {
        if pick_state.tried.len() >= MAX_CONNECT_ATTEMPTS {
            return None;
        }
        let family = |endpoint: &Endpoint| endpoint.address.map(|address| address.is_ipv6());
        let last = pick_state.tried.last().and_then(|endpoint| family(endpoint));
        let table = self.cluster.load_balancer();
        let same = table.endpoints.iter().filter(|endpoint| family(endpoint) == last).cloned();
        let same_and_tried: Vec<_> = same.chain(pick_state.tried.iter().cloned()).collect();
        self.pick(pick_state.hash_key, &same_and_tried).or_else(|| self.pick(pick_state.hash_key, &pick_state.tried))
    }

    /// Those that had their head start and have lost all the same.
    fn report_slow_connects(&self, attempts: &[(Arc<Endpoint>, Instant)]) {
        for (endpoint, _) in attempts.iter().filter(|(_, since)| since.elapsed() >= CONNECTION_ATTEMPT_DELAY) {
            self.cluster.report_connect_failure(endpoint, &"connecting takes long");
        }
    }
}

// TLS towards upstreams: whom to believe, and who we are. Both can be replaced while connections go on.

/// One upstream's side of TLS.
#[derive(Debug)]
pub struct UpstreamTlsConfig {
    // Sessions to resume are kept in it: replacing it forgets them, so that whoever is believed no more is asked again.
    config: ArcSwap<ClientConfig>,
    protocol: Protocol,
}

/// How to reach one server.
#[derive(Debug, Clone)]
pub struct EndpointTls {
    /// Of its upstream.
    pub tls: Arc<UpstreamTlsConfig>,
    /// What its certificate must be for; a name is sent to it (SNI, RFC 6066 §3).
    pub server_name: ServerName<'static>,
}

/// What is made of the same files is the same; [`Tls`] itself cannot be compared.
impl PartialEq for EndpointTls {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.tls, &other.tls) && self.server_name == other.server_name
    }
}

impl UpstreamTlsConfig {
    /// TLS 1.2 and 1.3 with one protocol by ALPN; with a certificate of our own for servers that want one.
    ///
    /// # Errors
    /// The library refuses the setup.
    pub fn new(
        trust_roots: TrustRoots,
        gateway_certificate: Option<&Certificate>,
        protocol: Protocol,
    ) -> Result<Self, TlsError> {
        Ok(UpstreamTlsConfig {
            config: ArcSwap::from_pointee(client_config(trust_roots, gateway_certificate, protocol)?),
            protocol,
        })
    }

    /// What is agreed on.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Believes others, and is somebody else, from the next connection on.
    ///
    /// # Errors
    /// The library refuses the setup.
    pub fn replace(&self, trust_roots: TrustRoots, gateway_certificate: Option<&Certificate>) -> Result<(), TlsError> {
        self.config.store(Arc::new(client_config(trust_roots, gateway_certificate, self.protocol)?));
        Ok(())
    }
}

impl EndpointTls {
    /// Shakes hands.
    ///
    /// # Errors
    /// [`NoTls`], which says what to do.
    pub async fn connect(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let connector = TlsConnector::from(self.tls.config.load_full());
        let stream =
            connector.connect(self.server_name.clone(), stream).await.map_err(TlsDiagnosis::from_handshake_error)?;
        // Who speaks HTTP/1.1 need not know of ALPN; HTTP/2 is spoken only by agreement (RFC 9113 §3.2).
        if self.tls.protocol == Protocol::Http2 && stream.get_ref().1.alpn_protocol() != Some(b"h2") {
            return Err(TlsDiagnosis::http2_not_negotiated());
        }
        Ok(stream)
    }
}

fn client_config(
    trust_roots: TrustRoots,
    gateway_certificate: Option<&Certificate>,
    protocol: Protocol,
) -> Result<ClientConfig, TlsError> {
    let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(TlsError::Setup)?;
    let builder = builder.with_root_certificates(trust_roots.0);
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

// What goes wrong with TLS, in a sentence that says what to do. It goes to the log; clients hear nothing of it.

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
