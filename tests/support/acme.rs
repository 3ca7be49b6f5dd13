//! Gateways with ACME certificates, and a load balancer on the ports to which the CA sends its validation requests.

use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::version::TLS13;
use serde_json::Value;

use super::certificates::{TlsClient, tls};
use super::client::Client;
use super::gateway::Gateway;
use super::pebble::Pebble;
use super::reload::{ask, with_admin};
use super::signal;

/// All requests are redirected: the gateway must answer the CA's validation requests before it applies routes.
pub const ROUTES: &str =
    "[[route]]\nname = \"all\"\npath = \"/{*rest}\"\nredirect = { to = \"https://elsewhere.test/\" }\n";

/// Return a configuration with a plaintext listener for HTTP-01 and a TLS listener with ACME certificates. Both listen
/// on the ports to which the CA sends its validation requests. `more` is appended to `[acme]`.
pub fn config(pebble: &Pebble, names: &[&str], more: &str) -> String {
    with_admin(&format!(
        "{}{more}\n[[listener]]\naddress = \"127.0.0.1:{}\"\n\
         [[listener]]\naddress = \"127.0.0.1:{}\"\ntls = {{ acme = true, names = {names:?} }}\n{ROUTES}",
        pebble.table(),
        pebble.http_port,
        pebble.tls_port,
    ))
}

/// Start a gateway with [`config`].
pub fn start(pebble: &Pebble, names: &[&str], more: &str) -> Gateway {
    start_as(pebble, &config(pebble, names, more))
}

/// Start a gateway with the CA certificate in the file `ca.pem`.
pub fn start_as(pebble: &Pebble, config: &str) -> Gateway {
    Gateway::start_with(config, &[("ca.pem", &pebble.ca)])
}

/// Kill a gateway with SIGKILL. Start another one with the same files.
pub fn restart(gateway: &mut Gateway) -> Gateway {
    kill(gateway);
    Gateway::start_file(&gateway.directory().join("gateway.toml"))
}

/// Kill a gateway with SIGKILL.
pub fn kill(gateway: &mut Gateway) {
    signal(&gateway.child, "KILL");
    gateway.wait();
}

/// Return the configuration of a client that trusts certificates issued by this CA.
pub fn trusting(pebble: &Pebble) -> Arc<ClientConfig> {
    let root = CertificateDer::from_pem_slice(pebble.root().as_bytes()).unwrap();
    tls(&[&root], None, &[&TLS13])
}

pub fn is_ready(gateway: &Gateway) -> bool {
    ask(gateway, "GET", "/readyz").status == 200
}

/// Return the certificate that the gateway serves for a name, or `None` if the client does not trust it.
pub fn served(gateway: &Gateway, client: &Arc<ClientConfig>, name: &str) -> Option<CertificateDer<'static>> {
    let connected = TlsClient::handshake(client, gateway.addresses()[1], name).ok()?;
    Some(connected.peer_certificate().clone())
}

/// Return the entry of a name in the list of certificates (`GET /api/certificates`).
pub fn listed(gateway: &Gateway, name: &str) -> Value {
    let list = ask(gateway, "GET", "/api/certificates").json();
    let entries = list["certificates"].as_array().unwrap();
    entries.iter().find(|entry| entry["names"][0] == name).unwrap_or_else(|| panic!("no {name} in {list}")).clone()
}

/// Return a time in an entry of the list of certificates, in seconds since the Unix epoch.
pub fn time_s(entry: &Value, key: &str) -> u64 {
    let text = entry[key].as_str().unwrap_or_else(|| panic!("no {key} in {entry}"));
    text.parse::<jiff::Timestamp>().unwrap().as_second() as u64
}

pub fn request_renewal(gateway: &Gateway, name: &str) {
    let headers = [("authorization", "Bearer sesame"), ("content-type", "application/json")];
    let body = format!("{{\"name\": \"{name}\"}}");
    let mut admin = Client::connect(gateway.admin());
    let reply = admin.request("POST", "/api/certificates/renew", &headers, body.as_bytes());
    assert_eq!(reply.status, 200, "{}", reply.text());
}

/// Return the directory with the records of the CA in a gateway's ACME storage.
pub fn storage(gateway: &Gateway) -> PathBuf {
    gateway.directory().join("acme").read_dir().unwrap().next().unwrap().unwrap().path()
}

/// A load balancer on a port to which the CA sends its validation requests. It forwards each connection to the next
/// gateway in turn.
pub struct Balancer {
    /// The addresses of the gateways. While the list is empty, connections wait.
    pub servers: Mutex<Vec<SocketAddr>>,
    connections: AtomicUsize,
    /// The request line of the connection that waited last.
    waiting: Mutex<String>,
}

impl Balancer {
    pub fn start(port: u16, servers: Vec<SocketAddr>) -> Arc<Balancer> {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let (servers, connections) = (Mutex::new(servers), AtomicUsize::new(0));
        let balancer = Arc::new(Balancer { servers, connections, waiting: Mutex::default() });
        let shared = balancer.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let balancer = shared.clone();
                std::thread::spawn(move || balancer.relay(client));
            }
        });
        balancer
    }

    /// Replace the gateways.
    pub fn set(&self, servers: impl IntoIterator<Item = SocketAddr>) {
        *self.servers.lock().unwrap() = servers.into_iter().collect();
    }

    /// Return whether the CA has connected.
    pub fn is_used(&self) -> bool {
        self.connections.load(Ordering::SeqCst) > 0
    }

    /// Return whether this gateway knows the response to the validation request that waits. Gateways that share a
    /// store learn it from the store.
    pub fn can_be_answered_by(&self, gateway: &Gateway) -> bool {
        let line = self.waiting.lock().unwrap().clone();
        line.split(' ').nth(1).is_some_and(|path| Client::connect(gateway.addresses()[0]).get(path).status == 200)
    }

    fn relay(&self, client: TcpStream) {
        let index = self.connections.fetch_add(1, Ordering::SeqCst);
        let server = loop {
            let servers = self.servers.lock().unwrap().clone();
            if !servers.is_empty() {
                break TcpStream::connect(servers[index % servers.len()]);
            }
            let mut head = [0; 1024];
            let length = client.peek(&mut head).unwrap_or(0);
            *self.waiting.lock().unwrap() = String::from_utf8_lossy(&head[..length]).into_owned();
            std::thread::sleep(std::time::Duration::from_millis(1));
        };
        let Ok(server) = server else { return };
        let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
        let copying = std::thread::spawn(move || copy(back));
        copy((client, server));
        copying.join().unwrap();
    }
}

fn copy((mut from, mut to): (TcpStream, TcpStream)) {
    let _ = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
}
