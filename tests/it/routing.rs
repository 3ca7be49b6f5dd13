//! Route selection over the wire, and requests that are rejected before a route is selected.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::support::MAX_WAIT;
use crate::support::client::{Client, Reply};
use crate::support::gateway::Gateway;
use crate::support::random::property;
use crate::support::reload::{reloads, with_admin};
use crate::support::upstream::Upstream;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Uri};
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use sluicegate::routing::condition::{Condition, ConditionSource, Expression, Met, RouteBody, ValueTest};
use sluicegate::routing::pattern::PathPattern;
use sluicegate::routing::{RouteMatch, RouteRequest, RouteTable};
use tokio::time::timeout;

/// Name, path and further criteria of the routes. Each route responds with its own name.
const ROUTES: &[(&str, &str, &str)] = &[
    ("root", "/", ""),
    ("admin", "/admin", ""),
    ("folder", "/folder/", ""),
    ("file", "/file", ""),
    ("users", "/users/{id}", ""),
    ("users-me", "/users/me", ""),
    ("items", "/users/{id}/items/{item}", ""),
    ("files", "/files/{*rest}", ""),
    ("files-deep", "/files/deep/{*rest}", ""),
    ("files-one", "/files/deep/{id}", ""),
    ("where-any", "/where", ""),
    ("where-wild", "/where", "hosts = [\"*.example.com\"]"),
    ("where-eu", "/where", "hosts = [\"*.eu.example.com\"]"),
    ("where-exact", "/where", "hosts = [\"api.example.com\"]"),
    ("where-address", "/where", "hosts = [\"192.0.2.1\"]"),
    ("wild-rest", "/deep/{*rest}", "hosts = [\"*.example.com\"]"),
    ("any-literal", "/deep/literal", ""),
    ("only-any", "/only-any", ""),
    ("version-any", "/version", ""),
    ("version-2", "/version", "match.headers.x-version.exact = \"2\""),
    ("version-3", "/version", "match.headers.x-version.exact = \"3\""),
    ("version-2-beta", "/version", "match.headers = { x-version.exact = \"2\", x-beta.exact = \"yes\" }"),
    ("strict", "/strict", "match.headers.x-strict.exact = \"1\""),
    ("read", "/methods", "methods = [\"GET\", \"HEAD\"]"),
    ("write", "/methods", "methods = [\"POST\", \"PUT\"]"),
    ("account", "/accounts/{id}", ""),
    ("account-me", "/accounts/me", "methods = [\"GET\"]"),
    ("host-read", "/by-host", "hosts = [\"api.example.com\"]\nmethods = [\"GET\"]"),
    ("host-rest", "/by-host", ""),
];

fn config(routes: impl Iterator<Item = &'static (&'static str, &'static str, &'static str)>) -> String {
    routes
        .map(|(name, path, criteria)| {
            format!(
                "[[route]]\nname = \"{name}\"\npath = \"{path}\"\n{criteria}\n\
                 respond = {{ status = 200, body = \"{name}\" }}\n"
            )
        })
        .collect()
}

fn gateway() -> Gateway {
    Gateway::start(&config(ROUTES.iter()))
}

/// Send one request on a new connection. Return the response.
fn once(gateway: &Gateway, request: &[u8]) -> Reply {
    let mut client = gateway.client();
    client.send(request);
    client.reply().unwrap_or_else(|| panic!("no response to {:?}", String::from_utf8_lossy(request)))
}

