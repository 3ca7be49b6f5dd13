//! End-to-end tests of forward authentication: the requests to the authentication server, the headers for the upstream
//! and the client, failures, the cache, and the limits that apply before and after authentication.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use crate::support::admin_listener::{metric, with_admin};
use crate::support::certificates::{Authority, NOW};
use crate::support::client::{Client, Reply};
use crate::support::eventually;
use crate::support::gateway::{Gateway, binary};
use crate::support::http2;
use crate::support::redis::{Redis, free_port};
use crate::support::tls_upstream::{self, TlsUpstream};
use crate::support::upstream::{Seen, Upstream, read_request, serve};
use serde_json::{Value, json};
use sluicegate::clock::monotonic;

/// Return a response without a body.
fn response(status: &str, headers: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status}\r\n{headers}Content-Length: 0\r\n\r\n").into_bytes()
}

/// Start an authentication server. It admits requests with a cookie `s=USER`, and its response then contains `X-User:
/// USER`. It denies all other requests with 401.
fn session_server() -> Upstream {
    Upstream::responding(|seen| match seen.headers("cookie")[..] {
        [cookie] if cookie.starts_with("s=") => response("200 OK", &format!("X-User: {}\r\n", &cookie[2..])),
        _ => response("401 Unauthorized", "WWW-Authenticate: Session\r\n"),
    })
}

/// Return a configuration with the provider `[auth.sso]` and a route for all paths. The route requires this provider.
/// `auth` is the URL of the authentication server, and `keys` are further keys of the provider.
fn config(auth: &str, keys: &str, upstream: &Upstream) -> String {
    format!(
        "[auth.sso]\nkind = \"forward\"\nurl = \"{auth}\"\nresponse_headers = [\"x-user\", \"x-plan\"]\n{keys}\n\
         [upstream.api]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"api\"\npath = \"/{{*rest}}\"\nrequire = [\"sso\"]\nupstream = \"api\"\n",
        upstream.url()
    )
}

fn verify_url(server: &Upstream) -> String {
    format!("{}/verify", server.url())
}

#[test]
fn server_is_told_about_the_request_and_its_headers_reach_the_upstream() {
    let server =
        Upstream::responding(|_| response("202 Accepted", "X-User: alice\r\nX-Plan: a\r\nX-Plan: b\r\nX-More: 1\r\n"));
    let upstream = Upstream::start();
    let url = format!("{}/verify?realm=a", server.url());
    let gateway = Gateway::start(&config(&url, "", &upstream));
    let mut client = gateway.client();
    let headers = [
        ("Authorization", "Bearer opaque"),
        ("Cookie", "a=1"),
        ("Cookie", "b=2"),
        ("X-Other", "secret"),
        ("X-Forwarded-For", "203.0.113.9"),
        ("X-Forwarded-Uri", "/forged"),
        ("X-Forwarded-Method", "GET"),
        ("Content-Type", "text/plain"),
    ];
    let reply = client.request("POST", "/a/../b%20c/d?q=1&r", &headers, b"body");
    assert_eq!((reply.status, reply.text()), (200, "ok"));
    let told = server.last();
    let mut lines: Vec<_> = told.head.lines().filter(|line| !line.is_empty()).collect();
    lines[1..].sort_unstable();
    let authority = format!("host: {}", server.address);
    let id = told.headers("x-request-id")[0];
    let id = format!("x-request-id: {id}");
    let mut expected = [
        "GET /verify?realm=a HTTP/1.1",
        "authorization: Bearer opaque",
        "cookie: a=1; b=2",
        &authority,
        "x-forwarded-for: 127.0.0.1",
        "x-forwarded-host: gateway.test",
        "x-forwarded-method: POST",
        "x-forwarded-proto: http",
        "x-forwarded-uri: /b%20c/d?q=1&r",
        &id,
    ];
    expected[1..].sort_unstable();
    assert_eq!(lines, expected, "the server receives the canonical path and only configured headers");
    assert!(told.body.is_empty());
    let seen = upstream.last();
    assert_eq!(seen.target(), "/b%20c/d?q=1&r");
    assert_eq!((seen.headers("x-user"), seen.headers("x-plan")), (vec!["alice"], vec!["a", "b"]));
    assert_eq!((seen.headers("x-more"), &*seen.body), (vec![], &b"body"[..]));
    assert_eq!(upstream.last().headers("x-request-id"), server.last().headers("x-request-id"));
    assert_eq!(upstream.last().headers("authorization"), ["Bearer opaque"], "forwarded by default");
    // The gateway also sends the next request of this client to the authentication server.
    let next = client.get("/next");
    assert_eq!((next.status, server.last().headers("x-forwarded-uri")), (200, vec!["/next"]));
}

#[test]
fn trusted_proxy_tells_host_scheme_and_address_of_the_client() {
    let (server, upstream) = (session_server(), Upstream::start());
    let config = config(&verify_url(&server), "forward_credential = false", &upstream)
        + "[client_ip]\ntrusted_proxies = [\"127.0.0.0/8\"]\n";
    let gateway = Gateway::start(&config);
    let headers = [
        ("Cookie", "s=alice"),
        ("X-Forwarded-For", "203.0.113.9"),
        ("X-Forwarded-Host", "shop.example"),
        ("X-Forwarded-Proto", "https"),
        ("X-User", "root"),
        ("X-Plan", "gold"),
    ];
    assert_eq!(gateway.client().get_with("/", &headers).status, 200);
    let told = server.last();
    assert_eq!(told.headers("x-forwarded-for"), ["203.0.113.9"], "the client, not the proxy");
    assert_eq!(told.headers("x-forwarded-host"), ["shop.example"]);
    assert_eq!(told.headers("x-forwarded-proto"), ["https"]);
    let seen = upstream.last();
    assert_eq!((seen.headers("x-user"), seen.headers("x-plan")), (vec!["alice"], vec![]), "`x-plan` is removed");
    assert!(seen.headers("cookie").is_empty() && seen.headers("authorization").is_empty(), "forward_credential");
}

