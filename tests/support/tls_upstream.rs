//! Upstreams with TLS that record the handshakes of their clients.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::server::WebPkiClientVerifier;
use rustls::{HandshakeKind, RootCertStore, ServerConfig, ServerConnection, StreamOwned, SupportedProtocolVersion};

use super::certificates::{Authority, Pair};

/// The server side of a connection.
pub type Stream = StreamOwned<ServerConnection, TcpStream>;

/// A completed TLS handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handshake {
    /// The server name (SNI).
    pub name: Option<String>,
    pub protocol: Option<String>,
    pub resumed: bool,
    /// The client's certificate, if it sent one.
    pub client: Option<CertificateDer<'static>>,
}

/// An upstream. Its threads end with the test process.
pub struct TlsUpstream {
    pub address: SocketAddr,
    pub handshakes: Arc<Mutex<Vec<Handshake>>>,
}

impl TlsUpstream {
    /// Accept connections. For each, complete the TLS handshake and run `connection` in a new thread.
    pub fn serve(config: Arc<ServerConfig>, connection: impl Fn(Stream) + Send + Sync + 'static) -> TlsUpstream {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (connection, handshakes) = (Arc::new(connection), Arc::<Mutex<Vec<Handshake>>>::default());
        let record = handshakes.clone();
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (connection, record, config) = (connection.clone(), record.clone(), config.clone());
                thread::spawn(move || {
                    stream.set_nodelay(true).unwrap();
                    let mut stream = Stream::new(ServerConnection::new(config).unwrap(), stream);
                    while stream.conn.is_handshaking() {
                        if stream.conn.complete_io(&mut stream.sock).is_err() {
                            // Closing with unread data causes a reset, which may overtake the TLS alert.
                            let _ = stream.sock.shutdown(Shutdown::Write);
                            let _ = io::copy(&mut stream.sock, &mut io::sink());
                            return;
                        }
                    }
                    record.lock().unwrap().push(shake(&stream.conn));
                    connection(stream);
                });
            }
        });
        TlsUpstream { address, handshakes }
    }

    /// Return all completed handshakes so far.
    pub fn handshakes(&self) -> Vec<Handshake> {
        self.handshakes.lock().unwrap().clone()
    }
}

pub fn shake(connection: &ServerConnection) -> Handshake {
    Handshake {
        name: connection.server_name().map(str::to_owned),
        protocol: connection.alpn_protocol().map(|name| String::from_utf8(name.to_vec()).unwrap()),
        resumed: connection.handshake_kind() == Some(HandshakeKind::Resumed),
        client: connection.peer_certificates().map(|chain| chain[0].clone()),
    }
}

/// Return a server configuration with its certificate, the CA for client certificates, the ALPN protocols and the TLS
/// versions.
pub fn server(
    shows: &Pair,
    wants: Option<&Authority>,
    alpn: &[&str],
    versions: &[&'static SupportedProtocolVersion],
) -> Arc<ServerConfig> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone()).with_protocol_versions(versions).unwrap();
    let builder = match wants {
        None => builder.with_no_client_auth(),
        Some(authority) => {
            let mut roots = RootCertStore::empty();
            roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap()).unwrap();
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            builder.with_client_cert_verifier(verifier.build().unwrap())
        }
    };
    let mut config = builder.with_single_cert(vec![shows.der.clone()], shows.secret.clone_key()).unwrap();
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    Arc::new(config)
}
