//! ACME certificates from the test CA Pebble: challenges, certificate storage, readiness, reload and hot restart.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::version::TLS13;

use crate::hot_restart::hot_restart;
use crate::support::acme::{
    Balancer, ROUTES, config, is_ready, listed, request_renewal, restart, served, start, start_as, storage, trusting,
};
use crate::support::certificates::{Authority, NOW, Pair, TlsClient, tls};
use crate::support::gateway::{Gateway, binary};
use crate::support::pebble::Pebble;
use crate::support::reload::{ask, with_admin};
use crate::support::{SetOnDrop, eventually};

#[test]
fn http_01_obtains_a_certificate_for_each_name_and_stores_it() {
    let pebble = Pebble::start();
    let balancer = Balancer::start(pebble.http_port, Vec::new());
    let config = config(&pebble, &["one.test", "two.test"], "challenges = [\"http-01\"]\n");
    let mut gateway = start_as(&pebble, &config.replace(&format!(":{}\"", pebble.http_port), ":0\""));
    let client = trusting(&pebble);
    let before = ask(&gateway, "GET", "/readyz");
    assert_eq!(before.status, 503, "{}", before.text());
    assert_eq!(before.json()["status"], "pending");
    assert_eq!(before.json()["certificates"]["missing"], serde_json::json!(["one.test", "two.test"]));
    let refused = TlsClient::handshake(&client, gateway.addresses()[1], "one.test").err().unwrap();
    assert!(refused.to_string().contains("UnknownIssuer"), "a self-signed certificate: {refused}");
    balancer.set([gateway.address]);
    eventually("both certificates", || {
        ["one.test", "two.test"].iter().all(|name| served(&gateway, &client, name).is_some())
    });
    assert!(is_ready(&gateway), "{}", ask(&gateway, "GET", "/readyz").text());
    assert_eq!(pebble.orders(), 2, "{}", pebble.log());
    assert_eq!(gateway.get("/.well-known/acme-challenge/unknown").status, 308, "an unknown token reaches the routes");
    let folder = storage(&gateway);
    for name in ["account.json", "one.test.pem", "two.test.pem"] {
        assert_eq!(folder.join(name).metadata().unwrap().mode() & 0o777, 0o600, "{name}");
    }
    let files = folder.read_dir().unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let left: Vec<_> = files.filter(|name| name.contains(".order") || name.contains(".challenge")).collect();
    assert!(left.is_empty(), "{left:?}");

    // After a restart, the gateway serves the stored certificate at once and places no order at the CA.
    let shown = served(&gateway, &client, "one.test").unwrap();
    let next = restart(&mut gateway);
    assert!(is_ready(&next), "{}", ask(&next, "GET", "/readyz").text());
    assert_eq!(served(&next, &client, "one.test"), Some(shown));
    assert_eq!(pebble.orders(), 2);
}

#[test]
fn http_01_validates_also_where_the_listener_denies_all_clients() {
    let pebble = Pebble::start();
    let config = config(&pebble, &["one.test"], "challenges = [\"http-01\"]\n");
    let config = config.replacen("[[listener]]\n", "[[listener]]\ndeny = [\"127.0.0.0/8\"]\n", 1);
    let gateway = start_as(&pebble, &config);
    let client = trusting(&pebble);
    eventually("the certificate", || served(&gateway, &client, "one.test").is_some());
    assert_eq!(pebble.orders(), 1, "{}", pebble.log());
    assert_eq!(gateway.get("/.well-known/acme-challenge/unknown").status, 403);
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
        // Without `names`, the gateway obtains certificates for the hosts of the routes.
        ROUTES.replace("path", "hosts = [\"API.test\"]\npath")
    ));
    let gateway = Gateway::start_with(&config, &[("ca.pem", &pebble.ca), ("clients.pem", &clients.pem())]);
    eventually("a certificate", || is_ready(&gateway));
    let root = CertificateDer::from_pem_slice(pebble.root().as_bytes()).unwrap();
    let own = clients.client(&[], NOW);
    let with_certificate = tls(&[&root], Some(&own), &[&TLS13]);
    let mut client = TlsClient::handshake(&with_certificate, gateway.address, "api.test").unwrap();
    assert_eq!(client.get_with("/", &[("host", "api.test")]).status, 308);
    // While no challenge is pending, the listener does not offer the ALPN protocol `acme-tls/1`.
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
    let gateway = start(&pebble, &["one.test"], account);
    eventually("a certificate", || is_ready(&gateway));
    assert_eq!(pebble.orders(), 1, "{}", pebble.log());
    assert!(!gateway.log().contains("cannot obtain"), "{}", gateway.log());
}

