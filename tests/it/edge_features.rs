//! What routes and upstreams do for single requests, over HTTP/1.1 and HTTP/2: the first configuration applies at the
//! start, another one after a reload, and the first one again after a hot restart.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};

use aws_lc_rs::digest::{SHA256, digest};
use http::{HeaderMap, Request};

use crate::hot_restart::hot_restart;
use crate::support::certificates::{Authority, NOW, Pair};
use crate::support::client::Client;
use crate::support::gateway::Gateway;
use crate::support::http2;
use crate::support::http2::Answer;
use crate::support::reload::{reloads, with_admin};
use crate::support::tls_upstream::{TlsUpstream, server};
use crate::support::upstream::{Upstream, read_request, serve};

/// An upstream whose responses contain the host and the target of the request.
fn echo() -> Upstream {
    Upstream::responding(|seen| {
        let body = format!("{} {}{}", seen.headers("host").concat(), seen.target(), " ".repeat(2000));
        format!("HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {}\r\n\r\n{body}", body.len())
            .into_bytes()
    })
}

/// A server with TLS, whose responses contain its name.
fn named(name: &'static str, pair: &Pair) -> TlsUpstream {
    TlsUpstream::serve(server(pair, None, &["http/1.1"], rustls::ALL_VERSIONS), move |mut stream| {
        while read_request(&mut stream).is_some() {
            write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{name}", name.len()).unwrap();
        }
    })
}

/// The two configurations.
#[derive(Clone, Copy)]
enum Version {
    One,
    Two,
}

impl Version {
    /// Return the value of this configuration.
    fn pick<T>(self, one: T, two: T) -> T {
        match self {
            Version::One => one,
            Version::Two => two,
        }
    }
}

struct Servers {
    echo: Upstream,
    failing: Upstream,
    /// A server that sends no response.
    silent: SocketAddr,
    tls: [(TlsUpstream, Pair); 2],
}

/// The words in upper case differ between the two configurations, see [`DIFFERENCES`].
const CONFIG: &str = r#"
[store]
secret = "0123456789abcdef0123456789abcdef"
[server]
error_pages.html = "<h1>NAME {status}</h1>"
path_policy = "POLICY"
[route_defaults]
response_headers = { set = { x-version = "NAME" } }
[limit.form]
by = "form:NAME"
quota = "1000/s"
[limit.basic]
by = "basic:user"
quota = "1000/s"
on_missing = "MISSING"
[limit.busy]
by = "route"
quota = "1/24h"
status = STATUS
[upstream.echo]
servers = ["http://ECHO"]
host = "NAME.test"
[upstream.sticky]
servers = ["http://ECHO"]
balance = "sticky"
sticky_cookie = { name = "NAME" }
[upstream.family]
servers = ["http://localhost:PORT"]
resolve = "FAMILY"
[upstream.pinned]
servers = ["https://localhost:TLS"]
tls = { fingerprint = ["PIN"] }
[upstream.failing]
servers = ["http://FAILING"]
[upstream.dead]
servers = ["http://127.0.0.1:1"]
[upstream.silent]
servers = ["http://SILENT"]
[[route]]
name = "echo"
path = "/echo/{*rest}"
upstream = "echo"
[[route]]
name = "own-host"
path = "/own-host"
upstream = "echo"
upstream_host = "NAME.own"
[[route]]
name = "sticky"
path = "/sticky"
upstream = "sticky"
[[route]]
name = "family"
path = "/family"
upstream = "family"
[[route]]
name = "fallback"
path = "/fallback"
upstream = "failing"
retry_on = [503]
fallback = [{ upstream = "echo", rewrite = "/NAME" }]
[[route]]
name = "pinned"
path = "/pinned"
upstream = "pinned"
[[route]]
name = "grpc"
path = "/grpc"
upstream = "GRPC"
[[route]]
name = "deadline"
path = "/deadline"
upstream = "silent"
[[route]]
name = "compressed"
path = "/compressed"
upstream = "echo"
compress = { algorithms = ["CODING"] }
[[route]]
name = "form"
path = "/form"
limits = ["form"]
respond = { status = 200 }
[[route]]
name = "basic"
path = "/basic"
limits = ["basic"]
respond = { status = 200 }
[[route]]
name = "busy"
path = "/busy"
limits = ["busy"]
respond = { status = 200 }
[[route]]
name = "page"
path = "/page"
upstream = "dead"
error_pages.json = '{"page":"NAME"}'
[[route]]
name = "safe"
path = "/safe"
security_headers = SAFE
respond = { status = 200 }
"#;

