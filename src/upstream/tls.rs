//! TLS towards upstreams: whom to believe, and who we are. Both can be replaced while connections go on.

use std::io;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::ClientConfig;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::ServerName;
use rustls::sign::SingleCertAndKey;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::Protocol;
use super::advice::TlsDiagnosis;
use crate::tls::TlsError;
use crate::tls::authorities::TrustRoots;
use crate::tls::certificate::Certificate;

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