#[test]
fn account_without_the_required_binding_is_reported_and_retried_later() {
    let pebble = Pebble::start_with(&[], ", \"externalAccountBindingRequired\": true");
    let gateway = start(&pebble, &["one.test"], "");
    eventually("the error is logged", || gateway.log().contains("externalAccountRequired"));
    let log = gateway.log();
    assert!(log.contains("cannot obtain a certificate") && log.contains("\"retry_in_s\":3"), "{log}");
    assert!(!is_ready(&gateway));
}

#[test]
fn order_that_was_interrupted_by_sigkill_is_resumed() {
    let pebble = Pebble::start();
    let balancer = Balancer::start(pebble.http_port, Vec::new());
    let config = config(&pebble, &["one.test"], "").replace(&format!(":{}\"", pebble.http_port), ":0\"");
    let mut gateway = start_as(&pebble, &config);
    eventually("the CA starts the validation", || balancer.is_used());
    let next = restart(&mut gateway);
    balancer.set([next.address]);
    eventually("a certificate", || is_ready(&next));
    assert!(next.log().contains("resuming an interrupted ACME order"), "{}", next.log());
    assert_eq!(pebble.orders(), 1, "{}", pebble.log());
}

#[test]
fn failed_validation_is_reported_with_the_reason_of_the_ca() {
    let pebble = Pebble::start();
    // The gateway does not listen on the port to which the CA connects for the HTTP-01 validation.
    let config = config(&pebble, &["one.test"], "challenges = [\"http-01\"]\n");
    let config = config.replace(&format!(":{}\"", pebble.http_port), ":0\"");
    let gateway = start_as(&pebble, &config);
    eventually("the error is logged", || gateway.log().contains("could not validate"));
    let log = gateway.log();
    let line = log.lines().find(|line| line.contains("could not validate")).unwrap();
    assert!(line.contains("connection refused") && line.contains("\"name\":\"one.test\""), "{line}");
}

#[test]
fn slow_validation_is_polled_and_needs_one_order() {
    let pebble = Pebble::start();
    let balancer = Balancer::start(pebble.http_port, Vec::new());
    let config = config(&pebble, &["one.test"], "").replace(&format!(":{}\"", pebble.http_port), ":0\"");
    let gateway = start_as(&pebble, &config);
    eventually("the CA starts the validation", || balancer.is_used());
    eventually("the gateway polls the order", || pebble.count("POST /my-order/") >= 3);
    balancer.set([gateway.address]);
    eventually("a certificate", || is_ready(&gateway));
    assert_eq!((pebble.orders(), pebble.issued()), (1, 1), "{}", pebble.log());
    assert!(!gateway.log().contains("cannot obtain"), "{}", gateway.log());
}

#[test]
fn reload_that_adds_a_name_orders_only_its_certificate() {
    let pebble = Pebble::start();
    let gateway = start(&pebble, &["one.test"], "");
    let client = trusting(&pebble);
    eventually("a certificate", || is_ready(&gateway));
    let first = served(&gateway, &client, "one.test");
    assert!(first.is_some());
    let names = |names: &[&str]| {
        gateway.put(&config(&pebble, names, ""));
        let reply = ask(&gateway, "POST", "/api/reload");
        assert_eq!(reply.status, 200, "{}", reply.text());
    };
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let handshakes = scope.spawn(|| {
            let mut handshakes = 0;
            while !done.load(Ordering::SeqCst) {
                assert_eq!(served(&gateway, &client, "one.test"), first, "the certificate in use");
                handshakes += 1;
            }
            handshakes
        });
        let end = SetOnDrop(&done);
        names(&["one.test", "two.test"]);
        eventually("the new name has a certificate", || served(&gateway, &client, "two.test").is_some());
        drop(end);
        assert!(handshakes.join().unwrap() > 0);
    });
    assert_eq!(pebble.orders(), 2, "{}", pebble.log());
    names(&["two.test"]);
    let list = ask(&gateway, "GET", "/api/certificates").json();
    assert_eq!(list["certificates"].as_array().unwrap().len(), 1, "{list}");
    // If a removed name is configured again, the gateway uses its stored certificate.
    names(&["two.test", "three.test", "one.test"]);
    eventually("the third name has a certificate", || served(&gateway, &client, "three.test").is_some());
    assert_eq!(served(&gateway, &client, "one.test"), first);
    assert_eq!(pebble.orders(), 3, "{}", pebble.log());
}