#[test]
fn any_other_status_reaches_the_client_and_redirects_are_not_followed() {
    let page = "<form action=\"/login\">";
    let server = Upstream::responding(move |seen| {
        let status = seen.headers("cookie")[0].trim_start_matches("status=").to_owned();
        format!(
            "HTTP/1.1 {status} Status\r\nLocation: /login?rd=1\r\nSet-Cookie: a=1; Path=/\r\nSet-Cookie: b=2\r\n\
             WWW-Authenticate: Session realm=\"x\"\r\nContent-Type: text/html\r\nX-User: alice\r\nX-Secret: s\r\n\
             Cache-Control: max-age=600\r\nServer: auth\r\nContent-Length: {}\r\n\r\n{page}",
            page.len()
        )
        .into_bytes()
    });
    let upstream = Upstream::start();
    let gateway = Gateway::start(
        &(config(&verify_url(&server), "on_error = \"allow\"", &upstream)
            + "[log]\naccess = \"access.log\"\nformat = \"json\"\n"),
    );
    let mut client = gateway.client();
    for (count, status) in ["301", "302", "307", "400", "401", "403", "404", "429", "500", "503"].iter().enumerate() {
        let reply = client.get_with("/x", &[("Cookie", &format!("status={status}"))]);
        assert_eq!((reply.status.to_string(), reply.text()), ((*status).to_owned(), page), "{status}");
        assert_eq!(reply.header("location"), Some("/login?rd=1"), "{status}");
        let cookies: Vec<_> =
            reply.headers.iter().filter(|(name, _)| name == "set-cookie").map(|(_, v)| &**v).collect();
        assert_eq!(cookies, ["a=1; Path=/", "b=2"], "{status}");
        assert_eq!(reply.header("www-authenticate"), Some("Session realm=\"x\""), "{status}");
        assert_eq!(reply.header("content-type"), Some("text/html"), "{status}");
        assert_eq!(reply.header("cache-control"), Some("no-store"), "{status}");
        for name in ["x-user", "x-secret", "server"] {
            assert_eq!(reply.header(name), None, "{status}: {name}");
        }
        assert_eq!(server.count(), count + 1, "{status}: one request, no redirect followed");
    }
    let head = client.request("HEAD", "/x", &[("Cookie", "status=403")], b"");
    assert_eq!((head.status, head.header("content-length")), (403, Some("22")), "HEAD has no content");
    assert_eq!(upstream.count(), 0);
    let log = || std::fs::read_to_string(gateway.directory().join("access.log")).unwrap_or_default();
    eventually("the records are written", || log().lines().count() == 11);
    let outcomes: Vec<_> =
        log().lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["outcome"].clone()).collect();
    let (forbidden, others): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(|outcome| outcome == "forbidden");
    assert_eq!((forbidden.len(), others.len()), (2, 9));
    assert!(others.iter().all(|outcome| outcome == "unauthenticated"), "{others:?}");
}

#[test]
fn long_body_of_a_denial_is_not_sent_and_admissions_with_any_body_reuse_or_close_the_connection() {
    let server = Upstream::responding(|seen| {
        let (status, length) = match seen.headers("cookie")[..] {
            ["deny"] => ("403 Forbidden", 300 << 10),
            ["small"] => ("200 OK", 2),
            _ => ("200 OK", 300 << 10),
        };
        let mut bytes =
            format!("HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\n\r\n").into_bytes();
        bytes.resize(bytes.len() + length, b'x');
        bytes
    });
    let upstream = Upstream::start();
    let gateway = Gateway::start(&config(&verify_url(&server), "", &upstream));
    let mut client = gateway.client();
    let denied = client.get_with("/", &[("Cookie", "deny")]);
    assert_eq!((denied.status, denied.body.len(), denied.header("content-type")), (403, 0, None));
    for cookie in ["small", "large", "small", "large", "small"] {
        assert_eq!(client.get_with("/", &[("Cookie", cookie)]).status, 200, "{cookie}");
    }
}

/// Send a request with exactly these header lines, and return the response.
fn send_raw(gateway: &Gateway, path: &str, lines: &[&str]) -> Reply {
    let mut client = gateway.client();
    client.send(format!("GET {path} HTTP/1.1\r\nHost: a\r\n{}\r\n\r\n", lines.join("\r\n")).as_bytes());
    client.reply().unwrap()
}

#[test]
fn identity_headers_of_clients_never_reach_the_upstream() {
    let server = Upstream::responding(|seen| match seen.headers("cookie")[..] {
        ["s=named"] => response("200 OK", "X-User: alice\r\n"),
        _ => response("204 No Content", ""),
    });
    let upstream = Upstream::start();
    let open = "[[route]]\nname = \"open\"\npath = \"/open\"\nupstream = \"api\"\n";
    let identify = "[[route]]\nname = \"some\"\npath = \"/some\"\nidentify = [\"sso\"]\nupstream = \"api\"\n";
    let gateway = Gateway::start(&(config(&verify_url(&server), "", &upstream) + open + identify));
    for lines in [
        &["X-User: root"][..],
        &["x-user: root", "X-USER: root"],
        &["X_User: root"],
        &["X.User: root", "x!user: root", "x~user: root"],
        &["X-User: root", "Connection: x-user"],
        &["X-Plan: root", "Connection: close, x-plan"],
        &["x-user:root\tx", "x_plan: root"],
    ] {
        for path in ["/a", "/open", "/some"] {
            for cookie in ["Cookie: s=named", "Cookie: s=anonymous"] {
                let reply = send_raw(&gateway, path, &[lines, &[cookie]].concat());
                assert_eq!(reply.status, 200, "{lines:?}");
                let seen = upstream.last();
                assert!(!seen.head.contains("root"), "{path} {lines:?}: {}", seen.head);
                let is_named = path != "/open" && cookie.ends_with("=named");
                assert_eq!(seen.headers("x-user"), if is_named { vec!["alice"] } else { vec![] }, "{path} {lines:?}");
            }
        }
    }
    // A client cannot use `Connection` to hide its cookie from the authentication server.
    let reply = send_raw(&gateway, "/a", &["Connection: cookie", "Cookie: s=named"]);
    assert_eq!((reply.status, server.last().headers("cookie")), (200, vec!["s=named"]));
    assert_eq!(upstream.last().headers("cookie"), ["s=named"], "a protected header");
}