/// A case: method, Host header, target, further headers, and the name of the expected route or the status of the
/// rejection.
type Case = (&'static str, &'static str, &'static str, &'static [(&'static str, &'static str)], &'static str);

const ROUTED: &[Case] = &[
    // The canonical path.
    ("GET", "a.test", "/admin", &[], "admin"),
    ("GET", "a.test", "/%61dmin", &[], "admin"),
    ("GET", "a.test", "/%61%64%6D%69%6e", &[], "admin"),
    ("GET", "a.test", "//admin", &[], "admin"),
    ("GET", "a.test", "///admin", &[], "admin"),
    ("GET", "a.test", "/./admin", &[], "admin"),
    ("GET", "a.test", "/%2e/admin", &[], "admin"),
    ("GET", "a.test", "/x/../admin", &[], "admin"),
    ("GET", "a.test", "/x/%2e%2e/admin", &[], "admin"),
    ("GET", "a.test", "/x/.%2E/admin", &[], "admin"),
    ("GET", "a.test", "/../../admin", &[], "admin"),
    ("GET", "a.test", "/admin?x=/../other", &[], "admin"),
    ("GET", "a.test", "/folder", &[], "404"),
    ("GET", "a.test", "/folder/", &[], "folder"),
    ("GET", "a.test", "/folder/.", &[], "folder"),
    ("GET", "a.test", "/folder/x/..", &[], "folder"),
    ("GET", "a.test", "/file", &[], "file"),
    ("GET", "a.test", "/file/", &[], "404"),
    ("GET", "a.test", "/File", &[], "404"),
    ("GET", "a.test", "/", &[], "root"),
    ("GET", "a.test", "/?query", &[], "root"),
    ("GET", "a.test", "/x/..", &[], "root"),
    // Parameters and `{*rest}`.
    ("GET", "a.test", "/users/7", &[], "users"),
    ("GET", "a.test", "/users/a%20b", &[], "users"),
    ("GET", "a.test", "/users/me", &[], "users-me"),
    ("GET", "a.test", "/users/%6De", &[], "users-me"),
    ("GET", "a.test", "/users/", &[], "404"),
    ("GET", "a.test", "/users/7/", &[], "404"),
    ("GET", "a.test", "/users/7/items/8", &[], "items"),
    ("GET", "a.test", "/users/me/items/8", &[], "items"),
    ("GET", "a.test", "/users/7/items", &[], "404"),
    ("GET", "a.test", "/files", &[], "404"),
    ("GET", "a.test", "/files/", &[], "files"),
    ("GET", "a.test", "/files/a/b/c", &[], "files"),
    ("GET", "a.test", "/files/deep", &[], "files"),
    ("GET", "a.test", "/files/deep/", &[], "files-deep"),
    ("GET", "a.test", "/files/deep/a", &[], "files-one"),
    ("GET", "a.test", "/files/deep/a/b", &[], "files-deep"),
    // The host.
    ("GET", "api.example.com", "/where", &[], "where-exact"),
    ("GET", "API.Example.COM", "/where", &[], "where-exact"),
    ("GET", "api.example.com:8443", "/where", &[], "where-exact"),
    ("GET", "www.example.com", "/where", &[], "where-wild"),
    ("GET", "WWW.EXAMPLE.COM:80", "/where", &[], "where-wild"),
    ("GET", "a.b.example.com", "/where", &[], "where-wild"),
    ("GET", "de.eu.example.com", "/where", &[], "where-eu"),
    ("GET", "eu.example.com", "/where", &[], "where-wild"),
    ("GET", "example.com", "/where", &[], "where-any"),
    ("GET", "notexample.com", "/where", &[], "where-any"),
    ("GET", "api.example.com.evil.test", "/where", &[], "where-any"),
    ("GET", "192.0.2.1:80", "/where", &[], "where-address"),
    ("GET", "[2001:db8::1]:80", "/where", &[], "where-any"),
    ("GET", "api.example.com", "/only-any", &[], "only-any"),
    ("GET", "www.example.com", "/only-any", &[], "only-any"),
    ("GET", "www.example.com", "/deep/literal", &[], "wild-rest"),
    ("GET", "api.example.com", "/nowhere", &[], "404"),
    // Absolute form.
    ("GET", "a.test", "http://api.example.com/where", &[], "where-exact"),
    ("GET", "api.example.com", "http://a.test/where", &[], "where-any"),
    ("GET", "a.test", "http://API.example.com:81/x/../where?q", &[], "where-exact"),
    ("GET", "a.test", "http://api.example.com", &[], "root"),
    ("GET", "a.test", "http://api.example.com?query", &[], "root"),
    // Headers.
    ("GET", "a.test", "/version", &[], "version-any"),
    ("GET", "a.test", "/version", &[("X-Version", "2")], "version-2"),
    ("GET", "a.test", "/version", &[("x-version", "3")], "version-3"),
    ("GET", "a.test", "/version", &[("x-version", "4")], "version-any"),
    ("GET", "a.test", "/version", &[("x-version", "20")], "version-any"),
    ("GET", "a.test", "/version", &[("x-version", "2"), ("x-beta", "yes")], "version-2-beta"),
    ("GET", "a.test", "/version", &[("x-version", "2"), ("x-beta", "no")], "version-2"),
    ("GET", "a.test", "/version", &[("x-beta", "yes")], "version-any"),
    ("GET", "a.test", "/strict", &[("x-strict", "1")], "strict"),
    ("GET", "a.test", "/strict", &[], "404"),
    // Methods.
    ("GET", "a.test", "/methods", &[], "read"),
    ("POST", "a.test", "/methods", &[], "write"),
    ("PUT", "a.test", "/methods", &[], "write"),
    ("DELETE", "a.test", "/admin", &[], "admin"),
    ("PURGE", "a.test", "/admin", &[], "admin"),
    ("GET", "a.test", "/accounts/me", &[], "account-me"),
    ("POST", "a.test", "/accounts/me", &[], "account"),
    ("GET", "api.example.com", "/by-host", &[], "host-read"),
    ("POST", "api.example.com", "/by-host", &[], "host-rest"),
];

#[test]
fn best_route_is_chosen_in_any_order_of_the_file() {
    for (order, config) in [("as written", config(ROUTES.iter())), ("reversed", config(ROUTES.iter().rev()))] {
        let gateway = Gateway::start(&config);
        let mut client = gateway.client();
        for (method, host, target, headers, expected) in ROUTED {
            let mut lines = vec![("Host", *host)];
            lines.extend_from_slice(headers);
            let reply = client.request(method, target, &lines, b"");
            let what = format!("{method} {target} of {host} with {headers:?}, routes {order}");
            if *expected == "404" {
                reply.assert_problem(404, &what);
            } else {
                assert_eq!((reply.status, reply.text()), (200, *expected), "{what}");
            }
        }
    }
}

#[test]
fn ambiguous_paths_are_rejected() {
    let gateway = gateway();
    let mut client = gateway.client();
    for path in [
        "/%00",
        "/admin%00",
        "/a%2Fb",
        "/a%2fb",
        "/..%2fadmin",
        "/a%5Cb",
        "/a%5cb",
        "/a\\b",
        "/..\\admin",
        "/%0a",
        "/%0D%0Aevil",
        "/%7f",
        "/%1F",
        "/%",
        "/%6",
        "/%zz",
        "/files/%2F",
        "http://a.test/a%2Fb",
        // Not a path.
        "admin",
        "a.test:80",
    ] {
        client.get(path).assert_problem(400, path);
    }
    // A query may contain an encoded slash, NUL and backslashes.
    assert_eq!(client.get("/admin?a=%2F%00%5C\\").text(), "admin");
}

/// Paths that servers may interpret differently, and the path with each policy: `canonical`, `keep-encoded-slashes`,
/// `keep-double-slashes` and `keep-slashes`. An empty text means 400.
const SLASHES: &[(&str, [&str; 4])] = &[
    ("/up/a%2fb", ["", "/up/a%2Fb", "", "/up/a%2Fb"]),
    ("/up/@scope%2Fname", ["", "/up/@scope%2Fname", "", "/up/@scope%2Fname"]),
    (
        "/up/https://x.test//a",
        ["/up/https:/x.test/a", "/up/https:/x.test/a", "/up/https://x.test//a", "/up/https://x.test//a"],
    ),
    ("//up//a//", ["/up/a/", "/up/a/", "/up//a//", "/up//a//"]),
    ("/up//../a", ["/a", "/a", "/up/a", "/up/a"]),
    ("/up/x%2F..%2Fa", ["", "", "", ""]),
    ("/up/%2e%2e%2fa", ["", "", "", ""]),
    ("/up/.%2Fa", ["", "", "", ""]),
    ("/up/a%252Fb", ["/up/a%252Fb"; 4]),
    ("/up/%252e%252e/a", ["/up/%252e%252e/a"; 4]),
    ("/up/%2e%2e/a", ["/a"; 4]),
    ("/up/a\\b", ["", "", "", ""]),
    ("/up/a%5Cb", ["", "", "", ""]),
    ("/up/a%00", ["", "", "", ""]),
    ("/UP/A", ["/UP/A"; 4]),
];

/// The route sends the path that routes see in a header. The limit admits one request per path.
#[test]
fn routes_limits_and_upstream_see_the_same_path_with_each_policy() {
    let upstream = Upstream::start();
    let policies = ["canonical", "keep-encoded-slashes", "keep-double-slashes", "keep-slashes"];
    for (index, policy) in policies.into_iter().enumerate() {
        let gateway = Gateway::start(&format!(
            "[server]\npath_policy = \"{policy}\"\n[upstream.u]\nservers = [\"{}\"]\n\
             [limit.l]\nby = \"path:rest\"\nquota = \"1/day\"\nalgorithm = \"fixed-window\"\n\
             [[route]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\nlimits = [\"l\"]\n\
             request_headers.set.x-seen = \"{{path}}\"\n",
            upstream.url()
        ));
        let mut seen = Vec::new();
        for (path, expected) in SLASHES {
            let expected = expected[index];
            let status = once(&gateway, format!("GET {path} HTTP/1.1\r\nHost: a.test\r\n\r\n").as_bytes()).status;
            if expected.is_empty() {
                assert_eq!(status, 400, "{policy}: {path}");
            } else if seen.contains(&expected) {
                assert_eq!(status, 429, "{policy}: {path} has the same identity as another spelling of {expected}");
            } else {
                let request = upstream.last();
                assert_eq!(
                    (status, request.target(), request.headers("x-seen")[0]),
                    (200, expected, expected),
                    "{policy}: {path}"
                );
                seen.push(expected);
            }
        }
    }
}

/// Merging the slashes of a rewritten path would give the upstream the path of another route.
#[test]
fn rewritten_path_with_kept_slashes_is_not_that_of_another_route() {
    let upstream = Upstream::start();
    for policy in ["keep-double-slashes", "keep-slashes"] {
        for rewrite in ["strip_prefix = \"/api\"", "rewrite = \"/{rest}\""] {
            let gateway = Gateway::start(&format!(
                "[server]\npath_policy = \"{policy}\"\n[upstream.u]\nservers = [\"{}\"]\n\
                 [[route]]\nname = \"open\"\npath = \"/api/{{*rest}}\"\nupstream = \"u\"\n{rewrite}\n\
                 [[route]]\nname = \"admin\"\npath = \"/api/admin/{{*rest}}\"\nrespond = {{ status = 403 }}\n",
                upstream.url()
            ));
            let seen = upstream.count();
            for path in ["/api//admin/users", "/api///admin/users"] {
                assert_eq!(gateway.get(path).status, 400, "{policy} {rewrite} {path}");
            }
            assert_eq!(upstream.count(), seen);
            assert_eq!(gateway.get("/api/admin/users").status, 403);
            assert_eq!(gateway.get("/api/a//b").status, 200);
            assert_eq!(upstream.last().target(), "/a//b");
        }
    }
}

#[test]
fn case_is_ignored_by_routes_and_limits_but_forwarded() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&format!(
        "[server]\ncase_insensitive_paths = true\n[upstream.u]\nservers = [\"{}\"]\n\
         [limit.l]\nby = \"path:user\"\nquota = \"1/day\"\nalgorithm = \"fixed-window\"\n\
         [[route]]\nname = \"login\"\npath = \"/Login/{{user}}\"\nupstream = \"u\"\nlimits = [\"l\"]\n\
         [[route]]\nname = \"old\"\npath = \"/V1/{{*rest}}\"\nupstream = \"u\"\nstrip_prefix = \"/V1\"\n\
         [[route]]\nname = \"regex\"\npath_regex = \"/R/(?<id>[a-c]+)\"\nupstream = \"u\"\nrewrite = \"/x/{{id}}\"\n",
        upstream.url()
    ));
    let mut client = gateway.client();
    for (path, status, forwarded) in [
        ("/LOGIN/Bob", 200, "/LOGIN/Bob"),
        ("/login/bob", 429, ""),
        ("/lo%67in/%42OB", 429, ""),
        ("/login/caf%c3%a9", 200, "/login/caf%C3%A9"),
        ("/LOGIN/CAF%C3%A9", 429, ""),
        ("/v1/Reports/X", 200, "/Reports/X"),
        ("/r/AbC", 200, "/x/AbC"),
        ("/other", 404, ""),
    ] {
        assert_eq!(client.get(path).status, status, "{path}");
        if status == 200 {
            assert_eq!(upstream.last().target(), forwarded);
        }
    }
}