#[test]
fn hot_restart_keeps_the_certificate_and_the_new_process_renews_it() {
    let pebble = Pebble::start();
    let mut gateway = start(&pebble, &["one.test"], "");
    let client = trusting(&pebble);
    eventually("a certificate", || is_ready(&gateway));
    let first = served(&gateway, &client, "one.test").unwrap();
    let _successor = hot_restart(&mut gateway);
    assert!(is_ready(&gateway));
    assert_eq!(served(&gateway, &client, "one.test").as_ref(), Some(&first));
    assert_eq!(pebble.orders(), 1, "{}", pebble.log());
    // The old process held the lock of the certificate storage until its end. The new process needs this lock to renew
    // a certificate.
    request_renewal(&gateway, "one.test");
    eventually("a new certificate", || served(&gateway, &client, "one.test").is_some_and(|leaf| leaf != first));
    assert_eq!(pebble.orders(), 2, "{}", pebble.log());
    assert_eq!(listed(&gateway, "one.test")["failures"], 0);
}

#[test]
fn hot_restart_in_an_order_resumes_it() {
    let pebble = Pebble::start();
    let balancer = Balancer::start(pebble.http_port, Vec::new());
    let config = config(&pebble, &["one.test"], "").replace(&format!(":{}\"", pebble.http_port), ":0\"");
    let mut gateway = start_as(&pebble, &config);
    eventually("the CA starts the validation", || balancer.is_used());
    let _successor = hot_restart(&mut gateway);
    balancer.set([gateway.address]);
    eventually("a certificate", || is_ready(&gateway));
    assert!(gateway.log().contains("resuming an interrupted ACME order"), "{}", gateway.log());
    assert_eq!((pebble.orders(), pebble.issued()), (1, 1), "{}", pebble.log());
}

#[test]
fn commands_list_and_renew_the_certificates_of_a_running_gateway() {
    let (pebble, file) = (Pebble::start(), Pair::server("file.test", NOW));
    let listener = "[[listener]]\naddress = \"127.0.0.1:0\"\n\
                    tls.certificates = [{ cert = \"file.pem\", key = \"file.key\" }]\n";
    let files = [("ca.pem", &*pebble.ca), ("file.pem", &*file.cert), ("file.key", &*file.key)];
    let gateway = Gateway::start_with(&format!("{}{listener}", config(&pebble, &["one.test"], "")), &files);
    let client = trusting(&pebble);
    eventually("a certificate", || is_ready(&gateway));
    let run = |arguments: &[&str]| {
        let admin = format!("http://{}", gateway.admin());
        let mut command = binary();
        command.args(arguments).args(["--admin", &admin]).env("SLUICEGATE_ADMIN_TOKEN", "sesame");
        let output = command.output().unwrap();
        let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        (output.status.code(), out, err)
    };
    let (code, out, err) = run(&["certificates"]);
    assert_eq!((code, &*err), (Some(0), ""), "{out}");
    let columns = |row: usize, columns: &[&str]| {
        let row = out.lines().nth(row).unwrap_or_default();
        let mut rest = row;
        for column in columns {
            rest = rest.split_once(column).unwrap_or_else(|| panic!("no {column} in {row}")).1;
        }
    };
    columns(0, &["NAMES", "ISSUER", "NOT AFTER", "SOURCE", "NEXT RENEWAL", "LAST ATTEMPT"]);
    columns(1, &["file.test", "file.test", "4000-01-01", "file"]);
    let entry = listed(&gateway, "one.test");
    let text = |key: &str| entry[key].as_str().unwrap();
    assert!(text("issuer").starts_with("CN=Pebble Intermediate CA"), "{entry}");
    columns(2, &["one.test", text("issuer"), text("not_after"), "acme", text("next_renewal")]);

    let first = served(&gateway, &client, "one.test").unwrap();
    let (code, out, err) = run(&["renew", "--name", "One.test"]);
    assert_eq!((code, &*err), (Some(0), ""), "{out}");
    assert_eq!(out, "requested the renewal of `One.test`; `sluicegate certificates` shows the result\n");
    eventually("a new certificate", || served(&gateway, &client, "one.test").is_some_and(|leaf| leaf != first));
    for name in ["file.test", "two.test"] {
        let (code, out, err) = run(&["renew", "--name", name]);
        assert_eq!((code, &*out), (Some(1), ""), "{err}");
        assert!(err.contains(&format!("no listener obtains a certificate for `{name}` by ACME")), "{err}");
    }
    assert_eq!(pebble.orders(), 2, "{}", pebble.log());
}
