//! Certificates by ACME, from Pebble: challenges, storage, readiness, renewal.

use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::support::certificates::{Authority, NOW, TlsClient, tls};
use crate::support::client::{Client, Reply};
use crate::support::gateway::Gateway;
use crate::support::pebble::Pebble;
use crate::support::redis::Redis;
use crate::support::{SetOnDrop, eventually, signal};
use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

/// Everything is redirected: validation must precede routes.
const ROUTES: &str =
    "[[route]]\nname = \"all\"\npath = \"/{*rest}\"\nredirect = { to = \"https://elsewhere.test/\" }\n";

/// The header with the admin token.
const TOKEN: (&str, &str) = ("authorization", "Bearer t");

fn with_admin(rest: &str) -> String {
    format!("[admin]\naddress = \"127.0.0.1:0\"\ntoken = \"t\"\n{rest}")
}

fn ask(gateway: &Gateway, path: &str) -> Reply {
    Client::connect(gateway.admin()).get_with(path, &[TOKEN])
}

/// Return a configuration with a plaintext listener for HTTP-01 and a TLS listener with certificates by ACME.
fn config(pebble: &Pebble, names: &str, more: &str) -> String {
    with_admin(&format!(
        "{}{more}\n[[listener]]\naddress = \"127.0.0.1:{}\"\n\
         [[listener]]\naddress = \"127.0.0.1:{}\"\ntls = {{ acme = true, names = [{names}] }}\n{ROUTES}",
        pebble.table(),
        pebble.http_port,
        pebble.tls_port,
    ))
}

fn start(pebble: &Pebble, names: &str, more: &str) -> Gateway {
    Gateway::start_with(&config(pebble, names, more), &[("ca.pem", &pebble.ca)])
}

/// Return the configuration of a client that trusts the certificates of this CA.
fn trusting(pebble: &Pebble) -> Arc<ClientConfig> {
    let root = CertificateDer::from_pem_slice(pebble.root().as_bytes()).unwrap();
    tls(&[&root], None, &[&rustls::version::TLS13])
}

fn is_ready(gateway: &Gateway) -> bool {
    ask(gateway, "/readyz").status == 200
}

/// Return the serial-bearing leaf that the gateway serves for a name, if the client trusts it.
fn served(gateway: &Gateway, client: &Arc<ClientConfig>, name: &str) -> Option<CertificateDer<'static>> {
    let connected = TlsClient::handshake(client, gateway.addresses()[1], name).ok()?;
    Some(connected.peer_certificate().clone())
}

#[test]
fn http_01_obtains_a_certificate_for_each_name_and_stores_it() {
    let pebble = Pebble::start_with(&[("PEBBLE_VA_NOSLEEP", "0"), ("PEBBLE_VA_SLEEPTIME", "1")], "");
    let mut gateway = start(&pebble, "\"one.test\", \"two.test\"", "challenges = [\"http-01\"]\n");
    let client = trusting(&pebble);
    let before = ask(&gateway, "/readyz");
    assert_eq!(before.status, 503, "{}", before.text());
    assert_eq!(before.json()["status"], "pending");
    assert_eq!(before.json()["certificates"]["missing"], serde_json::json!(["one.test", "two.test"]));
    let refused = TlsClient::handshake(&client, gateway.addresses()[1], "one.test").err().unwrap();
    assert!(refused.to_string().contains("UnknownIssuer"), "a self-signed certificate: {refused}");
    eventually("both certificates", || {
        ["one.test", "two.test"].iter().all(|name| served(&gateway, &client, name).is_some())
    });
    assert!(is_ready(&gateway), "{}", ask(&gateway, "/readyz").text());
    assert_eq!(pebble.orders(), 2, "{}", pebble.log());
    assert_eq!(gateway.get("/.well-known/acme-challenge/unknown").status, 308, "unknown tokens are for the routes");
    let folder = gateway.directory().join("acme").read_dir().unwrap().next().unwrap().unwrap().path();
    for name in ["account.json", "one.test.pem", "two.test.pem"] {
        assert_eq!(folder.join(name).metadata().unwrap().mode() & 0o777, 0o600, "{name}");
    }
    let rest = folder.read_dir().unwrap().count();
    assert_eq!(rest, 4, "besides, only the lock: neither orders nor challenges");

    // The next process serves the stored certificate from the start, and places no order.
    let shown = served(&gateway, &client, "one.test").unwrap();
    let next = restart(&mut gateway);
    assert!(is_ready(&next), "{}", ask(&next, "/readyz").text());
    assert_eq!(served(&next, &client, "one.test"), Some(shown));
    assert_eq!(pebble.orders(), 2);
}

