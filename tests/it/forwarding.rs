//! Forwarding: what upstreams receive, what clients receive, and what happens when either side disconnects.

use std::io::{BufRead, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::MAX_WAIT;
use crate::support::client::{Client, Reply};
use crate::support::gateway::Gateway;
use crate::support::upstream::{Seen, Upstream, read_head, read_request, serve};
use aws_lc_rs::digest::{SHA256, digest};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};

const PROXY: &str = "127.0.0.9";

/// Return a configuration that forwards all paths to one upstream. `rest` is appended to the table of the upstream.
fn config(upstream: SocketAddr, rest: &str) -> String {
    format!(
        "[[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n[upstream.api]\n\
             servers = [\"http://{upstream}\"]\n{rest}\n"
    )
}

fn gateway(upstream: SocketAddr) -> Gateway {
    Gateway::start(&config(upstream, ""))
}

/// Start a gateway with one worker, so that all clients share one pool of upstream connections.
fn one_worker(upstream: SocketAddr) -> Gateway {
    Gateway::start(&format!("[server]\nworkers = 1\n{}", config(upstream, "")))
}

fn ok() -> Vec<u8> {
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok".to_vec()
}

/// Return a response with chunked transfer coding.
fn chunked(body: &[u8]) -> Vec<u8> {
    let mut answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
    answer.extend_from_slice(&chunks(body));
    answer
}

fn chunks(body: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(body.len() + body.len() / 1000);
    for chunk in body.chunks(70_001) {
        out.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
        out.extend_from_slice(chunk);
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(b"0\r\n\r\n");
    out
}

/// Return bytes without a repeating pattern, so that the test detects lost or repeated pieces.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut out = Vec::with_capacity(length + 8);
    while out.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(length);
    out
}

fn checksum(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn next_event<T>(what: &str, events: &Receiver<T>) -> T {
    events.recv_timeout(MAX_WAIT).unwrap_or_else(|error| panic!("gave up waiting: {what}: {error}"))
}

/// Discard received bytes until the peer closes or resets the connection. Return false if the read fails for another
/// reason, such as a timeout.
fn wait_for_close(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
    let mut rest = [0; 4096];
    loop {
        match stream.read(&mut rest) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == ErrorKind::ConnectionReset,
        }
    }
}

/// Close a connection with a reset.
fn reset(stream: TcpStream) {
    socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
    drop(stream);
}

// ---- the request ---------------------------------------------------------------------------------

#[test]
fn hop_by_hop_headers_are_not_forwarded() {
    let upstream = Upstream::start();
    let gateway = gateway(upstream.address);
    let sent = [
        ("Host", "Shop.Example:8080"),
        ("Connection", "keep-alive, X-Nominated , te,x-forwarded-for"),
        ("Connection", "X-Also-Nominated, x-request-id"),
        ("Keep-Alive", "timeout=5"),
        ("Proxy-Connection", "keep-alive"),
        ("TE", "trailers, deflate"),
        ("Trailer", "x-checksum"),
        ("Upgrade", "websocket"),
        ("X-Nominated", "1"),
        ("X-Also-Nominated", "1"),
        ("Accept", "*/*"),
        ("X-Twice", "one"),
        ("X-Twice", "two"),
        ("Cookie", "a=1; b=2"),
        ("Authorization", "Bearer abc"),
        ("X-Api-Key", "key"),
    ];
    assert_eq!(gateway.client().get_with("/", &sent).status, 200);
    let seen = upstream.last();
    for (name, values) in [
        ("connection", &[][..]),
        ("keep-alive", &[]),
        ("proxy-connection", &[]),
        ("trailer", &[]),
        ("upgrade", &[]),
        ("transfer-encoding", &[]),
        ("content-length", &[]),
        ("x-nominated", &[]),
        ("x-also-nominated", &[]),
        // `trailers` is the only value of `TE` that is not specific to the connection.
        ("te", &["trailers"]),
        ("host", &["Shop.Example:8080"]),
        ("accept", &["*/*"]),
        ("x-twice", &["one", "two"]),
        ("cookie", &["a=1; b=2"]),
        ("authorization", &["Bearer abc"]),
        ("x-api-key", &["key"]),
        // The upstream receives the headers that the gateway sets, even if `Connection` names them.
        ("x-forwarded-for", &["127.0.0.1"]),
    ] {
        assert_eq!(seen.headers(name), values, "{name} in {}", seen.head);
    }
    assert_eq!(seen.headers("x-request-id").len(), 1, "{}", seen.head);
}

const SPOOFED: &[(&str, &str)] = &[
    ("Host", "shop.example"),
    ("X-Forwarded-For", "203.0.113.1"),
    ("X-Forwarded-For", "203.0.113.2"),
    ("X-Forwarded-Proto", "https"),
    ("X-Forwarded-Host", "evil.example"),
    ("X-Forwarded-Port", "443"),
    ("X-Forwarded-Prefix", "/evil"),
    ("X-Forwarded-Server", "evil"),
    ("X_Forwarded_For", "203.0.113.3"),
    ("Forwarded", "for=203.0.113.1;proto=https"),
    ("X-Request-Id", "spoofed"),
    ("Via", "1.0 other"),
];

#[test]
fn untrusted_clients_do_not_set_forwarded_headers() {
    let upstream = Upstream::start();
    let gateway =
        Gateway::start(&format!("[client_ip]\ntrusted_proxies = [\"{PROXY}\"]\n{}", config(upstream.address, "")));
    let mut ids = Vec::new();
    for (what, lines) in [("spoofed", SPOOFED), ("plain", &[("Host", "shop.example")])] {
        assert_eq!(gateway.client().get_with("/", lines).status, 200);
        let seen = upstream.last();
        for (name, values) in [
            ("host", &["shop.example"][..]),
            ("x-forwarded-for", &["127.0.0.1"]),
            ("x-forwarded-proto", &["http"]),
            ("x-forwarded-host", &["shop.example"]),
            ("x-forwarded-port", &[]),
            ("x_forwarded_for", &[]),
            ("forwarded", &[]),
        ] {
            assert_eq!(seen.headers(name), values, "{what}: {name}");
        }
        let via = if what == "spoofed" { "1.0 other, 1.1 sluicegate" } else { "1.1 sluicegate" };
        assert_eq!(seen.headers("via"), [via], "{what}");
        let id = seen.headers("x-request-id").concat();
        assert!(id.parse::<uuid::Uuid>().is_ok_and(|id| id.get_version_num() == 7), "{what}: {id}");
        ids.push(id);
    }
    assert_ne!(ids[0], ids[1], "each request has its own id");
}