#[test]
fn repeated_headers_with_a_single_value_are_rejected_before_the_server() {
    let server = Upstream::responding(|_| response("200 OK", "X-User: alice\r\n"));
    let upstream = Upstream::start();
    let keys =
        "on_error = \"allow\"\nrequest_headers = [\"authorization\", \"cookie\", \"x-session\", \"accept-language\"]";
    let identify = "[[route]]\nname = \"some\"\npath = \"/some\"\nidentify = [\"sso\"]\nupstream = \"api\"\n";
    let gateway = Gateway::start(&(config(&verify_url(&server), keys, &upstream) + identify));
    for (lines, header) in [
        (&["Authorization: Bearer a", "Authorization: Bearer b"][..], "authorization"),
        (&["Authorization: Bearer a", "authorization: Bearer a"], "authorization"),
        (&["Authorization: Bearer a", "Authorization:"], "authorization"),
        (&["X-Session: a", "Cookie: s=alice", "X-Session: b"], "x-session"),
    ] {
        for path in ["/a", "/some"] {
            let reply = send_raw(&gateway, path, lines);
            reply.assert_problem(400, &format!("{path} {lines:?}"));
            assert!(
                reply.text().contains(&format!("the header `{header}` is present more than once")),
                "{}",
                reply.text()
            );
        }
    }
    assert_eq!((server.count(), upstream.count()), (0, 0));
    // A header whose value is a list may occur more than once. Several `Cookie` headers are joined.
    let lines = ["Accept-Language: de", "Accept-Language: en", "Cookie: a=1", "Cookie: b=2", "Authorization: Bearer a"];
    assert_eq!(send_raw(&gateway, "/a", &lines).status, 200);
    let told = server.last();
    assert_eq!((told.headers("accept-language"), told.headers("cookie")), (vec!["de", "en"], vec!["a=1; b=2"]));
    // Headers that are not sent to the authentication server may occur more than once.
    assert_eq!(send_raw(&gateway, "/a", &["X-Other: a", "X-Other: b"]).status, 200);
    // The gateway also rejects an HTTP/2 request with two `authorization` headers.
    let request = http::Request::get("http://a.test/a").header("authorization", "Bearer a");
    let request = request.header("authorization", "Bearer b").body(&b""[..]).unwrap();
    assert_eq!(http2::ask(gateway.addresses()[0], [request])[0].status(), Some(400));
    assert_eq!(server.count(), 2);
}

