//! Certificates by ACME, from Pebble: challenges, storage, readiness, renewal.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use crate::support::admin_listener::{ask, with_admin};
use crate::support::certificates::{Authority, NOW, TlsClient, tls};
use crate::support::gateway::Gateway;
use crate::support::pebble::Pebble;
use crate::support::{eventually, signal};
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
        ROUTES.replace("path", "host = \"API.test\"\npath")
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
    let pebble = Pebble::start_with(&[("PEBBLE_VA_NOSLEEP", "0"), ("PEBBLE_VA_SLEEPTIME", "5")], "");
    let mut gateway = start(&pebble, "\"one.test\"", "");
    eventually("the CA starts the validation", || {
        gateway
            .directory()
            .join("acme")
            .read_dir()
            .unwrap()
            .any(|folder| folder.unwrap().path().join("one.test.challenge.json").exists())
    });
    let next = restart(&mut gateway);
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
