//! Header rules of routes, HTTP/1.0 clients, server-sent events and protocol detection.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::mpsc::channel;

use crate::support::MAX_WAIT;
use crate::support::client::Reply;
use crate::support::frames::{self, DATA, END_HEADERS, END_STREAM, HEADERS, Http2};
use crate::support::gateway::Gateway;
use crate::support::upstream::{Upstream, read_head, serve};
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::{TokioExecutor, TokioIo};

fn gateway(upstream: SocketAddr, route: &str) -> Gateway {
    Gateway::start(&format!(
        "[upstream.u]\nservers = [\"http://{upstream}\"]\n\
         [limit.l]\nby = \"ip\"\nquota = \"100/24h\"\ncost.response_header = \"x-used\"\n\
         [[route]]\nname = \"r\"\npath = \"/r/{{*rest}}\"\nupstream = \"u\"\nlimits = [\"l\"]\n{route}\n\
         [[route]]\nname = \"own\"\npath = \"/own\"\nrespond = {{ status = 200, body = \"own\" }}\n{route}\n"
    ))
}

fn all<'a>(reply: &'a Reply, name: &str) -> Vec<&'a str> {
    reply.headers.iter().filter(|(key, _)| key == name).map(|(_, value)| value.as_str()).collect()
}

#[test]
fn request_header_rules_apply_to_the_upstream_request() {
    let upstream = Upstream::start();
    let rules = "request_headers = { set = { X-Gateway = \"sluice gate\", authorization = \"Basic eDp5\" }, \
                 remove = [\"x-debug\", \"X-Api-Key\", \"x-real-ip\"] }";
    let gateway = gateway(upstream.address, rules);
    let sent = [
        ("X-Debug", "1"),
        ("X-Debug", "2"),
        ("x-api-key", "secret"),
        ("Authorization", "Bearer a"),
        ("authorization", "Bearer b"),
        ("x-gateway", "theirs"),
        ("accept", "*/*"),
        // Clients cannot use `Connection` to remove headers that the rules set.
        ("Connection", "x-gateway, authorization"),
    ];
    assert_eq!(gateway.client().get_with("/r/1", &sent).status, 200);
    let seen = upstream.last();
    for (name, values) in [
        ("x-debug", &[][..]),
        ("x-api-key", &[]),
        ("authorization", &["Basic eDp5"]),
        ("x-gateway", &["sluice gate"]),
        ("accept", &["*/*"]),
        ("x-forwarded-for", &["127.0.0.1"]),
        ("host", &["gateway.test"]),
    ] {
        assert_eq!(seen.headers(name), values, "{name}: {}", seen.head);
    }
}

#[test]
fn response_header_rules_apply_to_the_response() {
    let upstream = Upstream::responding(|_| {
        b"HTTP/1.1 200 OK\r\nServer: secret/1.0\r\nX-Powered-By: a\r\nX-Powered-By: b\r\nRateLimit: \"theirs\";r=1\r\n\
          X-Used: 7\r\nX-Kept: 1\r\nCache-Control: public\r\nContent-Length: 2\r\n\r\nok"
            .to_vec()
    });
    let rules = "response_headers = { set = { cache-control = \"no-store\", x-new = \"1\" }, \
                 remove = [\"server\", \"x-powered-by\", \"ratelimit\", \"retry-after\", \"x-used\"] }";
    let gateway = gateway(upstream.address, rules);
    let reply = gateway.get("/r/1");
    for (name, values) in [
        ("server", &[][..]),
        ("x-powered-by", &[]),
        ("x-used", &[]),
        ("x-kept", &["1"]),
        ("cache-control", &["no-store"]),
        ("x-new", &["1"]),
        ("content-length", &["2"]),
    ] {
        assert_eq!(all(&reply, name), values, "{name}: {reply:?}");
    }
    assert_eq!(all(&reply, "ratelimit").len(), 1, "only the gateway's RateLimit header remains: {reply:?}");
    assert_eq!(reply.remaining("l"), 93, "the request was charged before the rules removed the header");
    let own = gateway.get("/own");
    assert_eq!((own.text(), own.header("x-new")), ("own", Some("1")), "direct responses follow the rules");
    // The quota of 100 is used up. The rules do not apply to rejections.
    let refused = (0..30).map(|_| gateway.get("/r/1")).find(|reply| reply.status == 429).expect("a denial");
    assert_eq!((refused.header("x-new"), refused.header("cache-control")), (None, Some("no-store")));
    assert!(refused.header("retry-after").is_some() && refused.header("ratelimit").is_some(), "{refused:?}");
}

