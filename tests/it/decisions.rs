//! Decisions about requests that other proxies describe (`protocol = "decisions"`): descriptions, responses, and what
//! clients of the proxy may try.

use http::Request;

use crate::support::client::Reply;
use crate::support::gateway::{CONSUMERS, Gateway};
use crate::support::http2;
use crate::support::upstream::Upstream;

const LISTENER: &str = "[[listener]]\naddress = \"127.0.0.1:0\"\nprotocol = \"decisions\"\n";
const TRUST: &str = "[client_ip]\ntrusted_proxies = [\"127.0.0.1\"]\n";

/// Two limits by client: two requests to `/login` per day, and 100 to any other path.
const ROUTES: &str = r#"
[limit.login]
by = "ip"
quota = "2/day"
algorithm = "fixed-window"

[limit.api]
by = "ip"
quota = "100/day"
algorithm = "fixed-window"

[[route]]
name = "login"
path = "/login"
hosts = ["shop.example"]
methods = ["POST"]
limits = ["login"]
respond = { status = 200 }

[[route]]
name = "api"
path = "/{*rest}"
limits = ["api"]
respond = { status = 204 }
"#;

fn start(config: &str) -> Gateway {
    Gateway::start(&format!("{LISTENER}{TRUST}{config}"))
}

/// A request as a proxy describes it.
#[derive(Clone, Copy)]
struct Described<'a> {
    method: &'a str,
    target: &'a str,
    client: &'a str,
    more: &'a [(&'a str, &'a str)],
}

const LOGIN: Described<'_> = Described { method: "POST", target: "/login", client: "192.0.2.1", more: &[] };

/// Asks about a request at each of the endpoints.
const ENDPOINTS: [fn(&Described<'_>, &Gateway) -> Reply; 3] = [
    |described, gateway| described.forwarded(gateway),
    |described, gateway| described.original(gateway),
    |described, gateway| described.own(gateway),
];

impl Described<'_> {
    fn forwarded(&self, gateway: &Gateway) -> Reply {
        self.ask(gateway, "/decide/forwarded", [("X-Forwarded-Method", self.method), ("X-Forwarded-Uri", self.target)])
    }

    fn original(&self, gateway: &Gateway) -> Reply {
        self.ask(gateway, "/decide/original", [("X-Original-Method", self.method), ("X-Original-URI", self.target)])
    }

    fn ask(&self, gateway: &Gateway, path: &str, target: [(&str, &str); 2]) -> Reply {
        let mut headers = target.to_vec();
        headers.extend([("X-Forwarded-Host", "shop.example"), ("X-Forwarded-Proto", "https")]);
        headers.push(("X-Forwarded-For", self.client));
        headers.extend(self.more);
        gateway.client().get_with(path, &headers)
    }

    fn own(&self, gateway: &Gateway) -> Reply {
        let mut headers = vec![("Host", "shop.example"), ("X-Forwarded-Proto", "https")];
        headers.push(("X-Forwarded-For", self.client));
        headers.extend(self.more);
        gateway.client().request(self.method, &format!("/decide/request{}", self.target), &headers, b"")
    }
}

#[test]
fn all_endpoints_charge_the_same_limits_and_answer_with_ratelimit_headers() {
    let gateway = start(ROUTES);
    for (index, ask) in ENDPOINTS.iter().enumerate() {
        let reply = ask(&LOGIN, &gateway);
        if index < 2 {
            assert_eq!((reply.status, reply.text()), (200, ""), "{reply:?}");
            assert_eq!(reply.remaining("login"), 1 - index as u64);
            assert_eq!(reply.header("cache-control"), Some("no-store"));
            assert_eq!(reply.header("x-decision-status"), None);
        } else {
            reply.assert_problem(429, "the limit counts the requests of all endpoints");
            assert_eq!(reply.header("x-decision-status"), Some("429"));
            assert!(reply.header("retry-after").is_some() && reply.header("ratelimit").is_some(), "{reply:?}");
        }
    }
    for ask in ENDPOINTS {
        let other = ask(&Described { client: "192.0.2.2, 127.0.0.1", ..LOGIN }, &gateway);
        let get = ask(&Described { method: "GET", client: "192.0.2.1", ..LOGIN }, &gateway);
        assert_eq!((get.status, get.text()), (200, ""), "204 of the route is an admission: {get:?}");
        assert!(other.status == 200 || other.status == 429, "{other:?}");
    }
    assert_eq!(Described { client: "192.0.2.2", ..LOGIN }.forwarded(&gateway).status, 429, "two were admitted above");
}