/// The words of [`CONFIG`], with their values in the two configurations.
const DIFFERENCES: [(&str, &str, &str); 8] = [
    ("NAME", "one", "two"),
    ("POLICY", "keep-encoded-slashes", "keep-double-slashes"),
    ("MISSING", "skip", "reject"),
    ("STATUS", "503", "420"),
    ("FAMILY", "ipv4", "ipv6"),
    ("GRPC", "dead", "failing"),
    ("CODING", "gzip", "br"),
    ("SAFE", "true", "false"),
];

fn config(version: Version, servers: &Servers) -> String {
    let (tls, pair) = &servers.tls[version.pick(0, 1)];
    let pin: String = digest(&SHA256, &pair.der).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let differences = DIFFERENCES.map(|(word, one, two)| (word, version.pick(one, two).to_owned()));
    let addresses = [
        ("ECHO", servers.echo.address.to_string()),
        ("PORT", servers.echo.address.port().to_string()),
        ("TLS", tls.address.port().to_string()),
        ("PIN", pin),
        ("FAILING", servers.failing.address.to_string()),
        ("SILENT", servers.silent.to_string()),
    ];
    differences.iter().chain(&addresses).fold(CONFIG.to_owned(), |text, (word, value)| text.replace(word, value))
}

/// A request, and the parts of its response that depend on the configuration: `status`, `is served`, `body`, or
/// the name of a header.
struct Case {
    path: &'static str,
    headers: &'static [(&'static str, &'static str)],
    body: &'static [u8],
    parts: &'static [&'static str],
    one: &'static [&'static str],
    two: &'static [&'static str],
    /// Whether only HTTP/2 has this feature.
    is_http2_only: bool,
}

const GET: Case =
    Case { path: "", headers: &[], body: b"", parts: &["status"], one: &[], two: &[], is_http2_only: false };
const HTML: &[(&str, &str)] = &[("accept", "text/html")];
const FORM: &[(&str, &str)] = &[("content-type", "application/x-www-form-urlencoded")];

const CASES: &[Case] = &[
    Case {
        path: "/echo/host",
        parts: &["body", "x-version"],
        one: &["one.test /echo/host", "one"],
        two: &["two.test /echo/host", "two"],
        ..GET
    },
    Case { path: "/own-host", parts: &["body"], one: &["one.own /own-host"], two: &["two.own /own-host"], ..GET },
    Case { path: "/sticky", parts: &["status", "set-cookie"], one: &["200", "one="], two: &["200", "two="], ..GET },
    // The hosts file may have an IPv6 address for `localhost`, but no server listens there.
    Case { path: "/family", parts: &["is served"], one: &["true"], two: &["false"], ..GET },
    Case { path: "/fallback", parts: &["body"], one: &["one.test /one"], two: &["two.test /two"], ..GET },
    Case { path: "/pinned", parts: &["body"], one: &["one"], two: &["two"], ..GET },
    Case { path: "/echo/a%2Fb", parts: &["status"], one: &["200"], two: &["400"], ..GET },
    Case { path: "/echo/a//b", parts: &["body"], one: &["one.test /echo/a/b"], two: &["two.test /echo/a//b"], ..GET },
    Case {
        path: "/grpc",
        headers: &[("content-type", "application/grpc"), ("te", "trailers")],
        body: b"\0\0\0\0\0",
        parts: &["status", "grpc-status"],
        one: &["200", "14"],
        two: &["503", ""],
        is_http2_only: true,
    },
    Case {
        path: "/deadline",
        headers: &[("content-type", "application/grpc"), ("te", "trailers"), ("grpc-timeout", "50m")],
        body: b"\0\0\0\0\0",
        parts: &["status", "grpc-status"],
        one: &["200", "4"],
        two: &["200", "4"],
        is_http2_only: true,
    },
    Case {
        path: "/compressed",
        headers: &[("accept-encoding", "br, gzip")],
        parts: &["content-encoding", "vary"],
        one: &["gzip", "Accept-Encoding"],
        two: &["br", "Accept-Encoding"],
        ..GET
    },
    Case { path: "/form", headers: FORM, body: b"one=a", parts: &["status"], one: &["200"], two: &["400"], ..GET },
    Case { path: "/form", headers: FORM, body: b"two=a", parts: &["status"], one: &["400"], two: &["200"], ..GET },
    Case { path: "/basic", one: &["200"], two: &["400"], ..GET },
    Case { path: "/busy", one: &["503"], two: &["420"], ..GET },
    Case {
        path: "/nowhere",
        headers: HTML,
        parts: &["status", "body"],
        one: &["404", "<h1>one 404</h1>"],
        two: &["404", "<h1>two 404</h1>"],
        ..GET
    },
    Case { path: "/page", parts: &["body"], one: &["{\"page\":\"one\"}"], two: &["{\"page\":\"two\"}"], ..GET },
    Case {
        path: "/safe",
        parts: &["status", "x-frame-options"],
        one: &["200", "SAMEORIGIN"],
        two: &["200", ""],
        ..GET
    },
];