/// Kill a gateway with SIGKILL and start another one with the same files.
fn restart(gateway: &mut Gateway) -> Gateway {
    signal(&gateway.child, "KILL");
    gateway.wait();
    Gateway::start_file(&gateway.directory().join("gateway.toml"))
}

#[test]
fn tls_alpn_01_validates_also_where_clients_need_certificates() {
    let pebble = Pebble::start();
    let clients = Authority::new("clients");
    let config = with_admin(&format!(
        "{}[[listener]]\naddress = \"127.0.0.1:{}\"\ntls = {{ acme = true, client_ca = \"clients.pem\", \
         client_auth = \"required\" }}\n{}",
        pebble.table(),
        pebble.tls_port,
        // Without `names`, the hosts of the routes have certificates.
        ROUTES.replace("path", "hosts = [\"API.test\"]\npath")
    ));
    let gateway = Gateway::start_with(&config, &[("ca.pem", &pebble.ca), ("clients.pem", &clients.pem())]);
    eventually("a certificate", || is_ready(&gateway));
    let root = CertificateDer::from_pem_slice(pebble.root().as_bytes()).unwrap();
    let own = clients.client(&[], NOW);
    let with_certificate = tls(&[&root], Some(&own), &[&rustls::version::TLS13]);
    let mut client = TlsClient::handshake(&with_certificate, gateway.address, "api.test").unwrap();
    assert_eq!(client.get_with("/", &[("host", "api.test")]).status, 308);
    // Without a pending challenge, the protocol of validations is not offered.
    let mut validating = ClientConfig::clone(&with_certificate);
    validating.alpn_protocols = vec![b"acme-tls/1".to_vec()];
    let refused = TlsClient::handshake(&Arc::new(validating), gateway.address, "api.test").err().unwrap();
    assert!(refused.to_string().contains("NoApplicationProtocol"), "{refused}");
}

#[test]
fn rejected_nonces_and_account_binding_lead_to_one_order() {
    let eab = ", \"externalAccountBindingRequired\": true, \
               \"externalAccountMACKeys\": {\"kid-1\": \"zWNDZM6eQGHWpSRTPal5eIUYFTu7EajVIoguysqZ9wG44nMEtx3MUAsUDkMTQ12W\"}";
    let pebble = Pebble::start_with(&[("PEBBLE_WFE_NONCEREJECT", "50")], eab);
    let account = "external_account = { key_id = \"kid-1\", \
                   mac_key = \"zWNDZM6eQGHWpSRTPal5eIUYFTu7EajVIoguysqZ9wG44nMEtx3MUAsUDkMTQ12W\" }\n";
    let gateway = start(&pebble, "\"one.test\"", account);
    eventually("a certificate", || is_ready(&gateway));
    assert_eq!(pebble.orders(), 1, "{}", pebble.log());
    assert!(!gateway.log().contains("cannot obtain"), "{}", gateway.log());
}

#[test]
fn account_without_the_required_binding_is_reported_and_retried_later() {
    let pebble = Pebble::start_with(&[], ", \"externalAccountBindingRequired\": true");
    let gateway = start(&pebble, "\"one.test\"", "");
    eventually("a report", || gateway.log().contains("externalAccountRequired"));
    let log = gateway.log();
    assert!(log.contains("cannot obtain a certificate") && log.contains("\"retry_in_s\":3"), "{log}");
    assert!(!is_ready(&gateway));
}

#[test]
fn order_that_was_interrupted_by_sigkill_is_resumed() {
    let pebble = Pebble::start();
    let balancer = Balancer::start(pebble.http_port, Vec::new());
    let config = config(&pebble, "\"one.test\"", "").replace(&format!(":{}\"", pebble.http_port), ":0\"");
    let mut gateway = Gateway::start_with(&config, &[("ca.pem", &pebble.ca)]);
    eventually("the CA starts the validation", || balancer.connections.load(Ordering::SeqCst) > 0);
    let next = restart(&mut gateway);
    *balancer.servers.lock().unwrap() = vec![next.address];
    eventually("a certificate", || is_ready(&next));
    assert!(next.log().contains("resuming an interrupted ACME order"), "{}", next.log());
    assert_eq!(pebble.orders(), 1, "{}", pebble.log());
}