#[test]
fn server_that_does_not_respond_denies_or_admits_as_configured() {
    let closed = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let hanging = serve(|mut stream| {
        let _ = read_request(&mut stream);
        // Do not respond until the gateway times out and closes the connection.
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let resetting = serve(|mut stream| drop(read_request(&mut stream)));
    let garbage = serve(|mut stream| {
        let _ = read_request(&mut stream);
        let _ = stream.write_all(b"220 smtp ready\r\n\r\n");
    });
    let switching = serve(|mut stream| {
        let _ = read_request(&mut stream);
        let _ = stream.write_all(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n");
    });
    let smuggling = serve(|mut stream| {
        let _ = read_request(&mut stream);
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab");
    });
    let upstream = Upstream::start();
    for (what, address, fails_open) in [
        ("connection refused", closed, true),
        ("no response", hanging, true),
        ("reset", resetting, true),
        // If the authentication server sends an invalid response, the gateway never fails open, because a client may be
        // able to cause this response.
        ("garbage", garbage, false),
        ("another protocol", switching, false),
        ("two lengths", smuggling, false),
    ] {
        let start = |on_error: &str| {
            let keys = format!("timeout = \"300ms\"\non_error = \"{on_error}\"");
            let text = config(&format!("http://{address}/"), &keys, &upstream);
            Gateway::start(&with_admin(&(text + "[log]\naccess = \"access.log\"\nformat = \"json\"\n")))
        };
        let gateway = start("deny");
        let reply = gateway.client().get_with("/", &[("X-User", "root")]);
        reply.assert_problem(503, what);
        assert_eq!(reply.header("retry-after"), Some("1"), "{what}");
        let id = reply.header("x-request-id").unwrap_or_else(|| panic!("{what}: no request id"));
        assert_eq!(reply.json()["request_id"], json!(id), "{what}");
        let log = || std::fs::read_to_string(gateway.directory().join("access.log")).unwrap_or_default();
        eventually("the record is written", || log().contains("auth-unavailable"));
        let message = if fails_open { "did not respond" } else { "sent an invalid response" };
        assert!(gateway.log().contains(&format!("authentication server {message}")), "{what}: {}", gateway.log());
        let errors = metric(&gateway, "sluicegate_forward_auth_requests_total{provider=\"sso\",result=\"error\"}");
        assert_eq!(errors, 1.0, "{what}");
        let before = upstream.count();
        let reply = start("allow").client().get_with("/", &[("X-User", "root"), ("x_user", "root")]);
        let expected = if fails_open { (200, before + 1) } else { (503, before) };
        assert_eq!((reply.status, upstream.count()), expected, "{what}");
        assert!(upstream.count() == 0 || !upstream.last().head.contains("root"), "{what}");
    }
}

// === Alternatives ===

#[test]
fn denial_tries_the_next_alternative_and_identify_admits_without_the_server() {
    let (server, upstream) = (session_server(), Upstream::start());
    let key = "c0f6ca1a9bb1d6b5c0f6ca1a9bb1d6b5";
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, key.as_bytes());
    let digits: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let consumers = format!("[[consumer]]\nname = \"ci\"\nkeys = [\"sha256:{digits}\"]\n");
    let config = config(&verify_url(&server), "", &upstream)
        .replace("require = [\"sso\"]", "require = [\"sso\", \"keys\"]")
        + "[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n\
           [limit.user]\nby = \"auth:x-user\"\nquota = \"5/hour\"\non_missing = \"skip\"\n\
           [[route]]\nname = \"both\"\npath = \"/both\"\nrequire = [[\"keys\", \"sso\"]]\nupstream = \"api\"\n\
           [[route]]\nname = \"some\"\npath = \"/some\"\nidentify = [\"sso\"]\nlimits = [\"user\"]\nupstream = \"api\"\n";
    let gateway = Gateway::start_with(&config, &[("consumers.toml", &consumers)]);
    let mut client = gateway.client();
    let mut ask = |path: &str, headers: &[(&str, &str)]| client.get_with(path, headers);
    let (session, api_key) = (("Cookie", "s=alice"), ("X-Api-Key", key));
    assert_eq!(ask("/", &[session]).status, 200);
    assert_eq!(ask("/", &[api_key]).status, 200, "the server denies, the key is valid");
    let denied = ask("/", &[]);
    assert_eq!(
        (denied.status, denied.header("www-authenticate")),
        (401, Some("Session")),
        "the response of the server"
    );
    assert_eq!(ask("/", &[("X-Api-Key", "unknown")]).status, 401);
    assert_eq!(ask("/both", &[api_key]).status, 401);
    let before = server.count();
    assert_eq!(ask("/both", &[session]).status, 401);
    assert_eq!(server.count(), before, "the key is missing, so the server gets no request");
    assert_eq!(ask("/both", &[session, api_key]).status, 200);
    let known = ask("/some", &[session]);
    assert_eq!((known.status, known.remaining("user")), (200, 4));
    let unknown = ask("/some", &[]);
    assert_eq!(
        (unknown.status, unknown.header("ratelimit")),
        (200, None),
        "the server denies, but the route does not require authentication"
    );
    assert!(upstream.last().headers("x-user").is_empty());
}

// === TLS ===

#[test]
fn server_at_https_is_verified_with_the_given_ca() {
    let authority = Authority::new("auth ca");
    let pair = authority.server(&["127.0.0.1"], NOW);
    let server =
        TlsUpstream::serve(tls_upstream::server(&pair, None, &["http/1.1"], rustls::ALL_VERSIONS), |mut stream| {
            while read_request(&mut stream).is_some() {
                if stream.write_all(&response("200 OK", "X-User: alice\r\n")).is_err() {
                    return;
                }
            }
        });
    let upstream = Upstream::start();
    let url = format!("https://{}/verify", server.address);
    let start = |ca: &str| {
        Gateway::start_with(&config(&url, "ca = \"ca.pem\"\ntimeout = \"10s\"", &upstream), &[("ca.pem", ca)])
    };
    let gateway = start(&authority.pem());
    assert_eq!(gateway.get("/").status, 200);
    assert_eq!(upstream.last().headers("x-user"), ["alice"]);
    let other = start(&Authority::new("other").pem());
    assert_eq!(other.get("/").status, 503);
    assert!(other.log().contains("certificate"), "{}", other.log());
    // The gateway reloads the CA file when it changes.
    other.put_file("ca.pem", &authority.pem());
    eventually("the new CA is used", || other.get("/").status == 200);
}

// === Cache ===

const CACHE: &str = "cache = { ttl = \"1h\" }";

#[test]
fn cached_admission_is_used_for_the_same_request_only() {
    let (server, upstream) = (session_server(), Upstream::start());
    let gateway = Gateway::start(&with_admin(&config(&verify_url(&server), CACHE, &upstream)));
    let mut client = gateway.client();
    let mut calls = |request: &[&str], expected: usize, what: &str| {
        let [method, path, host, cookie] = request[..] else { panic!("{request:?}") };
        let before = server.count();
        let reply = client.request(method, path, &[("Host", host), ("Cookie", cookie)], b"");
        assert_eq!((reply.status, server.count() - before), (200, expected), "{what}");
        assert_eq!(upstream.last().headers("x-user"), [&cookie[2..]], "{what}");
    };
    calls(&["GET", "/a?b", "h", "s=alice"], 1, "the first");
    calls(&["GET", "/a?b", "h", "s=alice"], 0, "the same");
    // The authentication server receives each of these values and may base its decision on it. A request with another
    // value therefore needs another call.
    calls(&["GET", "/a?b", "h", "s=bob"], 1, "another cookie");
    calls(&["POST", "/a?b", "h", "s=alice"], 1, "another method");
    calls(&["GET", "/a", "h", "s=alice"], 1, "another query");
    calls(&["GET", "/admin", "h", "s=alice"], 1, "another path");
    calls(&["GET", "/a?b", "g", "s=alice"], 1, "another host");
    calls(&["GET", "/x/../a?b", "h", "s=alice"], 0, "the same path in canonical form");
    calls(&["GET", "/a?b", "h", "s=alice"], 0, "the first again");
    let mut other = Client::connect_from([127, 0, 0, 2].into(), gateway.address);
    let before = server.count();
    assert_eq!(other.request("GET", "/a?b", &[("Host", "h"), ("Cookie", "s=alice")], b"").status, 200);
    assert_eq!(server.count(), before + 1, "another client address");
    let cached = metric(&gateway, "sluicegate_forward_auth_requests_total{provider=\"sso\",result=\"cached\"}");
    let admitted = metric(&gateway, "sluicegate_forward_auth_requests_total{provider=\"sso\",result=\"admitted\"}");
    assert_eq!((cached, admitted), (3.0, 7.0));
}

#[test]
fn server_is_not_told_what_the_key_of_the_cache_lacks() {
    let (server, upstream) = (session_server(), Upstream::start());
    let keys = "cache = { by = [\"authorization\", \"cookie\", \"method\"], ttl = \"1h\" }";
    let gateway = Gateway::start(&config(&verify_url(&server), keys, &upstream));
    let mut client = gateway.client();
    for (path, calls) in [("/a", 1), ("/b", 1), ("/admin", 1)] {
        assert_eq!(client.get_with(path, &[("Cookie", "s=alice")]).status, 200);
        assert_eq!(server.count(), calls, "{path}");
    }
    let told = server.last();
    for name in ["x-forwarded-uri", "x-forwarded-host", "x-forwarded-for", "x-forwarded-proto", "x-request-id"] {
        assert_eq!(told.headers(name), Vec::<&str>::new(), "{name}");
    }
    assert_eq!(told.headers("x-forwarded-method"), ["GET"]);
    // A cached admission does not apply to a request without the cookie.
    assert_eq!(client.get("/a").status, 401);
    assert_eq!(client.get_with("/a", &[("Authorization", "Bearer x"), ("Cookie", "s=alice")]).status, 200);
    assert_eq!(server.count(), 3, "another Authorization needs another request to the server");
}

#[test]
fn denials_and_admissions_that_must_not_be_stored_are_not_cached() {
    let server = Upstream::responding(|seen| match seen.headers("cookie")[..] {
        ["short"] => response("200 OK", "Cache-Control: max-age=1\r\n"),
        ["no-store"] => response("200 OK", "Cache-Control: private, No-Store\r\n"),
        ["large"] => response("200 OK", &format!("X-User: {}\r\n", "u".repeat(5000))),
        _ => response("403 Forbidden", ""),
    });
    let upstream = Upstream::start();
    let gateway = Gateway::start(&config(&verify_url(&server), CACHE, &upstream));
    let mut client = gateway.client();
    for (cookie, status) in [("no-store", 200), ("large", 200), ("denied", 403)] {
        let before = server.count();
        for _ in 0..3 {
            assert_eq!(client.get_with("/", &[("Cookie", cookie)]).status, status, "{cookie}");
        }
        assert_eq!(server.count(), before + 3, "{cookie}");
    }
    let before = server.count();
    assert_eq!(client.get_with("/", &[("Cookie", "short")]).status, 200);
    assert_eq!(server.count(), before + 1);
    eventually("the admission expires", || {
        assert_eq!(client.get_with("/", &[("Cookie", "short")]).status, 200);
        server.count() > before + 1
    });
}

/// Start a server that delays all responses until the test calls the returned function. Return the server, a counter of
/// its requests, and this function.
fn gated(answer: impl Fn(&Seen, usize) -> Vec<u8> + Send + Sync + 'static) -> (Upstream, Arc<AtomicUsize>, impl Fn()) {
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let (begun, inner) = (Arc::<AtomicUsize>::default(), gate.clone());
    let counter = begun.clone();
    let server = Upstream::responding(move |seen| {
        let number = counter.fetch_add(1, Ordering::SeqCst);
        drop(inner.1.wait_while(inner.0.lock().unwrap(), |open| !*open).unwrap());
        answer(seen, number)
    });
    let open = move || {
        *gate.0.lock().unwrap() = true;
        gate.1.notify_all();
    };
    (server, begun, open)
}

/// Send the same request on several connections. Call `then` after all were sent, and return the responses.
fn concurrently(gateway: &Gateway, clients: usize, then: impl FnOnce()) -> Vec<Reply> {
    let mut connections: Vec<_> = (0..clients).map(|_| gateway.client()).collect();
    for client in &mut connections {
        client.send(b"GET /same HTTP/1.1\r\nHost: a\r\nCookie: s=alice\r\n\r\n");
    }
    then();
    connections.iter_mut().map(|client| client.reply().unwrap()).collect()
}

#[test]
fn concurrent_identical_requests_make_one_call() {
    let (server, begun, open) = gated(|_, _| response("200 OK", "X-User: alice\r\n"));
    let upstream = Upstream::start();
    let keys = format!("{CACHE}\ntimeout = \"20s\"");
    let gateway = Gateway::start(&config(&verify_url(&server), &keys, &upstream));
    // A client that disconnects must not cause failures of the other requests.
    let mut first = gateway.client();
    first.send(b"GET /same HTTP/1.1\r\nHost: a\r\nCookie: s=alice\r\n\r\n");
    eventually("the server has the first request", || begun.load(Ordering::SeqCst) == 1);
    let replies = concurrently(&gateway, 8, || {
        drop(first);
        eventually("the server has a request of another client", || begun.load(Ordering::SeqCst) == 2);
        open();
    });
    assert!(replies.iter().all(|reply| reply.status == 200), "{replies:?}");
    assert_eq!((begun.load(Ordering::SeqCst), upstream.count()), (2, 8));
    assert!(upstream.seen.lock().unwrap().iter().all(|seen| seen.headers("x-user") == ["alice"]));
}

#[test]
fn each_of_concurrent_denied_requests_gets_its_own_response() {
    let (server, begun, open) =
        gated(|_, number| response("302 Found", &format!("Location: /login\r\nSet-Cookie: session={number}\r\n")));
    let upstream = Upstream::start();
    let keys = format!("{CACHE}\ntimeout = \"20s\"");
    let gateway = Gateway::start(&config(&verify_url(&server), &keys, &upstream));
    let replies = concurrently(&gateway, 5, || {
        eventually("the server has the first request", || begun.load(Ordering::SeqCst) >= 1);
        open();
    });
    let mut sessions: Vec<_> = replies.iter().map(|reply| reply.header("set-cookie").unwrap().to_owned()).collect();
    sessions.sort_unstable();
    sessions.dedup();
    assert_eq!(sessions.len(), 5, "two clients got the same session");
}

// === Limits ===

/// Return a configuration with limits that apply before and after authentication, and the routes that use them. The
/// response header `x-plan` of the authentication server selects the tier.
fn limited(server: &Upstream, upstream: &Upstream, redis: &Redis) -> String {
    let window = "algorithm = \"fixed-window\"\nstart = \"first-request\"";
    format!(
        "{}{}[limit.ip]\nby = \"ip\"\nquota = \"6/hour\"\n{window}\n\
         [limit.all]\nby = \"global\"\nquota = \"100/hour\"\n{window}\n\
         [limit.user]\nby = \"auth:x-user\"\nquota = \"2/hour\"\n{window}\ntiers = {{ gold = {{ quota = \"4/hour\" }} }}\n\
         [tiers]\nfrom = \"auth:x-plan\"\n",
        redis.store(),
        config(&verify_url(server), "", upstream)
            .replace("require = [\"sso\"]\n", "require = [\"sso\"]\nlimits = [\"ip\", \"all\", \"user\"]\n"),
    )
}

/// Return the counters of all limits in Redis, sorted.
fn counts(redis: &Redis) -> Vec<u64> {
    let mut counts: Vec<_> = redis.keys().iter().flat_map(|key| redis.states(key)).map(|state| state[1]).collect();
    counts.sort_unstable();
    counts
}

#[test]
fn limits_without_a_credential_are_charged_before_the_server_and_refunded_if_others_deny() {
    let server = Upstream::responding(|seen| match seen.headers("cookie")[..] {
        ["s=gold"] => response("200 OK", "X-User: midas\r\nX-Plan: gold\r\n"),
        ["s=odd"] => response("200 OK", "X-User: odd\r\nX-Plan: unknown\r\n"),
        [cookie] => response("200 OK", &format!("X-User: {}\r\n", &cookie[2..])),
        [] | [_, ..] => response("401 Unauthorized", ""),
    });
    let (upstream, redis) = (Upstream::start(), Redis::start());
    let gateway = Gateway::start(&limited(&server, &upstream, &redis));
    let mut client = gateway.client();
    let mut get = |cookie: &str| client.get_with("/", &[("Cookie", cookie)]);
    let remaining = |reply: &Reply| ["ip", "all", "user"].map(|limit| reply.remaining(limit));
    assert_eq!(remaining(&get("s=alice")), [5, 99, 1]);
    assert_eq!(remaining(&get("s=alice")), [4, 98, 0]);
    for _ in 0..3 {
        let denied = get("s=alice");
        denied.assert_problem(429, "the limit of the user");
        assert_eq!(denied.json()["violated-policies"], json!(["user"]));
        assert_eq!((denied.remaining("user"), counts(&redis)), (0, vec![2, 2, 2]), "the address is refunded");
    }
    assert_eq!(upstream.count(), 2);
    // The server's response selects the tier. For an unknown tier, the default quota applies.
    assert_eq!(remaining(&get("s=gold")), [3, 97, 3]);
    assert_eq!(remaining(&get("s=odd")), [2, 96, 1]);
    assert_eq!(counts(&redis), [1, 1, 2, 4, 4]);
    // A request that the server denies stays charged to the limit of the address, but not to limits that clients share.
    let calls = server.count();
    for _ in 0..2 {
        assert_eq!(client.get("/").status, 401);
    }
    assert_eq!((counts(&redis), server.count()), (vec![1, 1, 2, 4, 6], calls + 2));
    let limited = client.get("/");
    limited.assert_problem(429, "the limit of the address");
    assert_eq!(limited.json()["violated-policies"], json!(["ip"]));
    assert_eq!((counts(&redis), server.count()), (vec![1, 1, 2, 4, 6], calls + 2), "the server gets no request");
}

#[test]
fn client_over_its_limit_costs_the_server_one_call_per_second() {
    let server = Upstream::responding(|seen| match seen.headers("cookie")[..] {
        ["s=ended"] | [] => response("401 Unauthorized", ""),
        [cookie, ..] => response("200 OK", &format!("X-User: {}\r\n", &cookie[2..])),
    });
    let (upstream, redis) = (Upstream::start(), Redis::start());
    let limits =
        "[limit.ip]\nby = \"ip\"\nquota = \"1000/hour\"\n[limit.user]\nby = \"auth:x-user\"\nquota = \"2/hour\"\n";
    let config = config(&verify_url(&server), "", &upstream)
        .replace("require = [\"sso\"]\n", "require = [\"sso\"]\nlimits = [\"ip\", \"user\"]\n");
    for store in [String::new(), redis.store()] {
        let gateway = Gateway::start(&format!("{store}{config}{limits}"));
        let mut client = gateway.client();
        let mut requests = 0;
        // Each request has another URI.
        let mut get = |cookie: &str| {
            requests += 1;
            client.get_with(&format!("/{requests}?n={requests}"), &[("Cookie", cookie)])
        };
        assert_eq!([get("s=alice").status, get("s=alice").status], [200, 200]);
        let (calls, start) = (server.count(), monotonic());
        for _ in 0..50 {
            let denied = get("s=alice");
            denied.assert_problem(429, "the limit of the user");
            assert_eq!(denied.json()["violated-policies"], json!(["user"]));
            assert_eq!(denied.remaining("user"), 0);
        }
        let most = (monotonic() - start).as_secs() as usize + 2;
        assert!(server.count() - calls <= most, "fault 80: {} calls, at most {most}", server.count() - calls);
        let bob = get("s=bob");
        assert_eq!((bob.status, bob.remaining("ip")), (200, 997), "denied requests are not charged to the address");
        assert_eq!(get("s=ended").status, 401);
    }
}

#[test]
fn client_over_its_token_budget_costs_the_server_one_call_per_second() {
    let server = session_server();
    let usage = r#"{"usage":{"prompt_tokens":40,"completion_tokens":50}}"#;
    let upstream = Upstream::responding(move |_| {
        let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: ";
        format!("{head}{}\r\n\r\n{usage}", usage.len()).into_bytes()
    });
    let limit =
        "[limit.tokens]\nby = \"auth:x-user\"\nquota = \"100/day\"\nunit = \"tokens\"\ncost = { llm = \"auto\" }\n";
    let config = config(&verify_url(&server), "", &upstream)
        .replace("require = [\"sso\"]\n", "require = [\"sso\"]\nlimits = [\"tokens\"]\n");
    let gateway = Gateway::start(&format!("{config}{limit}"));
    let mut client = gateway.client();
    let mut post = |n: usize, cookie: &str, body: &str| {
        client.request("POST", &format!("/v1/chat/completions?n={n}"), &[("Cookie", cookie)], body.as_bytes())
    };
    let chat = r#"{"model":"m","max_tokens":60,"messages":[{"role":"user","content":"hello"}]}"#;
    assert_eq!(post(0, "s=alice", chat).status, 200);
    eventually("the usage is settled", || post(0, "s=alice", chat).status == 429);
    let (calls, start) = (server.count(), monotonic());
    for n in 0..50 {
        assert_eq!(post(n, "s=alice", chat).status, 429);
    }
    let most = (monotonic() - start).as_secs() as usize + 2;
    assert!(server.count() - calls <= most, "fault 80: {} calls, at most {most}", server.count() - calls);
    assert_eq!(post(1, "s=alice", "{").status, 400, "a body that cannot be read is rejected after the authentication");
    assert_eq!((post(1, "", "{").status, post(1, "s=bob", chat).status), (401, 200));
}

#[test]
fn client_over_its_limit_is_verified_again_when_the_limit_admits_it() {
    let is_ended = Arc::new(AtomicUsize::new(0));
    let ended = is_ended.clone();
    let server = Upstream::responding(move |_| match ended.load(Ordering::Relaxed) {
        0 => response("200 OK", "X-User: alice\r\n"),
        _ => response("401 Unauthorized", ""),
    });
    let upstream = Upstream::start();
    let limits = "[limit.user]\nby = \"auth:x-user\"\nquota = \"10/s\"\nburst = 1\n";
    let config = config(&verify_url(&server), "", &upstream)
        .replace("require = [\"sso\"]\n", "require = [\"sso\"]\nlimits = [\"user\"]\n");
    let gateway = Gateway::start(&format!("{config}{limits}"));
    let mut client = gateway.client();
    let mut status = || client.get_with("/", &[("Cookie", "s=alice")]).status;
    eventually("the limit denies", || status() == 429);
    is_ended.store(1, Ordering::Relaxed);
    eventually("the limit admits the request, but the server does not", || status() == 401);
    assert_eq!(status(), 401, "no request is admitted without the server");
}

#[test]
fn body_is_read_before_the_server_only_for_limits_without_a_credential() {
    let server = Upstream::responding(|seen| match seen.headers("cookie")[..] {
        [_] => response("200 OK", "X-User: alice\r\n"),
        [] | [_, ..] => response("401 Unauthorized", ""),
    });
    let upstream = Upstream::start();
    let limits = "[limit.ip]\nby = \"ip\"\nquota = \"5/hour\"\n\
                  [limit.body]\nby = [\"auth:x-user\", \"json:/model\"]\nquota = \"9/hour\"\n\
                  [limit.early]\nby = [\"ip\", \"json:/model\"]\nquota = \"9/hour\"\n";
    let routes = ["late", "early"].map(|name| {
        let limits = if name == "late" { "\"ip\", \"body\"" } else { "\"early\", \"body\"" };
        format!(
            "[[route]]\nname = \"{name}\"\npath = \"/{name}\"\nrequire = [\"sso\"]\nlimits = [{limits}]\n\
             respond = {{ status = 200 }}\n"
        )
    });
    let gateway =
        Gateway::start(&format!("{}{limits}{}", config(&verify_url(&server), "", &upstream), routes.concat()));
    let post = |path: &str, cookie: &[(&str, &str)], body: &str| {
        gateway.client().request("POST", path, cookie, body.as_bytes())
    };
    let (session, good) = ([("Cookie", "s=1")], "{\"model\":\"m\"}");
    assert_eq!(post("/late", &[], "{").status, 401, "the body of a request that gets 401 is not parsed");
    let admitted = post("/late", &session, good);
    assert_eq!((admitted.status, admitted.remaining("ip"), admitted.remaining("body")), (200, 3, 8));
    let invalid = post("/late", &session, "{");
    invalid.assert_problem(400, "is not JSON");
    let admitted = post("/late", &session, good);
    assert_eq!((admitted.status, admitted.remaining("ip")), (200, 2), "an invalid body is refunded");
    for _ in 0..2 {
        assert_eq!(post("/late", &session, good).status, 200);
    }
    assert_eq!(post("/late", &session, "{").status, 429, "the limit of the address denies without parsing the body");
    assert_eq!(post("/early", &[], "{").status, 400, "a limit that needs no credential needs the body");
    assert_eq!(post("/early", &[], good).status, 401);
    assert_eq!(post("/early", &session, good).status, 200);
}

#[test]
fn cached_admission_is_checked_in_one_call() {
    let server = Upstream::responding(|seen| match seen.headers("cookie")[..] {
        [cookie] => response("200 OK", &format!("X-User: {}\r\nX-Plan: gold\r\n", &cookie[2..])),
        _ => response("401 Unauthorized", ""),
    });
    let (upstream, redis) = (Upstream::start(), Redis::start());
    let text =
        limited(&server, &upstream, &redis).replace("kind = \"forward\"\n", &format!("kind = \"forward\"\n{CACHE}\n"));
    let gateway = Gateway::start(&with_admin(&text));
    let mut client = gateway.client();
    let mut get = |expected_calls: f64, what: &str| {
        let calls = || metric(&gateway, "sluicegate_store_calls_total");
        let before = calls();
        let reply = client.get_with("/", &[("Cookie", "s=midas")]);
        assert_eq!(calls() - before, expected_calls, "{what}: {reply:?}");
        reply
    };
    let remaining = |reply: &Reply| ["ip", "all", "user"].map(|limit| reply.remaining(limit));
    assert_eq!(remaining(&get(2.0, "not cached")), [5, 99, 3]);
    for left in (0..3).rev() {
        assert_eq!(remaining(&get(1.0, "cached")), [2 + left, 96 + left, left]);
        assert_eq!(upstream.last().headers("x-user"), ["midas"]);
    }
    let denied = get(1.0, "denied");
    assert_eq!((denied.status, &denied.json()["violated-policies"]), (429, &json!(["user"])));
    assert_eq!(counts(&redis), [4, 4, 4], "no limit is charged, so that nothing is refunded");
    assert_eq!(get(0.0, "the denial cache").status, 429);
    assert_eq!(server.count(), 1);
    // For other clients of the same address, the gateway calls the server.
    assert_eq!(gateway.get("/").status, 401);
    assert_eq!(counts(&redis), [4, 4, 5]);
}

#[test]
fn concurrent_requests_are_charged_exactly() {
    let (server, upstream, redis) = (session_server(), Upstream::start(), Redis::start());
    let text = limited(&server, &upstream, &redis).replace("quota = \"6/hour\"", "quota = \"1000/hour\"");
    let text = text.replace("quota = \"2/hour\"", "quota = \"50/hour\"");
    let gateway = Gateway::start(&text);
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    let mut client = gateway.client();
                    (0..25).map(|_| client.get_with("/", &[("Cookie", "s=alice")]).status).collect::<Vec<_>>()
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let admitted = statuses.iter().filter(|status| **status == 200).count();
    assert_eq!((admitted, statuses.iter().filter(|status| **status == 429).count()), (50, 150));
    assert_eq!(counts(&redis), [50, 50, 50], "150 charges of the address were refunded");
}

#[test]
fn permits_of_both_calls_are_held_until_the_response_ends_and_released_if_denied() {
    let server = session_server();
    let (upstream, begun, open) = gated(|_, _| response("200 OK", ""));
    let redis = Redis::start();
    let text = format!(
        "{}{}[limit.address]\nby = \"ip\"\nalgorithm = \"concurrency\"\nquota = \"2\"\n\
         [limit.user]\nby = \"auth:x-user\"\nalgorithm = \"concurrency\"\nquota = \"1\"\n",
        redis.store(),
        config(&verify_url(&server), "", &upstream)
            .replace("require = [\"sso\"]\n", "require = [\"sso\"]\nlimits = [\"address\", \"user\"]\n"),
    );
    let gateway = Gateway::start(&text);
    let mut first = gateway.client();
    first.send(b"GET / HTTP/1.1\r\nHost: a\r\nCookie: s=alice\r\n\r\n");
    eventually("the first is forwarded", || begun.load(Ordering::SeqCst) == 1);
    // If a permit were not released, the limit of the address would deny all further requests.
    for _ in 0..3 {
        eventually("the permit of the address is released", || {
            let denied = gateway.client().get_with("/", &[("Cookie", "s=alice")]);
            denied.json()["violated-policies"] == json!(["user"])
        });
        eventually("the permit is also released if the server denies", || gateway.get("/").status == 401);
    }
    std::thread::scope(|scope| {
        // Repeat the request, because released permits count until the release has reached Redis.
        let second = scope.spawn(|| {
            let mut statuses = std::iter::repeat_with(|| gateway.client().get_with("/", &[("Cookie", "s=bob")]).status);
            statuses.find(|status| *status != 429)
        });
        eventually("the second is forwarded", || begun.load(Ordering::SeqCst) == 2);
        let third = gateway.client().get_with("/", &[("Cookie", "s=carol")]);
        assert_eq!(third.json()["violated-policies"], json!(["address"]));
        open();
        assert_eq!((first.reply().unwrap().status, second.join().unwrap()), (200, Some(200)));
    });
    eventually("all permits are released", || gateway.client().get_with("/", &[("Cookie", "s=alice")]).status == 200);
}

#[test]
fn costs_of_responses_and_refunds_are_settled_for_both_calls() {
    let server = session_server();
    let upstream = Upstream::responding(|seen| match seen.target() {
        "/fail" => response("500 Internal Server Error", "X-Used: 7\r\n"),
        _ => response("200 OK", "X-Used: 7\r\n"),
    });
    let redis = Redis::start();
    let window = "algorithm = \"fixed-window\"\nstart = \"first-request\"\nquota = \"100/hour\"";
    let text = format!(
        "{}{}[limit.a]\nby = \"ip\"\n{window}\nrefund_on = [\"5xx\"]\n[limit.b]\nby = \"ip\"\n{window}\ncost.response_header = \"x-used\"\n\
         [limit.c]\nby = \"auth:x-user\"\n{window}\nrefund_on = [\"5xx\"]\n[limit.d]\nby = \"auth:x-user\"\n{window}\n\
         cost.response_header = \"x-used\"\n",
        redis.store(),
        config(&verify_url(&server), "", &upstream)
            .replace("require = [\"sso\"]\n", "require = [\"sso\"]\nlimits = [\"a\", \"c\", \"b\", \"d\"]\n"),
    );
    let gateway = Gateway::start(&text);
    let mut client = gateway.client();
    let mut get = |path: &str| {
        let reply = client.get_with(path, &[("Cookie", "s=alice")]);
        ["a", "b", "c", "d"].map(|limit| reply.remaining(limit))
    };
    assert_eq!(get("/"), [99, 93, 99, 93]);
    assert_eq!(get("/fail"), [99, 86, 99, 86], "refunded, and charged for the response");
    assert_eq!(get("/"), [98, 79, 98, 79]);
    // For limits with `cost.response_header`, a request that the authentication server denies costs at least 1.
    assert_eq!(gateway.get("/").status, 401);
    eventually("the denied request is charged", || counts(&redis) == [2, 3, 21, 22]);
}

#[test]
fn unreachable_store_follows_on_store_error_after_the_server_admitted() {
    let (server, upstream, redis) = (session_server(), Upstream::start(), Redis::start());
    let text = limited(&server, &upstream, &redis)
        .replace("by = \"auth:x-user\"\n", "by = \"auth:x-user\"\non_store_error = \"deny\"\n");
    let gateway = Gateway::start(&text);
    assert_eq!(gateway.client().get_with("/", &[("Cookie", "s=alice")]).status, 200);
    drop(redis);
    let reply = gateway.client().get_with("/", &[("Cookie", "s=alice")]);
    reply.assert_problem(503, "the limit of the user fails closed");
}

#[test]
fn explain_says_that_the_server_decides() {
    let (server, upstream) = (session_server(), Upstream::start());
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("gateway.toml");
    let listener = "[limit.ip]\nby = \"ip\"\nquota = \"9/hour\"\n[[listener]]\naddress = \"127.0.0.1:0\"\n";
    let text = config(&verify_url(&server), "", &upstream)
        .replace("require = [\"sso\"]\n", "require = [\"sso\"]\nlimits = [\"ip\"]\n");
    std::fs::write(&path, text + listener).unwrap();
    let explain = |arguments: &[&str]| {
        let mut command = binary();
        command.args(["explain", "--config", path.to_str().unwrap(), "GET", "http://a/x"]).args(arguments);
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    };
    let text = explain(&[]);
    assert!(text.contains("sso  forward: pending: the provider's server decides; explain does not call it"), "{text}");
    assert!(text.contains("Response: from the authentication server, unless it admits the request"), "{text}");
    let report: Value = serde_json::from_str(&explain(&["--json"])).unwrap();
    assert_eq!(report["authentication"][0]["result"], "pending");
    assert_eq!(
        (&report["response"]["source"], &report["response"]["status"]),
        (&json!("authentication-server"), &Value::Null)
    );
    assert_eq!(server.count(), 0);
}
