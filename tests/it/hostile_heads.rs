//! Malformed and huge request lines and headers, and conflicting hosts: faults 3 and 4 in docs/testing.md.

use std::io::{Read, Write};
use std::net::TcpStream;

use crate::support::MAX_WAIT;
use crate::support::gateway::Gateway;
use crate::support::tokens::{Key, key_set};
use crate::support::upstream::Upstream;

fn gateway(upstream: &Upstream) -> Gateway {
    Gateway::start(&format!(
        "[server]\nworkers = 1\n[[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"api\"\n\
         [[route]]\nname = \"wild\"\nhosts = [\"*.b.test\"]\npath = \"/{{*rest}}\"\nupstream = \"api\"\n\
         [upstream.api]\nservers = [\"{}\"]\n",
        upstream.url()
    ))
}

/// Send the bytes and return the status of the first response. Return `None` if the gateway resets the connection
/// before the response arrives. This can happen while the client still sends.
fn status(gateway: &Gateway, bytes: &[u8]) -> Option<u16> {
    let mut stream = TcpStream::connect(gateway.address).unwrap();
    stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
    let _ = stream.write_all(bytes);
    let mut first = [0; 12];
    stream.read_exact(&mut first).ok()?;
    std::str::from_utf8(&first[9..]).unwrap().parse().ok()
}

