//! Path rewriting, redirects and weighted upstreams of routes.

use std::cell::Cell;
use std::net::SocketAddr;

use crate::support::certificates::{self, NOW, Pair};
use crate::support::client::{Client, Reply};
use crate::support::frames::{HEADERS, Http2};
use crate::support::gateway::Gateway;
use crate::support::random::property;
use crate::support::upstream::Upstream;
use bytes::Bytes;
use http_body_util::Empty;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use proptest::prelude::*;
use proptest::sample::Index;
use sluicegate::http::target::{PathPolicy, canonical_path};

/// Start a gateway with these routes: name, path and rewrite settings.
fn rewriting(upstream: SocketAddr, routes: &[(&str, &str, &str)]) -> Gateway {
    let routes: String = routes
        .iter()
        .map(|(name, path, rest)| {
            format!("[[route]]\nname = \"{name}\"\npath = \"{path}\"\nupstream = \"u\"\n{rest}\n")
        })
        .collect();
    Gateway::start(&format!(
        "[server]\nmax_uri = \"64KiB\"\nmax_header_size = \"128KiB\"\n[upstream.u]\nservers = [\"http://{upstream}\"]\n{routes}"
    ))
}

fn request(gateway: &Gateway, method: &str, target: &str) -> Reply {
    let mut client = gateway.client();
    client.send([method.as_bytes(), b" ", target.as_bytes(), b" HTTP/1.1\r\nHost: a.test\r\n\r\n"].concat().as_slice());
    let reply = if method == "HEAD" { client.head() } else { client.reply() };
    reply.unwrap_or_else(|| panic!("no response to {method} {target}"))
}

// ---- paths ---------------------------------------------------------------------------------------

const REWRITES: [(&str, &str, &str); 8] = [
    ("version", "/v1/{*rest}", "strip_prefix = \"/v1\""),
    ("version-itself", "/v1", "strip_prefix = \"/v1\""),
    ("two-segments", "/a/b/{id}", "strip_prefix = \"/a/b\""),
    ("internal", "/r/{*rest}", "rewrite = \"/internal/{rest}\""),
    ("between", "/m/{*rest}", "rewrite = \"/x/{rest}/end\""),
    ("swapped", "/s/{a}/{b}", "rewrite = \"/{b}/x-{a}.json?a={a}&fixed=1\""),
    ("searched", "/w/{*rest}", "rewrite = \"/search?path={rest}\""),
    ("fixed", "/f/{*rest}", "rewrite = \"/caf%C3%A9\""),
];