#[test]
fn request_needs_exactly_one_valid_host() {
    let gateway = gateway();
    for (what, host) in [
        ("no Host", ""),
        ("two Hosts", "Host: a.test\r\nHost: b.test\r\n"),
        ("the same Host twice", "Host: a.test\r\nHost: a.test\r\n"),
        ("an empty Host", "Host:\r\n"),
        ("a Host with a space", "Host: a test\r\n"),
        ("a Host that is a list", "Host: a.test, b.test\r\n"),
        ("a Host with a user", "Host: user@a.test\r\n"),
        ("a Host with a path", "Host: a.test/admin\r\n"),
        ("a Host with a scheme", "Host: http://a.test\r\n"),
        ("a Host without a name", "Host: :80\r\n"),
        ("a Host with a port that is a name", "Host: a.test:http\r\n"),
        ("a Host with two ports", "Host: a.test:80:80\r\n"),
        ("a Host with half an address", "Host: [::1\r\n"),
        ("a Host with something after the address", "Host: [::1]x\r\n"),
        ("a Host that is not ASCII", "Host: caf\u{e9}.test\r\n"),
    ] {
        let reply = once(&gateway, format!("GET /admin HTTP/1.1\r\n{host}\r\n").as_bytes());
        reply.assert_problem(400, what);
    }
    let reply = once(&gateway, b"GET http://user@a.test/admin HTTP/1.1\r\nHost: a.test\r\n\r\n");
    reply.assert_problem(400, "a target with a user");
    assert_eq!(gateway.get("/admin").text(), "admin");
}

