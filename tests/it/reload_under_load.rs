//! Fifty reloads under load, with invalid files and a new certificate: no request fails (fault 26 in docs/testing.md).

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::support::SetOnDrop;
use crate::support::certificates::{NOW, Pair, TlsClient, tls};
use crate::support::client::Client;
use crate::support::gateway::Gateway;
use crate::support::reload::{metric, reload, reloads, with_admin};
use crate::support::server::Server;
use rustls::version::TLS13;

const RELOADS: usize = 50;

/// Every tenth reload reads an invalid file.
const BAD: usize = 10;

/// Number of requests between two reloads. At 1,000 requests per second, these are 20 reloads per second.
const BETWEEN: usize = 50;

fn config(round: usize, server: &Server, certificate: &str) -> String {
    let port = server.address.port();
    // Each configuration changes a limit, the upstream, its servers and a route.
    let quota = format!("{}/s", 1_000_000 + round);
    let (timeout, servers) = (10 + round, ["127.0.0.1", "localhost"][round % 2]);
    let route = format!("[[route]]\nname = \"r{round}\"\npath = \"/r{round}\"\nrespond = {{ status = 200 }}\n");
    format!(
        "[[listener]]\naddress = \"127.0.0.1:0\"\n[[listener]]\naddress = \"127.0.0.1:0\"\n\
         tls.certificates = [{{ cert = \"{certificate}.pem\", key = \"{certificate}.key\" }}]\n\
         [limit.ip]\nby = \"ip\"\nquota = \"{quota}\"\n\
         [upstream.api]\nservers = [\"http://{servers}:{port}\"]\nresponse_timeout = \"{timeout}s\"\n\
         health_check = {{ path = \"/\", interval = \"100ms\", timeout = \"10s\" }}\n{}\
         [[route]]\nname = \"api\"\npath = \"/api\"\nupstream = \"api\"\nlimits = [\"ip\"]\n",
        if round.is_multiple_of(3) { route } else { String::new() }
    )
}

#[test]
fn fifty_reloads_under_load_fail_no_request() {
    let server = Server::start();
    let pairs = [Pair::server("gate.test", NOW), Pair::server("gate.test", NOW)];
    let [old, new] = &pairs;
    let files = [("old.pem", &*old.cert), ("old.key", &*old.key), ("new.pem", &*new.cert), ("new.key", &*new.key)];
    let gateway = Gateway::start_with(&with_admin(&config(0, &server, "old")), &files);
    let addresses = gateway.addresses();
    let believed = tls(&[&old.der, &new.der], None, &[&TLS13]);
    let (over, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let ask = |mut request: Box<dyn FnMut() -> u16 + Send>| {
            let (over, answered) = (&over, &answered);
            scope.spawn(move || {
                let mut statuses = Vec::new();
                while !over.load(Ordering::SeqCst) {
                    statuses.push(request());
                    answered.fetch_add(1, Ordering::SeqCst);
                }
                statuses
            })
        };
        let mut clients = Vec::new();
        for _ in 0..3 {
            let mut client = Client::connect(addresses[0]);
            clients.push(ask(Box::new(move || client.get("/api").status)));
        }
        let address = addresses[0];
        clients.push(ask(Box::new(move || Client::connect(address).get("/api").status)));
        let (address, believed) = (addresses[1], believed.clone());
        let shake = move || TlsClient::handshake(&believed, address, "gate.test").unwrap().get("/api").status;
        clients.push(ask(Box::new(shake)));
        // If this thread panics, the load ends as well.
        let end = SetOnDrop(&over);
        for round in 1..=RELOADS {
            let before = answered.load(Ordering::SeqCst);
            let certificate = if round > RELOADS / 2 { "new" } else { "old" };
            if round % BAD == 0 {
                let bad = config(round, &server, certificate).replace("limits = ", "limts = ");
                let reply = reload(&gateway, &bad);
                assert_eq!(reply.status, 422, "{}", reply.text());
                assert!(reply.text().contains("did you mean `limits`?"), "{}", reply.text());
            } else {
                reloads(&gateway, &config(round, &server, certificate));
            }
            crate::support::eventually("requests continue", || answered.load(Ordering::SeqCst) >= before + BETWEEN);
        }
        drop(end);
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    let failed = statuses.iter().filter(|status| **status != 200).count();
    println!(
        "fault 26: {RELOADS} reloads, {} of them bad, {} requests, {failed} failed",
        RELOADS / BAD,
        statuses.len()
    );
    assert_eq!(failed, 0, "{statuses:?}");
    assert!(metric(&gateway, "config_reloads_total{result=\"ok\"}") >= (RELOADS - RELOADS / BAD) as f64);
    assert!(metric(&gateway, "config_reloads_total{result=\"error\"}") >= (RELOADS / BAD) as f64);
    let shows =
        |pair: &Pair| TlsClient::handshake(&tls(&[&pair.der], None, &[&TLS13]), addresses[1], "gate.test").is_ok();
    assert!(shows(new) && !shows(old));
}