/// The requested target, and the target at the upstream or the status of the rejection.
const REWRITTEN: &[(&str, Result<&str, u16>)] = &[
    ("/v1/users", Ok("/users")),
    ("/v1/users/", Ok("/users/")),
    ("/v1", Ok("/")),
    ("/v1/", Ok("/")),
    ("/v1?x=1", Ok("/?x=1")),
    ("/v1/?x=%2F..", Ok("/?x=%2F..")),
    ("/v1/a?", Ok("/a?")),
    ("/v1/v1/x", Ok("/v1/x")),
    ("/v1/a/b?c=/v1/d", Ok("/a/b?c=/v1/d")),
    // The prefix must end at a segment boundary.
    ("/v1x", Err(404)),
    ("/v10/x", Err(404)),
    ("/a/b/7", Ok("/7")),
    ("/a/b/a", Ok("/a")),
    ("/r/a/b", Ok("/internal/a/b")),
    ("/r/", Ok("/internal/")),
    ("/r/a/?q=1&q=2", Ok("/internal/a/?q=1&q=2")),
    ("/r", Err(404)),
    ("/m/a", Ok("/x/a/end")),
    ("/m/a/", Ok("/x/a/end")),
    ("/m/", Ok("/x/end")),
    ("/s/1/2", Ok("/2/x-1.json?a=1&fixed=1")),
    ("/s/1/2?b=3", Ok("/2/x-1.json?a=1&fixed=1&b=3")),
    ("/s/1/2?", Ok("/2/x-1.json?a=1&fixed=1")),
    ("/s/1/", Err(404)),
    ("/w/a/b", Ok("/search?path=a%2Fb")),
    ("/w/", Ok("/search?path=")),
    ("/f/whatever?x", Ok("/caf%C3%A9?x")),
    // The canonical path is rewritten, however the client spells it.
    ("//v1//x", Ok("/x")),
    ("/v1/%61%2D", Ok("/a-")),
    ("/%76%31/x", Ok("/x")),
    ("/x/../v1/./y", Ok("/y")),
    ("/v1/a/../b", Ok("/b")),
    ("/v1/caf\u{e9}/%e2%82%ac", Ok("/caf%C3%A9/%E2%82%AC")),
    ("/r//evil.test/", Ok("/internal/evil.test/")),
    // Dot segments cannot leave the rewritten prefix.
    ("/r/../secret", Err(404)),
    ("/r/%2e%2e/secret", Err(404)),
    ("/r/a/%2e%2e/%2E./secret", Err(404)),
    ("/r/..%2fsecret", Err(400)),
    ("/r/%2F..%2Fsecret", Err(400)),
    ("/r/%5c..%5csecret", Err(400)),
    ("/r/..\\secret", Err(400)),
    ("/s/../..", Err(404)),
    ("/s/%2e%2e/x", Err(404)),
    ("/s/a%2Fb/c", Err(400)),
    ("/r/%252e%252e/secret", Ok("/internal/%252e%252e/secret")),
    ("/r/.../..a", Ok("/internal/.../..a")),
    ("/s/.a/..b", Ok("/..b/x-.a.json?a=.a&fixed=1")),
    // Delimiters of paths and of headers stay encoded, or the request is rejected.
    ("/r/a%3fb%23c", Ok("/internal/a%3Fb%23c")),
    ("/s/%3Fx=1/%23", Ok("/%23/x-%3Fx=1.json?a=%3Fx%3D1&fixed=1")),
    ("/r/a%0d%0aX-Evil:%201", Err(400)),
    ("/r/%00", Err(400)),
    ("/r/a%20b", Ok("/internal/a%20b")),
    ("/r/{id}%7bid%7d", Ok("/internal/%7Bid%7D%7Bid%7D")),
    // A path parameter stays one value when it is inserted into a query.
    ("/s/1&fixed=2/b", Ok("/b/x-1&fixed=2.json?a=1%26fixed%3D2&fixed=1")),
    ("/s/a+b;c/d", Ok("/d/x-a+b;c.json?a=a%2Bb%3Bc&fixed=1")),
    ("/w/a&path=b?path=c", Ok("/search?path=a%26path%3Db&path=c")),
    ("/w/%26", Ok("/search?path=%26")),
];

#[test]
fn upstream_receives_the_rewritten_path() {
    let upstream = Upstream::start();
    let gateway = rewriting(upstream.address, &REWRITES);
    for (target, expected) in REWRITTEN {
        let before = upstream.count();
        let reply = request(&gateway, "GET", target);
        match expected {
            Ok(expected) => {
                assert_eq!(reply.status, 200, "{target}: {}", reply.text());
                assert_eq!(upstream.last().target(), *expected, "{target}");
                // The absolute form of the target gives the same result.
                assert_eq!(request(&gateway, "GET", &format!("http://b.test{target}")).status, 200, "{target}");
                let seen = upstream.last();
                assert_eq!((seen.target(), &seen.headers("host")[..]), (*expected, &["b.test"][..]), "{target}");
            }
            Err(status) => {
                reply.assert_problem(*status, target);
                assert_eq!(upstream.count(), before, "{target} is not forwarded");
            }
        }
    }
    // Send a request over HTTP/2: the gateway rewrites the path in the same way.
    let mut client = Http2::connect(gateway.address, &[]);
    client.get(1, "/s/1/2?b=3");
    assert!(client.until(HEADERS, 1).is_some());
    assert_eq!(upstream.last().target(), "/2/x-1.json?a=1&fixed=1&b=3");
}

