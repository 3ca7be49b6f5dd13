//! State that survives a reload: counters, endpoints and their connections, the state of the store, and TLS sessions.

use std::io::Write;

use crate::support::certificates::{NOW, PAST, Pair, TlsClient, tls};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::redis::Redis;
use crate::support::reload::{ask, metric, reload, reloads, says, with_admin};
use crate::support::server::{Behaviour, Server};
use rustls::HandshakeKind;
use rustls::version::TLS13;

#[test]
fn reload_keeps_counts_and_metrics() {
    let config = |quota: &str, more: &str| {
        format!(
            "{}limits = [\"day\"]\n[limit.day]\nby = \"ip\"\nquota = \"{quota}\"\nalgorithm = \"fixed-window\"\n{more}",
            says("x")
        )
    };
    let gateway = Gateway::start(&with_admin(&config("5/day", "")));
    let mut client = gateway.client();
    assert_eq!([(); 3].map(|()| client.get("/says").remaining("day")), [4, 3, 2]);
    reloads(&gateway, &config("5/day", "[[route]]\nname = \"a\"\npath = \"/a\"\nrespond = { status = 200 }\n"));
    assert_eq!(client.get("/says").remaining("day"), 1);
    // A limit with a changed quota keeps its state.
    reloads(&gateway, &config("8/day", ""));
    assert_eq!(client.get("/says").remaining("day"), 3);
    assert_eq!(metric(&gateway, "http_requests_total{route=\"says\",status=\"2xx\"}"), 5.0);
    assert_eq!(metric(&gateway, "limit_decisions_total{limit=\"day\",decision=\"allowed\"}"), 5.0);
    assert!(metric(&gateway, "config_reloads_total{result=\"ok\"}") >= 2.0);
}

#[test]
fn requests_in_flight_finish_on_the_old_configuration() {
    let [gone, stays] = Server::start_many();
    let upstream = |name: &str, server: &Server| {
        format!(
            "[upstream.{name}]\nservers = [\"{}\"]\nhealth_check = {{ path = \"/\", interval = \"20ms\", timeout = \"10s\" }}\n\
             [[route]]\nname = \"{name}\"\npath = \"/{name}\"\nupstream = \"{name}\"\n",
            server.url()
        )
    };
    let gateway = Gateway::start(&with_admin(&format!("{}{}", upstream("gone", &gone), upstream("stays", &stays))));
    eventually("both servers are checked", || gone.checks() > 0 && stays.checks() > 0);
    gone.set(Behaviour::Hang);
    let mut client = gateway.client();
    client.send(b"GET /gone HTTP/1.1\r\nHost: a\r\n\r\n");
    eventually("the request is in flight", || gone.count() == 1);
    reloads(&gateway, &upstream("stays", &stays));
    assert_eq!(gateway.get("/gone").status, 404);
    gone.set(Behaviour::Respond(200));
    assert_eq!(client.reply().unwrap().status, 200, "the running request gets its response");
    assert_eq!(client.get("/gone").status, 404);
    // One health check may still be in flight.
    let (checks, before) = (gone.checks(), stays.checks());
    eventually("the other server is still checked", || stays.checks() > before + 20);
    assert!(gone.checks() <= checks + 1, "{} more", gone.checks() - checks);
    eventually("the connections to the removed server are closed", || gone.connections() == 0);
    assert!(!ask(&gateway, "GET", "/metrics").text().contains("upstream=\"gone\",server="));
}

#[test]
fn reload_keeps_ejected_servers_and_pooled_connections() {
    let [bad, good, new] = Server::start_many();
    let config = |servers: &[&Server], more: &str| {
        let urls: Vec<_> = servers.iter().map(|server| format!("\"{}\"", server.url())).collect();
        format!(
            "[server]\nworkers = 1\n[upstream.api]\nservers = [{}]\nbalance = \"round-robin\"\n{more}pool_idle_timeout = \"60s\"\n\
             outlier_detection = {{ consecutive_errors = 1, base_ejection_time = \"60s\" }}\n[[route]]\nname = \"api\"\npath = \"/\"\nupstream = \"api\"\n",
            urls.join(", ")
        )
    };
    let gateway = Gateway::start(&with_admin(&config(&[&bad, &good], "")));
    bad.set(Behaviour::Respond(503));
    let mut client = gateway.client();
    let state = |server: &Server| {
        let ready = ask(&gateway, "GET", "/readyz").json();
        let all = ready["upstreams"]["api"].as_array().unwrap().clone();
        let own = all.iter().find(|one| server.url().ends_with(one["server"].as_str().unwrap())).unwrap();
        own["state"].as_str().unwrap().to_owned()
    };
    eventually("the failing server is ejected", || {
        client.get("/");
        state(&bad) == "ejected"
    });
    assert_eq!(client.get("/").status, 200);
    let (asked, connections) = (bad.count(), good.accepted());
    for (servers, more) in
        [(&[&bad, &good][..], ""), (&[&good, &new, &bad], ""), (&[&good, &new, &bad], "response_timeout = \"5s\"\n")]
    {
        reloads(&gateway, &config(servers, more));
        assert_eq!(state(&bad), "ejected", "{servers:?}", servers = servers.len());
        for _ in 0..10 {
            assert_eq!(client.get("/").status, 200);
        }
    }
    assert_eq!(bad.count(), asked, "the ejected server gets no request");
    assert_eq!(good.accepted(), connections, "the other server gets no new connection");
    assert!(new.count() > 0, "the added server gets requests");
}

