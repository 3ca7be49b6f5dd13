//! Certificates by ACME, from Pebble: challenges, storage, readiness, renewal.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use crate::support::admin_listener::{ask, with_admin};
use crate::support::certificates::{TlsClient, tls};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::pebble::Pebble;
use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

/// Everything is redirected: validation must precede routes.
const ROUTES: &str =
    "[[route]]\nname = \"all\"\npath = \"/{*rest}\"\nredirect = { to = \"https://elsewhere.test/\" }\n";

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
    let gateway = start(&pebble, "\"one.test\", \"two.test\"", "challenges = [\"http-01\"]\n");
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
    let directory = gateway.directory().to_owned();
    drop(gateway);
    let _ = (shown, directory);
}