/// Routes with a regular expression: name, expression and rewrite.
const EXPRESSIONS: [(&str, &str, &str); 4] = [
    ("users", "/v(?<version>[0-9]+)/u/(?<id>[^/]+)(?:/(?<rest>.*))?", "/users/{id}/{rest}?v={version}&id={id}"),
    ("action", "/do/(?<name>\\w+):(?<action>\\w+)", "/{action}/{name}"),
    ("dots", "/dots/(?<a>.*?)-(?<b>.*)", "/in/{a}{b}"),
    ("cut", "/cut/(?<a>.{2})(?<b>.*)", "/in/{a}x{b}"),
];

#[test]
fn named_groups_form_the_rewritten_path() {
    let upstream = Upstream::start();
    let routes: String = EXPRESSIONS
        .iter()
        .map(|(name, expression, rewrite)| {
            format!(
                "[[route]]\nname = \"{name}\"\npath_regex = '{expression}'\nupstream = \"u\"\nrewrite = \"{rewrite}\"\n"
            )
        })
        .collect();
    let gateway = Gateway::start(&format!(
        "[upstream.u]\nservers = [\"{}\"]\n{routes}[[route]]\nname = \"old\"\npath_regex = '/old/(?<rest>.*)'\n\
         redirect = {{ to = \"/new/{{rest}}\" }}\n\
         [[route]]\nname = \"limited\"\npath_regex = '/limited/(?<user>[a-z]+)?.*'\nlimits = [\"user\"]\n\
         respond = {{ status = 200 }}\n[limit.user]\nby = \"path:user\"\nquota = \"1/day\"\n",
        upstream.url()
    ));
    for (target, expected) in [
        ("/v1/u/7", Ok("/users/7/?v=1&id=7")),
        ("/v12/u/7/a/b/?x=1", Ok("/users/7/a/b/?v=12&id=7&x=1")),
        ("/v1/u/a%26b", Ok("/users/a&b/?v=1&id=a%26b")),
        ("//v1/u/x/../%37", Ok("/users/7/?v=1&id=7")),
        ("/v1/u/", Err(404)),
        ("/vx/u/7", Err(404)),
        // The expression matches the canonical path, in which `%3A` is `:`.
        ("/do/job:start", Ok("/start/job")),
        ("/do/job%3Astart", Ok("/start/job")),
        // Requests whose groups form dot segments or split a percent-encoded byte are rejected.
        ("/dots/a-b", Ok("/in/ab")),
        ("/dots/.-.", Err(400)),
        ("/dots/a/.-./b", Err(400)),
        ("/dots/a/-/b", Ok("/in/a/b")),
        ("/dots/-/b", Ok("/in/b")),
        ("/cut/%20a", Err(400)),
        ("/cut/ab%20", Ok("/in/abx%20")),
    ] {
        let before = upstream.count();
        let reply = request(&gateway, "GET", target);
        match expected {
            Ok(expected) => {
                assert_eq!(reply.status, 200, "{target}: {}", reply.text());
                assert_eq!(upstream.last().target(), expected, "{target}");
            }
            Err(status) => {
                reply.assert_problem(status, target);
                assert_eq!(upstream.count(), before, "{target} is not forwarded");
            }
        }
    }
    assert_eq!(request(&gateway, "GET", "/old/a/b?c").header("location"), Some("/new/a/b?c"));
    assert_eq!(request(&gateway, "GET", "/old//evil.test").header("location"), Some("/new/evil.test"));
    // A named group can be a limit key.
    for (target, status) in [("/limited/ann", 200), ("/limited/ann/x", 429), ("/limited/ben", 200), ("/limited/7", 400)]
    {
        assert_eq!(request(&gateway, "GET", target).status, status, "{target}");
    }
}