#[test]
fn http_1_0_request_needs_no_host() {
    let gateway = gateway();
    for (request, expected) in [
        ("GET /where HTTP/1.0\r\n\r\n", "where-any"),
        ("GET /where HTTP/1.0\r\nHost: api.example.com\r\n\r\n", "where-exact"),
        ("GET http://www.example.com/where HTTP/1.0\r\n\r\n", "where-wild"),
    ] {
        let mut client = gateway.client();
        client.send(request.as_bytes());
        let reply = client.reply().unwrap();
        assert_eq!((reply.status, reply.text()), (200, expected), "{request}");
        client.assert_closed(request);
    }
    let mut client = gateway.client();
    for _ in 0..2 {
        client.send(b"GET /where HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
        assert_eq!(client.reply().unwrap().text(), "where-any", "an HTTP/1.0 connection that is kept alive");
    }
}

#[test]
fn method_without_a_route_is_405_with_allow() {
    let gateway = gateway();
    let mut client = gateway.client();
    for method in ["DELETE", "PATCH", "OPTIONS", "PURGE", "G-ET"] {
        let reply = client.request(method, "/methods", &[], b"");
        reply.assert_problem(405, method);
        let allow = reply.header("allow").unwrap_or_else(|| panic!("{method}: a 405 has Allow"));
        let allowed: BTreeSet<_> = allow.split(", ").collect();
        assert_eq!(allowed, ["GET", "HEAD", "POST", "PUT"].into(), "{method}");
        assert_eq!(allow.split(", ").count(), 4, "{method}: each method once: {allow}");
    }
    let reply = client.get("/nowhere");
    reply.assert_problem(404, "no route");
    assert_eq!(reply.header("allow"), None, "a 404 has no Allow");
}

#[test]
fn route_with_methods_precedes_one_without() {
    let routes = [
        ("rest", "/mixed", ""),
        ("read", "/mixed", "methods = [\"GET\", \"HEAD\"]"),
        ("write", "/mixed", "methods = [\"POST\"]"),
        ("marked", "/mixed", "match.headers.x-mark.exact = \"1\""),
    ];
    let written = |(name, path, criteria): &(&str, &str, &str)| {
        format!(
            "[[route]]\nname = \"{name}\"\npath = \"{path}\"\n{criteria}\nrespond = {{ status = 200, body = \"{name}\" }}\n"
        )
    };
    for turn in 0..routes.len() {
        let mut order = routes;
        order.rotate_left(turn);
        let gateway = Gateway::start(&order.iter().map(written).collect::<String>());
        let mut client = gateway.client();
        for (method, headers, expected) in [
            ("GET", &[][..], "read"),
            ("POST", &[], "write"),
            ("DELETE", &[], "rest"),
            ("OPTIONS", &[], "rest"),
            ("GET", &[("x-mark", "1")], "read"),
            ("DELETE", &[("x-mark", "1")], "marked"),
        ] {
            assert_eq!(client.request(method, "/mixed", headers, b"").text(), expected, "{method} {headers:?}");
        }
    }
}

#[test]
fn connect_and_trace_are_501() {
    let gateway = gateway();
    for request in [
        "CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\n\r\n",
        "TRACE /admin HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "TRACE /nowhere HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "TRACE http://a.test/admin HTTP/1.1\r\nHost: a.test\r\n\r\n",
    ] {
        once(&gateway, request.as_bytes()).assert_problem(501, request);
    }
    assert_eq!(gateway.get("/admin").text(), "admin");
}

#[test]
fn target_longer_than_max_uri_is_414() {
    let gateway = Gateway::start(&format!("[server]\nmax_uri = \"1KiB\"\n{}", config(ROUTES.iter())));
    let mut client = gateway.client();
    let path = |length: usize| format!("/files/{}", "a".repeat(length - "/files/".len()));
    let query = |length: usize| format!("/admin?{}", "a".repeat(length - "/admin?".len()));
    assert_eq!(client.get(&path(1024)).text(), "files", "a path of exactly the maximum length");
    client.get(&path(1025)).assert_problem(414, "a path of one byte more");
    assert_eq!(client.get(&query(1024)).text(), "admin", "a query of exactly the maximum length");
    client.get(&query(1025)).assert_problem(414, "a query of one byte more");
    let default = self::gateway();
    let mut client = default.client();
    assert_eq!(client.get(&path(8 << 10)).text(), "files", "8 KiB, the default");
    client.get(&path((8 << 10) + 1)).assert_problem(414, "a path of one byte more than the default");
}

#[test]
fn head_beyond_its_bounds_is_431() {
    let settings = "[server]\nmax_header_size = \"8KiB\"\nmax_headers = 20\n";
    let gateway = Gateway::start(&format!("{settings}{}", config(ROUTES.iter())));
    // The length of the header section without the value of `x-long`.
    const HEAD: usize = "GET /admin HTTP/1.1\r\nHost: a.test\r\nx-long: \r\n\r\n".len();
    // The number of headers includes Host.
    let lines = |count: usize| (1..count).map(|index| format!("x-{index}: 1\r\n")).collect::<String>();
    let long = |length: usize| format!("x-long: {}\r\n", "a".repeat(length));
    for (what, headers, expected) in [
        ("as many lines as are allowed", lines(20), 200),
        ("one line more", lines(21), 431),
        ("many lines", lines(1000), 431),
        ("a head of exactly the bound", long((8 << 10) - HEAD), 200),
        ("a head of one byte more", long((8 << 10) - HEAD + 1), 431),
        ("a line longer than the bound", long(9 << 10), 431),
        ("a line far longer than the bound", long(40 << 10), 431),
    ] {
        let reply = once(&gateway, format!("GET /admin HTTP/1.1\r\nHost: a.test\r\n{headers}\r\n").as_bytes());
        assert_eq!(reply.status, expected, "{what}");
    }
    // An unfinished header section is rejected as soon as it exceeds the maximum size.
    let reply =
        once(&gateway, format!("GET /admin HTTP/1.1\r\nHost: a.test\r\nx-long: {}", "a".repeat(9 << 10)).as_bytes());
    assert_eq!(reply.status, 431, "an unfinished header section");
    assert_eq!(gateway.get("/admin").text(), "admin");
}

#[test]
fn invalid_http_is_400_and_affects_no_other_request() {
    let gateway = gateway();
    for request in [
        &b"\r\n \r\n\r\n"[..],
        b"GET\r\n\r\n",
        b"GET /admin\r\n\r\n",
        b"GET /admin HTTP/1.1 x\r\nHost: a.test\r\n\r\n",
        b"GET  /admin HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b" GET /admin HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"GET /admin HTTP/9.9\r\nHost: a.test\r\n\r\n",
        b"GET /admin HTTP/1.1a\r\nHost: a.test\r\n\r\n",
        b"GET /admin http/1.1\r\nHost: a.test\r\n\r\n",
        b"GET /ad\0min HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"GET /ad\x7fmin HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"G(T /admin HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"\0\0\0\0 / HTTP/1.1\r\n\r\n",
        // A TLS handshake.
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 abc\r\n\r\n",
        // Almost the HTTP/2 preface.
        b"PRI * HTTP/3.0\r\n\r\n",
        b"GET /admin HTTP/1.1\r\nHost: a.test\r\nno colon\r\n\r\n",
        b"GET /admin HTTP/1.1\r\nHost: a.test\r\nx y: 1\r\n\r\n",
        b"GET /admin HTTP/1.1\r\nHost: a.test\r\nx : 1\r\n\r\n",
        b"GET /admin HTTP/1.1\r\nHost: a.test\r\n: 1\r\n\r\n",
        b"GET /admin HTTP/1.1\r\nHost: a.test\r\nx: a\0b\r\n\r\n",
        b"GET /admin HTTP/1.1\r\nHost: a.test\r\nx: 1\r\n folded\r\n\r\n",
        b"POST /admin HTTP/1.1\r\nHost: a.test\r\nContent-Length: x\r\n\r\n",
        b"POST /admin HTTP/1.1\r\nHost: a.test\r\nContent-Length: -1\r\n\r\n",
        b"POST /admin HTTP/1.1\r\nHost: a.test\r\nContent-Length: +1\r\n\r\na",
        b"POST /admin HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST /admin HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1, 2\r\n\r\nab",
        b"POST /admin HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST /admin HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        b"POST /admin HTTP/1.0\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ] {
        let what = String::from_utf8_lossy(request);
        let mut client = gateway.client();
        client.send(request);
        let reply = client.reply().unwrap_or_else(|| panic!("no response to {what:?}"));
        assert_eq!(reply.status, 400, "{what:?}");
        client.assert_closed(&what);
        assert_eq!(gateway.get("/admin").text(), "admin", "after {what:?}");
    }
}

#[test]
fn pipelined_requests_are_served_in_order() {
    let gateway = gateway();
    let mut client = gateway.client();
    let request = |path| format!("GET {path} HTTP/1.1\r\nHost: a.test\r\n\r\n");
    client.send([request("/admin"), request("/nowhere"), request("/file")].concat().as_bytes());
    assert_eq!(client.reply().unwrap().text(), "admin");
    client.reply().unwrap().assert_problem(404, "the second pipelined request");
    assert_eq!(client.reply().unwrap().text(), "file");
}

#[test]
fn http2_by_prior_knowledge_is_routed_alike() {
    let limit =
        "[limit.hourly]\nby = \"ip\"\nalgorithm = \"fixed-window\"\nstart = \"first-request\"\nquota = \"100/hour\"\n";
    let limited = "[[route]]\nname = \"limited\"\npath = \"/limited\"\nlimits = [\"hourly\"]\n\
         respond = { status = 200, body = \"limited\" }\n";
    let gateway = Gateway::start(&format!("{limit}{limited}{}", config(ROUTES.iter())));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let talk = async {
        let stream = tokio::net::TcpStream::connect(gateway.address).await.unwrap();
        let (sender, connection) =
            http2::handshake::<_, _, Empty<Bytes>>(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let send = |method: &str, uri: &str, headers: &[(&str, &str)]| {
            let mut request = http::Request::builder().method(method).uri(uri);
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            let request = request.body(Empty::new()).unwrap();
            let mut sender = sender.clone();
            async move {
                let (parts, body) = sender.send_request(request).await.unwrap().into_parts();
                let body = body.collect().await.unwrap().to_bytes();
                (parts, String::from_utf8(body.to_vec()).unwrap())
            }
        };
        for (method, uri, headers, status, expected) in [
            ("GET", "http://a.test/admin", &[][..], 200, "admin"),
            ("GET", "http://a.test/%61dmin", &[], 200, "admin"),
            ("GET", "http://a.test/x//../admin?q", &[], 200, "admin"),
            ("GET", "http://API.example.com:8080/where", &[], 200, "where-exact"),
            ("GET", "http://api.example.com/where", &[("host", "a.test")], 200, "where-exact"),
            ("GET", "http://a.test/version", &[("x-version", "2")], 200, "version-2"),
            ("GET", "http://a.test/a%2fb", &[], 400, ""),
            ("GET", "http://a.test/nowhere", &[], 404, ""),
            ("DELETE", "http://a.test/methods", &[], 405, ""),
            ("TRACE", "http://a.test/admin", &[], 501, ""),
        ] {
            let (parts, body) = send(method, uri, headers).await;
            assert_eq!(
                (parts.status.as_u16(), parts.version),
                (status, http::Version::HTTP_2),
                "{method} {uri} {headers:?}"
            );
            match status {
                200 => assert_eq!(body, expected, "{method} {uri} {headers:?}"),
                _ => assert_eq!(parts.headers["content-type"], "application/problem+json", "{method} {uri}"),
            }
        }
        let (parts, body) = send("GET", "http://a.test/limited", &[]).await;
        assert_eq!((parts.status.as_u16(), &*body), (200, "limited"));
        assert_eq!(parts.headers["ratelimit-policy"], "\"hourly\";q=100;w=3600");
        assert_eq!(parts.headers["ratelimit"], "\"hourly\";r=99;t=3600");
        // A stream does not wait for other streams of its connection.
        let (first, second) = (send("GET", "http://a.test/limited", &[]), send("GET", "http://a.test/file", &[]));
        let ((_, second), (first, _)) = (second.await, first.await);
        assert_eq!(
            (&*second, &first.headers["ratelimit"]),
            ("file", &http::HeaderValue::from_static("\"hourly\";r=98;t=3600"))
        );
    };
    runtime.block_on(async { timeout(MAX_WAIT, talk).await.expect("a response over HTTP/2") });
    let mut client = Client::connect(gateway.address);
    assert_eq!(client.get("/limited").remaining("hourly"), 97, "HTTP/1.1 on the same port counts in the same bucket");
}

#[test]
fn allow_lists_the_methods_of_all_matching_hosts() {
    let routes: String = [("GET", "hosts = [\"a.h.test\"]\n"), ("POST", "hosts = [\"*.h.test\"]\n"), ("PUT", "")]
        .map(|(method, host)| {
            format!(
                "[[route]]\nname = \"{method}\"\npath = \"/m\"\n{host}methods = [\"{method}\"]\nrespond = {{ status = 200 }}\n"
            )
        })
        .concat();
    let gateway = Gateway::start(&routes);
    for (host, expected) in
        [("a.h.test", &["GET", "POST", "PUT"][..]), ("b.h.test", &["POST", "PUT"]), ("c.test", &["PUT"])]
    {
        let reply = gateway.client().request("DELETE", "/m", &[("host", host)], b"");
        reply.assert_problem(405, host);
        let allowed: BTreeSet<_> = reply.header("allow").unwrap().split(", ").collect();
        assert_eq!(allowed, expected.iter().copied().collect(), "{host}");
        for method in expected {
            assert_eq!(gateway.client().request(method, "/m", &[("host", host)], b"").status, 200, "{method} {host}");
        }
    }
}

/// If a header occurs several times, upstream servers take its first value, its last value, or all values joined by
/// commas. A route that requires a value therefore does not match.
#[test]
fn several_lines_of_a_header_select_no_route() {
    let gateway = Gateway::start(
        r#"
        [[route]]
        name = "gold"
        path = "/plan"
        match.headers.x-plan.exact = "gold"
        respond = { status = 200, body = "gold" }
        [[route]]
        name = "others"
        path = "/plan"
        respond = { status = 200, body = "others" }
        "#,
    );
    let mut client = gateway.client();
    for (lines, expected) in [
        (&["gold"][..], "gold"),
        (&["free"], "others"),
        (&["gold", "free"], "others"),
        (&["free", "gold"], "others"),
        (&["gold", "gold"], "others"),
        (&[], "others"),
    ] {
        let headers: Vec<_> = lines.iter().map(|value| ("x-plan", *value)).collect();
        assert_eq!(client.get_with("/plan", &headers).text(), expected, "{lines:?}");
    }
}

fn route(name: &str, rest: &str) -> String {
    format!("[[route]]\nname = \"{name}\"\n{rest}\nrespond = {{ status = 200, body = \"{name}\" }}\n")
}

#[test]
fn route_matches_each_of_its_hosts() {
    let gateway = Gateway::start(
        &[
            route("hosts", "path = \"/x\"\nhosts = [\"A.test\", \"*.b.test\", \"[2001:DB8::1]\"]"),
            route("others", "path = \"/x\"\nhosts = [\"*\"]"),
        ]
        .concat(),
    );
    let mut client = gateway.client();
    for (host, expected) in [
        ("a.test", "hosts"),
        ("A.TEST:8080", "hosts"),
        ("x.b.test", "hosts"),
        ("x.y.b.test", "hosts"),
        ("[2001:db8:0::1]:80", "hosts"),
        ("b.test", "others"),
        ("a.test.evil.test", "others"),
    ] {
        assert_eq!(client.request("GET", "/x", &[("Host", host)], b"").text(), expected, "{host}");
    }
}

const TWO_LISTENERS: &str = "[[listener]]\nname = \"NAMES\"\naddress = \"127.0.0.1:0\"\n[[listener]]\naddress = \"127.0.0.1:0\"\nname = \"OTHER\"\n";

/// A reload that renames the listeners also changes which routes apply to open connections.
#[test]
fn routes_of_a_listener_match_only_its_connections() {
    let listeners = |first: &str, second: &str| TWO_LISTENERS.replace("NAMES", first).replace("OTHER", second);
    let routes = [
        route("of-plain", "path = \"/x\"\nlisteners = [\"plain\"]"),
        route("of-any", "path = \"/x\"\nmethods = [\"GET\"]"),
        route("of-second", "path = \"/only\"\nlisteners = [\"second\"]"),
        route("of-both", "path = \"/both\"\nlisteners = [\"second\", \"plain\"]"),
    ]
    .concat();
    let gateway = Gateway::start(&with_admin(&format!("{}{routes}", listeners("plain", "second"))));
    let mut clients = gateway.addresses().into_iter().map(Client::connect).collect::<Vec<_>>();
    let expect = |clients: &mut Vec<Client>, expected: [[&str; 3]; 2]| {
        for (client, expected) in clients.iter_mut().zip(expected) {
            for (path, expected) in ["/x", "/only", "/both"].into_iter().zip(expected) {
                let reply = client.get(path);
                match expected {
                    "404" => reply.assert_problem(404, path),
                    expected => assert_eq!(reply.text(), expected, "{path}"),
                }
            }
        }
    };
    expect(&mut clients, [["of-plain", "404", "of-both"], ["of-any", "of-second", "of-both"]]);
    reloads(&gateway, &format!("{}{routes}", listeners("second", "plain")));
    expect(&mut clients, [["of-any", "of-second", "of-both"], ["of-plain", "404", "of-both"]]);
    // Host and path take precedence over listeners.
    let routes = [
        route("of-plain", "path = \"/{*rest}\"\nlisteners = [\"a\"]\nhosts = [\"h.test\"]"),
        route("of-any", "path = \"/x\""),
    ];
    reloads(&gateway, &format!("{}{}", listeners("a", "b"), routes.concat()));
    for (client, expected) in clients.iter_mut().zip([("of-any", "of-plain"), ("of-any", "404")]) {
        let of_host = client.request("GET", "/y", &[("Host", "h.test")], b"");
        assert_eq!(client.get("/x").text(), expected.0);
        assert_eq!(if of_host.status == 404 { "404" } else { of_host.text() }, expected.1);
    }
}

#[test]
fn conditions_on_headers_and_query_select_a_route() {
    let gateway = Gateway::start(
        &[
            route("none", "path = \"/x\""),
            route("exact", "path = \"/x\"\nmatch.headers.x-a.exact = \"gold\""),
            route("prefix", "path = \"/x\"\nmatch.headers.x-b.prefix = \"go\"\nmatch.headers.x-a.absent = true"),
            route("regex", "path = \"/y\"\nmatch.headers.x-a.regex = 'v[0-9]+'"),
            route("present", "path = \"/z\"\nmatch.headers.x-a.present = true"),
            route("absent", "path = \"/z\"\nmatch.headers.x-a.absent = true"),
            route("query", "path = \"/q\"\nmatch.query.\"a b\".exact = \"1&2\""),
            route("query-prefix", "path = \"/q\"\nmatch.query = { p.prefix = \"x\", debug.present = true }"),
            route("query-regex", "path = \"/q\"\nmatch = { query = { r.regex = '(?i)on|yes', p.absent = true, s.absent = true }, headers.x-a.absent = true }"),
        ]
        .concat(),
    );
    let mut client = gateway.client();
    for (target, headers, expected) in [
        ("/x", &[][..], "none"),
        ("/x", &[("x-a", "gold")], "exact"),
        ("/x", &[("X-A", "golden")], "none"),
        ("/x", &[("x-b", "golden")], "prefix"),
        ("/x", &[("x-b", "golden"), ("x-a", "gold")], "exact"),
        ("/x", &[("x-b", "golden"), ("x-a", "")], "none"),
        ("/y", &[("x-a", "v17")], "regex"),
        ("/y", &[("x-a", "v17x")], "404"),
        ("/y", &[("x-a", "xv17")], "404"),
        ("/y", &[], "404"),
        ("/z", &[], "absent"),
        ("/z", &[("x-a", "")], "present"),
        ("/q?a+b=1%262", &[], "query"),
        ("/q?x=y&a%20b=1%262&z", &[], "query"),
        ("/q?a%20b=1&2", &[], "404"),
        ("/q?A+b=1%262", &[], "404"),
        ("/q?p=xyz&debug", &[], "query-prefix"),
        ("/q?debug=0&p=x", &[], "query-prefix"),
        ("/q?p=xyz", &[], "404"),
        ("/q?p=axyz&debug", &[], "404"),
        ("/q?r=YES", &[], "query-regex"),
        ("/q?r=%4fN", &[], "query-regex"),
        ("/q?r=yes&p", &[], "404"),
        ("/q?r=yes", &[("x-a", "1")], "404"),
        ("/q", &[], "404"),
    ] {
        let reply = client.get_with(target, headers);
        let what = format!("{target} {headers:?}");
        match expected {
            "404" => reply.assert_problem(404, &what),
            expected => assert_eq!(reply.text(), expected, "{what}"),
        }
    }
    // `Allow` lists the methods of routes that match in everything except the method.
    let methods = Gateway::start(&route("post", "path = \"/x\"\nmethods = [\"POST\"]\nmatch.query.a.exact = \"1\""));
    assert_eq!(methods.get("/x?a=1").header("allow"), Some("POST"));
    methods.get("/x?a=2").assert_problem(404, "the condition fails as well");
}

/// If a header or a parameter occurs several times, upstream servers take its first value, its last value, or all
/// values. Only the condition `present` therefore matches.
#[test]
fn several_values_meet_only_present() {
    let tests = ["exact = \"gold\"", "prefix = \"go\"", "regex = 'gold|free'", "present = true", "absent = true"];
    let routes = tests.iter().enumerate().map(|(index, test)| {
        [
            route(&format!("h{index}"), &format!("path = \"/h{index}\"\nmatch.headers.x-plan = {{ {test} }}")),
            route(&format!("q{index}"), &format!("path = \"/q{index}\"\nmatch.query.plan = {{ {test} }}")),
        ]
        .concat()
    });
    let gateway = Gateway::start(&routes.collect::<String>());
    let mut client = gateway.client();
    for (values, met) in [
        (&["gold"][..], [200, 200, 200, 200, 404]),
        (&["gold", "free"], [404, 404, 404, 200, 404]),
        (&["free", "gold"], [404, 404, 404, 200, 404]),
        (&["gold", "gold"], [404, 404, 404, 200, 404]),
        (&[], [404, 404, 404, 404, 200]),
    ] {
        for (index, expected) in met.into_iter().enumerate() {
            let headers: Vec<_> = values.iter().map(|value| ("x-plan", *value)).collect();
            assert_eq!(
                client.get_with(&format!("/h{index}"), &headers).status,
                expected,
                "{} {values:?}",
                tests[index]
            );
            let query: Vec<_> = values.iter().map(|value| format!("pl%61n={value}")).collect();
            let target = format!("/q{index}?{}", query.join("&"));
            assert_eq!(client.get(&target).status, expected, "{} {target}", tests[index]);
        }
    }
}

#[test]
fn expressions_match_whole_canonical_paths() {
    let gateway = Gateway::start(
        &[
            route("rest", "path = \"/{*rest}\""),
            route("first", "path_regex = '/v\\d+/[a-z]+'"),
            route("second", "path_regex = '/v1/.*'"),
            route("post", "path_regex = '/v1/.*'\nmethods = [\"POST\"]"),
            route("literal", "path = \"/v1/literal\""),
            route("parameter", "path = \"/v2/{id}\""),
            route("of-host", "path = \"/v1/{*rest}\"\nhosts = [\"a.test\"]"),
            route("any-case", "path_regex = '(?i)/login([/;].*)?'"),
        ]
        .concat(),
    );
    let mut client = gateway.client();
    for (method, host, target, expected) in [
        ("GET", "h.test", "/v1/literal", "literal"),
        ("GET", "h.test", "/v2/abc", "parameter"),
        ("GET", "h.test", "/v1/abc", "first"),
        ("POST", "h.test", "/v1/abc", "first"),
        ("POST", "h.test", "/v1/abc/d", "post"),
        ("PUT", "h.test", "/v1/abc/d", "second"),
        ("GET", "h.test", "/v17/abc", "first"),
        ("GET", "h.test", "/v17/ABC", "rest"),
        ("GET", "h.test", "/v17/abc/", "rest"),
        ("GET", "h.test", "/x/v1/abc", "rest"),
        ("GET", "a.test", "/v1/abc", "of-host"),
        ("GET", "a.test", "/v3/abc", "first"),
        // The expression matches the canonical path.
        ("GET", "h.test", "//v17/./x/../%61bc", "first"),
        ("GET", "h.test", "/v17/abc?x=/", "first"),
        ("GET", "h.test", "/v17/%2e%2e/login", "any-case"),
        ("GET", "h.test", "/LOGIN/", "any-case"),
        ("GET", "h.test", "/login;jsessionid=1", "any-case"),
        ("GET", "h.test", "/login%3Bx", "any-case"),
        ("GET", "h.test", "/logins", "rest"),
    ] {
        let reply = client.request(method, target, &[("Host", host)], b"");
        assert_eq!(reply.text(), expected, "{method} {host}{target}");
    }
}

#[test]
fn trailing_slash_is_strict_same_or_redirected() {
    let gateway = Gateway::start(
        &[
            route("strict", "path = \"/strict\""),
            route("strict-slash", "path = \"/strict-slash/\""),
            route("same", "path = \"/same\"\ntrailing_slash = \"same\""),
            route("same-id", "path = \"/id/{id}/\"\ntrailing_slash = \"same\""),
            route("same-rest", "path = \"/rest/{*rest}\"\ntrailing_slash = \"same\""),
            route(
                "redirect",
                "path = \"/r\"\ntrailing_slash = \"redirect\"\nmethods = [\"GET\", \"POST\"]\nlimits = [\"once\"]",
            ),
            route("redirect-slash", "path = \"/rs/{id}/\"\ntrailing_slash = \"redirect\""),
            route("redirect-rest", "path = \"/rr/{*rest}\"\ntrailing_slash = \"redirect\""),
            "[limit.once]\nby = \"ip\"\nquota = \"2/day\"\nalgorithm = \"fixed-window\"\n".to_owned(),
        ]
        .concat(),
    );
    let mut client = gateway.client();
    for (target, expected) in [
        ("/strict", Ok("strict")),
        ("/strict/", Err(None)),
        ("/strict-slash/", Ok("strict-slash")),
        ("/strict-slash", Err(None)),
        ("/same", Ok("same")),
        ("/same/", Ok("same")),
        ("/same//", Ok("same")),
        ("/same/x", Err(None)),
        ("/id/7/", Ok("same-id")),
        ("/id/7", Ok("same-id")),
        ("/id/", Err(None)),
        ("/rest", Ok("same-rest")),
        ("/rest/", Ok("same-rest")),
        ("/rest/x", Ok("same-rest")),
        ("/r", Ok("redirect")),
        ("/r/", Err(Some("/r"))),
        ("/r/?a=/b//&c", Err(Some("/r?a=/b//&c"))),
        ("//r//", Err(Some("/r"))),
        ("/rs/7/", Ok("redirect-slash")),
        ("/rs/7", Err(Some("/rs/7/"))),
        ("/rs/a%3Bb;c?", Err(Some("/rs/a%3Bb;c/?"))),
        ("/rs/%2e%2e/x", Err(None)),
        ("/rs/.%0d%0aLocation:", Err(Some("400"))),
        ("/rr", Err(Some("/rr/"))),
        ("/rr/", Ok("redirect-rest")),
        ("/rr/x", Ok("redirect-rest")),
        ("//rr", Err(Some("/rr/"))),
        ("//evil.test/../rr", Err(Some("/rr/"))),
        ("http://evil.test/rr", Err(Some("/rr/"))),
    ] {
        let reply = client.get(target);
        match expected {
            Ok(expected) => assert_eq!((reply.status, reply.text()), (200, expected), "{target}"),
            Err(None) => reply.assert_problem(404, target),
            Err(Some("400")) => reply.assert_problem(400, target),
            Err(Some(location)) => {
                assert_eq!((reply.status, reply.header("location")), (308, Some(location)), "{target}");
            }
        }
    }
    // The redirects were not charged; the limit admits one more request.
    assert_eq!((client.get("/r").status, client.get("/r").status), (200, 429));
    assert_eq!(
        client.request("POST", "/r/", &[], b"").header("location"),
        Some("/r"),
        "the redirect applies to the methods of the route"
    );
    client.request("PUT", "/r/", &[], b"").assert_problem(405, "a method that the route does not have");
}

/// Headers that routes match reach the upstream unchanged. As with headers that identify clients, the gateway removes
/// variants of their names such as `x_plan`.
#[test]
fn matched_headers_reach_the_upstream_as_matched() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&format!(
        "[upstream.u]\nservers = [\"{}\"]\n[[route]]\nname = \"r\"\npath = \"/\"\nupstream = \"u\"\n\
         match.headers = {{ x-plan.prefix = \"go\", x-debug.absent = true }}\n",
        upstream.url()
    ));
    let reply = gateway.client().get_with(
        "/",
        &[("x-plan", "gold"), ("X_Plan", "free"), ("x_debug", "1"), ("Connection", "x-plan"), ("x-other", "1")],
    );
    assert_eq!(reply.status, 200, "{}", reply.text());
    let seen = upstream.last();
    assert_eq!(seen.headers("x-plan"), ["gold"], "{}", seen.head);
    assert!(!seen.head.to_ascii_lowercase().contains("x_plan"), "{}", seen.head);
    assert!(!seen.head.to_ascii_lowercase().contains("x_debug"), "{}", seen.head);
    assert_eq!(seen.headers("x-other"), ["1"]);
}