#[test]
fn other_spellings_of_a_path_reach_the_same_limit_or_are_rejected() {
    let gateway = start(ROUTES);
    for (index, ask) in ENDPOINTS.iter().enumerate() {
        let client = format!("192.0.2.{index}");
        let send = |target| ask(&Described { target, client: &client, ..LOGIN }, &gateway).status;
        assert_eq!((send("/a/../login"), send("//login?x=1")), (200, 200));
        for target in ["/login", "/%6cogin", "/./login", "/x/%2e%2e/login", "/../decide/../login"] {
            assert_eq!(send(target), 429, "{target}");
        }
        for target in ["/%2Flogin", "/log%00in", "/a\\..\\login", "/%2"] {
            assert_eq!(send(target), 400, "{target}");
        }
    }
    let targets = ["http://shop.example/login", "*", "login", "/other#/../login", "", "//", "/a b"];
    for (target, status) in targets.iter().zip([400, 400, 400, 400, 400, 200, 400]) {
        assert_eq!(Described { target, ..LOGIN }.forwarded(&gateway).status, status, "{target}");
    }
}

#[test]
fn only_the_headers_of_the_endpoint_describe_the_request() {
    let gateway = start(ROUTES);
    let forged = [
        ("X-Original-Method", "GET"),
        ("X-Original-URI", "/"),
        ("X-Original-URL", "http://shop.example/"),
        ("X-Forwarded-Prefix", "/other"),
        ("X-Forwarded-Port", "1"),
        ("X-Real-IP", "198.51.100.7"),
        ("Forwarded", "for=198.51.100.7"),
        ("X_Forwarded_Uri", "/"),
        ("X-Rewrite-Url", "/"),
        ("X-HTTP-Method-Override", "GET"),
        ("X-Forwarded-Client-Cert", "By=x"),
    ];
    let original = [("X-Forwarded-Method", "GET"), ("X-Forwarded-Uri", "/"), ("X-Forwarded-Prefix", "/p")];
    let statuses = [
        Described { more: &forged, ..LOGIN }.forwarded(&gateway).status,
        Described { more: &original, ..LOGIN }.original(&gateway).status,
        Described { more: &forged, ..LOGIN }.own(&gateway).status,
    ];
    assert_eq!(statuses, [200, 200, 429], "all of them are POST /login of 192.0.2.1");
    for name in ["X-Forwarded-Method", "X-Forwarded-Uri", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-For"] {
        let reply = Described { more: &[(name, "GET")], ..LOGIN }.forwarded(&gateway);
        reply.assert_problem(400, name);
        assert!(reply.text().to_lowercase().contains(&name.to_lowercase()), "{name}: {}", reply.text());
    }
    for (name, value) in [("X-Original-Method", "GET"), ("X-Original-URI", "/")] {
        assert_eq!(Described { more: &[(name, value)], ..LOGIN }.original(&gateway).status, 400, "{name}");
    }
    assert_eq!(gateway.client().get("/decide/elsewhere").status, 404);
    assert_eq!(gateway.client().get("/decide/requests/").status, 404);
    assert!(gateway.log().contains("cannot decide about a request"), "{}", gateway.log());
}