#[test]
fn no_path_escapes_its_rewrite() {
    const PIECES: [&str; 26] = [
        "/",
        "//",
        ".",
        "..",
        "%2e",
        "%2E%2e",
        "a",
        "b%20c",
        "%2f",
        "%5c",
        "\\",
        "%00",
        "%0d%0a",
        "%25",
        "%252e",
        ";",
        "&",
        "=",
        "+",
        "?",
        "%3f",
        "%23",
        "\u{e9}",
        "%c3%a9",
        "{rest}",
        "@evil.test:80",
    ];
    let upstream = Upstream::start();
    let gateway = rewriting(upstream.address, &REWRITES);
    let forwarded = Cell::new(0);
    let input = (any::<Index>(), prop::collection::vec(any::<Index>(), 0..7));
    property(600, 1, input, |(route, noise)| {
        let (_, path, _) = route.get(&REWRITES);
        let place = path.split('{').next().unwrap();
        let target = format!("{place}{}", noise.iter().map(|piece| *piece.get(&PIECES)).collect::<String>());
        let before = upstream.count();
        let reply = request(&gateway, "GET", &target);
        if reply.status != 200 {
            assert!(matches!(reply.status, 400 | 404), "{target}: {}", reply.status);
            assert_eq!(upstream.count(), before, "{target}");
            return 1;
        }
        forwarded.set(forwarded.get() + 1);
        let seen = upstream.last();
        let (asked, query) =
            seen.target().split_once('?').map_or((seen.target(), None), |(path, query)| (path, Some(query)));
        assert_eq!(
            canonical_path(asked, PathPolicy::Canonical).as_deref(),
            Ok(asked),
            "{target}: the forwarded path is canonical"
        );
        let came = target.split_once('?');
        let clean =
            canonical_path(came.map_or(&*target, |(path, _)| path), PathPolicy::Canonical).unwrap().into_owned();
        let segments = |path: &str| path.split('/').count();
        let pairs = |query: Option<&str>| query.map_or(0, |query| query.split('&').count());
        let theirs = came.map(|(_, query)| query).filter(|query| !query.is_empty());
        if clean.starts_with("/s/") {
            assert!(asked.ends_with(".json") && segments(asked) == 3, "{target}: {asked}");
            assert_eq!(pairs(query), 2 + pairs(theirs), "{target}: {query:?}");
        } else if clean.starts_with("/w/") {
            assert_eq!((asked, pairs(query)), ("/search", 1 + pairs(theirs)), "{target}: {query:?}");
        } else if clean.starts_with("/r/") {
            assert!(asked.starts_with("/internal/") && segments(asked) == segments(&clean), "{target}: {asked}");
        } else if clean.starts_with("/m/") {
            assert!(asked.starts_with("/x/") && asked.ends_with("/end"), "{target}: {asked}");
        } else if clean.starts_with("/f/") {
            assert_eq!(asked, "/caf%C3%A9", "{target}");
        }
        if !clean.starts_with("/s/") && !clean.starts_with("/w/") {
            assert_eq!(query, came.map(|(_, query)| query), "{target}: the query is forwarded unchanged");
        }
        1
    });
    assert!(forwarded.get() > 150, "{} targets were forwarded", forwarded.get());
}

#[test]
fn target_too_long_after_rewrite_is_414_and_not_charged() {
    let upstream = Upstream::start();
    let limit = "limits = [\"once\"]\nrewrite = \"/{id}/{id}/{id}/{id}?a={id}\"\n[limit.once]\nby = \"global\"\nquota = \"1/hour\"";
    let gateway = rewriting(upstream.address, &[("long", "/{id}", limit)]);
    request(&gateway, "GET", &format!("/{}", "a".repeat(20_000)))
        .assert_problem(414, "the rewritten target is five times as long as the path");
    assert_eq!(upstream.count(), 0);
    assert_eq!(request(&gateway, "GET", &format!("/{}", "a".repeat(10_000))).status, 200);
    assert_eq!(upstream.last().target().len(), 50_007);
    assert_eq!(request(&gateway, "GET", "/a").status, 429);
}

// ---- redirects -----------------------------------------------------------------------------------

fn redirecting() -> Gateway {
    let routes: String = [
        ("old", "/old/{*rest}", "{ to = \"/new/{rest}\" }"),
        ("one", "/one/{id}", "{ to = \"/{id}?id={id}\", status = 302 }"),
        ("site", "/site/{*rest}", "{ to = \"https://www.example.com:8443/{rest}?from=old\", status = 301 }"),
        ("bare", "/bare", "{ to = \"http://www.example.com\", status = 307 }"),
        ("query", "/query", "{ to = \"http://www.example.com?a=1\", status = 303 }"),
        ("all", "/{*rest}", "{ to = \"/{rest}\", status = 308 }"),
        (
            "limited",
            "/limited",
            "{ to = \"/\" }\nlimits = [\"once\"]\nresponse_headers = { set = { cache-control = \"no-store\" } }",
        ),
    ]
    .map(|(name, path, to)| format!("[[route]]\nname = \"{name}\"\npath = \"{path}\"\nredirect = {to}\n"))
    .concat();
    Gateway::start(&format!("[limit.once]\nby = \"global\"\nquota = \"1/hour\"\n{routes}"))
}