const PATHS: [&str; 10] = ["/", "/a", "/a/", "/{x}", "/a/b", "/a/{x}", "/{x}/b", "/{*r}", "/a/{*r}", "/{x}/{*r}"];

const EXPRESSIONS: [&str; 3] = ["/a.*", "/[ab]/[ab]", ".*b"];

/// The route lookup selects the same route as a comparison of all routes by the rules in the manual.
#[test]
fn lookup_agrees_with_the_documented_ranking() {
    const TARGETS: [&str; 9] = ["/", "/a", "/a/", "/b", "/a/b", "/b/b", "/a/b/c", "/b/", "/c/d"];
    const ROUTE_HOSTS: [&str; 3] = ["", "h.test", "*.test"];
    let rule = (0..PATHS.len() + EXPRESSIONS.len(), 0..ROUTE_HOSTS.len(), 0..3_usize, 0..3_usize, 0..3_usize);
    let request = (0..TARGETS.len(), 0..2_usize, 0..2_usize, 0..2_usize, 0..3_usize);
    let input = (proptest::collection::vec(rule, 1..20), proptest::collection::vec(request, 20));
    property(4000, 20, input, |(rules, requests)| {
        let mut table = RouteTable::default();
        let mut routes: Vec<Modelled> = Vec::new();
        for (path, host, methods, listeners, conditions) in rules {
            let (text, is_expression) = match PATHS.get(path) {
                Some(path) => (*path, false),
                None => (EXPRESSIONS[path - PATHS.len()], true),
            };
            let condition = |name: &&str| Condition {
                source: ConditionSource::Header(name.parse().unwrap()),
                test: ValueTest::Present,
            };
            let parsed = if is_expression { PathPattern::from_regex(text).unwrap() } else { text.parse().unwrap() };
            let route = RouteMatch {
                hosts: ROUTE_HOSTS[host..=host]
                    .iter()
                    .filter(|host| !host.is_empty())
                    .map(ToString::to_string)
                    .collect(),
                methods: [Method::GET, Method::PUT].into_iter().take(methods).collect(),
                listeners: (0..listeners).collect(),
                conditions: ["x-a", "x-b"].iter().take(conditions).map(condition).collect(),
                ..RouteMatch::new(parsed)
            };
            let index = routes.len();
            if table.insert(&route, &index).is_ok() {
                routes.push(Modelled { index, text, is_expression, route });
            }
        }
        for (target, host, method, listener, headers) in &requests {
            let names = ["x-a", "x-b"].iter().take(*headers);
            let headers: HeaderMap = names.map(|name| (name.parse().unwrap(), HeaderValue::from_static("1"))).collect();
            let request = RouteRequest {
                host: ["h.test", "x.test"][*host],
                path: TARGETS[*target],
                uri: &Uri::default(),
                method: [&Method::GET, &Method::PUT][*method],
                headers: &headers,
                listener: *listener,
                body: RouteBody::Unread,
            };
            assert_eq!(table.find(&request).ok().copied(), best(&routes, &request), "{request:?} in {routes:#?}");
        }
        requests.len()
    });
}