#[test]
fn permit_released_by_an_old_request_admits_a_queued_new_one() {
    let server = Server::start();
    let config = |more: &str| {
        format!(
            "[upstream.api]\nservers = [\"{}\"]\nmax_requests = 1\nmax_queue = 9\nconnect_timeout = \"1m\"\n{more}\
             [[route]]\nname = \"api\"\npath = \"/\"\nupstream = \"api\"\n",
            server.url()
        )
    };
    let gateway = Gateway::start(&with_admin(&config("")));
    server.set(Behaviour::Hang);
    let mut clients = [gateway.client(), gateway.client()];
    clients[0].send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    eventually("the request is in flight", || server.count() == 1);
    reloads(&gateway, &config("response_timeout = \"59s\"\n"));
    clients[1].send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    let line = format!("upstream_server_requests_in_flight{{upstream=\"api\",server=\"{}\"}}", server.address);
    assert_eq!(metric(&gateway, &line), 1.0, "the request that started before the reload is counted");
    server.set(Behaviour::Respond(200));
    for client in &mut clients {
        assert_eq!(client.reply().unwrap().status, 200);
    }
    assert_eq!(server.max_running(), 1, "max_requests holds across the reload");
}

#[test]
fn reload_keeps_a_request_whose_body_is_in_flight() {
    let server = Server::start();
    let config = |path: &str| {
        format!(
            "[upstream.api]\nservers = [\"{}\"]\n[[route]]\nname = \"api\"\npath = \"{path}\"\nupstream = \"api\"\n",
            server.url()
        )
    };
    let gateway = Gateway::start(&with_admin(&config("/a")));
    let mut client = gateway.client();
    client.send(b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n");
    eventually("the server has a connection", || server.connections() == 1);
    reloads(&gateway, &config("/b"));
    client.stream.get_mut().write_all(b"2\r\ncd\r\n0\r\n\r\n").unwrap();
    assert_eq!(client.reply().unwrap().status, 200);
    assert_eq!((client.get("/a").status, client.get("/b").status), (404, 200));
}

#[test]
fn reload_keeps_cached_denials_and_an_open_breaker() {
    let redis = Redis::start();
    let store = redis.store();
    let config = |body: &str, quota: &str| {
        format!(
            "[server]\nworkers = 1\n{store}{}limits = [\"day\"]\n[limit.day]\nby = \"ip\"\nquota = \"{quota}\"\n\
             algorithm = \"fixed-window\"\non_store_error = \"allow\"\n",
            says(body)
        )
    };
    let gateway = Gateway::start(&with_admin(&config("one", "1/day")));
    let mut client = gateway.client();
    assert_eq!([(); 3].map(|()| client.get("/says").status), [200, 429, 429]);
    eventually("the connections for calls and for PING are open", || {
        // The test itself has the third connection.
        redis.info_number("clients", "connected_clients:") == 3
    });
    let remembered = || metric(&gateway, "checks_total{answered_by=\"denial-cache\"}");
    let (before, connected) = (remembered(), redis.info_number("stats", "total_connections_received:"));
    reloads(&gateway, &config("two", "1/day"));
    assert_eq!(client.get("/says").status, 429);
    assert_eq!(remembered(), before + 1.0, "no further call to Redis");
    reloads(&gateway, &config("three", "2/day"));
    assert_eq!((client.get("/says").text(), client.get("/says").status), ("three", 429), "another quota needs a call");
    // The test itself has opened one more connection.
    let now = redis.info_number("stats", "total_connections_received:");
    assert_eq!(now, connected + 1, "the store connection survives the reload");

    drop(redis);
    eventually("the breaker opens", || {
        // Use another quota each time, so that the denial cache does not apply.
        client.get("/says");
        reloads(
            &gateway,
            &config("four", &format!("{}/day", 3 + metric(&gateway, "config_reloads_total{result=\"ok\"}") as u32)),
        );
        metric(&gateway, "store_up") == 0.0
    });
    let failures = |kind: &str| metric(&gateway, &format!("store_failures_total{{kind=\"{kind}\"}}"));
    let before = (failures("failed"), failures("not_permitted"));
    reloads(&gateway, &config("five", "1000/day"));
    assert_eq!(metric(&gateway, "store_up"), 0.0);
    assert_eq!(client.get("/says").text(), "five");
    let now = (failures("failed"), failures("not_permitted"));
    assert_eq!(now, (before.0, before.1 + 1.0), "the breaker stays open");
}

#[test]
fn reload_keeps_tls_sessions_and_rejects_unusable_certificates() {
    let (pair, past) = (Pair::server("gate.test", NOW), Pair::server("gate.test", PAST));
    let listener =
        "[[listener]]\naddress = \"127.0.0.1:0\"\ntls.certificates = [{ cert = \"a.pem\", key = \"a.key\" }]\n";
    let config = |body: &str| format!("{listener}{}", says(body));
    let files = [("a.pem", &*pair.cert), ("a.key", &*pair.key), ("b.pem", &*past.cert), ("b.key", &*past.key)];
    let gateway = Gateway::start_with(&with_admin(&config("one")), &files);
    let client = tls(&[&pair.der], None, &[&TLS13]);
    let ask = |body: &str| {
        let mut connection = TlsClient::handshake(&client, gateway.address, "gate.test").unwrap();
        assert_eq!(connection.get("/says").text(), body);
        connection.stream.get_ref().conn.handshake_kind().unwrap()
    };
    assert_eq!((ask("one"), ask("one")), (HandshakeKind::Full, HandshakeKind::Resumed));
    reloads(&gateway, &config("two"));
    assert_eq!(ask("two"), HandshakeKind::Resumed);
    let reply = reload(&gateway, &config("three").replace("a.pem", "b.pem").replace("a.key", "b.key"));
    assert_eq!(reply.status, 422);
    assert!(reply.text().contains("b.pem: the certificate has expired"), "{}", reply.text());
    assert_eq!(ask("two"), HandshakeKind::Resumed);
}

#[test]
fn reload_changes_the_bounds_of_an_upstream_with_requests_in_flight() {
    let server = Server::start();
    let config = |most: usize, queue: usize| {
        format!(
            "[server]\nworkers = 1\n[upstream.api]\nservers = [\"{}\"]\nmax_requests = {most}\nmax_queue = {queue}\n\
             connect_timeout = \"1m\"\n[[route]]\nname = \"api\"\npath = \"/\"\nupstream = \"api\"\n",
            server.url()
        )
    };
    let gateway = Gateway::start(&with_admin(&config(1, 0)));
    server.set(Behaviour::Hang);
    let mut clients = [(); 3].map(|()| gateway.client());
    let [first, second, third] = &mut clients;
    first.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    eventually("one request is in flight", || server.running() == 1);
    assert_eq!(second.get("/").status, 503, "there is no queue");
    reloads(&gateway, &config(1, 1));
    second.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    third.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    // One of the two requests is queued. The other one finds the queue full and is rejected.
    let mut rejected = None;
    for client in [&mut *second, third] {
        client.stream.get_mut().set_nonblocking(true).unwrap();
    }
    eventually("one request is rejected", || {
        let has_come = |client: &crate::support::client::Client| client.stream.get_ref().peek(&mut [0]).is_ok();
        rejected = [&*second, third].into_iter().position(has_come);
        rejected.is_some()
    });
    for client in [&mut *second, third] {
        client.stream.get_mut().set_nonblocking(false).unwrap();
    }
    let (rejected, queued) = if rejected == Some(0) { (second, third) } else { (third, second) };
    assert_eq!(rejected.reply().unwrap().status, 503);
    reloads(&gateway, &config(3, 0));
    rejected.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n");
    eventually("all requests are in flight", || server.running() == 3);
    server.set(Behaviour::Respond(200));
    for client in [first, queued, rejected] {
        assert_eq!(client.reply().unwrap().status, 200);
    }
    assert_eq!(server.max_running(), 3);
}

#[test]
fn reload_of_pool_idle_timeout_applies_to_pooled_connections() {
    let server = Server::start();
    let config = |idle: &str| {
        format!(
            "[server]\nworkers = 1\n[upstream.api]\nservers = [\"{}\"]\npool_idle_timeout = \"{idle}\"\n\
             [[route]]\nname = \"api\"\npath = \"/\"\nupstream = \"api\"\n",
            server.url()
        )
    };
    let gateway = Gateway::start(&with_admin(&config("1h")));
    let mut client = gateway.client();
    (0..3).for_each(|_| assert_eq!(client.get("/").status, 200));
    assert_eq!(server.accepted(), 1);
    reloads(&gateway, &config("1ms"));
    eventually("idle connections are closed after a millisecond", || {
        assert_eq!(client.get("/").status, 200);
        server.accepted() > 4
    });
}