/// The requested target, the status and `Location`, which is empty for rejections.
const REDIRECTED: &[(&str, u16, &str)] = &[
    ("/old/a/b", 308, "/new/a/b"),
    ("/old/a/b/?x=1&y=%2F", 308, "/new/a/b/?x=1&y=%2F"),
    ("/old/", 308, "/new/"),
    ("/one/7", 302, "/7?id=7"),
    ("/one/7?x", 302, "/7?id=7&x"),
    ("/one/a&b=c", 302, "/a&b=c?id=a%26b%3Dc"),
    ("/site/a?x=1", 301, "https://www.example.com:8443/a?from=old&x=1"),
    ("/site/", 301, "https://www.example.com:8443/?from=old"),
    ("/bare", 307, "http://www.example.com/"),
    ("/bare?x=1", 307, "http://www.example.com/?x=1"),
    ("/query", 303, "http://www.example.com/?a=1"),
    ("/query?b=2", 303, "http://www.example.com/?a=1&b=2"),
    // A redirect never leads to another host.
    ("//evil.test", 308, "/evil.test"),
    ("///evil.test/..//evil.test", 308, "/evil.test"),
    ("/.//evil.test", 308, "/evil.test"),
    ("/%2e//evil.test", 308, "/evil.test"),
    ("/old//evil.test", 308, "/new/evil.test"),
    ("/old/../..//evil.test", 308, "/evil.test"),
    ("/@evil.test", 308, "/@evil.test"),
    ("/site/@evil.test", 301, "https://www.example.com:8443/@evil.test?from=old"),
    ("/site//evil.test", 301, "https://www.example.com:8443/evil.test?from=old"),
    ("/%2fevil.test", 400, ""),
    ("/%2F%2Fevil.test", 400, ""),
    ("/%5cevil.test", 400, ""),
    ("/\\evil.test", 400, ""),
    ("/%09/evil.test", 400, ""),
    ("/one/%2fevil.test", 400, ""),
    // A target never adds another header to the response.
    ("/old/a%0d%0aSet-Cookie:%20a=b", 400, ""),
    ("/old/a%0aX:%20y", 400, ""),
    ("/old/a?b=%0d%0aSet-Cookie:%20a=b", 308, "/new/a?b=%0d%0aSet-Cookie:%20a=b"),
    ("/old/caf\u{e9}", 308, "/new/caf%C3%A9"),
    ("/old/a?b=caf\u{e9}", 308, "/new/a?b=caf%C3%A9"),
    ("/old/a?b={x}|^`\\", 308, "/new/a?b=%7Bx%7D%7C%5E%60%5C"),
    ("/old/a?to=//evil.test", 308, "/new/a?to=//evil.test"),
];

#[test]
fn redirect_has_the_configured_location() {
    let gateway = redirecting();
    for (target, status, location) in REDIRECTED {
        let reply = request(&gateway, "GET", target);
        assert_eq!((reply.status, reply.header("location").unwrap_or_default()), (*status, *location), "{target}");
        assert_eq!((reply.header("set-cookie"), reply.header("x")), (None, None), "{target}");
        assert!(location.is_empty() || reply.header("content-length") == Some("0"), "{target}");
    }
    for method in ["HEAD", "POST", "OPTIONS", "DELETE", "PURGE"] {
        let reply = request(&gateway, method, "/old/a?x=1");
        assert_eq!((reply.status, reply.header("location")), (308, Some("/new/a?x=1")), "{method}");
    }
}