#[test]
fn no_forwarded_header_variant_of_untrusted_clients_is_forwarded() {
    let upstream = Upstream::start();
    let gateway = gateway(upstream.address);
    assert_eq!(gateway.client().get_with("/", SPOOFED).status, 200);
    let seen = upstream.last();
    for name in ["x-forwarded-prefix", "x-forwarded-server"] {
        assert_eq!(seen.headers(name), [""; 0], "{name} of an untrusted client is removed");
    }
}

#[test]
fn forwarded_headers_of_a_trusted_proxy_are_extended() {
    let upstream = Upstream::start();
    let gateway =
        Gateway::start(&format!("[client_ip]\ntrusted_proxies = [\"{PROXY}\"]\n{}", config(upstream.address, "")));
    let from_proxy = || Client::connect_from(PROXY.parse::<IpAddr>().unwrap(), gateway.address);
    assert_eq!(from_proxy().get_with("/", SPOOFED).status, 200);
    let seen = upstream.last();
    for (name, values) in [
        ("host", &["shop.example"][..]),
        ("x-forwarded-for", &["203.0.113.1, 203.0.113.2, 127.0.0.9"]),
        ("x-forwarded-proto", &["https"]),
        ("x-forwarded-host", &["evil.example"]),
        ("x-forwarded-port", &["443"]),
        ("x-forwarded-prefix", &["/evil"]),
        ("forwarded", &["for=203.0.113.1;proto=https, for=127.0.0.9"]),
        ("x-request-id", &["spoofed"]),
        ("via", &["1.0 other, 1.1 sluicegate"]),
    ] {
        assert_eq!(seen.headers(name), values, "{name}");
    }
    assert_eq!(from_proxy().get_with("/", &[("Host", "shop.example")]).status, 200);
    let seen = upstream.last();
    for (name, values) in [
        ("x-forwarded-for", &["127.0.0.9"][..]),
        ("x-forwarded-proto", &["http"]),
        ("x-forwarded-host", &["shop.example"]),
        ("forwarded", &[]),
    ] {
        assert_eq!(seen.headers(name), values, "a header that the proxy did not send: {name}");
    }
}

#[test]
fn upstream_receives_the_path_that_was_routed_on() {
    let upstream = Upstream::start();
    let gateway = gateway(upstream.address);
    let mut client = gateway.client();
    for (sent, seen) in [
        ("/", "/"),
        ("/a/b/", "/a/b/"),
        ("/%61dmin", "/admin"),
        ("//a/./b/../c", "/a/c"),
        ("/a/%2e%2e/b", "/b"),
        ("/../../etc", "/etc"),
        ("/a%3fb%23", "/a%3Fb%23"),
        ("/a%20b|c", "/a%20b%7Cc"),
        // The query is forwarded byte for byte.
        ("/a?", "/a?"),
        ("/a?x=1&y=2", "/a?x=1&y=2"),
        ("/a?x=%2f..%2F%00%61+b", "/a?x=%2f..%2F%00%61+b"),
        ("/a?x=/../b//c&&=", "/a?x=/../b//c&&="),
        ("/x/../a?x={|}^`[]\\", "/a?x={|}^`[]\\"),
        ("/x/../a?", "/a?"),
        ("/a??b?c", "/a??b?c"),
        ("http://named.example/a/../b?x=%2f", "/b?x=%2f"),
        ("http://named.example?x", "/?x"),
    ] {
        assert_eq!(client.get(sent).status, 200, "{sent}");
        assert_eq!(upstream.last().target(), seen, "{sent}");
    }
}

#[test]
fn upstream_receives_the_host_that_was_routed_on() {
    let upstream = Upstream::start();
    let gateway = gateway(upstream.address);
    let mut client = gateway.client();
    for (sent, host) in [
        ("GET / HTTP/1.1\r\nHost: Plain.Example:81\r\n\r\n", "Plain.Example:81"),
        ("GET http://named.example:82/ HTTP/1.1\r\nHost: named.example:82\r\n\r\n", "named.example:82"),
        ("GET http://named.example:82/ HTTP/1.1\r\nHost: other.example\r\n\r\n", "named.example:82"),
        ("GET / HTTP/1.0\r\nConnection: keep-alive\r\nHost: old.example\r\n\r\n", "old.example"),
    ] {
        client.send(sent.as_bytes());
        assert_eq!(client.reply().unwrap().status, 200, "{sent}");
        assert_eq!(upstream.last().headers("host"), [host], "{sent}");
        assert_eq!(upstream.last().headers("x-forwarded-host"), [host], "{sent}");
    }
    client.send(b"GET / HTTP/1.0\r\nX-Forwarded-Host: evil.example\r\n\r\n");
    assert_eq!(client.reply().unwrap().status, 200);
    let seen = upstream.last();
    assert_eq!(seen.headers("host"), [upstream.address.to_string()], "a client without Host");
    assert_eq!(seen.headers("x-forwarded-host"), [""; 0], "an HTTP/1.0 request has no host");
    assert_eq!(seen.headers("via"), ["1.0 sluicegate"]);
    assert!(seen.head.starts_with("GET / HTTP/1.1\r\n"), "{}", seen.head);
}