#[test]
fn incomplete_description_is_rejected() {
    let gateway = start(ROUTES);
    let complete = [
        ("X-Forwarded-Method", "POST"),
        ("X-Forwarded-Uri", "/login"),
        ("X-Forwarded-Host", "shop.example"),
        ("X-Forwarded-Proto", "wss"),
        ("X-Forwarded-For", "192.0.2.1"),
    ];
    assert_eq!(gateway.client().get_with("/decide/forwarded", &complete).status, 200);
    for index in 0..complete.len() {
        let mut headers = complete.to_vec();
        let name = headers.remove(index).0;
        gateway.client().get_with("/decide/forwarded", &headers).assert_problem(400, name);
        headers.push((name, ""));
        gateway.client().get_with("/decide/forwarded", &headers).assert_problem(400, name);
    }
    for (name, value) in [
        ("X-Forwarded-Proto", "ftp"),
        ("X-Forwarded-For", "unknown"),
        ("X-Forwarded-For", "192.0.2.1,"),
        ("X-Forwarded-Host", "shop.example/x"),
        ("X-Forwarded-Host", "a@shop.example"),
        ("X-Forwarded-Host", "shop.example?x"),
        ("X-Forwarded-Method", "post"),
        ("X-Forwarded-Method", "P OST"),
    ] {
        let headers = complete.map(|header| if header.0 == name { (name, value) } else { header });
        assert_eq!(gateway.client().get_with("/decide/forwarded", &headers).status, 400, "{name}: {value}");
    }
}

#[test]
fn only_trusted_and_allowed_proxies_get_decisions() {
    let untrusted = Gateway::start(&format!("{LISTENER}[client_ip]\ntrusted_proxies = [\"192.0.2.0/24\"]\n{ROUTES}"));
    LOGIN.forwarded(&untrusted).assert_problem(403, "the peer is no trusted proxy");
    let denied = Gateway::start(&format!("{LISTENER}deny = [\"127.0.0.1\"]\n{TRUST}{ROUTES}"));
    LOGIN.forwarded(&denied).assert_problem(403, "the proxy may not use the listener");
    let allowed = Gateway::start(&format!("{LISTENER}allow = [\"127.0.0.1\"]\n{TRUST}{ROUTES}"));
    assert_eq!(LOGIN.forwarded(&allowed).status, 200, "`allow` concerns the proxy, not its client");
    let access =
        "[[route]]\nname = \"r\"\npath = \"/{*rest}\"\ndeny = [\"192.0.2.0/24\"]\nrespond = { status = 200 }\n";
    let route = start(access);
    assert_eq!(LOGIN.forwarded(&route).status, 403, "`deny` of a route concerns the client");
    assert_eq!(Described { client: "198.51.100.1", ..LOGIN }.forwarded(&route).status, 200);
}

/// Routes with API keys, an authentication server, and header rules.
fn identities(server: &Upstream) -> String {
    format!(
        r#"
[auth.keys]
kind = "api-key"
consumers = "consumers.toml"

[auth.sso]
kind = "forward"
url = "{}/verify"
response_headers = ["x-login"]

[[route]]
name = "keys"
path = "/keys"
identify = ["keys"]
request_headers = {{ set = {{ x-user = "{{consumer}}", x-client = "{{client_ip}} {{scheme}}" }}, remove = ["x-internal"] }}
respond = {{ status = 200 }}

[[route]]
name = "sso"
path = "/sso"
require = ["sso"]
respond = {{ status = 200 }}

[[route]]
name = "moved"
path = "/moved"
redirect = {{ to = "https://new.example/", status = 301 }}

[[route]]
name = "gone"
path = "/gone"
respond = {{ status = 410, body = "gone" }}
"#,
        server.url()
    )
}

const IDENTITY: [&str; 4] = ["x-user", "x-client", "x-internal", "x-login"];

fn identity(reply: &Reply) -> [Option<&str>; 4] {
    IDENTITY.map(|name| reply.header(name))
}

