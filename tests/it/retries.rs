//! Retries of a route on chosen statuses, and fallback upstreams.

use std::io::{Read, Write};
use std::sync::mpsc::channel;

use crate::support::admin_listener::{metric, with_admin};
use crate::support::gateway::Gateway;
use crate::support::http2;
use crate::support::redis::free_port;
use crate::support::server::{Behaviour, Server};
use crate::support::upstream::{Upstream, read_head, read_request, serve};
use crate::support::{MAX_WAIT, eventually};
use http::Request;

/// Start a gateway that uses these servers in turn. `lines` are further settings of the route.
fn gateway(servers: &[String], lines: &str) -> Gateway {
    Gateway::start(&with_admin(&format!(
        "[server]\nworkers = 1\n[upstream.api]\nservers = {servers:?}\nbalance = \"round-robin\"\nresponse_timeout = \"2s\"\n\
         [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n{lines}\n"
    )))
}

/// Start a gateway with the upstreams `one` and `two` in this order.
fn with_fallback(one: &str, two: &str, lines: &str) -> Gateway {
    Gateway::start(&with_admin(&format!(
        "[server]\nworkers = 1\n[upstream.one]\nservers = [\"{one}\"]\n[upstream.two]\nservers = [\"{two}\"]\n\
         [[route]]\nname = \"all\"\npath = \"/v1/{{*rest}}\"\nupstream = \"one\"\n{lines}\n"
    )))
}

fn retries(gateway: &Gateway, upstream: &str, reason: &str) -> f64 {
    metric(gateway, &format!("sluicegate_upstream_retries_total{{upstream=\"{upstream}\",reason=\"{reason}\"}}"))
}

#[test]
fn chosen_statuses_are_retried_on_another_server() {
    let [ill, well] = &Server::start_many();
    let gateway = gateway(&[ill.url(), well.url()], "retries = 1\nretry_on = [500, \"503\"]");
    let mut client = gateway.client();
    for status in [500, 503, 502, 404] {
        ill.set(Behaviour::Respond(status));
        let (before, retried) = (ill.count(), retries(&gateway, "api", "status"));
        let got: Vec<_> = (0..4).map(|_| client.get("/").status).collect();
        let (times, retried) = ((ill.count() - before) as f64, retries(&gateway, "api", "status") - retried);
        let is_chosen = matches!(status, 500 | 503);
        assert_eq!(got.contains(&status), !is_chosen, "{status}: {got:?}");
        assert!(times > 0.0 && retried == if is_chosen { times } else { 0.0 }, "{status}: {times}, {retried}");
    }
    // If no retry is left, the client gets the last response.
    ill.set(Behaviour::Respond(503));
    well.set(Behaviour::Respond(503));
    let before = ill.count() + well.count();
    assert_eq!(client.get("/").status, 503);
    assert_eq!(ill.count() + well.count() - before, 2);
}

