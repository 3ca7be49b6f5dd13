//! CORS: preflight requests, and the CORS headers of all responses of a route with a CORS policy.

use std::io::Write;
use std::net::SocketAddr;

use http::Request;

use crate::support::admin_listener;
use crate::support::admin_listener::metric;
use crate::support::client::{Client, Reply};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::http2;
use crate::support::http2::Answer;
use crate::support::redis::Redis;
use crate::support::reload::{reloads, with_admin};
use crate::support::upstream::Upstream;

const APP: &str = "https://app.example.com";
const EVIL: &str = "https://evil.test";
const ORIGIN: (&str, &str) = ("origin", APP);

/// Return all values of a header.
fn values<'r>(reply: &'r Reply, name: &str) -> Vec<&'r str> {
    reply.headers.iter().filter(|(key, _)| key == name).map(|(_, value)| value.as_str()).collect()
}

/// Return the CORS headers and `Vary` of a response, sorted by name.
fn cors_headers(reply: &Reply) -> Vec<(&str, &str)> {
    let is_cors = |name: &str| name.starts_with("access-control-") || name == "vary";
    let headers = reply.headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    let mut headers: Vec<_> = headers.filter(|(name, _)| is_cors(name)).collect();
    headers.sort_unstable();
    headers
}

/// Send a request over HTTP/2. Return the response as a [`Reply`], like a response over HTTP/1.1.
fn over_http2(address: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)]) -> Reply {
    let mut request = Request::builder().method(method).uri(format!("http://gateway.test{path}"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let answers = http2::ask(address, [request.body(&b""[..]).unwrap()]);
    let Some(Answer::Response(status, headers, body)) = answers.into_iter().next() else { panic!("no response") };
    let headers = headers.iter().map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()));
    Reply { status: status.as_u16(), headers: headers.collect(), body: body.to_vec() }
}

/// Send a request over HTTP/1.1 and over HTTP/2. Both responses must have the same status and the same CORS headers.
#[track_caller]
fn ask(gateway: &Gateway, method: &str, path: &str, headers: &[(&str, &str)]) -> Reply {
    let reply = gateway.client().request(method, path, headers, b"");
    let other = over_http2(gateway.address, method, path, headers);
    assert_eq!((reply.status, cors_headers(&reply)), (other.status, cors_headers(&other)), "{method} {path}");
    reply
}

fn preflight(gateway: &Gateway, path: &str, origin: &str, method: &str) -> Reply {
    ask(gateway, "OPTIONS", path, &[("origin", origin), ("access-control-request-method", method)])
}

const PREFLIGHT_VARY: &str = "Access-Control-Request-Method, Access-Control-Request-Headers";