#[test]
fn admissions_have_all_identity_headers_of_the_listener() {
    let server = Upstream::responding(|seen| {
        assert_eq!(seen.headers("x-forwarded-uri"), ["/sso?a=1"]);
        assert_eq!(seen.headers("x-forwarded-for"), ["192.0.2.1"]);
        match seen.headers("cookie")[..] {
            ["s=alice"] => b"HTTP/1.1 200 OK\r\nX-Login: alice\r\nContent-Length: 0\r\n\r\n".to_vec(),
            ["s=both"] => b"HTTP/1.1 200 OK\r\nX-Login: one\r\nX-Login: two\r\nContent-Length: 0\r\n\r\n".to_vec(),
            _ => b"HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 0\r\n\r\n".to_vec(),
        }
    });
    let config = format!("{LISTENER}{TRUST}{}", identities(&server));
    let gateway = Gateway::start_with(&config, &[("consumers.toml", CONSUMERS)]);
    let ask = |target, more| Described { method: "GET", target, client: "192.0.2.1", more }.forwarded(&gateway);
    let forged: &[(&str, &str)] = &[("X-User", "root"), ("X-User", "admin"), ("X-Login", "root"), ("X-Internal", "1")];
    let client = "192.0.2.1 https";
    let known = [&[("X-Api-Key", "demo-key")], forged].concat();
    let reply = ask("/keys", &known);
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(identity(&reply), [Some("demo"), Some(client), Some(""), Some("")]);
    assert_eq!(identity(&ask("/keys", forged)), [Some(""), Some(client), Some(""), Some("")]);
    let admitted = ask("/sso?a=1", &[("Cookie", "s=alice"), ("X-Login", "root")]);
    assert_eq!((admitted.status, identity(&admitted)), (200, [Some(""), Some(""), Some(""), Some("alice")]));
    let both = ask("/sso?a=1", &[("Cookie", "s=both"), ("X-Login", "root")]);
    let logins: Vec<_> = both.headers.iter().filter(|(name, _)| name == "x-login").map(|(_, value)| &**value).collect();
    assert_eq!(logins, ["one", "two"]);
    let login = ask("/sso?a=1", &[("Cookie", "s=")]);
    assert_eq!((login.status, login.header("location")), (302, Some("/login")));
    assert_eq!(login.header("x-decision-status"), Some("302"));
    let moved = ask("/moved", &[]);
    assert_eq!((moved.status, moved.header("location")), (301, Some("https://new.example/")));
    let gone = ask("/gone", &[]);
    assert_eq!((gone.status, gone.text()), (410, "gone"));
    assert_eq!(ask("/unknown", &[]).status, 404);
    let own = Described { method: "GET", target: "/keys", client: "192.0.2.1", more: &known }.own(&gateway);
    assert_eq!(own.header("x-envoy-auth-headers-to-remove"), Some("x-api-key,x-internal,x-login"));
    assert_eq!(identity(&own), [Some("demo"), Some(client), Some(""), Some("")]);
}

#[test]
fn aliases_of_identity_headers_are_rejected() {
    let server = Upstream::start();
    let config = format!("{LISTENER}{TRUST}{}", identities(&server));
    let gateway = Gateway::start_with(&config, &[("consumers.toml", CONSUMERS)]);
    for name in ["X_User", "X.User", "x-us!er", "X_Login", "x~internal"] {
        let request = Described { method: "GET", target: "/keys", client: "192.0.2.1", more: &[(name, "root")] };
        let status = if name == "x-us!er" { 200 } else { 400 };
        assert_eq!(request.forwarded(&gateway).status, status, "{name}");
        assert_eq!(request.own(&gateway).status, status, "{name}");
    }
}