#[test]
fn redirect_to_a_scheme_keeps_host_path_and_query() {
    let gateway = Gateway::start(
        &[
            ("all", "/{*rest}", "{ scheme = \"https\" }"),
            ("port", "/port/{*rest}", "{ scheme = \"https\", port = 8443, status = 301 }"),
            ("default-port", "/443/{*rest}", "{ scheme = \"https\", port = 443 }"),
            ("http", "/http/{*rest}", "{ scheme = \"http\", port = 443, status = 307 }"),
        ]
        .map(|(name, path, to)| format!("[[route]]\nname = \"{name}\"\npath = \"{path}\"\nredirect = {to}\n"))
        .concat(),
    );
    for (host, target, expected) in [
        ("a.test", "/", Ok("https://a.test/")),
        ("A.test.:8080", "/a/b/?x=1&y=%2F", Ok("https://a.test/a/b/?x=1&y=%2F")),
        ("a.test", "/?", Ok("https://a.test/?")),
        ("[2001:DB8::1]:80", "/a", Ok("https://[2001:db8::1]/a")),
        ("a.test:80", "/port/a", Ok("https://a.test:8443/port/a")),
        ("a.test:80", "/443/a", Ok("https://a.test/443/a")),
        ("a.test", "/http/a", Ok("http://a.test:443/http/a")),
        ("b.test", "http://a.test:81/a?b", Ok("https://a.test/a?b")),
        ("a.test", "//evil.test//x", Ok("https://a.test/evil.test/x")),
        ("a.test", "/@evil.test", Ok("https://a.test/@evil.test")),
        ("a.test", "/a%3Ab/caf\u{e9}?c=caf\u{e9}|", Ok("https://a.test/a%3Ab/caf%C3%A9?c=caf%C3%A9%7C")),
        ("a.test", "/a?b=%0d%0aSet-Cookie:%20a=b", Ok("https://a.test/a?b=%0d%0aSet-Cookie:%20a=b")),
        ("a.test", "/a%0d%0aSet-Cookie:%20a=b", Err(400)),
        ("a.test", "/%2fevil.test", Err(400)),
        ("user@evil.test", "/", Err(400)),
        ("evil.test/x", "/", Err(400)),
        ("evil.test#", "/", Err(400)),
        ("a.test, evil.test", "/", Err(400)),
        ("a.test:evil", "/", Err(400)),
        (":443", "/", Err(400)),
    ] {
        let mut client = gateway.client();
        client.send(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes());
        let reply = client.reply().unwrap();
        match expected {
            Ok(location) => assert_eq!(reply.header("location"), Some(location), "{host} {target}"),
            Err(status) => reply.assert_problem(status, &format!("{host} {target}")),
        }
        assert_eq!(reply.header("set-cookie"), None, "{target}");
    }
    for (target, status) in [("/", 308), ("/port/", 301), ("/http/", 307)] {
        assert_eq!(request(&gateway, "POST", target).status, status, "{target}");
    }
    // Without a host, the gateway cannot build the location.
    let mut client = gateway.client();
    client.send(b"GET /a HTTP/1.0\r\n\r\n");
    client.reply().unwrap().assert_problem(400, "HTTP/1.0 without Host");
    let mut client = gateway.client();
    client.send(b"GET /a HTTP/1.0\r\nHost: a.test\r\n\r\n");
    assert_eq!(client.reply().unwrap().header("location"), Some("https://a.test/a"));
}