// ---- HTTP/1.0 ------------------------------------------------------------------------------------

#[test]
fn http_1_0_requests_get_http_1_0_semantics() {
    let upstream = Upstream::responding(|seen| match seen.target() {
        "/r/chunks" => {
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nin\r\n7\r\n pieces\r\n0\r\n\r\n".to_vec()
        }
        _ => b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwhole".to_vec(),
    });
    let gateway = gateway(upstream.address, "");
    for (target, fields, body) in [
        ("/r/1", "", "whole"),
        ("/r/1", "Host: a.test\r\nConnection: close\r\n", "whole"),
        ("/r/chunks", "", "in pieces"),
        // Only the end of the connection delimits this body, so the connection is not kept alive.
        ("/r/chunks", "Connection: keep-alive\r\n", "in pieces"),
        ("/own", "", "own"),
    ] {
        let mut client = gateway.client();
        client.send(format!("GET {target} HTTP/1.0\r\n{fields}\r\n").as_bytes());
        let mut answer = String::new();
        client.stream.read_to_string(&mut answer).unwrap();
        let (head, rest) = answer.split_once("\r\n\r\n").unwrap();
        let head = head.to_ascii_lowercase();
        assert!(head.starts_with("http/1.0 200 ok\r\n"), "{target} {fields}: {head}");
        assert!(!head.contains("transfer-encoding") && !head.contains("keep-alive"), "{target} {fields}: {head}");
        assert_eq!(rest, body, "{target} {fields}");
    }
    assert_eq!(upstream.last().headers("via"), ["1.0 sluicegate"]);
    assert!(upstream.last().head.starts_with("GET /r/chunks HTTP/1.1\r\n"), "{}", upstream.last().head);
    let mut client = gateway.client();
    for _ in 0..3 {
        client.send(b"GET /r/1 HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n");
        let reply = client.reply().expect("the connection is kept");
        assert_eq!((reply.text(), reply.header("connection")), ("whole", Some("keep-alive")));
    }
}

#[test]
fn response_has_one_date_and_the_server_header_of_the_upstream() {
    let upstream = Upstream::responding(|seen| {
        let fields = match seen.target() {
            "/r/both" => "Date: Tue, 15 Nov 1994 08:12:31 GMT\r\nServer: old/1.0\r\n",
            _ => "",
        };
        format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: 0\r\n\r\n").into_bytes()
    });
    let gateway = gateway(upstream.address, "");
    let both = gateway.get("/r/both");
    assert_eq!(
        all(&both, "date"),
        ["Tue, 15 Nov 1994 08:12:31 GMT"],
        "the Date of the upstream is kept (RFC 9110 §6.6.1)"
    );
    assert_eq!(all(&both, "server"), ["old/1.0"]);
    for path in ["/r/none", "/own", "/nowhere"] {
        let reply = gateway.get(path);
        assert!(matches!(all(&reply, "date")[..], [date] if date.ends_with(" GMT")), "{path}: {reply:?}");
        assert_eq!(all(&reply, "server"), [""; 0], "{path}");
    }
}

// ---- events --------------------------------------------------------------------------------------