#[test]
fn preflight_is_answered_without_charge_credential_and_upstream() {
    let upstream = Upstream::start();
    let gateway = Gateway::start(&format!(
        "[log]\nformat = \"json\"\naccess = \"access.log\"\n\
         [auth.keys]\nkind = \"api-key\"\non_unknown = \"accept\"\n\
         [limit.ip]\nby = \"ip\"\nquota = \"5/day\"\nalgorithm = \"fixed-window\"\n\
         [limit.key]\nby = \"api-key\"\nquota = \"5/day\"\nalgorithm = \"fixed-window\"\n\
         [upstream.u]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"items\"\npath = \"/items/{{id}}\"\nmethods = [\"GET\", \"PUT\"]\nupstream = \"u\"\n\
         identify = [\"keys\"]\nlimits = [\"ip\", \"key\"]\nmax_body = \"10B\"\n\
         cors = {{ origins = [\"{APP}\"], headers = [\"x-api-key\", \"content-type\"], credentials = true, max_age = \"10m\" }}\n",
        upstream.url()
    ));
    let vary = format!("Origin, {PREFLIGHT_VARY}");
    for _ in 0..10 {
        let reply = preflight(&gateway, "/items/7", APP, "PUT");
        assert_eq!((reply.status, reply.body.len()), (204, 0));
        let expected = [
            ("access-control-allow-credentials", "true"),
            ("access-control-allow-headers", "x-api-key, content-type"),
            ("access-control-allow-methods", "GET, PUT"),
            ("access-control-allow-origin", APP),
            ("access-control-max-age", "600"),
            ("vary", &*vary),
        ];
        assert_eq!(cors_headers(&reply), expected);
        assert_eq!((reply.header("ratelimit"), reply.header("proxy-status")), (None, None), "{reply:?}");
    }
    assert_eq!(upstream.count(), 0);
    // The body limit of the route does not apply to preflights.
    let headers = [ORIGIN, ("access-control-request-method", "PUT")];
    let reply = gateway.client().request("OPTIONS", "/items/7", &headers, b"longer than ten bytes");
    assert_eq!(reply.status, 204);
    let reply = gateway.client().get_with("/items/7", &[ORIGIN, ("x-api-key", "k")]);
    assert_eq!((reply.status, reply.remaining("ip"), reply.remaining("key")), (200, 4, 4), "{reply:?}");
    eventually("the requests are logged", || {
        std::fs::read_to_string(gateway.directory().join("access.log")).is_ok_and(|log| log.lines().count() == 22)
    });
    let log = std::fs::read_to_string(gateway.directory().join("access.log")).unwrap();
    let first: serde_json::Value = serde_json::from_str(log.lines().next().unwrap()).unwrap();
    assert_eq!((&first["outcome"], &first["route"]), (&"preflight".into(), &"items".into()), "{first}");
    assert_eq!((&first["client"], &first["limits"]), (&"127.0.0.1".into(), &serde_json::Value::Null), "{first}");
}

#[test]
fn private_network_is_allowed_where_asked_and_configured() {
    let route = |name: &str, more: &str| {
        format!(
            "[[route]]\nname = \"{name}\"\npath = \"/{name}\"\nrespond = {{ status = 200 }}\n\
             cors = {{ origins = [\"{APP}\"]{more} }}\n"
        )
    };
    let gateway = Gateway::start(&(route("open", ", private_network = true") + &route("closed", "")));
    let asked = ("access-control-request-private-network", "true");
    let method = ("access-control-request-method", "PUT");
    for (path, origin, asks, expected) in [
        ("/open", APP, true, Some("true")),
        ("/open", APP, false, None),
        ("/open", "https://other.test", true, None),
        ("/closed", APP, true, None),
    ] {
        let headers = [("origin", origin), method, asked];
        let reply = ask(&gateway, "OPTIONS", path, &headers[..if asks { 3 } else { 2 }]);
        let allowed = reply.header("access-control-allow-private-network");
        assert_eq!((reply.status, allowed), (204, expected), "{path} {origin} {asks}");
        let varies = reply.headers.iter().any(|(name, value)| name == "vary" && value.contains("Private-Network"));
        assert_eq!(varies, path == "/open", "{reply:?}");
    }
    let reply = gateway.client().get_with("/open", &[ORIGIN, asked]);
    assert_eq!(reply.header("access-control-allow-private-network"), None, "no preflight: {reply:?}");
}