/// In HTTP/2, the host is in `:authority`.
#[test]
fn http2_request_is_redirected_to_its_authority() {
    let gateway = Gateway::start(
        "[[route]]\nname = \"https\"\npath = \"/{*rest}\"\nredirect = { scheme = \"https\" }\n\
         [[route]]\nname = \"slash\"\npath = \"/a\"\ntrailing_slash = \"redirect\"\nrespond = { status = 200 }\n",
    );
    let locations = async {
        let stream = tokio::net::TcpStream::connect(gateway.address).await.unwrap();
        let handshake = http2::handshake::<_, _, Empty<Bytes>>(TokioExecutor::new(), TokioIo::new(stream));
        let (mut sender, connection) = handshake.await.unwrap();
        tokio::spawn(connection);
        let mut locations = Vec::new();
        for uri in ["http://A.test:8080/x?y", "http://a.test/a/?y"] {
            let request = http::Request::get(uri).body(Empty::new()).unwrap();
            let response = sender.send_request(request).await.unwrap();
            assert_eq!(response.status(), 308, "{uri}");
            locations.push(response.headers()["location"].to_str().unwrap().to_owned());
        }
        locations
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    assert_eq!(runtime.block_on(locations), ["https://a.test/x?y", "/a?y"]);
}

/// The pair of listeners in the manual: the plaintext listener redirects all requests to the TLS listener.
#[test]
fn plaintext_listener_redirects_and_tls_listener_serves() {
    let server = Pair::server("a.test", NOW);
    let files = [("a.pem", server.cert.as_str()), ("a.key", server.key.as_str())];
    let gateway = Gateway::start_with(
        "[[listener]]\nname = \"plain\"\naddress = \"127.0.0.1:0\"\n\
         [[listener]]\naddress = \"127.0.0.1:0\"\ntls.certificates = [{ cert = \"a.pem\", key = \"a.key\" }]\n\
         [[route]]\nname = \"to-https\"\nlisteners = [\"plain\"]\npath = \"/{*rest}\"\nredirect = { scheme = \"https\" }\n\
         [[route]]\nname = \"hello\"\npath = \"/{*rest}\"\nrespond = { status = 200, body = \"hello\" }\n",
        &files,
    );
    let [plain, secure] = gateway.addresses()[..] else { panic!("two listeners") };
    let reply = Client::connect(plain).request("GET", "/x?y", &[("Host", "a.test")], b"");
    assert_eq!((reply.status, reply.header("location")), (308, Some("https://a.test/x?y")));
    let client = certificates::tls(&[&server.der], None, rustls::ALL_VERSIONS);
    let reply = certificates::ask(&client, secure, "a.test", "/x?y").unwrap();
    assert_eq!((reply.status, reply.text()), (200, "hello"));
}

#[test]
fn redirect_is_limited_and_drains_the_body() {
    let gateway = redirecting();
    let mut client = gateway.client();
    // The connection stays open although the gateway did not read the body.
    assert_eq!(client.request("POST", "/old/a", &[], b"body").status, 308);
    let reply = client.get("/limited");
    assert_eq!((reply.status, reply.header("location"), reply.remaining("once")), (308, Some("/"), 0));
    assert_eq!(reply.header("cache-control"), Some("no-store"));
    let denied = client.get("/limited");
    denied.assert_problem(429, "the second request exceeds the limit");
    assert_eq!(denied.header("location"), None);
}

// ---- weighted upstreams --------------------------------------------------------------------------

/// Start two upstreams and a gateway that distributes requests over them with these weights.
fn sharing(weights: &str) -> (Upstream, Upstream, Gateway) {
    let (api, canary) = (Upstream::start(), Upstream::start());
    let gateway = Gateway::start(&format!(
        "[server]\nworkers = 2\n[upstream.api]\nservers = [\"{}\"]\n[upstream.canary]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"r\"\npath = \"/{{*rest}}\"\nupstream = {weights}\n",
        api.url(),
        canary.url()
    ));
    (api, canary, gateway)
}

#[test]
fn weighted_upstreams_get_their_shares() {
    for (weights, total, least, most) in [
        ("{ api = 9, canary = 1 }", 1000, 80, 120),
        ("{ api = 1, canary = 1 }", 1000, 480, 520),
        ("{ canary = 1, api = 99 }", 1000, 1, 30),
        ("{ api = 5, canary = 0 }", 100, 0, 0),
        ("{ api = 0, canary = 5 }", 100, 100, 100),
        ("{ canary = 3 }", 100, 100, 100),
        ("\"canary\"", 100, 100, 100),
    ] {
        let (api, canary, gateway) = sharing(weights);
        let statuses = crate::support::client::load(&[gateway.address], 8, total, "/", &[]);
        assert!(statuses.iter().all(|status| *status == 200), "{weights}");
        assert_eq!(api.count() + canary.count(), total, "{weights}");
        assert!(
            (least..=most).contains(&canary.count()),
            "{weights}: the canary got {} of {total} requests",
            canary.count()
        );
    }
}

#[test]
fn one_client_reaches_all_weighted_upstreams() {
    let (api, canary, gateway) = sharing("{ api = 3, canary = 1 }");
    let mut client: Client = gateway.client();
    for _ in 0..40 {
        assert_eq!(client.get("/").status, 200);
    }
    assert!(api.count() >= 27 && canary.count() >= 7, "{} and {} requests", api.count(), canary.count());
}

#[test]
fn weighted_upstream_that_is_down_keeps_its_share() {
    let api = Upstream::start();
    // The socket is bound but does not listen: the port stays reserved, and connections are refused.
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let down = socket.local_addr().unwrap().as_socket().unwrap();
    let gateway = Gateway::start(&format!(
        "[upstream.api]\nservers = [\"{}\"]\n[upstream.canary]\nservers = [\"http://{down}\"]\n\
         [[route]]\nname = \"r\"\npath = \"/\"\nupstream = {{ api = 3, canary = 1 }}\n",
        api.url()
    ));
    let statuses = crate::support::client::load(&[gateway.address], 4, 100, "/", &[]);
    let failed = statuses.iter().filter(|status| **status == 502).count();
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 100 - failed);
    assert!((22..=28).contains(&failed), "{failed} of 100 requests failed");
}

