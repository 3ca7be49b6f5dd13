//! Limits and routes by values of JSON bodies, tested over the wire: chunked bodies, HTTP/2, `Expect`, size limits and
//! malicious bodies.

use std::io::BufRead;
use std::time::Duration;

use http::Request;
use rustix::time::{ClockId, clock_gettime};
use sluicegate::payload::json::body::{MAX_CONTAINERS, MAX_ELEMENTS, MAX_MEMBERS};
use sluicegate::payload::llm::request::with_models;

use crate::support::client::{Client, Reply};
use crate::support::eventually;
use crate::support::gateway::{Gateway, binary};
use crate::support::hostile_bodies::{
    NamedBody, Parsers, bodies_with_models, json_bodies, measure_stream, ordinary_body, ordinary_stream, streams,
};
use crate::support::http2;
use crate::support::upstream::Upstream;

/// Two routes with the same path: one for models with the prefix `gpt-`, one for all other requests.
fn routed(upstream: &Upstream, server: &str, more: &str) -> String {
    format!(
        "[server]\n{server}\n[upstream.u]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"gpt\"\npath = \"/chat\"\nupstream = \"u\"\n\
         match = {{ json = {{ \"/model\" = {{ prefix = \"gpt-\" }} }} }}\n\
         request_headers.set = {{ x-route = \"{{route}}\" }}\n\
         [[route]]\nname = \"other\"\npath = \"/chat\"\nupstream = \"u\"\n\
         request_headers.set = {{ x-route = \"{{route}}\" }}\n{more}",
        upstream.url()
    )
}

/// A limit of 3 requests per hour. `by` selects the value of the JSON body that is the limit key.
fn limited(by: &str, limit: &str) -> String {
    format!(
        "[limit.l]\nby = {by}\nalgorithm = \"sliding-log\"\nquota = \"3/hour\"\n{limit}\n\
         [[route]]\nname = \"r\"\npath = \"/{{*rest}}\"\nlimits = [\"l\"]\nrespond = {{ status = 200 }}\n"
    )
}

fn post(gateway: &Gateway, path: &str, body: &[u8]) -> Reply {
    gateway.client().request("POST", path, &[("content-type", "application/json")], body)
}

fn detail(reply: &Reply) -> String {
    reply.json()["detail"].as_str().unwrap_or_default().to_owned()
}

fn route_of(upstream: &Upstream) -> String {
    upstream.last().headers("x-route")[0].to_owned()
}

