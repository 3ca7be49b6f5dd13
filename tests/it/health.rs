//! Active health checks: unhealthy servers get no requests until they are healthy again.
#![allow(clippy::disallowed_methods)] // waits use the system clock

use std::time::{Duration, Instant};

use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::reload::{reloads, with_admin};
use crate::support::server::{Behaviour, Server};

fn gateway(servers: &[&Server], workers: usize, health: &str, lines: &str) -> Gateway {
    let urls: Vec<_> = servers.iter().map(|server| format!("\"{}\"", server.url())).collect();
    Gateway::start(&format!(
        "[server]\nworkers = {workers}\n[upstream.api]\nservers = [{}]\nbalance = \"round-robin\"\n\
         health_check = {{ path = \"/healthz\", {health} }}\n{lines}\n\
         [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n",
        urls.join(", ")
    ))
}

const QUICK: &str = "interval = \"100ms\", timeout = \"5s\", unhealthy_threshold = 2, healthy_threshold = 2";

/// Send `count` GET requests, which must all succeed. Return how many of them `server` received.
fn share(gateway: &Gateway, server: &Server, count: usize) -> usize {
    let before = server.count();
    let mut client = gateway.client();
    (0..count).for_each(|_| assert_eq!(client.get("/").status, 200));
    server.count() - before
}

#[test]
fn unhealthy_server_gets_no_requests_until_it_is_healthy() {
    let [ill, well] = &Server::start_many();
    let gateway = gateway(&[ill, well], 2, QUICK, "");
    assert_eq!(share(&gateway, ill, 20), 10, "healthy before the first check");
    ill.set(Behaviour::Respond(500));
    eventually("the server is detected as unhealthy", || gateway.log().contains("server is unhealthy"));
    assert!(gateway.log().contains("unexpected status 500"), "{}", gateway.log());
    assert_eq!(share(&gateway, ill, 20), 0);
    ill.set(Behaviour::Respond(200));
    eventually("the server is detected as healthy", || gateway.log().contains("server is healthy again"));
    assert_eq!(share(&gateway, ill, 20), 10);
    ill.stop();
    eventually("the stopped server is detected", || gateway.log().matches("server is unhealthy").count() == 2);
    assert!(gateway.log().contains("cannot connect"), "{}", gateway.log());
    assert_eq!(gateway.log().matches("server is").count(), 3, "each change is logged once: {}", gateway.log());
}

#[test]
fn reload_keeps_the_health_of_servers_and_checks_new_ones() {
    let [ill, well, new] = &Server::start_many();
    let config = |lines: &str| {
        format!(
            "[upstream.api]\nservers = [\"{}\", \"{}\"]\nbalance = \"round-robin\"\n\
             health_check = {{ path = \"/healthz\", {QUICK} }}\n{lines}\n\
             [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n",
            ill.url(),
            well.url()
        )
    };
    let other = format!(
        "[upstream.new]\nservers = [\"{}\"]\nhealth_check = {{ path = \"/healthz\", {QUICK} }}\n\
         [[route]]\nname = \"new\"\npath = \"/new\"\nupstream = \"new\"",
        new.url()
    );
    let gateway = Gateway::start(&with_admin(&config("")));
    ill.set(Behaviour::Respond(500));
    eventually("the server is detected as unhealthy", || gateway.log().contains("server is unhealthy"));
    // Reload the configuration with a second upstream, then with another setting. After each reload, the unhealthy
    // server must get no request, even before its next health check.
    for lines in [other.as_str(), "response_timeout = \"7s\""] {
        reloads(&gateway, &config(lines));
        assert_eq!(share(&gateway, ill, 20), 0, "{lines}");
        if lines == other {
            eventually("the new one is checked", || new.checks() > 0);
        }
    }
}

#[test]
fn no_healthy_server_is_503_until_one_is_back() {
    let [one, two] = &Server::start_many();
    let health = "interval = \"1500ms\", unhealthy_threshold = 1, healthy_threshold = 1";
    let gateway = gateway(&[one, two], 1, health, "");
    one.stop();
    two.stop();
    eventually("both servers are unhealthy", || gateway.log().matches("server is unhealthy").count() == 2);
    let reply = gateway.get("/");
    reply.assert_problem(503, "no healthy server");
    assert_eq!(reply.header("retry-after"), Some("2"), "the interval, in whole seconds");
    two.start_again();
    let back = Instant::now();
    eventually("one is healthy", || gateway.get("/").status == 200);
    // The server is healthy again after at most two intervals of 1.5 s plus 10 %. The additional 1.65 s are a reserve
    // for a busy machine.
    assert!(back.elapsed() < Duration::from_millis(3300 + 1650), "{:?}", back.elapsed());
}

#[test]
fn server_that_does_not_answer_health_checks_is_unhealthy() {
    let [silent, well] = &Server::start_many();
    silent.set(Behaviour::Hang);
    let health = "interval = \"100ms\", timeout = \"100ms\", unhealthy_threshold = 2";
    let gateway = gateway(&[silent, well], 1, health, "");
    eventually("it is detected", || gateway.log().contains("no response within 100ms"));
    assert_eq!(share(&gateway, silent, 20), 0);
}