#[derive(Debug)]
struct Modelled {
    index: usize,
    text: &'static str,
    is_expression: bool,
    route: RouteMatch,
}

impl Modelled {
    fn matches(&self, request: &RouteRequest<'_>) -> bool {
        let route = &self.route;
        let host = route.hosts.first().is_none_or(|host| {
            host.strip_prefix('*').map_or(host == request.host, |suffix| request.host.ends_with(suffix))
        });
        host && self.matches_path(request.path)
            && (route.methods.is_empty() || route.methods.contains(request.method))
            && (route.listeners.is_empty() || route.listeners.contains(&request.listener))
            && route
                .conditions
                .iter()
                .all(|condition| condition.matches(request.headers, None, RouteBody::Unread) == Met::Yes)
    }

    fn matches_path(&self, path: &str) -> bool {
        if self.is_expression {
            return Expression::new(self.text).unwrap().is_match(path.as_bytes());
        }
        let (mut own, segments): (Vec<_>, Vec<_>) =
            (self.text[1..].split('/').collect(), path[1..].split('/').collect());
        let has_rest = self.has_rest();
        own.truncate(own.len() - usize::from(has_rest));
        let has_length = if has_rest { segments.len() > own.len() } else { segments.len() == own.len() };
        let fits =
            |(own, segment): (&&str, &&str)| if own.starts_with('{') { !segment.is_empty() } else { own == segment };
        has_length && own.iter().zip(&segments).all(fits)
    }