#[test]
fn each_server_sent_event_is_forwarded_at_once() {
    const EVENTS: usize = 20;
    let (go_on, wait) = channel::<()>();
    let wait = Mutex::new(wait);
    let upstream = serve(move |mut stream| {
        while read_head(&mut stream).is_some() {
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
            stream.write_all(head.as_bytes()).unwrap();
            for _ in 0..EVENTS {
                stream.write_all(b"9\r\ndata: x\n\n\r\n").unwrap();
                // The next event is sent only after the client has received this one.
                wait.lock().unwrap().recv_timeout(MAX_WAIT).unwrap();
            }
            stream.write_all(b"0\r\n\r\n").unwrap();
        }
    });
    let gateway = gateway(upstream, "");
    let mut client = gateway.client();
    client.send(b"GET /r/events HTTP/1.1\r\nHost: a.test\r\nAccept: text/event-stream\r\n\r\n");
    assert_eq!(client.head().unwrap().header("content-type"), Some("text/event-stream"));
    let mut event = [0; b"9\r\ndata: x\n\n\r\n".len()];
    for _ in 0..EVENTS {
        client.stream.read_exact(&mut event).unwrap();
        assert_eq!(&event, b"9\r\ndata: x\n\n\r\n");
        go_on.send(()).unwrap();
    }
    let talk = async {
        let stream = tokio::net::TcpStream::connect(gateway.address).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake::<_, _, Empty<&[u8]>>(TokioExecutor::new(), TokioIo::new(stream))
                .await
                .unwrap();
        tokio::spawn(connection);
        let request = http::Request::get("http://a.test/r/events").body(Empty::new()).unwrap();
        let mut body = sender.send_request(request).await.unwrap().into_body();
        for _ in 0..EVENTS {
            let event = body.frame().await.unwrap().unwrap().into_data().unwrap();
            assert_eq!(event, "data: x\n\n");
            go_on.send(()).unwrap();
        }
        assert_eq!(body.collect().await.unwrap().to_bytes(), "");
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(MAX_WAIT, talk).await.expect("events over HTTP/2") });
}

#[test]
fn protocol_is_detected_from_the_first_bytes_in_any_pieces() {
    let upstream = Upstream::start();
    let gateway = gateway(upstream.address, "");
    // Send methods that begin like the HTTP/2 preface, then invalid prefaces, then a valid preface.
    for (request, status) in [
        ("P / HTTP/1.1\r\nHost: a.test\r\n\r\n", Some(404)),
        ("PRI /own HTTP/1.1\r\nHost: a.test\r\n\r\n", Some(200)),
        ("PRIVATE /own HTTP/1.1\r\nHost: a.test\r\n\r\n", Some(200)),
        ("PRI * HTTP/1.1\r\nHost: a.test\r\n\r\n", Some(400)),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\n\n", Some(400)),
        ("PRI * HTTP/1.1\r\n", None),
    ] {
        for at_once in [true, false] {
            let mut client = gateway.client();
            client.stream.get_ref().set_nodelay(true).unwrap();
            if at_once {
                client.send(request.as_bytes());
            } else {
                request.bytes().for_each(|byte| client.send(&[byte]));
            }
            if !request.contains("\r\n\r\n") {
                client.stream.get_mut().shutdown(std::net::Shutdown::Write).unwrap();
            }
            assert_eq!(client.reply().map(|reply| reply.status), status, "{request:?}, at once: {at_once}");
        }
    }
    let request = frames::frame(HEADERS, END_STREAM | END_HEADERS, 1, &frames::block("GET", "/own", &[]));
    let settings = frames::frame(frames::SETTINGS, 0, 0, &[]);
    let bytes = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &settings[..], &request].concat();
    for pieces in [bytes.len(), 1, 23, 25] {
        let mut client = Http2 { stream: gateway.client().stream.into_inner() };
        bytes.chunks(pieces).for_each(|piece| client.send(piece).unwrap());
        assert_eq!(client.until(DATA, 1).expect("a response").payload, b"own", "sent in pieces of {pieces} bytes");
    }
}