#[test]
fn method_and_body_are_forwarded_unchanged() {
    let upstream = Upstream::start();
    let gateway = gateway(upstream.address);
    let mut client = gateway.client();
    for (method, body, length) in [
        ("GET", "", &[][..]),
        ("HEAD", "", &[]),
        ("OPTIONS", "", &[]),
        ("DELETE", "", &[]),
        ("GET", "a query of some search", &["22"]),
        ("DELETE", "reason", &["6"]),
        ("POST", "name=value", &["10"]),
        ("PUT", "{\"a\":1}", &["7"]),
        ("PATCH", "\0\x01\x7f", &["3"]),
        ("PURGE", "", &[]),
        ("M-SEARCH", "x", &["1"]),
    ] {
        client.request(method, "/", &[("Content-Type", "text/x-test")], body.as_bytes());
        let seen = upstream.last();
        let what = format!("{method} {body:?}: {}", seen.head);
        assert_eq!(seen.head.split(' ').next(), Some(method), "{what}");
        assert_eq!(
            (seen.body.as_slice(), seen.headers("content-length").as_slice()),
            (body.as_bytes(), length),
            "{what}"
        );
        assert_eq!(seen.headers("transfer-encoding"), [""; 0], "{what}");
        assert_eq!(seen.headers("content-type"), ["text/x-test"], "{what}");
    }
    // If a request contains `Content-Length: 0`, the gateway forwards this header.
    client.send(b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 0\r\n\r\n");
    assert_eq!(client.reply().unwrap().status, 200);
    assert_eq!(upstream.last().headers("content-length"), ["0"]);
}

#[test]
fn http2_requests_are_forwarded_as_http1() {
    let upstream = Upstream::start();
    let gateway = gateway(upstream.address);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let talk = async {
        let stream = tokio::net::TcpStream::connect(gateway.address).await.unwrap();
        let (mut sender, connection) =
            http2::handshake::<_, _, Full<Bytes>>(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let request = http::Request::post("http://shop.example:81/a/../b?x=%2f")
            .header("cookie", "a=1")
            .header("cookie", "b=2")
            .header("x-forwarded-for", "203.0.113.1")
            .header("host", "other.example")
            .body(Full::new(Bytes::from_static(b"body")));
        let response = sender.send_request(request.unwrap()).await.unwrap();
        let status = response.status().as_u16();
        (status, response.into_body().collect().await.unwrap().to_bytes())
    };
    let answer =
        runtime.block_on(async { tokio::time::timeout(MAX_WAIT, talk).await.expect("a response over HTTP/2") });
    assert_eq!(answer, (200, Bytes::from_static(b"ok")));
    let seen = upstream.last();
    assert!(seen.head.starts_with("POST /b?x=%2f HTTP/1.1\r\n"), "{}", seen.head);
    assert_eq!(seen.body, b"body");
    for (name, values) in [
        ("host", &["shop.example:81"][..]),
        ("x-forwarded-host", &["shop.example:81"]),
        ("x-forwarded-for", &["127.0.0.1"]),
        ("via", &["2.0 sluicegate"]),
        ("cookie", &["a=1; b=2"]),
    ] {
        assert_eq!(seen.headers(name), values, "{name}");
    }
}

// ---- the response --------------------------------------------------------------------------------

#[test]
fn status_and_headers_of_the_response_are_kept() {
    let upstream = Upstream::responding(|seen| {
        let status = seen.target().trim_start_matches('/');
        let lines = "Server: origin\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nX-Custom: value\r\nETag: \"e\"\r\n\
             Connection: X-Nominated\r\nKeep-Alive: timeout=5\r\nProxy-Connection: keep-alive\r\nUpgrade: h2c\r\n\
             X-Nominated: 1\r\nRateLimit-Policy: \"theirs\";q=5;w=1\r\nRateLimit: \"theirs\";r=4;t=1\r\n\
             Retry-After: 7\r\nContent-Type: text/x-test\r\nContent-Length: 4\r\n";
        format!("HTTP/1.1 {status} Whatever\r\n{lines}\r\nbody").into_bytes()
    });
    let limit = "[limit.hourly]\nby = \"global\"\nalgorithm = \"fixed-window\"\n\
         start = \"first-request\"\nquota = \"100/hour\"\n";
    let gateway = Gateway::start(&format!(
        "{limit}[upstream.api]\nservers = [\"{}\"]\n[[route]]\nname = \"all\"\n\
             path = \"/{{*rest}}\"\nupstream = \"api\"\nlimits = [\"hourly\"]\n",
        upstream.url()
    ));
    let mut client = gateway.client();
    for (index, status) in
        [200, 201, 206, 299, 301, 307, 400, 401, 404, 418, 429, 451, 500, 502, 503, 599].into_iter().enumerate()
    {
        let reply = client.get(&format!("/{status}"));
        assert_eq!((reply.status, reply.text()), (status, "body"), "{status}");
        let all = |name: &str| -> Vec<_> {
            reply.headers.iter().filter(|(key, _)| key == name).map(|(_, value)| value.as_str()).collect()
        };
        for (name, values) in [
            ("server", &["origin"][..]),
            ("set-cookie", &["a=1", "b=2"]),
            ("x-custom", &["value"]),
            ("etag", &["\"e\""]),
            ("content-type", &["text/x-test"]),
            ("content-length", &["4"]),
            ("retry-after", &["7"]),
            ("connection", &[]),
            ("keep-alive", &[]),
            ("proxy-connection", &[]),
            ("upgrade", &[]),
            ("transfer-encoding", &[]),
            ("x-nominated", &[]),
            ("ratelimit-policy", &["\"theirs\";q=5;w=1", "\"hourly\";q=100;w=3600"]),
        ] {
            assert_eq!(all(name), values, "{status}: {name}");
        }
        let limits = all("ratelimit");
        assert_eq!(limits.len(), 2, "{status}: {limits:?}");
        assert_eq!(limits[0], "\"theirs\";r=4;t=1", "{status}: the upstream's header stays first");
        assert!(limits[1].starts_with(&format!("\"hourly\";r={};t=", 99 - index)), "{status}: {limits:?}");
    }
}

#[test]
fn responses_without_a_body_have_none() {
    let upstream = Upstream::responding(|seen| match seen.target() {
        "/length" => b"HTTP/1.1 200 OK\r\nContent-Length: 12345\r\nETag: \"e\"\r\n\r\n".to_vec(),
        "/chunked" => b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nETag: \"e\"\r\n\r\n".to_vec(),
        "/204" => b"HTTP/1.1 204 No Content\r\nETag: \"e\"\r\n\r\n".to_vec(),
        "/304" => b"HTTP/1.1 304 Not Modified\r\nETag: \"e\"\r\n\r\n".to_vec(),
        // The Content-Length of a 304 response is the length that the body of the response to an unconditional GET
        // would have.
        "/304-length" => b"HTTP/1.1 304 Not Modified\r\nContent-Length: 12345\r\nETag: \"e\"\r\n\r\n".to_vec(),
        "/empty" => b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nETag: \"e\"\r\n\r\n".to_vec(),
        "/empty-chunked" => b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nETag: \"e\"\r\n\r\n0\r\n\r\n".to_vec(),
        other => panic!("{other}"),
    });
    let gateway = gateway(upstream.address);
    let mut client = gateway.client();
    // All requests use one connection, so a surplus byte would corrupt the next response.
    for (method, path, status, length) in [
        ("HEAD", "/length", 200, Some("12345")),
        ("HEAD", "/chunked", 200, None),
        ("HEAD", "/204", 204, None),
        ("HEAD", "/304", 304, None),
        ("GET", "/204", 204, None),
        ("POST", "/204", 204, None),
        ("GET", "/304", 304, None),
        ("GET", "/empty", 200, Some("0")),
        ("GET", "/empty-chunked", 200, None),
        ("HEAD", "/length", 200, Some("12345")),
    ] {
        let reply = client.request(method, path, &[], b"");
        assert_eq!((reply.status, reply.header("etag")), (status, Some("\"e\"")), "{method} {path}");
        assert_eq!((reply.header("content-length"), reply.body.len()), (length, 0), "{method} {path}");
        if status == 204 || status == 304 {
            assert_eq!(reply.header("transfer-encoding"), None, "{method} {path}");
        }
    }
    for method in ["GET", "HEAD"] {
        let reply = client.request(method, "/304-length", &[], b"");
        assert_eq!((reply.status, reply.header("transfer-encoding")), (304, None), "{method}");
        assert!(matches!(reply.header("content-length"), None | Some("12345")), "{method}: {:?}", reply.headers);
    }
    assert_eq!(client.get("/empty").status, 200, "the connection has a surplus byte");
}

#[test]
fn chunked_bodies_are_forwarded_both_ways() {
    let upstream = Upstream::responding(|seen| match seen.target() {
        "/echo" => chunked(&seen.body),
        "/until-close" => b"HTTP/1.0 200 OK\r\n\r\n".to_vec(),
        other => panic!("{other}"),
    });
    let gateway = gateway(upstream.address);
    let request = |version: &str, framing: &str, body: &str| {
        format!("POST /echo HTTP/{version}\r\nHost: a.test\r\n{framing}\r\n{body}").into_bytes()
    };
    let mut client = gateway.client();
    for (body, expected) in [
        ("5\r\nhello\r\n1\r\n \r\n5\r\nworld\r\n0\r\n\r\n", "hello world"),
        ("b;extension=\"x\"\r\nhello world\r\n000\r\n\r\n", "hello world"),
        ("0\r\n\r\n", ""),
    ] {
        client.send(&request("1.1", "Transfer-Encoding: chunked\r\n", body));
        let reply = client.reply().unwrap();
        assert_eq!(
            (reply.header("transfer-encoding"), reply.header("content-length")),
            (Some("chunked"), None),
            "{body}"
        );
        assert_eq!(reply.text(), expected, "{body}");
        let seen = upstream.last();
        assert_eq!((seen.body.as_slice(), seen.headers("content-length").len()), (expected.as_bytes(), 0), "{body}");
    }
    // HTTP/1.0 has no chunked coding, so the end of the connection is the end of the body.
    let mut old = gateway.client();
    old.send(&request("1.0", "Content-Length: 5\r\n", "hello"));
    let reply = old.reply().unwrap();
    assert_eq!((reply.text(), reply.header("transfer-encoding")), ("hello", None));
    // The gateway forwards each chunk as soon as it arrives, and does not wait for the end of the body.
    let (go_on, wait) = channel();
    let wait = Mutex::new(wait);
    let slow = serve(move |mut stream| {
        read_head(&mut stream).unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n").unwrap();
        next_event("the client has read the first chunk", &wait.lock().unwrap());
        stream.write_all(b"6\r\nsecond\r\n0\r\n\r\n").unwrap();
    });
    let gateway = self::gateway(slow);
    let mut client = gateway.client();
    client.send(b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n");
    assert_eq!(client.head().unwrap().status, 200);
    let mut first = [0; "5\r\nfirst\r\n".len()];
    client.stream.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"5\r\nfirst\r\n");
    go_on.send(()).unwrap();
    let mut second = [0; "6\r\nsecond\r\n0\r\n\r\n".len()];
    client.stream.read_exact(&mut second).unwrap();
    assert_eq!(&second, b"6\r\nsecond\r\n0\r\n\r\n");
}

#[test]
fn close_delimited_response_is_forwarded_complete() {
    let upstream = serve(|mut stream| {
        read_head(&mut stream).unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nuntil the end").unwrap();
    });
    let gateway = gateway(upstream);
    let mut client = gateway.client();
    for _ in 0..3 {
        let reply = client.get("/");
        assert_eq!((reply.text(), reply.header("transfer-encoding")), ("until the end", Some("chunked")));
    }
}

#[test]
fn response_with_two_framings_is_502_or_read_as_chunks() {
    for framing in
        ["Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", "Content-Length: 30\r\nTransfer-Encoding: chunked\r\n"]
    {
        let upstream = serve(move |mut stream| {
            while read_head(&mut stream).is_some() {
                stream
                    .write_all(format!("HTTP/1.1 200 OK\r\n{framing}\r\n5\r\nhello\r\n0\r\n\r\n").as_bytes())
                    .unwrap();
            }
        });
        let gateway = gateway(upstream);
        let reply = gateway.get("/");
        // According to RFC 9112 §6.3, Transfer-Encoding overrides Content-Length. The gateway may also reject the
        // response.
        if reply.status != 502 {
            assert_eq!((reply.status, reply.text()), (200, "hello"), "{framing}");
        }
    }
}

#[test]
fn interim_responses_are_not_forwarded_as_final() {
    let interim =
        ["100 Continue", "103 Early Hints"].map(|status| format!("HTTP/1.1 {status}\r\nLink: </a>\r\n\r\n")).concat();
    let upstream = Upstream::responding(move |_| [interim.as_bytes(), &ok()].concat());
    let gateway = gateway(upstream.address);
    let mut client = gateway.client();
    for _ in 0..2 {
        let mut reply = client.get("/");
        while reply.status / 100 == 1 {
            reply = client.reply().unwrap();
        }
        assert_eq!((reply.status, reply.text()), (200, "ok"));
    }
}

#[test]
fn large_bodies_arrive_unchanged() {
    const LENGTH: usize = 10 << 20;
    let upstream = Upstream::responding(|seen| {
        let mut body = seen.body.clone();
        body.reverse();
        match seen.target() {
            "/chunked" => chunked(&body),
            _ => [format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len()).as_bytes(), &body].concat(),
        }
    });
    let gateway = gateway(upstream.address);
    let mut client = gateway.client();
    let body = noise(LENGTH);
    let mut reversed = body.clone();
    reversed.reverse();
    let (up, down) = (checksum(&body), checksum(&reversed));
    for (what, framing, sent) in [
        ("content-length", format!("Content-Length: {LENGTH}\r\n"), body.clone()),
        ("chunked", "Transfer-Encoding: chunked\r\n".to_owned(), chunks(&body)),
    ] {
        for path in ["/length", "/chunked"] {
            client.send(format!("POST {path} HTTP/1.1\r\nHost: a.test\r\n{framing}\r\n").as_bytes());
            client.send(&sent);
            let reply = client.reply().unwrap();
            let seen = upstream.last();
            assert_eq!((seen.body.len(), checksum(&seen.body)), (LENGTH, up.clone()), "{what} up");
            assert_eq!((reply.body.len(), checksum(&reply.body)), (LENGTH, down.clone()), "{what} up, {path} down");
            assert_eq!(reply.header("content-length").is_some(), path == "/length", "{what} up, {path} down");
        }
    }
}

// ---- slow readers --------------------------------------------------------------------------------

const BLOCK: usize = 64 << 10;
const BLOCKS: usize = 1024;
/// Maximum memory growth in bytes while the gateway forwards `BLOCK * BLOCKS` bytes to a side that does not read.
const GROWTH: u64 = 16 << 20;

/// Write all blocks. When the other side has read nothing for 1 s, call `stalled` with the number of written bytes, and
/// wait for a message on `go_on`.
fn write_blocks(stream: &mut TcpStream, block: &[u8], stalled: impl Fn(usize), go_on: &Receiver<()>) {
    stream.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
    let mut written = 0;
    let mut told = false;
    while written < BLOCK * BLOCKS {
        match stream.write(&block[written % BLOCK..]) {
            Ok(count) => written += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock && !told => {
                told = true;
                stalled(written);
                next_event("the reader reads", go_on);
                stream.set_write_timeout(Some(MAX_WAIT)).unwrap();
            }
            Err(error) => panic!("after {written} bytes: {error}"),
        }
    }
}

fn read_blocks(stream: &mut impl Read, block: &[u8], count: usize) {
    let mut read = vec![0; BLOCK];
    for index in 0..count {
        stream.read_exact(&mut read).unwrap();
        assert!(read == block, "block {index} arrives as it was sent");
    }
}

/// Respond to warm-up requests. Return true when the headers of the real request have arrived.
fn warmed_up(stream: &mut TcpStream) -> bool {
    while let Some(head) = read_head(stream) {
        if !head.starts_with("GET /warm") {
            return true;
        }
        stream.write_all(&ok()).unwrap();
    }
    false
}

#[test]
fn slow_reader_slows_the_upstream_down() {
    let block = Arc::new(noise(BLOCK));
    let (stalls, stalled) = channel();
    let (go_on, wait) = channel();
    let (wait, blocks) = (Mutex::new(wait), block.clone());
    let upstream = serve(move |mut stream| {
        if !warmed_up(&mut stream) {
            return;
        }
        stream.write_all(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", BLOCK * BLOCKS).as_bytes()).unwrap();
        write_blocks(&mut stream, &blocks, |written| stalls.send(written).unwrap(), &wait.lock().unwrap());
    });
    let gateway = gateway(upstream);
    let mut client = gateway.client();
    assert_eq!(client.get("/warm").status, 200);
    let before = gateway.memory();
    client.send(b"GET /large HTTP/1.1\r\nHost: a.test\r\n\r\n");
    assert_eq!(client.head().unwrap().status, 200);
    read_blocks(&mut client.stream, &block, 4);
    let written = next_event("the upstream is held back", &stalled);
    let grown = gateway.memory().saturating_sub(before);
    assert!(written < BLOCK * BLOCKS, "the upstream could write everything");
    assert!(grown < GROWTH, "the gateway holds {grown} bytes; the upstream has written {written}");
    go_on.send(()).unwrap();
    read_blocks(&mut client.stream, &block, BLOCKS - 4);
    let grown = gateway.memory().saturating_sub(before);
    assert!(grown < GROWTH, "the gateway has grown by {grown} bytes");
}

#[test]
fn slow_upstream_slows_the_upload_down() {
    let block = Arc::new(noise(BLOCK));
    let (read_on, reading) = channel::<()>();
    let (reading, blocks) = (Mutex::new(reading), block.clone());
    let upstream = serve(move |mut stream| {
        if !warmed_up(&mut stream) {
            return;
        }
        read_blocks(&mut stream, &blocks, 4);
        next_event("the client is held back", &reading.lock().unwrap());
        read_blocks(&mut stream, &blocks, BLOCKS - 4);
        stream.write_all(&ok()).unwrap();
    });
    let gateway = gateway(upstream);
    let mut client = gateway.client();
    assert_eq!(client.get("/warm").status, 200);
    let before = gateway.memory();
    client.send(format!("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: {}\r\n\r\n", BLOCK * BLOCKS).as_bytes());
    let mut stream = client.stream.get_ref().try_clone().unwrap();
    let (stalls, stalled) = channel();
    let (go_on, wait) = channel();
    let upload = std::thread::spawn(move || {
        write_blocks(&mut stream, &block, |written| stalls.send(written).unwrap(), &wait);
    });
    let written = next_event("the client is held back", &stalled);
    let grown = gateway.memory().saturating_sub(before);
    assert!(written < BLOCK * BLOCKS, "the client could send everything");
    assert!(grown < GROWTH, "the gateway holds {grown} bytes; the client has sent {written}");
    read_on.send(()).unwrap();
    go_on.send(()).unwrap();
    upload.join().unwrap();
    assert_eq!(client.reply().unwrap().text(), "ok");
    let grown = gateway.memory().saturating_sub(before);
    assert!(grown < GROWTH, "the gateway has grown by {grown} bytes");
}

// ---- aborted requests and responses --------------------------------------------------------------

#[test]
fn disconnected_client_cancels_the_upstream_request() {
    for (what, request, broken_by_reset) in [
        ("GET", "GET / HTTP/1.1\r\nHost: a.test\r\n\r\n", false),
        ("GET, reset", "GET / HTTP/1.1\r\nHost: a.test\r\n\r\n", true),
        ("POST", "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 2\r\n\r\nhi", false),
        ("POST, reset", "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 2\r\n\r\nhi", true),
        (
            "POST in chunks",
            "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
            false,
        ),
        ("half a POST", "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 4\r\n\r\nhi", false),
        ("half a POST, reset", "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 4\r\n\r\nhi", true),
        (
            "half a POST in chunks",
            "POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n",
            false,
        ),
    ] {
        let (tell, events) = channel();
        let upstream = serve(move |mut stream| {
            let head = read_head(&mut stream).unwrap();
            if head.starts_with("POST") {
                // Read the available part of the body, with or without chunked coding.
                let mut part = Vec::new();
                while !part.ends_with(b"hi") {
                    let mut byte = [0];
                    stream.read_exact(&mut byte).unwrap();
                    part.extend_from_slice(&byte);
                }
            }
            tell.send("thinking").unwrap();
            let closed = wait_for_close(&mut stream);
            tell.send(if closed { "closed" } else { "still open" }).unwrap();
        });
        // Without a request buffer, the gateway forwards the first half of the body before it receives the second half.
        let gateway = Gateway::start(&format!("[server]\nrequest_buffer = \"0B\"\n{}", config(upstream, "")));
        let mut client = gateway.client();
        client.send(request.as_bytes());
        assert_eq!(next_event("the request arrives", &events), "thinking", "{what}");
        let stream = client.stream.into_inner();
        if broken_by_reset {
            reset(stream);
        } else {
            drop(stream);
        }
        assert_eq!(next_event("the upstream connection is closed", &events), "closed", "{what}");
    }
}

#[test]
fn client_that_disconnects_during_the_response_cancels_the_upstream_request() {
    let (tell, events) = channel();
    let upstream = serve(move |mut stream| {
        read_head(&mut stream).unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").unwrap();
        stream.set_write_timeout(Some(MAX_WAIT)).unwrap();
        let chunk = chunks(&noise(1000));
        // Send an endless response until the gateway closes the connection.
        let error = loop {
            if let Err(error) = stream.write_all(&chunk[..chunk.len() - "0\r\n\r\n".len()]) {
                break error.kind();
            }
        };
        tell.send(error).unwrap();
    });
    let gateway = gateway(upstream);
    let mut client = gateway.client();
    client.send(b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n");
    assert_eq!(client.head().unwrap().status, 200);
    drop(client);
    let error = next_event("the upstream connection is closed", &events);
    assert!(matches!(error, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{error}");
}

/// Assert that an error response does not reveal the address of the upstream.
fn assert_silent_about(reply: &Reply, address: SocketAddr, what: &str) {
    let all = format!("{:?} {}", reply.headers, reply.text());
    for secret in [address.ip().to_string(), address.port().to_string(), "localhost".to_owned()] {
        assert!(!all.contains(&secret), "{what}: {secret} in {all}");
    }
}

#[test]
fn refused_upstream_connection_is_502() {
    // The socket is bound but does not listen: its port stays reserved, and connections are refused.
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    let gateway = gateway(address);
    for (method, body) in [("GET", &b""[..]), ("POST", b"body"), ("GET", b"")] {
        let reply = gateway.client().request(method, "/", &[], body);
        reply.assert_problem(502, method);
        assert_silent_about(&reply, address, method);
    }
    crate::support::eventually("the log contains the reason", || {
        gateway.log().contains(&address.to_string()) || gateway.log().contains("refused")
    });
}

#[test]
fn silent_upstream_is_504() {
    let (tell, events) = channel();
    let upstream = serve(move |mut stream| {
        read_request(&mut stream).unwrap();
        tell.send(wait_for_close(&mut stream)).unwrap();
    });
    let gateway = Gateway::start(&config(upstream, "response_timeout = \"300ms\""));
    let mut client = gateway.client();
    for (method, body) in [("GET", &b""[..]), ("POST", b"body"), ("GET", b"")] {
        let reply = client.request(method, "/", &[], body);
        reply.assert_problem(504, method);
        assert_silent_about(&reply, upstream, method);
        assert!(next_event("the upstream request is cancelled", &events), "{method}: the connection is closed");
    }
}

#[test]
fn partial_response_head_is_504() {
    let upstream = serve(|mut stream| {
        read_head(&mut stream).unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-").unwrap();
        wait_for_close(&mut stream);
    });
    let gateway = Gateway::start(&config(upstream, "response_timeout = \"300ms\""));
    gateway.get("/").assert_problem(504, "half a head");
}

#[test]
fn client_that_stops_sending_is_408() {
    let upstream = Upstream::start();
    let config = config(upstream.address, "response_timeout = \"100ms\"");
    let gateway = Gateway::start(&format!("[server]\nbody_idle_timeout = \"300ms\"\n{config}"));
    let mut client = gateway.client();
    client.send(b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 4\r\n\r\nhi");
    client.reply().unwrap().assert_problem(408, "half a body");
    assert_eq!(upstream.count(), 0, "an incomplete request is not forwarded");
}

#[test]
fn upstream_that_stops_reading_is_504() {
    let (give_up, given_up) = channel::<()>();
    let given_up = Mutex::new(given_up);
    let upstream = serve(move |mut stream| {
        read_head(&mut stream).unwrap();
        // The upstream does not read the body.
        let _ = given_up.lock().unwrap().recv_timeout(MAX_WAIT);
    });
    let gateway = Gateway::start(&config(upstream, "response_timeout = \"300ms\""));
    let mut client = gateway.client();
    let mut stream = client.stream.get_ref().try_clone().unwrap();
    client.send(b"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n");
    let upload = std::thread::spawn(move || {
        let chunk = chunks(&noise(BLOCK));
        // The client sends until the connection is closed.
        while stream.write_all(&chunk[..chunk.len() - "0\r\n\r\n".len()]).is_ok() {}
    });
    let reply = client.head().expect("a response while the upload is blocked");
    give_up.send(()).unwrap();
    drop(client.stream.into_inner().shutdown(std::net::Shutdown::Both));
    upload.join().unwrap();
    assert_eq!(reply.status, 504, "the client was ready to send more");
}

#[test]
fn invalid_response_is_502() {
    let long = format!("HTTP/1.1 200 OK\r\nx-long: {}\r\n\r\n", "a".repeat(1 << 20));
    let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "x: 1\r\n".repeat(10_000));
    for (what, answer) in [
        ("nothing", ""),
        ("garbage", "garbage\r\n\r\n"),
        ("another protocol", "SSH-2.0-OpenSSH_9.9\r\n"),
        ("binary", "\u{16}\u{3}\u{1}\0\u{1}\u{2}"),
        ("half a status line", "HTTP/1.1 2"),
        ("half a head", "HTTP/1.1 200 OK\r\nContent-Le"),
        ("a status that is no number", "HTTP/1.1 abc OK\r\n\r\n"),
        ("a status of two digits", "HTTP/1.1 20 OK\r\n\r\n"),
        ("a version that does not exist", "HTTP/9.9 200 OK\r\nContent-Length: 0\r\n\r\n"),
        ("a field without a colon", "HTTP/1.1 200 OK\r\nno colon\r\nContent-Length: 0\r\n\r\n"),
        ("a length that is no number", "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"),
        ("two lengths", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"),
        ("an endless field", &long),
        ("endless fields", &many),
        ("only an interim answer", "HTTP/1.1 100 Continue\r\n\r\n"),
    ] {
        let answer = answer.to_owned();
        let asked = Arc::<AtomicUsize>::default();
        let count = asked.clone();
        let upstream = serve(move |mut stream| {
            read_head(&mut stream).unwrap();
            count.fetch_add(1, Ordering::Relaxed);
            // The gateway may close the connection when it has read enough.
            let _ = stream.write_all(answer.as_bytes());
            let _ = stream.shutdown(std::net::Shutdown::Write);
            wait_for_close(&mut stream);
        });
        let gateway = gateway(upstream);
        let reply = gateway.get("/");
        reply.assert_problem(502, what);
        assert_silent_about(&reply, upstream, what);
        assert_eq!(asked.load(Ordering::Relaxed), 1, "{what}: a request on a new connection is not retried");
    }
}

#[test]
fn unrequested_101_is_502() {
    let upstream = serve(|mut stream| {
        read_head(&mut stream).unwrap();
        let switch = "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n";
        stream.write_all(switch.as_bytes()).unwrap();
        wait_for_close(&mut stream);
    });
    let gateway = gateway(upstream);
    for lines in [&[][..], &[("Connection", "upgrade"), ("Upgrade", "x")]] {
        let mut client = gateway.client();
        client.get_with("/", lines).assert_problem(502, &format!("{lines:?}"));
    }
}

#[test]
fn truncated_response_never_looks_complete() {
    for (what, part, rest) in [
        ("by length", "Content-Length: 1000\r\n\r\n", "hello"),
        ("by length, all but one byte", "Content-Length: 6\r\n\r\n", "hello"),
        ("between two chunks", "Transfer-Encoding: chunked\r\n\r\n", "5\r\nhello\r\n"),
        ("in a chunk", "Transfer-Encoding: chunked\r\n\r\n", "a\r\nhello"),
        ("in the size of a chunk", "Transfer-Encoding: chunked\r\n\r\n", "5\r\nhello\r\n1"),
        ("before the end of the last chunk", "Transfer-Encoding: chunked\r\n\r\n", "5\r\nhello\r\n0\r\n"),
        ("by the end of the connection", "\r\n", "hello"),
    ] {
        for by_reset in [false, true] {
            if !by_reset && !part.contains(':') {
                continue; // close-delimited bodies end like this
            }
            let what = format!("{what}, {}", if by_reset { "reset" } else { "closed" });
            let answer = format!("HTTP/1.1 200 OK\r\n{part}{rest}");
            let (go_on, wait) = channel();
            let wait = Mutex::new(wait);
            let upstream = serve(move |mut stream| {
                read_head(&mut stream).unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
                next_event("the client has seen the start", &wait.lock().unwrap());
                if by_reset {
                    reset(stream);
                }
            });
            let gateway = gateway(upstream);
            let mut client = gateway.client();
            client.send(b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n");
            let reply = client.head().unwrap();
            assert_eq!(reply.status, 200, "{what}");
            assert!(!client.stream.fill_buf().unwrap().is_empty(), "{what}: the start of the body arrives");
            go_on.send(()).unwrap();
            let mut seen = Vec::new();
            match client.stream.read_to_end(&mut seen) {
                Ok(_) => {}
                Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{what}: the connection ends"),
            }
            let text = String::from_utf8_lossy(&seen);
            assert!(text.contains("hello"), "{what}: received bytes are forwarded: {text:?}");
            match reply.header("content-length") {
                Some(length) => assert!(seen.len() < length.parse().unwrap(), "{what}: {text:?}"),
                None => {
                    assert_eq!(reply.header("transfer-encoding"), Some("chunked"), "{what}");
                    assert!(!text.ends_with("0\r\n\r\n"), "{what}: the last chunk was never sent: {text:?}");
                }
            }
            // The gateway still serves other connections.
            assert_eq!(gateway.client().get("http://user@a.test/").status, 400, "{what}");
        }
    }
}

// ---- connections ---------------------------------------------------------------------------------

#[test]
fn upstream_connections_are_reused() {
    let connections = Arc::<AtomicUsize>::default();
    let count = connections.clone();
    let upstream = serve(move |mut stream| {
        count.fetch_add(1, Ordering::Relaxed);
        while let Some(request) = read_request(&mut stream) {
            let answer = match request.target() {
                "/empty" => b"HTTP/1.1 204 No Content\r\n\r\n".to_vec(),
                "/chunked" => chunked(b"hello"),
                _ if request.head.starts_with("HEAD") => b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n".to_vec(),
                _ => ok(),
            };
            if stream.write_all(&answer).is_err() {
                return;
            }
        }
    });
    let gateway = gateway(upstream);
    let mut client = gateway.client();
    for index in 0..20 {
        let (method, path, body) = [
            ("GET", "/", &b""[..]),
            ("POST", "/", b"body"),
            ("HEAD", "/", b""),
            ("GET", "/empty", b""),
            ("PUT", "/chunked", b"body"),
        ][index % 5];
        let status = client.request(method, path, &[], body).status;
        assert_eq!(status, if path == "/empty" { 204 } else { 200 }, "{method} {path}");
    }
    assert_eq!(connections.load(Ordering::Relaxed), 1, "20 requests one after the other");
}

#[test]
fn connection_close_of_an_upstream_is_obeyed() {
    let connections = Arc::<AtomicUsize>::default();
    let count = connections.clone();
    let upstream = serve(move |mut stream| {
        count.fetch_add(1, Ordering::Relaxed);
        read_request(&mut stream).unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok").unwrap();
        // The upstream would not respond to a second request on this connection.
        wait_for_close(&mut stream);
    });
    let gateway = gateway(upstream);
    let mut client = gateway.client();
    for _ in 0..5 {
        let reply = client.request("POST", "/", &[], b"body");
        assert_eq!((reply.text(), reply.header("connection")), ("ok", None));
    }
    assert_eq!(connections.load(Ordering::Relaxed), 5);
}

#[test]
fn connections_idle_beyond_pool_idle_timeout_are_not_reused() {
    let connections = Arc::<AtomicUsize>::default();
    let count = connections.clone();
    let upstream = serve(move |mut stream| {
        count.fetch_add(1, Ordering::Relaxed);
        while read_request(&mut stream).is_some() && stream.write_all(&ok()).is_ok() {}
    });
    // The pauses between requests are longer than this timeout, so the gateway closes idle upstream connections.
    let gateway = Gateway::start(&config(upstream, "pool_idle_timeout = \"1ms\""));
    let mut client = gateway.client();
    assert_eq!(client.get("/").text(), "ok");
    crate::support::eventually("a connection is idle", || {
        client.get("/");
        connections.load(Ordering::Relaxed) > 1
    });
}

/// Start an upstream that responds to one request per connection and then closes the connection.
fn closes_after_each_answer(seen: Arc<Mutex<Vec<Seen>>>) -> SocketAddr {
    serve(move |mut stream| {
        if let Some(request) = read_request(&mut stream) {
            seen.lock().unwrap().push(request);
            let _ = stream.write_all(&ok());
        }
    })
}

#[test]
fn upstream_that_closes_idle_connections_fails_no_get() {
    let seen = Arc::<Mutex<Vec<Seen>>>::default();
    let gateway = gateway(closes_after_each_answer(seen.clone()));
    let mut client = gateway.client();
    for index in 0..50 {
        let reply = client.get(&format!("/{index}"));
        assert_eq!((reply.status, reply.text()), (200, "ok"), "GET {index}");
    }
    assert_eq!(seen.lock().unwrap().len(), 50, "each got one response");
}

#[test]
fn upstream_that_closes_idle_connections_receives_no_post_twice() {
    let seen = Arc::<Mutex<Vec<Seen>>>::default();
    let gateway = one_worker(closes_after_each_answer(seen.clone()));
    let mut answered = 0;
    for index in 0..50 {
        let reply = gateway.client().request("POST", "/", &[], format!("order {index}").as_bytes());
        match reply.status {
            200 => answered += 1,
            // The upstream closed the connection while this request was in flight.
            _ => reply.assert_problem(502, &format!("POST {index}")),
        }
    }
    let mut bodies: Vec<_> = seen.lock().unwrap().iter().map(|seen| seen.body.clone()).collect();
    assert_eq!(bodies.len(), answered, "the upstream received each request that has a response");
    bodies.sort();
    bodies.dedup();
    assert_eq!(bodies.len(), answered, "the upstream received no request twice");
}

#[test]
fn post_uses_another_connection_if_the_pooled_one_is_closed() {
    let (tell, events) = channel();
    let upstream = serve(move |mut stream| {
        read_request(&mut stream).unwrap();
        stream.write_all(&ok()).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        // The gateway closes its side when it detects the end of the stream.
        tell.send(wait_for_close(&mut stream)).unwrap();
    });
    let gateway = gateway(upstream);
    let mut client = gateway.client();
    for index in 0..10 {
        let reply = client.request("POST", "/", &[], b"body");
        assert_eq!((reply.status, reply.text()), (200, "ok"), "POST {index}");
        assert!(next_event("the gateway notices", &events), "POST {index}: the connection is closed");
    }
}

#[test]
fn only_safe_requests_are_sent_twice() {
    let seen = Arc::<Mutex<Vec<Seen>>>::default();
    let record = seen.clone();
    // The upstream responds to the first request of each connection. On the second request, it closes the connection
    // without a response.
    let upstream = serve(move |mut stream| {
        for answer in [Some(ok()), None] {
            let Some(request) = read_request(&mut stream) else { return };
            let head = request.head.starts_with("HEAD");
            record.lock().unwrap().push(request);
            let Some(answer) = answer else { return };
            stream.write_all(if head { &answer[..answer.len() - 2] } else { &answer }).unwrap();
        }
    });
    let gateway = gateway(upstream);
    let mut client = gateway.client();
    let times = |target: &str| seen.lock().unwrap().iter().filter(|seen| seen.target() == target).count();
    for (index, (method, body, safe)) in [
        ("POST", "order", false),
        ("GET", "", true),
        ("POST", "", false),
        ("HEAD", "", true),
        ("PUT", "order", false),
        ("OPTIONS", "", true),
        ("DELETE", "", false),
        ("PATCH", "order", false),
        ("PURGE", "", false),
        // The first attempt has consumed the body, so the gateway cannot send the request again.
        ("GET", "query", false),
    ]
    .into_iter()
    .enumerate()
    {
        // After this request, the pool contains one connection that was used once.
        let what = format!("{method} {body:?}");
        assert_eq!(client.get(&format!("/warm-{index}")).status, 200, "before {what}");
        let target = format!("/{index}");
        let reply = client.request(method, &target, &[], body.as_bytes());
        if safe {
            assert_eq!((reply.status, times(&target)), (200, 2), "{what} is retried on a new connection");
        } else {
            reply.assert_problem(502, &what);
            assert_eq!(times(&target), 1, "{what} may have been processed");
        }
    }
    assert_eq!(client.get("/last").status, 200);
    assert_eq!(times("/0"), 1, "the request is not sent again later");
}

// ---- Expect --------------------------------------------------------------------------------------

#[test]
fn expect_100_continue_is_answered_when_the_body_is_read() {
    let upstream = Upstream::responding(|seen| match seen.target() {
        "/refused" => b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n".to_vec(),
        _ => ok(),
    });
    let limit =
        "[limit.once]\nby = \"global\"\nalgorithm = \"fixed-window\"\nstart = \"first-request\"\nquota = \"1/hour\"\n";
    let limited = "[[route]]\nname = \"limited\"\npath = \"/limited\"\nmethods = [\"POST\"]\n\
         upstream = \"api\"\nlimits = [\"once\"]\n";
    let gateway = Gateway::start(&format!("{limit}{limited}{}", config(upstream.address, "")));
    let expecting = |target: &str| {
        let mut client = gateway.client();
        let head = "Host: a.test\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n";
        client.send(format!("POST {target} HTTP/1.1\r\n{head}").as_bytes());
        let first = client.head().unwrap();
        (client, first)
    };
    for target in ["/", "/limited"] {
        let (mut client, first) = expecting(target);
        assert_eq!(first.status, 100, "{target}");
        client.send(b"hello");
        let reply = client.reply().unwrap();
        assert_eq!((reply.status, reply.text()), (200, "ok"), "{target}");
        let seen = upstream.last();
        assert_eq!((&*seen.body, seen.headers("expect").len()), (&b"hello"[..], 0), "{target}: {}", seen.head);
        // The connection stays open.
        assert_eq!(client.get("/").text(), "ok", "{target}");
    }
    let before = upstream.count();
    for (target, status) in [("/limited", 429), ("/a%2Fb", 400)] {
        let (mut client, first) = expecting(target);
        assert_eq!(first.status, status, "{target}: no 100 for a body that is not read");
        let length: usize = first.header("content-length").unwrap().parse().unwrap();
        let mut body = vec![0; length];
        client.stream.read_exact(&mut body).unwrap();
        let reply = Reply { body, ..first };
        reply.assert_problem(status, target);
        client.assert_closed(target);
    }
    assert_eq!(upstream.count(), before, "rejected requests are not forwarded");
}

#[test]
fn request_with_an_invalid_response_is_not_retried() {
    let upstream = Upstream::responding(|seen| match seen.target() {
        "/bad" => b"HTTP/9.9 what\r\n\r\n".to_vec(),
        _ => b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok".to_vec(),
    });
    let gateway = Gateway::start(&format!(
        "[server]\nworkers = 1\n[upstream.up]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"up\"\npath = \"/{{*rest}}\"\nupstream = \"up\"\n",
        upstream.url()
    ));
    let mut client = gateway.client();
    assert_eq!(client.get("/good").status, 200, "the next request reuses the connection");
    assert_eq!(client.get("/bad").status, 502);
    let bad = upstream.seen.lock().unwrap().iter().filter(|seen| seen.target() == "/bad").count();
    assert_eq!(bad, 1, "the upstream responded");
}