#[test]
fn own_responses_without_content_have_no_content_type() {
    for (status, kind) in [(200, true), (404, true), (204, false), (205, false), (304, false)] {
        let gateway = Gateway::start(&format!(
            "[[route]]\nname = \"r\"\npath = \"/r\"\nrespond = {{ status = {status}, content_type = \"text/plain\" }}\n"
        ));
        let reply = gateway.get("/r");
        assert_eq!((reply.status, reply.header("content-type").is_some()), (status, kind));
    }
}

#[test]
fn route_has_the_keys_of_its_group_and_the_defaults() {
    let upstream = Upstream::start();
    let limit = |name: &str, quota: u32| format!("[limit.{name}]\nby = \"ip\"\nquota = \"{quota}/hour\"\n");
    let config = |default: &str| {
        format!(
            "{}{}{}[upstream.u]\nservers = [\"{}\"]\n\
             [route_defaults]\nlimits = [\"all\"]\nresponse_headers.set = {{ x-from = \"{default}\" }}\ntimeout = \"10s\"\n\
             [route_group.v1]\nprefix = \"/v1\"\nhosts = [\"api.test\"]\nupstream = \"u\"\nlimits = [\"group\"]\n\
             [[route]]\nname = \"search\"\ngroup = \"v1\"\npath = \"/search\"\nlimits = [\"own\"]\n\
             [[route]]\nname = \"other\"\ngroup = \"v1\"\npath = \"/other\"\nhosts = [\"other.test\"]\n\
             response_headers.set = {{ x-from = \"route\" }}\n\
             [[route]]\nname = \"fixed\"\npath = \"/fixed\"\nrespond = {{ status = 204 }}\n",
            limit("all", 100_000),
            limit("group", 200),
            limit("own", 100),
            upstream.url()
        )
    };
    let gateway = Gateway::start(&config("defaults"));
    let get = |path: &str, host: &str| gateway.client().get_with(path, &[("host", host)]);
    for (path, host, status, from, limits) in [
        ("/v1/search", "api.test", 200, "defaults", &["all", "group", "own"][..]),
        ("/search", "api.test", 404, "", &[]),
        ("/v1/search", "other.test", 404, "", &[]),
        ("/v1/other", "other.test", 200, "route", &["all", "group"]),
        ("/fixed", "any.test", 204, "defaults", &["all"]),
    ] {
        let reply = get(path, host);
        let policy = reply.header("ratelimit-policy").unwrap_or_default();
        let names: Vec<_> = policy.split('"').skip(1).step_by(2).collect();
        assert_eq!(
            (reply.status, reply.header("x-from").unwrap_or_default(), &names[..]),
            (status, from, limits),
            "{path} of {host}"
        );
    }
    gateway.put(&config("changed"));
    crate::support::eventually("the new default", || get("/fixed", "any.test").header("x-from") == Some("changed"));
}