#[test]
fn failed_validation_is_reported_with_the_reason_of_the_ca() {
    let pebble = Pebble::start();
    // The CA validates at another port.
    let config = config(&pebble, "\"one.test\"", "challenges = [\"http-01\"]\n");
    let config = config.replace(&format!(":{}\"", pebble.http_port), ":0\"");
    let gateway = Gateway::start_with(&config, &[("ca.pem", &pebble.ca)]);
    eventually("a report", || gateway.log().contains("could not validate"));
    let log = gateway.log();
    let line = log.lines().find(|line| line.contains("could not validate")).unwrap();
    assert!(line.contains("connection refused") && line.contains("\"name\":\"one.test\""), "{line}");
}

/// A balancer at a port that the CA validates at. It sends each connection to the next gateway.
struct Balancer {
    /// The gateways. While there is none, connections wait.
    servers: Mutex<Vec<SocketAddr>>,
    connections: AtomicUsize,
}

impl Balancer {
    fn start(port: u16, servers: Vec<SocketAddr>) -> Arc<Balancer> {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let balancer = Arc::new(Balancer { servers: Mutex::new(servers), connections: AtomicUsize::new(0) });
        let shared = balancer.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let balancer = shared.clone();
                std::thread::spawn(move || balancer.relay(client));
            }
        });
        balancer
    }

    fn relay(&self, client: TcpStream) {
        let index = self.connections.fetch_add(1, Ordering::SeqCst);
        let server = loop {
            let servers = self.servers.lock().unwrap().clone();
            if !servers.is_empty() {
                break TcpStream::connect(servers[index % servers.len()]);
            }
            std::thread::yield_now();
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

/// Return a configuration on free ports with a Redis store.
fn shared_config(pebble: &Pebble, redis: &Redis, secret: &str) -> String {
    with_admin(&format!(
        "{}[store]\nurl = \"{}\"\nsecret = \"{secret}\"\n[[listener]]\naddress = \"127.0.0.1:0\"\n\
         [[listener]]\naddress = \"127.0.0.1:0\"\ntls = {{ acme = true, names = [\"one.test\"] }}\n{ROUTES}",
        pebble.table(),
        redis.url(),
    ))
}

/// Start three gateways on one Redis, with a balancer at both ports of the CA. Return that for HTTP-01, too.
fn start_three(pebble: &Pebble, redis: &Redis) -> (Vec<Gateway>, Arc<Balancer>) {
    let start = |_| Gateway::start_with(&shared_config(pebble, redis, "s3cret"), &[("ca.pem", &pebble.ca)]);
    let gateways: Vec<_> = (0..3).map(start).collect();
    let addresses = |index: usize| gateways.iter().map(|gateway| gateway.addresses()[index]).collect();
    Balancer::start(pebble.tls_port, addresses(1));
    let balancer = Balancer::start(pebble.http_port, addresses(0));
    (gateways, balancer)
}

fn request_renewal(gateway: &Gateway) {
    let headers = [TOKEN, ("content-type", "application/json")];
    let body = b"{\"name\": \"one.test\"}";
    let reply = Client::connect(gateway.admin()).request("POST", "/api/certificates/renew", &headers, body);
    assert_eq!(reply.status, 200, "{}", reply.text());
}

#[test]
fn three_gateways_on_one_redis_place_one_order_per_renewal() {
    let (pebble, redis) = (Pebble::start_with(&[("PEBBLE_WFE_NONCEREJECT", "50")], ""), Redis::start());
    let (gateways, _) = start_three(&pebble, &redis);
    eventually("a certificate at all gateways", || gateways.iter().all(is_ready));
    assert_eq!(pebble.orders(), 1, "{}", pebble.log());
    let client = trusting(&pebble);
    let all = || gateways.iter().map(|gateway| served(gateway, &client, "one.test").unwrap()).collect::<Vec<_>>();
    let first = all();
    assert!(first.iter().all(|leaf| *leaf == first[0]), "all serve the same certificate");
    // Redis has no key that can be read without the secret.
    let key = redis.keys().into_iter().find(|key| key.contains(":acme:")).unwrap();
    let stored: Vec<Vec<u8>> = redis::cmd("HVALS").arg(&key).query(&mut redis.connection()).unwrap();
    for word in [&b"PRIVATE KEY"[..], b"key_pkcs8", b"CERTIFICATE", b"one.test"] {
        assert!(!stored.iter().any(|value| value.windows(word.len()).any(|part| part == word)), "{word:?}");
    }
    let other = Gateway::start_with(&shared_config(&pebble, &redis, "another"), &[("ca.pem", &pebble.ca)]);
    eventually("a report", || other.log().contains("is `store.secret` the same on all gateways?"));

    // A renewal that is requested of all three at once.
    gateways.iter().for_each(request_renewal);
    eventually("the new certificate at all gateways", || {
        let now = all();
        now.iter().all(|leaf| *leaf == now[0] && *leaf != first[0])
    });
    let metrics = ask(&gateways[0], "/metrics");
    assert!(
        metrics.text().contains("sluicegate_tls_certificate_not_after_seconds{name=\"one.test\",source=\"acme\"} ")
    );
    assert_eq!(pebble.orders(), 2, "{}", pebble.log());
}

#[test]
fn renewals_fail_no_handshake_and_need_one_order_each() {
    // Certificates are valid for 15 s, and renewed after 10 s.
    let (pebble, redis) = (Pebble::start_with(&[], ", \"certificateValidityPeriod\": 15"), Redis::start());
    let (gateways, _) = start_three(&pebble, &redis);
    eventually("a certificate at all gateways", || gateways.iter().all(is_ready));
    let client = trusting(&pebble);
    let first = served(&gateways[0], &client, "one.test").unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for gateway in &gateways {
            scope.spawn(|| {
                while !done.load(Ordering::SeqCst) {
                    assert!(served(gateway, &client, "one.test").is_some(), "a handshake failed");
                }
            });
        }
        let _stop = SetOnDrop(&done);
        eventually("a renewal", || {
            gateways.iter().all(|gateway| served(gateway, &client, "one.test").unwrap() != first)
        });
        assert_eq!(pebble.orders(), 2, "{}", pebble.log());
    });
}

