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
use super::advice::NoTls;
use crate::tls::TlsError;
use crate::tls::authorities::TrustRoots;
use crate::tls::certificate::Certificate;

/// One upstream's side of TLS.
#[derive(Debug)]
pub struct Tls {
    // Sessions to resume are kept in it: replacing it forgets them, so that whoever is believed no more is asked again.
    config: ArcSwap<ClientConfig>,
    protocol: Protocol,
}

/// How to reach one server.
#[derive(Debug, Clone)]
pub struct ServerTls {
    /// Of its upstream.
    pub tls: Arc<Tls>,
    /// What its certificate must be for; a name is sent to it (SNI, RFC 6066 §3).
    pub name: ServerName<'static>,
}

/// What is made of the same files is the same; [`Tls`] itself cannot be compared.
impl PartialEq for ServerTls {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.tls, &other.tls) && self.name == other.name
    }
}

impl Tls {
    /// TLS 1.2 and 1.3 with one protocol by ALPN; with a certificate of our own for servers that want one.
    ///
    /// # Errors
    /// The library refuses the setup.
    pub fn new(authorities: TrustRoots, own: Option<&Certificate>, protocol: Protocol) -> Result<Self, TlsError> {
        Ok(Tls { config: ArcSwap::from_pointee(config(authorities, own, protocol)?), protocol })
    }

    /// What is agreed on.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Believes others, and is somebody else, from the next connection on.
    ///
    /// # Errors
    /// The library refuses the setup.
    pub fn replace(&self, authorities: TrustRoots, own: Option<&Certificate>) -> Result<(), TlsError> {
        self.config.store(Arc::new(config(authorities, own, self.protocol)?));
        Ok(())
    }
}

impl ServerTls {
    /// Shakes hands.
    ///
    /// # Errors
    /// [`NoTls`], which says what to do.
    pub async fn connect(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let connector = TlsConnector::from(self.tls.config.load_full());
        let stream = connector.connect(self.name.clone(), stream).await.map_err(NoTls::of_handshake)?;
        // Who speaks HTTP/1.1 need not know of ALPN; HTTP/2 is spoken only by agreement (RFC 9113 §3.2).
        if self.tls.protocol == Protocol::Http2 && stream.get_ref().1.alpn_protocol() != Some(b"h2") {
            return Err(NoTls::without_http2());
        }
        Ok(stream)
    }
}

fn config(authorities: TrustRoots, own: Option<&Certificate>, protocol: Protocol) -> Result<ClientConfig, TlsError> {
    let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(TlsError::Setup)?;
    let builder = builder.with_root_certificates(authorities.0);
    let mut config = match own {
        Some(own) => builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(own.certified_key.clone()))),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = match protocol {
        Protocol::Http1 => vec![b"http/1.1".to_vec()],
        Protocol::Http2 => vec![b"h2".to_vec()],
    };
    Ok(config)
}