    fn has_rest(&self) -> bool {
        self.text.ends_with("{*r}")
    }

    /// Compare paths segment by segment from the left: a literal ranks before a parameter, and a parameter before a
    /// catch-all such as `{*rest}`.
    fn path_rank(&self) -> Vec<usize> {
        let rank = |segment: &str| usize::from(segment.starts_with('{')) + usize::from(segment.starts_with("{*"));
        self.text[1..].split('/').map(rank).collect()
    }

    /// Rank by listeners, then by methods, then by the number of conditions.
    fn rank(&self) -> impl Ord + use<> {
        let RouteMatch { listeners, methods, conditions, .. } = &self.route;
        (listeners.is_empty(), methods.is_empty(), Reverse(conditions.len()))
    }
}

/// Return the best route by applying the rules of the manual one after the other.
fn best(routes: &[Modelled], request: &RouteRequest<'_>) -> Option<usize> {
    let host_rank = |one: &Modelled| one.route.hosts.first().map_or(2, |host| usize::from(host.starts_with('*')));
    let matching: Vec<_> = routes.iter().filter(|one| one.matches(request)).collect();
    let best_host = matching.iter().map(|one| host_rank(one)).min()?;
    let of_host: Vec<_> = matching.into_iter().filter(|one| host_rank(one) == best_host).collect();
    let by_path = of_host.iter().filter(|one| !one.is_expression).min_by_key(|one| (one.path_rank(), one.rank()));
    if let Some(found) = by_path.filter(|found| !found.has_rest()) {
        return Some(found.index);
    }
    // An expression ranks by the index of the first route with the same hosts and the same expression. A catch-all path
    // ranks after all expressions.
    let order = |one: &Modelled| {
        let same = |other: &&Modelled| (&other.route.hosts, other.text) == (&one.route.hosts, one.text);
        routes.iter().find(same).map(|first| first.index)
    };
    let expression = of_host.iter().filter(|one| one.is_expression).min_by_key(|one| (order(one), one.rank()));
    expression.or(by_path).map(|one| one.index)
}