#[test]
fn another_gateway_resumes_the_order_of_one_that_was_killed() {
    let (pebble, redis) = (Pebble::start(), Redis::start());
    let (mut gateways, balancer) = start_three(&pebble, &redis);
    // The validation waits until the gateway that placed the order is dead.
    balancer.servers.lock().unwrap().clear();
    eventually("the CA starts the validation", || balancer.connections.load(Ordering::SeqCst) > 0);
    let holder = gateways.iter().position(|gateway| gateway.log().contains("ACME account created")).unwrap();
    signal(&gateways.remove(holder).child, "KILL");
    *balancer.servers.lock().unwrap() = gateways.iter().map(|gateway| gateway.address).collect();
    eventually("a certificate at the others", || gateways.iter().all(is_ready));
    assert!(gateways.iter().any(|gateway| gateway.log().contains("resuming an interrupted ACME order")));
    assert_eq!(pebble.orders(), 1, "{}", pebble.log());
}

#[test]
fn certificates_stay_in_use_without_redis_and_return_to_an_empty_one() {
    let (pebble, mut redis) = (Pebble::start(), Redis::start());
    let (mut gateways, balancer) = start_three(&pebble, &redis);
    eventually("a certificate at all gateways", || gateways.iter().all(is_ready));
    let client = trusting(&pebble);
    let leaf = served(&gateways[0], &client, "one.test").unwrap();
    let port = redis.port;
    redis.child.kill().unwrap();
    redis.child.wait().unwrap();
    request_renewal(&gateways[0]);
    eventually("a report", || gateways[0].log().contains("no certificate is renewed"));
    let restarted = restart(&mut gateways[1]);
    balancer.servers.lock().unwrap()[1] = restarted.address;
    for gateway in [&gateways[0], &restarted] {
        assert_eq!(served(gateway, &client, "one.test"), Some(leaf.clone()));
        assert_eq!(ask(gateway, "/readyz").status, 200);
    }
    assert_eq!(pebble.orders(), 1, "without Redis, no gateway may place an order");
    let redis = Redis::start_with(port, &["--port", &port.to_string()]).unwrap();
    eventually("the requested renewal", || served(&gateways[2], &client, "one.test").unwrap() != leaf);
    eventually("all have it", || served(&gateways[0], &client, "one.test") == served(&restarted, &client, "one.test"));
    assert_eq!(pebble.orders(), 2, "{}", pebble.log());
    drop(redis);
}