#[test]
fn denied_status_replaces_all_statuses_but_401_and_403() {
    let server = Upstream::start();
    let config =
        format!("{LISTENER}denied_status = 403\n{TRUST}{}{ROUTES}", identities(&server).replace("identify", "require"));
    let gateway = Gateway::start_with(&config, &[("consumers.toml", CONSUMERS)]);
    for expected in [200, 200, 403] {
        let reply = LOGIN.original(&gateway);
        assert_eq!(reply.status, expected);
        assert_eq!(reply.header("x-decision-status"), (expected == 403).then_some("429"));
    }
    let keys = Described { target: "/keys", ..LOGIN }.original(&gateway);
    assert_eq!((keys.status, keys.header("x-decision-status")), (401, Some("401")));
    assert!(keys.header("www-authenticate").is_some(), "{keys:?}");
    let bad = Described { target: "login", ..LOGIN }.original(&gateway);
    assert_eq!((bad.status, bad.header("x-decision-status")), (403, Some("400")));
}

#[test]
fn decisions_work_over_http2_and_need_no_body() {
    let gateway = start(ROUTES);
    let request = |method: &str| {
        let request = Request::builder().method(method).uri("http://shop.example/decide/request/login");
        let request = request.header("x-forwarded-proto", "http").header("x-forwarded-for", "192.0.2.1");
        request.body(&b""[..]).unwrap()
    };
    let answers = http2::ask(gateway.address, [request("POST"), request("POST"), request("POST"), request("HEAD")]);
    let mut statuses: Vec<_> = answers.iter().map(|answer| answer.status().unwrap()).collect();
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 200, 200, 429]);
    let mut client = gateway.client();
    let headers = [
        ("X-Forwarded-Method", "GET"),
        ("X-Forwarded-Uri", "/"),
        ("X-Forwarded-Host", "shop.example"),
        ("X-Forwarded-Proto", "http"),
        ("X-Forwarded-For", "192.0.2.1"),
    ];
    for _ in 0..2 {
        let reply = client.request("GET", "/decide/forwarded", &headers, b"the body of the client");
        assert_eq!(reply.status, 200, "the body is discarded, and the connection serves the next request");
    }
}

#[test]
fn preflights_are_authenticated_and_limited_like_other_requests() {
    let config = format!(
        "{LISTENER}{TRUST}[auth.keys]\nkind = \"api-key\"\nconsumers = \"consumers.toml\"\n\
         [limit.day]\nby = \"ip\"\nquota = \"2/day\"\nalgorithm = \"fixed-window\"\n\
         [[route]]\nname = \"keys\"\npath = \"/keys\"\nrequire = [\"keys\"]\nrespond = {{ status = 200 }}\n\
         [[route]]\nname = \"open\"\npath = \"/open\"\nmethods = [\"OPTIONS\"]\nlimits = [\"day\"]\n\
         respond = {{ status = 200 }}\n"
    );
    let gateway = Gateway::start_with(&config, &[("consumers.toml", CONSUMERS)]);
    let preflight = [("Origin", "https://app.example"), ("Access-Control-Request-Method", "GET")];
    for ask in ENDPOINTS {
        let send = |target| ask(&Described { method: "OPTIONS", target, more: &preflight, ..LOGIN }, &gateway).status;
        assert_eq!(send("/keys"), 401);
    }
    let statuses = ENDPOINTS
        .map(|ask| ask(&Described { method: "OPTIONS", target: "/open", more: &preflight, ..LOGIN }, &gateway).status);
    assert_eq!(statuses, [200, 200, 429]);
}

/// A client whose address is that of a trusted proxy sends the header that only proxies may send.
#[test]
fn described_client_at_the_address_of_a_proxy_chooses_no_request_id() {
    let gateway = start(
        "[[route]]\nname = \"r\"\npath = \"/{*rest}\"\n\
         request_headers = { set = { x-id = \"{request_id} {client_ip}\" } }\nrespond = { status = 200 }\n",
    );
    for ask in ENDPOINTS {
        let forged = [("X-Request-Id", "forged"), ("X-Id", "forged")];
        let reply = ask(&Described { client: "127.0.0.1", more: &forged, ..LOGIN }, &gateway);
        let id = reply.header("x-id").unwrap().strip_suffix(" 127.0.0.1").unwrap();
        assert_eq!((reply.status, id.len()), (200, 36), "the gateway generates the id: {reply:?}");
    }
}