/// Each case has a name, an RFC with a section, an invalid request up to the empty line, and the status of the
/// rejection.
const BROKEN: &[(&str, &str, &[u8], u16)] = &[
    ("no version", "9112 3", b"GET /", 400),
    ("no target", "9112 3", b"GET HTTP/1.1", 400),
    ("two targets", "9112 3", b"GET / /x HTTP/1.1\r\nHost: a", 400),
    ("two spaces", "9112 3", b"GET  / HTTP/1.1\r\nHost: a", 400),
    ("a tab", "9112 3", b"GET\t/ HTTP/1.1\r\nHost: a", 400),
    ("a space behind the version", "9112 3", b"GET / HTTP/1.1 \r\nHost: a", 400),
    ("a space in front", "9112 3", b" GET / HTTP/1.1\r\nHost: a", 400),
    ("version 0.9", "9112 2.3", b"GET / HTTP/0.9\r\nHost: a", 400),
    ("version 2.0", "9112 2.3", b"GET / HTTP/2.0\r\nHost: a", 400),
    ("version 1.2", "9112 2.3", b"GET / HTTP/1.2\r\nHost: a", 400),
    ("version 1.10", "9112 2.3", b"GET / HTTP/1.10\r\nHost: a", 400),
    ("version of another protocol", "9112 2.3", b"GET / RTSP/1.0\r\nHost: a", 400),
    ("a lower-case version", "9112 2.3", b"GET / http/1.1\r\nHost: a", 400),
    ("a NUL in the target", "9112 3.2", b"GET /\0 HTTP/1.1\r\nHost: a", 400),
    ("a CR in the target", "9112 3.2", b"GET /\rx HTTP/1.1\r\nHost: a", 400),
    ("DEL in the target", "9112 3.2", b"GET /\x7f HTTP/1.1\r\nHost: a", 400),
    ("bytes that are no text", "9112 3.2", b"GET /\xff\xfe HTTP/1.1\r\nHost: a", 400),
    ("a method with a colon", "9110 9.1", b"GET: / HTTP/1.1\r\nHost: a", 400),
    ("a method with NUL", "9110 9.1", b"GE\0T / HTTP/1.1\r\nHost: a", 400),
    ("a method above ASCII", "9110 9.1", b"G\xc3\x89T / HTTP/1.1\r\nHost: a", 400),
    ("a line without a colon", "9112 5", b"GET / HTTP/1.1\r\nHost: a\r\nx", 400),
    ("a line without a name", "9112 5", b"GET / HTTP/1.1\r\nHost: a\r\n: x", 400),
    ("a name with a space", "9112 5.1", b"GET / HTTP/1.1\r\nHost: a\r\nx y: z", 400),
    ("a space before the colon", "9112 5.1", b"GET / HTTP/1.1\r\nHost: a\r\nx : y", 400),
    ("a name with NUL", "9112 5.1", b"GET / HTTP/1.1\r\nHost: a\r\nx\0: y", 400),
    ("a name above ASCII", "9112 5.1", b"GET / HTTP/1.1\r\nHost: a\r\n\xc3\xa9: y", 400),
    ("a name in brackets", "9112 5.1", b"GET / HTTP/1.1\r\nHost: a\r\n[x]: y", 400),
    ("a folded line", "9112 5.2", b"GET / HTTP/1.1\r\nHost: a\r\nx: y\r\n z", 400),
    ("a fold in front of all", "9112 2.2", b"GET / HTTP/1.1\r\n x: y\r\nHost: a", 400),
    ("a value with NUL", "9110 5.5", b"GET / HTTP/1.1\r\nHost: a\r\nx: y\0", 400),
    ("a value with CR", "9110 5.5", b"GET / HTTP/1.1\r\nHost: a\r\nx: y\rz: 1", 400),
    ("a value with BEL", "9110 5.5", b"GET / HTTP/1.1\r\nHost: a\r\nx: \x07", 400),
    ("a value with DEL", "9110 5.5", b"GET / HTTP/1.1\r\nHost: a\r\nx: \x7f", 400),
    ("TLS where none is", "9112 2.2", b"\x16\x03\x01\x00\x05hello", 400),
    ("a Redis command", "9112 2.2", b"*1\r\n$4\r\nPING", 400),
    ("a mail", "9112 2.2", b"EHLO a.test\r\nMAIL FROM:<a@a.test>", 400),
    (
        "PROXY protocol without proxy_protocol",
        "9112 2.2",
        b"PROXY TCP4 192.0.2.1 192.0.2.2 1 80\r\nGET / HTTP/1.1\r\nHost: a",
        400,
    ),
    ("a length of 2^64", "9112 6.3", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 18446744073709551616", 400),
    // hyper reports the two lengths below 2^64 like headers that are too large.
    ("a length of 2^64 - 1", "9112 6.3", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 18446744073709551615", 431),
    ("the preface of HTTP/2 with more", "9113 3.4", b"PRI * HTTP/2.0\r\nHost: a", 400),
];

#[test]
fn malformed_and_huge_heads_are_rejected_and_take_no_memory() {
    let upstream = Upstream::start();
    let gateway = gateway(&upstream);
    let line =
        |name: &str, length: usize| format!("GET / HTTP/1.1\r\nHost: a\r\n{name}: {}", "a".repeat(length)).into_bytes();
    let target = |length: usize| format!("GET /{} HTTP/1.1\r\nHost: a", "a".repeat(length)).into_bytes();
    let lines = |count: usize| format!("GET / HTTP/1.1\r\nHost: a{}", "\r\nx: y".repeat(count)).into_bytes();
    let huge = [
        ("a target beyond the bound", target(9 << 10), &[414][..]),
        ("a target beyond all bounds", target(200 << 10), &[414, 431]),
        ("a query beyond the bound", [b"GET /?", &[b'a'; 9 << 10][..], b" HTTP/1.1\r\nHost: a"].concat(), &[414]),
        (
            "a path that grows beyond the bound",
            format!("GET /{} HTTP/1.1\r\nHost: a", "\u{e9}".repeat(3 << 10)).into_bytes(),
            &[414],
        ),
        ("a method beyond the bound", [&[b'A'; 40 << 10][..], b" / HTTP/1.1\r\nHost: a"].concat(), &[400, 431]),
        ("a line beyond the bound", line("x", 40 << 10), &[431]),
        ("a line beyond all bounds", line("x", 1 << 20), &[431]),
        ("a cookie beyond the bound", line("Cookie", 40 << 10), &[431]),
        ("a name beyond the bound", line(&"x".repeat(66 << 10), 1), &[400, 431]),
        ("101 lines", lines(100), &[431]),
        ("10,000 lines", lines(10_000), &[431]),
    ];
    let round = || {
        let mut refused = 0;
        for (name, section, head, expected) in BROKEN {
            assert_eq!(status(&gateway, &[head, &b"\r\n\r\n"[..]].concat()), Some(*expected), "{name} (RFC {section})");
            refused += 1;
        }
        for (name, head, expected) in &huge {
            let found = status(&gateway, &[&head[..], b"\r\n\r\n"].concat());
            // The client may miss the response only if it sends far more bytes than the size limit of the headers.
            let reset = found.is_none() && head.len() > 64 << 10;
            assert!(reset || found.is_some_and(|status| expected.contains(&status)), "{name}: {found:?}");
            // Send the same bytes without the end of the headers. If headers exceed the gateway's buffer, the gateway
            // rejects them before they are complete.
            if head.len() >= 40 << 10 {
                let found = status(&gateway, &[&head[..], b"a"].concat());
                assert!(
                    found.is_none_or(|status| matches!(status, 400 | 414 | 431)),
                    "{name} without an end: {found:?}"
                );
            }
            refused += 1;
        }
        refused
    };
    // Measure the memory after three rounds, because the gateway keeps the buffers that it allocates in them.
    for _ in 0..3 {
        round();
    }
    let before = gateway.memory();
    let refused: usize = (0..10).map(|_| round()).sum();
    let grown = gateway.memory().saturating_sub(before);
    assert_eq!(upstream.heads.lock().unwrap().len(), 0, "nothing is forwarded");
    assert_eq!(gateway.get("/").status, 200);
    println!("fault 3: {refused} heads rejected, {} KiB more memory", grown >> 10);
    assert!(grown <= 4 << 20, "{grown} bytes more");
    assert!(!gateway.log().contains("panicked"), "{}", gateway.log());
}

#[test]
fn requests_that_cannot_be_parsed_get_a_problem_document() {
    let upstream = Upstream::start();
    let gateway = gateway(&upstream);
    let huge = |count: usize| [b"GET / HTTP/1.1\r\nHost: a".to_vec(), b"\r\nx: y".repeat(count)].concat();
    let (few, many) = (huge(101), huge(2000));
    let long = [&b"GET /"[..], &[b'a'; 70 << 10]].concat();
    let oversized: [(&str, &str, &[u8], u16); 3] =
        [("101 lines", "", &few, 431), ("2,000 lines", "", &many, 431), ("a target of 70 KiB", "", &long, 431)];
    for (what, _, head, status) in BROKEN.iter().chain(&oversized) {
        for before in [0, 2] {
            let what = format!("{what} after {before} requests");
            let mut client = gateway.client();
            for _ in 0..before {
                assert_eq!(client.get("/").status, 200, "{what}");
            }
            client.send(&[head, &b"\r\n\r\n"[..]].concat());
            let reply = client.reply().unwrap_or_else(|| panic!("{what}: no response"));
            reply.assert_problem(*status, &what);
            assert_eq!(reply.header("cache-control"), Some("no-store"), "{what}");
            assert_eq!(reply.header("proxy-status"), Some("sluicegate;error=http_request_error"), "{what}");
            assert!(reply.header("date").is_some(), "{what}");
            client.assert_closed(&what);
        }
    }
}

#[test]
fn content_length_beyond_all_numbers_is_named() {
    let gateway = Gateway::start("[[route]]\nname = \"r\"\npath = \"/\"\nrespond = { status = 200 }\n");
    for length in ["18446744073709551615", "18446744073709551616", "99999999999999999999999"] {
        let mut client = gateway.client();
        client.send(format!("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: {length}\r\n\r\n").as_bytes());
        let reply = client.reply().unwrap();
        let names_length = reply.status == 400 || reply.text().contains("a Content-Length that is too large");
        assert!(names_length, "{length}: {} {}", reply.status, reply.text());
    }
}

#[test]
fn content_that_looks_like_a_response_of_the_parser_stays() {
    let text = "x\nHTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\
                date: Sun, 06 Nov 1994 08:49:37 GMT\r\n\r\n";
    let gateway = Gateway::start(&format!(
        "[[route]]\nname = \"text\"\npath = \"/\"\nrespond = {{ status = 200, body = {text:?} }}\n"
    ));
    let mut client = gateway.client();
    for _ in 0..3 {
        assert_eq!(client.get("/").text(), text);
    }
}

/// A case: a request up to the empty line, a section of RFC 9110, and the result. The result is the `Host` and the
/// target that the upstream receives, or the status of the rejection.
type Case = (&'static str, &'static str, Result<(&'static str, &'static str), u16>);

const HOSTS: &[Case] = &[
    // ---- the upstream receives the host that selected the route (RFC 9112 §3.2.2)
    ("GET / HTTP/1.1\r\nHost: a.test", "7.2", Ok(("a.test", "/"))),
    ("GET / HTTP/1.1\r\nHost: A.Test:8080", "7.2", Ok(("A.Test:8080", "/"))),
    ("GET / HTTP/1.1\r\nHost: [::1]:80", "7.2", Ok(("[::1]:80", "/"))),
    ("GET http://b.test/x HTTP/1.1\r\nHost: a.test", "7.2", Ok(("b.test", "/x"))),
    ("GET http://b.test:81/x?y HTTP/1.1\r\nHost: a.test:82", "7.2", Ok(("b.test:81", "/x?y"))),
    ("GET HTTP://B.TEST/x HTTP/1.1\r\nHost: a.test", "7.2", Ok(("B.TEST", "/x"))),
    ("GET https://b.test HTTP/1.1\r\nHost: a.test", "7.2", Ok(("b.test", "/"))),
    ("GET http://b.test?q HTTP/1.1\r\nHost: a.test", "7.2", Ok(("b.test", "/?q"))),
    ("GET http://x.b.test//y/../z HTTP/1.1\r\nHost: a.test", "7.2", Ok(("x.b.test", "/z"))),
    ("GET http://[::1]:81/ HTTP/1.1\r\nHost: a.test", "7.2", Ok(("[::1]:81", "/"))),
    ("GET http://b.test/ HTTP/1.0", "7.2", Ok(("b.test", "/"))),
    ("OPTIONS http://b.test/ HTTP/1.1\r\nHost: a.test", "7.2", Ok(("b.test", "/"))),
    (
        "GET http://b.test/ HTTP/1.1\r\nHost: a.test\r\nX-Forwarded-Host: c.test\r\nX-Host: d.test",
        "7.2",
        Ok(("b.test", "/")),
    ),
    ("GET / HTTP/1.1\r\nHost: a.test\r\nX_Host: b.test\r\nHost_: c.test", "7.2", Ok(("a.test", "/"))),
    // ---- requests without a host, or with several hosts
    ("GET / HTTP/1.1", "7.2", Err(400)),
    ("GET http://b.test/ HTTP/1.1", "7.2", Err(400)),
    ("GET / HTTP/1.1\r\nHost: a.test\r\nHost: b.test", "7.2", Err(400)),
    ("GET / HTTP/1.1\r\nHost: a.test\r\nhost: a.test", "7.2", Err(400)),
    ("GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\nHost: a.test", "7.2", Err(400)),
    ("GET / HTTP/1.0\r\nHost: a.test\r\nHost: b.test", "7.2", Err(400)),
    ("GET / HTTP/1.1\r\nHost:", "7.2", Err(400)),
    ("GET / HTTP/1.1\r\nHost: a.test, b.test", "7.2", Err(400)),
    ("GET / HTTP/1.1\r\nHost: a.test b.test", "7.2", Err(400)),
    ("GET / HTTP/1.1\r\nHost: user@a.test", "7.2", Err(400)),
    ("GET / HTTP/1.1\r\nHost: a.test/x", "7.2", Err(400)),
    ("GET / HTTP/1.1\r\nHost: a.test?x", "7.2", Err(400)),
    ("GET / HTTP/1.1\r\nHost: a.test#x", "7.2", Err(400)),
    ("GET / HTTP/1.1\r\nHost: a.test\\x", "7.2", Err(400)),
    ("GET / HTTP/1.1\r\nHost: a%2etest", "7.2", Err(400)),
    ("GET / HTTP/1.1\r\nHost: a.test:", "7.2", Ok(("a.test:", "/"))),
    ("GET / HTTP/1.1\r\nHost: a.test:99999999", "7.2", Err(400)),
    ("GET / HTTP/1.1\r\nHost: a.test:-1", "7.2", Err(400)),
    ("GET / HTTP/1.1\r\nHost: a.test:80@b.test", "7.2", Err(400)),
    ("GET / HTTP/1.1\r\nHost: http://a.test", "7.2", Err(400)),
    ("GET / HTTP/1.1\r\nHost: [::1", "7.2", Err(400)),
    ("GET / HTTP/1.1\r\nHost: caf\u{e9}.test", "7.2", Err(400)),
    ("GET http://b.test/ HTTP/1.1\r\nHost: a b", "7.2", Err(400)),
    ("GET http://user@b.test/ HTTP/1.1\r\nHost: b.test", "4.2.4", Err(400)),
    ("GET http://b.test:x/ HTTP/1.1\r\nHost: b.test", "4.2.4", Err(400)),
    ("GET http:///x HTTP/1.1\r\nHost: b.test", "4.2.4", Err(400)),
    ("GET http:/x HTTP/1.1\r\nHost: b.test", "4.2.4", Err(400)),
    // ---- other schemes and targets (RFC 9112 §3.2)
    ("GET ftp://b.test/ HTTP/1.1\r\nHost: b.test", "4.2", Err(400)),
    ("GET gopher://b.test:70/x HTTP/1.1\r\nHost: b.test", "4.2", Err(400)),
    ("GET file:///etc/passwd HTTP/1.1\r\nHost: b.test", "4.2", Err(400)),
    ("GET ws://b.test/ HTTP/1.1\r\nHost: b.test", "4.2", Err(400)),
    ("GET javascript:alert(1) HTTP/1.1\r\nHost: b.test", "4.2", Err(400)),
    ("GET * HTTP/1.1\r\nHost: a.test", "9.3.7", Err(400)),
    ("OPTIONS * HTTP/1.1\r\nHost: a.test", "9.3.7", Err(400)),
    ("GET a.test:80 HTTP/1.1\r\nHost: a.test", "9.3.6", Err(400)),
    ("GET x HTTP/1.1\r\nHost: a.test", "7.1", Err(400)),
    ("GET ?x HTTP/1.1\r\nHost: a.test", "7.1", Err(400)),
    ("GET @b.test/ HTTP/1.1\r\nHost: a.test", "7.1", Err(400)),
    ("GET //b.test/x HTTP/1.1\r\nHost: a.test", "7.1", Ok(("a.test", "/b.test/x"))),
    ("GET /http://b.test/x HTTP/1.1\r\nHost: a.test", "7.1", Ok(("a.test", "/http:/b.test/x"))),
    ("GET /x#y HTTP/1.1\r\nHost: a.test", "7.1", Ok(("a.test", "/x"))),
    ("GET /x?y#z HTTP/1.1\r\nHost: a.test", "7.1", Ok(("a.test", "/x?y"))),
    ("GET /caf\u{e9} HTTP/1.1\r\nHost: a.test", "7.1", Ok(("a.test", "/caf%C3%A9"))),
    ("GET /a%2Fb HTTP/1.1\r\nHost: a.test", "7.1", Err(400)),
    ("GET /a%5Cb HTTP/1.1\r\nHost: a.test", "7.1", Err(400)),
    ("GET /a\\b HTTP/1.1\r\nHost: a.test", "7.1", Err(400)),
    ("GET /a%00 HTTP/1.1\r\nHost: a.test", "7.1", Err(400)),
    ("GET /a%0d%0ax:y HTTP/1.1\r\nHost: a.test", "7.1", Err(400)),
    ("GET /a%252Fb HTTP/1.1\r\nHost: a.test", "7.1", Ok(("a.test", "/a%252Fb"))),
    ("GET /a;x/b HTTP/1.1\r\nHost: a.test", "7.1", Ok(("a.test", "/a;x/b"))),
    // ---- methods that the gateway does not serve
    ("CONNECT b.test:443 HTTP/1.1\r\nHost: b.test:443", "9.3.6", Err(501)),
    ("CONNECT / HTTP/1.1\r\nHost: a.test", "9.3.6", Err(501)),
    ("CONNECT http://b.test/ HTTP/1.1\r\nHost: a.test", "9.3.6", Err(501)),
    ("TRACE / HTTP/1.1\r\nHost: a.test", "9.3.8", Err(501)),
    ("TRACE / HTTP/1.1\r\nHost: a.test\r\nMax-Forwards: 0", "9.3.8", Err(501)),
    ("PRI * HTTP/1.1\r\nHost: a.test", "9.1", Err(400)),
];

#[test]
fn upstream_receives_the_host_and_path_that_were_routed_on() {
    let upstream = Upstream::start();
    let gateway = gateway(&upstream);
    let (mut forwarded, mut refused) = (0, 0);
    for (head, section, expected) in HOSTS {
        let before = upstream.count();
        let found = status(&gateway, format!("{head}\r\n\r\n").as_bytes());
        let what = format!("{} (RFC 9110 §{section})", head.escape_debug());
        match expected {
            Ok((host, target)) => {
                assert_eq!((found, upstream.count()), (Some(200), before + 1), "{what}");
                let seen = upstream.last();
                assert_eq!((seen.headers("host"), seen.target()), (vec![*host], *target), "{what}");
                assert_eq!(seen.headers("x-forwarded-host"), [*host], "{what}");
                forwarded += 1;
            }
            Err(status) => {
                assert_eq!((found, upstream.count()), (Some(*status), before), "{what}");
                refused += 1;
            }
        }
    }
    println!("fault 4: {forwarded} forwarded with the host that was routed on, {refused} rejected");
}

/// Headers that a client can make long: a name, a method and target, headers, and the part that is repeated.
const LONG: &[(&str, &str, &str, &str)] = &[
    ("parameters of a query", "GET /?", " HTTP/1.1\r\n", "%61=%62&"),
    ("segments of a path", "GET /x", " HTTP/1.1\r\n", "/%61/.%62"),
    ("cookies", "GET / HTTP/1.1\r\nCookie: x=y", "\r\n", "; sid2=1"),
    ("hops", "GET / HTTP/1.1\r\nX-Forwarded-For: 192.0.2.1", "\r\n", ", 127.0.0.1"),
    ("elements of Forwarded", "GET / HTTP/1.1\r\nForwarded: for=192.0.2.1", "\r\n", ", for=\"127.0.0.1\""),
    ("names in Connection", "GET / HTTP/1.1\r\nConnection: keep-alive", "\r\n", ",x-a"),
    (
        "names in a preflight",
        "OPTIONS / HTTP/1.1\r\nOrigin: https://a.test\r\nAccess-Control-Request-Method: GET\r\nAccess-Control-Request-Headers: x-a",
        "\r\n",
        ",x-b",
    ),
    ("headers", "GET / HTTP/1.1\r\n", "", "x-a: b\r\n"),
    ("media types", "GET / HTTP/1.1\r\nAccept: a/b", "\r\n", ",a/b;q=1"),
    ("a Basic credential", "GET /user HTTP/1.1\r\nAuthorization: Basic YTpi", "\r\n", "YTpi"),
    ("an API key", "GET /key HTTP/1.1\r\nX-Api-Key: k", "\r\n", "k"),
    ("a token", "GET /token HTTP/1.1\r\nAuthorization: Bearer eyJhbGciOiJFUzI1NiJ9.eyJhIjoi", "Q.AAAA\r\n", "YWFh"),
];

#[test]
fn time_of_long_headers_grows_with_their_length_only() {
    let consumers = "[[consumer]]\nname = \"c\"\nkeys = [\"sha256:ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff\"]\n";
    let users = "alice:$apr1$r31.....$HqJZimcKQFAMYayBlzkrA/\n";
    let providers = [("key", "api-key"), ("user", "basic"), ("token", "jwt")];
    let auth = "[auth.key]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n\
                [auth.user]\nkind = \"basic\"\nusers = \"htpasswd\"\n\
                [auth.token]\nkind = \"jwt\"\njwks_file = \"jwks.json\"\n";
    let routes = providers.map(|(name, _)| {
        format!(
            "[[route]]\nname = \"{name}\"\npath = \"/{name}\"\nrequire = [\"{name}\"]\nrespond = {{ status = 200 }}\n"
        )
    });
    let config = |header: &str| {
        format!(
            "[server]\nworkers = 1\nmax_header_size = \"64KiB\"\nmax_uri = \"64KiB\"\nmax_headers = 10000\n\
             [client_ip]\ntrusted_proxies = [\"127.0.0.1\"]\nheader = \"{header}\"\n{auth}\
             [limit.l]\nby = [\"ip\", \"cookie:sid\", \"query:plan\"]\non_missing = \"skip\"\nquota = \"100000/s\"\n{}\
             [[route]]\nname = \"plan\"\npath = \"/\"\nmatch = {{ query = {{ plan = {{ exact = \"b\" }} }} }}\nrespond = {{ status = 204 }}\n\
             [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nlimits = [\"l\"]\ncors = {{ origins = [\"https://a.test\"], headers = [\"x-a\"] }}\nrespond = {{ status = 200 }}\n",
            routes.concat()
        )
    };
    let key = Key::ec("k");
    let jwks = key_set(&[&key]);
    let files = [("consumers.toml", consumers), ("htpasswd", users), ("jwks.json", &jwks)];
    for header in ["X-Forwarded-For", "Forwarded"] {
        let gateway = Gateway::start_with(&config(header), &files);
        let mut client = gateway.client();
        for (name, start, end, repeated) in LONG {
            let mut cpu_ms = |length: usize| {
                let part = repeated.repeat(length / repeated.len());
                let request = format!("{start}{part}{end}Host: a\r\n\r\n");
                let before = gateway.cpu_ms();
                for _ in 0..40 {
                    client.send(request.as_bytes());
                    let reply = client.reply().unwrap_or_else(|| panic!("{name}: no response"));
                    assert!(reply.status < 431, "{name}: {}", reply.text());
                }
                gateway.cpu_ms() - before
            };
            // 15 times the length takes about 15 times the time, but 225 times the time if it grows with the square.
            let (short, long) = (cpu_ms(2_000).max(20), cpu_ms(30_000));
            assert!(long < short * 60, "{name}, {header}: {short} ms for 2 KB, {long} ms for 30 KB");
        }
    }
}