/// Return the parts of the response to a request.
fn seen(gateway: &Gateway, case: &Case, is_http2: bool) -> Vec<String> {
    let method = if case.body.is_empty() { "GET" } else { "POST" };
    let (status, headers, body) = if is_http2 {
        let mut request = Request::builder().method(method).uri(format!("http://shop.test{}", case.path));
        for (name, value) in case.headers {
            request = request.header(*name, *value);
        }
        let answer = http2::ask(gateway.address, [request.body(case.body).unwrap()]).remove(0);
        let Answer::Response(status, headers, body) = answer else { panic!("{}: {answer:?}", case.path) };
        (status.as_u16(), headers, body.to_vec())
    } else {
        let headers = [&[("Host", "shop.test")], case.headers].concat();
        let reply = Client::connect(gateway.address).request(method, case.path, &headers, case.body);
        let mut received = HeaderMap::new();
        for (name, value) in &reply.headers {
            received.append(http::HeaderName::try_from(name.as_str()).unwrap(), value.parse().unwrap());
        }
        (reply.status, received, reply.body)
    };
    let part = |name: &&str| match *name {
        "status" => status.to_string(),
        "is served" => (status == 200).to_string(),
        "body" => String::from_utf8_lossy(&body).trim_end().to_owned(),
        name => {
            let value = headers.get(name).map_or("", |value| value.to_str().unwrap());
            // The value of the cookie of a sticky session is a hash.
            if name == "set-cookie" { value.split_inclusive('=').next().unwrap_or_default() } else { value }.to_owned()
        }
    };
    case.parts.iter().map(part).collect()
}

/// Return the response to a client that ends its side of the connection after the request.
fn half_closed(gateway: &Gateway) -> String {
    let mut stream = TcpStream::connect(gateway.address).unwrap();
    stream.write_all(b"GET /own-host HTTP/1.1\r\nHost: shop.test\r\n\r\n").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response
}

fn check(gateway: &Gateway, version: Version, when: &str) {
    // This request uses up the quota of the route.
    gateway.get("/busy");
    let response = half_closed(gateway);
    let host = version.pick("one.own", "two.own");
    assert!(response.starts_with("HTTP/1.1 200 ") && response.contains(host), "{response} {when}");
    for case in CASES {
        for is_http2 in [false, true] {
            if is_http2 || !case.is_http2_only {
                let protocol = if is_http2 { "HTTP/2" } else { "HTTP/1.1" };
                let expected = version.pick(case.one, case.two);
                assert_eq!(seen(gateway, case, is_http2), expected, "{} over {protocol} {when}", case.path);
            }
        }
    }
}

#[test]
fn each_feature_works_over_both_protocols_and_follows_reloads_and_hot_restarts() {
    let ca = Authority::new("ca");
    let tls = ["one", "two"].map(|name| {
        let pair = ca.server(&["localhost"], NOW);
        (named(name, &pair), pair)
    });
    let failing = Upstream::responding(|_| b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n".to_vec());
    let silent = serve(|mut stream| while read_request(&mut stream).is_some() {});
    let servers = Servers { echo: echo(), failing, silent, tls };
    let mut gateway = Gateway::start(&with_admin(&config(Version::One, &servers)));
    check(&gateway, Version::One, "at the start");
    reloads(&gateway, &config(Version::Two, &servers));
    check(&gateway, Version::Two, "after a reload");
    gateway.put(&with_admin(&config(Version::One, &servers)));
    let _successor = hot_restart(&mut gateway);
    check(&gateway, Version::One, "after a hot restart");
}