#[test]
fn post_is_repeated_with_its_body_only_if_the_route_says_so() {
    for (methods, count) in [("", 1), ("retry_methods = [\"GET\", \"POST\"]", 2)] {
        let [one, two] = [(); 2].map(|()| {
            Upstream::responding(|_| b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n".to_vec())
        });
        let lines = format!("retries = 3\nretry_on = [\"5xx\"]\n{methods}");
        let gateway = gateway(&[one.url(), two.url()], &lines);
        let reply = gateway.client().request("POST", "/", &[], b"hello");
        assert_eq!(reply.status, 503, "{methods}");
        let seen: Vec<_> = [&one, &two].iter().flat_map(|server| server.seen.lock().unwrap().clone()).collect();
        assert_eq!(seen.len(), count, "{methods}");
        assert!(seen.iter().all(|seen| seen.body == b"hello"), "{methods}");
        // Without a length, the body is streamed, and cannot be sent again.
        let mut client = gateway.client();
        client.send(b"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n");
        assert_eq!(client.reply().unwrap().status, 503);
        assert_eq!(one.count() + two.count(), count + 1, "{methods}");
    }
}

#[test]
fn response_timeout_is_retried_only_with_retry_on_timeout() {
    for (lines, status) in [("retries = 1", 504), ("retries = 1\nretry_on = [\"timeout\"]", 200)] {
        let silent = serve(|mut stream| while read_request(&mut stream).is_some() {});
        let well = Upstream::start();
        let gateway = gateway(&[format!("http://{silent}"), well.url()], lines);
        let mut client = gateway.client();
        let got = [client.get("/").status, client.get("/").status];
        assert!(got.contains(&status) && got.contains(&200), "{lines}: {got:?}");
        assert_eq!(got.iter().filter(|got| **got == 504).count(), usize::from(status == 504), "{lines}: {got:?}");
    }
}

#[test]
fn fallback_has_its_own_host_path_and_credentials() {
    let two = Upstream::start();
    let lines = "request_headers = { set = { authorization = \"Bearer one\", x-route = \"{route}\" }, remove = [\"x-debug\"] }\nupstream_host = \"one.test\"\n\
                 fallback = [{ upstream = \"two\", upstream_host = \"two.test\", rewrite = \"/other/{rest}?from=one\",\n\
                 request_headers = { set = { api-key = \"two\" } } }]";
    let gateway = with_fallback(&format!("http://127.0.0.1:{}", free_port()), &two.url(), lines);
    // The client sends headers that the route sets or removes.
    let forged = [("Authorization", "Bearer client"), ("X-Route", "admin"), ("X_Route", "admin"), ("X-Debug", "1")];
    let headers = [&[("Host", "shop.test"), ("X-Client", "kept")][..], &forged].concat();
    let body = "x".repeat(300_000);
    // The second body is longer than `request_buffer`, but nothing of it was sent.
    for body in ["hello", &*body] {
        assert_eq!(gateway.client().request("POST", "/v1/a?b=c", &headers, body.as_bytes()).status, 200);
        let seen = two.last();
        assert_eq!((seen.target(), seen.body.len()), ("/other/a?from=one&b=c", body.len()));
        for (name, value) in [
            ("host", &["two.test"][..]),
            ("x-forwarded-host", &["shop.test"]),
            ("authorization", &[]),
            ("api-key", &["two"]),
            ("x-route", &[]),
            ("x_route", &[]),
            ("x-debug", &[]),
            ("x-client", &["kept"]),
            ("x-forwarded-for", &["127.0.0.1"]),
        ] {
            assert_eq!(seen.headers(name), value, "{name}");
        }
    }
    assert_eq!(retries(&gateway, "one", "fallback"), 2.0);
    // A client over HTTP/2.
    let request = Request::post("http://shop.test/v1/h2").body(&b"two"[..]).unwrap();
    assert_eq!(http2::ask(gateway.addresses()[0], [request])[0].status(), Some(200));
    assert_eq!((two.last().target(), &*two.last().body), ("/other/h2?from=one", &b"two"[..]));
}

#[test]
fn fallback_without_settings_gets_the_request_of_the_route() {
    let two = Upstream::start();
    let lines = "strip_prefix = \"/v1\"\nrequest_headers = { set = { x-route = \"{route}\" } }\nupstream_host = \"one.test\"\n\
                 fallback = [\"two\"]";
    let gateway = with_fallback(&format!("http://127.0.0.1:{}", free_port()), &two.url(), lines);
    assert_eq!(gateway.client().request("GET", "/v1/a?b", &[("Host", "shop.test")], b"").status, 200);
    let seen = two.last();
    assert_eq!((seen.target(), seen.headers("x-route")), ("/a?b", vec!["all"]));
    assert_eq!(seen.headers("host"), ["shop.test"], "`upstream_host` of the route belongs to its upstream");
}

#[test]
fn fallback_gets_no_request_that_a_server_may_have_executed() {
    // This server reads each request and closes the connection.
    let executes = || serve(|mut stream| drop(read_request(&mut stream)));
    for (lines, method, status) in [
        ("fallback = [\"two\"]", "GET", 200),
        ("fallback = [\"two\"]", "POST", 502),
        ("fallback = [\"two\"]", "DELETE", 502),
        ("fallback = [\"two\"]\nretry_methods = [\"POST\"]", "POST", 200),
        ("fallback = [\"two\"]\nretry_methods = [\"POST\"]", "GET", 502),
    ] {
        let two = Upstream::start();
        let gateway = with_fallback(&format!("http://{}", executes()), &two.url(), lines);
        let body: &[u8] = if method == "POST" { b"hello" } else { b"" };
        assert_eq!(gateway.client().request(method, "/v1/a", &[], body).status, status, "{lines}, {method}");
        let bodies: Vec<_> = two.seen.lock().unwrap().iter().map(|seen| seen.body.clone()).collect();
        let expected: &[&[u8]] = if status == 200 { &[body] } else { &[] };
        assert_eq!(bodies, expected, "{lines}, {method}");
    }
}

#[test]
fn fallback_gets_a_request_after_a_timeout_only_with_retry_on_timeout() {
    for (lines, status) in [("", 504), ("retry_on = [\"timeout\"]\n", 200)] {
        let silent = serve(|mut stream| while read_request(&mut stream).is_some() {});
        let two = Upstream::start();
        let gateway = Gateway::start(&format!(
            "[upstream.one]\nservers = [\"http://{silent}\"]\nresponse_timeout = \"100ms\"\n\
             [upstream.two]\nservers = [\"{}\"]\n\
             [[route]]\nname = \"all\"\npath = \"/\"\nupstream = \"one\"\nfallback = [\"two\"]\n{lines}",
            two.url()
        ));
        assert_eq!(gateway.client().get("/").status, status, "{lines}");
        assert_eq!(two.count(), usize::from(status == 200), "{lines}");
    }
}

/// The upgrade of a connection belongs to the first attempt.
#[test]
fn request_with_an_upgrade_gets_no_fallback() {
    let two = Upstream::start();
    let down = format!("http://127.0.0.1:{}", free_port());
    let gateway = with_fallback(&down, &two.url(), "websocket = true\nfallback = [\"two\"]");
    let upgrade = [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13")];
    let upgrade = [&upgrade[..], &[("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")]].concat();
    assert_eq!(gateway.client().request("GET", "/v1/a", &upgrade, b"").status, 502);
    assert_eq!(two.count(), 0);
    assert_eq!(gateway.client().get("/v1/a").status, 200);
}

#[test]
fn statuses_of_retry_on_lead_to_each_fallback_in_order() {
    let [one, two, three] = Server::start_many();
    let config = |rules: &str| {
        with_admin(&format!(
            "[server]\nworkers = 1\n[log]\naccess = \"access.log\"\n[upstream.one]\nservers = [\"{}\"]\n[upstream.two]\nservers = [\"{}\"]\n\
             [upstream.three]\nservers = [\"{}\"]\n\
             [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"one\"\nfallback = [\"two\", \"three\"]\n{rules}\n",
            one.url(),
            two.url(),
            three.url()
        ))
    };
    let gateway = Gateway::start(&config("retry_on = [429, \"5xx\"]"));
    let mut client = gateway.client();
    let mut counts = |status: [u16; 3]| {
        let all = [&one, &two, &three];
        let before = all.map(|server| server.count());
        all.iter().zip(status).for_each(|(server, status)| server.set(Behaviour::Respond(status)));
        let got = client.get("/").status;
        (got, std::array::from_fn::<_, 3, _>(|index| all[index].count() - before[index]))
    };
    assert_eq!(counts([200, 200, 200]), (200, [1, 0, 0]));
    assert_eq!(counts([503, 200, 200]), (200, [1, 1, 0]));
    assert_eq!(counts([429, 500, 201]), (201, [1, 1, 1]));
    assert_eq!(counts([503, 404, 200]), (404, [1, 1, 0]), "404 is final");
    assert_eq!(counts([503, 502, 500]), (500, [1, 1, 1]), "the client gets the last response");
    assert_eq!((retries(&gateway, "one", "fallback"), retries(&gateway, "two", "fallback")), (4.0, 2.0));
    assert_eq!(retries(&gateway, "three", "fallback"), 0.0);
    let log = gateway.directory().join("access.log");
    eventually("five records", || std::fs::read_to_string(&log).is_ok_and(|log| log.lines().count() == 5));
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.lines().nth(2).unwrap().contains("three"), "the record names the last upstream: {log}");
    // Without `retry_on`, only failed connections lead to a fallback.
    one.set(Behaviour::Respond(503));
    let plain = Gateway::start(&config("").replace("access.log", "plain.log"));
    assert_eq!(plain.get("/").status, 503);
    one.stop();
    two.set(Behaviour::Respond(202));
    assert_eq!(plain.get("/").status, 202);
}

#[test]
fn failed_response_occupies_no_server_while_the_fallback_works() {
    let one = serve(|mut stream| {
        while let Some(request) = read_request(&mut stream) {
            let status = if request.head.contains("/ok") { "200 OK" } else { "503 Service Unavailable" };
            if write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 5\r\n\r\nhello").is_err() {
                return;
            }
        }
    });
    let (arrived, arrivals) = channel();
    let two = serve(move |mut stream| {
        while read_request(&mut stream).is_some() {
            arrived.send(()).unwrap();
        }
    });
    let gateway = Gateway::start(&format!(
        "[upstream.one]\nservers = [\"http://{one}\"]\nmax_requests = 1\n\
         [upstream.two]\nservers = [\"http://{two}\"]\n\
         [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"one\"\nfallback = [\"two\"]\nretry_on = [503]\n"
    ));
    let mut waiting = gateway.client();
    waiting.send(b"GET /fail HTTP/1.1\r\nHost: a\r\n\r\n");
    arrivals.recv_timeout(MAX_WAIT).unwrap();
    assert_eq!(gateway.get("/ok").status, 200);
}

#[test]
fn interrupted_upload_is_not_sent_to_a_fallback() {
    // This server reads the beginning of the body and closes the connection.
    let one = serve(|mut stream| {
        if read_head(&mut stream).is_some() {
            stream.read_exact(&mut [0; 1000]).unwrap();
        }
    });
    let two = Upstream::start();
    let lines = "fallback = [\"two\"]\nretry_methods = [\"POST\"]";
    let gateway = with_fallback(&format!("http://{one}"), &two.url(), lines);
    let reply = gateway.client().request("POST", "/v1/a", &[], "x".repeat(2_000_000).as_bytes());
    assert_eq!(reply.status, 502, "a body that is streamed cannot be sent again");
    assert_eq!(two.count(), 0);
}