#[test]
fn flood_of_preflights_costs_no_store_call_and_is_bounded_by_connections() {
    const CONNECTIONS: usize = 8;
    let (upstream, server, redis) = (Upstream::start(), Upstream::start(), Redis::start());
    let config = format!(
        "[server]\nmax_connections_per_ip = {CONNECTIONS}\n{}[auth.sso]\nkind = \"forward\"\nurl = \"{}\"\n\
         [limit.ip]\nby = \"ip\"\nquota = \"5/day\"\nalgorithm = \"fixed-window\"\n\
         [limit.all]\nby = \"global\"\nquota = \"2\"\nalgorithm = \"concurrency\"\n\
         [upstream.u]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"items\"\npath = \"/items/{{id}}\"\nupstream = \"u\"\nrequire = [\"sso\"]\n\
         limits = [\"ip\", \"all\"]\ncors = {{ origins = [\"https://*.example.com\"], methods = [\"*\"], headers = [\"*\"] }}\n",
        redis.store(),
        server.url(),
        upstream.url()
    );
    let gateway = Gateway::start(&admin_listener::with_admin(&config));
    let figures = || {
        let decided = |limit: &str, decision: &str| {
            metric(&gateway, &format!("sluicegate_limit_decisions_total{{limit=\"{limit}\",decision=\"{decision}\"}}"))
        };
        let decisions = ["ip", "all"].map(|limit| decided(limit, "allowed") + decided(limit, "denied"));
        (metric(&gateway, "sluicegate_store_calls_total"), decisions, redis.keys().len())
    };
    let flood = |mut client: Client, thread: usize| {
        for number in 0..1000 {
            let (origin, name) = (format!("https://{thread}-{number}.example.com"), format!("x-{number}"));
            let headers = [
                ("origin", &*origin),
                ("access-control-request-method", "PUT"),
                ("access-control-request-headers", &name),
            ];
            let reply = client.request("OPTIONS", &format!("/items/{number}"), &headers, b"");
            assert_eq!((reply.status, reply.header("access-control-allow-origin")), (204, Some(&*origin)));
        }
        client
    };
    let clients: Vec<_> = std::thread::scope(|scope| {
        let connections = (0..CONNECTIONS).map(|_| gateway.client());
        let threads: Vec<_> =
            connections.enumerate().map(|(thread, client)| scope.spawn(move || flood(client, thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(figures(), (0.0, [0.0, 0.0], 0));
    assert_eq!((upstream.count(), server.count()), (0, 0));
    gateway.client().assert_closed("more connections than a client may have");
    drop(clients);
    eventually("the connections are closed", || {
        let mut client = gateway.client();
        let sent = client.stream.get_mut().write_all(b"GET /items/7 HTTP/1.1\r\nHost: a\r\n\r\n");
        sent.is_ok() && client.reply().is_some_and(|reply| (reply.status, reply.remaining("ip")) == (200, 4))
    });
}

#[test]
fn preflight_belongs_to_the_route_of_the_requested_method() {
    let upstream = Upstream::responding(|seen| {
        let status = if seen.head.starts_with("OPTIONS") { 299 } else { 200 };
        format!("HTTP/1.1 {status} Own\r\nAccess-Control-Allow-Origin: own\r\nContent-Length: 0\r\n\r\n").into()
    });
    let route = |name: &str, path: &str, rest: &str| {
        format!("[[route]]\nname = \"{name}\"\npath = \"{path}\"\nupstream = \"u\"\n{rest}\n")
    };
    let gateway = Gateway::start(
        &[
            format!("[upstream.u]\nservers = [\"{}\"]\n", upstream.url()),
            route("read", "/x", "methods = [\"GET\"]\ncors = { origins = [\"*\"] }"),
            route("write", "/x", "methods = [\"PUT\"]\ncors = { origins = [\"https://app.example.com\"], methods = [\"*\"], headers = [\"*\"] }"),
            route("other", "/x", "methods = [\"PATCH\"]"),
            route("both", "/both", "cors = { origins = [\"*\"] }"),
            route("own", "/own", ""),
        ]
        .concat(),
    );
    let reply = preflight(&gateway, "/x", EVIL, "GET");
    assert_eq!(values(&reply, "access-control-allow-origin"), ["*"]);
    assert_eq!(values(&reply, "access-control-allow-methods"), ["GET"]);
    assert_eq!(values(&reply, "vary"), [PREFLIGHT_VARY], "all origins get the same response");
    let reply = preflight(&gateway, "/x", APP, "PUT");
    assert_eq!(values(&reply, "access-control-allow-origin"), [APP]);
    assert_eq!(values(&reply, "access-control-allow-methods"), ["PUT"]);
    assert!(values(&reply, "access-control-allow-headers").is_empty(), "none were requested: {reply:?}");
    let requested =
        [ORIGIN, ("access-control-request-method", "PUT"), ("access-control-request-headers", "x-a,authorization")];
    let reply = ask(&gateway, "OPTIONS", "/x", &requested);
    assert_eq!(values(&reply, "access-control-allow-headers"), ["x-a,authorization"]);
    assert_eq!(upstream.count(), 0);
    // No route serves DELETE, and no route with a CORS policy serves PATCH. So these preflights get 405.
    for method in ["DELETE", "PATCH"] {
        let reply = preflight(&gateway, "/x", APP, method);
        reply.assert_problem(405, method);
        assert!(cors_headers(&reply).is_empty(), "{method}: {reply:?}");
    }
    // A CORS policy without `methods` allows only GET, HEAD and POST, which need no preflight. The gateway forwards
    // OPTIONS requests that are not preflights.
    assert_eq!(values(&preflight(&gateway, "/both", EVIL, "PUT"), "access-control-allow-methods"), ["GET, HEAD, POST"]);
    assert_eq!(upstream.count(), 0);
    let plain = ask(&gateway, "OPTIONS", "/both", &[ORIGIN]);
    assert_eq!((plain.status, values(&plain, "access-control-allow-origin")), (299, vec!["*"]));
    // On a route without a CORS policy, the gateway forwards preflights to the upstream and does not change the CORS
    // headers of the response.
    let own = preflight(&gateway, "/own", APP, "PUT");
    assert_eq!((own.status, values(&own, "access-control-allow-origin")), (299, vec!["own"]));
}

#[test]
fn origins_that_are_not_allowed_get_no_cors_headers() {
    let gateway = Gateway::start(&format!(
        "[[route]]\nname = \"r\"\npath = \"/\"\nrespond = {{ status = 200 }}\n\
         cors = {{ origins = [\"{APP}\", \"https://*.example.org\", \"http://localhost:3000\"], methods = [\"PUT\"] }}\n"
    ));
    for (origin, allowed) in [
        (APP, true),
        ("https://a.b.example.org", true),
        ("http://localhost:3000", true),
        ("https://example.org", false),
        ("https://app.example.com:8443", false),
        ("http://app.example.com", false),
        ("https://app.example.com.evil.test", false),
        ("https://evil-example.org", false),
        ("null", false),
        (EVIL, false),
    ] {
        let expected = if allowed { vec![origin] } else { Vec::new() };
        let reply = ask(&gateway, "GET", "/", &[("origin", origin)]);
        assert_eq!((reply.status, values(&reply, "access-control-allow-origin")), (200, expected.clone()), "{origin}");
        assert_eq!(values(&reply, "vary"), ["Origin"], "{origin}");
        let reply = preflight(&gateway, "/", origin, "PUT");
        assert_eq!((reply.status, values(&reply, "access-control-allow-origin")), (204, expected), "{origin}");
        assert_eq!(cors_headers(&reply).len(), if allowed { 3 } else { 1 }, "{reply:?}");
    }
    // A cache could reuse the response to a request without `Origin` for a request with `Origin`. The response
    // therefore needs `Vary: Origin`.
    let reply = ask(&gateway, "GET", "/", &[]);
    assert_eq!(cors_headers(&reply), [("vary", "Origin")]);
}

#[test]
fn every_response_of_the_route_has_the_cors_headers_once() {
    let upstream = Upstream::responding(|seen| {
        let status = seen.target().strip_prefix("/up/").unwrap_or("200");
        format!(
            "HTTP/1.1 {status} Status\r\nAccess-Control-Allow-Origin: *\r\naccess-control-allow-origin: https://b.test\r\n\
             Access-Control-Allow-Credentials: true\r\nAccess-Control-Expose-Headers: X-Upstream\r\n\
             Vary: Accept-Encoding\r\nContent-Length: 2\r\n\r\nok"
        )
        .into()
    });
    let silent = Upstream::responding(|_| Vec::new());
    let route = |name: &str, path: &str, rest: &str| {
        format!(
            "[[route]]\nname = \"{name}\"\npath = \"{path}\"\n{rest}\n\
             cors = {{ origins = [\"{APP}\"], expose = [\"x-total\", \"retry-after\"] }}\n"
        )
    };
    let gateway = Gateway::start(
        &[
            format!("[upstream.up]\nservers = [\"{}\"]\n", upstream.url()),
            format!("[upstream.silent]\nservers = [\"{}\"]\nresponse_timeout = \"50ms\"\n", silent.url()),
            "[upstream.gone]\nservers = [\"http://127.0.0.1:1\"]\n".to_owned(),
            "[auth.keys]\nkind = \"api-key\"\non_unknown = \"accept\"\n".to_owned(),
            "[limit.once]\nby = \"route\"\nquota = \"1/day\"\nalgorithm = \"fixed-window\"\n".to_owned(),
            "[limit.key]\nby = \"api-key\"\nquota = \"1000/s\"\n".to_owned(),
            route("up", "/up/{status}", "upstream = \"up\""),
            route("limited", "/limited", "upstream = \"up\"\nlimits = [\"once\"]"),
            route(
                "styles",
                "/styles",
                "respond = { status = 200 }\nlimits = [\"once\"]\nratelimit_headers = [\"draft-03\", \"github\"]",
            ),
            route("key", "/key", "upstream = \"up\"\nidentify = [\"keys\"]\nlimits = [\"key\"]"),
            route("denied", "/denied", "upstream = \"up\"\ndeny = [\"127.0.0.1\"]"),
            route("small", "/small", "upstream = \"up\"\nmax_body = \"1B\""),
            route("gone", "/gone", "upstream = \"gone\""),
            route("silent", "/silent", "upstream = \"silent\""),
            route("moved", "/moved", "redirect = { to = \"/\" }"),
            route("respond", "/respond", "respond = { status = 201, body = \"hello\" }"),
        ]
        .concat(),
    );
    // The limit `once` admits only this request, so the next request to `/limited` is denied.
    assert_eq!(gateway.get("/limited").status, 200);
    let exposed = "Retry-After, x-total";
    let of_limits = "RateLimit, RateLimit-Policy, Retry-After, x-total";
    for (method, path, status, expose) in [
        ("GET", "/up/200", 200, exposed),
        ("HEAD", "/respond", 201, exposed),
        ("GET", "/up/404", 404, exposed),
        ("GET", "/up/500", 500, exposed),
        ("GET", "/limited", 429, of_limits),
        ("GET", "/key", 401, of_limits),
        ("GET", "/denied", 403, exposed),
        ("GET", "/gone", 502, exposed),
        ("GET", "/silent", 504, exposed),
        ("GET", "/moved", 308, exposed),
        ("GET", "/respond", 201, exposed),
    ] {
        let mut client = gateway.client();
        let reply = match method {
            "HEAD" => {
                client.send(format!("HEAD {path} HTTP/1.1\r\nHost: h\r\nOrigin: {APP}\r\n\r\n").as_bytes());
                client.head().unwrap()
            }
            _ => ask(&gateway, method, path, &[ORIGIN]),
        };
        assert_eq!(reply.status, status, "{path}: {reply:?}");
        assert_eq!(values(&reply, "access-control-allow-origin"), [APP], "{path}: {reply:?}");
        assert_eq!(values(&reply, "access-control-expose-headers"), [expose], "{path}: {reply:?}");
        assert!(values(&reply, "access-control-allow-credentials").is_empty(), "{path}: {reply:?}");
        let vary = values(&reply, "vary").join(", ");
        let expected = if path.starts_with("/up/") { "Accept-Encoding, Origin" } else { "Origin" };
        assert_eq!(vary, expected, "{path}: {reply:?}");
    }
    let reply = gateway.client().request("POST", "/small", &[ORIGIN], b"two");
    assert_eq!((reply.status, values(&reply, "access-control-allow-origin")), (413, vec![APP]));
    let reply = gateway.client().get_with("/styles", &[ORIGIN]);
    let names = "RateLimit-Limit, RateLimit-Remaining, RateLimit-Reset, X-RateLimit-Limit, X-RateLimit-Remaining, \
                 X-RateLimit-Reset, Retry-After, x-total";
    assert_eq!(values(&reply, "access-control-expose-headers"), [names]);
    // If no route matches, no CORS policy applies.
    assert!(cors_headers(&ask(&gateway, "GET", "/nowhere", &[ORIGIN])).is_empty());
}

#[test]
fn exposed_headers_without_a_policy_follow_those_of_the_upstream() {
    let upstream = Upstream::responding(|_| {
        b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: *\r\nAccess-Control-Expose-Headers: X-Own\r\nContent-Length: 0\r\n\r\n".to_vec()
    });
    let gateway = Gateway::start(&format!(
        "[limit.ip]\nby = \"ip\"\nquota = \"5/day\"\n[upstream.u]\nservers = [\"{}\"]\n\
         [[route]]\nname = \"r\"\npath = \"/\"\nupstream = \"u\"\nlimits = [\"ip\"]\nexpose_headers = true\n",
        upstream.url()
    ));
    let reply = gateway.client().get_with("/", &[ORIGIN]);
    let expected = ["X-Own", "RateLimit, RateLimit-Policy, Retry-After"];
    assert_eq!(values(&reply, "access-control-expose-headers"), expected);
}

#[test]
fn policy_changes_with_the_configuration() {
    let config = |origin: &str| {
        format!("[[route]]\nname = \"r\"\npath = \"/\"\nrespond = {{ status = 200 }}\ncors.origins = [\"{origin}\"]\n")
    };
    let gateway = Gateway::start(&with_admin(&config(APP)));
    let mut client = Client::connect(gateway.address);
    let mut allowed = || client.get_with("/", &[ORIGIN]).header("access-control-allow-origin").map(str::to_owned);
    assert_eq!(allowed().as_deref(), Some(APP));
    reloads(&gateway, &config(EVIL));
    assert_eq!(allowed(), None);
    reloads(&gateway, &config("*"));
    assert_eq!(allowed().as_deref(), Some("*"));
}

#[test]
fn preflight_takes_the_route_of_its_listener() {
    let names = ["one", "two", "three"];
    let listeners: String =
        names.iter().map(|name| format!("[[listener]]\nname = \"{name}\"\naddress = \"127.0.0.1:0\"\n")).collect();
    // On each listener, the same path belongs to another route with another policy. The last listener has no policy.
    let routes: String = names[..2]
        .iter()
        .map(|name| {
            format!(
                "[[route]]\nname = \"{name}\"\npath = \"/x\"\nlisteners = [\"{name}\"]\nmethods = [\"PUT\"]\n\
                 respond = {{ status = 200 }}\ncors = {{ origins = [\"https://{name}.test\"] }}\n"
            )
        })
        .collect();
    let gateway = Gateway::start(&format!(
        "{listeners}{routes}[[route]]\nname = \"any\"\npath = \"/x\"\nrespond = {{ status = 204 }}\n"
    ));
    for (address, listener) in gateway.addresses().into_iter().zip(names) {
        for name in names {
            let origin = format!("https://{name}.test");
            let headers = [("origin", &*origin), ("access-control-request-method", "PUT")];
            let expected = (name == listener && listener != "three").then_some(&*origin);
            for reply in [
                Client::connect(address).request("OPTIONS", "/x", &headers, b""),
                over_http2(address, "OPTIONS", "/x", &headers),
            ] {
                assert_eq!(reply.header("access-control-allow-origin"), expected, "{name} on listener {listener}");
            }
            let reply = Client::connect(address).request("PUT", "/x", &[("origin", &*origin)], b"");
            assert_eq!(reply.header("access-control-allow-origin"), expected, "{name} on listener {listener}");
            assert_eq!(reply.status, if listener == "three" { 204 } else { 200 }, "{listener}");
        }
    }
}