#[test]
fn only_listed_statuses_are_healthy() {
    for (status, healthy) in [(200, true), (204, true), (401, true), (201, false), (403, false)] {
        let [server, well] = &Server::start_many();
        server.set(Behaviour::Respond(status));
        let gateway = gateway(&[server, well], 1, &format!("{QUICK}, status = [200, 204, 401]"), "");
        match healthy {
            true => eventually("it is checked", || server.checks() > 4),
            false => eventually("it is unhealthy", || gateway.log().contains(&format!("unexpected status {status}"))),
        }
        assert_eq!(gateway.log().contains("server is unhealthy"), !healthy, "{status}");
    }
}

#[test]
fn health_checks_run_once_for_all_workers() {
    let server = Server::start();
    let started = Instant::now();
    let gateway = gateway(&[&server], 4, QUICK, "");
    eventually("some health checks are counted", || server.checks() >= 10);
    let (checks, elapsed) = (server.checks(), started.elapsed());
    let most = elapsed.as_millis() as usize / 90 + 2;
    assert!(checks <= most, "{checks} checks in {elapsed:?}, each 100 ms ± 10 %");
    assert_eq!(share(&gateway, &server, 3), 3);
    assert_eq!(server.count(), 3, "health checks do not count as requests");
}

#[test]
fn recovered_server_returns_with_slow_start() {
    let [back, other] = &Server::start_many();
    back.set(Behaviour::Respond(500));
    let gateway = gateway(&[back, other], 1, QUICK, "slow_start = \"10m\"");
    eventually("the server is detected as unhealthy", || gateway.log().contains("server is unhealthy"));
    back.set(Behaviour::Respond(200));
    eventually("the server is detected as healthy", || gateway.log().contains("server is healthy again"));
    // During slow start, the server has a tenth of the weight of the other one. It gets 20 of 220 requests, and a few
    // more if the test takes minutes.
    let share = share(&gateway, back, 220);
    assert!((20..40).contains(&share), "{share} of 220");
}

/// Start another gateway that serves as an HTTP/2 upstream. Its health check succeeds only at `path`.
fn http2_server(path: &str) -> Gateway {
    Gateway::start(&format!(
        "[[route]]\nname = \"health\"\npath = \"{path}\"\nrespond = {{ status = 200, body = \"well\" }}\n\
         [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nmethods = [\"POST\"]\nrespond = {{ status = 200, body = \"{path}\" }}\n"
    ))
}

#[test]
fn http2_upstream_is_health_checked_over_http2() {
    let (well, other, ill) = (http2_server("/healthz"), http2_server("/healthz"), http2_server("/elsewhere"));
    let gateway = Gateway::start(&format!(
        "[upstream.api]\nservers = [\"http://{}\", \"http://{}\", \"http://{}\"]\nprotocol = \"http2\"\n\
         balance = \"round-robin\"\nhealth_check = {{ path = \"/healthz\", {QUICK} }}\n\
         [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n",
        well.address, other.address, ill.address
    ));
    eventually("one is detected as unhealthy", || gateway.log().contains("unexpected status 405"));
    let mut client = gateway.client();
    for _ in 0..20 {
        assert_eq!(client.request("POST", "/any", &[], b"").text(), "/healthz");
    }
    // Stop this gateway, so that its port refuses connections. No request is in flight at this time.
    drop(other);
    for number in 0..20 {
        assert_eq!(client.get("/healthz").status, 200, "GET {number}");
    }
}

#[test]
fn reload_without_health_check_restores_unhealthy_servers() {
    let [ill, well, new] = &Server::start_many();
    let config = |servers: &[&Server], health: &str| {
        let urls: Vec<_> = servers.iter().map(|server| format!("\"{}\"", server.url())).collect();
        format!(
            "[upstream.api]\nservers = [{}]\nbalance = \"round-robin\"\n{health}\n\
             [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n",
            urls.join(", ")
        )
    };
    let health = format!("health_check = {{ path = \"/healthz\", {QUICK} }}");
    for servers in [&[ill, well][..], &[well, ill, new]] {
        ill.set(Behaviour::Respond(500));
        let gateway = Gateway::start(&with_admin(&config(&[ill, well], &health)));
        eventually("the server is detected as unhealthy", || gateway.log().contains("server is unhealthy"));
        assert_eq!(share(&gateway, ill, 20), 0);
        reloads(&gateway, &config(servers, ""));
        // The server still responds with 500, so no health check can have restored it.
        let before = ill.count();
        let mut client = gateway.client();
        let failed = (0..30).filter(|_| client.get("/").status == 500).count();
        assert_eq!((failed, ill.count() - before), (30 / servers.len(), 30 / servers.len()), "it gets requests again");
        assert!(!gateway.log().contains("healthy again"), "{}", gateway.log());
    }
}