#[test]
fn value_of_the_body_selects_the_route() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&routed(&upstream, "", ""));
    for (body, expected) in [
        (r#"{"model":"gpt-5","messages":[]}"#, "gpt"),
        (r#"{"messages":[{"model":"x"}],"mod\u0065l":"gpt-5"}"#, "gpt"),
        (r#"{"model":"claude"}"#, "other"),
        (r#"{"model":["gpt-5"]}"#, "other"),
        (r#"{"model":null}"#, "other"),
        ("[]", "other"),
        ("", "other"),
    ] {
        assert_eq!(post(&gateway, "/chat", body.as_bytes()).status, 200, "{body}");
        assert_eq!(route_of(&upstream), expected, "{body}");
        assert_eq!(upstream.last().body, body.as_bytes(), "the upstream gets the body unchanged");
    }
    assert_eq!(gateway.get("/chat").status, 200);
    assert_eq!(route_of(&upstream), "other", "a request without a body takes the other route");
}

#[test]
fn body_that_cannot_be_read_is_never_the_other_route() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&routed(&upstream, "inspect_body = \"64B\"", ""));
    let padded = |length: usize| {
        let text = r#"{"model":"gpt-5","p":""}"#;
        text.replace("\"p\":\"", &format!("\"p\":\"{}", "x".repeat(length - text.len())))
    };
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(200), "]".repeat(200));
    let large = Gateway::start(&routed(&upstream, "", ""));
    for (gateway, body, headers, status, expected) in [
        (&gateway, padded(64), &[][..], 200, ""),
        (&gateway, padded(65), &[], 413, "the request body is longer than 64 bytes"),
        (&gateway, r#"{"model":"gpt-5""#.to_owned(), &[], 400, "the request body is not JSON: EOF"),
        (&gateway, "model=gpt-5".to_owned(), &[], 400, "the request body is not JSON"),
        (&gateway, r#"{"model":"gpt-5"} {}"#.to_owned(), &[], 400, "the request body is not JSON: trailing"),
        (&gateway, r#"{"model":"claude","model":"gpt-5"}"#.to_owned(), &[], 400, "the JSON value `/model`"),
        (&gateway, r#"{"model":"claude","mod\u0065l":"gpt-5"}"#.to_owned(), &[], 400, "the JSON value `/model`"),
        (&gateway, r#"{"Model":"gpt-5"}"#.to_owned(), &[], 400, "the JSON value `/model`"),
        (&large, format!(r#"{{"model":"{}"}}"#, "x".repeat(1025)), &[], 400, "the JSON value `/model`"),
        (&large, deep, &[], 400, "recursion limit"),
        (&gateway, "x".to_owned(), &[("content-encoding", "gzip")], 400, "content coding"),
        (&gateway, r#"{"model":"gpt-5"}"#.to_owned(), &[("content-type", "application/json; Charset=UTF-8")], 200, ""),
        (&gateway, r#"{"model":"gpt-5"}"#.to_owned(), &[("content-type", "text/plain;charset=\"utf-8\"")], 200, ""),
        (
            &gateway,
            r#"{"model":"gpt-5"}"#.to_owned(),
            &[("content-type", "application/json; charset=utf-7")],
            400,
            "charset",
        ),
        (
            &gateway,
            r#"{"model":"gpt-5"}"#.to_owned(),
            &[("content-type", "application/json;CHARSET = UTF-16")],
            400,
            "charset",
        ),
        (
            &gateway,
            r#"{"model":"gpt-5"}"#.to_owned(),
            &[("content-type", "application/x-www-form-urlencoded")],
            400,
            "form",
        ),
        (
            &gateway,
            r#"{"model":"gpt-5"}"#.to_owned(),
            &[("content-type", "multipart/form-data; boundary=x")],
            400,
            "form",
        ),
        (
            &gateway,
            r#"{"model":"gpt-5"}"#.to_owned(),
            &[("content-type", "application/json"), ("content-type", "text/plain")],
            400,
            "form",
        ),
        (&gateway, r#"{"model":"gpt-5"}"#.to_owned(), &[("content-encoding", "identity")], 200, ""),
        (
            &gateway,
            r#"{"model":"gpt-5"}"#.to_owned(),
            &[("content-encoding", "identity"), ("content-encoding", "gzip")],
            400,
            "content coding",
        ),
    ] {
        let before = upstream.count();
        let reply = gateway.client().request("POST", "/chat", headers, body.as_bytes());
        assert_eq!(reply.status, status, "{body} {}", reply.text());
        if status == 200 {
            assert_eq!((upstream.count(), &*route_of(&upstream)), (before + 1, "gpt"), "{body}");
        } else {
            assert!(detail(&reply).contains(expected), "{body}: {}", reply.text());
            assert_eq!(upstream.count(), before, "{body}");
        }
    }
}

#[test]
fn chunked_bodies_and_expect_are_read_up_to_the_bound() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&routed(&upstream, "inspect_body = \"64B\"", ""));
    let mut client = gateway.client();
    let head = "POST /chat HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    client.send(format!("{head}9\r\n{{\"model\":\r\n8\r\n\"gpt-5\"}}\r\n0\r\n\r\n").as_bytes());
    assert_eq!(client.reply().unwrap().status, 200);
    assert_eq!((&*route_of(&upstream), upstream.last().body.len()), ("gpt", 17));
    let before = upstream.count();
    client.send(format!("{head}41\r\n{}\r\n0\r\n\r\n", "x".repeat(65)).as_bytes());
    assert_eq!(client.reply().unwrap().status, 413);
    assert_eq!(upstream.count(), before);
    // The client sends the body after `100 Continue`.
    let mut client = gateway.client();
    client.send(b"POST /chat HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 17\r\n\r\n");
    assert_eq!(client.head().unwrap().status, 100);
    client.send(br#"{"model":"gpt-5"}"#);
    assert_eq!(client.reply().unwrap().status, 200);
    assert_eq!((&*route_of(&upstream), upstream.last().headers("expect").len()), ("gpt", 0));
    // The announced body is longer than `inspect_body`: the gateway rejects it and sends no `100 Continue`.
    let mut client = gateway.client();
    client.send(b"POST /chat HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 65\r\n\r\n");
    assert_eq!(client.reply().unwrap().status, 413);
}

#[test]
fn http2_requests_are_routed_by_body() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&routed(&upstream, "inspect_body = \"64B\"", ""));
    let long: &'static [u8] = &[b'x'; 65];
    let request = |body: &'static [u8]| Request::post("http://a.test/chat").body(body).unwrap();
    for (body, status) in
        [(&br#"{"model":"gpt-5"}"#[..], 200), (br#"{"model":"claude"}"#, 200), (br#"{"model":"#, 400), (long, 413)]
    {
        let answers = http2::ask(gateway.addresses()[0], [request(body)]);
        assert_eq!(answers[0].status(), Some(status), "{}", String::from_utf8_lossy(body));
    }
    let routes: Vec<_> =
        upstream.seen.lock().unwrap().iter().map(|seen| seen.headers("x-route")[0].to_owned()).collect();
    assert_eq!(routes, ["gpt", "other"]);
}

#[test]
fn http2_bodies_larger_than_the_window_of_a_connection_are_read() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&routed(&upstream, "", ""));
    let body: &'static [u8] = format!(r#"{{"model":"gpt-5","p":"{}"}}"#, "x".repeat(900_000)).leak().as_bytes();
    let request = || Request::post("http://a.test/chat").body(body).unwrap();
    let answers = http2::ask(gateway.addresses()[0], [request(), request()]);
    assert_eq!(answers.iter().map(|answer| answer.status()).collect::<Vec<_>>(), [Some(200); 2]);
    assert_eq!((&*route_of(&upstream), upstream.last().body.len()), ("gpt", body.len()));
}

#[test]
fn streams_of_one_connection_occupy_a_quarter_of_the_memory_for_bodies() {
    let upstream = Upstream::start();
    let server = "max_buffered = \"256KiB\"\ninspect_body = \"32KiB\"";
    let gateway = Gateway::start(&routed(&upstream, server, ""));
    // One connection may use a quarter of `max_buffered`, which is 64 KiB. Only two of the three incomplete bodies of
    // 30,000 bytes fit, so the gateway rejects one of them.
    let status = http2::first_status_of_unfinished(gateway.addresses()[0], "http://a.test/chat", &[b' '; 30_000], 3);
    assert_eq!(status, 503);
    assert_eq!(
        post(&gateway, "/chat", br#"{"model":"gpt-5"}"#).status,
        200,
        "another connection has its own share of the memory"
    );
}

/// Open a connection from an address and send 30,000 bytes of a body that never ends.
fn unfinished(gateway: &Gateway, from: &str) -> Client {
    let mut client = Client::connect_from(from.parse().unwrap(), gateway.address);
    client.send(b"POST /chat HTTP/1.1\r\nHost: a\r\nContent-Length: 32768\r\n\r\n");
    client.send(&[b' '; 30_000]);
    client.stream.get_mut().set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    client
}

fn post_from(gateway: &Gateway, from: &str, headers: &[(&str, &str)]) -> u16 {
    let body = format!("{{\"model\":\"gpt-5\",\"p\":\"{:10000}\"}}", "");
    let mut client = Client::connect_from(from.parse().unwrap(), gateway.address);
    client.request("POST", "/chat", headers, body.as_bytes()).status
}

#[test]
fn connections_of_one_network_occupy_a_quarter_of_the_memory_for_bodies() {
    let upstream = Upstream::start();
    let server = "max_buffered = \"256KiB\"\ninspect_body = \"32KiB\"\nmax_connections_per_ip = 1000";
    let proxies = "[client_ip]\ntrusted_proxies = [\"127.0.0.9\"]\nipv4_prefix = 31\n";
    let gateway = Gateway::start(&routed(&upstream, server, proxies));
    // One client network may use a quarter of `max_buffered`, which is 64 KiB. The two incomplete bodies of 30,000
    // bytes leave no room for a body of 10,000 bytes.
    let mut waiting = [(); 2].map(|()| unfinished(&gateway, "127.0.0.2"));
    eventually("the share is used up", || {
        let is_full = post_from(&gateway, "127.0.0.2", &[]) == 503;
        let rejected: Vec<_> =
            waiting.iter_mut().filter_map(|client| client.stream.fill_buf().is_ok().then_some(client)).collect();
        let are_waiting = rejected.is_empty();
        // The request above may take the memory before an incomplete body arrives. In this case, the gateway has
        // rejected the incomplete body: send it again.
        rejected.into_iter().for_each(|client| *client = unfinished(&gateway, "127.0.0.2"));
        is_full && are_waiting
    });
    assert_eq!(post_from(&gateway, "127.0.0.3", &[]), 503, "127.0.0.2 and 127.0.0.3 are one network");
    assert_eq!(post_from(&gateway, "127.0.0.4", &[]), 200, "another network has its own share of the memory");
    // 127.0.0.9 is a trusted proxy: the gateway counts memory per client address in `X-Forwarded-For`.
    assert_eq!(post_from(&gateway, "127.0.0.9", &[("x-forwarded-for", "127.0.0.2")]), 503);
    assert_eq!(post_from(&gateway, "127.0.0.9", &[("x-forwarded-for", "192.0.2.1")]), 200);
    let proxied = [(); 4].map(|()| unfinished(&gateway, "127.0.0.9"));
    assert_eq!(
        post_from(&gateway, "127.0.0.9", &[]),
        200,
        "requests without a client address may use all of the memory"
    );
    drop((waiting, proxied));
    eventually("the memory is free", || post_from(&gateway, "127.0.0.2", &[]) == 200);
}

#[test]
fn announced_bodies_occupy_no_memory_before_they_arrive() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&routed(&upstream, "max_buffered = \"256KiB\"", ""));
    let waiting: Vec<_> = (0..40)
        .map(|_| {
            let mut client = gateway.client();
            client.send(b"POST /chat HTTP/1.1\r\nHost: a\r\nContent-Length: 1048576\r\n\r\n{");
            client
        })
        .collect();
    assert_eq!(post(&gateway, "/chat", br#"{"model":"gpt-5"}"#).status, 200);
    // Only bytes that have arrived count as used memory. The bytes of the following body exceed `max_buffered`.
    let mut sender = gateway.client();
    sender.send(b"POST /chat HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n");
    sender.send(format!("10000\r\n{}\r\n", " ".repeat(1 << 16)).repeat(10).as_bytes());
    let reply = sender.reply().unwrap();
    assert_eq!((reply.status, reply.header("retry-after").is_some()), (503, true), "{}", reply.text());
    drop(waiting);
}

#[test]
fn other_routes_do_not_wait_for_the_body() {
    let upstream = Upstream::start();
    let more = "[[route]]\nname = \"denied\"\npath = \"/denied\"\nrespond = { status = 403 }\n";
    let gateway = Gateway::start(&routed(&upstream, "", more));
    let mut client = gateway.client();
    // The gateway responds although the client never sends the body.
    client.send(b"POST /denied HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n");
    assert_eq!(client.reply().unwrap().status, 403);
}

#[test]
fn denied_clients_send_no_body() {
    let config = "[[listener]]\naddress = \"127.0.0.1:0\"\ndeny = [\"127.0.0.0/8\"]\n\
                  [[route]]\nname = \"r\"\npath = \"/chat\"\nrespond = { status = 200 }\n\
                  match = { json = { \"/model\" = { present = true } } }\n";
    let gateway = Gateway::start(config);
    let mut client = gateway.client();
    client.send(b"POST /chat HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 17\r\n\r\n");
    assert_eq!(client.reply().unwrap().status, 403);
}

#[test]
fn preflight_gets_the_policy_of_the_best_match_without_a_body() {
    let cors = "cors = { origins = [\"https://a.test\"] }\n";
    let config = format!(
        "[[route]]\nname = \"gpt\"\npath = \"/chat\"\nrespond = {{ status = 200 }}\n{cors}\
         match = {{ json = {{ \"/model\" = {{ prefix = \"gpt-\" }} }} }}\n"
    );
    let gateway = Gateway::start(&config);
    let headers = [("origin", "https://a.test"), ("access-control-request-method", "POST")];
    let reply = gateway.client().request("OPTIONS", "/chat", &headers, b"");
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (204, Some("https://a.test")));
}

#[test]
fn value_of_the_body_is_the_identity() {
    let gateway = Gateway::start(&limited("\"json:/user\"", "exempt = [\"json:/user=root\"]"));
    let status = |body: &str| post(&gateway, "/a", body.as_bytes()).status;
    for user in ["\"a\"", "7", "true", "\"ä\""] {
        let statuses: Vec<_> = (0..4).map(|_| status(&format!("{{\"user\":{user}}}"))).collect();
        assert_eq!(statuses, [200, 200, 200, 429], "{user}");
    }
    assert_eq!(status(r#"{"user":"7"}"#), 429, "a string and a number with the same text are one identity");
    assert_eq!(status(r#"{"us\u0065r":"\u0061"}"#), 429, "escapes are decoded");
    assert!((0..5).all(|_| status(r#"{"user":"root"}"#) == 200), "exempt");
    for (body, expected) in [
        (r#"{"user":{}}"#, "the JSON value `/user` is not a string"),
        (r#"{"user":["a"]}"#, "the JSON value `/user` is not a string"),
        (r#"{"user":null}"#, "the JSON value `/user` is not a string"),
        (r#"{"user":1.5}"#, "the JSON value `/user` is not a string"),
        (r#"{"user":"a","user":"b"}"#, "the JSON value `/user` is ambiguous"),
        (r#"{"user":"a","USER":"b"}"#, "the JSON value `/user` is ambiguous"),
        (r#"{"USER":"b"}"#, "the JSON value `/user` is ambiguous"),
        (r#"{"name":"a"}"#, "the JSON value `/user` is required"),
        ("", "the JSON value `/user` is required"),
        ("{", "the request body is not JSON"),
    ] {
        let reply = post(&gateway, "/a", body.as_bytes());
        reply.assert_problem(400, body);
        assert!(detail(&reply).starts_with(expected), "{body}: {}", reply.text());
    }
    let long = |length: usize| post(&gateway, "/a", format!("{{\"user\":\"{}\"}}", "x".repeat(length)).as_bytes());
    assert_eq!(long(1024).status, 200);
    let reply = long(1025);
    assert_eq!((reply.status, &*detail(&reply)), (400, "the JSON value `/user` is longer than 1024 bytes"));
}

#[test]
fn missing_value_follows_on_missing() {
    for (on_missing, expected) in [("skip", [200; 4]), ("ip", [200, 200, 200, 429])] {
        let gateway = Gateway::start(&limited("\"json:/user\"", &format!("on_missing = \"{on_missing}\"")));
        let statuses: Vec<_> = (0..4).map(|_| post(&gateway, "/a", b"{}").status).collect();
        assert_eq!(statuses, expected, "{on_missing}");
    }
}

#[test]
fn value_is_a_part_of_a_list_and_applies_to_its_methods() {
    let gateway = Gateway::start(&limited("[\"header:x-id\", \"json:/a/1/b\"]", "methods = [\"POST\"]"));
    let status = |id: &str, b: &str| {
        let body = format!(r#"{{"a":[{{"b":0}},{{"b":"{b}"}}]}}"#);
        gateway.client().request("POST", "/", &[("x-id", id)], body.as_bytes()).status
    };
    assert_eq!([status("1", "x"), status("1", "x"), status("1", "x"), status("1", "x")], [200, 200, 200, 429]);
    assert_eq!([status("2", "x"), status("1", "y")], [200, 200]);
    // The limit applies to POST only: the gateway does not read this invalid body.
    assert_eq!(gateway.client().request("PUT", "/", &[("x-id", "1")], b"{").status, 200);
}

#[test]
fn values_are_no_labels_of_administrators() {
    let config = limited("\"json:/user\"", "") + "[admin]\naddress = \"127.0.0.1:0\"\n";
    let gateway = Gateway::start(&config);
    for _ in 0..4 {
        post(&gateway, "/a", br#"{"user":"secret-user"}"#);
    }
    let top = crate::support::client::Client::connect(gateway.admin()).get_with("/api/top", &[("host", "localhost")]);
    assert_eq!(top.status, 200, "{}", top.text());
    assert!(!top.text().contains("secret-user") && top.text().contains("json:/user"), "{}", top.text());
}

#[test]
fn tokens_and_values_are_read_in_one_pass() {
    let upstream = Upstream::start();
    let config = format!(
        "[limit.tokens]\nby = \"json:/user\"\nquota = \"1000/hour\"\nunit = \"tokens\"\n\
         cost = {{ llm = \"auto\", bytes_per_token = 4 }}\n\
         [upstream.u]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"gpt\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\nlimits = [\"tokens\"]\n\
         match = {{ json = {{ \"/model\" = {{ prefix = \"gpt-\" }} }} }}\n\
         [[route]]\nname = \"other\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\n",
        upstream.url()
    );
    let gateway = Gateway::start(&config);
    let reply = post(&gateway, "/v1/chat/completions", br#"{"model":"gpt-5","user":"a","max_tokens":100}"#);
    assert_eq!((reply.status, reply.remaining("tokens")), (200, 1000 - 112));
    let reply =
        post(&gateway, "/v1/chat/completions", br#"{"model":"gpt-5","user":"a","max_tokens":1,"max_tokens":2}"#);
    assert_eq!(reply.status, 400, "{}", reply.text());
    // The duplicate key `max_tokens` is an error only on routes that count LLM tokens.
    let reply = post(&gateway, "/v1/chat/completions", br#"{"model":"x","max_tokens":1,"max_tokens":2}"#);
    assert_eq!(reply.status, 200, "{}", reply.text());
}

#[test]
fn explain_shows_the_route_and_the_identity_of_a_body() {
    let upstream = Upstream::start();
    let limit = "limits = [\"l\"]\n[limit.l]\nby = \"json:/user\"\nquota = \"3/hour\"\n";
    let config = routed(&upstream, "", limit) + "[[listener]]\naddress = \"127.0.0.1:8080\"\n";
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("gateway.toml"), config).unwrap();
    std::fs::write(directory.path().join("body.json"), r#"{"model":"gpt-5"}"#).unwrap();
    let explain = |body: &[&str]| {
        let output = binary()
            .current_dir(directory.path())
            .args(["explain", "POST", "http://localhost:8080/chat", "--offline", "--config", "gateway.toml"])
            .args(body)
            .output()
            .unwrap();
        assert!(output.status.success() || !output.stderr.is_empty());
        String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap()
    };
    let text = explain(&["--body", "@body.json"]);
    assert!(
        text.contains("Route gpt: /chat") && text.contains("the JSON value `/model` to begin with `gpt-`"),
        "{text}"
    );
    let text = explain(&["-d", r#"{"model":"x","user":"a"}"#]);
    assert!(text.contains("Route other: /chat"), "{text}");
    assert!(text.contains("it requires the JSON value `/model` to begin with `gpt-`"), "{text}");
    let text = explain(&["-d", r#"{"model":"x"}"#]);
    assert!(text.contains("Response: 400"), "{text}");
    let text = explain(&[]);
    assert!(text.contains("Route other: /chat"), "{text}");
    let text = explain(&["-d", "{"]);
    assert!(text.contains("Response: 400") && text.contains("bad-body"), "{text}");
    let text = explain(&["-d", "@missing.json"]);
    assert!(text.contains("--body: cannot read missing.json"), "{text}");
}

#[test]
fn replay_says_that_logs_have_no_bodies() {
    let directory = tempfile::tempdir().unwrap();
    let put = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
    put(
        "gateway.toml",
        "[[listener]]\naddress = \"127.0.0.1:8080\"\n[limit.l]\nby = \"json:/user\"\nquota = \"3/hour\"\n\
         [[route]]\nname = \"a\"\npath = \"/a\"\nlimits = [\"l\"]\nrespond = { status = 200 }\n\
         [[route]]\nname = \"b\"\npath = \"/b\"\nrespond = { status = 200 }\n\
         match = { json = { \"/model\" = { present = true } } }\n",
    );
    put(
        "access.log",
        "192.0.2.1 - - [10/Oct/2025:13:55:36 +0000] \"POST /a HTTP/1.1\" 200 2\n\
         192.0.2.1 - - [10/Oct/2025:13:55:37 +0000] \"POST /b HTTP/1.1\" 200 2\n",
    );
    let output = binary()
        .current_dir(directory.path())
        .args(["replay", "access.log", "--config", "gateway.toml"])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.contains("this log lacks the JSON value `/user` of the body"), "{text}");
    assert!(text.contains("1 has a route that depends on its body"), "{text}");
}

// === The time to parse hostile bodies ===

/// Length of the bodies in bytes.
const LENGTH: usize = 128 << 10;

/// Return the shortest of three CPU times that a function takes.
fn shortest(run: &dyn Fn()) -> Duration {
    let cpu_time = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
    let time = |_| {
        let start = cpu_time();
        run();
        cpu_time() - start
    };
    (0..3).map(time).min().unwrap()
}

/// A hostile body takes less than this many times the time of an ordinary body of the same length: up to 10 times if
/// nothing else runs.
const MAX_RATIO: f64 = 40.0;

#[test]
fn hostile_bodies_take_about_the_time_of_ordinary_ones() {
    let parsers = Parsers::new();
    let mut usual = Vec::new();
    parsers.each(&ordinary_body(LENGTH).bytes, |_, parse| usual.push(shortest(parse)));
    let mut worst = (0.0, String::new());
    let mut compare = |name: String, time: Duration, usual: Duration| {
        let ratio = time.as_secs_f64() / usual.as_secs_f64();
        assert!(ratio < MAX_RATIO, "{name}: {time:?}, an ordinary body: {usual:?}");
        if ratio > worst.0 {
            worst = (ratio, name);
        }
    };
    for NamedBody { name, bytes } in json_bodies(LENGTH) {
        assert!(bytes.len() > LENGTH - 1000, "{name}");
        let mut usual = usual.iter();
        parsers.each(&bytes, |parser, parse| {
            compare(format!("{name}, {parser}"), shortest(parse), *usual.next().unwrap());
        });
    }
    let alias = |name: &str| (name == "fast").then_some("gpt-5-mini");
    let mut bodies = bodies_with_models(LENGTH).into_iter();
    let ordinary = bodies.next().unwrap();
    let usual = shortest(&|| drop(with_models(&ordinary.bytes, alias)));
    for NamedBody { name, bytes } in bodies {
        compare(format!("models of {name}"), shortest(&|| drop(with_models(&bytes, alias))), usual);
    }
    let usual = shortest(&|| measure_stream(&ordinary_stream(LENGTH).bytes));
    for NamedBody { name, bytes } in streams(LENGTH) {
        compare(format!("stream of {name}"), shortest(&|| measure_stream(&bytes)), usual);
    }
    println!("fault 77: at most {:.1} times the time of an ordinary body ({})", worst.0, worst.1);
}

#[test]
fn body_with_too_many_values_is_413() {
    let limits = "[limit.j]\nby = \"json:/model\"\nquota = \"9/hour\"\n[limit.t]\nby = \"ip\"\nquota = \"1000000000/day\"\n\
                  unit = \"tokens\"\ncost = { llm = \"auto\" }\n[server]\ninspect_body = \"4MiB\"\n";
    let route = |name: &str| {
        format!(
            "[[route]]\nname = \"{name}\"\npath = \"/{name}\"\nlimits = [\"{name}\"]\nrespond = {{ status = 200 }}\n"
        )
    };
    let gateway = Gateway::start(&format!("{limits}{}{}", route("j"), route("t")));
    let members = |count: usize| format!("{{\"model\":\"m\"{}}}", ",\"a\":0".repeat(count - 1));
    let elements = |count: usize| format!("{{\"model\":\"m\",\"prompt\":[0{}]}}", ",0".repeat(count - 1));
    let containers = |count: usize, one: &str| {
        format!("{{\"model\":\"m\",\"messages\":[{one}{}]}}", format!(",{one}").repeat(count - 3))
    };
    let nested = |arrays: usize| {
        let whole = format!("{}0{}", "[".repeat(100), "]".repeat(100));
        format!("{{\"model\":\"m\",\"a\":[{}]}}", vec![whole; arrays / 100].join(","))
    };
    for path in ["/j", "/t"] {
        for (body, status) in [
            (containers(MAX_CONTAINERS, "{}"), 200),
            (containers(MAX_CONTAINERS + 1, "{}"), 413),
            (containers(MAX_CONTAINERS, "[]"), 200),
            (containers(MAX_CONTAINERS + 1, "[]"), 413),
            (nested(MAX_CONTAINERS - 100), 200),
            (nested(MAX_CONTAINERS), 413),
            (members(MAX_MEMBERS), 200),
            (members(MAX_MEMBERS + 1), 413),
            (elements(MAX_ELEMENTS), 200),
            (elements(MAX_ELEMENTS + 1), 413),
        ] {
            let reply = post(&gateway, path, body.as_bytes());
            assert_eq!(reply.status, status, "{path} {} {}", body.len(), reply.text());
            if status == 413 {
                assert!(reply.text().contains("more than 100000 object members"), "{}", reply.text());
            }
        }
    }
}

/// A condition on the body decides between every two kinds of routes: no kind of host or path bypasses the condition.
#[test]
fn body_condition_decides_between_every_two_kinds_of_routes() {
    let hosts = ["hosts = [\"a.h.test\"]", "hosts = [\"*.h.test\"]", ""];
    // The kinds of paths, the most specific one first. Regular expressions precede paths with a catch-all parameter.
    let paths = ["path = \"/N/b\"", "path = \"/N/{x}\"", "path_regex = \"/N/[a-z]+\"", "path = \"/N/{*rest}\""];
    let kinds: Vec<_> = (0..hosts.len()).flat_map(|host| (0..paths.len()).map(move |path| (host, path))).collect();
    let pairs: Vec<_> = kinds.iter().flat_map(|one| kinds.iter().map(move |other| (*one, *other))).collect();
    let route = |number: usize, name: &str, (host, path): (usize, usize), rest: &str| {
        format!(
            "[[route]]\nname = \"{name}-{number}\"\n{}\n{}\n{rest}\nrespond = {{ status = 200, body = \"{name}\" }}\n",
            hosts[host],
            paths[path].replace('N', &number.to_string())
        )
    };
    let condition = "match = { json = { \"/model\" = { prefix = \"gpt-\" } } }";
    let config: String = pairs
        .iter()
        .enumerate()
        .map(|(number, (guarded, open))| {
            route(number, "guarded", *guarded, condition) + &route(number, "open", *open, "")
        })
        .collect();
    let gateway = Gateway::start(&config);
    let mut client = gateway.client();
    for (number, (guarded, open)) in pairs.iter().enumerate() {
        // Tuples are compared by the host first, as routes are.
        let is_decided_by_body = guarded <= open;
        for (body, expected) in [
            (r#"{"model":"gpt-5"}"#, "guarded"),
            (r#"{"model":"claude"}"#, "open"),
            (r#"{}"#, "open"),
            (r#"{"model":"claude","model":"gpt-5"}"#, "400"),
            (r#"{"model":"gpt-5""#, "400"),
        ] {
            let expected = if is_decided_by_body { expected } else { "open" };
            let headers = [("host", "a.h.test"), ("content-type", "application/json")];
            let reply = client.request("POST", &format!("/{number}/b"), &headers, body.as_bytes());
            let found = if reply.status == 200 { reply.text().to_owned() } else { reply.status.to_string() };
            let name = |(host, path): &(usize, usize)| format!("{} {}", hosts[*host], paths[*path]);
            assert_eq!(found, expected, "{body} with the condition at {}, and none at {}", name(guarded), name(open));
        }
    }
}
